//! Gradients against finite differences, against candle's composed softmax, and against the formula in f64.

use crate::support::{
    check_gradient, devices, half_unit, normal, pool, reference, tensor, values, within_cap, Op, DTYPES,
};
use candle_core::{CustomOp1, DType, Device, Result, Tensor, Var};
use candle_softmax::{ops, OnlineSoftmax, ReduceSoftmax, SafeSoftmax};

/// The gradient of Σ w·op(x) with respect to x.
fn gradient(op: Op, xs: &Tensor, dim: usize, weights: &Tensor) -> Result<Tensor> {
    let var = Var::from_tensor(xs)?;
    let loss = (op.apply(&var, dim)? * weights)?.sum_all()?;
    match loss.backward()?.get(&var) {
        Some(grad) => Ok(grad.clone()),
        None => panic!("{op:?} lost the gradient of {:?}", xs.shape()),
    }
}

/// What a gradient is rounded by.
struct Rounding {
    /// Half a unit in the last place of what is stored, by which a probability and a gradient are rounded.
    unit: f64,
    /// The relative error of what is computed, of a sum by what the sum is made of.
    computed: f64,
    /// Of the smallest numbers, by which both are rounded at least.
    least: f64,
}

/// The same in f64 for one line, and what it may be off by.
fn expected(op: Op, line: &[f64], weights: &[f64], rounding: &Rounding) -> Vec<(f64, f64)> {
    let Rounding { unit, computed, least } = *rounding;
    let exact: Vec<_> = reference(line).collect();
    let log = op == Op::LogSoftmax;
    let share = |((p, ..), w): (&(f64, f64, f64), &f64)| if log { *w } else { p * w };
    let total: f64 = exact.iter().zip(weights).map(share).sum();
    let size: f64 = exact.iter().zip(weights).map(|pair| share(pair).abs()).sum();
    let one = |((p, log_p, shifted), w): (&(f64, f64, f64), &f64)| {
        let (gradient, stored, made) = if log {
            // exp(y) of a rounded y is off by exp(|y| unit), the gradient by its own rounding.
            let gradient = w - p * total;
            let stored = unit * gradient.abs() + (1.0 + unit) * p * total.abs() * (unit * log_p.abs()).exp_m1();
            (gradient, stored, w.abs() + p * size * (1.0 + log_p.abs()))
        } else {
            // p (w - total) is off by a unit of the gradient's own rounding and one of p's, and total by a unit of each of its terms.
            // A probability is computed to within 1e-6 + 1e-7 |x - max|, and so is what is made of it.
            let away = (w - total).abs();
            let stored = (1.0 + unit).powi(2) * p * (away + unit * size) - p * away;
            (p * (w - total), stored, p * (w.abs() + size) * (1.0 + 0.1 * shifted.abs()))
        };
        (gradient, stored + computed * made + least * (1.0 + w.abs() + total.abs()))
    };
    exact.iter().zip(weights).map(one).collect()
}

#[test]
fn finite_differences() -> Result<()> {
    for device in devices() {
        for (shape, dim) in [((3, 7, 1), 1), ((2, 5, 3), 1), ((4, 3, 2), 0), ((2, 2, 9), 2)] {
            let count = shape.0 * shape.1 * shape.2;
            let logits = normal(count, 1.0, 1);
            let weights = tensor(&normal(count, 1.0, 2), shape, DType::F64, &device)?;
            for op in Op::ALL {
                let loss = |logits: &[f64]| -> Result<f64> {
                    let ys = op.apply(&tensor(logits, shape, DType::F64, &device)?, dim)?;
                    (ys * &weights)?.sum_all()?.to_scalar::<f64>()
                };
                let found = values(&gradient(op, &tensor(&logits, shape, DType::F64, &device)?, dim, &weights)?)?;
                check_gradient(&found, &logits, &format!("{op:?} {shape:?} dim {dim}"), loss)?;
            }
        }
    }
    Ok(())
}

/// Both gradients along the second of three dimensions against the formula in f64.
pub fn check_formula(shape: (usize, usize, usize), dtype: DType, device: &Device) -> Result<()> {
    let (computed, least) = match dtype {
        DType::F64 => (1e-14, 0.0),
        DType::F32 => (1e-6, 1e-44),
        DType::F16 => (1e-6, 2f64.powi(-24)),
        _ => (1e-6, 1e-40),
    };
    let rounding = Rounding { unit: half_unit(dtype), computed, least };
    let (outer, len, inner) = shape;
    let count = outer * len * inner;
    if !within_cap(count) {
        return Ok(());
    }
    let plain = normal(count, 2.0, 3);
    // One element has most of its line: where it is, log-softmax's gradient is nearly the sum of the weights, and shows what that lacks.
    let place = |i: usize| i / inner % len;
    let peaked = plain.iter().enumerate().map(|(i, x)| if place(i) == len / 3 { x + 15.0 } else { *x }).collect();
    let weights = tensor(&normal(count, 1.0, 4), shape, dtype, device)?;
    let w = values(&weights)?;
    for (op, logits) in [(Op::Softmax, plain), (Op::LogSoftmax, peaked)] {
        let xs = tensor(&logits, shape, dtype, device)?;
        let logits = values(&xs)?;
        let found = values(&gradient(op, &xs, 1, &weights)?)?;
        for line in 0..outer * inner {
            let offsets: Vec<usize> = (0..len).map(|j| line / inner * len * inner + j * inner + line % inner).collect();
            let pick = |from: &[f64]| offsets.iter().map(|&i| from[i]).collect::<Vec<f64>>();
            let exact = expected(op, &pick(&logits), &pick(&w), &rounding);
            for (found, (exact, bound)) in pick(&found).iter().zip(exact) {
                assert!((found - exact).abs() <= bound, "{op:?} {dtype:?} {shape:?}: {found} for {exact}");
            }
        }
    }
    Ok(())
}

#[test]
fn formula_in_every_dtype() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            for shape in [
                (300, 20, 1),
                (5, 1000, 1),
                (1200, 7, 1),
                (700, 33, 1),
                (150, 511, 1),
                (40, 1021, 1),
                (1, 70_000, 1),
                (3, 50, 70),
                (1, 40, 20_000),
                (1, 200_000, 3),
                // With these, some roundings of half precision come together.
                (263, 4, 63),
                (263, 5, 63),
                (63, 4, 278),
            ] {
                check_formula(shape, dtype, &device)?;
            }
        }
    }
    Ok(())
}

/// Rows of any length side by side: shared by a part of a warp, a warp and a block, and lines that are split over several blocks,
/// or over all of a GPU.
#[test]
fn lines_side_by_side() -> Result<()> {
    let shapes = [
        (500, 33, 3),
        (500, 34, 3),
        (300, 128, 2),
        (900, 3, 2),
        (200, 20, 5),
        (40, 100, 25),
        (30, 64, 50),
        (7, 5001, 2),
        (3, 9000, 3),
        (2, 3000, 70),
        (1, 9001, 33),
        (1, 9001, 64),
        (300, 21, 65),
        (2, 30_000, 7),
        (1, 100_001, 4),
        (1, 13_000, 70),
        (1, 420_001, 1),
        // Both tensors in the registers of a thread, a warp, a block, and clusters, by packs, words and elements
        (9, 5, 264),
        (9, 7, 263),
        (3, 16, 1000),
        (3, 17, 1000),
        (2, 300, 257),
        (2, 1000, 260),
        (3, 777, 101),
        (1, 4097, 36),
        (2, 5000, 37),
        (1, 16_000, 24),
    ];
    for device in devices() {
        for dtype in DTYPES {
            for shape in shapes {
                check_formula(shape, dtype, &device)?;
            }
        }
    }
    Ok(())
}

/// Gradients that leave the caches, and such that threads write side by side.
#[test]
fn many_megabytes() -> Result<()> {
    check_many_megabytes()?;
    pool(1).install(check_many_megabytes)
}

fn check_many_megabytes() -> Result<()> {
    for device in devices() {
        for shape in [(33_000, 128, 1), (90_000, 48, 1), (9000, 500, 1), (1, 60, 20_000)] {
            check_formula(shape, DType::F32, &device)?;
        }
    }
    Ok(())
}

/// Every length of up to nine of the longest vectors of f32s.
#[test]
fn lines_of_few_vectors() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            for len in 1..=144 {
                check_formula((3, len, 1), dtype, &device)?;
            }
        }
    }
    Ok(())
}

/// Lines of as many elements as one large block, two, and more would have, and some that are not whole packs, of which each begins elsewhere in one.
#[test]
fn lines_of_few_blocks() -> Result<()> {
    for device in devices() {
        for (dtype, lengths) in [
            (DType::F64, [4096, 4104, 6144, 8192, 8200, 257, 1001, 4095, 4097, 8191]),
            (DType::F32, [8192, 8200, 12_288, 16_384, 16_392, 513, 577, 8191, 8193, 50_257]),
            (DType::F16, [16_384, 16_392, 24_576, 32_768, 32_776, 1027, 4097, 16_383, 16_385, 50_257]),
            (DType::BF16, [16_384, 16_392, 24_576, 32_768, 32_776, 1030, 8195, 16_381, 65_537, 70_001]),
        ] {
            for len in lengths {
                check_formula((if len % 8 == 0 { 3 } else { 9 }, len, 1), dtype, &device)?;
            }
        }
    }
    Ok(())
}

#[test]
fn every_op_has_the_gradient_of_candles_composed_softmax() -> Result<()> {
    let xs = tensor(&normal(6 * 11 * 40, 2.0, 5), (6, 11, 40), DType::F64, &Device::Cpu)?;
    let weights = tensor(&normal(6 * 11 * 40, 1.0, 6), (6, 11, 40), DType::F64, &Device::Cpu)?;
    for dim in 0..3 {
        for op in Op::ALL {
            let var = Var::from_tensor(&xs)?;
            let composed = if op == Op::LogSoftmax {
                candle_nn::ops::log_softmax(&var, dim)?
            } else {
                candle_nn::ops::softmax(&var, dim)?
            };
            let grads = (composed * &weights)?.sum_all()?.backward()?;
            let oracle = values(grads.get(&var).unwrap())?;
            for device in devices() {
                let found = gradient(op, &xs.to_device(&device)?, dim, &weights.to_device(&device)?)?;
                for (found, exact) in values(&found)?.iter().zip(&oracle) {
                    assert!((found - exact).abs() < 1e-14, "{op:?} dim {dim}: {found} for {exact}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn upstream_gradients_of_any_layout() -> Result<()> {
    for device in devices() {
        let xs = Var::from_tensor(&tensor(&normal(30 * 40, 2.0, 7), (30, 40), DType::F32, &device)?)?;
        let ys = xs.apply_op1(ReduceSoftmax)?;
        let other = tensor(&normal(40 * 30, 1.0, 8), (40, 30), DType::F32, &device)?;
        // The gradient arrives transposed.
        let transposed = Var::from_tensor(&xs.as_tensor().copy()?)?;
        let oracle = (candle_nn::ops::softmax(&transposed, 1)?.t()? * &other)?.sum_all()?.backward()?;
        let oracle = values(oracle.get(&transposed).unwrap())?;
        let grads = (ys.t()? * &other)?.sum_all()?.backward()?;
        for (found, exact) in values(grads.get(&xs).unwrap())?.iter().zip(oracle) {
            assert!((found - exact).abs() < 1e-6, "{found} for {exact}");
        }
        // It arrives as a broadcast scalar; probabilities sum to a constant, but for the roundings of their sum, its inverse
        // and the products.
        let grads = ys.sum_all()?.backward()?;
        assert!(values(grads.get(&xs).unwrap())?.iter().all(|grad| grad.abs() < 2.0 * f64::from(f32::EPSILON)));
    }
    Ok(())
}

#[test]
fn nothing_tracked_comes_back_untracked() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            let var = Var::from_tensor(&tensor(&normal(24, 1.0, 9), (2, 3, 4), dtype, &device)?)?;
            let views = [var.as_tensor().clone(), var.transpose(0, 2)?, var.narrow(1, 1, 2)?, var.narrow(0, 0, 0)?];
            for view in &views {
                for op in Op::ALL {
                    for dim in 0..3 {
                        assert!(op.apply(view, dim)?.track_op(), "{op:?} {dtype:?} {:?}", view.shape());
                    }
                }
            }
            for op in Op::ALL {
                assert!(!op.apply(&var.as_detached_tensor(), 2)?.track_op());
            }
        }
    }
    Ok(())
}

/// The gradient itself is a function of the result y and its gradient g; what `backward` of it says is checked against
/// finite differences, for all three unit structs and the functions.
#[test]
fn second_order() -> Result<()> {
    let (rows, cols) = (3, 6);
    let first_order = |name: &str, y: &Tensor, g: &Tensor| -> Result<Tensor> {
        let x = y; // only its shape is looked at
        let grad = match name {
            "safe" => SafeSoftmax.bwd(x, y, g)?,
            "online" => OnlineSoftmax.bwd(x, y, g)?,
            _ => ReduceSoftmax.bwd(x, y, g)?,
        };
        Ok(grad.expect("a gradient"))
    };
    for device in devices() {
        let make = |seed| tensor(&normal(rows * cols, 0.5, seed), (rows, cols), DType::F64, &device);
        let h = make(12)?;
        for name in ["safe", "online", "reduce"] {
            let (y, g) = (Var::from_tensor(&make(10)?)?, Var::from_tensor(&make(11)?)?);
            let grads = (first_order(name, &y, &g)? * &h)?.sum_all()?.backward()?;
            for (input, seed) in [(&y, 10), (&g, 11)] {
                let found = values(grads.get(input).expect("tracked"))?;
                let loss = |moved: &[f64]| -> Result<f64> {
                    let moved = tensor(moved, (rows, cols), DType::F64, &device)?;
                    let grad = if seed == 10 { first_order(name, &moved, &g)? } else { first_order(name, &y, &moved)? };
                    (grad * &h)?.sum_all()?.to_scalar::<f64>()
                };
                check_gradient(&found, &values(input)?, &format!("{name} of input {seed}"), loss)?;
            }
        }
    }
    Ok(())
}

/// Through log-softmax, of a loss whose gradient arrives as a constant, which candle may detach: the second derivative is that of the formula.
#[test]
fn second_order_of_log_softmax_is_tracked() -> Result<()> {
    for device in devices() {
        let x = Var::from_tensor(&tensor(&normal(5, 1.0, 13), 5, DType::F64, &device)?)?;
        let y = ops::log_softmax(&x, 0)?;
        let grads = (y * tensor(&normal(5, 1.0, 14), 5, DType::F64, &device)?)?.sum_all()?.backward()?;
        let p = values(&ops::softmax(&x, 0)?)?;
        let total: f64 = normal(5, 1.0, 14).iter().sum();
        // d/dx of w − p·Σw, summed: −Σw · Σ dp = 0, and weighted with the first unit vector: −Σw·p₀·(δ − p)
        let first = grads.get(&x).unwrap().narrow(0, 0, 1)?.sum_all()?;
        let second = first.backward()?;
        let found = values(second.get(&x).expect("the gradient is a tracked function of x"))?;
        for (i, found) in found.into_iter().enumerate() {
            let exact = -total * p[0] * (if i == 0 { 1.0 } else { 0.0 } - p[i]);
            assert!((found - exact).abs() < 1e-14, "element {i}: {found} for {exact}");
        }
    }
    Ok(())
}
