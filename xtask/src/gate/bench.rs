//! Every bench runs once, so that none is broken when it is needed; no figure is judged here.

use crate::cargo::{build_daemon, cargo, see};
use manyring_system::{Outcome, packages};

/// One file per scenario in the bench crate.
const SCENARIOS: [&str; 2] = ["null-blk", "file-blk"];

pub(crate) fn smoke() -> Outcome {
    packages::need("the benches", &["valgrind", "qemu-system-common", "fio"])?;
    see(&mut cargo(&["bench", "-p", "manyring-queue", "--bench", "ring", "--", "--callgrind"]))?;
    build_daemon("dev")?;
    for scenario in SCENARIOS {
        see(&mut cargo(&["run", "--quiet", "-p", "manyring-bench", "--", scenario, "--smoke"]))?;
    }
    Ok(())
}
