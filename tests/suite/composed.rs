//! The functions out of candle's tensor ops, which a device without kernels has.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_softmax::{ops, testing};

const OPS: [fn(&Tensor, usize) -> Result<Tensor>; 3] =
    [ops::softmax::<usize>, ops::log_softmax::<usize>, ops::logsumexp_keepdim::<usize>];

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

/// Beside the kernels, within the bounds of both and the rounding to the dtype.
#[test]
fn agrees_with_the_kernels() -> Result<()> {
    for (dtype, tolerance) in [(DType::F32, 5e-6), (DType::F64, 1e-12), (DType::F16, 2e-3), (DType::BF16, 1.6e-2)] {
        let xs = Var::from_tensor(&Tensor::randn(0f32, 3., (4, 33, 5), &Device::Cpu)?.to_dtype(dtype)?)?;
        for (dim, (composed, op)) in
            (0..3).flat_map(|dim| testing::COMPOSED.into_iter().zip(OPS).map(move |of| (dim, of)))
        {
            let composed = composed(&xs, dim)?;
            assert_eq!((composed.dtype(), composed.track_op()), (dtype, true));
            let values = |ys: &Tensor| ys.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
            for (a, b) in values(&composed)?.iter().zip(values(&op(&xs, dim)?)?) {
                assert!((a - b).abs() <= tolerance * b.abs() + 1e-6, "{dtype:?} dim {dim}: {a} and {b}");
            }
        }
    }
    Ok(())
}
