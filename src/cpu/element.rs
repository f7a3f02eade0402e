//! The dtypes on the CPU: read as the type that is computed in, written with one rounding.

use super::fused::{Any, Wide};
use super::lanes::{Lanes, Pack};
use super::level::Simd;
use super::memory::Elements;
use crate::state::{Number, Real};
use half::{bf16, f16};

/// Where a line that is too long for the first cache keeps exponentials relative to a reference that is not the maximum.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Where the results are to be, which are of the same type.
    InOutput,
    Aside,
    /// They are taken twice: they would not be exact enough where results are subnormal.
    Nowhere,
}

pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// f32, or f64 for f64.
    type Real: Wide;
    /// Where a long line keeps its exponentials.
    const KEEP: Keep;
    /// Vectors of `Real`.
    type Lanes<S: Simd>: Lanes<Real = Self::Real>;

    /// Elements of any dtype, if they are of this one.
    fn of<'a>(any: &Any<'a>) -> Option<Elements<'a, Self>>;

    /// # Safety
    /// The CPU has the instructions of `S`, and `from` is valid for reads of a vector.
    unsafe fn load<S: Simd>(from: *const Self) -> Self::Lanes<S>;

    /// # Safety
    /// As of [`load`](Self::load), for `count` elements, at most a vector.
    unsafe fn load_part<S: Simd>(from: *const Self, count: usize) -> Self::Lanes<S>;

    /// # Safety
    /// The CPU has the instructions of `S`, and `to` is valid for writes of a vector.
    unsafe fn store<S: Simd>(xs: Self::Lanes<S>, to: *mut Self);

    /// # Safety
    /// As of [`store`](Self::store), for `count` elements, at most a vector.
    unsafe fn store_part<S: Simd>(xs: Self::Lanes<S>, to: *mut Self, count: usize);

    /// The first `count` lanes from memory, and `rest` in the others.
    ///
    /// # Safety
    /// As of [`load_part`](Self::load_part).
    #[inline(always)]
    unsafe fn read<S: Simd>(from: *const Self, count: usize, rest: Self::Real) -> Self::Lanes<S> {
        // SAFETY: as promised by the caller.
        unsafe {
            if count == Self::Lanes::<S>::COUNT {
                Self::load::<S>(from)
            } else {
                Self::load_part::<S>(from, count).keep(count, rest)
            }
        }
    }

    /// [`store`](Self::store), or [`store_part`](Self::store_part) if `count` is less than a vector.
    ///
    /// # Safety
    /// As of [`store_part`](Self::store_part).
    #[inline(always)]
    unsafe fn put<S: Simd>(xs: Self::Lanes<S>, to: *mut Self, count: usize) {
        // SAFETY: as promised by the caller.
        unsafe {
            if count == Self::Lanes::<S>::COUNT {
                Self::store::<S>(xs, to)
            } else {
                Self::store_part::<S>(xs, to, count)
            }
        }
    }

    /// Writes `f(start, count)` to the elements `0..len` of `to`, vector by vector; `count` is less than a vector's only
    /// at the ends. In long lines whole vectors go to aligned addresses.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and `to` is valid for writes of `len` elements.
    #[inline(always)]
    unsafe fn write<S: Simd>(to: *mut Self, len: usize, mut f: impl FnMut(usize, usize) -> Self::Lanes<S>) {
        // SAFETY: as promised by the caller.
        unsafe {
            Self::write_rows::<S, 1>(
                to,
                0,
                len,
                #[inline(always)]
                |_, i, count| f(i, count),
            )
        }
    }

    /// The same for results that take little: four vectors are there before one of them is written, as in
    /// [`sum_seen`](super::lanes::sum_seen). Whether whole vectors go to aligned addresses is the caller's to say.
    ///
    /// # Safety
    /// As of [`write`](Self::write).
    #[inline(always)]
    unsafe fn write_fours<S: Simd>(
        to: *mut Self,
        len: usize,
        aligned: bool,
        f: impl Fn(usize, usize) -> Self::Lanes<S>,
    ) {
        let count = Self::Lanes::<S>::COUNT;
        let head = if aligned { to.align_offset(count * size_of::<Self>()) } else { 0 };
        let mut i = if head < count { head.min(len) } else { 0 };
        // SAFETY of the block: what is written is within `len`.
        unsafe {
            if i > 0 {
                Self::store_part::<S>(f(0, i), to, i);
            }
            while Self::Lanes::<S>::UNROLLED && i + 4 * count <= len {
                let (a, b) = (f(i, count), f(i + count, count));
                let (c, d) = (f(i + 2 * count, count), f(i + 3 * count, count));
                Self::store::<S>(a, to.add(i));
                Self::store::<S>(b, to.add(i + count));
                Self::store::<S>(c, to.add(i + 2 * count));
                Self::store::<S>(d, to.add(i + 3 * count));
                i += 4 * count;
            }
            while i < len {
                let count = count.min(len - i);
                Self::put::<S>(f(i, count), to.add(i), count);
                i += count;
            }
        }
    }

    /// [`write`](Self::write) for `ROWS` rows side by side that are `stride` apart: `f(row, start, count)`.
    ///
    /// # Safety
    /// As of [`write`](Self::write), for each of the rows.
    #[inline(always)]
    unsafe fn write_rows<S: Simd, const ROWS: usize>(
        to: *mut Self,
        stride: usize,
        len: usize,
        mut f: impl FnMut(usize, usize, usize) -> Self::Lanes<S>,
    ) {
        let count = Self::Lanes::<S>::COUNT;
        // Where the last whole vector starts, plus one.
        let whole = (len + 1).saturating_sub(count);
        // SAFETY of the block: `i` and what is written from there stay within `len`.
        unsafe {
            let mut head = 0;
            if len >= ALIGN_FROM {
                // More than a vector where an address is such that no element is aligned.
                head = to.align_offset(count * size_of::<Self>());
                head = if head < count { head } else { 0 };
            }
            let mut i = head;
            while i < whole {
                // All of them are there before one is written: what they are made from need not be read again.
                let mut results = [Self::Lanes::<S>::splat(Self::Real::ZERO); ROWS];
                for (row, result) in results.iter_mut().enumerate() {
                    *result = f(row, i, count);
                }
                for (row, result) in results.into_iter().enumerate() {
                    Self::store::<S>(result, to.add(row * stride + i));
                }
                i += count;
            }
            // Parts of vectors at either end, in one piece of code
            for (start, end) in [(0, head), (i, len)] {
                if start == end {
                    continue;
                }
                for row in 0..ROWS {
                    let part = f(row, start, end - start);
                    Self::store_part::<S>(part, to.add(row * stride + start), end - start);
                }
            }
        }
    }
}

/// From this length on whole vectors of a line are written to aligned addresses: in shorter ones the part of a vector before
/// them costs more.
const ALIGN_FROM: usize = 256;

macro_rules! real_element {
    ($real:ident, $Lanes:ident, $Keep:ident) => {
        // SAFETY of all: as promised by the caller.
        impl Element for $real {
            type Real = $real;
            const KEEP: Keep = Keep::$Keep;
            type Lanes<S: Simd> = S::$Lanes;

            fn of<'a>(any: &Any<'a>) -> Option<Elements<'a, Self>> {
                match any {
                    Any::$Lanes(elements) => Some(*elements),
                    _ => None,
                }
            }
            #[inline(always)]
            unsafe fn load<S: Simd>(from: *const Self) -> S::$Lanes {
                unsafe { S::$Lanes::load(from) }
            }
            #[inline(always)]
            unsafe fn load_part<S: Simd>(from: *const Self, count: usize) -> S::$Lanes {
                unsafe { S::$Lanes::load_part(from, count) }
            }
            #[inline(always)]
            unsafe fn store<S: Simd>(xs: S::$Lanes, to: *mut Self) {
                unsafe { xs.store(to) }
            }
            #[inline(always)]
            unsafe fn store_part<S: Simd>(xs: S::$Lanes, to: *mut Self, count: usize) {
                unsafe { xs.store_part(to, count) }
            }
        }
    };
}
real_element!(f32, F32, InOutput);
real_element!(f64, F64, Nowhere);

macro_rules! half_element {
    ($half:ident, $Variant:ident, $widen:ident, $round:ident) => {
        // SAFETY of all: as promised by the caller; a half is its bits.
        impl Element for $half {
            type Real = f32;
            const KEEP: Keep = Keep::Aside;
            type Lanes<S: Simd> = S::F32;

            fn of<'a>(any: &Any<'a>) -> Option<Elements<'a, Self>> {
                match any {
                    Any::$Variant(elements) => Some(*elements),
                    _ => None,
                }
            }
            #[inline(always)]
            unsafe fn load<S: Simd>(from: *const Self) -> S::F32 {
                S::$widen(unsafe { S::U16::load(from.cast()) })
            }
            #[inline(always)]
            unsafe fn load_part<S: Simd>(from: *const Self, count: usize) -> S::F32 {
                S::$widen(unsafe { S::U16::load_part(from.cast(), count) })
            }
            #[inline(always)]
            unsafe fn store<S: Simd>(xs: S::F32, to: *mut Self) {
                unsafe { S::$round(xs).store(to.cast()) }
            }
            #[inline(always)]
            unsafe fn store_part<S: Simd>(xs: S::F32, to: *mut Self, count: usize) {
                unsafe { S::$round(xs).store_part(to.cast(), count) }
            }
        }
    };
}
half_element!(f16, F16, f16_to_f32, f32_to_f16);
half_element!(bf16, BF16, bf16_to_f32, f32_to_bf16);
