//! Softmax with what models put around it, in the same pass: what a call asks for, and where the elements of its tensors
//! lie. The logits are bias + softcap(scale · score), and −∞ where masked.

use crate::lines::Lines;
use crate::op::Output;
use crate::sums::SumOver;
use candle_core::{Layout, Shape};

/// What becomes of a line in which nothing takes part: none of its logits is above −∞, and it has no sink.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MaskedRows {
    /// Probabilities 0 (log-probabilities −∞), and gradients 0.
    #[default]
    Zero,
    /// NaN, as [`ops::softmax`](crate::ops::softmax) has it.
    Nan,
}

/// Which keys take part for the query at position p: p − before ≤ key ≤ p + after. The last query's position is the last
/// key's: p = query + (keys − queries), which may be negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub before: usize,
    pub after: usize,
    pub queries: usize,
}

impl Window {
    /// The first key that takes part and the one after the last; the same where none does.
    pub fn keys(&self, query: usize, keys: usize) -> (usize, usize) {
        // Sizes of tensors, which no isize is too small for; how far to look may be anything.
        let position = query as isize + keys as isize - self.queries as isize;
        let first = position.saturating_sub_unsigned(self.before).clamp(0, keys as isize);
        let end = position.saturating_add_unsigned(self.after).saturating_add(1).clamp(first, keys as isize);
        (first as usize, end as usize)
    }
}

/// Inverted dropout of the results. Element j of a line has the 16 bits j mod 8 of the 128 that Philox4x32-7 (Salmon et al.,
/// 2011) gives for the counter (j / 8, low half of the line's number, high half of it, 0) and the key (low half of the seed,
/// high half): the low half of a word before the high. It is dropped where they are below `threshold`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dropout {
    /// p · 2¹⁶ rounded, at most 2¹⁶ − 1.
    pub threshold: u32,
    pub seed: u64,
}

impl Dropout {
    /// What the results that are kept are multiplied with, so that the expected value stays what it was.
    pub fn kept_scale(&self) -> f64 {
        65536.0 / (65536 - self.threshold) as f64
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Options {
    pub output: Output,
    pub scale: f64,
    /// softcap(x) = cap · tanh(x / cap)
    pub softcap: Option<f64>,
    pub window: Option<Window>,
    /// Not together with [`Output::LogProbability`].
    pub dropout: Option<Dropout>,
    pub masked_rows: MaskedRows,
}

/// One of the dimensions that lines are numbered along, or several that lie in every tensor as one would: its size, and by
/// how much one step along it moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Axis {
    pub size: usize,
    /// The number of the line.
    pub line: usize,
    /// Offsets in elements: of scores and result, …
    pub scores: usize,
    /// … bias, mask and sinks (0 where there is none, and where it is broadcast).
    pub bias: usize,
    pub mask: usize,
    pub sink: usize,
    /// The number of the query: 1 along the queries' dimension if there is a window, else 0.
    pub query: usize,
}

/// Where the elements are. Scores and result are contiguous: element j of a line is `j · lines.inner` behind its first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub lines: Lines,
    /// Without those of size 1; the first varies slowest. Lines are numbered in row-major order.
    pub axes: Vec<Axis>,
    /// How far apart neighbours in a line are in the bias, if there is one, and in the mask.
    pub bias_step: usize,
    pub mask_step: usize,
}

/// Where a line's first elements are, as offsets in elements, and which query's it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub scores: usize,
    pub bias: usize,
    pub mask: usize,
    pub sink: usize,
    pub query: usize,
}

impl Geometry {
    /// Of lines along dimension `dim` of contiguous scores of this shape. Bias and mask are broadcast to that shape; the
    /// sinks are of dimension −3. `queries` is the queries' dimension if there is a window.
    pub fn new(
        shape: &Shape,
        dim: usize,
        bias: Option<&Layout>,
        mask: Option<&Layout>,
        sinks: Option<&Layout>,
        queries: Option<usize>,
    ) -> Self {
        let dims = shape.dims();
        let stride = |layout: Option<&Layout>, d: usize| layout.map_or(0, |layout| layout.stride()[d]);
        let mut axes: Vec<Axis> = Vec::new();
        let (mut lines_inside, mut elements_inside) = (1, 1);
        for d in (0..dims.len()).rev() {
            let scores = elements_inside;
            elements_inside *= dims[d];
            if d == dim || dims[d] == 1 {
                continue;
            }
            let outer = Axis {
                size: dims[d],
                line: lines_inside,
                scores,
                bias: stride(bias, d),
                mask: stride(mask, d),
                sink: if d + 3 == dims.len() { stride(sinks, 0) } else { 0 },
                query: usize::from(queries == Some(d)),
            };
            lines_inside *= dims[d];
            match axes.last_mut() {
                Some(inner) if outer.goes_on(inner) => inner.size *= outer.size,
                _ => axes.push(outer),
            }
        }
        axes.reverse();
        let lines = Lines::new(shape, dim);
        Self { lines, axes, bias_step: stride(bias, dim), mask_step: stride(mask, dim) }
    }

    pub fn place(&self, line: usize) -> Place {
        self.place_and_rest(line).0
    }

    /// And how many steps along the last axis lead there.
    fn place_and_rest(&self, line: usize) -> (Place, usize) {
        let (mut place, mut rest, mut steps) = (Place::default(), line, 0);
        for axis in &self.axes {
            // A division takes longer than the rest.
            steps = if axis.line == 1 { rest } else { rest / axis.line };
            rest -= steps * axis.line;
            place.step(axis, steps);
        }
        (place, steps)
    }

    /// The places of the lines from `line` on.
    pub fn places(&self, line: usize) -> Places<'_> {
        Places { geometry: self, line, place: Place::default(), evenly: 0 }
    }
}

/// The places of one line after the other.
pub(crate) struct Places<'a> {
    geometry: &'a Geometry,
    /// The next line, …
    line: usize,
    /// … and how many lines from it on are evenly apart along the last axis; or 0 where it is not known yet.
    evenly: usize,
    /// Where the next line is, if it is known.
    place: Place,
}

impl Places<'_> {
    /// How many lines from the next one on, which there is, are evenly apart.
    #[inline(always)]
    pub fn evenly(&mut self) -> usize {
        if self.evenly == 0 {
            let (place, steps) = self.geometry.place_and_rest(self.line);
            self.place = place;
            self.evenly = self.geometry.axes.last().map_or(1, |axis| axis.size - steps);
        }
        self.evenly
    }

    /// How many steps along the last axis lead to the next line, which there is.
    #[inline(always)]
    pub fn along(&mut self) -> usize {
        self.geometry.axes.last().map_or(0, |axis| axis.size - self.evenly())
    }

    /// The next line's, which there is.
    #[inline(always)]
    pub fn next(&mut self) -> Place {
        self.run(1).0
    }

    /// The next lines that are evenly apart, `most` at most, of those that there are: the first one's place, how many, and the
    /// axis that they are along.
    #[inline(always)]
    pub fn run(&mut self, most: usize) -> (Place, usize, Axis) {
        let (count, first) = (self.evenly().min(most), self.place);
        let axis = self.geometry.axes.last().copied().unwrap_or_default();
        self.place.step(&axis, count);
        self.line += count;
        self.evenly -= count;
        (first, count, axis)
    }
}

impl Place {
    #[inline(always)]
    pub fn step(&mut self, axis: &Axis, steps: usize) {
        self.scores += steps * axis.scores;
        self.bias += steps * axis.bias;
        self.mask += steps * axis.mask;
        self.sink += steps * axis.sink;
        self.query += steps * axis.query;
    }
}

impl Axis {
    /// Whether a step along this one is as one more along `inner`, which ends where this steps.
    fn goes_on(&self, inner: &Self) -> bool {
        let steps = |axis: &Self| [axis.line, axis.scores, axis.bias, axis.mask, axis.sink, axis.query];
        steps(self) == steps(inner).map(|step| step * inner.size)
    }
}

/// A tensor's storage, and where its first element is.
pub(crate) struct Operand<'a, S> {
    pub storage: &'a S,
    pub start: usize,
}

/// What is read beside the scores: bias and sinks of their dtype, the mask of u8 (0: does not take part). Every offset that
/// the geometry leads to lies in its storage.
pub(crate) struct Around<'a, S> {
    pub bias: Option<Operand<'a, S>>,
    pub mask: Option<Operand<'a, S>>,
    pub sinks: Option<Operand<'a, S>>,
}

/// Which gradients a backward pass is to give.
pub(crate) struct Wanted {
    pub scores: bool,
    /// The bias': which sums they are of the logits' gradients, a contiguous tensor in the scores' shape.
    pub bias: Option<SumOver>,
    /// The sinks': of what each line adds to its sink's, in the order of the lines.
    pub sinks: Option<SumOver>,
}

/// Those that it gave. With p the probabilities, g the gradient of the result
/// (times the dropout's factor) and z the logits: ∂z = p·(g − Σ g·p), for log-probabilities g − p·Σ g over what takes part;
/// ∂score = ∂z · scale · (1 − tanh²(scale · score / cap)); ∂sink = −p_sink · Σ g·p, for log-probabilities −p_sink · Σ g.
pub(crate) struct Gradients<S> {
    /// In the scores' dtype.
    pub scores: Option<S>,
    /// In the dtype computed in (f32, or f64 for f64), in the order of the sums.
    pub bias: Option<S>,
    pub sinks: Option<S>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_in_a_window() {
        let none = usize::MAX;
        let window = |before, after, queries| Window { before, after, queries };
        // Causal, with more keys than queries: the last query sees all of them.
        let causal = window(none, 0, 3);
        assert_eq!([0, 1, 2].map(|query| causal.keys(query, 5)), [(0, 3), (0, 4), (0, 5)]);
        // Fewer keys than queries: the first queries see none.
        assert_eq!([0, 1, 2].map(|query| causal.keys(query, 1)), [(0, 0), (0, 0), (0, 1)]);
        let local = window(1, 2, 6);
        assert_eq!([0, 1, 5].map(|query| local.keys(query, 6)), [(0, 3), (0, 4), (4, 6)]);
        assert_eq!(window(0, 0, 4).keys(2, 4), (2, 3));
        assert_eq!(window(none, none, 1).keys(0, 7), (0, 7));
        assert_eq!(window(0, 1, 9).keys(0, 3), (0, 0));
    }

    #[test]
    fn axes_are_joined_where_every_tensor_lies_so() {
        let shape = Shape::from((2, 3, 4, 5));
        let axes = |geometry: &Geometry| geometry.axes.iter().map(|axis| (axis.size, axis.line)).collect::<Vec<_>>();
        let alone = Geometry::new(&shape, 3, None, None, None, None);
        assert_eq!((axes(&alone), alone.bias_step), (vec![(24, 1)], 0));
        // The same bias for every query of a head.
        let bias = Layout::contiguous((3, 1, 5)).broadcast_as((2, 3, 4, 5)).unwrap();
        let biased = Geometry::new(&shape, 3, Some(&bias), None, None, None);
        assert_eq!((axes(&biased), biased.bias_step), (vec![(2, 12), (3, 4), (4, 1)], 1));
        let whole = Layout::contiguous((2, 3, 4, 5));
        let masked = Geometry::new(&shape, 3, Some(&whole), Some(&whole), None, None);
        assert_eq!(axes(&masked), [(24, 1)]);
        // Sinks and queries are of one dimension each.
        let sinks = Layout::contiguous(3);
        let attention = Geometry::new(&shape, 3, None, None, Some(&sinks), Some(2));
        assert_eq!(axes(&attention), [(2, 12), (3, 4), (4, 1)]);
        assert_eq!(attention.place(23), Place { scores: 115, bias: 0, mask: 0, sink: 2, query: 3 });
        // On either side of the softmax dimension, nothing is joined unless it has size 1.
        assert_eq!(axes(&Geometry::new(&shape, 1, None, None, None, None)), [(2, 20), (20, 1)]);
        assert_eq!(axes(&Geometry::new(&Shape::from((2, 1, 4)), 1, None, None, None, None)), [(8, 1)]);
        assert!(Geometry::new(&Shape::from((1, 7, 1)), 1, None, None, None, None).axes.is_empty());
    }

    #[test]
    fn places_are_where_the_layouts_say() {
        let (shape, dim) = (Shape::from((2, 3, 4, 5)), 1);
        let bias = Layout::contiguous((5, 3, 1, 2)).transpose(0, 3).unwrap().broadcast_as((2, 3, 4, 5)).unwrap();
        let mask = Layout::contiguous((4, 1)).broadcast_as((2, 3, 4, 5)).unwrap();
        let geometry = Geometry::new(&shape, dim, Some(&bias), Some(&mask), None, None);
        let mut line = 0;
        for a in 0..2 {
            for b in 0..4 {
                for c in 0..5 {
                    let place = geometry.place(line);
                    let at =
                        |layout: &Layout| [a, 0, b, c].iter().zip(layout.stride()).map(|(i, s)| i * s).sum::<usize>();
                    assert_eq!(place.scores, at(&Layout::contiguous(&shape)));
                    assert_eq!((place.bias, place.mask), (at(&bias), at(&mask)));
                    line += 1;
                }
            }
        }
        for first in 0..line {
            let mut places = geometry.places(first);
            (first..line).for_each(|line| assert_eq!(places.next(), geometry.place(line), "from line {first}"));
            let (mut places, mut at) = (geometry.places(first), first);
            for most in [3, 1, 2, 7].into_iter().cycle() {
                if at == line {
                    break;
                }
                let (place, count, axis) = places.run(most.min(line - at));
                assert!((1..=most).contains(&count));
                for i in 0..count {
                    let mut place = place;
                    place.step(&axis, i);
                    assert_eq!(place, geometry.place(at + i), "from line {first}");
                }
                at += count;
            }
        }
        assert_eq!((line, geometry.bias_step, geometry.mask_step), (geometry.lines.count(), bias.stride()[dim], 0));
    }
}
