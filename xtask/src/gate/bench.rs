//! Every bench runs once, so that none is broken when it is needed; instruction counts are judged.

use super::counts;
use crate::cargo::{build_daemon, cargo, see};
use manyring_system::{Outcome, packages};

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
    packages::need("the benches", &PACKAGES)?;
    counts::judge()?;
    build_daemon("dev")?;
    see(&mut cargo(&["run", "--quiet", "-p", "manyring-bench", "--", "run", "all", "--smoke"]))
}

/// Counts, and writes what was counted as the baselines.
pub(crate) fn renew() -> Outcome {
    packages::need("the benches that count", &PACKAGES[..1])?;
    counts::renew()
}
