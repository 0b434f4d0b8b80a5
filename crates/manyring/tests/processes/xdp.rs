//! Interfaces by AF_XDP that are served by device processes: the supervisor keeps the interface and
//! its program, a device process has the sockets of its guest. Needs root, for network namespaces
//! of its own.
#![cfg(target_arch = "x86_64")]

use crate::domain::{counted, pid, process};
use crate::support::datagram::{Host, connect, datagram, payload, send};
use crate::support::process::{Daemon, TIMEOUT, end_of, wait_until};
use crate::support::program::{http_json, shown};
use crate::support::space::{in_own_space, run};
use crate::support::taken::Taken;
use crate::support::view::{View, assert_alike};
use crate::takeover::{log, take_over};
use manyring_driver::NetDriver;
use rustix::fd::OwnedFd;
use rustix::net::AddressFamily;
use rustix::net::sockopt::socket_domain;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open};
use serde_json::json;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Two guests in domains of their own.
const CONFIG: &str = "[daemon]\ncontrol = '@/control'\nworkers = 1\n\
    [[net]]\nname = 'lan'\nsocket_path = '@/lan'\nxdp = 'v0'\nup = true\ndomain = 'a'\n\
    [[net]]\nname = 'other'\nsocket_path = '@/other'\nxdp = 'w0'\nup = true\ndomain = 'b'\n";
const NAMES: [&str; 3] = ["lan", "other", "control"];
pub(crate) const XDP: u64 = 44;
pub(crate) const SOL_XDP: u64 = 283;

/// Makes a cable from `near` to `far`, which leaves no checksum unfinished.
pub(crate) fn make_cable(near: &str, far: &str) {
    run(&format!("ip link add {near} type veth peer name {far}"));
    run(&format!("ip link set {near} address 02:00:00:00:00:01"));
    run(&format!("ethtool -K {far} tx off"));
    run(&format!("ip link set {near} addrgenmode none"));
    run(&format!("ip link set {far} addrgenmode none up"));
}

/// Runs a test with the daemon and the cables of both guests.
fn with_daemon(test: impl FnOnce(Daemon) + Send) {
    in_own_space(|| {
        make_cable("v0", "v1");
        make_cable("w0", "w1");
        test(Daemon::run(CONFIG, &NAMES));
    });
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

/// A datagram of `mark` reaches the host, and one the guest.
fn talks(guest: &mut NetDriver, host: &Host, mark: &[u8]) {
    let mut hears = |sends: &mut dyn FnMut(&mut NetDriver),
                     hears: &dyn Fn(&mut NetDriver) -> bool| {
        let is_heard = wait_until(|| {
            sends(guest);
            hears(guest)
        });
        assert!(is_heard, "{mark:?}");
    };
    hears(&mut |guest| send(guest, &datagram(1, mark)), &|_| {
        std::iter::from_fn(|| host.try_receive()).any(|got| got == mark)
    });
    hears(&mut |_| host.send(1, mark), &|guest| {
        std::iter::from_fn(|| take(guest)).any(|got| got == mark)
    });
}

/// The targets of the descriptors of a process, with their numbers.
pub(crate) fn fds(process: i32) -> Vec<(u64, PathBuf)> {
    let fds = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
    let target = |fd: std::fs::DirEntry| {
        let number = fd.file_name().to_str()?.parse().ok()?;
        Some((number, std::fs::read_link(fd.path()).ok()?))
    };
    fds.filter_map(target).collect()
}

/// The inodes of sockets in a table of /proc/net.
fn inodes(table: &str) -> BTreeSet<PathBuf> {
    let table = std::fs::read_to_string(format!("/proc/thread-self/net/{table}")).unwrap();
    let inodes = table.lines().filter_map(|line| line.split_whitespace().last());
    inodes.map(|inode| PathBuf::from(format!("socket:[{inode}]"))).collect()
}

#[test]
fn a_device_process_that_is_killed_under_load_costs_frames_and_no_connection() {
    with_daemon(|daemon| {
        let (host, mut guest) = (Host::on("v1"), connect(&daemon, "lan"));
        for round in 1..5u64 {
            talks(&mut guest, &host, &round.to_be_bytes());
            for number in 0..200u64 {
                send(&mut guest, &datagram(1, &number.to_be_bytes()));
                host.send(1, &number.to_be_bytes());
            }
            kill_process(pid(&daemon, "a"), Signal::KILL).unwrap();
            for number in 0..200u64 {
                host.send(1, &number.to_be_bytes());
                guest.pairs[0].tx.reclaim();
            }
            assert!(
                wait_until(|| process(&daemon, "a")["starts"] == round + 1),
                "{}",
                daemon.log()
            );
        }
        talks(&mut guest, &host, b"the last");
        guest.pairs[0].tx.drain(TIMEOUT).unwrap();
        assert!(counted(&daemon, "lan", "packets") > 5, "counters of dead processes are kept");
        assert_eq!(counted(&daemon, "lan", "faults"), 0);
        drop(guest);
        // A session that ended leaves its frames to the host.
        let device = || shown(&daemon.socket_of("control"), "/v1/devices/lan");
        assert!(wait_until(|| device()["connected"] == false && device()["attached_pairs"] == 0));
        talks(&mut connect(&daemon, "lan"), &host, b"the next guest");
        assert!(daemon.terminate().success());
    });
}

#[test]
fn a_device_process_that_starts_while_its_interface_is_away_has_no_sockets_until_it_is_back() {
    with_daemon(|daemon| {
        let (host, mut guest) = (Host::on("v1"), connect(&daemon, "lan"));
        talks(&mut guest, &host, b"before");
        drop(host);
        run("ip link delete v0");
        for starts in 2..4u64 {
            kill_process(pid(&daemon, "a"), Signal::KILL).unwrap();
            let serves = || {
                let process = process(&daemon, "a");
                process["starts"] == starts && process["devices"] == json!(["lan"])
            };
            assert!(wait_until(serves), "{}", daemon.log());
            assert!(sockets_of(&daemon, "a").is_empty());
        }
        make_cable("v0", "v1");
        talks(&mut guest, &Host::on("v1"), b"after");
        assert_eq!(process(&daemon, "a")["starts"], 3, "{}", daemon.log());
        assert!(daemon.terminate().success());
    });
}

#[test]
fn a_device_process_that_is_taken_has_its_own_sockets_and_makes_binds_and_changes_none() {
    with_daemon(|daemon| {
        let (host, mut guest) = (Host::on("v1"), connect(&daemon, "lan"));
        let _other = connect(&daemon, "other");
        talks(&mut guest, &host, b"before");
        let [a, b] = ["a", "b"].map(|name| pid(&daemon, name).as_raw_nonzero().get());
        let memory = |process: i32| {
            let all = fds(process).into_iter();
            let all = all.filter(|(_, target)| target.starts_with("/memfd:xdp (deleted)"));
            let inode = |(fd, _): (u64, PathBuf)| {
                std::os::unix::fs::MetadataExt::ino(
                    &std::fs::metadata(format!("/proc/{process}/fd/{fd}")).unwrap(),
                )
            };
            all.map(inode).collect::<BTreeSet<_>>()
        };
        // The memory is mapped, and its descriptor closed.
        assert_eq!([memory(a), memory(b)], [BTreeSet::new(), BTreeSet::new()]);
        let foreign: BTreeSet<_> = &inodes("packet") | &inodes("netlink");
        let of_a = fds(a);
        assert!(of_a.iter().all(|(_, target)| !foreign.contains(target)), "{of_a:?}");
        let is_bpf = |target: &PathBuf| target.to_string_lossy().contains("bpf");
        assert!(of_a.iter().all(|(_, target)| !is_bpf(target)), "{of_a:?}");
        let mut thread = Taken::take(a, a);
        let scratch = thread.scratch();
        let domain_of = |thread: &mut Taken, fd: u64| {
            thread.store(scratch + 32, 4);
            let arguments = [fd, 1, 39, scratch, scratch + 32, 0];
            let result = thread.call(libc::SYS_getsockopt, arguments);
            (result == 0).then(|| u64::from(thread.load(scratch)))
        };
        let sockets: Vec<_> = of_a.iter().map(|(fd, _)| *fd).collect();
        let own = sockets.into_iter().filter(|fd| domain_of(&mut thread, *fd) == Some(XDP));
        let own: Vec<_> = own.collect();
        let [socket] = own[..] else { unreachable!("{own:?} of {of_a:?}") };
        // `struct sockaddr_xdp` of queue 0 of its interface.
        (0..16).step_by(4).for_each(|at| thread.store(scratch + at, 0));
        thread.store(scratch, u32::try_from(XDP).unwrap());
        for (call, arguments) in [
            (libc::SYS_bind, [socket, scratch, 16, 0, 0, 0]),
            // XDP_RX_RING, XDP_UMEM_REG and SO_ATTACH_FILTER.
            (libc::SYS_setsockopt, [socket, SOL_XDP, 2, scratch, 4, 0]),
            (libc::SYS_setsockopt, [socket, SOL_XDP, 4, scratch, 32, 0]),
            (libc::SYS_setsockopt, [socket, 1, 26, scratch, 16, 0]),
            (libc::SYS_sendto, [socket, scratch, 0, 0, scratch, 16]),
            (libc::SYS_socket, [XDP, 3, 0, 0, 0, 0]),
            (libc::SYS_socket, [17, 3, 0, 0, 0, 0]),
            (libc::SYS_bpf, [1, scratch, 32, 0, 0, 0]),
        ] {
            let refused = thread.call(call, arguments);
            assert_eq!(refused, -i64::from(libc::EPERM), "{call} {arguments:?}");
        }
        drop(thread);
        talks(&mut guest, &host, b"after");
        // The device process logs the calls when it hears of them.
        let is_logged = || daemon.log().contains("denied by the sandbox");
        assert!(wait_until(is_logged), "{}", daemon.log());
    });
}

/// Copies of the sockets of AF_XDP that a device process has.
pub(crate) fn sockets_of(daemon: &Daemon, domain: &str) -> Vec<OwnedFd> {
    let process = pid(daemon, domain);
    let pidfd = pidfd_open(process, PidfdFlags::empty()).unwrap();
    let all = fds(process.as_raw_nonzero().get()).into_iter();
    let copy = |(fd, _): (u64, PathBuf)| {
        let fd = i32::try_from(fd).unwrap();
        pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty()).ok()
    };
    all.filter_map(copy).filter(|fd| socket_domain(fd) == Ok(AddressFamily::XDP)).collect()
}

#[test]
fn nobody_is_served_by_an_interface_while_somebody_keeps_a_socket_of_a_former_device_process() {
    const WAITS: &str = "AF_XDP sockets of a former device process are still open";
    with_daemon(|daemon| {
        let (host, mut guest) = (Host::on("v1"), connect(&daemon, "lan"));
        talks(&mut guest, &host, b"before");
        let kept = sockets_of(&daemon, "a");
        assert_eq!(kept.len(), 1);
        let former = pid(&daemon, "a");
        kill_process(former, Signal::KILL).unwrap();
        assert!(wait_until(|| daemon.log().contains(WAITS)), "{}", daemon.log());
        assert!(wait_until(|| process(&daemon, "a")["starts"] == 2), "{}", daemon.log());
        assert!(sockets_of(&daemon, "a").is_empty(), "the next process has none meanwhile");
        let control = daemon.socket_of("control");
        assert_eq!(shown(&control, "/v1/devices/lan")["attached_pairs"], 0);
        drop(kept);
        talks(&mut guest, &host, b"after");
        let log = daemon.log();
        let told: Vec<_> = log.lines().filter(|line| line.contains(WAITS)).collect();
        assert!(
            matches!(told[..], [line] if line.contains("ERROR") && line.contains("a")),
            "{log}"
        );
    });
}

#[test]
fn a_device_goes_to_another_domain_and_another_interface_and_the_former_is_the_hosts_again() {
    with_daemon(|daemon| {
        make_cable("x0", "x1");
        make_cable("y0", "y1");
        let control = daemon.socket_of("control");
        let put = |domain: &str, interface: &str| {
            let body = json!({
                "kind": "net", "socket_path": daemon.socket_of("moves"), "xdp": interface,
                "up": true, "domain": domain,
            });
            http_json(&control, "PUT", "/v1/devices/moves", &body.to_string())
        };
        for (domain, interface, peer) in
            [("c", "x0", "x1"), ("c", "y0", "y1"), ("b", "x0", "x1"), ("a", "x0", "x1")]
        {
            // It is refused while the front-end is connected.
            let answered = || matches!(put(domain, interface).0, 200 | 201);
            assert!(wait_until(answered), "{:?} {}", put(domain, interface), daemon.log());
            let host = Host::on(peer);
            let mut guest = connect(&daemon, "moves");
            talks(&mut guest, &host, interface.as_bytes());
            assert_eq!(shown(&control, "/v1/devices/moves")["process"], domain);
            drop((guest, host));
            run(&format!("ip address flush dev {peer}"));
        }
        // With zero_copy a device process would have a socket that is not bound yet.
        let body = json!({
            "kind": "net", "socket_path": daemon.socket_of("moves"), "xdp": "x0",
            "zero_copy": true, "domain": "a",
        });
        let (status, answer) = http_json(&control, "PUT", "/v1/devices/moves", &body.to_string());
        assert_eq!(status, 422, "{answer}");
        assert!(answer.to_string().contains("zero_copy"), "{answer}");
    });
}

#[test]
fn a_takeover_of_an_interface_by_af_xdp_is_refused_and_its_guest_goes_on() {
    with_daemon(|daemon| {
        let (host, mut guest) = (Host::on("v1"), connect(&daemon, "lan"));
        talks(&mut guest, &host, b"before");
        let mut next = take_over(&daemon, "manyring.toml");
        assert!(!end_of(&mut next).success());
        let said = log(&daemon);
        assert!(said.contains("interfaces by AF_XDP are not handed over: lan, other"), "{said}");
        talks(&mut guest, &host, b"after");
        assert_eq!(process(&daemon, "a")["starts"], 1);
    });
}

#[test]
fn an_interface_by_af_xdp_and_a_capture_are_shown_alike_in_the_daemon_and_in_a_device_process() {
    let view_in = |domains: &str, when: &str| {
        let mut views = None;
        in_own_space(|| {
            make_cable("v0", "v1");
            let config = format!(
                "[daemon]\ncontrol = '@/control'\nworkers = 1\ndomains = '{domains}'\n\
                 [[net]]\nname = 'lan'\nsocket_path = '@/lan'\nxdp = 'v0'\nup = true\n\
                 mtu = 1400\npcap = '@/lan.pcap'\n"
            );
            let daemon = Daemon::run(&config, &["lan", "control"]);
            let (host, control) = (Host::on("v1"), daemon.socket_of("control"));
            let mut guest = None;
            if when != "idle" {
                let mut driver = connect(&daemon, "lan");
                talks(&mut driver, &host, b"hello");
                guest = Some(driver);
            }
            if when == "changed" {
                let post = |path: &str, body: &str| http_json(&control, "POST", path, body).0;
                assert_eq!(post("/v1/devices/lan/mtu", "{\"mtu\": 1300}"), 200);
                assert_eq!(post("/v1/devices/lan/link", "{\"up\": false}"), 200);
                assert_ne!(post("/v1/devices/lan/mtu", "{\"mtu\": 4000}"), 200);
            }
            views = Some(View::of(&control, daemon.folder()));
            drop(guest);
        });
        views.unwrap()
    };
    for when in ["idle", "used", "changed"] {
        let [here, apart] = ["one", "device"].map(|domains| view_in(domains, when));
        assert_alike(&here, &apart, when);
        assert_eq!(here.devices[0]["port"], "xdp");
    }
}
