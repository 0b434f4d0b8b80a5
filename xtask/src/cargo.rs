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
    // So is what it says of our package. Build scripts watch these variables (ring's does): a
    // child that had them would build ring, and all that needs it, anew after a `cargo build`.
    for (name, _) in std::env::vars_os() {
        let told = name.to_string_lossy();
        if told.starts_with("CARGO_PKG_") || told.starts_with("CARGO_MANIFEST_") {
            command.env_remove(name);
        }
    }
    command
}

/// Runs a command whose output the user sees.
pub(crate) fn see(command: &mut Command) -> Outcome {
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
    let name = format!("{} {}", command.get_program().to_string_lossy(), words.join(" "));
    let status = command.stdin(Stdio::null()).status().context(&name)?;
    check(status.success(), || format!("{name}: {status}"))
}

/// Runs a command whose output nobody sees.
pub(crate) fn quiet(command: &mut Command) -> Outcome {
    see(command.stdout(Stdio::null()).stderr(Stdio::null()))
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
    build("manyring-daemon", "manyring", profile)
}

/// Builds `manyring-bench`, the load of guests, and says where it is.
pub(crate) fn build_bench(profile: &str) -> Outcome<PathBuf> {
    build("manyring-bench", "manyring-bench", profile)
}

fn build(package: &str, program: &str, profile: &str) -> Outcome<PathBuf> {
    see(&mut cargo(&["build", "--package", package, "--profile", profile]))?;
    let folder = if profile == "dev" { "debug" } else { profile };
    Ok(target()?.join(folder).join(program))
}

/// Runs `cargo test` with arguments, shows what it says, and counts.
pub(crate) fn test(command: &mut Command) -> Outcome<Totals> {
    // What cargo says of the test programs is read, whatever the user's settings are.
    command.env("CARGO_TERM_COLOR", "never").env("CARGO_TERM_QUIET", "false");
    // One pipe for both: cargo names a test program before the program names its tests.
    let (reader, writer) = std::io::pipe().context("a pipe")?;
    let errors = writer.try_clone().context("a pipe")?;
    let spawned = command.stdin(Stdio::null()).stdout(writer).stderr(errors).spawn();
    // The command holds the pipe's other end until it is told to hold something else.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = spawned.context("cargo")?;
    let mut programs = Programs::default();
    for line in BufReader::new(reader).split(b'\n') {
        let line = line.context("cargo test")?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        programs.hear(&line);
    }
    let status = child.wait().context("cargo test")?;
    Ok(programs.end(status.success()))
}

/// What the test programs of one `cargo test` have said.
#[derive(Debug, Default)]
struct Programs {
    totals: Totals,
    /// How many have begun.
    begun: u64,
    /// The one that has not ended.
    running: Option<String>,
}

impl Programs {
    fn hear(&mut self, line: &str) {
        if let Some(name) = program(line) {
            self.give_up();
            self.begun += 1;
            self.running = Some(name);
        } else if let Some((passed, failed)) = parse_result(line) {
            self.running = None;
            self.totals.passed += passed;
            self.totals.failed += failed;
        } else if let Some(name) = parse_failure(line) {
            let program = self.running.as_deref().unwrap_or("?");
            self.totals.names.push(format!("{program}::{name}"));
        }
    }

    /// A program that has died has given no result.
    fn give_up(&mut self) {
        if let Some(name) = self.running.take() {
            self.totals.fail(&name, "ended without a result");
        }
    }

    fn end(mut self, success: bool) -> Totals {
        self.give_up();
        if self.begun == 0 {
            self.totals.fail("cargo test", "no test program was run");
        } else if !success && self.totals.failed == 0 {
            self.totals.fail("cargo test", "it failed, and no test of it");
        }
        self.totals
    }
}

/// `     Running tests/plan.rs (target/debug/deps/plan-0123456789abcdef)`, or `   Doc-tests NAME`:
/// the program's name without its number.
fn program(line: &str) -> Option<String> {
    if let Some(name) = line.trim_start().strip_prefix("Doc-tests ") {
        return Some(format!("Doc-tests {name}"));
    }
    let (_, path) = line.trim_start().strip_prefix("Running ")?.split_once(" (")?;
    let file = path.strip_suffix(')')?.rsplit('/').next()?;
    Some(file.rsplit_once('-').map_or(file, |(name, _)| name).to_owned())
}

/// `test result: ok. 3 passed; 0 failed; 0 ignored; ..`: how many passed and how many failed. An
/// ignored test is a promise that is not checked: it fails.
fn parse_result(line: &str) -> Option<(u64, u64)> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |name: &str| -> Option<u64> {
        let part = counts.split("; ").find_map(|part| part.strip_suffix(name))?;
        part.trim().parse().ok()
    };
    Some((count(" passed")?, count(" failed")? + count(" ignored")?))
}

/// `test NAME ... FAILED` or `test NAME ... ignored, WHY`: the name.
fn parse_failure(line: &str) -> Option<&str> {
    let (name, how) = line.strip_prefix("test ")?.split_once(" ... ")?;
    (how == "FAILED" || how.starts_with("ignored")).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(said: &str, success: bool) -> Totals {
        let mut programs = Programs::default();
        said.lines().for_each(|line| programs.hear(line));
        programs.end(success)
    }

    #[test]
    fn a_child_of_cargo_is_told_nothing_of_our_package() {
        let child = cargo(&["build"]);
        let is_removed = |name: &str| child.get_envs().any(|(n, v)| n == name && v.is_none());
        assert!(is_removed("CARGO_PKG_NAME") && is_removed("CARGO_MANIFEST_DIR"));
    }

    #[test]
    fn results_of_cargo_test_are_counted_and_ignored_tests_fail() {
        let line = "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(parse_result(line), Some((12, 0)));
        let line = "test result: FAILED. 1 passed; 2 failed; 3 ignored; 0 measured";
        assert_eq!(parse_result(line), Some((1, 5)));
        assert_eq!(parse_result("running 3 tests"), None);
    }

    const SAID: &str = "   Compiling manyring-daemon v0.1.0 (/a/crates/daemon)
     Running unittests src/lib.rs (target/debug/deps/manyring_daemon-0123456789abcdef)
running 2 tests
test plan::one ... ok
test plan::two ... FAILED
failures:
    plan::two
test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out
     Running tests/few_fds.rs (/t/deps/few_fds-0123456789abcdef)
test a_guest_waits ... ignored, too slow
test result: ok. 0 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out
     Running tests/idle.rs (/t/deps/idle-0123456789abcdef)
running 1 test
     Running tests/net.rs (/t/deps/net-0123456789abcdef)
test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out";

    #[test]
    fn tests_that_failed_are_named_with_their_program_and_so_is_a_program_that_died() {
        let names = [
            "manyring_daemon::plan::two",
            "few_fds::a_guest_waits",
            "idle: ended without a result",
        ];
        let names = names.map(str::to_owned).to_vec();
        assert_eq!(totals(SAID, false), Totals { passed: 5, failed: 3, names });
    }

    #[test]
    fn the_last_program_may_die_too_and_nothing_run_is_nothing_passed() {
        let running = "     Running tests/net.rs (/t/deps/net-0123456789abcdef)";
        assert_eq!(totals(running, false).names, ["net: ended without a result"]);
        assert_eq!(totals("error: could not compile", false).failed, 1);
        assert_eq!(totals("", true).failed, 1);
        let ended = "   Doc-tests manyring_wire\ntest result: ok. 2 passed; 0 failed; 0 ignored";
        assert_eq!(totals(ended, true), Totals { passed: 2, ..Totals::default() });
        assert_eq!(totals(ended, false).names, ["cargo test: it failed, and no test of it"]);
    }
}
