//! Opens the port of a network device by its plan, and chooses the guest's MAC address. In a device
//! process, opens the port by its spec, on descriptors that the supervisor sent.

use super::capture::{Capture, CaptureFile};
use super::{AssembleError, Host};
use crate::pcap::Pcap;
use manyring_backend::net::fault::{FaultOptions, FaultPort};
use manyring_backend::net::late::{LateOptions, LatePort};
use manyring_backend::net::null::NullPort;
use manyring_backend::net::switch::SwitchPort;
use manyring_backend::net::tap::lent::{Facts, Lent, LentPort, LentTable, Owner};
use manyring_backend::net::tap::macvtap::{self, MacvtapOptions};
use manyring_backend::net::tap::{self, QueueLength, TapError, TapOptions, TapPort, TapSource};
use manyring_backend::net::xdp::lent::XdpLentPort;
use manyring_backend::net::xdp::{self, XdpOptions, XdpPort};
use manyring_backend::net::{HostFilter, Port};
use manyring_config::plan::{NetPlan, PortPlan, mac_text};
use manyring_device::net::{MacAddress, Offloads};
use manyring_protocol::message::{PortFacts, PortFilter};
use manyring_protocol::spec::{NetFaultSpec, PortSpec};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::sync::Arc;

/// Opens the port of `net`. Returns the port and the guest's MAC address. `lends`: a device process
/// serves the queues of the port, and gets their descriptors.
pub(super) fn open(
    net: &NetPlan,
    host: &Host,
    lends: bool,
) -> Result<(Arc<dyn Port>, MacAddress), AssembleError> {
    let failed = |key, source| failed(net, key, source);
    let port = match &net.port {
        PortPlan::Null { generate } => {
            let mac = net.mac.unwrap_or_else(|| net.made_mac());
            return Ok((Arc::new(NullPort::new(net.options.queue_pairs, *generate)), mac));
        }
        PortPlan::Switch(plan) => {
            let mac = net.mac.unwrap_or_else(|| net.made_mac());
            return Ok((host.switches.port(net, plan, mac)?, mac));
        }
        PortPlan::Tap { name, must_exist } => {
            let (name, must_exist) = (name.clone(), *must_exist);
            let fds = host.adopted_fds.take(&net.device.name);
            let source = match fds.is_empty() {
                true => TapSource::Name { name, must_exist },
                false => TapSource::Left { name, must_exist, fds },
            };
            open_tap(net, source).map_err(|error| failed("tap", error))?
        }
        PortPlan::TapFds(fds) => {
            let source = TapSource::Fds(adopted(net, fds)?);
            open_tap(net, source).map_err(|error| failed("tap_fds", error))?
        }
        PortPlan::Macvtap { name } => {
            let options = MacvtapOptions {
                name: name.clone(),
                queue_pairs: net.options.queue_pairs,
                sndbuf: net.sndbuf,
                txqueuelen: net.txqueuelen.unwrap_or(QueueLength::Host),
                merge: net.merge,
                mtu: net.options.mtu,
                up: net.up,
            };
            macvtap::open(&options).map_err(|error| failed("macvtap", error))?
        }
        PortPlan::Xdp { name, zero_copy } => {
            let options = XdpOptions {
                name: name.clone(),
                queue_pairs: net.options.queue_pairs,
                mtu: net.options.mtu,
                up: net.up,
                zero_copy: *zero_copy,
                lends,
            };
            let port = XdpPort::open(&options).map_err(|error| failed("xdp", error))?;
            let mac = mac(net, port.guest_mac());
            return Ok((Arc::new(port), mac));
        }
    };
    let mac = mac(net, port.guest_mac());
    Ok((Arc::new(port), mac))
}

/// The port of a device, in the device process that serves it.
#[derive(Clone, Debug)]
pub(crate) struct PortGrant {
    pub(crate) port: Arc<dyn Port>,
    /// The interface of the port, if the port is a tap, a macvtap or an AF_XDP interface.
    pub(crate) lent: Option<LentInterface>,
}

/// An interface of the host whose queues the supervisor opened for this process.
#[derive(Clone, Debug)]
pub(crate) enum LentInterface {
    Tap(Arc<LentPort>),
    Xdp(Arc<XdpLentPort>),
}

impl PortGrant {
    /// Opens the port on what the supervisor sent: the properties and queue descriptors of an
    /// interface, or a port of the switch that this process serves.
    ///
    /// # Errors
    /// A text of one line: the descriptors do not fit the spec.
    pub(crate) fn new(
        (port, queue_pairs): (PortSpec, usize),
        (facts, queues, switched): (Option<PortFacts>, Vec<OwnedFd>, Option<Arc<SwitchPort>>),
        owner: Arc<dyn Owner>,
    ) -> Result<Self, String> {
        let merge = match (port, &facts) {
            (PortSpec::Null { generate }, None) => {
                let port = Arc::new(NullPort::new(queue_pairs, generate));
                return Ok(Self { port, lent: None });
            }
            (PortSpec::Switch, _) => {
                let port = switched.ok_or("supervisor: a device of a switch without its port")?;
                return Ok(Self { port, lent: None });
            }
            (PortSpec::Interface { merge }, Some(_)) => Some(merge),
            (PortSpec::Xdp, Some(_)) => None,
            (PortSpec::Null { .. }, Some(_)) => {
                return Err("supervisor: queues of an interface for a port without one".to_owned());
            }
            (PortSpec::Interface { .. } | PortSpec::Xdp, None) => None,
        };
        let facts = facts.ok_or("supervisor: a device without the queues of its interface")?;
        let lent = lent(facts, queues, (queue_pairs, merge.is_none()))?;
        let opened = match merge {
            Some(merge) => LentPort::new(lent, merge, owner).map(|port| {
                let port = Arc::new(port);
                Self { port: port.clone(), lent: Some(LentInterface::Tap(port)) }
            }),
            None => xdp(lent, queue_pairs, owner).map(|port| {
                let port = Arc::new(port);
                Self { port: port.clone(), lent: Some(LentInterface::Xdp(port)) }
            }),
        };
        opened.map_err(|errno| errno.to_string())
    }
}

impl LentInterface {
    /// True while an AF_XDP port has no interface: it was deleted, or its sockets wait.
    pub(crate) fn waits(&self) -> bool {
        match self {
            Self::Tap(_) => false,
            Self::Xdp(port) => port.waits(),
        }
    }

    /// Marks the interface as deleted.
    pub(crate) fn lose(&self) {
        match self {
            Self::Tap(port) => port.lose(),
            Self::Xdp(port) => port.lose(),
        }
    }

    /// Replaces the queues by queues of another interface, which the supervisor joined after the
    /// first one was deleted.
    ///
    /// # Errors
    /// `EINVAL`: the number of queues differs.
    pub(crate) fn renew(
        &self,
        queues: Vec<OwnedFd>,
        chunk: Option<u32>,
        filter: HostFilter,
    ) -> Result<(), Errno> {
        match self {
            Self::Tap(port) => port.renew(queues, filter),
            Self::Xdp(port) => port.renew(queues, chunk, filter),
        }
    }
}

/// Makes the port on AF_XDP sockets from the supervisor. A process that cannot map them now serves
/// its other devices, and this one without its interface until it can.
fn xdp(lent: Lent, queue_pairs: usize, owner: Arc<dyn Owner>) -> Result<XdpLentPort, Errno> {
    if lent.queues.is_empty() {
        return XdpLentPort::waiting(lent, queue_pairs, owner);
    }
    let facts = lent.facts.clone();
    match XdpLentPort::new(lent, owner.clone()) {
        Err((error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM), queues)) => {
            let interface = &facts.interface;
            tracing::warn!(interface, %error, "opening its AF_XDP sockets failed; retrying");
            XdpLentPort::waiting(Lent { facts, queues, table: None }, queue_pairs, owner)
        }
        opened => opened.map_err(|(errno, _)| errno),
    }
}

/// Sorts the descriptors of an interface: a queue for each pair, and behind them the BPF map of the
/// steering table, if `facts` has its key. Of AF_XDP: sockets, and behind them their memory; or
/// none, while the interface is gone.
fn lent(
    facts: PortFacts,
    mut queues: Vec<OwnedFd>,
    (queue_pairs, is_xdp): (usize, bool),
) -> Result<Lent, String> {
    let table = facts.table_key.and_then(|key| Some(LentTable { map: queues.pop()?, key }));
    let count = queue_pairs + usize::from(is_xdp);
    if queues.len() != count && !(is_xdp && queues.is_empty()) {
        return Err(format!("supervisor: {} descriptors for {count}", queues.len()));
    }
    Ok(Lent { facts: facts_of(facts), queues, table })
}

/// Converts the properties of an interface from the supervisor's message.
pub(crate) fn facts_of(facts: PortFacts) -> Facts {
    let PortFacts { interface, is_macvtap, offloads, mtu, table_key: _, can_hash, filter, chunk } =
        facts;
    let (offloads, host_filter) = (Offloads::of_guest(offloads), host_filter(filter));
    Facts { interface, is_macvtap, offloads, mtu, can_hash, host_filter, chunk }
}

/// Converts the interface's receive filter from the supervisor's message.
pub(crate) fn host_filter(PortFilter { only_to, lacks_groups }: PortFilter) -> HostFilter {
    HostFilter { only_to, only_from: None, lacks_groups }
}

fn failed(net: &NetPlan, key: &'static str, source: TapError) -> AssembleError {
    let key = key_of(&source).unwrap_or(key);
    AssembleError::Port { at: net.device.place.at(key), source }
}

/// Checks that the interfaces which `net` names exist and suit, without opening them.
pub(crate) fn look(net: &NetPlan) -> Result<(), AssembleError> {
    let (name, key) = match &net.port {
        PortPlan::Macvtap { name } => {
            return macvtap::look(name).map_err(|error| failed(net, "macvtap", error));
        }
        PortPlan::Xdp { name, .. } => return xdp::look(name).map_err(|e| failed(net, "xdp", e)),
        PortPlan::Tap { name, must_exist } => (Some((name.as_str(), *must_exist)), "tap"),
        PortPlan::Switch(_) => return Ok(()),
        PortPlan::TapFds(_) | PortPlan::Null { .. } => (None, "tap_fds"),
    };
    tap::look(name, net.options.queue_pairs, net.bridge.as_deref()).map_err(|e| failed(net, key, e))
}

/// Wraps the port so that it fails as the test option `fault` says.
pub(crate) fn faulty(port: Arc<dyn Port>, fault: Option<NetFaultSpec>) -> Arc<dyn Port> {
    let Some(fault) = fault else { return port };
    let NetFaultSpec {
        drop_tx_every,
        drop_rx_every,
        corrupt_rx_every,
        block_tx_every,
        no_memory_every,
        recv_error_every,
        late_tx,
    } = fault;
    let options = FaultOptions {
        drop_tx_every,
        drop_rx_every,
        corrupt_rx_every,
        block_tx_every,
        no_memory_every,
        recv_error_every,
    };
    let port: Arc<dyn Port> = match late_tx {
        0 => port,
        calls_max => {
            let late = LateOptions { seed: 1, calls_max, tells: true };
            Arc::new(LatePort::new(port, late))
        }
    };
    Arc::new(FaultPort::new(port, options))
}

/// Wraps the port in its test faults and its capture. If a device process serves the port, the
/// supervisor writes the capture: this function then opens the capture file and returns it. May
/// block.
pub(super) fn decorated(
    net: &NetPlan,
    port: Arc<dyn Port>,
    capture: Capture,
) -> Result<(Arc<dyn Port>, Capture), AssembleError> {
    let port = faulty(port, net.fault);
    let Some(path) = &net.pcap else { return Ok((port, capture)) };
    let failed = |source| {
        let (at, path) = (net.device.place.at("pcap"), path.clone());
        AssembleError::Pcap { at, path, source }
    };
    Ok(match capture {
        Capture::Supervisor(left) => {
            let file = CaptureFile::begin(&net.device.name, path, left).map_err(failed)?;
            (port, Capture::Begun(Arc::new(file)))
        }
        // The capture is the outermost decorator, so that it records frames as the guest sends and
        // receives them.
        Capture::Port | Capture::Begun(_) => {
            (Arc::new(Pcap::around(port, path).map_err(failed)?), Capture::Port)
        }
    })
}

fn adopted(net: &NetPlan, fds: &[i32]) -> Result<Vec<OwnedFd>, AssembleError> {
    let adopted: Result<_, _> = fds.iter().map(|fd| crate::fds::adopt(*fd)).collect();
    adopted.map_err(|source| AssembleError::Fd { at: net.device.place.at("tap_fds"), source })
}

fn open_tap(net: &NetPlan, source: TapSource) -> Result<TapPort, TapError> {
    TapPort::open(TapOptions {
        source,
        queue_pairs: net.options.queue_pairs,
        sndbuf: net.sndbuf,
        txqueuelen: net.txqueuelen.unwrap_or(QueueLength::Host),
        merge: net.merge,
        steer: net.steer,
        mtu: net.options.mtu,
        bridge: net.bridge.clone(),
        up: net.up,
    })
}

/// Returns the guest's MAC address: the configured one, else the one that the interface demands,
/// else one derived from the device's name.
fn mac(net: &NetPlan, demanded: Option<MacAddress>) -> MacAddress {
    match (net.mac, demanded) {
        (None, demanded) => demanded.unwrap_or_else(|| net.made_mac()),
        (Some(mac), demanded) => {
            if let Some(demanded) = demanded.filter(|demanded| *demanded != mac) {
                tracing::warn!(
                    device = net.device.name,
                    mac = mac_text(mac),
                    interface = mac_text(demanded),
                    "the interface has another MAC address; unless it is in mode passthru or \
                     promiscuous, it drops frames to the guest's address"
                );
            }
            mac
        }
    }
}

/// Returns the key that caused the error; `None`: the key that names the port did.
fn key_of(error: &TapError) -> Option<&'static str> {
    match error {
        TapError::Mtu(_) | TapError::MtuRefused { .. } | TapError::MtuLong { .. } => Some("mtu"),
        TapError::NoZeroCopy(_) => Some("zero_copy"),
        TapError::BridgeMissing(_) | TapError::NotABridge(_) | TapError::OtherBridge(_) => {
            Some("bridge")
        }
        TapError::QueuePairs(_)
        | TapError::SingleQueue { .. }
        | TapError::FewQueues { .. }
        | TapError::FdCount { .. } => Some("queue_pairs"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_device::net::RssConfig;

    /// A supervisor that nobody asks.
    #[derive(Debug)]
    struct Silent;

    impl Owner for Silent {
        fn set_attached(&self, _index: usize, _attached: bool) -> Result<(), Errno> {
            unreachable!()
        }

        fn set_offloads(&self, _offloads: Offloads) -> Result<(), Errno> {
            unreachable!()
        }

        fn set_rss(&self, _rss: Option<&RssConfig>) -> Result<(), Errno> {
            unreachable!()
        }

        fn suspect(&self) {}
    }

    #[test]
    fn a_port_is_opened_on_what_belongs_to_it_and_on_nothing_else() {
        let facts = || PortFacts {
            interface: "t".to_owned(),
            is_macvtap: false,
            offloads: 0,
            mtu: None,
            table_key: None,
            can_hash: false,
            filter: PortFilter::default(),
            chunk: None,
        };
        let opened = |port, facts, queues: usize| {
            let queue = || std::fs::File::open("/dev/null").unwrap().into();
            let queues = (0..queues).map(|_| queue()).collect();
            PortGrant::new((port, 2), (facts, queues, None), Arc::new(Silent))
                .map(|grant| (grant.port.kind(), grant.lent.is_some()))
        };
        let (null, tap) = (PortSpec::Null { generate: 0 }, PortSpec::Interface { merge: false });
        assert_eq!(opened(null, None, 0), Ok(("null", false)));
        assert_eq!(opened(tap, Some(facts()), 2), Ok(("tap", true)));
        for (port, facts, queues, problem) in [
            (null, Some(facts()), 0, "queues of an interface for a port without one"),
            (tap, None, 2, "without the queues of its interface"),
            (tap, Some(facts()), 1, "1 descriptors for 2"),
            (PortSpec::Xdp, None, 3, "without the queues of its interface"),
            (PortSpec::Xdp, Some(facts()), 2, "2 descriptors for 3"),
            (PortSpec::Switch, None, 0, "a device of a switch without its port"),
        ] {
            let error = opened(port, facts, queues).unwrap_err();
            assert!(error.contains(problem), "{port:?} {queues}: {error}");
        }
    }
}
