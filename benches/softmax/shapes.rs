//! What is measured, and what is aimed at.

use anyhow::{ensure, Context, Result};
use candle_core::{DType, Tensor};

/// How fast a kernel shall be.
#[derive(Clone, Copy)]
pub enum Target {
    /// Times the copy's time: in f32, and in half precision.
    Copies(f64, f64),
    /// Microseconds in a CUDA graph.
    Micros(f64),
}

pub struct Shape {
    pub dims: &'static [usize],
    pub dim: usize,
    pub target: Option<Target>,
    /// Whether the target, loosened by [`OFFSET_ALLOWANCE`], also stands for a tensor that starts one element later.
    pub offset_target: bool,
    /// Whether the journey from Safe to the chosen kernel is measured on it.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub journey: bool,
}

pub const OFFSET_ALLOWANCE: f64 = 1.1;

const fn rows(dims: &'static [usize; 2], target: Target) -> Shape {
    Shape { dims, dim: 1, target: Some(target), offset_target: true, journey: false }
}

const fn journey(shape: Shape) -> Shape {
    Shape { journey: true, ..shape }
}

const fn no_offset_target(shape: Shape) -> Shape {
    Shape { offset_target: false, ..shape }
}

const fn along(dims: &'static [usize], dim: usize, target: Target) -> Shape {
    Shape { dims, dim, target: Some(target), offset_target: false, journey: false }
}

const fn without_target(dims: &'static [usize], dim: usize) -> Shape {
    Shape { dims, dim, target: None, offset_target: false, journey: false }
}

pub const GPU_SHAPES: [Shape; 27] = [
    // Short lines.
    journey(rows(&[2097152, 16], Target::Copies(1.02, 1.02))),
    journey(rows(&[131072, 32], Target::Copies(1.15, 1.15))),
    journey(rows(&[1048576, 128], Target::Copies(1.02, 1.02))),
    // Middle.
    journey(rows(&[65536, 1024], Target::Copies(1.03, 1.03))),
    journey(rows(&[8192, 4096], Target::Copies(1.03, 1.03))),
    rows(&[4096, 8192], Target::Copies(1.03, 1.03)),
    // Headline.
    journey(rows(&[1024, 32768], Target::Copies(1.05, 1.05))),
    // Vocabulary, with many rows and with few.
    rows(&[4096, 128256], Target::Copies(1.05, 1.05)),
    rows(&[64, 151936], Target::Copies(1.15, 1.3)),
    // Decode.
    rows(&[1, 151936], Target::Micros(4.2)),
    rows(&[4, 102400], Target::Micros(4.2)),
    // One huge line.
    rows(&[1, 16777216], Target::Copies(1.5, 1.3)),
    // Lengths that 128-bit loads do not divide: the keys of a window, a text, an image's patches; and a long one.
    no_offset_target(rows(&[1369568, 49], Target::Copies(1.1, 1.1))),
    no_offset_target(rows(&[871543, 77], Target::Copies(1.1, 1.1))),
    no_offset_target(rows(&[340654, 197], Target::Copies(1.1, 1.1))),
    no_offset_target(rows(&[116306, 577], Target::Copies(1.1, 1.1))),
    no_offset_target(rows(&[8191, 4097], Target::Copies(1.1, 1.1))),
    // Other dimensions.
    along(&[4096, 4096], 0, Target::Copies(1.2, 1.2)),
    along(&[64, 1000, 128], 1, Target::Copies(1.35, 1.35)),
    along(&[8, 4096, 4096], 1, Target::Copies(1.2, 1.2)),
    along(&[32, 8, 4096, 64], 2, Target::Copies(1.2, 1.2)),
    along(&[16, 64, 56, 56], 1, Target::Copies(1.35, 1.35)),
    // The shortest lines, narrow rows, few of them, and long lines along another dimension.
    without_target(&[16777216, 3], 1),
    without_target(&[262144, 128, 2], 1),
    without_target(&[65536, 3, 256], 1),
    without_target(&[20, 50000, 50], 1),
    // Small.
    no_offset_target(rows(&[512, 512], Target::Micros(2.0))),
];

impl Shape {
    pub fn name(&self) -> String {
        shape_name(self.dims)
    }

    pub fn target(&self, dtype: DType, offset: usize) -> Option<Target> {
        if offset > 0 && !self.offset_target {
            return None;
        }
        let allowance = if offset > 0 { OFFSET_ALLOWANCE } else { 1.0 };
        Some(match self.target? {
            Target::Copies(f32, _) if dtype == DType::F32 => Target::Copies(f32 * allowance, f32 * allowance),
            Target::Copies(_, half) => Target::Copies(half * allowance, half * allowance),
            Target::Micros(micros) => Target::Micros(micros * allowance),
        })
    }
}

/// A shape and dimension asked for by name, for which nothing is aimed at.
pub struct Own {
    dims: &'static [usize],
    dim: usize,
}

impl Own {
    /// Of "100x600x128@1".
    pub fn parse(name: &str) -> Result<Self> {
        let expected = || format!("{name:?} is no shape and dimension such as 100x600x128@1");
        let (dims, dim) = name.split_once('@').with_context(expected)?;
        let dims: Vec<usize> = dims.split('x').map(str::parse).collect::<Result<_, _>>().with_context(expected)?;
        let dim = dim.parse().with_context(expected)?;
        ensure!(dim < dims.len() && !dims.contains(&0), expected());
        // As long-lived as the others; there are a few.
        Ok(Self { dims: dims.leak(), dim })
    }

    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub fn on_gpu(&self) -> Shape {
        without_target(self.dims, self.dim)
    }

    pub fn on_cpu(&self) -> CpuShape {
        cpu(self.dims, self.dim, true)
    }
}

/// One shape of the CPU's table, with the dtypes to take it in.
pub struct CpuShape {
    pub dims: &'static [usize],
    pub dim: usize,
    pub half: bool,
}

const fn cpu(dims: &'static [usize], dim: usize, half: bool) -> CpuShape {
    CpuShape { dims, dim, half }
}

pub const CPU_SHAPES: [CpuShape; 9] = [
    cpu(&[1024, 32768], 1, true),
    cpu(&[512, 512], 1, false),
    cpu(&[8192, 128], 1, false),
    cpu(&[49152, 128], 1, false),
    cpu(&[1, 151936], 1, false),
    cpu(&[64, 1000], 1, false),
    cpu(&[1, 10_000_000], 1, false),
    cpu(&[64, 1000, 128], 1, false),
    cpu(&[4096, 4096], 0, false),
];

/// A call of `topk_softmax`: its name, its tensor, and how many elements of each line it is for.
pub struct TopK {
    pub op: &'static str,
    pub dims: &'static [usize],
    pub k: usize,
}

/// Routers of a mixture of experts, then samplers.
pub const TOP_K: [TopK; 5] = [
    TopK { op: "top-8 softmax", dims: &[4096, 64], k: 8 },
    TopK { op: "top-2 softmax", dims: &[512, 128], k: 2 },
    TopK { op: "top-8 softmax", dims: &[16384, 256], k: 8 },
    TopK { op: "top-40 softmax", dims: &[32, 128_256], k: 40 },
    TopK { op: "top-50 softmax", dims: &[1, 151_936], k: 50 },
];

/// `by` says how many times faster than `reference` the time of `ours` shall be.
#[derive(Clone, Copy)]
pub struct CpuTarget {
    pub op: &'static str,
    pub shape: &'static str,
    pub dtypes: &'static [&'static str],
    pub threads: usize,
    pub ours: &'static str,
    pub reference: &'static str,
    pub by: f64,
}

/// Our own implementations' names in the results.
pub const OURS: &str = "candle-softmax";
pub const OURS_OUT: &str = "candle-softmax out";
pub const OURS_IN_PLACE: &str = "candle-softmax in place";
pub const OURS_KERNEL: &str = "candle-softmax kernel";
pub const CANDLE: &str = "candle softmax";
pub const CANDLE_LAST_DIM: &str = "candle last_dim";
pub const COMPOSED: &str = "candle ops";

const fn goal(
    shape: &'static str,
    dtypes: &'static [&'static str],
    threads: usize,
    ours: &'static str,
    reference: &'static str,
    by: f64,
) -> CpuTarget {
    CpuTarget { op: "softmax", shape, dtypes, threads, ours, reference, by }
}

const fn of(op: &'static str, goal: CpuTarget) -> CpuTarget {
    CpuTarget { op, ..goal }
}

const F32: &[&str] = &["f32"];
const HALF: &[&str] = &["f16", "bf16"];

const FORWARD: &[CpuTarget] = &[
    goal("1024x32768", F32, 2, OURS, CANDLE_LAST_DIM, 6.0),
    goal("1024x32768", F32, 2, OURS, "torch", 3.0),
    goal("1024x32768", F32, 2, OURS, "torch, huge pages", 1.0),
    goal("1024x32768", F32, 2, OURS_IN_PLACE, "torch out", 1.4),
    goal("1024x32768", F32, 2, OURS_IN_PLACE, "onnxruntime out", 1.1),
    goal("1024x32768", HALF, 2, OURS, "torch", 3.0),
    goal("1024x32768", HALF, 2, OURS_IN_PLACE, "torch out", 2.2),
    goal("1024x32768", HALF, 2, OURS, CANDLE_LAST_DIM, 40.0),
    goal("512x512", F32, 1, OURS, "torch", 2.7),
    goal("512x512", F32, 1, OURS_OUT, "onnxruntime out", 1.2),
    goal("512x512", F32, 1, OURS, CANDLE_LAST_DIM, 9.0),
    goal("8192x128", F32, 1, OURS, "torch", 2.7),
    goal("8192x128", F32, 1, OURS_OUT, "onnxruntime out", 1.2),
    goal("8192x128", F32, 1, OURS, CANDLE_LAST_DIM, 9.0),
    goal("49152x128", F32, 1, OURS, "torch", 2.7),
    goal("49152x128", F32, 1, OURS_OUT, "onnxruntime out", 1.2),
    goal("49152x128", F32, 1, OURS, CANDLE_LAST_DIM, 9.0),
    goal("64x1000", F32, 1, OURS, "torch", 2.7),
    goal("64x1000", F32, 1, OURS_OUT, "onnxruntime out", 1.2),
    goal("64x1000", F32, 1, OURS, CANDLE_LAST_DIM, 9.0),
    goal("1x151936", F32, 1, OURS, "torch", 2.0),
    goal("1x151936", F32, 1, OURS_OUT, "onnxruntime out", 1.05),
    goal("1x151936", F32, 1, OURS, CANDLE_LAST_DIM, 9.0),
    goal("512x512", F32, 2, OURS, "torch", 1.6),
    goal("64x1000", F32, 2, OURS, "torch", 1.6),
    goal("1x10000000", F32, 2, OURS, "torch", 3.0),
    goal("64x1000x128", F32, 2, OURS, "torch", 1.8),
    goal("4096x4096", F32, 2, OURS, "torch", 3.5),
    of("log_softmax", goal("1024x32768", F32, 2, OURS, "torch", 3.0)),
];

/// Shape and threads of the backward passes.
const BACKWARD: [(&str, usize); 11] = [
    ("1024x32768", 2),
    ("512x512", 1),
    ("8192x128", 1),
    ("49152x128", 1),
    ("64x1000", 1),
    ("1x151936", 1),
    ("512x512", 2),
    ("64x1000", 2),
    ("1x10000000", 2),
    ("64x1000x128", 2),
    ("4096x4096", 2),
];

pub fn cpu_targets() -> Vec<CpuTarget> {
    let backward = BACKWARD.into_iter().flat_map(|(shape, threads)| {
        ["softmax_bwd", "log_softmax_bwd"].into_iter().flat_map(move |op| {
            // candle's pass through either, and of ours the gradient alone, as PyTorch's is timed.
            let candle = goal(shape, F32, threads, OURS, CANDLE, 2.0);
            let torch = goal(shape, F32, threads, OURS_KERNEL, "torch", 1.0);
            [candle, torch].map(|goal| of(op, goal))
        })
    });
    FORWARD.iter().copied().chain(backward).collect()
}

pub fn shape_name(dims: &[usize]) -> String {
    dims.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

/// -1 for the last dimension, as the peers' files have it.
pub fn dim_name(dims: &[usize], dim: usize) -> isize {
    if dim + 1 == dims.len() {
        -1
    } else {
        dim as isize
    }
}

/// How many elements of a large result are compared; all lines are of the same kind, and device time is scarce.
const SAMPLE: usize = 1 << 22;

/// Some lines along `dim` of two tensors of one shape, as matrices on the CPU with a line in each row. The first and
/// the last line are among them, and small tensors are taken whole.
pub fn sample_lines(tensors: [&Tensor; 2], dim: usize) -> Result<Vec<[Tensor; 2]>> {
    let dims = tensors[0].dims();
    ensure!(dims == tensors[1].dims(), "shapes {dims:?} and {:?} differ", tensors[1].dims());
    let len = dims[dim];
    let outer: usize = dims[..dim].iter().product();
    let inner: usize = dims[dim + 1..].iter().product();

    // Boxes of neighbouring lines, evenly spaced; (first, count) along the outer and along the inner dimension.
    let lines = (SAMPLE / len).max(1);
    let boxes: Vec<_> = if lines >= outer * inner {
        vec![((0, outer), (0, inner))]
    } else if inner == 1 {
        spread(outer, lines, 16).into_iter().map(|outer| (outer, (0, 1))).collect()
    } else {
        let groups = spread(outer, 4, 4);
        let columns = spread(inner, lines / groups.len(), 4);
        groups.iter().flat_map(|&(first, _)| columns.iter().map(move |&columns| ((first, 1), columns))).collect()
    };

    let matrix = |tensor: &Tensor, outer_box: (usize, usize), inner_box: (usize, usize)| -> Result<Tensor> {
        let lines = tensor.reshape((outer, len, inner))?.narrow(0, outer_box.0, outer_box.1)?;
        let lines = lines.narrow(2, inner_box.0, inner_box.1)?.transpose(1, 2)?;
        // `contiguous` could hand back the whole storage, and `to_device` would then copy all of it.
        let lines = lines.force_contiguous()?.reshape((outer_box.1 * inner_box.1, len))?;
        Ok(lines.to_device(&candle_core::Device::Cpu)?)
    };
    boxes
        .into_iter()
        .map(|(outer, inner)| Ok([matrix(tensors[0], outer, inner)?, matrix(tensors[1], outer, inner)?]))
        .collect()
}

/// At most `pieces` pieces of 0..`count`, of about `total` together, the first one at its start and the last at its end.
fn spread(count: usize, total: usize, pieces: usize) -> Vec<(usize, usize)> {
    let pieces = pieces.min(total).min(count).max(1);
    let each = (total / pieces).clamp(1, count / pieces);
    match pieces {
        1 => vec![(0, each)],
        _ => (0..pieces).map(|piece| ((count - each) * piece / (pieces - 1), each)).collect(),
    }
}
