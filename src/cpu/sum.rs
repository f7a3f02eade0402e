//! Sums over some of a tensor's dimensions, as the gradient of what was broadcast needs them.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Result};
use rayon::prelude::*;

/// Neighbouring sums that are taken together.
const WIDTH: usize = 1024;

/// The elements of contiguous f32s or f64s of shape `dims`, added up in f64 along each dimension that has size 1 in `kept`, which
/// has the others as they are.
pub(crate) fn sum_over(storage: &CpuStorage, dims: &[usize], kept: &[usize]) -> Result<CpuStorage> {
    match storage {
        CpuStorage::F32(xs) => Ok(CpuStorage::F32(sums(xs, dims, kept).into_iter().map(|x| x as f32).collect())),
        CpuStorage::F64(xs) => Ok(CpuStorage::F64(sums(xs, dims, kept))),
        other => Err(crate::lines::unsupported_dtype(other.dtype(), "sum")),
    }
}

/// A dimension, or several that are neighbours: how many steps of what length.
#[derive(Clone, Copy)]
struct Steps {
    size: usize,
    stride: usize,
}

/// Where the `index`-th element is, the last dimension varying fastest.
fn offset(dims: &[Steps], mut index: usize) -> usize {
    let mut offset = 0;
    for dim in dims.iter().rev() {
        offset += index % dim.size * dim.stride;
        index /= dim.size;
    }
    offset
}

fn sums<R: Copy + Sync + Into<f64>>(xs: &[R], dims: &[usize], kept: &[usize]) -> Vec<f64> {
    let (mut outer, mut summed) = (Vec::<Steps>::new(), Vec::<Steps>::new());
    let mut stride = 1;
    for (&size, &kept) in dims.iter().zip(kept).rev().filter(|(&size, _)| size != 1) {
        let list = if kept == size { &mut outer } else { &mut summed };
        match list.last_mut() {
            Some(inner) if inner.stride * inner.size == stride => inner.size *= size,
            _ => list.push(Steps { size, stride }),
        }
        stride *= size;
    }
    outer.reverse();
    summed.reverse();
    // Sums that lie side by side are taken side by side.
    let row = match outer.last() {
        Some(Steps { size, stride: 1 }) => *size,
        _ => 1,
    };
    // Otherwise what is added up lies side by side.
    let run = match summed.last() {
        Some(Steps { size, stride: 1 }) => *size,
        _ => 1,
    };
    let mut out = vec![0.0; outer.iter().map(|dim| dim.size).product()];
    let terms: usize = summed.iter().map(|dim| dim.size).product();
    let per_row = row.div_ceil(WIDTH);
    let mut chunks: Vec<(usize, &mut [f64])> = Vec::new();
    for (i, row) in out.chunks_mut(row).enumerate() {
        chunks.extend(row.chunks_mut(WIDTH).enumerate().map(|(part, chunk)| (i * per_row + part, chunk)));
    }
    chunks.into_par_iter().for_each(|(i, sums)| {
        let first = offset(&outer, i / per_row * row) + i % per_row * WIDTH;
        for term in (0..terms).step_by(run) {
            let xs = &xs[first + offset(&summed, term)..];
            if run > 1 {
                sums[0] += xs[..run].iter().map(|&x| x.into()).sum::<f64>();
            } else {
                sums.iter_mut().zip(xs).for_each(|(sum, &x)| *sum += x.into());
            }
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn over_any_dimensions() {
        let dims = [3, 4, 1, 5, 7];
        let xs: Vec<f32> = (0..420).map(|i| (i * i % 101) as f32).collect();
        for choice in 0..32 {
            let kept: Vec<usize> = (0..5).map(|d| if choice >> d & 1 == 1 { dims[d] } else { 1 }).collect();
            let mut expected = vec![0.0; kept.iter().product()];
            for (i, &x) in xs.iter().enumerate() {
                let (mut rest, mut at, mut stride) = (i, 0, 1);
                for d in (0..5).rev() {
                    let index = rest % dims[d];
                    rest /= dims[d];
                    at += if kept[d] == 1 { 0 } else { index * stride };
                    stride *= kept[d];
                }
                expected[at] += f64::from(x);
            }
            assert_eq!(sums(&xs, &dims, &kept), expected, "{kept:?}");
        }
        assert_eq!(sums(&[2.0f64; 5000], &[2, 2500], &[1, 2500]), vec![4.0; 2500]);
        assert_eq!(sums(&[2.0f64], &[1, 1], &[1, 1]), [2.0]);
    }
}
