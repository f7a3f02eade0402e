//! The greatest elements of each line, their weights, and the gradient of all.

use super::lanes::{each, Lanes, Pack, MAX_LANES};
use super::level::{Level, Simd, Task};
use super::memory::CacheLines;
use super::memory::{filled, Elements};
use super::rows::{ahead, exp_sum, sum_of, sum_of_blocks};
use super::statistics::{one, put_one};
use super::{share_ranges, softmax_inplace, Element, PART};
use crate::lines::Lines;
use crate::op::{Output, Schedule};
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

/// Of each contiguous line the `k` greatest elements, greatest first, of equal ones the first first: their weights in the softmax of the
/// k or of all, their places, and, if it is of all, the sum of exponentials that the weights are shares of.
pub(crate) fn top_k<T: Element + Into<f64>>(
    xs: &[T],
    lines: Lines,
    k: usize,
    renormalise: bool,
) -> (Vec<T>, Vec<u32>, Vec<T::Real>)
where
    T::Real: Into<f64>,
{
    let (xs, len, count) = (Elements::read(xs), lines.len, lines.count());
    let (mut places, mut sums) = (vec![], vec![T::Real::ZERO; if renormalise { 0 } else { count }]);
    // SAFETY: every line has its places and weights written.
    let mut weights = unsafe {
        filled(count * k, |weights| {
            places = filled(count * k, |places| {
                let sums = (!renormalise).then(|| Elements::write(&mut sums));
                Level::best().run(TopK { xs, weights, places, sums, len, k })
            })
        })
    };
    if renormalise {
        // All of them, by what there is for short lines
        let found = Lines { outer: count, len: k, inner: 1 };
        softmax_inplace(&mut weights, found, Schedule::Reduce, Output::Probability);
    }
    (weights, places, sums)
}

struct TopK<'a, T: Element> {
    xs: Elements<'a, T>,
    weights: Elements<'a, T>,
    places: Elements<'a, u32>,
    /// The weights are of all elements of a line, whose sum is written; otherwise only the elements found, in place of their weights.
    sums: Option<Elements<'a, T::Real>>,
    len: usize,
    k: usize,
}

/// An element of a line: the greater, then the earlier ones come first.
type Found = (Reverse<u64>, u32);

/// Has `run` do `count` lines of `len` elements, by several threads if they are many.
fn share_lines(count: usize, len: usize, run: impl Fn(Range<usize>) + Sync) {
    share_ranges(count * len, count, (PART / len).max(1), &run, || run(0..count))
}

impl<T: Element + Into<f64>> Task for TopK<'_, T>
where
    T::Real: Into<f64>,
{
    fn run<S: Simd>(self) {
        share_lines(self.places.len() / self.k, self.len, |lines| {
            // SAFETY: the level is one that the CPU has, and each line is visited once.
            unsafe {
                S::enter(
                    #[inline(always)]
                    || self.lines::<S>(lines),
                )
            }
        })
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
                self.weigh::<S>(line, xs, places);
            }
        }
    }

    /// Writes the elements at `places` of the line at `xs` or, if sums are asked for, their weights in all of the line.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, the line is there, `places` are places in it, and no other thread has this line.
    #[inline(always)]
    unsafe fn weigh<S: Simd>(&self, line: usize, xs: *const T, places: *const u32) {
        let k = self.k;
        let weights = self.weights.at(line * k, k);
        // SAFETY of the block: as promised by the caller; the weights are written before they are read, and there is one sum.
        unsafe {
            for n in 0..k {
                weights.add(n).write(*xs.add(*places.add(n) as usize));
            }
            let Some(sums) = self.sums else { return };
            let max = one::<S, T>(weights);
            let sum = sum_of_blocks::<T::Lanes<S>>(
                self.len,
                #[inline(always)]
                |start, count| exp_sum::<S, T>(xs.add(start), count, max, ahead::<T>(), |_, _, _| ()),
            );
            sums.at(line, 1).write(sum);
            let scale = T::Lanes::<S>::splat(Output::Probability.scale::<T::Lanes<S>>(sum));
            let max = T::Lanes::<S>::splat(max);
            T::write_fours::<S>(
                weights,
                k,
                false,
                #[inline(always)]
                |i, count| {
                    let x = T::read::<S>(weights.add(i), count, T::Real::NEG_INFINITY);
                    Output::Probability.of(x - max, scale)
                },
            );
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
        // The least of the greatest so far: only those that come before it can be among them.
        let (mut least, mut least_number, mut least_of_each) =
            (None, f64::NEG_INFINITY, T::Lanes::<S>::splat(T::Real::ZERO));
        found.clear();
        for start in (0..len).step_by(TOGETHER) {
            let count = TOGETHER.min(len - start);
            // SAFETY of the block: as promised by the caller.
            unsafe {
                if least.is_some() && count == TOGETHER {
                    for i in (start..start + TOGETHER).step_by(T::Lanes::<S>::COUNT) {
                        S::prefetch(xs.wrapping_add(i + ahead::<T>()));
                    }
                    if !some_reach::<S, T>(xs.add(start), TOGETHER, least_of_each) {
                        continue;
                    }
                }
                for from in (start..start + count).step_by(T::Lanes::<S>::COUNT) {
                    let count = T::Lanes::<S>::COUNT.min(start + count - from);
                    if least.is_some()
                        && count == T::Lanes::<S>::COUNT
                        && !some_reach::<S, T>(xs.add(from), count, least_of_each)
                    {
                        continue;
                    }
                    for place in from..from + count {
                        let x = (*xs.add(place)).into();
                        if x < least_number {
                            continue;
                        }
                        let next = (Reverse(rank(x)), place as u32);
                        if least.is_some_and(|least| next > least) {
                            continue;
                        }
                        found.push(next);
                        if found.len() == k + k.max(TOGETHER) {
                            let &mut last = keep_first(found, k);
                            least = Some(last);
                            least_number = (*xs.add(last.1 as usize)).into();
                            least_of_each = T::Lanes::<S>::splat(one::<S, T>(xs.add(last.1 as usize)));
                        }
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

/// The gradient of the elements, given the weights and the gradients of those at `places`, and the sums that the weights are shares of
/// unless they are renormalised. `None` if a place is outside of its line: callers have the places, too, and may have written over them.
pub(crate) fn top_k_backward<T: Element>(
    xs: &[T],
    [weights, gradients]: [&[T]; 2],
    places: &[u32],
    sums: Option<&[T::Real]>,
    lines: Lines,
) -> Option<Vec<T>> {
    if places.iter().max().is_some_and(|&place| place as usize >= lines.len) {
        return None;
    }
    let (xs, weights, gradients) = (Elements::read(xs), Elements::read(weights), Elements::read(gradients));
    // SAFETY: every element is of one line, and every line is written, at places that are within it.
    Some(unsafe {
        filled(lines.elem_count(), |out| {
            Level::best().run(TopKBackward { xs, weights, gradients, places, sums, out, lines })
        })
    })
}

struct TopKBackward<'a, T: Element> {
    xs: Elements<'a, T>,
    weights: Elements<'a, T>,
    gradients: Elements<'a, T>,
    places: &'a [u32],
    sums: Option<&'a [T::Real]>,
    out: Elements<'a, T>,
    lines: Lines,
}

impl<T: Element> Task for TopKBackward<'_, T> {
    fn run<S: Simd>(self) {
        share_lines(self.lines.count(), self.lines.len, |lines| {
            // SAFETY: the level is one that the CPU has, the places are checked, and each line is visited once.
            unsafe {
                S::enter(
                    #[inline(always)]
                    || lines.for_each(|line| self.line::<S>(line)),
                )
            }
        })
    }
}

impl<T: Element> TopKBackward<'_, T> {
    /// # Safety
    /// The CPU has the instructions of `S`, the places are within their lines, and no other thread has this line.
    #[inline(always)]
    unsafe fn line<S: Simd>(&self, line: usize) {
        let (len, k) = (self.lines.len, self.places.len() / self.lines.count());
        let places = &self.places[line * k..][..k];
        let (weights, gradients) = (self.weights.at(line * k, k), self.gradients.at(line * k, k));
        let (xs, out) = (self.xs.at(line * len, len), self.out.at(line * len, len));
        let zero = T::Real::ZERO;
        // SAFETY of the block: what is read and written is of this line, by the caller's promise.
        unsafe {
            let dot = sum_of_blocks::<T::Lanes<S>>(
                k,
                #[inline(always)]
                |start, count| {
                    sum_of::<T::Lanes<S>>(
                        count,
                        #[inline(always)]
                        |i, count| {
                            T::read::<S>(weights.add(start + i), count, zero)
                                * T::read::<S>(gradients.add(start + i), count, zero)
                        },
                    )
                },
            );
            let dot_of_each = T::Lanes::<S>::splat(dot);
            match self.sums {
                None => T::write_fours::<S>(
                    out,
                    len,
                    false,
                    #[inline(always)]
                    |_, _| T::Lanes::<S>::splat(zero),
                ),
                Some(sums) => {
                    let max = T::Lanes::<S>::splat(one::<S, T>(xs.add(places[0] as usize)));
                    let scale = T::Lanes::<S>::splat(Output::Probability.scale::<T::Lanes<S>>(sums[line]));
                    T::write_fours::<S>(
                        out,
                        len,
                        false,
                        #[inline(always)]
                        |i, count| {
                            let x = T::read::<S>(xs.add(i), count, zero);
                            T::Lanes::<S>::splat(zero) - Output::Probability.of(x - max, scale) * dot_of_each
                        },
                    )
                }
            }
            for (n, &place) in places.iter().enumerate() {
                let (w, g) = (one::<S, T>(weights.add(n)), one::<S, T>(gradients.add(n)));
                put_one::<S, T>(w * (g - dot), out.add(place as usize));
            }
        }
    }
}

/// Whether some of `count` elements are not less; NaN is not.
///
/// # Safety
/// The CPU has the instructions of `S`, and the elements are there, whole vectors of them.
#[inline(always)]
unsafe fn some_reach<S: Simd, T: Element>(xs: *const T, count: usize, least: T::Lanes<S>) -> bool {
    let (zero, one) = (T::Lanes::<S>::splat(T::Real::ZERO), T::Lanes::<S>::splat(T::Real::ONE));
    let mut some = zero;
    for i in (0..count).step_by(T::Lanes::<S>::COUNT) {
        // SAFETY: as promised by the caller.
        some = unsafe { T::load::<S>(xs.add(i)) }.if_less(least, zero, one).or_greater(some);
    }
    some.max_across() > T::Real::ZERO
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
