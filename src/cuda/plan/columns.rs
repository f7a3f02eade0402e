//! Softmax along another dimension than the last: lines that lie side by side.

use super::{
    largest_cluster, plan, plan_across, DeviceFacts, Elements, Family, Kernel, Plan, Rows, Strips, MAX_GRID,
    MAX_REGISTER_LINE, PACK_BYTES, STRIP_WARPS, WARP, WIDE_CLUSTER,
};
use crate::lines::Lines;

/// Threads of a strip of lines side by side, and of one of half precision where there are no clusters.
const COLUMN_BLOCK: usize = 256;
const WIDE_COLUMN_BLOCK: usize = 512;
/// How many clusters of one, two, … blocks that fetch strips ahead run at once on the multiprocessors of a whole GPU, as the driver said of one. (Where
/// it says less, less are launched.)
const STRIP_CLUSTERS: [usize; WIDE_CLUSTER] = [264, 132, 79, 62, 47, 39, 32, 30, 23, 21, 16, 16, 14, 14, 14, 14];
/// What that GPU has.
const COUNTED_MULTIPROCESSORS: usize = 132;
/// As `kernels/resident_softmax.cuh` has it: threads of a block, columns of a strip, rows of a box, and boxes in shared memory and in
/// registers.
const RESIDENT_BLOCK: usize = 512;
pub(crate) const RESIDENT_COLUMNS: usize = 64;
pub(crate) const RESIDENT_BOX: usize = 64;
const RESIDENT_SLOTS: usize = 25;
const RESIDENT_HELD: usize = 8;
/// Blocks that a multiprocessor has registers for.
const RESIDENT_EACH: usize = 2;
/// Chosen from this many rows on. dim 1 bf16 on an H100, us, resident and the best of the others: (64, 1000, 128) 8.8 and 9.2, (32, 1000, 128)
/// 5.7 and 6.9, (1, 1000, 128) 2.8 and 3.8, (64, 256, 128) 3.7 and 4.8, (64, 128, 128) 2.7 and 4.7; two blocks to a multiprocessor,
/// (132, 512, 128) 8.5 and 9.3; but (40, 1000, 128), which has no second block for each strip, 8.7 and 8.3, (24, 1000, 128) 5.9 and 5.7,
/// (64, 1000, 72) 10.9 and 10.4, (64, 64, 128) 2.2 and 1.9.
pub(super) const RESIDENT_LEAST: usize = 128;
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
/// Lines side by side of up to so many elements are a thread's, whole, by packs or, of more than eight, one line or two of half precision, but not of
/// f64: 87381 x 3 x 256 bf16 1.0 and f32 1.0, read twice by a thread each 4.5 and 2.0; (8, 21, 512, 512) 1.06 and, f32, 1.09, by `column_softmax` 1.19 and 1.36.
const FEW_ROWS: [usize; 4] = [4, 8, 16, 32];
const FEW_PACKED_ROWS: usize = 8;
const FEW_ROWS_BLOCK: usize = 128;
/// Lines up to this length in rows of half precision that are no whole words, and fill strips of so many columns, are taken by these, four to a thread, on an H200,
/// bf16: (8, 150, 16641) 35.6 us, two 37.6, (64, 80, 7225) 52 and 62, (256, 65, 1001) 27.6 and 33.5; but (16, 512, 1089) 18.7 and 17.2.
const WIDE_ROWS: usize = 256;
const WIDE_ROW_COLUMNS: usize = 128;
/// Lines up to this length in rows that fill strips of sixteen packs of four are not fetched ahead, and by sixteen threads side by side where a block has enough of
/// them. H200, bf16 and f32, us: (8, 150, 16384) by sixteen 22.3 and 40.9, by eight 23.9 and 41.6, ahead 29.0 and 44.1, (8, 80, 16384) 10.9 and 22.5, by eight 13.7 and
/// 23.2, (32, 128, 4096) 17.8 and 33.9, ahead 28.6 and 38.3; by eight (8, 300, 16384) 46.2 and 83.0, ahead 58.4 and 85.1, (16, 400, 8192) 59.1 and 108.3, 61.1 and
/// 110.8, but (2, 700, 20000) 36.4 and 67.0, 36.0 and 66.1. From the second element on (64, 256, 4096) 88 and 136, ahead 116 and 152, (8, 300, 16384) 56 and 92, 62 and
/// 95, (16, 400, 8192) 77 and 119, 68 and 124.
const MIDDLE_ROWS: usize = 400;
/// … and of half precision that begins elsewhere.
const MIDDLE_HALF_ROWS: usize = 320;
/// Rows of half precision that are no whole words have strips of 64 columns from this on, however many blocks that takes.
const WIDE_HALF_ROW: usize = 512;
/// Threads of a strip, as `kernels/column_share.cuh` has it.
const HELD_BLOCK: usize = 256;
/// As `kernels/narrow.cuh` has it: units of a thread. As many as there is room for: (262144, 128, 2) bf16 with sixteen 1.02 copies,
/// eight 1.12, four 1.5.
const NARROW_UNITS: usize = 16;
const NARROW_BLOCK: usize = 128;
/// The most warps of a block.
const NARROW_WARPS: usize = 32;
pub(crate) const NARROW_ALONE: i32 = 6;
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

/// A few rows of lines side by side.
pub(super) fn few_rows(lines: Lines, elements: Elements) -> Option<Plan> {
    let (size, packed) = (elements.size, lines.len <= FEW_PACKED_ROWS);
    let rows = FEW_ROWS.into_iter().find(|&rows| lines.len <= rows).filter(|_| packed || size < 8)?;
    let [pack, unit] = [if packed { PACK_BYTES / size } else { 2 }, if size == 2 { 2 } else { 1 }];
    let whole = (packed || size == 2) && elements.in_packs(pack, lines.inner);
    let columns = if whole { pack } else { unit };
    // Two lines of one thread lie a warp apart where they are not accessed together.
    let side_by_side = if whole || columns == 1 { 1 } else { WARP };
    let across = lines.inner.div_ceil(columns * side_by_side).saturating_mul(side_by_side);
    let threads = across.saturating_mul(lines.outer);
    let possible = lines.inner > 1 && threads <= MAX_GRID;
    possible.then(|| Plan {
        parameter: across as i32,
        ..plan(Kernel::FewRows { columns, rows, whole }, threads.div_ceil(FEW_ROWS_BLOCK), FEW_ROWS_BLOCK)
    })
}

/// How lines side by side lie in units: words of 4 bytes, or elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NarrowUnits {
    /// Elements of a unit.
    pub size: usize,
    /// The units after which the columns are the same again, or a warp's if a row is longer.
    pub across: usize,
    /// Whether it is longer.
    pub strips: bool,
}

/// `whole`: units are words.
pub(crate) fn narrow_units(lines: Lines, whole: bool, element_size: usize) -> NarrowUnits {
    let size = if whole && element_size == 2 { 2 } else { 1 };
    // A row that ends in the middle of a word has another one in it.
    let units = if lines.inner.is_multiple_of(size) { lines.inner / size } else { lines.inner };
    NarrowUnits { size, across: units.min(WARP), strips: units > WARP }
}

/// Whether the tensors and each run of so many elements begin with a whole word; of others than half precision they do.
fn in_words(elements: Elements, run: usize) -> bool {
    elements.size > 2 || elements.in_packs(2, run)
}

pub(super) fn narrow_is_best(lines: Lines, elements: Elements, device: DeviceFacts) -> bool {
    let row = lines.inner.saturating_mul(elements.size);
    let packs = row.is_multiple_of(PACK_BYTES) && elements.input_alignment.is_multiple_of(PACK_BYTES);
    let is_narrow = match packs {
        true => row <= NARROWEST_ROW,
        false => row < NARROW_ROW || (elements.size == 2 && lines.len > NARROW_ROW),
    };
    is_narrow && filling_narrow(lines, elements, device).is_some()
}

/// Narrow rows, unless they are wide enough for other kernels and too few to fill the GPU.
pub(super) fn filling_narrow(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let fills = |plan: &Plan| is_narrowest(lines, elements) || plan.grid.0 as usize >= device.multiprocessors;
    narrow(lines, elements).filter(fills)
}

/// Whether rows are so narrow that kernels for wide ones leave most threads idle.
pub(super) fn is_narrowest(lines: Lines, elements: Elements) -> bool {
    lines.inner > 1 && lines.inner.saturating_mul(elements.size) < NARROWEST_ROW
}

/// Narrow rows of lines side by side.
pub(super) fn narrow(lines: Lines, elements: Elements) -> Option<Plan> {
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
pub(super) fn split_columns(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
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

/// Columns of a thread and rows, as `kernels/column_softmax.cu` and `column_any_softmax.cu` have them, and what rows are.
fn column_tile(lines: Lines, elements: Elements, largest_cluster: usize) -> (usize, usize, Rows) {
    let packs = |columns: usize| elements.in_packs(columns, lines.inner);
    let results = Elements { input_alignment: elements.output_alignment, ..elements };
    let is_short = lines.len <= SHORT_PACKS;
    let is_wide = lines.len <= WIDE_ROWS.min(WIDE_COLUMN_BLOCK / WARP * 8 * largest_cluster)
        && fills_strips(lines.inner, WIDE_ROW_COLUMNS);
    match elements.size {
        8 if !is_short && packs(2) => (2, 16, Rows::Packs),
        8 => (1, 16, Rows::Any),
        2 if !is_short && packs(4) => (4, 16, Rows::Packs),
        2 => match if is_short { 16 } else { 32 } {
            rows if packs(2) => (2, rows, Rows::Packs),
            rows if results.in_packs(2, lines.inner) => (2, rows, Rows::Words),
            32 if is_wide => (4, 8, Rows::Any),
            rows => (2, rows, Rows::Any),
        },
        // Single elements keep more blocks busy where lines are short: 1.26, packs 1.49 at (16, 64, 56, 56) dim 1 f32.
        _ if !is_short && packs(4) => (4, 16, Rows::Packs),
        _ if lines.len <= HALF_ROWS => (1, 16, Rows::Any),
        _ => (1, 32, Rows::Any),
    }
}

/// Whether strips of so many columns leave less than an eighth of the last one idle.
fn fills_strips(inner: usize, columns: usize) -> bool {
    8 * inner >= 7 * inner.next_multiple_of(columns)
}

/// Lines of some length in rows of whole packs, but for where they begin, that fill strips of sixteen packs.
pub(super) fn column_is_best(lines: Lines, elements: Elements) -> bool {
    let whole_rows = (lines.inner * elements.size).is_multiple_of(PACK_BYTES);
    let most = match elements.in_packs(4, lines.inner) {
        false if !whole_rows => 0,
        false if elements.size == 2 => MIDDLE_HALF_ROWS,
        _ => MIDDLE_ROWS,
    };
    elements.size < 8 && (SHORT_PACKS + 1..=most).contains(&lines.len) && fills_strips(lines.inner, 64)
}

pub(super) fn column(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let largest = largest_cluster(device);
    let (columns, rows, of) = column_tile(lines, elements, largest);
    let (whole, apart) = (of == Rows::Packs, of == Rows::Any && elements.size == 2);
    let down = lines.len.div_ceil(rows);
    // Threads side by side, and blocks of a cluster. Packs: (8, 4096, 4096) dim 1 f32 with eight and clusters of eight 1.26, four
    // and clusters of four 1.25; (64, 1000, 128) dim 1 bf16 in clusters of two 1.63, in one block 1.82; (16, 64, 56, 56) dim
    // 1 bf16 with sixteen 1.36, eight 1.43.
    let half = elements.size == 2;
    let short_halves = half && lines.len <= SHORT_PACKS;
    let (widest, one_block) = match (whole, short_halves) {
        (_, true) => (32, 128),
        (true, false) => (16, if column_is_best(lines, elements) { COLUMN_BLOCK } else { 64 }),
        (false, false) => (32, 64),
    };
    let block = if apart && columns == 4 { WIDE_COLUMN_BLOCK } else { COLUMN_BLOCK };
    let (across, blocks) = if down * widest <= one_block {
        (widest, 1)
    } else if largest == 1 && whole && columns == 4 && half && down * 8 <= WIDE_COLUMN_BLOCK {
        (8, 1)
    } else {
        let widths: &[usize] = match of {
            Rows::Packs if columns == 4 || !half => &[8, 4, 2, 1],
            Rows::Any if columns == 4 => &[32],
            // bf16, H200, us: (8, 4096, 4095) 32 and sixteen blocks 288, sixteen and eight 337, (16, 512, 1089) 17.2 and 19.0; but (64, 1000, 127) 32 and four
            // 16.6, sixteen and two 16.1, (256, 1000, 49) 31.6 and 30.1, (384, 197, 197) 34.8 and 31.3
            _ if apart && lines.inner >= WIDE_HALF_ROW => &[32, 16, 8],
            // (64, 1000, 128) bf16 at an offset, H200, us: 32 and four blocks 16.1, sixteen and two 13.3; (1, 1000, 513) 5.9 and 6.0
            _ if !apart && down * 32 <= COLUMN_BLOCK => &[32, 16, 8, 4, 2, 1],
            _ => &[16, 8, 4, 2, 1],
        };
        let blocks = |across: usize| (down * across).div_ceil(block).next_power_of_two();
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
        ..plan(Kernel::Column { columns, rows, of }, strips * blocks, threads)
    })
}

/// One of the kernels that hold lines side by side by `kernels/column_share.cuh`, by what a thread has.
#[derive(Clone, Copy)]
pub(super) struct HeldColumns {
    columns: usize,
    rows: usize,
    /// Threads side by side, where lines are not a thread's own, and of how many blocks a cluster may be then.
    widths: &'static [(usize, usize)],
}

pub(super) const fn by(columns: usize, rows: usize, widths: &'static [(usize, usize)]) -> HeldColumns {
    HeldColumns { columns, rows, widths }
}

/// Lines side by side in the registers of a thread, a block or a cluster, all that is read of them once, by the first of these kernels that has room for
/// them. It is told its columns and rows, and whether the tensors' rows are whole packs of so many columns: where they need not be those are two of half
/// precision, or one. `numbers`: that are known of a part of a line.
pub(super) fn held_columns(
    kernel: impl Fn(usize, usize, bool) -> Kernel,
    choices: &[HeldColumns],
    numbers: usize,
    lines: Lines,
    elements: Elements,
    device: DeviceFacts,
) -> Option<Plan> {
    let size = elements.size;
    let whole = |columns: usize| elements.in_packs(columns, lines.inner);
    let unit = if size == 2 { 2 } else { 1 };
    let largest = largest_cluster(device);
    let (columns, rows, across, blocks) = choices.iter().find_map(|&HeldColumns { columns, rows, widths }| {
        let down = lines.len.div_ceil(rows);
        let blocks = |across: usize| (down * across).div_ceil(HELD_BLOCK);
        // Threads that have whole lines need not know of each other.
        let widths = if down == 1 { &[(128, 1), (64, 1), (32, 1)] } else { widths };
        let fits = |&(across, most): &(usize, usize)| blocks(across) <= most.min(largest);
        let covered = |across: usize| lines.inner.div_ceil(columns * across) * across;
        // The widest, unless a row leaves an eighth more of it idle than by one of 64 bytes or more: the backward of (50, 2000, 130) bf16 by sixteen 31 us,
        // 32 36; a scale of (256, 1000, 49) f32 by eight, of whose sectors most are of two strips, 82, read twice 60.
        let idle =
            |wide: usize, narrow: usize| narrow * columns * size >= 64 && 8 * covered(wide) > 9 * covered(narrow);
        let possible = columns <= unit || whole(columns);
        let widest = widths.iter().copied().filter(|width| possible && fits(width)).map(|(across, _)| across);
        let across = widest.reduce(|wide, narrow| if idle(wide, narrow) { narrow } else { wide })?;
        Some((columns, rows, across, blocks(across)))
    })?;
    let threads = (lines.len.div_ceil(rows).div_ceil(blocks) * across).next_multiple_of(WARP);
    let strips = lines.inner.div_ceil(columns * across).checked_mul(lines.outer)?;
    // Of every warp, every block and the whole
    let parts = (threads / WARP + blocks + 1) * across.min(WARP) * columns;
    let possible = lines.inner > 1
        && !is_narrowest(lines, elements)
        && lines.len <= MAX_REGISTER_LINE
        && lines.inner <= MAX_REGISTER_LINE
        && strips <= MAX_GRID / blocks;
    possible.then(|| Plan {
        cluster: blocks as u32,
        shared_bytes: (parts * numbers * size.max(4)) as u32,
        parameter: across.ilog2() as i32,
        ..plan(kernel(columns, rows, whole(columns)), strips * blocks, threads)
    })
}

/// How many clusters run at once here, given how many do on [`COUNTED_MULTIPROCESSORS`].
fn clusters_here(counted: usize, device: DeviceFacts) -> usize {
    counted * device.multiprocessors / COUNTED_MULTIPROCESSORS
}

/// Strips of half precision that multiprocessors hold all at once, as many to a strip as there are, or several of a few rows to each.
pub(super) fn resident(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
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

/// How much of what the blocks of odd strips have room for is to be in use, in eighths, others and half precision; both tensors are to be more than the L2 cache
/// holds, too, and of half precision each of them. Dim 1 f32, so and by `column`, copies: (8, 150, 16383) 1.30 and 1.57, (16, 2000, 513) 1.29 and 2.14, (64, 1000, 127)
/// 1.78 and 2.12; but (256, 100, 1001) 1.79 and 1.38, (4, 3000, 333) 2.8 and 2.4, (200, 300, 99) 2.2 and 1.8. H200, bf16, us: (8, 4096, 4095) 237 and 289, (1, 2000, 20001) 76
/// and 86, (1, 4096, 4097) 41 and 42, but (16, 2000, 513) 43 and 38, (8, 1000, 2049) 42 and 36, (2, 1500, 3001) 25 and 23.
const ODD_STRIP_USED: [usize; 2] = [4, 6];

/// Strips that are fetched ahead.
pub(super) fn strip(lines: Lines, elements: Elements, device: DeviceFacts) -> Option<Plan> {
    let row = lines.inner * elements.size;
    let possible = device.compute_capability >= 90
        && lines.inner > 1
        && elements.size < 8
        && lines.len <= MAX_REGISTER_LINE
        && lines.inner <= MAX_REGISTER_LINE
        // What a description of a tensor has room for
        && lines.outer < MAX_GRID
        && lines.len.saturating_mul(row) < 1 << 40;
    if !possible {
        return None;
    }
    let of = |strips| strip_of(strips, lines, elements, device);
    if !row.is_multiple_of(PACK_BYTES) || !elements.output_alignment.is_multiple_of(8) {
        // What a strip writes in some rows is read by the one beside it.
        let (_, plan) = of(Strips::Odd).filter(|_| !elements.in_place)?;
        let odd = Strips::Odd;
        let columns = odd.side_by_side(lines, elements.size) * odd.written(elements.size);
        let room = plan.cluster as usize * odd.most_rows(elements.size) * columns;
        let half = elements.size == 2;
        let fills = 8 * lines.len * lines.inner >= ODD_STRIP_USED[usize::from(half)] * room;
        let is_large = if half { 1 } else { 2 } * lines.elem_count() * elements.size > device.l2_bytes;
        return ((fills && is_large) || device.forced == Some(Family::Strip)).then_some(plan);
    }
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
    // Of twice as many warps a multiprocessor has one block.
    let warps = strips.warps(elements.size);
    let at_once = |blocks: usize| clusters_here(STRIP_CLUSTERS[blocks - 1], device) * STRIP_WARPS / warps;
    // Threads work as long on a few rows as on all that they have room for.
    let fits = match strips {
        Strips::Odd => true,
        _ => lines.inner * elements.size >= bytes && 2 * lines.len >= most_rows,
    };
    let rounds = |&blocks: &usize| count.div_ceil(at_once(blocks).max(1));
    // Of as many rounds the fewest blocks: (4096, 4096) dim 0 bf16 in three of clusters of eight 22.2 us, of nine 28.3.
    let columns = bytes / elements.size;
    // Three barriers behind
    let shared_bytes = |blocks: usize| {
        let states = (warps + 2 * blocks + 1) * columns;
        most_rows * strips.copied_bytes(elements.size) + states * 8 + 3 * 8
    };
    let enough =
        (1..=largest).filter(|&blocks| rows(blocks) <= most_rows && shared_bytes(blocks) <= device.shared_bytes);
    let blocks = enough.min_by_key(rounds).filter(|_| fits && count < MAX_GRID / WIDE_CLUSTER)?;
    let plan = Plan {
        cluster: blocks as u32,
        shared_bytes: shared_bytes(blocks) as u32,
        parameter: rows(blocks) as i32,
        ..plan(Kernel::Strip(strips), at_once(blocks).clamp(1, count) * blocks, warps * WARP)
    };
    Some((rounds(&blocks), plan))
}
