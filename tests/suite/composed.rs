//! The functions out of candle's tensor ops, which a device without kernels has.

use crate::logsumexp;
use crate::support::{check_gradient, check_result, gradient, normal, tensor, values, Op, DTYPES};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_softmax::{ops, testing};

#[test]
fn nothing_is_no_error() -> Result<()> {
    for shape in [(0, 5), (5, 0), (0, 0)] {
        let xs = Var::zeros(shape, DType::F16, &Device::Cpu)?;
        for dim in 0..2 {
            let [softmax, log_softmax, logsumexp] = testing::COMPOSED;
            for ys in [softmax(&xs, dim)?, log_softmax(&xs, dim)?] {
                assert_eq!((ys.dims(), ys.dtype(), ys.track_op()), (xs.dims(), DType::F16, true));
            }
            let (found, of_kernel) = (logsumexp(&xs, dim)?, ops::logsumexp_keepdim(&xs, dim)?);
            assert_eq!((found.dims(), found.dtype()), (of_kernel.dims(), DType::F16));
            let bits = |ys: Tensor| ys.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>();
            assert_eq!(bits(found)?, vec![f32::NEG_INFINITY; of_kernel.elem_count()]);
        }
    }
    Ok(())
}

/// As exact as the kernels, element by element, and as they are with what is not finite.
#[test]
fn agrees_with_the_reference() -> Result<()> {
    let [softmax, log_softmax, logsumexp] = testing::COMPOSED;
    let (shape, count) = ((4, 33, 5), 4 * 33 * 5);
    let plain = normal(count, 3.0, 1);
    // A number here and there; and in the first plane a line of nothing else, along the last and along the second dimension.
    let sprinkled =
        |x: f64| plain.iter().enumerate().map(|(i, &y)| if i % 97 == 0 { x } else { y }).collect::<Vec<_>>();
    let lines_of =
        |x: f64| plain.iter().enumerate().map(|(i, &y)| if i < 5 || (i < 165 && i % 5 == 2) { x } else { y }).collect();
    let inputs = [
        plain.clone(),
        sprinkled(f64::NEG_INFINITY),
        lines_of(f64::NEG_INFINITY),
        sprinkled(f64::INFINITY),
        sprinkled(f64::NAN),
    ];
    for dtype in DTYPES {
        for numbers in &inputs {
            let xs = Var::from_tensor(&tensor(numbers, shape, dtype, &Device::Cpu)?)?;
            for dim in 0..3 {
                let [p, log_p, kept] = [softmax(&xs, dim)?, log_softmax(&xs, dim)?, logsumexp(&xs, dim)?];
                assert!([&p, &log_p, &kept].iter().all(|ys| ys.track_op()));
                check_result(Op::Softmax, &xs, dim, &p)?;
                check_result(Op::LogSoftmax, &xs, dim, &log_p)?;
                logsumexp::check_found(&xs, dim, &kept)?;
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_agree_with_finite_differences() -> Result<()> {
    let (shape, count) = ((2, 5, 3), 30);
    let logits = normal(count, 1.0, 2);
    let weights = tensor(&normal(count, 1.0, 3), shape, DType::F64, &Device::Cpu)?;
    for (function, dim) in testing::COMPOSED.into_iter().flat_map(|function| (0..3).map(move |dim| (function, dim))) {
        let loss = |xs: &Tensor| function(xs, dim)?.broadcast_mul(&weights)?.sum_all();
        let found = values(&gradient(&tensor(&logits, shape, DType::F64, &Device::Cpu)?, loss)?)?;
        let of = |moved: &[f64]| loss(&tensor(moved, shape, DType::F64, &Device::Cpu)?)?.to_scalar::<f64>();
        check_gradient(&found, &logits, &format!("dim {dim}"), of)?;
    }
    Ok(())
}
