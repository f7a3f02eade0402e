//! Eight threads at once on one device.

use crate::support::{check, devices, normal, tensor, values, Op};
use candle_core::{DType, Device, Result};

/// Each thread with tensors of its own; all of them race to load the kernels. Every result is checked, and is the same to
/// the bit as that of a thread alone.
#[test]
fn eight_threads_at_once() -> Result<()> {
    let shapes = [(500, 40), (3, 100_000), (40, 3000), (1, 200_000)];
    let work = |device: &Device, seed: u64| -> Result<Vec<Vec<f64>>> {
        let mut results = vec![];
        for shape in shapes {
            let xs = tensor(&normal(shape.0 * shape.1, 3.0, seed), shape, DType::F32, device)?;
            for op in Op::ALL {
                for dim in 0..2 {
                    check(op, &xs, dim)?;
                    results.push(values(&op.apply(&xs, dim)?)?);
                }
            }
        }
        Ok(results)
    };
    for device in devices() {
        let together: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|seed| {
                    scope.spawn({
                        let device = &device;
                        move || work(device, seed)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no thread panics")).collect::<Result<_>>()
        })?;
        for (seed, results) in together.iter().enumerate().step_by(3) {
            assert!(*results == work(&device, seed as u64)?, "thread {seed} on {device:?}");
        }
    }
    Ok(())
}
