//! Shapes of every magnitude beside candle's own ops in f64 on the same device, up to millions of elements on a GPU: which kernel is taken depends
//! on how many lines there are for its multiprocessors, too.

use crate::fused::Case;
use crate::support::{config, devices, drawing, gpu_for, gradient, within_cap, DTYPES};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_softmax::{loss::CrossEntropy, ops, testing, MaskedRows, Softmax};
use proptest::prelude::*;

/// Up to 2^`most`, most often beside a power of two.
fn size(most: u32) -> impl Strategy<Value = usize> {
    (0..=most, 0usize..20, any::<prop::sample::Index>()).prop_map(|(log, near, any)| match near {
        0..16 => ((1usize << log) + near).saturating_sub(8).max(1),
        _ => (1usize << log) + any.index(1 << log),
    })
}

/// Before, along and behind the dimension
fn shape() -> impl Strategy<Value = [usize; 3]> {
    (size(20), size(21), prop_oneof![2 => Just(1usize), 1 => size(12)])
        .prop_map(|(outer, len, inner)| [outer, len, inner])
}

/// The same, cut to what is soon done there.
fn cut([outer, len, inner]: [usize; 3], device: &Device) -> [usize; 3] {
    let most = if device.is_cpu() || !within_cap(1 << 22) { 1 << 15 } else { 1 << 22 };
    let len = len.min(most);
    let inner = inner.min(most / len);
    [outer.min(most / (len * inner)), len, inner]
}

pub fn random(shape: &[usize], skipped: usize, scale: f32, dtype: DType, device: &Device) -> Result<Tensor> {
    let _drawing = drawing();
    let count = shape.iter().product();
    let all = Tensor::randn(0f32, scale, count + skipped, device)?.to_dtype(dtype)?;
    all.narrow(0, skipped, count)?.reshape(shape)
}

/// Classes out of so many.
pub fn random_targets(shape: &[usize], classes: usize, device: &Device) -> Result<Tensor> {
    let _drawing = drawing();
    Tensor::rand(0f32, classes as f32, shape, device)?.to_dtype(DType::U32)?.minimum(classes as u32 - 1)
}

pub fn wide(xs: &Tensor) -> Result<Tensor> {
    xs.to_dtype(DType::F64)
}

/// What a number may be off by, times itself, and at least.
pub fn rounding(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F64 => (1e-12, 1e-300),
        DType::F32 => (5e-6, 1e-43),
        DType::F16 => (2f64.powi(-10), 2f64.powi(-23)),
        _ => (2f64.powi(-7), 1e-39),
    }
}

/// Where each number is within its bound, or the same.
pub fn assert_near(found: &Tensor, exact: &Tensor, bound: &Tensor, what: &str) -> Result<()> {
    assert_eq!(found.shape(), exact.shape(), "{what}");
    let found = wide(found)?;
    let near = (&found - exact)?.abs()?.le(&bound.broadcast_as(exact.shape())?)?;
    let good = (near + found.eq(exact)?)?.gt(0u8)?.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?;
    assert_eq!(good as usize, exact.elem_count(), "of these many are right: {what}");
    Ok(())
}

/// The same of both: what a gradient p (w - Σ p w) may be off by is made of p (|w| + Σ p |w|), and of its own size.
fn check_gradient(
    xs: &Tensor,
    dim: usize,
    ours: impl Fn(&Tensor) -> Result<Tensor>,
    exact: impl Fn(&Tensor) -> Result<Tensor>,
    p: &Tensor,
    what: &str,
) -> Result<()> {
    let (unit, least) = rounding(xs.dtype());
    let weights = random(xs.dims(), 0, 1.0, xs.dtype(), xs.device())?;
    let exact_weights = wide(&weights)?;
    let found = gradient(xs, |xs| ours(xs)? * &weights)?;
    let exact = gradient(&wide(xs)?, |xs| exact(xs)? * &exact_weights)?;
    let size = wide(&weights)?.abs()?;
    let size = (size.broadcast_add(&(p * &size)?.sum_keepdim(dim)?)? * p)?.affine(8.0 * unit, 8.0 * least)?;
    assert_near(&found, &exact, &(size + exact.abs()?.affine(8.0 * unit, 0.0)?)?, &format!("gradient of {what}"))
}

/// Softmax by itself.
fn check_plain(shape: [usize; 3], skipped: usize, dtype: DType, device: &Device) -> Result<()> {
    let xs = random(&shape, skipped, 3.0, dtype, device)?;
    let (unit, least) = rounding(dtype);
    let x = wide(&xs)?;
    let log_p = candle_nn::ops::log_softmax(&x, 1)?;
    let p = log_p.exp()?;
    let of_p = p.affine(unit, least)?;
    let what = format!("{shape:?} of {dtype:?} from element {skipped} on");
    assert_near(&ops::softmax(&xs, 1)?, &p, &of_p, &format!("softmax {what}"))?;
    let over = xs.copy()?;
    ops::softmax_inplace(&over, 1)?;
    assert_near(&over, &p, &of_p, &format!("softmax in place {what}"))?;
    let of_log = log_p.abs()?.affine(unit, least + unit.min(3e-6))?;
    assert_near(&ops::log_softmax(&xs, 1)?, &log_p, &of_log, &format!("log-softmax {what}"))?;
    check_gradient(&xs, 1, |x| ops::softmax(x, 1), |x| candle_nn::ops::softmax(x, 1), &p, &what)?;
    let sum = x.log_sum_exp(1)?;
    let of_sum = sum.abs()?.affine(unit, unit)?;
    assert_near(&ops::logsumexp(&xs, 1)?, &sum, &of_sum, &format!("log-sum-exp {what}"))
}

/// Softmax with a scale, some of whose lines have nothing but −∞.
fn check_scaled(shape: [usize; 3], skipped: usize, scale: f64, dtype: DType, device: &Device) -> Result<()> {
    let [outer, _, inner] = shape;
    let xs = random(&shape, 0, (3.0 / scale) as f32, dtype, device)?;
    let is_empty = random(&[outer, 1, inner], 0, 1.0, DType::F32, device)?.gt(1.5f32)?;
    let [nothing, zero] = [f64::NEG_INFINITY, 0.0].map(|x| Tensor::full(x, (outer, 1, inner), device));
    let empty = is_empty.where_cond(&nothing?, &zero?)?;
    let masked = xs.broadcast_add(&empty.to_dtype(dtype)?)?.flatten_all()?;
    // It is to begin later in its memory, too.
    let all = match skipped {
        0 => masked.clone(),
        _ => Tensor::cat(&[&Tensor::zeros(skipped, dtype, device)?, &masked], 0)?,
    };
    let xs = all.narrow(0, skipped, masked.elem_count())?.reshape(&shape[..])?;
    let x = (wide(&xs)? * scale)?;
    let (unit, least) = rounding(dtype);
    let softmax = Softmax::new().dim(1).scale(scale);
    let what = format!("of {shape:?} of {dtype:?} from element {skipped} on with a scale of {scale}");
    // Of empty lines NaN
    let log_p = candle_nn::ops::log_softmax(&x, 1)?;
    let numbers = log_p.eq(&log_p)?;
    let or = |log_p: &Tensor, other: f64| numbers.where_cond(log_p, &Tensor::full(other, &shape[..], device)?);
    let p = or(&log_p.exp()?, 0.0)?;
    let of_p = p.affine(unit, least)?;
    assert_near(&softmax.forward(&xs)?, &p, &of_p, &format!("softmax {what}"))?;
    let over = xs.copy()?;
    softmax.forward_inplace(&over)?;
    assert_near(&over, &p, &of_p, &format!("softmax in place {what}"))?;
    let log_p = or(&log_p, f64::NEG_INFINITY)?;
    let of_log = or(&log_p.abs()?.affine(unit, least + unit.min(3e-6))?, 0.0)?;
    assert_near(&softmax.clone().log().forward(&xs)?, &log_p, &of_log, &format!("log-softmax {what}"))?;
    // NaN where it is asked for
    for softmax in [softmax.clone(), softmax.clone().log()] {
        let found = softmax.masked_rows(MaskedRows::Nan).forward(&xs)?;
        let same = wide(&found.eq(&found)?.eq(&numbers)?)?.sum_all()?.to_scalar::<f64>()?;
        assert_eq!(same as usize, xs.elem_count(), "numbers and no numbers {what}");
    }
    let exact = |x: &Tensor| {
        // Without a NaN, which would be the gradient of what is left out, too
        let x = numbers.where_cond(x, &x.zeros_like()?)?;
        or(&candle_nn::ops::softmax(&(x * scale)?, 1)?, 0.0)
    };
    check_gradient(&xs, 1, |x| softmax.forward(x), exact, &p, &what)
}

/// Losses, and the greatest of the last dimension.
fn check_beside(shape: [usize; 3], skipped: usize, k: usize, dtype: DType, device: &Device) -> Result<()> {
    let [outer, len, inner] = shape;
    let xs = random(&shape, skipped, 3.0, dtype, device)?;
    let what = format!("{shape:?} of {dtype:?} from element {skipped} on");
    let targets = random_targets(&[outer, inner], len, device)?;
    let log_p = candle_nn::ops::log_softmax(&wide(&xs)?, 1)?;
    let losses = log_p.gather(&targets.unsqueeze(1)?.contiguous()?, 1)?.squeeze(1)?.neg()?;
    let each = CrossEntropy::new().reduction(candle_softmax::loss::Reduction::None);
    let bound = losses.abs()?.affine(5e-6, 5e-6)?;
    assert_near(&each.forward(&xs, &targets)?, &losses, &bound, &format!("cross-entropy {what}"))?;
    let var = Var::from_tensor(&xs)?;
    let grads = each.forward(&var, &targets)?.sum_all()?.backward()?;
    let p = log_p.exp()?;
    let places = Tensor::arange(0u32, len as u32, device)?.reshape((1, len, 1))?;
    let hit = places.broadcast_as(&shape[..])?.eq(&targets.unsqueeze(1)?.broadcast_as(&shape[..])?)?;
    let (unit, least) = rounding(dtype);
    let bound = (&p + &wide(&hit)?)?.affine(2.0 * unit, 2.0 * least)?;
    assert_near(grads.get(&var).expect("a gradient"), &(p - wide(&hit)?)?, &bound, &format!("its gradient {what}"))?;

    let rows = xs.reshape((outer * inner, len))?;
    let k = k.min(len);
    let (weights, places) = ops::topk_softmax(&rows, k, true)?;
    let chosen = wide(&rows.gather(&places, 1)?)?;
    let least_chosen = chosen.narrow(1, k - 1, 1)?;
    let all = wide(&rows)?;
    let count = |at_least: Tensor| wide(&at_least)?.sum_keepdim(1);
    let above = count(all.gt(&least_chosen.broadcast_as(all.shape())?)?)?;
    let chosen_above = count(chosen.gt(&least_chosen.broadcast_as(chosen.shape())?)?)?;
    assert_near(&chosen_above, &above, &above.zeros_like()?, &format!("{k} greatest {what}"))?;
    let exp = chosen.broadcast_sub(&chosen.narrow(1, 0, 1)?)?.exp()?;
    let exact = exp.broadcast_div(&exp.sum_keepdim(1)?)?;
    assert_near(&weights, &exact, &exact.affine(unit, least)?, &format!("weights of the {k} greatest {what}"))
}

/// What may be around softmax.
#[derive(Clone, Copy, Debug)]
struct Around {
    scale: bool,
    cap: bool,
    bias: Option<u8>,
    mask: Option<u8>,
    causal: bool,
    sinks: bool,
    dropout: bool,
    log: bool,
}

fn around() -> impl Strategy<Value = Around> {
    let one = || prop::option::of(0u8..8);
    (
        any::<bool>(),
        prop::bool::weighted(0.2),
        one(),
        one(),
        any::<bool>(),
        prop::bool::weighted(0.3),
        prop::bool::weighted(0.3),
        prop::bool::weighted(0.2),
    )
        .prop_map(|(scale, cap, bias, mask, causal, sinks, dropout, log)| Around {
            scale,
            cap,
            bias,
            mask,
            causal,
            sinks,
            dropout: dropout && !log,
            log,
        })
}

fn check_around(shape: [usize; 3], skipped: usize, around: Around, dtype: DType, device: &Device) -> Result<()> {
    // Queries beside keys, and heads, where keys are last
    let [outer, len, inner] = shape;
    let (queries, heads) = ((outer as f64).sqrt() as usize, outer.min(2));
    let (dims, dim) = match inner {
        1 => (vec![(outer / queries / heads).max(1), heads, queries, len], 3),
        _ => (vec![1, outer, len, inner], 2),
    };
    let xs = random(&dims, skipped, 3.0, dtype, device)?;
    // Where a bit is set, there is one for all of a dimension.
    let part = |bits: u8| -> Vec<usize> {
        dims.iter().enumerate().map(|(i, &n)| if bits >> (i % 3) & 1 == 1 && i != dim { 1 } else { n }).collect()
    };
    let bias = around.bias.map(|bits| random(&part(bits), 0, 1.0, dtype, device)).transpose()?;
    let mask = around.mask.map(|bits| random(&part(bits), 0, 1.0, DType::F32, device)?.gt(-1f32)).transpose()?;
    let sinks = (around.sinks && dim == 3).then(|| random(&[dims[1]], 0, 1.0, dtype, device)).transpose()?;
    let case = Case {
        dim,
        scale: if around.scale { 0.5 } else { 1.0 },
        softcap: around.cap.then_some(5.0),
        bias,
        mask,
        causal: around.causal && dim == 3,
        sinks,
        dropout: around.dropout.then_some((0.3, 5)),
        log: around.log,
        ..Case::new(xs.clone())
    };
    let exact = case.in_f64()?;
    let undropped = Case { dropout: None, ..exact.clone() }.builder();
    let (softmax, exact) = (case.builder(), exact.builder());
    let what = format!("{dims:?} of {dtype:?} from element {skipped} on with {around:?}");
    let result = testing::composed(&exact, &wide(&xs)?)?;
    let (unit, least) = rounding(dtype);
    let bound = result.abs()?.affine(2.0 * unit, least + if around.log { unit.min(5e-6) } else { 0.0 })?;
    assert_near(&softmax.forward(&xs)?, &result, &bound, &what)?;
    let over = xs.copy()?;
    softmax.forward_inplace(&over)?;
    assert_near(&over, &result, &bound, &format!("in place {what}"))?;
    if around.log {
        return Ok(());
    }
    let p = testing::composed(&undropped, &wide(&xs)?)?;
    check_gradient(&xs, dim, |x| softmax.forward(x), |x| testing::composed(&exact, x), &p, &what)
}

/// A scale is softmax's own kernels' on a GPU: all of those that shapes drawn at random are too small for.
#[test]
fn a_scale_of_large_tensors() -> Result<()> {
    let shapes = [
        [1 << 17, 32, 1],
        [1 << 17, 5, 1],
        [20_000, 197, 1],
        [2000, 4096, 1],
        [2000, 4097, 1],
        [300, 20_000, 1],
        [300, 20_001, 1],
        [64, 151_936, 1],
        [16, 100_000, 1],
        [1, 1 << 22, 1],
        [2, (1 << 22) + 1, 1],
        [64, 1000, 128],
        [2, 4096, 1024],
        [8, 150, 16_384],
        [16, 512, 1089],
        [4, 2000, 2049],
        [8, 21, 65_536],
        [8, 16, 33_601],
        [100, 5, 10_000],
        [32_768, 128, 2],
        [1, 500_000, 3],
        [2, 60_000, 50],
    ];
    let Some(gpu) = gpu_for(0) else { return Ok(()) };
    for shape in shapes.into_iter().filter(|shape| within_cap(shape.iter().product())) {
        for dtype in DTYPES {
            check_scaled(shape, 0, 0.3, dtype, &gpu)?;
            check_scaled(shape, 1, 2.5, dtype, &gpu)?;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 100, ..config(60) })]

    #[test]
    fn softmax(shape in shape(), skipped in prop_oneof![Just(0usize), 0usize..9], dtype in prop::sample::select(DTYPES.to_vec())) {
        for device in devices() {
            check_plain(cut(shape, &device), skipped, dtype, &device).unwrap();
        }
    }

    #[test]
    fn a_scale(shape in shape(), skipped in prop_oneof![Just(0usize), 0usize..9], scale in prop_oneof![Just(1.0), 0.01..8.0], dtype in prop::sample::select(DTYPES.to_vec())) {
        for device in devices() {
            check_scaled(cut(shape, &device), skipped, scale, dtype, &device).unwrap();
        }
    }

    #[test]
    fn losses_and_the_greatest(shape in shape(), skipped in 0usize..9, k in size(8), dtype in prop::sample::select(DTYPES.to_vec())) {
        for device in devices() {
            check_beside(cut(shape, &device), skipped, k, dtype, &device).unwrap();
        }
    }

    #[test]
    fn around_softmax(shape in shape(), skipped in prop_oneof![Just(0usize), 0usize..9], around in around(), dtype in prop::sample::select(DTYPES.to_vec())) {
        for device in devices() {
            check_around(cut(shape, &device), skipped, around, dtype, &device).unwrap();
        }
    }
}
