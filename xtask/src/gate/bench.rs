//! Every bench runs once, so that none is broken when it is needed; instruction counts are judged.

use super::counts;
use crate::cargo::{build_bench, build_beside_tests, build_daemon, see};
use manyring_system::{Outcome, packages};
use std::path::PathBuf;
use std::process::Command;

/// The packages of programs that the benches start.
const PACKAGES: [&str; 12] = [
    "valgrind",
    "qemu-system-common",
    "fio",
    "nbdkit",
    "dpdk-dev",
    "iperf3",
    "iproute2",
    "user-mode-linux",
    "qemu-system-x86",
    "busybox-static",
    "gcc",
    "binutils",
];

/// Judges the counts, then runs every scenario of the bench's own table for a moment; no figure of
/// these is judged. A scenario or a peer that is left out fails.
pub(crate) fn smoke() -> Outcome {
    smoke_of(|| Ok((build_daemon("dev")?, build_bench("dev")?)))
}

/// As [`smoke`], with the programs that the tests of the workspace had. Others would have to be
/// built: crates have other features where they are built alone.
pub(super) fn smoke_beside_tests() -> Outcome {
    smoke_of(build_beside_tests)
}

/// `build` gives the daemon and the bench, which starts the daemon that lies beside it.
fn smoke_of(build: fn() -> Outcome<(PathBuf, PathBuf)>) -> Outcome {
    packages::need("the benches", &PACKAGES)?;
    counts::judge()?;
    let (_, bench) = build()?;
    see(Command::new(bench).args(["run", "all", "--smoke"]))
}

/// Counts, and writes what was counted as the baselines.
pub(crate) fn renew() -> Outcome {
    packages::need("the benches that count", &PACKAGES[..1])?;
    counts::renew()
}
