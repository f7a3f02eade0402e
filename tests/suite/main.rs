//! One body for every device: each test runs on the CPU and, with feature `cuda` and a GPU, on CUDA too. Everything is
//! judged against an f64 reference (`support::reference`) or an outside oracle, by the bounds in the README.
//!
//! `CANDLE_SOFTMAX_TEST_CAP=N` leaves out tensors of more than N elements, for slow checkers such as compute-sanitizer, and
//! `CANDLE_SOFTMAX_TEST_CASES=N` has property tests draw N times as many cases.

mod accuracy;
mod calls;
mod composed;
mod fused;
mod gradients;
mod graphs;
mod inplace;
mod large;
mod levels;
mod logsumexp;
mod loss;
mod properties;
mod seed_cases;
mod semantics;
mod shapes;
mod streams;
mod support;
mod threads;
mod topk;
