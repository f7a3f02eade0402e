use crate::op::impl_custom_op;

/// Softmax over the last dimension in three passes over a line: its maximum, Σ exp(x − max), and the result. On CUDA one
/// thread takes a line.
///
/// This is the textbook schedule (subtracting the maximum keeps exp in range) and the yardstick for the other two: it
/// reads each element three times. Shapes, dtypes, special values and errors are those of
/// [`ops::softmax`](crate::ops::softmax); on Metal it is an error that names that function.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_softmax::SafeSoftmax;
///
/// let xs = Tensor::new(&[[1000f32, 999.], [-1000., -1000.]], &Device::Cpu)?;
/// let p = xs.apply_op1(SafeSoftmax)?.to_vec2::<f32>()?;
/// assert!((p[0][0] - 0.731_058_6).abs() < 1e-6);
/// assert_eq!(p[1], [0.5, 0.5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct SafeSoftmax;

impl_custom_op!(SafeSoftmax, "safe-softmax", Safe);
