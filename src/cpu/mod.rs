//! The CPU schedules.
//!
//! Lines along the last dimension are contiguous ([`rows`]); along another they are walked side by side, a strip of
//! neighbours at a time ([`columns`]). Both sum in short blocks, and both come as a [`Pass`]: a reduction over
//! a line, then a write. [`run`] spreads it over rayon's threads in a way that depends on the shape alone, so that the
//! result does not depend on how many threads there are.
//!
//! All of it is written once, over vectors ([`lanes`]) of whatever instructions the CPU turns out to have ([`level`]).

mod at_once;
mod columns;
mod element;
pub(crate) mod exp;
mod few_rows;
pub(crate) mod fused;
mod held;
mod in_batches;
pub(crate) mod lanes;
mod level;
mod memory;
mod narrow;
#[cfg(neon)]
mod neon;
mod random;
mod rows;
mod statistics;
mod streamed;
mod sum;
mod threads;
mod top_k;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use element::Element;
pub(crate) use random::dropout_keeps;
pub(crate) use statistics::{line_statistics, log_sum_exp, loss_backward, Classes};
pub(crate) use top_k::{top_k, top_k_backward};

use crate::lines::Lines;
use crate::op::{Output, Schedule};
use crate::state::{Merge, Number, Real};
use lanes::{Lanes, MAX_LANES};
use level::{Level, Simd, Task};
use memory::{filled, Elements};
use std::ops::Range;
use std::sync::OnceLock;

/// A line of this many elements or more …
const SPLIT_FROM: usize = 1 << 18;
/// … is split into parts of about this many, …
const PART: usize = 1 << 16;
/// … but never into more parts than this, which bounds the memory that their states take.
const MAX_PARTS: usize = 128;
/// So many lines are split at a time that each thread has about this many elements, which are in a cache when results are written:
/// (4096, 4096) along the first dimension takes 16 threads 1.9 to 2.0 ms, and one strip after the other, each too small to be shared, 13.
const TOGETHER: usize = 1 << 18;
/// Threads trade pieces of this many tasks, a huge page or so: the first use of some pages takes much longer than of others.
const TRADED: usize = 16;
/// With this many lines or more there is no need to split them.
const ENOUGH_LINES: usize = 64;

/// Softmax or log-softmax of the lines of `src`, which is contiguous.
pub(crate) fn softmax<T: Element>(src: &[T], lines: Lines, schedule: Schedule, output: Output) -> Vec<T> {
    // SAFETY: every element is of one line, and every line is written.
    unsafe {
        filled(src.len(), |out| Level::best().run(Forward { src: Elements::read(src), out, lines, schedule, output }))
    }
}

/// The same into memory given, as many elements as `src` has.
pub(crate) fn softmax_into<T: Element>(src: &[T], out: &mut [T], lines: Lines, schedule: Schedule, output: Output) {
    if !src.is_empty() {
        let (src, out) = (Elements::read(src), Elements::write(out));
        Level::best().run(Forward { src, out, lines, schedule, output })
    }
}

/// The same, written over the input.
pub(crate) fn softmax_inplace<T: Element>(xs: &mut [T], lines: Lines, schedule: Schedule, output: Output) {
    if !xs.is_empty() {
        let out = Elements::write(xs);
        Level::best().run(Forward { src: out, out, lines, schedule, output })
    }
}

/// The gradient of the input of (log-)softmax, given its result `y` and the gradient `g` of that, both contiguous.
pub(crate) fn softmax_backward<T: Element>(y: &[T], g: &[T], lines: Lines, output: Output) -> Vec<T> {
    // SAFETY: every element is of one line, and every line is written.
    unsafe {
        filled(y.len(), |out| {
            Level::best().run(Backward { y: Elements::read(y), g: Elements::read(g), out, lines, output })
        })
    }
}

impl Output {
    /// What [`of`](Self::of) needs of Σ exp(x − max).
    #[inline(always)]
    fn scale<V: Lanes>(self, sum: V::Real) -> V::Real {
        match self {
            Output::Probability => V::UNSCALE / sum,
            Output::LogProbability => sum.ln(),
        }
    }

    /// The result for x − max.
    #[inline(always)]
    fn of<V: Lanes>(self, shifted: V, scale: V) -> V {
        match self {
            Output::Probability => shifted.scaled_exp() * scale,
            Output::LogProbability => shifted - scale,
        }
    }

    /// What is [made](Self::of_kept) of a sum of exponentials that are relative to the maximum, and [scaled](Lanes::scaled_exp).
    #[inline(always)]
    fn factor<V: Lanes>(self, sum: V) -> V {
        // The maximum alone adds 1, as in [`Normalizer::new`](crate::state::Normalizer::new).
        let sum = V::splat(V::Real::ONE).or_greater(sum.unscaled());
        match self {
            Output::Probability => sum.inverse() * V::splat(V::UNSCALE),
            Output::LogProbability => sum.ln(),
        }
    }

    /// What is kept of x − max and its scaled exponential until the [factor](Self::factor) is known.
    #[inline(always)]
    fn kept<V>(self, shifted: V, exp: V) -> V {
        match self {
            Output::Probability => exp,
            Output::LogProbability => shifted,
        }
    }

    /// The result of what was [kept](Self::kept).
    #[inline(always)]
    fn of_kept<V: Number>(self, kept: V, factor: V) -> V {
        match self {
            Output::Probability => kept * factor,
            Output::LogProbability => kept - factor,
        }
    }

    /// The gradient of a logit of probability p, with Σ g·p for softmax and Σ g for log-softmax.
    #[inline(always)]
    fn logit_gradient<V: Number>(self, p: V, g: V, sum: V) -> V {
        match self {
            Output::Probability => p * (g - sum),
            Output::LogProbability => g - p * sum,
        }
    }

    /// The gradient of x, with Σ g·y for softmax and Σ g for log-softmax.
    #[inline(always)]
    fn gradient<V: Number>(self, y: V, g: V, sum: V) -> V {
        match self {
            Output::Probability => y * (g - sum),
            Output::LogProbability => g - y.exp() * sum,
        }
    }
}

/// What a forward pass needs to know. `src` and `out` may be the same: each element is read last before it is written.
#[derive(Clone, Copy)]
struct Forward<'a, T> {
    src: Elements<'a, T>,
    out: Elements<'a, T>,
    lines: Lines,
    schedule: Schedule,
    output: Output,
}

impl<'a, T: Element> Forward<'a, T> {
    fn softmaxed(&self) -> Softmaxed<'a, T> {
        let Self { src, out, lines, output, .. } = *self;
        Softmaxed { src, out, lines, output, scale: T::Real::ONE, least: T::Real::NEG_INFINITY }
    }
}

/// The same of lines for which the schedule makes no difference, with what can be around it without taking longer.
#[derive(Clone, Copy)]
struct Softmaxed<'a, T: Element> {
    src: Elements<'a, T>,
    out: Elements<'a, T>,
    lines: Lines,
    output: Output,
    /// The logits are the scores times this.
    scale: T::Real,
    /// What exponentials are relative to at least. Where none of a line's logits is above −∞ that itself makes NaN of all, but with a number
    /// they are 0, and what they are divided by is 1.
    least: T::Real,
}

impl<T: Element> Task for Forward<'_, T> {
    fn run<S: Simd>(self) {
        if self.softmaxed().narrow::<S>() {
            return;
        }
        let split = self.schedule == Schedule::Reduce;
        if self.lines.inner == 1 {
            run::<S, rows::Softmax<T>>(&rows::Softmax(self), self.lines, split)
        } else {
            run::<S, columns::Softmax<T>>(&columns::Softmax(self), self.lines, split)
        }
    }
}

/// What the backward pass of [`Softmaxed`] needs to know that makes probabilities again of the scores.
#[derive(Clone, Copy)]
struct ScoresBackward<'a, T: Element> {
    scores: Elements<'a, T>,
    g: Elements<'a, T>,
    out: Elements<'a, T>,
    lines: Lines,
    output: Output,
    scale: T::Real,
}

/// What a backward pass needs to know.
#[derive(Clone, Copy)]
struct Backward<'a, T> {
    y: Elements<'a, T>,
    g: Elements<'a, T>,
    out: Elements<'a, T>,
    lines: Lines,
    output: Output,
}

impl<T: Element> Task for Backward<'_, T> {
    fn run<S: Simd>(self) {
        if self.narrow::<S>() {
            return;
        }
        if self.lines.inner == 1 {
            run::<S, rows::Backward<T>>(&rows::Backward(self), self.lines, true)
        } else {
            run::<S, columns::Backward<T>>(&columns::Backward(self), self.lines, true)
        }
    }
}

/// A reduction over each line and a write that uses it. A unit is one line, or a strip of neighbouring lines.
///
/// # Safety
/// The methods may be called where the CPU has the instructions of `S`, and inside of [`Simd::enter`] are compiled for
/// them.
trait Pass<S: Simd>: Sync + Sized {
    type Reduced: Merge + Send + Sync;

    /// Lines in a unit, at most.
    const WIDTH: usize;

    /// Before this thread writes results of these elements: see [`Elements::use_first`].
    fn use_first(&self, elements: Range<usize>);

    /// # Safety
    /// The CPU has the instructions of `S`.
    unsafe fn reduce(&self, unit: usize, range: Range<usize>) -> Self::Reduced;

    /// # Safety
    /// The CPU has the instructions of `S`, and no other thread is writing to the same range of the same unit.
    unsafe fn write(&self, unit: usize, range: Range<usize>, reduced: &Self::Reduced);

    /// These units, whole.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and no other thread is writing to the same units.
    #[inline(always)]
    unsafe fn whole(&self, units: Range<usize>, len: usize) {
        // SAFETY: as promised by the caller.
        unsafe { self.one_by_one(units, len) }
    }

    /// The same in two steps for each, whatever [`whole`](Self::whole) does: long ones, by the functions that parts of them are taken by.
    ///
    /// # Safety
    /// As of [`whole`](Self::whole).
    #[inline(always)]
    unsafe fn one_by_one(&self, units: Range<usize>, len: usize) {
        for unit in units {
            // SAFETY: as promised by the caller.
            unsafe {
                let reduced = reduce::<S, Self>(self, unit, 0..len);
                write::<S, Self>(self, unit, 0..len, &reduced)
            }
        }
    }
}

/// [`Pass::reduce`], [inside](Simd::enter).
///
/// # Safety
/// As of that.
#[inline(never)]
unsafe fn reduce<S: Simd, P: Pass<S>>(pass: &P, unit: usize, range: Range<usize>) -> P::Reduced {
    // SAFETY: as promised by the caller.
    unsafe {
        S::enter(
            #[inline(always)]
            || pass.reduce(unit, range),
        )
    }
}

/// [`Pass::write`], [inside](Simd::enter).
///
/// # Safety
/// As of that.
#[inline(never)]
unsafe fn write<S: Simd, P: Pass<S>>(pass: &P, unit: usize, range: Range<usize>, reduced: &P::Reduced) {
    // SAFETY: as promised by the caller.
    unsafe {
        S::enter(
            #[inline(always)]
            || pass.write(unit, range, reduced),
        )
    }
}

/// [`Pass::whole`], [inside](Simd::enter).
///
/// # Safety
/// As of that.
#[inline(never)]
unsafe fn whole<S: Simd, P: Pass<S>>(pass: &P, units: Range<usize>, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe {
        S::enter(
            #[inline(always)]
            || pass.whole(units, len),
        )
    }
}

/// How many units of so many elements a thread takes at a time: whole [batches](at_once) where these are short lines.
fn units_per_task(unit_elements: usize) -> usize {
    match PART / 2 / unit_elements.max(1) {
        0 => 1,
        few @ ..MAX_LANES => few,
        many => many / MAX_LANES * MAX_LANES,
    }
}

/// Whether so many units, of so many elements each, are cut into parts for many threads.
fn are_split(units: usize, unit_elements: usize) -> bool {
    units < ENOUGH_LINES && unit_elements >= SPLIT_FROM
}

/// To be called at a level that the CPU has.
fn run<S: Simd, P: Pass<S>>(pass: &P, lines: Lines, split: bool) {
    let width = lines.inner.min(P::WIDTH);
    let units = lines.outer * lines.inner.div_ceil(P::WIDTH);
    let unit_elements = lines.len * width;
    let split = split && are_split(units, unit_elements);
    let contiguous = width == lines.inner;
    if !contiguous || split {
        // Each strip has some of every page, and parts of a line are read before any is written.
        pass.use_first(0..lines.elem_count());
    }
    if split {
        // SAFETY of the block: the level is one that the CPU has, and the parts do not overlap.
        unsafe {
            let of_parts = OfParts {
                reduce: &|unit, part| reduce::<S, P>(pass, unit, part),
                merge: &|mut a: P::Reduced, b| {
                    S::enter(
                        #[inline(always)]
                        || {
                            a.merge(b);
                            a
                        },
                    )
                },
                write: &|unit, part, reduced| write::<S, P>(pass, unit, part, reduced),
            };
            return run_parts(units, lines.len, width, &of_parts);
        }
    }
    let use_first = |elements| pass.use_first(elements);
    // SAFETY: the level is one that the CPU has, and each unit is visited once.
    let each = |units| unsafe { whole::<S, P>(pass, units, lines.len) };
    share_units(units, unit_elements, contiguous.then_some(&use_first), &each)
}

/// Calls `f` [inside](Simd::enter) for all of these units, by several threads if they are of many elements, each of which calls `use_first`
/// for the elements of its own before, where those of each unit lie behind those of the one before.
fn run_units<S: Simd>(
    units: usize,
    unit_elements: usize,
    use_first: Option<&(dyn Fn(Range<usize>) + Sync)>,
    f: impl Fn(Range<usize>) + Sync,
) {
    let enter = |units: Range<usize>| {
        // SAFETY: the level is one that the CPU has.
        unsafe {
            S::enter(
                #[inline(always)]
                || f(units),
            )
        }
    };
    share_units(units, unit_elements, use_first, &enter)
}

/// [`run_units`] with the function that is inside: compiled once, as what follows is for each type of state, not for each pass and level.
fn share_units(
    units: usize,
    unit_elements: usize,
    use_first: Option<&(dyn Fn(Range<usize>) + Sync)>,
    f: &(dyn Fn(Range<usize>) + Sync),
) {
    let each = |units: Range<usize>| {
        if let Some(use_first) = use_first {
            use_first(units.start * unit_elements..units.end * unit_elements);
        }
        f(units)
    };
    share_ranges(units * unit_elements, units, units_per_task(unit_elements), &each, || f(0..units))
}

/// Calls `f` for ranges of `together` that make up `0..count`, of so many elements in all, by several threads; or if one takes less time,
/// `by_one` instead.
fn share_ranges(
    elements: usize,
    count: usize,
    together: usize,
    f: &(dyn Fn(Range<usize>) + Sync),
    by_one: impl FnOnce(),
) {
    let each = |task| f(task * together..count.min((task + 1) * together));
    threads::share(elements, count.div_ceil(together), TRADED, &each, by_one)
}

/// The names of what vector instructions there are, the best last, …
pub(crate) fn levels() -> Vec<&'static str> {
    Level::available().into_iter().map(Level::name).collect()
}

/// … and of those that are used.
pub(crate) fn level() -> &'static str {
    Level::best().name()
}

/// What `f` makes of each number below `count`, which takes as long as so many elements of a softmax: by several threads that have `together` numbers at
/// a time, or if one takes less time by that. Not by rayon's iterators: a thread that waits for those does other work of its pool meanwhile,
/// and that may wait for a lock that this call is made under.
pub(crate) fn made_of_each<O: Copy + Send + Sync>(
    count: usize,
    elements_of_each: usize,
    together: usize,
    f: impl Fn(usize) -> O + Sync,
) -> Vec<O> {
    // SAFETY of the block: each number is in one of the ranges, and what is made of it has a place.
    unsafe {
        filled(count, |out: Elements<O>| {
            let some = |numbers: Range<usize>| numbers.for_each(|i| out.at(i, 1).write(f(i)));
            share_ranges(count * elements_of_each, count, together, &some, || some(0..count))
        })
    }
}

/// Calls `f(i)` for each i below `count`, on so many elements in all, by several threads, or if one takes less time by that.
fn share_each(elements: usize, count: usize, f: &(dyn Fn(usize) + Sync)) {
    threads::share(elements, count, usize::MAX, f, || (0..count).for_each(f))
}

/// What [`run_parts`] does with parts: the methods of a [`Pass`] that leaves states of type `R`.
struct OfParts<'a, R> {
    reduce: &'a (dyn Fn(usize, Range<usize>) -> R + Sync),
    merge: &'a dyn Fn(R, R) -> R,
    write: &'a (dyn Fn(usize, Range<usize>, &R) + Sync),
}

/// Units of `len` rows of `width`, that are each cut into parts for many threads.
fn run_parts<R: Send + Sync>(units: usize, len: usize, width: usize, of_parts: &OfParts<R>) {
    let part = (PART / width).max(len.div_ceil(MAX_PARTS));
    let parts: Vec<_> = (0..len).step_by(part).map(|start| start..len.min(start + part)).collect();
    let together = (rayon::current_num_threads() * TOGETHER).div_ceil(len * width);
    for first in (0..units).step_by(together) {
        run_parts_of(first..units.min(first + together), units * len * width, &parts, of_parts);
    }
}

/// The same of some of them; there are `elements` in all.
fn run_parts_of<R: Send + Sync>(units: Range<usize>, elements: usize, parts: &[Range<usize>], of_parts: &OfParts<R>) {
    let count = units.len() * parts.len();
    let place = |i: usize| (units.start + i / parts.len(), parts[i % parts.len()].clone());
    let each = |f: &(dyn Fn(usize) + Sync)| share_each(elements, count, f);
    let reduced: Vec<OnceLock<R>> = (0..count).map(|_| OnceLock::new()).collect();
    each(&|i| {
        let (unit, part) = place(i);
        // Nobody else sets it.
        let _ = reduced[i].set((of_parts.reduce)(unit, part));
    });
    let mut reduced = reduced.into_iter().filter_map(OnceLock::into_inner);
    let whole: Vec<_> =
        units.clone().filter_map(|_| reduced.by_ref().take(parts.len()).reduce(of_parts.merge)).collect();
    each(&|i| {
        let (unit, part) = place(i);
        (of_parts.write)(unit, part, &whole[i / parts.len()])
    })
}
