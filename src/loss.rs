//! Cross-entropy of logits and class indices, without the probabilities ever being stored.
//!
//! The logits are read once forward; backward reads them once more and writes the gradient. Both run on the CPU and on
//! CUDA, and take f16, bf16, f32 and f64 logits with any strides.

use crate::lines::{computed_in, storage_address};
use crate::loss_of_lines::{LossOfLines, Losses};
use crate::op::{check_dtype, normal_numbers};
use crate::statistics::{Classes, Ignored, LineStatistics};
use candle_core::{DType, Error, Result, Tensor};

/// What becomes of the losses of the targets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// One number: their mean, weighted by the weights of the targets' classes if there are such. Ignored targets do not count.
    #[default]
    Mean,
    /// One number: their sum.
    Sum,
    /// A loss for each target, in the targets' shape; 0 for those that are ignored.
    None,
}

/// The cross-entropy of logits and class indices, with the options and results of `torch.nn.functional.cross_entropy`, and a
/// z-loss.
///
/// With ε the label smoothing, C classes, w their weights (1 without) and p = softmax(logits), a target t that is not ignored
/// costs (1 − ε)·w_t·(−ln p_t) + ε/C·Σⱼ w_j·(−ln p_j). [`Reduction::Mean`] divides the sum of that by the sum of the
/// w_t. The z-loss adds z·lse² with lse = ln Σⱼ exp(logit_j), which keeps the logits from drifting off; a mean averages it over
/// the targets that are not ignored, whatever their weights. A mean over no targets is NaN, as in torch.
///
/// Losses are f32 (f64 for f64 logits), whatever the logits' dtype; sums over targets are taken in f64. The gradient has the
/// logits' dtype; it is the only one, weights that track gradients are an error. A second derivative is an error too.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_softmax::loss::{CrossEntropy, Reduction};
///
/// let logits = Var::new(&[[2f32, 1., 0.], [0., 0., 0.]], &Device::Cpu)?;
/// let targets = Tensor::new(&[0i64, -100], &Device::Cpu)?;
/// let loss = CrossEntropy::new().label_smoothing(0.1).reduction(Reduction::Sum).forward(&logits, &targets)?;
/// assert!((loss.to_scalar::<f32>()? - 0.507606).abs() < 1e-5);
///
/// let grads = loss.backward()?;
/// assert_eq!(grads.get(&logits).unwrap().to_vec2::<f32>()?[1], [0.0; 3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    ignored: Ignored,
    label_smoothing: f64,
    weight: Option<Tensor>,
    z_loss: f64,
    reduction: Reduction,
}

impl Default for CrossEntropy {
    fn default() -> Self {
        Self::new()
    }
}

impl CrossEntropy {
    const NAME: &'static str = "cross-entropy";

    /// The mean over all targets but −100, without smoothing, weights and z-loss.
    pub fn new() -> Self {
        Self { ignored: Ignored(-100), label_smoothing: 0.0, weight: None, z_loss: 0.0, reduction: Reduction::Mean }
    }

    /// The target that costs nothing and has no gradient, be it a class or not; −100 unless set. Its logits do not count, whatever they are.
    /// `i64::MIN`: there is none.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_softmax::loss::CrossEntropy;
    ///
    /// let logits = Tensor::zeros((2, 4), DType::F32, &Device::Cpu)?;
    /// let targets = Tensor::new(&[1u32, 0], &Device::Cpu)?;
    /// let loss = CrossEntropy::new().ignore_index(0).forward(&logits, &targets)?; // of the first alone
    /// assert!((loss.to_scalar::<f32>()? - 4f32.ln()).abs() < 1e-6);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn ignore_index(mut self, target: i64) -> Self {
        self.ignored = Ignored(target);
        self
    }

    /// How much of the target's probability is spread evenly over all classes, from 0 to 1.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_softmax::loss::CrossEntropy;
    ///
    /// let (logits, target) = (Tensor::new(&[[1f32, 0.0]], &Device::Cpu)?, Tensor::new(&[0u32], &Device::Cpu)?);
    /// let plain = CrossEntropy::new().forward(&logits, &target)?.to_scalar::<f32>()?;
    /// let smooth = CrossEntropy::new().label_smoothing(0.2).forward(&logits, &target)?.to_scalar::<f32>()?;
    /// assert!((smooth - plain - 0.2 / 2.0).abs() < 1e-6); // half of it is the other class's, which costs 1 more
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn label_smoothing(mut self, share: f64) -> Self {
        self.label_smoothing = share;
        self
    }

    /// A weight for each class: shape (classes,), in the logits' dtype or f32, on their device.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_softmax::loss::{CrossEntropy, Reduction};
    ///
    /// let logits = Tensor::zeros((2, 2), DType::F32, &Device::Cpu)?;
    /// let (targets, weights) = (Tensor::new(&[0u32, 1], &Device::Cpu)?, Tensor::new(&[1f32, 3.0], &Device::Cpu)?);
    /// let losses = CrossEntropy::new().weight(&weights).reduction(Reduction::None).forward(&logits, &targets)?;
    /// assert!((losses.to_vec1::<f32>()?[1] - 3.0 * 2f32.ln()).abs() < 1e-6);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn weight(mut self, weight: &Tensor) -> Self {
        self.weight = Some(weight.clone());
        self
    }

    /// The factor of the squared log-sum-exp that is added.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_softmax::loss::CrossEntropy;
    ///
    /// let (logits, target) = (Tensor::new(&[[3f32]], &Device::Cpu)?, Tensor::new(&[0u32], &Device::Cpu)?);
    /// let loss = CrossEntropy::new().z_loss(0.1).forward(&logits, &target)?;
    /// assert!((loss.to_scalar::<f32>()? - 0.1 * 9.0).abs() < 1e-6);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn z_loss(mut self, factor: f64) -> Self {
        self.z_loss = factor;
        self
    }

    /// What becomes of the losses; [`Reduction::Mean`] unless set.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_softmax::loss::{CrossEntropy, Reduction};
    ///
    /// let (logits, targets) = (Tensor::zeros((3, 5), DType::F32, &Device::Cpu)?, Tensor::zeros(3, DType::U32, &Device::Cpu)?);
    /// let sum = CrossEntropy::new().reduction(Reduction::Sum).forward(&logits, &targets)?;
    /// assert!((sum.to_scalar::<f32>()? - 3.0 * 5f32.ln()).abs() < 1e-5);
    /// let each = CrossEntropy::new().reduction(Reduction::None).forward(&logits, &targets)?;
    /// assert_eq!(each.dims(), [3]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn reduction(mut self, reduction: Reduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// The loss of `logits` of shape (batch, classes, …) and `targets` of shape (batch, …), or of (classes,) and a scalar:
    /// f16, bf16, f32 or f64, and i64 or u32 (u8 too).
    ///
    /// # Errors
    /// If shapes or dtypes are others, the tensors are not on one device or on Metal, there are no classes, the smoothing is not
    /// in 0 to 1, or the factor of z-loss is not a finite number of what the loss is computed in. A target that is neither ignored
    /// nor a class is an error on the CPU; on CUDA, where looking would mean waiting, the loss of its line is NaN, and so is the
    /// gradient.
    pub fn forward(&self, logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let name = Self::NAME;
        self.check(logits, targets)?;
        let class_dim = 1.min(logits.rank() - 1);
        let count = logits.dim(class_dim)?;
        let of_smooth = self.label_smoothing / count.max(1) as f64;
        let dtype = computed_in(logits.dtype());
        let weights = match &self.weight {
            Some(weight) => {
                // The op locks them beside the logits: who waits to write to what both are part of would wait for the one lock, and the
                // other for it.
                let shared = storage_address(weight) == storage_address(logits);
                let weight = if shared { weight.copy()? } else { weight.clone() };
                Some(weight.to_dtype(dtype)?.contiguous()?)
            }
            None => None,
        };
        let classes = Classes {
            dim: class_dim,
            // candle copies some empty tensors as if they were broadcast.
            targets: match targets.elem_count() {
                0 => Tensor::zeros(0, DType::I64, &candle_core::Device::Cpu)?,
                _ => targets.flatten_all()?.to_dtype(DType::I64)?.contiguous()?,
            },
            ignored: self.ignored,
            weights,
            smooth: of_smooth > 0.0,
        };
        if targets.elem_count() > 0 && count == 0 {
            candle_core::bail!("{name}: logits of shape {:?} have no classes", logits.shape())
        }
        let of_lines = LossOfLines {
            of_target: 1.0 - self.label_smoothing,
            of_smooth,
            of_square: self.z_loss,
            weighted: self.weight.is_some(),
            reduction: self.reduction,
        };
        let statistics = logits.apply_op1_no_bwd(&LineStatistics(classes.clone()))?;
        let losses = logits.apply_op2(&statistics, Losses { of_lines, classes })?;
        match self.reduction {
            Reduction::Mean | Reduction::Sum => Ok(losses),
            Reduction::None => losses.narrow(0, 0, targets.elem_count())?.reshape(targets.shape()),
        }
    }

    fn check(&self, logits: &Tensor, targets: &Tensor) -> Result<()> {
        let name = Self::NAME;
        check_dtype(logits.dtype(), name)?;
        let dims = logits.dims();
        let expected = match dims {
            [] => {
                candle_core::bail!("{name}: logits are a scalar, their shape must be (batch, classes, …) or (classes,)")
            }
            [_] => vec![],
            [batch, _, others @ ..] => [&[*batch], others].concat(),
        };
        if targets.dims() != expected {
            candle_core::bail!(
                "{name}: targets of shape {:?} for logits of shape {dims:?}, whose classes are dimension {}: the targets' must be \
                 {expected:?}",
                targets.dims(),
                1.min(dims.len() - 1)
            )
        }
        if !matches!(targets.dtype(), DType::I64 | DType::U32 | DType::U8) {
            return Err(Error::UnsupportedDTypeForOp(targets.dtype(), name)
                .context(format!("{name}: targets are i64 or u32 class indices, convert with to_dtype first")));
        }
        if !logits.device().same_device(targets.device()) {
            candle_core::bail!(
                "{name}: logits on {:?} and targets on {:?}, move one with to_device",
                logits.device().location(),
                targets.device().location()
            )
        }
        if let Some(weight) = &self.weight {
            let classes = dims[1.min(dims.len() - 1)];
            if weight.dims() != [classes] {
                candle_core::bail!(
                    "{name}: weight of shape {:?} for {classes} classes, it must be [{classes}]",
                    weight.dims()
                )
            }
            if weight.dtype() != logits.dtype() && weight.dtype() != DType::F32 {
                return Err(Error::UnsupportedDTypeForOp(weight.dtype(), name).context(format!(
                    "{name}: weight of {:?} for logits of {:?}, it must be of the same dtype or f32",
                    weight.dtype(),
                    logits.dtype()
                )));
            }
            if !weight.device().same_device(logits.device()) {
                candle_core::bail!(
                    "{name}: logits on {:?} and weight on {:?}, move one with to_device",
                    logits.device().location(),
                    weight.device().location()
                )
            }
            if weight.track_op() {
                candle_core::bail!("{name}: weight tracks gradients, which it does not get here, pass weight.detach()")
            }
        }
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            candle_core::bail!("{name}: label smoothing of {}, it must be in 0 to 1", self.label_smoothing)
        }
        let most = *normal_numbers(logits.dtype()).end();
        if !(-most..=most).contains(&self.z_loss) {
            candle_core::bail!(
                "{name}: z-loss of {} for {:?} logits, it must be a number of up to {most:e}",
                self.z_loss,
                logits.dtype()
            )
        }
        Ok(())
    }
}

/// The mean cross-entropy, for `candle_nn::loss::cross_entropy`: `logits` of shape (batch, classes), `targets` of shape (batch,),
/// u8, u32 or i64; a scalar in the logits' dtype.
///
/// Unlike candle-nn's, sums are f32 sums in half precision too, and the memory of a second tensor of the logits' size is not
/// needed. No target is ignored. [`CrossEntropy`] has the options, and losses in f32.
///
/// # Errors
/// As of [`CrossEntropy::forward`], and for logits of another rank.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_softmax::loss;
///
/// let logits = Tensor::new(&[[0f32, 0.], [0., f32::NEG_INFINITY]], &Device::Cpu)?;
/// let targets = Tensor::new(&[1u32, 0], &Device::Cpu)?;
/// let found = loss::cross_entropy(&logits, &targets)?.to_scalar::<f32>()?;
/// assert!((found - 2f32.ln() / 2.0).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    if logits.rank() != 2 {
        candle_core::bail!(
            "cross-entropy: logits of shape {:?}, they must be (batch, classes): use CrossEntropy for other ranks",
            logits.shape()
        )
    }
    CrossEntropy::new().ignore_index(Ignored::NONE.0).forward(logits, targets)?.to_dtype(logits.dtype())
}
