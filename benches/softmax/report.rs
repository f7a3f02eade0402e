//! Results as rows of a CSV file, and the tables printed from them.

use crate::shapes::{
    cpu_targets, dim_name, shape_name, Target, CANDLE, CANDLE_LAST_DIM, CPU_SHAPES, GPU_SHAPES, OURS, OURS_IN_PLACE,
    OURS_KERNEL, OURS_OUT,
};
use anyhow::{bail, Context, Result};
use candle_core::DType;
use std::fmt::Write as _;
use std::path::Path;

/// One implementation timed on one tensor; times are in microseconds a call.
#[derive(Clone, Debug, Default)]
pub struct Row {
    pub op: String,
    pub shape: String,
    /// -1 for the last dimension.
    pub dim: isize,
    pub dtype: String,
    pub implementation: String,
    /// Back-to-back calls on preallocated tensors, and the same calls replayed as a CUDA graph.
    pub call_us: Option<f64>,
    pub graph_us: Option<f64>,
    /// As a user calls it, the allocation of the output included.
    pub wall_us: Option<f64>,
    /// The only time in the files of the CPU's peers.
    pub us: Option<f64>,
    pub kernel: String,
    /// In units in the last place of the dtype.
    pub max_error: Option<f64>,
    /// Of the input's first element from an aligned address, in elements.
    pub offset: usize,
    /// Input and output together fit the GPU's L2 cache.
    pub in_l2: bool,
    /// Of the CPU.
    pub threads: Option<usize>,
    pub facts: Facts,
}

/// Where and when a row was measured.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub device: String,
    pub driver: String,
    pub toolkit: String,
    pub date: String,
}

impl Facts {
    pub fn line(&self) -> String {
        // There is neither on the CPU.
        match self.driver.as_str() {
            "" => format!("{}, {}", self.device, self.date),
            driver => format!("{}, driver {driver}, {}, {}", self.device, self.toolkit, self.date),
        }
    }
}

const HEADER: &str = "op,shape,dim,dtype,impl,call_us,graph_us,wall_us,kernel,max_error,offset,in_l2,threads,device,\
                      driver,toolkit,date";

impl Row {
    /// The better of the two ways to time a kernel.
    pub fn best(&self) -> Option<f64> {
        match (self.call_us, self.graph_us) {
            (Some(call), Some(graph)) => Some(call.min(graph)),
            (call, graph) => call.or(graph),
        }
    }

    /// The time of a kernel, or where there is none, whatever time there is.
    pub fn any(&self) -> Option<f64> {
        self.best().or(self.wall_us).or(self.us)
    }

    /// The call, where `wall_us` is that of a process's first one.
    pub fn first_call(&self) -> Option<&str> {
        let call = self.op.strip_prefix(FIRST_CALL)?.trim_start();
        Some(if call.is_empty() { "softmax" } else { call })
    }

    /// Whether both rows are about the same op on the same tensor.
    fn same_case(&self, other: &Row) -> bool {
        self.same_tensor(other) && self.op == other.op
    }

    fn same_tensor(&self, other: &Row) -> bool {
        (&self.shape, self.dim, &self.dtype, self.threads) == (&other.shape, other.dim, &other.dtype, other.threads)
    }

    pub fn dims(&self) -> Vec<usize> {
        self.shape.split('x').filter_map(|size| size.parse().ok()).collect()
    }

    /// Length of a line.
    pub fn line_len(&self) -> Option<usize> {
        let dims = self.dims();
        usize::try_from(self.dim).map_or(dims.last().copied(), |dim| dims.get(dim).copied())
    }

    /// GB/s at `us` microseconds, every byte read once and written once.
    pub fn gb_per_s(&self, us: f64) -> f64 {
        let size = if self.dtype == "f32" { 4 } else { 2 };
        let elements: usize = self.dims().iter().product();
        (2 * size * elements) as f64 / us / 1e3
    }
}

/// The rows of a CSV file as this program or one of the peers' scripts writes it; columns it lacks stay empty.
pub fn read_csv(path: &Path) -> Result<Vec<Row>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    parse_csv(&text).with_context(|| format!("reading {}", path.display()))
}

pub fn parse_csv(text: &str) -> Result<Vec<Row>> {
    let mut lines = text.lines().map(str::trim_end).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let header: Vec<&str> = lines.next().context("the file is empty")?.split(',').collect();
    for needed in ["op", "shape", "dim", "dtype", "impl"] {
        if !header.contains(&needed) {
            bail!("there is no column `{needed}`");
        }
    }
    let mut rows = Vec::new();
    for line in lines {
        let fields: Vec<&str> = line.split(',').collect();
        if fields.len() > header.len() {
            bail!("more fields than columns: {line}");
        }
        let field = |name: &str| {
            let index = header.iter().position(|column| *column == name);
            index.and_then(|index| fields.get(index)).copied().unwrap_or_default()
        };
        let number = |name: &str| match field(name) {
            "" => Ok(None),
            text => text.parse::<f64>().map(Some).with_context(|| format!("`{text}` in column {name}: {line}")),
        };
        rows.push(Row {
            op: field("op").into(),
            shape: field("shape").into(),
            dim: field("dim").parse().with_context(|| format!("column dim: {line}"))?,
            dtype: field("dtype").into(),
            implementation: field("impl").into(),
            call_us: number("call_us")?,
            graph_us: number("graph_us")?,
            wall_us: number("wall_us")?,
            us: number("us")?,
            kernel: field("kernel").into(),
            max_error: number("max_error")?,
            offset: number("offset")?.unwrap_or(0.0) as usize,
            in_l2: field("in_l2") == "yes",
            threads: number("threads")?.map(|threads| threads as usize),
            facts: Facts {
                device: field("device").into(),
                driver: field("driver").into(),
                toolkit: field("toolkit").into(),
                date: field("date").into(),
            },
        });
    }
    Ok(rows)
}

pub fn to_csv(rows: &[Row]) -> String {
    let mut text = format!("{HEADER}\n");
    let number = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.3}"));
    // There are no quotes in the files, so no commas either.
    let plain = |text: &str| text.replace([',', '\n'], " ");
    for row in rows {
        let fields = [
            plain(&row.op),
            row.shape.clone(),
            row.dim.to_string(),
            row.dtype.clone(),
            plain(&row.implementation),
            number(row.call_us),
            number(row.graph_us),
            number(row.wall_us),
            plain(&row.kernel),
            number(row.max_error),
            row.offset.to_string(),
            if row.in_l2 { "yes".into() } else { String::new() },
            row.threads.map_or(String::new(), |threads| threads.to_string()),
            plain(&row.facts.device),
            plain(&row.facts.driver),
            plain(&row.facts.toolkit),
            row.facts.date.clone(),
        ];
        text += &fields.join(",");
        text.push('\n');
    }
    text
}

pub fn write_csv(path: &Path, rows: &[Row]) -> Result<()> {
    create_folder(path.parent())?;
    std::fs::write(path, to_csv(rows)).with_context(|| format!("writing {}", path.display()))
}

pub fn create_folder(folder: Option<&Path>) -> Result<()> {
    match folder {
        Some(folder) => {
            std::fs::create_dir_all(folder).with_context(|| format!("creating the folder {}", folder.display()))
        }
        None => Ok(()),
    }
}

/// A table whose columns are as wide as their widest cell.
struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
    /// The first columns hold text, which is aligned to the left.
    text_columns: usize,
}

impl Table {
    fn new<S: Into<String>>(header: impl IntoIterator<Item = S>, text_columns: usize) -> Self {
        Self { header: header.into_iter().map(Into::into).collect(), rows: Vec::new(), text_columns }
    }

    fn print(&self) {
        let all = || std::iter::once(&self.header).chain(&self.rows);
        let widths: Vec<usize> = (0..self.header.len())
            .map(|column| all().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0))
            .collect();
        for row in all() {
            let mut line = String::new();
            for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                // Writing to a string cannot fail.
                let _ = match column < self.text_columns {
                    true => write!(line, "{cell:width$}  "),
                    false => write!(line, "{cell:>width$}  "),
                };
            }
            println!("{}", line.trim_end());
        }
    }
}

fn micros(us: Option<f64>) -> String {
    match us {
        None => "-".into(),
        Some(us) if us < 100.0 => format!("{us:.2}"),
        Some(us) if us < 10_000.0 => format!("{us:.1}"),
        Some(us) => format!("{us:.0}"),
    }
}

/// How many times `ours` goes into `theirs`.
fn times(theirs: Option<f64>, ours: Option<f64>) -> String {
    match (theirs, ours) {
        (Some(theirs), Some(ours)) => {
            let ratio = theirs / ours;
            if ratio < 100.0 {
                format!("{ratio:.2}x")
            } else {
                format!("{ratio:.0}x")
            }
        }
        _ => "-".into(),
    }
}

fn yes_no(met: bool) -> String {
    if met { "yes" } else { "NO" }.into()
}

fn dtype(name: &str) -> DType {
    match name {
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        _ => DType::F32,
    }
}

/// The peers' figures for the case of `row`; copies are no peers.
pub fn peers_of<'a>(peers: &'a [Row], row: &'a Row) -> impl Iterator<Item = &'a Row> {
    peers.iter().filter(|peer| peer.same_case(row) && !peer.implementation.starts_with("copy"))
}

/// The fastest copy in the same run of the tensor of `row`.
pub fn copy_us(rows: &[Row], row: &Row) -> Option<f64> {
    let copies = rows.iter().filter(|copy| copy.op == "copy" && copy.same_tensor(row));
    copies.filter_map(Row::best).min_by(f64::total_cmp)
}

pub fn find<'a>(rows: &'a [Row], like: &Row, op: &str, implementation: &str) -> Option<&'a Row> {
    rows.iter().find(|row| {
        row.op == op && row.implementation == implementation && row.offset == like.offset && row.same_tensor(like)
    })
}

/// The names of the peers, in the order in which they come.
fn peer_names(rows: &[Row], peers: &[Row]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for peer in rows.iter().flat_map(|row| peers_of(peers, row)) {
        if !names.contains(&peer.implementation) {
            names.push(peer.implementation.clone());
        }
    }
    names
}

fn min_us<'a>(rows: impl Iterator<Item = &'a Row>) -> Option<(f64, &'a str)> {
    rows.filter_map(|row| Some((row.any()?, row.implementation.as_str()))).min_by(|a, b| a.0.total_cmp(&b.0))
}

/// Prints everything there is in `rows`.
pub fn print(rows: &[Row], peers: &[Row]) {
    if let Some(Row { facts, .. }) = rows.first() {
        println!("{}", facts.line());
    }
    let (cpu, gpu): (Vec<Row>, Vec<Row>) = rows.iter().cloned().partition(|row| row.threads.is_some());
    if gpu.iter().any(|row| row.op == "copy") {
        print_gpu(&gpu, peers);
        print_journey(&gpu, peers);
    }
    print_first_calls(&gpu);
    if !cpu.is_empty() {
        print_cpu(&cpu, peers);
    }
}

fn print_gpu(rows: &[Row], peers: &[Row]) {
    let names = peer_names(rows, peers);
    let columns =
        ["op", "shape", "dim", "dtype", "start", "kernel", "L2", "us", "GB/s", "/copy", "target", "met", "error"];
    let mut header: Vec<String> = columns.map(String::from).into();
    header.extend(names.iter().cloned());
    header.extend(["best peer", "as called us", CANDLE, CANDLE_LAST_DIM].map(String::from));
    let mut table = Table::new(header, 6);
    // (met, all) of the targets: at an aligned start, at the other one.
    let mut targets = [(0, 0); 2];
    let mut ahead = (0, 0);

    for row in rows.iter().filter(|row| row.implementation == OURS && row.first_call().is_none()) {
        let us = row.best();
        let ratio = us.zip(copy_us(rows, row)).map(|(us, copy)| us / copy);
        let target = target(row);
        let met = target.and_then(|target| match target {
            Target::Copies(most, _) => ratio.map(|ratio| ratio <= most),
            Target::Micros(most) => row.graph_us.or(us).map(|us| us <= most),
        });
        if target.is_some() {
            let count = &mut targets[usize::from(row.offset > 0)];
            count.0 += usize::from(met == Some(true));
            count.1 += 1;
        }
        let peer = |name: &str| min_us(peers_of(peers, row).filter(|peer| peer.implementation == name));
        let best_peer = min_us(peers_of(peers, row));
        // The peers' tensors are all aligned.
        if let (Some((theirs, _)), Some(us), 0) = (best_peer, us, row.offset) {
            ahead.0 += usize::from(us <= theirs);
            ahead.1 += 1;
        }
        let candle = |name| times(find(rows, row, &row.op, name).and_then(|row| row.wall_us), row.wall_us);
        let mut cells = vec![
            row.op.clone(),
            row.shape.clone(),
            row.dim.to_string(),
            row.dtype.clone(),
            format!("+{}", row.offset),
            row.kernel.clone(),
            if row.in_l2 { "in L2" } else { "" }.into(),
            micros(us),
            us.map_or("-".into(), |us| format!("{:.0}", row.gb_per_s(us))),
            ratio.map_or("-".into(), |ratio| format!("{ratio:.3}")),
            match target {
                None => String::new(),
                Some(Target::Copies(most, _)) => format!("{most:.3}"),
                Some(Target::Micros(most)) => format!("{most:.2} us"),
            },
            met.map_or(String::new(), yes_no),
            row.max_error.map_or("-".into(), |error| format!("{error:.2}")),
        ];
        cells.extend(names.iter().map(|name| times(peer(name).map(|(theirs, _)| theirs), us)));
        cells.push(match best_peer {
            Some((theirs, name)) => format!("{} {name}", times(Some(theirs), us)),
            None => "-".into(),
        });
        cells.extend([micros(row.wall_us), candle(CANDLE), candle(CANDLE_LAST_DIM)]);
        table.rows.push(cells);
    }
    println!("us: kernel time, the better of back-to-back calls and a CUDA graph; /copy: over the faster copy's");
    println!("error: the largest, in units in the last place of the dtype; peers and candle: their time over ours");
    println!();
    table.print();
    let [aligned, shifted] = targets;
    println!();
    println!(
        "targets met: {} of {} ({} of {} at an aligned start, {} of {} one element later); no slower than the best peer: \
         {} of {}",
        aligned.0 + shifted.0,
        aligned.1 + shifted.1,
        aligned.0,
        aligned.1,
        shifted.0,
        shifted.1,
        ahead.0,
        ahead.1,
    );
    print_copies(rows, peers);
}

fn target(row: &Row) -> Option<Target> {
    if row.op != "softmax" {
        return None;
    }
    let shape =
        GPU_SHAPES.iter().find(|shape| shape.name() == row.shape && dim_name(shape.dims, shape.dim) == row.dim)?;
    shape.target(dtype(&row.dtype), row.offset)
}

/// The peers were measured in another process: their copy next to ours shows what their times are worth here.
fn print_copies(rows: &[Row], peers: &[Row]) {
    let theirs = peers.iter().filter(|peer| peer.op == "softmax" && peer.implementation == "copy");
    let ratios = theirs.filter_map(|peer| {
        let ours = rows.iter().filter(|row| row.implementation == "driver copy" && row.same_tensor(peer));
        let ours = ours.filter_map(Row::best).min_by(f64::total_cmp)?;
        Some((peer.best()? / ours, format!("{} {}", peer.shape, peer.dtype)))
    });
    let mut ratios: Vec<_> = ratios.collect();
    ratios.sort_by(|a, b| a.0.total_cmp(&b.0));
    if let (Some(first), Some(last)) = (ratios.first(), ratios.last()) {
        println!(
            "the driver's copy in the peers' run over ours: {:.2} ({}) to {:.2} ({}), median {:.2}",
            first.0,
            first.1,
            last.0,
            last.1,
            ratios[ratios.len() / 2].0
        );
    }
}

fn print_journey(rows: &[Row], peers: &[Row]) {
    let columns = ["shape", "dtype", CANDLE, CANDLE_LAST_DIM, "torch", "safe", "floor", "online", "floor", "reduce"];
    let mut table = Table::new(columns.into_iter().chain(["chosen", "copy"]), 2);
    for safe in rows.iter().filter(|row| row.implementation == "safe") {
        let of = |name| find(rows, safe, "softmax", name);
        let copy = copy_us(rows, safe);
        let torch = min_us(peers_of(peers, safe).filter(|peer| peer.implementation == "torch"));
        table.rows.push(vec![
            safe.shape.clone(),
            safe.dtype.clone(),
            micros(of(CANDLE).and_then(|row| row.wall_us)),
            micros(of(CANDLE_LAST_DIM).and_then(|row| row.wall_us)),
            micros(torch.map(|torch| torch.0)),
            micros(safe.best()),
            micros(copy.map(|copy| copy * 2.0)),
            micros(of("online").and_then(Row::best)),
            micros(copy.map(|copy| copy * 1.5)),
            micros(of("reduce").and_then(Row::best)),
            micros(of(OURS).and_then(Row::best)),
            micros(copy),
        ]);
    }
    if !table.rows.is_empty() {
        println!("\nThe journey, us (candle: as called); floor: three passes move twice a copy's bytes, two 1.5 times");
        table.print();
    }
}

/// The op of rows whose `wall_us` is the first call of a process; the call's name follows where it is not softmax.
pub const FIRST_CALL: &str = "first_call";

fn print_first_calls(rows: &[Row]) {
    let mut table = Table::new(["call", "shape", "dim", "dtype", "kernel", "ms"], 5);
    for row in rows {
        let Some(call) = row.first_call() else { continue };
        let ms = row.wall_us.map_or("-".into(), |us| format!("{:.1}", us / 1e3));
        let cells = [call, &row.shape, &row.dim.to_string(), &row.dtype, &row.kernel, &ms];
        table.rows.push(cells.map(String::from).to_vec());
    }
    if !table.rows.is_empty() {
        println!(
            "\nThe first call of a process, without what the driver has compiled for earlier ones (target: 300 ms)"
        );
        table.print();
    }
}

/// The implementations of the CPU's table, in the order of its columns.
const CPU_COLUMNS: [&str; 7] = [OURS, OURS_OUT, OURS_IN_PLACE, OURS_KERNEL, "copy out", CANDLE, CANDLE_LAST_DIM];

fn print_cpu(rows: &[Row], peers: &[Row]) {
    let names = peer_names(rows, peers);
    let header = ["op", "shape", "dim", "dtype", "threads", "error"].into_iter().chain(CPU_COLUMNS);
    let mut table = Table::new(header.map(String::from).chain(names.iter().cloned()), 4);
    for row in rows.iter().filter(|row| row.implementation == OURS) {
        let mut cells = vec![
            row.op.clone(),
            row.shape.clone(),
            row.dim.to_string(),
            row.dtype.clone(),
            row.threads.map_or("-".into(), |threads| threads.to_string()),
            row.max_error.map_or("-".into(), |error| format!("{error:.2}")),
        ];
        cells.extend(CPU_COLUMNS.iter().map(|name| {
            let op = if name.starts_with("copy") { "copy" } else { &row.op };
            micros(find(rows, row, op, name).and_then(Row::any))
        }));
        let peer = |name: &String| peers_of(peers, row).find(|peer| peer.implementation == *name);
        cells.extend(names.iter().map(|name| micros(peer(name).and_then(Row::any))));
        table.rows.push(cells);
    }
    println!("us a call; out: into a preallocated tensor; kernel: the gradient alone; error: the largest, in units in the last place of the dtype");
    println!();
    table.print();

    let columns = ["op", "shape", "dtype", "threads", "ours", "reference", "us", "reference us", "ratio", "target"];
    let mut table = Table::new(columns.into_iter().chain(["met"]), 6);
    let (mut met, mut compared) = (0, 0);
    for goal in cpu_targets() {
        let Some(shape) = CPU_SHAPES.iter().find(|shape| shape_name(shape.dims) == goal.shape) else { continue };
        for dtype in goal.dtypes {
            let like = Row {
                op: goal.op.into(),
                shape: goal.shape.into(),
                dim: dim_name(shape.dims, shape.dim),
                dtype: dtype.to_string(),
                threads: Some(goal.threads),
                ..Row::default()
            };
            let ours = find(rows, &like, goal.op, goal.ours).and_then(Row::any);
            let reference = find(rows, &like, goal.op, goal.reference).and_then(Row::any);
            let peer = || peers_of(peers, &like).find(|peer| peer.implementation == goal.reference).and_then(Row::any);
            let reference = reference.or_else(peer);
            let ratio = ours.zip(reference).map(|(ours, reference)| reference / ours);
            compared += usize::from(ratio.is_some());
            met += usize::from(ratio.is_some_and(|ratio| ratio >= goal.by));
            table.rows.push(vec![
                goal.op.into(),
                goal.shape.into(),
                dtype.to_string(),
                goal.threads.to_string(),
                match goal.ours {
                    OURS_OUT => "out",
                    OURS_IN_PLACE => "in place",
                    OURS_KERNEL => "gradient alone",
                    _ => "as called",
                }
                .into(),
                goal.reference.into(),
                micros(ours),
                micros(reference),
                times(reference, ours),
                format!("{}x", goal.by),
                ratio.map_or("-".into(), |ratio| yes_no(ratio >= goal.by)),
            ]);
        }
    }
    println!();
    table.print();
    println!("\ntargets met: {met} of {compared} with both figures at hand, {} in all", table.rows.len());
}
