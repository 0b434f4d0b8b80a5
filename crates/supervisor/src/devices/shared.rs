//! `Shared`: the parts of the process that all devices share.

use super::process_arguments;
use crate::model::{Entry, Registry};
use crate::processes::{Handoff, Measuring, Processes};
use manyring_config::plan::{DaemonPlan, DevicePlan, Domains, Place, Plan, Wanted};
use manyring_engine::Pool;
use manyring_serve::assemble::{
    AdoptedExports, AdoptedFds, Assemble, AssembleError, Host, Made, Opened, Switches, free, served,
};
use manyring_serve::limits::Groups;
use manyring_serve::service::{Service, Whose};
use manyring_transport::vhost_user::Endpoint;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The parts of the process that all devices share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) processes: Processes,
    pub(super) domains: Domains,
    pub(super) pool: Arc<Pool>,
    pub(super) devices: Registry,
    pub(super) groups: Groups,
    pub(super) service: Arc<Service>,
    pub(super) host: Host,
    /// Seconds to wait for what another process holds; `None`: for ever.
    pub(super) wait: Option<u32>,
    /// A device that fails while the process runs costs no other one, and is tried again.
    pub(super) keeps_on: bool,
    /// Calls of the host that changes may be waiting for: those that do not come back stay.
    pub(super) calls: Arc<Semaphore>,
}

/// Calls of the host on behalf of changes that have not come back. A host that does not answer
/// keeps a thread for each, and callers of the control API must not collect threads without end.
const CALLS_MAX: usize = 16;

impl Shared {
    /// The parts for the devices of `plan`. What the process before this one has opened is taken
    /// out of `handoff`.
    ///
    /// # Errors
    /// A control socket cannot have its name, or a switch cannot be made.
    pub(super) fn new(
        plan: &Plan,
        pool: Arc<Pool>,
        service: Arc<Service>,
        handoff: &mut Handoff,
    ) -> Result<Self, AssembleError> {
        controls_are_free(&plan.daemon, &service)?;
        let groups = Groups::default();
        groups.follow(&plan.limit);
        let adopted_fds = AdoptedFds::new(std::mem::take(&mut handoff.opened));
        let switches = Switches::new(&plan.switch, plan.daemon.domains, &adopted_fds)?;
        let arguments = process_arguments(&plan.daemon);
        let processes = Processes::new(arguments, handoff, switches.clone());
        processes.follow_groups(&plan.limit);
        let host = Host {
            io_uring: plan.daemon.io_uring,
            switches,
            adopted_fds,
            captures: AdoptedFds::new(std::mem::take(&mut handoff.captures)),
            adopted_exports: AdoptedExports::new(std::mem::take(&mut handoff.exports)),
            helpers: plan.daemon.state_dir.as_ref().map(|folder| folder.join("helpers")),
            domains: plan.daemon.domains,
            measurer: Some(Arc::new(Measuring::new(process_arguments(&plan.daemon)))),
        };
        Ok(Self {
            processes,
            domains: plan.daemon.domains,
            pool,
            devices: Registry::default(),
            groups,
            service,
            host,
            wait: plan.daemon.wait,
            keeps_on: plan.daemon.place != Place::CommandLine,
            calls: Arc::new(Semaphore::new(CALLS_MAX)),
        })
    }

    /// The right to one more call of the host; given back when the host has come back.
    ///
    /// # Errors
    /// [`AssembleError::Calls`]: the host owes the end of too many.
    pub(super) fn call(&self) -> Result<OwnedSemaphorePermit, AssembleError> {
        self.calls.clone().try_acquire_owned().map_err(|_| AssembleError::Calls)
    }

    /// Checks that the socket of a device can have its name. Blocks as long as the host likes.
    pub(super) fn socket_is_free(&self, plan: &DevicePlan) -> Result<(), AssembleError> {
        // A folder that has still to be found is looked at when the device is opened.
        let Ok(served) = served(plan) else { return Ok(()) };
        let Endpoint::Listen { path, permissions } = &served.endpoint else { return Ok(()) };
        match self.service.has(Whose::Device(&plan.name), path, *permissions) {
            true => Ok(()),
            false => free(path, self.wait, || served.at.clone())
                .map_err(|error| error.of_socket(&plan.socket)),
        }
    }

    /// Makes the device of what was opened for it.
    pub(super) fn made(&self, wanted: &Wanted, opened: Opened) -> Made {
        self.processes.limit(&wanted.plan().name, &wanted.plan().limit);
        let made = wanted.made(opened, wanted.domain(self.domains), &self.pool);
        if let Made::Owned(part) = &made {
            let queues = part.view.side.stats.count();
            self.processes.set_apart(&wanted.plan().name, queues);
        }
        if let Some(limit) = &made.view().side.limit {
            self.groups.limit(limit, &wanted.plan().limit);
        }
        made
    }

    /// True if a device that cannot be served at the start costs no other one.
    pub(super) fn tries_again(&self) -> bool {
        self.keeps_on && self.wait != Some(0)
    }

    /// Returns when devices may wait no longer for other processes.
    pub(super) async fn waited(&self) {
        match self.wait {
            None | Some(0) => std::future::pending().await,
            Some(seconds) => tokio::time::sleep(Duration::from_secs(seconds.into())).await,
        }
    }

    pub(super) fn refuse_if_none_is_served(&self) -> Result<(), AssembleError> {
        let all = self.devices.all();
        let reason = all.iter().find_map(|entry| match entry {
            Entry::Waiting(waiting) if waiting.origin != "api" => Some(waiting.reason.clone()),
            Entry::Waiting(_) | Entry::Served(_) => None,
        });
        match reason {
            Some(reason) if self.devices.served().is_empty() => Err(AssembleError::Waited(reason)),
            _ => Ok(()),
        }
    }
}

/// Checks that the control sockets can have their names.
fn controls_are_free(plan: &DaemonPlan, service: &Service) -> Result<(), AssembleError> {
    for (path, key) in plan.controls() {
        if !service.has(Whose::Control(key), path, plan.private(key)) {
            free(path, plan.wait, || plan.place.at(key))?;
        }
    }
    Ok(())
}
