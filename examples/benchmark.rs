//! Times every softmax of the crate next to candle's own, and next to a plain copy of the tensor: an op that reads
//! and writes every element once cannot be faster than that.
//!
//!     cargo run --release --example benchmark
//!     cargo run --release --features cuda --example benchmark -- --device cuda --dtype f32,bf16 --csv out.csv
//!
//! The times are those of a call as a user makes it, allocation of the output included.

mod common;

use anyhow::{bail, ensure, Context, Result};
use candle_core::{DType, Device, Tensor, D};
use clap::Parser;
use common::{Accuracy, OPS};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time every softmax of the crate next to candle's own.
#[derive(Parser)]
struct Args {
    /// Shapes to time, rows x columns
    #[arg(long, value_delimiter = ',', value_parser = parse_size, default_value = "1024x32768,512x512")]
    sizes: Vec<(usize, usize)>,
    /// Any of f32, f64, f16 and bf16
    #[arg(long, value_delimiter = ',', value_parser = common::parse_dtype, default_value = "f32")]
    dtype: Vec<DType>,
    /// Timed calls per op
    #[arg(long, default_value_t = 100)]
    iterations: usize,
    /// Stop timing an op early after this many seconds
    #[arg(long, value_parser = parse_seconds, default_value = "5")]
    max_seconds: Duration,
    /// cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu", value_parser = common::parse_device)]
    device: Device,
    /// Also write the results to this file
    #[arg(long)]
    csv: Option<PathBuf>,
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

fn parse_size(text: &str) -> Result<(usize, usize)> {
    let size = text.split_once('x').and_then(|(rows, cols)| Some((rows.parse().ok()?, cols.parse().ok()?)));
    match size {
        Some((rows, cols)) if rows > 0 && cols > 0 => Ok((rows, cols)),
        _ => bail!("expected ROWSxCOLUMNS, such as 1024x32768"),
    }
}

fn parse_seconds(text: &str) -> Result<Duration> {
    Ok(Duration::try_from_secs_f64(text.parse()?)?)
}

type Run = fn(&Tensor) -> candle_core::Result<Tensor>;

/// What the others are measured by. `Tensor::clone` only counts a reference and `contiguous` may return its argument;
/// `Tensor::copy` moves the data.
const COPY: Run = Tensor::copy;
const CANDLE_SOFTMAX: Run = |xs| candle_nn::ops::softmax(xs, D::Minus1);
const CANDLE_LAST_DIM: Run = candle_nn::ops::softmax_last_dim;

/// In seconds per call.
struct Timing {
    median: f64,
    mean: f64,
    calls: usize,
}

/// One row of a table.
struct Row {
    name: &'static str,
    timing: Timing,
    /// Bytes read and written.
    bytes: usize,
    /// `None` for the copy.
    accuracy: Option<Accuracy>,
}

impl Row {
    fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.timing.median / 1e9
    }

    /// How many times faster than `other`.
    fn speed_up(&self, other: &Row) -> f64 {
        other.timing.median / self.timing.median
    }

    fn pass(&self) -> bool {
        self.accuracy.as_ref().is_none_or(Accuracy::pass)
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.iterations > 0, "--iterations must be at least 1");
    let device = format!("{}, {}", common::device_tag(&args.device), common::device_name(&args.device)?);
    let date = common::today()?;
    let mut csv = args.csv.as_deref().map(create_csv).transpose()?;

    println!("{device}, {date}");
    println!("GB/s: every byte read once and written once, over the median time of a call");
    println!("copy: that rate next to Tensor::copy (on the CPU, candle copies with one thread)");
    println!("error: the largest one against f64, in ulps of the dtype");
    let mut failed = Vec::new();
    for &dtype in &args.dtype {
        for &(rows, cols) in &args.sizes {
            let case = format!("{rows} x {cols} {}", dtype.as_str());
            println!("\n{case}");
            // Deviation 3: rows neither flat nor close to one-hot.
            let input = common::normal_matrix(args.seed, rows, cols, 3.0)?.to_dtype(dtype)?.to_device(&args.device)?;
            let table = measure(&args, &input)?;

            let ours = &table[3..];
            failed.extend(ours.iter().filter(|row| !row.pass()).map(|row| format!("{} {case}", row.name)));
            if let Some(file) = &mut csv {
                for row in &table {
                    write!(file, "\"{device}\",{date},{},{rows},{cols},", dtype.as_str())?;
                    write_csv(file, row, &table[0])?;
                }
            }
        }
    }
    if let Some(mut file) = csv {
        file.flush()?;
    }
    ensure!(failed.is_empty(), "beyond the error bound: {}", failed.join(", "));
    Ok(())
}

/// Checks and times every op on `input`, and prints each as it is done. The first three rows are the references.
fn measure(args: &Args, input: &Tensor) -> Result<Vec<Row>> {
    println!(
        "{:26} {:>11} {:>11} {:>9} {:>7} {:>11} {:>12} {:>9} {:>6}",
        "op", "median ms", "mean ms", "GB/s", "copy", "vs softmax", "vs last_dim", "error", "calls"
    );
    let references = [
        ("Tensor::copy", COPY),
        ("candle_nn softmax", CANDLE_SOFTMAX),
        ("candle_nn softmax_last_dim", CANDLE_LAST_DIM),
    ];
    // Of the functions only `ops::softmax`: over the last dimension the others do the same.
    let ours = OPS[..4].iter().map(|op| (op.name, op.run));

    let mut table: Vec<Row> = Vec::new();
    for (name, run) in references.into_iter().chain(ours) {
        let accuracy = match table.len() {
            0 => None,
            _ => Some(Accuracy::measure(input, &run(input)?, false)?),
        };
        let timing = time(args, input, name, run)?;
        let bytes = 2 * input.elem_count() * input.dtype().size_in_bytes();
        table.push(Row { name, timing, bytes, accuracy });
        print_last(&table);
    }
    Ok(table)
}

fn print_last(table: &[Row]) {
    let Some(row) = table.last() else { return };
    // A dash where a row comes before the one to compare it with.
    let speed_up = |other: usize| match table.get(other) {
        Some(other) => format!("{:.2}x", row.speed_up(other)),
        None => "-".into(),
    };
    let error = row.accuracy.as_ref().map_or("-".into(), |accuracy| format!("{:.2}", accuracy.max_error));
    println!(
        "{:26} {:>11.4} {:>11.4} {:>9.1} {:>6.1}% {:>11} {:>12} {error:>9} {:>6}{}",
        row.name,
        row.timing.median * 1e3,
        row.timing.mean * 1e3,
        row.gb_per_s(),
        row.speed_up(&table[0]) * 100.0,
        speed_up(1),
        speed_up(2),
        row.timing.calls,
        if row.pass() { "" } else { "  beyond the bound" },
    );
}

fn create_csv(path: &Path) -> Result<BufWriter<File>> {
    let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    let mut file = BufWriter::new(file);
    writeln!(file, "device,date,dtype,rows,cols,op,calls,median_us,mean_us,gb_s,copy_share,max_error_ulp")?;
    Ok(file)
}

fn write_csv(file: &mut impl Write, row: &Row, copy: &Row) -> Result<()> {
    let error = row.accuracy.as_ref().map_or(String::new(), |accuracy| format!("{:.3}", accuracy.max_error));
    writeln!(
        file,
        "{},{},{:.3},{:.3},{:.3},{:.4},{error}",
        row.name,
        row.timing.calls,
        row.timing.median * 1e6,
        row.timing.mean * 1e6,
        row.gb_per_s(),
        row.speed_up(copy),
    )?;
    Ok(())
}

/// Times calls of `run`, each waited for by a synchronise.
fn time(args: &Args, input: &Tensor, name: &str, run: Run) -> Result<Timing> {
    let call = || -> Result<Duration> {
        let start = Instant::now();
        let output = run(input)?;
        args.device.synchronize()?;
        let elapsed = start.elapsed();
        drop(output);
        Ok(elapsed)
    };

    // Warm-up: clocks, caches, and kernels compiled at their first call.
    let start = Instant::now();
    for _ in 0..args.iterations.min(10) {
        call()?;
        if start.elapsed() > args.max_seconds / 4 {
            break;
        }
    }

    let bar = common::progress_bar(args.iterations, format!("{name:26}"))?;
    let start = Instant::now();
    let mut times = Vec::with_capacity(args.iterations);
    while times.len() < args.iterations && (times.is_empty() || start.elapsed() < args.max_seconds) {
        times.push(call()?.as_secs_f64());
        bar.inc(1);
    }
    bar.finish_and_clear();

    times.sort_by(f64::total_cmp);
    let middle = times.len() / 2;
    Ok(Timing {
        median: match times.len() % 2 {
            0 => (times[middle - 1] + times[middle]) / 2.0,
            _ => times[middle],
        },
        mean: times.iter().sum::<f64>() / times.len() as f64,
        calls: times.len(),
    })
}
