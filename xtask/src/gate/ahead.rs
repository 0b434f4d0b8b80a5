//! Builds the programs of the gate's later steps while the tests run, because the tests wait most
//! of the time: for a guest's boot, for a reconnect.

use super::{counts, fuzz, loom_tests};
use crate::cargo::{beside_tests, quiet};
use manyring_system::Outcome;
use std::thread::JoinHandle;

/// How far the builds stand back behind the tests: as far as the scheduler allows.
const NICENESS: i32 = 19;

/// Builds on a thread of its own.
#[derive(Debug)]
pub(super) struct Ahead(JoinHandle<()>);

impl Ahead {
    /// Begins to build.
    pub(super) fn start() -> Self {
        Self(std::thread::spawn(|| {
            // The value belongs to the calling thread alone, and what it starts inherits it. If
            // it cannot be set, the builds only take more time from the tests.
            let _ = rustix::process::nice(NICENESS);
            for build in [loom, fuzz::build, counts::build, programs] {
                // The step that needs it builds again what fails here, and shows the reason.
                if build().is_err() {
                    println!("xtask: a build beside the tests failed; its step shows why");
                }
            }
        }))
    }

    /// Waits until everything is built.
    pub(super) fn finish(self) {
        // A panic of the builder was printed by it, and its steps do its work.
        let _ = self.0.join();
    }
}

/// What the system tests start.
fn programs() -> Outcome {
    quiet(&mut beside_tests())
}

fn loom() -> Outcome {
    quiet(loom_tests()?.arg("--no-run"))
}
