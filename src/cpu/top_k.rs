//! The greatest elements of each line.

use crate::lines::Lines;
use rayon::prelude::*;
use std::cmp::Reverse;

/// Up to this many are kept in order while a line is read.
const FEW: usize = 32;

/// The places of the `k` greatest elements of each contiguous line, greatest first, of equal ones the first first: by insertion if
/// they are few, else a partial selection, then a sort of what was selected.
pub(crate) fn top_k<T: Copy + Sync + Into<f64>>(xs: &[T], lines: Lines, k: usize) -> Vec<u32> {
    let mut places = vec![0; lines.count() * k];
    if places.is_empty() {
        return places;
    }
    let line = |ranked: &mut Vec<(Reverse<u64>, u32)>, (xs, places): (&[T], &mut [u32])| {
        ranked.clear();
        let all = xs.iter().zip(0u32..).map(|(&x, place)| (Reverse(rank(x.into())), place));
        if k <= FEW {
            for next in all {
                // Most elements are told by one comparison.
                if ranked.len() < k || next < ranked[k - 1] {
                    ranked.truncate(k - 1);
                    ranked.insert(ranked.partition_point(|other| *other < next), next);
                }
            }
        } else {
            ranked.extend(all);
            if k < ranked.len() {
                ranked.select_nth_unstable(k - 1);
            }
            ranked[..k].sort_unstable();
        }
        ranked.iter().zip(places).for_each(|(&(_, found), place)| *place = found);
    };
    if xs.len() < super::SERIAL {
        let ranked = &mut vec![];
        xs.chunks(lines.len).zip(places.chunks_mut(k)).for_each(|pair| line(ranked, pair));
    } else {
        xs.par_chunks(lines.len)
            .zip(places.par_chunks_mut(k))
            .with_min_len((super::PART / lines.len).max(1))
            .for_each_init(Vec::new, line);
    }
    places
}

/// Numbers in an order without exceptions: −0 is 0, and NaN, all of them equal, is greater than +∞, as in torch.topk.
fn rank(x: f64) -> u64 {
    let bits = (x + 0.0).to_bits();
    match x.is_nan() {
        true => u64::MAX,
        false if bits >> 63 == 1 => !bits,
        false => bits | 1 << 63,
    }
}

#[cfg(test)]
mod tests {
    use super::rank;

    #[test]
    fn ranks_are_in_the_order_of_the_numbers() {
        let rising = [f64::NEG_INFINITY, f64::MIN, -1.0, -5e-324, 0.0, 5e-324, 1.0, f64::MAX, f64::INFINITY, f64::NAN];
        assert!(rising.windows(2).all(|pair| rank(pair[0]) < rank(pair[1])));
        assert_eq!((rank(-0.0), rank(-f64::NAN)), (rank(0.0), rank(f64::NAN)));
    }
}
