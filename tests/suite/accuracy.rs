//! The bounds hold for lines of any length, and for the lines that hurt: uniform, rising, falling, far from zero.

use crate::support::{
    begin_low, check, devices, far_from_each_other, gpu_for, normal, pool, tensor, within_cap, Op, DTYPES,
};
use candle_core::{DType, Result};

fn lines(len: usize) -> Vec<(&'static str, Vec<f64>)> {
    let at = |f: fn(f64) -> f64| (0..len).map(|i| f(i as f64 / len as f64)).collect::<Vec<f64>>();
    vec![
        ("uniform", vec![0.3; len]),
        ("normal", normal(len, 1.0, len as u64)),
        ("wide", normal(len, 30.0, len as u64)),
        ("rising slowly", at(|t| t * 12.0)),
        ("rising fast", at(|t| t * 5000.0)),
        ("falling", at(|t| -t * 100.0)),
        ("just below 2^31", (0..len).map(|i| 2_147_483_520.0 - 128.0 * (i % 2) as f64).collect()),
        ("far below zero", at(|t| -1000.0 - 3.0 * (t * 1e4).sin())),
        ("two levels", (0..len).map(|i| if i % 1000 == 999 { 9.0 } else { -0.7 }).collect()),
    ]
}

fn check_lines(len: usize, dtypes: &[DType], ops: &[Op], kinds: &[&str]) -> Result<()> {
    if !within_cap(len) {
        return Ok(());
    }
    for (kind, line) in lines(len) {
        if !kinds.is_empty() && !kinds.contains(&kind) {
            continue;
        }
        for device in devices() {
            for &dtype in dtypes {
                let xs = tensor(&line, (1, len), dtype, &device)?;
                for &op in ops {
                    check(op, &xs, 1)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn short_lines() -> Result<()> {
    for len in (1..70).chain([100, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000]) {
        check_lines(len, &DTYPES, &Op::ALL, &[])?;
    }
    Ok(())
}

#[test]
fn middle_lines() -> Result<()> {
    for len in [2047, 4096, 8191, 8193, 16_384, 32_768, 65_537, 100_003, 262_144] {
        check_lines(len, &DTYPES, &Op::ALL, &[])?;
    }
    Ok(())
}

/// Many lines of which one element has nearly all: whatever exponentials are relative to, its probability is right. Also where the first
/// elements are far below zero and later ones just below: there a difference is rounded most.
#[test]
fn lines_with_one_great_element() -> Result<()> {
    for (len, inner) in [(17, 4000), (40, 2000), (121, 3000), (500, 400)] {
        let count = len * inner;
        if !within_cap(count) {
            continue;
        }
        let wide = normal(count, 10.0, count as u64);
        let low: Vec<f64> = wide.iter().map(|x| x - 20.0).collect();
        let rising: Vec<f64> = (normal(count, 2.0, len as u64).iter().enumerate())
            .map(|(i, x)| if i / inner < 16 { -9.0 - x.abs() } else { -0.75 - x.abs() })
            .collect();
        for values in [wide, low, rising] {
            for device in devices() {
                let columns = tensor(&values, (len, inner), DType::F32, &device)?;
                check(Op::Softmax, &columns, 0)?;
                check(Op::Softmax, &columns.t()?.contiguous()?, 1)?;
                // Not more than one strip wide
                check(Op::Softmax, &columns.reshape((len, inner / 8, 8))?.transpose(0, 1)?.contiguous()?, 1)?;
            }
        }
    }
    Ok(())
}

/// Lines of about as many elements as a block has registers for, with and without what lies beside them in their first sector.
#[test]
fn lines_that_fill_a_block() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            for len in [8190, 16_377, 16_380, 16_383, 16_384, 32_763] {
                let count = 40 * len;
                if !within_cap(count) {
                    continue;
                }
                let all = tensor(&normal(count + 1, 3.0, len as u64), count + 1, dtype, &device)?;
                for at in [0, 1] {
                    let xs = all.narrow(0, at, count)?.reshape((40, len))?;
                    check(Op::Softmax, &xs, 1)?;
                    check(Op::LogSoftmax, &xs, 1)?;
                }
            }
        }
    }
    Ok(())
}

/// Results that leave the caches, and such that threads write side by side.
#[test]
fn many_megabytes() -> Result<()> {
    check_many_megabytes()?;
    pool(1).install(check_many_megabytes)
}

fn check_many_megabytes() -> Result<()> {
    for device in devices() {
        for (shape, dim) in [((33_000, 128), 1), ((9000, 500), 1), ((4200, 1024), 1), ((60, 20_000), 0)] {
            let count = shape.0 * shape.1;
            if within_cap(count) {
                let xs = tensor(&normal(count, 3.0, 8), shape, DType::F32, &device)?;
                check(Op::Softmax, &xs, dim)?;
                check(Op::LogSoftmax, &xs, dim)?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_million() -> Result<()> {
    check_lines(1 << 20, &DTYPES, &Op::ALL, &["uniform", "wide", "rising slowly", "two levels"])
}

#[test]
fn sixteen_million() -> Result<()> {
    let ops = [Op::Safe, Op::Online, Op::Reduce, Op::Softmax, Op::LogSoftmax];
    check_lines(1 << 24, &[DType::F32, DType::F64], &ops, &["uniform", "rising slowly"])?;
    check_lines(1 << 24, &[DType::F16, DType::BF16], &ops, &["uniform"])
}

/// Lines whose first elements say little about the others: what is above them comes late, or they are masked. Each lies between lines
/// of other kinds.
#[test]
fn lines_that_begin_low() -> Result<()> {
    for len in [257, 300, 512, 1000, 2048, 4096] {
        let lines = begin_low(len);
        let first = |count: usize, x: f64| {
            let mut line = lines[0].clone();
            line[..count].fill(x);
            line
        };
        // Only here: in half precision it is ∞.
        let f32_only = [-1e9, -1e30, f32::MIN as f64].map(|masked| first(len / 2, masked));
        for device in devices() {
            for dtype in DTYPES {
                let mut lines = lines.clone();
                if matches!(dtype, DType::F32 | DType::F64) {
                    lines.extend_from_slice(&f32_only);
                }
                let xs = tensor(&lines.concat(), (lines.len(), len), dtype, &device)?;
                // And side by side, where what moves one line moves its neighbours' sums.
                let columns = xs.t()?.contiguous()?;
                for op in [Op::Softmax, Op::LogSoftmax] {
                    check(op, &xs, 1)?;
                    check(op, &columns, 0)?;
                }
            }
        }
    }
    Ok(())
}

/// Short lines of which many are in work together, relative to what is the maximum of one of them.
#[test]
fn lines_far_from_each_other() -> Result<()> {
    for len in [1, 2, 6, 8, 10, 15, 16, 17, 64, 65, 100, 256] {
        for set in far_from_each_other(len) {
            for device in devices() {
                for dtype in DTYPES {
                    let xs = tensor(&set, (set.len() / len, len), dtype, &device)?;
                    check(Op::Softmax, &xs, 1)?;
                    check(Op::LogSoftmax, &xs, 1)?;
                }
            }
        }
    }
    Ok(())
}

/// One element far above all others, which is read with one of the chunks that a GPU's blocks share a line in and written with the one before,
/// since the tensor begins elsewhere than its result: as the elements 2047 and 4095 are.
#[test]
fn a_great_element_between_chunks() -> Result<()> {
    let len = (1 << 23) + 1;
    if !within_cap(len) {
        return Ok(());
    }
    for device in devices() {
        for (skipped, place) in [(1, 2047), (7, 4095)] {
            let mut numbers = vec![0.0; skipped + len];
            numbers[skipped + place] = 200.0;
            let xs = tensor(&numbers, numbers.len(), DType::F16, &device)?.narrow(0, skipped, len)?.unsqueeze(0)?;
            check(Op::Softmax, &xs, 1)?;
        }
    }
    Ok(())
}

/// The same for so many long lines of half precision that each has multiprocessors of its own, from a tensor's first element on and from
/// others; among them what is far from zero or no number. Of the second length, halves are whole steps of a block's threads.
#[test]
fn long_lines_that_begin_low() -> Result<()> {
    let Some(gpu) = gpu_for(64 * 99_000) else { return Ok(()) };
    for (len, dtype, far) in [
        (99_000, DType::BF16, 1e30),
        (99_000, DType::BF16, 1.04e6),
        (99_000, DType::F16, 60_000.0),
        (2 * 5 * 640 * 8, DType::F16, 60_000.0),
    ] {
        let mut all = begin_low(len);
        let with = |place: usize, x: f64| {
            let mut line = all[0].clone();
            line[place] = x;
            line
        };
        let levels = |low: f64, high: f64| (0..len).map(|i| if i % 999 == 998 { high } else { low }).collect();
        let others = [
            with(len - 1, f64::NAN),
            with(0, f64::NAN),
            with(len / 2, f64::INFINITY),
            vec![0.3; len],
            normal(len, 30.0, 3),
            levels(far, far * 1.02),
            levels(-far * 1.02, -far),
            levels(far, 0.0),
        ];
        all.truncate(all.len() - others.len());
        all.extend(others);
        let count = all.len();
        let numbers = all.concat();
        for skipped in [0, 1, 6] {
            let mut numbers = numbers.clone();
            numbers.splice(..0, std::iter::repeat_n(f64::NAN, skipped));
            let xs = tensor(&numbers, numbers.len(), dtype, &gpu)?;
            let xs = xs.narrow(0, skipped, count * len)?.reshape((count, len))?;
            for op in [Op::Softmax, Op::LogSoftmax] {
                check(op, &xs, 1)?;
            }
        }
    }
    Ok(())
}

/// The same side by side, of tensors that the multiprocessors hold at once: a strip one of them, two, four and 16, and two strips one;
/// the last strip is narrower in some.
#[test]
fn columns_that_begin_low() -> Result<()> {
    let Some(gpu) = gpu_for(0) else { return Ok(()) };
    for (outer, len, inner, dtype) in [
        (2, 1501, 4096, DType::BF16),
        (1, 4101, 4104, DType::F16),
        (1, 300, 136, DType::BF16),
        (1, 1500, 72, DType::F16),
        (200, 130, 64, DType::BF16),
    ] {
        if !within_cap(outer * len * inner) {
            continue;
        }
        let mut lines = begin_low(len);
        let with = |place: usize, x: f64| {
            let mut line = lines[0].clone();
            line[place] = x;
            line
        };
        let others = [
            with(len - 1, f64::NAN),
            with(0, f64::INFINITY),
            with(len - 1, f64::INFINITY),
            with(len / 2, 60_000.0),
            vec![f64::NEG_INFINITY; len],
            normal(len, 30.0, 3),
        ];
        lines.extend(others);
        lines.extend(great_lines(len, dtype));
        // Neighbours are of different kinds, and each kind is in all places of a pack.
        let count = lines.len() | 1;
        lines.resize(count, vec![0.3; len]);
        let numbers: Vec<f64> = (0..outer * len * inner).map(|i| lines[i % inner % count][i / inner % len]).collect();
        let xs = tensor(&numbers, (outer, len, inner), dtype, &gpu)?;
        for op in Op::ANY_DIM {
            check(op, &xs, 1)?;
        }
    }
    Ok(())
}

/// Lines of numbers up to the greatest, of which nothing that is added to or multiplied with them may make an infinity or another number.
fn great_lines(len: usize, dtype: DType) -> Vec<Vec<f64>> {
    let greatest = match dtype {
        DType::F16 => 65_504.0,
        DType::BF16 => 255.0 * 2f64.powi(120),
        DType::F32 => f64::from(f32::MAX),
        _ => f64::MAX,
    };
    let in_turn = |numbers: &[f64]| (0..len).map(|i| numbers[i * 7 % len % numbers.len()]).collect::<Vec<_>>();
    let mut lines = [&[1.0][..], &[-1.0], &[1.0, -1.0], &[1.0, 0.75, 0.5], &[-1.0, -0.75], &[0.0, -1.0]]
        .map(|parts| in_turn(&parts.iter().map(|part| part * greatest).collect::<Vec<_>>()))
        .to_vec();
    if dtype != DType::F16 {
        // About where one way of computing ends and the next begins
        for power in [20, 30, 31, 40] {
            let at = 2f64.powi(power);
            lines.extend(
                [1.0, -1.0].map(|sign| in_turn(&[sign * at, sign * at * (1.0 - 1.0 / 256.0), sign * at / 2.0])),
            );
        }
    }
    lines
}

#[test]
fn great_numbers() -> Result<()> {
    for len in [1, 16, 40, 100, 257, 1000, 3000, 5000, 20_000] {
        for dtype in DTYPES {
            let lines = great_lines(len, dtype);
            let count = lines.len() * 8;
            if !within_cap(count * len) {
                continue;
            }
            let numbers: Vec<f64> = (0..count * len).map(|i| lines[i / len % lines.len()][i % len]).collect();
            let side_by_side: Vec<f64> = (0..count * len).map(|i| lines[i % count % lines.len()][i / count]).collect();
            for device in devices() {
                let xs = tensor(&numbers, (count, len), dtype, &device)?;
                for op in Op::ALL {
                    check(op, &xs, 1)?;
                }
                let xs = tensor(&side_by_side, (1, len, count), dtype, &device)?;
                for op in Op::ANY_DIM {
                    check(op, &xs, 1)?;
                }
            }
        }
    }
    Ok(())
}

/// Across another dimension, where the schedules walk lines side by side.
#[test]
fn columns() -> Result<()> {
    for (len, inner) in [(5, 3), (100, 64), (250, 300), (1000, 65), (4097, 130), (60_000, 2), (1_000_000, 3)] {
        if !within_cap(len * inner) {
            continue;
        }
        for (_, line) in lines(len) {
            let values: Vec<f64> = line.iter().flat_map(|&x| (0..inner).map(move |i| x + i as f64 * 0.01)).collect();
            for device in devices() {
                for dtype in if len > 100_000 { &DTYPES[..1] } else { &DTYPES[..] } {
                    let xs = tensor(&values, (1, len, inner), *dtype, &device)?;
                    for op in Op::ANY_DIM {
                        check(op, &xs, 1)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Probabilities down to the smallest subnormal are neither flushed to zero nor coarser than f32 has them.
#[test]
fn subnormal_results() -> Result<()> {
    for device in devices() {
        let line: Vec<f64> = (0..1100).map(|i| -i as f64 / 10.0).collect();
        for dtype in [DType::F32, DType::BF16] {
            let xs = tensor(&line, (1, line.len()), dtype, &device)?;
            for op in Op::ALL {
                check(op, &xs, 1)?;
                check(op, &xs.t()?.contiguous()?, 0)?;
            }
        }
        // The maximum comes last, long after the small ones were taken relative to another.
        for max in [60.0, 61.5, 64.0] {
            let line: Vec<f64> =
                (0..16_000).map(|i| if i < 15_999 { max - 98.4 - (i % 7) as f64 * 0.1 } else { max }).collect();
            let xs = tensor(&line, (1, line.len()), DType::F32, &device)?;
            for op in Op::ALL {
                check(op, &xs, 1)?;
            }
            let side_by_side = xs.unsqueeze(2)?.repeat((1, 1, 3))?;
            for op in Op::ANY_DIM {
                check(op, &side_by_side, 1)?;
            }
        }
        let line: Vec<f64> = (0..7600).map(|i| -i as f64 / 10.0).collect();
        let xs = tensor(&line, (1, line.len()), DType::F64, &device)?;
        for op in Op::ALL {
            check(op, &xs, 1)?;
        }
    }
    Ok(())
}
