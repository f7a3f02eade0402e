//! Measures on the CPU, in a process of its own for each number of threads.

use crate::around::{CpuAround, Options, CPU_AROUND};
use crate::report::{parse_csv, to_csv, Facts, Row};
use crate::shapes::{
    dim_name, sample_lines, shape_name, CpuShape, Own, CANDLE, CANDLE_LAST_DIM, COMPOSED, CPU_SHAPES, OURS,
    OURS_IN_PLACE, OURS_KERNEL, OURS_OUT, TOP_K,
};
use crate::{check, common, median, Args};
use anyhow::{bail, ensure, Context, Result};
use candle_core::{scalar::Scalar, CpuStorage, DType, Device, Storage, Tensor, Var};
use candle_softmax::{ops, testing, testing::Op};
use half::{bf16, f16};
use rand::{rngs::StdRng, SeedableRng};
use rayon::prelude::*;
use std::process::{Command, Stdio};
use std::time::Instant;

pub fn run(args: &Args) -> Result<(Vec<Row>, Vec<String>)> {
    if args.child {
        print!("{}", to_csv(&if args.around { measure_around(args)? } else { measure(args)? }));
        return Ok((Vec::new(), Vec::new()));
    }
    let mut rows = Vec::new();
    for threads in &args.threads {
        ensure!(*threads > 0, "--threads must be at least 1");
        let dtypes: Vec<&str> = args.dtypes.iter().map(|dtype| dtype.as_str()).collect();
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--device", "cpu", "--child", "--dtypes", &dtypes.join(",")]);
        if args.quick {
            command.arg("--quick");
        }
        if args.around {
            command.arg("--around");
        }
        if !args.shapes.is_empty() {
            command.args(["--shapes", &args.shapes.join(",")]);
        }
        // rayon reads it once, when the process first needs threads; candle goes by it, too.
        let output = command.env("RAYON_NUM_THREADS", threads.to_string()).stderr(Stdio::inherit()).output()?;
        ensure!(output.status.success(), "the process with {threads} threads failed");
        rows.extend(parse_csv(&String::from_utf8(output.stdout)?)?);
    }
    Ok((rows, Vec::new()))
}

struct Case<'a> {
    shape: &'a CpuShape,
    dtype: DType,
    xs: Tensor,
    out: Tensor,
    /// What is written over: at first the input, then the result of the call before.
    again: Tensor,
}

/// Something to time: (op, implementation, call).
type Contender<'a> = (&'static str, &'static str, Box<dyn Fn() -> Result<()> + 'a>);

/// Drops a result at once, as a loop of a user (or of the peers' scripts) does.
fn discard(result: candle_core::Result<Tensor>) -> Result<()> {
    std::hint::black_box(result?);
    Ok(())
}

fn facts() -> Result<Facts> {
    let device = common::device_name(&Device::Cpu)?;
    // The number of threads has a column of its own.
    let device = device.split(" (").next().unwrap_or_default().to_string();
    Ok(Facts { device, driver: String::new(), toolkit: String::new(), date: crate::common::today()? })
}

fn measure(args: &Args) -> Result<Vec<Row>> {
    let facts = facts()?;
    let threads = rayon::current_num_threads();
    let mut rows = Vec::new();
    let own: Vec<CpuShape> = args.own_shapes()?.iter().map(Own::on_cpu).collect();
    for shape in CPU_SHAPES.iter().filter(|shape| args.wants(shape.dims)).chain(&own) {
        for &dtype in args.dtypes.iter().filter(|&&dtype| dtype == DType::F32 || shape.half) {
            eprintln!("{threads} threads: {} {}", shape_name(shape.dims), dtype.as_str());
            let case = Case::new(shape, dtype)?;
            let errors = [case.check(Op::Chosen)?, case.check(Op::ChosenLog)?];
            for group in case.contenders()? {
                let (seconds, least) = if args.quick { (0.1, 3) } else { (0.7, 5) };
                let times = time(&group, seconds, least)?;
                for ((op, implementation, _), us) in group.iter().zip(times) {
                    let max_error = match (*op, *implementation) {
                        ("softmax", OURS | OURS_OUT) => Some(errors[0]),
                        ("log_softmax", OURS) => Some(errors[1]),
                        _ => None,
                    };
                    rows.push(Row {
                        op: op.to_string(),
                        shape: shape_name(shape.dims),
                        dim: dim_name(shape.dims, shape.dim),
                        dtype: dtype.as_str().into(),
                        implementation: implementation.to_string(),
                        call_us: Some(us),
                        kernel: match *implementation {
                            OURS | OURS_OUT | OURS_IN_PLACE => testing::kernel_name(Op::Chosen, &case.xs, shape.dim)?,
                            _ => String::new(),
                        },
                        max_error,
                        threads: Some(threads),
                        facts: facts.clone(),
                        ..Row::default()
                    });
                }
            }
        }
    }
    for top in TOP_K.iter().filter(|top| args.wants(top.dims) && args.dtypes.contains(&DType::F32)) {
        eprintln!("{threads} threads: {} of {}", top.op, shape_name(top.dims));
        let xs = &normal(top.dims, DType::F32)?;
        let candle = || {
            let (sorted, _) = xs.sort_last_dim(false)?;
            candle_nn::ops::softmax_last_dim(&sorted.narrow(1, 0, top.k)?.contiguous()?)
        };
        let ours = || ops::topk_softmax(xs, top.k, true).map(|(weights, _)| weights);
        agree(&ours()?, &candle()?, 1).with_context(|| format!("{} of {}", top.op, shape_name(top.dims)))?;
        let group: [Contender; 2] = [
            (top.op, OURS, Box::new(move || discard(ours()))),
            (top.op, CANDLE_LAST_DIM, Box::new(move || discard(candle()))),
        ];
        let times = time(&group, if args.quick { 0.1 } else { 0.7 }, 5)?;
        rows.extend(group.iter().zip(times).map(|((op, implementation, _), us)| Row {
            op: op.to_string(),
            shape: shape_name(top.dims),
            dim: dim_name(top.dims, 1),
            dtype: DType::F32.as_str().into(),
            implementation: implementation.to_string(),
            call_us: Some(us),
            threads: Some(threads),
            facts: facts.clone(),
            ..Row::default()
        }));
    }
    Ok(rows)
}

/// What models have around softmax beside plain softmax, and beside the same out of candle's ops.
fn measure_around(args: &Args) -> Result<Vec<Row>> {
    let facts = facts()?;
    let threads = rayon::current_num_threads();
    let (seconds, least) = if args.quick { (0.02, 3) } else { (0.15, 3) };
    let mut rows = Vec::new();
    for around in CPU_AROUND.iter().filter(|around| args.wants(around.dims)) {
        for &dtype in &args.dtypes {
            eprintln!("{threads} threads: {} {}", shape_name(around.dims), dtype.as_str());
            let xs = normal(around.dims, dtype)?;
            let calls: Vec<(&'static str, Options)> = (around.calls.iter())
                .map(|&name| Ok((name, Options::new(name, around.dims, around.dim, |dims| normal(dims, dtype))?)))
                .collect::<candle_core::Result<_>>()?;
            for group in [around_forward(around, &xs, &calls)?, around_backward(around, &xs, &calls)?] {
                let times = time(&group, seconds, least)?;
                rows.extend(group.iter().zip(times).map(|((op, implementation, _), us)| Row {
                    op: op.to_string(),
                    shape: shape_name(around.dims),
                    dim: dim_name(around.dims, around.dim),
                    dtype: dtype.as_str().into(),
                    implementation: implementation.to_string(),
                    call_us: Some(us),
                    threads: Some(threads),
                    facts: facts.clone(),
                    ..Row::default()
                }));
            }
        }
    }
    Ok(rows)
}

fn around_forward<'a>(
    around: &'a CpuAround,
    xs: &'a Tensor,
    calls: &'a [(&'static str, Options)],
) -> Result<Vec<Contender<'a>>> {
    let dim = around.dim;
    let mut group: Vec<Contender> = vec![("softmax", OURS, Box::new(move || discard(ops::softmax(xs, dim))))];
    for (name, options) in calls {
        let (ours, composed) = (move || options.softmax.forward(xs), move || options.composed(xs, candle_softmax));
        if around.composed.contains(name) {
            if xs.dtype() == DType::F32 && *name != "dropout" {
                agree(&ours()?, &composed()?, dim).with_context(|| format!("{name} of {}", shape_name(around.dims)))?;
            }
            group.push((name, COMPOSED, Box::new(move || discard(composed()))));
        }
        group.push((name, OURS, Box::new(move || discard(ours()))));
    }
    Ok(group)
}

fn around_backward<'a>(
    around: &CpuAround,
    xs: &'a Tensor,
    calls: &'a [(&'static str, Options)],
) -> Result<Vec<Contender<'a>>> {
    let dim = around.dim;
    if around.backward.is_empty() {
        return Ok(Vec::new());
    }
    let y = ops::softmax(xs, dim)?;
    let mut group: Vec<Contender> = vec![
        backward("softmax backward", OURS, xs, |xs| ops::softmax(xs, dim))?,
        backward("softmax backward", COMPOSED, xs, |xs| candle_nn::ops::softmax(xs, dim))?,
        ("softmax backward kernel", OURS, Box::new(move || discard(testing::softmax_backward(false, &y, xs, dim)))),
    ];
    for (name, options) in calls.iter().filter(|(name, _)| around.backward.contains(name)) {
        let (op, kernel) = match *name {
            "scale" => ("scale backward", "scale backward kernel"),
            "scale + causal" => ("scale + causal backward", "scale + causal backward kernel"),
            other => bail!("the backward pass of {other} has no name"),
        };
        group.push(backward(op, OURS, xs, |xs| options.softmax.forward(xs))?);
        group.push(backward(op, COMPOSED, xs, |xs| options.composed(xs, candle_nn::ops::softmax))?);
        let ours = move || discard(testing::builder_backward(&options.softmax, xs, xs));
        group.push((kernel, OURS, Box::new(ours)));
    }
    Ok(group)
}

/// The faster of candle's two.
fn candle_softmax(xs: &Tensor, dim: usize) -> candle_core::Result<Tensor> {
    if dim + 1 == xs.rank() {
        candle_nn::ops::softmax_last_dim(xs)
    } else {
        candle_nn::ops::softmax(xs, dim)
    }
}

/// An error where two f32 results are further apart than rounding makes them.
fn agree(ours: &Tensor, composed: &Tensor, dim: usize) -> Result<()> {
    for [a, b] in sample_lines([ours, composed], dim)? {
        let bound = b.affine(1e-4, 1e-7)?;
        let apart = ((a - b)?.abs()? / bound)?.max_all()?.to_scalar::<f32>()?;
        ensure!(apart <= 1.0, "results are {apart} times as far apart as roundings make them");
    }
    Ok(())
}

/// A block of values again and again; its odd length keeps the lines different.
fn normal(dims: &[usize], dtype: DType) -> candle_core::Result<Tensor> {
    let block = common::normal(&mut StdRng::seed_from_u64(42), 1_000_003, 3.0);
    let len = dims.iter().product();
    let values: Vec<f32> = block.iter().copied().cycle().take(len).collect();
    Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(dtype)
}

impl<'a> Case<'a> {
    fn new(shape: &'a CpuShape, dtype: DType) -> Result<Self> {
        let xs = normal(shape.dims, dtype)?;
        let out = Tensor::ones(shape.dims, dtype, &Device::Cpu)?;
        let again = xs.copy()?;
        Ok(Self { shape, dtype, xs, out, again })
    }

    fn check(&self, op: Op) -> Result<f64> {
        self.out.const_set(match self.dtype {
            DType::F16 => Scalar::F16(f16::NAN),
            DType::BF16 => Scalar::BF16(bf16::NAN),
            _ => Scalar::F32(f32::NAN),
        })?;
        testing::softmax_into(op, &self.xs, self.shape.dim, &self.out)?;
        let name = || format!("{op:?} of {} {}", shape_name(self.shape.dims), self.dtype.as_str());
        check(&self.xs, &self.out, self.shape.dim, matches!(op, Op::ChosenLog)).with_context(name)
    }

    /// In groups that are timed in turn.
    fn contenders(&self) -> Result<Vec<Vec<Contender<'_>>>> {
        let (xs, dim) = (&self.xs, self.shape.dim);
        let mut softmax: Vec<Contender> = vec![
            ("copy", "copy out", Box::new(|| copy(&self.xs, &self.out))),
            ("softmax", OURS, Box::new(move || discard(ops::softmax(xs, dim)))),
            ("softmax", OURS_OUT, Box::new(move || Ok(testing::softmax_into(Op::Chosen, &self.xs, dim, &self.out)?))),
            ("softmax", OURS_IN_PLACE, Box::new(move || Ok(ops::softmax_inplace(&self.again, dim)?))),
            ("softmax", CANDLE, Box::new(move || discard(candle_nn::ops::softmax(xs, dim)))),
        ];
        if dim + 1 == self.shape.dims.len() {
            softmax.push((
                "softmax",
                CANDLE_LAST_DIM,
                Box::new(|| discard(candle_nn::ops::softmax_last_dim(&self.xs))),
            ));
        }
        let log_softmax: Vec<Contender> = vec![
            ("log_softmax", OURS, Box::new(move || discard(ops::log_softmax(xs, dim)))),
            ("log_softmax", CANDLE, Box::new(move || discard(candle_nn::ops::log_softmax(xs, dim)))),
        ];
        let mut groups = vec![softmax, log_softmax];
        if self.dtype == DType::F32 {
            // By itself, as the others' are: candle's pass lasts so long that rayon's threads fall asleep.
            groups.push(vec![backward_kernel("softmax_bwd", false, ops::softmax(xs, dim)?, xs, dim)]);
            groups.push(vec![
                backward("softmax_bwd", OURS, xs, |xs| ops::softmax(xs, dim))?,
                backward("softmax_bwd", CANDLE, xs, |xs| candle_nn::ops::softmax(xs, dim))?,
            ]);
            groups.push(vec![backward_kernel("log_softmax_bwd", true, ops::log_softmax(xs, dim)?, xs, dim)]);
            groups.push(vec![
                backward("log_softmax_bwd", OURS, xs, |xs| ops::log_softmax(xs, dim))?,
                backward("log_softmax_bwd", CANDLE, xs, |xs| candle_nn::ops::log_softmax(xs, dim))?,
            ]);
        }
        Ok(groups)
    }
}

/// The gradient alone, given the result and its own gradient, into fresh memory.
fn backward_kernel<'a>(op: &'static str, log: bool, y: Tensor, g: &'a Tensor, dim: usize) -> Contender<'a> {
    (op, OURS_KERNEL, Box::new(move || discard(testing::softmax_backward(log, &y, g, dim))))
}

/// candle's backward pass through one op; it adds a tensor of ones and a sum to the op's own work, for all alike.
fn backward(
    op: &'static str,
    implementation: &'static str,
    xs: &Tensor,
    run: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
) -> Result<Contender<'static>> {
    let result = run(Var::from_tensor(xs)?.as_tensor())?;
    Ok((
        op,
        implementation,
        Box::new(move || {
            std::hint::black_box(result.backward()?);
            Ok(())
        }),
    ))
}

/// A plain copy with all threads.
fn copy(from: &Tensor, to: &Tensor) -> Result<()> {
    fn chunks<T: Copy + Send + Sync>(from: &[T], to: &mut [T]) {
        let size = from.len().div_ceil(rayon::current_num_threads()).max(1 << 16);
        to.par_chunks_mut(size).zip(from.par_chunks(size)).for_each(|(to, from)| to.copy_from_slice(from));
    }
    struct CopyFrom<'a>(&'a Tensor);
    impl candle_core::InplaceOp1 for CopyFrom<'_> {
        fn name(&self) -> &'static str {
            "copy"
        }

        fn cpu_fwd(&self, to: &mut CpuStorage, _: &candle_core::Layout) -> candle_core::Result<()> {
            let (from, _) = self.0.storage_and_layout();
            let Storage::Cpu(from) = &*from else { candle_core::bail!("not on the CPU") };
            match (from, to) {
                (CpuStorage::F32(from), CpuStorage::F32(to)) => chunks(from, to),
                (CpuStorage::F16(from), CpuStorage::F16(to)) => chunks(from, to),
                (CpuStorage::BF16(from), CpuStorage::BF16(to)) => chunks(from, to),
                _ => candle_core::bail!("not a dtype that is measured"),
            }
            Ok(())
        }
    }
    Ok(to.inplace_op1(&CopyFrom(from))?)
}

/// Calls of its own kind before some are timed: one, and as many as take so many seconds.
const BEFORE: f64 = 20e-3;

/// Calls that are timed, one by one, after these, if as many would fit into that time.
const TOGETHER: usize = 25;

/// Microseconds a call, medians of calls in turn: of as many as fit into so many seconds each, and of `least` at least. They are
/// timed after some of their own kind, as in the loops that others are timed in: what candle's ops allocate and give back leaves
/// fresh pages for the next output, and a cache full of something else; and a thread that has slept is given a CPU by the system after
/// milliseconds.
fn time(group: &[Contender], seconds: f64, least: usize) -> Result<Vec<f64>> {
    let once = |contender: &Contender| -> Result<f64> {
        let start = Instant::now();
        (contender.2)()?;
        Ok(start.elapsed().as_secs_f64())
    };
    let mut takes = Vec::new();
    for contender in group {
        once(contender)?;
        takes.push(once(contender)?.max(1e-6));
    }
    let runs: Vec<usize> = takes.iter().map(|takes| ((seconds / takes) as usize).clamp(least, 300)).collect();
    let mut times = vec![Vec::new(); group.len()];
    while times.iter().zip(&runs).any(|(times, &runs)| times.len() < runs) {
        for (((contender, times), &runs), takes) in group.iter().zip(&mut times).zip(&runs).zip(&takes) {
            if times.len() >= runs {
                continue;
            }
            let before = (BEFORE / takes) as usize;
            for _ in 0..before.max(1) {
                once(contender)?;
            }
            for _ in 0..before.clamp(1, TOGETHER) {
                times.push(once(contender)? * 1e6);
            }
        }
    }
    times.iter_mut().map(|times| median(times).context("nothing was timed")).collect()
}
