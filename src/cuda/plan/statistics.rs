//! Log-sum-exp, losses and the greatest elements.

use super::group::{
    blocks_of_few, group_of_pairs, in_clusters, threads_and_across, GROUP_ELEMENTS, GROUP_RESIDENT, GROUP_TILE,
    MUCH_KEPT,
};
use super::{
    plan, tile_bytes, tile_fills, tile_units, DeviceFacts, Elements, Kernel, Plan, MAX_BLOCK, PACK_BYTES, THREADS,
    TILE_FEW_UNITS, WARP, WARP_BLOCK,
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
/// So many lines' statistics a block sums up by itself, before its gradients, too. Of more, blocks sum up parts of so many at least.
const LINES_OF_LOSS: usize = 8192;
const PART_OF_LOSS: usize = 4096;
const MOST_PARTS: usize = 128;
/// Lines up to these lengths, f64 but the last, take so many lanes of a warp to find up to [`FEW_TOP_K`] places, as `kernels/top_k_short.cu` has
/// them. On an H100, f32, us: 16384 x 8 by 8 lanes 3.3, by 16 5.0, 16384 x 64 by 16 7.7, by 32 10.6.
const SHORT_TOP_K: [(usize, usize); 5] = [(32, 8), (64, 16), (128, WARP), (256, WARP), (1024, WARP)];
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

/// The kernel for log-sum-exp and the statistics of a loss.
pub(crate) fn statistics(lines: Lines, elements: Elements, device: DeviceFacts) -> Plan {
    if lines.inner > 1 {
        let kernel = |pairs| Kernel::StatisticsColumns { pairs };
        return group_of_pairs(kernel, MUCH_KEPT, lines, elements, 0, device);
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
    let (bytes, many) = (lines.len * elements.size, lines.count() >= 2 * device.multiprocessors);
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
    if lines.inner > 1 {
        // Blocks that share rows need nothing of each other.
        let kernel = |pairs| Kernel::LossBackwardColumns { pairs };
        let plan = group_of_pairs(kernel, MUCH_KEPT, lines, elements, 0, device);
        let (threads, across) = threads_and_across(plan.parameter);
        let rows = threads / across;
        let filling = 2 * GROUP_RESIDENT * device.multiprocessors / (threads * plan.groups(lines));
        let parts = |each: usize| lines.len.div_ceil(rows * each);
        let parts = parts(GROUP_ELEMENTS).max(filling.min(parts(GROUP_TILE))).min(u16::MAX as usize);
        return Plan { grid: (plan.grid.0, parts as u32), ..plan };
    }
    if lines.len <= SHORT_STATISTICS {
        let shift = (0..5).find(|shift| lines.len <= 4 << shift).unwrap_or(5);
        let grid = lines.count().div_ceil(THREADS >> shift);
        return Plan { parameter: shift, ..plan(Kernel::LossBackwardShortRows, grid, THREADS) };
    }
    let chunks = (lines.len * elements.size).div_ceil(16 * LOSS_PACKS * LOSS_BLOCK);
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
    let of_dtype = SHORT_TOP_K.iter().take(SHORT_TOP_K.len() - usize::from(size == 8));
    let short = of_dtype.filter(|_| k <= FEW_TOP_K).find(|&&(most, _)| lines.len <= most);
    if let Some(&(most, lanes)) = short {
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
    let parts = lines.len.div_ceil(TOP_K_GRADIENT);
    let plan = plan(Kernel::TopKBackward, (lines.count() * parts).div_ceil(THREADS / WARP), THREADS);
    Plan { parameter: parts as i32, ..plan }
}
