//! Sums over some of a tensor's dimensions, as the gradient of what was broadcast needs them: which elements they are of.

/// A dimension, or several that are neighbours: how many steps of what length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Steps {
    pub size: usize,
    pub stride: usize,
}

/// The dimensions of a contiguous tensor with elements that are kept and those that are summed over, each outermost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SumOver {
    pub kept: Vec<Steps>,
    pub summed: Vec<Steps>,
}

impl SumOver {
    /// Of a tensor of shape `dims` over each dimension that has size 1 in `kept`, which has the others as they are.
    pub fn new(dims: &[usize], kept: &[usize]) -> Self {
        let mut sum = Self { kept: vec![], summed: vec![] };
        let mut stride = 1;
        for (&size, &kept) in dims.iter().zip(kept).rev().filter(|(&size, _)| size != 1) {
            let list = if kept == size { &mut sum.kept } else { &mut sum.summed };
            match list.last_mut() {
                Some(inner) if inner.stride * inner.size == stride => inner.size *= size,
                _ => list.push(Steps { size, stride }),
            }
            stride *= size;
        }
        sum.kept.reverse();
        sum.summed.reverse();
        sum
    }

    /// The same in lines of `len` neighbours along the last dimension, if that is kept: of which lines each line of sums is one.
    pub fn of_lines(&self, len: usize) -> Option<Self> {
        let (inner, outer) = self.kept.split_last()?;
        if inner.stride != 1 || !inner.size.is_multiple_of(len) {
            return None;
        }
        let of_lines = |dims: &[Steps]| {
            dims.iter().map(|&Steps { size, stride }| Steps { size, stride: stride / len }).collect::<Vec<_>>()
        };
        let lines = Steps { size: inner.size / len, stride: 1 };
        let kept = of_lines(outer).into_iter().chain((lines.size > 1).then_some(lines)).collect();
        Some(Self { kept, summed: of_lines(&self.summed) })
    }

    /// How many sums there are, …
    pub fn sums(&self) -> usize {
        self.kept.iter().map(|dim| dim.size).product()
    }

    /// … and of how many elements each.
    pub fn terms(&self) -> usize {
        self.summed.iter().map(|dim| dim.size).product()
    }
}

/// How many elements follow each other along the last of these dimensions.
pub(crate) fn in_a_row(dims: &[Steps]) -> usize {
    match dims.last() {
        Some(Steps { size, stride: 1 }) => *size,
        _ => 1,
    }
}

/// Where the `index`-th element is, the last dimension varying fastest.
pub(crate) fn offset(dims: &[Steps], mut index: usize) -> usize {
    let mut offset = 0;
    for dim in dims.iter().rev() {
        offset += index % dim.size * dim.stride;
        index /= dim.size;
    }
    offset
}
