//! Lines along the last dimension whose logits are made of neighbours in memory: of a block at most or, where vectors saturate, that are
//! kept, where their results are to be if not in the first cache.

use super::logits::{first_lanes, keep_along, same_bytes, Call, Steps};
use super::rows::Rows;
use crate::cpu::at_once::{
    self, asks_ahead, has_near, line_results, Above, Batches, FAR_AWAY, NEARBY, NOTHING, SHORT, WINDOW,
};
use crate::cpu::element::Keep;
use crate::cpu::in_batches::{in_batches, line_sum, BATCH_LINE};
use crate::cpu::lanes::{each, fold, sum_of_long_terms, Lanes, Pack, MAX_LANES};
use crate::cpu::level::Simd;
use crate::cpu::memory::{four_apart, leaves_caches, CacheLines, Elements, KeptLines, Scratch};
use crate::cpu::random;
use crate::cpu::rows::{
    ahead, block, blocks, has_own_loops, most_kept, most_of, rescale, sum_of_blocks, AHEAD_BLOCKS, BLOCK_VECTORS, FAR,
    LEAST_SAMPLE, MAX_BLOCK, MAX_KEPT, MOST_OF_SAMPLE, NEAR, NOT_ASKED, SAMPLE_VECTORS,
};
use crate::cpu::statistics::one;
use crate::cpu::streamed::{streams, Streamed};
use crate::cpu::Element;
use crate::fused::{Axis, Place, Places, Window};
use crate::state::{Number, Real, SoftmaxState};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Whether lines of this length are taken in batches.
pub(super) fn is_batched<T: Element>(len: usize) -> bool {
    has_own_loops::<T>() && len <= BATCH_LINE
}
/// Masks of up to so many elements, …
const MOST_LIMITS: usize = 1 << 17;
/// … each of which is there for so many scores at least, are written down as limits of the logits.
const LIMITS_FROM: usize = 4;
/// Lines in work one by one: of one the logits are made, one is summed and one written; a power of two.
const IN_TURNS: usize = 4;

/// What the logits of a line along the last dimension are made from.
#[derive(Clone, Copy)]
pub(super) struct Source<T: Element> {
    pub(super) scores: *const T,
    /// Null unless there is one for each element.
    bias: *const T,
    /// A byte for each element, 0 if it does not take part; see also [`Windows`]. Null without.
    mask: *const u8,
    /// What logits are at most, see [`Windows`] and [`limits`], or the [bias](Widened). Null without.
    number: *const T::Real,
    /// The bias where there is one for all.
    shift: T::Real,
}

/// The windows of lines: parts of the same items, of which there are as many that tell `inside` as a window has keys, between such that tell
/// `outside`.
struct Sliding<X> {
    items: Vec<X>,
    len: isize,
    /// How many are inside.
    keys: isize,
    /// The first key of query 0's window and the one after its last, whether or not there are such keys.
    first: isize,
    end: isize,
}

impl<X: Copy> Sliding<X> {
    /// For lines of `len` elements.
    fn new(window: Window, len: usize, inside: X, outside: X) -> Self {
        // No key is farther from a query, and sizes of tensors are no isize too large.
        let [before, after] = [window.before, window.after].map(|n| n.min(len + window.queries));
        let keys = (before + after + 1).min(len);
        let mut items = vec![outside; 2 * len + keys + MAX_LANES];
        items[len..len + keys].fill(inside);
        let [len, keys, queries, before, after] = [len, keys, window.queries, before, after].map(|n| n as isize);
        let position = len - queries;
        Self { items, len, keys, first: position - before, end: position + after + 1 }
    }

    /// Which item is the first of this query's line, or of any line if there is none.
    #[inline(always)]
    fn at(&self, query: usize) -> isize {
        let query = query as isize;
        // The first key of those inside. They may be fewer than the window has: then they end where it does, or the line.
        let first = (query + self.first).max((query + self.end).min(self.len) - self.keys);
        self.len - first.clamp(-self.keys, self.len)
    }

    /// The items of this query's line.
    #[inline(always)]
    fn of(&self, query: usize) -> *const X {
        // Wherever it is, as many are there.
        self.items.as_ptr().wrapping_offset(self.at(query))
    }

    /// Of `count` lines from that of `query` on, `step` queries apart: how far apart the neighbours' are, if evenly.
    #[inline(always)]
    fn step(&self, query: usize, count: usize, step: usize) -> Option<isize> {
        // The further a query the further its window or, where that is all keys or none, as far: all are if the last one is.
        let steps = ((count - 1) * step) as isize;
        match self.at(query) - self.at(query + (count - 1) * step) {
            0 => Some(0),
            moved => (moved == steps).then_some(-(step as isize)),
        }
    }
}

/// What tells a line which elements are in its window.
enum Windows<R> {
    /// What logits are at most, one instruction a vector: ∞ or −∞. A NaN in the window becomes ∞, of which the sum is NaN all the same.
    Limits(Sliding<R>),
    /// In place of a mask.
    Masks(Sliding<u8>),
}

impl<R: Real> Windows<R> {
    fn new<S: Simd, T: Element<Real = R>>(call: &Call<T>, len: usize) -> Option<Self> {
        let (window, none) = (call.options.window?, R::NEG_INFINITY);
        Some(match Self::are_masks::<S, T>(call) {
            true => Self::Masks(Sliding::new(window, len, 1, 0)),
            false => Self::Limits(Sliding::new(window, len, R::ZERO - none, none)),
        })
    }

    /// Whether the windows of lines of a block at most are masks: 1024 causal lines of 64 f32s take 6.2 µs then, and with limits 6.7.
    fn are_masks<S: Simd, T: Element<Real = R>>(call: &Call<T>) -> bool {
        T::Lanes::<S>::MASKS_BYTES && call.mask.is_none()
    }

    /// Tells the line of this query.
    #[inline(always)]
    fn tell<T: Element<Real = R>>(&self, query: usize, line: &mut Source<T>) {
        match self {
            Self::Limits(limits) => line.number = limits.of(query),
            Self::Masks(masks) => line.mask = masks.of(query),
        }
    }
}

/// A mask as [`Windows`] has limits, from the call's first element on, if short lines share it so often that this takes less time:
/// with AVX2 1.13 to 1.25 of a softmax, lines of 64 f32s, where bytes take 1.2 to 1.37; with AVX-512 1.15 and 1.03.
pub(super) fn limits<S: Simd, T: Element>(call: &Call<T>) -> Option<Vec<T::Real>> {
    let (mask, geometry, none) = (call.mask?, call.geometry, T::Real::NEG_INFINITY);
    let len = geometry.lines.len;
    let extent = geometry.axes.iter().map(|axis| (axis.size - 1) * axis.mask).sum::<usize>() + len;
    let shared = extent <= (geometry.lines.elem_count() / LIMITS_FROM).min(MOST_LIMITS);
    let short = is_batched::<T>(len) && geometry.mask_step == 1 && call.is_of_neighbours();
    if !(short && shared && call.options.window.is_none()) || T::Lanes::<S>::MASKS_BYTES {
        return None;
    }
    // A vector more, since the last ones of a line are read whole.
    let mut limits = vec![none; extent + MAX_LANES];
    let (from, to) = (mask.at(0, extent), limits.as_mut_ptr());
    // SAFETY: `S` is what the CPU has; the bytes are there, and there is room for whole vectors.
    unsafe {
        S::enter(
            #[inline(always)]
            || {
                let all = T::Lanes::<S>::splat(T::Real::ZERO - none);
                each::<T::Lanes<S>>(
                    0..extent,
                    #[inline(always)]
                    |i, count| all.where_some_kept(from.add(i), count, none).store(to.add(i)),
                )
            },
        )
    }
    Some(limits)
}

/// Biases of halves that fit into the first cache as numbers of the type computed in are [`Widened`].
const MOST_WIDENED: usize = 4096;

/// The bias of the lines along the last axis, as numbers of the type computed in: those along the axis before have the same, and need not make
/// them anew. Lines of 64 f16s whose bias heads share take 1.19 of a softmax then instead of 1.24, of bf16s 1.13 instead of 1.21; lines of 49,
/// not whole vectors, 0.02 to 0.05 more.
struct Widened<R> {
    /// Where the two biases are of which there are numbers: a batch may be of the last lines of one and the first of the next.
    places: [usize; 2],
    numbers: [Vec<R>; 2],
    last: usize,
}

impl<R: Real> Widened<R> {
    /// Whether there is any that is to be so.
    const fn serves_any<S: Simd, T: Element<Real = R>>() -> bool {
        size_of::<T>() < size_of::<R>() && T::Lanes::<S>::SATURATES
    }

    /// Whether this one is.
    fn serves<S: Simd, T: Element<Real = R>>(call: &Call<T>, len: usize) -> bool {
        let Call { options, geometry, .. } = call;
        let [.., shared, last] = geometry.axes.as_slice() else { return false };
        let half = Self::serves_any::<S, T>() && is_batched::<T>(len);
        let alone = call.mask.is_none() && options.window.is_none() && call.cap.is_none();
        let fits =
            last.size >= MAX_LANES && last.size * len <= MOST_WIDENED && len.is_multiple_of(T::Lanes::<S>::COUNT);
        half && alone && fits && geometry.bias_step == 1 && shared.bias == 0
    }

    fn new<S: Simd, T: Element<Real = R>>(call: &Call<T>, len: usize) -> Option<Self> {
        let last = call.geometry.axes.last().filter(|_| Self::serves::<S, T>(call, len))?;
        let numbers = [(); 2].map(|_| vec![R::ZERO; last.size * len + MAX_LANES]);
        Some(Self { places: [usize::MAX; 2], numbers, last: 0 })
    }

    /// The numbers of line `i` along the axis, and the others' behind them, whose bias begins at this place.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn of<S: Simd, T: Element<Real = R>>(
        &mut self,
        bias: &Elements<T>,
        (place, i): (usize, usize),
        axis: &Axis,
        len: usize,
    ) -> *const R {
        let first = place - i * axis.bias;
        if self.places[self.last] != first {
            self.last = 1 - self.last;
        }
        let numbers = &mut self.numbers[self.last];
        if self.places[self.last] != first {
            self.places[self.last] = first;
            for line in 0..axis.size {
                let (from, to) = (bias.at(first + line * axis.bias, len), numbers[line * len..].as_mut_ptr());
                each::<T::Lanes<S>>(
                    0..len,
                    #[inline(always)]
                    // SAFETY: the elements are there, and behind a line is room for a vector; the rest by the caller's promise.
                    |i, count| unsafe { T::read::<S>(from.add(i), count, R::ZERO).store(to.add(i)) },
                );
            }
        }
        numbers[i * len..].as_ptr()
    }
}

/// So many batches are found at once where their lines are evenly apart.
const FOUND_BATCHES: usize = 4;
/// Lines are found as many as a vector has lanes at a time, from wherever that begins on: loops whose length is known take less time.
const FOUND: usize = (FOUND_BATCHES + 1) * MAX_LANES;

/// What lines are made from whose places are evenly apart, and how far.
#[derive(Clone, Copy)]
pub(super) struct Even<T: Element> {
    first: Source<T>,
    bias: usize,
    mask: isize,
    number: isize,
}

impl<T: Element> Even<T> {
    #[inline(always)]
    fn line(&self, i: usize, scores: *const T) -> Source<T> {
        Source {
            scores,
            bias: self.first.bias.wrapping_add(i * self.bias),
            mask: self.first.mask.wrapping_offset(i as isize * self.mask),
            number: self.first.number.wrapping_offset(i as isize * self.number),
            shift: self.first.shift,
        }
    }
}

/// What the lines from one of those on that were found are made from.
#[derive(Clone, Copy)]
pub(super) enum Found<'a, T: Element> {
    Even(Even<T>),
    Each { bias: &'a [*const T], mask: &'a [*const u8], number: &'a [*const T::Real], shift: &'a [T::Real] },
}

/// What several lines are made from beside the scores, one after the other.
pub(super) struct Sources<'a, T: Element> {
    call: &'a Call<'a, T>,
    /// The number of the first line.
    first: usize,
    len: usize,
    places: Places<'a>,
    /// Of all that are found, if they are evenly apart; nothing is said of each then.
    even: Option<Even<T>>,
    bias: [*const T; FOUND],
    mask: [*const u8; FOUND],
    shift: [T::Real; FOUND],
    windows: Option<Windows<T::Real>>,
    /// The [mask's](limits)
    limits: Option<&'a [T::Real]>,
    widened: Option<Widened<T::Real>>,
    number: [*const T::Real; FOUND],
    /// −∞ where there is none.
    sinks: [T::Real; FOUND],
    /// Which elements dropout keeps.
    kept: [u8; MAX_LANES * random::room(BATCH_LINE)],
}

impl<'a, T: Element> Sources<'a, T> {
    /// For these lines.
    pub(super) fn new<S: Simd>(
        call: &'a Call<'a, T>,
        limits: Option<&'a [T::Real]>,
        lines: &Range<usize>,
        len: usize,
    ) -> Self {
        Self {
            call,
            first: lines.start,
            len,
            places: call.geometry.places(lines.start),
            even: None,
            bias: [std::ptr::null(); FOUND],
            mask: [std::ptr::null(); FOUND],
            shift: [T::Real::ZERO; FOUND],
            windows: Windows::new::<S, T>(call, len),
            limits,
            widened: None,
            number: [std::ptr::null(); FOUND],
            sinks: [T::Real::NEG_INFINITY; FOUND],
            kept: [0; MAX_LANES * random::room(BATCH_LINE)],
        }
    }

    /// What each of the next `count` lines is made from, at most [`MAX_LANES`].
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn find_each<S: Simd>(&mut self, count: usize) {
        let mut at = 0;
        while at < count {
            let (along, run) = (self.places.along(), self.places.run(count - at));
            // SAFETY: as promised by the caller.
            unsafe { self.find_run::<S>(at, along, run, false) };
            at += run.1;
        }
    }

    /// What lines are made from, the first of which is line `at` of those that are found, so many steps `along` the last axis; `alone`: there are
    /// no others.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn find_run<S: Simd>(
        &mut self,
        at: usize,
        along: usize,
        (place, count, axis): (Place, usize, Axis),
        alone: bool,
    ) {
        let (call, len, last) = (self.call, self.len, count - 1);
        // SAFETY of the blocks: one element is there; the rest by the caller's promise.
        let shift = {
            #[inline(always)]
            |bias: &Elements<T>, i: usize| unsafe { one::<S, T>(bias.at(place.bias + i * axis.bias, 1)) }
        };
        let mut first = Source {
            scores: std::ptr::null(),
            bias: std::ptr::null(),
            mask: std::ptr::null(),
            number: std::ptr::null(),
            shift: T::Real::ZERO,
        };
        let (mut mask_step, mut number_step, mut is_even) = (axis.mask as isize, axis.mask as isize, alone);
        match &call.bias {
            Some(bias) if call.geometry.bias_step != 0 => first.bias = bias.at(place.bias, last * axis.bias + len),
            Some(bias) => {
                first.shift = shift(bias, 0);
                is_even &= axis.bias == 0;
            }
            None => (),
        }
        if let (Some(widened), Some(bias)) = (&mut self.widened, &call.bias) {
            first.number = unsafe { widened.of::<S, T>(bias, (place.bias, along), &axis, len) };
            number_step = len as isize;
        }
        if let Some(limits) = self.limits {
            first.number = limits[place.mask..][..last * axis.mask + len].as_ptr();
        } else if let Some(mask) = call.mask {
            first.mask = call.line_mask(mask, place.mask, last * axis.mask);
            is_even &= axis.mask == 0 || call.geometry.mask_step == 1;
        }
        if let Some(windows) = &self.windows {
            windows.tell(place.query, &mut first);
            let (of, step) = match windows {
                Windows::Limits(limits) => (&mut number_step, limits.step(place.query, count, axis.query)),
                Windows::Masks(masks) => (&mut mask_step, masks.step(place.query, count, axis.query)),
            };
            *of = step.unwrap_or(0);
            is_even &= step.is_some();
        }
        if let Some(sinks) = &call.sinks {
            found_numbers(&mut self.sinks, at, count, axis.sink, |i| unsafe {
                one::<S, T>(sinks.at(place.sink + i * axis.sink, 1))
            });
        }
        self.even = is_even.then_some(Even { first, bias: axis.bias, mask: mask_step, number: number_step });
        if is_even {
            return;
        }
        match &call.bias {
            Some(_) if call.geometry.bias_step != 0 => {
                found(&mut self.bias, at, count, |i| first.bias.wrapping_add(i * axis.bias))
            }
            Some(bias) => found_numbers(&mut self.shift, at, count, axis.bias, |i| shift(bias, i)),
            None => (),
        }
        if self.limits.is_some() || self.widened.is_some() {
            found(&mut self.number, at, count, |i| first.number.wrapping_offset(i as isize * number_step));
        } else if let Some(mask) = call.mask {
            match call.geometry.mask_step {
                1 => found(&mut self.mask, at, count, |i| first.mask.wrapping_add(i * axis.mask)),
                _ => found_numbers(&mut self.mask, at, count, axis.mask, |i| {
                    call.line_mask(mask, place.mask + i * axis.mask, 0)
                }),
            }
        }
        match &self.windows {
            Some(Windows::Limits(of)) => found(&mut self.number, at, count, |i| of.of(place.query + i * axis.query)),
            Some(Windows::Masks(of)) => found(&mut self.mask, at, count, |i| of.of(place.query + i * axis.query)),
            None => (),
        }
    }

    #[inline(always)]
    fn each_from(&self, i: usize) -> Found<'_, T> {
        let Self { bias, mask, number, shift, .. } = self;
        Found::Each { bias: &bias[i..], mask: &mask[i..], number: &number[i..], shift: &shift[i..] }
    }
}

/// Those of `count` lines from `at` on; what is more than there are lines is not used.
#[inline(always)]
fn found<X>(to: &mut [X; FOUND], at: usize, count: usize, of: impl Fn(usize) -> X) {
    for start in (0..count).step_by(MAX_LANES) {
        for (i, x) in to[at + start..][..MAX_LANES].iter_mut().enumerate() {
            *x = of(start + i);
        }
    }
}

/// The same for `count` numbers, `step` apart, which are read one by one unless they are one.
#[inline(always)]
fn found_numbers<X: Copy>(to: &mut [X; FOUND], at: usize, count: usize, step: usize, of: impl Fn(usize) -> X) {
    if step == 0 {
        let number = of(0);
        return found(to, at, count, |_| number);
    }
    for (i, x) in to[at..][..count].iter_mut().enumerate() {
        *x = of(i);
    }
}

impl<T: Element> Batches<T> for Sources<'_, T> {
    type Line = Source<T>;
    type Found<'a>
        = Found<'a, T>
    where
        Self: 'a;

    #[inline(always)]
    unsafe fn find<S: Simd>(&mut self, count: usize, most: usize) -> usize {
        let even = self.places.evenly().min(count).min(FOUND_BATCHES * most);
        let found = match even < most {
            true => most.min(count),
            false if even == count => even,
            false => even - even % most,
        };
        // SAFETY: as promised by the caller.
        unsafe {
            if found <= even {
                let (along, run) = (self.places.along(), self.places.run(found));
                self.find_run::<S>(0, along, run, true);
            } else {
                self.find_each::<S>(found);
            }
        }
        found
    }

    #[inline(always)]
    fn from(&self, i: usize) -> Found<'_, T> {
        match self.even {
            Some(even) => Found::Even(Even { first: even.line(i, std::ptr::null()), ..even }),
            None => self.each_from(i),
        }
    }

    #[inline(always)]
    fn line(found: &Found<'_, T>, i: usize, scores: *const T) -> Source<T> {
        match found {
            Found::Even(even) => even.line(i, scores),
            Found::Each { bias, mask, number, shift } => {
                Source { scores, bias: bias[i], mask: mask[i], number: number[i], shift: shift[i] }
            }
        }
    }

    #[inline(always)]
    fn has_windows<S: Simd>(&self) -> bool {
        matches!(&self.windows, Some(Windows::Masks(masks)) if masks.keys as usize >= T::Lanes::<S>::COUNT)
    }

    #[inline(always)]
    unsafe fn is_outside<S: Simd>(line: &Source<T>, i: usize) -> bool {
        // SAFETY: there are bytes for whole vectors.
        unsafe { *line.mask.add(i) == 0 && *line.mask.add(i + T::Lanes::<S>::COUNT - 1) == 0 }
    }

    #[inline(always)]
    fn is_masked(line: &Source<T>) -> bool {
        // The mask of a line whose one byte is 0
        std::ptr::eq(line.mask, same_bytes(0).as_ptr())
    }

    #[inline(always)]
    fn sinks(&self, i: usize) -> Option<&[T::Real; MAX_LANES]> {
        self.call.sinks.and(self.sinks[i..].first_chunk())
    }

    #[inline(always)]
    fn drops(&self) -> bool {
        self.call.options.dropout.is_some()
    }

    #[inline(always)]
    unsafe fn keep<S: Simd>(&mut self, first: usize, count: usize) -> (*const u8, usize) {
        if let Some(dropout) = self.call.options.dropout {
            // SAFETY: as promised by the caller.
            unsafe { random::along_each::<S>(dropout, self.first + first, count, self.len, &mut self.kept) };
        }
        (self.kept.as_ptr(), random::room(self.len))
    }
}

/// Logits, and −∞ in place of those that are not within their line's limits.
///
/// # Safety
/// The CPU has the instructions of `V`, and the line has such limits.
#[inline(always)]
unsafe fn within<V: Lanes, T: Element<Real = V::Real>>(of: &Source<T>, i: usize, logits: V) -> V {
    // SAFETY: as promised by the caller.
    unsafe { V::load(of.number.add(i)) }.at_most(logits)
}

/// How logits are made of their [`Source`], whatever is asked for.
#[derive(Clone, Copy)]
pub(super) struct AnyLogits<V> {
    scale: V,
    /// scale / cap, and cap
    pub(super) cap: Option<[V; 2]>,
    /// Whether there is a bias for each element, …
    bias: bool,
    /// … a window that is told to each line, …
    windowed: bool,
    /// … a byte and a limit for each element.
    pub(super) mask: bool,
    pub(super) limited: bool,
}

impl<V: Lanes> AnyLogits<V> {
    /// `limits`: whether the mask is written down [as such](limits).
    pub(super) fn new<S: Simd, T: Element<Real = V::Real>>(call: &Call<T>, limits: bool, len: usize) -> Self {
        // Long lines are taken in parts that are in their windows.
        let windowed = call.options.window.is_some() && len <= most_kept::<S, T>();
        let window_masks = windowed && Windows::are_masks::<S, T>(call);
        Self {
            scale: V::splat(call.scale),
            cap: call.cap.map(|(inverse, cap)| [V::splat(inverse), V::splat(cap)]),
            bias: call.bias.is_some() && call.geometry.bias_step != 0,
            windowed,
            mask: call.mask.is_some() && !limits || window_masks,
            limited: windowed && !window_masks || limits,
        }
    }

    /// A vector of them.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and `count` elements of the line are there from `i` on.
    #[inline(always)]
    pub(super) unsafe fn of<S: Simd, T: Element<Real = V::Real, Lanes<S> = V>>(
        self,
        of: &Source<T>,
        i: usize,
        count: usize,
    ) -> V {
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let x = T::read::<S>(of.scores.add(i), count, V::Real::ZERO);
            let bias = if self.bias { T::read::<S>(of.bias.add(i), count, V::Real::ZERO) } else { V::splat(of.shift) };
            let mut logits = match self.cap {
                Some([inverse, cap]) => (x * inverse).tanh().mul_add(cap, bias),
                None => x.mul_add(self.scale, bias),
            };
            if self.mask {
                logits = logits.where_some_kept(of.mask.add(i), count, V::Real::NEG_INFINITY);
            }
            if self.limited {
                logits = within(of, i, logits);
            }
            logits
        }
    }
}

/// Σ exp(logit − reference) of a line, whose [scaled](Lanes::scaled_exp) exponentials, `exp(start, count)`, are left at `z`. `ask(start)` and `meanwhile(start, count)` are called for each vector, before and after its exponentials.
///
/// # Safety
/// The CPU has the instructions of `S`, the line is there, and at `z` is room for it up to a whole vector.
#[inline(always)]
unsafe fn logits_sum<S: Simd, T: Element>(
    exp: impl Fn(usize, usize) -> T::Lanes<S>,
    len: usize,
    z: *mut T::Real,
    ask: impl Fn(usize),
    mut meanwhile: impl FnMut(usize, usize),
) -> T::Real {
    sum_of_blocks::<T::Lanes<S>>(
        len,
        #[inline(always)]
        |start, len| {
            let sum = sum_of_long_terms(
                len,
                #[inline(always)]
                |i, count| {
                    ask(start + i);
                    exp(start + i, count)
                },
                #[inline(always)]
                |i, count, exp: T::Lanes<S>| {
                    meanwhile(start + i, count);
                    // SAFETY: as promised by the caller.
                    unsafe { exp.store(z.add(start + i)) };
                },
            );
            sum.sum_across() * T::Lanes::<S>::UNSCALE
        },
    )
}

/// Lines in work, by their number from the first of them.
struct InTurns<R> {
    /// The logits, then the scaled exponentials of the last lines, `room` apart.
    held: *mut R,
    room: usize,
    len: usize,
}

impl<R: Real> InTurns<R> {
    #[inline(always)]
    fn held(&self, line: usize) -> *mut R {
        self.held.wrapping_add(line % IN_TURNS * self.room)
    }

    /// [`line_sum`] relative to the maximum of a line.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and the logits of the line are there.
    #[inline(always)]
    unsafe fn sum<S: Simd, T: Element<Real = R>>(
        &self,
        line: usize,
        max: R,
        meanwhile: impl FnMut(usize, usize),
    ) -> T::Lanes<S> {
        // Finite where nothing is above −∞, so that exp(−∞ − reference) is 0 and a NaN survives.
        let reference = max.or_greater(R::LOWEST);
        let z = self.held(line);
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let logit = {
                #[inline(always)]
                |i, _| T::Lanes::<S>::load(z.add(i))
            };
            line_sum::<T::Lanes<S>, 0>(logit, self.len, reference, Some(z), meanwhile).unscaled()
        }
    }
}

impl<T: Element> Rows<'_, T> {
    /// Short lines whose logits are made of neighbours in memory, to results of the scores' dtype.
    ///
    /// # Safety
    /// As of [`Pass::whole`], with 0 < `len` ≤ a block or, with vectors that [saturate](Lanes::SATURATES), [`most_kept`], or
    /// [`MAX_KEPT_LONG`](crate::cpu::rows::MAX_KEPT_LONG) but for f64, and `out` is where the results are to be.
    #[inline(always)]
    pub(super) unsafe fn short<S: Simd>(&self, lines: Range<usize>, len: usize, out: Elements<T>) {
        // −0: where nothing is subtracted, nothing is added either.
        let [scale, zero] = [self.call.scale, T::Real::nearest(-0.0)].map(T::Lanes::<S>::splat);
        let any = AnyLogits::new::<S, T>(&self.call, self.limits.is_some(), len);
        let AnyLogits { cap, bias, windowed, mask, limited, .. } = any;
        // SAFETY of the block: the elements are there, and the rest by the caller's promise.
        // One loop for each combination, in a function of its own: what it captures is moved there, or it would be fetched again
        // for each vector.
        unsafe {
            let read = {
                #[inline(always)]
                move |of: &Source<T>, i: usize, count| T::read::<S>(of.scores.add(i), count, T::Real::ZERO)
            };
            let read_bias = {
                #[inline(always)]
                move |of: &Source<T>, i: usize, count| T::read::<S>(of.bias.add(i), count, T::Real::ZERO)
            };
            // Most biases have rows as the scores have them.
            let bias_ahead = {
                #[inline(always)]
                move |of: &Source<T>, i: usize| S::prefetch(of.bias.wrapping_add(i))
            };
            let bias_streams = bias && self.call.bias_streams();
            let scaled = {
                #[inline(always)]
                move |of: &Source<T>, i: usize, count: usize, above: T::Lanes<S>| {
                    read(of, i, count).mul_add(scale, zero - above)
                }
            };
            let unmasked = {
                #[inline(always)]
                move |of: &Source<T>, i: usize, count, above| Above::all(scaled(of, i, count, above))
            };
            let masked = {
                #[inline(always)]
                move |of: &Source<T>, i: usize, count, above| {
                    let logits = scaled(of, i, count, above);
                    Above { logits, keep: Some(of.mask.wrapping_add(i)), count }
                }
            };
            let limited_logits = {
                #[inline(always)]
                move |of: &Source<T>, i: usize, count, above| Above::all(within(of, i, scaled(of, i, count, above)))
            };
            let biased = {
                #[inline(always)]
                move |of: &Source<T>, i: usize, count: usize, above: T::Lanes<S>| {
                    Above::all(read(of, i, count).mul_add(scale, read_bias(of, i, count)) - above)
                }
            };
            let widened = {
                #[inline(always)]
                move |of: &Source<T>, i: usize, count: usize, above: T::Lanes<S>| {
                    let bias = T::Lanes::<S>::load(of.number.add(i));
                    Above::all(read(of, i, count).mul_add(scale, bias) - above)
                }
            };
            let nothing = |_: &Source<T>, _: usize| ();
            // Where there is a number for all of a line it is added by the last of them, which makes any logits. What a condition begins with
            // is known when the code is made: others than these are not made for vectors that never ask for them.
            let alone = self.call.bias.is_none();
            match (cap, bias, mask, limited) {
                (None, false, false, false) if alone => {
                    self.choose::<S, true, NOTHING>(lines, len, out, nothing, unmasked)
                }
                (None, true, false, false) if S::SPECIALISED && (bias_streams || !S::PREFETCHES) => {
                    self.choose::<S, true, FAR_AWAY>(lines, len, out, bias_ahead, biased)
                }
                (None, true, false, false)
                    if const { Widened::<T::Real>::serves_any::<S, T>() }
                        && Widened::serves::<S, T>(&self.call, len) =>
                {
                    // Of whole vectors
                    self.at_once_of::<S, NOTHING>(lines, len, out, Self::asking::<S, NOTHING>(nothing), widened)
                }
                (None, true, false, false) if S::PREFETCHES => {
                    self.choose::<S, true, NEARBY>(lines, len, out, bias_ahead, biased)
                }
                (None, false, true, false) if T::Lanes::<S>::SATURATES && alone && windowed => {
                    self.choose::<S, true, WINDOW>(lines, len, out, nothing, masked)
                }
                (None, false, true, false) if S::SPECIALISED && alone => {
                    self.choose::<S, true, NOTHING>(lines, len, out, nothing, masked)
                }
                (None, false, false, true) if S::SPECIALISED && !T::Lanes::<S>::MASKS_BYTES && alone => {
                    self.choose::<S, true, NOTHING>(lines, len, out, nothing, limited_logits)
                }
                (Some([inverse, cap]), false, false, false) if S::SPECIALISED && alone => self
                    .choose::<S, false, NOTHING>(
                        lines,
                        len,
                        out,
                        nothing,
                        #[inline(always)]
                        move |of, i, count, above| {
                            Above::all((read(of, i, count) * inverse).tanh().mul_add(cap, zero - above))
                        },
                    ),
                _ => self.choose::<S, false, FAR_AWAY>(
                    lines,
                    len,
                    out,
                    #[inline(always)]
                    move |of, i| {
                        if bias_streams {
                            bias_ahead(of, i);
                        }
                    },
                    #[inline(always)]
                    move |of, i, count, above| Above::all(any.of::<S, T>(of, i, count) - above),
                ),
            }
        }
    }

    /// Short lines are taken in batches, longer ones one by one: of those a batch leaves too little of the first cache.
    /// `above(source, start, count, reference)` makes a vector of logits minus a reference, and `beside(source, start)` asks for what it is made
    /// from beside the scores; of what is nearby that takes longer. `BESIDE`: as of [`at_once`]. Where logits take many registers, as a softcap
    /// does, those of short lines are not made `TOGETHER` with exponentials, but in a loop of their own: 0.41 ms for lines of 64 f32s, together
    /// 0.49. With a mask it is 0.30 ms together and 0.35 (bf16 0.30 and 0.34).
    ///
    /// # Safety
    /// As of [`short`](Self::short).
    #[inline(always)]
    unsafe fn choose<S: Simd, const TOGETHER: bool, const BESIDE: u8>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        beside: impl Fn(&Source<T>, usize) + Copy,
        above: impl Fn(&Source<T>, usize, usize, T::Lanes<S>) -> Above<T::Lanes<S>> + Copy,
    ) {
        let zero = T::Lanes::<S>::splat(T::Real::ZERO);
        let in_line = {
            #[inline(always)]
            move |source: &Source<T>, i: usize, count: usize, reference| {
                let above = above(source, i, count, reference);
                Above { logits: first_lanes(count, above.logits), ..above }
            }
        };
        let logit = {
            #[inline(always)]
            // SAFETY: as promised by the caller.
            move |source: &Source<T>, i: usize, count: usize| unsafe { in_line(source, i, count, zero).values() }
        };
        let ask = Self::asking::<S, BESIDE>(beside);
        // SAFETY: as promised by the caller.
        unsafe {
            if T::Lanes::<S>::SATURATES && TOGETHER && len <= BATCH_LINE {
                self.at_once_of::<S, BESIDE>(lines, len, out, ask, in_line)
            } else if T::Lanes::<S>::SATURATES && (TOGETHER || len > BATCH_LINE) {
                // Those in windows are no longer.
                if BESIDE == WINDOW || len <= most_kept::<S, T>() {
                    // What is nearby, not as far ahead: 8 × 16 × 512 × 512 f32s with a bias that heads share 13.1 ms, not asked
                    // for 13.4.
                    let back = if BESIDE == NEARBY { self.call.ahead() - ahead::<T>() } else { 0 };
                    let ask_all = {
                        #[inline(always)]
                        move |source: &Source<T>, i: usize| {
                            S::prefetch(source.scores.wrapping_add(i));
                            beside(source, i.wrapping_sub(back));
                        }
                    };
                    self.sampled::<S, BESIDE>(lines, len, out, ask_all, in_line)
                } else {
                    self.long_of_neighbours::<S>(lines, len, out, ask, logit)
                }
            } else if const { has_own_loops::<T>() } && len <= BATCH_LINE {
                self.in_batches_of::<S, false>(lines, len, out, ask, logit)
            } else {
                self.in_turns::<S>(lines, len, out, ask, logit)
            }
        }
    }

    /// Short lines that are to become logarithms, as [`short`](Self::short) for probabilities.
    ///
    /// # Safety
    /// As of that, with `len` ≤ [`BATCH_LINE`].
    #[inline(always)]
    pub(super) unsafe fn short_log<S: Simd>(&self, lines: Range<usize>, len: usize, out: Elements<T>) {
        let any = AnyLogits::new::<S, T>(&self.call, self.limits.is_some(), len);
        let ask = Self::asking::<S, FAR_AWAY>(
            #[inline(always)]
            move |of: &Source<T>, i: usize| S::prefetch(of.bias.wrapping_add(i)),
        );
        let logit = {
            #[inline(always)]
            // SAFETY: as promised by the caller.
            move |of: &Source<T>, i: usize, count: usize| first_lanes(count, unsafe { any.of::<S, T>(of, i, count) })
        };
        // SAFETY: as promised by the caller.
        unsafe { self.in_batches_of::<S, true>(lines, len, out, ask, logit) }
    }

    /// A loop of its own for each: with a distance that is no constant lines of 64 f32s with a bias took 1.06 times as long.
    ///
    /// # Safety
    /// As of [`in_batches`](Self::in_batches).
    #[inline(always)]
    unsafe fn in_batches_of<S: Simd, const LOG: bool>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        ask: impl Fn(&Source<T>, usize),
        logit: impl Fn(&Source<T>, usize, usize) -> T::Lanes<S>,
    ) {
        let leaves_caches = S::PREFETCHES && leaves_caches(&out);
        // SAFETY: as promised by the caller.
        unsafe {
            match len {
                _ if const { !S::SPECIALISED } => self.in_batches::<S, 0, 0, false, LOG>(lines, len, out, ask, logit),
                SHORT if const { !LOG } => match leaves_caches {
                    true => self.in_batches::<S, SHORT, 0, true, LOG>(lines, len, out, ask, logit),
                    false => self.in_batches::<S, SHORT, 0, false, LOG>(lines, len, out, ask, logit),
                },
                _ if leaves_caches => self.in_batches::<S, 0, 0, true, LOG>(lines, len, out, ask, logit),
                _ if len <= T::Lanes::<S>::COUNT => self.in_batches::<S, 0, 1, false, LOG>(lines, len, out, ask, logit),
                _ => self.in_batches::<S, 0, 0, false, LOG>(lines, len, out, ask, logit),
            }
        }
    }

    /// What asks for a line's scores, and for what is far away beside them.
    #[inline(always)]
    fn asking<S: Simd, const BESIDE: u8>(
        beside: impl Fn(&Source<T>, usize) + Copy,
    ) -> impl Fn(&Source<T>, usize) + Copy {
        #[inline(always)]
        move |source, i| {
            S::prefetch(source.scores.wrapping_add(i));
            if BESIDE == FAR_AWAY {
                beside(source, i);
            }
        }
    }

    /// Lines of up to [`BATCH_LINE`] elements that are read once. `ask`, `above` and `BESIDE`: as of [`at_once`](Self::at_once).
    ///
    /// # Safety
    /// As of [`short`](Self::short), with vectors that [saturate](Lanes::SATURATES).
    #[inline(always)]
    unsafe fn at_once_of<S: Simd, const BESIDE: u8>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        ask: impl Fn(&Source<T>, usize),
        above: impl Fn(&Source<T>, usize, usize, T::Lanes<S>) -> Above<T::Lanes<S>>,
    ) {
        // SAFETY: as promised by the caller.
        unsafe {
            match asks_ahead::<S, T>(&self.call.scores, &out, len) {
                FAR if len == SHORT => self.at_once::<S, SHORT, 0, FAR, BESIDE>(lines, len, out, ask, above),
                FAR => self.at_once::<S, 0, 0, FAR, BESIDE>(lines, len, out, ask, above),
                NEAR if const { has_near::<T>() } => self.in_caches::<S, NEAR, BESIDE>(lines, len, out, ask, above),
                _ => self.in_caches::<S, NOT_ASKED, BESIDE>(lines, len, out, ask, above),
            }
        }
    }

    /// A loop for each number of vectors. For those of longer lines there are loops of the most usual kinds only.
    ///
    /// # Safety
    /// As of [`at_once`](Self::at_once).
    #[inline(always)]
    unsafe fn in_caches<S: Simd, const AHEAD: usize, const BESIDE: u8>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        ask: impl Fn(&Source<T>, usize),
        above: impl Fn(&Source<T>, usize, usize, T::Lanes<S>) -> Above<T::Lanes<S>>,
    ) {
        // SAFETY: as promised by the caller.
        unsafe {
            match len.div_ceil(T::Lanes::<S>::COUNT) {
                _ if len == SHORT => self.at_once::<S, SHORT, 0, AHEAD, BESIDE>(lines, len, out, ask, above),
                1 => self.at_once::<S, 0, 1, AHEAD, BESIDE>(lines, len, out, ask, above),
                2 if const { BESIDE == NOTHING } => self.at_once::<S, 0, 2, AHEAD, BESIDE>(lines, len, out, ask, above),
                3 if const { BESIDE == NOTHING } => self.at_once::<S, 0, 3, AHEAD, BESIDE>(lines, len, out, ask, above),
                4 if const { BESIDE == NOTHING } => self.at_once::<S, 0, 4, AHEAD, BESIDE>(lines, len, out, ask, above),
                _ => self.at_once::<S, 0, 0, AHEAD, BESIDE>(lines, len, out, ask, above),
            }
        }
    }

    /// The lines of batches.
    #[inline(always)]
    fn batched<S: Simd>(&self, lines: Range<usize>, len: usize, out: Elements<T>) -> at_once::Lines<T> {
        let factor = self.call.most() * T::Lanes::<S>::UNSCALE;
        let of_nothing = self.call.scales::<T::Lanes<S>>(None).1;
        at_once::Lines::new::<S>(&self.call.scores, &out, lines, len, factor, of_nothing)
    }

    /// Batches of lines that are read once: see [`at_once`].
    ///
    /// # Safety
    /// As of [`short`](Self::short), with vectors that [saturate](Lanes::SATURATES).
    #[inline(never)]
    unsafe fn at_once<S: Simd, const LEN: usize, const VECTORS: usize, const AHEAD: usize, const BESIDE: u8>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        ahead: impl Fn(&Source<T>, usize),
        above: impl Fn(&Source<T>, usize, usize, T::Lanes<S>) -> Above<T::Lanes<S>>,
    ) {
        let mut sources = Sources::new::<S>(&self.call, self.limits.as_deref(), &lines, len);
        sources.widened = Widened::new::<S, T>(&self.call, len);
        let lines = self.batched::<S>(lines, len, out);
        // SAFETY: as promised by the caller. A function of its own for each kind of logits, entered anew.
        unsafe {
            S::enter(
                #[inline(always)]
                || at_once::at_once::<S, T, _, LEN, VECTORS, AHEAD, BESIDE>(&mut sources, lines, ahead, above),
            )
        }
    }

    /// Batches of lines: see [`in_batches`]. `ask` and `logit`: as of that.
    ///
    /// # Safety
    /// As of [`short`](Self::short).
    #[inline(never)]
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
        out: Elements<T>,
        ask: impl Fn(&Source<T>, usize),
        logit: impl Fn(&Source<T>, usize, usize) -> T::Lanes<S>,
    ) {
        let mut sources = Sources::new::<S>(&self.call, self.limits.as_deref(), &lines, len);
        let lines = self.batched::<S>(lines, len, out);
        // SAFETY: as promised by the caller. A function of its own for each kind of logits, entered anew.
        unsafe {
            S::enter(
                #[inline(always)]
                || in_batches::<S, T, _, LEN, VECTORS, LEAVES_CACHES, LOG>(&mut sources, lines, ask, logit),
            )
        }
    }

    /// What one line is made from. The place and the value of the line before's sink are those of most lines.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn turn<S: Simd>(
        &self,
        place: &Place,
        len: usize,
        steps: Steps,
        windows: &Option<Windows<T::Real>>,
        last_sink: &mut (usize, T::Real),
    ) -> (Source<T>, T::Real) {
        let call = &self.call;
        let mut sink = T::Real::NEG_INFINITY;
        let mut turn = Source {
            scores: call.scores.at(place.scores, len),
            bias: std::ptr::null(),
            mask: std::ptr::null(),
            number: std::ptr::null(),
            shift: T::Real::ZERO,
        };
        match call.bias {
            Some(bias) if steps.bias != 0 => turn.bias = bias.at(place.bias, len),
            // SAFETY: one element is there; the rest by the caller's promise.
            Some(bias) => turn.shift = unsafe { one::<S, T>(bias.at(place.bias, 1)) },
            None => (),
        }
        if let Some(mask) = call.mask {
            turn.mask = call.line_mask(mask, place.mask, 0);
        }
        if let Some(sinks) = call.sinks {
            if last_sink.0 != place.sink {
                // SAFETY: likewise.
                *last_sink = (place.sink, unsafe { one::<S, T>(sinks.at(place.sink, 1)) });
            }
            sink = last_sink.1;
        }
        if let Some(windows) = windows {
            windows.tell(place.query, &mut turn);
        }
        (turn, sink)
    }

    /// Lines that are read once, relative to the maximum of a few vectors: see [`rows`](crate::cpu::rows). While one is summed, the
    /// results of the one before are written. `above` and `BESIDE`: as of [`choose`](Self::choose).
    ///
    /// # Safety
    /// As of [`short`](Self::short), with vectors that [saturate](Lanes::SATURATES).
    #[inline(never)]
    unsafe fn sampled<S: Simd, const BESIDE: u8>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        ahead: impl Fn(&Source<T>, usize),
        above: impl Fn(&Source<T>, usize, usize, T::Lanes<S>) -> Above<T::Lanes<S>>,
    ) {
        // SAFETY: as promised by the caller. A function of its own for each kind of logits, entered anew.
        unsafe {
            S::enter(
                #[inline(always)]
                || self.sampled_inside::<S, BESIDE>(lines, len, out, ahead, above),
            )
        }
    }

    /// # Safety
    /// As of [`sampled`](Self::sampled).
    #[inline(always)]
    unsafe fn sampled_inside<S: Simd, const BESIDE: u8>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        ahead: impl Fn(&Source<T>, usize),
        above: impl Fn(&Source<T>, usize, usize, T::Lanes<S>) -> Above<T::Lanes<S>>,
    ) {
        let (none, zero) = (T::Real::NEG_INFINITY, T::Real::ZERO);
        let mut held =
            CacheLines([const { MaybeUninit::<T::Real>::uninit() }; 2 * (MAX_KEPT + KeptLines::<f32>::BESIDE)]);
        let input_and_output = |line: usize| {
            let at = (lines.start + line) * len;
            (self.call.scores.at(at, len).cast_const(), out.at(at, len))
        };
        let held = KeptLines::new::<T>(&mut held.0, len.next_multiple_of(T::Lanes::<S>::COUNT));
        // Of the line before
        let mut z_before = std::ptr::null_mut();
        let steps = self.call.steps_along();
        let factor = self.call.most() * T::Lanes::<S>::UNSCALE;
        let (_, of_nothing) = self.call.scales::<T::Lanes<S>>(None);
        let mut kept = [0; random::room(MAX_KEPT)];
        let mut places = self.call.geometry.places(lines.start);
        let windows = Windows::new::<S, T>(&self.call, len);
        let mut last_sink = (usize::MAX, none);
        let sample = len.min(SAMPLE_VECTORS * T::Lanes::<S>::COUNT);
        let distance = self.call.ahead();
        let streams = self.call.options.dropout.is_none() && streams::<S, T>(Some(&self.call.scores), &out, len);
        let mut streamed = streams.then(|| Streamed::<T::Lanes<S>>::new(out.at(lines.start * len, 0).cast()));
        let mut scale = zero;
        // SAFETY of the block: the elements are there, and `held` has room for two lines; the rest by the caller's promise.
        unsafe {
            for line in 0..lines.len() {
                let place = places.next();
                let (source, sink) = self.turn::<S>(&place, len, steps, &windows, &mut last_sink);
                let ask = {
                    #[inline(always)]
                    |i| {
                        if at_once::begins_line::<S, T>(i) {
                            ahead(&source, i + distance)
                        }
                    }
                };
                let first = self.call.keys(place.query, &(0..len)).start.min(len - sample);
                let (scores, to) = input_and_output(line);
                let (mut seen, mut before, z) = (first..first + sample, line.checked_sub(1), held.at(line, scores, to));
                scale = loop {
                    let zeros = T::Lanes::<S>::splat(zero);
                    let max = fold(
                        seen.len(),
                        T::Lanes::<S>::splat(none),
                        #[inline(always)]
                        |max, i, count| above(&source, seen.start + i, count, zeros).values().or_greater(max),
                        T::Lanes::<S>::or_greater,
                    );
                    let (max, exact) = (sink.or_greater(max.max_across()), seen.len() == len);
                    if max < T::Real::nearest(LEAST_SAMPLE) && !exact {
                        seen = 0..len;
                        continue;
                    }
                    // Finite where nothing is above −∞, so that exp(−∞ − reference) is 0 and a NaN survives.
                    let reference = max.or_greater(T::Real::LOWEST);
                    let references = T::Lanes::<S>::splat(reference);
                    let exp_of_rounded = {
                        #[inline(always)]
                        |i, count| (above(&source, i, count, zeros).values() - references).scaled_exp()
                    };
                    let exp = {
                        #[inline(always)]
                        |i, count| match BESIDE {
                            // Lines of 512 f32s took 0.98 of the time then.
                            NEARBY | FAR_AWAY => exp_of_rounded(i, count),
                            _ => above(&source, i, count, references).scaled_exp(),
                        }
                    };
                    let mut sum = if let Some(before) = before.take() {
                        let keep = keep_along::<S, T>(&self.call, lines.start + before, 0, len, &mut kept);
                        let to = to.wrapping_sub(len);
                        // A loop of its own for each: asking in it takes a tenth of the time.
                        match (keep, &mut streamed) {
                            (None, None) => {
                                let results = line_results::<S, T>(z_before, to, Some(distance), scale, None, None);
                                logits_sum::<S, T>(exp, len, z, ask, results)
                            }
                            (None, Some(streamed)) => {
                                let results = line_results::<S, T>(z_before, to, None, scale, None, Some(streamed));
                                logits_sum::<S, T>(exp, len, z, ask, results)
                            }
                            (keep, _) => {
                                let results = line_results::<S, T>(z_before, to, Some(distance), scale, keep, None);
                                logits_sum::<S, T>(exp, len, z, ask, results)
                            }
                        }
                    } else {
                        logits_sum::<S, T>(
                            exp,
                            len,
                            z,
                            ask,
                            #[inline(always)]
                            |_, _| (),
                        )
                    };
                    let of_sink = if self.call.sinks.is_some() { (sink - reference).exp() } else { zero };
                    sum += of_sink;
                    // What the maximum is of adds about 1, …
                    let fits = sum >= T::Real::nearest(0.5) && sum < T::Real::nearest(MOST_OF_SAMPLE);
                    if exact && !fits && max > none {
                        // … unless it is so great that it is rounded by more: then all are to be.
                        sum = of_sink
                            + logits_sum::<S, T>(
                                exp_of_rounded,
                                len,
                                z,
                                #[inline(always)]
                                |_| (),
                                #[inline(always)]
                                |_, _| (),
                            );
                    }
                    if exact || fits {
                        break if max == none && sum == zero { of_nothing } else { T::Real::ONE / sum * factor };
                    }
                    seen = 0..len;
                };
                z_before = z;
            }
            if let Some(last) = lines.len().checked_sub(1) {
                let keep = keep_along::<S, T>(&self.call, lines.start + last, 0, len, &mut kept);
                let to = out.at((lines.start + last) * len, len);
                let results = line_results::<S, T>(z_before, to, Some(distance), scale, keep, streamed.as_mut());
                each::<T::Lanes<S>>(0..len, results);
            }
            if let Some(streamed) = streamed {
                streamed.finish();
            }
        }
    }

    /// Lines of several blocks, whose [scaled](Lanes::scaled_exp) exponentials are kept where their results are to be or aside, each
    /// block's relative to the reference it had: see [`rows`](crate::cpu::rows). `logit(source, start, count)` makes a vector of logits.
    ///
    /// # Safety
    /// As of [`short`](Self::short), with vectors that [saturate](Lanes::SATURATES), and `len` ≤ [`MAX_KEPT_LONG`].
    #[inline(never)]
    unsafe fn long_of_neighbours<S: Simd>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        ahead: impl Fn(&Source<T>, usize),
        logit: impl Fn(&Source<T>, usize, usize) -> T::Lanes<S>,
    ) {
        // SAFETY: as promised by the caller. A function of its own for each kind of logits, entered anew.
        unsafe {
            S::enter(
                #[inline(always)]
                || self.long_inside::<S>(lines, len, out, ahead, logit),
            )
        }
    }

    /// # Safety
    /// As of [`long_of_neighbours`](Self::long_of_neighbours).
    #[inline(always)]
    unsafe fn long_inside<S: Simd>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        ahead: impl Fn(&Source<T>, usize),
        logit: impl Fn(&Source<T>, usize, usize) -> T::Lanes<S>,
    ) {
        let (call, steps) = (&self.call, self.call.steps_along());
        let mut places = call.geometry.places(lines.start);
        let mut last_sink = (usize::MAX, T::Real::NEG_INFINITY);
        let most = T::Lanes::<S>::splat(call.most());
        let (mut aside, mut dropped) = (Scratch::new(), [0; random::room(MAX_BLOCK)]);
        let mut references = Vec::new();
        let mut waiting = block::<T::Real>();
        let waiting = waiting.0.as_mut_ptr().cast::<T::Real>();
        let distance = call.ahead();
        let distance_in = distance.max(AHEAD_BLOCKS * BLOCK_VECTORS * T::Lanes::<S>::COUNT);
        // SAFETY of the block: the elements are there, and there is room for what is kept; the rest by the caller's promise.
        unsafe {
            for line in lines {
                let place = places.next();
                let keys = call.keys(place.query, &(0..len));
                let (source, sink) = self.turn::<S>(&place, len, steps, &None, &mut last_sink);
                let to = out.at(place.scores, len);
                let kept: *mut T::Real = if T::KEEP == Keep::InOutput { to.cast() } else { aside.room(len) };
                // What would take the place of the scores waits: a block of them may be needed a second time.
                let over_scores = kept.cast_const().cast() == source.scores;
                let mut state = SoftmaxState::empty();
                references.clear();
                for (start, len) in blocks::<T::Lanes<S>>(keys.clone()) {
                    let kept = kept.add(start);
                    let mut grown = start == keys.start;
                    let sum = loop {
                        if grown {
                            let max = fold(
                                len,
                                T::Lanes::<S>::splat(T::Real::NEG_INFINITY),
                                #[inline(always)]
                                |max, i, count| logit(&source, start + i, count).or_greater(max),
                                T::Lanes::<S>::or_greater,
                            );
                            state.grow(max.max_across());
                        }
                        let reference = T::Lanes::<S>::splat(state.reference());
                        let sum = sum_of_long_terms(
                            len,
                            #[inline(always)]
                            |i, count| {
                                ahead(&source, start + i + distance_in);
                                (logit(&source, start + i, count) - reference).scaled_exp()
                            },
                            #[inline(always)]
                            |i, count, exp| {
                                S::prefetch(kept.wrapping_add(i + distance));
                                exp.put(if over_scores { waiting.add(i) } else { kept.add(i) }, count);
                            },
                        );
                        let sum = sum.sum_across() * T::Lanes::<S>::UNSCALE;
                        if grown || sum < most_of(len) {
                            break sum;
                        }
                        grown = true;
                    };
                    state.add(sum);
                    references.push(state.reference());
                    if over_scores {
                        kept.copy_from_nonoverlapping(waiting, len);
                    }
                }
                if call.sinks.is_some() {
                    state.push(sink);
                }
                let (nothing, reference, scale) = self.finish::<S>(&state, &place, &(0..len), &keys);
                let moved = |&(_, held): &(_, &T::Real)| !nothing && held.differs(reference);
                for ((start, len), &held) in blocks::<T::Lanes<S>>(keys.clone()).zip(&references).filter(moved) {
                    rescale::<T::Lanes<S>>(kept.add(start), len, held, reference);
                }
                let scale = T::Lanes::<S>::splat(scale);
                let result = {
                    #[inline(always)]
                    |i: usize, count: usize| {
                        S::prefetch(to.wrapping_add(i + distance));
                        // The maximum alone may have come out a little over its sum.
                        (T::Lanes::<S>::get(kept.add(i), count) * scale).at_most(most)
                    }
                };
                if call.options.dropout.is_none() {
                    let start = keys.start;
                    T::write::<S>(
                        to.add(start),
                        keys.len(),
                        #[inline(always)]
                        |i, count| result(start + i, count),
                    );
                    continue;
                }
                for (start, len) in blocks::<T::Lanes<S>>(keys) {
                    let Some(keep) = keep_along::<S, T>(call, line, start, len, &mut dropped) else { continue };
                    T::write::<S>(
                        to.add(start),
                        len,
                        #[inline(always)]
                        |i, count| result(start + i, count).where_some_kept(keep.add(i), count, T::Real::ZERO),
                    );
                }
            }
        }
    }

    /// While the sum of one line is taken, the maximum of a later one is found and the results of an earlier one are written.
    /// `logit(source, start, count)` makes a vector of logits.
    ///
    /// # Safety
    /// As of [`short`](Self::short).
    #[inline(never)]
    unsafe fn in_turns<S: Simd>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        ahead: impl Fn(&Source<T>, usize),
        logit: impl Fn(&Source<T>, usize, usize) -> T::Lanes<S>,
    ) {
        // SAFETY: as promised by the caller. A function of its own for each kind of logits, entered anew.
        unsafe {
            S::enter(
                #[inline(always)]
                || self.in_turns_inside::<S>(lines, len, out, ahead, logit),
            )
        }
    }

    /// # Safety
    /// As of [`short`](Self::short).
    #[inline(always)]
    unsafe fn in_turns_inside<S: Simd>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        ahead: impl Fn(&Source<T>, usize),
        logit: impl Fn(&Source<T>, usize, usize) -> T::Lanes<S>,
    ) {
        let (none, zero) = (T::Real::NEG_INFINITY, T::Real::ZERO);
        let mut held = CacheLines([const { MaybeUninit::<T::Real>::uninit() }; IN_TURNS * MAX_BLOCK]);
        let distance = self.call.ahead();
        let in_turns = InTurns {
            held: held.0.as_mut_ptr().cast::<T::Real>(),
            room: four_apart::<T::Real>(len.next_multiple_of(T::Lanes::<S>::COUNT)),
            len,
        };
        // Vectors that do not saturate have 8 lanes at most, and a block as many fewer elements.
        assert!(in_turns.room <= MAX_BLOCK);
        let (steps, count) = (self.call.steps_along(), lines.len());
        let factor = self.call.most() * T::Lanes::<S>::UNSCALE;
        let (_, of_nothing) = self.call.scales::<T::Lanes<S>>(None);
        let mut kept = [0; random::room(MAX_BLOCK)];
        let mut places = self.call.geometry.places(lines.start);
        let windows = Windows::new::<S, T>(&self.call, len);
        let mut last_sink = (usize::MAX, none);
        // SAFETY of the block: the elements are there, `held` has room for the lines in work; the rest by the caller's promise.
        unsafe {
            // Of a line: the maximum of it and its sink, the sink, and the sum of both in a vector. When the results are written,
            // the steps from that to one number wait for nothing.
            let (mut max, mut sink) = ([none; IN_TURNS], [none; IN_TURNS]);
            let mut sum = [T::Lanes::<S>::splat(zero); IN_TURNS];
            for step in 0..count + 2 {
                let next = if step < count {
                    Some(self.turn::<S>(&places.next(), len, steps, &windows, &mut last_sink))
                } else {
                    None
                };
                let summed = step.checked_sub(1).filter(|&line| line < count);
                let written = if let Some(line) = step.checked_sub(2) {
                    let (max, sum) = (max[line % IN_TURNS], sum[line % IN_TURNS].sum_across());
                    let scale = if max == none && sum == zero { of_nothing } else { T::Real::ONE / sum * factor };
                    let keep = keep_along::<S, T>(&self.call, lines.start + line, 0, len, &mut kept);
                    Some((line, out.at((lines.start + line) * len, len), scale, keep))
                } else {
                    None
                };
                let mut found = T::Lanes::<S>::splat(none);
                let z = in_turns.held(step);
                if let (Some((next, _)), Some(line), Some((written, to, scale, keep))) = (next, summed, written) {
                    let mut write = line_results::<S, T>(in_turns.held(written), to, Some(distance), scale, keep, None);
                    sum[line % IN_TURNS] = in_turns.sum::<S, T>(
                        line,
                        max[line % IN_TURNS],
                        #[inline(always)]
                        |i, count| {
                            ahead(&next, i + distance);
                            let logit = logit(&next, i, count);
                            logit.store(z.add(i));
                            found = logit.or_greater(found);
                            write(i, count);
                        },
                    );
                } else {
                    if let Some((next, _)) = next {
                        each::<T::Lanes<S>>(
                            0..len,
                            #[inline(always)]
                            |i, count| {
                                let logit = logit(&next, i, count);
                                logit.store(z.add(i));
                                found = logit.or_greater(found);
                            },
                        );
                    }
                    if let Some(line) = summed {
                        sum[line % IN_TURNS] = in_turns.sum::<S, T>(
                            line,
                            max[line % IN_TURNS],
                            #[inline(always)]
                            |_, _| (),
                        );
                    }
                    if let Some((line, to, scale, keep)) = written {
                        let results = line_results::<S, T>(in_turns.held(line), to, Some(distance), scale, keep, None);
                        each::<T::Lanes<S>>(0..len, results);
                    }
                }
                if let (Some(line), Some(_)) = (summed, self.call.sinks) {
                    let reference = T::Lanes::<S>::splat(max[line % IN_TURNS].or_greater(T::Real::LOWEST));
                    let sink = T::Lanes::<S>::splat(sink[line % IN_TURNS]).keep(1, none);
                    sum[line % IN_TURNS] = sum[line % IN_TURNS] + (sink - reference).exp();
                }
                if let Some((_, next_sink)) = next {
                    max[step % IN_TURNS] = next_sink.or_greater(found.max_across());
                    sink[step % IN_TURNS] = next_sink;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sliding_items_are_the_windows() {
        let looks = [0, 1, 2, 3, 5, 9, usize::MAX];
        for (len, queries) in (1..6).flat_map(|len| (1..8).map(move |queries| (len, queries))) {
            for (before, after) in looks.into_iter().flat_map(|before| looks.map(|after| (before, after))) {
                let window = Window { before, after, queries };
                let windows = Sliding::new(window, len, 1, 0);
                for query in 0..queries {
                    let (first, end) = window.keys(query, len);
                    let expected: Vec<u8> = (0..len).map(|key| u8::from(first <= key && key < end)).collect();
                    // SAFETY: as many items are there, and those of a vector more.
                    let found = unsafe { std::slice::from_raw_parts(windows.of(query), len + MAX_LANES) };
                    assert_eq!(found[..len], expected, "{window:?}, {len} keys, query {query}");
                    for count in 1..=queries - query {
                        if let Some(step) = windows.step(query, count, 1) {
                            let even = |i| windows.at(query + i) == windows.at(query) + i as isize * step;
                            assert!((0..count).all(even), "{window:?}, {len} keys, {count} queries from {query} on");
                        }
                    }
                }
            }
        }
    }
}
