//! Pictures of the results, as SVG.

use crate::report::{copy_us, create_folder, find, peers_of, Row};
use crate::shapes::{CANDLE, CANDLE_LAST_DIM, OURS, OURS_OUT};
use anyhow::{Context, Result};
use std::fmt::Write as _;
use std::path::Path;

/// Draws what `rows` hold figures for.
pub fn draw(folder: &Path, rows: &[Row], peers: &[Row]) -> Result<()> {
    create_folder(Some(folder))?;
    // Figures of the CPU come with a number of threads.
    let gpu = |rows: &[Row]| -> Vec<Row> { rows.iter().filter(|row| row.threads.is_none()).cloned().collect() };
    let (gpu_rows, gpu_peers) = (gpu(rows), gpu(peers));
    let pictures = [
        ("gpu-throughput.svg", throughput(&gpu_rows, &gpu_peers)),
        ("gpu-journey.svg", journey(&gpu_rows, &gpu_peers)),
        ("cpu-calls.svg", cpu_calls(rows, peers)),
    ];
    for (name, picture) in pictures {
        match picture {
            Some(text) => {
                let path = folder.join(name);
                std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
            }
            None => eprintln!("{name} is not drawn: there are no figures for it"),
        }
    }
    Ok(())
}

const INK: &str = "#24292f";
const FAINT: &str = "#57606a";
const GRID: &str = "#e4e7eb";
const CEILING: &str = "#8c959f";
const OURS_COLOR: &str = "#d1242f";

/// Of the others; colours that the common kinds of colour blindness keep apart.
fn color(name: &str) -> &'static str {
    match name {
        "torch" => "#e69f00",
        "compile" => "#0072b2",
        "triton" => "#009e73",
        "quack" => "#56b4e9",
        "liger" => "#cc79a7",
        CANDLE => "#7a7a7a",
        CANDLE_LAST_DIM => "#3d3d3d",
        _ => "#8250df",
    }
}

fn label(name: &str) -> &str {
    match name {
        "torch" => "PyTorch",
        "compile" => "torch.compile",
        "triton" => "Triton",
        "liger" => "Liger",
        CANDLE => "candle_nn softmax",
        CANDLE_LAST_DIM => "candle_nn softmax_last_dim",
        OURS => "candle-softmax",
        other => other,
    }
}

#[derive(Clone, Copy)]
enum Anchor {
    Start,
    Middle,
    End,
}

/// The text of an SVG as it grows. Writing to a string cannot fail, so results of `write!` are dropped.
struct Svg {
    text: String,
}

impl Svg {
    fn new(width: f64, height: f64) -> Self {
        let mut text = String::new();
        let _ = writeln!(
            text,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"Helvetica, Arial, sans-serif\" font-size=\"13\">\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>"
        );
        Self { text }
    }

    fn finish(mut self) -> String {
        self.text += "</svg>\n";
        self.text
    }

    fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), stroke: &str, width: f64, dashes: &str) {
        let _ = writeln!(
            self.text,
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{stroke}\" \
             stroke-width=\"{width}\" stroke-dasharray=\"{dashes}\"/>"
        );
    }

    fn path(&mut self, points: &[(f64, f64)], stroke: &str, width: f64, dashes: &str) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            self.text,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{stroke}\" stroke-width=\"{width}\" \
             stroke-linejoin=\"round\" stroke-dasharray=\"{dashes}\"/>",
            points.join(" ")
        );
    }

    fn dot(&mut self, (x, y): (f64, f64), radius: f64, fill: &str) {
        let _ = writeln!(self.text, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{fill}\"/>");
    }

    fn bar(&mut self, (x, y): (f64, f64), width: f64, height: f64, fill: &str) {
        let _ = writeln!(
            self.text,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\"/>"
        );
    }

    fn words(&mut self, (x, y): (f64, f64), anchor: Anchor, size: f64, fill: &str, extra: &str, words: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let words = words.replace('&', "&amp;").replace('<', "&lt;");
        let _ = writeln!(
            self.text,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"{fill}\" {extra}>{words}</text>"
        );
    }

    fn turned(&mut self, (x, y): (f64, f64), anchor: Anchor, size: f64, fill: &str, words: &str) {
        let turn = format!("transform=\"rotate(-90 {x:.1} {y:.1})\"");
        self.words((x, y), anchor, size, fill, &turn, words);
    }
}

struct Series {
    name: String,
    color: &'static str,
    /// (length of a line, GB/s), ascending.
    points: Vec<(usize, f64)>,
}

/// GB/s over the length of a line, beside the copy's. Tensors that stay in the L2 cache are left out: the memory is not
/// what they measure. So are those of a few lines, which are about latency, and the odd length, which is next to an even one.
fn throughput(rows: &[Row], peers: &[Row]) -> Option<String> {
    let mut panels = Vec::new();
    for (dtype, title) in [("f32", "f32"), ("bf16", "bf16")] {
        let ours: Vec<&Row> = rows
            .iter()
            .filter(|row| row.implementation == OURS && row.op == "softmax" && row.dtype == dtype)
            .filter(|row| row.dim == -1 && row.offset == 0 && !row.in_l2 && is_large(row) && is_even(row))
            .collect();
        let series = throughput_series(rows, peers, &ours);
        if !series.is_empty() {
            panels.push((title, series));
        }
    }
    let any = rows.iter().find(|row| row.implementation == OURS && row.first_call().is_none())?;
    if panels.is_empty() {
        return None;
    }

    let (panel, gap, left, top, height, bottom) = (440.0, 70.0, 70.0, 76.0, 320.0, 118.0);
    let width = left + panels.len() as f64 * (panel + gap) - gap + 30.0;
    let mut svg = Svg::new(width, top + height + bottom);
    svg.words(
        (left, 24.0),
        Anchor::Start,
        17.0,
        INK,
        "font-weight=\"bold\"",
        "Softmax throughput over the length of a line",
    );
    svg.words(
        (left, 43.0),
        Anchor::Start,
        12.0,
        FAINT,
        "",
        "GB/s read and written, kernel time (candle_nn: as called); the ceiling is a copy of the same tensor",
    );

    let all = || panels.iter().flat_map(|(_, series)| series.iter().flat_map(|series| &series.points));
    let most = all().map(|point| point.1).fold(0.0, f64::max);
    let step = [100.0, 200.0, 500.0, 1000.0, 2000.0].into_iter().find(|step| most / step <= 6.0).unwrap_or(5000.0);
    let ceiling = (most / step).ceil() * step;
    let (shortest, longest) = (all().map(|point| point.0).min()? as f64, all().map(|point| point.0).max()? as f64);
    // Half a power of two of air at both ends.
    let (low, high) = (shortest.log2() - 0.5, longest.log2() + 0.5);

    for (index, (title, series)) in panels.iter().enumerate() {
        let x0 = left + index as f64 * (panel + gap);
        let x = |len: usize| x0 + ((len as f64).log2() - low) / (high - low) * panel;
        let y = |gb: f64| top + height - gb / ceiling * height;
        let mut gb = 0.0;
        while gb <= ceiling {
            svg.line((x0, y(gb)), (x0 + panel, y(gb)), GRID, 1.0, "");
            svg.words((x0 - 8.0, y(gb) + 4.0), Anchor::End, 12.0, FAINT, "", &format!("{gb:.0}"));
            gb += step;
        }
        let mut exponent = (low / 4.0).ceil() * 4.0;
        while exponent <= high {
            let len = exponent.exp2() as usize;
            svg.line((x(len), top + height), (x(len), top + height + 5.0), FAINT, 1.0, "");
            svg.words((x(len), top + height + 19.0), Anchor::Middle, 12.0, FAINT, "", &short_number(len));
            exponent += 4.0;
        }
        svg.line((x0, top + height), (x0 + panel, top + height), FAINT, 1.0, "");
        svg.words(
            (x0 + panel / 2.0, top + height + 37.0),
            Anchor::Middle,
            12.0,
            INK,
            "",
            "elements in a line (log scale)",
        );
        svg.words((x0 + panel - 6.0, top - 6.0), Anchor::End, 14.0, INK, "font-weight=\"bold\"", title);
        // Ours last, so that it lies on top.
        for series in series.iter().rev() {
            let points: Vec<_> = series.points.iter().map(|&(len, gb)| (x(len), y(gb))).collect();
            let (width, dashes) = match series.name.as_str() {
                OURS => (2.8, ""),
                COPY => (2.4, "7 4"),
                _ => (1.6, ""),
            };
            svg.path(&points, series.color, width, dashes);
            if series.name != COPY {
                points
                    .iter()
                    .for_each(|&point| svg.dot(point, if series.name == OURS { 3.6 } else { 2.6 }, series.color));
            }
        }
    }
    svg.turned((18.0, top + height / 2.0), Anchor::Middle, 12.0, INK, "GB/s");

    let mut entries: Vec<(&str, &str)> = Vec::new();
    for series in panels.iter().flat_map(|(_, series)| series) {
        if !entries.iter().any(|entry| entry.0 == series.name) {
            entries.push((&series.name, series.color));
        }
    }
    let mut at = (left, top + height + 66.0);
    for (name, color) in entries {
        let words = if name == COPY { "copy (ceiling)" } else { label(name) };
        let wide = 44.0 + 7.2 * words.chars().count() as f64;
        if at.0 + wide > width {
            at = (left, at.1 + 20.0);
        }
        let (thick, dashes) = if name == COPY { (2.4, "7 4") } else { (2.4, "") };
        svg.line((at.0, at.1 - 4.0), (at.0 + 24.0, at.1 - 4.0), color, thick, dashes);
        svg.words((at.0 + 30.0, at.1), Anchor::Start, 12.0, INK, "", words);
        at.0 += wide;
    }
    svg.words((left, top + height + bottom - 10.0), Anchor::Start, 11.0, FAINT, "", &any.facts.line());
    Some(svg.finish())
}

const COPY: &str = "copy";

/// 8 MB and more.
fn is_large(row: &Row) -> bool {
    row.dims().iter().product::<usize>() >= 1 << 22
}

fn is_even(row: &Row) -> bool {
    row.line_len().is_some_and(|len| len.is_multiple_of(2))
}

fn short_number(number: usize) -> String {
    match number {
        0..1024 => number.to_string(),
        1024..1_048_576 => format!("{}K", number / 1024),
        _ => format!("{}M", number / 1_048_576),
    }
}

fn throughput_series(rows: &[Row], peers: &[Row], ours: &[&Row]) -> Vec<Series> {
    let mut series: Vec<Series> = Vec::new();
    let mut add = |name: &str, color: &'static str, row: &Row, us: Option<f64>| {
        let (Some(us), Some(len)) = (us, row.line_len()) else { return };
        let point = (len, row.gb_per_s(us));
        match series.iter_mut().find(|series| series.name == name) {
            // Of several tensors with lines of one length, the first.
            Some(series) if series.points.iter().any(|point| point.0 == len) => {}
            Some(series) => series.points.push(point),
            None => series.push(Series { name: name.into(), color, points: vec![point] }),
        }
    };
    for row in ours {
        add(OURS, OURS_COLOR, row, row.best());
    }
    for row in ours {
        add(COPY, CEILING, row, copy_us(rows, row));
        for peer in peers_of(peers, row) {
            add(&peer.implementation, color(&peer.implementation), row, peer.best());
        }
        for name in [CANDLE, CANDLE_LAST_DIM] {
            add(name, color(name), row, find(rows, row, "softmax", name).and_then(|row| row.wall_us));
        }
    }
    series.iter_mut().for_each(|series| series.points.sort_by_key(|point| point.0));
    series
}

/// The steps from candle and PyTorch over Safe, Online and Reduce to the kernel that is chosen, in copies of the tensor.
fn journey(rows: &[Row], peers: &[Row]) -> Option<String> {
    const STEPS: [(&str, &str, &str); 7] = [
        (CANDLE, "candle_nn softmax", "#9a9a9a"),
        (CANDLE_LAST_DIM, "candle_nn softmax_last_dim", "#4d4d4d"),
        ("torch", "PyTorch", "#e69f00"),
        ("safe", "SafeSoftmax (floor 2)", "#c6dbef"),
        ("online", "OnlineSoftmax (floor 1.5)", "#6baed6"),
        ("reduce", "ReduceSoftmax", "#2171b5"),
        (OURS, "candle-softmax, chosen", OURS_COLOR),
    ];
    let cases: Vec<&Row> =
        rows.iter().filter(|row| row.implementation == "safe" && copy_us(rows, row).is_some()).collect();
    let any = cases.first()?;

    let ratios = |case: &Row| {
        let copy = copy_us(rows, case);
        STEPS.map(|(name, ..)| {
            let us = match name {
                "torch" => {
                    let torch = peers_of(peers, case).filter(|peer| peer.implementation == name);
                    torch.filter_map(Row::best).min_by(f64::total_cmp)
                }
                _ => find(rows, case, "softmax", name).and_then(Row::any),
            };
            us.zip(copy).map(|(us, copy)| us / copy)
        })
    };
    let all: Vec<[Option<f64>; 7]> = cases.iter().map(|case| ratios(case)).collect();
    let groups = cases.iter().zip(all).map(|(case, ratios)| Group {
        name: case.shape.replace('x', " × "),
        note: if case.in_l2 { "in L2".into() } else { String::new() },
        ratios: ratios.to_vec(),
    });
    Some(bars(&Bars {
        title: "From Safe to the chosen kernel, f32",
        subtitle: "time over a copy's time of the same tensor, log scale, shorter is better (candle_nn: as called)",
        unit: "copy",
        steps: &STEPS,
        groups: groups.collect(),
        facts: any.facts.line(),
    }))
}

/// Calls on the CPU beside candle's and the peers', as multiples of ours.
fn cpu_calls(rows: &[Row], peers: &[Row]) -> Option<String> {
    const STEPS: [(&str, &str, &str); 5] = [
        (CANDLE, "candle_nn softmax", "#9a9a9a"),
        (CANDLE_LAST_DIM, "candle_nn softmax_last_dim", "#4d4d4d"),
        ("torch", "PyTorch", "#e69f00"),
        ("onnxruntime out", "onnxruntime (output given, to both)", "#0072b2"),
        (OURS, "candle-softmax", OURS_COLOR),
    ];
    let is_case = |row: &&Row| row.op == "softmax" && row.implementation == OURS && row.threads.is_some();
    let cases: Vec<&Row> = rows.iter().filter(is_case).filter(|row| in_cpu_picture(row)).collect();
    let any = cases.first()?;
    let groups = cases.iter().map(|case| {
        let us = |name: &str| {
            let peer = || peers_of(peers, case).find(|peer| peer.implementation == name).and_then(Row::any);
            find(rows, case, "softmax", name).and_then(Row::any).or_else(peer)
        };
        let ours = |name: &str| us(if name == "onnxruntime out" { OURS_OUT } else { OURS });
        let along = if case.dim < 0 { String::new() } else { format!("dim {}, ", case.dim) };
        let threads = if case.threads == Some(1) { "one thread" } else { "two threads" };
        Group {
            name: format!("{} {}", case.shape.replace('x', " × "), case.dtype),
            note: along + threads,
            ratios: STEPS.iter().map(|(name, ..)| us(name).zip(ours(name)).map(|(us, ours)| us / ours)).collect(),
        }
    });
    Some(bars(&Bars {
        title: "Softmax on the CPU, as called",
        subtitle: "time over candle-softmax's, log scale, shorter is better",
        unit: "1",
        steps: &STEPS,
        groups: groups.collect(),
        facts: any.facts.line(),
    }))
}

/// Large tensors with two threads, small ones with one.
fn in_cpu_picture(row: &Row) -> bool {
    let elements: usize = row.shape.split('x').filter_map(|dim| dim.parse::<usize>().ok()).product();
    row.threads == Some(if elements > 1 << 23 { 2 } else { 1 })
}

/// Ratios to something of the same case, side by side.
struct Bars<'a> {
    title: &'a str,
    subtitle: &'a str,
    /// What has the ratio 1.
    unit: &'a str,
    /// The bars of a group: name, words and colour.
    steps: &'a [(&'a str, &'a str, &'a str)],
    groups: Vec<Group>,
    facts: String,
}

struct Group {
    name: String,
    note: String,
    ratios: Vec<Option<f64>>,
}

fn bars(of: &Bars) -> String {
    let most = of.groups.iter().flat_map(|group| &group.ratios).flatten().copied().fold(1.0, f64::max);
    let (bar, space, left, top, height, bottom) = (21.0, 26.0, 70.0, 62.0, 330.0, 104.0);
    let group = (bar * of.steps.len() as f64 + space).max(130.0);
    let panel = group * of.groups.len() as f64;
    // The legend needs some width, however few cases there are.
    let width = (left + panel + 44.0).max(720.0);
    let mut svg = Svg::new(width, top + height + bottom);
    svg.words((left, 24.0), Anchor::Start, 17.0, INK, "font-weight=\"bold\"", of.title);
    svg.words((left, 43.0), Anchor::Start, 12.0, FAINT, "", of.subtitle);

    // Some air below 1, or a bar at the ceiling would not show, and above the highest for its figure.
    let (low, high) = (0.5f64.log10(), most.log10() + 0.35);
    let y = |ratio: f64| top + height - (ratio.log10() - low) / (high - low) * height;
    let mut power = 0;
    while f64::from(power) <= high {
        let ratio = 10f64.powi(power);
        if power > 0 {
            svg.line((left, y(ratio)), (left + panel, y(ratio)), GRID, 1.0, "");
        }
        svg.words((left - 8.0, y(ratio) + 4.0), Anchor::End, 12.0, FAINT, "", &format!("{ratio:.0}x"));
        power += 1;
    }
    for (index, case) in of.groups.iter().enumerate() {
        let x0 = left + index as f64 * group + (group - bar * of.steps.len() as f64) / 2.0;
        for (step, (ratio, (name, _, color))) in case.ratios.iter().zip(of.steps).enumerate() {
            let x = x0 + step as f64 * bar;
            let Some(ratio) = *ratio else { continue };
            svg.bar((x, y(ratio)), bar - 2.0, top + height - y(ratio), color);
            let digits = if ratio < 10.0 { format!("{ratio:.2}") } else { format!("{ratio:.0}") };
            let ink = if *name == OURS { OURS_COLOR } else { INK };
            svg.turned((x + bar / 2.0 + 3.0, y(ratio) - 4.0), Anchor::Start, 11.0, ink, &digits);
        }
        let middle = x0 + bar * of.steps.len() as f64 / 2.0;
        svg.words((middle, top + height + 18.0), Anchor::Middle, 12.0, INK, "", &case.name);
        if !case.note.is_empty() {
            svg.words((middle, top + height + 33.0), Anchor::Middle, 11.0, FAINT, "", &case.note);
        }
    }
    svg.line((left, top + height), (left + panel, top + height), FAINT, 1.0, "");
    // On top of the bars, which all cross it.
    svg.line((left, y(1.0)), (left + panel, y(1.0)), INK, 1.2, "7 4");
    svg.words((left + panel + 4.0, y(1.0) + 4.0), Anchor::Start, 11.0, INK, "", of.unit);

    let mut at = (left, top + height + 56.0);
    for (_, words, color) in of.steps {
        let wide = 32.0 + 6.9 * words.chars().count() as f64;
        if at.0 + wide > width {
            at = (left, at.1 + 20.0);
        }
        svg.bar((at.0, at.1 - 10.0), 12.0, 12.0, color);
        svg.words((at.0 + 17.0, at.1), Anchor::Start, 12.0, INK, "", words);
        at.0 += wide;
    }
    svg.words((left, top + height + bottom - 10.0), Anchor::Start, 11.0, FAINT, "", &of.facts);
    svg.finish()
}
