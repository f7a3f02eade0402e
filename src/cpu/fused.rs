//! Softmax with scale, softcap, bias, mask, window, sinks and dropout in the same pass.
//!
//! Logits are made a block at a time in memory that stays in a cache, in the type computed in; what is made of them there
//! is written with one rounding. So reading knows the scores' dtype and writing the result's, and neither the other's.

use super::columns::{flat, merged, Strip, ROWS, WIDTH};
use super::exp::tanh_slope;
use super::lanes::{sum_of_long_terms, Lanes, Pack, MAX_LANES};
use super::level::{Level, Simd, Task};
use super::memory::{filled, Elements, Unfilled};
use super::random::{self, PER_COUNTER};
use super::rows::{ahead, blocks, sum_of, CacheLines, BLOCK_VECTORS, FAR_APART, IN_WORK, MAX_LAG};
use super::statistics::one;
use super::{run, Element, Pass};
use crate::fused::{Around, Geometry, Gradients, MaskedRows, Operand, Options, Place, Places};
use crate::lines::unsupported_dtype;
use crate::op::Output;
use crate::state::{CompensatedSum, Normalizer, Number, Real, SoftmaxState, Weighted};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, WithDType};
use half::{bf16, f16};
use std::mem::MaybeUninit;
use std::ops::Range;

const NAME: &str = "fused-softmax";

/// Lines up to this length are held whole, so that logits and exponentials are taken once: they stay in the second cache.
const HELD: usize = 1 << 15;
/// Shorter ones are taken together, up to this many elements, so that they stay in the first cache: each step is done for
/// all of them before the next, and no line waits for its own steps from a vector to one number.
const TOGETHER: usize = 2048;
/// No block has more elements.
const MAX_BLOCK: usize = BLOCK_VECTORS * MAX_LANES;
/// Lines of up to so many elements are taken in batches, …
const BATCH_LINE: usize = 64;
/// … which are of so many elements at most.
const BATCH: usize = BATCH_LINE * MAX_LANES;
/// Batches in work: of one the logits are made, one is summed and one written.
const IN_BATCHES: usize = 3;
/// How many rows the memory system is to be ahead of the arithmetic.
const AHEAD_ROWS: usize = 2 * ROWS;
/// The same where rows are written one by one.
const AHEAD_TO_WRITE: usize = 2;
/// A row of a strip, with room for whole vectors.
const ROW: usize = WIDTH + MAX_LANES;

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
    fn read(from: &'a CpuStorage, start: usize) -> Result<Self> {
        match from {
            CpuStorage::F16(xs) => Ok(Any::F16(Elements::read(&xs[start..]))),
            CpuStorage::BF16(xs) => Ok(Any::BF16(Elements::read(&xs[start..]))),
            CpuStorage::F32(xs) => Ok(Any::F32(Elements::read(&xs[start..]))),
            CpuStorage::F64(xs) => Ok(Any::F64(Elements::read(&xs[start..]))),
            other => Err(unsupported_dtype(other.dtype(), NAME)),
        }
    }

    /// The same number in all of `len` elements.
    ///
    /// # Safety
    /// No other thread is using them.
    unsafe fn fill<S: Simd>(&self, start: usize, len: usize, x: f64) {
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
    let to = to.at(start, len);
    for first in (0..len).step_by(MAX_LANES) {
        // Memory that is written is read first.
        S::prefetch(to.wrapping_add(first + ahead::<T>()));
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
    start: usize,
    len: usize,
    from: *mut R,
    last: Last<R>,
}

/// What is still to be done with numbers on their way out.
#[derive(Clone, Copy)]
pub(crate) struct Last<R> {
    make: Make<R>,
    /// A byte for each, 0 where the result is to be 0, and as many more as a vector has.
    keep: Option<*const u8>,
}

#[derive(Clone, Copy)]
enum Make<R> {
    /// Scaled exponentials become probabilities.
    Scaled(R),
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
            Make::Scaled(scale) => x * V::splat(scale),
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
    let from = from.at(start, len).cast_const();
    for i in (0..len).step_by(T::Lanes::<S>::COUNT) {
        let count = T::Lanes::<S>::COUNT.min(len - i);
        S::prefetch(from.wrapping_add(i + ahead::<T>()));
        // SAFETY: as promised by the caller.
        unsafe { T::read::<S>(from.add(i), count, T::Real::ZERO).put(to.add(i), count) }
    }
}

/// # Safety
/// As of [`Wide::store_any`].
#[inline(always)]
unsafe fn narrow<S: Simd, T: Element>(to: &Elements<T>, count: usize, mut part: impl FnMut(usize) -> Part<T::Real>) {
    for i in 0..count {
        let Part { start, len, from, last } = part(i);
        let to = to.at(start, len);
        // SAFETY of the block: as promised by the caller.
        unsafe {
            // A loop of its own for what is asked for most.
            match last {
                Last { make: make @ Make::Scaled(_), keep: None } => {
                    narrow_part::<S, T>(to, len, from, Last { make, keep: None })
                }
                Last { make: Make::OfEach(Output::Probability, max, scale), keep: None } => {
                    let make = Make::OfEach(Output::Probability, max, scale);
                    narrow_part::<S, T>(to, len, from, Last { make, keep: None })
                }
                last => narrow_part::<S, T>(to, len, from, last),
            }
        }
    }
}

/// # Safety
/// As of [`Wide::store_any`].
#[inline(always)]
unsafe fn narrow_part<S: Simd, T: Element>(to: *mut T, len: usize, from: *const T::Real, last: Last<T::Real>) {
    // SAFETY: as promised by the caller.
    unsafe {
        T::write::<S>(
            to,
            len,
            #[inline(always)]
            |i, count| {
                // Memory that is written is read first.
                S::prefetch(to.wrapping_add(i + ahead::<T>()));
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

/// Calls `f(start, count)` for the vectors of these elements; `count` is less than a vector's in the last call only.
#[inline(always)]
fn each<V: Lanes>(range: Range<usize>, mut f: impl FnMut(usize, usize)) {
    let mut i = range.start;
    while i + V::COUNT <= range.end {
        f(i, V::COUNT);
        i += V::COUNT;
    }
    if i < range.end {
        f(i, range.end - i);
    }
}

/// Scores that are neighbours in memory, at most a block, and what is beside them.
struct Run<R> {
    scores: usize,
    bias: usize,
    mask: usize,
    len: usize,
    /// Where the logits are to be: there is room for as many, and up to a whole vector.
    z: *mut R,
    /// The maximum of the logits, when they are there.
    max: R,
}

/// How far apart neighbours in a run are in the bias and in the mask.
#[derive(Clone, Copy)]
struct Steps {
    bias: usize,
    mask: usize,
    /// How many elements of the scores are asked for ahead.
    ahead: usize,
}

/// Everything that is read, by lines.
#[derive(Clone, Copy)]
struct Call<'a, T: Element> {
    options: &'a Options,
    geometry: &'a Geometry,
    scores: Elements<'a, T>,
    bias: Option<Elements<'a, T>>,
    mask: Option<Elements<'a, u8>>,
    sinks: Option<Elements<'a, T>>,
    scale: T::Real,
    /// (scale / cap, cap)
    cap: Option<(T::Real, T::Real)>,
}

impl<R> Run<R> {
    /// An element for each of the run's, from `first` on and `step` apart, as neighbours: in `to` if they are not.
    ///
    /// # Safety
    /// `to` is valid for writes of a block.
    #[inline(always)]
    unsafe fn neighbours<A: Copy>(&self, from: Elements<A>, first: usize, step: usize, to: *mut A) -> *const A {
        let from = from.at(first, (self.len - 1) * step + 1);
        if step == 1 {
            return from;
        }
        // SAFETY: the elements are there, and the room by the caller's promise.
        (0..self.len).for_each(|i| unsafe { to.add(i).write(*from.add(i * step)) });
        to
    }
}

impl<'a, T: Element + WithDType> Call<'a, T> {
    fn new(
        options: &'a Options,
        geometry: &'a Geometry,
        scores: Elements<'a, T>,
        around: &Around<'a, CpuStorage>,
    ) -> Result<Self> {
        fn elements<'a, A: WithDType>(operand: &Option<Operand<'a, CpuStorage>>) -> Result<Option<Elements<'a, A>>> {
            let slice = |operand: &Operand<'a, CpuStorage>| {
                Ok(Elements::read(&operand.storage.as_slice::<A>()?[operand.start..]))
            };
            operand.as_ref().map(slice).transpose()
        }
        let real = T::Real::nearest;
        Ok(Self {
            options,
            geometry,
            scores,
            bias: elements(&around.bias)?,
            mask: elements(&around.mask)?,
            sinks: elements(&around.sinks)?,
            scale: real(options.scale),
            cap: options.softcap.map(|cap| (real(options.scale / cap), real(cap))),
        })
    }
}

impl<T: Element> Call<'_, T> {
    fn is_log(&self) -> bool {
        self.options.output == Output::LogProbability
    }

    /// Which of the keys in `range` take part, as far as the window says.
    fn keys(&self, query: usize, range: &Range<usize>) -> Range<usize> {
        let (first, end) = match self.options.window {
            Some(window) => window.keys(query, self.geometry.lines.len),
            None => return range.clone(),
        };
        let first = first.clamp(range.start, range.end);
        first..end.clamp(first, range.end)
    }

    /// The logit in the denominator that has no output.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn sink<S: Simd>(&self, at: usize) -> Option<T::Real> {
        let sinks = self.sinks?;
        // SAFETY: one element is there; the rest by the caller's promise.
        Some(unsafe { one::<S, T>(sinks.at(at, 1)) })
    }

    /// Whether logits are made of neighbours in memory, and become probabilities. Of a narrow window in long lines so much less
    /// is read otherwise that it takes less time; a causal one took 1.11 to 1.25 of a softmax then, and 0.97 to 1.17 as a mask.
    fn is_of_neighbours(&self) -> bool {
        let neighbours = self.geometry.bias_step <= 1 && (self.mask.is_none() || self.geometry.mask_step == 1);
        let len = self.geometry.lines.len;
        let narrow = self.options.window.is_some_and(|window| {
            let (first, end) = window.keys(window.queries / 2, len);
            len > FAR_APART && end - first < len / 4
        });
        neighbours && !narrow && !self.is_log()
    }

    /// Those of a run along the last dimension.
    fn steps_along(&self) -> Steps {
        Steps { bias: self.geometry.bias_step, mask: self.geometry.mask_step, ahead: ahead::<T>() }
    }

    /// Elements `start..start + len` of a line along the last dimension.
    fn run_along(&self, place: &Place, start: usize, len: usize, z: *mut T::Real) -> Run<T::Real> {
        let steps = self.steps_along();
        let (bias, mask) = (place.bias + start * steps.bias, place.mask + start * steps.mask);
        Run { scores: place.scores + start, bias, mask, len, z, max: T::Real::NEG_INFINITY }
    }

    /// The logits of such a run; answers their maximum.
    ///
    /// # Safety
    /// As of [`logits`](Self::logits).
    #[inline(always)]
    unsafe fn logits_along<S: Simd>(&self, place: &Place, start: usize, len: usize, z: *mut T::Real) -> T::Real {
        let mut run = self.run_along(place, start, len, z);
        // SAFETY: as promised by the caller.
        unsafe { self.logits::<S>(std::slice::from_mut(&mut run), self.steps_along()) };
        run.max
    }

    /// Writes the logits of these runs, and −∞ up to a whole vector; notes their maxima.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and there is the room for logits that a run promises.
    #[inline(never)]
    unsafe fn logits<S: Simd>(&self, runs: &mut [Run<T::Real>], steps: Steps) {
        // SAFETY: as promised by the caller. A function of its own for all who need logits, entered anew.
        unsafe {
            S::enter(
                #[inline(always)]
                || self.logits_inside::<S>(runs, steps),
            )
        }
    }

    /// The bias where there is one for all of a run; else 0.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn shift<S: Simd>(&self, run: &Run<T::Real>, steps: Steps) -> T::Lanes<S> {
        T::Lanes::<S>::splat(match self.bias {
            // SAFETY: one element is there; the rest by the caller's promise.
            Some(bias) if steps.bias == 0 => unsafe { one::<S, T>(bias.at(run.bias, 1)) },
            _ => T::Real::ZERO,
        })
    }

    /// # Safety
    /// As of [`logits`](Self::logits).
    #[inline(always)]
    unsafe fn logits_inside<S: Simd>(&self, runs: &mut [Run<T::Real>], steps: Steps) {
        let mut bias_here = [MaybeUninit::<T>::uninit(); MAX_BLOCK];
        let mut mask_here = [MaybeUninit::<u8>::uninit(); MAX_BLOCK];
        let (bias_here, mask_here) = (bias_here.as_mut_ptr().cast::<T>(), mask_here.as_mut_ptr().cast::<u8>());
        let (zero, none) = (T::Real::ZERO, T::Real::NEG_INFINITY);
        // With one number for each element; else there is one for all of a run.
        let (bias, mask) = (self.bias.filter(|_| steps.bias != 0), self.mask.filter(|_| steps.mask != 0));
        let masked = self.mask.filter(|_| steps.mask == 0);
        let (scale, cap) =
            (T::Lanes::<S>::splat(self.scale), self.cap.map(|(inverse, cap)| [inverse, cap].map(Number::splat)));
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        // One loop for each combination.
        unsafe {
            match (cap, bias, mask) {
                (None, None, None) => logits_of::<S, T, _>(
                    runs,
                    self.scores,
                    masked,
                    steps.ahead,
                    #[inline(always)]
                    |run| {
                        let shift = self.shift::<S>(run, steps);
                        #[inline(always)]
                        move |x, _, _| x.mul_add(scale, shift)
                    },
                ),
                (None, Some(bias), None) => logits_of::<S, T, _>(
                    runs,
                    self.scores,
                    masked,
                    steps.ahead,
                    #[inline(always)]
                    |run| {
                        let bias = run.neighbours(bias, run.bias, steps.bias, bias_here);
                        #[inline(always)]
                        move |x, i, count| {
                            // Most biases have rows as the scores have them.
                            S::prefetch(bias.wrapping_add(i + steps.ahead));
                            x.mul_add(scale, T::read::<S>(bias.add(i), count, zero))
                        }
                    },
                ),
                (None, None, Some(mask)) => logits_of::<S, T, _>(
                    runs,
                    self.scores,
                    masked,
                    steps.ahead,
                    #[inline(always)]
                    |run| {
                        let (shift, keep) =
                            (self.shift::<S>(run, steps), run.neighbours(mask, run.mask, steps.mask, mask_here));
                        #[inline(always)]
                        move |x, i, count| x.mul_add(scale, shift).where_some_kept(keep.add(i), count, none)
                    },
                ),
                (Some([inverse, cap]), None, None) => logits_of::<S, T, _>(
                    runs,
                    self.scores,
                    masked,
                    steps.ahead,
                    #[inline(always)]
                    |run| {
                        let shift = self.shift::<S>(run, steps);
                        #[inline(always)]
                        move |x, _, _| (x * inverse).tanh().mul_add(cap, shift)
                    },
                ),
                (cap, bias, mask) => logits_of::<S, T, _>(
                    runs,
                    self.scores,
                    masked,
                    steps.ahead,
                    #[inline(always)]
                    |run| {
                        let shift = self.shift::<S>(run, steps);
                        let (bias, keep) = (
                            bias.map(|bias| run.neighbours(bias, run.bias, steps.bias, bias_here)),
                            mask.map(|mask| run.neighbours(mask, run.mask, steps.mask, mask_here)),
                        );
                        #[inline(always)]
                        move |x, i, count| {
                            let shift = match bias {
                                Some(bias) => T::read::<S>(bias.add(i), count, zero),
                                None => shift,
                            };
                            let logit = match cap {
                                Some([inverse, cap]) => (x * inverse).tanh().mul_add(cap, shift),
                                None => x.mul_add(scale, shift),
                            };
                            match keep {
                                Some(keep) => logit.where_some_kept(keep.add(i), count, none),
                                None => logit,
                            }
                        }
                    },
                ),
            }
        }
    }

    /// What the logits of a line become results with: its maximum, and what [`Output::of`] takes beside it. `None` is a line
    /// of nothing: those become 0, −∞ or NaN.
    fn scales<V: Lanes<Real = T::Real>>(&self, found: Option<Normalizer<T::Real>>) -> (T::Real, T::Real) {
        match found {
            Some(line) => {
                let scale = self.options.output.scale::<V>(line.sum);
                match self.options.dropout {
                    Some(dropout) => (line.max, scale * T::Real::nearest(dropout.kept_scale())),
                    None => (line.max, scale),
                }
            }
            None if self.sinks.is_some() || self.options.masked_rows == MaskedRows::Zero => {
                (T::Real::ZERO, T::Real::ZERO)
            }
            None => (T::Real::ZERO, T::Real::nearest(f64::NAN)),
        }
    }
}

/// Writes what `of(run)` makes of each vector of its scores, or −∞ for all of a run that is masked, and −∞ up to a whole
/// vector; notes the maxima.
///
/// # Safety
/// As of [`Call::logits`].
#[inline(always)]
unsafe fn logits_of<S: Simd, T: Element, F: Fn(T::Lanes<S>, usize, usize) -> T::Lanes<S>>(
    runs: &mut [Run<T::Real>],
    scores: Elements<T>,
    masked: Option<Elements<u8>>,
    ahead: usize,
    of: impl Fn(&Run<T::Real>) -> F,
) {
    let none = T::Lanes::<S>::splat(T::Real::NEG_INFINITY);
    for run in runs {
        // SAFETY of the block: as promised by the caller.
        unsafe {
            if masked.is_some_and(|mask| *mask.at(run.mask, 1) == 0) {
                (0..run.len).step_by(T::Lanes::<S>::COUNT).for_each(|i| none.store(run.z.add(i)));
                continue;
            }
            let (xs, z, f) = (scores.at(run.scores, run.len).cast_const(), run.z, of(run));
            let mut max = none;
            each::<T::Lanes<S>>(
                0..run.len,
                #[inline(always)]
                |i, count| {
                    S::prefetch(xs.wrapping_add(i + ahead));
                    let logit = first_lanes(count, f(T::read::<S>(xs.add(i), count, T::Real::ZERO), i, count));
                    max = logit.or_greater(max);
                    logit.store(z.add(i));
                },
            );
            run.max = max.max_across();
        }
    }
}

/// Σ exp(z − reference) of at most a block, in whole vectors, each of which `keep(start, exponentials)` sees
/// [scaled](Lanes::scaled_exp).
///
/// # Safety
/// The CPU has the instructions of `V`, and `z` is valid for reads of `len` elements and up to a whole vector.
#[inline(always)]
unsafe fn exp_sum<V: Lanes>(
    z: *const V::Real,
    len: usize,
    reference: V::Real,
    mut keep: impl FnMut(usize, V),
) -> V::Real {
    let reference = V::splat(reference);
    let sum = sum_of_long_terms(
        len.next_multiple_of(V::COUNT),
        #[inline(always)]
        |i, _| {
            // SAFETY: as promised by the caller.
            let exp = (unsafe { V::load(z.add(i)) } - reference).scaled_exp();
            keep(i, exp);
            exp
        },
    );
    sum.sum_across() * V::UNSCALE
}

/// Adds the sink, if there is one, and finishes the line.
fn with_sink<R: Real>(mut state: SoftmaxState<R>, sink: Option<R>) -> Option<Normalizer<R>> {
    if let Some(sink) = sink {
        let reference = state.grow(sink);
        state.add((sink - reference).exp());
    }
    state.normalizer()
}

/// A block of logits.
type Block<R> = CacheLines<[MaybeUninit<R>; MAX_BLOCK]>;

fn block<R>() -> Block<R> {
    CacheLines([const { MaybeUninit::uninit() }; MAX_BLOCK])
}

/// Which elements of a block dropout keeps.
type Kept = [u8; random::room(MAX_BLOCK)];

/// Lines along the last dimension.
struct Rows<'a, T: Element> {
    call: Call<'a, T>,
    out: Any<'a>,
}

/// What the logits of a line along the last dimension are made from.
#[derive(Clone, Copy)]
struct Source<T: Element> {
    scores: *const T,
    /// Null unless there is one for each element.
    bias: *const T,
    /// A byte for each element, 0 if it does not take part: as the mask says or, without a mask, the window. Null without both.
    mask: *const u8,
    /// As the window says. Null without one.
    window: *const u8,
    /// The bias where there is one for all.
    shift: T::Real,
}

/// The windows of lines as masks, which are parts of the same bytes: as many ones as a window has keys between zeros.
struct Windows {
    bytes: Vec<u8>,
    len: usize,
    ones: usize,
}

impl Windows {
    /// For lines of `len` elements, if the call has a window.
    fn of<T: Element>(call: &Call<T>, len: usize) -> Option<Self> {
        let window = call.options.window?;
        let ones = window.before.saturating_add(window.after).saturating_add(1).min(len);
        let mut bytes = vec![0; 2 * len + ones + MAX_LANES];
        bytes[len..len + ones].fill(1);
        Some(Self { bytes, len, ones })
    }

    /// The mask of elements `first..end`. They are `ones`, or up to one of the line's ends.
    #[inline(always)]
    fn mask(&self, first: usize, end: usize) -> *const u8 {
        let start = match (first, end) {
            (first, end) if first == end => self.len + self.ones,
            (0, end) => self.len + self.ones - end,
            (first, _) => self.len - first,
        };
        self.bytes[start..].as_ptr()
    }
}

/// What several lines are made from beside the scores, one after the other.
struct Sources<'a, T: Element> {
    call: &'a Call<'a, T>,
    len: usize,
    places: Places<'a>,
    bias: [*const T; MAX_LANES],
    mask: [*const u8; MAX_LANES],
    shift: [T::Real; MAX_LANES],
    windows: Option<Windows>,
    window: [*const u8; MAX_LANES],
    /// −∞ where there is none.
    sinks: [T::Real; MAX_LANES],
}

impl<'a, T: Element> Sources<'a, T> {
    /// For lines from this one on.
    fn new(call: &'a Call<'a, T>, line: usize, len: usize) -> Self {
        Self {
            call,
            len,
            places: call.geometry.places(line),
            bias: [std::ptr::null(); MAX_LANES],
            mask: [std::ptr::null(); MAX_LANES],
            shift: [T::Real::ZERO; MAX_LANES],
            windows: Windows::of(call, len),
            window: [std::ptr::null(); MAX_LANES],
            sinks: [T::Real::NEG_INFINITY; MAX_LANES],
        }
    }

    /// Finds those of the next `count` lines, at most [`MAX_LANES`].
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn find<S: Simd>(&mut self, count: usize) {
        let (call, len) = (self.call, self.len);
        let bias_step = call.geometry.bias_step;
        let mut at = 0;
        while at < count {
            let (place, count, axis) = self.places.run(count - at);
            let (lines, last) = (at..at + count, count - 1);
            if let (Some(bias), true) = (call.bias, bias_step != 0) {
                let first = bias.at(place.bias, last * axis.bias + len);
                for (i, bias) in self.bias[lines.clone()].iter_mut().enumerate() {
                    *bias = first.wrapping_add(i * axis.bias);
                }
            }
            if let (Some(bias), true) = (call.bias, bias_step == 0) {
                for (i, shift) in self.shift[lines.clone()].iter_mut().enumerate() {
                    // SAFETY: one element is there; the rest by the caller's promise.
                    *shift = unsafe { one::<S, T>(bias.at(place.bias + i * axis.bias, 1)) };
                }
            }
            if let Some(mask) = call.mask {
                let first = mask.at(place.mask, last * axis.mask + len);
                for (i, mask) in self.mask[lines.clone()].iter_mut().enumerate() {
                    *mask = first.wrapping_add(i * axis.mask);
                }
            }
            if let (Some(window), Some(windows)) = (call.options.window, &self.windows) {
                for (i, line) in lines.clone().enumerate() {
                    let (first, end) = window.keys(place.query + i * axis.query, len);
                    self.window[line] = windows.mask(first, end);
                    if call.mask.is_none() {
                        self.mask[line] = self.window[line];
                    }
                }
            }
            if let Some(sinks) = call.sinks {
                for (i, sink) in self.sinks[lines].iter_mut().enumerate() {
                    // SAFETY: likewise.
                    *sink = unsafe { one::<S, T>(sinks.at(place.sink + i * axis.sink, 1)) };
                }
            }
            at += count;
        }
    }

    /// What line `i` of them is made from, whose scores these are.
    #[inline(always)]
    fn source(&self, i: usize, scores: *const T) -> Source<T> {
        Source { scores, bias: self.bias[i], mask: self.mask[i], window: self.window[i], shift: self.shift[i] }
    }
}

/// The first `count` logits, and −∞ in the other lanes.
#[inline(always)]
fn first_lanes<V: Lanes>(count: usize, logits: V) -> V {
    if count < V::COUNT {
        logits.keep(count, V::Real::NEG_INFINITY)
    } else {
        logits
    }
}

/// Σ exp(logit − reference) of a line in a vector; the [scaled](Lanes::scaled_exp) exponentials take the logits' place.
/// `meanwhile(start, count)` is called for each vector.
///
/// # Safety
/// The CPU has the instructions of `S`, and the logits are at `z`, up to a whole vector.
#[inline(always)]
unsafe fn line_sum<S: Simd, T: Element>(
    z: *mut T::Real,
    len: usize,
    reference: T::Real,
    mut meanwhile: impl FnMut(usize, usize),
) -> T::Lanes<S> {
    let reference = T::Lanes::<S>::splat(reference);
    let sum = sum_of_long_terms(
        len,
        #[inline(always)]
        |i, count| {
            // SAFETY: as promised by the caller.
            let exp = unsafe {
                let exp = (T::Lanes::<S>::load(z.add(i)) - reference).scaled_exp();
                exp.store(z.add(i));
                exp
            };
            meanwhile(i, count);
            exp
        },
    );
    sum.unscaled()
}

/// What writes the results of a line, vector by vector.
///
/// # Safety
/// The CPU has the instructions of `S`, the line's scaled exponentials are at `z`, `to` is valid for writes of the line, `keep`
/// for reads of a byte for each and a vector more, and the function answered is called for vectors in a line.
#[inline(always)]
unsafe fn line_results<S: Simd, T: Element>(
    z: *const T::Real,
    to: *mut T,
    scale: T::Real,
    keep: Option<*const u8>,
) -> impl FnMut(usize, usize) {
    let scale = T::Lanes::<S>::splat(scale);
    #[inline(always)]
    move |i, count| {
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let mut result = T::Lanes::<S>::load(z.add(i)) * scale;
            if let Some(keep) = keep {
                result = result.where_kept(keep.add(i), T::Real::ZERO);
            }
            T::put::<S>(result, to.add(i), count);
        }
    }
}

/// Lines whose maxima, and whose sums, are one vector: the steps from a vector to one number are shared.
struct Batch<'a, S: Simd, T: Element> {
    call: &'a Call<'a, T>,
    /// How many lines there are at most: as many as a vector has lanes.
    most: usize,
    /// How far apart they are held.
    room: usize,
    /// Of the lines read last: a vector for each with their maxima.
    maxima: [T::Lanes<S>; MAX_LANES],
    /// Of the lines to be summed: what exponentials are relative to, in a vector, and number by number, …
    reference: T::Lanes<S>,
    references: [T::Real; MAX_LANES],
    /// … and their sinks.
    sink: T::Lanes<S>,
    sums: [T::Lanes<S>; MAX_LANES],
    /// Of the lines to be written: what scaled exponentials are multiplied with.
    scales: [T::Real; MAX_LANES],
    factor: T::Lanes<S>,
    of_nothing: T::Lanes<S>,
}

impl<'a, S: Simd, T: Element> Batch<'a, S, T> {
    #[inline(always)]
    fn new(call: &'a Call<'a, T>, len: usize) -> Self {
        let [zero, none] = [T::Real::ZERO, T::Real::NEG_INFINITY];
        let factor = call.options.dropout.map_or(1.0, |dropout| dropout.kept_scale());
        let room = len.next_multiple_of(T::Lanes::<S>::COUNT);
        Self {
            call,
            most: T::Lanes::<S>::COUNT,
            room,
            maxima: [T::Lanes::<S>::splat(none); MAX_LANES],
            reference: T::Lanes::<S>::splat(zero),
            references: [zero; MAX_LANES],
            sink: T::Lanes::<S>::splat(none),
            sums: [T::Lanes::<S>::splat(zero); MAX_LANES],
            scales: [zero; MAX_LANES],
            factor: T::Lanes::<S>::splat(T::Real::nearest(factor) * T::Lanes::<S>::UNSCALE),
            of_nothing: T::Lanes::<S>::splat(call.scales::<T::Lanes<S>>(None).1),
        }
    }

    /// When the logits are made of lines that are to be summed next, with these sinks.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn read(&mut self, sinks: &[T::Real; MAX_LANES]) {
        let lowest = T::Lanes::<S>::splat(T::Real::LOWEST);
        // SAFETY: no vector has more lanes.
        unsafe {
            self.sink = T::Lanes::<S>::load(sinks.as_ptr());
            // Finite where nothing is above −∞, so that exp(−∞ − reference) is 0 and a NaN survives.
            let max = self.sink.or_greater(T::Lanes::<S>::max_of_each(&self.maxima[..self.most]));
            self.reference = max.or_greater(lowest);
            self.reference.store(self.references.as_mut_ptr());
        }
    }

    /// When lines are summed that are to be written next.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn summed(&mut self) {
        let one = T::Lanes::<S>::splat(T::Real::ONE);
        let mut sum = T::Lanes::<S>::sum_of_each(&self.sums[..self.most]);
        if self.call.sinks.is_some() {
            sum = sum + (self.sink - self.reference).exp();
        }
        // The maximum alone adds 1, unless there is nothing.
        let scale = sum.if_less(one, self.of_nothing, one / sum * self.factor);
        // SAFETY: no vector has more lanes.
        unsafe { scale.store(self.scales.as_mut_ptr()) };
    }
}

/// Lines in work, by their number from the first of them.
struct InTurns<R> {
    /// The logits, then the scaled exponentials of the last `ring` lines, `room` apart; a power of two.
    held: *mut R,
    ring: usize,
    room: usize,
    len: usize,
    /// How many elements are asked for ahead of the sum.
    ahead: usize,
}

impl<R: Real> InTurns<R> {
    #[inline(always)]
    fn held(&self, line: usize) -> *mut R {
        self.held.wrapping_add((line & (self.ring - 1)) * self.room)
    }

    /// [`line_sum`] relative to the maximum of a line whose scores these are.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and the logits of the line are there.
    #[inline(always)]
    unsafe fn sum<S: Simd, T: Element<Real = R>>(
        &self,
        line: usize,
        xs: *const T,
        max: R,
        mut meanwhile: impl FnMut(usize, usize),
    ) -> T::Lanes<S> {
        // Finite where nothing is above −∞, so that exp(−∞ − reference) is 0 and a NaN survives.
        let reference = max.or_greater(R::LOWEST);
        // SAFETY: as promised by the caller.
        unsafe {
            line_sum::<S, T>(
                self.held(line),
                self.len,
                reference,
                #[inline(always)]
                |i, count| {
                    S::prefetch(xs.wrapping_add(self.ahead + i));
                    meanwhile(i, count);
                },
            )
        }
    }

    /// What writes the results of a line, vector by vector.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, the line's scaled exponentials are there, `to` is valid for writes of the line,
    /// `keep` for reads of a byte for each and a vector more, and the function answered is called for vectors in a line.
    #[inline(always)]
    unsafe fn results<S: Simd, T: Element<Real = R>>(
        &self,
        line: usize,
        to: *mut T,
        scale: R,
        keep: Option<*const u8>,
    ) -> impl FnMut(usize, usize) {
        let (from, scale) = (self.held(line), T::Lanes::<S>::splat(scale));
        #[inline(always)]
        move |i, count| {
            // SAFETY of the block: as promised by the caller.
            unsafe {
                let mut result = T::Lanes::<S>::load(from.add(i)) * scale;
                if let Some(keep) = keep {
                    result = result.where_kept(keep.add(i), R::ZERO);
                }
                // Memory that is written is read first.
                S::prefetch(to.wrapping_add(i + ahead::<T>()));
                T::put::<S>(result, to.add(i), count);
            }
        }
    }
}

impl<T: Element> Rows<'_, T> {
    /// Writes what the elements in `range` become that are outside of the window.
    ///
    /// # Safety
    /// As of [`Pass::write`].
    #[inline(always)]
    unsafe fn write_outside<S: Simd>(
        &self,
        place: &Place,
        range: &Range<usize>,
        keys: &Range<usize>,
        (max, scale): (T::Real, T::Real),
    ) {
        if keys == range {
            return;
        }
        // Of the logit −∞
        let x = match self.call.options.output {
            Output::Probability => T::Real::ZERO * scale,
            Output::LogProbability => T::Real::NEG_INFINITY - max - scale,
        };
        let x = x.into();
        // SAFETY: as promised by the caller.
        unsafe {
            self.out.fill::<S>(place.scores + range.start, keys.start - range.start, x);
            self.out.fill::<S>(place.scores + keys.end, range.end - keys.end, x);
        }
    }

    /// Lines of a block at most whose logits are made of neighbours in memory, to results of the scores' dtype.
    ///
    /// # Safety
    /// As of [`Pass::whole`], with 0 < `len` ≤ a block, and `out` is where the results are to be.
    #[inline(always)]
    unsafe fn short<S: Simd>(&self, lines: Range<usize>, len: usize, out: Elements<T>) {
        let (scale, none) = (T::Lanes::<S>::splat(self.call.scale), T::Real::NEG_INFINITY);
        let cap: Option<[T::Lanes<S>; 2]> = self.call.cap.map(|(inverse, cap)| [inverse, cap].map(Number::splat));
        let bias = self.call.bias.is_some() && self.call.geometry.bias_step != 0;
        let (mask, window) = (self.call.mask.is_some(), self.call.options.window.is_some());
        // SAFETY of the block: the elements are there, and the rest by the caller's promise.
        // One loop for each combination.
        unsafe {
            let read = {
                #[inline(always)]
                |of: &Source<T>, i: usize, count| T::read::<S>(of.scores.add(i), count, T::Real::ZERO)
            };
            let read_bias = {
                #[inline(always)]
                |of: &Source<T>, i: usize, count| {
                    S::prefetch(of.bias.wrapping_add(i + ahead::<T>()));
                    T::read::<S>(of.bias.add(i), count, T::Real::ZERO)
                }
            };
            let shift = {
                #[inline(always)]
                |of: &Source<T>| T::Lanes::<S>::splat(of.shift)
            };
            match (cap, bias, mask || window) {
                (None, false, false) => self.choose::<S>(
                    lines,
                    len,
                    out,
                    #[inline(always)]
                    |of, i, count| read(of, i, count).mul_add(scale, shift(of)),
                ),
                (None, true, false) => self.choose::<S>(
                    lines,
                    len,
                    out,
                    #[inline(always)]
                    |of, i, count| read(of, i, count).mul_add(scale, read_bias(of, i, count)),
                ),
                (None, false, true) if !(mask && window) => self.choose::<S>(
                    lines,
                    len,
                    out,
                    #[inline(always)]
                    |of, i, count| {
                        let logit = read(of, i, count).mul_add(scale, shift(of));
                        logit.where_some_kept(of.mask.add(i), count, none)
                    },
                ),
                (Some([inverse, cap]), false, false) => self.choose::<S>(
                    lines,
                    len,
                    out,
                    #[inline(always)]
                    |of, i, count| (read(of, i, count) * inverse).tanh().mul_add(cap, shift(of)),
                ),
                (cap, ..) => self.choose::<S>(
                    lines,
                    len,
                    out,
                    #[inline(always)]
                    |of, i, count| {
                        let bias = if bias { read_bias(of, i, count) } else { shift(of) };
                        let mut logit = match cap {
                            Some([inverse, cap]) => (read(of, i, count) * inverse).tanh().mul_add(cap, bias),
                            None => read(of, i, count).mul_add(scale, bias),
                        };
                        if mask {
                            logit = logit.where_some_kept(of.mask.add(i), count, none);
                        }
                        if window {
                            logit = logit.where_kept(of.window.add(i), none);
                        }
                        logit
                    },
                ),
            }
        }
    }

    /// Short lines are taken in batches, longer ones one by one: of those a batch leaves too little of the first cache.
    /// `logit(source, start, count)` makes a vector of logits.
    ///
    /// # Safety
    /// As of [`short`](Self::short).
    #[inline(always)]
    unsafe fn choose<S: Simd>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        logit: impl Fn(&Source<T>, usize, usize) -> T::Lanes<S> + Copy,
    ) {
        let logit = {
            #[inline(always)]
            move |source: &Source<T>, i: usize, count: usize| first_lanes(count, logit(source, i, count))
        };
        // SAFETY: as promised by the caller.
        unsafe {
            if len <= BATCH_LINE {
                self.in_batches::<S>(lines, len, out, logit)
            } else {
                self.in_turns::<S>(lines, len, out, logit)
            }
        }
    }

    /// Batches of lines: while the sums of one are taken, the logits of the next one are made and the results of the one before
    /// are written. So memory is read and written all the while. `logit(source, start, count)` makes a
    /// vector of logits.
    ///
    /// # Safety
    /// As of [`short`](Self::short).
    #[inline(never)]
    unsafe fn in_batches<S: Simd>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        logit: impl Fn(&Source<T>, usize, usize) -> T::Lanes<S>,
    ) {
        // SAFETY: as promised by the caller. A function of its own for each kind of logits, entered anew.
        unsafe {
            S::enter(
                #[inline(always)]
                || self.in_batches_inside::<S>(lines, len, out, logit),
            )
        }
    }

    /// # Safety
    /// As of [`short`](Self::short).
    #[inline(always)]
    unsafe fn in_batches_inside<S: Simd>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        logit: impl Fn(&Source<T>, usize, usize) -> T::Lanes<S>,
    ) {
        let none = T::Lanes::<S>::splat(T::Real::NEG_INFINITY);
        let (mut batch, mut sources) =
            (Batch::<S, T>::new(&self.call, len), Sources::new(&self.call, lines.start, len));
        let (first, all) = (lines.start * len, lines.len() * len);
        let (scores, out) = (self.call.scores.at(first, all).cast_const(), out.at(first, all));
        let (most, room, ahead) = (batch.most, batch.room, ahead::<T>());
        let mut held = CacheLines([const { MaybeUninit::<T::Real>::uninit() }; IN_BATCHES * BATCH]);
        let held = held.0.as_mut_ptr().cast::<T::Real>();
        let mut kept = [0; random::room(MAX_BLOCK)];
        let (count, batches) = (lines.len(), lines.len().div_ceil(most));
        for step in 0..batches + 2 {
            // The first line, by its number from that of all, of the batch that it is the turn of after so many steps, how many
            // there are, and where they are held.
            let turn = {
                #[inline(always)]
                |after: usize| match step.checked_sub(after) {
                    Some(turn) if turn < batches => {
                        (turn * most, most.min(count - turn * most), held.wrapping_add(turn % IN_BATCHES * most * room))
                    }
                    _ => (0, 0, held),
                }
            };
            let ((read, to_read, z_read), (_, to_sum, z_sum), (written, to_write, z_written)) =
                (turn(0), turn(1), turn(2));
            // SAFETY of the block: the elements are there, `held` has room for the lines in work; the rest by the caller's promise.
            unsafe {
                let mut keep = {
                    #[inline(always)]
                    |line| keep_along::<S, T>(&self.call, lines.start + line, 0, len, &mut kept)
                };
                sources.find::<S>(to_read);
                if [to_read, to_sum, to_write] == [most; 3] {
                    for i in 0..most {
                        let source = sources.source(i, scores.add((read + i) * len));
                        let (keep, scale) = (keep(written + i), batch.scales[i]);
                        let to = out.add((written + i) * len);
                        let mut write = line_results::<S, T>(z_written.add(i * room), to, scale, keep);
                        let (z, mut max) = (z_read.add(i * room), none);
                        batch.sums[i] = line_sum::<S, T>(
                            z_sum.add(i * room),
                            len,
                            batch.references[i],
                            #[inline(always)]
                            |i, count| {
                                S::prefetch(source.scores.wrapping_add(i + ahead));
                                let logit = logit(&source, i, count);
                                max = logit.or_greater(max);
                                logit.store(z.add(i));
                                // Memory that is written is read first.
                                S::prefetch(to.wrapping_add(i + ahead));
                                write(i, count);
                            },
                        );
                        batch.maxima[i] = max;
                    }
                } else {
                    for i in 0..to_read {
                        let source = sources.source(i, scores.add((read + i) * len));
                        let (z, mut max) = (z_read.add(i * room), none);
                        each::<T::Lanes<S>>(
                            0..len,
                            #[inline(always)]
                            |i, count| {
                                let logit = logit(&source, i, count);
                                max = logit.or_greater(max);
                                logit.store(z.add(i));
                            },
                        );
                        batch.maxima[i] = max;
                    }
                    for i in 0..to_sum {
                        batch.sums[i] = line_sum::<S, T>(
                            z_sum.add(i * room),
                            len,
                            batch.references[i],
                            #[inline(always)]
                            |_, _| (),
                        );
                    }
                    for i in 0..to_write {
                        let (keep, scale) = (keep(written + i), batch.scales[i]);
                        each::<T::Lanes<S>>(
                            0..len,
                            line_results::<S, T>(z_written.add(i * room), out.add((written + i) * len), scale, keep),
                        );
                    }
                }
                batch.summed();
                batch.read(&sources.sinks);
            }
        }
    }

    /// What one line is made from. The place and the value of the line before's sink are those of most lines.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn turn<S: Simd>(
        &self,
        place: &Place,
        len: usize,
        steps: Steps,
        windows: &Option<Windows>,
        last_sink: &mut (usize, T::Real),
    ) -> (Source<T>, T::Real) {
        let call = &self.call;
        let mut sink = T::Real::NEG_INFINITY;
        let mut turn = Source {
            scores: call.scores.at(place.scores, len),
            bias: std::ptr::null(),
            mask: std::ptr::null(),
            window: std::ptr::null(),
            shift: T::Real::ZERO,
        };
        match call.bias {
            Some(bias) if steps.bias != 0 => turn.bias = bias.at(place.bias, len),
            // SAFETY: one element is there; the rest by the caller's promise.
            Some(bias) => turn.shift = unsafe { one::<S, T>(bias.at(place.bias, 1)) },
            None => (),
        }
        if let Some(mask) = call.mask {
            turn.mask = mask.at(place.mask, len);
        }
        if let Some(sinks) = call.sinks {
            if last_sink.0 != place.sink {
                // SAFETY: likewise.
                *last_sink = (place.sink, unsafe { one::<S, T>(sinks.at(place.sink, 1)) });
            }
            sink = last_sink.1;
        }
        if let (Some(window), Some(windows)) = (call.options.window, windows) {
            let (first, end) = window.keys(place.query, len);
            turn.window = windows.mask(first, end);
            if call.mask.is_none() {
                turn.mask = turn.window;
            }
        }
        (turn, sink)
    }

    /// While the sum of one line is taken, the maximum of a later one is found and the results of an earlier one are written.
    /// `logit(source, start, count)` makes a vector of logits.
    ///
    /// # Safety
    /// As of [`short`](Self::short).
    #[inline(never)]
    unsafe fn in_turns<S: Simd>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        logit: impl Fn(&Source<T>, usize, usize) -> T::Lanes<S>,
    ) {
        // SAFETY: as promised by the caller. A function of its own for each kind of logits, entered anew.
        unsafe {
            S::enter(
                #[inline(always)]
                || self.in_turns_inside::<S>(lines, len, out, logit),
            )
        }
    }

    /// # Safety
    /// As of [`short`](Self::short).
    #[inline(always)]
    unsafe fn in_turns_inside<S: Simd>(
        &self,
        lines: Range<usize>,
        len: usize,
        out: Elements<T>,
        logit: impl Fn(&Source<T>, usize, usize) -> T::Lanes<S>,
    ) {
        let (none, zero) = (T::Real::NEG_INFINITY, T::Real::ZERO);
        let lag = if len <= FAR_APART { MAX_LAG } else { 1 };
        let mut held = CacheLines([const { MaybeUninit::<T::Real>::uninit() }; 4 * MAX_BLOCK]);
        let in_turns = InTurns {
            held: held.0.as_mut_ptr().cast::<T::Real>(),
            ring: (2 * lag + 1).next_power_of_two(),
            room: len.next_multiple_of(T::Lanes::<S>::COUNT),
            len,
            ahead: lag * len + ahead::<T>(),
        };
        let (steps, count) = (self.call.steps_along(), lines.len());
        let factor = self.call.options.dropout.map_or(T::Real::ONE, |dropout| T::Real::nearest(dropout.kept_scale()));
        let factor = factor * T::Lanes::<S>::UNSCALE;
        let (_, of_nothing) = self.call.scales::<T::Lanes<S>>(None);
        let mut kept = [0; random::room(MAX_BLOCK)];
        let mut places = self.call.geometry.places(lines.start);
        let windows = Windows::of(&self.call, len);
        let mut last_sink = (usize::MAX, none);
        let scores = |line: usize| self.call.scores.at((lines.start + line) * len, len).cast_const();
        // SAFETY of the block: the elements are there, `held` has room for the lines in work; the rest by the caller's promise.
        unsafe {
            // Of a line: the maximum of it and its sink, the sink, and the sum of both in a vector. When the results are written,
            // the steps from that to one number wait for nothing.
            let (mut max, mut sink) = ([none; IN_WORK], [none; IN_WORK]);
            let mut sum = [T::Lanes::<S>::splat(zero); IN_WORK];
            for step in 0..count + 2 * lag {
                let next = if step < count {
                    Some(self.turn::<S>(&places.next(), len, steps, &windows, &mut last_sink))
                } else {
                    None
                };
                let summed = step.checked_sub(lag).filter(|&line| line < count);
                let written = step.checked_sub(2 * lag).map(
                    #[inline(always)]
                    |line| {
                        let (max, sum) = (max[line % IN_WORK], sum[line % IN_WORK].sum_across());
                        let scale = if max == none && sum == zero { of_nothing } else { T::Real::ONE / sum * factor };
                        let keep = keep_along::<S, T>(&self.call, lines.start + line, 0, len, &mut kept);
                        (line, out.at((lines.start + line) * len, len), scale, keep)
                    },
                );
                let mut found = T::Lanes::<S>::splat(none);
                let z = in_turns.held(step);
                if let (Some((next, _)), Some(line), Some((written, to, scale, keep))) = (next, summed, written) {
                    let mut write = in_turns.results::<S, T>(written, to, scale, keep);
                    sum[line % IN_WORK] = in_turns.sum::<S, T>(
                        line,
                        scores(line),
                        max[line % IN_WORK],
                        #[inline(always)]
                        |i, count| {
                            let logit = logit(&next, i, count);
                            logit.store(z.add(i));
                            found = logit.or_greater(found);
                            write(i, count);
                        },
                    );
                } else {
                    if let Some((next, _)) = next {
                        each::<T::Lanes<S>>(
                            0..len,
                            #[inline(always)]
                            |i, count| {
                                let logit = logit(&next, i, count);
                                logit.store(z.add(i));
                                found = logit.or_greater(found);
                            },
                        );
                    }
                    if let Some(line) = summed {
                        sum[line % IN_WORK] = in_turns.sum::<S, T>(
                            line,
                            scores(line),
                            max[line % IN_WORK],
                            #[inline(always)]
                            |_, _| (),
                        );
                    }
                    if let Some((line, to, scale, keep)) = written {
                        each::<T::Lanes<S>>(0..len, in_turns.results::<S, T>(line, to, scale, keep));
                    }
                }
                if let (Some(line), Some(_)) = (summed, self.call.sinks) {
                    let reference = T::Lanes::<S>::splat(max[line % IN_WORK].or_greater(T::Real::LOWEST));
                    let sink = T::Lanes::<S>::splat(sink[line % IN_WORK]).keep(1, none);
                    sum[line % IN_WORK] = sum[line % IN_WORK] + (sink - reference).exp();
                }
                if let Some((_, next_sink)) = next {
                    max[step % IN_WORK] = next_sink.or_greater(found.max_across());
                    sink[step % IN_WORK] = next_sink;
                }
            }
        }
    }

    /// Σ exp(z − reference) of a line's runs. The exponentials take the logits' place, unless these are needed. Meanwhile
    /// the scores `ahead` of these are asked for.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and the logits of the runs are there.
    #[inline(always)]
    unsafe fn exps<S: Simd>(&self, runs: &[Run<T::Real>], reference: T::Real, ahead: usize, log: bool) -> T::Real {
        let mut sum = CompensatedSum::zero();
        for run in runs {
            let (xs, z) = (self.call.scores.at(run.scores, run.len).wrapping_add(ahead), run.z);
            // SAFETY: as promised by the caller.
            let part = unsafe {
                exp_sum::<T::Lanes<S>>(
                    z,
                    run.len,
                    reference,
                    #[inline(always)]
                    |i, exp| {
                        S::prefetch(xs.wrapping_add(i));
                        if !log {
                            exp.store(z.add(i));
                        }
                    },
                )
            };
            if runs.len() == 1 {
                return part;
            }
            sum.add(part);
        }
        sum.value()
    }
}

/// A line in work.
struct Line<F> {
    number: usize,
    place: Place,
    /// Which elements are not outside of the window, …
    keys: Range<usize>,
    /// … and which runs they are.
    runs: Range<usize>,
    /// What its results are made with, when that is known.
    found: F,
}

/// Room for numbers, where no vector lies in two cache lines.
struct Held<R> {
    start: *mut R,
    _memory: Vec<R>,
}

impl<R> Held<R> {
    fn new(len: usize) -> Self {
        let mut memory = Vec::with_capacity(len + MAX_LANES);
        let start: *mut R = memory.as_mut_ptr();
        Self { start: start.wrapping_add(start.align_offset(64).min(MAX_LANES)), _memory: memory }
    }
}

/// Lines that are held whole, several of them in work together.
struct Together<'a, T: Element, F> {
    call: &'a Call<'a, T>,
    len: usize,
    /// How many lines at most.
    count: usize,
    /// How far apart they are held.
    room: usize,
    /// The logits.
    held: Held<T::Real>,
    places: Places<'a>,
    runs: Vec<Run<T::Real>>,
    work: Vec<Line<F>>,
}

impl<'a, T: Element, F: Copy> Together<'a, T, F> {
    fn new<S: Simd>(call: &'a Call<'a, T>, lines: &Range<usize>, len: usize) -> Self {
        let room = len.next_multiple_of(T::Lanes::<S>::COUNT);
        let count = (TOGETHER / room).max(1).min(lines.len());
        let (held, places) = (Held::new(count * room), call.geometry.places(lines.start));
        Self { call, len, count, room, held, places, runs: Vec::new(), work: Vec::with_capacity(count) }
    }

    /// Makes the logits of the next lines, `count` at most, whose numbers these are. Each run but a line's last is whole
    /// vectors.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn take<S: Simd>(&mut self, lines: Range<usize>, nothing: F) {
        self.runs.clear();
        self.work.clear();
        let mut z = self.held.start;
        for number in lines.take(self.count) {
            let place = self.places.next();
            let keys = self.call.keys(place.query, &(0..self.len));
            let first_run = self.runs.len();
            for (start, len) in blocks::<T::Lanes<S>>(keys.clone()) {
                self.runs.push(self.call.run_along(&place, start, len, z.wrapping_add(start - keys.start)));
            }
            let runs = first_run..self.runs.len();
            self.work.push(Line { number, place, keys, runs, found: nothing });
            z = z.wrapping_add(self.room);
        }
        // SAFETY: there is room for as many lines; the rest by the caller's promise.
        unsafe { self.call.logits::<S>(&mut self.runs, self.call.steps_along()) }
    }
}

impl<S: Simd, T: Element> Pass<S> for Rows<'_, T> {
    type Reduced = SoftmaxState<T::Real>;
    const WIDTH: usize = 1;

    #[inline(always)]
    unsafe fn reduce(&self, line: usize, range: Range<usize>) -> Self::Reduced {
        let place = self.call.geometry.place(line);
        let mut z = block::<T::Real>();
        let z = z.0.as_mut_ptr().cast::<T::Real>();
        let mut state = SoftmaxState::empty();
        for (start, len) in blocks::<T::Lanes<S>>(self.call.keys(place.query, &range)) {
            // SAFETY: `z` has room for a block; the rest by the caller's promise.
            unsafe {
                let max = self.call.logits_along::<S>(&place, start, len, z);
                let reference = state.grow(max);
                state.add(exp_sum::<T::Lanes<S>>(
                    z,
                    len,
                    reference,
                    #[inline(always)]
                    |_, _| (),
                ));
            }
        }
        state
    }

    #[inline(always)]
    unsafe fn merge(mut a: Self::Reduced, b: Self::Reduced) -> Self::Reduced {
        a.merge(b);
        a
    }

    #[inline(always)]
    unsafe fn write(&self, line: usize, range: Range<usize>, state: &Self::Reduced) {
        let place = self.call.geometry.place(line);
        let keys = self.call.keys(place.query, &range);
        let (mut z, mut kept) = (block::<T::Real>(), [0; random::room(MAX_BLOCK)]);
        let z = z.0.as_mut_ptr().cast::<T::Real>();
        // SAFETY of the block: `z` has room for a block; the rest by the caller's promise.
        unsafe {
            let (max, scale) = self.call.scales::<T::Lanes<S>>(with_sink(*state, self.call.sink::<S>(place.sink)));
            self.write_outside::<S>(&place, &range, &keys, (max, scale));
            for (start, len) in blocks::<T::Lanes<S>>(keys) {
                self.call.logits_along::<S>(&place, start, len, z);
                let keep = keep_along::<S, T>(&self.call, line, start, len, &mut kept);
                let last = Last { make: Make::Of(self.call.options.output, max, scale), keep };
                T::Real::store_any::<S>(
                    &self.out,
                    1,
                    #[inline(always)]
                    |_| Part { start: place.scores + start, len, from: z, last },
                );
            }
        }
    }

    #[inline(always)]
    unsafe fn whole(&self, lines: Range<usize>, len: usize) {
        if len <= BLOCK_VECTORS * T::Lanes::<S>::COUNT && self.call.is_of_neighbours() {
            if let Some(out) = T::of(&self.out) {
                // SAFETY: as promised by the caller.
                return unsafe { self.short::<S>(lines, len, out) };
            }
        }
        if len > HELD {
            // SAFETY: as promised by the caller.
            return unsafe { Pass::<S>::one_by_one(self, lines, len) };
        }
        let mut together = Together::new::<S>(&self.call, &lines, len);
        let mut kept = [0; random::room(MAX_BLOCK)];
        for first in lines.clone().step_by(together.count) {
            // SAFETY of the block: the logits are there; the rest by the caller's promise.
            unsafe {
                together.take::<S>(first..lines.end, (T::Real::ZERO, T::Real::ZERO));
                let Together { runs, work, count, .. } = &mut together;
                let ahead = *count * len;
                for line in work.iter_mut() {
                    let runs = &runs[line.runs.clone()];
                    let sink = self.call.sink::<S>(line.place.sink);
                    let none = T::Real::NEG_INFINITY;
                    let max = sink.map_or(none, |sink| sink.or_greater(none));
                    let max = runs.iter().fold(max, |max, run| run.max.or_greater(max));
                    // Finite where nothing is above −∞, so that exp(−∞ − reference) is 0 and a NaN survives.
                    let reference = max.or_greater(T::Real::LOWEST);
                    // A loop of its own for each.
                    let sum = if self.call.is_log() {
                        self.exps::<S>(runs, reference, ahead, true)
                    } else {
                        self.exps::<S>(runs, reference, ahead, false)
                    };
                    let sum = match sink {
                        Some(sink) => sum + (sink - reference).exp(),
                        None => sum,
                    };
                    let nothing = max == T::Real::NEG_INFINITY && sum == T::Real::ZERO;
                    line.found = self.call.scales::<T::Lanes<S>>((!nothing).then(|| Normalizer::new(max, sum)));
                    self.write_outside::<S>(&line.place, &(0..len), &line.keys, line.found);
                }
                let mut at = 0;
                T::Real::store_any::<S>(
                    &self.out,
                    runs.len(),
                    #[inline(always)]
                    |i| {
                        // Lines without a run are passed over.
                        while work[at].runs.end <= i {
                            at += 1;
                        }
                        let (line, run) = (&work[at], &runs[i]);
                        let (max, scale) = line.found;
                        let make = match self.call.options.output {
                            Output::Probability => Make::Scaled(scale),
                            output => Make::Of(output, max, scale),
                        };
                        let start = run.scores - line.place.scores;
                        let keep = keep_along::<S, T>(&self.call, line.number, start, run.len, &mut kept);
                        Part { start: run.scores, len: run.len, from: run.z, last: Last { make, keep } }
                    },
                );
            }
        }
    }
}

/// Lines of a strip whose places in the tensors are evenly apart.
struct Segment {
    /// The first one's place in the strip.
    at: usize,
    len: usize,
    place: Place,
}

/// A strip of lines side by side, along another dimension than the last.
struct Side<'a, T: Element> {
    call: Call<'a, T>,
    strip: Strip,
    /// The number of the first line.
    line: usize,
    segments: Vec<Segment>,
    /// Of neighbouring lines.
    steps: Steps,
    sink_step: usize,
}

impl<'a, T: Element> Side<'a, T> {
    fn new(call: Call<'a, T>, unit: usize) -> Self {
        let lines = call.geometry.lines;
        let strip = Strip::new(unit, lines);
        let line = Strip::first_line(unit, lines);
        // The last dimension is one of them, and varies fastest.
        let (size, (bias, mask), sink_step) = match call.geometry.axes.last() {
            Some(axis) => (axis.size, (axis.bias, axis.mask), axis.sink),
            None => (1, (0, 0), 0),
        };
        let mut segments = Vec::new();
        let mut at = 0;
        while at < strip.width {
            let place = call.geometry.place(line + at);
            let len = (size - (line + at) % size).min(strip.width - at);
            segments.push(Segment { at, len, place });
            at += len;
        }
        let steps = Steps { bias, mask, ahead: AHEAD_ROWS * strip.stride };
        Self { call, strip, line, segments, steps, sink_step }
    }

    /// How many vectors a row is.
    fn vectors<S: Simd>(&self) -> usize {
        self.strip.width.div_ceil(T::Lanes::<S>::COUNT)
    }

    /// Makes the logits of a group of rows.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and there is room for each of the rows, up to a whole vector.
    #[inline(always)]
    unsafe fn logits<S: Simd>(&self, group: &Group<T::Real>, runs: &mut Vec<Run<T::Real>>) {
        let (bias_step, mask_step) = (self.call.geometry.bias_step, self.call.geometry.mask_step);
        runs.clear();
        for (i, j) in group.numbers().enumerate() {
            // What passes a segment is written again by the next.
            for segment in &self.segments {
                runs.push(Run {
                    scores: self.strip.row(j) + segment.at,
                    bias: segment.place.bias + j * bias_step,
                    mask: segment.place.mask + j * mask_step,
                    len: segment.len,
                    z: group.row(i).wrapping_add(segment.at),
                    max: T::Real::NEG_INFINITY,
                });
            }
        }
        // SAFETY: there is the room; the rest by the caller's promise.
        unsafe { self.call.logits::<S>(runs, self.steps) }
    }

    /// The sink of a line by its place in the strip.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn sinks<S: Simd>(&self) -> Vec<Option<T::Real>> {
        let places =
            self.segments.iter().flat_map(|segment| (0..segment.len).map(|i| segment.place.sink + i * self.sink_step));
        // SAFETY: as promised by the caller.
        places.map(|place| unsafe { self.call.sink::<S>(place) }).collect()
    }

    /// Which elements are kept of the group of rows that `j` is one of: those of row `i` of the group in `kept[i]`.
    #[inline(always)]
    fn keep<S: Simd>(&self, j: usize, kept: &mut [[u8; ROW]; PER_COUNTER]) {
        if let Some(dropout) = self.call.options.dropout {
            random::across::<S, ROW>(dropout, j / PER_COUNTER, self.line, self.strip.width, kept);
        }
    }

    /// The row of what [`keep`](Self::keep) wrote.
    fn kept(&self, j: usize, kept: &[[u8; ROW]; PER_COUNTER]) -> Option<*const u8> {
        self.call.options.dropout.map(|_| kept[j % PER_COUNTER].as_ptr())
    }
}

/// Rows that are taken together, [`ROWS`] at most.
#[derive(Clone, Copy)]
struct Group<R> {
    /// The number of the first row.
    first: usize,
    rows: usize,
    start: *mut R,
}

impl<R: Real> Group<R> {
    fn new(first: usize, rows: usize, memory: &mut GroupMemory<R>) -> Self {
        Self { first, rows, start: memory.0.as_mut_ptr().cast() }
    }

    fn numbers(&self) -> Range<usize> {
        self.first..self.first + self.rows
    }

    #[inline(always)]
    fn row(&self, i: usize) -> *mut R {
        self.start.wrapping_add(i * ROW)
    }

    /// The vectors of the rows from element `at` on, folded.
    ///
    /// # Safety
    /// The rows are there, and the vectors in them.
    #[inline(always)]
    unsafe fn across<V: Lanes<Real = R>>(&self, at: usize, init: V, step: impl Fn(V, V) -> V) -> V {
        let mut folded = init;
        for i in 0..self.rows {
            // SAFETY: as promised by the caller.
            folded = step(folded, unsafe { V::load(self.row(i).wrapping_add(at)) });
        }
        folded
    }
}

/// Rows that are a vector longer than a strip.
type GroupMemory<R> = CacheLines<[[R; ROW]; ROWS]>;

fn group_memory<R: Real>() -> GroupMemory<R> {
    CacheLines([[R::ZERO; ROW]; ROWS])
}

/// Lines along another dimension.
struct Columns<'a, T: Element> {
    call: Call<'a, T>,
    out: Any<'a>,
}

/// What the first row of a segment is made from; that of other rows is evenly apart.
#[derive(Clone, Copy)]
struct Origin<T: Element> {
    scores: *const T,
    bias: *const T,
    mask: *const u8,
}

/// What is to be done with the logits of a strip.
enum Todo<'a, V: Lanes, T: Element> {
    /// They are to be added to the states.
    Reduce(&'a mut [SoftmaxState<V>]),
    /// The results are to be written, with the maxima and scales.
    Write(Elements<'a, T>, &'a [Vec<T::Real>; 2]),
}

impl<T: Element> Columns<'_, T> {
    /// Whether results are probabilities of the scores' dtype, whose places these are, and vectors of logits are made from
    /// vectors in memory, or from one number for all of a vector.
    fn direct<S: Simd>(&self, side: &Side<T>) -> Option<Elements<'_, T>> {
        let lanes = T::Lanes::<S>::COUNT;
        let whole = side.segments.split_last().is_some_and(|(_, rest)| rest.iter().all(|of| of.len % lanes == 0));
        let neighbours = side.steps.bias <= 1 && (self.call.mask.is_none() || side.steps.mask == 1);
        T::of(&self.out).filter(|_| whole && neighbours && !self.call.is_log())
    }

    /// The rows `range` of a strip of which [`direct`](Self::direct) is true.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`; to write, as of [`Pass::write`].
    #[inline(always)]
    unsafe fn directly<S: Simd>(&self, side: &Side<T>, range: Range<usize>, todo: Todo<T::Lanes<S>, T>) {
        let (zero, none) = (T::Real::ZERO, T::Real::NEG_INFINITY);
        let scale = T::Lanes::<S>::splat(self.call.scale);
        let cap: Option<[T::Lanes<S>; 2]> = self.call.cap.map(|(inverse, cap)| [inverse, cap].map(Number::splat));
        let (stride, bias_stride, mask_stride) =
            (side.strip.stride, self.call.geometry.bias_step, self.call.geometry.mask_step);
        let (bias, mask) = (self.call.bias.is_some(), self.call.mask.is_some());
        let neighbours = side.steps.bias == 1;
        // SAFETY of the block: the elements are there; the rest by the caller's promise.
        // One loop for each combination.
        unsafe {
            let read = {
                #[inline(always)]
                |of: &Origin<T>, j: usize, i: usize, count: usize| {
                    T::read::<S>(of.scores.add(j * stride + i), count, zero)
                }
            };
            let read_bias = {
                #[inline(always)]
                |of: &Origin<T>, j: usize, i: usize, count: usize| {
                    let bias = of.bias.add(j * bias_stride + i);
                    S::prefetch(bias.wrapping_add(ROWS * bias_stride));
                    T::read::<S>(bias, count, zero)
                }
            };
            match (cap, bias, mask) {
                (None, false, false) => self.rows::<S>(
                    side,
                    range,
                    todo,
                    #[inline(always)]
                    |of, j, i, count| read(of, j, i, count) * scale,
                ),
                (None, true, false) if neighbours => self.rows::<S>(
                    side,
                    range,
                    todo,
                    #[inline(always)]
                    |of, j, i, count| read(of, j, i, count).mul_add(scale, read_bias(of, j, i, count)),
                ),
                (Some([inverse, cap]), false, false) => self.rows::<S>(
                    side,
                    range,
                    todo,
                    #[inline(always)]
                    |of, j, i, count| (read(of, j, i, count) * inverse).tanh() * cap,
                ),
                (None, false, true) => self.rows::<S>(
                    side,
                    range,
                    todo,
                    #[inline(always)]
                    |of, j, i, count| {
                        let logit = read(of, j, i, count) * scale;
                        logit.where_some_kept(of.mask.add(j * mask_stride + i), count, none)
                    },
                ),
                (cap, ..) => self.rows::<S>(
                    side,
                    range,
                    todo,
                    #[inline(always)]
                    |of, j, i, count| {
                        let x = read(of, j, i, count);
                        let x = match cap {
                            Some([inverse, cap]) => (x * inverse).tanh() * cap,
                            None => x * scale,
                        };
                        let logit = match (bias, neighbours) {
                            (true, true) => x + read_bias(of, j, i, count),
                            (true, false) => x + T::Lanes::<S>::splat(one::<S, T>(of.bias.add(j * bias_stride))),
                            (false, _) => x,
                        };
                        if mask {
                            logit.where_some_kept(of.mask.add(j * mask_stride + i), count, none)
                        } else {
                            logit
                        }
                    },
                ),
            }
        }
    }

    /// `logit(of, row, start, count)` makes a vector of logits; the numbers of rows are from the first of the range on.
    ///
    /// # Safety
    /// As of [`directly`](Self::directly).
    #[inline(never)]
    unsafe fn rows<S: Simd>(
        &self,
        side: &Side<T>,
        range: Range<usize>,
        todo: Todo<T::Lanes<S>, T>,
        logit: impl Fn(&Origin<T>, usize, usize, usize) -> T::Lanes<S> + Copy,
    ) {
        // SAFETY: as promised by the caller. A function of its own for each kind of logits, entered anew.
        unsafe {
            S::enter(
                #[inline(always)]
                || self.rows_inside::<S>(side, range, todo, logit),
            )
        }
    }

    /// # Safety
    /// As of [`directly`](Self::directly).
    #[inline(always)]
    unsafe fn rows_inside<S: Simd>(
        &self,
        side: &Side<T>,
        range: Range<usize>,
        todo: Todo<T::Lanes<S>, T>,
        logit: impl Fn(&Origin<T>, usize, usize, usize) -> T::Lanes<S> + Copy,
    ) {
        let (call, stride, rows) = (&self.call, side.strip.stride, range.len());
        // Of two groups of rows: a CPU waits for bytes that it has only just written and reads in other portions.
        let mut kept = [[[0; ROW]; PER_COUNTER]; 2];
        let origin = {
            #[inline(always)]
            |segment: &Segment| {
                let last = rows - 1;
                let (bias_step, mask_step) = (call.geometry.bias_step, call.geometry.mask_step);
                let span = |row: usize, step: usize| last * row + (segment.len - 1) * step + 1;
                Origin {
                    scores: call.scores.at(side.strip.row(range.start) + segment.at, span(stride, 1)),
                    bias: call.bias.map_or(std::ptr::null(), |bias| {
                        bias.at(segment.place.bias + range.start * bias_step, span(bias_step, side.steps.bias))
                    }),
                    mask: call.mask.map_or(std::ptr::null(), |mask| {
                        mask.at(segment.place.mask + range.start * mask_step, span(mask_step, side.steps.mask))
                    }),
                }
            }
        };
        let origins: Vec<Origin<T>> = side.segments.iter().map(origin).collect();
        // SAFETY of the block: the elements are there, and `max` and `scale` are a vector longer than the strip; the rest by the
        // caller's promise.
        unsafe {
            match todo {
                Todo::Reduce(states) => {
                    for first in (0..rows).step_by(ROWS) {
                        let count = ROWS.min(rows - first);
                        for (segment, &of) in side.segments.iter().zip(&origins) {
                            let states = &mut states[segment.at / T::Lanes::<S>::COUNT..];
                            // A loop of its own for each.
                            if count == ROWS {
                                group_states::<S, T>(states, of, segment.len, stride, first, ROWS, logit);
                            } else {
                                group_states::<S, T>(states, of, segment.len, stride, first, count, logit);
                            }
                        }
                    }
                }
                Todo::Write(out, [max, scale]) => {
                    let (start, len) = side.strip.span(&range);
                    let (out, dropout) = (out.at(start, len), call.options.dropout.is_some());
                    let mut first = 0;
                    side.keep::<S>(range.start, &mut kept[range.start / PER_COUNTER % 2]);
                    while first < rows {
                        // Groups of rows whose dropout comes from the same counters.
                        let row = range.start + first;
                        let end = rows.min(first + PER_COUNTER - row % PER_COUNTER);
                        let group = row / PER_COUNTER;
                        if end < rows {
                            side.keep::<S>(range.start + end, &mut kept[(group + 1) % 2]);
                        }
                        let kept = &kept[group % 2];
                        for (segment, &of) in side.segments.iter().zip(&origins) {
                            let (max, scale) = (max[segment.at..].as_ptr(), scale[segment.at..].as_ptr());
                            for j in first..end {
                                let to = out.add(j * stride + segment.at);
                                let xs = of.scores.wrapping_add(j * stride);
                                let result = {
                                    #[inline(always)]
                                    |i, count| {
                                        // Memory that is written is read first.
                                        S::prefetch(to.wrapping_add(AHEAD_TO_WRITE * stride + i));
                                        S::prefetch(xs.wrapping_add(AHEAD_TO_WRITE * stride + i));
                                        let z = logit(&of, j, i, count);
                                        let exp = (z - T::Lanes::<S>::load(max.add(i))).scaled_exp();
                                        exp * T::Lanes::<S>::load(scale.add(i))
                                    }
                                };
                                // A loop of its own for each.
                                if !dropout {
                                    T::write::<S>(to, segment.len, result);
                                    continue;
                                }
                                let keep = kept[(range.start + j) % PER_COUNTER][segment.at..].as_ptr();
                                T::write::<S>(
                                    to,
                                    segment.len,
                                    #[inline(always)]
                                    |i, count| result(i, count).where_kept(keep.add(i), T::Real::ZERO),
                                );
                            }
                        }
                        first = end;
                    }
                }
            }
        }
    }

    /// Makes the logits of these rows a group at a time, and adds them to the states.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn states<S: Simd>(side: &Side<T>, range: Range<usize>) -> Vec<SoftmaxState<T::Lanes<S>>> {
        let (mut memory, mut runs) = (group_memory(), Vec::new());
        let mut states = vec![SoftmaxState::empty(); side.vectors::<S>()];
        let [none, zero] = [T::Real::NEG_INFINITY, T::Real::ZERO].map(T::Lanes::<S>::splat);
        for first in range.clone().step_by(ROWS) {
            let group = Group::new(first, ROWS.min(range.end - first), &mut memory);
            // SAFETY of the block: there is room for each row; the rest by the caller's promise.
            unsafe {
                side.logits::<S>(&group, &mut runs);
                for (i, state) in states.iter_mut().enumerate() {
                    let at = i * T::Lanes::<S>::COUNT;
                    let max = group.across(
                        at,
                        none,
                        #[inline(always)]
                        |max, z: T::Lanes<S>| z.or_greater(max),
                    );
                    let reference = state.grow(max);
                    state.add(group.across(
                        at,
                        zero,
                        #[inline(always)]
                        |sum, z| sum + (z - reference).exp(),
                    ));
                }
            }
        }
        states
    }

    /// What is made of the logits of each line of a strip, as of [`Call::scales`]; a vector longer than it.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn scales<S: Simd>(side: &Side<T>, states: &[SoftmaxState<T::Lanes<S>>]) -> [Vec<T::Real>; 2] {
        let mut max = flat(states.iter().map(|state| state.max()));
        let mut scale = flat(states.iter().map(|state| state.sum()));
        // SAFETY: as promised by the caller.
        for (i, sink) in unsafe { side.sinks::<S>() }.into_iter().enumerate() {
            let state = SoftmaxState::from_parts(max[i], scale[i]);
            (max[i], scale[i]) = side.call.scales::<T::Lanes<S>>(with_sink(state, sink));
        }
        [max, scale]
    }

    /// Writes what the logits of a group become.
    ///
    /// # Safety
    /// As of [`Pass::write`]; the logits are there.
    #[inline(always)]
    unsafe fn write_group<S: Simd>(
        &self,
        side: &Side<T>,
        group: &Group<T::Real>,
        [max, scale]: &[Vec<T::Real>; 2],
        kept: &mut [[u8; ROW]; PER_COUNTER],
    ) {
        let make = Make::OfEach(self.call.options.output, max.as_ptr(), scale.as_ptr());
        // SAFETY: `max` and `scale` are a vector longer than the row; the rest by the caller's promise.
        unsafe {
            T::Real::store_any::<S>(
                &self.out,
                group.rows,
                #[inline(always)]
                |i| {
                    let j = group.first + i;
                    if i == 0 || j % PER_COUNTER == 0 {
                        side.keep::<S>(j, kept);
                    }
                    let last = Last { make, keep: side.kept(j, kept) };
                    Part { start: side.strip.row(j), len: side.strip.width, from: group.row(i), last }
                },
            )
        }
    }
}

/// Adds the logits of a group of rows to the states of the lines of a segment.
///
/// # Safety
/// The CPU has the instructions of `S`; what `logit` makes is there.
#[inline(always)]
unsafe fn group_states<S: Simd, T: Element>(
    states: &mut [SoftmaxState<T::Lanes<S>>],
    of: Origin<T>,
    len: usize,
    stride: usize,
    first: usize,
    rows: usize,
    logit: impl Fn(&Origin<T>, usize, usize, usize) -> T::Lanes<S>,
) {
    let [none, zero] = [T::Real::NEG_INFINITY, T::Real::ZERO].map(T::Lanes::<S>::splat);
    each::<T::Lanes<S>>(
        0..len,
        #[inline(always)]
        |i, count| {
            let state = &mut states[i / T::Lanes::<S>::COUNT];
            let (mut z, mut max, mut sum) = ([none; ROWS], none, zero);
            for (r, z) in z.iter_mut().enumerate().take(rows) {
                S::prefetch(of.scores.wrapping_add((first + r + ROWS) * stride + i));
                *z = logit(&of, first + r, i, count);
                max = z.or_greater(max);
            }
            let reference = state.grow(max);
            for &z in z.iter().take(rows) {
                sum = sum + (z - reference).scaled_exp();
            }
            state.add(sum.unscaled());
        },
    );
}

impl<S: Simd, T: Element> Pass<S> for Columns<'_, T> {
    type Reduced = Vec<SoftmaxState<T::Lanes<S>>>;
    const WIDTH: usize = WIDTH;

    #[inline(always)]
    unsafe fn reduce(&self, unit: usize, range: Range<usize>) -> Self::Reduced {
        let side = Side::new(self.call, unit);
        if self.direct::<S>(&side).is_some() {
            let mut states = vec![SoftmaxState::empty(); side.vectors::<S>()];
            // SAFETY: as promised by the caller.
            unsafe { self.directly::<S>(&side, range, Todo::Reduce(&mut states)) };
            return states;
        }
        // SAFETY: as promised by the caller.
        unsafe { Self::states::<S>(&side, range) }
    }

    #[inline(always)]
    unsafe fn merge(a: Self::Reduced, b: Self::Reduced) -> Self::Reduced {
        merged(a, b, SoftmaxState::merge)
    }

    #[inline(always)]
    unsafe fn write(&self, unit: usize, range: Range<usize>, states: &Self::Reduced) {
        let side = Side::new(self.call, unit);
        // SAFETY of the block: there is room for each row; the rest by the caller's promise.
        unsafe {
            let scales = Self::scales::<S>(&side, states);
            if let Some(out) = self.direct::<S>(&side) {
                return self.directly::<S>(&side, range, Todo::Write(out, &scales));
            }
            let (mut memory, mut runs, mut kept) = (group_memory(), Vec::new(), [[0; ROW]; PER_COUNTER]);
            for first in range.clone().step_by(ROWS) {
                let group = Group::new(first, ROWS.min(range.end - first), &mut memory);
                side.logits::<S>(&group, &mut runs);
                self.write_group::<S>(&side, &group, &scales, &mut kept);
            }
        }
    }
}

/// A backward pass: everything that is read and written.
#[derive(Clone, Copy)]
struct Backward<'a, T: Element> {
    call: Call<'a, T>,
    g: Any<'a>,
    scores: Option<Elements<'a, T>>,
    logits: Option<Elements<'a, T::Real>>,
    sinks: Option<Elements<'a, T::Real>>,
}

/// What the gradient of a line's logits is made with: p = exp(z − max) · inverse, and the sum of what is weighted.
#[derive(Clone, Copy)]
struct Found<N> {
    max: N,
    inverse: N,
    total: N,
}

impl<R: Real> Found<R> {
    /// Of a line of nothing.
    const NOTHING: Self = Self { max: R::ZERO, inverse: R::ZERO, total: R::ZERO };
}

impl<T: Element> Backward<'_, T> {
    /// Finishes a line.
    fn found(&self, mut sums: Weighted<T::Real>, sink: Option<T::Real>) -> Found<T::Real> {
        if let Some(sink) = sink {
            let reference = sums.grow(sink);
            sums.add((sink - reference).exp(), T::Real::ZERO);
        }
        let Some(Normalizer { max, sum }) = sums.state.normalizer() else { return Found::NOTHING };
        let total = if self.call.is_log() { sums.dot() } else { sums.dot() / sums.state.sum() };
        Found { max, inverse: T::Real::ONE / sum, total }
    }

    /// Writes what a line adds to its sink's gradient, if that is wanted.
    ///
    /// # Safety
    /// As of [`Pass::write`].
    #[inline(always)]
    unsafe fn write_sink(&self, line: usize, sink: Option<T::Real>, found: &Found<T::Real>) {
        if let (Some(sinks), Some(sink)) = (self.sinks, sink) {
            let p = (sink - found.max).exp() * found.inverse;
            // SAFETY: the element is there; the rest by the caller's promise.
            unsafe { sinks.at(line, 1).write(T::Real::ZERO - p * found.total) };
        }
    }

    /// Loads the gradients of a run's results, times dropout's factor, and 0 for what does not take part and up to a whole
    /// vector. Answers the sum of what `then(start, logits, gradients)` makes of each vector of them and of the logits.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and `z`, `g` and `keep` are valid for `len` elements and up to a whole vector.
    #[inline(always)]
    unsafe fn load<S: Simd>(
        &self,
        at: usize,
        len: usize,
        z: *const T::Real,
        g: *mut T::Real,
        keep: Option<*const u8>,
        mut then: impl FnMut(usize, T::Lanes<S>, T::Lanes<S>) -> T::Lanes<S>,
    ) -> T::Real {
        let zero = T::Lanes::<S>::splat(T::Real::ZERO);
        let lowest = T::Lanes::<S>::splat(T::Real::LOWEST);
        let factor = self.call.options.dropout.map_or(1.0, |dropout| dropout.kept_scale());
        let factor = T::Lanes::<S>::splat(T::Real::nearest(factor));
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let mut take = {
                #[inline(always)]
                |i: usize, mut x: T::Lanes<S>| {
                    if let Some(keep) = keep {
                        x = (x * factor).where_kept(keep.add(i), T::Real::ZERO);
                    }
                    let z = T::Lanes::<S>::load(z.add(i));
                    let x = z.if_less(lowest, zero, x);
                    x.store(g.add(i));
                    then(i, z, x)
                }
            };
            match T::of(&self.g) {
                Some(from) => {
                    let from = from.at(at, len).cast_const();
                    sum_of(
                        len,
                        #[inline(always)]
                        |i, count| {
                            S::prefetch(from.wrapping_add(i + ahead::<T>()));
                            take(i, T::read::<S>(from.add(i), count, T::Real::ZERO))
                        },
                    )
                }
                None => {
                    T::Real::load_any::<S>(&self.g, at, len, g);
                    sum_of(
                        len,
                        #[inline(always)]
                        |i, count| take(i, T::Lanes::<S>::get(g.add(i), count)),
                    )
                }
            }
        }
    }

    /// Makes the gradients of a run's logits of what [`load`](Self::load) left in `g`, and writes them and those of the scores.
    /// `found(start, x)` gives p and the sum of what is weighted for a vector of `held`, which is −∞ where an element does not
    /// take part.
    ///
    /// # Safety
    /// As of [`load`](Self::load), and of [`Pass::write`].
    #[inline(always)]
    unsafe fn write<S: Simd>(
        &self,
        at: usize,
        len: usize,
        held: *const T::Real,
        g: *const T::Real,
        found: impl Fn(usize, T::Lanes<S>) -> (T::Lanes<S>, T::Lanes<S>),
    ) {
        let zero = T::Lanes::<S>::splat(T::Real::ZERO);
        let lowest = T::Lanes::<S>::splat(T::Real::LOWEST);
        let scale = T::Lanes::<S>::splat(self.call.scale);
        let log = self.call.is_log();
        let logits = self.logits.map(|logits| logits.at(at, len));
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let of_logits = {
                #[inline(always)]
                |i: usize, count| {
                    let (x, g) = (T::Lanes::<S>::get(held.add(i), count), T::Lanes::<S>::get(g.add(i), count));
                    let (p, total) = found(i, x);
                    let gradient = if log { g - p * total } else { p * (g - total) };
                    let gradient = x.if_less(lowest, zero, gradient);
                    if let Some(logits) = logits {
                        gradient.put(logits.add(i), count);
                    }
                    gradient
                }
            };
            let Some(scores) = self.scores else {
                return each::<T::Lanes<S>>(
                    0..len,
                    #[inline(always)]
                    |i, count| {
                        of_logits(i, count);
                    },
                );
            };
            let (src, to) = (self.call.scores.at(at, len).cast_const(), scores.at(at, len));
            T::write::<S>(
                to,
                len,
                #[inline(always)]
                |i, count| {
                    // Memory that is written is read first.
                    S::prefetch(to.wrapping_add(i + ahead::<T>()));
                    let gradient = of_logits(i, count) * scale;
                    let Some((inverse, _)) = self.call.cap else { return gradient };
                    let x = T::read::<S>(src.add(i), count, T::Real::ZERO);
                    let gradient = gradient * tanh_slope(x * T::Lanes::<S>::splat(inverse));
                    // A score that does not take part may be NaN.
                    T::Lanes::<S>::get(held.add(i), count).if_less(lowest, zero, gradient)
                },
            );
        }
    }

    /// Writes that elements outside of the window have no gradient.
    ///
    /// # Safety
    /// As of [`Pass::write`].
    #[inline(always)]
    unsafe fn write_outside(&self, start: usize, len: usize) {
        if len == 0 {
            return;
        }
        // SAFETY: as promised by the caller; all bits 0 are the number 0 in every dtype.
        unsafe {
            if let Some(scores) = self.scores {
                scores.at(start, len).write_bytes(0, len);
            }
            if let Some(logits) = self.logits {
                logits.at(start, len).write_bytes(0, len);
            }
        }
    }
}

/// The elements of a block that dropout keeps.
#[inline(always)]
fn keep_along<S: Simd, T: Element>(
    call: &Call<T>,
    line: usize,
    start: usize,
    len: usize,
    kept: &mut Kept,
) -> Option<*const u8> {
    call.options.dropout.map(
        #[inline(always)]
        |dropout| {
            let at = random::along::<S>(dropout, line, start, len, kept);
            kept[at..].as_ptr()
        },
    )
}

struct BackwardRows<'a, T: Element>(Backward<'a, T>);

impl<T: Element> BackwardRows<'_, T> {
    /// Σ exp(z − reference) of a line's runs, and the sum of the gradients that `g` says the places of: these are loaded, and
    /// the exponentials take the logits' place, but where an element does not take part.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, the logits of the runs are there, and as much room in `g`.
    #[inline(always)]
    unsafe fn sums<S: Simd>(
        &self,
        line: &Line<Found<T::Real>>,
        runs: &[Run<T::Real>],
        reference: T::Real,
        g: impl Fn(&Run<T::Real>) -> *mut T::Real,
        kept: &mut Kept,
    ) -> (T::Real, T::Real) {
        let log = self.0.call.is_log();
        let [reference, lowest, zero] = [reference, T::Real::LOWEST, T::Real::ZERO].map(T::Lanes::<S>::splat);
        let (mut sums, mut dots) = (CompensatedSum::zero(), CompensatedSum::zero());
        for run in runs {
            let keep = keep_along::<S, T>(&self.0.call, line.number, run.scores - line.place.scores, run.len, kept);
            let mut dot = zero;
            // SAFETY: as promised by the caller.
            let sum = unsafe {
                self.0.load::<S>(
                    run.scores,
                    run.len,
                    run.z,
                    g(run),
                    keep,
                    #[inline(always)]
                    |i, z, g| {
                        let exp = (z - reference).exp();
                        dot = if log { dot + g } else { g.mul_add(exp, dot) };
                        z.if_less(lowest, z, exp).store(run.z.add(i));
                        exp
                    },
                )
            };
            let dot = dot.sum_across();
            if runs.len() == 1 {
                return (sum, dot);
            }
            sums.add(sum);
            dots.add(dot);
        }
        (sums.value(), dots.value())
    }
}

impl<S: Simd, T: Element> Pass<S> for BackwardRows<'_, T> {
    type Reduced = Weighted<T::Real>;
    const WIDTH: usize = 1;

    #[inline(always)]
    unsafe fn reduce(&self, line: usize, range: Range<usize>) -> Self::Reduced {
        let call = &self.0.call;
        let place = call.geometry.place(line);
        let (mut z, mut g, mut kept) = (block::<T::Real>(), block::<T::Real>(), [0; random::room(MAX_BLOCK)]);
        let (z, g) = (z.0.as_mut_ptr().cast::<T::Real>(), g.0.as_mut_ptr().cast::<T::Real>());
        let log = call.is_log();
        let mut sums = Weighted::empty(!log);
        for (start, len) in blocks::<T::Lanes<S>>(call.keys(place.query, &range)) {
            let keep = keep_along::<S, T>(call, line, start, len, &mut kept);
            // SAFETY of the block: `z` and `g` have room for a block; the rest by the caller's promise.
            unsafe {
                let max = call.logits_along::<S>(&place, start, len, z);
                let reference = T::Lanes::<S>::splat(sums.grow(max));
                let mut dot = T::Lanes::<S>::splat(T::Real::ZERO);
                let sum = self.0.load::<S>(
                    place.scores + start,
                    len,
                    z,
                    g,
                    keep,
                    #[inline(always)]
                    |_, z, g| {
                        let exp = (z - reference).exp();
                        dot = if log { dot + g } else { g.mul_add(exp, dot) };
                        exp
                    },
                );
                sums.add(sum, dot.sum_across());
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn merge(mut a: Self::Reduced, b: Self::Reduced) -> Self::Reduced {
        a.merge(b);
        a
    }

    #[inline(always)]
    unsafe fn write(&self, line: usize, range: Range<usize>, sums: &Self::Reduced) {
        let call = &self.0.call;
        let place = call.geometry.place(line);
        let keys = call.keys(place.query, &range);
        let (mut z, mut g, mut kept) = (block::<T::Real>(), block::<T::Real>(), [0; random::room(MAX_BLOCK)]);
        let (z, g) = (z.0.as_mut_ptr().cast::<T::Real>(), g.0.as_mut_ptr().cast::<T::Real>());
        // SAFETY of the block: `z` and `g` have room for a block; the rest by the caller's promise.
        unsafe {
            let sink = call.sink::<S>(place.sink);
            let found = self.0.found(*sums, sink);
            if range.start == 0 {
                self.0.write_sink(line, sink, &found);
            }
            let [max, inverse, total] = [found.max, found.inverse, found.total].map(T::Lanes::<S>::splat);
            self.0.write_outside(place.scores + range.start, keys.start - range.start);
            self.0.write_outside(place.scores + keys.end, range.end - keys.end);
            for (start, len) in blocks::<T::Lanes<S>>(keys) {
                let keep = keep_along::<S, T>(call, line, start, len, &mut kept);
                call.logits_along::<S>(&place, start, len, z);
                self.0.load::<S>(
                    place.scores + start,
                    len,
                    z,
                    g,
                    keep,
                    #[inline(always)]
                    |_, _, g| g,
                );
                self.0.write::<S>(
                    place.scores + start,
                    len,
                    z,
                    g,
                    #[inline(always)]
                    |_, z| ((z - max).exp() * inverse, total),
                );
            }
        }
    }

    #[inline(always)]
    unsafe fn whole(&self, lines: Range<usize>, len: usize) {
        let call = &self.0.call;
        if len > HELD {
            // SAFETY: as promised by the caller.
            return unsafe { Pass::<S>::one_by_one(self, lines, len) };
        }
        let log = call.is_log();
        let none = T::Real::NEG_INFINITY;
        let mut together = Together::new::<S>(call, &lines, len);
        let g = Held::<T::Real>::new(together.count * together.room);
        let mut kept = [0; random::room(MAX_BLOCK)];
        for first in lines.clone().step_by(together.count) {
            // SAFETY of the block: `g` has as much room as there is for the logits; the rest by the caller's promise.
            unsafe {
                together.take::<S>(first..lines.end, Found::NOTHING);
                let Together { runs, work, held, .. } = &mut together;
                let g = |run: &Run<T::Real>| g.start.offset(run.z.offset_from(held.start));
                for line in work.iter_mut() {
                    let runs = &runs[line.runs.clone()];
                    let sink = call.sink::<S>(line.place.sink);
                    let max =
                        runs.iter().fold(sink.unwrap_or(none).or_greater(none), |max, run| run.max.or_greater(max));
                    // Finite where nothing is above −∞, so that exp(−∞ − reference) is 0 and a NaN survives.
                    let reference = max.or_greater(T::Real::LOWEST);
                    let (sum, dot) = self.sums::<S>(line, runs, reference, g, &mut kept);
                    let sum = match sink {
                        Some(sink) => sum + (sink - reference).exp(),
                        None => sum,
                    };
                    line.found = if max == none && sum == T::Real::ZERO {
                        Found::NOTHING
                    } else {
                        let line = Normalizer::new(max, sum);
                        Found { max, inverse: T::Real::ONE / line.sum, total: if log { dot } else { dot / sum } }
                    };
                    self.0.write_sink(line.number, sink, &line.found);
                    let (start, end) = (line.place.scores, line.place.scores + len);
                    self.0.write_outside(start, line.keys.start);
                    self.0.write_outside(start + line.keys.end, end - start - line.keys.end);
                }
                for line in work.iter() {
                    let [inverse, total] = [line.found.inverse, line.found.total].map(T::Lanes::<S>::splat);
                    for run in &runs[line.runs.clone()] {
                        self.0.write::<S>(
                            run.scores,
                            run.len,
                            run.z,
                            g(run),
                            #[inline(always)]
                            |_, exp| (exp * inverse, total),
                        );
                    }
                }
            }
        }
    }
}

struct BackwardColumns<'a, T: Element>(Backward<'a, T>);

impl<T: Element> BackwardColumns<'_, T> {
    /// Calls `with(z, g)` for each group of these rows, with their logits, and what is loaded of the gradients.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn groups<S: Simd>(
        &self,
        side: &Side<T>,
        range: &Range<usize>,
        mut with: impl FnMut(&Group<T::Real>, &Group<T::Real>),
    ) {
        let (mut z, mut g, mut runs) = (group_memory(), group_memory(), Vec::new());
        let mut kept = [[0; ROW]; PER_COUNTER];
        for first in range.clone().step_by(ROWS) {
            let rows = ROWS.min(range.end - first);
            let (z, g) = (Group::new(first, rows, &mut z), Group::new(first, rows, &mut g));
            // SAFETY of the block: the rows are a vector longer than the strip; the rest by the caller's promise.
            unsafe {
                side.logits::<S>(&z, &mut runs);
                for (i, j) in z.numbers().enumerate() {
                    if i == 0 || j % PER_COUNTER == 0 {
                        side.keep::<S>(j, &mut kept);
                    }
                    self.0.load::<S>(
                        side.strip.row(j),
                        side.strip.width,
                        z.row(i),
                        g.row(i),
                        side.kept(j, &kept),
                        #[inline(always)]
                        |_, _, g| g,
                    );
                }
            }
            with(&z, &g);
        }
    }
}

impl<S: Simd, T: Element> Pass<S> for BackwardColumns<'_, T> {
    type Reduced = Vec<Weighted<T::Lanes<S>>>;
    const WIDTH: usize = WIDTH;

    #[inline(always)]
    unsafe fn reduce(&self, unit: usize, range: Range<usize>) -> Self::Reduced {
        let side = Side::new(self.0.call, unit);
        let log = side.call.is_log();
        let [none, zero] = [T::Real::NEG_INFINITY, T::Real::ZERO].map(T::Lanes::<S>::splat);
        let mut sums = vec![Weighted::empty(!log); side.vectors::<S>()];
        // SAFETY of the block: the vectors are in the rows; the rest by the caller's promise.
        unsafe {
            self.groups::<S>(
                &side,
                &range,
                #[inline(always)]
                |z, g| {
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let at = i * T::Lanes::<S>::COUNT;
                        let reference = sums.grow(z.across(
                            at,
                            none,
                            #[inline(always)]
                            |max, z: T::Lanes<S>| z.or_greater(max),
                        ));
                        let (mut sum, mut dot) = (zero, zero);
                        for i in 0..z.rows {
                            let z = T::Lanes::<S>::load(z.row(i).wrapping_add(at));
                            let g = T::Lanes::<S>::load(g.row(i).wrapping_add(at));
                            let exp = (z - reference).exp();
                            sum = sum + exp;
                            dot = if log { dot + g } else { g.mul_add(exp, dot) };
                        }
                        sums.add(sum, dot);
                    }
                },
            )
        };
        sums
    }

    #[inline(always)]
    unsafe fn merge(a: Self::Reduced, b: Self::Reduced) -> Self::Reduced {
        merged(a, b, Weighted::merge)
    }

    #[inline(always)]
    unsafe fn write(&self, unit: usize, range: Range<usize>, sums: &Self::Reduced) {
        let side = Side::new(self.0.call, unit);
        let relative = !side.call.is_log();
        let mut max = flat(sums.iter().map(|sums| sums.state.max()));
        let mut inverse = flat(sums.iter().map(|sums| sums.state.sum()));
        let mut total = flat(sums.iter().map(|sums| sums.dot()));
        // SAFETY of the block: `max`, `inverse` and `total` are a vector longer than the strip; the rest by the caller's
        // promise.
        unsafe {
            for (i, sink) in side.sinks::<S>().into_iter().enumerate() {
                let sums = Weighted::from_parts(SoftmaxState::from_parts(max[i], inverse[i]), total[i], relative);
                let found = self.0.found(sums, sink);
                if range.start == 0 {
                    self.0.write_sink(side.line + i, sink, &found);
                }
                (max[i], inverse[i], total[i]) = (found.max, found.inverse, found.total);
            }
            self.groups::<S>(
                &side,
                &range,
                #[inline(always)]
                |z, g| {
                    for (i, j) in z.numbers().enumerate() {
                        self.0.write::<S>(
                            side.strip.row(j),
                            side.strip.width,
                            z.row(i),
                            g.row(i),
                            #[inline(always)]
                            |i, z| {
                                let [max, inverse, total] =
                                    [&max, &inverse, &total].map(|of| T::Lanes::<S>::load(of.as_ptr().add(i)));
                                ((z - max).exp() * inverse, total)
                            },
                        );
                    }
                },
            );
        }
    }
}

struct ForwardTask<'a, T: Element>(Call<'a, T>, Any<'a>);

impl<T: Element> Task for ForwardTask<'_, T> {
    fn run<S: Simd>(self) {
        let (call, out) = (self.0, self.1);
        let lines = call.geometry.lines;
        if lines.inner == 1 {
            run::<S, Rows<T>>(&Rows { call, out }, lines, true)
        } else {
            run::<S, Columns<T>>(&Columns { call, out }, lines, true)
        }
    }
}

impl<T: Element> Task for Backward<'_, T> {
    fn run<S: Simd>(self) {
        let lines = self.call.geometry.lines;
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
    wanted: Gradients<bool>,
) -> Result<Gradients<Option<CpuStorage>>> {
    fn run<T: Element + WithDType>(call: Call<T>, g: Any, wanted: Gradients<bool>) -> Gradients<Option<CpuStorage>> {
        let (elements, lines) = (call.geometry.lines.elem_count(), call.geometry.lines.count());
        let mut scores = wanted.scores.then(|| Unfilled::<T>::new(elements));
        let mut logits = wanted.logits.then(|| Unfilled::<T::Real>::new(elements));
        let mut sinks = wanted.sinks.then(|| Unfilled::<T::Real>::new(lines));
        Level::best().run(Backward {
            call,
            g,
            scores: scores.as_mut().map(Unfilled::elements),
            logits: logits.as_mut().map(Unfilled::elements),
            sinks: sinks.as_mut().map(Unfilled::elements),
        });
        // SAFETY: every element is of one line, and every line is written; sinks are asked for where there are some.
        unsafe {
            Gradients {
                scores: scores.map(|scores| T::to_cpu_storage_owned(scores.filled())),
                logits: logits.map(|logits| T::Real::to_cpu_storage_owned(logits.filled())),
                sinks: sinks.map(|sinks| T::Real::to_cpu_storage_owned(sinks.filled())),
            }
        }
    }
    let wanted = Gradients { sinks: wanted.sinks && around.sinks.is_some(), ..wanted };
    let g = Any::read(gradient.storage, gradient.start)?;
    by_dtype!(scores.storage, |xs| {
        let xs = &xs[scores.start..][..geometry.lines.elem_count()];
        Ok(run(Call::new(options, geometry, Elements::read(xs), around)?, g, wanted))
    })
}
