//! Vectors of aarch64, all of whose CPUs have NEON: two registers, as many lanes as AVX2's one.

use super::exp::{
    exp_f32, exp_f64, ln_f32, ln_f64, scaled_exp_f32, scaled_exp_f64, tanh_f32, tanh_f64, UNSCALE_F32, UNSCALE_F64,
};
use super::lanes::{of_each, some_bytes, Lanes, Pack, Powers, Words, MAX_LANES};
use super::level::{Enter, Simd};
use crate::state::{Number, Real};
use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::{Add, Div, Mul, Sub};

#[derive(Clone, Copy)]
pub(crate) struct Neon;

/// One register of f32s or f64s, and what their vectors need of it.
pub(crate) trait Register: Copy + Send + Sync {
    type Real: Real;
    const COUNT: usize;
    const UNSCALE: Self::Real;

    /// # Safety
    /// `from` is valid for reads of a register.
    unsafe fn load(from: *const Self::Real) -> Self;
    /// # Safety
    /// `to` is valid for writes of a register.
    unsafe fn store(self, to: *mut Self::Real);
    fn splat(x: Self::Real) -> Self;
    fn of(bits: uint8x16_t) -> Self;
    fn bits(self) -> uint8x16_t;

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// self · a + b
    fn mul_add(self, a: Self, b: Self) -> Self;
    fn abs(self) -> Self;
    /// NaN where either is.
    fn max(self, other: Self) -> Self;
    /// All ones in the lanes that are less, and not NaN.
    fn less(self, than: Self) -> uint8x16_t;
    fn equals(self, other: Self) -> uint8x16_t;
    /// 2^n / [`UNSCALE`](Self::UNSCALE) for the n that is in the low bits with a bias.
    fn power(self) -> Self;
    /// As [`Lanes::mantissa_and_exponent`].
    fn mantissa_and_exponent(self) -> [Self; 2];

    fn max_across(self) -> Self::Real;
    fn sum_across(self) -> Self::Real;
    /// The lanes of the first joined with their neighbours, and then of the second.
    fn max_of_pairs(self, second: Self) -> Self;
    fn sum_of_pairs(self, second: Self) -> Self;

    /// Which bytes of a vector are in these of its lanes.
    ///
    /// # Safety
    /// `lanes` is valid for reads of as many as a register has.
    unsafe fn bytes_of(lanes: *const u32) -> uint8x16_t;

    fn exp(x: Pair<Self>) -> Pair<Self>;
    fn scaled_exp(x: Pair<Self>) -> Pair<Self>;
    fn tanh(x: Pair<Self>) -> Pair<Self>;
    fn ln(x: Pair<Self>) -> Pair<Self>;
}

// SAFETY of all below: every CPU of the target has the instructions, and callers vouch for the memory.

/// What differs between f32s and f64s in the names of the instructions only.
macro_rules! register {
    ($Register:ident, $real:ident, $count:literal, $unscale:expr, $exp:ident, $scaled_exp:ident, $tanh:ident, $ln:ident,
     $load:ident, $store:ident, $splat:ident, $of_bits:ident, $to_bits:ident, $add:ident, $sub:ident, $mul:ident, $div:ident, $mul_add:ident,
     $abs:ident, $max:ident, $less:ident, $equals:ident, $mask:ident, $max_across:ident, $sum_across:ident, $max_of_pairs:ident,
     $sum_of_pairs:ident, $signed:ident, $shift:ident, $of_signed:ident, |$x:ident| mantissa_and_exponent: $mantissa_and_exponent:expr,
     |$lanes:ident| bytes_of: $bytes_of:expr) => {
        impl Register for $Register {
            type Real = $real;
            const COUNT: usize = $count;
            const UNSCALE: $real = $unscale;

            #[inline(always)]
            unsafe fn load(from: *const $real) -> Self {
                unsafe { $load(from) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $real) {
                unsafe { $store(to, self) }
            }
            #[inline(always)]
            fn splat(x: $real) -> Self {
                unsafe { $splat(x) }
            }
            #[inline(always)]
            fn of(bits: uint8x16_t) -> Self {
                unsafe { $of_bits(bits) }
            }
            #[inline(always)]
            fn bits(self) -> uint8x16_t {
                unsafe { $to_bits(self) }
            }
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                unsafe { $add(self, other) }
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                unsafe { $sub(self, other) }
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                unsafe { $mul(self, other) }
            }
            #[inline(always)]
            fn div(self, other: Self) -> Self {
                unsafe { $div(self, other) }
            }
            #[inline(always)]
            fn mul_add(self, a: Self, b: Self) -> Self {
                unsafe { $mul_add(b, self, a) }
            }
            #[inline(always)]
            fn abs(self) -> Self {
                unsafe { $abs(self) }
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                unsafe { $max(self, other) }
            }
            #[inline(always)]
            fn less(self, than: Self) -> uint8x16_t {
                unsafe { $mask($less(self, than)) }
            }
            #[inline(always)]
            fn equals(self, other: Self) -> uint8x16_t {
                unsafe { $mask($equals(self, other)) }
            }
            #[inline(always)]
            fn power(self) -> Self {
                unsafe { $of_signed($shift::<{ $real::MANTISSA_DIGITS as i32 - 1 }>($signed(self))) }
            }
            #[inline(always)]
            fn mantissa_and_exponent(self) -> [Self; 2] {
                let $x = self;
                unsafe { $mantissa_and_exponent }
            }
            #[inline(always)]
            fn max_across(self) -> $real {
                unsafe { $max_across(self) }
            }
            #[inline(always)]
            fn sum_across(self) -> $real {
                unsafe { $sum_across(self) }
            }
            #[inline(always)]
            fn max_of_pairs(self, second: Self) -> Self {
                unsafe { $max_of_pairs(self, second) }
            }
            #[inline(always)]
            fn sum_of_pairs(self, second: Self) -> Self {
                unsafe { $sum_of_pairs(self, second) }
            }
            #[inline(always)]
            unsafe fn bytes_of($lanes: *const u32) -> uint8x16_t {
                unsafe { $bytes_of }
            }
            #[inline(always)]
            fn exp(x: Pair<Self>) -> Pair<Self> {
                $exp(x)
            }
            #[inline(always)]
            fn scaled_exp(x: Pair<Self>) -> Pair<Self> {
                $scaled_exp(x)
            }
            #[inline(always)]
            fn tanh(x: Pair<Self>) -> Pair<Self> {
                $tanh(x)
            }
            #[inline(always)]
            fn ln(x: Pair<Self>) -> Pair<Self> {
                $ln(x)
            }
        }
    };
}

register!(
    float32x4_t, f32, 4, UNSCALE_F32, exp_f32, scaled_exp_f32, tanh_f32, ln_f32,
    vld1q_f32, vst1q_f32, vdupq_n_f32, vreinterpretq_f32_u8, vreinterpretq_u8_f32, vaddq_f32, vsubq_f32, vmulq_f32, vdivq_f32, vfmaq_f32,
    vabsq_f32, vmaxq_f32, vcltq_f32, vceqq_f32, vreinterpretq_u8_u32, vmaxnmvq_f32, vaddvq_f32, vpmaxnmq_f32,
    vpaddq_f32, vreinterpretq_s32_f32, vshlq_n_s32, vreinterpretq_f32_s32,
    |x| mantissa_and_exponent: {
        let (bits, one) = (vreinterpretq_u32_f32(x), vreinterpretq_u32_f32(vdupq_n_f32(1.0)));
        let exponent = vcvtq_f32_u32(vshrq_n_u32::<23>(vsubq_u32(bits, one)));
        let mantissa = vorrq_u32(vandq_u32(bits, vdupq_n_u32(0x7f_ffff)), one);
        [vreinterpretq_f32_u32(mantissa), exponent]
    },
    |lanes| bytes_of: {
        let firsts = vmulq_u32(vld1q_u32(lanes), vdupq_n_u32(0x0404_0404));
        vreinterpretq_u8_u32(vaddq_u32(firsts, vdupq_n_u32(0x0302_0100)))
    }
);
register!(
    float64x2_t, f64, 2, UNSCALE_F64, exp_f64, scaled_exp_f64, tanh_f64, ln_f64,
    vld1q_f64, vst1q_f64, vdupq_n_f64, vreinterpretq_f64_u8, vreinterpretq_u8_f64, vaddq_f64, vsubq_f64, vmulq_f64, vdivq_f64, vfmaq_f64,
    vabsq_f64, vmaxq_f64, vcltq_f64, vceqq_f64, vreinterpretq_u8_u64, vmaxnmvq_f64, vaddvq_f64, vpmaxnmq_f64,
    vpaddq_f64, vreinterpretq_s64_f64, vshlq_n_s64, vreinterpretq_f64_s64,
    |x| mantissa_and_exponent: {
        let (bits, one) = (vreinterpretq_u64_f64(x), vreinterpretq_u64_f64(vdupq_n_f64(1.0)));
        let exponent = vcvtq_f64_u64(vshrq_n_u64::<52>(vsubq_u64(bits, one)));
        let mantissa = vorrq_u64(vandq_u64(bits, vdupq_n_u64((1 << 52) - 1)), one);
        [vreinterpretq_f64_u64(mantissa), exponent]
    },
    |lanes| bytes_of: {
        let lanes = vcombine_u32(vld1_u32(lanes), vdup_n_u32(0));
        let firsts = vmulq_u32(vzip1q_u32(lanes, lanes), vdupq_n_u32(0x0808_0808));
        vreinterpretq_u8_u64(vaddq_u64(vreinterpretq_u64_u32(firsts), vdupq_n_u64(0x0706_0504_0302_0100)))
    }
);

/// `f` of each. An array's own `map` may be a call.
#[inline(always)]
fn both<A, B>([a, b]: [A; 2], f: impl Fn(A) -> B) -> [B; 2] {
    [f(a), f(b)]
}

#[inline(always)]
fn select<R: Register>(mask: uint8x16_t, yes: R, no: R) -> R {
    R::of(unsafe { vbslq_u8(mask, yes.bits(), no.bits()) })
}

/// Of each byte of a vector how many items of so many bytes are before the one that it is in.
const fn places(size: usize) -> [[u8; 16]; 2] {
    let (mut places, mut i) = ([[0; 16]; 2], 0);
    while i < 32 {
        places[i / 16][i % 16] = (i / size) as u8;
        i += 1;
    }
    places
}

/// Two registers.
#[derive(Clone, Copy)]
pub(crate) struct Pair<R>([R; 2]);

impl<R: Register> Pair<R> {
    #[inline(always)]
    fn each(self, f: impl Fn(R) -> R) -> Self {
        Self(both(self.0, f))
    }

    #[inline(always)]
    fn with(self, other: Self, f: impl Fn(R, R) -> R) -> Self {
        let ([a, b], [c, d]) = (self.0, other.0);
        Self([f(a, c), f(b, d)])
    }

    /// These lanes, and `rest` in the others.
    #[inline(always)]
    fn select(self, lanes: [uint8x16_t; 2], rest: R::Real) -> Self {
        let ([a, b], [x, y], rest) = (lanes, self.0, R::splat(rest));
        Self([select(a, x, rest), select(b, y, rest)])
    }

    /// The lanes of each of as many vectors as a vector has lanes, joined with their neighbours until one is left of each.
    #[inline(always)]
    fn joined_each(vectors: &[Self], join: impl Fn(R, R) -> R, join_pairs: impl Fn(R, R) -> R) -> Self {
        let mut joined = [vectors[0].0[0]; 8];
        for (joined, vector) in joined.iter_mut().zip(vectors) {
            *joined = join(vector.0[0], vector.0[1]);
        }
        let mut count = Self::COUNT;
        while count > 2 {
            count /= 2;
            for i in 0..count {
                joined[i] = join_pairs(joined[2 * i], joined[2 * i + 1]);
            }
        }
        Self([joined[0], joined[1]])
    }
}

impl<R: Register> Pack for Pair<R> {
    type Item = R::Real;
    const COUNT: usize = 2 * R::COUNT;

    #[inline(always)]
    unsafe fn load(from: *const R::Real) -> Self {
        Self(unsafe { [R::load(from), R::load(from.add(R::COUNT))] })
    }
    #[inline(always)]
    unsafe fn load_part(from: *const R::Real, count: usize) -> Self {
        let size = size_of::<R::Real>();
        let some =
            |from: *const R::Real, count| R::of(unsafe { vld1q_u8(some_bytes(from.cast(), count * size).as_ptr()) });
        unsafe {
            match count.checked_sub(R::COUNT) {
                Some(rest) => Self([R::load(from), some(from.add(R::COUNT), rest)]),
                None => Self([some(from, count), R::splat(R::Real::ZERO)]),
            }
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut R::Real) {
        let [a, b] = self.0;
        unsafe {
            a.store(to);
            b.store(to.add(R::COUNT));
        }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut R::Real, count: usize) {
        let ([a, b], size) = (self.0, size_of::<R::Real>());
        unsafe {
            match count.checked_sub(R::COUNT) {
                Some(rest) => {
                    a.store(to);
                    put_bytes(b.bits(), to.add(R::COUNT).cast(), rest * size);
                }
                None => put_bytes(a.bits(), to.cast(), count * size),
            }
        }
    }
}

/// Writes the first `count` bytes, an even number of up to 16.
///
/// # Safety
/// `to` is valid for writes of `count` bytes.
#[inline(always)]
unsafe fn put_bytes(bytes: uint8x16_t, mut to: *mut u8, count: usize) {
    unsafe {
        if count == 16 {
            return vst1q_u8(to, bytes);
        }
        let halves = vreinterpretq_u64_u8(bytes);
        let mut rest = vgetq_lane_u64::<0>(halves);
        if count & 8 != 0 {
            to.cast::<u64>().write_unaligned(rest);
            (to, rest) = (to.add(8), vgetq_lane_u64::<1>(halves));
        }
        if count & 4 != 0 {
            to.cast::<u32>().write_unaligned(rest as u32);
            (to, rest) = (to.add(4), rest >> 32);
        }
        if count & 2 != 0 {
            to.cast::<u16>().write_unaligned(rest as u16);
        }
    }
}

impl<R: Register> Add for Pair<R> {
    type Output = Self;
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.with(other, R::add)
    }
}

impl<R: Register> Sub for Pair<R> {
    type Output = Self;
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.with(other, R::sub)
    }
}

impl<R: Register> Mul for Pair<R> {
    type Output = Self;
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.with(other, R::mul)
    }
}

impl<R: Register> Div for Pair<R> {
    type Output = Self;
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.with(other, R::div)
    }
}

impl<R: Register> Number for Pair<R> {
    type Real = R::Real;

    #[inline(always)]
    fn splat(x: R::Real) -> Self {
        Self([R::splat(x); 2])
    }
    /// Not an instruction for maxima: of a signaling NaN and a number those answer NaN.
    #[inline(always)]
    fn or_greater(self, max: Self) -> Self {
        self.with(max, |x, max| select(max.less(x), x, max))
    }
    #[inline(always)]
    fn at_most(self, limit: Self) -> Self {
        self.with(limit, |x, limit| select(limit.less(x), limit, x))
    }
    #[inline(always)]
    fn nan_to_zero(self) -> Self {
        self.each(|x| R::of(unsafe { vandq_u8(x.bits(), x.equals(x)) }))
    }
    #[inline(always)]
    fn exp(self) -> Self {
        R::exp(self)
    }
    #[inline(always)]
    fn tanh(self) -> Self {
        R::tanh(self)
    }
    #[inline(always)]
    fn ln(self) -> Self {
        R::ln(self)
    }
    #[inline(always)]
    fn differs(self, other: Self) -> bool {
        let ([a, b], [c, d]) = (self.0, other.0);
        unsafe { vminvq_u8(vandq_u8(a.equals(c), b.equals(d))) == 0 }
    }
}

impl<R: Register> Lanes for Pair<R> {
    const UNSCALE: R::Real = R::UNSCALE;
    const SATURATES: bool = false;
    const UNROLLED: bool = false;
    const MASKS_BYTES: bool = false;

    #[inline(always)]
    fn scaled_exp(self) -> Self {
        R::scaled_exp(self)
    }
    #[inline(always)]
    fn at_least(self, limit: Self) -> Self {
        self.with(limit, R::max)
    }
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        let ([x, y], [a, c], [b, d]) = (self.0, a.0, b.0);
        Self([x.mul_add(a, b), y.mul_add(c, d)])
    }
    #[inline(always)]
    fn in_order(self, order: &[u32; MAX_LANES]) -> Self {
        let [a, b] = self.0;
        let from = uint8x16x2_t(a.bits(), b.bits());
        // Two registers have no more lanes than there are numbers.
        Self(both([0, R::COUNT], |i| R::of(unsafe { vqtbl2q_u8(from, R::bytes_of(order[i..].as_ptr())) })))
    }
    #[inline(always)]
    fn mantissa_and_exponent(self) -> [Self; 2] {
        let [[a, c], [b, d]] = both(self.0, R::mantissa_and_exponent);
        [Self([a, b]), Self([c, d])]
    }
    #[inline(always)]
    fn keep(self, count: usize, rest: R::Real) -> Self {
        let bytes = unsafe { vdupq_n_u8((count * size_of::<R::Real>()) as u8) };
        let masks = both(const { places(1) }, |places| unsafe { vcltq_u8(vld1q_u8(places.as_ptr()), bytes) });
        self.select(masks, rest)
    }
    #[inline(always)]
    fn max_across(self) -> R::Real {
        let [a, b] = self.0;
        a.max(b).max_across()
    }
    #[inline(always)]
    fn sum_across(self) -> R::Real {
        let [a, b] = self.0;
        a.add(b).sum_across()
    }
    #[inline(always)]
    fn max_of_each(vectors: &[Self]) -> Self {
        if vectors.len() == Self::COUNT {
            Self::joined_each(vectors, R::max, R::max_of_pairs)
        } else {
            of_each(vectors, Self::max_across)
        }
    }
    #[inline(always)]
    fn sum_of_each(vectors: &[Self]) -> Self {
        if vectors.len() == Self::COUNT {
            Self::joined_each(vectors, R::add, R::sum_of_pairs)
        } else {
            of_each(vectors, Self::sum_across)
        }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        self.each(R::abs)
    }
    #[inline(always)]
    fn with_sign_of(self, sign: Self) -> Self {
        let bit = R::splat(R::Real::nearest(-0.0)).bits();
        self.with(sign, |x, sign| select(bit, sign, x))
    }
    #[inline(always)]
    fn if_less(self, than: Self, yes: Self, no: Self) -> Self {
        let ([a, b], [c, d], [yes_a, yes_b], [no_a, no_b]) = (self.0, than.0, yes.0, no.0);
        Self([select(a.less(c), yes_a, no_a), select(b.less(d), yes_b, no_b)])
    }
    #[inline(always)]
    unsafe fn where_kept(self, keep: *const u8, rest: R::Real) -> Self {
        let bytes = unsafe { vld1q_u8(some_bytes(keep, Self::COUNT).as_ptr()) };
        // Each byte as often as a lane has bytes.
        let masks = both(const { places(size_of::<R::Real>()) }, |places| unsafe {
            let bytes = vqtbl1q_u8(bytes, vld1q_u8(places.as_ptr()));
            vtstq_u8(bytes, bytes)
        });
        self.select(masks, rest)
    }
}

impl<R: Register> Powers for Pair<R> {
    const FUSED: bool = true;
    const STEPS: u32 = 1;

    #[inline(always)]
    fn power(self) -> Self {
        self.each(R::power)
    }
}

/// f16s or bf16s in memory.
#[derive(Clone, Copy)]
pub(crate) struct U16x8(uint16x8_t);

impl Pack for U16x8 {
    type Item = u16;
    const COUNT: usize = 8;

    #[inline(always)]
    unsafe fn load(from: *const u16) -> Self {
        Self(unsafe { vld1q_u16(from) })
    }
    #[inline(always)]
    unsafe fn load_part(from: *const u16, count: usize) -> Self {
        Self(unsafe { vreinterpretq_u16_u8(vld1q_u8(some_bytes(from.cast(), 2 * count).as_ptr())) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u16) {
        unsafe { vst1q_u16(to, self.0) }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut u16, count: usize) {
        unsafe { put_bytes(vreinterpretq_u8_u16(self.0), to.cast(), 2 * count) }
    }
}

/// Eight numbers of 64 bits.
#[derive(Clone, Copy)]
pub(crate) struct U64x8([[uint64x2_t; 2]; 2]);

impl U64x8 {
    #[inline(always)]
    fn each(self, f: impl Fn(uint64x2_t) -> uint64x2_t) -> Self {
        let [[a, b], [c, d]] = self.0;
        Self([[f(a), f(b)], [f(c), f(d)]])
    }

    #[inline(always)]
    fn with(self, other: Self, f: impl Fn(uint64x2_t, uint64x2_t) -> uint64x2_t) -> Self {
        let ([[a, b], [c, d]], [[e, g], [h, i]]) = (self.0, other.0);
        Self([[f(a, e), f(b, g)], [f(c, h), f(d, i)]])
    }
}

impl Words for U64x8 {
    #[inline(always)]
    fn of(words: [u64; 8]) -> Self {
        Self(both([0, 4], |i| both([i, i + 2], |i| unsafe { vld1q_u64(words[i..].as_ptr()) })))
    }
    #[inline(always)]
    fn to_array(self) -> [u64; 8] {
        let mut words = [0; 8];
        for (i, two) in self.0.into_iter().flatten().enumerate() {
            unsafe { vst1q_u64(words[2 * i..].as_mut_ptr(), two) }
        }
        words
    }
    #[inline(always)]
    fn products(self, factor: u32) -> Self {
        self.each(
            #[inline(always)]
            |x| unsafe { vmull_u32(vmovn_u64(x), vdup_n_u32(factor)) },
        )
    }
    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        self.with(other, |x, y| unsafe { veorq_u64(x, y) })
    }
    #[inline(always)]
    fn upper_halves(self) -> Self {
        self.each(|x| unsafe { vshrq_n_u64::<32>(x) })
    }
    #[inline(always)]
    fn with_upper_halves(self, upper: Self) -> Self {
        self.with(upper, |x, upper| unsafe { vsliq_n_u64::<32>(x, upper) })
    }
    #[inline(always)]
    fn at_least(halves: [Self; 2], threshold: u16) -> [[u8; 8]; 8] {
        let mut found = [[0; 8]; 8];
        for (found, words) in found.chunks_exact_mut(4).zip(halves) {
            unsafe {
                let threshold = vdupq_n_u16(threshold);
                // Four bytes for each number
                let [low, high] = both(words.0, |two| {
                    let [a, b] = both(two, |x| vcgeq_u16(vreinterpretq_u16_u64(x), threshold));
                    vuzp1q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b))
                });
                // All first and third ones, and the others; then one after the other
                let (even, odd) = (vuzp1q_u8(low, high), vuzp2q_u8(low, high));
                let (one, to) = (vdupq_n_u8(1), found.as_mut_ptr().cast::<u8>());
                vst1q_u8(to, vandq_u8(vuzp1q_u8(even, odd), one));
                vst1q_u8(to.add(16), vandq_u8(vuzp2q_u8(even, odd), one));
            }
        }
        found
    }
}

impl Simd for Neon {
    type F32 = Pair<float32x4_t>;
    type F64 = Pair<float64x2_t>;
    type U16 = U16x8;
    type Words = U64x8;
    type Half = Self;
    const PREFETCHES: bool = false;

    /// The standard library's names for these two instructions are newer than what this crate takes.
    #[inline(always)]
    fn f16_to_f32(x: U16x8) -> Self::F32 {
        let (low, high): (float32x4_t, float32x4_t);
        unsafe {
            asm!("fcvtl {to:v}.4s, {x:v}.4h", to = lateout(vreg) low, x = in(vreg) x.0, options(pure, nomem, nostack, preserves_flags));
            asm!("fcvtl2 {to:v}.4s, {x:v}.8h", to = lateout(vreg) high, x = in(vreg) x.0, options(pure, nomem, nostack, preserves_flags));
        }
        Pair([low, high])
    }
    #[inline(always)]
    fn f32_to_f16(x: Self::F32) -> U16x8 {
        let ([low, high], mut to): (_, uint16x8_t) = (x.0, unsafe { vdupq_n_u16(0) });
        unsafe {
            asm!("fcvtn {to:v}.4h, {x:v}.4s", to = inlateout(vreg) to, x = in(vreg) low, options(pure, nomem, nostack, preserves_flags));
            asm!("fcvtn2 {to:v}.8h, {x:v}.4s", to = inlateout(vreg) to, x = in(vreg) high, options(pure, nomem, nostack, preserves_flags));
        }
        U16x8(to)
    }
    #[inline(always)]
    fn bf16_to_f32(x: U16x8) -> Self::F32 {
        let bits = unsafe { [vshll_n_u16::<16>(vget_low_u16(x.0)), vshll_high_n_u16::<16>(x.0)] };
        Pair(both(bits, |bits| unsafe { vreinterpretq_f32_u32(bits) }))
    }
    /// Not the instruction that newer CPUs have, which flushes subnormals where it is told to.
    #[inline(always)]
    fn f32_to_bf16(x: Self::F32) -> U16x8 {
        unsafe {
            let [low, high] = both(x.0, |x| vreinterpretq_u32_f32(x));
            // To nearest: up by a half, less a little where the last bit kept is even.
            let odd_added = |bits| vsraq_n_u32::<31>(bits, vshlq_n_u32::<15>(bits));
            let little_less = vdupq_n_u32(0x7fff);
            let rounded = vaddhn_high_u32(vaddhn_u32(odd_added(low), little_less), odd_added(high), little_less);
            // A NaN keeps its upper half, made quiet: rounding could carry it into the sign.
            let upper = vuzp2q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high));
            let [a, b] = both(x.0, |x| vreinterpretq_u16_u8(x.equals(x)));
            U16x8(vbslq_u16(vuzp1q_u16(a, b), rounded, vorrq_u16(upper, vdupq_n_u16(0x40))))
        }
    }
    #[inline(always)]
    fn prefetch<T>(_: *const T) {}
    #[inline(always)]
    unsafe fn enter<R>(f: impl FnOnce() -> R) -> R {
        f.portably()
    }
}
