//! One queue of a tap: what is sent arrives, what cannot be sent is told apart, and what the tap
//! was before it is again.

use crate::guest::{
    GUEST, GUEST_MAC, Guest, HOST, arp_request, echo_request, ether_type, ethernet, halves, ipv4,
    is_ipv4, wait_for_input,
};
use crate::space::{in_own_space, link, named, opened_again, run, wait_until_gone};
use manyring_backend::net::tap::{
    QUEUE_LENGTH, QUEUE_LENGTH_SHARERS_MAX, QueueLength, TapOptions, TapPort,
};
use manyring_backend::net::{
    Frames, Port, QueueLengthInfo, QueueLengthSource, Readiness, Sent, Stop,
};
use manyring_memory::{Mapping, SliceList, install_sigbus_handler};
use manyring_wire::net::{HDR_F_NEEDS_CSUM, HEADER_SIZE, RawNetHeader};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::net::UdpSocket;
use std::sync::Arc;

#[test]
fn the_kernel_answers_arp_and_echo_through_a_tap_that_goes_with_its_port() {
    in_own_space(|| {
        let port = TapPort::open(named("mr%d", 1)).unwrap();
        assert_eq!((port.name(), port.mtu(), port.queue_pairs()), ("mr0", Some(1500), 1));
        assert_eq!((port.kind(), port.guest_mac()), ("tap", None));
        run("ip addr add 10.77.0.1/24 dev mr0");
        let (mut tx, mut rx) = halves(&port, 0);
        let mut guest = Guest::new();
        guest.send(&mut *tx, &arp_request(GUEST, HOST));
        let (_, reply) = guest.recv(&mut *rx, |frame| ether_type(frame) == 0x0806);
        assert_eq!((&reply[..6], reply[21], &reply[28..32]), (&GUEST_MAC[..], 2, &HOST[..]));
        let host_mac: [u8; 6] = reply[6..12].try_into().unwrap();
        assert_eq!(link("mr0").unwrap().address, Some(host_mac));
        // In one piece, and in more pieces than one call takes.
        for (sequence, piece) in [(7, 4096), (8, 1)] {
            let packet = ipv4(GUEST, HOST, 1, &echo_request(sequence, 1400));
            let frame = ethernet(host_mac, GUEST_MAC, 0x0800, &packet);
            let sent = guest.send_in(&mut *tx, RawNetHeader::default(), &frame, piece);
            assert_eq!(sent, Sent { taken: 1, ..Sent::default() });
            assert!(wait_for_input(&*rx));
            let (header, reply) = loop {
                match guest.try_recv_in(&mut *rx, piece.max(64)) {
                    Ok((header, frame)) if is_ipv4(&frame, 1) => break (header, frame),
                    other => assert!(matches!(other, Ok(_) | Err(Errno::AGAIN)), "{other:?}"),
                }
            };
            assert_eq!((header.gso_type, reply.len()), (0, 14 + 28 + 1400));
            assert_eq!((reply[34], &reply[38..]), (0, &packet[24..]));
        }
        drop((tx, rx, port));
        // The interface that the port has created is deleted with the port.
        wait_until_gone("mr0");
    });
}

#[test]
fn a_tap_that_is_created_is_up_unless_it_shall_not_be_and_a_joined_one_stays_as_it_is() {
    in_own_space(|| {
        run("ip tuntap add dev mr2 mode tap");
        for (name, up, is_up) in
            [("mr0", None, true), ("mr1", Some(false), false), ("mr2", None, false)]
        {
            let port = TapPort::open(TapOptions { up, ..named(name, 1) }).unwrap();
            assert_eq!(link(name).unwrap().is_up, is_up, "{name}");
            assert_eq!(port.interface(), Some(name));
        }
    });
}

#[test]
fn a_joined_tap_stays_with_its_settings_and_without_offloads() {
    in_own_space(|| {
        run("ip tuntap add dev mr0 mode tap");
        run("ip link add br0 type bridge");
        let options = TapOptions {
            mtu: Some(9000),
            bridge: Some("br0".into()),
            sndbuf: Some(1 << 20),
            ..named("mr0", 1)
        };
        let port = TapPort::open(options).unwrap();
        let there = link("mr0").unwrap();
        assert_eq!((port.mtu(), there.mtu, there.is_up), (Some(9000), 9000, true));
        assert_eq!(there.master, Some(link("br0").unwrap().index));
        port.set_mtu(1400).unwrap();
        assert_eq!((port.mtu(), link("mr0").unwrap().mtu), (Some(1400), 1400));
        assert_eq!(port.set_mtu(65522), Err(Errno::INVAL));
        assert_eq!(port.mtu(), Some(1400));
        port.set_offloads(port.given()).unwrap();
        assert!(run("ethtool -k mr0").contains("tcp-segmentation-offload: on"));
        port.set_link(false);
        assert!(run("ip link show mr0").contains("NO-CARRIER"));
        port.set_link(true);
        assert!(!run("ip link show mr0").contains("NO-CARRIER"));
        drop(port);
        assert!(run("ethtool -k mr0").contains("tcp-segmentation-offload: off"));
        let there = link("mr0").unwrap();
        assert_eq!((there.mtu, there.is_up), (1400, true));
        // Once more, without a word about what it is.
        let options = || TapOptions { up: None, ..named("mr0", 1) };
        let again = opened_again(|| TapPort::open(options()));
        assert_eq!((again.mtu(), link("mr0").unwrap().master), (Some(1400), there.master));
    });
}

#[test]
fn frames_that_the_host_will_not_have_are_told_apart() {
    install_sigbus_handler();
    in_own_space(|| {
        let port = TapPort::open(TapOptions { up: Some(false), ..named("mr0", 1) }).unwrap();
        let (mut tx, mut rx) = halves(&port, 0);
        let mut guest = Guest::new();
        let frame = arp_request(GUEST, HOST);
        let sent = guest.send_burst(&mut *tx, &frame, 3);
        assert_eq!(sent, Sent { taken: 3, down: 3, lost: 0b111, ..Sent::default() });
        run("ip link set mr0 up");
        // The checksum would lie behind the end.
        let flags = HDR_F_NEEDS_CSUM;
        let lie = RawNetHeader { flags, csum_start: 4000.into(), ..RawNetHeader::default() };
        let sent = guest.send_in(&mut *tx, lie, &frame, 4096);
        assert_eq!(sent, Sent { taken: 1, misplaced: 1, lost: 1, ..Sent::default() });
        let sent = guest.send_in(&mut *tx, RawNetHeader::default(), &frame[..9], 4096);
        assert_eq!(sent, Sent { taken: 1, refused: 1, lost: 1, ..Sent::default() });
        // Memory of which a part was cut away, between two frames that are whole: from then on all
        // of it reads as zeroes, which are no frame.
        let file = rustix::fs::memfd_create("cut", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 8192).unwrap();
        let memory = Arc::new(Mapping::of_file(&file, 0, 8192).unwrap());
        memory.slice(0, 4096).unwrap().write_from(&frame);
        let mut frames = Frames::new().unwrap();
        let len = u32::try_from(frame.len()).unwrap();
        let slices = SliceList::of_mapping(&memory, &[(0, len), (4096, len), (0, len)]).unwrap();
        for index in 0..3 {
            let piece = slices.pieces(index..index + 1);
            frames.push(&RawNetHeader::default(), piece, 0, frame.len());
        }
        rustix::fs::ftruncate(&file, 4096).unwrap();
        assert_eq!(
            tx.send(&frames, 0),
            Sent { taken: 3, faulted: 2, lost: 0b110, ..Sent::default() }
        );
        assert_eq!(
            tx.send(&frames, 0),
            Sent { taken: 3, faulted: 3, lost: 0b111, ..Sent::default() }
        );
        // Memory that one guest has lost must not affect the frames of another guest.
        assert_eq!(guest.send_burst(&mut *tx, &frame, 1), Sent { taken: 1, ..Sent::default() });
        guest.drain(&mut *rx, |_| true);
        run("ip link del mr0");
        assert_eq!(guest.send_burst(&mut *tx, &frame, 1).down, 1, "it is gone");
        assert!(!matches!(guest.try_recv(&mut *rx), Err(Errno::AGAIN) | Ok(_)));
    });
}

/// The length of interface `name`, which each of its queues has.
fn length(name: &str) -> u32 {
    let words = run(&format!("ip link show {name}"));
    let after = words.split_once("qlen ").expect("a length").1;
    after.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn the_queues_that_a_guest_uses_share_the_queue_length_of_the_tap() {
    in_own_space(|| {
        run("ip tuntap add dev mr0 mode tap multi_queue");
        run("ip link set mr0 txqueuelen 700");
        let with = |txqueuelen| TapOptions { txqueuelen, ..named("mr0", 4) };
        let port = TapPort::open(with(QueueLength::Host)).unwrap();
        port.set_attached(0, true).unwrap();
        port.set_attached(1, true).unwrap();
        assert_eq!(length("mr0"), 700, "the host keeps it");
        let info = QueueLengthInfo { frames: 1400, source: QueueLengthSource::Host, changes: 0 };
        assert_eq!(port.queue_length(), Some(info));
        drop(port);
        for (wanted, source, frames) in [
            (QueueLength::Frames(600), QueueLengthSource::Operator, 600),
            (QueueLength::Auto, QueueLengthSource::Auto, QUEUE_LENGTH),
        ] {
            let port = opened_again(|| TapPort::open(with(wanted)));
            let mut changes = port.queue_length().unwrap().changes;
            assert!(changes > 0, "{wanted:?}");
            for (index, attached, sharers) in [
                (0, true, 1),
                (1, true, 2),
                (2, true, 3),
                (3, true, 4),
                (1, false, 3),
                (1, false, 3),
                (0, false, 2),
                (2, false, 1),
                (3, false, 1),
                (3, true, 1),
            ] {
                let before = length("mr0");
                port.set_attached(index, attached).unwrap();
                let each = length("mr0");
                assert_eq!(each, frames / sharers, "{wanted:?}: queue {index} {attached}");
                changes += u64::from(each != before);
                let info = QueueLengthInfo { frames: each * sharers, source, changes };
                assert_eq!(port.queue_length(), Some(info), "{wanted:?}");
            }
            drop(port);
            assert_eq!(length("mr0"), 700, "it outlives the port with its own length");
        }
        // However many queues a guest uses, each holds what one stream needs.
        let many = || TapOptions { txqueuelen: QueueLength::Auto, ..named("mr0", 12) };
        let port = opened_again(|| TapPort::open(many()));
        (0..12).for_each(|index| port.set_attached(index, true).unwrap());
        assert_eq!(length("mr0"), QUEUE_LENGTH / QUEUE_LENGTH_SHARERS_MAX);
        assert_eq!(
            port.queue_length().unwrap().frames,
            12 * (QUEUE_LENGTH / QUEUE_LENGTH_SHARERS_MAX)
        );
        drop(port);
        // Less than a frame for each queue: every one holds one.
        let port = opened_again(|| TapPort::open(with(QueueLength::Frames(1))));
        (0..4).for_each(|index| port.set_attached(index, true).unwrap());
        assert_eq!(length("mr0"), 1);
    });
}

#[test]
fn a_length_that_a_killed_process_divided_is_not_taken_for_the_hosts() {
    in_own_space(|| {
        run("ip tuntap add dev mr0 mode tap multi_queue");
        let auto = || TapOptions { txqueuelen: QueueLength::Auto, ..named("mr0", 4) };
        for (left, restored) in [
            (QUEUE_LENGTH / 2, 1000),
            (QUEUE_LENGTH / 3, 1000),
            (QUEUE_LENGTH / 4, 1000),
            // No number of its four queues has this length: the operator has chosen it.
            (QUEUE_LENGTH / 5, QUEUE_LENGTH / 5),
            (700, 700),
        ] {
            // A process that is killed restores nothing.
            run(&format!("ip link set mr0 txqueuelen {left}"));
            let port = opened_again(|| TapPort::open(auto()));
            (0..4).for_each(|index| port.set_attached(index, true).unwrap());
            assert_eq!(length("mr0"), QUEUE_LENGTH / 4);
            drop(port);
            assert_eq!(length("mr0"), restored, "{left}");
        }
        run("ip link set mr0 txqueuelen 150");
        let own = || TapOptions { txqueuelen: QueueLength::Frames(600), ..named("mr0", 4) };
        drop(opened_again(|| TapPort::open(own())));
        assert_eq!(length("mr0"), 1000, "a quarter of the operator's number");
        run("ip link set mr0 txqueuelen 250");
        let host = || TapOptions { txqueuelen: QueueLength::Host, ..named("mr0", 4) };
        drop(opened_again(|| TapPort::open(host())));
        assert_eq!(length("mr0"), 250, "the host's is left alone");
    });
}

#[test]
fn queues_that_lose_nothing_have_the_whole_length_each_and_share_it_when_they_overflow() {
    in_own_space(|| {
        let options = TapOptions { txqueuelen: QueueLength::Auto, ..named("mr0", 4) };
        let port = TapPort::open(options).unwrap();
        (0..4).for_each(|index| port.set_attached(index, true).unwrap());
        run("ip addr add 10.77.0.1/24 dev mr0");
        run("ip neigh add 10.77.0.2 lladdr 02:00:00:00:00:05 dev mr0");
        for _ in 0..9 {
            assert!(!port.adapt_queue_length(), "the next look decides");
        }
        assert_eq!(length("mr0"), QUEUE_LENGTH / 4);
        assert!(port.adapt_queue_length(), "nothing is lost, and each queue has the whole length");
        assert_eq!(
            (length("mr0"), port.queue_length().unwrap().frames),
            (QUEUE_LENGTH, 4 * QUEUE_LENGTH)
        );
        // Nobody reads: a burst that is longer than a queue, and one that finds the queue full.
        let socket = UdpSocket::bind("10.77.0.1:0").unwrap();
        let burst = || {
            for _ in 0..QUEUE_LENGTH + 200 {
                socket.send_to(b"burst", "10.77.0.2:9").unwrap();
            }
            port.adapt_queue_length();
            length("mr0")
        };
        assert_eq!((burst(), burst()), (QUEUE_LENGTH, QUEUE_LENGTH / 4));
        assert_eq!(port.queue_length().unwrap().frames, QUEUE_LENGTH);
        // A length that the operator chose is divided whatever is lost.
        drop(port);
        wait_until_gone("mr0");
        let options = TapOptions { txqueuelen: QueueLength::Frames(600), ..named("mr0", 2) };
        let port = TapPort::open(options).unwrap();
        (0..2).for_each(|index| port.set_attached(index, true).unwrap());
        (0..40).for_each(|_| assert!(port.adapt_queue_length()));
        assert_eq!(length("mr0"), 300);
    });
}

#[test]
fn the_length_of_an_interface_with_one_queue_stays_as_it_is() {
    in_own_space(|| {
        run("ip tuntap add dev mr0 mode tap");
        run("ip link set mr0 txqueuelen 700");
        let options = TapOptions { txqueuelen: QueueLength::Auto, ..named("mr0", 1) };
        let port = TapPort::open(options).unwrap();
        port.set_attached(0, true).unwrap();
        let info = QueueLengthInfo { frames: 700, source: QueueLengthSource::Host, changes: 0 };
        assert_eq!((length("mr0"), port.queue_length()), (700, Some(info)));
    });
}

/// A division makes the queues shorter. Frames that no longer fit are the only ones that it drops.
#[test]
fn frames_that_wait_when_the_length_is_divided_stay_as_far_as_they_fit() {
    in_own_space(|| {
        // Nothing but the frames of the test waits.
        run("sysctl -q -w net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1");
        for (frames, kept) in [(1000, 300), (400, 200)] {
            let txqueuelen = QueueLength::Frames(frames);
            let port = TapPort::open(TapOptions { txqueuelen, ..named("mr0", 2) }).unwrap();
            port.set_attached(0, true).unwrap();
            run("ip addr add 10.77.0.1/24 dev mr0");
            run("ip neigh add 10.77.0.2 lladdr 02:00:00:00:00:05 dev mr0");
            let (tx, mut rx) = halves(&port, 0);
            let mut guest = Guest::new();
            guest.drain(&mut *rx, |_| true);
            let socket = UdpSocket::bind("10.77.0.1:0").unwrap();
            for number in 0..300_u32 {
                socket.send_to(&number.to_be_bytes(), "10.77.0.2:9").unwrap();
            }
            port.set_attached(1, true).unwrap();
            assert_eq!(length("mr0"), frames / 2);
            let mut found = Vec::new();
            while let Ok((_, frame)) = guest.try_recv(&mut *rx) {
                found.extend(is_ipv4(&frame, 17).then(|| frame[42..46].to_vec()));
            }
            let expected: Vec<_> = (0..kept).map(|number: u32| number.to_be_bytes()).collect();
            assert_eq!(found, expected, "a length of {frames}");
            drop((tx, rx, port));
            wait_until_gone("mr0");
        }
    });
}

#[test]
fn a_tap_that_takes_the_place_of_another_gets_its_divided_length_and_its_own_length_back() {
    in_own_space(|| {
        run("ip tuntap add dev mr0 mode tap multi_queue");
        let options = TapOptions { txqueuelen: QueueLength::Auto, ..named("mr0", 2) };
        let port = TapPort::open(options).unwrap();
        (0..2).for_each(|index| port.set_attached(index, true).unwrap());
        assert_eq!(length("mr0"), QUEUE_LENGTH / 2);
        run("ip link del mr0");
        assert!(port.is_gone());
        run("ip tuntap add dev mr0 mode tap multi_queue");
        run("ip link set mr0 txqueuelen 300");
        port.join_again().unwrap();
        (0..2).for_each(|index| port.set_attached(index, true).unwrap());
        assert_eq!(length("mr0"), QUEUE_LENGTH / 2);
        // Another process that had the queues has changed it, and has ended.
        run("ip link set mr0 txqueuelen 20");
        port.keep();
        assert_eq!(length("mr0"), QUEUE_LENGTH / 2);
        drop(port);
        assert_eq!(length("mr0"), 300);
    });
}

/// Frames are held by a slow interface on the other side of a bridge.
#[test]
fn a_full_send_buffer_blocks_in_order_until_there_is_room() {
    in_own_space(|| {
        run("ip link add br0 type bridge");
        run("ip link set br0 up");
        let bridge = Some("br0".to_owned());
        let _slow = TapPort::open(TapOptions { bridge: bridge.clone(), ..named("slow0", 1) });
        run("tc qdisc add dev slow0 root tbf rate 400kbit burst 2000 limit 1000000");
        let sndbuf = Some(20_000);
        let options = TapOptions { sndbuf, bridge, ..named("mr0", 1) };
        let port = TapPort::open(options).unwrap();
        let (mut tx, _rx) = halves(&port, 0);
        let mut guest = Guest::new();
        let frame = ethernet([2; 6], GUEST_MAC, 0x88b5, &[0; 1000]);
        let sent = guest.send_burst(&mut *tx, &frame, 64);
        assert_eq!((sent.stop, sent.refused + sent.down), (Some(Stop::Blocked), 0));
        assert!((1..64).contains(&sent.taken), "{sent:?}");
        let Readiness::Fd(fd) = tx.readiness() else { panic!("a file descriptor") };
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
        let max_wait = Timespec { tv_sec: 5, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&max_wait)), Ok(1));
        assert!(guest.send_burst(&mut *tx, &frame, 64).taken > 0);
    });
}

#[test]
fn a_receiver_with_little_room_gets_the_start_of_a_frame() {
    in_own_space(|| {
        let port = TapPort::open(named("mr0", 1)).unwrap();
        run("ip addr add 10.77.0.1/24 dev mr0");
        let (mut tx, mut rx) = halves(&port, 0);
        let mut guest = Guest::new();
        guest.send(&mut *tx, &arp_request(GUEST, HOST));
        assert!(wait_for_input(&*rx));
        let room = &guest.buffers(HEADER_SIZE + 14)[..1];
        assert_eq!(rx.recv(room), Ok(HEADER_SIZE + 14));
    });
}
