//! What is called around softmax, by kind, with what is exact from candle's ops in f64 on the same device: for tests of how calls are
//! made, captured in a graph, on a stream, or of more elements than 32 bits count.

use crate::fused::Case;
use crate::shapes::{assert_near, random, random_targets, rounding, wide};
use crate::support::{devices, normal, tensor, DTYPES};
use crate::topk;
use candle_core::{DType, Error, Result, Tensor, Var};
use candle_softmax::loss::{CrossEntropy, Reduction};
use candle_softmax::{ops, testing};

/// How many of the greatest
const K: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    LogSoftmax,
    /// With scale, bias and mask; causal and with sinks where keys are last of three dimensions or more.
    Builder,
    /// The same with dropout, …
    Dropout,
    /// … or with gradients of bias and sinks
    Beside,
    LogSumExp,
    /// Along dimension 1
    CrossEntropy,
    MeanCrossEntropy,
    /// Along the last dimension
    TopK,
}

impl Kind {
    pub const ALL: [Kind; 8] = [
        Kind::LogSoftmax,
        Kind::Builder,
        Kind::Dropout,
        Kind::Beside,
        Kind::LogSumExp,
        Kind::CrossEntropy,
        Kind::MeanCrossEntropy,
        Kind::TopK,
    ];
    /// Those that take any dimension, cross-entropy of which 1
    pub const ANY_DIM: [Kind; 6] =
        [Kind::LogSoftmax, Kind::Builder, Kind::Dropout, Kind::Beside, Kind::LogSumExp, Kind::CrossEntropy];
}

/// In f64: the result and what it may be off by, and each gradient and the size of what it is the sum of.
struct Exact {
    result: Tensor,
    bound: Tensor,
    gradients: Vec<(Tensor, Tensor)>,
}

/// A call of which there is everything but the result.
pub struct Call {
    kind: Kind,
    /// What is around softmax, and the logits of all kinds
    case: Case,
    /// Of the losses
    targets: Tensor,
}

impl Call {
    /// Of `logits`, written to which it is a call of other logits; of those of a variable, which its gradient is of.
    pub fn new(kind: Kind, dim: usize, logits: &Var) -> Result<Self> {
        let (dims, device) = (logits.dims(), logits.device());
        let (len, last) = (dims[dim], dim + 1 == dims.len());
        // One for all of the first dimension
        let shared = [&[1], &dims[1..]].concat();
        let mut case = Case::new(logits.as_tensor().clone());
        case.dim = dim;
        if let Kind::Builder | Kind::Dropout | Kind::Beside = kind {
            let beside = |shape: &[usize]| -> Result<_> {
                let xs = Var::from_tensor(&random(shape, 0, 1.0, logits.dtype(), device)?)?;
                Ok(Some(if kind == Kind::Beside { xs.as_tensor().clone() } else { xs.detach() }))
            };
            case.scale = 0.5;
            case.bias = beside(&shared)?;
            case.mask = Some(random(&shared, 0, 1.0, DType::F32, device)?.gt(-1f32)?);
            case.dropout = (kind == Kind::Dropout).then_some((0.3, 5));
            if last && dims.len() > 2 {
                case.causal = true;
                case.sinks = beside(&dims[dims.len() - 3..dims.len() - 2])?;
            }
        }
        let mut lines = dims.to_vec();
        lines.remove(dim);
        let targets = random_targets(&lines, len, device)?;
        Ok(Self { kind, case, targets })
    }

    /// The result, the gradient of the sum of its squares, also of bias and sinks if they are variables, and the places of the greatest.
    pub fn found(&self) -> Result<Vec<Tensor>> {
        let Case { scores, dim, .. } = &self.case;
        let loss = |reduction| CrossEntropy::new().reduction(reduction).forward(scores, &self.targets);
        let mut places = None;
        let found = match self.kind {
            Kind::LogSoftmax => ops::log_softmax(scores, *dim)?,
            Kind::Builder | Kind::Dropout | Kind::Beside => self.case.builder().forward(scores)?,
            Kind::LogSumExp => ops::logsumexp(scores, *dim)?,
            Kind::CrossEntropy => loss(Reduction::None)?,
            Kind::MeanCrossEntropy => loss(Reduction::Mean)?.unsqueeze(0)?,
            Kind::TopK => {
                let (weights, of_weights) = ops::topk_softmax(scores, K, false)?;
                places = Some(of_weights);
                weights
            }
        };
        let gradients = found.sqr()?.backward()?;
        let gradient = gradients.get(scores).expect("a gradient").clone();
        let beside = [&self.case.bias, &self.case.sinks].map(|of| gradients.get(of.as_ref()?).cloned());
        Ok([found.detach(), gradient].into_iter().chain(beside.into_iter().flatten()).chain(places).collect())
    }

    /// Whether what [`found`](Self::found) has given is right.
    pub fn check(&self, found: &[Tensor]) -> Result<()> {
        let xs = &self.case.scores;
        let what = format!("{:?} along {} of {:?} of {:?}", self.kind, self.case.dim, xs.shape(), xs.dtype());
        let (unit, least) = rounding(xs.dtype());
        let x = wide(&xs.detach())?;
        let Exact { result, bound, gradients } = match self.kind {
            Kind::Builder | Kind::Dropout | Kind::Beside => self.builder(&x, unit, least)?,
            Kind::TopK => {
                topk::check_places(&xs.detach(), &found[2])?;
                self.of_log_p(&x, unit, least, Some(&found[2]))?
            }
            _ => self.of_log_p(&x, unit, least, None)?,
        };
        assert_near(&found[0], &result, &bound, &what)?;
        for (i, (gradient, size)) in gradients.iter().enumerate() {
            let bound = (size + gradient.abs()?)?.affine(8.0 * unit, 8.0 * least)?;
            assert_near(&found[1 + i], gradient, &bound, &format!("gradient {i} of {what}"))?;
        }
        Ok(())
    }

    fn builder(&self, x: &Tensor, unit: f64, least: f64) -> Result<Exact> {
        let exact = self.case.in_f64()?;
        let var = |xs: &Option<Tensor>| xs.as_ref().map(|xs| Var::from_tensor(&xs.detach())).transpose();
        let tensor = |var: &Option<Var>| var.as_ref().map(|var| var.as_tensor().clone());
        let (var, bias, sinks) = (Var::from_tensor(x)?, var(&exact.bias)?, var(&exact.sinks)?);
        let exact = Case { bias: tensor(&bias), sinks: tensor(&sinks), ..exact };
        let result = testing::composed(&exact.builder(), &var)?;
        let grads = result.sqr()?.backward()?;
        let result = result.detach();
        // Dropout may have made more of what is kept.
        let p = testing::composed(&Case { dropout: None, ..exact }.builder(), x)?.detach();
        let g = (&result * 4.0)?;
        let size = (&p * g.broadcast_add(&(&p * &g)?.sum_keepdim(self.case.dim)?)?)?;
        let of = |var: &Var| grads.get(var).expect("a gradient").clone();
        let mut gradients = vec![(of(&var), size.clone())];
        if self.kind == Kind::Beside {
            gradients.extend(bias.map(|bias| Ok::<_, Error>((of(&bias), size.sum_keepdim(0)?))).transpose()?);
            // Of one sign are all that they are the sum of.
            gradients.extend(sinks.map(|sinks| Ok::<_, Error>((of(&sinks), of(&sinks).abs()?))).transpose()?);
        }
        Ok(Exact { bound: result.affine(2.0 * unit, least)?, result, gradients })
    }

    fn of_log_p(&self, x: &Tensor, unit: f64, least: f64, places: Option<&Tensor>) -> Result<Exact> {
        let dim = self.case.dim;
        let log_p = candle_nn::ops::log_softmax(x, dim)?;
        let p = log_p.exp()?;
        let times_sum = |g: &Tensor| p.broadcast_mul(&g.sum_keepdim(dim)?);
        let (result, bound, gradient, size) = match self.kind {
            Kind::Builder | Kind::Dropout | Kind::Beside => unreachable!("it is more than log p"),
            Kind::LogSoftmax => {
                let (g, bound) = ((&log_p * 2.0)?, log_p.abs()?.affine(unit, least + unit.min(3e-6))?);
                (log_p.clone(), bound, (&g - times_sum(&g)?)?, (g.abs()? + times_sum(&g.abs()?)?)?)
            }
            Kind::LogSumExp => {
                let sum = x.log_sum_exp(dim)?;
                let gradient = p.broadcast_mul(&(sum.unsqueeze(dim)? * 2.0)?)?;
                (sum.clone(), sum.abs()?.affine(unit, unit)?, gradient.clone(), gradient.abs()?)
            }
            Kind::CrossEntropy | Kind::MeanCrossEntropy => {
                let targets = self.targets.unsqueeze(1)?.contiguous()?;
                let mut losses = log_p.gather(&targets, 1)?.squeeze(1)?.neg()?;
                let mut of_each = (&losses * 2.0)?.unsqueeze(1)?;
                if self.kind == Kind::MeanCrossEntropy {
                    losses = losses.mean_all()?.unsqueeze(0)?;
                    let of_mean = (&losses * (2.0 / targets.elem_count() as f64))?;
                    of_each = of_mean.broadcast_as(targets.elem_count())?.reshape(targets.shape())?;
                }
                let hit = p.zeros_like()?.scatter_add(&targets, &wide(&targets.ones_like()?)?, 1)?;
                let gradient = (&p - &hit)?.broadcast_mul(&of_each)?;
                (losses.clone(), losses.affine(5e-6, 5e-6)?, gradient, (&p + &hit)?.broadcast_mul(&of_each)?)
            }
            Kind::TopK => {
                let places = places.expect("the greatest have places");
                let weights = p.gather(places, dim)?;
                let g = p.zeros_like()?.scatter_add(places, &(&weights * 2.0)?, dim)?;
                let (g, sums) = ((&p * &g)?, times_sum(&(&p * &g)?)?);
                (weights.clone(), weights.affine(unit, least)?, (&g - &sums)?, (g + sums)?)
            }
        };
        Ok(Exact { result, bound, gradients: vec![(gradient, size)] })
    }

    /// Whether the gradient of the bias is the sum of the scores' gradients over the first dimension, with which it does not vary.
    pub fn check_bias(&self, found: &[Tensor]) -> Result<()> {
        let (of_scores, of_bias) = (&found[1], &found[2]);
        let mut sums = [of_bias.zeros_like()?.to_dtype(DType::F64)?, of_bias.zeros_like()?.to_dtype(DType::F64)?];
        for start in (0..of_scores.dim(0)?).step_by(16) {
            let part = of_scores.narrow(0, start, 16.min(of_scores.dim(0)? - start))?;
            let part = (wide(&part)? / self.case.scale)?;
            sums = [(&sums[0] + part.sum_keepdim(0)?)?, (&sums[1] + part.abs()?.sum_keepdim(0)?)?];
        }
        let (unit, least) = rounding(of_scores.dtype());
        assert_near(of_bias, &sums[0], &sums[1].affine(unit, least)?, &format!("bias of {:?}", of_scores.shape()))
    }

    /// Whether those `count` from `start` on of a dimension of the logits are right, along which they do not depend on each other: what
    /// is dropped out only does not from 0 on.
    pub fn check_part(&self, found: &[Tensor], dim: usize, start: usize, count: usize) -> Result<()> {
        let scores = &self.case.scores;
        let rank = scores.rank();
        let part = |of: &Tensor| match of.rank() < rank && dim > self.case.dim {
            true => of.narrow(dim - 1, start, count),
            false => of.narrow(dim, start, count),
        };
        let part_if_any = |of: &Option<Tensor>| match of {
            Some(of) if of.dim(dim)? > 1 => part(of).map(Some),
            of => Ok(of.clone()),
        };
        let sinks = match &self.case.sinks {
            Some(sinks) if dim + 3 == rank => Some(sinks.narrow(0, start, count)?),
            sinks => sinks.clone(),
        };
        let (bias, mask) = (part_if_any(&self.case.bias)?, part_if_any(&self.case.mask)?);
        let case = Case { scores: part(&scores.detach())?, bias, mask, sinks, ..self.case.clone() };
        let found = found.iter().map(part).collect::<Result<Vec<_>>>()?;
        Self { kind: self.kind, case, targets: part(&self.targets)? }.check(&found)
    }
}

#[test]
fn each_and_parts_of_it() -> Result<()> {
    for (shape, dim, kinds) in [
        (vec![6, 40], 1, &Kind::ALL[..]),
        (vec![4, 3, 5, 9], 3, &[Kind::Builder, Kind::Dropout, Kind::Beside]),
        (vec![3, 30, 8], 1, &Kind::ANY_DIM),
    ] {
        for (device, dtype) in devices().iter().flat_map(|device| DTYPES.map(|dtype| (device, dtype))) {
            for &kind in kinds {
                let xs = tensor(&normal(shape.iter().product(), 3.0, 1), shape.as_slice(), dtype, device)?;
                let call = Call::new(kind, dim, &Var::from_tensor(&xs)?)?;
                let found = call.found()?;
                call.check(&found)?;
                if kind == Kind::Beside {
                    call.check_bias(&found)?;
                }
                if !matches!(kind, Kind::Dropout | Kind::Beside | Kind::MeanCrossEntropy) {
                    call.check_part(&found, 0, 1, 2)?;
                }
            }
        }
    }
    Ok(())
}
