//! The one op behind every function and unit struct here: softmax or log-softmax, forward and backward.

use crate::cpu;
use crate::lines::{
    check_gradient, computed_in, contiguous_range, from_end, resolve_dim, unsupported_dtype, Contiguous, Lines,
};
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Error, InplaceOp1, InplaceOp2, Layout, MetalStorage, Result,
    Shape, Tensor, D,
};
use std::ops::{Range, RangeInclusive};

/// How a line is walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Schedule {
    /// Three passes: the maximum, the sum, the result.
    Safe,
    /// Two passes: maximum and sum together, the result.
    Online,
    /// Two passes, a line shared by many threads whose states are merged.
    Reduce,
}

/// What is written for an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Output {
    Probability,
    LogProbability,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SoftmaxOp {
    pub name: &'static str,
    /// `None`: the device's plan chooses.
    pub schedule: Option<Schedule>,
    pub output: Output,
    pub dim: D,
}

impl SoftmaxOp {
    /// Over the last dimension, with the schedule fixed.
    pub const fn last_dim(name: &'static str, schedule: Schedule) -> Self {
        Self { name, schedule: Some(schedule), output: Output::Probability, dim: D::Minus1 }
    }

    pub fn lines(&self, layout: &Layout) -> Result<Lines> {
        let dim = resolve_dim(self.dim, layout.shape(), self.name)?;
        Ok(Lines::new(layout.shape(), dim))
    }

    /// Where an output that is given lies in its storage.
    fn output_range(&self, out: DType, out_layout: &Layout, x: DType, layout: &Layout) -> Result<Range<usize>> {
        check_dtype(x, self.name)?;
        if out != x || out_layout.shape() != layout.shape() {
            candle_core::bail!(
                "{}: an output of {out:?} {:?} for an input of {x:?} {:?}",
                self.name,
                out_layout.shape(),
                layout.shape()
            )
        }
        contiguous_range(out_layout).ok_or(Error::RequiresContiguous { op: self.name })
    }

    /// Where the elements are that an in-place call is to write.
    pub fn inplace_range(&self, layout: &Layout) -> Result<Range<usize>> {
        match contiguous_range(layout) {
            Some(range) => Ok(range),
            None => candle_core::bail!(
                "{}: only a contiguous tensor can be written in place, this one of shape {:?} has strides {:?}: call \
                 candle_softmax::ops::softmax",
                self.name,
                layout.shape(),
                layout.stride()
            ),
        }
    }
}

macro_rules! on_cpu {
    ($name:expr, $storage:expr, |$slice:ident| $body:expr) => {
        match $storage {
            CpuStorage::F32($slice) => CpuStorage::F32($body),
            CpuStorage::F64($slice) => CpuStorage::F64($body),
            CpuStorage::F16($slice) => CpuStorage::F16($body),
            CpuStorage::BF16($slice) => CpuStorage::BF16($body),
            other => return Err(unsupported_dtype(other.dtype(), $name)),
        }
    };
}
pub(crate) use on_cpu;

#[cfg(not(feature = "cuda"))]
pub(crate) fn no_cuda<T>(op: &'static str) -> Result<T> {
    candle_core::bail!(
        "{op}: the tensor is on CUDA, but candle-softmax was built without its `cuda` feature, enable it"
    )
}

fn no_metal<T>(op: &'static str) -> Result<T> {
    candle_core::bail!("{op}: there is no Metal kernel, call candle_softmax::ops::softmax, which runs on Metal")
}

impl CustomOp1 for SoftmaxOp {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let lines = self.lines(layout)?;
        check_dtype(storage.dtype(), self.name)?;
        let schedule = self.schedule.unwrap_or(Schedule::Reduce);
        let x = Contiguous::new(self.name, storage, layout)?;
        let elements = x.start()..x.start() + lines.elem_count();
        let out = on_cpu!(self.name, x.storage(), |xs| cpu::softmax(&xs[elements], lines, schedule, self.output));
        Ok((out, layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let lines = self.lines(layout)?;
        check_dtype(storage.dtype(), self.name)?;
        let out = crate::cuda::softmax(self, lines, storage, layout)?;
        Ok((out, layout.shape().clone()))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        no_cuda(self.name)
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        no_metal(self.name)
    }

    fn bwd(&self, arg: &Tensor, res: &Tensor, grad_res: &Tensor) -> Result<Option<Tensor>> {
        let dim = resolve_dim(self.dim, arg.shape(), self.name)?;
        let backward = SoftmaxBackward { output: self.output, dim: from_end(dim, arg.shape()) };
        Ok(Some(res.apply_op2(grad_res, backward)?))
    }
}

/// Over the input.
impl InplaceOp1 for SoftmaxOp {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let lines = self.lines(layout)?;
        check_dtype(storage.dtype(), self.name)?;
        let elements = self.inplace_range(layout)?;
        let schedule = self.schedule.unwrap_or(Schedule::Reduce);
        match storage {
            CpuStorage::F32(xs) => cpu::softmax_inplace(&mut xs[elements], lines, schedule, self.output),
            CpuStorage::F64(xs) => cpu::softmax_inplace(&mut xs[elements], lines, schedule, self.output),
            CpuStorage::F16(xs) => cpu::softmax_inplace(&mut xs[elements], lines, schedule, self.output),
            CpuStorage::BF16(xs) => cpu::softmax_inplace(&mut xs[elements], lines, schedule, self.output),
            other => return Err(unsupported_dtype(other.dtype(), self.name)),
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let lines = self.lines(layout)?;
        check_dtype(storage.dtype(), self.name)?;
        crate::cuda::softmax_inplace(self, lines, storage, self.inplace_range(layout)?)
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &mut CudaStorage, _: &Layout) -> Result<()> {
        no_cuda(self.name)
    }

    fn metal_fwd(&self, _: &mut MetalStorage, _: &Layout) -> Result<()> {
        no_metal(self.name)
    }
}

/// Into memory that is there already: `out` must be contiguous, and of the shape and dtype of the input.
impl InplaceOp2 for SoftmaxOp {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, out: &mut CpuStorage, out_layout: &Layout, storage: &CpuStorage, layout: &Layout) -> Result<()> {
        let lines = self.lines(layout)?;
        let out_elements = self.output_range(out.dtype(), out_layout, storage.dtype(), layout)?;
        let schedule = self.schedule.unwrap_or(Schedule::Reduce);
        let x = Contiguous::new(self.name, storage, layout)?;
        let elements = x.start()..x.start() + lines.elem_count();
        macro_rules! into {
            ($xs:ident, $out:ident) => {
                cpu::softmax_into(&$xs[elements], &mut $out[out_elements], lines, schedule, self.output)
            };
        }
        match (x.storage(), out) {
            (CpuStorage::F32(xs), CpuStorage::F32(out)) => into!(xs, out),
            (CpuStorage::F64(xs), CpuStorage::F64(out)) => into!(xs, out),
            (CpuStorage::F16(xs), CpuStorage::F16(out)) => into!(xs, out),
            (CpuStorage::BF16(xs), CpuStorage::BF16(out)) => into!(xs, out),
            (other, _) => return Err(unsupported_dtype(other.dtype(), self.name)),
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        out: &mut CudaStorage,
        out_layout: &Layout,
        storage: &CudaStorage,
        layout: &Layout,
    ) -> Result<()> {
        let out_elements = self.output_range(out.dtype(), out_layout, storage.dtype(), layout)?;
        crate::cuda::softmax_into(self, self.lines(layout)?, storage, layout, out, out_elements)
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &mut CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<()> {
        no_cuda(self.name)
    }
}

/// The gradient of the input from the result `y` and its gradient `g`: y·(g − Σ g·y), or for log-softmax g − exp(y)·Σ g.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SoftmaxBackward {
    pub output: Output,
    pub dim: D,
}

impl SoftmaxBackward {
    const NAME: &'static str = "softmax-backward";

    fn lines(&self, y: &Layout, g: &Layout) -> Result<Lines> {
        if y.shape() != g.shape() {
            candle_core::bail!("{}: result {:?} and gradient {:?} differ in shape", Self::NAME, y.shape(), g.shape())
        }
        let dim = resolve_dim(self.dim, y.shape(), Self::NAME)?;
        Ok(Lines::new(y.shape(), dim))
    }

    fn check_dtypes(y: DType, g: DType) -> Result<()> {
        if y != g {
            candle_core::bail!("{}: result {y:?} and gradient {g:?} differ in dtype", Self::NAME)
        }
        check_dtype(y, Self::NAME)
    }
}

impl CustomOp2 for SoftmaxBackward {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(
        &self,
        y: &CpuStorage,
        y_layout: &Layout,
        g: &CpuStorage,
        g_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let lines = self.lines(y_layout, g_layout)?;
        Self::check_dtypes(y.dtype(), g.dtype())?;
        let (y, g) = (Contiguous::new(Self::NAME, y, y_layout)?, Contiguous::new(Self::NAME, g, g_layout)?);
        let count = lines.elem_count();
        let out = on_cpu!(Self::NAME, y.storage(), |ys| {
            let gs = g.storage().as_slice()?;
            cpu::softmax_backward(&ys[y.start()..][..count], &gs[g.start()..][..count], lines, self.output)
        });
        Ok((out, y_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        y: &CudaStorage,
        y_layout: &Layout,
        g: &CudaStorage,
        g_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let lines = self.lines(y_layout, g_layout)?;
        Self::check_dtypes(y.dtype(), g.dtype())?;
        let out = crate::cuda::softmax_backward(Self::NAME, self.output, lines, (y, y_layout), (g, g_layout))?;
        Ok((out, y_layout.shape().clone()))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        no_cuda(Self::NAME)
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        no_metal(Self::NAME)
    }

    /// Second order, out of candle's tensor ops (so third order follows). With h the gradient of this op's result:
    /// softmax: ∂y = h·(g − Σ g·y) − g·Σ h·y and ∂g = y·(h − Σ h·y);
    /// log-softmax: ∂y = −h·exp(y)·Σ g and ∂g = h − Σ h·exp(y).
    fn bwd(&self, y: &Tensor, g: &Tensor, _: &Tensor, h: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dim = resolve_dim(self.dim, y.shape(), Self::NAME)?;
        check_gradient(Self::NAME, y.shape(), y.device().location())?;
        let dtype = y.dtype();
        let wide = computed_in(dtype);
        let (y, g, h) = (y.to_dtype(wide)?, g.to_dtype(wide)?, h.to_dtype(wide)?);
        let (y_grad, g_grad) = match self.output {
            Output::Probability => {
                let gy = (&g * &y)?.sum_keepdim(dim)?;
                let hy = (&h * &y)?.sum_keepdim(dim)?;
                let y_grad = ((&h * g.broadcast_sub(&gy)?)? - g.broadcast_mul(&hy)?)?;
                (y_grad, (&y * h.broadcast_sub(&hy)?)?)
            }
            Output::LogProbability => {
                let p = y.exp()?;
                let y_grad = (&h * &p)?.broadcast_mul(&g.sum_keepdim(dim)?)?.neg()?;
                (y_grad, h.broadcast_sub(&(&h * &p)?.sum_keepdim(dim)?)?)
            }
        };
        Ok((Some(y_grad.to_dtype(dtype)?), Some(g_grad.to_dtype(dtype)?)))
    }
}

/// The sizes of the normal numbers of what tensors of `dtype` are computed in. Those between them and 0 have lost digits, or are 0.
pub(crate) fn normal_numbers(dtype: DType) -> RangeInclusive<f64> {
    match dtype {
        DType::F64 => f64::MIN_POSITIVE..=f64::MAX,
        _ => f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX),
    }
}

pub(crate) fn check_dtype(dtype: DType, op: &'static str) -> Result<()> {
    match dtype {
        DType::F16 | DType::BF16 | DType::F32 | DType::F64 => Ok(()),
        other => Err(unsupported_dtype(other, op)),
    }
}

/// Makes a unit struct the op [`SoftmaxOp`] over the last dimension with a schedule fixed.
macro_rules! impl_custom_op {
    ($op:ident, $name:literal, $schedule:ident) => {
        impl $op {
            const OP: $crate::op::SoftmaxOp = $crate::op::SoftmaxOp::last_dim($name, $crate::op::Schedule::$schedule);
        }

        impl candle_core::CustomOp1 for $op {
            fn name(&self) -> &'static str {
                Self::OP.name
            }

            fn cpu_fwd(
                &self,
                storage: &candle_core::CpuStorage,
                layout: &candle_core::Layout,
            ) -> candle_core::Result<(candle_core::CpuStorage, candle_core::Shape)> {
                candle_core::CustomOp1::cpu_fwd(&Self::OP, storage, layout)
            }

            fn cuda_fwd(
                &self,
                storage: &candle_core::CudaStorage,
                layout: &candle_core::Layout,
            ) -> candle_core::Result<(candle_core::CudaStorage, candle_core::Shape)> {
                candle_core::CustomOp1::cuda_fwd(&Self::OP, storage, layout)
            }

            fn metal_fwd(
                &self,
                storage: &candle_core::MetalStorage,
                layout: &candle_core::Layout,
            ) -> candle_core::Result<(candle_core::MetalStorage, candle_core::Shape)> {
                candle_core::CustomOp1::metal_fwd(&Self::OP, storage, layout)
            }

            fn bwd(
                &self,
                arg: &candle_core::Tensor,
                res: &candle_core::Tensor,
                grad_res: &candle_core::Tensor,
            ) -> candle_core::Result<Option<candle_core::Tensor>> {
                Self::OP.bwd(arg, res, grad_res)
            }
        }

        /// Over the input, with [`Tensor::inplace_op1`](candle_core::Tensor::inplace_op1). candle records nothing for such
        /// an op: a gradient through the tensor would be wrong without a word.
        /// [`ops::softmax_inplace`](crate::ops::softmax_inplace) is an error instead.
        impl candle_core::InplaceOp1 for $op {
            fn name(&self) -> &'static str {
                Self::OP.name
            }

            fn cpu_fwd(
                &self,
                storage: &mut candle_core::CpuStorage,
                layout: &candle_core::Layout,
            ) -> candle_core::Result<()> {
                candle_core::InplaceOp1::cpu_fwd(&Self::OP, storage, layout)
            }

            fn cuda_fwd(
                &self,
                storage: &mut candle_core::CudaStorage,
                layout: &candle_core::Layout,
            ) -> candle_core::Result<()> {
                candle_core::InplaceOp1::cuda_fwd(&Self::OP, storage, layout)
            }

            fn metal_fwd(
                &self,
                storage: &mut candle_core::MetalStorage,
                layout: &candle_core::Layout,
            ) -> candle_core::Result<()> {
                candle_core::InplaceOp1::metal_fwd(&Self::OP, storage, layout)
            }
        }
    };
}
pub(crate) use impl_custom_op;

#[cfg(all(test, not(feature = "cuda")))]
mod tests {
    use super::*;

    #[test]
    fn another_crate_turned_cuda_on() {
        let layout = Layout::contiguous((2, 3));
        let error = CustomOp1::cuda_fwd(&crate::ReduceSoftmax, &CudaStorage, &layout).unwrap_err().to_string();
        assert!(error.contains("reduce-softmax") && error.contains("`cuda` feature"), "{error}");
    }
}
