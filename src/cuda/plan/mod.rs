//! WHICH kernel, and its geometry: a pure function of the lines, the dtype, the alignment and the device, tested without a
//! GPU.
//!
//! The figures behind the thresholds: one H200, kernel time over the time of a copy of the tensor, f32 / bf16, from a sweep
//! over geometries. `benches/results` has the figures of what was chosen.
//!
//! Here is what a plan is and what several kernels share. `softmax` chooses for contiguous lines and `columns` for those side by side, `backward` for their
//! gradients, `fused` for what models put around them, `statistics` for log-sum-exps, losses and top-k, and `sums` for the gradient of what was broadcast; `group` takes what no kernel holds.

mod backward;
mod columns;
mod fused;
mod group;
mod softmax;
mod statistics;
mod sums;
#[cfg(test)]
mod tests;

use crate::lines::Lines;
pub(crate) use backward::softmax_backward;
pub(crate) use columns::{narrow_units, NarrowUnits, MAX_BOX_ROWS, NARROW_ALONE, RESIDENT_BOX, RESIDENT_COLUMNS};
pub(crate) use fused::{fused, fused_bias, FusedBiasPlan, WHOLE_BLOCK};
use group::across_of;
pub(crate) use softmax::{softmax, CHUNK_BYTES};
pub(crate) use statistics::{
    loss_backward, loss_of_lines, loss_of_parts, statistics, top_k, top_k_backward, top_k_backward_parts, MOST_TOP_K,
};
pub(crate) use sums::{sum, SumPlan};

/// What of a device a plan depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceFacts {
    /// Compute capability times ten: 75 for Turing, 90 for Hopper.
    pub compute_capability: u32,
    pub multiprocessors: usize,
    /// The most shared memory that a block may have.
    pub shared_bytes: usize,
    pub l2_bytes: usize,
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
    /// The output is where the input is.
    pub in_place: bool,
}

impl Elements {
    /// Of tensors apart from each other that are all as aligned as this.
    pub const fn alike(size: usize, alignment: usize) -> Self {
        Self { size, input_alignment: alignment, output_alignment: alignment, in_place: false }
    }

    /// What both addresses are multiples of, in bytes.
    fn alignment(self) -> usize {
        self.input_alignment.min(self.output_alignment)
    }

    /// Whether both tensors, and each run of so many of their elements, begin at whole packs of `pack` elements.
    fn in_packs(self, pack: usize, run: usize) -> bool {
        run.is_multiple_of(pack) && self.alignment().is_multiple_of(pack * self.size)
    }
}

/// The kernels that a plan may choose, by the file they are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Online,
    Reduce,
    Tile,
    Register,
    Cluster,
    Grid,
    Shared,
    Split,
    Run,
    FewRows,
    Narrow,
    Column,
    Strip,
    Resident,
}

impl Family {
    pub const ALL: [(&'static str, Self); 14] = [
        ("online", Self::Online),
        ("reduce", Self::Reduce),
        ("tile", Self::Tile),
        ("register", Self::Register),
        ("cluster", Self::Cluster),
        ("grid", Self::Grid),
        ("shared", Self::Shared),
        ("split", Self::Split),
        ("run", Self::Run),
        ("few-rows", Self::FewRows),
        ("narrow", Self::Narrow),
        ("column", Self::Column),
        ("strip", Self::Strip),
        ("resident", Self::Resident),
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
    /// Short lines, several to a block as one run that is copied through shared memory: up to `words` words of 4 bytes to a thread.
    Tile {
        words: usize,
    },
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
    /// The line in the shared memory and registers of many multiprocessors at once.
    Grid,
    /// The line in the shared memory of two blocks, each of which has a multiprocessor to itself. `aligned`: lines begin at
    /// multiples of 16 bytes of the input, too.
    Shared {
        aligned: bool,
    },
    /// A line split over many blocks: the states of the parts, then the result.
    SplitStates {
        whole: bool,
    },
    SplitApply {
        whole: bool,
    },
    /// The same of lines side by side. `whole`: words of 4 bytes are accessed, of half precision two elements.
    SplitColumnsStates {
        whole: bool,
    },
    SplitColumnsApply {
        whole: bool,
    },
    /// The shortest contiguous lines: to a thread as many whole ones as a pack of 16 bytes has elements.
    Run {
        len: usize,
    },
    /// Few rows of lines side by side: to a thread up to `rows`, whole lines, of `columns` neighbours. `whole`: rows are whole packs of so many; else two
    /// columns are a warp apart.
    FewRows {
        columns: usize,
        rows: usize,
        whole: bool,
    },
    /// Narrow rows of lines side by side in registers, by the words or elements that they are in memory. `whole` as in
    /// [`Kernel::SplitColumnsStates`].
    Narrow {
        whole: bool,
    },
    /// Lines side by side in registers: to a thread, `rows` elements of each of `columns`.
    Column {
        columns: usize,
        rows: usize,
        of: Rows,
    },
    /// The same on Hopper, for long ones: clusters go from strip to strip, and fetch the next one ahead.
    Strip(Strips),
    /// Lines side by side of a tensor that the multiprocessors hold all at once, in shared memory and `held` boxes of registers.
    Resident {
        held: usize,
    },
    /// The gradient, out of the result and its gradient: read twice by a group of threads, …
    BackwardGroup {
        pairs: bool,
    },
    /// … or, of lines side by side, by many, which leave the sums of the parts first, …
    BackwardSplitSums {
        whole: bool,
    },
    BackwardSplitColumns {
        whole: bool,
    },
    /// … or once, where rows are narrow, as above, …
    BackwardNarrow {
        whole: bool,
    },
    /// … or both in registers, `rows` elements of each of `columns` to a thread. `whole`: rows are whole packs of so many.
    BackwardColumn {
        columns: usize,
        rows: usize,
        whole: bool,
    },
    /// … or both in tiles as above, whose first lines begin at multiples of 16 bytes, …
    BackwardTile {
        words: usize,
    },
    /// … or both lines in registers, `count` elements of each to a thread. `whole`: they are whole packs of 16 bytes, as they are for a warp.
    BackwardWarp {
        count: usize,
    },
    BackwardBlock {
        count: usize,
        whole: bool,
    },
    BackwardCluster {
        count: usize,
        whole: bool,
    },
    /// With what models put around a softmax, or the gradients of that: the line in registers as above, …
    FusedWarp {
        backward: bool,
        lines: FusedLines,
    },
    FusedBlock {
        backward: bool,
        lines: FusedLines,
    },
    FusedCluster {
        count: usize,
    },
    FusedClusterScores,
    /// … or with it the sums of the gradients of a bias, …
    FusedBiasWarp,
    FusedBiasBlock,
    FusedBiasTile {
        window: bool,
    },
    /// … or, of any length and offset, in tiles as above, of which a block may also take one line; `many`: more of a line to a thread;
    /// `window`: there is one, whose code takes registers, here and above.
    FusedTile {
        backward: bool,
        held: Held,
        many: bool,
        window: bool,
    },
    /// … each in those of a cluster, …
    FusedClusterTile {
        backward: bool,
        held: Held,
        window: bool,
    },
    /// … or read twice by a group of threads, lines side by side and contiguous ones; `scores`: with nothing but a scale, window and sinks;
    /// `pairs`: two lines of half precision at a time.
    FusedGroup {
        backward: bool,
        scores: bool,
        pairs: bool,
    },
    FusedRows {
        backward: bool,
        scores: bool,
    },
    /// … or once, the gradient of lines side by side with nothing but a scale, as [`Kernel::BackwardColumn`].
    FusedBackwardColumn {
        columns: usize,
        rows: usize,
        whole: bool,
    },
    /// Log-sum-exp and what a loss needs of each line: one block or cluster per contiguous line; or several lines to a block, short ones in
    /// registers, where they are whole packs, or in tiles as above; …
    StatisticsRows,
    StatisticsWarp,
    StatisticsTile,
    /// … of lines side by side, one or two to a thread, or groups of threads. `held`: all of a line is in registers, of half precision in pairs.
    StatisticsThread {
        pairs: bool,
        held: bool,
    },
    StatisticsColumns {
        pairs: bool,
    },
    /// The gradient of a loss: some blocks to a contiguous line, several short ones to a block, by packs or, the shortest, by elements; …
    LossBackwardRows,
    LossBackwardGroups,
    LossBackwardShortRows,
    /// … of lines side by side, one or two to a thread, or groups of threads where rows are narrow.
    LossBackwardColumns {
        pairs: bool,
    },
    LossBackwardNarrowColumns,
    /// What a loss makes of the statistics: a loss for each line, or parts of the sums over many and a loss for all; and back their gradients.
    LossOfEachLine,
    LossOfParts,
    LossOfAllLines,
    LossOfLinesBackward,
    /// Sums over some dimensions; `packs`: of 16 bytes that lie side by side.
    Sum {
        packs: bool,
    },
    /// The greatest elements: one block or cluster, and one warp per contiguous line. And their backward: a warp to each part of a line.
    TopKRows,
    /// Of up to `most` elements.
    TopKShortRows {
        most: u16,
    },
    TopKBackward,
}

/// What rows of lines side by side are, as `kernels/columns.cuh` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Rows {
    /// Whole packs of as many elements as a thread has columns.
    Packs,
    /// Of half precision, whole words of two elements in the results alone.
    Words,
    Any,
}

/// Which strips of lines side by side a kernel is for, as `kernels/hopper/strip_*.cu` have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Strips {
    /// 128 bytes of each row; rows begin at multiples of 16 bytes, …
    Narrow,
    /// … 256 bytes.
    Wide,
    /// The first row begins anywhere, …
    Any,
    /// … or every row does: 256 bytes, which overlap by a sector, in which two strips write.
    Odd,
}

impl Strips {
    /// Bytes of a row in a strip of elements of `size` bytes.
    pub fn bytes(self, size: usize) -> usize {
        match self {
            Strips::Wide | Strips::Odd => 256,
            Strips::Any if size > 2 => 256,
            _ => 128,
        }
    }

    /// Bytes that are copied of it.
    pub fn copied_bytes(self, size: usize) -> usize {
        self.bytes(size) + if matches!(self, Strips::Any | Strips::Odd) { PACK_BYTES } else { 0 }
    }

    /// The rows that a block has room for.
    fn most_rows(self, size: usize) -> usize {
        match self {
            Strips::Odd => 32 * self.warps(size),
            _ => (1 << 16) / self.bytes(size),
        }
    }

    /// Warps of a block. Of odd rows, so many later they begin at the same place in a sector again.
    fn warps(self, size: usize) -> usize {
        match self {
            Strips::Odd => SECTOR_BYTES / size,
            _ => STRIP_WARPS,
        }
    }

    /// The columns of one that are written.
    fn written(self, size: usize) -> usize {
        match self {
            Strips::Odd => (self.bytes(size) - SECTOR_BYTES) / size,
            _ => self.bytes(size) / size,
        }
    }

    /// How many of them there are side by side.
    fn side_by_side(self, lines: Lines, size: usize) -> usize {
        // Columns of the first one that are in the strip before in some rows
        let before = if self == Strips::Odd { SECTOR_BYTES / size - 1 } else { 0 };
        (lines.inner + before).div_ceil(self.written(size))
    }

    /// How many of them there are.
    pub fn count(self, lines: Lines, size: usize) -> usize {
        self.side_by_side(lines, size).saturating_mul(lines.outer)
    }
}

/// Which lines a fused kernel is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum FusedLines {
    /// Whole packs of 16 bytes, gradients without a softcap, …
    Packs,
    /// … and gradients with one.
    Capped,
    /// Whole packs, and parts that are outside of a window are passed over.
    Window,
    /// Whole packs of scores, which are the logits but for a scale and, of gradients, a mask or window, …
    Scores,
    /// … and parts that are outside of a window are passed over.
    ScoresWindow,
}

/// What the threads of a [`Kernel::FusedTile`] or [`Kernel::FusedClusterTile`] hold of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Held {
    Logits,
    /// With a softcap, whose code takes registers from whatever is compiled with it: 131072 x 513 f32 with a bias, backward, on an H100 1.89 copies and apart 1.77.
    CappedLogits,
    /// As [`FusedLines::Scores`]
    Scores,
}

/// What of a fused call a plan depends on, beside its lines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FusedKind {
    pub backward: bool,
    /// Lines are whole packs of 16 bytes in every tensor.
    pub whole: bool,
    /// What the addresses of scores, results and their gradients are multiples of, in bytes, up to 128.
    pub alignment: usize,
    /// How many lines after a line the next one is with the same window; 0 where there is no window.
    pub queries: usize,
    /// What [`FusedLines::Scores`] are for.
    pub scores: bool,
    /// There is a softcap.
    pub capped: bool,
    /// Nothing but a scale, window and sinks is asked for, and results, gradients among them, are of the scores' dtype.
    pub scale_alone: bool,
    /// How many neighbouring lines have the same mask of an element for each key; 0 without one.
    pub masked_alike: usize,
    /// The same without a window and sinks, by a scale above 0, of scores that are the only ones with a gradient, which is asked for.
    pub column: bool,
    /// The kernels for tiles know the dtype of the result.
    pub tiles: bool,
    /// 32 bits are enough for lines, steps and positions.
    pub narrow: bool,
}

impl Kernel {
    /// Whether it needs Hopper, and may run as its clusters, …
    pub fn needs_hopper(self) -> bool {
        matches!(
            self,
            Kernel::Cluster { .. }
                | Kernel::BackwardCluster { .. }
                | Kernel::FusedCluster { .. }
                | Kernel::FusedClusterScores
                | Kernel::FusedClusterTile { .. }
                | Kernel::FusedBiasTile { .. }
                | Kernel::Grid
                | Kernel::Shared { .. }
                | Kernel::Strip(_)
                | Kernel::Resident { .. }
        )
    }

    /// … or runs as clusters where there are any.
    pub fn may_have_clusters(self) -> bool {
        let where_there_are_any = matches!(
            self,
            Kernel::Column { .. }
                | Kernel::BackwardColumn { .. }
                | Kernel::FusedBackwardColumn { .. }
                | Kernel::BackwardGroup { .. }
                | Kernel::FusedGroup { .. }
                | Kernel::FusedRows { .. }
                | Kernel::StatisticsRows
                | Kernel::StatisticsColumns { .. }
                | Kernel::TopKRows
        );
        self.needs_hopper() || where_there_are_any
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub kernel: Kernel,
    pub grid: (u32, u32),
    pub block: u32,
    /// Blocks of a cluster.
    pub cluster: u32,
    pub shared_bytes: u32,
    /// What the kernel is told beside the lines, one of
    /// - log2 of the threads that share a line: [`Kernel::Warp`], [`Kernel::Tile`], [`Kernel::BackwardWarp`], [`Kernel::BackwardTile`], [`Kernel::FusedTile`],
    ///   [`Kernel::FusedBiasWarp`], [`Kernel::FusedBiasTile`], [`Kernel::StatisticsWarp`], [`Kernel::StatisticsTile`], [`Kernel::LossBackwardGroups`],
    ///   [`Kernel::LossBackwardShortRows`], [`Kernel::TopKBackward`];
    /// - log2 of the threads side by side: [`Kernel::Column`], [`Kernel::BackwardColumn`], [`Kernel::FusedBackwardColumn`];
    /// - log2 of those that share all lines side by side, [`NARROW_ALONE`] if a block does: [`Kernel::Narrow`], [`Kernel::BackwardNarrow`];
    /// - log2 of the threads of a group, and how many lines it takes side by side: [`Kernel::BackwardGroup`], [`Kernel::FusedGroup`], [`Kernel::FusedRows`],
    ///   [`Kernel::StatisticsColumns`], [`Kernel::LossBackwardNarrowColumns`];
    /// - the threads side by side: [`Kernel::FewRows`];
    /// - whether both tensors begin at multiples of 16 bytes: [`Kernel::Run`];
    /// - how many lines ahead it fetches: [`Kernel::Block`], [`Kernel::Cluster`], [`Kernel::FusedBlock`], [`Kernel::FusedCluster`], [`Kernel::FusedClusterScores`],
    ///   [`Kernel::FusedClusterTile`], a warp's [`FusedLines::ScoresWindow`];
    /// - the rows of a block: [`Kernel::Strip`], [`Kernel::Resident`], [`Kernel::SplitColumnsApply`], [`Kernel::BackwardSplitColumns`];
    /// - the blocks of a line: [`Kernel::LossBackwardRows`].
    pub parameter: i32,
    /// Whether the L2 cache has no room for both tensors, which [`Kernel::Resident`] is told.
    pub streams: bool,
    /// Whether the lines of a [`Kernel::FusedTile`] or [`Kernel::FusedBiasTile`] share a mask in its shared memory, unless it is of two masks.
    pub shares_mask: bool,
}

impl Plan {
    pub fn blocks(self) -> usize {
        self.grid.0 as usize * self.grid.1 as usize
    }

    /// Of groups of threads, how many share a line without a cluster: those of the grid's second dimension, by which the kernel runs twice.
    pub fn parts(self) -> usize {
        self.grid.1 as usize
    }

    /// How many lines side by side are one thread's, of groups of threads.
    pub fn lines_of_thread(self) -> usize {
        match self.kernel {
            Kernel::BackwardGroup { pairs: true }
            | Kernel::StatisticsColumns { pairs: true }
            | Kernel::FusedGroup { pairs: true, .. } => 2,
            _ => 1,
        }
    }

    /// How many groups of threads take these lines, if the parameter says what groups.
    pub fn groups(self, lines: Lines) -> usize {
        lines.outer * lines.inner.div_ceil(across_of(self.parameter) * self.lines_of_thread())
    }

    /// Whether its blocks wait for each other, beyond clusters: all must run at once.
    pub fn is_cooperative(self) -> bool {
        self.kernel == Kernel::Grid && self.cluster == 1
    }

    /// Whether the kernel reckons with lines, steps and positions in 32 bits.
    pub fn is_narrow(self) -> bool {
        matches!(
            self.kernel,
            Kernel::FusedWarp { .. }
                | Kernel::FusedBlock { .. }
                | Kernel::FusedTile { .. }
                | Kernel::FusedCluster { .. }
                | Kernel::FusedClusterScores
                | Kernel::FusedClusterTile { .. }
                | Kernel::FusedBiasWarp
                | Kernel::FusedBiasBlock
                | Kernel::FusedBiasTile { .. }
        )
    }
}

/// The largest grid there is; kernels that may be given more lines stride over what it leaves.
const MAX_GRID: usize = i32::MAX as usize;
const WARP: usize = 32;
const MAX_BLOCK: usize = 1024;
/// What accesses of a part of a warp, and of a whole one, begin at multiples of in the output, as `kernels/register_softmax.cuh`
/// has it: packs and sectors of memory.
pub(super) const PACK_BYTES: usize = 16;
const SECTOR_BYTES: usize = 32;
/// Places in a line are 32-bit in the kernels that hold it in registers.
const MAX_REGISTER_LINE: usize = 1 << 30;
/// Threads of a block whose lines take a warp or less each: 1.01 / 1.01 at 128 threads, 1.02 / 1.03 at 256 (2097152 x 16).
const WARP_BLOCK: usize = 128;
/// What stands before a tile in shared memory, and what is copied behind it.
const TILE_MARGIN: usize = 128 + 16;
/// What a block of the kernels that hold lines in registers may have.
const MAX_REGISTER_BLOCK: usize = 512;
/// Clusters of sixteen need a whole GPU, not a slice of one; NVIDIA promises them for compute capabilities 9.0 and 10.x.
const WIDE_CLUSTER: usize = 16;
const PORTABLE_CLUSTER: usize = 8;
const WHOLE_GPU: usize = 100;

/// The most blocks of a cluster; one where there are no clusters.
fn largest_cluster(device: DeviceFacts) -> usize {
    match device.compute_capability {
        ..90 => 1,
        90..110 if device.multiprocessors >= WHOLE_GPU => WIDE_CLUSTER,
        _ => PORTABLE_CLUSTER,
    }
}

/// Warps of a strip that is fetched ahead, but for odd rows. Two blocks of them are to be on a multiprocessor.
const STRIP_WARPS: usize = 8;
/// Of a block whose threads take a line each, as `kernels/thread_per_line.cuh` has it.
const THREADS: usize = 128;
/// Lines side by side: from this many on, a thread each has enough to do for a GPU (where no strip is held in registers).
const MANY: usize = 4096;

/// Tiles of as many lines as a block has groups of threads, up to so many words of 4 bytes to each.
fn tile_of(kernel: Kernel, words: usize, lines: Lines, size: usize) -> Option<Plan> {
    let shift = tile_shift(lines, size, words)?;
    let per_block = WARP_BLOCK >> shift;
    let grid = lines.count().div_ceil(per_block);
    (grid <= MAX_GRID).then(|| Plan {
        parameter: shift,
        shared_bytes: tile_bytes(per_block, lines, size),
        ..plan(kernel, grid, WARP_BLOCK)
    })
}

/// Shared memory for a tile of `count` lines.
fn tile_bytes(count: usize, lines: Lines, size: usize) -> u32 {
    (count * lines.len * size + TILE_MARGIN) as u32
}

/// log2 of the threads that share a line in a tile, with up to so many words of 4 bytes to each.
fn tile_shift(lines: Lines, size: usize, words: usize) -> Option<i32> {
    (0..=5).find(|&shift| lines.len * size / 4 <= words << shift)
}

/// Units of a thread at least, and threads of a multiprocessor from which on more of them do not help: 2364 x 197 f16 with 4 to 32
/// units 2.3, 2.4, 2.6 and 2.9 copies, 30000 x 197 4.9, 3.3, 2.5 and 2.2; 2364 x 1001 3.6, 2.8, 2.1 and 2.5.
const TILE_FEW_UNITS: usize = 4;
const TILE_FILLED_THREADS: usize = 512;

/// Whether so many threads to each line are as many as help.
fn tile_fills(lines: Lines, threads: usize, device: DeviceFacts) -> bool {
    lines.count().saturating_mul(threads) >= TILE_FILLED_THREADS * device.multiprocessors
}

/// The units of 4 bytes (f64: elements) of a line in a tile, but for elements of half precision that have none to themselves.
fn tile_units(lines: Lines, size: usize) -> usize {
    if size == 2 {
        lines.len / 2
    } else {
        lines.len
    }
}

/// The fewest blocks of a cluster that have up to `count` elements each. Not one: a block that is launched without a cluster waits forever for what it
/// sends itself.
fn cluster_blocks(lines: Lines, count: usize) -> usize {
    lines.len.div_ceil(count).next_power_of_two().max(2)
}

fn plan(kernel: Kernel, grid: usize, block: usize) -> Plan {
    plan_across(kernel, (grid, 1), block)
}

/// With a grid of two dimensions.
fn plan_across(kernel: Kernel, (x, y): (usize, usize), block: usize) -> Plan {
    Plan {
        kernel,
        grid: (x as u32, y as u32),
        block: block as u32,
        cluster: 1,
        shared_bytes: 0,
        parameter: 0,
        streams: false,
        shares_mask: false,
    }
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
    elements.in_packs(PACK_BYTES / elements.size, lines.len)
}
