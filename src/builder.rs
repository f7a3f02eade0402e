//! The builder of a softmax with what models put around it.

use crate::composed;
use crate::fused::{Dropout, MaskedRows, Options, Window};
use crate::fused_op::{FusedOp, WithOne, NAME};
use crate::lines::{resolve_dim, storage_address};
use crate::op::{check_dtype, normal_numbers, Output};
use candle_core::{shape::Dim, DType, Module, Result, Tensor, D};
use std::fmt::Debug;
use std::sync::Arc;

/// A dimension kept until there is a shape.
trait AnyDim: Dim + Debug + Send + Sync {}

impl<I: Dim + Debug + Send + Sync> AnyDim for I {}

#[derive(Clone, Copy, Debug)]
enum Scale {
    By(f64),
    Temperature(f64),
}

/// Softmax with what models put around it, in one pass: the scores are read once and the result is written once.
///
/// The logits of scores x are bias + softcap(scale · x), and −∞ where masked; the result is their softmax along a dimension,
/// exp(z − max) / Σ exp(z − max), or its logarithm. It has the scores' shape and, unless
/// [`out_dtype`](Self::out_dtype) says otherwise, their dtype, and is contiguous. The methods that set options never fail;
/// [`forward`](Self::forward) checks them against the scores. Options that are not set cost nothing.
///
/// Scores are f16, bf16, f32 or f64 tensors of rank 1 or more, with any strides, on the CPU or on CUDA; the arithmetic is f32
/// (f64 for f64), and each result is rounded once. On Metal it is made of candle's tensor ops. Scores, bias and sinks get
/// their gradients, in which probabilities are computed again rather than kept; differentiating those once more is candle's
/// error that backward is not supported.
///
/// - What is masked, outside of the window or −∞ has probability 0, and its gradient is 0. NaN there does not count; NaN
///   or +∞ in what takes part makes all of the line NaN, what is masked too.
/// - A line in which nothing is above −∞ is [empty](Self::masked_rows), unless there are [sinks](Self::sinks).
///
/// The state of a line is that of the online normaliser of [Milakov & Gimelshein (2018)](https://arxiv.org/abs/1805.02867).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_softmax::Softmax;
///
/// // (batch, heads, queries, keys)
/// let scores = Tensor::randn(0f32, 1., (2, 4, 8, 8), &Device::Cpu)?;
/// let p = Softmax::new().scale(1.0 / (64f64).sqrt()).causal().forward(&scores)?;
/// assert_eq!(p.dims(), scores.dims());
/// // The first query sees the first key only.
/// assert_eq!(p.get(0)?.get(0)?.get(0)?.to_vec1::<f32>()?[..2], [1.0, 0.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Softmax {
    dim: Option<Arc<dyn AnyDim>>,
    scale: Option<Scale>,
    softcap: Option<f64>,
    bias: Option<Tensor>,
    mask: Option<Tensor>,
    causal: bool,
    window: Option<(usize, usize)>,
    sinks: Option<Tensor>,
    dropout: Option<(f64, u64)>,
    masked_rows: MaskedRows,
    log: bool,
    out_dtype: Option<DType>,
}

impl Softmax {
    /// Softmax over the last dimension with nothing around it. A line of only −∞ is 0 here, and NaN in
    /// [`ops::softmax`](crate::ops::softmax).
    pub fn new() -> Self {
        Self::default()
    }

    /// Along dimension `dim`, counted from the start (`1`) or from the end (`D::Minus2`), rather than the last.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, D};
    /// use candle_softmax::Softmax;
    ///
    /// let scores = Tensor::zeros((2, 3), candle_core::DType::F32, &Device::Cpu)?;
    /// assert_eq!(Softmax::new().dim(0).forward(&scores)?.to_vec2::<f32>()?, [[0.5; 3]; 2]);
    /// assert_eq!(Softmax::new().dim(D::Minus2).forward(&scores)?.to_vec2::<f32>()?, [[0.5; 3]; 2]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn dim<I: Dim + Debug + Send + Sync + 'static>(mut self, dim: I) -> Self {
        self.dim = Some(Arc::new(dim));
        self
    }

    /// Multiplies the scores, before all else: 1/√d in attention. In place of a [`temperature`](Self::temperature) set before.
    /// An error later unless 0, or finite and not subnormal in the type computed in.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_softmax::Softmax;
    ///
    /// let scores = Tensor::new(&[0f32, 8.0], &Device::Cpu)?;
    /// let p = Softmax::new().scale(1.0 / 8.0).forward(&scores)?.to_vec1::<f32>()?;
    /// assert!((p[1] / p[0] - 1f32.exp()).abs() < 1e-5);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(Scale::By(scale));
        self
    }

    /// Divides the scores, as a [`scale`](Self::scale) of 1/t; in place of one set before. An error later unless finite, above 0, and
    /// 1/t such a number.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_softmax::Softmax;
    ///
    /// let logits = Tensor::new(&[0f32, 8.0], &Device::Cpu)?;
    /// let p = Softmax::new().temperature(4.0).forward(&logits)?.to_vec1::<f32>()?;
    /// assert!((p[1] / p[0] - 2f32.exp()).abs() < 1e-5);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn temperature(mut self, t: f64) -> Self {
        self.scale = Some(Scale::Temperature(t));
        self
    }

    /// Bends the scaled scores into ±cap: cap · tanh(x / cap), as in Gemma 2. A score of −∞ is −cap then, and takes part. An error
    /// later unless finite, above 0, and a number that the scale can be divided by.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_softmax::Softmax;
    ///
    /// let scores = Tensor::new(&[0f32, 1e9], &Device::Cpu)?;
    /// let p = Softmax::new().softcap(1.0).forward(&scores)?.to_vec1::<f32>()?;
    /// assert!((p[1] / p[0] - 1f32.exp()).abs() < 1e-5);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn softcap(mut self, cap: f64) -> Self {
        self.softcap = Some(cap);
        self
    }

    /// Adds `bias` to the scaled (and capped) scores: of their dtype and device, any strides, and a shape that broadcasts to
    /// theirs as in candle's `broadcast_add`, but does not enlarge it. It is read where it lies, and gets its gradient.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use candle_softmax::Softmax;
    ///
    /// let scores = Tensor::zeros((4, 2), DType::F32, &Device::Cpu)?;
    /// let bias = Var::new(&[0f32, 3f32.ln()], &Device::Cpu)?;
    /// let p = Softmax::new().bias(&bias).forward(&scores)?;
    /// assert!((p.to_vec2::<f32>()?[3][1] - 0.75).abs() < 1e-6);
    /// let grads = p.narrow(1, 1, 1)?.sum_all()?.backward()?;
    /// assert!((grads.get(&bias).unwrap().to_vec1::<f32>()?[1] - 4.0 * 0.75 * 0.25).abs() < 1e-6);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn bias(mut self, bias: &Tensor) -> Self {
        self.bias = Some(bias.clone());
        self
    }

    /// Leaves out the elements whose `mask` is 0: a u8 tensor on the scores' device, of any strides and a shape that broadcasts
    /// to theirs.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_softmax::Softmax;
    ///
    /// let scores = Tensor::new(&[[0f32, 0., f32::NAN], [0., 0., 0.]], &Device::Cpu)?;
    /// let keep = Tensor::new(&[1u8, 1, 0], &Device::Cpu)?;
    /// assert_eq!(Softmax::new().mask(&keep).forward(&scores)?.to_vec2::<f32>()?, [[0.5, 0.5, 0.0]; 2]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn mask(mut self, mask: &Tensor) -> Self {
        // It has no gradient, though candle tracks one that is compared from what has.
        self.mask = Some(mask.detach());
        self
    }

    /// Leaves out the keys behind each query's own position, `window(usize::MAX, 0)`; together with a
    /// [`window`](Self::window), what is in both takes part. Scores that are left out do not count, and of long lines they are
    /// not read.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_softmax::Softmax;
    ///
    /// let scores = Tensor::zeros((2, 2), DType::F32, &Device::Cpu)?;
    /// let p = Softmax::new().causal().forward(&scores)?;
    /// assert_eq!(p.to_vec2::<f32>()?, [[1.0, 0.0], [0.5, 0.5]]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// Leaves out all but `before` keys before and `after` keys after each query's own position (`usize::MAX`: no limit). The
    /// last two dimensions are queries and keys, aligned at the end: query i is at position i + (keys − queries). So the scores
    /// have rank 2 or more, and the softmax is along the last dimension. Scores that are left out do not count, and of long
    /// lines they are not read.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_softmax::Softmax;
    ///
    /// // Two queries, which are the last two of three positions
    /// let scores = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
    /// let p = Softmax::new().window(1, 0).forward(&scores)?;
    /// assert_eq!(p.to_vec2::<f32>()?, [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn window(mut self, before: usize, after: usize) -> Self {
        self.window = Some((before, after));
        self
    }

    /// Adds one more logit to the denominator of each line, without an output, as in gpt-oss: `sinks` has shape (heads,), the size
    /// of the scores' dimension −3, their dtype and device, and gets its gradient. Neither scale nor softcap touches it. The
    /// softmax is along another dimension. No line with a sink is empty.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_softmax::Softmax;
    ///
    /// let scores = Tensor::zeros((1, 2, 1, 3), DType::F32, &Device::Cpu)?;
    /// let sinks = Tensor::new(&[0f32, f32::NEG_INFINITY], &Device::Cpu)?;
    /// let p = Softmax::new().sinks(&sinks).forward(&scores)?.flatten_all()?.to_vec1::<f32>()?;
    /// assert!((p[0] - 1.0 / 4.0).abs() < 1e-6 && (p[3] - 1.0 / 3.0).abs() < 1e-6);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn sinks(mut self, sinks: &Tensor) -> Self {
        self.sinks = Some(sinks.clone());
        self
    }

    /// Sets probabilities to 0 with probability `p` (rounded to a multiple of 2⁻¹⁶) and divides the others by 1 − p. The same
    /// seed drops the same elements of a shape, on every device and in the backward pass. An error later unless 0 ≤ p < 1,
    /// and with [`log`](Self::log) unless p is 0. In a line that is NaN what is dropped may be 0 or NaN.
    ///
    /// The random numbers are Philox4x32-7 ([Salmon et al., 2011](https://doi.org/10.1145/2063384.2063405)).
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_softmax::Softmax;
    ///
    /// let scores = Tensor::zeros((100, 100), DType::F32, &Device::Cpu)?;
    /// let p = Softmax::new().dropout(0.25, 42).forward(&scores)?;
    /// let sum = p.sum_all()?.to_scalar::<f32>()?;
    /// assert!((sum - 100.0).abs() < 3.0);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn dropout(mut self, p: f64, seed: u64) -> Self {
        self.dropout = Some((p, seed));
        self
    }

    /// What becomes of a line in which nothing takes part: none of its logits is above −∞, and it has no sink.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_softmax::{MaskedRows, Softmax};
    ///
    /// let scores = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
    /// let nothing = Softmax::new().mask(&Tensor::zeros(2, DType::U8, &Device::Cpu)?);
    /// assert_eq!(nothing.forward(&scores)?.to_vec1::<f32>()?, [0.0; 2]);
    /// let p = nothing.masked_rows(MaskedRows::Nan).forward(&scores)?.to_vec1::<f32>()?;
    /// assert!(p[0].is_nan() && p[1].is_nan());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn masked_rows(mut self, rows: MaskedRows) -> Self {
        self.masked_rows = rows;
        self
    }

    /// Gives the logarithm of the probabilities, which stays exact where they would round to 0, and is −∞ where they are 0.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_softmax::Softmax;
    ///
    /// let scores = Tensor::new(&[0f32, -1000.0, f32::NEG_INFINITY], &Device::Cpu)?;
    /// assert_eq!(Softmax::new().log().forward(&scores)?.to_vec1::<f32>()?, [0.0, -1000.0, f32::NEG_INFINITY]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn log(mut self) -> Self {
        self.log = true;
        self
    }

    /// The dtype of the result, one of f16, bf16, f32 and f64, in place of the scores'.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_softmax::Softmax;
    ///
    /// let scores = Tensor::zeros(3, DType::BF16, &Device::Cpu)?;
    /// let p = Softmax::new().out_dtype(DType::F32).forward(&scores)?;
    /// assert!((p.to_vec1::<f32>()?[0] - 1.0 / 3.0).abs() < 1e-7);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn out_dtype(mut self, dtype: DType) -> Self {
        self.out_dtype = Some(dtype);
        self
    }

    /// The softmax of `scores`: any f16, bf16, f32 or f64 tensor of rank 1 or more, with any strides. An empty tensor comes
    /// back empty.
    ///
    /// # Errors
    /// If an option does not fit the scores, as said at the option; the message names both. If the scores are a scalar or of
    /// another dtype; if they are on CUDA and the crate was built without its `cuda` feature.
    pub fn forward(&self, scores: &Tensor) -> Result<Tensor> {
        let (op, bias, sinks) = self.parts(scores)?;
        if scores.device().is_metal() {
            return composed::fused(&op, scores, bias, sinks);
        }
        match (bias, sinks) {
            (None, None) => scores.apply_op1(op),
            (Some(bias), None) => scores.apply_op2(bias, WithOne::Bias(op)),
            (None, Some(sinks)) => scores.apply_op2(sinks, WithOne::Sinks(op)),
            (Some(bias), Some(sinks)) => scores.apply_op3(bias, sinks, op),
        }
    }

    /// The same written over `scores`, for callers who have no further use for them. Every tensor that shares memory with
    /// `scores` changes with it. It runs on the CPU and on CUDA.
    ///
    /// # Errors
    /// If scores, bias or sinks are a variable or made from one: autograd would go on with the values there were. If the scores
    /// are not contiguous or on Metal, if another [`out_dtype`](Self::out_dtype) was asked for, if bias or
    /// sinks share the scores' memory, and wherever [`forward`](Self::forward) is an error.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_softmax::Softmax;
    ///
    /// let scores = Tensor::zeros((2, 2), DType::F32, &Device::Cpu)?;
    /// Softmax::new().causal().forward_inplace(&scores)?;
    /// assert_eq!(scores.to_vec2::<f32>()?, [[1.0, 0.0], [0.5, 0.5]]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn forward_inplace(&self, scores: &Tensor) -> Result<()> {
        let op = self.op(scores)?;
        let beside = [("bias", &self.bias), ("sinks", &self.sinks), ("mask", &self.mask)];
        if scores.track_op() {
            candle_core::bail!(
                "{NAME}, forward_inplace: the scores track gradients, which would go wrong: call forward, or work on \
                 scores.detach().copy()?"
            )
        }
        for (option, tensor) in beside {
            let Some(tensor) = tensor else { continue };
            if tensor.track_op() {
                candle_core::bail!(
                    "{NAME}, forward_inplace: {option} tracks gradients, which would be lost: call forward, or give {option}.detach()"
                )
            }
            if storage_address(tensor) == storage_address(scores) {
                candle_core::bail!(
                    "{NAME}, forward_inplace: {option} shares the memory of the scores: give {option}.copy()?"
                )
            }
        }
        if op.out != scores.dtype() {
            candle_core::bail!(
                "{NAME}, forward_inplace: scores of {:?} cannot become {:?} in place: call forward, or leave out out_dtype",
                scores.dtype(),
                op.out
            )
        }
        if !scores.is_contiguous() {
            candle_core::bail!(
                "{NAME}, forward_inplace: only a contiguous tensor can be written in place, this one of shape {:?} has strides \
                 {:?}: call forward",
                scores.shape(),
                scores.stride()
            )
        }
        if scores.device().is_metal() {
            candle_core::bail!("{NAME}, forward_inplace: there is no Metal kernel: call forward, which runs on Metal")
        }
        if scores.elem_count() == 0 {
            // candle takes the strides of some empty tensors for a broadcast's.
            return Ok(());
        }
        match (&self.bias, &self.sinks) {
            (None, None) => scores.inplace_op1(&op),
            (Some(bias), None) => scores.inplace_op2(bias, &WithOne::Bias(op)),
            (None, Some(sinks)) => scores.inplace_op2(sinks, &WithOne::Sinks(op)),
            (Some(bias), Some(sinks)) => scores.inplace_op3(bias, sinks, &op),
        }
    }

    /// What [`composed::fused`] takes.
    pub(crate) fn parts(&self, scores: &Tensor) -> Result<(FusedOp, Option<&Tensor>, Option<&Tensor>)> {
        Ok((self.op(scores)?, self.bias.as_ref(), self.sinks.as_ref()))
    }

    /// The op for such scores, with every option checked against them.
    fn op(&self, scores: &Tensor) -> Result<FusedOp> {
        let shape = scores.shape();
        let dim = match &self.dim {
            None => resolve_dim(D::Minus1, shape, NAME)?,
            Some(dim) => resolve_dim(DynDim(dim), shape, NAME)?,
        };
        check_dtype(scores.dtype(), NAME)?;
        let out = self.out_dtype.unwrap_or(scores.dtype());
        check_dtype(out, "fused-softmax, out_dtype")?;
        let (scale, softcap) = self.check_numbers(scores.dtype())?;
        self.check_tensors(scores, dim)?;
        let options = Options {
            output: if self.log { Output::LogProbability } else { Output::Probability },
            scale,
            softcap,
            window: self.check_window(scores, dim)?,
            dropout: self.check_dropout()?,
            masked_rows: self.masked_rows,
        };
        Ok(FusedOp { options, dim, out, mask: self.mask.clone() })
    }

    /// Scale and softcap.
    fn check_numbers(&self, dtype: DType) -> Result<(f64, Option<f64>)> {
        let normal = normal_numbers(dtype);
        let usable = |x: f64| x == 0.0 || normal.contains(&x.abs());
        let scale = match self.scale {
            None => 1.0,
            Some(Scale::By(scale)) if usable(scale) => scale,
            Some(Scale::By(scale)) => candle_core::bail!(
                "{NAME}, scale: {scale} is neither 0 nor finite and from {:e} to {:e} in size, as {dtype:?} is computed with, give such a number",
                normal.start(),
                normal.end()
            ),
            Some(Scale::Temperature(t)) if t > 0.0 && t.is_finite() && usable(1.0 / t) => 1.0 / t,
            Some(Scale::Temperature(t)) => candle_core::bail!(
                "{NAME}, temperature: {t} is not a positive number that {dtype:?} can be divided by, give a finite number above 0"
            ),
        };
        if let Some(cap) = self.softcap {
            let quotient = scale / cap;
            if !(cap > 0.0 && usable(cap) && usable(quotient) && (quotient != 0.0 || scale == 0.0)) {
                candle_core::bail!(
                    "{NAME}, softcap: {cap} with a scale of {scale} cannot be computed with for {dtype:?}, give a finite number above 0 \
                     that the scale can be divided by"
                )
            }
        }
        Ok((scale, self.softcap))
    }

    /// Bias, mask and sinks.
    fn check_tensors(&self, scores: &Tensor, dim: usize) -> Result<()> {
        let shape = scores.shape();
        let same = |option: &str, tensor: &Tensor, dtype: DType| {
            if tensor.dtype() != dtype {
                candle_core::bail!(
                    "{NAME}, {option}: dtype {:?} beside scores of {:?}, convert it with to_dtype(DType::{dtype:?})",
                    tensor.dtype(),
                    scores.dtype()
                )
            }
            if !tensor.device().same_device(scores.device()) {
                candle_core::bail!(
                    "{NAME}, {option}: on {:?}, the scores on {:?}, move it with to_device",
                    tensor.device().location(),
                    scores.device().location()
                )
            }
            Ok(())
        };
        for (option, tensor, dtype) in [("bias", &self.bias, scores.dtype()), ("mask", &self.mask, DType::U8)] {
            let Some(tensor) = tensor else { continue };
            same(option, tensor, dtype)?;
            if tensor.layout().broadcast_as(shape).is_err() {
                candle_core::bail!(
                    "{NAME}, {option}: shape {:?} does not broadcast to the scores' {shape:?}: it may have no more dimensions, and \
                     each, counted from the last, has to be 1 or theirs",
                    tensor.shape()
                )
            }
        }
        let Some(sinks) = &self.sinks else { return Ok(()) };
        same("sinks", sinks, scores.dtype())?;
        if shape.rank() < 3 {
            candle_core::bail!(
                "{NAME}, sinks: scores of shape {shape:?} have no heads, give them a dimension −3 as in (heads, queries, keys)"
            )
        }
        let heads = shape.rank() - 3;
        if heads == dim {
            candle_core::bail!(
                "{NAME}, sinks: dimension {dim} of {shape:?} is both the softmax's and the heads' (−3), choose another with dim"
            )
        }
        if sinks.dims() != [shape.dims()[heads]] {
            candle_core::bail!(
                "{NAME}, sinks: shape {:?} for scores of {shape:?}, give one for each head, shape ({},)",
                sinks.shape(),
                shape.dims()[heads]
            )
        }
        Ok(())
    }

    fn check_window(&self, scores: &Tensor, dim: usize) -> Result<Option<Window>> {
        let option = match (self.causal, self.window) {
            (false, None) => return Ok(None),
            (true, None) => "causal",
            (_, Some(_)) => "window",
        };
        let (shape, rank) = (scores.shape(), scores.rank());
        if rank < 2 {
            candle_core::bail!(
                "{NAME}, {option}: scores of shape {shape:?} have no queries, give them shape (…, queries, keys)"
            )
        }
        if dim + 1 != rank {
            candle_core::bail!(
                "{NAME}, {option}: the keys are the last dimension of {shape:?}, but the softmax is along {dim}, leave out dim"
            )
        }
        let (before, after) = self.window.unwrap_or((usize::MAX, usize::MAX));
        let after = if self.causal { 0 } else { after };
        let limited = (before, after) != (usize::MAX, usize::MAX);
        Ok(limited.then(|| Window { before, after, queries: shape.dims()[rank - 2] }))
    }

    fn check_dropout(&self) -> Result<Option<Dropout>> {
        let Some((p, seed)) = self.dropout else { return Ok(None) };
        if !(0.0..1.0).contains(&p) {
            candle_core::bail!("{NAME}, dropout: p = {p}, give a number from 0 to less than 1")
        }
        if self.log && p > 0.0 {
            candle_core::bail!(
                "{NAME}, dropout: it drops probabilities, not their logarithms: leave out dropout or log"
            )
        }
        let threshold = (p * 65536.0).round().min(65535.0) as u32;
        Ok((threshold > 0).then_some(Dropout { threshold, seed }))
    }
}

/// As candle's functions take it.
struct DynDim<'a>(&'a Arc<dyn AnyDim>);

impl Dim for DynDim<'_> {
    fn to_index(&self, shape: &candle_core::Shape, op: &'static str) -> Result<usize> {
        self.0.to_index(shape, op)
    }

    fn to_index_plus_one(&self, shape: &candle_core::Shape, op: &'static str) -> Result<usize> {
        self.0.to_index_plus_one(shape, op)
    }
}

impl Module for Softmax {
    fn forward(&self, scores: &Tensor) -> Result<Tensor> {
        self.forward(scores)
    }
}
