//! Lines that are short, or few side by side: vectors of one line, or of one row of lines, would be empty for the most part. A vector is of as
//! many whole rows as fit, one behind the other in memory, or of whole blocks of rows; what there is for each line is found across its
//! lanes, and is in each of them then.

use super::lanes::{Lanes, Pack, MAX_LANES};
use super::level::Simd;
use super::memory::{Elements, Scratch};
use super::{run, run_units, Element, Pass, ScoresBackward, Softmaxed};
use crate::lines::Lines;
use crate::op::Output;
use crate::state::{CompensatedSum, Merge, Number, Real, SoftmaxState, Weighted};
use std::ops::Range;

/// So many vectors are added up plainly before the sum that compensates takes over.
const PLAINLY: usize = 16;
/// Blocks of more elements take their exponentials twice.
pub(super) const MOST_KEPT: usize = 1 << 14;
/// How many bytes the memory system is to be ahead of the arithmetic, which takes longer than it is ahead by itself.
const AHEAD: usize = 2048;

/// Which lanes of a vector are of the same line: it is of `blocks` blocks of `rows` rows, and each row is of `row` lines.
#[derive(Clone, Copy)]
struct Cycle {
    /// How many lanes these are; what is in others is of no line.
    lanes: usize,
    rows: usize,
    /// Where lanes come from that are 1, 2, 4 and 8 rows further on, going round, …
    further: [[u32; MAX_LANES]; 4],
    /// … and as many as the powers of two above that are in the number of rows.
    beyond: [[u32; MAX_LANES]; 3],
    /// Of each line the first.
    first: [u32; MAX_LANES],
    /// The lanes of the lines, one for each, and how many these are.
    line: [u32; MAX_LANES],
    lines: usize,
    /// The line of each lane, and its row.
    of_line: [u32; MAX_LANES],
    row: [u32; MAX_LANES],
}

impl Cycle {
    /// Without divisions, which would take longer than a small tensor does.
    fn new(blocks: usize, rows: usize, row: usize) -> Self {
        let mut same = [0; MAX_LANES];
        for (lane, to) in same.iter_mut().enumerate() {
            *to = lane as u32;
        }
        let (lanes, lines) = (blocks * rows * row, blocks * row);
        let (further, beyond) = ([same; 4], [same; 3]);
        let mut cycle =
            Self { lanes, rows, further, beyond, first: same, line: same, lines, of_line: same, row: [0; MAX_LANES] };
        let mut lane = 0;
        for block in 0..blocks {
            for j in 0..rows {
                for c in 0..row {
                    let at_row = |j: usize| ((block * rows + j) * row + c) as u32;
                    let further = |by: usize| at_row(if j + by < rows { j + by } else { j + by - rows });
                    for (power, order) in
                        cycle.further.iter_mut().enumerate().take_while(|(power, _)| 1 << power < rows)
                    {
                        order[lane] = further(1 << power);
                    }
                    for (power, order) in cycle.beyond.iter_mut().enumerate() {
                        order[lane] = further(rows >> (power + 1) << (power + 1));
                    }
                    let line = block * row + c;
                    cycle.line[line] = at_row(0);
                    (cycle.first[lane], cycle.of_line[lane], cycle.row[lane]) = (at_row(0), line as u32, j as u32);
                    lane += 1;
                }
            }
        }
        cycle
    }

    /// What the lanes of each line come to, in all of them. Of 2, 4 and 8 rows from each on, and then of all: as many as there are powers of
    /// two in their number, one behind the other.
    #[inline(always)]
    fn fold<V: Lanes>(&self, x: V, join: impl Fn(V, V) -> V) -> V {
        // No loop: what is known of each step is in the code.
        let twice = {
            #[inline(always)]
            |of: V, power: usize| match self.rows >= 2 << power {
                true => join(of.in_order(&self.further[power]), of),
                false => of,
            }
        };
        let rest = {
            #[inline(always)]
            |all: V, of: V, power: usize| match self.rows >= 2 << power && self.rows & 1 << power != 0 {
                true => join(of.in_order(&self.beyond[power]), all),
                false => all,
            }
        };
        let two = twice(x, 0);
        let four = twice(two, 1);
        let all = twice(twice(four, 2), 3);
        rest(rest(rest(all, four, 2), two, 1), x, 0)
    }

    /// Their sum: the same number in all of them, for equal logits are to have equal probabilities.
    #[inline(always)]
    fn sum<V: Lanes>(&self, x: V) -> V {
        self.fold(x, V::add).in_order(&self.first)
    }

    #[inline(always)]
    fn max<V: Lanes>(&self, x: V) -> V {
        self.fold(x, V::or_greater)
    }
}

/// Lines that are taken so.
#[derive(Clone, Copy)]
pub(super) struct Narrow {
    lines: Lines,
    cycle: Cycle,
    /// Whether a vector is of whole blocks.
    tiny: bool,
}

impl Narrow {
    /// If they are; of contiguous lines those are of up to so many elements.
    pub fn of<V: Lanes>(lines: Lines, longest: usize) -> Option<Self> {
        let Lines { len, inner, .. } = lines;
        let block = len.saturating_mul(inner);
        if block == 0 || (inner == 1 && len > longest) {
            return None;
        }
        if block <= V::COUNT {
            return Some(Self { lines, cycle: Cycle::new(V::COUNT / block, len, inner), tiny: true });
        }
        (1 < inner && inner < V::COUNT).then(|| Self {
            lines,
            cycle: Cycle::new(1, V::COUNT / inner, inner),
            tiny: false,
        })
    }

    /// The first of the elements of these rows of a block, and how many they are.
    fn span(&self, block: usize, rows: &Range<usize>) -> (usize, usize) {
        let Lines { len, inner, .. } = self.lines;
        ((block * len + rows.start) * inner, rows.len() * inner)
    }

    /// Those of whole blocks.
    fn span_of(&self, blocks: &Range<usize>) -> (usize, usize) {
        let block = self.lines.len * self.lines.inner;
        (blocks.start * block, blocks.len() * block)
    }

    /// Calls `f(at)` for the vectors of so many elements, the last of which may be of fewer lanes.
    #[inline(always)]
    fn each(&self, elements: usize, mut f: impl FnMut(usize)) {
        let mut at = 0;
        while at < elements {
            f(at);
            at += self.cycle.lanes;
        }
    }

    /// The sum of `term(at)` of the vectors, lane by lane.
    #[inline(always)]
    fn summed<V: Lanes>(&self, elements: usize, mut term: impl FnMut(usize) -> V) -> V {
        let mut total = CompensatedSum::zero();
        let (part, mut start) = (PLAINLY * self.cycle.lanes, 0);
        loop {
            // One after the other: what they are the sums of takes longer than an addition.
            let mut sum = V::splat(V::Real::ZERO);
            self.each(
                part.min(elements - start),
                #[inline(always)]
                |at| sum = sum + term(start + at),
            );
            if elements <= part {
                return sum;
            }
            total.add(sum);
            start += part;
            if start >= elements {
                return total.value();
            }
        }
    }

    /// The vector from element `at` of so many on, times `scale`. The lanes that are not in use are anything; where fewer than otherwise
    /// are, `rest`.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and `from` is valid for reads of the elements.
    #[inline(always)]
    unsafe fn read<S: Simd, T: Element>(
        &self,
        from: *const T,
        elements: usize,
        at: usize,
        scale: T::Lanes<S>,
        rest: T::Real,
    ) -> T::Lanes<S> {
        // SAFETY: no more is read than there is; the rest by the caller's promise.
        unsafe {
            if at + T::Lanes::<S>::COUNT <= elements {
                T::load::<S>(from.add(at)) * scale
            } else {
                let count = self.cycle.lanes.min(elements - at);
                (T::load_part::<S>(from.add(at), count) * scale).keep(count, rest)
            }
        }
    }

    /// Writes the vector from element `at` of so many on, after those before it: what passes the lanes in use is written over by the next.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and `out` is valid for writes of the elements.
    #[inline(always)]
    unsafe fn write<S: Simd, T: Element>(&self, result: T::Lanes<S>, out: *mut T, elements: usize, at: usize) {
        // SAFETY: no more is written than there is; the rest by the caller's promise.
        unsafe {
            if at + T::Lanes::<S>::COUNT <= elements {
                T::store::<S>(result, out.add(at));
            } else {
                T::store_part::<S>(result, out.add(at), self.cycle.lanes.min(elements - at));
            }
        }
    }

    /// The maxima of the logits of so many elements, lane by lane.
    ///
    /// # Safety
    /// As of [`read`](Self::read).
    #[inline(always)]
    unsafe fn maxima<S: Simd, T: Element>(&self, src: *const T, elements: usize, scale: T::Lanes<S>) -> T::Lanes<S> {
        let none = T::Real::NEG_INFINITY;
        let mut max = T::Lanes::<S>::splat(none);
        self.each(
            elements,
            #[inline(always)]
            // SAFETY: as promised by the caller.
            |at| max = unsafe { self.read::<S, T>(src, elements, at, scale, none) }.or_greater(max),
        );
        max
    }

    /// Σ exp(logit − reference) of so many elements, lane by lane and [scaled](Lanes::scaled_exp); `see(at, logit − reference, exp)` sees the
    /// terms. Those of the elements behind them are asked for.
    ///
    /// # Safety
    /// As of [`read`](Self::read).
    #[inline(always)]
    unsafe fn exps<S: Simd, T: Element>(
        &self,
        src: *const T,
        elements: usize,
        scale: T::Lanes<S>,
        reference: T::Lanes<S>,
        mut see: impl FnMut(usize, T::Lanes<S>, T::Lanes<S>),
    ) -> T::Lanes<S> {
        self.summed(
            elements,
            #[inline(always)]
            |at| {
                S::prefetch(src.wrapping_add(elements + at));
                // SAFETY: as promised by the caller.
                let logit = unsafe { self.read::<S, T>(src, elements, at, scale, T::Real::NEG_INFINITY) };
                let shifted = logit - reference;
                let exp = shifted.scaled_exp();
                see(at, shifted, exp);
                exp
            },
        )
    }

    /// Writes `f` of each vector of whole blocks, of `N` tensors, to `to`, which may be one of them.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and the tensors have so many elements.
    #[inline(always)]
    unsafe fn each_of_tiny<S: Simd, T: Element, const N: usize>(
        &self,
        from: [*const T; N],
        to: *mut T,
        elements: usize,
        f: impl Fn([T::Lanes<S>; N]) -> T::Lanes<S>,
    ) {
        let lanes = self.cycle.lanes;
        // SAFETY of the block: what is read and written are elements that there are; the rest by the caller's promise.
        unsafe {
            // A loop: what becomes of `map` has not the instructions of `S`.
            let read = {
                #[inline(always)]
                |at: usize| {
                    let mut read = [T::Lanes::<S>::splat(T::Real::ZERO); N];
                    for (read, from) in read.iter_mut().zip(from) {
                        S::prefetch(from.wrapping_add(at + AHEAD / size_of::<T>()));
                        *read = T::read::<S>(from.add(at), T::Lanes::<S>::COUNT.min(elements - at), T::Real::ZERO);
                    }
                    read
                }
            };
            let (mut at, mut next) = (0, read(0));
            while at < elements {
                let of = next;
                // Before it is written over by what passes the lanes in use.
                if at + lanes < elements {
                    next = read(at + lanes);
                }
                S::prefetch(to.wrapping_add(at + AHEAD / size_of::<T>()));
                self.write::<S, T>(f(of), to, elements, at);
                at += lanes;
            }
        }
    }

    /// The states of the lines, in each of their lanes, of those of their lanes.
    #[inline(always)]
    fn state_of<V: Lanes>(&self, state: &SoftmaxState<V>) -> SoftmaxState<V> {
        let max = self.cycle.max(state.max());
        // All relative to the same.
        let mut whole = SoftmaxState::from_parts(max, V::splat(V::Real::ZERO));
        whole.merge(*state);
        SoftmaxState::from_parts(max, self.cycle.sum(whole.sum()))
    }
}

/// How long the contiguous lines are that are taken so. Longer ones are taken as many at a time as a vector has lanes, which share divisions and
/// logarithms: 8192 lines of 8 f32s took an Emerald Rapids 33 µs and take 23, of their logarithms 56 and 39.
fn longest<V: Lanes>() -> usize {
    (V::COUNT / 2).min(5)
}

/// The same of gradients: longer ones fill half of a vector, which is enough where they are read once, or where a logarithm is taken of each vector.
fn longest_of_gradients<V: Lanes>(output: Output) -> usize {
    match output {
        Output::Probability if !V::SATURATES => V::COUNT,
        _ => V::COUNT / 2,
    }
}

/// The same where sums are all that is asked for, which of longer lines are found for as many at a time as a vector has lanes.
pub(super) fn longest_summed<V: Lanes>() -> usize {
    V::COUNT / 4 + 1
}

pub(super) struct Softmax<'a, T: Element> {
    of: Softmaxed<'a, T>,
    narrow: Narrow,
}

impl<T: Element> Softmax<'_, T> {
    /// Whole blocks, several in a vector.
    ///
    /// # Safety
    /// As of [`Pass::whole`].
    #[inline(always)]
    unsafe fn tiny<S: Simd>(&self, blocks: Range<usize>) {
        let (of, cycle, output) = (&self.of, &self.narrow.cycle, self.of.output);
        let (start, elements) = self.narrow.span_of(&blocks);
        let (src, out) = (of.src.at(start, elements).cast_const(), of.out.at(start, elements));
        let (scale, least) = (T::Lanes::<S>::splat(of.scale), T::Lanes::<S>::splat(of.least));
        // SAFETY: the elements are there; the rest by the caller's promise.
        unsafe {
            self.narrow.each_of_tiny::<S, T, 1>(
                [src],
                out,
                elements,
                #[inline(always)]
                |[x]| {
                    let logit = x * scale;
                    let shifted = logit - cycle.max(logit).or_greater(least);
                    let exp = shifted.scaled_exp();
                    let factor = output.factor(cycle.sum(exp));
                    output.of_kept(output.kept(shifted, exp), factor)
                },
            )
        }
    }

    /// A block of several vectors.
    ///
    /// # Safety
    /// As of [`Pass::whole`]; `kept` has room for a block and a vector more.
    #[inline(always)]
    unsafe fn kept<S: Simd>(&self, block: usize, kept: *mut T::Real) {
        let (of, narrow, output) = (&self.of, &self.narrow, self.of.output);
        let (start, elements) = narrow.span(block, &(0..of.lines.len));
        let (src, out) = (of.src.at(start, elements).cast_const(), of.out.at(start, elements));
        let (scale, least) = (T::Lanes::<S>::splat(of.scale), T::Lanes::<S>::splat(of.least));
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        unsafe {
            let max = narrow.cycle.max(narrow.maxima::<S, T>(src, elements, scale)).or_greater(least);
            let sum = narrow.exps::<S, T>(
                src,
                elements,
                scale,
                max,
                #[inline(always)]
                |at, shifted, exp| {
                    // Memory that is written is read first.
                    S::prefetch(out.wrapping_add(at));
                    // What passes the lanes in use is written over by the next.
                    output.kept(shifted, exp).store(kept.add(at));
                },
            );
            let factor = output.factor(narrow.cycle.sum(sum));
            narrow.each(
                elements,
                #[inline(always)]
                |at| {
                    let kept = T::Lanes::<S>::load(kept.add(at));
                    narrow.write::<S, T>(output.of_kept(kept, factor), out, elements, at);
                },
            );
        }
    }
}

impl<S: Simd, T: Element> Pass<S> for Softmax<'_, T> {
    type Reduced = SoftmaxState<T::Lanes<S>>;
    const WIDTH: usize = MAX_LANES;

    fn use_first(&self, elements: Range<usize>) {
        self.of.out.use_first(elements)
    }

    #[inline(always)]
    unsafe fn reduce(&self, block: usize, range: Range<usize>) -> Self::Reduced {
        // SAFETY: as promised by the caller.
        unsafe { self.narrow.reduce::<S, T>(&self.of.src, block, &range, T::Lanes::<S>::splat(self.of.scale)) }
    }

    #[inline(always)]
    unsafe fn write(&self, block: usize, range: Range<usize>, state: &Self::Reduced) {
        let (of, narrow) = (&self.of, &self.narrow);
        let (start, elements) = narrow.span(block, &range);
        let (src, out) = (of.src.at(start, elements).cast_const(), of.out.at(start, elements));
        let (scale, least) = (T::Lanes::<S>::splat(of.scale), T::Lanes::<S>::splat(of.least));
        let lowest = T::Lanes::<S>::splat(T::Real::LOWEST);
        let state = narrow.state_of(state);
        // Scaled; 0 where nothing is above −∞.
        let scaled = T::Lanes::<S>::splat(T::Real::ONE / T::Lanes::<S>::UNSCALE);
        let sum = state.sum() / (state.max().or_greater(lowest) - state.reference()).exp() * scaled;
        let (max, factor) = (state.max().or_greater(least), of.output.factor(sum));
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        unsafe {
            let read = {
                #[inline(always)]
                |at| narrow.read::<S, T>(src, elements, at, scale, T::Real::ZERO)
            };
            let mut next = read(0);
            narrow.each(
                elements,
                #[inline(always)]
                |at| {
                    let logit = next;
                    // Before it is written over by what passes the lanes in use.
                    if at + narrow.cycle.lanes < elements {
                        next = read(at + narrow.cycle.lanes);
                    }
                    narrow.write::<S, T>(of.output.of(logit - max, factor), out, elements, at);
                },
            );
        }
    }

    #[inline(always)]
    unsafe fn whole(&self, blocks: Range<usize>, len: usize) {
        // SAFETY of the block: as promised by the caller.
        unsafe {
            if self.narrow.tiny {
                return self.tiny::<S>(blocks);
            }
            let (_, block) = self.narrow.span(0, &(0..len));
            if block > MOST_KEPT {
                return Pass::<S>::one_by_one(self, blocks, len);
            }
            let mut scratch = Scratch::new();
            let kept = scratch.room(block + MAX_LANES);
            for block in blocks {
                self.kept::<S>(block, kept);
            }
        }
    }
}

impl Narrow {
    /// The states of the lanes of these rows of a block.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    pub unsafe fn reduce<S: Simd, T: Element>(
        &self,
        src: &Elements<T>,
        block: usize,
        rows: &Range<usize>,
        scale: T::Lanes<S>,
    ) -> SoftmaxState<T::Lanes<S>> {
        let mut state = SoftmaxState::empty();
        let (start, elements) = self.span(block, rows);
        let part = 4 * PLAINLY * self.cycle.lanes;
        for first in (0..elements).step_by(part) {
            let elements = part.min(elements - first);
            let src: *const T = src.at(start + first, elements);
            // SAFETY of the block: the elements are there; the rest by the caller's promise.
            unsafe {
                let reference = state.grow(self.maxima::<S, T>(src, elements, scale));
                let sum = self.exps::<S, T>(
                    src,
                    elements,
                    scale,
                    reference,
                    #[inline(always)]
                    |_, _, _| (),
                );
                state.add(sum.unscaled());
            }
        }
        state
    }

    /// The states of the lines of a block, in as many lanes from the first on, of those of the lanes.
    #[inline(always)]
    pub fn states_of_lines<V: Lanes>(&self, state: &SoftmaxState<V>) -> SoftmaxState<V> {
        let of_lanes = self.state_of(state);
        let line = &self.cycle.line;
        SoftmaxState::from_parts(of_lanes.max().in_order(line), of_lanes.sum().in_order(line))
    }

    /// Calls `found(first, count, maxima, sums)` with the numbers of some lines of these blocks, the first one's and how many, and what is
    /// found of each of them: its maximum, and Σ exp(x − reference), where that is the maximum or the lowest number.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    pub unsafe fn sums<S: Simd, T: Element>(
        &self,
        src: &Elements<T>,
        blocks: Range<usize>,
        mut found: impl FnMut(usize, usize, T::Lanes<S>, T::Lanes<S>),
    ) {
        let (cycle, inner) = (&self.cycle, self.lines.inner);
        let one = T::Lanes::<S>::splat(T::Real::ONE);
        let lowest = T::Lanes::<S>::splat(T::Real::LOWEST);
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        unsafe {
            if self.tiny {
                let (start, elements) = self.span_of(&blocks);
                let src: *const T = src.at(start, elements);
                let mut line = blocks.start * inner;
                self.each(
                    elements,
                    #[inline(always)]
                    |at| {
                        S::prefetch(src.wrapping_add(at + AHEAD / size_of::<T>()));
                        let x = self.read::<S, T>(src, elements, at, one, T::Real::ZERO);
                        let max = cycle.max(x);
                        let sum = cycle.sum((x - max.or_greater(lowest)).scaled_exp()).unscaled();
                        let count = cycle.lines.min(blocks.end * inner - line);
                        found(line, count, max.in_order(&cycle.line), sum.in_order(&cycle.line));
                        line += count;
                    },
                );
                return;
            }
            let (_, elements) = self.span(0, &(0..self.lines.len));
            for block in blocks {
                let src: *const T = src.at(block * elements, elements);
                let max = cycle.max(self.maxima::<S, T>(src, elements, one));
                let sum = self.exps::<S, T>(
                    src,
                    elements,
                    one,
                    max.or_greater(lowest),
                    #[inline(always)]
                    |_, _, _| (),
                );
                let sum = cycle.sum(sum).unscaled();
                found(block * inner, inner, max.in_order(&cycle.line), sum.in_order(&cycle.line));
            }
        }
    }
}

impl Narrow {
    /// Writes `f(of_lines, row, x)` of each vector of these blocks, with the number of the row that a lane is of, and what `of_lines(first,
    /// count)` says of the lines from this one on, from the first lane on, for the line of each lane.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and no other thread writes to the same blocks.
    #[inline(always)]
    pub unsafe fn map<S: Simd, T: Element, const N: usize>(
        &self,
        src: &Elements<T>,
        out: &Elements<T>,
        blocks: Range<usize>,
        of_lines: impl Fn(usize, usize) -> [T::Lanes<S>; N],
        f: impl Fn(&[T::Lanes<S>; N], T::Lanes<S>, T::Lanes<S>) -> T::Lanes<S>,
    ) {
        let (cycle, inner) = (&self.cycle, self.lines.inner);
        let one = T::Lanes::<S>::splat(T::Real::ONE);
        let mut rows = [T::Real::ZERO; MAX_LANES];
        for (row, &of_lane) in rows.iter_mut().zip(&cycle.row) {
            *row = T::Real::nearest(f64::from(of_lane));
        }
        let for_lanes = {
            #[inline(always)]
            |first: usize, count: usize| {
                let mut of = of_lines(first, count);
                for of in &mut of {
                    *of = of.in_order(&cycle.of_line);
                }
                of
            }
        };
        // What vectors are of in turn: all blocks, or each.
        let (turns, of_turn) = if self.tiny { (1, blocks.len()) } else { (blocks.len(), 1) };
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        unsafe {
            let first_rows = T::Lanes::<S>::load(rows.as_ptr());
            for turn in 0..turns {
                let first = blocks.start + turn * of_turn;
                let (start, elements) = self.span_of(&(first..first + of_turn));
                let (src, out) = (src.at(start, elements).cast_const(), out.at(start, elements));
                let (mut line, last) = (first * inner, (first + of_turn) * inner);
                let mut of = for_lanes(line, cycle.lines.min(last - line));
                let (mut row, step) = (first_rows, T::Lanes::<S>::splat(T::Real::nearest(cycle.rows as f64)));
                self.each(
                    elements,
                    #[inline(always)]
                    |at| {
                        S::prefetch(src.wrapping_add(at + AHEAD / size_of::<T>()));
                        S::prefetch(out.wrapping_add(at + AHEAD / size_of::<T>()));
                        let x = self.read::<S, T>(src, elements, at, one, T::Real::ZERO);
                        self.write::<S, T>(f(&of, row, x), out, elements, at);
                        if self.tiny {
                            line += cycle.lines;
                            if line < last {
                                of = for_lanes(line, cycle.lines.min(last - line));
                            }
                        } else {
                            row = row + step;
                        }
                    },
                );
            }
        }
    }
}

/// softmax: y·(g − Σ g·y); log-softmax: g − exp(y)·Σ g.
pub(super) struct Backward<'a, T> {
    of: super::Backward<'a, T>,
    narrow: Narrow,
}

impl<S: Simd, T: Element> Pass<S> for Backward<'_, T> {
    type Reduced = CompensatedSum<T::Lanes<S>>;
    const WIDTH: usize = MAX_LANES;

    fn use_first(&self, elements: Range<usize>) {
        self.of.out.use_first(elements)
    }

    #[inline(always)]
    unsafe fn reduce(&self, block: usize, range: Range<usize>) -> Self::Reduced {
        let (of, narrow, zero) = (&self.of, &self.narrow, T::Real::ZERO);
        let (start, elements) = narrow.span(block, &range);
        let [ys, gs] = [&of.y, &of.g].map(|from| from.at(start, elements).cast_const());
        let one = T::Lanes::<S>::splat(T::Real::ONE);
        let mut total = CompensatedSum::zero();
        total.add(narrow.summed(
            elements,
            #[inline(always)]
            |at| {
                S::prefetch(ys.wrapping_add(elements + at));
                S::prefetch(gs.wrapping_add(elements + at));
                // SAFETY of the block: the elements are there; the rest by the caller's promise.
                unsafe {
                    let g = narrow.read::<S, T>(gs, elements, at, one, zero);
                    match of.output {
                        Output::Probability => narrow.read::<S, T>(ys, elements, at, one, zero) * g,
                        Output::LogProbability => g,
                    }
                }
            },
        ));
        total
    }

    #[inline(always)]
    unsafe fn write(&self, block: usize, range: Range<usize>, sum: &Self::Reduced) {
        let (of, narrow, zero) = (&self.of, &self.narrow, T::Real::ZERO);
        let (start, elements) = narrow.span(block, &range);
        let [ys, gs] = [&of.y, &of.g].map(|from| from.at(start, elements).cast_const());
        let (out, sum) = (of.out.at(start, elements), narrow.cycle.sum(sum.value()));
        let one = T::Lanes::<S>::splat(T::Real::ONE);
        narrow.each(
            elements,
            #[inline(always)]
            |at| {
                // SAFETY of the block: the elements are there; the rest by the caller's promise.
                unsafe {
                    let y = narrow.read::<S, T>(ys, elements, at, one, zero);
                    let g = narrow.read::<S, T>(gs, elements, at, one, zero);
                    narrow.write::<S, T>(of.output.gradient(y, g, sum), out, elements, at);
                }
            },
        );
    }

    #[inline(always)]
    unsafe fn whole(&self, blocks: Range<usize>, len: usize) {
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        unsafe {
            if !self.narrow.tiny {
                return Pass::<S>::one_by_one(self, blocks, len);
            }
            let (of, cycle) = (&self.of, &self.narrow.cycle);
            let (start, elements) = self.narrow.span_of(&blocks);
            self.narrow.each_of_tiny::<S, T, 2>(
                [&of.y, &of.g].map(|from| from.at(start, elements).cast_const()),
                of.out.at(start, elements),
                elements,
                #[inline(always)]
                |[y, g]| {
                    let term = match of.output {
                        Output::Probability => y * g,
                        Output::LogProbability => g,
                    };
                    of.output.gradient(y, g, cycle.sum(term))
                },
            );
        }
    }
}

/// The gradients of scores in blocks of too many elements to keep their exponentials, and such as several threads share.
struct LongScores<'a, T: Element> {
    of: ScoresBackward<'a, T>,
    narrow: Narrow,
}

impl<S: Simd, T: Element> Pass<S> for LongScores<'_, T> {
    type Reduced = Weighted<T::Lanes<S>>;
    const WIDTH: usize = MAX_LANES;

    fn use_first(&self, elements: Range<usize>) {
        self.of.out.use_first(elements)
    }

    #[inline(always)]
    unsafe fn reduce(&self, block: usize, range: Range<usize>) -> Self::Reduced {
        let (of, narrow) = (&self.of, &self.narrow);
        let (start, elements) = narrow.span(block, &range);
        let scale = T::Lanes::<S>::splat(of.scale);
        let mut sums = Weighted::empty(of.output == Output::Probability);
        let part = PLAINLY * narrow.cycle.lanes;
        for first in (0..elements).step_by(part) {
            let elements = part.min(elements - first);
            let [scores, gs] = [&of.scores, &of.g].map(|from| from.at(start + first, elements).cast_const());
            let mut dot = T::Lanes::<S>::splat(T::Real::ZERO);
            // SAFETY of the block: the elements are there; the rest by the caller's promise.
            unsafe {
                let reference = sums.grow(narrow.maxima::<S, T>(scores, elements, scale));
                let sum = narrow.exps::<S, T>(
                    scores,
                    elements,
                    scale,
                    reference,
                    #[inline(always)]
                    |at, _, exp| {
                        S::prefetch(gs.wrapping_add(elements + at));
                        let [_, g] = narrow.logit_and_gradient::<S, T>([scores, gs], elements, at, scale);
                        // Unscaled first: the product of a great gradient would be infinite.
                        dot = match of.output {
                            Output::Probability => exp.unscaled() * g + dot,
                            Output::LogProbability => g + dot,
                        };
                    },
                );
                sums.add(sum.unscaled(), dot);
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn write(&self, block: usize, range: Range<usize>, sums: &Self::Reduced) {
        let (of, narrow) = (&self.of, &self.narrow);
        let (start, elements) = narrow.span(block, &range);
        let [scores, gs] = [&of.scores, &of.g].map(|from| from.at(start, elements).cast_const());
        let (out, scale) = (of.out.at(start, elements), T::Lanes::<S>::splat(of.scale));
        let (zero, lowest) = (T::Lanes::<S>::splat(T::Real::ZERO), T::Lanes::<S>::splat(T::Real::LOWEST));
        // All relative to the same.
        let max = narrow.cycle.max(sums.state.max());
        let relative = of.output == Output::Probability;
        let mut whole = Weighted::from_parts(SoftmaxState::from_parts(max, zero), zero, relative);
        whole.merge(*sums);
        let (sum, dot) = (narrow.cycle.sum(whole.state.sum()), narrow.cycle.sum(whole.dot()));
        let total = if relative { dot / sum } else { dot };
        let reference = SoftmaxState::from_parts(max, zero).reference();
        let max = max.or_greater(lowest);
        let scaled = T::Lanes::<S>::splat(T::Real::ONE / T::Lanes::<S>::UNSCALE);
        let inverse = Output::Probability.factor(sum / (max - reference).exp() * scaled);
        narrow.each(
            elements,
            #[inline(always)]
            |at| {
                // SAFETY of the block: the elements are there; the rest by the caller's promise.
                unsafe {
                    let [z, g] = narrow.logit_and_gradient::<S, T>([scores, gs], elements, at, scale);
                    let p = (z - max).scaled_exp() * inverse;
                    let result = of.output.logit_gradient(p, g, total) * scale;
                    narrow.write::<S, T>(z.if_less(lowest, zero, result), out, elements, at);
                }
            },
        );
    }
}

impl Narrow {
    /// The vectors of logits and of their gradients from element `at` of so many on; those of what takes no part are 0.
    ///
    /// # Safety
    /// As of [`read`](Self::read).
    #[inline(always)]
    unsafe fn logit_and_gradient<S: Simd, T: Element>(
        &self,
        [scores, gs]: [*const T; 2],
        elements: usize,
        at: usize,
        scale: T::Lanes<S>,
    ) -> [T::Lanes<S>; 2] {
        let (zero, one) = (T::Lanes::<S>::splat(T::Real::ZERO), T::Lanes::<S>::splat(T::Real::ONE));
        let lowest = T::Lanes::<S>::splat(T::Real::LOWEST);
        // SAFETY: as promised by the caller.
        unsafe {
            let z = self.read::<S, T>(scores, elements, at, scale, T::Real::NEG_INFINITY);
            let g = self.read::<S, T>(gs, elements, at, one, T::Real::ZERO);
            [z, z.if_less(lowest, zero, g)]
        }
    }
}

impl<T: Element> ScoresBackward<'_, T> {
    /// Takes the lines, if they [are taken so](Narrow::of), and answers whether they are.
    pub fn narrow<S: Simd>(&self) -> bool {
        let lines = self.lines;
        let block = lines.len * lines.inner;
        let Some(narrow) = Narrow::of::<T::Lanes<S>>(lines, longest_of_gradients::<T::Lanes<S>>(self.output)) else {
            return false;
        };
        if block > MOST_KEPT {
            run::<S, _>(&LongScores { of: *self, narrow }, lines, true);
            return true;
        }
        let use_first = |elements| self.out.use_first(elements);
        run_units::<S>(
            lines.outer,
            block,
            Some(&use_first),
            #[inline(always)]
            // SAFETY: inside of `enter`, and each block is visited once.
            |blocks| unsafe { self.blocks::<S>(&narrow, blocks) },
        );
        true
    }

    /// # Safety
    /// The CPU has the instructions of `S`, and no other thread writes to the same blocks.
    #[inline(always)]
    unsafe fn blocks<S: Simd>(&self, narrow: &Narrow, blocks: Range<usize>) {
        let (start, elements) = narrow.span_of(&blocks);
        let [scores, gs] = [&self.scores, &self.g].map(|from| from.at(start, elements).cast_const());
        let (out, output, cycle) = (self.out.at(start, elements), self.output, &narrow.cycle);
        let scale = T::Lanes::<S>::splat(self.scale);
        let (zero, lowest) = (T::Lanes::<S>::splat(T::Real::ZERO), T::Lanes::<S>::splat(T::Real::LOWEST));
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        unsafe {
            if narrow.tiny {
                narrow.each_of_tiny::<S, T, 2>(
                    [scores, gs],
                    out,
                    elements,
                    #[inline(always)]
                    |[x, g]| {
                        let z = x * scale;
                        // What does not take part has no gradient.
                        let g = z.if_less(lowest, zero, g);
                        let exp = (z - cycle.max(z).or_greater(lowest)).scaled_exp();
                        let p = exp * Output::Probability.factor(cycle.sum(exp));
                        let term = if output == Output::Probability { p * g } else { g };
                        let gradient = output.logit_gradient(p, g, cycle.sum(term)) * scale;
                        z.if_less(lowest, zero, gradient)
                    },
                );
                return;
            }
            let block = elements / blocks.len();
            let mut scratch = Scratch::new();
            let kept: *mut T::Real = scratch.room(block + MAX_LANES);
            for start in (0..elements).step_by(block) {
                let (scores, gs, out) = (scores.add(start), gs.add(start), out.add(start));
                let both = {
                    #[inline(always)]
                    |at| {
                        S::prefetch(gs.wrapping_add(block + at));
                        narrow.logit_and_gradient::<S, T>([scores, gs], block, at, scale)
                    }
                };
                let max = cycle.max(narrow.maxima::<S, T>(scores, block, scale)).or_greater(lowest);
                let sum = narrow.exps::<S, T>(
                    scores,
                    block,
                    scale,
                    max,
                    #[inline(always)]
                    |at, _, exp| exp.store(kept.add(at)),
                );
                let inverse = Output::Probability.factor(cycle.sum(sum));
                let total = narrow.summed(
                    block,
                    #[inline(always)]
                    |at| {
                        let [_, g] = both(at);
                        match output {
                            Output::Probability => T::Lanes::<S>::load(kept.add(at)) * inverse * g,
                            Output::LogProbability => g,
                        }
                    },
                );
                let total = cycle.sum(total);
                narrow.each(
                    block,
                    #[inline(always)]
                    |at| {
                        S::prefetch(out.wrapping_add(block + at));
                        let [z, g] = both(at);
                        let p = T::Lanes::<S>::load(kept.add(at)) * inverse;
                        let result = output.logit_gradient(p, g, total) * scale;
                        narrow.write::<S, T>(z.if_less(lowest, zero, result), out, block, at);
                    },
                );
            }
        }
    }
}

impl<T: Element> Softmaxed<'_, T> {
    /// Takes the lines, if they [are taken so](Narrow::of), and answers whether they are.
    pub fn narrow<S: Simd>(&self) -> bool {
        let narrow = Narrow::of::<T::Lanes<S>>(self.lines, longest::<T::Lanes<S>>());
        if let Some(narrow) = narrow {
            run::<S, _>(&Softmax { of: *self, narrow }, self.lines, true);
        }
        narrow.is_some()
    }
}

impl<T: Element> super::Backward<'_, T> {
    /// Takes the lines, if they [are taken so](Narrow::of), and answers whether they are.
    pub fn narrow<S: Simd>(&self) -> bool {
        let narrow = Narrow::of::<T::Lanes<S>>(self.lines, longest_of_gradients::<T::Lanes<S>>(Output::Probability));
        if let Some(narrow) = narrow {
            run::<S, _>(&Backward { of: *self, narrow }, self.lines, true);
        }
        narrow.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::level::{Level, Task};

    /// Each way in which rows of lines fit into a vector: lanes come to what those of their line do, the same in all of them.
    struct EveryCycle;

    impl EveryCycle {
        fn check<S: Simd, V: Lanes>() {
            for (rows, row) in (1..=V::COUNT).flat_map(|rows| (1..=V::COUNT / rows).map(move |row| (rows, row))) {
                let blocks = V::COUNT / (rows * row);
                let cycle = Cycle::new(blocks, rows, row);
                let numbers: Vec<f64> = (0..V::COUNT).map(|lane| (lane * lane % 31) as f64 - 9.0).collect();
                let (mut max, mut sum, mut of_lines) = (numbers.clone(), numbers.clone(), numbers.clone());
                let made = |to: &mut [f64], of: V| {
                    let mut lanes = [V::Real::ZERO; MAX_LANES];
                    // SAFETY: no vector has more lanes.
                    unsafe { of.store(lanes.as_mut_ptr()) };
                    to.iter_mut().zip(lanes).for_each(|(to, lane)| *to = number(lane));
                };
                let reals: Vec<V::Real> = numbers.iter().map(|&x| V::Real::nearest(x)).collect();
                // SAFETY: a vector is there, and the level that runs a task.
                unsafe {
                    S::enter(
                        #[inline(always)]
                        || {
                            let x = V::load(reals.as_ptr());
                            made(&mut max, cycle.max(x));
                            made(&mut sum, cycle.sum(x));
                            made(&mut of_lines, x.in_order(&cycle.line));
                        },
                    )
                }
                let what = format!("{rows} rows of {row} in {} lanes", V::COUNT);
                assert_eq!((cycle.lanes, cycle.lines), (blocks * rows * row, blocks * row), "{what}");
                for lane in 0..cycle.lanes {
                    let first = lane / (rows * row) * rows * row + lane % row;
                    let of_line = || (0..rows).map(|j| numbers[first + j * row]);
                    assert_eq!(max[lane], of_line().fold(f64::NEG_INFINITY, f64::max), "maximum of {what}");
                    assert_eq!(sum[lane], of_line().sum::<f64>(), "sum of {what}");
                }
                for line in 0..cycle.lines {
                    assert_eq!(of_lines[line], numbers[line / row * rows * row + line % row], "lines of {what}");
                }
            }
        }
    }

    /// A whole number.
    fn number<R: Real>(x: R) -> f64 {
        (-1000..1000).map(f64::from).find(|&number| !x.differs(R::nearest(number))).expect("a sum of small numbers")
    }

    impl Task for EveryCycle {
        fn run<S: Simd>(self) {
            Self::check::<S, S::F32>();
            Self::check::<S, S::F64>();
        }
    }

    #[test]
    fn lanes_meet_those_of_their_line() {
        Level::available().into_iter().for_each(|level| level.run(EveryCycle));
    }
}
