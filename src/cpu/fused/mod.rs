//! Softmax with scale, softcap, bias, mask, window, sinks and dropout in the same pass.
//!
//! Logits are made a block at a time in memory that stays in a cache, in the type computed in; what is made of them there
//! is written with one rounding. So reading knows the scores' dtype and writing the result's, and neither the other's.

mod any;
mod backward;
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
use crate::lines::unsupported_dtype;
use crate::sums::SumOver;
pub(crate) use any::{Any, Wide};
use backward::{Backward, BackwardColumns, BackwardRows};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, WithDType};
use columns::Columns;
use logits::Call;
use rows::Rows;
use short::limits;

const NAME: &str = "fused-softmax";

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
        let mut logits = wanted.bias.as_ref().map(|_| Unfilled::<T::Real>::new(lines.elem_count()));
        let mut sinks = wanted.sinks.as_ref().map(|_| Unfilled::<T::Real>::new(lines.count()));
        Level::best().run(Backward {
            call,
            g,
            scores: scores.as_mut().map(Unfilled::elements),
            logits: logits.as_mut().map(Unfilled::elements),
            sinks: sinks.as_mut().map(Unfilled::elements),
        });
        // SAFETY: every element is of one line, and every line is written; sinks are asked for where there are some.
        let (scores, logits, sinks) = unsafe {
            (
                scores.map(|scores| T::to_cpu_storage_owned(scores.filled())),
                logits.map(|logits| T::Real::to_cpu_storage_owned(logits.filled())),
                sinks.map(|sinks| T::Real::to_cpu_storage_owned(sinks.filled())),
            )
        };
        let summed = |terms: Option<CpuStorage>, sum: &Option<SumOver>| {
            terms.zip(sum.as_ref()).map(|(terms, sum)| sum_over(terms, sum)).transpose()
        };
        Ok(Gradients { scores, bias: summed(logits, &wanted.bias)?, sinks: summed(sinks, &wanted.sinks)? })
    }
    let g = Any::read(gradient.storage, gradient.start)?;
    by_dtype!(scores.storage, |xs| {
        let xs = &xs[scores.start..][..geometry.lines.elem_count()];
        run(Call::new(options, geometry, Elements::read(xs), around)?, g, wanted)
    })
}
