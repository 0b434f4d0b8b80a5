//! Sockets of AF_XDP that another process is lent: what it can do with them, and when the next one
//! is lent others.

use super::*;
use manyring_backend::net::tap::lent::Facts;
use manyring_backend::net::xdp::lent::XdpLentPort;
use rustix::fd::AsRawFd;
use rustix::net::xdp::{SocketAddrXdp, SocketAddrXdpFlags};
use std::sync::atomic::{AtomicUsize, Ordering};

fn lending(name: &str, queue_pairs: usize) -> Arc<XdpPort> {
    Arc::new(XdpPort::open(&XdpOptions { lends: true, ..options(name, queue_pairs) }).unwrap())
}

fn borrowed(owner: &Arc<XdpPort>) -> XdpLentPort {
    wait_for("nobody has former sockets", || owner.is_let_go() == Ok(true));
    let lent = owner.lend(&|| true).unwrap().unwrap();
    XdpLentPort::new(lent, Arc::new(Local(owner.clone()))).unwrap()
}

#[test]
fn lent_sockets_carry_frames_and_the_next_borrower_has_others() {
    in_own_space(|| {
        make_veth("");
        let owner = lending("v0", 1);
        assert!(owner.open_tx(0).is_err() && owner.open_rx(0).is_err(), "its queues are lent");
        for _ in 0..3 {
            let port = borrowed(&owner);
            assert_eq!(
                (port.kind(), port.interface(), port.mtu()),
                ("xdp", Some("v0"), Some(1500))
            );
            // A frame that is sent before the pair is in use waits, and is not lost.
            let (mut tx, _rx) = halves(&port, 0);
            let early = tx.send(&burst(1, 100), 0);
            assert_eq!((early.taken, early.stop), (0, Some(Stop::NoMemory)));
            port.set_attached(0, true).unwrap();
            assert_eq!(port.set_attached(1, true), Err(Errno::INVAL));
            for len in [1, 1400] {
                echoes(&port, 0, len);
            }
            port.set_attached(0, false).unwrap();
            port.set_attached(0, true).unwrap();
            echoes(&port, 0, 100);
            let before = arrived();
            port.transmit(&ethernet([0xff; 6], GUEST_MAC, 0x88b5, &[0; 50])).unwrap();
            wait_for("the frame of the device itself arrives", || arrived() > before);
        }
        // One that keeps its sockets keeps the queue, and hears nothing of it any more.
        let kept = borrowed(&owner);
        kept.set_attached(0, true).unwrap();
        for _ in 0..3 {
            assert_eq!(owner.is_let_go(), Ok(false));
            assert_eq!(owner.lend(&|| true).unwrap().err(), Some(Errno::BUSY));
        }
        // Nobody can keep it from sending: that is why nobody else gets the queue.
        let before = arrived();
        kept.transmit(&ethernet([0xff; 6], GUEST_MAC, 0x88b5, &[0; 50])).unwrap();
        wait_for("the frame of the former process arrives", || arrived() > before);
        let (tx, mut rx) = halves(&kept, 0);
        let mut guest = Guest::new();
        // The host asks everybody for the address.
        let before = received();
        let socket = std::net::UdpSocket::bind("10.77.0.1:0").unwrap();
        socket.send_to(b"hello", "10.77.0.2:9").unwrap();
        wait_for("the question arrives", || received() > before);
        assert_eq!(guest.try_recv(&mut *rx).err(), Some(Errno::AGAIN));
        drop((tx, rx, kept));
        let next = borrowed(&owner);
        next.set_attached(0, true).unwrap();
        echoes(&next, 0, 300);
        drop(next);
        // A socket whose pair was never used counts as well, and is bound to this queue only.
        let unused = borrowed(&owner);
        assert_eq!(owner.is_let_go(), Ok(false));
        drop(unused);
        wait_for("the port has all queues", || owner.is_let_go() == Ok(true));
        let Lent { queues, .. } = owner.lend(&|| true).unwrap().unwrap();
        let elsewhere =
            SocketAddrXdp::new(SocketAddrXdpFlags::XDP_COPY, link("v1").unwrap().index, 0);
        assert_eq!(rustix::net::bind(&queues[0], &elsewhere), Err(Errno::BUSY));
    });
}

#[test]
fn a_borrower_goes_on_with_the_sockets_of_the_interface_that_was_joined() {
    in_own_space(|| {
        make_veth("");
        let owner = lending("v0", 1);
        let port = borrowed(&owner);
        port.set_attached(0, true).unwrap();
        let (mut tx, mut rx) = halves(&port, 0);
        for _ in 0..3 {
            wait_until_up();
            tx.send(&burst(64, 100), 0);
            run("ip link del v0");
            wait_until_gone("v0");
            assert!(owner.is_gone() && !port.is_gone());
            port.lose();
            assert!(port.is_gone());
            assert!(matches!(port.join_again(), Err(TapError::Missing(_))));
            make_veth("");
            owner.join_again().unwrap();
            let Lent { facts, queues, .. } = owner.lend(&|| true).unwrap().unwrap();
            let (chunk, filter) = (facts.chunk, facts.host_filter);
            assert_eq!(port.renew(Vec::new(), chunk, filter), Err(Errno::INVAL));
            port.renew(queues, chunk, filter).unwrap();
            port.join_again().unwrap();
            assert!(!port.is_gone());
            port.set_attached(0, true).unwrap();
            wait_until_up();
            let mut guest = Guest::new();
            guest.send(&mut *tx, &arp_request(GUEST, HOST));
            let (_, reply) = guest.recv(&mut *rx, |frame| ether_type(frame) == 0x0806);
            assert_eq!(reply[28..32], HOST);
        }
    });
}

#[test]
fn another_interface_with_the_number_of_the_former_one_is_not_taken_for_it() {
    in_own_space(|| {
        for is_moved in [false, true] {
            make_veth("");
            let owner = lending("v0", 1);
            let port = borrowed(&owner);
            port.set_attached(0, true).unwrap();
            echoes(&port, 0, 100);
            let index = link("v0").unwrap().index;
            // A namespace without a name, which lasts as long as its process.
            let elsewhere = is_moved.then(Elsewhere::new);
            match &elsewhere {
                Some(elsewhere) => run(&format!("ip link set v0 netns {}", elsewhere.0.id())),
                None => run("ip link del v0"),
            };
            wait_until_gone("v0");
            run(&format!("ip link add other index {index} mtu 1400 type veth peer name end"));
            assert_eq!(link("other").unwrap().index, index);
            assert_eq!(owner.set_mtu(1300), Ok(()), "for the next interface of its name");
            assert_eq!(link("other").unwrap().mtu, 1400);
            if is_moved {
                wait_for("the sockets are free", || owner.is_let_go() == Ok(true));
            }
            assert!(owner.is_gone());
            // Nobody has taken its queue.
            drop(XdpPort::open(&options("other", 1)).unwrap());
            run("ip link del other");
            drop((port, elsewhere));
            wait_until_gone("v1");
            make_veth("");
            owner.join_again().unwrap();
            assert!(!owner.is_gone());
            assert_eq!(link("v0").unwrap().mtu, 1300);
            let port = borrowed(&owner);
            port.set_attached(0, true).unwrap();
            echoes(&port, 0, 100);
            drop((port, owner));
            run("ip link del v0");
            wait_until_gone("v0");
        }
    });
}

/// A process in a network namespace of its own.
struct Elsewhere(std::process::Child);

impl Elsewhere {
    fn new() -> Self {
        let mut child = std::process::Command::new("unshare");
        child.args(["-n", "sh", "-c", "echo; read end"]);
        child.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        let mut child = child.spawn().unwrap();
        let mut line = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
        Self(child)
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_borrower_whose_next_interface_has_longer_frames_uses_the_chunks_of_that_interface() {
    in_own_space(|| {
        make_veth("");
        let owner = lending("v0", 1);
        let port = borrowed(&owner);
        port.set_attached(0, true).unwrap();
        run("ip link del v0");
        wait_until_gone("v0");
        assert!(owner.is_gone());
        port.lose();
        make_veth("");
        run("ip link set v0 mtu 3000");
        run("ip link set v1 mtu 3000");
        owner.join_again().unwrap();
        let Lent { facts, queues, .. } = owner.lend(&|| true).unwrap().unwrap();
        assert_eq!(port.renew(queues, facts.chunk, facts.host_filter), Ok(()));
        port.join_again().unwrap();
        port.set_attached(0, true).unwrap();
        for len in [100, 2900, 1400, 2900] {
            echoes(&port, 0, len);
        }
    });
}

#[test]
fn while_an_interface_is_gone_no_sockets_are_lent_and_its_next_one_has_some() {
    in_own_space(|| {
        make_veth("");
        let owner = lending("v0", 1);
        let first = borrowed(&owner);
        run("ip link del v0");
        wait_until_gone("v0");
        // The owner may have noticed that its interface is gone, or not yet.
        for _ in 0..3 {
            let lent = owner.lend(&|| true).unwrap().unwrap();
            assert!(lent.queues.is_empty(), "a socket could be bound to any other queue");
            let port = XdpLentPort::waiting(lent, 1, Arc::new(Local(owner.clone()))).unwrap();
            assert!(port.waits() && port.is_gone() && port.queue_pairs() == 1);
            assert!(matches!(port.join_again(), Err(TapError::Missing(_))));
            assert!(owner.is_gone());
        }
        let lent = owner.lend(&|| true).unwrap().unwrap();
        let port = XdpLentPort::waiting(lent, 1, Arc::new(Local(owner.clone()))).unwrap();
        make_veth("");
        owner.join_again().unwrap();
        let Lent { facts, queues, .. } = owner.lend(&|| true).unwrap().unwrap();
        port.renew(queues, facts.chunk, facts.host_filter).unwrap();
        port.join_again().unwrap();
        port.set_attached(0, true).unwrap();
        echoes(&port, 0, 100);
        drop(first);
    });
}

#[test]
fn a_lending_that_nobody_waits_for_takes_nothing_from_the_process_that_has_sockets() {
    in_own_space(|| {
        make_veth("");
        let owner = lending("v0", 1);
        let port = borrowed(&owner);
        port.set_attached(0, true).unwrap();
        assert_eq!(owner.lend(&|| false).unwrap().err(), Some(Errno::CANCELED));
        echoes(&port, 0, 100);
        // Nobody waits any more when the sockets are bound: the next process gets others at once.
        drop(port);
        wait_for("nobody has former sockets", || owner.is_let_go() == Ok(true));
        let looks = AtomicUsize::new(0);
        let is_wanted = || looks.fetch_add(1, Ordering::Relaxed) < 2;
        assert_eq!(owner.lend(&is_wanted).unwrap().err(), Some(Errno::CANCELED));
        assert_eq!(looks.load(Ordering::Relaxed), 3);
        // Or when the first of many is made.
        let looks = AtomicUsize::new(0);
        let is_wanted = || looks.fetch_add(1, Ordering::Relaxed) < 1;
        assert_eq!(owner.lend(&is_wanted).unwrap().err(), Some(Errno::CANCELED));
        assert_eq!(looks.load(Ordering::Relaxed), 2);
        let next = borrowed(&owner);
        next.set_attached(0, true).unwrap();
        echoes(&next, 0, 100);
    });
}

#[test]
fn sockets_that_are_lent_while_another_interface_is_joined_are_not_taken_for_those_of_that_one() {
    in_own_space(|| {
        make_veth("");
        let owner = lending("v0", 1);
        // Before the memory is made, before a socket is made, before it is bound, and before it is
        // handed out.
        for at in 0..4 {
            let looks = AtomicUsize::new(0);
            let joins = || {
                if looks.fetch_add(1, Ordering::Relaxed) == at {
                    run("ip link del v0");
                    wait_until_gone("v0");
                    assert!(owner.is_gone());
                    make_veth("");
                    owner.join_again().unwrap();
                }
                true
            };
            wait_for("nobody has former sockets", || owner.is_let_go() == Ok(true));
            let lent = owner.lend(&joins).unwrap();
            assert_eq!(lent.is_ok(), at == 0, "{at}");
            drop(lent);
            let port = borrowed(&owner);
            port.set_attached(0, true).unwrap();
            echoes(&port, 0, 100);
        }
    });
}

#[test]
fn sockets_that_cannot_be_mapped_now_stay_for_the_next_try() {
    in_own_space(|| {
        make_veth("");
        let owner = lending("v0", 1);
        let port = borrowed(&owner);
        let nothing = || std::fs::File::open("/dev/null").unwrap().into();
        let (chunk, filter) = (Some(2048), HostFilter::default());
        // An attempt to open the port copies no descriptor: the process may have no free ones.
        let queues: Vec<rustix::fd::OwnedFd> = vec![nothing(), nothing()];
        let numbers = |all: &[rustix::fd::OwnedFd]| all.iter().map(AsRawFd::as_raw_fd).collect();
        let before: Vec<_> = numbers(&queues);
        let facts = Facts {
            interface: "v0".to_owned(),
            is_macvtap: false,
            offloads: Offloads::default(),
            mtu: None,
            can_hash: false,
            host_filter: filter,
            chunk,
        };
        let lent = Lent { facts, queues, table: None };
        let (_, back) = XdpLentPort::new(lent, Arc::new(Local(owner.clone()))).unwrap_err();
        assert_eq!(numbers(&back), before);
        port.renew(vec![nothing(), nothing()], chunk, filter).unwrap();
        for _ in 0..3 {
            assert!(matches!(port.join_again(), Err(TapError::System { .. })));
            assert!(port.is_gone());
        }
        port.lose();
        assert!(matches!(port.join_again(), Err(TapError::Missing(_))));
        drop(port);
        // A process that cannot map them when it gets the device.
        wait_for("nobody has former sockets", || owner.is_let_go() == Ok(true));
        let lent = owner.lend(&|| true).unwrap().unwrap();
        let port = XdpLentPort::waiting(lent, 1, Arc::new(Local(owner.clone()))).unwrap();
        assert!(port.waits() && port.is_gone());
        port.set_attached(0, true).unwrap();
        port.set_attached(0, false).unwrap();
        port.join_again().unwrap();
        port.set_attached(0, true).unwrap();
        echoes(&port, 0, 100);
    });
}
