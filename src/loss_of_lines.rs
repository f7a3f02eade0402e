//! What a loss makes of its lines' statistics, and back the gradients of those. Out of candle's ops it would be a dozen small kernels each way,
//! and on CUDA some of them copy parameters from memory of the host, which is gone when a captured graph is launched.

use crate::cpu::made_of_each;
use crate::lines::{unsupported_dtype, Contiguous};
use crate::loss::Reduction;
#[cfg(not(feature = "cuda"))]
use crate::op::no_cuda;
use crate::statistics::{
    Classes, LossBackward, KEPT, LOG_P, LOG_SUM, MAX, MOST_GRADIENTS, OF_LOG_P, OF_LOG_SUM_EXP, OF_SMOOTH, SMOOTH,
    WEIGHT,
};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType};
use std::iter::Sum;

/// On the CPU, lines that a thread takes at once.
const LINES_OF_PART: usize = 8192;
/// For as many elements of a softmax a line takes as long.
const COST_OF_LINE: usize = 64;

/// What is a loss for each line (shape (lines,)), or one for all (a scalar), of statistics of shape (numbers, lines), in their dtype. Terms and sums are
/// of f64, which no number of lines rounds off.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LossOfLines {
    /// What the logarithms of probabilities count, of the target and of all classes, and the square of the log-sum-exp; 0 where there are none
    /// of these.
    pub of_target: f64,
    pub of_smooth: f64,
    pub of_square: f64,
    /// Whether targets have weights.
    pub weighted: bool,
    pub reduction: Reduction,
}

/// Of a line or of many: what targets and classes cost, and what the mean of that is over; the squares, and what theirs is over.
#[derive(Clone, Copy)]
struct Terms {
    cost: f64,
    weight: f64,
    square: f64,
    count: f64,
}

impl Sum for Terms {
    fn sum<I: Iterator<Item = Self>>(terms: I) -> Self {
        terms.fold(Terms { cost: 0.0, weight: 0.0, square: 0.0, count: 0.0 }, |sum, line| Terms {
            cost: sum.cost + line.cost,
            weight: sum.weight + line.weight,
            square: sum.square + line.square,
            count: sum.count + line.count,
        })
    }
}

/// The statistics of each line, one kind after the other
#[derive(Clone, Copy)]
struct Statistics<'a, R> {
    of: &'a [R],
    lines: usize,
}

impl<'a, R: WithDType> Statistics<'a, R> {
    /// Of all the elements of such a tensor
    fn new(of: &'a [R], layout: &Layout) -> Result<Self> {
        let (_, lines) = layout.shape().dims2()?;
        Ok(Self { of, lines })
    }
    fn read(self, which: usize, line: usize) -> f64 {
        self.of[which * self.lines + line].to_f64()
    }
    fn log_sum_exp(self, line: usize) -> f64 {
        self.read(MAX, line) + self.read(LOG_SUM, line)
    }
}

impl LossOfLines {
    pub fn is_mean(&self) -> bool {
        self.reduction == Reduction::Mean
    }
    pub fn of_each(&self) -> bool {
        self.reduction == Reduction::None
    }
    /// How many losses there are of so many lines.
    #[cfg(feature = "cuda")]
    pub fn losses(&self, lines: usize) -> usize {
        if self.of_each() {
            lines
        } else {
            1
        }
    }

    /// How many statistics there are of each line, …
    #[cfg(feature = "cuda")]
    pub fn statistics(&self) -> usize {
        crate::statistics::statistics_of(self.weighted, self.of_smooth != 0.0)
    }
    /// … and how many gradients these have.
    pub fn gradients(&self) -> usize {
        if self.of_smooth != 0.0 || self.of_square != 0.0 {
            MOST_GRADIENTS
        } else {
            1
        }
    }

    fn terms<R: WithDType>(&self, statistics: Statistics<R>, line: usize) -> Terms {
        let read = |which| statistics.read(which, line);
        let weight = read(WEIGHT);
        let count = if self.weighted { read(KEPT) } else { weight };
        let log_p = if self.weighted { read(LOG_P) * weight } else { read(LOG_P) };
        let smooth = if self.of_smooth != 0.0 { self.of_smooth * read(SMOOTH) } else { 0.0 };
        let square = if self.of_square != 0.0 { self.of_square * statistics.log_sum_exp(line).powi(2) } else { 0.0 };
        Terms { cost: -self.of_target * log_p - smooth, weight, square, count }
    }

    /// Of parts that are the same ones whatever the threads, and so is the sum.
    fn sum<R: WithDType>(&self, statistics: Statistics<R>) -> Terms {
        let part = |part: usize| {
            let first = part * LINES_OF_PART;
            let lines = first..statistics.lines.min(first + LINES_OF_PART);
            lines.map(|line| self.terms(statistics, line)).sum::<Terms>()
        };
        let parts = statistics.lines.div_ceil(LINES_OF_PART);
        made_of_each(parts, LINES_OF_PART * COST_OF_LINE, 1, part).into_iter().sum()
    }

    fn forward<R: WithDType>(&self, statistics: Statistics<R>) -> Vec<R> {
        let loss = |terms: Terms| match self.reduction {
            Reduction::Mean => R::from_f64(terms.cost / terms.weight + terms.square / terms.count),
            Reduction::Sum | Reduction::None => R::from_f64(terms.cost + terms.square),
        };
        match self.reduction {
            Reduction::Mean | Reduction::Sum => vec![loss(self.sum(statistics))],
            Reduction::None => {
                made_of_each(statistics.lines, COST_OF_LINE, LINES_OF_PART, |line| loss(self.terms(statistics, line)))
            }
        }
    }

    /// The gradients of the statistics.
    fn backward<R: WithDType>(&self, statistics: Statistics<R>, gradients: &[R]) -> Vec<R> {
        let lines = statistics.lines;
        let over = self.is_mean().then(|| self.sum(statistics));
        let (weights, count) = over.map_or((1.0, 1.0), |sum| (sum.weight, sum.count));
        let gradient = |line: usize| gradients[if self.of_each() { line } else { 0 }].to_f64();
        let of_each = |which: usize, line: usize| match which {
            OF_LOG_P => {
                let weight = if self.weighted { statistics.read(WEIGHT, line) } else { 1.0 };
                -self.of_target * weight * (gradient(line) / weights)
            }
            OF_LOG_SUM_EXP if self.of_square != 0.0 => {
                2.0 * self.of_square * statistics.log_sum_exp(line) * (gradient(line) / count)
            }
            OF_SMOOTH if self.of_smooth != 0.0 => -self.of_smooth * (gradient(line) / weights),
            _ => 0.0,
        };
        let numbers = self.gradients() * lines;
        made_of_each(numbers, COST_OF_LINE, LINES_OF_PART, |i| R::from_f64(of_each(i / lines, i % lines)))
    }
}

/// The losses of logits, given their lines' statistics, of which they are. Backward is of the logits, and not of the statistics, or candle would make a
/// tensor of zeros to add the gradients of these to.
pub(crate) struct Losses {
    pub of_lines: LossOfLines,
    /// What the statistics are of
    pub classes: Classes,
}

impl Losses {
    const NAME: &'static str = "cross-entropy";

    fn shape(&self, statistics: &Layout) -> Result<Shape> {
        let (_, lines) = statistics.shape().dims2()?;
        Ok(if self.of_lines.of_each() { lines.into() } else { ().into() })
    }
}

impl CustomOp2 for Losses {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        statistics: &CpuStorage,
        layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let statistics = Contiguous::new(Self::NAME, statistics, layout)?;
        let elements = statistics.start()..statistics.start() + layout.shape().elem_count();
        let out = match statistics.storage() {
            CpuStorage::F32(xs) => CpuStorage::F32(self.of_lines.forward(Statistics::new(&xs[elements], layout)?)),
            CpuStorage::F64(xs) => CpuStorage::F64(self.of_lines.forward(Statistics::new(&xs[elements], layout)?)),
            other => return Err(unsupported_dtype(other.dtype(), Self::NAME)),
        };
        Ok((out, self.shape(layout)?))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        statistics: &CudaStorage,
        layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let out = crate::cuda::loss_of_lines(Self::NAME, &self.of_lines, (statistics, layout), None)?;
        Ok((out, self.shape(layout)?))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        no_cuda(Self::NAME)
    }

    fn bwd(
        &self,
        logits: &Tensor,
        statistics: &Tensor,
        _: &Tensor,
        grad_res: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let of_statistics = statistics.apply_op2(&grad_res.contiguous()?, LossOfLinesBackward(self.of_lines))?;
        let gradient = LossBackward { classes: self.classes.clone(), only_log_sum_exp: false };
        Ok((Some(logits.apply_op3(statistics, &of_statistics, gradient)?), None))
    }
}

/// The gradients of the statistics from them and those of the losses. It has none itself, as candle says when a second derivative is asked
/// for.
struct LossOfLinesBackward(LossOfLines);

impl LossOfLinesBackward {
    const NAME: &'static str = "cross-entropy-backward";

    fn shape(&self, statistics: &Layout) -> Result<Shape> {
        let (_, lines) = statistics.shape().dims2()?;
        Ok((self.0.gradients(), lines).into())
    }
}

impl CustomOp2 for LossOfLinesBackward {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(
        &self,
        statistics: &CpuStorage,
        layout: &Layout,
        gradients: &CpuStorage,
        gradients_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let statistics = Contiguous::new(Self::NAME, statistics, layout)?;
        let gradients = Contiguous::new(Self::NAME, gradients, gradients_layout)?;
        let elements = statistics.start()..statistics.start() + layout.shape().elem_count();
        let of_losses = gradients.start()..gradients.start() + gradients_layout.shape().elem_count();
        let out = match (statistics.storage(), gradients.storage()) {
            (CpuStorage::F32(xs), CpuStorage::F32(gs)) => {
                CpuStorage::F32(self.0.backward(Statistics::new(&xs[elements], layout)?, &gs[of_losses]))
            }
            (CpuStorage::F64(xs), CpuStorage::F64(gs)) => {
                CpuStorage::F64(self.0.backward(Statistics::new(&xs[elements], layout)?, &gs[of_losses]))
            }
            (_, other) => return Err(unsupported_dtype(other.dtype(), Self::NAME)),
        };
        Ok((out, self.shape(layout)?))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        statistics: &CudaStorage,
        layout: &Layout,
        gradients: &CudaStorage,
        gradients_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let gradients = Some((gradients, gradients_layout));
        let out = crate::cuda::loss_of_lines(Self::NAME, &self.0, (statistics, layout), gradients)?;
        Ok((out, self.shape(layout)?))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        no_cuda(Self::NAME)
    }
}
