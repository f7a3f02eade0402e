//! The algebra that every softmax here is a schedule of.
//!
//! The state of a set of numbers is `(m, d)`: m their maximum and d = Σ exp(x − r), with the *reference* r taken
//! from m. It has an identity (nothing seen), a push (the online step of Milakov & Gimelshein, 2018) and a merge
//! (the reduction step). `kernels/softmax_state.cuh` is the same algebra for CUDA; both are tested against
//! `tests/state_cases.txt`.
//!
//! Two things keep d exact over lines of any length:
//! - r is m rounded to a multiple of [`GRID`], so it moves rarely, the states of two parts of a line nearly always share
//!   it, and each time it does move the old sum shrinks by e⁸ or more: errors of rescaling cannot pile up.
//! - d is a compensated sum (Knuth's two-sum) of short partial sums.

use std::ops::{Add, Div, Mul, Sub};

/// The number type a softmax is computed in: f32, or f64 for f64 tensors.
pub(crate) trait Real:
    Copy + Send + Sync + PartialOrd + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;
    fn recip(self) -> Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn is_finite(self) -> bool;
    /// The nearest multiple of [`GRID`].
    fn round_to_grid(self) -> Self;

    /// The greater of the two; a NaN in `self` is passed over (it reaches the result through the sum).
    #[inline(always)]
    fn or_greater(self, max: Self) -> Self {
        if self > max {
            self
        } else {
            max
        }
    }
}

/// The reference moves in steps of this.
const GRID: f32 = 8.0;

macro_rules! real {
    ($real:ident, $exp:path) => {
        impl Real for $real {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $real::NEG_INFINITY;
            fn recip(self) -> Self {
                $real::recip(self)
            }
            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }
            fn ln(self) -> Self {
                $real::ln(self)
            }
            fn is_finite(self) -> bool {
                $real::is_finite(self)
            }
            fn round_to_grid(self) -> Self {
                (self * (1.0 / GRID) as $real).round_ties_even() * GRID as $real
            }
        }
    };
}
real!(f32, crate::cpu::exp::exp_f32);
real!(f64, crate::cpu::exp::exp_f64);

/// A running sum that carries what each addition rounds away into the next (Kahan's, with Knuth's two-sum).
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompensatedSum<R> {
    sum: R,
    carry: R,
}

impl<R: Real> CompensatedSum<R> {
    pub const ZERO: Self = Self { sum: R::ZERO, carry: R::ZERO };

    #[inline(always)]
    pub fn add(&mut self, x: R) {
        let x = x + self.carry;
        let sum = self.sum + x;
        let x_part = sum - self.sum;
        let lost = (self.sum - (sum - x_part)) + (x - x_part);
        // What an infinity rounds away is NaN, and no part of the sum.
        self.carry = if sum.is_finite() { lost } else { R::ZERO };
        self.sum = sum;
    }

    pub fn merge(&mut self, other: Self) {
        self.add(other.sum);
        self.carry = self.carry + other.carry;
    }

    fn scale(&mut self, factor: R) {
        self.sum = self.sum * factor;
        self.carry = self.carry * factor;
    }

    pub fn value(self) -> R {
        self.sum + self.carry
    }
}

/// The state `(m, d)` of the elements seen so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SoftmaxState<R> {
    max: R,
    sum: CompensatedSum<R>,
}

impl<R: Real> SoftmaxState<R> {
    /// The identity: nothing seen.
    pub const EMPTY: Self = Self { max: R::NEG_INFINITY, sum: CompensatedSum::ZERO };

    /// What the exponents of a set with this maximum are taken relative to. Finite where nothing but −inf was seen,
    /// so that exp(−inf − r) is 0 and a NaN survives.
    #[inline(always)]
    fn reference_for(max: R) -> R {
        if max == R::NEG_INFINITY {
            R::ZERO
        } else {
            max.round_to_grid()
        }
    }

    #[inline(always)]
    pub fn reference(&self) -> R {
        Self::reference_for(self.max)
    }

    /// Takes `max` into the maximum, rescaling the sum if the reference moves; answers the reference.
    #[inline(always)]
    pub fn grow(&mut self, max: R) -> R {
        let old = Self::reference_for(self.max);
        // A NaN is never the maximum: it reaches the result through the sum.
        if max > self.max {
            let new = Self::reference_for(max);
            // The sum of an empty state is 0 (or NaN) relative to anything.
            if new != old && self.max != R::NEG_INFINITY {
                self.sum.scale((old - new).exp());
            }
            self.max = max;
            return new;
        }
        old
    }

    /// Adds a part of the sum: exponentials relative to the reference that [`grow`](Self::grow) answered.
    #[inline(always)]
    pub fn add(&mut self, part: R) {
        self.sum.add(part);
    }

    /// The state of the union of two sets.
    pub fn merge(&mut self, mut other: Self) {
        self.grow(other.max);
        other.grow(self.max);
        self.sum.merge(other.sum);
    }

    pub fn finish(self) -> Normalizer<R> {
        // Divided rather than multiplied by the inverse, so that a line of one element sums to exactly 1.
        let sum = self.sum.value() / (self.max - self.reference()).exp();
        Normalizer::new(self.max, sum)
    }
}

/// The finished state of a line: its maximum and Σ exp(x − max).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Normalizer<R> {
    pub max: R,
    pub sum: R,
}

impl<R: Real> Normalizer<R> {
    fn new(max: R, sum: R) -> Self {
        // The maximum itself adds exp(0) = 1: what lies below is rounding, and would let p pass 1.
        let sum = if sum < R::ONE { R::ONE } else { sum };
        Self { max, sum }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// One case: a set of numbers given in parts, its maximum and Σ exp(x − maximum).
    pub(crate) struct Case {
        pub parts: Vec<Vec<f64>>,
        pub max: f64,
        pub sum: f64,
    }

    /// The table that this algebra and the CUDA header are both held to: `max ; sum ; part | part | …`.
    pub(crate) fn cases() -> Vec<Case> {
        let number = |text: &str| text.trim().parse::<f64>().unwrap_or_else(|e| panic!("{text:?}: {e}"));
        include_str!("../tests/state_cases.txt")
            .lines()
            .filter(|line| !line.starts_with('#') && !line.trim().is_empty())
            .map(|line| {
                let fields: Vec<&str> = line.split(';').collect();
                let [max, sum, parts] = fields[..] else { panic!("not a case: {line}") };
                let parts = parts.split('|').map(|part| part.split_whitespace().map(number).collect());
                Case { parts: parts.collect(), max: number(max), sum: number(sum) }
            })
            .collect()
    }

    pub(crate) fn assert_close(found: f64, expected: f64, tolerance: f64, what: &str) {
        let same = found == expected || (found.is_nan() && expected.is_nan());
        assert!(same || ((found - expected) / expected).abs() <= tolerance, "{what}: {found} is not {expected}");
    }

    fn check<R: Real + Into<f64>>(narrow: fn(f64) -> R, tolerance: f64) {
        for (index, case) in cases().iter().enumerate() {
            let mut whole = SoftmaxState::<R>::EMPTY;
            for part in &case.parts {
                let mut state = SoftmaxState::EMPTY;
                for &x in part {
                    let x = narrow(x);
                    let reference = state.grow(x);
                    state.add((x - reference).exp());
                }
                whole.merge(state);
            }
            assert_close(whole.max.into(), case.max, 0.0, &format!("maximum of case {index}"));
            let Normalizer { max, sum } = whole.finish();
            assert_close(max.into(), case.max, 0.0, &format!("finished maximum of case {index}"));
            assert_close(sum.into(), case.sum, tolerance, &format!("sum of case {index}"));
        }
    }

    #[test]
    fn table_of_cases() {
        check::<f32>(|x| x as f32, 5e-7);
        check::<f64>(|x| x, 2e-15);
    }

    #[test]
    fn compensated_sum_keeps_what_rounding_loses() {
        let mut sum = CompensatedSum::<f32>::ZERO;
        // A plain sum stays at 2^24; a carry that is a plain sum itself drifts.
        sum.add(16_777_216.0);
        for _ in 0..10_000_000 {
            sum.add(0.3);
        }
        let exact = 16_777_216.0 + 1e7 * 0.3f32 as f64;
        assert!((sum.value() as f64 - exact).abs() <= 2.0, "{} for {exact}", sum.value());
        sum.add(f32::INFINITY);
        assert_eq!(sum.value(), f32::INFINITY);
    }
}
