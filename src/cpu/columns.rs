//! Lines along another dimension than the last: neighbouring lines lie side by side, so a strip of them is walked
//! together, row by row, with one state for each.

use super::few_rows;
use super::held::{self, Again, HeldStrip};
use super::lanes::{each, Lanes, Pack};
use super::level::Simd;
use super::memory::Numbers;
use super::rows::most_of;
use super::{Element, Pass};
use crate::lines::Lines;
use crate::op::{Output, Schedule};
use crate::state::{CompensatedSum, Normalizer, Number, Real, SoftmaxState};
use std::ops::Range;

/// Lines in a strip: as wide as rows have to be for memory to be read at its full speed, and so narrow that the rows of a
/// group and the states stay in the first cache.
pub(super) const WIDTH: usize = 256;
/// Rows that are taken together, where they are not [twice as many](States::group): as many pairs of numbers at most are added plainly
/// before the sum that compensates takes over.
pub(super) const ROWS: usize = 16;

/// As many exponentials the sums that are found may be as great as those of, however few they are of: a line whose logits have a
/// deviation of 3 makes [`most_of`] the rows of a group too little once in ten times, and then all lines of the strip wait for it.
const SUMMED: usize = 1024;

/// How many rows of so many lines, in so many streams, the memory system is to be ahead of the arithmetic where rows are written one
/// by one: 64 × 1000 × 128 of f32 took a model of this loop 3.1 ms with two rows, 2.8 with eight and 2.5 with sixteen.
pub(super) fn ahead_rows(width: usize, streams: usize) -> usize {
    (4096 / (width * streams)).clamp(2, ROWS)
}

/// Where a strip lies: `width` lines side by side, whose rows are `stride` elements apart.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub start: usize,
    pub width: usize,
    pub stride: usize,
}

impl Strip {
    pub fn new(unit: usize, lines: Lines) -> Self {
        let per_outer = lines.inner.div_ceil(WIDTH);
        let (outer, first) = (unit / per_outer, unit % per_outer * WIDTH);
        Self {
            start: outer * lines.len * lines.inner + first,
            width: WIDTH.min(lines.inner - first),
            stride: lines.inner,
        }
    }

    /// These, one after the other: a division takes longer than a strip of few elements.
    #[inline(always)]
    pub fn all(units: Range<usize>, lines: Lines) -> impl Iterator<Item = Self> {
        let per_outer = lines.inner.div_ceil(WIDTH);
        let (mut outer, mut first) = (units.start / per_outer, units.start % per_outer * WIDTH);
        units.map(move |_| {
            let start = outer * lines.len * lines.inner + first;
            let strip = Self { start, width: WIDTH.min(lines.inner - first), stride: lines.inner };
            first += WIDTH;
            if first >= lines.inner {
                (outer, first) = (outer + 1, 0);
            }
            strip
        })
    }

    /// The number of its first line.
    pub fn first_line(unit: usize, lines: Lines) -> usize {
        let per_outer = lines.inner.div_ceil(WIDTH);
        unit / per_outer * lines.inner + unit % per_outer * WIDTH
    }

    pub fn row(&self, j: usize) -> usize {
        self.start + j * self.stride
    }

    /// The elements of these rows from the first to the last, as start and length.
    pub fn span(&self, rows: &Range<usize>) -> (usize, usize) {
        (self.row(rows.start), if rows.is_empty() { 0 } else { (rows.len() - 1) * self.stride + self.width })
    }
}

/// The lanes of what `of` makes of each item, one after the other and a vector longer, to be read from any place on: lines do
/// not start where vectors do in memory.
#[inline(always)]
pub(super) fn flat<A, V: Lanes>(items: &[A], of: impl Fn(&A) -> V) -> Numbers<V::Real> {
    let mut flat = Numbers::new(V::Real::ZERO, (items.len() + 1) * V::COUNT);
    for (item, chunk) in items.iter().zip(flat.chunks_exact_mut(V::COUNT)) {
        // SAFETY: a chunk is as long as a vector.
        unsafe { of(item).store(chunk.as_mut_ptr()) };
    }
    flat
}

/// Writes rows of `width` results each, `result(row, start, count)`, those of row 0 to `to`: two at a time, so that what there is for
/// each line is read half as often.
///
/// # Safety
/// The CPU has the instructions of `S`, and `to` is valid for writes of the rows, which are `stride` apart.
#[inline(always)]
pub(super) unsafe fn write_rows<S: Simd, T: Element>(
    to: *mut T,
    stride: usize,
    width: usize,
    mut rows: Range<usize>,
    result: impl Fn(usize, usize, usize) -> T::Lanes<S>,
) {
    // SAFETY of the block: as promised by the caller.
    unsafe {
        while rows.len() >= 2 {
            let first = rows.start;
            T::write_rows::<S, 2>(
                to.add(first * stride),
                stride,
                width,
                #[inline(always)]
                |row, i, count| result(first + row, i, count),
            );
            rows.start += 2;
        }
        if let Some(row) = rows.next() {
            T::write::<S>(
                to.add(row * stride),
                width,
                #[inline(always)]
                |i, count| result(row, i, count),
            );
        }
    }
}

/// Groups of rows from the last to the first: what was read last is still in the second cache.
pub(super) fn from_the_end(rows: usize, group: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(group).rev().map(move |first| first..rows.min(first + group))
}

/// Writes a row of results, `result(start, count)`, but 0 where the byte at `keep` is 0.
///
/// # Safety
/// The CPU has the instructions of `S`, `to` is valid for writes of `width` elements, and there is a byte for each of them and for
/// a vector more.
#[inline(always)]
pub(super) unsafe fn write_kept<S: Simd, T: Element>(
    to: *mut T,
    width: usize,
    keep: *const u8,
    result: impl Fn(usize, usize) -> T::Lanes<S>,
) {
    // SAFETY of the block: as promised by the caller.
    unsafe {
        T::write::<S>(
            to,
            width,
            #[inline(always)]
            |i, count| result(i, count).where_kept(keep.add(i), T::Real::ZERO),
        )
    }
}

/// # Safety
/// The CPU has the instructions of `S`, and `from` is valid for reads of the elements `i..i + count`.
#[inline(always)]
pub(super) unsafe fn read<S: Simd, T: Element>(from: *const T, i: usize, count: usize) -> T::Lanes<S> {
    // SAFETY: as promised by the caller.
    unsafe { T::read::<S>(from.add(i), count, T::Real::ZERO) }
}

/// The states of lines side by side.
pub(super) struct States<V: Lanes> {
    pub states: Vec<SoftmaxState<V>>,
    /// What exponentials are relative to at the moment, line by line in whole vectors.
    pub references: Numbers<V::Real>,
    /// The maxima, and then the sums, of the rows that are taken together; likewise.
    found: Numbers<V::Real>,
    /// Whether a reference has moved since [`moved`](Self::moved) was asked.
    moved: bool,
}

impl<V: Lanes> States<V> {
    #[inline(always)]
    pub fn empty(width: usize) -> Self {
        let vectors = width.div_ceil(V::COUNT);
        let zeros = || Numbers::new(V::Real::ZERO, vectors * V::COUNT);
        Self { states: vec![SoftmaxState::empty(); vectors], references: zeros(), found: zeros(), moved: true }
    }

    /// How many rows are taken together. What is done once for all of them is a tenth of the time where sixteen take little.
    pub const fn group() -> usize {
        if V::SATURATES {
            2 * ROWS
        } else {
            ROWS
        }
    }

    /// Whether a reference has moved since this was asked; true at first.
    pub fn moved(&mut self) -> bool {
        std::mem::take(&mut self.moved)
    }

    /// Takes rows of these lines, the first of which is the first of a vector, into the maxima; `logit(row, start, count)` is
    /// what they are.
    ///
    /// Row by row, and each step in a sweep of its own: those from logits to a reference, and from exponentials to a sum, wait
    /// for each other, and so are taken of many vectors at a time.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    pub unsafe fn grow(&mut self, lines: Range<usize>, rows: usize, logit: impl Fn(usize, usize, usize) -> V) {
        let (vectors, elements) = whole_vectors::<V>(&lines);
        let found = &mut self.found[elements.clone()];
        found.fill(V::Real::NEG_INFINITY);
        // SAFETY: chunks are as long as a vector; the rest by the caller's promise.
        unsafe {
            fold_rows::<V>(
                lines.len(),
                rows,
                found,
                logit,
                #[inline(always)]
                |z, max| z.or_greater(max),
            );
            let references = self.references[elements].chunks_exact_mut(V::COUNT);
            let states = self.states[vectors].iter_mut().zip(references);
            for ((state, reference), max) in states.zip(found.chunks_exact(V::COUNT)) {
                let new = state.grow(V::load(max.as_ptr()));
                self.moved |= new.differs(V::load(reference.as_ptr()));
                new.store(reference.as_mut_ptr());
            }
        }
    }

    /// Adds the exponentials of the same rows, a [`group`](Self::group) at most, to the sums; `see(row, start, count, exponentials)`
    /// sees them [scaled](Lanes::scaled_exp).
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    pub unsafe fn add(
        &mut self,
        lines: Range<usize>,
        rows: usize,
        logit: impl Fn(usize, usize, usize) -> V,
        see: impl Fn(usize, usize, usize, V),
    ) {
        // SAFETY: as promised by the caller.
        unsafe {
            self.sums(&lines, rows, logit, see);
            self.add_found(&lines);
        }
    }

    /// [`grow`](Self::grow) and [`add`](Self::add). Of the rows only the first `sample` grow what exponentials are relative to, unless
    /// these [say](Lanes::SATURATES) that it is too little for them: then `logit` is asked, and `see` sees, a second time.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    pub unsafe fn take(
        &mut self,
        lines: Range<usize>,
        rows: usize,
        sample: usize,
        logit: impl Fn(usize, usize, usize) -> V + Copy,
        see: impl Fn(usize, usize, usize, V) + Copy,
    ) {
        let mut sample = if V::SATURATES { sample.min(rows) } else { rows };
        // SAFETY of the block: as promised by the caller.
        unsafe {
            loop {
                if sample > 0 {
                    self.grow(lines.clone(), sample, logit);
                }
                self.sums(&lines, rows, logit, see);
                if sample == rows || self.found_below(&lines, most_of(SUMMED)) {
                    break;
                }
                sample = rows;
            }
            self.add_found(&lines);
        }
    }

    /// Finds the sums of the exponentials of these rows, scaled.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    unsafe fn sums(
        &mut self,
        lines: &Range<usize>,
        rows: usize,
        logit: impl Fn(usize, usize, usize) -> V,
        see: impl Fn(usize, usize, usize, V),
    ) {
        let (_, elements) = whole_vectors::<V>(lines);
        let found = &mut self.found[elements.clone()];
        let references = self.references[elements].as_ptr();
        found.fill(V::Real::ZERO);
        // SAFETY: there are as many references as are found; the rest by the caller's promise.
        unsafe {
            fold_rows::<V>(
                lines.len(),
                rows,
                found,
                #[inline(always)]
                move |row, i, count| {
                    let exp = (logit(row, i, count) - V::load(references.add(i))).scaled_exp();
                    see(row, i, count, exp);
                    exp
                },
                #[inline(always)]
                |exp, sum| exp + sum,
            )
        }
    }

    /// Whether all sums that were found are below `most`: those of neighbouring vectors together, which takes less time than each.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    unsafe fn found_below(&self, lines: &Range<usize>, most: V::Real) -> bool {
        let (_, elements) = whole_vectors::<V>(lines);
        let mut total = V::splat(V::Real::ZERO);
        for sum in self.found[elements].chunks_exact(V::COUNT) {
            // SAFETY: chunks are as long as a vector; the rest by the caller's promise.
            total = total + unsafe { V::load(sum.as_ptr()) };
        }
        let total = total.unscaled();
        // NaN is not itself.
        !total.at_most(V::splat(most)).differs(total)
    }

    /// Adds the sums that were found.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    unsafe fn add_found(&mut self, lines: &Range<usize>) {
        let (vectors, elements) = whole_vectors::<V>(lines);
        for (state, sum) in self.states[vectors].iter_mut().zip(self.found[elements].chunks_exact(V::COUNT)) {
            // SAFETY: chunks are as long as a vector; the rest by the caller's promise.
            state.add(unsafe { V::load(sum.as_ptr()) }.unscaled());
        }
    }
}

/// The vectors that these lines are in, and all of their lines.
fn whole_vectors<V: Lanes>(lines: &Range<usize>) -> (Range<usize>, Range<usize>) {
    let vectors = lines.start / V::COUNT..lines.end.div_ceil(V::COUNT);
    let elements = vectors.start * V::COUNT..vectors.end * V::COUNT;
    (vectors, elements)
}

/// Joins what `of(row, start, count)` makes of the vectors of each of `rows` rows of `width` elements with what is found, two
/// rows at a time: so many fewer times it is read and written.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
unsafe fn fold_rows<V: Lanes>(
    width: usize,
    rows: usize,
    found: &mut [V::Real],
    of: impl Fn(usize, usize, usize) -> V,
    join: impl Fn(V, V) -> V,
) {
    assert!(width <= found.len() && found.len() % V::COUNT == 0, "no room for each line");
    let found = found.as_mut_ptr();
    // SAFETY of both: there is room for each, in whole vectors.
    for row in (1..rows).step_by(2) {
        each::<V>(
            0..width,
            #[inline(always)]
            |i, count| unsafe {
                let joined = join(of(row, i, count), of(row - 1, i, count));
                join(joined, V::load(found.add(i))).store(found.add(i));
            },
        );
    }
    if rows % 2 == 1 {
        each::<V>(
            0..width,
            #[inline(always)]
            |i, count| unsafe { join(of(rows - 1, i, count), V::load(found.add(i))).store(found.add(i)) },
        );
    }
}

/// The sums of `width` lines side by side over `rows` rows, whose terms are `term(row, start, count)`: of [`ROWS`] plainly, and of
/// these compensated.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn sum_rows<V: Lanes>(
    width: usize,
    rows: usize,
    term: impl Fn(usize, usize, usize) -> V,
) -> Vec<CompensatedSum<V>> {
    let vectors = width.div_ceil(V::COUNT);
    let mut totals = vec![CompensatedSum::zero(); vectors];
    let mut found = Numbers::new(V::Real::ZERO, vectors * V::COUNT);
    for first in (0..rows).step_by(ROWS) {
        found.fill(V::Real::ZERO);
        // SAFETY of the block: chunks are as long as a vector; the rest by the caller's promise.
        unsafe {
            fold_rows::<V>(
                width,
                ROWS.min(rows - first),
                &mut found,
                #[inline(always)]
                |row, i, count| term(first + row, i, count),
                V::add,
            );
            for (total, sum) in totals.iter_mut().zip(found.chunks_exact(V::COUNT)) {
                total.add(V::load(sum.as_ptr()));
            }
        }
    }
    totals
}

/// The states of the lines of a strip over `rows` rows from `src` on, whose exponentials are held if there is where. Their maxima
/// are those of all rows where that is to be `exact`; else they may be of the first, and what is above them is at most [e¹⁶](most_of)
/// times as great.
///
/// # Safety
/// The CPU has the instructions of `S`, the rows are there, and so is the room for what is held.
#[inline(always)]
pub(super) unsafe fn states<S: Simd, T: Element>(
    src: *const T,
    strip: &Strip,
    rows: usize,
    schedule: Schedule,
    exact: bool,
    mut held: Option<&mut HeldStrip<T::Lanes<S>>>,
) -> Vec<SoftmaxState<T::Lanes<S>>> {
    let mut states = States::<T::Lanes<S>>::empty(strip.width);
    let (lines, stride) = (0..strip.width, strip.stride);
    let logit = {
        #[inline(always)]
        // SAFETY: as promised by the caller.
        move |row: usize, i: usize, count: usize| unsafe { read::<S, T>(src, row * stride + i, count) }
    };
    // SAFETY of the block: as promised by the caller.
    unsafe {
        let max_first = schedule == Schedule::Safe;
        if max_first {
            states.grow(lines.clone(), rows, logit);
        }
        let group = States::<T::Lanes<S>>::group();
        for first in (0..rows).step_by(group) {
            let (lines, rows) = (lines.clone(), group.min(rows - first));
            let sample = if first == 0 { ROWS } else { 0 };
            let logit = {
                #[inline(always)]
                move |row: usize, i: usize, count: usize| logit(first + row, i, count)
            };
            let ahead = {
                #[inline(always)]
                move |row: usize, i: usize| S::prefetch(src.wrapping_add((first + row + ROWS) * stride + i))
            };
            match &mut held {
                Some(held) => {
                    let hold = held::hold::<S, _>(held.group(first));
                    let see = {
                        #[inline(always)]
                        move |row: usize, i: usize, count: usize, exp: T::Lanes<S>| {
                            ahead(row, i);
                            hold(row, i, count, exp);
                        }
                    };
                    if max_first {
                        states.add(lines, rows, logit, see);
                    } else {
                        states.take(lines, rows, sample, logit, see);
                    }
                    held.push(first, rows, states.moved().then_some(&states.references));
                }
                None => {
                    let see = {
                        #[inline(always)]
                        move |row: usize, i: usize, _: usize, _: T::Lanes<S>| ahead(row, i)
                    };
                    if max_first {
                        states.add(lines, rows, logit, see);
                    } else {
                        // All, where results are made of the maximum.
                        states.take(lines, rows, if exact { rows } else { sample }, logit, see);
                    }
                }
            }
        }
    }
    states.states
}

/// Whether the results of lines of `len` rows are made relative to references: where [`States::take`] may have left maxima at those of
/// the first rows, what is above them would be rounded once relative to the reference and once, otherwise, to the maximum.
pub(super) fn relative_to_reference<V: Lanes>(len: usize, output: Output) -> bool {
    V::SATURATES && len > ROWS && output == Output::Probability
}

/// What results are relative to, and the sums relative to it: references, or maxima; line by line and a vector longer.
#[inline(always)]
pub(super) fn normalizers<V: Lanes>(states: &[SoftmaxState<V>], to_reference: bool) -> [Numbers<V::Real>; 2] {
    let line = {
        #[inline(always)]
        |state: &SoftmaxState<V>| {
            if to_reference {
                Normalizer { max: state.reference(), sum: state.sum() }
            } else {
                state.finish()
            }
        }
    };
    let max = flat(
        states,
        #[inline(always)]
        |state| line(state).max,
    );
    let sum = flat(
        states,
        #[inline(always)]
        |state| line(state).sum,
    );
    [max, sum]
}

pub(super) struct Softmax<'a, T>(pub super::Forward<'a, T>);

impl<T: Element> Softmax<'_, T> {
    /// A strip, in memory for what is held.
    ///
    /// # Safety
    /// As of [`Pass::whole`].
    #[inline(always)]
    unsafe fn holding<S: Simd>(&self, unit: usize, len: usize, held: &mut HeldStrip<T::Lanes<S>>) {
        let strip = Strip::new(unit, self.0.lines);
        let (start, elements) = strip.span(&(0..len));
        let out = self.0.out.at(start, elements);
        let src: *const T = self.0.src.at(start, elements);
        held.begin(&strip, src, out);
        // SAFETY of the block: each row is written before it is read; the rest by the caller's promise.
        unsafe {
            let states = states::<S, T>(src, &strip, len, self.0.schedule, false, Some(held));
            let [references, mut scale] = normalizers(&states, true);
            scale.iter_mut().for_each(|sum| *sum = T::Lanes::<S>::UNSCALE / *sum);
            let place = (len, strip.stride);
            let keep = None::<fn(usize) -> *const u8>;
            held::write::<S, T>(held, &[references, scale], T::Real::ONE, out, place, keep);
        }
    }
}

impl<S: Simd, T: Element> Pass<S> for Softmax<'_, T> {
    type Reduced = Vec<SoftmaxState<T::Lanes<S>>>;
    const WIDTH: usize = WIDTH;

    fn use_first(&self, elements: Range<usize>) {
        self.0.out.use_first(elements)
    }

    #[inline(always)]
    unsafe fn reduce(&self, unit: usize, range: Range<usize>) -> Self::Reduced {
        let strip = Strip::new(unit, self.0.lines);
        let (start, len) = strip.span(&range);
        let exact = self.0.output == Output::LogProbability;
        // SAFETY: the rows are there; the rest by the caller's promise.
        unsafe { states::<S, T>(self.0.src.at(start, len), &strip, range.len(), self.0.schedule, exact, None) }
    }

    #[inline(always)]
    unsafe fn write(&self, unit: usize, range: Range<usize>, states: &Self::Reduced) {
        let strip = Strip::new(unit, self.0.lines);
        let [max, mut scale] =
            normalizers(states, relative_to_reference::<T::Lanes<S>>(self.0.lines.len, self.0.output));
        scale.iter_mut().for_each(|sum| *sum = self.0.output.scale::<T::Lanes<S>>(*sum));
        let one = T::Lanes::<S>::splat(T::Real::ONE);
        let (rows, stride) = (range.len(), strip.stride);
        let group = ahead_rows(strip.width, 2);
        let ahead = group * stride;
        let (start, len) = strip.span(&range);
        let (src, out): (*const T, *mut T) = (self.0.src.at(start, len), self.0.out.at(start, len));
        // SAFETY of the block: the elements are there, and `max` and `scale` are a vector longer than the row; the rest by the
        // caller's promise.
        unsafe {
            let shifted = {
                let max = max.as_ptr();
                #[inline(always)]
                move |j: usize, i: usize, count: usize| {
                    // Memory that is written is read first.
                    S::prefetch(out.wrapping_add(j * stride + i).wrapping_sub(ahead));
                    S::prefetch(src.wrapping_add(j * stride + i).wrapping_sub(ahead));
                    read::<S, T>(src, j * stride + i, count) - T::Lanes::<S>::load(max.add(i))
                }
            };
            let scale = scale.as_ptr();
            // A loop of its own for each.
            for rows in from_the_end(rows, group) {
                match self.0.output {
                    Output::Probability => write_rows::<S, T>(
                        out,
                        stride,
                        strip.width,
                        rows,
                        #[inline(always)]
                        |j, i, count| {
                            let p = shifted(j, i, count).scaled_exp() * T::Lanes::<S>::load(scale.add(i));
                            // The maximum alone may have come out a little over its sum.
                            if T::Lanes::<S>::SATURATES {
                                p.at_most(one)
                            } else {
                                p
                            }
                        },
                    ),
                    Output::LogProbability => write_rows::<S, T>(
                        out,
                        stride,
                        strip.width,
                        rows,
                        #[inline(always)]
                        |j, i, count| shifted(j, i, count) - T::Lanes::<S>::load(scale.add(i)),
                    ),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn whole(&self, units: Range<usize>, len: usize) {
        if few_rows::are_few(self.0.lines) {
            // SAFETY: as promised by the caller.
            return unsafe { few_rows::softmax::<S, T>(&self.0.softmaxed(), units) };
        }
        let holds = self.0.output == Output::Probability && self.0.schedule == Schedule::Reduce;
        let held = if holds { HeldStrip::new::<T>(len, self.0.lines.inner, Again::Little) } else { None };
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let Some(mut held) = held else { return Pass::<S>::one_by_one(self, units, len) };
            for unit in units {
                self.holding::<S>(unit, len, &mut held);
            }
        }
    }
}

/// softmax: y·(g − Σ g·y); log-softmax: g − exp(y)·Σ g.
pub(super) struct Backward<'a, T>(pub super::Backward<'a, T>);

impl<S: Simd, T: Element> Pass<S> for Backward<'_, T> {
    type Reduced = Vec<CompensatedSum<T::Lanes<S>>>;
    const WIDTH: usize = WIDTH;

    fn use_first(&self, elements: Range<usize>) {
        self.0.out.use_first(elements)
    }

    #[inline(always)]
    unsafe fn reduce(&self, unit: usize, range: Range<usize>) -> Self::Reduced {
        let strip = Strip::new(unit, self.0.lines);
        let (start, len) = strip.span(&range);
        let (y, g): (*const T, *const T) = (self.0.y.at(start, len), self.0.g.at(start, len));
        let (rows, stride) = (range.len(), strip.stride);
        // SAFETY of the block: the rows are there, and the instructions by the caller's promise.
        unsafe {
            let read = {
                #[inline(always)]
                move |from: *const T, row: usize, i: usize, count: usize| {
                    S::prefetch(from.wrapping_add((row + ROWS) * stride + i));
                    read::<S, T>(from, row * stride + i, count)
                }
            };
            match self.0.output {
                Output::Probability => sum_rows(
                    strip.width,
                    rows,
                    #[inline(always)]
                    |row, i, count| read(y, row, i, count) * read(g, row, i, count),
                ),
                Output::LogProbability => sum_rows(
                    strip.width,
                    rows,
                    #[inline(always)]
                    |row, i, count| read(g, row, i, count),
                ),
            }
        }
    }

    #[inline(always)]
    unsafe fn write(&self, unit: usize, range: Range<usize>, totals: &Self::Reduced) {
        let strip = Strip::new(unit, self.0.lines);
        let sums = flat(
            totals,
            #[inline(always)]
            |total| total.value(),
        );
        let sums = sums.as_ptr();
        let (rows, stride) = (range.len(), strip.stride);
        let ahead = ahead_rows(strip.width, 3) * stride;
        // Rows that lie one behind the other are read ahead anyway.
        let apart = strip.width < stride;
        let (start, len) = strip.span(&range);
        let (ys, gs): (*const T, *const T) = (self.0.y.at(start, len), self.0.g.at(start, len));
        let out = self.0.out.at(start, len);
        // SAFETY of the block: the elements are there, and `sums` is a vector longer than the row; the rest by the
        // caller's promise.
        unsafe {
            write_rows::<S, T>(
                out,
                stride,
                strip.width,
                0..rows,
                #[inline(always)]
                |j, i, count| {
                    let at = j * stride + i;
                    // Memory that is written is read first.
                    S::prefetch(out.wrapping_add(at + ahead));
                    if apart {
                        S::prefetch(ys.wrapping_add(at + ahead));
                        S::prefetch(gs.wrapping_add(at + ahead));
                    }
                    let (y, g) = (read::<S, T>(ys, at, count), read::<S, T>(gs, at, count));
                    self.0.output.gradient(y, g, T::Lanes::<S>::load(sums.add(i)))
                },
            )
        }
    }

    #[inline(always)]
    unsafe fn whole(&self, units: Range<usize>, len: usize) {
        // SAFETY: as promised by the caller.
        unsafe {
            if few_rows::are_few(self.0.lines) {
                return few_rows::backward::<S, T>(&self.0, units);
            }
            Pass::<S>::one_by_one(self, units, len)
        }
    }
}
