//! Makes the switches of a plan, with their uplinks, and opens switch ports for devices.

use super::AssembleError;
use super::nbd_host::{AdoptedExports, Measurer};
use super::switch_host::{SwitchHost, owned};
use manyring_backend::net::Port;
use manyring_backend::net::switch::uplink::Uplink;
use manyring_backend::net::switch::{Clock, PortOptions, Switch, SwitchOptions, Vlans};
use manyring_backend::net::tap::macvtap::{self, MacvtapOptions};
use manyring_backend::net::tap::{QueueLength, TapError, TapOptions, TapPort, TapSource};
use manyring_backend::net::xdp::{XdpOptions, XdpPort};
use manyring_config::plan::{
    Domains, NetPlan, SwitchPlan, SwitchPortPlan, UplinkKind, domain_of_switch,
};
use manyring_device::net::{MacAddress, NetSide};
use manyring_protocol::switch::{SwitchPortSpec, SwitchSpec, VlansSpec};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Most MAC addresses that a switch learns behind an uplink: enough for the hosts of a network.
const UPLINK_MACS_MAX: u32 = 1024;
/// Most frames that an uplink may flood in a second.
const UPLINK_FLOODS_MAX: u32 = 20_000;

/// Resources and settings with which this process opens devices.
#[derive(Clone, Debug)]
pub struct Host {
    /// True if disks may use io_uring.
    pub io_uring: bool,
    /// The switches of the plan.
    pub switches: Switches,
    /// The disks and ports that an earlier supervisor handed over.
    pub adopted_fds: AdoptedFds,
    /// The exports of NBD servers, as the former supervisor told guests.
    pub adopted_exports: AdoptedExports,
    /// The capture files that an earlier supervisor handed over.
    pub captures: AdoptedFds,
    /// The folder of the sockets of helpers.
    pub helpers: Option<PathBuf>,
    /// How devices are divided among device processes.
    pub domains: Domains,
    /// Asks NBD servers for the size of a disk, through a device process; `None`: there are no
    /// device processes.
    pub measurer: Option<Arc<dyn Measurer>>,
}

/// The descriptors that the former supervisor handed over, by device: of a disk its open file, of a
/// tap its queues, of a capture its file. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct AdoptedFds(Arc<Mutex<HashMap<String, Vec<OwnedFd>>>>);

impl AdoptedFds {
    /// Makes the table of handed-over descriptors, by device.
    pub fn new(all: HashMap<String, Vec<OwnedFd>>) -> Self {
        Self(Arc::new(Mutex::new(all)))
    }

    /// Closes the descriptors of devices for which `is_wanted` returns false. May block.
    pub fn keep(&self, is_wanted: impl Fn(&str) -> bool) {
        let mut left = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        left.retain(|device, _| is_wanted(device));
    }

    /// Removes and returns the descriptors of `device`. Empty: there were none, or they were taken
    /// before.
    pub(crate) fn take(&self, device: &str) -> Vec<OwnedFd> {
        let mut left = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        left.remove(device).unwrap_or_default()
    }
}

/// The switches of the plan, by name. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Switches {
    all: Arc<Mutex<BTreeMap<String, Running>>>,
    /// True if device processes serve the switches.
    are_apart: bool,
    adopted_fds: AdoptedFds,
}

#[derive(Debug)]
enum Running {
    /// This process serves the switch.
    Here { switch: Arc<Switch>, _uplink: Option<Uplink> },
    /// A device process serves the switch.
    Apart(Arc<SwitchHost>),
}

impl Switches {
    /// Makes the switches of a plan; `domains` says whether device processes serve them.
    /// `adopted_fds` has the queues of uplinks that the former supervisor handed over, among
    /// others. May block.
    ///
    /// # Errors
    /// An uplink cannot be opened.
    pub fn new(
        plans: &[SwitchPlan],
        domains: Domains,
        adopted_fds: &AdoptedFds,
    ) -> Result<Self, AssembleError> {
        let (are_apart, adopted_fds) = (domains != Domains::One, adopted_fds.clone());
        let switches = Self { all: Arc::default(), are_apart, adopted_fds };
        switches.made(plans)?();
        Ok(switches)
    }

    /// Opens all of these switches, or none. May block. The returned closure adds them to the
    /// table, and does not block.
    ///
    /// # Errors
    /// An uplink cannot be opened.
    pub fn made(&self, plans: &[SwitchPlan]) -> Result<impl FnOnce() + use<>, AssembleError> {
        let made = plans.iter().map(|plan| Ok((plan.name.clone(), self.made_one(plan)?)));
        let (made, of) = (made.collect::<Result<Vec<_>, AssembleError>>()?, self.clone());
        Ok(move || of.all().extend(made))
    }

    /// Opens the uplink for new settings of a switch that a device process serves. May block. The
    /// returned closure stores the settings for the next device process, and does not block.
    ///
    /// # Errors
    /// The uplink cannot be opened. [`AssembleError::NoSwitch`]: no device process serves a switch
    /// of this name.
    pub fn changed(&self, plan: &SwitchPlan) -> Result<impl FnOnce() + use<>, AssembleError> {
        let Some(host) = self.apart(&plan.name) else {
            let (at, name) = (plan.place.at("name"), plan.name.clone());
            return Err(AssembleError::NoSwitch { at, name });
        };
        let uplink = match host.has_uplink_of(plan) {
            true => host.uplink(),
            false => self.opened(plan)?.map(|port| owned(plan, port)),
        };
        let plan = plan.clone();
        Ok(move || host.change(&plan, uplink))
    }

    /// Ends a change of a switch. If it succeeded (`is_done`), drops the former settings, else
    /// restores them. Returns the interface that the switch does not use any more, which is closed
    /// when nobody else has it. May block.
    pub fn settle(&self, name: &str, is_done: bool) -> Option<Weak<dyn Port>> {
        self.apart(name)?.settle(is_done)
    }

    /// Removes these switches, whose devices have gone. Returns the interfaces of uplinks that a
    /// device process had: each is closed when nobody has it. Waits for other uplinks, so it may
    /// block.
    pub fn remove(&self, names: &[String]) -> Vec<Weak<dyn Port>> {
        let gone: Vec<_> = {
            let mut all = self.all();
            names.iter().filter_map(|name| all.remove(name)).collect()
        };
        let uplink = |running: &Running| match running {
            Running::Apart(host) => Some(Arc::downgrade(host.uplink()?.port())),
            Running::Here { .. } => None,
        };
        gone.iter().filter_map(uplink).collect()
    }

    /// Returns the switch of this name, if a device process serves it.
    pub fn apart(&self, name: &str) -> Option<Arc<SwitchHost>> {
        match self.all().get(name)? {
            Running::Apart(host) => Some(host.clone()),
            Running::Here { .. } => None,
        }
    }

    /// Returns the switches that device processes serve.
    pub fn all_apart(&self) -> Vec<Arc<SwitchHost>> {
        let apart = |running: &Running| match running {
            Running::Apart(host) => Some(host.clone()),
            Running::Here { .. } => None,
        };
        self.all().values().filter_map(apart).collect()
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Running>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn made_one(&self, plan: &SwitchPlan) -> Result<Running, AssembleError> {
        let host = self.opened(plan)?;
        if self.are_apart {
            let uplink = host.map(|port| owned(plan, port));
            return Ok(Running::Apart(SwitchHost::new(plan, uplink)));
        }
        let switch = Switch::new(of_switch(&plan.spec()));
        let carried = |host: Arc<dyn Port>| {
            let name = plan.uplink.clone().unwrap_or_default();
            let what = "carry frames for a switch to and from it";
            carried(&switch, &name, host).map_err(|errno| TapError::system(&name, what, errno))
        };
        let failed = |source| AssembleError::Port { at: plan.place.at("uplink"), source };
        let uplink = host.map(carried).transpose().map_err(failed)?;
        Ok(Running::Here { switch, _uplink: uplink })
    }

    /// Opens the interface of the uplink, if the plan has one.
    fn opened(&self, plan: &SwitchPlan) -> Result<Option<Arc<dyn Port>>, AssembleError> {
        let failed = |source| AssembleError::Port { at: plan.place.at("uplink"), source };
        let left = || self.adopted_fds.take(&domain_of_switch(&plan.name));
        let open =
            |name: &str| interface(name, plan.uplink_kind, left(), self.are_apart).map_err(failed);
        plan.uplink.as_deref().map(open).transpose()
    }

    /// Opens a switch port for a device.
    ///
    /// # Errors
    /// The switch does not exist, or all its ports are in use.
    pub(super) fn port(
        &self,
        net: &NetPlan,
        plan: &SwitchPortPlan,
        mac: MacAddress,
    ) -> Result<Arc<dyn Port>, AssembleError> {
        let at = || net.device.place.at("switch");
        let full = |source| AssembleError::Switch { at: at(), source };
        let (name, spec) = (&net.device.name, plan.spec(net.options.queue_pairs, net.mac, mac));
        match self.all().get(&plan.switch) {
            None => Err(AssembleError::NoSwitch { at: at(), name: plan.switch.clone() }),
            Some(Running::Here { switch, .. }) => {
                Ok(Arc::new(switch.port(of_switch_port(name, &spec)).map_err(full)?))
            }
            Some(Running::Apart(host)) => Ok(Arc::new(host.port(name, spec).map_err(full)?)),
        }
    }
}

/// Converts the spec of a switch to its options, in the supervisor and in device processes.
pub(crate) fn of_switch(spec: &SwitchSpec) -> SwitchOptions {
    let SwitchSpec { name, age, group_fwd_mask } = spec;
    let (age, group_fwd_mask, clock) = (*age, *group_fwd_mask, Clock::default());
    SwitchOptions { name: name.clone(), age, group_fwd_mask, clock }
}

/// Converts the spec of the switch port of device `name` to its options, in the supervisor and in
/// device processes.
pub(crate) fn of_switch_port(name: &str, spec: &SwitchPortSpec) -> PortOptions {
    let SwitchPortSpec { queue_pairs, vlans, isolated, mac, only, macs_max, floods_max } = spec;
    PortOptions {
        name: name.to_owned(),
        queue_pairs: *queue_pairs,
        vlans: match vlans {
            VlansSpec::All => Vlans::All,
            VlansSpec::Access(vlan) => Vlans::Access(*vlan),
            VlansSpec::Trunk(vlans) => Vlans::Trunk(vlans.all()),
        },
        isolated: *isolated,
        mac: *mac,
        only: *only,
        is_uplink: false,
        macs_max: *macs_max,
        floods_max: *floods_max,
    }
}

/// Starts to carry frames between a switch and the interface `name`, in the supervisor or in a
/// device process. May block.
///
/// # Errors
/// `ENOSPC`: all ports of the switch are in use. Others are the host's.
pub(crate) fn carried(
    switch: &Arc<Switch>,
    name: &str,
    host: Arc<dyn Port>,
) -> Result<Uplink, Errno> {
    let port = switch.port(PortOptions {
        macs_max: UPLINK_MACS_MAX,
        floods_max: UPLINK_FLOODS_MAX,
        is_uplink: true,
        ..PortOptions::new(name, 1)
    });
    let port = port.map_err(|_| Errno::NOSPC)?;
    Uplink::start(port, host, &format!("uplink-{}", switch.name()))
}

/// Opens an interface with one queue, and does not change its settings. `left`: the queue of the
/// tap that the former supervisor handed over, or nothing. `lends`: a device process carries the
/// frames.
fn interface(
    name: &str,
    kind: UplinkKind,
    left: Vec<OwnedFd>,
    lends: bool,
) -> Result<Arc<dyn Port>, TapError> {
    let (name, queue_pairs, mtu, up) = (name.to_owned(), 1, None, None);
    Ok(match kind {
        UplinkKind::Tap => Arc::new(tap(name, left)?),
        UplinkKind::Macvtap => {
            let (sndbuf, txqueuelen, merge) = (None, QueueLength::Host, false);
            let options = MacvtapOptions { name, queue_pairs, sndbuf, txqueuelen, merge, mtu, up };
            Arc::new(macvtap::open(&options)?)
        }
        UplinkKind::Xdp => Arc::new(XdpPort::open(&XdpOptions {
            name,
            queue_pairs,
            mtu,
            up,
            zero_copy: false,
            lends,
        })?),
    })
}

fn tap(name: String, fds: Vec<OwnedFd>) -> Result<TapPort, TapError> {
    let must_exist = false;
    TapPort::open(TapOptions {
        source: match fds.is_empty() {
            true => TapSource::Name { name, must_exist },
            false => TapSource::Left { name, must_exist, fds },
        },
        queue_pairs: 1,
        sndbuf: None,
        txqueuelen: QueueLength::Host,
        // Merging pays for one guest's bursts; here a burst has frames of several guests.
        merge: false,
        steer: false,
        mtu: None,
        bridge: None,
        up: None,
    })
}
