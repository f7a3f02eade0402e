//! Softmax for [Candle](https://github.com/huggingface/candle): accurate in every dtype, trainable, on CPU and CUDA.
//!
//! Call [`ops::softmax`], [`ops::softmax_last_dim`] or [`ops::log_softmax`] in place of candle-nn's functions of the same
//! names, or apply one of the three ops that spell out how it is done:
//!
//! | op | passes over a line | one line is worked on by |
//! |---|---|---|
//! | [`SafeSoftmax`] | maximum, sum, result | one thread |
//! | [`OnlineSoftmax`] | maximum and sum together, result | one thread |
//! | [`ReduceSoftmax`] | parts of both, merged; result | one CUDA block, or all CPU threads |
//!
//! ```
//! use candle_core::{Device, Tensor, D};
//! use candle_softmax::{ops, ReduceSoftmax};
//!
//! let scores = Tensor::new(&[[0f32, 1., 2.], [3., 4., 5.]], &Device::Cpu)?;
//! let p = ops::softmax(&scores, D::Minus1)?;
//! let q = scores.apply_op1(ReduceSoftmax)?;
//! assert_eq!(p.to_vec2::<f32>()?, q.to_vec2::<f32>()?);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! [`Softmax`] builds one with what models put around it, in the same pass: scale, softcap, bias, mask, causal and local windows, sinks,
//! dropout, log and another output dtype. Beside softmax there are [`ops::logsumexp`], [`ops::topk_softmax`] and the
//! cross-entropy of [`loss`].
//!
//! All three ops are schedules of one small algebra, the state (m, d) of a set of numbers: its maximum m and Σ exp(x − m).
#![warn(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]

mod builder;
mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod fused;
mod fused_op;
mod lines;
pub mod loss;
mod loss_of_lines;
mod online;
mod op;
pub mod ops;
mod reduce;
mod safe;
mod state;
mod statistics;
mod sums;
#[doc(hidden)]
pub mod testing;
mod top_k;

pub use builder::Softmax;
pub use fused::MaskedRows;
pub use online::OnlineSoftmax;
pub use ops::{log_softmax, softmax, softmax_inplace, softmax_last_dim};
pub use reduce::ReduceSoftmax;
pub use safe::SafeSoftmax;

/// The programs in README.md, which are tested as those in this documentation are.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
