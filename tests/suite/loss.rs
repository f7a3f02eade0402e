//! Cross-entropy against the formula in f64, against candle-nn's, and against finite differences.

use crate::support::{check_gradient, devices, gpu_for, half_unit, normal, sum, tensor, values, within_cap, DTYPES};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_softmax::loss::{self, CrossEntropy, Reduction};

/// Every option, and targets of some lines.
#[derive(Clone, Debug)]
pub struct Case {
    shape: Vec<usize>,
    targets: Vec<i64>,
    ignore_index: i64,
    smoothing: f64,
    weights: Option<Vec<f64>>,
    z: f64,
    pub reduction: Reduction,
}

impl Case {
    /// Random targets, a quarter of them ignored, and no options.
    pub fn new(shape: &[usize]) -> Self {
        let (lines, classes) = (shape.iter().product::<usize>() / shape[class_dim(shape)], shape[class_dim(shape)]);
        let targets = normal(lines, 1e6, 99).into_iter().map(|x| x.abs() as i64 % classes as i64);
        let targets = targets.enumerate().map(|(i, t)| if lines > 1 && i % 4 == 1 { -100 } else { t }).collect();
        let reduction = Reduction::Mean;
        Self { shape: shape.to_vec(), targets, ignore_index: -100, smoothing: 0.0, weights: None, z: 0.0, reduction }
    }

    fn classes(&self) -> usize {
        self.shape[class_dim(&self.shape)]
    }

    pub fn with_everything(mut self) -> Self {
        (self.smoothing, self.z) = (0.2, 0.01);
        self.weights = Some(normal(self.classes(), 1.0, 98).iter().map(|x| x.abs() + 0.1).collect());
        self
    }

    fn loss(&self, logits: &Tensor) -> Result<Tensor> {
        let device = logits.device();
        let mut shape = self.shape.clone();
        shape.remove(class_dim(&self.shape));
        let targets = Tensor::from_vec(self.targets.clone(), shape, device)?;
        let mut op = CrossEntropy::new()
            .ignore_index(self.ignore_index)
            .label_smoothing(self.smoothing)
            .z_loss(self.z)
            .reduction(self.reduction);
        if let Some(weights) = &self.weights {
            op = op.weight(&tensor(weights, weights.len(), logits.dtype(), device)?);
        }
        op.forward(logits, &targets)
    }

    /// Losses and the gradient of Σ upstream·loss, in f64, as torch defines them, and the size of what each gradient is the sum of.
    fn expected(&self, logits: &[f64], weights: Option<&[f64]>, upstream: &[f64]) -> (Vec<f64>, Vec<(f64, f64)>) {
        let dim = class_dim(&self.shape);
        let (classes, inner) = (self.classes(), self.shape[dim + 1..].iter().product::<usize>());
        let weight = |class: usize| weights.map_or(1.0, |weights| weights[class]);
        let kept = |t: &&i64| **t != self.ignore_index;
        let count = self.targets.iter().filter(kept).count() as f64;
        let total: f64 = self.targets.iter().filter(kept).map(|&t| weight(t as usize)).sum();
        let mean = self.reduction == Reduction::Mean;
        let (by_weight, by_count) = if mean { (total, count) } else { (1.0, 1.0) };
        let of_weights: f64 = (0..classes).map(weight).sum();
        let mut losses = vec![0.0; self.targets.len()];
        let mut gradient = vec![(0.0, 0.0); logits.len()];
        for (line, &target) in self.targets.iter().enumerate().filter(|(_, t)| kept(t)) {
            let at = |j: usize| line / inner * classes * inner + j * inner + line % inner;
            let max = (0..classes).map(|j| logits[at(j)]).fold(f64::NEG_INFINITY, f64::max);
            let log_sum = sum((0..classes).map(|j| (logits[at(j)] - max).exp())).ln();
            let log_p = |j: usize| logits[at(j)] - max - log_sum;
            let lse = max + log_sum;
            let t = target as usize;
            let smooth: f64 = match self.smoothing {
                0.0 => 0.0,
                e => e / classes as f64 * (0..classes).map(|j| weight(j) * log_p(j)).sum::<f64>(),
            };
            losses[line] = (-(1.0 - self.smoothing) * weight(t) * log_p(t) - smooth) / by_weight;
            losses[line] += self.z * lse * lse / by_count;
            let up = if self.reduction == Reduction::None { upstream[line] } else { upstream[0] };
            for j in 0..classes {
                let (p, hit) = (log_p(j).exp(), f64::from(u8::from(j == t)));
                let (of_nll, of_each) = ((1.0 - self.smoothing) * weight(t), self.smoothing / classes as f64);
                let of_square = 2.0 * self.z * lse * p / by_count;
                let of_p = of_nll * (p - hit) + of_each * (of_weights * p - weight(j));
                let size = of_nll * (p + hit) + of_each * (of_weights * p + weight(j));
                gradient[at(j)] =
                    (up * (of_p / by_weight + of_square), up.abs() * (size / by_weight + of_square.abs()));
            }
        }
        match self.reduction {
            Reduction::None => (losses, gradient),
            _ if mean && count == 0.0 => (vec![f64::NAN], gradient),
            _ => (vec![losses.iter().sum()], gradient),
        }
    }

    /// Losses and gradients of `logits`, which has this case's shape, against the formula.
    pub fn check(&self, logits: &Tensor) -> Result<()> {
        let dtype = logits.dtype();
        let what = format!("{:?} {dtype:?} {:?} {:?}", logits.device(), self.shape, self.reduction);
        let what = format!("{what}, smoothing {}, z {}, weights {}", self.smoothing, self.z, self.weights.is_some());
        let logits = Var::from_tensor(logits)?;
        let found = self.loss(&logits)?;
        assert_eq!(found.dtype(), if dtype == DType::F64 { DType::F64 } else { DType::F32 }, "{what}");
        let upstream = normal(found.elem_count(), 1.0, 97);
        let grads =
            (&found * tensor(&upstream, found.shape(), found.dtype(), logits.device())?)?.sum_all()?.backward()?;
        let gradient = grads.get(&logits).expect("a gradient");
        assert_eq!((gradient.dtype(), gradient.dims()), (dtype, logits.dims()), "{what}");
        let weights = match &self.weights {
            Some(weights) => Some(values(&tensor(weights, weights.len(), dtype, &Device::Cpu)?)?),
            None => None,
        };
        let (exact, exact_gradient) = self.expected(&values(&logits)?, weights.as_deref(), &upstream);
        // Of what is computed and, by half a unit in the last place, of what is stored
        let (relative, least) = match dtype {
            DType::F64 => (1e-12, 1e-300),
            DType::F32 => (4e-6, 1e-43),
            DType::F16 => (4e-6, 2f64.powi(-24)),
            _ => (4e-6, 1e-39),
        };
        // Each of those that are summed is off by as much.
        let summed = if self.reduction == Reduction::Sum { self.targets.len() } else { 1 } as f64;
        for (found, exact) in values(&found)?.into_iter().zip(exact) {
            let close = (found - exact).abs() <= relative * (summed + exact.abs());
            assert!(close || (found.is_nan() && exact.is_nan()), "{what}: loss {found} for {exact}");
        }
        for (i, (found, (exact, size))) in values(gradient)?.into_iter().zip(exact_gradient).enumerate() {
            let bound = half_unit(dtype) * exact.abs() + relative * size + least;
            assert!((found - exact).abs() <= bound, "{what}: gradient {i} is {found} for {exact}");
        }
        Ok(())
    }

    /// The losses of lines by these targets, which are this case's, where there are no options.
    fn check_losses(&self, logits: &Tensor, targets: &Tensor) -> Result<()> {
        let found = values(&CrossEntropy::new().reduction(Reduction::None).forward(logits, targets)?)?;
        let (exact, _) = self.expected(&values(logits)?, None, &vec![0.0; self.targets.len()]);
        assert_eq!(found.len(), exact.len());
        for (found, exact) in found.iter().zip(exact) {
            assert!((found - exact).abs() <= 4e-6 * (1.0 + exact), "{:?}: {found} for {exact}", targets.dtype());
        }
        Ok(())
    }
}

fn class_dim(shape: &[usize]) -> usize {
    1.min(shape.len() - 1)
}

const REDUCTIONS: [Reduction; 3] = [Reduction::Mean, Reduction::Sum, Reduction::None];

#[test]
fn every_option_in_every_dtype_and_rank() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            for shape in
                [vec![11], vec![9, 5], vec![4, 700], vec![3, 7, 5], vec![2, 6, 3, 4], vec![2, 300, 33], vec![2, 3, 700]]
            {
                let logits = tensor(&normal(shape.iter().product(), 3.0, 1), shape.clone(), dtype, &device)?;
                for reduction in REDUCTIONS {
                    let plain = Case { reduction, ..Case::new(&shape) };
                    let all = plain.clone().with_everything();
                    for case in [
                        Case { smoothing: 0.3, ..plain.clone() },
                        Case { z: 0.01, ..plain.clone() },
                        Case { weights: all.weights.clone(), ..plain.clone() },
                        Case { smoothing: 1.0, ..all.clone() },
                        plain,
                        all,
                    ] {
                        case.check(&logits)?;
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn lines_of_every_length_and_offset() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            for classes in [1, 2, 3, 17, 255, 511, 513, 1000, 1025, 4099, 20_000, 128_256] {
                let count = 5 * classes + 1;
                if !within_cap(count) || (classes > 20_000 && dtype == DType::F64) {
                    continue;
                }
                let xs = tensor(&normal(count, 3.0, classes as u64), count, dtype, &device)?;
                for offset in 0..2 {
                    let logits = xs.narrow(0, offset, 5 * classes)?.reshape((5, classes))?;
                    let case = Case { reduction: Reduction::None, ..Case::new(&[5, classes]) };
                    case.check(&logits)?;
                    case.with_everything().check(&logits)?;
                }
            }
        }
    }
    Ok(())
}

/// A few classes, or a few lines side by side; what is ignored may be anything.
#[test]
fn few_classes_and_narrow_rows() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            for classes in (1..18).chain([21, 64, 150]) {
                for inner in [1, 2, 3, 7, 8, 15, 16, 17, 40, 300] {
                    let shape = [if inner > 100 { 2 } else { 13 }, classes, inner];
                    let count = shape.iter().product();
                    if !within_cap(count) {
                        continue;
                    }
                    let plain = Case { reduction: Reduction::None, ..Case::new(&shape) };
                    let logits = normal(count, 3.0, classes as u64);
                    let logits = logits.into_iter().enumerate().map(|(i, x)| {
                        let line = i / (classes * inner) * inner + i % inner;
                        match (plain.targets[line], i % 3) {
                            (-100, 0) => f64::NAN,
                            (-100, 1) => f64::INFINITY,
                            _ => x,
                        }
                    });
                    let logits = tensor(&logits.collect::<Vec<_>>(), shape.to_vec(), dtype, &device)?;
                    let weights = plain.clone().with_everything().weights;
                    Case { weights, ..plain.clone() }.check(&logits)?;
                    plain.check(&logits)?;
                }
            }
        }
    }
    Ok(())
}

/// So many lines side by side that a GPU's threads take whole ones, of half precision in pairs where rows begin at words; nothing else does. With a sum
/// over classes groups of threads do.
#[test]
fn lines_that_fill_a_gpu() -> Result<()> {
    let wide = [4, 21, 512 * 512];
    let shapes = [[2, 37, 25_400], [2, 37, 25_401], [1, 150, 60_000]];
    let of = |shapes: &[[usize; 3]], dtypes: &[DType]| {
        shapes.iter().flat_map(|&shape| dtypes.iter().map(move |&dtype| (shape, dtype))).collect::<Vec<_>>()
    };
    for (shape, dtype) in [of(&shapes, &DTYPES), of(&[wide], &[DType::F16, DType::BF16])].concat() {
        let count = shape.iter().product();
        let Some(device) = gpu_for(count) else { return Ok(()) };
        let logits = tensor(&normal(count, 3.0, 6), shape.to_vec(), dtype, &device)?;
        let plain = Case { reduction: Reduction::None, ..Case::new(&shape) };
        let weights = plain.clone().with_everything().weights;
        plain.clone().check(&logits)?;
        Case { weights, z: 0.01, ..plain.clone() }.check(&logits)?;
        plain.with_everything().check(&logits)?;
    }
    Ok(())
}

/// So many classes that a line, or a strip of lines, is split among threads.
#[test]
fn lines_in_parts() -> Result<()> {
    if !within_cap(600_000) {
        return Ok(());
    }
    for device in devices() {
        for shape in [vec![2, 300_000], vec![1, 300_000, 2]] {
            let logits = tensor(&normal(600_000, 3.0, 1), shape.clone(), DType::F32, &device)?;
            let case = Case { targets: vec![299_999, 3], ..Case::new(&shape) };
            case.check(&logits)?;
            case.with_everything().check(&logits)?;
        }
    }
    Ok(())
}

#[test]
fn logits_far_from_zero() -> Result<()> {
    for device in devices() {
        for shape in [vec![6, 40], vec![6, 2000], vec![2, 40, 3]] {
            for offset in [1e4, -1e4] {
                let logits: Vec<f64> = normal(shape.iter().product(), 3.0, 5).iter().map(|x| x + offset).collect();
                let logits = tensor(&logits, shape.clone(), DType::F32, &device)?;
                for reduction in REDUCTIONS {
                    let case = Case { smoothing: 0.1, reduction, ..Case::new(&shape) };
                    case.check(&logits)?;
                    Case { weights: case.clone().with_everything().weights, ..case }.check(&logits)?;
                }
            }
        }
    }
    Ok(())
}

/// As a class is that padding was given the lowest number, whichever it is: it takes no digits from the others.
#[test]
fn one_class_far_below_the_others() -> Result<()> {
    for device in devices() {
        for shape in [vec![6, 40], vec![6, 2000], vec![3, 60_000], vec![2, 40, 3], vec![2, 3000, 5], vec![1, 9000, 300]]
        {
            let (classes, inner) = (shape[1], shape[2..].iter().product::<usize>());
            if !within_cap(shape.iter().product()) {
                continue;
            }
            for (dtype, lowest) in [
                (DType::F32, -1e4),
                (DType::F32, -1e9),
                (DType::F32, f64::from(f32::MIN)),
                (DType::BF16, -1e38),
                (DType::F64, -1.7e308),
            ] {
                for class in [0, 17, classes - 1] {
                    let mut logits = normal(shape.iter().product(), 3.0, 12);
                    let of_class = |i: &usize| i / inner % classes == class;
                    (0..logits.len()).filter(of_class).for_each(|i| logits[i] = lowest);
                    let logits = tensor(&logits, shape.clone(), dtype, &device)?;
                    let mut case = Case { smoothing: 0.1, reduction: Reduction::None, ..Case::new(&shape) };
                    if lowest > -1e10 {
                        case.check(&logits)?;
                    }
                    // What counts nothing costs nothing, however low.
                    case.targets.iter_mut().filter(|target| **target == class as i64).for_each(|target| *target = 1);
                    let mut weights = case.clone().with_everything().weights.expect("weights");
                    weights[class] = 0.0;
                    Case { weights: Some(weights), ..case }.check(&logits)?;
                }
            }
        }
    }
    Ok(())
}

/// Classes that nothing is left of cost infinitely much, and those beside them that are as low as numbers get no less.
#[test]
fn classes_of_nothing_beside_the_lowest() -> Result<()> {
    for device in devices() {
        for shape in [vec![4, 40], vec![4, 2000], vec![2, 60_000], vec![2, 40, 3], vec![1, 3000, 5], vec![1, 900, 300]]
        {
            let (classes, inner) = (shape[1], shape[2..].iter().product::<usize>());
            if !within_cap(shape.iter().product()) {
                continue;
            }
            for (dtype, lowest) in [(DType::F32, f64::from(f32::MIN)), (DType::BF16, -3.3e38), (DType::F64, f64::MIN)] {
                // The first ones, every other, and all but the last
                let nothing: [&dyn Fn(usize) -> bool; 3] =
                    [&|class| class < 5, &|class| class % 2 == 0, &|class| class + 1 < classes];
                for nothing in nothing {
                    let class = |i: usize| i / inner % classes;
                    let of = |i: usize| if nothing(class(i)) { f64::NEG_INFINITY } else { lowest };
                    let logits: Vec<f64> = (0..shape.iter().product()).map(of).collect();
                    let logits = tensor(&logits, shape.clone(), dtype, &device)?;
                    let targets = vec![classes as i64 - 1; shape.iter().product::<usize>() / classes];
                    let case = Case { targets, smoothing: 0.1, reduction: Reduction::None, ..Case::new(&shape) };
                    let losses = values(&case.loss(&logits)?)?;
                    assert!(losses.iter().all(|&loss| loss == f64::INFINITY), "{shape:?} {dtype:?}: {losses:?}");
                }
            }
        }
    }
    Ok(())
}

/// Of two lines side by side, as many as a vector has lanes for.
#[test]
fn more_classes_than_an_f32_counts() -> Result<()> {
    let (classes, inner) = ((1 << 24) + 16, 2);
    if !within_cap(classes * inner) {
        return Ok(());
    }
    for device in devices() {
        let logits = Var::zeros((1, classes, inner), DType::F16, &device)?;
        let target = (1 << 24) + 1;
        let targets = Tensor::full(target as i64, (1, inner), &device)?;
        let grads = CrossEntropy::new().reduction(Reduction::Sum).forward(&logits, &targets)?.backward()?;
        let gradient = grads.get(&logits).expect("a gradient").to_device(&Device::Cpu)?;
        let gradient = gradient.flatten_all()?.to_vec1::<half::f16>()?;
        let hit = (0..gradient.len()).filter(|&i| gradient[i].to_f32() < -0.5).collect::<Vec<_>>();
        assert_eq!(hit, [target * inner, target * inner + 1], "{device:?}");
    }
    Ok(())
}

#[test]
fn strided_logits_and_targets() -> Result<()> {
    for device in devices() {
        let case = Case::new(&[6, 50]).with_everything();
        let logits = tensor(&normal(300, 3.0, 6), (50, 6), DType::F32, &device)?.t()?;
        case.check(&logits)?;
        let every = |targets: &[i64]| Tensor::from_vec(targets.to_vec(), targets.len(), &device);
        let doubled: Vec<i64> = case.targets.iter().flat_map(|&t| [t, 7]).collect();
        let strided = every(&doubled)?.reshape((6, 2))?.narrow(1, 0, 1)?.squeeze(1)?;
        assert!(!strided.is_contiguous());
        let broadcast = Tensor::new(&[3i64], &device)?.broadcast_as(6)?;
        let plain = Case { reduction: Reduction::None, ..Case::new(&[6, 50]) };
        for (targets, tensor) in [(case.targets, strided), (vec![3; 6], broadcast)] {
            Case { targets, ..plain.clone() }.check_losses(&logits, &tensor)?;
        }
    }
    Ok(())
}

#[test]
fn ignored_targets() -> Result<()> {
    for device in devices() {
        let logits = tensor(&normal(40, 2.0, 7), (8, 5), DType::F64, &device)?;
        // A class of its own, outside of the classes, all, none
        for (targets, ignore_index) in [
            (vec![0, 1, 2, 3, 4, 2, 2, 0], 2),
            (vec![0, 1, 255, 3, 4, 255, 2, 0], 255),
            (vec![-1; 8], -1),
            (vec![3; 8], -1),
        ] {
            for reduction in REDUCTIONS {
                let case = Case { targets: targets.clone(), ignore_index, reduction, ..Case::new(&[8, 5]) };
                case.with_everything().check(&logits)?;
            }
        }
        // What ignored lines hold does not matter.
        let bad: Vec<f64> = (0..40).map(|i| if i < 5 { f64::NAN } else { i as f64 % 3.0 }).collect();
        for (shape, bad) in
            [(vec![8, 5], bad.clone()), (vec![1, 5, 8], (0..40).map(|i| bad[i % 8 * 5 + i / 8]).collect())]
        {
            for dtype in DTYPES {
                let logits = Var::from_tensor(&tensor(&bad, shape.clone(), dtype, &device)?)?;
                let case = Case { targets: vec![-100, 1, 2, 3, 4, 0, 1, 2], ..Case::new(&shape) }.with_everything();
                let loss = case.loss(&logits)?;
                assert!(values(&loss)?[0].is_finite());
                let gradient = values(loss.backward()?.get(&logits).expect("a gradient"))?;
                assert!(gradient.iter().all(|g| g.is_finite()), "{gradient:?}");
                let inner = if shape.len() == 2 { 1 } else { 8 };
                assert!((0..5).all(|j| gradient[j * inner] == 0.0), "{gradient:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn nan_logits_make_their_line_nan() -> Result<()> {
    for device in devices() {
        for (shape, place) in [(vec![3, 40], 47), (vec![3, 2000], 2007), (vec![1, 40, 3], 22)] {
            for special in [f64::NAN, f64::INFINITY] {
                let mut logits = normal(shape.iter().product(), 1.0, 8);
                logits[place] = special;
                let logits = Var::from_tensor(&tensor(&logits, shape.clone(), DType::F32, &device)?)?;
                let case = Case { targets: vec![0, 1, 2], reduction: Reduction::None, ..Case::new(&shape) };
                let losses = case.loss(&logits)?;
                let nan: Vec<bool> = values(&losses)?.iter().map(|l| l.is_nan()).collect();
                assert_eq!(nan, [false, true, false]);
                let gradient = values(losses.sum_all()?.backward()?.get(&logits).expect("a gradient"))?;
                let (classes, inner) = (case.classes(), logits.elem_count() / shape[0] / case.classes());
                for (i, g) in gradient.iter().enumerate() {
                    assert_eq!(
                        g.is_nan(),
                        i / inner / classes * inner + i % inner == 1,
                        "{shape:?} {special} {i}: {g}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// An error on the CPU; on CUDA the target's line is NaN, and so is whatever has it among its terms.
#[test]
fn targets_out_of_range() -> Result<()> {
    for device in devices() {
        for shape in [vec![3, 5], vec![3, 2000], vec![1, 5, 3]] {
            let classes = shape[1] as i64;
            let of_i64 = [-1, classes, i64::MAX, -101].map(|target| (target, DType::I64));
            let of_u32 = [classes, 1 << 31, u32::MAX as i64].map(|target| (target, DType::U32));
            for (target, dtype) in of_i64.into_iter().chain(of_u32) {
                let of_lines = if shape.len() == 2 { vec![3] } else { vec![1, 3] };
                let targets = match dtype {
                    DType::U32 => Tensor::from_vec(vec![1, target as u32, 2], of_lines, &device)?,
                    _ => Tensor::from_vec(vec![1, target, 2], of_lines, &device)?,
                };
                let drawn = normal(shape.iter().product(), 1.0, 9);
                let logits = Var::from_tensor(&tensor(&drawn, shape.clone(), DType::F32, &device)?)?;
                for reduction in [Reduction::None, Reduction::Sum, Reduction::Mean] {
                    let what = format!("{shape:?} {target} {dtype:?} {reduction:?}");
                    let found = CrossEntropy::new().reduction(reduction).forward(&logits, &targets);
                    if device.is_cpu() {
                        let message = found.unwrap_err().to_string();
                        let named = message.contains(&format!("target {target}"))
                            && message.contains(&format!("{classes} classes"));
                        assert!(named, "{what}: {message}");
                        continue;
                    }
                    let losses = found?;
                    let nan: Vec<bool> = values(&losses)?.iter().map(|l| l.is_nan()).collect();
                    let expected: &[bool] = if reduction == Reduction::None { &[false, true, false] } else { &[true] };
                    assert_eq!(nan, expected, "{what}");
                    let gradient = values(losses.sum_all()?.backward()?.get(&logits).expect("a gradient"))?;
                    let line = |i: usize| if shape.len() == 2 { i / shape[1] } else { i % 3 };
                    assert!(gradient.iter().enumerate().all(|(i, g)| g.is_nan() == (line(i) == 1)), "{what}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn index_dtypes() -> Result<()> {
    for device in devices() {
        let logits = tensor(&normal(40, 2.0, 10), (8, 5), DType::F32, &device)?;
        let case = Case { targets: vec![0, 1, 2, 3, 4, 2, 2, 0], reduction: Reduction::None, ..Case::new(&[8, 5]) };
        let targets = Tensor::new(case.targets.as_slice(), &device)?;
        for dtype in [DType::U8, DType::U32, DType::I64] {
            case.check_losses(&logits, &targets.to_dtype(dtype)?)?;
        }
        let some = Tensor::new(&[0u32, u32::MAX, 2, 3, 4, 2, 2, 0], &device)?;
        let found = CrossEntropy::new().ignore_index(u32::MAX as i64).forward(&logits, &some)?;
        assert!(found.to_scalar::<f32>()?.is_finite());
    }
    Ok(())
}

#[test]
fn a_drop_in_for_candle_nn() -> Result<()> {
    for device in devices() {
        for (shape, dtype, bound) in [
            ((9, 5), DType::F64, 1e-12),
            ((64, 1000), DType::F32, 1e-5),
            ((7, 33), DType::F16, 1e-2),
            ((7, 33), DType::BF16, 6e-2),
        ] {
            let logits = Var::from_tensor(&tensor(&normal(shape.0 * shape.1, 2.0, 11), shape, dtype, &device)?)?;
            let targets = Tensor::arange(0u32, shape.0 as u32, &device)?;
            let targets = if shape.0 > shape.1 { (targets / 2.0)? } else { targets };
            for index in [DType::U32, DType::I64] {
                let targets = targets.to_dtype(index)?;
                let (ours, theirs) =
                    (loss::cross_entropy(&logits, &targets)?, candle_nn::loss::cross_entropy(&logits, &targets)?);
                assert_eq!((ours.dims(), ours.dtype()), (theirs.dims(), theirs.dtype()));
                assert!((values(&ours)?[0] - values(&theirs)?[0]).abs() <= bound * values(&theirs)?[0]);
                let (ours, theirs) = (ours.backward()?, theirs.backward()?);
                let gradients = [&ours, &theirs].map(|grads| values(grads.get(&logits).expect("a gradient")));
                let [ours, theirs] = gradients;
                let (ours, theirs) = (ours?, theirs?);
                let size = theirs.iter().fold(0.0, |max: f64, g| max.max(g.abs()));
                assert!(ours.iter().zip(&theirs).all(|(a, b)| (a - b).abs() <= bound * size), "{dtype:?}");
            }
        }
        let rank_3 = Tensor::zeros((2, 3, 4), DType::F32, &device)?;
        assert!(loss::cross_entropy(&rank_3, &Tensor::zeros((2, 4), DType::U32, &device)?).is_err());
        for negative in [-100, i64::MIN] {
            let targets = Tensor::new(&[negative, 0], &device)?;
            let logits = Var::zeros((2, 3), DType::F32, &device)?;
            match loss::cross_entropy(&logits, &targets) {
                Err(error) => assert!(device.is_cpu() && error.to_string().contains(&negative.to_string()), "{error}"),
                Ok(found) => {
                    assert!(!device.is_cpu() && values(&found)?[0].is_nan());
                    let grads = found.backward()?;
                    assert!(values(grads.get(&logits).expect("a gradient"))?[0].is_nan());
                }
            }
        }
    }
    Ok(())
}

#[test]
fn finite_differences() -> Result<()> {
    for device in devices() {
        for shape in [vec![4, 6], vec![2, 5, 3]] {
            let count = shape.iter().product();
            let logits = normal(count, 2.0, 12);
            for reduction in [Reduction::Mean, Reduction::Sum] {
                let case = Case { reduction, ..Case::new(&shape) }.with_everything();
                let var = Var::from_tensor(&tensor(&logits, shape.clone(), DType::F64, &device)?)?;
                let grads = case.loss(&var)?.backward()?;
                let found = values(grads.get(&var).expect("a gradient"))?;
                let loss = |logits: &[f64]| -> Result<f64> {
                    case.loss(&tensor(logits, shape.clone(), DType::F64, &device)?)?.to_scalar()
                };
                check_gradient(&found, &logits, &format!("{shape:?} {reduction:?}"), loss)?;
            }
        }
    }
    Ok(())
}

/// 70000 losses, one of which is far larger: a plain f32 sum would lose most of the others.
#[test]
fn means_are_summed_in_blocks() -> Result<()> {
    for device in devices() {
        let lines = 70_000;
        let logits: Vec<f64> = (0..lines).flat_map(|i| [0.0, if i == 0 { 3e6 } else { -1.0 }]).collect();
        let case = Case { targets: vec![0; lines], reduction: Reduction::Sum, ..Case::new(&[lines, 2]) };
        let found = case.loss(&tensor(&logits, (lines, 2), DType::F32, &device)?)?;
        let exact = 3e6 + (lines - 1) as f64 * (-1f64).exp().ln_1p();
        assert!((values(&found)?[0] - exact).abs() <= 3e-7 * exact);
    }
    Ok(())
}

#[test]
fn empty_batches() -> Result<()> {
    for device in devices() {
        for (shape, of_targets) in [(vec![0, 5], vec![0]), (vec![2, 5, 0], vec![2, 0]), (vec![0, 0], vec![0])] {
            let logits = Var::from_tensor(&Tensor::zeros(shape, DType::F32, &device)?)?;
            let targets = Tensor::zeros(of_targets.clone(), DType::U32, &device)?;
            for (reduction, smoothing) in REDUCTIONS.into_iter().flat_map(|of| [(of, 0.0), (of, 0.1)]) {
                let loss = CrossEntropy::new().z_loss(0.1).label_smoothing(smoothing).reduction(reduction);
                let found = loss.forward(&logits, &targets)?;
                assert!(found.track_op());
                match reduction {
                    Reduction::Mean => assert!(found.to_scalar::<f32>()?.is_nan()),
                    Reduction::Sum => assert_eq!(found.to_scalar::<f32>()?, 0.0),
                    Reduction::None => assert_eq!(found.dims(), of_targets),
                }
            }
        }
    }
    Ok(())
}

/// Weights of f32 beside any logits, and such as lie with others between them or with the logits.
#[test]
fn weights_of_another_dtype_or_layout() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            let case = Case { reduction: Reduction::None, ..Case::new(&[6, 40]) };
            let all = tensor(&normal(240, 3.0, 12), (6, 40), dtype, &device)?;
            let wide = tensor(&normal(80, 1.0, 13), (40, 2), DType::F32, &device)?.abs()?;
            let targets = Tensor::new(&case.targets[..], &device)?;
            for weights in [
                wide.narrow(1, 1, 1)?.squeeze(1)?,
                wide.narrow(0, 0, 1)?.narrow(1, 0, 1)?.reshape(1)?.expand(40)?,
                all.get(3)?.detach(),
            ] {
                let op = CrossEntropy::new().reduction(Reduction::None).weight(&weights);
                let found = values(&op.forward(&all, &targets)?)?;
                let (exact, _) = case.expected(&values(&all)?, Some(&values(&weights)?), &[0.0; 6]);
                for (found, exact) in found.into_iter().zip(exact) {
                    assert!(
                        (found - exact).abs() <= 4e-6 * (1.0 + exact.abs()),
                        "{device:?} {dtype:?}: {found} for {exact}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// A loss has no second derivative, which is an error and no gradient that lacks something.
#[test]
fn second_order_is_an_error() -> Result<()> {
    for device in devices() {
        let logits = Var::from_tensor(&tensor(&normal(20, 1.0, 14), (4, 5), DType::F32, &device)?)?;
        let loss = CrossEntropy::new().forward(&logits, &Tensor::zeros(4, DType::U32, &device)?)?;
        let gradient = loss.backward()?.get(&logits).expect("a gradient").clone();
        let message = gradient.sum_all()?.backward().expect_err("no second derivative").to_string();
        assert!(message.contains("cross-entropy-backward"), "{message}");
    }
    Ok(())
}

#[test]
fn errors_say_what_would_work() -> Result<()> {
    let device = Device::Cpu;
    let logits = Tensor::zeros((4, 5), DType::F32, &device)?;
    let targets = Tensor::zeros(4, DType::I64, &device)?;
    let expect = |result: Result<Tensor>, words: &[&str]| {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("cross-entropy") && words.iter().all(|word| message.contains(word)), "{message}");
    };
    let new = CrossEntropy::new;
    expect(new().forward(&logits, &Tensor::zeros(5, DType::I64, &device)?), &["[5]", "[4, 5]", "[4]"]);
    expect(new().forward(&logits, &Tensor::zeros((4, 1), DType::I64, &device)?), &["[4, 1]"]);
    expect(new().forward(&logits.get(0)?, &targets), &["[4]", "[5]", "[]"]);
    expect(new().forward(&Tensor::zeros((), DType::F32, &device)?, &targets), &["scalar"]);
    expect(new().forward(&logits, &targets.to_dtype(DType::F32)?), &["F32", "i64"]);
    expect(new().forward(&logits.to_dtype(DType::U32)?, &targets), &["U32"]);
    expect(new().forward(&Tensor::zeros((4, 0), DType::F32, &device)?, &targets), &["no classes", "[4, 0]"]);
    for share in [-0.1, 1.1, f64::NAN] {
        expect(new().label_smoothing(share).forward(&logits, &targets), &["smoothing"]);
    }
    expect(new().z_loss(f64::INFINITY).forward(&logits, &targets), &["z-loss"]);
    expect(new().z_loss(1e39).forward(&logits, &targets), &["z-loss", "F32"]);
    new().z_loss(1e39).forward(&logits.to_dtype(DType::F64)?, &targets)?;
    let weight = Tensor::ones(5, DType::F32, &device)?;
    expect(new().weight(&weight.narrow(0, 0, 4)?).forward(&logits, &targets), &["weight", "[4]", "[5]"]);
    let other = new().weight(&weight.to_dtype(DType::F64)?).forward(&logits, &targets);
    assert!(!other.as_ref().unwrap_err().to_string().contains("one of"));
    expect(other, &["weight", "F64", "F32"]);
    let tracked = Var::from_tensor(&weight)?;
    expect(new().weight(&tracked).forward(&logits, &targets), &["weight", "detach"]);
    new().weight(&weight).forward(&logits.to_dtype(DType::F16)?, &targets)?;
    expect(loss::cross_entropy(&logits.get(0)?, &targets), &["[5]", "(batch, classes)"]);
    Ok(())
}
