//! The greatest logits against a full sort, and their weights and gradients.

use crate::support::{check_element, devices, normal, reference, tensor, values, within_cap, Op, DTYPES};
use candle_core::{DType, Device, Result, Tensor, Var, D};
use candle_softmax::ops;
use half::{bf16, f16};
use std::cmp::Ordering;

/// The places of all elements, greatest first, NaN before anything, equal ones in their order.
fn sorted(line: &[f64]) -> Vec<u32> {
    let mut places: Vec<u32> = (0..line.len() as u32).collect();
    let greater = |a: f64, b: f64| match (a.is_nan(), b.is_nan()) {
        (true, true) => Ordering::Equal,
        (true, false) => Ordering::Less,
        (false, true) => Ordering::Greater,
        _ => b.partial_cmp(&a).unwrap(),
    };
    places.sort_by(|&a, &b| greater(line[a as usize], line[b as usize]));
    places
}

/// Whether these are the places of the greatest of each line.
pub fn check_places(xs: &Tensor, places: &Tensor) -> Result<()> {
    let k = places.dim(D::Minus1)?;
    let found = places.flatten_all()?.to_vec1::<u32>()?;
    for (line, places) in values(xs)?.chunks(xs.dim(D::Minus1)?).zip(found.chunks(k)) {
        assert_eq!(places, &sorted(line)[..k], "{:?} {:?} {:?}, k = {k}", xs.device(), xs.dtype(), xs.shape());
    }
    Ok(())
}

pub fn check(xs: &Tensor, k: usize) -> Result<()> {
    let len = xs.dim(D::Minus1)?;
    let inputs = values(xs)?;
    for renormalise in [true, false] {
        let (weights, places) = ops::topk_softmax(xs, k, renormalise)?;
        let mut shape = xs.dims().to_vec();
        *shape.last_mut().unwrap() = k;
        assert_eq!((weights.dims(), weights.dtype()), (&shape[..], xs.dtype()));
        assert_eq!((places.dims(), places.dtype()), (&shape[..], DType::U32));
        check_places(xs, &places)?;
        let (weights, places) = (values(&weights)?, places.flatten_all()?.to_vec1::<u32>()?);
        for ((line, weights), places) in inputs.chunks(len).zip(weights.chunks(k)).zip(places.chunks(k)) {
            let what = format!("{:?} {:?} {:?}, k = {k}", xs.device(), xs.dtype(), xs.shape());
            let chosen: Vec<f64> = places.iter().map(|&i| line[i as usize]).collect();
            let all: Vec<_> = reference(line).collect();
            let among: Vec<_> = reference(&chosen).collect();
            for (i, &found) in weights.iter().enumerate() {
                let exact = if renormalise { among[i] } else { all[places[i] as usize] };
                if let Err(error) = check_element(Op::Softmax, xs.dtype(), found, exact) {
                    panic!("{what}, renormalised {renormalise}, place {i}: {error}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn against_a_sort() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            // About as many elements as parts of a warp, and warps, have room for
            for (lines, len) in [
                (5, 1),
                (70, 7),
                (133, 8),
                (37, 13),
                (65, 16),
                (33, 30),
                (7, 64),
                (5, 100),
                (3, 256),
                (3, 257),
                (3, 384),
                (2, 512),
                (2, 513),
                (2, 1000),
                (3, 1025),
                (2, 5000),
            ] {
                // Whole numbers: many are equal.
                for values in
                    [normal(lines * len, 3.0, 1), normal(lines * len, 3.0, 2).iter().map(|x| x.round()).collect()]
                {
                    let xs = tensor(&values, (lines, len), dtype, &device)?;
                    for k in [1, 2, 8, len / 2, len].into_iter().filter(|k| (1..=len).contains(k)) {
                        check(&xs, k)?;
                    }
                }
            }
            if within_cap(2 * 128_256) {
                let xs = tensor(&normal(2 * 128_256, 3.0, 3), (2, 128_256), dtype, &device)?;
                for k in [1, 50, 2048, 2049] {
                    check(&xs, k)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn shapes_strides_and_special_values() -> Result<()> {
    const INF: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;
    for device in devices() {
        let xs = tensor(&normal(5 * 6 * 7, 2.0, 4), (5, 6, 7), DType::F32, &device)?;
        check(&xs, 3)?;
        check(&xs.transpose(0, 2)?, 3)?;
        check(&xs.narrow(1, 1, 3)?, 2)?;
        check(&xs.narrow(2, 1, 5)?, 2)?;
        check(&xs.flatten_all()?, 4)?;
        for dtype in DTYPES {
            let lines = [
                [-INF, 1.0, -INF, 2.0],
                [-0.0, 0.0, -1.0, 0.0],
                [NAN, INF, 1.0, NAN],
                [-NAN, 3.0, NAN, -INF],
                [-INF; 4],
            ];
            let xs = tensor(&lines.concat(), (5, 4), dtype, &device)?;
            for k in 1..=4 {
                check(&xs, k)?;
            }
        }
        let (weights, places) = ops::topk_softmax(&Tensor::zeros((0, 4), DType::F32, &device)?, 2, true)?;
        assert_eq!((weights.dims(), places.dims()), (&[0, 2][..], &[0, 2][..]));
    }
    Ok(())
}

/// Where the greatest are not spread over a line: in order, in a few places, among few that are not masked, be these the least numbers there are, or
/// where a kernel looks last, far from 0 and near each other; and lines that begin and end within 16 bytes.
#[test]
fn no_matter_where_the_greatest_are() -> Result<()> {
    const INF: f64 = f64::INFINITY;
    for device in devices() {
        for dtype in DTYPES {
            let least = match dtype {
                DType::F64 => f64::MIN,
                DType::F32 => f32::MIN.into(),
                DType::F16 => f16::MIN.into(),
                _ => bf16::MIN.into(),
            };
            for len in [1501, 9001, 70_001].into_iter().filter(|&len| within_cap(3 * len)) {
                let random = normal(3 * len, 3.0, 12);
                let ascending: Vec<f64> = random
                    .chunks(len)
                    .flat_map(|line| sorted(line).into_iter().rev().map(|i| line[i as usize]))
                    .collect();
                let descending = ascending.chunks(len).flat_map(|line| line.iter().rev().copied()).collect();
                let at_the_end =
                    random.iter().enumerate().map(|(i, x)| if i % len > len - 100 { 50.0 + x } else { *x });
                let few = random.iter().enumerate().map(|(i, x)| if i % 499 == 7 { *x } else { -INF });
                let least = (0..3 * len).map(|i| if i % 499 == 7 { least } else { -INF });
                let looked_at_last =
                    random.iter().enumerate().map(|(i, x)| if 4 * i % len > len / 4 * 3 { *x } else { -INF });
                let near = random.iter().map(|x| 100.0 + x / 16.0);
                let negative = random.iter().map(|x| -5.0 - x.abs());
                for values in [
                    ascending,
                    descending,
                    at_the_end.collect(),
                    few.collect(),
                    least.collect(),
                    looked_at_last.collect(),
                    near.collect(),
                    negative.collect(),
                ] {
                    let xs = tensor(&values, 3 * len, dtype, &device)?;
                    for k in [1, 8, 50, 130, 400] {
                        check(&xs.narrow(0, 1, 2 * len)?.reshape((2, len))?, k)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Of many equal numbers, more than are wanted, the first ones; in lines that a part of a warp, a block, and several blocks have.
#[test]
fn equal_numbers() -> Result<()> {
    const INF: f64 = f64::INFINITY;
    for device in devices() {
        for dtype in DTYPES {
            for len in [40, 1000, 3000, 70_000] {
                let few = normal(2 * len, 2.0, 7).iter().map(|x| x.round()).collect();
                let masked =
                    normal(2 * len, 3.0, 8).into_iter().enumerate().map(|(i, x)| if i % 97 == 5 { x } else { -INF });
                let special = (0..2 * len).map(|i| [0.0, -0.0, f64::NAN, -INF, -3.0, 3.0, INF][i * i % 7]);
                for values in [vec![1.5; 2 * len], few, masked.collect(), special.collect()] {
                    let xs = tensor(&values, (2, len), dtype, &device)?;
                    for k in [1, 20, 700].into_iter().filter(|&k| k <= len) {
                        check(&xs, k)?;
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn gradients() -> Result<()> {
    for device in devices() {
        let (shape, k) = ((3, 6), 2);
        let logits = normal(18, 2.0, 5);
        let w = tensor(&normal(6, 1.0, 6), (3, k), DType::F64, &device)?;
        for renormalise in [true, false] {
            let xs = Var::from_tensor(&tensor(&logits, shape, DType::F64, &device)?)?;
            let (weights, _) = ops::topk_softmax(&xs, k, renormalise)?;
            let grads = (weights * &w)?.sum_all()?.backward()?;
            let found = values(grads.get(&xs).expect("a gradient"))?;
            let loss = |logits: &[f64]| -> Result<f64> {
                let (weights, _) = ops::topk_softmax(&tensor(logits, shape, DType::F64, &device)?, k, renormalise)?;
                (weights * &w)?.sum_all()?.to_scalar()
            };
            for (i, found) in found.into_iter().enumerate() {
                let mut moved = logits.clone();
                moved[i] += 1e-6;
                let above = loss(&moved)?;
                moved[i] -= 2e-6;
                let slope = (above - loss(&moved)?) / 2e-6;
                assert!((found - slope).abs() < 1e-7, "{renormalise}, element {i}: {found} for {slope}");
            }
        }
    }
    Ok(())
}

/// Of every dtype, of lines of a warp, a block and several, and of more places than a block finds; logits with a layout of their own.
#[test]
fn gradients_of_lines() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            for (lines, len, k) in [
                (133, 8, 2),
                (67, 3, 3),
                (35, 21, 20),
                (33, 60, 4),
                (5, 100, 8),
                (9, 256, 8),
                (7, 300, 64),
                (3, 1000, 40),
                (2, 3000, 1),
                (1, 70_000, 50),
                (2, 3000, 2500),
            ] {
                let logits = tensor(&normal(lines * len, 2.0, 9), (len, lines), dtype, &device)?;
                let xs = Var::from_tensor(&logits)?;
                let g = tensor(&normal(lines * k, 1.0, 10), (lines, k), dtype, &device)?;
                let (inputs, g_values) = (values(&xs.t()?.contiguous()?)?, values(&g)?);
                for renormalise in [true, false] {
                    let what = format!("{device:?} {dtype:?} {lines} x {len}, k = {k}, {renormalise}");
                    let (weights, places) = ops::topk_softmax(&xs.t()?, k, renormalise)?;
                    assert!(weights.track_op() && !places.track_op());
                    let grads = (weights * &g)?.sum_all()?.backward()?;
                    let found = values(&grads.get(&xs).expect("a gradient").t()?.contiguous()?)?;
                    let places = places.flatten_all()?.to_vec1::<u32>()?;
                    let unit = match dtype {
                        DType::F64 => 1e-14,
                        DType::F32 => 1e-6,
                        DType::F16 => 2e-3,
                        _ => 1.6e-2,
                    };
                    for line in 0..lines {
                        let (of_line, of_places) = (line * len..(line + 1) * len, line * k..(line + 1) * k);
                        let (x, g, places) =
                            (&inputs[of_line.clone()], &g_values[of_places.clone()], &places[of_places]);
                        let chosen: Vec<f64> = places.iter().map(|&i| x[i as usize]).collect();
                        let p: Vec<f64> = reference(x).map(|(p, ..)| p).collect();
                        let w: Vec<f64> = match renormalise {
                            true => reference(&chosen).map(|(p, ..)| p).collect(),
                            false => places.iter().map(|&i| p[i as usize]).collect(),
                        };
                        let dot: f64 = w.iter().zip(g).map(|(w, g)| w * g).sum();
                        let size: f64 = w.iter().zip(g).map(|(w, g)| (w * g).abs()).sum();
                        let mut exact: Vec<(f64, f64)> = match renormalise {
                            true => vec![(0.0, 0.0); len],
                            false => p.iter().map(|p| (-p * dot, p * size)).collect(),
                        };
                        for ((&place, w), g) in places.iter().zip(w).zip(g) {
                            exact[place as usize] = (w * (g - dot), w * (g.abs() + size));
                        }
                        for (i, (found, (exact, size))) in found[of_line].iter().zip(exact).enumerate() {
                            let bound = unit * size + if dtype == DType::F16 { 1e-7 } else { 1e-38 };
                            assert!((found - exact).abs() <= bound, "{what}, {line}, {i}: {found} for {exact}");
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// A gradient that is there, of logits that are a part of another tensor, and none where nothing is tracked.
#[test]
fn gradients_of_a_part() -> Result<()> {
    for device in devices() {
        let xs = Var::from_tensor(&tensor(&normal(40, 1.0, 11), (4, 10), DType::F32, &device)?)?;
        for renormalise in [true, false] {
            let (weights, _) = ops::topk_softmax(&xs.narrow(0, 1, 2)?, 3, renormalise)?;
            let grads = weights.sqr()?.sum_all()?.backward()?;
            let found = values(grads.get(&xs).expect("a gradient"))?;
            assert!(found[10..30].iter().any(|&g| g != 0.0));
            assert!(found[..10].iter().chain(&found[30..]).all(|&g| g == 0.0));
            assert!(!ops::topk_softmax(&xs.detach(), 3, renormalise)?.0.track_op());
        }
    }
    Ok(())
}

/// The gradient goes by the places, which callers have, too: it is never read or written at what is none of them.
#[test]
fn places_written_over() -> Result<()> {
    for device in devices() {
        for renormalise in [true, false] {
            let xs = Var::from_tensor(&tensor(&normal(12, 1.0, 13), (3, 4), DType::F32, &device)?)?;
            let (weights, places) = ops::topk_softmax(&xs, 2, renormalise)?;
            places.slice_set(&Tensor::full(u32::MAX, (1, 2), &device)?, 0, 1)?;
            match weights.sum_all()?.backward() {
                Ok(grads) => {
                    assert!(device.is_cuda());
                    let found = values(grads.get(&xs).expect("a gradient"))?;
                    let is_lost = |g: &f64| if renormalise { *g == 0.0 } else { g.is_nan() };
                    assert!(found[4..8].iter().all(is_lost), "{found:?}");
                    assert!(found[..4].iter().chain(&found[8..]).all(|g| g.is_finite()), "{found:?}");
                }
                Err(error) => {
                    let message = error.to_string();
                    assert!(
                        device.is_cpu() && message.contains("topk-softmax") && message.contains("places"),
                        "{message}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn second_order_is_an_error() -> Result<()> {
    for device in devices() {
        for renormalise in [true, false] {
            let xs = Var::from_tensor(&tensor(&normal(20, 1.0, 14), (4, 5), DType::F32, &device)?)?;
            let (weights, _) = ops::topk_softmax(&xs, 2, renormalise)?;
            let gradient = weights.sqr()?.sum_all()?.backward()?.get(&xs).expect("a gradient").clone();
            let message = gradient.sum_all()?.backward().expect_err("no second derivative").to_string();
            assert!(message.contains("topk-softmax-backward"), "{message}");
        }
    }
    Ok(())
}

#[test]
fn errors_say_what_would_work() -> Result<()> {
    let xs = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
    for k in [0, 4] {
        let message = ops::topk_softmax(&xs, k, true).unwrap_err().to_string();
        assert!(
            message.contains("topk-softmax") && message.contains("1 to 3") && message.contains("[2, 3]"),
            "{message}"
        );
    }
    let message = ops::topk_softmax(&xs.get(0)?.narrow(0, 0, 1)?.expand(1 << 33)?, 2, true).unwrap_err().to_string();
    assert!(message.contains("topk-softmax") && message.contains("up to 4294967295 elements"), "{message}");
    let message = ops::topk_softmax(&xs.to_dtype(DType::U32)?, 1, true).unwrap_err().to_string();
    assert!(message.contains("U32"), "{message}");
    assert!(ops::topk_softmax(&Tensor::zeros((), DType::F32, &Device::Cpu)?, 1, true).is_err());
    Ok(())
}
