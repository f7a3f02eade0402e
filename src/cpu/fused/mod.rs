//! Softmax with scale, softcap, bias, mask, window, sinks and dropout in the same pass.
//!
//! Logits are made a block at a time in memory that stays in a cache, in the type computed in; what is made of them there
//! is written with one rounding. So reading knows the scores' dtype and writing the result's, and neither the other's.

mod any;
mod backward;
mod bias;
mod columns;
mod logits;
mod rows;
mod short;
mod short_backward;

use super::level::{Level, Simd, Task};
use super::memory::{filled, Elements, Unfilled};
use super::sum::sum_over;
use super::{run, Element};
use crate::fused::{Around, Geometry, Gradients, Operand, Options, Wanted};
use crate::fused_op::NAME;
use crate::lines::unsupported_dtype;
use crate::sums::SumOver;
pub(crate) use any::{Any, Wide};
use backward::{Backward, BackwardColumns, BackwardRows, LogitsGradient};
use bias::{BiasSums, WithBias};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, WithDType};
use columns::Columns;
use logits::Call;
use rows::Rows;
use short::limits;

struct ForwardTask<'a, T: Element>(Call<'a, T>, Any<'a>);

impl<T: Element> Task for ForwardTask<'_, T> {
    fn run<S: Simd>(self) {
        let (call, out) = (self.0, self.1);
        let lines = call.geometry.lines;
        if call.softmaxed(&out).is_some_and(|of| of.narrow::<S>()) {
            return;
        }
        if lines.inner == 1 {
            run::<S, Rows<T>>(&Rows { call, limits: limits::<S, T>(&call), out }, lines, true)
        } else {
            run::<S, Columns<T>>(&Columns { call, out }, lines, true)
        }
    }
}

impl<T: Element> Task for Backward<'_, T> {
    fn run<S: Simd>(self) {
        let lines = self.call.geometry.lines;
        if self.of_scores().is_some_and(|of| of.narrow::<S>()) {
            return;
        }
        if lines.inner == 1 {
            run::<S, BackwardRows<T>>(&BackwardRows(self), lines, true)
        } else {
            run::<S, BackwardColumns<T>>(&BackwardColumns(self), lines, true)
        }
    }
}

/// Calls a function with the slice of the scores.
macro_rules! by_dtype {
    ($storage:expr, |$slice:ident| $body:expr) => {
        match $storage {
            CpuStorage::F16($slice) => $body,
            CpuStorage::BF16($slice) => $body,
            CpuStorage::F32($slice) => $body,
            CpuStorage::F64($slice) => $body,
            other => Err(unsupported_dtype(other.dtype(), NAME)),
        }
    };
}

/// The result, in a new storage. There is at least one element.
pub(crate) fn forward(
    options: &Options,
    geometry: &Geometry,
    scores: Operand<CpuStorage>,
    around: &Around<CpuStorage>,
    out: DType,
) -> Result<CpuStorage> {
    let len = geometry.lines.elem_count();
    by_dtype!(scores.storage, |xs| {
        let call = Call::new(options, geometry, Elements::read(&xs[scores.start..][..len]), around)?;
        // SAFETY: every element is of one line, and every line is written.
        unsafe {
            Ok(match out {
                DType::F16 => CpuStorage::F16(filled(len, |out| Level::best().run(ForwardTask(call, Any::F16(out))))),
                DType::BF16 => {
                    CpuStorage::BF16(filled(len, |out| Level::best().run(ForwardTask(call, Any::BF16(out)))))
                }
                DType::F32 => CpuStorage::F32(filled(len, |out| Level::best().run(ForwardTask(call, Any::F32(out))))),
                DType::F64 => CpuStorage::F64(filled(len, |out| Level::best().run(ForwardTask(call, Any::F64(out))))),
                other => return Err(unsupported_dtype(other, NAME)),
            })
        }
    })
}

/// The result over the scores, which are of its dtype.
pub(crate) fn forward_inplace(
    options: &Options,
    geometry: &Geometry,
    scores: &mut CpuStorage,
    start: usize,
    around: &Around<CpuStorage>,
) -> Result<()> {
    fn run<'a, T: Element + WithDType>(
        options: &'a Options,
        geometry: &'a Geometry,
        xs: Elements<'a, T>,
        around: &Around<'a, CpuStorage>,
        any: impl FnOnce(Elements<'a, T>) -> Any<'a>,
    ) -> Result<()> {
        // Each element is read last before it is written.
        Level::best().run(ForwardTask(Call::new(options, geometry, xs, around)?, any(xs)));
        Ok(())
    }
    let range = start..start + geometry.lines.elem_count();
    match scores {
        CpuStorage::F16(xs) => run(options, geometry, Elements::write(&mut xs[range]), around, Any::F16),
        CpuStorage::BF16(xs) => run(options, geometry, Elements::write(&mut xs[range]), around, Any::BF16),
        CpuStorage::F32(xs) => run(options, geometry, Elements::write(&mut xs[range]), around, Any::F32),
        CpuStorage::F64(xs) => run(options, geometry, Elements::write(&mut xs[range]), around, Any::F64),
        other => Err(unsupported_dtype(other.dtype(), NAME)),
    }
}

/// The gradients that are wanted, given the result's. There is at least one element.
pub(crate) fn backward(
    options: &Options,
    geometry: &Geometry,
    scores: Operand<CpuStorage>,
    around: &Around<CpuStorage>,
    gradient: Operand<CpuStorage>,
    wanted: &Wanted,
) -> Result<Gradients<CpuStorage>> {
    fn run<T: Element + WithDType>(call: Call<T>, g: Any, wanted: &Wanted) -> Result<Gradients<CpuStorage>> {
        let lines = call.geometry.lines;
        let mut scores = wanted.scores.then(|| Unfilled::<T>::new(lines.elem_count()));
        // Of the logits: sums of parts of the lines that share a bias, or all gradients.
        let parts = wanted.bias.as_ref().and_then(|sum| BiasSums::new(sum, lines));
        let count = parts.as_ref().map_or(lines.elem_count(), BiasSums::count);
        let mut bias = wanted.bias.as_ref().map(|_| Unfilled::<T::Real>::new(count));
        let mut sinks = wanted.sinks.as_ref().map(|_| Unfilled::<T::Real>::new(lines.count()));
        let backward = Backward {
            call,
            g,
            scores: scores.as_mut().map(Unfilled::elements),
            logits: None,
            sinks: sinks.as_mut().map(Unfilled::elements),
        };
        match (bias.as_mut().map(Unfilled::elements), &parts) {
            (Some(to), Some(sums)) => Level::best().run(WithBias { backward, sums, to }),
            (to, _) => {
                let logits = to.map(|to| LogitsGradient::from(0, to));
                Level::best().run(Backward { logits, ..backward })
            }
        }
        // SAFETY: every element is of one line, every line is written, and every sum of every part; sinks are asked for where there are some.
        let (scores, bias, sinks) = unsafe {
            (
                scores.map(|scores| T::to_cpu_storage_owned(scores.filled())),
                bias.map(|bias| T::Real::to_cpu_storage_owned(bias.filled())),
                sinks.map(|sinks| T::Real::to_cpu_storage_owned(sinks.filled())),
            )
        };
        let summed = |terms: Option<CpuStorage>, sum: Option<&SumOver>| {
            terms.zip(sum).map(|(terms, sum)| sum_over(terms, sum)).transpose()
        };
        let of_parts = parts.map(|parts| parts.of_parts());
        Ok(Gradients {
            scores,
            bias: summed(bias, of_parts.as_ref().or(wanted.bias.as_ref()))?,
            sinks: summed(sinks, wanted.sinks.as_ref())?,
        })
    }
    let g = Any::read(gradient.storage, gradient.start)?;
    by_dtype!(scores.storage, |xs| {
        let xs = &xs[scores.start..][..geometry.lines.elem_count()];
        run(Call::new(options, geometry, Elements::read(xs), around)?, g, wanted)
    })
}
