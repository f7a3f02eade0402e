//! A thread with a stack of 1 MB, such as a user's program may have, is enough for any dtype and pass, optimised or not.
//! A program of its own: how large stacks are is the process'.

use candle_core::{DType, Device, Result, Tensor, Var, D};
use candle_softmax::{ops, Softmax};
use std::thread;

fn sums_of_lines(len: usize, dtype: DType) -> Result<()> {
    let scores = Tensor::randn(0f32, 1.0, (16, len.min(8), len), &Device::Cpu)?.to_dtype(dtype)?;
    let scores = Var::from_tensor(&scores)?;
    let builder = Softmax::new().scale(0.5).causal();
    for p in [ops::softmax(&scores, D::Minus1)?, ops::softmax(&scores.t()?, 1)?.t()?, builder.forward(&scores)?] {
        let far = (p.to_dtype(DType::F64)?.sum(D::Minus1)? - 1.0)?.abs()?.max_all()?.to_scalar::<f64>()?;
        assert!(far < 0.01, "{len} {dtype:?}: a line's sum is {far} from 1");
        // Σ p·(g − Σ g·p), with g = 1
        let gradient = p.backward()?.get(&scores).expect("tracked").to_dtype(DType::F64)?;
        let far = gradient.abs()?.max_all()?.to_scalar::<f64>()?;
        assert!(far < 0.01, "{len} {dtype:?}: a gradient is {far} from 0");
    }
    Ok(())
}

#[test]
fn small_stacks() -> Result<()> {
    let each = || {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            [3, 12, 48, 256, 5000].into_iter().try_for_each(|len| sums_of_lines(len, dtype))?;
        }
        Ok(())
    };
    let small = thread::Builder::new().stack_size(1 << 20);
    thread::scope(|scope| small.spawn_scoped(scope, each)?.join().expect("no panic"))
}
