//! A switch whose uplink is a tap or a macvtap that is not there: its guests reach each other, and
//! the host once the interface is back. Needs root, for network namespaces of its own.

use crate::domain::{pid, process};
use crate::support::datagram::Host;
use crate::support::process::{Daemon, wait_until};
use crate::support::space::{in_own_space, run};
use crate::switched::{PORTS, SWITCH, config, connect, reaches, says};
use rustix::process::{Signal, kill_process};

const NAMES: [&str; 3] = ["a", "b", "control"];

/// Deletes the uplink, has device processes die meanwhile, and makes the uplink anew. `far`: the
/// interface by which the host talks to the guests.
fn goes_and_comes(keys: &str, far: &str, comes: &[&str]) {
    let daemon = Daemon::run(&config(keys, &PORTS), &NAMES);
    let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
    let host = Host::on(far);
    reaches(&mut a, &host, b"before");
    drop(host);
    run(&format!("ip address flush dev {far}"));
    run("ip link delete up0");
    let is_told = || daemon.log().contains("device=\"switch:s0\" interface=\"up0\"");
    assert!(wait_until(is_told), "{}", daemon.log());
    says(&mut b, 2, (&mut a, 0x22), 1);
    for round in 2..4 {
        kill_process(pid(&daemon, SWITCH), Signal::KILL).unwrap();
        says(&mut b, 2, (&mut a, 0x22), round);
        assert_eq!(process(&daemon, SWITCH)["starts"], round, "{}", daemon.log());
    }
    for command in comes {
        run(command);
    }
    let is_back = || daemon.log().contains("the host's interface is back");
    assert!(wait_until(is_back), "{}", daemon.log());
    reaches(&mut a, &Host::on(far), b"back");
    assert_eq!(process(&daemon, SWITCH)["starts"], 3, "{}", daemon.log());
    assert!(daemon.terminate().success());
}

#[test]
fn guests_reach_each_other_while_the_tap_of_their_uplink_is_away_and_the_host_when_it_is_back() {
    in_own_space(|| {
        goes_and_comes("uplink = 'up0'", "up0", &["ip tuntap add dev up0 mode tap"]);
    });
}

#[test]
fn guests_reach_each_other_while_the_macvtap_of_their_uplink_is_away() {
    in_own_space(|| {
        run("ip link add near type veth peer name far");
        run("ethtool -K far tx off");
        run("ip link set near addrgenmode none up");
        run("ip link set far addrgenmode none up");
        let comes = [
            "ip link add link near name up0 type macvtap mode passthru",
            "ip link set up0 addrgenmode none up",
        ];
        for command in comes {
            run(command);
        }
        let keys = "uplink = 'up0'\nuplink_kind = 'macvtap'";
        goes_and_comes(keys, "far", &comes);
    });
}
