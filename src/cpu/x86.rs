//! Vectors of x86-64: AVX-512, and AVX2 with FMA and F16C.
//!
//! The wrappers are safe to name but made of instructions that not every CPU has; they are reached by way of
//! [`Level`](super::level::Level) only, which has asked the CPU.

use super::exp::{
    exp_f32, exp_f64, ln_f32, ln_f64, powers, saturating_exp_f32, scaled_exp_f32, scaled_exp_f64, scaled_steps,
    tanh_f32, tanh_f64, SCALED_STEPS, UNSCALE_F32, UNSCALE_F64,
};
use super::lanes::{of_each, some_bytes, Lanes, Pack, Powers, Scales, Words, MAX_LANES};
use super::level::{Enter, Simd};
use crate::state::Number;
use std::arch::x86_64::*;
use std::ops::{Add, Div, Mul, Sub};

#[derive(Clone, Copy)]
pub(crate) struct Avx2;
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

pub(super) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

pub(super) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

pub(super) fn is_intel() -> bool {
    // Not unsafe in newer versions of the standard library
    #[allow(unused_unsafe)]
    // SAFETY: all CPUs of x86-64 have the instruction.
    let vendor = unsafe { __cpuid(0) };
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

#[derive(Clone, Copy)]
pub(crate) struct F32x8(__m256);
#[derive(Clone, Copy)]
pub(crate) struct F64x4(__m256d);
#[derive(Clone, Copy)]
pub(crate) struct U16x8(__m128i);
#[derive(Clone, Copy)]
pub(crate) struct F32x16(__m512);
#[derive(Clone, Copy)]
pub(crate) struct F64x8(__m512d);
#[derive(Clone, Copy)]
pub(crate) struct U16x16(__m256i);
#[derive(Clone, Copy)]
pub(crate) struct U64x4x2([__m256i; 2]);
#[derive(Clone, Copy)]
pub(crate) struct U64x8(__m512i);

/// What differs between the vectors in the names of the instructions only.
macro_rules! vector {
    ($Vector:ident, $real:ident, $exp:ident, $tanh:ident, $ln:ident, $set1:ident, $add:ident, $sub:ident, $mul:ident, $div:ident, $max:ident, $min:ident,
     |$x:ident, $y:ident| nan_to_zero: $nan_to_zero:expr, differs: $differs:expr) => {
        vector!($Vector, Add, add, $add);
        vector!($Vector, Sub, sub, $sub);
        vector!($Vector, Mul, mul, $mul);
        vector!($Vector, Div, div, $div);

        impl Number for $Vector {
            type Real = $real;

            #[inline(always)]
            fn splat(x: $real) -> Self {
                // SAFETY: the CPU has the instructions of the type.
                Self(unsafe { $set1(x) })
            }
            #[inline(always)]
            fn or_greater(self, max: Self) -> Self {
                // Where one is NaN, the instruction answers the second.
                // SAFETY: the CPU has the instructions of the type.
                Self(unsafe { $max(self.0, max.0) })
            }
            #[inline(always)]
            fn at_most(self, limit: Self) -> Self {
                // Where one is NaN, the instruction answers the second.
                // SAFETY: the CPU has the instructions of the type.
                Self(unsafe { $min(limit.0, self.0) })
            }
            #[inline(always)]
            fn nan_to_zero(self) -> Self {
                let $x = self.0;
                // SAFETY: the CPU has the instructions of the type.
                Self(unsafe { $nan_to_zero })
            }
            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }
            #[inline(always)]
            fn tanh(self) -> Self {
                $tanh(self)
            }
            #[inline(always)]
            fn ln(self) -> Self {
                $ln(self)
            }
            #[inline(always)]
            fn differs(self, other: Self) -> bool {
                let ($x, $y) = (self.0, other.0);
                // SAFETY: the CPU has the instructions of the type.
                unsafe { $differs }
            }
        }
    };
    ($Vector:ident, $Operator:ident, $method:ident, $instruction:ident) => {
        impl $Operator for $Vector {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                // SAFETY: the CPU has the instructions of the type.
                Self(unsafe { $instruction(self.0, other.0) })
            }
        }
    };
}

vector!(
    F32x8, f32, exp_f32, tanh_f32, ln_f32, _mm256_set1_ps, _mm256_add_ps, _mm256_sub_ps, _mm256_mul_ps, _mm256_div_ps, _mm256_max_ps, _mm256_min_ps,
    |x, y| nan_to_zero: _mm256_and_ps(x, _mm256_cmp_ps::<_CMP_ORD_Q>(x, x)),
    differs: _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NEQ_UQ>(x, y)) != 0
);
vector!(
    F64x4, f64, exp_f64, tanh_f64, ln_f64, _mm256_set1_pd, _mm256_add_pd, _mm256_sub_pd, _mm256_mul_pd, _mm256_div_pd, _mm256_max_pd, _mm256_min_pd,
    |x, y| nan_to_zero: _mm256_and_pd(x, _mm256_cmp_pd::<_CMP_ORD_Q>(x, x)),
    differs: _mm256_movemask_pd(_mm256_cmp_pd::<_CMP_NEQ_UQ>(x, y)) != 0
);
vector!(
    F32x16, f32, exp_f32, tanh_f32, ln_f32, _mm512_set1_ps, _mm512_add_ps, _mm512_sub_ps, _mm512_mul_ps, _mm512_div_ps, _mm512_max_ps, _mm512_min_ps,
    |x, y| nan_to_zero: _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(x, x), x),
    differs: _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(x, y) != 0
);
vector!(
    F64x8, f64, exp_f64, tanh_f64, ln_f64, _mm512_set1_pd, _mm512_add_pd, _mm512_sub_pd, _mm512_mul_pd, _mm512_div_pd, _mm512_max_pd, _mm512_min_pd,
    |x, y| nan_to_zero: _mm512_maskz_mov_pd(_mm512_cmp_pd_mask::<_CMP_ORD_Q>(x, x), x),
    differs: _mm512_cmp_pd_mask::<_CMP_NEQ_UQ>(x, y) != 0
);

/// All ones in the first `count` lanes.
#[inline(always)]
unsafe fn mask32(count: usize) -> __m256i {
    // SAFETY: AVX2, by the caller's promise.
    unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
}

/// All ones in the first `count` lanes.
#[inline(always)]
unsafe fn mask64(count: usize) -> __m256i {
    // SAFETY: AVX2, by the caller's promise.
    unsafe { _mm256_cmpgt_epi64(_mm256_set1_epi64x(count as i64), _mm256_setr_epi64x(0, 1, 2, 3)) }
}

/// Ones in the first `count` of up to 16 bits.
#[inline(always)]
fn bits(count: usize) -> u16 {
    ((1u32 << count) - 1) as u16
}

macro_rules! pack {
    ($Pack:ident, $item:ident, $count:literal, $raw:ident,
     |$from:ident, $to:ident, $n:ident, $v:ident| load_part: $load_part:expr, store_part: $store_part:expr) => {
        // SAFETY of all: the CPU has the instructions of the type, and the caller vouches for the memory.
        impl Pack for $Pack {
            type Item = $item;
            const COUNT: usize = $count;

            #[inline(always)]
            unsafe fn load(from: *const $item) -> Self {
                Self(unsafe { from.cast::<$raw>().read_unaligned() })
            }
            #[inline(always)]
            unsafe fn load_part($from: *const $item, $n: usize) -> Self {
                Self(unsafe { $load_part })
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $item) {
                unsafe { to.cast::<$raw>().write_unaligned(self.0) }
            }
            #[inline(always)]
            unsafe fn store_part(self, $to: *mut $item, $n: usize) {
                let $v = self.0;
                unsafe { $store_part }
            }
        }
    };
}

pack!(
    F32x8, f32, 8, __m256,
    |from, to, n, v| load_part: _mm256_maskload_ps(from, mask32(n)),
    store_part: _mm256_maskstore_ps(to, mask32(n), v)
);
pack!(
    F64x4, f64, 4, __m256d,
    |from, to, n, v| load_part: _mm256_maskload_pd(from, mask64(n)),
    store_part: _mm256_maskstore_pd(to, mask64(n), v)
);
pack!(
    U16x8, u16, 8, __m128i,
    |from, to, n, v| load_part: _mm_loadu_si128(some_bytes(from.cast(), 2 * n).as_ptr().cast()),
    store_part: {
        let mut items = [0u16; 8];
        _mm_storeu_si128(items.as_mut_ptr().cast(), v);
        std::ptr::copy_nonoverlapping(items.as_ptr(), to, n)
    }
);
pack!(
    F32x16, f32, 16, __m512,
    |from, to, n, v| load_part: _mm512_maskz_loadu_ps(bits(n), from),
    store_part: _mm512_mask_storeu_ps(to, bits(n), v)
);
pack!(
    F64x8, f64, 8, __m512d,
    |from, to, n, v| load_part: _mm512_maskz_loadu_pd(bits(n) as u8, from),
    store_part: _mm512_mask_storeu_pd(to, bits(n) as u8, v)
);
pack!(
    U16x16, u16, 16, __m256i,
    |from, to, n, v| load_part: _mm256_maskz_loadu_epi16(bits(n), from.cast()),
    store_part: _mm256_mask_storeu_epi16(to.cast(), bits(n), v)
);

// SAFETY of all below: the CPU has the instructions of the type.

impl Lanes for F32x8 {
    const UNSCALE: f32 = UNSCALE_F32;
    const SATURATES: bool = false;
    const UNROLLED: bool = false;
    const MASKS_BYTES: bool = false;

    #[inline(always)]
    fn scaled_exp(self) -> Self {
        scaled_exp_f32(self)
    }
    #[inline(always)]
    fn in_order(self, order: &[u32; MAX_LANES]) -> Self {
        Self(unsafe { _mm256_permutevar8x32_ps(self.0, _mm256_loadu_si256(order.as_ptr().cast())) })
    }
    #[inline(always)]
    fn mantissa_and_exponent(self) -> [Self; 2] {
        unsafe {
            let (bits, one) = (_mm256_castps_si256(self.0), _mm256_set1_epi32(0x3f80_0000));
            let exponent = _mm256_srli_epi32::<23>(_mm256_sub_epi32(bits, one));
            let mantissa = _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(0x7f_ffff)), one);
            [Self(_mm256_castsi256_ps(mantissa)), Self(_mm256_cvtepi32_ps(exponent))]
        }
    }
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        Self(unsafe { _mm256_fmadd_ps(self.0, a.0, b.0) })
    }
    #[inline(always)]
    fn keep(self, count: usize, rest: f32) -> Self {
        Self(unsafe { _mm256_blendv_ps(_mm256_set1_ps(rest), self.0, _mm256_castsi256_ps(mask32(count))) })
    }
    #[inline(always)]
    fn max_across(self) -> f32 {
        unsafe {
            let x = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        }
    }
    #[inline(always)]
    fn sum_across(self) -> f32 {
        unsafe {
            let x = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        }
    }
    #[inline(always)]
    fn max_of_each(vectors: &[Self]) -> Self {
        match vectors.try_into() {
            Ok(vectors) => joined_eight(vectors, Self::or_greater),
            Err(_) => of_each(vectors, Self::max_across),
        }
    }
    #[inline(always)]
    fn sum_of_each(vectors: &[Self]) -> Self {
        match vectors.try_into() {
            Ok(vectors) => joined_eight(vectors, Self::add),
            Err(_) => of_each(vectors, Self::sum_across),
        }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self(unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0) })
    }
    #[inline(always)]
    fn with_sign_of(self, sign: Self) -> Self {
        Self(unsafe { _mm256_or_ps(self.0, _mm256_and_ps(_mm256_set1_ps(-0.0), sign.0)) })
    }
    #[inline(always)]
    fn if_less(self, than: Self, yes: Self, no: Self) -> Self {
        Self(unsafe { _mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, than.0)) })
    }
    #[inline(always)]
    unsafe fn where_kept(self, keep: *const u8, rest: f32) -> Self {
        unsafe {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(keep.cast()));
            let out = _mm256_castsi256_ps(_mm256_cmpeq_epi32(bytes, _mm256_setzero_si256()));
            Self(_mm256_blendv_ps(self.0, _mm256_set1_ps(rest), out))
        }
    }
}

/// The lanes of each of 8 vectors joined, the first one's in the first lane: half as many vectors in each of three steps, with half as many
/// lanes for each of those that they come from.
#[inline(always)]
fn joined_eight(vectors: &[F32x8; 8], join: impl Fn(F32x8, F32x8) -> F32x8) -> F32x8 {
    let (mut four, mut two) = ([vectors[0]; 4], [vectors[0]; 2]);
    // SAFETY of the blocks: the CPU has the instructions of the type.
    for (i, joined) in four.iter_mut().enumerate() {
        let [a, b] = [vectors[2 * i].0, vectors[2 * i + 1].0];
        *joined = unsafe { join(F32x8(_mm256_unpacklo_ps(a, b)), F32x8(_mm256_unpackhi_ps(a, b))) };
    }
    for (i, joined) in two.iter_mut().enumerate() {
        let [a, b] = [four[2 * i].0, four[2 * i + 1].0];
        *joined = unsafe {
            let first = _mm256_shuffle_ps::<0b01_00_01_00>(a, b);
            join(F32x8(first), F32x8(_mm256_shuffle_ps::<0b11_10_11_10>(a, b)))
        };
    }
    let [a, b] = [two[0].0, two[1].0];
    unsafe {
        let first = _mm256_permute2f128_ps::<0x20>(a, b);
        join(F32x8(first), F32x8(_mm256_permute2f128_ps::<0x31>(a, b)))
    }
}

impl Powers for F32x8 {
    const FUSED: bool = true;
    const STEPS: u32 = 8;

    #[inline(always)]
    fn power(self) -> Self {
        static POWERS: [u32; 8] = powers();
        unsafe {
            let bits = _mm256_castps_si256(self.0);
            // Of the bits that are to choose a lane it takes the lowest.
            let mantissa = _mm256_permutevar8x32_epi32(_mm256_loadu_si256(POWERS.as_ptr().cast()), bits);
            Self(_mm256_castsi256_ps(_mm256_add_epi32(mantissa, _mm256_slli_epi32::<20>(bits))))
        }
    }
}

impl Lanes for F64x4 {
    const UNSCALE: f64 = UNSCALE_F64;
    const SATURATES: bool = false;
    const UNROLLED: bool = false;
    const MASKS_BYTES: bool = false;

    #[inline(always)]
    fn scaled_exp(self) -> Self {
        scaled_exp_f64(self)
    }
    #[inline(always)]
    fn in_order(self, order: &[u32; MAX_LANES]) -> Self {
        unsafe {
            // Pairs of halves
            let low = _mm256_slli_epi64::<1>(_mm256_cvtepu32_epi64(_mm_loadu_si128(order.as_ptr().cast())));
            let high = _mm256_slli_epi64::<32>(_mm256_add_epi64(low, _mm256_set1_epi64x(1)));
            let order = _mm256_or_si256(low, high);
            Self(_mm256_castps_pd(_mm256_permutevar8x32_ps(_mm256_castpd_ps(self.0), order)))
        }
    }
    #[inline(always)]
    fn mantissa_and_exponent(self) -> [Self; 2] {
        // A number of up to 52 bits, added to it
        const WHOLE: f64 = 4_503_599_627_370_496.0;
        unsafe {
            let (bits, one) = (_mm256_castpd_si256(self.0), _mm256_castpd_si256(_mm256_set1_pd(1.0)));
            let of_mantissa = _mm256_srli_epi64::<12>(_mm256_slli_epi64::<12>(bits));
            let whole = _mm256_castpd_si256(_mm256_set1_pd(WHOLE));
            let exponent = _mm256_castsi256_pd(_mm256_or_si256(_mm256_srli_epi64::<52>(bits), whole));
            let exponent = _mm256_sub_pd(exponent, _mm256_set1_pd(WHOLE + 1023.0));
            [Self(_mm256_castsi256_pd(_mm256_or_si256(of_mantissa, one))), Self(exponent)]
        }
    }
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        Self(unsafe { _mm256_fmadd_pd(self.0, a.0, b.0) })
    }
    #[inline(always)]
    fn keep(self, count: usize, rest: f64) -> Self {
        Self(unsafe { _mm256_blendv_pd(_mm256_set1_pd(rest), self.0, _mm256_castsi256_pd(mask64(count))) })
    }
    #[inline(always)]
    fn max_across(self) -> f64 {
        unsafe {
            let x = _mm_max_pd(_mm256_castpd256_pd128(self.0), _mm256_extractf128_pd::<1>(self.0));
            _mm_cvtsd_f64(_mm_max_sd(x, _mm_unpackhi_pd(x, x)))
        }
    }
    #[inline(always)]
    fn sum_across(self) -> f64 {
        unsafe {
            let x = _mm_add_pd(_mm256_castpd256_pd128(self.0), _mm256_extractf128_pd::<1>(self.0));
            _mm_cvtsd_f64(_mm_add_sd(x, _mm_unpackhi_pd(x, x)))
        }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self(unsafe { _mm256_andnot_pd(_mm256_set1_pd(-0.0), self.0) })
    }
    #[inline(always)]
    fn with_sign_of(self, sign: Self) -> Self {
        Self(unsafe { _mm256_or_pd(self.0, _mm256_and_pd(_mm256_set1_pd(-0.0), sign.0)) })
    }
    #[inline(always)]
    fn if_less(self, than: Self, yes: Self, no: Self) -> Self {
        Self(unsafe { _mm256_blendv_pd(no.0, yes.0, _mm256_cmp_pd::<_CMP_LT_OQ>(self.0, than.0)) })
    }
    #[inline(always)]
    unsafe fn where_kept(self, keep: *const u8, rest: f64) -> Self {
        unsafe {
            let bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(keep.cast::<i32>().read_unaligned()));
            let out = _mm256_castsi256_pd(_mm256_cmpeq_epi64(bytes, _mm256_setzero_si256()));
            Self(_mm256_blendv_pd(self.0, _mm256_set1_pd(rest), out))
        }
    }
}

impl Powers for F64x4 {
    const FUSED: bool = true;
    const STEPS: u32 = 1;

    #[inline(always)]
    fn power(self) -> Self {
        Self(unsafe { _mm256_castsi256_pd(_mm256_slli_epi64::<52>(_mm256_castpd_si256(self.0))) })
    }
}

impl Lanes for F32x16 {
    const UNSCALE: f32 = UNSCALE_F32;
    const SATURATES: bool = true;
    const UNROLLED: bool = true;
    const MASKS_BYTES: bool = true;
    const STREAMS: bool = true;

    #[inline(always)]
    unsafe fn stream(self, before: Self, head: usize, to: *mut f32) {
        // SAFETY: as promised by the caller.
        unsafe {
            let first = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
            let lanes = _mm512_add_epi32(first, _mm512_set1_epi32(head as i32));
            _mm512_stream_ps(to, _mm512_permutex2var_ps(before.0, lanes, self.0));
        }
    }
    #[inline(always)]
    fn streamed() {
        unsafe { _mm_sfence() }
    }

    #[inline(always)]
    fn scaled_exp(self) -> Self {
        saturating_exp_f32(self, Self::ALL)
    }
    #[inline(always)]
    unsafe fn scaled_exp_where_kept(self, keep: *const u8, count: usize) -> Self {
        unsafe {
            if count == Self::COUNT {
                saturating_exp_f32(self, kept(keep))
            } else {
                self.where_some_kept(keep, count, f32::NEG_INFINITY).scaled_exp()
            }
        }
    }
    /// A step of Newton's from an inverse of 14 bits: a division takes three times as long as other instructions do with a vector.
    #[inline(always)]
    fn inverse(self) -> Self {
        unsafe {
            let near = _mm512_rcp14_ps(self.0);
            let off = _mm512_fnmadd_ps(self.0, near, _mm512_set1_ps(1.0));
            Self(_mm512_fmadd_ps(near, off, near))
        }
    }
    #[inline(always)]
    fn in_order(self, order: &[u32; MAX_LANES]) -> Self {
        Self(unsafe { _mm512_permutexvar_ps(_mm512_loadu_si512(order.as_ptr().cast()), self.0) })
    }
    #[inline(always)]
    fn mantissa_and_exponent(self) -> [Self; 2] {
        unsafe {
            let mantissa = _mm512_getmant_ps::<_MM_MANT_NORM_1_2, _MM_MANT_SIGN_SRC>(self.0);
            [Self(mantissa), Self(_mm512_getexp_ps(self.0))]
        }
    }
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        Self(unsafe { _mm512_fmadd_ps(self.0, a.0, b.0) })
    }
    #[inline(always)]
    fn keep(self, count: usize, rest: f32) -> Self {
        Self(unsafe { _mm512_mask_mov_ps(_mm512_set1_ps(rest), bits(count), self.0) })
    }
    #[inline(always)]
    fn max_across(self) -> f32 {
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
    #[inline(always)]
    fn sum_across(self) -> f32 {
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
    #[inline(always)]
    fn max_of_each(vectors: &[Self]) -> Self {
        match vectors.try_into() {
            Ok(vectors) => joined_each(vectors, Self::or_greater),
            Err(_) => of_each(vectors, Self::max_across),
        }
    }
    #[inline(always)]
    fn sum_of_each(vectors: &[Self]) -> Self {
        match vectors.try_into() {
            Ok(vectors) => joined_each(vectors, Self::add),
            Err(_) => of_each(vectors, Self::sum_across),
        }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self(unsafe { _mm512_abs_ps(self.0) })
    }
    #[inline(always)]
    fn with_sign_of(self, sign: Self) -> Self {
        Self(unsafe { _mm512_or_ps(self.0, _mm512_and_ps(_mm512_set1_ps(-0.0), sign.0)) })
    }
    #[inline(always)]
    fn if_less(self, than: Self, yes: Self, no: Self) -> Self {
        Self(unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, than.0), no.0, yes.0) })
    }
    #[inline(always)]
    unsafe fn where_kept(self, keep: *const u8, rest: f32) -> Self {
        Self(unsafe { _mm512_mask_mov_ps(_mm512_set1_ps(rest), kept(keep), self.0) })
    }
}

/// The lanes whose byte is not 0.
///
/// # Safety
/// The CPU has AVX-512, and `keep` is valid for reads of 16 bytes.
#[inline(always)]
unsafe fn kept(keep: *const u8) -> __mmask16 {
    unsafe {
        let bytes = _mm_loadu_si128(keep.cast());
        _mm_test_epi8_mask(bytes, bytes)
    }
}

impl Scales for F32x16 {
    type Mask = __mmask16;
    const ALL: __mmask16 = __mmask16::MAX;

    #[inline(always)]
    fn step(self) -> Self {
        static STEPS: [u32; SCALED_STEPS] = scaled_steps();
        unsafe {
            let [first, second] = [0, 16].map(|i| _mm512_loadu_ps(STEPS[i..].as_ptr().cast()));
            // Of the bits that are to choose a lane it takes the lowest.
            Self(_mm512_permutex2var_ps(first, _mm512_castps_si512(self.0), second))
        }
    }
    #[inline(always)]
    fn scale(self, n: Self, least: Self, lanes: __mmask16) -> Self {
        unsafe {
            // A NaN is not less.
            let lanes = _mm512_mask_cmp_ps_mask::<_CMP_NLT_UQ>(lanes, n.0, least.0);
            Self(_mm512_maskz_scalef_ps(lanes, self.0, n.0))
        }
    }
}

/// The lanes of each of 16 vectors joined, the first one's in the first lane: half as many vectors in each of four steps, with
/// half as many lanes for each of those that they come from.
#[inline(always)]
fn joined_each(vectors: &[F32x16; 16], join: impl Fn(F32x16, F32x16) -> F32x16) -> F32x16 {
    let (mut eight, mut four, mut two) = ([vectors[0]; 8], [vectors[0]; 4], [vectors[0]; 2]);
    // In pairs whose numbers differ in bit 2, then bit 3, bit 0 and bit 1: so they end in order.
    for (i, joined) in eight.iter_mut().enumerate() {
        let first = i / 4 * 8 + i % 4;
        *joined = quarters_joined(vectors[first], vectors[first + 4], &join);
    }
    for (i, joined) in four.iter_mut().enumerate() {
        *joined = quarters_joined(eight[i], eight[i + 4], &join);
    }
    for (i, joined) in two.iter_mut().enumerate() {
        let [a, b] = [four[2 * i].0, four[2 * i + 1].0];
        // SAFETY: the CPU has the instructions of the type.
        *joined = unsafe {
            let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
            let (first, second) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
            join(F32x16(_mm512_castpd_ps(first)), F32x16(_mm512_castpd_ps(second)))
        };
    }
    let [a, b] = [two[0].0, two[1].0];
    // SAFETY: likewise.
    unsafe {
        let first = _mm512_shuffle_ps::<0b10_00_10_00>(a, b);
        join(F32x16(first), F32x16(_mm512_shuffle_ps::<0b11_01_11_01>(a, b)))
    }
}

/// The first quarter of each joined with the second, and the third with the fourth.
#[inline(always)]
fn quarters_joined(a: F32x16, b: F32x16, join: impl Fn(F32x16, F32x16) -> F32x16) -> F32x16 {
    // SAFETY: the CPU has the instructions of the type.
    unsafe {
        let first = _mm512_shuffle_f32x4::<0b10_00_10_00>(a.0, b.0);
        join(F32x16(first), F32x16(_mm512_shuffle_f32x4::<0b11_01_11_01>(a.0, b.0)))
    }
}

impl Lanes for F64x8 {
    const UNSCALE: f64 = UNSCALE_F64;
    const SATURATES: bool = false;
    const UNROLLED: bool = true;
    const MASKS_BYTES: bool = true;

    #[inline(always)]
    fn scaled_exp(self) -> Self {
        scaled_exp_f64(self)
    }
    #[inline(always)]
    fn in_order(self, order: &[u32; MAX_LANES]) -> Self {
        unsafe {
            let order = _mm512_cvtepu32_epi64(_mm256_loadu_si256(order.as_ptr().cast()));
            Self(_mm512_permutexvar_pd(order, self.0))
        }
    }
    #[inline(always)]
    fn mantissa_and_exponent(self) -> [Self; 2] {
        unsafe {
            let mantissa = _mm512_getmant_pd::<_MM_MANT_NORM_1_2, _MM_MANT_SIGN_SRC>(self.0);
            [Self(mantissa), Self(_mm512_getexp_pd(self.0))]
        }
    }
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        Self(unsafe { _mm512_fmadd_pd(self.0, a.0, b.0) })
    }
    #[inline(always)]
    fn keep(self, count: usize, rest: f64) -> Self {
        Self(unsafe { _mm512_mask_mov_pd(_mm512_set1_pd(rest), bits(count) as u8, self.0) })
    }
    #[inline(always)]
    fn max_across(self) -> f64 {
        unsafe { _mm512_reduce_max_pd(self.0) }
    }
    #[inline(always)]
    fn sum_across(self) -> f64 {
        unsafe { _mm512_reduce_add_pd(self.0) }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self(unsafe { _mm512_abs_pd(self.0) })
    }
    #[inline(always)]
    fn with_sign_of(self, sign: Self) -> Self {
        Self(unsafe { _mm512_or_pd(self.0, _mm512_and_pd(_mm512_set1_pd(-0.0), sign.0)) })
    }
    #[inline(always)]
    fn if_less(self, than: Self, yes: Self, no: Self) -> Self {
        Self(unsafe { _mm512_mask_blend_pd(_mm512_cmp_pd_mask::<_CMP_LT_OQ>(self.0, than.0), no.0, yes.0) })
    }
    #[inline(always)]
    unsafe fn where_kept(self, keep: *const u8, rest: f64) -> Self {
        unsafe {
            let bytes = _mm_loadl_epi64(keep.cast());
            Self(_mm512_mask_mov_pd(_mm512_set1_pd(rest), _mm_test_epi8_mask(bytes, bytes) as u8, self.0))
        }
    }
}

impl Powers for F64x8 {
    const FUSED: bool = true;
    const STEPS: u32 = 1;

    #[inline(always)]
    fn power(self) -> Self {
        Self(unsafe { _mm512_castsi512_pd(_mm512_slli_epi64::<52>(_mm512_castpd_si512(self.0))) })
    }
}

impl Words for U64x4x2 {
    #[inline(always)]
    fn of(words: [u64; 8]) -> Self {
        let [a, b] = [&words[..4], &words[4..]];
        Self(unsafe { [_mm256_loadu_si256(a.as_ptr().cast()), _mm256_loadu_si256(b.as_ptr().cast())] })
    }
    #[inline(always)]
    fn to_array(self) -> [u64; 8] {
        let mut words = [0; 8];
        let (a, b) = words.split_at_mut(4);
        unsafe {
            _mm256_storeu_si256(a.as_mut_ptr().cast(), self.0[0]);
            _mm256_storeu_si256(b.as_mut_ptr().cast(), self.0[1]);
        }
        words
    }
    #[inline(always)]
    fn products(self, factor: u32) -> Self {
        let [a, b] = self.0;
        unsafe {
            let factor = _mm256_set1_epi64x(i64::from(factor));
            Self([_mm256_mul_epu32(a, factor), _mm256_mul_epu32(b, factor)])
        }
    }
    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        let ([a, b], [c, d]) = (self.0, other.0);
        Self(unsafe { [_mm256_xor_si256(a, c), _mm256_xor_si256(b, d)] })
    }
    #[inline(always)]
    fn upper_halves(self) -> Self {
        let [a, b] = self.0;
        Self(unsafe { [_mm256_srli_epi64::<32>(a), _mm256_srli_epi64::<32>(b)] })
    }
    #[inline(always)]
    fn with_upper_halves(self, upper: Self) -> Self {
        let ([a, b], [c, d]) = (self.0, upper.0);
        unsafe {
            let (c, d) = (_mm256_slli_epi64::<32>(c), _mm256_slli_epi64::<32>(d));
            Self([_mm256_blend_epi32::<0b1010_1010>(a, c), _mm256_blend_epi32::<0b1010_1010>(b, d)])
        }
    }
    #[inline(always)]
    fn at_least([low, high]: [Self; 2], threshold: u16) -> [[u8; 8]; 8] {
        let mut kept = [[0; 8]; 8];
        unsafe {
            let threshold = _mm256_set1_epi16(threshold as i16);
            let at_least = {
                #[inline(always)]
                |x| _mm256_cmpeq_epi16(_mm256_max_epu16(x, threshold), x)
            };
            // Of two numbers in each half of a register: the first's lower four, the second's, the first's upper four, the second's.
            let to_pairs = _mm256_setr_epi8(
                0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11,
                15,
            );
            let pairs = {
                #[inline(always)]
                |i: usize| {
                    let masks = _mm256_packs_epi16(at_least(low.0[i]), at_least(high.0[i]));
                    let bytes = _mm256_and_si256(masks, _mm256_set1_epi8(1));
                    let pairs = _mm256_shuffle_epi8(bytes, to_pairs);
                    [_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs)]
                }
            };
            let ([a, b], [c, d]) = (pairs(0), pairs(1));
            let fours = [
                [_mm_unpacklo_epi16(a, b), _mm_unpacklo_epi16(c, d)],
                [_mm_unpackhi_epi16(a, b), _mm_unpackhi_epi16(c, d)],
            ];
            for (kept, [ab, cd]) in kept.chunks_exact_mut(4).zip(fours) {
                let to = kept.as_mut_ptr().cast::<__m128i>();
                _mm_storeu_si128(to, _mm_unpacklo_epi32(ab, cd));
                _mm_storeu_si128(to.add(1), _mm_unpackhi_epi32(ab, cd));
            }
        }
        kept
    }
}

impl Words for U64x8 {
    #[inline(always)]
    fn of(words: [u64; 8]) -> Self {
        Self(unsafe { _mm512_loadu_si512(words.as_ptr().cast()) })
    }
    #[inline(always)]
    fn to_array(self) -> [u64; 8] {
        let mut words = [0; 8];
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), self.0) };
        words
    }
    #[inline(always)]
    fn products(self, factor: u32) -> Self {
        Self(unsafe { _mm512_mul_epu32(self.0, _mm512_set1_epi64(i64::from(factor))) })
    }
    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        Self(unsafe { _mm512_xor_si512(self.0, other.0) })
    }
    #[inline(always)]
    fn upper_halves(self) -> Self {
        Self(unsafe { _mm512_srli_epi64::<32>(self.0) })
    }
    #[inline(always)]
    fn with_upper_halves(self, upper: Self) -> Self {
        Self(unsafe { _mm512_mask_blend_epi32(0b1010_1010_1010_1010, self.0, _mm512_slli_epi64::<32>(upper.0)) })
    }
    #[inline(always)]
    fn at_least(halves: [Self; 2], threshold: u16) -> [[u8; 8]; 8] {
        let mut kept = [[0; 8]; 8];
        for (i, bytes) in kept.iter_mut().enumerate() {
            unsafe {
                let words = _mm512_srl_epi64(halves[i / 4].0, _mm_cvtsi32_si128((i % 4 * 16) as i32));
                let bits = _mm512_and_si512(words, _mm512_set1_epi64(0xffff));
                let least = _mm512_cmpge_epu64_mask(bits, _mm512_set1_epi64(i64::from(threshold)));
                _mm_storel_epi64(bytes.as_mut_ptr().cast(), _mm_maskz_set1_epi8(least.into(), 1));
            }
        }
        kept
    }
}

impl Simd for Avx2 {
    type F32 = F32x8;
    type F64 = F64x4;
    type U16 = U16x8;
    type Words = U64x4x2;
    type Half = Self;

    #[inline(always)]
    fn f16_to_f32(x: U16x8) -> F32x8 {
        F32x8(unsafe { _mm256_cvtph_ps(x.0) })
    }
    #[inline(always)]
    fn f32_to_f16(x: F32x8) -> U16x8 {
        U16x8(unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.0) })
    }
    #[inline(always)]
    fn bf16_to_f32(x: U16x8) -> F32x8 {
        F32x8(unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x.0))) })
    }
    #[inline(always)]
    fn f32_to_bf16(x: F32x8) -> U16x8 {
        unsafe {
            let bits = _mm256_castps_si256(x.0);
            // To nearest: up by a half, less a little where the last bit kept is even.
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            // A NaN keeps its upper half, made quiet: rounding could carry it into the sign.
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x.0, x.0));
            let upper = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            U16x8(_mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256::<1>(upper)))
        }
    }
    #[inline(always)]
    fn prefetch<T>(at: *const T) {
        // An address that is not there is passed over.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn enter<R>(f: impl FnOnce() -> R) -> R {
        // SAFETY: the CPU has them, by the caller's promise.
        unsafe { f.with_avx2() }
    }
}

impl Simd for Avx512 {
    type F32 = F32x16;
    type F64 = F64x8;
    type U16 = U16x16;
    type Words = U64x8;
    type Half = Avx2;

    #[inline(always)]
    fn f16_to_f32(x: U16x16) -> F32x16 {
        // `_mm512_cvtph_ps` rules out what is read from memory in the same instruction.
        F32x16(unsafe { _mm512_cvt_roundph_ps::<_MM_FROUND_CUR_DIRECTION>(x.0) })
    }
    #[inline(always)]
    fn f32_to_f16(x: F32x16) -> U16x16 {
        U16x16(unsafe { _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.0) })
    }
    #[inline(always)]
    fn bf16_to_f32(x: U16x16) -> F32x16 {
        F32x16(unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x.0))) })
    }
    /// Not AVX512-BF16's instruction, which flushes subnormals.
    #[inline(always)]
    fn f32_to_bf16(x: F32x16) -> U16x16 {
        unsafe {
            let bits = _mm512_castps_si512(x.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x.0, x.0);
            let upper = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x40_0000));
            U16x16(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(upper)))
        }
    }
    #[inline(always)]
    fn prefetch<T>(at: *const T) {
        // An address that is not there is passed over.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn enter<R>(f: impl FnOnce() -> R) -> R {
        // SAFETY: the CPU has them, by the caller's promise.
        unsafe { f.with_avx512() }
    }
}
