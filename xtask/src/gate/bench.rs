//! Every bench runs once, so that none is broken when it is needed; instruction counts are judged.

use super::counts;
use crate::cargo::{build_daemon, cargo, see};
use manyring_system::{Outcome, packages};

/// One file per scenario in the bench crate.
const SCENARIOS: [&str; 7] =
    ["null-blk", "file-blk", "null-net", "tap-small", "tap-stream", "tcp-rr", "neighbours"];
/// What they start.
const PACKAGES: [&str; 6] =
    ["valgrind", "qemu-system-common", "fio", "dpdk-dev", "iperf3", "iproute2"];

/// Judges the counts, then runs every scenario for a moment; no figure of these is judged.
pub(crate) fn smoke() -> Outcome {
    packages::need("the benches", &PACKAGES)?;
    counts::judge()?;
    build_daemon("dev")?;
    for scenario in SCENARIOS {
        see(&mut cargo(&["run", "--quiet", "-p", "manyring-bench", "--", scenario, "--smoke"]))?;
    }
    Ok(())
}

/// Counts, and writes what was counted as the baselines.
pub(crate) fn renew() -> Outcome {
    packages::need("the benches that count", &PACKAGES[..1])?;
    counts::renew()
}
