//! Lines along another dimension than the last: neighbouring lines lie side by side, so a strip of them is walked
//! together, row by row, with one state for each.

use super::lanes::{Lanes, Pack};
use super::level::Simd;
use super::{Element, Pass};
use crate::lines::Lines;
use crate::op::{Output, Schedule};
use crate::state::{CompensatedSum, Number, Real, SoftmaxState};
use std::ops::Range;

/// Lines in a strip: as wide as rows have to be for memory to be read at its full speed, and so narrow that the rows of a
/// group and the states stay in the first cache.
pub(super) const WIDTH: usize = 256;
/// Rows of a group, taken together; as many numbers are added plainly before the sum that compensates takes over.
pub(super) const ROWS: usize = 8;

/// How many rows the memory system is to be ahead of the arithmetic.
const AHEAD_ROWS: usize = 2;

/// Where a strip lies: `width` lines side by side, whose rows are `stride` elements apart.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub start: usize,
    pub width: usize,
    pub stride: usize,
}

impl Strip {
    pub fn new(unit: usize, lines: Lines) -> Self {
        let per_outer = lines.inner.div_ceil(WIDTH);
        let (outer, first) = (unit / per_outer, unit % per_outer * WIDTH);
        Self {
            start: outer * lines.len * lines.inner + first,
            width: WIDTH.min(lines.inner - first),
            stride: lines.inner,
        }
    }

    /// The number of its first line.
    pub fn first_line(unit: usize, lines: Lines) -> usize {
        let per_outer = lines.inner.div_ceil(WIDTH);
        unit / per_outer * lines.inner + unit % per_outer * WIDTH
    }

    pub fn row(&self, j: usize) -> usize {
        self.start + j * self.stride
    }

    /// The elements of these rows from the first to the last, as start and length.
    pub fn span(&self, rows: &Range<usize>) -> (usize, usize) {
        (self.row(rows.start), if rows.is_empty() { 0 } else { (rows.len() - 1) * self.stride + self.width })
    }

    /// Folds each vector of lines of each group of rows into `reduced`. `step` gets how many rows there are, how many lines
    /// of the vector, and the place of the first element relative to that of `rows`; rows are `stride` apart.
    #[inline(always)]
    pub fn fold<V: Lanes, R>(&self, rows: usize, reduced: &mut [R], mut step: impl FnMut(&mut R, usize, usize, usize)) {
        for first in (0..rows).step_by(ROWS) {
            for (i, reduced) in reduced.iter_mut().enumerate() {
                let line = i * V::COUNT;
                let count = V::COUNT.min(self.width - line);
                step(reduced, ROWS.min(rows - first), count, first * self.stride + line);
            }
        }
    }
}

/// The lanes one after the other, to be read from any place on: lines do not start where vectors do in memory.
#[inline(always)]
pub(super) fn flat<V: Lanes>(vectors: impl ExactSizeIterator<Item = V>) -> Vec<V::Real> {
    let mut flat = vec![V::Real::ZERO; (vectors.len() + 1) * V::COUNT];
    for (vector, chunk) in vectors.zip(flat.chunks_exact_mut(V::COUNT)) {
        // SAFETY: a chunk is as long as a vector.
        unsafe { vector.store(chunk.as_mut_ptr()) };
    }
    flat
}

/// What was found of two parts of the same lines, vector by vector.
#[inline(always)]
pub(super) fn merged<R>(mut a: Vec<R>, b: Vec<R>, merge: impl Fn(&mut R, R)) -> Vec<R> {
    a.iter_mut().zip(b).for_each(|(a, b)| merge(a, b));
    a
}

/// # Safety
/// The CPU has the instructions of `S`, and `from` is valid for reads of the elements `i..i + count`.
#[inline(always)]
pub(super) unsafe fn read<S: Simd, T: Element>(from: *const T, i: usize, count: usize) -> T::Lanes<S> {
    // SAFETY: as promised by the caller.
    unsafe { T::read::<S>(from.add(i), count, T::Real::ZERO) }
}

/// The maxima of `count` lines over `rows` rows that are `stride` elements apart, from element `i` on.
///
/// # Safety
/// As of [`read`], for each of the rows.
#[inline(always)]
pub(super) unsafe fn max_of<S: Simd, T: Element>(
    from: *const T,
    i: usize,
    count: usize,
    rows: usize,
    stride: usize,
) -> T::Lanes<S> {
    // SAFETY: as promised by the caller.
    unsafe {
        let mut max = read::<S, T>(from, i, count);
        for j in 1..rows {
            max = read::<S, T>(from, i + j * stride, count).or_greater(max);
        }
        max
    }
}

pub(super) struct Softmax<'a, T>(pub super::Forward<'a, T>);

impl<S: Simd, T: Element> Pass<S> for Softmax<'_, T> {
    type Reduced = Vec<SoftmaxState<T::Lanes<S>>>;
    const WIDTH: usize = WIDTH;

    #[inline(always)]
    unsafe fn reduce(&self, unit: usize, range: Range<usize>) -> Self::Reduced {
        let strip = Strip::new(unit, self.0.lines);
        let (start, len) = strip.span(&range);
        let src: *const T = self.0.src.at(start, len);
        let mut states = vec![SoftmaxState::empty(); strip.width.div_ceil(T::Lanes::<S>::COUNT)];
        if self.0.schedule == Schedule::Safe {
            strip.fold::<T::Lanes<S>, _>(
                range.len(),
                &mut states,
                #[inline(always)]
                |state, rows, count, i| {
                    // SAFETY: the rows are there, and the instructions by the caller's promise.
                    state.grow(unsafe { max_of::<S, T>(src, i, count, rows, strip.stride) });
                },
            );
        }
        strip.fold::<T::Lanes<S>, _>(
            range.len(),
            &mut states,
            #[inline(always)]
            |state, rows, count, i| {
                let reference = match self.0.schedule {
                    Schedule::Safe => state.reference(),
                    Schedule::Online | Schedule::Reduce => {
                        // SAFETY: the rows are there, and the instructions by the caller's promise.
                        state.grow(unsafe { max_of::<S, T>(src, i, count, rows, strip.stride) })
                    }
                };
                let mut sum = T::Lanes::<S>::splat(T::Real::ZERO);
                for j in 0..rows {
                    S::prefetch(src.wrapping_add(i + (j + ROWS) * strip.stride));
                    // SAFETY: the rows are there, and the instructions by the caller's promise.
                    let shifted = unsafe { read::<S, T>(src, i + j * strip.stride, count) } - reference;
                    sum = sum + shifted.scaled_exp();
                }
                state.add(sum.unscaled());
            },
        );
        states
    }

    #[inline(always)]
    unsafe fn merge(a: Self::Reduced, b: Self::Reduced) -> Self::Reduced {
        merged(a, b, SoftmaxState::merge)
    }

    #[inline(always)]
    unsafe fn write(&self, unit: usize, range: Range<usize>, states: &Self::Reduced) {
        let strip = Strip::new(unit, self.0.lines);
        let max = flat(states.iter().map(|state| state.finish().max));
        let mut scale = flat(states.iter().map(|state| state.finish().sum));
        scale.iter_mut().for_each(|sum| *sum = self.0.output.scale::<T::Lanes<S>>(*sum));
        for j in range {
            let (src, out) = (self.0.src.at(strip.row(j), strip.width), self.0.out.at(strip.row(j), strip.width));
            // SAFETY of the block: the elements are there, and `max` and `scale` are a vector longer than the row; the rest
            // by the caller's promise.
            unsafe {
                T::write::<S>(
                    out,
                    strip.width,
                    #[inline(always)]
                    |i, count| {
                        // Memory that is written is read first.
                        S::prefetch(out.wrapping_add(AHEAD_ROWS * strip.stride + i));
                        S::prefetch(src.wrapping_add(AHEAD_ROWS * strip.stride + i));
                        let shifted = read::<S, T>(src, i, count) - T::Lanes::<S>::load(max.as_ptr().add(i));
                        self.0.output.of(shifted, T::Lanes::<S>::load(scale.as_ptr().add(i)))
                    },
                )
            }
        }
    }
}

/// softmax: y·(g − Σ g·y); log-softmax: g − exp(y)·Σ g.
pub(super) struct Backward<'a, T>(pub super::Backward<'a, T>);

impl<S: Simd, T: Element> Pass<S> for Backward<'_, T> {
    type Reduced = Vec<CompensatedSum<T::Lanes<S>>>;
    const WIDTH: usize = WIDTH;

    #[inline(always)]
    unsafe fn reduce(&self, unit: usize, range: Range<usize>) -> Self::Reduced {
        let strip = Strip::new(unit, self.0.lines);
        let (start, len) = strip.span(&range);
        let (y, g): (*const T, *const T) = (self.0.y.at(start, len), self.0.g.at(start, len));
        let mut totals = vec![CompensatedSum::zero(); strip.width.div_ceil(T::Lanes::<S>::COUNT)];
        strip.fold::<T::Lanes<S>, _>(
            range.len(),
            &mut totals,
            #[inline(always)]
            |total, rows, count, i| {
                let mut sum = T::Lanes::<S>::splat(T::Real::ZERO);
                for i in (0..rows).map(|j| i + j * strip.stride) {
                    // SAFETY: the rows are there, and the instructions by the caller's promise.
                    let g = unsafe { read::<S, T>(g, i, count) };
                    let term = match self.0.output {
                        // SAFETY: likewise.
                        Output::Probability => g * unsafe { read::<S, T>(y, i, count) },
                        Output::LogProbability => g,
                    };
                    sum = sum + term;
                }
                total.add(sum);
            },
        );
        totals
    }

    #[inline(always)]
    unsafe fn merge(a: Self::Reduced, b: Self::Reduced) -> Self::Reduced {
        merged(a, b, CompensatedSum::merge)
    }

    #[inline(always)]
    unsafe fn write(&self, unit: usize, range: Range<usize>, totals: &Self::Reduced) {
        let strip = Strip::new(unit, self.0.lines);
        let sums = flat(totals.iter().map(|total| total.value()));
        for j in range {
            let (start, width) = (strip.row(j), strip.width);
            let (ys, gs, out) = (self.0.y.at(start, width), self.0.g.at(start, width), self.0.out.at(start, width));
            // SAFETY of the block: the elements are there, and `sums` is a vector longer than the row; the rest by the
            // caller's promise.
            unsafe {
                T::write::<S>(
                    out,
                    width,
                    #[inline(always)]
                    |i, count| {
                        let (y, g) = (read::<S, T>(ys, i, count), read::<S, T>(gs, i, count));
                        self.0.output.gradient(y, g, T::Lanes::<S>::load(sums.as_ptr().add(i)))
                    },
                )
            }
        }
    }
}
