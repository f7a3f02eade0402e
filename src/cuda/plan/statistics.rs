//! Log-sum-exp, losses and the greatest elements.

use super::group::{
    are_words, blocks_of_few, group, group_of_pairs, in_clusters, threads_and_across, GROUP_ELEMENTS, GROUP_RESIDENT,
    GROUP_TILE, MUCH_KEPT,
};
use super::{
    plan, plan_across, tile_bytes, tile_fills, tile_units, whole_packs, DeviceFacts, Elements, Kernel, Plan, MAX_BLOCK,
    PACK_BYTES, THREADS, TILE_FEW_UNITS, WARP, WARP_BLOCK,
};
use crate::lines::Lines;

/// Of log-sum-exp and losses, as `kernels/statistics.cu` and `loss_backward.cu` have them: packs of 16 bytes in flight for a thread.
pub(super) const LOSS_PACKS: usize = 4;
/// Contiguous lines up to this length take a warp or less.
const SHORT_STATISTICS: usize = 512;
/// Words of 4 bytes (f64: elements) of a thread then, but for one more that makes an odd number.
pub(super) const STATISTICS_WORDS: usize = 16;
/// The packs that a thread reads one after the other where there are many lines, and the most threads. 8192 x 4096: 64 threads
/// 0.52, 256 0.69 (f32), 32 threads 0.58, 128 0.68 (bf16); 65536 x 1024: 32 threads 0.49 / 0.65, 64 0.59 / 1.21; 4096 x
/// 128256: 128 threads 0.48 / 0.49, 256 0.48 / 0.50.
const STATISTICS_PACKS: usize = 16;
pub(super) const STATISTICS_BLOCK: usize = 128;
const LOSS_BLOCK: usize = 256;
/// Rows of lines side by side that a thread has in flight.
const LOSS_ROWS: usize = 8;
/// Lines side by side up to this length, whose rows have a warp's elements at least, are one thread's, and in its registers; longer ones where
/// there are so many such threads for each multiprocessor. On an H200, a group of threads and one, us: 8 x 21 x 262144 f32 99 and 61, bf16 71 and
/// 46; 16 x 150 x 4096 27 and 13, 19 and 12 (bf16: 248 threads each); 4 x 1000 x 4096 30 and 75, 19 and 44 (124 and 62).
const HELD_STATISTICS: usize = 32;
const THREADS_OF_LINES: usize = 192;
/// Contiguous lines of whole packs take a warp or less where that has so many packs for each thread. On an H200, us, in tiles, by two and by four packs: 1048576
/// x 16 f32 41, 30 and 23; 262144 x 128 bf16 31, 28 and 21.
const WARP_PACKS: usize = 4;
/// Gradients of contiguous lines by packs, but for the shortest that are not whole ones: up to so many a thread has a few, up to so many some of
/// them; of longer ones blocks have a part. On an H200, us, by elements and by packs: 524288 x 64 f32 126 and 75, 340000 x 77 bf16 96 and 50, 340000 x 49 54 and
/// 35, 1000000 x 21 69 and 69, 1000000 x 10 36 and 43; by whole blocks and by groups 65536 x 1000 bf16 194 and 69, 32768 x 2048 f32 144 and 132.
const GRADIENTS_BY_ELEMENTS: usize = 40;
const PACKS_OF_FEW: usize = 8;
const PACKS_OF_GROUP: usize = THREADS * LOSS_PACKS;
/// So many lines' statistics a block sums up by itself, before its gradients, too. Of more, blocks sum up parts of so many at least.
const LINES_OF_LOSS: usize = 8192;
const PART_OF_LOSS: usize = 4096;
const MOST_PARTS: usize = 128;
/// Lines up to these lengths take so many lanes of a warp to find up to [`FEW_TOP_K`] places, as `kernels/top_k_short.cu` has
/// them. On an H100, f32, us: 16384 x 8 by 8 lanes 3.3, by 16 5.0, 16384 x 64 by 16 7.7, by 32 10.6.
const SHORT_TOP_K: [(usize, usize); 8] =
    [(8, 2), (16, 4), (32, 8), (64, 16), (128, WARP), (256, WARP), (512, WARP), (1024, WARP)];
/// Of f64
const SHORT_TOP_K_F64: usize = 256;
const FEW_TOP_K: usize = 64;
/// The elements that a warp writes the gradient of, as `kernels/top_k_backward.cu` has them.
const TOP_K_GRADIENT: usize = 1024;
/// Elements of a thread of longer lines, from as many on as fill the GPU and up to what so many blocks a line leave; and the threads of a block: at
/// least twice as many as it is to find. On an H200, k 50, us, f32 / bf16: 4096 x 1025 with 128 threads 30 / 32, 256 51 / 55, 512 110 / 110, and k 8 with 64
/// 20 / 22, 128 26 / 28; 1024 x 50257 with 128 81 / 67, 256 81 / 61, 512 85 / 66; 256 x 32000 with 128 22 / 18, 256 15.9 / 12.7, 512 15.5 / 12.7.
const TOP_K_ELEMENTS: (usize, usize) = (16, 256);
const TOP_K_BLOCKS: (usize, usize) = (64, 512);
/// Threads that a multiprocessor has room for with that kernel's registers
const TOP_K_RESIDENT: usize = 1024;
/// Bytes that a block selects by: two numbers for each of 1024 digits, and 35 more. Twice as many digits left room for 13 blocks of 64 threads for 16.
pub(super) const SELECT_BYTES: usize = (2 * 1024 + 35) * 4;
/// Up to so many places have room for four times as many: a third of a line tells a threshold that about three times as many reach.
const TOP_K_BY_THIRD: usize = 512;
/// The most places that a block finds, as `kernels/top_k.cu` has it: it sorts them in shared memory.
pub(crate) const MOST_TOP_K: usize = 2048;

/// At least so many threads to each contiguous line, a power of two, of which log2 is the kernel's parameter.
fn groups(kernel: Kernel, lines: Lines, threads: usize) -> Plan {
    let shift = threads.next_power_of_two().ilog2();
    let grid = lines.count().div_ceil(THREADS >> shift);
    Plan { parameter: shift as i32, ..plan(kernel, grid, THREADS) }
}

/// Whether threads that have whole lines side by side take them in pairs, and how many threads that makes.
fn pairs_and_threads(lines: Lines, elements: Elements) -> (bool, usize) {
    let pairs = are_words(lines, elements);
    (pairs, lines.count() / if pairs { 2 } else { 1 })
}

/// The kernel for log-sum-exp and the statistics of a loss.
/// `smooth`: sums over the classes are asked for, too.
pub(crate) fn statistics(lines: Lines, elements: Elements, smooth: bool, device: DeviceFacts) -> Plan {
    if lines.inner > 1 {
        let (pairs, threads) = pairs_and_threads(lines, elements);
        let held = lines.len <= HELD_STATISTICS && (pairs || elements.size == size_of::<f32>());
        if !smooth && lines.inner >= WARP && (held || threads >= THREADS_OF_LINES * device.multiprocessors) {
            return plan(Kernel::StatisticsThread { pairs, held }, threads.div_ceil(THREADS), THREADS);
        }
        let kernel = |pairs| Kernel::StatisticsColumns { pairs };
        return group_of_pairs(kernel, MUCH_KEPT, lines, elements, 0, device);
    }
    let packs = lines.len * elements.size / PACK_BYTES;
    let many = lines.count() >= 2 * device.multiprocessors;
    let fits_warp = whole_packs(lines, elements) && packs <= WARP_PACKS * WARP;
    if !smooth && fits_warp && (many || lines.len <= SHORT_STATISTICS) {
        return groups(Kernel::StatisticsWarp, lines, packs.div_ceil(WARP_PACKS));
    }
    if lines.len <= SHORT_STATISTICS {
        let units = tile_units(lines, elements.size);
        let enough = (0..5).find(|shift| units <= STATISTICS_WORDS << shift).unwrap_or(5);
        let shift = (enough..5)
            .find(|&shift| tile_fills(lines, 1 << shift, device) || units <= TILE_FEW_UNITS << shift)
            .unwrap_or(5);
        let per_block = WARP_BLOCK >> shift;
        return Plan {
            parameter: shift,
            shared_bytes: tile_bytes(per_block, lines, elements.size),
            ..plan(Kernel::StatisticsTile, lines.count().div_ceil(per_block), WARP_BLOCK)
        };
    }
    let bytes = lines.len * elements.size;
    let threads = |packs, blocks| bytes.div_ceil(PACK_BYTES * packs * blocks).next_multiple_of(WARP);
    if many {
        let block = threads(STATISTICS_PACKS, 1).min(STATISTICS_BLOCK);
        return plan(Kernel::StatisticsRows, lines.count(), block);
    }
    // Few lines need all threads that they can have.
    let blocks = blocks_of_few(lines, elements.size, 1, device);
    let plan = plan(Kernel::StatisticsRows, lines.count(), threads(LOSS_PACKS, blocks).min(MAX_BLOCK));
    in_clusters(plan, blocks)
}

/// The kernel for the gradient of a loss.
pub(crate) fn loss_backward(lines: Lines, elements: Elements, device: DeviceFacts) -> Plan {
    let resident = GROUP_RESIDENT * device.multiprocessors;
    if lines.inner >= WARP && lines.len <= i32::MAX as usize {
        let (pairs, threads) = pairs_and_threads(lines, elements);
        // Blocks that share rows need nothing of each other.
        let parts = resident.div_ceil(threads).min(lines.len.div_ceil(LOSS_ROWS)).min(u16::MAX as usize);
        return plan_across(Kernel::LossBackwardColumns { pairs }, (threads.div_ceil(THREADS), parts), THREADS);
    }
    if lines.inner > 1 {
        let plan = group(Kernel::LossBackwardNarrowColumns, lines, elements.size, 0, device);
        let (threads, across) = threads_and_across(plan.parameter);
        let rows = threads / across;
        let filling = 2 * resident / (threads * plan.groups(lines));
        let parts = |each: usize| lines.len.div_ceil(rows * each);
        let parts = parts(GROUP_ELEMENTS).max(filling.min(parts(GROUP_TILE))).min(u16::MAX as usize);
        return Plan { grid: (plan.grid.0, parts as u32), ..plan };
    }
    let bytes = lines.len * elements.size;
    let packs = bytes.div_ceil(PACK_BYTES);
    if bytes < GRADIENTS_BY_ELEMENTS && !whole_packs(lines, elements) {
        return groups(Kernel::LossBackwardShortRows, lines, lines.len.div_ceil(4));
    }
    if packs <= PACKS_OF_GROUP {
        let each = if packs <= PACKS_OF_FEW { LOSS_PACKS / 2 } else { LOSS_PACKS };
        return groups(Kernel::LossBackwardGroups, lines, packs.div_ceil(each));
    }
    let chunks = bytes.div_ceil(PACK_BYTES * LOSS_PACKS * LOSS_BLOCK);
    let plan = plan(Kernel::LossBackwardRows, lines.count() * chunks, LOSS_BLOCK);
    Plan { parameter: chunks as i32, ..plan }
}

/// The kernel that leaves parts of the sums over the lines of a loss, where they are too many for one block.
pub(crate) fn loss_of_parts(lines: usize) -> Option<Plan> {
    let parts = (lines / PART_OF_LOSS).min(MOST_PARTS);
    (lines > LINES_OF_LOSS).then(|| plan(Kernel::LossOfParts, parts, MAX_BLOCK))
}

/// The kernel for what a loss makes of the statistics of its lines, or for their gradients.
pub(crate) fn loss_of_lines(kernel: Kernel, lines: usize) -> Plan {
    let blocks = if kernel == Kernel::LossOfAllLines { 1 } else { lines.div_ceil(MAX_BLOCK) };
    plan(kernel, blocks, lines.next_multiple_of(WARP).min(MAX_BLOCK))
}

/// The kernel for the `k` greatest elements, up to [`MOST_TOP_K`], of contiguous lines of elements of `size` bytes.
pub(crate) fn top_k(lines: Lines, k: usize, size: usize, device: DeviceFacts) -> Plan {
    let few = k <= FEW_TOP_K && (size < 8 || lines.len <= SHORT_TOP_K_F64);
    let short = SHORT_TOP_K.into_iter().find(|&(most, _)| few && lines.len <= most);
    if let Some((most, lanes)) = short {
        let kernel = Kernel::TopKShortRows { most: most as u16 };
        return plan(kernel, lines.count().div_ceil(THREADS / lanes), THREADS);
    }
    let blocks = blocks_of_few(lines, size, 2, device);
    let filling = TOP_K_RESIDENT * device.multiprocessors / (lines.count() * blocks);
    let (least, most) = (lines.len / (TOP_K_ELEMENTS.1 * blocks), lines.len / (TOP_K_ELEMENTS.0 * blocks));
    let threads = filling.checked_ilog2().map_or(0, |log| 1 << log).min(most).max(least).max(2 * k / blocks);
    let threads = threads.next_power_of_two().clamp(TOP_K_BLOCKS.0, TOP_K_BLOCKS.1);
    // A rank of 4 bytes (f64: 8) and a place each, and of more places as many again, which are found with them; and their order
    let room = match k {
        ..=TOP_K_BY_THIRD => 4 * k,
        _ if size == 8 => k,
        _ => 2 * k,
    };
    let shared_bytes = (room.next_multiple_of(WARP) * 2 * size.max(4) + 2 * k).max(SELECT_BYTES) as u32;
    let plan = Plan { shared_bytes, ..plan(Kernel::TopKRows, lines.count(), threads) };
    in_clusters(plan, blocks)
}

/// The kernel for the gradient of the elements, given those of the weights of the greatest.
pub(crate) fn top_k_backward(lines: Lines) -> Plan {
    // By whole warps and so, H200, us: 1048576 x 8 f32 278 and 23, 1000000 x 21 268 and 81, 262144 x 64 74 and 41, bf16 283 and 22, 272 and 64, 75 and 34;
    // but 65536 x 257 f32 27, by 16 threads 34.
    let threads = if lines.len > 256 { WARP } else { lines.len.div_ceil(4).next_power_of_two().min(WARP / 2) };
    let grid = (lines.count() * top_k_backward_parts(lines)).div_ceil(THREADS / threads);
    Plan { parameter: threads.ilog2() as i32, ..plan(Kernel::TopKBackward, grid, THREADS) }
}

/// How many groups of threads take a line.
pub(crate) fn top_k_backward_parts(lines: Lines) -> usize {
    lines.len.div_ceil(TOP_K_GRADIENT)
}
