//! Plan -> switches, with their uplinks; and the ports of devices.

use super::AssembleError;
use super::remote::{AdoptedExports, Measurer};
use manyring_backend::net::Port;
use manyring_backend::net::switch::uplink::Uplink;
use manyring_backend::net::switch::{Clock, PortOptions, Switch, SwitchOptions, SwitchPort};
use manyring_backend::net::tap::macvtap::{self, MacvtapOptions};
use manyring_backend::net::tap::{TapError, TapOptions, TapPort, TapSource};
use manyring_backend::net::xdp::{XdpOptions, XdpPort};
use manyring_config::plan::{Domains, NetPlan, SwitchPlan, SwitchPortPlan, UplinkKind};
use manyring_device::net::MacAddress;
use rustix::fd::OwnedFd;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Addresses behind an uplink at most: those of a host's network.
const UPLINK_MACS_MAX: u32 = 1024;
/// Frames that an uplink may flood in a second.
const UPLINK_FLOODS_MAX: u32 = 20_000;

/// The means by which this process opens devices.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    pub(crate) io_uring: bool,
    pub(crate) switches: Switches,
    pub(crate) adopted_fds: AdoptedFds,
    pub(crate) adopted_exports: AdoptedExports,
    /// The folder of the sockets of helpers.
    pub(crate) helpers: Option<PathBuf>,
    /// Which devices are served by a process of their own.
    pub(crate) domains: Domains,
    /// Measures the disks of servers for device processes; `None`: there are none.
    pub(crate) measurer: Option<Arc<dyn Measurer>>,
}

/// The file descriptors that another process has left to this one, by device: the description that
/// holds a disk, or the queues of a tap. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct AdoptedFds(Arc<Mutex<HashMap<String, Vec<OwnedFd>>>>);

impl AdoptedFds {
    pub(crate) fn new(all: HashMap<String, Vec<OwnedFd>>) -> Self {
        Self(Arc::new(Mutex::new(all)))
    }

    /// Releases what was left for devices that are not wanted any more. May block.
    pub(crate) fn keep(&self, is_wanted: impl Fn(&str) -> bool) {
        let mut left = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        left.retain(|device, _| is_wanted(device));
    }

    /// Takes what was left for `device`. Empty: nothing was left, or it was taken before.
    pub(crate) fn take(&self, device: &str) -> Vec<OwnedFd> {
        let mut left = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        left.remove(device).unwrap_or_default()
    }
}

/// The switches of the process, by name. Clones are the same switches.
#[derive(Clone, Debug, Default)]
pub(crate) struct Switches(Arc<Mutex<BTreeMap<String, Running>>>);

#[derive(Debug)]
struct Running {
    switch: Arc<Switch>,
    _uplink: Option<Uplink>,
}

impl Switches {
    /// Makes the switches of a plan. May block.
    ///
    /// # Errors
    /// An uplink cannot be opened.
    pub(crate) fn new(plans: &[SwitchPlan]) -> Result<Self, AssembleError> {
        let switches = Self::default();
        switches.add(plans)?;
        Ok(switches)
    }

    /// Makes these switches: all of them, or none. May block.
    ///
    /// # Errors
    /// An uplink cannot be opened.
    pub(crate) fn add(&self, plans: &[SwitchPlan]) -> Result<(), AssembleError> {
        let made = plans.iter().map(|plan| Ok((plan.name.clone(), Running::new(plan)?)));
        let made = made.collect::<Result<Vec<_>, AssembleError>>()?;
        self.all().extend(made);
        Ok(())
    }

    /// Removes these switches, whose devices have gone. Waits for their uplinks, so it may block.
    pub(crate) fn remove(&self, names: &[String]) {
        let gone: Vec<_> = {
            let mut all = self.all();
            names.iter().filter_map(|name| all.remove(name)).collect()
        };
        drop(gone);
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Running>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A port for a device.
    ///
    /// # Errors
    /// There is no such switch in this process, or it has no port left.
    pub(super) fn port(
        &self,
        net: &NetPlan,
        plan: &SwitchPortPlan,
        mac: MacAddress,
    ) -> Result<SwitchPort, AssembleError> {
        let at = |key: &str| net.device.place.at(key);
        let switch = self.all().get(&plan.switch).map(|running| running.switch.clone());
        let Some(switch) = switch else {
            return Err(AssembleError::NoSwitch { at: at("switch"), name: plan.switch.clone() });
        };
        let options = PortOptions {
            name: net.device.name.clone(),
            queue_pairs: net.queue_pairs,
            vlans: plan.vlans(),
            isolated: plan.isolated,
            mac: net.mac,
            only: plan.anti_spoof.then_some(mac),
            is_uplink: false,
            macs_max: plan.macs_max,
            floods_max: plan.floods_max,
        };
        let full = |source| AssembleError::Switch { at: at("switch"), source };
        switch.port(options).map_err(full)
    }
}

impl Running {
    fn new(plan: &SwitchPlan) -> Result<Self, AssembleError> {
        let SwitchPlan { age, group_fwd_mask, .. } = *plan;
        let (name, clock) = (plan.name.clone(), Clock::default());
        let switch = Switch::new(SwitchOptions { name, age, group_fwd_mask, clock });
        let failed = |source| AssembleError::Port { at: plan.place.at("uplink"), source };
        let open = |name| uplink(&switch, name, plan.uplink_kind).map_err(failed);
        let uplink = plan.uplink.as_deref().map(open);
        Ok(Self { switch, _uplink: uplink.transpose()? })
    }
}

/// Opens an interface as the uplink of a switch.
fn uplink(switch: &Arc<Switch>, name: &str, kind: UplinkKind) -> Result<Uplink, TapError> {
    let system = |errno| TapError::system(name, "carry frames for a switch to and from it", errno);
    let host = interface(name, kind)?;
    let port = switch.port(PortOptions {
        macs_max: UPLINK_MACS_MAX,
        floods_max: UPLINK_FLOODS_MAX,
        is_uplink: true,
        ..PortOptions::new(name, 1)
    });
    let port = port.map_err(|_| system(rustix::io::Errno::NOSPC))?;
    let thread = format!("uplink-{}", switch.name());
    Uplink::start(port, host, &thread).map_err(system)
}

/// Opens an interface with one queue, and leaves it as it is.
fn interface(name: &str, kind: UplinkKind) -> Result<Arc<dyn Port>, TapError> {
    let (name, queue_pairs, mtu, up) = (name.to_owned(), 1, None, None);
    Ok(match kind {
        UplinkKind::Tap => Arc::new(tap(name)?),
        UplinkKind::Macvtap => {
            let (sndbuf, txqueuelen, merge) = (None, None, false);
            let options = MacvtapOptions { name, queue_pairs, sndbuf, txqueuelen, merge, mtu, up };
            Arc::new(macvtap::open(&options)?)
        }
        UplinkKind::Xdp => {
            Arc::new(XdpPort::open(&XdpOptions { name, queue_pairs, mtu, up, zero_copy: false })?)
        }
    })
}

fn tap(name: String) -> Result<TapPort, TapError> {
    TapPort::open(TapOptions {
        source: TapSource::Name { name, must_exist: false },
        queue_pairs: 1,
        sndbuf: None,
        txqueuelen: None,
        // A burst whose frames come from several guests is offered once.
        merge: false,
        steer: false,
        mtu: None,
        bridge: None,
        up: None,
    })
}
