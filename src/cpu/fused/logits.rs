//! What is read, and the logits made of it.

use super::any::Any;
use super::short::is_batched;
use crate::cpu::in_batches::BATCH_LINE;
use crate::cpu::lanes::{each, sum_of_long_terms, Lanes, Pack, MAX_LANES};
use crate::cpu::level::Simd;
use crate::cpu::memory::{leaves_caches, Elements};
use crate::cpu::random;
use crate::cpu::rows::{ahead_in, MAX_BLOCK};
use crate::cpu::statistics::one;
use crate::cpu::{Element, Softmaxed};
use crate::fused::{Around, Geometry, MaskedRows, Operand, Options, Place};
use crate::lines::Lines;
use crate::op::Output;
use crate::state::{Normalizer, Number, Real, SoftmaxState};
use candle_core::{CpuStorage, Result, WithDType};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Bytes of a mask that are the same for all of a short line, or of a vector.
type SameBytes = [u8; BATCH_LINE + MAX_LANES];
static MASKED_OR_KEPT: [SameBytes; 2] = [[0; BATCH_LINE + MAX_LANES], [1; BATCH_LINE + MAX_LANES]];

/// Such bytes, as this one says: without branches, which would be taken by chance.
#[inline(always)]
pub(super) fn same_bytes(keep: u8) -> &'static SameBytes {
    &MASKED_OR_KEPT[usize::from(keep != 0)]
}

/// Scores that are neighbours in memory, at most a block, and what is beside them.
pub(super) struct Run<R> {
    pub(super) scores: usize,
    pub(super) bias: usize,
    pub(super) mask: usize,
    pub(super) len: usize,
    /// Where the logits are to be: there is room for as many, and up to a whole vector.
    pub(super) z: *mut R,
    /// The maximum of the logits, when they are there.
    pub(super) max: R,
}

/// How far apart neighbours in a run are in the bias and in the mask.
#[derive(Clone, Copy)]
pub(super) struct Steps {
    pub(super) bias: usize,
    pub(super) mask: usize,
    /// How many elements of the scores are asked for ahead.
    pub(super) ahead: usize,
}

/// Everything that is read, by lines.
#[derive(Clone, Copy)]
pub(super) struct Call<'a, T: Element> {
    pub(super) options: &'a Options,
    pub(super) geometry: &'a Geometry,
    pub(super) scores: Elements<'a, T>,
    pub(super) bias: Option<Elements<'a, T>>,
    pub(super) mask: Option<Elements<'a, u8>>,
    pub(super) sinks: Option<Elements<'a, T>>,
    pub(super) scale: T::Real,
    /// (scale / cap, cap)
    pub(super) cap: Option<(T::Real, T::Real)>,
}

impl<R> Run<R> {
    /// An element for each of the run's, from `first` on and `step` apart, as neighbours: in `to` if they are not.
    ///
    /// # Safety
    /// `to` is valid for writes of a block.
    #[inline(always)]
    unsafe fn neighbours<A: Copy>(&self, from: Elements<A>, first: usize, step: usize, to: *mut A) -> *const A {
        let from = from.at(first, (self.len - 1) * step + 1);
        if step == 1 {
            return from;
        }
        // SAFETY: the elements are there, and the room by the caller's promise.
        (0..self.len).for_each(|i| unsafe { to.add(i).write(*from.add(i * step)) });
        to
    }
}

impl<'a, T: Element + WithDType> Call<'a, T> {
    pub(super) fn new(
        options: &'a Options,
        geometry: &'a Geometry,
        scores: Elements<'a, T>,
        around: &Around<'a, CpuStorage>,
    ) -> Result<Self> {
        fn elements<'a, A: WithDType>(operand: &Option<Operand<'a, CpuStorage>>) -> Result<Option<Elements<'a, A>>> {
            let slice = |operand: &Operand<'a, CpuStorage>| {
                Ok(Elements::read(&operand.storage.as_slice::<A>()?[operand.start..]))
            };
            operand.as_ref().map(slice).transpose()
        }
        let real = T::Real::nearest;
        Ok(Self {
            options,
            geometry,
            scores,
            bias: elements(&around.bias)?,
            mask: elements(&around.mask)?,
            sinks: elements(&around.sinks)?,
            scale: real(options.scale),
            cap: options.softcap.map(|cap| (real(options.scale / cap), real(cap))),
        })
    }
}

impl<'a, T: Element> Call<'a, T> {
    pub(super) fn is_log(&self) -> bool {
        self.options.output == Output::LogProbability
    }

    /// Whether there is nothing but a scale around the softmax.
    pub(super) fn is_alone(&self) -> bool {
        let Options { softcap, window, dropout, .. } = self.options;
        let none = self.bias.is_none() && self.mask.is_none() && self.sinks.is_none();
        none && softcap.is_none() && window.is_none() && dropout.is_none()
    }

    /// The call, if it [is alone](Self::is_alone) and results are of the scores' dtype.
    pub(super) fn softmaxed<'b>(&self, out: &Any<'b>) -> Option<Softmaxed<'b, T>>
    where
        'a: 'b,
    {
        let least = match self.options.masked_rows {
            MaskedRows::Zero => T::Real::LOWEST,
            MaskedRows::Nan => T::Real::NEG_INFINITY,
        };
        let (src, lines, output, scale) = (self.scores, self.geometry.lines, self.options.output, self.scale);
        T::of(out).filter(|_| self.is_alone()).map(|out| Softmaxed { src, out, lines, output, scale, least })
    }

    /// Which of the keys in `range` take part, as far as the window says.
    pub(super) fn keys(&self, query: usize, range: &Range<usize>) -> Range<usize> {
        let (first, end) = match self.options.window {
            Some(window) => window.keys(query, self.geometry.lines.len),
            None => return range.clone(),
        };
        let first = first.clamp(range.start, range.end);
        first..end.clamp(first, range.end)
    }

    /// The logit in the denominator that has no output.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    pub(super) unsafe fn sink<S: Simd>(&self, at: usize) -> Option<T::Real> {
        let sinks = self.sinks?;
        // SAFETY: one element is there; the rest by the caller's promise.
        Some(unsafe { one::<S, T>(sinks.at(at, 1)) })
    }

    /// Whether logits [have neighbours](Self::has_neighbours), and become probabilities.
    pub(super) fn is_of_neighbours(&self) -> bool {
        self.has_neighbours() && !self.is_log()
    }

    /// Whether logits are made of neighbours in memory. Of a narrow window in long lines so much less
    /// is read otherwise that it takes less time; a causal one took 1.11 to 1.25 of a softmax then, and 0.97 to 1.17 as a mask.
    pub(super) fn has_neighbours(&self) -> bool {
        let Geometry { lines: Lines { len, .. }, bias_step, mask_step, .. } = *self.geometry;
        // One byte for all of a line is [repeated](Self::line_mask).
        let mask_neighbours = self.mask.is_none() || mask_step == 1 || mask_step == 0 && is_batched::<T>(len);
        let neighbours = bias_step <= 1 && mask_neighbours;
        let narrow = self.options.window.is_some_and(|window| {
            let (first, end) = window.keys(window.queries / 2, len);
            len > BATCH_LINE && end - first < len / 4
        });
        neighbours && !narrow
    }

    /// The bytes of a line's mask, which begins at this place and has neighbours or, if the line [is batched](is_batched), one byte for all.
    /// The last of the lines that are taken with it begins so many elements `beyond` it.
    #[inline(always)]
    pub(super) fn line_mask(&self, mask: Elements<u8>, place: usize, beyond: usize) -> *const u8 {
        if self.geometry.mask_step == 1 {
            return mask.at(place, beyond + self.geometry.lines.len);
        }
        let byte: *const u8 = mask.at(place, beyond + 1);
        // SAFETY: it is there.
        same_bytes(unsafe { *byte }).as_ptr()
    }

    /// Whether there is a bias that comes from as far as the scores do. One that many lines share is in a nearer cache, where it takes
    /// longer to ask for it: (64, 1000, 128) f32s with one of (1000, 128) 2.2 ms, not asked for 1.9.
    pub(super) fn bias_streams(&self) -> bool {
        self.bias.is_some_and(|bias| bias.len() == self.scores.len() || leaves_caches(&bias))
    }

    /// How many elements the memory system is to be ahead of them along the last dimension.
    pub(super) fn ahead(&self) -> usize {
        ahead_in(&self.scores)
    }

    /// Those of a run along the last dimension.
    pub(super) fn steps_along(&self) -> Steps {
        Steps { bias: self.geometry.bias_step, mask: self.geometry.mask_step, ahead: self.ahead() }
    }

    /// Elements `start..start + len` of a line along the last dimension.
    pub(super) fn run_along(&self, place: &Place, start: usize, len: usize, z: *mut T::Real) -> Run<T::Real> {
        let steps = self.steps_along();
        let (bias, mask) = (place.bias + start * steps.bias, place.mask + start * steps.mask);
        Run { scores: place.scores + start, bias, mask, len, z, max: T::Real::NEG_INFINITY }
    }

    /// The logits of such a run; answers their maximum.
    ///
    /// # Safety
    /// As of [`logits`](Self::logits).
    #[inline(always)]
    pub(super) unsafe fn logits_along<S: Simd>(
        &self,
        place: &Place,
        start: usize,
        len: usize,
        z: *mut T::Real,
    ) -> T::Real {
        let mut run = self.run_along(place, start, len, z);
        // SAFETY: as promised by the caller.
        unsafe { self.logits::<S>(std::slice::from_mut(&mut run), self.steps_along()) };
        run.max
    }

    /// Writes the logits of these runs, and −∞ up to a whole vector; notes their maxima.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and there is the room for logits that a run promises.
    #[inline(never)]
    pub(super) unsafe fn logits<S: Simd>(&self, runs: &mut [Run<T::Real>], steps: Steps) {
        // SAFETY: as promised by the caller. A function of its own for all who need logits, entered anew.
        unsafe {
            S::enter(
                #[inline(always)]
                || self.logits_inside::<S>(runs, steps),
            )
        }
    }

    /// The bias where there is one for all of a run; else 0.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn shift<S: Simd>(&self, run: &Run<T::Real>, steps: Steps) -> T::Lanes<S> {
        T::Lanes::<S>::splat(match self.bias {
            // SAFETY: one element is there; the rest by the caller's promise.
            Some(bias) if steps.bias == 0 => unsafe { one::<S, T>(bias.at(run.bias, 1)) },
            _ => T::Real::ZERO,
        })
    }

    /// # Safety
    /// As of [`logits`](Self::logits).
    #[inline(always)]
    unsafe fn logits_inside<S: Simd>(&self, runs: &mut [Run<T::Real>], steps: Steps) {
        let mut bias_here = [MaybeUninit::<T>::uninit(); MAX_BLOCK];
        let mut mask_here = [MaybeUninit::<u8>::uninit(); MAX_BLOCK];
        let (bias_here, mask_here) = (bias_here.as_mut_ptr().cast::<T>(), mask_here.as_mut_ptr().cast::<u8>());
        let (zero, none) = (T::Real::ZERO, T::Real::NEG_INFINITY);
        // With one number for each element; else there is one for all of a run.
        let (bias, mask) = (self.bias.filter(|_| steps.bias != 0), self.mask.filter(|_| steps.mask != 0));
        let masked = self.mask.filter(|_| steps.mask == 0);
        let (scale, cap) =
            (T::Lanes::<S>::splat(self.scale), self.cap.map(|(inverse, cap)| [inverse, cap].map(Number::splat)));
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        // One loop for each combination.
        unsafe {
            match (cap, bias, mask) {
                (None, None, None) => logits_of::<S, T, _>(
                    runs,
                    self.scores,
                    masked,
                    steps.ahead,
                    #[inline(always)]
                    |run| {
                        let shift = self.shift::<S>(run, steps);
                        #[inline(always)]
                        move |x, _, _| x.mul_add(scale, shift)
                    },
                ),
                (None, Some(bias), None) => logits_of::<S, T, _>(
                    runs,
                    self.scores,
                    masked,
                    steps.ahead,
                    #[inline(always)]
                    |run| {
                        let bias = run.neighbours(bias, run.bias, steps.bias, bias_here);
                        #[inline(always)]
                        move |x, i, count| {
                            // Most biases have rows as the scores have them.
                            S::prefetch(bias.wrapping_add(i + steps.ahead));
                            x.mul_add(scale, T::read::<S>(bias.add(i), count, zero))
                        }
                    },
                ),
                (None, None, Some(mask)) => logits_of::<S, T, _>(
                    runs,
                    self.scores,
                    masked,
                    steps.ahead,
                    #[inline(always)]
                    |run| {
                        let (shift, keep) =
                            (self.shift::<S>(run, steps), run.neighbours(mask, run.mask, steps.mask, mask_here));
                        #[inline(always)]
                        move |x, i, count| x.mul_add(scale, shift).where_some_kept(keep.add(i), count, none)
                    },
                ),
                (Some([inverse, cap]), None, None) => logits_of::<S, T, _>(
                    runs,
                    self.scores,
                    masked,
                    steps.ahead,
                    #[inline(always)]
                    |run| {
                        let shift = self.shift::<S>(run, steps);
                        #[inline(always)]
                        move |x, _, _| (x * inverse).tanh().mul_add(cap, shift)
                    },
                ),
                (cap, bias, mask) => logits_of::<S, T, _>(
                    runs,
                    self.scores,
                    masked,
                    steps.ahead,
                    #[inline(always)]
                    |run| {
                        let shift = self.shift::<S>(run, steps);
                        let (bias, keep) = (
                            bias.map(|bias| run.neighbours(bias, run.bias, steps.bias, bias_here)),
                            mask.map(|mask| run.neighbours(mask, run.mask, steps.mask, mask_here)),
                        );
                        #[inline(always)]
                        move |x, i, count| {
                            let shift = match bias {
                                Some(bias) => T::read::<S>(bias.add(i), count, zero),
                                None => shift,
                            };
                            let logit = match cap {
                                Some([inverse, cap]) => (x * inverse).tanh().mul_add(cap, shift),
                                None => x.mul_add(scale, shift),
                            };
                            match keep {
                                Some(keep) => logit.where_some_kept(keep.add(i), count, none),
                                None => logit,
                            }
                        }
                    },
                ),
            }
        }
    }

    /// What probabilities are at most: what dropout keeps is larger than 1.
    pub(super) fn most(&self) -> T::Real {
        self.options.dropout.map_or(T::Real::ONE, |dropout| T::Real::nearest(dropout.kept_scale()))
    }

    /// What [`Output::of`] takes beside maxima, in place of sums, for results that are [so much](Self::most) at most.
    #[inline(always)]
    pub(super) fn scale_each<V: Lanes<Real = T::Real>>(&self, sums: &mut [T::Real]) {
        let most = self.most();
        // A loop of its own for each: that of divisions becomes vectors.
        match self.options.output {
            Output::Probability => sums.iter_mut().for_each(|sum| *sum = Output::Probability.scale::<V>(*sum) * most),
            Output::LogProbability => {
                sums.iter_mut().for_each(|sum| *sum = Output::LogProbability.scale::<V>(*sum) * most)
            }
        }
    }

    /// What the logits of a line become results with: its maximum, and what [`Output::of`] takes beside it. `None` is a line
    /// of nothing: those become 0, −∞ or NaN.
    pub(super) fn scales<V: Lanes<Real = T::Real>>(&self, found: Option<Normalizer<T::Real>>) -> (T::Real, T::Real) {
        match found {
            Some(line) => {
                let mut scale = [line.sum];
                self.scale_each::<V>(&mut scale);
                (line.max, scale[0])
            }
            None if self.sinks.is_some() || self.options.masked_rows == MaskedRows::Zero => {
                (T::Real::ZERO, T::Real::ZERO)
            }
            None => (T::Real::ZERO, T::Real::nearest(f64::NAN)),
        }
    }
}

/// Writes what `of(run)` makes of each vector of its scores, or −∞ for all of a run that is masked, and −∞ up to a whole
/// vector; notes the maxima.
///
/// # Safety
/// As of [`Call::logits`].
#[inline(always)]
unsafe fn logits_of<S: Simd, T: Element, F: Fn(T::Lanes<S>, usize, usize) -> T::Lanes<S>>(
    runs: &mut [Run<T::Real>],
    scores: Elements<T>,
    masked: Option<Elements<u8>>,
    ahead: usize,
    of: impl Fn(&Run<T::Real>) -> F,
) {
    let none = T::Lanes::<S>::splat(T::Real::NEG_INFINITY);
    for run in runs {
        // SAFETY of the block: as promised by the caller.
        unsafe {
            if masked.is_some_and(|mask| *mask.at(run.mask, 1) == 0) {
                (0..run.len).step_by(T::Lanes::<S>::COUNT).for_each(|i| none.store(run.z.add(i)));
                continue;
            }
            let (xs, z, f) = (scores.at(run.scores, run.len).cast_const(), run.z, of(run));
            let mut max = none;
            each::<T::Lanes<S>>(
                0..run.len,
                #[inline(always)]
                |i, count| {
                    S::prefetch(xs.wrapping_add(i + ahead));
                    let logit = first_lanes(count, f(T::read::<S>(xs.add(i), count, T::Real::ZERO), i, count));
                    max = logit.or_greater(max);
                    logit.store(z.add(i));
                },
            );
            run.max = max.max_across();
        }
    }
}

/// Σ exp(z − reference) of at most a block, in whole vectors, each of which `keep(start, exponentials)` sees
/// [scaled](Lanes::scaled_exp).
///
/// # Safety
/// The CPU has the instructions of `V`, and `z` is valid for reads of `len` elements and up to a whole vector.
#[inline(always)]
pub(super) unsafe fn exp_sum<V: Lanes>(
    z: *const V::Real,
    len: usize,
    reference: V::Real,
    mut keep: impl FnMut(usize, V),
) -> V::Real {
    let reference = V::splat(reference);
    let sum = sum_of_long_terms(
        len.next_multiple_of(V::COUNT),
        #[inline(always)]
        // SAFETY: as promised by the caller.
        |i, _| (unsafe { V::load(z.add(i)) } - reference).scaled_exp(),
        #[inline(always)]
        |i, _, exp| keep(i, exp),
    );
    sum.sum_across() * V::UNSCALE
}

/// Adds the sink, if there is one, and finishes the line.
pub(super) fn with_sink<R: Real>(mut state: SoftmaxState<R>, sink: Option<R>) -> Option<Normalizer<R>> {
    if let Some(sink) = sink {
        state.push(sink);
    }
    state.normalizer()
}

/// Which elements of a block dropout keeps.
pub(super) type Kept = [u8; random::room(MAX_BLOCK)];

/// The elements of a block that dropout keeps.
///
/// # Safety
/// The CPU has the instructions of `S`.
#[inline(always)]
pub(super) unsafe fn keep_along<S: Simd, T: Element>(
    call: &Call<T>,
    line: usize,
    start: usize,
    len: usize,
    kept: &mut [u8],
) -> Option<*const u8> {
    // Not by a closure, which would not always be inlined, and not be made of vectors then.
    let dropout = call.options.dropout?;
    // SAFETY: as promised by the caller.
    let at = unsafe { random::along::<S>(dropout, line, start, len, kept) };
    Some(kept[at..].as_ptr())
}

/// The first `count` logits, and −∞ in the other lanes.
#[inline(always)]
pub(super) fn first_lanes<V: Lanes>(count: usize, logits: V) -> V {
    if count < V::COUNT {
        logits.keep(count, V::Real::NEG_INFINITY)
    } else {
        logits
    }
}
