//! Softmax with what models put around it, on CUDA: the call as the kernels of `kernels/fused.cuh` read it.

use super::launch::{self, CudaElement, Scaling};
use super::plan::{self, FusedBiasPlan, FusedKind, FusedLines, Kernel, Plan};
use super::sums::sum_over;
use super::{alignment, by_dtype, functions};
use crate::fused::{Around, Axis, Geometry, Gradients, MaskedRows, Operand, Options, Wanted};
use crate::lines::{computed_in, unsupported_dtype};
use crate::op::Output;
use crate::sums::{Steps, SumOver};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CudaDevice, CudaStorage, DType, Result};
use half::{bf16, f16};

const NAME: &str = "softmax";
/// As `kernels/fused.cuh` has it.
const MAX_AXES: usize = 8;
/// What `kernels/fused.cuh` reckons with in 32 bits: positions and limits of a window.
const NARROW: usize = 1 << 30;

/// A number, and what divides by it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct ExactDivisor {
    size: u32,
    factor: u32,
    shift: u32,
}

impl ExactDivisor {
    /// Of 2 or more, and less than 2³².
    fn new(size: usize) -> Self {
        // n / size = (h + (n − h) / 2) >> (log − 1) with h the high half of n · factor, for every n below 2³²
        // (Granlund and Montgomery, 1994).
        let size = size as u64;
        let log = u64::BITS - (size - 1).leading_zeros();
        let factor = ((1u64 << 32) * ((1u64 << log) - size)) / size + 1;
        Self { size: size as u32, factor: factor as u32, shift: log - 1 }
    }
}

/// [`Axis`] as the kernels read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct DeviceAxis {
    size: ExactDivisor,
    query: u32,
    bias: i64,
    mask: i64,
    sink: i64,
}

impl DeviceAxis {
    fn new(axis: Axis) -> Self {
        Self {
            size: ExactDivisor::new(axis.size),
            query: axis.query as u32,
            bias: axis.bias as i64,
            mask: axis.mask as i64,
            sink: axis.sink as i64,
        }
    }
}

/// Tensors of a call by address; 0 where there is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Addresses {
    scores: u64,
    bias: u64,
    mask: u64,
    sinks: u64,
    gradient: u64,
    result: u64,
    logits_gradient: u64,
    sinks_gradient: u64,
}

impl Addresses {
    /// What the addresses of all contiguous tensors are multiples of.
    fn common_alignment(&self) -> usize {
        alignment(self.scores | self.gradient | self.result | self.logits_gradient)
    }
}

/// What a kernel is given: `Fused` of `kernels/fused.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Call<R> {
    tensors: Addresses,
    lines: i64,
    len: i64,
    inner: i64,
    bias_step: i64,
    mask_step: i64,
    before: i64,
    after: i64,
    position: i64,
    scale: R,
    cap: R,
    scale_over_cap: R,
    kept_scale: R,
    steepness: R,
    threshold: u32,
    keys: [[u32; 2]; 7],
    dtype: i32,
    adds: i32,
    masks: i32,
    log: i32,
    window: i32,
    nan_rows: i32,
    axes: i32,
    axis: [DeviceAxis; MAX_AXES],
    sharers: ExactDivisor,
    apart: ExactDivisor,
    alike: ExactDivisor,
}
const _: () = assert!(size_of::<Call<f32>>() == 600 && size_of::<Call<f64>>() == 616);

/// A dimension that lines are numbered along, and by how much the number grows with a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct LineStep {
    size: ExactDivisor,
    step: u32,
}

/// Some of them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct LineSteps {
    of: [LineStep; MAX_AXES],
    count: i32,
}

impl LineSteps {
    /// Of up to [`MAX_AXES`] dimensions, of less than 2³² lines.
    fn new(dims: &[Steps]) -> Self {
        let mut steps = Self { count: dims.len() as i32, ..Self::default() };
        for (to, dim) in steps.of.iter_mut().zip(dims) {
            *to = LineStep { size: ExactDivisor::new(dim.size), step: dim.stride as u32 };
        }
        steps
    }
}

/// What a kernel that sums the gradients of a bias is given: `BiasSums` of `kernels/fused_bias.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct BiasSums {
    sums: u64,
    kept: LineSteps,
    summed: LineSteps,
    kept_lines: u32,
    summed_lines: u32,
    lines_of_part: u32,
    groups: u32,
}
const _: () = assert!(size_of::<BiasSums>() == 288);

/// f32 or f64 out of the options' f64.
trait Narrow: Copy {
    fn narrow(x: f64) -> Self;
}
impl Narrow for f32 {
    fn narrow(x: f64) -> Self {
        x as f32
    }
}
impl Narrow for f64 {
    fn narrow(x: f64) -> Self {
        x
    }
}

/// A call of the builder, of which a plan says how it is launched.
#[derive(Clone, Copy)]
struct Task<'a> {
    options: &'a Options,
    geometry: &'a Geometry,
    device: &'a CudaDevice,
    /// Of the scores, and of bias and sinks
    dtype: DType,
    /// Of the result, and of its gradient
    out: DType,
    tensors: Addresses,
}

/// The result along the lines of `scores`, in a new storage.
pub(crate) fn forward(
    options: &Options,
    geometry: &Geometry,
    scores: Operand<CudaStorage>,
    around: &Around<CudaStorage>,
    out: DType,
) -> Result<CudaStorage> {
    let device = scores.storage.device();
    let stream = device.cuda_stream();
    let count = geometry.lines.elem_count();
    let (scores_at, _scores_read) = address(&scores, count, &stream)?;
    let (beside, _beside_read) = addresses(geometry, around, &stream)?;
    // SAFETY: the kernel writes every element.
    let mut result = unsafe { alloc(device, out, count)? };
    {
        let (result_at, _result_written) = address_mut(&mut result, 0, count, &stream)?;
        let tensors = Addresses { scores: scores_at, result: result_at, ..beside };
        Task { options, geometry, device, dtype: scores.storage.dtype(), out, tensors }.run()?;
    }
    Ok(result)
}

/// The same over the scores, which begin at `start` of their storage.
pub(crate) fn forward_inplace(
    options: &Options,
    geometry: &Geometry,
    scores: &mut CudaStorage,
    start: usize,
    around: &Around<CudaStorage>,
) -> Result<()> {
    let (device, dtype) = (scores.device().clone(), scores.dtype());
    let stream = device.cuda_stream();
    let (at, _written) = address_mut(scores, start, geometry.lines.elem_count(), &stream)?;
    let (beside, _beside_read) = addresses(geometry, around, &stream)?;
    let tensors = Addresses { scores: at, result: at, ..beside };
    Task { options, geometry, device: &device, dtype, out: dtype, tensors }.run()
}

/// Those of the gradients that are wanted, given the `gradient` of the result.
pub(crate) fn backward(
    options: &Options,
    geometry: &Geometry,
    scores: Operand<CudaStorage>,
    around: &Around<CudaStorage>,
    gradient: Operand<CudaStorage>,
    wanted: &Wanted,
) -> Result<Gradients<CudaStorage>> {
    let device = scores.storage.device();
    let stream = device.cuda_stream();
    let (lines, dtype, out) = (geometry.lines, scores.storage.dtype(), gradient.storage.dtype());
    let count = lines.elem_count();
    // SAFETY: the kernel writes every element.
    let new = |wanted: bool, dtype, count| wanted.then(|| unsafe { alloc(device, dtype, count) }).transpose();
    let mut of_scores = new(wanted.scores, dtype, count)?;
    let mut of_sinks = new(wanted.sinks.is_some(), computed_in(dtype), lines.count())?;
    let bias = {
        let (scores, _scores_read) = address(&scores, count, &stream)?;
        let (gradient, _gradient_read) = address(&gradient, count, &stream)?;
        let (beside, _beside_read) = addresses(geometry, around, &stream)?;
        let (result, _result_written) = optional_mut(&mut of_scores, count, &stream)?;
        let (sinks_gradient, _sinks_written) = optional_mut(&mut of_sinks, lines.count(), &stream)?;
        let tensors = Addresses { scores, gradient, result, sinks_gradient, ..beside };
        let task = Task { options, geometry, device, dtype, out, tensors };
        match &wanted.bias {
            Some(sum) => Some(task.run_with_bias(sum)?),
            None => {
                task.run()?;
                None
            }
        }
    };
    let sinks = of_sinks.zip(wanted.sinks.as_ref()).map(|(terms, sum)| sum_over(terms, sum)).transpose()?;
    Ok(Gradients { scores: of_scores, bias, sinks })
}

/// Of bias, mask and sinks, to be read until the guards are dropped.
fn addresses<'a>(
    geometry: &Geometry,
    around: &Around<'a, CudaStorage>,
    stream: &'a CudaStream,
) -> Result<(Addresses, [Option<SyncOnDrop<'a>>; 3])> {
    let extent = |step: usize, stride: fn(&Axis) -> usize| {
        let along_axes: usize = geometry.axes.iter().map(|axis| (axis.size - 1) * stride(axis)).sum();
        along_axes + (geometry.lines.len - 1) * step + 1
    };
    let (bias, bias_read) = optional(&around.bias, extent(geometry.bias_step, |axis| axis.bias), stream)?;
    let (mask, mask_read) = optional(&around.mask, extent(geometry.mask_step, |axis| axis.mask), stream)?;
    let (sinks, sinks_read) = optional(&around.sinks, extent(0, |axis| axis.sink), stream)?;
    Ok((Addresses { bias, mask, sinks, ..Default::default() }, [bias_read, mask_read, sinks_read]))
}

impl<'a> Task<'a> {
    fn run(&self) -> Result<()> {
        if let Some(scaling) = self.scaling() {
            return by_dtype!(NAME, self.dtype, launch_softmax(self, scaling));
        }
        let facts = functions::facts(self.device)?;
        let plan = plan::fused(self.geometry.lines, self.kind(), self.dtype.size_in_bytes(), facts);
        by_dtype!(NAME, self.dtype, launch(self, plan))
    }

    /// Where nothing is asked for but a scale: what softmax's own kernels, which have one, are told.
    fn scaling(&self) -> Option<Scaling> {
        let &Options { scale, masked_rows, .. } = self.options;
        // Its product with log2 e is a number, and where that with a difference is small, the difference is a number.
        let usual = (1e-30..1e30).contains(&scale);
        let possible = !self.is_backward() && self.is_scale_alone() && self.takes_whole_lines() && usual;
        possible.then_some(Scaling { scale, masked_rows })
    }

    /// Whether nothing but a scale, window and sinks is asked for, and results, gradients among them, are of the scores' dtype.
    fn is_scale_alone(&self) -> bool {
        let &Self { options, dtype, out, tensors, .. } = self;
        let Addresses { bias, mask, logits_gradient, .. } = tensors;
        [bias, mask, logits_gradient] == [0; 3]
            && options.softcap.is_none()
            && options.dropout.is_none()
            && out == dtype
    }

    /// Whether all of a line takes part, and nothing else.
    fn takes_whole_lines(&self) -> bool {
        self.options.window.is_none() && self.tensors.sinks == 0
    }

    /// Runs a backward pass, and returns the gradient of the bias: by a kernel that adds up the logits', or by one that writes them all.
    fn run_with_bias(&self, sum: &SumOver) -> Result<CudaStorage> {
        let &Self { device, dtype, tensors, .. } = self;
        let (stream, lines) = (device.cuda_stream(), self.geometry.lines);
        let facts = functions::facts(device)?;
        let by_lines = sum.of_lines(lines.len).filter(|of| of.kept.len().max(of.summed.len()) <= MAX_AXES);
        let plan = by_lines.and_then(|of| {
            let plan = plan::fused_bias(lines, &of, self.kind(), dtype.size_in_bytes(), facts)?;
            Some((plan, of))
        });
        let Some((plan, of)) = plan else {
            // SAFETY: the kernel writes every element.
            let mut logits = unsafe { alloc(device, computed_in(dtype), lines.elem_count())? };
            {
                let (logits_gradient, _written) = address_mut(&mut logits, 0, lines.elem_count(), &stream)?;
                Self { tensors: Addresses { logits_gradient, ..tensors }, ..*self }.run()?;
            }
            return sum_over(logits, sum);
        };
        let count = plan.parts * sum.sums();
        // SAFETY: the kernel writes every sum of every part.
        let mut sums = unsafe { alloc(device, computed_in(dtype), count)? };
        {
            let (sums, _written) = address_mut(&mut sums, 0, count, &stream)?;
            by_dtype!(NAME, dtype, launch_of_bias(self, plan, &of, sums))?;
        }
        sum_over(sums, &SumOver::new(&[plan.parts, sum.sums()], &[1, sum.sums()]))
    }

    /// What of it a plan depends on.
    fn kind(&self) -> FusedKind {
        let &Self { options, geometry, dtype, out, tensors, .. } = self;
        let Addresses { bias, mask, .. } = tensors;
        let backward = self.is_backward();
        // Elements are multiplied by a number above 0, whose product with log2 e is one, too, or they are masked, …
        let scale = options.scale as f32;
        let scaled = bias == 0 && options.softcap.is_none() && scale > 0.0 && scale < 1e30;
        // … and what else the kernels that hold scores take.
        let whole = self.has_whole_packs();
        let scores = match (backward, whole) {
            (false, true) => mask == 0,
            (false, false) => out == dtype,
            (true, _) => {
                out == dtype
                    && options.output == Output::Probability
                    && tensors.result != 0
                    && tensors.logits_gradient == 0
            }
        };
        let scale_alone = self.is_scale_alone();
        FusedKind {
            backward,
            whole,
            alignment: tensors.common_alignment(),
            scale_alone,
            column: backward && scale_alone && self.takes_whole_lines() && scaled && tensors.result != 0,
            queries: options.window.map_or(0, |window| window.queries),
            scores: scaled && scores,
            capped: options.softcap.is_some(),
            masked_alike: if mask != 0 && geometry.mask_step > 0 { masked_alike(geometry) } else { 0 },
            tiles: self.is_known_to_tiles(),
            narrow: self.is_narrow(),
        }
    }

    fn call<T: CudaElement>(&self, plan: Plan) -> Result<Call<T::Real>>
    where
        T::Real: Narrow,
    {
        let &Self { options, geometry, out, tensors, .. } = self;
        // Those in front that move nothing but along the scores need no kernel's attention.
        let moves_nothing = |axis: &&Axis| axis.bias == 0 && axis.mask == 0 && axis.sink == 0 && axis.query == 0;
        let axes = &geometry.axes[geometry.axes.iter().take_while(moves_nothing).count()..];
        if axes.len() > MAX_AXES {
            candle_core::bail!(
                "{NAME}: bias and mask are broadcast so differently to {} lines of {} that these have {} dimensions, and up to \
                 {MAX_AXES} are possible: give them as `broadcast_as` the scores' shape and `contiguous` makes them",
                self.geometry.lines.count(),
                self.geometry.lines.len,
                axes.len()
            )
        }
        if let Some(axis) = axes.iter().find(|axis| axis.size > u32::MAX as usize) {
            candle_core::bail!("{NAME}: a dimension of {} is more than 2^32 - 1", axis.size)
        }
        let mut axis = [DeviceAxis::default(); MAX_AXES];
        axis.iter_mut().zip(axes).for_each(|(to, &from)| *to = DeviceAxis::new(from));
        let lines = geometry.lines;
        // As far as any key is, where positions are narrow.
        let limit = |keys: usize| keys.min(if plan.is_narrow() { NARROW - 1 } else { 1 << 60 }) as i64;
        let moves = |at: u64, step: usize| if at == 0 { 0 } else { 1 + (step > 0) as i32 };
        let window = options.window;
        // Those of a line for each block, or cluster
        let by_blocks = match plan.kernel {
            Kernel::FusedBlock { backward, lines } => !backward && lines == FusedLines::Packs && window.is_none(),
            Kernel::FusedTile { backward, .. } => !backward && plan.parameter == plan::WHOLE_BLOCK,
            Kernel::FusedCluster { .. } | Kernel::FusedClusterTile { .. } => true,
            _ => false,
        };
        let sharers = self.sharers().filter(|_| by_blocks);
        let cap = options.softcap.unwrap_or(0.0);
        Ok(Call {
            tensors,
            lines: lines.count() as i64,
            len: lines.len as i64,
            inner: lines.inner as i64,
            bias_step: geometry.bias_step as i64,
            mask_step: geometry.mask_step as i64,
            before: window.map_or(0, |window| limit(window.before)),
            after: window.map_or(0, |window| limit(window.after)),
            position: window.map_or(0, |window| lines.len as i64 - window.queries as i64),
            scale: T::Real::narrow(options.scale),
            cap: T::Real::narrow(cap),
            scale_over_cap: T::Real::narrow(options.scale / cap),
            kept_scale: T::Real::narrow(options.dropout.map_or(1.0, |dropout| dropout.kept_scale())),
            steepness: T::Real::narrow(self.steepness().unwrap_or(0.0)),
            threshold: options.dropout.map_or(0, |dropout| dropout.threshold << 16),
            keys: options.dropout.map_or([[0, 0]; 7], |dropout| round_keys(dropout.seed)),
            dtype: match out {
                DType::F32 => 0,
                DType::F64 => 1,
                DType::F16 => 2,
                DType::BF16 => 3,
                other => return Err(unsupported_dtype(other, NAME)),
            },
            adds: moves(tensors.bias, geometry.bias_step),
            masks: moves(tensors.mask, geometry.mask_step),
            log: (options.output == Output::LogProbability) as i32,
            window: window.is_some() as i32,
            nan_rows: (options.masked_rows == MaskedRows::Nan) as i32,
            axes: axes.len() as i32,
            axis,
            sharers: sharers.map_or_else(ExactDivisor::default, |axis| ExactDivisor::new(axis.size)),
            apart: sharers.map_or_else(ExactDivisor::default, |axis| ExactDivisor::new(axis.line)),
            alike: if plan.shares_mask { ExactDivisor::new(masked_alike(geometry)) } else { ExactDivisor::default() },
        })
    }

    /// Forward, there is no gradient.
    fn is_backward(&self) -> bool {
        self.tensors.gradient != 0
    }

    /// Whether scores and result are of half precision.
    fn is_half(&self) -> bool {
        [self.dtype, self.out].iter().all(|dtype| matches!(dtype, DType::F16 | DType::BF16))
    }

    /// What scores are multiplied with to be the exponents, for base 2, that give softcap's tangents in few instructions, if these are exact enough: they
    /// are off by up to 3e-7, and a logit by that times the cap, which results of half precision, as the scores are then, have room for.
    fn steepness(&self) -> Option<f64> {
        let cap = self.options.softcap.filter(|&cap| cap <= 128.0)?;
        let steepness = 2.0 * std::f64::consts::LOG2_E * self.options.scale / cap;
        // What is far from 1 is no normal number, or makes none of scores.
        let usual = (1e-30..1e30).contains(&steepness.abs());
        (self.is_half() && usual).then_some(steepness)
    }

    /// The dimension along which most lines read the same of a bias or mask, if they are not neighbours.
    fn sharers(&self) -> Option<&'a Axis> {
        let &Self { geometry, tensors, .. } = self;
        let biased = tensors.bias != 0 && geometry.bias_step > 0;
        let masked = tensors.mask != 0 && geometry.mask_step > 0;
        let step = |axis: &Axis| if biased { axis.bias } else { axis.mask };
        let neighbours_share = geometry.axes.last().is_none_or(|axis| step(axis) == 0);
        if !(biased || masked) || neighbours_share {
            return None;
        }
        geometry.axes.iter().filter(|axis| step(axis) == 0).max_by_key(|axis| axis.size)
    }

    /// Whether `kernels/fused_tile.cuh` has kernels for it. Results of another dtype than the scores' or, backward, their gradients are not dropped
    /// there, and beside half precision, where gradients are held as they lie in memory, there are none. Of half precision gradients lie in words as the
    /// scores do, and a softcap has a steepness.
    fn is_known_to_tiles(&self) -> bool {
        use DType::{BF16, F16, F32, F64};
        let &Self { options, tensors, .. } = self;
        let backward = self.is_backward();
        let dtypes = match (self.dtype, self.out) {
            (scores, result) if scores == result => true,
            (F16 | BF16, F32) => !backward,
            (F64, F32) | (F32, F16 | BF16) => !(backward && options.dropout.is_some()),
            _ => false,
        };
        let in_words = !backward || tensors.scores % 4 == tensors.gradient % 4;
        let steep = options.softcap.is_none() || self.steepness().is_some();
        dtypes && (!matches!(self.dtype, F16 | BF16) || in_words && steep)
    }

    /// Whether 32 bits are enough for the number of a line, a step along any axis, and the positions of a window.
    fn is_narrow(&self) -> bool {
        let &Self { options, geometry, .. } = self;
        let fits = |n: usize| n <= u32::MAX as usize;
        // Elements of 8 bytes at most
        let spans = |step: usize| fits(step.saturating_mul(8));
        fits(geometry.lines.count())
            && spans(geometry.bias_step)
            && spans(geometry.mask_step)
            && geometry.axes.iter().all(|axis| fits(axis.bias) && fits(axis.mask) && fits(axis.sink))
            && options.window.is_none_or(|window| geometry.lines.len < NARROW && window.queries < NARROW)
    }

    /// Whether every line consists of whole packs of 16 bytes of the scores, and of as many elements of the other tensors at
    /// addresses that allow as wide accesses.
    fn has_whole_packs(&self) -> bool {
        let &Self { geometry, tensors, .. } = self;
        let size = self.dtype.size_in_bytes();
        let pack = 16 / size;
        // Either a value for all of a line, or its elements side by side.
        let around = |at: u64, step: usize, size: usize, stride: fn(&Axis) -> usize| {
            at == 0
                || step == 0
                || (step == 1
                    && alignment(at) >= pack * size
                    && geometry.axes.iter().all(|axis| stride(axis).is_multiple_of(pack)))
        };
        geometry.lines.inner == 1
            && geometry.lines.len.is_multiple_of(pack)
            && tensors.common_alignment() >= 16
            && around(tensors.bias, geometry.bias_step, size, |axis| axis.bias)
            && around(tensors.mask, geometry.mask_step, 1, |axis| axis.mask)
    }
}

fn launch<T: CudaElement>(task: &Task, plan: Plan) -> Result<()>
where
    T::Real: Narrow,
{
    let call = task.call::<T>(plan)?;
    // SAFETY: the addresses are of storages as large as the geometry says, checked when they were taken; a plan covers all
    // lines, and the kernels mask or stride over what lies beyond.
    unsafe { launch::fused::<T, _>(task.device, call, task.geometry.lines, plan) }
}

fn launch_softmax<T: CudaElement>(task: &Task, scaling: Scaling) -> Result<()> {
    let Addresses { scores, result, .. } = task.tensors;
    let how = (None, task.options.output, scaling);
    // SAFETY: the addresses are of as many elements as the geometry has, checked when they were taken.
    unsafe { launch::softmax_at::<T>(task.device, [scores, result], task.geometry.lines, how) }
}

fn launch_of_bias<T: CudaElement>(task: &Task, plan: FusedBiasPlan, of: &SumOver, sums: u64) -> Result<()>
where
    T::Real: Narrow,
{
    let FusedBiasPlan { plan, lines_of_part, parts } = plan;
    let call = task.call::<T>(plan)?;
    let bias = BiasSums {
        sums,
        kept: LineSteps::new(&of.kept),
        summed: LineSteps::new(&of.summed),
        kept_lines: of.sums() as u32,
        summed_lines: of.terms() as u32,
        lines_of_part: lines_of_part as u32,
        groups: (of.sums() * parts) as u32,
    };
    // SAFETY: as above, and there is a line of sums for each of the groups, which take all lines, less than 2³².
    unsafe { launch::fused_bias::<T, _, _>(task.device, call, bias, plan) }
}

/// How many neighbouring lines have the same mask of an element for each key: one where these are no neighbours in memory.
fn masked_alike(geometry: &Geometry) -> usize {
    if geometry.mask_step != 1 {
        return 1;
    }
    geometry.axes.iter().rev().take_while(|axis| axis.mask == 0).map(|axis| axis.size).product()
}

/// The keys of Philox's rounds.
fn round_keys(seed: u64) -> [[u32; 2]; 7] {
    let key = [seed as u32, (seed >> 32) as u32];
    std::array::from_fn(|round| {
        let times = |step: u32| step.wrapping_mul(round as u32);
        [key[0].wrapping_add(times(0x9E37_79B9)), key[1].wrapping_add(times(0xBB67_AE85))]
    })
}

/// A new storage of a dtype.
///
/// # Safety
/// Every element is written before it is read.
unsafe fn alloc(device: &CudaDevice, dtype: DType, count: usize) -> Result<CudaStorage> {
    // SAFETY: as promised by the caller.
    let slice = unsafe {
        match dtype {
            DType::F32 => CudaStorageSlice::F32(device.alloc(count)?),
            DType::F64 => CudaStorageSlice::F64(device.alloc(count)?),
            DType::F16 => CudaStorageSlice::F16(device.alloc(count)?),
            DType::BF16 => CudaStorageSlice::BF16(device.alloc(count)?),
            other => return Err(unsupported_dtype(other, NAME)),
        }
    };
    Ok(CudaStorage { slice, device: device.clone() })
}

/// Where an operand's elements are, of which there are `extent` from its start on; to be read until the guard is dropped.
fn address<'a>(
    operand: &Operand<'a, CudaStorage>,
    extent: usize,
    stream: &'a CudaStream,
) -> Result<(u64, SyncOnDrop<'a>)> {
    fn of<'a, T>(
        slice: &'a CudaSlice<T>,
        start: usize,
        extent: usize,
        stream: &'a CudaStream,
    ) -> Result<(u64, SyncOnDrop<'a>)> {
        check_extent(start, extent, slice.len())?;
        let (at, read) = slice.device_ptr(stream);
        Ok((at + (start * size_of::<T>()) as u64, read))
    }
    match &operand.storage.slice {
        CudaStorageSlice::U8(slice) => of(slice, operand.start, extent, stream),
        CudaStorageSlice::F32(slice) => of(slice, operand.start, extent, stream),
        CudaStorageSlice::F64(slice) => of(slice, operand.start, extent, stream),
        CudaStorageSlice::F16(slice) => of(slice, operand.start, extent, stream),
        CudaStorageSlice::BF16(slice) => of(slice, operand.start, extent, stream),
        _ => Err(unsupported_dtype(operand.storage.dtype(), NAME)),
    }
}

/// The same of elements to be written.
fn address_mut<'a>(
    storage: &'a mut CudaStorage,
    start: usize,
    extent: usize,
    stream: &'a CudaStream,
) -> Result<(u64, SyncOnDrop<'a>)> {
    fn of<'a, T>(
        slice: &'a mut CudaSlice<T>,
        start: usize,
        extent: usize,
        stream: &'a CudaStream,
    ) -> Result<(u64, SyncOnDrop<'a>)> {
        check_extent(start, extent, slice.len())?;
        let (at, written) = slice.device_ptr_mut(stream);
        Ok((at + (start * size_of::<T>()) as u64, written))
    }
    let dtype = storage.dtype();
    match &mut storage.slice {
        CudaStorageSlice::F32(slice) => of(slice, start, extent, stream),
        CudaStorageSlice::F64(slice) => of(slice, start, extent, stream),
        CudaStorageSlice::F16(slice) => of(slice, start, extent, stream),
        CudaStorageSlice::BF16(slice) => of(slice, start, extent, stream),
        _ => Err(unsupported_dtype(dtype, NAME)),
    }
}

fn optional<'a>(
    operand: &Option<Operand<'a, CudaStorage>>,
    extent: usize,
    stream: &'a CudaStream,
) -> Result<(u64, Option<SyncOnDrop<'a>>)> {
    match operand {
        Some(operand) => address(operand, extent, stream).map(|(at, read)| (at, Some(read))),
        None => Ok((0, None)),
    }
}

fn optional_mut<'a>(
    storage: &'a mut Option<CudaStorage>,
    extent: usize,
    stream: &'a CudaStream,
) -> Result<(u64, Option<SyncOnDrop<'a>>)> {
    match storage {
        Some(storage) => address_mut(storage, 0, extent, stream).map(|(at, written)| (at, Some(written))),
        None => Ok((0, None)),
    }
}

fn check_extent(start: usize, extent: usize, len: usize) -> Result<()> {
    if start > len || extent > len - start {
        candle_core::bail!("{NAME}: {extent} elements from {start} on lie outside a storage of {len}")
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotients() {
        for size in [2usize, 3, 5, 7, 8, 64, 641, 1000, 65_535, 65_536, 0x7fff_ffff, 0xffff_fffe, 0xffff_ffff] {
            let divisor = ExactDivisor::new(size);
            let edges = [0u32, 1, 2, 3, 1000, 65_535, 1 << 31, u32::MAX - 1, u32::MAX];
            let multiples = (1..1000u32).flat_map(|k| [-1i64, 0, 1].map(|d| (k as i64 * size as i64 + d) as u32));
            for n in edges.into_iter().chain(multiples) {
                let high = ((n as u64 * divisor.factor as u64) >> 32) as u32;
                let found = (high + ((n - high) >> 1)) >> divisor.shift;
                assert_eq!(found, (n as u64 / size as u64) as u32, "{n} / {size}");
            }
        }
    }
}
