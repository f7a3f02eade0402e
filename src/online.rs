use crate::op::impl_custom_op;

/// Softmax over the last dimension in two passes over a line: maximum and sum together, the sum rescaled when the maximum
/// grows ([Milakov & Gimelshein, 2018](https://arxiv.org/abs/1805.02867)), then the result. On CUDA one thread takes
/// a line.
///
/// Rescaling is done per tile of elements and only in steps of e⁸ (on the CPU e¹⁶), so that a line whose values rise all the way loses no
/// accuracy. Shapes, dtypes, special values and errors are those of [`ops::softmax`](crate::ops::softmax); on Metal it is
/// an error that names that function.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_softmax::OnlineSoftmax;
///
/// let xs = Tensor::arange(0f32, 4096., &Device::Cpu)?;
/// let p = xs.apply_op1(OnlineSoftmax)?;
/// assert!((p.sum_all()?.to_scalar::<f32>()? - 1.0).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct OnlineSoftmax;

impl_custom_op!(OnlineSoftmax, "online-softmax", Online);
