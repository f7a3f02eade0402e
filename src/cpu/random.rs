//! The random bits of [`Dropout`]: Philox4x32-7, a function of a counter and a key, for several counters at once.

use crate::fused::Dropout;
use crate::lines::Lines;

/// How many counters are worked on at once.
const AT_ONCE: usize = 8;
/// Elements for which a counter gives 16 bits each.
pub(super) const PER_COUNTER: usize = 8;
/// Elements whose bits are made at once along a line.
const GROUP: usize = AT_ONCE * PER_COUNTER;

/// Numbers below 2³² in vectors of u64, whose products an instruction gives whole.
type Words = [u64; AT_ONCE];

const LOW: u64 = 0xffff_ffff;

/// The 128 bits of each counter: those of elements 0 to 3 of its eight, the first lowest, and those of 4 to 7.
#[inline(always)]
fn philox([mut c0, mut c1, mut c2, mut c3]: [Words; 4], [mut k0, mut k1]: [u32; 2]) -> [Words; 2] {
    for _ in 0..7 {
        for i in 0..AT_ONCE {
            let (p0, p1) = (0xd251_1f53 * c0[i], 0xcd9e_8d57 * c2[i]);
            (c0[i], c2[i]) = ((p1 >> 32) ^ c1[i] ^ u64::from(k0), (p0 >> 32) ^ c3[i] ^ u64::from(k1));
            (c1[i], c3[i]) = (p1 & LOW, p0 & LOW);
        }
        (k0, k1) = (k0.wrapping_add(0x9e37_79b9), k1.wrapping_add(0xbb67_ae85));
    }
    [std::array::from_fn(|i| c0[i] | c1[i] << 32), std::array::from_fn(|i| c2[i] | c3[i] << 32)]
}

#[inline(always)]
fn keys(seed: u64) -> [u32; 2] {
    [seed as u32, (seed >> 32) as u32]
}

/// Room for what [`along`] writes for `len` elements.
pub(super) const fn room(len: usize) -> usize {
    (len + PER_COUNTER).next_multiple_of(GROUP) + GROUP
}

/// Whether each of the elements `start..start + len` of a line is kept, as bytes 0 and 1 in `keep`; answers where in `keep`
/// the first one's is.
#[inline(always)]
pub(super) fn along(dropout: Dropout, line: usize, start: usize, len: usize, keep: &mut [u8]) -> usize {
    let first = start / PER_COUNTER;
    let skipped = start % PER_COUNTER;
    let threshold = dropout.threshold as u16;
    for (group, keep) in keep[..room(len)].chunks_exact_mut(GROUP).take((skipped + len).div_ceil(GROUP)).enumerate() {
        let c0 = std::array::from_fn(|i| (first + group * AT_ONCE + i) as u64 & LOW);
        let [c1, c2] = [line as u64 & LOW, line as u64 >> 32].map(|word| [word; AT_ONCE]);
        let [a, b] = philox([c0, c1, c2, [0; AT_ONCE]], keys(dropout.seed));
        let mut pairs = [0u64; 2 * AT_ONCE];
        for i in 0..AT_ONCE {
            (pairs[2 * i], pairs[2 * i + 1]) = (a[i], b[i]);
        }
        // SAFETY: as many bytes; any bits are u16s.
        let bits: [u16; GROUP] = unsafe { std::mem::transmute(pairs.map(u64::to_le)) };
        for (keep, bits) in keep.iter_mut().zip(bits) {
            *keep = u8::from(u16::from_le(bits) >= threshold);
        }
    }
    skipped
}

/// The same for elements `8 · group` to `8 · group + 7` of `count` lines side by side from `line` on: that of element i of the
/// group in `keep[i]`.
#[inline(always)]
pub(super) fn across<const N: usize>(
    dropout: Dropout,
    group: usize,
    line: usize,
    count: usize,
    keep: &mut [[u8; N]; PER_COUNTER],
) {
    let threshold = u64::from(dropout.threshold);
    for at in (0..count).step_by(AT_ONCE) {
        let line = |i: usize| (line + at + i) as u64;
        let (c1, c2) = (std::array::from_fn(|i| line(i) & LOW), std::array::from_fn(|i| line(i) >> 32));
        let halves = philox([[group as u64 & LOW; AT_ONCE], c1, c2, [0; AT_ONCE]], keys(dropout.seed));
        for (element, keep) in keep.iter_mut().enumerate() {
            let bits = halves[element / 4].map(|half| half >> (element % 4 * 16) & 0xffff);
            for (keep, bits) in keep[at..].iter_mut().zip(bits) {
                *keep = u8::from(bits >= threshold);
            }
        }
    }
}

/// For each element of a contiguous tensor whether it is kept: what the kernels do without.
pub(crate) fn dropout_keeps(dropout: Dropout, lines: Lines) -> Vec<u8> {
    let mut keeps = vec![0; lines.elem_count()];
    let mut line_keeps = vec![0; room(lines.len)];
    for line in 0..lines.count() {
        let at = along(dropout, line, 0, lines.len, &mut line_keeps);
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

    /// The vectors of Random123's kat_vectors for philox4x32-7.
    #[test]
    fn known_answers() {
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
            let [a, b] = philox(counter.map(|word| [u64::from(word); AT_ONCE]), key);
            let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
            assert_eq!((a, b), ([pair(w0, w1); AT_ONCE], [pair(w2, w3); AT_ONCE]));
        }
    }

    /// Element by element as the documentation of [`Dropout`] has it.
    #[test]
    fn along_and_across_are_the_documented_bits() {
        let dropout = Dropout { threshold: 20_000, seed: 0x0123_4567_89ab_cdef };
        let kept = |line: usize, j: usize| {
            let counter = [(j / 8) as u64, line as u64 & LOW, line as u64 >> 32, 0].map(|word| [word; AT_ONCE]);
            let halves = philox(counter, [0x89ab_cdef, 0x0123_4567]);
            let half = halves[j % 8 / 4][0];
            half >> (j % 4 * 16) & 0xffff >= 20_000
        };
        for (line, start, len) in [(0, 0, 200), (7, 3, 61), (5_000_000_000, 1021, 9)] {
            let mut keep = vec![7; room(len)];
            let at = along(dropout, line, start, len, &mut keep);
            for i in 0..len {
                assert_eq!(keep[at + i], u8::from(kept(line, start + i)), "line {line}, element {}", start + i);
            }
            let mut keep = [[7; 67]; PER_COUNTER];
            across(dropout, start / 8, line, 61, &mut keep);
            for (i, keep) in keep.iter().enumerate() {
                for (l, &keep) in keep[..61].iter().enumerate() {
                    assert_eq!(keep, u8::from(kept(line + l, start / 8 * 8 + i)), "line {}", line + l);
                }
            }
        }
    }
}
