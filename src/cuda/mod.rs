//! The CUDA path: [`plan`] says which kernel, [`functions`] loads it, [`launch`] launches it.

mod functions;
mod launch;
mod plan;

use crate::lines::{unsupported_dtype, Contiguous, Lines};
use crate::op::{Output, Schedule};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{CudaDevice, CudaStorage, Layout, Result};
use half::{bf16, f16};
use launch::CudaElement;
use plan::DeviceFacts;

/// The slice of a new storage, computed by a generic function for the dtype of another.
macro_rules! by_dtype {
    ($name:expr, $dtype_of:expr, $function:ident($($arg:expr),*)) => {
        match &$dtype_of.slice {
            CudaStorageSlice::F32(_) => CudaStorageSlice::F32($function::<f32>($($arg),*)?),
            CudaStorageSlice::F64(_) => CudaStorageSlice::F64($function::<f64>($($arg),*)?),
            CudaStorageSlice::F16(_) => CudaStorageSlice::F16($function::<f16>($($arg),*)?),
            CudaStorageSlice::BF16(_) => CudaStorageSlice::BF16($function::<bf16>($($arg),*)?),
            _ => return Err(unsupported_dtype($dtype_of.dtype(), $name)),
        }
    };
}

/// Softmax or log-softmax along `lines`.
pub(crate) fn softmax(
    name: &'static str,
    storage: &CudaStorage,
    layout: &Layout,
    lines: Lines,
    schedule: Option<Schedule>,
    output: Output,
) -> Result<CudaStorage> {
    fn run<T: CudaElement>(
        x: &Contiguous<CudaStorage>,
        lines: Lines,
        schedule: Option<Schedule>,
        output: Output,
    ) -> Result<CudaSlice<T>> {
        let device = x.storage().device();
        if lines.elem_count() == 0 {
            return device.cuda_stream().null().w();
        }
        let plan = plan::softmax(lines, schedule, facts(device)?);
        launch::softmax(device, elements(x, lines)?, lines, plan, output)
    }
    let x = contiguous(name, storage, layout)?;
    let slice = by_dtype!(name, storage, run(&x, lines, schedule, output));
    Ok(CudaStorage { slice, device: storage.device().clone() })
}

/// The gradient of the input of (log-)softmax, given its result `y` and the gradient `g` of that.
pub(crate) fn softmax_backward(
    name: &'static str,
    y: (&CudaStorage, &Layout),
    g: (&CudaStorage, &Layout),
    lines: Lines,
    output: Output,
) -> Result<CudaStorage> {
    fn run<T: CudaElement>(
        y: &Contiguous<CudaStorage>,
        g: &Contiguous<CudaStorage>,
        lines: Lines,
        output: Output,
    ) -> Result<CudaSlice<T>> {
        let device = y.storage().device();
        if lines.elem_count() == 0 {
            return device.cuda_stream().null().w();
        }
        let plan = plan::softmax_backward(lines);
        launch::softmax_backward(device, elements(y, lines)?, elements(g, lines)?, lines, plan, output)
    }
    let device = y.0.device().clone();
    let (y, g) = (contiguous(name, y.0, y.1)?, contiguous(name, g.0, g.1)?);
    let slice = by_dtype!(name, y.storage(), run(&y, &g, lines, output));
    Ok(CudaStorage { slice, device })
}

fn contiguous<'a>(
    name: &'static str,
    storage: &'a CudaStorage,
    layout: &Layout,
) -> Result<Contiguous<'a, CudaStorage>> {
    // candle's strided copy counts in 32 bits.
    let count = layout.shape().elem_count();
    if !layout.is_contiguous() && count > i32::MAX as usize {
        candle_core::bail!(
            "{name}: shape {:?} with strides {:?} has {count} elements, and up to 2^31 - 1 can be made contiguous on CUDA, \
             take a contiguous tensor or split it",
            layout.shape(),
            layout.stride()
        )
    }
    Contiguous::new(storage, layout)
}

fn elements<'a, T: CudaElement>(x: &'a Contiguous<CudaStorage>, lines: Lines) -> Result<CudaView<'a, T>> {
    let range = x.start()..x.start() + lines.elem_count();
    let slice = x.storage().as_cuda_slice::<T>()?;
    match slice.try_slice(range.clone()) {
        Some(view) => Ok(view),
        None => candle_core::bail!("candle-softmax: {lines:?} at {range:?} lie outside a storage of {}", slice.len()),
    }
}

fn facts(device: &CudaDevice) -> Result<DeviceFacts> {
    let (major, minor) = device.cuda_stream().context().compute_capability().w()?;
    Ok(DeviceFacts { compute_capability: (major * 10 + minor) as u32 })
}
