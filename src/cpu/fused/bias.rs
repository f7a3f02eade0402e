//! The gradient of a bias that lines share: what they add to it is summed while it is in a cache, and never all in memory.

use super::backward::{Backward, BackwardRows, LogitsGradient};
use crate::cpu::lanes::MAX_LANES;
use crate::cpu::level::{Simd, Task};
use crate::cpu::memory::{Elements, Unfilled};
use crate::cpu::{are_split, share_each, whole, Element, Pass, ENOUGH_LINES, PART};
use crate::lines::Lines;
use crate::state::Real;
use crate::sums::{in_a_row, offset, SumOver};
use std::ops::Range;

/// Logits' gradients that are made before they are added up: a cache has room for them and their sums, beside what they are made of.
const AT_ONCE: usize = 1 << 14;
/// Lines that are summed up in a part, at least.
const LEAST_OF_PART: usize = 8;

/// Which lines' gradients are summed, and how that is shared out: a task has a few neighbouring lines of the bias and a part of the lines that
/// these are broadcast to. There are the same parts whatever the number of threads.
pub(super) struct BiasSums {
    of: SumOver,
    lines: Lines,
    /// How many lines of the bias lie side by side as those of the scores do, how many of these a task has, and how many tasks that makes.
    side_by_side: usize,
    lines_of_task: usize,
    tasks_side_by_side: usize,
    /// How many lines that are summed up follow each other, and how many of all of them a part has.
    in_a_row: usize,
    lines_of_part: usize,
    /// How many tasks each part is, and how many parts there are.
    tasks_of_part: usize,
    parts: usize,
}

impl BiasSums {
    /// For sums of these lines' gradients, unless each sum has one term, or what is summed are not whole lines, or they are so long that each is
    /// to be shared out.
    pub fn new(sum: &SumOver, lines: Lines) -> Option<Self> {
        if lines.inner > 1 || are_split(lines.count(), lines.len) || sum.terms() == 1 {
            return None;
        }
        let of = sum.of_lines(lines.len)?;
        let (side_by_side, in_a_row) = (in_a_row(&of.kept), in_a_row(&of.summed));
        // Parts are to take less memory than what is summed; where there are few, tasks have fewer lines, but as many as short ones are taken together.
        let most_parts = (of.terms() / LEAST_OF_PART).min(lines.elem_count() / PART).max(1);
        let at_once = (AT_ONCE / lines.len).max(1);
        let enough = of.sums().div_ceil((ENOUGH_LINES / most_parts).max(1)).max(MAX_LANES);
        let lines_of_task = enough.min(at_once).min(side_by_side);
        let tasks_side_by_side = side_by_side.div_ceil(lines_of_task);
        let tasks_of_part = of.sums() / side_by_side * tasks_side_by_side;
        let lines_of_part = of.terms().div_ceil(ENOUGH_LINES.div_ceil(tasks_of_part).min(most_parts));
        let parts = of.terms().div_ceil(lines_of_part);
        Some(Self {
            of,
            lines,
            side_by_side,
            lines_of_task,
            tasks_side_by_side,
            in_a_row,
            lines_of_part,
            tasks_of_part,
            parts,
        })
    }

    /// How many sums there are of all parts.
    pub fn count(&self) -> usize {
        self.parts * self.of.sums() * self.lines.len
    }

    /// Which of them make up those that are wanted.
    pub fn of_parts(&self) -> SumOver {
        let sums = self.of.sums() * self.lines.len;
        SumOver::new(&[self.parts, sums], &[1, sums])
    }

    /// A task's lines of the bias, by their numbers in it, and which part it is.
    fn task(&self, task: usize) -> (Range<usize>, usize) {
        let (part, rest) = (task / self.tasks_of_part, task % self.tasks_of_part);
        let (row, task) = (rest / self.tasks_side_by_side, rest % self.tasks_side_by_side);
        let first = task * self.lines_of_task;
        let end = self.side_by_side.min(first + self.lines_of_task);
        (row * self.side_by_side + first..row * self.side_by_side + end, part)
    }

    /// How many lines follow each other at most of those that are added to so many of the bias, which are taken at once.
    fn most_at_once(&self, kept: usize) -> usize {
        if kept > 1 {
            kept
        } else {
            (AT_ONCE / self.lines.len).clamp(1, self.in_a_row)
        }
    }

    /// Calls `f` with the lines that the part adds to these of the bias: a few neighbours at a time, of which each has its own sums, or, where
    /// it is a single line, all the same.
    fn each(&self, kept: Range<usize>, part: usize, mut f: impl FnMut(Range<usize>)) {
        let first = offset(&self.of.kept, kept.start);
        let most = self.most_at_once(kept.len()) / kept.len();
        let end = self.of.terms().min((part + 1) * self.lines_of_part);
        let mut i = part * self.lines_of_part;
        while i < end {
            let count = most.min(self.in_a_row - i % self.in_a_row).min(end - i);
            let line = first + offset(&self.of.summed, i);
            f(line..line + kept.len().max(count));
            i += count;
        }
    }
}

/// A backward pass that leaves such sums.
pub(super) struct WithBias<'a, T: Element> {
    pub(super) backward: Backward<'a, T>,
    pub(super) sums: &'a BiasSums,
    /// Part after part.
    pub(super) to: Elements<'a, T::Real>,
}

impl<T: Element> Task for WithBias<'_, T> {
    fn run<S: Simd>(self) {
        let sums = self.sums;
        let elements = sums.lines.elem_count();
        // Tasks have some of every page.
        Pass::<S>::use_first(&BackwardRows(self.backward), 0..elements);
        // SAFETY: the level is one that the CPU has, and each line is one task's.
        let task = |task: usize| unsafe { self.task::<S>(task) };
        share_each(elements, sums.tasks_of_part * sums.parts, &task);
    }
}

impl<T: Element> WithBias<'_, T> {
    /// # Safety
    /// The CPU has the instructions of `S`, and no other thread is at the same task.
    unsafe fn task<S: Simd>(&self, task: usize) {
        let (kept, part) = self.sums.task(task);
        let len = self.sums.lines.len;
        let mut sums = vec![0.0; kept.len() * len];
        let mut gradients = Unfilled::<T::Real>::new(self.sums.most_at_once(kept.len()) * len);
        let gradients = gradients.elements();
        self.sums.each(kept.clone(), part, |lines| {
            let count = lines.len() * len;
            let logits = Some(LogitsGradient::from(lines.start * len, gradients));
            let pass = BackwardRows(Backward { logits, ..self.backward });
            // SAFETY of the block: as promised by the caller; the pass writes the gradients of all of the lines.
            unsafe {
                whole::<S, BackwardRows<T>>(&pass, lines, len);
                let terms = std::slice::from_raw_parts(gradients.at(0, count), count);
                S::enter(
                    #[inline(always)]
                    || add(&mut sums, terms),
                )
            }
        });
        let start = (part * self.sums.of.sums() + kept.start) * len;
        let to = self.to.at(start, sums.len());
        // SAFETY: the sums are this task's, and there.
        sums.iter().enumerate().for_each(|(i, &sum)| unsafe { to.add(i).write(T::Real::nearest(sum)) });
    }
}

/// Adds to each sum one term, or of each of as many as follow each other.
#[inline(always)]
fn add<R: Copy + Into<f64>>(sums: &mut [f64], terms: &[R]) {
    for terms in terms.chunks_exact(sums.len()) {
        sums.iter_mut().zip(terms).for_each(
            #[inline(always)]
            |(sum, &term)| *sum += term.into(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Shape;

    /// Each line is added once, to the line of the bias that was broadcast to it, and all sums of a part are written.
    #[test]
    fn each_line_is_one_task_s() {
        for dims in
            [[3, 2, 5, 8], [1, 7, 1, 300], [2, 1, 70, 1000], [40, 6, 2, 9000], [2, 3, 4, 20000], [130, 3, 1, 16]]
        {
            for choice in 0..8 {
                let mut kept = dims;
                (0..3).filter(|d| choice >> d & 1 == 0).for_each(|d| kept[d] = 1);
                let sum = SumOver::new(&dims, &kept);
                let lines = Lines::new(&Shape::from(&dims[..]), 3);
                let Some(sums) = BiasSums::new(&sum, lines) else {
                    assert_eq!(sum.terms(), 1, "{dims:?} {kept:?}");
                    continue;
                };
                let mut of_line = vec![None; lines.count()];
                let mut written = vec![0; sums.parts * sums.of.sums()];
                for task in 0..sums.tasks_of_part * sums.parts {
                    let (of_bias, part) = sums.task(task);
                    of_bias.clone().for_each(|line| written[part * sums.of.sums() + line] += 1);
                    sums.each(of_bias.clone(), part, |lines| {
                        assert!(of_bias.len() == 1 || lines.len() == of_bias.len());
                        assert!(lines.len() <= sums.most_at_once(of_bias.len()));
                        for (i, line) in lines.enumerate() {
                            assert_eq!(of_line[line].replace(of_bias.start + i % of_bias.len()), None);
                        }
                    });
                }
                assert!(written.iter().all(|&times| times == 1));
                for (line, of) in of_line.into_iter().enumerate() {
                    let place = [line / (dims[1] * dims[2]), line / dims[2] % dims[1], line % dims[2]];
                    let expected = (0..3).fold(0, |at, d| at * kept[d] + if kept[d] == 1 { 0 } else { place[d] });
                    assert_eq!(of, Some(expected), "{dims:?} {kept:?} {line}");
                }
            }
        }
    }
}
