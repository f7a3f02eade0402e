use super::fused::{
    fused_bias_count, fused_bias_tile_count, fused_cluster_counts, fused_count, fused_tile_count, scores_count,
    FUSED_TILE_MANY, SMALL_TILE,
};
use super::group::{group, group_shape, threads_and_across, GROUP_BLOCK};
use super::softmax::room;
use super::statistics::{LOSS_PACKS, SELECT_BYTES, STATISTICS_BLOCK, STATISTICS_WORDS};
use super::sums::SUM_THREADS;
use super::*;
use crate::op::{Output, Schedule};
use crate::sums::{offset, SumOver};

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
const F32: Elements = Elements::alike(4, 128);
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
    let column = |columns, rows, whole| {
        let of = if whole { Rows::Packs } else { Rows::Any };
        Kernel::Column { columns, rows, of }
    };
    let resident = |held| Kernel::Resident { held };
    let few_rows = |columns, rows, whole| Kernel::FewRows { columns, rows, whole };
    let narrow_rows = |whole| Kernel::Narrow { whole };
    let split_columns = |whole| Kernel::SplitColumnsApply { whole };
    let [narrow, wide, odd] = [Strips::Narrow, Strips::Wide, Strips::Odd].map(Kernel::Strip);
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
        // Lines of some length that fill strips of sixteen packs, and a longer one
        (lines(8, 150, 16_384), F32, column(4, 16, true), column(4, 16, true)),
        (lines(8, 150, 16_384), BF16, column(4, 16, true), column(4, 16, true)),
        (lines(8, 401, 16_384), BF16, wide, column(4, 16, true)),
        // Half precision in rows that are no whole packs of four: words, wide ones, and narrower or longer
        (lines(8, 150, 16_642), BF16, column(2, 32, true), column(2, 32, true)),
        (lines(8, 150, 16_641), BF16, column(4, 8, false), column(2, 32, false)),
        (lines(64, 80, 7225), BF16, column(4, 8, false), column(4, 8, false)),
        (lines(384, 197, 197), BF16, column(2, 32, false), column(2, 32, false)),
        (lines(16, 512, 1089), BF16, column(2, 32, false), column(2, 32, false)),
        // Few rows, narrow ones, and long lines
        (lines(1 << 10, 8, 4096), F32, few_rows(4, 8, true), few_rows(4, 8, true)),
        (lines(1 << 10, 3, 4096), BF16, few_rows(8, 4, true), few_rows(8, 4, true)),
        (lines(1 << 10, 3, 4095), BF16, few_rows(2, 4, false), few_rows(2, 4, false)),
        (lines(1 << 10, 9, 4096), BF16, few_rows(2, 16, true), few_rows(2, 16, true)),
        (lines(1 << 10, 17, 4097), BF16, few_rows(2, 32, false), few_rows(2, 32, false)),
        (lines(1 << 10, 32, 4096), F32, few_rows(1, 32, false), few_rows(1, 32, false)),
        (lines(1 << 10, 33, 4096), F32, column(1, 16, false), column(1, 16, false)),
        (lines(8, 4096, 4095), F32, odd, split_columns(true)),
        (lines(8, 4096, 4095), BF16, odd, split_columns(false)),
        (lines(8, 150, 16_383), F32, odd, column(1, 32, false)),
        (lines(64, 1000, 127), F32, odd, column(1, 32, false)),
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
    let grid = |outer, len, elements| super::softmax::grid(lines(outer, len, 1), elements, HOPPER);
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
    assert!(super::softmax::grid(lines(1, 1 << 20, 1), F32, DeviceFacts { shared_bytes: 99 << 10, ..HOPPER }).is_none());
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

/// Sixteen packs side by side, and eight where these would leave threads idle, or lines are too long for a block.
#[test]
fn columns_side_by_side() {
    let side_by_side = |lines, elements| 1 << softmax(lines, None, elements, HOPPER).parameter;
    for (lines, elements, expected) in [
        (lines(8, 65, 16_384), F32, 16),
        (lines(8, 256, 16_384), BF16, 16),
        (lines(8, 80, 32), F32, 8),
        (lines(8, 80, 96), BF16, 8),
        (lines(1000, 257, 1024), F32, 8),
    ] {
        assert_eq!(side_by_side(lines, elements), expected, "{lines:?}");
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
        let column = Kernel::Column { columns: 1, rows: 16, of: Rows::Any };
        assert_eq!(softmax(lines(9, 99, 64), None, unaligned, HOPPER).kernel, column);
    }
    let columns = lines(8, 4096, 4096);
    let input = Elements { input_alignment: 2, ..BF16 };
    assert_eq!(softmax(lines(1, 1 << 24, 1), None, input, HOPPER).kernel, Kernel::Grid);
    assert_eq!(softmax(columns, None, input, HOPPER).kernel, Kernel::Strip(Strips::Any));
    assert_eq!(softmax(lines(64, 1000, 128), None, input, HOPPER).kernel, Kernel::Strip(Strips::Any));
    let words = |rows| Kernel::Column { columns: 2, rows, of: Rows::Words };
    assert_eq!(softmax(lines(8, 320, 4096), None, input, HOPPER).kernel, words(32));
    assert_eq!(softmax(lines(8, 321, 4096), None, input, HOPPER).kernel, Kernel::Strip(Strips::Any));
    let any = Kernel::Column { columns: 1, rows: 32, of: Rows::Any };
    assert_eq!(softmax(lines(8, 321, 4096), None, Elements { input_alignment: 4, ..F32 }, HOPPER).kernel, any);
    assert_eq!(softmax(lines(16, 64, 3136), None, input, HOPPER).kernel, words(16));
    assert_eq!(softmax(lines(8, 150, 16_642), None, input, HOPPER).kernel, words(32));
    let output = Elements { output_alignment: 4, ..BF16 };
    assert_eq!(softmax(columns, None, output, HOPPER).kernel, Kernel::Strip(Strips::Odd));
    let in_place = softmax(columns, None, Elements { in_place: true, ..output }, HOPPER);
    assert_eq!(in_place.kernel, Kernel::Column { columns: 2, rows: 32, of: Rows::Packs });
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

/// About powers of two and one and a half times those, where a table's entry ends, and threads may be some too many for what is a bit shorter.
fn lengths() -> impl Iterator<Item = usize> + Clone {
    let about =
        (0..=20).flat_map(|log| [2 << log, 3 << log]).flat_map(|at: usize| [at.saturating_sub(7), at - 1, at, at + 1]);
    about.filter(|&len| len > 0).chain([100, 1000, 100_003, 1 << 24, 1 << 32])
}

/// Every plan, forced or chosen, covers its lines and keeps the limits of the kernels and the device.
#[test]
fn plans_cover_the_lines() {
    let sizes = [1, 2, 3, 31, 127, 128, 129, 1000, 4096, 4097, 32_768, 100_003, 1 << 20, 1 << 24, 1 << 32];
    let shapes = lengths().flat_map(|len| sizes.iter().flat_map(move |&n| [(n, len, 1), (1, len, n), (7, len, n)]));
    let families = Family::ALL.map(|(_, family)| Some(family)).into_iter().chain([None]);
    for ((outer, len, inner), forced) in shapes.flat_map(|shape| families.clone().map(move |forced| (shape, forced))) {
        let lines = lines(outer, len, inner);
        for (device, elements) in [(HOPPER, F32), (HOPPER, BF16), (TURING, F32), (HOPPER, Elements { size: 8, ..F32 })]
            .into_iter()
            .flat_map(|(device, e)| {
                let [input, output] =
                    [Elements { input_alignment: e.size, ..e }, Elements { output_alignment: e.size, ..e }];
                [e, input, output, Elements { input_alignment: e.size, ..output }].map(|e| (device, e))
            })
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
        let elements = Elements::alike(size, alignment);
        softmax_backward(lines, elements, device)
    };
    let kernel = |lines, whole, size, device| plan_of(lines, whole, size, device).kernel;
    assert_eq!(kernel(lines(9, 512, 1), true, 4, TURING), Kernel::BackwardWarp { count: 16 });
    assert_eq!(kernel(lines(9, 4096, 1), true, 4, TURING), Kernel::BackwardBlock { count: 16, whole: true });
    assert_eq!(kernel(lines(9, 32_768, 1), true, 4, TURING), Kernel::BackwardGroup { pairs: false });
    assert_eq!(kernel(lines(9, 32_768, 1), true, 4, HOPPER), Kernel::BackwardCluster { count: 32, whole: true });
    assert_eq!(kernel(lines(9, 128_256, 1), true, 2, HOPPER), Kernel::BackwardCluster { count: 64, whole: true });
    assert_eq!(kernel(lines(9, 4096, 1), false, 2, HOPPER), Kernel::BackwardGroup { pairs: false });
    assert_eq!(kernel(lines(9, 77, 1), false, 2, HOPPER), Kernel::BackwardGroup { pairs: false });
    for device in [TURING, HOPPER] {
        assert_eq!(kernel(lines(9, 77, 1), true, 2, device), Kernel::BackwardTile { words: 17 });
        assert_eq!(kernel(lines(9, 77, 1), true, 4, device), Kernel::BackwardTile { words: 17 });
        assert_eq!(kernel(lines(9, 77, 1), true, 8, device), Kernel::BackwardGroup { pairs: false });
        assert_eq!(kernel(lines(9, 577, 1), true, 4, device), Kernel::BackwardBlock { count: 16, whole: false });
        assert_eq!(kernel(lines(9, 1025, 1), true, 2, device), Kernel::BackwardTile { words: 17 });
        assert_eq!(kernel(lines(9, 1027, 1), true, 2, device), Kernel::BackwardBlock { count: 16, whole: false });
        assert_eq!(kernel(lines(9, 1027, 1), false, 2, device), Kernel::BackwardGroup { pairs: false });
    }
    assert_eq!(plan_of(lines(9, 50_257, 1), true, 4, HOPPER).cluster, 8);
    assert_eq!(kernel(lines(9, 50_257, 1), true, 4, HOPPER), Kernel::BackwardCluster { count: 32, whole: false });
    let column = |columns, rows, whole| Kernel::BackwardColumn { columns, rows, whole };
    assert_eq!(kernel(lines(9, 4096, 4096), false, 2, HOPPER), column(2, 16, false));
    assert_eq!(kernel(lines(9, 4096, 4096), true, 2, HOPPER), column(2, 16, true));
    assert_eq!(kernel(lines(9, 4096, 4096), false, 4, HOPPER), column(1, 16, true));
    assert_eq!(kernel(lines(9, 4096, 4096), true, 2, TURING), Kernel::BackwardGroup { pairs: true });
    assert_eq!(kernel(lines(9, 6000, 4096), true, 2, HOPPER), column(4, 24, true));
    assert_eq!(kernel(lines(9, 6000, 4096), false, 2, HOPPER), Kernel::BackwardGroup { pairs: false });
    assert_eq!(kernel(lines(9, 6000, 4096), false, 4, HOPPER), column(1, 32, true));
    assert_eq!(kernel(lines(9, 5, 4096), true, 2, TURING), column(8, 8, true));
    assert_eq!(kernel(lines(9, 5, 4096), true, 4, HOPPER), column(4, 8, true));
    assert_eq!(kernel(lines(9, 5, 4097), false, 4, HOPPER), column(1, 16, true));
    assert_eq!(kernel(lines(9, 150, 4096), true, 8, TURING), column(1, 16, true));
    assert_eq!(plan_of(lines(9, 9, 4096), true, 4, HOPPER).parameter, 7);
    assert_eq!(plan_of(lines(50, 2000, 130), true, 2, HOPPER).parameter, 4);
    assert_eq!(plan_of(lines(64, 1000, 128), true, 4, HOPPER).parameter, 5);
    assert_eq!(kernel(lines(1 << 15, 128, 2), true, 2, HOPPER), Kernel::BackwardNarrow { whole: true });
    assert_eq!(kernel(lines(1 << 15, 33, 3), false, 2, TURING), Kernel::BackwardNarrow { whole: false });
    assert_eq!(kernel(lines(10, 100_000, 64), true, 2, HOPPER), Kernel::BackwardSplitColumns { whole: true });
    assert_eq!(kernel(lines(1, 10_000_001, 3), true, 2, HOPPER), Kernel::BackwardSplitColumns { whole: false });
    for (len, (outer, inner)) in lengths().filter(|&len| len <= 1 << 24).flat_map(|len| {
        [(1, 1), (7, 1), (1 << 20, 1), (1 << 33, 1), (1, 3), (1 << 20, 3), (7, 64), (1, 4097), (300, 4096)]
            .map(|lines| (len, lines))
    }) {
        for (size, whole) in [2, 4, 8].into_iter().flat_map(|size| [(size, true), (size, false)]) {
            let lines = lines(outer, len, inner);
            let plan = plan_of(lines, whole, size, HOPPER);
            let alignment = if whole { 16 } else { size };
            let elements = Elements::alike(size, alignment);
            // The grids of these are those of kernels that take lines alike.
            let of_softmax = match plan.kernel {
                Kernel::BackwardNarrow { whole } => Some(Kernel::Narrow { whole }),
                Kernel::BackwardSplitColumns { whole } => Some(Kernel::SplitColumnsApply { whole }),
                _ => None,
            };
            if let Some(kernel) = of_softmax {
                check(lines, elements, HOPPER, Plan { kernel, ..plan });
                continue;
            }
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
                Kernel::BackwardBlock { count, whole } => {
                    assert!(!whole || (len * size).is_multiple_of(PACK_BYTES), "{what}");
                    assert!(count * block >= len && block <= 512 && grid == outer, "{what}");
                }
                Kernel::BackwardCluster { count, whole } => {
                    assert!(!whole || (len * size).is_multiple_of(PACK_BYTES), "{what}");
                    assert!(count * block * cluster >= len && block <= 512 && grid == outer * cluster, "{what}");
                    assert!(cluster > 1, "{what}");
                }
                Kernel::BackwardColumn { columns, rows, whole } => {
                    check_held_columns(lines, elements, plan, (columns, rows, whole), 1);
                }
                Kernel::BackwardGroup { .. } => check_group(lines, plan),
                _ => panic!("not checked: {what}"),
            }
        }
    }
}

/// Of lines of whole packs, with nothing that has kernels of its own.
const PACKS: FusedKind = FusedKind {
    backward: false,
    whole: true,
    alignment: 128,
    queries: 0,
    scores: false,
    capped: false,
    scale_alone: false,
    column: false,
    masked_alike: 0,
    tiles: true,
    narrow: true,
};

#[test]
fn fused_plans_cover_the_lines() {
    let device = |forced| DeviceFacts { forced, ..HOPPER };
    let packs = PACKS;
    let any = FusedKind { whole: false, ..packs };
    let alone = FusedKind { scale_alone: true, ..any };
    let column = FusedKind { backward: true, column: true, alignment: 16, ..alone };
    let scores = FusedKind { scores: true, ..packs };
    let gradients = FusedKind { backward: true, ..scores };
    let capped = FusedKind { capped: true, ..any };
    let capped_gradients = FusedKind { backward: true, capped: true, ..packs };
    let masked = FusedKind { scores: true, masked_alike: 1, ..any };
    let padded = FusedKind { masked_alike: 1000, ..masked };
    let gradients_of_any = Kernel::FusedTile { backward: true, held: Held::Logits, many: false, window: false };
    let scores_of_gradients = Kernel::FusedTile { backward: true, held: Held::Scores, many: false, window: false };
    let (backward, of) = (false, FusedLines::Packs);
    let tile = |held, many| Kernel::FusedTile { backward, held, many, window: false };
    let cluster_tile = |held| Kernel::FusedClusterTile { backward, held, window: false };
    let cluster_gradients = |held| Kernel::FusedClusterTile { backward: true, held, window: false };
    let (causal, held) = (FusedKind { queries: 64, ..any }, Held::Logits);
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
            capped_gradients,
            HOPPER,
            Kernel::FusedBlock { backward: true, lines: FusedLines::Capped },
        ),
        (lines(64, 512, 1), capped_gradients, TURING, Kernel::FusedWarp { backward: true, lines: FusedLines::Capped }),
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
        (lines(64, 8200, 1), packs, HOPPER, Kernel::FusedCluster { count: 32 }),
        (lines(64, 16_400, 1), scores, HOPPER, Kernel::FusedClusterScores),
        (lines(64, 16_400, 1), FusedKind { queries: 64, ..scores }, HOPPER, Kernel::FusedCluster { count: 32 }),
        (lines(64, 8200, 1), packs, TURING, Kernel::FusedRows { backward, scores: false }),
        (lines(64, 2000, 1), any, TURING, tile(Held::Logits, false)),
        (lines(64, 77, 1), any, HOPPER, tile(Held::Logits, false)),
        (lines(64, 77, 1), FusedKind { tiles: false, ..any }, HOPPER, Kernel::FusedRows { backward, scores: false }),
        (lines(64, 77, 1), FusedKind { scores: true, ..any }, HOPPER, tile(Held::Scores, false)),
        (lines(64, 77, 1), FusedKind { scores: true, ..any }, TURING, tile(Held::Logits, false)),
        (lines(64, 257, 1), masked, HOPPER, tile(Held::Scores, false)),
        (lines(64, 257, 1), masked, TURING, tile(Held::Logits, false)),
        (lines(64, 257, 1), padded, HOPPER, tile(Held::Scores, false)),
        (lines(340_613, 197, 1), any, HOPPER, tile(Held::Logits, true)),
        (lines(340_613, 197, 1), any, TURING, tile(Held::Logits, false)),
        (lines(115_977, 577, 1), any, HOPPER, tile(Held::Logits, false)),
        (lines(871_486, 77, 1), capped, HOPPER, tile(Held::CappedLogits, true)),
        (lines(64, 10_240, 1), any, HOPPER, tile(Held::Logits, false)),
        (lines(64, 10_242, 1), any, HOPPER, cluster_tile(Held::Logits)),
        (lines(64, 20_480, 1), any, TURING, tile(Held::Logits, false)),
        (lines(64, 9216, 1), capped, HOPPER, tile(Held::CappedLogits, false)),
        (lines(64, 9218, 1), capped, HOPPER, cluster_tile(Held::CappedLogits)),
        (lines(64, 16_384, 1), FusedKind { scores: true, ..any }, HOPPER, tile(Held::Scores, false)),
        (lines(64, 16_386, 1), FusedKind { scores: true, ..any }, HOPPER, cluster_tile(Held::Scores)),
        (lines(64, 18_434, 1), capped, HOPPER, cluster_tile(Held::CappedLogits)),
        (lines(64, 20_483, 1), any, HOPPER, cluster_tile(Held::Logits)),
        (lines(64, 50_257, 1), masked, HOPPER, cluster_tile(Held::Scores)),
        (lines(64, 327_680, 1), any, HOPPER, cluster_tile(Held::Logits)),
        (lines(64, 77, 1), causal, HOPPER, Kernel::FusedTile { backward, held, many: false, window: true }),
        (lines(64, 20_483, 1), causal, HOPPER, Kernel::FusedClusterTile { backward, held, window: true }),
        (lines(64, 327_681, 1), any, HOPPER, Kernel::FusedRows { backward, scores: false }),
        (lines(64, 20_483, 1), any, TURING, Kernel::FusedRows { backward, scores: false }),
        (lines(64, 600_001, 1), any, HOPPER, Kernel::FusedRows { backward, scores: false }),
        (lines(64, 77, 1), FusedKind { backward: true, ..any }, HOPPER, gradients_of_any),
        (lines(64, 12_301, 1), FusedKind { backward: true, ..any }, HOPPER, cluster_gradients(Held::Logits)),
        (lines(64, 128_256, 1), gradients, HOPPER, cluster_gradients(Held::Scores)),
        (lines(64, 128_256, 1), gradients, TURING, Kernel::FusedRows { backward: true, scores: false }),
        (lines(64, 8195, 1), FusedKind { backward: true, ..masked }, HOPPER, scores_of_gradients),
        (lines(64, 50_257, 1), FusedKind { backward: true, ..masked }, HOPPER, cluster_gradients(Held::Scores)),
        (
            lines(1 << 20, 512, 1),
            FusedKind { narrow: false, ..packs },
            HOPPER,
            Kernel::FusedRows { backward, scores: false },
        ),
        (lines(64, 100, 64), any, HOPPER, Kernel::FusedGroup { backward, scores: false, pairs: false }),
        (lines(64, 100, 64), alone, HOPPER, Kernel::FusedGroup { backward, scores: true, pairs: false }),
        (lines(64, 1000, 64), alone, HOPPER, Kernel::FusedGroup { backward, scores: true, pairs: true }),
        (lines(64, 1000, 64), column, HOPPER, Kernel::FusedBackwardColumn { columns: 2, rows: 16, whole: true }),
        (lines(64, 7, 64), column, TURING, Kernel::FusedBackwardColumn { columns: 4, rows: 8, whole: true }),
        (lines(64, 20_000, 64), column, HOPPER, Kernel::FusedGroup { backward: true, scores: true, pairs: true }),
        (
            lines(64, 1000, 64),
            FusedKind { alignment: 2, ..alone },
            HOPPER,
            Kernel::FusedGroup { backward, scores: true, pairs: false },
        ),
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
    let sizes = [1, 3, 31, 100, 128, 129, 1000, 4096, 4097, 8193, 32_768, 100_003, 1 << 20, 1 << 33];
    let families = Family::ALL.map(|(_, family)| Some(family)).into_iter().chain([None]);
    let shapes = lengths().chain([1 << 33]).flat_map(|len| sizes.iter().map(move |&outer| (len, outer)));
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
            (64, false, true, 2),
            (64, true, true, 2),
            (64, true, false, 4),
            (65, false, false, 2),
            (100, true, false, 8),
        ] {
            let lines = lines(outer, len, inner);
            let kind = FusedKind {
                backward,
                whole,
                alignment: if whole { 16 } else { size },
                queries: if size == 8 || outer == 129 { 100 } else { 0 },
                scores: outer != 128 && outer != 100_003,
                capped: outer == 128 && len % 2 == 1,
                scale_alone: outer == 128 && len % 2 == 0,
                column: backward && outer == 128 && len % 4 == 0,
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
                Kernel::FusedWarp { lines, .. } | Kernel::FusedBlock { lines, .. } => {
                    let is_capped = lines == FusedLines::Capped;
                    assert_eq!(is_capped, backward && kind.capped, "{what}");
                    fused_count(backward, lines, size)
                }
                _ => (0, 0),
            };
            assert!((1..=MAX_GRID).contains(&grid) && (WARP..=512).contains(&block), "{what}");
            assert!(block.is_multiple_of(WARP) && grid.is_multiple_of(plan.cluster as usize), "{what}");
            assert!(kind.narrow || !plan.is_narrow(), "{what}");
            match plan.kernel {
                Kernel::FusedWarp { lines: ScoresWindow, .. } => {
                    assert!(count * WARP >= len && grid * (block / WARP) >= lines.count() && block == 128, "{what}");
                }
                Kernel::FusedWarp { .. } => {
                    assert!(count << plan.parameter >= len && plan.parameter <= 5, "{what}");
                    assert!(grid * (block >> plan.parameter) >= lines.count() && block == 128, "{what}");
                }
                Kernel::FusedBlock { .. } => {
                    assert!(count * block >= len && block <= most_threads && grid == lines.count(), "{what}");
                }
                Kernel::FusedTile { held, many, window, .. } => {
                    assert_eq!(window, kind.queries > 0, "{what}");
                    assert!(!many || size == 2 && !backward && held != Held::Scores, "{what}");
                    let (most, most_threads) =
                        if many { (FUSED_TILE_MANY, WARP_BLOCK) } else { fused_tile_count(backward, held, size) };
                    assert_eq!(held == Held::CappedLogits, kind.capped, "{what}");
                    let units = if size == 2 { len / 2 } else { len };
                    let (threads, here) = threads_and_lines(plan);
                    assert!(plan.parameter == WHOLE_BLOCK || plan.parameter <= 5 && block == 128, "{what}");
                    let small = device(forced).compute_capability >= 90 && !backward && size < 8;
                    let most_threads = if small { most_threads.min(SMALL_TILE) } else { most_threads };
                    assert!(most * threads >= units && block <= most_threads, "{what}");
                    assert!(grid * here >= lines.count() && !whole, "{what}");
                    let (tile, tiles) = (here * len * size + 128 + 16, if backward { 2 } else { 1 });
                    assert!(plan.shared_bytes as usize >= tiles * tile + here * mask_bytes(kind, len, size), "{what}");
                    assert!(!plan.shares_mask || here > 1 && kind.masked_alike == 1000 && size == 2, "{what}");
                    assert!(plan.shared_bytes <= 48 << 10, "{what}");
                }
                Kernel::FusedCluster { .. } | Kernel::FusedClusterScores => {
                    let cluster = plan.cluster as usize;
                    let count = match plan.kernel {
                        Kernel::FusedCluster { count } => count,
                        _ => scores_count(backward, size).expect("of this size").0,
                    };
                    assert!((2..=WIDE_CLUSTER).contains(&cluster) && count * block * cluster >= len, "{what}");
                    let known = fused_cluster_counts(size).iter().any(|&(known, _)| known == count);
                    assert!(plan.kernel == Kernel::FusedClusterScores || known, "{what}");
                    assert!(plan.kernel != Kernel::FusedClusterScores || kind.queries == 0 && block <= 256, "{what}");
                    assert!(whole && !backward && grid == lines.count() * cluster, "{what}");
                }
                Kernel::FusedClusterTile { held, window, .. } => {
                    assert_eq!(window, kind.queries > 0, "{what}");
                    let cluster = plan.cluster as usize;
                    // As `TileCluster` of `kernels/hopper/fused_cluster_tile.cuh` has it.
                    let part = len.div_ceil(cluster).next_multiple_of(8);
                    let (most, most_threads) = fused_tile_count(backward, held, size);
                    assert_eq!(held == Held::Scores, size == 2 && kind.scores, "{what}");
                    assert!(held == Held::Scores || (held == Held::CappedLogits) == kind.capped, "{what}");
                    assert!(cluster <= WIDE_CLUSTER && cluster.is_power_of_two() && cluster > 1, "{what}");
                    assert!(cluster * part >= len && (cluster - 1) * part < len, "{what}");
                    let units = if size == 2 { part / 2 } else { part };
                    assert!(most * block >= units && block <= most_threads, "{what}");
                    assert!(grid == lines.count() * cluster && kind.tiles, "{what}");
                    assert!(backward || !whole || size == 4, "{what}");
                    let (tile, tiles) = (part * size + 128 + 16, if backward { 2 } else { 1 });
                    assert!(plan.shared_bytes as usize >= tiles * tile + mask_bytes(kind, part, size), "{what}");
                    assert!(plan.shared_bytes <= 110 << 10, "{what}");
                    assert!(!plan.shares_mask, "{what}");
                }
                Kernel::FusedGroup { .. } | Kernel::FusedRows { .. } => check_group(lines, plan),
                Kernel::FusedBackwardColumn { columns, rows, whole } => {
                    assert!(kind.column, "{what}");
                    let elements = Elements::alike(size, kind.alignment);
                    check_held_columns(lines, elements, plan, (columns, rows, whole), 4);
                }
                _ => panic!("not checked: {what}"),
            }
        }
    }
}

/// Bytes of a line's mask where that is in shared memory, which may begin at any of 16 bytes.
fn mask_bytes(kind: FusedKind, len: usize, size: usize) -> usize {
    if kind.masked_alike > 0 && size == 2 {
        len + 15
    } else {
        0
    }
}

/// The threads of a line in a tile, and the lines of a block.
fn threads_and_lines(plan: Plan) -> (usize, usize) {
    let block = plan.block as usize;
    match plan.parameter {
        WHOLE_BLOCK => (block, 1),
        shift => (1 << shift, block >> shift),
    }
}

/// Every line is of one sum's terms, once, and of the line of the bias that it has.
#[test]
fn sums_of_a_bias_take_each_line_once() {
    let packs = FusedKind { backward: true, ..PACKS };
    let tiles = FusedKind { whole: false, tiles: true, ..packs };
    let shapes: &[&[usize]] = &[
        &[2, 8],
        &[300, 64],
        &[3, 5, 2048],
        &[17, 3, 4, 512],
        &[40, 1, 6, 8],
        &[2, 3, 2, 5, 4096],
        &[1, 70, 2, 8192],
        &[2, 3, 49, 49],
        &[700, 3, 49, 49],
        &[2, 2, 3, 1001],
        &[50, 70, 1001],
    ];
    let (mut in_parts, mut whole, mut in_tiles) = (0, 0, 0);
    for dims in shapes {
        let (&len, outer) = dims.split_last().unwrap();
        let lines = lines(outer.iter().product(), len, 1);
        let choices = (0..1 << outer.len()).flat_map(|choice| [packs, tiles].map(|kind| (choice, kind)));
        for (choice, kind, size, multiprocessors) in
            choices.flat_map(|(choice, kind)| [(4, 132), (2, 1), (8, 2)].map(|(size, sms)| (choice, kind, size, sms)))
        {
            let is_kept = |d: usize| choice >> d & 1 == 1;
            let mut kept: Vec<usize> = (0..outer.len()).map(|d| if is_kept(d) { outer[d] } else { 1 }).collect();
            kept.push(len);
            let of = SumOver::new(dims, &kept).of_lines(len).unwrap();
            assert_eq!((of.sums() * len, of.sums() * of.terms()), (kept.iter().product(), lines.count()));
            let device = DeviceFacts { multiprocessors, ..HOPPER };
            let what = format!("{dims:?} {kept:?} {size} {kind:?}");
            let Some(FusedBiasPlan { plan, lines_of_part, parts }) = fused_bias(lines, &of, kind, size, device) else {
                let (count, most_threads) = fused_bias_count(size);
                let few = of.terms() == 1 || lines.elem_count() < multiprocessors << 14;
                let apart = of.kept.iter().any(|dim| dim.stride != 1) || of.sums() < 64;
                let long = if kind.whole {
                    len > count * most_threads
                } else {
                    size == 8 || 4 * (4 * size + 4) * len > device.shared_bytes
                };
                assert!(few || long || !kind.whole && apart, "{what}");
                continue;
            };
            assert!(lines_of_part <= 16, "{what}");
            if plan.kernel.needs_hopper() {
                assert_eq!(fused_bias(lines, &of, kind, size, DeviceFacts { multiprocessors, ..TURING }), None);
            }
            *if parts > 1 { &mut in_parts } else { &mut whole } += 1;
            // As `kernels/fused_bias.cuh` and `kernels/hopper/fused_backward_bias_tile.cu` go through them: by each group of threads the lines that have one of the
            // bias, or by each block those that have several.
            let mut taken = vec![0; lines.count()];
            let mut take = |part: usize, of_bias: usize| {
                let (first, line) = (part * lines_of_part, offset(&of.kept, of_bias));
                assert!(first < of.terms());
                for term in first..(first + lines_of_part).min(of.terms()) {
                    let line = line + offset(&of.summed, term);
                    taken[line] += 1;
                    let (mut rest, mut expected, mut stride) = (line, 0, 1);
                    for d in (0..outer.len()).rev() {
                        expected += if is_kept(d) { rest % outer[d] * stride } else { 0 };
                        stride *= kept[d];
                        rest /= outer[d];
                    }
                    assert_eq!(of_bias, expected, "{what} line {line}");
                }
            };
            let block = plan.block as usize;
            if let Kernel::FusedBiasTile { window } = plan.kernel {
                assert_eq!(window, kind.queries > 0, "{what}");
                in_tiles += 1;
                let (most, most_threads) = fused_bias_tile_count(size);
                let (threads, here) = threads_and_lines(plan);
                assert!(most * threads >= tile_units(lines, size) && block <= most_threads && !kind.whole, "{what}");
                let bytes = 4 * (here * len * size + 128 + 16) + (here * len + 1) * 4;
                assert!((bytes..device.shared_bytes / 3).contains(&(plan.shared_bytes as usize)), "{what}");
                // A line is what its place is, and those of a tile are neighbours.
                assert!((0..of.sums()).all(|line| offset(&of.kept, line) == line), "{what}");
                let tiles = of.sums().div_ceil(here);
                assert_eq!(plan.blocks(), tiles * parts, "{what}");
                for number in 0..plan.blocks() {
                    let from = number % tiles * here;
                    (from..(from + here).min(of.sums())).for_each(|of_bias| take(number / tiles, of_bias));
                }
            } else {
                let (count, most_threads) = fused_bias_count(size);
                let threads = if plan.kernel == Kernel::FusedBiasWarp { 1 << plan.parameter } else { block };
                assert!(threads * count >= len && block <= most_threads && kind.whole, "{what}");
                let groups = of.sums() * parts;
                assert!(plan.blocks() * (block / threads) >= groups, "{what}");
                (0..groups).for_each(|group| take(group / of.sums(), group % of.sums()));
            }
            assert!(taken.iter().all(|&times| times == 1), "{what}");
        }
    }
    assert!(in_parts > 9 && whole > 9 && in_tiles > 9);
}

/// Every element is of one thread's terms, once, and of the sum that it belongs to: what `kernels/sum.cu` goes through.
#[test]
fn sums_take_each_element_once() {
    let shapes: &[&[usize]] = &[
        &[1],
        &[7],
        &[300, 4],
        &[3, 1000],
        &[2, 5, 33, 8],
        &[40, 6, 49],
        &[9, 3, 5, 7, 2],
        &[5000],
        &[2, 3000, 3],
        &[8, 64, 64],
    ];
    for dims in shapes {
        for choice in 0..1 << dims.len() {
            let kept: Vec<usize> =
                dims.iter().enumerate().map(|(d, &size)| if choice >> d & 1 == 1 { size } else { 1 }).collect();
            let of = SumOver::new(dims, &kept);
            for (size, multiprocessors) in [(4, 132), (8, 132), (4, 1), (8, 2)] {
                check_sum(&of, size, DeviceFacts { multiprocessors, ..HOPPER });
            }
        }
    }
}

fn check_sum(of: &SumOver, size: usize, device: DeviceFacts) {
    let plan = sum(of, size, device);
    let what = format!("{of:?} of {size} bytes, {plan:?}");
    let ((blocks, parts), count) = (plan.plan.grid, plan.count);
    assert!(plan.plan.block as usize == SUM_THREADS && plan.shift <= 8 && parts < 1 << 16, "{what}");
    assert_eq!(plan.plan.kernel, Kernel::Sum { packs: count > 1 }, "{what}");
    assert!(count == 1 || count * size == PACK_BYTES, "{what}");
    let (group, slots) = (1 << plan.shift, SUM_THREADS >> plan.shift);
    let outer = &of.summed[..of.summed.len().saturating_sub(1)];
    // The sum that each element was added to
    let mut sum_of = vec![None; of.sums() * of.terms()];
    for (block, part, thread) in (0..blocks as usize).flat_map(|block| {
        (0..parts as usize).flat_map(move |part| (0..SUM_THREADS).map(move |thread| (block, part, thread)))
    }) {
        let (slot, lane) =
            if plan.across { (thread % slots, thread / slots) } else { (thread / group, thread % group) };
        let number = (block * slots + slot) * count;
        if number >= of.sums() {
            continue;
        }
        let (of_runs, of_run) = (part / plan.parts_of_run, part % plan.parts_of_run);
        let first_run = of_runs * plan.runs_of_part;
        let end = ((of_run + 1) * plan.run_of_part).min(plan.run.size);
        for run in first_run..(first_run + plan.runs_of_part).min(plan.runs) {
            for term in (of_run * plan.run_of_part + lane..end).step_by(group) {
                let at = offset(&of.kept, number) + offset(outer, run) + term * plan.run.stride;
                assert!(at.is_multiple_of(count), "{what}");
                for n in 0..count {
                    assert_eq!(sum_of[at + n].replace(number + n), None, "{what}");
                }
            }
        }
    }
    for number in 0..of.sums() {
        for term in 0..of.terms() {
            assert_eq!(sum_of[offset(&of.kept, number) + offset(&of.summed, term)], Some(number), "{what}");
        }
    }
}

#[test]
fn sums_fill_the_device() {
    let plan = |dims: &[usize], kept: &[usize]| {
        let plan = sum(&SumOver::new(dims, kept), 4, HOPPER);
        (plan.plan.grid, plan.count, plan.shift)
    };
    // A bias of all batches: no parts, and each thread a pack
    assert_eq!(plan(&[8, 16, 2048, 2048], &[1, 16, 2048, 2048]), ((65_536, 1), 4, 0));
    // Of all queries of all heads, a few columns, and one number
    for (dims, kept) in [(&[8, 16, 2048, 2048][..], &[1, 1, 1, 2048][..]), (&[1 << 20, 4], &[1, 4]), (&[1 << 22], &[1])]
    {
        let ((blocks, parts), ..) = plan(dims, kept);
        assert!(blocks * parts > 200, "{dims:?} {blocks} {parts}");
    }
    // Sinks
    assert_eq!(plan(&[8, 16, 2048, 1], &[1, 16, 1, 1]).0 .0, 16);
}

/// Every line's loss and gradient has a thread, and the parts of a sum are no more than a block's threads.
#[test]
fn losses_of_lines() {
    for lines in lengths() {
        for kernel in [Kernel::LossOfEachLine, Kernel::LossOfAllLines, Kernel::LossOfLinesBackward] {
            let plan = loss_of_lines(kernel, lines);
            let threads = plan.grid.0 as usize * plan.block as usize;
            assert!(kernel == Kernel::LossOfAllLines || threads >= lines, "{lines} {plan:?}");
            assert!(
                (1..=MAX_BLOCK).contains(&(plan.block as usize)) && plan.block.is_multiple_of(WARP as u32),
                "{plan:?}"
            );
        }
        let parts = loss_of_parts(lines).map(|plan| plan.grid.0);
        assert!(parts.map_or(lines <= 1 << 13, |parts| (2..=1024).contains(&parts)), "{lines} {parts:?}");
    }
}

/// The kernels of log-sum-exp, losses and top-k: every element of every line has a thread, within what blocks may be.
#[test]
fn plans_beside_softmax_cover_the_lines() {
    let sizes = [1, 2, 3, 31, 33, 128, 511, 512, 513, 1000, 4096, 32_768, 100_003, 128_256, 1 << 24];
    for (outer, len, inner) in lengths().flat_map(|len| sizes.iter().flat_map(move |&n| [(n, len, 1), (3, len, n)])) {
        let lines = lines(outer, len, inner);
        if lines.elem_count() > 1 << 38 {
            continue; // more than a GPU's memory
        }
        for elements in [F32, BF16, Elements { size: 8, ..F32 }] {
            for (plan, most) in [
                (statistics(lines, elements, false, HOPPER), if inner > 1 { 512 } else { 1024 }),
                (statistics(lines, elements, true, HOPPER), if inner > 1 { 512 } else { 1024 }),
                (statistics(lines, elements, false, TURING), if inner > 1 { 512 } else { 1024 }),
                (loss_backward(lines, elements, HOPPER), 512),
                (top_k(lines, len.min(50), elements.size, HOPPER), 512),
                (top_k(lines, len.min(MOST_TOP_K), elements.size, HOPPER), 512),
                (top_k_backward(lines), 128),
            ] {
                let what = format!("{lines:?} {elements:?} {plan:?}");
                let (grid, block, group) = (plan.grid.0 as usize, plan.block as usize, 1 << plan.parameter.min(5));
                assert!((1..=MAX_GRID).contains(&grid) && (1..=65_535).contains(&plan.grid.1), "{what}");
                assert!((WARP..=most).contains(&block) && block.is_multiple_of(WARP), "{what}");
                let here = match plan.kernel {
                    Kernel::StatisticsColumns { .. } | Kernel::LossBackwardNarrowColumns => {
                        check_group(lines, plan);
                        continue;
                    }
                    Kernel::StatisticsThread { pairs, held } => {
                        assert!(!held || len <= 32 && (pairs || elements.size == 4), "{what}");
                        grid * block * if pairs { 2 } else { 1 }
                    }
                    Kernel::LossBackwardColumns { pairs } => grid * block * if pairs { 2 } else { 1 },
                    Kernel::StatisticsWarp => {
                        assert!(
                            (len * elements.size).is_multiple_of(16) && len * elements.size / 16 <= 4 * group,
                            "{what}"
                        );
                        grid * (block / group)
                    }
                    Kernel::LossBackwardGroups => {
                        let group = 1 << plan.parameter;
                        assert!(len * elements.size <= group * LOSS_PACKS * 16 && group <= block, "{what}");
                        grid * (block / group)
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
                    Kernel::TopKBackward => {
                        let parts = top_k_backward_parts(lines);
                        assert!(parts * 1024 >= len && (parts == 1 || group == WARP), "{what}");
                        grid * (block / group) / parts
                    }
                    Kernel::TopKShortRows { most } => {
                        assert!(len <= usize::from(most) && (most <= 256 || elements.size < 8), "{what}");
                        grid * block / (usize::from(most) / 4).min(WARP)
                    }
                    Kernel::TopKRows => {
                        assert!(
                            block.is_power_of_two() && (SELECT_BYTES..48 << 10).contains(&(plan.shared_bytes as usize)),
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

/// Of GPUs whose blocks have 99 KB, as those of compute capability 12.0, where clusters are of eight.
#[test]
fn strips_of_blocks_with_less_memory() {
    let mut strips = 0;
    for (compute_capability, largest) in [(100, 16), (120, 8)] {
        let device = DeviceFacts { compute_capability, multiprocessors: 170, shared_bytes: 99 << 10, ..HOPPER };
        for (outer, len, inner) in
            [(31, 3073, 512), (128, 3600, 128), (64, 4096, 256), (8, 4096, 4096), (64, 1000, 128)]
        {
            for elements in [F32, BF16, Elements { input_alignment: 2, ..BF16 }] {
                let plan = softmax(lines(outer, len, inner), None, elements, device);
                let what = format!("{outer} x {len} x {inner} of {elements:?}: {plan:?}");
                assert!(plan.shared_bytes as usize <= device.shared_bytes && plan.cluster <= largest, "{what}");
                strips += usize::from(matches!(plan.kernel, Kernel::Strip(_)));
            }
        }
    }
    assert!(strips > 10, "{strips}");
}

/// As many threads as there is work for, and several blocks where there are few lines.
#[test]
fn groups_of_threads() {
    let plan = |outer, len, inner| {
        let plan = group(Kernel::BackwardGroup { pairs: false }, lines(outer, len, inner), 2, 2, HOPPER);
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
    // Two lines of half precision at a time, where all rows begin at words
    let of_pairs = |lines, elements| {
        [
            // Of lines too long for registers
            softmax_backward(Lines { len: 20_000, ..lines }, elements, HOPPER).kernel
                == Kernel::BackwardGroup { pairs: true },
            statistics(lines, elements, true, HOPPER).kernel == Kernel::StatisticsColumns { pairs: true },
            statistics(lines, elements, false, HOPPER).kernel == Kernel::StatisticsThread { pairs: true, held: false },
            loss_backward(lines, elements, HOPPER).kernel == Kernel::LossBackwardColumns { pairs: true },
        ]
    };
    assert_eq!(of_pairs(lines(8, 150, 16_384), BF16), [true; 4]);
    assert_eq!(of_pairs(lines(8, 150, 16_384), F32), [false; 4]);
    assert_eq!(of_pairs(lines(8, 150, 16_383), BF16), [false; 4]);
    assert_eq!(of_pairs(lines(8, 150, 16_384), Elements { input_alignment: 2, ..BF16 }), [false; 4]);
    // Much to do with a line takes many of them.
    assert_eq!(of_pairs(lines(64, 1000, 128), BF16), [true, false, false, true]);
    assert_eq!(of_pairs(lines(2048, 1000, 20), BF16), [true, false, false, false]);
    let statistics = group(Kernel::StatisticsColumns { pairs: false }, lines(1, 1 << 20, 60), 2, 0, HOPPER);
    assert_eq!((statistics.cluster, statistics.parts()), (16, 1));
    let of_turing = |len| group(Kernel::BackwardGroup { pairs: false }, lines(1, len, 1), 4, 2, TURING);
    assert_eq!((of_turing(20_000).cluster, of_turing(20_000).parts()), (1, 1));
    assert!(of_turing(1_000_000).parts() > TURING.multiprocessors / 2);
    // Of f32 twice as many threads have a line, so that half as many lines are in the cache.
    let of_f32 = group(Kernel::BackwardGroup { pairs: false }, lines(8191, 4097, 1), 4, 2, HOPPER);
    assert_eq!(of_f32.parameter, group_shape(256, 1));
}

#[test]
fn long_lines_are_shared_by_a_block_and_few_by_a_large_one() {
    let plan = |outer, len, elements| statistics(lines(outer, len, 1), elements, false, HOPPER);
    assert_eq!(plan(4096, 128_256, F32), super::plan(Kernel::StatisticsRows, 4096, STATISTICS_BLOCK));
    assert_eq!(plan(8192, 4096, BF16).block, 32);
    assert_eq!(plan(8192, 4096, F32).block, 64);
    assert_eq!((plan(1, 1 << 24, F32).block as usize, plan(1, 1 << 24, F32).cluster), (MAX_BLOCK, 16));
    assert_eq!((plan(1, 128_256, BF16).block, plan(1, 128_256, BF16).cluster), (512, 8));
    assert_eq!((plan(8, 128_256, F32).block, plan(8, 128_256, F32).cluster), (1024, 8));
    assert_eq!(plan(64, 128_256, F32).cluster, 1);
    assert_eq!(plan(8192, 64, F32).kernel, Kernel::StatisticsWarp);
    assert_eq!(plan(8192, 65, F32).kernel, Kernel::StatisticsTile);
    assert_eq!(statistics(lines(8192, 64, 1), F32, true, HOPPER).kernel, Kernel::StatisticsTile);
    let backward = |outer, len, elements| {
        let plan = loss_backward(lines(outer, len, 1), elements, HOPPER);
        (plan.kernel, plan.parameter)
    };
    assert_eq!(backward(4096, 128_256, F32), (Kernel::LossBackwardRows, 32));
    assert_eq!(backward(65_536, 1000, BF16), (Kernel::LossBackwardGroups, 5));
    assert_eq!(backward(1 << 20, 16, F32), (Kernel::LossBackwardGroups, 1));
    assert_eq!(backward(1 << 20, 10, BF16), (Kernel::LossBackwardShortRows, 2));
    assert_eq!(top_k(lines(4096, 64, 1), 8, 4, HOPPER).kernel, Kernel::TopKShortRows { most: 64 });
    assert_eq!(top_k(lines(4096, 384, 1), 8, 2, HOPPER).kernel, Kernel::TopKShortRows { most: 512 });
    assert_eq!(top_k(lines(4096, 513, 1), 8, 4, HOPPER).kernel, Kernel::TopKShortRows { most: 1024 });
    assert_eq!(top_k(lines(4096, 1000, 1), 1000, 4, HOPPER).kernel, Kernel::TopKRows);
    assert_eq!(top_k(lines(4096, 257, 1), 8, 8, HOPPER).kernel, Kernel::TopKRows);
    assert_eq!(top_k(lines(8, 128_256, 1), 50, 4, HOPPER).cluster, 16);
    assert_eq!(top_k(lines(64, 128_256, 1), 50, 2, HOPPER).cluster, 2);
    assert_eq!(top_k(lines(1000, 128_256, 1), 50, 4, HOPPER).cluster, 1);
    let threads = |outer, len, k| top_k(lines(outer, len, 1), k, 4, HOPPER).block;
    assert_eq!([threads(4096, 1025, 8), threads(4096, 1025, 50), threads(4096, 1025, 1000)], [64, 128, 512]);
    assert_eq!([threads(1024, 50_257, 50), threads(256, 32_000, 50), threads(1, 32_000, 50)], [256, 512, 512]);
}

/// Groups of threads: all lines have one, with a thread for each that lies side by side, and a block's threads know its cluster's blocks.
fn check_group(lines: Lines, plan: Plan) {
    let what = format!("{lines:?} {plan:?}");
    let (grid, block, cluster) = (plan.grid.0 as usize, plan.block as usize, plan.cluster as usize);
    let (threads, across) = threads_and_across(plan.parameter);
    assert!(across <= threads && block.is_multiple_of(threads) && block <= GROUP_BLOCK, "{what}");
    assert!(grid.is_multiple_of(cluster) && cluster.is_power_of_two() && cluster <= WIDE_CLUSTER, "{what}");
    assert!(cluster == 1 || (threads == block && cluster * across <= threads), "{what}");
    let apart = plan.kernel == Kernel::LossBackwardNarrowColumns || cluster == 1 && threads == block;
    assert!(plan.parts() == 1 || (apart && plan.parts() < 1 << 16), "{what}");
    let groups = plan.groups(lines);
    assert!(groups * across * plan.lines_of_thread() >= lines.count(), "{what}");
    assert!(grid / cluster * (block / threads) >= groups || grid > MAX_GRID - cluster, "{what}");
}

/// Lines side by side in registers, with so many numbers known of a part of each.
fn check_held_columns(
    lines: Lines,
    elements: Elements,
    plan: Plan,
    (columns, rows, whole): (usize, usize, bool),
    numbers: usize,
) {
    let what = format!("{lines:?} {plan:?}");
    let (grid, block, cluster) = (plan.grid.0 as usize, plan.block as usize, plan.cluster as usize);
    let across = 1 << plan.parameter;
    assert!(across <= WARP || (across <= block && lines.len <= rows), "{what}");
    assert!(block.is_multiple_of(across) && block <= 256 && cluster <= WIDE_CLUSTER, "{what}");
    assert!(block / across * rows * cluster >= lines.len, "{what}");
    assert!(grid / cluster * across * columns >= lines.count(), "{what}");
    let alignment = elements.input_alignment.min(elements.output_alignment);
    let aligned = lines.inner.is_multiple_of(columns) && alignment.is_multiple_of(columns * elements.size);
    assert!(if whole { aligned } else { columns == 2 && elements.size == 2 }, "{what}");
    let parts = (block / WARP + cluster + 1) * across.min(WARP) * columns;
    assert!((parts * numbers * elements.size.max(4)..64 << 10).contains(&(plan.shared_bytes as usize)), "{what}");
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
            assert!(size == 1 || lines.inner.is_multiple_of(2) || (lines.len.is_multiple_of(2) && !strips), "{what}");
        }
        Kernel::Run { len } => {
            assert!(grid * block * (16 / elements.size) >= lines.count() && (2..8).contains(&len), "{what}");
            assert!(len == lines.len && lines.inner == 1 && block == 128, "{what}");
            let whole = elements.input_alignment.min(elements.output_alignment).is_multiple_of(16);
            assert!(plan.parameter == whole as i32, "{what}");
        }
        Kernel::FewRows { columns, rows, whole } => {
            let across = plan.parameter as usize;
            assert!(across * columns >= lines.inner && (lines.len..=32).contains(&rows) && rows >= 4, "{what}");
            assert!(grid * block >= across * lines.outer && block == 128, "{what}");
            let alignment = elements.input_alignment.min(elements.output_alignment);
            assert!(!whole || lines.inner.is_multiple_of(columns), "{what}");
            assert!(!whole || alignment.is_multiple_of(columns * elements.size), "{what}");
            assert!(whole || columns == 1 || across.is_multiple_of(WARP), "{what}");
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
        Kernel::Column { columns, rows, of } => {
            assert!(side_by_side <= WARP && block.is_multiple_of(side_by_side) && plan.cluster <= 16, "{what}");
            assert!(block / side_by_side * rows * plan.cluster as usize >= lines.len, "{what}");
            let most = match (elements.size, columns, rows) {
                (2, 2, 16) => 128,
                (2, 4, _) => 512,
                _ => 256,
            };
            assert!(block <= most, "{what}");
            assert!(grid / plan.cluster as usize * side_by_side * columns >= lines.inner * lines.outer, "{what}");
            let read = elements.input_alignment.is_multiple_of(columns * elements.size);
            let written = lines.inner.is_multiple_of(columns)
                && elements.output_alignment.is_multiple_of(columns * elements.size);
            assert!(of == Rows::Any || (written && (read || of == Rows::Words)), "{what}");
            assert!(plan.shared_bytes < 48 << 10, "{what}");
        }
        Kernel::Strip(strips) => {
            let (rows, bytes) = (plan.parameter as usize, strips.bytes(elements.size));
            let boxes = rows.div_ceil(MAX_BOX_ROWS);
            assert!(rows * plan.cluster as usize >= lines.len && plan.cluster <= 16, "{what}");
            assert!(rows.is_multiple_of(8 * boxes) && elements.size < 8, "{what}");
            assert!(strips.count(lines, elements.size) >= grid / plan.cluster as usize, "{what}");
            assert!(plan.shared_bytes as usize <= device.shared_bytes, "{what}");
            // As many blocks as a multiprocessor is to have, and what the system takes of each
            assert!(512 / plan.block * (plan.shared_bytes + 1024) <= 228 << 10, "{what}");
            if strips == Strips::Odd {
                // Each warp has rows that are whole sectors apart. All columns are in what is written of a strip, wherever a row begins.
                assert!(block == 1024 / elements.size && rows <= block && !elements.in_place, "{what}");
                let (written, sector) = (224 / elements.size, 32 / elements.size);
                let side_by_side = strips.count(lines, elements.size) / lines.outer;
                assert!(side_by_side * written >= lines.inner + sector - 1, "{what}");
            } else {
                assert!(rows * bytes <= 1 << 16 && block == 256, "{what}");
                assert!(strips == Strips::Any || elements.input_alignment.is_multiple_of(16), "{what}");
                assert!((lines.inner * elements.size).is_multiple_of(16), "{what}");
            }
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
        // Blocks take further lines in turn, where there are more than a grid has.
        Kernel::Reduce | Kernel::OnlineRows | Kernel::OnlineColumns => {
            let lines_at_once = if plan.kernel == Kernel::Reduce { 1 } else { block };
            assert!(grid * lines_at_once >= lines.count() || grid == MAX_GRID, "{what}");
        }
        _ => panic!("not checked: {what}"),
    }
}
