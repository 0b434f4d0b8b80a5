//! A guest on an interface of the host by AF_XDP: what it sends and gets, who is killed with frames
//! in flight, and an interface that goes. Needs root, for a network namespace of its own.

use crate::support::datagram::{Host, connect, datagram, payload, send};
use crate::support::process::{Daemon, TIMEOUT, wait_until};
use crate::support::program::shown;
use crate::support::space::{in_own_space, link, run};
use manyring_driver::NetDriver;
use manyring_wire::net::RawNetHeader;
use rustix::process::Signal;
use serde_json::Value;

/// Two guests, each with an end of a cable whose other end is the host's; both on one worker.
const CONFIG: &str = "[daemon]\ncontrol = '@/control'\nworkers = 1\ndomains = '#'\n\
    [[net]]\nname = 'lan'\nsocket_path = '@/lan'\nxdp = 'v0'\nup = true\n\
    [[net]]\nname = 'other'\nsocket_path = '@/other'\nxdp = 'w0'\nup = true\n";
const NAMES: [&str; 3] = ["lan", "other", "control"];

/// Makes a cable from `near` to `far`, which leaves no checksum unfinished.
fn make_cable(near: &str, far: &str) {
    run(&format!("ip link add {near} type veth peer name {far}"));
    run(&format!("ethtool -K {far} tx off"));
    run(&format!("ip link set {near} addrgenmode none"));
    run(&format!("ip link set {far} addrgenmode none up"));
}

/// The cables of both guests.
fn make_cables() {
    make_cable("v0", "v1");
    make_cable("w0", "w1");
}

/// Runs a test in a network of its own, with the daemon's configuration: once where the daemon
/// serves the guests, and once where a device process does.
fn in_both_forms(test: impl Fn(&str) + Sync) {
    for domains in ["one", "user"] {
        in_own_space(|| {
            make_cables();
            test(&CONFIG.replace('#', domains));
        });
    }
}

fn device(daemon: &Daemon, name: &str) -> Value {
    shown(&daemon.socket_of("control"), &format!("/v1/devices/{name}"))
}

/// The payload of the next datagram for the guest, if one has arrived.
fn take(guest: &mut NetDriver) -> Option<Vec<u8>> {
    let rx = &mut guest.pairs[0].rx;
    let mut frame = Vec::new();
    while rx.recv(&mut frame).unwrap().is_some() {
        rx.refill().unwrap();
        if let Some(payload) = payload(&frame) {
            return Some(payload.to_vec());
        }
        frame.clear();
    }
    None
}

/// A payload that follows from a number, of 4 to 1400 bytes.
fn bytes(number: u32) -> Vec<u8> {
    let len = 4 + usize::try_from(number.wrapping_mul(7919) % 1396).unwrap();
    let rest = (0u32..).map(|at| (at * 31 + number).to_le_bytes()[0]);
    number.to_be_bytes().into_iter().chain(rest).take(len).collect()
}

/// Both hear each other, `count` datagrams each way, whole and in order.
fn talk(guest: &mut NetDriver, host: &Host, count: u32) {
    // The guest may still have frames from before its interface went.
    while take(guest).is_some() {}
    // The kernel drops what it sends before it has heard of a carrier, and a device process has an
    // interface that is back a little after the daemon.
    let is_heard = wait_until(|| {
        host.send(1, b"hello");
        take(guest).is_some()
    });
    assert!(is_heard);
    while take(guest).is_some() {}
    for number in 0..count {
        send(guest, &datagram(1, &bytes(number)));
        assert_eq!(host.receive(), bytes(number));
        host.send(1, &bytes(number));
        let mut got = None;
        assert!(wait_until(|| {
            got = take(guest).filter(|payload| payload != b"hello");
            got.is_some()
        }));
        assert_eq!(got, Some(bytes(number)));
    }
}

/// Sends `count` datagrams each way, and waits for none of them.
fn send_both_ways(guest: &mut NetDriver, host: &Host, count: u32) {
    for number in 0..count {
        send(guest, &datagram(1, &bytes(number)));
        host.send(1, &bytes(number));
    }
}

#[test]
fn a_guest_and_the_host_hear_each_other_whole_and_in_order() {
    in_both_forms(|config| {
        let daemon = Daemon::run(config, &NAMES);
        let host = Host::on("v1");
        let mut guest = connect(&daemon, "lan");
        talk(&mut guest, &host, 200);
        let shown = device(&daemon, "lan");
        assert_eq!(
            (shown["port"].as_str(), shown["interface"].as_str()),
            (Some("xdp"), Some("v0"))
        );
        let address = link("v0").unwrap().address.unwrap();
        assert_eq!(guest.front.config(0, 6).unwrap(), address, "the guest has the interface's");
        // A frame that no chunk holds is refused, and counted.
        send(&mut guest, &datagram(1, &[7; 5000]));
        let refused = || device(&daemon, "lan")["queues"][1]["counters"]["dropped_refused"].clone();
        assert!(wait_until(|| refused() == 1), "{}", refused());
        talk(&mut guest, &host, 20);
        // Frames of the interface are not the host's: nobody else has seen the guest's replies.
        drop(guest);
        assert!(daemon.terminate().success());
        // The interface is the host's again, and another daemon may serve it.
        let daemon = Daemon::run(config, &NAMES);
        talk(&mut connect(&daemon, "lan"), &host, 5);
    });
}

#[test]
fn a_daemon_that_is_killed_with_frames_in_flight_leaves_the_interface_to_the_next() {
    in_both_forms(|config| {
        let host = Host::on("v1");
        for _ in 0..3 {
            let mut daemon = Daemon::run(config, &NAMES);
            let mut guest = connect(&daemon, "lan");
            talk(&mut guest, &host, 1);
            send_both_ways(&mut guest, &host, 200);
            daemon.send(Signal::KILL);
            daemon.wait();
            while host.try_receive().is_some() {}
        }
        let daemon = Daemon::run(config, &NAMES);
        talk(&mut connect(&daemon, "lan"), &host, 5);
    });
}

#[test]
fn an_interface_that_is_deleted_takes_the_link_of_its_guest_only_until_it_is_back() {
    in_both_forms(|config| {
        let daemon = Daemon::run(config, &NAMES);
        let mut guest = connect(&daemon, "lan");
        let mut other = connect(&daemon, "other");
        let has_link =
            |name: &str, link: &str| wait_until(|| device(&daemon, name)["link"] == link);
        for round in 0..3 {
            let host = Host::on("v1");
            talk(&mut guest, &host, 3);
            // Frames are in flight both ways.
            send_both_ways(&mut guest, &host, 100);
            run("ip link del v0");
            drop(host);
            assert!(has_link("lan", "down"), "{}", daemon.log());
            assert_eq!(device(&daemon, "other")["link"], "up");
            if round == 0 {
                let host = Host::on("w1");
                talk(&mut other, &host, 20);
                run("ip address flush dev w1");
            }
            // Frames that it sends are dropped, and their buffers come back.
            send(&mut guest, &datagram(1, b"to nobody"));
            guest.pairs[0].tx.drain(TIMEOUT).unwrap();
            make_cable("v0", "v1");
            assert!(has_link("lan", "up"), "{}", daemon.log());
        }
        // Down is not deleted: the guest's frames are lost, until it is up.
        let host = Host::on("v1");
        talk(&mut guest, &host, 3);
        run("ip link set v0 down");
        for number in 0..100 {
            send(&mut guest, &datagram(1, &bytes(number)));
        }
        guest.pairs[0].tx.drain(TIMEOUT).unwrap();
        let down = || {
            let counters = device(&daemon, "lan")["queues"][1]["counters"].clone();
            counters["dropped_port_down"].as_u64().unwrap()
        };
        assert!(wait_until(|| down() >= 50), "{}", down());
        run("ip link set v0 up");
        let arrives = wait_until(|| {
            send(&mut guest, &datagram(1, b"again"));
            while let Some(got) = host.try_receive() {
                if got == b"again" {
                    return true;
                }
            }
            false
        });
        assert!(arrives);
    });
}

#[test]
fn a_guest_whose_interface_takes_nothing_costs_its_neighbour_nothing() {
    in_both_forms(|config| {
        let daemon = Daemon::run(config, &NAMES);
        let mut guest = connect(&daemon, "lan");
        let mut other = connect(&daemon, "other");
        run("ip link set v0 down");
        let host = Host::on("w1");
        for round in 0..20 {
            // The neighbour fills its ring, with frames that are too long, and some that are not.
            for number in 0..100 {
                let frame = match number % 3 {
                    0 => datagram(1, &[0; 9000]),
                    1 => vec![1; 13],
                    _ => datagram(1, &bytes(number)),
                };
                let tx = &mut guest.pairs[0].tx;
                tx.reclaim();
                tx.send(&RawNetHeader::default(), &frame).unwrap();
                tx.publish(0).unwrap();
            }
            talk(&mut other, &host, 10);
            assert_eq!(device(&daemon, "other")["queues"][1]["counters"]["faults"], 0, "{round}");
        }
        guest.pairs[0].tx.drain(TIMEOUT).unwrap();
    });
}
