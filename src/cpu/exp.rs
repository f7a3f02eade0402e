//! The exponential, branch-free so that loops over it become vector code on every target.
//!
//! exp(x) = 2ⁿ · exp(r) with n = round(x / ln 2) and r = x − n·ln 2 in ±0.35, taken in two exact steps (Cody & Waite);
//! exp(r) is its Taylor polynomial, long enough to stay under the rounding error. The factor 2ⁿ is applied in two
//! halves, so that subnormal results come out rounded once and are never flushed to zero.

/// exp(x), within 2 ulp. NaN gives NaN.
#[inline(always)]
pub(crate) fn exp_f32(x: f32) -> f32 {
    // Adding 1.5 · 2²³ leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Below, the result rounds to 0; above, it overflows. A NaN passes both comparisons.
    let x = if x < -110.0 { -110.0 } else { x };
    let x = if x > 90.0 { 90.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + coefficient;
    }
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    p * power(half) * power(n.wrapping_sub(half))
}

/// exp(x), within 2 ulp. NaN gives NaN.
#[inline(always)]
pub(crate) fn exp_f64(x: f64) -> f64 {
    // Adding 1.5 · 2⁵² leaves the nearest integer in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    let x = if x < -750.0 { -750.0 } else { x };
    let x = if x > 720.0 { 720.0 } else { x };
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 6_227_020_800.0;
    for coefficient in [
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
        1.0,
    ] {
        p = p * r + coefficient;
    }
    let n = shifted.to_bits() as i32;
    let half = n >> 1;
    let power = |n: i32| f64::from_bits((n.wrapping_add(1023) as u64) << 52);
    p * power(half) * power(n.wrapping_sub(half))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f32_against_f64() {
        let mut worst = 0f64;
        // Every 61st float from −0 down to −105, and up to 90.
        for bits in (0..105f32.to_bits()).step_by(61) {
            for x in [-f32::from_bits(bits), f32::from_bits(bits).min(90.0)] {
                let exact = (x as f64).exp();
                let found = exp_f32(x) as f64;
                if exact > f32::MAX as f64 {
                    assert_eq!(found, f64::INFINITY, "exp({x})");
                    continue;
                }
                let ulp = exact.max(f32::MIN_POSITIVE as f64) * f32::EPSILON as f64;
                worst = worst.max((found - exact).abs() / ulp);
            }
        }
        assert!(worst < 1.5, "{worst} ulp");
    }

    #[test]
    fn f64_against_std() {
        let mut worst = 0f64;
        for i in 0..2_000_000 {
            let x = -745.0 + i as f64 * (1454.0 / 2e6);
            let exact = x.exp();
            let ulp = exact.max(f64::MIN_POSITIVE) * f64::EPSILON;
            worst = worst.max((exp_f64(x) - exact).abs() / ulp);
        }
        assert!(worst < 2.5, "{worst} ulp");
    }

    #[test]
    fn special_values() {
        assert_eq!(exp_f32(0.0), 1.0);
        assert_eq!(exp_f32(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_f32(f32::INFINITY), f32::INFINITY);
        assert!(exp_f32(f32::NAN).is_nan() && exp_f32(-f32::NAN).is_nan());
        assert_eq!(exp_f32(-103.0), (-103f64).exp() as f32);
        assert_eq!(exp_f64(0.0), 1.0);
        assert_eq!(exp_f64(f64::NEG_INFINITY), 0.0);
        assert_eq!(exp_f64(f64::INFINITY), f64::INFINITY);
        assert!(exp_f64(f64::NAN).is_nan() && exp_f64(-f64::NAN).is_nan());
        assert_eq!(exp_f64(-744.0), (-744f64).exp());
    }
}
