//! Devices, ops and the reference that results are judged against.

use candle_core::{DType, Device, Result, Shape, Tensor, Var, D};
use candle_softmax::testing::{gpu_count, say_skipped};
use candle_softmax::{ops, OnlineSoftmax, ReduceSoftmax, SafeSoftmax};
use half::{bf16, f16};
use proptest::prelude::ProptestConfig;
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::sync::{Once, OnceLock, PoisonError, RwLock, RwLockReadGuard};

pub const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// The CPU and, where there is one, a GPU.
pub fn devices() -> Vec<Device> {
    static SAID: Once = Once::new();
    let gpu = gpu();
    if gpu.is_none() {
        SAID.call_once(|| say_skipped("on CUDA", "there is no GPU, or feature `cuda` is off"));
    }
    [Device::Cpu].into_iter().chain(gpu).collect()
}

/// One handle per process: candle makes a new stream handle and cuBLAS workspace for each.
pub fn gpu() -> Option<Device> {
    static GPU: OnceLock<Option<Device>> = OnceLock::new();
    let open = || (gpu_count() > 0).then(|| Device::new_cuda(0).expect("the GPU opens"));
    GPU.get_or_init(open).clone()
}

/// The GPU for a test of `elements` at once, which is skipped without one.
pub fn gpu_for(elements: usize) -> Option<Device> {
    let missing = match gpu() {
        Some(gpu) if within_cap(elements) => return Some(gpu),
        Some(_) => "larger tensors are left out",
        None => "there is no GPU, or feature `cuda` is off",
    };
    say_skipped(std::thread::current().name().unwrap_or("a test"), missing);
    None
}

/// cuRAND waits for all of a device, which invalidates what any thread captures: who draws numbers on a GPU, or opens one, reads, and who captures writes.
static DRAWING: RwLock<()> = RwLock::new(());

pub fn drawing() -> RwLockReadGuard<'static, ()> {
    DRAWING.read().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(feature = "cuda")]
pub fn no_drawing() -> std::sync::RwLockWriteGuard<'static, ()> {
    DRAWING.write().unwrap_or_else(PoisonError::into_inner)
}

/// Threads of the CPU to do it by. One alone writes large results past the caches, several do not.
pub fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool")
}

/// Whether tensors of this many elements are to be tested.
pub fn within_cap(elements: usize) -> bool {
    let cap = std::env::var("CANDLE_SOFTMAX_TEST_CAP").ok().and_then(|cap| cap.parse().ok());
    cap.is_none_or(|cap: usize| elements <= cap)
}

/// For a property of which so many cases are drawn: fewer where all is slow, and as many times as many as `CANDLE_SOFTMAX_TEST_CASES` says.
pub fn config(cases: u32) -> ProptestConfig {
    let times = std::env::var("CANDLE_SOFTMAX_TEST_CASES").ok().and_then(|times| times.parse().ok());
    let cases = if within_cap(200_000) { cases } else { cases.min(40) };
    ProptestConfig { cases: cases * times.unwrap_or(1), failure_persistence: None, ..ProptestConfig::default() }
}

/// Half a unit in the last place, by which a number that is stored is rounded, times itself
pub fn half_unit(dtype: DType) -> f64 {
    2f64.powi(match dtype {
        DType::F64 => -53,
        DType::F32 => -24,
        DType::F16 => -11,
        _ => -8,
    })
}

/// Everything a user can call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    Safe,
    Online,
    Reduce,
    Softmax,
    SoftmaxLastDim,
    LogSoftmax,
}

impl Op {
    pub const ALL: [Op; 6] = [Op::Safe, Op::Online, Op::Reduce, Op::Softmax, Op::SoftmaxLastDim, Op::LogSoftmax];
    /// Those that take a dimension.
    pub const ANY_DIM: [Op; 2] = [Op::Softmax, Op::LogSoftmax];

    /// Along `dim`. The ops that work on the last dimension get a transposed view.
    pub fn apply(self, xs: &Tensor, dim: usize) -> Result<Tensor> {
        match self {
            Op::Softmax => ops::softmax(xs, dim),
            Op::LogSoftmax => ops::log_softmax(xs, dim),
            _ if dim + 1 != xs.rank() => {
                self.apply(&xs.transpose(dim, D::Minus1)?, xs.rank() - 1)?.transpose(dim, D::Minus1)
            }
            Op::Safe => xs.apply_op1(SafeSoftmax),
            Op::Online => xs.apply_op1(OnlineSoftmax),
            Op::Reduce => xs.apply_op1(ReduceSoftmax),
            Op::SoftmaxLastDim => ops::softmax_last_dim(xs),
        }
    }
}

/// A tensor of `values` rounded to `dtype`.
pub fn tensor(values: &[f64], shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    match dtype {
        DType::F32 => Tensor::from_vec(values.iter().map(|&x| x as f32).collect(), shape, device),
        DType::F64 => Tensor::from_vec(values.to_vec(), shape, device),
        DType::F16 => Tensor::from_vec(values.iter().map(|&x| f16_of(x)).collect(), shape, device),
        DType::BF16 => Tensor::from_vec(values.iter().map(|&x| bf16_of(x)).collect(), shape, device),
        other => candle_core::bail!("no values of {other:?} are made here"),
    }
}

/// The elements in row-major order, exactly.
pub fn values(xs: &Tensor) -> Result<Vec<f64>> {
    xs.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// An f64 correctly rounded to f16 or bf16, by way of an f32 rounded to odd (half's own from_f64 drops the low bits, and so
/// takes some numbers just beside the middle of two for the middle).
fn round_to<H>(x: f64, from_f32: fn(f32) -> H) -> H {
    let near = x as f32;
    let toward_zero = if (near as f64).abs() > x.abs() { f32::from_bits(near.to_bits() - 1) } else { near };
    let odd = if toward_zero as f64 == x || x.is_nan() { near } else { f32::from_bits(toward_zero.to_bits() | 1) };
    from_f32(odd)
}

fn f16_of(x: f64) -> f16 {
    round_to(x, f16::from_f32)
}

fn bf16_of(x: f64) -> bf16 {
    round_to(x, bf16::from_f32)
}

/// A number as a tensor of such a dtype has it.
pub fn rounded(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::F16 => f16_of(x).to_f64(),
        DType::BF16 => bf16_of(x).to_f64(),
        _ => x,
    }
}

pub fn normal(count: usize, scale: f64, seed: u64) -> Vec<f64> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut uniform = || rng.random_range(f64::MIN_POSITIVE..1.0);
    // Box and Muller
    let mut two = || {
        let (radius, angle) = ((-2.0 * uniform().ln()).sqrt() * scale, std::f64::consts::TAU * uniform());
        [radius * angle.cos(), radius * angle.sin()]
    };
    let mut numbers: Vec<f64> = (0..count.div_ceil(2)).flat_map(|_| two()).collect();
    numbers.truncate(count);
    numbers
}

/// Σ terms, none of them below 0, compensated (Neumaier).
pub fn sum(terms: impl IntoIterator<Item = f64>) -> f64 {
    let (mut sum, mut carry) = (0.0, 0.0);
    for term in terms {
        let total = sum + term;
        carry += if sum >= term { (sum - total) + term } else { (term - total) + sum };
        sum = total;
    }
    sum + carry
}

/// A line's softmax in f64: (p, log p, x − max) of each element.
pub fn reference(line: &[f64]) -> impl Iterator<Item = (f64, f64, f64)> + '_ {
    let max = line.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum = sum(line.iter().map(|&x| (x - max).exp()));
    let log_sum = sum.ln();
    line.iter().map(move |&x| ((x - max).exp() / sum, x - max - log_sum, x - max))
}

/// Fails unless `found` keeps the bounds for an exact value.
pub fn check_element(
    op: Op,
    dtype: DType,
    found: f64,
    (p, log_p, shifted): (f64, f64, f64),
) -> std::result::Result<(), String> {
    let log = op == Op::LogSoftmax;
    let exact = if log { log_p } else { p };
    let distance = shifted.abs();
    // What may be off before the one rounding.
    let slack = match (log, dtype) {
        (true, DType::F64) => 1e-13 + 1e-15 * log_p.abs(),
        (true, _) => 1e-6 + 3e-7 * log_p.abs(),
        (false, DType::F64) => (p * (1e-13 + 1e-15 * distance)).max(2e-323),
        (false, DType::F32) if p < f32::MIN_POSITIVE as f64 => 1.3e-43,
        (false, _) => p * (1e-6 + 1e-7 * distance),
    };
    let good = if exact.is_nan() || found.is_nan() {
        exact.is_nan() && found.is_nan()
    } else if found == exact {
        true
    } else {
        match (log, dtype) {
            // Rounded to f32 or f64 the slack covers it, but for what overflows.
            (_, DType::F32 | DType::F64) => {
                (found - exact).abs() <= slack || (dtype == DType::F32 && found == exact as f32 as f64)
            }
            (false, DType::F16) => ulps_apart(f16_of(found).to_bits(), f16_of(exact).to_bits()) <= 1,
            (false, _) => ulps_apart(bf16_of(found).to_bits(), bf16_of(exact).to_bits()) <= 1,
            (true, DType::F16) => {
                let round = |x: f64| f16_of(x).to_f64();
                (round(exact - slack)..=round(exact + slack)).contains(&found)
            }
            (true, _) => {
                let round = |x: f64| bf16_of(x).to_f64();
                (round(exact - slack)..=round(exact + slack)).contains(&found)
            }
        }
    };
    if good {
        Ok(())
    } else {
        Err(format!("{op:?} {dtype:?}: {found:e} for {exact:e} (x - max = {shifted})"))
    }
}

/// Units in the last place between two non-negative half-precision numbers.
fn ulps_apart(a: u16, b: u16) -> u16 {
    a.abs_diff(b)
}

/// Fails unless `found` is the (log-)softmax of `xs` along `dim`.
pub fn check_result(op: Op, xs: &Tensor, dim: usize, found: &Tensor) -> Result<()> {
    assert_eq!(xs.shape(), found.shape());
    assert_eq!(xs.dtype(), found.dtype());
    let dims = xs.dims();
    let (len, inner): (usize, usize) = (dims[dim], dims[dim + 1..].iter().product());
    let (inputs, outputs) = (values(xs)?, values(found)?);
    let mut line = vec![0.0; len];
    for start in (0..inputs.len()).filter(|i| i / inner % len == 0) {
        let offsets = (0..len).map(|j| start + j * inner);
        line.iter_mut().zip(offsets.clone()).for_each(|(x, i)| *x = inputs[i]);
        let mut sum = 0.0;
        for (j, (i, exact)) in offsets.zip(reference(&line)).enumerate() {
            if let Err(error) = check_element(op, xs.dtype(), outputs[i], exact) {
                panic!("{error} on {:?}, shape {dims:?}, dim {dim}, element {j} of the line at {start}", xs.device());
            }
            sum += outputs[i];
        }
        if xs.dtype() == DType::F32 && op != Op::LogSoftmax && !sum.is_nan() {
            assert!((sum - 1.0).abs() <= 1e-5, "{op:?}: an f32 line sums to {sum}, shape {dims:?}, dim {dim}");
        }
    }
    Ok(())
}

/// The gradient of the sum of `f(xs)` with respect to `xs`.
pub fn gradient(xs: &Tensor, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let var = Var::from_tensor(xs)?;
    let grads = f(&var)?.sum_all()?.backward()?;
    Ok(grads.get(&var).expect("a gradient").clone())
}

/// Checks the gradient `found` of `loss` in `at`, both f64, against central differences. `what`: for the message.
pub fn check_gradient(found: &[f64], at: &[f64], what: &str, loss: impl Fn(&[f64]) -> Result<f64>) -> Result<()> {
    let step = 1e-5;
    assert_eq!(found.len(), at.len());
    for (i, found) in found.iter().enumerate() {
        let mut moved = at.to_vec();
        moved[i] += step;
        let above = loss(&moved)?;
        moved[i] -= 2.0 * step;
        let slope = (above - loss(&moved)?) / (2.0 * step);
        assert!((found - slope).abs() < 1e-8, "{what}, element {i}: {found} for {slope}");
    }
    Ok(())
}

/// Applies `op` to `xs` along `dim` and checks the result.
pub fn check(op: Op, xs: &Tensor, dim: usize) -> Result<()> {
    check_result(op, xs, dim, &op.apply(xs, dim)?)
}

/// Lines whose first elements say little about the others: what is above them comes late, or they are masked. The first line is like the
/// ones that are changed so.
pub fn begin_low(len: usize) -> Vec<Vec<f64>> {
    let usual = normal(len, 1.0, 7 + len as u64);
    let first = |count: usize, x: f64| {
        let mut line = usual.clone();
        line[..count].fill(x);
        line
    };
    let mut lines = vec![usual.clone()];
    for step in [5.0, 7.9, 8.5, 9.1, 15.0, 30.0, 42.0, 45.0, 90.0, 1000.0, 60_000.0] {
        for from in [65, len / 2, len - 1] {
            let mut line = usual.clone();
            line[from..].iter_mut().for_each(|x| *x += step);
            lines.push(line);
        }
    }
    for masked in [f64::NEG_INFINITY, -60_000.0, -1000.0, -100.0, -20.0] {
        for count in [1, 64, 65, len / 2, len - 1, len] {
            lines.push(first(count, masked));
        }
    }
    lines
}

/// Sets of lines, one behind the other, that are more or less far from each other: a few or most far from the rest, ever farther, or with
/// nothing, NaN or ∞ in some.
pub fn far_from_each_other(len: usize) -> Vec<Vec<f64>> {
    const LINES: usize = 100;
    let far: [fn(usize) -> f64; 8] = [
        |i| if i % 10 == 3 { 30.0 } else { 0.0 },
        |i| if i % 10 == 3 { -30.0 } else { 0.0 },
        |i| [0.0, 60.0, -60.0][i % 3],
        |i| 0.7 * i as f64,
        |i| -0.7 * i as f64,
        |i| if i % 40 < 20 { 1e4 } else { -1e4 },
        |i| [0.0, 3.9, 4.1, -4.0, 8.9, -8.9, 9.1, -9.1][i % 8],
        |i| if i < 50 { 0.0 } else { 5e4 },
    ];
    let mut sets: Vec<Vec<f64>> = far
        .iter()
        .map(|far| {
            normal(LINES * len, 1.0, 3 + len as u64).into_iter().enumerate().map(|(i, x)| x + far(i / len)).collect()
        })
        .collect();
    for (x, every, elements) in [
        (f64::NEG_INFINITY, 7, len),
        (f64::NEG_INFINITY, 2, len),
        (f64::NEG_INFINITY, 1, len - 1),
        (f64::NAN, 9, 1),
        (f64::INFINITY, 3, 1),
    ] {
        let mut set = sets[0].clone();
        set.chunks_exact_mut(len).step_by(every).for_each(|line| line[..elements].fill(x));
        sets.push(set);
    }
    sets
}
