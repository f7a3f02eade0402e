//! Trains a small causal GPT, whose attention uses this crate's softmax, on real text, and lets it write some.
//!
//!     cargo run --release --example attention                      # this repository's own source
//!     cargo run --release --example attention -- book.txt          # files of your own
//!     cargo run --release --features cuda --example attention -- --device cuda --steps 2000 --layers 6 --dim 384
//!
//! Before that it makes the same first steps twice, with scale, mask and `candle_nn::ops::softmax` one after the other and with
//! this crate's softmax that does all of it at once, and compares the two losses: both have to train the same model.

mod common;

use anyhow::{bail, ensure, Context, Result};
use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::{AdamW, Embedding, LayerNorm, Linear, Module, Optimizer, VarBuilder, VarMap};
use candle_softmax::Softmax;
use clap::Parser;
use rand::distr::{weighted::WeightedIndex, Distribution};
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Train a small GPT with this crate's softmax and sample text from it.
#[derive(Parser)]
struct Args {
    /// Text files to learn from [default: this repository's source and README]
    files: Vec<PathBuf>,
    /// Training steps
    #[arg(long, default_value_t = 1000)]
    steps: usize,
    /// Steps made with either softmax before the training, to compare the losses
    #[arg(long, default_value_t = 10)]
    compare_steps: usize,
    /// Transformer blocks
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// Attention heads
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Width of the model, a multiple of the heads
    #[arg(long, default_value_t = 64)]
    dim: usize,
    /// Characters that the model looks back on
    #[arg(long, default_value_t = 32)]
    context: usize,
    /// Sequences per step
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Peak learning rate
    #[arg(long, default_value_t = 5e-3)]
    lr: f64,
    /// Characters to write after the training
    #[arg(long, default_value_t = 400)]
    sample_len: usize,
    /// Below 1 the text is likelier, above 1 more varied
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Seeds the weights, the batches and the sampling
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu", value_parser = common::parse_device)]
    device: Device,
}

/// From scores (batch, heads, time, time) and what they are multiplied with to how much each position attends to each, none
/// to those after it.
type Attend = fn(&Tensor, f64) -> candle_core::Result<Tensor>;

const CANDLE: Attend = |scores, scale| {
    let mask = causal_mask(scores.dim(D::Minus1)?, scores.device())?;
    candle_nn::ops::softmax(&(scores * scale)?.broadcast_add(&mask)?, D::Minus1)
};
const OURS: Attend = |scores, scale| Softmax::new().scale(scale).causal().forward(scores);

/// Largest relative difference of two losses that still counts as the same training: f32 rounding, amplified by
/// the steps it goes through.
const TOLERANCE: f64 = 1e-4;

fn main() -> Result<()> {
    // candle's threads wait for one another by spinning. On tensors as small as these they gain nothing, and on a busy
    // machine they wait longer than they work.
    if std::env::var_os("CANDLE_NUM_THREADS").is_none() {
        std::env::set_var("CANDLE_NUM_THREADS", "1");
    }

    let args = Args::parse();
    for (option, value) in [
        ("steps", args.steps),
        ("layers", args.layers),
        ("heads", args.heads),
        ("dim", args.dim),
        ("context", args.context),
        ("batch", args.batch),
    ] {
        ensure!(value > 0, "--{option} must be at least 1");
    }
    ensure!(args.dim % args.heads == 0, "--dim {} is not a multiple of --heads {}", args.dim, args.heads);
    for (option, value) in [("lr", args.lr), ("temperature", args.temperature)] {
        ensure!(value > 0.0 && value.is_finite(), "--{option} must be positive");
    }
    ensure!(((1.0 / args.temperature) as f32).is_normal(), "--temperature must have an inverse that f32 holds");

    let corpus = Corpus::read(&args.files)?;
    ensure!(
        corpus.train.len() > args.context && corpus.held_out.len() > args.context,
        "{} characters of text are too few for --context {}",
        corpus.train.len() + corpus.held_out.len(),
        args.context
    );
    println!(
        "text: {} characters to train on, {} held out, {} different ones",
        corpus.train.len(),
        corpus.held_out.len(),
        corpus.vocabulary.len()
    );

    let vars = VarMap::new();
    let builder = VarBuilder::from_varmap(&vars, DType::F32, &args.device);
    let model = Gpt::new(&args, corpus.vocabulary.len(), builder)?;
    let vars = named(&vars)?;
    let weights = initial_weights(&vars, args.seed)?;
    let count: usize = vars.values().map(|var| var.elem_count()).sum();
    println!(
        "model: {count} parameters, on {} ({})\n",
        common::device_tag(&args.device),
        common::device_name(&args.device)?
    );

    set(&vars, &weights)?;
    check_gradients(&args, &corpus, &model, &vars)?;
    if args.compare_steps > 0 {
        compare(&args, &corpus, &model, &vars, &weights)?;
    }

    set(&vars, &weights)?;
    println!("\ntraining with candle_softmax::Softmax (losses in nats per character)");
    println!("character frequencies alone: {:.4}", corpus.entropy());
    println!("validation loss before:      {:.4}", validation_loss(&args, &corpus, &model)?);
    train(&args, &corpus, &model, &vars)?;
    println!("validation loss after:       {:.4}", validation_loss(&args, &corpus, &model)?);

    let text = sample(&args, &corpus, &model)?;
    println!("\nsample at temperature {}:\n{text}", args.temperature);
    Ok(())
}

/// Text as numbers: each is a character's place in the vocabulary.
struct Corpus {
    vocabulary: Vec<char>,
    train: Vec<u32>,
    held_out: Vec<u32>,
}

impl Corpus {
    fn read(files: &[PathBuf]) -> Result<Self> {
        let files = match files {
            [] => repository_files()?,
            files => files.to_vec(),
        };
        let texts = files
            .iter()
            .map(|path| std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display())))
            .collect::<Result<Vec<_>>>()?;

        let characters: BTreeSet<char> = texts.iter().flat_map(|text| text.chars()).collect();
        let vocabulary: Vec<char> = characters.into_iter().collect();
        let (mut train, mut held_out) = (Vec::new(), Vec::new());
        for text in &texts {
            let tokens: Vec<u32> = text
                .chars()
                .filter_map(|character| vocabulary.binary_search(&character).ok())
                .map(|token| token as u32)
                .collect();
            // The last tenth of every file, so that each kind of text is on both sides.
            let (head, tail) = tokens.split_at(tokens.len() * 9 / 10);
            train.extend(head);
            held_out.extend(tail);
        }
        Ok(Self { vocabulary, train, held_out })
    }

    /// Entropy of the characters' frequencies: the best loss of a model that ignores what came before.
    fn entropy(&self) -> f64 {
        let mut counts = vec![0.0; self.vocabulary.len()];
        for &token in &self.train {
            counts[token as usize] += 1.0;
        }
        let total = self.train.len() as f64;
        counts.into_iter().filter(|&count| count > 0.0).map(|count: f64| -count / total * (count / total).ln()).sum()
    }
}

/// This repository's source and README, found from the current directory or from where the program was built.
fn repository_files() -> Result<Vec<PathBuf>> {
    let name = concat!("name=\"", env!("CARGO_PKG_NAME"), "\"");
    let is_root = |directory: &Path| {
        std::fs::read_to_string(directory.join("Cargo.toml"))
            .is_ok_and(|manifest| manifest.lines().any(|line| line.replace(' ', "").starts_with(name)))
    };
    let candidates = [Path::new("."), Path::new(env!("CARGO_MANIFEST_DIR"))];
    let Some(root) = candidates.into_iter().find(|path| is_root(path)) else {
        bail!(
            "the source of {} is neither here nor where this program was built; name text files to learn from",
            env!("CARGO_PKG_NAME")
        );
    };

    let mut files = Vec::new();
    let mut paths = ["README.md", "examples", "kernels", "src", "tests"].map(|name| root.join(name)).to_vec();
    while let Some(path) = paths.pop() {
        if path.is_dir() {
            for entry in std::fs::read_dir(&path)? {
                paths.push(entry?.path());
            }
        } else if path.is_file() {
            let extension = path.extension().and_then(|extension| extension.to_str());
            if matches!(extension, Some("rs" | "cu" | "cuh" | "md")) {
                files.push(path);
            }
        }
    }
    // Directories list their files in any order; a seed should mean the same run everywhere.
    files.sort();
    Ok(files)
}

struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    fn new(args: &Args, vocabulary: usize, vb: VarBuilder) -> candle_core::Result<Self> {
        let blocks = (0..args.layers).map(|i| Block::new(args, vb.pp("blocks").pp(i)));
        Ok(Self {
            tokens: candle_nn::embedding(vocabulary, args.dim, vb.pp("tokens"))?,
            positions: candle_nn::embedding(args.context, args.dim, vb.pp("positions"))?,
            blocks: blocks.collect::<candle_core::Result<_>>()?,
            norm: layer_norm(args.dim, vb.pp("norm"))?,
            head: candle_nn::linear(args.dim, vocabulary, vb.pp("head"))?,
        })
    }

    /// From (batch, time) tokens to (batch, time, vocabulary) logits of the token after each.
    fn forward(&self, tokens: &Tensor, attend: Attend) -> candle_core::Result<Tensor> {
        let (_, time) = tokens.dims2()?;
        let positions = Tensor::arange(0, time as u32, tokens.device())?;
        let tokens = self.tokens.forward(tokens)?;
        let mut xs = tokens.broadcast_add(&self.positions.forward(&positions)?)?;
        for block in &self.blocks {
            xs = block.forward(&xs, attend)?;
        }
        self.head.forward(&self.norm.forward(&xs)?)
    }

    /// Mean cross-entropy, in nats per character, of the tokens after each.
    fn loss(&self, batch: &Batch, attend: Attend) -> candle_core::Result<Tensor> {
        let logits = self.forward(&batch.inputs, attend)?.flatten_to(1)?;
        candle_nn::loss::cross_entropy(&logits, &batch.targets)
    }
}

/// Zero where a position may look, minus infinity at the positions after it.
fn causal_mask(time: usize, device: &Device) -> candle_core::Result<Tensor> {
    let position = Tensor::arange(0, time as u32, device)?;
    let query = position.reshape((time, 1))?.broadcast_as((time, time))?;
    let key = position.reshape((1, time))?.broadcast_as((time, time))?;
    let hidden = Tensor::full(f32::NEG_INFINITY, (time, time), device)?;
    key.gt(&query)?.where_cond(&hidden, &hidden.zeros_like()?)
}

/// Without a bias: with one, `LayerNorm::forward` takes a fused path that autograd does not see, and every
/// gradient before it is lost.
fn layer_norm(dim: usize, vb: VarBuilder) -> candle_core::Result<LayerNorm> {
    candle_nn::layer_norm_no_bias(dim, 1e-5, vb)
}

struct Block {
    attention_norm: LayerNorm,
    attention: Attention,
    mlp_norm: LayerNorm,
    expand: Linear,
    contract: Linear,
}

impl Block {
    fn new(args: &Args, vb: VarBuilder) -> candle_core::Result<Self> {
        let (dim, hidden) = (args.dim, 4 * args.dim);
        Ok(Self {
            attention_norm: layer_norm(dim, vb.pp("attention_norm"))?,
            attention: Attention::new(args, vb.pp("attention"))?,
            mlp_norm: layer_norm(dim, vb.pp("mlp_norm"))?,
            expand: candle_nn::linear(dim, hidden, vb.pp("expand"))?,
            contract: candle_nn::linear(hidden, dim, vb.pp("contract"))?,
        })
    }

    fn forward(&self, xs: &Tensor, attend: Attend) -> candle_core::Result<Tensor> {
        let attention = self.attention.forward(&self.attention_norm.forward(xs)?, attend)?;
        let xs = (xs + attention)?;
        let hidden = self.expand.forward(&self.mlp_norm.forward(&xs)?)?.gelu()?;
        &xs + self.contract.forward(&hidden)?
    }
}

/// Causal attention with several heads.
struct Attention {
    heads: usize,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
}

impl Attention {
    fn new(args: &Args, vb: VarBuilder) -> candle_core::Result<Self> {
        // Query and key only reach the loss through the softmax, so as layers of their own they show whether it
        // passes gradients on.
        let linear = |name| candle_nn::linear_no_bias(args.dim, args.dim, vb.pp(name));
        Ok(Self {
            heads: args.heads,
            query: linear("query")?,
            key: linear("key")?,
            value: linear("value")?,
            output: linear("output")?,
        })
    }

    fn forward(&self, xs: &Tensor, attend: Attend) -> candle_core::Result<Tensor> {
        let (batch, time, dim) = xs.dims3()?;
        let head_dim = dim / self.heads;
        // (batch, time, dim) to (batch, heads, time, head_dim)
        let split = |xs: Tensor| xs.reshape((batch, time, self.heads, head_dim))?.transpose(1, 2)?.contiguous();
        let query = split(self.query.forward(xs)?)?;
        let key = split(self.key.forward(xs)?)?;
        let value = split(self.value.forward(xs)?)?;

        let scale = 1.0 / (head_dim as f64).sqrt();
        let attended = attend(&query.matmul(&key.t()?)?, scale)?.matmul(&value)?;
        self.output.forward(&attended.transpose(1, 2)?.reshape((batch, time, dim))?)
    }
}

/// The variables by name, in the same order in every run.
fn named(vars: &VarMap) -> Result<BTreeMap<String, Var>> {
    let Ok(vars) = vars.data().lock() else {
        bail!("the variables are locked by a thread that failed");
    };
    Ok(vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect())
}

/// Matrices normal, scaled so that a layer keeps the size of its input; biases zero and layer norms one.
fn initial_weights(vars: &BTreeMap<String, Var>, seed: u64) -> Result<Vec<Tensor>> {
    let mut rng = StdRng::seed_from_u64(seed);
    vars.iter()
        .map(|(name, var)| match var.dims() {
            [_] if name.ends_with(".bias") => Ok(var.zeros_like()?),
            [_] => Ok(var.ones_like()?),
            dims => {
                let deviation = 1.0 / (dims[dims.len() - 1] as f32).sqrt();
                let values = common::normal(&mut rng, var.elem_count(), deviation);
                Ok(Tensor::from_vec(values, dims, var.device())?)
            }
        })
        .collect()
}

fn set(vars: &BTreeMap<String, Var>, weights: &[Tensor]) -> Result<()> {
    for (var, weights) in vars.values().zip(weights) {
        var.set(weights)?;
    }
    Ok(())
}

/// candle says nothing when an op leaves the graph: the variables behind it just stop learning.
fn check_gradients(args: &Args, corpus: &Corpus, model: &Gpt, vars: &BTreeMap<String, Var>) -> Result<()> {
    let batch = Batches::new(args, &corpus.train).next()?;
    let gradients = model.loss(&batch, OURS)?.backward()?;
    let lost: Vec<_> =
        vars.iter().filter(|(_, var)| gradients.get(var).is_none()).map(|(name, _)| name.as_str()).collect();
    ensure!(lost.is_empty(), "no gradient reaches {}", lost.join(", "));
    println!("all {} variables get a gradient", vars.len());
    Ok(())
}

struct Batch {
    /// (batch, context)
    inputs: Tensor,
    /// (batch * context): the character after each input
    targets: Tensor,
}

impl Batch {
    /// The windows of `context` characters that begin at `starts`.
    fn new(args: &Args, text: &[u32], starts: &[usize]) -> candle_core::Result<Self> {
        let windows = |offset| -> Vec<u32> {
            starts.iter().flat_map(|start| &text[start + offset..][..args.context]).copied().collect()
        };
        let shape = (starts.len(), args.context);
        Ok(Self {
            inputs: Tensor::from_vec(windows(0), shape, &args.device)?,
            targets: Tensor::from_vec(windows(1), shape.0 * shape.1, &args.device)?,
        })
    }
}

/// Batches of windows at random places; the same ones for the same seed.
struct Batches<'a> {
    args: &'a Args,
    text: &'a [u32],
    rng: StdRng,
}

impl<'a> Batches<'a> {
    fn new(args: &'a Args, text: &'a [u32]) -> Self {
        let rng = StdRng::seed_from_u64(args.seed);
        Self { args, text, rng }
    }

    fn next(&mut self) -> candle_core::Result<Batch> {
        let last = self.text.len() - self.args.context - 1;
        let starts: Vec<_> = (0..self.args.batch).map(|_| self.rng.random_range(0..=last)).collect();
        Batch::new(self.args, self.text, &starts)
    }
}

/// AdamW with a learning rate that rises over the first steps and then falls along a cosine.
struct Trainer<'a> {
    batches: Batches<'a>,
    optimizer: AdamW,
    step: usize,
}

impl<'a> Trainer<'a> {
    fn new(args: &'a Args, corpus: &'a Corpus, vars: &BTreeMap<String, Var>) -> Result<Self> {
        let vars = vars.values().cloned().collect();
        Ok(Self { batches: Batches::new(args, &corpus.train), optimizer: AdamW::new_lr(vars, args.lr)?, step: 0 })
    }

    /// Makes one step and returns the loss before it.
    fn step(&mut self, model: &Gpt, attend: Attend) -> Result<f64> {
        let args = self.batches.args;
        let warm_up = (self.step + 1) as f64 / 20.0;
        let steps = args.steps.max(args.compare_steps);
        let progress = self.step as f64 / steps as f64;
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
        self.optimizer.set_learning_rate(args.lr * warm_up.min(1.0) * cosine);
        self.step += 1;

        let loss = model.loss(&self.batches.next()?, attend)?;
        self.optimizer.backward_step(&loss)?;
        Ok(loss.to_scalar::<f32>()?.into())
    }
}

/// Makes the same first steps with either softmax and fails if the losses differ.
fn compare(args: &Args, corpus: &Corpus, model: &Gpt, vars: &BTreeMap<String, Var>, weights: &[Tensor]) -> Result<()> {
    let losses = |attend: Attend| -> Result<Vec<f64>> {
        set(vars, weights)?;
        let mut trainer = Trainer::new(args, corpus, vars)?;
        (0..args.compare_steps).map(|_| trainer.step(model, attend)).collect()
    };
    let (candle, ours) = (losses(CANDLE)?, losses(OURS)?);

    println!("\nloss with either softmax, same weights and batches:");
    println!("step    candle_nn    candle_softmax    relative difference");
    let mut largest = 0.0;
    for (step, (candle, ours)) in candle.iter().zip(&ours).enumerate() {
        let difference = (ours - candle).abs() / candle.abs();
        println!("{:4}    {candle:9.6}    {ours:14.6}    {difference:19.1e}", step + 1);
        // Written so that a loss that is not a number fails.
        ensure!(difference <= TOLERANCE, "the losses differ by more than {TOLERANCE:.0e}");
        largest = f64::max(largest, difference);
    }
    println!("they agree: largest relative difference {largest:.1e}, allowed {TOLERANCE:.0e}");
    Ok(())
}

fn train(args: &Args, corpus: &Corpus, model: &Gpt, vars: &BTreeMap<String, Var>) -> Result<()> {
    let mut trainer = Trainer::new(args, corpus, vars)?;
    let mut smoothed = None;
    let bar = common::progress_bar(args.steps, "training")?;
    for step in 1..=args.steps {
        let loss = trainer.step(model, OURS)?;
        let average = smoothed.map_or(loss, |before: f64| 0.95 * before + 0.05 * loss);
        smoothed = Some(average);
        bar.set_message(format!("train loss {average:.3}"));
        bar.inc(1);
        if step % args.steps.div_ceil(10) == 0 {
            bar.suspend(|| println!("step {step:6}    train loss {average:.4}"));
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// Mean loss over windows spread evenly over the held-out text.
fn validation_loss(args: &Args, corpus: &Corpus, model: &Gpt) -> Result<f64> {
    const BATCHES: usize = 8;
    let windows = BATCHES * args.batch;
    let last = corpus.held_out.len() - args.context - 1;
    let starts: Vec<_> = (0..windows).map(|i| i * last / windows).collect();
    let mut total = 0.0;
    for starts in starts.chunks(args.batch) {
        let batch = Batch::new(args, &corpus.held_out, starts)?;
        total += f64::from(model.loss(&batch, OURS)?.to_scalar::<f32>()?);
    }
    Ok(total / BATCHES as f64)
}

/// Lets the model go on from the beginning of the held-out text, one character at a time.
fn sample(args: &Args, corpus: &Corpus, model: &Gpt) -> Result<String> {
    let mut rng = StdRng::seed_from_u64(args.seed);
    let mut tokens = corpus.held_out[..1].to_vec();
    for _ in 0..args.sample_len {
        let recent = &tokens[tokens.len().saturating_sub(args.context)..];
        let input = Tensor::new(recent, &args.device)?.unsqueeze(0)?;
        let logits = model.forward(&input, OURS)?.get(0)?.get(recent.len() - 1)?;
        let probabilities = Softmax::new().temperature(args.temperature).forward(&logits)?.to_vec1::<f32>()?;
        tokens.push(WeightedIndex::new(probabilities)?.sample(&mut rng) as u32);
    }
    Ok(tokens.iter().map(|&token| corpus.vocabulary[token as usize]).collect())
}
