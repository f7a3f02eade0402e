//! What models have around softmax: which calls are timed, what they should take at most, and the table of results.

use crate::report::{find, Row};
use crate::shapes::{Shape, COMPOSED, OURS};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_softmax::{loss::CrossEntropy, ops, testing, testing::CrossEntropyKernels, Softmax};

/// A call on tensors that were made for it.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub type Call = Box<dyn Fn() -> Result<Tensor>>;

/// Calls to be timed, by name, on one tensor.
pub struct Around {
    pub dims: &'static [usize],
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub calls: &'static [&'static str],
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Around {
    pub fn shape(&self) -> Shape {
        Shape { dims: self.dims, dim: self.dims.len() - 1, target: None, offset_target: false, journey: false }
    }
}

const LINES: &[&str] = &["softmax_backward", "log_softmax_backward", "logsumexp"];
const SCORES: &[&str] = &[
    "softmax",
    "scale",
    "scale + bias",
    "scale + causal",
    "scale + mask",
    "scale + padding",
    "scale + bias + padding",
    "scale + sinks",
    "dropout",
    "softcap",
    "scale backward",
    "scale + causal backward",
    "softcap backward",
];

pub const AROUND: &[Around] = &[
    Around { dims: &[1024, 32_768], calls: LINES },
    Around { dims: &[8192, 4096], calls: LINES },
    Around { dims: &[65_536, 1024], calls: LINES },
    Around {
        dims: &[4096, 128_256],
        calls: &[
            "softmax_backward",
            "log_softmax_backward",
            "logsumexp",
            "cross_entropy kernel",
            "cross_entropy kernels with backward",
            "cross_entropy",
        ],
    },
    Around { dims: &[8, 16, 2048, 2048], calls: SCORES },
    // Keys that are not whole packs of 16 bytes: those of a ViT, and of a prompt of any length
    Around { dims: &[128, 12, 197, 197], calls: SCORES },
    Around { dims: &[4, 16, 1001, 1001], calls: SCORES },
    // A vocabulary that is no whole packs
    Around {
        dims: &[4096, 50_257],
        calls: &["scale + bias", "softcap", "dropout", "scale backward", "softcap backward"],
    },
    Around { dims: &[871_543, 77], calls: &["logsumexp"] },
    Around { dims: &[340_654, 197], calls: &["logsumexp"] },
];

/// What is timed on a shape that was asked for, along any dimension, the last of several where it is causal, and …
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub const OWN_CALLS: &[&str] = &[
    "softmax_backward",
    "log_softmax_backward",
    "logsumexp",
    "logsumexp backward",
    "scale",
    "scale + bias",
    "scale + mask",
    "softcap",
    "dropout",
    "scale backward",
    "scale + bias backward",
    "scale + mask backward",
    "softcap backward",
    "dropout backward",
    "scale + causal",
    "scale + causal backward",
    "cross_entropy kernel",
    "cross_entropy kernels with backward",
    "cross_entropy",
    "cross_entropy step",
    TOP_K,
    TOP_K_OF_ALL,
    "topk_softmax backward",
    "topk_softmax of all backward",
];
/// … along the last one: of 8 in lines of up to 1024, which a router has, and of 50 in longer ones, renormalised and not.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
const TOP_K: &str = "topk_softmax";
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
const TOP_K_OF_ALL: &str = "topk_softmax of all";

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub fn is_along(call: &str, shape: &Shape) -> bool {
    let last = shape.dim + 1 == shape.dims.len();
    match call {
        "scale + causal" | "scale + causal backward" => last && shape.dim > 0,
        "cross_entropy" | "cross_entropy step" => shape.dim == 1,
        _ => last || !call.starts_with(TOP_K),
    }
}

/// On the CPU: calls of the builder to be timed beside plain softmax, by name.
pub struct CpuAround {
    pub dims: &'static [usize],
    pub dim: usize,
    pub calls: &'static [&'static str],
    /// Those that are timed out of candle's ops, too.
    pub composed: &'static [&'static str],
    /// Those whose backward passes are timed, both ways.
    pub backward: &'static [&'static str],
}

const ATTENTION: &[&str] = &[
    "scale",
    "scale + bias",
    "scale + full bias",
    "scale + causal",
    "scale + window",
    "scale + mask",
    "scale + padding",
    "scale + sinks",
    "softcap",
    "dropout",
];

pub const CPU_AROUND: &[CpuAround] = &[
    CpuAround {
        dims: &[8, 16, 512, 512],
        dim: 3,
        calls: ATTENTION,
        composed: &["scale + causal"],
        backward: &["scale"],
    },
    CpuAround {
        dims: &[32, 16, 64, 64],
        dim: 3,
        calls: ATTENTION,
        composed: &["scale", "scale + bias", "scale + causal", "scale + mask", "softcap", "dropout"],
        backward: &["scale", "scale + causal"],
    },
    CpuAround {
        dims: &[1024, 32_768],
        dim: 1,
        calls: &["scale", "scale + bias", "scale + full bias", "scale + mask", "softcap", "dropout"],
        composed: &[],
        backward: &[],
    },
    CpuAround {
        dims: &[64, 1000, 128],
        dim: 1,
        calls: &[
            "scale",
            "scale + bias",
            "scale + full bias",
            "scale + mask",
            "scale + padding",
            "scale + sinks",
            "softcap",
            "dropout",
        ],
        composed: &["scale + bias", "softcap"],
        backward: &["scale"],
    },
];

const SCALE: f64 = 1.0 / 8.0;
const CAP: f64 = 50.0;
const DROPPED: f32 = 0.1;

/// Softmax with what a name says around it, by the builder and out of candle's ops.
pub struct Options {
    pub softmax: Softmax,
    dim: usize,
    bias: Option<Tensor>,
    mask: Option<Tensor>,
    cap: bool,
    dropout: bool,
}

impl Options {
    /// `normal` makes normal numbers of a shape.
    pub fn new(name: &str, dims: &[usize], dim: usize, normal: impl Fn(&[usize]) -> Result<Tensor>) -> Result<Self> {
        // Shared by the heads or, where there are none, by all of the first dimension.
        let mut shared = dims.to_vec();
        shared[if dims.len() == 4 { 1 } else { 0 }] = 1;
        // One for each of the first dimension, as of sequences that are filled up to a common length.
        let padding: Vec<_> =
            dims.iter().enumerate().map(|(d, &size)| if d == 0 || d == dim { size } else { 1 }).collect();
        let softmax = Softmax::new().dim(dim).scale(SCALE);
        let plain = Self { softmax: softmax.clone(), dim, bias: None, mask: None, cap: false, dropout: false };
        Ok(match name {
            "scale" => plain,
            "scale + bias" | "scale + full bias" => {
                let bias = normal(if name == "scale + bias" { &shared } else { dims })?;
                Self { softmax: softmax.bias(&bias), bias: Some(bias), ..plain }
            }
            "scale + causal" => {
                let mask = Tensor::tril2(dims[dim], DType::U8, &Device::Cpu)?;
                Self { softmax: softmax.causal(), mask: Some(mask), ..plain }
            }
            "scale + window" => Self { softmax: softmax.window(dims[dim] / 4, 0), ..plain },
            "scale + mask" | "scale + padding" => {
                let mask = normal(if name == "scale + mask" { &shared } else { &padding })?.gt(0.0)?;
                Self { softmax: softmax.mask(&mask), mask: Some(mask), ..plain }
            }
            "scale + bias + padding" => {
                let (bias, mask) = (normal(&dims[1..])?, normal(&padding)?.gt(0.0)?);
                Self { softmax: softmax.bias(&bias).mask(&mask), bias: Some(bias), mask: Some(mask), ..plain }
            }
            "scale + sinks" => Self { softmax: softmax.sinks(&normal(&[dims[dims.len() - 3]])?), ..plain },
            "softcap" => Self { softmax: softmax.softcap(CAP), cap: true, ..plain },
            "dropout" => Self { softmax: softmax.dropout(f64::from(DROPPED), 42), dropout: true, ..plain },
            other => candle_core::bail!("there is no call {other}"),
        })
    }

    /// As models have it without the builder, with `softmax` along the dimension. There is no such form of window and sinks.
    pub fn composed(&self, xs: &Tensor, softmax: impl Fn(&Tensor, usize) -> Result<Tensor>) -> Result<Tensor> {
        let mut z = (xs * SCALE)?;
        if self.cap {
            z = ((z / CAP)?.tanh()? * CAP)?;
        }
        if let Some(bias) = &self.bias {
            z = z.broadcast_add(bias)?;
        }
        if let Some(mask) = &self.mask {
            let none = Tensor::new(f32::NEG_INFINITY, xs.device())?.to_dtype(xs.dtype())?;
            z = mask.broadcast_as(z.shape())?.where_cond(&z, &none.broadcast_as(z.shape())?)?;
        }
        let p = softmax(&z, self.dim)?;
        if self.dropout {
            candle_nn::ops::dropout(&p, DROPPED)
        } else {
            Ok(p)
        }
    }
}

/// The scores that targets are for.
const ATTENTION_SHAPE: &str = "8x16x2048x2048";

/// What a kernel should take at most, over the time of a copy of the same tensor; `time` is that of another call on it.
fn target(row: &Row, time: impl Fn(&str) -> Option<f64>, copy: f64) -> Option<f64> {
    Some(match (row.op.as_str(), row.shape.as_str()) {
        ("softmax_backward" | "log_softmax_backward", _) => 1.05 * 1.5,
        // The bias is a sixteenth of the scores, read once.
        ("scale + bias", ATTENTION_SHAPE) => 1.1 * (1.0 + 0.5 / 16.0),
        ("scale + causal", ATTENTION_SHAPE) => 0.85,
        ("logsumexp", "8192x4096") => 0.62,
        ("logsumexp", "4096x128256") | ("cross_entropy kernel", _) => 0.55,
        ("cross_entropy kernels with backward", _) => 1.6,
        ("dropout", ATTENTION_SHAPE) => (if row.dtype == "f32" { 1.05 } else { 1.15 }) * time("scale")? / copy,
        _ => return None,
    })
}

/// The call of that name along a dimension of tensors of that shape: normal numbers of deviation 3.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub fn call(name: &str, dims: &[usize], dim: usize, dtype: DType, device: &Device) -> Result<Call> {
    // Apart from each other: of tensors whose sizes are powers of two, one behind the other, elements of the same place may be in
    // the same banks of the memory, which takes up to 10 % longer.
    const APART: usize = 9 << 20;
    let normal = |dims: &[usize]| {
        let len = dims.iter().product();
        Tensor::randn(0f32, 3f32, len + APART, device)?.to_dtype(dtype)?.narrow(0, 0, len)?.reshape(dims)
    };
    let targets = |shape: Vec<usize>| Tensor::rand(0f32, dims[dim] as f32, shape, device)?.to_dtype(DType::I64);
    let xs = normal(dims)?;
    Ok(match name {
        "softmax_backward" | "log_softmax_backward" => {
            let log = name != "softmax_backward";
            let y = normal(dims)?;
            y.slice_set(&if log { ops::log_softmax(&xs, dim)? } else { ops::softmax(&xs, dim)? }, 0, 0)?;
            Box::new(move || testing::softmax_backward(log, &y, &xs, dim))
        }
        "logsumexp" => Box::new(move || ops::logsumexp(&xs, dim)),
        "logsumexp backward" => {
            let g = ops::logsumexp_keepdim(&xs, dim)?;
            Box::new(move || testing::logsumexp_backward(&xs, &g, dim))
        }
        top_k if top_k.starts_with(TOP_K) => {
            let k = (if dims[dim] <= 1024 { 8 } else { 50 }).min(dims[dim]);
            let renormalise = !name.contains(TOP_K_OF_ALL);
            if !name.ends_with(BACKWARD) {
                return Ok(Box::new(move || Ok(ops::topk_softmax(&xs, k, renormalise)?.0)));
            }
            let backward = testing::top_k_backward(&xs, k, renormalise)?;
            let g = ops::topk_softmax(&xs, k, renormalise)?.0.randn_like(0.0, 1.0)?;
            Box::new(move || backward(&g))
        }
        "cross_entropy" | "cross_entropy step" => {
            let targets = targets([&dims[..1], &dims[2..]].concat())?;
            if name == "cross_entropy" {
                return Ok(Box::new(move || CrossEntropy::new().forward(&xs, &targets)));
            }
            let xs = Var::from_tensor(&xs)?;
            Box::new(move || {
                let gradients = CrossEntropy::new().forward(&xs, &targets)?.backward()?;
                gradients.get(&xs).cloned().ok_or_else(|| candle_core::Error::Msg("no gradient of the logits".into()))
            })
        }
        "cross_entropy kernel" | "cross_entropy kernels with backward" => {
            let lines = dims.iter().product::<usize>() / dims[dim];
            let kernels = CrossEntropyKernels::new(targets(vec![lines])?, dim);
            if name == "cross_entropy kernel" {
                return Ok(Box::new(move || kernels.forward(&xs)));
            }
            let gradient = Tensor::randn(0f32, 1f32, (1, lines), device)?;
            Box::new(move || kernels.backward(&xs, &kernels.forward(&xs)?, &gradient))
        }
        "softmax" => Box::new(move || ops::softmax(&xs, dim)),
        backward if backward.ends_with(BACKWARD) => {
            let of = name.trim_end_matches(BACKWARD);
            let (softmax, g) = (Options::new(of, dims, dim, normal)?.softmax, normal(dims)?);
            Box::new(move || testing::builder_backward(&softmax, &xs, &g))
        }
        _ => {
            let softmax = Options::new(name, dims, dim, normal)?.softmax;
            Box::new(move || softmax.forward(&xs))
        }
    })
}

/// What a call on the CPU should take at most, over plain softmax of the same tensor.
fn cpu_target(op: &str) -> Option<f64> {
    match op {
        "softmax" => None,
        "softcap" => Some(2.0),
        "dropout" => Some(2.5),
        // Three tensors instead of two.
        "scale + full bias" => Some(1.2 * 1.5),
        op if op.contains(BACKWARD) => None,
        _ => Some(1.2),
    }
}

/// What the name of candle's backward pass through a call ends with; of the kernel alone, this and " kernel".
const BACKWARD: &str = " backward";
/// How many times faster than candle's ops the builder is to be.
const OVER_COMPOSED: f64 = 4.0;

/// The table of the CPU: microseconds, over plain softmax (or its backward pass), and candle's ops over ours.
fn print_cpu(rows: &[Row]) {
    println!("| op | shape | dim | dtype | threads | µs | over softmax | target | candle ops over ours | target |");
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let verdict = |target: f64, met: bool| format!("{target:.1}{}", if met { "" } else { ", missed" });
    for row in rows.iter().filter(|row| row.implementation == OURS) {
        let plain = format!("softmax{}", row.op.find(BACKWARD).map_or("", |at| &row.op[at..]));
        let plain = find(rows, row, &plain, OURS).and_then(Row::any);
        let (Some(us), Some(plain)) = (row.any(), plain) else { continue };
        let target = cpu_target(&row.op).map(|target| verdict(target, us / plain <= target));
        let composed = find(rows, row, &row.op, COMPOSED).and_then(Row::any).map(|composed| composed / us);
        println!(
            "| {} | {} | {} | {} | {} | {us:.1} | {:.2} | {} | {} | {} |",
            row.op,
            row.shape,
            row.dim,
            row.dtype,
            row.threads.unwrap_or_default(),
            us / plain,
            target.unwrap_or_default(),
            composed.map_or(String::new(), |ratio| format!("{ratio:.1}")),
            composed.map_or(String::new(), |ratio| verdict(OVER_COMPOSED, ratio >= OVER_COMPOSED)),
        );
    }
}

/// The table: microseconds, over the copy, and the target; the CPU has one of its own.
pub fn print(rows: &[Row]) {
    if rows.iter().any(|row| row.threads.is_some()) {
        return print_cpu(rows);
    }
    let time = |row: &Row, op: &str| {
        let same = |other: &&Row| other.op == op && (&other.shape, &other.dtype) == (&row.shape, &row.dtype);
        rows.iter().filter(same).filter_map(Row::any).reduce(f64::min)
    };
    println!("| op | shape | dim | dtype | µs | over copy | target |\n|---|---|---|---|---|---|---|");
    for row in rows.iter().filter(|row| row.implementation == OURS) {
        let (Some(us), Some(copy)) = (row.any(), time(row, "copy")) else { continue };
        let target = target(row, |op| time(row, op), copy);
        let verdict = target.map_or(String::new(), |target| {
            format!("{target:.2}{}", if us / copy <= target { "" } else { ", missed" })
        });
        println!(
            "| {} | {} | {} | {} | {us:.1} | {:.2} | {verdict} |",
            row.op,
            row.shape,
            row.dim,
            row.dtype,
            us / copy
        );
    }
}
