//! A network device in its device process: a port on the supervisor's queues, and the supervisor's
//! commands about the interface.

use crate::ports;
use crate::supervisor_client::SupervisorClient;
use crate::view::DeviceView;
use manyring_backend::net::null::NullPort;
use manyring_backend::net::switch::SwitchPort;
use manyring_backend::net::tap::lent::{Facts, Lent, LentPort, LentTable};
use manyring_backend::net::xdp::lent::XdpLentPort;
use manyring_backend::net::{HostFilter, Port};
use manyring_device::Device;
use manyring_device::net::Offloads;
use manyring_device::net::{Guest, NetDevice, NetSide};
use manyring_protocol::message::{PortFacts, PortFilter, Report};
use manyring_protocol::spec::PortSpec;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// The port of a device that the device process has.
#[derive(Clone, Debug)]
pub(super) enum PortGrant {
    Null(Arc<NullPort>),
    Lent(Arc<LentPort>),
    Switch(Arc<SwitchPort>),
    Xdp(Arc<XdpLentPort>),
}

impl PortGrant {
    /// Opens the port on the facts and descriptors of the supervisor, or none if there are none.
    ///
    /// # Errors
    /// One line: they do not fit the device.
    pub(super) fn new(
        (port, queue_pairs): (PortSpec, usize),
        facts: Option<PortFacts>,
        mut queues: Vec<OwnedFd>,
        supervisor: SupervisorClient,
    ) -> Result<Self, String> {
        let is_xdp = matches!(port, PortSpec::Xdp);
        let (facts, merge) = match (facts, port) {
            (Some(facts), PortSpec::Interface { merge }) => (facts, merge),
            (Some(facts), PortSpec::Xdp) => (facts, false),
            (None, PortSpec::Null { generate }) => {
                return Ok(Self::Null(Arc::new(NullPort::new(queue_pairs, generate))));
            }
            (None, PortSpec::Interface { .. } | PortSpec::Xdp) => {
                return Err("supervisor: a device without the queues of its interface".to_owned());
            }
            (Some(_), PortSpec::Null { .. }) => {
                return Err("supervisor: queues of an interface for a port without one".to_owned());
            }
            (_, PortSpec::Switch) => {
                return Err("supervisor: a device of a switch without its port".to_owned());
            }
        };
        let table = facts.table_key.and_then(|key| Some(LentTable { map: queues.pop()?, key }));
        if queues.len() != queue_pairs + usize::from(is_xdp) {
            return Err(format!("supervisor: {} queues for {queue_pairs} pairs", queues.len()));
        }
        let lent = Lent { facts: facts_of(facts), queues, table };
        let owner = Arc::new(supervisor);
        let port = match is_xdp {
            true => XdpLentPort::new(lent, owner).map(|port| Self::Xdp(Arc::new(port))),
            false => LentPort::new(lent, merge, owner).map(|port| Self::Lent(Arc::new(port))),
        };
        port.map_err(|errno| errno.to_string())
    }

    /// Called when the interface is gone.
    fn lose(&self) {
        match self {
            Self::Null(_) | Self::Switch(_) => {}
            Self::Lent(port) => port.lose(),
            Self::Xdp(port) => port.lose(),
        }
    }

    /// Called with the queues of another interface, which the supervisor joined.
    ///
    /// # Errors
    /// `EINVAL`: it has no interface, or another number of queues.
    fn renew(
        &self,
        queues: Vec<OwnedFd>,
        chunk: Option<u32>,
        filter: HostFilter,
    ) -> Result<(), Errno> {
        match self {
            Self::Null(_) | Self::Switch(_) => Err(Errno::INVAL),
            Self::Lent(port) => port.renew(queues, filter),
            Self::Xdp(port) => port.renew(queues, chunk, filter),
        }
    }

    pub(super) fn port(&self) -> Arc<dyn Port> {
        match self {
            Self::Null(port) => port.clone(),
            Self::Lent(port) => port.clone(),
            Self::Switch(port) => port.clone(),
            Self::Xdp(port) => port.clone(),
        }
    }
}

/// The properties of an interface, as the supervisor says.
pub(super) fn facts_of(facts: PortFacts) -> Facts {
    let PortFacts { interface, is_macvtap, offloads, mtu, table_key: _, can_hash, filter, chunk } =
        facts;
    let (offloads, host_filter) = (Offloads::of_guest(offloads), host_filter(filter));
    Facts { interface, is_macvtap, offloads, mtu, can_hash, host_filter, chunk }
}

/// What the host keeps from the interface, as the supervisor says.
pub(super) fn host_filter(PortFilter { only_to, lacks_groups }: PortFilter) -> HostFilter {
    HostFilter { only_to, only_from: None, lacks_groups }
}

/// The operator's settings of a network device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) link_up: bool,
    pub(super) mtu: Option<u16>,
    pub(super) announcements: u64,
}

/// A network device that the device process serves.
#[derive(Debug)]
pub(super) struct ProcessNet {
    device: Arc<NetDevice>,
    given: PortGrant,
    wanted: watch::Sender<Wanted>,
    shown: Guest,
    /// Tasks that follow the interface and the operator's settings.
    _tasks: JoinSet<()>,
}

impl ProcessNet {
    /// The network device that is shown as `view`, on this port.
    pub(super) fn new(device: Arc<NetDevice>, view: &DeviceView, given: PortGrant) -> Self {
        let mut tasks = ports::look_after(view, false);
        let wanted = Wanted { link_up: true, mtu: device.mtu(), announcements: 0 };
        let (wanted, wants) = watch::channel(wanted);
        tasks.spawn(follow(device.clone(), wants));
        let shown = Guest::default();
        Self { device, given, wanted, shown, _tasks: tasks }
    }

    /// Takes a command about the interface and the operator's settings.
    pub(super) fn handle(&self, is_gone: bool, wanted: Wanted) {
        if is_gone {
            self.given.lose();
            self.device.port_may_have_changed();
        }
        self.wanted.send_if_modified(|known| std::mem::replace(known, wanted) != wanted);
    }

    /// Goes on with the queues of another interface, which the supervisor joined.
    ///
    /// # Errors
    /// The device has no interface, or another number of queues.
    pub(super) fn renew(
        &self,
        queues: Vec<OwnedFd>,
        (filter, chunk): (PortFilter, Option<u32>),
    ) -> Result<(), Errno> {
        self.given.renew(queues, chunk, host_filter(filter))?;
        self.device.port_may_have_changed();
        Ok(())
    }

    /// The guest's choices as a report; `None` if the supervisor knows them.
    pub(super) fn news(&mut self, name: &str) -> Option<Report> {
        // The supervisor attaches the pairs of an interface, and does not know those of other
        // ports.
        let pairs = match self.given {
            PortGrant::Null(_) | PortGrant::Switch(_) => Some(self.device.attached_pairs()),
            PortGrant::Lent(_) | PortGrant::Xdp(_) => None,
        };
        let guest = Guest { pairs, ..self.device.guest() };
        if std::mem::replace(&mut self.shown, guest) == guest {
            return None;
        }
        let Guest { mac, announces, control, .. } = guest;
        let number = |of: Option<usize>| of.and_then(|number| u16::try_from(number).ok());
        let (device, control, pairs) = (name.to_owned(), number(control), number(pairs));
        Some(Report::Guest { device, mac, announces, control, pairs })
    }
}

/// Has the device follow the operator's settings.
async fn follow(device: Arc<NetDevice>, mut wants: watch::Receiver<Wanted>) {
    let mut announcements = 0;
    while wants.changed().await.is_ok() {
        let wanted = *wants.borrow_and_update();
        device.set_link(wanted.link_up).await;
        if let Some(mtu) = wanted.mtu.filter(|mtu| device.mtu() != Some(*mtu))
            && let Err(errno) = device.set_mtu(mtu).await
        {
            let device = device.name();
            tracing::warn!(device, mtu, %errno, "changing the guest's MTU failed");
        }
        if wanted.announcements > announcements {
            let _ = device.announce();
        }
        announcements = wanted.announcements;
    }
}
