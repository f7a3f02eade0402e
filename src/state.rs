//! The algebra that every softmax here is a schedule of.
//!
//! The state of a set of numbers is `(m, d)`: m their maximum and d = Σ exp(x − r), with the *reference* r taken
//! from m. It has an identity (nothing seen), a push (the online step of Milakov & Gimelshein, 2018) and a merge
//! (the reduction step). `kernels/softmax_state.cuh` is the same algebra for CUDA; both are tested against
//! `tests/state_cases.txt`.
//!
//! Two things keep d exact over lines of any length:
//! - r is m rounded to a multiple of [`GRID`](Real::GRID), so it moves rarely, the states of two parts of a line nearly always share
//!   it, and each time it does move the old sum shrinks by e to the power of the grid or more: errors of rescaling cannot pile
//!   up.
//! - d is a compensated sum (Knuth's two-sum) of short partial sums.

use crate::cpu::exp::{exp_f32, exp_f64, tanh_f32, tanh_f64};
use crate::cpu::lanes::Array;
use std::ops::{Add, Div, Mul, Sub};

/// What a softmax is computed in: f32, or f64 for f64 tensors, one or a vector of them.
pub(crate) trait Number:
    Copy + Send + Sync + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    type Real: Real;

    /// `x` in every lane.
    fn splat(x: Self::Real) -> Self;
    /// The greater of the two, lane by lane; a NaN in `self` is passed over (it reaches the result through the sum).
    fn or_greater(self, max: Self) -> Self;
    /// The lesser of the two, lane by lane, and NaN for NaN; a NaN in `limit` is passed over.
    fn at_most(self, limit: Self) -> Self;
    /// 0 in place of NaN.
    fn nan_to_zero(self) -> Self;
    /// exp(x) for x up to [`MAX_EXP`](crate::cpu::exp::MAX_EXP).
    fn exp(self) -> Self;
    fn tanh(self) -> Self;
    /// ln(x) for x ≥ 1, and NaN for NaN.
    fn ln(self) -> Self;
    /// Whether any lane differs.
    fn differs(self, other: Self) -> bool;
}

/// One f32 or f64.
pub(crate) trait Real: Number<Real = Self> + PartialOrd + Into<f64> {
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;
    /// The lowest finite number.
    const LOWEST: Self;
    /// The reference moves in steps of this. It is 0 up to a maximum of 8, which standard normal logits do not reach. With a grid
    /// of 8 it was 0 up to 4, which they do where a bias is added, and strips of lines that hold their exponentials took 1.2
    /// times as long.
    const GRID: Self;
    /// A number so large that its neighbours are [`GRID`](Self::GRID) apart: adding it rounds to the grid.
    const COARSE: Self;
    fn nearest(x: f64) -> Self;
    /// Of a number from 1 on m in [1, 2) and a whole e with x = m · 2ᵉ.
    fn mantissa_and_exponent(self) -> [Self; 2];
}

macro_rules! real {
    ($real:ident, $exp:path, $tanh:path) => {
        impl Number for $real {
            type Real = $real;
            #[inline(always)]
            fn splat(x: Self) -> Self {
                x
            }
            #[inline(always)]
            fn or_greater(self, max: Self) -> Self {
                if self > max {
                    self
                } else {
                    max
                }
            }
            #[inline(always)]
            fn at_most(self, limit: Self) -> Self {
                if limit < self {
                    limit
                } else {
                    self
                }
            }
            #[inline(always)]
            fn nan_to_zero(self) -> Self {
                if self.is_nan() {
                    0.0
                } else {
                    self
                }
            }
            #[inline(always)]
            fn exp(self) -> Self {
                $exp(Array([self])).0[0]
            }
            #[inline(always)]
            fn tanh(self) -> Self {
                $tanh(Array([self])).0[0]
            }
            #[inline(always)]
            fn ln(self) -> Self {
                $real::ln(self)
            }
            #[inline(always)]
            fn differs(self, other: Self) -> bool {
                self != other
            }
        }

        impl Real for $real {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $real::NEG_INFINITY;
            const LOWEST: Self = $real::MIN;
            const GRID: Self = 16.0;
            const COARSE: Self = 1.5 * Self::GRID / $real::EPSILON;
            fn nearest(x: f64) -> Self {
                x as $real
            }
            #[inline(always)]
            fn mantissa_and_exponent(self) -> [Self; 2] {
                const BITS: u32 = $real::MANTISSA_DIGITS - 1;
                let (one, bits) = ($real::to_bits(1.0), self.to_bits());
                let exponent = (bits >> BITS) as i32 - $real::MAX_EXP + 1;
                [$real::from_bits(bits % (1 << BITS) | one), exponent as $real]
            }
        }
    };
}
real!(f32, exp_f32, tanh_f32);
real!(f64, exp_f64, tanh_f64);

/// What is found of the parts of a line.
pub(crate) trait Merge {
    /// Takes in what was found of another part.
    fn merge(&mut self, other: Self);
}

impl Merge for () {
    #[inline(always)]
    fn merge(&mut self, _: Self) {}
}

/// Of the same lines side by side.
impl<R: Merge> Merge for Vec<R> {
    #[inline(always)]
    fn merge(&mut self, other: Self) {
        // A loop, since it is compiled for the CPU's vectors only where it is inlined: `for_each` is a call here, and then each
        // vector operation in it.
        for (of_one, of_other) in self.iter_mut().zip(other) {
            of_one.merge(of_other);
        }
    }
}

/// A running sum that carries what each addition rounds away into the next (Kahan's, with Knuth's two-sum).
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompensatedSum<N> {
    sum: N,
    carry: N,
}

impl<N: Number> CompensatedSum<N> {
    #[inline(always)]
    pub fn zero() -> Self {
        let zero = N::splat(N::Real::ZERO);
        Self { sum: zero, carry: zero }
    }

    #[inline(always)]
    pub fn add(&mut self, x: N) {
        let x = x + self.carry;
        let sum = self.sum + x;
        let x_part = sum - self.sum;
        let lost = (self.sum - (sum - x_part)) + (x - x_part);
        // What an infinity rounds away is NaN, and no part of the sum.
        self.carry = lost.nan_to_zero();
        self.sum = sum;
    }

    #[inline(always)]
    fn scale(&mut self, factor: N) {
        self.sum = self.sum * factor;
        self.carry = self.carry * factor;
    }

    #[inline(always)]
    pub fn value(self) -> N {
        self.sum + self.carry
    }
}

impl<N: Number> Merge for CompensatedSum<N> {
    #[inline(always)]
    fn merge(&mut self, other: Self) {
        self.add(other.sum);
        self.carry = self.carry + other.carry;
    }
}

/// The root of what exponentials relative to `old` are multiplied with to be relative to `new`. The factor itself may be 0 where
/// what it scales, and the sum divides, is still a number.
#[inline(always)]
pub(crate) fn root_of_rescaling<N: Number>(old: N, new: N) -> N {
    ((old - new) / N::splat(N::Real::ONE + N::Real::ONE)).exp()
}

/// The state `(m, d)` of the elements seen so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SoftmaxState<N> {
    max: N,
    sum: CompensatedSum<N>,
}

impl<N: Number> SoftmaxState<N> {
    /// The identity: nothing seen.
    #[inline(always)]
    pub fn empty() -> Self {
        Self { max: N::splat(N::Real::NEG_INFINITY), sum: CompensatedSum::zero() }
    }

    /// What the exponents of a set with this maximum are taken relative to. Finite where nothing but −inf was seen,
    /// so that exp(−inf − r) is 0 and a NaN survives.
    #[inline(always)]
    fn reference_for(max: N) -> N {
        let (coarse, grid) = (N::splat(N::Real::COARSE), N::splat(N::Real::GRID));
        let max = max.or_greater(N::splat(N::Real::LOWEST));
        // Numbers so large that their neighbours are further apart than the grid round further off than that.
        ((max + coarse) - coarse).at_most(max + grid).or_greater(max - grid)
    }

    #[inline(always)]
    pub fn reference(&self) -> N {
        Self::reference_for(self.max)
    }

    /// Takes `max` into the maximum, rescaling the sum if the reference moves; answers the reference.
    #[inline(always)]
    pub fn grow(&mut self, max: N) -> N {
        let old = self.reference();
        self.max = max.or_greater(self.max);
        let new = self.reference();
        // From an empty state the way up is so long that the factor is 0, and so is the sum (or NaN).
        if new.differs(old) {
            self.sum.scale((old - new).exp());
        }
        new
    }

    /// Adds a part of the sum: exponentials relative to the reference that [`grow`](Self::grow) answered.
    #[inline(always)]
    pub fn add(&mut self, part: N) {
        self.sum.add(part);
    }

    /// Takes in one number.
    #[inline(always)]
    pub fn push(&mut self, x: N) {
        let reference = self.grow(x);
        self.add((x - reference).exp());
    }

    /// Σ exp(x − reference)
    #[inline(always)]
    pub fn sum(&self) -> N {
        self.sum.value()
    }

    /// The state whose parts these are: a maximum, and the sum relative to the reference that it has.
    #[inline(always)]
    pub fn from_parts(max: N, sum: N) -> Self {
        Self { max, sum: CompensatedSum { sum, carry: N::splat(N::Real::ZERO) } }
    }

    #[inline(always)]
    pub fn max(&self) -> N {
        self.max
    }

    #[inline(always)]
    pub fn finish(self) -> Normalizer<N> {
        // Divided rather than multiplied by the inverse, so that a line of one element sums to exactly 1.
        let sum = self.sum() / (self.max - self.reference()).exp();
        Normalizer::new(self.max, sum)
    }
}

impl<N: Number> Merge for SoftmaxState<N> {
    #[inline(always)]
    fn merge(&mut self, mut other: Self) {
        self.grow(other.max);
        other.grow(self.max);
        self.sum.merge(other.sum);
    }
}

impl<R: Real> SoftmaxState<R> {
    /// Whether there was nothing above −∞, and no NaN.
    pub fn is_nothing(&self) -> bool {
        self.max == R::NEG_INFINITY && self.sum() == R::ZERO
    }

    /// [`finish`](Self::finish), or `None` if there [was nothing](Self::is_nothing).
    pub fn normalizer(self) -> Option<Normalizer<R>> {
        (!self.is_nothing()).then(|| self.finish())
    }
}

/// A state with a weighted sum of the same elements: Σ g·exp(x − reference), or plainly Σ g.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weighted<N> {
    pub state: SoftmaxState<N>,
    dot: CompensatedSum<N>,
    /// Whether the terms of the weighted sum are relative to the reference.
    relative: bool,
}

impl<N: Number> Weighted<N> {
    /// The identity: nothing seen.
    #[inline(always)]
    pub fn empty(relative: bool) -> Self {
        Self { state: SoftmaxState::empty(), dot: CompensatedSum::zero(), relative }
    }

    /// As [`SoftmaxState::from_parts`].
    #[inline(always)]
    pub fn from_parts(state: SoftmaxState<N>, dot: N, relative: bool) -> Self {
        Self { state, dot: CompensatedSum { sum: dot, carry: N::splat(N::Real::ZERO) }, relative }
    }

    /// As [`SoftmaxState::grow`].
    #[inline(always)]
    pub fn grow(&mut self, max: N) -> N {
        let old = self.state.reference();
        let new = self.state.grow(max);
        if self.relative && new.differs(old) {
            self.dot.scale((old - new).exp());
        }
        new
    }

    /// Adds parts of both sums, relative to the reference that [`grow`](Self::grow) answered.
    #[inline(always)]
    pub fn add(&mut self, sum: N, dot: N) {
        self.state.add(sum);
        self.dot.add(dot);
    }

    #[inline(always)]
    pub fn dot(&self) -> N {
        self.dot.value()
    }
}

impl<N: Number> Merge for Weighted<N> {
    #[inline(always)]
    fn merge(&mut self, mut other: Self) {
        self.grow(other.state.max);
        other.grow(self.state.max);
        self.state.sum.merge(other.state.sum);
        self.dot.merge(other.dot);
    }
}

/// The finished state of a line: its maximum and Σ exp(x − max).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Normalizer<N> {
    pub max: N,
    pub sum: N,
}

impl<N: Number> Normalizer<N> {
    #[inline(always)]
    pub fn new(max: N, sum: N) -> Self {
        // The maximum itself adds exp(0) = 1: what lies below is rounding, and would let p pass 1.
        Self { max, sum: N::splat(N::Real::ONE).or_greater(sum) }
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
            let mut whole = SoftmaxState::<R>::empty();
            for part in &case.parts {
                let mut state = SoftmaxState::empty();
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
        let mut sum = CompensatedSum::<f32>::zero();
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
