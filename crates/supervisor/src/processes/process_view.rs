//! The state of device processes, as the API shows it: workers, domains and processes.

use super::process::DeviceProcess;
use super::{Processes, Serving};
use manyring_config::plan::ANY_USER;
use manyring_serve::worker_view::Workers;
use serde::Serialize;
use std::sync::Arc;

/// A device process, as `GET /v1/processes` shows it.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ProcessInfo {
    /// The trust domain whose devices the process serves.
    pub process: String,
    /// `starting`, `serving`, `ending`, `stuck` (it was killed, and the kernel does not end it) or
    /// `ended` (it is started with the next connection).
    pub state: &'static str,
    /// The process id; 0 while there is no process.
    pub(crate) pid: u32,
    pub(crate) devices: Vec<String>,
    /// Number of processes that were started for this domain.
    pub starts: u64,
    /// Number of messages that the present process has sent to the daemon.
    pub(crate) reports: u64,
    /// True if the device process has answered the daemon's last request for counters in time.
    pub answers: bool,
    /// Resident memory of the process in bytes; 0 while there is no process.
    pub resident_bytes: u64,
    /// CPU time of the process in nanoseconds; 0 while there is no process.
    pub cpu_ns: u64,
}

impl Processes {
    /// Returns the workers of all running device processes, as each process has last reported them.
    pub fn workers(&self) -> Workers {
        let processes: Vec<_> = self.lock().values().map(|kept| kept.process.clone()).collect();
        let mut all = Workers::default();
        for process in processes.iter().filter(|process| process.pid() != 0) {
            let Workers { workers, stuck } = process.threads();
            all.workers.extend(workers);
            all.stuck.extend(stuck);
        }
        all
    }

    /// Returns the domain of a device. For `ANY_USER`, where the user who connects decides the
    /// domain, this is the domain of the device process that has the device now, if there is one.
    pub fn now_of(&self, device: &str, domain: String) -> String {
        if domain != ANY_USER {
            return domain;
        }
        let kept = self.lock();
        let found = kept.iter().find(|(_, kept)| kept.process.has(device));
        found.map_or(domain, |(name, _)| name.clone())
    }

    /// Collects the state of every device process for the API. Reads /proc, so it must not run on
    /// the control thread.
    pub fn all(&self) -> Vec<ProcessInfo> {
        let of = |kept: &Serving| (kept.process.clone(), kept.starts);
        let all: Vec<_> = self.lock().values().map(of).collect();
        let info = |(process, starts): (Arc<DeviceProcess>, u64)| {
            // Read /proc without holding the lock, which the control thread takes.
            let used = process.threads.used();
            ProcessInfo {
                process: process.name().to_owned(),
                state: process.state().name(),
                pid: process.pid(),
                devices: process.devices(),
                starts,
                reports: process.reports(),
                answers: process.answers(),
                resident_bytes: used.resident_bytes,
                cpu_ns: used.cpu_ns,
            }
        };
        all.into_iter().map(info).collect()
    }
}
