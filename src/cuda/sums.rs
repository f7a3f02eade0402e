//! Sums over some of a tensor's dimensions, on CUDA.

use super::launch::{self, CudaElement};
use super::plan::{self, SumPlan};
use super::{by_dtype_computed_in, functions};
use crate::lines::unsupported_dtype;
use crate::sums::{Steps, SumOver};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
use candle_core::{CudaDevice, CudaStorage, DType, Result};

/// As `kernels/sum.cu` has it.
const MAX_STEPS: usize = 8;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct DeviceSteps {
    size: i64,
    stride: i64,
}

impl From<Steps> for DeviceSteps {
    fn from(steps: Steps) -> Self {
        Self { size: steps.size as i64, stride: steps.stride as i64 }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Dimensions {
    steps: [DeviceSteps; MAX_STEPS],
    count: i64,
}

impl Dimensions {
    fn new(dims: &[Steps]) -> Result<Self> {
        let mut steps = [DeviceSteps::default(); MAX_STEPS];
        let Some(first) = steps.get_mut(..dims.len()) else {
            candle_core::bail!("candle-softmax: a sum over or beside {dims:?}, at most {MAX_STEPS} run on CUDA")
        };
        first.iter_mut().zip(dims).for_each(|(to, &from)| *to = from.into());
        Ok(Self { steps, count: dims.len() as i64 })
    }
}

/// What a kernel is given: `Sum` of `kernels/sum.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    kept: Dimensions,
    runs: Dimensions,
    run: DeviceSteps,
    sums: i64,
    count_of_runs: i64,
    runs_of_part: i64,
    run_of_part: i64,
    parts_of_run: i64,
    shift: i64,
    across: i64,
}
const _: () = assert!(size_of::<Call>() == 344);

impl Call {
    fn new(sum: &SumOver, plan: &SumPlan) -> Result<Self> {
        let outer = sum.summed.len().saturating_sub(1);
        Ok(Self {
            kept: Dimensions::new(&sum.kept)?,
            runs: Dimensions::new(&sum.summed[..outer])?,
            run: plan.run.into(),
            sums: sum.sums() as i64,
            count_of_runs: plan.runs as i64,
            runs_of_part: plan.runs_of_part as i64,
            run_of_part: plan.run_of_part as i64,
            parts_of_run: plan.parts_of_run as i64,
            shift: plan.shift as i64,
            across: plan.across.into(),
        })
    }
}

/// The sums, in their order, of a storage that is all of the tensor.
pub(super) fn sum_over(storage: CudaStorage, sum: &SumOver) -> Result<CudaStorage> {
    fn run<R: CudaElement>(storage: &CudaStorage, sum: &SumOver) -> Result<CudaStorage> {
        let device = storage.device();
        let found = sums(device, storage.as_cuda_slice::<R>()?.as_view(), sum)?;
        Ok(CudaStorage::wrap_cuda_slice(found, device.clone()))
    }
    if sum.terms() == 1 {
        return Ok(storage);
    }
    by_dtype_computed_in!("sum", storage.dtype(), run(&storage, sum))
}

fn sums<R: CudaElement>(device: &CudaDevice, x: CudaView<'_, R>, sum: &SumOver) -> Result<CudaSlice<R>> {
    let sums_and_terms = (sum.sums(), sum.terms());
    if x.len() != sums_and_terms.0 * sums_and_terms.1 {
        candle_core::bail!("candle-softmax: {} elements for {sums_and_terms:?} sums and terms of them", x.len())
    }
    let plan = plan::sum(sum, size_of::<R>(), functions::facts(device)?);
    let call = Call::new(sum, &plan)?;
    // SAFETY: the kernel writes every sum of every part.
    let mut out = unsafe { device.alloc::<R>(plan.parts() * sum.sums())? };
    launch::sum(device, x, &mut out.as_view_mut(), plan.plan, call)?;
    match plan.parts() {
        1 => Ok(out),
        parts => {
            let over_parts = SumOver::new(&[parts, sum.sums()], &[1, sum.sums()]);
            sums(device, out.as_view(), &over_parts)
        }
    }
}
