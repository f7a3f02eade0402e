//! The CPU schedules.
//!
//! Lines along the last dimension are contiguous ([`rows`]); along another they are walked side by side, a strip of
//! neighbours at a time ([`columns`]). Both sum in short blocks, and both come as a [`Pass`]: a reduction over
//! a line, then a write. [`run`] spreads it over rayon's threads in a way that depends on the shape alone, so that the
//! result does not depend on how many threads there are.

mod columns;
mod element;
pub(crate) mod exp;
mod output;
mod rows;

pub(crate) use element::Element;

use crate::lines::Lines;
use crate::op::{Output, Schedule};
use output::SharedOutput;
use rayon::prelude::*;
use std::ops::Range;

/// Elements of a line that are taken at once.
const BLOCK: usize = 512;
/// Below this many elements threads cost more than they bring.
const SERIAL: usize = 1 << 17;
/// A line is split into parts of about this many elements, …
const PART: usize = 1 << 16;
/// … but never into more parts than this, which bounds the memory that their states take.
const MAX_PARTS: usize = 256;
/// With this many lines or more there is no need to split them.
const ENOUGH_LINES: usize = 64;

/// Softmax or log-softmax of the lines of `src`, which is contiguous.
pub(crate) fn softmax<T: Element>(src: &[T], lines: Lines, schedule: Schedule, output: Output) -> Vec<T> {
    let mut out = T::zeros(src.len());
    softmax_into(src, &mut out, lines, schedule, output);
    out
}

/// The same into memory given, as many elements as `src` has.
pub(crate) fn softmax_into<T: Element>(src: &[T], out: &mut [T], lines: Lines, schedule: Schedule, output: Output) {
    if src.is_empty() {
        return;
    }
    let out = SharedOutput::new(out);
    let split = schedule == Schedule::Reduce;
    if lines.inner == 1 {
        run(&rows::Softmax { src, out, len: lines.len, schedule, output }, lines, split)
    } else {
        run(&columns::Softmax { src, out, lines, schedule, output }, lines, split)
    }
}

/// The gradient of the input of (log-)softmax, given its result `y` and the gradient `g` of that, both contiguous.
pub(crate) fn softmax_backward<T: Element>(y: &[T], g: &[T], lines: Lines, output: Output) -> Vec<T> {
    let mut grad = T::zeros(y.len());
    if y.is_empty() {
        return grad;
    }
    let out = SharedOutput::new(&mut grad);
    if lines.inner == 1 {
        run(&rows::Backward { y, g, out, len: lines.len, output }, lines, true)
    } else {
        run(&columns::Backward { y, g, out, lines, output }, lines, true)
    }
    grad
}

/// A reduction over each line and a write that uses it. A unit is one line, or a strip of neighbouring lines.
trait Pass: Sync {
    type Reduced: Copy + Send + Sync;

    /// Lines in a unit, at most.
    const WIDTH: usize;

    fn reduce(&self, unit: usize, range: Range<usize>) -> Self::Reduced;
    fn merge(a: Self::Reduced, b: Self::Reduced) -> Self::Reduced;

    /// # Safety
    /// No other thread may be writing to the same range of the same unit.
    unsafe fn write(&self, unit: usize, range: Range<usize>, reduced: &Self::Reduced);
}

fn run<P: Pass>(pass: &P, lines: Lines, split: bool) {
    let width = lines.inner.min(P::WIDTH);
    let units = lines.outer * lines.inner.div_ceil(P::WIDTH);
    let unit_elements = lines.len * width;
    if split && units < ENOUGH_LINES && unit_elements >= 2 * PART {
        let part = (PART / width).max(lines.len.div_ceil(MAX_PARTS));
        let parts: Vec<_> = (0..lines.len).step_by(part).map(|start| start..lines.len.min(start + part)).collect();
        for unit in 0..units {
            let reduced: Vec<_> = parts.par_iter().map(|range| pass.reduce(unit, range.clone())).collect();
            let Some(whole) = reduced.into_iter().reduce(P::merge) else { continue };
            // SAFETY: the parts do not overlap.
            parts.par_iter().for_each(|range| unsafe { pass.write(unit, range.clone(), &whole) });
        }
        return;
    }
    let whole_unit = |unit: usize| {
        let reduced = pass.reduce(unit, 0..lines.len);
        // SAFETY: each unit is visited once.
        unsafe { pass.write(unit, 0..lines.len, &reduced) }
    };
    if units * unit_elements < SERIAL {
        (0..units).for_each(whole_unit)
    } else {
        let units_per_task = (PART / unit_elements).max(1);
        (0..units).into_par_iter().with_min_len(units_per_task).for_each(whole_unit)
    }
}
