//! The same suite with the vector instructions that other machines have.

use std::process::Command;

/// `CANDLE_SOFTMAX_CPU` is read once in a process, so each level gets one of its own.
#[test]
fn every_level_of_instructions() {
    // Inside of such a process, or where a level is asked for anyway.
    if std::env::var_os("CANDLE_SOFTMAX_CPU").is_some() {
        return;
    }
    let suite = std::env::current_exe().expect("the test knows where it is");
    for level in ["portable", "avx2"] {
        let tests = ["accuracy::", "semantics::", "seed_cases::", "inplace::", "gradients::", "fused::"];
        let skipped = ["--skip", "sixteen_million", "--skip", "a_million"];
        let output = Command::new(&suite).args(tests).args(skipped).env("CANDLE_SOFTMAX_CPU", level).output();
        let output = output.expect("the suite starts again");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "with CANDLE_SOFTMAX_CPU={level}:\n{text}");
        assert!(text.contains(" passed"), "{text}");
    }
}
