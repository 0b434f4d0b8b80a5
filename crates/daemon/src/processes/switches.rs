//! A device process that serves a switch: it gets the switch and its uplink first, then all ports,
//! and then the devices whose front-ends connect.
//!
//! ```text
//! process starts   switch + the uplink's queue, once the process before it has left the uplink
//! before a device  every port that the process was not told of (`knows_ports`)
//! afterwards       ports that come and go; what happens to the uplink's interface
//! ```
//! So the addresses, VLANs and guards of all ports are there before the first frame of a guest.

use super::Processes;
use super::assigned::{PendingRequest, ServedSwitch, lock};
use super::handoff::{DeviceHandoff, HandoffMessage};
use super::leases::Leases;
use super::limits::Limits;
use super::process::DeviceProcess;
use super::request_server::{RequestServer, left_of, lent};
use crate::assemble::{Ports, SwitchHost};
use manyring_config::plan::domain_of_switch;
use manyring_device::Owned;
use manyring_device::net::{NetSide, OwnedPort};
use manyring_engine::aside;
use manyring_protocol::message::Command;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};

/// Gives the switch to its process, and serves the uplink until the process has left it.
pub(super) async fn keep_switch(process: Arc<DeviceProcess>) {
    let Some(ServedSwitch { host, is_given, asked, .. }) = process.switch() else { return };
    let Some(asked) = lock(asked).take() else { return };
    let _lent = host.unlent().await;
    let (spec, owned) = host.given();
    let joins = owned.as_ref().map_or(0, |uplink| uplink.outside().joins);
    let (uplink, fds) = match &owned {
        None => (None, Vec::new()),
        Some(uplink) => match lent(uplink).await {
            Ok(lent) => lent,
            Err(error) => {
                let switch = host.name();
                tracing::error!(switch, error, "handing over the uplink failed");
                return process.end("it has no uplink");
            }
        },
    };
    let device = process.name().to_owned();
    let fds = fds.into_iter().map(Into::into).collect();
    process.tell_in_turn(Command::Switch { device, spec, uplink }, fds).await;
    is_given.send_replace(true);
    tokio::select! {
        () = serve_uplink(&process, host, (owned, joins), asked) => {}
        () = process.follow_ports() => {}
    }
}

/// Serves the requests for the uplink until the process has left it.
async fn serve_uplink(
    process: &Arc<DeviceProcess>,
    host: &SwitchHost,
    (uplink, joins): (Option<Arc<OwnedPort>>, u64),
    asked: mpsc::Receiver<PendingRequest>,
) {
    let Some(uplink) = uplink else { return process.ended().await };
    host.watch();
    // Nobody has looked at the interface while no process had it.
    uplink.port_may_have_changed();
    let device = uplink.name().to_owned();
    let (owned, process) = (Owned::Port(uplink), process.clone());
    // An uplink has no limit.
    let limits = watch::channel(Arc::new(Limits::default())).1;
    let (marks, remote) = (None, None);
    // No limit is that of an uplink.
    let leases = Leases::default();
    let server = RequestServer { device, owned, process, limits, leases, joins, marks, remote };
    server.attend(asked).await;
}

impl DeviceProcess {
    /// Returns when the process was told of every port of its switch, or ends; at once if it has no
    /// switch.
    pub(super) async fn knows_ports(&self) {
        let Some(switch) = self.switch() else { return };
        let mut is_given = switch.is_given.subscribe();
        tokio::select! {
            given = is_given.wait_for(|is_given| *is_given) => drop(given),
            () = self.ended() => return,
        }
        self.tell_ports(switch, &mut switch.host.ports()).await;
    }

    async fn tell_ports(&self, switch: &ServedSwitch, ports: &mut watch::Receiver<Ports>) {
        let mut told = switch.told.lock().await;
        ports.mark_unchanged();
        while self.serves() {
            let Some((device, port)) = ports.borrow().untold(&told) else { return };
            match &port {
                Some((number, _)) => told.insert(device.clone(), *number),
                None => told.remove(&device),
            };
            let port = port.map(|(_, spec)| (*spec).clone());
            self.tell_in_turn(Command::SwitchPort { device, port }, Vec::new()).await;
        }
    }

    /// Tells the process of ports that come and go, for ever.
    async fn follow_ports(&self) {
        let Some(switch) = self.switch() else { return };
        let mut ports = switch.host.ports();
        loop {
            self.tell_ports(switch, &mut ports).await;
            if ports.changed().await.is_err() {
                return self.ended().await;
            }
        }
    }
}

impl Processes {
    /// Ends the device process of a switch that is removed; returns when it has left the uplink.
    pub(crate) async fn end_switch(&self, name: &str) {
        let domain = domain_of_switch(name);
        if let Err(problem) = self.end_one(&domain, "its switch is removed").await {
            tracing::error!(switch = name, problem, "the uplink stays in use");
            return;
        }
        if let Some(host) = self.switches.apart(name) {
            drop(host.unlent().await);
        }
        self.lock().remove(&domain);
    }

    /// Has the next device process of a switch follow the one that runs now.
    pub(crate) fn restart_switch(&self, name: &str) {
        let process = self.lock().get(&domain_of_switch(name)).map(|kept| kept.process.clone());
        if let Some(process) = process {
            process.leave("its switch has other settings");
        }
    }

    /// The messages that hand the uplinks of all switches to another supervisor. The device
    /// processes of ports have quiesced.
    ///
    /// # Errors
    /// One line: the system has no descriptor.
    pub(super) async fn share_uplinks(&self) -> Result<DeviceHandoff, String> {
        let mut share = DeviceHandoff::new();
        for host in self.switches.all_apart() {
            let Some(uplink) = host.uplink() else { continue };
            let domain = domain_of_switch(host.name());
            let process = self.lock().get(&domain).map(|kept| kept.process.clone());
            // One that has no front-end now has not quiesced.
            if let Some(process) = process.filter(|process| process.serves()) {
                process.end_yielding("a takeover by another daemon is under way").await;
            }
            drop(host.unlent().await);
            let owned = Owned::Port(uplink);
            let left = aside(move || left_of(&owned)).await.ok_or("internal error")?;
            for fds in left.map_err(|errno| errno.to_string())? {
                let device = domain.clone();
                let fds = fds.into_iter().map(Into::into).collect();
                share.push((HandoffMessage::Queues { device }, fds));
            }
        }
        Ok(share)
    }

    /// Restores the uplinks of all switches, because the takeover has failed.
    pub(super) async fn keep_uplinks(&self) {
        for host in self.switches.all_apart() {
            if let Some(port) = host.uplink().map(|uplink| uplink.port().clone()) {
                aside(move || port.keep()).await;
            }
        }
    }
}
