//! Log-sum-exp, the statistics of a loss and their backward on CUDA.

use super::launch::StatisticsGradients;
use super::{by_dtype, by_dtype_computed_in, elements, launch, new_storage, CudaElement};
use crate::lines::{contiguous_range, unsupported_dtype, Contiguous, Lines};
use crate::loss_of_lines::LossOfLines;
use crate::statistics::{Classes, LossBackward};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaView;
use candle_core::cuda_backend::CudaDType;
use candle_core::{CudaStorage, DType, Layout, Result, Storage, StorageRef, Tensor};
use half::{bf16, f16};

/// A storage, and where in it logits, or statistics, or others' gradients are.
pub(super) type Operand<'a> = (&'a CudaStorage, &'a Layout);

/// Log-sum-exp of each line, in the dtype of `x`.
pub(crate) fn log_sum_exp(name: &'static str, lines: Lines, x: Operand) -> Result<CudaStorage> {
    fn run<T: CudaElement>(name: &'static str, lines: Lines, (x, layout): Operand) -> Result<CudaStorage> {
        new_storage::<T>(x.device(), one_each(lines, 1), |out| {
            let device = x.device();
            let x = Contiguous::new(name, x, layout)?;
            let x = elements::<T>(&x, lines)?;
            launch::statistics(device, x, out, lines, None)
        })
    }
    by_dtype!(name, x.0.dtype(), run(name, lines, x))
}

/// What [`LineStatistics`](crate::statistics::LineStatistics) gives.
pub(crate) fn line_statistics(name: &'static str, lines: Lines, x: Operand, classes: &Classes) -> Result<CudaStorage> {
    fn run<T: CudaElement>(
        name: &'static str,
        lines: Lines,
        (x, layout): Operand,
        classes: &Classes,
    ) -> Result<CudaStorage> {
        new_storage::<T::Real>(x.device(), one_each(lines, classes.statistics()), |out| {
            let device = x.device();
            let stored = Stored::new(classes);
            let x = Contiguous::new(name, x, layout)?;
            let x = elements::<T>(&x, lines)?;
            launch::statistics(device, x, out, lines, Some(stored.view(classes)?))
        })
    }
    by_dtype!(name, x.0.dtype(), run(name, lines, x, classes))
}

/// The gradient of the logits, given the statistics of their lines and gradients of those.
pub(crate) fn loss_backward(
    name: &'static str,
    lines: Lines,
    x: Operand,
    statistics: [Operand; 2],
    op: &LossBackward,
) -> Result<CudaStorage> {
    fn run<T: CudaElement>(
        name: &'static str,
        lines: Lines,
        (x, layout): Operand,
        [s, (g, gradients)]: [Operand; 2],
        op: &LossBackward,
    ) -> Result<CudaStorage> {
        new_storage::<T>(x.device(), lines, |out| {
            let device = x.device();
            let stored = Stored::new(&op.classes);
            let (x, s, g) = (
                Contiguous::new(name, x, layout)?,
                Contiguous::new(name, s.0, s.1)?,
                Contiguous::new(name, g, gradients)?,
            );
            let x = elements::<T>(&x, lines)?;
            let s = elements(&s, one_each(lines, op.classes.statistics()))?;
            let given = gradients.shape().elem_count() / lines.count();
            let g = match op.only_log_sum_exp {
                true => StatisticsGradients::LogSumExp(elements(&g, one_each(lines, 1))?),
                false => StatisticsGradients::OfStatistics(elements(&g, one_each(lines, given))?),
            };
            launch::loss_backward(device, x, (s, g), out, lines, stored.view(&op.classes)?)
        })
    }
    by_dtype!(name, x.0.dtype(), run(name, lines, x, statistics, op))
}

/// What a loss makes of these statistics or, given the gradients of the losses, the gradients of the statistics.
pub(crate) fn loss_of_lines(
    name: &'static str,
    op: &LossOfLines,
    statistics: Operand,
    gradients: Option<Operand>,
) -> Result<CudaStorage> {
    fn run<R: CudaElement>(
        name: &'static str,
        op: &LossOfLines,
        (statistics, layout): Operand,
        gradients: Option<Operand>,
    ) -> Result<CudaStorage> {
        let (numbers, lines) = layout.shape().dims2()?;
        let written = if gradients.is_some() { op.gradients() * lines } else { op.losses(lines) };
        new_storage::<R>(statistics.device(), all(written), |out| {
            let device = statistics.device();
            let statistics = Contiguous::new(name, statistics, layout)?;
            let gradients =
                gradients.map(|(of, layout)| Result::Ok((Contiguous::new(name, of, layout)?, layout))).transpose()?;
            let of_losses =
                gradients.as_ref().map(|(of, layout)| elements(of, all(layout.shape().elem_count()))).transpose()?;
            launch::loss_of_lines(device, op, elements(&statistics, all(numbers * lines))?, of_losses, out)
        })
    }
    by_dtype_computed_in!(name, statistics.0.dtype(), run(name, op, statistics, gradients))
}

/// Numbers one after the other.
fn all(numbers: usize) -> Lines {
    Lines { outer: 1, len: numbers, inner: 1 }
}

/// As many numbers for each of the lines.
pub(super) fn one_each(lines: Lines, numbers: usize) -> Lines {
    Lines { outer: lines.count(), len: numbers, inner: 1 }
}

/// The storages of targets and weights, which are contiguous, kept from being written while they are in use.
struct Stored<'a> {
    targets: (StorageRef<'a>, &'a Layout),
    weights: Option<(StorageRef<'a>, &'a Layout)>,
}

impl<'a> Stored<'a> {
    fn new(classes: &'a Classes) -> Self {
        Self {
            targets: classes.targets.storage_and_layout(),
            weights: classes.weights.as_ref().map(Tensor::storage_and_layout),
        }
    }

    fn view<R: CudaDType>(&self, classes: &Classes) -> Result<launch::Classes<'_, R>> {
        Ok(launch::Classes {
            targets: view(&self.targets)?,
            ignored: classes.ignored,
            weights: self.weights.as_ref().map(view).transpose()?,
            smooth: classes.smooth,
        })
    }
}

pub(super) fn view<'a, T: CudaDType>((storage, layout): &'a (StorageRef<'_>, &Layout)) -> Result<CudaView<'a, T>> {
    let Storage::Cuda(storage) = &**storage else {
        candle_core::bail!("candle-softmax: what belongs to the logits must be on their CUDA device")
    };
    let slice = storage.as_cuda_slice::<T>()?;
    match contiguous_range(layout).and_then(|range| slice.try_slice(range)) {
        Some(view) => Ok(view),
        None => candle_core::bail!("candle-softmax: {layout:?} is not contiguous in a storage of {}", slice.len()),
    }
}
