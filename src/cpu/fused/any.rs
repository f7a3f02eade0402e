//! Results, or their gradients, of any dtype.

use super::NAME;
use crate::cpu::lanes::{Lanes, Pack, MAX_LANES};
use crate::cpu::level::Simd;
use crate::cpu::memory::Elements;
use crate::cpu::rows::ahead_in;
use crate::cpu::Element;
use crate::lines::unsupported_dtype;
use crate::op::Output;
use crate::state::Real;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Result, WithDType};
use half::{bf16, f16};
use std::ops::Range;

/// Results (or their gradients) of a dtype of their own.
#[derive(Clone, Copy)]
pub(crate) enum Any<'a> {
    F16(Elements<'a, f16>),
    BF16(Elements<'a, bf16>),
    F32(Elements<'a, f32>),
    F64(Elements<'a, f64>),
}

impl<'a> Any<'a> {
    /// To be read only, from `start` on.
    pub(super) fn read(from: &'a CpuStorage, start: usize) -> Result<Self> {
        match from {
            CpuStorage::F16(xs) => Ok(Any::F16(Elements::read(&xs[start..]))),
            CpuStorage::BF16(xs) => Ok(Any::BF16(Elements::read(&xs[start..]))),
            CpuStorage::F32(xs) => Ok(Any::F32(Elements::read(&xs[start..]))),
            CpuStorage::F64(xs) => Ok(Any::F64(Elements::read(&xs[start..]))),
            other => Err(unsupported_dtype(other.dtype(), NAME)),
        }
    }

    pub(super) fn use_first(&self, elements: Range<usize>) {
        match self {
            Any::F16(out) => out.use_first(elements),
            Any::BF16(out) => out.use_first(elements),
            Any::F32(out) => out.use_first(elements),
            Any::F64(out) => out.use_first(elements),
        }
    }

    /// The same number in all of `len` elements.
    ///
    /// # Safety
    /// No other thread is using them.
    pub(super) unsafe fn fill<S: Simd>(&self, start: usize, len: usize, x: f64) {
        // SAFETY: as promised by the caller.
        unsafe {
            match self {
                Any::F16(to) => fill::<S, _>(to, start, len, f16::from_f64(x)),
                Any::BF16(to) => fill::<S, _>(to, start, len, bf16::from_f64(x)),
                Any::F32(to) => fill::<S, _>(to, start, len, x as f32),
                Any::F64(to) => fill::<S, _>(to, start, len, x),
            }
        }
    }
}

/// # Safety
/// No other thread is using the elements.
unsafe fn fill<S: Simd, T: Copy>(to: &Elements<T>, start: usize, len: usize, x: T) {
    let (to, ahead) = (to.at(start, len), ahead_in(to));
    for first in (0..len).step_by(MAX_LANES) {
        // Memory that is written is read first.
        S::prefetch(to.wrapping_add(first + ahead));
        // SAFETY: the elements are there.
        (first..len.min(first + MAX_LANES)).for_each(|i| unsafe { to.add(i).write(x) });
    }
}

/// What is computed in, from and to any dtype.
pub(crate) trait Wide: Element<Real = Self> + Real + Into<f64> + WithDType {
    /// # Safety
    /// The CPU has the instructions of `S`, and `to` is valid for writes of `len` elements.
    unsafe fn load_any<S: Simd>(from: &Any, start: usize, len: usize, to: *mut Self);

    /// Writes `count` parts, each with one rounding; `part` is asked for one when those before are written.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, what a part is made from is valid for reads and writes of its elements and up to a
    /// whole vector, and no other thread is using those written to.
    unsafe fn store_any<S: Simd>(to: &Any, count: usize, part: impl FnMut(usize) -> Part<Self>);
}

/// Elements on their way out: what `last` makes of `from`.
pub(crate) struct Part<R> {
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) from: *mut R,
    pub(super) last: Last<R>,
}

/// What is still to be done with numbers on their way out.
#[derive(Clone, Copy)]
pub(crate) struct Last<R> {
    pub(super) make: Make<R>,
    /// A byte for each, 0 where the result is to be 0, and as many more as a vector has.
    pub(super) keep: Option<*const u8>,
}

#[derive(Clone, Copy)]
pub(super) enum Make<R> {
    /// Scaled exponentials become probabilities with a scale, and these are so much at most.
    Scaled(R, R),
    /// Logits become results, with what [`Call::scales`] gives.
    Of(Output, R, R),
    /// The same with a maximum and a scale for each, and as many more as a vector has.
    OfEach(Output, *const R, *const R),
}

impl<R: Real> Last<R> {
    /// # Safety
    /// The CPU has the instructions of `V`, and element `i` is one of those meant.
    #[inline(always)]
    unsafe fn of<V: Lanes<Real = R>>(&self, i: usize, x: V) -> V {
        let x = match self.make {
            Make::Scaled(scale, most) => (x * V::splat(scale)).at_most(V::splat(most)),
            Make::Of(output, max, scale) => output.of(x - V::splat(max), V::splat(scale)),
            // SAFETY: there is one of both for each, and for a vector more.
            Make::OfEach(output, max, scale) => unsafe { output.of(x - V::load(max.add(i)), V::load(scale.add(i))) },
        };
        match self.keep {
            // SAFETY: there is a byte for each, and for a vector more.
            Some(keep) => unsafe { x.where_kept(keep.add(i), R::ZERO) },
            None => x,
        }
    }
}

/// # Safety
/// As of [`Wide::load_any`].
#[inline(always)]
unsafe fn widen<S: Simd, T: Element>(from: &Elements<T>, start: usize, len: usize, to: *mut T::Real) {
    let (from, ahead) = (from.at(start, len).cast_const(), ahead_in(from));
    for i in (0..len).step_by(T::Lanes::<S>::COUNT) {
        let count = T::Lanes::<S>::COUNT.min(len - i);
        S::prefetch(from.wrapping_add(i + ahead));
        // SAFETY: as promised by the caller.
        unsafe { T::read::<S>(from.add(i), count, T::Real::ZERO).put(to.add(i), count) }
    }
}

/// # Safety
/// As of [`Wide::store_any`].
#[inline(always)]
unsafe fn narrow<S: Simd, T: Element>(to: &Elements<T>, count: usize, mut part: impl FnMut(usize) -> Part<T::Real>) {
    let ahead = ahead_in(to);
    for i in 0..count {
        let Part { start, len, from, last } = part(i);
        let to = to.at(start, len);
        // SAFETY of the block: as promised by the caller.
        unsafe {
            // A loop of its own for what is asked for most.
            match last {
                Last { make: make @ Make::Scaled(..), keep: None } => {
                    narrow_part::<S, T>(to, len, ahead, from, Last { make, keep: None })
                }
                Last { make: Make::OfEach(Output::Probability, max, scale), keep: None } => {
                    let make = Make::OfEach(Output::Probability, max, scale);
                    narrow_part::<S, T>(to, len, ahead, from, Last { make, keep: None })
                }
                last => narrow_part::<S, T>(to, len, ahead, from, last),
            }
        }
    }
}

/// # Safety
/// As of [`Wide::store_any`].
#[inline(always)]
unsafe fn narrow_part<S: Simd, T: Element>(
    to: *mut T,
    len: usize,
    ahead: usize,
    from: *const T::Real,
    last: Last<T::Real>,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        T::write::<S>(
            to,
            len,
            #[inline(always)]
            |i, count| {
                // Memory that is written is read first.
                S::prefetch(to.wrapping_add(i + ahead));
                last.of(i, T::Lanes::<S>::get(from.add(i), count))
            },
        )
    }
}

/// # Safety
/// As of [`Wide::load_any`].
#[inline(always)]
unsafe fn convert<A: Copy, B>(from: *const A, to: *mut B, len: usize, f: impl Fn(A) -> B) {
    // SAFETY: as promised by the caller.
    (0..len).for_each(|i| unsafe { to.add(i).write(f(*from.add(i))) });
}

/// # Safety
/// As of [`Wide::store_any`].
#[inline(always)]
unsafe fn convert_parts<V: Lanes, B>(
    to: &Elements<B>,
    count: usize,
    mut part: impl FnMut(usize) -> Part<V::Real>,
    f: impl Fn(V::Real) -> B,
) {
    for i in 0..count {
        let Part { start, len, from, last } = part(i);
        // SAFETY of the block: as promised by the caller.
        unsafe {
            for i in (0..len).step_by(V::COUNT) {
                last.of(i, V::load(from.add(i))).store(from.add(i));
            }
            convert(from, to.at(start, len), len, &f);
        }
    }
}

/// To an f32 that rounds to any shorter format as `x` would: toward zero, and odd if inexact.
#[inline(always)]
fn to_odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || x.is_nan() {
        return near;
    }
    let toward_zero = near.to_bits() - u32::from(f64::from(near).abs() > x.abs());
    f32::from_bits(toward_zero | 1)
}

// SAFETY of the blocks: as promised by the callers.
impl Wide for f32 {
    #[inline(always)]
    unsafe fn load_any<S: Simd>(from: &Any, start: usize, len: usize, to: *mut f32) {
        unsafe {
            match from {
                Any::F16(from) => widen::<S, f16>(from, start, len, to),
                Any::BF16(from) => widen::<S, bf16>(from, start, len, to),
                Any::F32(from) => widen::<S, f32>(from, start, len, to),
                Any::F64(from) => convert(from.at(start, len), to, len, |x| x as f32),
            }
        }
    }

    #[inline(always)]
    unsafe fn store_any<S: Simd>(to: &Any, count: usize, part: impl FnMut(usize) -> Part<f32>) {
        unsafe {
            match to {
                Any::F16(to) => narrow::<S, f16>(to, count, part),
                Any::BF16(to) => narrow::<S, bf16>(to, count, part),
                Any::F32(to) => narrow::<S, f32>(to, count, part),
                Any::F64(to) => convert_parts::<S::F32, _>(to, count, part, f64::from),
            }
        }
    }
}

impl Wide for f64 {
    #[inline(always)]
    unsafe fn load_any<S: Simd>(from: &Any, start: usize, len: usize, to: *mut f64) {
        unsafe {
            match from {
                Any::F16(from) => convert(from.at(start, len), to, len, f16::to_f64),
                Any::BF16(from) => convert(from.at(start, len), to, len, bf16::to_f64),
                Any::F32(from) => convert(from.at(start, len), to, len, f64::from),
                Any::F64(from) => widen::<S, f64>(from, start, len, to),
            }
        }
    }

    #[inline(always)]
    unsafe fn store_any<S: Simd>(to: &Any, count: usize, part: impl FnMut(usize) -> Part<f64>) {
        unsafe {
            match to {
                Any::F16(to) => convert_parts::<S::F64, _>(to, count, part, |x| f16::from_f32(to_odd(x))),
                Any::BF16(to) => convert_parts::<S::F64, _>(to, count, part, |x| bf16::from_f32(to_odd(x))),
                Any::F32(to) => convert_parts::<S::F64, _>(to, count, part, |x| x as f32),
                Any::F64(to) => narrow::<S, f64>(to, count, part),
            }
        }
    }
}
