//! For this crate's own tests and benchmarks: ops with an output given, and which kernel is taken. Not part of the API.

use crate::lines::resolve_dim;
use crate::op::{Output, Schedule, Softmax};
use candle_core::{Result, Tensor, D};

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
    fn along(self, xs: &Tensor, dim: usize) -> Result<Softmax> {
        let (name, schedule) = match self {
            Op::Safe => ("safe-softmax", Some(Schedule::Safe)),
            Op::Online => ("online-softmax", Some(Schedule::Online)),
            Op::Reduce => ("reduce-softmax", Some(Schedule::Reduce)),
            Op::Chosen => ("softmax", None),
            Op::ChosenLog => ("log-softmax", None),
        };
        let output = if self == Op::ChosenLog { Output::LogProbability } else { Output::Probability };
        let dim = D::Minus(xs.rank() - resolve_dim(dim, xs.shape(), name)?);
        Ok(Softmax { name, schedule, output, dim })
    }
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
