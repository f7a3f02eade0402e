//! The same functions out of candle's own tensor ops: what runs on Metal, and what the kernels are tested beside.
//!
//! Half precision is widened to f32 first, so that the sums are f32 sums; every step is an op that candle tracks.

use candle_core::{DType, Result, Tensor};

fn widened(xs: &Tensor) -> Result<Tensor> {
    match xs.dtype() {
        DType::F16 | DType::BF16 => xs.to_dtype(DType::F32),
        _ => Ok(xs.clone()),
    }
}

pub(crate) fn softmax(xs: &Tensor, dim: usize) -> Result<Tensor> {
    let wide = widened(xs)?;
    let exp = wide.broadcast_sub(&wide.max_keepdim(dim)?)?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(dim)?)?.to_dtype(xs.dtype())
}

pub(crate) fn log_softmax(xs: &Tensor, dim: usize) -> Result<Tensor> {
    let wide = widened(xs)?;
    let shifted = wide.broadcast_sub(&wide.max_keepdim(dim)?)?;
    let log_sum = shifted.exp()?.sum_keepdim(dim)?.log()?;
    shifted.broadcast_sub(&log_sum)?.to_dtype(xs.dtype())
}
