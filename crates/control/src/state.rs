//! `State`: the parts of the daemon that its control API and its metrics show and change.

use crate::snapshot::{DeviceInfo, Devices};
use manyring_config::Plan;
use manyring_engine::Pool;
use manyring_serve::service::Service;
use manyring_serve::worker_view::Workers;
use manyring_supervisor::model::{ChangeSender, Entry, Registry};
use manyring_supervisor::processes::Processes;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::watch;

/// The state that the control API shows and changes.
#[derive(Clone, Debug)]
pub struct State {
    /// The pool of this process's worker threads.
    pub pool: Arc<Pool>,
    /// The devices that are served, and the devices that wait for a resource.
    pub devices: Registry,
    /// Sends changes of the devices to the supervisor.
    pub changes: ChangeSender,
    /// The device processes that the supervisor runs.
    pub processes: Processes,
    /// The service manager, if there is one.
    pub service: Arc<Service>,
    /// The running plan, and its generation: the number of changes that were carried out.
    pub shown: watch::Receiver<(u64, Arc<Plan>)>,
    /// The configuration file, if there is one.
    pub file: Option<PathBuf>,
    /// Locked by a reload from the reading of the file until its plan is carried out. Otherwise an
    /// older reading of the file could be carried out after a newer one.
    pub reads: Arc<tokio::sync::Mutex<()>>,
    /// Locked while a `PUT /v1/config` receives its body and carries it out: only one large body is
    /// in memory at a time.
    pub bodies: Arc<tokio::sync::Mutex<()>>,
}

impl State {
    /// Returns the API's answer for one device, with the device process that serves it now.
    pub(crate) fn device(&self, entry: &Entry) -> DeviceInfo {
        let device = DeviceInfo::of(entry);
        let process = device.process.map(|process| self.processes.now_of(&device.name, process));
        DeviceInfo { process, ..device }
    }

    /// Returns the API's answer for all devices.
    pub(crate) fn devices(&self) -> Devices {
        Devices { devices: self.devices.all().iter().map(|entry| self.device(entry)).collect() }
    }

    /// Returns the workers of this process and those of its device processes.
    pub(crate) fn workers(&self) -> Workers {
        let mut all = Workers::of(&self.pool);
        let processes = self.processes.workers();
        all.workers.extend(processes.workers);
        all.stuck.extend(processes.stuck);
        all
    }
}
