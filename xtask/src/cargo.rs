//! cargo as a child: builds, tests, and where things are.

use manyring_system::command::output;
use manyring_system::runner::Totals;
use manyring_system::{Context, Outcome, check};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The workspace.
pub(crate) const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// cargo with arguments; by its name, so that `+toolchain` and rustup work as in a shell.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    // Set for us by the cargo that runs us; a child's toolchain is its own choice.
    command.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").args(arguments);
    command
}

/// Runs a command whose output the user sees.
pub(crate) fn see(command: &mut Command) -> Outcome {
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
    let name = format!("{} {}", command.get_program().to_string_lossy(), words.join(" "));
    let status = command.stdin(Stdio::null()).status().context(&name)?;
    check(status.success(), || format!("{name}: {status}"))
}

/// Where cargo builds.
pub(crate) fn target() -> Outcome<PathBuf> {
    let metadata = output(&mut cargo(&["metadata", "--no-deps", "--format-version", "1"]))?;
    let json: serde_json::Value = serde_json::from_slice(&metadata).context("cargo metadata")?;
    let path = json.get("target_directory").and_then(|path| path.as_str());
    Ok(PathBuf::from(path.ok_or("cargo metadata: no target_directory")?))
}

/// Builds the daemon and says where it is.
pub(crate) fn build_daemon(profile: &str) -> Outcome<PathBuf> {
    see(&mut cargo(&["build", "--package", "manyring-daemon", "--profile", profile]))?;
    let folder = if profile == "dev" { "debug" } else { profile };
    Ok(target()?.join(folder).join("manyring"))
}

/// Runs `cargo test` with arguments, shows what it says, and counts.
pub(crate) fn test(command: &mut Command) -> Outcome<Totals> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cargo")?;
    let mut totals = Totals::default();
    let mut suites = 0;
    if let Some(out) = child.stdout.take() {
        for line in BufReader::new(out).lines() {
            let line = line.context("cargo test")?;
            println!("{line}");
            if let Some(suite) = parse_result(&line) {
                totals.add(suite);
                suites += 1;
            }
        }
    }
    let status = child.wait().context("cargo test")?;
    // What does not compile, or dies, has no line of its own.
    if !status.success() && totals.failed == 0 || suites == 0 {
        totals.count(false);
    }
    Ok(totals)
}

/// `test result: ok. 3 passed; 0 failed; 0 ignored; ..`
fn parse_result(line: &str) -> Option<Totals> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |name: &str| {
        let part = counts.split("; ").find_map(|part| part.strip_suffix(name))?;
        part.trim().parse().ok()
    };
    // An ignored test is a promise that is not checked: it fails.
    let (passed, failed, ignored): (u64, u64, u64) =
        (count(" passed")?, count(" failed")?, count(" ignored")?);
    Some(Totals { passed, failed: failed + ignored })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_cargo_test_are_counted_and_ignored_tests_fail() {
        let line = "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(parse_result(line), Some(Totals { passed: 12, failed: 0 }));
        let line = "test result: FAILED. 1 passed; 2 failed; 3 ignored; 0 measured";
        assert_eq!(parse_result(line), Some(Totals { passed: 1, failed: 5 }));
        assert_eq!(parse_result("running 3 tests"), None);
    }
}
