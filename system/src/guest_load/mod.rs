//! The common parts of measurements of a real guest's TCP: the guest with its daemons (`rig`), the
//! CPU time of other programs (`others`), and the spread of the rounds (`spread`).

mod others;
mod rig;
mod spread;

pub(crate) use others::{least_disturbed, write_disturbed};
pub(crate) use rig::{Load, Moved, Party, Rig, Setup, Stream};
pub(crate) use spread::{Spread, ratio};

#[cfg(test)]
pub(crate) use rig::Polling;

use std::path::PathBuf;
use std::time::Duration;

/// How to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// The daemon.
    pub daemon: PathBuf,
    /// `manyring-bench`, which is the client and the server.
    pub bench: PathBuf,
    /// How often each load is measured with each way to start the daemon.
    pub rounds: usize,
    /// How long each load lasts.
    pub time: Duration,
    /// The CPU of the guest.
    pub guest_cpu: usize,
    /// The CPU of the daemon's worker.
    pub daemon_cpu: usize,
    /// Where the logs of daemons and guests go; the folder is there.
    pub logs: PathBuf,
}

/// Of a load that is not counted: the guest touches its memory for the first time.
pub(crate) const WARM_UP: Duration = Duration::from_millis(500);

/// The host, for people: its processor, its CPUs, its kernel.
pub(crate) fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("an unnamed processor", |(_, name)| name.trim());
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = rustix::system::uname();
    format!("{model}, {cpus} CPUs, Linux {}", kernel.release().to_string_lossy())
}
