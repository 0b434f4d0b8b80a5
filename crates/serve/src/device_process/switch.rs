//! The switch that a device process serves: its ports, and its uplink on the queue that the
//! supervisor opened.

use crate::assemble::port::{facts_of, host_filter};
use crate::assemble::switch::{carried, of_switch, of_switch_port};
use crate::supervisor_client::SupervisorClient;
use crate::times::UPLINK_RETRY;
use manyring_backend::net::Port;
use manyring_backend::net::switch::{Switch, SwitchPort};
use manyring_backend::net::tap::lent::{Facts, Lent, LentPort};
use manyring_backend::net::xdp::lent::XdpLentPort;
use manyring_engine::aside;
use manyring_protocol::message::{PortFacts, PortFilter};
use manyring_protocol::switch::{SwitchPortSpec, SwitchSpec};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// The switch that this process serves.
pub(super) struct ProcessSwitch {
    /// The name of the uplink in commands and reports, as if it were a device.
    device: String,
    switch: Arc<Switch>,
    /// All ports, by device; some of the devices may be served by other processes.
    ports: HashMap<String, Arc<SwitchPort>>,
    uplink: Option<ProcessUplink>,
}

/// The uplink of the switch, and the task that carries its frames.
struct ProcessUplink {
    facts: Facts,
    supervisor: SupervisorClient,
    /// The uplink's interface; `None` until the supervisor sends its queue. Dropping this sender
    /// ends the uplink.
    host: watch::Sender<Option<Arc<Interface>>>,
    carries: JoinHandle<()>,
}

/// An interface of an uplink, whose queue the supervisor has sent.
struct Interface {
    facts: Facts,
    supervisor: SupervisorClient,
    state: Mutex<InterfaceState>,
}

struct InterfaceState {
    /// The descriptors of the queue, until the port is open.
    queues: Vec<OwnedFd>,
    port: Option<HostPort>,
    is_lost: bool,
}

/// The interface of an uplink, on descriptors that the supervisor opened.
#[derive(Clone)]
enum HostPort {
    /// The queue of a tap or a macvtap.
    Queue(Arc<LentPort>),
    /// An AF_XDP socket, and its memory.
    Xdp(Arc<XdpLentPort>),
}

impl Interface {
    /// Makes the interface from its descriptors; [`Self::open`] opens the interface.
    /// # Errors
    /// `EINVAL`: the descriptors are not those of one queue.
    fn new(
        facts: Facts,
        queues: Vec<OwnedFd>,
        supervisor: SupervisorClient,
    ) -> Result<Arc<Self>, Errno> {
        // An AF_XDP socket has a second descriptor, of its memory.
        if queues.len() != 1 + usize::from(facts.chunk.is_some()) {
            return Err(Errno::INVAL);
        }
        let state = Mutex::new(InterfaceState { queues, port: None, is_lost: false });
        Ok(Arc::new(Self { facts, supervisor, state }))
    }

    fn state(&self) -> MutexGuard<'_, InterfaceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the interface, or returns the port that was opened before. The descriptors stay if
    /// that fails, so that it can be tried again. May block.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`: a limit of the process or the host.
    fn open(&self) -> Result<Arc<dyn Port>, Errno> {
        let queues = {
            let mut state = self.state();
            if let Some(port) = &state.port {
                return Ok(port.port());
            }
            // Release the lock before the memory is mapped: the control thread needs it for `lose`.
            std::mem::take(&mut state.queues)
        };
        match HostPort::new(self.facts.clone(), queues, &self.supervisor) {
            Ok(opened) => {
                let port = opened.port();
                let mut state = self.state();
                if state.is_lost {
                    opened.lose();
                }
                state.port = Some(opened);
                Ok(port)
            }
            Err((errno, queues)) => {
                self.state().queues = queues;
                Err(errno)
            }
        }
    }

    /// Marks the interface as deleted.
    fn lose(&self) {
        let mut state = self.state();
        state.is_lost = true;
        state.port.iter().for_each(HostPort::lose);
    }
}

impl HostPort {
    /// Opens the interface on the descriptors of its queue.
    ///
    /// # Errors
    /// The memory or the rings of a socket cannot be mapped. The descriptors come back.
    fn new(
        facts: Facts,
        queues: Vec<OwnedFd>,
        supervisor: &SupervisorClient,
    ) -> Result<Self, (Errno, Vec<OwnedFd>)> {
        let (owner, is_xdp) = (Arc::new(supervisor.clone()), facts.chunk.is_some());
        let lent = Lent { facts, queues, table: None };
        Ok(match is_xdp {
            true => Self::Xdp(Arc::new(XdpLentPort::new(lent, owner)?)),
            false => {
                // `LentPort::new` takes no descriptor and no memory of the host, so no limit can
                // fail it.
                let port = LentPort::new(lent, false, owner);
                Self::Queue(Arc::new(port.map_err(|errno| (errno, Vec::new()))?))
            }
        })
    }

    /// Marks the interface as deleted.
    fn lose(&self) {
        match self {
            Self::Queue(port) => port.lose(),
            Self::Xdp(port) => port.lose(),
        }
    }

    fn port(&self) -> Arc<dyn Port> {
        match self {
            Self::Queue(port) => port.clone(),
            Self::Xdp(port) => port.clone(),
        }
    }
}

impl ProcessSwitch {
    /// Makes the switch, and opens its uplink if the supervisor sent one.
    ///
    /// # Errors
    /// A text of one line: the descriptors or properties of the uplink are invalid.
    pub(super) fn new(
        spec: &SwitchSpec,
        facts: Option<PortFacts>,
        queues: Vec<OwnedFd>,
        supervisor: SupervisorClient,
    ) -> Result<Self, String> {
        let (device, switch) = (supervisor.device.clone(), Switch::new(of_switch(spec)));
        let uplink = |facts| ProcessUplink::new(&switch, facts_of(facts), queues, supervisor);
        let uplink = facts.map(uplink).transpose().map_err(|errno| format!("uplink: {errno}"))?;
        Ok(Self { device, switch, ports: HashMap::new(), uplink })
    }

    /// Adds or replaces the port of `device`, or removes it (`port` is `None`).
    ///
    /// # Errors
    /// A text of one line: all ports of the switch are in use.
    pub(super) fn set(
        &mut self,
        device: String,
        port: Option<SwitchPortSpec>,
    ) -> Result<(), String> {
        // Remove the old port first: a MAC address may be configured for one port only.
        self.ports.remove(&device);
        let Some(spec) = port else { return Ok(()) };
        let port = self.switch.port(of_switch_port(&device, &spec));
        self.ports.insert(device, Arc::new(port.map_err(|error| error.to_string())?));
        Ok(())
    }

    /// Returns the port of a device.
    pub(super) fn port(&self, device: &str) -> Option<Arc<SwitchPort>> {
        self.ports.get(device).cloned()
    }

    /// True if `device` is the name of the uplink in commands.
    pub(super) fn is_uplink(&self, device: &str) -> bool {
        self.device == device
    }

    /// Marks the interface of the uplink as deleted.
    pub(super) fn lose(&self) {
        if let Some(uplink) = &self.uplink {
            uplink.host.borrow().iter().for_each(|interface| interface.lose());
        }
    }

    /// Replaces the queues by those of another interface, which the supervisor has joined. If they
    /// cannot be opened now, the uplink alone waits for that.
    ///
    /// # Errors
    /// `EINVAL`: there is no uplink, or the descriptors are not those of one queue.
    pub(super) fn renew(
        &self,
        queues: Vec<OwnedFd>,
        (filter, chunk): (PortFilter, Option<u32>),
    ) -> Result<(), Errno> {
        let ProcessUplink { facts, supervisor, host, .. } =
            self.uplink.as_ref().ok_or(Errno::INVAL)?;
        let facts = Facts { host_filter: host_filter(filter), chunk, ..facts.clone() };
        let interface = Interface::new(facts, queues, supervisor.clone())?;
        let former = host.send_replace(Some(interface));
        // The close of the last copy of a socket may block.
        tokio::spawn(aside(move || drop(former)));
        Ok(())
    }

    /// Closes the uplink. Returns when all its descriptors and mappings are closed.
    pub(super) async fn close(self) {
        if let Some(ProcessUplink { host, carries, .. }) = self.uplink {
            drop(host);
            let _ = carries.await;
        }
    }
}

impl ProcessUplink {
    fn new(
        switch: &Arc<Switch>,
        facts: Facts,
        queues: Vec<OwnedFd>,
        supervisor: SupervisorClient,
    ) -> Result<Self, Errno> {
        let is_there = !queues.is_empty();
        let host = is_there.then(|| Interface::new(facts.clone(), queues, supervisor.clone()));
        let (host, hosts) = watch::channel(host.transpose()?);
        let carries = tokio::spawn(carry(switch.clone(), facts.interface.clone(), hosts));
        Ok(Self { facts, supervisor, host, carries })
    }
}

/// Carries frames between the switch and the present interface, until the sender of interfaces is
/// dropped. The uplink starts on another thread: its start waits for answers of the supervisor,
/// which the control thread must read meanwhile.
async fn carry(
    switch: Arc<Switch>,
    interface: String,
    mut hosts: watch::Receiver<Option<Arc<Interface>>>,
) {
    let (mut is_told, mut is_again) = (false, false);
    loop {
        let host = hosts.borrow_and_update().clone();
        let Some(host) = host else {
            if hosts.changed().await.is_err() {
                return;
            }
            continue;
        };
        let (of, name) = (switch.clone(), interface.clone());
        let carried = aside(move || carried(&of, &name, host.open()?)).await;
        let is_over = match carried {
            Some(Ok(uplink)) => {
                is_told = false;
                if is_again {
                    tracing::info!(interface, "the uplink's interface is rejoined");
                }
                let is_over = hosts.changed().await.is_err();
                is_again = true;
                aside(move || drop(uplink)).await;
                is_over
            }
            failed => {
                let error = failed.and_then(Result::err).unwrap_or(Errno::IO);
                if !std::mem::replace(&mut is_told, true) {
                    let switch = switch.name();
                    tracing::error!(switch, %error, "starting the uplink failed; retrying");
                }
                tokio::select! {
                    () = sleep(UPLINK_RETRY) => false,
                    changed = hosts.changed() => changed.is_err(),
                }
            }
        };
        if is_over {
            // This drop closes the last descriptor of the queue, which may block.
            aside(move || drop(hosts)).await;
            return;
        }
    }
}
