//! `cargo xtask soak`: hostile guests beside well-behaved ones on one daemon, for minutes or hours;
//! or daemons that are killed under a guest.

use crate::cargo::{build_daemon, target};
use manyring_system::soak::{self, Kills, Options, Store};
use manyring_system::{Context, Outcome, check};
use std::time::{Duration, SystemTime};

/// The format of a guest's rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Ring {
    Split,
    Packed,
}

/// Soaks the release build. Without a seed the clock gives one.
pub(crate) fn run(minutes: f64, seed: Option<u64>, tricks: Option<String>) -> Outcome {
    let time = Duration::try_from_secs_f64(minutes * 60.0).context("--minutes")?;
    check(!time.is_zero(), || "--minutes must be more than 0".into())?;
    println!("xtask: building manyring");
    let binary = build_daemon("release")?;
    let logs = soak::fresh_logs(target()?.join("soak-logs"))?;
    println!("xtask: the logs of daemon and guests lie in {}", logs.display());
    let tricks = tricks.unwrap_or_default();
    let seed = seed.unwrap_or_else(seed_of_the_clock);
    soak::run(&Options { binary, time, seed, tricks, logs, promise: Options::PROMISE })
}

/// Kills the daemon `count` times under a guest that compares what it reads. The debug build also
/// checks itself.
pub(crate) fn kill(count: u32, ring: Ring, seed: Option<u64>) -> Outcome {
    soak::run_kills(&kills(count, ring, seed)?)
}

/// The server of the guest's disk that is killed in the daemon's place.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Server {
    /// nbdkit and qemu-nbd, in turn.
    Nbd,
    /// nbdkit.
    Nbdkit,
    /// qemu-nbd.
    QemuNbd,
    /// The OSD of a Ceph cluster, behind qemu-storage-daemon.
    Ceph,
}

/// Kills what serves the guest's disk, `count` times.
pub(crate) fn kill_servers(server: Server, count: u32, seed: Option<u64>) -> Outcome {
    let store = match server {
        Server::Nbd => Store::Nbd,
        Server::Nbdkit => Store::Nbdkit,
        Server::QemuNbd => Store::QemuNbd,
        Server::Ceph => Store::Ceph,
    };
    soak::run_store_kills(&kills(count, Ring::Split, seed)?, store)
}

/// The processes that are ended again and again under guests in device processes.
#[derive(Debug, clap::Args)]
#[group(multiple = false, conflicts_with_all = ["minutes", "tricks", "kill"])]
pub(crate) struct Processes {
    /// Kill device processes this often under a guest of User Mode Linux and one of QEMU.
    #[arg(long, value_name = "N")]
    processes: Option<u32>,
    /// Kill the daemon and its device processes this often under a guest of QEMU.
    #[arg(long, value_name = "N")]
    supervisor: Option<u32>,
    /// Have the next daemon take over this often; then have the next daemon, or the one that runs,
    /// die at each step of a takeover.
    #[arg(long, value_name = "N")]
    takeovers: Option<u32>,
    /// Have a guest of the newest QEMU migrate this often between two daemons; in each move a
    /// device process of one of them is killed.
    #[arg(long, value_name = "N")]
    migrations: Option<u32>,
}

impl Processes {
    pub(crate) fn is_asked(&self) -> bool {
        self.processes.or(self.supervisor).or(self.takeovers).or(self.migrations).is_some()
    }
}

/// Ends device processes, or daemons, under guests that compare what they read.
pub(crate) fn processes(
    processes: &Processes,
    systemd: bool,
    ring: Ring,
    seed: Option<u64>,
    profile: &str,
) -> Outcome {
    let kills = |count, logs| {
        let kills = kills_with_logs(profile, count, logs)?;
        Ok::<_, String>(with(kills, ring, seed))
    };
    match (processes.processes, processes.supervisor, processes.takeovers) {
        (Some(count), ..) => soak::run_device_processes(&kills(count, "soak-device processes")?),
        (_, Some(count), _) if systemd => {
            soak::run_supervisor_of_systemd(&kills(count, "soak-systemd")?)
        }
        (_, Some(count), _) => soak::run_supervisor(&kills(count, "soak-supervisor")?),
        _ if processes.migrations.is_some() => {
            let count = processes.migrations.unwrap_or_default();
            soak::run_migrations(&kills(count, "soak-migrations")?)
        }
        (.., takeovers) => {
            let count = takeovers.unwrap_or_default();
            soak::run_takeovers(&kills(count, "soak-takeovers")?)
        }
    }
}

fn kills(count: u32, ring: Ring, seed: Option<u64>) -> Outcome<Kills> {
    Ok(with(kills_with_logs("dev", count, "soak-logs")?, ring, seed))
}

fn with(kills: Kills, ring: Ring, seed: Option<u64>) -> Kills {
    let seed = seed.unwrap_or_else(seed_of_the_clock);
    Kills { is_packed: ring == Ring::Packed, seed, ..kills }
}

/// The logs lie in a folder of this name below `target`, so that soaks of other kinds can run
/// beside this one.
fn kills_with_logs(profile: &str, count: u32, logs: &str) -> Outcome<Kills> {
    println!("xtask: building manyring");
    let built = build_daemon(profile)?;
    let logs = soak::fresh_logs(target()?.join(logs))?;
    println!("xtask: the logs of daemon and guest lie in {}", logs.display());
    // All daemons are started from one copy, even if the build changes while they run.
    let binary = logs.join("manyring");
    std::fs::copy(&built, &binary).context(binary.display())?;
    Ok(Kills { binary, count, seed: 0, is_packed: false, logs })
}

fn seed_of_the_clock() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.as_secs() % 1_000_000
}
