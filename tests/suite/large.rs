//! More than 2³¹ elements, on a GPU: offsets that do not fit 32 bits.

use crate::calls::{Call, Kind};
use crate::support::{check_element, gpu_for, reference, within_cap, Op};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_softmax::testing::say_skipped;
use half::bf16;

/// Logits that differ from line to line and place to place, cheap to make two billion of.
fn logit(i: usize) -> bf16 {
    let hash = (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    bf16::from_f32(hash as f32 / (1 << 21) as f32 - 4.0)
}

fn logits(shape: &[usize], device: &Device) -> Result<Tensor> {
    let count = shape.iter().product();
    assert!(count > 1 << 31);
    let mut logits = vec![bf16::ZERO; count];
    std::thread::scope(|scope| {
        let part = count.div_ceil(16);
        for (n, chunk) in logits.chunks_mut(part).enumerate() {
            scope.spawn(move || chunk.iter_mut().enumerate().for_each(|(i, x)| *x = logit(n * part + i)));
        }
    });
    Tensor::from_vec(logits, shape, device)
}

fn check_shape(device: &Device, (outer, len, inner): (usize, usize, usize), ops: &[Op]) -> Result<()> {
    if !within_cap(outer * len * inner) {
        return Ok(());
    }
    let xs = logits(&[outer, len, inner], device)?;
    for &op in ops {
        let ys: Vec<bf16> = op.apply(&xs, 1)?.flatten_all()?.to_vec1()?;
        // Lines all over the tensor, the last ones and those about offset 2³¹ among them
        let lines = outer * inner;
        let boundary = ((1usize << 31) / (len * inner)).min(outer - 1) * inner;
        let near = (boundary.saturating_sub(50)..boundary + 50).chain(lines.saturating_sub(100)..lines);
        for line in (0..lines).step_by(lines.div_ceil(2000)).chain(near).filter(|&line| line < lines) {
            let offsets = (0..len).map(|j| line / inner * len * inner + j * inner + line % inner);
            let logits: Vec<f64> = offsets.clone().map(|i| logit(i).to_f64()).collect();
            for (i, exact) in offsets.zip(reference(&logits)) {
                if let Err(error) = check_element(op, DType::BF16, ys[i].to_f64(), exact) {
                    panic!("{error}, offset {i}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn more_than_2_to_the_31_elements() -> Result<()> {
    let Some(gpu) = gpu_for(0) else { return Ok(()) };
    let each = [Op::Safe, Op::Online, Op::Reduce, Op::LogSoftmax];
    check_shape(&gpu, ((1 << 21) + 5, 1024, 1), &each)?;
    check_shape(&gpu, ((1 << 26) + 9, 33, 1), &[Op::Softmax])?;
    check_shape(&gpu, (3, 1024, (1 << 20) + 3), &[Op::Softmax, Op::LogSoftmax])
}

/// Whether the GPU has so many bytes, of which other tests use some.
fn has_memory(gpu: &Device, bytes: usize) -> bool {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = gpu {
        return cuda.cuda_stream().context().mem_get_info().is_ok_and(|(_free, all)| all >= bytes);
    }
    let _ = (gpu, bytes);
    false
}

/// Results and gradients: the first, those about offset 2³¹, and the last of a dimension.
#[test]
fn around_softmax() -> Result<()> {
    let Some(gpu) = gpu_for(0) else { return Ok(()) };
    // candle keeps ten tensors of the scores' size or so.
    if !has_memory(&gpu, 100 << 30) {
        say_skipped("gradients of more than 2^31 elements", "the GPU has less than 100 GiB");
        return Ok(());
    }
    let of_lines = [Kind::LogSumExp, Kind::CrossEntropy, Kind::TopK];
    let of_columns = [Kind::LogSoftmax, Kind::Builder, Kind::LogSumExp, Kind::CrossEntropy];
    let of_scores = [Kind::LogSoftmax, Kind::Builder, Kind::Beside];
    for (shape, dim, along, kinds) in [
        (vec![(1 << 21) + 5, 1024], 1, 0, &of_lines[..]),
        (vec![(1 << 26) + 9, 33], 1, 0, &of_lines),
        (vec![16_800, 128_256], 1, 0, &of_lines),
        (vec![2050, 1024, 1024], 2, 0, &of_scores),
        (vec![3, 1024, (1 << 20) + 3], 1, 2, &of_columns),
    ] {
        if !within_cap(shape.iter().product()) {
            continue;
        }
        let xs = Var::from_tensor(&logits(&shape, &gpu)?)?;
        let (count, each) = (shape[along], xs.stride()[along]);
        let boundary = ((1 << 31) / each).min(count);
        let few = ((1 << 22) / (shape.iter().product::<usize>() / count)).clamp(1, 500);
        for &kind in kinds {
            let call = Call::new(kind, dim, &xs)?;
            let found = call.found()?;
            if kind == Kind::Beside {
                call.check_bias(&found)?;
                continue;
            }
            for start in [0, boundary.saturating_sub(few / 2).min(count - few), count - few] {
                call.check_part(&found, along, start, few)?;
            }
        }
    }
    Ok(())
}
