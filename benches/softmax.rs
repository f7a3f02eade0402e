//! Times the softmax of this crate on one device beside a copy of the same tensor, beside candle's own and beside the
//! figures of others, after checking each result against one computed in f64.
//!
//!     cargo bench --features cuda --bench softmax -- --peers peers.csv --out benches/results/h200.csv --plots plots
//!     cargo bench --bench softmax -- --device cpu --quick
//!     cargo bench --bench softmax -- --device cpu --around --out benches/results/cpu-around.csv
//!     cargo bench --features cuda --bench softmax -- --shapes 100x600x128@1,300x5000@1
//!     cargo bench --features cuda --bench softmax -- --around --shapes 100x600x128@1 --calls scale,logsumexp
//!     cargo bench --bench softmax -- --from benches/results/h200.csv --peers peers.csv --plots plots
//!
//! A kernel's ceiling is a copy: it reads and writes each element once, as softmax has to.

#[path = "softmax/around.rs"]
mod around;
#[path = "../examples/common/mod.rs"]
mod common;
#[path = "softmax/cpu.rs"]
mod cpu;
#[cfg(feature = "cuda")]
#[path = "softmax/gpu.rs"]
mod gpu;
#[path = "softmax/plot.rs"]
mod plot;
#[path = "softmax/report.rs"]
mod report;
#[path = "softmax/shapes.rs"]
mod shapes;

use anyhow::{bail, ensure, Result};
use candle_core::{DType, Device, Tensor};
use clap::{Parser, ValueEnum};
use report::Row;
use std::path::PathBuf;

/// Time softmax beside a copy, candle's own and the figures of others.
#[derive(Parser)]
pub struct Args {
    /// Where to measure; the GPU if there is one
    #[arg(long)]
    device: Option<Where>,
    /// Fewer repeats
    #[arg(long)]
    quick: bool,
    /// Only these shapes, such as 1024x32768,512x512; of any other with the dimension, such as 100x600x128@1
    #[arg(long, value_delimiter = ',')]
    shapes: Vec<String>,
    /// Any of f32, bf16 and f16
    #[arg(long, value_delimiter = ',', value_parser = parse_dtype, default_value = "f32,bf16,f16")]
    dtypes: Vec<DType>,
    /// Times of others, as op,shape,dim,dtype,impl,call_us,graph_us (or us); may be given more than once. On the CPU:
    /// with `--peers-threads`
    #[arg(long, value_name = "FILE")]
    peers: Vec<PathBuf>,
    /// On the CPU: the same with one thread
    #[arg(long, value_name = "FILE")]
    peers_one_thread: Vec<PathBuf>,
    /// On the CPU: the same with `--peers-threads` and huge pages
    #[arg(long, value_name = "FILE")]
    peers_huge_pages: Vec<PathBuf>,
    /// On the CPU: how many threads the others had
    #[arg(long, default_value_t = 2)]
    peers_threads: usize,
    /// Write the results to this CSV file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Draw gpu-throughput.svg, gpu-journey.svg and cpu-calls.svg in this folder, those that there are figures for
    #[arg(long, value_name = "FOLDER")]
    plots: Option<PathBuf>,
    /// Measure nothing: print and draw an earlier run's results, from several files where they belong together
    #[arg(long, value_name = "FILE")]
    from: Vec<PathBuf>,
    /// Only time the first call in a fresh process (with `--around`, of each of those calls), without the driver's cache of
    /// compiled kernels
    #[arg(long)]
    first_call: bool,
    /// Not softmax itself but what models have around it: backward, the builder's options, losses
    #[arg(long)]
    around: bool,
    /// With `--around` on a GPU: only these calls, such as scale,logsumexp
    #[arg(long, value_delimiter = ',')]
    calls: Vec<String>,
    /// On the CPU: numbers of threads
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    threads: Vec<usize>,
    /// What one process started by this program measures; prints it as CSV (or, the first call, in milliseconds)
    #[arg(long, hide = true)]
    child: bool,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Where {
    Cuda,
    Cpu,
}

fn parse_dtype(text: &str) -> Result<DType> {
    match text {
        "f64" => bail!("expected f32, bf16 or f16"),
        _ => common::parse_dtype(text),
    }
}

impl Args {
    fn wants(&self, shape: &[usize]) -> bool {
        self.shapes.is_empty() || self.shapes.contains(&shapes::shape_name(shape))
    }

    /// Those that were given with the dimension.
    fn own_shapes(&self) -> Result<Vec<shapes::Own>> {
        self.shapes.iter().filter(|name| name.contains('@')).map(|name| shapes::Own::parse(name)).collect()
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    // Before the measurement: a mistaken path should not cost it.
    let peers = read_peers(&args)?;
    let (rows, failed) = if args.from.is_empty() { measure(&args)? } else { (read_all(&args.from)?, Vec::new()) };
    if args.child {
        return Ok(());
    }
    ensure!(
        !rows.is_empty() || !failed.is_empty(),
        "nothing was measured: no tensor that is has such a shape, dtype and call"
    );
    if args.around && !args.first_call {
        around::print(&rows);
    } else {
        report::print(&rows, &peers);
    }
    if let Some(path) = &args.out {
        report::write_csv(path, &rows)?;
    }
    if let Some(folder) = &args.plots {
        plot::draw(folder, &rows, &peers)?;
    }
    ensure!(failed.is_empty(), "wrong results, which were not timed:\n{}", failed.join("\n"));
    Ok(())
}

/// The results, and what was wrong with others.
fn measure(args: &Args) -> Result<(Vec<Row>, Vec<String>)> {
    ensure!(
        args.shapes.iter().all(|shape| shape.contains('@') || known_shapes().contains(shape)),
        "the shapes are {}, or any other with the dimension, such as 100x600x128@1",
        known_shapes().join(", ")
    );
    let own = args.own_shapes()?;
    let device = match args.device {
        Some(Where::Cpu) => Device::Cpu,
        Some(Where::Cuda) => common::parse_device("cuda")?,
        None => common::parse_device("cuda").or_else(|error| {
            eprintln!("measuring the CPU: {error}");
            anyhow::Ok(Device::Cpu)
        })?,
    };
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) if args.first_call => gpu::run_first_calls(args, &device),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) if args.around => gpu::run_around(args, &device),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => gpu::run(args, &device),
        _ if args.first_call => bail!("--first-call is about the GPU, and there is none"),
        _ if args.around && !own.is_empty() => bail!("with --around on the CPU the shapes are those of its calls"),
        _ => cpu::run(args),
    }
}

fn known_shapes() -> Vec<String> {
    let gpu = shapes::GPU_SHAPES.iter().map(|shape| shape.dims);
    let cpu = shapes::CPU_SHAPES.iter().map(|shape| shape.dims);
    let around = around::AROUND.iter().map(|around| around.dims);
    let around = around.chain(around::CPU_AROUND.iter().map(|around| around.dims));
    let top_k = shapes::TOP_K.iter().map(|top| top.dims);
    let mut names: Vec<String> = gpu.chain(cpu).chain(around).chain(top_k).map(shapes::shape_name).collect();
    names.sort();
    names.dedup();
    names
}

fn read_all(paths: &[PathBuf]) -> Result<Vec<Row>> {
    let files: Vec<Vec<Row>> = paths.iter().map(|path| report::read_csv(path)).collect::<Result<_>>()?;
    Ok(files.concat())
}

fn read_peers(args: &Args) -> Result<Vec<Row>> {
    let mut peers = Vec::new();
    let threads = args.peers_threads;
    for (paths, threads, suffix) in
        [(&args.peers, threads, ""), (&args.peers_one_thread, 1, ""), (&args.peers_huge_pages, threads, ", huge pages")]
    {
        for path in paths {
            for mut row in report::read_csv(path)? {
                // Of the peers' files, those of the CPU have the one column of times `us`.
                if row.us.is_some() {
                    row.threads = Some(threads);
                    // There, log-softmax is an implementation of softmax.
                    if row.implementation == "torch log" {
                        row.op = "log_softmax".into();
                        row.implementation = "torch".into();
                    }
                    row.implementation += suffix;
                }
                peers.push(row);
            }
        }
    }
    Ok(peers)
}

/// The largest error of `out`, the (log-)softmax of `xs` along `dim`, against f64; an error where it is beyond the bound.
/// Of large tensors a part of the lines is compared.
pub fn check(xs: &Tensor, out: &Tensor, dim: usize, log: bool) -> Result<f64> {
    let mut max_error = 0f64;
    for [xs, out] in shapes::sample_lines([xs, out], dim)? {
        let accuracy = common::Accuracy::measure(&xs, &out, log)?;
        ensure!(
            accuracy.pass(),
            "beyond the bound: an error of {:.3} units in the last place, a sum off 1 by {:e}",
            accuracy.max_error,
            accuracy.max_deviation
        );
        max_error = max_error.max(accuracy.max_error);
    }
    Ok(max_error)
}

pub fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        len if len % 2 == 0 => Some((values[middle - 1] + values[middle]) / 2.0),
        _ => Some(values[middle]),
    }
}
