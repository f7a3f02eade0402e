//! Gradients of short lines along the last dimension whose logits are made of neighbours in memory.

use super::backward::{BackwardRows, Found};
use super::logits::first_lanes;
use super::short::{is_batched, AnyLogits, Source, Sources};
use crate::cpu::at_once::{begins_line, find_apart, lines_of_batch, Batches, BATCH_BYTES};
use crate::cpu::lanes::{each, sum_of_long_terms, Lanes, Pack, MAX_LANES};
use crate::cpu::level::Simd;
use crate::cpu::memory::{three_apart, CacheLines, Elements};
use crate::cpu::Element;
use crate::state::{Number, Real};
use std::mem::MaybeUninit;
use std::ops::Range;

/// What the logits of a batch, which exponentials replace, and the gradients of its results need room for, in numbers of 4 bytes.
const BATCHES: usize = 2 * three_apart::<f32>(BATCH_BYTES / 4);

/// Of longer lines in windows what is outside is worth leaving out: 256 causal bf16s take 0.7 of the time then.
const MOST_IN_WINDOW: usize = 64;

impl<T: Element> BackwardRows<'_, T> {
    /// Whether lines of this length are taken by [`short`](Self::short), given gradients of the scores' dtype.
    pub(super) fn is_short(&self, len: usize) -> bool {
        let is_short = is_batched::<T>(len) && (self.0.call.options.window.is_none() || len <= MOST_IN_WINDOW);
        is_short && self.0.call.has_neighbours()
    }

    /// Short lines, given the gradients `g` of their results.
    ///
    /// # Safety
    /// As of [`Pass::whole`](crate::cpu::Pass::whole), for lines that [are short](Self::is_short).
    #[inline(always)]
    pub(super) unsafe fn short<S: Simd>(&self, lines: Range<usize>, len: usize, g: Elements<T>) {
        let call = &self.0.call;
        let any = AnyLogits::<T::Lanes<S>>::new::<S, T>(call, false, len);
        let alone = call.bias.is_none() && any.cap.is_none() && !any.mask && !any.limited;
        let scale = T::Lanes::<S>::splat(call.scale);
        let plain =
            self.0.scores.is_some() && self.0.logits.is_none() && any.cap.is_none() && call.options.dropout.is_none();
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        unsafe {
            let scaled = {
                #[inline(always)]
                move |of: &Source<T>, i: usize, count| T::read::<S>(of.scores.add(i), count, T::Real::ZERO) * scale
            };
            let any = {
                #[inline(always)]
                move |of: &Source<T>, i: usize, count| any.of::<S, T>(of, i, count)
            };
            // A loop of its own for what there is most.
            match (plain, alone) {
                (true, true) => self.in_batches::<S, true>(lines, len, g, scaled),
                (true, false) => self.in_batches::<S, true>(lines, len, g, any),
                (false, _) => self.in_batches::<S, false>(lines, len, g, any),
            }
        }
    }

    /// Batches of as many lines as a vector has lanes, if they fit: the steps from a vector to one number are shared.
    /// `logit(source, start, count)` makes a vector of logits. `PLAIN`: of the scores alone, without a softcap or dropout.
    ///
    /// # Safety
    /// As of [`short`](Self::short), and what is `PLAIN` is so.
    #[inline(never)]
    unsafe fn in_batches<S: Simd, const PLAIN: bool>(
        &self,
        lines: Range<usize>,
        len: usize,
        g: Elements<T>,
        logit: impl Fn(&Source<T>, usize, usize) -> T::Lanes<S>,
    ) {
        // SAFETY: as promised by the caller. A function of its own for each kind of logits, entered anew.
        unsafe {
            S::enter(
                #[inline(always)]
                || self.in_batches_inside::<S, PLAIN>(lines, len, g, logit),
            )
        }
    }

    /// # Safety
    /// As of [`in_batches`](Self::in_batches).
    #[inline(always)]
    unsafe fn in_batches_inside<S: Simd, const PLAIN: bool>(
        &self,
        lines: Range<usize>,
        len: usize,
        g: Elements<T>,
        logit: impl Fn(&Source<T>, usize, usize) -> T::Lanes<S>,
    ) {
        let call = &self.0.call;
        let log = call.is_log();
        let [zero, half, one] = [T::Real::ZERO, T::Real::nearest(0.5), T::Real::ONE].map(T::Lanes::<S>::splat);
        let [none, lowest] = [T::Real::NEG_INFINITY, T::Real::LOWEST].map(T::Lanes::<S>::splat);
        let factor = T::Lanes::<S>::splat(call.most());
        let room = len.next_multiple_of(T::Lanes::<S>::COUNT);
        let most = lines_of_batch::<S, T>(BATCH_BYTES, room);
        let batch_room = three_apart::<T::Real>(most * room);
        let mut held = CacheLines([const { MaybeUninit::<T::Real>::uninit() }; BATCHES]);
        assert!(2 * batch_room <= BATCHES);
        let z = held.0.as_mut_ptr().cast::<T::Real>();
        let dz = z.wrapping_add(batch_room);
        let mut sources = Sources::new::<S>(call, None, &lines, len);
        let drops = sources.drops();
        let (start, elements) = (lines.start * len, lines.len() * len);
        let (scores, g) = (call.scores.at(start, elements).cast_const(), g.at(start, elements).cast_const());
        let to = self.0.scores.map_or(std::ptr::null_mut(), |out| out.at(start, elements));
        let (distance, scale) = (call.ahead(), T::Lanes::<S>::splat(call.scale));
        // Of each line of a batch: vectors with its maxima, its sums and what is weighted by them, …
        let (mut maxima, mut sums, mut dots) = ([none; MAX_LANES], [one; MAX_LANES], [zero; MAX_LANES]);
        // … and what all of it is made with.
        let [mut references, mut inverses, mut totals] = [[T::Real::ZERO; MAX_LANES]; 3];
        // How many lines were found, and the first of these that has not been in a batch yet
        let (mut in_found, mut next_found) = (0, 0);
        for first in (0..lines.len()).step_by(most) {
            let count = most.min(lines.len() - first);
            // SAFETY of the block: the elements are there, and there is room for a batch; the rest by the caller's promise.
            unsafe {
                if next_found == in_found {
                    (in_found, next_found) = (find_apart::<S, T>(&mut sources, lines.len() - first, most), 0);
                }
                let (keep, keep_room) = if drops { sources.keep::<S>(first, count) } else { (std::ptr::null(), 0) };
                let found = sources.from(next_found);
                let sinks = sources.sinks(next_found);
                next_found += count;
                for (i, maximum) in maxima[..count].iter_mut().enumerate() {
                    let at = (first + i) * len;
                    let (line, z) = (Sources::line(&found, i, scores.add(at)), z.add(i * room));
                    let mut max = none;
                    each::<T::Lanes<S>>(
                        0..len,
                        #[inline(always)]
                        |i, count| {
                            if begins_line::<S, T>(i) {
                                S::prefetch(scores.wrapping_add(at + i + distance));
                                S::prefetch(g.wrapping_add(at + i + distance));
                            }
                            let logits = first_lanes(count, logit(&line, i, count));
                            logits.store(z.add(i));
                            max = logits.or_greater(max);
                        },
                    );
                    *maximum = max;
                }
                let mut max = T::Lanes::<S>::max_of_each(&maxima[..T::Lanes::<S>::COUNT]);
                if let Some(sinks) = sinks {
                    max = T::Lanes::<S>::load(sinks.as_ptr()).or_greater(max);
                }
                // Finite where nothing is above −∞, so that exp(−∞ − reference) is 0 and a NaN survives.
                let reference = max.or_greater(lowest);
                reference.store(references.as_mut_ptr());
                for i in 0..count {
                    let reference = T::Lanes::<S>::splat(references[i]);
                    let (z, dz, g) = (z.add(i * room), dz.add(i * room), g.add((first + i) * len));
                    let keep = keep.wrapping_add(i * keep_room);
                    let mut dot = zero;
                    sums[i] = sum_of_long_terms(
                        len,
                        #[inline(always)]
                        |i, count| {
                            let logits = T::Lanes::<S>::load(z.add(i));
                            let exp = (logits - reference).exp();
                            let mut x = T::read::<S>(g.add(i), count, T::Real::ZERO);
                            if !PLAIN && drops {
                                x = (x * factor).where_kept(keep.add(i), T::Real::ZERO);
                            }
                            let x = logits.if_less(lowest, zero, x);
                            if !PLAIN {
                                x.store(dz.add(i));
                            }
                            dot = if log { dot + x } else { x.mul_add(exp, dot) };
                            // Where an element takes no part that remains to be seen. As the logit that is there it would be left by a
                            // masked store, which AVX2 takes many times as long for.
                            logits.if_less(lowest, none, exp).store(z.add(i));
                            exp
                        },
                        #[inline(always)]
                        |_, _, _| (),
                    );
                    dots[i] = dot;
                }
                let mut sum = T::Lanes::<S>::sum_of_each(&sums[..T::Lanes::<S>::COUNT]);
                if let Some(sinks) = sinks {
                    sum = sum + (T::Lanes::<S>::load(sinks.as_ptr()) - reference).exp();
                }
                let dot = T::Lanes::<S>::sum_of_each(&dots[..T::Lanes::<S>::COUNT]);
                // The maximum alone adds 1, unless there is nothing.
                sum.if_less(half, zero, one / sum).store(inverses.as_mut_ptr());
                sum.if_less(half, zero, if log { dot } else { dot / sum }).store(totals.as_mut_ptr());
                for i in 0..count {
                    let line = first + i;
                    let found = Found { max: references[i], inverse: inverses[i], total: totals[i] };
                    self.0.write_sink(lines.start + line, sinks.map(|sinks| sinks[i]), &found);
                    let [inverse, total] = [found.inverse, found.total].map(T::Lanes::<S>::splat);
                    let (at, z, dz) = (start + line * len, z.add(i * room), dz.add(i * room));
                    if !PLAIN {
                        self.0.write::<S>(
                            at,
                            len,
                            z,
                            dz,
                            #[inline(always)]
                            |_, exp| (exp * inverse, total),
                        );
                        continue;
                    }
                    let (g, to) = (g.add(line * len), to.add(line * len));
                    T::write::<S>(
                        to,
                        len,
                        #[inline(always)]
                        |i, count| {
                            if begins_line::<S, T>(i) {
                                // Memory that is written is read first.
                                S::prefetch(to.wrapping_add(i + distance));
                            }
                            let exp = T::Lanes::<S>::get(z.add(i), count);
                            let g = T::read::<S>(g.add(i), count, T::Real::ZERO);
                            let p = exp * inverse;
                            let gradient = if log { g - p * total } else { p * (g - total) };
                            exp.if_less(lowest, zero, gradient * scale)
                        },
                    );
                }
            }
        }
    }
}
