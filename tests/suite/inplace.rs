//! Softmax written over its input.

use crate::support::{check_result, devices, normal, tensor, values, within_cap, Op, DTYPES};
use candle_core::{DType, Device, Result, Tensor, Var, D};
use candle_softmax::{ops, testing, OnlineSoftmax, ReduceSoftmax, SafeSoftmax};

/// The shapes reach every path: short lines, lines in blocks, split lines, strips, split strips; on CUDA lines in registers
/// (of whole packs or not), in clusters, split and side by side, and such as have another kernel in place, since strips overlap.
const SHAPES: [(usize, usize, usize); 13] = [
    (7, 1, 1),
    (300, 5, 1),
    (400, 64, 1),
    (50, 1024, 1),
    (9, 100, 1),
    (5, 4097, 1),
    (3, 70_001, 1),
    (1, 300_000, 1),
    (4, 60, 33),
    (2, 3, 600),
    (1, 20_000, 17),
    (2, 250, 111),
    (1, 500, 223),
];

#[test]
fn any_dimension_and_dtype() -> Result<()> {
    for device in devices() {
        for (i, &(outer, len, inner)) in SHAPES.iter().enumerate().filter(|(_, (o, l, i))| within_cap(o * l * i)) {
            for dtype in DTYPES {
                let shape = (outer, len, inner);
                let xs = tensor(&normal(outer * len * inner, 3.0, i as u64), shape, dtype, &device)?;
                let ys = xs.copy()?;
                ops::softmax_inplace(&ys, 1)?;
                check_result(Op::Softmax, &xs, 1, &ys)?;
                let same = values(&ys)? == values(&ops::softmax(&xs, 1)?)?;
                let another_kernel = testing::kernel_name(testing::Op::Chosen, &xs, 1)?.contains("Odd");
                assert!(same || another_kernel, "{shape:?} {dtype:?} on {device:?}: not the bits of softmax");
            }
        }
    }
    Ok(())
}

#[test]
fn the_ops() -> Result<()> {
    for device in devices() {
        for len in [1, 40, 5000, 200_000].into_iter().filter(|len| within_cap(3 * len)) {
            let xs = tensor(&normal(3 * len, 3.0, 1), (3, len), DType::F32, &device)?;
            for op in [Op::Safe, Op::Online, Op::Reduce] {
                let ys = xs.copy()?;
                match op {
                    Op::Safe => ys.inplace_op1(&SafeSoftmax)?,
                    Op::Online => ys.inplace_op1(&OnlineSoftmax)?,
                    _ => ys.inplace_op1(&ReduceSoftmax)?,
                }
                check_result(op, &xs, 1, &ys)?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_part_of_a_tensor_leaves_the_rest_alone() -> Result<()> {
    // The part starts at a multiple of 16 bytes, or does not.
    for (device, len) in devices().iter().flat_map(|device| [100, 101, 7001].map(|len| (device, len))) {
        for dtype in DTYPES.into_iter().filter(|_| within_cap(6 * len)) {
            let xs = tensor(&normal(6 * len, 3.0, 2), (6, len), dtype, device)?;
            let whole = xs.copy()?;
            let part = whole.narrow(0, 1, 4)?;
            ops::softmax_inplace(&part, D::Minus1)?;
            check_result(Op::Softmax, &xs.narrow(0, 1, 4)?, 1, &part)?;
            for row in [0, 5] {
                assert_eq!(values(&whole.get(row)?)?, values(&xs.get(row)?)?);
            }
        }
    }
    Ok(())
}

#[test]
fn special_values_and_empty_tensors() -> Result<()> {
    let inf = f32::INFINITY;
    for device in devices() {
        let xs = Tensor::new(&[[0f32, f32::NAN], [inf, 0.], [-inf, -inf], [-inf, 1.]], &device)?;
        ops::softmax_inplace(&xs, 1)?;
        let ys = xs.to_vec2::<f32>()?;
        assert!(ys[..3].iter().flatten().all(|y| y.is_nan()), "{ys:?}");
        assert_eq!(ys[3], [0.0, 1.0]);
        for shape in [(0, 4), (4, 0)] {
            ops::softmax_inplace(&Tensor::zeros(shape, DType::F32, &device)?, 1)?;
        }
    }
    Ok(())
}

#[test]
fn errors() -> Result<()> {
    devices().iter().try_for_each(errors_on)
}

fn errors_on(device: &Device) -> Result<()> {
    let var = Var::new(&[[0f32, 1.], [2., 3.]], device)?;
    for tracked in [var.as_tensor().clone(), (var.as_tensor() * 2.0)?] {
        let before = values(&tracked)?;
        let error = ops::softmax_inplace(&tracked, 1).unwrap_err().to_string();
        assert!(error.contains("softmax-inplace") && error.contains("gradients"), "{error}");
        assert_eq!(values(&tracked)?, before);
    }
    let xs = Tensor::zeros((4, 6), DType::F32, device)?;
    for strided in [xs.t()?, xs.narrow(1, 1, 3)?, xs.narrow(0, 0, 1)?.broadcast_as((3, 6))?] {
        let error = ops::softmax_inplace(&strided, 1).unwrap_err().to_string();
        assert!(error.contains("contiguous") && error.contains("ops::softmax"), "{error}");
    }
    let error = ops::softmax_inplace(&Tensor::zeros((2, 2), DType::U32, device)?, 1).unwrap_err().to_string();
    assert!(error.contains("U32") && error.contains("to_dtype"), "{error}");
    assert!(ops::softmax_inplace(&Tensor::new(1f32, device)?, 0).is_err());
    assert!(ops::softmax_inplace(&xs, 2).is_err());
    Ok(())
}
