//! Lines along the last dimension.

use super::any::{Any, Last, Make, Part, Wide};
use super::logits::{exp_sum, keep_along, with_sink, Call, Run};
use super::short::is_batched;
use crate::cpu::element::Keep;
use crate::cpu::lanes::{Lanes, Pack};
use crate::cpu::level::Simd;
use crate::cpu::memory::Scratch;
use crate::cpu::random;
use crate::cpu::rows::{block, blocks, most_kept, rescale, BLOCK_VECTORS, MAX_BLOCK, MAX_KEPT_LONG};
use crate::cpu::{Element, Pass};
use crate::fused::{Place, Places};
use crate::op::Output;
use crate::state::{CompensatedSum, Normalizer, Number, Real, SoftmaxState};
use std::ops::Range;

/// Lines up to this length are held whole, so that logits are made once: they stay in the second cache. Those of probabilities, which
/// have exponentials taken once, too, up to [`MAX_KEPT_LONG`].
pub(super) const HELD: usize = 1 << 15;
/// Shorter ones are taken together, up to this many elements, so that they stay in the first cache: each step is done for
/// all of them before the next, and no line waits for its own steps from a vector to one number.
const TOGETHER: usize = 2048;

/// Lines along the last dimension.
pub(super) struct Rows<'a, T: Element> {
    pub(super) call: Call<'a, T>,
    /// A mask of [short lines](super::short::limits)
    pub(super) limits: Option<Vec<T::Real>>,
    pub(super) out: Any<'a>,
}

impl<T: Element> Rows<'_, T> {
    /// When a line is summed whose exponentials are kept: whether there was nothing to sum, what they are to be relative to, and what to
    /// multiply them with. Writes what is outside of the window, as [`write_outside`](Self::write_outside).
    ///
    /// # Safety
    /// As of [`Pass::write`].
    #[inline(always)]
    pub(super) unsafe fn finish<S: Simd>(
        &self,
        state: &SoftmaxState<T::Real>,
        place: &Place,
        range: &Range<usize>,
        keys: &Range<usize>,
    ) -> (bool, T::Real, T::Real) {
        let nothing = state.is_nothing();
        let found = (!nothing).then(|| Normalizer { max: state.reference(), sum: state.sum() });
        let (reference, scale) = self.call.scales::<T::Lanes<S>>(found);
        // SAFETY: as promised by the caller.
        unsafe { self.write_outside::<S>(place, range, keys, (reference, scale)) };
        (nothing, reference, scale)
    }

    /// Writes what the elements in `range` become that are outside of the window.
    ///
    /// # Safety
    /// As of [`Pass::write`].
    #[inline(always)]
    pub(super) unsafe fn write_outside<S: Simd>(
        &self,
        place: &Place,
        range: &Range<usize>,
        keys: &Range<usize>,
        (max, scale): (T::Real, T::Real),
    ) {
        if keys == range {
            return;
        }
        // Of the logit −∞
        let x = match self.call.options.output {
            Output::Probability => T::Real::ZERO * scale,
            Output::LogProbability => T::Real::NEG_INFINITY - max - scale,
        };
        let x = x.into();
        // SAFETY: as promised by the caller.
        unsafe {
            self.out.fill::<S>(place.scores + range.start, keys.start - range.start, x);
            self.out.fill::<S>(place.scores + keys.end, range.end - keys.end, x);
        }
    }

    /// Σ exp(z − reference) of a line's runs. The exponentials take the logits' place, unless these are needed. Meanwhile
    /// the scores `ahead` of these are asked for.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and the logits of the runs are there.
    #[inline(always)]
    unsafe fn exps<S: Simd>(&self, runs: &[Run<T::Real>], reference: T::Real, ahead: usize, log: bool) -> T::Real {
        let mut sum = CompensatedSum::zero();
        for run in runs {
            let (xs, z) = (self.call.scores.at(run.scores, run.len).wrapping_add(ahead), run.z);
            // SAFETY: as promised by the caller.
            let part = unsafe {
                exp_sum::<T::Lanes<S>>(
                    z,
                    run.len,
                    reference,
                    #[inline(always)]
                    |i, exp| {
                        S::prefetch(xs.wrapping_add(i));
                        if !log {
                            exp.store(z.add(i));
                        }
                    },
                )
            };
            if runs.len() == 1 {
                return part;
            }
            sum.add(part);
        }
        sum.value()
    }

    /// Lines of several blocks, whose exponentials are held: they are taken while the logits of a few blocks are in the first cache,
    /// each block's relative to the reference it had.
    ///
    /// # Safety
    /// As of [`Pass::whole`], for probabilities.
    #[inline(always)]
    unsafe fn long<S: Simd>(&self, lines: Range<usize>, len: usize) {
        let call = &self.call;
        let held = Held::<T::Real>::new(len.next_multiple_of(T::Lanes::<S>::COUNT));
        let blocks_together = TOGETHER / (BLOCK_VECTORS * T::Lanes::<S>::COUNT);
        let (mut runs, mut references) = (Vec::new(), Vec::new());
        let mut places = call.geometry.places(lines.start);
        let mut kept = [0; random::room(MAX_BLOCK)];
        for line in lines {
            let place = places.next();
            let keys = call.keys(place.query, &(0..len));
            runs.clear();
            references.clear();
            for (start, len) in blocks::<T::Lanes<S>>(keys.clone()) {
                runs.push(call.run_along(&place, start, len, held.start.wrapping_add(start - keys.start)));
            }
            let mut state = SoftmaxState::empty();
            // SAFETY of the block: there is room for the logits, and they are there when they are read; the rest by the caller's
            // promise.
            unsafe {
                for runs in runs.chunks_mut(blocks_together.max(1)) {
                    call.logits::<S>(runs, call.steps_along());
                    for run in runs {
                        let (xs, z) = (call.scores.at(run.scores, run.len).wrapping_add(TOGETHER), run.z);
                        let reference = state.grow(run.max);
                        references.push(reference);
                        state.add(exp_sum::<T::Lanes<S>>(
                            z,
                            run.len,
                            reference,
                            #[inline(always)]
                            |i, exp| {
                                S::prefetch(xs.wrapping_add(i));
                                exp.store(z.add(i));
                            },
                        ));
                    }
                }
                if let Some(sink) = call.sink::<S>(place.sink) {
                    state.push(sink);
                }
                let (nothing, reference, scale) = self.finish::<S>(&state, &place, &(0..len), &keys);
                let moved = |&(_, held): &(_, &T::Real)| !nothing && held.differs(reference);
                for (run, &held) in runs.iter().zip(&references).filter(moved) {
                    rescale::<T::Lanes<S>>(run.z, run.len, held, reference);
                }
                T::Real::store_any::<S>(
                    &self.out,
                    runs.len(),
                    #[inline(always)]
                    |i| {
                        let run = &runs[i];
                        let keep = keep_along::<S, T>(call, line, run.scores - place.scores, run.len, &mut kept);
                        let make = Make::Scaled(scale, call.most());
                        Part { start: run.scores, len: run.len, from: run.z, last: Last { make, keep } }
                    },
                );
            }
        }
    }
}

/// A line in work.
pub(super) struct Line<F> {
    pub(super) number: usize,
    pub(super) place: Place,
    /// Which elements are not outside of the window, …
    pub(super) keys: Range<usize>,
    /// … and which runs they are.
    pub(super) runs: Range<usize>,
    /// What its results are made with, when that is known.
    pub(super) found: F,
}

/// Room for numbers, where no vector lies in two cache lines.
pub(super) struct Held<R> {
    pub(super) start: *mut R,
    _memory: Scratch,
}

impl<R> Held<R> {
    pub(super) fn new(len: usize) -> Self {
        let mut memory = Scratch::new();
        Self { start: memory.room(len), _memory: memory }
    }
}

/// Lines that are held whole, several of them in work together.
pub(super) struct Together<'a, T: Element, F> {
    call: &'a Call<'a, T>,
    len: usize,
    /// How many lines at most.
    pub(super) count: usize,
    /// How far apart they are held.
    pub(super) room: usize,
    /// The logits.
    pub(super) held: Held<T::Real>,
    places: Places<'a>,
    pub(super) runs: Vec<Run<T::Real>>,
    pub(super) work: Vec<Line<F>>,
}

impl<'a, T: Element, F: Copy> Together<'a, T, F> {
    pub(super) fn new<S: Simd>(call: &'a Call<'a, T>, lines: &Range<usize>, len: usize) -> Self {
        let room = len.next_multiple_of(T::Lanes::<S>::COUNT);
        let count = (TOGETHER / room).max(1).min(lines.len());
        let (held, places) = (Held::new(count * room), call.geometry.places(lines.start));
        Self { call, len, count, room, held, places, runs: Vec::new(), work: Vec::with_capacity(count) }
    }

    /// Makes the logits of the next lines, `count` at most, whose numbers these are. Each run but a line's last is whole
    /// vectors.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    pub(super) unsafe fn take<S: Simd>(&mut self, lines: Range<usize>, nothing: F) {
        self.runs.clear();
        self.work.clear();
        let mut z = self.held.start;
        for number in lines.take(self.count) {
            let place = self.places.next();
            let keys = self.call.keys(place.query, &(0..self.len));
            let first_run = self.runs.len();
            for (start, len) in blocks::<T::Lanes<S>>(keys.clone()) {
                self.runs.push(self.call.run_along(&place, start, len, z.wrapping_add(start - keys.start)));
            }
            let runs = first_run..self.runs.len();
            self.work.push(Line { number, place, keys, runs, found: nothing });
            z = z.wrapping_add(self.room);
        }
        // SAFETY: there is room for as many lines; the rest by the caller's promise.
        unsafe { self.call.logits::<S>(&mut self.runs, self.call.steps_along()) }
    }
}

impl<S: Simd, T: Element> Pass<S> for Rows<'_, T> {
    type Reduced = SoftmaxState<T::Real>;
    const WIDTH: usize = 1;

    fn use_first(&self, elements: Range<usize>) {
        self.out.use_first(elements)
    }

    #[inline(always)]
    unsafe fn reduce(&self, line: usize, range: Range<usize>) -> Self::Reduced {
        let place = self.call.geometry.place(line);
        let mut z = block::<T::Real>();
        let z = z.0.as_mut_ptr().cast::<T::Real>();
        let mut state = SoftmaxState::empty();
        for (start, len) in blocks::<T::Lanes<S>>(self.call.keys(place.query, &range)) {
            // SAFETY: `z` has room for a block; the rest by the caller's promise.
            unsafe {
                let max = self.call.logits_along::<S>(&place, start, len, z);
                let reference = state.grow(max);
                state.add(exp_sum::<T::Lanes<S>>(
                    z,
                    len,
                    reference,
                    #[inline(always)]
                    |_, _| (),
                ));
            }
        }
        state
    }

    #[inline(always)]
    unsafe fn write(&self, line: usize, range: Range<usize>, state: &Self::Reduced) {
        let place = self.call.geometry.place(line);
        let keys = self.call.keys(place.query, &range);
        let (mut z, mut kept) = (block::<T::Real>(), [0; random::room(MAX_BLOCK)]);
        let z = z.0.as_mut_ptr().cast::<T::Real>();
        // SAFETY of the block: `z` has room for a block; the rest by the caller's promise.
        unsafe {
            let (max, scale) = self.call.scales::<T::Lanes<S>>(with_sink(*state, self.call.sink::<S>(place.sink)));
            self.write_outside::<S>(&place, &range, &keys, (max, scale));
            for (start, len) in blocks::<T::Lanes<S>>(keys) {
                self.call.logits_along::<S>(&place, start, len, z);
                let keep = keep_along::<S, T>(&self.call, line, start, len, &mut kept);
                let last = Last { make: Make::Of(self.call.options.output, max, scale), keep };
                T::Real::store_any::<S>(
                    &self.out,
                    1,
                    #[inline(always)]
                    |_| Part { start: place.scores + start, len, from: z, last },
                );
            }
        }
    }

    #[inline(always)]
    unsafe fn whole(&self, lines: Range<usize>, len: usize) {
        let block = BLOCK_VECTORS * T::Lanes::<S>::COUNT;
        let short = match T::Lanes::<S>::SATURATES {
            true if T::KEEP == Keep::Nowhere => most_kept::<S, T>(),
            true => MAX_KEPT_LONG,
            false => block,
        };
        if len <= short && self.call.has_neighbours() {
            // SAFETY of the blocks: as promised by the caller.
            match T::of(&self.out) {
                Some(out) if !self.call.is_log() => return unsafe { self.short::<S>(lines, len, out) },
                Some(out) if is_batched::<T>(len) => return unsafe { self.short_log::<S>(lines, len, out) },
                _ => (),
            }
        }
        // Those of f64 would not be exact enough where results are subnormal.
        if len > TOGETHER && len <= MAX_KEPT_LONG && T::KEEP != Keep::Nowhere && !self.call.is_log() {
            // SAFETY: as promised by the caller.
            return unsafe { self.long::<S>(lines, len) };
        }
        if len > HELD {
            // SAFETY: as promised by the caller.
            return unsafe { Pass::<S>::one_by_one(self, lines, len) };
        }
        let mut together = Together::new::<S>(&self.call, &lines, len);
        let mut kept = [0; random::room(MAX_BLOCK)];
        for first in lines.clone().step_by(together.count) {
            // SAFETY of the block: the logits are there; the rest by the caller's promise.
            unsafe {
                together.take::<S>(first..lines.end, (T::Real::ZERO, T::Real::ZERO));
                let Together { runs, work, count, .. } = &mut together;
                let ahead = *count * len;
                for line in work.iter_mut() {
                    let runs = &runs[line.runs.clone()];
                    let sink = self.call.sink::<S>(line.place.sink);
                    let none = T::Real::NEG_INFINITY;
                    let max = sink.map_or(none, |sink| sink.or_greater(none));
                    let max = runs.iter().fold(max, |max, run| run.max.or_greater(max));
                    // Finite where nothing is above −∞, so that exp(−∞ − reference) is 0 and a NaN survives.
                    let reference = max.or_greater(T::Real::LOWEST);
                    // A loop of its own for each.
                    let sum = if self.call.is_log() {
                        self.exps::<S>(runs, reference, ahead, true)
                    } else {
                        self.exps::<S>(runs, reference, ahead, false)
                    };
                    let sum = match sink {
                        Some(sink) => sum + (sink - reference).exp(),
                        None => sum,
                    };
                    let nothing = max == T::Real::NEG_INFINITY && sum == T::Real::ZERO;
                    line.found = self.call.scales::<T::Lanes<S>>((!nothing).then(|| Normalizer::new(max, sum)));
                    self.write_outside::<S>(&line.place, &(0..len), &line.keys, line.found);
                }
                let mut at = 0;
                T::Real::store_any::<S>(
                    &self.out,
                    runs.len(),
                    #[inline(always)]
                    |i| {
                        // Lines without a run are passed over.
                        while work[at].runs.end <= i {
                            at += 1;
                        }
                        let (line, run) = (&work[at], &runs[i]);
                        let (max, scale) = line.found;
                        let make = match self.call.options.output {
                            Output::Probability => Make::Scaled(scale, self.call.most()),
                            output => Make::Of(output, max, scale),
                        };
                        let start = run.scores - line.place.scores;
                        let keep = keep_along::<S, T>(&self.call, line.number, start, run.len, &mut kept);
                        Part { start: run.scores, len: run.len, from: run.z, last: Last { make, keep } }
                    },
                );
            }
        }
    }
}
