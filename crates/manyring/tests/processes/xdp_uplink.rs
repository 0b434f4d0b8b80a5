//! A switch whose uplink is an interface by AF_XDP, in a device process: the supervisor keeps the
//! interface and its program, the process of the switch has the socket. Needs root, for network
//! namespaces of its own.
#![cfg(target_arch = "x86_64")]

use crate::domain::{pid, process};
use crate::support::datagram::Host;
use crate::support::process::{Daemon, wait_until};
use crate::support::program::{http, shown};
use crate::support::space::{in_own_space, run};
use crate::support::taken::Taken;
use crate::switched::{PORTS, SWITCH, config, connect, reaches, says};
use crate::taken::threads;
use crate::takeover::{log, take_over};
use crate::xdp::{SOL_XDP, XDP, fds, make_cable, sockets_of};
use rustix::process::{Signal, kill_process};

const UPLINK: &str = "uplink = 'v0'\nuplink_kind = 'xdp'";
const NAMES: [&str; 3] = ["a", "b", "control"];

/// Runs a test with a daemon whose switch has the near end of a cable; the host has the far end.
fn with_daemon(test: impl FnOnce(Daemon) + Send) {
    in_own_space(|| {
        make_cable("v0", "v1");
        run("ip link set v0 up promisc on");
        test(Daemon::run(&config(UPLINK, &PORTS), &NAMES));
    });
}

#[test]
fn a_guest_reaches_the_host_by_af_xdp_whichever_process_has_its_switch() {
    with_daemon(|daemon| {
        let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
        assert_eq!(shown(&daemon.socket_of("control"), "/v1/devices/a")["process"], SWITCH);
        let mut host = Host::on("v1");
        reaches(&mut a, &host, b"first");
        assert_eq!(sockets_of(&daemon, SWITCH).len(), 1);
        for round in 2..5 {
            kill_process(pid(&daemon, SWITCH), Signal::KILL).unwrap();
            reaches(&mut a, &host, format!("round {round}").as_bytes());
            says(&mut b, 2, (&mut a, 0x22), round);
            assert_eq!(process(&daemon, SWITCH)["starts"], round, "{}", daemon.log());
        }
        // Deleted, and made anew: the same process gets another socket.
        drop(host);
        run("ip link delete v0");
        let is_told = || daemon.log().contains("device=\"switch:s0\" interface=\"v0\"");
        assert!(wait_until(is_told), "{}", daemon.log());
        says(&mut b, 2, (&mut a, 0x22), 7);
        make_cable("v0", "v1");
        run("ip link set v0 up promisc on");
        host = Host::on("v1");
        reaches(&mut a, &host, b"anew");
        assert_eq!(process(&daemon, SWITCH)["starts"], 4, "{}", daemon.log());
        assert_eq!(sockets_of(&daemon, SWITCH).len(), 1);
        let said = daemon.log();
        assert!(!said.contains("fault") && !said.contains("denied"), "{said}");
        assert!(daemon.terminate().success());
    });
}

#[test]
fn no_process_of_a_switch_gets_its_uplink_while_somebody_keeps_a_socket_of_the_former() {
    const WAITS: &str = "AF_XDP sockets of a former device process are still open";
    with_daemon(|daemon| {
        let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
        let host = Host::on("v1");
        reaches(&mut a, &host, b"before");
        let kept = sockets_of(&daemon, SWITCH);
        assert_eq!(kept.len(), 1);
        kill_process(pid(&daemon, SWITCH), Signal::KILL).unwrap();
        assert!(wait_until(|| daemon.log().contains(WAITS)), "{}", daemon.log());
        assert!(wait_until(|| process(&daemon, SWITCH)["starts"] == 2), "{}", daemon.log());
        assert!(sockets_of(&daemon, SWITCH).is_empty(), "the next process has none meanwhile");
        says(&mut b, 2, (&mut a, 0x22), 1);
        drop(kept);
        reaches(&mut a, &host, b"after");
        let log = daemon.log();
        let told: Vec<_> = log.lines().filter(|line| line.contains(WAITS)).collect();
        assert!(
            matches!(told[..], [line] if line.contains("ERROR") && line.contains(SWITCH)),
            "{log}"
        );
        assert!(daemon.terminate().success());
    });
}

#[test]
fn guests_reach_each_other_while_their_uplink_is_away_and_the_host_when_it_is_back() {
    let made_anew = || {
        make_cable("v0", "v1");
        run("ip link set v0 up promisc on");
        Host::on("v1")
    };
    with_daemon(|daemon| {
        // No process has the uplink yet, and none when it is made anew.
        run("ip link delete v0");
        drop(made_anew());
        let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
        says(&mut b, 2, (&mut a, 0x22), 1);
        run("ip address flush dev v1");
        reaches(&mut a, &Host::on("v1"), b"by another interface of that name");
        run("ip link delete v0");
        for round in 2..4 {
            kill_process(pid(&daemon, SWITCH), Signal::KILL).unwrap();
            says(&mut b, 2, (&mut a, 0x22), round);
            assert_eq!(process(&daemon, SWITCH)["starts"], round, "{}", daemon.log());
        }
        let host = made_anew();
        reaches(&mut a, &host, b"back");
        assert_eq!(process(&daemon, SWITCH)["starts"], 3, "{}", daemon.log());
        assert!(daemon.terminate().success());
    });
}

#[test]
fn an_interface_that_is_made_anew_gets_rid_of_a_socket_of_the_uplink_that_somebody_keeps() {
    const WAITS: &str = "AF_XDP sockets of a former device process are still open";
    with_daemon(|daemon| {
        let mut a = connect(&daemon, "a");
        reaches(&mut a, &Host::on("v1"), b"before");
        let _kept = sockets_of(&daemon, SWITCH);
        kill_process(pid(&daemon, SWITCH), Signal::KILL).unwrap();
        assert!(wait_until(|| daemon.log().contains(WAITS)), "{}", daemon.log());
        run("ip link delete v0");
        make_cable("v0", "v1");
        run("ip link set v0 up promisc on");
        reaches(&mut a, &Host::on("v1"), b"after");
        assert_eq!(process(&daemon, SWITCH)["starts"], 2, "{}", daemon.log());
        assert!(daemon.terminate().success());
    });
}

#[test]
fn threads_of_a_switch_that_are_taken_make_bind_and_change_no_socket_of_af_xdp() {
    with_daemon(|daemon| {
        let mut a = connect(&daemon, "a");
        let host = Host::on("v1");
        reaches(&mut a, &host, b"first");
        let its_pid = pid(&daemon, SWITCH).as_raw_nonzero().get();
        let of = |name: &str| threads(its_pid).into_iter().find(|(known, _)| known == name);
        for thread in [its_pid, of("uplink-s0").unwrap().1] {
            let mut taken = Taken::take(its_pid, thread);
            let scratch = taken.scratch();
            (0..32).step_by(4).for_each(|at| taken.store(scratch + at, 0));
            taken.store(scratch, u32::try_from(XDP).unwrap());
            for (fd, _) in fds(its_pid) {
                for (call, arguments) in [
                    (libc::SYS_bind, [fd, scratch, 16, 0, 0, 0]),
                    // XDP_RX_RING and XDP_UMEM_REG.
                    (libc::SYS_setsockopt, [fd, SOL_XDP, 2, scratch, 4, 0]),
                    (libc::SYS_setsockopt, [fd, SOL_XDP, 4, scratch, 32, 0]),
                    (libc::SYS_sendto, [fd, scratch, 0, 0, scratch, 16]),
                ] {
                    let refused = taken.call(call, arguments);
                    assert_eq!(refused, -i64::from(libc::EPERM), "{call} {arguments:?}");
                }
            }
            for (call, arguments) in [
                (libc::SYS_socket, [XDP, 3, 0, 0, 0, 0]),
                (libc::SYS_bpf, [1, scratch, 32, 0, 0, 0]),
            ] {
                let refused = taken.call(call, arguments);
                assert_eq!(refused, -i64::from(libc::EPERM), "{call} {arguments:?}");
            }
        }
        reaches(&mut a, &host, b"after");
        assert_eq!(process(&daemon, SWITCH)["starts"], 1, "{}", daemon.log());
    });
}

#[test]
fn a_switch_gets_and_loses_an_uplink_by_af_xdp_while_its_guests_are_connected() {
    with_daemon(|daemon| {
        make_cable("w0", "w1");
        run("ip link set w0 up promisc on");
        let mut a = connect(&daemon, "a");
        let host = Host::on("v1");
        reaches(&mut a, &host, b"by v0");
        drop(host);
        run("ip address flush dev v1");
        let replace = |switch: &str| {
            let text = config(switch, &PORTS);
            let text = text.replace('@', &daemon.folder().display().to_string());
            http(&daemon.socket_of("control"), "PUT", "/v1/config", &text).0
        };
        for (round, (switch, far)) in [
            ("uplink = 'w0'\nuplink_kind = 'xdp'", "w1"),
            ("uplink = 'tap0'", "tap0"),
            (UPLINK, "v1"),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(replace(switch), 200, "{switch}: {}", daemon.log());
            let host = Host::on(far);
            reaches(&mut a, &host, switch.as_bytes());
            assert_eq!(process(&daemon, SWITCH)["starts"], round + 2, "{}", daemon.log());
            drop(host);
            run(&format!("ip address flush dev {far}"));
        }
        assert!(daemon.terminate().success());
    });
}

#[test]
fn a_takeover_of_a_switch_with_an_uplink_by_af_xdp_is_refused_and_its_guests_go_on() {
    with_daemon(|daemon| {
        let mut a = connect(&daemon, "a");
        let host = Host::on("v1");
        reaches(&mut a, &host, b"before");
        let mut next = take_over(&daemon, "manyring.toml");
        assert!(!next.wait().unwrap().success());
        let said = log(&daemon);
        assert!(said.contains("interfaces by AF_XDP are not handed over: s0"), "{said}");
        reaches(&mut a, &host, b"after");
        assert_eq!(process(&daemon, SWITCH)["starts"], 1);
        assert!(daemon.terminate().success());
    });
}
