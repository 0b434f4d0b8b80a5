//! A macvtap over a veth, whose other end is the kernel's.

use crate::guest::{GUEST, Guest, HOST, checksum, ether_type, ethernet, halves, ipv4, is_ipv4};
use crate::space::{in_own_space, link, run};
use manyring_backend::net::tap::QueueLength;
use manyring_backend::net::tap::macvtap::{self, MacvtapOptions};
use manyring_backend::net::{HostFilter, Port};
use std::net::UdpSocket;
use std::time::Duration;

const UDP: u8 = 17;
const FLOWS: usize = 64;

fn options(queue_pairs: usize) -> MacvtapOptions {
    let (name, up) = ("mv0".into(), Some(true));
    MacvtapOptions {
        name,
        queue_pairs,
        sndbuf: None,
        txqueuelen: QueueLength::Host,
        merge: true,
        mtu: None,
        up,
    }
}

/// `far0` with the host's address, and `mv0` on top of its other end.
fn make() {
    run("ip link add near0 type veth peer name far0");
    run("ip link set near0 up");
    run("ip link set far0 up");
    run("ip addr add 10.77.0.1/24 dev far0");
    run("ip link add link near0 name mv0 type macvtap mode bridge");
}

#[test]
fn a_macvtap_with_two_queues_takes_and_delivers() {
    in_own_space(|| {
        make();
        let port = macvtap::open(&options(2)).unwrap();
        assert_eq!((port.kind(), port.queue_pairs(), port.mtu()), ("macvtap", 2, Some(1500)));
        let mac = port.guest_mac().unwrap();
        let text: Vec<_> = mac.iter().map(|b| format!("{b:02x}")).collect();
        run(&format!("ip neigh add 10.77.0.2 lladdr {} dev far0 nud permanent", text.join(":")));
        port.set_attached(0, true).unwrap();
        port.set_attached(1, true).unwrap();
        port.set_attached(1, true).unwrap();
        let (mut tx, mut rx0) = halves(&port, 0);
        let (mut tx1, mut rx1) = halves(&port, 1);
        let mut guest = Guest::new();
        // From the guest by both queues, to a socket of the kernel's.
        let socket = UdpSocket::bind("10.77.0.1:4000").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let host_mac = link("far0").unwrap().address.unwrap();
        for tx in [&mut tx, &mut tx1] {
            guest.send(&mut **tx, &ethernet(host_mac, mac, 0x0800, &datagram(b"to the host")));
            let mut bytes = [0; 32];
            let (len, from) = socket.recv_from(&mut bytes).unwrap();
            assert_eq!(
                (&bytes[..len], from.to_string()),
                (&b"to the host"[..], "10.77.0.2:5000".into())
            );
        }
        // From the kernel, spread over both queues.
        let mut counts = |guest: &mut Guest| {
            for _ in 0..FLOWS {
                let socket = UdpSocket::bind("10.77.0.1:0").unwrap();
                socket.send_to(&[7; 100], "10.77.0.2:9").unwrap();
            }
            let is_it = |frame: &[u8]| ether_type(frame) == 0x0800 && is_ipv4(frame, UDP);
            (guest.drain(&mut *rx0, is_it), guest.drain(&mut *rx1, is_it))
        };
        let (first, second) = counts(&mut guest);
        assert!(first > 0 && second > 0, "{first} {second}");
        assert_eq!(first + second, FLOWS);
        port.set_attached(0, false).unwrap();
        assert_eq!(counts(&mut guest), (0, FLOWS));
        port.set_offloads(port.given()).unwrap();
        port.set_mtu(1400).unwrap();
        assert_eq!(link("mv0").unwrap().mtu, 1400);
        port.set_link(false);
    });
}

/// A datagram from port 5000 to port 4000.
fn datagram(data: &[u8]) -> Vec<u8> {
    let len = u16::try_from(8 + data.len()).unwrap();
    let ports = [5000u16.to_be_bytes(), 4000u16.to_be_bytes(), len.to_be_bytes()].concat();
    let pseudo = [&GUEST[..], &HOST, &[0, UDP], &len.to_be_bytes()].concat();
    let sum = checksum(&[&pseudo[..], &ports, &[0, 0], data].concat());
    ipv4(GUEST, HOST, UDP, &[&ports[..], &sum.to_be_bytes(), data].concat())
}

#[test]
fn a_macvtap_opens_where_its_node_is_missing() {
    in_own_space(|| {
        make();
        // A folder of devices without any.
        run("mount -t tmpfs -o mode=755 tmpfs /dev");
        macvtap::open(&options(1)).unwrap();
        assert_eq!(std::fs::read_dir("/dev").unwrap().count(), 0, "its own node is gone again");
        run("umount --lazy /dev");
        // The system says nothing about it, but its node may be there.
        let index = link("mv0").unwrap().index;
        let number = std::fs::read_to_string(format!("/sys/class/net/mv0/tap{index}/dev")).unwrap();
        let (major, minor) = number.trim().split_once(':').unwrap();
        run("mount -t tmpfs -o mode=755 tmpfs /dev");
        run("mount -t tmpfs tmpfs /sys");
        let error = macvtap::open(&options(1)).unwrap_err().to_string();
        assert_eq!(error, "mv0: cannot open its device node");
        run(&format!("mknod /dev/tap{index} c {major} {minor}"));
        macvtap::open(&options(1)).unwrap();
    });
}

/// How many have the interface receive all groups.
fn allmulti_of(name: &str) -> String {
    let shown = run(&format!("ip -d link show {name}"));
    let mut words = shown.split_whitespace().skip_while(|word| *word != "allmulti");
    words.nth(1).unwrap_or_default().to_owned()
}

/// Waits until the kernel's `allmulti` counts of the macvtap and of its lower interface are `own`
/// and `lower`. A child process that another test forks holds copies of all descriptors until its
/// `exec`, so a socket that this test has closed may live on for a moment.
fn is_allmulti(own: &str, lower: &str) {
    let found = || (allmulti_of("mv0"), allmulti_of("near0"));
    for _ in 0..2000 {
        if found() == (own.to_owned(), lower.to_owned()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("{:?}, not {own} and {lower}", found());
}

#[test]
fn a_macvtap_receives_all_groups_as_long_as_a_port_has_it_and_says_which_addresses() {
    for (mode, takes_any) in [
        ("bridge", false),
        ("private", false),
        ("vepa", false),
        ("passthru", true),
        ("passthru nopromisc", false),
    ] {
        in_own_space(|| {
            run("ip link add near0 type veth peer name far0");
            run("ip link set near0 up");
            run("ip link set far0 up");
            run(&format!("ip link add link near0 name mv0 type macvtap mode {mode}"));
            let own = link("mv0").unwrap().address.filter(|_| !takes_any);
            let expected = HostFilter { only_to: own, ..HostFilter::default() };
            let port = macvtap::open(&options(1)).unwrap();
            assert_eq!(port.host_filter(), expected, "{mode}");
            assert_eq!((allmulti_of("mv0"), allmulti_of("near0")), ("1".into(), "1".into()));
            // Another one, as in a takeover: neither ends what the other one needs.
            let next = macvtap::open(&options(1)).unwrap();
            assert_eq!(allmulti_of("mv0"), "2");
            drop(port);
            is_allmulti("1", "1");
            // The flag that the operator has set stays.
            run("ip link set mv0 allmulticast on");
            drop(next);
            is_allmulti("1", "1");
            run("ip link set mv0 allmulticast off");
            is_allmulti("0", "0");
        });
    }
}

#[test]
fn a_macvtap_that_is_joined_again_receives_all_groups_and_has_its_new_address() {
    in_own_space(|| {
        make();
        let port = macvtap::open(&options(1)).unwrap();
        run("ip link del mv0");
        assert!(port.is_gone());
        let other = "02:00:00:00:00:77";
        run(&format!("ip link add link near0 name mv0 address {other} type macvtap mode bridge"));
        port.join_again().unwrap();
        let only_to = Some([2, 0, 0, 0, 0, 0x77]);
        assert_eq!(port.host_filter(), HostFilter { only_to, ..HostFilter::default() });
        assert_eq!(allmulti_of("mv0"), "1");
    });
}
