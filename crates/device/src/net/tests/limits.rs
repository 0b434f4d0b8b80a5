//! A transmitq that is disabled and its ring, a frame that waited, buffers in many pieces, and what
//! a guest asks its filter for.
//!
//! This file is two modules: the transmitqs of `limits` send to a port that is done with a frame
//! when it has taken it, those of `limits_late` to one that is done with it later.

use super::guest::{EVERYTHING, Guest, OK, TIMEOUT, pool};
use super::*;
use crate::Device;
use crate::net::NetRx;
use manyring_backend::net::late::Grip;
use manyring_engine::{Kick, Pool, QueueHandle};
use manyring_queue::IndirectTable;
use manyring_wire::net::class;
use manyring_wire::virtio::VIRTIO_F_VERSION_1;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::time::Duration;

/// Index of the first transmitq.
const TRANSMITQ: usize = 1;

/// True in the module whose ports finish frames later.
fn late() -> bool {
    module_path!().ends_with("_late")
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..TIMEOUT.as_millis() {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{what}: not within {TIMEOUT:?}");
}

fn doorbell(count: u32) -> OwnedFd {
    eventfd(count, EventfdFlags::NONBLOCK).unwrap()
}

/// A guest with one transmitq, which has a kick.
pub(super) struct Sender {
    pub(super) guest: Guest,
    pub(super) ring: Ring,
    kick: OwnedFd,
    pub(super) handle: Option<QueueHandle>,
    next: u64,
}

impl Sender {
    fn new(event_idx: bool) -> Self {
        // With EVENT_IDX the port tells by a timer, otherwise the worker asks.
        Self::in_pool(pool(1), event_idx, late().then_some(event_idx)).0
    }

    /// `tells`: the port finishes frames later, and tells by a timer or must be asked.
    pub(super) fn in_pool(
        pool: Arc<Pool>,
        event_idx: bool,
        tells: Option<bool>,
    ) -> (Self, Option<Grip>) {
        let mut guest = Guest::in_pool(VIRTIO_F_VERSION_1, pool);
        guest.stop_data();
        let grip = tells.map(|tells| guest.port.delay(tells));
        let (ring, kick) = (Ring::new(64, event_idx), doorbell(0));
        let theirs = Kick::new(kick.try_clone().unwrap()).unwrap();
        let handle = Some(guest.start(&ring, TRANSMITQ, Some(theirs), doorbell(0)));
        (Self { guest, ring, kick, handle, next: 0 }, grip)
    }

    fn set_enabled(&self, enabled: bool) {
        let handle = self.handle.as_ref().unwrap();
        let enable = self.guest.device.set_enabled(TRANSMITQ, handle, enabled);
        self.guest.runtime.block_on(enable);
    }

    pub(super) fn send(&mut self, count: u64) {
        for _ in 0..count {
            let at = DATA + self.next * 0x1000;
            self.ring.write(at, &[&[0; HEADER_SIZE][..], &frame(self.next, 60)].concat());
            self.ring.driver.add(&[(at, 72)], &[]).unwrap();
            self.next += 1;
        }
        self.ring.driver.publish();
        self.ring();
    }

    fn ring(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    pub(super) fn until_returned(&mut self, count: usize) {
        let mut returned = 0;
        until("chains come back", || {
            returned += usize::from(self.ring.driver.take_used().is_some());
            returned == count
        });
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // A test may have stopped it.
        let Some(handle) = self.handle.take() else { return };
        let _ = self.guest.runtime.block_on(self.guest.device.stop(TRANSMITQ, handle));
    }
}

#[test]
fn a_transmitq_that_is_disabled_leaves_the_memory_of_its_ring_alone() {
    for event_idx in [false, true] {
        let mut sender = Sender::new(event_idx);
        sender.send(2);
        sender.until_returned(2);
        sender.set_enabled(false);
        // The driver has heard that the queue is disabled: the memory is its own again.
        let pattern = vec![0xa5; usize::try_from(DATA).unwrap()];
        sender.ring.write(0, &pattern);
        // An eventfd that was written at any time says so for ever: that is no kick.
        let handle = sender.handle.as_ref().unwrap();
        let old = Kick::new(doorbell(7)).unwrap();
        sender.guest.runtime.block_on(handle.set_kick(Some(old)));
        // Time for the worker to settle the queue, and to come round again.
        for _ in 0..3 {
            sender.set_enabled(false);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(sender.ring.read(0, pattern.len()) == pattern, "EVENT_IDX {event_idx}");
        assert!(sender.guest.events.try_recv().is_err());
    }
}

#[test]
fn a_kick_that_brings_nothing_to_a_disabled_transmitq_writes_nothing() {
    for event_idx in [false, true] {
        let mut sender = Sender::new(event_idx);
        sender.send(1);
        sender.until_returned(1);
        sender.set_enabled(false);
        // Another snapshot: what the device has written before says nothing of this memory.
        let handle = sender.handle.as_ref().unwrap();
        let memory = Arc::new((*sender.ring.memory).clone());
        let moved = handle.set_memory(memory, sender.ring.config.addresses);
        assert_eq!(sender.guest.runtime.block_on(moved), Ok(()));
        let used = sender.ring.config.addresses.used;
        let pattern = vec![0xa5; usize::try_from(DATA - used).unwrap()];
        sender.ring.write(used, &pattern);
        let stats = sender.guest.device.stats(TRANSMITQ).unwrap();
        let kicks = stats.kicks.value();
        sender.ring();
        until("the kick is heard", || stats.kicks.value() > kicks);
        // Time for the worker to settle the queue, and to come round again.
        for _ in 0..3 {
            sender.set_enabled(false);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(sender.ring.read(used, pattern.len()) == pattern, "EVENT_IDX {event_idx}");
    }
}

#[test]
fn a_transmitq_that_is_disabled_drops_what_the_driver_kicks_for() {
    for event_idx in [false, true] {
        let mut sender = Sender::new(event_idx);
        sender.send(1);
        sender.until_returned(1);
        sender.set_enabled(false);
        let stats = sender.guest.device.stats(TRANSMITQ).unwrap();
        for round in 1..=3 {
            sender.send(2);
            sender.until_returned(2);
            assert_eq!(stats.dropped_disabled.value(), 2 * round, "EVENT_IDX {event_idx}");
        }
        sender.guest.port.assert_sent([0]);
        sender.set_enabled(true);
        sender.send(1);
        sender.until_returned(1);
        sender.guest.port.assert_sent([0, 7]);
    }
}

#[test]
fn a_frame_that_waited_for_buffers_counts_as_one_of_a_driver_that_coalesces() {
    let mut guest = Guest::new(EVERYTHING);
    // One packet is enough, and the time never comes.
    let data = [&1u32.to_le_bytes()[..], &u32::MAX.to_le_bytes()].concat();
    assert_eq!(guest.command(class::NOTF_COAL, class::NOTF_COAL_RX_SET, &data), OK);
    guest.port.arrive(RawNetHeader::default(), &frame(0, 5000));
    let ring = &mut guest.data[0].0;
    ring.driver.add(&[], &[(DATA, 2048)]).unwrap();
    ring.driver.publish();
    until("the frame is read", || guest.port.script().arrives.is_empty());
    assert!(ring.driver.take_used().is_none(), "it does not fit yet");
    for index in 1..4 {
        ring.driver.add(&[], &[(DATA + index * 2048, 2048)]).unwrap();
    }
    ring.driver.publish();
    until("the frame", || ring.driver.take_used().is_some());
    until("the call", || rustix::io::read(&guest.calls[0], &mut [0; 8]).is_ok());
}

#[test]
fn buffers_in_many_pieces_are_offered_as_far_as_a_system_call_goes() {
    // 120 buffers of ten pieces; 1000 pieces are 100 buffers.
    let (mut ring, port) = (Ring::new(128, true), Scripted::default());
    let rules = Arc::new(open_rules());
    let mut rx = NetRx::new(Box::new(port.clone()), rules, true, 128).unwrap();
    let mut queue = ring.device_half();
    for buffer in 0..120 {
        let (table, data) = (DATA + buffer * 0x1000, DATA + buffer * 0x1000 + 0x800);
        let pieces: Vec<_> = (0..10).map(|n| (data + n * 20, 20)).collect();
        let words = ring.memory.words(table, 160, 16).unwrap();
        let table = IndirectTable { addr: table, words };
        ring.driver.add_indirect(&[], &pieces, &table).unwrap();
    }
    ring.driver.publish();
    port.arrive(RawNetHeader::default(), &frame(0, 5000));
    rx.turn(&mut queue, &ring.stats);
    queue.publish();
    let spill = HEADER_SIZE + FRAME_SIZE_MAX;
    assert_eq!(port.script().rooms, [100 * 200 + spill]);
    assert_eq!(std::iter::from_fn(|| ring.driver.take_used()).count(), 5012_usize.div_ceil(200));
    rx.let_go(&mut queue, &ring.stats);
}

#[test]
fn a_turn_ends_after_so_many_pieces_however_short_they_are() {
    for lends in [false, true] {
        let (mut ring, port) = (Ring::new(128, true), Scripted::default());
        port.script().lends = lends;
        let rules = Arc::new(open_rules());
        let mut rx = NetRx::new(Box::new(port.clone()), rules, true, 128).unwrap();
        let mut queue = ring.device_half();
        for buffer in 0..60 {
            let (table, data) = (DATA + buffer * 0x4000, DATA + buffer * 0x4000 + 0x3000);
            let pieces: Vec<_> = (0..512).map(|n| (data + n, 1)).collect();
            let words = ring.memory.words(table, 0x2000, 16).unwrap();
            let table = IndirectTable { addr: table, words };
            ring.driver.add_indirect(&[], &pieces, &table).unwrap();
        }
        ring.driver.publish();
        // The buffers are popped in several turns, before a frame comes.
        while rx.turn(&mut queue, &ring.stats).has_more {}
        for number in 0..10 {
            port.arrive(RawNetHeader::default(), &frame(number, 1500));
        }
        // Three buffers of 512 pieces for each frame: the third one is beyond 4096.
        let frames: Vec<_> = (0..4)
            .map(|_| {
                rx.turn(&mut queue, &ring.stats);
                queue.publish();
                std::iter::from_fn(|| ring.driver.take_used()).count() / 3
            })
            .collect();
        assert_eq!(frames, [3, 3, 3, 1], "lends: {lends}");
        rx.let_go(&mut queue, &ring.stats);
    }
}

/// A frame to `mac`, in a VLAN if one is given.
fn frame_to(mac: [u8; 6], vlan: Option<u16>) -> Vec<u8> {
    let tag = vlan.map_or(vec![], |id| [&[0x81, 0][..], &id.to_be_bytes()].concat());
    [&mac[..], &[2, 0, 0, 0, 0, 1], &tag, &[8, 0, 1, 2, 3, 4]].concat()
}

#[test]
fn an_address_that_the_guest_sets_is_received_and_the_former_is_not() {
    let mut guest = Guest::new(EVERYTHING);
    let (former, new) = ([2, 0, 0, 0, 0, 9], [2, 0, 0, 0, 0, 0x77]);
    assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[0]), OK);
    let passes = |guest: &Guest| {
        let filter = guest.device.0.rules().filter.clone().expect("a filter");
        [former, new].map(|mac| filter.passes(&frame_to(mac, None)))
    };
    // The VLAN filter passes what has no tag.
    assert_eq!(passes(&guest), [true, false]);
    assert_eq!(guest.command(class::MAC, class::MAC_ADDR_SET, &new), OK);
    assert_eq!(passes(&guest), [false, true]);
}

#[test]
fn a_vlan_that_is_added_twice_is_received_and_one_that_is_removed_twice_is_not() {
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[0]), OK);
    let mut after = |command: u8, id: u16| {
        assert_eq!(guest.command(class::VLAN, command, &id.to_le_bytes()), OK);
        let filter = guest.device.0.rules().filter.clone().expect("a filter");
        [5, 6, 69].map(|id| filter.passes(&frame_to([0xff; 6], Some(id))))
    };
    let (add, remove) = (class::VLAN_ADD, class::VLAN_DEL);
    assert_eq!(after(add, 5), [true, false, false]);
    assert_eq!(after(add, 5), [true, false, false]);
    assert_eq!(after(add, 6), [true, true, false]);
    assert_eq!(after(remove, 69), [true, true, false]);
    assert_eq!(after(remove, 6), [true, false, false]);
    assert_eq!(after(remove, 6), [true, false, false]);
    assert_eq!(after(add, 69), [true, false, true]);
}

/// Offers `count` buffers of twelve bytes that have 1024 descriptors each: one table for all.
fn offer_long_and_empty(ring: &mut Ring, count: usize) {
    let (table, data) = (DATA, DATA + 0x1_0000);
    let pieces = [vec![(data, 0); 1023], vec![(data, 12)]].concat();
    for _ in 0..count {
        let words = ring.memory.words(table, 0x4000, 16).unwrap();
        let table = IndirectTable { addr: table, words };
        ring.driver.add_indirect(&[], &pieces, &table).unwrap();
    }
    ring.driver.publish();
}

#[test]
fn a_turn_ends_after_so_many_descriptors_however_little_room_they_have() {
    for (lends, waits) in [(false, false), (false, true), (true, false), (true, true)] {
        let (mut ring, port) = (Ring::new(1024, false), Scripted::default());
        port.script().lends = lends;
        let rules = Arc::new(open_rules());
        let mut rx = NetRx::new(Box::new(port.clone()), rules, true, 1024).unwrap();
        let mut queue = ring.device_half();
        port.arrive(RawNetHeader::default(), &frame(7, 6000));
        if waits {
            // The frame is read, or looked at, and waits for further buffers.
            offer_long_and_empty(&mut ring, 1);
            rx.turn(&mut queue, &ring.stats);
        }
        // More than half of the ring: a frame that finds no room in them is dropped.
        offer_long_and_empty(&mut ring, 600);
        let (mut turns, mut used) = (0, 0);
        loop {
            let turn = rx.turn(&mut queue, &ring.stats);
            queue.publish();
            used += std::iter::from_fn(|| ring.driver.take_used()).count();
            turns += 1;
            if !turn.has_more {
                break;
            }
        }
        assert_eq!(used, 6012_usize.div_ceil(12), "lends: {lends}, waits: {waits}");
        assert!(turns >= 600 / 4, "{turns} turns, lends: {lends}, waits: {waits}");
        assert_eq!(ring.stats.dropped_small_buffers.value(), 0);
        rx.let_go(&mut queue, &ring.stats);
    }
}
