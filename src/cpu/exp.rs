//! The exponential, once for vectors of any kind.
//!
//! exp(x) = 2^(n/N) · exp(r) with n = round(x · N / ln 2) and r = x − n · ln 2 / N in ±0.35 / N, where exp(r) is a polynomial, the
//! shorter the greater N is. 2^(n/N) is made of n's bits, and of a table of N powers where the lanes of a register or two can be
//! one (P. T. P. Tang, Table-driven implementation of the exponential function in IEEE floating-point arithmetic, 1989). AVX-512 has
//! an instruction for what n's bits are put together for: see `Scales`.

#[cfg(target_arch = "x86_64")]
use super::lanes::Scales;
use super::lanes::{Lanes, Powers};
use crate::state::Real;

/// The greatest x that exp is defined for here. Softmax asks for less: nothing passes the reference by more than 16.
#[cfg(test)]
pub(crate) const MAX_EXP: f32 = 40.0;

// Adding ROUND = 1.5 · 2²³ + BIAS · N leaves n + BIAS · N in the low bits. Shifted up, their whole part is the float
// 2ⁿ · 2^(BIAS − 127), which with a bias greater than the format's 127 is not subnormal for any n there is. What is made of it
// is multiplied by 2^(127 − BIAS) last, or by a factor that has it in it, so that what is subnormal is rounded once, and not
// flushed to 0.
const BIAS_F32: f32 = 127.0 + 64.0;
/// 2⁻⁶⁴
pub(super) const UNSCALE_F32: f32 = 1.0 / 18_446_744_073_709_551_616.0;

/// The mantissas of 2^(i/[`SCALED_STEPS`]).
#[cfg(target_arch = "x86_64")]
const MANTISSAS: [u32; SCALED_STEPS] = [
    0x00_0000, 0x02_cd87, 0x05_aac3, 0x08_980f, 0x0b_95c2, 0x0e_a43a, 0x11_c3d3, 0x14_f4f0, 0x18_37f0, 0x1b_8d3a,
    0x1e_f532, 0x22_7043, 0x25_fed7, 0x29_a15b, 0x2d_583f, 0x31_23f6, 0x35_04f3, 0x38_fbaf, 0x3d_08a4, 0x41_2c4d,
    0x45_672a, 0x49_b9be, 0x4e_248c, 0x52_a81e, 0x57_44fd, 0x5b_fbb8, 0x60_ccdf, 0x65_b907, 0x6a_c0c7, 0x6f_e4ba,
    0x75_257d, 0x7a_83b3,
];

/// What the low bits of [`Powers::power`], shifted up, are added to where the lowest of them are i: the mantissa of 2^(i/N),
/// less these bits.
#[cfg(target_arch = "x86_64")]
pub(super) const fn powers<const N: usize>() -> [u32; N] {
    let mut powers = [0; N];
    let mut i = 0;
    while i < N {
        powers[i] = MANTISSAS[i * MANTISSAS.len() / N].wrapping_sub((i << (23 - N.ilog2())) as u32);
        i += 1;
    }
    powers
}

/// The bits of 2^(i/[`SCALED_STEPS`]) / [`UNSCALE_F32`].
#[cfg(target_arch = "x86_64")]
pub(super) const fn scaled_steps() -> [u32; SCALED_STEPS] {
    let mut steps = MANTISSAS;
    let mut i = 0;
    while i < SCALED_STEPS {
        steps[i] += (BIAS_F32 as u32) << 23;
        i += 1;
    }
    steps
}

/// exp(x) for x up to [`MAX_EXP`], within a relative 2.4e-7 + 3e-9·|x|. exp(0) is 1, no x < 0 gives more, and NaN gives
/// NaN.
#[inline(always)]
pub(crate) fn exp_f32<V: Lanes<Real = f32>>(x: V) -> V {
    x.scaled_exp().unscaled()
}

/// As many steps there are from one power of two to the next in [`saturating_exp_f32`].
#[cfg(target_arch = "x86_64")]
pub(super) const SCALED_STEPS: usize = 32;

/// [`Lanes::scaled_exp`] of these lanes for vectors that [scale](Scales), and 0 in the others; ∞ or NaN for x above 45.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn saturating_exp_f32<V: Scales<Real = f32>>(x: V, lanes: V::Mask) -> V {
    // Adding it leaves the steps in the low bits.
    const ROUND: f32 = 1.5 * (1u32 << 23) as f32 / SCALED_STEPS as f32;
    let shifted = x.mul_add(V::splat(std::f32::consts::LOG2_E), V::splat(ROUND));
    // In powers of two, not in steps.
    let n = shifted - V::splat(ROUND);
    // Off by 1.9e-9 · n.
    let r = n.mul_add(V::splat(-std::f32::consts::LN_2), x);
    // As below; 5.3e-8
    let slope = polynomial(r, [0.499_999_97, 1.000_014_7]);
    let step = shifted.step();
    // Less is 0: it would be subnormal, for which a CPU takes many times as long.
    (step * r).mul_add(slope, step).scale(n, V::splat(-BIAS_F32 + 2.0), lanes)
}

/// [`Lanes::scaled_exp`]: exp(x) / [`UNSCALE`](Lanes::UNSCALE), which is never subnormal.
#[inline(always)]
pub(super) fn scaled_exp_f32<V: Powers<Real = f32>>(x: V) -> V {
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let steps = V::STEPS as f32;
    // Below −104 the result rounds to 0. Masked logits are, and a product that underflows would take a CPU many times as long:
    // here n is −BIAS · N, and the power 0. A NaN passes.
    let x = x.at_least(V::splat(-BIAS_F32 * std::f32::consts::LN_2));
    let round = V::splat(12_582_912.0 + BIAS_F32 * steps);
    let shifted = x.mul_add(V::splat(std::f32::consts::LOG2_E * steps), round);
    let n = shifted - round;
    let r = if V::FUSED {
        // Off by 1.9e-9 · n / N, for what ln 2 loses in f32.
        n.mul_add(V::splat(-std::f32::consts::LN_2 / steps), x)
    } else {
        // n times the short part is exact (Cody & Waite).
        n.mul_add(V::splat(-LN2_LOW / steps), n.mul_add(V::splat(-LN2_HIGH / steps), x))
    };
    // (exp(r) − 1) / r, minimax for the relative error of exp(r).
    const { assert!(matches!(V::STEPS, 1 | 8)) };
    let slope = match V::STEPS {
        // 1.1e-7
        1 => polynomial(r, [0.008_312_502, 0.041_890_334, 0.166_671_16, 0.499_992_3, 1.0]),
        // 2.6e-8
        _ => polynomial(r, [0.166_668_86, 0.500_064_6, 1.0]),
    };
    let power = shifted.power();
    (power * r).mul_add(slope, power)
}

/// The coefficients are those of the highest power first.
#[inline(always)]
fn polynomial<V: Lanes, const N: usize>(x: V, coefficients: [V::Real; N]) -> V {
    let mut coefficients = coefficients.into_iter().map(V::splat);
    let first = coefficients.next().unwrap_or(V::splat(V::Real::ZERO));
    coefficients.fold(first, |sum, next| sum.mul_add(x, next))
}

/// m − 1 and e of x = m · 2ᵉ, x ≥ 1, with m in √½ … √2.
#[inline(always)]
fn reduced_for_ln<V: Lanes>(x: V) -> [V; 2] {
    let one = V::splat(V::Real::ONE);
    let [m, e] = x.mantissa_and_exponent();
    let (root, lower) = (V::splat(V::Real::nearest(std::f64::consts::SQRT_2)), m * V::splat(V::Real::nearest(0.5)));
    [root.if_less(m, lower, m) - one, root.if_less(m, e + one, e)]
}

/// ln(x) of x ≥ 1 within 1 ulp, and NaN for NaN, by Cephes' polynomial (Moshier).
#[inline(always)]
pub(crate) fn ln_f32<V: Lanes<Real = f32>>(x: V) -> V {
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const COEFFICIENTS: [f32; 9] = [
        7.037_683_6e-2,
        -1.151_461e-1,
        1.167_699_87e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ];
    let [f, e] = reduced_for_ln(x);
    let square = f * f;
    let low = e.mul_add(V::splat(LN2_LOW), polynomial(f, COEFFICIENTS) * (square * f));
    let low = square.mul_add(V::splat(-0.5), low);
    // NaN has bits of a mantissa.
    x.mul_add(V::splat(0.0), e.mul_add(V::splat(LN2_HIGH), f + low))
}

/// As [`ln_f32`], by fdlibm's (Sun Microsystems): with s = f / (2 + f), ln(1 + f) = f − s·(f − R(s²)).
#[inline(always)]
pub(crate) fn ln_f64<V: Lanes<Real = f64>>(x: V) -> V {
    const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    const COEFFICIENTS: [f64; 7] = [
        1.479_819_860_511_658_6e-1,
        1.531_383_769_920_937_3e-1,
        1.818_357_216_161_805e-1,
        2.222_219_843_214_978_4e-1,
        2.857_142_874_366_239e-1,
        3.999_999_999_940_942e-1,
        6.666_666_666_666_735e-1,
    ];
    let [f, e] = reduced_for_ln(x);
    let s = f / (V::splat(2.0) + f);
    let square = s * s;
    let half = V::splat(0.5) * f * f;
    let low = s * (half + polynomial(square, COEFFICIENTS) * square);
    let low = e.mul_add(V::splat(LN2_LOW), low);
    x.mul_add(V::splat(0.0), e.mul_add(V::splat(LN2_HIGH), f - (half - low)))
}

const BIAS_F64: f64 = 1023.0 + 512.0;
const ROUND_F64: f64 = 6_755_399_441_055_744.0 + BIAS_F64;
/// 2⁻⁵¹²
pub(super) const UNSCALE_F64: f64 = f64::from_bits((1023 - 512) << 52);

/// As [`exp_f32`], but within 2 ulp: a Taylor polynomial long enough to stay under the rounding error.
#[inline(always)]
pub(crate) fn exp_f64<V: Lanes<Real = f64>>(x: V) -> V {
    x.scaled_exp().unscaled()
}

/// As [`scaled_exp_f32`]; N is 1.
#[inline(always)]
pub(super) fn scaled_exp_f64<V: Powers<Real = f64>>(x: V) -> V {
    const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    const COEFFICIENTS: [f64; 13] = [
        1.0 / 6_227_020_800.0,
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
    ];
    // As above; below −746 the result rounds to 0.
    let x = x.at_least(V::splat(-BIAS_F64 * std::f64::consts::LN_2));
    let shifted = x.mul_add(V::splat(std::f64::consts::LOG2_E), V::splat(ROUND_F64));
    let n = shifted - V::splat(ROUND_F64);
    let r = n.mul_add(V::splat(-LN2_LOW), n.mul_add(V::splat(-LN2_HIGH), x));
    let power = shifted.power();
    (power * r).mul_add(polynomial(r, COEFFICIENTS), power)
}

/// Up to this |x| tanh is x plus a correction; above, it is 1 − 2 / (exp(2|x|) + 1), where nothing cancels.
const TANH_SMALL: f64 = 0.625;
/// exp(2x) of more is so great that tanh rounds to 1.
const TANH_LARGE: f64 = 40.0;

/// 1 − 2 / (exp(2|x|) + 1) with the sign of x; NaN for NaN.
#[inline(always)]
fn large_tanh<V: Lanes>(x: V) -> V {
    let one = V::splat(V::Real::ONE);
    let twice = (x.abs() + x.abs()).at_most(V::splat(V::Real::nearest(TANH_LARGE)));
    (one - (one + one) / (twice.exp() + one)).with_sign_of(x)
}

/// tanh, given x² and what it is where |x| is small. Most vectors need nothing else: caps are chosen well above most logits.
#[inline(always)]
fn with_large_tanh<V: Lanes>(x: V, square: V, small: V) -> V {
    let limit = V::splat(V::Real::nearest(TANH_SMALL * TANH_SMALL));
    if square.at_most(limit).differs(square) {
        limit.if_less(square, large_tanh(x), small)
    } else {
        small
    }
}

/// tanh within 2 ulp; NaN for NaN. The polynomial for small x is Cephes' (Moshier).
#[inline(always)]
pub(crate) fn tanh_f32<V: Lanes<Real = f32>>(x: V) -> V {
    let square = x * x;
    let p = polynomial(square, [-0.005_704_988_7, 0.020_639_088, -0.053_739_715, 0.133_314_42, -0.333_332_8]);
    with_large_tanh(x, square, p.mul_add(square * x, x))
}

/// As [`tanh_f32`], with Cephes' rational function for small x.
#[inline(always)]
pub(crate) fn tanh_f64<V: Lanes<Real = f64>>(x: V) -> V {
    let square = x * x;
    let p = V::splat(-9.643_991_794_250_522e-1).mul_add(square, V::splat(-9.928_772_310_019_185e1));
    let p = p.mul_add(square, V::splat(-1.614_687_684_417_084_6e3));
    let q = (square + V::splat(1.128_116_784_916_329_3e2)).mul_add(square, V::splat(2.235_488_390_601_004_5e3));
    let q = q.mul_add(square, V::splat(4.844_063_053_251_255e3));
    with_large_tanh(x, square, (p / q).mul_add(square * x, x))
}

/// 1 − tanh²(x) = 4e / (1 + e)² with e = exp(−2|x|), where nothing cancels.
#[inline(always)]
pub(crate) fn tanh_slope<V: Lanes>(x: V) -> V {
    let (zero, one) = (V::splat(V::Real::ZERO), V::splat(V::Real::ONE));
    let two = one + one;
    let e = (zero - two * x.abs()).exp();
    let ratio = two / (one + e);
    e * ratio * ratio
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::lanes::Pack;
    use crate::cpu::level::{Level, Simd, Task};
    use crate::state::Number;
    use rayon::prelude::*;

    struct Exp<'a, R>(&'a mut [R]);
    struct Tanh<'a, R>(&'a mut [R]);
    struct Ln<'a, R>(&'a mut [R]);
    struct Inverse<'a, R>(&'a mut [R]);

    fn each<V: Lanes>(xs: &mut [V::Real], f: impl Fn(V) -> V) {
        for chunk in xs.chunks_mut(V::COUNT) {
            let (xs, count) = (chunk.as_mut_ptr(), chunk.len());
            // SAFETY: `count` elements are there.
            unsafe { f(V::load_part(xs, count)).store_part(xs, count) }
        }
    }

    macro_rules! task {
        ($Task:ident, $real:ident, $Lanes:ident, $f:expr) => {
            impl Task for $Task<'_, $real> {
                fn run<S: Simd>(self) {
                    // SAFETY: the level that runs a task is there.
                    unsafe {
                        S::enter(
                            #[inline(always)]
                            || each::<S::$Lanes>(self.0, $f),
                        )
                    }
                }
            }
        };
    }
    task!(Exp, f32, F32, |x| x.exp());
    task!(Exp, f64, F64, |x| x.exp());
    task!(Tanh, f32, F32, |x| x.tanh());
    task!(Tanh, f64, F64, |x| x.tanh());
    task!(Ln, f32, F32, |x| x.ln());
    task!(Ln, f64, F64, |x| x.ln());
    task!(Inverse, f32, F32, |x| x.inverse());
    task!(Inverse, f64, F64, |x| x.inverse());

    /// f32s from 1 to 2⁶⁰: all of them up to 4, and every 61st.
    #[test]
    fn ln_and_inverse() {
        const PART: u32 = 1 << 16;
        let [one, four, most] = [1f32, 4.0, 2f32.powi(60)].map(f32::to_bits);
        (one..most).into_par_iter().step_by(PART as usize).for_each(|first| {
            let step = if first < four { 1 } else { 61 };
            let inputs: Vec<f32> = (first..first + PART).step_by(step).map(f32::from_bits).collect();
            let ulp = |exact: f64| f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            for level in Level::available() {
                let (mut ln, mut inverse) = (inputs.clone(), inputs.clone());
                level.run(Ln(&mut ln));
                level.run(Inverse(&mut inverse));
                for ((&x, ln), inverse) in inputs.iter().zip(ln).zip(inverse) {
                    for (name, found, exact) in [("ln", ln, f64::from(x).ln()), ("1/", inverse, 1.0 / f64::from(x))] {
                        let off = (f64::from(found) - exact).abs() / ulp(exact);
                        assert!(off <= 1.0, "{name}({x}) is {exact:e}, not {found:e}: {off} ulp ({level:?})");
                    }
                }
            }
        });
        for level in Level::available() {
            let mut xs: Vec<f64> = (0..10_000).map(|i| 1.0 + f64::from(i * i) * 1e-3).chain([f64::NAN]).collect();
            let (mut ln, inputs) = (xs.clone(), xs.clone());
            level.run(Ln(&mut ln));
            level.run(Inverse(&mut xs));
            for ((&x, &ln), &inverse) in inputs.iter().zip(&ln).zip(&xs).take(10_000) {
                for (name, found, exact) in [("ln", ln, x.ln()), ("1/", inverse, 1.0 / x)] {
                    let off = (found - exact).abs() / (f64::from_bits(exact.to_bits() + 1) - exact);
                    assert!(off <= 1.0, "{name}({x}) is {exact:e}, not {found:e} ({level:?})");
                }
            }
            assert!(ln[10_000].is_nan() && xs[10_000].is_nan());
            let mut xs = [1.0, f32::NAN];
            level.run(Ln(&mut xs));
            assert!(xs[0] == 0.0 && xs[1].is_nan());
            let mut xs = [1.0, f32::NAN];
            level.run(Inverse(&mut xs));
            assert!(xs[0] == 1.0 && xs[1].is_nan());
        }
    }

    /// Every 61st f32 from 2⁻¹²⁶ to 2⁴, and some f64s, of either sign.
    #[test]
    fn tanh() {
        let inputs: Vec<f32> = (0x0080_0000..0x4180_0000).step_by(61).map(f32::from_bits).collect();
        inputs.par_chunks(1 << 16).enumerate().for_each(|(i, inputs)| {
            let sign = if i % 2 == 0 { 1.0 } else { -1.0 };
            for level in Level::available() {
                let mut found: Vec<f32> = inputs.iter().map(|x| x * sign).collect();
                level.run(Tanh(&mut found));
                for (&x, &found) in inputs.iter().zip(&found) {
                    let exact = ((x * sign) as f64).tanh();
                    let rounded = exact as f32;
                    let ulp = rounded.abs() - f32::from_bits(rounded.abs().to_bits() - 1);
                    let off = (found as f64 - exact).abs() / ulp as f64;
                    assert!(off <= 2.0, "tanh({x}) is {exact:e}, not {found:e}: {off} ulp ({level:?})");
                }
            }
        });
        let inputs: Vec<f64> =
            (1..400_000).map(|i| (i as f64 * 1e-4 - 20.0) * if i % 3 == 0 { 1e-3 } else { 1.0 }).collect();
        for level in Level::available() {
            let mut found = inputs.clone();
            level.run(Tanh(&mut found));
            for (&x, &found) in inputs.iter().zip(&found) {
                let exact = x.tanh();
                assert!(
                    (found - exact).abs() <= 2.5 * f64::EPSILON * exact.abs(),
                    "tanh({x}) is {exact:e}, not {found:e}"
                );
            }
            let inf = f64::INFINITY;
            let mut xs = [0.0, 1e-300, inf, -inf, f64::NAN];
            level.run(Tanh(&mut xs));
            assert_eq!(xs[..4], [0.0, 1e-300, 1.0, -1.0]);
            assert!(xs[4].is_nan());
            let inf = f32::INFINITY;
            let mut xs = [0.0, 1e-40, inf, -inf, f32::NAN];
            level.run(Tanh(&mut xs));
            assert_eq!(xs[..4], [0.0, 1e-40, 1.0, -1.0]);
            assert!(xs[4].is_nan());
        }
    }

    /// Every f32 from −105 to 0, and from 0 to MAX_EXP: nearer to 0 than 2⁻³⁰ all are 1.
    #[test]
    fn every_f32() {
        const PART: u32 = 1 << 14;
        let tiny = (2f32).powi(-30).to_bits();
        let check = |negative: bool, first: u32| {
            let inputs: Vec<f32> =
                (first..first + PART).map(f32::from_bits).map(|x| if negative { -x } else { x.min(MAX_EXP) }).collect();
            let exact: Vec<f64> = inputs.iter().map(|&x| (x as f64).exp()).collect();
            for level in Level::available() {
                let mut found = inputs.clone();
                level.run(Exp(&mut found));
                for ((&x, &exact), &found) in inputs.iter().zip(&exact).zip(&found) {
                    // Subnormals: to the nearest or the one beside it.
                    let bound = exact * (2.4e-7 + 3e-9 * x.abs() as f64) + 1.5e-45;
                    assert!((found as f64 - exact).abs() < bound, "exp({x}) is {exact:e}, not {found:e} ({level:?})");
                    assert!(x > 0.0 || found <= 1.0, "exp({x}) is {found}");
                }
            }
        };
        for (negative, end) in [(true, 105f32.to_bits()), (false, MAX_EXP.to_bits())] {
            (tiny..end).into_par_iter().step_by(PART as usize).for_each(|first| check(negative, first));
        }
    }

    #[test]
    fn f64_against_std() {
        let inputs: Vec<f64> = (0..2_000_000).map(|i| -745.0 + i as f64 * (785.0 / 2e6)).collect();
        for level in Level::available() {
            let mut found = inputs.clone();
            level.run(Exp(&mut found));
            for (&x, &found) in inputs.iter().zip(&found) {
                let exact = x.exp();
                let ulp = exact.max(f64::MIN_POSITIVE) * f64::EPSILON;
                assert!((found - exact).abs() < 2.0 * ulp, "exp({x}) is {exact:e}, not {found:e} ({level:?})");
            }
        }
    }

    /// What is too great, or so small that it would be subnormal, of the vectors that say so.
    #[test]
    fn saturating_f32() {
        struct Scaled<'a>(&'a [f32]);
        impl Task for Scaled<'_> {
            fn run<S: Simd>(self) {
                if !S::F32::SATURATES {
                    return;
                }
                for &x in self.0 {
                    // SAFETY: the level that runs a task is there.
                    let sum = unsafe {
                        S::enter(
                            #[inline(always)]
                            || S::F32::splat(x).scaled_exp().sum_across(),
                        )
                    };
                    if x > 45.0 {
                        assert!(sum.is_nan() || sum == f32::INFINITY, "exp({x}) is {sum:e}");
                    } else if x < -132.0 {
                        assert_eq!(sum, 0.0, "exp({x})");
                    } else if (-130.0..=MAX_EXP).contains(&x) {
                        let exact = f64::from(x).exp() / f64::from(S::F32::UNSCALE) * S::F32::COUNT as f64;
                        assert!((f64::from(sum) - exact).abs() < 1e-6 * exact, "exp({x}) is {sum:e}, not {exact:e}");
                    }
                }
            }
        }
        let finite = (0..1 << 20).map(|i| f32::from_bits(i << 12)).filter(|x| x.is_finite());
        let xs: Vec<f32> = finite.chain([f32::INFINITY]).flat_map(|x| [x, -x]).collect();
        Level::available().into_iter().for_each(|level| level.run(Scaled(&xs)));
    }

    #[test]
    fn special_values() {
        for level in Level::available() {
            let mut xs = [0.0, -0.0, f32::NEG_INFINITY, f32::MIN, -103.0, f32::NAN, -f32::NAN];
            level.run(Exp(&mut xs));
            assert_eq!(xs[..5], [1.0, 1.0, 0.0, 0.0, (-103f64).exp() as f32], "{level:?}");
            assert!(xs[5].is_nan() && xs[6].is_nan(), "{level:?}");
            let mut xs = [0.0, -0.0, f64::NEG_INFINITY, f64::MIN, -744.0, f64::NAN, -f64::NAN];
            level.run(Exp(&mut xs));
            assert_eq!(xs[..5], [1.0, 1.0, 0.0, 0.0, (-744f64).exp()], "{level:?}");
            assert!(xs[5].is_nan() && xs[6].is_nan(), "{level:?}");
        }
    }
}
