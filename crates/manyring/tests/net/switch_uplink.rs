//! Uplinks of a switch that are no taps: a macvtap, and an interface by AF_XDP. Guests and host
//! hear each other, also after the interface was deleted and made again. Needs root, for network
//! namespaces of its own.

use crate::support::datagram::{Host, connect, datagram, payload, send};
use crate::support::process::{Daemon, domains, wait_until};
use crate::support::space::{in_own_space, run};
use manyring_driver::NetDriver;

/// A kind of uplink, and how its interface is made. The host has the other end, `far`.
struct Kind {
    kind: &'static str,
    make: fn(),
}

const KINDS: [Kind; 2] =
    [Kind { kind: "xdp", make: make_cable }, Kind { kind: "macvtap", make: make_macvtap }];

fn make_cable() {
    run("ip link add up0 type veth peer name far");
    // Else the host leaves its checksums to a card that there is not.
    run("ethtool -K far tx off");
    run("ip link set up0 addrgenmode none up");
    run("ip link set far addrgenmode none up");
}

fn make_macvtap() {
    run("ip link add near type veth peer name far");
    run("ip link set near addrgenmode none up");
    run("ip link set far addrgenmode none up");
    run("ip link add link near name up0 type macvtap mode passthru");
    run("ip link set up0 addrgenmode none up");
}

fn serve(kind: &str) -> Daemon {
    let mut config = format!(
        "[daemon]\ncontrol = '@/control'\n{}\n\
         [[switch]]\nname = 's0'\nuplink = 'up0'\nuplink_kind = '{kind}'\n",
        domains()
    );
    for name in ["a", "b"] {
        config += &format!(
            "[[net]]\nname = '{name}'\nsocket_path = '@/{name}'\nswitch = 's0'\n\
             floods_max = 1000000\n"
        );
    }
    Daemon::run(&config, &["a", "b", "control"])
}

/// The next frame for the guest, if there is one.
fn take(guest: &mut NetDriver) -> Option<Vec<u8>> {
    let (rx, mut frame) = (&mut guest.pairs[0].rx, Vec::new());
    let got = rx.recv(&mut frame).unwrap();
    rx.refill().unwrap();
    got.map(|_| frame)
}

/// True once the guest has a datagram with these bytes.
fn hears(guest: &mut NetDriver, bytes: &[u8]) -> bool {
    wait_until(|| std::iter::from_fn(|| take(guest)).any(|frame| payload(&frame) == Some(bytes)))
}

/// A guest sends these bytes to all until another one has heard them: that one may have had no room
/// for the first of them.
fn tells(guest: &mut NetDriver, other: &mut NetDriver, bytes: &[u8]) {
    let is_heard = wait_until(|| {
        send(guest, &datagram(1, bytes));
        std::iter::from_fn(|| take(other)).any(|frame| frame.ends_with(bytes))
    });
    assert!(is_heard);
}

/// Guest and host hear each other, `count` datagrams of several lengths each way, whole.
fn talk(guest: &mut NetDriver, host: &Host, count: u32) {
    // The host drops what it sends before it knows of a carrier, and the switch learns where the
    // guest is.
    let is_heard = wait_until(|| {
        send(guest, &datagram(1, b"hello"));
        host.try_receive().is_some()
    });
    assert!(is_heard);
    while host.try_receive().is_some() {}
    for number in 0..count {
        let len = 4 + usize::try_from(number * 7919 % 1396).unwrap();
        let bytes: Vec<_> =
            number.to_be_bytes().into_iter().chain(std::iter::repeat(7)).take(len).collect();
        send(guest, &datagram(1, &bytes));
        assert!(wait_until(|| host.receive() == bytes));
        host.send(1, &bytes);
        assert!(hears(guest, &bytes), "{number} does not come");
    }
}

#[test]
fn guests_reach_the_host_by_a_macvtap_and_by_af_xdp_and_again_if_it_is_made_anew() {
    for Kind { kind, make } in KINDS {
        in_own_space(move || {
            make();
            let daemon = serve(kind);
            let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
            let host = Host::on("far");
            talk(&mut a, &host, 100);
            // The other guest hears broadcasts of the first one, and reaches it too.
            tells(&mut a, &mut b, b"to all");
            // More than the kernel takes at once: none is kept, and the guest has its buffers back.
            for _ in 0..300 {
                send(&mut a, &datagram(1, &[7; 1000]));
            }
            assert!(wait_until(|| {
                a.pairs[0].tx.reclaim();
                a.pairs[0].tx.in_flight() == 0
            }));
            drop(host);
            run("ip link delete far");
            let told = |word: &str| wait_until(|| daemon.log().contains(word));
            assert!(told("the uplink's interface is gone"), "{kind}: {}", daemon.log());
            // Guests hear each other while the uplink is gone.
            tells(&mut a, &mut b, b"meanwhile");
            make();
            assert!(told("rejoined"), "{kind}: {}", daemon.log());
            talk(&mut a, &Host::on("far"), 50);
            assert!(daemon.terminate().success());
        });
    }
}
