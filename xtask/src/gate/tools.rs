//! cargo's own extensions: installed once, through cargo, outside the tree.

use crate::cargo::{cargo, see};
use manyring_system::command::{output, text};
use manyring_system::guest::cache;
use manyring_system::{Context, Outcome};
use std::ffi::OsString;
use std::process::Command;

/// The search path with our tools in front.
pub(super) fn path() -> Outcome<OsString> {
    let ours = cache()?.join("tools/bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let all = std::iter::once(ours).chain(std::env::split_paths(&path));
    std::env::join_paths(all).context("PATH")
}

/// Makes sure that `cargo NAME` works. A debug build: built in half the time, and quick enough.
pub(super) fn need(name: &str, version: &str) -> Outcome {
    if output(cargo(&[name, "--version"]).env("PATH", path()?)).is_ok() {
        return Ok(());
    }
    let (package, cache) = (format!("cargo-{name}"), cache()?);
    println!("xtask: installing {package} {version} into {}", cache.join("tools").display());
    let mut install = cargo(&["install", "--locked", "--debug", &package, "--version", version]);
    install.arg("--root").arg(cache.join("tools"));
    see(install.arg("--target-dir").arg(cache.join("tools-build")))
}

/// Makes sure that the nightly toolchain is there.
pub(super) fn need_nightly() -> Outcome {
    let toolchains = text(Command::new("rustup").args(["toolchain", "list"]))?;
    if toolchains.lines().any(|line| line.starts_with("nightly")) {
        return Ok(());
    }
    println!("xtask: installing the nightly toolchain, for fuzzing");
    let install = ["toolchain", "install", "nightly", "--profile", "minimal"];
    see(Command::new("rustup").args(install))
}
