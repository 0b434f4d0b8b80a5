//! The settings of a driver: reset when a driver begins, saved for another process, and restored
//! from a state that another process saved.
//!
//! A saved state has the values that the driver was told, and commands of the control queue in the
//! driver's format, so that one parser serves both. To restore the state, the commands are carried
//! out again.

use super::commands::needs;
use super::port::HasPort;
use super::rules::{Filter, VLAN_BYTES};
use super::{Inner, State};
use crate::state::{Saved, StateError, StateRecord};
use manyring_engine::Activation;
use manyring_queue::RingFeatures;
use manyring_wire::net::{
    Command, MacAddress, Offloads, QueueCoalescing, RxMode, VIRTIO_NET_F_CTRL_VLAN,
    VIRTIO_NET_F_CTRL_VQ, is_mtu,
};
use manyring_wire::virtio::VIRTIO_ID_NET;

/// Record: the MAC address, the MTU (16 bits, 0: none) and whether the guest is asked to announce
/// itself.
const TOLD: u16 = 1;
/// Record: a command of the control queue.
const COMMAND: u16 = 2;
/// Record: the VLANs of the filter, one bit each, which is shorter than a command for each.
const VLANS: u16 = 3;

/// The state of a driver from another process, parsed and checked.
#[derive(Debug)]
pub(super) struct Arrival {
    features: u64,
    mac: MacAddress,
    mtu_told: Option<u16>,
    announces: bool,
    commands: Vec<Command>,
    vlans: [u8; VLAN_BYTES],
}

impl Inner {
    /// Resets the driver's settings, and keeps the operator's.
    fn reset(&self, state: &mut State, features: u64) {
        state.features = features;
        state.drivers += 1;
        state.announces = false;
        state.mac = self.options.mac;
        if features == 0 {
            // Forget the MTU only at features 0: the front-end sends the MTU before the features.
            state.mtu_front_end = None;
        }
        state.mtu_told = state.mtu_front_end.or(state.port.mtu);
        state.filter = None;
        state.pairs_in_use = 1;
        (state.port.rss, state.hash) = (None, None);
        (state.coalescing_tx, state.coalescing_rx) = (None, None);
        for vq in &mut state.vqs {
            (vq.coalescing, vq.is_restored) = (None, false);
        }
        state.port.given = Offloads::of_guest(features);
    }

    pub(super) async fn set_features(&self, features: u64) {
        let arrival = {
            let mut state = self.state();
            let arrival = state.awaited.take().filter(|arrival| arrival.features == features);
            // QEMU sends the features once for each pair: equal features again change nothing. A
            // front-end that leaves the control queue to this device sends them once for each
            // driver: then equal features mean that another driver begins.
            let is_same = features != 0 && state.features == features && !state.has_control;
            if is_same && arrival.is_none() {
                return;
            }
            self.reset(&mut state, features);
            arrival
        };
        if let Some(arrival) = arrival {
            self.welcome(arrival);
        }
        self.follow(features).await;
    }

    /// Passes the driver's settings to host and workers.
    async fn follow(&self, features: u64) {
        // Without features there is no driver to receive frames, and the next driver usually takes
        // the same offloads: so skip the calls of the host.
        if features != 0 {
            self.apply_offloads().await;
            self.apply_rss().await;
        }
        self.push_rules().await;
    }

    /// Begins to serve the control queue. Unless its ring `goes_on`, resets the driver's settings.
    pub(super) fn begin_control(&self, goes_on: bool) {
        let mut state = self.state();
        let features = state.features;
        if !goes_on {
            self.reset(&mut state, features);
        }
        let mac = state.mac;
        state.filter.get_or_insert_with(|| new_filter(mac, features));
        state.has_control = true;
    }

    /// True if the ring of an activation continues where it was stopped, in this or in another
    /// process: then the driver's settings are kept. Must be called once for each activation,
    /// because the next ring may be another driver's.
    pub(super) fn goes_on(&self, activation: &Activation) -> bool {
        let ring = RingFeatures::from_bits(activation.features);
        let is_new = activation.queue.base().is_start(ring);
        let vq = &mut self.state().vqs[activation.index];
        std::mem::take(&mut vq.is_restored) || !is_new
    }

    /// Returns the driver's settings. No ring may run.
    pub(super) fn save(&self) -> Saved {
        let state = self.state();
        let mut saved = Saved::new(VIRTIO_ID_NET, state.features);
        let mut told = state.mac.to_vec();
        told.extend(state.mtu_told.unwrap_or(0).to_le_bytes());
        told.push(u8::from(state.announces));
        saved.add(TOLD, told);
        if let Some(vlans) = state.filter.as_ref().and_then(Filter::vlans) {
            saved.add(VLANS, vlans);
        }
        let may = |command: &Command| needs(command) & state.features != 0;
        for command in self.commands_of(&state).into_iter().filter(may) {
            saved.add(COMMAND, command.emit());
        }
        saved
    }

    /// Returns the commands that give another driver, which has set nothing, the settings of this
    /// one.
    fn commands_of(&self, state: &State) -> Vec<Command> {
        let mut commands = Vec::new();
        if let Some(filter) = &state.filter {
            commands.extend(RxMode::ALL.map(|mode| Command::Rx(mode, filter.mode(mode))));
            commands.push(Command::MacTable(filter.table()));
        }
        commands.push(Command::GuestOffloads(state.port.given.guest_features()));
        if let Ok(pairs) = u16::try_from(state.pairs_in_use) {
            commands.push(Command::QueuePairs(pairs));
        }
        commands.extend(state.port.rss.as_ref().map(|rss| Command::Rss(rss.config().clone())));
        commands.extend(state.hash.as_ref().map(|hash| Command::Hash(hash.config().clone())));
        commands.extend(state.coalescing_tx.map(Command::CoalesceTx));
        commands.extend(state.coalescing_rx.map(Command::CoalesceRx));
        let own = |(index, vq): (u16, &super::Vq)| {
            let of = |coalescing| Command::CoalesceQueue(QueueCoalescing { index, coalescing });
            vq.coalescing.map(of)
        };
        commands.extend((0..).zip(&state.vqs).filter_map(own));
        commands
    }

    /// Adopts a saved state; if the driver's features are not known yet, stores it until they are.
    pub(super) async fn restore(&self, saved: &Saved) -> Result<(), StateError> {
        let arrival = self.look_through(saved)?;
        let features = arrival.features;
        {
            let mut state = self.state();
            if state.features != features {
                state.awaited = Some(arrival);
                return Ok(());
            }
            state.awaited = None;
            self.reset(&mut state, features);
        }
        self.welcome(arrival);
        self.follow(features).await;
        Ok(())
    }

    fn look_through(&self, saved: &Saved) -> Result<Arrival, StateError> {
        let mut arrival = Arrival {
            features: saved.features,
            mac: self.options.mac,
            mtu_told: None,
            announces: false,
            commands: Vec::new(),
            vlans: [0; VLAN_BYTES],
        };
        for record in &saved.records {
            match record.kind {
                TOLD => {
                    let [mac @ .., low, high, announces] = record.array::<9>()?;
                    let mtu = u16::from_le_bytes([low, high]);
                    let is_sound = (mtu == 0 || is_mtu(mtu)) && announces <= 1;
                    // Check the address as a command would: the device may adopt it.
                    Command::parse(&Command::MacAddr(mac).emit()).map_err(|_| record.wrong())?;
                    if !is_sound {
                        return Err(record.wrong());
                    }
                    arrival.mac = mac;
                    arrival.mtu_told = Some(mtu).filter(|mtu| *mtu != 0);
                    arrival.announces = announces == 1;
                }
                VLANS => arrival.vlans = record.array()?,
                COMMAND => arrival.commands.push(self.command_of(record, saved.features)?),
                _ => return Err(record.wrong()),
            }
        }
        Ok(arrival)
    }

    /// Parses a saved command. Returns an error if this device would not carry it out for a driver
    /// with these features.
    fn command_of(&self, record: &StateRecord, features: u64) -> Result<Command, StateError> {
        let command = Command::parse(&record.bytes).map_err(|_| record.wrong())?;
        let data_queues = self.options.queue_pairs * 2;
        let is_obeyed = match &command {
            Command::QueuePairs(pairs) => {
                (1..=self.options.queue_pairs).contains(&usize::from(*pairs))
            }
            Command::Rss(config) => config.pairs() <= self.options.queue_pairs,
            Command::GuestOffloads(bits) => bits & !features == 0,
            Command::CoalesceQueue(queue) => usize::from(queue.index) < data_queues,
            Command::AnnounceAck | Command::CoalesceQuery(_) => false,
            _ => true,
        };
        let may = needs(&command) & features != 0;
        if is_obeyed && may { Ok(command) } else { Err(record.wrong()) }
    }

    /// Sets the saved values for a driver that has set nothing here.
    fn welcome(&self, arrival: Arrival) {
        {
            let mut state = self.state();
            (state.mac, state.announces) = (arrival.mac, arrival.announces);
            state.mtu_told = arrival.mtu_told;
            let has_control = arrival.features & VIRTIO_NET_F_CTRL_VQ != 0;
            state.filter = has_control.then(|| {
                let mut filter = new_filter(arrival.mac, arrival.features);
                filter.set_vlans(&arrival.vlans);
                filter
            });
            state.vqs.iter_mut().for_each(|vq| vq.is_restored = true);
        }
        for command in arrival.commands {
            self.set(command);
        }
    }
}

fn new_filter(mac: MacAddress, features: u64) -> Filter {
    Filter::new(mac, features & VIRTIO_NET_F_CTRL_VLAN != 0)
}
