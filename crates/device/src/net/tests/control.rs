//! The control queue as a task of the control thread, and both ownerships of the queue pairs.

use super::*;
use crate::doorbell::{Call, Kick};
use crate::handle::QueueHandle;
use crate::net::NetDevice;
use crate::pool::{Pool, PoolOptions};
use crate::queue::{Event, EventKind};
use crate::{Activation, Device};
use manyring_wire::net::*;
use manyring_wire::virtio::VIRTIO_F_VERSION_1;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::time::Instant;

const OK: u8 = 0;
const ERR: u8 = 1;
const NOT_WRITTEN: u8 = 0xee;
const ANSWER: u64 = DATA + 0x4_0000;
const PATIENCE: Duration = Duration::from_secs(20);
/// Everything but what depends on the port or the options.
const EVERYTHING: u64 = VIRTIO_F_VERSION_1
    | VIRTIO_NET_F_CTRL_VQ
    | VIRTIO_NET_F_CTRL_RX
    | VIRTIO_NET_F_CTRL_RX_EXTRA
    | VIRTIO_NET_F_CTRL_VLAN
    | VIRTIO_NET_F_CTRL_MAC_ADDR
    | VIRTIO_NET_F_CTRL_GUEST_OFFLOADS
    | VIRTIO_NET_F_GUEST_ANNOUNCE
    | VIRTIO_NET_F_NOTF_COAL
    | VIRTIO_NET_F_VQ_NOTF_COAL
    | VIRTIO_NET_F_MQ
    | VIRTIO_NET_F_MRG_RXBUF
    | GUEST_OFFLOAD_BITS;
const PAIRS: usize = 2;
/// Data queues of the device, and the control queue's index.
const COUNT: usize = PAIRS * 2;

struct Guest {
    runtime: Runtime,
    device: NetDevice,
    port: Scripted,
    features: u64,
    ring: Ring,
    kick: OwnedFd,
    data: Vec<(Ring, QueueHandle)>,
    /// Where the device calls, for each data queue.
    calls: Vec<OwnedFd>,
    control: Option<QueueHandle>,
    events: mpsc::Receiver<Event>,
    sender: mpsc::Sender<Event>,
}

impl Guest {
    /// A guest whose data queues run, with a control queue if it is among `features`.
    fn new(features: u64) -> Self {
        let port = Scripted::default();
        port.script().attached = vec![false; PAIRS];
        let pool = Pool::new(PoolOptions { workers_max: 1, spin_us: 0, uring: false });
        let (sender, events) = mpsc::channel(16);
        let mut guest = Self {
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
            device: NetDevice::new(options(PAIRS), Arc::new(port.clone()), pool),
            port,
            features,
            ring: Ring::new(64, true),
            kick: eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
            data: Vec::new(),
            calls: Vec::new(),
            control: None,
            events,
            sender,
        };
        guest.runtime.block_on(guest.device.set_features(features));
        guest.start_data();
        if features & VIRTIO_NET_F_CTRL_VQ != 0 {
            guest.start_control();
        }
        guest
    }

    fn start_data(&mut self) {
        for index in 0..COUNT {
            let ring = Ring::new(64, true);
            let call = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            let handle = self.start(&ring, index, None, call.try_clone().unwrap());
            self.data.push((ring, handle));
            self.calls.push(call);
        }
    }

    fn stop_data(&mut self) {
        for (index, (_ring, handle)) in self.data.drain(..).enumerate() {
            let _ = self.runtime.block_on(self.device.stop(index, handle));
        }
        self.calls.clear();
    }

    fn start(&self, ring: &Ring, index: usize, kick: Option<Kick>, call: OwnedFd) -> QueueHandle {
        let activation = Activation {
            index,
            queue: ring.device_half(),
            addresses: ring.config.addresses,
            kick,
            call: Some(Arc::new(Call::new(call).unwrap())),
            err: None,
            enabled: true,
            features: self.features,
            events: self.sender.clone(),
        };
        self.runtime.block_on(self.device.start(activation)).unwrap()
    }

    fn control_index(&self) -> usize {
        controlq(self.features, PAIRS)
    }

    fn start_control(&mut self) {
        self.ring = Ring::new(64, true);
        let kick = Kick::new(self.kick.try_clone().unwrap()).unwrap();
        let call = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        self.control = Some(self.start(&self.ring, self.control_index(), Some(kick), call));
    }

    fn stop_control(&mut self) -> u16 {
        let handle = self.control.take().unwrap();
        self.runtime.block_on(self.device.stop(self.control_index(), handle)).unwrap()
    }

    fn offer(&mut self, bytes: &[u8], room: usize) {
        self.ring.write(DATA, bytes);
        self.ring.write(ANSWER, &[NOT_WRITTEN; 64]);
        let readable = [(DATA, len32(bytes.len()))];
        let readable = if bytes.is_empty() { &[][..] } else { &readable };
        let writable = [(ANSWER, len32(room))];
        let writable = if room == 0 { &[][..] } else { &writable };
        self.ring.driver.add(readable, writable).unwrap();
        self.ring.driver.publish();
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// The bytes the device writes to a command with room for `room` of them.
    fn command_with(&mut self, bytes: &[u8], room: usize) -> Vec<u8> {
        self.offer(bytes, room);
        let driver = &mut self.ring.driver;
        let written = self.runtime.block_on(async {
            let start = Instant::now();
            while start.elapsed() < PATIENCE {
                if let Some((_, written)) = driver.take_used() {
                    return written as usize;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            panic!("no answer");
        });
        let answer = self.ring.read(ANSWER, 64);
        assert!(written <= room && answer[written..].iter().all(|b| *b == NOT_WRITTEN));
        answer[..written].to_vec()
    }

    fn command(&mut self, class: u8, command: u8, data: &[u8]) -> u8 {
        let answer = self.command_with(&[&[class, command], data].concat(), 1);
        assert_eq!(answer.len(), 1);
        answer[0]
    }

    fn coalescing_of(&mut self, index: u16) -> Result<(u32, u32), u8> {
        let [low, high] = index.to_le_bytes();
        let get = [class::NOTF_COAL, class::NOTF_COAL_VQ_GET, low, high];
        let answer = self.command_with(&get, 13);
        if answer.len() == 1 {
            return Err(answer[0]);
        }
        assert_eq!((answer[0], &answer[1..5]), (OK, &[low, high, 0, 0][..]));
        let number = |at: usize| u32::from_le_bytes(*answer[at..].first_chunk().unwrap());
        Ok((number(5), number(9)))
    }

    fn attached(&self) -> Vec<bool> {
        self.port.script().attached.clone()
    }

    fn next_event(&mut self) -> EventKind {
        let events = &mut self.events;
        let event = async { tokio::time::timeout(PATIENCE, events.recv()).await };
        self.runtime.block_on(event).expect("an event").unwrap().kind
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Workers end before the rings do.
        self.stop_data();
    }
}

/// Every command with data that is right, and the feature it needs.
fn commands() -> Vec<(u8, u8, Vec<u8>, u64)> {
    let coalescing = [[4, 0, 0, 0], [9, 0, 0, 0]].concat();
    let of_queue = [&[1, 0, 0, 0][..], &coalescing].concat();
    let table = [&[1, 0, 0, 0][..], &[2, 0, 0, 0, 0, 7], &[0; 4]].concat();
    vec![
        (class::RX, class::RX_PROMISC, vec![1], VIRTIO_NET_F_CTRL_RX),
        (class::RX, class::RX_ALLMULTI, vec![1], VIRTIO_NET_F_CTRL_RX),
        (class::RX, class::RX_ALLUNI, vec![0], VIRTIO_NET_F_CTRL_RX_EXTRA),
        (class::RX, class::RX_NOMULTI, vec![0], VIRTIO_NET_F_CTRL_RX_EXTRA),
        (class::RX, class::RX_NOUNI, vec![0], VIRTIO_NET_F_CTRL_RX_EXTRA),
        (class::RX, class::RX_NOBCAST, vec![0], VIRTIO_NET_F_CTRL_RX_EXTRA),
        (class::MAC, class::MAC_TABLE_SET, table, VIRTIO_NET_F_CTRL_RX),
        (class::MAC, class::MAC_ADDR_SET, vec![2, 0, 0, 0, 0, 8], VIRTIO_NET_F_CTRL_MAC_ADDR),
        (class::VLAN, class::VLAN_ADD, vec![5, 0], VIRTIO_NET_F_CTRL_VLAN),
        (class::VLAN, class::VLAN_DEL, vec![5, 0], VIRTIO_NET_F_CTRL_VLAN),
        (class::ANNOUNCE, class::ANNOUNCE_ACK, vec![], VIRTIO_NET_F_GUEST_ANNOUNCE),
        (class::MQ, class::MQ_VQ_PAIRS_SET, vec![2, 0], VIRTIO_NET_F_MQ),
        (
            class::GUEST_OFFLOADS,
            class::GUEST_OFFLOADS_SET,
            vec![2, 0, 0, 0, 0, 0, 0, 0],
            VIRTIO_NET_F_CTRL_GUEST_OFFLOADS,
        ),
        (class::NOTF_COAL, class::NOTF_COAL_TX_SET, coalescing.clone(), VIRTIO_NET_F_NOTF_COAL),
        (class::NOTF_COAL, class::NOTF_COAL_RX_SET, coalescing, VIRTIO_NET_F_NOTF_COAL),
        (class::NOTF_COAL, class::NOTF_COAL_VQ_SET, of_queue, VIRTIO_NET_F_VQ_NOTF_COAL),
        (class::NOTF_COAL, class::NOTF_COAL_VQ_GET, vec![1, 0], VIRTIO_NET_F_VQ_NOTF_COAL),
    ]
}

#[test]
fn each_command_is_obeyed_if_its_feature_was_negotiated_and_refused_if_not() {
    let mut guest = Guest::new(EVERYTHING);
    for (kind, command, data, _) in commands() {
        assert_eq!(guest.command(kind, command, &data), OK, "{kind} {command}");
    }
    for (kind, command, data, feature) in commands() {
        // Without MQ the control queue lies elsewhere: nothing else has that effect.
        if feature != VIRTIO_NET_F_MQ {
            let mut guest = Guest::new(EVERYTHING & !feature);
            assert_eq!(guest.command(kind, command, &data), ERR, "{kind} {command}");
        }
    }
}

#[test]
fn commands_that_are_none_are_refused_and_the_next_one_is_served() {
    let mut guest = Guest::new(EVERYTHING);
    for (kind, command, data, _) in commands() {
        if command != class::NOTF_COAL_VQ_GET || kind != class::NOTF_COAL {
            assert_eq!(
                guest.command(kind, command, &[&data[..], &[0]].concat()),
                ERR,
                "{kind} {command}"
            );
        }
        if let Some((_, short)) = data.split_last() {
            assert_eq!(guest.command(kind, command, short), ERR, "{kind} {command}");
        }
        assert_eq!(guest.command(kind, 200, &data), ERR);
        assert_eq!(guest.command(200, command, &data), ERR);
    }
    assert_eq!(guest.command_with(&[], 1), [ERR]);
    assert_eq!(guest.command_with(&[class::RX], 1), [ERR]);
    for pairs in [0u16, 3, 0x8001, u16::MAX] {
        assert_eq!(guest.command(class::MQ, class::MQ_VQ_PAIRS_SET, &pairs.to_le_bytes()), ERR);
    }
    assert_eq!(guest.command(class::MAC, class::MAC_ADDR_SET, &[1, 0, 0, 0, 0, 1]), ERR);
    assert_eq!(guest.command(class::VLAN, class::VLAN_ADD, &[0, 0x10]), ERR);
    assert_eq!(guest.command(class::GUEST_OFFLOADS, 0, &[0xff; 8]), ERR);
    // Offloads that there are and that this driver has not negotiated.
    let mut guest = Guest::new(EVERYTHING & !VIRTIO_NET_F_GUEST_TSO4);
    let bits = VIRTIO_NET_F_GUEST_CSUM | VIRTIO_NET_F_GUEST_TSO4;
    assert_eq!(guest.command(class::GUEST_OFFLOADS, 0, &bits.to_le_bytes()), ERR);
    assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[1]), OK);
    assert!(guest.events.try_recv().is_err(), "none of that is a fault of the ring");
}

#[test]
fn a_long_command_is_read_up_to_its_bound() {
    let mut guest = Guest::new(EVERYTHING);
    let table = |count: u32| {
        let macs: Vec<u8> =
            (0..count).flat_map(|n| [&[2, 0][..], &n.to_be_bytes()].concat()).collect();
        [&count.to_le_bytes()[..], &macs, &[0; 4]].concat()
    };
    assert_eq!(guest.command(class::MAC, class::MAC_TABLE_SET, &table(10_900)), OK);
    assert_eq!(guest.command(class::MAC, class::MAC_TABLE_SET, &table(10_930)), ERR);
    assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[0; 64 << 10]), ERR);
}

#[test]
fn a_command_without_a_status_byte_stops_the_control_queue_alone() {
    for bytes in [&[class::RX, class::RX_PROMISC, 1][..], &[class::RX]] {
        let mut guest = Guest::new(EVERYTHING);
        guest.offer(bytes, 0);
        assert!(matches!(guest.next_event(), EventKind::Fault(_)));
        assert!(guest.ring.driver.take_used().is_none());
        assert_eq!(guest.device.stats(COUNT).unwrap().faults.value(), 1);
        assert_eq!(guest.device.stats(0).unwrap().running.value(), 1);
        guest.stop_control();
        guest.start_control();
        assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[1]), OK);
    }
}

#[test]
fn the_host_uses_the_pairs_that_the_control_queue_says() {
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(guest.attached(), [true, false], "one pair until the driver says more");
    assert_eq!(guest.command(class::MQ, class::MQ_VQ_PAIRS_SET, &[2, 0]), OK);
    assert_eq!(guest.attached(), [true, true]);
    assert_eq!(guest.command(class::MQ, class::MQ_VQ_PAIRS_SET, &[0, 0]), ERR);
    assert_eq!(guest.attached(), [true, true]);
    assert_eq!(guest.command(class::MQ, class::MQ_VQ_PAIRS_SET, &[1, 0]), OK);
    assert_eq!(guest.attached(), [true, false]);
}

#[test]
fn the_host_uses_the_pairs_that_the_front_end_enables() {
    let guest = Guest::new(VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MQ);
    assert_eq!(guest.attached(), [true, true]);
    let enable = |index: usize, enabled| {
        let handle = &guest.data[index].1;
        guest.runtime.block_on(guest.device.set_enabled(index, handle, enabled));
    };
    enable(2, false);
    assert_eq!(guest.attached(), [true, true], "its transmitq is in use");
    enable(3, false);
    assert_eq!(guest.attached(), [true, false]);
    enable(2, true);
    assert_eq!(guest.attached(), [true, true]);
}

#[test]
fn coalescing_is_told_as_it_was_set() {
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(guest.coalescing_of(0), Ok((0, 0)));
    let rx = [[8, 0, 0, 0], [50, 0, 0, 0]].concat();
    assert_eq!(guest.command(class::NOTF_COAL, class::NOTF_COAL_RX_SET, &rx), OK);
    let one = [&[3, 0, 0, 0][..], &[1, 0, 0, 0], &[255, 255, 255, 255]].concat();
    assert_eq!(guest.command(class::NOTF_COAL, class::NOTF_COAL_VQ_SET, &one), OK);
    let all: Vec<_> = (0..4).map(|index| guest.coalescing_of(index)).collect();
    assert_eq!(all, [Ok((8, 50)), Ok((0, 0)), Ok((8, 50)), Ok((1, u32::MAX))]);
    // The control queue, and one that there is not.
    assert_eq!(guest.coalescing_of(4), Err(ERR));
    assert_eq!(guest.coalescing_of(u16::MAX), Err(ERR));
    // One that the driver has not started.
    let (_ring, handle) = guest.data.pop().unwrap();
    guest.runtime.block_on(guest.device.stop(3, handle)).unwrap();
    assert_eq!((guest.coalescing_of(3), guest.coalescing_of(2)), (Err(ERR), Ok((8, 50))));
    let other = [&[4, 0, 0, 0][..], &[0; 8]].concat();
    assert_eq!(guest.command(class::NOTF_COAL, class::NOTF_COAL_VQ_SET, &other), ERR);
}

#[test]
fn a_control_queue_that_starts_again_begins_with_nothing_set() {
    let mut guest = Guest::new(EVERYTHING);
    let given = guest.port.script().given;
    for (kind, command, data, _) in commands() {
        guest.command(kind, command, &data);
    }
    guest.command(class::RX, class::RX_PROMISC, &[0]);
    assert_eq!(guest.device.mac(), [2, 0, 0, 0, 0, 8]);
    assert!(guest.device.0.rules().filter.is_some());
    assert_ne!(guest.port.script().given, given);
    guest.stop_control();
    guest.start_control();
    assert_eq!(guest.device.mac(), [2, 0, 0, 0, 0, 9]);
    assert!(guest.device.0.rules().filter.is_none());
    assert_eq!(guest.attached(), [true, false]);
    assert_eq!(guest.coalescing_of(1), Ok((0, 0)));
    assert_eq!(guest.device.0.rules().given, given, "and the guest takes again what it negotiated");
    assert_eq!(guest.port.script().given, given, "and the port gives it");
}

#[test]
fn a_driver_that_starts_again_is_called_at_once() {
    let mut guest = Guest::new(EVERYTHING);
    let minute = [[0, 0, 0, 0], [0, 0x87, 0x93, 3]].concat();
    assert_eq!(guest.command(class::NOTF_COAL, class::NOTF_COAL_TX_SET, &minute), OK);
    guest.stop_data();
    guest.stop_control();
    guest.start_data();
    guest.start_control();
    assert_eq!(guest.coalescing_of(1), Ok((0, 0)));
    let (ring, call) = (&mut guest.data[1].0, &guest.calls[1]);
    ring.write(DATA, &[&[0; HEADER_SIZE][..], &frame(0, 60)].concat());
    ring.driver.add(&[(DATA, 72)], &[]).unwrap();
    ring.driver.publish();
    let start = Instant::now();
    while rustix::io::read(call, &mut [0; 8]).is_err() {
        assert!(start.elapsed() < PATIENCE, "the call waits for the driver that was");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_port_that_cannot_switch_its_offloads_is_an_error_of_that_command() {
    let mut guest = Guest::new(EVERYTHING);
    let given = guest.device.0.rules().given;
    guest.port.script().refuses_offloads = true;
    assert_eq!(guest.command(class::GUEST_OFFLOADS, 0, &[0; 8]), ERR);
    assert_eq!(guest.device.0.rules().given, given);
    guest.port.script().refuses_offloads = false;
    assert_eq!(guest.command(class::GUEST_OFFLOADS, 0, &[0; 8]), OK);
    assert_eq!(guest.device.0.rules().given, Offloads::default());
}

#[test]
fn a_driver_waits_a_second_at_most_and_what_the_host_did_late_is_known() {
    let mut guest = Guest::new(EVERYTHING);
    guest.port.script().slow = Some(Duration::from_millis(1500));
    let start = Instant::now();
    assert_eq!(guest.command(class::MQ, class::MQ_VQ_PAIRS_SET, &[2, 0]), ERR);
    assert!(start.elapsed() < Duration::from_millis(1400), "{:?}", start.elapsed());
    // The host comes to it all the same, after the driver was told of an error.
    guest.runtime.block_on(async { tokio::time::sleep(Duration::from_secs(1)).await });
    guest.port.script().slow = None;
    assert_eq!(guest.command(class::MQ, class::MQ_VQ_PAIRS_SET, &[1, 0]), OK);
    assert_eq!(guest.attached(), [true, false], "a pair nobody serves would swallow flows");
}

#[test]
fn a_host_that_is_late_does_not_undo_the_next_command() {
    let mut guest = Guest::new(EVERYTHING);
    guest.port.script().slow = Some(Duration::from_millis(1500));
    let csum = VIRTIO_NET_F_GUEST_CSUM.to_le_bytes();
    assert_eq!(guest.command(class::GUEST_OFFLOADS, class::GUEST_OFFLOADS_SET, &csum), ERR);
    guest.port.script().slow = None;
    assert_eq!(guest.command(class::GUEST_OFFLOADS, class::GUEST_OFFLOADS_SET, &[0; 8]), OK);
    guest.runtime.block_on(async { tokio::time::sleep(Duration::from_secs(1)).await });
    assert_eq!(guest.device.0.rules().given, Offloads::default());
    assert_eq!(
        guest.port.script().given,
        Offloads::default(),
        "the host goes by what was said last"
    );
}

#[test]
fn commands_go_on_in_other_memory() {
    let mut guest = Guest::new(EVERYTHING);
    assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[1]), OK);
    let memory = Arc::new((*guest.ring.memory).clone());
    let handle = guest.control.as_ref().unwrap();
    let moved = guest.runtime.block_on(handle.set_memory(memory, guest.ring.config.addresses));
    assert_eq!(moved, Ok(()));
    assert_eq!(guest.command(class::RX, class::RX_PROMISC, &[1]), OK);
    assert_eq!(guest.stop_control(), 2);
}

#[test]
fn a_session_is_heard_between_two_commands() {
    let mut guest = Guest::new(EVERYTHING);
    guest.stop_control();
    // A driver that never stops keeps its ring as full as this one.
    guest.ring = Ring::new(64, true);
    for _ in 0..32 {
        guest.offer(&[class::RX], 1);
    }
    let kick = Kick::new(guest.kick.try_clone().unwrap()).unwrap();
    let call = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    guest.control = Some(guest.start(&guest.ring, COUNT, Some(kick), call));
    let base = guest.stop_control();
    assert!(base < 32, "the whole ring was served before the session was heard");
}

#[test]
fn the_mtu_that_a_front_end_tells_before_the_features_is_the_guests() {
    let guest = Guest::new(VIRTIO_F_VERSION_1);
    let with_mtu = VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MTU;
    // QEMU does so each time it starts the device.
    assert!(guest.device.set_front_end_mtu(9000));
    guest.runtime.block_on(guest.device.set_features(with_mtu));
    assert_eq!(guest.device.0.rules().frame_size_max, 9018);
    assert!(!guest.device.set_front_end_mtu(67) && !guest.device.set_front_end_mtu(65_536));
    // The next guest is another's.
    guest.runtime.block_on(guest.device.set_features(0));
    guest.runtime.block_on(guest.device.set_features(with_mtu));
    assert_eq!(guest.device.0.rules().frame_size_max, FRAME_SIZE_MAX);
}

#[test]
fn the_guest_is_told_of_its_link_and_asked_to_announce_itself() {
    let mut guest = Guest::new(EVERYTHING);
    let changes = guest.device.config_changes();
    let status = |device: &NetDevice| {
        let mut bytes = [0xff; 2];
        device.read_config(6, &mut bytes);
        u16::from_le_bytes(bytes)
    };
    assert_eq!(status(&guest.device), VIRTIO_NET_S_LINK_UP);
    assert!(guest.device.announce());
    assert_eq!(status(&guest.device), VIRTIO_NET_S_LINK_UP | VIRTIO_NET_S_ANNOUNCE);
    assert_eq!(guest.command(class::ANNOUNCE, class::ANNOUNCE_ACK, &[]), OK);
    guest.runtime.block_on(guest.device.set_link(false));
    assert_eq!(status(&guest.device), 0);
    assert!(changes.has_changed().unwrap() && !guest.device.0.rules().link_up);
    assert!(!Guest::new(VIRTIO_F_VERSION_1).device.announce(), "its driver cannot");
}

#[test]
fn a_device_announces_its_guest_by_a_rarp_frame() {
    let guest = Guest::new(VIRTIO_F_VERSION_1);
    assert!(guest.runtime.block_on(guest.device.send_rarp([2, 0, 0, 0, 0, 9])));
    let sent = guest.port.sent();
    assert_eq!((sent.len(), sent[0].len(), &sent[0][12..14]), (1, 60, &[0x80, 0x35][..]));
}

#[test]
fn a_queue_that_the_device_has_not_does_not_start() {
    let guest = Guest::new(VIRTIO_F_VERSION_1);
    let ring = Ring::new(16, true);
    let activation = Activation {
        index: COUNT,
        queue: ring.device_half(),
        addresses: ring.config.addresses,
        kick: None,
        call: None,
        err: None,
        enabled: true,
        features: guest.features,
        events: guest.sender.clone(),
    };
    assert!(guest.runtime.block_on(guest.device.start(activation)).is_err());
}
