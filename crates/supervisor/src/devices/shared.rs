//! `Shared`: the parts of the process that all devices share.

use super::process_arguments;
use crate::model::{Entry, Registry};
use crate::processes::{Handoff, Measuring, Processes};
use manyring_config::plan::{DaemonPlan, DevicePlan, Domains, Place, Plan, Wanted};
use manyring_engine::Pool;
use manyring_serve::assemble::{
    AdoptedExports, AdoptedFds, Assemble, AssembleError, Host, Made, Opened, Switches, free, served,
};
use manyring_serve::limit_groups::Groups;
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
    /// Seconds to wait for resources that another process holds; `None`: for ever.
    pub(super) wait: Option<u32>,
    /// True if a device that fails is retried, and the other devices are served meanwhile.
    pub(super) keeps_on: bool,
    /// Permits for system calls that open resources for a change. A call that does not return keeps
    /// its permit.
    pub(super) calls: Arc<Semaphore>,
}

/// The most such calls that may be in progress. Each call blocks a thread: without a bound, clients
/// of the control API could make the daemon start ever more threads while the host does not
/// respond.
const CALLS_MAX: usize = 16;

impl Shared {
    /// Creates the shared parts for the devices of `plan`. Takes the descriptors of an earlier
    /// supervisor out of `handoff`.
    ///
    /// # Errors
    /// The name of a control socket is in use, or a switch cannot be created.
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

    /// Returns a permit for one more call of the host; the caller drops it when the call has
    /// returned.
    ///
    /// # Errors
    /// [`AssembleError::Calls`]: too many calls of the host have not returned.
    pub(super) fn call(&self) -> Result<OwnedSemaphorePermit, AssembleError> {
        self.calls.clone().try_acquire_owned().map_err(|_| AssembleError::Calls)
    }

    /// Checks that no other process listens at the path of a device's socket. Blocks as long as the
    /// host takes.
    pub(super) fn socket_is_free(&self, plan: &DevicePlan) -> Result<(), AssembleError> {
        // The folder of the socket is not resolved yet. Opening the device resolves it, and checks
        // the path then.
        let Ok(served) = served(plan) else { return Ok(()) };
        let Endpoint::Listen { path, permissions } = &served.endpoint else { return Ok(()) };
        match self.service.has(Whose::Device(&plan.name), path, *permissions) {
            true => Ok(()),
            false => free(path, self.wait, || served.at.clone())
                .map_err(|error| error.of_socket(&plan.socket)),
        }
    }

    /// Creates a device from its opened disk or port.
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

    /// True if a device that cannot be opened at the start is retried, and does not stop the
    /// start.
    pub(super) fn tries_again(&self) -> bool {
        self.keeps_on && self.wait != Some(0)
    }

    /// Returns when the time for which devices may wait (`wait`) is over; never returns without
    /// such a limit.
    pub(super) async fn waited(&self) {
        match self.wait {
            None | Some(0) => std::future::pending().await,
            Some(seconds) => tokio::time::sleep(Duration::from_secs(seconds.into())).await,
        }
    }

    /// Fails if no device is served and a device of the configuration still waits: the time for
    /// which devices may wait is over.
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

/// Checks that the names of the control sockets are free.
fn controls_are_free(plan: &DaemonPlan, service: &Service) -> Result<(), AssembleError> {
    for (path, key) in plan.controls() {
        if !service.has(Whose::Control(key), path, plan.private(key)) {
            free(path, plan.wait, || plan.place.at(key))?;
        }
    }
    Ok(())
}
