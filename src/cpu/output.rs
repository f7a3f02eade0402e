//! An output that threads fill together.

use std::marker::PhantomData;

/// A slice that several threads write to, each its own elements.
#[derive(Clone, Copy)]
pub(super) struct SharedOutput<'a, T> {
    start: *mut T,
    len: usize,
    out: PhantomData<&'a mut [T]>,
}

// SAFETY: it only hands out slices, and whoever asks for one promises that no other thread holds a part of it.
unsafe impl<T: Send> Send for SharedOutput<'_, T> {}
unsafe impl<T: Send> Sync for SharedOutput<'_, T> {}

impl<'a, T> SharedOutput<'a, T> {
    pub fn new(out: &'a mut [T]) -> Self {
        Self { start: out.as_mut_ptr(), len: out.len(), out: PhantomData }
    }

    /// # Safety
    /// No other live slice may overlap the `len` elements from `start` on.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "a part outside the output");
        // SAFETY: in bounds by the assertion, alive for 'a, and not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}
