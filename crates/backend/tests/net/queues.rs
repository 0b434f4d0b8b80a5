//! Several queues: the host uses those that are attached, and no others.

use crate::guest::{GUEST, GUEST_MAC, Guest, HOST, arp_request, ether_type, halves, is_ipv4};
use crate::space::{in_own_space, named, queues, run, wait_until_gone};
use manyring_backend::net::tap::{TapOptions, TapPort, TapSource};
use manyring_backend::net::{Port, PortRx};
use manyring_backend::sys::tuntap;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::net::UdpSocket;
use std::path::Path;

/// Flows that the kernel sends to the guest.
const FLOWS: usize = 64;
const UDP: u8 = 17;

/// One datagram of each of 64 flows, from the kernel.
fn send_flows() {
    for _ in 0..FLOWS {
        let socket = UdpSocket::bind("10.77.0.1:0").unwrap();
        socket.send_to(&[7; 100], "10.77.0.2:9").unwrap();
    }
}

#[test]
fn the_host_uses_only_the_pairs_that_are_attached() {
    in_own_space(|| {
        let port = TapPort::open(named("mr0", 4)).unwrap();
        assert_eq!(queues("mr0"), (0, 4));
        run("ip addr add 10.77.0.1/24 dev mr0");
        run("ip neigh add 10.77.0.2 lladdr 02:00:00:00:00:11 dev mr0 nud permanent");
        let mut receivers: Vec<_> = (0..4).map(|index| port.open_rx(index).unwrap()).collect();
        let mut guest = Guest::new();
        let mut counts = |receivers: &mut [Box<dyn PortRx>]| -> Vec<usize> {
            send_flows();
            receivers.iter_mut().map(|rx| guest.drain(&mut **rx, |f| is_ipv4(f, UDP))).collect()
        };
        assert_eq!(counts(&mut receivers), [0; 4]);
        port.set_attached(0, true).unwrap();
        port.set_attached(2, true).unwrap();
        port.set_attached(2, true).unwrap();
        assert_eq!(queues("mr0"), (2, 2));
        let shared = counts(&mut receivers);
        assert_eq!((shared[0] + shared[2], shared[1] + shared[3]), (FLOWS, 0), "{shared:?}");
        assert!(shared[0] > 0 && shared[2] > 0, "{shared:?}");
        port.set_attached(0, false).unwrap();
        port.set_attached(0, false).unwrap();
        assert_eq!(queues("mr0"), (1, 3));
        assert_eq!(counts(&mut receivers), [0, 0, FLOWS, 0]);
        port.set_attached(1, true).unwrap();
        assert_eq!(queues("mr0"), (2, 2));
        assert_eq!(port.set_attached(4, true), Err(Errno::INVAL));
        assert!(port.open_tx(4).is_err());
    });
}

#[test]
fn a_frame_can_be_transmitted_though_no_pair_is_attached() {
    in_own_space(|| {
        let port = TapPort::open(named("mr0", 2)).unwrap();
        run("ip addr add 10.77.0.1/24 dev mr0");
        port.transmit(&arp_request(GUEST, HOST)).unwrap();
        assert_eq!(queues("mr0"), (0, 2));
        let neighbour = run("ip neigh show dev mr0");
        assert!(neighbour.contains("02:00:00:00:00:11"), "{neighbour:?}");
    });
}

#[test]
fn a_multi_queue_tap_works_with_one_pair() {
    in_own_space(|| {
        run("ip tuntap add dev mr0 mode tap multi_queue");
        run("ip addr add 10.77.0.1/24 dev mr0");
        let port = TapPort::open(named("mr0", 1)).unwrap();
        assert_eq!(queues("mr0"), (0, 1));
        port.set_attached(0, true).unwrap();
        assert_eq!(queues("mr0"), (1, 0));
        let (mut tx, mut rx) = halves(&port, 0);
        let mut guest = Guest::new();
        guest.send(&mut *tx, &arp_request(GUEST, HOST));
        let (_, reply) = guest.recv(&mut *rx, |frame| ether_type(frame) == 0x0806);
        assert_eq!(reply[..6], GUEST_MAC);
    });
}

fn handed_in(name: &str, count: usize) -> Vec<OwnedFd> {
    let flags = tuntap::IFF_TAP | tuntap::IFF_NO_PI | tuntap::IFF_VNET_HDR;
    let open = |_| {
        let fd = tuntap::open(Path::new("/dev/net/tun")).unwrap();
        tuntap::join(fd.as_fd(), name, flags | tuntap::IFF_MULTI_QUEUE).unwrap();
        fd
    };
    (0..count).map(open).collect()
}

#[test]
fn handed_in_queues_work_and_are_as_before_afterwards() {
    in_own_space(|| {
        let fds = handed_in("mr0", 3);
        tuntap::set_attached(fds[1].as_fd(), false).unwrap();
        let copies = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let source = TapSource::Fds(copies);
        let port = TapPort::open(TapOptions { source, mtu: Some(68), ..named("", 3) }).unwrap();
        assert_eq!((port.name(), queues("mr0"), port.mtu()), ("mr0", (0, 3), Some(68)));
        port.set_attached(1, true).unwrap();
        assert_eq!(queues("mr0"), (1, 2));
        drop(port);
        assert_eq!(queues("mr0"), (3, 0));
        drop(fds);
        wait_until_gone("mr0");
    });
}

#[test]
fn handed_in_queues_of_another_namespace_work_without_settings() {
    in_own_space(|| {
        let fds = handed_in("mr0", 2);
        let copies = || fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let open = |mtu| {
            let mut result = None;
            in_own_space(|| {
                // Another interface of the same name.
                run("ip tuntap add dev mr0 mode tap");
                let source = TapSource::Fds(copies());
                let up = None;
                result = Some(TapPort::open(TapOptions { source, mtu, up, ..named("", 2) }));
            });
            result.unwrap()
        };
        let port = open(None).unwrap();
        assert_eq!((port.mtu(), port.set_mtu(1000)), (None, Err(Errno::OPNOTSUPP)));
        assert_eq!(queues("mr0"), (0, 2));
        port.set_attached(0, true).unwrap();
        assert_eq!(queues("mr0"), (1, 1));
        let error = open(Some(1000)).unwrap_err().to_string();
        assert!(error.starts_with("mr0 is in another network namespace"), "{error}");
        assert!(!error.contains('\n'), "it is one line of a log: {error}");
    });
}
