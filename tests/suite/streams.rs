//! Several streams of one device, whose kernels run at the same time.

#[cfg(feature = "cuda")]
use crate::support::{check_result, gpu_for, normal, tensor, within_cap, Op};
#[cfg(feature = "cuda")]
use candle_core::{CudaDevice, DType, Device, Result};

/// Four threads, each with a stream of its own and calls on their way that it does not wait for. Kernels whose blocks wait for each
/// other must not do so for some that the GPU has no room for.
#[cfg(feature = "cuda")]
#[test]
fn four_streams_at_once() -> Result<()> {
    if gpu_for(0).is_none() {
        return Ok(());
    }
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
    let work = |device: &Device, seed: u64| -> Result<()> {
        // Each begins elsewhere, so that kernels of every kind meet.
        for round in 0..shapes.len() {
            let (shape, dim) = &shapes[(round + 2 * seed as usize) % shapes.len()];
            let count = shape.iter().product();
            if !within_cap(count) {
                continue;
            }
            for dtype in [DType::F32, DType::BF16] {
                let xs = tensor(&normal(count, 3.0, seed), shape.as_slice(), dtype, device)?;
                let found = (0..30).map(|_| Op::Softmax.apply(&xs, *dim)).collect::<Result<Vec<_>>>()?;
                for found in [&found[0], &found[29]] {
                    check_result(Op::Softmax, &xs, *dim, found)?;
                }
            }
        }
        Ok(())
    };
    let streams = (0..4).map(|_| CudaDevice::new_with_stream(0).map(Device::Cuda)).collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            streams.iter().zip(0..).map(|(device, seed)| scope.spawn(move || work(device, seed))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panics"))
    })
}
