//! `cargo xtask guest-rr`: TCP requests and responses of real guests, with each way of polling.

use crate::cargo::{build_bench, build_daemon, target};
use clap::Args;
use manyring_system::guest_rr::{self, Options};
use manyring_system::soak::fresh_logs;
use manyring_system::{Context, Outcome, check};
use std::time::Duration;

/// What to measure.
#[derive(Args, Debug)]
pub(crate) struct GuestRr {
    /// How often each mode is measured; they take turns.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds of each load; fractions are fine.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Connections of each load.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,32,100")]
    connections: Vec<usize>,
    /// The CPU of the guest, and of the server at the host's end of the tap.
    #[arg(long, value_name = "N", default_value_t = 0)]
    guest_cpu: usize,
    /// The CPU of the daemon's worker.
    #[arg(long, value_name = "N", default_value_t = 1)]
    daemon_cpu: usize,
}

/// Measures the release build.
pub(crate) fn run(args: GuestRr) -> Outcome {
    let time = Duration::try_from_secs_f64(args.seconds).context("--seconds")?;
    check(!time.is_zero(), || "--seconds must be more than 0".into())?;
    check(args.rounds > 0, || "--rounds must be more than 0".into())?;
    check(!args.connections.contains(&0), || "--connections must be more than 0".into())?;
    println!("xtask: building manyring and manyring-bench");
    let logs = fresh_logs(target()?.join("guest-rr-logs"))?;
    guest_rr::run(&Options {
        daemon: build_daemon("release")?,
        bench: build_bench("release")?,
        rounds: args.rounds,
        time,
        connections: args.connections,
        guest_cpu: args.guest_cpu,
        daemon_cpu: args.daemon_cpu,
        logs,
    })
}
