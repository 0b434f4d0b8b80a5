//! Every target of fuzz/ runs: for its share of a minute in the gate, for an hour alone.

use super::tools;
use crate::cargo::{cargo, quiet, see};
use manyring_system::guest::cache;
use manyring_system::{Context, Outcome, check, lanes, packages, watch};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Seconds that the gate spends on all targets together.
pub(crate) const SMOKE_SECONDS: u64 = 60;
/// Seconds for each target when fuzzing is not a part of the gate.
pub(crate) const LONG_SECONDS: u64 = 3600;

/// What a target may take beside its time: for its corpus, and to end.
const BESIDE: Duration = Duration::from_secs(600);

/// Targets that run at the same time.
const AT_ONCE: usize = 2;

/// Fuzzes every target; all of them together take about `seconds`.
pub(crate) fn smoke(seconds: u64) -> Outcome {
    let targets = all_targets()?;
    let share = share(seconds, targets.len() as u64);
    fuzz_targets(targets, share)
}

/// Fuzzes one target, or every target, for `seconds` each.
pub(crate) fn long(target: Option<&str>, seconds: u64) -> Outcome {
    fuzz_targets(chosen(all_targets()?, target)?, seconds.max(1))
}

/// Seconds for each of `targets` targets, so that all of them end after about `seconds`.
fn share(seconds: u64, targets: u64) -> u64 {
    (seconds / targets.div_ceil(AT_ONCE as u64).max(1)).max(1)
}

fn chosen(all: Vec<String>, target: Option<&str>) -> Outcome<Vec<String>> {
    let Some(target) = target else { return Ok(all) };
    check(all.iter().any(|name| name == target), || {
        format!("no target is named {target}; there are {}", all.join(", "))
    })?;
    Ok(vec![target.to_owned()])
}

fn all_targets() -> Outcome<Vec<String>> {
    let manifest = std::fs::read_to_string("fuzz/Cargo.toml").context("fuzz/Cargo.toml")?;
    let targets = targets(&manifest)?;
    check(!targets.is_empty(), || "fuzz/Cargo.toml: no target".into())?;
    Ok(targets)
}

/// How the run of one target ended, and everything that it printed.
struct Ended {
    target: String,
    text: String,
    outcome: Outcome,
}

/// Runs the targets, two at a time. Each one's output is shown in one piece when it has ended.
fn fuzz_targets(targets: Vec<String>, seconds: u64) -> Outcome {
    see(&mut built()?)?;
    let cache = cache()?.join("fuzz");
    println!("xtask: {} targets, {seconds} s each: {}", targets.len(), targets.join(", "));
    let mut failures = Vec::new();
    let work = |target: String| {
        let mut text = String::new();
        let outcome = fuzz(&target, &cache, seconds, &mut text);
        Ended { target, text, outcome }
    };
    lanes::each(targets, AT_ONCE, work, |ended| {
        println!("\n== fuzz {}\n{}", ended.target, ended.text.trim_end());
        if let Err(sentence) = ended.outcome {
            println!("xtask: {sentence}");
            failures.push(ended.target);
        }
    });
    check(failures.is_empty(), || format!("fuzzing failed: {}", failures.join(", ")))
}

/// Builds every target and shows nothing.
pub(super) fn build() -> Outcome {
    quiet(&mut built()?)
}

/// cargo that builds every target, with all that it needs.
fn built() -> Outcome<Command> {
    packages::need("fuzzing", &["g++"])?;
    tools::need_nightly()?;
    tools::need("fuzz", "0.13.2")?;
    let mut command = cargo(&["+nightly", "fuzz", "build", "--target-dir"]);
    command.arg(cache()?.join("fuzz/target")).env("PATH", tools::path()?);
    Ok(command)
}

/// Runs one target to its end; `text` becomes what it printed.
fn fuzz(target: &str, cache: &Path, seconds: u64, text: &mut String) -> Outcome {
    let corpus = cache.join("corpus").join(target);
    std::fs::create_dir_all(&corpus).context(corpus.display())?;
    let mut command = cargo(&["+nightly", "fuzz", "run", "--target-dir"]);
    command.arg(cache.join("target")).arg(target).arg(&corpus).env("PATH", tools::path()?);
    let seeds = format!("fuzz/seeds/{target}");
    if Path::new(&seeds).is_dir() {
        command.arg(seeds);
    }
    command.args(["--", &format!("-max_total_time={seconds}")]);
    // One input may not hang, and what is found in a minute needs no gigabytes.
    command.args(["-timeout=10", "-rss_limit_mb=2048"]);
    // A finding is shown whole, progress is not: the number of inputs says enough.
    command.args(["-verbosity=0", "-print_funcs=0", "-print_final_stats=1"]);
    let limit = Duration::from_secs(seconds) + BESIDE;
    let run = || command.stdin(Stdio::null()).output().context("cargo fuzz");
    let output = watch::within(&format!("fuzz {target}"), limit, run)?;
    for stream in [&output.stdout, &output.stderr] {
        text.push_str(&String::from_utf8_lossy(stream));
    }
    check(output.status.success(), || format!("cargo fuzz run {target}: {}", output.status))
}

/// The names of all `[[bin]]`.
fn targets(manifest: &str) -> Outcome<Vec<String>> {
    let manifest: toml::Table = manifest.parse().context("fuzz/Cargo.toml")?;
    let bins = manifest.get("bin").and_then(toml::Value::as_array).into_iter().flatten();
    let names = bins.filter_map(|bin| bin.get("name")?.as_str().map(str::to_owned));
    Ok(names.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_the_binaries_of_the_manifest() {
        let manifest = "[package]\nname = 'f'\n[[bin]]\nname = 'a'\n[[bin]]\nname = 'b'\n";
        assert_eq!(targets(manifest).unwrap(), ["a", "b"]);
        assert!(targets("[package]\nname = 'f'\n").unwrap().is_empty());
        assert!(targets("[[bin").is_err());
    }

    #[test]
    fn two_at_a_time_the_targets_end_when_the_seconds_are_over() {
        assert_eq!(share(240, 8), 60);
        assert_eq!(share(240, 9), 48);
        assert_eq!((share(240, 1), share(3, 8)), (240, 1));
    }

    #[test]
    fn a_target_that_is_none_is_refused_with_the_names_there_are() {
        let all = || vec!["a".to_owned(), "b".to_owned()];
        assert_eq!(chosen(all(), None).unwrap(), ["a", "b"]);
        assert_eq!(chosen(all(), Some("b")).unwrap(), ["b"]);
        let error = chosen(all(), Some("c")).unwrap_err();
        assert!(error.contains("named c") && error.contains("a, b"), "{error}");
    }
}
