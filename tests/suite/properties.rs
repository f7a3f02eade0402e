//! Random shapes, dimensions, layouts and values, drawn so that they fall on all sides of where kernels and CPU paths change.

use crate::support::{
    check, check_result, config, devices, gpu, gpu_for, normal, tensor, values, within_cap, Op, DTYPES,
};
use crate::{gradients, logsumexp, loss, topk};
use candle_core::{DType, Device, Result, Tensor};
use candle_softmax::{loss::Reduction, ops};
use proptest::prelude::*;

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug)]
enum View {
    Contiguous,
    /// From the middle of a larger tensor
    Offset,
    /// Every line interrupted
    Narrowed,
    /// Two dimensions swapped
    Transposed,
    /// One slice seen many times
    Broadcast,
}

#[derive(Clone, Copy, Debug)]
enum Values {
    Normal(f64),
    /// Normal, with −∞, the ends of the dtype, zeros and tiny numbers sprinkled in
    Extreme,
    /// Rising along memory
    Rising,
}

fn draw(kind: Values, count: usize, dtype: DType, seed: u64) -> Vec<f64> {
    let end = match dtype {
        DType::F16 => 60_000.0,
        DType::F64 => 1e300,
        _ => 3e38,
    };
    match kind {
        Values::Normal(scale) => normal(count, scale, seed),
        Values::Rising => (0..count).map(|i| i as f64 * 0.01).collect(),
        Values::Extreme => {
            let special = [f64::NEG_INFINITY, end, -end, 0.0, -0.0, 1e-40, -1e-300, 1000.0];
            let mut values = normal(count, 20.0, seed);
            for (i, place) in (seed as usize % 7..count).step_by(7).enumerate() {
                values[place] = special[i % special.len()];
            }
            values
        }
    }
}

fn build(
    shape: &[usize],
    dim: usize,
    view: View,
    kind: Values,
    dtype: DType,
    seed: u64,
    device: &Device,
) -> Result<Tensor> {
    let make = |shape: &[usize]| tensor(&draw(kind, shape.iter().product(), dtype, seed), shape, dtype, device);
    let mut larger = shape.to_vec();
    match view {
        View::Contiguous => make(shape),
        View::Offset => {
            larger[0] += 3;
            make(&larger)?.narrow(0, 2, shape[0])
        }
        View::Narrowed => {
            larger[dim] += 2;
            make(&larger)?.narrow(dim, 1, shape[dim])
        }
        View::Transposed => {
            larger.swap(0, dim);
            make(&larger)?.transpose(0, dim)
        }
        View::Broadcast => {
            let other = (dim + 1) % shape.len();
            larger[other] = 1;
            make(&larger)?.broadcast_as(shape)
        }
    }
}

/// From `skipped` elements on in a larger tensor.
fn side_by_side(
    shape: [usize; 3],
    skipped: usize,
    kind: Values,
    dtype: DType,
    seed: u64,
    device: &Device,
) -> Result<Tensor> {
    let count = shape.iter().product();
    let all = build(&[count + skipped], 0, View::Contiguous, kind, dtype, seed, device)?;
    all.narrow(0, skipped, count)?.reshape(&shape)
}

/// More strips of lines side by side than a GPU works on at once, so that it goes from one to another.
#[test]
fn more_strips_than_run_at_once() -> Result<()> {
    let Some(gpu) = gpu_for(0) else { return Ok(()) };
    for (dtype, shape) in [
        (DType::F32, [300, 260, 32]),
        (DType::BF16, [270, 258, 64]),
        (DType::F16, [9, 4100, 128]),
        (DType::F32, [70, 250, 501]),
        // Half precision in odd rows goes by strips where a tensor has more than the cache.
        (DType::BF16, [36, 1000, 889]),
        (DType::F16, [9, 4001, 895]),
    ] {
        let count = shape.iter().product();
        let offsets: &[usize] = if count > 20_000_000 { &[1] } else { &[0, 1, 8] };
        for &skipped in offsets {
            if within_cap(count) {
                for op in [Op::Softmax, Op::LogSoftmax] {
                    check(op, &side_by_side(shape, skipped, Values::Normal(3.0), dtype, 7, &gpu)?, 1)?;
                }
            }
        }
    }
    Ok(())
}

/// Few lines that fill a GPU, from the tensor's first element on and from the second: the ends of each are in chunks with others.
#[test]
fn lines_of_a_whole_gpu() -> Result<()> {
    let Some(gpu) = gpu_for(0) else { return Ok(()) };
    for (dtype, lines, len) in [
        (DType::F32, 1, 8_400_001),
        (DType::F32, 3, 1_500_007),
        (DType::F16, 1, 16_777_209),
        (DType::BF16, 2, 4_300_003),
    ] {
        for skipped in [0, 1] {
            if within_cap(lines * len) {
                let xs =
                    side_by_side([lines, len, 1], skipped, Values::Normal(3.0), dtype, len as u64, &gpu)?.squeeze(2)?;
                for op in [Op::Softmax, Op::LogSoftmax] {
                    check(op, &xs, 1)?;
                }
            }
        }
    }
    Ok(())
}

/// Half precision, from the tensor's first element on and from the second: short lines that fill the threads of a GPU of 132
/// multiprocessors once, long ones in clusters of many blocks, and lines side by side that two blocks share.
#[test]
fn halves_of_a_whole_gpu() -> Result<()> {
    let Some(gpu) = gpu_for(0) else { return Ok(()) };
    for (dtype, shape) in [
        (DType::BF16, [120_001, 32, 1]),
        (DType::F16, [131_000, 16, 1]),
        (DType::F16, [16_000, 248, 1]),
        (DType::BF16, [35, 121_000, 1]),
        (DType::F16, [9, 130_004, 1]),
        (DType::BF16, [40, 1000, 64]),
        (DType::F16, [33, 700, 96]),
    ] {
        for skipped in [0, 1] {
            if within_cap(shape.iter().product()) {
                let xs = side_by_side(shape, skipped, Values::Normal(3.0), dtype, 11, &gpu)?;
                let xs = if shape[2] == 1 { xs.squeeze(2)? } else { xs };
                for op in [Op::Softmax, Op::LogSoftmax] {
                    check(op, &xs, 1)?;
                }
            }
        }
    }
    Ok(())
}

/// So many short lines that each thread takes as many words of one as it has room for.
#[test]
fn many_lines_that_are_no_packs() -> Result<()> {
    let Some(gpu) = gpu_for(0) else { return Ok(()) };
    for (dtype, lines, len) in [
        (DType::BF16, 180_000, 7),
        (DType::F16, 140_000, 25),
        (DType::F16, 70_000, 77),
        (DType::BF16, 70_000, 72),
        (DType::BF16, 17_200, 333),
        (DType::F16, 4300, 1237),
        (DType::F32, 34_000, 77),
        (DType::F32, 4300, 600),
    ] {
        for (skipped, op) in [(0, Op::Softmax), (1, Op::LogSoftmax), (6, Op::Softmax)] {
            if within_cap(lines * len) {
                check(
                    op,
                    &side_by_side([lines, len, 1], skipped, Values::Normal(3.0), dtype, 8, &gpu)?.squeeze(2)?,
                    1,
                )?;
            }
        }
    }
    Ok(())
}

/// A length of one of the sizes that kernels and blocks change at.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![
        6 => 1usize..70,
        3 => 120usize..140,
        3 => 250usize..1100,
        2 => 4000usize..9000,
        1 => 16_000usize..17_000,
        1 => 60_000usize..140_000,
    ]
}

fn shape_and_dim() -> impl Strategy<Value = (Vec<usize>, usize)> {
    (1usize..=8, length(), any::<prop::sample::Index>(), prop::collection::vec(1usize..40, 8)).prop_map(
        |(rank, len, dim, mut sizes)| {
            sizes.truncate(rank);
            let dim = dim.index(rank);
            sizes[dim] = len;
            // Keep it to a few hundred thousand elements, taking from the other dimensions.
            let mut at = 0;
            while sizes.iter().product::<usize>() > 200_000 && sizes.iter().enumerate().any(|(i, &n)| i != dim && n > 1)
            {
                if at != dim {
                    sizes[at] = sizes[at].div_ceil(2);
                }
                at = (at + 1) % rank;
            }
            (sizes, dim)
        },
    )
}

fn views() -> impl Strategy<Value = View> {
    prop::sample::select(vec![View::Contiguous, View::Offset, View::Narrowed, View::Transposed, View::Broadcast])
}

fn kinds() -> impl Strategy<Value = Values> {
    let normals = [0.01, 1.0, 10.0, 200.0].map(Values::Normal);
    prop::sample::select([&normals[..], &[Values::Extreme, Values::Rising]].concat())
}

proptest! {
    // Fewer where the suite runs once more
    #![proptest_config(config(if std::env::var_os("CANDLE_SOFTMAX_CPU").is_some() { 40 } else { 150 }))]

    #[test]
    fn any_tensor((shape, dim) in shape_and_dim(), view in views(), kind in kinds(), dtype in prop::sample::select(DTYPES.to_vec()),
                  op in prop::sample::select(Op::ALL.to_vec()), seed in any::<u64>()) {
        if within_cap(shape.iter().product::<usize>() + 100) {
            for device in devices() {
                check(op, &build(&shape, dim, view, kind, dtype, seed, &device).unwrap(), dim).unwrap();
            }
        }
    }

    /// Many short lines: where a thread takes a line.
    #[test]
    fn many_short_lines(lines in 1000usize..20_000, len in 1usize..40, across: bool, kind in kinds(),
                        dtype in prop::sample::select(DTYPES.to_vec()), op in prop::sample::select(Op::ALL.to_vec()), seed in any::<u64>()) {
        let (shape, dim) = if across { ([len, lines], 0) } else { ([lines, len], 1) };
        if within_cap(lines * len) {
            for device in devices() {
                check(op, &build(&shape, dim, View::Contiguous, kind, dtype, seed, &device).unwrap(), dim).unwrap();
            }
        }
    }

    /// Contiguous lines wherever the first begins, and written over themselves, which leaves what is around them alone.
    #[test]
    fn rows(lines in 1usize..1000, len in prop_oneof![1usize..140, 140usize..2100], skipped in 0usize..9, kind in kinds(),
            dtype in prop::sample::select(DTYPES.to_vec()), op in prop::sample::select(Op::ALL.to_vec()), seed in any::<u64>()) {
        let lines = lines.min(100_000 / len);
        let count = lines * len;
        if within_cap(count) {
            for device in devices() {
                let all = build(&[skipped + count + 9], 0, View::Contiguous, kind, dtype, seed, &device).unwrap();
                let rows = |all: &Tensor| all.narrow(0, skipped, count).and_then(|part| part.reshape((lines, len))).unwrap();
                check(op, &rows(&all), 1).unwrap();
                let over = all.copy().unwrap();
                ops::softmax_inplace(&rows(&over), 1).unwrap();
                check_result(Op::Softmax, &rows(&all), 1, &rows(&over)).unwrap();
                let [before, after] = [&all, &over].map(|all| values(all).unwrap());
                for around in [0..skipped, skipped + count..skipped + count + 9] {
                    prop_assert!(before[around.clone()].iter().zip(&after[around]).all(|(a, b)| a.to_bits() == b.to_bits()));
                }
            }
        }
    }

    /// Lines side by side whose rows are whole packs of 16 bytes, wherever the first begins.
    #[test]
    fn strips(outer in 1usize..4, len in prop_oneof![16usize..66, 100usize..600, 900usize..1100, 2000usize..4500], packs in 1usize..40, skipped in 0usize..9,
              kind in kinds(), dtype in prop::sample::select(DTYPES.to_vec()), op in prop::sample::select(Op::ALL.to_vec()), seed in any::<u64>()) {
        let inner = packs * 8;
        let outer = if len > 1000 { 1 } else { outer };
        if within_cap(outer * len * inner) {
            for device in devices() {
                check(op, &side_by_side([outer, len, inner], skipped, kind, dtype, seed, &device).unwrap(), 1).unwrap();
            }
        }
    }

    /// The same of rows of any length, each of which begins elsewhere.
    #[test]
    fn odd_strips(outer in 1usize..4, len in prop_oneof![9usize..40, 120usize..600, 900usize..1100, 2000usize..4200], inner in 30usize..600, skipped in 0usize..9,
                  kind in kinds(), dtype in prop::sample::select(DTYPES.to_vec()), op in prop::sample::select(Op::ANY_DIM.to_vec()), seed in any::<u64>()) {
        let outer = if len > 600 { 1 } else { outer };
        let inner = inner.min(600_000 / (outer * len));
        if within_cap(outer * len * inner) {
            for device in devices() {
                check(op, &side_by_side([outer, len, inner], skipped, kind, dtype, seed, &device).unwrap(), 1).unwrap();
            }
        }
    }

    /// Lines side by side in rows of any length, few of them and many, wherever the first begins, and written over themselves.
    #[test]
    fn narrow_rows(outer in 1usize..400, len in prop_oneof![1usize..10, 10usize..70, 100usize..1100, 4000usize..40_000],
                   inner in prop_oneof![2usize..9, 9usize..70, 200usize..400], skipped in 0usize..9, kind in kinds(),
                   dtype in prop::sample::select(DTYPES.to_vec()), op in prop::sample::select(Op::ANY_DIM.to_vec()), seed in any::<u64>()) {
        let len = len.min(300_000 / inner);
        let outer = outer.min(100_000 / (len * inner)).max(1);
        if within_cap(outer * len * inner) {
            for device in devices() {
                let xs = side_by_side([outer, len, inner], skipped, kind, dtype, seed, &device).unwrap();
                check(op, &xs, 1).unwrap();
                // What is around them stays as it is.
                let (count, around) = (xs.elem_count(), Tensor::ones(9, dtype, &device).unwrap());
                let all = Tensor::cat(&[&around, &xs.flatten_all().unwrap(), &around], 0).unwrap();
                let over = all.narrow(0, 9, count).and_then(|over| over.reshape(xs.shape())).unwrap();
                ops::softmax_inplace(&over, 1).unwrap();
                check_result(Op::Softmax, &xs, 1, &over).unwrap();
                let all = values(&all).unwrap();
                prop_assert!(all[..9].iter().chain(&all[9 + count..]).all(|&x| x == 1.0));
            }
        }
    }

    /// Gradients of softmax and log-softmax, along the second of three dimensions
    #[test]
    fn gradients(outer in 1usize..300, len in length(), inner in prop_oneof![Just(1usize), 2usize..9, 9usize..300],
                 dtype in prop::sample::select(DTYPES.to_vec())) {
        let inner = inner.min((100_000 / len).max(1));
        let outer = outer.min((100_000 / (len * inner)).max(1));
        for device in devices() {
            gradients::check_formula((outer, len, inner), dtype, &device).unwrap();
        }
    }

    #[test]
    fn log_sum_exp((shape, dim) in shape_and_dim(), view in views(), kind in kinds(), dtype in prop::sample::select(DTYPES.to_vec()), seed in any::<u64>()) {
        if within_cap(shape.iter().product::<usize>() + 100) {
            for device in devices() {
                logsumexp::check(&build(&shape, dim, view, kind, dtype, seed, &device).unwrap(), dim).unwrap();
            }
        }
    }

    /// Losses and their gradients, of classes along the last of two dimensions or the second of three or four
    #[test]
    fn cross_entropy(lines in 1usize..300, classes in length(), others in prop::collection::vec(1usize..20, 0..3), everything: bool,
                     reduction in prop::sample::select(vec![Reduction::None, Reduction::Sum, Reduction::Mean]),
                     dtype in prop::sample::select(DTYPES.to_vec()), seed in any::<u64>()) {
        let inner = others.iter().product::<usize>();
        let lines = lines.min((100_000 / (classes * inner)).max(1));
        let shape = [&[lines, classes], &others[..]].concat();
        if within_cap(lines * classes * inner) {
            let mut case = loss::Case::new(&shape);
            case.reduction = reduction;
            let case = if everything { case.with_everything() } else { case };
            for device in devices() {
                let logits = tensor(&normal(lines * classes * inner, 3.0, seed), shape.clone(), dtype, &device).unwrap();
                case.check(&logits).unwrap();
            }
        }
    }

    #[test]
    fn top_k(lines in 1usize..300, len in length(), k in any::<prop::sample::Index>(), view in views(), kind in kinds(),
             dtype in prop::sample::select(DTYPES.to_vec()), seed in any::<u64>()) {
        let shape = [lines.min((100_000 / len).max(1)), len];
        if within_cap(shape.iter().product::<usize>() + 100) {
            // Few of long lines, most often
            let k = 1 + k.index(len) % if seed % 4 == 0 { len } else { len.min(64) };
            for device in devices() {
                topk::check(&build(&shape, 1, view, kind, dtype, seed, &device).unwrap(), k).unwrap();
            }
        }
    }

    /// CPU and CUDA agree to within twice the bounds, each other's outside oracle.
    #[test]
    fn cpu_and_cuda_agree((shape, dim) in shape_and_dim(), seed in any::<u64>(), log: bool) {
        if let Some(gpu) = gpu().filter(|_| within_cap(shape.iter().product())) {
            let op = if log { Op::LogSoftmax } else { Op::Softmax };
            let make = |device: &Device| build(&shape, dim, View::Contiguous, Values::Normal(3.0), DType::F32, seed, device);
            let cpu = values(&op.apply(&make(&Device::Cpu).unwrap(), dim).unwrap()).unwrap();
            let cuda = values(&op.apply(&make(&gpu).unwrap(), dim).unwrap()).unwrap();
            for (a, b) in cpu.iter().zip(&cuda) {
                prop_assert!((a - b).abs() <= a.abs() * 1e-5 + 1e-6 * f64::from(u8::from(log)), "{a} on the CPU and {b} on CUDA");
            }
        }
    }
}
