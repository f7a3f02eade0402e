//! Softmax with what models put around it, and its gradients.

use super::columns::{by, held_columns, HeldColumns};
use super::group::{group, group_of_pairs, MUCH_KEPT, SOME_KEPT};
use super::{
    cluster_blocks, largest_cluster, plan, tile_bytes, tile_fills, tile_units, DeviceFacts, Elements, Family,
    FusedKind, FusedLines, Held, Kernel, Plan, MAX_GRID, MAX_REGISTER_BLOCK, TILE_FEW_UNITS, WARP, WARP_BLOCK,
};
use crate::lines::Lines;
use crate::sums::SumOver;

/// The kernel for softmax with what models put around it, or for the gradients, of elements of `size` bytes.
pub(crate) fn fused(lines: Lines, kind: FusedKind, size: usize, device: DeviceFacts) -> Plan {
    let backward = kind.backward;
    let scores = kind.scale_alone;
    let kernel = |pairs| match lines.inner {
        1 => Kernel::FusedRows { backward, scores },
        _ => Kernel::FusedGroup { backward, scores, pairs },
    };
    let elements = Elements::alike(size, kind.alignment);
    let (again, many) = if backward { (2, MUCH_KEPT) } else { (1, SOME_KEPT) };
    let group = || match scores {
        true => group_of_pairs(kernel, many, lines, elements, again, device),
        false => group(kernel(false), lines, size, again, device),
    };
    let registers = || fused_registers(lines, kind, size, device);
    let column = || fused_backward_column(lines, elements, device).filter(|_| kind.column);
    let cluster = || fused_cluster_tile(lines, kind, size, device).or_else(|| fused_cluster(lines, kind, size, device));
    let forced = match device.forced {
        Some(Family::Online | Family::Reduce) => Some(group()),
        Some(Family::Register) => registers(),
        Some(Family::Cluster) => cluster(),
        Some(Family::Column) => column(),
        _ => None,
    };
    forced.or_else(registers).or_else(cluster).or_else(column).unwrap_or_else(group)
}

/// The gradient of lines side by side with nothing but a scale, in rows that are not the narrowest. us before, when they were read twice, and so, on an H200
/// (f32 / bf16): (4096, 4096) dim 0 96 and 82 / 84 and 60, (8, 4096, 4096) dim 1 715 and 582 / 481 and 354, (8, 21, 262144) 223 and 146 / 174 and 88. Unlike
/// softmax's gradient, which has less to compute, small clusters are better than wide strips: the first by sixteen blocks for eight 88 / 70.
fn fused_backward_column(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    const NARROW: &[(usize, usize)] = &[(16, 4), (8, 16)];
    let choices: &[HeldColumns] = match elements.size {
        // Of more rows too few threads are at work: (8, 21, 262144) bf16 80, in pairs of columns 97; (8, 150, 16384) 54 and 40.
        2 if lines.len <= 48 => &[by(4, 8, &[]), by(2, 16, &[]), by(4, 12, &[(16, 1)]), by(2, 16, NARROW)],
        2 => &[by(2, 16, NARROW)],
        // By sixteen, whose sectors are of two strips where rows begin anywhere, (64, 21, 65537) takes 362, by 32 286.
        4 => &[by(4, 8, &[]), by(1, 16, &[(32, 1), (16, 4), (8, 16)])],
        _ => &[by(1, 16, NARROW)],
    };
    let kernel = |columns, rows, whole| Kernel::FusedBackwardColumn { columns, rows, whole };
    // The maximum, the sum, the dot, and a place that is empty
    held_columns(kernel, choices, 4, lines, elements, device)
}

/// Elements of a thread and threads of a block, at most, of whole packs, as `kernels/fused.cuh` has them. Of (8, 16, 2048, 2048) with a scale: f32
/// sixteen 0.94, 32 0.95; bf16 32 0.96, sixteen 1.13, 64 1.04.
pub(super) fn fused_count(backward: bool, of: FusedLines, size: usize) -> (usize, usize) {
    match (backward, size) {
        (false, 2) => (32, 256),
        (false, 4) => (16, 256),
        (false, _) => (8, 256),
        // With slopes beside the logits: (8, 16, 2048, 2048) f32 1.70, bf16 2.43, made from the scores, read again, 1.99 and 2.71.
        (true, 2 | 4) if of == FusedLines::Capped => (16, 384),
        (true, _) if of == FusedLines::Capped => (8, 384),
        (true, 2) => (16, 512),
        (true, 4) => (16, 384),
        (true, _) => (8, 512),
    }
}

fn fused_registers(lines: Lines, kind: FusedKind, size: usize, device: DeviceFacts) -> Option<Plan> {
    let FusedKind { backward, whole, queries, narrow, scores, .. } = kind;
    if lines.inner > 1 || !narrow {
        return None;
    }
    if !whole {
        return fused_tile(lines, kind, size, device);
    }
    let hopper = device.compute_capability >= 90;
    if let (true, true, Some(held)) = (scores, hopper, scores_count(backward, size)) {
        let plan = if backward {
            warp_or_block(lines, held, backward, FusedLines::Scores)
        } else {
            fused_scores(lines, kind, held, device)
        };
        if plan.is_some() {
            return plan;
        }
    }
    let of = match backward {
        true if kind.capped => FusedLines::Capped,
        false if queries > 0 => FusedLines::Window,
        _ => FusedLines::Packs,
    };
    let plan = warp_or_block(lines, fused_count(backward, of, size), backward, of)?;
    if let Kernel::FusedBlock { lines: FusedLines::Window, .. } = plan.kernel {
        let resident = if size == 4 { 1280 } else { 1024 };
        let ahead = fused_ahead(lines, queries, size, resident / plan.block as usize, device);
        return Some(Plan { parameter: ahead as i32, ..plan });
    }
    Some(plan)
}

/// Units of 4 bytes (f64: elements) of a thread and threads of a block, at most, as `kernels/fused_tile.cuh` has them.
pub(super) fn fused_tile_count(backward: bool, held: Held, size: usize) -> (usize, usize) {
    match (backward, held, size) {
        (_, _, 8) => (8, 512),
        (false, Held::Scores, _) => (32, 512),
        (false, _, 4) => (25, 512),
        (false, Held::Logits, _) => (20, 512),
        (false, Held::CappedLogits, _) => (18, 512),
        (true, Held::Scores, _) | (true, _, 4) => (20, 512),
        (true, Held::Logits, _) => (20, 320),
        (true, Held::CappedLogits, _) => (18, 320),
    }
}

/// The same of lines of half precision, forward, for which half the threads are enough then, since Hopper.
pub(super) const FUSED_TILE_MANY: usize = 26;

/// What a thread holds of a line in tiles.
fn held_in_tiles(kind: FusedKind, size: usize, device: DeviceFacts) -> Held {
    match kind.capped {
        _ if kind.scores && size == 2 && device.compute_capability >= 90 => Held::Scores,
        true => Held::CappedLogits,
        false => Held::Logits,
    }
}

/// Threads of a block that has a line in a tile, forward, at most, where a cluster takes longer ones, whose blocks are in different phases. In copies, by such a
/// block and a cluster: f32 with a bias, causal, masked, with a softcap 7001 1.14 and 1.10, 1.01 and 0.86, 1.11 and 1.04, 1.21 and 1.09, 11001 1.16 and 1.10,
/// 1.07 and 0.83, 1.14 and 1.04, 1.30 and 1.04; bf16 14001 1.83 and 1.45, 0.97 and 1.00, 1.95 and 1.83, 1.85 and 1.48, 20001 1.57 and 1.34, 0.97 and 0.86,
/// 1.93 and 1.89, 1.53 and 1.54. With up to 256 threads f32 of 5001 1.15 and 1.19, 1.02 and 1.04, bf16 of 7001 1.49 and 1.61, 0.89 and 1.34.
pub(super) const SMALL_TILE: usize = 256;

/// [`Plan::parameter`] where a block takes one line, and no part of a warp does.
pub(crate) const WHOLE_BLOCK: i32 = 6;

/// Lines of any length in tiles. In copies, f16 / f32: with a scale 871486 x 77 1.08 / 1.02, 340613 x 197 1.05 / 1.03, 115977 x 577
/// 1.12 / 1.02, 32752 x 2047 1.06 / 1.02; with a bias for each 1.33 / 1.04, 1.61 / 1.05, 1.33 / 1.03, 1.63 / 1.45; the gradients with a
/// scale (floor 1.5) 1.92 / 1.51, 2.35 / 1.56, 1.94 / 1.50, 2.28 / 1.50.
fn fused_tile(lines: Lines, kind: FusedKind, size: usize, device: DeviceFacts) -> Option<Plan> {
    /// As far as it depends on the length of a line: as much as a block has without asking for it.
    const MOST_BYTES: usize = 47 << 10;
    if !kind.tiles {
        return None;
    }
    let (backward, window) = (kind.backward, kind.queries > 0);
    let units = tile_units(lines, size);
    // Threads that share a line where each of them has up to so many units.
    let threads_of = |most: usize| threads_for(units, most);
    let hopper = device.compute_capability >= 90;
    let held = held_in_tiles(kind, size, device);
    let (most, mut most_threads) = fused_tile_count(backward, held, size);
    if hopper && !backward && size < 8 {
        most_threads = SMALL_TILE;
    }
    let most = units_of_thread((most, most_threads), lines, 1, threads_of, device);
    let fewer = threads_of(FUSED_TILE_MANY);
    let many = size == 2
        && hopper
        && !backward
        && held != Held::Scores
        && fewer <= WARP.min(threads_of(most) / 2)
        && tile_fills(lines, fewer, device);
    let threads = if many { fewer } else { threads_of(most) };
    let (shift, block, per_block) = tile_group(threads);
    let grid = lines.count().div_ceil(per_block);
    // Of gradients another one, for those of the result
    let tiles = if backward { 2 } else { 1 };
    let bytes_of_line = tiles * lines.len * size + mask_bytes(lines, size, kind);
    let possible = threads <= most_threads && grid <= MAX_GRID && bytes_of_line <= MOST_BYTES;
    possible.then(|| {
        let shares_mask = tiles_share_mask(kind, size, per_block);
        let bytes = tiles_bytes(tiles, per_block, lines, size, kind);
        let plan = plan(Kernel::FusedTile { backward, held, many, window }, grid, block);
        Plan { parameter: shift, shared_bytes: bytes as u32, shares_mask, ..plan }
    })
}

/// The units of a thread, `most` of them or, where that leaves the device's threads idle, fewer: so many blocks share a line, by threads of up to
/// `most_threads` each.
fn units_of_thread(
    (mut most, most_threads): (usize, usize),
    lines: Lines,
    blocks: usize,
    threads_of: impl Fn(usize) -> usize,
    device: DeviceFacts,
) -> usize {
    while most >= 2 * TILE_FEW_UNITS
        && !tile_fills(lines, blocks * threads_of(most), device)
        && threads_of(most / 2) <= most_threads
    {
        most /= 2;
    }
    most
}

/// The blocks of a cluster, so many or, where lines are few, more, as there are multiprocessors for.
fn spread(mut blocks: usize, lines: Lines, device: DeviceFacts) -> usize {
    while blocks < largest_cluster(device) && 2 * blocks * lines.count() <= device.multiprocessors {
        blocks *= 2;
    }
    blocks
}

/// Lines too long for a block, in the tiles of a cluster, but whole packs of half precision and f64 forward, which are as fast in registers. In copies, f32 and
/// bf16, as they were before: with a bias 4096 x 50257 3.86 and 1.04, 5.35 and 1.33, 4096 x 32000 1.28 and 1.02; the gradients with a scale of 4096 x 50257 2.62
/// and 1.54, 3.31 and 1.96, of 4096 x 128256 2.58 and 1.90, 2.96 and 2.35.
fn fused_cluster_tile(lines: Lines, kind: FusedKind, size: usize, device: DeviceFacts) -> Option<Plan> {
    let FusedKind { backward, whole, tiles, narrow, .. } = kind;
    let in_tiles = backward || !whole || size == 4;
    if !(tiles && narrow && in_tiles && lines.inner == 1) || device.compute_capability < 90 {
        return None;
    }
    let held = held_in_tiles(kind, size, device);
    let (most, most_threads) = fused_tile_count(backward, held, size);
    let largest = largest_cluster(device);
    // As `TileCluster::most` of kernels/hopper/fused_cluster_tile.cuh has it.
    let part_of =
        |blocks: usize| Lines { outer: lines.outer, len: lines.len.div_ceil(blocks).next_multiple_of(8), inner: 1 };
    let threads_of = |blocks: usize, most: usize| threads_for(tile_units(part_of(blocks), size), most).max(WARP);
    let of_up_to = |most_threads: usize| {
        let mut clusters = (1..).map(|log| 1 << log).take_while(|&blocks| blocks <= largest);
        let fewest = clusters.find(|&blocks| threads_of(blocks, most) <= most_threads)?;
        let blocks = spread(fewest, lines, device);
        let most = units_of_thread((most, most_threads), lines, blocks, |most| threads_of(blocks, most), device);
        let part = part_of(blocks);
        // Each block has some of the line.
        if (blocks - 1) * part.len >= lines.len || lines.count() > MAX_GRID / blocks {
            return None;
        }
        let kernel = Kernel::FusedClusterTile { backward, held, window: kind.queries > 0 };
        let bytes = tiles_bytes(if backward { 2 } else { 1 }, 1, part, size, kind);
        let plan = plan(kernel, lines.count() * blocks, threads_of(blocks, most));
        let plan = Plan { cluster: blocks as u32, shared_bytes: bytes as u32, ..plan };
        let registers = match (backward, held, size) {
            (_, _, 8) => 128,
            (true, Held::Logits | Held::CappedLogits, 2) => 96,
            _ => 64,
        };
        let at_once = resident_blocks(plan, registers, device) / blocks;
        // 1500 x 128257 f32 with a bias 1.27, a quarter as far 1.34, nothing ahead 1.42; 4096 x 50257 twice as far 1.27, 1.05 so.
        let ahead = if lines.count() <= at_once { 0 } else { at_once.div_ceil(2) };
        Some(Plan { parameter: ahead as i32, ..plan })
    };
    // Blocks are small, so that a multiprocessor has several in different phases, unless clusters would be too large: 4096 x 50257 with a bias, f32 / bf16, 1.04 /
    // 1.33, with up to 512 threads 1.15 / 1.45, with 128 1.06 / 1.83. Of gradients of scores, bf16 2.09, with up to 512 1.96.
    let small = if backward && held == Held::Scores { None } else { of_up_to(256) };
    small.or_else(|| of_up_to(most_threads))
}

/// What so many threads to a line of a tile are: [`Plan::parameter`], the threads of a block, and its lines.
fn tile_group(threads: usize) -> (i32, usize, usize) {
    match threads {
        ..=WARP => (threads.ilog2() as i32, WARP_BLOCK, WARP_BLOCK / threads),
        _ => (WHOLE_BLOCK, threads, 1),
    }
}

/// What so many tiles with so many lines each take of shared memory, with the masks of one of them.
fn tiles_bytes(tiles: usize, per_block: usize, lines: Lines, size: usize, kind: FusedKind) -> usize {
    tiles * (tile_bytes(per_block, lines, size) as usize).next_multiple_of(128)
        + per_block * mask_bytes(lines, size, kind)
}

/// What the mask of a line of half precision takes of shared memory, as `MaskRow` of `kernels/fused_tile.cuh` has it. H200, bf16, copies, with a mask that is read
/// there byte by byte, and in global memory, where its bytes are waited for: 8 x 16 x 2047 x 2047 1.07 and 1.55, its gradient 2.40 and 2.45, 16 x 5001 x 5001
/// 1.27 and 1.86, 2.03 and 2.10, 4 x 20001 x 20001 1.12 and 1.88, 2.00 and 2.44. But 8 x 16 x 2047 x 2047 with a bias that is there, too, 1.94 and 1.62.
fn mask_bytes(lines: Lines, size: usize, kind: FusedKind) -> usize {
    match size {
        2 if kind.masked_alike > 0 => (lines.len + 15).next_multiple_of(16),
        _ => 0,
    }
}

/// Whether most tiles of so many lines of half precision have one mask, as one of padding is, which is read once then.
fn tiles_share_mask(kind: FusedKind, size: usize, lines: usize) -> bool {
    size == 2 && lines > 1 && kind.masked_alike >= 4 * lines
}

/// Elements that a thread holds as they lie in memory, and threads of a block, at most. Of (8, 16, 2048, 2048) bf16: causal with
/// a warp to a line 0.78, a block of two 0.82, as logits 0.94; without a window a block of one 1.01, as logits 1.00, with dropout
/// 1.07 and 1.15; (8, 8192, 8192) causal 0.90 and 1.05. The gradients of half as many lines of 2048, f32 and bf16: scale 1.27 and
/// 1.37, as logits 1.37 and 1.66; causal 1.01 and 1.09, 1.21 and 1.53; lines of 64 1.41 and 1.47, 1.73 and 1.85. f32 with 32
/// elements 1.42, bf16 with 64 or sixteen 1.46 and 1.60.
pub(super) fn scores_count(backward: bool, size: usize) -> Option<(usize, usize)> {
    match (backward, size) {
        (false, 2) => Some((64, 256)),
        (true, 2) => Some((32, 256)),
        (true, 4) => Some((16, 512)),
        _ => None,
    }
}

/// Part of a warp for each line, or a block where that is not enough, of threads that hold `count` elements of it.
fn warp_or_block(lines: Lines, (count, most_threads): (usize, usize), backward: bool, of: FusedLines) -> Option<Plan> {
    let kernels = [Kernel::FusedWarp { backward, lines: of }, Kernel::FusedBlock { backward, lines: of }];
    in_groups(threads_for(lines.len, count), most_threads, lines.count(), kernels)
}

/// The threads that share so many elements of a line, or units of them, if each holds up to `most`: part of a warp, or whole ones.
fn threads_for(elements: usize, most: usize) -> usize {
    let threads = elements.div_ceil(most).max(1);
    if threads <= WARP {
        threads.next_power_of_two()
    } else {
        threads.next_multiple_of(WARP)
    }
}

/// So many groups of threads, by the first kernel if a group is no more than a warp, and by the other one if it is a block.
fn in_groups(threads: usize, most_threads: usize, groups: usize, [in_warps, blocks]: [Kernel; 2]) -> Option<Plan> {
    let (kernel, grid, block, shift) = if threads <= WARP {
        let shift = threads.ilog2();
        (in_warps, groups.div_ceil(WARP_BLOCK >> shift), WARP_BLOCK, shift)
    } else {
        (blocks, groups, threads, 0)
    };
    (threads <= most_threads && grid <= MAX_GRID).then(|| Plan { parameter: shift as i32, ..plan(kernel, grid, block) })
}

fn fused_scores(
    lines: Lines,
    kind: FusedKind,
    (count, most_threads): (usize, usize),
    device: DeviceFacts,
) -> Option<Plan> {
    let (FusedKind { backward, queries, .. }, size) = (kind, 2);
    // What fits a warp as logits, too, is better off so.
    if !(fused_count(backward, FusedLines::Packs, size).0 * WARP + 1..=count * most_threads).contains(&lines.len) {
        return None;
    }
    let threads = lines.len.div_ceil(count).next_multiple_of(WARP);
    let (kernel, grid, block, resident) = match (queries > 0, threads) {
        (true, WARP) => {
            let kernel = Kernel::FusedWarp { backward, lines: FusedLines::ScoresWindow };
            (kernel, lines.count().div_ceil(WARP_BLOCK / WARP), WARP_BLOCK, 28)
        }
        (true, _) => {
            (Kernel::FusedBlock { backward, lines: FusedLines::ScoresWindow }, lines.count(), threads, 768 / threads)
        }
        (false, _) => (Kernel::FusedBlock { backward, lines: FusedLines::Scores }, lines.count(), threads, 0),
    };
    let ahead = if queries > 0 { fused_ahead(lines, queries, size, resident, device) } else { 0 };
    (grid <= MAX_GRID).then(|| Plan { parameter: ahead as i32, ..plan(kernel, grid, block) })
}

/// How many lines ahead windows are fetched: about as many as there are at once, `resident` on a multiprocessor, as far as the L2
/// cache holds them. (8, 16, 2048, 2048) causal: f32 2048 lines 0.81, 660 0.83, none 0.87; bf16 2048 0.78, 4096 0.82, none 0.81.
fn fused_ahead(lines: Lines, queries: usize, size: usize, resident: usize, device: DeviceFacts) -> usize {
    const MOST_BYTES: usize = 16 << 20;
    let ahead = (device.multiprocessors * resident / queries).max(1).saturating_mul(queries);
    if ahead.saturating_mul(lines.len * size) <= MOST_BYTES {
        ahead
    } else {
        0
    }
}

/// Elements of a thread and threads of a block, at most, where the gradients of a bias are summed, as `kernels/fused_bias.cuh` has them.
pub(super) fn fused_bias_count(size: usize) -> (usize, usize) {
    (fused_count(true, FusedLines::Packs, size).0, if size == 2 { 640 } else { 512 })
}

/// How the gradient of a bias is added up: so many lines of each of the parts, which are to be summed once more where there are several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FusedBiasPlan {
    pub plan: Plan,
    pub lines_of_part: usize,
    pub parts: usize,
}

/// The kernel for gradients that adds up a bias', where that is broadcast to whole lines: `of` says to which. µs on an H200, f32 / bf16, and with gradients of
/// the logits that are written and summed afterwards: (8, 16, 2048, 2048) for the batch 2344 / 1482 and 3279 / 2121, (32, 12, 512, 512) likewise 446 / 340 and
/// 578 / 359, (1024, 16, 64, 64) 327 / 225 and 378 / 246. With one element by itself for a pack, of lines of any length, up to three times as long as in tiles.
pub(crate) fn fused_bias(
    lines: Lines,
    of: &SumOver,
    kind: FusedKind,
    size: usize,
    device: DeviceFacts,
) -> Option<FusedBiasPlan> {
    let is_first = matches!(device.forced, None | Some(Family::Register));
    if !is_first || lines.inner > 1 || !kind.narrow || of.terms() < 2 {
        return None;
    }
    if !kind.whole {
        return fused_bias_tile(lines, of, kind, size, device);
    }
    let (count, most_threads) = fused_bias_count(size);
    let threads = threads_for(lines.len, count);
    let in_parts = |parts: usize| {
        in_groups(threads, most_threads, of.sums() * parts, [Kernel::FusedBiasWarp, Kernel::FusedBiasBlock])
    };
    let one = in_parts(1)?;
    // Where there are so few lines that the device is not full twice, (32, 8, 32, 32) takes 12 for 10 µs.
    let (lines_of_part, parts) = parts_of_bias(of, one.blocks(), resident_blocks(one, 128, device), 2)?;
    Some(FusedBiasPlan { plan: in_parts(parts)?, lines_of_part, parts })
}

/// How many blocks of a plan the device has room for at once, if each thread has so many registers.
fn resident_blocks(plan: Plan, registers: usize, device: DeviceFacts) -> usize {
    /// What a block takes of shared memory beside what it asks for.
    const RESERVED: usize = 1 << 10;
    let by_registers = (64 << 10) / (registers * plan.block as usize);
    let by_memory = (device.shared_bytes + RESERVED) / (plan.shared_bytes as usize + 2 * RESERVED);
    by_registers.min(by_memory).max(1) * device.multiprocessors
}

/// How many lines that have a bias in common are added up one after the other, and in how many parts, if lines that have none in common take so
/// many blocks, of which the device has room for `resident` at once. None where one line after the other would not be so many rounds of these, unless
/// there are but two.
fn parts_of_bias(of: &SumOver, blocks: usize, resident: usize, rounds: usize) -> Option<(usize, usize)> {
    /// Lines whose gradients are added up as they are, which is as good as f32.
    const MOST_SUMMED: usize = 16;
    let summed = of.terms();
    if blocks * summed < rounds * resident && summed > 2 {
        return None;
    }
    // In rounds of as many blocks as there is room for; what a part begins and ends with takes about as long as a line.
    let time =
        |lines_of_part: usize| (blocks * summed.div_ceil(lines_of_part)).div_ceil(resident) * (lines_of_part + 1);
    let lines_of_part = (2..=MOST_SUMMED.min(summed)).rev().min_by_key(|&lines| time(lines))?;
    Some((lines_of_part, summed.div_ceil(lines_of_part)))
}

/// Units of 4 bytes of a thread and threads of a block, at most, where the gradients of a bias are summed in tiles, as
/// `kernels/hopper/fused_backward_bias_tile.cu` has them.
pub(super) fn fused_bias_tile_count(size: usize) -> (usize, usize) {
    (fused_tile_count(true, Held::Logits, size).0, if size == 2 { 256 } else { 320 })
}

/// What adds up the gradient of a bias of lines of any length, in tiles, on Hopper, if those of the bias that lie side by side do so among the scores.
/// A tile is summed while the next one comes. µs with a bias for each head, f32 / bf16, and with gradients of the logits that are written and summed
/// afterwards: (2048, 3, 49, 49) 76 / 73 and 109 / 164, (128, 12, 197, 197) 249 / 213 and 311 / 267, (8, 12, 197, 197) 26 / 26 and 27 / 27.
fn fused_bias_tile(
    lines: Lines,
    of: &SumOver,
    kind: FusedKind,
    size: usize,
    device: DeviceFacts,
) -> Option<FusedBiasPlan> {
    if size == 8
        || device.compute_capability < 90
        || !kind.tiles
        || kind.capped
        || of.kept.iter().any(|dim| dim.stride != 1)
    {
        return None;
    }
    let (most, most_threads) = fused_bias_tile_count(size);
    let threads = threads_for(tile_units(lines, size), most);
    let (shift, block, per_block) = tile_group(threads);
    let shares_mask = tiles_share_mask(kind, size, per_block);
    // Of half precision the sums may begin at the second place; masks are whole packs behind them.
    let sums_bytes = ((per_block * lines.len + 2) * 4).next_multiple_of(16);
    let bytes = tiles_bytes(4, per_block, lines, size, kind) + sums_bytes + 16;
    let blocks = of.sums().div_ceil(per_block);
    // Half of the threads have nothing to do where fewer lines have a bias of their own.
    let fills = 2 * of.sums() >= blocks * per_block;
    if threads > most_threads || !fills || 3 * bytes > device.shared_bytes {
        return None;
    }
    let in_parts = |parts: usize| {
        let plan = plan(Kernel::FusedBiasTile { window: kind.queries > 0 }, blocks * parts, block);
        Plan { parameter: shift, shared_bytes: bytes as u32, shares_mask, ..plan }
    };
    let registers = if size == 4 { 96 } else { 128 };
    let (lines_of_part, parts) = parts_of_bias(of, blocks, resident_blocks(in_parts(1), registers, device), 1)?;
    (blocks * parts <= MAX_GRID).then(|| FusedBiasPlan { plan: in_parts(parts), lines_of_part, parts })
}

/// Elements of a thread in a fused cluster and threads of a multiprocessor at once, as `kernels/hopper/fused_cluster.cu` has them.
pub(super) fn fused_cluster_counts(size: usize) -> &'static [(usize, usize)] {
    match size {
        8 => &[(8, 1024), (16, 512)],
        4 => &[(32, 512)],
        _ => &[(32, 1024)],
    }
}

/// Over a copy, as blocks of up to 512 threads of which a multiprocessor held one, without fetching anything ahead, and so, on an H200: with a scale
/// 4096 x 32000 bf16 2.09 and 1.08, 4096 x 128256 2.44 and 1.14, f32 1.72 and 1.50.
fn fused_cluster(lines: Lines, kind: FusedKind, size: usize, device: DeviceFacts) -> Option<Plan> {
    /// Threads of a block: few, so that a multiprocessor has several blocks in different phases, or more where clusters would be too large.
    const BLOCKS: [usize; 2] = [256, MAX_REGISTER_BLOCK];
    if device.compute_capability < 90 || lines.inner > 1 || !kind.whole || kind.backward || !kind.narrow {
        return None;
    }
    let largest = largest_cluster(device);
    let plan_of = |kernel, count: usize, resident: usize, most_threads: usize| {
        let blocks = spread(cluster_blocks(lines, count * most_threads), lines, device);
        if blocks > largest || lines.count() > MAX_GRID / blocks {
            return None;
        }
        let threads = lines.len.div_ceil(count * blocks).next_multiple_of(WARP);
        let at_once = device.multiprocessors * (resident / threads).max(1) / blocks;
        let ahead = if lines.count() <= at_once { 0 } else { at_once.div_ceil(4) };
        let plan = plan(kernel, lines.count() * blocks, threads);
        Some(Plan { cluster: blocks as u32, parameter: ahead as i32, ..plan })
    };
    let scores = scores_count(false, size).filter(|_| kind.scores && kind.queries == 0);
    let of_scores =
        scores.and_then(|(count, threads)| plan_of(Kernel::FusedClusterScores, count, 3 * threads, threads));
    let logits = fused_cluster_counts(size).iter().flat_map(|&of| BLOCKS.map(|threads| (of, threads)));
    let mut of_logits =
        logits.map(|((count, resident), threads)| plan_of(Kernel::FusedCluster { count }, count, resident, threads));
    of_scores.or_else(|| of_logits.find_map(|plan| plan))
}
