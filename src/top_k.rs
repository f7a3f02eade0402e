//! The greatest elements of each line: their weights, their places, and the gradient of the logits.

use crate::cpu::{self, Element};
use crate::lines::{resolve_dim, unsupported_dtype, Contiguous, Lines};
#[cfg(not(feature = "cuda"))]
use crate::op::no_cuda;
use crate::op::on_cpu;
use crate::statistics::no_metal;
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp1, CustomOp3, Layout, MetalStorage, Result, Shape, Storage, Tensor,
    WithDType, D,
};
use std::sync::{Arc, OnceLock};

/// The weights of the `k` greatest elements of each line along the last dimension, of logits that are contiguous: a custom op has one
/// result, so the rest goes to `found`.
#[derive(Clone, Debug)]
pub(crate) struct TopK {
    pub name: &'static str,
    pub k: usize,
    /// Whether weights are shares of the k, and not of all.
    pub renormalise: bool,
    /// Whether there may be a gradient.
    tracked: bool,
    found: Arc<OnceLock<Found>>,
}

#[derive(Clone, Debug)]
struct Found {
    /// u32, greatest first.
    places: Tensor,
    /// What the gradient of weights that are not renormalised needs: Σ exp(x − max) of each line.
    sums: Option<Tensor>,
}

/// The storages of weights, places and sums.
pub(crate) type Results<S> = (S, S, Option<S>);

impl TopK {
    pub fn new(name: &'static str, k: usize, renormalise: bool, tracked: bool) -> Self {
        Self { name, k, renormalise, tracked, found: Arc::default() }
    }

    /// Weights, tracked, and places.
    pub fn of(logits: &Tensor, name: &'static str, k: usize, renormalise: bool) -> Result<(Tensor, Tensor)> {
        let op = Self::new(name, k, renormalise, logits.track_op());
        let weights = logits.apply_op1(op.clone())?;
        Ok((weights, op.found()?.places.clone()))
    }

    fn found(&self) -> Result<&Found> {
        match self.found.get() {
            Some(found) => Ok(found),
            None => bail!("{}: the op was not run", self.name),
        }
    }

    /// Whether the sums are asked for, which only that gradient needs.
    pub fn keeps_sums(&self) -> bool {
        self.tracked && !self.renormalise
    }

    /// The lines of the logits, and the shape of the results.
    fn lines(&self, shape: &Shape) -> Result<(Lines, Shape)> {
        let last = resolve_dim(D::Minus1, shape, self.name)?;
        let mut dims = shape.dims().to_vec();
        dims[last] = self.k;
        Ok((Lines::new(shape, last), dims.into()))
    }

    /// Keeps what is beside the weights, which it answers.
    fn keep<S>(
        &self,
        lines: Lines,
        shape: Shape,
        results: Results<S>,
        storage: fn(S) -> Storage,
    ) -> Result<(S, Shape)> {
        let tensor = |results, shape: Shape| Tensor::from_storage(storage(results), shape, BackpropOp::none(), false);
        let (weights, places, sums) = results;
        let places = tensor(places, shape.clone());
        let sums = sums.map(|sums| tensor(sums, lines.count().into()));
        match self.found.set(Found { places, sums }) {
            Ok(()) => Ok((weights, shape)),
            Err(_) => bail!("{}: the op was run before", self.name),
        }
    }

    fn on_cpu(&self, storage: &CpuStorage, layout: &Layout, lines: Lines) -> Result<Results<CpuStorage>> {
        fn run<T: Element + WithDType + Into<f64>>(xs: &[T], lines: Lines, op: &TopK) -> Results<CpuStorage>
        where
            T::Real: WithDType + Into<f64>,
        {
            let (weights, places, sums) = cpu::top_k(xs, lines, op.k, op.renormalise);
            let sums = op.keeps_sums().then(|| T::Real::to_cpu_storage_owned(sums));
            (T::to_cpu_storage_owned(weights), CpuStorage::U32(places), sums)
        }
        let x = Contiguous::new(self.name, storage, layout)?;
        let elements = x.start()..x.start() + lines.elem_count();
        match x.storage() {
            CpuStorage::F32(xs) => Ok(run(&xs[elements], lines, self)),
            CpuStorage::F64(xs) => Ok(run(&xs[elements], lines, self)),
            CpuStorage::F16(xs) => Ok(run(&xs[elements], lines, self)),
            CpuStorage::BF16(xs) => Ok(run(&xs[elements], lines, self)),
            other => Err(unsupported_dtype(other.dtype(), self.name)),
        }
    }
}

impl CustomOp1 for TopK {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (lines, shape) = self.lines(layout.shape())?;
        self.keep(lines, shape, self.on_cpu(storage, layout, lines)?, Storage::Cpu)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        use candle_core::backend::BackendDevice;
        let (lines, shape) = self.lines(layout.shape())?;
        let results = if self.k > crate::cuda::MOST_TOP_K {
            let (weights, places, sums) = self.on_cpu(&storage.to_cpu_storage()?, layout, lines)?;
            let back = |results| storage.device().storage_from_cpu_storage_owned(results);
            (back(weights)?, back(places)?, sums.map(back).transpose()?)
        } else {
            crate::cuda::top_k(self, lines, (storage, layout))?
        };
        self.keep(lines, shape, results, Storage::Cuda)
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        no_cuda(self.name)
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        no_metal(self.name)
    }

    fn bwd(&self, arg: &Tensor, res: &Tensor, grad_res: &Tensor) -> Result<Option<Tensor>> {
        let backward = TopKBackward { found: self.found()?.clone() };
        Ok(Some(arg.apply_op3(res, grad_res, backward)?))
    }
}

/// The gradient of the logits x, given the weights w and the gradient g of those: w·(g − Σ g·w) at the places found, and
/// elsewhere 0 or, for weights that are not renormalised, −p·Σ g·w.
#[derive(Clone, Debug)]
struct TopKBackward {
    found: Found,
}

impl TopKBackward {
    const NAME: &'static str = "topk-softmax-backward";

    fn lines(x: &Layout, weights: &Layout, gradients: &Layout) -> Result<(Lines, usize)> {
        let dim = resolve_dim(D::Minus1, x.shape(), Self::NAME)?;
        let lines = Lines::new(x.shape(), dim);
        let k = weights.dims().last().copied().unwrap_or(0);
        if weights.shape() != gradients.shape() || weights.shape().elem_count() != k * lines.count() {
            bail!("{}: weights {:?} and their gradient {:?}", Self::NAME, weights.shape(), gradients.shape())
        }
        Ok((lines, k))
    }
}

impl CustomOp3 for TopKBackward {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weights: &CpuStorage,
        weights_layout: &Layout,
        gradients: &CpuStorage,
        gradients_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        fn of<'a, T: WithDType>(tensor: &'a Contiguous<CpuStorage>, count: usize) -> Result<&'a [T]> {
            Ok(&tensor.storage().as_slice::<T>()?[tensor.start()..][..count])
        }
        let (lines, _) = Self::lines(x_layout, weights_layout, gradients_layout)?;
        let (places, _) = self.found.places.storage_and_layout();
        let sums = self.found.sums.as_ref().map(|sums| sums.storage_and_layout().0);
        let (places, sums) = match (&*places, sums.as_deref()) {
            (Storage::Cpu(CpuStorage::U32(places)), None) => (places, None),
            (Storage::Cpu(CpuStorage::U32(places)), Some(Storage::Cpu(sums))) => (places, Some(sums)),
            _ => bail!("{}: places and sums must be on the CPU", Self::NAME),
        };
        let x = Contiguous::new(Self::NAME, x, x_layout)?;
        let (weights, gradients) = (
            Contiguous::new(Self::NAME, weights, weights_layout)?,
            Contiguous::new(Self::NAME, gradients, gradients_layout)?,
        );
        let gradient = on_cpu!(Self::NAME, x.storage(), |xs| {
            let xs = &xs[x.start()..][..lines.elem_count()];
            let found = [of(&weights, places.len())?, of(&gradients, places.len())?];
            let sums = sums.map(CpuStorage::as_slice).transpose()?;
            match cpu::top_k_backward(xs, found, places, sums, lines) {
                Some(gradient) => gradient,
                None => {
                    bail!("{}: the places were written over, some are outside of lines of {}", Self::NAME, lines.len)
                }
            }
        });
        Ok((gradient, x_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weights: &CudaStorage,
        weights_layout: &Layout,
        gradients: &CudaStorage,
        gradients_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (lines, k) = Self::lines(x_layout, weights_layout, gradients_layout)?;
        let tensors = [(x, x_layout), (weights, weights_layout), (gradients, gradients_layout)];
        let Found { places, sums } = &self.found;
        let gradient = crate::cuda::top_k_backward(Self::NAME, lines, tensors, places, sums.as_ref(), k)?;
        Ok((gradient, x_layout.shape().clone()))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        no_cuda(Self::NAME)
    }
}
