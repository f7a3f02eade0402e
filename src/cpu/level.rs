//! Which vector instructions there are, found out at run time.

use super::lanes::{Array, Lanes, Pack, Words};
use super::threads;
use half::{bf16, f16};
use std::sync::OnceLock;

/// The vectors of one level of instructions.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    type F32: Lanes<Real = f32>;
    type F64: Lanes<Real = f64>;
    /// As many as `F32` has lanes: f16s or bf16s in memory.
    type U16: Pack<Item = u16>;
    type Words: Words;
    /// The level of vectors half as long, if there are.
    type Half: Simd;

    fn f16_to_f32(x: Self::U16) -> Self::F32;
    fn f32_to_f16(x: Self::F32) -> Self::U16;
    fn bf16_to_f32(x: Self::U16) -> Self::F32;
    fn f32_to_bf16(x: Self::F32) -> Self::U16;

    /// Whether [`prefetch`](Self::prefetch) does anything.
    const PREFETCHES: bool = true;
    /// Whether each kind of logits that models often ask for has loops of its own, and each length of short lines. Where nearly all CPUs have
    /// better vectors than these, their machine code would be a third of the crate's.
    const SPECIALISED: bool = true;

    /// Asks for what is at this address, if anything is, to be fetched from memory.
    fn prefetch<T>(at: *const T);

    /// Calls `f` with the instructions of the level: what is inlined into `f` is compiled for them.
    ///
    /// # Safety
    /// The CPU has them.
    unsafe fn enter<R>(f: impl FnOnce() -> R) -> R;
}

/// Two registers, so that not each instruction waits for the one before; or one, for half of the machine code, where it is not
/// [specialised](Simd::SPECIALISED).
const PORTABLE_LANES: usize = if Portable::SPECIALISED { 8 } else { 4 };

/// Vectors that the compiler makes instructions of every CPU of the target of.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Simd for Portable {
    type F32 = Array<f32, PORTABLE_LANES>;
    type F64 = Array<f64, { PORTABLE_LANES / 2 }>;
    type U16 = Array<u16, PORTABLE_LANES>;
    type Words = [u64; 8];
    type Half = Self;

    #[inline(always)]
    fn f16_to_f32(x: Self::U16) -> Self::F32 {
        widened(x)
    }
    #[inline(always)]
    fn f32_to_f16(x: Self::F32) -> Self::U16 {
        narrowed(x)
    }
    #[inline(always)]
    fn bf16_to_f32(x: Self::U16) -> Self::F32 {
        x.each(|bits| f32::from_bits((bits as u32) << 16))
    }
    #[inline(always)]
    fn f32_to_bf16(x: Self::F32) -> Self::U16 {
        x.each(|x| bf16::from_f32_const(x).to_bits())
    }
    const PREFETCHES: bool = false;
    const SPECIALISED: bool = !cfg!(target_arch = "x86_64");

    #[inline(always)]
    fn prefetch<T>(_: *const T) {}
    #[inline(always)]
    unsafe fn enter<R>(f: impl FnOnce() -> R) -> R {
        f.portably()
    }
}

/// What [`Simd::enter`] calls: functions of their own, and methods of the closure, since the compiler works on modules side by side, and
/// takes a method to that of its type.
pub(super) trait Enter<R> {
    fn portably(self) -> R;

    /// # Safety
    /// The CPU has them.
    #[cfg(target_arch = "x86_64")]
    unsafe fn with_avx2(self) -> R;

    /// # Safety
    /// The CPU has them.
    #[cfg(target_arch = "x86_64")]
    unsafe fn with_avx512(self) -> R;
}

impl<R, F: FnOnce() -> R> Enter<R> for F {
    #[inline(never)]
    fn portably(self) -> R {
        self()
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn with_avx2(self) -> R {
        self()
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn with_avx512(self) -> R {
        self()
    }
}

/// f16s as f32s. Called, since it is long and there are many places that do.
#[inline(never)]
fn widened<const N: usize>(x: Array<u16, N>) -> Array<f32, N> {
    x.each(|bits| f16::from_bits(bits).to_f32_const())
}

/// The nearest f16s.
#[inline(never)]
fn narrowed<const N: usize>(x: Array<f32, N>) -> Array<u16, N> {
    x.each(|x| f16::from_f32_const(x).to_bits())
}

/// Work that is written once for all levels.
pub(crate) trait Task {
    /// What runs [inside](Simd::enter) may take it that the CPU has the instructions of `S`.
    fn run<S: Simd>(self);
}

/// The level that every CPU of the target has, and its name.
#[cfg(not(neon))]
type Base = Portable;
#[cfg(neon)]
type Base = super::neon::Neon;
const BASE: &str = if cfg!(neon) { "neon" } else { "portable" };

/// A level that this CPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Level(Name);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name {
    Base,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// All that this CPU has, the best last.
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut levels = vec![Self(Name::Base)];
        #[cfg(target_arch = "x86_64")]
        {
            if super::x86::has_avx2() {
                levels.push(Self(Name::Avx2));
            }
            if super::x86::has_avx2() && super::x86::has_avx512() {
                levels.push(Self(Name::Avx512));
            }
        }
        levels
    }

    /// The best one there is or, where the environment variable `CANDLE_SOFTMAX_CPU` is `avx2` or `portable` at the first
    /// call, the best up to that: for tests of what runs on other machines. Any other value is no limit, and aarch64 has one level.
    pub fn best() -> Self {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| Self::up_to(&std::env::var("CANDLE_SOFTMAX_CPU").unwrap_or_default()))
    }

    fn up_to(limit: &str) -> Self {
        let levels = Self::available();
        let count = match limit {
            "portable" => 1,
            "avx2" => 2,
            _ => levels.len(),
        };
        levels[count.min(levels.len()) - 1]
    }

    pub fn name(self) -> &'static str {
        match self.0 {
            Name::Base => BASE,
            #[cfg(target_arch = "x86_64")]
            Name::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Name::Avx512 => "avx512",
        }
    }

    pub fn run(self, task: impl Task + Send) {
        threads::with_room(
            #[inline(always)]
            || match self.0 {
                Name::Base => task.run::<Base>(),
                #[cfg(target_arch = "x86_64")]
                Name::Avx2 => task.run::<super::x86::Avx2>(),
                #[cfg(target_arch = "x86_64")]
                Name::Avx512 => task.run::<super::x86::Avx512>(),
            },
        )
    }
}

/// Whether the CPU is one of Intel's.
pub(super) fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // The instruction takes a virtual machine microseconds.
        static IS: OnceLock<bool> = OnceLock::new();
        *IS.get_or_init(super::x86::is_intel)
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{Number, Real};

    #[test]
    fn the_environment_sets_an_upper_limit() {
        let all = Level::available();
        assert_eq!(Level::up_to("portable"), all[0]);
        assert_eq!(Level::up_to(""), all[all.len() - 1]);
        assert_eq!(Level::up_to("avx512"), all[all.len() - 1]);
        if let Some(&avx2) = all.get(1) {
            assert_eq!(Level::up_to("avx2"), avx2);
        }
    }

    struct Halves;

    impl Task for Halves {
        fn run<S: Simd>(self) {
            // SAFETY: the level that runs a task is there.
            unsafe { S::enter(halves::<S>) }
        }
    }

    /// Widened and rounded as half's own conversions do, for every half and for floats about them.
    fn halves<S: Simd>() {
        for bits in 0..=u16::MAX {
            let mut wide = vec![0f32; S::F32::COUNT];
            let mut back = vec![0u16; S::F32::COUNT];
            let (from, to) = (vec![bits; S::F32::COUNT], wide.as_mut_ptr());
            // SAFETY: all of the vectors hold COUNT elements.
            unsafe { S::f16_to_f32(S::U16::load(from.as_ptr())).store(to) };
            let exact = f16::from_bits(bits).to_f32_const();
            assert!(wide[0] == exact || wide[0].is_nan() && exact.is_nan(), "f16 {bits:#x}: {}", wide[0]);
            unsafe { S::bf16_to_f32(S::U16::load(from.as_ptr())).store(to) };
            let exact = bf16::from_bits(bits).to_f32_const();
            assert!(wide[0] == exact || wide[0].is_nan() && exact.is_nan(), "bf16 {bits:#x}: {}", wide[0]);
            let near = |x: f32| {
                [-0x1001, -0x1000, -0xfff, -1, 0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001]
                    .map(|step: i32| f32::from_bits(x.to_bits().wrapping_add_signed(step)))
            };
            for x in near(exact).into_iter().chain(near(f16::from_bits(bits).to_f32_const())) {
                wide.fill(x);
                unsafe { S::f32_to_f16(S::F32::load(wide.as_ptr())).store(back.as_mut_ptr()) };
                let (found, exact) = (f16::from_bits(back[0]), f16::from_f32_const(x));
                assert!(found.to_bits() == exact.to_bits() || found.is_nan() && exact.is_nan(), "{x:e}: {found}");
                unsafe { S::f32_to_bf16(S::F32::load(wide.as_ptr())).store(back.as_mut_ptr()) };
                let (found, exact) = (bf16::from_bits(back[0]), bf16::from_f32_const(x));
                assert!(found.to_bits() == exact.to_bits() || found.is_nan() && exact.is_nan(), "{x:e}: {found}");
            }
        }
    }

    struct Parts;

    impl Task for Parts {
        fn run<S: Simd>(self) {
            fn parts<S: Simd>() {
                // Counts that the compiler knows, too.
                part::<S::F32, 1>();
                part::<S::F32, 3>();
                part::<S::F64, 1>();
                part::<S::F64, 3>();
                part::<S::U16, 1>();
                part::<S::U16, 3>();
                part::<S::U16, 7>();
                rounded_part::<S, 1>();
                rounded_part::<S, 2>();
                rounded_part::<S, 5>();
                (1..=S::U16::COUNT).for_each(part_of::<S::U16>);
                (1..=S::F32::COUNT).for_each(part_of::<S::F32>);
                (1..=S::F64::COUNT).for_each(part_of::<S::F64>);
            }
            // SAFETY: the level that runs a task is there.
            unsafe { S::enter(parts::<S>) }
        }
    }

    /// If a vector has so many.
    #[inline(always)]
    fn part<P: Pack<Item: From<u8> + PartialEq + std::fmt::Debug>, const COUNT: usize>() {
        if COUNT <= P::COUNT {
            part_of::<P>(COUNT)
        }
    }

    /// A part of what was just rounded to half precision, likewise.
    #[inline(always)]
    fn rounded_part<S: Simd, const COUNT: usize>() {
        if COUNT > S::U16::COUNT {
            return;
        }
        let (bf16_one, f16_one) = (bf16::ONE.to_bits(), f16::ONE.to_bits());
        let ones = S::F32::splat(std::hint::black_box(1.0));
        for (bits, one) in [(S::f32_to_bf16(ones), bf16_one), (S::f32_to_f16(ones), f16_one)] {
            let mut to = vec![99u16; 2 * S::U16::COUNT];
            // SAFETY: there is room for two vectors.
            unsafe { bits.store_part(std::hint::black_box(to.as_mut_ptr()), COUNT) };
            let expected: Vec<u16> = (0..to.len()).map(|i| if i < COUNT { one } else { 99 }).collect();
            assert_eq!(to, expected, "{COUNT} of {}", S::U16::COUNT);
        }
    }

    /// What is read and written of a part is that part alone.
    #[inline(always)]
    fn part_of<P: Pack<Item: From<u8> + PartialEq + std::fmt::Debug>>(count: usize) {
        let items = |of: fn(usize) -> usize| (0..2 * P::COUNT).map(|i| P::Item::from(of(i) as u8)).collect::<Vec<_>>();
        let (from, mut to) = (items(|i| i + 1), items(|_| 99));
        // SAFETY: both hold more than a vector.
        unsafe {
            P::load(std::hint::black_box(from.as_ptr())).store_part(std::hint::black_box(to.as_mut_ptr()), count)
        };
        let expected: Vec<P::Item> =
            (0..2 * P::COUNT).map(|i| P::Item::from(if i < count { i + 1 } else { 99 } as u8)).collect();
        assert_eq!(to, expected, "{count} of {}", P::COUNT);
        // SAFETY: as above.
        unsafe { P::load_part(std::hint::black_box(from.as_ptr()), count).store(to.as_mut_ptr()) };
        let expected: Vec<P::Item> =
            (0..P::COUNT).map(|i| P::Item::from(if i < count { i + 1 } else { 0 } as u8)).collect();
        assert_eq!(to[..P::COUNT], expected, "{count} of {}", P::COUNT);
    }

    #[test]
    fn parts_of_vectors() {
        Level::available().into_iter().for_each(|level| level.run(Parts));
    }

    struct Each;

    impl Task for Each {
        fn run<S: Simd>(self) {
            /// Lane j of vector i is made by `of(i, j)`: no two of them, and no two sums, are the same.
            #[inline(always)]
            fn each<V: Lanes>() {
                let of = |i: usize, j: usize| ((i * 7 + j * 11) % 16) as f64 * 1024.0 + (i * 16 + j) as f64;
                let lanes = |i: usize| (0..V::COUNT).map(move |j| of(i, j));
                for count in 1..=V::COUNT {
                    let numbers: Vec<V::Real> = (0..count).flat_map(lanes).map(V::Real::nearest).collect();
                    // SAFETY: a chunk is as long as a vector.
                    let vectors: Vec<V> =
                        numbers.chunks_exact(V::COUNT).map(|chunk| unsafe { V::load(chunk.as_ptr()) }).collect();
                    for (found, expected) in [
                        (
                            V::max_of_each(&vectors),
                            (0..count).map(|i| lanes(i).fold(0.0, f64::max)).collect::<Vec<_>>(),
                        ),
                        (V::sum_of_each(&vectors), (0..count).map(|i| lanes(i).sum()).collect()),
                    ] {
                        let mut lanes = vec![V::Real::ZERO; V::COUNT];
                        // SAFETY: there is room for a vector.
                        unsafe { found.store(lanes.as_mut_ptr()) };
                        for (found, expected) in lanes.into_iter().zip(expected) {
                            assert!(found == V::Real::nearest(expected), "not {expected}, of {count} vectors");
                        }
                    }
                }
            }
            // SAFETY: the level that runs a task is there.
            unsafe {
                S::enter(
                    #[inline(always)]
                    || {
                        each::<S::F32>();
                        each::<S::F64>();
                    },
                )
            }
        }
    }

    #[test]
    fn maxima_and_sums_of_each_vector() {
        Level::available().into_iter().for_each(|level| level.run(Each));
    }

    #[test]
    fn conversions() {
        Level::available().into_iter().for_each(|level| level.run(Halves));
    }
}
