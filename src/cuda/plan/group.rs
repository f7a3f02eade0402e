//! Groups of threads, which read twice what no kernel holds.

use super::{largest_cluster, plan, DeviceFacts, Elements, Family, Kernel, Plan, MAX_GRID, SECTOR_BYTES, WARP};
use crate::lines::Lines;

/// Of groups of threads that share lines, as `kernels/line_group.cuh` has them: threads at most, those of a block of several, elements of a
/// thread that are in flight at least, and how many it has where there are many groups. On an H100, copies, with 256 threads at most: the
/// gradient (4096, 4096) dim 0 bf16 4.4 with 512 3.2, with a scale 15 and 8.0. Elements: the gradient 8191 x 4097 bf16 with 8 4.0, 16 2.4, 32 2.1.
pub(super) const GROUP_BLOCK: usize = 512;
const SMALL_GROUPS_BLOCK: usize = 128;
pub(super) const GROUP_TILE: usize = 4;
pub(super) const GROUP_ELEMENTS: usize = 32;
/// Threads of a group at least, if each of them has as many elements; and elements of a thread at least where there are more of them only to fill
/// the GPU or to have fewer lines at once.
const GROUP_SIDE_BY_SIDE: usize = 16;
const GROUP_LEAST: usize = 8;
/// Threads of a multiprocessor at once.
pub(super) const GROUP_RESIDENT: usize = 1024;
/// Few lines are split over all of the GPU, in two kernels, if the threads of a cluster had so many elements each; over two blocks to a
/// multiprocessor if their threads have, otherwise over one. In a program of its own, H100, copies, clusters and split, with a scale: 1 x 151936 f32
/// (18 elements) 3.2 and 3.6, 1 x 500000 (61) 2.6 and 2.0, 1 x 16777217 8.6 and 1.9; one block and two: 1 x 500000 bf16 (7 and 3) 3.0 and 3.5,
/// 1 x 4000000 (59 and 30) 3.15 and 3.14, 1 x 16777217 (248 and 124) 2.5 and 2.0. Clusters that have more than three quarters of the blocks for which
/// there is room take turns: 64 x 151936 f32 in clusters of two 1.6, of four 2.4.
const GROUP_SPLIT: usize = 48;
const WORD: usize = 4;
/// Bytes of a contiguous line that a block of a cluster has at least where there are few.
const LEAST_PART: usize = 16 << 10;

/// [`Plan::parameter`] of groups of threads: log2 of how many they are, and how many lines, or pairs of them, they take side by side.
pub(super) fn group_shape(threads: usize, across: usize) -> i32 {
    (threads.ilog2() as usize | across << 8) as i32
}

/// Both of them again.
pub(super) fn threads_and_across(shape: i32) -> (usize, usize) {
    (1 << (shape & 0xff), across_of(shape))
}

/// Also of another kernel's parameter, which is no shape: any number then.
pub(super) fn across_of(shape: i32) -> usize {
    (shape >> 8).max(1) as usize
}

/// What makes pairs of lines better than one line at a time: how many elements there are at least for each of the threads that are there at once, and how
/// many lines side by side. The more is kept of a line the more of both, since a thread keeps twice as much then. bf16, H100, us one by one and in pairs: the
/// gradient of softmax (8, 150, 128, 128) 77 and 53, (4096, 4096) dim 0 68 and 58, and never slower; with a scale 90 and 65, 67 and 65, but (1024, 1024) 13.6
/// and 14.9; its gradient 122 and 101, but (4096, 4096) dim 0 94 and 97, (64, 1000, 128) 46 and 50, (262144, 128, 2) 333 and 397; log-sum-exp 47 and 35, but
/// (64, 1000, 128) 12.5 and 13.9, (262144, 128, 2) 135 and 160.
pub(super) const LITTLE_KEPT: [usize; 2] = [0, 2];
pub(super) const SOME_KEPT: [usize; 2] = [16, 2];
pub(super) const MUCH_KEPT: [usize; 2] = [128, 32];

/// Whether lines of half precision that lie side by side can be taken in pairs, as words: where all rows begin at words.
pub(super) fn are_words(lines: Lines, elements: Elements) -> bool {
    elements.size == WORD / 2 && elements.in_packs(2, lines.inner)
}

/// Whether threads take them so: where it is better.
fn takes_pairs(lines: Lines, elements: Elements, [each, inner]: [usize; 2], device: DeviceFacts) -> bool {
    let pairs = are_words(lines, elements);
    let many = lines.elem_count() >= each * GROUP_RESIDENT * device.multiprocessors && lines.inner >= inner;
    pairs && (many || device.forced == Some(Family::Reduce))
}

/// [`group`] of the kernel for pairs, where these are better from so `many` on, or of that for one line at a time.
pub(super) fn group_of_pairs(
    kernel: impl Fn(bool) -> Kernel,
    many: [usize; 2],
    lines: Lines,
    elements: Elements,
    again: usize,
    device: DeviceFacts,
) -> Plan {
    match takes_pairs(lines, elements, many, device) {
        true => group(kernel(true), Lines { inner: lines.inner / 2, ..lines }, WORD, again, device),
        false => group(kernel(false), lines, elements.size, again, device),
    }
}

/// Groups of threads that share lines of elements of `size` bytes, of which so many tensors are read `again`.
pub(super) fn group(kernel: Kernel, lines: Lines, size: usize, again: usize, device: DeviceFacts) -> Plan {
    let resident = GROUP_RESIDENT * device.multiprocessors;
    let largest = if kernel.may_have_clusters() { largest_cluster(device) } else { 1 };
    let count = |across: usize| lines.outer * lines.inner.div_ceil(across);
    let mut across = if lines.inner <= 2 * WARP { lines.inner } else { WARP };
    // Down to a sector where long lines are few
    while across * size >= 2 * SECTOR_BYTES
        && count(across) * largest < device.multiprocessors
        && lines.len * across > GROUP_BLOCK * GROUP_ELEMENTS
    {
        across /= 2;
    }
    let (elements, groups) = (lines.len * across, count(across));
    let mut threads = (elements / GROUP_ELEMENTS).max(across).next_power_of_two();
    // More where they would access less than a row of sectors side by side, …
    while threads < GROUP_SIDE_BY_SIDE && threads * GROUP_SIDE_BY_SIDE <= elements
        // … where they would not fill the GPU, …
        || threads < GROUP_BLOCK && 2 * GROUP_LEAST * threads <= elements && threads * groups < resident
        // … and where what all have that there are at once would not be in the cache any more when it is read again
        || threads < GROUP_BLOCK
            && GROUP_LEAST * threads <= elements
            && (resident / threads).min(groups) * elements * size * again > device.l2_bytes / 5 * 2
    {
        threads *= 2;
    }
    if threads < 2 * across {
        // One line each, so that none of them is left over
        let grid = lines.count().div_ceil(SMALL_GROUPS_BLOCK).min(MAX_GRID);
        return Plan { parameter: group_shape(1, 1), ..plan(kernel, grid, SMALL_GROUPS_BLOCK) };
    }
    let threads = threads.min(GROUP_BLOCK);
    let block = threads.max(SMALL_GROUPS_BLOCK);
    let grid = groups.div_ceil(block / threads).min(MAX_GRID);
    let plan = Plan { parameter: group_shape(threads, across), ..plan(kernel, grid, block) };
    if threads < GROUP_BLOCK {
        return plan;
    }
    // Several blocks where there are fewer groups than multiprocessors, each of whose threads has something to do, and that a thread merges;
    // and twice as many if that is a lot to do and they need not take turns.
    let room = 2 * device.multiprocessors / groups;
    let most = (GROUP_BLOCK / across).min(largest);
    let blocks = (device.multiprocessors / groups).min(elements.div_ceil(GROUP_BLOCK * GROUP_TILE)).min(most);
    let blocks = cluster_of(blocks, device);
    let twice = 2 * blocks <= most.min(if room < 4 { room } else { room * 3 / 4 });
    let much = elements >= 2 * blocks * GROUP_BLOCK * GROUP_ELEMENTS;
    let blocks = if twice && much { 2 * blocks } else { blocks };
    let of_thread = |blocks: usize| elements / (GROUP_BLOCK * blocks);
    let splits = matches!(kernel, Kernel::BackwardGroup { .. } | Kernel::FusedGroup { .. } | Kernel::FusedRows { .. });
    if splits && groups <= device.multiprocessors / 8 && of_thread(blocks) >= GROUP_SPLIT {
        let parts = if of_thread(room) >= GROUP_SPLIT { room } else { room / 2 };
        return Plan { grid: (plan.grid.0, parts as u32), ..plan };
    }
    in_clusters(plan, blocks)
}

/// The blocks of a cluster for each of few contiguous lines, of which a multiprocessor has so many `at_once`, without a second round of clusters:
/// a GPU does not have as many of them as of blocks.
pub(super) fn blocks_of_few(lines: Lines, size: usize, at_once: usize, device: DeviceFacts) -> usize {
    let most = 3 * at_once * device.multiprocessors / 4;
    let blocks = (most / lines.count()).min(lines.len * size / LEAST_PART);
    cluster_of(blocks, device)
}

/// Blocks of a cluster, up to so many.
fn cluster_of(blocks: usize, device: DeviceFacts) -> usize {
    1 << blocks.clamp(1, largest_cluster(device)).ilog2()
}

/// With a cluster of so many blocks for each.
pub(super) fn in_clusters(plan: Plan, blocks: usize) -> Plan {
    let grid = (plan.grid.0 as usize).min(MAX_GRID / blocks);
    Plan { grid: ((grid * blocks) as u32, plan.grid.1), cluster: blocks as u32, ..plan }
}
