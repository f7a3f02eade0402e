//! Log-sum-exp, the statistics that a loss needs of each line, and the gradient of the logits from theirs.

use super::columns::{self, flat, Strip};
use super::few_rows;
use super::in_batches::BATCH_LINE;
use super::lanes::{fold, sum_seen, Lanes, Pack, MAX_LANES};
use super::level::{Level, Simd, Task};
use super::memory::{filled, leaves_caches, Elements, Numbers};
use super::narrow::{self, Narrow};
use super::rows::{self, ahead, ahead_if, blocks, exp_sum, sum_of, AHEAD_BLOCKS, BLOCK_VECTORS};
use super::{run, run_units, Element, Pass};
use crate::lines::Lines;
use crate::op::Schedule;
use crate::state::{CompensatedSum, Merge, Number, Real, SoftmaxState};
use crate::statistics::{self, statistics_of, Ignored, MOST_STATISTICS};
use std::mem::MaybeUninit;
use std::ops::Range;

/// What a loss knows beside the logits: a target for each line, none of those that count out of range, and a weight for each class.
#[derive(Clone, Copy)]
pub(crate) struct Classes<'a, R> {
    pub targets: &'a [i64],
    pub ignored: Ignored,
    /// `None`: 1 each.
    pub weights: Option<&'a [R]>,
    pub sum_of_weights: R,
    /// Whether the sum over classes is asked for.
    pub smooth: bool,
}

impl<R: Real> Classes<'_, R> {
    /// How many statistics of a line are asked for.
    fn statistics(&self) -> usize {
        statistics_of(self.weights.is_some(), self.smooth)
    }

    /// The class, unless the line is to be ignored.
    fn target(&self, line: usize) -> Option<usize> {
        let target = self.targets[line];
        (!self.ignored.is(target)).then_some(target as usize)
    }

    fn weight(&self, class: usize) -> R {
        self.weights.map_or(R::ONE, |weights| weights[class])
    }

    /// The sum of the weights of these classes.
    #[inline(always)]
    fn sum<V: Lanes<Real = R>>(&self, classes: Range<usize>) -> R {
        match self.weights {
            None => R::nearest(classes.len() as f64),
            Some(_) => rows::sum_of_blocks::<V>(
                classes.len(),
                #[inline(always)]
                |start, len| {
                    sum_of(
                        len,
                        #[inline(always)]
                        |i, count| self.weights::<V>(classes.start + start + i, count),
                    )
                },
            ),
        }
    }

    /// The weights of the classes `class..class + count`, 0 in the lanes that are left.
    #[inline(always)]
    fn weights<V: Lanes<Real = R>>(&self, class: usize, count: usize) -> V {
        match self.weights {
            None => V::splat(R::ONE),
            // SAFETY: a slice of `count` is there.
            Some(weights) => unsafe { V::get(weights[class..][..count].as_ptr(), count) },
        }
    }
}

/// Log-sum-exp of each line of `src`.
pub(crate) fn log_sum_exp<T: Element>(src: &[T], lines: Lines) -> Vec<T::Real> {
    if lines.len == 0 {
        return vec![T::Real::NEG_INFINITY; lines.count()];
    }
    let src = Elements::read(src);
    // SAFETY: every line's is written.
    unsafe { filled(lines.count(), |out| Level::best().run(Statistics { src, out, lines, classes: None })) }
}

/// The statistics of each line of `src`.
pub(crate) fn line_statistics<T: Element>(src: &[T], lines: Lines, classes: Classes<T::Real>) -> Vec<T::Real> {
    let src = Elements::read(src);
    let count = classes.statistics() * lines.count();
    let classes = Some(classes);
    // SAFETY: every line's are written.
    unsafe { filled(count, |out| Level::best().run(Statistics { src, out, lines, classes })) }
}

/// The gradient of the logits `src`, given the statistics of their lines and the gradients of those.
pub(crate) fn loss_backward<T: Element>(
    src: &[T],
    lines: Lines,
    statistics: &[T::Real],
    gradients: &[T::Real],
    classes: Classes<T::Real>,
) -> Vec<T> {
    let src = Elements::read(src);
    // The weights of others than the targets count in the sum over classes only.
    let classes = Classes { weights: classes.weights.filter(|_| classes.smooth), ..classes };
    // SAFETY: every element is of one line, and every line is written.
    unsafe {
        filled(lines.elem_count(), |out| {
            Level::best().run(LossBackward { src, out, lines, classes, statistics, gradients })
        })
    }
}

/// # Safety
/// The CPU has the instructions of `S`, and `from` is valid for a read.
#[inline(always)]
pub(super) unsafe fn one<S: Simd, T: Element>(from: *const T) -> T::Real {
    let mut x = T::Real::ZERO;
    // SAFETY: as promised by the caller.
    unsafe { T::load_part::<S>(from, 1).store_part(&mut x, 1) };
    x
}

/// Rounds `x` and writes it: not by a vector's `store_part`, since what rustc 1.95 makes of one with a count that is known to
/// be 1 writes four bytes of a bf16.
///
/// # Safety
/// The CPU has the instructions of `S`, and `to` is valid for a write.
#[inline(always)]
pub(super) unsafe fn put_one<S: Simd, T: Element>(x: T::Real, to: *mut T) {
    const { assert!(T::Lanes::<S>::COUNT <= MAX_LANES) }
    let mut items = [const { MaybeUninit::<T>::uninit() }; MAX_LANES];
    // SAFETY: there is room for a vector, which is written before its first element is read; the rest by the caller's promise.
    unsafe {
        T::store::<S>(T::Lanes::<S>::splat(x), items.as_mut_ptr().cast());
        to.write(items[0].assume_init());
    }
}

fn is_finite<R: Real>(x: R) -> bool {
    R::NEG_INFINITY < x && x < R::ZERO - R::NEG_INFINITY
}

/// What was found of a line.
struct Found<R> {
    max: R,
    /// Σ exp(x − max)
    sum: R,
    /// The same relative to another reference: 0 or NaN where the maximum is −∞.
    unscaled: R,
    /// Σ weight·(x − max)
    terms: R,
}

impl<R: Real> Found<R> {
    fn of(state: &SoftmaxState<R>, terms: R) -> Self {
        let line = state.finish();
        Self { max: line.max, sum: line.sum, unscaled: state.sum(), terms }
    }
}

#[derive(Clone, Copy)]
struct Statistics<'a, T: Element> {
    src: Elements<'a, T>,
    /// A log-sum-exp for each line; with `classes` its [statistics](Classes::statistics), as many apart as there are lines.
    out: Elements<'a, T::Real>,
    lines: Lines,
    classes: Option<Classes<'a, T::Real>>,
}

impl<'a, T: Element> Statistics<'a, T> {
    /// # Safety
    /// The CPU has the instructions of `S`, and no other thread writes of the same line.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, line: usize, found: Found<T::Real>) {
        let zero = T::Real::ZERO;
        let infinity = zero - T::Real::NEG_INFINITY;
        let finite = is_finite(found.max);
        let Lines { len, inner, .. } = self.lines;
        // SAFETY: the element is there; the instructions by the caller's promise.
        let at = |j: usize| unsafe { one::<S, T>(self.src.at((line / inner * len + j) * inner + line % inner, 1)) };
        let log_sum = if finite { T::Real::ONE.or_greater(found.sum).ln() } else { infinity + T::Real::NEG_INFINITY };
        let put = |index: usize, value| {
            let to = self.out.at(index * self.lines.count() + line, 1);
            // SAFETY: it is there, and this line's.
            unsafe { to.write(value) }
        };
        let Some(classes) = self.classes else {
            let special = || match found.max > zero {
                // NaN is passed over by the maximum, and does not show in a sum that +∞ makes NaN anyway.
                true => (0..len).map(at).find(|&x| x.differs(x)).unwrap_or(infinity),
                false => found.max + found.unscaled,
            };
            return put(0, if finite { found.max + log_sum } else { special() });
        };
        let mut numbers = [zero; MOST_STATISTICS];
        if let Some(target) = classes.target(line) {
            numbers[statistics::LOG_P] = (at(target) - found.max) - log_sum;
            if classes.smooth {
                numbers[statistics::SMOOTH] = found.terms - classes.sum_of_weights * log_sum;
                numbers[statistics::SUM_OF_WEIGHTS] = classes.sum_of_weights;
            }
            numbers[statistics::WEIGHT] = classes.weight(target);
            numbers[statistics::KEPT] = T::Real::ONE;
            numbers[statistics::MAX] = found.max;
            numbers[statistics::LOG_SUM] = log_sum;
        }
        numbers.into_iter().take(classes.statistics()).enumerate().for_each(|(index, number)| put(index, number));
    }
}

impl<'a, T: Element> Statistics<'a, T> {
    /// The classes, if the sum over them is asked for.
    fn smoothed(&self) -> Option<Classes<'a, T::Real>> {
        self.classes.filter(|classes| classes.smooth)
    }

    /// Whether maxima and sums are all that is asked for.
    fn is_of_sums(&self) -> bool {
        self.smoothed().is_none()
    }

    /// [`write`](Self::write) for `count` lines from this one on, a vector at most, given their maxima, and Σ exp(x − reference), where that
    /// is the maximum or the lowest number.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and no other thread writes of the same lines.
    #[inline(always)]
    unsafe fn write_lines<S: Simd>(&self, first: usize, count: usize, max: T::Lanes<S>, sum: T::Lanes<S>) {
        let zero = T::Real::ZERO;
        let lowest = T::Lanes::<S>::splat(T::Real::LOWEST);
        // SAFETY of the block: the lines are there; the rest by the caller's promise.
        unsafe {
            let highest = T::Lanes::<S>::splat(zero - T::Real::LOWEST);
            let in_use = max.keep(count, zero);
            if !in_use.at_most(highest).or_greater(lowest).differs(in_use) {
                let log_sum = T::Lanes::<S>::splat(T::Real::ONE).or_greater(sum).ln();
                return match &self.classes {
                    None => (max + log_sum).put(self.out.at(first, count), count),
                    Some(classes) => self.write_targets::<S>(classes, first, count, max, log_sum),
                };
            }
            let (mut of_max, mut of_sum) = ([zero; MAX_LANES], [zero; MAX_LANES]);
            max.store(of_max.as_mut_ptr());
            sum.store(of_sum.as_mut_ptr());
            for (i, (max, sum)) in of_max.into_iter().zip(of_sum).take(count).enumerate() {
                self.write::<S>(first + i, Found { max, sum, unscaled: sum, terms: zero });
            }
        }
    }

    /// [`write_lines`](Self::write_lines) for a loss, where all is finite but the sums.
    ///
    /// # Safety
    /// As of that.
    #[inline(always)]
    unsafe fn write_targets<S: Simd>(
        &self,
        classes: &Classes<T::Real>,
        first: usize,
        count: usize,
        max: T::Lanes<S>,
        log_sum: T::Lanes<S>,
    ) {
        let zero = T::Real::ZERO;
        let Lines { len, inner, .. } = self.lines;
        // What line `first + i` has of its target: the logit, the weight, and whether it counts.
        let (mut logits, mut weights, mut kept) = ([zero; MAX_LANES], [zero; MAX_LANES], [zero; MAX_LANES]);
        let (mut outer, mut column) = (first / inner, first % inner);
        for i in 0..count {
            if let Some(target) = classes.target(first + i) {
                // SAFETY: the element is there; the instructions by the caller's promise.
                logits[i] = unsafe { one::<S, T>(self.src.at((outer * len + target) * inner + column, 1)) };
                weights[i] = classes.weight(target);
                kept[i] = T::Real::ONE;
            }
            column += 1;
            if column == inner {
                (outer, column) = (outer + 1, 0);
            }
        }
        // SAFETY of the block: there is room; the rest by the caller's promise.
        unsafe {
            let (logits, weights) = (T::Lanes::<S>::load(logits.as_ptr()), T::Lanes::<S>::load(weights.as_ptr()));
            let (kept, none) = (T::Lanes::<S>::load(kept.as_ptr()), T::Lanes::<S>::splat(zero));
            let half = T::Lanes::<S>::splat(T::Real::nearest(0.5));
            for (index, of_kept) in [
                (statistics::LOG_P, (logits - max) - log_sum),
                (statistics::WEIGHT, weights),
                (statistics::MAX, max),
                (statistics::LOG_SUM, log_sum),
                (statistics::KEPT, kept),
                (statistics::SMOOTH, none),
                (statistics::SUM_OF_WEIGHTS, none),
            ]
            .into_iter()
            .take(classes.statistics())
            {
                let number = half.if_less(kept, of_kept, none);
                number.put(self.out.at(index * self.lines.count() + first, count), count);
            }
        }
    }
}

impl<T: Element> Task for Statistics<'_, T> {
    fn run<S: Simd>(self) {
        let narrow = Narrow::of::<T::Lanes<S>>(self.lines, narrow::longest_summed::<T::Lanes<S>>());
        if let Some(narrow) = narrow.filter(|_| self.is_of_sums()) {
            return run::<S, _>(&NarrowLines { of: self, narrow }, self.lines, true);
        }
        if self.lines.inner == 1 {
            run::<S, _>(&Rows(self), self.lines, true)
        } else {
            run::<S, _>(&Columns(self), self.lines, true)
        }
    }
}

/// The state of a part of a line, or of several side by side, and its sums over classes, if they are asked for.
#[derive(Clone)]
struct Part<V> {
    state: SoftmaxState<V>,
    /// Σ weight·(x − [pivot](Self::pivot))
    terms: CompensatedSum<V>,
    /// Σ weight
    weights: CompensatedSum<V>,
}

impl<V: Number> Part<V> {
    #[inline(always)]
    fn empty() -> Self {
        Self::of(SoftmaxState::empty())
    }

    /// Without sums over classes.
    #[inline(always)]
    fn of(state: SoftmaxState<V>) -> Self {
        Self { state, terms: CompensatedSum::zero(), weights: CompensatedSum::zero() }
    }

    /// The maximum, so that all terms have one sign, and neither what logits have in common nor one far below the others drowns them.
    /// Finite where nothing but −∞ was seen.
    #[inline(always)]
    fn pivot(&self) -> V {
        self.state.max().or_greater(V::splat(V::Real::LOWEST))
    }

    /// Takes `max` into the maximum; answers what exponentials are relative to.
    #[inline(always)]
    fn grow(&mut self, max: V) -> V {
        let old = self.pivot();
        let reference = self.state.grow(max);
        let new = self.pivot();
        if new.differs(old) {
            // By halves: from the lowest number up to a great one the way itself is infinite, and no weight at all makes NaN of that.
            let half = V::splat(V::Real::nearest(0.5));
            let moved = self.weights.value() * (half * old - half * new);
            self.terms.add(moved);
            self.terms.add(moved);
        }
        reference
    }

    /// Adds parts of the sums over classes, relative to the pivot.
    #[inline(always)]
    fn add(&mut self, terms: V, weights: V) {
        self.terms.add(terms);
        self.weights.add(weights);
    }
}

impl<N: Number> Merge for Part<N> {
    #[inline(always)]
    fn merge(&mut self, mut other: Self) {
        self.grow(other.state.max());
        other.grow(self.state.max());
        self.state.merge(other.state);
        self.terms.merge(other.terms);
        self.weights.merge(other.weights);
    }
}

struct Rows<P>(P);
struct Columns<P>(P);

/// Lines that are [narrow](Narrow).
struct NarrowLines<'a, T: Element> {
    of: Statistics<'a, T>,
    narrow: Narrow,
}

impl<S: Simd, T: Element> Pass<S> for NarrowLines<'_, T> {
    type Reduced = SoftmaxState<T::Lanes<S>>;
    const WIDTH: usize = MAX_LANES;

    fn use_first(&self, _: Range<usize>) {}

    #[inline(always)]
    unsafe fn reduce(&self, block: usize, range: Range<usize>) -> Self::Reduced {
        let one = T::Lanes::<S>::splat(T::Real::ONE);
        // SAFETY: as promised by the caller.
        unsafe { self.narrow.reduce::<S, T>(&self.of.src, block, &range, one) }
    }

    /// With the first rows.
    #[inline(always)]
    unsafe fn write(&self, block: usize, range: Range<usize>, state: &Self::Reduced) {
        if range.start > 0 {
            return;
        }
        let states = self.narrow.states_of_lines(state);
        let (mut max, mut sum) = ([T::Real::ZERO; MAX_LANES], [T::Real::ZERO; MAX_LANES]);
        let inner = self.of.lines.inner;
        // SAFETY of the block: there is room; the rest by the caller's promise.
        unsafe {
            states.max().store(max.as_mut_ptr());
            states.sum().store(sum.as_mut_ptr());
            for (i, (max, sum)) in max.into_iter().zip(sum).take(inner).enumerate() {
                let found = Found::of(&SoftmaxState::from_parts(max, sum), T::Real::ZERO);
                self.of.write::<S>(block * inner + i, found);
            }
        }
    }

    #[inline(always)]
    unsafe fn whole(&self, blocks: Range<usize>, len: usize) {
        // SAFETY of the block: as promised by the caller.
        unsafe {
            if len * self.of.lines.inner > narrow::MOST_KEPT {
                return Pass::<S>::one_by_one(self, blocks, len);
            }
            self.narrow.sums::<S, T>(
                &self.of.src,
                blocks,
                #[inline(always)]
                |first, count, max, sum| self.of.write_lines::<S>(first, count, max, sum),
            )
        }
    }
}

impl<S: Simd, T: Element> Pass<S> for Rows<Statistics<'_, T>> {
    type Reduced = Part<T::Real>;
    const WIDTH: usize = 1;

    fn use_first(&self, _: Range<usize>) {}

    #[inline(always)]
    unsafe fn reduce(&self, line: usize, range: Range<usize>) -> Self::Reduced {
        let mut part = Part::empty();
        if self.0.classes.is_some_and(|classes| classes.target(line).is_none()) {
            return part;
        }
        let xs: *const T = self.0.src.at(line * self.0.lines.len + range.start, range.len());
        // SAFETY of the block: the elements are there, and the instructions by the caller's promise.
        unsafe {
            for (start, len) in blocks::<T::Lanes<S>>(0..range.len()) {
                let xs = xs.add(start);
                let reference = part.grow(rows::max_of::<S, T>(xs, len));
                let ahead = AHEAD_BLOCKS * BLOCK_VECTORS * T::Lanes::<S>::COUNT;
                part.state.add(exp_sum::<S, T>(
                    xs,
                    len,
                    reference,
                    ahead,
                    #[inline(always)]
                    |_, _, _| (),
                ));
                if let Some(classes) = self.0.smoothed() {
                    let class = range.start + start;
                    let terms = terms_of::<S, T>(&classes, xs, class, len, part.pivot());
                    part.add(terms, classes.sum::<T::Lanes<S>>(class..class + len));
                }
            }
        }
        part
    }

    /// With the first part of the line.
    #[inline(always)]
    unsafe fn write(&self, line: usize, range: Range<usize>, part: &Self::Reduced) {
        if range.start == 0 {
            // SAFETY: as promised by the caller.
            unsafe { self.0.write::<S>(line, Found::of(&part.state, part.terms.value())) }
        }
    }

    /// Lines of a block need no state: their sum is relative to their maximum from the first.
    #[inline(always)]
    unsafe fn whole(&self, lines: Range<usize>, len: usize) {
        if self.0.is_of_sums() && len <= BATCH_LINE {
            // SAFETY of the blocks: as promised by the caller.
            return match len <= T::Lanes::<S>::COUNT {
                true => unsafe { self.0.short::<S, true>(lines, len) },
                false => unsafe { self.0.short::<S, false>(lines, len) },
            };
        }
        for line in lines {
            let ignored = self.0.classes.is_some_and(|classes| classes.target(line).is_none());
            // SAFETY of the block: the elements are there; the rest by the caller's promise.
            unsafe {
                if ignored || len > BLOCK_VECTORS * T::Lanes::<S>::COUNT {
                    Pass::<S>::one_by_one(self, line..line + 1, len);
                    continue;
                }
                let xs: *const T = self.0.src.at(line * len, len);
                let max = rows::max_of::<S, T>(xs, len);
                // Finite, so that −∞ gives 0.
                let reference = max.or_greater(T::Real::LOWEST);
                let sum = exp_sum::<S, T>(
                    xs,
                    len,
                    reference,
                    ahead::<T>(),
                    #[inline(always)]
                    |_, _, _| (),
                );
                let terms = match self.0.smoothed() {
                    Some(classes) => terms_of::<S, T>(&classes, xs, 0, len, reference),
                    None => T::Real::ZERO,
                };
                self.0.write::<S>(line, Found { max, sum, unscaled: sum, terms });
            }
        }
    }
}

impl<T: Element> Statistics<'_, T> {
    /// Short lines, as many at a time as a vector has lanes: none waits for its own steps from a vector to one number. `ONE`: each is of a vector at
    /// most, which needs no loops.
    ///
    /// # Safety
    /// As of [`Pass::whole`].
    #[inline(always)]
    unsafe fn short<S: Simd, const ONE: bool>(&self, lines: Range<usize>, len: usize) {
        let none = T::Lanes::<S>::splat(T::Real::NEG_INFINITY);
        let mut of_lines = [none; MAX_LANES];
        let mut references = [T::Real::ZERO; MAX_LANES];
        let ahead = ahead_if::<T>(leaves_caches(&self.src));
        for first in lines.clone().step_by(T::Lanes::<S>::COUNT) {
            let count = T::Lanes::<S>::COUNT.min(lines.end - first);
            let xs: *const T = self.src.at(first * len, count * len);
            // SAFETY of the block: the elements are there; the rest by the caller's promise.
            unsafe {
                for (i, max) in of_lines[..count].iter_mut().enumerate() {
                    let xs = xs.add(i * len);
                    let greater = {
                        #[inline(always)]
                        |max, i, count| {
                            S::prefetch(xs.wrapping_add(ahead + i));
                            T::read::<S>(xs.add(i), count, T::Real::NEG_INFINITY).or_greater(max)
                        }
                    };
                    *max = match ONE {
                        true => greater(none, 0, len),
                        false => fold(len, none, greater, T::Lanes::<S>::or_greater),
                    };
                }
                let max = T::Lanes::<S>::max_of_each(&of_lines[..T::Lanes::<S>::COUNT]);
                // Finite, so that −∞ gives 0.
                max.or_greater(T::Lanes::<S>::splat(T::Real::LOWEST)).store(references.as_mut_ptr());
                for (i, sum) in of_lines[..count].iter_mut().enumerate() {
                    let (xs, reference) = (xs.add(i * len), T::Lanes::<S>::splat(references[i]));
                    let exp = {
                        #[inline(always)]
                        |i, count| (T::read::<S>(xs.add(i), count, T::Real::NEG_INFINITY) - reference).scaled_exp()
                    };
                    *sum = match ONE {
                        true => exp(0, len),
                        false => sum_seen(
                            len,
                            exp,
                            #[inline(always)]
                            |_, _, _| (),
                        ),
                    };
                }
                let sum = T::Lanes::<S>::sum_of_each(&of_lines[..T::Lanes::<S>::COUNT]).unscaled();
                self.write_lines::<S>(first, count, max, sum);
            }
        }
    }
}

/// Σ weight·(x − pivot) over at most a block: `len` elements, the first of which is of this class.
///
/// # Safety
/// The CPU has the instructions of `S`, and `xs` is valid for reads of `len` elements.
#[inline(always)]
unsafe fn terms_of<S: Simd, T: Element>(
    classes: &Classes<T::Real>,
    xs: *const T,
    class: usize,
    len: usize,
    pivot: T::Real,
) -> T::Real {
    sum_of(
        len,
        #[inline(always)]
        |i, count| {
            // SAFETY: as promised by the caller.
            let shifted = unsafe { T::read::<S>(xs.add(i), count, pivot) } - T::Lanes::<S>::splat(pivot);
            classes.weights::<T::Lanes<S>>(class + i, count) * shifted
        },
    )
}

impl<S: Simd, T: Element> Pass<S> for Columns<Statistics<'_, T>> {
    type Reduced = Vec<Part<T::Lanes<S>>>;
    const WIDTH: usize = columns::WIDTH;

    fn use_first(&self, _: Range<usize>) {}

    #[inline(always)]
    unsafe fn reduce(&self, unit: usize, range: Range<usize>) -> Self::Reduced {
        let strip = Strip::new(unit, self.0.lines);
        let (start, len) = strip.span(&range);
        let src: *const T = self.0.src.at(start, len);
        let mut parts = Vec::new();
        // SAFETY: the rows are there; the rest by the caller's promise.
        for state in unsafe { columns::states::<S, T>(src, &strip, range.len(), Schedule::Reduce, true, None) } {
            parts.push(Part::of(state));
        }
        let Some(classes) = self.0.smoothed() else { return parts };
        let lanes = T::Lanes::<S>::COUNT;
        // SAFETY of the block: the rows are there, and the instructions by the caller's promise.
        let terms = unsafe {
            columns::sum_rows(
                strip.width,
                range.len(),
                #[inline(always)]
                |j, i, count| {
                    let weight = T::Lanes::<S>::splat(classes.weight(range.start + j));
                    weight * (columns::read::<S, T>(src, j * strip.stride + i, count) - parts[i / lanes].pivot())
                },
            )
        };
        let weights = T::Lanes::<S>::splat(classes.sum::<T::Lanes<S>>(range));
        for (part, terms) in parts.iter_mut().zip(terms) {
            part.add(terms.value(), weights);
        }
        parts
    }

    /// With the first rows.
    #[inline(always)]
    unsafe fn write(&self, unit: usize, range: Range<usize>, parts: &Self::Reduced) {
        if range.start > 0 {
            return;
        }
        let strip = Strip::new(unit, self.0.lines);
        let max = flat(
            parts,
            #[inline(always)]
            |part| part.state.finish().max,
        );
        let sum = flat(
            parts,
            #[inline(always)]
            |part| part.state.finish().sum,
        );
        let unscaled = flat(
            parts,
            #[inline(always)]
            |part| part.state.sum(),
        );
        let terms = flat(
            parts,
            #[inline(always)]
            |part| part.terms.value(),
        );
        let first = Strip::first_line(unit, self.0.lines);
        for i in 0..strip.width {
            let found = Found { max: max[i], sum: sum[i], unscaled: unscaled[i], terms: terms[i] };
            // SAFETY: as promised by the caller.
            unsafe { self.0.write::<S>(first + i, found) }
        }
    }

    #[inline(always)]
    unsafe fn whole(&self, units: Range<usize>, len: usize) {
        if !self.0.is_of_sums() || !few_rows::are_few(self.0.lines) {
            // SAFETY: as promised by the caller.
            return unsafe { Pass::<S>::one_by_one(self, units, len) };
        }
        let lanes = T::Lanes::<S>::COUNT;
        // SAFETY of the block: the instructions, and no other writer, by the caller's promise; numbers are whole vectors.
        unsafe {
            few_rows::sums::<S, T>(
                &self.0.src,
                self.0.lines,
                units,
                #[inline(always)]
                |first, count, max, sum| {
                    for i in (0..count).step_by(lanes) {
                        let max = T::Lanes::<S>::load(max[i..].as_ptr());
                        let sum = T::Lanes::<S>::load(sum[i..].as_ptr());
                        self.0.write_lines::<S>(first + i, lanes.min(count - i), max, sum);
                    }
                },
            )
        }
    }
}

/// With p = exp((x − max) − log_sum): of_p·p + of_weight·weight, and of_target more for the target, if there is one. Where the
/// target is ignored all that is made of a p, even a NaN, with 0 in place of NaN, is 0.
#[derive(Clone, Copy)]
struct LineGradient<R> {
    max: R,
    log_sum: R,
    of_p: R,
    of_weight: R,
    of_target: R,
    target: Option<usize>,
}

impl<R: Real> LineGradient<R> {
    #[inline(always)]
    fn new(statistic: impl Fn(usize) -> R, gradient: impl Fn(usize) -> R, classes: &Classes<R>, line: usize) -> Self {
        let zero = R::ZERO;
        let target = classes.target(line);
        if target.is_none() {
            let log_sum = zero - R::NEG_INFINITY;
            return Self { max: zero, log_sum, of_p: zero, of_weight: zero, of_target: zero, target };
        }
        let (of_target, of_weight) = (gradient(statistics::OF_LOG_P), gradient(statistics::OF_SMOOTH));
        let (max, log_sum) = (statistic(statistics::MAX), statistic(statistics::LOG_SUM));
        let of_p = gradient(statistics::OF_LOG_SUM_EXP) - of_target - statistic(statistics::SUM_OF_WEIGHTS) * of_weight;
        // A NaN in the line is one in its sum, and in all of its gradient.
        let of_p = if log_sum.differs(log_sum) { log_sum } else { of_p };
        Self { max, log_sum, of_p, of_weight, of_target, target }
    }

    #[inline(always)]
    fn of<V: Number<Real = R>>(x: V, max: V, log_sum: V, of_p: V) -> V {
        ((x - max) - log_sum).exp().nan_to_zero() * of_p
    }

    /// Of the target, `x`.
    fn of_target(&self, x: R, weight: R) -> R {
        Self::of(x, self.max, self.log_sum, self.of_p) + self.of_weight * weight + self.of_target
    }
}

#[derive(Clone, Copy)]
struct LossBackward<'a, T: Element> {
    src: Elements<'a, T>,
    out: Elements<'a, T>,
    lines: Lines,
    classes: Classes<'a, T::Real>,
    /// As many apart as there are lines; what there is none of is 0.
    statistics: &'a [T::Real],
    gradients: &'a [T::Real],
}

impl<T: Element> LossBackward<'_, T> {
    /// Vectors of what [`LineGradient`] has of `count` lines from this one on, a vector at most: max, log_sum, of_p, of_weight, of_target and the
    /// target, or −1.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn of_lines<S: Simd>(&self, first: usize, count: usize) -> [T::Lanes<S>; 6] {
        let zero = T::Lanes::<S>::splat(T::Real::ZERO);
        let of = {
            #[inline(always)]
            |values: &[T::Real], index: usize| match values
                .get(index * self.lines.count() + first..)
                .and_then(|of| of.get(..count))
            {
                // SAFETY: as many are there; the rest by the caller's promise.
                Some(values) => unsafe { T::Lanes::<S>::get(values.as_ptr(), count) },
                None => zero,
            }
        };
        let mut targets = [T::Real::nearest(-1.0); MAX_LANES];
        for (i, to) in targets.iter_mut().enumerate().take(count) {
            if let Some(target) = self.classes.target(first + i) {
                *to = T::Real::nearest(target as f64);
            }
        }
        // SAFETY: a vector is there; the rest by the caller's promise.
        let target = unsafe { T::Lanes::<S>::load(targets.as_ptr()) };
        let none = T::Lanes::<S>::splat(T::Real::nearest(-0.5));
        let (of_target, of_weight) =
            (of(self.gradients, statistics::OF_LOG_P), of(self.gradients, statistics::OF_SMOOTH));
        let log_sum = of(self.statistics, statistics::LOG_SUM);
        let of_p = of(self.gradients, statistics::OF_LOG_SUM_EXP) - of_target;
        // A NaN in the line is one in its sum, and in all of its gradient.
        let of_p = of_p - of(self.statistics, statistics::SUM_OF_WEIGHTS) * of_weight + log_sum * zero;
        [
            target.if_less(none, zero, of(self.statistics, statistics::MAX)),
            target.if_less(none, T::Lanes::<S>::splat(T::Real::ZERO - T::Real::NEG_INFINITY), log_sum),
            target.if_less(none, zero, of_p),
            target.if_less(none, zero, of_weight),
            target.if_less(none, zero, of_target),
            target,
        ]
    }

    /// The gradients of a vector, given [what there is](Self::of_lines) of its lines and which classes these are.
    #[inline(always)]
    fn gradient<V: Lanes<Real = T::Real>>(of: &[V; 6], class: V, x: V) -> V {
        let [max, log_sum, of_p, of_weight, of_target, target] = *of;
        let others = LineGradient::of(x, max, log_sum, of_p) + of_weight;
        (class - target).abs().if_less(V::splat(T::Real::nearest(0.5)), others + of_target, others)
    }
}

impl<T: Element> Task for LossBackward<'_, T> {
    fn run<S: Simd>(self) {
        let Self { src, out, lines, classes, .. } = self;
        if classes.weights.is_none() {
            let of_lines = {
                #[inline(always)]
                // SAFETY: called inside of `enter`.
                |first: usize, count: usize| unsafe { self.of_lines::<S>(first, count) }
            };
            // Not the function itself, whose call would not be compiled for the instructions of `S`.
            let gradient = {
                #[inline(always)]
                |of: &[T::Lanes<S>; 6], class, x| Self::gradient(of, class, x)
            };
            let block = lines.len * lines.inner;
            let narrow = Narrow::of::<T::Lanes<S>>(lines, T::Lanes::<S>::COUNT / 2);
            // There classes are numbers of this type, which an f32 knows apart up to 2²⁴.
            let narrow = narrow.filter(|_| size_of::<T::Real>() > 4 || lines.len <= 1 << 24);
            if let Some(narrow) = narrow {
                let use_first = |elements| out.use_first(elements);
                return run_units::<S>(
                    lines.outer,
                    block,
                    Some(&use_first),
                    #[inline(always)]
                    // SAFETY: inside of `enter`, and each block is visited once.
                    |blocks| unsafe { narrow.map::<S, T, 6>(&src, &out, blocks, of_lines, gradient) },
                );
            }
            if lines.inner > 1 && few_rows::are_few(lines) {
                out.use_first(0..lines.elem_count());
                let width = lines.inner.min(columns::WIDTH);
                return run_units::<S>(
                    lines.outer * lines.inner.div_ceil(columns::WIDTH),
                    lines.len * width,
                    None,
                    #[inline(always)]
                    // SAFETY: inside of `enter`, and each strip is visited once.
                    |strips| unsafe { few_rows::map::<S, T, 6>((&src, &out, lines), strips, of_lines, gradient) },
                );
            }
        }
        if lines.inner == 1 {
            run::<S, _>(&Rows(self), lines, true)
        } else {
            run::<S, _>(&Columns(self), lines, true)
        }
    }
}

impl<T: Element> LossBackward<'_, T> {
    #[inline(always)]
    fn of_line(&self, line: usize) -> LineGradient<T::Real> {
        let of =
            |values: &[T::Real], index| values.get(index * self.lines.count() + line).map_or(T::Real::ZERO, |&x| x);
        LineGradient::new(|index| of(self.statistics, index), |index| of(self.gradients, index), &self.classes, line)
    }

    /// Writes the target's gradient, if the target of this line is in `range`; the line's elements begin at `start`.
    ///
    /// # Safety
    /// As of [`Pass::write`].
    #[inline(always)]
    unsafe fn write_target<S: Simd>(&self, gradient: &LineGradient<T::Real>, range: &Range<usize>, start: usize) {
        if let Some(target) = gradient.target.filter(|target| range.contains(target)) {
            let at = start + target * self.lines.inner;
            let (from, to) = (self.src.at(at, 1), self.out.at(at, 1));
            // SAFETY: the element is there; the rest by the caller's promise.
            unsafe {
                let value = gradient.of_target(one::<S, T>(from), self.classes.weight(target));
                put_one::<S, T>(value, to);
            }
        }
    }
}

impl<S: Simd, T: Element> Pass<S> for Rows<LossBackward<'_, T>> {
    type Reduced = ();
    const WIDTH: usize = 1;

    fn use_first(&self, elements: Range<usize>) {
        self.0.out.use_first(elements)
    }

    #[inline(always)]
    unsafe fn reduce(&self, _: usize, _: Range<usize>) {}

    #[inline(always)]
    unsafe fn write(&self, line: usize, range: Range<usize>, _: &()) {
        let start = line * self.0.lines.len;
        let xs: *const T = self.0.src.at(start + range.start, range.len());
        let out = self.0.out.at(start + range.start, range.len());
        let gradient = self.0.of_line(line);
        let splat = T::Lanes::<S>::splat;
        let (max, log_sum, of_p) = (splat(gradient.max), splat(gradient.log_sum), splat(gradient.of_p));
        let of_weight = splat(gradient.of_weight);
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        unsafe {
            if gradient.target.is_none() {
                let zero = splat(T::Real::ZERO);
                T::write::<S>(
                    out,
                    range.len(),
                    #[inline(always)]
                    |_, _| zero,
                );
                return;
            }
            if self.0.classes.weights.is_none() {
                T::write::<S>(
                    out,
                    range.len(),
                    #[inline(always)]
                    |i, count| of_others::<S, T>(xs, i, count, max, log_sum, of_p) + of_weight,
                );
            } else {
                T::write::<S>(
                    out,
                    range.len(),
                    #[inline(always)]
                    |i, count| {
                        let weights = self.0.classes.weights::<T::Lanes<S>>(range.start + i, count);
                        of_others::<S, T>(xs, i, count, max, log_sum, of_p) + of_weight * weights
                    },
                );
            }
            self.0.write_target::<S>(&gradient, &range, start);
        }
    }

    #[inline(always)]
    unsafe fn whole(&self, lines: Range<usize>, len: usize) {
        for line in lines {
            // SAFETY: as promised by the caller.
            unsafe { Pass::<S>::write(self, line, 0..len, &()) }
        }
    }
}

/// What is made of p in the gradient of `count` elements from `i` on.
///
/// # Safety
/// The CPU has the instructions of `S`, and `xs` is valid for reads of these elements.
#[inline(always)]
unsafe fn of_others<S: Simd, T: Element>(
    xs: *const T,
    i: usize,
    count: usize,
    max: T::Lanes<S>,
    log_sum: T::Lanes<S>,
    of_p: T::Lanes<S>,
) -> T::Lanes<S> {
    S::prefetch(xs.wrapping_add(i + ahead::<T>()));
    // SAFETY: as promised by the caller.
    let x = unsafe { T::read::<S>(xs.add(i), count, T::Real::ZERO) };
    LineGradient::of(x, max, log_sum, of_p)
}

impl<S: Simd, T: Element> Pass<S> for Columns<LossBackward<'_, T>> {
    type Reduced = ();
    const WIDTH: usize = columns::WIDTH;

    fn use_first(&self, elements: Range<usize>) {
        self.0.out.use_first(elements)
    }

    #[inline(always)]
    unsafe fn reduce(&self, _: usize, _: Range<usize>) {}

    #[inline(always)]
    unsafe fn write(&self, unit: usize, range: Range<usize>, _: &()) {
        let strip = Strip::new(unit, self.0.lines);
        let first = Strip::first_line(unit, self.0.lines);
        let mut numbers = [(); 4].map(|()| Numbers::new(T::Real::ZERO, strip.width + T::Lanes::<S>::COUNT));
        for i in 0..strip.width {
            let line = self.0.of_line(first + i);
            for (to, number) in numbers.iter_mut().zip([line.max, line.log_sum, line.of_p, line.of_weight]) {
                to[i] = number;
            }
        }
        for j in range.clone() {
            let (src, out) = (self.0.src.at(strip.row(j), strip.width), self.0.out.at(strip.row(j), strip.width));
            let weight = T::Lanes::<S>::splat(self.0.classes.weight(j));
            // SAFETY of the block: the elements are there, and `numbers` are a vector longer than the row; the rest by the
            // caller's promise.
            unsafe {
                T::write::<S>(
                    out,
                    strip.width,
                    #[inline(always)]
                    |i, count| {
                        let number = |n: usize| T::Lanes::<S>::load(numbers[n].as_ptr().add(i));
                        let x = columns::read::<S, T>(src, i, count);
                        LineGradient::of(x, number(0), number(1), number(2)) + number(3) * weight
                    },
                )
            }
        }
        for i in 0..strip.width {
            // SAFETY: as promised by the caller.
            unsafe { self.0.write_target::<S>(&self.0.of_line(first + i), &range, strip.start + i) }
        }
    }
}
