//! Calls captured in a CUDA graph, which is launched again with other logits.

#[cfg(feature = "cuda")]
use crate::support::{check_result, gpu_for, normal, tensor, within_cap, Op};
#[cfg(feature = "cuda")]
use candle_core::{cuda_backend::cudarc::driver::sys, DType, Device, Result};

#[cfg(feature = "cuda")]
#[test]
fn captured_and_launched_again() -> Result<()> {
    let Some(Device::Cuda(cuda)) = gpu_for(0) else { return Ok(()) };
    let (device, stream) = (Device::Cuda(cuda.clone()), cuda.cuda_stream());
    // Lines of every length that has a kernel of its own, few and many of them, and other dimensions
    let shapes = [
        (vec![300, 40], 1),
        (vec![4000, 33], 1),
        (vec![20, 3000], 1),
        (vec![4, 20_000], 1),
        (vec![4, 102_400], 1),
        (vec![1, (1 << 21) + 1], 1),
        (vec![1, 1 << 23], 1),
        (vec![2, (1 << 23) + 5], 1),
        (vec![3, 1000, 128], 1),
        (vec![4096, 72], 0),
    ];
    for (shape, dim) in shapes {
        let count = shape.iter().product();
        if !within_cap(count) {
            continue;
        }
        for dtype in [DType::F32, DType::BF16] {
            for op in [Op::Softmax, Op::LogSoftmax] {
                let logits = |seed| tensor(&normal(count, 3.0, seed), shape.as_slice(), dtype, &device);
                let (xs, found) = (logits(1)?, logits(2)?);
                // Loads the kernels, which a capture does not allow.
                found.slice_set(&op.apply(&xs, dim)?, 0, 0)?;
                stream.synchronize().expect("the device works");
                stream
                    .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
                    .expect("the stream is not captured yet");
                let captured = op.apply(&xs, dim).and_then(|ys| found.slice_set(&ys, 0, 0));
                let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
                captured?;
                let graph = graph.expect("a graph can be made").expect("it is not empty");
                for seed in 3..5 {
                    xs.slice_set(&logits(seed)?, 0, 0)?;
                    graph.launch().expect("the graph can be launched");
                    check_result(op, &xs, dim, &found)?;
                }
            }
        }
    }
    Ok(())
}
