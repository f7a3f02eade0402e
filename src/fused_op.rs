//! The op behind [`Softmax`](crate::Softmax): scores, and bias and sinks where there are some, as arguments that get their
//! gradients; the mask beside them.

use crate::fused::{Around, Geometry, Gradients, Operand, Options, Wanted};
use crate::lines::{contiguous_range, storage_address, Contiguous};
use crate::sums::SumOver;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, InplaceOp1, InplaceOp2, InplaceOp3, Layout,
    Result, Shape, Storage, Tensor,
};
use std::array::from_fn;
use std::sync::Mutex;

pub(crate) const NAME: &str = "fused-softmax";

/// What a backend does of it. Tensors have at least one element.
trait Kernels: BackendStorage<Device: BackendDevice<Storage = Self>> {
    fn of(storage: &Storage) -> Option<&Self>;

    fn into_storage(self) -> Storage;

    fn forward(
        options: &Options,
        geometry: &Geometry,
        scores: Operand<Self>,
        around: &Around<Self>,
        out: DType,
    ) -> Result<Self>;

    fn forward_inplace(
        options: &Options,
        geometry: &Geometry,
        scores: &mut Self,
        start: usize,
        around: &Around<Self>,
    ) -> Result<()>;

    fn backward(
        options: &Options,
        geometry: &Geometry,
        scores: Operand<Self>,
        around: &Around<Self>,
        gradient: Operand<Self>,
        wanted: &Wanted,
    ) -> Result<Gradients<Self>>;
}

macro_rules! kernels {
    ($Storage:ident, $Variant:ident, $($module:tt)*) => {
        impl Kernels for $Storage {
            fn of(storage: &Storage) -> Option<&Self> {
                match storage {
                    Storage::$Variant(storage) => Some(storage),
                    _ => None,
                }
            }

            fn into_storage(self) -> Storage {
                Storage::$Variant(self)
            }

            fn forward(
                options: &Options,
                geometry: &Geometry,
                scores: Operand<Self>,
                around: &Around<Self>,
                out: DType,
            ) -> Result<Self> {
                $($module)*::forward(options, geometry, scores, around, out)
            }

            fn forward_inplace(
                options: &Options,
                geometry: &Geometry,
                scores: &mut Self,
                start: usize,
                around: &Around<Self>,
            ) -> Result<()> {
                $($module)*::forward_inplace(options, geometry, scores, start, around)
            }

            fn backward(
                options: &Options,
                geometry: &Geometry,
                scores: Operand<Self>,
                around: &Around<Self>,
                gradient: Operand<Self>,
                wanted: &Wanted,
            ) -> Result<Gradients<Self>> {
                $($module)*::backward(options, geometry, scores, around, gradient, wanted)
            }
        }
    };
}
kernels!(CpuStorage, Cpu, crate::cpu::fused);
#[cfg(feature = "cuda")]
kernels!(CudaStorage, Cuda, crate::cuda::fused);
#[cfg(not(feature = "cuda"))]
kernels!(CudaStorage, Cuda, no_cuda);

/// In place of the kernels in a build without them.
#[cfg(not(feature = "cuda"))]
mod no_cuda {
    use super::*;
    use crate::op::no_cuda;

    pub fn forward(
        _: &Options,
        _: &Geometry,
        _: Operand<CudaStorage>,
        _: &Around<CudaStorage>,
        _: DType,
    ) -> Result<CudaStorage> {
        no_cuda(NAME)
    }

    pub fn forward_inplace(
        _: &Options,
        _: &Geometry,
        _: &mut CudaStorage,
        _: usize,
        _: &Around<CudaStorage>,
    ) -> Result<()> {
        no_cuda(NAME)
    }

    pub fn backward(
        _: &Options,
        _: &Geometry,
        _: Operand<CudaStorage>,
        _: &Around<CudaStorage>,
        _: Operand<CudaStorage>,
        _: &Wanted,
    ) -> Result<Gradients<CudaStorage>> {
        no_cuda(NAME)
    }
}

/// A storage and how a tensor lies in it.
type Laid<'a, S> = (&'a S, &'a Layout);

fn operand<'a, S>((storage, layout): Laid<'a, S>) -> Operand<'a, S> {
    Operand { storage, start: layout.start_offset() }
}

/// What lies so in a storage, if that is on the device of `S`.
fn laid<'a, S: Kernels>(storage: &'a Storage, layout: &'a Layout) -> Result<Laid<'a, S>> {
    match S::of(storage) {
        Some(storage) => Ok((storage, layout)),
        None => candle_core::bail!("{NAME}: tensors on different devices, or on one without kernels"),
    }
}

/// Checked by the builder: shapes, dtypes and devices fit each other and the options.
#[derive(Clone, Debug)]
pub(crate) struct FusedOp {
    pub options: Options,
    pub dim: usize,
    pub out: DType,
    pub mask: Option<Tensor>,
}

/// Bias and sinks, where there are some.
#[derive(Clone, Copy)]
struct Beside<T> {
    bias: Option<T>,
    sinks: Option<T>,
}

impl FusedOp {
    fn geometry(&self, shape: &Shape, beside: Beside<&Layout>, mask: Option<&Layout>) -> Result<Geometry> {
        let broadcast = |layout: Option<&Layout>| layout.map(|layout| layout.broadcast_as(shape)).transpose();
        let (bias, mask) = (broadcast(beside.bias)?, broadcast(mask)?);
        let queries = self.options.window.map(|_| shape.rank() - 2);
        Ok(Geometry::new(shape, self.dim, bias.as_ref(), mask.as_ref(), beside.sinks, queries))
    }

    /// Calls `f` with where everything is that is read beside scores of this shape.
    fn around<S: Kernels, R>(
        &self,
        shape: &Shape,
        beside: Beside<Laid<S>>,
        f: impl FnOnce(&Geometry, &Around<S>) -> Result<R>,
    ) -> Result<R> {
        let mask = self.mask.as_ref().map(Tensor::storage_and_layout);
        let mask = mask.as_ref().map(|(storage, layout)| laid::<S>(storage, layout)).transpose()?;
        let layouts = Beside { bias: beside.bias.map(|laid| laid.1), sinks: beside.sinks.map(|laid| laid.1) };
        let geometry = self.geometry(shape, layouts, mask.map(|laid| laid.1))?;
        f(
            &geometry,
            &Around { bias: beside.bias.map(operand), mask: mask.map(operand), sinks: beside.sinks.map(operand) },
        )
    }

    fn forward<S: Kernels>(&self, (scores, layout): Laid<S>, beside: Beside<Laid<S>>) -> Result<(S, Shape)> {
        let shape = layout.shape();
        if shape.elem_count() == 0 {
            return Ok((scores.device().zeros_impl(shape, self.out)?, shape.clone()));
        }
        let x = Contiguous::new(NAME, scores, layout)?;
        let scores = Operand { storage: x.storage(), start: x.start() };
        let out = self
            .around(shape, beside, |geometry, around| S::forward(&self.options, geometry, scores, around, self.out))?;
        Ok((out, shape.clone()))
    }

    fn over<S: Kernels>(&self, scores: &mut S, layout: &Layout, beside: Beside<Laid<S>>) -> Result<()> {
        let elements = contiguous_range(layout).ok_or(candle_core::Error::RequiresContiguous { op: NAME })?;
        self.around(layout.shape(), beside, |geometry, around| {
            S::forward_inplace(&self.options, geometry, scores, elements.start, around)
        })
    }

    fn backward(&self, scores: &Tensor, beside: Beside<&Tensor>, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        if gradient.shape() != scores.shape() || gradient.dtype() != self.out {
            candle_core::bail!(
                "{NAME}: a gradient of {:?} {:?} for a result of {:?} {:?}",
                gradient.dtype(),
                gradient.shape(),
                self.out,
                scores.shape()
            )
        }
        if scores.elem_count() == 0 {
            let zeros = |tensor: Option<&Tensor>| tensor.map(Tensor::zeros_like).transpose();
            return Ok([zeros(Some(scores))?, zeros(beside.bias)?, zeros(beside.sinks)?]);
        }
        match scores.device() {
            candle_core::Device::Cpu => self.backward_on::<CpuStorage>(scores, beside, gradient),
            _ => self.backward_on::<CudaStorage>(scores, beside, gradient),
        }
    }

    fn backward_on<S: Kernels>(
        &self,
        scores: &Tensor,
        beside: Beside<&Tensor>,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let shape = scores.shape();
        // What no variable is behind needs no gradient. (Where none of them has one behind it, somebody calls this by hand.)
        let all = [Some(scores), beside.bias, beside.sinks].into_iter().flatten().all(|tensor| !tensor.track_op());
        let is_wanted = |tensor: &&Tensor| all || tensor.track_op();
        // Over what a tensor was broadcast along, of `dims`, of which its own are those from `first` on.
        let sum = |tensor: &Tensor, dims: &[usize], first: usize| {
            let mut kept = vec![1; dims.len()];
            kept[first..first + tensor.rank()].copy_from_slice(tensor.dims());
            SumOver::new(dims, &kept)
        };
        let mut lines = shape.dims().to_vec();
        lines[self.dim] = 1;
        let bias = beside.bias.filter(is_wanted);
        let sinks = beside.sinks.filter(is_wanted);
        let wanted = Wanted {
            scores: is_wanted(&scores),
            bias: bias.map(|bias| sum(bias, shape.dims(), shape.rank() - bias.rank())),
            sinks: sinks.map(|sinks| sum(sinks, &lines, shape.rank().saturating_sub(3))),
        };
        let all = [Some(scores), beside.bias, beside.sinks, Some(gradient)];
        let found = {
            // A storage is locked once: who waits to write to it would be waited for by a second reader, and wait for the first.
            let addresses = all.map(|tensor| tensor.map(storage_address));
            let first = |i: usize| addresses.iter().position(|address| *address == addresses[i]).unwrap_or(i);
            let guards: [_; 4] =
                from_fn(|i| all[i].filter(|_| first(i) == i).map(|tensor| tensor.storage_and_layout().0));
            let laid = |i: usize| match (all[i], &guards[first(i)]) {
                (Some(tensor), Some(storage)) => laid::<S>(storage, tensor.layout()).map(Some),
                _ => Ok(None),
            };
            let (Some(x), Some(g)) = (laid(0)?, laid(3)?) else { return Ok([None, None, None]) };
            let (x, g) = (Contiguous::new(NAME, x.0, x.1)?, Contiguous::new(NAME, g.0, g.1)?);
            let beside = Beside { bias: laid(1)?, sinks: laid(2)? };
            self.around(shape, beside, |geometry, around| {
                let scores = Operand { storage: x.storage(), start: x.start() };
                let gradient = Operand { storage: g.storage(), start: g.start() };
                S::backward(&self.options, geometry, scores, around, gradient, &wanted)
            })?
        };
        let tracked = all.into_iter().flatten().find(|tensor| tensor.track_op());
        let gradient_of = |storage: Option<S>, of: Option<&Tensor>| {
            let (Some(storage), Some(of)) = (storage, of) else { return Ok(None) };
            finished(storage.into_storage(), of.shape(), tracked)?.to_dtype(of.dtype()).map(Some)
        };
        Ok([gradient_of(found.scores, Some(scores))?, gradient_of(found.bias, bias)?, gradient_of(found.sinks, sinks)?])
    }
}

/// A gradient that depends on `tracked`: to differentiate it again is candle's error that this is not supported, rather than a
/// gradient without what goes through here.
fn finished(gradient: Storage, shape: &Shape, tracked: Option<&Tensor>) -> Result<Tensor> {
    match tracked {
        Some(tracked) => tracked.apply_op1(Finished(Mutex::new(Some(gradient)), shape.clone())),
        None => Ok(Tensor::from_storage(gradient, shape, BackpropOp::none(), false)),
    }
}

/// An op whose result is there before it is applied, once.
struct Finished(Mutex<Option<Storage>>, Shape);

impl Finished {
    fn take<S>(&self, of: impl FnOnce(Storage) -> Option<S>) -> Result<(S, Shape)> {
        match self.0.lock().ok().and_then(|mut storage| storage.take()).and_then(of) {
            Some(storage) => Ok((storage, self.1.clone())),
            None => candle_core::bail!("{NAME}-backward: the gradient was taken already, or is on another device"),
        }
    }
}

impl CustomOp1 for Finished {
    fn name(&self) -> &'static str {
        "fused-softmax-backward"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.take(|storage| match storage {
            Storage::Cpu(storage) => Some(storage),
            _ => None,
        })
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.take(|storage| match storage {
            Storage::Cuda(storage) => Some(storage),
            _ => None,
        })
    }
}

/// With the scores alone.
impl CustomOp1 for FusedOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, scores: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward((scores, layout), Beside { bias: None, sinks: None })
    }

    fn cuda_fwd(&self, scores: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.forward((scores, layout), Beside { bias: None, sinks: None })
    }

    fn bwd(&self, scores: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let [scores, ..] = self.backward(scores, Beside { bias: None, sinks: None }, gradient)?;
        Ok(scores)
    }
}

/// With one tensor beside the scores.
#[derive(Clone, Debug)]
pub(crate) enum WithOne {
    Bias(FusedOp),
    Sinks(FusedOp),
}

impl WithOne {
    fn split<T>(&self, other: T) -> (&FusedOp, Beside<T>) {
        match self {
            WithOne::Bias(op) => (op, Beside { bias: Some(other), sinks: None }),
            WithOne::Sinks(op) => (op, Beside { bias: None, sinks: Some(other) }),
        }
    }
}

impl CustomOp2 for WithOne {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        scores: &CpuStorage,
        layout: &Layout,
        other: &CpuStorage,
        other_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (op, beside) = self.split((other, other_layout));
        op.forward((scores, layout), beside)
    }

    fn cuda_fwd(
        &self,
        scores: &CudaStorage,
        layout: &Layout,
        other: &CudaStorage,
        other_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (op, beside) = self.split((other, other_layout));
        op.forward((scores, layout), beside)
    }

    fn bwd(
        &self,
        scores: &Tensor,
        other: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (op, beside) = self.split(other);
        let [scores, bias, sinks] = op.backward(scores, beside, gradient)?;
        Ok((scores, bias.or(sinks)))
    }
}

/// With bias and sinks.
impl CustomOp3 for FusedOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        scores: &CpuStorage,
        layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
        sinks: &CpuStorage,
        sinks_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let beside = Beside { bias: Some((bias, bias_layout)), sinks: Some((sinks, sinks_layout)) };
        self.forward((scores, layout), beside)
    }

    fn cuda_fwd(
        &self,
        scores: &CudaStorage,
        layout: &Layout,
        bias: &CudaStorage,
        bias_layout: &Layout,
        sinks: &CudaStorage,
        sinks_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let beside = Beside { bias: Some((bias, bias_layout)), sinks: Some((sinks, sinks_layout)) };
        self.forward((scores, layout), beside)
    }

    fn bwd(
        &self,
        scores: &Tensor,
        bias: &Tensor,
        sinks: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let beside = Beside { bias: Some(bias), sinks: Some(sinks) };
        let [scores, bias, sinks] = self.backward(scores, beside, gradient)?;
        Ok((scores, bias, sinks))
    }
}

/// Over the scores alone, which share no memory with what is beside them, …
impl InplaceOp1 for FusedOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, scores: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.over(scores, layout, Beside { bias: None, sinks: None })
    }

    fn cuda_fwd(&self, scores: &mut CudaStorage, layout: &Layout) -> Result<()> {
        self.over(scores, layout, Beside { bias: None, sinks: None })
    }
}

/// … with one tensor beside them, …
impl InplaceOp2 for WithOne {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        scores: &mut CpuStorage,
        layout: &Layout,
        other: &CpuStorage,
        other_layout: &Layout,
    ) -> Result<()> {
        let (op, beside) = self.split((other, other_layout));
        op.over(scores, layout, beside)
    }

    fn cuda_fwd(
        &self,
        scores: &mut CudaStorage,
        layout: &Layout,
        other: &CudaStorage,
        other_layout: &Layout,
    ) -> Result<()> {
        let (op, beside) = self.split((other, other_layout));
        op.over(scores, layout, beside)
    }
}

/// … and with both: candle locks all of them, in an order of its own.
impl InplaceOp3 for FusedOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        scores: &mut CpuStorage,
        layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
        sinks: &CpuStorage,
        sinks_layout: &Layout,
    ) -> Result<()> {
        self.over(scores, layout, Beside { bias: Some((bias, bias_layout)), sinks: Some((sinks, sinks_layout)) })
    }

    fn cuda_fwd(
        &self,
        scores: &mut CudaStorage,
        layout: &Layout,
        bias: &CudaStorage,
        bias_layout: &Layout,
        sinks: &CudaStorage,
        sinks_layout: &Layout,
    ) -> Result<()> {
        self.over(scores, layout, Beside { bias: Some((bias, bias_layout)), sinks: Some((sinks, sinks_layout)) })
    }
}
