//! Vectors of numbers, and the portable ones among them.

use super::exp::{
    exp_f32, exp_f64, ln_f32, ln_f64, scaled_exp_f32, scaled_exp_f64, tanh_f32, tanh_f64, UNSCALE_F32, UNSCALE_F64,
};
use crate::state::{Number, Real};
use std::ops::{Add, Div, Mul, Range, Sub};

/// No vector has more lanes.
pub(crate) const MAX_LANES: usize = 16;

/// `COUNT` items that are read and written at once. Addresses need the alignment of an item only.
pub(crate) trait Pack: Copy {
    type Item: Copy;
    const COUNT: usize;

    /// # Safety
    /// `from` is valid for reads of `COUNT` items.
    unsafe fn load(from: *const Self::Item) -> Self;

    /// Reads the first `count` items; the rest are 0.
    ///
    /// # Safety
    /// `count` ≤ `COUNT`, and `from` is valid for reads of `count` items.
    unsafe fn load_part(from: *const Self::Item, count: usize) -> Self;

    /// # Safety
    /// `to` is valid for writes of `COUNT` items.
    unsafe fn store(self, to: *mut Self::Item);

    /// Writes the first `count` items.
    ///
    /// # Safety
    /// `count` ≤ `COUNT`, and `to` is valid for writes of `count` items.
    unsafe fn store_part(self, to: *mut Self::Item, count: usize);

    /// [`load`](Self::load), or [`load_part`](Self::load_part) if `count` is less than `COUNT`.
    ///
    /// # Safety
    /// As of [`load_part`](Self::load_part).
    #[inline(always)]
    unsafe fn get(from: *const Self::Item, count: usize) -> Self {
        // SAFETY: as promised by the caller.
        unsafe {
            if count == Self::COUNT {
                Self::load(from)
            } else {
                Self::load_part(from, count)
            }
        }
    }

    /// [`store`](Self::store), or [`store_part`](Self::store_part) if `count` is less than `COUNT`.
    ///
    /// # Safety
    /// As of [`store_part`](Self::store_part).
    #[inline(always)]
    unsafe fn put(self, to: *mut Self::Item, count: usize) {
        // SAFETY: as promised by the caller.
        unsafe {
            if count == Self::COUNT {
                self.store(to)
            } else {
                self.store_part(to, count)
            }
        }
    }
}

/// A vector of f32s or f64s.
pub(crate) trait Lanes: Number + Pack<Item = <Self as Number>::Real> {
    /// A power of two: what [`scaled_exp`](Self::scaled_exp) is to be multiplied by.
    const UNSCALE: Self::Real;
    /// Whether [`scaled_exp`](Self::scaled_exp) of what is too great is ∞ or NaN.
    const SATURATES: bool;
    /// Whether the registers suffice for loops over four vectors at a time that do several things.
    const UNROLLED: bool;
    /// Whether one instruction makes a mask of bytes.
    const MASKS_BYTES: bool;

    /// Whether [`stream`](Self::stream) goes past the caches.
    const STREAMS: bool = false;

    /// Writes the last lanes of `before` and the first `head` of this one, past the caches if [that can be](Self::STREAMS). Others see it
    /// after [`streamed`](Self::streamed).
    ///
    /// # Safety
    /// `head` is less than there are lanes, and `to` is valid for writes of a vector, and aligned to as many bytes.
    #[inline(always)]
    unsafe fn stream(self, before: Self, head: usize, to: *mut Self::Real) {
        let mut both = [Self::Real::ZERO; 2 * MAX_LANES];
        // SAFETY: no vector has more lanes; the rest by the caller's promise.
        unsafe {
            before.store(both.as_mut_ptr());
            self.store(both.as_mut_ptr().add(Self::COUNT));
            to.copy_from_nonoverlapping(both.as_ptr().add(head), Self::COUNT);
        }
    }

    /// Has what this thread wrote past the caches done before what it writes next.
    #[inline(always)]
    fn streamed() {}

    /// The greater of the two, lane by lane, and NaN for NaN; `limit` is a number.
    #[inline(always)]
    fn at_least(self, limit: Self) -> Self {
        limit.or_greater(self)
    }

    /// exp(x) / [`UNSCALE`](Self::UNSCALE), for who has a factor to put that into.
    fn scaled_exp(self) -> Self;

    /// The same of the lanes whose byte, of `count` at most a vector, is not 0, and 0 in the others.
    ///
    /// # Safety
    /// `keep` is valid for reads of `count` bytes.
    #[inline(always)]
    unsafe fn scaled_exp_where_kept(self, keep: *const u8, count: usize) -> Self {
        // SAFETY: as promised by the caller.
        unsafe { self.where_some_kept(keep, count, Self::Real::NEG_INFINITY) }.scaled_exp()
    }

    /// What is made of [`scaled_exp`](Self::scaled_exp) without a factor of its own.
    #[inline(always)]
    fn unscaled(self) -> Self {
        self * Self::splat(Self::UNSCALE)
    }

    /// self · a + b
    fn mul_add(self, a: Self, b: Self) -> Self;

    /// 1/x for x ≥ 1 and not ∞, and NaN for NaN; within 1 ulp.
    #[inline(always)]
    fn inverse(self) -> Self {
        Self::splat(Self::Real::ONE) / self
    }

    /// Each lane from that whose number is in its place.
    #[inline(always)]
    fn in_order(self, order: &[u32; MAX_LANES]) -> Self {
        let (mut from, mut to) = ([Self::Real::ZERO; MAX_LANES], [Self::Real::ZERO; MAX_LANES]);
        // SAFETY: no vector has more lanes.
        unsafe {
            self.store(from.as_mut_ptr());
            for (to, &lane) in to.iter_mut().zip(order).take(Self::COUNT) {
                *to = from[lane as usize % Self::COUNT];
            }
            Self::load(to.as_ptr())
        }
    }

    /// Of numbers from 1 on m in [1, 2) and whole e with x = m · 2ᵉ.
    #[inline(always)]
    fn mantissa_and_exponent(self) -> [Self; 2] {
        let (mut mantissas, mut exponents) = ([Self::Real::ONE; MAX_LANES], [Self::Real::ZERO; MAX_LANES]);
        // SAFETY: no vector has more lanes.
        unsafe {
            self.store(mantissas.as_mut_ptr());
            for (mantissa, exponent) in mantissas.iter_mut().zip(&mut exponents).take(Self::COUNT) {
                [*mantissa, *exponent] = mantissa.mantissa_and_exponent();
            }
            [Self::load(mantissas.as_ptr()), Self::load(exponents.as_ptr())]
        }
    }

    /// The first `count` lanes, and `rest` in the others.
    fn keep(self, count: usize, rest: Self::Real) -> Self;

    fn max_across(self) -> Self::Real;
    fn sum_across(self) -> Self::Real;

    /// [`max_across`](Self::max_across) of each of up to as many vectors as there are lanes, the first one's in the first
    /// lane.
    #[inline(always)]
    fn max_of_each(vectors: &[Self]) -> Self {
        of_each(vectors, Self::max_across)
    }

    /// The same of [`sum_across`](Self::sum_across).
    #[inline(always)]
    fn sum_of_each(vectors: &[Self]) -> Self {
        of_each(vectors, Self::sum_across)
    }

    fn abs(self) -> Self;

    /// The sign of `sign` given to what has none.
    fn with_sign_of(self, sign: Self) -> Self;

    /// `yes` where self < than, and `no` in the other lanes, also where either is NaN.
    fn if_less(self, than: Self, yes: Self, no: Self) -> Self;

    /// The lanes whose byte is not 0, and `rest` in the others.
    ///
    /// # Safety
    /// `keep` is valid for reads of a byte for each lane.
    unsafe fn where_kept(self, keep: *const u8, rest: Self::Real) -> Self;

    /// The same for `count` bytes, at most a vector; `rest` in the other lanes.
    ///
    /// # Safety
    /// `keep` is valid for reads of `count` bytes.
    #[inline(always)]
    unsafe fn where_some_kept(self, keep: *const u8, count: usize, rest: Self::Real) -> Self {
        // SAFETY: as promised by the caller; no vector has more lanes than there are bytes.
        unsafe {
            if count == Self::COUNT {
                self.where_kept(keep, rest)
            } else {
                self.where_kept(some_bytes(keep, count).as_ptr(), rest)
            }
        }
    }
}

/// Vectors that make powers of two of bits.
pub(crate) trait Powers: Lanes {
    /// Whether [`mul_add`](Lanes::mul_add) rounds once.
    const FUSED: bool;
    /// How many steps [`power`](Self::power) knows from one power of two to the next: 1 or 8.
    const STEPS: u32;

    /// 2^(n / [`STEPS`](Self::STEPS)) / [`UNSCALE`](Lanes::UNSCALE) for the n that is in the low bits with [`exp`](super::exp)'s
    /// bias.
    fn power(self) -> Self;
}

/// Vectors with an instruction that multiplies by powers of two.
#[cfg(target_arch = "x86_64")]
pub(crate) trait Scales: Lanes {
    /// 2^(i/32) / [`UNSCALE`](Lanes::UNSCALE) for the i that is in the low bits.
    fn step(self) -> Self;

    /// Some of the lanes.
    type Mask: Copy;
    const ALL: Self::Mask;

    /// self · 2^⌊n⌋ of these lanes, ∞ where that is too great, and 0 in others and where n < `least`.
    fn scale(self, n: Self, least: Self, lanes: Self::Mask) -> Self;
}

/// The first `count` bytes, at most 16, and 0 in the others. Two reads that overlap: a copy of so few would be a call, around
/// which no vector stays in its register.
///
/// # Safety
/// `from` is valid for reads of `count` bytes.
#[inline(always)]
pub(super) unsafe fn some_bytes(from: *const u8, count: usize) -> [u8; 16] {
    // SAFETY: both are in the `count` bytes.
    let ends = |size: usize| unsafe { (from, from.add(count - size), 8 * (count - size)) };
    // SAFETY of the block: bytes are read that are there, by the caller's promise.
    let bits = unsafe {
        match count {
            0 => 0,
            1 => u128::from(*from),
            2..4 => {
                let (first, last, shift) = ends(2);
                let read = |from: *const u8| u128::from(u16::from_le(from.cast::<u16>().read_unaligned()));
                read(first) | read(last) << shift
            }
            4..8 => {
                let (first, last, shift) = ends(4);
                let read = |from: *const u8| u128::from(u32::from_le(from.cast::<u32>().read_unaligned()));
                read(first) | read(last) << shift
            }
            _ => {
                let (first, last, shift) = ends(8);
                let read = |from: *const u8| u128::from(u64::from_le(from.cast::<u64>().read_unaligned()));
                read(first) | read(last) << shift
            }
        }
    };
    bits.to_le_bytes()
}

/// Eight numbers of 64 bits.
pub(crate) trait Words: Copy {
    fn of(words: [u64; 8]) -> Self;
    fn to_array(self) -> [u64; 8];

    /// The whole products of the lower halves and `factor`.
    fn products(self, factor: u32) -> Self;
    fn xor(self, other: Self) -> Self;
    fn upper_halves(self) -> Self;

    /// The lower halves, under those of `upper`.
    fn with_upper_halves(self, upper: Self) -> Self;

    /// Of the four times 16 bits of each number, and then of those of the other eight, the lowest first, which are at least
    /// `threshold`: 1, or 0, for each of the eight.
    #[inline(always)]
    fn at_least([low, high]: [Self; 2], threshold: u16) -> [[u8; 8]; 8] {
        let words = [low.to_array(), high.to_array()];
        let mut found = [[0; 8]; 8];
        for (i, found) in found.iter_mut().enumerate() {
            for (found, word) in found.iter_mut().zip(words[i / 4]) {
                *found = u8::from((word >> (i % 4 * 16)) as u16 >= threshold);
            }
        }
        found
    }
}

impl Words for [u64; 8] {
    #[inline(always)]
    fn of(words: [u64; 8]) -> Self {
        words
    }
    #[inline(always)]
    fn to_array(self) -> [u64; 8] {
        self
    }
    #[inline(always)]
    fn products(self, factor: u32) -> Self {
        Array(self).each(|word| (word & 0xffff_ffff) * u64::from(factor)).0
    }
    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        Array(self).with(Array(other), |word, other| word ^ other).0
    }
    #[inline(always)]
    fn upper_halves(self) -> Self {
        Array(self).each(|word| word >> 32).0
    }
    #[inline(always)]
    fn with_upper_halves(self, upper: Self) -> Self {
        Array(self).with(Array(upper), |word, upper| word & 0xffff_ffff | upper << 32).0
    }
}

/// The numbers that up to as many vectors as there are lanes come to.
#[inline(always)]
pub(super) fn of_each<V: Lanes>(vectors: &[V], across: impl Fn(V) -> V::Real) -> V {
    assert!(vectors.len() <= V::COUNT);
    let mut each = [V::Real::ZERO; MAX_LANES];
    for (number, &vector) in each.iter_mut().zip(vectors) {
        *number = across(vector);
    }
    // SAFETY: no vector has more lanes.
    unsafe { V::load(each.as_ptr()) }
}

/// Calls `f(start, count)` for the vectors of these elements; `count` is less than a vector's in the last call only.
#[inline(always)]
pub(super) fn each<V: Lanes>(range: Range<usize>, mut f: impl FnMut(usize, usize)) {
    let mut i = range.start;
    while i + V::COUNT <= range.end {
        f(i, V::COUNT);
        i += V::COUNT;
    }
    if i < range.end {
        f(i, range.end - i);
    }
}

/// Folds `step(accumulator, start, count)` over vectors of the elements `0..len`, four accumulators in turn so that they do
/// not wait for each other. `count` is less than the vector's in the last step only.
#[inline(always)]
pub(crate) fn fold<V: Lanes>(
    len: usize,
    init: V,
    mut step: impl FnMut(V, usize, usize) -> V,
    join: impl Fn(V, V) -> V,
) -> V {
    let [mut a, mut b, mut c, mut d] = [init; 4];
    let mut i = 0;
    while i + 4 * V::COUNT <= len {
        a = step(a, i, V::COUNT);
        b = step(b, i + V::COUNT, V::COUNT);
        c = step(c, i + 2 * V::COUNT, V::COUNT);
        d = step(d, i + 3 * V::COUNT, V::COUNT);
        i += 4 * V::COUNT;
    }
    while i < len {
        a = step(a, i, V::COUNT.min(len - i));
        i += V::COUNT;
    }
    join(join(a, b), join(c, d))
}

/// −0: that a first term added to it is the term takes no instruction, as it does of 0, where −0 becomes 0.
#[inline(always)]
fn no_sum<V: Lanes>() -> V {
    V::splat(V::Real::nearest(-0.0))
}

/// The sum of `term(start, count)` over vectors as in [`fold`]; `see(start, count, term)` sees each. Where the registers suffice, those
/// of four vectors are made before one is seen: a load waits for stores before it to addresses with the same lowest twelve bits,
/// which those that `see` writes to and those that are read a vector later may have.
#[inline(always)]
pub(super) fn sum_seen<V: Lanes>(
    len: usize,
    mut term: impl FnMut(usize, usize) -> V,
    mut see: impl FnMut(usize, usize, V),
) -> V {
    let zero = no_sum::<V>();
    if !V::UNROLLED {
        return fold(
            len,
            zero,
            #[inline(always)]
            |sum, i, count| {
                let term = term(i, count);
                see(i, count, term);
                sum + term
            },
            V::add,
        );
    }
    let [mut sum_a, mut sum_b, mut sum_c, mut sum_d] = [zero; 4];
    let mut i = 0;
    while i + 4 * V::COUNT <= len {
        let [at_a, at_b, at_c, at_d] = [i, i + V::COUNT, i + 2 * V::COUNT, i + 3 * V::COUNT];
        let (a, b, c, d) = (term(at_a, V::COUNT), term(at_b, V::COUNT), term(at_c, V::COUNT), term(at_d, V::COUNT));
        see(at_a, V::COUNT, a);
        see(at_b, V::COUNT, b);
        see(at_c, V::COUNT, c);
        see(at_d, V::COUNT, d);
        (sum_a, sum_b, sum_c, sum_d) = (sum_a + a, sum_b + b, sum_c + c, sum_d + d);
        i += 4 * V::COUNT;
    }
    while i < len {
        let count = V::COUNT.min(len - i);
        let term = term(i, count);
        see(i, count, term);
        sum_a = sum_a + term;
        i += V::COUNT;
    }
    (sum_a + sum_b) + (sum_c + sum_d)
}

/// The same for terms that take many registers. Where there are few it is one term after the other, in parts as long as what one of
/// [`fold`]'s accumulators adds of a block.
#[inline(always)]
pub(super) fn sum_of_long_terms<V: Lanes>(
    len: usize,
    mut term: impl FnMut(usize, usize) -> V,
    mut see: impl FnMut(usize, usize, V),
) -> V {
    if V::UNROLLED {
        return sum_seen(len, term, see);
    }
    let zero = no_sum::<V>();
    let mut seen = {
        #[inline(always)]
        |i, count| {
            let term = term(i, count);
            see(i, count, term);
            term
        }
    };
    let (mut sum, mut i) = (zero, 0);
    while i < len {
        let (mut part, end) = (zero, len.min(i + 16 * V::COUNT));
        while i + V::COUNT <= end {
            part = part + seen(i, V::COUNT);
            i += V::COUNT;
        }
        if i < end {
            part = part + seen(i, end - i);
            i = end;
        }
        sum = sum + part;
    }
    sum
}

/// The same for what is of so many `VECTORS`, up to 4, which needs no loops; or 0 for any.
#[inline(always)]
pub(super) fn sum_of_vectors<V: Lanes, const VECTORS: usize>(
    len: usize,
    mut term: impl FnMut(usize, usize) -> V,
    mut see: impl FnMut(usize, usize, V),
) -> V {
    if VECTORS == 0 {
        return sum_of_long_terms(len, term, see);
    }
    let mut terms = [no_sum::<V>(); 4];
    let of_vector = |vector: usize| if vector + 1 < VECTORS { V::COUNT } else { len - vector * V::COUNT };
    for (vector, of) in terms.iter_mut().enumerate().take(VECTORS) {
        *of = term(vector * V::COUNT, of_vector(vector));
    }
    for (vector, &of) in terms.iter().enumerate().take(VECTORS) {
        see(vector * V::COUNT, of_vector(vector), of);
    }
    let [a, b, c, d] = terms;
    match VECTORS {
        1 => a,
        2 => a + b,
        3 => a + b + c,
        _ => (a + b) + (c + d),
    }
}

/// Items without vector instructions of our own. Loops over a few lanes become what vectors the target has for sure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Array<T, const N: usize>(pub [T; N]);

impl<T: Copy, const N: usize> Array<T, N> {
    /// f of each lane. A plain loop: what [`std::array::from_fn`] comes to is many times the code, in each of the many places where
    /// this is compiled. Inlined, as all but the exponentials are, when it is already in few instructions.
    #[inline]
    pub fn each<U: Copy + Default>(self, f: impl Fn(T) -> U) -> Array<U, N> {
        self.with(self, |x, _| f(x))
    }

    /// f of each lane and the other's.
    #[inline]
    pub fn with<O: Copy, U: Copy + Default>(self, other: Array<O, N>, f: impl Fn(T, O) -> U) -> Array<U, N> {
        let mut items = [U::default(); N];
        let mut i = 0;
        while i < N {
            items[i] = f(self.0[i], other.0[i]);
            i += 1;
        }
        Array(items)
    }
}

impl<T: Copy + Default, const N: usize> Pack for Array<T, N> {
    type Item = T;
    const COUNT: usize = N;

    #[inline]
    unsafe fn load(from: *const T) -> Self {
        // SAFETY: N readable items, by the caller's promise.
        Self(unsafe { from.cast::<[T; N]>().read_unaligned() })
    }

    #[inline]
    unsafe fn load_part(from: *const T, count: usize) -> Self {
        let mut items = [T::default(); N];
        // SAFETY: `count` readable items, by the caller's promise, and room for N ≥ count.
        unsafe { std::ptr::copy_nonoverlapping(from, items.as_mut_ptr(), count) };
        Self(items)
    }

    #[inline]
    unsafe fn store(self, to: *mut T) {
        // SAFETY: N writable items, by the caller's promise.
        unsafe { to.cast::<[T; N]>().write_unaligned(self.0) }
    }

    #[inline]
    unsafe fn store_part(self, to: *mut T, count: usize) {
        // SAFETY: `count` writable items, by the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(self.0.as_ptr(), to, count) }
    }
}

macro_rules! operator {
    ($Trait:ident, $method:ident) => {
        impl<R: Real + Default, const N: usize> $Trait for Array<R, N> {
            type Output = Self;
            #[inline]
            fn $method(self, other: Self) -> Self {
                self.with(other, |x, y| x.$method(y))
            }
        }
    };
}
operator!(Add, add);
operator!(Sub, sub);
operator!(Mul, mul);
operator!(Div, div);

macro_rules! portable_lanes {
    ($real:ident, $exp:ident, $scaled_exp:ident, $unscale:expr, $tanh:ident, $ln:ident) => {
        impl<const N: usize> Number for Array<$real, N> {
            type Real = $real;

            #[inline]
            fn splat(x: $real) -> Self {
                Self([x; N])
            }
            #[inline]
            fn or_greater(self, max: Self) -> Self {
                self.with(max, |x, max| x.or_greater(max))
            }
            #[inline]
            fn at_most(self, limit: Self) -> Self {
                self.with(limit, |x, limit| x.at_most(limit))
            }
            #[inline]
            fn nan_to_zero(self) -> Self {
                self.each(|x| x.nan_to_zero())
            }
            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }
            #[inline]
            fn tanh(self) -> Self {
                $tanh(self)
            }
            #[inline]
            fn ln(self) -> Self {
                $ln(self)
            }
            #[inline]
            fn differs(self, other: Self) -> bool {
                self.0 != other.0
            }
        }

        impl<const N: usize> Lanes for Array<$real, N> {
            const UNSCALE: $real = $unscale;
            const SATURATES: bool = false;
            const UNROLLED: bool = false;
            const MASKS_BYTES: bool = false;

            #[inline(always)]
            fn scaled_exp(self) -> Self {
                $scaled_exp(self)
            }
            #[inline]
            fn mul_add(self, a: Self, b: Self) -> Self {
                if Self::FUSED {
                    self.with(a, |x, a| (x, a)).with(b, |(x, a), b| x.mul_add(a, b))
                } else {
                    self * a + b
                }
            }
            #[inline]
            fn keep(mut self, count: usize, rest: $real) -> Self {
                let mut i = 0;
                while i < N {
                    self.0[i] = if i < count { self.0[i] } else { rest };
                    i += 1;
                }
                self
            }
            #[inline]
            fn max_across(self) -> $real {
                let (mut max, mut i) = ($real::NEG_INFINITY, 0);
                while i < N {
                    max = self.0[i].or_greater(max);
                    i += 1;
                }
                max
            }
            #[inline]
            fn sum_across(mut self) -> $real {
                let mut half = N / 2;
                while half > 0 {
                    for i in 0..half {
                        self.0[i] += self.0[i + half];
                    }
                    half /= 2;
                }
                self.0[0]
            }
            #[inline]
            fn abs(self) -> Self {
                self.each(|x| x.abs())
            }
            #[inline]
            fn with_sign_of(self, sign: Self) -> Self {
                self.with(sign, |x, sign| x.copysign(sign))
            }
            #[inline]
            fn if_less(self, than: Self, yes: Self, no: Self) -> Self {
                let less = self.with(than, |x, than| x < than);
                less.with(yes.with(no, |yes, no| (yes, no)), |less, (yes, no)| if less { yes } else { no })
            }
            #[inline]
            unsafe fn where_kept(self, keep: *const u8, rest: $real) -> Self {
                // SAFETY: N readable bytes, by the caller's promise.
                let keep = unsafe { keep.cast::<[u8; N]>().read_unaligned() };
                self.with(Array(keep), |x, keep| if keep != 0 { x } else { rest })
            }
        }

        impl<const N: usize> Powers for Array<$real, N> {
            const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));
            const STEPS: u32 = 1;

            #[inline]
            fn power(self) -> Self {
                const MANTISSA: u32 = $real::MANTISSA_DIGITS - 1;
                self.each(|x| $real::from_bits(x.to_bits() << MANTISSA))
            }
        }
    };
}
portable_lanes!(f32, exp_f32, scaled_exp_f32, UNSCALE_F32, tanh_f32, ln_f32);
portable_lanes!(f64, exp_f64, scaled_exp_f64, UNSCALE_F64, tanh_f64, ln_f64);

#[cfg(test)]
mod tests {
    use super::some_bytes;

    #[test]
    fn some_bytes_are_those_there_are() {
        for count in 0..=16 {
            let bytes: Vec<u8> = (1..=count as u8).collect();
            let mut padded = bytes.clone();
            padded.resize(16, 0);
            // SAFETY: as many bytes are there.
            assert_eq!(unsafe { some_bytes(bytes.as_ptr(), count) }.as_slice(), padded);
        }
    }
}
