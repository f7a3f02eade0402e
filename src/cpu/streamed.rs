//! Results that are written past the caches: otherwise memory is read before it is written.

use super::lanes::{Lanes, Pack, MAX_LANES};
use super::level::Simd;
use super::memory::{to_line, Elements};
use super::threads::at_shared_work;
use super::Element;
use crate::state::Real;

/// From this size on it pays: 2048 × 1024 f32s take one thread of a Zen 5 0.22 ms and past the caches 0.20, 2560 × 1024 0.33 and 0.25, 3584 ×
/// 1024 0.60 and 0.35. Read right afterwards, too, they take 0.39 and 0.44, 0.54 and 0.55, 0.90 and 0.81.
const STREAMS_FROM: usize = 10 << 20;

/// From this size on memory is most often fresh from the system, which has cleared it, so that it is in the caches: gradients of 49152 × 128
/// f32s took one thread of a Zen 5 1.68 ms and past the caches 1.49, but of 100000 × 128 6.27 and 6.70.
const FRESH_FROM: usize = 32 << 20;

/// Whether lines of `len` results, one after the other, had better be written so. What may take the place of the `input` is in the caches
/// then. Memory takes what several threads write so no faster than from one: two take 0.41 ms for 4096 × 1024 f32s, and 0.26 by way of the
/// caches.
pub(super) fn streams<S: Simd, T: Element>(input: Option<&Elements<T>>, out: &Elements<T>, len: usize) -> bool {
    let vectors = T::Lanes::<S>::STREAMS && size_of::<T>() == size_of::<T::Real>();
    let in_place = input.is_some_and(|input| input.at(0, 0) == out.at(0, 0));
    let large = (STREAMS_FROM..FRESH_FROM).contains(&out.bytes());
    vectors && len.is_multiple_of(T::Lanes::<S>::COUNT) && large && !in_place && !at_shared_work()
}

/// Neighbouring vectors that are written as they come. What is written at once is aligned, and lies across two of them: what is left of
/// one waits for the next.
pub(super) struct Streamed<V: Lanes> {
    start: *mut V::Real,
    /// Where the next vector is to be.
    to: *mut V::Real,
    /// How many of a vector's first lanes lie before an aligned address.
    head: usize,
    before: V,
}

impl<V: Lanes> Streamed<V> {
    /// From this place on.
    pub fn new(start: *mut V::Real) -> Self {
        Self { start, to: start, head: to_line(start) % V::COUNT, before: V::splat(V::Real::ZERO) }
    }

    /// # Safety
    /// The CPU has the instructions of `V`, and where this vector is to be is room for it.
    #[inline(always)]
    pub unsafe fn put(&mut self, vector: V) {
        // SAFETY of the block: a part of this vector's place or, if it is not the first, of the one's before.
        unsafe {
            if self.to == self.start {
                vector.store_part(self.to, self.head);
            } else {
                vector.stream(self.before, self.head, self.to.add(self.head).sub(V::COUNT));
            }
        }
        self.before = vector;
        self.to = self.to.wrapping_add(V::COUNT);
    }

    /// Writes what is left.
    ///
    /// # Safety
    /// As of [`put`](Self::put).
    #[inline(always)]
    pub unsafe fn finish(self) {
        if self.to == self.start {
            return;
        }
        let mut last = [V::Real::ZERO; MAX_LANES];
        let left = V::COUNT - self.head;
        // SAFETY: the end of the last vector's place, and no vector has more lanes.
        unsafe {
            self.before.store(last.as_mut_ptr());
            self.to.sub(left).copy_from_nonoverlapping(last.as_ptr().add(self.head), left);
        }
        V::streamed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::lanes::Array;

    /// What comes is there, wherever it begins, and nothing beside it.
    fn check<V: Lanes<Real = f32>>() {
        const MOST: usize = 5 * MAX_LANES;
        let numbers: Vec<f32> = (0..MOST).map(|i| i as f32).collect();
        for start in 0..MAX_LANES {
            for vectors in 0..=4 {
                let (mut memory, count) = ([-1f32; MOST + 2 * MAX_LANES], vectors * V::COUNT);
                // SAFETY: there is room for them, and the CPU has the instructions.
                unsafe {
                    let mut streamed = Streamed::<V>::new(memory.as_mut_ptr().add(start));
                    (0..vectors).for_each(|i| streamed.put(V::load(numbers.as_ptr().add(i * V::COUNT))));
                    streamed.finish();
                }
                assert_eq!(memory[start..start + count], numbers[..count]);
                assert!(memory[..start].iter().chain(&memory[start + count..]).all(|&x| x == -1.0));
            }
        }
    }

    #[test]
    fn vectors_are_written_wherever_they_begin() {
        check::<Array<f32, 8>>();
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") {
            check::<crate::cpu::x86::F32x16>();
        }
    }
}
