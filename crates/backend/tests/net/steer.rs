//! The host's frames of a flow come by the pair by which the guest sends that flow.

use crate::guest::{GUEST, GUEST_MAC, Guest, HOST, checksum, ethernet, halves, ipv4, is_ipv4};
use crate::space::{in_own_space, link, named, run};
use manyring_backend::net::tap::{TapOptions, TapPort, TapSource};
use manyring_backend::net::{Frames, Port, PortRx, PortTx};
use manyring_backend::sys::{bpf, tuntap};
use manyring_memory::{Mapping, SliceList, install_sigbus_handler};
use manyring_wire::net::{HDR_F_NEEDS_CSUM, RawNetHeader};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use std::net::UdpSocket;
use std::sync::Arc;
use zerocopy::little_endian::U16;

const PAIRS: usize = 4;
const UDP: u8 = 17;
/// Where the host answers.
const ECHO: u16 = 7;
/// Before a datagram over IPv4 whose checksum is left to the host.
const PARTIAL: RawNetHeader = RawNetHeader {
    flags: HDR_F_NEEDS_CSUM,
    gso_type: 0,
    hdr_len: U16::ZERO,
    gso_size: U16::ZERO,
    csum_start: U16::new(34),
    csum_offset: U16::new(6),
    num_buffers: U16::ZERO,
};

/// A guest with four pairs, and a host that sends each datagram back.
struct Scene {
    guest: Guest,
    host: UdpSocket,
    port: TapPort,
    pairs: Vec<(Box<dyn PortTx>, Box<dyn PortRx>)>,
    /// Flows that were steered anew, as the port says.
    steered: usize,
}

impl Scene {
    /// On tap `name`. The pairs are attached in an order of their own.
    fn new(name: &str, steer: bool) -> Self {
        Self::over(TapPort::open(TapOptions { steer, ..named(name, PAIRS) }).unwrap())
    }

    /// On this port.
    fn over(port: TapPort) -> Self {
        let name = port.name().to_owned();
        run(&format!("ip addr replace 10.77.0.1/24 dev {name}"));
        let to = "10.77.0.2 lladdr 02:00:00:00:00:11";
        run(&format!("ip neigh replace {to} dev {name} nud permanent"));
        [2, 0, 3, 1].iter().for_each(|pair| port.set_attached(*pair, true).unwrap());
        let pairs = (0..PAIRS).map(|pair| halves(&port, pair)).collect();
        let host = UdpSocket::bind(("10.77.0.1", ECHO)).unwrap();
        host.set_nonblocking(true).unwrap();
        Self { guest: Guest::new(), host, port, pairs, steered: 0 }
    }

    /// A frame of the flow from `port`, whose checksum is left to the host.
    fn datagram(&self, port: u16, to: u16, payload: &[u8]) -> Vec<u8> {
        let len = u16::try_from(8 + payload.len()).unwrap();
        let sum = checksum(&[&GUEST[..], &HOST, &[0, UDP], &len.to_be_bytes()].concat());
        let header = [port, to, len, !sum].map(u16::to_be_bytes).concat();
        let packet = ipv4(GUEST, HOST, UDP, &[&header, payload].concat());
        let host = link(self.port.name()).unwrap().address.unwrap();
        ethernet(host, GUEST_MAC, 0x0800, &packet)
    }

    /// Sends a datagram of the flow from `port` by `pair`.
    fn send(&mut self, port: u16, pair: usize, to: u16) {
        self.send_copies(&self.datagram(port, to, &[1]), pair, 1);
    }

    /// Sends a frame by `pair` `count` times in one burst, which leaves as one joined frame.
    fn send_copies(&mut self, frame: &[u8], pair: usize, count: usize) {
        let tx = &mut *self.pairs[pair].0;
        let sent = self.guest.send_copies(tx, PARTIAL, frame, count);
        let merged = if count > 1 { count } else { 0 };
        assert_eq!((sent.taken, sent.lost, sent.merged.packets), (count, 0, merged));
        self.steered += sent.steered;
    }

    /// The ports of `count` flows, from `port` on, each with a slot of its own: where three flows
    /// have the same two slots, only the first two are steered. If the host's own table steers, any
    /// ports will do.
    fn flows(&mut self, port: u16, count: usize, is_steered: bool) -> Vec<u16> {
        let mut flows = Vec::new();
        for port in port.. {
            if flows.len() == count {
                break;
            }
            let before = std::mem::take(&mut self.steered);
            // By another pair than the tests begin with.
            self.send(port, (flows.len() + PAIRS - 1) % PAIRS, ECHO);
            self.host.recv(&mut [0; 9]).expect("it is delivered at once");
            if !is_steered || self.steered > 0 {
                flows.push(port);
            }
            self.steered = before;
        }
        for (_, rx) in &mut self.pairs {
            self.guest.drain(&mut **rx, |_| false);
        }
        flows
    }

    /// The pair by which the answer comes to a datagram of this flow, sent by `pair`.
    fn answer(&mut self, port: u16, pair: usize) -> usize {
        self.send(port, pair, ECHO);
        let (len, from) = self.host.recv_from(&mut [0; 9]).expect("it is delivered at once");
        assert_eq!((len, from.port()), (1, port));
        self.arrival(port)
    }

    /// The pair by which a datagram of the host comes to this port of the guest.
    fn arrival(&mut self, port: u16) -> usize {
        self.host.send_to(&[2], ("10.77.0.2", port)).unwrap();
        let mut counts = Vec::new();
        for (_, rx) in &mut self.pairs {
            counts.push(self.guest.drain(&mut **rx, |frame| is_ipv4(frame, UDP)));
        }
        assert_eq!(counts.iter().sum::<usize>(), 1, "{counts:?}");
        counts.iter().position(|count| *count == 1).unwrap()
    }
}

/// A queue of `mr0` that another process has.
fn foreign(header: u16) -> OwnedFd {
    let flags = tuntap::IFF_TAP | tuntap::IFF_NO_PI | tuntap::IFF_MULTI_QUEUE | header;
    let node = tuntap::open("/dev/net/tun".as_ref()).unwrap();
    tuntap::join(node.as_fd(), "mr0", flags).unwrap();
    node
}

#[test]
fn a_flow_comes_back_by_the_pair_that_it_was_sent_by() {
    for steer in [true, false] {
        in_own_space(|| {
            let mut scene = Scene::new("mr0", steer);
            let flows = scene.flows(1000, 32, steer);
            for turn in 0..3 {
                for (index, flow) in flows.iter().enumerate() {
                    let pair = (index + turn) % PAIRS;
                    assert_eq!(scene.answer(*flow, pair), pair, "{steer}: {flow}, turn {turn}");
                }
                assert_eq!(scene.steered, if steer { 32 * (turn + 1) } else { 0 });
            }
        });
    }
}

#[test]
fn flows_of_a_pair_that_is_not_used_any_more_come_by_another() {
    in_own_space(|| {
        let mut scene = Scene::new("mr0", true);
        let flows = scene.flows(2000, 16, true);
        let flows: Vec<_> = flows.into_iter().zip((0..PAIRS).cycle()).collect();
        for (flow, pair) in &flows {
            assert_eq!(scene.answer(*flow, *pair), *pair);
        }
        // The host puts its last queue in the place of this one.
        scene.port.set_attached(0, false).unwrap();
        for (flow, pair) in &flows {
            let by = scene.answer(*flow, *pair);
            assert!(if *pair == 0 { by != 0 } else { by == *pair }, "flow {flow}: {by}");
        }
        for pair in [3, 1] {
            scene.port.set_attached(pair, false).unwrap();
            assert_eq!(scene.answer(3000, 2), 2);
        }
        [1, 0, 3].iter().for_each(|pair| scene.port.set_attached(*pair, true).unwrap());
        for (flow, pair) in &flows {
            assert_eq!(scene.answer(*flow, *pair), *pair, "flow {flow}");
        }
    });
}

#[test]
fn a_guest_that_sends_from_everywhere_moves_no_flow_of_its_own_nor_of_another_guest() {
    in_own_space(|| {
        let mut victim = Scene::new("mr0", true);
        let port = TapPort::open(named("mr1", PAIRS)).unwrap();
        (0..PAIRS).for_each(|pair| port.set_attached(pair, true).unwrap());
        let mut other = port.open_tx(3).unwrap();
        let mut guest = Guest::new();
        let flows = victim.flows(4000, 8, true);
        for round in 0..10u16 {
            for (pair, flow) in (0..PAIRS).cycle().zip(&flows) {
                assert_eq!(victim.answer(*flow, pair), pair, "round {round}, flow {flow}");
            }
            // Five flows for each slot of a table, by the end; half of them to nobody's port.
            for n in 0..2000u16 {
                let (from, to) = (10_000 + n + 2000 * round, 9 + n % 2);
                victim.send(from, 3, to);
                let datagram = [from.to_be_bytes(), to.to_be_bytes(), [0, 8], [0; 2]].concat();
                let packet = ipv4(GUEST, HOST, UDP, &datagram);
                let frame = ethernet([2; 6], GUEST_MAC, 0x0800, &packet);
                guest.send_in(&mut *other, RawNetHeader::default(), &frame, frame.len());
            }
            for (_, rx) in &mut victim.pairs {
                victim.guest.drain(&mut **rx, |_| false);
            }
            for (pair, flow) in (0..PAIRS).cycle().zip(&flows) {
                assert_eq!(victim.arrival(*flow), pair, "round {round}, flow {flow}");
            }
        }
    });
}

#[test]
fn who_may_load_no_program_is_steered_by_the_host() {
    in_own_space(|| {
        let before = capabilities(None).unwrap();
        let mut fewer = before;
        fewer.effective -= CapabilitySet::BPF | CapabilitySet::SYS_ADMIN;
        set_capabilities(None, fewer).unwrap();
        assert_eq!(bpf::Words::new(1).err(), Some(Errno::PERM));
        let mut scene = Scene::new("mr0", true);
        for flow in 0..16u16 {
            let pair = usize::from(flow) % PAIRS;
            assert_eq!(scene.answer(1000 + flow, pair), pair, "flow {flow}");
        }
        assert_eq!(scene.steered, 0);
        set_capabilities(None, before).unwrap();
    });
}

#[test]
fn a_tap_that_stays_is_left_to_the_host_again() {
    in_own_space(|| {
        run("ip tuntap add dev mr0 mode tap multi_queue");
        let check = |steer: bool| {
            let mut scene = Scene::new("mr0", steer);
            for (pair, flow) in (0..PAIRS).cycle().zip(scene.flows(1000, 16, steer)) {
                assert_eq!(scene.answer(flow, pair), pair, "{steer}: flow {flow}");
            }
        };
        check(true);
        // The next user of the tap must get the host's own steering.
        let queues: Vec<_> = (0..PAIRS).map(|_| foreign(0)).collect();
        let host = UdpSocket::bind("10.77.0.1:0").unwrap();
        let mut bytes = [0; 200];
        for pair in 0..PAIRS {
            // By the host's own rule: the queue that has sent such a flow last.
            let datagram =
                [[0, 9], host.local_addr().unwrap().port().to_be_bytes(), [0, 8], [0; 2]];
            let packet = ipv4(GUEST, HOST, UDP, &datagram.concat());
            let to = link("mr0").unwrap().address.unwrap();
            rustix::io::write(&queues[pair], &ethernet(to, GUEST_MAC, 0x0800, &packet)).unwrap();
            queues.iter().for_each(|queue| while rustix::io::read(queue, &mut bytes).is_ok() {});
            host.send_to(&[1], "10.77.0.2:9").unwrap();
            let has_frame = |queue| rustix::io::read(queue, &mut [0; 200]).is_ok();
            let by: Vec<_> = queues.iter().map(has_frame).collect();
            assert!(by[pair] && by.iter().filter(|is| **is).count() == 1, "{pair}: {by:?}");
        }
        drop(queues);
        // One that did not clean up behind itself: a program that knows one queue alone.
        let left = foreign(0);
        let all_to_first = [bpf::Insn::new(0xb7, (0, 0), 0, 0), bpf::Insn::new(0x95, (0, 0), 0, 0)];
        let program = bpf::load(&all_to_first).unwrap();
        tuntap::set_steering(left.as_fd(), Some(program.as_fd())).unwrap();
        drop((left, program));
        check(false);
    });
}

#[test]
fn a_flow_that_leaves_merged_comes_back_by_its_pair_whatever_it_carries() {
    for steer in [true, false] {
        in_own_space(|| {
            let mut scene = Scene::new("mr0", steer);
            let flows = scene.flows(1000, 16, steer);
            let mut last = None;
            for (pair, flow) in (0..PAIRS).cycle().zip(flows) {
                // The payload looks like a frame of the flow before, which another pair sends.
                let other = scene.datagram(last.map_or(999, |(_, flow)| flow), ECHO, &[1]);
                scene.send_copies(&scene.datagram(flow, ECHO, &other), pair, 6);
                assert_eq!(scene.arrival(flow), pair, "{steer}: flow {flow}");
                if let Some((pair, flow)) = last.replace((pair, flow)) {
                    assert_eq!(scene.arrival(flow), pair, "{steer}: {flow}, before it");
                }
            }
            assert_eq!(scene.steered, if steer { 16 } else { 0 });
        });
    }
}

/// Senders in a tunnel have one number: none of them takes the others with it.
#[test]
fn what_several_pairs_send_through_a_tunnel_comes_by_one_queue() {
    in_own_space(|| {
        let mut scene = Scene::new("mr0", true);
        let protocol = rustix::net::Protocol::from_raw(47.try_into().unwrap());
        let kind = rustix::net::SocketType::RAW;
        let host = rustix::net::socket(rustix::net::AddressFamily::INET, kind, Some(protocol));
        let (host, guest) = (host.unwrap(), std::net::SocketAddrV4::new(GUEST.into(), 0));
        let to = link("mr0").unwrap().address.unwrap();
        let mut ways = Vec::new();
        for pair in [0, 1, 2, 3, 2, 0] {
            let frame = ethernet(to, GUEST_MAC, 0x0800, &ipv4(GUEST, HOST, 47, &[0; 40]));
            scene.guest.send(&mut *scene.pairs[pair].0, &frame);
            let flags = rustix::net::SendFlags::empty();
            rustix::net::sendto(&host, &[0; 40], flags, &guest).unwrap();
            let counts = scene.pairs.iter_mut();
            let counts = counts.map(|(_, rx)| scene.guest.drain(&mut **rx, |f| is_ipv4(f, 47)));
            ways.push(counts.collect::<Vec<_>>());
        }
        assert!(ways.iter().all(|way| *way == ways[0]), "{ways:?}");
    });
}

#[test]
fn a_tap_of_which_others_have_queues_is_left_to_the_host() {
    for (comes_later, is_handed_in) in [(true, false), (true, true), (false, true)] {
        in_own_space(|| {
            let what = format!("later {comes_later}, handed in {is_handed_in}");
            run("ip tuntap add dev mr0 mode tap multi_queue");
            run("ip link set mr0 up");
            let mut others = Vec::new();
            if !comes_later {
                others.push(foreign(tuntap::IFF_VNET_HDR));
            }
            let queues = || (0..PAIRS).map(|_| foreign(tuntap::IFF_VNET_HDR)).collect();
            let options = named("mr0", PAIRS);
            let source = if is_handed_in { TapSource::Fds(queues()) } else { options.source };
            let port = TapPort::open(TapOptions { source, ..options }).unwrap();
            let mut scene = Scene::over(port);
            if comes_later {
                others.push(foreign(tuntap::IFF_VNET_HDR));
            }
            // The guest uses fewer pairs for a while.
            scene.port.set_attached(0, false).unwrap();
            scene.port.set_attached(0, true).unwrap();
            for flow in 0..16u16 {
                let pair = usize::from(flow) % PAIRS;
                assert_eq!(scene.answer(1000 + flow, pair), pair, "{what}: flow {flow}");
            }
        });
    }
}

#[test]
fn a_guest_inherits_no_flows() {
    in_own_space(|| {
        let mut scene = Scene::new("mr0", true);
        let flows = scene.flows(1000, 32, true);
        let mut spreads = Vec::new();
        for _ in 0..2 {
            for attached in [false, true] {
                for pair in [2, 0, 3, 1] {
                    scene.port.set_attached(pair, attached).unwrap();
                }
            }
            spreads.push(flows.iter().map(|flow| scene.arrival(*flow)).collect::<Vec<_>>());
            flows.iter().for_each(|flow| assert_eq!(scene.answer(*flow, 1), 1));
        }
        assert_eq!(spreads[0], spreads[1]);
    });
}

#[test]
fn a_long_frame_in_memory_that_is_gone_is_not_sent() {
    install_sigbus_handler();
    for steer in [true, false] {
        in_own_space(|| {
            let mut scene = Scene::new("mr0", steer);
            let file = rustix::fs::memfd_create("cut", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, 16_384).unwrap();
            let memory = Arc::new(Mapping::of_file(&file, 0, 16_384).unwrap());
            let slices = SliceList::of_mapping(&memory, &[(4096, 4000)]).unwrap();
            let mut frames = Frames::new().unwrap();
            for _ in 0..3 {
                assert!(frames.push(&RawNetHeader::default(), slices.all(), 0, 4000));
            }
            rustix::fs::ftruncate(&file, 4096).unwrap();
            assert_eq!(scene.pairs[0].0.send(&frames, 0).faulted, 3, "{steer}");
        });
    }
}

#[test]
fn a_tap_that_was_renamed_is_not_taken_for_the_one_that_has_its_name_now() {
    in_own_space(|| {
        let mut scene = Scene::new("mr0", true);
        run("ip link set mr0 down");
        run("ip link set mr0 name mr9");
        run("ip link set mr9 up");
        let other = TapPort::open(named("mr0", 2)).unwrap();
        scene.port.set_attached(1, false).unwrap();
        scene.port.set_attached(1, true).unwrap();
        let packet = ipv4(GUEST, HOST, UDP, &[7u16, 9, 8, 0].map(u16::to_be_bytes).concat());
        let frame = ethernet([2; 6], GUEST_MAC, 0x0800, &packet);
        let tx = &mut *scene.pairs[2].0;
        let sent = scene.guest.send_copies(tx, RawNetHeader::default(), &frame, 1);
        assert_eq!(sent.steered, 1, "it is steered still");
        drop(other);
    });
}
