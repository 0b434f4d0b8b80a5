//! An interface that is served by AF_XDP: a veth whose other end the kernel answers on.

mod lent;

use crate::guest::{
    GUEST, GUEST_MAC, Guest, HOST, arp_request, echo_request, ether_type, ethernet, halves, ipv4,
    is_ipv4, wait_for_input,
};
use crate::space::{TIMEOUT, in_own_space, link, opened_again, run, wait_until_gone};
use manyring_backend::net::tap::TapError;
use manyring_backend::net::tap::lent::{Lent, Owner};
use manyring_backend::net::xdp::{XdpOptions, XdpPort};
use manyring_backend::net::{Frames, HostFilter, Incoming, Port, Sent, Stop};
use manyring_backend::sys::link::LinkEvent;
use manyring_memory::{Mapping, SliceList, copy_from_slices};
use manyring_wire::net::rss::RssConfig;
use manyring_wire::net::{HEADER_SIZE, Offloads, RawNetHeader};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a frame that no chunk holds, whatever the MTU.
const LONG: usize = 4000;

fn options(name: &str, queue_pairs: usize) -> XdpOptions {
    let (mtu, up) = (None, Some(true));
    XdpOptions { name: name.into(), queue_pairs, mtu, up, zero_copy: false, lends: false }
}

/// Makes a cable from `v0` to `v1`, which has the host's address and leaves no checksum unfinished.
fn make_veth(more: &str) {
    run(format!("ip link add v0 {more}type veth peer name v1 {more}").trim());
    run("ethtool -K v1 tx off");
    run("ip link set v0 addrgenmode none");
    run("ip addr add 10.77.0.1/24 dev v1");
    run("ip link set v1 addrgenmode none up");
}

/// Frames that have arrived at the other end since it was made.
fn arrived() -> usize {
    packets_of("v1")
}

/// Frames that have arrived at our end.
fn received() -> usize {
    packets_of("v0")
}

fn packets_of(name: &str) -> usize {
    let path = format!("/sys/class/net/{name}/statistics/rx_packets");
    std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..TIMEOUT.as_millis() {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{what}");
}

/// Waits until both ends send: the kernel drops what it sends until it has heard of the carrier.
fn wait_until_up() {
    let is_up = |v: &str| {
        let path = format!("/sys/class/net/{v}/operstate");
        std::fs::read_to_string(path).unwrap() == "up\n"
    };
    wait_for("both ends are up", || is_up("v0") && is_up("v1"));
}

/// Asks the host for its address, and has an echo of `len` bytes come back whole.
fn echoes(port: &dyn Port, pair: usize, len: usize) {
    wait_until_up();
    let (mut tx, mut rx) = halves(port, pair);
    let mut guest = Guest::new();
    guest.send(&mut *tx, &arp_request(GUEST, HOST));
    let (_, reply) = guest.recv(&mut *rx, |frame| ether_type(frame) == 0x0806);
    let host_mac: [u8; 6] = reply[6..12].try_into().unwrap();
    let packet = ipv4(GUEST, HOST, 1, &echo_request(7, len));
    let frame = ethernet(host_mac, GUEST_MAC, 0x0800, &packet);
    let sent = guest.send_in(&mut *tx, RawNetHeader::default(), &frame, 100);
    assert_eq!(sent, Sent { taken: 1, ..Sent::default() });
    let (header, reply) = guest.recv(&mut *rx, |frame| is_ipv4(frame, 1));
    assert_eq!(header, RawNetHeader::default());
    assert_eq!((reply[34], &reply[38..]), (0, &packet[24..]));
}

#[test]
fn the_kernel_answers_through_an_interface_and_gets_it_back() {
    in_own_space(|| {
        make_veth("");
        let port = XdpPort::open(&options("v0", 1)).unwrap();
        assert_eq!((port.kind(), port.interface(), port.mtu()), ("xdp", Some("v0"), Some(1500)));
        assert_eq!(port.guest_mac(), link("v0").unwrap().address);
        assert_eq!((port.taken(), port.given()), Default::default());
        port.set_attached(0, true).unwrap();
        for len in [1, 100, 1400] {
            echoes(&port, 0, len);
        }
        port.set_mtu(1600).unwrap();
        assert_eq!(link("v0").unwrap().mtu, 1600);
        assert_eq!(port.set_mtu(4000), Err(Errno::MSGSIZE));
        // Another process, or another port, cannot have it at the same time.
        assert_eq!(XdpPort::open(&options("v0", 1)).err(), Some(TapError::Busy("v0".into())));
        drop(port);
        let port = opened_again(|| XdpPort::open(&options("v0", 1)));
        port.set_attached(0, true).unwrap();
        echoes(&port, 0, 10);
    });
}

#[test]
fn what_cannot_be_served_is_said_in_words() {
    in_own_space(|| {
        make_veth("");
        let error = |name: &str, pairs| XdpPort::open(&options(name, pairs)).unwrap_err();
        assert_eq!(error("v9", 1), TapError::Missing("v9".into()));
        let few = TapError::FewQueues { name: "v0".into(), queue_pairs: 2 };
        assert_eq!(error("v0", 2), few);
        assert!(few.to_string().contains("ethtool -L v0 combined 2"));
        run("ip link set v0 mtu 9000");
        let long = TapError::MtuLong { name: "v0".into(), mtu: 9000, max: 3822 };
        assert_eq!(error("v0", 1), long);
        assert_eq!(error("v0", 0), TapError::QueuePairs(0));
        // With larger chunks, longer frames pass.
        let port = XdpPort::open(&XdpOptions { mtu: Some(3000), ..options("v0", 1) }).unwrap();
        run("ip link set v1 mtu 3000");
        port.set_attached(0, true).unwrap();
        echoes(&port, 0, 2900);
    });
}

#[test]
fn each_pair_is_a_queue_and_one_that_is_not_used_is_the_hosts() {
    in_own_space(|| {
        make_veth("numtxqueues 2 numrxqueues 2 ");
        let [port, other] = ["v0", "v1"].map(|v| XdpPort::open(&options(v, 2)).unwrap());
        let [(_tx0, mut rx0), (_tx1, mut rx1)] = [0, 1].map(|pair| halves(&port, pair));
        let [(mut from0, _rx2), (mut from1, _rx3)] = [0, 1].map(|pair| halves(&other, pair));
        let mut guest = Guest::new();
        let marked = |mark| ethernet([0xff; 6], GUEST_MAC, 0x88b5, &[mark; 46]);
        wait_until_up();
        for attached in [[true, true], [false, true], [true, false], [true, true]] {
            for (pair, attached) in attached.into_iter().enumerate() {
                port.set_attached(pair, attached).unwrap();
            }
            let host = || {
                let path = "/sys/class/net/v0/statistics/rx_packets";
                std::fs::read_to_string(path).unwrap().trim().parse::<u64>().unwrap()
            };
            let before = host();
            guest.send(&mut *from0, &marked(1));
            guest.send(&mut *from1, &marked(2));
            wait_for("both frames arrive", || host() >= before + 2);
            for (rx, mark, attached) in [(&mut rx0, 1, attached[0]), (&mut rx1, 2, attached[1])] {
                if attached {
                    let (_, frame) = guest.recv(&mut **rx, |frame| ether_type(frame) == 0x88b5);
                    assert_eq!(frame, marked(mark));
                }
                assert_eq!(guest.try_recv(&mut **rx).err(), Some(Errno::AGAIN), "{mark}");
            }
        }
        assert_eq!(port.set_attached(2, true), Err(Errno::INVAL));
    });
}

/// A burst that has `count` frames of `len` bytes, numbered in their first payload byte.
fn burst(count: usize, len: usize) -> Frames {
    let memory = Arc::new(Mapping::anonymous(1 << 20).unwrap());
    let mut frames = Frames::new().unwrap();
    let places: Vec<_> =
        (0..count).map(|n| (n as u64 * 8192, u32::try_from(len).unwrap())).collect();
    let slices = SliceList::of_mapping(&memory, &places).unwrap();
    for n in 0..count {
        let mut frame = ethernet([0xff; 6], GUEST_MAC, 0x88b5, &vec![0; len - 14]);
        frame[14] = u8::try_from(n).unwrap();
        memory.slice(n * 8192, len).unwrap().write_from(&frame);
        let token = u16::try_from(n).unwrap();
        let piece = slices.pieces(n..n + 1);
        assert!(frames.push_as(token, &RawNetHeader::default(), piece, 0, len));
    }
    frames
}

#[test]
fn bursts_arrive_whole_and_what_no_chunk_holds_is_refused() {
    in_own_space(|| {
        make_veth("");
        let port = XdpPort::open(&options("v0", 1)).unwrap();
        let (mut tx, _rx) = halves(&port, 0);
        let before = arrived();
        let frames = burst(64, 1514);
        for _ in 0..100 {
            let mut first = 0;
            while first < 64 {
                let sent = tx.send(&frames, first);
                assert_eq!((sent.later, sent.lost, sent.stop), (0, 0, None));
                first += sent.taken;
            }
        }
        wait_for("6400 frames arrive", || arrived() >= before + 6400);
        let sent = tx.send(&burst(3, LONG), 0);
        let refused = Sent { taken: 3, refused: 3, lost: 7, ..Sent::default() };
        assert_eq!(sent, refused);
        let short = Guest::new().send_in(&mut *tx, RawNetHeader::default(), &[1; 13], 13);
        assert_eq!(short, Sent { taken: 1, refused: 1, lost: 1, ..Sent::default() });
        assert_eq!(port.transmit(&[0; LONG]), Err(Errno::MSGSIZE));
        let now = arrived();
        port.transmit(&ethernet([0xff; 6], GUEST_MAC, 0x88b5, &[0; 50])).unwrap();
        wait_for("the frame of the device itself arrives", || arrived() > now);
    });
}

#[test]
fn an_interface_that_is_down_loses_frames_and_goes_on_when_it_is_up() {
    in_own_space(|| {
        make_veth("");
        let port = XdpPort::open(&options("v0", 1)).unwrap();
        port.set_attached(0, true).unwrap();
        let (mut tx, _rx) = halves(&port, 0);
        let frames = burst(64, 100);
        for _ in 0..3 {
            run("ip link set v0 down");
            let mut down = 0;
            for _ in 0..40 {
                let sent = tx.send(&frames, 0);
                assert_ne!(sent.stop, Some(Stop::Blocked));
                assert_eq!(sent.later, 0, "nobody waits for an interface that is down");
                down += sent.down;
            }
            assert!(down > 2000, "{down}");
            run("ip link set v0 up");
            wait_for("frames are taken again", || link("v0").is_some_and(|link| link.is_up));
            let before = arrived();
            let (mut first, mut lost) = (0, 0);
            while first < 64 {
                let sent = tx.send(&frames, first);
                (first, lost) = (first + sent.taken, lost + sent.down);
            }
            assert_eq!(lost, 0);
            wait_for("they arrive", || arrived() >= before + 64);
        }
    });
}

#[test]
fn an_interface_that_is_deleted_with_frames_in_flight_is_joined_again_by_its_name() {
    in_own_space(|| {
        make_veth("");
        let port = XdpPort::open(&options("v0", 1)).unwrap();
        port.set_attached(0, true).unwrap();
        // Halves of workers stay as they are, with frames that they have not released.
        let (mut tx, mut rx) = halves(&port, 0);
        let frames = burst(64, 100);
        for round in 0..3 {
            let index = link("v0").unwrap().index;
            wait_until_up();
            Guest::new().send(&mut *tx, &arp_request(GUEST, HOST));
            assert!(wait_for_input(&*rx), "round {round}");
            let Incoming::Lent(lent) = rx.incoming(64) else { panic!("it lends") };
            assert!(lent.count() > 0);
            tx.send(&frames, 0);
            assert!(!port.is_gone());
            run("ip link del v0");
            wait_until_gone("v0");
            let name = "v0".to_owned();
            assert!(port.heeds(&LinkEvent { index, name: name.clone(), is_gone: true }));
            assert!(port.is_gone());
            let sent = tx.send(&frames, 0);
            assert!(sent.down > 0 || sent.taken == 32, "{sent:?}");
            assert_eq!(tx.send(&frames, 0).down, 64);
            assert_eq!(port.join_again(), Err(TapError::Missing(name.clone())));
            make_veth("");
            assert!(port.heeds(&LinkEvent { index: 0, name, is_gone: false }));
            assert_eq!(port.join_again(), Ok(()));
            assert!(!port.is_gone());
            port.set_attached(0, true).unwrap();
            // The frame of the former interface is gone with it.
            rx.release(1);
            wait_until_up();
            let mut guest = Guest::new();
            guest.send(&mut *tx, &arp_request(GUEST, HOST));
            let (_, reply) = guest.recv(&mut *rx, |frame| ether_type(frame) == 0x0806);
            assert_eq!(reply[28..32], HOST);
        }
        drop((tx, rx));
        echoes(&port, 0, 300);
    });
}

#[test]
fn frames_that_nobody_takes_are_dropped_and_cost_no_chunk() {
    in_own_space(|| {
        make_veth("");
        let port = XdpPort::open(&options("v0", 1)).unwrap();
        port.set_attached(0, true).unwrap();
        let (_tx, mut rx) = halves(&port, 0);
        let other = XdpPort::open(&options("v1", 1)).unwrap();
        let (mut from, _) = halves(&other, 0);
        let frames = burst(64, 200);
        for round in 0..5 {
            for _ in 0..20 {
                let mut first = 0;
                while first < 64 {
                    first += from.send(&frames, first).taken;
                }
            }
            assert!(wait_for_input(&*rx));
            let (mut count, mut row) = (0, Vec::new());
            loop {
                let Incoming::Lent(lent) = rx.incoming(usize::MAX) else { panic!("it lends") };
                if lent.count() == 0 {
                    break;
                }
                // Some are taken; those that are left are lent again.
                let some = lent.count().min(10);
                for index in 0..some {
                    let mut bytes = vec![0xff; HEADER_SIZE + 200];
                    assert_eq!(copy_from_slices(lent.slices(index), &mut bytes), bytes.len());
                    assert_eq!(bytes[..HEADER_SIZE], [0; HEADER_SIZE]);
                    row.push(bytes[HEADER_SIZE + 14]);
                }
                count += some;
                rx.release(some);
            }
            // 256 chunks were there, and are there again.
            assert!((200..=256).contains(&count), "round {round}: {count}");
            let in_order = row.windows(2).all(|two| two[1] == (two[0] + 1) % 64);
            assert!(in_order, "round {round}: {row:?}");
        }
    });
}

#[test]
fn an_interface_receives_all_groups_as_long_as_a_port_has_it_and_says_which_addresses() {
    in_own_space(|| {
        make_veth("");
        let flags = |name: &str| run(&format!("ip -d link show {name}"));
        let port = XdpPort::open(&options("v0", 1)).unwrap();
        let only_to = link("v0").unwrap().address;
        assert!(only_to.is_some());
        assert_eq!(port.host_filter(), HostFilter { only_to, ..HostFilter::default() });
        assert!(flags("v0").contains(" allmulti 1 "), "{}", flags("v0"));
        drop(port);
        // A process that another test starts has copies of all descriptors for a moment.
        wait_for("it receives no groups", || flags("v0").contains(" allmulti 0 "));
        run("ip link set v0 promisc on");
        let port = opened_again(|| XdpPort::open(&options("v0", 1)));
        assert_eq!(port.host_filter(), HostFilter::default());
    });
}

/// The process that owns the interface, as one that serves its queues reaches it.
#[derive(Debug)]
struct Local(Arc<XdpPort>);

impl Owner for Local {
    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno> {
        self.0.set_attached(index, attached)
    }

    fn set_offloads(&self, offloads: Offloads) -> Result<(), Errno> {
        self.0.set_offloads(offloads)
    }

    fn set_rss(&self, _rss: Option<&RssConfig>) -> Result<(), Errno> {
        Err(Errno::INVAL)
    }

    fn suspect(&self) {}
}
