//! A tensor seen as lines along one dimension.
//!
//! A *line* is one run of elements along the softmax dimension. A contiguous tensor of shape
//! `(…outer…, len, …inner…)` holds `outer × inner` of them; neighbours in a line are `inner` elements apart.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{shape::Dim, DType, DeviceLocation, Error, Layout, Result, Shape, Tensor, D};
use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lines {
    pub outer: usize,
    pub len: usize,
    pub inner: usize,
}

impl Lines {
    pub fn new(shape: &Shape, dim: usize) -> Self {
        let dims = shape.dims();
        Self { outer: dims[..dim].iter().product(), len: dims[dim], inner: dims[dim + 1..].iter().product() }
    }

    /// How many lines there are.
    pub fn count(&self) -> usize {
        self.outer * self.inner
    }

    pub fn elem_count(&self) -> usize {
        self.count() * self.len
    }
}

/// Resolves `dim` for `shape`, or says which dimensions there are.
pub(crate) fn resolve_dim<I: Dim>(dim: I, shape: &Shape, op: &'static str) -> Result<usize> {
    let rank = shape.rank();
    if rank == 0 {
        candle_core::bail!("{op}: a scalar (shape []) has no dimension to normalise over, reshape it to (1,)")
    }
    dim.to_index(shape, op).map_err(|e| e.context(format!("{op}: shape {shape:?} has dimensions 0 to {}", rank - 1)))
}

/// The same dimension counted from the end, which is how an op keeps it.
pub(crate) fn from_end(dim: usize, shape: &Shape) -> D {
    D::Minus(shape.rank() - dim)
}

/// What is computed in, of elements of this dtype, and losses come in.
pub(crate) fn computed_in(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

pub(crate) fn unsupported_dtype(dtype: DType, op: &'static str) -> Error {
    Error::UnsupportedDTypeForOp(dtype, op)
        .context(format!("{op}: dtype {dtype:?} is not one of f16, bf16, f32 and f64, convert with to_dtype first"))
}

/// Elements that candle's own kernels on CUDA can do with, which count them, and where they lie, in 32 bits.
pub(crate) const MOST_OF_CANDLE: usize = i32::MAX as usize;

/// An error where candle's ops would go wrong for a gradient of this shape.
pub(crate) fn check_gradient(op: &'static str, shape: &Shape, device: DeviceLocation) -> Result<()> {
    if shape.elem_count() > MOST_OF_CANDLE && matches!(device, DeviceLocation::Cuda { .. }) {
        candle_core::bail!("{op}: the gradient of shape {shape:?} takes candle's ops, which on CUDA can do with 2^31 - 1 elements; split the tensor")
    }
    Ok(())
}

/// An error where candle's copy to a contiguous tensor would go wrong.
pub(crate) fn check_copy(op: &'static str, layout: &Layout, device: DeviceLocation) -> Result<()> {
    let (dims, strides) = (layout.dims(), layout.stride());
    let count = layout.shape().elem_count();
    if layout.is_contiguous() || count == 0 || !matches!(device, DeviceLocation::Cuda { .. }) {
        return Ok(());
    }
    let last = dims.iter().zip(strides).map(|(&dim, &stride)| (dim - 1).saturating_mul(stride));
    if count > MOST_OF_CANDLE || last.fold(0, usize::saturating_add) > u32::MAX as usize {
        candle_core::bail!(
            "{op}: shape {dims:?} with strides {strides:?} cannot be made contiguous on CUDA: up to 2^31 - 1 elements can, of which the \
             last is within 2^32 of the first; take a contiguous tensor or split it"
        )
    }
    Ok(())
}

/// The same for tensors that share memory.
pub(crate) fn storage_address(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    std::ptr::from_ref(&*storage).addr()
}

/// Where a tensor begins in its storage. An empty one may be said to begin behind it, where no slice does.
fn start_of(layout: &Layout) -> usize {
    match layout.shape().elem_count() {
        0 => 0,
        _ => layout.start_offset(),
    }
}

/// The elements of a contiguous tensor in its storage, as above.
pub(crate) fn contiguous_range(layout: &Layout) -> Option<Range<usize>> {
    layout.is_contiguous().then(|| start_of(layout)..start_of(layout) + layout.shape().elem_count())
}

/// A storage whose elements from `start` on are the tensor in row-major order.
pub(crate) enum Contiguous<'a, S> {
    Borrowed { storage: &'a S, start: usize },
    Copied(S),
}

impl<'a, S> Contiguous<'a, S>
where
    S: BackendStorage,
    S::Device: BackendDevice<Storage = S>,
{
    /// Borrows `storage` where `layout` is contiguous, and copies it once where it is not.
    pub fn new(op: &'static str, storage: &'a S, layout: &Layout) -> Result<Self> {
        if layout.is_contiguous() {
            return Ok(Self::Borrowed { storage, start: start_of(layout) });
        }
        check_copy(op, layout, storage.device().location())?;
        // SAFETY: the copy that follows writes every element.
        let mut copy = unsafe { storage.device().alloc_uninit(layout.shape(), storage.dtype())? };
        storage.copy_strided_src(&mut copy, 0, layout)?;
        Ok(Self::Copied(copy))
    }

    pub fn storage(&self) -> &S {
        match self {
            Self::Borrowed { storage, .. } => storage,
            Self::Copied(storage) => storage,
        }
    }

    pub fn start(&self) -> usize {
        match self {
            Self::Borrowed { start, .. } => *start,
            Self::Copied(_) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_shape() {
        let shape = Shape::from((2, 3, 4, 5));
        let lines = |dim| {
            let Lines { outer, len, inner } = Lines::new(&shape, dim);
            (outer, len, inner)
        };
        assert_eq!(lines(0), (1, 2, 60));
        assert_eq!(lines(2), (6, 4, 5));
        assert_eq!(lines(3), (24, 5, 1));
    }

    #[test]
    fn copies_that_candle_gets_wrong() {
        let cuda = DeviceLocation::Cuda { gpu_id: 0 };
        let layout = |dims: &[usize], strides: &[usize]| Layout::new(dims.into(), strides.to_vec(), 0);
        // Rows of a matrix with 70000 columns: place 61357 · 70000 needs 33 bits.
        for (dims, strides, fine) in [
            (&[61_357, 1000][..], &[70_000, 1][..], true),
            (&[61_358, 1000], &[70_000, 1], false),
            (&[46_340, 46_340], &[1, 46_340], true),
            (&[46_341, 46_341], &[1, 46_341], false),
            (&[70_000, 70_000], &[0, 0], false),
            (&[70_000, 70_000], &[70_000, 1], true),
            (&[1 << 20, 0], &[1, 5], true),
        ] {
            let layout = layout(dims, strides);
            let found = check_copy("softmax", &layout, cuda);
            assert_eq!(found.is_ok(), fine, "{layout:?}");
            if let Err(error) = found {
                let error = error.to_string();
                assert!(error.contains("softmax") && error.contains(&format!("{dims:?}")), "{error}");
            }
            assert!(check_copy("softmax", &layout, DeviceLocation::Cpu).is_ok());
        }
    }

    #[test]
    fn gradients_of_more_than_candle_counts() {
        let fits = |dims: (usize, usize), device| check_gradient("logsumexp-backward", &Shape::from(dims), device);
        let cuda = DeviceLocation::Cuda { gpu_id: 0 };
        assert!(fits((1 << 16, (1 << 15) - 1), cuda).is_ok());
        let error = fits((1 << 16, 1 << 15), cuda).unwrap_err().to_string();
        assert!(error.contains("logsumexp-backward") && error.contains("[65536, 32768]"), "{error}");
        assert!(fits((1 << 16, 1 << 15), DeviceLocation::Cpu).is_ok());
    }

    #[test]
    fn dims_that_do_not_exist() {
        let shape = Shape::from((2, 3));
        for (dim, found) in [(D::Minus1, 1), (D::Minus2, 0), (D::Minus(2), 0)] {
            assert_eq!(resolve_dim(dim, &shape, "softmax").unwrap(), found);
        }
        let error = resolve_dim(2, &shape, "softmax").unwrap_err().to_string();
        assert!(error.contains("softmax") && error.contains("[2, 3]") && error.contains("0 to 1"), "{error}");
        assert!(resolve_dim(D::Minus(0), &shape, "softmax").is_err());
        assert!(resolve_dim(D::Minus(3), &shape, "softmax").is_err());
        let scalar = resolve_dim(D::Minus1, &Shape::from(()), "softmax").unwrap_err().to_string();
        assert!(scalar.contains("scalar"), "{scalar}");
    }
}
