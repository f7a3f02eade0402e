//! Memory that threads read and fill together.

use super::threads::{alone, at_shared_work, share_few};
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

/// From this size on fresh memory asks for huge pages: page faults are most of the time of a large output.
const HUGE_PAGES_FROM: usize = 4 << 20;

/// Bytes in a line of the cache, which come from memory together.
pub(super) const CACHE_LINE: usize = 64;

/// Aligned so that no vector in it lies in two cache lines.
#[repr(align(64))]
pub(super) struct CacheLines<T>(pub T);

/// Room for one.
type CacheLine = CacheLines<MaybeUninit<[u8; CACHE_LINE]>>;

thread_local! {
    static SCRATCH: Cell<Vec<CacheLine>> = const { Cell::new(Vec::new()) };
}

/// Memory that a thread works in, and keeps for the next time: an allocator may give it back to the system, and its pages' first use takes
/// ten times as long as a line of 256000 elements.
pub(super) struct Scratch(Vec<CacheLine>);

impl Scratch {
    /// What this thread has kept; nothing while it is in use already.
    pub fn new() -> Self {
        Self(SCRATCH.try_with(Cell::take).unwrap_or_default())
    }

    /// Room for `len` elements from the start of a line of the cache on, until more is asked for.
    pub fn room<R>(&mut self, len: usize) -> *mut R {
        const { assert!(align_of::<R>() <= CACHE_LINE) };
        self.0.reserve((len * size_of::<R>()).div_ceil(CACHE_LINE));
        self.0.as_mut_ptr().cast()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.0);
        // Nowhere to keep it where the thread ends.
        let _ = SCRATCH.try_with(|kept| kept.set(memory));
    }
}

/// A run of elements that several threads read, or write each its own part of. Input and output may be the same.
#[derive(Clone, Copy)]
pub(crate) struct Elements<'a, T> {
    start: *mut T,
    len: usize,
    first_use: Option<&'a FirstUse>,
    of: PhantomData<&'a mut [T]>,
}

// SAFETY: it only hands out addresses; who reads or writes there promises that nobody else writes there.
unsafe impl<T: Send + Sync> Send for Elements<'_, T> {}
unsafe impl<T: Send + Sync> Sync for Elements<'_, T> {}

impl<'a, T> Elements<'a, T> {
    /// To be read only.
    pub fn read(from: &'a [T]) -> Self {
        Self { start: from.as_ptr().cast_mut(), len: from.len(), first_use: None, of: PhantomData }
    }

    pub fn write(to: &'a mut [T]) -> Self {
        Self { start: to.as_mut_ptr(), len: to.len(), first_use: None, of: PhantomData }
    }

    /// The address of the elements `start..start + len`, all of which there are.
    #[inline(always)]
    pub fn at(&self, start: usize, len: usize) -> *mut T {
        assert!(start <= self.len && len <= self.len - start, "a part outside the tensor");
        // SAFETY: in bounds.
        unsafe { self.start.add(start) }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }
}

impl<T: Send + Sync> Elements<'_, T> {
    /// Before this thread writes to these elements: has it be the first to use the huge pages that they are in, but for those that another
    /// thread has [used](FirstUse). A thread that does so for others has them help.
    pub fn use_first(&self, elements: Range<usize>) {
        let Some(FirstUse { used, one_by_one }) = self.first_use else { return };
        let elements = elements.start..elements.end.min(self.len);
        if elements.is_empty() {
            return;
        }
        let begin = self.start as usize;
        let page_of = |element: usize| (begin + element * size_of::<T>()) / HUGE_PAGE;
        let use_page = |page: usize| {
            used[page - page_of(0)].call_once(|| {
                let _alone = one_by_one.as_ref().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
                let from_start = (page * HUGE_PAGE).saturating_sub(begin);
                // SAFETY: the byte is of the vector, and is still to be filled: who does so comes here before. A write that must not be left
                // out, though nothing reads what it wrote.
                unsafe { self.start.cast::<u8>().add(from_start).write_volatile(0) };
            })
        };
        let for_others = one_by_one.is_none() && !at_shared_work();
        let mut pages = page_of(elements.start)..page_of(elements.end - 1) + 1;
        while let Some(page) = pages.next() {
            let begin = for_others.then(Instant::now);
            use_page(page);
            if begin.is_some_and(|begin| begin.elapsed() >= CLEARED) {
                let Range { start, end } = pages;
                return share_few(end - start, &|i| use_page(start + i));
            }
        }
    }
}

/// Which of the huge pages of a large output have been used, each first by one thread: where several come to one at about the same time,
/// the system clears a page for each of them. It is in the caches then, for the results. Several pages at a time: 1024 × 32768 f32s take 16
/// threads of a Xeon 3.7 ms so, and one page after the other 24.
///
/// But two threads keep each other waiting, by how much changes from machine to machine and from hour to hour. One after the other they
/// take 8.5 to 9.3 ms for that, side by side 7.6 to 15.4, and if the caller uses all pages before the other begins 11.8 to 12.4. That is best
/// where each thread comes to all pages, (4096, 4096) along the first dimension 8.9 to 9.4, side by side 10.6 to 12.9, and for a line of
/// several threads: 1 × 10000000 4.5, in turn 5.3.
struct FirstUse {
    used: Vec<Once>,
    /// Where there are two threads.
    one_by_one: Option<Mutex<()>>,
}

const HUGE_PAGE: usize = 2 << 20;
/// A page that the system clears takes longer (it takes 90 to 400 µs), and one that is there already does not.
const CLEARED: Duration = Duration::from_micros(20);

impl FirstUse {
    /// Of these elements, if several threads may fill them. That is asked of large outputs only, since it may start the threads.
    fn of<T: Copy>(elements: Elements<T>) -> Option<Self> {
        let several = cfg!(target_os = "linux") && elements.bytes() >= HUGE_PAGES_FROM && !alone();
        several.then(|| Self {
            used: (0..elements.bytes() / HUGE_PAGE + 2).map(|_| Once::new()).collect(),
            one_by_one: (rayon::current_num_threads() == 2).then(|| Mutex::new(())),
        })
    }
}

/// A vector of `len` elements, which `fill` writes.
///
/// # Safety
/// `fill` writes every element, and reads none before.
pub(super) unsafe fn filled<T: Copy + Send + Sync>(len: usize, fill: impl FnOnce(Elements<T>)) -> Vec<T> {
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
    first_use: Option<FirstUse>,
}

impl<T: Copy + Send + Sync> Unfilled<T> {
    /// For what threads are to write.
    pub fn new(len: usize) -> Self {
        let mut out = Self { vec: Vec::with_capacity(len), len, first_use: None };
        ask_for_huge_pages(out.elements());
        out.first_use = FirstUse::of(out.elements());
        out
    }

    pub fn elements(&mut self) -> Elements<'_, T> {
        Elements { start: self.vec.as_mut_ptr(), len: self.len, first_use: self.first_use.as_ref(), of: PhantomData }
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

/// No page is smaller. A load waits for a store before it whose place in its page is the same, until that has been done, …
const PAGE: usize = 4096;
/// … which is, in a loop from vector to vector, when about so many bytes more have been stored.
const STORED: usize = 1088;

/// The least number of elements from `len` on that is so many bytes more than whole pages.
const fn apart<R>(len: usize, beyond: usize) -> usize {
    let bytes = len * size_of::<R>();
    (bytes + (beyond + PAGE - bytes % PAGE) % PAGE) / size_of::<R>()
}

/// How far apart three runs of `len` numbers are to be, so that no loop waits which reads and writes them side by side.
pub(super) const fn three_apart<R>(len: usize) -> usize {
    apart::<R>(len, PAGE / 3 / CACHE_LINE * CACHE_LINE)
}

/// The same for four.
pub(super) const fn four_apart<R>(len: usize) -> usize {
    apart::<R>(len, 3 * PAGE / 4)
}

/// Exponentials of a few lines, each from when it is summed until its results are written: while they are stored its input is read, and
/// while they are read its output is stored. They lie where neither waits for the other: that took up to four times as long, lines of
/// 1024 f32s in one process of six, by where the stack was.
pub(super) struct KeptLines<R> {
    start: *mut R,
    /// Elements from one line's room to the next.
    room: usize,
    /// By how many bytes every other line lies further behind.
    further: usize,
}

impl<R> KeptLines<R> {
    /// What lines need room for beside their numbers, in numbers of 4 bytes.
    pub const BESIDE: usize = (PAGE + STORED) / 4;

    /// For lines of `len` numbers, whole vectors, each of which is written while the next one is summed.
    pub fn new<T>(memory: &mut [MaybeUninit<R>], len: usize) -> Self {
        let room = (len + Self::BESIDE).next_multiple_of(line_of::<R>());
        assert!(2 * room <= memory.len());
        let step = len * size_of::<T>() % PAGE;
        let further = if step > 0 && step < STORED { STORED } else { 0 };
        Self { start: memory.as_mut_ptr().cast(), room, further }
    }

    /// Where this line's are, whose input and output begin there.
    #[inline(always)]
    pub fn at<T>(&self, line: usize, from: *const T, to: *const T) -> *mut R {
        let start = self.start.wrapping_add(line % 2 * self.room);
        clear_of(start, from, to).wrapping_byte_add(line % 2 * self.further)
    }
}

/// The place less than a page behind `start`, where a line of the cache begins, that is as far as can be from where what is stored there
/// keeps loads of `from` waiting, and what is stored to `to` loads from there.
#[inline(always)]
fn clear_of<R, T>(start: *mut R, from: *const T, to: *const T) -> *mut R {
    let between = (to as usize).wrapping_sub(from as usize) % PAGE;
    let behind = between / 2 + if between < 3 * PAGE / 4 { PAGE / 2 } else { 0 };
    let skip = (from as usize).wrapping_add(behind).wrapping_sub(start as usize) % PAGE;
    start.wrapping_byte_add(skip / CACHE_LINE * CACHE_LINE)
}

/// Whether a result of this size comes from memory and goes there.
pub(super) fn leaves_caches<T>(out: &Elements<T>) -> bool {
    out.bytes() >= 16 << 20
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Every page that some of the elements are in, and no other, whether one thread, two or more use them.
    #[cfg(target_os = "linux")]
    #[test]
    fn pages_are_used_first() {
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            pool.install(|| {
                let mut out = Unfilled::<u16>::new(10 * HUGE_PAGE);
                let used = |out: &Unfilled<u16>| {
                    let pages = out.first_use.iter().flat_map(|first_use| &first_use.used);
                    pages.map(|page| page.is_completed()).collect::<Vec<_>>()
                };
                let page_of = {
                    let begin = out.vec.as_ptr() as usize;
                    move |element: usize| (begin + 2 * element) / HUGE_PAGE - begin / HUGE_PAGE
                };
                assert_eq!(out.first_use.is_some(), threads > 1);
                let mut expected = vec![false; used(&out).len()];
                for elements in [3..3, 5..6, 4_000_000..7_000_000, 9 * HUGE_PAGE..11 * HUGE_PAGE, 0..10 * HUGE_PAGE] {
                    out.elements().use_first(elements.clone());
                    let end = elements.end.min(10 * HUGE_PAGE);
                    if threads > 1 && elements.start < end {
                        expected[page_of(elements.start)..page_of(end - 1) + 1].fill(true);
                    }
                    assert_eq!(used(&out), expected, "{elements:?}, {threads} threads");
                }
            });
        }
    }
}
