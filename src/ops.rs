//! The functions to call instead of those of the same names in `candle_nn::ops`.
//!
//! They take f16, bf16, f32 and f64 tensors of any rank but 0, any strides and any dimension, on the CPU and on CUDA.
//! Sums and exponentials are f32 inside (f64 for f64), and each result is rounded once. All are tracked by autograd.
//! On Metal they are made of candle's tensor ops, with the sums in f32. [`softmax_inplace`] and [`topk_softmax`] take less, as said there.

use crate::composed;
use crate::lines::{check_copy, from_end, resolve_dim};
use crate::op::{check_dtype, Output, SoftmaxOp};
use crate::statistics::LogSumExp;
use crate::top_k::TopK;
use candle_core::{shape::Dim, Result, Tensor, D};

fn apply(xs: &Tensor, dim: impl Dim, name: &'static str, output: Output) -> Result<Tensor> {
    let dim = resolve_dim(dim, xs.shape(), name)?;
    if xs.device().is_metal() {
        check_dtype(xs.dtype(), name)?;
        return match output {
            Output::Probability => composed::softmax(xs, dim),
            Output::LogProbability => composed::log_softmax(xs, dim),
        };
    }
    xs.apply_op1(SoftmaxOp { name, schedule: None, output, dim: from_end(dim, xs.shape()) })
}

/// Softmax over dimension `dim`: exp(xᵢ − max) / Σⱼ exp(xⱼ − max) along each line of `xs`.
///
/// `xs` is any f16, bf16, f32 or f64 tensor of rank 1 or more, with any strides; the result has its shape, dtype and
/// device, and is contiguous. A line that holds NaN or +∞, or nothing but −∞, gives NaN; −∞ beside finite numbers gives
/// exactly 0. An empty tensor comes back empty.
///
/// The maximum and the sum are found in one pass with the online normaliser of
/// [Milakov & Gimelshein (2018)](https://arxiv.org/abs/1805.02867). The gradient is y·(g − Σ g·y).
///
/// # Errors
/// If `xs` is a scalar, has no dimension `dim`, or is of another dtype; if it is on CUDA and the crate was built without
/// its `cuda` feature.
///
/// ```
/// use candle_core::{Device, Tensor, D};
/// use candle_softmax::ops;
///
/// let xs = Tensor::new(&[[0f32, 1., 0., 1.], [-2., 2., 3., -3.]], &Device::Cpu)?;
/// let p = ops::softmax(&xs, D::Minus1)?;
/// let sums = p.sum(D::Minus1)?.to_vec1::<f32>()?;
/// assert!(sums.iter().all(|sum| (sum - 1.0).abs() < 1e-6));
/// assert_eq!(ops::softmax(&xs, 0)?.dims(), xs.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn softmax<I: Dim>(xs: &Tensor, dim: I) -> Result<Tensor> {
    apply(xs, dim, "softmax", Output::Probability)
}

/// [`softmax`] over the last dimension.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_softmax::ops;
///
/// let xs = Tensor::new(&[f32::NEG_INFINITY, 0., 0.], &Device::Cpu)?;
/// assert_eq!(ops::softmax_last_dim(&xs)?.to_vec1::<f32>()?, [0.0, 0.5, 0.5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn softmax_last_dim(xs: &Tensor) -> Result<Tensor> {
    apply(xs, D::Minus1, "softmax-last-dim", Output::Probability)
}

/// The logarithm of [`softmax`] over dimension `dim`: xᵢ − max − ln Σⱼ exp(xⱼ − max), which stays exact where the
/// probability itself would round to 0.
///
/// Shapes, dtypes, special values and errors are those of [`softmax`], but −∞ beside finite numbers gives −∞. The gradient
/// is g − exp(y)·Σ g.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_softmax::ops;
///
/// let xs = Tensor::new(&[0f32, -1000.], &Device::Cpu)?;
/// assert_eq!(ops::log_softmax(&xs, 0)?.to_vec1::<f32>()?, [0.0, -1000.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn log_softmax<I: Dim>(xs: &Tensor, dim: I) -> Result<Tensor> {
    apply(xs, dim, "log-softmax", Output::LogProbability)
}

/// The logarithm of the sum of the exponentials along dimension `dim`, which is dropped: max + ln Σᵢ exp(xᵢ − max).
///
/// `xs` is any f16, bf16, f32 or f64 tensor of rank 1 or more, with any strides; the result has its dtype and device, rounded
/// once. As `torch.logsumexp` has it, a line of nothing but −∞ gives −∞, and so does an empty one; +∞ gives +∞, and NaN NaN.
///
/// Each element is read once. The gradient is g·softmax(x), taken from `xs`, of half precision rounded once if lines have 512
/// elements or more, else twice; it is NaN for a line that [`softmax`] makes NaN: one with +∞, or with nothing but −∞.
///
/// # Errors
/// Those of [`softmax`].
///
/// ```
/// use candle_core::{Device, Tensor, D};
/// use candle_softmax::ops;
///
/// let xs = Tensor::new(&[[1000f32, 1000.], [0., f32::NEG_INFINITY]], &Device::Cpu)?;
/// assert_eq!(ops::logsumexp(&xs, D::Minus1)?.to_vec1::<f32>()?, [1000.0 + 2f32.ln(), 0.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn logsumexp<I: Dim>(xs: &Tensor, dim: I) -> Result<Tensor> {
    let dim = resolve_dim(dim, xs.shape(), "logsumexp")?;
    logsumexp_keepdim(xs, dim)?.squeeze(dim)
}

/// [`logsumexp`] with `dim` kept, of size 1.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_softmax::ops;
///
/// let xs = Tensor::zeros((2, 3), candle_core::DType::F32, &Device::Cpu)?;
/// assert_eq!(ops::logsumexp_keepdim(&xs, 0)?.dims(), [1, 3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn logsumexp_keepdim<I: Dim>(xs: &Tensor, dim: I) -> Result<Tensor> {
    let name = "logsumexp";
    let dim = resolve_dim(dim, xs.shape(), name)?;
    if xs.device().is_metal() {
        check_dtype(xs.dtype(), name)?;
        return composed::logsumexp_keepdim(xs, dim);
    }
    xs.apply_op1(LogSumExp { name, dim: from_end(dim, xs.shape()) })
}

/// The `k` greatest of each line of `logits` along the last dimension, as a mixture-of-experts router or a sampler wants them:
/// their weights, and their places.
///
/// `logits` is any f16, bf16, f32 or f64 tensor of rank 1 or more, of shape (…, n). Both results have shape (…, k), greatest
/// first and of equal logits the first first: weights in the logits' dtype, tracked by autograd, and u32 places, which
/// have no gradient. With `renormalise` the weights are the softmax of the k logits among themselves, else their share in
/// the softmax of all n. NaN counts as greater than +∞, as in `torch.topk`, and gives NaN weights.
///
/// Both results are written by one kernel, and the gradient of the logits by another: w·(g − Σ g·w) at the places, w the weights and g their
/// gradient, and elsewhere 0 or, not renormalised, −p·Σ g·w, p an element's own share. On CUDA lines are read
/// once for most, and a third of those of more than 1024 elements (f64: 256) twice. All of it is where a block is asked for more than half as many places
/// as it has threads (512 at most) or packs of 16 bytes, or for more than 512; and where it is for nearly as many, or very many elements are equal, as often as
/// there are digits that decide which are the greatest (radix select; Alabi et al., 2012). Of up to 1024 elements weights that are
/// not renormalised take reading them once more. More than 2048 places are found on the CPU.
///
/// # Errors
/// If `k` is not in 1 to n, n is more than 2³² − 1, and where [`softmax`] is an error; on Metal. The gradient goes to the places: if these are
/// written over before with what are none of a line, `backward` is an error; on CUDA nothing has what was to go there, and where weights are of all
/// and it is a line's first place, all of the line has NaN.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_softmax::ops;
///
/// let router = Tensor::new(&[[0f32, 3., 1., 3.]], &Device::Cpu)?;
/// let (weights, experts) = ops::topk_softmax(&router, 2, true)?;
/// assert_eq!(experts.to_vec2::<u32>()?, [[1, 3]]);
/// assert_eq!(weights.to_vec2::<f32>()?, [[0.5, 0.5]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn topk_softmax(logits: &Tensor, k: usize, renormalise: bool) -> Result<(Tensor, Tensor)> {
    let name = "topk-softmax";
    let dim = resolve_dim(D::Minus1, logits.shape(), name)?;
    check_dtype(logits.dtype(), name)?;
    let len = logits.dim(dim)?;
    if k == 0 || k > len || len > u32::MAX as usize {
        let may_be = match len {
            0 => "there is nothing in a line".to_string(),
            _ if len > u32::MAX as usize => format!("lines may have up to {} elements, split them", u32::MAX),
            _ => format!("k must be in 1 to {len}"),
        };
        candle_core::bail!("{name}: the {k} greatest of logits of shape {:?}, {may_be}", logits.shape())
    }
    if logits.elem_count() == 0 {
        let weights = softmax(&logits.narrow(dim, 0, k)?, dim)?;
        let places = Tensor::zeros(weights.shape(), candle_core::DType::U32, logits.device())?;
        return Ok((weights, places));
    }
    check_copy(name, logits.layout(), logits.device().location())?;
    TopK::of(&logits.contiguous()?, name, k, renormalise)
}

/// [`softmax`] written over `xs` itself, which saves the memory of a result and the time to get it: for callers who have
/// no further use for `xs`.
///
/// Every tensor that shares memory with `xs` (a clone, a view, a detached copy) changes with it. The tensor has to be
/// contiguous; it may be a part of another, such as `xs.narrow(0, 2, 3)?`, which is then changed in that part. Dtypes,
/// dimensions and special values are those of [`softmax`]. It runs on the CPU and on CUDA.
///
/// # Errors
/// If `xs` is a variable or made from one: autograd would go on with the values it had. If it is not contiguous or is on
/// Metal, and wherever [`softmax`] is an error.
///
/// ```
/// use candle_core::{Device, Tensor, D};
/// use candle_softmax::ops;
///
/// let xs = Tensor::new(&[[1f32, 1.], [0., f32::NEG_INFINITY]], &Device::Cpu)?;
/// ops::softmax_inplace(&xs, D::Minus1)?;
/// assert_eq!(xs.to_vec2::<f32>()?, [[0.5, 0.5], [1.0, 0.0]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn softmax_inplace<I: Dim>(xs: &Tensor, dim: I) -> Result<()> {
    let name = "softmax-inplace";
    let dim = resolve_dim(dim, xs.shape(), name)?;
    if xs.track_op() {
        candle_core::bail!(
            "{name}: the tensor tracks gradients, which would go wrong: call candle_softmax::ops::softmax, or work on \
             xs.detach().copy()?"
        )
    }
    let op = SoftmaxOp { name, schedule: None, output: Output::Probability, dim: from_end(dim, xs.shape()) };
    check_dtype(xs.dtype(), name)?;
    op.inplace_range(xs.layout())?;
    if xs.elem_count() == 0 {
        // candle takes the strides of some empty tensors for a broadcast's.
        return Ok(());
    }
    xs.inplace_op1(&op)
}
