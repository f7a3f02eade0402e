//! Lines along another dimension, of which a strip is walked together.

use super::any::{Any, Last, Make, Part, Wide};
use super::logits::{same_bytes, Call, Run, Steps};
use crate::cpu::columns::{self, flat, States, Strip, ROWS, WIDTH};
use crate::cpu::few_rows;
use crate::cpu::held::{self, Again, HeldStrip, Room};
use crate::cpu::lanes::{Lanes, Pack, MAX_LANES};
use crate::cpu::level::Simd;
use crate::cpu::memory::{CacheLines, Elements, Numbers};
use crate::cpu::random::{self, PER_COUNTER};
use crate::cpu::statistics::one;
use crate::cpu::{Element, Pass};
use crate::fused::Place;
use crate::state::{Number, Real, SoftmaxState};
use std::mem::MaybeUninit;
use std::ops::Range;

/// How many rows the memory system is to be ahead of the arithmetic.
const AHEAD_ROWS: usize = 2 * ROWS;
/// A row of a strip, with room for whole vectors.
pub(super) const ROW: usize = WIDTH + MAX_LANES;

/// Lines of a strip whose places in the tensors are evenly apart.
struct Segment {
    /// The first one's place in the strip.
    at: usize,
    len: usize,
    place: Place,
}

/// A strip of lines side by side, along another dimension than the last.
pub(super) struct Side<'a, T: Element> {
    pub(super) call: Call<'a, T>,
    pub(super) strip: Strip,
    /// The number of the first line.
    pub(super) line: usize,
    segments: Vec<Segment>,
    /// Of neighbouring lines.
    steps: Steps,
    sink_step: usize,
}

impl<'a, T: Element> Side<'a, T> {
    pub(super) fn new(call: Call<'a, T>, unit: usize) -> Self {
        let lines = call.geometry.lines;
        let strip = Strip::new(unit, lines);
        let line = Strip::first_line(unit, lines);
        // The last dimension is one of them, and varies fastest.
        let (size, (bias, mask), sink_step) = match call.geometry.axes.last() {
            Some(axis) => (axis.size, (axis.bias, axis.mask), axis.sink),
            None => (1, (0, 0), 0),
        };
        let mut segments = Vec::new();
        let mut at = 0;
        while at < strip.width {
            let place = call.geometry.place(line + at);
            let len = (size - (line + at) % size).min(strip.width - at);
            segments.push(Segment { at, len, place });
            at += len;
        }
        let steps = Steps { bias, mask, ahead: AHEAD_ROWS * strip.stride };
        Self { call, strip, line, segments, steps, sink_step }
    }

    /// How many vectors a row is.
    pub(super) fn vectors<S: Simd>(&self) -> usize {
        self.strip.width.div_ceil(T::Lanes::<S>::COUNT)
    }

    /// Makes the logits of a group of rows.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and there is room for each of the rows, up to a whole vector.
    #[inline(always)]
    pub(super) unsafe fn logits<S: Simd>(&self, group: &Group<T::Real>, runs: &mut Vec<Run<T::Real>>) {
        let (bias_step, mask_step) = (self.call.geometry.bias_step, self.call.geometry.mask_step);
        runs.clear();
        for (i, j) in group.numbers().enumerate() {
            // What passes a segment is written again by the next.
            for segment in &self.segments {
                runs.push(Run {
                    scores: self.strip.row(j) + segment.at,
                    bias: segment.place.bias + j * bias_step,
                    mask: segment.place.mask + j * mask_step,
                    len: segment.len,
                    z: group.row(i).wrapping_add(segment.at),
                    max: T::Real::NEG_INFINITY,
                });
            }
        }
        // SAFETY: there is the room; the rest by the caller's promise.
        unsafe { self.call.logits::<S>(runs, self.steps) }
        if self.segments.len() > 1 {
            // Vectors were written from a segment's first element on, and are read from the strip's on.
            for i in 0..group.rows {
                for at in self.strip.width..self.vectors::<S>() * T::Lanes::<S>::COUNT {
                    // SAFETY: there is room for whole vectors.
                    unsafe { group.row(i).wrapping_add(at).write(T::Real::NEG_INFINITY) }
                }
            }
        }
    }

    /// The sinks of the lines, if there are some, and −∞ up to a whole vector.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    pub(super) unsafe fn sinks<S: Simd>(&self) -> Option<Vec<T::Real>> {
        self.call.sinks?;
        let mut sinks = vec![T::Real::NEG_INFINITY; self.vectors::<S>() * T::Lanes::<S>::COUNT];
        for segment in &self.segments {
            for (i, to) in sinks[segment.at..][..segment.len].iter_mut().enumerate() {
                // SAFETY: as promised by the caller.
                *to = unsafe { self.call.sink::<S>(segment.place.sink + i * self.sink_step) }?;
            }
        }
        Some(sinks)
    }

    /// Which elements are kept of the group of rows that `j` is one of: those of row `i` of the group in `kept[i]`.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    pub(super) unsafe fn keep<S: Simd>(&self, j: usize, kept: &mut [[u8; ROW]; PER_COUNTER]) {
        if let Some(dropout) = self.call.options.dropout {
            // SAFETY: as promised by the caller.
            unsafe { random::across::<S, ROW>(dropout, j / PER_COUNTER, self.line, self.strip.width, kept) };
        }
    }

    /// The row of what [`keep`](Self::keep) wrote.
    pub(super) fn kept(&self, j: usize, kept: &[[u8; ROW]; PER_COUNTER]) -> Option<*const u8> {
        self.call.options.dropout.map(|_| kept[j % PER_COUNTER].as_ptr())
    }
}

/// Rows that are taken together, [`ROWS`] at most.
#[derive(Clone, Copy)]
pub(super) struct Group<R> {
    /// The number of the first row.
    first: usize,
    pub(super) rows: usize,
    start: *mut R,
}

impl<R: Real> Group<R> {
    pub(super) fn new(first: usize, rows: usize, memory: &mut GroupMemory<R>) -> Self {
        Self { first, rows, start: memory.0.as_mut_ptr().cast() }
    }

    pub(super) fn numbers(&self) -> Range<usize> {
        self.first..self.first + self.rows
    }

    #[inline(always)]
    pub(super) fn row(&self, i: usize) -> *mut R {
        self.start.wrapping_add(i * ROW)
    }

    /// The vectors of the rows from element `at` on, folded.
    ///
    /// # Safety
    /// The rows are there, and the vectors in them.
    #[inline(always)]
    pub(super) unsafe fn across<V: Lanes<Real = R>>(&self, at: usize, init: V, step: impl Fn(V, V) -> V) -> V {
        let mut folded = init;
        for i in 0..self.rows {
            // SAFETY: as promised by the caller.
            folded = step(folded, unsafe { V::load(self.row(i).wrapping_add(at)) });
        }
        folded
    }
}

/// Rows that are a vector longer than a strip.
type GroupMemory<R> = CacheLines<[[MaybeUninit<R>; ROW]; ROWS]>;

pub(super) fn group_memory<R>() -> GroupMemory<R> {
    CacheLines([const { [const { MaybeUninit::uninit() }; ROW] }; ROWS])
}

/// Lines along another dimension.
pub(super) struct Columns<'a, T: Element> {
    pub(super) call: Call<'a, T>,
    pub(super) out: Any<'a>,
}

/// What the first row of a segment is made from; that of other rows is evenly apart.
#[derive(Clone, Copy)]
struct Origin<T: Element> {
    scores: *const T,
    bias: *const T,
    mask: *const u8,
}

/// What is to be done with the logits of a strip.
enum Todo<'a, V: Lanes, T: Element> {
    /// They are to be added to the states, and their exponentials are to be held if there is where.
    Reduce(&'a mut States<V>, Option<&'a mut HeldStrip<V>>),
    /// The results are to be written, with the maxima and scales.
    Write(Elements<'a, T>, &'a [Numbers<T::Real>; 2]),
}

impl<T: Element> Columns<'_, T> {
    /// Whether results are probabilities of the scores' dtype, whose places these are, and vectors of logits are made from
    /// vectors in memory, or from one number, or byte, for all of a vector.
    fn direct<S: Simd>(&self, side: &Side<T>) -> Option<Elements<'_, T>> {
        let lanes = T::Lanes::<S>::COUNT;
        let whole = side.segments.split_last().is_some_and(|(_, rest)| rest.iter().all(|of| of.len % lanes == 0));
        let neighbours = side.steps.bias <= 1 && side.steps.mask <= 1;
        T::of(&self.out).filter(|_| whole && neighbours && !self.call.is_log())
    }

    /// The rows `range` of a strip of which [`direct`](Self::direct) is true.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`; to write, as of [`Pass::write`].
    #[inline(always)]
    unsafe fn directly<S: Simd>(&self, side: &Side<T>, range: Range<usize>, todo: Todo<T::Lanes<S>, T>) {
        let (zero, none) = (T::Real::ZERO, T::Real::NEG_INFINITY);
        let scale = T::Lanes::<S>::splat(self.call.scale);
        let cap: Option<[T::Lanes<S>; 2]> = self.call.cap.map(|(inverse, cap)| [inverse, cap].map(Number::splat));
        let (stride, bias_stride, mask_stride) =
            (side.strip.stride, self.call.geometry.bias_step, self.call.geometry.mask_step);
        let (bias, mask) = (self.call.bias.is_some(), self.call.mask.is_some());
        let neighbours = side.steps.bias == 1;
        let mask_neighbours = side.steps.mask == 1;
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        // One loop for each combination, in a function of its own: what it captures is moved there, or it would be fetched again
        // for each vector.
        unsafe {
            let read = {
                #[inline(always)]
                move |of: &Origin<T>, j: usize, i: usize, count: usize| {
                    T::read::<S>(of.scores.add(j * stride + i), count, zero)
                }
            };
            let read_bias = {
                #[inline(always)]
                move |of: &Origin<T>, j: usize, i: usize, count: usize| {
                    T::read::<S>(of.bias.add(j * bias_stride + i), count, zero)
                }
            };
            let bias_of_row = {
                #[inline(always)]
                move |of: &Origin<T>, j: usize| T::Lanes::<S>::splat(one::<S, T>(of.bias.add(j * bias_stride)))
            };
            let mask_of_row = {
                #[inline(always)]
                move |of: &Origin<T>, j: usize| same_bytes(*of.mask.add(j * mask_stride)).as_ptr()
            };
            // What later rows are made from is asked for beside the exponentials of earlier ones: beside the logits it was 0.2 of a
            // softmax. Without branches: with one in the loop its constants leave the registers.
            let ahead = {
                #[inline(always)]
                move |of: &Origin<T>, j: usize, i: usize| {
                    S::prefetch(of.scores.wrapping_add(j.wrapping_mul(stride).wrapping_add(i)))
                }
            };
            let bias_ahead = {
                #[inline(always)]
                move |of: &Origin<T>, j: usize, i: usize| {
                    ahead(of, j, i);
                    let (from, stride) = if bias && neighbours { (of.bias, bias_stride) } else { (of.scores, stride) };
                    S::prefetch(from.wrapping_add(j.wrapping_mul(stride).wrapping_add(i)));
                }
            };
            match (cap, bias, mask) {
                (None, false, false) => self.rows::<S>(
                    side,
                    range,
                    todo,
                    #[inline(always)]
                    move |of, j, i, count| read(of, j, i, count) * scale,
                    ahead,
                ),
                (None, true, false) if S::SPECIALISED && neighbours => self.rows::<S>(
                    side,
                    range,
                    todo,
                    #[inline(always)]
                    move |of, j, i, count| read(of, j, i, count).mul_add(scale, read_bias(of, j, i, count)),
                    bias_ahead,
                ),
                (None, true, false) if S::SPECIALISED => self.rows::<S>(
                    side,
                    range,
                    todo,
                    #[inline(always)]
                    move |of, j, i, count| read(of, j, i, count).mul_add(scale, bias_of_row(of, j)),
                    ahead,
                ),
                (Some([inverse, cap]), false, false) if S::SPECIALISED => self.rows::<S>(
                    side,
                    range,
                    todo,
                    #[inline(always)]
                    move |of, j, i, count| (read(of, j, i, count) * inverse).tanh() * cap,
                    ahead,
                ),
                (None, false, true) if S::SPECIALISED && mask_neighbours => self.rows::<S>(
                    side,
                    range,
                    todo,
                    #[inline(always)]
                    move |of, j, i, count| {
                        (read(of, j, i, count) * scale).where_some_kept(of.mask.add(j * mask_stride + i), count, none)
                    },
                    ahead,
                ),
                (None, false, true) if S::SPECIALISED => self.rows::<S>(
                    side,
                    range,
                    todo,
                    #[inline(always)]
                    move |of, j, i, count| {
                        (read(of, j, i, count) * scale).where_some_kept(mask_of_row(of, j), count, none)
                    },
                    ahead,
                ),
                (cap, ..) => self.rows::<S>(
                    side,
                    range,
                    todo,
                    #[inline(always)]
                    move |of, j, i, count| {
                        let x = read(of, j, i, count);
                        let x = match cap {
                            Some([inverse, cap]) => (x * inverse).tanh() * cap,
                            None => x * scale,
                        };
                        let logit = match (bias, neighbours) {
                            (true, true) => x + read_bias(of, j, i, count),
                            (true, false) => x + bias_of_row(of, j),
                            (false, _) => x,
                        };
                        match (mask, mask_neighbours) {
                            (true, true) => logit.where_some_kept(of.mask.add(j * mask_stride + i), count, none),
                            (true, false) => logit.where_some_kept(mask_of_row(of, j), count, none),
                            (false, _) => logit,
                        }
                    },
                    bias_ahead,
                ),
            }
        }
    }

    /// `logit(of, row, start, count)` makes a vector of logits; the numbers of rows are from the first of the range on.
    ///
    /// # Safety
    /// As of [`directly`](Self::directly).
    #[inline(never)]
    unsafe fn rows<S: Simd>(
        &self,
        side: &Side<T>,
        range: Range<usize>,
        todo: Todo<T::Lanes<S>, T>,
        logit: impl Fn(&Origin<T>, usize, usize, usize) -> T::Lanes<S> + Copy,
        ahead: impl Fn(&Origin<T>, usize, usize) + Copy,
    ) {
        // SAFETY: as promised by the caller. A function of its own for each kind of logits, entered anew.
        unsafe {
            S::enter(
                #[inline(always)]
                || self.rows_inside::<S>(side, range, todo, logit, ahead),
            )
        }
    }

    /// # Safety
    /// As of [`directly`](Self::directly).
    #[inline(always)]
    unsafe fn rows_inside<S: Simd>(
        &self,
        side: &Side<T>,
        range: Range<usize>,
        todo: Todo<T::Lanes<S>, T>,
        logit: impl Fn(&Origin<T>, usize, usize, usize) -> T::Lanes<S> + Copy,
        ahead: impl Fn(&Origin<T>, usize, usize) + Copy,
    ) {
        let (call, stride, rows) = (&self.call, side.strip.stride, range.len());
        let origin = {
            #[inline(always)]
            |segment: &Segment| {
                let last = rows - 1;
                let (bias_step, mask_step) = (call.geometry.bias_step, call.geometry.mask_step);
                let span = |row: usize, step: usize| last * row + (segment.len - 1) * step + 1;
                Origin {
                    scores: call.scores.at(side.strip.row(range.start) + segment.at, span(stride, 1)),
                    bias: call.bias.map_or(std::ptr::null(), |bias| {
                        bias.at(segment.place.bias + range.start * bias_step, span(bias_step, side.steps.bias))
                    }),
                    mask: call.mask.map_or(std::ptr::null(), |mask| {
                        mask.at(segment.place.mask + range.start * mask_step, span(mask_step, side.steps.mask))
                    }),
                }
            }
        };
        let origins: Vec<Origin<T>> = side.segments.iter().map(origin).collect();
        // SAFETY of the block: the elements are there, and `max` and `scale` are a vector longer than the strip; the rest by the
        // caller's promise.
        unsafe {
            match todo {
                Todo::Reduce(states, mut held) => {
                    let mut memory = group_memory::<T::Real>();
                    let most = States::<T::Lanes<S>>::group();
                    for first in (0..rows).step_by(most) {
                        let group_rows = most.min(rows - first);
                        let held_at = held.as_mut().map(|held| held.group(first));
                        for (segment, &of) in side.segments.iter().zip(&origins) {
                            let lines = segment.at..segment.at + segment.len;
                            let ahead = {
                                #[inline(always)]
                                move |row: usize, i: usize| ahead(&of, first + row + ROWS, i)
                            };
                            if T::Lanes::<S>::SATURATES {
                                // Logits are made once, but for the first and what moves a reference.
                                let sample = if first == 0 { ROWS } else { 0 };
                                let logit = {
                                    #[inline(always)]
                                    move |row: usize, i: usize, count: usize| logit(&of, first + row, i, count)
                                };
                                // A loop of its own for each.
                                if let Some(room) = held_at {
                                    let hold = held::hold::<S, _>(room.starting_at(segment.at));
                                    states.take(
                                        lines,
                                        group_rows,
                                        sample,
                                        logit,
                                        #[inline(always)]
                                        move |row, i, count, exp| {
                                            ahead(row, i);
                                            hold(row, i, count, exp);
                                        },
                                    );
                                } else {
                                    states.take(
                                        lines,
                                        group_rows,
                                        sample,
                                        logit,
                                        #[inline(always)]
                                        move |row, i, _, _| ahead(row, i),
                                    );
                                }
                                continue;
                            }
                            let group = Group::new(first, group_rows, &mut memory);
                            let z = group.row(0).add(segment.at);
                            // For nobody in place of the logits.
                            let nowhere = Room { start: group.row(0), pitch: ROW, ahead: 0 };
                            let room = held_at.unwrap_or(nowhere);
                            states.grow(
                                lines.clone(),
                                group.rows,
                                #[inline(always)]
                                move |row, i, count| {
                                    let logit = logit(&of, first + row, i, count);
                                    logit.store(z.add(row * ROW + i));
                                    logit
                                },
                            );
                            states.add(
                                lines,
                                group.rows,
                                #[inline(always)]
                                move |row, i, _| {
                                    ahead(row, i);
                                    T::Lanes::<S>::load(z.add(row * ROW + i))
                                },
                                held::hold::<S, _>(room.starting_at(segment.at)),
                            );
                        }
                        if let Some(held) = &mut held {
                            held.push(first, group_rows, states.moved().then_some(&states.references));
                        }
                    }
                }
                Todo::Write(out, [max, scale]) => {
                    let (start, len) = side.strip.span(&range);
                    let (out, limit) = (out.at(start, len), T::Lanes::<S>::splat(call.most()));
                    let streams = if call.bias.is_some() { 3 } else { 2 };
                    let ahead_rows = columns::ahead_rows(side.strip.width, streams);
                    let ahead_out = ahead_rows * stride;
                    let result_of = {
                        #[inline(always)]
                        move |segment: &Segment, of: Origin<T>| {
                            let (max, scale) = (max[segment.at..].as_ptr(), scale[segment.at..].as_ptr());
                            let out = out.add(segment.at);
                            #[inline(always)]
                            move |j: usize, i: usize, count: usize| {
                                // Memory that is written is read first.
                                S::prefetch(out.wrapping_add(j * stride + i).wrapping_sub(ahead_out));
                                ahead(&of, j.wrapping_sub(ahead_rows), i);
                                let z = logit(&of, j, i, count);
                                let exp = (z - T::Lanes::<S>::load(max.add(i))).scaled_exp();
                                let result = exp * T::Lanes::<S>::load(scale.add(i));
                                // As of softmax
                                if T::Lanes::<S>::SATURATES {
                                    result.at_most(limit)
                                } else {
                                    result
                                }
                            }
                        }
                    };
                    if call.options.dropout.is_none() {
                        for (segment, &of) in side.segments.iter().zip(&origins) {
                            let result = result_of(segment, of);
                            for rows in columns::from_the_end(rows, ahead_rows) {
                                columns::write_rows::<S, T>(out.add(segment.at), stride, segment.len, rows, result);
                            }
                        }
                        return;
                    }
                    // Of two groups of rows: a CPU waits for bytes that it has only just written and reads in other portions.
                    let mut kept = [[[0; ROW]; PER_COUNTER]; 2];
                    let (first, last) = (range.start / PER_COUNTER, (range.end - 1) / PER_COUNTER);
                    side.keep::<S>(range.end - 1, &mut kept[last % 2]);
                    // Groups of rows whose dropout comes from the same counters, from the last on.
                    for group in (first..=last).rev() {
                        let rows = group * PER_COUNTER..(group + 1) * PER_COUNTER;
                        if group > first {
                            side.keep::<S>(rows.start - 1, &mut kept[(group - 1) % 2]);
                        }
                        for (segment, &of) in side.segments.iter().zip(&origins) {
                            let result = result_of(segment, of);
                            for row in rows.start.max(range.start)..rows.end.min(range.end) {
                                let j = row - range.start;
                                columns::write_kept::<S, T>(
                                    out.add(j * stride + segment.at),
                                    segment.len,
                                    kept[group % 2][row % PER_COUNTER][segment.at..].as_ptr(),
                                    #[inline(always)]
                                    |i, count| result(j, i, count),
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    /// A strip of which [`direct`](Self::direct) is true, in memory for what is held.
    ///
    /// # Safety
    /// As of [`Pass::whole`].
    #[inline(always)]
    unsafe fn holding<S: Simd>(&self, side: &Side<T>, len: usize, out: Elements<T>, held: &mut HeldStrip<T::Lanes<S>>) {
        let (start, elements) = side.strip.span(&(0..len));
        let out = out.at(start, elements);
        let mut kept = [[0; ROW]; PER_COUNTER];
        let mut states = States::empty(side.strip.width);
        held.begin(&side.strip, self.call.scores.at(start, elements), out);
        // SAFETY of the block: each row is written before it is read; the rest by the caller's promise.
        unsafe {
            self.directly::<S>(side, 0..len, Todo::Reduce(&mut states, Some(held)));
            let scales = Self::scales::<S>(side, &states.states, true);
            let keep = self.call.options.dropout.map(|_| {
                #[inline(always)]
                |j: usize| {
                    if j.is_multiple_of(PER_COUNTER) {
                        side.keep::<S>(j, &mut kept);
                    }
                    kept[j % PER_COUNTER].as_ptr()
                }
            });
            let place = (len, side.strip.stride);
            held::write::<S, T>(held, &scales, self.call.most(), out, place, keep);
        }
    }

    /// Makes the logits of these rows a group at a time, and adds them to the states.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn states<S: Simd>(side: &Side<T>, range: Range<usize>) -> Vec<SoftmaxState<T::Lanes<S>>> {
        let (mut memory, mut runs) = (group_memory::<T::Real>(), Vec::new());
        let mut states = States::empty(side.strip.width);
        let lines = 0..side.strip.width;
        for first in range.clone().step_by(ROWS) {
            let group = Group::new(first, ROWS.min(range.end - first), &mut memory);
            let logit = {
                #[inline(always)]
                // SAFETY: the rows are a vector longer than the strip; the rest by the caller's promise.
                move |row: usize, i: usize, _: usize| unsafe { T::Lanes::<S>::load(group.row(row).wrapping_add(i)) }
            };
            // SAFETY of the block: there is room for each row; the rest by the caller's promise.
            unsafe {
                side.logits::<S>(&group, &mut runs);
                states.grow(lines.clone(), group.rows, logit);
                states.add(
                    lines.clone(),
                    group.rows,
                    logit,
                    #[inline(always)]
                    |_, _, _, _| (),
                );
            }
        }
        states.states
    }

    /// What is made of the logits of each line of a strip, as of [`Call::scales`], relative to [references](columns::normalizers) or
    /// maxima; a vector longer than it.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn scales<S: Simd>(
        side: &Side<T>,
        states: &[SoftmaxState<T::Lanes<S>>],
        to_reference: bool,
    ) -> [Numbers<T::Real>; 2] {
        let mut states = states.to_vec();
        // SAFETY of the block: a row of sinks is of whole vectors; the rest by the caller's promise.
        unsafe {
            if let Some(sinks) = side.sinks::<S>() {
                for (state, chunk) in states.iter_mut().zip(sinks.chunks_exact(T::Lanes::<S>::COUNT)) {
                    state.push(T::Lanes::<S>::load(chunk.as_ptr()));
                }
            }
        }
        let [mut shift, mut scale] = columns::normalizers(&states, to_reference);
        side.call.scale_each::<T::Lanes<S>>(&mut scale);
        let lowest = T::Lanes::<S>::splat(T::Real::LOWEST);
        for (state, at) in states.iter().zip((0..side.strip.width).step_by(T::Lanes::<S>::COUNT)) {
            // Where a maximum is −∞ or NaN.
            if lowest.at_most(state.max()).differs(lowest) {
                let each = std::slice::from_ref(state);
                let max = flat(each, |state| state.max());
                let sum = flat(each, |state| state.sum());
                for i in 0..T::Lanes::<S>::COUNT.min(side.strip.width - at) {
                    if max[i] == T::Real::NEG_INFINITY && sum[i] == T::Real::ZERO {
                        (shift[at + i], scale[at + i]) = side.call.scales::<T::Lanes<S>>(None);
                    }
                }
            }
        }
        [shift, scale]
    }

    /// Writes what the logits of a group become.
    ///
    /// # Safety
    /// As of [`Pass::write`]; the logits are there.
    #[inline(always)]
    unsafe fn write_group<S: Simd>(
        &self,
        side: &Side<T>,
        group: &Group<T::Real>,
        [max, scale]: &[Numbers<T::Real>; 2],
        kept: &mut [[u8; ROW]; PER_COUNTER],
    ) {
        let make = Make::OfEach(self.call.options.output, max.as_ptr(), scale.as_ptr());
        // SAFETY: `max` and `scale` are a vector longer than the row; the rest by the caller's promise.
        unsafe {
            T::Real::store_any::<S>(
                &self.out,
                group.rows,
                #[inline(always)]
                |i| {
                    let j = group.first + i;
                    if i == 0 || j % PER_COUNTER == 0 {
                        side.keep::<S>(j, kept);
                    }
                    let last = Last { make, keep: side.kept(j, kept) };
                    Part { start: side.strip.row(j), len: side.strip.width, from: group.row(i), last }
                },
            )
        }
    }
}

impl<S: Simd, T: Element> Pass<S> for Columns<'_, T> {
    type Reduced = Vec<SoftmaxState<T::Lanes<S>>>;
    const WIDTH: usize = WIDTH;

    fn use_first(&self, elements: Range<usize>) {
        self.out.use_first(elements)
    }

    #[inline(always)]
    unsafe fn reduce(&self, unit: usize, range: Range<usize>) -> Self::Reduced {
        let side = Side::new(self.call, unit);
        if self.direct::<S>(&side).is_some() {
            let mut states = States::empty(side.strip.width);
            // SAFETY: as promised by the caller.
            unsafe { self.directly::<S>(&side, range, Todo::Reduce(&mut states, None)) };
            return states.states;
        }
        // SAFETY: as promised by the caller.
        unsafe { Self::states::<S>(&side, range) }
    }

    #[inline(always)]
    unsafe fn write(&self, unit: usize, range: Range<usize>, states: &Self::Reduced) {
        let side = Side::new(self.call, unit);
        // SAFETY of the block: there is room for each row; the rest by the caller's promise.
        unsafe {
            if let Some(out) = self.direct::<S>(&side) {
                let len = self.call.geometry.lines.len;
                let to_reference = columns::relative_to_reference::<T::Lanes<S>>(len, self.call.options.output);
                let scales = Self::scales::<S>(&side, states, to_reference);
                return self.directly::<S>(&side, range, Todo::Write(out, &scales));
            }
            let scales = Self::scales::<S>(&side, states, false);
            let (mut memory, mut runs, mut kept) = (group_memory(), Vec::new(), [[0; ROW]; PER_COUNTER]);
            for first in range.clone().step_by(ROWS) {
                let group = Group::new(first, ROWS.min(range.end - first), &mut memory);
                side.logits::<S>(&group, &mut runs);
                self.write_group::<S>(&side, &group, &scales, &mut kept);
            }
        }
    }

    #[inline(always)]
    unsafe fn whole(&self, units: Range<usize>, len: usize) {
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let geometry = self.call.geometry;
            if let Some(of) = self.call.softmaxed(&self.out).filter(|of| few_rows::are_few(of.lines)) {
                return few_rows::softmax::<S, T>(&of, units);
            }
            let again = match (self.call.cap, self.call.bias) {
                (Some(_), _) => Again::Arithmetic,
                (None, Some(_)) => {
                    let shared = geometry.axes.iter().any(|axis| axis.bias == 0);
                    // All of its lines are in one strip.
                    if shared && geometry.lines.inner <= WIDTH {
                        Again::SharedMemory
                    } else {
                        Again::Memory
                    }
                }
                (None, None) => Again::Little,
            };
            let mut held = HeldStrip::new::<T>(len, geometry.lines.inner, again);
            for unit in units {
                let side = Side::new(self.call, unit);
                match (&mut held, self.direct::<S>(&side)) {
                    (Some(held), Some(out)) => self.holding::<S>(&side, len, out, held),
                    _ => Pass::<S>::one_by_one(self, unit..unit + 1, len),
                }
            }
        }
    }
}
