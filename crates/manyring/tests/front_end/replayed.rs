//! Front-ends that are not ours, replayed: their order of messages, their sizes of rings, what
//! they ask beside it. Data comes back as it was written.

use crate::support::process::{Daemon, TIMEOUT, wait_until};
use manyring_driver::queue::RingFeatures;
use manyring_driver::wire::net::RawNetHeader;
use manyring_driver::wire::vhost_user::{
    F_PROTOCOL_FEATURES, PROTOCOL_F_BACKEND_REQ, PROTOCOL_F_CONFIG, PROTOCOL_F_MQ,
    PROTOCOL_F_REPLY_ACK, VringAddr, VringState,
};
use manyring_driver::wire::virtio::{VIRTIO_F_EVENT_IDX, VIRTIO_F_VERSION_1};
use manyring_driver::{
    Arena, BlkDriver, BlkDriverOptions, BlkDriverQueue, ControlOwner, DriverError, DriverOp,
    FrontEnd, NetDriver, NetDriverOptions, Virtqueue,
};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Default entries of crosvm's rings: as many as a split ring can have (virtio 1.2 §2.7).
const CROSVM_RING: u16 = 32768;
const SECTOR: usize = 512;

/// The contents of `sector` after the write of `round`.
fn pattern(sector: u64, round: u64) -> Vec<u8> {
    (sector << 8 | round).to_le_bytes().repeat(SECTOR / 8)
}

/// Fills the ring with requests, one for each of `sectors`; they are all answered.
fn write_and_read(queue: &mut BlkDriverQueue, sectors: std::ops::Range<u64>, round: u64) {
    for sector in sectors.clone() {
        let data = pattern(sector, round);
        queue
            .submit(DriverOp::Write { sector, data: &data })
            .unwrap()
            .expect("device process in the ring");
    }
    queue.publish().unwrap();
    sectors.clone().for_each(|_| assert_eq!(queue.wait(TIMEOUT).unwrap().status, 0));
    let mut sector_of = std::collections::HashMap::new();
    for sector in sectors.clone() {
        let tag = queue.submit(DriverOp::Read { sector, len: SECTOR }).unwrap().expect("process");
        sector_of.insert(tag, sector);
    }
    queue.publish().unwrap();
    let mut data = vec![0; SECTOR];
    for _ in sectors {
        let done = queue.wait(TIMEOUT).unwrap();
        assert_eq!((done.status, done.written as usize), (0, SECTOR + 1));
        queue.read_data(done.tag, &mut data).unwrap();
        assert!(data == pattern(sector_of[&done.tag], round), "sector {}", sector_of[&done.tag]);
    }
}

/// The features with which crosvm's guest drives its rings here.
const CROSVM_FEATURES: u64 = VIRTIO_F_VERSION_1 | VIRTIO_F_EVENT_IDX;

/// crosvm as a front-end: it negotiates acknowledgements and never asks for one.
struct Crosvm {
    front: FrontEnd,
    arena: Arc<Arena>,
    options: BlkDriverOptions,
    _channel: UnixStream,
}

impl Crosvm {
    fn connect(daemon: &Daemon, queues: u16) -> Self {
        let mut front = FrontEnd::connect(&daemon.socket(), TIMEOUT).unwrap();
        front.set_owner().unwrap();
        let wanted = CROSVM_FEATURES | F_PROTOCOL_FEATURES;
        assert_eq!(front.features().unwrap() & wanted, wanted, "crosvm takes what is offered");
        front.protocol_features().unwrap();
        let protocol =
            PROTOCOL_F_REPLY_ACK | PROTOCOL_F_MQ | PROTOCOL_F_BACKEND_REQ | PROTOCOL_F_CONFIG;
        front.send_message(16, &protocol.to_ne_bytes(), &[]).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        front.send_message(21, &[], &[theirs.as_fd()]).unwrap();
        assert_eq!(front.queue_num().unwrap(), u64::from(queues));
        let options = BlkDriverOptions { queue_size: CROSVM_RING, ..small_requests() };
        // Two activations, each with rings of its own.
        let size = 2 * u64::from(queues) * BlkDriverQueue::arena_size(&options);
        let arena = Arc::new(Arena::new(size).unwrap());
        Self { front, arena, options, _channel: ours }
    }

    /// Sends the messages for a guest's driver that is ready: the features once in a session.
    fn activate(&mut self, features: Option<u64>, queues: u32) -> Vec<BlkDriverQueue> {
        if let Some(features) = features {
            self.front.set_features(features | F_PROTOCOL_FEATURES).unwrap();
        }
        self.front.set_memory(&self.arena).unwrap();
        let ring =
            RingFeatures { event_idx: true, indirect: false, in_order: false, packed: false };
        (0..queues)
            .map(|index| {
                let mut queue =
                    BlkDriverQueue::new(&self.arena, index, ring, &self.options).unwrap();
                let (front, vring) = (&mut self.front, queue.vring());
                let at = vring.addresses();
                front.set_vring_num(index, CROSVM_RING.into()).unwrap();
                let (descriptor, used, available) = (at.descriptor, at.used, at.available);
                let addr = VringAddr { index, flags: 0, descriptor, used, available, log: 0 };
                front.set_vring_addr(&addr).unwrap();
                front.set_vring_base(index, 0).unwrap();
                front.set_vring_call(index, Some(vring.call_fd())).unwrap();
                front.set_vring_kick(index, Some(vring.kick_fd())).unwrap();
                front.set_vring_enable(index, true).unwrap();
                queue
            })
            .collect()
    }

    fn reset(&mut self, queues: u32) {
        for index in 0..queues {
            self.front.set_vring_enable(index, false).unwrap();
            self.front.vring_base(index).unwrap();
        }
    }
}

fn small_requests() -> BlkDriverOptions {
    BlkDriverOptions { buffer_size: 512, segment_size: 512, ..BlkDriverOptions::default() }
}

#[test]
fn crosvm_with_its_defaults_comes_up_reads_what_it_wrote_and_comes_up_again_after_a_reset() {
    let daemon = Daemon::blk(&["--memory", "16M", "--num-queues", "4"]);
    let mut crosvm = Crosvm::connect(&daemon, 4);
    // The guest reads its config space in pieces.
    assert_eq!(crosvm.front.config(0, 8).unwrap(), 32768u64.to_le_bytes());
    assert_eq!(crosvm.front.config(34, 2).unwrap(), 4u16.to_le_bytes());
    for (activation, features) in [Some(CROSVM_FEATURES), None].into_iter().enumerate() {
        let mut queues = crosvm.activate(features, 4);
        for (index, queue) in (0..).zip(&mut queues) {
            let first = index * 8000;
            write_and_read(queue, first..first + 8000, activation as u64);
        }
        crosvm.reset(4);
    }
    let log = daemon.log();
    assert!(!log.contains("WARN") && !log.contains("ERROR"), "{log}");
}

#[test]
fn a_guest_of_crosvm_that_looks_past_its_config_space_does_not_end_its_own_machine() {
    let daemon = Daemon::blk(&["--memory", "16M", "--num-queues", "1"]);
    let mut crosvm = Crosvm::connect(&daemon, 1);
    let mut queues = crosvm.activate(Some(CROSVM_FEATURES), 1);
    for offset in [256, 300, u32::MAX] {
        let read = crosvm.front.config(offset, 4);
        assert!(matches!(read, Err(DriverError::Reply { size: 12, .. })), "{read:?}");
        crosvm.front.set_config(offset, &[1, 2, 3, 4]).unwrap();
    }
    write_and_read(&mut queues[0], 0..100, 0);
    // Lines are written by a thread of their own.
    let refused = || daemon.log().matches("request refused").count();
    assert!(wait_until(|| refused() >= 6), "{}", daemon.log());
    assert_eq!(refused(), 6, "{}", daemon.log());
}

#[test]
fn a_ring_of_32768_entries_is_filled_to_the_last_and_wraps() {
    let daemon = Daemon::blk(&["--memory", "16M", "--num-queues", "1"]);
    let options = BlkDriverOptions { queue_size: CROSVM_RING, ..small_requests() };
    let mut guest = BlkDriver::connect(&daemon.socket(), &options).unwrap();
    write_and_read(&mut guest.queues[0], 0..32768, 0);
    write_and_read(&mut guest.queues[0], 0..32768, 1);
}

#[test]
fn a_network_device_serves_rings_of_32768_entries_both_ways() {
    let config = "[[net]]\nname = 'n'\nsocket_path = '@/n'\nnull = true\ngenerate = 64\n\
        queue_pairs = 2\n";
    let daemon = Daemon::run(config, &["n"]);
    let options = NetDriverOptions {
        queue_pairs: 2,
        queue_size: CROSVM_RING,
        transmit_size: 2048,
        control: ControlOwner::Device,
        ..NetDriverOptions::default()
    };
    let mut guest = NetDriver::connect(&daemon.socket_of("n"), &options).unwrap();
    guest.set_queue_pairs(2).unwrap();
    for pair in &mut guest.pairs {
        let mut sent = 0u32;
        while sent < 40_000 {
            while sent < 40_000 && pair.tx.send(&RawNetHeader::default(), &[7; 60]).unwrap() {
                sent += 1;
            }
            pair.tx.publish(0).unwrap();
            pair.tx.drain(TIMEOUT).unwrap();
        }
        let mut frame = Vec::new();
        for _ in 0..40_000 {
            frame.clear();
            pair.rx.recv_wait(&mut frame, TIMEOUT).unwrap();
            assert_eq!(frame.len(), 64);
            pair.rx.refill().unwrap();
        }
    }
}

/// Memory of its own that the daemon holds, in KiB.
fn own_memory(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_disk_with_256_idle_rings_of_32768_entries_costs_little_memory() {
    let daemon = Daemon::blk(&["--null", "1G", "--num-queues", "256"]);
    let before = own_memory(&daemon);
    let arena = Arena::new(256 * Virtqueue::arena_size(CROSVM_RING)).unwrap();
    let mut front = FrontEnd::connect(&daemon.socket(), TIMEOUT).unwrap();
    let features = front.negotiate(0, F_PROTOCOL_FEATURES, PROTOCOL_F_REPLY_ACK).unwrap();
    front.set_memory(&arena).unwrap();
    let ring = RingFeatures::from_bits(features);
    let vrings: Vec<_> = (0..256)
        .map(|index| {
            let vring = Virtqueue::new(&arena, index, CROSVM_RING, ring, 0).unwrap();
            front.start_vring(&vring, 0).unwrap();
            vring
        })
        .collect();
    let grown = own_memory(&daemon).saturating_sub(before);
    // One byte for each entry would be 8 MiB.
    assert!(grown < 8 << 10, "{} rings cost {grown} KiB", vrings.len());
}

#[test]
fn spdk_writes_its_config_with_a_size_that_is_not_the_payloads_and_goes_on() {
    let daemon = Daemon::blk(&["--memory", "16M", "--num-queues", "4"]);
    let options = BlkDriverOptions {
        queues: 4,
        queue_size: 512,
        protocol_features: PROTOCOL_F_MQ | PROTOCOL_F_CONFIG,
        ..BlkDriverOptions::default()
    };
    let mut guest = BlkDriver::connect(&daemon.socket(), &options).unwrap();
    assert_eq!(guest.front.config(0, 256).unwrap().len(), 256);
    // Offset, size and flags, then all of its 256 bytes.
    let payload = [[32u32, 1, 0].as_bytes(), &[0; 256]].concat();
    guest.front.send_message(25, &payload, &[]).unwrap();
    guest.front.send_message(24, &payload, &[]).unwrap();
    assert_eq!(guest.front.receive_reply(24).unwrap(), [32u32, 0, 0].as_bytes());
    assert_eq!(guest.front.config(32, 1).unwrap(), [1], "nothing was written");
    for queue in &mut guest.queues {
        write_and_read(queue, 0..100, 3);
    }
}

#[test]
fn what_is_not_served_is_refused_where_an_acknowledgement_is_asked_for() {
    let daemon = Daemon::blk(&["--memory", "16M", "--num-queues", "1"]);
    let mut guest = BlkDriver::connect(&daemon.socket(), &BlkDriverOptions::default()).unwrap();
    let refused = |result: Result<(), DriverError>, request| {
        let is_refused = matches!(result, Err(DriverError::Refused { request: r }) if r == request);
        assert!(is_refused, "{request}: {result:?}");
    };
    let front = &mut guest.front;
    // SEND_RARP of a disk, VRING_KICK, POSTCOPY_LISTEN, and one from the future.
    refused(front.send_rarp([2, 0, 0, 0, 0, 1]), 19);
    refused(front.set(35, VringState { index: 0, num: 0 }.as_bytes(), &[]), 35);
    refused(front.set(29, &[], &[]), 29);
    refused(front.set(200, &[1; 24], &[]), 200);
    // A config write that cannot be.
    refused(front.set_config(256, &[1]), 25);
    refused(front.set_config(0, &[1]), 25);
    write_and_read(&mut guest.queues[0], 0..50, 0);
}

/// QEMU with `-m 1G` alone: it has no memory to share, and sends none.
#[test]
fn rings_without_any_memory_are_told_to_the_operator() {
    let daemon = Daemon::blk(&["--memory", "1M", "--num-queues", "1"]);
    let mut front = FrontEnd::connect(&daemon.socket(), TIMEOUT).unwrap();
    front.set_owner().unwrap();
    front.set_features(VIRTIO_F_VERSION_1 | F_PROTOCOL_FEATURES).unwrap();
    let kick = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    front.set_vring_num(0, 128).unwrap();
    front.set_vring_base(0, 0).unwrap();
    let (descriptor, used, available) = (4096, 8192, 12288);
    let addr = VringAddr { index: 0, flags: 0, descriptor, used, available, log: 0 };
    front.set_vring_addr(&addr).unwrap();
    front.set_vring_kick(0, Some(kick.as_fd())).unwrap();
    assert!(wait_until(|| daemon.log().contains("has sent no memory")), "{}", daemon.log());
}

/// As a front-end whose migration has half failed.
#[test]
fn a_ring_that_is_not_set_up_to_its_end_is_told_to_the_operator_once() {
    let daemon = Daemon::blk(&["--memory", "1M", "--num-queues", "2"]);
    let mut front = FrontEnd::connect(&daemon.socket(), TIMEOUT).unwrap();
    let features = VIRTIO_F_VERSION_1 | F_PROTOCOL_FEATURES;
    front.negotiate(features, features, PROTOCOL_F_REPLY_ACK).unwrap();
    let arena = Arena::new(1 << 16).unwrap();
    let vring = Virtqueue::new(&arena, 1, 128, RingFeatures::default(), 0).unwrap();
    front.set_memory(&arena).unwrap();
    let at = vring.addresses();
    let (descriptor, used, available) = (at.descriptor, at.used, at.available);
    front.set_vring_num(1, 128).unwrap();
    front
        .set_vring_addr(&VringAddr { index: 1, flags: 0, descriptor, used, available, log: 0 })
        .unwrap();
    let told = "the front-end has sent no SET_VRING_KICK, no SET_VRING_ENABLE";
    let is_told =
        || daemon.log().lines().any(|line| line.contains(told) && line.contains("queue=1"));
    assert!(wait_until(is_told), "{}", daemon.log());
    front.set_vring_kick(1, Some(vring.kick_fd())).unwrap();
    front.set_vring_enable(1, true).unwrap();
    drop(front);
    assert!(wait_until(|| daemon.log().contains("front-end disconnected")));
    assert_eq!(daemon.log().matches("WARN").count(), 1, "{}", daemon.log());
}
