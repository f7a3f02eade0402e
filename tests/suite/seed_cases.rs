//! Small known results, invariants, and shapes of each size, for every op.

use crate::support::{check, devices, normal, tensor, values, within_cap, Op, DTYPES};
use candle_core::{DType, Device, Result, Tensor, D};
use candle_softmax::ops;

fn probabilities() -> impl Iterator<Item = Op> {
    Op::ALL.into_iter().filter(|&op| op != Op::LogSoftmax)
}

fn every_op(shape: &[usize], scale: f64, dtype: DType) -> Result<()> {
    let count = shape.iter().product();
    if within_cap(count) {
        for device in devices() {
            let xs = tensor(&normal(count, scale, 1), shape, dtype, &device)?;
            for op in Op::ALL {
                check(op, &xs, shape.len() - 1)?;
            }
        }
    }
    Ok(())
}

#[test]
fn basic_functionality() -> Result<()> {
    for device in devices() {
        let xs = Tensor::new(&[[1f32, 2., 3.], [1., 1., 1.]], &device)?;
        for op in probabilities() {
            let p = op.apply(&xs, 1)?.to_vec2::<f32>()?;
            for (found, exact) in p[0].iter().zip([0.090_030_57, 0.244_728_47, 0.665_240_96]) {
                assert!((found - exact).abs() < 1e-7, "{op:?}: {found}");
            }
            assert!(p[1].iter().all(|found| (found - 1.0 / 3.0).abs() < 1e-7), "{op:?}: {:?}", p[1]);
        }
    }
    Ok(())
}

#[test]
fn sizes_from_1x1_to_1024x2048() -> Result<()> {
    for (rows, cols) in
        [(1, 1), (1, 2), (2, 1), (8, 16), (32, 32), (64, 128), (128, 256), (256, 512), (512, 1024), (1024, 2048)]
    {
        every_op(&[rows, cols], 3.0, DType::F32)?;
    }
    Ok(())
}

#[test]
fn lengths_that_are_no_power_of_two() -> Result<()> {
    for cols in [3, 7, 31, 33, 100, 127, 129, 255, 257, 1000, 1023, 1025, 4097] {
        every_op(&[5, cols], 3.0, DType::F32)?;
    }
    Ok(())
}

#[test]
fn multi_dimensional_tensors() -> Result<()> {
    for shape in [&[3, 4, 5][..], &[2, 3, 4, 5], &[2, 2, 3, 4, 33], &[10]] {
        every_op(shape, 3.0, DType::F32)?;
    }
    Ok(())
}

#[test]
fn other_axes() -> Result<()> {
    for device in devices() {
        let xs = tensor(&normal(2 * 3 * 40 * 5, 3.0, 2), (2, 3, 40, 5), DType::F32, &device)?;
        for op in Op::ALL {
            for dim in 0..4 {
                check(op, &xs, dim)?;
            }
        }
    }
    Ok(())
}

#[test]
fn extreme_values() -> Result<()> {
    for device in devices() {
        for line in
            [[1000., 1001., 999.], [-1000., -1001., -999.], [3e38, -3e38, 0.], [1e-40, 0., -1e-40], [88., -88., 103.]]
        {
            let xs = tensor(&line, 3, DType::F32, &device)?;
            for op in Op::ALL {
                check(op, &xs, 0)?;
            }
        }
    }
    Ok(())
}

#[test]
fn zero_input_is_uniform() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            let xs = Tensor::zeros((3, 64), dtype, &device)?;
            for op in probabilities() {
                assert_eq!(values(&op.apply(&xs, 1)?)?, [1.0 / 64.0; 3 * 64]);
            }
        }
    }
    Ok(())
}

#[test]
fn probabilities_lie_in_0_to_1_and_sum_to_1() -> Result<()> {
    for device in devices() {
        for scale in [0.01, 1.0, 30.0] {
            let xs = tensor(&normal(16 * 777, scale, 3), (16, 777), DType::F32, &device)?;
            for op in probabilities() {
                let p = values(&op.apply(&xs, 1)?)?;
                assert!(p.iter().all(|p| (0.0..=1.0).contains(p)), "{op:?}");
                assert!(p.chunks(777).all(|line| (line.iter().sum::<f64>() - 1.0).abs() < 1e-5), "{op:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn adding_a_constant_changes_nothing() -> Result<()> {
    for device in devices() {
        // Multiples of 1/8 below 64 stay exact when 1024 is added.
        let logits: Vec<f64> = normal(8 * 300, 5.0, 4).iter().map(|x| (x * 8.0).round() / 8.0).collect();
        let shifted: Vec<f64> = logits.iter().map(|x| x + 1024.0).collect();
        for op in Op::ALL {
            let plain = values(&op.apply(&tensor(&logits, (8, 300), DType::F32, &device)?, 1)?)?;
            let moved = values(&op.apply(&tensor(&shifted, (8, 300), DType::F32, &device)?, 1)?)?;
            for (a, b) in plain.iter().zip(&moved) {
                assert!((a - b).abs() <= a.abs() * 5e-7, "{op:?}: {a} and {b}");
            }
        }
    }
    Ok(())
}

#[test]
fn greater_logits_get_greater_probabilities() -> Result<()> {
    for device in devices() {
        let xs = Tensor::arange(-20f32, 20., &device)?;
        for op in Op::ALL {
            let p = values(&op.apply(&xs, 0)?)?;
            assert!(p.windows(2).all(|pair| pair[0] < pair[1]), "{op:?}: {p:?}");
        }
    }
    Ok(())
}

#[test]
fn data_types() -> Result<()> {
    for dtype in DTYPES {
        for cols in [16, 100, 1000, 5000] {
            every_op(&[7, cols], 2.0, dtype)?;
        }
    }
    Ok(())
}

#[test]
fn input_validation() -> Result<()> {
    for device in devices() {
        let integers = Tensor::zeros((2, 3), DType::U32, &device)?;
        let floats = Tensor::zeros((2, 3), DType::F32, &device)?;
        let scalar = Tensor::new(1f32, &device)?;
        for op in Op::ALL {
            let error = op.apply(&integers, 1).unwrap_err().to_string();
            assert!(error.contains("softmax") && error.contains("U32") && error.contains("bf16"), "{error}");
        }
        for result in [ops::softmax(&floats, 2), ops::log_softmax(&floats, D::Minus(3))] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("softmax") && error.contains("[2, 3]") && error.contains("0 to 1"), "{error}");
        }
        for result in [
            ops::softmax(&scalar, 0),
            ops::softmax_last_dim(&scalar),
            ops::log_softmax(&scalar, D::Minus1),
            scalar.apply_op1(candle_softmax::SafeSoftmax),
            scalar.apply_op1(candle_softmax::OnlineSoftmax),
            scalar.apply_op1(candle_softmax::ReduceSoftmax),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("softmax") && error.contains("scalar"), "{error}");
        }
    }
    Ok(())
}

#[test]
fn input_is_left_as_it_was() -> Result<()> {
    for device in devices() {
        let logits: Vec<f64> = normal(4 * 500, 3.0, 5).iter().map(|&x| x as f32 as f64).collect();
        let xs = tensor(&logits, (4, 500), DType::F32, &device)?;
        for op in Op::ALL {
            op.apply(&xs, 1)?;
            assert_eq!(values(&xs)?, logits, "{op:?}");
        }
    }
    Ok(())
}

#[test]
fn large_matrix() -> Result<()> {
    every_op(&[1024, 8192], 3.0, DType::F32)?;
    every_op(&[33, 32_768], 3.0, DType::BF16)
}

#[test]
fn same_bits_every_time() -> Result<()> {
    for device in devices() {
        for shape in [(64, 100), (3, 300_000)] {
            if !within_cap(shape.0 * shape.1) {
                continue;
            }
            let xs = tensor(&normal(shape.0 * shape.1, 4.0, 6), shape, DType::F32, &device)?;
            for op in Op::ALL {
                let first = values(&op.apply(&xs, 1)?)?;
                for _ in 0..5 {
                    assert!(first == values(&op.apply(&xs, 1)?)?, "{op:?} {shape:?}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn agrees_with_the_naive_composition() -> Result<()> {
    let xs = tensor(&normal(50 * 1000, 3.0, 7), (50, 1000), DType::F64, &Device::Cpu)?;
    let softmax = values(&candle_nn::ops::softmax(&xs, 1)?)?;
    let log_softmax = values(&candle_nn::ops::log_softmax(&xs, 1)?)?;
    for device in devices() {
        let xs = xs.to_device(&device)?;
        for op in Op::ALL {
            let oracle = if op == Op::LogSoftmax { &log_softmax } else { &softmax };
            for (found, exact) in values(&op.apply(&xs, 1)?)?.iter().zip(oracle) {
                assert!((found - exact).abs() <= exact.abs() * 1e-12, "{op:?}: {found} for {exact}");
            }
        }
    }
    Ok(())
}
