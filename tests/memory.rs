//! What a call allocates: its output, less than a megabyte beside it, and one copy of an input whose strides need one. In place
//! nothing; and what is a number or a few for a line takes no more than that. And what the gradient of a bias takes.
//! A program of its own, so that nothing else allocates meanwhile.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_softmax::loss::CrossEntropy;
use candle_softmax::testing::{gpu_count, say_skipped};
use candle_softmax::{ops, OnlineSoftmax, ReduceSoftmax, SafeSoftmax, Softmax};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const MEGABYTE: usize = 1 << 20;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes in use at once on `device` during the call, beyond those before it.
fn peak(device: &Device, call: impl FnOnce() -> Result<Tensor>) -> Result<usize> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        return cuda_pool::peak(cuda, call);
    }
    assert!(device.is_cpu());
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = call()?;
    let peak = PEAK.load(Relaxed) - before;
    drop(result);
    Ok(peak)
}

#[cfg(feature = "cuda")]
mod cuda_pool {
    use candle_core::cuda_backend::cudarc::driver::sys;
    use candle_core::{CudaDevice, Result, Tensor};

    /// The device's stream-ordered pool keeps a high-water mark, which can be set back to what is in use.
    pub fn peak(device: &CudaDevice, call: impl FnOnce() -> Result<Tensor>) -> Result<usize> {
        use sys::CUmemPool_attribute::{CU_MEMPOOL_ATTR_USED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_HIGH};
        let stream = device.cuda_stream();
        let context = stream.context();
        let mut pool = std::ptr::null_mut();
        let ok = |result: sys::CUresult| assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
        let read = |pool, attribute| {
            let mut bytes = 0u64;
            // SAFETY: both attributes are 64-bit counters.
            ok(unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()) });
            bytes as usize
        };
        context.synchronize().expect("the device works");
        // SAFETY: the context is current after the line above, the pointers are to live variables.
        ok(unsafe { sys::cuDeviceGetMemPool(&mut pool, context.cu_device()) });
        let mut zero = 0u64;
        ok(unsafe { sys::cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, (&raw mut zero).cast()) });
        let before = read(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
        let result = call()?;
        context.synchronize().expect("the device works");
        let peak = read(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH) - before;
        drop(result);
        Ok(peak)
    }
}

/// The CPU and, where there is one, a GPU.
fn devices() -> Result<Vec<Device>> {
    if gpu_count() > 0 {
        return Ok(vec![Device::Cpu, Device::new_cuda(0)?]);
    }
    say_skipped("on CUDA", "there is no GPU, or feature `cuda` is off");
    Ok(vec![Device::Cpu])
}

/// A call to measure.
type Call = fn(&Tensor) -> Result<Tensor>;

/// One test, since the counters are the program's.
#[test]
fn output_and_less_than_a_megabyte() -> Result<()> {
    outputs_of_a_softmax()?;
    outputs_of_a_builder_and_of_what_reads_only()?;
    gradients_of_a_bias()
}

/// What is summed is never all there: sums of parts are, in f32, an eighth of the scores' size on CUDA. Beside them there are candle's ones, in the result's
/// place, and gradients of the bias' size.
fn gradients_of_a_bias() -> Result<()> {
    for device in devices()? {
        for dtype in [DType::F32, DType::BF16] {
            let scores = Tensor::rand(-1f32, 1., (32, 8, 256, 512), &device)?.to_dtype(dtype)?;
            let bias = Var::from_tensor(&Tensor::rand(-1f32, 1., (8, 256, 512), &device)?.to_dtype(dtype)?)?;
            let result = Softmax::new().bias(&bias).forward(&scores)?;
            let call = || Ok(result.backward()?.get(&bias).expect("a gradient").clone());
            call()?; // threads and kernels are there from now on
            let found = peak(&device, call)?;
            let (count, of_bias) = (scores.elem_count(), bias.elem_count());
            let parts = if device.is_cpu() { 0 } else { count / 2 };
            let most = count * dtype.size_in_bytes() + parts + 24 * of_bias + 5 * MEGABYTE;
            assert!(found < most, "the gradient of a bias of {dtype:?} on {device:?}: {found} for {most}");
        }
    }
    Ok(())
}

fn outputs_of_a_builder_and_of_what_reads_only() -> Result<()> {
    for device in devices()? {
        for dtype in [DType::F32, DType::BF16] {
            let scores = Tensor::rand(-1f32, 1., (4, 8, 256, 512), &device)?.to_dtype(dtype)?;
            let bytes = scores.elem_count() * dtype.size_in_bytes();
            let bias = Tensor::rand(-1f32, 1., (8, 256, 512), &device)?.to_dtype(dtype)?;
            let (mask, sinks) = (Tensor::ones((4, 1, 1, 512), DType::U8, &device)?, Tensor::zeros(8, dtype, &device)?);
            let builder = Softmax::new().scale(0.5).bias(&bias).mask(&mask).sinks(&sinks).dropout(0.1, 1);
            let targets = Tensor::zeros(4 * 8 * 256, DType::U32, &device)?;
            let logits = scores.reshape((4 * 8 * 256, 512))?;
            type Call<'a> = &'a dyn Fn() -> Result<Tensor>;
            let (in_place, of_loss) = (|| scores.narrow(0, 0, 0), CrossEntropy::new().label_smoothing(0.1));
            let calls: [(&str, usize, Call); 8] = [
                ("builder", bytes, &|| builder.forward(&scores)),
                ("builder, causal and log", bytes, &|| Softmax::new().causal().log().forward(&scores)),
                ("builder in place", 0, &|| builder.forward_inplace(&scores).and_then(|()| in_place())),
                ("in place", 0, &|| ops::softmax_inplace(&scores, 3).and_then(|()| in_place())),
                ("in place of dim 2", 0, &|| ops::softmax_inplace(&scores, 2).and_then(|()| in_place())),
                ("log-sum-exp", 0, &|| ops::logsumexp(&scores, 3)),
                ("cross-entropy", 0, &|| of_loss.forward(&logits, &targets)),
                ("top-k", 0, &|| Ok(ops::topk_softmax(&logits, 2, true)?.0)),
            ];
            for (name, output, call) in calls {
                call()?; // threads and kernels are there from now on
                let found = peak(&device, call)?;
                assert!((output..output + MEGABYTE).contains(&found), "{name} {dtype:?} on {device:?}: {found}");
            }
        }
    }
    Ok(())
}

fn outputs_of_a_softmax() -> Result<()> {
    let ops: [(&str, Call); 6] = [
        ("safe", |xs| xs.apply_op1(SafeSoftmax)),
        ("online", |xs| xs.apply_op1(OnlineSoftmax)),
        ("reduce", |xs| xs.apply_op1(ReduceSoftmax)),
        ("softmax", |xs| ops::softmax_last_dim(xs)),
        ("softmax of dim 0", |xs| ops::softmax(xs, 0)),
        ("log-softmax", |xs| ops::log_softmax(xs, 1)),
    ];
    for device in devices()? {
        for dtype in [DType::F32, DType::BF16] {
            for shape in [(2048, 2048), (1, 1 << 22), (1 << 22, 1), (3, 1 << 20)] {
                let xs = Tensor::rand(-1f32, 1., shape, &device)?.to_dtype(dtype)?;
                let bytes = xs.elem_count() * dtype.size_in_bytes();
                for (name, op) in ops {
                    op(&xs)?; // threads and kernels are there from now on
                    let plain = peak(&device, || op(&xs))?;
                    assert!(
                        (bytes..bytes + MEGABYTE).contains(&plain),
                        "{name} {dtype:?} {shape:?}: {plain} for {bytes}"
                    );
                    if shape.0 > 1 && shape.1 > 1 {
                        let strided = peak(&device, || op(&xs.t()?))?;
                        assert!(strided < 2 * bytes + MEGABYTE, "{name} {dtype:?} of a view: {strided} for {bytes}");
                    }
                }
            }
        }
    }
    Ok(())
}
