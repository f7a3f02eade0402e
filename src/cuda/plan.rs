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
    /// What the input's address is a multiple of, in bytes, up to 128.
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
    /// One thread per line, three passes: contiguous lines through shared memory (short ones whole), lines side by side directly.
    SafeRows,
    SafeShortRows,
    SafeColumns,
    /// The same in two passes.
    OnlineRows,
    OnlineShortRows,
    OnlineColumns,
    /// One block per line, two passes.
    Reduce,
    /// The line in registers, `count` elements to a thread, of a part of a warp, a block or a cluster of blocks. `whole`: lines
    /// are whole packs of 16 bytes; else they have any length and offset.
    Warp {
        count: usize,
        whole: bool,
    },
    Block {
        count: usize,
        whole: bool,
    },
    Cluster {
        count: usize,
        whole: bool,
    },
    /// A line split over many blocks: the states of the parts, then the result.
    SplitStates {
        whole: bool,
    },
    SplitApply {
        whole: bool,
    },
    /// Lines side by side in registers. `whole`: rows are whole packs.
    Column {
        whole: bool,
    },
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
    /// What the kernel is told beside the lines: log2 of the threads that share one ([`Kernel::Warp`]) or of those side by
    /// side ([`Kernel::Column`]), or how many lines ahead it fetches ([`Kernel::Cluster`]).
    pub parameter: i32,
}

/// The largest grid there is; kernels that may be given more lines stride over what it leaves.
const MAX_GRID: usize = i32::MAX as usize;
const WARP: usize = 32;
const MAX_BLOCK: usize = 1024;
/// Places in a line are 32-bit in the kernels that hold it in registers.
const MAX_REGISTER_LINE: usize = 1 << 30;

/// Threads of a block whose lines take a warp or less each: 1.01 / 1.01 at 128 threads, 1.02 / 1.03 at 256 (2097152 x 16).
const WARP_BLOCK: usize = 128;
/// Elements of a line for each thread of a warp, by the length of the line: up to (elements, elements per thread). Eight at 128
/// elements: 0.97, sixteen 0.99 (f32); sixteen 1.01, eight 1.03 (bf16).
const WARP_COUNTS: Counts = Counts {
    wide: &[(256, 8), (512, 16)],
    half: &[(16, 8), (512, 16)],
    // 131072 x 32, f32: four 1.41, eight 3.0; bf16 at 16 elements: four 1.6, eight 1.9.
    any_wide: &[(32, 4), (256, 8), (512, 16)],
    any_half: &[(16, 4), (32, 8), (512, 16)],
};
/// The same for a block. 65536 x 1024: sixteen 1.01 / 1.01; 8192 x 4096: 64 1.02, 32 1.03 (f32), 32
/// 1.02, 16 1.13 (bf16); 1024 x 32768: 64 1.07 (bf16). Just above what fills whole warps, bf16: 64527 x 520 32 1.25, 16 1.45;
/// 32513 x 1032 64 1.13, 16 1.22; 16320 x 2056 32 1.15, 16 1.19.
const BLOCK_COUNTS: Counts = Counts {
    wide: &[(2048, 16), (16_384, 64)],
    half: &[(768, 32), (1024, 16), (1280, 64), (2048, 16), (4096, 32), (32_768, 64)],
    any_wide: &[(2048, 16), (16_384, 32)],
    any_half: &[(2048, 16), (16_384, 32)],
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

/// What a block of the kernels that hold lines in registers may have.
const MAX_REGISTER_BLOCK: usize = 512;

/// Clusters of sixteen need a whole GPU, not a slice of one.
const WIDE_CLUSTER: usize = 16;
const PORTABLE_CLUSTER: usize = 8;
const WHOLE_GPU: usize = 100;

/// Split lines: blocks of this many threads, two to a multiprocessor: 1.58 / 1.48, four of half the threads 1.59 / 1.55
/// (1 x 16777216).
const SPLIT_BLOCK: usize = 512;
/// Lines of fewer bytes are not split.
const SPLIT_BYTES: usize = 1 << 16;

/// Threads of a strip of lines side by side, and of one that a whole block of half precision holds.
const COLUMN_BLOCK: usize = 256;
const WIDE_COLUMN_BLOCK: usize = 512;
/// Shorter lines side by side are read twice by a thread each, the second time from the L1 cache.
const SHORT_COLUMN: usize = 16;

/// Of a block whose threads take a line each, as `kernels/thread_per_line.cuh` has it.
const THREADS: usize = 128;
/// Contiguous lines up to this are held in shared memory whole.
const SHORT_ROW: usize = 64;
/// Lines side by side: from this many on, a thread each has enough to do for a GPU (where no strip is held in registers).
const MANY: usize = 4096;

/// The kernel for softmax, with the schedule given or left to choose.
pub(crate) fn softmax(lines: Lines, schedule: Option<Schedule>, elements: Elements, device: DeviceFacts) -> Plan {
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
        Family::Online => Some(online(lines, elements)),
        Family::Reduce => Some(block_per_line(Kernel::Reduce, lines)),
        Family::Register => register(lines, elements),
        Family::Cluster => cluster(lines, elements, device),
        Family::Split => split(lines, elements, device),
        Family::Column => column(lines, elements, device),
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

fn plan(kernel: Kernel, grid: usize, block: usize) -> Plan {
    Plan { kernel, grid: (grid as u32, 1), block: block as u32, cluster: 1, shared_bytes: 0, parameter: 0 }
}

fn thread_per_line(kernel: Kernel, lines: Lines) -> Plan {
    plan(kernel, lines.count().div_ceil(THREADS).min(MAX_GRID), THREADS)
}

fn block_per_line(kernel: Kernel, lines: Lines) -> Plan {
    /// Elements of a line for each thread of its block.
    const ELEMENTS: usize = 8;
    let threads = lines.len.div_ceil(ELEMENTS).next_power_of_two().clamp(WARP, MAX_BLOCK);
    plan(kernel, lines.count().min(MAX_GRID), threads)
}

fn whole_packs(lines: Lines, elements: Elements) -> bool {
    (lines.len * elements.size).is_multiple_of(16)
        && elements.input_alignment.is_multiple_of(16)
        && elements.output_alignment.is_multiple_of(16)
}

/// Elements that a row of `together` neighbouring threads accesses at once.
fn access(whole: bool, elements: Elements, together: usize) -> usize {
    together * if whole { 16 / elements.size } else { (4 / elements.size).max(1) }
}

/// The elements that threads must have room for: accesses begin where sectors of the output do, which may be before the line.
fn room(lines: Lines, whole: bool, elements: Elements, together: usize) -> usize {
    let access = access(whole, elements, together);
    let aligned = lines.len.is_multiple_of(access) && elements.output_alignment.is_multiple_of(access * elements.size);
    if whole || aligned {
        lines.len
    } else {
        lines.len + access - 1
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

fn register(lines: Lines, elements: Elements) -> Option<Plan> {
    if lines.inner > 1 {
        return None;
    }
    let whole = whole_packs(lines, elements);
    warp(lines, whole, elements).or_else(|| block(lines, whole, elements))
}

fn warp(lines: Lines, whole: bool, elements: Elements) -> Option<Plan> {
    let count = WARP_COUNTS.of(lines.len, whole, elements)?;
    let shift = (0..=5).find(|&shift| room(lines, whole, elements, 1 << shift) <= count << shift)?;
    let grid = lines.count().div_ceil(WARP_BLOCK >> shift);
    (grid <= MAX_GRID).then(|| Plan { parameter: shift, ..plan(Kernel::Warp { count, whole }, grid, WARP_BLOCK) })
}

fn block(lines: Lines, whole: bool, elements: Elements) -> Option<Plan> {
    let count = BLOCK_COUNTS.of(lines.len, whole, elements)?;
    let room = room(lines, whole, elements, WARP);
    let threads = |count: usize| room.div_ceil(WARP * count) * WARP;
    // Half the elements to a thread, where else the last warp would have little to do: 8191 x 4097 with 16 1.02 / 1.18, with 32
    // 1.02 / 1.23.
    let idle = |count| threads(count) * count - room;
    let halve = !whole && count == 32 && 2 * idle(16) < idle(32) && threads(16) <= MAX_REGISTER_BLOCK;
    let count = if halve { 16 } else { count };
    let threads = threads(count);
    (threads <= MAX_REGISTER_BLOCK && lines.count() <= MAX_GRID)
        .then(|| plan(Kernel::Block { count, whole }, lines.count(), threads))
}

fn cluster(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    if device.compute_capability < 90 || lines.inner > 1 || lines.len > MAX_REGISTER_LINE {
        return None;
    }
    let whole = whole_packs(lines, elements);
    let largest = if device.multiprocessors >= WHOLE_GPU { WIDE_CLUSTER } else { PORTABLE_CLUSTER };
    let many = lines.count() >= 4 * device.multiprocessors;
    // Elements to a thread, the fewest blocks, the warps that a block should have at most, and the threads that the registers of
    // a multiprocessor hold. 4096 x 128256: four blocks of 16 warps 1.05, eight of 8 1.10 (f32); two of 16 with 128 elements
    // 1.06, eight of 4 1.16 (bf16). 64 x 151936: eight of 10 1.18 / 1.60, sixteen of 5 1.23 / 1.69. At an offset of one
    // element, 4096 x 128256: sixteen of 4 1.14, four of 16 1.16 (f32).
    let (count, fewest, warps, resident) = match (whole, elements.size) {
        (true, 4) => (64, 4, 16, 640),
        (true, 2) if many => (128, 2, 16, 512),
        (true, 2) => (64, 8, 16, 1024),
        (false, 4) => (64, 4, 5, 640),
        (false, 2) => (32, 4, 8, 1024),
        _ => (32, 4, 16, 512),
    };
    let needed = room(lines, whole, elements, WARP).div_ceil(WARP * count);
    let mut blocks = fewest;
    while blocks < largest && needed.div_ceil(blocks) > warps {
        blocks *= 2;
    }
    // Few lines are spread as wide as can be: 4.0 µs with sixteen blocks and 5.2 with eight at 1 x 151936 bf16.
    if lines.count() * blocks < 2 * device.multiprocessors {
        blocks = largest;
    }
    let threads = needed.div_ceil(blocks) * WARP;
    let at_once = (device.multiprocessors * (resident / threads).max(1) / blocks).max(1);
    // What the next clusters need is fetched where it helped: 64 x 151936 1.18, without 1.28 (f32); 4096 x 128256 1.04, without
    // 1.11 (bf16), but 1.08 and 1.05 (f32).
    let ahead = match (whole, elements.size) {
        (true, 2) => at_once / 4,
        (true, _) if blocks >= 8 => at_once / 4,
        (false, 2) => at_once,
        (false, _) if blocks >= 8 => at_once / 2,
        _ => 0,
    };
    (threads <= MAX_REGISTER_BLOCK && lines.count() <= MAX_GRID / blocks).then(|| Plan {
        cluster: blocks as u32,
        parameter: ahead as i32,
        ..plan(Kernel::Cluster { count, whole }, lines.count() * blocks, threads)
    })
}

fn split(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let whole = whole_packs(lines, elements);
    /// As `kernels/split_softmax.cuh` has it.
    fn tile_count(whole: bool, elements: Elements) -> usize {
        match (whole, elements.size) {
            (_, 8) => 8,
            (true, 2) => 32,
            _ => 16,
        }
    }
    let tiles = lines.len.div_ceil(SPLIT_BLOCK * tile_count(whole, elements));
    let parts = (2 * device.multiprocessors).div_ceil(lines.count()).min(tiles);
    // The second dimension of a grid
    let possible = lines.inner == 1 && lines.len <= MAX_REGISTER_LINE && lines.count() <= u16::MAX as usize;
    possible.then_some(Plan {
        grid: (parts as u32, lines.count() as u32),
        ..plan(Kernel::SplitApply { whole }, 1, SPLIT_BLOCK)
    })
}

/// Columns of a thread and rows, as `kernels/column_softmax.cu` and `column_any_softmax.cu` have them.
fn column_tile(whole: bool, elements: Elements) -> (usize, usize) {
    match (whole, elements.size) {
        (true, 8) => (2, 16),
        (true, _) => (4, 16),
        (false, 8) => (1, 16),
        (false, 2) => (2, 32),
        (false, _) => (1, 32),
    }
}

fn column(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let (pack, _) = column_tile(true, elements);
    let bytes = pack * elements.size;
    let packs = lines.inner.is_multiple_of(pack)
        && elements.input_alignment.is_multiple_of(bytes)
        && elements.output_alignment.is_multiple_of(bytes);
    // Single elements keep more blocks busy where lines are short: 1.26, packs 1.49 at (16, 64, 56, 56) dim 1 f32.
    let whole = packs && (lines.len > 64 || elements.size == 2);
    let (size, rows) = column_tile(whole, elements);
    let down = lines.len.div_ceil(rows);
    let largest = match device.compute_capability {
        ..90 => 1,
        _ if device.multiprocessors >= WHOLE_GPU => WIDE_CLUSTER,
        _ => PORTABLE_CLUSTER,
    };
    // Threads side by side, and blocks of a cluster. Packs: (8, 4096, 4096) dim 1 f32 with eight and clusters of eight 1.26, four
    // and clusters of four 1.25; (64, 1000, 128) dim 1 bf16 in one block 1.70, in clusters of two 2.1; (16, 64, 56, 56) dim
    // 1 bf16 with sixteen 1.57, eight 1.61.
    let widest = if whole { 16 } else { 32 };
    let (across, blocks) = if down * widest <= 64 {
        (widest, 1)
    } else if whole && elements.size == 2 && down * 8 <= WIDE_COLUMN_BLOCK {
        (8, 1)
    } else {
        let widths: &[usize] = match whole {
            true => &[8, 4, 2, 1],
            false if down * 32 <= 4 * COLUMN_BLOCK => &[32, 16, 8, 4, 2, 1],
            false => &[16, 8, 4, 2, 1],
        };
        let blocks = |across: usize| (down * across).div_ceil(COLUMN_BLOCK).next_power_of_two();
        // No less than a sector of memory side by side
        let side_by_side = widths.iter().filter(|&&across| across * size * elements.size >= 32);
        side_by_side.map(|&across| (across, blocks(across))).find(|&(_, blocks)| blocks <= largest)?
    };
    let threads = (down.div_ceil(blocks) * across).next_multiple_of(WARP);
    let strips = lines.inner.div_ceil(size * across).checked_mul(lines.outer)?;
    // Of the parts of every warp, every block and the whole
    let states = (threads / WARP + blocks + 1) * across * size;
    let possible = lines.inner > 1
        && lines.len <= MAX_REGISTER_LINE
        && lines.inner <= MAX_REGISTER_LINE
        && strips <= MAX_GRID / blocks;
    possible.then(|| Plan {
        cluster: blocks as u32,
        shared_bytes: (states * 2 * elements.size.max(4)) as u32,
        parameter: across.ilog2() as i32,
        ..plan(Kernel::Column { whole }, strips * blocks, threads)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURING: DeviceFacts = DeviceFacts { compute_capability: 75, multiprocessors: 72, forced: None };
    const HOPPER: DeviceFacts = DeviceFacts { compute_capability: 90, multiprocessors: 132, forced: None };
    const F32: Elements = Elements { size: 4, input_alignment: 128, output_alignment: 128 };
    const BF16: Elements = Elements { size: 2, ..F32 };

    fn lines(outer: usize, len: usize, inner: usize) -> Lines {
        Lines { outer, len, inner }
    }

    #[test]
    fn chosen_kernels() {
        let warp = |count| Kernel::Warp { count, whole: true };
        let block = |count| Kernel::Block { count, whole: true };
        let cluster = |count| Kernel::Cluster { count, whole: true };
        let column = |whole| Kernel::Column { whole };
        let split = Kernel::SplitApply { whole: true };
        let cases = [
            (lines(2_097_152, 16, 1), F32, warp(8), warp(8)),
            (lines(131_072, 32, 1), BF16, warp(16), warp(16)),
            (lines(1_048_576, 128, 1), F32, warp(8), warp(8)),
            (lines(512, 512, 1), F32, warp(16), warp(16)),
            (lines(65_536, 1024, 1), F32, block(16), block(16)),
            (lines(8192, 4096, 1), F32, block(64), block(64)),
            (lines(4096, 8192, 1), F32, block(64), block(64)),
            (
                lines(8191, 4097, 1),
                F32,
                Kernel::Block { count: 16, whole: false },
                Kernel::Block { count: 16, whole: false },
            ),
            (lines(1024, 32_768, 1), F32, cluster(64), Kernel::Reduce),
            (lines(1024, 32_768, 1), BF16, block(64), block(64)),
            (lines(4096, 128_256, 1), BF16, cluster(128), Kernel::Reduce),
            (lines(64, 151_936, 1), BF16, cluster(64), split),
            (lines(1, 151_936, 1), F32, cluster(64), split),
            (lines(1, 1 << 24, 1), F32, split, split),
            (lines(1 << 20, (1 << 30) + 1, 1), F32, Kernel::Reduce, Kernel::Reduce),
            (lines(8, 4096, 4096), F32, column(true), Kernel::OnlineColumns),
            (lines(64, 1000, 128), BF16, column(true), column(true)),
            (lines(64, 1000, 127), BF16, column(false), column(false)),
            (lines(16, 64, 3136), F32, column(false), column(false)),
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
        for unaligned in [Elements { input_alignment: 4, ..F32 }, Elements { output_alignment: 4, ..F32 }] {
            let plan = softmax(rows, None, unaligned, HOPPER);
            assert_eq!(plan.kernel, Kernel::Block { count: 16, whole: false });
            // A line that does not begin where a warp's accesses do may need room for one access more.
            assert_eq!(plan.block, if unaligned.output_alignment == 4 { 96 } else { 64 });
            assert_eq!(softmax(lines(9, 99, 64), None, unaligned, HOPPER).kernel, Kernel::Column { whole: false });
        }
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
                let rows = match rows {
                    Kernel::SafeRows if len == 1 => Kernel::SafeShortRows,
                    Kernel::OnlineRows if len == 1 => Kernel::OnlineShortRows,
                    longer => longer,
                };
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
        assert!(grid.is_multiple_of(plan.cluster as usize), "{what}");
        assert!(plan.cluster == 1 || device.compute_capability >= 90, "{what}");
        let side_by_side = 1 << plan.parameter.clamp(0, 5);
        match plan.kernel {
            Kernel::OnlineShortRows => {
                assert!(plan.shared_bytes as usize >= block * lines.len * elements.size.max(4), "{what}");
                assert!(grid * block >= lines.count() && plan.shared_bytes <= 48 << 10, "{what}");
            }
            Kernel::Warp { count, whole } => {
                assert!(count * side_by_side >= room(lines, whole, elements, side_by_side), "{what}");
                assert!(side_by_side <= WARP && grid * (block / side_by_side) >= lines.count(), "{what}");
            }
            Kernel::Block { count, whole } => {
                assert!(count * block >= room(lines, whole, elements, WARP) && grid == lines.count(), "{what}");
                assert!(block <= if elements.size == 4 && count == 64 { 256 } else { 512 }, "{what}");
            }
            Kernel::Cluster { count, whole } => {
                let threads = block * plan.cluster as usize;
                assert!(count * threads >= room(lines, whole, elements, WARP) && plan.cluster <= 16, "{what}");
                assert!(grid == lines.count() * plan.cluster as usize && block <= 512 && plan.parameter >= 0, "{what}");
            }
            Kernel::SplitApply { .. } => {
                assert!(plan.grid.1 as usize == lines.count() && block <= 512, "{what}");
                assert!(grid * lines.count() * 2 * elements.size.max(4) < 1 << 20, "workspace: {what}");
            }
            Kernel::Column { whole } => {
                let (size, rows) = column_tile(whole, elements);
                assert!(side_by_side <= WARP && block.is_multiple_of(side_by_side) && plan.cluster <= 16, "{what}");
                assert!(block / side_by_side * rows * plan.cluster as usize >= lines.len, "{what}");
                assert!(block <= if whole && elements.size == 2 { 512 } else { 256 }, "{what}");
                assert!(grid / plan.cluster as usize * side_by_side * size >= lines.inner * lines.outer, "{what}");
                assert!(!whole || lines.inner.is_multiple_of(size), "{what}");
                assert!(plan.shared_bytes < 48 << 10, "{what}");
            }
            _ => {}
        }
    }
}
