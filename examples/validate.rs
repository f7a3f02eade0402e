//! Checks every softmax of the crate against an f64 reference, for every dtype, on every device at hand.
//!
//!     cargo run --release --example validate
//!     cargo run --release --features cuda --example validate -- --batch 1024 --seq 32768

mod common;

use anyhow::{ensure, Result};
use candle_core::{DType, Device, Tensor};
use clap::Parser;
use common::{Accuracy, Op, OPS};

/// Check every softmax of the crate against an f64 reference.
#[derive(Parser)]
struct Args {
    /// Number of rows
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Length of a row
    #[arg(long, default_value_t = 1000)]
    seq: usize,
    /// Standard deviation of the input
    #[arg(long, default_value_t = 3.0)]
    scale: f32,
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// cpu, cuda or cuda:N [default: the CPU and, where there is one, the first GPU]
    #[arg(long, value_parser = common::parse_device)]
    device: Option<Device>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.batch > 0 && args.seq > 0, "--batch and --seq must be at least 1");
    // Six times of it, which no number is drawn beyond, has to fit f16.
    ensure!(args.scale.abs() <= 9000.0, "--scale must be within ±9000, or what is drawn would be infinite in f16");

    let input = common::normal_matrix(args.seed, args.batch, args.seq, args.scale)?;
    println!("input: {} x {}, seed {}", args.batch, args.seq, args.seed);

    let (mut cases, mut failures) = (0, 0);
    for device in devices(args.device) {
        println!("\n{}: {}", common::device_tag(&device), common::device_name(&device)?);
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let input = input.to_dtype(dtype)?.to_device(&device)?;
            for op in &OPS {
                cases += 1;
                failures += usize::from(!check(op, &input)?);
            }
        }
    }
    ensure!(failures == 0, "{failures} of {cases} cases failed");
    println!("\nall {cases} cases passed");
    Ok(())
}

/// The device asked for, or all there are.
fn devices(asked: Option<Device>) -> Vec<Device> {
    if let Some(device) = asked {
        return vec![device];
    }
    let mut devices = vec![Device::Cpu];
    match common::parse_device("cuda") {
        Ok(cuda) => devices.push(cuda),
        Err(error) => println!("CPU only: {error}"),
    }
    devices
}

/// Runs one case and prints what came out; an op that reports an error has failed its case, not the program.
fn check(op: &Op, input: &Tensor) -> Result<bool> {
    let dtype = input.dtype().as_str();
    let case = format!("{} {dtype} {}", op.name, common::device_tag(input.device()));
    let output = match (op.run)(input) {
        Ok(output) => output,
        Err(error) => {
            println!("[FAIL] {case}: {error}");
            return Ok(false);
        }
    };
    let accuracy = Accuracy::measure(input, &output, op.log)?;

    let sums = match accuracy.sums_pass {
        true => "All rows sum to 1.0",
        false => "Not all rows sum to 1.0",
    };
    let verdict = if accuracy.pass() { "PASS" } else { "FAIL" };
    let deviation = accuracy.max_deviation;
    println!("[{verdict}] {case}: {sums} (max deviation: {deviation:.6})");
    let bound = match accuracy.elements_pass {
        true => "within the bound",
        false => "beyond the bound",
    };
    let error = accuracy.max_error;
    println!("       largest error against f64: {error:.2} ulp of {dtype}, {bound}");

    for (row, sum) in accuracy.row_sums.iter().take(4).enumerate() {
        println!("       Row {row} sum: {sum:.6}");
    }
    let first_row = output.get(0)?;
    let first = common::to_f64(&first_row.narrow(0, 0, first_row.elem_count().min(8))?)?;
    let first: Vec<_> = first.iter().map(|value| format!("{value:.6}")).collect();
    println!("       first row, first {} elements: {}", first.len(), first.join("  "));
    Ok(accuracy.pass())
}
