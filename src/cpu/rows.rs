//! Lines along the last dimension: each is contiguous.

use super::lanes::{fold, Lanes, Pack};
use super::level::Simd;
use super::{Element, Pass};
use crate::op::{Output, Schedule};
use crate::state::{CompensatedSum, Normalizer, Number, Real, SoftmaxState};
use std::mem::MaybeUninit;
use std::ops::Range;

/// A block adds this many vectors plainly, 16 to each of [`fold`]'s accumulators: rounding cannot pile up.
const BLOCK_VECTORS: usize = 64;

/// Lines up to this length keep their exponentials rather than take them twice.
const KEPT: usize = 4096;

/// The blocks of `range`, as start and length.
fn blocks<V: Lanes>(range: Range<usize>) -> impl Iterator<Item = (usize, usize)> {
    let block = BLOCK_VECTORS * V::COUNT;
    let end = range.end;
    range.step_by(block).map(move |start| (start, block.min(end - start)))
}

/// # Safety
/// The CPU has the instructions of `S`, and `xs` is valid for reads of `len` elements.
#[inline(always)]
unsafe fn max_of<S: Simd, T: Element>(xs: *const T, len: usize) -> T::Real {
    let none = T::Real::NEG_INFINITY;
    fold(
        len,
        T::Lanes::<S>::splat(none),
        #[inline(always)]
        |max, i, count| unsafe { T::read::<S>(xs.add(i), count, none) }.or_greater(max),
        T::Lanes::<S>::or_greater,
    )
    .max_across()
}

/// Σ f(start, count), for at most a block.
#[inline(always)]
fn sum_of<V: Lanes>(len: usize, mut f: impl FnMut(usize, usize) -> V) -> V::Real {
    fold(
        len,
        V::splat(V::Real::ZERO),
        #[inline(always)]
        |sum, i, count| sum + f(i, count),
        V::add,
    )
    .sum_across()
}

pub(super) struct Softmax<'a, T>(pub super::Forward<'a, T>);

impl<T: Element> Softmax<'_, T> {
    /// Writes the elements of a line from their exponents x − max.
    ///
    /// # Safety
    /// As of [`Pass::write`], with `xs` and `out` valid for `len` elements.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, xs: *const T, out: *mut T, len: usize, line: Normalizer<T::Real>) {
        let max = T::Lanes::<S>::splat(line.max);
        // SAFETY: as promised by the caller.
        let shifted = |i: usize, count: usize| unsafe { T::read::<S>(xs.add(i), count, T::Real::ZERO) } - max;
        match self.0.output {
            Output::Probability => {
                let scale = T::Lanes::<S>::splat(T::Real::ONE / line.sum);
                // SAFETY: as promised by the caller.
                unsafe {
                    T::write::<S>(
                        out,
                        len,
                        self.0.stream,
                        #[inline(always)]
                        |i, count| shifted(i, count).exp() * scale,
                    )
                }
            }
            Output::LogProbability => {
                let log_sum = T::Lanes::<S>::splat(line.sum.ln());
                // SAFETY: as promised by the caller.
                unsafe {
                    T::write::<S>(
                        out,
                        len,
                        self.0.stream,
                        #[inline(always)]
                        |i, count| shifted(i, count) - log_sum,
                    )
                }
            }
        }
    }

    /// A short line: the maximum, the sum, and the result from the exponentials of the sum.
    ///
    /// # Safety
    /// As of [`Pass::whole`], with `xs` and `out` valid for `len` ≤ [`KEPT`] elements.
    #[inline(always)]
    unsafe fn short<S: Simd>(&self, xs: *const T, out: *mut T, len: usize) {
        let mut kept = [const { MaybeUninit::<T::Real>::uninit() }; KEPT];
        let kept = kept.as_mut_ptr().cast::<T::Real>();
        let none = T::Real::NEG_INFINITY;
        // SAFETY of the block: as promised by the caller; `kept` is read where it was written.
        unsafe {
            let max = max_of::<S, T>(xs, len);
            let shift = T::Lanes::<S>::splat(max);
            let mut sum = CompensatedSum::zero();
            for (start, block) in blocks::<T::Lanes<S>>(0..len) {
                sum.add(sum_of(
                    block,
                    #[inline(always)]
                    |i, count| {
                        let exp = (T::read::<S>(xs.add(start + i), count, none) - shift).exp();
                        exp.store(kept.add(start + i));
                        exp
                    },
                ));
            }
            let line = Normalizer::new(max, sum.value());
            if self.0.output == Output::LogProbability {
                return self.finish::<S>(xs, out, len, line);
            }
            let scale = T::Lanes::<S>::splat(T::Real::ONE / line.sum);
            T::write::<S>(
                out,
                len,
                self.0.stream,
                #[inline(always)]
                |i, _| T::Lanes::<S>::load(kept.add(i)) * scale,
            );
        }
    }
}

impl<S: Simd, T: Element> Pass<S> for Softmax<'_, T> {
    type Reduced = SoftmaxState<T::Real>;
    const WIDTH: usize = 1;

    #[inline(always)]
    unsafe fn reduce(&self, line: usize, range: Range<usize>) -> Self::Reduced {
        let xs = self.0.src.at(line * self.0.lines.len + range.start, range.len());
        let none = T::Real::NEG_INFINITY;
        let mut state = SoftmaxState::empty();
        // SAFETY of the block: the elements are there, and the instructions by the caller's promise.
        unsafe {
            if self.0.schedule == Schedule::Safe {
                state.grow(max_of::<S, T>(xs, range.len()));
            }
            for (start, len) in blocks::<T::Lanes<S>>(0..range.len()) {
                let xs = xs.add(start);
                let reference = match self.0.schedule {
                    Schedule::Safe => state.reference(),
                    Schedule::Online | Schedule::Reduce => state.grow(max_of::<S, T>(xs, len)),
                };
                let reference = T::Lanes::<S>::splat(reference);
                state.add(sum_of(
                    len,
                    #[inline(always)]
                    |i, count| (T::read::<S>(xs.add(i), count, none) - reference).exp(),
                ));
            }
        }
        state
    }

    #[inline(always)]
    unsafe fn merge(mut a: Self::Reduced, b: Self::Reduced) -> Self::Reduced {
        a.merge(b);
        a
    }

    #[inline(always)]
    unsafe fn write(&self, line: usize, range: Range<usize>, state: &Self::Reduced) {
        let start = line * self.0.lines.len + range.start;
        let (xs, out) = (self.0.src.at(start, range.len()), self.0.out.at(start, range.len()));
        // SAFETY: the elements are there; the rest by the caller's promise.
        unsafe { self.finish::<S>(xs, out, range.len(), state.finish()) }
    }

    #[inline(always)]
    unsafe fn whole(&self, line: usize, len: usize) {
        // SAFETY: as promised by the caller.
        unsafe {
            if len <= KEPT {
                let start = line * len;
                return self.short::<S>(self.0.src.at(start, len), self.0.out.at(start, len), len);
            }
            let state = Pass::<S>::reduce(self, line, 0..len);
            Pass::<S>::write(self, line, 0..len, &state)
        }
    }
}

/// softmax: y·(g − Σ g·y); log-softmax: g − exp(y)·Σ g.
pub(super) struct Backward<'a, T>(pub super::Backward<'a, T>);

impl<S: Simd, T: Element> Pass<S> for Backward<'_, T> {
    type Reduced = CompensatedSum<T::Real>;
    const WIDTH: usize = 1;

    #[inline(always)]
    unsafe fn reduce(&self, line: usize, range: Range<usize>) -> Self::Reduced {
        let start = line * self.0.lines.len + range.start;
        let (ys, gs) = (self.0.y.at(start, range.len()), self.0.g.at(start, range.len()));
        let zero = T::Real::ZERO;
        let mut sum = CompensatedSum::zero();
        for (start, len) in blocks::<T::Lanes<S>>(0..range.len()) {
            // SAFETY of the block: the elements are there, and the instructions by the caller's promise.
            unsafe {
                let (ys, gs) = (ys.add(start), gs.add(start));
                sum.add(match self.0.output {
                    Output::Probability => sum_of(
                        len,
                        #[inline(always)]
                        |i, count| T::read::<S>(ys.add(i), count, zero) * T::read::<S>(gs.add(i), count, zero),
                    ),
                    Output::LogProbability => sum_of(
                        len,
                        #[inline(always)]
                        |i, count| T::read::<S>(gs.add(i), count, zero),
                    ),
                });
            }
        }
        sum
    }

    #[inline(always)]
    unsafe fn merge(mut a: Self::Reduced, b: Self::Reduced) -> Self::Reduced {
        a.merge(b);
        a
    }

    #[inline(always)]
    unsafe fn write(&self, line: usize, range: Range<usize>, sum: &Self::Reduced) {
        let (start, len) = (line * self.0.lines.len + range.start, range.len());
        let (ys, gs, out) = (self.0.y.at(start, len), self.0.g.at(start, len), self.0.out.at(start, len));
        let sum = T::Lanes::<S>::splat(sum.value());
        let zero = T::Real::ZERO;
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        unsafe {
            let read = |from: *mut T, i: usize, count: usize| T::read::<S>(from.add(i), count, zero);
            match self.0.output {
                Output::Probability => T::write::<S>(
                    out,
                    len,
                    self.0.stream,
                    #[inline(always)]
                    |i, count| read(ys, i, count) * (read(gs, i, count) - sum),
                ),
                Output::LogProbability => T::write::<S>(
                    out,
                    len,
                    self.0.stream,
                    #[inline(always)]
                    |i, count| read(gs, i, count) - read(ys, i, count).exp() * sum,
                ),
            }
        }
    }
}
