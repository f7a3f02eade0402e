//! The same functions out of candle's own tensor ops: what runs on Metal, and what the kernels are tested beside.
//!
//! Half precision is widened to f32 first, so that the sums are f32 sums; every step is an op that candle tracks.

use crate::cpu::dropout_keeps;
use crate::fused::MaskedRows;
use crate::fused_op::FusedOp;
use crate::lines::Lines;
use crate::op::Output;
use candle_core::{DType, Device, Result, Tensor};

fn widened(xs: &Tensor) -> Result<Tensor> {
    match xs.dtype() {
        DType::F16 | DType::BF16 => xs.to_dtype(DType::F32),
        _ => Ok(xs.clone()),
    }
}

pub(crate) fn softmax(xs: &Tensor, dim: usize) -> Result<Tensor> {
    // candle has no maximum of nothing.
    if xs.elem_count() == 0 {
        return Ok(xs.clone());
    }
    let wide = widened(xs)?;
    let exp = wide.broadcast_sub(&wide.max_keepdim(dim)?)?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(dim)?)?.to_dtype(xs.dtype())
}

pub(crate) fn log_softmax(xs: &Tensor, dim: usize) -> Result<Tensor> {
    if xs.elem_count() == 0 {
        return Ok(xs.clone());
    }
    let wide = widened(xs)?;
    let shifted = wide.broadcast_sub(&wide.max_keepdim(dim)?)?;
    let log_sum = shifted.exp()?.sum_keepdim(dim)?.log()?;
    shifted.broadcast_sub(&log_sum)?.to_dtype(xs.dtype())
}

/// The builder's softmax, its options checked.
pub(crate) fn fused(op: &FusedOp, scores: &Tensor, bias: Option<&Tensor>, sinks: Option<&Tensor>) -> Result<Tensor> {
    let (options, dim, device) = (&op.options, op.dim, scores.device());
    if scores.elem_count() == 0 {
        return scores.to_dtype(op.out);
    }
    let mut z = widened(scores)?;
    let wide = z.dtype();
    let all = |x: f64| Tensor::full(x as f32, scores.shape(), device)?.to_dtype(wide);
    let (zero, none) = (all(0.0)?, all(f64::NEG_INFINITY)?);
    let mut kept_by = vec![];
    if let Some(mask) = &op.mask {
        kept_by.push(mask.broadcast_as(z.shape())?.ne(0u8)?);
    }
    if let Some(window) = options.window {
        let keys = z.dim(dim)?;
        let rows = (0..window.queries).flat_map(|query| {
            let (first, end) = window.keys(query, keys);
            (0..keys).map(move |key| u8::from((first..end).contains(&key)))
        });
        let seen = Tensor::from_iter(rows, device)?.reshape((window.queries, keys))?;
        kept_by.push(seen.broadcast_as(z.shape())?);
    }
    // First of all, too: of a NaN the gradient of what follows would be NaN.
    for kept in &kept_by {
        z = kept.where_cond(&z, &zero)?;
    }
    z = (z * options.scale)?;
    if let Some(cap) = options.softcap {
        z = ((z / cap)?.tanh()? * cap)?;
    }
    if let Some(bias) = bias {
        z = z.broadcast_add(&widened(bias)?)?;
    }
    for kept in &kept_by {
        z = kept.where_cond(&z, &none)?;
    }
    let takes_part = z.ne(&none)?;
    // The maximum is no part of the result, and so not of the gradient; 0 in place of −∞, which nothing is subtracted from.
    let mut max = z.detach().max_keepdim(dim)?;
    let sinks = match sinks {
        None => None,
        Some(sinks) => {
            let heads: Vec<usize> =
                (0..z.rank()).map(|d| if d + 3 == z.rank() { sinks.elem_count() } else { 1 }).collect();
            let sinks = widened(sinks)?.reshape(heads)?.broadcast_as(max.shape())?;
            max = max.maximum(&sinks.detach())?;
            Some(sinks)
        }
    };
    let max = max.ne(f64::NEG_INFINITY)?.where_cond(&max, &max.zeros_like()?)?;
    let shifted = z.broadcast_sub(&max)?;
    let exp = shifted.exp()?;
    let mut sum = exp.sum_keepdim(dim)?;
    if let Some(sinks) = &sinks {
        sum = (sum + sinks.broadcast_sub(&max)?.exp()?)?;
    }
    let empty = sum.eq(0f64)?;
    let sum = (&sum + empty.to_dtype(sum.dtype())?)?;
    let mut out = match options.output {
        Output::Probability => {
            let p = exp.broadcast_div(&sum)?;
            // A gradient that is no number does not count where an element takes no part.
            takes_part.where_cond(&p, &p.detach())?
        }
        Output::LogProbability => {
            let nan_or_none = (z.detach().broadcast_sub(&max)?.broadcast_sub(&sum.detach().log()?))?;
            takes_part.where_cond(&shifted.broadcast_sub(&sum.log()?)?, &nan_or_none)?
        }
    };
    if let Some(dropout) = options.dropout {
        let keep = dropout_keeps(dropout, Lines::new(z.shape(), dim));
        let keep = Tensor::from_vec(keep, z.shape(), &Device::Cpu)?.to_device(device)?;
        out = keep.where_cond(&(out * dropout.kept_scale())?, &zero)?;
    }
    if options.masked_rows == MaskedRows::Nan && sinks.is_none() {
        out = empty.broadcast_as(out.shape())?.where_cond(&all(f64::NAN)?, &out)?;
    }
    out.to_dtype(op.out)
}

/// With `dim` kept, of size 1.
pub(crate) fn logsumexp_keepdim(xs: &Tensor, dim: usize) -> Result<Tensor> {
    if xs.dims()[dim] == 0 {
        let mut dims = xs.dims().to_vec();
        dims[dim] = 1;
        return Tensor::full(f32::NEG_INFINITY, dims, xs.device())?.to_dtype(xs.dtype());
    }
    if xs.elem_count() == 0 {
        return xs.narrow(dim, 0, 1);
    }
    let wide = widened(xs)?;
    // What is subtracted has no part in the gradient; 0 in place of an infinity, which would make NaN.
    let max = wide.max_keepdim(dim)?.detach();
    let infinite = max.abs()?.eq(f64::INFINITY)?;
    let max = infinite.where_cond(&max.zeros_like()?, &max)?;
    (wide.broadcast_sub(&max)?.exp()?.sum_keepdim(dim)?.log()? + max)?.to_dtype(xs.dtype())
}
