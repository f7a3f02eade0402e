//! Lines of a few rows along another dimension, so few that what is done once for each strip would be most of the time: a few vectors of
//! neighbouring lines are taken at a time, whole, with what there is for each line in registers.

use super::columns::{read, Strip, ROWS, WIDTH};
use super::lanes::{Lanes, Pack, MAX_LANES};
use super::level::Simd;
use super::memory::{Elements, Scratch};
use super::{Backward, Element, ScoresBackward, Softmaxed};
use crate::lines::Lines;
use crate::op::Output;
use crate::state::{CompensatedSum, Number, Real};
use std::ops::Range;

/// So many vectors side by side wait for nothing that one of them waits for.
const SIDE_BY_SIDE: usize = 4;
/// Their rows are to stay in the first cache, with the exponentials: lines of so many elements at most …
const MOST_KEPT: usize = 4096;
/// … where as many are side by side as these.
const MOST_LINES: usize = 64;

/// Whether lines are so short.
pub(super) fn are_few(lines: Lines) -> bool {
    lines.len <= MOST_KEPT / lines.inner.clamp(1, MOST_LINES)
}

/// Neighbouring lines, `N` vectors of them, of which the last need not be whole.
#[derive(Clone, Copy)]
struct Rows<const N: usize> {
    /// How many rows, and how far apart they are.
    len: usize,
    stride: usize,
    /// Lines in the last vector.
    last: usize,
}

impl<const N: usize> Rows<N> {
    /// Calls `f(row, vector, place, count)` for the vectors of these rows, whose places are relative to the first row's first.
    #[inline(always)]
    fn each<V: Lanes>(&self, rows: Range<usize>, mut f: impl FnMut(usize, usize, usize, usize)) {
        for j in rows {
            for n in 0..N {
                f(j, n, j * self.stride + n * V::COUNT, if n + 1 < N { V::COUNT } else { self.last });
            }
        }
    }

    /// The sums over rows of `term(row, vector, place, count)`.
    #[inline(always)]
    fn sums<V: Lanes>(&self, mut term: impl FnMut(usize, usize, usize, usize) -> V) -> [V; N] {
        let mut sums = [CompensatedSum::zero(); N];
        for first in (0..self.len).step_by(ROWS) {
            let mut part = [V::splat(V::Real::ZERO); N];
            self.each::<V>(
                first..self.len.min(first + ROWS),
                #[inline(always)]
                |j, n, at, count| part[n] = part[n] + term(j, n, at, count),
            );
            if self.len <= ROWS {
                return part;
            }
            for (sum, part) in sums.iter_mut().zip(part) {
                sum.add(part);
            }
        }
        let mut values = [V::splat(V::Real::ZERO); N];
        // A loop: what becomes of `map` has not the instructions of `S`.
        for (value, sum) in values.iter_mut().zip(sums) {
            *value = sum.value();
        }
        values
    }
}

/// What is done with [`Rows`], however many vectors they are; `start` is the first one's place in the strip.
trait OfRows<S: Simd> {
    /// # Safety
    /// The CPU has the instructions of `S`, and the rows are there.
    unsafe fn take<const N: usize>(&mut self, rows: Rows<N>, start: usize);
}

/// Takes all lines of a strip.
///
/// # Safety
/// The CPU has the instructions of `S`, and the strip is there.
#[inline(always)]
unsafe fn each<S: Simd, V: Lanes>(strip: &Strip, len: usize, of_rows: &mut impl OfRows<S>) {
    let (stride, side_by_side) = (strip.stride, SIDE_BY_SIDE * V::COUNT);
    let mut start = 0;
    // SAFETY of the block: as promised by the caller.
    unsafe {
        while start + side_by_side <= strip.width {
            of_rows.take(Rows::<SIDE_BY_SIDE> { len, stride, last: V::COUNT }, start);
            start += side_by_side;
        }
        while start < strip.width {
            let last = V::COUNT.min(strip.width - start);
            of_rows.take(Rows::<1> { len, stride, last }, start);
            start += V::COUNT;
        }
    }
}

/// The maxima of the lines' logits, `logit(place, count)`, but `least` at least.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
fn maxima<V: Lanes, const N: usize>(
    rows: &Rows<N>,
    least: V::Real,
    mut logit: impl FnMut(usize, usize) -> V,
) -> [V; N] {
    let mut max = [V::splat(least); N];
    rows.each::<V>(
        0..rows.len,
        #[inline(always)]
        |_, n, at, count| max[n] = logit(at, count).or_greater(max[n]),
    );
    max
}

struct SoftmaxStrip<T: Element> {
    src: *const T,
    out: *mut T,
    /// Room for the rows of [`SIDE_BY_SIDE`] vectors.
    kept: *mut T::Real,
    scale: T::Real,
    least: T::Real,
    output: Output,
}

impl<S: Simd, T: Element> OfRows<S> for SoftmaxStrip<T> {
    #[inline(always)]
    unsafe fn take<const N: usize>(&mut self, rows: Rows<N>, start: usize) {
        let (src, out, kept) = (self.src.wrapping_add(start), self.out.wrapping_add(start), self.kept);
        let (lanes, output) = (T::Lanes::<S>::COUNT, self.output);
        let scale = T::Lanes::<S>::splat(self.scale);
        // SAFETY of the block: as promised by the caller; there is room for what is kept.
        unsafe {
            let max = maxima(
                &rows,
                self.least,
                #[inline(always)]
                |at, count| {
                    S::prefetch(src.wrapping_add(at + N * lanes));
                    read::<S, T>(src, at, count) * scale
                },
            );
            let sums = rows.sums(
                #[inline(always)]
                |j, n, at, count| {
                    // Memory that is written is read first.
                    S::prefetch(out.wrapping_add(at));
                    let shifted = read::<S, T>(src, at, count) * scale - max[n];
                    let exp = shifted.scaled_exp();
                    output.kept(shifted, exp).store(kept.add((j * N + n) * lanes));
                    exp
                },
            );
            let mut factors = sums;
            for factor in &mut factors {
                *factor = output.factor(*factor);
            }
            rows.each::<T::Lanes<S>>(
                0..rows.len,
                #[inline(always)]
                |j, n, at, count| {
                    let kept = T::Lanes::<S>::load(kept.add((j * N + n) * lanes));
                    T::put::<S>(output.of_kept(kept, factors[n]), out.add(at), count);
                },
            );
        }
    }
}

/// The results of lines that [are few](are_few), in these strips.
///
/// # Safety
/// The CPU has the instructions of `S`, and no other thread writes to the same strips.
#[inline(always)]
pub(super) unsafe fn softmax<S: Simd, T: Element>(of: &Softmaxed<T>, strips: Range<usize>) {
    let mut scratch = Scratch::new();
    let kept = scratch.room(of.lines.len * SIDE_BY_SIDE * T::Lanes::<S>::COUNT);
    for strip in Strip::all(strips, of.lines) {
        let (start, elements) = strip.span(&(0..of.lines.len));
        let (src, out) = (of.src.at(start, elements).cast_const(), of.out.at(start, elements));
        let mut of_rows = SoftmaxStrip { src, out, kept, scale: of.scale, least: of.least, output: of.output };
        // SAFETY: the strip is there; the rest by the caller's promise.
        unsafe { each::<S, T::Lanes<S>>(&strip, of.lines.len, &mut of_rows) }
    }
}

struct BackwardStrip<T> {
    y: *const T,
    g: *const T,
    out: *mut T,
    output: Output,
}

impl<S: Simd, T: Element> OfRows<S> for BackwardStrip<T> {
    #[inline(always)]
    unsafe fn take<const N: usize>(&mut self, rows: Rows<N>, start: usize) {
        let [ys, gs] = [self.y, self.g].map(|from| from.wrapping_add(start));
        let (out, ahead) = (self.out.wrapping_add(start), N * T::Lanes::<S>::COUNT);
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let sums = rows.sums(
                #[inline(always)]
                |_, _, at, count| {
                    S::prefetch(ys.wrapping_add(at + ahead));
                    S::prefetch(gs.wrapping_add(at + ahead));
                    S::prefetch(out.wrapping_add(at));
                    let g = read::<S, T>(gs, at, count);
                    match self.output {
                        Output::Probability => read::<S, T>(ys, at, count) * g,
                        Output::LogProbability => g,
                    }
                },
            );
            rows.each::<T::Lanes<S>>(
                0..rows.len,
                #[inline(always)]
                |_, n, at, count| {
                    let (y, g) = (read::<S, T>(ys, at, count), read::<S, T>(gs, at, count));
                    T::put::<S>(self.output.gradient(y, g, sums[n]), out.add(at), count);
                },
            );
        }
    }
}

/// The gradients of lines that [are few](are_few), in these strips.
///
/// # Safety
/// As of [`softmax`].
#[inline(always)]
pub(super) unsafe fn backward<S: Simd, T: Element>(of: &Backward<T>, strips: Range<usize>) {
    for strip in Strip::all(strips, of.lines) {
        let (start, elements) = strip.span(&(0..of.lines.len));
        let [y, g] = [&of.y, &of.g].map(|from| from.at(start, elements).cast_const());
        let mut of_rows = BackwardStrip { y, g, out: of.out.at(start, elements), output: of.output };
        // SAFETY: the strip is there; the rest by the caller's promise.
        unsafe { each::<S, T::Lanes<S>>(&strip, of.lines.len, &mut of_rows) }
    }
}

struct ScoresBackwardStrip<T: Element> {
    scores: *const T,
    g: *const T,
    out: *mut T,
    /// Room for the rows of [`SIDE_BY_SIDE`] vectors.
    kept: *mut T::Real,
    scale: T::Real,
    output: Output,
}

impl<S: Simd, T: Element> OfRows<S> for ScoresBackwardStrip<T> {
    #[inline(always)]
    unsafe fn take<const N: usize>(&mut self, rows: Rows<N>, start: usize) {
        let [scores, gs] = [self.scores, self.g].map(|from| from.wrapping_add(start));
        let (out, kept, lanes, output) = (self.out.wrapping_add(start), self.kept, T::Lanes::<S>::COUNT, self.output);
        let scale = T::Lanes::<S>::splat(self.scale);
        let zero = T::Lanes::<S>::splat(T::Real::ZERO);
        let lowest = T::Lanes::<S>::splat(T::Real::LOWEST);
        // SAFETY of the block: as promised by the caller; there is room for what is kept.
        unsafe {
            let logit = {
                #[inline(always)]
                |at, count| read::<S, T>(scores, at, count) * scale
            };
            // Of what takes part.
            let gradient = {
                #[inline(always)]
                |z: T::Lanes<S>, at, count| z.if_less(lowest, zero, read::<S, T>(gs, at, count))
            };
            let max = maxima(
                &rows,
                T::Real::LOWEST,
                #[inline(always)]
                |at, count| {
                    S::prefetch(scores.wrapping_add(at + N * lanes));
                    logit(at, count)
                },
            );
            let mut inverse = rows.sums(
                #[inline(always)]
                |j, n, at, count| {
                    S::prefetch(gs.wrapping_add(at + N * lanes));
                    let exp = (logit(at, count) - max[n]).scaled_exp();
                    exp.store(kept.add((j * N + n) * lanes));
                    exp
                },
            );
            for inverse in &mut inverse {
                *inverse = Output::Probability.factor(*inverse);
            }
            let totals = rows.sums(
                #[inline(always)]
                |j, n, at, count| {
                    S::prefetch(out.wrapping_add(at));
                    let g = gradient(logit(at, count), at, count);
                    match output {
                        Output::Probability => T::Lanes::<S>::load(kept.add((j * N + n) * lanes)) * inverse[n] * g,
                        Output::LogProbability => g,
                    }
                },
            );
            rows.each::<T::Lanes<S>>(
                0..rows.len,
                #[inline(always)]
                |j, n, at, count| {
                    let z = logit(at, count);
                    let p = T::Lanes::<S>::load(kept.add((j * N + n) * lanes)) * inverse[n];
                    let result = output.logit_gradient(p, gradient(z, at, count), totals[n]) * scale;
                    T::put::<S>(z.if_less(lowest, zero, result), out.add(at), count);
                },
            );
        }
    }
}

/// The gradients of the scores of lines that [are few](are_few), in these strips.
///
/// # Safety
/// As of [`softmax`].
#[inline(always)]
pub(super) unsafe fn scores_backward<S: Simd, T: Element>(of: &ScoresBackward<T>, strips: Range<usize>) {
    let mut scratch = Scratch::new();
    let kept = scratch.room(of.lines.len * SIDE_BY_SIDE * T::Lanes::<S>::COUNT);
    for strip in Strip::all(strips, of.lines) {
        let (start, elements) = strip.span(&(0..of.lines.len));
        let [scores, g] = [&of.scores, &of.g].map(|from| from.at(start, elements).cast_const());
        let out = of.out.at(start, elements);
        let mut of_rows = ScoresBackwardStrip { scores, g, out, kept, scale: of.scale, output: of.output };
        // SAFETY: the strip is there; the rest by the caller's promise.
        unsafe { each::<S, T::Lanes<S>>(&strip, of.lines.len, &mut of_rows) }
    }
}

/// A number of each line of a strip, and room for a vector more.
pub(super) type OfLines<R> = [R; WIDTH + MAX_LANES];

struct SumsOfStrip<T: Element> {
    src: *const T,
    max: OfLines<T::Real>,
    sum: OfLines<T::Real>,
}

impl<S: Simd, T: Element> OfRows<S> for SumsOfStrip<T> {
    #[inline(always)]
    unsafe fn take<const N: usize>(&mut self, rows: Rows<N>, start: usize) {
        let (src, lanes) = (self.src.wrapping_add(start), T::Lanes::<S>::COUNT);
        // SAFETY of the block: as promised by the caller; there is room.
        unsafe {
            let max = maxima(
                &rows,
                T::Real::NEG_INFINITY,
                #[inline(always)]
                |at, count| {
                    S::prefetch(src.wrapping_add(at + N * lanes));
                    read::<S, T>(src, at, count)
                },
            );
            let lowest = T::Lanes::<S>::splat(T::Real::LOWEST);
            let mut references = max;
            for reference in &mut references {
                *reference = reference.or_greater(lowest);
            }
            let sums = rows.sums(
                #[inline(always)]
                |_, n, at, count| (read::<S, T>(src, at, count) - references[n]).scaled_exp(),
            );
            for n in 0..N {
                max[n].store(self.max.as_mut_ptr().add(start + n * lanes));
                sums[n].unscaled().store(self.sum.as_mut_ptr().add(start + n * lanes));
            }
        }
    }
}

/// Calls `found(first, count, maxima, sums)` for each strip, with the number of its first line, how many there are, and what is found of
/// them, which [are few](are_few): their maxima, and Σ exp(x − reference), where that is the maximum or the lowest number.
///
/// # Safety
/// The CPU has the instructions of `S`.
#[inline(always)]
pub(super) unsafe fn sums<S: Simd, T: Element>(
    src: &Elements<T>,
    lines: Lines,
    strips: Range<usize>,
    mut found: impl FnMut(usize, usize, &OfLines<T::Real>, &OfLines<T::Real>),
) {
    let zeros = [T::Real::ZERO; WIDTH + MAX_LANES];
    let mut of_rows = SumsOfStrip::<T> { src: std::ptr::null(), max: zeros, sum: zeros };
    let mut first = Strip::first_line(strips.start, lines);
    for strip in Strip::all(strips, lines) {
        let (start, elements) = strip.span(&(0..lines.len));
        of_rows.src = src.at(start, elements);
        // SAFETY: the strip is there; the rest by the caller's promise.
        unsafe { each::<S, T::Lanes<S>>(&strip, lines.len, &mut of_rows) }
        found(first, strip.width, &of_rows.max, &of_rows.sum);
        first += strip.width;
    }
}

struct MapOfStrip<T: Element, L, F, const K: usize> {
    src: *const T,
    out: *mut T,
    /// The number of the strip's first line.
    first: usize,
    of_lines: L,
    f: F,
}

impl<S: Simd, T: Element, L, F, const K: usize> OfRows<S> for MapOfStrip<T, L, F, K>
where
    L: Fn(usize, usize) -> [T::Lanes<S>; K],
    F: Fn(&[T::Lanes<S>; K], T::Lanes<S>, T::Lanes<S>) -> T::Lanes<S>,
{
    #[inline(always)]
    unsafe fn take<const N: usize>(&mut self, rows: Rows<N>, start: usize) {
        let (src, out, lanes) = (self.src.wrapping_add(start), self.out.wrapping_add(start), T::Lanes::<S>::COUNT);
        let mut of = [[T::Lanes::<S>::splat(T::Real::ZERO); K]; N];
        for (n, of) in of.iter_mut().enumerate() {
            *of = (self.of_lines)(self.first + start + n * lanes, if n + 1 < N { lanes } else { rows.last });
        }
        // SAFETY of the block: as promised by the caller.
        unsafe {
            rows.each::<T::Lanes<S>>(
                0..rows.len,
                #[inline(always)]
                |j, n, at, count| {
                    S::prefetch(src.wrapping_add(at + N * lanes));
                    S::prefetch(out.wrapping_add(at + N * lanes));
                    let row = T::Lanes::<S>::splat(T::Real::nearest(j as f64));
                    T::put::<S>((self.f)(&of[n], row, read::<S, T>(src, at, count)), out.add(at), count);
                },
            );
        }
    }
}

/// Writes `f(of_lines, row, x)` of each vector of these strips of lines that [are few](are_few), with the number of its row, and what
/// `of_lines(first, count)` says of its lines.
///
/// # Safety
/// As of [`softmax`].
#[inline(always)]
pub(super) unsafe fn map<S: Simd, T: Element, const K: usize>(
    (src, out, lines): (&Elements<T>, &Elements<T>, Lines),
    strips: Range<usize>,
    of_lines: impl Fn(usize, usize) -> [T::Lanes<S>; K] + Copy,
    f: impl Fn(&[T::Lanes<S>; K], T::Lanes<S>, T::Lanes<S>) -> T::Lanes<S> + Copy,
) {
    let mut first = Strip::first_line(strips.start, lines);
    for strip in Strip::all(strips, lines) {
        let (start, elements) = strip.span(&(0..lines.len));
        let (src, out) = (src.at(start, elements).cast_const(), out.at(start, elements));
        let mut of_rows = MapOfStrip::<_, _, _, K> { src, out, first, of_lines, f };
        // SAFETY: the strip is there; the rest by the caller's promise.
        unsafe { each::<S, T::Lanes<S>>(&strip, lines.len, &mut of_rows) }
        first += strip.width;
    }
}
