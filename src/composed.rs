//! The same functions out of candle's own tensor ops: what runs on Metal, and what the kernels are tested beside.
//!
//! Half precision is widened to f32 first, so that the sums are f32 sums; every step is an op that candle tracks.

use candle_core::{DType, Result, Tensor};

fn widened(xs: &Tensor) -> Result<Tensor> {
    match xs.dtype() {
        DType::F16 | DType::BF16 => xs.to_dtype(DType::F32),
        _ => Ok(xs.clone()),
    }
}

pub(crate) fn softmax(xs: &Tensor, dim: usize) -> Result<Tensor> {
    let wide = widened(xs)?;
    let exp = wide.broadcast_sub(&wide.max_keepdim(dim)?)?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(dim)?)?.to_dtype(xs.dtype())
}

pub(crate) fn log_softmax(xs: &Tensor, dim: usize) -> Result<Tensor> {
    let wide = widened(xs)?;
    let shifted = wide.broadcast_sub(&wide.max_keepdim(dim)?)?;
    let log_sum = shifted.exp()?.sum_keepdim(dim)?.log()?;
    shifted.broadcast_sub(&log_sum)?.to_dtype(xs.dtype())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops;
    use candle_core::{Device, Var};

    /// Beside the kernels, within the bounds of both and the rounding to the dtype.
    #[test]
    fn agrees_with_the_ops() -> Result<()> {
        for (dtype, tolerance) in [(DType::F32, 5e-6), (DType::F64, 1e-12), (DType::F16, 2e-3), (DType::BF16, 1.6e-2)] {
            let xs = Var::from_tensor(&Tensor::randn(0f32, 3., (4, 33, 5), &Device::Cpu)?.to_dtype(dtype)?)?;
            for dim in 0..3 {
                for (composed, op) in [
                    (softmax(&xs, dim)?, ops::softmax(&xs, dim)?),
                    (log_softmax(&xs, dim)?, ops::log_softmax(&xs, dim)?),
                ] {
                    assert_eq!((composed.dtype(), composed.track_op()), (dtype, true));
                    let values = |ys: &Tensor| ys.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
                    for (a, b) in values(&composed)?.iter().zip(values(&op)?) {
                        assert!((a - b).abs() <= tolerance * b.abs() + 1e-6, "{dtype:?} dim {dim}: {a} and {b}");
                    }
                }
            }
        }
        Ok(())
    }
}
