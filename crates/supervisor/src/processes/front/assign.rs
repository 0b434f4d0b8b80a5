//! Gives a device to the device process of its front-end's domain: the spec of the device, and the
//! descriptors that the supervisor opens for it.

use super::Front;
use crate::processes::domain_members::AssignedDevice;
use crate::processes::process::{DeviceProcess, Unresponsive};
use crate::processes::request_server::{self, RequestServer, handed};
use manyring_backend::blk::Marks;
use manyring_config::plan::Wanted;
use manyring_device::Owned;
use manyring_device::net::NetSide;
use manyring_engine::aside;
use manyring_protocol::message::{Command, PortFacts};
use manyring_protocol::spec::DeviceSpec;
use manyring_serve::assemble::Part;
use rustix::fd::OwnedFd;
use std::sync::{Arc, Weak};
use tokio::sync::mpsc;
/// The error for a kind of device that no device process serves.
const UNSERVED: &str = "no device process serves a device of this kind";
/// The error if a takeover keeps the supervisor from giving the device to a process.
const TAKEN_OVER: &str = "a takeover by another daemon is under way";

/// The spec and the file descriptors that a device process gets to serve a device.
struct DeviceGrant {
    spec: DeviceSpec,
    port: Option<PortFacts>,
    joins: Option<u64>,
    fds: Vec<OwnedFd>,
    marks: Option<Marks>,
}

impl Front<'_> {
    /// Returns the device process of a domain, with the device; `None`: giving it the device
    /// failed.
    pub(super) async fn given(&mut self, domain: &str) -> Option<Arc<DeviceProcess>> {
        let device = self.wanted.plan().name.as_str();
        self.processes.assign(device, domain);
        loop {
            let process = self.processes.running(domain).await?;
            if process.has(device) {
                return Some(process);
            }
            match self.give(&process).await {
                Ok(()) => return Some(process),
                Err(_) if self.processes.is_paused() => return None,
                // The process ended before it got the device: the next one gets it.
                Err(_) if !process.serves() => {}
                Err(error) => {
                    self.log_failed_start(domain, &error);
                    return None;
                }
            }
        }
    }

    /// Gives the device to a process, once no former process has a request or descriptor of it.
    pub(super) async fn give(&mut self, process: &Arc<DeviceProcess>) -> Result<(), String> {
        let processes = self.processes;
        // Same domain: reads that the former process left in flight may still write into this
        // guest's memory. Wait for them.
        let reads = self.owner.as_deref() == Some(process.name());
        tokio::select! {
            is_let_go = self.release(reads) => is_let_go?,
            () = processes.paused() => return Err(TAKEN_OVER.to_owned()),
        }
        if let Some(net) = self.net() {
            tokio::select! {
                is_let_go = request_server::let_go(net, self.owner.as_deref()) => is_let_go?,
                () = processes.paused() => return Err(TAKEN_OVER.to_owned()),
            }
        }
        self.processes.unless_paused(self.journals.closes()).await;
        processes.unless_paused(process.knows_ports()).await;
        let mut grant = tokio::select! {
            grant = self.grant() => grant?,
            () = processes.paused() => return Err(TAKEN_OVER.to_owned()),
        };
        grant.fds.insert(0, self.counts.begin().map_err(|errno| errno.to_string())?);
        let DeviceGrant { spec, port, joins, fds, marks } = grant;
        let fds = fds.into_iter().map(Into::into).collect();
        let device = self.wanted.plan().name.clone();
        let command = Command::Device { device, spec, port };
        let (connected, counts) = (self.part.view.connected.clone(), self.counts.clone());
        let (asks, asked) = mpsc::channel(1);
        let (net, journals) = (self.net().cloned(), self.journals.clone());
        let limits = self.processes.limits();
        let device = self.wanted.plan().name.clone();
        // Send these before the first client: its guest must see no outdated link or limit.
        let mut more = vec![limits.borrow().of(&device)];
        more.extend(net.as_deref().map(request_server::command));
        let given = AssignedDevice { connected, counts, net, asks, journals, xen: None };
        tokio::select! {
            given = process.give(command, fds, more, given) => {
                given.map_err(|Unresponsive| "the device process is ending".to_owned())?;
            }
            () = self.processes.paused() => return Err(TAKEN_OVER.to_owned()),
        }
        // No await since `give`: a front that is stopped knows the process that has its device.
        self.process = Some(process.clone());
        let Part { owned, remote, .. } = self.part.clone();
        let (process, marks) = (process.clone(), marks.map(Arc::new));
        let leases = self.processes.leases.clone();
        self.marks = marks.as_ref().map_or_else(Weak::new, Arc::downgrade);
        self.request_servers.spawn(
            RequestServer { device, owned, process, limits, leases, joins, marks, remote }
                .attend(asked),
        );
        Ok(())
    }

    /// Makes the spec and opens the descriptors by which a device process serves the device now.
    async fn grant(&self) -> Result<DeviceGrant, String> {
        match (self.wanted, &self.part.owned) {
            (Wanted::Blk(blk), Owned::Disk(host)) => {
                let told = self.part.remote.as_ref().map(|remote| remote.told());
                let spec = blk.spec(told).ok_or(UNSERVED)?;
                let (disk, queues) = (host.disk().clone(), blk.options.num_queues);
                let fds = aside(move || handed(&*disk, queues)).await;
                let fds = fds.ok_or("internal error")?;
                let (fds, marks) = fds?;
                Ok(DeviceGrant { spec, port: None, joins: None, fds, marks })
            }
            (Wanted::Net(net), Owned::Port(shown)) => {
                let (joins, (port, mut fds)) = request_server::lent(shown).await?;
                if let Some(capture) = self.part.capture.clone() {
                    let stream = aside(move || capture.lend()).await.ok_or("internal error")?;
                    fds.push(stream.map_err(|error| error.to_string())?);
                }
                let spec = net.spec(shown.mac(), shown.mtu()).ok_or(UNSERVED)?;
                Ok(DeviceGrant { spec, port, joins: Some(joins), fds, marks: None })
            }
            _ => Err("internal error".to_owned()),
        }
    }
}
