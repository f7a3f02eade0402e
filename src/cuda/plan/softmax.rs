//! The kernels for softmax, and those of them for contiguous lines.

use super::columns::{
    column, column_is_best, few_rows, is_narrowest, narrow, narrow_is_best, resident, split_columns, strip,
    RESIDENT_LEAST,
};
use super::{
    block_per_line, largest_cluster, plan, plan_across, thread_per_line, tile_of, tile_shift, whole_packs, DeviceFacts,
    Elements, Family, Kernel, Plan, MANY, MAX_GRID, MAX_REGISTER_BLOCK, MAX_REGISTER_LINE, PACK_BYTES, SECTOR_BYTES,
    THREADS, WARP, WARP_BLOCK,
};
use crate::lines::Lines;
use crate::op::{Output, Schedule};

/// Of half precision that is not whole packs, where lines fill the GPU's threads once: 131072 x 32 at an offset of one element 3.83 us,
/// with blocks of 128 threads 4.01, 114688 x 32 3.62 and 3.81, 16384 x 256 3.96 and 4.10; but 65536 x 32 3.4 and 2.7, 2097152 x 16 40.9
/// and 36.7.
const FULL_WARP_BLOCK: usize = 512;
/// Threads that a multiprocessor has, since Hopper.
const RESIDENT_THREADS: usize = 2048;
/// Elements of a line for each thread of a warp, by the length of the line: up to (elements, elements per thread). Eight at 128
/// elements: 0.97, sixteen 0.99 (f32); sixteen 1.01, eight 1.03 (bf16).
const WARP_COUNTS: Counts = Counts {
    wide: &[(256, 8), (512, 16)],
    half: &[(16, 8), (512, 16)],
    // 1016800 x 33 f32: sixteen 1.34, eight 1.72
    any_wide: &[(32, 8), (512, 16)],
    any_half: &[(16, 8), (512, 16)],
};
/// Tiles: the words of 4 bytes of a line for each thread, and how many blocks of them each multiprocessor should have: fewer words
/// where there are not enough. 9216 x 197 f16 9 1.72, 17 1.44, 33 1.90; 50000 x 197 1.71, 1.32 and 1.35; f32 1.12, 1.08 and 1.05.
const TILE_HALF: &[(usize, usize)] = &[(32, 8), (16, 2), (8, 0)];
const TILE_WIDE: &[(usize, usize)] = &[(32, 4), (8, 0)];
/// Lines of half precision that fill this much of 16 words: 528416 x 127 16 1.02, 32 1.05; 871543 x 77 1.18 and 1.02.
const TILE_FILLED: usize = 14;
/// The longest lines in tiles, of half precision and others: 32784 x 2047 f16 1.05, a block for each line 1.38; 95733 x 701 f32 1.03 and
/// 1.06, 86369 x 777 1.04 and 1.02.
const TILE_HALF_ROW: usize = 2047;
const TILE_WIDE_ROW: usize = 768;
/// The same for a block. 65536 x 1024: sixteen 1.01 / 1.01; 8192 x 4096: 64 1.02, 32 1.03 (f32), 32
/// 1.02, 16 1.13 (bf16); 1024 x 32768: 64 1.07 (bf16). Just above what fills whole warps, bf16: 64527 x 520 32 1.25, 16 1.45;
/// 32513 x 1032 64 1.13, 16 1.22; 16320 x 2056 32 1.15, 16 1.19. At an offset of one element, bf16: 65536 x 1024 32 1.02, 16
/// 1.05; 8191 x 4097 64 1.11, 32 1.19; 4096 x 8192 64 1.05, 32 1.10.
const BLOCK_COUNTS: Counts = Counts {
    wide: &[(2048, 16), (16_384, 64)],
    half: &[(768, 32), (1024, 16), (1280, 64), (2048, 16), (4096, 32), (32_768, 64)],
    any_wide: &[(2048, 16), (16_384, 64)],
    any_half: &[(4096, 32), (32_768, 64)],
};
/// No kernel of doubles has more elements to a thread.
const MOST_DOUBLES: usize = 32;

/// How many elements each thread takes, by the length of a line. `half`: of 16 bits; `any`: not whole packs.
struct Counts {
    wide: &'static [(usize, usize)],
    half: &'static [(usize, usize)],
    any_wide: &'static [(usize, usize)],
    any_half: &'static [(usize, usize)],
}

/// As `kernels/grid_softmax.cuh` has it: threads of a block, the bytes of a chunk, the groups that share them, and how many chunks there
/// are in shared memory, with a pack and a barrier for each, one more barrier, and states of 16 warps, twice; each group may have one
/// more chunk in registers.
const GRID_BLOCK: usize = 512;
pub(crate) const CHUNK_BYTES: usize = 4096;
const CHUNK_GROUPS: usize = 8;
const CHUNK_SLOTS: usize = 7 * CHUNK_GROUPS;
const GRID_SHARED_BYTES: usize = CHUNK_SLOTS * (CHUNK_BYTES + 16 + 8) + 8 + 2 * 16 * 8;
/// Of lines longer than clusters hold: tensors of fewer bytes are faster split. 1 x 16777216 bf16 takes 1.28 copies, split 1.37.
const GRID_BYTES: usize = 16 << 20;
/// Of lines of half precision that clusters hold, too, two blocks for each: 64 x 202048 16.7 us, in clusters of eight or sixteen 19.0;
/// 64 x 256000 21.1 and 22.3; 64 x 151936 13.5 and 12.9.
const PAIR_BYTES: usize = 384 << 10;
/// As `kernels/shared_softmax.cuh` has it: threads of a block, the blocks of a line, what they tell each other in shared memory (a state
/// for each warp and block, 24 + 3 barriers), and the bytes of a line that a block holds, …
const SHARED_BLOCK: usize = 640;
const SHARED_BLOCKS: usize = 2;
const SHARED_TOLD: usize = (SHARED_BLOCKS * (SHARED_BLOCK / WARP + 1) + 24 + 3) * 8;
const MOST_SHARED: usize = 224 << 10;
/// … no fewer than these. 64 x 151936 bf16 9.2 us, in clusters 11.1; 64 x 32768 3.7, a block for each line 4.7; 64 x 202048 13.3, by
/// `grid_softmax` 15.9; at an offset of one element 64 x 151936 10.3, in clusters 12.4. What it takes hardly depends on how many lines there
/// are, so that it has to have nine tenths of the multiprocessors: 64 x 128256 8.1 us, and in clusters 64 lines 8.4, 60 8.2, 56 7.1.
const LEAST_SHARED: usize = 32 << 10;
/// Logarithms take clusters only one exponential for each element: 64 x 128256 7.7 us, so 8.3; 64 x 151936 10.1 and 9.4.
const LEAST_SHARED_LOG: usize = 288 << 10;
/// Split lines: blocks of this many threads, two to a multiprocessor: 1.44 / 1.34, four of half the threads 1.48 / 1.41
/// (1 x 16777216).
const SPLIT_BLOCK: usize = 512;
/// Lines of fewer bytes are not split.
const SPLIT_BYTES: usize = 1 << 16;
/// Contiguous lines up to this length are taken in runs: 33554432 x 2 bf16 on an H100 1.01, in tiles 4.33, 1198372 x 7 1.2 and 2.2.
const RUN_ROW: usize = 7;
const RUN_BLOCK: usize = 128;
/// Contiguous lines up to this are held in shared memory whole.
const SHORT_ROW: usize = 64;

/// The kernel for softmax, with the schedule given or left to choose.
pub(crate) fn softmax(
    lines: Lines,
    schedule: Option<Schedule>,
    output: Output,
    elements: Elements,
    device: DeviceFacts,
) -> Plan {
    let rows = lines.inner == 1;
    match schedule {
        Some(Schedule::Safe) => {
            let [short, long, side_by_side] = [Kernel::SafeShortRows, Kernel::SafeRows, Kernel::SafeColumns];
            short_rows(short, lines, elements)
                .unwrap_or_else(|| thread_per_line(if rows { long } else { side_by_side }, lines))
        }
        Some(Schedule::Online) => online(lines, elements),
        Some(Schedule::Reduce) => block_per_line(Kernel::Reduce, lines),
        None => {
            let forced = device.forced.and_then(|family| of_family(family, lines, elements, device));
            forced.unwrap_or_else(|| chosen(lines, output, elements, device))
        }
    }
}

fn chosen(lines: Lines, output: Output, elements: Elements, device: DeviceFacts) -> Plan {
    let best_first: &[Family] = if lines.inner == 1 {
        let few = lines.count() < 2 * device.multiprocessors && lines.len * elements.size >= SPLIT_BYTES;
        match few {
            _ if few_in_clusters(lines, elements, device) => &[Family::Cluster],
            _ if run_is_best(lines, elements) => &[Family::Run],
            _ if shared_is_best(lines, output, elements, device) => &[Family::Shared],
            true if grid_is_best(lines, elements, device) => {
                &[Family::Tile, Family::Register, Family::Grid, Family::Cluster, Family::Split]
            }
            true => &[Family::Tile, Family::Register, Family::Cluster, Family::Split],
            false => &[Family::Tile, Family::Register, Family::Cluster],
        }
    } else {
        match lines.len {
            _ if narrow_is_best(lines, elements, device) => &[Family::Narrow],
            _ if is_narrowest(lines, elements) => &[Family::Column, Family::Split],
            len if len < RESIDENT_LEAST => &[Family::FewRows, Family::Strip, Family::Column, Family::Split],
            _ if column_is_best(lines, elements) => &[Family::Resident, Family::Column, Family::Strip, Family::Split],
            _ => &[Family::Resident, Family::Strip, Family::Column, Family::Split],
        }
    };
    let last = match lines.inner > 1 && lines.count() >= MANY {
        true => thread_per_line(Kernel::OnlineColumns, lines),
        false => block_per_line(Kernel::Reduce, lines),
    };
    best_first.iter().find_map(|&family| of_family(family, lines, elements, device)).unwrap_or(last)
}

/// The plan with a kernel of `family`, if there is one for these lines.
fn of_family(family: Family, lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    match family {
        Family::Online => Some(online(lines, elements)),
        Family::Reduce => Some(block_per_line(Kernel::Reduce, lines)),
        Family::Tile => tile(lines, elements, device),
        Family::Register => register(lines, elements, device),
        Family::Cluster => cluster(lines, elements, device),
        Family::Grid => grid(lines, elements, device),
        Family::Shared => shared(lines, elements, device),
        Family::Split if lines.inner > 1 => split_columns(lines, elements, device),
        Family::Split => split(lines, elements, device),
        Family::Run => run(lines, elements),
        Family::FewRows => few_rows(lines, elements),
        Family::Narrow => narrow(lines, elements),
        Family::Column => column(lines, elements, device),
        Family::Strip => strip(lines, elements, device),
        Family::Resident => resident(lines, elements, device),
    }
}

fn online(lines: Lines, elements: Elements) -> Plan {
    let long = if lines.inner == 1 { Kernel::OnlineRows } else { Kernel::OnlineColumns };
    short_rows(Kernel::OnlineShortRows, lines, elements).unwrap_or_else(|| thread_per_line(long, lines))
}

/// A thread for each contiguous line, where shared memory holds all lines of a block.
fn short_rows(kernel: Kernel, lines: Lines, elements: Elements) -> Option<Plan> {
    let plan = thread_per_line(kernel, lines);
    let bytes = plan.block as usize * (lines.len | 1) * elements.size.max(4);
    let possible =
        lines.inner == 1 && lines.len <= SHORT_ROW && bytes <= 48 << 10 && lines.count() <= MAX_GRID * THREADS;
    possible.then_some(Plan { shared_bytes: bytes as u32, ..plan })
}

/// The elements that threads must have room for: accesses begin at multiples of `bytes`, which may be before the line.
pub(super) fn room(lines: Lines, whole: bool, elements: Elements, bytes: usize) -> usize {
    let aligned = (lines.len * elements.size).is_multiple_of(bytes) && elements.output_alignment.is_multiple_of(bytes);
    if whole || aligned {
        lines.len
    } else {
        lines.len + bytes / elements.size - 1
    }
}

impl Counts {
    fn of(&self, len: usize, whole: bool, elements: Elements) -> Option<usize> {
        let steps = match (whole, elements.size) {
            (true, 2) => self.half,
            (true, _) => self.wide,
            (false, 2) => self.any_half,
            (false, _) => self.any_wide,
        };
        let &(_, count) = steps.iter().find(|&&(up_to, _)| len <= up_to)?;
        Some(if elements.size == 8 { count.min(MOST_DOUBLES) } else { count })
    }
}

/// Lines that are not whole packs, or that leave many of the threads without work that would hold them in registers.
pub(super) fn tile(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let forced = device.forced == Some(Family::Tile);
    let packs = (lines.len * elements.size).is_multiple_of(PACK_BYTES);
    let (choices, longest) = match elements.size {
        2 if device.compute_capability >= 90 => (TILE_HALF, TILE_HALF_ROW),
        2 => (&TILE_HALF[1..], TILE_HALF_ROW / 2),
        _ => (TILE_WIDE, TILE_WIDE_ROW),
    };
    let possible = lines.inner == 1 && elements.size < 8 && lines.len <= longest;
    if !possible || !(forced || !packs || fills_few(lines, elements, device)) {
        return None;
    }
    let words = lines.len * elements.size / 4;
    // One word more, since shares of an odd number are in different banks
    let plan_of = |most: usize| tile_of(Kernel::Tile { words: most + 1 }, most, lines, elements.size);
    // Half precision: whether 16 words are best
    let filled = elements.size == 2
        && tile_shift(lines, elements.size, 16)
            .is_some_and(|shift| shift == 0 || words.div_ceil(1 << shift) >= TILE_FILLED);
    let best = choices.iter().find_map(|&(most, blocks)| {
        let too_many = most > 8 && words <= 8 || most > 16 && filled;
        plan_of(most).filter(|plan| !too_many && plan.grid.0 as usize >= blocks * device.multiprocessors)
    });
    if packs && !forced {
        // Few lines, or of few words, are better off in registers.
        return best.filter(|plan| plan.kernel == Kernel::Tile { words: 33 });
    }
    best.or_else(|| choices.iter().rev().find_map(|&(most, _)| plan_of(most)))
}

/// Whether lines of whole packs would leave many of the threads without work that hold them in registers. Of a block: 86480 x 776
/// f16 1.15, in tiles 1.03; 111848 x 600 1.18 and 1.02; of a warp: 645277 x 136 1.16 and 1.04, 838860 x 80 1.04 and 1.03.
fn fills_few(lines: Lines, elements: Elements, device: DeviceFacts) -> bool {
    let Some(plan) = warp(lines, true, elements, device).or_else(|| block(lines, true, elements, device)) else {
        return false;
    };
    match plan.kernel {
        Kernel::Warp { count, .. } => 5 * lines.len < 3 * (count << plan.parameter),
        Kernel::Block { count, .. } if elements.size == 2 => 5 * lines.len < 4 * count * plan.block as usize,
        Kernel::Block { count, .. } => 5 * lines.len < 3 * count * plan.block as usize,
        _ => false,
    }
}

fn register(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    if lines.inner > 1 {
        return None;
    }
    let whole = whole_packs(lines, elements);
    warp(lines, whole, elements, device).or_else(|| block(lines, whole, elements, device))
}

pub(super) fn warp(lines: Lines, whole: bool, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let count = WARP_COUNTS.of(lines.len, whole, elements)?;
    let room = room(lines, whole, elements, PACK_BYTES);
    let shift = (0..=5).find(|&shift| room <= count << shift)?;
    let resident = RESIDENT_THREADS * device.multiprocessors;
    let needed = lines.count().saturating_mul(1 << shift);
    let once = device.compute_capability >= 90 && 4 * needed > 3 * resident && needed <= resident;
    let threads = if once && !whole && elements.size == 2 { FULL_WARP_BLOCK } else { WARP_BLOCK };
    let grid = lines.count().div_ceil(threads >> shift);
    (grid <= MAX_GRID).then(|| Plan { parameter: shift, ..plan(Kernel::Warp { count, whole }, grid, threads) })
}

pub(super) fn block(lines: Lines, whole: bool, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let count = BLOCK_COUNTS.of(lines.len, whole, elements)?;
    let threads = room(lines, whole, elements, SECTOR_BYTES).div_ceil(WARP * count) * WARP;
    // Of large blocks two run on a multiprocessor at once; fetched ahead are half as many lines. 1024 x 32768 bf16: 1.04, without
    // 1.06.
    let ahead = if elements.size == 2 && threads > MAX_REGISTER_BLOCK / 2 { device.multiprocessors } else { 0 };
    // With so many registers a thread, blocks of f32 are of half as many threads, as `kernels/block_softmax.cu` has them.
    let most = if elements.size == 4 && count == 64 { MAX_REGISTER_BLOCK / 2 } else { MAX_REGISTER_BLOCK };
    (threads <= most && lines.count() <= MAX_GRID)
        .then(|| Plan { parameter: ahead as i32, ..plan(Kernel::Block { count, whole }, lines.count(), threads) })
}

pub(super) fn cluster(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    if device.compute_capability < 90 || lines.inner > 1 || lines.len > MAX_REGISTER_LINE {
        return None;
    }
    let whole = whole_packs(lines, elements);
    let largest = largest_cluster(device);
    let many = lines.count() >= 4 * device.multiprocessors;
    // Elements to a thread, the fewest blocks, the warps that a block should have at most, and the threads that the registers of
    // a multiprocessor hold. 4096 x 128256: four blocks of 16 warps 1.05, eight of 8 1.10 (f32); two of 16 with 128 elements
    // 1.06, eight of 4 1.16 (bf16). At an offset of one element, 4096 x 128256: four of 16 1.08, eight of 8 1.18 (f32), two of 16 with
    // 128 elements 1.07 (bf16).
    let (count, fewest, warps, resident) = match elements.size {
        4 => (64, 4, 16, 640),
        2 if many => (128, 2, 16, 512),
        2 => (64, 8, 16, 1024),
        _ => (32, 4, 16, 512),
    };
    let room = room(lines, whole, elements, SECTOR_BYTES);
    let needed = room.div_ceil(WARP * count);
    let mut blocks = fewest;
    while blocks < largest && needed.div_ceil(blocks) > warps {
        blocks *= 2;
    }
    // Few lines are spread as wide as can be: 4.0 µs with sixteen blocks and 5.2 with eight at 1 x 151936 bf16. Where elements
    // are shifted, over twice the threads: 4.7 µs at an offset of one element of f32, and 5.1.
    let few = lines.count() * blocks < 2 * device.multiprocessors;
    // Of short lines no wider than there are multiprocessors for: 64 x 32768 f32 in four blocks 5.5 us, in sixteen 6.8; but 41 x 50257 7.1 and
    // 5.3 (H100).
    let short = needed <= warps;
    // So are lines of half precision that leave blocks four warps: 64 x 151936 sixteen 11.1 us, eight 11.6, 64 x 128256 8.5 and 9.1,
    // 128 x 128256 17.0 and 17.4, 256 x 151936 41.7 and 42.1; but 64 x 65536 6.2 and 5.1, 128 x 100352 15.3 and 14.7.
    let long = elements.size == 2 && !many && 2 * needed > 7 * largest;
    if few && short {
        blocks = 1 << (2 * device.multiprocessors / lines.count()).clamp(blocks, largest).ilog2();
    } else if few || long {
        blocks = largest;
    }
    let halved = few && !whole && elements.size == 4 && 2 * needed.div_ceil(blocks) <= warps;
    let (count, needed) = if halved { (count / 2, room.div_ceil(WARP * count / 2)) } else { (count, needed) };
    let threads = needed.div_ceil(blocks) * WARP;
    let at_once = (device.multiprocessors * (resident / threads).max(1) / blocks).max(1);
    // What the next clusters need is fetched where it helped: 64 x 151936 1.18, without 1.28 (f32); 4096 x 128256 1.04, without
    // 1.10 (bf16), 1.04 and 1.07 (f32); but 1024 x 32768 f32 1.07, without 1.05; and not where all lines are taken at once: 64 x 128256
    // bf16 8.8 us, without 8.5.
    let ahead = match (whole, elements.size) {
        _ if lines.count() <= at_once => 0,
        // At an offset of one element, 4096 x 128256 bf16: half 1.07, a quarter 1.12
        (false, 2) => at_once / 2,
        (_, 2) => at_once / 4,
        _ if blocks >= 8 || threads > MAX_REGISTER_BLOCK / 2 => at_once / 4,
        _ => 0,
    };
    (threads <= MAX_REGISTER_BLOCK && lines.count() <= MAX_GRID / blocks).then(|| Plan {
        cluster: blocks as u32,
        parameter: ahead as i32,
        ..plan(Kernel::Cluster { count, whole }, lines.count() * blocks, threads)
    })
}

/// Whether lines that blocks could hold are better off in clusters, since they leave most multiprocessors idle: 1 x 16384 f32 in a block 3.7 us,
/// in a cluster 2.4, 8 x 32000 bf16 4.2 and 2.4, 32 x 12288 f32 3.6 and 3.25, 32 x 32768 bf16 4.6 and 3.3; but 1 x 8192 f32 2.4 and 2.4, 32 x 12288
/// bf16 2.9 and 3.0, and at an offset of one element 16 x 12288 bf16 3.7 and 3.7, 32 x 20000 4.2 and 4.4 (H100).
fn few_in_clusters(lines: Lines, elements: Elements, device: DeviceFacts) -> bool {
    let half = elements.size == 2;
    let least = match (half && !whole_packs(lines, elements), half && 8 * lines.count() > device.multiprocessors) {
        (false, false) => 8192,
        (true, true) => 32_767,
        _ => 16_384,
    };
    device.compute_capability >= 90
        && lines.inner == 1
        && elements.size < 8
        && lines.len > least
        && 4 * lines.count() <= device.multiprocessors
        && block(lines, whole_packs(lines, elements), elements, device).is_some()
}

/// Whether few lines are better off so than in clusters or split.
fn grid_is_best(lines: Lines, elements: Elements, device: DeviceFacts) -> bool {
    let bytes = lines.len.saturating_mul(elements.size);
    match grid(lines, elements, device) {
        Some(plan) if plan.cluster == 2 => elements.size == 2 && bytes >= PAIR_BYTES,
        Some(_) => lines.count() * bytes >= GRID_BYTES && cluster(lines, elements, device).is_none(),
        None => false,
    }
}

/// Lines that all multiprocessors together have room for.
pub(super) fn grid(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let possible = device.compute_capability >= 90
        && device.shared_bytes >= GRID_SHARED_BYTES
        && lines.inner == 1
        && elements.size < 8
        && lines.count() <= device.multiprocessors;
    if !possible {
        return None;
    }
    // What is not whole packs may begin and end in one of its own.
    let chunks = lines.len.saturating_mul(elements.size).saturating_add(2 * PACK_BYTES).div_ceil(CHUNK_BYTES);
    let most = device.multiprocessors / lines.count();
    let parts = chunks.div_ceil(CHUNK_GROUPS).min(most);
    (chunks <= parts * (CHUNK_GROUPS + CHUNK_SLOTS)).then(|| Plan {
        // Two blocks are faster as a cluster, which tell each other without the whole grid's barrier.
        cluster: if parts == 2 { 2 } else { 1 },
        shared_bytes: GRID_SHARED_BYTES as u32,
        ..plan(Kernel::Grid, lines.count() * parts, GRID_BLOCK)
    })
}

/// Whether lines of half precision that fill the GPU once are better off so than in registers.
fn shared_is_best(lines: Lines, output: Output, elements: Elements, device: DeviceFacts) -> bool {
    let long = output == Output::Probability || lines.len.saturating_mul(elements.size) >= LEAST_SHARED_LOG;
    long && shared(lines, elements, device).is_some_and(|plan| fills(plan, device))
}

/// Whether blocks with a multiprocessor each have nine tenths of them.
fn fills(plan: Plan, device: DeviceFacts) -> bool {
    10 * plan.grid.0 as usize >= 9 * device.multiprocessors
}

/// Lines of half precision that pairs of multiprocessors hold, all at once.
fn shared(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let bytes = lines.len.saturating_mul(elements.size);
    // Of a block
    let part = (bytes / PACK_BYTES).div_ceil(SHARED_BLOCKS) * PACK_BYTES;
    let possible = device.compute_capability >= 90
        && device.shared_bytes >= MOST_SHARED + PACK_BYTES + SHARED_TOLD
        && lines.inner == 1
        && elements.size == 2
        && bytes.is_multiple_of(PACK_BYTES)
        && elements.output_alignment.is_multiple_of(PACK_BYTES)
        && (LEAST_SHARED..=MOST_SHARED).contains(&part)
        && lines.count() <= device.multiprocessors / SHARED_BLOCKS;
    let aligned = elements.input_alignment.is_multiple_of(PACK_BYTES);
    possible.then(|| Plan {
        cluster: SHARED_BLOCKS as u32,
        // One pack more of a shifted input
        shared_bytes: (part + PACK_BYTES + SHARED_TOLD) as u32,
        ..plan(Kernel::Shared { aligned }, lines.count() * SHARED_BLOCKS, SHARED_BLOCK)
    })
}

fn split(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let whole = whole_packs(lines, elements);
    // As `kernels/split_softmax.cuh` has it
    let tile_count = match elements.size {
        8 => 8,
        2 => 32,
        _ => 16,
    };
    let tiles = lines.len.div_ceil(SPLIT_BLOCK * tile_count);
    let parts = (2 * device.multiprocessors).div_ceil(lines.count()).min(tiles);
    // The second dimension of a grid
    let possible = lines.inner == 1 && lines.len <= MAX_REGISTER_LINE && lines.count() <= u16::MAX as usize;
    possible.then(|| plan_across(Kernel::SplitApply { whole }, (parts, lines.count()), SPLIT_BLOCK))
}

/// Where elements are accessed one by one it takes many of them: 22369621 x 3 bf16 at an offset of one element 98 us, in tiles 288, but 37449 x 7
/// 3.2 and 1.7, 299593 x 7 f32 5.6 and 4.7 (H100).
fn run_is_best(lines: Lines, elements: Elements) -> bool {
    if lines.len > RUN_ROW || (lines.len * elements.size).is_multiple_of(PACK_BYTES) {
        return false;
    }
    let whole = elements.alignment().is_multiple_of(PACK_BYTES);
    whole || (lines.elem_count() >= 1 << 20 && (elements.size == 2 || lines.len < 6))
}

/// Lines of a few elements.
fn run(lines: Lines, elements: Elements) -> Option<Plan> {
    // A thread's lines are as many as a pack has elements.
    let grid = lines.count().div_ceil(RUN_BLOCK * (PACK_BYTES / elements.size));
    let possible = lines.inner == 1 && (2..=RUN_ROW).contains(&lines.len) && grid <= MAX_GRID;
    let whole = elements.alignment().is_multiple_of(PACK_BYTES) as i32;
    possible.then(|| Plan { parameter: whole, ..plan(Kernel::Run { len: lines.len }, grid, RUN_BLOCK) })
}
