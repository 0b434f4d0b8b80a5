//! Every bad start gives one clear error.

use crate::space::{in_own_space, named, opened_again, queues, run, wait_until_gone};
use manyring_backend::net::Port;
use manyring_backend::net::tap::macvtap::{self, MacvtapOptions};
use manyring_backend::net::tap::{QueueLength, TapOptions, TapPort, TapSource};
use manyring_backend::sys::tuntap;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use std::path::Path;

const TAP: u16 = tuntap::IFF_TAP;
const NO_PI: u16 = tuntap::IFF_NO_PI;
const VNET_HDR: u16 = tuntap::IFF_VNET_HDR;
const TUN: u16 = 1;

/// The error that an operator reads, with `#` for the number of the first file descriptor.
fn error(options: TapOptions) -> String {
    let number = match &options.source {
        TapSource::Fds(fds) => fds.last().map(|fd| fd.as_raw_fd().to_string()),
        TapSource::Name { .. } | TapSource::Left { .. } => None,
    };
    let text = TapPort::open(options).unwrap_err().to_string();
    match number {
        Some(number) => text.replace(&format!("descriptor {number} "), "descriptor # "),
        None => text,
    }
}

fn queue(name: &str, flags: u16) -> OwnedFd {
    let fd = tuntap::open(Path::new("/dev/net/tun")).unwrap();
    tuntap::join(fd.as_fd(), name, flags).unwrap();
    fd
}

fn fds(fds: Vec<OwnedFd>, queue_pairs: usize) -> TapOptions {
    TapOptions { source: TapSource::Fds(fds), up: None, ..named("", queue_pairs) }
}

#[test]
fn a_name_that_cannot_be_opened_says_why() {
    in_own_space(|| {
        for name in ["", "sixteen--letters", "a/b", "a b", "..", "a:b"] {
            let text = error(named(name, 1));
            assert!(text.ends_with("1 to 15 bytes, no space, slash or colon"), "{text}");
        }
        let source = TapSource::Name { name: "mr9".into(), must_exist: true };
        let missing = TapOptions { source, ..named("", 1) };
        assert_eq!(error(missing), "mr9: no such interface");
        assert_eq!(error(named("lo", 1)), "lo is an interface, but not a tap");
        run("ip tuntap add dev tun0 mode tun");
        assert_eq!(error(named("tun0", 1)), "tun0 is an interface, but not a tap");
        run("ip tuntap add dev mr0 mode tap");
        let text = "tap mr0 is not multi-queue: it cannot have 2 queue pairs";
        assert_eq!(error(named("mr0", 2)), text);
        assert_eq!(error(named("mr0", 0)), "0 queue pairs: a tap has 1 to 256");
        assert_eq!(error(named("mr0", 257)), "257 queue pairs: a tap has 1 to 256");
    });
}

#[test]
fn a_tap_in_use_is_busy_with_one_queue_or_several() {
    in_own_space(|| {
        let _one = TapPort::open(named("mr0", 1)).unwrap();
        assert_eq!(error(named("mr0", 1)), "mr0 is in use by another process");
        let other = queue("mr2", TAP | NO_PI | VNET_HDR);
        assert_eq!(error(named("mr2", 1)), "mr2 is in use by another process");
        drop(other);
        opened_again(|| TapPort::open(named("mr2", 1)));
        let _two = TapPort::open(named("mr1", 2)).unwrap();
        assert_eq!(error(named("mr1", 2)), "mr1 is in use by another process");
        assert_eq!(error(named("mr1", 1)), "mr1 is in use by another process");
    });
}

#[test]
fn a_process_without_the_capability_is_told_which() {
    in_own_space(|| {
        run("ip tuntap add dev mr0 mode tap user 65534");
        run("ip tuntap add dev mr2 mode tap");
        let flags = TAP | NO_PI | VNET_HDR | tuntap::IFF_MULTI_QUEUE;
        let handed_in = [queue("mr1", flags), queue("mr1", flags)];
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::NET_ADMIN);
        set_capabilities(None, sets).unwrap();
        let text =
            |name: &str, action| format!("{name}: no permission to {action} (needs CAP_NET_ADMIN)");
        assert_eq!(error(named("mr9", 1)), text("mr9", "create it or join it"));
        assert_eq!(error(named("mr0", 1)), text("mr0", "create it or join it"));
        assert_eq!(error(named("mr2", 1)), text("mr2", "set it up or down"));
        let as_it_is = || TapOptions { up: Some(false), mtu: Some(1500), ..named("mr2", 1) };
        opened_again(|| TapPort::open(as_it_is()));
        let copies = || handed_in.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let wish = |mtu| TapOptions { mtu, ..fds(copies(), 2) };
        assert_eq!(error(wish(Some(1400))), text("mr1", "set its MTU"));
        // Nothing is needed where queues are handed in.
        let port = TapPort::open(wish(None)).unwrap();
        port.set_offloads(port.given()).unwrap();
        port.set_attached(1, true).unwrap();
        assert_eq!((queues("mr1"), port.mtu()), ((1, 1), Some(1500)));
    });
}

#[test]
fn a_wrong_file_descriptor_says_what_is_wrong_with_it() {
    in_own_space(|| {
        let right = || queue("mr%d", TAP | NO_PI | VNET_HDR);
        let file = tempfile::tempfile().unwrap().into();
        assert_eq!(error(fds(vec![file], 1)), "file descriptor # is not a queue of a tap");
        let unused = tuntap::open(Path::new("/dev/net/tun")).unwrap();
        assert_eq!(error(fds(vec![unused], 1)), "file descriptor # is not a queue of a tap");
        let tun = queue("tun%d", TUN | NO_PI | VNET_HDR);
        let text = "file descriptor # belongs to a tun, not to a tap (IFF_TAP)";
        assert_eq!(error(fds(vec![tun], 1)), text);
        let text = "file descriptor # gives no virtio-net headers (IFF_VNET_HDR)";
        assert_eq!(error(fds(vec![queue("mr%d", TAP | NO_PI)], 1)), text);
        let text = "file descriptor # puts packet information before frames (lacks IFF_NO_PI)";
        assert_eq!(error(fds(vec![queue("mr%d", TAP | VNET_HDR)], 1)), text);
        let text = "2 tap file descriptors for 3 queue pairs: one is needed for each";
        assert_eq!(error(fds(vec![right(), right()], 3)), text);
        let text = "0 tap file descriptors for 1 queue pairs: one is needed for each";
        assert_eq!(error(fds(vec![], 1)), text);
        let text = error(fds(
            vec![queue("mr20", TAP | NO_PI | VNET_HDR), queue("mr21", TAP | NO_PI | VNET_HDR)],
            2,
        ));
        assert_eq!(text, "file descriptor # belongs to mr21, others to mr20");
        let flags = TAP | NO_PI | VNET_HDR | tuntap::IFF_MULTI_QUEUE;
        let one = queue("mr22", flags);
        let text = error(fds(vec![one.try_clone().unwrap(), one], 2));
        assert_eq!(text, "file descriptor # is the same queue of the tap as another");
    });
}

#[test]
fn a_bridge_or_an_mtu_that_cannot_be_says_so() {
    in_own_space(|| {
        let bridged =
            |name, bridge: &str| TapOptions { bridge: Some(bridge.into()), ..named(name, 1) };
        assert_eq!(error(bridged("mr0", "br9")), "bridge br9: no such interface");
        assert_eq!(error(bridged("mr5", "lo")), "lo is an interface, but not a bridge");
        run("ip link add br0 type bridge");
        run("ip link add br1 type bridge");
        run("ip tuntap add dev mr4 mode tap");
        run("ip link set mr4 master br1");
        assert_eq!(error(bridged("mr4", "br0")), "mr4 already belongs to another bridge");
        opened_again(|| TapPort::open(bridged("mr4", "br1")));
        let wish = |mtu| TapOptions { mtu: Some(mtu), ..named("mr1", 1) };
        assert_eq!(error(wish(67)), "MTU 67 is too small; the minimum is 68");
        assert_eq!(
            error(wish(65522)),
            "setting MTU 65522 of mr1 failed: the interface does not support it"
        );
        // Nothing of a bad start stays.
        wait_until_gone("mr1");
        for (name, mtu) in [("mr2", 68), ("mr3", 65521)] {
            let port = TapPort::open(TapOptions { mtu: Some(mtu), ..named(name, 1) }).unwrap();
            assert_eq!(port.mtu(), Some(mtu));
        }
    });
}

#[test]
fn a_macvtap_that_cannot_be_opened_says_why() {
    in_own_space(|| {
        run("ip tuntap add dev mr0 mode tap");
        let error = |name: &str, queue_pairs, mtu| {
            let name = name.to_owned();
            let options = MacvtapOptions {
                name,
                queue_pairs,
                sndbuf: None,
                txqueuelen: QueueLength::Host,
                merge: true,
                mtu,
                up: None,
            };
            macvtap::open(&options).unwrap_err().to_string()
        };
        assert_eq!(error("mv0", 1, None), "mv0: no such interface");
        assert_eq!(error("mr0", 1, None), "mr0 is an interface, but not a macvtap");
        assert_eq!(error("mv0", 0, None), "0 queue pairs: a tap has 1 to 256");
        assert_eq!(error("mv0", 1, Some(10)), "MTU 10 is too small; the minimum is 68");
        run("ip link add v0 type veth peer name v1");
        run("ip link add link v0 name mv0 type macvtap mode bridge");
        assert_eq!(
            error("mv0", 1, Some(9000)),
            "setting MTU 9000 of mv0 failed: the interface does not support it"
        );
    });
}
