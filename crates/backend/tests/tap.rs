//! Taps with the kernel as their peer, in network namespaces of their own.

mod space;

use manyring_backend::net::Port;
use manyring_backend::net::tap::{TapOptions, TapPort, TapSource};
use space::{GUEST_MAC, Guest, arp_request, echo_request, ether_type, ethernet, halves};
use space::{in_own_space, ipv4, is_ipv4, link, queues, run};

const HOST: [u8; 4] = [10, 77, 0, 1];
const GUEST: [u8; 4] = [10, 77, 0, 2];

fn named(name: &str, queue_pairs: usize) -> TapOptions {
    let source = TapSource::Name { name: name.into(), must_exist: false };
    TapOptions { source, queue_pairs, sndbuf: None, mtu: None, bridge: None, up: Some(true) }
}

#[test]
fn the_kernel_answers_arp_and_echo_through_a_tap_that_goes_with_its_port() {
    in_own_space(|| {
        let port = TapPort::open(named("mr%d", 1)).unwrap();
        assert_eq!((port.name(), port.mtu(), port.queue_pairs()), ("mr0", Some(1500), 1));
        run("ip addr add 10.77.0.1/24 dev mr0");
        let (mut tx, mut rx) = halves(&port, 0);
        let mut guest = Guest::new();
        guest.send(&mut *tx, &arp_request(GUEST, HOST));
        let (_, reply) = guest.recv(&mut *rx, |frame| ether_type(frame) == 0x0806);
        assert_eq!((&reply[..6], reply[21], &reply[28..32]), (&GUEST_MAC[..], 2, &HOST[..]));
        let host_mac: [u8; 6] = reply[6..12].try_into().unwrap();
        assert_eq!(link("mr0").unwrap().address, Some(host_mac));
        let packet = ipv4(GUEST, HOST, 1, &echo_request(7, 1000));
        guest.send(&mut *tx, &ethernet(host_mac, GUEST_MAC, 0x0800, &packet));
        let (header, reply) = guest.recv(&mut *rx, |frame| is_ipv4(frame, 1));
        assert_eq!((header.gso_type, reply.len()), (0, 14 + 28 + 1000));
        assert_eq!((reply[34], &reply[42..]), (0, &packet[28..]));
        drop((tx, rx, port));
        assert_eq!(link("mr0"), None, "what it created goes with it");
    });
}

#[test]
fn the_host_uses_only_the_pairs_that_are_attached() {
    in_own_space(|| {
        let port = TapPort::open(named("mr0", 4)).unwrap();
        assert_eq!(queues("mr0"), (0, 4));
        port.set_attached(0, true).unwrap();
        port.set_attached(2, true).unwrap();
        port.set_attached(2, true).unwrap();
        assert_eq!(queues("mr0"), (2, 2));
        port.set_attached(2, false).unwrap();
        assert_eq!(queues("mr0"), (1, 3));
        assert!(port.set_attached(4, true).is_err());
    });
}
