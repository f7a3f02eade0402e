//! More than 2³¹ elements, on a GPU: offsets that do not fit 32 bits.

use crate::support::{check_element, gpu_for, reference, within_cap, Op};
use candle_core::{DType, Device, Result, Tensor};
use half::bf16;

/// Logits that differ from line to line and place to place, cheap to make two billion of.
fn logit(i: usize) -> bf16 {
    let hash = (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    bf16::from_f32(hash as f32 / (1 << 21) as f32 - 4.0)
}

fn check_shape(device: &Device, (outer, len, inner): (usize, usize, usize), ops: &[Op]) -> Result<()> {
    let count = outer * len * inner;
    if !within_cap(count) {
        return Ok(());
    }
    assert!(count > 1 << 31);
    let mut logits = vec![bf16::ZERO; count];
    std::thread::scope(|scope| {
        let part = count.div_ceil(16);
        for (n, chunk) in logits.chunks_mut(part).enumerate() {
            scope.spawn(move || chunk.iter_mut().enumerate().for_each(|(i, x)| *x = logit(n * part + i)));
        }
    });
    let xs = Tensor::from_vec(logits, (outer, len, inner), device)?;
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
