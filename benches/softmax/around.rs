//! What models have around softmax: which calls are timed, what they should take at most, and the table of results.

use crate::report::Row;
use crate::shapes::{Shape, Target, OURS};
use candle_core::{DType, Tensor};
use candle_softmax::{loss::CrossEntropy, ops, testing, testing::CrossEntropyKernels, Softmax};

/// A call on tensors that were made for it.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub type Call = Box<dyn Fn() -> candle_core::Result<Tensor>>;

/// Calls to be timed, by name, on one tensor.
pub struct Around {
    pub dims: &'static [usize],
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub calls: &'static [&'static str],
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Around {
    pub fn shape(&self) -> Shape {
        Shape {
            dims: self.dims,
            dim: self.dims.len() - 1,
            target: Target::Copies(1.0, 1.0),
            offset_target: false,
            journey: false,
        }
    }
}

const LINES: &[&str] = &["softmax_backward", "log_softmax_backward", "logsumexp"];

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
    Around {
        dims: &[8, 16, 2048, 2048],
        calls: &[
            "softmax",
            "scale",
            "scale + bias",
            "scale + causal",
            "scale + mask",
            "scale + sinks",
            "dropout",
            "softcap",
            "scale backward",
            "scale + causal backward",
        ],
    },
];

/// What a kernel should take at most, over the time of a copy of the same tensor; `time` is that of another call on it.
fn target(row: &Row, time: impl Fn(&str) -> Option<f64>, copy: f64) -> Option<f64> {
    Some(match (row.op.as_str(), row.shape.as_str()) {
        ("softmax_backward" | "log_softmax_backward", _) => 1.05 * 1.5,
        // The bias is a sixteenth of the scores, read once.
        ("scale + bias", _) => 1.1 * (1.0 + 0.5 / 16.0),
        ("scale + causal", _) => 0.85,
        ("logsumexp", "8192x4096") => 0.62,
        ("logsumexp", "4096x128256") | ("cross_entropy kernel", _) => 0.55,
        ("cross_entropy kernels with backward", _) => 1.6,
        ("dropout", _) => (if row.dtype == "f32" { 1.05 } else { 1.15 }) * time("scale")? / copy,
        _ => return None,
    })
}

/// The call of that name on tensors of that shape: normal numbers of deviation 3.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub fn call(name: &str, dims: &[usize], dtype: DType, device: &candle_core::Device) -> candle_core::Result<Call> {
    // Apart from each other: of tensors whose sizes are powers of two, one behind the other, elements of the same place may be in
    // the same banks of the memory, which takes up to 10 % longer.
    const APART: usize = 9 << 20;
    let normal = |dims: &[usize]| {
        let len = dims.iter().product();
        Tensor::randn(0f32, 3f32, len + APART, device)?.to_dtype(dtype)?.narrow(0, 0, len)?.reshape(dims)
    };
    let xs = normal(dims)?;
    let last = dims.len() - 1;
    let scale = 1.0 / 8.0;
    Ok(match name {
        "softmax_backward" | "log_softmax_backward" => {
            let log = name != "softmax_backward";
            let y = normal(dims)?;
            y.slice_set(&if log { ops::log_softmax(&xs, last)? } else { ops::softmax(&xs, last)? }, 0, 0)?;
            Box::new(move || testing::softmax_backward(log, &y, &xs, last))
        }
        "logsumexp" => Box::new(move || ops::logsumexp(&xs, last)),
        "cross_entropy" | "cross_entropy kernel" | "cross_entropy kernels with backward" => {
            let targets = Tensor::rand(0f32, dims[1] as f32 - 1.0, dims[0], device)?.to_dtype(DType::I64)?;
            if name == "cross_entropy" {
                return Ok(Box::new(move || CrossEntropy::new().forward(&xs, &targets)));
            }
            let kernels = CrossEntropyKernels::new(targets);
            if name == "cross_entropy kernel" {
                return Ok(Box::new(move || kernels.forward(&xs)));
            }
            let gradient = Tensor::randn(0f32, 1f32, kernels.forward(&xs)?.dims(), device)?;
            Box::new(move || kernels.backward(&xs, &kernels.forward(&xs)?, &gradient))
        }
        "softmax" => Box::new(move || ops::softmax(&xs, last)),
        "scale backward" | "scale + causal backward" => {
            let softmax = Softmax::new().scale(scale);
            let softmax = if name == "scale backward" { softmax } else { softmax.causal() };
            let g = normal(dims)?;
            Box::new(move || testing::builder_backward(&softmax, &xs, &g))
        }
        _ => {
            let softmax = Softmax::new().scale(scale);
            let softmax = match name {
                "scale" => softmax,
                "scale + bias" => softmax.bias(&normal(&[dims[0], 1, dims[2], dims[3]])?),
                "scale + causal" => softmax.causal(),
                "scale + mask" => {
                    let random = Tensor::rand(0f32, 1f32, (dims[0], 1, dims[2], dims[3]), device)?;
                    softmax.mask(&random.gt(0.5)?)
                }
                "scale + sinks" => softmax.sinks(&normal(&[dims[1]])?),
                "dropout" => softmax.dropout(0.1, 42),
                "softcap" => softmax.softcap(50.0),
                other => candle_core::bail!("there is no call {other}"),
            };
            Box::new(move || softmax.forward(&xs))
        }
    })
}

/// The table: microseconds, over the copy, and the target.
pub fn print(rows: &[Row]) {
    let time = |row: &Row, op: &str| {
        let same = |other: &&Row| other.op == op && (&other.shape, &other.dtype) == (&row.shape, &row.dtype);
        rows.iter().filter(same).filter_map(Row::any).reduce(f64::min)
    };
    println!("| op | shape | dtype | µs | over copy | target |\n|---|---|---|---|---|---|");
    for row in rows.iter().filter(|row| row.implementation == OURS) {
        let (Some(us), Some(copy)) = (row.any(), time(row, "copy")) else { continue };
        let target = target(row, |op| time(row, op), copy);
        let verdict = target.map_or(String::new(), |target| {
            format!("{target:.2}{}", if us / copy <= target { "" } else { ", missed" })
        });
        println!("| {} | {} | {} | {us:.1} | {:.2} | {verdict} |", row.op, row.shape, row.dtype, us / copy);
    }
}
