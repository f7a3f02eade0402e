//! The CUDA path: [`plan`] says which kernel, [`functions`] loads it, [`launch`] launches it.

mod functions;
pub(crate) mod fused;
mod launch;
mod plan;
mod registers;
mod statistics;
mod sums;
mod top_k;

pub(crate) use plan::MOST_TOP_K;
pub(crate) use statistics::{line_statistics, log_sum_exp, loss_backward, loss_of_lines};
pub(crate) use top_k::{top_k, top_k_backward};

use crate::lines::{unsupported_dtype, Contiguous, Lines};
use crate::op::{Output, SoftmaxOp};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaView, CudaViewMut, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, Tensor};
use half::{bf16, f16};
use launch::{CudaElement, Scaling};
use plan::Elements;
use std::ops::Range;

/// Calls a generic function with the element type of a dtype.
macro_rules! by_dtype {
    ($name:expr, $dtype:expr, $function:ident($($arg:expr),*)) => {
        match $dtype {
            DType::F32 => $function::<f32>($($arg),*),
            DType::F64 => $function::<f64>($($arg),*),
            DType::F16 => $function::<f16>($($arg),*),
            DType::BF16 => $function::<bf16>($($arg),*),
            other => Err(unsupported_dtype(other, $name)),
        }
    };
}
use by_dtype;

/// Calls a generic function with f32 or f64, what others are computed in.
macro_rules! by_dtype_computed_in {
    ($name:expr, $dtype:expr, $function:ident($($arg:expr),*)) => {
        match $dtype {
            DType::F32 => $function::<f32>($($arg),*),
            DType::F64 => $function::<f64>($($arg),*),
            other => Err(unsupported_dtype(other, $name)),
        }
    };
}
use by_dtype_computed_in;

/// Softmax or log-softmax along `lines`, in a new storage.
pub(crate) fn softmax(op: &SoftmaxOp, lines: Lines, storage: &CudaStorage, layout: &Layout) -> Result<CudaStorage> {
    fn run<T: CudaElement>(
        op: &SoftmaxOp,
        lines: Lines,
        storage: &CudaStorage,
        layout: &Layout,
    ) -> Result<CudaStorage> {
        new_storage::<T>(storage.device(), lines, |out| write(op, lines, storage, layout, out))
    }
    by_dtype!(op.name, storage.dtype(), run(op, lines, storage, layout))
}

/// The same into elements of a storage that is there already.
pub(crate) fn softmax_into(
    op: &SoftmaxOp,
    lines: Lines,
    storage: &CudaStorage,
    layout: &Layout,
    out: &mut CudaStorage,
    out_elements: Range<usize>,
) -> Result<()> {
    fn run<T: CudaElement>(
        op: &SoftmaxOp,
        lines: Lines,
        storage: &CudaStorage,
        layout: &Layout,
        out: &mut CudaStorage,
        out_elements: Range<usize>,
    ) -> Result<()> {
        match elements_mut(op.name, out, out_elements)? {
            Some(mut out) => write::<T>(op, lines, storage, layout, &mut out),
            None => Ok(()),
        }
    }
    by_dtype!(op.name, storage.dtype(), run(op, lines, storage, layout, out, out_elements))
}

/// The same over the input.
pub(crate) fn softmax_inplace(
    op: &SoftmaxOp,
    lines: Lines,
    storage: &mut CudaStorage,
    elements: Range<usize>,
) -> Result<()> {
    fn run<T: CudaElement>(
        op: &SoftmaxOp,
        lines: Lines,
        storage: &mut CudaStorage,
        elements: Range<usize>,
    ) -> Result<()> {
        let device = storage.device().clone();
        match elements_mut(op.name, storage, elements)? {
            Some(mut xs) => {
                launch::softmax::<T>(&device, None, &mut xs, lines, (op.schedule, op.output, Scaling::NONE))
            }
            None => Ok(()),
        }
    }
    by_dtype!(op.name, storage.dtype(), run(op, lines, storage, elements))
}

/// Which kernel `op` takes for `xs`.
pub(crate) fn kernel_name(op: &SoftmaxOp, xs: &Tensor, device: &CudaDevice) -> Result<String> {
    let lines = op.lines(xs.layout())?;
    let size = xs.dtype().size_in_bytes();
    let start = xs.layout().start_offset() * size;
    let elements = Elements { input_alignment: alignment(start as u64), ..Elements::alike(size, 128) };
    Ok(format!("{:?}", plan::softmax(lines, op.schedule, op.output, elements, functions::facts(device)?).kernel))
}

fn write<T: CudaElement>(
    op: &SoftmaxOp,
    lines: Lines,
    storage: &CudaStorage,
    layout: &Layout,
    out: &mut CudaViewMut<'_, T>,
) -> Result<()> {
    let x = Contiguous::new(op.name, storage, layout)?;
    launch::softmax(storage.device(), Some(elements(&x, lines)?), out, lines, (op.schedule, op.output, Scaling::NONE))
}

/// The gradient of the input of (log-)softmax, given its result `y` and the gradient `g` of that.
pub(crate) fn softmax_backward(
    name: &'static str,
    output: Output,
    lines: Lines,
    y: (&CudaStorage, &Layout),
    g: (&CudaStorage, &Layout),
) -> Result<CudaStorage> {
    fn run<T: CudaElement>(
        output: Output,
        lines: Lines,
        y: &Contiguous<CudaStorage>,
        g: &Contiguous<CudaStorage>,
    ) -> Result<CudaStorage> {
        let device = y.storage().device();
        new_storage::<T>(device, lines, |out| {
            launch::softmax_backward(device, [elements(y, lines)?, elements(g, lines)?], out, lines, output)
        })
    }
    let (y, g) = (Contiguous::new(name, y.0, y.1)?, Contiguous::new(name, g.0, g.1)?);
    by_dtype!(name, y.storage().dtype(), run(output, lines, &y, &g))
}

/// A storage of `lines` that `write` fills; nothing is launched for an empty one.
fn new_storage<T: CudaDType + DeviceRepr>(
    device: &CudaDevice,
    lines: Lines,
    write: impl FnOnce(&mut CudaViewMut<'_, T>) -> Result<()>,
) -> Result<CudaStorage> {
    let count = lines.elem_count();
    let slice = if count == 0 {
        device.cuda_stream().null::<T>().w()?
    } else {
        // SAFETY: `write` launches a kernel that writes every element.
        let mut out = unsafe { device.alloc::<T>(count)? };
        write(&mut out.as_view_mut())?;
        out
    };
    Ok(CudaStorage::wrap_cuda_slice(slice, device.clone()))
}

fn elements<'a, T: CudaDType>(x: &'a Contiguous<CudaStorage>, lines: Lines) -> Result<CudaView<'a, T>> {
    let range = x.start()..x.start() + lines.elem_count();
    let slice = x.storage().as_cuda_slice::<T>()?;
    match slice.try_slice(range.clone()) {
        Some(view) => Ok(view),
        None => candle_core::bail!("candle-softmax: {lines:?} at {range:?} lie outside a storage of {}", slice.len()),
    }
}

/// Elements that are to be written, unless there are none.
fn elements_mut<'a, T: CudaElement>(
    name: &'static str,
    storage: &'a mut CudaStorage,
    range: Range<usize>,
) -> Result<Option<CudaViewMut<'a, T>>> {
    let slice = storage.as_cuda_slice_mut::<T>()?;
    let len = slice.len();
    match slice.try_slice_mut(range.clone()) {
        Some(view) => Ok((!range.is_empty()).then_some(view)),
        None => candle_core::bail!("{name}: elements {range:?} lie outside a storage of {len}"),
    }
}

/// What an address is a multiple of, up to 128.
fn alignment(address: u64) -> usize {
    1 << address.trailing_zeros().min(7)
}
