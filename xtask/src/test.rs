//! `cargo xtask test`: every test there is, and their totals on one line.

use crate::beside::Busy;
use crate::cargo::{self, build_bench, build_beside_tests, build_daemon};
use crate::programs;
use manyring_system::behaviours::ALL;
use manyring_system::runner::{self, Totals};
use manyring_system::{Outcome, check, packages};

/// Runs the tests `times` times, or until one fails, beside `beside` busy threads.
pub(crate) fn run(only: Option<&str>, beside: usize, times: usize) -> Outcome {
    let _busy = Busy::start(beside)?;
    for time in 1..=times.max(1) {
        let mut totals = all(only)?;
        if only.is_none() {
            totals.add(programs::examples()?);
        }
        if times > 1 {
            println!("\nrun {time} of {times}");
        }
        println!("\n{}", totals.report());
        check(totals.failed == 0, || "not every test passed".into())?;
    }
    Ok(())
}

/// The packages that the tests of network ports use beside the kernel.
const PORT_TESTS: [&str; 3] = ["ethtool", "iproute2", "tshark"];

/// The test programs of the workspace (unless only some system tests are wanted), then the system
/// tests.
pub(crate) fn all(only: Option<&str>) -> Outcome<Totals> {
    let mut totals = Totals::default();
    if only.is_none() {
        packages::need("the tests of network ports", &PORT_TESTS)?;
        totals.add(programs::workspace()?);
    }
    let wanted = |name: &str| only.is_none_or(|only| name.contains(only));
    let chosen: Vec<_> = ALL.iter().copied().filter(|behaviour| wanted(behaviour.name)).collect();
    check(!chosen.is_empty(), || format!("no system test's name holds {only:?}"))?;
    println!("\nrunning {} system tests", chosen.len());
    let logs = cargo::target()?.join("system-logs");
    let (daemon, bench) = match only {
        Some(_) => (build_daemon("dev")?, build_bench("dev")?),
        None => build_beside_tests()?,
    };
    totals.add(runner::run(&chosen, daemon, bench, &logs)?);
    Ok(totals)
}
