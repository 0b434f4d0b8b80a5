//! cargo as a child: builds, tests, and where things are.

use manyring_system::command::output;
use manyring_system::{Context, Outcome, check, watch};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The workspace.
pub(crate) const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// How long a build, or another program that is seen, may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(1800);

/// cargo with arguments; by its name, so that `+toolchain` and rustup work as in a shell.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    // Set for us by the cargo that runs us; a child's toolchain is its own choice.
    command.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").args(arguments);
    forget_our_package(&mut command);
    command
}

/// Takes from a child's environment what the cargo that runs us says of our package. Build scripts
/// watch these variables (ring's does): a cargo that had them would build ring, and all that needs
/// it, anew after a `cargo build`.
pub(crate) fn forget_our_package(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if is_of_our_package(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
}

/// Whether cargo tells a program of its own package by this variable.
fn is_of_our_package(variable: &str) -> bool {
    variable.starts_with("CARGO_PKG_") || variable.starts_with("CARGO_MANIFEST_")
}

/// Runs a command whose output the user sees.
pub(crate) fn see(command: &mut Command) -> Outcome {
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
    let name = format!("{} {}", command.get_program().to_string_lossy(), words.join(" "));
    let run = || command.stdin(Stdio::null()).status().context(&name);
    let status = watch::within(&name, LIMIT, run)?;
    check(status.success(), || format!("{name}: {status}"))
}

/// Runs a command whose output nobody sees.
pub(crate) fn quiet(command: &mut Command) -> Outcome {
    see(command.stdout(Stdio::null()).stderr(Stdio::null()))
}

/// Where cargo builds.
pub(crate) fn target() -> Outcome<PathBuf> {
    let mut metadata = cargo(&["metadata", "--no-deps", "--format-version", "1"]);
    let metadata = watch::within("cargo metadata", LIMIT, || output(&mut metadata))?;
    let json: serde_json::Value = serde_json::from_slice(&metadata).context("cargo metadata")?;
    let path = json.get("target_directory").and_then(|path| path.as_str());
    Ok(PathBuf::from(path.ok_or("cargo metadata: no target_directory")?))
}

/// Builds the daemon and says where it is.
pub(crate) fn build_daemon(profile: &str) -> Outcome<PathBuf> {
    build("manyring", "manyring", profile)
}

/// Builds `manyring-bench`, the load of guests, and says where it is.
pub(crate) fn build_bench(profile: &str) -> Outcome<PathBuf> {
    build("manyring-bench", "manyring-bench", profile)
}

/// Builds the daemon and `manyring-bench` with the features that the workspace's tests have, and
/// says where they are: so cargo takes all crates as it built them for those tests.
pub(crate) fn build_beside_tests() -> Outcome<(PathBuf, PathBuf)> {
    see(&mut beside_tests())?;
    let folder = target()?.join("debug");
    Ok((folder.join("manyring"), folder.join("manyring-bench")))
}

/// cargo for [`build_beside_tests`].
pub(crate) fn beside_tests() -> Command {
    let programs = ["--bin", "manyring", "--bin", "manyring-bench"];
    cargo(&[&["build", "--workspace", "--tests"][..], &programs].concat())
}

fn build(package: &str, program: &str, profile: &str) -> Outcome<PathBuf> {
    see(&mut cargo(&["build", "--package", package, "--profile", profile]))?;
    let folder = if profile == "dev" { "debug" } else { profile };
    Ok(target()?.join(folder).join(program))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_of_cargo_is_told_nothing_of_our_package() {
        assert!(is_of_our_package("CARGO_PKG_NAME") && is_of_our_package("CARGO_MANIFEST_DIR"));
        assert!(!is_of_our_package("CARGO_TARGET_DIR"));
        // Whoever runs this test has told it this one, and cargo others too.
        assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
        let child = cargo(&["build"]);
        let is_removed = |name: &str| child.get_envs().any(|(n, v)| n == name && v.is_none());
        assert!(is_removed("CARGO_MANIFEST_DIR"));
    }
}
