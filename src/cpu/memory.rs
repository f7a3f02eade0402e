//! Memory that threads read and fill together.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};

/// From this size on fresh memory asks for huge pages: page faults are most of the time of a large output.
#[cfg(target_os = "linux")]
const HUGE_PAGES_FROM: usize = 4 << 20;

/// Bytes in a line of the cache, which come from memory together.
pub(super) const CACHE_LINE: usize = 64;

/// A run of elements that several threads read, or write each its own part of. Input and output may be the same.
#[derive(Clone, Copy)]
pub(crate) struct Elements<'a, T> {
    start: *mut T,
    len: usize,
    of: PhantomData<&'a mut [T]>,
}

// SAFETY: it only hands out addresses; who reads or writes there promises that nobody else writes there.
unsafe impl<T: Send + Sync> Send for Elements<'_, T> {}
unsafe impl<T: Send + Sync> Sync for Elements<'_, T> {}

impl<'a, T> Elements<'a, T> {
    /// To be read only.
    pub fn read(from: &'a [T]) -> Self {
        Self { start: from.as_ptr().cast_mut(), len: from.len(), of: PhantomData }
    }

    pub fn write(to: &'a mut [T]) -> Self {
        Self { start: to.as_mut_ptr(), len: to.len(), of: PhantomData }
    }

    /// The address of the elements `start..start + len`, all of which there are.
    #[inline(always)]
    pub fn at(&self, start: usize, len: usize) -> *mut T {
        assert!(start <= self.len && len <= self.len - start, "a part outside the tensor");
        // SAFETY: in bounds.
        unsafe { self.start.add(start) }
    }

    #[cfg(target_os = "linux")]
    fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }
}

/// A vector of `len` elements, which `fill` writes.
///
/// # Safety
/// `fill` writes every element, and reads none before.
pub(super) unsafe fn filled<T: Copy>(len: usize, fill: impl FnOnce(Elements<T>)) -> Vec<T> {
    let mut out = Unfilled::new(len);
    if len > 0 {
        fill(out.elements());
    }
    // SAFETY: as promised by the caller.
    unsafe { out.filled() }
}

/// A vector whose elements are still to be written.
pub(super) struct Unfilled<T> {
    vec: Vec<T>,
    len: usize,
}

impl<T: Copy> Unfilled<T> {
    pub fn new(len: usize) -> Self {
        let mut out = Self { vec: Vec::with_capacity(len), len };
        ask_for_huge_pages(out.elements());
        out
    }

    pub fn elements(&mut self) -> Elements<'_, T> {
        Elements { start: self.vec.as_mut_ptr(), len: self.len, of: PhantomData }
    }

    /// # Safety
    /// Every element is written.
    pub unsafe fn filled(mut self) -> Vec<T> {
        // SAFETY: there is room for as many, and all are written, by the caller's promise.
        unsafe { self.vec.set_len(self.len) };
        self.vec
    }
}

/// Numbers of a thread's own that start where a line of the cache does: elsewhere each vector that is as long lies in two.
pub(super) struct Numbers<R> {
    memory: Vec<R>,
    /// Where in it they are.
    range: Range<usize>,
}

/// As many elements as a line of the cache has.
pub(super) const fn line_of<R>() -> usize {
    CACHE_LINE / size_of::<R>()
}

/// How many elements from `start` on a line of the cache starts.
pub(super) fn to_line<R>(start: *const R) -> usize {
    start.align_offset(CACHE_LINE).min(line_of::<R>())
}

impl<R: Copy> Numbers<R> {
    pub fn new(value: R, len: usize) -> Self {
        let memory = vec![value; len + line_of::<R>()];
        let start = to_line(memory.as_ptr());
        Self { memory, range: start..start + len }
    }
}

impl<R: Copy> Deref for Numbers<R> {
    type Target = [R];

    fn deref(&self) -> &[R] {
        &self.memory[self.range.clone()]
    }
}

impl<R: Copy> DerefMut for Numbers<R> {
    fn deref_mut(&mut self) -> &mut [R] {
        &mut self.memory[self.range.clone()]
    }
}

#[cfg(target_os = "linux")]
fn ask_for_huge_pages<T: Copy>(elements: Elements<T>) {
    const PAGE: usize = 4096;
    if elements.bytes() < HUGE_PAGES_FROM {
        return;
    }
    let skip = elements.start.cast::<u8>().align_offset(PAGE);
    let Some(len) = elements.bytes().checked_sub(skip) else { return };
    // SAFETY: the pages belong to the vector, and the advice changes no contents. It may be refused: then it is slower.
    unsafe { libc::madvise(elements.start.cast::<u8>().add(skip).cast(), len / PAGE * PAGE, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages<T: Copy>(_: Elements<T>) {}
