//! The gradients of scores, logits and sinks.

use super::any::{Any, Wide};
use super::columns::{group_memory, Group, Side, ROW};
use super::logits::{keep_along, Call, Kept, Run};
use super::rows::{Held, Line, Together, HELD};
use crate::cpu::columns::{flat, ROWS, WIDTH};
use crate::cpu::exp::tanh_slope;
use crate::cpu::lanes::{each, Lanes, Pack};
use crate::cpu::level::Simd;
use crate::cpu::memory::Elements;
use crate::cpu::random::{self, PER_COUNTER};
use crate::cpu::rows::{block, blocks, sum_of, MAX_BLOCK};
use crate::cpu::{few_rows, Element, Pass, ScoresBackward};
use crate::state::{CompensatedSum, Normalizer, Number, Real, SoftmaxState, Weighted};
use std::ops::Range;

/// A backward pass: everything that is read and written.
#[derive(Clone, Copy)]
pub(super) struct Backward<'a, T: Element> {
    pub(super) call: Call<'a, T>,
    pub(super) g: Any<'a>,
    pub(super) scores: Option<Elements<'a, T>>,
    pub(super) logits: Option<LogitsGradient<'a, T::Real>>,
    pub(super) sinks: Option<Elements<'a, T::Real>>,
}

/// Where the gradients of logits go: of all of them, or of some neighbouring lines.
#[derive(Clone, Copy)]
pub(super) struct LogitsGradient<'a, R> {
    first: usize,
    elements: Elements<'a, R>,
}

impl<'a, R> LogitsGradient<'a, R> {
    /// Of the scores from this one on.
    pub(super) fn from(first: usize, elements: Elements<'a, R>) -> Self {
        Self { first, elements }
    }

    #[inline(always)]
    fn at(&self, start: usize, len: usize) -> *mut R {
        self.elements.at(start - self.first, len)
    }
}

/// What the gradient of a line's logits is made with: p = exp(z − max) · inverse, and the sum of what is weighted.
#[derive(Clone, Copy)]
pub(super) struct Found<N> {
    pub(super) max: N,
    pub(super) inverse: N,
    pub(super) total: N,
}

impl<R: Real> Found<R> {
    /// Of a line of nothing.
    const NOTHING: Self = Self { max: R::ZERO, inverse: R::ZERO, total: R::ZERO };
}

impl<'a, T: Element> Backward<'a, T> {
    /// The pass, if there is nothing but a scale around the softmax, and all is of the scores' dtype.
    pub(super) fn of_scores(&self) -> Option<ScoresBackward<'a, T>> {
        let (scores, call) = (self.call.scores, &self.call);
        let (g, out) = (T::of(&self.g)?, self.scores.filter(|_| self.logits.is_none() && self.sinks.is_none())?);
        let (lines, output, scale) = (call.geometry.lines, call.options.output, call.scale);
        call.is_alone().then_some(ScoresBackward { scores, g, out, lines, output, scale })
    }
}

impl<T: Element> Backward<'_, T> {
    fn use_first(&self, elements: Range<usize>) {
        if let Some(scores) = &self.scores {
            scores.use_first(elements.clone());
        }
        if let Some(logits) = &self.logits {
            logits.elements.use_first(elements);
        }
    }

    /// Finishes a line.
    fn found(&self, mut sums: Weighted<T::Real>, sink: Option<T::Real>) -> Found<T::Real> {
        if let Some(sink) = sink {
            let reference = sums.grow(sink);
            sums.add((sink - reference).exp(), T::Real::ZERO);
        }
        let Some(Normalizer { max, sum }) = sums.state.normalizer() else { return Found::NOTHING };
        let total = if self.call.is_log() { sums.dot() } else { sums.dot() / sums.state.sum() };
        Found { max, inverse: T::Real::ONE / sum, total }
    }

    /// Writes what a line adds to its sink's gradient, if that is wanted.
    ///
    /// # Safety
    /// As of [`Pass::write`].
    #[inline(always)]
    pub(super) unsafe fn write_sink(&self, line: usize, sink: Option<T::Real>, found: &Found<T::Real>) {
        if let (Some(sinks), Some(sink)) = (self.sinks, sink) {
            let p = (sink - found.max).exp() * found.inverse;
            // SAFETY: the element is there; the rest by the caller's promise.
            unsafe { sinks.at(line, 1).write(T::Real::ZERO - p * found.total) };
        }
    }

    /// Loads the gradients of a run's results, times dropout's factor, and 0 for what does not take part and up to a whole
    /// vector. Answers the sum of what `then(start, logits, gradients)` makes of each vector of them and of the logits.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and `z`, `g` and `keep` are valid for `len` elements and up to a whole vector.
    #[inline(always)]
    unsafe fn load<S: Simd>(
        &self,
        at: usize,
        len: usize,
        z: *const T::Real,
        g: *mut T::Real,
        keep: Option<*const u8>,
        mut then: impl FnMut(usize, T::Lanes<S>, T::Lanes<S>) -> T::Lanes<S>,
    ) -> T::Real {
        let zero = T::Lanes::<S>::splat(T::Real::ZERO);
        let lowest = T::Lanes::<S>::splat(T::Real::LOWEST);
        let factor = T::Lanes::<S>::splat(self.call.most());
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let mut take = {
                #[inline(always)]
                |i: usize, mut x: T::Lanes<S>| {
                    if let Some(keep) = keep {
                        x = (x * factor).where_kept(keep.add(i), T::Real::ZERO);
                    }
                    let z = T::Lanes::<S>::load(z.add(i));
                    let x = z.if_less(lowest, zero, x);
                    x.store(g.add(i));
                    then(i, z, x)
                }
            };
            match T::of(&self.g) {
                Some(from) => {
                    let (from, ahead) = (from.at(at, len).cast_const(), self.call.ahead());
                    sum_of(
                        len,
                        #[inline(always)]
                        |i, count| {
                            S::prefetch(from.wrapping_add(i + ahead));
                            take(i, T::read::<S>(from.add(i), count, T::Real::ZERO))
                        },
                    )
                }
                None => {
                    T::Real::load_any::<S>(&self.g, at, len, g);
                    sum_of(
                        len,
                        #[inline(always)]
                        |i, count| take(i, T::Lanes::<S>::get(g.add(i), count)),
                    )
                }
            }
        }
    }

    /// Makes the gradients of a run's logits of what [`load`](Self::load) left in `g`, and writes them and those of the scores.
    /// `found(start, x)` gives p and the sum of what is weighted for a vector of `held`, which is −∞ where an element does not
    /// take part.
    ///
    /// # Safety
    /// As of [`load`](Self::load), and of [`Pass::write`].
    #[inline(always)]
    pub(super) unsafe fn write<S: Simd>(
        &self,
        at: usize,
        len: usize,
        held: *const T::Real,
        g: *const T::Real,
        found: impl Fn(usize, T::Lanes<S>) -> (T::Lanes<S>, T::Lanes<S>),
    ) {
        let zero = T::Lanes::<S>::splat(T::Real::ZERO);
        let lowest = T::Lanes::<S>::splat(T::Real::LOWEST);
        let scale = T::Lanes::<S>::splat(self.call.scale);
        let log = self.call.is_log();
        let logits = self.logits.map(|logits| logits.at(at, len));
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let of_logits = {
                #[inline(always)]
                |i: usize, count| {
                    let (x, g) = (T::Lanes::<S>::get(held.add(i), count), T::Lanes::<S>::get(g.add(i), count));
                    let (p, total) = found(i, x);
                    let gradient = if log { g - p * total } else { p * (g - total) };
                    let gradient = x.if_less(lowest, zero, gradient);
                    if let Some(logits) = logits {
                        gradient.put(logits.add(i), count);
                    }
                    gradient
                }
            };
            let Some(scores) = self.scores else {
                return each::<T::Lanes<S>>(
                    0..len,
                    #[inline(always)]
                    |i, count| {
                        of_logits(i, count);
                    },
                );
            };
            let (src, to) = (self.call.scores.at(at, len).cast_const(), scores.at(at, len));
            let ahead = self.call.ahead();
            T::write::<S>(
                to,
                len,
                #[inline(always)]
                |i, count| {
                    // Memory that is written is read first.
                    S::prefetch(to.wrapping_add(i + ahead));
                    let gradient = of_logits(i, count) * scale;
                    let Some((inverse, _)) = self.call.cap else { return gradient };
                    let x = T::read::<S>(src.add(i), count, T::Real::ZERO);
                    let gradient = gradient * tanh_slope(x * T::Lanes::<S>::splat(inverse));
                    // A score that does not take part may be NaN.
                    T::Lanes::<S>::get(held.add(i), count).if_less(lowest, zero, gradient)
                },
            );
        }
    }

    /// Writes that elements outside of the window have no gradient.
    ///
    /// # Safety
    /// As of [`Pass::write`].
    #[inline(always)]
    unsafe fn write_outside(&self, start: usize, len: usize) {
        if len == 0 {
            return;
        }
        // SAFETY: as promised by the caller; all bits 0 are the number 0 in every dtype.
        unsafe {
            if let Some(scores) = self.scores {
                scores.at(start, len).write_bytes(0, len);
            }
            if let Some(logits) = self.logits {
                logits.at(start, len).write_bytes(0, len);
            }
        }
    }
}

pub(super) struct BackwardRows<'a, T: Element>(pub(super) Backward<'a, T>);

impl<T: Element> BackwardRows<'_, T> {
    /// Σ exp(z − reference) of a line's runs, and the sum of the gradients that `g` says the places of: these are loaded, and
    /// the exponentials take the logits' place, but where an element does not take part.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, the logits of the runs are there, and as much room in `g`.
    #[inline(always)]
    unsafe fn sums<S: Simd>(
        &self,
        line: &Line<Found<T::Real>>,
        runs: &[Run<T::Real>],
        reference: T::Real,
        g: impl Fn(&Run<T::Real>) -> *mut T::Real,
        kept: &mut Kept,
    ) -> (T::Real, T::Real) {
        let log = self.0.call.is_log();
        let [reference, lowest, zero] = [reference, T::Real::LOWEST, T::Real::ZERO].map(T::Lanes::<S>::splat);
        // −∞ by name: as the logit that is there it would be left by a masked store, which AVX2 takes many times as long for.
        let none = T::Lanes::<S>::splat(T::Real::NEG_INFINITY);
        let (mut sums, mut dots) = (CompensatedSum::zero(), CompensatedSum::zero());
        for run in runs {
            let start = run.scores - line.place.scores;
            // SAFETY: as promised by the caller.
            let keep = unsafe { keep_along::<S, T>(&self.0.call, line.number, start, run.len, kept) };
            let mut dot = zero;
            // SAFETY: as promised by the caller.
            let sum = unsafe {
                self.0.load::<S>(
                    run.scores,
                    run.len,
                    run.z,
                    g(run),
                    keep,
                    #[inline(always)]
                    |i, z, g| {
                        let exp = (z - reference).exp();
                        dot = if log { dot + g } else { g.mul_add(exp, dot) };
                        z.if_less(lowest, none, exp).store(run.z.add(i));
                        exp
                    },
                )
            };
            let dot = dot.sum_across();
            if runs.len() == 1 {
                return (sum, dot);
            }
            sums.add(sum);
            dots.add(dot);
        }
        (sums.value(), dots.value())
    }
}

impl<S: Simd, T: Element> Pass<S> for BackwardRows<'_, T> {
    type Reduced = Weighted<T::Real>;
    const WIDTH: usize = 1;

    fn use_first(&self, elements: Range<usize>) {
        self.0.use_first(elements)
    }

    #[inline(always)]
    unsafe fn reduce(&self, line: usize, range: Range<usize>) -> Self::Reduced {
        let call = &self.0.call;
        let place = call.geometry.place(line);
        let (mut z, mut g, mut kept) = (block::<T::Real>(), block::<T::Real>(), [0; random::room(MAX_BLOCK)]);
        let (z, g) = (z.0.as_mut_ptr().cast::<T::Real>(), g.0.as_mut_ptr().cast::<T::Real>());
        let log = call.is_log();
        let mut sums = Weighted::empty(!log);
        for (start, len) in blocks::<T::Lanes<S>>(call.keys(place.query, &range)) {
            // SAFETY of the block: `z` and `g` have room for a block; the rest by the caller's promise.
            unsafe {
                let keep = keep_along::<S, T>(call, line, start, len, &mut kept);
                let max = call.logits_along::<S>(&place, start, len, z);
                let reference = T::Lanes::<S>::splat(sums.grow(max));
                let mut dot = T::Lanes::<S>::splat(T::Real::ZERO);
                let sum = self.0.load::<S>(
                    place.scores + start,
                    len,
                    z,
                    g,
                    keep,
                    #[inline(always)]
                    |_, z, g| {
                        let exp = (z - reference).exp();
                        dot = if log { dot + g } else { g.mul_add(exp, dot) };
                        exp
                    },
                );
                sums.add(sum, dot.sum_across());
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn write(&self, line: usize, range: Range<usize>, sums: &Self::Reduced) {
        let call = &self.0.call;
        let place = call.geometry.place(line);
        let keys = call.keys(place.query, &range);
        let (mut z, mut g, mut kept) = (block::<T::Real>(), block::<T::Real>(), [0; random::room(MAX_BLOCK)]);
        let (z, g) = (z.0.as_mut_ptr().cast::<T::Real>(), g.0.as_mut_ptr().cast::<T::Real>());
        // SAFETY of the block: `z` and `g` have room for a block; the rest by the caller's promise.
        unsafe {
            let sink = call.sink::<S>(place.sink);
            let found = self.0.found(*sums, sink);
            if range.start == 0 {
                self.0.write_sink(line, sink, &found);
            }
            let [max, inverse, total] = [found.max, found.inverse, found.total].map(T::Lanes::<S>::splat);
            self.0.write_outside(place.scores + range.start, keys.start - range.start);
            self.0.write_outside(place.scores + keys.end, range.end - keys.end);
            for (start, len) in blocks::<T::Lanes<S>>(keys) {
                let keep = keep_along::<S, T>(call, line, start, len, &mut kept);
                call.logits_along::<S>(&place, start, len, z);
                self.0.load::<S>(
                    place.scores + start,
                    len,
                    z,
                    g,
                    keep,
                    #[inline(always)]
                    |_, _, g| g,
                );
                self.0.write::<S>(
                    place.scores + start,
                    len,
                    z,
                    g,
                    #[inline(always)]
                    |_, z| ((z - max).exp() * inverse, total),
                );
            }
        }
    }

    #[inline(always)]
    unsafe fn whole(&self, lines: Range<usize>, len: usize) {
        let call = &self.0.call;
        if self.is_short(len) {
            if let Some(g) = T::of(&self.0.g) {
                // SAFETY: as promised by the caller.
                return unsafe { self.short::<S>(lines, len, g) };
            }
        }
        if len > HELD {
            // SAFETY: as promised by the caller.
            return unsafe { Pass::<S>::one_by_one(self, lines, len) };
        }
        let log = call.is_log();
        let none = T::Real::NEG_INFINITY;
        let mut together = Together::new::<S>(call, &lines, len);
        let g = Held::<T::Real>::new(together.count * together.room);
        let mut kept = [0; random::room(MAX_BLOCK)];
        for first in lines.clone().step_by(together.count) {
            // SAFETY of the block: `g` has as much room as there is for the logits; the rest by the caller's promise.
            unsafe {
                together.take::<S>(first..lines.end, Found::NOTHING);
                let Together { runs, work, held, .. } = &mut together;
                let g = |run: &Run<T::Real>| g.start.offset(run.z.offset_from(held.start));
                for line in work.iter_mut() {
                    let runs = &runs[line.runs.clone()];
                    let sink = call.sink::<S>(line.place.sink);
                    let max =
                        runs.iter().fold(sink.unwrap_or(none).or_greater(none), |max, run| run.max.or_greater(max));
                    // Finite where nothing is above −∞, so that exp(−∞ − reference) is 0 and a NaN survives.
                    let reference = max.or_greater(T::Real::LOWEST);
                    let (sum, dot) = self.sums::<S>(line, runs, reference, g, &mut kept);
                    let sum = match sink {
                        Some(sink) => sum + (sink - reference).exp(),
                        None => sum,
                    };
                    line.found = if max == none && sum == T::Real::ZERO {
                        Found::NOTHING
                    } else {
                        let line = Normalizer::new(max, sum);
                        Found { max, inverse: T::Real::ONE / line.sum, total: if log { dot } else { dot / sum } }
                    };
                    self.0.write_sink(line.number, sink, &line.found);
                    let (start, end) = (line.place.scores, line.place.scores + len);
                    self.0.write_outside(start, line.keys.start);
                    self.0.write_outside(start + line.keys.end, end - start - line.keys.end);
                }
                for line in work.iter() {
                    let [inverse, total] = [line.found.inverse, line.found.total].map(T::Lanes::<S>::splat);
                    for run in &runs[line.runs.clone()] {
                        self.0.write::<S>(
                            run.scores,
                            run.len,
                            run.z,
                            g(run),
                            #[inline(always)]
                            |_, exp| (exp * inverse, total),
                        );
                    }
                }
            }
        }
    }
}

pub(super) struct BackwardColumns<'a, T: Element>(pub(super) Backward<'a, T>);

impl<T: Element> BackwardColumns<'_, T> {
    /// Calls `with(z, g)` for each group of these rows, with their logits, and what is loaded of the gradients.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn groups<S: Simd>(
        &self,
        side: &Side<T>,
        range: &Range<usize>,
        mut with: impl FnMut(&Group<T::Real>, &Group<T::Real>),
    ) {
        let (mut z, mut g, mut runs) = (group_memory(), group_memory(), Vec::new());
        let mut kept = [[0; ROW]; PER_COUNTER];
        for first in range.clone().step_by(ROWS) {
            let rows = ROWS.min(range.end - first);
            let (z, g) = (Group::new(first, rows, &mut z), Group::new(first, rows, &mut g));
            // SAFETY of the block: the rows are a vector longer than the strip; the rest by the caller's promise.
            unsafe {
                side.logits::<S>(&z, &mut runs);
                for (i, j) in z.numbers().enumerate() {
                    if i == 0 || j % PER_COUNTER == 0 {
                        side.keep::<S>(j, &mut kept);
                    }
                    self.0.load::<S>(
                        side.strip.row(j),
                        side.strip.width,
                        z.row(i),
                        g.row(i),
                        side.kept(j, &kept),
                        #[inline(always)]
                        |_, _, g| g,
                    );
                }
            }
            with(&z, &g);
        }
    }
}

impl<S: Simd, T: Element> Pass<S> for BackwardColumns<'_, T> {
    type Reduced = Vec<Weighted<T::Lanes<S>>>;
    const WIDTH: usize = WIDTH;

    fn use_first(&self, elements: Range<usize>) {
        self.0.use_first(elements)
    }

    #[inline(always)]
    unsafe fn whole(&self, units: Range<usize>, len: usize) {
        // SAFETY: as promised by the caller.
        unsafe {
            match self.0.of_scores().filter(|of| few_rows::are_few(of.lines)) {
                Some(of) => few_rows::scores_backward::<S, T>(&of, units),
                None => Pass::<S>::one_by_one(self, units, len),
            }
        }
    }

    #[inline(always)]
    unsafe fn reduce(&self, unit: usize, range: Range<usize>) -> Self::Reduced {
        let side = Side::new(self.0.call, unit);
        let log = side.call.is_log();
        let [none, zero] = [T::Real::NEG_INFINITY, T::Real::ZERO].map(T::Lanes::<S>::splat);
        let mut sums = vec![Weighted::empty(!log); side.vectors::<S>()];
        // SAFETY of the block: the vectors are in the rows; the rest by the caller's promise.
        unsafe {
            self.groups::<S>(
                &side,
                &range,
                #[inline(always)]
                |z, g| {
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let at = i * T::Lanes::<S>::COUNT;
                        let reference = sums.grow(z.across(
                            at,
                            none,
                            #[inline(always)]
                            |max, z: T::Lanes<S>| z.or_greater(max),
                        ));
                        let (mut sum, mut dot) = (zero, zero);
                        for i in 0..z.rows {
                            let z = T::Lanes::<S>::load(z.row(i).wrapping_add(at));
                            let g = T::Lanes::<S>::load(g.row(i).wrapping_add(at));
                            let exp = (z - reference).exp();
                            sum = sum + exp;
                            dot = if log { dot + g } else { g.mul_add(exp, dot) };
                        }
                        sums.add(sum, dot);
                    }
                },
            )
        };
        sums
    }

    #[inline(always)]
    unsafe fn write(&self, unit: usize, range: Range<usize>, sums: &Self::Reduced) {
        let side = Side::new(self.0.call, unit);
        let relative = !side.call.is_log();
        let mut max = flat(
            sums,
            #[inline(always)]
            |sums| sums.state.max(),
        );
        let mut inverse = flat(
            sums,
            #[inline(always)]
            |sums| sums.state.sum(),
        );
        let mut total = flat(
            sums,
            #[inline(always)]
            |sums| sums.dot(),
        );
        // SAFETY of the block: `max`, `inverse` and `total` are a vector longer than the strip; the rest by the caller's
        // promise.
        unsafe {
            let sinks = side.sinks::<S>();
            for i in 0..side.strip.width {
                let sink = sinks.as_ref().map(|sinks| sinks[i]);
                let sums = Weighted::from_parts(SoftmaxState::from_parts(max[i], inverse[i]), total[i], relative);
                let found = self.0.found(sums, sink);
                if range.start == 0 {
                    self.0.write_sink(side.line + i, sink, &found);
                }
                (max[i], inverse[i], total[i]) = (found.max, found.inverse, found.total);
            }
            self.groups::<S>(
                &side,
                &range,
                #[inline(always)]
                |z, g| {
                    for (i, j) in z.numbers().enumerate() {
                        self.0.write::<S>(
                            side.strip.row(j),
                            side.strip.width,
                            z.row(i),
                            g.row(i),
                            #[inline(always)]
                            |i, z| {
                                let max = T::Lanes::<S>::load(max.as_ptr().add(i));
                                let inverse = T::Lanes::<S>::load(inverse.as_ptr().add(i));
                                ((z - max).exp() * inverse, T::Lanes::<S>::load(total.as_ptr().add(i)))
                            },
                        );
                    }
                },
            );
        }
    }
}
