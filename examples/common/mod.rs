//! What the example programs share: choosing a device, drawing random numbers, showing progress, and comparing
//! a softmax with the same softmax computed in f64.

// Each example is a program of its own and uses a part of this file.
#![allow(dead_code)]

use anyhow::{bail, Context, Result};
use candle_core::{DType, Device, Tensor, D};
use candle_softmax::{ops, OnlineSoftmax, ReduceSoftmax, SafeSoftmax};
use indicatif::{ProgressBar, ProgressStyle};
use rand::{rngs::StdRng, Rng, SeedableRng};
use rayon::prelude::*;
use std::time::{SystemTime, UNIX_EPOCH};

/// Reads `cpu`, `cuda` or `cuda:N`.
pub fn parse_device(text: &str) -> Result<Device> {
    let ordinal = match text {
        "cpu" => return Ok(Device::Cpu),
        "cuda" => 0,
        _ => match text.strip_prefix("cuda:").map(str::parse) {
            Some(Ok(ordinal)) => ordinal,
            _ => bail!("expected cpu, cuda or cuda:N"),
        },
    };
    if !cfg!(feature = "cuda") {
        bail!("this program was built without CUDA; build it with --features cuda");
    }
    Device::new_cuda(ordinal).or_else(|error| bail!("CUDA device {ordinal} did not open: {error}"))
}

/// Reads `f32`, `f64`, `f16` or `bf16`.
pub fn parse_dtype(text: &str) -> Result<DType> {
    match text {
        "f32" => Ok(DType::F32),
        "f64" => Ok(DType::F64),
        "f16" => Ok(DType::F16),
        "bf16" => Ok(DType::BF16),
        _ => bail!("expected f32, f64, f16 or bf16"),
    }
}

/// `cpu` or `cuda:N`, as `parse_device` reads it.
pub fn device_tag(device: &Device) -> String {
    match device.location() {
        candle_core::DeviceLocation::Cpu => "cpu".into(),
        candle_core::DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        candle_core::DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
    }
}

/// The product name of the GPU or CPU, or the architecture where the system does not tell.
pub fn device_name(device: &Device) -> Result<String> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        return Ok(cuda.cuda_stream().context().name()?);
    }
    if !device.is_cpu() {
        return Ok(device_tag(device));
    }
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find(|line| line.starts_with("model name"))
        .and_then(|line| line.split(": ").nth(1))
        .unwrap_or(std::env::consts::ARCH);
    let threads = rayon::current_num_threads();
    Ok(format!("{model} ({threads} threads)"))
}

pub fn progress_bar(len: usize, message: impl Into<String>) -> Result<ProgressBar> {
    let style =
        ProgressStyle::with_template("{msg} [{bar:32}] {pos}/{len} ({elapsed}, {eta} left)")?.progress_chars("=> ");
    Ok(ProgressBar::new(len as u64).with_style(style).with_message(message.into()))
}

/// `len` values of a normal distribution around zero, two at a time by the Box-Muller transform.
/// (candle's own CPU generator cannot be seeded.)
pub fn normal(rng: &mut impl Rng, len: usize, deviation: f32) -> Vec<f32> {
    let pairs = (0..len.div_ceil(2)).flat_map(|_| {
        let radius = deviation * (-2.0 * (1.0 - rng.random::<f32>()).ln()).sqrt();
        let (sin, cos) = (std::f32::consts::TAU * rng.random::<f32>()).sin_cos();
        [radius * cos, radius * sin]
    });
    pairs.take(len).collect()
}

/// A matrix of normal values; f32 on the CPU, for the caller to convert.
pub fn normal_matrix(seed: u64, rows: usize, cols: usize, deviation: f32) -> Result<Tensor> {
    let len = rows.checked_mul(cols).context("too many elements")?;
    let values = normal(&mut StdRng::seed_from_u64(seed), len, deviation);
    Ok(Tensor::from_vec(values, (rows, cols), &Device::Cpu)?)
}

/// A softmax of this crate, over the last dimension.
pub struct Op {
    pub name: &'static str,
    /// Whether it returns log p and not p.
    pub log: bool,
    pub run: fn(&Tensor) -> candle_core::Result<Tensor>,
}

pub const OPS: [Op; 6] = [
    Op { name: "SafeSoftmax", log: false, run: |xs| xs.apply_op1(SafeSoftmax) },
    Op { name: "OnlineSoftmax", log: false, run: |xs| xs.apply_op1(OnlineSoftmax) },
    Op { name: "ReduceSoftmax", log: false, run: |xs| xs.apply_op1(ReduceSoftmax) },
    Op { name: "ops::softmax", log: false, run: |xs| ops::softmax(xs, D::Minus1) },
    Op { name: "ops::softmax_last_dim", log: false, run: ops::softmax_last_dim },
    Op { name: "ops::log_softmax", log: true, run: |xs| ops::log_softmax(xs, D::Minus1) },
];

/// The binary floating-point formats, as far as rounding is concerned.
#[derive(Clone, Copy)]
struct Format {
    mantissa_bits: i32,
    /// Exponent of the smallest normal number; below it the spacing of the numbers stays the same.
    min_exponent: i32,
}

impl Format {
    fn of(dtype: DType) -> Result<Self> {
        let (mantissa_bits, min_exponent) = match dtype {
            DType::F64 => (52, -1022),
            DType::F32 => (23, -126),
            DType::F16 => (10, -14),
            DType::BF16 => (7, -126),
            other => bail!("{other:?} is not a floating-point type of this example"),
        };
        Ok(Self { mantissa_bits, min_exponent })
    }

    /// The spacing of the format's numbers around `value` (one unit in the last place).
    fn ulp(self, value: f64) -> f64 {
        let exponent = ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023;
        f64::exp2((exponent.max(self.min_exponent) - self.mantissa_bits).into())
    }

    /// The format's number nearest to `value`; exact, since a ulp is a power of two.
    fn round(self, value: f64) -> f64 {
        let ulp = self.ulp(value);
        (value / ulp).round_ties_even() * ulp
    }
}

/// How far a softmax is from the same softmax computed in f64.
pub struct Accuracy {
    /// The largest error of an element, in ulps of the output's dtype. For log p, which may be as near to zero as
    /// it likes, in ulps of 1 where it lies between -1 and 0.
    pub max_error: f64,
    pub elements_pass: bool,
    /// Of every row, the sum of its probabilities.
    pub row_sums: Vec<f64>,
    pub max_deviation: f64,
    pub sums_pass: bool,
}

impl Accuracy {
    /// Compares `output` with the softmax (the log-softmax, where `log`) of `input` over the last dimension.
    pub fn measure(input: &Tensor, output: &Tensor, log: bool) -> Result<Self> {
        if (output.shape(), output.dtype()) != (input.shape(), input.dtype()) {
            bail!("the output's shape or dtype is not the input's: {output:?}");
        }
        let cols = input.dim(D::Minus1)?;
        let (xs, ys) = (to_f64(input)?, to_f64(output)?);
        let bound = Bound::new(input.dtype(), log)?;
        let rows: Vec<Row> = xs.par_chunks(cols).zip(ys.par_chunks(cols)).map(|(xs, ys)| bound.row(xs, ys)).collect();
        // Not a number compares as false, and so never passes.
        let worst = |of: fn(&Row) -> f64| rows.iter().map(of).fold(0.0, worse);
        Ok(Self {
            max_error: worst(|row| row.max_error),
            elements_pass: rows.iter().all(|row| row.pass),
            max_deviation: worst(|row| (row.sum - 1.0).abs()),
            sums_pass: rows.iter().all(|row| (row.sum - 1.0).abs() <= row.sum_bound),
            row_sums: rows.into_iter().map(|row| row.sum).collect(),
        })
    }

    pub fn pass(&self) -> bool {
        self.elements_pass && self.sums_pass
    }
}

/// All values of a tensor in f64, which holds every value of the smaller formats exactly.
pub fn to_f64(xs: &Tensor) -> Result<Vec<f64>> {
    let xs = xs.to_device(&Device::Cpu)?.flatten_all()?;
    xs.to_dtype(DType::F64)?.to_vec1().context("reading a tensor back")
}

/// The larger of two errors, where not a number is the largest.
fn worse(a: f64, b: f64) -> f64 {
    if b.is_nan() {
        f64::INFINITY
    } else {
        a.max(b)
    }
}

/// Kahan's summation: a plain f64 sum of 100 000 numbers would itself be off by more than the f64 bound.
fn sum(values: impl Iterator<Item = f64>) -> f64 {
    let (mut total, mut lost) = (0.0, 0.0);
    for value in values {
        let value = value - lost;
        let next = total + value;
        lost = (next - total) - value;
        total = next;
    }
    total
}

struct Row {
    max_error: f64,
    pass: bool,
    sum: f64,
    sum_bound: f64,
}

/// How far a result may be from the f64 one.
///
/// Inside, sums and exponentials are f32 (f64 for f64 tensors). One evaluation of `exp(x - max) / sum` in f32 is
/// allowed a relative error of 1e-6 + 1e-7 * |x - max|: the second part is the rounding of `x - max`, whose error
/// `exp` turns from absolute to relative. For log p it is an absolute 1e-6 + 3e-7 * |log p|.
///
/// Then comes one rounding to the tensor's dtype. p in half precision has to be the correctly rounded value or a
/// neighbour of it; log p has to be the rounding of some number within the bound above.
struct Bound {
    dtype: DType,
    log: bool,
    output: Format,
    /// Relative error of p (absolute error of log p).
    base: f64,
    slope: f64,
    /// p may also be off by the smallest number of the arithmetic inside.
    smallest: f64,
}

impl Bound {
    fn new(dtype: DType, log: bool) -> Result<Self> {
        let (inside, base, slope) = match (dtype, log) {
            (DType::F64, _) => (DType::F64, 1e-13, 1e-15),
            (_, false) => (DType::F32, 1e-6, 1e-7),
            (_, true) => (DType::F32, 1e-6, 3e-7),
        };
        Ok(Self { dtype, log, output: Format::of(dtype)?, base, slope, smallest: Format::of(inside)?.ulp(0.0) })
    }

    fn row(&self, xs: &[f64], ys: &[f64]) -> Row {
        let max = xs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total = sum(xs.iter().map(|x| (x - max).exp()));
        let log_total = total.ln();

        let (mut max_error, mut pass) = (0.0, true);
        let sum_bound = sum(xs.iter().zip(ys).map(|(x, &y)| {
            let (value, tolerance, ulp) = if self.log {
                let value = x - max - log_total;
                let tolerance = self.base + self.slope * value.abs();
                (value, tolerance, self.output.ulp(value.abs().max(1.0)))
            } else {
                let value = (x - max).exp() / total;
                let tolerance = value * (self.base + self.slope * (max - x)) + self.smallest;
                (value, tolerance, self.output.ulp(value))
            };
            max_error = worse(max_error, (y - value).abs() / ulp);
            pass &= self.allows(y, value, tolerance);
            self.share_of_sum(value, tolerance)
        }));
        let sum = if self.log { sum(ys.iter().map(|y| y.exp())) } else { sum(ys.iter().copied()) };
        Row {
            max_error,
            pass,
            sum,
            sum_bound: match self.dtype {
                DType::F32 => 1e-5,
                _ => sum_bound,
            },
        }
    }

    fn allows(&self, y: f64, value: f64, tolerance: f64) -> bool {
        let nearest = self.output.round(value);
        let (low, high) = match self.dtype {
            _ if self.log => (self.output.round(value - tolerance), self.output.round(value + tolerance)),
            DType::F16 | DType::BF16 => {
                let ulp = self.output.ulp(nearest);
                (nearest - ulp, nearest + ulp)
            }
            _ => (value - tolerance, value + tolerance),
        };
        (low..=high).contains(&y)
    }

    /// How far one element may take its row's sum away from 1: the arithmetic's tolerance and half a ulp for the
    /// rounding. Below the smallest normal number a ulp stays as it is, so in f16, where that number is 6e-5, a row
    /// of many small probabilities is allowed more. An error e of log p multiplies p by exp(e).
    fn share_of_sum(&self, value: f64, tolerance: f64) -> f64 {
        let error = tolerance + self.output.ulp(value) / 2.0;
        if self.log {
            value.exp() * error.exp_m1()
        } else {
            error
        }
    }
}

/// Today's date in UTC as YYYY-MM-DD.
pub fn today() -> Result<String> {
    let mut days = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() / 86_400;
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));

    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let mut month = 1;
    for length in [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    Ok(format!("{year}-{month:02}-{:02}", days + 1))
}
