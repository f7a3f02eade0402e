//! The gradients of softmax and log-softmax.

use super::columns::{by, filling_narrow, held_columns, narrow, split_columns, HeldColumns};
use super::group::{group_of_pairs, LITTLE_KEPT};
use super::{
    cluster_blocks, largest_cluster, plan, tile_of, whole_packs, DeviceFacts, Elements, Family, Kernel, Plan, MANY,
    MAX_GRID, MAX_REGISTER_BLOCK, MAX_REGISTER_LINE, PACK_BYTES, WARP, WARP_BLOCK, WIDE_CLUSTER,
};
use crate::lines::Lines;

/// The kernel for the backward of softmax. The input's alignment is that of the result and of its gradient.
pub(crate) fn softmax_backward(lines: Lines, elements: Elements, device: DeviceFacts) -> Plan {
    let kernel = |pairs| Kernel::BackwardGroup { pairs };
    let twice = || group_of_pairs(kernel, LITTLE_KEPT, lines, elements, 2, device);
    let forced = match device.forced {
        Some(Family::Online | Family::Reduce) => Some(twice()),
        Some(Family::Narrow) => narrow(lines, elements).map(backward_of),
        Some(Family::Column) => column_backward(lines, elements, device),
        Some(Family::Split) => split_columns(lines, elements, device).map(backward_of),
        _ => None,
    };
    let side_by_side = || {
        let split = || split_columns(lines, elements, device).filter(|_| lines.count() < MANY);
        let narrow = filling_narrow(lines, elements, device).map(backward_of);
        let column = || column_backward(lines, elements, device);
        narrow.or_else(column).or_else(|| split().map(backward_of))
    };
    let held = || {
        let possible =
            elements.alignment().is_multiple_of(PACK_BYTES) && lines.inner == 1 && lines.len <= MAX_REGISTER_LINE;
        if !possible {
            return None;
        }
        let tile = || if whole_packs(lines, elements) { None } else { tile_backward(lines, elements.size) };
        tile().or_else(|| register_backward(lines, elements, device))
    };
    forced.or_else(held).or_else(side_by_side).unwrap_or_else(twice)
}

/// The same grid for the gradient, whose kernels take the lines alike.
fn backward_of(plan: Plan) -> Plan {
    let kernel = match plan.kernel {
        Kernel::Narrow { whole } => Kernel::BackwardNarrow { whole },
        Kernel::SplitColumnsApply { whole } => Kernel::BackwardSplitColumns { whole },
        other => other,
    };
    Plan { kernel, ..plan }
}

/// Rows that are not so narrow. us before, when both tensors were read twice, and so, on an H200 (f32 / bf16, where the floor is 1.5 copies):
/// (4096, 4096) dim 0 82 and 64 / 48 and 34, floor 52 / 27; (64, 1000, 128) dim 1 39 and 26 / 21 and 15, 26 / 10; (8, 4096, 4096) 638 and 485 /
/// 323 and 230, 384 / 194; (8, 21, 262144) 149 and 130 / 83 and 65, 129 / 67; (1000, 7, 1000) 28 and 22 / 18 and 9, 23 / 9.
fn column_backward(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    // Of more rows than sixteen 64 bytes side by side, of half precision, or a sector of memory: (4, 6000, 4096) f32 481 read twice and 382, bf16 240 and
    // 160, by pairs of sixteen rows 212; (4, 16384, 512) f32 189 and 165; bf16 98 and, by a sector, 100.
    const WIDE: &[(usize, usize)] = &[(32, 16), (16, 16)];
    const LONG: &[(usize, usize)] = &[(32, 16), (16, 16), (8, 16)];
    let choices: &[HeldColumns] = match elements.size {
        2 => &[by(8, 8, &[]), by(2, 16, WIDE), by(4, 24, LONG)],
        // Of 17 to 32 rows a thread has whole lines: (64, 21, 65537) 275, in parts 316.
        4 => &[by(4, 8, &[]), by(1, 16, &[]), by(1, 32, &[]), by(1, 16, WIDE), by(1, 32, LONG)],
        _ => &[by(1, 16, WIDE)],
    };
    let kernel = |columns, rows, whole| Kernel::BackwardColumn { columns, rows, whole };
    held_columns(kernel, choices, 1, lines, elements, device)
}

/// Short lines that are not whole packs
fn tile_backward(lines: Lines, size: usize) -> Option<Plan> {
    const WORDS: usize = 16;
    let plan = tile_of(Kernel::BackwardTile { words: WORDS + 1 }, WORDS, lines, size).filter(|_| size < 8)?;
    Some(Plan { shared_bytes: 2 * plan.shared_bytes.next_multiple_of(128), ..plan })
}

/// Over 3/2 of a copy: 65536 x 1024 sixteen elements 0.96 / 0.96; 8192 x 4096 0.96 / 0.96. In clusters, H200, copies: 1024 x 32768 f32 two blocks of 512 threads
/// 1.51, four of 256 1.47, bf16 1.48 and 1.46, two of 64 elements 1.47; 4096 x 50257 f32 four 1.56, eight 1.47, bf16 1.48 and 1.46; 512 x 65536 bf16 eight of 32
/// elements 1.47, four of 64 1.48; 1500 x 128256 f32 eight 1.48, sixteen 1.49, log-softmax's 1.52 and 1.49.
fn register_backward(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let (size, whole) = (elements.size, whole_packs(lines, elements));
    let (of_warp, of_block, of_cluster): (usize, &[usize], &[(usize, usize)]) = match size {
        8 => (8, &[8], &[(WIDE_CLUSTER, 16)]),
        4 => (16, &[16], &[(WIDE_CLUSTER, 32)]),
        _ => (16, &[16, 32], &[(8, 32), (WIDE_CLUSTER, 64)]),
    };
    if lines.len <= of_warp * WARP {
        if !whole {
            return None;
        }
        // Two packs of each for a thread are better than four, and one where there are no more: 1048576 x 16 f32 48.5 and 61.5 us, 1048576 x 32 94 and 115,
        // 524288 x 64 95 and 97; 1048576 x 16 bf16 25.2 and 29.1, 1048576 x 32 48 and 49 (H200).
        let packs = lines.len * size / PACK_BYTES;
        let threads = packs.div_ceil(if packs == 2 { 1 } else { 2 }).min(WARP).max(lines.len.div_ceil(of_warp));
        let shift = threads.next_power_of_two().ilog2();
        let grid = lines.count().div_ceil(WARP_BLOCK >> shift);
        return (grid <= MAX_GRID).then(|| Plan {
            parameter: shift as i32,
            ..plan(Kernel::BackwardWarp { count: of_warp }, grid, WARP_BLOCK)
        });
    }
    // Half of the largest block is best where it is enough.
    let threads = |count: usize| lines.len.div_ceil(count).next_multiple_of(WARP);
    let last = of_block.len() - 1;
    let block = of_block
        .iter()
        .enumerate()
        .find(|&(i, &count)| threads(count) <= if i == last { MAX_REGISTER_BLOCK } else { MAX_REGISTER_BLOCK / 2 });
    if let Some((_, &count)) = block {
        return (lines.count() <= MAX_GRID)
            .then(|| plan(Kernel::BackwardBlock { count, whole }, lines.count(), threads(count)));
    }
    if device.compute_capability < 90 {
        return None;
    }
    let largest = largest_cluster(device);
    let of_threads = |threads: usize| of_cluster.iter().map(move |&(most, count)| (most, count, threads));
    [MAX_REGISTER_BLOCK / 2, MAX_REGISTER_BLOCK].into_iter().flat_map(of_threads).find_map(|(most, count, threads)| {
        let blocks = cluster_blocks(lines, count * threads);
        (blocks <= most.min(largest) && lines.count() <= MAX_GRID / blocks).then(|| Plan {
            cluster: blocks as u32,
            ..plan(
                Kernel::BackwardCluster { count, whole },
                lines.count() * blocks,
                lines.len.div_ceil(count * blocks).next_multiple_of(WARP),
            )
        })
    })
}
