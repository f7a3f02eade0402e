//! Log-sum-exp, and the op behind a loss over classes: a few numbers of each line of logits, each read once, and one backward
//! that writes the gradient in one pass.

use crate::cpu;
use crate::lines::{check_gradient, computed_in, contiguous_range, resolve_dim, unsupported_dtype, Contiguous, Lines};
#[cfg(not(feature = "cuda"))]
use crate::op::no_cuda;
use crate::op::{check_dtype, on_cpu};
use crate::ops;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cpu_backend::CpuDevice;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp3, DType, Layout, MetalStorage, Result, Shape, Storage, Tensor,
    WithDType, D,
};

// What [`LineStatistics`] gives for a line, all of it 0 where the target is ignored. Of short lines it takes as much memory as they do, so that there
// is no more of it than somebody reads. `kernels/targets.cuh` has the same lists.

/// (x of the target − max) − ln Σ exp(x − max)
pub(crate) const LOG_P: usize = 0;
/// The weight of the target, 1 without weights.
pub(crate) const WEIGHT: usize = 1;
/// The maximum, and …
pub(crate) const MAX: usize = 2;
/// … ln Σ exp(x − max); together log-sum-exp.
pub(crate) const LOG_SUM: usize = 3;
/// How many numbers that is, and all there is without smoothing and weights
const FEWEST_STATISTICS: usize = 4;
/// 1 whatever the weight
pub(crate) const KEPT: usize = 4;
/// With smoothing, otherwise 0: Σ weight · log p over the classes, and …
pub(crate) const SMOOTH: usize = 5;
/// … Σ weight.
pub(crate) const SUM_OF_WEIGHTS: usize = 6;
pub(crate) const MOST_STATISTICS: usize = 7;

// What has gradients.

/// The first statistic, …
pub(crate) const OF_LOG_P: usize = 0;
/// … log-sum-exp …
pub(crate) const OF_LOG_SUM_EXP: usize = 1;
/// … and the sum over the classes.
pub(crate) const OF_SMOOTH: usize = 2;
pub(crate) const MOST_GRADIENTS: usize = 3;

/// The same shape with 1 for the dimension that is reduced.
fn reduced(shape: &Shape, dim: usize) -> Shape {
    let mut dims = shape.dims().to_vec();
    dims[dim] = 1;
    dims.into()
}

pub(crate) fn no_metal<T>(op: &'static str) -> Result<T> {
    candle_core::bail!("{op}: there is no Metal kernel, move the tensors to the CPU")
}

/// On a CPU lines of so many elements have their log-sum-exp's gradient by what a loss is made of: 65536 lines of 16 f32s take 2.3 ms so and 0.7
/// as a softmax and a product, 4096 of 256 bf16s 0.70 and 0.68, 256 of 50257 7.8 and 27. (On an H200 by a loss 1048576 lines of
/// 16 f32s take 151 us, and 389 with candle's product, whose parameters come from the host, which a CUDA graph would read again.)
const LEAST_OF_LOSS: usize = 512;

/// Whether candle rounds products to the nearest number. Those of bf16 it cuts off, on aarch64.
fn products_are_rounded(dtype: DType) -> bool {
    !(cfg!(target_arch = "aarch64") && dtype == DType::BF16)
}

/// Log-sum-exp along a dimension, which is kept with size 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogSumExp {
    pub name: &'static str,
    pub dim: D,
}

impl CustomOp1 for LogSumExp {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let dim = resolve_dim(self.dim, layout.shape(), self.name)?;
        let lines = Lines::new(layout.shape(), dim);
        check_dtype(storage.dtype(), self.name)?;
        let x = Contiguous::new(self.name, storage, layout)?;
        let elements = x.start()..x.start() + lines.elem_count();
        macro_rules! narrowed {
            ($xs:ident, $from:path) => {
                cpu::log_sum_exp(&$xs[elements], lines).into_iter().map($from).collect()
            };
        }
        let out = match x.storage() {
            CpuStorage::F32(xs) => CpuStorage::F32(cpu::log_sum_exp(&xs[elements], lines)),
            CpuStorage::F64(xs) => CpuStorage::F64(cpu::log_sum_exp(&xs[elements], lines)),
            CpuStorage::F16(xs) => CpuStorage::F16(narrowed!(xs, half::f16::from_f32)),
            CpuStorage::BF16(xs) => CpuStorage::BF16(narrowed!(xs, half::bf16::from_f32)),
            other => return Err(unsupported_dtype(other.dtype(), self.name)),
        };
        Ok((out, reduced(layout.shape(), dim)))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let dim = resolve_dim(self.dim, layout.shape(), self.name)?;
        let lines = Lines::new(layout.shape(), dim);
        check_dtype(storage.dtype(), self.name)?;
        let shape = reduced(layout.shape(), dim);
        if lines.len == 0 && lines.count() > 0 {
            let zeros = storage.device().zeros_impl(&shape, storage.dtype())?;
            return Ok((zeros.affine(&Layout::contiguous(&shape), 1.0, f64::NEG_INFINITY)?, shape));
        }
        Ok((crate::cuda::log_sum_exp(self.name, lines, (storage, layout))?, shape))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        no_cuda(self.name)
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        no_metal(self.name)
    }

    /// g · softmax(x), which is taken again from x: the result is too coarse where it is large, or in half precision. It is the
    /// gradient of a loss in which that alone counts, whose numbers of each line take longer than a product of short ones.
    fn bwd(&self, arg: &Tensor, _: &Tensor, grad_res: &Tensor) -> Result<Option<Tensor>> {
        if arg.elem_count() == 0 {
            return Ok(Some(arg.zeros_like()?));
        }
        let dim = resolve_dim(self.dim, arg.shape(), self.name)?;
        // candle sums the gradient that a product has for `grad_res`, in half precision too.
        let by_candle = !arg.device().is_cuda() && arg.dim(dim)? < LEAST_OF_LOSS && products_are_rounded(arg.dtype());
        if by_candle && !grad_res.track_op() {
            return Ok(Some(ops::softmax(arg, self.dim)?.broadcast_mul(grad_res)?));
        }
        let targets = Tensor::zeros(grad_res.elem_count(), DType::I64, arg.device())?;
        let classes = Classes { dim, targets, ignored: Ignored(-1), weights: None, smooth: false };
        let statistics = arg.apply_op1_no_bwd(&LineStatistics(classes.clone()))?;
        let gradient = LossBackward { classes, only_log_sum_exp: true };
        Ok(Some(arg.apply_op3(&statistics, grad_res, gradient)?))
    }
}

/// The target whose lines are ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ignored(pub i64);

impl Ignored {
    /// No target is. The kernels know it by this number.
    pub const NONE: Self = Self(i64::MIN);

    pub fn is(self, target: i64) -> bool {
        self.0 == target && self != Self::NONE
    }
}

/// What a loss knows beside the logits.
#[derive(Clone, Debug)]
pub(crate) struct Classes {
    /// The dimension of the logits that the classes lie along.
    pub dim: usize,
    /// i64, one for each line, contiguous.
    pub targets: Tensor,
    pub ignored: Ignored,
    /// One for each class, of the dtype computed in, contiguous.
    pub weights: Option<Tensor>,
    /// Whether [`SMOOTH`] is asked for.
    pub smooth: bool,
}

impl Classes {
    fn lines(&self, shape: &Shape) -> Lines {
        Lines::new(shape, self.dim)
    }

    /// How many statistics there are for each line.
    pub fn statistics(&self) -> usize {
        statistics_of(self.weights.is_some(), self.smooth)
    }

    /// Calls `f` with the classes as slices, once every target that counts is known to be one.
    fn on_cpu<R: WithDType, O>(
        &self,
        name: &'static str,
        lines: Lines,
        f: impl FnOnce(cpu::Classes<R>) -> O,
    ) -> Result<O> {
        let targets = self.targets.storage_and_layout();
        let targets = slice_of::<i64>(name, &targets.0, targets.1)?;
        let out_of_range = |&&t: &&i64| !self.ignored.is(t) && !(0..lines.len as i64).contains(&t);
        if let Some(target) = targets.iter().find(out_of_range) {
            let nor = match self.ignored {
                Ignored::NONE => String::new(),
                Ignored(index) => format!(", nor the index to ignore, {index}"),
            };
            candle_core::bail!(
                "{name}: target {target} is not one of {} classes (0 to {}){nor}",
                lines.len,
                lines.len - 1
            )
        }
        if targets.len() != lines.count() {
            candle_core::bail!("{name}: {} targets for {} lines of logits", targets.len(), lines.count())
        }
        let weights = self.weights.as_ref().map(Tensor::storage_and_layout);
        let weights = weights.as_ref().map(|(storage, layout)| slice_of::<R>(name, storage, layout)).transpose()?;
        let sum_of_weights = match weights {
            Some(weights) => weights.iter().map(|w| w.to_f64()).sum(),
            None => lines.len as f64,
        };
        Ok(f(cpu::Classes {
            targets,
            ignored: self.ignored,
            weights,
            sum_of_weights: R::from_f64(sum_of_weights),
            smooth: self.smooth,
        }))
    }
}

/// The elements of a contiguous CPU tensor.
fn slice_of<'a, T: WithDType>(name: &'static str, storage: &'a Storage, layout: &Layout) -> Result<&'a [T]> {
    match (storage, contiguous_range(layout)) {
        (Storage::Cpu(storage), Some(range)) => Ok(&storage.as_slice::<T>()?[range]),
        _ => candle_core::bail!("{name}: targets and weights must be on the CPU and contiguous, as {layout:?} are not"),
    }
}

/// How many statistics a loss asks for.
pub(crate) fn statistics_of(weighted: bool, smooth: bool) -> usize {
    if weighted || smooth {
        MOST_STATISTICS
    } else {
        FEWEST_STATISTICS
    }
}

/// [`Classes::statistics`] numbers of each line of logits, as a tensor of shape (numbers, lines) of the dtype computed in. An empty
/// batch counts as one ignored line. There is no gradient of it: the loss has that of the logits.
#[derive(Clone, Debug)]
pub(crate) struct LineStatistics(pub Classes);

impl LineStatistics {
    const NAME: &'static str = "cross-entropy";

    fn shape(&self, lines: Lines) -> Shape {
        (self.0.statistics(), lines.count().max(1)).into()
    }
}

impl CustomOp1 for LineStatistics {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let lines = self.0.lines(layout.shape());
        let shape = self.shape(lines);
        if lines.count() == 0 {
            let zeros = CpuDevice.zeros_impl(&shape, computed_in(storage.dtype()))?;
            return Ok((zeros, shape));
        }
        let x = Contiguous::new(Self::NAME, storage, layout)?;
        let elements = x.start()..x.start() + lines.elem_count();
        macro_rules! statistics {
            ($xs:ident) => {
                self.0.on_cpu(Self::NAME, lines, |classes| cpu::line_statistics(&$xs[elements], lines, classes))?
            };
        }
        let out = match x.storage() {
            CpuStorage::F32(xs) => CpuStorage::F32(statistics!(xs)),
            CpuStorage::F64(xs) => CpuStorage::F64(statistics!(xs)),
            CpuStorage::F16(xs) => CpuStorage::F32(statistics!(xs)),
            CpuStorage::BF16(xs) => CpuStorage::F32(statistics!(xs)),
            other => return Err(unsupported_dtype(other.dtype(), Self::NAME)),
        };
        Ok((out, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let lines = self.0.lines(layout.shape());
        let shape = self.shape(lines);
        check_dtype(storage.dtype(), Self::NAME)?;
        if lines.count() == 0 {
            return Ok((storage.device().zeros_impl(&shape, computed_in(storage.dtype()))?, shape));
        }
        Ok((crate::cuda::line_statistics(Self::NAME, lines, (storage, layout), &self.0)?, shape))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        no_cuda(Self::NAME)
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        no_metal(Self::NAME)
    }
}

/// The gradient of the logits from their lines' statistics and the gradients of those, shape (1, lines) of [`OF_LOG_P`], (3, lines) of all, or (lines,) of
/// [`OF_LOG_SUM_EXP`] in the logits' dtype; the others are 0. It has none itself, as candle says when a second derivative is asked for, unless it is that of
/// a log-sum-exp.
#[derive(Clone, Debug)]
pub(crate) struct LossBackward {
    pub classes: Classes,
    /// Whether it is the gradient of a log-sum-exp.
    pub only_log_sum_exp: bool,
}

impl LossBackward {
    const NAME: &'static str = "cross-entropy-backward";
}

/// The gradients of so many lines, of whose log-sum-exps alone there are gradients, from `start` on and of the logits' dtype.
fn beside_zeros<T: WithDType, R: WithDType>(_: &[T], given: &CpuStorage, start: usize, lines: usize) -> Result<Vec<R>> {
    let mut all = vec![R::from_f64(0.0); (OF_LOG_SUM_EXP + 1) * lines];
    let given = &given.as_slice::<T>()?[start..][..lines];
    all[OF_LOG_SUM_EXP * lines..].iter_mut().zip(given).for_each(|(to, from)| *to = R::from_f64(from.to_f64()));
    Ok(all)
}

impl CustomOp3 for LossBackward {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
        statistics: &CpuStorage,
        statistics_layout: &Layout,
        gradients: &CpuStorage,
        gradients_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let shape = layout.shape().clone();
        let lines = self.classes.lines(&shape);
        if lines.count() == 0 {
            return Ok((CpuDevice.zeros_impl(&shape, storage.dtype())?, shape));
        }
        let x = Contiguous::new(Self::NAME, storage, layout)?;
        let (statistics, gradients) = (
            Contiguous::new(Self::NAME, statistics, statistics_layout)?,
            Contiguous::new(Self::NAME, gradients, gradients_layout)?,
        );
        let elements = x.start()..x.start() + lines.elem_count();
        let out = on_cpu!(Self::NAME, x.storage(), |xs| {
            let numbers = self.classes.statistics() * lines.count();
            let statistics = &statistics.storage().as_slice()?[statistics.start()..][..numbers];
            let (given, start) = (gradients.storage(), gradients.start());
            let all;
            let gradients = if self.only_log_sum_exp {
                all = beside_zeros(xs, given, start, lines.count())?;
                &all
            } else {
                &given.as_slice()?[start..][..gradients_layout.shape().elem_count()]
            };
            self.classes.on_cpu(Self::NAME, lines, |classes| {
                cpu::loss_backward(&xs[elements], lines, statistics, gradients, classes)
            })?
        });
        Ok((out, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &CudaStorage,
        layout: &Layout,
        statistics: &CudaStorage,
        statistics_layout: &Layout,
        gradients: &CudaStorage,
        gradients_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let shape = layout.shape().clone();
        let numbers = [(statistics, statistics_layout), (gradients, gradients_layout)];
        let lines = self.classes.lines(&shape);
        Ok((crate::cuda::loss_backward(Self::NAME, lines, (storage, layout), numbers, self)?, shape))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        no_cuda(Self::NAME)
    }

    fn bwd(
        &self,
        x: &Tensor,
        _: &Tensor,
        _: &Tensor,
        res: &Tensor,
        grad_res: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        if !self.only_log_sum_exp {
            return Err(candle_core::Error::BackwardNotSupported { op: Self::NAME });
        }
        let dim = self.classes.dim;
        check_gradient(Self::NAME, x.shape(), x.device().location())?;
        // candle sums half precision in half precision.
        let wide = |xs: &Tensor| xs.to_dtype(computed_in(x.dtype()));
        let grad_res = wide(grad_res)?;
        let of_gradient = (wide(&ops::softmax(x, dim)?)? * &grad_res)?.sum_keepdim(dim)?;
        let of_x = (wide(res)? * grad_res.broadcast_sub(&of_gradient)?)?.to_dtype(x.dtype())?;
        Ok((Some(of_x), None, Some(of_gradient.to_dtype(x.dtype())?)))
    }
}
