//! Sums over some of a tensor's dimensions, as the gradient of what was broadcast needs them.

use super::memory::{filled, Elements};
use super::share_each;
use crate::state::Real;
use crate::sums::{in_a_row, offset, SumOver};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Result};

/// Neighbouring sums that are taken together.
const WIDTH: usize = 1024;

/// The sums, in their order and added up in f64, of f32s or f64s that are all of the tensor.
pub(crate) fn sum_over(storage: CpuStorage, sum: &SumOver) -> Result<CpuStorage> {
    match storage {
        storage if sum.terms() == 1 => Ok(storage),
        CpuStorage::F32(xs) => Ok(CpuStorage::F32(sums(&xs, sum))),
        CpuStorage::F64(xs) => Ok(CpuStorage::F64(sums(&xs, sum))),
        other => Err(crate::lines::unsupported_dtype(other.dtype(), "sum")),
    }
}

fn sums<R: Real>(xs: &[R], sum: &SumOver) -> Vec<R> {
    let SumOver { kept: outer, summed } = sum;
    // Sums that lie side by side are taken side by side.
    let row = in_a_row(outer);
    // Otherwise what is added up lies side by side.
    let run = in_a_row(summed);
    let (count, terms) = (sum.sums(), sum.terms());
    let per_row = row.div_ceil(WIDTH);
    let of_chunk = |chunk: usize| {
        let (row_start, skipped) = (chunk / per_row * row, chunk % per_row * WIDTH);
        let xs = &xs[offset(outer, row_start) + skipped..];
        let mut sums = vec![0.0; WIDTH.min(row - skipped)];
        for term in (0..terms).step_by(run) {
            let xs = &xs[offset(summed, term)..];
            if run > 1 {
                sums[0] += xs[..run].iter().map(|&x| x.into()).sum::<f64>();
            } else {
                sums.iter_mut().zip(xs).for_each(|(sum, &x)| *sum += x.into());
            }
        }
        (row_start + skipped, sums)
    };
    // SAFETY of the block: the chunks make up all sums, and each has its own, which it writes and which are there.
    unsafe {
        filled(count, |out: Elements<R>| {
            share_each(count * terms, count / row * per_row, &|chunk| {
                let (first, sums) = of_chunk(chunk);
                let to = out.at(first, sums.len());
                sums.into_iter().enumerate().for_each(|(i, sum)| to.add(i).write(R::nearest(sum)));
            })
        })
    }
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
            let found = sums(&xs, &SumOver::new(&dims, &kept)).into_iter().map(f64::from);
            assert_eq!(found.collect::<Vec<_>>(), expected, "{kept:?}");
        }
        assert_eq!(sums(&[2.0f64; 5000], &SumOver::new(&[2, 2500], &[1, 2500])), vec![4.0; 2500]);
        assert_eq!(sums(&[2.0f64], &SumOver::new(&[1, 1], &[1, 1])), [2.0]);
    }
}
