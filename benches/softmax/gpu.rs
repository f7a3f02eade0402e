//! Measures on a CUDA device.

use crate::around::{call, is_along, Call, AROUND, OWN_CALLS};
use crate::report::{write_csv, Facts, Row, FIRST_CALL};
use crate::shapes::{dim_name, shape_name, Own, Shape, CANDLE, CANDLE_LAST_DIM, GPU_SHAPES, OURS};
use crate::{check, median, Args};
use anyhow::{bail, ensure, Context, Result};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::sys::{
    self, CUdevice_attribute, CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode, CUDA_VERSION,
};
use candle_core::cuda_backend::cudarc::driver::{
    result, CudaEvent, CudaFunction, CudaGraph, CudaStream, DevicePtr, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::cudarc::nvrtc::{compile_ptx_with_opts, CompileOptions};
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::scalar::Scalar;
use candle_core::{DType, Device, Storage, Tensor};
use candle_softmax::{ops, testing, testing::Op};
use half::{bf16, f16};
use std::collections::HashMap;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

const COPY_SOURCE: &str = include_str!("copy.cu");
const COPY_BLOCK: u32 = 256;
/// Blocks of the copy kernel that one multiprocessor holds at a time.
const COPY_RESIDENT: u32 = 8;

/// Calls are timed in batches of about this many microseconds: long beside an event's resolution, short enough that
/// the contenders take turns often.
const BATCH_US: f64 = 1000.0;
const MOST_CALLS: usize = 400;
/// A call longer than this is timed by itself, without a graph, and a few times only.
const LONG_US: f64 = 2000.0;
const LONG_REPEATS: usize = 3;
/// candle's ops are called once where that takes longer.
const CANDLE_LIMIT_US: f64 = 50_000.0;

/// Something to time: a call that only launches.
type Launch<'a> = Box<dyn Fn() -> Result<()> + 'a>;

#[derive(Clone, Copy, Default)]
struct Times {
    call_us: Option<f64>,
    graph_us: Option<f64>,
}

struct Gpu {
    device: Device,
    stream: Arc<CudaStream>,
    start: CudaEvent,
    stop: CudaEvent,
    multiprocessors: u32,
    l2_bytes: usize,
    kernels: Option<Kernels>,
    /// The fastest shape of the copy kernel by bytes to copy.
    copy_variants: HashMap<usize, CopyVariant>,
    repeats: usize,
    wall_repeats: usize,
    facts: Facts,
}

/// The kernels of `copy.cu`.
struct Kernels {
    copy_cached: CudaFunction,
    copy_kept: CudaFunction,
    copy_streaming: CudaFunction,
    count_nan_f32: CudaFunction,
    count_nan_f16: CudaFunction,
    count_nan_bf16: CudaFunction,
}

/// What of the L2 cache a copy makes use of: all, all for what it writes, or none.
#[derive(Clone, Copy)]
enum Caching {
    Cached,
    Kept,
    Streaming,
}

#[derive(Clone, Copy)]
struct CopyVariant {
    caching: Caching,
    /// As many blocks as the GPU holds at a time, or one for every tile.
    resident: bool,
}

impl CopyVariant {
    const ALL: [Self; 6] = [
        Self { caching: Caching::Cached, resident: false },
        Self { caching: Caching::Cached, resident: true },
        Self { caching: Caching::Kept, resident: false },
        Self { caching: Caching::Kept, resident: true },
        Self { caching: Caching::Streaming, resident: false },
        Self { caching: Caching::Streaming, resident: true },
    ];

    fn name(self) -> String {
        let hint = match self.caching {
            Caching::Cached => "cached",
            Caching::Kept => "kept",
            Caching::Streaming => "streaming",
        };
        format!("{hint} {}", if self.resident { "resident" } else { "tiles" })
    }
}

/// One tensor shape in one dtype, at both starts.
struct Case<'a> {
    shape: &'a Shape,
    dtype: DType,
    /// One element more than the tensor.
    flat: Tensor,
    /// By offset.
    inputs: [Tensor; 2],
    out: Tensor,
}

pub fn run(args: &Args, device: &Device) -> Result<(Vec<Row>, Vec<String>)> {
    let mut gpu = Gpu::new(device, args.quick)?;
    let (mut rows, mut failed) = (Vec::new(), Vec::new());
    let own: Vec<Shape> = args.own_shapes()?.iter().map(Own::on_gpu).collect();
    let shapes: Vec<&Shape> = GPU_SHAPES.iter().filter(|shape| args.wants(shape.dims)).chain(&own).collect();
    let total = shapes.len() * args.dtypes.len();
    let start = Instant::now();
    for &dtype in &args.dtypes {
        for shape in &shapes {
            let name = format!("{} {}", shape.name(), dtype.as_str());
            match gpu.case(shape, dtype, &mut failed) {
                Ok(more) => rows.extend(more),
                // Whatever the others say is still worth the device's time.
                Err(error) => failed.push(format!("{name}: {error:#}")),
            }
            // Now, since a run may be stopped before its end.
            if let Some(path) = &args.out {
                write_csv(path, &rows)?;
            }
            let done = rows.iter().filter(|row: &&Row| row.implementation == "driver copy").count();
            eprintln!("[{:5.1} s] {done} of {total}: {name}", start.elapsed().as_secs_f64());
        }
    }
    for failure in &failed {
        eprintln!("FAILED {failure}");
    }
    Ok((rows, failed))
}

/// What models have around softmax, each call in turn with copies of the same tensor. Outputs are allocated by the calls, out of
/// memory that is kept.
pub fn run_around(args: &Args, device: &Device) -> Result<(Vec<Row>, Vec<String>)> {
    let mut gpu = Gpu::new(device, args.quick)?;
    keep_freed_memory(device)?;
    let wanted = around_wanted(args)?;
    let (mut rows, mut failed) = (Vec::new(), Vec::new());
    for &dtype in &args.dtypes {
        for (shape, calls) in &wanted {
            let case = gpu.fresh(shape, dtype)?;
            let variant = gpu.copy_variant(&case)?;
            for &name in calls {
                let timed = || -> Result<_> {
                    let call = call(name, shape.dims, shape.dim, dtype, device)?;
                    let mut launches: Vec<Launch> = vec![gpu.driver_copy(&case)?];
                    if let Some(variant) = variant {
                        launches.push(gpu.own_copy(&case, variant)?);
                    }
                    launches.push(Box::new(move || {
                        call()?;
                        Ok(())
                    }));
                    gpu.time_calls(&launches)
                };
                match timed() {
                    Ok(times) => {
                        let (ours, copies) = times.split_last().context("something was timed")?;
                        let row = |op: &str, implementation: &str, times| gpu.row(&case, op, implementation, times);
                        rows.extend(copies.iter().map(|&times| row("copy", "copy", times)));
                        rows.push(row(name, OURS, *ours));
                    }
                    Err(error) => failed.push(format!("{name} {} {}: {error:#}", shape.name(), dtype.as_str())),
                }
            }
            if let Some(path) = &args.out {
                write_csv(path, &rows)?;
            }
        }
    }
    for failure in &failed {
        eprintln!("FAILED {failure}");
    }
    Ok((rows, failed))
}

/// The shapes that were asked for, and the calls.
fn around_wanted(args: &Args) -> Result<Vec<(Shape, Vec<&'static str>)>> {
    let own: Vec<Shape> = args.own_shapes()?.iter().map(Own::on_gpu).collect();
    let known = AROUND.iter().filter(|around| args.wants(around.dims)).map(|around| (around.shape(), around.calls));
    let all = known.chain(own.into_iter().map(|shape| (shape, OWN_CALLS)));
    let asked = |name: &str| args.calls.is_empty() || args.calls.iter().any(|call| call == name);
    let each = |(shape, calls): (Shape, &'static [&'static str])| {
        let calls = calls.iter().copied().filter(|&name| asked(name) && is_along(name, &shape)).collect();
        (shape, calls)
    };
    Ok(all.map(each).collect())
}

/// Lets the pool that tensors come from keep what is freed. To get gigabytes from the driver again for each call takes longer than
/// the call.
fn keep_freed_memory(device: &Device) -> Result<()> {
    let context = device.as_cuda_device()?.cuda_stream().context().clone();
    let mut pool = std::ptr::null_mut();
    let mut most = u64::MAX;
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    context.bind_to_thread()?;
    // SAFETY: the pool is the device's own, and the attribute a number of 64 bits.
    unsafe {
        sys::cuDeviceGetDefaultMemPool(&mut pool, context.cu_device()).result()?;
        sys::cuMemPoolSetAttribute(pool, threshold, std::ptr::from_mut(&mut most).cast()).result()?;
    }
    Ok(())
}

impl Gpu {
    /// Batches of calls of each, in turn, without a graph.
    fn time_calls(&self, launches: &[Launch]) -> Result<Vec<Times>> {
        let mut contenders = Vec::new();
        for launch in launches {
            self.batch_us(1, launch)?;
            let us = self.batch_us(3, launch)?;
            contenders.push((launch, ((2.0 * BATCH_US / us).ceil() as usize).clamp(3, MOST_CALLS), Vec::new()));
        }
        for _ in 0..self.repeats {
            for (launch, calls, times) in &mut contenders {
                times.push(self.batch_us(*calls, *launch)?);
            }
        }
        let times = |mut us: Vec<f64>| Times { call_us: median(&mut us), graph_us: None };
        Ok(contenders.into_iter().map(|(_, _, us)| times(us)).collect())
    }

    fn new(device: &Device, quick: bool) -> Result<Self> {
        let stream = device.as_cuda_device()?.cuda_stream();
        let context = stream.context().clone();
        let attribute = |attribute| anyhow::Ok(context.attribute(attribute)?);
        let kernels = Kernels::load(&stream)
            .inspect_err(|error| {
                eprintln!(
                    "the driver's copy is the only one, and unwritten elements are looked for in samples: {error:#}"
                )
            })
            .ok();
        Ok(Self {
            device: device.clone(),
            start: context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?,
            stop: context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?,
            multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            l2_bytes: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
            stream,
            kernels,
            copy_variants: HashMap::new(),
            repeats: if quick { 5 } else { 15 },
            wall_repeats: if quick { 3 } else { 5 },
            facts: facts(device)?,
        })
    }

    /// Everything about one tensor. What is wrong goes to `failed` and is not timed.
    fn case(&mut self, shape: &Shape, dtype: DType, failed: &mut Vec<String>) -> Result<Vec<Row>> {
        let case = self.fresh(shape, dtype)?;
        let mut rows = Vec::new();

        // What is checked and timed: (op, its name, offset).
        let mut ours = vec![(Op::Chosen, "softmax", 0), (Op::Chosen, "softmax", 1)];
        if shape.dim + 1 == shape.dims.len() {
            ours.push((Op::ChosenLog, "log_softmax", 0));
        }
        let mut checked = Vec::new();
        for (op, op_name, offset) in ours {
            match self.check(&case, op, offset) {
                Ok(error) => checked.push((op, op_name, offset, error)),
                Err(error) => {
                    failed.push(format!("{} {} +{offset} {op:?}: {error:#}", shape.name(), dtype.as_str()));
                }
            }
        }

        let variant = self.copy_variant(&case)?;
        let mut launches: Vec<Launch> = vec![self.driver_copy(&case)?];
        if let Some(variant) = variant {
            launches.push(self.own_copy(&case, variant)?);
        }
        let copies = launches.len();
        for &(op, _, offset, _) in &checked {
            launches.push(self.softmax(&case, op, offset));
        }
        let times = self.time(&launches)?;
        drop(launches);

        rows.push(Row { kernel: "cuMemcpyDtoDAsync".into(), ..self.row(&case, "copy", "driver copy", times[0]) });
        if let Some(variant) = variant {
            rows.push(Row { kernel: variant.name(), ..self.row(&case, "copy", "copy kernel", times[1]) });
        }
        for (&(op, op_name, offset, error), &times) in checked.iter().zip(&times[copies..]) {
            let wall_us = match offset {
                0 => self.wall_us(f64::INFINITY, || ours_as_called(op, &case)).map(Some),
                _ => Ok(None),
            };
            let wall_us = wall_us.unwrap_or_else(|error| {
                failed.push(format!("{} {} {op:?} as called: {error:#}", shape.name(), dtype.as_str()));
                None
            });
            rows.push(Row {
                wall_us,
                kernel: testing::kernel_name(op, &case.inputs[offset], shape.dim)?,
                max_error: Some(error),
                offset,
                ..self.row(&case, op_name, OURS, times)
            });
        }
        rows.extend(self.candle(&case));
        if shape.journey && dtype == DType::F32 {
            self.journey(&case, &mut rows, failed)?;
        }
        Ok(rows)
    }

    fn row(&self, case: &Case, op: &str, implementation: &str, times: Times) -> Row {
        Row {
            op: op.into(),
            shape: case.shape.name(),
            dim: dim_name(case.shape.dims, case.shape.dim),
            dtype: case.dtype.as_str().into(),
            implementation: implementation.into(),
            call_us: times.call_us,
            graph_us: times.graph_us,
            in_l2: 2 * case.bytes() <= self.l2_bytes,
            facts: self.facts.clone(),
            ..Row::default()
        }
    }

    /// Normal values of deviation 3: lines neither flat nor close to one-hot.
    fn fresh<'a>(&self, shape: &'a Shape, dtype: DType) -> Result<Case<'a>> {
        let len: usize = shape.dims.iter().product();
        let flat = Tensor::randn(0f32, 3f32, len + 1, &self.device)?.to_dtype(dtype)?;
        let input = |offset| anyhow::Ok(flat.narrow(0, offset, len)?.reshape(shape.dims)?);
        let inputs = [input(0)?, input(1)?];
        ensure!(inputs[1].layout().start_offset() == 1, "the view that starts one element later was copied");
        let out = Tensor::zeros(shape.dims, dtype, &self.device)?;
        Ok(Case { shape, dtype, flat, inputs, out })
    }

    fn check(&self, case: &Case, op: Op, offset: usize) -> Result<f64> {
        let (input, out) = (&case.inputs[offset], &case.out);
        out.const_set(match case.dtype {
            DType::F16 => Scalar::F16(f16::NAN),
            DType::BF16 => Scalar::BF16(bf16::NAN),
            _ => Scalar::F32(f32::NAN),
        })?;
        testing::softmax_into(op, input, case.shape.dim, out)?;
        self.device.synchronize()?;
        let missing = self.count_nan(out)?;
        ensure!(missing == 0, "{missing} elements were not written, or are not numbers");
        check(input, out, case.shape.dim, matches!(op, Op::ChosenLog))
    }

    fn count_nan(&self, tensor: &Tensor) -> Result<u64> {
        let Some(kernels) = &self.kernels else { return Ok(0) };
        let function = match tensor.dtype() {
            DType::F32 => &kernels.count_nan_f32,
            DType::F16 => &kernels.count_nan_f16,
            _ => &kernels.count_nan_bf16,
        };
        let (values, len) = (pointer(tensor)?, tensor.elem_count() as u64);
        let mut found = self.stream.alloc_zeros::<u64>(1)?;
        let mut builder = self.stream.launch_builder(function);
        builder.arg(&values).arg(&len).arg(&mut found);
        let grid = self.multiprocessors * 8;
        let config = LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the kernel reads the `len` elements at `values` and adds to the one at `found`.
        unsafe { builder.launch(config)? };
        Ok(self.stream.clone_dtoh(&found)?[0])
    }

    fn softmax<'a>(&self, case: &'a Case, op: Op, offset: usize) -> Launch<'a> {
        Box::new(move || Ok(testing::softmax_into(op, &case.inputs[offset], case.shape.dim, &case.out)?))
    }

    fn driver_copy<'a>(&'a self, case: &'a Case) -> Result<Launch<'a>> {
        let (from, to, bytes) = (pointer(&case.flat)?, pointer(&case.out)?, case.bytes());
        Ok(Box::new(move || {
            // SAFETY: both tensors are at least that long and live as long as `case`.
            Ok(unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream.cu_stream()) }?)
        }))
    }

    fn own_copy<'a>(&'a self, case: &'a Case, variant: CopyVariant) -> Result<Launch<'a>> {
        let kernels = self.kernels.as_ref().context("the copy kernel was not compiled")?;
        let function = match variant.caching {
            Caching::Cached => &kernels.copy_cached,
            Caching::Kept => &kernels.copy_kept,
            Caching::Streaming => &kernels.copy_streaming,
        };
        let (from, to, bytes) = (pointer(&case.flat)?, pointer(&case.out)?, case.bytes() as u64);
        ensure!(from % 16 == 0 && to % 16 == 0, "candle's allocations are not aligned");
        let tiles = bytes.div_ceil(u64::from(4 * 16 * COPY_BLOCK)).max(1);
        let most = if variant.resident { self.multiprocessors * COPY_RESIDENT } else { i32::MAX as u32 };
        let grid = tiles.min(u64::from(most)) as u32;
        let config = LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (COPY_BLOCK, 1, 1), shared_mem_bytes: 0 };
        Ok(Box::new(move || {
            let mut builder = self.stream.launch_builder(function);
            builder.arg(&from).arg(&to).arg(&bytes);
            // SAFETY: both tensors are at least that long and live as long as `case`.
            unsafe { builder.launch(config)? };
            Ok(())
        }))
    }

    /// The copy kernel's fastest variant for as many bytes.
    fn copy_variant(&mut self, case: &Case) -> Result<Option<CopyVariant>> {
        if self.kernels.is_none() {
            return Ok(None);
        }
        if let Some(&variant) = self.copy_variants.get(&case.bytes()) {
            return Ok(Some(variant));
        }
        let launches: Vec<Launch> =
            CopyVariant::ALL.iter().map(|&variant| self.own_copy(case, variant)).collect::<Result<_>>()?;
        let times = self.time(&launches)?;
        drop(launches);
        let best = |times: &Times| times.call_us.unwrap_or(f64::INFINITY).min(times.graph_us.unwrap_or(f64::INFINITY));
        let fastest = CopyVariant::ALL.iter().zip(&times).min_by(|a, b| best(a.1).total_cmp(&best(b.1)));
        let &variant = fastest.context("there are variants")?.0;
        self.copy_variants.insert(case.bytes(), variant);
        Ok(Some(variant))
    }

    /// Safe, Online and Reduce, beside what `rows` already holds for the same tensor.
    fn journey(&self, case: &Case, rows: &mut Vec<Row>, failed: &mut Vec<String>) -> Result<()> {
        for (name, op) in [("safe", Op::Safe), ("online", Op::Online), ("reduce", Op::Reduce)] {
            let error = match self.check(case, op, 0) {
                Ok(error) => error,
                Err(error) => {
                    failed.push(format!("{} {} {op:?}: {error:#}", case.shape.name(), case.dtype.as_str()));
                    continue;
                }
            };
            let times = self.time(&[self.softmax(case, op, 0)])?;
            rows.push(Row {
                kernel: testing::kernel_name(op, &case.inputs[0], case.shape.dim)?,
                max_error: Some(error),
                ..self.row(case, "softmax", name, times[0])
            });
        }
        Ok(())
    }

    /// candle's own ops as called. Where they fail, there is nothing to compare with.
    fn candle(&self, case: &Case) -> Vec<Row> {
        let (xs, dim) = (&case.inputs[0], case.shape.dim);
        let mut rows = Vec::new();
        let mut add = |name: &str, wall_us: Result<f64>| match wall_us {
            Ok(us) => rows.push(Row { wall_us: Some(us), ..self.row(case, "softmax", name, Times::default()) }),
            Err(error) => eprintln!("{name} {} {}: {error:#}", case.shape.name(), case.dtype.as_str()),
        };
        add(CANDLE, self.wall_us(CANDLE_LIMIT_US, || candle_nn::ops::softmax(xs, dim)));
        if dim + 1 == case.shape.dims.len() {
            add(CANDLE_LAST_DIM, self.wall_us(CANDLE_LIMIT_US, || candle_nn::ops::softmax_last_dim(xs)));
        }
        rows
    }

    /// Times every contender in turn, again and again, so that all of them see the same GPU; in the order of `launches`.
    fn time(&self, launches: &[Launch]) -> Result<Vec<Times>> {
        struct Contender<'a> {
            launch: &'a Launch<'a>,
            calls: usize,
            graph: Option<CudaGraph>,
            repeats: usize,
            call_us: Vec<f64>,
            graph_us: Vec<f64>,
        }
        let mut contenders = Vec::new();
        for launch in launches {
            // Loads the kernel, too, which must not happen during a capture.
            let first = self.batch_us(1, launch)?;
            let us = if first > LONG_US { self.batch_us(1, launch)? } else { self.batch_us(3, launch)? };
            let long = us > LONG_US;
            let calls = if long { 1 } else { ((BATCH_US / us.max(0.1)).ceil() as usize).clamp(2, MOST_CALLS) };
            let graph = match long {
                true => None,
                false => self
                    .capture(calls, launch)
                    .inspect_err(|error| eprintln!("a CUDA graph could not be captured: {error:#}"))
                    .ok(),
            };
            let repeats = if long { self.repeats.min(LONG_REPEATS) } else { self.repeats };
            contenders.push(Contender { launch, calls, graph, repeats, call_us: Vec::new(), graph_us: Vec::new() });
        }
        for repeat in 0..self.repeats {
            for contender in contenders.iter_mut().filter(|contender| repeat < contender.repeats) {
                contender.call_us.push(self.batch_us(contender.calls, || (contender.launch)())?);
            }
            for contender in &mut contenders {
                if let Some(graph) = &contender.graph {
                    // One launch of the graph is `calls` calls.
                    let us = self.batch_us(1, || Ok(graph.launch()?))?;
                    contender.graph_us.push(us / contender.calls as f64);
                }
            }
        }
        let times = contenders.into_iter().map(|mut contender| Times {
            call_us: median(&mut contender.call_us),
            graph_us: median(&mut contender.graph_us),
        });
        Ok(times.collect())
    }

    /// Microseconds a call, by events before and after `calls` of them.
    fn batch_us(&self, calls: usize, launch: impl Fn() -> Result<()>) -> Result<f64> {
        self.start.record(&self.stream)?;
        for _ in 0..calls {
            launch()?;
        }
        self.stop.record(&self.stream)?;
        Ok(f64::from(self.start.elapsed_ms(&self.stop)?) * 1e3 / calls as f64)
    }

    fn capture(&self, calls: usize, launch: &Launch) -> Result<CudaGraph> {
        self.stream.synchronize()?;
        self.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let launched = (0..calls).try_for_each(|_| launch());
        // Also after an error, or the stream would stay in capture.
        let graph = self.stream.end_capture(CUgraphInstantiate_flags(0));
        launched?;
        let graph = graph?.context("the graph is empty")?;
        // The first launch sets up what later ones reuse.
        graph.launch()?;
        self.stream.synchronize()?;
        Ok(graph)
    }

    /// Microseconds a call on the host's clock; where one call takes longer than `limit_us`, that call's.
    fn wall_us(&self, limit_us: f64, call: impl Fn() -> candle_core::Result<Tensor>) -> Result<f64> {
        let timed = |calls: usize| -> Result<f64> {
            self.device.synchronize()?;
            let start = Instant::now();
            for _ in 0..calls {
                call()?;
            }
            self.device.synchronize()?;
            Ok(start.elapsed().as_secs_f64() * 1e6 / calls as f64)
        };
        timed(1)?; // may load and compile kernels
        let once = timed(1)?;
        if once > limit_us {
            return Ok(once);
        }
        // Several at a time: candle's pool gives memory back at a synchronise, so the next call pays for it.
        let calls = ((10_000.0 / timed(2)?) as usize).clamp(3, 500);
        let mut times: Vec<f64> = (0..self.wall_repeats).map(|_| timed(calls)).collect::<Result<_>>()?;
        median(&mut times).context("nothing was timed")
    }
}

impl Case<'_> {
    /// Of the tensor.
    fn bytes(&self) -> usize {
        self.out.elem_count() * self.dtype.size_in_bytes()
    }
}

fn ours_as_called(op: Op, case: &Case) -> candle_core::Result<Tensor> {
    let (xs, dim) = (&case.inputs[0], case.shape.dim);
    match op {
        Op::ChosenLog => ops::log_softmax(xs, dim),
        _ => ops::softmax(xs, dim),
    }
}

impl Kernels {
    fn load(stream: &Arc<CudaStream>) -> Result<Self> {
        let options = CompileOptions { arch: Some("compute_75"), ..Default::default() };
        let ptx = compile_ptx_with_opts(COPY_SOURCE, options).context("compiling the copy kernel")?;
        let module = stream.context().load_module(ptx).context("loading the copy kernel")?;
        Ok(Self {
            copy_cached: module.load_function("copy_cached")?,
            copy_kept: module.load_function("copy_kept")?,
            copy_streaming: module.load_function("copy_streaming")?,
            count_nan_f32: module.load_function("count_nan_f32")?,
            count_nan_f16: module.load_function("count_nan_f16")?,
            count_nan_bf16: module.load_function("count_nan_bf16")?,
        })
    }
}

/// The address of a tensor's first element.
fn pointer(tensor: &Tensor) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { bail!("not a CUDA tensor") };
    let stream = storage.device().cuda_stream();
    // There is one stream, so nothing has to be waited for.
    let base = match &storage.slice {
        CudaStorageSlice::F32(slice) => slice.device_ptr(&stream).0,
        CudaStorageSlice::F16(slice) => slice.device_ptr(&stream).0,
        CudaStorageSlice::BF16(slice) => slice.device_ptr(&stream).0,
        _ => bail!("{:?} is not measured", tensor.dtype()),
    };
    Ok(base + (layout.start_offset() * tensor.dtype().size_in_bytes()) as u64)
}

fn facts(device: &Device) -> Result<Facts> {
    let context = device.as_cuda_device()?.cuda_stream().context().clone();
    // The kernel module's version is in a file; where that is out of sight, ask the tool.
    let numbers = |text: String| {
        let word = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
        text.split_whitespace().find(word).map(String::from)
    };
    let from_file = std::fs::read_to_string("/proc/driver/nvidia/version").ok().and_then(numbers);
    let from_tool = || {
        let output = Command::new("nvidia-smi").args(["--query-gpu=driver_version", "--format=csv,noheader"]).output();
        output.ok().and_then(|output| numbers(String::from_utf8_lossy(&output.stdout).into()))
    };
    Ok(Facts {
        device: context.name()?,
        driver: from_file.or_else(from_tool).unwrap_or_else(|| "unknown".into()),
        toolkit: format!("CUDA {}.{}", CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10),
        date: crate::common::today()?,
    })
}

/// A tensor for each kind of kernel.
const FIRST_CALLS: [(&str, &str); 11] = [
    ("2097152x16", "f32"),
    ("1048576x128", "bf16"),
    ("65536x1024", "f32"),
    ("8192x4096", "f32"),
    ("1024x32768", "f32"),
    ("64x151936", "f32"),
    ("1x151936", "bf16"),
    ("1x16777216", "f32"),
    ("4096x4096", "f32"),
    ("512x512", "f16"),
    ("871543x77", "bf16"),
];

/// The first call of a process: of this one, or of one for each call wanted.
pub fn run_first_calls(args: &Args, device: &Device) -> Result<(Vec<Row>, Vec<String>)> {
    if args.child {
        first_call_child(args, device)
    } else {
        first_calls(args, device)
    }
}

/// Starts this program once for each of [`FIRST_CALLS`] or, with `--around`, of the calls that were asked for.
fn first_calls(args: &Args, device: &Device) -> Result<(Vec<Row>, Vec<String>)> {
    let facts = facts(device)?;
    let program = std::env::current_exe()?;
    let (mut rows, mut failed) = (Vec::new(), Vec::new());
    for (op, dims, dim, dtype) in first_calls_wanted(args)? {
        let name = shape_name(dims);
        let mut command = Command::new(&program);
        let shape = if args.around { format!("{name}@{dim}") } else { name.clone() };
        command.args(["--first-call", "--child", "--device", "cuda", "--shapes", &shape, "--dtypes", dtype]);
        if args.around {
            command.args(["--around", "--calls", op]);
        }
        let output = command.env("CUDA_CACHE_DISABLE", "1").output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let Some((ms, kernel)) =
            text.trim().split_once(' ').and_then(|(ms, kernel)| Some((ms.parse::<f64>().ok()?, kernel)))
        else {
            failed.push(format!("first call {op} {name} {dtype}: {}", String::from_utf8_lossy(&output.stderr)));
            continue;
        };
        rows.push(Row {
            op: if args.around { format!("{FIRST_CALL} {op}") } else { FIRST_CALL.into() },
            shape: name,
            dim: dim_name(dims, dim),
            dtype: dtype.into(),
            implementation: OURS.into(),
            wall_us: Some(ms * 1e3),
            kernel: kernel.into(),
            facts: facts.clone(),
            ..Row::default()
        });
    }
    Ok((rows, failed))
}

/// Call, shape, dimension and dtype.
type FirstCall = (&'static str, &'static [usize], usize, &'static str);

fn first_calls_wanted(args: &Args) -> Result<Vec<FirstCall>> {
    if args.around {
        let each = |(shape, calls): (Shape, Vec<&'static str>)| {
            let of = move |call| args.dtypes.iter().map(move |dtype| (call, shape.dims, shape.dim, dtype.as_str()));
            calls.into_iter().flat_map(of)
        };
        return Ok(around_wanted(args)?.into_iter().flat_map(each).collect());
    }
    let shape = |name: &str| GPU_SHAPES.iter().find(|shape| shape.name() == name);
    let calls = FIRST_CALLS.iter().filter_map(|&(name, dtype)| Some((shape(name)?, dtype)));
    let calls = calls.filter(|(shape, _)| args.wants(shape.dims));
    Ok(calls.map(|(shape, dtype)| ("softmax", shape.dims, shape.dim, dtype)).collect())
}

/// Prints how many milliseconds the first call takes, and the kernel's name.
fn first_call_child(args: &Args, device: &Device) -> Result<(Vec<Row>, Vec<String>)> {
    let &dtype = args.dtypes.first().context("no dtype")?;
    let (call, kernel) = match args.calls.first() {
        Some(name) => {
            let shape = args.own_shapes()?.first().context("no shape")?.on_gpu();
            (call(name, shape.dims, shape.dim, dtype, device)?, "-".to_string())
        }
        None => {
            let shape = GPU_SHAPES.iter().find(|shape| args.wants(shape.dims)).context("no shape")?;
            let len: usize = shape.dims.iter().product();
            let xs = Tensor::randn(0f32, 3f32, len, device)?.to_dtype(dtype)?.reshape(shape.dims)?;
            let kernel = testing::kernel_name(Op::Chosen, &xs, shape.dim)?;
            (Box::new(move || ops::softmax(&xs, shape.dim)) as Call, kernel)
        }
    };
    device.synchronize()?;
    let start = Instant::now();
    let out = call()?;
    device.synchronize()?;
    let ms = start.elapsed().as_secs_f64() * 1e3;
    drop(out);
    println!("{ms:.3} {kernel}");
    Ok((Vec::new(), Vec::new()))
}
