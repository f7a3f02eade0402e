//! WHICH kernel, and its geometry: a pure function of the lines, the dtype, the alignment and the device, tested without a
//! GPU.
//!
//! The figures behind the thresholds: one H200, kernel time over the time of a copy of the tensor, f32 / bf16, from a sweep
//! over geometries. `benches/results` has the figures of what was chosen.

use crate::lines::Lines;
use crate::op::{Output, Schedule};

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
    /// Few rows of lines side by side: to a thread up to `rows`, whole lines, of `columns` neighbours. `whole`: rows are whole packs.
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
    /// Lines side by side in registers: to a thread, `rows` elements of each of `columns`. `whole`: rows are whole packs.
    Column {
        columns: usize,
        rows: usize,
        whole: bool,
    },
    /// The same on Hopper, for long ones: clusters go from strip to strip, and fetch the next one ahead.
    Strip(Strips),
    /// Lines side by side of a tensor that the multiprocessors hold all at once, in shared memory and `held` boxes of registers.
    Resident {
        held: usize,
    },
    /// The gradient, out of the result and its gradient: read twice by a group of threads, …
    BackwardGroup,
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
    /// … or both in tiles as above, whose first lines begin at multiples of 16 bytes, …
    BackwardTile {
        words: usize,
    },
    /// … or both lines in registers, `count` elements of each to a thread; they are whole packs of 16 bytes.
    BackwardWarp {
        count: usize,
    },
    BackwardBlock {
        count: usize,
    },
    BackwardCluster {
        count: usize,
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
    FusedCluster,
    /// … or, of any length and offset, in tiles as above, of which a block may also take one line.
    FusedTile {
        backward: bool,
        held: Held,
    },
    /// … or read twice by a group of threads, lines side by side and contiguous ones; `scores`: with nothing but a scale, window and sinks.
    FusedGroup {
        backward: bool,
        scores: bool,
    },
    FusedRows {
        backward: bool,
        scores: bool,
    },
    /// Log-sum-exp and what a loss needs of each line: one block or cluster per contiguous line; or several lines to a block, short ones in
    /// tiles as above, and groups of threads for those side by side.
    StatisticsRows,
    StatisticsTile,
    StatisticsColumns,
    /// The gradient of a loss: some blocks to a contiguous line, several short ones to a block, groups of threads for those side by side.
    LossBackwardRows,
    LossBackwardShortRows,
    LossBackwardColumns,
    /// The greatest elements: one block or cluster, and one warp per contiguous line.
    TopKRows,
    TopKShortRows,
}

/// Which strips of lines side by side a kernel is for, as `kernels/hopper/strip_*.cu` have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Strips {
    /// 128 bytes of each row; rows begin at multiples of 16 bytes, …
    Narrow,
    /// … 256 bytes.
    Wide,
    /// The first row begins anywhere.
    Any,
}

impl Strips {
    /// Bytes of a row in a strip of elements of `size` bytes.
    pub fn bytes(self, size: usize) -> usize {
        match self {
            Strips::Wide => 256,
            Strips::Any if size > 2 => 256,
            _ => 128,
        }
    }

    /// Bytes that are copied of it.
    pub fn copied_bytes(self, size: usize) -> usize {
        self.bytes(size) + if self == Strips::Any { PACK_BYTES } else { 0 }
    }

    /// The rows that a block has room for.
    fn most_rows(self, size: usize) -> usize {
        (1 << 16) / self.bytes(size)
    }

    /// How many of them there are.
    pub fn count(self, lines: Lines, size: usize) -> usize {
        lines.inner.div_ceil(self.bytes(size) / size).saturating_mul(lines.outer)
    }
}

/// Which lines a fused kernel is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum FusedLines {
    /// Whole packs of 16 bytes.
    Packs,
    /// The same, and parts that are outside of a window are passed over.
    Window,
    /// Whole packs of scores, which are the logits but for a scale and, of gradients, a mask or window, …
    Scores,
    /// … and parts that are outside of a window are passed over.
    ScoresWindow,
}

/// What the threads of a [`Kernel::FusedTile`] hold of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Held {
    Logits,
    /// With a softcap, whose code takes registers from whatever is compiled with it: 340613 x 197 f32 with a bias, backward, 1.62 copies and apart 1.49.
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
                | Kernel::FusedCluster
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
                | Kernel::BackwardGroup
                | Kernel::FusedGroup { .. }
                | Kernel::FusedRows { .. }
                | Kernel::StatisticsRows
                | Kernel::StatisticsColumns
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
    /// What the kernel is told beside the lines: log2 of the threads that share one ([`Kernel::Warp`], [`Kernel::Tile`],
    /// [`Kernel::BackwardTile`], [`Kernel::FusedTile`], [`Kernel::StatisticsTile`], [`Kernel::LossBackwardShortRows`]), of those
    /// side by side ([`Kernel::Column`]), of those that share all lines side by side, [`NARROW_ALONE`] if a block does
    /// ([`Kernel::Narrow`], [`Kernel::BackwardNarrow`]), or of a group, and its lines side by side ([`Kernel::BackwardGroup`],
    /// [`Kernel::FusedGroup`], [`Kernel::FusedRows`], [`Kernel::StatisticsColumns`], [`Kernel::LossBackwardColumns`]); threads
    /// side by side ([`Kernel::FewRows`]); whether both tensors begin at multiples of 16 bytes ([`Kernel::Run`]); how many lines
    /// ahead it fetches ([`Kernel::Block`], [`Kernel::Cluster`], [`Kernel::FusedBlock`], a warp's [`FusedLines::ScoresWindow`]);
    /// the rows of a block ([`Kernel::Strip`], [`Kernel::Resident`], [`Kernel::SplitColumnsApply`],
    /// [`Kernel::BackwardSplitColumns`]); or the blocks of a line ([`Kernel::LossBackwardRows`]).
    pub parameter: i32,
    /// Whether the L2 cache has no room for both tensors, which [`Kernel::Resident`] is told.
    pub streams: bool,
    /// Whether the lines of a [`Kernel::FusedTile`] share a mask in its shared memory, unless it is of two masks.
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

    /// Whether its blocks wait for each other, beyond clusters: all must run at once.
    pub fn is_cooperative(self) -> bool {
        self.kernel == Kernel::Grid && self.cluster == 1
    }

    /// Whether the kernel reckons with lines, steps and positions in 32 bits.
    pub fn is_narrow(self) -> bool {
        matches!(
            self.kernel,
            Kernel::FusedWarp { .. } | Kernel::FusedBlock { .. } | Kernel::FusedTile { .. } | Kernel::FusedCluster
        )
    }
}

/// The largest grid there is; kernels that may be given more lines stride over what it leaves.
const MAX_GRID: usize = i32::MAX as usize;
const WARP: usize = 32;
const MAX_BLOCK: usize = 1024;
/// Places in a line are 32-bit in the kernels that hold it in registers.
const MAX_REGISTER_LINE: usize = 1 << 30;

/// Threads of a block whose lines take a warp or less each: 1.01 / 1.01 at 128 threads, 1.02 / 1.03 at 256 (2097152 x 16).
const WARP_BLOCK: usize = 128;
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
/// What stands before a tile in shared memory, and what is copied behind it.
const TILE_MARGIN: usize = 128 + 16;
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

/// What a block of the kernels that hold lines in registers may have.
const MAX_REGISTER_BLOCK: usize = 512;

/// Clusters of sixteen need a whole GPU, not a slice of one.
const WIDE_CLUSTER: usize = 16;
const PORTABLE_CLUSTER: usize = 8;
const WHOLE_GPU: usize = 100;

/// The most blocks of a cluster; one where there are no clusters.
fn largest_cluster(device: DeviceFacts) -> usize {
    match device.compute_capability {
        ..90 => 1,
        _ if device.multiprocessors >= WHOLE_GPU => WIDE_CLUSTER,
        _ => PORTABLE_CLUSTER,
    }
}

/// As `kernels/grid_softmax.cuh` has it: threads of a block, the bytes of a chunk, the groups that share them, and how many chunks there
/// are in shared memory, with a pack and a barrier for each, one more barrier, and states of 16 warps, twice; each group may have one
/// more chunk in registers.
const GRID_BLOCK: usize = 512;
pub(super) const CHUNK_BYTES: usize = 4096;
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

/// Threads of a strip of lines side by side, and of one of half precision where there are no clusters.
const COLUMN_BLOCK: usize = 256;
const WIDE_COLUMN_BLOCK: usize = 512;
/// Threads of a strip that is fetched ahead, which two blocks of a multiprocessor have, and how many clusters of one, two, …
/// blocks run at once on the multiprocessors of a whole GPU, as the driver said of one. (Where it says less, less are launched.)
const STRIP_BLOCK: usize = 256;
const STRIP_CLUSTERS: [usize; WIDE_CLUSTER] = [264, 132, 79, 62, 47, 39, 32, 30, 23, 21, 16, 16, 14, 14, 14, 14];
/// What that GPU has.
const COUNTED_MULTIPROCESSORS: usize = 132;
/// As `kernels/resident_softmax.cuh` has it: threads of a block, columns of a strip, rows of a box, and boxes in shared memory and in
/// registers.
const RESIDENT_BLOCK: usize = 512;
pub(super) const RESIDENT_COLUMNS: usize = 64;
pub(super) const RESIDENT_BOX: usize = 64;
const RESIDENT_SLOTS: usize = 25;
const RESIDENT_HELD: usize = 8;
/// Blocks that a multiprocessor has registers for.
const RESIDENT_EACH: usize = 2;
/// Chosen from this many rows on. dim 1 bf16 on an H100, us, resident and the best of the others: (64, 1000, 128) 8.8 and 9.2, (32, 1000, 128)
/// 5.7 and 6.9, (1, 1000, 128) 2.8 and 3.8, (64, 256, 128) 3.7 and 4.8, (64, 128, 128) 2.7 and 4.7; two blocks to a multiprocessor,
/// (132, 512, 128) 8.5 and 9.3; but (40, 1000, 128), which has no second block for each strip, 8.7 and 8.3, (24, 1000, 128) 5.9 and 5.7,
/// (64, 1000, 72) 10.9 and 10.4, (64, 64, 128) 2.2 and 1.9.
const RESIDENT_LEAST: usize = 128;
/// How many clusters of so many blocks, each of which has a multiprocessor to itself, run at once on a whole GPU, as the driver said.
const RESIDENT_CLUSTERS: [(usize, usize); 4] = [(16, 7), (8, 15), (4, 30), (2, 66)];
/// How often warps and blocks may tell each other what they have.
const RESIDENT_MERGES: usize = 3;
/// What the system takes of a multiprocessor's shared memory for each block.
const SYSTEM_SHARED: usize = 1024;
/// Boxes that are copied at once have up to this many rows, a multiple of the other.
pub(crate) const MAX_BOX_ROWS: usize = 256;
const BOX_ROWS: usize = 8;
/// Up to this length a thread takes half as many rows: 1.33, with more 1.52 at (16, 64, 56, 56) dim 1 f32.
const HALF_ROWS: usize = 128;
/// Up to this length packs are not used but of half precision, and of two elements there: (16, 64, 56, 56) dim 1 f16 3.31
/// us, four columns of eight rows 3.49. Element by element, at an offset of one, two columns of sixteen rows 4.4, of 32 6.2.
const SHORT_PACKS: usize = 64;

/// Contiguous lines up to this length are taken in runs: 33554432 x 2 bf16 on an H100 1.01, in tiles 4.33, 1198372 x 7 1.2 and 2.2.
const RUN_ROW: usize = 7;
const RUN_BLOCK: usize = 128;
/// Lines side by side up to this length are a thread's, whole: 87381 x 3 x 256 bf16 1.0 and f32 1.0, read twice by a thread each 4.5 and 2.0.
const FEW_ROWS: usize = 8;
const FEW_ROWS_BLOCK: usize = 128;
/// As `kernels/narrow.cuh` has it: units of a thread. As many as there is room for: (262144, 128, 2) bf16 with sixteen 1.02 copies,
/// eight 1.12, four 1.5.
const NARROW_UNITS: usize = 16;
const NARROW_BLOCK: usize = 128;
/// The most warps of a block.
const NARROW_WARPS: usize = 32;
pub(super) const NARROW_ALONE: i32 = 6;
/// Rows up to this are narrow, in bytes, if they are whole packs, and less are so however few blocks there are. On an H100 bf16, copies:
/// (32768, 128, 2) 1.5 and as columns 49, (335544, 50, 4) 1.0 and 11, (16384, 64, 8) 1.4 and 6.8, (524, 500, 16) 1.0 and 1.9; but (699, 500, 24)
/// 1.9 and 1.5, since a row's twelve words leave eight lanes of a warp without any.
const NARROWEST_ROW: usize = 32;
/// Others up to this, and longer lines of half precision whose rows are wider: (10485, 128, 50) bf16 1.0 and 1.5, (2621, 64, 50) 10.8 us and 9.3,
/// (699, 500, 24) f32 at an offset of one element 37 and 25.
const NARROW_ROW: usize = 64;
/// Fewer than eight lanes, which access less than a sector of memory side by side, take so many units at most: (32768, 16, 4) bf16 by four lanes
/// with eight each 3.5 us, by two with sixteen 11.3, by eight with four 4.6; f32 by eight with eight 4.8, by four with sixteen 12.2.
const NARROW_FEW_UNITS: usize = 10;
/// Split lines side by side, as `kernels/split_columns.cuh` has it: threads of a block, how many blocks there shall be to a multiprocessor, …
const SPLIT_COLUMNS_BLOCK: usize = 512;
const SPLIT_COLUMNS_EACH: usize = 8;
/// … the bytes that a part shall have at least, and how many times those of all its lines' states, which it reads: (34, 30000, 2) bf16 in 32
/// parts 39 us, in three 11, a block for each line 17.
const SPLIT_COLUMNS_BYTES: usize = 32 << 10;
const SPLIT_COLUMNS_RATIO: usize = 4;

/// Of a block whose threads take a line each, as `kernels/thread_per_line.cuh` has it.
const THREADS: usize = 128;
/// Contiguous lines up to this are held in shared memory whole.
const SHORT_ROW: usize = 64;
/// Lines side by side: from this many on, a thread each has enough to do for a GPU (where no strip is held in registers).
const MANY: usize = 4096;

/// Of groups of threads that share lines, as `kernels/line_group.cuh` has them: threads at most, those of a block of several, elements of a
/// thread that are in flight at least, and how many it has where there are many groups. On an H100, copies, with 256 threads at most: the
/// gradient (4096, 4096) dim 0 bf16 4.4 with 512 3.2, with a scale 15 and 8.0. Elements: the gradient 8191 x 4097 bf16 with 8 4.0, 16 2.4, 32 2.1.
const GROUP_BLOCK: usize = 512;
const SMALL_GROUPS_BLOCK: usize = 128;
const GROUP_TILE: usize = 4;
const GROUP_ELEMENTS: usize = 32;
/// Threads of a group at least, if each of them has as many elements; and elements of a thread at least where there are more of them only to fill
/// the GPU or to have fewer lines at once.
const GROUP_SIDE_BY_SIDE: usize = 16;
const GROUP_LEAST: usize = 8;
/// Threads of a multiprocessor at once.
const GROUP_RESIDENT: usize = 1024;
/// Few lines are split over all of the GPU, in two kernels, if the threads of a cluster had so many elements each; over two blocks to a
/// multiprocessor if their threads have, otherwise over one. In a program of its own, H100, copies, clusters and split, with a scale: 1 x 151936 f32
/// (18 elements) 3.2 and 3.6, 1 x 500000 (61) 2.6 and 2.0, 1 x 16777217 8.6 and 1.9; one block and two: 1 x 500000 bf16 (7 and 3) 3.0 and 3.5,
/// 1 x 4000000 (59 and 30) 3.15 and 3.14, 1 x 16777217 (248 and 124) 2.5 and 2.0. Clusters that have more than three quarters of the blocks for which
/// there is room take turns: 64 x 151936 f32 in clusters of two 1.6, of four 2.4.
const GROUP_SPLIT: usize = 48;

/// Of log-sum-exp and losses, as `kernels/statistics.cu` and `loss_backward.cu` have them: packs of 16 bytes in flight for a thread.
const LOSS_PACKS: usize = 4;
/// Bytes of a contiguous line that a block of a cluster has at least where there are few.
const LEAST_PART: usize = 16 << 10;
/// Contiguous lines up to this length take a warp or less.
const SHORT_STATISTICS: usize = 512;
/// Words of 4 bytes (f64: elements) of a thread then, but for one more that makes an odd number.
const STATISTICS_WORDS: usize = 16;
/// The packs that a thread reads one after the other where there are many lines, and the most threads. 8192 x 4096: 64 threads
/// 0.52, 256 0.69 (f32), 32 threads 0.58, 128 0.68 (bf16); 65536 x 1024: 32 threads 0.49 / 0.65, 64 0.59 / 1.21; 4096 x
/// 128256: 128 threads 0.48 / 0.49, 256 0.48 / 0.50.
const STATISTICS_PACKS: usize = 16;
const STATISTICS_BLOCK: usize = 128;
const LOSS_BLOCK: usize = 256;
/// Lines up to this length take a warp to find so many places at most. On an H100, us: 16384 x 128 with k 8 12, 4096 x 1000 with 50 66; 64 x 1000 with
/// 1000 202, by a block 38.
const SHORT_TOP_K: usize = 1024;
const FEW_TOP_K: usize = 64;
/// Elements of a thread of a block that selects: 4096 x 2048 with k 8 256 threads 76 us, 1024 threads 242.
const TOP_K_ELEMENTS: usize = 8;
/// Bytes that a block selects by: two numbers for each of 2048 digits, and 35 more.
const SELECT_BYTES: usize = (2 * 2048 + 35) * 4;
/// The most places that a block finds, as `kernels/top_k.cu` has it: it sorts them in shared memory.
pub(crate) const MOST_TOP_K: usize = 2048;

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

/// The kernel for the backward of softmax. The input's alignment is that of the result and of its gradient.
pub(crate) fn softmax_backward(lines: Lines, elements: Elements, device: DeviceFacts) -> Plan {
    let (size, alignment) = (elements.size, elements.input_alignment.min(elements.output_alignment));
    let twice = || group(Kernel::BackwardGroup, lines, size, 2, device);
    let forced = match device.forced {
        Some(Family::Online | Family::Reduce) => Some(twice()),
        Some(Family::Narrow) => narrow(lines, elements).map(backward_of),
        Some(Family::Split) => split_columns(lines, elements, device).map(backward_of),
        _ => None,
    };
    let side_by_side = || {
        let split = || split_columns(lines, elements, device).filter(|_| lines.count() < MANY);
        filling_narrow(lines, elements, device).or_else(split).map(backward_of)
    };
    let held = || {
        let possible = alignment.is_multiple_of(PACK_BYTES) && lines.inner == 1 && lines.len <= MAX_REGISTER_LINE;
        if !possible {
            return None;
        }
        match (lines.len * size).is_multiple_of(PACK_BYTES) {
            true => register_backward(lines, size, device),
            false => tile_backward(lines, size),
        }
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

/// Short lines that are not whole packs
fn tile_backward(lines: Lines, size: usize) -> Option<Plan> {
    const WORDS: usize = 16;
    let plan = tile_of(Kernel::BackwardTile { words: WORDS + 1 }, WORDS, lines, size).filter(|_| size < 8)?;
    Some(Plan { shared_bytes: 2 * plan.shared_bytes.next_multiple_of(128), ..plan })
}

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

/// Over 3/2 of a copy: 65536 x 1024 sixteen elements 0.96 / 0.96; 8192 x 4096 0.96 / 0.96; 1024 x 32768 two blocks of 32
/// 0.99 / 1.00, bf16 four of 32 1.01; 4096 x 128256 f32 eight of 32 0.99, sixteen 1.07; bf16 four of 64 0.97, eight of 32 1.02.
fn register_backward(lines: Lines, size: usize, device: DeviceFacts) -> Option<Plan> {
    let (of_warp, of_block, of_cluster): (usize, &[usize], &[(usize, usize)]) = match size {
        8 => (8, &[8], &[(WIDE_CLUSTER, 16)]),
        4 => (16, &[16], &[(WIDE_CLUSTER, 32)]),
        _ => (16, &[16, 32], &[(2, 32), (WIDE_CLUSTER, 64)]),
    };
    if lines.len <= of_warp * WARP {
        let shift = lines.len.div_ceil(of_warp).next_power_of_two().ilog2();
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
            .then(|| plan(Kernel::BackwardBlock { count }, lines.count(), threads(count)));
    }
    if device.compute_capability < 90 {
        return None;
    }
    let largest = largest_cluster(device);
    of_cluster.iter().find_map(|&(most, count)| {
        let blocks = cluster_blocks(lines, count);
        (blocks <= most.min(largest) && lines.count() <= MAX_GRID / blocks).then(|| Plan {
            cluster: blocks as u32,
            ..plan(
                Kernel::BackwardCluster { count },
                lines.count() * blocks,
                lines.len.div_ceil(count * blocks).next_multiple_of(WARP),
            )
        })
    })
}

/// The kernel for softmax with what models put around it, or for the gradients, of elements of `size` bytes.
pub(crate) fn fused(lines: Lines, kind: FusedKind, size: usize, device: DeviceFacts) -> Plan {
    let backward = kind.backward;
    let scores = kind.scale_alone;
    let kernel =
        if lines.inner == 1 { Kernel::FusedRows { backward, scores } } else { Kernel::FusedGroup { backward, scores } };
    let group = || group(kernel, lines, size, if backward { 2 } else { 1 }, device);
    let registers = || fused_registers(lines, kind, size, device);
    let cluster = || fused_cluster(lines, kind, size, device);
    let forced = match device.forced {
        Some(Family::Online | Family::Reduce) => Some(group()),
        Some(Family::Register) => registers(),
        Some(Family::Cluster) => cluster(),
        _ => None,
    };
    forced.or_else(registers).or_else(cluster).unwrap_or_else(group)
}

/// Elements of a thread and threads of a block, at most, of whole packs, as `kernels/fused.cuh` has them. Of (8, 16, 2048, 2048) with a scale: f32
/// sixteen 0.94, 32 0.95; bf16 32 0.96, sixteen 1.13, 64 1.04.
fn fused_count(backward: bool, size: usize) -> (usize, usize) {
    match (backward, size) {
        (false, 2) => (32, 256),
        (false, 4) => (16, 256),
        (false, _) => (8, 256),
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
    let held = fused_count(backward, size);
    let of = if queries > 0 && !backward { FusedLines::Window } else { FusedLines::Packs };
    let plan = warp_or_block(lines, held, backward, of)?;
    if let Kernel::FusedBlock { lines: FusedLines::Window, .. } = plan.kernel {
        let resident = if size == 4 { 1280 } else { 1024 };
        let ahead = fused_ahead(lines, queries, size, resident / plan.block as usize, device);
        return Some(Plan { parameter: ahead as i32, ..plan });
    }
    Some(plan)
}

/// Units of 4 bytes (f64: elements) of a thread and threads of a block, at most, as `kernels/fused_tile.cuh` has them.
fn fused_tile_count(backward: bool, held: Held, size: usize) -> (usize, usize) {
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

/// [`Plan::parameter`] where a block takes one line, and no part of a warp does.
pub(super) const WHOLE_BLOCK: i32 = 6;

/// Lines of any length in tiles. In copies, f16 / f32: with a scale 871486 x 77 1.08 / 1.02, 340613 x 197 1.05 / 1.03, 115977 x 577
/// 1.12 / 1.02, 32752 x 2047 1.06 / 1.02; with a bias for each 1.33 / 1.04, 1.61 / 1.05, 1.33 / 1.03, 1.63 / 1.45; the gradients with a
/// scale (floor 1.5) 1.92 / 1.51, 2.35 / 1.56, 1.94 / 1.50, 2.28 / 1.50.
fn fused_tile(lines: Lines, kind: FusedKind, size: usize, device: DeviceFacts) -> Option<Plan> {
    const MOST_BYTES: usize = 47 << 10;
    if !kind.tiles {
        return None;
    }
    let backward = kind.backward;
    let units = tile_units(lines, size);
    // Threads that share a line where each of them has up to so many units.
    let threads_of = |most: usize| {
        let threads = units.div_ceil(most).max(1);
        if threads <= WARP {
            threads.next_power_of_two()
        } else {
            threads.next_multiple_of(WARP)
        }
    };
    let lines_of_block = |threads: usize| if threads <= WARP { WARP_BLOCK / threads } else { 1 };
    let logits = if kind.capped { Held::CappedLogits } else { Held::Logits };
    let scores = kind.scores && size == 2 && device.compute_capability >= 90;
    let mut held = if scores { Held::Scores } else { logits };
    if scores && kind.masked_alike > 0 && !backward {
        // Where four threads would take a line, of which each reads two bytes of the mask at a time, eight that hold logits are faster
        // if these have enough to do: 261112 x 257 1.63, as scores 2.06; but 340613 x 197 1.77 and 1.29, 115977 x 577 1.82 and 1.42.
        let (most, _) = fused_tile_count(backward, held, size);
        let threads = threads_of(most);
        if threads == 4 && 5 * units >= 4 * most * 4 && !tiles_share_mask(kind, size, lines_of_block(threads)) {
            held = logits;
        }
    }
    let (mut most, most_threads) = fused_tile_count(backward, held, size);
    while most >= 2 * TILE_FEW_UNITS
        && !tile_fills(lines, threads_of(most), device)
        && threads_of(most / 2) <= most_threads
    {
        most /= 2;
    }
    let threads = threads_of(most);
    let (shift, block) = if threads <= WARP { (threads.ilog2() as i32, WARP_BLOCK) } else { (WHOLE_BLOCK, threads) };
    let per_block = lines_of_block(threads);
    let grid = lines.count().div_ceil(per_block);
    // Of gradients another one, for those of the result
    let tiles = if backward { 2 } else { 1 };
    let possible = threads <= most_threads && grid <= MAX_GRID && tiles * lines.len * size <= MOST_BYTES;
    // Gradients that are held as scores have not the registers for it.
    let shares_mask = !(backward && held == Held::Scores) && tiles_share_mask(kind, size, per_block);
    let mask_bytes = if shares_mask { 4 * (lines.len / 2 * 2 + 1) } else { 0 };
    possible.then(|| Plan {
        parameter: shift,
        shared_bytes: tiles as u32 * tile_bytes(per_block, lines, size).next_multiple_of(128) + mask_bytes as u32,
        shares_mask,
        ..plan(Kernel::FusedTile { backward, held }, grid, block)
    })
}

/// Whether most tiles of so many lines of half precision have one mask, as one of padding is. Then what it keeps of each two elements is found once, in
/// shared memory: with a scale and a mask for each of many matrices (H100, bf16, copies) 340613 x 197 1.02, by a byte for each element 1.20, 261112 x 257 1.06
/// and 1.46, 115977 x 577 1.10 and 1.28, 64064 x 1001 1.06 and 1.15; with a bias, too, 1.42 and 1.67, 1.26 and 1.56, 1.33 and 1.62, 1.57 and 1.93.
fn tiles_share_mask(kind: FusedKind, size: usize, lines: usize) -> bool {
    size == 2 && lines > 1 && kind.masked_alike >= 4 * lines
}

/// Elements that a thread holds as they lie in memory, and threads of a block, at most. Of (8, 16, 2048, 2048) bf16: causal with
/// a warp to a line 0.78, a block of two 0.82, as logits 0.94; without a window a block of one 1.01, as logits 1.00, with dropout
/// 1.07 and 1.15; (8, 8192, 8192) causal 0.90 and 1.05. The gradients of half as many lines of 2048, f32 and bf16: scale 1.27 and
/// 1.37, as logits 1.37 and 1.66; causal 1.01 and 1.09, 1.21 and 1.53; lines of 64 1.41 and 1.47, 1.73 and 1.85. f32 with 32
/// elements 1.42, bf16 with 64 or sixteen 1.46 and 1.60.
fn scores_count(backward: bool, size: usize) -> Option<(usize, usize)> {
    match (backward, size) {
        (false, 2) => Some((64, 256)),
        (true, 2) => Some((32, 256)),
        (true, 4) => Some((16, 512)),
        _ => None,
    }
}

/// Part of a warp for each line, or a block where that is not enough, of threads that hold `count` elements of it.
fn warp_or_block(lines: Lines, (count, most_threads): (usize, usize), backward: bool, of: FusedLines) -> Option<Plan> {
    let threads = lines.len.div_ceil(count);
    let (kernel, grid, block, shift) = if threads <= WARP {
        let shift = threads.next_power_of_two().ilog2();
        (Kernel::FusedWarp { backward, lines: of }, lines.count().div_ceil(WARP_BLOCK >> shift), WARP_BLOCK, shift)
    } else {
        (Kernel::FusedBlock { backward, lines: of }, lines.count(), threads.next_multiple_of(WARP), 0)
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
    if !(fused_count(backward, size).0 * WARP + 1..=count * most_threads).contains(&lines.len) {
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

/// The fewest blocks of a cluster whose threads have `count` elements each. Not one: a block that is launched without a cluster waits forever
/// for what it sends itself.
fn cluster_blocks(lines: Lines, count: usize) -> usize {
    lines.len.div_ceil(count * MAX_REGISTER_BLOCK).next_power_of_two().max(2)
}

/// Elements of a thread in a fused cluster.
fn fused_cluster_count(size: usize) -> usize {
    if size == 8 {
        16
    } else {
        32
    }
}

fn fused_cluster(lines: Lines, kind: FusedKind, size: usize, device: DeviceFacts) -> Option<Plan> {
    let count = fused_cluster_count(size);
    if device.compute_capability < 90 || lines.inner > 1 || !kind.whole || kind.backward || !kind.narrow {
        return None;
    }
    let largest = largest_cluster(device);
    let blocks = cluster_blocks(lines, count);
    (blocks <= largest && lines.count() <= MAX_GRID / blocks).then(|| {
        let threads = lines.len.div_ceil(count * blocks).next_multiple_of(WARP);
        Plan { cluster: blocks as u32, ..plan(Kernel::FusedCluster, lines.count() * blocks, threads) }
    })
}

/// The kernel for log-sum-exp and the statistics of a loss.
pub(crate) fn statistics(lines: Lines, elements: Elements, device: DeviceFacts) -> Plan {
    if lines.inner > 1 {
        return group(Kernel::StatisticsColumns, lines, elements.size, 0, device);
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
        let plan = group(Kernel::LossBackwardColumns, lines, elements.size, 0, device);
        let (threads, across) = threads_and_across(plan.parameter);
        let rows = threads / across;
        let filling = 2 * GROUP_RESIDENT * device.multiprocessors / (threads * group_count(lines, plan.parameter));
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

/// The kernel for the places of the `k` greatest elements, up to [`MOST_TOP_K`], of contiguous lines of elements of `size` bytes.
pub(crate) fn top_k(lines: Lines, k: usize, size: usize, device: DeviceFacts) -> Plan {
    if lines.len <= SHORT_TOP_K && k <= FEW_TOP_K {
        return plan(Kernel::TopKShortRows, lines.count().div_ceil(THREADS / WARP), THREADS);
    }
    let threads = lines.len.div_ceil(TOP_K_ELEMENTS).next_power_of_two().clamp(THREADS, MAX_BLOCK);
    // A rank of 4 bytes (f64: 8) and a place each
    let shared_bytes = (k.next_power_of_two() * 2 * size.max(4)).max(SELECT_BYTES) as u32;
    let plan = Plan { shared_bytes, ..plan(Kernel::TopKRows, lines.count(), threads) };
    in_clusters(plan, blocks_of_few(lines, size, 2, device))
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
            len if len <= FEW_ROWS => &[Family::FewRows],
            len if len < RESIDENT_LEAST => &[Family::Strip, Family::Column, Family::Split],
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

/// [`Plan::parameter`] of groups of threads: log2 of how many they are, and how many lines they take side by side.
fn group_shape(threads: usize, across: usize) -> i32 {
    (threads.ilog2() as usize | across << 8) as i32
}

/// Both of them again.
fn threads_and_across(shape: i32) -> (usize, usize) {
    (1 << (shape & 0xff), across_of(shape))
}

/// Also of another kernel's parameter, which is no shape: any number then.
fn across_of(shape: i32) -> usize {
    (shape >> 8).max(1) as usize
}

/// How many groups of this shape there are. Kernels whose parameter is none have no use for it.
pub(super) fn group_count(lines: Lines, shape: i32) -> usize {
    lines.outer * lines.inner.div_ceil(across_of(shape))
}

/// Groups of threads that share lines of elements of `size` bytes, of which so many tensors are read `again`.
fn group(kernel: Kernel, lines: Lines, size: usize, again: usize, device: DeviceFacts) -> Plan {
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
    let splits = matches!(kernel, Kernel::BackwardGroup | Kernel::FusedGroup { .. } | Kernel::FusedRows { .. });
    if splits && groups <= device.multiprocessors / 8 && of_thread(blocks) >= GROUP_SPLIT {
        let parts = if of_thread(room) >= GROUP_SPLIT { room } else { room / 2 };
        return Plan { grid: (plan.grid.0, parts as u32), ..plan };
    }
    in_clusters(plan, blocks)
}

/// The blocks of a cluster for each of few contiguous lines, of which a multiprocessor has so many `at_once`, without a second round of clusters:
/// a GPU does not have as many of them as of blocks.
fn blocks_of_few(lines: Lines, size: usize, at_once: usize, device: DeviceFacts) -> usize {
    let most = 3 * at_once * device.multiprocessors / 4;
    let blocks = (most / lines.count()).min(lines.len * size / LEAST_PART);
    cluster_of(blocks, device)
}

/// Blocks of a cluster, up to so many.
fn cluster_of(blocks: usize, device: DeviceFacts) -> usize {
    1 << blocks.clamp(1, largest_cluster(device)).ilog2()
}

/// With a cluster of so many blocks for each.
fn in_clusters(plan: Plan, blocks: usize) -> Plan {
    let grid = (plan.grid.0 as usize).min(MAX_GRID / blocks);
    Plan { grid: ((grid * blocks) as u32, plan.grid.1), cluster: blocks as u32, ..plan }
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

/// What accesses of a part of a warp, and of a whole one, begin at multiples of in the output, as `kernels/register_softmax.cuh`
/// has it: packs and sectors of memory.
pub(super) const PACK_BYTES: usize = 16;
const SECTOR_BYTES: usize = 32;

/// The elements that threads must have room for: accesses begin at multiples of `bytes`, which may be before the line.
fn room(lines: Lines, whole: bool, elements: Elements, bytes: usize) -> usize {
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
fn tile(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
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

fn warp(lines: Lines, whole: bool, elements: Elements, device: DeviceFacts) -> Option<Plan> {
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

fn block(lines: Lines, whole: bool, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let count = BLOCK_COUNTS.of(lines.len, whole, elements)?;
    let threads = room(lines, whole, elements, SECTOR_BYTES).div_ceil(WARP * count) * WARP;
    // Of large blocks two run on a multiprocessor at once; fetched ahead are half as many lines. 1024 x 32768 bf16: 1.04, without
    // 1.06.
    let ahead = if elements.size == 2 && threads > MAX_REGISTER_BLOCK / 2 { device.multiprocessors } else { 0 };
    (threads <= MAX_REGISTER_BLOCK && lines.count() <= MAX_GRID)
        .then(|| Plan { parameter: ahead as i32, ..plan(Kernel::Block { count, whole }, lines.count(), threads) })
}

fn cluster(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
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
fn grid(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
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
    let whole = elements.input_alignment.min(elements.output_alignment).is_multiple_of(PACK_BYTES);
    whole || (lines.elem_count() >= 1 << 20 && (elements.size == 2 || lines.len < 6))
}

/// Lines of a few elements.
fn run(lines: Lines, elements: Elements) -> Option<Plan> {
    let alignment = elements.input_alignment.min(elements.output_alignment);
    // A thread's lines are as many as a pack has elements.
    let grid = lines.count().div_ceil(RUN_BLOCK * (PACK_BYTES / elements.size));
    let possible = lines.inner == 1 && (2..=RUN_ROW).contains(&lines.len) && grid <= MAX_GRID;
    let whole = alignment.is_multiple_of(PACK_BYTES) as i32;
    possible.then(|| Plan { parameter: whole, ..plan(Kernel::Run { len: lines.len }, grid, RUN_BLOCK) })
}

/// A few rows of lines side by side.
fn few_rows(lines: Lines, elements: Elements) -> Option<Plan> {
    let pack = PACK_BYTES / elements.size;
    let whole = lines.inner.is_multiple_of(pack)
        && elements.input_alignment.is_multiple_of(PACK_BYTES)
        && elements.output_alignment.is_multiple_of(PACK_BYTES);
    let columns = match elements.size {
        _ if whole => pack,
        2 => 2,
        _ => 1,
    };
    let across = lines.inner.div_ceil(columns);
    let threads = across.saturating_mul(lines.outer);
    let possible = lines.inner > 1 && lines.len <= FEW_ROWS && threads <= MAX_GRID;
    let rows = if lines.len <= FEW_ROWS / 2 { FEW_ROWS / 2 } else { FEW_ROWS };
    possible.then(|| Plan {
        parameter: across as i32,
        ..plan(Kernel::FewRows { columns, rows, whole }, threads.div_ceil(FEW_ROWS_BLOCK), FEW_ROWS_BLOCK)
    })
}

/// How lines side by side lie in units: words of 4 bytes, or elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct NarrowUnits {
    /// Elements of a unit.
    pub size: usize,
    /// The units after which the columns are the same again, or a warp's if a row is longer.
    pub across: usize,
    /// Whether it is longer.
    pub strips: bool,
}

/// `whole`: units are words.
pub(super) fn narrow_units(lines: Lines, whole: bool, element_size: usize) -> NarrowUnits {
    let size = if whole && element_size == 2 { 2 } else { 1 };
    // A row that ends in the middle of a word has another one in it.
    let units = if lines.inner.is_multiple_of(size) { lines.inner / size } else { lines.inner };
    NarrowUnits { size, across: units.min(WARP), strips: units > WARP }
}

/// Whether the tensors and each run of so many elements begin with a whole word; of others than half precision they do.
fn in_words(elements: Elements, run: usize) -> bool {
    let alignment = elements.input_alignment.min(elements.output_alignment);
    elements.size > 2 || (run.is_multiple_of(2) && alignment.is_multiple_of(4))
}

fn narrow_is_best(lines: Lines, elements: Elements, device: DeviceFacts) -> bool {
    let row = lines.inner.saturating_mul(elements.size);
    let packs = row.is_multiple_of(PACK_BYTES) && elements.input_alignment.is_multiple_of(PACK_BYTES);
    let is_narrow = match packs {
        true => row <= NARROWEST_ROW,
        false => row < NARROW_ROW || (elements.size == 2 && lines.len > NARROW_ROW),
    };
    is_narrow && filling_narrow(lines, elements, device).is_some()
}

/// Narrow rows, unless they are wide enough for other kernels and too few to fill the GPU.
fn filling_narrow(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let fills = |plan: &Plan| is_narrowest(lines, elements) || plan.grid.0 as usize >= device.multiprocessors;
    narrow(lines, elements).filter(fills)
}

/// Whether rows are so narrow that kernels for wide ones leave most threads idle.
fn is_narrowest(lines: Lines, elements: Elements) -> bool {
    lines.inner > 1 && lines.inner.saturating_mul(elements.size) < NARROWEST_ROW
}

/// Narrow rows of lines side by side.
fn narrow(lines: Lines, elements: Elements) -> Option<Plan> {
    let all = lines.len.checked_mul(lines.inner).filter(|&all| lines.inner > 1 && all <= MAX_REGISTER_LINE)?;
    let whole = in_words(elements, all);
    let NarrowUnits { size, across, strips } = narrow_units(lines, whole, elements.size);
    let units = all / size;
    // What some lanes, of which those that are over have nothing to do, have room for
    let room = |lanes: usize| lanes / across * across * if lanes < 8 { NARROW_FEW_UNITS } else { NARROW_UNITS };
    let kernel = Kernel::Narrow { whole };
    let least = if units > NARROW_UNITS { 2 } else { 0 };
    let share = (least..=5).find(|&shift| room(1 << shift) >= units).map(|shift| {
        let grid = lines.outer.div_ceil(NARROW_BLOCK >> shift);
        Plan { parameter: shift, ..plan(kernel, grid.min(MAX_GRID + 1), NARROW_BLOCK) }
    });
    let alone = || {
        let warps = units.div_ceil(room(WARP));
        let states = (warps + 1) * across * size;
        let shared_bytes = (states * 2 * elements.size.max(4)) as u32;
        let most = if elements.size == 8 { NARROW_WARPS / 2 } else { NARROW_WARPS };
        let plan = plan(kernel, lines.outer.min(MAX_GRID + 1), warps * WARP);
        (warps <= most).then_some(Plan { parameter: NARROW_ALONE, shared_bytes, ..plan })
    };
    if strips {
        return None;
    }
    share.or_else(alone).filter(|plan| plan.grid.0 as usize <= MAX_GRID)
}

/// Long lines side by side.
fn split_columns(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let whole = in_words(elements, lines.inner) || (in_words(elements, lines.len) && lines.inner <= WARP);
    let NarrowUnits { size, across, strips } = narrow_units(lines, whole, elements.size);
    let strips = if strips { lines.inner.div_ceil(size * across) } else { 1 };
    let blocks = SPLIT_COLUMNS_EACH * device.multiprocessors;
    let states = 2 * elements.size.max(4);
    let balanced = (lines.len * elements.size / (SPLIT_COLUMNS_RATIO * states)).isqrt();
    let bytes = lines.len.saturating_mul(lines.inner.min(size * across)).saturating_mul(elements.size);
    let most = balanced.min(bytes / SPLIT_COLUMNS_BYTES);
    let parts = blocks.div_ceil(strips.saturating_mul(lines.outer)).min(most).max(1);
    // Of whole words, however many elements a row has
    let rows = lines.len.div_ceil(parts).next_multiple_of(2);
    let parts = lines.len.div_ceil(rows);
    let possible = lines.inner > 1
        && lines.len <= MAX_REGISTER_LINE
        && lines.inner <= MAX_REGISTER_LINE
        && rows.saturating_mul(lines.inner.min(WARP * size)) <= MAX_REGISTER_LINE
        && lines.outer <= u16::MAX as usize
        && parts * strips <= MAX_GRID;
    possible.then(|| Plan {
        parameter: rows as i32,
        ..plan_across(Kernel::SplitColumnsApply { whole }, (parts * strips, lines.outer), SPLIT_COLUMNS_BLOCK)
    })
}

/// Columns of a thread and rows, as `kernels/column_softmax.cu` and `column_any_softmax.cu` have them.
fn column_tile(whole: bool, len: usize, elements: Elements) -> (usize, usize) {
    match (whole, elements.size) {
        (true, 8) => (2, 16),
        (_, 2) if len <= SHORT_PACKS => (2, 16),
        (true, _) => (4, 16),
        (false, 8) => (1, 16),
        (false, 2) => (2, 32),
        (false, _) if len <= HALF_ROWS => (1, 16),
        (false, _) => (1, 32),
    }
}

fn column(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let (pack, _) = column_tile(true, lines.len, elements);
    let bytes = pack * elements.size;
    let packs = lines.inner.is_multiple_of(pack)
        && elements.input_alignment.is_multiple_of(bytes)
        && elements.output_alignment.is_multiple_of(bytes);
    // Single elements keep more blocks busy where lines are short: 1.26, packs 1.49 at (16, 64, 56, 56) dim 1 f32.
    let whole = packs && (lines.len > SHORT_PACKS || elements.size == 2);
    let (columns, rows) = column_tile(whole, lines.len, elements);
    let down = lines.len.div_ceil(rows);
    let largest = largest_cluster(device);
    // Threads side by side, and blocks of a cluster. Packs: (8, 4096, 4096) dim 1 f32 with eight and clusters of eight 1.26, four
    // and clusters of four 1.25; (64, 1000, 128) dim 1 bf16 in clusters of two 1.63, in one block 1.82; (16, 64, 56, 56) dim
    // 1 bf16 with sixteen 1.36, eight 1.43.
    let short_halves = elements.size == 2 && lines.len <= SHORT_PACKS;
    let (widest, one_block) = match (whole, short_halves) {
        (_, true) => (32, 128),
        (true, false) => (16, 64),
        (false, false) => (32, 64),
    };
    let (across, blocks) = if down * widest <= one_block {
        (widest, 1)
    } else if largest == 1 && whole && elements.size == 2 && down * 8 <= WIDE_COLUMN_BLOCK {
        (8, 1)
    } else {
        let widths: &[usize] = match whole {
            true => &[8, 4, 2, 1],
            false if down * 32 <= 4 * COLUMN_BLOCK => &[32, 16, 8, 4, 2, 1],
            false => &[16, 8, 4, 2, 1],
        };
        let blocks = |across: usize| (down * across).div_ceil(COLUMN_BLOCK).next_power_of_two();
        // No less than a sector of memory side by side
        let side_by_side = widths.iter().filter(|&&across| across * columns * elements.size >= 32);
        side_by_side.map(|&across| (across, blocks(across))).find(|&(_, blocks)| blocks <= largest)?
    };
    let threads = (down.div_ceil(blocks) * across).next_multiple_of(WARP);
    let strips = lines.inner.div_ceil(columns * across).checked_mul(lines.outer)?;
    // Of the parts of every warp, every block and the whole
    let states = (threads / WARP + blocks + 1) * across * columns;
    let possible = lines.inner > 1
        && lines.len <= MAX_REGISTER_LINE
        && lines.inner <= MAX_REGISTER_LINE
        && strips <= MAX_GRID / blocks;
    possible.then(|| Plan {
        cluster: blocks as u32,
        shared_bytes: (states * 2 * elements.size.max(4)) as u32,
        parameter: across.ilog2() as i32,
        ..plan(Kernel::Column { columns, rows, whole }, strips * blocks, threads)
    })
}

/// How many clusters run at once here, given how many do on [`COUNTED_MULTIPROCESSORS`].
fn clusters_here(counted: usize, device: DeviceFacts) -> usize {
    counted * device.multiprocessors / COUNTED_MULTIPROCESSORS
}

/// Strips of half precision that multiprocessors hold all at once, as many to a strip as there are, or several of a few rows to each.
fn resident(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let row = lines.inner * elements.size;
    let side_by_side = lines.inner.div_ceil(RESIDENT_COLUMNS);
    let strips = side_by_side.saturating_mul(lines.outer);
    let possible = device.compute_capability >= 90
        && lines.inner > 1
        && elements.size == 2
        && row.is_multiple_of(PACK_BYTES)
        && elements.input_alignment.is_multiple_of(PACK_BYTES)
        && elements.output_alignment.is_multiple_of(2 * elements.size)
        && lines.len <= MAX_REGISTER_LINE
        && lines.inner <= MAX_REGISTER_LINE
        && strips <= RESIDENT_EACH * device.multiprocessors;
    if !possible {
        return None;
    }
    let largest = largest_cluster(device);
    let has_room = |&(blocks, at_once): &(usize, usize)| {
        blocks <= largest && lines.len >= blocks * RESIDENT_BOX && strips <= clusters_here(at_once, device)
    };
    let blocks = RESIDENT_CLUSTERS.into_iter().find(has_room).map_or(1, |(blocks, _)| blocks);
    let rows = lines.len.div_ceil(blocks);
    let boxes = rows.div_ceil(RESIDENT_BOX);
    if boxes > RESIDENT_SLOTS + RESIDENT_HELD {
        return None;
    }
    let held = if boxes > RESIDENT_SLOTS { RESIDENT_HELD } else { 0 };
    // The boxes, states of every warp, the whole and twice every block, and barriers for each box and merge
    let states = (RESIDENT_BLOCK / WARP + 1 + 2 * blocks) * RESIDENT_COLUMNS;
    let box_bytes = RESIDENT_BOX * RESIDENT_COLUMNS * elements.size;
    let needed = boxes.min(RESIDENT_SLOTS) * box_bytes + states * 8 + (boxes + RESIDENT_MERGES) * 8;
    // More blocks would go to one multiprocessor while others have none: (64, 512, 128) dim 1 bf16 9.6 us, so 5.1.
    let shared = device.shared_bytes + SYSTEM_SHARED;
    let each = (strips * blocks).div_ceil(device.multiprocessors);
    let alone = (shared / (each + 1)).saturating_sub(SYSTEM_SHARED) + 1;
    let shared_bytes = needed.max(alone.next_multiple_of(PACK_BYTES));
    (each * (shared_bytes + SYSTEM_SHARED) <= shared).then(|| Plan {
        cluster: blocks as u32,
        shared_bytes: shared_bytes as u32,
        parameter: rows as i32,
        // (4096, 4096) dim 0 bf16 19.6 us, otherwise 20.1; (64, 1700, 128) 13.9 and so 16.2
        streams: 2 * lines.elem_count() * elements.size > device.l2_bytes,
        ..plan_across(Kernel::Resident { held }, (side_by_side * blocks, lines.outer), RESIDENT_BLOCK)
    })
}

/// Strips that are fetched ahead.
fn strip(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let row = lines.inner * elements.size;
    let possible = device.compute_capability >= 90
        && lines.inner > 1
        && elements.size < 8
        && row.is_multiple_of(PACK_BYTES)
        && elements.output_alignment.is_multiple_of(8)
        && lines.len <= MAX_REGISTER_LINE
        && lines.inner <= MAX_REGISTER_LINE
        // What a description of a tensor has room for
        && lines.outer < MAX_GRID
        && lines.len.saturating_mul(row) < 1 << 40;
    if !possible {
        return None;
    }
    let of = |strips| strip_of(strips, lines, elements, device);
    let (rounds, plan) = if elements.input_alignment.is_multiple_of(PACK_BYTES) {
        // A round of wide strips takes less: (8, 4096, 4096) dim 1 37 rounds 1.07 / 1.22, of narrow ones 35 1.17 / 1.24; (64, 1000,
        // 128) dim 1 f32 three 1.20, narrow two 1.06. But of few: (4096, 4096) dim 0 f32 five 1.20, narrow five 1.16; half
        // precision three 1.40, narrow three 1.29.
        match (of(Strips::Narrow), of(Strips::Wide)) {
            (Some(narrow), Some(wide)) => {
                let wide_is_best = if narrow.0 <= 5 { wide.0 < narrow.0 } else { 15 * wide.0 <= 16 * narrow.0 };
                if wide_is_best {
                    wide
                } else {
                    narrow
                }
            }
            (narrow, wide) => narrow.or(wide)?,
        }
    } else {
        of(Strips::Any)?
    };
    // In a single round nothing is fetched ahead: (64, 1000, 128) dim 1 bf16 1.89, with the strips of `column` 1.84; but at an
    // offset of one element 2.15, and with theirs 3.2.
    let odd = elements.size == 2 && !elements.input_alignment.is_multiple_of(4);
    (rounds > 1 || odd || device.forced == Some(Family::Strip)).then_some(plan)
}

/// The rounds that it takes, too.
fn strip_of(strips: Strips, lines: Lines, elements: Elements, device: DeviceFacts) -> Option<(usize, Plan)> {
    let (bytes, most_rows) = (strips.bytes(elements.size), strips.most_rows(elements.size));
    let largest = largest_cluster(device);
    let count = strips.count(lines, elements.size);
    let rows = |blocks: usize| {
        let boxes = lines.len.div_ceil(blocks).div_ceil(MAX_BOX_ROWS);
        lines.len.div_ceil(blocks * boxes).next_multiple_of(BOX_ROWS) * boxes
    };
    let at_once = |blocks: usize| clusters_here(STRIP_CLUSTERS[blocks - 1], device);
    // Threads work as long on a few rows as on all that they have room for.
    let fits = lines.inner * elements.size >= bytes && 2 * lines.len >= most_rows;
    let rounds = |&blocks: &usize| count.div_ceil(at_once(blocks).max(1));
    // Of as many rounds the fewest blocks: (4096, 4096) dim 0 bf16 in three of clusters of eight 22.2 us, of nine 28.3.
    let enough = (1..=largest).filter(|&blocks| rows(blocks) <= most_rows);
    let blocks = enough.min_by_key(rounds).filter(|_| fits && count < MAX_GRID / WIDE_CLUSTER)?;
    let columns = bytes / elements.size;
    let states = (STRIP_BLOCK / WARP + 2 * blocks + 1) * columns;
    let plan = Plan {
        cluster: blocks as u32,
        // Three barriers behind
        shared_bytes: (most_rows * strips.copied_bytes(elements.size) + states * 8 + 3 * 8) as u32,
        parameter: rows(blocks) as i32,
        ..plan(Kernel::Strip(strips), at_once(blocks).clamp(1, count) * blocks, STRIP_BLOCK)
    };
    Some((rounds(&blocks), plan))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURING: DeviceFacts = DeviceFacts {
        compute_capability: 75,
        multiprocessors: 72,
        shared_bytes: 64 << 10,
        l2_bytes: 6 << 20,
        forced: None,
    };
    const HOPPER: DeviceFacts = DeviceFacts {
        compute_capability: 90,
        multiprocessors: 132,
        shared_bytes: 227 << 10,
        l2_bytes: 60 << 20,
        forced: None,
    };
    const F32: Elements = Elements { size: 4, input_alignment: 128, output_alignment: 128 };
    const BF16: Elements = Elements { size: 2, ..F32 };

    fn lines(outer: usize, len: usize, inner: usize) -> Lines {
        Lines { outer, len, inner }
    }

    fn softmax(lines: Lines, schedule: Option<Schedule>, elements: Elements, device: DeviceFacts) -> Plan {
        super::softmax(lines, schedule, Output::Probability, elements, device)
    }

    #[test]
    fn chosen_kernels() {
        let warp = |count| Kernel::Warp { count, whole: true };
        let tile = |words| Kernel::Tile { words };
        let any_block = |count| Kernel::Block { count, whole: false };
        let block = |count| Kernel::Block { count, whole: true };
        let cluster = |count| Kernel::Cluster { count, whole: true };
        let column = |columns, rows, whole| Kernel::Column { columns, rows, whole };
        let resident = |held| Kernel::Resident { held };
        let few_rows = |columns, rows, whole| Kernel::FewRows { columns, rows, whole };
        let narrow_rows = |whole| Kernel::Narrow { whole };
        let split_columns = |whole| Kernel::SplitColumnsApply { whole };
        let [narrow, wide] = [Strips::Narrow, Strips::Wide].map(Kernel::Strip);
        let [split, any_split] = [true, false].map(|whole| Kernel::SplitApply { whole });
        let cases = [
            (lines(2_097_152, 16, 1), F32, warp(8), warp(8)),
            (lines(131_072, 32, 1), BF16, warp(16), warp(16)),
            (lines(1_048_576, 128, 1), F32, warp(8), warp(8)),
            (lines(512, 512, 1), F32, warp(16), warp(16)),
            (lines(65_536, 1024, 1), F32, block(16), block(16)),
            (lines(8192, 4096, 1), F32, block(64), block(64)),
            (lines(4096, 8192, 1), F32, block(64), block(64)),
            (lines(8191, 4097, 1), F32, any_block(64), any_block(64)),
            (lines(1024, 32_768, 1), F32, cluster(64), Kernel::Reduce),
            (lines(1024, 32_768, 1), BF16, block(64), block(64)),
            (lines(4096, 128_256, 1), BF16, cluster(128), Kernel::Reduce),
            (lines(64, 151_936, 1), BF16, Kernel::Shared { aligned: true }, split),
            (lines(66, 32_768, 1), BF16, Kernel::Shared { aligned: true }, block(64)),
            (lines(67, 128_256, 1), BF16, cluster(64), split),
            (lines(59, 128_256, 1), BF16, cluster(64), split),
            (lines(64, 128_257, 1), BF16, Kernel::Cluster { count: 64, whole: false }, any_split),
            (lines(64, 202_048, 1), BF16, Kernel::Shared { aligned: true }, split),
            (lines(64, 202_047, 1), BF16, Kernel::Grid, any_split),
            (lines(64, 202_048, 1), F32, cluster(64), split),
            (lines(40, 202_048, 1), BF16, cluster(64), split),
            (lines(1, 151_936, 1), F32, cluster(64), split),
            (lines(1, 1 << 24, 1), F32, split, split),
            (lines(1, 1 << 24, 1), BF16, Kernel::Grid, split),
            (lines(1, (1 << 24) + 1, 1), BF16, Kernel::Grid, any_split),
            (lines(2, (1 << 23) + 1, 1), BF16, Kernel::Grid, any_split),
            (lines(1, (1 << 22) + 1, 1), BF16, any_split, any_split),
            (lines(1, (1 << 25) + 1, 1), BF16, any_split, any_split),
            (lines(1 << 20, (1 << 30) + 1, 1), F32, Kernel::Reduce, Kernel::Reduce),
            // Short lines that are not whole packs, or would fill few of a warp's threads
            (lines(1 << 20, 9, 1), BF16, tile(9), tile(9)),
            (lines(1 << 20, 9, 1), F32, tile(33), tile(33)),
            (lines(1 << 20, 7, 1), BF16, Kernel::Run { len: 7 }, Kernel::Run { len: 7 }),
            (lines(1 << 20, 2, 1), F32, Kernel::Run { len: 2 }, Kernel::Run { len: 2 }),
            (lines(1 << 20, 4, 1), F32, warp(8), warp(8)),
            (lines(1 << 20, 8, 1), BF16, warp(8), warp(8)),
            (lines(1 << 20, 33, 1), BF16, tile(17), tile(17)),
            (lines(1 << 20, 33, 1), F32, tile(33), tile(33)),
            (lines(1 << 20, 77, 1), BF16, tile(33), tile(17)),
            (lines(1 << 20, 127, 1), BF16, tile(17), tile(17)),
            (lines(9216, 127, 1), BF16, tile(17), tile(17)),
            (lines(512, 127, 1), BF16, tile(9), tile(9)),
            (lines(512, 577, 1), BF16, tile(17), tile(17)),
            (lines(1 << 20, 136, 1), BF16, tile(33), warp(16)),
            (lines(512, 136, 1), BF16, warp(16), warp(16)),
            (lines(1 << 20, 128, 1), BF16, warp(16), warp(16)),
            (lines(1 << 16, 776, 1), BF16, tile(33), block(16)),
            (lines(1 << 16, 776, 1), F32, block(16), block(16)),
            (lines(1 << 16, 2047, 1), BF16, tile(33), any_block(32)),
            (lines(1 << 16, 2049, 1), BF16, any_block(32), any_block(32)),
            (lines(1 << 16, 701, 1), F32, tile(33), tile(33)),
            (lines(1 << 16, 777, 1), F32, any_block(16), any_block(16)),
            (lines(8, 4096, 4096), F32, wide, split_columns(true)),
            (lines(1, 4096, 4096), BF16, resident(8), split_columns(true)),
            (lines(1, 4096, 4104), BF16, resident(8), split_columns(true)),
            (lines(1, 16_384, 512), BF16, resident(8), split_columns(true)),
            (lines(1, 4225, 4096), BF16, narrow, split_columns(true)),
            (lines(1, 4096, 3000), BF16, resident(8), split_columns(true)),
            (lines(1, 3200, 4096), BF16, resident(0), split_columns(true)),
            (lines(2, 2048, 4096), BF16, resident(8), split_columns(true)),
            (lines(1, 4096, 4096), F32, narrow, split_columns(true)),
            (lines(64, 1000, 128), F32, narrow, column(4, 16, true)),
            (lines(64, 1000, 128), BF16, resident(0), column(4, 16, true)),
            (lines(132, 512, 128), BF16, resident(0), column(4, 16, true)),
            (lines(75, 1000, 128), BF16, narrow, column(4, 16, true)),
            (lines(64, 127, 128), BF16, column(4, 16, true), column(4, 16, true)),
            (lines(32, 1000, 128), BF16, resident(0), column(4, 16, true)),
            (lines(1, 1000, 128), BF16, resident(0), column(4, 16, true)),
            (lines(64, 1000, 127), BF16, column(2, 32, false), column(2, 32, false)),
            (lines(16, 64, 3136), F32, column(1, 16, false), column(1, 16, false)),
            (lines(16, 64, 3136), BF16, column(2, 16, true), column(2, 16, true)),
            (lines(16, 64, 3135), BF16, column(2, 16, false), column(2, 16, false)),
            // Few rows, narrow ones, and long lines
            (lines(1 << 10, 8, 4096), F32, few_rows(4, 8, true), few_rows(4, 8, true)),
            (lines(1 << 10, 3, 4096), BF16, few_rows(8, 4, true), few_rows(8, 4, true)),
            (lines(1 << 10, 3, 4095), BF16, few_rows(2, 4, false), few_rows(2, 4, false)),
            (lines(1 << 10, 9, 4096), BF16, column(2, 16, true), column(2, 16, true)),
            (lines(1 << 15, 128, 2), BF16, narrow_rows(true), narrow_rows(true)),
            (lines(1 << 15, 33, 3), BF16, narrow_rows(false), narrow_rows(false)),
            (lines(1 << 15, 33, 3), F32, narrow_rows(true), narrow_rows(true)),
            (lines(1 << 15, 3, 3), BF16, narrow_rows(false), narrow_rows(false)),
            (lines(1 << 10, 128, 50), BF16, narrow_rows(true), narrow_rows(true)),
            (lines(1 << 10, 500, 16), BF16, narrow_rows(true), narrow_rows(true)),
            (lines(4, 500, 16), BF16, resident(0), column(4, 16, true)),
            (lines(4, 500, 8), BF16, narrow_rows(true), narrow_rows(true)),
            (lines(1, 10_000_000, 2), F32, split_columns(true), split_columns(true)),
            (lines(1, 10_000_001, 3), BF16, split_columns(false), split_columns(false)),
            (lines(40, 10_000, 8), BF16, column(4, 16, true), split_columns(true)),
            (lines(1 << 10, 256, 24), BF16, column(4, 16, true), column(4, 16, true)),
            (lines(10, 100_000, 64), BF16, split_columns(true), split_columns(true)),
            (lines(10, 100_000, 127), BF16, split_columns(false), split_columns(false)),
        ];
        for (lines, elements, hopper, turing) in cases {
            assert_eq!(softmax(lines, None, elements, HOPPER).kernel, hopper, "{lines:?} {elements:?}");
            assert_eq!(softmax(lines, None, elements, TURING).kernel, turing, "{lines:?} {elements:?}");
        }
    }

    #[test]
    fn lines_that_a_grid_holds() {
        let grid = |outer, len, elements| grid(lines(outer, len, 1), elements, HOPPER);
        let of = |plan: Option<Plan>| plan.map(|plan| (plan.grid.0, plan.cluster));
        assert_eq!(of(grid(1, 1 << 24, BF16)), Some((132, 1)));
        assert_eq!(of(grid(1, 17_301_488, BF16)), Some((132, 1)));
        assert_eq!(of(grid(1, 17_301_489, BF16)), None);
        assert_eq!(of(grid(64, 151_936, BF16)), Some((128, 2)));
        assert_eq!(of(grid(3, 1 << 20, F32)), Some((132, 1)));
        assert_eq!(of(grid(132, 60_000, F32)), Some((132, 1)));
        assert_eq!(of(grid(133, 60_000, F32)), None);
        // Every block has a chunk for each of its groups.
        assert_eq!(of(grid(1, 100_000, BF16)), Some((7, 1)));
        assert!(super::grid(lines(1, 1 << 20, 1), F32, DeviceFacts { shared_bytes: 99 << 10, ..HOPPER }).is_none());
    }

    #[test]
    fn logarithms_of_a_vocabulary() {
        let kernel = |output, len| super::softmax(lines(64, len, 1), None, output, BF16, HOPPER).kernel;
        for (len, log) in
            [(128_256, Kernel::Cluster { count: 64, whole: true }), (151_936, Kernel::Shared { aligned: true })]
        {
            assert_eq!(kernel(Output::Probability, len), Kernel::Shared { aligned: true });
            assert_eq!(kernel(Output::LogProbability, len), log);
        }
    }

    #[test]
    fn lines_that_fill_a_gpu_once() {
        let input = Elements { input_alignment: 2, ..BF16 };
        let block = |outer, len, elements, device| softmax(lines(outer, len, 1), None, elements, device).block;
        assert_eq!(block(131_072, 32, input, HOPPER), 512);
        assert_eq!(block(135_168, 32, input, HOPPER), 512);
        assert_eq!(block(16_384, 256, input, HOPPER), 512);
        assert_eq!(block(135_169, 32, input, HOPPER), 128);
        assert_eq!(block(98_304, 32, input, HOPPER), 128);
        assert_eq!(block(131_072, 32, BF16, HOPPER), 128);
        assert_eq!(block(131_072, 32, Elements { input_alignment: 4, ..F32 }, HOPPER), 128);
        assert_eq!(block(71_680, 32, input, TURING), 128);
    }

    #[test]
    fn blocks_of_a_cluster() {
        let of = |outer, len, inner, elements| {
            let plan = softmax(lines(outer, len, inner), None, elements, HOPPER);
            (plan.cluster, plan.block, plan.parameter)
        };
        assert_eq!(of(64, 151_936, 1, BF16), (2, 640, 0));
        assert_eq!(of(68, 151_936, 1, BF16), (16, 160, 12));
        assert_eq!(of(58, 128_256, 1, BF16), (16, 128, 0));
        assert_eq!(of(58, 100_352, 1, BF16), (8, 224, 0));
        assert_eq!(of(64, 151_936, 1, F32), (8, 320, 8));
        assert_eq!(of(1, 151_936, 1, F32), (16, 160, 0));
        assert_eq!(of(64, 1000, 128, BF16), (1, 512, 1000));
        assert_eq!(of(32, 1000, 128, BF16), (2, 512, 500));
        assert_eq!(of(15, 1000, 128, BF16), (4, 512, 250));
        assert_eq!(of(1, 1000, 128, BF16), (8, 512, 125));
        assert_eq!(of(1, 16_384, 512, BF16), (8, 512, 2048));
        assert_eq!(of(64, 1000, 124, BF16), (2, 256, 3));
    }

    #[test]
    fn an_offset_or_an_unaligned_output() {
        let rows = lines(1000, 1024, 1);
        for unaligned in [Elements { input_alignment: 4, ..F32 }, Elements { output_alignment: 4, ..F32 }] {
            let plan = softmax(rows, None, unaligned, HOPPER);
            assert_eq!(plan.kernel, Kernel::Block { count: 16, whole: false });
            // A line that does not begin where a warp's accesses do may need room for one access more.
            assert_eq!(plan.block, if unaligned.output_alignment == 4 { 96 } else { 64 });
            let column = Kernel::Column { columns: 1, rows: 16, whole: false };
            assert_eq!(softmax(lines(9, 99, 64), None, unaligned, HOPPER).kernel, column);
        }
        let columns = lines(8, 4096, 4096);
        let input = Elements { input_alignment: 2, ..BF16 };
        assert_eq!(softmax(lines(1, 1 << 24, 1), None, input, HOPPER).kernel, Kernel::Grid);
        assert_eq!(softmax(columns, None, input, HOPPER).kernel, Kernel::Strip(Strips::Any));
        assert_eq!(softmax(lines(64, 1000, 128), None, input, HOPPER).kernel, Kernel::Strip(Strips::Any));
        let output = Elements { output_alignment: 4, ..BF16 };
        assert_eq!(
            softmax(columns, None, output, HOPPER).kernel,
            Kernel::Column { columns: 2, rows: 32, whole: false }
        );
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

    #[test]
    fn backward_plans_cover_the_lines() {
        let plan_of = |lines, whole, size, device| {
            let alignment = if whole { 16 } else { size };
            let elements = Elements { size, input_alignment: alignment, output_alignment: alignment };
            softmax_backward(lines, elements, device)
        };
        let kernel = |lines, whole, size, device| plan_of(lines, whole, size, device).kernel;
        assert_eq!(kernel(lines(9, 512, 1), true, 4, TURING), Kernel::BackwardWarp { count: 16 });
        assert_eq!(kernel(lines(9, 4096, 1), true, 4, TURING), Kernel::BackwardBlock { count: 16 });
        assert_eq!(kernel(lines(9, 32_768, 1), true, 4, TURING), Kernel::BackwardGroup);
        assert_eq!(kernel(lines(9, 32_768, 1), true, 4, HOPPER), Kernel::BackwardCluster { count: 32 });
        assert_eq!(kernel(lines(9, 128_256, 1), true, 2, HOPPER), Kernel::BackwardCluster { count: 64 });
        assert_eq!(kernel(lines(9, 4096, 1), false, 2, HOPPER), Kernel::BackwardGroup);
        assert_eq!(kernel(lines(9, 77, 1), false, 2, HOPPER), Kernel::BackwardGroup);
        for device in [TURING, HOPPER] {
            assert_eq!(kernel(lines(9, 77, 1), true, 2, device), Kernel::BackwardTile { words: 17 });
            assert_eq!(kernel(lines(9, 77, 1), true, 4, device), Kernel::BackwardTile { words: 17 });
            assert_eq!(kernel(lines(9, 77, 1), true, 8, device), Kernel::BackwardGroup);
            assert_eq!(kernel(lines(9, 577, 1), true, 4, device), Kernel::BackwardGroup);
            assert_eq!(kernel(lines(9, 1025, 1), true, 2, device), Kernel::BackwardTile { words: 17 });
            assert_eq!(kernel(lines(9, 1027, 1), true, 2, device), Kernel::BackwardGroup);
        }
        assert_eq!(kernel(lines(9, 4096, 4096), false, 2, HOPPER), Kernel::BackwardGroup);
        assert_eq!(kernel(lines(1 << 15, 128, 2), true, 2, HOPPER), Kernel::BackwardNarrow { whole: true });
        assert_eq!(kernel(lines(1 << 15, 33, 3), false, 2, TURING), Kernel::BackwardNarrow { whole: false });
        assert_eq!(kernel(lines(10, 100_000, 64), true, 2, HOPPER), Kernel::BackwardSplitColumns { whole: true });
        assert_eq!(kernel(lines(1, 10_000_001, 3), true, 2, HOPPER), Kernel::BackwardSplitColumns { whole: false });
        for (len, outer) in [1, 7, 8, 33, 64, 127, 511, 1000, 1001, 4096, 8192, 16_384, 128_256, 1 << 20, 1 << 24]
            .into_iter()
            .flat_map(|len| [1, 7, 1 << 20, 1 << 33].map(|outer| (len, outer)))
        {
            for size in [2, 4, 8] {
                let lines = lines(outer, len, 1);
                let plan = plan_of(lines, true, size, HOPPER);
                let what = format!("{lines:?} {plan:?}");
                let (grid, block, cluster) = (plan.grid.0 as usize, plan.block as usize, plan.cluster as usize);
                assert!((1..=MAX_GRID).contains(&grid) && block.is_multiple_of(WARP), "{what}");
                match plan.kernel {
                    Kernel::BackwardTile { words } => {
                        assert!((words - 1) << plan.parameter >= len * size / 4 && plan.parameter <= 5, "{what}");
                        assert!(grid * (block >> plan.parameter) >= outer && block == 128 && size < 8, "{what}");
                        let tile = (block >> plan.parameter) * len * size + 128 + 16;
                        assert!(plan.shared_bytes as usize >= 2 * tile && plan.shared_bytes <= 48 << 10, "{what}");
                    }
                    Kernel::BackwardWarp { count } => {
                        assert!(count << plan.parameter >= len && plan.parameter <= 5, "{what}");
                        assert!(grid * (block >> plan.parameter) >= outer && block == 128, "{what}");
                    }
                    Kernel::BackwardBlock { count } => {
                        assert!(count * block >= len && block <= 512 && grid == outer, "{what}");
                    }
                    Kernel::BackwardCluster { count } => {
                        assert!(count * block * cluster >= len && block <= 512 && grid == outer * cluster, "{what}");
                        assert!(cluster > 1, "{what}");
                    }
                    Kernel::BackwardGroup => check_group(lines, plan),
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn fused_plans_cover_the_lines() {
        let device = |forced| DeviceFacts { forced, ..HOPPER };
        let packs = FusedKind {
            backward: false,
            whole: true,
            queries: 0,
            scores: false,
            capped: false,
            scale_alone: false,
            masked_alike: 0,
            tiles: true,
            narrow: true,
        };
        let any = FusedKind { whole: false, ..packs };
        let alone = FusedKind { scale_alone: true, ..any };
        let scores = FusedKind { scores: true, ..packs };
        let gradients = FusedKind { backward: true, ..scores };
        let capped = FusedKind { capped: true, ..any };
        let masked = FusedKind { scores: true, masked_alike: 1, ..any };
        let padded = FusedKind { masked_alike: 1000, ..masked };
        let gradients_of_any = Kernel::FusedTile { backward: true, held: Held::Logits };
        let scores_of_gradients = Kernel::FusedTile { backward: true, held: Held::Scores };
        let (backward, of) = (false, FusedLines::Packs);
        for (lines, kind, device, kernel) in [
            (lines(1 << 20, 512, 1), packs, HOPPER, Kernel::FusedWarp { backward, lines: of }),
            (lines(1 << 20, 2048, 1), packs, HOPPER, Kernel::FusedBlock { backward, lines: of }),
            (
                lines(1 << 20, 2048, 1),
                FusedKind { queries: 2048, ..packs },
                HOPPER,
                Kernel::FusedBlock { backward, lines: FusedLines::Window },
            ),
            (lines(64, 2048, 1), scores, HOPPER, Kernel::FusedBlock { backward, lines: FusedLines::Scores }),
            (lines(64, 1024, 1), gradients, HOPPER, Kernel::FusedWarp { backward: true, lines: FusedLines::Scores }),
            (lines(64, 8192, 1), gradients, HOPPER, Kernel::FusedBlock { backward: true, lines: FusedLines::Scores }),
            (lines(64, 2048, 1), gradients, TURING, Kernel::FusedBlock { backward: true, lines: of }),
            (
                lines(64, 2048, 1),
                FusedKind { queries: 64, ..scores },
                HOPPER,
                Kernel::FusedWarp { backward, lines: FusedLines::ScoresWindow },
            ),
            (
                lines(64, 16_384, 1),
                FusedKind { queries: 64, ..scores },
                HOPPER,
                Kernel::FusedBlock { backward, lines: FusedLines::ScoresWindow },
            ),
            (lines(64, 2048, 1), scores, TURING, Kernel::FusedBlock { backward, lines: of }),
            (lines(64, 1024, 1), scores, HOPPER, Kernel::FusedWarp { backward, lines: of }),
            (lines(64, 8200, 1), packs, HOPPER, Kernel::FusedCluster),
            (lines(64, 8200, 1), packs, TURING, Kernel::FusedRows { backward, scores: false }),
            (lines(64, 2000, 1), any, TURING, Kernel::FusedTile { backward, held: Held::Logits }),
            (lines(64, 77, 1), any, HOPPER, Kernel::FusedTile { backward, held: Held::Logits }),
            (
                lines(64, 77, 1),
                FusedKind { tiles: false, ..any },
                HOPPER,
                Kernel::FusedRows { backward, scores: false },
            ),
            (
                lines(64, 77, 1),
                FusedKind { scores: true, ..any },
                HOPPER,
                Kernel::FusedTile { backward, held: Held::Scores },
            ),
            (
                lines(64, 77, 1),
                FusedKind { scores: true, ..any },
                TURING,
                Kernel::FusedTile { backward, held: Held::Logits },
            ),
            (lines(64, 257, 1), masked, HOPPER, Kernel::FusedTile { backward, held: Held::Logits }),
            (lines(64, 333, 1), masked, HOPPER, Kernel::FusedTile { backward, held: Held::Scores }),
            (lines(64, 257, 1), padded, HOPPER, Kernel::FusedTile { backward, held: Held::Scores }),
            (lines(64, 20_480, 1), any, HOPPER, Kernel::FusedTile { backward, held: Held::Logits }),
            (lines(64, 18_432, 1), capped, HOPPER, Kernel::FusedTile { backward, held: Held::CappedLogits }),
            (lines(64, 18_434, 1), capped, HOPPER, Kernel::FusedRows { backward, scores: false }),
            (lines(64, 20_483, 1), any, HOPPER, Kernel::FusedRows { backward, scores: false }),
            (lines(64, 77, 1), FusedKind { backward: true, ..any }, HOPPER, gradients_of_any),
            (
                lines(64, 12_301, 1),
                FusedKind { backward: true, ..any },
                HOPPER,
                Kernel::FusedRows { backward: true, scores: false },
            ),
            (lines(64, 8195, 1), FusedKind { backward: true, ..masked }, HOPPER, scores_of_gradients),
            (
                lines(1 << 20, 512, 1),
                FusedKind { narrow: false, ..packs },
                HOPPER,
                Kernel::FusedRows { backward, scores: false },
            ),
            (lines(64, 100, 64), any, HOPPER, Kernel::FusedGroup { backward, scores: false }),
            (lines(64, 100, 64), alone, HOPPER, Kernel::FusedGroup { backward, scores: true }),
            (lines(64, 50_257, 1), alone, TURING, Kernel::FusedRows { backward, scores: true }),
        ] {
            assert_eq!(fused(lines, kind, 2, device).kernel, kernel, "{lines:?} {kind:?}");
        }
        // Windows come whole matrices of queries ahead, as many as run at once, but no more than the cache holds.
        for (len, queries, size, ahead) in
            [(2048, 2048, 4, 2048), (2048, 2048, 2, 2048), (2048, 100, 2, 2100), (8192, 8192, 2, 0), (1024, 1, 4, 2640)]
        {
            let plan = fused(lines(1 << 18, len, 1), FusedKind { queries, ..packs }, size, HOPPER);
            assert_eq!(plan.kernel, Kernel::FusedBlock { backward, lines: FusedLines::Window });
            assert_eq!(plan.parameter, ahead, "{len} {queries} {size}");
        }
        let sizes = [1, 3, 31, 128, 129, 1000, 4096, 4097, 8193, 32_768, 100_003, 1 << 20, 1 << 33];
        let families = Family::ALL.map(|(_, family)| Some(family)).into_iter().chain([None]);
        let shapes = sizes.iter().flat_map(|&len| sizes.iter().map(move |&outer| (len, outer)));
        for (forced, (len, outer)) in families.flat_map(|forced| shapes.clone().map(move |shape| (forced, shape))) {
            for (inner, backward, whole, size) in [
                (1, false, true, 2),
                (1, true, true, 4),
                (1, true, false, 8),
                (1, true, false, 2),
                (1, false, true, 8),
                (1, false, false, 2),
                (1, false, false, 8),
                (9, false, false, 4),
            ] {
                let lines = lines(outer, len, inner);
                let kind = FusedKind {
                    backward,
                    whole,
                    queries: if size == 8 || outer == 129 { 100 } else { 0 },
                    scores: outer != 128,
                    capped: outer == 128 && len % 2 == 1,
                    scale_alone: outer == 128 && len % 2 == 0,
                    masked_alike: [0, 1, 1000][outer % 3],
                    tiles: outer != 31,
                    narrow: lines.count() < 1 << 32,
                };
                let plan = fused(lines, kind, size, device(forced));
                let what = format!("{lines:?} {plan:?}");
                let (grid, block) = (plan.grid.0 as usize, plan.block as usize);
                use FusedLines::{Scores, ScoresWindow};
                let (count, most_threads) = match plan.kernel {
                    Kernel::FusedWarp { lines: Scores | ScoresWindow, .. }
                    | Kernel::FusedBlock { lines: Scores | ScoresWindow, .. } => {
                        scores_count(backward, size).expect("of this size")
                    }
                    _ => fused_count(backward, size),
                };
                assert!((1..=MAX_GRID).contains(&grid) && (WARP..=512).contains(&block), "{what}");
                assert!(block.is_multiple_of(WARP) && grid.is_multiple_of(plan.cluster as usize), "{what}");
                assert!(kind.narrow || !plan.is_narrow(), "{what}");
                match plan.kernel {
                    Kernel::FusedWarp { lines: ScoresWindow, .. } => {
                        assert!(
                            count * WARP >= len && grid * (block / WARP) >= lines.count() && block == 128,
                            "{what}"
                        );
                    }
                    Kernel::FusedWarp { .. } => {
                        assert!(count << plan.parameter >= len && plan.parameter <= 5, "{what}");
                        assert!(grid * (block >> plan.parameter) >= lines.count() && block == 128, "{what}");
                    }
                    Kernel::FusedBlock { .. } => {
                        assert!(count * block >= len && block <= most_threads && grid == lines.count(), "{what}");
                    }
                    Kernel::FusedTile { held, .. } => {
                        let (most, most_threads) = fused_tile_count(backward, held, size);
                        assert_eq!(held == Held::CappedLogits, kind.capped, "{what}");
                        let units = if size == 2 { len / 2 } else { len };
                        let of_block = plan.parameter == WHOLE_BLOCK;
                        assert!(of_block || plan.parameter <= 5 && block == 128, "{what}");
                        let (threads, here) =
                            if of_block { (block, 1) } else { (1 << plan.parameter, block >> plan.parameter) };
                        assert!(most * threads >= units && block <= most_threads, "{what}");
                        assert!(grid * here >= lines.count() && !whole, "{what}");
                        let (tile, tiles) = (here * len * size + 128 + 16, if backward { 2 } else { 1 });
                        let mask = if plan.shares_mask { 4 * (len / 2 * 2 + 1) } else { 0 };
                        assert!(plan.shared_bytes as usize >= tiles * tile + mask, "{what}");
                        assert!(!plan.shares_mask || here > 1 && kind.masked_alike == 1000 && size == 2, "{what}");
                        assert!(plan.shared_bytes <= 48 << 10, "{what}");
                    }
                    Kernel::FusedCluster => {
                        let cluster = plan.cluster as usize;
                        assert!(cluster > 1, "{what}");
                        assert!(fused_cluster_count(size) * block * cluster >= len, "{what}");
                        assert!(whole && !backward && grid == lines.count() * cluster, "{what}");
                    }
                    Kernel::FusedGroup { .. } | Kernel::FusedRows { .. } => check_group(lines, plan),
                    _ => {}
                }
            }
        }
    }

    /// The kernels of log-sum-exp, losses and top-k: every element of every line has a thread, within what blocks may be.
    #[test]
    fn plans_beside_softmax_cover_the_lines() {
        let sizes = [1, 2, 3, 31, 33, 128, 511, 512, 513, 1000, 4096, 32_768, 100_003, 128_256, 1 << 24];
        for (outer, len, inner) in sizes.iter().flat_map(|&a| sizes.iter().flat_map(move |&b| [(a, b, 1), (3, b, a)])) {
            let lines = lines(outer, len, inner);
            if lines.elem_count() > 1 << 38 {
                continue; // more than a GPU's memory
            }
            for elements in [F32, BF16, Elements { size: 8, ..F32 }] {
                for (plan, most) in [
                    (statistics(lines, elements, HOPPER), if inner > 1 { 512 } else { 1024 }),
                    (statistics(lines, elements, TURING), if inner > 1 { 512 } else { 1024 }),
                    (loss_backward(lines, elements, HOPPER), 512),
                    (top_k(lines, len.min(50), elements.size, HOPPER), 1024),
                    (top_k(lines, len.min(MOST_TOP_K), elements.size, HOPPER), 1024),
                ] {
                    let what = format!("{lines:?} {elements:?} {plan:?}");
                    let (grid, block, group) = (plan.grid.0 as usize, plan.block as usize, 1 << plan.parameter.min(5));
                    assert!((1..=MAX_GRID).contains(&grid) && (1..=65_535).contains(&plan.grid.1), "{what}");
                    assert!((WARP..=most).contains(&block) && block.is_multiple_of(WARP), "{what}");
                    let here = match plan.kernel {
                        Kernel::StatisticsColumns | Kernel::LossBackwardColumns => {
                            check_group(lines, plan);
                            continue;
                        }
                        Kernel::StatisticsTile => {
                            let units = if elements.size == 2 { len / 2 } else { len };
                            assert!(STATISTICS_WORDS * group >= units && block == WARP_BLOCK, "{what}");
                            let tile = block / group * len * elements.size + 128 + 16;
                            assert!((tile..=48 << 10).contains(&(plan.shared_bytes as usize)), "{what}");
                            grid * (block / group)
                        }
                        Kernel::LossBackwardShortRows => grid * (block / group),
                        Kernel::LossBackwardRows => {
                            let chunks = plan.parameter as usize;
                            assert!(chunks * block * LOSS_PACKS * 16 >= len * elements.size, "{what}");
                            grid / chunks
                        }
                        Kernel::TopKShortRows => {
                            assert!(len <= 1024, "{what}");
                            grid * (block / WARP)
                        }
                        Kernel::TopKRows => {
                            assert!(
                                block.is_power_of_two()
                                    && (SELECT_BYTES..48 << 10).contains(&(plan.shared_bytes as usize)),
                                "{what}"
                            );
                            grid / plan.cluster as usize
                        }
                        _ => grid / plan.cluster as usize,
                    };
                    assert!(here >= lines.count(), "{what}");
                }
            }
        }
    }

    /// As many threads as there is work for, and several blocks where there are few lines.
    #[test]
    fn groups_of_threads() {
        let plan = |outer, len, inner| {
            let plan = group(Kernel::BackwardGroup, lines(outer, len, inner), 2, 2, HOPPER);
            let (threads, across) = threads_and_across(plan.parameter);
            (threads, across, plan.cluster, plan.parts())
        };
        assert_eq!(plan(1 << 20, 2, 2), (1, 1, 1, 1));
        assert_eq!(plan(100_000, 3, 5), (1, 1, 1, 1));
        assert_eq!(plan(1 << 18, 128, 2), (16, 2, 1, 1));
        assert_eq!(plan(1 << 16, 21, 64), (1, 1, 1, 1));
        assert_eq!(plan(8191, 4097, 1), (128, 1, 1, 1));
        assert_eq!(plan(64, 1000, 128), (512, 32, 1, 1));
        assert_eq!(plan(1, 4096, 4096), (512, 32, 2, 1));
        assert_eq!(plan(4096, 50_257, 1), (512, 1, 1, 1));
        assert_eq!(plan(64, 32_000, 1), (512, 1, 2, 1));
        assert_eq!(plan(64, 151_936, 1), (512, 1, 2, 1));
        assert_eq!(plan(1, 151_936, 1), (512, 1, 16, 1));
        assert_eq!(plan(1, 500_000, 1), (512, 1, 1, 132));
        assert_eq!(plan(1, 1 << 24, 1), (512, 1, 1, 264));
        assert_eq!(plan(8, 1_000_000, 1), (512, 1, 1, 33));
        assert_eq!(plan(1, 100_000, 64), (512, 16, 1, 33));
        assert_eq!(plan(1, 1 << 20, 60), (512, 30, 1, 132));
        let statistics = group(Kernel::StatisticsColumns, lines(1, 1 << 20, 60), 2, 0, HOPPER);
        assert_eq!((statistics.cluster, statistics.parts()), (16, 1));
        let of_turing = |len| group(Kernel::BackwardGroup, lines(1, len, 1), 4, 2, TURING);
        assert_eq!((of_turing(20_000).cluster, of_turing(20_000).parts()), (1, 1));
        assert!(of_turing(1_000_000).parts() > TURING.multiprocessors / 2);
        // Of f32 twice as many threads have a line, so that half as many lines are in the cache.
        let of_f32 = group(Kernel::BackwardGroup, lines(8191, 4097, 1), 4, 2, HOPPER);
        assert_eq!(of_f32.parameter, group_shape(256, 1));
    }

    #[test]
    fn long_lines_are_shared_by_a_block_and_few_by_a_large_one() {
        let plan = |outer, len, elements| statistics(lines(outer, len, 1), elements, HOPPER);
        assert_eq!(plan(4096, 128_256, F32), super::plan(Kernel::StatisticsRows, 4096, STATISTICS_BLOCK));
        assert_eq!(plan(8192, 4096, BF16).block, 32);
        assert_eq!(plan(8192, 4096, F32).block, 64);
        assert_eq!((plan(1, 1 << 24, F32).block as usize, plan(1, 1 << 24, F32).cluster), (MAX_BLOCK, 16));
        assert_eq!((plan(1, 128_256, BF16).block, plan(1, 128_256, BF16).cluster), (512, 8));
        assert_eq!((plan(8, 128_256, F32).block, plan(8, 128_256, F32).cluster), (1024, 8));
        assert_eq!(plan(64, 128_256, F32).cluster, 1);
        assert_eq!(plan(8192, 64, F32).kernel, Kernel::StatisticsTile);
        assert_eq!(loss_backward(lines(4096, 128_256, 1), F32, HOPPER).parameter, 32);
        assert_eq!(top_k(lines(4096, 64, 1), 8, 4, HOPPER).kernel, Kernel::TopKShortRows);
        assert_eq!(top_k(lines(4096, 1000, 1), 1000, 4, HOPPER).kernel, Kernel::TopKRows);
        assert_eq!(top_k(lines(8, 128_256, 1), 50, 4, HOPPER).cluster, 16);
        assert_eq!(top_k(lines(64, 128_256, 1), 50, 2, HOPPER).cluster, 2);
        assert_eq!(top_k(lines(1000, 128_256, 1), 50, 4, HOPPER).cluster, 1);
    }

    /// Groups of threads: all lines have one, with a thread for each that lies side by side, and a block's threads know its cluster's blocks.
    fn check_group(lines: Lines, plan: Plan) {
        let what = format!("{lines:?} {plan:?}");
        let (grid, block, cluster) = (plan.grid.0 as usize, plan.block as usize, plan.cluster as usize);
        let (threads, across) = threads_and_across(plan.parameter);
        assert!(across <= threads && block.is_multiple_of(threads) && block <= GROUP_BLOCK, "{what}");
        assert!(grid.is_multiple_of(cluster) && cluster.is_power_of_two() && cluster <= WIDE_CLUSTER, "{what}");
        assert!(cluster == 1 || (threads == block && cluster * across <= threads), "{what}");
        let apart = plan.kernel == Kernel::LossBackwardColumns || cluster == 1 && threads == block;
        assert!(plan.parts() == 1 || (apart && plan.parts() < 1 << 16), "{what}");
        let groups = group_count(lines, plan.parameter);
        assert!(groups * across >= lines.count(), "{what}");
        assert!(grid / cluster * (block / threads) >= groups || grid > MAX_GRID - cluster, "{what}");
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
            Kernel::Tile { words } => {
                let bytes = lines.len * elements.size;
                assert!((words - 1) * side_by_side >= bytes / 4 && words % 2 == 1 && words <= 33, "{what}");
                assert!(grid * (block / side_by_side) >= lines.count() && elements.size < 8 && block == 128, "{what}");
                let tile = block / side_by_side * bytes;
                assert!(plan.shared_bytes as usize >= tile + 128 + 16 && plan.shared_bytes <= 48 << 10, "{what}");
            }
            Kernel::Warp { count, whole } => {
                assert!(count * side_by_side >= room(lines, whole, elements, PACK_BYTES), "{what}");
                assert!(side_by_side <= WARP && grid * (block / side_by_side) >= lines.count(), "{what}");
                let wide = !whole && elements.size == 2 && device.compute_capability >= 90;
                assert!(block == 128 || (wide && block == 512 && grid <= 4 * device.multiprocessors), "{what}");
            }
            Kernel::Block { count, whole } => {
                assert!(count * block >= room(lines, whole, elements, SECTOR_BYTES) && grid == lines.count(), "{what}");
                assert!(block <= if elements.size == 4 && count == 64 { 256 } else { 512 }, "{what}");
            }
            Kernel::Cluster { count, whole } => {
                let threads = block * plan.cluster as usize;
                assert!(count * threads >= room(lines, whole, elements, SECTOR_BYTES), "{what}");
                assert!((2..=16).contains(&plan.cluster), "{what}");
                assert!(grid == lines.count() * plan.cluster as usize && block <= 512 && plan.parameter >= 0, "{what}");
            }
            Kernel::Grid => {
                let (parts, cluster) = (grid / lines.count(), plan.cluster as usize);
                assert!(grid == parts * lines.count() && grid <= device.multiprocessors && block == 512, "{what}");
                assert!(cluster == 1 || cluster == parts, "{what}");
                assert!(parts * 64 * 4096 >= lines.len * elements.size + 2 * PACK_BYTES, "{what}");
                assert!(plan.shared_bytes as usize <= device.shared_bytes && elements.size < 8, "{what}");
            }
            Kernel::Shared { aligned } => {
                let packs = (lines.len * elements.size).div_ceil(PACK_BYTES).div_ceil(2);
                assert!(plan.cluster == 2 && grid == lines.count() * 2 && block == 640, "{what}");
                assert!(grid <= device.multiprocessors && lines.len.is_multiple_of(8) && elements.size == 2, "{what}");
                assert!(!aligned || elements.input_alignment.is_multiple_of(16), "{what}");
                // A sample in every block, and no more chunks than there are barriers
                assert!(lines.len / 8 - packs >= 128 && packs < 24 * 640, "{what}");
                assert!(plan.shared_bytes as usize >= (packs + 1) * PACK_BYTES + 8 * (2 * 21 + 27), "{what}");
                assert!(plan.shared_bytes as usize <= device.shared_bytes, "{what}");
            }
            Kernel::SplitApply { .. } => {
                assert!(plan.grid.1 as usize == lines.count() && block <= 512, "{what}");
                assert!(grid * lines.count() * 2 * elements.size.max(4) < 1 << 20, "workspace: {what}");
            }
            Kernel::SplitColumnsApply { whole } => {
                let (rows, outer) = (plan.parameter as usize, plan.grid.1 as usize);
                let NarrowUnits { size, across, strips } = narrow_units(lines, whole, elements.size);
                let parts = lines.len.div_ceil(rows);
                assert!(outer == lines.outer && grid.is_multiple_of(parts) && block == 512 && across <= WARP, "{what}");
                assert!(rows.is_multiple_of(2) && strips == (grid > parts), "{what}");
                assert!(grid / parts * size * across >= lines.inner, "{what}");
                assert!(size == 1 || elements.input_alignment.is_multiple_of(4), "{what}");
                assert!(
                    size == 1 || lines.inner.is_multiple_of(2) || (lines.len.is_multiple_of(2) && !strips),
                    "{what}"
                );
            }
            Kernel::Run { len } => {
                assert!(grid * block * (16 / elements.size) >= lines.count() && (2..8).contains(&len), "{what}");
                assert!(len == lines.len && lines.inner == 1 && block == 128, "{what}");
                let whole = elements.input_alignment.min(elements.output_alignment).is_multiple_of(16);
                assert!(plan.parameter == whole as i32, "{what}");
            }
            Kernel::FewRows { columns, rows, whole } => {
                let across = plan.parameter as usize;
                assert!(across * columns >= lines.inner && (4..=8).contains(&rows) && rows >= lines.len, "{what}");
                assert!(grid * block >= across * lines.outer && block == 128, "{what}");
                assert!(!whole || lines.inner.is_multiple_of(columns), "{what}");
                assert!(!whole || elements.input_alignment.is_multiple_of(16), "{what}");
            }
            Kernel::Narrow { whole } => {
                let NarrowUnits { size, across, strips } = narrow_units(lines, whole, elements.size);
                let alone = plan.parameter == NARROW_ALONE;
                let (warps, lanes) = if alone { (block / WARP, WARP) } else { (1, side_by_side) };
                assert!(!strips && across <= lanes, "{what}");
                assert!(lanes / across * across * warps * 16 * size >= lines.len * lines.inner, "{what}");
                assert!(grid * if alone { 1 } else { block / lanes } >= lines.outer, "{what}");
                assert!(block <= if elements.size == 8 { 512 } else { 1024 }, "{what}");
                assert!(size == 1 || (lines.len * lines.inner).is_multiple_of(2), "{what}");
                assert!(size == 1 || elements.input_alignment.is_multiple_of(4), "{what}");
                let states = (warps + 1) * across * size * 2 * elements.size.max(4);
                assert!(!alone || (states..=48 << 10).contains(&(plan.shared_bytes as usize)), "{what}");
            }
            Kernel::Column { columns, rows, whole } => {
                assert!(side_by_side <= WARP && block.is_multiple_of(side_by_side) && plan.cluster <= 16, "{what}");
                assert!(block / side_by_side * rows * plan.cluster as usize >= lines.len, "{what}");
                let most = match (elements.size, columns, rows) {
                    (2, 2, 16) => 128,
                    (2, 4, _) => 512,
                    _ => 256,
                };
                assert!(block <= most, "{what}");
                assert!(grid / plan.cluster as usize * side_by_side * columns >= lines.inner * lines.outer, "{what}");
                assert!(!whole || lines.inner.is_multiple_of(columns), "{what}");
                assert!(plan.shared_bytes < 48 << 10, "{what}");
            }
            Kernel::Strip(strips) => {
                let (rows, bytes) = (plan.parameter as usize, strips.bytes(elements.size));
                let boxes = rows.div_ceil(MAX_BOX_ROWS);
                assert!(rows * plan.cluster as usize >= lines.len && plan.cluster <= 16, "{what}");
                assert!(rows * bytes <= 1 << 16 && rows.is_multiple_of(8 * boxes) && block == 256, "{what}");
                assert!(strips == Strips::Any || elements.input_alignment.is_multiple_of(16), "{what}");
                assert!((lines.inner * elements.size).is_multiple_of(16) && elements.size < 8, "{what}");
                assert!(strips.count(lines, elements.size) >= grid / plan.cluster as usize, "{what}");
                // Two blocks, and what the system takes of each.
                assert!(2 * (plan.shared_bytes + 1024) <= 228 << 10, "{what}");
            }
            Kernel::Resident { held } => {
                let (rows, blocks) = (plan.parameter as usize, plan.cluster as usize);
                let boxes = rows.div_ceil(64);
                assert!(rows * blocks >= lines.len && rows * (blocks - 1) < lines.len && blocks <= 16, "{what}");
                assert!(grid == lines.inner.div_ceil(64) * blocks && block == 512, "{what}");
                assert!(plan.grid.1 as usize == lines.outer, "{what}");
                assert!(elements.size == 2 && lines.inner.is_multiple_of(8), "{what}");
                assert!(boxes <= 25 + held && (held == 0 || boxes > 25 && held == 8), "{what}");
                let bytes = boxes.min(25) * 64 * 128 + (16 + 1 + 2 * blocks) * 64 * 8 + (boxes + 3) * 8;
                assert!((bytes..=device.shared_bytes).contains(&(plan.shared_bytes as usize)), "{what}");
                // As many at once as there are, and no more to a multiprocessor than there must be
                let each = (228 << 10) / (plan.shared_bytes as usize + 1024);
                assert!(each == (grid * lines.outer).div_ceil(device.multiprocessors) && each <= 2, "{what}");
            }
            _ => {}
        }
    }
}
