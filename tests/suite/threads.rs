//! Many threads at once on one device.

use crate::support::{check, check_result, devices, gradient, normal, pool, tensor, values, within_cap, Op, DTYPES};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_softmax::{loss::CrossEntropy, ops, testing, Softmax};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

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

/// Four threads, each of which has calls on their way for lines that take all of a GPU, without waiting for one.
#[test]
fn lines_that_take_a_whole_gpu_from_four_threads() -> Result<()> {
    let shape = (1, (1 << 23) + 1);
    if !within_cap(shape.1) {
        return Ok(());
    }
    let work = |device: &Device, seed: u64| -> Result<()> {
        let tensors = (0..2).map(|k| tensor(&normal(shape.1, 3.0, 2 * seed + k), shape, DType::BF16, device));
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        let found: Vec<_> = (0..10).map(|call| Op::Softmax.apply(&tensors[call % 2], 1)).collect::<Result<_>>()?;
        for call in [0, 1, 8, 9] {
            check_result(Op::Softmax, &tensors[call % 2], 1, &found[call])?;
        }
        Ok(())
    };
    for device in devices() {
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|seed| {
                    scope.spawn({
                        let device = &device;
                        move || work(device, seed)
                    })
                })
                .collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panics"))
        })?;
    }
    Ok(())
}

/// A thread whose first call works in place, on what another made: nothing before has told a driver what GPU it means.
#[test]
fn in_place_in_a_thread_of_its_own() -> Result<()> {
    for device in devices() {
        // What a GPU's hardware copies as it is described to it, by a cluster and by strips
        for (shape, dtype) in [((64, 1000, 128), DType::BF16), ((1, 4096, 4096), DType::F32)] {
            let count = shape.0 * shape.1 * shape.2;
            if !within_cap(count) {
                continue;
            }
            let xs = tensor(&normal(count, 3.0, 6), shape, dtype, &device)?;
            // Once here, so that all is known of the kernel
            ops::softmax_inplace(&xs.copy()?, 1)?;
            let ys = xs.copy()?;
            let in_thread = ys.clone();
            std::thread::spawn(move || ops::softmax_inplace(&in_thread, 1)).join().expect("no panic")?;
            check_result(Op::Softmax, &xs, 1, &ys)?;
        }
    }
    Ok(())
}

/// A target for each line: the first class.
fn zeros(logits: &Tensor) -> Result<Tensor> {
    Tensor::zeros(logits.dim(0)?, DType::U32, &Device::Cpu)
}

/// A thread of a pool that waits for others does no other work of the pool meanwhile: that may wait for what this thread has locked.
#[test]
fn no_other_work_while_a_call_waits() -> Result<()> {
    thread_local! {
        static WITHIN: Cell<bool> = const { Cell::new(false) };
    }
    let scores = tensor(&normal(64 * 4096, 1.0, 1), (64, 4096), DType::F32, &Device::Cpu)?;
    let bias = tensor(&normal(4096, 1.0, 2), (1, 4096), DType::F32, &Device::Cpu)?;
    let logits = tensor(&normal(100_000 * 2, 1.0, 3), (100_000, 2), DType::F32, &Device::Cpu)?;
    let calls: [&(dyn Fn() -> Result<Tensor> + Sync); 2] =
        [&|| gradient(&bias, |bias| Softmax::new().dim(0).bias(bias).forward(&scores)), &|| {
            gradient(&logits, |logits| CrossEntropy::new().forward(logits, &zeros(logits)?))
        }];
    let pool = pool(4);
    for i in 0..400 {
        let (ready, other_work) = (AtomicBool::new(false), AtomicBool::new(false));
        pool.scope(|scope| {
            // One thread has much to do that others take over, and so are there when they may take a part of the call, too.
            scope.spawn(|scope| {
                for _ in 0..1000 {
                    scope.spawn(|_| {
                        if WITHIN.get() {
                            other_work.store(true, Ordering::Relaxed);
                        }
                        (0..100).for_each(|_| std::hint::spin_loop());
                    });
                }
                ready.store(true, Ordering::Release);
                std::thread::sleep(std::time::Duration::from_millis(5));
            });
            scope.spawn(|_| {
                while !ready.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                WITHIN.set(true);
                calls[i % 2]().expect("a gradient");
                WITHIN.set(false);
            });
        });
        assert!(!other_work.load(Ordering::Relaxed), "call {} took other work on", i % 2);
    }
    Ok(())
}

/// On the CPU one thread and several, which share the lines between them, write the same bits: of lines that are close to each other, as
/// of ones some of which are not.
#[test]
fn the_same_bits_by_any_number_of_threads() -> Result<()> {
    type Call = fn(&Tensor, &Tensor) -> Result<Tensor>;
    let calls: [(&str, Call); 8] = [
        ("softmax", |xs, _| ops::softmax(xs, 1)),
        ("log_softmax", |xs, _| ops::log_softmax(xs, 1)),
        ("softmax, dim 0", |xs, _| ops::softmax(xs, 0)),
        ("scale", |xs, _| Softmax::new().scale(0.3).forward(xs)),
        ("bias and dropout", |xs, ys| Softmax::new().bias(ys).dropout(0.2, 7).forward(xs)),
        ("softcap and window", |xs, _| Softmax::new().softcap(20.0).window(50, 20).forward(xs)),
        ("gradient", |xs, ys| testing::softmax_backward(false, ys, xs, 1)),
        ("logsumexp", |xs, _| ops::logsumexp(xs, 1)),
    ];
    // With candle's own passes, by one thread each
    let of_training: [(&str, Call); 7] = [
        ("logsumexp, dim 0", |xs, _| ops::logsumexp(xs, 0)),
        ("weights of the greatest", |xs, _| Ok(ops::topk_softmax(xs, 5, true)?.0)),
        ("losses", |xs, _| CrossEntropy::new().label_smoothing(0.1).z_loss(1e-4).forward(xs, &zeros(xs)?)),
        ("gradient of losses", |xs, _| {
            gradient(xs, |xs| CrossEntropy::new().label_smoothing(0.1).z_loss(1e-4).forward(xs, &zeros(xs)?))
        }),
        ("gradient with a softcap", |xs, ys| gradient(xs, |xs| Softmax::new().softcap(20.0).forward(xs)? * ys)),
        ("gradient of a bias", |xs, ys| {
            gradient(&ys.narrow(0, 0, 1)?.copy()?, |bias| Softmax::new().bias(bias).forward(xs)? * ys)
        }),
        ("gradient of a bias, dim 0", |xs, ys| {
            gradient(&ys.narrow(0, 0, 1)?.copy()?, |bias| Softmax::new().dim(0).bias(bias).forward(xs)? * ys)
        }),
    ];
    let pools = [1, 2, 5].map(pool);
    // Enough elements to be shared, and of the first for one thread to write f32s past the caches; the last are cut into parts, some lines
    // or strips at a time.
    for shape in [(42_000, 64), (12_500, 128), (8000, 200), (3200, 512), (270, 6000), (1500, 1024), (6, 300_000)] {
        for dtype in DTYPES {
            for far in [false, true] {
                let mut xs = normal(shape.0 * shape.1, 2.0, 3);
                if far {
                    xs.chunks_mut(shape.1).step_by(7).for_each(|line| line.iter_mut().for_each(|x| *x += 40.0));
                }
                let xs = tensor(&xs, shape, dtype, &Device::Cpu)?;
                let ys = tensor(&normal(shape.0 * shape.1, 1.0, 4), shape, dtype, &Device::Cpu)?;
                let training =
                    of_training.iter().filter(|_| !far && shape.1 <= 6000 && matches!(dtype, DType::F32 | DType::BF16));
                for (name, call) in calls.iter().chain(training) {
                    let [one, two, five] = pools.each_ref().map(|pool| values(&pool.install(|| call(&xs, &ys))?));
                    let (one, two, five) = (one?, two?, five?);
                    assert!(one == two && one == five, "{name} of {shape:?} {dtype:?}, far: {far}");
                }
            }
        }
    }
    Ok(())
}

/// Fails where `work` is not done within a minute: its threads wait for each other then.
fn within_a_minute(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    is_done.recv_timeout(std::time::Duration::from_secs(60)).expect("threads wait for each other")
}

/// Calls `call` a few hundred times while another thread calls `other`, for as long as that takes.
fn while_another(call: impl Fn() -> Result<()>, other: impl Fn() -> Result<()> + Send + 'static) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let thread = std::thread::spawn(move || -> Result<()> {
        while !stopped.load(Ordering::Relaxed) {
            other()?;
        }
        Ok(())
    });
    (0..400).try_for_each(|_| call())?;
    stop.store(true, Ordering::Relaxed);
    thread.join().expect("no thread panics")
}

/// Scores, bias and weights that are parts of a variable to which another thread writes meanwhile.
#[test]
fn a_storage_is_locked_once() -> Result<()> {
    within_a_minute(|| {
        let var = Var::zeros((2, 4, 4), DType::F32, &Device::Cpu)?;
        let (written, numbers) = (var.clone(), Tensor::ones((2, 4, 4), DType::F32, &Device::Cpu)?);
        let targets = Tensor::zeros(4, DType::U32, &Device::Cpu)?;
        let call = || {
            let (scores, bias) = (var.narrow(0, 0, 1)?, var.narrow(0, 1, 1)?);
            Softmax::new().bias(&bias).forward(&scores)?.sqr()?.sum_all()?.backward()?;
            let logits = var.narrow(0, 0, 1)?.squeeze(0)?;
            let weights = var.detach().narrow(0, 1, 1)?.flatten_all()?.narrow(0, 0, 4)?;
            CrossEntropy::new().weight(&weights).forward(&logits, &targets)?.backward()?;
            Ok(())
        };
        while_another(call, move || written.set(&numbers))
    })
}

/// Two tensors, each of which is written over with the other as its bias.
#[test]
fn in_place_beside_each_other() -> Result<()> {
    within_a_minute(|| {
        let [a, b] = [1, 2].map(|seed| tensor(&normal(16, 1.0, seed), (4, 4), DType::F32, &Device::Cpu));
        let (a, b) = (a?, b?);
        let (other_a, other_b) = (a.clone(), b.clone());
        let call = move || Softmax::new().bias(&b).forward_inplace(&a);
        while_another(call, move || Softmax::new().bias(&other_a).forward_inplace(&other_b))
    })
}
