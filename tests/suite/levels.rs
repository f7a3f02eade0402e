//! The same suite with the vector instructions that other machines have.

use std::process::Command;

/// What is larger is the same code, and takes most of the time, …
const CAP: usize = 300_000;
/// … but for what is written past the caches, which the portable code does not do.
const PAST_THE_CACHES: &str = "many_megabytes";

/// `CANDLE_SOFTMAX_CPU` is read once in a process, so each level gets one of its own.
#[test]
fn every_level_of_instructions() {
    // Inside of such a process, or where a level is asked for anyway.
    if std::env::var_os("CANDLE_SOFTMAX_CPU").is_some() {
        return;
    }
    let modules = [
        "accuracy::",
        "fused::",
        "gradients::",
        "inplace::",
        "logsumexp::",
        "loss::",
        "properties::",
        "seed_cases::",
        "semantics::",
        "topk::",
    ];
    // What takes long and is the code of shorter lines, candle's, or the same for all
    let skipped = [
        PAST_THE_CACHES,
        "sixteen_million",
        "a_million",
        "few_lines_that_a_gpu_shares",
        "the_composed_form",
        "gradients_of_what_is_shared",
    ];
    let skip = skipped.into_iter().flat_map(|test| ["--skip", test]);
    let arguments: Vec<_> = modules.into_iter().chain(skip).collect();
    for level in ["portable", "avx2"] {
        let text = run(level, CAP, &arguments);
        for module in modules {
            assert!(
                text.lines().any(|line| line.starts_with(&format!("test {module}"))),
                "nothing of {module}:\n{text}"
            );
        }
    }
    let text = run("avx2", usize::MAX, &[PAST_THE_CACHES]);
    assert!(text.contains(PAST_THE_CACHES), "nothing of {PAST_THE_CACHES}:\n{text}");
}

/// What the suite says with such a level and tensors of up to so many elements; fails unless it passes.
fn run(level: &str, cap: usize, arguments: &[&str]) -> String {
    let suite = std::env::current_exe().expect("the test knows where it is");
    let environment = [("CANDLE_SOFTMAX_CPU", level), ("CANDLE_SOFTMAX_TEST_CAP", &cap.to_string())];
    let output = Command::new(suite).args(arguments).envs(environment).output().expect("the suite starts again");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "with CANDLE_SOFTMAX_CPU={level}:\n{text}");
    text
}
