//! Special values, empty tensors, layouts and errors.

use crate::support::{check, check_result, devices, normal, tensor, values, within_cap, Op, DTYPES};
use candle_core::{DType, Device, Result, Tensor, Var, D};
use candle_softmax::loss::CrossEntropy;
use candle_softmax::testing::{gpu_count, say_skipped};
use candle_softmax::{ops, ReduceSoftmax, Softmax};

const INF: f64 = f64::INFINITY;
const NAN: f64 = f64::NAN;

/// Applies `op` to lines of `line`, once along the last dimension and once across it, at lengths that reach each kernel:
/// the line is repeated.
fn on_lines(op: Op, line: &[f64], dtype: DType, device: &Device, each: impl Fn(&[f64])) -> Result<()> {
    for repeats in [1, 20, 700] {
        let line = line.repeat(repeats);
        let rows = tensor(&line.repeat(3), (3, line.len()), dtype, device)?;
        values(&op.apply(&rows, 1)?)?.chunks(line.len()).for_each(&each);
        let columns = rows.t()?.contiguous()?;
        values(&op.apply(&columns, 0)?.t()?)?.chunks(line.len()).for_each(&each);
    }
    Ok(())
}

#[test]
fn nan_or_inf_gives_nan_for_the_line() -> Result<()> {
    for device in devices() {
        for (op, dtype) in Op::ALL.into_iter().flat_map(|op| DTYPES.map(|dtype| (op, dtype))) {
            for special in [
                [0., NAN, 1.],
                [NAN, 0., 1.],
                [0., INF, 1.],
                [INF, INF, INF],
                [NAN, NAN, NAN],
                [-INF, NAN, -INF],
                [-INF, INF, 0.],
                [-INF; 3],
            ] {
                on_lines(op, &special, dtype, &device, |line| {
                    assert!(line.iter().all(|y| y.is_nan()), "{op:?} {dtype:?} of {special:?}: {line:?}");
                })?;
            }
        }
    }
    Ok(())
}

/// On Hopper kernels are set up while those before them run: what one reads may be written by any of them.
#[test]
fn ops_that_follow_each_other() -> Result<()> {
    for device in devices() {
        let large = tensor(&normal(16 * 500 * 32, 3.0, 1), (16, 500, 32), DType::F32, &device)?;
        let small = tensor(&normal(64, 3.0, 2), (8, 8), DType::F32, &device)?;
        // All of them are launched before anything is looked at.
        let results = (0..4).map(|_| {
            let p = ops::softmax(&large, 1)?;
            let between = (0..3).map(|_| ops::softmax(&small, 1)).collect::<Result<Vec<_>>>()?;
            let of_p = ops::log_softmax(&p, 1)?;
            Ok((p, between, of_p))
        });
        for (p, between, of_p) in results.collect::<Result<Vec<_>>>()? {
            check_result(Op::Softmax, &large, 1, &p)?;
            between.iter().try_for_each(|q| check_result(Op::Softmax, &small, 1, q))?;
            check_result(Op::LogSoftmax, &p, 1, &of_p)?;
        }
    }
    Ok(())
}

#[test]
fn a_bad_line_leaves_its_neighbours_alone() -> Result<()> {
    for device in devices() {
        let mut logits = normal(9 * 200, 2.0, 1);
        logits[4 * 200 + 7] = NAN;
        let xs = tensor(&logits, (9, 200), DType::F32, &device)?;
        for op in Op::ALL {
            check(op, &xs, 1)?;
            check(op, &xs.t()?.contiguous()?, 0)?;
        }
    }
    Ok(())
}

#[test]
fn minus_inf_beside_finite_numbers_gives_exact_zero() -> Result<()> {
    for device in devices() {
        for (op, dtype) in Op::ALL.into_iter().flat_map(|op| DTYPES.map(|dtype| (op, dtype))) {
            on_lines(op, &[-INF, 2.0, -INF, -INF], dtype, &device, |line| {
                for (i, &y) in line.iter().enumerate() {
                    match (i % 4 == 1, op) {
                        (true, Op::LogSoftmax) => assert!((y + (line.len() as f64 / 4.0).ln()).abs() < 0.03, "{y}"),
                        (true, _) => assert!((y * line.len() as f64 / 4.0 - 1.0).abs() < 0.01, "{y}"),
                        (false, Op::LogSoftmax) => assert_eq!(y, -INF),
                        (false, _) => assert_eq!(y, 0.0),
                    }
                }
            })?;
        }
    }
    Ok(())
}

/// What lies beside a line in memory, here NaN, +∞ or a line of other numbers, reaches none of its results.
#[test]
fn lines_that_begin_at_any_element() -> Result<()> {
    let lengths =
        [1, 3, 7, 8, 13, 24, 31, 64, 100, 129, 513, 1000, 1032, 2049, 4097, 5000, 8193, 16_385, 33_000, 140_001];
    for (device, dtype) in devices().into_iter().flat_map(|device| DTYPES.map(|dtype| (device.clone(), dtype))) {
        for len in lengths.into_iter().filter(|len| within_cap(3 * len + 20)) {
            for (offset, behind) in (0..if len > 5000 { 3 } else { 9 }).flat_map(|offset| [(offset, 0), (offset, 5)]) {
                let lines = normal(3 * len, 5.0, len as u64).into_iter().enumerate();
                let lines = lines.map(|(i, x)| if i / len == 1 { x + 100.0 } else { x });
                let before = std::iter::repeat_n(f64::NAN, offset);
                let all: Vec<f64> = before.chain(lines).chain(std::iter::repeat_n(f64::INFINITY, behind)).collect();
                let all = tensor(&all, all.len(), dtype, &device)?;
                for op in Op::ANY_DIM {
                    check(op, &all.narrow(0, offset, 3 * len)?.reshape((3, len))?, 1)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn lines_of_length_one() -> Result<()> {
    for device in devices() {
        for (op, dtype) in Op::ALL.into_iter().flat_map(|op| DTYPES.map(|dtype| (op, dtype))) {
            let one = if op == Op::LogSoftmax { 0.0 } else { 1.0 };
            let xs = tensor(&normal(300, 50.0, 2), (300, 1), dtype, &device)?;
            assert_eq!(values(&op.apply(&xs, 1)?)?, [one; 300]);
            assert_eq!(values(&op.apply(&xs.t()?, 0)?)?, [one; 300]);
            assert_eq!(values(&op.apply(&xs.flatten_all()?.reshape((300, 1, 1))?, 1)?)?, [one; 300]);
        }
    }
    Ok(())
}

/// Parts of nothing, which candle says to begin behind it.
#[test]
fn empty_parts_come_back_empty() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            let all = Tensor::zeros((0, 5), dtype, &device)?;
            let part = all.narrow(1, 3, 2)?;
            for dim in 0..2 {
                for op in Op::ANY_DIM {
                    assert_eq!(op.apply(&part, dim)?.dims(), [0, 2]);
                }
                ops::softmax_inplace(&part, dim)?;
            }
            for op in Op::ALL {
                assert_eq!(op.apply(&part, 1)?.dims(), [0, 2]);
            }
            part.inplace_op1(&ReduceSoftmax)?;
            assert_eq!(ops::logsumexp(&part, 1)?.dims(), [0]);
            assert_eq!(values(&ops::logsumexp(&part, 0)?)?, [f64::NEG_INFINITY; 2]);
            assert_eq!(ops::topk_softmax(&part, 1, true)?.0.dims(), [0, 1]);
            assert_eq!(Softmax::new().bias(&part.narrow(1, 0, 1)?).forward(&part)?.dims(), [0, 2]);
        }
        let var = Var::zeros((0, 5), DType::F32, &device)?;
        let part = var.narrow(1, 3, 2)?;
        let targets = Tensor::zeros(0, DType::I64, &device)?;
        for ys in [ops::softmax(&part, 1)?, ops::logsumexp(&part, 1)?, CrossEntropy::new().forward(&part, &targets)?] {
            assert!(ys.track_op());
            if device.is_cpu() {
                // candle sums no empty tensor on CUDA.
                ys.sum_all()?.backward()?;
            }
        }
    }
    Ok(())
}

#[test]
fn empty_tensors_come_back_empty() -> Result<()> {
    for device in devices() {
        for (op, dtype) in Op::ALL.into_iter().flat_map(|op| DTYPES.map(|dtype| (op, dtype))) {
            for shape in [vec![0], vec![4, 0], vec![0, 4], vec![2, 0, 3], vec![0, 0]] {
                let xs = Var::from_tensor(&Tensor::zeros(shape.clone(), dtype, &device)?)?;
                for dim in 0..shape.len() {
                    let ys = op.apply(&xs, dim)?;
                    assert_eq!((ys.dims(), ys.dtype()), (&shape[..], dtype), "{op:?}");
                    assert!(ys.track_op(), "{op:?} dropped the gradient of an empty tensor");
                }
            }
            // A part of a tensor that has elements
            let part = Tensor::zeros((4, 5), dtype, &device)?.narrow(0, 2, 0)?;
            assert_eq!(op.apply(&part, 1)?.dims(), [0, 5]);
        }
    }
    Ok(())
}

#[test]
fn ranks_1_to_8_and_every_way_to_name_a_dimension() -> Result<()> {
    for device in devices() {
        for rank in 1..=8 {
            let shape: Vec<usize> = (0..rank).map(|i| 2 + i % 3).collect();
            let xs = tensor(&normal(shape.iter().product(), 3.0, rank as u64), shape, DType::F32, &device)?;
            for dim in 0..rank {
                for op in Op::ALL {
                    check(op, &xs, dim)?;
                }
                let from_end = D::Minus(rank - dim);
                check_result(Op::Softmax, &xs, dim, &ops::softmax(&xs, from_end)?)?;
                check_result(Op::LogSoftmax, &xs, dim, &ops::log_softmax(&xs, from_end)?)?;
            }
            check_result(Op::Softmax, &xs, rank - 1, &ops::softmax(&xs, D::Minus1)?)?;
            if rank > 1 {
                check_result(Op::Softmax, &xs, rank - 2, &ops::softmax(&xs, D::Minus2)?)?;
            }
        }
    }
    Ok(())
}

#[test]
fn any_strides_and_start_offset() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            // Long lines where there is time for them
            let cols = if within_cap(6 * 50 * 70) { 70 } else { 12 };
            let xs = tensor(&normal(6 * 50 * cols, 3.0, 3), (6, 50, cols), dtype, &device)?;
            let views = [
                xs.narrow(0, 1, 4)?,
                xs.narrow(0, 5, 1)?.narrow(1, 3, 30)?,
                xs.narrow(2, 1, cols / 2)?,
                xs.narrow(1, 7, 11)?,
                xs.transpose(0, 2)?,
                xs.permute((1, 2, 0))?,
                xs.narrow(0, 2, 1)?.broadcast_as((3, 50, cols))?,
                xs.narrow(2, 9, 1)?.broadcast_as((6, 50, 12))?,
                xs.flatten_all()?.narrow(0, 1, 300 * cols - 7)?,
            ];
            for view in &views {
                for op in Op::ALL {
                    for dim in 0..view.rank() {
                        check(op, view, dim)?;
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn results_are_contiguous_and_stand_alone() -> Result<()> {
    for device in devices() {
        let xs = tensor(&normal(40 * 30, 3.0, 4), (40, 30), DType::F32, &device)?;
        for dim in 0..2 {
            let ys = ops::softmax(&xs.t()?, dim)?;
            assert!(ys.is_contiguous() && ys.layout().start_offset() == 0);
        }
    }
    Ok(())
}

#[test]
fn unsupported_dtypes_are_errors_that_say_so() -> Result<()> {
    for device in devices() {
        for dtype in [DType::U8, DType::U32, DType::I64, DType::I16, DType::I32, DType::F8E4M3] {
            let xs = Tensor::zeros((2, 3), dtype, &device)?;
            for op in Op::ALL {
                let error = op.apply(&xs, 1).unwrap_err().to_string();
                assert!(
                    error.contains("softmax") && error.contains(&format!("{dtype:?}")) && error.contains("to_dtype"),
                    "{error}"
                );
            }
            let error = ops::softmax(&Tensor::zeros((0, 3), dtype, &device)?, 0).unwrap_err().to_string();
            assert!(error.contains(&format!("{dtype:?}")), "{error}");
        }
    }
    Ok(())
}

#[test]
fn any_device_ordinal() -> Result<()> {
    if gpu_count() < 2 {
        say_skipped("other GPUs", "there is no second one");
    }
    for ordinal in 1..gpu_count() {
        let device = Device::new_cuda(ordinal)?;
        let xs = tensor(&normal(64 * 3000, 3.0, 8), (64, 3000), DType::F32, &device)?;
        for op in Op::ALL {
            check(op, &xs, 1)?;
            check(op, &xs, 0)?;
        }
        let var = Var::from_tensor(&xs)?;
        let grads = ops::softmax(&var, 1)?.sqr()?.sum_all()?.backward()?;
        assert!(grads.get(&var).is_some());
    }
    Ok(())
}
