//! Every door of fuzz/ is knocked at for its share of the time.

use super::tools;
use crate::cargo::{cargo, see};
use manyring_system::guest::cache;
use manyring_system::{Context, Outcome, check, packages};
use std::path::Path;

/// Seconds for all targets together in the gate.
pub(crate) const SMOKE_SECONDS: u64 = 240;

pub(crate) fn smoke(seconds: u64) -> Outcome {
    let manifest = std::fs::read_to_string("fuzz/Cargo.toml").context("fuzz/Cargo.toml")?;
    let targets = targets(&manifest)?;
    check(!targets.is_empty(), || "fuzz/Cargo.toml: no target".into())?;
    packages::need("fuzzing", &["g++"])?;
    tools::need_nightly()?;
    tools::need("fuzz", "0.13.2")?;
    let cache = cache()?.join("fuzz");
    fuzz(&["build"], &cache, &[])?;
    let share = (seconds / targets.len() as u64).max(1);
    println!("xtask: {} targets, {share} s each: {}", targets.len(), targets.join(", "));
    let mut failures = Vec::new();
    for target in &targets {
        let corpus = cache.join("corpus").join(target);
        std::fs::create_dir_all(&corpus).context(corpus.display())?;
        let mut inputs = vec![corpus.display().to_string()];
        let seeds = format!("fuzz/seeds/{target}");
        if Path::new(&seeds).is_dir() {
            inputs.push(seeds);
        }
        inputs.extend(["--".to_owned(), format!("-max_total_time={share}")]);
        // One input may not hang, and what is found in a minute needs no gigabytes.
        inputs.extend(["-timeout=10", "-rss_limit_mb=2048"].map(str::to_owned));
        // A finding is shown whole, progress is not: the number of inputs says enough.
        inputs
            .extend(["-verbosity=0", "-print_funcs=0", "-print_final_stats=1"].map(str::to_owned));
        if let Err(sentence) = fuzz(&["run", target], &cache, &inputs) {
            println!("xtask: {sentence}");
            failures.push(target.as_str());
        }
    }
    check(failures.is_empty(), || format!("fuzzing failed: {}", failures.join(", ")))
}

fn fuzz(arguments: &[&str], cache: &Path, inputs: &[String]) -> Outcome {
    let mut command = cargo(&["+nightly", "fuzz"]);
    let (subcommand, rest) = arguments.split_first().ok_or("no fuzz subcommand")?;
    command.arg(subcommand).arg("--target-dir").arg(cache.join("target"));
    see(command.args(rest).args(inputs).env("PATH", tools::path()?))
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
}
