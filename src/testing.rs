//! For this crate's own tests and benchmarks: ops with an output given, which kernel is taken, and what a test goes without. Not part of
//! the API.

use crate::lines::{from_end, resolve_dim};
use crate::op::{Output, Schedule, SoftmaxBackward, SoftmaxOp};
use crate::statistics::{Classes, Ignored, LineStatistics, LogSumExp, LossBackward};
use crate::top_k::TopK;
use crate::{composed, Softmax};
use candle_core::{CustomOp1, Result, Tensor, D};
use std::io::Write;

/// How many GPUs there are; none without feature `cuda`.
pub fn gpu_count() -> usize {
    #[cfg(feature = "cuda")]
    return candle_core::cuda_backend::cudarc::driver::CudaContext::device_count().unwrap_or(0) as usize;
    #[cfg(not(feature = "cuda"))]
    0
}

/// Says so where it is seen even if the test passes: of what is printed by macros libtest shows only what comes from tests that fail.
pub fn say_skipped(what: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped {what}: {why}");
}

/// What to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Safe,
    Online,
    Reduce,
    /// The schedule that the plan chooses
    Chosen,
    ChosenLog,
}

impl Op {
    fn along(self, xs: &Tensor, dim: usize) -> Result<SoftmaxOp> {
        let (name, schedule) = match self {
            Op::Safe => ("safe-softmax", Some(Schedule::Safe)),
            Op::Online => ("online-softmax", Some(Schedule::Online)),
            Op::Reduce => ("reduce-softmax", Some(Schedule::Reduce)),
            Op::Chosen => ("softmax", None),
            Op::ChosenLog => ("log-softmax", None),
        };
        let output = if self == Op::ChosenLog { Output::LogProbability } else { Output::Probability };
        let dim = D::Minus(xs.rank() - resolve_dim(dim, xs.shape(), name)?);
        Ok(SoftmaxOp { name, schedule, output, dim })
    }
}

/// Which vector instructions the CPU has, the best last: `portable`, `avx2` and `avx512`, or `neon`.
pub fn cpu_levels() -> Vec<&'static str> {
    crate::cpu::levels()
}

/// Those that are used.
pub fn cpu_level() -> &'static str {
    crate::cpu::level()
}

/// Writes the result along `dim` into `out`, a contiguous tensor of the same shape, dtype and device in memory of its own.
/// It neither allocates (unless `xs` needs a contiguous copy) nor synchronises.
pub fn softmax_into(op: Op, xs: &Tensor, dim: usize, out: &Tensor) -> Result<()> {
    out.inplace_op2(xs, &op.along(xs, dim)?)
}

/// The kernel that is taken on the tensor's device.
pub fn kernel_name(op: Op, xs: &Tensor, dim: usize) -> Result<String> {
    let op = op.along(xs, dim)?;
    match xs.device() {
        #[cfg(feature = "cuda")]
        candle_core::Device::Cuda(device) => crate::cuda::kernel_name(&op, xs, device),
        _ => Ok(format!("cpu {:?}", op.schedule.unwrap_or(Schedule::Reduce))),
    }
}

/// What a builder's [`forward`](Softmax::forward) gives, out of candle's tensor ops.
pub fn composed(softmax: &Softmax, scores: &Tensor) -> Result<Tensor> {
    let (op, bias, sinks) = softmax.parts(scores)?;
    composed::fused(&op, scores, bias, sinks)
}

/// What softmax, log-softmax and log-sum-exp (with its dimension kept) along a dimension are, out of candle's tensor ops.
pub const COMPOSED: [fn(&Tensor, usize) -> Result<Tensor>; 3] =
    [composed::softmax, composed::log_softmax, composed::logsumexp_keepdim];

/// The kernel behind the gradients of softmax (`log`: of log-softmax) along `dim`, given the result and its gradient.
pub fn softmax_backward(log: bool, y: &Tensor, g: &Tensor, dim: usize) -> Result<Tensor> {
    let output = if log { Output::LogProbability } else { Output::Probability };
    y.apply_op2_no_bwd(
        g,
        &SoftmaxBackward { output, dim: D::Minus(y.rank() - resolve_dim(dim, y.shape(), "softmax")?) },
    )
}

/// The gradient of the scores of a builder's softmax without bias and sinks, given that of the result.
pub fn builder_backward(softmax: &Softmax, scores: &Tensor, g: &Tensor) -> Result<Tensor> {
    let (op, ..) = softmax.parts(scores)?;
    match CustomOp1::bwd(&op, scores, scores, g)? {
        Some(gradient) => Ok(gradient),
        None => candle_core::bail!("softmax: no gradient of the scores"),
    }
}

/// The kernels behind the gradient of a log-sum-exp, given that of the result, whose `dim` is kept.
pub fn logsumexp_backward(xs: &Tensor, g: &Tensor, dim: usize) -> Result<Tensor> {
    match (LogSumExp { name: "logsumexp", dim: from_end(dim, xs.shape()) }).bwd(xs, g, g)? {
        Some(gradient) => Ok(gradient),
        None => candle_core::bail!("logsumexp: no gradient"),
    }
}

/// The kernel behind the gradient of the logits of a top-k, given that of the weights.
pub fn top_k_backward(logits: &Tensor, k: usize, renormalise: bool) -> Result<impl Fn(&Tensor) -> Result<Tensor>> {
    let op = TopK::new("topk-softmax", k, renormalise, true);
    let (logits, weights) = (logits.clone(), logits.apply_op1_no_bwd(&op)?);
    Ok(move |g: &Tensor| match op.bwd(&logits, &weights, g)? {
        Some(gradient) => Ok(gradient),
        None => candle_core::bail!("topk-softmax: no gradient of the logits"),
    })
}

/// The two kernels behind a cross-entropy.
pub struct CrossEntropyKernels(LineStatistics);

impl CrossEntropyKernels {
    /// `targets`: i64, one for each line along `dim`, contiguous.
    pub fn new(targets: Tensor, dim: usize) -> Self {
        Self(LineStatistics(Classes { dim, targets, ignored: Ignored(-100), weights: None, smooth: false }))
    }

    /// The statistics of each line.
    pub fn forward(&self, logits: &Tensor) -> Result<Tensor> {
        logits.apply_op1_no_bwd(&self.0)
    }

    /// The gradient of the logits, given that of the log-probabilities of the targets, shape (1, lines).
    pub fn backward(&self, logits: &Tensor, statistics: &Tensor, gradient: &Tensor) -> Result<Tensor> {
        let op = LossBackward { classes: self.0 .0.clone(), only_log_sum_exp: false };
        logits.apply_op3_no_bwd(statistics, gradient, &op)
    }
}
