//! A device process that serves a switch: it gets the switch and its uplink first, then all ports,
//! and then the devices whose front-ends connect.
//!
//! ```text
//! process starts   switch + the uplink's queue, once the former process has released the uplink;
//!                  sockets of AF_XDP, and a queue that cannot be opened now, come later: frames
//!                  between guests need no uplink
//! before a device  every port that the process was not told of (`knows_ports`)
//! afterwards       ports that come and go; what happens to the uplink's interface
//! ```
//! So the addresses, VLANs and guards of all ports are there before the first frame of a guest.

use super::Processes;
use super::domain_members::{PendingRequest, ServedSwitch, lock};
use super::handoff::{DeviceHandoff, HandoffMessage};
use super::lease_holders::Leases;
use super::limits::Limits;
use super::process::DeviceProcess;
use super::process_state::State;
use super::request_server::{RequestServer, left_of, lent, not_lent};
use manyring_config::plan::domain_of_switch;
use manyring_device::Owned;
use manyring_device::net::{NetSide, OwnedPort};
use manyring_engine::aside;
use manyring_protocol::message::Command;
use manyring_serve::assemble::{Ports, SwitchHost};
use std::collections::btree_map::Entry;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};

/// Gives the switch to its process, and serves its privileged requests for the uplink until the
/// process has quiesced or ended.
pub(super) async fn keep_switch(process: Arc<DeviceProcess>) {
    let Some(ServedSwitch { host, is_given, asked, .. }) = process.switch() else { return };
    let Some(asked) = lock(asked).take() else { return };
    let _lent = host.unlent().await;
    let (spec, owned) = host.given();
    let (joins, (uplink, fds)) = match &owned {
        None => (None, (None, Vec::new())),
        Some(uplink) if is_xdp(uplink) => (None, (Some(not_lent(uplink)), Vec::new())),
        Some(uplink) => match lent(uplink).await {
            Ok((joins, lent)) => (Some(joins), lent),
            Err(error) => {
                let (switch, interface) = (host.name(), uplink.port().interface());
                tracing::warn!(
                    switch,
                    interface,
                    error,
                    "handing over the uplink failed; the guests reach each other alone; retrying"
                );
                (None, (Some(not_lent(uplink)), Vec::new()))
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

/// True if the uplink is an interface by AF_XDP. Its sockets are sent only when the interface
/// exists and all sockets of the former process are closed: a process that still has one could send
/// on the interface.
fn is_xdp(uplink: &OwnedPort) -> bool {
    uplink.port().kind() == "xdp"
}

/// Serves the process's privileged requests for the uplink until the process has quiesced or ended.
async fn serve_uplink(
    process: &Arc<DeviceProcess>,
    host: &SwitchHost,
    (uplink, joins): (Option<Arc<OwnedPort>>, Option<u64>),
    asked: mpsc::Receiver<PendingRequest>,
) {
    let Some(uplink) = uplink else { return process.ended().await };
    host.watch();
    // The interface was not watched while no process had it: check its state.
    uplink.port_may_have_changed();
    let device = uplink.name().to_owned();
    let (owned, process) = (Owned::Port(uplink), process.clone());
    // An uplink has no limit, alone or in a group.
    let limits = watch::channel(Arc::new(Limits::default())).1;
    let (marks, remote) = (None, None);
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

    /// Sends the process the ports of the switch that were added or removed since the last call.
    async fn tell_ports(&self, switch: &ServedSwitch, ports: &mut watch::Receiver<Ports>) {
        let mut told = switch.told.lock().await;
        ports.mark_unchanged();
        while self.serves() && ports.borrow().untold(&told).is_some() {
            let Ok(place) = self.place().await else { return };
            // Nothing is awaited from here on: a dropped future must not leave a port in `told`
            // that was not sent to the process.
            let Some((device, port)) = ports.borrow().untold(&told) else { return };
            match &port {
                Some((number, _)) => told.insert(device.clone(), *number),
                None => told.remove(&device),
            };
            let port = port.map(|(_, spec)| (*spec).clone());
            place.send((Command::SwitchPort { device, port }, Vec::new()));
        }
    }

    /// Sends the process each port that is added or removed, until the process ends.
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
    /// Ends the device process of a switch that is removed; returns when the process has released
    /// the uplink, or when the kernel does not end the process. The caller may drop the future
    /// earlier: a task closes the supervisor's uplink when the process has ended.
    pub(crate) async fn end_switch(&self, name: &str) {
        let domain = domain_of_switch(name);
        let process = self.lock().get(&domain).map(|kept| kept.process.clone());
        let Some(process) = process else { return };
        process.leave("its switch is removed");
        let (processes, ending) = (self.clone(), process.clone());
        let forgets = tokio::spawn(async move { processes.forget_switch(ending).await });
        process.ended_or_stuck().await;
        if process.state() == State::Stuck {
            tracing::error!(
                switch = name,
                process = domain,
                "the kernel has not ended the device process of a removed switch; its uplink stays \
                 in use until then"
            );
            return;
        }
        drop(process);
        let _ = forgets.await;
    }

    /// Forgets the device process of a removed switch when it has ended. The entry has the last
    /// copy of the uplink, which would stay open.
    async fn forget_switch(&self, process: Arc<DeviceProcess>) {
        process.ended().await;
        if let Some(switch) = process.switch() {
            drop(switch.host.unlent().await);
        }
        let entry = match self.lock().entry(process.name().to_owned()) {
            // A switch that was added later may have this name, and another process.
            Entry::Occupied(kept) if Arc::ptr_eq(&kept.get().process, &process) => {
                Some(kept.remove())
            }
            _ => None,
        };
        // Closing an interface may block.
        aside(move || drop((entry, process))).await;
    }

    /// Ends the device process of a switch; the next one is started with the present settings.
    pub(crate) fn restart_switch(&self, name: &str) {
        let process = self.lock().get(&domain_of_switch(name)).map(|kept| kept.process.clone());
        if let Some(process) = process {
            process.leave("its switch has other settings");
        }
    }

    /// Returns the switches whose uplink is an AF_XDP interface, which has this supervisor's XDP
    /// program.
    pub(super) fn bound_uplinks(&self) -> Vec<String> {
        let is_bound = |host: &Arc<SwitchHost>| host.uplink().is_some_and(|uplink| is_xdp(&uplink));
        let all = self.switches.all_apart().into_iter().filter(is_bound);
        all.map(|host| host.name().to_owned()).collect()
    }

    /// Returns the messages that hand the uplinks of all switches to another supervisor. The device
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
            // The process of a switch without front-ends was not asked to quiesce.
            if let Some(process) = process.filter(|process| process.serves()) {
                process.end_yielding("a takeover by another daemon is under way").await;
            }
            drop(host.unlent().await);
            for fds in left_of(&Owned::Port(uplink)).await? {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes::domain_members::DomainMembers;
    use crate::processes::{Handoff, Serving};
    use manyring_backend::net::tap::lent::Lent;
    use manyring_backend::net::{Port, PortRx, PortTx};
    use manyring_config::parse;
    use manyring_config::plan::Domains;
    use manyring_device::net::{NetOptions, Offloads};
    use manyring_engine::Surplus;
    use manyring_protocol::switch::{SwitchPortSpec, VlansSpec};
    use manyring_serve::assemble::AdoptedFds;
    use manyring_serve::assemble::Switches;
    use rustix::io::Errno;
    use std::collections::BTreeMap;
    use std::pin::pin;
    use std::task::{Context, Waker};
    use std::time::Duration;
    use tokio::runtime::{Builder, Runtime};
    use tokio::time::{Instant, timeout};

    /// A switch `s0` that a device process serves.
    fn host() -> Arc<SwitchHost> {
        let keys = "[[switch]]\nname = 's0'\n[[net]]\nsocket_path = '/s'\nnull = true\n";
        let plans = parse(keys).unwrap().switch;
        let switches = Switches::new(&plans, Domains::Device, &AdoptedFds::default()).unwrap();
        switches.apart("s0").unwrap()
    }

    fn port(isolated: bool) -> SwitchPortSpec {
        let (vlans, floods_max) = (VlansSpec::All, 1000);
        let (mac, only, queue_pairs, macs_max) = (None, None, 1, 8);
        SwitchPortSpec { queue_pairs, vlans, isolated, mac, only, macs_max, floods_max }
    }

    /// An interface whose queues the host does not give.
    #[derive(Debug)]
    struct Refused;

    impl Port for Refused {
        fn kind(&self) -> &'static str {
            "macvtap"
        }
        fn interface(&self) -> Option<&str> {
            Some("up0")
        }
        fn queue_pairs(&self) -> usize {
            1
        }
        fn taken(&self) -> Offloads {
            Offloads::default()
        }
        fn given(&self) -> Offloads {
            Offloads { csum: true, ..Offloads::default() }
        }
        fn mtu(&self) -> Option<u16> {
            Some(1400)
        }
        fn open_tx(&self, _: usize) -> Result<Box<dyn PortTx>, Errno> {
            Err(Errno::INVAL)
        }
        fn open_rx(&self, _: usize) -> Result<Box<dyn PortRx>, Errno> {
            Err(Errno::INVAL)
        }
        fn set_offloads(&self, _: Offloads) -> Result<(), Errno> {
            Ok(())
        }
        fn set_attached(&self, _: usize, _: bool) -> Result<(), Errno> {
            Ok(())
        }
        fn set_mtu(&self, _: u16) -> Result<(), Errno> {
            Ok(())
        }
        fn set_link(&self, _: bool) {}
        fn transmit(&self, _: &[u8]) -> Result<(), Errno> {
            Ok(())
        }
        fn lend(&self, _: &dyn Fn() -> bool) -> Option<Result<Lent, Errno>> {
            Some(Err(Errno::MFILE))
        }
    }

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// A switch `s0` with an uplink.
    fn host_with_uplink() -> (Arc<SwitchHost>, Arc<OwnedPort>) {
        let options = NetOptions { name: "switch:s0".to_owned(), ..NetOptions::default() };
        let uplink = Arc::new(OwnedPort::new(options, Arc::new(Refused)));
        let keys = "[[switch]]\nname = 's0'\n[[net]]\nsocket_path = '/s'\nnull = true\n";
        let plan = &parse(keys).unwrap().switch[0];
        (SwitchHost::new(plan, Some(uplink.clone())), uplink)
    }

    /// A device process for the switch. Nobody polls the task of `starts` that would start it.
    fn unstarted(starts: &Runtime, host: Arc<SwitchHost>) -> Serving {
        let _guard = starts.enter();
        let members = DomainMembers::of("switch:s0", Surplus::default());
        let process = DeviceProcess::start("switch:s0", Arc::new([]), members, Some(host));
        let (started, pause) = (Instant::now(), Duration::ZERO);
        Serving { process, workers: 1, started, starts: 1, pause }
    }

    #[test]
    fn a_removed_switch_closes_its_uplink_when_its_process_ends_late() {
        // The kernel does not end the process within the time of the change, or says so earlier.
        for (is_stuck, has_next) in [(false, false), (true, false), (false, true), (true, true)] {
            let switches = Switches::new(&[], Domains::Device, &AdoptedFds::default()).unwrap();
            let processes = Processes::new(Vec::new(), &mut Handoff::default(), switches);
            let (starts, starts_next) = (runtime(), runtime());
            let (removed, uplink) = host_with_uplink();
            let serving = unstarted(&starts, removed);
            processes.lock().insert("switch:s0".to_owned(), serving);
            let uplink = Arc::downgrade(&{ uplink });
            runtime().block_on(async {
                let process = processes.lock()["switch:s0"].process.clone();
                if is_stuck {
                    process.set_state(State::Stuck);
                }
                let ends = processes.end_switch("s0");
                assert_eq!(timeout(Duration::from_millis(20), ends).await.is_ok(), is_stuck);
                assert!(uplink.strong_count() > 0, "the process may still have it");
                if has_next {
                    let next = unstarted(&starts_next, host());
                    processes.lock().insert("switch:s0".to_owned(), next);
                }
                process.set_state(State::Ended);
                drop(process);
                starts.shutdown_background();
                let is_closed = async {
                    while uplink.strong_count() > 0 {
                        tokio::task::yield_now().await;
                    }
                };
                assert!(timeout(Duration::from_secs(20), is_closed).await.is_ok(), "it is open");
                assert_eq!(processes.lock().contains_key("switch:s0"), has_next);
            });
        }
    }

    #[test]
    fn a_switch_is_given_without_an_uplink_that_the_host_refuses_and_its_process_goes_on() {
        let runtime = runtime();
        let _guard = runtime.enter();
        let (host, uplink) = host_with_uplink();
        let members = DomainMembers::of("switch:s0", Surplus::default());
        // Nobody polls the task that would start the process.
        let process = DeviceProcess::start("switch:s0", Arc::new([]), members, Some(host));
        let (places, switch) = (process.places(), process.switch().unwrap());
        let mut keeps = Box::pin(keep_switch(process.clone()));
        while !*switch.is_given.borrow() {
            let context = &mut Context::from_waker(Waker::noop());
            assert!(keeps.as_mut().poll(context).is_pending(), "it looks after the uplink");
            assert!(process.serves(), "its guests need no uplink for each other");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(process.places() < places, "the process is told of its switch");
        let facts = not_lent(&uplink);
        assert_eq!((facts.interface.as_str(), facts.is_macvtap), ("up0", true));
        assert_eq!((facts.mtu, facts.chunk), (Some(1400), None));
        assert_ne!(facts.offloads, 0, "the queue that comes later has them");
    }

    #[test]
    fn a_port_of_which_a_front_that_stops_did_not_tell_is_told_of_by_the_next_one() {
        // The ports, and then one of them with other settings.
        for (places, changes) in [(0, false), (1, false), (2, false), (1, true), (0, true)] {
            let runtime = runtime();
            let _guard = runtime.enter();
            let members = DomainMembers::of("switch:s0", Surplus::default());
            let host = host();
            // Nobody polls the task that would start the process.
            let process =
                DeviceProcess::start("switch:s0", Arc::new([]), members, Some(host.clone()));
            let switch = process.switch().unwrap();
            switch.is_given.send_replace(true);
            let mut context = Context::from_waker(Waker::noop());
            let (_a, _b) = (host.port("a", port(false)).unwrap(), host.port("b", port(false)));
            let mut former = BTreeMap::new();
            if changes {
                assert!(pin!(process.knows_ports()).poll(&mut context).is_ready());
                former = switch.told.try_lock().unwrap().clone();
            }
            let _c = changes.then(|| {
                let c = host.port("c", port(false)).unwrap();
                (c, host.port("b", port(true)).unwrap())
            });
            while process.places() > places {
                process.tell(Command::Ping { number: 0 }, Vec::new()).unwrap();
            }
            {
                let mut tells = Box::pin(process.knows_ports());
                let is_told = tells.as_mut().poll(&mut context).is_ready();
                assert_eq!(is_told, places == 2, "{places} places");
                // The device of this front is removed, or the daemon is to be taken over.
            }
            assert_eq!(process.places(), 0, "what had room was sent");
            let told = switch.told.try_lock().unwrap().clone();
            let new = told.iter().filter(|(name, number)| former.get(*name) != Some(*number));
            assert_eq!(new.count(), places, "told of {told:?}, after {former:?}");
        }
    }
}
