//! Log-sum-exp against an f64 reference, and its gradient.

use crate::support::{check_gradient, devices, gpu_for, half_unit, normal, sum, tensor, values, within_cap, DTYPES};
use candle_core::{DType, Device, Result, Tensor, Var, D};
use candle_softmax::ops;

const INF: f64 = f64::INFINITY;
const NAN: f64 = f64::NAN;

fn reference(line: &[f64]) -> f64 {
    let max = line.iter().copied().fold(-INF, f64::max);
    if line.iter().any(|x| x.is_nan()) {
        NAN
    } else if max.is_infinite() {
        max
    } else {
        max + sum(line.iter().map(|x| (x - max).exp())).ln()
    }
}

/// Fails unless `found` is the log-sum-exp of `line`, to within a few roundings of it or of the dtype.
fn check_line(line: &[f64], found: f64, dtype: DType, what: &str) {
    let exact = reference(line);
    let bound = match dtype {
        DType::F64 => 1e-13 + 1e-15 * exact.abs(),
        DType::F32 => 1e-6 + 2e-7 * exact.abs(),
        DType::F16 => 1e-6 + 5e-4 * exact.abs(),
        _ => 1e-6 + 4e-3 * exact.abs(),
    };
    let good = found == exact || (found.is_nan() && exact.is_nan()) || (found - exact).abs() <= bound;
    assert!(good, "{what} {dtype:?}, {} elements: {found} for {exact}", line.len());
}

/// Along `dim`, with and without the dimension kept.
pub fn check(xs: &Tensor, dim: usize) -> Result<()> {
    let (dims, dtype) = (xs.dims(), xs.dtype());
    let kept = ops::logsumexp_keepdim(xs, dim)?;
    let found = ops::logsumexp(xs, dim)?;
    let mut expected = dims.to_vec();
    expected[dim] = 1;
    assert_eq!((kept.dims(), kept.dtype()), (&expected[..], dtype));
    expected.remove(dim);
    assert_eq!((found.dims(), found.dtype()), (&expected[..], dtype));
    check_found(xs, dim, &found)
}

/// That `found` has the log-sum-exps of the lines along `dim`.
pub fn check_found(xs: &Tensor, dim: usize, found: &Tensor) -> Result<()> {
    let (dims, dtype) = (xs.dims(), xs.dtype());
    let (len, inner): (usize, usize) = (dims[dim], dims[dim + 1..].iter().product());
    assert_eq!(found.dtype(), dtype);
    let inputs = values(xs)?;
    for (line, found) in values(found)?.into_iter().enumerate() {
        let start = line / inner * len * inner + line % inner;
        let elements: Vec<f64> = (0..len).map(|j| inputs[start + j * inner]).collect();
        check_line(&elements, found, dtype, &format!("{:?} {dims:?} dim {dim}, line {line}", xs.device()));
    }
    Ok(())
}

#[test]
fn lines_of_every_length_and_offset() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            for len in (1..40).chain([100, 255, 511, 512, 513, 520, 1023, 1024, 4097, 8191, 20_000, 128_256]) {
                let count = 3 * len + 3;
                if !within_cap(count) || (len > 20_000 && dtype == DType::F64) {
                    continue;
                }
                let xs = tensor(&normal(count, 4.0, len as u64), count, dtype, &device)?;
                for offset in if len > 1000 { 0..3 } else { 0..2 } {
                    check(&xs.narrow(0, offset, 3 * len)?.reshape((3, len))?, 1)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn other_dimensions_and_strides() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            for shape in [vec![7], vec![40, 3], vec![2, 300, 5], vec![3, 9, 600], vec![2, 3, 4, 5], vec![1, 20_000, 2]]
            {
                let count: usize = shape.iter().product();
                if !within_cap(count) {
                    continue;
                }
                let xs = tensor(&normal(count, 3.0, 1), shape.clone(), dtype, &device)?;
                for dim in 0..shape.len() {
                    check(&xs, dim)?;
                    check(&xs.transpose(0, D::Minus1)?, dim)?;
                }
            }
            // A line in many parts
            if within_cap(700_000) {
                check(&tensor(&normal(700_000, 3.0, 2), (1, 700_000), dtype, &device)?, 1)?;
                check(&tensor(&normal(700_000, 3.0, 3), (350_000, 2), dtype, &device)?, 0)?;
            }
        }
    }
    Ok(())
}

/// −∞, ∞ and NaN among them, and nothing but −∞ where it is said so.
fn sprinkle(numbers: &mut [f64], is_nothing: impl Fn(usize) -> bool) {
    for (j, number) in numbers.iter_mut().enumerate() {
        *number = match j % 41 {
            _ if is_nothing(j) => -INF,
            3 | 4 | 17 => -INF,
            30 if j % 5 == 0 => INF,
            31 if j % 7 == 0 => NAN,
            _ => *number,
        };
    }
}

/// Lines of a few elements, or a few side by side, some with infinities or NaN.
#[test]
fn short_lines_and_narrow_rows() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            for (i, len) in (1..20).chain([33, 70, 130, 1100]).enumerate() {
                for inner in [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 40, 70, 300] {
                    let outer = if len > 100 { 2 } else { 19 };
                    let count = outer * len * inner;
                    if !within_cap(count) {
                        continue;
                    }
                    let mut numbers = normal(count + 3, 4.0, i as u64);
                    check(
                        &tensor(&numbers, count + 3, dtype, &device)?
                            .narrow(0, 3, count)?
                            .reshape((outer, len, inner))?,
                        1,
                    )?;
                    sprinkle(&mut numbers, |j| j / (len * inner) % 4 == 1);
                    check(&tensor(&numbers[..count], (outer, len, inner), dtype, &device)?, 1)?;
                }
            }
        }
    }
    Ok(())
}

/// So many lines side by side that a GPU's threads take whole ones, of half precision in pairs where rows begin at words; nothing else does.
#[test]
fn lines_that_fill_a_gpu() -> Result<()> {
    for shape in [[2, 37, 25_400], [2, 37, 25_401], [1, 150, 60_000]] {
        let count = shape.iter().product::<usize>();
        let Some(device) = gpu_for(count) else { return Ok(()) };
        let mut numbers = normal(count, 3.0, 4);
        for dtype in DTYPES {
            check(&tensor(&numbers, shape.to_vec(), dtype, &device)?, 1)?;
        }
        sprinkle(&mut numbers, |j| j % shape[2] % 9 == 1);
        for dtype in DTYPES {
            check(&tensor(&numbers, shape.to_vec(), dtype, &device)?, 1)?;
        }
    }
    Ok(())
}

#[test]
fn numbers_far_from_zero() -> Result<()> {
    for device in devices() {
        for len in [5, 600, 5000] {
            for offset in [1e4, -1e4, 1e30, -3e38] {
                let line: Vec<f64> = normal(len, 5.0, 7).iter().map(|x| x + offset).collect();
                check(&tensor(&line.repeat(2), (2, len), DType::F32, &device)?, 1)?;
                check(&tensor(&line.repeat(2), (len, 2), DType::F32, &device)?, 0)?;
            }
        }
    }
    Ok(())
}

#[test]
fn special_values() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            for line in [
                [-INF; 3],
                [-INF, 1.0, -INF],
                [INF, 1.0, 2.0],
                [INF, -INF, INF],
                [NAN, 1.0, 2.0],
                [-INF, NAN, -INF],
                [INF, NAN, 0.0],
            ] {
                for repeats in [1, 20, 700, 20_000] {
                    let line = line.repeat(repeats);
                    if !within_cap(3 * line.len()) {
                        continue;
                    }
                    let other = normal(line.len(), 1.0, 3);
                    let both = [line.clone(), other.clone(), line.clone()].concat();
                    let xs = tensor(&both, (3, line.len()), dtype, &device)?;
                    check(&xs, 1)?;
                    check(&xs.t()?.contiguous()?, 0)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn empty_tensors() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            let xs = Var::from_tensor(&Tensor::zeros((2, 0, 3), dtype, &device)?)?;
            let found = ops::logsumexp(&xs, 1)?;
            assert_eq!((found.dims(), found.track_op()), (&[2, 3][..], true));
            assert_eq!(values(&found)?, [-INF; 6]);
            assert_eq!(ops::logsumexp(&xs, 0)?.dims(), [0, 3]);
            assert_eq!(ops::logsumexp_keepdim(&xs, 2)?.dims(), [2, 0, 1]);
            assert_eq!(values(&ops::logsumexp(&Tensor::zeros(0, dtype, &device)?, 0)?)?, [-INF]);
            // More lines than a strip has
            for (shape, dim) in [((2, 0, 300), 1), ((1, 0, 257), 1), ((0, 5, 300), 0), ((40, 30, 0), 2)] {
                let xs = Var::from_tensor(&Tensor::zeros(shape, dtype, &device)?)?;
                let found = ops::logsumexp(&xs, dim)?;
                assert!(values(&found)?.iter().all(|&x| x == -INF), "{shape:?}");
                let grads = found.sum_all()?.backward()?;
                assert_eq!(grads.get(&xs).expect("a gradient").dims(), xs.dims());
            }
        }
    }
    Ok(())
}

#[test]
fn errors_say_what_would_work() -> Result<()> {
    let error = |xs: &Tensor, dim| ops::logsumexp(xs, dim).unwrap_err().to_string();
    let message = error(&Tensor::zeros((2, 3), DType::I64, &Device::Cpu)?, 1);
    assert!(message.contains("logsumexp") && message.contains("I64") && message.contains("to_dtype"), "{message}");
    let message = error(&Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?, 2);
    assert!(message.contains("logsumexp") && message.contains("[2, 3]"), "{message}");
    let message = error(&Tensor::zeros((), DType::F32, &Device::Cpu)?, 0);
    assert!(message.contains("scalar"), "{message}");
    Ok(())
}

#[test]
fn gradients() -> Result<()> {
    for device in devices() {
        for (shape, dim) in [((3, 7, 1), 1), ((2, 5, 3), 1), ((4, 3, 2), 0)] {
            let count = shape.0 * shape.1 * shape.2;
            let logits = normal(count, 2.0, 1);
            let xs = Var::from_tensor(&tensor(&logits, shape, DType::F64, &device)?)?;
            let ys = ops::logsumexp(&xs, dim)?;
            let weights = tensor(&normal(ys.elem_count(), 1.0, 2), ys.shape(), DType::F64, &device)?;
            let found = (&ys * &weights)?.sum_all()?.backward()?;
            let found = values(found.get(&xs).expect("a gradient"))?;
            let loss = |logits: &[f64]| -> Result<f64> {
                let ys = ops::logsumexp(&tensor(logits, shape, DType::F64, &device)?, dim)?;
                (ys * &weights)?.sum_all()?.to_scalar()
            };
            check_gradient(&found, &logits, &format!("{shape:?} dim {dim}"), loss)?;
        }
        for dtype in DTYPES {
            // −∞ beside a number has the gradient 0, and where softmax is NaN it is.
            let xs = Var::from_tensor(&tensor(&[0.0, -INF, -INF, -INF], (2, 2), dtype, &device)?)?;
            let grads = ops::logsumexp(&xs, 1)?.sum_all()?.backward()?;
            let found = values(grads.get(&xs).expect("a gradient"))?;
            assert_eq!(found[..2], [1.0, 0.0]);
            assert!(found[2..].iter().all(|g| g.is_nan()));
        }
    }
    Ok(())
}

/// Each dtype's, of many lines and long ones, and of those along another dimension: g · softmax(x), of long lines rounded once.
#[test]
fn gradients_of_lines() -> Result<()> {
    for device in devices() {
        for (shape, dim) in
            [((1, 700, 16), 2), ((3, 40, 577), 2), ((1, 2, 30_001), 2), ((5, 50, 24), 1), ((2, 900, 3), 1)]
        {
            for dtype in DTYPES {
                let xs =
                    Var::from_tensor(&tensor(&normal(shape.0 * shape.1 * shape.2, 2.0, 3), shape, dtype, &device)?)?;
                let ys = ops::logsumexp_keepdim(&xs, dim)?;
                let gs = tensor(&normal(ys.elem_count(), 1.0, 4), ys.shape(), dtype, &device)?;
                let grads = (ys * &gs)?.sum_all()?.backward()?;
                let found = grads.get(&xs).expect("a gradient");
                assert_eq!((found.dims(), found.dtype()), (xs.dims(), dtype));
                // Lines along the last dimension
                let lines = |all: &Tensor| all.transpose(dim, 2)?.contiguous();
                let (found, gs, len) = (values(&lines(found)?)?, values(&lines(&gs)?)?, xs.dim(dim)?);
                let xs = values(&lines(&xs)?)?;
                for (i, &g) in gs.iter().enumerate() {
                    let line = &xs[i * len..][..len];
                    let whole = reference(line);
                    for (&x, &found) in line.iter().zip(&found[i * len..]) {
                        let exact = g * (x - whole).exp();
                        // Of f32 what rounds is an exponent of up to 20, too.
                        let most = match dtype {
                            DType::F64 => 1e-14,
                            DType::F32 => 4e-6,
                            DType::F16 => 0.5f64.powi(11) * 1.02,
                            _ => 0.5f64.powi(8) * 1.002,
                        };
                        // Of p, too, in short lines
                        let (roundings, factor) = if len < 512 { (2.01, 1.0 + g.abs()) } else { (1.0, 1.0) };
                        let subnormal = if dtype == DType::F16 { factor * 0.5f64.powi(25) } else { 0.0 };
                        let most = roundings * most * exact.abs() + subnormal;
                        assert!((found - exact).abs() <= most, "{shape:?} {dtype:?} line {i}: {found:e} for {exact:e}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// The second derivative is that of the formula, by the logits and, with candle's detaching off, by what the first was given.
#[test]
fn second_order() -> Result<()> {
    // candle reads this once in a thread: the test starts itself again with it.
    const DO_NOT_DETACH: &str = "CANDLE_GRAD_DO_NOT_DETACH";
    if std::env::var_os(DO_NOT_DETACH).is_none() {
        let again = std::process::Command::new(std::env::current_exe()?)
            .args(["--exact", "logsumexp::second_order"])
            .env(DO_NOT_DETACH, "1")
            .output()?;
        let text = String::from_utf8_lossy(&again.stdout);
        assert!(again.status.success() && text.contains(" 1 passed"), "{text}");
        return Ok(());
    }
    for device in devices() {
        // By a product, and by what a loss is made of
        for len in [4, 600] {
            let shape = (2, len);
            let x = Var::from_tensor(&tensor(&normal(2 * len, 1.0, 5), shape, DType::F64, &device)?)?;
            let g = Var::from_tensor(&tensor(&[0.5, -2.0], (2, 1), DType::F64, &device)?)?;
            let weights = tensor(&normal(2 * len, 1.0, 6), shape, DType::F64, &device)?;
            check_second_order(&x, &g, &weights)?;
        }
    }
    Ok(())
}

fn check_second_order(x: &Var, g: &Var, weights: &Tensor) -> Result<()> {
    let first_order = |x: &Tensor, g: &Tensor| -> Result<Tensor> {
        let grads = (ops::logsumexp_keepdim(x, 1)? * g)?.sum_all()?.backward()?;
        Ok(grads.get(x).expect("tracked").clone())
    };
    let second = (first_order(x, g)? * weights)?.sum_all()?.backward()?;
    for (input, of_logits) in [(x, true), (g, false)] {
        let found = values(second.get(input).expect("tracked"))?;
        let loss = |moved: &[f64]| -> Result<f64> {
            let moved = Var::from_tensor(&tensor(moved, input.shape(), DType::F64, x.device())?)?;
            let first = if of_logits { first_order(&moved, g)? } else { first_order(x, &moved)? };
            (first * weights)?.sum_all()?.to_scalar()
        };
        check_gradient(&found, &values(input)?, "second order", loss)?;
    }
    Ok(())
}

/// What candle's own sums would lose: Σ p of as many terms in half precision.
#[test]
fn second_order_of_long_lines() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let unit = half_unit(dtype).max(1e-6);
            for len in [300, 32_768] {
                let x = Var::from_tensor(&tensor(&normal(len, 1.0, 7), (1, len), dtype, &device)?)?;
                let weights = tensor(&normal(len, 0.1, 8), (1, len), dtype, &device)?.affine(1.0, 1.0)?;
                let first = ops::logsumexp(&x, 1)?.sum_all()?.backward()?.get(&x).expect("tracked").clone();
                let second = (first * &weights)?.sum_all()?.backward()?;
                let (logits, w) = (values(&x)?, values(&weights)?);
                let max = logits.iter().copied().fold(-INF, f64::max);
                let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
                let p: Vec<f64> = logits.iter().map(|x| (x - max).exp() / sum).collect();
                let total: f64 = p.iter().zip(&w).map(|(p, w)| p * w).sum();
                for ((found, p), w) in values(second.get(&x).expect("tracked"))?.iter().zip(p).zip(w) {
                    // p, the product and the sum are rounded, and what is smaller than a number is.
                    let bound = 4.0 * unit * p * (w.abs() + total.abs()) + 2f64.powi(-23) * w.abs();
                    let exact = p * (w - total);
                    assert!((found - exact).abs() <= bound, "{device:?} {dtype:?} {len}: {found} for {exact}");
                }
            }
        }
    }
    Ok(())
}
