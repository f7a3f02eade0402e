//! Lines along the last dimension: each is a contiguous slice.

use super::output::SharedOutput;
use super::{Element, Pass, BLOCK};
use crate::op::{Output, Schedule};
use crate::state::{CompensatedSum, Real, SoftmaxState};
use std::ops::Range;

/// Independent accumulators: a block adds only BLOCK / LANES = 16 numbers to each, so rounding cannot pile up.
const LANES: usize = 32;

/// Folds `f(x)` into one accumulator per lane; answers the lanes.
#[inline(always)]
fn fold<R: Real>(xs: &[R], start: R, f: impl Fn(R, R) -> R) -> [R; LANES] {
    let mut lanes = [start; LANES];
    let chunks = xs.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = f(*lane, x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = f(*lane, x);
    }
    lanes
}

/// Joins the lanes two by two.
#[inline(always)]
fn join<R: Real>(mut lanes: [R; LANES], f: impl Fn(R, R) -> R) -> R {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = f(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn max_of<R: Real>(xs: &[R]) -> R {
    join(fold(xs, R::NEG_INFINITY, |max, x| x.or_greater(max)), R::or_greater)
}

#[inline(always)]
fn exp_sum<R: Real>(xs: &[R], reference: R) -> R {
    join(fold(xs, R::ZERO, |sum, x| sum + (x - reference).exp()), |a, b| a + b)
}

pub(super) struct Softmax<'a, T> {
    pub src: &'a [T],
    pub out: SharedOutput<'a, T>,
    pub len: usize,
    pub schedule: Schedule,
    pub output: Output,
}

impl<T: Element> Pass for Softmax<'_, T> {
    type Reduced = SoftmaxState<T::Real>;
    const WIDTH: usize = 1;

    fn reduce(&self, line: usize, range: Range<usize>) -> Self::Reduced {
        let xs = &self.src[line * self.len..][range];
        let mut scratch = [T::Real::ZERO; BLOCK];
        let mut state = SoftmaxState::EMPTY;
        if self.schedule == Schedule::Safe {
            for block in xs.chunks(BLOCK) {
                state.grow(max_of(T::widen(block, &mut scratch)));
            }
        }
        for block in xs.chunks(BLOCK) {
            let xs = T::widen(block, &mut scratch);
            let reference = match self.schedule {
                Schedule::Safe => state.reference(),
                Schedule::Online | Schedule::Reduce => state.grow(max_of(xs)),
            };
            state.add(exp_sum(xs, reference));
        }
        state
    }

    fn merge(mut a: Self::Reduced, b: Self::Reduced) -> Self::Reduced {
        a.merge(b);
        a
    }

    unsafe fn write(&self, line: usize, range: Range<usize>, state: &Self::Reduced) {
        let start = line * self.len + range.start;
        let xs = &self.src[start..][..range.len()];
        // SAFETY: the caller keeps other threads out of this range of this line.
        let out = unsafe { self.out.slice(start, range.len()) };
        let line = state.finish();
        match self.output {
            Output::Probability => {
                let inverse = line.sum.recip();
                T::map(xs, out, |x| (x - line.max).exp() * inverse)
            }
            Output::LogProbability => {
                let log_sum = line.sum.ln();
                T::map(xs, out, |x| (x - line.max) - log_sum)
            }
        }
    }
}

/// softmax: y·(g − Σ g·y); log-softmax: g − exp(y)·Σ g.
pub(super) struct Backward<'a, T> {
    pub y: &'a [T],
    pub g: &'a [T],
    pub out: SharedOutput<'a, T>,
    pub len: usize,
    pub output: Output,
}

impl<T: Element> Pass for Backward<'_, T> {
    type Reduced = CompensatedSum<T::Real>;
    const WIDTH: usize = 1;

    fn reduce(&self, line: usize, range: Range<usize>) -> Self::Reduced {
        let ys = &self.y[line * self.len..][range.clone()];
        let gs = &self.g[line * self.len..][range];
        let (mut y_scratch, mut g_scratch) = ([T::Real::ZERO; BLOCK], [T::Real::ZERO; BLOCK]);
        let mut products = [T::Real::ZERO; BLOCK];
        let mut sum = CompensatedSum::ZERO;
        for (ys, gs) in ys.chunks(BLOCK).zip(gs.chunks(BLOCK)) {
            let gs = T::widen(gs, &mut g_scratch);
            let terms = match self.output {
                Output::Probability => {
                    let ys = T::widen(ys, &mut y_scratch);
                    let products = &mut products[..gs.len()];
                    for ((product, &y), &g) in products.iter_mut().zip(ys).zip(gs) {
                        *product = y * g;
                    }
                    products
                }
                Output::LogProbability => gs,
            };
            sum.add(join(fold(terms, T::Real::ZERO, |sum, x| sum + x), |a, b| a + b));
        }
        sum
    }

    fn merge(mut a: Self::Reduced, b: Self::Reduced) -> Self::Reduced {
        a.merge(b);
        a
    }

    unsafe fn write(&self, line: usize, range: Range<usize>, sum: &Self::Reduced) {
        let start = line * self.len + range.start;
        let ys = &self.y[start..][..range.len()];
        let gs = &self.g[start..][..range.len()];
        // SAFETY: the caller keeps other threads out of this range of this line.
        let out = unsafe { self.out.slice(start, range.len()) };
        let sum = sum.value();
        match self.output {
            Output::Probability => T::map2(ys, gs, out, |y, g| y * (g - sum)),
            Output::LogProbability => T::map2(ys, gs, out, |y, g| g - y.exp() * sum),
        }
    }
}
