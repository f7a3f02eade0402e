//! Exponentials of a strip of lines side by side, held from the sums to the results rather than taken twice.

use super::columns::{Strip, ROWS, WIDTH};
use super::element::Keep;
use super::lanes::{each, Lanes};
use super::Element;
use crate::state::Real;
use std::ops::Range;

/// A strip holds as many bytes at most where its results are to be, before they leave the second cache, …
const MAX_IN_OUTPUT: usize = 1 << 18;
/// … and so many aside.
const MAX_ASIDE: usize = 1 << 19;

/// How many rows the memory system is to be ahead of what is held: memory that is written is read first.
pub(super) const AHEAD_ROWS: usize = 2;

/// [Scaled](Lanes::scaled_exp) exponentials, those of each group of [`ROWS`] rows relative to references of their own.
pub(super) struct Held<V: Lanes> {
    /// Where those of the first row are, and how far apart rows are.
    start: *mut V::Real,
    pitch: usize,
    width: usize,
    /// Of each group, line by line in whole vectors.
    references: Vec<V::Real>,
    aside: Vec<V::Real>,
}

impl<V: Lanes> Held<V> {
    /// For strips of lines of `len` elements of `T`, `inner` side by side. `None` if they are too long, or so short that little
    /// would be won: relative to its maximum a line of one element becomes exactly 1.
    pub fn new<T: Element<Real = V::Real>>(len: usize, inner: usize) -> Option<Self> {
        let width = WIDTH.min(inner);
        let (room, max) = match T::KEEP {
            Keep::InOutput => (0, MAX_IN_OUTPUT),
            Keep::Aside => (len * width, MAX_ASIDE),
            Keep::Nowhere => return None,
        };
        if len <= ROWS || len > max / size_of::<V::Real>() / width {
            return None;
        }
        let (start, references) = (std::ptr::null_mut(), Vec::new());
        Some(Self { start, pitch: 0, width, references, aside: Vec::with_capacity(room) })
    }

    /// Takes the next strip, whose results are to be at `out`.
    pub fn begin<T: Element<Real = V::Real>>(&mut self, strip: &Strip, out: *mut T) {
        (self.start, self.pitch) = match T::KEEP {
            Keep::InOutput => (out.cast(), strip.stride),
            Keep::Aside | Keep::Nowhere => (self.aside.as_mut_ptr(), strip.width),
        };
        self.width = strip.width;
        self.references.clear();
    }

    /// Where the exponentials of a row are, as many as there are lines.
    #[inline(always)]
    pub fn row(&self, j: usize) -> *mut V::Real {
        self.start.wrapping_add(j * self.pitch)
    }

    /// How far apart rows are.
    pub fn pitch(&self) -> usize {
        self.pitch
    }

    /// Notes what the exponentials of the next group are relative to.
    #[inline(always)]
    pub fn push(&mut self, references: &[V::Real]) {
        self.references.extend_from_slice(references);
    }

    /// Makes the exponentials of the group of which these are the rows relative to `references`, a number for each line and up
    /// to a whole vector.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`, and the rows are written.
    #[inline(always)]
    pub unsafe fn settle(&self, rows: Range<usize>, references: &[V::Real]) {
        let two = V::splat(V::Real::ONE + V::Real::ONE);
        let elements = self.width.next_multiple_of(V::COUNT);
        let held = self.references[rows.start / ROWS * elements..][..elements].as_ptr();
        let references = references[..elements].as_ptr();
        each::<V>(
            0..self.width,
            #[inline(always)]
            // SAFETY: whole vectors of references are there, and the rows by the caller's promise.
            |i, count| unsafe {
                let (held, reference) = (V::load(held.add(i)), V::load(references.add(i)));
                if !held.differs(reference) {
                    return;
                }
                // In two halves: the whole factor may be 0 where what it scales, and the sum divides, is still a number.
                let half = ((held - reference) / two).exp();
                for j in rows.clone() {
                    let at = self.row(j).add(i);
                    (V::get(at, count) * half * half).put(at, count);
                }
            },
        );
    }
}
