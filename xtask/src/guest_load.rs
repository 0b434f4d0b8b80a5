//! `cargo xtask guest-rr`: TCP requests and responses of real guests, with each way of polling.
//! `cargo xtask guest-reclaim`: small writes of real guests, with and without `reclaim`.

use crate::cargo::{build_bench, build_daemon, target};
use clap::Args;
use manyring_system::guest_load::Options;
use manyring_system::soak::fresh_logs;
use manyring_system::{Context, Outcome, check, guest_reclaim, guest_rr};
use std::time::Duration;

/// How to measure polling.
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

/// How to measure `reclaim`.
#[derive(Args, Debug)]
pub(crate) struct GuestReclaim {
    /// How often each load is measured without and with `reclaim`; they take turns.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds of each load; fractions are fine.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// The CPU of the guest.
    #[arg(long, value_name = "N", default_value_t = 0)]
    guest_cpu: usize,
    /// The CPU of the daemons' workers, and of the receivers at the host's end of the taps.
    #[arg(long, value_name = "N", default_value_t = 1)]
    daemon_cpu: usize,
}

/// Measures the release build, by the ways of polling.
pub(crate) fn rr(args: &GuestRr) -> Outcome {
    check(!args.connections.contains(&0), || "--connections must be more than 0".into())?;
    let cpus = (args.guest_cpu, args.daemon_cpu);
    guest_rr::run(&options("guest-rr", args.rounds, args.seconds, cpus)?, &args.connections)
}

/// Measures the release build, without and with `reclaim`.
pub(crate) fn reclaim(args: &GuestReclaim) -> Outcome {
    let cpus = (args.guest_cpu, args.daemon_cpu);
    guest_reclaim::run(&options("guest-reclaim", args.rounds, args.seconds, cpus)?)
}

/// Builds both programs, and makes the folder of the command's logs.
fn options(
    command: &str,
    rounds: usize,
    seconds: f64,
    (guest_cpu, daemon_cpu): (usize, usize),
) -> Outcome<Options> {
    let time = Duration::try_from_secs_f64(seconds).context("--seconds")?;
    check(!time.is_zero(), || "--seconds must be more than 0".into())?;
    check(rounds > 0, || "--rounds must be more than 0".into())?;
    println!("xtask: building manyring and manyring-bench");
    Ok(Options {
        daemon: build_daemon("release")?,
        bench: build_bench("release")?,
        rounds,
        time,
        guest_cpu,
        daemon_cpu,
        logs: fresh_logs(target()?.join(format!("{command}-logs")))?,
    })
}
