//! Hostile guests of a network device on a tap: frames, buffers and commands that are none. Each
//! costs a counted packet, an error, or its queue with one clear line; the neighbour in the same
//! daemon goes on, and the next guest is served. Needs root.

use crate::supervisor::{self, Kind, LONG};
use crate::support::process::wait_until;
use crate::support::program::shown;
use crate::support::space::{in_shared_space, run};
use manyring_driver::hostile::{
    CtrlSpoil, HostileNet, HostileRing, Racer, RxSpoil, Spoil, TxSpoil, fill_eventfd,
};
use manyring_driver::{Arena, ControlOwner, FrontEnd, NetDriver, NetDriverOptions, Virtqueue};
use manyring_queue::RingFeatures;
use manyring_wire::net::{CtrlStatus, RawNetHeader, RxMode, VIRTIO_NET_F_MQ, class};
use manyring_wire::vhost_user::F_PROTOCOL_FEATURES;
use manyring_wire::virtio::{VIRTIO_F_INDIRECT_DESC, VIRTIO_F_VERSION_1};
use manyring_wire::virtqueue::{DESC_F_NEXT, DESC_F_WRITE, Descriptor};
use rustix::fd::{AsFd, OwnedFd};
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const CONFIG: &str = "[daemon]\ncontrol = '@/control'\n\
    [[net]]\nname = 'bad'\nsocket_path = '@/bad'\ntap = 'bad%d'\nqueue_pairs = 1\n\
    [[net]]\nname = 'good'\nsocket_path = '@/good'\nnull = true\ngenerate = 3000\n";
/// Rings of the hostile guest: receiveq, transmitq, controlq.
const RX: usize = 0;
const TX: usize = 1;
const CTRL: usize = 2;
/// Entries of each.
const SIZE: u16 = 16;

/// The neighbour: it sends, and receives what the host generates.
fn sender(socket: &Path) -> impl FnMut() + Send + use<> {
    let mut guest = NetDriver::connect(socket, &NetDriverOptions::default()).unwrap();
    let payload: Vec<u8> = (0..=u8::MAX).cycle().take(3000 - 14).collect();
    move || {
        // All of the guest lives here, its session too.
        let guest = &mut guest;
        let pair = &mut guest.pairs[0];
        assert!(pair.tx.send(&RawNetHeader::default(), &[0x5a; 900]).unwrap());
        pair.tx.publish(0).unwrap();
        pair.tx.drain(LONG).expect("the neighbour's frame is sent");
        let mut frame = Vec::new();
        pair.rx.recv_wait(&mut frame, LONG).expect("the neighbour receives");
        assert!(frame[14..] == payload, "the neighbour's frame");
    }
}

/// A guest whose rings are written word by word.
struct Raw {
    front: FrontEnd,
    arena: Arc<Arena>,
    vrings: Vec<Virtqueue>,
}

/// Both guests have networks.
struct Networks;

type Supervisor = supervisor::Supervisor<Networks>;

impl Supervisor {
    fn new() -> Self {
        Self::start(CONFIG, &["bad", "good", "control"], sender)
    }

    /// A guest of all three rings, empty.
    fn guest(&self) -> Raw {
        let mut front = FrontEnd::connect(&self.daemon.socket_of("bad"), LONG).unwrap();
        let wanted =
            (NetDriverOptions::PLAIN | NetDriverOptions::OFFLOADS | NetDriverOptions::CONTROL)
                & !VIRTIO_NET_F_MQ
                | VIRTIO_F_INDIRECT_DESC;
        let required = F_PROTOCOL_FEATURES | VIRTIO_F_VERSION_1;
        let protocol = NetDriverOptions::default().protocol_features;
        let features =
            RingFeatures::from_bits(front.negotiate(wanted, required, protocol).unwrap());
        let arena = Arc::new(Arena::new(1 << 20).unwrap());
        let vring = |index| Virtqueue::new(&arena, index, SIZE, features, 0).unwrap();
        let vrings: Vec<_> = (0..3).map(vring).collect();
        front.set_memory(&arena).unwrap();
        for vring in &vrings {
            front.start_vring(vring, 0).unwrap();
        }
        Raw { front, arena, vrings }
    }

    fn bad(&self) -> Value {
        shown(&self.daemon.socket_of("control"), "/v1/devices/bad")
    }

    /// The host's interface of the hostile guest: each daemon's has a number of its own.
    fn tap(&self) -> String {
        self.bad()["interface"].as_str().unwrap().to_owned()
    }

    /// The counters of a queue of the hostile guest's device.
    fn counters(&self, queue: usize) -> BTreeMap<String, u64> {
        serde_json::from_value(self.bad()["queues"][queue]["counters"].clone()).unwrap()
    }
}

impl Kind for Networks {
    fn serves_the_next_guest(supervisor: &Supervisor) {
        let options =
            NetDriverOptions { control: ControlOwner::Device, ..NetDriverOptions::default() };
        let mut guest = NetDriver::connect(&supervisor.daemon.socket_of("bad"), &options).unwrap();
        let before = supervisor.counters(TX)["packets"];
        assert!(guest.pairs[0].tx.send(&RawNetHeader::default(), &[0x5a; 900]).unwrap());
        guest.pairs[0].tx.publish(0).unwrap();
        guest.pairs[0].tx.drain(LONG).unwrap();
        assert_eq!(supervisor.counters(TX)["packets"], before + 1);
        let promisc = guest.control().unwrap().set_rx_mode(RxMode::Promisc, true);
        assert_eq!(promisc.unwrap(), CtrlStatus::Ok);
    }
}

impl Raw {
    fn hostile(&self, queue: usize) -> HostileNet {
        HostileNet::new(&self.arena, &self.vrings[queue]).unwrap()
    }

    /// Kicks, and waits until the device has returned `count` chains in all.
    fn served(&mut self, queue: usize, hostile: &HostileNet, count: u16) {
        self.vrings[queue].kick().unwrap();
        assert!(wait_until(|| hostile.ring.used_idx() == count), "{}", hostile.ring.used_idx());
    }

    /// Kicks, and waits until the device has said that the queue is broken; the session goes on.
    fn breaks(&mut self, queue: usize) {
        self.vrings[queue].kick().unwrap();
        assert!(self.vrings[queue].wait_err(LONG).unwrap(), "err is silent");
        self.front.features().expect("the session goes on");
        self.front.vring_base(u32::try_from(queue).unwrap()).expect("the session goes on");
    }
}

/// The counter that a frame which is wrong in this way adds to.
fn counter_of(spoil: TxSpoil) -> &'static str {
    match spoil {
        // A device must not rely on `hdr_len`: it is cut to the frame, which then is in order.
        TxSpoil::HdrLenPastEnd | TxSpoil::HeaderInPieces | TxSpoil::WritableToo => "packets",
        TxSpoil::TooLong | TxSpoil::TooLongInPieces => "dropped_too_long",
        spoil if spoil.is_header_lie() => "dropped_bad_header",
        _ => "dropped_short",
    }
}

#[test]
fn each_frame_that_is_none_comes_back_counted_and_the_next_one_passes() {
    in_shared_space(|| {
        let supervisor = Supervisor::new();
        let mut guest = supervisor.guest();
        let mut hostile = guest.hostile(TX);
        let mut count = 0;
        for spoil in TxSpoil::ALL {
            let before = supervisor.counters(TX);
            hostile.send(spoil).unwrap();
            count += 1;
            guest.served(TX, &hostile, count);
            hostile.send_valid().unwrap();
            count += 1;
            guest.served(TX, &hostile, count);
            let after = supervisor.counters(TX);
            let mut expected = before.clone();
            *expected.get_mut("packets").unwrap() += 1;
            *expected.get_mut(counter_of(spoil)).unwrap() += 1;
            for (name, value) in after {
                if name == "packets" || name.starts_with("dropped") || name == "faults" {
                    assert_eq!(value, expected[&name], "{spoil:?}: {name}");
                }
            }
        }
        assert!(supervisor.warnings().is_empty(), "{:?}", supervisor.warnings());
        let passed = supervisor.counters(TX)["packets"];
        let arrived =
            run(&format!("cat /sys/class/net/{}/statistics/rx_packets", supervisor.tap()));
        assert_eq!(arrived.trim(), passed.to_string(), "the host has seen what was counted");
        drop(guest);
        supervisor.next_guest_is_served();
        supervisor.neighbour_goes_on();
        supervisor.end();
    });
}

#[test]
fn a_header_that_changes_between_reads_is_right_or_refused_and_the_host_sees_no_third() {
    in_shared_space(|| {
        let supervisor = Supervisor::new();
        let mut guest = supervisor.guest();
        let mut hostile = guest.hostile(TX);
        let at = guest.arena.alloc(4096, 16).unwrap();
        let link = |addr, len, flags, next| Descriptor { addr, len, flags, next };
        for head in (0..16).step_by(2) {
            hostile.ring.set_descriptor(head, link(at, 12, DESC_F_NEXT, head + 1));
            hostile.ring.set_descriptor(head + 1, link(at + 12, 60, 0, 0));
        }
        // Nothing to do, and a checksum far past the end: the host would refuse that one.
        let (right, wrong) = ([0, 0], [0xffff_0000_0000_0001, u64::from(u16::MAX)]);
        let racer = Racer::start(&guest.arena, at, right, wrong).unwrap();
        for burst in 1..=250 {
            (0..16).step_by(2).for_each(|head| hostile.ring.make_available(head));
            guest.served(TX, &hostile, burst * 8);
        }
        drop(racer);
        let counters = supervisor.counters(TX);
        assert_eq!(counters["packets"] + counters["dropped_bad_header"], 2000, "{counters:?}");
        assert_eq!(counters["dropped_refused"], 0, "{counters:?}");
        supervisor.neighbour_goes_on();
        supervisor.end();
    });
}

#[test]
fn each_receive_buffer_that_can_hold_nothing_stops_its_queue_with_one_line() {
    in_shared_space(|| {
        let supervisor = Supervisor::new();
        for spoil in RxSpoil::ALL {
            let offer = |guest: &mut Raw| guest.hostile(RX).receive(spoil).unwrap();
            if matches!(spoil, RxSpoil::ReadOnlyFirst | RxSpoil::HeaderAlone) {
                // A frame may lie there.
                let mut guest = supervisor.guest();
                offer(&mut guest);
                guest.vrings[RX].kick().unwrap();
                guest.front.features().unwrap();
                let mut tx = guest.hostile(TX);
                tx.send_valid().unwrap();
                guest.served(TX, &tx, 1);
                continue;
            }
            supervisor.one_line("receive buffer shorter than a header", || {
                let mut guest = supervisor.guest();
                offer(&mut guest);
                guest.breaks(RX);
                // The other half of the pair goes on.
                let mut tx = guest.hostile(TX);
                tx.send_valid().unwrap();
                guest.served(TX, &tx, 1);
            });
        }
        assert_eq!(supervisor.counters(RX)["faults"], 4);
        supervisor.end();
    });
}

/// The calls of the transmitq and receiveq are rung by a worker, that of the control queue by the
/// control thread.
#[test]
fn a_full_call_that_blocks_ends_its_session_whatever_its_ring() {
    in_shared_space(|| {
        let supervisor = Supervisor::new();
        let tap = supervisor.tap();
        run(&format!("ip address add 10.77.9.1/24 dev {tap}"));
        run(&format!("ip neighbor add 10.77.9.2 lladdr 02:00:00:00:00:33 dev {tap}"));
        let host = UdpSocket::bind("10.77.9.1:0").unwrap();
        for queue in [RX, TX, CTRL] {
            supervisor.one_line("one of its eventfds is full and blocks writers", || {
                let mut guest = supervisor.guest();
                let mut hostile = guest.hostile(queue);
                fill_eventfd(guest.vrings[queue].call_fd()).unwrap();
                match queue {
                    RX => hostile.offer(&[], &[], &[2048]).unwrap(),
                    TX => hostile.send_valid().unwrap(),
                    _ => hostile.offer(&[class::RX, class::RX_PROMISC, 1], &[3], &[1]).unwrap(),
                }
                guest.vrings[queue].kick().unwrap();
                let has_ended = || {
                    host.send_to(b"?", "10.77.9.2:9").unwrap();
                    guest.front.is_closed_within(Duration::from_millis(50)).unwrap()
                };
                assert!(wait_until(has_ended), "queue {queue}: the session goes on");
                assert_eq!(hostile.ring.used_idx(), 1);
            });
        }
        supervisor.end();
    });
}

#[test]
fn each_command_that_is_none_is_an_error_or_stops_the_control_queue() {
    in_shared_space(|| {
        let supervisor = Supervisor::new();
        for spoil in CtrlSpoil::ALL {
            let what = if spoil.has_status() {
                "command of the control queue refused"
            } else {
                "command without a status byte"
            };
            // Its own line is not the next guest's.
            let before = supervisor.warnings().len();
            let mut guest = supervisor.guest();
            let mut hostile = guest.hostile(CTRL);
            hostile.command(spoil).unwrap();
            if spoil.has_status() {
                guest.served(CTRL, &hostile, 1);
                assert_eq!(hostile.status().unwrap(), 1, "{spoil:?}");
                hostile.offer(&[class::RX, class::RX_PROMISC, 1], &[3], &[1]).unwrap();
                guest.served(CTRL, &hostile, 2);
                assert_eq!(hostile.status().unwrap(), 0, "after {spoil:?}");
            } else {
                guest.breaks(CTRL);
                assert_eq!(hostile.ring.used_idx(), 0, "{spoil:?}");
            }
            let mut tx = guest.hostile(TX);
            tx.send_valid().unwrap();
            guest.served(TX, &tx, 1);
            let lines = supervisor.lines_behind(before);
            assert_eq!(lines.len(), 1, "{spoil:?}: {lines:?}");
            assert!(lines[0].contains(what), "{spoil:?}: {lines:?}");
        }
        assert_eq!(supervisor.counters(CTRL)["faults"], 3);
        supervisor.next_guest_is_served();
        supervisor.neighbour_goes_on();
        supervisor.end();
    });
}

#[test]
fn a_driver_that_repeats_wrong_commands_fills_no_log() {
    in_shared_space(|| {
        let supervisor = Supervisor::new();
        let mut guest = supervisor.guest();
        let mut hostile = guest.hostile(CTRL);
        for count in 1..=200 {
            hostile.command(CtrlSpoil::ClassUnknown).unwrap();
            guest.served(CTRL, &hostile, count);
        }
        // A later line comes behind those.
        hostile.command(CtrlSpoil::NoStatus).unwrap();
        guest.breaks(CTRL);
        assert!(wait_until(|| supervisor.warnings().iter().any(|l| l.contains("queue stopped"))));
        assert_eq!(supervisor.warnings().len(), 11, "{:#?}", supervisor.warnings());
        supervisor.end();
    });
}

#[test]
fn kicks_whose_other_end_is_closed_cost_the_daemon_nothing() {
    in_shared_space(|| {
        let supervisor = Supervisor::new();
        let mut guest = supervisor.guest();
        for queue in [RX, TX, CTRL] {
            let (pipe, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
            let (socket, peer) = UnixStream::pair().unwrap();
            for (ours, theirs) in [(pipe, writer), (socket.into(), peer.into())] {
                let index = u32::try_from(queue).unwrap();
                guest.front.set_vring_kick(index, Some(ours.as_fd())).unwrap();
                drop::<OwnedFd>(theirs);
            }
            // A message that is answered behind those, and a look through the control API.
            guest.front.features().unwrap();
            let heard = supervisor.counters(queue)["kicks"];
            std::thread::sleep(Duration::from_millis(100));
            assert!(supervisor.counters(queue)["kicks"] <= heard + 2, "queue {queue}");
        }
        supervisor.neighbour_goes_on();
        drop(guest);
        supervisor.next_guest_is_served();
        supervisor.end();
    });
}

#[test]
fn each_spoiled_ring_of_a_network_device_stops_its_queue_alone() {
    in_shared_space(|| {
        for queue in [TX, RX, CTRL] {
            // A daemon each: lines beyond a bound are not written.
            let supervisor = Supervisor::new();
            for spoil in Spoil::ALL {
                // A chain that is wrong for a block request may be right here.
                if matches!(spoil, Spoil::NoStatus | Spoil::ShortHeader) {
                    continue;
                }
                // A control queue takes one command at a time: the head has come back by then.
                if queue == CTRL && spoil == Spoil::HeadTwice {
                    continue;
                }
                let before = supervisor.warnings().len();
                let mut guest = supervisor.guest();
                let mut ring = HostileRing::new(&guest.arena, &guest.vrings[queue]).unwrap();
                ring.offer(spoil).unwrap();
                guest.breaks(queue);
                // The first of a head that is available twice is a frame, which is too short.
                let answered = u16::from(queue == TX && spoil == Spoil::HeadTwice);
                assert_eq!(ring.used_idx(), answered, "{spoil:?} was answered");
                let other = if queue == TX { CTRL } else { TX };
                let mut hostile = guest.hostile(other);
                if other == TX {
                    hostile.send_valid().unwrap();
                } else {
                    hostile.offer(&[class::RX, class::RX_PROMISC, 1], &[3], &[1]).unwrap();
                }
                guest.served(other, &hostile, 1);
                let lines = supervisor.lines_behind(before);
                assert_eq!(lines.len(), 1, "{queue} {spoil:?}: {lines:?}");
            }
            supervisor.next_guest_is_served();
            supervisor.neighbour_goes_on();
            supervisor.end();
        }
    });
}

#[test]
fn receive_buffers_cut_away_cost_that_session_only() {
    in_shared_space(|| {
        let supervisor = Supervisor::new();
        let tap = supervisor.tap();
        run(&format!("ip address add 10.77.3.1/24 dev {tap}"));
        run(&format!("ip neighbor add 10.77.3.2 lladdr 02:00:00:00:00:33 dev {tap}"));
        let host = UdpSocket::bind("10.77.3.1:0").unwrap();
        supervisor.one_line("guest memory was truncated", || {
            let mut guest = supervisor.guest();
            let mut hostile = guest.hostile(RX);
            let addr = guest.arena.alloc(2048, 16).unwrap();
            let buffer = Descriptor { addr, len: 2048, flags: DESC_F_WRITE, next: 0 };
            for head in 0..8 {
                hostile.ring.set_descriptor(head, buffer);
                hostile.ring.make_available(head);
            }
            guest.vrings[RX].kick().unwrap();
            guest.front.features().unwrap();
            // The rings lie below what is cut away.
            rustix::fs::ftruncate(guest.arena.table()[0].1, 0x1000).unwrap();
            let ended = wait_until(|| {
                host.send_to(&[7; 1000], "10.77.3.2:9").unwrap();
                guest.front.is_closed_within(Duration::from_millis(20)).unwrap()
            });
            assert!(ended, "the session goes on");
        });
        supervisor.end();
    });
}

#[test]
fn a_command_cut_away_costs_that_session_though_only_the_control_queue_touches_it() {
    in_shared_space(|| {
        let supervisor = Supervisor::new();
        supervisor.one_line("guest memory was truncated", || {
            let mut guest = supervisor.guest();
            let mut hostile = guest.hostile(CTRL);
            // Its worker may look at the ring at any time: not before the memory is cut away.
            let index = u32::try_from(CTRL).unwrap();
            guest.front.set_vring_enable(index, false).unwrap();
            hostile.command(CtrlSpoil::DataHuge).unwrap();
            // The rings lie below what is cut away, and no other queue has anything to do.
            rustix::fs::ftruncate(guest.arena.table()[0].1, 0x1000).unwrap();
            guest.front.set_vring_enable(index, true).unwrap();
            assert!(guest.front.is_closed_within(LONG).unwrap(), "the session goes on");
        });
        supervisor.end();
    });
}

#[test]
fn after_many_hostile_guests_the_daemon_holds_what_it_held() {
    in_shared_space(|| {
        let supervisor = Supervisor::new();
        supervisor.next_guest_is_served();
        let before = supervisor.settled();
        for round in 0..60usize {
            let mut guest = supervisor.guest();
            match round % 3 {
                0 => {
                    guest.hostile(RX).receive(RxSpoil::OneByte).unwrap();
                    guest.breaks(RX);
                }
                1 => {
                    guest.hostile(CTRL).command(CtrlSpoil::NoStatus).unwrap();
                    guest.breaks(CTRL);
                }
                _ => {
                    let mut hostile = guest.hostile(TX);
                    hostile.send(TxSpoil::ALL[round % TxSpoil::ALL.len()]).unwrap();
                    guest.served(TX, &hostile, 1);
                }
            }
        }
        supervisor.next_guest_is_served();
        // Threads for calls that may block come and go: at most one for the device and the socket.
        supervisor.holds_no_more_than(before, 2);
        supervisor.neighbour_goes_on();
        supervisor.end();
    });
}
