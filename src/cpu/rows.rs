//! Lines along the last dimension: each is contiguous.

use super::at_once::{self, asks_ahead, has_near, Above, Batches, Lines, SHORT};
use super::element::Keep;
use super::in_batches::{in_batches, BATCH_LINE};
use super::lanes::{each, fold, sum_of_long_terms, sum_seen, Lanes, Pack, MAX_LANES};
use super::level::Simd;
use super::memory::{leaves_caches, CacheLines, Elements, KeptLines, Scratch, CACHE_LINE};
use super::streamed::{streams, Streamed};
use super::{Element, Pass};
use crate::op::{Output, Schedule};
use crate::state::{root_of_rescaling, CompensatedSum, Normalizer, Number, Real, SoftmaxState};
use std::mem::MaybeUninit;
use std::ops::Range;

/// A block adds this many vectors plainly, 16 to each of [`fold`]'s accumulators: rounding cannot pile up.
pub(super) const BLOCK_VECTORS: usize = 64;

/// No block has more elements.
pub(super) const MAX_BLOCK: usize = BLOCK_VECTORS * MAX_LANES;

/// No line keeps more exponentials in the first cache rather than take them twice, …
pub(super) const MAX_KEPT: usize = 4096;
/// … longer ones where their results are to be or, if results are halves, aside, up to this length, at which they leave the second cache:
/// aside 151936 bf16s took 21 µs and 256000 39, taken twice 40 and 68 (Zen 5).
pub(super) const MAX_KEPT_LONG: usize = 1 << 18;

/// Where vectors are as long as lines of a cache, lines of more than this are kept where their results are to be already. 4096
/// f32s took half the time then on an Emerald Rapids; with AVX2 it is 0.77 there and 1.35 on a Zen 3.
const KEPT_OF_LONG_VECTORS: usize = 2048;

/// Of one line the maximum is found, one is summed and one written; a power of two.
const IN_WORK: usize = 4;
/// Longer lines, up to [`MAX_KEPT`], are summed relative to the maximum of so many vectors, where exponentials tell if that was too
/// little.
pub(super) const SAMPLE_VECTORS: usize = 4;
/// What such a sum is to be below: e⁹, since the farther the maximum is, the more x − reference is rounded. More than there are
/// elements; NaN is not below.
pub(super) const MOST_OF_SAMPLE: f64 = 8192.0;
const _: () = assert!(MAX_KEPT < MOST_OF_SAMPLE as usize);
/// What the sum of `count` exponentials relative to the maximum of others is to be below, up to 1024 of them: as much as it may be
/// where the [reference](SoftmaxState::reference) is their own, e⁸ for each; and none is e¹⁶.
pub(super) fn most_of<R: Real>(count: usize) -> R {
    R::nearest(count as f64 * 4096.0)
}

/// Three tensors of so many bytes leave the second cache. Below that it takes longer to ask for what is there.
const LEAVES_SECOND: usize = 1 << 19;

/// Lines that come from the third cache are asked for so many bytes before they are read: 512 × 512 f32s take a Zen 5 26 µs, with twice
/// as many or half of them 28, and with a line's 30. See also [`asks_ahead`].
pub(super) const NEAR: usize = 1024;

/// The same of those that come from memory.
pub(super) const FAR: usize = ahead_if::<u8>(true);

/// … and of those that are not.
pub(super) const NOT_ASKED: usize = 0;

/// Gradients of lines of this length or more are written to aligned addresses where vectors are whole: of shorter ones it takes more.
const ALIGN_GRADIENTS_FROM: usize = 1024;

/// How many elements are written in their order of a line that is written from its end.
const FROM_THE_END: usize = 4096;

/// A sample below is rather of what is masked than of logits.
pub(super) const LEAST_SAMPLE: f64 = -1e3;

/// Whether short lines of this type have loops of their own, here for each number of vectors. Those of f64s are not worth the machine code.
pub(super) const fn has_own_loops<T: Element>() -> bool {
    size_of::<T::Real>() == 4
}

/// Up to this length lines keep their exponentials in the first cache.
pub(super) fn most_kept<S: Simd, T: Element>() -> usize {
    let long_vectors = size_of::<T::Lanes<S>>() == CACHE_LINE;
    if T::KEEP == Keep::InOutput && long_vectors {
        KEPT_OF_LONG_VECTORS
    } else {
        MAX_KEPT
    }
}

/// How many elements the memory system is to be ahead of them. With more the first cache loses what it was given before it is
/// used: four times as many made lines of 512 f32s, all of them in the second cache, 1.4 times as slow.
pub(super) const fn ahead<T>() -> usize {
    2048 / size_of::<T>()
}

/// [`ahead`], or farther for what [leaves the caches](leaves_caches), which takes longer: 49152 × 128 f32s took one thread of a Zen 5
/// 1.28 ms with 2 KB and 0.98 with 8.
pub(super) const fn ahead_if<T>(leaves_caches: bool) -> usize {
    if leaves_caches {
        4 * ahead::<T>()
    } else {
        ahead::<T>()
    }
}

pub(super) fn ahead_in<T>(out: &Elements<T>) -> usize {
    ahead_if::<T>(leaves_caches(out))
}

/// How many blocks the memory system is to be ahead of the arithmetic.
pub(super) const AHEAD_BLOCKS: usize = 2;

/// The blocks of `range`, as start and length.
pub(super) fn blocks<V: Lanes>(range: Range<usize>) -> impl Iterator<Item = (usize, usize)> {
    let block = BLOCK_VECTORS * V::COUNT;
    let end = range.end;
    range.step_by(block).map(move |start| (start, block.min(end - start)))
}

/// # Safety
/// The CPU has the instructions of `S`, and `xs` is valid for reads of `len` elements.
#[inline(always)]
pub(super) unsafe fn max_of<S: Simd, T: Element>(xs: *const T, len: usize) -> T::Real {
    let none = T::Real::NEG_INFINITY;
    fold(
        len,
        T::Lanes::<S>::splat(none),
        #[inline(always)]
        // SAFETY: as promised by the caller.
        |max, i, count| unsafe { T::read::<S>(xs.add(i), count, none) }.or_greater(max),
        T::Lanes::<S>::or_greater,
    )
    .max_across()
}

/// Σ f(start, count), for at most a block.
#[inline(always)]
pub(super) fn sum_of<V: Lanes>(len: usize, mut f: impl FnMut(usize, usize) -> V) -> V::Real {
    fold(
        len,
        V::splat(V::Real::ZERO),
        #[inline(always)]
        |sum, i, count| sum + f(i, count),
        V::add,
    )
    .sum_across()
}

/// Σ f(start, len) over blocks.
#[inline(always)]
pub(super) fn sum_of_blocks<V: Lanes>(len: usize, mut f: impl FnMut(usize, usize) -> V::Real) -> V::Real {
    let block = BLOCK_VECTORS * V::COUNT;
    let mut sum = CompensatedSum::zero();
    let mut start = 0;
    loop {
        let part = f(start, block.min(len - start));
        if len <= block {
            return part;
        }
        sum.add(part);
        start += block;
        if start >= len {
            return sum.value();
        }
    }
}

/// Σ exp(x − reference), for at most a block; `keep(start, count, exponentials)` sees its terms, [scaled](Lanes::scaled_exp).
/// Meanwhile the elements `ahead` of these are asked for, so that memory and arithmetic take turns in neither's time.
///
/// # Safety
/// The CPU has the instructions of `S`, and `xs` is valid for reads of `len` elements.
#[inline(always)]
pub(super) unsafe fn exp_sum<S: Simd, T: Element>(
    xs: *const T,
    len: usize,
    reference: T::Real,
    ahead: usize,
    keep: impl FnMut(usize, usize, T::Lanes<S>),
) -> T::Real {
    let reference = T::Lanes::<S>::splat(reference);
    let sum = sum_seen(
        len,
        #[inline(always)]
        |i, count| {
            S::prefetch(xs.wrapping_add(ahead + i));
            // SAFETY: as promised by the caller.
            (unsafe { T::read::<S>(xs.add(i), count, T::Real::NEG_INFINITY) } - reference).scaled_exp()
        },
        keep,
    );
    sum.sum_across() * T::Lanes::<S>::UNSCALE
}

/// Room for a block.
type Block<R> = CacheLines<[MaybeUninit<R>; MAX_BLOCK]>;

pub(super) fn block<R>() -> Block<R> {
    CacheLines([const { MaybeUninit::uninit() }; MAX_BLOCK])
}

/// Makes exponentials that are relative to `old` relative to `new`.
///
/// # Safety
/// The CPU has the instructions of `V`, and `exps` is valid for reads and writes of `len` elements.
#[inline(always)]
pub(super) unsafe fn rescale<V: Lanes>(exps: *mut V::Real, len: usize, old: V::Real, new: V::Real) {
    let root = V::splat(root_of_rescaling(old, new));
    each::<V>(
        0..len,
        #[inline(always)]
        // SAFETY: as promised by the caller.
        |i, count| unsafe { (V::get(exps.add(i), count) * root * root).put(exps.add(i), count) },
    )
}

pub(super) struct Softmax<'a, T>(pub super::Forward<'a, T>);

impl<T: Element> Softmax<'_, T> {
    /// The state of `len` elements, whose maximum is that of all where it is to be `exact`, or of the first, as of strips;
    /// `keep(start, count, reference, exponentials)` sees the terms of its sum, those of a block a second time if the first is to be
    /// forgotten, and `done(start, count)` is called after each block.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and `xs` is valid for reads of `len` elements.
    #[inline(always)]
    unsafe fn state<S: Simd>(
        &self,
        xs: *const T,
        len: usize,
        exact: bool,
        mut keep: impl FnMut(usize, usize, T::Real, T::Lanes<S>),
        mut done: impl FnMut(usize, usize),
    ) -> SoftmaxState<T::Real> {
        let mut state = SoftmaxState::empty();
        let ahead = ahead_in(&self.0.src).max(AHEAD_BLOCKS * BLOCK_VECTORS * T::Lanes::<S>::COUNT);
        // SAFETY of the block: as promised by the caller.
        unsafe {
            if self.0.schedule == Schedule::Safe {
                state.grow(max_of::<S, T>(xs, len));
            }
            for (start, len) in blocks::<T::Lanes<S>>(0..len) {
                let xs = xs.add(start);
                let mut grown = exact || start == 0 || !T::Lanes::<S>::SATURATES;
                let sum = loop {
                    let reference = match self.0.schedule {
                        Schedule::Online | Schedule::Reduce if grown => state.grow(max_of::<S, T>(xs, len)),
                        _ => state.reference(),
                    };
                    let sum = exp_sum::<S, T>(
                        xs,
                        len,
                        reference,
                        ahead,
                        #[inline(always)]
                        |i, count, exp| keep(start + i, count, reference, exp),
                    );
                    if grown || sum < most_of(len) {
                        break sum;
                    }
                    grown = true;
                };
                state.add(sum);
                done(start, len);
            }
        }
        state
    }

    /// Writes the results of `len` elements.
    ///
    /// # Safety
    /// As of [`Pass::write`], with `xs` and `out` valid for `len` elements.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, xs: *const T, out: *mut T, len: usize, line: Normalizer<T::Real>) {
        let max = T::Lanes::<S>::splat(line.max);
        let scale = T::Lanes::<S>::splat(self.0.output.scale::<T::Lanes<S>>(line.sum));
        let ahead = ahead_in(&self.0.out);
        // SAFETY: as promised by the caller.
        unsafe {
            T::write::<S>(
                out,
                len,
                #[inline(always)]
                |i, count| {
                    S::prefetch(out.wrapping_add(i + ahead));
                    self.0.output.of(T::read::<S>(xs.add(i), count, T::Real::ZERO) - max, scale)
                },
            )
        }
    }

    /// Short lines, three in work at a time where they fit into the first cache: while the sum of one is taken, the maximum
    /// of a later one is found and the results of an earlier one are written. So memory is read and written all the
    /// while, and nothing waits for the steps from a vector to one number, which wait for each other.
    ///
    /// # Safety
    /// As of [`Pass::whole`], with 0 < `len` ≤ [`MAX_KEPT`].
    #[inline(always)]
    unsafe fn short<S: Simd>(&self, lines: Range<usize>, len: usize, output: Output) {
        let mut kept = short_kept();
        let (short, count) = (Short::new::<S>(&self.0, &lines, len, &mut kept, 1, output), lines.len());
        let mut found = [Normalizer { max: T::Real::ZERO, sum: T::Real::ONE }; IN_WORK];
        for step in 0..count + 2 {
            let read = (step < count).then_some(step);
            let summed = step.checked_sub(1).filter(|&line| line < count);
            let written = step.checked_sub(2);
            // SAFETY of the block: the lines are there; `kept` has room for as many as are between their sum and their
            // results, and is read where it was written; the rest by the caller's promise.
            unsafe {
                if let (Some(read), Some(summed), Some(written)) = (read, summed, written) {
                    let mut max = T::Lanes::<S>::splat(T::Real::NEG_INFINITY);
                    let xs = short.src.add(read * len);
                    let line = found[summed % IN_WORK].max;
                    let mut write = short.results::<S>(written, found[written % IN_WORK], None);
                    let sum = short.sum::<S>(
                        summed,
                        line,
                        #[inline(always)]
                        |i, count| {
                            max = T::read::<S>(xs.add(i), count, T::Real::NEG_INFINITY).or_greater(max);
                            write(i, count);
                        },
                    );
                    found[summed % IN_WORK] = Normalizer::new(line, sum);
                    found[read % IN_WORK].max = max.max_across();
                } else {
                    if let Some(line) = read {
                        found[line % IN_WORK].max = max_of::<S, T>(short.src.add(line * len), len);
                    }
                    if let Some(line) = summed {
                        let max = found[line % IN_WORK].max;
                        let sum = short.sum_alone::<S>(line, max);
                        found[line % IN_WORK] = Normalizer::new(max, sum);
                    }
                    if let Some(line) = written {
                        short.write::<S>(line, found[line % IN_WORK], None);
                    }
                }
            }
        }
    }

    /// Lines that are read once: what each is summed relative to is the maximum of its first vectors. Where that was too little, the sum
    /// is taken again relative to the maximum of all. While one is summed, the results of the one before are written.
    ///
    /// # Safety
    /// As of [`Pass::whole`], with a sample's length ≤ `len` ≤ [`MAX_KEPT`], and vectors that [saturate](Lanes::SATURATES).
    #[inline(always)]
    unsafe fn sampled<S: Simd>(&self, lines: Range<usize>, len: usize) {
        let mut kept = short_kept();
        let short = Short::new::<S>(&self.0, &lines, len, &mut kept, 0, Output::Probability);
        let mut found = Normalizer { max: T::Real::ZERO, sum: T::Real::ONE };
        let mut streamed =
            streams::<S, T>(Some(&self.0.src), &self.0.out, len).then(|| Streamed::new(short.out.cast()));
        // SAFETY of the block: the lines are there; `kept` has room for two, and is read where it was written; the rest by the
        // caller's promise.
        unsafe {
            for line in 0..lines.len() {
                let reference = short.sample::<S>(line);
                let sum = if line == 0 {
                    short.sum_alone::<S>(line, reference)
                } else {
                    short.sum::<S>(line, reference, short.results::<S>(line - 1, found, streamed.as_mut()))
                };
                found = if sum < T::Real::nearest(MOST_OF_SAMPLE) {
                    Normalizer::new(reference, sum)
                } else {
                    let max = max_of::<S, T>(short.src.add(line * len), len);
                    let sum = short.sum_alone::<S>(line, max);
                    Normalizer::new(max, sum)
                };
            }
            if let Some(last) = lines.len().checked_sub(1) {
                short.write::<S>(last, found, streamed.as_mut());
            }
            if let Some(streamed) = streamed {
                streamed.finish();
            }
        }
    }

    /// The short lines of batches.
    #[inline(always)]
    fn batched<S: Simd>(&self, lines: Range<usize>, len: usize) -> Lines<T> {
        let of_nothing = T::Real::nearest(f64::NAN);
        Lines::new::<S>(&self.0.src, &self.0.out, lines, len, T::Lanes::<S>::UNSCALE, of_nothing)
    }

    /// Short lines in batches: see [`in_batches`].
    ///
    /// # Safety
    /// As of [`Pass::whole`], with 0 < `len` ≤ [`BATCH_LINE`].
    #[inline(always)]
    unsafe fn in_batches<
        S: Simd,
        const LEN: usize,
        const VECTORS: usize,
        const LEAVES_CACHES: bool,
        const LOG: bool,
    >(
        &self,
        lines: Range<usize>,
        len: usize,
    ) {
        let lines = self.batched::<S>(lines, len);
        // SAFETY: the elements are there; the rest by the caller's promise.
        unsafe {
            in_batches::<S, T, _, LEN, VECTORS, LEAVES_CACHES, LOG>(
                &mut Plain,
                lines,
                #[inline(always)]
                |xs, i| S::prefetch(xs.wrapping_add(i)),
                #[inline(always)]
                |xs, i, count| T::read::<S>(xs.add(i), count, T::Real::NEG_INFINITY),
            )
        }
    }

    /// A loop for each number of vectors, and for what leaves the caches.
    ///
    /// # Safety
    /// As of [`in_batches`](Self::in_batches).
    #[inline(always)]
    unsafe fn in_batches_of<S: Simd, const LOG: bool>(&self, lines: Range<usize>, len: usize) {
        let leaves_caches = S::PREFETCHES && leaves_caches(&self.0.out);
        // SAFETY: as promised by the caller.
        unsafe {
            match len.div_ceil(T::Lanes::<S>::COUNT) {
                _ if const { !S::SPECIALISED } => self.in_batches::<S, 0, 0, false, LOG>(lines, len),
                _ if const { !LOG && has_own_loops::<T>() } && len == SHORT => match leaves_caches {
                    true => self.in_batches::<S, SHORT, 0, true, LOG>(lines, len),
                    false => self.in_batches::<S, SHORT, 0, false, LOG>(lines, len),
                },
                _ if leaves_caches => self.in_batches::<S, 0, 0, true, LOG>(lines, len),
                _ if const { !has_own_loops::<T>() } => self.in_batches::<S, 0, 0, false, LOG>(lines, len),
                1 => self.in_batches::<S, 0, 1, false, LOG>(lines, len),
                2 => self.in_batches::<S, 0, 2, false, LOG>(lines, len),
                3 => self.in_batches::<S, 0, 3, false, LOG>(lines, len),
                4 => self.in_batches::<S, 0, 4, false, LOG>(lines, len),
                _ => self.in_batches::<S, 0, 0, false, LOG>(lines, len),
            }
        }
    }

    /// Short lines that are read once: see [`at_once`].
    ///
    /// # Safety
    /// As of [`Pass::whole`], with 0 < `len` ≤ [`BATCH_LINE`], and vectors that [saturate](Lanes::SATURATES).
    #[inline(always)]
    unsafe fn at_once<S: Simd, const LEN: usize, const VECTORS: usize, const AHEAD: usize>(
        &self,
        lines: Range<usize>,
        len: usize,
    ) {
        let lines = self.batched::<S>(lines, len);
        // SAFETY: the elements are there; the rest by the caller's promise.
        unsafe {
            at_once::at_once::<S, T, _, LEN, VECTORS, AHEAD, { at_once::NOTHING }>(
                &mut Plain,
                lines,
                #[inline(always)]
                |xs, i| S::prefetch(xs.wrapping_add(i)),
                #[inline(always)]
                |xs, i, count, reference| Above::all(T::read::<S>(xs.add(i), count, T::Real::NEG_INFINITY) - reference),
            )
        }
    }

    /// A loop for each number of vectors.
    ///
    /// # Safety
    /// As of [`at_once`](Self::at_once).
    #[inline(always)]
    unsafe fn in_caches<S: Simd, const AHEAD: usize>(&self, lines: Range<usize>, len: usize) {
        // SAFETY: as promised by the caller.
        unsafe {
            match len.div_ceil(T::Lanes::<S>::COUNT) {
                _ if len == SHORT => self.at_once::<S, SHORT, 0, AHEAD>(lines, len),
                1 => self.at_once::<S, 0, 1, AHEAD>(lines, len),
                2 => self.at_once::<S, 0, 2, AHEAD>(lines, len),
                3 => self.at_once::<S, 0, 3, AHEAD>(lines, len),
                4 => self.at_once::<S, 0, 4, AHEAD>(lines, len),
                _ => self.at_once::<S, 0, 0, AHEAD>(lines, len),
            }
        }
    }

    /// A line that keeps its scaled exponentials in `kept`, each block's relative to the reference it had.
    ///
    /// # Safety
    /// As of [`Pass::whole`], with `len` ≤ [`MAX_KEPT_LONG`] and `kept` valid for reads and writes of `len` elements, which
    /// may be those of the output.
    #[inline(always)]
    unsafe fn long<S: Simd>(&self, line: usize, len: usize, kept: *mut T::Real) {
        let block_len = BLOCK_VECTORS * T::Lanes::<S>::COUNT;
        let xs: *const T = self.0.src.at(line * len, len);
        let out = self.0.out.at(line * len, len);
        let mut references = [T::Real::ZERO; MAX_KEPT_LONG / BLOCK_VECTORS / 4];
        // What would take the place of the input waits: a block of it may be needed a second time.
        let over_input = T::Lanes::<S>::SATURATES && kept.cast_const().cast() == xs;
        let mut waiting = block::<T::Real>();
        let waiting = waiting.0.as_mut_ptr().cast::<T::Real>();
        let ahead = ahead_in(&self.0.out);
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        unsafe {
            let state = self.state::<S>(
                xs,
                len,
                false,
                #[inline(always)]
                |i, count, reference, exp| {
                    references[i / block_len] = reference;
                    S::prefetch(kept.wrapping_add(i + ahead));
                    exp.put(if over_input { waiting.add(i % block_len) } else { kept.add(i) }, count);
                },
                #[inline(always)]
                |start, len| {
                    if over_input {
                        kept.add(start).copy_from_nonoverlapping(waiting, len);
                    }
                },
            );
            let moved = |&(_, reference): &(_, &T::Real)| reference.differs(state.reference());
            for ((start, len), &reference) in blocks::<T::Lanes<S>>(0..len).zip(&references).filter(moved) {
                rescale::<T::Lanes<S>>(kept.add(start), len, reference, state.reference());
            }
            let scale = T::Lanes::<S>::splat(T::Lanes::<S>::UNSCALE / state.sum());
            let one = T::Lanes::<S>::splat(T::Real::ONE);
            T::write::<S>(
                out,
                len,
                #[inline(always)]
                |i, count| {
                    S::prefetch(out.wrapping_add(i + ahead));
                    // The maximum alone may have come out a little over its sum.
                    (T::Lanes::<S>::get(kept.add(i), count) * scale).at_most(one)
                },
            );
        }
    }
}

/// Lines whose logits are their scores.
struct Plain;

impl<T: Element> Batches<T> for Plain {
    type Line = *const T;
    type Found<'a> = ();
    const OF_SCORES: bool = true;

    #[inline(always)]
    unsafe fn find<S: Simd>(&mut self, count: usize, _: usize) -> usize {
        count
    }

    #[inline(always)]
    fn from(&self, _: usize) {}

    #[inline(always)]
    fn line(_: &(), _: usize, scores: *const T) -> *const T {
        scores
    }

    #[inline(always)]
    fn sinks(&self, _: usize) -> Option<&[T::Real; MAX_LANES]> {
        None
    }

    #[inline(always)]
    fn drops(&self) -> bool {
        false
    }

    #[inline(always)]
    unsafe fn keep<S: Simd>(&mut self, _: usize, _: usize) -> (*const u8, usize) {
        (std::ptr::null(), 0)
    }
}

/// Where [`Short`] keeps exponentials.
type ShortKept<R> = CacheLines<[MaybeUninit<R>; 2 * (MAX_KEPT + KeptLines::<f32>::BESIDE)]>;

fn short_kept<R>() -> ShortKept<R> {
    CacheLines([const { MaybeUninit::uninit() }; 2 * (MAX_KEPT + KeptLines::<f32>::BESIDE)])
}

/// Short lines in work, by their number from the first of them.
struct Short<T: Element> {
    src: *const T,
    out: *mut T,
    /// Scaled exponentials.
    kept: KeptLines<T::Real>,
    len: usize,
    /// How many elements are asked for ahead of the sum …
    ahead: usize,
    /// … and of what is written.
    ahead_out: usize,
    output: Output,
}

impl<T: Element> Short<T> {
    /// For lines that are summed `lag` lines behind the one that is read, and written one later.
    #[inline(always)]
    fn new<S: Simd>(
        forward: &super::Forward<T>,
        lines: &Range<usize>,
        len: usize,
        kept: &mut ShortKept<T::Real>,
        lag: usize,
        output: Output,
    ) -> Self {
        let (start, elements) = (lines.start * len, lines.len() * len);
        let (src, out) = (forward.src.at(start, elements).cast_const(), forward.out.at(start, elements));
        let kept_len = len.next_multiple_of(T::Lanes::<S>::COUNT);
        Self {
            src,
            out,
            kept: KeptLines::new::<T>(&mut kept.0, kept_len),
            len,
            ahead: lag * len + ahead_in(&forward.out),
            ahead_out: ahead_in(&forward.out),
            output,
        }
    }

    /// # Safety
    /// The line is there.
    #[inline(always)]
    unsafe fn kept(&self, line: usize) -> *mut T::Real {
        // SAFETY: as promised by the caller.
        unsafe { self.kept.at(line, self.src.add(line * self.len), self.out.add(line * self.len)) }
    }

    /// Σ exp(x − max) of the line, whose terms are kept. `meanwhile(start, count)` is called for each vector of a line.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, the line is there, and there is room for it in `kept`.
    #[inline(always)]
    unsafe fn sum<S: Simd>(&self, line: usize, max: T::Real, mut meanwhile: impl FnMut(usize, usize)) -> T::Real {
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let (xs, kept) = (self.src.add(line * self.len), self.kept(line));
            let reference = T::Lanes::<S>::splat(max);
            sum_of_blocks::<T::Lanes<S>>(
                self.len,
                #[inline(always)]
                |start, len| {
                    let sum = sum_of_long_terms(
                        len,
                        #[inline(always)]
                        |i, count| {
                            let i = start + i;
                            S::prefetch(xs.wrapping_add(self.ahead + i));
                            (T::read::<S>(xs.add(i), count, T::Real::NEG_INFINITY) - reference).scaled_exp()
                        },
                        #[inline(always)]
                        |i, count, exp| {
                            meanwhile(start + i, count);
                            if self.output == Output::Probability {
                                exp.store(kept.add(start + i));
                            }
                        },
                    );
                    sum.sum_across() * T::Lanes::<S>::UNSCALE
                },
            )
        }
    }

    /// [`sum`](Self::sum) with nothing to do meanwhile.
    ///
    /// # Safety
    /// As of [`sum`](Self::sum).
    #[inline(always)]
    unsafe fn sum_alone<S: Simd>(&self, line: usize, max: T::Real) -> T::Real {
        // SAFETY: as promised by the caller.
        unsafe {
            self.sum::<S>(
                line,
                max,
                #[inline(always)]
                |_, _| (),
            )
        }
    }

    /// The maximum of a line's first vectors, or of all of it if those are masked.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and the line is there and no shorter.
    #[inline(always)]
    unsafe fn sample<S: Simd>(&self, line: usize) -> T::Real {
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let xs = self.src.add(line * self.len);
            let sample = max_of::<S, T>(xs, SAMPLE_VECTORS * T::Lanes::<S>::COUNT);
            if sample < T::Real::nearest(LEAST_SAMPLE) {
                return max_of::<S, T>(xs, self.len);
            }
            sample
        }
    }

    /// Writes the results of a line.
    ///
    /// # Safety
    /// As of [`results`](Self::results).
    #[inline(always)]
    unsafe fn write<S: Simd>(
        &self,
        line: usize,
        found: Normalizer<T::Real>,
        streamed: Option<&mut Streamed<T::Lanes<S>>>,
    ) {
        // SAFETY: as promised by the caller.
        unsafe { each::<T::Lanes<S>>(0..self.len, self.results::<S>(line, found, streamed)) }
    }

    /// What writes the results of a line, vector by vector; if they are [`Streamed`], to the place behind those of the line before.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, the line is there, its exponentials are in `kept`, and the function answered
    /// is called for vectors in a line.
    #[inline(always)]
    unsafe fn results<'a, S: Simd>(
        &self,
        line: usize,
        found: Normalizer<T::Real>,
        mut streamed: Option<&'a mut Streamed<T::Lanes<S>>>,
    ) -> impl FnMut(usize, usize) + use<'a, S, T> {
        let (output, ahead) = (self.output, self.ahead_out);
        let max = T::Lanes::<S>::splat(found.max);
        let scale = T::Lanes::<S>::splat(output.scale::<T::Lanes<S>>(found.sum));
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let (xs, exps) = (self.src.add(line * self.len), self.kept(line));
            let out = self.out.add(line * self.len);
            #[inline(always)]
            move |i, count| {
                let result = match output {
                    Output::Probability => T::Lanes::<S>::load(exps.add(i)) * scale,
                    Output::LogProbability => T::read::<S>(xs.add(i), count, T::Real::ZERO) - max - scale,
                };
                if let Some(streamed) = &mut streamed {
                    return streamed.put(result);
                }
                // Memory that is written is read first.
                S::prefetch(out.wrapping_add(i + ahead));
                T::put::<S>(result, out.add(i), count);
            }
        }
    }
}

impl<S: Simd, T: Element> Pass<S> for Softmax<'_, T> {
    type Reduced = SoftmaxState<T::Real>;
    const WIDTH: usize = 1;

    fn use_first(&self, elements: Range<usize>) {
        self.0.out.use_first(elements)
    }

    #[inline(always)]
    unsafe fn reduce(&self, line: usize, range: Range<usize>) -> Self::Reduced {
        let xs = self.0.src.at(line * self.0.lines.len + range.start, range.len());
        // SAFETY: the elements are there, and the instructions by the caller's promise.
        unsafe {
            self.state::<S>(
                xs,
                range.len(),
                true,
                #[inline(always)]
                |_, _, _, _| (),
                #[inline(always)]
                |_, _| (),
            )
        }
    }

    #[inline(always)]
    unsafe fn write(&self, line: usize, range: Range<usize>, state: &Self::Reduced) {
        let start = line * self.0.lines.len + range.start;
        let (xs, out) = (self.0.src.at(start, range.len()), self.0.out.at(start, range.len()));
        // SAFETY: the elements are there; the rest by the caller's promise.
        unsafe { self.finish::<S>(xs, out, range.len(), state.finish()) }
    }

    #[inline(always)]
    unsafe fn whole(&self, lines: Range<usize>, len: usize) {
        let keep = match (self.0.output, T::KEEP) {
            (Output::Probability, keep) if len <= MAX_KEPT_LONG => keep,
            _ => Keep::Nowhere,
        };
        // SAFETY: as promised by the caller; what is kept aside has room for a line.
        unsafe {
            if len <= if keep == Keep::Nowhere { MAX_KEPT } else { most_kept::<S, T>() } {
                return match self.0.output {
                    Output::Probability if T::Lanes::<S>::SATURATES && len > BATCH_LINE => {
                        self.sampled::<S>(lines, len)
                    }
                    Output::Probability if T::Lanes::<S>::SATURATES => {
                        match asks_ahead::<S, T>(&self.0.src, &self.0.out, len) {
                            FAR if len == SHORT => self.at_once::<S, SHORT, 0, FAR>(lines, len),
                            FAR => self.at_once::<S, 0, 0, FAR>(lines, len),
                            NEAR if const { has_near::<T>() } => self.in_caches::<S, NEAR>(lines, len),
                            _ => self.in_caches::<S, NOT_ASKED>(lines, len),
                        }
                    }
                    Output::Probability if len <= BATCH_LINE => self.in_batches_of::<S, false>(lines, len),
                    Output::LogProbability if len <= BATCH_LINE => self.in_batches_of::<S, true>(lines, len),
                    Output::Probability => self.short::<S>(lines, len, Output::Probability),
                    Output::LogProbability => self.short::<S>(lines, len, Output::LogProbability),
                };
            }
            let mut aside = Scratch::new();
            for line in lines {
                match keep {
                    Keep::InOutput => self.long::<S>(line, len, self.0.out.at(line * len, len).cast()),
                    Keep::Aside => self.long::<S>(line, len, aside.room(len)),
                    Keep::Nowhere => Pass::<S>::one_by_one(self, line..line + 1, len),
                }
            }
        }
    }
}

/// softmax: y·(g − Σ g·y); log-softmax: g − exp(y)·Σ g.
pub(super) struct Backward<'a, T>(pub super::Backward<'a, T>);

impl<T: Element> Backward<'_, T> {
    /// What is summed of these elements of a line, at most a block. Those `ahead` of them in both tensors are asked for meanwhile: the
    /// memory system would have a rest while the gradients of a line are written.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and `ys` and `gs` are valid for reads of `len` elements.
    #[inline(always)]
    unsafe fn sum<S: Simd>(ys: *const T, gs: *const T, len: usize, output: Output, ahead: Option<usize>) -> T::Real {
        let zero = T::Real::ZERO;
        let sum = fold(
            len,
            T::Lanes::<S>::splat(zero),
            #[inline(always)]
            |sum, i, count| {
                if let Some(ahead) = ahead {
                    S::prefetch(ys.wrapping_add(i + ahead));
                    S::prefetch(gs.wrapping_add(i + ahead));
                }
                // SAFETY of the block: as promised by the caller.
                unsafe {
                    let g = T::read::<S>(gs.add(i), count, zero);
                    match output {
                        Output::Probability => T::read::<S>(ys.add(i), count, zero).mul_add(g, sum),
                        Output::LogProbability => sum + g,
                    }
                }
            },
            #[inline(always)]
            |a, b| a + b,
        );
        sum.sum_across()
    }

    /// Writes the gradients of `len` elements, and asks for what comes `ahead` of them and is not asked for by [`sum`](Self::sum): for
    /// softmax memory that is written, which is read first, for log-softmax what its sum, too soon, would wait for.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, `ys` and `gs` are valid for reads of `len` elements and `out` for writes.
    #[inline(always)]
    unsafe fn gradients<S: Simd>(
        (ys, gs, out): (*const T, *const T, *mut T),
        len: usize,
        aligned: bool,
        output: Output,
        sum: T::Real,
        ahead: Option<usize>,
    ) {
        let sum = T::Lanes::<S>::splat(sum);
        // SAFETY of the block: as promised by the caller.
        unsafe {
            T::write_fours::<S>(
                out,
                len,
                aligned,
                #[inline(always)]
                |i, count| {
                    match (ahead, output) {
                        (Some(ahead), Output::Probability) => S::prefetch(out.wrapping_add(i + ahead)),
                        (Some(ahead), Output::LogProbability) => {
                            S::prefetch(ys.wrapping_add(i + ahead));
                            S::prefetch(gs.wrapping_add(i + ahead));
                        }
                        (None, _) => (),
                    }
                    let y = T::read::<S>(ys.add(i), count, T::Real::ZERO);
                    let g = T::read::<S>(gs.add(i), count, T::Real::ZERO);
                    output.gradient(y, g, sum)
                },
            )
        }
    }

    /// Gradients of lines of up to eight vectors, log-softmax's if `LOG`, each held in registers: what is read again waits for stores before
    /// it to addresses with the same lowest twelve bits. 8192 × 128 f32s took a Zen 5 105 µs, read twice 130 to 150. What comes from memory
    /// is asked for `ahead`, and what goes there is [streamed](Streamed) if it is said so. Longer lines, answered by false, are left.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and `ys` and `gs` are valid for reads of `elements` elements, which are lines of `len`,
    /// and `out` for writes.
    #[inline(always)]
    unsafe fn held<S: Simd, const LOG: bool>(
        all: (*const T, *const T, *mut T),
        elements: usize,
        len: usize,
        ahead: Option<usize>,
        stream: bool,
    ) -> bool {
        // SAFETY of the block: as promised by the caller.
        unsafe {
            match len.div_ceil(T::Lanes::<S>::COUNT) {
                1 => Self::held_vectors::<S, LOG, 1>(all, elements, len, ahead, stream),
                2 => Self::held_vectors::<S, LOG, 2>(all, elements, len, ahead, stream),
                3 => Self::held_vectors::<S, LOG, 3>(all, elements, len, ahead, stream),
                4 => Self::held_vectors::<S, LOG, 4>(all, elements, len, ahead, stream),
                5 => Self::held_vectors::<S, LOG, 5>(all, elements, len, ahead, stream),
                6 => Self::held_vectors::<S, LOG, 6>(all, elements, len, ahead, stream),
                7 => Self::held_vectors::<S, LOG, 7>(all, elements, len, ahead, stream),
                8 => Self::held_vectors::<S, LOG, 8>(all, elements, len, ahead, stream),
                _ => return false,
            }
        }
        true
    }

    /// [`held`](Self::held) of lines of `VECTORS` vectors, the last of which need not be whole.
    ///
    /// # Safety
    /// As of it.
    #[inline(always)]
    unsafe fn held_vectors<S: Simd, const LOG: bool, const VECTORS: usize>(
        (ys, gs, out): (*const T, *const T, *mut T),
        elements: usize,
        len: usize,
        ahead: Option<usize>,
        stream: bool,
    ) {
        // SAFETY of the block: as promised by the caller.
        unsafe {
            if stream {
                let mut streamed = Streamed::<T::Lanes<S>>::new(out.cast());
                Self::held_lines::<S, LOG, VECTORS>(
                    (ys, gs),
                    elements,
                    len,
                    ahead,
                    #[inline(always)]
                    |_, _, gradient| streamed.put(gradient),
                );
                streamed.finish();
            } else {
                Self::held_lines::<S, LOG, VECTORS>(
                    (ys, gs),
                    elements,
                    len,
                    ahead,
                    #[inline(always)]
                    |i, count, gradient| T::put::<S>(gradient, out.add(i), count),
                );
            }
        }
    }

    /// What [`held_vectors`](Self::held_vectors) writes, by `write(start, count, gradient)`.
    ///
    /// # Safety
    /// As of it.
    #[inline(always)]
    unsafe fn held_lines<S: Simd, const LOG: bool, const VECTORS: usize>(
        (ys, gs): (*const T, *const T),
        elements: usize,
        len: usize,
        ahead: Option<usize>,
        mut write: impl FnMut(usize, usize, T::Lanes<S>),
    ) {
        let output = if LOG { Output::LogProbability } else { Output::Probability };
        let lanes = T::Lanes::<S>::COUNT;
        let zero = T::Lanes::<S>::splat(T::Real::ZERO);
        let part = |vector: usize| if vector + 1 < VECTORS { lanes } else { len - vector * lanes };
        for start in (0..elements).step_by(len) {
            let (mut y, mut g, mut sums) = ([zero; VECTORS], [zero; VECTORS], [zero; 4]);
            // SAFETY of the block: as promised by the caller.
            unsafe {
                for vector in 0..VECTORS {
                    let at = start + vector * lanes;
                    if let Some(ahead) = ahead {
                        S::prefetch(ys.wrapping_add(at + ahead));
                        S::prefetch(gs.wrapping_add(at + ahead));
                    }
                    y[vector] = T::read::<S>(ys.add(at), part(vector), T::Real::ZERO);
                    g[vector] = T::read::<S>(gs.add(at), part(vector), T::Real::ZERO);
                    sums[vector % 4] = match output {
                        Output::Probability => y[vector].mul_add(g[vector], sums[vector % 4]),
                        Output::LogProbability => sums[vector % 4] + g[vector],
                    };
                }
            }
            let sum = T::Lanes::<S>::splat((sums[0] + sums[1] + (sums[2] + sums[3])).sum_across());
            for vector in 0..VECTORS {
                let gradient = output.gradient(y[vector], g[vector], sum);
                write(start + vector * lanes, part(vector), gradient);
            }
        }
    }

    /// Lines of a block, log-softmax's if `LOG`. `AHEAD`: how many bytes as of [`sum`](Self::sum), or [`NOT_ASKED`]; where `NEXT`,
    /// [`gradients`](Self::gradients) asks a line ahead. In a function of its own, which keeps in registers what its loops need: a load from the
    /// stack waits for stores before it, too.
    ///
    /// # Safety
    /// As of [`held`](Self::held).
    #[inline(never)]
    unsafe fn blocks<S: Simd, Writes: Simd, const LOG: bool, const AHEAD: usize, const NEXT: bool>(
        (ys, gs, out): (*const T, *const T, *mut T),
        elements: usize,
        len: usize,
    ) {
        // SAFETY of the block: as promised by the caller.
        unsafe {
            S::enter(
                #[inline(always)]
                move || {
                    // What is made in here does not come from memory.
                    let output = if LOG { Output::LogProbability } else { Output::Probability };
                    let ahead = (AHEAD > 0).then_some(AHEAD / size_of::<T>());
                    for start in (0..elements).step_by(len) {
                        let at = (ys.add(start), gs.add(start), out.add(start));
                        let sum = Self::sum::<S>(at.0, at.1, len, output, ahead);
                        let aligned = len >= ALIGN_GRADIENTS_FROM;
                        Self::gradients::<Writes>(at, len, aligned, output, sum, NEXT.then_some(len));
                    }
                },
            )
        }
    }

    /// Whole lines. Those of a block need no sum that compensates, whose steps wait for each other; longer ones are written from their
    /// end, since what was read last is in the caches still.
    ///
    /// # Safety
    /// As of [`Pass::whole`].
    #[inline(always)]
    unsafe fn lines<S: Simd>(&self, lines: Range<usize>, len: usize, output: Output) {
        let (start, elements) = (lines.start * len, lines.len() * len);
        let (ys, gs): (*const T, *const T) = (self.0.y.at(start, elements), self.0.g.at(start, elements));
        let out = self.0.out.at(start, elements);
        let all = (ys, gs, out);
        let leaves_caches = leaves_caches(&self.0.out);
        let far = leaves_caches.then_some(ahead_if::<T>(true));
        let stream = streams::<S, T>(None, &self.0.out, len);
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        unsafe {
            let held = const { T::Lanes::<S>::UNROLLED && has_own_loops::<T>() }
                && match output {
                    Output::Probability => Self::held::<S, false>(all, elements, len, far, stream),
                    Output::LogProbability => Self::held::<S, true>(all, elements, len, far, stream),
                };
            if held {
                return;
            }
            // By themselves, apart from what longer ones need: lines of 64 f32s take a quarter less time.
            if len <= BLOCK_VECTORS * T::Lanes::<S>::COUNT {
                let in_third = self.0.out.bytes() >= LEAVES_SECOND && len > BATCH_LINE;
                return match (leaves_caches, in_third, output) {
                    // What is read again in vectors that lie in two lines of the cache waits the longer.
                    (true, _, Output::Probability) => Self::blocks::<S, S::Half, false, FAR, false>(all, elements, len),
                    (true, _, Output::LogProbability) => Self::blocks::<S, S, true, FAR, false>(all, elements, len),
                    (_, true, Output::Probability) => Self::blocks::<S, S, false, NEAR, true>(all, elements, len),
                    (_, true, Output::LogProbability) => {
                        Self::blocks::<S, S, true, NOT_ASKED, true>(all, elements, len)
                    }
                    (_, _, Output::Probability) => Self::blocks::<S, S, false, NOT_ASKED, false>(all, elements, len),
                    (_, _, Output::LogProbability) => Self::blocks::<S, S, true, NOT_ASKED, false>(all, elements, len),
                };
            }
            for start in (0..elements).step_by(len) {
                let at = (ys.add(start), gs.add(start), out.add(start));
                let ahead = Some(ahead_if::<T>(leaves_caches));
                let sum = sum_of_blocks::<T::Lanes<S>>(
                    len,
                    #[inline(always)]
                    |start, len| Self::sum::<S>(at.0.add(start), at.1.add(start), len, output, ahead),
                );
                for start in (0..len).step_by(FROM_THE_END).rev() {
                    let len = FROM_THE_END.min(len - start);
                    let at = (at.0.add(start), at.1.add(start), at.2.add(start));
                    Self::gradients::<S>(at, len, true, output, sum, None);
                }
            }
        }
    }
}

impl<S: Simd, T: Element> Pass<S> for Backward<'_, T> {
    type Reduced = CompensatedSum<T::Real>;
    const WIDTH: usize = 1;

    fn use_first(&self, elements: Range<usize>) {
        self.0.out.use_first(elements)
    }

    #[inline(always)]
    unsafe fn reduce(&self, line: usize, range: Range<usize>) -> Self::Reduced {
        let start = line * self.0.lines.len + range.start;
        let (ys, gs) = (self.0.y.at(start, range.len()), self.0.g.at(start, range.len()));
        let mut sum = CompensatedSum::zero();
        for (start, len) in blocks::<T::Lanes<S>>(0..range.len()) {
            // SAFETY: the elements are there, and the instructions by the caller's promise.
            sum.add(unsafe { Self::sum::<S>(ys.add(start), gs.add(start), len, self.0.output, None) });
        }
        sum
    }

    #[inline(always)]
    unsafe fn write(&self, line: usize, range: Range<usize>, sum: &Self::Reduced) {
        let (start, len) = (line * self.0.lines.len + range.start, range.len());
        let (ys, gs, out) = (self.0.y.at(start, len), self.0.g.at(start, len), self.0.out.at(start, len));
        // SAFETY: the elements are there; the rest by the caller's promise.
        unsafe { Self::gradients::<S>((ys, gs, out), len, true, self.0.output, sum.value(), None) }
    }

    #[inline(always)]
    unsafe fn whole(&self, lines: Range<usize>, len: usize) {
        // SAFETY: as promised by the caller.
        unsafe {
            match self.0.output {
                Output::Probability => self.lines::<S>(lines, len, Output::Probability),
                Output::LogProbability => self.lines::<S>(lines, len, Output::LogProbability),
            }
        }
    }
}
