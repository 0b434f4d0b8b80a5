//! Every bench runs once, so that none is broken when it is needed; no figure is judged here.

use crate::cargo::{build_daemon, cargo, see};
use manyring_system::{Outcome, packages};

/// One file per scenario in the bench crate.
const SCENARIOS: [&str; 6] =
    ["null-blk", "file-blk", "null-net", "tap-small", "tap-stream", "tcp-rr"];
/// What they start.
const PACKAGES: [&str; 6] =
    ["valgrind", "qemu-system-common", "fio", "dpdk-dev", "iperf3", "iproute2"];

pub(crate) fn smoke() -> Outcome {
    packages::need("the benches", &PACKAGES)?;
    see(&mut cargo(&["bench", "-p", "manyring-queue", "--bench", "ring", "--", "--callgrind"]))?;
    build_daemon("dev")?;
    for scenario in SCENARIOS {
        see(&mut cargo(&["run", "--quiet", "-p", "manyring-bench", "--", scenario, "--smoke"]))?;
    }
    Ok(())
}
