//! Calls captured in a CUDA graph, which is launched again with other logits.
#![cfg(feature = "cuda")]

use crate::calls::{Call, Kind};
use crate::support::{check_result, gpu_for, no_drawing, normal, tensor, within_cap, Op};
use candle_core::{cuda_backend::cudarc::driver::sys, CudaDevice, DType, Device, Result, Tensor, Var};
use candle_softmax::ops;

/// Captures `call` and launches the graph with other numbers in `xs`, twice. What it finds then is right by `check`.
fn check_captured(
    cuda: &CudaDevice,
    xs: &Tensor,
    call: impl Fn() -> Result<Vec<Tensor>>,
    check: impl Fn(&[Tensor]) -> Result<()>,
) -> Result<()> {
    let stream = cuda.cuda_stream();
    // Loads the kernels, which a capture does not allow.
    let found = call()?.iter().map(Tensor::copy).collect::<Result<Vec<_>>>()?;
    let write = || call()?.iter().zip(&found).try_for_each(|(one, found)| found.slice_set(one, 0, 0));
    write()?;
    stream.synchronize().expect("the device works");
    let no_drawing = no_drawing();
    stream
        .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .expect("the stream is not captured yet");
    let captured = write();
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
    drop(no_drawing);
    captured?;
    let graph = graph.expect("a graph can be made").expect("it is not empty");
    for seed in 3..5 {
        xs.slice_set(&tensor(&normal(xs.elem_count(), 3.0, seed), xs.shape(), xs.dtype(), xs.device())?, 0, 0)?;
        graph.launch().expect("the graph can be launched");
        check(&found)?;
    }
    Ok(())
}

#[test]
fn softmax() -> Result<()> {
    let Some(device) = gpu_for(0) else { return Ok(()) };
    let Device::Cuda(cuda) = &device else { return Ok(()) };
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
        if !within_cap(shape.iter().product()) {
            continue;
        }
        for dtype in [DType::F32, DType::BF16] {
            for op in [Op::Softmax, Op::LogSoftmax] {
                let xs = Tensor::ones(shape.as_slice(), dtype, &device)?;
                let call = || {
                    let over = xs.copy()?;
                    ops::softmax_inplace(&over, dim)?;
                    Ok(vec![op.apply(&xs, dim)?, over])
                };
                check_captured(cuda, &xs, call, |found| {
                    check_result(op, &xs, dim, &found[0])?;
                    check_result(Op::Softmax, &xs, dim, &found[1])
                })?;
            }
        }
    }
    Ok(())
}

fn check_around(shapes: &[(&[usize], usize)], kinds: &[Kind]) -> Result<()> {
    let Some(device) = gpu_for(0) else { return Ok(()) };
    let Device::Cuda(cuda) = &device else { return Ok(()) };
    for &(shape, dim) in shapes {
        if !within_cap(shape.iter().product()) {
            continue;
        }
        for dtype in [DType::F32, DType::BF16] {
            for &kind in kinds {
                let xs = Var::ones(shape, dtype, &device)?;
                let call = Call::new(kind, dim, &xs)?;
                check_captured(cuda, &xs.as_detached_tensor(), || call.found(), |found| call.check(found))?;
            }
        }
    }
    Ok(())
}

/// Results and gradients, captured together
#[test]
fn around_softmax() -> Result<()> {
    let shapes: &[(&[usize], usize)] = &[
        (&[4, 8, 30, 40], 3),
        (&[2, 100, 33], 2),
        (&[4, 20, 3000], 2),
        (&[2, 2, 20_000], 2),
        (&[1, 4, 102_400], 2),
        (&[1, 2, (1 << 20) + 1], 2),
    ];
    check_around(shapes, &[Kind::LogSoftmax, Kind::Builder, Kind::Dropout, Kind::Beside, Kind::LogSumExp, Kind::TopK])?;
    let others: &[(&[usize], usize)] = &[(&[3, 1000, 128], 1), (&[4096, 72], 0), (&[2, 40, 30], 1)];
    check_around(others, &[Kind::LogSoftmax, Kind::Builder, Kind::Dropout, Kind::Beside, Kind::LogSumExp])?;
    let of_classes: &[(&[usize], usize)] =
        &[(&[300, 40], 1), (&[20, 3000], 1), (&[4, 102_400], 1), (&[3, 1000, 128], 1)];
    check_around(of_classes, &[Kind::CrossEntropy, Kind::MeanCrossEntropy])
}
