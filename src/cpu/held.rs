//! Exponentials of a strip of lines side by side, held from the sums to the results rather than taken twice.

use super::columns::{ahead_rows, write_row, Strip, ROWS, WIDTH};
use super::element::Keep;
use super::lanes::{Lanes, Pack};
use super::level::Simd;
use super::Element;
use crate::state::{root_of_rescaling, Number, Real};

/// A strip holds as many bytes at most, where its results are to be or aside, before they leave the second cache.
const MAX_HELD: usize = 1 << 19;
/// How many rows the memory system is to be ahead of what is held: it reads as far ahead as it can beside.
const AHEAD_ROWS: usize = 2;

/// [Scaled](Lanes::scaled_exp) exponentials, those of each group of [`ROWS`] rows relative to references of their own.
pub(super) struct HeldStrip<V: Lanes> {
    /// Where those of the first row are, and how far apart rows are.
    start: *mut V::Real,
    pitch: usize,
    /// Whether that is where the input is, and a group of it may be needed a second time.
    over_input: bool,
    width: usize,
    /// Of each group, line by line in whole vectors.
    references: Vec<V::Real>,
    /// All, or then those of a group.
    aside: Vec<V::Real>,
}

impl<V: Lanes> HeldStrip<V> {
    /// For strips of lines of `len` elements of `T`, `inner` side by side. `None` if they are too long, or so short that little
    /// would be won: relative to its maximum a line of one element becomes exactly 1. Or if their logits are `cheap` and it takes
    /// less time to take an exponential that [saturates](Lanes::SATURATES) again than to write twice: 8 × 512 × 4096 of f32 took
    /// 15.8 ms where they were held and 13.6 where they were not, in place 9.4 and 6.8.
    pub fn new<T: Element<Real = V::Real>>(len: usize, inner: usize, cheap: bool) -> Option<Self> {
        let width = WIDTH.min(inner);
        if V::SATURATES && cheap && T::KEEP == Keep::InOutput {
            return None;
        }
        let room = match T::KEEP {
            Keep::InOutput => 0,
            Keep::Aside => len * width,
            Keep::Nowhere => return None,
        };
        if len <= ROWS || len > MAX_HELD / size_of::<V::Real>() / width {
            return None;
        }
        let (start, references) = (std::ptr::null_mut(), Vec::new());
        Some(Self { start, pitch: 0, over_input: false, width, references, aside: Vec::with_capacity(room) })
    }

    /// Takes the next strip, which is at `src` and whose results are to be at `out`.
    pub fn begin<T: Element<Real = V::Real>>(&mut self, strip: &Strip, src: *const T, out: *mut T) {
        (self.start, self.pitch, self.over_input) = match T::KEEP {
            Keep::InOutput => (out.cast(), strip.stride, V::SATURATES && src == out),
            Keep::Aside | Keep::Nowhere => (self.aside.as_mut_ptr(), strip.width, false),
        };
        self.width = strip.width;
        self.references.clear();
        if self.over_input {
            self.aside.reserve(ROWS * self.width);
        }
    }

    /// Where the exponentials of a row are, as many as there are lines.
    #[inline(always)]
    pub fn row(&self, j: usize) -> *mut V::Real {
        self.start.wrapping_add(j * self.pitch)
    }

    /// Where the exponentials of the group that starts with this row are to be, and how far apart its rows.
    #[inline(always)]
    pub fn group(&mut self, first: usize) -> (*mut V::Real, usize) {
        if self.over_input {
            (self.aside.as_mut_ptr(), self.width)
        } else {
            (self.row(first), self.pitch)
        }
    }

    /// Takes the `rows` of that group, and notes what they are relative to.
    ///
    /// # Safety
    /// They are [where](Self::group) they are to be.
    #[inline(always)]
    pub unsafe fn push(&mut self, first: usize, rows: usize, references: &[V::Real]) {
        if self.over_input {
            for i in 0..rows {
                // SAFETY: there is room for the row in both places.
                unsafe {
                    self.row(first + i).copy_from_nonoverlapping(self.aside.as_ptr().add(i * self.width), self.width)
                }
            }
        }
        self.references.extend_from_slice(references);
    }

    /// [`root_of_rescaling`] to `references` for the exponentials of the group that starts with this row: a number for each line
    /// and up to a whole vector, of all three.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    unsafe fn roots(&self, first: usize, references: &[V::Real], roots: &mut [V::Real]) {
        let one = V::splat(V::Real::ONE);
        let elements = self.width.next_multiple_of(V::COUNT);
        let held = self.references[first / ROWS * elements..][..elements].chunks_exact(V::COUNT);
        let references = references[..elements].chunks_exact(V::COUNT);
        let roots = roots[..elements].chunks_exact_mut(V::COUNT);
        for ((held, reference), root) in held.zip(references).zip(roots) {
            // SAFETY: chunks are as long as a vector; the rest by the caller's promise.
            unsafe {
                let (held, reference) = (V::load(held.as_ptr()), V::load(reference.as_ptr()));
                let moved = held.differs(reference);
                (if moved { root_of_rescaling(held, reference) } else { one }).store(root.as_mut_ptr());
            }
        }
    }
}

/// What holds the exponentials of vectors of rows that are `pitch` apart, the first of them at `to`: for
/// [`States::add`](super::columns::States::add).
///
/// # Safety
/// The CPU has the instructions of `S`, and what is asked of the function answered has room there.
#[inline(always)]
pub(super) unsafe fn hold<S: Simd, V: Lanes>(to: *mut V::Real, pitch: usize) -> impl Fn(usize, usize, usize, V) + Copy {
    #[inline(always)]
    move |row, i, count, exp| {
        // Memory that is written is read first.
        S::prefetch(to.wrapping_add((row + AHEAD_ROWS) * pitch + i));
        // SAFETY: as promised by the caller.
        unsafe { exp.put(to.add(row * pitch + i), count) }
    }
}

/// Writes `len` rows of probabilities, `limit` at most, to `out`: what is held, which becomes relative to `references`, times
/// `scale`, each a vector longer than the strip is wide. `keep(row)` answers where there is a byte for each line, and for a
/// vector more: 0 for what is to be 0.
///
/// # Safety
/// The CPU has the instructions of `S`, the rows are written and `out` is valid for writes of them.
#[inline(always)]
pub(super) unsafe fn write<S: Simd, T: Element>(
    held: &HeldStrip<T::Lanes<S>>,
    [references, scale]: &[Vec<T::Real>; 2],
    limit: T::Real,
    out: *mut T,
    (len, stride): (usize, usize),
    mut keep: impl FnMut(usize) -> Option<*const u8>,
) {
    let (limit, scale) = (T::Lanes::<S>::splat(limit), scale.as_ptr());
    let mut roots = references.clone();
    let ahead = ahead_rows(held.width) * stride;
    for first in (0..len).step_by(ROWS) {
        let rows = first..len.min(first + ROWS);
        // SAFETY of the block: as promised by the caller.
        unsafe {
            held.roots(first, references, &mut roots);
            let roots = roots.as_ptr();
            for j in rows {
                let (from, to) = (held.row(j), out.wrapping_add(j * stride));
                let result = {
                    #[inline(always)]
                    |i: usize, count: usize| {
                        S::prefetch(to.wrapping_add(ahead + i));
                        let root = T::Lanes::<S>::load(roots.add(i));
                        let exp = T::Lanes::<S>::get(from.add(i), count) * root * root;
                        let p = exp * T::Lanes::<S>::load(scale.add(i));
                        // The maximum alone may have come out a little over its sum.
                        p.at_most(limit)
                    }
                };
                write_row::<S, T>(to, held.width, keep(j), result);
            }
        }
    }
}
