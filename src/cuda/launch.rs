//! HOW a kernel is launched: the only `unsafe` launches.

use super::functions::{self, Function, Key};
use super::plan::{
    self, narrow_units, Elements, Kernel, NarrowUnits, Plan, Strips, CHUNK_BYTES, MAX_BOX_ROWS, MOST_TOP_K,
    NARROW_ALONE, PACK_BYTES, RESIDENT_BOX, RESIDENT_COLUMNS,
};
use super::{alignment, sums};
use crate::fused::MaskedRows;
use crate::lines::Lines;
use crate::loss_of_lines::LossOfLines;
use crate::op::{Output, Schedule};
use crate::state::Real;
use crate::statistics::{statistics_of, Ignored, MOST_GRADIENTS};
use candle_core::cuda_backend::cudarc::driver::{
    sys, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr,
};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{CudaDevice, Result};
use half::{bf16, f16};
use std::ffi::c_void;
use sys::CUlaunchAttributeID::{
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
};

/// An element type that the kernels are instantiated for.
pub(super) trait CudaElement: CudaDType + DeviceRepr + 'static {
    /// What it is called in the kernels' names.
    const NAME: &'static str;
    /// What it is computed in.
    type Real: Real + DeviceRepr + CudaDType;
}

impl CudaElement for f32 {
    const NAME: &'static str = "f32";
    type Real = f32;
}
impl CudaElement for f64 {
    const NAME: &'static str = "f64";
    type Real = f64;
}
impl CudaElement for f16 {
    const NAME: &'static str = "f16";
    type Real = f32;
}
impl CudaElement for bf16 {
    const NAME: &'static str = "bf16";
    type Real = f32;
}

/// What makes logits of elements: `Scaling` of `kernels/element.cuh`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scaling {
    /// Above 0, and a normal number of what is computed in.
    pub scale: f64,
    /// What a line becomes that is −∞ everywhere.
    pub masked_rows: MaskedRows,
}

impl Scaling {
    /// Of softmax itself.
    pub const NONE: Self = Self { scale: 1.0, masked_rows: MaskedRows::Nan };

    /// Three numbers of `R`, f32 or f64.
    fn bits<R>(self) -> [u64; 3] {
        let least = match self.masked_rows {
            MaskedRows::Zero => 1e-30,
            MaskedRows::Nan => 0.0,
        };
        let numbers = [self.scale, self.scale * std::f64::consts::LOG2_E, least];
        if size_of::<R>() == size_of::<f64>() {
            numbers.map(f64::to_bits)
        } else {
            let [scale, steepness, least] = numbers.map(|x| u64::from((x as f32).to_bits()));
            [scale | steepness << 32, least, 0]
        }
    }
}

/// Arguments of a kernel, each passed by the address of a copy.
#[derive(Clone, Copy)]
struct Arguments {
    values: [[u64; 3]; 13],
    count: usize,
}

impl Arguments {
    fn new() -> Self {
        Self { values: [[0; 3]; 13], count: 0 }
    }

    /// A pointer or a 64-bit number; a 32-bit one is its low half.
    fn push(self, value: u64) -> Self {
        self.push_bits([value, 0, 0])
    }

    fn push_bits(mut self, value: [u64; 3]) -> Self {
        self.values[self.count] = value;
        self.count += 1;
        self
    }
}

/// # Safety
/// The arguments are those of the function, and the plan's geometry keeps it within the memory that they point to.
unsafe fn launch(
    stream: &CudaStream,
    key: Key,
    device: &CudaDevice,
    plan: Plan,
    mut arguments: Arguments,
) -> Result<()> {
    let mut addresses = arguments.values.each_mut().map(address_of);
    // SAFETY: as promised by the caller.
    unsafe { launch_with(stream, key, device, plan, &mut addresses) }
}

fn address_of<T>(value: &mut T) -> *mut c_void {
    std::ptr::from_mut(value).cast()
}

fn attribute(id: sys::CUlaunchAttributeID) -> sys::CUlaunchAttribute {
    // SAFETY: a union of plain numbers.
    sys::CUlaunchAttribute { id, pad: [0; 4], value: unsafe { std::mem::zeroed() } }
}

/// That so many blocks make a cluster.
pub(super) fn cluster_of(blocks: u32) -> sys::CUlaunchAttribute {
    let mut attribute = attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
    attribute.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: blocks, y: 1, z: 1 };
    attribute
}

/// The driver's form of a plan. It points to the attributes.
pub(super) fn config(
    plan: Plan,
    stream: &CudaStream,
    attributes: &mut [sys::CUlaunchAttribute],
) -> sys::CUlaunchConfig {
    sys::CUlaunchConfig {
        gridDimX: plan.grid.0,
        gridDimY: plan.grid.1,
        gridDimZ: 1,
        blockDimX: plan.block,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: plan.shared_bytes,
        hStream: stream.cu_stream(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    }
}

/// # Safety
/// The addresses are of values, at least as many as the function has parameters and of their types; the rest as above.
unsafe fn launch_with(
    stream: &CudaStream,
    key: Key,
    device: &CudaDevice,
    plan: Plan,
    addresses: &mut [*mut c_void],
) -> Result<()> {
    let Function { function, waits } = functions::get(device, key)?;
    let mut attributes = [cluster_of(plan.cluster); 2];
    let mut count = usize::from(plan.cluster > 1);
    if plan.is_cooperative() {
        attributes[count] = attribute(CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
        attributes[count].value.cooperative = 1;
        count += 1;
    }
    if waits {
        attributes[count] = attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
        attributes[count].value.programmaticStreamSerializationAllowed = 1;
        count += 1;
    }
    let config = config(plan, stream, &mut attributes[..count]);
    stream.context().bind_to_thread().w()?;
    // SAFETY: the addresses are of values that live until the call returns, at least as many as the function has parameters
    // by the caller's promise, which covers the rest.
    let result =
        unsafe { sys::cuLaunchKernelEx(&config, function.cu_function(), addresses.as_mut_ptr(), std::ptr::null_mut()) };
    result.result().w()
}

/// What a plan depends on where all tensors are as aligned as this.
fn alike<T>(addresses: u64) -> Elements {
    Elements::alike(size_of::<T>(), alignment(addresses))
}

fn check_lengths<const N: usize>(lines: Lines, lengths: [usize; N]) -> Result<()> {
    if lengths.iter().any(|&len| len != lines.elem_count()) {
        candle_core::bail!("candle-softmax: tensors of {lengths:?} elements for {lines:?}")
    }
    Ok(())
}

/// By the kernel that the plan names. Without `x`, over what is in `y`: every kernel reads the elements of a line before it writes them, or for the last time in the
/// thread that then writes them, and makes no use of what it reads of others, but for [`Strips::Odd`], which is not chosen then; `x` is not `__restrict__`, so its loads are coherent.
pub(super) fn softmax<T: CudaElement>(
    device: &CudaDevice,
    x: Option<CudaView<'_, T>>,
    y: &mut CudaViewMut<'_, T>,
    lines: Lines,
    how: (Option<Schedule>, Output, Scaling),
) -> Result<()> {
    check_lengths(lines, [x.as_ref().map_or(y.len(), |x| x.len()), y.len()])?;
    let stream = device.cuda_stream();
    let x_and_read = x.as_ref().map(|x| x.device_ptr(&stream));
    let (y, _y_written) = y.device_ptr_mut(&stream);
    let x = x_and_read.as_ref().map_or(y, |(x, _read)| *x);
    // SAFETY: both hold the elements of `lines`, and are read and written on this stream.
    unsafe { softmax_at::<T>(device, [x, y], lines, how) }
}

/// The same by the addresses of input and output.
///
/// # Safety
/// They hold lines × len elements of `T`, which may be read and written on the device's stream.
pub(super) unsafe fn softmax_at<T: CudaElement>(
    device: &CudaDevice,
    [x, y]: [u64; 2],
    lines: Lines,
    (schedule, output, scaling): (Option<Schedule>, Output, Scaling),
) -> Result<()> {
    let stream = device.cuda_stream();
    let key = |kernel| Key { kernel, output, dtype: T::NAME };
    let mut scaling = scaling.bits::<T::Real>();
    let (size, input_alignment, output_alignment) = (size_of::<T>(), alignment(x), alignment(y));
    let elements = Elements { size, input_alignment, output_alignment, in_place: x == y };
    let plan = plan::softmax(lines, schedule, output, elements, functions::facts(device)?);
    let (count, len, inner) = (lines.count() as u64, lines.len as u64, lines.inner as u64);
    let (parameter, log) = (plan.parameter as u64, (output == Output::LogProbability) as u64);
    let tensors = Arguments::new().push(x).push(y);
    // SAFETY (of all launches below): these are the parameters of the kernels named; x and y hold lines × len elements by the
    // caller's promise; a plan covers all lines, and the kernels mask or stride over what lies beyond.
    match plan.kernel {
        Kernel::SplitApply { whole } => {
            // SAFETY: the first kernel writes every state (two numbers each), before the second reads them.
            let mut states = unsafe { device.alloc::<T::Real>(2 * plan.blocks())? };
            let (states, _states_written) = states.device_ptr_mut(&stream);
            for kernel in [Kernel::SplitStates { whole }, plan.kernel] {
                let arguments = Arguments::new().push(x).push(states).push(y).push(len).push_bits(scaling);
                unsafe { launch(&stream, key(kernel), device, plan, arguments)? };
            }
            Ok(())
        }
        Kernel::SplitColumnsApply { whole } => {
            let NarrowUnits { size, across, .. } = narrow_units(lines, whole, size_of::<T>());
            // SAFETY: the first kernel writes every state (two numbers each), before the second reads them.
            let mut states = unsafe { device.alloc::<T::Real>(2 * plan.blocks() * across * size)? };
            let (states, _states_written) = states.device_ptr_mut(&stream);
            let of = |arguments: Arguments| arguments.push(len).push(inner).push(parameter).push(across as u64);
            let first = of(Arguments::new().push(x).push(states)).push_bits(scaling);
            unsafe { launch(&stream, key(Kernel::SplitColumnsStates { whole }), device, plan, first)? };
            let second = of(Arguments::new().push(x).push(states).push(y)).push(log).push_bits(scaling);
            unsafe { launch(&stream, key(plan.kernel), device, plan, second) }
        }
        Kernel::Grid => {
            let arguments = |states| {
                let tensors = Arguments::new().push(x).push(states).push(y);
                tensors.push(count).push(len).push(log).push_bits(scaling)
            };
            let states = 2 * plan.grid.0 as usize;
            // The states have room in the output's first chunk, which is written last then; asking for memory would come between this
            // kernel and the one before, while whose last blocks run it is set up (1 x 16777216 bf16 22.0 us, so 21.1).
            if x != y && states * size_of::<f32>() + PACK_BYTES <= CHUNK_BYTES {
                return unsafe { launch(&stream, key(plan.kernel), device, plan, arguments(y.next_multiple_of(8))) };
            }
            // SAFETY: the kernel writes every state (two numbers each) before it reads any.
            let mut states = unsafe { device.alloc::<f32>(states)? };
            let (states, _states_written) = states.device_ptr_mut(&stream);
            unsafe { launch(&stream, key(plan.kernel), device, plan, arguments(states)) }
        }
        Kernel::Strip(strips) => {
            let (size, rows) = (size_of::<T>(), plan.parameter as usize);
            let clusters = functions::resident_clusters(device, key(plan.kernel), plan)?;
            let plan = Plan { grid: (plan.grid.0.min(clusters * plan.cluster), 1), ..plan };
            if strips == Strips::Odd {
                let count = strips.count(lines, size) as u64;
                let arguments = tensors.push(len).push(inner).push(count).push(parameter).push_bits(scaling);
                return unsafe { launch(&stream, key(plan.kernel), device, plan, arguments) };
            }
            let before = (x % 16) as usize / size;
            let columns = strips.copied_bytes(size) / size;
            let rows_of_box = rows / rows.div_ceil(MAX_BOX_ROWS);
            let first = x - (before * size) as u64;
            let mut map = tensor_map(&stream, first, size, lines, before, [columns, rows_of_box])?;
            let (mut y, mut numbers) =
                (y, [lines.len, lines.inner, strips.count(lines, size), rows, before].map(|number| number as i32));
            let [len, inner, count, rows, before] = numbers.each_mut().map(address_of);
            let [map, y, scaling] = [address_of(&mut map), address_of(&mut y), address_of(&mut scaling)];
            let addresses = &mut [map, y, len, inner, count, rows, before, scaling];
            unsafe { launch_with(&stream, key(plan.kernel), device, plan, addresses) }
        }
        Kernel::Resident { .. } => {
            let mut map = tensor_map(&stream, x, size_of::<T>(), lines, 0, [RESIDENT_COLUMNS, RESIDENT_BOX])?;
            let (mut x, mut y) = (x, y);
            let mut numbers = [len, inner, parameter, plan.streams as u64].map(|number| number as i32);
            let [len, inner, rows, streams] = numbers.each_mut().map(address_of);
            let [map, x, y] = [address_of(&mut map), address_of(&mut x), address_of(&mut y)];
            let addresses = &mut [map, x, y, len, inner, rows, streams, address_of(&mut scaling)];
            unsafe { launch_with(&stream, key(plan.kernel), device, plan, addresses) }
        }
        kernel => {
            let arguments = match kernel {
                Kernel::Warp { .. } | Kernel::Block { .. } | Kernel::Cluster { .. } => {
                    tensors.push(count).push(len).push(parameter)
                }
                Kernel::Column { .. } => tensors.push(len).push(inner).push(parameter),
                Kernel::Run { .. } => tensors.push(count).push(parameter),
                Kernel::FewRows { .. } => {
                    let threads = parameter * lines.outer as u64;
                    tensors.push(len).push(inner).push(parameter).push(threads)
                }
                Kernel::Narrow { whole } => push_narrow(tensors, lines, whole, size_of::<T>(), plan),
                Kernel::Tile { .. } => tensors.push(count).push(len).push(parameter).push(log),
                Kernel::SafeRows | Kernel::SafeShortRows | Kernel::OnlineRows | Kernel::OnlineShortRows => {
                    tensors.push(count).push(len).push(log)
                }
                Kernel::Shared { .. } => tensors.push(count).push(len),
                _ => tensors.push(count).push(len).push(inner).push(log),
            };
            unsafe { launch(&stream, key(kernel), device, plan, arguments.push_bits(scaling)) }
        }
    }
}

/// Describes the elements of `lines` to the hardware that copies boxes of them, of [columns, rows]: (outer, len, inner), of which
/// the first `before` of a row are not of the lines.
fn tensor_map(
    stream: &CudaStream,
    at: u64,
    size: usize,
    lines: Lines,
    before: usize,
    [columns, rows]: [usize; 2],
) -> Result<sys::CUtensorMap> {
    let row = (lines.inner * size) as u64;
    let lengths = [lines.inner + before, lines.len, lines.outer].map(|len| len as u64);
    let strides = [row, row * lines.len as u64];
    let lengths_of_box = [columns, rows, 1].map(|len| len as u32);
    let dtype = match size {
        2 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
        _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT32,
    };
    // The driver wants a context, which a thread has none of whose first call works in place.
    stream.context().bind_to_thread().w()?;
    let mut map = std::mem::MaybeUninit::uninit();
    // SAFETY: three lengths, two strides and three lengths of the box, for three dimensions; nothing is read at `at`.
    unsafe {
        let result = sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            dtype,
            3,
            at as *mut c_void,
            lengths.as_ptr(),
            strides.as_ptr(),
            lengths_of_box.as_ptr(),
            [1; 3].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        );
        result.result().w()?;
        Ok(map.assume_init())
    }
}

/// In which phases a group's kernel runs, as `Phase` of `kernels/line_group.cuh` numbers them.
fn phases(plan: Plan) -> &'static [i32] {
    if plan.parts() > 1 {
        &[1, 2]
    } else {
        &[0]
    }
}

/// Numbers of the states of `kernels/fused_group.cuh`, at most, and of `kernels/softmax_backward.cu`.
const FUSED_STATE: usize = 6;
const BACKWARD_STATE: usize = 2;

/// Room for the states of the parts that lines are split into, if they are, each of so many numbers.
fn states<R: CudaDType + DeviceRepr>(
    device: &CudaDevice,
    lines: Lines,
    plan: Plan,
    numbers: usize,
) -> Result<Option<CudaSlice<R>>> {
    let split = plan.parts() > 1;
    // SAFETY: the first phase writes every state, before the second reads them.
    split.then(|| unsafe { device.alloc::<R>(numbers * lines.count() * plan.parts()) }).transpose()
}

/// # Safety
/// `call` is what the kernels of `kernels/fused.cuh` take for these elements; its pointers lead to as much memory on the device
/// as it says, and the plan covers its lines.
pub(super) unsafe fn fused<T: CudaElement, C>(
    device: &CudaDevice,
    mut call: C,
    lines: Lines,
    plan: Plan,
) -> Result<()> {
    let stream = device.cuda_stream();
    let key = Key { kernel: plan.kernel, output: Output::Probability, dtype: T::NAME };
    let (mut parameter, mut groups) = (plan.parameter, plan.groups(lines) as i64);
    let mut states = states::<T::Real>(device, lines, plan, FUSED_STATE)?;
    let states = states.as_mut().map(|states| states.device_ptr_mut(&stream));
    let mut parts = states.as_ref().map_or(0, |(parts, _written)| *parts);
    for mut phase in phases(plan).iter().copied() {
        let [call, parameter, groups] = [address_of(&mut call), address_of(&mut parameter), address_of(&mut groups)];
        let addresses = &mut [call, parameter, groups, address_of(&mut phase), address_of(&mut parts)];
        // SAFETY: as promised by the caller; not all kernels have other parameters than the first.
        unsafe { launch_with(&stream, key, device, plan, addresses)? };
    }
    Ok(())
}

/// The same for the kernels of `kernels/fused_bias.cuh`.
///
/// # Safety
/// As above, and `bias` is what they take beside the call.
pub(super) unsafe fn fused_bias<T: CudaElement, C, B>(
    device: &CudaDevice,
    mut call: C,
    mut bias: B,
    plan: Plan,
) -> Result<()> {
    let key = Key { kernel: plan.kernel, output: Output::Probability, dtype: T::NAME };
    let mut parameter = plan.parameter;
    let addresses = &mut [address_of(&mut call), address_of(&mut bias), address_of(&mut parameter)];
    // SAFETY: as promised by the caller.
    unsafe { launch_with(&device.cuda_stream(), key, device, plan, addresses) }
}

pub(super) fn softmax_backward<T: CudaElement>(
    device: &CudaDevice,
    [y, g]: [CudaView<'_, T>; 2],
    grad: &mut CudaViewMut<'_, T>,
    lines: Lines,
    output: Output,
) -> Result<()> {
    check_lengths(lines, [y.len(), g.len(), grad.len()])?;
    let stream = device.cuda_stream();
    let (y, _y_read) = y.device_ptr(&stream);
    let (g, _g_read) = g.device_ptr(&stream);
    let (grad, _grad_written) = grad.device_ptr_mut(&stream);
    let plan = plan::softmax_backward(lines, alike::<T>(y | g | grad), functions::facts(device)?);
    let (len, inner) = (lines.len as u64, lines.inner as u64);
    let (parameter, log) = (plan.parameter as u64, (output == Output::LogProbability) as u64);
    let tensors = Arguments::new().push(y).push(g).push(grad);
    let key = |kernel| Key { kernel, output, dtype: T::NAME };
    let rows = tensors.push(lines.count() as u64).push(len);
    let groups = plan.groups(lines) as u64;
    let arguments = match plan.kernel {
        Kernel::BackwardTile { .. } | Kernel::BackwardWarp { .. } => rows.push(parameter).push(log),
        Kernel::BackwardBlock { .. } | Kernel::BackwardCluster { .. } => tensors.push(len).push(log),
        Kernel::BackwardColumn { .. } => tensors.push(len).push(inner).push(parameter).push(log),
        Kernel::BackwardNarrow { whole } => push_narrow(tensors, lines, whole, size_of::<T>(), plan).push(log),
        Kernel::BackwardSplitColumns { whole } => {
            let NarrowUnits { size, across, .. } = narrow_units(lines, whole, size_of::<T>());
            // SAFETY: the first kernel writes every sum, before the second reads them.
            let mut sums = unsafe { device.alloc::<T::Real>(plan.blocks() * across * size)? };
            let (sums, _sums_written) = sums.device_ptr_mut(&stream);
            let of = |tensors: Arguments| tensors.push(len).push(inner).push(parameter).push(across as u64).push(log);
            let first = of(Arguments::new().push(y).push(g).push(sums));
            unsafe { launch(&stream, key(Kernel::BackwardSplitSums { whole }), device, plan, first)? };
            let second = of(Arguments::new().push(y).push(g).push(sums).push(grad));
            return unsafe { launch(&stream, key(plan.kernel), device, plan, second) };
        }
        _ => {
            let arguments = tensors.push(groups).push(len).push(inner).push(parameter).push(log);
            let mut sums = states::<T::Real>(device, lines, plan, BACKWARD_STATE)?;
            let sums = sums.as_mut().map(|sums| sums.device_ptr_mut(&stream));
            let parts = sums.as_ref().map_or(0, |(parts, _written)| *parts);
            for &phase in phases(plan) {
                // SAFETY: as above, with three tensors.
                unsafe { launch(&stream, key(plan.kernel), device, plan, arguments.push(phase as u64).push(parts))? };
            }
            return Ok(());
        }
    };
    // SAFETY: as above, with three tensors.
    unsafe { launch(&stream, key(plan.kernel), device, plan, arguments) }
}

/// What the kernels for narrow rows are told of the lines.
fn push_narrow(tensors: Arguments, lines: Lines, whole: bool, size: usize, plan: Plan) -> Arguments {
    let (alone, shift) = (plan.parameter == NARROW_ALONE, plan.parameter.min(NARROW_ALONE - 1));
    let across = narrow_units(lines, whole, size).across;
    let lengths = tensors.push(lines.outer as u64).push(lines.len as u64).push(lines.inner as u64);
    lengths.push(across as u64).push(shift as u64).push(alone as u64)
}

/// What a loss knows of the lines, checked: a target for each, and a weight for each class.
pub(super) struct Classes<'a, R> {
    pub targets: CudaView<'a, i64>,
    pub ignored: Ignored,
    pub weights: Option<CudaView<'a, R>>,
    pub smooth: bool,
}

impl<R> Classes<'_, R> {
    /// How many there are of each line, as the kernels have it, too.
    fn statistics(&self) -> usize {
        statistics_of(self.weights.is_some(), self.smooth)
    }

    fn check(&self, lines: Lines) -> Result<()> {
        let weights = self.weights.as_ref().map_or(lines.len, |weights| weights.len());
        if self.targets.len() != lines.count() || weights != lines.len {
            candle_core::bail!(
                "candle-softmax: {} targets and {weights} weights of classes for {lines:?}",
                self.targets.len()
            )
        }
        Ok(())
    }
}

/// The kernels that follow give every line its place in a grid's first dimension.
fn check_count(lines: Lines) -> Result<()> {
    if lines.count() > i32::MAX as usize {
        candle_core::bail!("candle-softmax: {} lines, and at most 2^31 - 1 at once run on CUDA", lines.count())
    }
    Ok(())
}

/// Log-sum-exps of the lines, or with `classes` their statistics.
pub(super) fn statistics<T: CudaElement, O: DeviceRepr>(
    device: &CudaDevice,
    x: CudaView<'_, T>,
    out: &mut CudaViewMut<'_, O>,
    lines: Lines,
    classes: Option<Classes<'_, T::Real>>,
) -> Result<()> {
    check_lengths(lines, [x.len()])?;
    check_count(lines)?;
    let (per_line, size) = match &classes {
        None => (1, size_of::<T>()),
        Some(classes) => {
            classes.check(lines)?;
            (classes.statistics(), size_of::<T::Real>())
        }
    };
    if out.len() != per_line * lines.count() || size_of::<O>() != size {
        candle_core::bail!("candle-softmax: {} numbers for the statistics of {lines:?}", out.len())
    }
    let stream = device.cuda_stream();
    let (x, _x_read) = x.device_ptr(&stream);
    let (out, _out_written) = out.device_ptr_mut(&stream);
    let targets = classes.as_ref().map(|classes| classes.targets.device_ptr(&stream));
    let weights = classes.as_ref().and_then(|classes| classes.weights.as_ref()).map(|w| w.device_ptr(&stream));
    let smooth = classes.as_ref().is_some_and(|classes| classes.smooth);
    let plan = plan::statistics(lines, alike::<T>(x), smooth, functions::facts(device)?);
    let arguments = Arguments::new()
        .push(x)
        .push(out)
        .push(lines.count() as u64)
        .push(lines.len as u64)
        .push(lines.inner as u64)
        .push(plan.parameter as u64)
        .push(plan.groups(lines) as u64)
        .push(targets.as_ref().map_or(0, |(targets, _read)| *targets))
        .push(classes.as_ref().map_or(0, |classes| classes.ignored.0 as u64))
        .push(weights.as_ref().map_or(0, |(weights, _read)| *weights))
        .push(smooth as u64);
    let key = Key { kernel: plan.kernel, output: Output::Probability, dtype: T::NAME };
    // SAFETY: these are the parameters of the kernels; the lengths of all that they point to are checked above, targets are
    // range-checked by the kernel, and the plan covers all lines, beyond which the kernels write nothing.
    unsafe { launch(&stream, key, device, plan, arguments) }
}

/// Gradients of the statistics of lines, of the first or of all three; or of log-sum-exps alone, in the logits' dtype. The others are 0.
pub(super) enum StatisticsGradients<'a, T: CudaElement> {
    OfStatistics(CudaView<'a, T::Real>),
    LogSumExp(CudaView<'a, T>),
}

/// The gradient of the logits `x`, given the statistics of their lines and the gradients of those.
pub(super) fn loss_backward<T: CudaElement>(
    device: &CudaDevice,
    x: CudaView<'_, T>,
    (statistics, gradients): (CudaView<'_, T::Real>, StatisticsGradients<'_, T>),
    grad: &mut CudaViewMut<'_, T>,
    lines: Lines,
    classes: Classes<'_, T::Real>,
) -> Result<()> {
    check_lengths(lines, [x.len(), grad.len()])?;
    check_count(lines)?;
    classes.check(lines)?;
    // How many gradients there are of each line, as the kernels are told: 0 stands for that of log-sum-exp.
    let (given, each, possible) = match &gradients {
        StatisticsGradients::OfStatistics(of) => (of.len(), of.len() / lines.count().max(1), &[1, MOST_GRADIENTS][..]),
        StatisticsGradients::LogSumExp(alone) => (alone.len(), 0, &[0][..]),
    };
    let numbers = [statistics.len(), given];
    if numbers != [classes.statistics() * lines.count(), each.max(1) * lines.count()] || !possible.contains(&each) {
        candle_core::bail!("candle-softmax: {numbers:?} numbers for the statistics of {lines:?} and their gradients")
    }
    let stream = device.cuda_stream();
    let (x, _x_read) = x.device_ptr(&stream);
    let (grad, _grad_written) = grad.device_ptr_mut(&stream);
    let (targets, _targets_read) = classes.targets.device_ptr(&stream);
    let weights = classes.weights.as_ref().map(|weights| weights.device_ptr(&stream));
    let (statistics, _statistics_read) = statistics.device_ptr(&stream);
    let (gradients, _gradients_read) = match &gradients {
        StatisticsGradients::OfStatistics(of) => of.device_ptr(&stream),
        StatisticsGradients::LogSumExp(alone) => alone.device_ptr(&stream),
    };
    let plan = plan::loss_backward(lines, alike::<T>(x), functions::facts(device)?);
    let arguments = Arguments::new()
        .push(x)
        .push(grad)
        .push(lines.count() as u64)
        .push(lines.len as u64)
        .push(lines.inner as u64)
        .push(plan.groups(lines) as u64)
        .push(plan.parameter as u64)
        .push(targets)
        .push(classes.ignored.0 as u64)
        .push(weights.as_ref().map_or(0, |(weights, _read)| *weights))
        .push(statistics)
        .push(gradients)
        .push(each as u64);
    let key = Key { kernel: plan.kernel, output: Output::Probability, dtype: T::NAME };
    // SAFETY: as of `statistics`.
    unsafe { launch(&stream, key, device, plan, arguments) }
}

/// The losses `out` of lines with these statistics or, given the gradients of those, the gradients of the statistics.
pub(super) fn loss_of_lines<R: CudaElement>(
    device: &CudaDevice,
    op: &LossOfLines,
    statistics: CudaView<'_, R>,
    gradients: Option<CudaView<'_, R>>,
    out: &mut CudaViewMut<'_, R>,
) -> Result<()> {
    let lines = statistics.len() / op.statistics();
    let losses = op.losses(lines);
    let (of_out, of_gradients) = match &gradients {
        None => (losses, losses),
        Some(gradients) => (op.gradients() * lines, gradients.len()),
    };
    let numbers = [statistics.len(), out.len(), of_gradients];
    if numbers != [op.statistics() * lines, of_out, losses] || !(1..=i32::MAX as usize).contains(&lines) {
        candle_core::bail!("candle-softmax: {numbers:?} numbers for the losses of {lines} lines")
    }
    let kernel = match gradients {
        Some(_) => Kernel::LossOfLinesBackward,
        None if op.of_each() => Kernel::LossOfEachLine,
        None => Kernel::LossOfAllLines,
    };
    // Backward only a mean has a sum to divide by.
    let has_sum = kernel == Kernel::LossOfAllLines || kernel == Kernel::LossOfLinesBackward && op.is_mean();
    let plan_of_parts = plan::loss_of_parts(lines).filter(|_| has_sum);
    let count = plan_of_parts.map_or(0, |plan| plan.grid.0 as usize);
    let stream = device.cuda_stream();
    // SAFETY: the kernel that is launched first writes the four numbers of each part.
    let mut parts = plan_of_parts.map(|_| unsafe { device.alloc::<f64>(4 * count) }).transpose()?;
    let parts = parts.as_mut().map(|parts| parts.device_ptr_mut(&stream));
    let gradients = gradients.as_ref().map(|gradients| gradients.device_ptr(&stream));
    let (statistics, _statistics_read) = statistics.device_ptr(&stream);
    let (out, _out_written) = out.device_ptr_mut(&stream);
    let arguments = Arguments::new()
        .push(statistics)
        .push(gradients.as_ref().map_or(0, |(gradients, _read)| *gradients))
        .push(out)
        .push(parts.as_ref().map_or(0, |(parts, _written)| *parts))
        .push(lines as u64)
        .push(count as u64)
        .push(op.of_each() as u64)
        .push(op.of_target.to_bits())
        .push(op.of_smooth.to_bits())
        .push(op.of_square.to_bits())
        .push(op.weighted as u64)
        .push(op.is_mean() as u64);
    for plan in plan_of_parts.into_iter().chain([plan::loss_of_lines(kernel, lines)]) {
        let key = Key { kernel: plan.kernel, output: Output::Probability, dtype: R::NAME };
        // SAFETY: these are the parameters of the kernels, the lengths are checked above, and there is a part for each block of the first.
        unsafe { launch(&stream, key, device, plan, arguments)? };
    }
    Ok(())
}

/// Sums of `x`, which begins at a multiple of 16 bytes, or parts of them, that the call says, which fits the plan and the lengths.
pub(super) fn sum<R: CudaElement>(
    device: &CudaDevice,
    x: CudaView<'_, R>,
    out: &mut CudaViewMut<'_, R>,
    plan: Plan,
    mut call: sums::Call,
) -> Result<()> {
    let stream = device.cuda_stream();
    let (mut x, _x_read) = x.device_ptr(&stream);
    if alignment(x) < PACK_BYTES {
        candle_core::bail!(
            "candle-softmax: what is summed begins at {x:#x}, and not at a multiple of {PACK_BYTES} bytes"
        )
    }
    let (mut out, _out_written) = out.device_ptr_mut(&stream);
    let key = Key { kernel: plan.kernel, output: Output::Probability, dtype: R::NAME };
    // SAFETY: these are the parameters of the kernels; by the plan parts are of elements of `x`, and each of its blocks has place in `out`.
    unsafe {
        launch_with(&stream, key, device, plan, &mut [address_of(&mut x), address_of(&mut out), address_of(&mut call)])
    }
}

/// Where the greatest elements of each line go.
pub(super) struct TopKResults<'a, T: CudaElement> {
    pub weights: CudaViewMut<'a, T>,
    pub places: CudaViewMut<'a, u32>,
    /// The sums of exponentials that the weights are shares of.
    pub sums: Option<CudaViewMut<'a, T::Real>>,
}

/// The weights and places of the `k` greatest elements of each line.
pub(super) fn top_k<T: CudaElement>(
    device: &CudaDevice,
    x: CudaView<'_, T>,
    mut results: TopKResults<'_, T>,
    lines: Lines,
    plan: Plan,
    k: usize,
    renormalise: bool,
) -> Result<()> {
    check_lengths(lines, [x.len()])?;
    check_count(lines)?;
    let count = lines.count();
    if lines.inner != 1
        || lines.len > u32::MAX as usize
        || k > lines.len.min(MOST_TOP_K)
        || [results.weights.len(), results.places.len()] != [k * count; 2]
        || results.sums.as_ref().is_some_and(|sums| sums.len() != count)
    {
        candle_core::bail!("candle-softmax: {} places for the {k} greatest of {lines:?}", results.places.len())
    }
    let stream = device.cuda_stream();
    let (x, _x_read) = x.device_ptr(&stream);
    let (weights, _weights_written) = results.weights.device_ptr_mut(&stream);
    let (places, _places_written) = results.places.device_ptr_mut(&stream);
    let sums = results.sums.as_mut().map(|sums| sums.device_ptr_mut(&stream));
    let arguments = Arguments::new()
        .push(x)
        .push(weights)
        .push(places)
        .push(sums.as_ref().map_or(0, |(sums, _written)| *sums))
        .push(count as u64)
        .push(lines.len as u64)
        .push(k as u64)
        .push(renormalise as u64);
    let key = Key { kernel: plan.kernel, output: Output::Probability, dtype: T::NAME };
    // SAFETY: these are the parameters of the kernels, and the lengths are checked above.
    unsafe { launch(&stream, key, device, plan, arguments) }
}

/// What the gradient of the elements is made of.
pub(super) struct TopKFound<'a, T: CudaElement> {
    pub x: CudaView<'a, T>,
    pub weights: CudaView<'a, T>,
    pub gradients: CudaView<'a, T>,
    pub places: CudaView<'a, u32>,
    pub sums: Option<CudaView<'a, T::Real>>,
}

/// The gradient of the elements, given those of the weights of the `k` greatest of each line.
pub(super) fn top_k_backward<T: CudaElement>(
    device: &CudaDevice,
    found: TopKFound<'_, T>,
    grad: &mut CudaViewMut<'_, T>,
    lines: Lines,
    plan: Plan,
    k: usize,
) -> Result<()> {
    check_lengths(lines, [found.x.len(), grad.len()])?;
    check_count(lines)?;
    let count = lines.count();
    if lines.inner != 1
        || [found.weights.len(), found.gradients.len(), found.places.len()] != [k * count; 3]
        || found.sums.as_ref().is_some_and(|sums| sums.len() != count)
    {
        candle_core::bail!("candle-softmax: {} places of the {k} greatest of {lines:?}", found.places.len())
    }
    let stream = device.cuda_stream();
    let (x, _x_read) = found.x.device_ptr(&stream);
    let (weights, _weights_read) = found.weights.device_ptr(&stream);
    let (gradients, _gradients_read) = found.gradients.device_ptr(&stream);
    let (places, _places_read) = found.places.device_ptr(&stream);
    let sums = found.sums.as_ref().map(|sums| sums.device_ptr(&stream));
    let (grad, _grad_written) = grad.device_ptr_mut(&stream);
    let arguments = Arguments::new()
        .push(x)
        .push(weights)
        .push(gradients)
        .push(places)
        .push(sums.as_ref().map_or(0, |(sums, _read)| *sums))
        .push(grad)
        .push(count as u64)
        .push(lines.len as u64)
        .push(k as u64)
        .push(plan::top_k_backward_parts(lines) as u64)
        .push(plan.parameter as u64);
    let key = Key { kernel: plan.kernel, output: Output::Probability, dtype: T::NAME };
    // SAFETY: these are the parameters of the kernel, and the lengths are checked above; a place outside its line is of no part of it, and
    // the first of a line is only read at where it is within.
    unsafe { launch(&stream, key, device, plan, arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::tests::{assert_close, cases};
    use crate::testing::{gpu_count, say_skipped};
    use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
    use candle_core::{builder_arg, Device};

    const STATE_CASES: &str = include_str!(concat!(env!("OUT_DIR"), "/tests/state_cases.ptx"));

    fn check<T>(device: &CudaDevice, narrow: fn(f64) -> T, tolerance: f64) -> Result<()>
    where
        T: CudaElement + Into<f64> + Copy,
    {
        let cases = cases();
        let (mut numbers, mut parts, mut firsts) = (vec![], vec![0i64], vec![0i64]);
        for case in &cases {
            for part in &case.parts {
                numbers.extend(part.iter().map(|&x| narrow(x)));
                parts.push(numbers.len() as i64);
            }
            firsts.push(parts.len() as i64 - 1);
        }
        let count = cases.len();
        let stream = device.cuda_stream();
        let module = stream.context().load_module(STATE_CASES.into()).w()?;
        let function = module.load_function(&format!("state_cases_{}", T::NAME)).w()?;
        let (numbers, parts, firsts) =
            (device.clone_htod(&numbers)?, device.clone_htod(&parts)?, device.clone_htod(&firsts)?);
        // SAFETY: the kernel writes every element.
        let (mut max, mut sum) = unsafe { (device.alloc::<T>(count)?, device.alloc::<T>(count)?) };
        let mut builder = stream.launch_builder(&function);
        builder.arg(&numbers).arg(&parts).arg(&firsts);
        builder_arg!(builder, count as i64);
        builder.arg(&mut max).arg(&mut sum);
        // SAFETY: the offsets in `parts` and `firsts` end with the lengths of what they point into.
        unsafe { builder.launch(LaunchConfig::for_num_elems(count as u32)) }.w()?;
        let (max, sum) = (device.clone_dtoh(&max)?, device.clone_dtoh(&sum)?);
        for (index, case) in cases.iter().enumerate() {
            assert_close(max[index].into(), case.max, 0.0, &format!("maximum of case {index}"));
            assert_close(sum[index].into(), case.sum, tolerance, &format!("sum of case {index}"));
        }
        Ok(())
    }

    #[test]
    fn table_of_cases() -> Result<()> {
        if gpu_count() == 0 {
            say_skipped("table_of_cases", "there is no GPU");
            return Ok(());
        }
        let device = Device::new_cuda(0)?;
        check::<f32>(device.as_cuda_device()?, |x| x as f32, 5e-7)?;
        check::<f64>(device.as_cuda_device()?, |x| x, 2e-15)
    }
}
