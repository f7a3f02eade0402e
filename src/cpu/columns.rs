//! Lines along another dimension than the last: neighbouring lines lie side by side, so a strip of them is walked
//! together, row by row, with one state for each.

use super::output::SharedOutput;
use super::{Element, Pass};
use crate::lines::Lines;
use crate::op::{Output, Schedule};
use crate::state::{CompensatedSum, Real, SoftmaxState};
use std::array::from_fn;
use std::ops::Range;

/// Lines in a strip.
const WIDTH: usize = 64;
/// Rows taken at once; as many numbers are added plainly before the sum that compensates takes over.
const ROWS: usize = 16;

type Tile<R> = [[R; WIDTH]; ROWS];

/// Where a strip lies: `width` lines side by side, whose rows are `stride` elements apart.
struct Strip {
    start: usize,
    width: usize,
    stride: usize,
}

impl Strip {
    fn new(unit: usize, lines: Lines) -> Self {
        let per_outer = lines.inner.div_ceil(WIDTH);
        let (outer, first) = (unit / per_outer, unit % per_outer * WIDTH);
        Self {
            start: outer * lines.len * lines.inner + first,
            width: WIDTH.min(lines.inner - first),
            stride: lines.inner,
        }
    }

    fn row(&self, j: usize) -> usize {
        self.start + j * self.stride
    }

    /// Reads the rows of `range` into `tile`; answers how many.
    #[inline(always)]
    fn load<T: Element>(&self, src: &[T], range: Range<usize>, tile: &mut Tile<T::Real>) -> usize {
        let rows = range.len();
        for (j, row) in range.zip(tile) {
            T::load(&src[self.row(j)..][..self.width], &mut row[..self.width]);
        }
        rows
    }
}

fn tiles(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(ROWS).map(move |start| start..end.min(start + ROWS))
}

pub(super) struct Softmax<'a, T> {
    pub src: &'a [T],
    pub out: SharedOutput<'a, T>,
    pub lines: Lines,
    pub schedule: Schedule,
    pub output: Output,
}

#[inline(always)]
fn max_of<R: Real>(rows: &[[R; WIDTH]]) -> [R; WIDTH] {
    let mut max = [R::NEG_INFINITY; WIDTH];
    for row in rows {
        for (max, &x) in max.iter_mut().zip(row) {
            *max = x.or_greater(*max);
        }
    }
    max
}

impl<T: Element> Pass for Softmax<'_, T> {
    type Reduced = [SoftmaxState<T::Real>; WIDTH];
    const WIDTH: usize = WIDTH;

    fn reduce(&self, unit: usize, range: Range<usize>) -> Self::Reduced {
        let strip = Strip::new(unit, self.lines);
        let mut tile = [[T::Real::ZERO; WIDTH]; ROWS];
        let mut states = [SoftmaxState::EMPTY; WIDTH];
        if self.schedule == Schedule::Safe {
            for range in tiles(range.clone()) {
                let rows = strip.load(self.src, range, &mut tile);
                for (state, max) in states.iter_mut().zip(max_of(&tile[..rows])) {
                    state.grow(max);
                }
            }
        }
        for range in tiles(range) {
            let rows = strip.load(self.src, range, &mut tile);
            let references: [T::Real; WIDTH] = match self.schedule {
                Schedule::Safe => from_fn(|i| states[i].reference()),
                Schedule::Online | Schedule::Reduce => {
                    let max = max_of(&tile[..rows]);
                    from_fn(|i| states[i].grow(max[i]))
                }
            };
            let mut sums = [T::Real::ZERO; WIDTH];
            for row in &tile[..rows] {
                for i in 0..strip.width {
                    sums[i] = sums[i] + (row[i] - references[i]).exp();
                }
            }
            for (state, &sum) in states.iter_mut().zip(&sums[..strip.width]) {
                state.add(sum);
            }
        }
        states
    }

    fn merge(mut a: Self::Reduced, b: Self::Reduced) -> Self::Reduced {
        for (a, b) in a.iter_mut().zip(b) {
            a.merge(b);
        }
        a
    }

    unsafe fn write(&self, unit: usize, range: Range<usize>, states: &Self::Reduced) {
        let strip = Strip::new(unit, self.lines);
        let finished = states.map(|state| state.finish());
        let max = finished.map(|line| line.max);
        let scale = finished.map(|line| match self.output {
            Output::Probability => line.sum.recip(),
            Output::LogProbability => line.sum.ln(),
        });
        let mut row = [T::Real::ZERO; WIDTH];
        for j in range {
            T::load(&self.src[strip.row(j)..][..strip.width], &mut row[..strip.width]);
            match self.output {
                Output::Probability => {
                    for i in 0..strip.width {
                        row[i] = (row[i] - max[i]).exp() * scale[i];
                    }
                }
                Output::LogProbability => {
                    for i in 0..strip.width {
                        row[i] = (row[i] - max[i]) - scale[i];
                    }
                }
            }
            // SAFETY: the caller keeps other threads out of these rows of this strip.
            T::store(&row[..strip.width], unsafe { self.out.slice(strip.row(j), strip.width) });
        }
    }
}

/// softmax: y·(g − Σ g·y); log-softmax: g − exp(y)·Σ g.
pub(super) struct Backward<'a, T> {
    pub y: &'a [T],
    pub g: &'a [T],
    pub out: SharedOutput<'a, T>,
    pub lines: Lines,
    pub output: Output,
}

impl<T: Element> Pass for Backward<'_, T> {
    type Reduced = [CompensatedSum<T::Real>; WIDTH];
    const WIDTH: usize = WIDTH;

    fn reduce(&self, unit: usize, range: Range<usize>) -> Self::Reduced {
        let strip = Strip::new(unit, self.lines);
        let mut y_tile = [[T::Real::ZERO; WIDTH]; ROWS];
        let mut g_tile = [[T::Real::ZERO; WIDTH]; ROWS];
        let mut totals = [CompensatedSum::ZERO; WIDTH];
        for range in tiles(range) {
            let rows = strip.load(self.g, range.clone(), &mut g_tile);
            let mut sums = [T::Real::ZERO; WIDTH];
            match self.output {
                Output::Probability => {
                    strip.load(self.y, range, &mut y_tile);
                    for (y, g) in y_tile[..rows].iter().zip(&g_tile) {
                        for i in 0..strip.width {
                            sums[i] = sums[i] + y[i] * g[i];
                        }
                    }
                }
                Output::LogProbability => {
                    for g in &g_tile[..rows] {
                        for i in 0..strip.width {
                            sums[i] = sums[i] + g[i];
                        }
                    }
                }
            }
            for (total, &sum) in totals.iter_mut().zip(&sums[..strip.width]) {
                total.add(sum);
            }
        }
        totals
    }

    fn merge(mut a: Self::Reduced, b: Self::Reduced) -> Self::Reduced {
        for (a, b) in a.iter_mut().zip(b) {
            a.merge(b);
        }
        a
    }

    unsafe fn write(&self, unit: usize, range: Range<usize>, totals: &Self::Reduced) {
        let strip = Strip::new(unit, self.lines);
        let sums = totals.map(|total| total.value());
        let (mut y, mut g) = ([T::Real::ZERO; WIDTH], [T::Real::ZERO; WIDTH]);
        for j in range {
            T::load(&self.y[strip.row(j)..][..strip.width], &mut y[..strip.width]);
            T::load(&self.g[strip.row(j)..][..strip.width], &mut g[..strip.width]);
            match self.output {
                Output::Probability => {
                    for i in 0..strip.width {
                        g[i] = y[i] * (g[i] - sums[i]);
                    }
                }
                Output::LogProbability => {
                    for i in 0..strip.width {
                        g[i] = g[i] - y[i].exp() * sums[i];
                    }
                }
            }
            // SAFETY: the caller keeps other threads out of these rows of this strip.
            T::store(&g[..strip.width], unsafe { self.out.slice(strip.row(j), strip.width) });
        }
    }
}
