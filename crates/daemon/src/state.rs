//! `State`: all parts of a process that its control API and its metrics show and change.

use crate::model::snapshot::{DeviceInfo, Devices, Workers};
use crate::model::{ChangeSender, Entry, Registry};
use crate::processes::Processes;
use crate::service::Service;
use manyring_config::Plan;
use manyring_engine::Pool;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::watch;

/// The state that the control API shows and changes.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) pool: Arc<Pool>,
    pub(crate) devices: Registry,
    pub(crate) changes: ChangeSender,
    pub(crate) processes: Processes,
    pub(crate) service: Arc<Service>,
    /// The generation, and the plan that is carried out.
    pub(crate) shown: watch::Receiver<(u64, Arc<Plan>)>,
    /// The configuration file, if there is one.
    pub(crate) file: Option<PathBuf>,
    /// Locked from the reading of the file until its plan is carried out: no reload overtakes
    /// another one.
    pub(crate) reads: Arc<tokio::sync::Mutex<()>>,
    /// One configuration at a time is taken from a client.
    pub(crate) bodies: Arc<tokio::sync::Mutex<()>>,
}

impl State {
    /// A device as it is shown, with the device process that serves it at this moment.
    pub(crate) fn device(&self, entry: &Entry) -> DeviceInfo {
        let device = DeviceInfo::of(entry);
        let process = device.process.map(|process| self.processes.now_of(&device.name, process));
        DeviceInfo { process, ..device }
    }

    /// All devices as they are shown.
    pub(crate) fn devices(&self) -> Devices {
        Devices { devices: self.devices.all().iter().map(|entry| self.device(entry)).collect() }
    }

    /// The workers of this process and those of its device processes.
    pub(crate) fn workers(&self) -> Workers {
        let mut all = Workers::of(&self.pool);
        let processes = self.processes.workers();
        all.workers.extend(processes.workers);
        all.stuck.extend(processes.stuck);
        all
    }
}
