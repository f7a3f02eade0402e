//! The greatest elements of each line, and their backward, on CUDA.

use super::statistics::{one_each, view, Operand};
use super::{by_dtype, elements, functions, launch, new_storage, plan, CudaElement};
use crate::lines::{unsupported_dtype, Contiguous, Lines};
use crate::top_k::{Results, TopK};
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Result, Tensor};
use half::{bf16, f16};

/// The weights, places (u32) and, if they are to be kept, sums of the greatest elements of each line, up to [`MOST_TOP_K`](plan::MOST_TOP_K).
pub(crate) fn top_k(op: &TopK, lines: Lines, x: Operand) -> Result<Results<CudaStorage>> {
    fn run<T: CudaElement>(op: &TopK, lines: Lines, (x, layout): Operand) -> Result<Results<CudaStorage>> {
        let device = x.device();
        let x = Contiguous::new(op.name, x, layout)?;
        let x = elements::<T>(&x, lines)?;
        let plan = plan::top_k(lines, op.k, size_of::<T>(), functions::facts(device)?);
        let found = op.k * lines.count();
        // SAFETY: the kernel writes every number.
        let (mut weights, mut places) = unsafe { (device.alloc::<T>(found)?, device.alloc::<u32>(found)?) };
        // SAFETY: likewise.
        let mut sums = op.keeps_sums().then(|| unsafe { device.alloc::<T::Real>(lines.count()) }).transpose()?;
        let results = launch::TopKResults {
            weights: weights.as_view_mut(),
            places: places.as_view_mut(),
            sums: sums.as_mut().map(|sums| sums.as_view_mut()),
        };
        launch::top_k(device, x, results, lines, plan, op.k, op.renormalise)?;
        let [weights, places] = [
            CudaStorage::wrap_cuda_slice(weights, device.clone()),
            CudaStorage::wrap_cuda_slice(places, device.clone()),
        ];
        Ok((weights, places, sums.map(|sums| CudaStorage::wrap_cuda_slice(sums, device.clone()))))
    }
    by_dtype!(op.name, x.0.dtype(), run(op, lines, x))
}

/// The gradient of the elements, given the `k` weights of each line, their gradients and places, and the sums that weights are shares of
/// unless they are renormalised.
pub(crate) fn top_k_backward(
    name: &'static str,
    lines: Lines,
    tensors: [Operand; 3],
    places: &Tensor,
    sums: Option<&Tensor>,
    k: usize,
) -> Result<CudaStorage> {
    fn run<T: CudaElement>(
        name: &'static str,
        lines: Lines,
        [x, weights, gradients]: [Operand; 3],
        places: &Tensor,
        sums: Option<&Tensor>,
        k: usize,
    ) -> Result<CudaStorage> {
        let device = x.0.device();
        new_storage::<T>(device, lines, |out| {
            let [x, weights, gradients] = &[
                Contiguous::new(name, x.0, x.1)?,
                Contiguous::new(name, weights.0, weights.1)?,
                Contiguous::new(name, gradients.0, gradients.1)?,
            ];
            let (places, sums) = (places.storage_and_layout(), sums.map(Tensor::storage_and_layout));
            let of_line = one_each(lines, k);
            let found = launch::TopKFound {
                x: elements::<T>(x, lines)?,
                weights: elements(weights, of_line)?,
                gradients: elements(gradients, of_line)?,
                places: view(&places)?,
                sums: sums.as_ref().map(view).transpose()?,
            };
            launch::top_k_backward(device, found, out, lines, plan::top_k_backward(lines), k)
        })
    }
    by_dtype!(name, tensors[0].0.dtype(), run(name, lines, tensors, places, sums, k))
}
