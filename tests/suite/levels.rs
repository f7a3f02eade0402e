//! The same suite with the vector instructions that other machines have.

use candle_softmax::testing;
use std::process::Command;

/// Those that are asked for, where there are any, are the ones that are used.
#[test]
fn the_level_is_the_one_that_is_asked_for() {
    let levels = testing::cpu_levels();
    let asked = std::env::var("CANDLE_SOFTMAX_CPU").unwrap_or_default();
    let expected = levels.iter().find(|&&level| level == asked).or(levels.last());
    assert_eq!(Some(&testing::cpu_level()), expected);
}

/// `CANDLE_SOFTMAX_CPU` is read once in a process, so each level gets one of its own.
#[test]
fn every_level_of_instructions() {
    // Inside of such a process, or where a level is asked for anyway.
    if std::env::var_os("CANDLE_SOFTMAX_CPU").is_some() {
        return;
    }
    let suite = std::env::current_exe().expect("the test knows where it is");
    // The best one is what all other tests run with.
    for level in testing::cpu_levels().into_iter().rev().skip(1) {
        let modules = [
            "accuracy::",
            "fused::",
            "gradients::",
            "inplace::",
            "levels::the_level",
            "logsumexp::",
            "loss::",
            "properties::",
            "seed_cases::",
            "semantics::",
            "topk::",
        ];
        // What takes long and is the code of shorter lines, candle's, or the same for all
        let mut skipped = vec![
            "sixteen_million",
            "a_million",
            "few_lines_that_a_gpu_shares",
            "the_composed_form",
            "gradients_of_what_is_shared",
        ];
        if level == "portable" {
            // Nothing is written past the caches there.
            skipped.push("many_megabytes");
        }
        let skipped = skipped.into_iter().flat_map(|test| ["--skip", test]);
        let output = Command::new(&suite).args(modules).args(skipped).env("CANDLE_SOFTMAX_CPU", level).output();
        let output = output.expect("the suite starts again");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "with CANDLE_SOFTMAX_CPU={level}:\n{text}");
        for module in modules {
            assert!(
                text.lines().any(|line| line.starts_with(&format!("test {module}"))),
                "nothing of {module}:\n{text}"
            );
        }
    }
}
