//! Several streams of one device, whose kernels run at the same time.

#![cfg(feature = "cuda")]

use crate::calls::{Call, Kind};
use crate::support::{check_result, drawing, gpu_for, normal, tensor, within_cap, Op};
use candle_core::{CudaDevice, DType, Device, Result, Var};

/// Four threads, each with a stream of its own, which do their work by shapes at the same time. Each begins elsewhere, so that kernels
/// of every kind meet.
fn four_at_once<S: Sync>(shapes: &[S], work: impl Fn(&Device, &S, u64) -> Result<()> + Sync) -> Result<()> {
    if gpu_for(0).is_none() {
        return Ok(());
    }
    let drawing = drawing();
    let streams = (0..4).map(|_| CudaDevice::new_with_stream(0).map(Device::Cuda)).collect::<Result<Vec<_>>>()?;
    drop(drawing);
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = streams
            .iter()
            .enumerate()
            .map(|(n, device)| {
                let mut shapes = shapes.iter().cycle().skip(2 * n).take(shapes.len());
                scope.spawn(move || shapes.try_for_each(|shape| work(device, shape, n as u64)))
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panics"))
    })
}

/// Calls are on their way that no thread waits for. Kernels whose blocks wait for each other must not do so for some that the GPU has
/// no room for.
#[test]
fn softmax() -> Result<()> {
    // Lines that take a whole GPU, a cluster, several of them, and memory that all blocks keep
    let shapes = [
        (vec![1, (1 << 23) + 1], 1),
        (vec![1, 1 << 21], 1),
        (vec![2, 1 << 20], 1),
        (vec![4, 102_400], 1),
        (vec![64, 50_000], 1),
        (vec![300, 3000], 1),
        (vec![16, 1000, 128], 1),
        (vec![4, 1000, 512], 1),
        (vec![4096, 200], 0),
    ];
    four_at_once(&shapes, |device, (shape, dim), seed| {
        let count = shape.iter().product();
        if !within_cap(count) {
            return Ok(());
        }
        for dtype in [DType::F32, DType::BF16] {
            let xs = tensor(&normal(count, 3.0, seed), shape.as_slice(), dtype, device)?;
            let found = (0..30).map(|_| Op::Softmax.apply(&xs, *dim)).collect::<Result<Vec<_>>>()?;
            for found in [&found[0], &found[29]] {
                check_result(Op::Softmax, &xs, *dim, found)?;
            }
        }
        Ok(())
    })
}

/// Results and gradients of what is around it
#[test]
fn around_softmax() -> Result<()> {
    let of_lines = Kind::ALL;
    let of_columns = Kind::ANY_DIM;
    let shapes = [
        (vec![2, 200_000], &of_lines[..]),
        (vec![300, 3000], &of_lines),
        (vec![16, 1000, 128], &of_columns),
        (vec![20_000, 72], &of_lines),
        (vec![64, 50_000], &of_lines),
        (vec![4, 1000, 512], &of_columns),
    ];
    four_at_once(&shapes, |device, (shape, kinds), seed| {
        let count = shape.iter().product();
        if !within_cap(count) {
            return Ok(());
        }
        for (dtype, &kind) in
            [DType::F32, DType::BF16].into_iter().flat_map(|dtype| kinds.iter().map(move |kind| (dtype, kind)))
        {
            let xs = Var::from_tensor(&tensor(&normal(count, 3.0, seed), shape.as_slice(), dtype, device)?)?;
            let call = Call::new(kind, 1, &xs)?;
            let found = (0..10).map(|_| call.found()).collect::<Result<Vec<_>>>()?;
            for found in [&found[0], &found[9]] {
                call.check(found)?;
            }
        }
        Ok(())
    })
}
