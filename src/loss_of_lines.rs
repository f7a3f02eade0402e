//! What a loss makes of its lines' statistics, and back the gradients of those. Out of candle's ops it would be a dozen small kernels each way,
//! and on CUDA some of them copy parameters from memory of the host, which is gone when a captured graph is launched.

use crate::lines::{unsupported_dtype, Contiguous};
use crate::loss::Reduction;
#[cfg(not(feature = "cuda"))]
use crate::op::no_cuda;
use crate::statistics::{KEPT, LOG_P, LOG_SUM_EXP, SMOOTH, STATISTICS, WEIGHT};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor, WithDType};
use std::iter::Sum;

/// A loss for each line (shape (lines,)), or one for all (a scalar), of statistics of shape (STATISTICS, lines), in their dtype. Terms and sums are of
/// f64, which no number of lines rounds off.
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
struct Statistics<'a, R>(&'a [R]);

impl<R: WithDType> Statistics<'_, R> {
    fn lines(self) -> usize {
        self.0.len() / STATISTICS
    }
    fn read(self, which: usize, line: usize) -> f64 {
        self.0[which * self.lines() + line].to_f64()
    }
}

impl LossOfLines {
    const NAME: &'static str = "cross-entropy";

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

    fn terms<R: WithDType>(&self, statistics: Statistics<R>, line: usize) -> Terms {
        let read = |which| statistics.read(which, line);
        let count = read(KEPT);
        let weight = if self.weighted { read(WEIGHT) } else { count };
        let log_p = if self.weighted { read(LOG_P) * weight } else { read(LOG_P) };
        let smooth = if self.of_smooth != 0.0 { self.of_smooth * read(SMOOTH) } else { 0.0 };
        let square = if self.of_square != 0.0 { self.of_square * read(LOG_SUM_EXP).powi(2) } else { 0.0 };
        Terms { cost: -self.of_target * log_p - smooth, weight, square, count }
    }

    fn sum<R: WithDType>(&self, statistics: Statistics<R>) -> Terms {
        (0..statistics.lines()).map(|line| self.terms(statistics, line)).sum()
    }

    fn forward<R: WithDType>(&self, statistics: &[R]) -> Vec<R> {
        let statistics = Statistics(statistics);
        let loss = |terms: Terms| match self.reduction {
            Reduction::Mean => R::from_f64(terms.cost / terms.weight + terms.square / terms.count),
            Reduction::Sum | Reduction::None => R::from_f64(terms.cost + terms.square),
        };
        match self.reduction {
            Reduction::Mean | Reduction::Sum => vec![loss(self.sum(statistics))],
            Reduction::None => (0..statistics.lines()).map(|line| loss(self.terms(statistics, line))).collect(),
        }
    }

    /// The gradients of the statistics.
    fn backward<R: WithDType>(&self, statistics: &[R], gradients: &[R]) -> Vec<R> {
        let statistics = Statistics(statistics);
        let lines = statistics.lines();
        let over = self.is_mean().then(|| self.sum(statistics));
        let (weights, count) = over.map_or((1.0, 1.0), |sum| (sum.weight, sum.count));
        let mut out = vec![R::from_f64(0.0); STATISTICS * lines];
        for line in 0..lines {
            let gradient = gradients[if self.of_each() { line } else { 0 }].to_f64();
            let weight = if self.weighted { statistics.read(WEIGHT, line) } else { 1.0 };
            let mut write = |which, gradient| out[which * lines + line] = R::from_f64(gradient);
            write(LOG_P, -self.of_target * weight * (gradient / weights));
            if self.of_smooth != 0.0 {
                write(SMOOTH, -self.of_smooth * (gradient / weights));
            }
            if self.of_square != 0.0 {
                write(LOG_SUM_EXP, 2.0 * self.of_square * statistics.read(LOG_SUM_EXP, line) * (gradient / count));
            }
        }
        out
    }

    fn shape(&self, statistics: &Shape) -> Result<Shape> {
        let (_, lines) = statistics.dims2()?;
        Ok(if self.of_each() { lines.into() } else { ().into() })
    }
}

impl CustomOp1 for LossOfLines {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let statistics = Contiguous::new(Self::NAME, storage, layout)?;
        let elements = statistics.start()..statistics.start() + layout.shape().elem_count();
        let out = match statistics.storage() {
            CpuStorage::F32(xs) => CpuStorage::F32(self.forward(&xs[elements])),
            CpuStorage::F64(xs) => CpuStorage::F64(self.forward(&xs[elements])),
            other => return Err(unsupported_dtype(other.dtype(), Self::NAME)),
        };
        Ok((out, self.shape(layout.shape())?))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((crate::cuda::loss_of_lines(Self::NAME, self, (storage, layout), None)?, self.shape(layout.shape())?))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        no_cuda(Self::NAME)
    }

    fn bwd(&self, statistics: &Tensor, _: &Tensor, grad_res: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(statistics.apply_op2(&grad_res.contiguous()?, LossOfLinesBackward(*self))?))
    }
}

/// The gradients of the statistics from them and those of the losses. It has none itself, as candle says when a second derivative is asked
/// for.
struct LossOfLinesBackward(LossOfLines);

impl LossOfLinesBackward {
    const NAME: &'static str = "cross-entropy-backward";
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
                CpuStorage::F32(self.0.backward(&xs[elements], &gs[of_losses]))
            }
            (CpuStorage::F64(xs), CpuStorage::F64(gs)) => {
                CpuStorage::F64(self.0.backward(&xs[elements], &gs[of_losses]))
            }
            (_, other) => return Err(unsupported_dtype(other.dtype(), Self::NAME)),
        };
        Ok((out, layout.shape().clone()))
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
        Ok((out, layout.shape().clone()))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        no_cuda(Self::NAME)
    }
}
