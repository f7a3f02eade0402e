//! WHICH kernel, and its geometry: a pure function of the lines, the dtype, the alignment and the device, tested without a
//! GPU.
//!
//! The figures behind the thresholds: one H200, kernel time over the time of a copy of the tensor, f32 / bf16, from a sweep
//! over geometries. `benches/results` has the figures of what was chosen.

use crate::lines::Lines;
use crate::op::Schedule;

/// What of a device a plan depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceFacts {
    /// Compute capability times ten: 75 for Turing, 90 for Hopper.
    pub compute_capability: u32,
    pub multiprocessors: usize,
    /// Take this kernel wherever it applies; for tests and benchmarks.
    pub forced: Option<Family>,
}

/// What of the tensors a plan depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Elements {
    /// Bytes of an element.
    pub size: usize,
    /// What the input's address is a multiple of, in bytes, up to 16.
    pub input_alignment: usize,
    pub output_alignment: usize,
}

/// The kernels that a plan may choose, by the file they are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Online,
    Reduce,
    Register,
    Cluster,
    Split,
    Column,
}

impl Family {
    pub const ALL: [(&'static str, Self); 6] = [
        ("online", Self::Online),
        ("reduce", Self::Reduce),
        ("register", Self::Register),
        ("cluster", Self::Cluster),
        ("split", Self::Split),
        ("column", Self::Column),
    ];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kernel {
    /// One thread per line, three passes: contiguous lines through shared memory, lines side by side directly.
    SafeRows,
    SafeColumns,
    /// The same in two passes.
    OnlineRows,
    OnlineColumns,
    /// One block per line, two passes.
    Reduce,
    /// The line in the registers of a group of threads; `any`: of any length and offset.
    Register {
        packs: usize,
        any: bool,
    },
    /// The line in the registers of a cluster of blocks, the next on its way.
    Cluster {
        packs: usize,
    },
    /// A line split over many blocks: the states of the parts, then the result.
    SplitStates,
    SplitApply,
    /// Lines side by side in registers, in packs or single elements.
    ColumnPacks,
    ColumnSingles,
    BackwardColumns,
    BackwardReduce,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub kernel: Kernel,
    pub grid: (u32, u32),
    pub block: u32,
    /// Blocks of a cluster.
    pub cluster: u32,
    pub shared_bytes: u32,
    /// Threads that share a line ([`Kernel::Register`]) or lie side by side ([`Kernel::ColumnPacks`], …Singles).
    pub group: i32,
}

/// The largest grid there is; kernels that may be given more lines stride over what it leaves.
const MAX_GRID: usize = i32::MAX as usize;
const WARP: usize = 32;
const MAX_BLOCK: usize = 1024;
/// Places in a line are 32-bit in the kernels that hold it in registers.
const MAX_REGISTER_LINE: usize = 1 << 30;

/// Packs of a line for each thread, by the packs of a line: up to (packs, packs per thread). Two at 128 elements: 0.97 / 1.01,
/// one 1.03 / 1.20; four at 4096: 1.03 / 1.02, two 1.08 / 1.14; eight at 8192: 1.04, four 1.14 (f32).
const WIDE_PACKS: [(usize, usize); 3] = [(64, 2), (1024, 4), (512 * 8, 8)];
/// Half precision has twice the elements in a pack, so half the packs fill the registers.
const HALF_PACKS: [(usize, usize); 3] = [(2, 1), (64, 2), (512 * 4, 4)];
/// Threads of a block whose lines take less than a warp each: 1.00 at 128 threads, 1.02 at 512 (2097152 x 16 f32).
const SMALL_GROUP_BLOCK: usize = 128;

/// A line that one block holds stays in one: 1.16 / 1.24 at 1024 x 32768, in a cluster of two 1.24 / 1.36. Longer ones
/// are best spread wide: 1.32 / 1.62 with sixteen blocks at 4096 x 128256, 1.51 / 1.81 with eight.
const WIDE_CLUSTER: usize = 16;
const PORTABLE_CLUSTER: usize = 8;
/// Clusters of sixteen need a whole GPU, not a slice of one.
const WHOLE_GPU: usize = 100;

/// Split lines: blocks of this many threads, each thread four packs at a time; 1.62 with 2 blocks a multiprocessor, 1.71 with
/// 4 of half the threads (1 x 16777216 f32).
const SPLIT_BLOCK: usize = 512;
const SPLIT_PACKS: usize = 4;
/// Lines of fewer bytes are not split.
const SPLIT_BYTES: usize = 1 << 16;

/// Rows for each thread of a strip, as `kernels/column_softmax.cu` has it.
const PACK_ROWS: usize = 8;
const SINGLE_ROWS: usize = 16;
/// Shorter lines side by side are read twice by a thread each, the second time from the L1 cache.
const SHORT_COLUMN: usize = 16;

/// Lines side by side: from this many on, a thread each has enough to do for a GPU (where no strip is held in registers).
const MANY: usize = 4096;

/// The kernel for softmax, with the schedule given or left to choose.
pub(crate) fn softmax(lines: Lines, schedule: Option<Schedule>, elements: Elements, device: DeviceFacts) -> Plan {
    let rows = lines.inner == 1;
    match schedule {
        Some(Schedule::Safe) => thread_per_line(if rows { Kernel::SafeRows } else { Kernel::SafeColumns }, lines),
        Some(Schedule::Online) => thread_per_line(online(lines), lines),
        Some(Schedule::Reduce) => block_per_line(Kernel::Reduce, lines),
        None => {
            let forced = device.forced.and_then(|family| of_family(family, lines, elements, device));
            forced.unwrap_or_else(|| chosen(lines, elements, device))
        }
    }
}

/// The kernel for the backward of softmax.
pub(crate) fn softmax_backward(lines: Lines) -> Plan {
    if lines.inner > 1 && lines.count() >= MANY {
        thread_per_line(Kernel::BackwardColumns, lines)
    } else {
        block_per_line(Kernel::BackwardReduce, lines)
    }
}

fn chosen(lines: Lines, elements: Elements, device: DeviceFacts) -> Plan {
    let best_first: &[Family] = if lines.inner == 1 {
        let few = lines.count() < 2 * device.multiprocessors && lines.len * elements.size >= SPLIT_BYTES;
        match few {
            true => &[Family::Register, Family::Cluster, Family::Split],
            false => &[Family::Register, Family::Cluster],
        }
    } else {
        match lines.len < SHORT_COLUMN && lines.count() >= MANY {
            true => &[Family::Online],
            false => &[Family::Column],
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
        Family::Online => Some(thread_per_line(online(lines), lines)),
        Family::Reduce => Some(block_per_line(Kernel::Reduce, lines)),
        Family::Register => register(lines, elements),
        Family::Cluster => cluster(lines, elements, device),
        Family::Split => split(lines, elements, device),
        Family::Column => column(lines, elements, device),
    }
}

fn online(lines: Lines) -> Kernel {
    if lines.inner == 1 {
        Kernel::OnlineRows
    } else {
        Kernel::OnlineColumns
    }
}

fn plan(kernel: Kernel, grid: usize, block: usize) -> Plan {
    Plan { kernel, grid: (grid as u32, 1), block: block as u32, cluster: 1, shared_bytes: 0, group: 0 }
}

fn thread_per_line(kernel: Kernel, lines: Lines) -> Plan {
    /// As `kernels/thread_per_line.cuh` has it.
    const THREADS: usize = 128;
    plan(kernel, lines.count().div_ceil(THREADS).min(MAX_GRID), THREADS)
}

fn block_per_line(kernel: Kernel, lines: Lines) -> Plan {
    /// Elements of a line for each thread of its block.
    const ELEMENTS: usize = 8;
    let threads = lines.len.div_ceil(ELEMENTS).next_power_of_two().clamp(WARP, MAX_BLOCK);
    plan(kernel, lines.count().min(MAX_GRID), threads)
}

/// Elements of a pack, and packs that a line touches, where it may be held in packs at all.
fn packs_of_line(lines: Lines, elements: Elements) -> Option<(usize, usize)> {
    let size = 16 / elements.size;
    let possible = lines.inner == 1 && lines.len <= MAX_REGISTER_LINE && elements.output_alignment == 16;
    let packs = match whole_packs(lines, elements) {
        true => lines.len / size,
        // The worst place to start in a pack
        false => (lines.len + size - 1).div_ceil(size),
    };
    possible.then_some((size, packs))
}

fn whole_packs(lines: Lines, elements: Elements) -> bool {
    (lines.len * elements.size).is_multiple_of(16) && elements.input_alignment == 16
}

fn register(lines: Lines, elements: Elements) -> Option<Plan> {
    let (_, packs) = packs_of_line(lines, elements)?;
    let steps = if elements.size == 2 { HALF_PACKS } else { WIDE_PACKS };
    let (_, per_thread) = steps.into_iter().find(|&(up_to, _)| packs <= up_to)?;
    let threads = packs.div_ceil(per_thread);
    let group = if threads <= WARP { threads.next_power_of_two() } else { threads.next_multiple_of(WARP) };
    let block = group.max(SMALL_GROUP_BLOCK / group * group);
    let block = if group <= WARP { block } else { group };
    let kernel = Kernel::Register { packs: per_thread, any: !whole_packs(lines, elements) };
    let grid = lines.count().div_ceil(block / group).min(MAX_GRID);
    Some(Plan { group: group as i32, ..plan(kernel, grid, block) })
}

fn cluster(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    if device.compute_capability < 90 {
        return None;
    }
    let (_, packs) = packs_of_line(lines, elements)?;
    let full = if elements.size == 2 { 4 } else { 8 };
    let blocks = match packs <= full * MAX_BLOCK {
        true => 1,
        false if device.multiprocessors >= WHOLE_GPU => WIDE_CLUSTER,
        false => PORTABLE_CLUSTER,
    };
    // Where clusters are too few to hide each other's latency, more threads with less to do each: 5.8 µs with half the packs
    // and 6.3 µs with all at 1 x 151936 f32.
    let few = lines.count() * blocks < device.multiprocessors && packs <= blocks * MAX_BLOCK * full / 2;
    let per_thread = if few { full / 2 } else { full };
    let threads = packs.div_ceil(blocks * per_thread).next_multiple_of(WARP);
    if threads > MAX_BLOCK {
        return None;
    }
    // What the registers of a multiprocessor hold at once
    let resident = (device.multiprocessors / blocks).max(1) * (MAX_BLOCK / threads);
    let kernel = Kernel::Cluster { packs: per_thread };
    Some(Plan {
        cluster: blocks as u32,
        shared_bytes: ((per_thread * threads + 1) * 16) as u32,
        ..plan(kernel, lines.count().min(resident) * blocks, threads)
    })
}

fn split(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let (_, packs) = packs_of_line(lines, elements)?;
    let tiles = packs.div_ceil(SPLIT_BLOCK * SPLIT_PACKS);
    let parts = (2 * device.multiprocessors).div_ceil(lines.count()).min(tiles);
    // The second dimension of a grid
    let possible = lines.count() <= u16::MAX as usize;
    possible.then_some(Plan { grid: (parts as u32, lines.count() as u32), ..plan(Kernel::SplitApply, 1, SPLIT_BLOCK) })
}

fn column(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let size = if elements.size == 8 { 2 } else { 4 };
    let bytes = size * elements.size;
    let in_packs = lines.inner.is_multiple_of(size)
        && elements.input_alignment.is_multiple_of(bytes)
        && elements.output_alignment.is_multiple_of(bytes);
    let (kernel, size, rows, widths) = match in_packs {
        true => (Kernel::ColumnPacks, size, PACK_ROWS, [16, 8, 4]),
        false => (Kernel::ColumnSingles, 1, SINGLE_ROWS, [32, 32, 16]),
    };
    // Threads below each other, each with `rows` rows
    let down = lines.len.div_ceil(rows);
    // Blocks of 512 where one holds the strip: 1.29 at (64, 1000, 128) dim 1 f32, of 1024 1.46. Otherwise a cluster of blocks
    // of 1024: 1.37 at (8, 4096, 4096) dim 1 f32.
    let [widest, wide, narrow] = widths;
    let (across, blocks) = if down * widest <= 256 {
        (widest, 1)
    } else if down * wide <= 512 {
        (wide, 1)
    } else if down * narrow <= 512 {
        (narrow, 1)
    } else if down * wide <= 8 * MAX_BLOCK {
        (wide, (down * wide).div_ceil(MAX_BLOCK).next_power_of_two())
    } else {
        (narrow, (down * narrow).div_ceil(MAX_BLOCK).next_power_of_two())
    };
    let block = (down.div_ceil(blocks) * across).next_multiple_of(WARP).max(2 * WARP);
    let strips = (lines.inner / size).div_ceil(across).checked_mul(lines.outer)?;
    let possible = lines.inner > 1
        && lines.len <= MAX_REGISTER_LINE
        && lines.inner <= i32::MAX as usize
        && blocks <= if device.compute_capability >= 90 { PORTABLE_CLUSTER } else { 1 }
        && strips <= MAX_GRID / blocks;
    possible.then(|| Plan { cluster: blocks as u32, group: across as i32, ..plan(kernel, strips * blocks, block) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURING: DeviceFacts = DeviceFacts { compute_capability: 75, multiprocessors: 72, forced: None };
    const HOPPER: DeviceFacts = DeviceFacts { compute_capability: 90, multiprocessors: 132, forced: None };
    const F32: Elements = Elements { size: 4, input_alignment: 16, output_alignment: 16 };
    const BF16: Elements = Elements { size: 2, ..F32 };

    fn lines(outer: usize, len: usize, inner: usize) -> Lines {
        Lines { outer, len, inner }
    }

    #[test]
    fn chosen_kernels() {
        let register = |packs, any| Kernel::Register { packs, any };
        let cases = [
            (lines(2_097_152, 16, 1), F32, register(2, false), register(2, false)),
            (lines(2_097_152, 16, 1), BF16, register(1, false), register(1, false)),
            (lines(1_048_576, 128, 1), F32, register(2, false), register(2, false)),
            (lines(512, 512, 1), F32, register(4, false), register(4, false)),
            (lines(8192, 4096, 1), F32, register(4, false), register(4, false)),
            (lines(4096, 8192, 1), F32, register(8, false), register(8, false)),
            (lines(4096, 8192, 1), BF16, register(4, false), register(4, false)),
            (lines(8191, 4097, 1), F32, register(8, true), register(8, true)),
            (lines(1024, 32_768, 1), F32, Kernel::Cluster { packs: 8 }, Kernel::Reduce),
            (lines(4096, 128_256, 1), BF16, Kernel::Cluster { packs: 4 }, Kernel::Reduce),
            (lines(1, 151_936, 1), F32, Kernel::Cluster { packs: 4 }, Kernel::SplitApply),
            (lines(1, 1 << 24, 1), F32, Kernel::SplitApply, Kernel::SplitApply),
            (lines(1 << 20, (1 << 30) + 1, 1), F32, Kernel::Reduce, Kernel::Reduce),
            (lines(8, 4096, 4096), F32, Kernel::ColumnPacks, Kernel::OnlineColumns),
            (lines(64, 1000, 128), BF16, Kernel::ColumnPacks, Kernel::ColumnPacks),
            (lines(64, 1000, 127), BF16, Kernel::ColumnSingles, Kernel::OnlineColumns),
            (lines(1 << 10, 8, 4096), F32, Kernel::OnlineColumns, Kernel::OnlineColumns),
            (lines(1, 10_000_000, 2), F32, Kernel::Reduce, Kernel::Reduce),
        ];
        for (lines, elements, hopper, turing) in cases {
            assert_eq!(softmax(lines, None, elements, HOPPER).kernel, hopper, "{lines:?} {elements:?}");
            assert_eq!(softmax(lines, None, elements, TURING).kernel, turing, "{lines:?} {elements:?}");
        }
    }

    #[test]
    fn an_offset_or_an_unaligned_output() {
        let rows = lines(1000, 1024, 1);
        let off = Elements { input_alignment: 4, ..F32 };
        assert_eq!(softmax(rows, None, off, HOPPER).kernel, Kernel::Register { packs: 4, any: true });
        assert_eq!(softmax(lines(9, 99, 64), None, off, HOPPER).kernel, Kernel::ColumnSingles);
        let unaligned = Elements { output_alignment: 4, ..F32 };
        assert_eq!(softmax(rows, None, unaligned, HOPPER).kernel, Kernel::Reduce);
    }

    #[test]
    fn a_given_schedule_is_kept() {
        for (schedule, rows, columns) in [
            (Schedule::Safe, Kernel::SafeRows, Kernel::SafeColumns),
            (Schedule::Online, Kernel::OnlineRows, Kernel::OnlineColumns),
            (Schedule::Reduce, Kernel::Reduce, Kernel::Reduce),
        ] {
            let forced = DeviceFacts { forced: Some(Family::Register), ..HOPPER };
            for len in [1, 100, 1_000_000] {
                assert_eq!(softmax(lines(3, len, 1), Some(schedule), F32, forced).kernel, rows);
                assert_eq!(softmax(lines(3, len, 5), Some(schedule), F32, forced).kernel, columns);
            }
        }
    }

    /// Every plan, forced or chosen, covers its lines and keeps the limits of the kernels and the device.
    #[test]
    fn plans_cover_the_lines() {
        let sizes = [1, 2, 3, 31, 127, 128, 129, 1000, 4096, 4097, 32_768, 100_003, 1 << 20, 1 << 24, 1 << 32];
        let shapes = sizes.iter().flat_map(|&a| sizes.iter().flat_map(move |&b| [(a, b, 1), (1, b, a), (7, b, a)]));
        let families = Family::ALL.map(|(_, family)| Some(family)).into_iter().chain([None]);
        for ((outer, len, inner), forced) in
            shapes.flat_map(|shape| families.clone().map(move |forced| (shape, forced)))
        {
            let lines = lines(outer, len, inner);
            for (device, elements) in
                [(HOPPER, F32), (HOPPER, BF16), (TURING, F32), (HOPPER, Elements { size: 8, ..F32 })]
                    .into_iter()
                    .flat_map(|(device, e)| [e, Elements { input_alignment: e.size, ..e }].map(|e| (device, e)))
            {
                let plan = softmax(lines, None, elements, DeviceFacts { forced, ..device });
                check(lines, elements, device, plan);
            }
        }
    }

    fn check(lines: Lines, elements: Elements, device: DeviceFacts, plan: Plan) {
        let what = format!("{lines:?} {elements:?} {plan:?}");
        let (grid, block) = (plan.grid.0 as usize, plan.block as usize);
        assert!((1..=MAX_GRID).contains(&grid) && (1..=65_535).contains(&plan.grid.1), "{what}");
        assert!((WARP..=MAX_BLOCK).contains(&block) && block.is_multiple_of(WARP), "{what}");
        assert!(plan.shared_bytes <= 200 << 10 && grid.is_multiple_of(plan.cluster as usize), "{what}");
        assert!(plan.cluster == 1 || device.compute_capability >= 90, "{what}");
        let group = plan.group as usize;
        let capacity = |packs: usize, threads: usize| packs * threads * (16 / elements.size);
        // Of a line that begins in the middle of a pack
        let needed = if whole_packs(lines, elements) { lines.len } else { lines.len + 16 / elements.size - 1 };
        match plan.kernel {
            Kernel::Register { packs, any } => {
                assert!(capacity(packs, group) >= needed && block.is_multiple_of(group), "{what}");
                assert!(if group <= WARP { group.is_power_of_two() } else { group == block }, "{what}");
                assert!(any || whole_packs(lines, elements), "{what}");
                assert!(packs * 16 / elements.size * elements.size.max(4) <= 64 || block <= 512, "{what}");
            }
            Kernel::Cluster { packs } => {
                assert!(capacity(packs, block * plan.cluster as usize) >= needed && plan.cluster <= 16, "{what}");
                assert!(plan.shared_bytes as usize > packs * block * 16, "{what}");
            }
            Kernel::SplitApply => {
                assert!(plan.grid.1 as usize == lines.count(), "{what}");
                assert!(grid * lines.count() * 2 * elements.size.max(4) < 1 << 20, "workspace: {what}");
            }
            Kernel::ColumnPacks | Kernel::ColumnSingles => {
                let (size, rows) = match plan.kernel {
                    Kernel::ColumnSingles => (1, SINGLE_ROWS),
                    _ => (if elements.size == 8 { 2 } else { 4 }, PACK_ROWS),
                };
                assert!(group.is_power_of_two() && group <= WARP && group * size <= 64, "{what}");
                assert!(block / group * rows * plan.cluster as usize >= lines.len && plan.cluster <= 8, "{what}");
                assert!(lines.inner.is_multiple_of(size) && block.is_multiple_of(group), "{what}");
            }
            _ => {}
        }
    }
}
