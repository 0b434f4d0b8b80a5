//! `SwitchHost`: the supervisor's object for a switch that a device process serves: uplink, ports,
//! and the counters for the API.

use manyring_backend::net::switch::{OFFLOADS, PORTS_MAX, PortCounters, SwitchError};
use manyring_backend::net::{Port, PortRx, PortTx};
use manyring_config::plan::{SwitchPlan, domain_of_switch};
use manyring_device::net::{NetOptions, NetSide, Offloads, OwnedPort};
use manyring_protocol::switch::{SwitchPortSpec, SwitchSpec};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tokio::sync::{OwnedMutexGuard, watch};
use tokio::task::JoinSet;

/// A switch that a device process serves.
#[derive(Debug)]
pub struct SwitchHost {
    name: String,
    settings: Mutex<Settings>,
    /// The settings before a change that may still fail; they keep the former uplink open.
    former: Mutex<Option<Settings>>,
    ports: watch::Sender<Ports>,
    /// Locked while a device process has the uplink's descriptors.
    lent: Arc<tokio::sync::Mutex<()>>,
    /// The task that watches the uplink's interface, while the switch has an uplink.
    watches: Mutex<JoinSet<()>>,
}

/// The settings of a switch that a change of the configuration can replace. The next device process
/// gets them.
#[derive(Clone, Debug)]
struct Settings {
    plan: SwitchPlan,
    uplink: Option<Arc<OwnedPort>>,
}

/// Wraps the port of a switch's uplink as the supervisor's object for an interface, which serves
/// the requests of the device process.
pub(super) fn owned(plan: &SwitchPlan, port: Arc<dyn Port>) -> Arc<OwnedPort> {
    let options = NetOptions { name: domain_of_switch(&plan.name), ..NetOptions::default() };
    Arc::new(OwnedPort::new(options, port))
}

/// The ports of a switch, by device. Each port has a number, so that a port can be told from a
/// later one of the same name.
#[derive(Debug, Default)]
pub struct Ports {
    next: u64,
    all: BTreeMap<String, Numbered>,
}

/// A switch port with its number.
type Numbered = (u64, Arc<SwitchPortSpec>);

impl Ports {
    /// Returns a port that differs from what a device process was told, with its device's name;
    /// `None` in place of the port: the port was removed. `told` has the number of each port that
    /// the process knows.
    pub fn untold(&self, told: &BTreeMap<String, u64>) -> Option<(String, Option<Numbered>)> {
        let gone = told.keys().find(|name| !self.all.contains_key(*name));
        if let Some(name) = gone {
            return Some((name.clone(), None));
        }
        let is_new = |name: &String, number: u64| told.get(name) != Some(&number);
        let (name, port) = self.all.iter().find(|(name, port)| is_new(name, port.0))?;
        Some((name.clone(), Some(port.clone())))
    }
}

impl SwitchHost {
    /// Makes the supervisor's object for a switch. `uplink`: the interface that the supervisor has
    /// opened; `None`: the switch has no uplink.
    pub fn new(plan: &SwitchPlan, uplink: Option<Arc<OwnedPort>>) -> Arc<Self> {
        let settings = Mutex::new(Settings { plan: plan.clone(), uplink });
        let (name, ports) = (plan.name.clone(), watch::Sender::default());
        let (former, lent, watches) = Default::default();
        Arc::new(Self { name, settings, former, ports, lent, watches })
    }

    fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the name of the switch in the configuration.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the spec of the switch for a device process, and the uplink's interface.
    pub fn given(&self) -> (SwitchSpec, Option<Arc<OwnedPort>>) {
        let Settings { plan, uplink } = &*self.settings();
        (plan.spec(), uplink.clone())
    }

    /// Returns the interface of the uplink, if the switch has an uplink.
    pub fn uplink(&self) -> Option<Arc<OwnedPort>> {
        self.settings().uplink.clone()
    }

    /// True if the plan names the same uplink as the present settings.
    pub(super) fn has_uplink_of(&self, plan: &SwitchPlan) -> bool {
        let now = &self.settings().plan;
        (&now.uplink, now.uplink_kind) == (&plan.uplink, plan.uplink_kind)
    }

    /// Replaces the settings; the next device process gets them. The caller must call
    /// [`Self::settle`] later.
    pub(super) fn change(&self, plan: &SwitchPlan, uplink: Option<Arc<OwnedPort>>) {
        let settings = Settings { plan: plan.clone(), uplink };
        let now = self.replace(settings);
        let mut former = self.former.lock().unwrap_or_else(PoisonError::into_inner);
        // Keep the oldest settings: if the change fails, they are restored, although the change had
        // several steps.
        former.get_or_insert(now);
    }

    /// Ends a change: drops the former settings if it succeeded (`is_done`), else restores them.
    /// Returns the interface that the switch does not use any more. May block.
    pub(super) fn settle(&self, is_done: bool) -> Option<Weak<dyn Port>> {
        let former = self.former.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let left = if is_done { former } else { self.replace(former) }.uplink?;
        let is_used = self.uplink().is_some_and(|now| Arc::ptr_eq(&now, &left));
        (!is_used).then(|| Arc::downgrade(left.port()))
    }

    fn replace(&self, settings: Settings) -> Settings {
        let interface = |of: &Settings| of.uplink.as_ref().map(Arc::as_ptr);
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        let mut now = self.settings();
        if interface(&now) != interface(&settings) {
            // Stop watching the interface that is replaced.
            *watches = JoinSet::new();
        }
        std::mem::replace(&mut *now, settings)
    }

    /// Returns a receiver of the ports, which is notified of each change.
    pub fn ports(&self) -> watch::Receiver<Ports> {
        self.ports.subscribe()
    }

    /// Waits until no device process has the uplink. No device process gets the uplink before the
    /// returned guard is dropped.
    pub async fn unlent(&self) -> OwnedMutexGuard<()> {
        self.lent.clone().lock_owned().await
    }

    /// Starts to watch the interface of the uplink, as long as this object lives.
    pub fn watch(&self) {
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        if let (true, Some(uplink)) = (watches.is_empty(), self.uplink()) {
            watches.spawn(async move { uplink.look_after_port().await });
        }
    }

    /// Makes a port for the device of this name.
    ///
    /// # Errors
    /// [`SwitchError::Full`]: all ports are in use.
    pub fn port(
        self: &Arc<Self>,
        name: &str,
        spec: SwitchPortSpec,
    ) -> Result<SwitchedPort, SwitchError> {
        let (queue_pairs, of_uplink) = (spec.queue_pairs, usize::from(self.uplink().is_some()));
        let mut number = None;
        self.ports.send_if_modified(|ports| {
            let has_room = ports.all.len() + of_uplink < PORTS_MAX;
            if has_room {
                ports.next += 1;
                number = Some(ports.next);
                ports.all.insert(name.to_owned(), (ports.next, Arc::new(spec)));
            }
            has_room
        });
        let number = number.ok_or(SwitchError::Full)?;
        let (switch, name) = (self.clone(), name.to_owned());
        Ok(SwitchedPort { switch, name, number, queue_pairs, counters: PortCounters::default() })
    }
}

/// The supervisor's object for a switch port that a device process serves: it shows the counters of
/// the device process. Dropping it removes the port from the switch.
#[derive(Debug)]
pub struct SwitchedPort {
    switch: Arc<SwitchHost>,
    name: String,
    number: u64,
    queue_pairs: usize,
    counters: PortCounters,
}

impl Drop for SwitchedPort {
    fn drop(&mut self) {
        self.switch.ports.send_if_modified(|ports| {
            let is_own = ports.all.get(&self.name).is_some_and(|port| port.0 == self.number);
            is_own && ports.all.remove(&self.name).is_some()
        });
    }
}

impl Port for SwitchedPort {
    fn kind(&self) -> &'static str {
        "switch"
    }

    fn interface(&self) -> Option<&str> {
        Some(&self.switch.name)
    }

    fn queue_pairs(&self) -> usize {
        self.queue_pairs
    }

    fn taken(&self) -> Offloads {
        OFFLOADS
    }

    fn given(&self) -> Offloads {
        OFFLOADS
    }

    fn mtu(&self) -> Option<u16> {
        None
    }

    // The device process has the queues, and applies the guest's settings.
    fn open_tx(&self, _index: usize) -> Result<Box<dyn PortTx>, Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn open_rx(&self, _index: usize) -> Result<Box<dyn PortRx>, Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn set_offloads(&self, _offloads: Offloads) -> Result<(), Errno> {
        Ok(())
    }

    fn set_attached(&self, _index: usize, _attached: bool) -> Result<(), Errno> {
        Ok(())
    }

    fn set_mtu(&self, _mtu: u16) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn set_link(&self, _up: bool) {}

    fn counted(&self) -> Option<&PortCounters> {
        Some(&self.counters)
    }

    fn transmit(&self, _frame: &[u8]) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_config::parse;
    use manyring_protocol::switch::VlansSpec;

    fn host() -> Arc<SwitchHost> {
        SwitchHost::new(
            &parse("[[switch]]\nname = 's0'\n[[net]]\nsocket_path = '/s'\nnull = true\n")
                .unwrap()
                .switch[0],
            None,
        )
    }

    fn port() -> SwitchPortSpec {
        SwitchPortSpec {
            queue_pairs: 1,
            vlans: VlansSpec::All,
            isolated: false,
            mac: None,
            only: None,
            macs_max: 8,
            floods_max: 1000,
        }
    }

    #[test]
    fn a_device_process_is_told_of_each_port_once_and_of_its_end() {
        let (host, mut told) = (host(), BTreeMap::new());
        let ports = host.ports();
        let mut tell = || {
            let (name, port) = ports.borrow().untold(&told)?;
            match &port {
                Some((number, _)) => told.insert(name.clone(), *number),
                None => told.remove(&name),
            };
            Some((name, port.is_some()))
        };
        let is = |name: &str, is_there| Some((name.to_owned(), is_there));
        let open = |name| host.port(name, port()).unwrap();
        let (a, b) = (open("a"), open("b"));
        assert_eq!([tell(), tell(), tell()], [is("a", true), is("b", true), None]);
        drop(b);
        assert_eq!([tell(), tell()], [is("b", false), None]);
        // A port of the same name that comes before the old one goes stays.
        let next = open("a");
        drop(a);
        assert_eq!([tell(), tell()], [is("a", true), None]);
        drop(next);
        assert_eq!([tell(), tell()], [is("a", false), None]);
    }

    #[test]
    fn a_switch_has_as_many_ports_as_its_device_process_can_serve() {
        let host = host();
        let open = |n: usize| host.port(&n.to_string(), port());
        let mut all: Vec<_> = (0..PORTS_MAX).map(|n| open(n).unwrap()).collect();
        assert_eq!(open(PORTS_MAX).err(), Some(SwitchError::Full));
        all.pop();
        assert!(open(PORTS_MAX).is_ok());
    }
}
