//! The state of device processes, as the API shows it: workers, domains and processes.

use super::process::DeviceProcess;
use super::{Processes, Serving};
use manyring_config::plan::ANY_USER;
use manyring_serve::workers::Workers;
use serde::Serialize;
use std::sync::Arc;

/// `GET /v1/processes`
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ProcessInfo {
    /// The trust domain that it serves.
    pub process: String,
    /// `starting`, `serving`, `ending`, `stuck` (it was killed, and the kernel does not end it) or
    /// `ended` (it is started with the next connection).
    pub state: &'static str,
    /// 0 while there is no process.
    pub(crate) pid: u32,
    pub(crate) devices: Vec<String>,
    /// How often a process of this domain was started.
    pub starts: u64,
    /// Messages of the present process to the daemon.
    pub(crate) reports: u64,
    /// The device process has answered the last question.
    pub answers: bool,
    /// Bytes of memory that its process uses; 0 while there is no process.
    pub resident_bytes: u64,
    /// Nanoseconds of CPU time that its process has used; 0 while there is no process.
    pub cpu_ns: u64,
}

impl Processes {
    /// The workers of all device processes that run, from the last report of each.
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

    /// The domain of a device. If each user who connects is a domain (`ANY_USER`): the domain of
    /// the device process that has the device, if there is one.
    pub fn now_of(&self, device: &str, domain: String) -> String {
        if domain != ANY_USER {
            return domain;
        }
        let kept = self.lock();
        let found = kept.iter().find(|(_, kept)| kept.process.has(device));
        found.map_or(domain, |(name, _)| name.clone())
    }

    /// The state of every device process, as the API shows it. Never on the control thread.
    pub fn all(&self) -> Vec<ProcessInfo> {
        let of = |kept: &Serving| (kept.process.clone(), kept.starts);
        let all: Vec<_> = self.lock().values().map(of).collect();
        let info = |(process, starts): (Arc<DeviceProcess>, u64)| {
            // Read from /proc, so without the lock, which the control thread takes.
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
