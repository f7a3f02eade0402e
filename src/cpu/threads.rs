//! Rayon's threads, for functions that are told at run time what to do: for each pass, dtype and level anew, rayon's own code
//! was half of the crate's.

use rayon::prelude::*;

/// Whether there is only one.
pub(super) fn alone() -> bool {
    rayon::current_num_threads() == 1
}

/// Calls `f` on one of the threads, unless there is only one.
pub(super) fn visit(f: &(dyn Fn() + Sync)) {
    if alone() {
        f()
    } else {
        rayon::scope(|_| f())
    }
}

/// Calls `f(i)` for each i below `count`; threads trade `most` of them at a time at most.
pub(super) fn each(count: usize, most: usize, f: &(dyn Fn(usize) + Sync)) {
    if alone() {
        (0..count).for_each(f)
    } else {
        (0..count).into_par_iter().with_max_len(most).for_each(f)
    }
}
