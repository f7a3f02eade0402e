//! The greatest elements of each line.

use super::lanes::{each, Lanes, Pack, MAX_LANES};
use super::level::{Level, Simd, Task};
use super::memory::CacheLines;
use super::memory::{filled, Elements};
use super::rows::ahead;
use super::statistics::one;
use super::{threads, Element, PART, TRADED};
use crate::lines::Lines;
use crate::state::{Number, Real};
use std::cmp::Reverse;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Lines of up to so many elements …
const SHORT: usize = 512;
/// … are gone through once for each place, if there are up to so many.
const FEW: usize = 16;
/// Of longer lines so many elements are passed over together, where none of them can be among the greatest.
const TOGETHER: usize = 64;

/// The places of the `k` greatest elements of each contiguous line, greatest first, of equal ones the first first.
pub(crate) fn top_k<T: Element + Into<f64>>(xs: &[T], lines: Lines, k: usize) -> Vec<u32>
where
    T::Real: Into<f64>,
{
    // SAFETY: every place of every line is written.
    unsafe {
        filled(lines.count() * k, |places| {
            Level::best().run(TopK { xs: Elements::read(xs), places, len: lines.len, k })
        })
    }
}

struct TopK<'a, T> {
    xs: Elements<'a, T>,
    places: Elements<'a, u32>,
    len: usize,
    k: usize,
}

/// An element of a line: the greater, then the earlier ones come first.
type Found = (Reverse<u64>, u32);

impl<T: Element + Into<f64>> Task for TopK<'_, T>
where
    T::Real: Into<f64>,
{
    fn run<S: Simd>(self) {
        let count = self.places.len() / self.k;
        let run_lines = |lines: Range<usize>| {
            // SAFETY: the level is one that the CPU has, and each line is visited once.
            unsafe {
                S::enter(
                    #[inline(always)]
                    || self.lines::<S>(lines),
                )
            }
        };
        let together = (PART / self.len).max(1);
        let shared = threads::share(count * self.len, count.div_ceil(together), TRADED, &|task| {
            run_lines(task * together..count.min((task + 1) * together))
        });
        if !shared {
            run_lines(0..count)
        }
    }
}

impl<T: Element + Into<f64>> TopK<'_, T>
where
    T::Real: Into<f64>,
{
    /// # Safety
    /// The CPU has the instructions of `S`, and no other thread has these lines.
    #[inline(always)]
    unsafe fn lines<S: Simd>(&self, lines: Range<usize>) {
        let mut held = CacheLines([const { MaybeUninit::<T::Real>::uninit() }; SHORT]);
        let (held, mut found) = (held.0.as_mut_ptr().cast::<T::Real>(), Vec::new());
        for line in lines {
            let (xs, places) = (self.xs.at(line * self.len, self.len), self.places.at(line * self.k, self.k));
            // SAFETY: `held` has room for a short line, in whole vectors, and the rest by the caller's promise.
            unsafe {
                let short = self.len <= SHORT && self.k <= FEW;
                if !short || !self.one_by_one::<S>(xs, held, places) {
                    self.at_once::<S>(xs, &mut found, places);
                }
            }
        }
    }

    /// Goes through a line, which is written to `held`, once for each place. Answers whether it could: numbers say neither which NaN or
    /// which of several −∞ is the first, nor that NaN is greater than +∞.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, the line is there, and so is room for it, in whole vectors, and for the places.
    #[inline(always)]
    unsafe fn one_by_one<S: Simd>(&self, xs: *const T, held: *mut T::Real, places: *mut u32) -> bool {
        let [zero, none] = [T::Real::ZERO, T::Real::NEG_INFINITY];
        let mut lanes = [zero; MAX_LANES];
        for (i, lane) in lanes.iter_mut().enumerate() {
            *lane = T::Real::nearest(i as f64);
        }
        // SAFETY of the block: as promised by the caller; no vector has more lanes.
        unsafe {
            if self.hold_special::<S>(xs, held) {
                return false;
            }
            let lanes = T::Lanes::<S>::load(lanes.as_ptr());
            let step = T::Lanes::<S>::splat(T::Real::nearest(T::Lanes::<S>::COUNT as f64));
            let behind = T::Lanes::<S>::splat(T::Real::nearest(SHORT as f64));
            for n in 0..self.k {
                // Of each lane's greatest: it, and where it is.
                let (mut max, mut at, mut here) = (T::Lanes::<S>::splat(none), lanes, lanes);
                for i in (0..self.len).step_by(T::Lanes::<S>::COUNT) {
                    let x = T::Lanes::<S>::load(held.add(i));
                    at = max.if_less(x, here, at);
                    max = x.or_greater(max);
                    here = here + step;
                }
                let greatest = max.max_across();
                if greatest == none {
                    return false;
                }
                let first = max.if_less(T::Lanes::<S>::splat(greatest), behind, at);
                let first: f64 = (T::Lanes::<S>::splat(zero) - first).max_across().into();
                let place = -first as usize;
                *held.add(place) = none;
                *places.add(n) = place as u32;
            }
        }
        true
    }

    /// Writes a line to `held`, and −∞ up to a whole vector; answers whether it has NaN or +∞.
    ///
    /// # Safety
    /// As of [`one_by_one`](Self::one_by_one).
    #[inline(always)]
    unsafe fn hold_special<S: Simd>(&self, xs: *const T, held: *mut T::Real) -> bool {
        let (zero, one) = (T::Lanes::<S>::splat(T::Real::ZERO), T::Lanes::<S>::splat(T::Real::ONE));
        let infinity = T::Lanes::<S>::splat(T::Real::ZERO - T::Real::NEG_INFINITY);
        let mut special = zero;
        each::<T::Lanes<S>>(
            0..self.len,
            #[inline(always)]
            |i, count| {
                // SAFETY: as promised by the caller.
                let x = unsafe { T::read::<S>(xs.add(i), count, T::Real::NEG_INFINITY) };
                special = x.if_less(infinity, zero, one).or_greater(special);
                // SAFETY: likewise.
                unsafe { x.store(held.add(i)) }
            },
        );
        special.max_across() > T::Real::ZERO
    }

    /// Goes through a line once, past what is less than as many as are looked for.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, the line is there, and so is room for the places.
    #[inline(always)]
    unsafe fn at_once<S: Simd>(&self, xs: *const T, found: &mut Vec<Found>, places: *mut u32) {
        let (len, k) = (self.len, self.k);
        let (zero, one_each) = (T::Lanes::<S>::splat(T::Real::ZERO), T::Lanes::<S>::splat(T::Real::ONE));
        // The least of the greatest so far: only those that come before it can be among them.
        let (mut least, mut least_number) = (None, zero);
        found.clear();
        for start in (0..len).step_by(TOGETHER) {
            let count = TOGETHER.min(len - start);
            // SAFETY of the block: as promised by the caller.
            unsafe {
                if least.is_some() && count == TOGETHER {
                    let mut some = zero;
                    for i in (start..start + TOGETHER).step_by(T::Lanes::<S>::COUNT) {
                        S::prefetch(xs.wrapping_add(i + ahead::<T>()));
                        // NaN is not less.
                        some = T::load::<S>(xs.add(i)).if_less(least_number, zero, one_each).or_greater(some);
                    }
                    if some.max_across() == T::Real::ZERO {
                        continue;
                    }
                }
                for place in start..start + count {
                    let next = (Reverse(rank((*xs.add(place)).into())), place as u32);
                    if least.is_some_and(|least| next > least) {
                        continue;
                    }
                    found.push(next);
                    if found.len() == k + k.max(TOGETHER) {
                        let &mut last = keep_first(found, k);
                        least = Some(last);
                        least_number = T::Lanes::<S>::splat(one::<S, T>(xs.add(last.1 as usize)));
                    }
                }
            }
        }
        keep_first(found, k);
        found.sort_unstable();
        for (n, &(_, place)) in found.iter().enumerate() {
            // SAFETY: there are as many places, by the caller's promise.
            unsafe { *places.add(n) = place };
        }
    }
}

/// The first `k` of at least as many, in any order but for the last of them, which is answered.
fn keep_first(found: &mut Vec<Found>, k: usize) -> &mut Found {
    found.select_nth_unstable(k - 1);
    found.truncate(k);
    &mut found[k - 1]
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
