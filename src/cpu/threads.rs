//! Rayon's threads, for functions that are told at run time what to do: for each pass, dtype and level anew, rayon's own code
//! was half of the crate's.
//!
//! The caller works, too, and waits for nobody but who is at work: threads of the pool that sleep take longer to wake up (30 to 50
//! µs, 15 of which are the caller's, or until the system finds a CPU for them, 2.7 ms) than 2¹⁸ elements take one thread, and so does a
//! caller that has gone to sleep. Work that is smaller than what that pays for is shared only while a [helper](Helper) is awake for a
//! caller with much of it, and larger work is not for a while where threads [came in vain](Wakes). Each thread has a share of neighbours,
//! which it takes in pieces, and the same one from call to call as far as that is possible, since its cache may have them still; then it
//! takes pieces of the others' shares.

use std::any::Any;
use std::cell::Cell;
use std::hint::spin_loop;
use std::ops::Range;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::Instant;

/// Pieces of a share, at least.
const PIECES: usize = 8;
/// How often the caller looks whether the last pieces are done before it sleeps.
const SPINS: usize = 1 << 12;

/// From this many elements on two or three threads are woken up, if no helper is awake: of calls with a pause of 1 ms between them 1536 × 1024
/// f32s take one thread 185 µs, and two of which the second sleeps 160, but 1024 × 1024 108 and 113.
const WAKE_FROM: usize = 3 << 19;
/// More threads from this many on: for some of them there are CPUs at once. With 2 ms between calls 1024 × 512 f32s take one thread of a Xeon
/// 170 to 190 µs, four threads 90 and 16 107; right behind other work of the pool's, which keeps them awake for a while, 160, 65 and 28.
const WAKE_MANY_FROM: usize = 1 << 18;
/// From this many on they are in any case: until the system has found CPUs for them takes less time.
const ALWAYS_FROM: usize = 1 << 24;
/// From this many elements on a helper has its share (64 × 1000 f32s take one thread 5.4 µs and two 3.4), …
const HELP_FROM: usize = 3 << 14;
/// … and from this many on it wakes others of the pool.
const HELP_ALL_FROM: usize = 1 << 18;
/// There are no more threads than have so many elements each: 512 × 512 f32s take eight threads as long as 16.
const PER_THREAD: usize = 1 << 15;

/// Whether there is only one.
pub(super) fn alone() -> bool {
    rayon::current_num_threads() == 1
}

/// Calls `f` where the stack has room for it: the threads that [`share`] calls have as much as this one.
#[cfg(not(unoptimised))]
#[inline(always)]
pub(super) fn with_room(f: impl FnOnce() + Send) {
    f()
}

/// … which it has not everywhere if the compiler does not optimise. Then a function has places of their own on the stack for all the steps of
/// what is inlined into it, up to 6 MB, of which a thread has 2 or 8.
#[cfg(unoptimised)]
pub(super) fn with_room(f: impl FnOnce() + Send) {
    const ROOM: usize = 1 << 26;
    static POOL: OnceLock<Option<rayon::ThreadPool>> = OnceLock::new();
    let Some(pool) = POOL.get_or_init(|| rayon::ThreadPoolBuilder::new().stack_size(ROOM).build().ok()) else {
        // There are no threads.
        return f();
    };
    // A thread of another pool would do other work of that while it waits, which may wait for a lock that this call is made under.
    let of_another = rayon::current_thread_index().is_some() && pool.current_thread_index().is_none();
    if !of_another {
        return pool.install(f);
    }
    let done = thread::scope(|scope| scope.spawn(|| pool.install(f)).join());
    if let Err(panic) = done {
        resume_unwind(panic)
    }
}

thread_local! {
    static AT_SHARED_WORK: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread does a part of what several do.
pub(super) fn at_shared_work() -> bool {
    AT_SHARED_WORK.get()
}

/// Calls `f(i)` for each i below `count`, on so many elements in all, by several threads, which take `most` of them at a time at most; or if
/// one takes less time, `by_one` instead.
pub(super) fn share(elements: usize, count: usize, most: usize, f: &(dyn Fn(usize) + Sync), by_one: impl FnOnce()) {
    if !try_share(elements, count, most, f) {
        by_one();
    }
    Calls::end(elements);
}

/// The same by all threads, whatever it takes to wake them up: for calls of a tenth of a millisecond each.
pub(super) fn share_few(count: usize, f: &(dyn Fn(usize) + Sync)) {
    let threads = rayon::current_num_threads().min(count);
    if threads > 0 {
        let work = Arc::new(Work::new(count, threads, 1, false, f));
        wake(&work, 1..3);
        work.take(0);
        work.wait();
    }
}

/// Has several threads do it, if they take less time, and answers whether they did.
fn try_share(elements: usize, count: usize, most: usize, f: &(dyn Fn(usize) + Sync)) -> bool {
    if elements < HELP_FROM || count <= 1 || alone() {
        return false;
    }
    let there = HELPER.is_there(elements);
    let wakes = !there && Wakes::pays(elements);
    if !there && !wakes {
        return false;
    }
    let most_threads = if elements < HELP_ALL_FROM { 2 } else { elements / PER_THREAD };
    let threads = rayon::current_num_threads().min(count).min(most_threads);
    let work = Arc::new(Work::new(count, threads, most, elements < ALWAYS_FROM, f));
    let given = there && HELPER.give(&work);
    if wakes || (!given && elements >= wake_from()) {
        wake(&work, 1..3);
    }
    let own = work.take(0);
    work.wait();
    if wakes {
        Wakes::learn(elements, 8 * (count - own) >= count);
    }
    true
}

/// From how many elements on threads are woken up.
fn wake_from() -> usize {
    if rayon::current_num_threads() < 4 {
        WAKE_FROM
    } else {
        WAKE_MANY_FROM
    }
}

/// Whether waking threads pays a caller. It does not where the system lets them run on the caller's CPU instead of it, as it often does for
/// one that has just slept: of calls with 10 ms between them 1536 × 1024 f32s took 0.31 ms, and if another thread took a part so 0.36.
#[derive(Clone, Copy)]
struct Wakes {
    /// From this many elements on it does.
    from: usize,
    /// How many calls did without.
    without: u32,
}

thread_local! {
    static WAKES: Cell<Wakes> = const { Cell::new(Wakes { from: 0, without: 0 }) };
}

impl Wakes {
    /// Before so many calls did without, after which one tries again.
    const AGAIN: u32 = 32;

    fn pays(elements: usize) -> bool {
        let Wakes { from, without } = WAKES.get();
        if elements < wake_from() {
            return false;
        }
        let tries = elements >= from || without >= Self::AGAIN;
        if !tries {
            WAKES.set(Wakes { from, without: without + 1 });
        }
        tries
    }

    /// From a call of so many elements, that threads `came` or did not.
    fn learn(elements: usize, came: bool) {
        let Wakes { from, .. } = WAKES.get();
        let from = if came { from.min(elements) } else { from.max(elements.saturating_mul(2)).min(ALWAYS_FROM) };
        WAKES.set(Wakes { from, without: 0 });
    }
}

/// A thread of the pool that stays awake between the calls of a thread that calls again and again: 512 × 512 f32s take 13 µs then, one
/// thread 26, and two of which the second has to be woken up 55. It is given its work without rayon, which would often wake another.
struct Helper {
    /// Whether a thread has been asked to be one, …
    asked: AtomicBool,
    /// … and whether it is.
    is_there: AtomicBool,
    /// Whether there is something for it to do, …
    called: AtomicBool,
    /// … and what. Somebody else may replace it: then its caller does it alone.
    work: Mutex<Option<Arc<Work>>>,
}

static HELPER: Helper = Helper {
    asked: AtomicBool::new(false),
    is_there: AtomicBool::new(false),
    called: AtomicBool::new(false),
    work: Mutex::new(None),
};

/// Calls with so many elements in all, each of which begins within so many nanoseconds of the one before's end, …
const MANY: usize = 1 << 20;
/// … are answered by a helper, which waits as long for the next one.
const CLOSE: u64 = 25_000;
/// How often a helper looks for a call before it looks what else the pool has to do.
const LOOKS: usize = 32;

impl Helper {
    /// Whether there is one, and it has answered: the system may let it wait, for the caller's CPU most often. Asks one to come for a
    /// caller that calls often; that costs it 10 to 15 µs, little beside the calls before.
    fn is_there(&'static self, elements: usize) -> bool {
        // Threads of the pool share what they do already. In WebAssembly there is no clock.
        if cfg!(target_family = "wasm") || rayon::current_thread_index().is_some() {
            return false;
        }
        if self.is_there.load(Ordering::Relaxed) {
            return !self.called.load(Ordering::Relaxed);
        }
        let (many, takes) = Calls::begin(elements);
        if many && !self.asked.swap(true, Ordering::Relaxed) {
            rayon::spawn(move || self.help(takes));
        }
        false
    }

    /// Gives it work, unless it has just gone.
    fn give(&self, work: &Arc<Work>) -> bool {
        *self.work.lock().unwrap_or_else(PoisonError::into_inner) = Some(work.clone());
        self.called.store(true, Ordering::SeqCst);
        self.is_there.load(Ordering::SeqCst)
    }

    /// Until nobody has called for some time. The caller has a call to finish that takes so many nanoseconds.
    fn help(&self, takes: u64) {
        self.is_there.store(true, Ordering::Relaxed);
        let mut until = now() + takes + CLOSE;
        loop {
            for _ in 0..LOOKS {
                if self.answer() {
                    until = now() + CLOSE;
                }
                spin_loop();
            }
            if now() >= until {
                break;
            }
            rayon::yield_now();
            // The system wakes a thread where another one runs, often the caller, and moves it later.
            thread::yield_now();
        }
        self.is_there.store(false, Ordering::SeqCst);
        self.answer();
        self.asked.store(false, Ordering::Relaxed);
    }

    /// Does what there is to do, if anything.
    fn answer(&self) -> bool {
        if !self.called.load(Ordering::SeqCst) || !self.called.swap(false, Ordering::SeqCst) {
            return false;
        }
        let work = self.work.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(work) = work {
            wake(&work, 2..5);
            work.take(1);
        }
        true
    }
}

/// A thread's calls that no helper answered.
#[derive(Clone, Copy)]
struct Calls {
    /// When this one began, …
    began: Option<u64>,
    /// … and the last one ended.
    ended: u64,
    /// The elements of those that were close to each other.
    elements: usize,
    /// How many nanoseconds 1024 elements of the last one took, but not longer than one each.
    pace: u64,
}

thread_local! {
    static CALLS: Cell<Calls> = const { Cell::new(Calls { began: None, ended: 0, elements: 0, pace: 256 }) };
}

impl Calls {
    /// Whether this thread's last ones, with this one, are [`MANY`] and close, and how many nanoseconds this one may take.
    fn begin(elements: usize) -> (bool, u64) {
        let (now, last) = (now(), CALLS.get());
        let close = now < last.ended + CLOSE;
        let in_all = elements.saturating_add(if close { last.elements } else { 0 });
        let many = in_all >= MANY && in_all > elements;
        CALLS.set(Calls { began: Some(now), elements: if many { 0 } else { in_all }, ..last });
        (many, (elements as u64).saturating_mul(last.pace) >> 10)
    }

    /// Notes when the one that [began](Self::begin) ended, if one did.
    fn end(elements: usize) {
        let last = CALLS.get();
        if let Some(began) = last.began {
            let ended = now();
            let pace = (((ended - began) << 10) / elements.max(1) as u64).min(1 << 10);
            CALLS.set(Calls { began: None, ended, pace, ..last });
        }
    }
}

/// Nanoseconds since the first call.
fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// The CPU that runs this thread.
fn cpu() -> Option<i32> {
    #[cfg(target_os = "linux")]
    // SAFETY: it takes nothing.
    return Some(unsafe { libc::sched_getcpu() });
    #[cfg(not(target_os = "linux"))]
    None
}

/// Wakes these threads, each of which wakes two others first: all by one would take it too long.
fn wake(work: &Arc<Work>, threads: Range<usize>) {
    for thread in threads.filter(|&thread| thread < work.shares.len()) {
        let work = work.clone();
        rayon::spawn(move || {
            if work.left.load(Ordering::Relaxed) > 0 {
                wake(&work, 2 * thread + 1..2 * thread + 3);
                if work.has_callers_cpu() {
                    return;
                }
                // Of the pool's threads one more may come than there are shares but the caller's.
                let index = rayon::current_thread_index().unwrap_or(thread);
                work.take(1 + index % (work.shares.len() - 1));
            }
        });
    }
}

struct Work {
    /// It lives until nothing is left.
    f: *const (dyn Fn(usize) + Sync),
    /// The caller's first.
    shares: Vec<Share>,
    /// How many calls of `f` have not returned.
    left: AtomicUsize,
    /// What one of them panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    caller: Thread,
    /// The caller's, if it is short, and that is known.
    cpu: Option<i32>,
}

// SAFETY: `f` may be called by several threads; the rest is theirs to share anyway.
unsafe impl Send for Work {}
unsafe impl Sync for Work {}

/// No two of them in one cache line: as far apart, not aligned. For memory that is aligned threads wait for each other, asleep.
#[repr(C)]
struct Share {
    /// The first that nobody has taken.
    next: AtomicUsize,
    end: usize,
    piece: usize,
    _apart: [usize; 5],
}

impl Share {
    /// What is to be done next.
    fn take(&self) -> Option<Range<usize>> {
        let start = self.next.fetch_add(self.piece, Ordering::Relaxed);
        (start < self.end).then(|| start..self.end.min(start + self.piece))
    }
}

impl Work {
    /// Which is to be [waited](Self::wait) for before `f` ends.
    fn new(count: usize, threads: usize, most: usize, short: bool, f: &(dyn Fn(usize) + Sync)) -> Self {
        let start = |share: usize| (count as u128 * share as u128 / threads as u128) as usize;
        let share = |share: usize| {
            let range = start(share)..start(share + 1);
            let piece = (range.len() / PIECES).clamp(1, most);
            Share { next: AtomicUsize::new(range.start), end: range.end, piece, _apart: [0; 5] }
        };
        // SAFETY: only how long it lives is forgotten; that is what `f` promises.
        let f = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(f) };
        let shares = (0..threads).map(share).collect();
        Self {
            f,
            shares,
            left: AtomicUsize::new(count),
            panic: Mutex::new(None),
            caller: thread::current(),
            cpu: if short { cpu() } else { None },
        }
    }

    /// Whether the caller cannot go on while this thread does.
    fn has_callers_cpu(&self) -> bool {
        self.cpu.is_some() && self.cpu == cpu()
    }

    /// Takes pieces of this share, then of the others, and returns how many calls that were. The others are told once: threads that write to
    /// the same line of the cache wait for each other.
    fn take(&self, share: usize) -> usize {
        let (before, from) = self.shares.split_at(share);
        let mut taken = 0;
        AT_SHARED_WORK.set(true);
        for share in from.iter().chain(before) {
            while let Some(range) = share.take() {
                taken += range.len();
                let call = AssertUnwindSafe(|| {
                    // SAFETY: what was taken is left until it is done, and the caller waits for it.
                    let f = unsafe { &*self.f };
                    range.for_each(f)
                });
                if let Err(panic) = catch_unwind(call) {
                    self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
                }
            }
        }
        AT_SHARED_WORK.set(false);
        if taken > 0 && self.left.fetch_sub(taken, Ordering::AcqRel) == taken {
            self.caller.unpark();
        }
        taken
    }

    /// Until nothing is left, for the caller. Panics as a call of `f` did.
    fn wait(&self) {
        // Whoever has the last pieces needs less time, most often, than it takes to wake up.
        let mut spins = 0;
        while self.left.load(Ordering::Acquire) > 0 {
            if spins < SPINS {
                spins += 1;
                spin_loop();
            } else {
                thread::park();
            }
        }
        if let Some(panic) = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
            resume_unwind(panic);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call is made under locks, candle's and perhaps its caller's: no thread does other work of a pool before it is through.
    #[test]
    fn nothing_else_within_a_call() {
        use rayon::prelude::*;
        thread_local! {
            static WITHIN: Cell<bool> = const { Cell::new(false) };
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().expect("a pool");
        let call = |_| {
            assert!(!WITHIN.replace(true), "a thread took other work on");
            with_room(|| {
                share(1 << 20, 8, usize::MAX, &|_| thread::sleep(std::time::Duration::from_micros(100)), || ())
            });
            WITHIN.set(false);
        };
        pool.install(|| (0..50).into_par_iter().for_each(call));
        (0..50).into_par_iter().for_each(call);
    }

    /// Every i once, whatever the number of threads, from within the pool or not.
    #[test]
    fn each_once() {
        for threads in [1, 2, 3, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            for (count, most) in [(0, 1), (1, 1), (2, usize::MAX), (7, 2), (1000, 1), (1000, 16), (1001, usize::MAX)] {
                let calls: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                let call = |i: usize| {
                    calls[i].fetch_add(1, Ordering::Relaxed);
                };
                let shared = [
                    try_share(usize::MAX, count, most, &call),
                    pool.install(|| try_share(usize::MAX, count, most, &call)),
                ];
                assert_eq!(shared, [!alone() && count > 1, threads > 1 && count > 1]);
                let times = shared.into_iter().filter(|&shared| shared).count();
                assert!(
                    calls.iter().all(|calls| calls.load(Ordering::Relaxed) == times),
                    "{count} on {threads} threads"
                );
            }
        }
    }

    /// Where they came in vain threads are not woken up for some calls, unless those are larger.
    #[test]
    fn threads_are_woken_up_where_that_pays() {
        let without = |elements| (0..=Wakes::AGAIN).take_while(|_| !Wakes::pays(elements)).count();
        let from = wake_from();
        let few = [from, 2 * from, 4 * from, ALWAYS_FROM];
        assert!(!Wakes::pays(from - 1));
        assert_eq!(few.map(without), [0; 4]);
        Wakes::learn(from, false);
        assert_eq!(without(2 * from), 0);
        assert_eq!(without(from), Wakes::AGAIN as usize);
        // Again in vain, also for the larger ones
        Wakes::learn(from, false);
        Wakes::learn(2 * from, false);
        assert_eq!(without(2 * from), Wakes::AGAIN as usize);
        // They came.
        Wakes::learn(2 * from, true);
        assert_eq!(without(2 * from), 0);
        assert_eq!(without(from), Wakes::AGAIN as usize);
        Wakes::learn(from, true);
        Wakes::learn(usize::MAX, false);
        assert_eq!(without(ALWAYS_FROM), 0);
        assert!(!Wakes::pays(from - 1));
    }

    /// Every i once, too, while a helper is called, which is awake after some small calls.
    #[test]
    fn a_helper_comes() {
        if alone() {
            return crate::testing::say_skipped("a_helper_comes", "there is one thread only");
        }
        let mut helped = false;
        // Other tests may have all CPUs for a while.
        let began = Instant::now();
        while began.elapsed().as_secs() < 60 {
            let calls: Vec<AtomicUsize> = (0..3).map(|_| AtomicUsize::new(0)).collect();
            let call = |i: usize| {
                calls[i].fetch_add(1, Ordering::Relaxed);
            };
            let mut shared = true;
            share(HELP_FROM, calls.len(), 1, &call, || shared = false);
            if shared {
                assert!(calls.iter().all(|calls| calls.load(Ordering::Relaxed) == 1));
                helped = true;
            } else if helped {
                return;
            }
            if helped {
                // Until it is gone.
                thread::sleep(std::time::Duration::from_micros(30));
            }
        }
        panic!("{}", if helped { "it stays" } else { "nobody came" });
    }

    /// The caller sees it when nobody is at work any more.
    #[test]
    fn a_panic_is_passed_on() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().expect("a pool");
        for at in [0, 9, 99] {
            let returned = AtomicUsize::new(0);
            let call = |i: usize| {
                assert_ne!(i, at);
                returned.fetch_add(1, Ordering::Relaxed);
            };
            let panic = catch_unwind(AssertUnwindSafe(|| pool.install(|| try_share(usize::MAX, 100, 1, &call))));
            assert!(panic.is_err());
            assert_eq!(returned.load(Ordering::Relaxed), 99);
        }
    }
}
