//! The random bits of [`Dropout`]: Philox4x32-7, a function of a counter and a key, for several counters at once.

use super::lanes::Words;
use super::level::{Portable, Simd};
use crate::fused::Dropout;
use crate::lines::Lines;

/// How many counters are worked on at once.
const AT_ONCE: usize = 8;
/// Elements for which a counter gives 16 bits each.
pub(super) const PER_COUNTER: usize = 8;
/// Elements whose bits are made at once along a line.
const GROUP: usize = AT_ONCE * PER_COUNTER;

const LOW: u64 = 0xffff_ffff;

/// So many vectors of counters are worked on in turn: each waits for itself from round to round.
const IN_TURN: usize = 2;

/// Of each of `N` times eight counters the 128 bits, given as four numbers below 2³²: those of elements 0 to 3 of its eight, the first
/// lowest, and those of 4 to 7. The CPU has the instructions of `W`.
#[inline(always)]
fn philox<W: Words, const N: usize>(counters: [[[u64; AT_ONCE]; 4]; N], [mut k0, mut k1]: [u32; 2]) -> [[W; 2]; N] {
    let mut words = [[W::of([0; AT_ONCE]); 4]; N];
    // Loops, since what `map` calls is not always inlined, and then not compiled for the CPU's vectors.
    for (words, counters) in words.iter_mut().zip(counters) {
        for (word, counter) in words.iter_mut().zip(counters) {
            *word = W::of(counter);
        }
    }
    for _ in 0..7 {
        let keys = [k0, k1].map(|key| W::of([u64::from(key); AT_ONCE]));
        for [c0, c1, c2, c3] in &mut words {
            // The upper halves are of no account: the products do not ask for them.
            let (p0, p1) = (c0.products(0xd251_1f53), c2.products(0xcd9e_8d57));
            *c0 = p1.upper_halves().xor(*c1).xor(keys[0]);
            *c2 = p0.upper_halves().xor(*c3).xor(keys[1]);
            (*c1, *c3) = (p1, p0);
        }
        (k0, k1) = (k0.wrapping_add(0x9e37_79b9), k1.wrapping_add(0xbb67_ae85));
    }
    let mut bits = [[W::of([0; AT_ONCE]); 2]; N];
    for (bits, [c0, c1, c2, c3]) in bits.iter_mut().zip(words) {
        *bits = [c0.with_upper_halves(c1), c2.with_upper_halves(c3)];
    }
    bits
}

#[inline(always)]
fn keys(seed: u64) -> [u32; 2] {
    [seed as u32, (seed >> 32) as u32]
}

/// Room for what [`along`] writes for `len` elements.
pub(super) const fn room(len: usize) -> usize {
    (len + PER_COUNTER).next_multiple_of(GROUP) + GROUP
}

/// The counters of a group of elements of a line.
#[inline(always)]
fn counters_along(line: usize, first: usize) -> [[u64; AT_ONCE]; 4] {
    let mut c0 = [0; AT_ONCE];
    for (i, c0) in c0.iter_mut().enumerate() {
        *c0 = (first + i) as u64 & LOW;
    }
    [c0, [line as u64 & LOW; AT_ONCE], [line as u64 >> 32; AT_ONCE], [0; AT_ONCE]]
}

/// Whether each element of a group is kept, whose bits these are.
#[inline(always)]
fn keep_of<W: Words>([a, b]: [W; 2], threshold: u32, keep: &mut [u8]) {
    let (a, b) = (a.to_array(), b.to_array());
    let mut pairs = [0u64; 2 * AT_ONCE];
    for i in 0..AT_ONCE {
        (pairs[2 * i], pairs[2 * i + 1]) = (a[i].to_le(), b[i].to_le());
    }
    // SAFETY: as many bytes; any bits are u16s.
    let bits: [u16; GROUP] = unsafe { std::mem::transmute(pairs) };
    for (keep, bits) in keep[..GROUP].iter_mut().zip(bits) {
        *keep = u8::from(u16::from_le(bits) >= threshold as u16);
    }
}

/// Whether each of the elements `start..start + len` of a line is kept, as bytes 0 and 1 in `keep`; answers where in `keep`
/// the first one's is. In a function of its own, as what follows: it is long, and there are many places that call it.
///
/// # Safety
/// The CPU has the instructions of `S`.
pub(super) unsafe fn along<S: Simd>(dropout: Dropout, line: usize, start: usize, len: usize, keep: &mut [u8]) -> usize {
    // SAFETY: as promised by the caller.
    unsafe {
        S::enter(
            #[inline(always)]
            || along_inside::<S>(dropout, line, start, len, keep),
        )
    }
}

#[inline(always)]
fn along_inside<S: Simd>(dropout: Dropout, line: usize, start: usize, len: usize, keep: &mut [u8]) -> usize {
    let (first, skipped) = (start / PER_COUNTER, start % PER_COUNTER);
    let groups = (skipped + len).div_ceil(GROUP);
    let counters = |group: usize| counters_along(line, first + group * AT_ONCE);
    let mut keep = keep[..groups * GROUP].chunks_exact_mut(IN_TURN * GROUP);
    let mut group = 0;
    for keep in &mut keep {
        let bits = philox::<S::Words, IN_TURN>([counters(group), counters(group + 1)], keys(dropout.seed));
        for (keep, bits) in keep.chunks_exact_mut(GROUP).zip(bits) {
            keep_of(bits, dropout.threshold, keep);
        }
        group += IN_TURN;
    }
    for keep in keep.into_remainder().chunks_exact_mut(GROUP) {
        let [bits] = philox::<S::Words, 1>([counters(group)], keys(dropout.seed));
        keep_of(bits, dropout.threshold, keep);
        group += 1;
    }
    skipped
}

/// The same for all elements of `count` lines, each of which has [`room`] in `keep`.
///
/// # Safety
/// As of that.
pub(super) unsafe fn along_each<S: Simd>(dropout: Dropout, first: usize, count: usize, len: usize, keep: &mut [u8]) {
    // SAFETY: as promised by the caller.
    unsafe {
        S::enter(
            #[inline(always)]
            || along_each_inside::<S>(dropout, first, count, len, keep),
        )
    }
}

#[inline(always)]
fn along_each_inside<S: Simd>(dropout: Dropout, first: usize, count: usize, len: usize, keep: &mut [u8]) {
    let mut lines = (first..first + count).zip(keep.chunks_exact_mut(room(len)));
    while let Some((line, keep)) = lines.next() {
        // Groups of one line are worked on in turn where it has several.
        let next = if len <= GROUP { lines.next() } else { None };
        let Some((next, next_keep)) = next else {
            along_inside::<S>(dropout, line, 0, len, keep);
            continue;
        };
        let counters = [counters_along(line, 0), counters_along(next, 0)];
        let [bits, next_bits] = philox::<S::Words, IN_TURN>(counters, keys(dropout.seed));
        keep_of(bits, dropout.threshold, keep);
        keep_of(next_bits, dropout.threshold, next_keep);
    }
}

/// The same for elements `8 · group` to `8 · group + 7` of `count` lines side by side from `line` on: that of element i of the
/// group in `keep[i]`.
///
/// # Safety
/// As of those.
pub(super) unsafe fn across<S: Simd, const N: usize>(
    dropout: Dropout,
    group: usize,
    line: usize,
    count: usize,
    keep: &mut [[u8; N]; PER_COUNTER],
) {
    // SAFETY: as promised by the caller.
    unsafe {
        S::enter(
            #[inline(always)]
            || across_inside::<S, N>(dropout, group, line, count, keep),
        )
    }
}

#[inline(always)]
fn across_inside<S: Simd, const N: usize>(
    dropout: Dropout,
    group: usize,
    line: usize,
    count: usize,
    keep: &mut [[u8; N]; PER_COUNTER],
) {
    for at in (0..count).step_by(AT_ONCE) {
        let line = |i: usize| (line + at + i) as u64;
        let (c1, c2) = (std::array::from_fn(|i| line(i) & LOW), std::array::from_fn(|i| line(i) >> 32));
        let [halves] =
            philox::<S::Words, 1>([[[group as u64 & LOW; AT_ONCE], c1, c2, [0; AT_ONCE]]], keys(dropout.seed));
        for (keep, kept) in keep.iter_mut().zip(S::Words::at_least(halves, dropout.threshold as u16)) {
            match keep[at..].first_chunk_mut() {
                Some(keep) => *keep = kept,
                None => keep[at..].copy_from_slice(&kept[..N - at]),
            }
        }
    }
}

/// For each element of a contiguous tensor whether it is kept: what the kernels do without.
pub(crate) fn dropout_keeps(dropout: Dropout, lines: Lines) -> Vec<u8> {
    let mut keeps = vec![0; lines.elem_count()];
    let mut line_keeps = vec![0; room(lines.len)];
    for line in 0..lines.count() {
        // SAFETY: every CPU has these.
        let at = unsafe { along::<Portable>(dropout, line, 0, lines.len, &mut line_keeps) };
        let first = line / lines.inner * lines.inner * lines.len + line % lines.inner;
        for (j, keep) in line_keeps[at..at + lines.len].iter().enumerate() {
            keeps[first + j * lines.inner] = *keep;
        }
    }
    keeps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::level::{Level, Task};

    struct KnownAnswers;
    struct DocumentedBits;

    /// The vectors of Random123's kat_vectors for philox4x32-7.
    impl Task for KnownAnswers {
        fn run<S: Simd>(self) {
            let cases: [([u32; 4], [u32; 2], [u32; 4]); 3] = [
                ([0; 4], [0; 2], [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]),
                ([!0; 4], [!0; 2], [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]),
                (
                    [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                    [0xa409_3822, 0x299f_31d0],
                    [0x4dfc_caba, 0x190a_87f0, 0xc473_62ba, 0xb6b5_242a],
                ),
            ];
            for (counter, key, [w0, w1, w2, w3]) in cases {
                let counters = counter.map(|word| [u64::from(word); AT_ONCE]);
                // SAFETY: a task runs on a level that the CPU has.
                let [bits] = unsafe { S::enter(|| philox::<S::Words, 1>([counters], key)) };
                let [a, b] = bits.map(Words::to_array);
                let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
                assert_eq!((a, b), ([pair(w0, w1); AT_ONCE], [pair(w2, w3); AT_ONCE]));
            }
        }
    }

    /// Element by element as the documentation of [`Dropout`] has it.
    impl Task for DocumentedBits {
        fn run<S: Simd>(self) {
            let dropout = Dropout { threshold: 20_000, seed: 0x0123_4567_89ab_cdef };
            let kept = |line: usize, j: usize| {
                let counter = [(j / 8) as u64, line as u64 & LOW, line as u64 >> 32, 0].map(|word| [word; AT_ONCE]);
                let [halves] = philox::<[u64; 8], 1>([counter], [0x89ab_cdef, 0x0123_4567]);
                let half = halves[j % 8 / 4][0];
                half >> (j % 4 * 16) & 0xffff >= 20_000
            };
            for (line, start, len) in [(0, 0, 200), (7, 3, 61), (5_000_000_000, 1021, 9)] {
                let mut keep = vec![7; room(len)];
                // SAFETY: as above.
                let at = unsafe { along::<S>(dropout, line, start, len, &mut keep) };
                for i in 0..len {
                    assert_eq!(keep[at + i], u8::from(kept(line, start + i)), "line {line}, element {}", start + i);
                }
                let mut keeps = vec![7; 3 * room(len)];
                // SAFETY: as above.
                unsafe { along_each::<S>(dropout, line, 3, len, &mut keeps) };
                for (i, keep) in keeps.chunks_exact(room(len)).enumerate() {
                    for (j, &keep) in keep[..len].iter().enumerate() {
                        assert_eq!(keep, u8::from(kept(line + i, j)), "line {}, element {j}", line + i);
                    }
                }
                let mut keep = [[7; 67]; PER_COUNTER];
                // SAFETY: as above.
                unsafe { across::<S, 67>(dropout, start / 8, line, 61, &mut keep) };
                for (i, keep) in keep.iter().enumerate() {
                    for (l, &keep) in keep[..61].iter().enumerate() {
                        assert_eq!(keep, u8::from(kept(line + l, start / 8 * 8 + i)), "line {}", line + l);
                    }
                }
            }
        }
    }

    #[test]
    fn known_answers() {
        Level::available().into_iter().for_each(|level| level.run(KnownAnswers));
    }

    #[test]
    fn along_and_across_are_the_documented_bits() {
        Level::available().into_iter().for_each(|level| level.run(DocumentedBits));
    }
}
