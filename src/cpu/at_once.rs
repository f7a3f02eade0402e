//! Short lines along the last dimension that are read once, where vectors [saturate](Lanes::SATURATES): a batch of them is summed
//! relative to what the maximum of a line before was, and a sum tells where that was too far from its own. Maxima are found first only
//! while they are too different.

use super::lanes::{each, fold, sum_of_vectors, Lanes, Pack, MAX_LANES};
use super::level::{is_intel, Simd};
use super::memory::{leaves_caches, three_apart, CacheLines, Elements, CACHE_LINE};
use super::rows::{FAR, MOST_OF_SAMPLE, NEAR, NOT_ASKED};
use super::streamed::{streams, Streamed};
use super::{units_per_task, Element};
use crate::state::{Number, Real};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Lines of this length, which attention has often, have a loop of their own: of f32s it takes 0.9 of the time.
pub(super) const SHORT: usize = 64;

/// Batches take so many bytes at most: two of them, or three where logits are made apart, are to stay in the first cache.
pub(super) const BATCH_BYTES: usize = 8192;
/// What two need room for, in numbers of 4 bytes.
const BATCHES: usize = 2 * three_apart::<f32>(BATCH_BYTES / 4);
/// Nothing is read beside the scores of a line, …
pub(super) const NOTHING: u8 = 0;
/// … numbers that many lines share, and are in a near cache, …
pub(super) const NEARBY: u8 = 1;
/// … numbers that come from as far as the scores do, …
pub(super) const FAR_AWAY: u8 = 2;
/// … or which elements are in the line's window, whose vectors outside of it need no exponentials: causal lines of 64 f32s take 240 µs, with
/// all of them 253, and a softmax 205.
pub(super) const WINDOW: u8 = 3;
/// With numbers beside them scores and results are asked for so many bytes ahead instead of [`FAR`], or the first cache loses what has not been used yet: (64, 1000, 128)
/// f32s with a bias of (1000, 128) take 1.8 ms, twice as far ahead 2.1; with a bias of as many 2.8 and 3.0.
const AHEAD_BESIDE: usize = 4096;

/// What a sum is to be at least. Then the maximum of 256 elements is at most e⁹ times less than the reference, as it is at most that much
/// greater: the farther it is, the more x − reference is rounded.
const LEAST_SUM: f64 = 1.0 / 64.0;
/// Lines whose maxima are so close to each other's have sums that are neither too small nor too great.
const CLOSE: f64 = 4.0;
/// A batch of which one in so many lines is not so is one for which it takes less time to find the maxima first.
const ONE_FAR_IN: usize = 4;

/// Lines in their order, a batch at a time.
pub(super) trait Batches<T: Element> {
    /// What one line is made from.
    type Line: Copy;
    /// Where what lines are made from is found: a copy of its own, or it would be read anew after each store of a result.
    type Found<'a>: Copy
    where
        Self: 'a;

    /// Whether that is nothing but its scores, and [`line`](Self::line) needs nothing that is found.
    const OF_SCORES: bool = false;

    /// Finds what the next lines are made from, of `count` that there are: some batches of `most` lines, or the last one, which may have
    /// fewer. Answers how many lines these are.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, whose vectors have no fewer lanes than `most`.
    unsafe fn find<S: Simd>(&mut self, count: usize, most: usize) -> usize;

    /// Line `i` of those that were found and the ones behind it.
    fn from(&self, i: usize) -> Self::Found<'_>;

    /// What the `i`th of these is made from, whose scores these are.
    fn line(found: &Self::Found<'_>, i: usize, scores: *const T) -> Self::Line;

    /// Whether lines have windows no shorter than a vector.
    fn has_windows<S: Simd>(&self) -> bool {
        false
    }

    /// Whether the vector from element `i` on is outside of the line's window.
    ///
    /// # Safety
    /// Lines [have windows](Self::has_windows), and this one has such an element.
    unsafe fn is_outside<S: Simd>(_: &Self::Line, _: usize) -> bool {
        false
    }

    /// Whether it is known without reading them that none of the line's elements takes part.
    fn is_masked(_: &Self::Line) -> bool {
        false
    }

    /// A further logit of each line from line `i` on that has no result, if there are such.
    fn sinks(&self, i: usize) -> Option<&[T::Real; MAX_LANES]>;

    /// Whether results are to be 0 where [`keep`](Self::keep) says so.
    fn drops(&self) -> bool;

    /// For `count` lines, from number `first` of all on, at most [`MAX_LANES`]: a byte for each element, and for a vector more, 0 for what
    /// is to be 0; and how far apart lines have theirs.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and something is [to be dropped](Self::drops).
    unsafe fn keep<S: Simd>(&mut self, first: usize, count: usize) -> (*const u8, usize);
}

/// Logits minus a reference, −∞ in lanes that are not of the line; instead of NaN they may be ∞.
#[derive(Clone, Copy)]
pub(super) struct Above<V> {
    pub logits: V,
    /// A byte for each of the `count` elements, 0 if it does not take part; or all do.
    pub keep: Option<*const u8>,
    pub count: usize,
}

impl<V: Lanes> Above<V> {
    /// All take part.
    #[inline(always)]
    pub fn all(logits: V) -> Self {
        Self { logits, keep: None, count: V::COUNT }
    }

    /// −∞ where elements do not take part.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`, and the bytes are there.
    #[inline(always)]
    pub unsafe fn values(self) -> V {
        match self.keep {
            // SAFETY: as promised by the caller.
            Some(keep) => unsafe { self.logits.where_some_kept(keep, self.count, V::Real::NEG_INFINITY) },
            None => self.logits,
        }
    }

    /// As [`Lanes::scaled_exp`] of the [`values`](Self::values).
    ///
    /// # Safety
    /// As of those.
    #[inline(always)]
    pub unsafe fn scaled_exp(self) -> V {
        match self.keep {
            // SAFETY: as promised by the caller.
            Some(keep) => unsafe { self.logits.scaled_exp_where_kept(keep, self.count) },
            None => self.logits.scaled_exp(),
        }
    }
}

/// Lines that are to become probabilities, or their logarithms.
pub(super) struct Lines<T: Element> {
    /// Where the first one's scores are, and the others' behind them, …
    pub scores: *const T,
    /// … and where the results are to be.
    pub to: *mut T,
    pub count: usize,
    /// How many elements each has.
    pub len: usize,
    /// Whether results, of whole vectors, are [`Streamed`] where they leave the caches.
    pub streams: bool,
    /// What the results of a line add up to, times [`UNSCALE`](Lanes::UNSCALE).
    pub factor: T::Real,
    /// What there is instead of the factor over the sum where nothing of a line is above −∞.
    pub of_nothing: T::Real,
}

impl<T: Element> Lines<T> {
    /// These lines of `len` elements, which are contiguous.
    #[inline(always)]
    pub fn new<S: Simd>(
        scores: &Elements<T>,
        out: &Elements<T>,
        lines: Range<usize>,
        len: usize,
        factor: T::Real,
        of_nothing: T::Real,
    ) -> Self {
        let (start, elements) = (lines.start * len, lines.len() * len);
        Self {
            scores: scores.at(start, elements),
            to: out.at(start, elements),
            count: lines.len(),
            len,
            streams: streams::<S, T>(Some(scores), out, len),
            factor,
            of_nothing,
        }
    }
}

/// Whether a line of a cache begins in the vector from element `i` on, counted from where one does.
#[inline(always)]
pub(super) fn begins_line<S: Simd, T: Element>(i: usize) -> bool {
    let in_line = const { CACHE_LINE / size_of::<T>() };
    T::Lanes::<S>::COUNT >= in_line || i.is_multiple_of(in_line)
}

/// What writes the results of a line, vector by vector: its scaled exponentials, which are at `z`, times `scale`.
///
/// # Safety
/// As of [`line_made`]; the exponentials are there.
#[inline(always)]
pub(super) unsafe fn line_results<'a, S: Simd, T: Element>(
    z: *const T::Real,
    to: *mut T,
    ahead: Option<usize>,
    scale: T::Real,
    keep: Option<*const u8>,
    streamed: Option<&'a mut Streamed<T::Lanes<S>>>,
) -> impl FnMut(usize, usize) + 'a {
    let scale = T::Lanes::<S>::splat(scale);
    let result = {
        #[inline(always)]
        // SAFETY: as promised by the caller.
        move |i, _| unsafe { T::Lanes::<S>::load(z.add(i)) } * scale
    };
    // SAFETY: as promised by the caller.
    unsafe { line_made::<S, T>(result, to, ahead, keep, streamed) }
}

/// What writes the results of a line, `result(start, count)`, vector by vector.
///
/// # Safety
/// The CPU has the instructions of `S`, `to` is valid for writes of the line, `keep`
/// for reads of a byte for each and a vector more, and the function answered is called for vectors in a line.
#[inline(always)]
pub(super) unsafe fn line_made<'a, S: Simd, T: Element>(
    result: impl Fn(usize, usize) -> T::Lanes<S> + 'a,
    to: *mut T,
    ahead: Option<usize>,
    keep: Option<*const u8>,
    mut streamed: Option<&'a mut Streamed<T::Lanes<S>>>,
) -> impl FnMut(usize, usize) + 'a {
    #[inline(always)]
    move |i, count| {
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let mut result = result(i, count);
            if let Some(keep) = keep {
                result = result.where_kept(keep.add(i), T::Real::ZERO);
            }
            if let Some(streamed) = &mut streamed {
                return streamed.put(result);
            }
            // Memory that is written is read first.
            if let Some(ahead) = ahead.filter(|_| begins_line::<S, T>(i)) {
                S::prefetch(to.wrapping_add(i + ahead));
            }
            T::put::<S>(result, to.add(i), count);
        }
    }
}

/// The sum of a line's [scaled](Lanes::scaled_exp) exponentials, `exp(start, count)`, in a vector. They are left at `kept`. `ask(start)` and
/// `meanwhile(start, count)` are called for each vector, before and after its exponentials, which are 0 if it is outside.
///
/// # Safety
/// The CPU has the instructions of `S`, the line is there, and at `kept` is room for it up to a whole vector.
#[inline(always)]
unsafe fn line_sum<S: Simd, T: Element, const VECTORS: usize>(
    len: usize,
    exp: impl Fn(usize, usize) -> T::Lanes<S>,
    kept: *mut T::Real,
    is_outside: impl Fn(usize) -> bool,
    ask: impl Fn(usize),
    mut meanwhile: impl FnMut(usize, usize),
) -> T::Lanes<S> {
    sum_of_vectors::<_, VECTORS>(
        len,
        #[inline(always)]
        |i, count| {
            ask(i);
            if is_outside(i) {
                return T::Lanes::<S>::splat(T::Real::ZERO);
            }
            exp(i, count)
        },
        #[inline(always)]
        |i, count, exp: T::Lanes<S>| {
            // SAFETY: as promised by the caller.
            unsafe { exp.store(kept.add(i)) };
            meanwhile(i, count);
        },
    )
}

/// How many elements a line has room for: whole vectors, so many `VECTORS`, or 0 for any.
#[inline(always)]
pub(super) fn room_of_line<V: Lanes, const VECTORS: usize>(len: usize) -> usize {
    if VECTORS == 0 {
        len.next_multiple_of(V::COUNT)
    } else {
        VECTORS * V::COUNT
    }
}

/// How many lines a batch of so many `bytes` has at most, which have so much `room` each: a power of two, so that tasks are whole batches, and
/// no more than a vector has lanes.
#[inline(always)]
pub(super) fn lines_of_batch<S: Simd, T: Element>(bytes: usize, room: usize) -> usize {
    1 << (bytes / size_of::<T::Real>() / room).min(T::Lanes::<S>::COUNT).ilog2()
}

/// [`Batches::find`] in a function of its own: what it computes with would take the registers of the loop over lines.
///
/// # Safety
/// As of that.
#[inline(never)]
pub(super) unsafe fn find_apart<S: Simd, T: Element>(
    batches: &mut impl Batches<T>,
    count: usize,
    most: usize,
) -> usize {
    // SAFETY: as promised by the caller.
    unsafe {
        S::enter(
            #[inline(always)]
            || batches.find::<S>(count, most),
        )
    }
}

/// How many bytes [`at_once`] asks ahead for lines of `len` results: [`FAR`] if these are not to be in the caches, at once or later, or
/// [`NEAR`] or [`NOT_ASKED`]. In the caches Intel's CPUs ask, for whom lines of 64 f32s,
/// 256 KB, 1 MB and 8 MB, took 15, 65 and 690 µs, and asked for 9, 37 and 530 (one thread of an Emerald Rapids; a copy 6, 32 and 530). So near
/// was not measured on AMD's, where 8 MB take a Zen 5 1.1 to 1.2 copies as it is. Those of half precision take as long either way.
#[inline(always)]
pub(super) fn asks_ahead<S: Simd, T: Element>(input: &Elements<T>, out: &Elements<T>, len: usize) -> usize {
    if leaves_caches(out) || streams::<S, T>(Some(input), out, len) {
        FAR
    } else if has_near::<T>() && is_intel() {
        NEAR
    } else {
        NOT_ASKED
    }
}

/// Whether it may be [`NEAR`] for this type.
pub(super) const fn has_near<T: Element>() -> bool {
    size_of::<T>() == size_of::<T::Real>()
}

/// Writes probabilities. While one batch is summed, the results of the one before are written.
/// `above(line, start, count, reference)` makes a vector of logits, and `ask(line, start)` asks for what it is made from. `LEN`: that of the
/// lines, or 0 for any; `VECTORS`: of how many they are, as of [`sum_of_vectors`]. `AHEAD`: as of [`asks_ahead`]. `BESIDE`: what a line is made
/// from beside its scores.
///
/// # Safety
/// The CPU has the instructions of `S`, whose vectors [saturate](Lanes::SATURATES); the lines are there, their `len` is 1 to 256 and what `LEN` and
/// `VECTORS` say, and `to` is valid for writes of their results.
#[inline(always)]
pub(super) unsafe fn at_once<
    S: Simd,
    T: Element,
    B: Batches<T>,
    const LEN: usize,
    const VECTORS: usize,
    const AHEAD: usize,
    const BESIDE: u8,
>(
    batches: &mut B,
    lines: Lines<T>,
    ask: impl Fn(&B::Line, usize),
    above: impl Fn(&B::Line, usize, usize, T::Lanes<S>) -> Above<T::Lanes<S>>,
) {
    let Lines { scores, to, count, streams, factor, of_nothing, .. } = lines;
    let len = if LEN == 0 { lines.len } else { LEN };
    let [zero, one, lowest, none] = [T::Real::ZERO, T::Real::ONE, T::Real::LOWEST, T::Real::NEG_INFINITY];
    let half = T::Real::nearest(0.5);
    let drops = batches.drops();
    let room = room_of_line::<T::Lanes<S>, VECTORS>(len);
    let most = lines_of_batch::<S, T>(BATCH_BYTES, room);
    let batch_room = three_apart::<T::Real>(most * room);
    let mut kept = CacheLines([const { MaybeUninit::<T::Real>::uninit() }; BATCHES]);
    assert!(2 * batch_room <= BATCHES);
    let kept = kept.0.as_mut_ptr().cast::<T::Real>();
    // Three tensors are asked for in any case.
    let ahead = match (AHEAD, BESIDE) {
        (NOT_ASKED, FAR_AWAY) | (FAR, NEARBY | FAR_AWAY) => AHEAD_BESIDE,
        _ => AHEAD,
    };
    let distance = (ahead > 0).then_some(ahead / size_of::<T>());
    let [least_sum, most_sum] = [LEAST_SUM, MOST_OF_SAMPLE].map(T::Real::nearest);
    // Of the batch that is summed: vectors whose sums these are, and what exponentials are relative to; of the one that is written: what
    // they are multiplied with.
    // Where a batch has fewer lines than a vector has lanes the others' sums are 1, which is not to be looked into.
    let sum_of_one = one / T::Lanes::<S>::UNSCALE / T::Real::nearest(T::Lanes::<S>::COUNT as f64);
    let (mut sums, mut references) = ([T::Lanes::<S>::splat(sum_of_one); MAX_LANES], [zero; MAX_LANES]);
    let mut scales = [zero; MAX_LANES];
    // What all of the next batch is to be relative to, if its lines are expected to be close to each other.
    let mut common = None;
    let in_all = count.div_ceil(most);
    // What a task of these lines begins with, alone or among others: results do not tell by how many threads they were written.
    let batches_of_task = units_per_task(len) / most;
    let mut streamed = (AHEAD == FAR && streams).then(|| Streamed::<T::Lanes<S>>::new(to.cast()));
    // How many lines were found, and the first of these that has not been in a batch yet
    let (mut in_found, mut next_found) = (0, 0);
    for step in 0..in_all + 1 {
        // The first line of the batch that it is the turn of after so many steps, how many there are, and where exponentials are kept.
        let turn = {
            #[inline(always)]
            |after: usize| match step.checked_sub(after) {
                Some(turn) if turn < in_all => {
                    (turn * most, most.min(count - turn * most), kept.wrapping_add(turn % 2 * batch_room))
                }
                _ => (0, 0, kept),
            }
        };
        let ((first, to_sum, kept), (written, to_write, kept_before)) = (turn(0), turn(1));
        if step % batches_of_task == 0 {
            common = None;
        }
        // SAFETY of the block: the elements are there, and there is room for the lines in work; the rest by the caller's promise.
        unsafe {
            if to_sum > 0 && next_found == in_found {
                (in_found, next_found) = (find_apart::<S, T>(batches, count - first, most), 0);
            }
            let of_found = next_found;
            next_found += to_sum;
            let (scores, to) = (scores.add(first * len), to.add(written * len));
            let (keep, keep_room) = if drops { batches.keep::<S>(written, to_write) } else { (std::ptr::null(), 0) };
            let batches = &*batches;
            let windows = BESIDE == WINDOW && batches.has_windows::<S>();
            let found_lines = batches.from(of_found);
            let line_of = {
                #[inline(always)]
                |i: usize| B::line(&found_lines, i, scores.add(i * len))
            };
            // The maximum of line `i` and its sink
            let max_of = {
                #[inline(always)]
                |i: usize| {
                    let line = line_of(i);
                    let greater = {
                        #[inline(always)]
                        |max, i, count| above(&line, i, count, T::Lanes::<S>::splat(zero)).values().or_greater(max)
                    };
                    let nothing = T::Lanes::<S>::splat(none);
                    let max = match VECTORS {
                        _ if B::is_masked(&line) => nothing,
                        1 => greater(nothing, 0, len),
                        _ => fold(len, nothing, greater, T::Lanes::<S>::or_greater),
                    };
                    batches.sinks(of_found).map_or(none, |sinks| sinks[i]).or_greater(max.max_across())
                }
            };
            // Finite where nothing is above −∞, so that exp(−∞ − reference) is 0 and a NaN survives.
            match common {
                Some(reference) => references = [reference; MAX_LANES],
                None => {
                    for (i, reference) in references[..to_sum].iter_mut().enumerate() {
                        *reference = max_of(i).or_greater(lowest);
                    }
                }
            }
            let mut sum_while = {
                #[inline(always)]
                |i: usize, keep| {
                    let (line, reference) = (line_of(i), T::Lanes::<S>::splat(references[i]));
                    line_sum::<S, T, VECTORS>(
                        len,
                        #[inline(always)]
                        |i, count| above(&line, i, count, reference).scaled_exp(),
                        kept.add(i * room),
                        #[inline(always)]
                        |i| windows && B::is_outside::<S>(&line, i),
                        #[inline(always)]
                        |i| {
                            if let Some(distance) = distance {
                                ask(&line, i + distance);
                            }
                        },
                        line_results::<S, T>(
                            kept_before.add(i * room),
                            to.add(i * len),
                            distance,
                            scales[i],
                            keep,
                            streamed.as_mut(),
                        ),
                    )
                }
            };
            if to_sum == most && to_write == most {
                // A loop of its own for each, no closure, which might become a function that has not the instructions of `S`
                if drops {
                    for (i, sum) in sums[..most].iter_mut().enumerate() {
                        *sum = sum_while(i, Some(keep.add(i * keep_room)));
                    }
                } else {
                    for (i, sum) in sums[..most].iter_mut().enumerate() {
                        *sum = sum_while(i, None);
                    }
                }
            } else {
                for i in 0..to_sum {
                    let (line, reference) = (line_of(i), T::Lanes::<S>::splat(references[i]));
                    sums[i] = line_sum::<S, T, VECTORS>(
                        len,
                        #[inline(always)]
                        |i, count| above(&line, i, count, reference).scaled_exp(),
                        kept.add(i * room),
                        #[inline(always)]
                        |i| windows && B::is_outside::<S>(&line, i),
                        #[inline(always)]
                        |i| {
                            if let Some(distance) = distance {
                                ask(&line, i + distance);
                            }
                        },
                        #[inline(always)]
                        |_, _| (),
                    );
                }
                for (i, &scale) in scales[..to_write].iter().enumerate() {
                    let keep = drops.then(|| keep.add(i * keep_room));
                    let results = line_results::<S, T>(
                        kept_before.add(i * room),
                        to.add(i * len),
                        distance,
                        scale,
                        keep,
                        streamed.as_mut(),
                    );
                    each::<T::Lanes<S>>(0..len, results);
                }
            }
            let mut sum = T::Lanes::<S>::sum_of_each(&sums[..T::Lanes::<S>::COUNT]).unscaled();
            if let Some(sinks) = batches.sinks(of_found) {
                sum = sum + (T::Lanes::<S>::load(sinks.as_ptr()) - T::Lanes::<S>::load(references.as_ptr())).exp();
            }
            (T::Lanes::<S>::splat(factor) / sum).store(scales.as_mut_ptr());
            let mut far = 0;
            let [least, most] = [least_sum, most_sum].map(T::Lanes::<S>::splat);
            if sum.at_most(most).or_greater(least).differs(sum) {
                let mut found = [one; MAX_LANES];
                sum.store(found.as_mut_ptr());
                for i in 0..to_sum {
                    if found[i] >= least_sum && found[i] <= most_sum {
                        continue;
                    }
                    // Where there is nothing the sum is 0, relative to whatever it is.
                    let mut is_known = references[i] == lowest;
                    if common.is_some() {
                        let max = max_of(i);
                        references[i] = max.or_greater(lowest);
                        far += usize::from(max > lowest);
                        is_known = max == none && found[i] == zero;
                    }
                    // From logits that are rounded, as their maximum is: those that are not may be too far from it if it is great.
                    if !is_known {
                        let (line, reference) = (line_of(i), T::Lanes::<S>::splat(references[i]));
                        let sum = line_sum::<S, T, VECTORS>(
                            len,
                            #[inline(always)]
                            |i, count| {
                                let logits = above(&line, i, count, T::Lanes::<S>::splat(zero));
                                (logits.values() - reference).scaled_exp()
                            },
                            kept.add(i * room),
                            #[inline(always)]
                            |i| windows && B::is_outside::<S>(&line, i),
                            #[inline(always)]
                            |_| (),
                            #[inline(always)]
                            |_, _| (),
                        );
                        let sink = batches.sinks(of_found).map(|sinks| (sinks[i] - references[i]).exp());
                        found[i] = sum.sum_across() * T::Lanes::<S>::UNSCALE + sink.unwrap_or(zero);
                    }
                    // The maximum alone adds 1, unless there is nothing. ∞ was added in place of NaN.
                    scales[i] = match found[i] {
                        sum if sum < half => of_nothing,
                        sum if sum < zero - T::Real::NEG_INFINITY => factor / sum,
                        _ => T::Real::nearest(f64::NAN),
                    };
                }
            }
            if common.is_none() {
                // Lines of nothing are close to any.
                let maxima = references[..to_sum].iter().copied().filter(|&max| max > lowest);
                common = maxima.clone().next();
                let close = T::Real::nearest(CLOSE);
                let is_far = |&max: &T::Real| common.is_some_and(|common| max - common > close || common - max > close);
                far = maxima.filter(is_far).count();
            }
            if ONE_FAR_IN * far > to_sum {
                common = None;
            }
        }
    }
    if let Some(streamed) = streamed {
        // SAFETY: all lines were written; the rest by the caller's promise.
        unsafe { streamed.finish() }
    }
}
