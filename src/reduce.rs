use crate::op::impl_custom_op;

/// Softmax over the last dimension with a line shared by many threads: each keeps the online state of its part, and the
/// states are merged. On CUDA one block takes a line and merges with warp shuffles, then through shared memory; on the
/// CPU a long line is split over rayon's threads.
///
/// Shapes, dtypes, special values and errors are those of [`ops::softmax`](crate::ops::softmax); on Metal it is an error
/// that names that function.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_softmax::ReduceSoftmax;
///
/// let scores = Var::new(&[[0f32, 1., 2.], [3., 4., 5.]], &Device::Cpu)?;
/// let p = scores.apply_op1(ReduceSoftmax)?;
/// let grads = p.sqr()?.sum_all()?.backward()?;
/// assert!(grads.get(&scores).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct ReduceSoftmax;

impl_custom_op!(ReduceSoftmax, "reduce-softmax", Reduce);
