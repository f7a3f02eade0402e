//! The builder: every option and combination against a reference in f64 that is computed here.

use crate::shapes::{assert_near, random};
use crate::support::{
    self, begin_low, config, devices, far_from_each_other, gpu_for, gradient, half_unit, normal, pool, rounded, sum,
    tensor, values, within_cap, DTYPES,
};
use candle_core::{DType, Device, Module, Result, Tensor, Var, D};
use candle_softmax::{ops, testing, MaskedRows, Softmax};
use proptest::prelude::*;

/// What is asked of a builder, with the tensors as they are to be on any device.
#[derive(Clone, Debug)]
pub struct Case {
    pub scores: Tensor,
    pub dim: usize,
    pub scale: f64,
    pub softcap: Option<f64>,
    pub bias: Option<Tensor>,
    pub mask: Option<Tensor>,
    pub causal: bool,
    pub window: Option<(usize, usize)>,
    pub sinks: Option<Tensor>,
    pub dropout: Option<(f64, u64)>,
    pub rows: MaskedRows,
    pub log: bool,
    pub out: DType,
    /// How many elements there are before the variable that the scores are, and before those that are written over.
    pub before: usize,
}

impl Case {
    pub fn new(scores: Tensor) -> Self {
        let (dim, out) = (scores.rank() - 1, scores.dtype());
        let rows = MaskedRows::Zero;
        let (bias, mask, sinks, dropout) = (None, None, None, None);
        Self {
            scores,
            dim,
            scale: 1.0,
            softcap: None,
            bias,
            mask,
            causal: false,
            window: None,
            sinks,
            dropout,
            rows,
            log: false,
            out,
            before: 0,
        }
    }

    /// The scores as a contiguous part of a larger tensor, which comes first.
    fn within(&self) -> Result<Tensor> {
        let scores = self.scores.flatten_all()?.contiguous()?;
        if self.before == 0 {
            return Ok(scores);
        }
        Tensor::cat(&[&Tensor::ones(self.before, scores.dtype(), scores.device())?, &scores], 0)
    }
    fn part(&self, within: &Tensor) -> Result<Tensor> {
        within.narrow(0, self.before, self.scores.elem_count())?.reshape(self.scores.shape())
    }

    fn on(&self, device: &Device) -> Result<Self> {
        let moved = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| to(tensor, device)).transpose();
        let mut case = self.clone();
        (case.bias, case.mask, case.sinks) = (moved(&self.bias)?, moved(&self.mask)?, moved(&self.sinks)?);
        case.scores = to(&self.scores, device)?;
        Ok(case)
    }

    /// The same in f64.
    pub fn in_f64(&self) -> Result<Self> {
        let wide = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| tensor.to_dtype(DType::F64)).transpose();
        Ok(Self { bias: wide(&self.bias)?, sinks: wide(&self.sinks)?, out: DType::F64, ..self.clone() })
    }

    pub fn builder(&self) -> Softmax {
        let mut builder = Softmax::new().dim(self.dim).scale(self.scale).masked_rows(self.rows).out_dtype(self.out);
        if let Some(cap) = self.softcap {
            builder = builder.softcap(cap);
        }
        if let Some(bias) = &self.bias {
            builder = builder.bias(bias);
        }
        if let Some(mask) = &self.mask {
            builder = builder.mask(mask);
        }
        if self.causal {
            builder = builder.causal();
        }
        if let Some((before, after)) = self.window {
            builder = builder.window(before, after);
        }
        if let Some(sinks) = &self.sinks {
            builder = builder.sinks(sinks);
        }
        if let Some((p, seed)) = self.dropout {
            builder = builder.dropout(p, seed);
        }
        if self.log {
            builder = builder.log();
        }
        builder
    }
}

/// With the layout that it has: what it is a view of is moved.
fn to(tensor: &Tensor, device: &Device) -> Result<Tensor> {
    if device.is_cpu() {
        return Ok(tensor.clone());
    }
    let moved = tensor.to_device(device)?;
    // Strides as they were, where that can be had by a permutation or a broadcast.
    let mut order: Vec<usize> = (0..tensor.rank()).collect();
    order.sort_by_key(|&d| std::cmp::Reverse(tensor.stride()[d]));
    let mut back = vec![0; order.len()];
    order.iter().enumerate().for_each(|(i, &d)| back[d] = i);
    let moved = moved.permute(order)?.contiguous()?.permute(back)?;
    let narrow: Vec<usize> = (0..tensor.rank()).filter(|&d| tensor.stride()[d] == 0 && tensor.dims()[d] > 0).collect();
    narrow.iter().try_fold(moved, |moved, &d| moved.narrow(d, 0, 1))?.broadcast_as(tensor.shape())
}

/// Philox4x32-7 and what is made of it, once more and one number at a time.
fn kept(p: f64, seed: u64, line: usize, j: usize) -> bool {
    let mut counter = [(j / 8) as u32, line as u32, (line as u64 >> 32) as u32, 0];
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..7 {
        let product = |a: u32, b: u32| (((u64::from(a) * u64::from(b)) >> 32) as u32, a.wrapping_mul(b));
        let ((high0, low0), (high1, low1)) = (product(0xd251_1f53, counter[0]), product(0xcd9e_8d57, counter[2]));
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    let bits = counter[j % 8 / 2] >> (j % 2 * 16) & 0xffff;
    f64::from(bits) >= (p * 65536.0).round()
}

/// For each element in row-major order.
struct Reference {
    /// What is to come out, but for its rounding, and by how much it may be off before that.
    results: Vec<(f64, f64)>,
    /// Of the scores, logits and sinks, and by how much those may be off.
    scores_gradient: Vec<(f64, f64)>,
    logits_gradient: Vec<(f64, f64)>,
    sinks_gradient: Vec<(f64, f64)>,
}

/// With `weights` the gradient of the result, on such a device.
fn reference(case: &Case, weights: &[f64], device: &Device) -> Result<Reference> {
    let dims = case.scores.dims();
    let spread = |tensor: &Option<Tensor>| match tensor {
        Some(tensor) => values(&tensor.broadcast_as(dims)?).map(Some),
        None => Ok(None),
    };
    let (x, bias, mask) = (values(&case.scores)?, spread(&case.bias)?, spread(&case.mask)?);
    let sinks = case.sinks.as_ref().map(values).transpose()?;
    let (len, inner): (usize, usize) = (dims[case.dim], dims[case.dim + 1..].iter().product());
    let wide = case.scores.dtype() == DType::F64;
    let (epsilon, relative, shifted, tiny) =
        if wide { (2f64.powi(-52), 1e-13, 1e-15, 2e-323) } else { (2f64.powi(-23), 1e-6, 1e-7, 1.3e-43) };
    let count = x.len();
    let mut found = Reference {
        results: vec![(0.0, 0.0); count],
        scores_gradient: vec![(0.0, 0.0); count],
        logits_gradient: vec![(0.0, 0.0); count],
        sinks_gradient: vec![(0.0, 0.0); sinks.as_ref().map_or(0, Vec::len)],
    };
    for (line, start) in (0..count).filter(|i| i / inner % len == 0).enumerate() {
        let at = |j: usize| start + j * inner;
        let query = if dims.len() < 2 { 0 } else { start / dims[dims.len() - 1] % dims[dims.len() - 2] };
        let mut z = vec![0.0; len];
        let mut slope = vec![0.0; len];
        let mut size = vec![0.0; len];
        for j in 0..len {
            let i = at(j);
            let scaled = case.scale * x[i];
            let (logit, cosh) = match case.softcap {
                Some(cap) => (cap * (scaled / cap).tanh(), (scaled / cap).cosh()),
                None => (scaled, 1.0),
            };
            slope[j] = case.scale / (cosh * cosh);
            let added = bias.as_ref().map_or(0.0, |bias| bias[i]);
            z[j] = logit + added;
            size[j] = logit.abs() + added.abs();
            let key = j as i128;
            let position = query as i128 + dims[dims.len() - 1] as i128
                - dims.get(dims.len().wrapping_sub(2)).map_or(1, |&n| n as i128);
            let (before, after) = case.window.unwrap_or((usize::MAX, usize::MAX));
            let seen = (!case.causal || key <= position)
                && key >= position - before as i128
                && key <= position + after as i128;
            let masked = mask.as_ref().is_some_and(|mask| mask[i] == 0.0);
            if masked || (case.causal || case.window.is_some()) && !seen {
                z[j] = f64::NEG_INFINITY;
            }
        }
        let head = case.sinks.as_ref().map(|_| {
            let d = dims.len() - 3;
            start / dims[d + 1..].iter().product::<usize>() % dims[d]
        });
        let sink = head.zip(sinks.as_ref()).map(|(head, sinks)| sinks[head]);
        let max = z.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let empty = max == f64::NEG_INFINITY && !z.iter().chain(&sink).any(|z| z.is_nan());
        let exps: Vec<f64> = z.iter().map(|z| (z - max).exp()).collect();
        let sum = sum(exps.iter().copied().chain(sink.map(|sink| (sink - max).exp())));
        let log_sum = sum.ln();
        let takes_part = |j: &usize| z[*j] != f64::NEG_INFINITY;
        let largest = (0..len).filter(takes_part).map(|j| size[j]).chain(sink.map(f64::abs)).fold(0.0, f64::max);
        let factor = |j: usize| match case.dropout {
            Some((p, seed)) if !kept(p, seed, line, j) => 0.0,
            Some((p, _)) => 65536.0 / (65536.0 - (p * 65536.0).round()),
            None => 1.0,
        };
        let factors: Vec<f64> = (0..len).map(factor).collect();
        let share = |j: usize| if empty { 0.0 } else { exps[j] / sum };
        let g: Vec<f64> = (0..len).map(|j| if takes_part(&j) { weights[at(j)] * factors[j] } else { 0.0 }).collect();
        let (total, total_size) = (0..len).fold((0.0, 0.0), |(total, size): (f64, f64), j| {
            let term = if case.log { g[j] } else { g[j] * share(j) };
            (total + term, size + term.abs())
        });
        // Of half precision tangents on CUDA may be as far off as those near 1 are.
        let halves = [case.scores.dtype(), case.out].iter().all(|dtype| dtype.size_in_bytes() == 2);
        let curved = case.softcap.filter(|&cap| device.is_cuda() && halves && cap <= 128.0).unwrap_or(0.0);
        let off = relative + 4.0 * epsilon * 2.0 * largest.max(curved);
        for j in 0..len {
            let (i, p) = (at(j), share(j));
            let distance = if takes_part(&j) { (z[j] - max).abs() } else { 0.0 };
            let off = off + shifted * distance;
            let log = if empty { f64::NEG_INFINITY } else { z[j] - max - log_sum };
            found.results[i] = match (empty, case.rows) {
                (true, MaskedRows::Nan) if sink.is_none() => (f64::NAN, 0.0),
                _ if case.log && log == f64::NEG_INFINITY => (log, 0.0),
                _ if case.log => (log, off + 3e-7 * log.abs() * relative / 1e-6),
                // A dropped element is 0 whatever it was.
                _ if factors[j] == 0.0 => (0.0, 0.0),
                _ => (p * factors[j], p * factors[j] * off + tiny),
            };
            if takes_part(&j) {
                let gradient = if case.log { g[j] - p * total } else { p * (g[j] - total) };
                let size = if case.log { g[j].abs() + p * total_size } else { p * (g[j].abs() + total_size) };
                // Slopes are exact to a few units of what they are the slope of.
                let off = 4.0 * off + 1e-12 + 1e-5 * f64::from(u8::from(!wide));
                found.logits_gradient[i] = (gradient, size * off + 1e-30);
                found.scores_gradient[i] = (
                    gradient * slope[j],
                    size * slope[j].abs() * (off + 8.0 * epsilon * size_of_slope(case, x[i])) + 1e-30,
                );
            }
        }
        if let (Some(head), Some(sink)) = (head, sink) {
            let p = if max == f64::NEG_INFINITY { 0.0 } else { (sink - max).exp() / sum };
            let sums = &mut found.sinks_gradient[head];
            sums.0 -= p * total;
            sums.1 += p * total_size * (4.0 * off + 1e-5 * f64::from(u8::from(!wide)) + 1e-12) + 1e-30;
        }
    }
    Ok(found)
}

/// What the error of 1 − tanh² is relative to.
fn size_of_slope(case: &Case, x: f64) -> f64 {
    case.softcap.map_or(1.0, |cap| 2.0 + 2.0 * (case.scale * x / cap).abs())
}

/// Fails unless each of `found` is what is expected, off by no more than that and the rounding to `dtype`.
fn check_values(what: &str, case: &Case, dtype: DType, found: &[f64], expected: &[(f64, f64)]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, &(exact, slack))) in found.iter().zip(expected).enumerate() {
        let (low, high) = (rounded(exact - slack, dtype), rounded(exact + slack, dtype));
        let good = (low..=high).contains(found) || found.is_nan() && exact.is_nan();
        assert!(
            good,
            "{what}: {found:e} for {exact:e} ± {slack:e}, element {i} of {:?}, {case:?}",
            case.scores.shape()
        );
    }
}

/// Which of scores, bias and sinks have gradients, and whether the variables are such that bias and sinks are views of a part of them,
/// their dimensions the other way round.
#[derive(Clone, Copy, Debug)]
struct Tracked {
    each: [bool; 3],
    views: bool,
}

/// A tensor of which [`view`] makes the given one.
fn viewed(tensor: &Tensor) -> Result<Tensor> {
    let turned = tensor.permute((0..tensor.rank()).rev().collect::<Vec<_>>())?.contiguous()?;
    let apart = Tensor::stack(&[&turned, &turned], tensor.rank())?;
    Tensor::cat(&[&apart.narrow(0, 0, 1)?, &apart], 0)
}
fn view(of: &Tensor) -> Result<Tensor> {
    let rank = of.rank() - 1;
    let turned = of.narrow(0, 1, of.dim(0)? - 1)?.narrow(rank, 1, 1)?.squeeze(rank)?;
    turned.permute((0..rank).rev().collect::<Vec<_>>())
}

/// Result, result in place and gradients on every device.
fn check(case: &Case) -> Result<()> {
    check_tracked(case, Tracked { each: [true; 3], views: false })
}

fn check_tracked(case: &Case, of: Tracked) -> Result<()> {
    let count = case.scores.elem_count();
    if !within_cap(count) {
        return Ok(());
    }
    let weights = tensor(&normal(count, 1.0, 99), case.scores.shape(), case.out, &Device::Cpu)?;
    let weights_of = values(&weights)?;
    for device in devices() {
        let reference = reference(case, &weights_of, &device)?;
        let case = case.on(&device)?;
        let var = |tensor: &Option<Tensor>| {
            let var = |tensor| if of.views { Var::from_tensor(&viewed(tensor)?) } else { Var::from_tensor(tensor) };
            tensor.as_ref().map(var).transpose()
        };
        let seen = |tensor: &Tensor| if of.views { view(tensor) } else { Ok(tensor.clone()) };
        // A variable is contiguous; the views are of it.
        let variable = Var::from_tensor(&case.within()?.copy()?)?;
        let scores = case.part(&variable)?;
        let scores = if of.each[0] { scores } else { scores.detach() };
        let (bias, sinks) = (var(&case.bias)?, var(&case.sinks)?);
        let mut tracked = case.clone();
        let given = |var: &Option<Var>, has_gradient: bool| {
            let given = |var: &Var| seen(&if has_gradient { var.as_tensor().clone() } else { var.detach() });
            var.as_ref().map(given).transpose()
        };
        (tracked.bias, tracked.sinks) = (given(&bias, of.each[1])?, given(&sinks, of.each[2])?);

        let out = case.builder().forward(&case.scores)?;
        assert_eq!((out.dtype(), out.shape(), out.track_op()), (case.out, case.scores.shape(), false));
        assert!(out.is_contiguous());
        check_values("result", &case, case.out, &values(&out)?, &reference.results);

        if case.out == case.scores.dtype() {
            let over = case.within()?.copy()?;
            case.builder().forward_inplace(&case.part(&over)?)?;
            let over = values(&over)?;
            check_values("in place", &case, case.out, &over[case.before..], &reference.results);
            assert!(over[..case.before].iter().all(|&x| x == 1.0), "{case:?} has written before its scores");
        }

        let out = tracked.builder().forward(&scores)?;
        check_values("tracked result", &case, case.out, &values(&out)?, &reference.results);
        let grads = (out * weights.to_device(&device)?)?.sum_all()?.backward()?;
        let gradient = |var: &Var| -> Result<Vec<f64>> {
            let gradient = grads.get(var).expect("a gradient");
            assert_eq!((gradient.dtype(), gradient.shape()), (case.scores.dtype(), var.shape()));
            values(gradient)
        };
        // Of what has one, and of nothing else
        let gradient_of_seen = |var: &Option<Var>, has_gradient: bool| -> Result<Option<Vec<f64>>> {
            let Some(var) = var else { return Ok(None) };
            assert_eq!(grads.get(var).is_some(), has_gradient, "{of:?} {case:?}");
            grads.get(var).map(|gradient| values(&seen(gradient)?)).transpose()
        };
        let dtype = case.scores.dtype();
        // Of a line with +∞ a GPU gives the gradient 0, not NaN, where an exponential is 0.
        if !device.is_cpu() && values(&case.scores)?.contains(&f64::INFINITY) {
            continue;
        }
        if of.each[0] {
            let found = &gradient(&variable)?[case.before..];
            check_values("gradient of the scores", &case, dtype, found, &reference.scores_gradient);
        }
        if let Some(found) = gradient_of_seen(&sinks, of.each[2])? {
            check_values("gradient of the sinks", &case, dtype, &found, &reference.sinks_gradient);
        }
        if let (Some(found), Some(bias)) = (gradient_of_seen(&bias, of.each[1])?, &case.bias) {
            // Each element of the scores is one of the bias, by its number.
            let numbers: Vec<f64> = (0..bias.elem_count()).map(|i| i as f64).collect();
            let numbers = tensor(&numbers, bias.shape(), DType::F64, &Device::Cpu)?;
            let numbers = values(&numbers.broadcast_as(case.scores.shape())?)?;
            let mut sums = vec![(0.0, 0.0); bias.elem_count()];
            for (number, (gradient, slack)) in numbers.iter().zip(&reference.logits_gradient) {
                let sum = &mut sums[*number as usize];
                *sum = (
                    sum.0 + gradient,
                    sum.1 + slack + 1e-7 * gradient.abs() * f64::from(u8::from(dtype != DType::F64)),
                );
            }
            check_values("gradient of the bias", &case, dtype, &found, &sums);
        }
    }
    Ok(())
}

fn make(shape: &[usize], scale: f64, seed: u64, dtype: DType) -> Result<Tensor> {
    tensor(&normal(shape.iter().product(), scale, seed), shape, dtype, &Device::Cpu)
}

fn mask(shape: &[usize], seed: u64) -> Result<Tensor> {
    let keep = normal(shape.iter().product(), 1.0, seed)
        .into_iter()
        .enumerate()
        .map(|(i, x)| u8::from(x > -0.3) * [1, 2, 3, 128, 255][i % 5])
        .collect::<Vec<_>>();
    Tensor::from_vec(keep, shape, &Device::Cpu)
}

/// The gradient of a bias is the sum of the scores' over what it is broadcast over, however many dimensions that are.
#[test]
fn gradients_of_what_is_shared() -> Result<()> {
    let shapes = [
        [3, 2, 50, 64],
        [1, 1, 3000, 33],
        [2000, 1, 4, 7],
        [1, 5, 1, 20_000],
        [64, 3, 9, 128],
        [8, 16, 256, 512],
        [5, 2, 33, 1032],
        [19, 3, 40, 2048],
        [3, 2, 2, 8192],
        [2, 3, 5, 77],
        [2, 6, 11, 197],
        [2, 1, 3, 1001],
        [2, 1, 2, 4007],
        [600, 3, 49, 49],
        [150, 3, 77, 77],
        [20, 2, 60, 1001],
    ];
    for (device, shape) in devices().iter().flat_map(|device| shapes.map(|shape| (device, shape))) {
        let count = shape.iter().product();
        if !within_cap(count) || device.is_cpu() && count > 1 << 20 {
            continue;
        }
        // In half precision the scores' are rounded, too; candle adds bf16s to zeros so that subnormal ones become 0.
        for (dtype, unit, least) in [
            (DType::F32, 1e-6, 1e-40),
            (DType::F64, 1e-14, 1e-40),
            (DType::F16, 2f64.powi(-10), 2f64.powi(-24)),
            (DType::BF16, 2f64.powi(-7), 2e-38),
        ] {
            let random = |shape: &[usize]| random(shape, 0, 1.0, dtype, device);
            let scores = Var::from_tensor(&random(&shape)?)?;
            let weights = random(&shape)?;
            for shared in 1..16 {
                let dims: Vec<usize> = (0..4).filter(|d| shared >> d & 1 == 1).collect();
                let mut of = shape;
                dims.iter().for_each(|&d| of[d] = 1);
                let bias = Var::from_tensor(&random(&of)?)?;
                let grads = (Softmax::new().bias(&bias).forward(&scores)? * &weights)?.sum_all()?.backward()?;
                let of_scores = grads.get(&scores).expect("a gradient").to_dtype(DType::F64)?;
                // As many are rounded.
                let least = least * (count / bias.elem_count()) as f64;
                let bound = of_scores.abs()?.sum_keepdim(dims.as_slice())?.affine(unit, least)?;
                let (found, exact) = (grads.get(&bias).expect("a gradient"), of_scores.sum_keepdim(dims.as_slice())?);
                assert_near(found, &exact, &bound, &format!("{dtype:?} bias {of:?} of {shape:?}"))?;
            }
        }
    }
    Ok(())
}

/// Lengths about the vectors, blocks and lines that are held.
const LENGTHS: [usize; 19] =
    [1, 2, 7, 8, 9, 15, 16, 17, 100, 511, 513, 1025, 2048, 4097, 8191, 12_033, 20_000, 24_065, 33_001];

#[test]
fn each_option_at_each_length() -> Result<()> {
    for (i, &len) in LENGTHS.iter().enumerate() {
        for dtype in DTYPES {
            let seed = i as u64;
            let (heads, queries) = (2, if len > 1000 { 1 } else { 5 });
            let shape = [1, heads, queries, len];
            let plain = Case::new(make(&shape, 3.0, seed, dtype)?);
            check(&plain)?;
            check(&Case { scale: 0.125, ..plain.clone() })?;
            check(&Case { softcap: Some(2.0), scale: 0.5, ..plain.clone() })?;
            check(&Case { causal: true, ..plain.clone() })?;
            check(&Case { window: Some((len / 2, 3)), ..plain.clone() })?;
            check(&Case { dropout: Some((0.3, 77)), ..plain.clone() })?;
            check(&Case { log: true, ..plain.clone() })?;
            check(&Case { sinks: Some(make(&[heads], 2.0, seed, dtype)?), ..plain.clone() })?;
            for shape in
                [vec![1, heads, queries, len], vec![heads, 1, len], vec![heads, queries, 1], vec![len], vec![1]]
            {
                check(&Case { bias: Some(make(&shape, 2.0, seed + 1, dtype)?), ..plain.clone() })?;
                check(&Case { mask: Some(mask(&shape, seed + 2)?), ..plain.clone() })?;
            }
            for out in DTYPES {
                check(&Case { out, log: i % 2 == 0, ..plain.clone() })?;
            }
        }
    }
    Ok(())
}

/// What is −∞ in the bias takes no part, as where a model adds its mask: of each line some, and all of one.
#[test]
fn additive_masks() -> Result<()> {
    for (i, &len) in LENGTHS.iter().enumerate() {
        for dtype in DTYPES {
            let (heads, queries) = (2, if len > 1000 { 1 } else { 5 });
            let mut added = normal(heads * queries * len, 2.0, i as u64);
            added.iter_mut().step_by(3).for_each(|x| *x = f64::NEG_INFINITY);
            added[..len].fill(f64::NEG_INFINITY);
            let bias = Some(tensor(&added, (heads, queries, len), dtype, &Device::Cpu)?);
            let plain = Case { bias, ..Case::new(make(&[2, heads, queries, len], 3.0, 3, dtype)?) };
            check(&Case { rows: MaskedRows::Nan, ..plain.clone() })?;
            check(&Case { log: true, ..plain.clone() })?;
            check(&Case { dropout: Some((0.2, 5)), ..plain.clone() })?;
            check(&Case { softcap: Some(2.0), ..plain.clone() })?;
            check(&plain)?;
        }
    }
    Ok(())
}

/// Gradients of some of scores, bias and sinks, and where the last two are strided views.
#[test]
fn each_gradient_by_itself() -> Result<()> {
    for len in [7, 64, 300, 1024, 9001] {
        for dtype in [DType::F32, DType::BF16] {
            let queries = if len > 1000 { 1 } else { 4 };
            let plain = Case::new(make(&[2, 3, queries, len], 2.0, 1, dtype)?);
            let sinks = Some(make(&[3], 1.0, 2, dtype)?);
            let bias = Some(make(&[3, queries, len], 1.0, 3, dtype)?);
            let row = Some(make(&[1, 1, len], 1.0, 4, dtype)?);
            for bits in 1..8 {
                let each = [0, 1, 2].map(|i| bits >> i & 1 == 1);
                for views in [false, true] {
                    let of = Tracked { each, views };
                    check_tracked(&Case { bias: bias.clone(), sinks: sinks.clone(), ..plain.clone() }, of)?;
                    check_tracked(
                        &Case { bias: row.clone(), sinks: sinks.clone(), causal: true, ..plain.clone() },
                        of,
                    )?;
                    if !each[1] {
                        check_tracked(&Case { sinks: sinks.clone(), scale: 0.5, ..plain.clone() }, of)?;
                    }
                }
            }
            for dim in [1, 2] {
                let bias = Some(make(&[1, queries, 1], 1.0, 5, dtype)?);
                check_tracked(
                    &Case { bias, dim, ..plain.clone() },
                    Tracked { each: [false, true, false], views: true },
                )?;
            }
        }
    }
    Ok(())
}

/// A sink that is NaN or +∞ makes the lines of its head NaN, and a NaN in a line's window all of the line; −∞ with a softcap is its least.
#[test]
fn special_sinks_windows_and_caps() -> Result<()> {
    for device in devices() {
        for len in [5, 64, 300, 2048, 9001] {
            let numbers = normal(4 * len, 1.0, 5);
            let scores = tensor(&numbers, (1, 2, 2, len), DType::F32, &device)?;
            for special in [f64::NAN, f64::INFINITY] {
                let sinks = tensor(&[special, 0.0], 2, DType::F32, &device)?;
                for softmax in [Softmax::new().sinks(&sinks), Softmax::new().sinks(&sinks).window(len / 2, 0)] {
                    let found = values(&softmax.forward(&scores)?)?;
                    assert!(found[..2 * len].iter().all(|p| p.is_nan()), "{special} {len} {device:?}");
                    assert!(found[2 * len..].iter().all(|p| p.is_finite()), "{special} {len} {device:?}");
                }
            }
            let mut numbers = numbers;
            numbers[len - 2] = f64::NAN;
            let found = values(&Softmax::new().window(2, 0).forward(&tensor(
                &numbers,
                (1, 2, 2, len),
                DType::F32,
                &device,
            )?)?)?;
            // The first query's window ends before the last key.
            assert!(found[..len].iter().all(|p| p.is_nan()), "{len} {device:?}");
            assert!(found[len..].iter().all(|p| p.is_finite()), "{len} {device:?}");
            numbers[len - 2] = f64::NEG_INFINITY;
            let capped =
                Case { softcap: Some(2.0), ..Case::new(tensor(&numbers, (1, 2, 2, len), DType::F32, &Device::Cpu)?) };
            let expected = reference(&capped, &vec![0.0; 4 * len], &device)?.results;
            let found = values(&capped.on(&device)?.builder().forward(&to(&capped.scores, &device)?)?)?;
            check_values("least logit", &capped, DType::F32, &found, &expected);
        }
    }
    Ok(())
}

/// Lines of a few elements, or a few side by side, with a scale alone, some of them of nothing.
#[test]
fn short_lines_and_narrow_rows() -> Result<()> {
    for (i, len) in [1, 2, 3, 7, 13, 33, 1100].into_iter().enumerate() {
        for inner in [1, 2, 3, 7, 15, 16, 17, 70] {
            for dtype in DTYPES {
                let shape = [if len > 100 { 2 } else { 11 }, len, inner];
                let mut numbers = normal(shape.iter().product(), 3.0, i as u64);
                for (j, number) in numbers.iter_mut().enumerate() {
                    // Whole blocks, and one line of each other block
                    if j / (len * inner) % 4 == 1 || j % inner == 2 || j % 7 == 3 {
                        *number = f64::NEG_INFINITY;
                    }
                }
                let scores = tensor(&numbers, &shape, dtype, &Device::Cpu)?;
                for (log, rows) in [(false, MaskedRows::Zero), (true, MaskedRows::Zero), (false, MaskedRows::Nan)] {
                    let case = Case { dim: 1, scale: 0.7, log, rows, before: i % 3, ..Case::new(scores.clone()) };
                    check(&case)?;
                }
                let negative = make(&shape, 3.0, i as u64 + 7, dtype)?;
                check(&Case { dim: 1, scale: -1.5, before: 1, ..Case::new(negative) })?;
            }
        }
    }
    Ok(())
}

/// A few long lines side by side, some of whose elements take no part, and whose maxima grow; so long that threads share them, too.
#[test]
fn long_lines_in_narrow_rows() -> Result<()> {
    for (i, shape) in [[2, 9001, 2], [3, 6007, 3], [2, 2401, 7], [1, 90_001, 3]].into_iter().enumerate() {
        let [_, len, inner] = shape;
        let mut numbers = normal(shape.iter().product(), 3.0, i as u64 + 30);
        for (j, number) in numbers.iter_mut().enumerate() {
            *number += (j / inner % len) as f64 * 40.0 / len as f64;
            if j % 11 == 3 || (j / (len * inner) == 1 && j % inner == 1) {
                *number = f64::NEG_INFINITY;
            }
        }
        for dtype in DTYPES {
            let scores = tensor(&numbers, &shape, dtype, &Device::Cpu)?;
            for (log, rows) in [(false, MaskedRows::Zero), (true, MaskedRows::Zero), (false, MaskedRows::Nan)] {
                check(&Case { dim: 1, scale: 0.7, log, rows, before: i, ..Case::new(scores.clone()) })?;
            }
        }
    }
    Ok(())
}

/// Wider rows, whose lines a thread, a block or a cluster has, by packs, words and elements; some elements take no part, nor does all of a line, and
/// there may be a NaN.
#[test]
fn lines_in_wide_rows() -> Result<()> {
    let shapes = [
        [9, 5, 264],
        [9, 8, 263],
        [3, 16, 1000],
        [3, 17, 1000],
        [2, 300, 257],
        [2, 1000, 260],
        [3, 777, 101],
        [1, 4097, 36],
        [2, 5000, 37],
        [1, 5100, 40],
        [1, 14_000, 24],
    ];
    for (i, shape) in shapes.into_iter().enumerate() {
        let [_, len, inner] = shape;
        let mut numbers = normal(shape.iter().product(), 3.0, i as u64 + 40);
        for (j, number) in numbers.iter_mut().enumerate() {
            if j % 11 == 3 || j % inner == 4 {
                *number = f64::NEG_INFINITY;
            } else if i % 2 == 1 && j == len / 2 * inner + 7 {
                *number = f64::NAN;
            }
        }
        for dtype in DTYPES {
            let scores = tensor(&numbers, &shape, dtype, &Device::Cpu)?;
            for (log, rows, before) in
                [(false, MaskedRows::Zero, 0), (true, MaskedRows::Zero, 1), (false, MaskedRows::Nan, 2)]
            {
                check(&Case { dim: 1, scale: 0.7, log, rows, before, ..Case::new(scores.clone()) })?;
            }
        }
    }
    Ok(())
}

/// Gradients so great that their products with exponentials that are scaled up would be infinite.
#[test]
fn great_gradients() -> Result<()> {
    for device in devices() {
        for (shape, dim) in [((20_000, 4), 0), ((300, 9), 0), ((4, 20_000), 1), ((9, 300), 1), ((40, 64), 1)] {
            let (count, inner) = (shape.0 * shape.1, if dim == 0 { shape.1 } else { 1 });
            let len = if dim == 0 { shape.0 } else { shape.1 };
            let mut logits = normal(count, 1.0, 5);
            logits.iter_mut().enumerate().filter(|(i, _)| i / inner % len == len / 3).for_each(|(_, x)| *x += 30.0);
            for dtype in [DType::F32, DType::BF16] {
                let scores = tensor(&logits, shape, dtype, &device)?;
                let weights = tensor(&normal(count, 1e20, 6), shape, dtype, &device)?;
                let softmax = Softmax::new().scale(0.5).dim(dim);
                let found = values(&gradient(&scores, |scores| softmax.forward(scores)? * &weights)?)?;
                let (z, w) = (values(&scores)?, values(&weights)?);
                for line in 0..count / len {
                    let at = |j: usize| if dim == 0 { j * inner + line } else { line * len + j };
                    let p: Vec<f64> = support::reference(&(0..len).map(|j| 0.5 * z[at(j)]).collect::<Vec<_>>())
                        .map(|(p, ..)| p)
                        .collect();
                    let sum: f64 = p.iter().enumerate().map(|(j, p)| p * w[at(j)]).sum();
                    let size: f64 = p.iter().enumerate().map(|(j, p)| p * w[at(j)].abs()).sum();
                    for (j, p) in p.iter().enumerate() {
                        let exact = 0.5 * p * (w[at(j)] - sum);
                        let bound = half_unit(dtype) * exact.abs() + 5e-6 * p * (w[at(j)].abs() + size);
                        let found = found[at(j)];
                        assert!((found - exact).abs() <= bound, "{dtype:?} {shape:?} dim {dim}: {found} for {exact}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Scores that begin anywhere in memory, and gradients and results that do not begin where these do.
#[test]
fn scores_that_begin_at_any_element() -> Result<()> {
    for (i, len) in [2, 7, 64, 77, 257, 1000, 2049].into_iter().enumerate() {
        for dtype in DTYPES {
            for before in [1, 2, 3, 8, 13] {
                let seed = i as u64;
                let shape = [2, if len > 100 { 3 } else { 37 }, len];
                let plain = Case { scale: 0.5, before, ..Case::new(make(&shape, 3.0, seed, dtype)?) };
                check(&plain)?;
                check(&Case { mask: Some(mask(&shape[1..], seed + 1)?), dropout: Some((0.2, seed)), ..plain.clone() })?;
                check(&Case { bias: Some(make(&shape[1..], 2.0, seed + 2, dtype)?), log: true, ..plain })?;
            }
        }
    }
    Ok(())
}

/// Lines of about a block, whose windows are masks or, where narrow, runs of what is read, or of a block's tile.
#[test]
fn windows_in_lines_of_a_block() -> Result<()> {
    for (i, len) in [257, 400, 512, 1000, 2047].into_iter().enumerate() {
        for dtype in DTYPES {
            let seed = i as u64;
            let shape = [2, 2, 40, len];
            let plain = Case { scale: 0.7, ..Case::new(make(&shape, 3.0, seed, dtype)?) };
            let sinks = Some(make(&[2], 2.0, seed + 1, dtype)?);
            let bias = Some(make(&[2, 40, len], 2.0, seed + 2, dtype)?);
            let keep = Some(mask(&[2, 1, 1, len], seed + 3)?);
            for window in [None, Some((len / 2, 3)), Some((len / 4, 0)), Some((len / 8, 0)), Some((2, usize::MAX))] {
                let plain = Case { causal: window.is_none(), window, ..plain.clone() };
                check(&plain)?;
                check(&Case { sinks: sinks.clone(), dropout: Some((0.3, seed)), ..plain.clone() })?;
                check(&Case { bias: bias.clone(), ..plain.clone() })?;
                check(&Case { mask: keep.clone(), softcap: Some(4.0), ..plain })?;
            }
        }
    }
    Ok(())
}

/// Lines that are summed relative to the maximum of a few elements, which are far below others, or masked.
#[test]
fn short_lines_that_begin_low() -> Result<()> {
    for len in [257, 300, 512, 1000, 2048, 4000, 9000] {
        let lines = begin_low(len);
        for dtype in DTYPES {
            let scores = tensor(&lines.concat(), (1, 1, lines.len(), len), dtype, &Device::Cpu)?;
            let plain = Case::new(scores);
            let sinks = |sink: f64| tensor(&[sink], 1, dtype, &Device::Cpu).map(Some);
            let second_half = (0..len).map(|i| u8::from(i >= len / 2)).collect::<Vec<_>>();
            check(&plain)?;
            check(&Case { window: Some((len / 2, 0)), dropout: Some((0.2, 3)), ..plain.clone() })?;
            check(&Case { mask: Some(Tensor::new(second_half, &Device::Cpu)?), ..plain.clone() })?;
            for sink in [-60_000.0, 0.0, 12.0, 100.0] {
                check(&Case { sinks: sinks(sink)?, ..plain.clone() })?;
            }
        }
    }
    Ok(())
}

/// Logits so great that what a product with the scale is rounded by has an exponential far from 1.
#[test]
fn great_logits() -> Result<()> {
    for (i, len) in [7, 64, 200, 300, 1000, 4000, 9000].into_iter().enumerate() {
        let lines = if within_cap(40 * len) { 40 } else { 2 };
        for (size, scale) in [(1e8, 0.7), (1e9, 0.088), (1e12, 0.3), (1e30, 0.7)] {
            let numbers = normal(lines * len, size, i as u64);
            for dtype in [DType::F32, DType::BF16] {
                let scores = tensor(&numbers, (1, 2, lines / 2, len), dtype, &Device::Cpu)?;
                let greatest = scores.max_keepdim(3)?;
                // One of each line, but where rounding to bf16 has made several.
                let ones = scores.broadcast_eq(&greatest)?.to_dtype(DType::F64)?;
                let probabilities = ones.broadcast_div(&ones.sum_keepdim(3)?)?;
                let weights = make(scores.dims(), 1.0, i as u64 + 7, dtype)?;
                let weighted = (weights.to_dtype(DType::F64)? * &probabilities)?;
                let gradient = ((&weighted - probabilities.broadcast_mul(&weighted.sum_keepdim(3)?)?)? * scale)?;
                let is_off = |found: &Tensor, expected: &Tensor, margin: f64| {
                    let (found, expected) = (values(found)?, values(expected)?);
                    let off = |(f, e): (&f64, &f64)| (f - e).abs() > 1e-2 * e.abs() + margin || f.is_nan();
                    Ok::<_, candle_core::Error>(found.iter().zip(&expected).position(off))
                };
                for device in devices() {
                    let low = tensor(&[-3e38; 2], 2, dtype, &device)?;
                    let (var, weights) = (Var::from_tensor(&to(&scores, &device)?)?, to(&weights, &device)?);
                    for softmax in [Softmax::new(), Softmax::new().sinks(&low)] {
                        let case = format!("{device:?} {:?} times {scale}, normal times {size:e}", scores.shape());
                        let found = softmax.scale(scale).forward(&var)?;
                        assert_eq!(is_off(&found, &probabilities, 0.0)?, None, "{case}");
                        let gradients = (&found * &weights)?.sum_all()?.backward()?;
                        let found = gradients.get(&var).expect("a gradient");
                        assert_eq!(is_off(found, &gradient, 5e-3)?, None, "gradient: {case}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Logits that are neighbours among the numbers, but so far from each other that only the greatest counts.
#[test]
fn great_neighbours() -> Result<()> {
    for (len, greatest) in
        [8, 64, 77, 300, 2000, 4096, 9001, 20_000].into_iter().flat_map(|len| [(len, 1.4e9), (len, -1.4e9)])
    {
        let number = |i| match (i % len, i % 3) {
            (5, _) => greatest,
            (_, 0) => f64::NEG_INFINITY,
            _ => greatest - 128.0,
        };
        let numbers: Vec<f64> = (0..2 * len).map(number).collect();
        let ones = (0..2 * len).map(|i| f64::from(u8::from(i % len == 5)));
        for device in devices() {
            let f32s = tensor(&numbers, (2, len), DType::F32, &device)?;
            // The same of half precision, by a bias
            let halves = Tensor::full(half::bf16::from_f64(greatest), (2, len), &device)?;
            let bias = f32s.affine(1.0, -greatest)?.to_dtype(DType::BF16)?;
            for (softmax, scores) in [(Softmax::new(), f32s), (Softmax::new().bias(&bias), halves)] {
                let found = values(&softmax.forward(&scores)?)?;
                assert!(
                    found.into_iter().eq(ones.clone()),
                    "{greatest} in {len} of {:?} on {device:?}",
                    scores.dtype()
                );
            }
        }
    }
    Ok(())
}

/// Short lines of which many are in work together, relative to what is the maximum of one of them and its sink.
#[test]
fn lines_far_from_each_other() -> Result<()> {
    for len in [1, 7, 10, 16, 64, 100, 256] {
        for set in far_from_each_other(len) {
            for dtype in DTYPES {
                let lines = set.len() / len;
                let plain = Case::new(tensor(&set, (1, 4, lines / 4, len), dtype, &Device::Cpu)?);
                let sinks = tensor(&[0.0, 40.0, -40.0, 3e4], 4, dtype, &Device::Cpu)?;
                let second_half = (0..len).map(|i| u8::from(i >= len / 2)).collect::<Vec<_>>();
                check(&plain)?;
                check(&Case { sinks: Some(sinks.clone()), ..plain.clone() })?;
                check(&Case { window: Some((len / 2, 1)), ..plain.clone() })?;
                check(&Case { dropout: Some((0.2, 3)), ..plain.clone() })?;
                let masked = Case {
                    mask: Some(Tensor::new(second_half, &Device::Cpu)?),
                    rows: MaskedRows::Nan,
                    ..plain.clone()
                };
                check(&masked)?;
                // Logarithms, of which some are −∞
                check(&Case { log: true, sinks: Some(sinks), ..plain.clone() })?;
                check(&Case { log: true, ..masked.clone() })?;
                check(&Case { log: true, rows: MaskedRows::Zero, window: Some((len / 2, 1)), ..masked })?;
            }
        }
    }
    Ok(())
}

/// Windows narrower and wider than a vector, which begin and end anywhere in one. A key alone has all, wherever its logit is.
#[test]
fn windows_in_short_lines() -> Result<()> {
    let windows = [(0, 0), (1, 1), (2, 5), (7, 0), (8, 0), (3, 11), (15, 0), (0, 16), (40, 3)];
    for (seed, len) in [7, 16, 40, 64, 100, 200].into_iter().enumerate() {
        for dtype in DTYPES {
            for window in windows {
                let scores = make(&[1, 2, 37, len], 3.0, seed as u64, dtype)?;
                let case = Case { scale: 0.7, window: Some(window), ..Case::new(scores) };
                check(&case)?;
                check(&Case { log: true, ..case })?;
            }
        }
    }
    Ok(())
}

/// More dimensions along which a bias is broadcast and is not than kernels on CUDA tell apart: what the error says helps.
#[test]
fn many_dimensions() -> Result<()> {
    let mut shape = vec![2; 10];
    let of_bias: Vec<usize> = (0..10).map(|d| 2 - d % 2).chain([5]).collect();
    shape.push(5);
    let (scores, bias) = (make(&shape, 2.0, 1, DType::F32)?, make(&of_bias, 2.0, 2, DType::F32)?);
    let whole = bias.broadcast_as(shape.as_slice())?.contiguous()?;
    let composed = values(&candle_nn::ops::softmax_last_dim(&(&scores + &whole)?)?)?;
    for device in devices() {
        let (scores, bias) = (scores.to_device(&device)?, bias.to_device(&device)?);
        match Softmax::new().bias(&bias).forward(&scores) {
            Ok(result) => {
                let off = values(&result)?.iter().zip(&composed).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(off < 1e-6, "{off}");
            }
            Err(error) => {
                let error = error.to_string();
                assert!(
                    !device.is_cpu() && error.contains("10 dimensions") && error.contains("`broadcast_as`"),
                    "{error}"
                );
            }
        }
    }
    check(&Case { bias: Some(whole), ..Case::new(scores) })
}

/// The scores, NaN where the mask has 0.
fn nan_where_masked(scores: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let nan = Tensor::new(f32::NAN, &Device::Cpu)?.to_dtype(scores.dtype())?.broadcast_as(scores.shape())?;
    mask.broadcast_as(scores.shape())?.where_cond(scores, &nan)
}

/// Masks that have one byte for all of a line, among lines of nothing, and lines of the least number there is, in which each has as much.
#[test]
fn lines_masked_as_a_whole() -> Result<()> {
    for (i, len) in [1, 5, 7, 8, 16, 17, 40, 64, 100, 256, 257].into_iter().enumerate() {
        for dtype in DTYPES {
            let (seed, shape) = (i as u64, [2, 3, 41, len]);
            let mut numbers = normal(shape.iter().product(), 3.0, seed);
            for (line, numbers) in numbers.chunks_exact_mut(len).enumerate() {
                match line % 17 {
                    3 => numbers.fill(f64::NEG_INFINITY),
                    11 => numbers.fill(if dtype == DType::F16 { -65504.0 } else { -3.3e38 }),
                    _ => (),
                }
            }
            let scores = tensor(&numbers, &shape, dtype, &Device::Cpu)?;
            for shape in [vec![2, 1, 41, 1], vec![3, 1, 1], vec![41, 1], vec![1]] {
                let keep = mask(&shape, seed + 1)?;
                let masked = Case { mask: Some(keep.clone()), ..Case::new(nan_where_masked(&scores, &keep)?) };
                check(&masked)?;
                check(&Case { rows: MaskedRows::Nan, ..masked.clone() })?;
                check(&Case { log: true, scale: 0.5, ..masked.clone() })?;
                check(&Case { sinks: Some(make(&[3], 2.0, seed + 2, dtype)?), ..masked.clone() })?;
                check(&Case { bias: Some(make(&[3, 1, len], 1.0, seed + 3, dtype)?), ..masked.clone() })?;
                check(&Case { dropout: Some((0.3, seed)), ..masked.clone() })?;
                check(&Case { window: Some((len / 2, 2)), ..masked })?;
            }
        }
    }
    Ok(())
}

/// The same of lines side by side, whose rows are masked as a whole, and have one number of a bias.
#[test]
fn rows_masked_as_a_whole() -> Result<()> {
    for (i, (len, inner)) in [(5, 40), (17, 16), (40, 130), (300, 33), (70, 300)].into_iter().enumerate() {
        for dtype in DTYPES {
            let (seed, shape) = (i as u64, [3, len, inner]);
            let scores = make(&shape, 3.0, seed, dtype)?;
            for shape in [vec![3, len, 1], vec![len, 1], vec![3, 1, 1], vec![1]] {
                let keep = mask(&shape, seed + 1)?;
                let bias = Some(make(&shape, 1.0, seed + 2, dtype)?);
                let masked = Case { dim: 1, mask: Some(keep.clone()), ..Case::new(nan_where_masked(&scores, &keep)?) };
                check(&masked)?;
                check(&Case { bias: bias.clone(), ..masked.clone() })?;
                check(&Case { rows: MaskedRows::Nan, ..masked.clone() })?;
                check(&Case { dropout: Some((0.3, seed)), ..masked.clone() })?;
                check(&Case { softcap: Some(3.0), scale: 0.5, log: true, ..masked })?;
                check(&Case { dim: 1, bias, ..Case::new(scores.clone()) })?;
            }
        }
    }
    Ok(())
}

/// Half precision of such lengths as is held as it lies in memory, in windows that begin and end anywhere.
#[test]
fn long_lines_of_half_precision() -> Result<()> {
    for (i, len) in [1032, 1536, 2040, 2048, 2056, 4104, 16_384].into_iter().enumerate() {
        for dtype in [DType::F16, DType::BF16] {
            let seed = i as u64;
            let shape = [2, 3, if len < 2500 { 17 } else { 2 }, len];
            let plain = Case { scale: 0.7, ..Case::new(make(&shape, 3.0, seed, dtype)?) };
            let sinks = Some(make(&[shape[1]], 2.0, seed + 1, dtype)?);
            let (dropout, rows) = (Some((0.3, seed)), MaskedRows::Nan);
            check(&plain)?;
            check(&Case { log: true, sinks: sinks.clone(), ..plain.clone() })?;
            check(&Case { dropout, out: DType::F32, ..plain.clone() })?;
            check(&Case { causal: true, ..plain.clone() })?;
            for before in [0, 5, 300, len / 2] {
                check(&Case { window: Some((before, i)), ..plain.clone() })?;
                check(&Case { window: Some((before, 0)), sinks: sinks.clone(), dropout, ..plain.clone() })?;
                check(&Case { window: Some((before, 7)), log: true, out: DType::F32, ..plain.clone() })?;
            }
            // Logits far from 0, and a line without any
            let mut far = normal(len, 3000.0, seed);
            far.extend(vec![f64::NEG_INFINITY; len]);
            let far = tensor(&far, (2, len), dtype, &Device::Cpu)?;
            check(&Case { rows, ..Case::new(far.clone()) })?;
            check(&Case { window: Some((len / 3, 1)), ..Case::new(far) })?;
        }
    }
    // More queries than keys: the first ones have none in their window.
    let shape = [1, 1, 1060, 1032];
    for (rows, log) in [(MaskedRows::Zero, false), (MaskedRows::Nan, true)] {
        check(&Case { window: Some((9, 0)), rows, log, ..Case::new(make(&shape, 3.0, 1, DType::BF16)?) })?;
    }
    Ok(())
}

/// Lines that read the same of a bias or a mask, which lie apart.
#[test]
fn lines_that_share_a_bias() -> Result<()> {
    for (i, len) in [1032, 2050, 4096, 9000].into_iter().enumerate() {
        for dtype in DTYPES {
            let seed = i as u64;
            let shape = [2, 3, if len < 2100 { 7 } else { 2 }, len];
            let plain = Case { scale: 0.5, ..Case::new(make(&shape, 3.0, seed, dtype)?) };
            for shared in [vec![shape[2], len], vec![2, 1, shape[2], len], vec![3, shape[2], len]] {
                let (bias, mask) = (make(&shared, 2.0, seed + 1, dtype)?, mask(&shared, seed + 2)?);
                let sinks = Some(make(&[3], 2.0, seed + 3, dtype)?);
                check(&Case { bias: Some(bias.clone()), ..plain.clone() })?;
                check(&Case { mask: Some(mask.clone()), sinks, ..plain.clone() })?;
                check(&Case { mask: Some(mask), bias: Some(make(&shape, 2.0, seed + 4, dtype)?), ..plain.clone() })?;
                check(&Case { bias: Some(bias), causal: true, dropout: Some((0.2, seed)), ..plain.clone() })?;
            }
        }
    }
    Ok(())
}

/// All lines of some matrices have one mask, as of padding, on a GPU's tiles of several lines, some of which pass to the next matrix. What is
/// added lies in pairs where a line's elements do, and does not in the matrices behind an odd number of lines.
#[test]
fn matrices_masked_alike() -> Result<()> {
    for (i, (queries, len)) in [(31, 49), (27, 77), (19, 197), (9, 257), (9, 333), (37, 96)].into_iter().enumerate() {
        for dtype in DTYPES {
            let seed = i as u64;
            let plain = Case { scale: 0.5, before: i % 2, ..Case::new(make(&[3, 5, queries, len], 3.0, seed, dtype)?) };
            let ends: Vec<u8> = (0..3 * len).map(|j| u8::from(j % len < [len - 1, 0, len / 3][j / len])).collect();
            let padding = Tensor::from_vec(ends, (3, 1, 1, len), &Device::Cpu)?;
            for mask in [padding, mask(&[3, 1, 1, len], seed + 1)?, mask(&[len], seed + 1)?] {
                let masked = Case { mask: Some(mask), ..plain.clone() };
                check(&masked)?;
                check(&Case { dropout: Some((0.2, seed)), causal: true, ..masked.clone() })?;
                let biased = Case { bias: Some(make(&[5, queries, len], 2.0, seed + 2, dtype)?), ..masked };
                check(&biased)?;
                check(&Case { softcap: Some(4.0), log: true, rows: MaskedRows::Nan, ..biased })?;
            }
            let one_each = Case { mask: Some(mask(&[3, 1, queries, len], seed + 3)?), ..plain };
            check(&one_each)?;
            check(&Case { bias: Some(make(&[1, queries, len], 2.0, seed + 4, dtype)?), ..one_each })?;
        }
    }
    // So many that a thread has more than a few elements.
    let many = Case::new(make(&[3, 5, 1200, 49], 3.0, 9, DType::BF16)?);
    let masked = Case { mask: Some(mask(&[3, 1, 1, 49], 10)?), ..many };
    check(&masked)?;
    check(&Case { bias: Some(make(&[5, 1, 49], 2.0, 11, DType::BF16)?), ..masked })
}

/// Heads of short lines that share a bias, in batches that end with a head or pass to the next, which may have another.
#[test]
fn short_lines_that_share_a_bias() -> Result<()> {
    for (i, (queries, len)) in [(16, 16), (20, 48), (37, 64), (64, 64), (80, 16), (5, 128)].into_iter().enumerate() {
        for dtype in DTYPES {
            let seed = i as u64;
            let plain = Case { scale: 0.5, ..Case::new(make(&[3, 3, queries, len], 3.0, seed, dtype)?) };
            let apart = make(&[3, 1, queries, len + 3], 2.0, seed + 1, dtype)?.narrow(3, 2, len)?;
            for bias in [apart.contiguous()?, apart, make(&[queries, len], 2.0, seed + 1, dtype)?] {
                let biased = Case { bias: Some(bias), ..plain.clone() };
                check(&biased)?;
                check(&Case { dropout: Some((0.2, seed)), ..biased.clone() })?;
                check(&Case { sinks: Some(make(&[3], 2.0, seed + 2, dtype)?), ..biased.clone() })?;
                check(&Case { mask: Some(mask(&[3, 1, queries, len], seed + 3)?), ..biased.clone() })?;
                check(&Case { softcap: Some(4.0), causal: true, ..biased })?;
            }
        }
    }
    Ok(())
}

/// As many lines of half precision as a GPU of 132 multiprocessors has threads for, of 1 to 32 for each: more of a line is one thread's then.
#[test]
fn lines_that_fill_a_gpu() -> Result<()> {
    if gpu_for(0).is_none() {
        return Ok(());
    }
    let of_halves = [(1400, 49), (440, 77), (340, 100), (86, 197), (26, 333), (8, 801), (2, 1401)];
    let of_halves = of_halves.into_iter().zip([DType::F16, DType::BF16].into_iter().cycle());
    let of_f32 = [(40, 230), (10, 450), (4, 801), (4, 1023)].map(|shape| (shape, DType::F32));
    for (i, ((matrices, len), dtype)) in of_halves.chain(of_f32).enumerate() {
        let seed = i as u64;
        let plain = Case { scale: 0.5, ..Case::new(make(&[matrices / 2, 2, len, len], 3.0, seed, dtype)?) };
        let bias = Some(make(&[2, len, len], 2.0, seed + 1, dtype)?);
        let padding = Some(mask(&[matrices / 2, 1, 1, len], seed + 2)?);
        let sinks = Some(make(&[2], 2.0, seed + 3, dtype)?);
        check(&Case { bias: bias.clone(), mask: padding.clone(), ..plain.clone() })?;
        let (window, dropout) = (Some((len / 2, 3)), Some((0.2, 9)));
        check(&Case { bias, mask: padding, softcap: Some(4.0), window, sinks, dropout, ..plain })?;
    }
    // More than there are clusters at once, which fetch ahead: of matrices that share a bias or a mask
    for (i, (dtype, len)) in [(DType::F32, 9001), (DType::BF16, 9000)].into_iter().enumerate() {
        let (seed, queries) = (i as u64, 56);
        let plain = Case { scale: 0.5, ..Case::new(make(&[2, 3, queries, len], 3.0, seed, dtype)?) };
        let of_heads = Some(make(&[3, queries, len], 2.0, seed + 1, dtype)?);
        check(&Case { mask: Some(mask(&[2, 1, queries, len], seed + 2)?), dropout: Some((0.2, 9)), ..plain.clone() })?;
        check(&Case { bias: of_heads, window: Some((len / 3, 2)), ..plain })?;
    }
    // Side by side, in pairs
    for dtype in [DType::F16, DType::BF16] {
        let scores = make(&[8, 150, 16_384], 3.0, 20, dtype)?;
        let sinks = Some(make(&[8], 2.0, 21, dtype)?);
        check(&Case { dim: 1, scale: 0.5, sinks, ..Case::new(scores) })?;
    }
    Ok(())
}

/// So many lines that batches of them are in work together, of which some pass from one head to the next; and heads of several batches.
#[test]
fn many_short_lines() -> Result<()> {
    let of_few = [1, 7, 16, 33, 64, 65, 100, 257].map(|len| (17, len));
    for (i, (queries, len)) in of_few.into_iter().chain([(150, 40), (150, 64)]).enumerate() {
        for dtype in DTYPES {
            let seed = i as u64;
            let shape = [2, 3, queries, len];
            let plain = Case { scale: 0.5, ..Case::new(make(&shape, 3.0, seed, dtype)?) };
            let bias = make(&[3, queries, len], 2.0, seed + 1, dtype)?;
            let mask = mask(&[2, 1, queries, len], seed + 2)?;
            let (rows, window) = (MaskedRows::Nan, Some((len / 3, 2)));
            check(&plain)?;
            check(&Case { bias: Some(bias.clone()), ..plain.clone() })?;
            check(&Case { bias: Some(make(&[queries, 1], 2.0, seed + 3, dtype)?), ..plain.clone() })?;
            check(&Case { mask: Some(mask.clone()), ..plain.clone() })?;
            let for_all = Some(self::mask(&[queries, len], seed + 5)?);
            check(&Case { mask: for_all.clone(), ..plain.clone() })?;
            check(&Case { mask: for_all.clone(), bias: Some(bias.clone()), softcap: Some(3.0), ..plain.clone() })?;
            check(&Case { mask: for_all, window, ..plain.clone() })?;
            check(&Case { softcap: Some(3.0), ..plain.clone() })?;
            check(&Case { causal: true, rows, ..plain.clone() })?;
            check(&Case { window, dropout: Some((0.2, 9)), ..plain.clone() })?;
            let sinks = Some(make(&[3], 2.0, seed + 4, dtype)?);
            check(&Case { sinks: sinks.clone(), ..plain.clone() })?;
            check(&Case { bias: Some(bias), mask: Some(mask), softcap: Some(4.0), window, sinks, ..plain })?;
        }
    }
    Ok(())
}

/// Results that leave the caches, which one thread of the CPU writes past them.
#[test]
fn many_megabytes() -> Result<()> {
    check_many_megabytes()?;
    pool(1).install(check_many_megabytes)
}

fn check_many_megabytes() -> Result<()> {
    for shape in [[2, 2, 16_400, 64], [2, 2, 2100, 512]] {
        let plain = Case { scale: 0.5, ..Case::new(make(&shape, 3.0, 7, DType::F32)?) };
        let bias = Some(make(&shape[1..], 2.0, 8, DType::F32)?);
        check(&Case { bias, sinks: Some(make(&[2], 2.0, 9, DType::F32)?), ..plain.clone() })?;
        check(&Case { window: Some((40, 4)), dropout: Some((0.2, 3)), ..plain })?;
    }
    Ok(())
}

#[test]
fn lines_along_other_dimensions() -> Result<()> {
    let shapes = [
        [2, 3, 4, 5],
        [1, 2, 40, 600],
        [3, 17, 2, 9],
        [2, 19, 3, 32],
        [1, 1, 1030, 3],
        [2, 9, 1, 1],
        [7, 8, 1, 1],
        [1, 2, 260, 50],
        [130, 1, 70, 2],
    ];
    for (i, shape) in shapes.into_iter().enumerate() {
        for dtype in DTYPES {
            for dim in 0..4 {
                let seed = (i * 4 + dim) as u64;
                let plain = Case { dim, ..Case::new(make(&shape, 3.0, seed, dtype)?) };
                let full = Case {
                    scale: 0.3,
                    softcap: Some(3.0),
                    bias: Some(make(&[shape[1], 1, shape[3]], 1.0, seed, dtype)?),
                    mask: Some(mask(&[shape[0], 1, shape[2], shape[3]], seed)?),
                    sinks: (dim != 1).then(|| make(&[shape[1]], 1.0, seed, dtype)).transpose()?,
                    dropout: Some((0.4, seed)),
                    ..plain.clone()
                };
                check(&plain)?;
                check(&full)?;
                check(&Case { scale: 0.3, sinks: full.sinks.clone(), ..plain.clone() })?;
                check(&Case { softcap: full.softcap, dropout: full.dropout, ..plain.clone() })?;
                check(&Case { bias: full.bias.clone(), ..plain.clone() })?;
                check(&Case { bias: Some(make(&[shape[2], 1], 1.0, seed, dtype)?), ..plain.clone() })?;
                check(&Case { mask: full.mask.clone(), ..plain.clone() })?;
                check(&Case { log: true, dropout: None, mask: Some(mask(&[shape[2], 1], seed)?), ..full })?;
            }
        }
    }
    Ok(())
}

/// Strips that keep their exponentials: what those are relative to moves from group to group of rows, and with a sink once more.
#[test]
fn strips_whose_maxima_grow() -> Result<()> {
    for dtype in DTYPES {
        for shape in [[2, 1, 100, 270], [1, 2, 9, 40], [1, 3, 500, 30]] {
            let plain = Case { dim: 2, ..Case::new(make(&shape, 60.0, 7, dtype)?) };
            let sinks = Some(make(&[shape[1]], 100.0, 8, dtype)?);
            let bias = Some(make(&[shape[2], shape[3]], 60.0, 9, dtype)?);
            check(&plain)?;
            let full = Some(make(&shape, 60.0, 12, dtype)?);
            check(&Case { bias: full, dropout: Some((0.3, 13)), ..plain.clone() })?;
            check(&Case { bias: bias.clone(), ..plain.clone() })?;
            check(&Case { sinks: sinks.clone(), dropout: Some((0.3, 10)), ..plain.clone() })?;
            check(&Case { scale: 0.5, bias, mask: Some(mask(&shape, 11)?), sinks, ..plain })?;
        }
    }
    Ok(())
}

/// Strips of lines of which one element has nearly all, far above those that come first.
#[test]
fn strips_with_one_great_element() -> Result<()> {
    for shape in [[500, 1, 17, 8], [20, 1, 121, 8], [1, 1, 40, 500]] {
        let plain = Case { dim: 2, ..Case::new(make(&shape, 10.0, 14, DType::F32)?) };
        let bias = Some(make(&[shape[2], shape[3]], 3.0, 15, DType::F32)?);
        check(&plain)?;
        check(&Case { bias, dropout: Some((0.3, 16)), ..plain.clone() })?;
        check(&Case { mask: Some(mask(&shape, 17)?), scale: 0.7, ..plain })?;
    }
    Ok(())
}

/// Lines that are held whole, of which several are in work at once, and some that are too long for it.
#[test]
fn lines_of_a_vocabulary() -> Result<()> {
    for (lines, len) in [(3, 8200), (2, 16_384), (3, 50_257), (2, 128_256), (5, 262_144), (2, 262_150)] {
        for dtype in [DType::F32, DType::BF16] {
            let plain = Case { scale: 0.7, ..Case::new(make(&[lines, len], 3.0, 18, dtype)?) };
            check(&plain)?;
            check(&Case { softcap: Some(20.0), ..plain.clone() })?;
            check(&Case { mask: Some(mask(&[len], 19)?), dropout: Some((0.2, 20)), ..plain })?;
        }
    }
    Ok(())
}

/// Lines that a cluster's blocks have a part of each in tiles, about as long as so many blocks have room for, whose tensors begin anywhere.
#[test]
fn lines_in_the_tiles_of_a_cluster() -> Result<()> {
    for (dtype, lengths) in [
        (DType::F32, [12_801, 20_488, 163_831, 204_793]),
        (DType::BF16, [20_481, 65_544, 204_793, 327_673]),
        (DType::F16, [20_487, 81_927, 184_311, 524_281]),
        (DType::F64, [4104, 16_391, 50_257, 65_529]),
    ] {
        for (i, len) in lengths.into_iter().enumerate() {
            let (seed, heads) = (i as u64, if len > 100_000 { 1 } else { 2 });
            let plain = Case { scale: 0.5, before: i % 4, ..Case::new(make(&[1, heads, 1, len], 3.0, seed, dtype)?) };
            let (keep, sinks) = (Some(mask(&[len], seed + 1)?), Some(make(&[heads], 2.0, seed + 2, dtype)?));
            let of_keys = Some(make(&[len], 1.0, seed + 3, dtype)?);
            let of_heads = Some(make(&[heads, 1, len], 1.0, seed + 4, dtype)?);
            let dropout = Some((0.3, seed));
            let (other, rows) = (if dtype == DType::F32 { DType::BF16 } else { DType::F32 }, MaskedRows::Nan);
            check(&plain)?;
            check(&Case { mask: keep.clone(), sinks: sinks.clone(), dropout, ..plain.clone() })?;
            check(&Case { window: Some((len / 3, 0)), ..plain.clone() })?;
            check(&Case { window: Some((5, 0)), bias: of_keys.clone(), sinks, ..plain.clone() })?;
            check(&Case { bias: of_heads.clone(), mask: keep.clone(), dropout, rows, ..plain.clone() })?;
            check(&Case { softcap: Some(4.0), bias: of_keys, mask: keep, ..plain.clone() })?;
            check(&Case { log: true, bias: of_heads, ..plain.clone() })?;
            check(&Case { out: other, softcap: Some(4.0), ..plain.clone() })?;
            check(&Case { out: other, dropout, ..plain.clone() })?;
            // Logits far from 0, and a line without any
            let mut far = normal(len, 3000.0, seed);
            far.extend(vec![f64::NEG_INFINITY; len]);
            check(&Case { scale: 1.5, ..Case::new(tensor(&far, (2, len), dtype, &Device::Cpu)?) })?;
        }
        // More lines than there are clusters at once
        let many = make(&[70, 25_001], 3.0, 9, dtype)?;
        check(&Case { mask: Some(mask(&[70, 25_001], 10)?), ..Case::new(many) })?;
    }
    Ok(())
}

/// Scores far below the cap, near it and far above it, caps small and great, and scales that are hardly numbers.
#[test]
fn softcaps() -> Result<()> {
    for dtype in DTYPES {
        for (shape, dim) in
            [(vec![6, 77], 1), (vec![3, 1001], 1), (vec![5, 64], 1), (vec![3, 2048], 1), (vec![2, 40, 7], 1)]
        {
            let plain = Case { dim, ..Case::new(make(&shape, 1.0, 20, dtype)?) };
            for cap in [0.01, 30.0, 128.0, 1000.0] {
                for steepness in [0.001, 0.5, 6.0] {
                    check(&Case { softcap: Some(cap), scale: cap * steepness, ..plain.clone() })?;
                }
            }
            for (cap, scale) in [(0.01, 1e-33), (100.0, 1e33), (1e-3, -1e33)] {
                check(&Case { softcap: Some(cap), scale, ..plain.clone() })?;
            }
        }
    }
    Ok(())
}

/// Scales and caps beside the greatest number there is: what divides is divided by first.
#[test]
fn softcaps_near_the_greatest_number() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let great = if dtype == DType::F64 { 1.5e308 } else { 3e38 };
        for device in devices() {
            for (lines, len, across) in [
                (3, 5, false),
                (3, 64, false),
                (2, 77, false),
                (2, 300, false),
                (2, 1001, false),
                (2, 2048, false),
                (1, 9000, false),
                (40, 50, true),
                (3, 700, true),
            ] {
                let turned = |numbers: &[f64]| {
                    let lines = tensor(numbers, (lines, len), dtype, &device)?;
                    if across {
                        lines.t()?.contiguous()
                    } else {
                        Ok(lines)
                    }
                };
                let what = format!("{lines} lines of {len} of {dtype:?} on {device:?}, across {across}");
                let softmax = Softmax::new().dim(usize::from(!across)).scale(great).softcap(great);
                // The greatest tangent has all, though they differ by little.
                let numbers: Vec<f64> = (0..lines * len)
                    .map(|i| [1.5, 0.25, 1.0][i % 3] + if i % len == len / 2 { 0.5 } else { 0.0 })
                    .collect();
                let found = values(&softmax.forward(&turned(&numbers)?)?)?;
                let exact: Vec<f64> = (0..lines * len)
                    .map(|i| {
                        let line = &numbers[i / len * len..][..len];
                        let max = line.iter().copied().fold(0.0, f64::max);
                        let many = line.iter().filter(|&&x| x == max).count() as f64;
                        if numbers[i] == max {
                            1.0 / many
                        } else {
                            0.0
                        }
                    })
                    .collect();
                let exact = values(&turned(&exact)?)?;
                assert!(found.iter().zip(&exact).all(|(f, e)| (f - e).abs() <= 1e-2 * e), "{what}: {found:?}");
                // Equal ones have equal parts, and a slope as great as the scale.
                let scores = Var::from_tensor(&turned(&vec![2.0; lines * len])?)?;
                let weights: Vec<f64> = (0..lines * len).map(|i| (i % len % 4) as f64 * 0.25).collect();
                let grads = (softmax.forward(&scores)? * turned(&weights)?)?.sum_all()?.backward()?;
                let found = values(grads.get(&scores).expect("a gradient"))?;
                let mean = (0..len).map(|j| (j % 4) as f64 * 0.25).sum::<f64>() / len as f64;
                let slope = great / 2f64.cosh().powi(2) / len as f64;
                let off = if dtype == DType::BF16 { 2e-2 } else { 1e-5 };
                for (found, w) in found.iter().zip(values(&turned(&weights)?)?) {
                    let exact = (w - mean) * slope;
                    assert!((found - exact).abs() <= off * slope * (w + mean), "{what}: {found:e} for {exact:e}");
                }
            }
        }
    }
    Ok(())
}

/// In place of the scale before it, as a scale behind it in place of that.
#[test]
fn a_temperature_divides() -> Result<()> {
    let (t, scale) = (2.5, 0.3);
    for device in devices() {
        for dtype in DTYPES {
            let scores = make(&[3, 40], 3.0, 1, dtype)?;
            let on_device = scores.to_device(&device)?;
            for (softmax, scale) in [
                (Softmax::new().temperature(t), 1.0 / t),
                (Softmax::new().scale(scale).temperature(t), 1.0 / t),
                (Softmax::new().temperature(t).scale(scale), scale),
            ] {
                let case = Case { scale, ..Case::new(scores.clone()) };
                let reference = reference(&case, &[0.0; 120], &device)?;
                check_values("result", &case, dtype, &values(&softmax.forward(&on_device)?)?, &reference.results);
            }
        }
    }
    Ok(())
}

/// One NaN or +∞ among those that take part makes its line NaN, and no other.
#[test]
fn lines_with_a_nan_or_infinity() -> Result<()> {
    for len in [3, 77, 300, 1032, 3000, 9000, 100_003] {
        let dtypes = if len < 100_000 { &DTYPES[..] } else { &[DType::F32, DType::BF16] };
        for &dtype in dtypes {
            let mut numbers = normal(4 * len, 3.0, len as u64);
            for (line, x) in [(0, f64::NAN), (2, f64::INFINITY), (3, f64::NEG_INFINITY)] {
                numbers[line * len + len / 3 * 2] = x;
            }
            let side_by_side = tensor(&numbers, (1, 4, len), dtype, &Device::Cpu)?.transpose(1, 2)?.contiguous()?;
            let plain = Case::new(tensor(&numbers, (1, 4, len), dtype, &Device::Cpu)?);
            for plain in [plain, Case { dim: 1, ..Case::new(side_by_side) }] {
                check(&plain)?;
                check(&Case { scale: 0.5, log: true, ..plain.clone() })?;
                check(&Case { scale: 0.5, dropout: Some((0.2, 1)), ..plain.clone() })?;
                let kept: Vec<usize> =
                    plain.scores.dims().iter().enumerate().map(|(d, &n)| if d == plain.dim { n } else { 1 }).collect();
                check(&Case { bias: Some(make(&kept, 1.0, 2, dtype)?), mask: Some(mask(&kept, 3)?), ..plain })?;
            }
        }
    }
    Ok(())
}

/// Split over threads (and on the way there, through both passes again), in rows and in strips.
#[test]
fn long_lines() -> Result<()> {
    for (shape, dim) in
        [(vec![1, 1, 300_001], 2), (vec![2, 140_000], 1), (vec![1, 90_001, 3], 1), (vec![1, 5001, 60], 1)]
    {
        let plain = Case { dim, ..Case::new(make(&shape, 3.0, 1, DType::F32)?) };
        let bias = Some(
            make(&shape[dim..dim + 1], 1.0, 2, DType::F32)?
                .reshape([&[shape[dim]], &vec![1; shape.len() - dim - 1][..]].concat())?,
        );
        let dropout = Some((0.1, 5));
        check(&Case { bias, dropout, scale: 0.5, mask: Some(mask(&shape, 3)?), ..plain.clone() })?;
        check(&Case { log: true, softcap: Some(5.0), ..plain.clone() })?;
        if dim + 1 == shape.len() {
            check(&Case { window: Some((100_000, 0)), ..plain })?;
        }
    }
    // Several strips, and a number of the bias for each element
    let [scores, bias] = [3.0, 1.0].map(|scale| make(&[1, 2100, 600], scale, 4, DType::F32));
    check(&Case { dim: 1, scale: 0.5, bias: Some(bias?), ..Case::new(scores?) })?;
    Ok(())
}

/// Lines so few and long that all of a GPU shares each of them, contiguous and side by side.
#[test]
fn few_lines_that_a_gpu_shares() -> Result<()> {
    for (shape, dim) in [([1, 2, 410_001], 2), ([1, 140_003, 3], 1), ([1, 420_001, 2], 1)] {
        for (dtype, out) in [(DType::F32, DType::F16), (DType::BF16, DType::F32)] {
            let plain = Case { dim, scale: 0.5, before: 1, ..Case::new(make(&shape, 3.0, 23, dtype)?) };
            let along = if dim == 1 { vec![shape[dim], 1] } else { vec![shape[dim]] };
            let bias = Some(make(&along, 1.0, 24, dtype)?);
            check(&Case { bias, mask: Some(mask(&shape, 25)?), dropout: Some((0.1, 26)), ..plain.clone() })?;
            check(&Case { log: true, softcap: Some(5.0), out, ..plain.clone() })?;
            check(&Case { dropout: Some((0.3, 27)), out, ..plain.clone() })?;
            check(&plain)?;
            if dim == 2 {
                let sinks = Some(make(&[1], 2.0, 28, dtype)?);
                check(&Case { window: Some((200_003, 0)), sinks, ..plain })?;
            }
        }
    }
    Ok(())
}

#[derive(Clone, Debug)]
struct Drawn {
    shape: Vec<usize>,
    dim: usize,
    dtype: DType,
    out: DType,
    seed: u64,
    options: u32,
    broadcasts: [u8; 2],
    view: u8,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let length = prop_oneof![6 => 1usize..40, 2 => 120usize..140, 2 => 500usize..530, 1 => 2040usize..2060, 1 => 8190usize..8200];
    let dtypes = || prop::sample::select(DTYPES.to_vec());
    let sizes = prop::collection::vec(1usize..6, 4);
    let which = (any::<u64>(), any::<u32>(), any::<[u8; 2]>(), 0u8..4);
    (1usize..=4, length, any::<prop::sample::Index>(), sizes, dtypes(), dtypes(), which).prop_map(
        |(rank, len, dim, mut shape, dtype, out, (seed, options, broadcasts, view))| {
            shape.truncate(rank);
            let dim = dim.index(rank);
            shape[dim] = len;
            Drawn {
                shape,
                dim,
                dtype,
                out: if options & 512 == 0 { dtype } else { out },
                seed,
                options,
                broadcasts,
                view,
            }
        },
    )
}

/// A tensor of a shape that broadcasts to `shape`: bits say which dimensions are 1, and how many there are.
fn broadcastable(shape: &[usize], bits: u8, make: impl Fn(&[usize]) -> Result<Tensor>) -> Result<Tensor> {
    let dims: Vec<usize> = shape.iter().enumerate().map(|(d, &n)| if bits >> d & 1 == 1 { 1 } else { n }).collect();
    let dims = &dims[(bits >> 4) as usize % dims.len()..];
    match bits >> 6 {
        // Swapped dimensions, …
        1 if dims.len() > 1 => {
            let mut swapped = dims.to_vec();
            swapped.swap(0, dims.len() - 1);
            make(&swapped)?.transpose(0, dims.len() - 1)
        }
        // … a part of a larger one, or one row seen many times.
        2 => {
            let mut larger = dims.to_vec();
            larger[dims.len() - 1] += 3;
            make(&larger)?.narrow(dims.len() - 1, 2, dims[dims.len() - 1])
        }
        3 => make(&dims[dims.len() - 1..])?.broadcast_as(dims),
        _ => make(dims),
    }
}

fn case(drawn: &Drawn) -> Result<Case> {
    let Drawn { shape, dim, dtype, out, seed, options, broadcasts, view } = drawn.clone();
    let scores = match view {
        1 => {
            let mut swapped = shape.clone();
            swapped.swap(0, dim);
            make(&swapped, 3.0, seed, dtype)?.transpose(0, dim)?
        }
        2 => {
            let mut larger = shape.clone();
            larger[dim] += 2;
            make(&larger, 3.0, seed, dtype)?.narrow(dim, 1, shape[dim])?
        }
        _ => make(&shape, 3.0, seed, dtype)?,
    };
    let has = |bit: u32| options >> bit & 1 == 1;
    let last = dim + 1 == shape.len() && shape.len() > 1;
    let log = has(0);
    let around = seed as usize % 9;
    Ok(Case {
        scores,
        dim,
        scale: if has(1) { -0.7 } else { 1.0 },
        softcap: has(2).then_some([4.0, 200.0][seed as usize % 2]),
        bias: has(3)
            .then(|| broadcastable(&shape, broadcasts[0], |shape| make(shape, 2.0, seed ^ 1, dtype)))
            .transpose()?,
        mask: has(4).then(|| broadcastable(&shape, broadcasts[1], |shape| mask(shape, seed ^ 2))).transpose()?,
        causal: last && has(5),
        window: (last && has(6)).then_some((around, if has(10) { usize::MAX } else { 2 })),
        sinks: (has(7) && shape.len() > 2 && dim + 3 != shape.len())
            .then(|| make(&shape[shape.len() - 3..shape.len() - 2], 1.0, seed ^ 3, dtype))
            .transpose()?,
        dropout: (has(8) && !log).then_some((0.2, seed)),
        rows: if has(11) && !has(8) { MaskedRows::Nan } else { MaskedRows::Zero },
        log,
        out,
        before: seed as usize / 9 % 17,
    })
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn any_combination(drawn in drawn()) {
        check(&case(&drawn).unwrap()).unwrap();
    }

    /// In f64, where both are right to 1e-12: results and gradients.
    #[test]
    fn the_composed_form(drawn in drawn()) {
        let case = case(&Drawn { dtype: DType::F64, out: DType::F64, ..drawn }).unwrap();
        compare_with_composed(&Case { rows: MaskedRows::Zero, ..case }).unwrap();
    }

    #[test]
    fn the_composed_form_in_every_dtype(drawn in drawn()) {
        // candle rounds an f64 to half precision twice.
        let out = if drawn.dtype == DType::F64 { DType::F64 } else { drawn.out };
        check_composed(&case(&Drawn { out, ..drawn }).unwrap()).unwrap();
    }
}

/// The results of the composed form against the reference, in the bounds that hold for the kernels, but for sums: candle adds all elements
/// of a line to one number.
fn check_composed(case: &Case) -> Result<()> {
    let count = case.scores.elem_count();
    if !within_cap(count) {
        return Ok(());
    }
    let reference = reference(case, &vec![0.0; count], &Device::Cpu)?;
    let unit = if case.scores.dtype() == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
    let of_sum = case.scores.dims()[case.dim] as f64 * unit;
    let slack = |(exact, slack): (f64, f64)| {
        let more = if exact.is_infinite() { 0.0 } else { of_sum * if case.log { 1.0 } else { exact } };
        (exact, slack + more)
    };
    let expected: Vec<_> = reference.results.into_iter().map(slack).collect();
    for device in devices() {
        let case = case.on(&device)?;
        let found = testing::composed(&case.builder(), &case.scores)?;
        assert_eq!((found.dtype(), found.shape()), (case.out, case.scores.shape()));
        check_values("composed", &case, case.out, &values(&found)?, &expected);
    }
    Ok(())
}

fn compare_with_composed(case: &Case) -> Result<()> {
    if !within_cap(case.scores.elem_count()) {
        return Ok(());
    }
    let weights = make(case.scores.dims(), 1.0, 98, DType::F64)?;
    for device in devices() {
        let mut case = case.on(&device)?;
        let scores = Var::from_tensor(&case.scores)?;
        let var = |tensor: &Option<Tensor>| tensor.as_ref().map(Var::from_tensor).transpose();
        let (bias, sinks) = (var(&case.bias)?, var(&case.sinks)?);
        case.bias = bias.as_ref().map(|bias| bias.as_tensor().clone());
        case.sinks = sinks.as_ref().map(|sinks| sinks.as_tensor().clone());
        let ours = case.builder().forward(&scores)?;
        let composed = testing::composed(&case.builder(), &scores)?;
        let close = |what: &str, a: &Tensor, b: &Tensor| -> Result<()> {
            for (a, b) in values(a)?.into_iter().zip(values(b)?) {
                assert!(a == b || (a - b).abs() <= 1e-11 * (1.0 + b.abs()), "{what}: {a} and composed {b}, {case:?}");
            }
            Ok(())
        };
        close("result", &ours, &composed)?;
        let weights = weights.to_device(&device)?;
        let backward = |out: Tensor| (out * &weights)?.sum_all()?.backward();
        let (ours, composed) = (backward(ours)?, backward(composed)?);
        for (what, var) in [("scores", Some(&scores)), ("bias", bias.as_ref()), ("sinks", sinks.as_ref())] {
            if let Some(var) = var {
                let (Some(ours), Some(composed)) = (ours.get(var), composed.get(var)) else {
                    panic!("no gradient of {what}")
                };
                close(what, ours, composed)?;
            }
        }
    }
    Ok(())
}

/// Σ w · result, by the central difference for each element of scores, bias and sinks.
#[test]
fn gradients_are_finite_differences() -> Result<()> {
    let (b, h, q, k) = (2, 3, 4, 5);
    let f = DType::F64;
    let plain = Case::new(make(&[b, h, q, k], 2.0, 1, f)?);
    let all = Case {
        scale: 0.7,
        softcap: Some(1.5),
        bias: Some(make(&[1, h, q, k], 1.0, 2, f)?),
        mask: Some(mask(&[b, 1, q, k], 3)?),
        sinks: Some(make(&[h], 1.0, 4, f)?),
        ..plain.clone()
    };
    let cases = [
        Case { causal: true, dropout: Some((0.3, 9)), ..all.clone() },
        Case { log: true, window: Some((2, 1)), ..all.clone() },
        Case { bias: Some(make(&[b, 1, 1, k], 1.0, 5, f)?), dim: 3, ..all.clone() },
        Case { bias: Some(make(&[q, 1], 1.0, 5, f)?), dim: 2, dropout: Some((0.5, 1)), ..all.clone() },
        Case { dim: 0, log: true, ..all },
    ];
    let weights = make(&[b, h, q, k], 1.0, 6, f)?;
    for (device, case) in devices().iter().flat_map(|device| cases.iter().map(move |case| (device, case))) {
        let case = case.on(device)?;
        let weights = values(&weights)?;
        // What is masked is -inf in the logarithm, and has no part in the sum.
        let loss = |case: &Case| -> Result<f64> {
            let out = values(&case.builder().forward(&case.scores)?)?;
            Ok(out.iter().zip(&weights).filter(|(out, _)| out.is_finite()).map(|(out, w)| out * w).sum())
        };
        let (Some(bias), Some(sinks)) = (&case.bias, &case.sinks) else { unreachable!() };
        let vars = [&case.scores, bias, sinks].map(|tensor| Var::from_tensor(tensor).unwrap());
        let with = |tensors: [Tensor; 3]| {
            let [scores, bias, sinks] = tensors;
            Case { scores, bias: Some(bias), sinks: Some(sinks), ..case.clone() }
        };
        let tracked = with(vars.each_ref().map(|var| var.as_tensor().clone()));
        let weights = tensor(&weights, (b, h, q, k), f, device)?;
        let grads = (tracked.builder().forward(&tracked.scores)? * weights)?.sum_all()?.backward()?;
        for (n, var) in vars.iter().enumerate() {
            let found = values(grads.get(var).expect("a gradient"))?;
            let before = values(var)?;
            for i in 0..before.len() {
                let step = 1e-5;
                let moved = |by: f64| -> Result<f64> {
                    let mut after = before.clone();
                    after[i] += by;
                    let mut tensors = vars.each_ref().map(|var| var.as_detached_tensor());
                    tensors[n] = tensor(&after, var.shape(), f, device)?;
                    loss(&with(tensors))
                };
                let slope = (moved(step)? - moved(-step)?) / (2.0 * step);
                assert!((found[i] - slope).abs() < 1e-8, "tensor {n}, element {i}: {} for {slope}, {case:?}", found[i]);
            }
        }
    }
    Ok(())
}

#[test]
fn lines_in_which_nothing_takes_part() -> Result<()> {
    let inf = f32::INFINITY;
    for device in devices() {
        // Nothing by the mask, nothing by the scores, nothing by either, something.
        let scores = Tensor::new(&[[1f32, 2., 3.], [-inf, -inf, -inf], [5., -inf, -inf], [-inf, 0., 0.]], &device)?;
        let keep = Tensor::new(&[[0u8, 0, 0], [1, 1, 1], [0, 1, 1], [1, 1, 1]], &device)?;
        for across in [false, true] {
            let turned = |tensor: &Tensor| if across { tensor.t()?.contiguous() } else { Ok(tensor.clone()) };
            let (scores, keep) = (Var::from_tensor(&turned(&scores)?)?, turned(&keep)?);
            let softmax = Softmax::new().dim(usize::from(!across)).mask(&keep);
            let rows = |out: &Tensor| if across { out.t()?.to_vec2::<f32>() } else { out.to_vec2::<f32>() };

            let out = softmax.forward(&scores)?;
            assert_eq!(rows(&out)?, [[0.0; 3], [0.0; 3], [0.0; 3], [0.0, 0.5, 0.5]]);
            let grads = out.sqr()?.sum_all()?.backward()?;
            let gradient = rows(grads.get(&scores).expect("a gradient"))?;
            assert!(gradient.iter().flatten().all(|g| g.abs() < 1e-6), "{gradient:?}");

            let log = rows(&softmax.clone().log().forward(&scores)?)?;
            assert_eq!(log[..3], [[-inf; 3]; 3]);
            for softmax in [softmax.clone(), softmax.clone().log()] {
                let out = rows(&softmax.masked_rows(MaskedRows::Nan).forward(&scores)?)?;
                assert!(out[..3].iter().flatten().all(|p| p.is_nan()) && !out[3][1].is_nan(), "{out:?}");
            }

            // A gradient that is no number where nothing takes part does not count.
            let w = Tensor::new(&[[f32::NAN; 3], [inf; 3], [f32::NAN; 3], [f32::NAN, 1., 2.]], &device)?;
            for softmax in [softmax.clone(), softmax.clone().log()] {
                let grads = (softmax.forward(&scores)? * turned(&w)?)?.sum_all()?.backward()?;
                let gradient = rows(grads.get(&scores).expect("a gradient"))?;
                assert_eq!(gradient[..3], [[0.0; 3]; 3]);
                assert!(gradient[3][0] == 0.0 && gradient[3][1] < 0.0 && gradient[3][2] > 0.0, "{gradient:?}");
            }
        }
        // The rule of the functions.
        assert!(ops::softmax(&scores, 1)?.get(1)?.to_vec1::<f32>()?[0].is_nan());
    }
    Ok(())
}

#[test]
fn no_line_with_a_sink_is_empty() -> Result<()> {
    let inf = f32::INFINITY;
    for device in devices() {
        let scores = Tensor::full(-inf, (1, 2, 1, 3), &device)?;
        for sinks in [[0f32, 1.], [-inf, -inf]] {
            let sinks = Var::new(&sinks, &device)?;
            for rows in [MaskedRows::Zero, MaskedRows::Nan] {
                let softmax = Softmax::new().sinks(&sinks).masked_rows(rows);
                let out = softmax.forward(&scores)?;
                assert_eq!(values(&out)?, [0.0; 6]);
                assert_eq!(values(&softmax.log().forward(&scores)?)?, [f64::NEG_INFINITY; 6]);
                let grads = out.sum_all()?.backward()?;
                assert_eq!(values(grads.get(&sinks).expect("a gradient"))?, [0.0; 2]);
            }
        }
    }
    Ok(())
}

#[test]
fn a_nan_that_is_masked_does_not_count() -> Result<()> {
    for device in devices() {
        let values_of = |softmax: Softmax, scores: &[f32; 3]| -> Result<Vec<f64>> {
            values(&softmax.forward(&Tensor::new(scores, &device)?.unsqueeze(0)?)?)
        };
        let keep = Tensor::new(&[1u8, 1, 0], &device)?;
        for bad in [f32::NAN, f32::INFINITY] {
            assert_eq!(values_of(Softmax::new().mask(&keep), &[1.0, 1.0, bad])?, [0.5, 0.5, 0.0]);
            assert!(values_of(Softmax::new().mask(&keep), &[bad, 1.0, 1.0])?[..2].iter().all(|p| p.is_nan()));
            let softcap = Softmax::new().softcap(1.0).mask(&keep);
            assert_eq!(values_of(softcap, &[1.0, 1.0, bad])?, [0.5, 0.5, 0.0]);
            for len in [3, 100, 2000] {
                let in_window = |at: usize| -> Result<Vec<f64>> {
                    let mut scores = vec![1f32; len];
                    scores[at] = bad;
                    let out = Softmax::new().window(1, 0).forward(&Tensor::from_vec(scores, (1, len), &device)?)?;
                    Ok(values(&out)?.split_off(len - 3))
                };
                assert_eq!(in_window(len - 3)?, [0.0, 0.5, 0.5]);
                assert!(in_window(len - 2)?[1..].iter().all(|p| p.is_nan()));
                assert!(in_window(len - 1)?[1..].iter().all(|p| p.is_nan()));
            }
            let bias = Tensor::new(&[0f32, 0., bad], &device)?;
            assert_eq!(values_of(Softmax::new().bias(&bias).mask(&keep), &[1.0; 3])?, [0.5, 0.5, 0.0]);
            // Its gradient is 0, and so are not those of the others NaN.
            let scores = Var::new(&[1f32, 2.0, bad], &device)?;
            for softmax in [Softmax::new(), Softmax::new().softcap(3.0), Softmax::new().log()] {
                let grads = softmax.mask(&keep).forward(&scores)?.narrow(0, 0, 1)?.sum_all()?.backward()?;
                let gradient = values(grads.get(&scores).expect("a gradient"))?;
                assert!(gradient[2] == 0.0 && gradient[0] > 0.0 && gradient[1] < 0.0, "{gradient:?}");
            }
        }
        // NaN alone is no empty line.
        let nan = values_of(Softmax::new(), &[f32::NAN, f32::NEG_INFINITY, f32::NEG_INFINITY])?;
        assert!(nan[0].is_nan());
        // tanh bends what is infinite into the cap.
        let bent = values_of(Softmax::new().softcap(2.0), &[f32::INFINITY, 1e30, 1e30])?;
        assert!(bent.iter().all(|p| (p - 1.0 / 3.0).abs() < 1e-7), "{bent:?}");
    }
    Ok(())
}

/// The same where there is no kernel, as on Metal.
#[test]
fn what_is_masked_does_not_count_without_a_kernel() -> Result<()> {
    let device = Device::Cpu;
    let keep = Tensor::new(&[1u8, 1, 0], &device)?;
    for bad in [f32::NAN, f32::INFINITY] {
        let scores = Var::new(&[[1f32, 2.0, bad]], &device)?;
        let masked = Softmax::new().mask(&keep);
        for softmax in [masked.clone(), masked.clone().softcap(3.0), masked.clone().log(), masked.log().softcap(3.0)] {
            for upstream in [0.0, bad] {
                // Of the first element, and what is no number where nothing takes part
                let upstream = Tensor::new(&[[1f32, 0.0, upstream]], &device)?;
                let gradient = |out: Tensor| -> Result<Vec<f64>> {
                    let grads = (out * &upstream)?.sum_all()?.backward()?;
                    values(grads.get(&scores).expect("a gradient"))
                };
                let (found, of_kernel) =
                    (gradient(testing::composed(&softmax, &scores)?)?, gradient(softmax.forward(&scores)?)?);
                assert!(found[2] == 0.0 && found[0] > 0.0 && found[1] < 0.0, "{found:?} with {bad}, {upstream}");
                assert!(found.iter().zip(&of_kernel).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?} and {of_kernel:?}");
            }
        }
    }
    Ok(())
}

/// The longest lines of which a block holds two tiles, where what it shares besides is more than 48 KB hold.
#[test]
fn gradients_of_lines_that_fill_two_tiles() -> Result<()> {
    for (dtype, lengths) in
        [(DType::F32, [5999, 6013, 6015]), (DType::F64, [2991, 3001, 3007]), (DType::F16, [12_001, 12_025, 12_031])]
    {
        for len in lengths {
            let plain = Case::new(make(&[3, len], 3.0, len as u64, dtype)?);
            check(&Case { scale: 0.5, ..plain.clone() })?;
            check(&Case { scale: 0.5, softcap: Some(4.0), ..plain.clone() })?;
            check(&Case { bias: Some(make(&[1, len], 1.0, 7, dtype)?), mask: Some(mask(&[len], 8)?), ..plain })?;
        }
    }
    Ok(())
}

/// A NaN that takes part makes the line's gradient NaN, but not where an element takes no part.
#[test]
fn what_is_masked_has_gradient_zero_in_a_line_of_nan() -> Result<()> {
    for device in devices() {
        let keep = Tensor::new(&[1u8, 0, 1, 1], &device)?.unsqueeze(0)?;
        let scores = Tensor::new(&[[1f32, 2., f32::NAN, 3.]], &device)?;
        for across in [false, true] {
            let turned = |tensor: &Tensor| if across { tensor.t()?.contiguous() } else { Ok(tensor.clone()) };
            let (scores, keep) = (Var::from_tensor(&turned(&scores)?)?, turned(&keep)?);
            let softmax = Softmax::new().dim(usize::from(!across)).mask(&keep);
            for softmax in [softmax.clone(), softmax.clone().softcap(3.0), softmax.log()] {
                let grads = softmax.forward(&scores)?.sqr()?.sum_all()?.backward()?;
                let gradient = values(grads.get(&scores).expect("a gradient"))?;
                assert!(gradient[1] == 0.0 && [0, 2, 3].iter().all(|&i: &usize| gradient[i].is_nan()), "{gradient:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_gradient_of_the_result_does_not_count_where_it_is_masked() -> Result<()> {
    let lengths = [64, 100, 1000, 1024, 3000, 20_000, 33_001];
    let cases = DTYPES.into_iter().flat_map(|dtype| lengths.map(|len| (dtype, len)));
    for (device, (dtype, len)) in
        devices().into_iter().flat_map(|device| cases.clone().map(move |case| (device.clone(), case)))
    {
        let keep: Vec<u8> = (0..len).map(|j| (j % 3 != 0).into()).collect();
        // What twice a score is −∞ of takes no part either.
        let lowest = match dtype {
            DType::F64 => Some(-1.7e308),
            DType::F32 | DType::BF16 => Some(-3.3e38),
            _ => None,
        };
        let masked = Softmax::new().scale(0.5).mask(&Tensor::new(keep.as_slice(), &device)?);
        let in_window = (0..len).map(|j| (j >= len - 1 - len / 2).into()).collect();
        let mut softmaxes =
            vec![(masked, keep.clone(), None), (Softmax::new().scale(0.5).window(len / 2, 0), in_window, None)];
        if lowest.is_some() {
            softmaxes.push((Softmax::new().scale(2.0), keep.clone(), lowest));
            softmaxes.push((Softmax::new().scale(2.0).bias(&Tensor::zeros(1, dtype, &device)?), keep, lowest));
        }
        for (softmax, keep, lowest) in softmaxes {
            let gradient_with = |masked: f32| -> Result<Vec<f64>> {
                let mut numbers = normal(len, 3.0, 1);
                if let Some(lowest) = lowest {
                    numbers.iter_mut().zip(&keep).filter(|(_, &keep)| keep == 0).for_each(|(x, _)| *x = lowest);
                }
                let scores = Var::from_tensor(&tensor(&numbers, (1, len), dtype, &device)?)?;
                let weights = (0..len).map(|j| if keep[j] == 1 { (j % 7) as f32 - 3.0 } else { masked });
                let weights = Tensor::from_iter(weights, &device)?.unsqueeze(0)?.to_dtype(dtype)?;
                let grads = (softmax.forward(&scores)? * weights)?.sum_all()?.backward()?;
                values(grads.get(&scores).expect("a gradient"))
            };
            let expected = gradient_with(0.0)?;
            assert!(expected.iter().zip(&keep).all(|(g, &keep)| g.is_finite() && (keep == 1 || *g == 0.0)));
            for masked in [f32::NAN, f32::INFINITY] {
                let what = format!("{masked} in {len} of {dtype:?} on {device:?}");
                for (found, expected) in gradient_with(masked)?.iter().zip(&expected) {
                    assert!((found - expected).abs() <= 1e-6, "{what}: {found} where {expected} is due");
                }
            }
        }
    }
    Ok(())
}

/// What the gradient of a result that is masked is multiplied with may be more than a number: it does not count.
#[test]
fn great_gradients_where_masked() -> Result<()> {
    for device in devices() {
        for (dtype, len) in [DType::F32, DType::BF16]
            .into_iter()
            .flat_map(|dtype| [64, 77, 1000, 4096, 9001, 33_001].map(|len| (dtype, len)))
        {
            let keep: Vec<u8> = (0..len).map(|j| u8::from(j % 3 != 1)).collect();
            let softmax = Softmax::new().mask(&Tensor::new(&keep[..], &device)?).dropout(0.5, 9);
            let scores = Var::from_tensor(&tensor(&normal(len, 1.0, 9), (1, len), dtype, &device)?)?;
            let gradient_with = |masked: f32| -> Result<Vec<f64>> {
                let weights = (0..len).map(|j| if keep[j] == 1 { (j % 7) as f32 - 3.0 } else { masked });
                let weights = Tensor::from_iter(weights, &device)?.unsqueeze(0)?.to_dtype(dtype)?;
                let grads = (softmax.forward(&scores)? * weights)?.sum_all()?.backward()?;
                values(grads.get(&scores).expect("a gradient"))
            };
            let expected = gradient_with(0.0)?;
            assert!(expected.iter().any(|&g| g != 0.0));
            assert_eq!(gradient_with(3e38)?, expected, "{len} of {dtype:?} on {device:?}");
        }
    }
    Ok(())
}

#[test]
fn dropout() -> Result<()> {
    let shape = (64, 1000);
    let scores = make(&[shape.0, shape.1], 1.0, 1, DType::F32)?;
    let dropped = |p: f64, seed: u64, device: &Device| -> Result<Vec<bool>> {
        let out = Softmax::new().dropout(p, seed).forward(&scores.to_device(device)?)?;
        Ok(values(&out)?.into_iter().map(|p| p == 0.0).collect())
    };
    for device in devices() {
        for p in [0.0, 0.001, 0.25, 0.5, 0.9, 0.999_999] {
            let dropped_here = dropped(p, 5, &device)?;
            assert_eq!(dropped_here, dropped(p, 5, &Device::Cpu)?, "another mask on {device:?}");
            let count = dropped_here.iter().filter(|&&dropped| dropped).count() as f64;
            let (n, p) = ((shape.0 * shape.1) as f64, (p * 65536.0).round().min(65535.0) / 65536.0);
            assert!((count - n * p).abs() <= 5.0 * (n * p * (1.0 - p)).sqrt(), "{count} of {n} with p = {p}");
        }
        assert_ne!(dropped(0.5, 5, &device)?, dropped(0.5, 6, &device)?);
        assert_ne!(dropped(0.5, 5, &device)?, dropped(0.5, 5 + (1 << 32), &device)?);
        // Neighbours and lines do not follow each other: correlations of a fair coin's.
        let dropped = dropped(0.5, 7, &device)?;
        for step in [1, 2, 8, 16, 1000, 8000] {
            let same = dropped.iter().zip(&dropped[step..]).filter(|(a, b)| a == b).count() as f64;
            let n = (dropped.len() - step) as f64;
            assert!((same - n / 2.0).abs() < 5.0 * (n / 4.0).sqrt(), "{same} of {n} as {step} before");
        }
    }
    Ok(())
}

#[test]
fn tracked_or_an_error() -> Result<()> {
    for device in devices() {
        let plain =
            |shape: &[usize], seed| make(shape, 1.0, seed, DType::F32).and_then(|tensor| tensor.to_device(&device));
        let scores = plain(&[1, 2, 3, 4], 1)?;
        let (bias, sinks) = (plain(&[3, 4], 2)?, plain(&[2], 3)?);
        let (scores_var, bias_var, sinks_var) =
            (Var::from_tensor(&scores)?, Var::from_tensor(&bias)?, Var::from_tensor(&sinks)?);
        let softmax = Softmax::new().bias(&bias).sinks(&sinks);
        assert!(!softmax.forward(&scores)?.track_op());
        assert!(softmax.forward(&scores_var)?.track_op());
        // Only what is a variable gets a gradient.
        let tracked = Softmax::new().bias(&bias).sinks(&sinks_var).forward(&scores)?;
        let grads = tracked.sqr()?.sum_all()?.backward()?;
        assert!(grads.get(&sinks_var).is_some() && grads.get(&bias).is_none() && grads.get(&scores).is_none());
        for tracked in
            [Softmax::new().bias(&bias_var).forward(&scores)?, Softmax::new().sinks(&sinks_var).forward(&scores)?]
        {
            assert!(tracked.track_op());
        }
        // A module, and a clone, are the same.
        assert_eq!(values(&Module::forward(&softmax.clone(), &scores)?)?, values(&softmax.forward(&scores)?)?);
        // Twice is not silently nothing.
        let grads = softmax.forward(&scores_var)?.sqr()?.sum_all()?.backward()?;
        let error =
            grads.get(&scores_var).expect("a gradient").sum_all()?.backward().map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("fused-softmax-backward"), "{error}");
        let grads = Softmax::new().bias(&bias_var).forward(&scores)?.sqr()?.sum_all()?.backward()?;
        assert!(grads.get(&bias_var).expect("a gradient").sum_all()?.backward().is_err());
    }
    Ok(())
}

#[test]
fn empty_tensors() -> Result<()> {
    for device in devices() {
        for shape in [[0, 2, 3, 4], [2, 2, 0, 4], [2, 2, 3, 0], [2, 0, 3, 4]] {
            let scores = Var::zeros(&shape[..], DType::F32, &device)?;
            let bias = Var::zeros((1, shape[3]), DType::F32, &device)?;
            let sinks = Var::zeros(shape[1], DType::F32, &device)?;
            // candle fills no empty tensor on CUDA, nor does it sum one.
            let keep = Tensor::zeros((1, shape[3]), DType::U8, &device)?;
            let softmax = Softmax::new().causal().scale(2.0).softcap(2.0).bias(&bias).sinks(&sinks).mask(&keep);
            let out = softmax.clone().out_dtype(DType::F16).forward(&scores)?;
            assert_eq!((out.dims(), out.dtype(), out.track_op()), (&shape[..], DType::F16, true));
            if device.is_cpu() {
                let grads = out.sum_all()?.backward()?;
                for var in [&scores, &bias, &sinks] {
                    assert_eq!(grads.get(var).map(|gradient| gradient.dims()), Some(var.dims()));
                }
            }
            Softmax::new().causal().forward_inplace(&scores.as_detached_tensor())?;
        }
    }
    Ok(())
}

#[test]
fn in_place_errors() -> Result<()> {
    for device in devices() {
        let scores = Tensor::zeros((2, 3, 4), DType::F32, &device)?;
        let fails = |softmax: Softmax, scores: &Tensor, words: &[&str]| {
            let error = softmax.forward_inplace(scores).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        };
        let var = Var::zeros((2, 3, 4), DType::F32, &device)?;
        fails(Softmax::new(), &var, &["forward_inplace", "gradients"]);
        fails(Softmax::new().bias(&var), &scores, &["bias", "gradients"]);
        let sinks = Var::zeros(2, DType::F32, &device)?;
        fails(Softmax::new().sinks(&sinks), &scores, &["sinks", "gradients"]);
        fails(Softmax::new().bias(&scores), &scores, &["bias", "memory"]);
        fails(Softmax::new().bias(&scores.narrow(0, 0, 1)?), &scores, &["bias", "memory"]);
        fails(Softmax::new().out_dtype(DType::F16), &scores, &["F32", "F16", "out_dtype"]);
        fails(Softmax::new(), &scores.transpose(0, 2)?, &["contiguous", "forward"]);
        // A mask has no gradient, whatever it is made of.
        let filled = Tensor::zeros((2, 3, 4), DType::F32, &device)?;
        Softmax::new().mask(&var.ge(0f32)?).forward_inplace(&filled)?;
        assert!(values(&filled)?.iter().all(|&p| p == 0.25));
        // Into a part of a tensor
        let whole = make(&[5, 7], 1.0, 1, DType::F32)?.to_device(&device)?;
        let before = values(&whole)?;
        let bias = Tensor::ones(7, DType::F32, &device)?;
        Softmax::new().bias(&bias).forward_inplace(&whole.narrow(0, 1, 2)?)?;
        let after = values(&whole)?;
        assert!(after[..7] == before[..7] && after[21..] == before[21..]);
        assert!((after[7..14].iter().sum::<f64>() - 1.0).abs() < 1e-6);
    }
    Ok(())
}

#[test]
fn errors() -> Result<()> {
    for device in devices() {
        let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device);
        let f = DType::F32;
        let scores = zeros(&[2, 3, 4, 5], f)?;
        let fails = |softmax: Softmax, scores: &Tensor, words: &[&str]| {
            let error = softmax.forward(scores).unwrap_err().to_string();
            assert!(error.contains("softmax") && words.iter().all(|word| error.contains(word)), "{words:?}: {error}");
            assert!(softmax.forward_inplace(scores).is_err());
        };
        let new = Softmax::new;
        fails(new(), &zeros(&[], f)?, &["scalar"]);
        fails(new().dim(4), &scores, &["[2, 3, 4, 5]", "0 to 3"]);
        fails(new().dim(D::Minus(5)), &scores, &["0 to 3"]);
        fails(new(), &zeros(&[2, 2], DType::U32)?, &["U32", "to_dtype"]);
        fails(new().out_dtype(DType::I64), &scores, &["out_dtype", "I64"]);
        // What is subnormal in f32 has few digits, or is 0.
        for scale in [f64::NAN, f64::INFINITY, 1e300, 1e-40, -1e-46] {
            fails(new().scale(scale), &scores, &["scale", "finite"]);
        }
        for scale in [1e300, 1e-46, 0.0] {
            assert!(new().scale(scale).forward(&zeros(&[2], DType::F64)?).is_ok());
        }
        assert!(new().scale(0.0).softcap(3.0).forward(&scores).is_ok());
        for t in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-300, 1e40, 1e46] {
            fails(new().temperature(t), &scores, &["temperature", "above 0"]);
        }
        for cap in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-60, 1e-40, 1e60] {
            fails(new().softcap(cap), &scores, &["softcap", "above 0"]);
        }
        for (scale, cap) in [(1e-6, 1e38), (1e-10, 3e38), (1e30, 1e-30)] {
            fails(new().scale(scale).softcap(cap), &scores, &["softcap", "scale", "divided by"]);
        }
        fails(new().scale(1e-15).softcap(1e308), &zeros(&[2], DType::F64)?, &["softcap", "divided by"]);
        for p in [-0.1, 1.0, 1.5, f64::NAN] {
            fails(new().dropout(p, 0), &scores, &["dropout", "less than 1"]);
        }
        fails(new().dropout(0.1, 0).log(), &scores, &["dropout", "log"]);
        assert!(new().dropout(0.0, 0).log().forward(&scores).is_ok());
        fails(new().causal(), &zeros(&[5], f)?, &["causal", "[5]", "queries"]);
        fails(new().window(1, 1), &zeros(&[5], f)?, &["window", "[5]", "queries"]);
        fails(new().causal().dim(2), &scores, &["causal", "last"]);
        fails(new().window(1, 1).dim(0), &scores, &["window", "last"]);
        for shape in [&[2, 5][..], &[3, 4, 4], &[2, 3, 4, 6], &[1, 2, 3, 4, 5]] {
            fails(new().bias(&zeros(shape, f)?), &scores, &["bias", &format!("{shape:?}"), "[2, 3, 4, 5]"]);
            fails(new().mask(&zeros(shape, DType::U8)?), &scores, &["mask", &format!("{shape:?}"), "[2, 3, 4, 5]"]);
        }
        // It would enlarge them.
        fails(new().bias(&zeros(&[2, 5], f)?), &zeros(&[1, 5], f)?, &["bias", "broadcast"]);
        fails(new().bias(&zeros(&[5], DType::F16)?), &scores, &["bias", "F16", "F32", "to_dtype"]);
        fails(new().mask(&zeros(&[5], f)?), &scores, &["mask", "F32", "U8"]);
        fails(new().sinks(&zeros(&[3], DType::F64)?), &scores, &["sinks", "F64", "F32"]);
        fails(new().sinks(&zeros(&[4], f)?), &scores, &["sinks", "[4]", "(3,)"]);
        fails(new().sinks(&zeros(&[1, 3], f)?), &scores, &["sinks", "[1, 3]", "(3,)"]);
        fails(new().sinks(&zeros(&[3], f)?), &zeros(&[3, 4], f)?, &["sinks", "[3, 4]", "heads"]);
        fails(new().sinks(&zeros(&[3], f)?).dim(1), &scores, &["sinks", "dimension 1"]);
        if !device.is_cpu() {
            let bias = Tensor::zeros(5, f, &Device::Cpu)?;
            fails(new().bias(&bias), &scores, &["bias", "Cpu", "to_device"]);
        }
    }
    Ok(())
}
