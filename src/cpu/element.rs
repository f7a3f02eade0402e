//! The dtypes on the CPU: read as the type that is computed in, written with one rounding.

use super::BLOCK;
use crate::state::Real;
use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};

pub(crate) trait Element: Copy + Send + Sync {
    /// f32, or f64 for f64.
    type Real: Real;

    /// An output to write to. The memory comes zeroed from the system, so this touches none of it.
    fn zeros(len: usize) -> Vec<Self>;

    /// At most [`BLOCK`] elements as `Real`: themselves, or widened into `scratch`.
    fn widen<'a>(src: &'a [Self], scratch: &'a mut [Self::Real; BLOCK]) -> &'a [Self::Real];

    /// Writes `f(x)` for every x of `src`, rounded once.
    fn map(src: &[Self], dst: &mut [Self], f: impl Fn(Self::Real) -> Self::Real);

    /// Writes `f(x, y)` for every pair of `xs` and `ys`, rounded once.
    fn map2(xs: &[Self], ys: &[Self], dst: &mut [Self], f: impl Fn(Self::Real, Self::Real) -> Self::Real);

    /// Reads `src` into `dst`.
    fn load(src: &[Self], dst: &mut [Self::Real]);

    /// Rounds `src` into `dst`.
    fn store(src: &[Self::Real], dst: &mut [Self]);
}

macro_rules! real_element {
    ($real:ident) => {
        impl Element for $real {
            type Real = $real;

            fn zeros(len: usize) -> Vec<Self> {
                vec![0.0; len]
            }

            #[inline(always)]
            fn widen<'a>(src: &'a [Self], _: &'a mut [Self; BLOCK]) -> &'a [Self] {
                src
            }

            #[inline(always)]
            fn map(src: &[Self], dst: &mut [Self], f: impl Fn(Self) -> Self) {
                for (y, &x) in dst.iter_mut().zip(src) {
                    *y = f(x);
                }
            }

            #[inline(always)]
            fn map2(xs: &[Self], ys: &[Self], dst: &mut [Self], f: impl Fn(Self, Self) -> Self) {
                for ((z, &x), &y) in dst.iter_mut().zip(xs).zip(ys) {
                    *z = f(x, y);
                }
            }

            #[inline(always)]
            fn load(src: &[Self], dst: &mut [Self]) {
                dst.copy_from_slice(src);
            }

            #[inline(always)]
            fn store(src: &[Self], dst: &mut [Self]) {
                dst.copy_from_slice(src);
            }
        }
    };
}
real_element!(f32);
real_element!(f64);

macro_rules! half_element {
    ($half:ident) => {
        impl Element for $half {
            type Real = f32;

            fn zeros(len: usize) -> Vec<Self> {
                vec![0u16; len].reinterpret_into()
            }

            #[inline(always)]
            fn widen<'a>(src: &'a [Self], scratch: &'a mut [f32; BLOCK]) -> &'a [f32] {
                let wide = &mut scratch[..src.len()];
                src.convert_to_f32_slice(wide);
                wide
            }

            #[inline(always)]
            fn map(src: &[Self], dst: &mut [Self], f: impl Fn(f32) -> f32) {
                let mut scratch = [0f32; BLOCK];
                for (src, dst) in src.chunks(BLOCK).zip(dst.chunks_mut(BLOCK)) {
                    let wide = &mut scratch[..src.len()];
                    src.convert_to_f32_slice(wide);
                    wide.iter_mut().for_each(|x| *x = f(*x));
                    dst.convert_from_f32_slice(wide);
                }
            }

            #[inline(always)]
            fn map2(xs: &[Self], ys: &[Self], dst: &mut [Self], f: impl Fn(f32, f32) -> f32) {
                let (mut x_scratch, mut y_scratch) = ([0f32; BLOCK], [0f32; BLOCK]);
                for ((xs, ys), dst) in xs.chunks(BLOCK).zip(ys.chunks(BLOCK)).zip(dst.chunks_mut(BLOCK)) {
                    let wide_x = &mut x_scratch[..xs.len()];
                    let wide_y = &mut y_scratch[..ys.len()];
                    xs.convert_to_f32_slice(wide_x);
                    ys.convert_to_f32_slice(wide_y);
                    wide_x.iter_mut().zip(wide_y).for_each(|(x, y)| *x = f(*x, *y));
                    dst.convert_from_f32_slice(wide_x);
                }
            }

            #[inline(always)]
            fn load(src: &[Self], dst: &mut [f32]) {
                src.convert_to_f32_slice(dst);
            }

            #[inline(always)]
            fn store(src: &[f32], dst: &mut [Self]) {
                dst.convert_from_f32_slice(src);
            }
        }
    };
}
half_element!(f16);
half_element!(bf16);
