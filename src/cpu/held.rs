//! Exponentials of a strip of lines side by side, held from the sums to the results rather than taken twice.

use super::columns::{ahead_rows, write_kept, write_rows, States, Strip, ROWS, WIDTH};
use super::element::Keep;
use super::lanes::{Lanes, Pack};
use super::level::Simd;
use super::memory::{line_of, Numbers, Scratch};
use super::Element;
use crate::state::{root_of_rescaling, Number, Real};

/// A strip holds as many bytes at most, where its results are to be or aside, before they leave the second cache.
const MAX_HELD: usize = 1 << 19;

/// What it takes to make logits a second time.
#[derive(Clone, Copy)]
pub(super) enum Again {
    Little,
    /// More than an exponential.
    Arithmetic,
    /// A second tensor is read, …
    Memory,
    /// … and by the next strip again: it is to stay in the second cache, too.
    SharedMemory,
}

/// [Scaled](Lanes::scaled_exp) exponentials, those of each [group](States::group) of rows relative to what references were then.
pub(super) struct HeldStrip<V: Lanes> {
    /// Where they are held.
    keep: Keep,
    /// Where those of the first row are, and how far apart rows are.
    start: *mut V::Real,
    pitch: usize,
    /// Whether that is where the input is, and a group of it may be needed a second time.
    over_input: bool,
    width: usize,
    /// The first rows of the groups before which references moved.
    moved: Vec<usize>,
    /// What they became, line by line in whole vectors.
    references: Vec<V::Real>,
    /// All, or then those of a group.
    aside: Scratch,
    /// How many rows are aside.
    rows_aside: usize,
}

impl<V: Lanes> HeldStrip<V> {
    /// For strips of lines of `len` elements of `T`, `inner` side by side. `None` if they are too long, or so short that little
    /// would be won: relative to its maximum a line of one element becomes exactly 1. Or if it takes less time to take exponentials
    /// that [saturate](Lanes::SATURATES) again than to write twice: 8 × 512 × 4096 of f32 took 15.8 ms where they were held and 13.6
    /// where they were not, in place 9.4 and 6.8. Where a bias is read for them it takes less, 32 × 512 × 512 with one for all 5.9 to 6.1 ms
    /// where their results are to be, 6.1 to 6.3 aside, and 64 × 1000 × 128 with a whole one 3.8 to 4.2 and 4.5. But where strips read the
    /// same one it is to stay in the second cache with what is held: with one for all 64 × 1000 × 128 took 3.0 to 3.3, and twice 2.8 to 2.9.
    pub fn new<T: Element<Real = V::Real>>(len: usize, inner: usize, again: Again) -> Option<Self> {
        let width = WIDTH.min(inner);
        let (keep, most) = match (T::KEEP, again) {
            (Keep::InOutput, Again::Little) if V::SATURATES => return None,
            (Keep::InOutput, Again::SharedMemory) if V::SATURATES => (Keep::Aside, MAX_HELD / 2),
            (keep, _) => (keep, MAX_HELD),
        };
        let rows_aside = match keep {
            // Over the input
            Keep::InOutput => States::<V>::group(),
            Keep::Aside => len,
            Keep::Nowhere => return None,
        };
        if len <= ROWS || len > most / size_of::<V::Real>() / width {
            return None;
        }
        let (start, moved, references) = (std::ptr::null_mut(), Vec::new(), Vec::new());
        Some(Self {
            keep,
            start,
            pitch: 0,
            over_input: false,
            width,
            moved,
            references,
            aside: Scratch::new(),
            rows_aside,
        })
    }

    /// Takes the next strip, which is at `src` and whose results are to be at `out`.
    pub fn begin<T: Element<Real = V::Real>>(&mut self, strip: &Strip, src: *const T, out: *mut T) {
        self.width = strip.width;
        self.over_input = self.keep == Keep::InOutput && V::SATURATES && src == out;
        (self.start, self.pitch) = match self.keep {
            Keep::InOutput => (out.cast(), strip.stride),
            Keep::Aside | Keep::Nowhere => self.aside(),
        };
        self.moved.clear();
        self.references.clear();
    }

    /// Where the first row is aside, and how far apart rows are there.
    fn aside(&mut self) -> (*mut V::Real, usize) {
        let pitch = self.width.next_multiple_of(line_of::<V::Real>());
        (self.aside.room(self.rows_aside * pitch), pitch)
    }

    /// Where the exponentials of a row are, as many as there are lines.
    #[inline(always)]
    fn row(&self, j: usize) -> *mut V::Real {
        self.start.wrapping_add(j * self.pitch)
    }

    /// Where the exponentials of the group that starts with this row are to be.
    #[inline(always)]
    pub fn group(&mut self, first: usize) -> Room<V::Real> {
        let (start, pitch) = if self.over_input { self.aside() } else { (self.row(first), self.pitch) };
        Room { start, pitch, ahead: ahead_rows(self.width, 2) * pitch }
    }

    /// Takes the `rows` of that group, and notes what they are relative to, if it `moved`.
    ///
    /// # Safety
    /// They are [where](Self::group) they are to be.
    #[inline(always)]
    pub unsafe fn push(&mut self, first: usize, rows: usize, moved: Option<&Numbers<V::Real>>) {
        if self.over_input {
            let Room { start, pitch, .. } = self.group(first);
            for i in 0..rows {
                // SAFETY: there is room for the row in both places.
                unsafe { self.row(first + i).copy_from_nonoverlapping(start.add(i * pitch), self.width) }
            }
        }
        if let Some(references) = moved {
            self.moved.push(first);
            self.references.extend_from_slice(references);
        }
    }

    /// [`root_of_rescaling`] to `references` for the exponentials of the rows from the `i`-th [move](Self::moved) on: a number for
    /// each line and up to a whole vector, of all three. False if all are 1.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    unsafe fn roots(&self, i: usize, references: &[V::Real], roots: &mut [V::Real]) -> bool {
        let mut any = false;
        let one = V::splat(V::Real::ONE);
        let elements = self.width.next_multiple_of(V::COUNT);
        let held = self.references[i * elements..][..elements].chunks_exact(V::COUNT);
        let references = references[..elements].chunks_exact(V::COUNT);
        let roots = roots[..elements].chunks_exact_mut(V::COUNT);
        for ((held, reference), root) in held.zip(references).zip(roots) {
            // SAFETY: chunks are as long as a vector; the rest by the caller's promise.
            unsafe {
                let (held, reference) = (V::load(held.as_ptr()), V::load(reference.as_ptr()));
                let moved = held.differs(reference);
                any |= moved;
                (if moved { root_of_rescaling(held, reference) } else { one }).store(root.as_mut_ptr());
            }
        }
        any
    }
}

/// Where exponentials of rows are to be: those of the first row at `start`, and of the next ones `pitch` apart.
#[derive(Clone, Copy)]
pub(super) struct Room<R> {
    pub start: *mut R,
    pub pitch: usize,
    /// How far ahead of what is written the memory system is to be.
    pub ahead: usize,
}

impl<R> Room<R> {
    /// From this line of the strip on.
    pub fn starting_at(self, line: usize) -> Self {
        Self { start: self.start.wrapping_add(line), ..self }
    }
}

/// What holds the exponentials of vectors in `room`: for [`States::add`](super::columns::States::add).
///
/// # Safety
/// The CPU has the instructions of `S`, and what is asked of the function answered has room there.
#[inline(always)]
pub(super) unsafe fn hold<S: Simd, V: Lanes>(room: Room<V::Real>) -> impl Fn(usize, usize, usize, V) + Copy {
    let Room { start, pitch, ahead } = room;
    #[inline(always)]
    move |row, i, count, exp| {
        let to = start.wrapping_add(row * pitch + i);
        // Memory that is written is read first. Two rows ahead, a softcap of 64 × 1000 × 128 took 1.08 times as long.
        S::prefetch(to.wrapping_add(ahead));
        // SAFETY: as promised by the caller.
        unsafe { exp.put(to, count) }
    }
}

/// Writes `len` rows of probabilities, `limit` at most, to `out`: what is held, which becomes relative to `references`, times
/// `scale`, each a vector longer than the strip is wide. `keep(row)`, asked for one row after the other, answers where there is a
/// byte for each line, and for a vector more: 0 for what is to be 0.
///
/// # Safety
/// The CPU has the instructions of `S`, the rows are written and `out` is valid for writes of them.
#[inline(always)]
pub(super) unsafe fn write<S: Simd, T: Element>(
    held: &HeldStrip<T::Lanes<S>>,
    [references, scale]: &[Numbers<T::Real>; 2],
    limit: T::Real,
    out: *mut T,
    (len, stride): (usize, usize),
    mut keep: Option<impl FnMut(usize) -> *const u8>,
) {
    let (limit, scale) = (T::Lanes::<S>::splat(limit), scale.as_ptr());
    let mut roots = Numbers::new(T::Real::ONE, references.len());
    let ahead = ahead_rows(held.width, 2) * stride;
    let (from, pitch) = (held.start.cast_const(), held.pitch);
    for (i, &first) in held.moved.iter().enumerate() {
        let rows = first..held.moved.get(i + 1).copied().unwrap_or(len);
        // SAFETY of the block: as promised by the caller.
        unsafe {
            let moved = held.roots(i, references, &mut roots);
            let roots = roots.as_ptr();
            let exp = {
                #[inline(always)]
                move |j: usize, i: usize, count: usize| {
                    S::prefetch(out.wrapping_add(j * stride + ahead + i));
                    T::Lanes::<S>::get(from.add(j * pitch + i), count)
                }
            };
            let result = {
                #[inline(always)]
                // The maximum alone may have come out a little over its sum.
                move |exp: T::Lanes<S>, i: usize| (exp * T::Lanes::<S>::load(scale.add(i))).at_most(limit)
            };
            let rescaled = {
                #[inline(always)]
                move |j: usize, i: usize, count: usize| {
                    let root = T::Lanes::<S>::load(roots.add(i));
                    result(exp(j, i, count) * root * root, i)
                }
            };
            // A loop of its own for each.
            let Some(keep) = &mut keep else {
                if moved {
                    write_rows::<S, T>(out, stride, held.width, rows, rescaled);
                } else {
                    write_rows::<S, T>(
                        out,
                        stride,
                        held.width,
                        rows,
                        #[inline(always)]
                        move |j, i, count| result(exp(j, i, count), i),
                    );
                }
                continue;
            };
            for j in rows {
                write_kept::<S, T>(
                    out.wrapping_add(j * stride),
                    held.width,
                    keep(j),
                    #[inline(always)]
                    |i, count| rescaled(j, i, count),
                );
            }
        }
    }
}
