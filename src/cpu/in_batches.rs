//! Short lines along the last dimension in batches whose maxima, and whose sums, are one vector: the steps from a vector to one number are
//! shared, as are divisions and logarithms.

use super::at_once::{find_apart, line_made, lines_of_batch, room_of_line, Batches, Lines};
use super::lanes::{each, sum_of_vectors, Lanes, Pack, MAX_LANES};
use super::level::Simd;
use super::memory::{three_apart, CacheLines};
use super::rows::ahead_if;
use super::Element;
use crate::state::{Number, Real};
use std::mem::MaybeUninit;

/// Lines of up to so many elements are taken in batches, here or [`at_once`](super::at_once), which of 200 f32s with a scale takes 0.8 of the
/// time that they take one by one (AVX-512; AVX2 1.04).
pub(super) const BATCH_LINE: usize = 256;

/// Batches take so many bytes at most, since up to six are in work, of elements, of what is held and of results: twice as many took logarithms of
/// lines of 128 f32s 1.1 times as long.
const BATCH_BYTES: usize = 4096;
/// What three batches need room for, in numbers of 4 bytes.
const ROOM: usize = 3 * three_apart::<f32>(BATCH_BYTES / 4);

/// What is found of the lines in work.
struct Found<V: Lanes> {
    /// Of the lines that are read: a vector for each with their maxima.
    maxima: [V; MAX_LANES],
    /// Of those to be summed: what exponentials are relative to, …
    references: [V::Real; MAX_LANES],
    /// … what their sinks add, …
    of_sinks: V,
    /// … and then a vector for each, whose sum is theirs.
    sums: [V; MAX_LANES],
    /// Of those to be written: what exponentials were relative to, …
    summed_references: [V::Real; MAX_LANES],
    /// … and what they are multiplied with, or the logarithms of the sums.
    factors: [V::Real; MAX_LANES],
}

impl<V: Lanes> Found<V> {
    #[inline(always)]
    fn new() -> Self {
        let zero = V::Real::ZERO;
        Self {
            maxima: [V::splat(V::Real::NEG_INFINITY); MAX_LANES],
            references: [zero; MAX_LANES],
            of_sinks: V::splat(zero),
            sums: [V::splat(zero); MAX_LANES],
            summed_references: [zero; MAX_LANES],
            factors: [zero; MAX_LANES],
        }
    }

    /// When lines are read that are to be summed next, with these sinks.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    unsafe fn read(&mut self, sinks: Option<&[V::Real; MAX_LANES]>) {
        // Finite where nothing is above −∞, so that exp(−∞ − reference) is 0 and a NaN survives.
        let mut reference = V::max_of_each(&self.maxima[..V::COUNT]).or_greater(V::splat(V::Real::LOWEST));
        // SAFETY of the block: no vector has more lanes.
        unsafe {
            if let Some(sinks) = sinks {
                let sinks = V::load(sinks.as_ptr());
                reference = sinks.or_greater(reference);
                self.of_sinks = (sinks - reference).exp();
            }
            reference.store(self.references.as_mut_ptr());
        }
    }

    /// When lines are summed that are to be written next. `LOG`, `factor` and `of_nothing`: as of [`in_batches`].
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    unsafe fn summed<const LOG: bool>(&mut self, factor: V, of_nothing: V) {
        let (one, half) = (V::splat(V::Real::ONE), V::splat(V::Real::nearest(0.5)));
        let sum = V::sum_of_each(&self.sums[..V::COUNT]).unscaled() + self.of_sinks;
        let found = if LOG { one.or_greater(sum).ln() } else { one / sum * factor };
        // The maximum alone adds 1, unless there is nothing.
        let found = sum.if_less(half, of_nothing, found);
        // SAFETY of the block: no vector has more lanes.
        unsafe {
            found.store(self.factors.as_mut_ptr());
            V::load(self.references.as_ptr()).store(self.summed_references.as_mut_ptr());
        }
    }
}

/// Σ exp(logit − reference) of a line, [scaled](Lanes::scaled_exp), in a vector. `logit(start, count)` is a vector of logits, whose
/// exponentials are left at `kept`, if they are to be. `meanwhile(start, count)` is called for each vector.
///
/// # Safety
/// The CPU has the instructions of `V`, and at `kept` is room for the line up to a whole vector. `VECTORS`: as of [`sum_of_vectors`].
#[inline(always)]
pub(super) unsafe fn line_sum<V: Lanes, const VECTORS: usize>(
    logit: impl Fn(usize, usize) -> V,
    len: usize,
    reference: V::Real,
    kept: Option<*mut V::Real>,
    mut meanwhile: impl FnMut(usize, usize),
) -> V {
    let reference = V::splat(reference);
    sum_of_vectors::<V, VECTORS>(
        len,
        #[inline(always)]
        |i, count| (logit(i, count) - reference).scaled_exp(),
        #[inline(always)]
        |i, count, exp: V| {
            if let Some(kept) = kept {
                // SAFETY: as promised by the caller.
                unsafe { exp.store(kept.add(i)) };
            }
            meanwhile(i, count);
        },
    )
}

/// Batches of lines: while the sums of one are taken, the logits of the next one are made and the results of the one before
/// are written. So memory is read and written all the while. `logit(line, start, count)` makes a vector of logits, −∞ in lanes that are not of
/// the line, and `ask(line, start)` asks for what it is made from. `LEN`: that of the lines, or 0 for any; `VECTORS`: of how many they are, as of
/// [`sum_of_vectors`]. `LOG`: whether results are logarithms; of these there is no factor.
///
/// # Safety
/// The CPU has the instructions of `S`; the lines are there, their `len` is 1 to [`BATCH_LINE`] and what `LEN` and `VECTORS` say, and `to`
/// is valid for writes of their results.
#[inline(always)]
pub(super) unsafe fn in_batches<
    S: Simd,
    T: Element,
    B: Batches<T>,
    const LEN: usize,
    const VECTORS: usize,
    const LEAVES_CACHES: bool,
    const LOG: bool,
>(
    batches: &mut B,
    lines: Lines<T>,
    ask: impl Fn(&B::Line, usize),
    logit: impl Fn(&B::Line, usize, usize) -> T::Lanes<S>,
) {
    let Lines { scores, to, count, .. } = lines;
    let (factor, of_nothing) = (T::Lanes::<S>::splat(lines.factor), T::Lanes::<S>::splat(lines.of_nothing));
    let len = if LEN == 0 { lines.len } else { LEN };
    let room = room_of_line::<T::Lanes<S>, VECTORS>(len);
    let (most, distance) = (lines_of_batch::<S, T>(BATCH_BYTES, room), ahead_if::<T>(LEAVES_CACHES));
    let drops = batches.drops();
    // Logits are held from when they are made until results are written, or if they are nothing but scores their exponentials from when they are
    // summed on.
    let (places, batch_room) = (if B::OF_SCORES { 2 } else { 3 }, three_apart::<T::Real>(most * room));
    let mut held = CacheLines([const { MaybeUninit::<T::Real>::uninit() }; ROOM]);
    assert!(places * batch_room <= ROOM);
    let held = held.0.as_mut_ptr().cast::<T::Real>();
    let in_all = count.div_ceil(most);
    let mut found = Found::<T::Lanes<S>>::new();
    let none = T::Lanes::<S>::splat(T::Real::NEG_INFINITY);
    // How many lines were found, and the first of these that has not been in a batch yet
    let (mut in_found, mut next_found) = (0, 0);
    for step in 0..in_all + 2 {
        // The first line of the batch that it is the turn of after so many steps, how many there are, and where they are held.
        let turn = {
            #[inline(always)]
            |after: usize| match step.checked_sub(after) {
                Some(turn) if turn < in_all => {
                    (turn * most, most.min(count - turn * most), held.wrapping_add(turn % places * batch_room))
                }
                _ => (0, 0, held),
            }
        };
        let ((read, to_read, z_read), (summed, to_sum, z_sum), (written, to_write, z_written)) =
            (turn(0), turn(1), turn(2));
        // SAFETY of the block: the elements are there, `held` has room for the lines in work; the rest by the caller's promise.
        unsafe {
            if to_read > 0 && next_found == in_found {
                (in_found, next_found) = (find_apart::<S, T>(batches, count - read, most), 0);
            }
            let of_found = next_found;
            next_found += to_read;
            let (keep, keep_room) = if drops { batches.keep::<S>(written, to_write) } else { (std::ptr::null(), 0) };
            let batches = &*batches;
            let found_lines = batches.from(of_found);
            let line_from = {
                #[inline(always)]
                |first: usize, i: usize| B::line(&found_lines, i, scores.add((first + i) * len))
            };
            // The logits of line `i` of a batch whose first one is that: those held at `z`, or made anew.
            let logits = {
                #[inline(always)]
                |first: usize, i: usize, z: *mut T::Real| {
                    let (line, z, logit) = (line_from(first, i), z.add(i * room), &logit);
                    #[inline(always)]
                    move |at: usize, count| match B::OF_SCORES {
                        true => logit(&line, at, count),
                        false => T::Lanes::<S>::load(z.add(at)),
                    }
                }
            };
            let Found { maxima, references, sums, summed_references, factors, .. } = &mut found;
            let results = {
                #[inline(always)]
                |i: usize| {
                    let (reference, factor) =
                        (T::Lanes::<S>::splat(summed_references[i]), T::Lanes::<S>::splat(factors[i]));
                    let (logit, z) = (logits(written, i, z_written), z_written.add(i * room));
                    let result = {
                        #[inline(always)]
                        move |at, count| match LOG {
                            true => logit(at, count) - reference - factor,
                            false => T::Lanes::<S>::load(z.add(at)) * factor,
                        }
                    };
                    let keep = drops.then(|| keep.add(i * keep_room));
                    line_made::<S, T>(result, to.add((written + i) * len), Some(distance), keep, None)
                }
            };
            let kept = {
                #[inline(always)]
                |i: usize| (!LOG).then(|| z_sum.add(i * room))
            };
            let hold = {
                #[inline(always)]
                |i: usize| (!B::OF_SCORES).then(|| z_read.add(i * room))
            };
            // A line's maximum with that of a vector of logits, which are held if they are to be.
            let take = {
                #[inline(always)]
                |line: &B::Line, hold: Option<*mut T::Real>, max, at: usize, count| {
                    let logit = logit(line, at, count);
                    if let Some(hold) = hold {
                        logit.store(hold.add(at));
                    }
                    logit.or_greater(max)
                }
            };
            if [to_read, to_sum, to_write] == [most; 3] {
                for i in 0..most {
                    let (line, hold, mut max) = (line_from(read, i), hold(i), none);
                    let mut write = results(i);
                    sums[i] = line_sum::<T::Lanes<S>, VECTORS>(
                        logits(summed, i, z_sum),
                        len,
                        references[i],
                        kept(i),
                        #[inline(always)]
                        |at, count| {
                            ask(&line, at + distance);
                            max = take(&line, hold, max, at, count);
                            write(at, count);
                        },
                    );
                    maxima[i] = max;
                }
            } else {
                for (i, of_line) in maxima[..to_read].iter_mut().enumerate() {
                    let (line, hold, mut max) = (line_from(read, i), hold(i), none);
                    each::<T::Lanes<S>>(
                        0..len,
                        #[inline(always)]
                        |at, count| max = take(&line, hold, max, at, count),
                    );
                    *of_line = max;
                }
                for i in 0..to_sum {
                    sums[i] = line_sum::<T::Lanes<S>, VECTORS>(
                        logits(summed, i, z_sum),
                        len,
                        references[i],
                        kept(i),
                        #[inline(always)]
                        |_, _| (),
                    );
                }
                for i in 0..to_write {
                    each::<T::Lanes<S>>(0..len, results(i));
                }
            }
            found.summed::<LOG>(factor, of_nothing);
            found.read(batches.sinks(of_found));
        }
    }
}
