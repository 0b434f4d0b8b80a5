//! The host's interface goes while a guest runs, and one of its name is there again: the guest's
//! link is down in between, then its network works as before. Needs root.

use crate::support::process::{Daemon, TIMEOUT, kill_and_reap, wait_until};
use crate::support::program::{http_json, shown};
use crate::support::space::{MULTI, handing_in, in_own_space, link, queue, queues, run};
use manyring_driver::{ControlOwner, NetDriver, NetDriverOptions};
use manyring_wire::net::{NetConfig, RawNetHeader, VIRTIO_NET_S_LINK_UP};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use serde_json::Value;
use std::net::UdpSocket;
use std::process::Child;
use std::time::Duration;
use zerocopy::FromBytes;

/// Two devices on one worker: one's interface goes, the other's stays.
const CONFIG: &str = "[daemon]\ncontrol = '@/control'\nworkers = 1\n\
    [[net]]\nname = 'lan'\nsocket_path = '@/lan'\ntap = 'lan0'\nqueue_pairs = 2\nmtu = 1400\n\
    bridge = 'br0'\n\
    [[net]]\nname = 'other'\nsocket_path = '@/other'\ntap = 'other0'\n";

/// A child that is killed when dropped.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        kill_and_reap(&mut self.0);
    }
}

fn device(daemon: &Daemon, name: &str) -> Value {
    shown(&daemon.socket_of("control"), &format!("/v1/devices/{name}"))
}

fn connect(daemon: &Daemon, name: &str, queue_pairs: u16) -> NetDriver {
    let control = ControlOwner::FrontEnd;
    let options = NetDriverOptions { queue_pairs, control, ..NetDriverOptions::default() };
    let mut driver = NetDriver::connect(&daemon.socket_of(name), &options).unwrap();
    driver.set_queue_pairs(queue_pairs).unwrap();
    driver
}

fn is_link_up(driver: &mut NetDriver) -> bool {
    let size = u32::try_from(size_of::<NetConfig>()).unwrap();
    let config = NetConfig::read_from_bytes(&driver.front.config(0, size).unwrap()).unwrap();
    config.status.get() & VIRTIO_NET_S_LINK_UP != 0
}

/// True if the guest's link is so; a process of its own hears of it a little later.
fn sees_link(driver: &mut NetDriver, up: bool) -> bool {
    wait_until(|| is_link_up(driver) == up)
}

/// A broadcast of no known protocol, filled with `byte`.
fn frame(byte: u8) -> Vec<u8> {
    [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1, 0x88, 0xb5], &[byte; 86]].concat()
}

/// A socket of the host that sees all frames of all interfaces.
fn watch() -> OwnedFd {
    use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, socket_with};
    let (flags, all) = (SocketFlags::CLOEXEC, Protocol::from_raw(0x0300_u32.try_into().unwrap()));
    socket_with(AddressFamily::PACKET, SocketType::RAW, flags, all.into()).unwrap()
}

/// The guest sends a frame by `pair`, and the host gets it. No other frame has this `byte`.
fn assert_sends(driver: &mut NetDriver, pair: usize, byte: u8) {
    assert!(sends(driver, pair, byte, 60), "frame {byte} does not come");
}

/// The guest sends a frame by `pair`. True if the host gets it within `seconds` seconds.
fn sends(driver: &mut NetDriver, pair: usize, byte: u8, seconds: i64) -> bool {
    let host = watch();
    let tx = &mut driver.pairs[pair].tx;
    assert!(tx.send(&RawNetHeader::default(), &frame(byte)).unwrap());
    tx.publish(0).unwrap();
    tx.drain(TIMEOUT).unwrap();
    let mut bytes = vec![0; 2048];
    loop {
        let mut fds = [PollFd::new(&host, PollFlags::IN)];
        let max_wait = Timespec { tv_sec: seconds, tv_nsec: 0 };
        if poll(&mut fds, Some(&max_wait)).unwrap() == 0 {
            return false;
        }
        let len = rustix::io::read(&host, &mut bytes).unwrap();
        if bytes[..len] == frame(byte) {
            return true;
        }
    }
}

/// The host sends datagrams by `interface` until the guest has got one, by any of its pairs.
fn assert_receives(driver: &mut NetDriver, interface: &str, byte: u8) {
    let network = interface.len();
    run(&format!("ip address replace 10.{network}.0.1/24 dev {interface}"));
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.set_broadcast(true).unwrap();
    let mut bytes = Vec::new();
    let got = wait_until(|| {
        // The route by an interface that has just been set up may take a moment.
        let _ = socket.send_to(&[byte; 86], format!("10.{network}.0.255:7000"));
        let mut found = false;
        for pair in &mut driver.pairs {
            bytes.clear();
            while pair.rx.recv(&mut bytes).unwrap().is_some() {
                found |= bytes.ends_with(&[byte; 86]);
                bytes.clear();
            }
            pair.rx.refill().unwrap();
        }
        found
    });
    assert!(got, "the guest gets nothing from {interface}");
}

fn counter(daemon: &Daemon, name: &str, queue: usize, counter: &str) -> u64 {
    device(daemon, name)["queues"][queue]["counters"][counter].as_u64().unwrap()
}

fn wait_for_link(daemon: &Daemon, name: &str, wanted: &str) {
    let is_so = wait_until(|| device(daemon, name)["link"] == wanted);
    assert!(is_so, "the link is not {wanted}: {}", daemon.log());
}

/// Deletes the tap and makes it anew, as somebody else would.
fn make_again() {
    run("ip tuntap add dev lan0 mode tap multi_queue");
}

/// With `domains`, a process of its own serves each device, which opens no interface.
fn serve(io_uring: bool, domains: &str) -> Daemon {
    run("ip link add br0 type bridge");
    let keys = format!("workers = 1\nio_uring = {io_uring}\ndomains = '{domains}'");
    let config = CONFIG.replace("workers = 1", &keys);
    let daemon = Daemon::run(&config, &["lan", "other", "control"]);
    run("ip link set br0 up");
    daemon
}

#[test]
fn a_tap_that_goes_is_joined_again_by_its_name() {
    for (io_uring, domains) in [(true, "one"), (false, "one"), (true, "device")] {
        in_own_space(|| {
            let daemon = serve(io_uring, domains);
            let (mut lan, mut other) = (connect(&daemon, "lan", 2), connect(&daemon, "other", 1));
            assert_sends(&mut lan, 0, 1);
            assert_receives(&mut lan, "lan0", 2);
            let bridge = link("lan0").unwrap().master.unwrap();
            for round in 0..3_usize {
                run("ip link del lan0");
                wait_for_link(&daemon, "lan", "down");
                assert!(sees_link(&mut lan, false));
                // The line may come a little later. Further losses within ten seconds have none.
                let lines = || daemon.log().matches("the host's interface is gone").count();
                assert!(wait_until(|| lines() > 0));
                assert!(lines() <= round + 1, "round {round}: {}", lines());
                // The guest's frames are dropped and counted. Its neighbour has its network.
                let tx = &mut lan.pairs[1].tx;
                assert!(tx.send(&RawNetHeader::default(), &frame(3)).unwrap());
                tx.publish(0).unwrap();
                tx.drain(TIMEOUT).unwrap();
                assert_sends(&mut other, 0, 4);
                assert_receives(&mut other, "other0", 5);
                let sent = counter(&daemon, "lan", 1, "packets");
                // By the port itself until the worker has been told.
                let causes = ["dropped_link_down", "dropped_port_down"];
                let is_counted = |cause| counter(&daemon, "lan", 3, cause) > 0;
                assert!(sent > 0 && wait_until(|| causes.into_iter().any(is_counted)));
                make_again();
                wait_for_link(&daemon, "lan", "up");
                assert!(sees_link(&mut lan, true));
                let found = link("lan0").unwrap();
                assert_eq!((found.mtu, found.master, found.is_up), (1400, Some(bridge), true));
                assert!(wait_until(|| queues("lan0") == (2, 0)), "{:?}", queues("lan0"));
                assert_sends(&mut lan, 0, 6);
                assert_sends(&mut lan, 1, 7);
                assert_receives(&mut lan, "lan0", 8);
                assert!(counter(&daemon, "lan", 1, "packets") > sent, "counters are kept");
            }
            // Else the host would choose the queue of a frame, and its operator look for a process
            // that does not exist.
            assert!(!daemon.log().contains("steer:"), "{}", daemon.log());
        });
    }
}

#[test]
fn a_session_that_starts_while_its_tap_is_gone_has_its_network_later() {
    in_own_space(|| {
        session_that_starts_late(&serve(true, "one"));
    });
    in_own_space(|| {
        session_that_starts_late(&serve(true, "device"));
    });
}

fn session_that_starts_late(daemon: &Daemon) {
    run("ip link del lan0");
    wait_for_link(daemon, "lan", "down");
    let mut lan = connect(daemon, "lan", 2);
    assert!(sees_link(&mut lan, false));
    // Settings that the operator makes now hold for the interface that comes.
    let control = daemon.socket_of("control");
    for (what, body) in [("mtu", "{\"mtu\": 1300}"), ("link", "{\"up\": false}")] {
        let path = format!("/v1/devices/lan/{what}");
        assert_eq!(http_json(&control, "POST", &path, body).0, 200, "{what}");
    }
    make_again();
    let joined = || daemon.log().contains("is back, and joined again");
    assert!(wait_until(joined), "{}", daemon.log());
    assert!(wait_until(|| queues("lan0") == (2, 0)), "{:?}", queues("lan0"));
    assert_eq!((link("lan0").unwrap().mtu, is_link_up(&mut lan)), (1300, false));
    let (status, _) = http_json(&control, "POST", "/v1/devices/lan/link", "{\"up\": true}");
    assert_eq!((status, sees_link(&mut lan, true)), (200, true));
    assert_sends(&mut lan, 1, 1);
    assert_receives(&mut lan, "lan0", 2);
    // Without a front-end too.
    drop(lan);
    run("ip link del lan0");
    wait_for_link(daemon, "lan", "down");
    make_again();
    wait_for_link(daemon, "lan", "up");
    // A device process that nobody was connected to hears of the new interface a little later.
    let mut lan = connect(daemon, "lan", 2);
    assert!(wait_until(|| sends(&mut lan, 0, 3, 1)));
}

#[test]
fn a_bridge_and_a_tap_of_another_form_are_waited_for() {
    in_own_space(|| {
        let daemon = serve(true, "one");
        let mut lan = connect(&daemon, "lan", 2);
        run("ip link del br0");
        run("ip link del lan0");
        wait_for_link(&daemon, "lan", "down");
        run("ip tuntap add dev lan0 mode tap");
        let why = "tap lan0 is not multi-queue";
        assert!(wait_until(|| daemon.log().contains(why)), "{}", daemon.log());
        run("ip link del lan0");
        make_again();
        wait_for_link(&daemon, "lan", "up");
        assert_eq!(link("lan0").unwrap().master, None);
        run("ip link add br0 type bridge");
        assert!(wait_until(|| link("lan0").unwrap().master.is_some()), "{}", daemon.log());
        assert_sends(&mut lan, 0, 1);
        assert_eq!(daemon.log().matches(why).count(), 1, "{}", daemon.log());
    });
}

#[test]
fn a_macvtap_that_goes_is_joined_again_by_its_name() {
    for io_uring in ["true", "false"] {
        in_own_space(|| {
            run("ip link add one type veth peer name two");
            run("ip link set one up");
            run("ip link set two up");
            let make = "ip link add link one name mv0 address 02:00:00:00:00:22 \
                        type macvtap mode passthru";
            run(make);
            run("ip link set mv0 up");
            let daemon = Daemon::run(
                &format!(
                    "[daemon]\ncontrol = '@/control'\nio_uring = {io_uring}\n[[net]]\n\
                     name = 'lan'\nsocket_path = '@/lan'\nmacvtap = 'mv0'\nup = true\n"
                ),
                &["lan", "control"],
            );
            let mut lan = connect(&daemon, "lan", 1);
            assert_sends(&mut lan, 0, 1);
            assert_receives(&mut lan, "two", 2);
            run("ip link del mv0");
            wait_for_link(&daemon, "lan", "down");
            run(make);
            wait_for_link(&daemon, "lan", "up");
            assert!(link("mv0").unwrap().is_up);
            // In a device process the guest's link is up a moment after the API says so.
            assert!(wait_until(|| sends(&mut lan, 0, 3, 1)), "the guest sends again");
            assert_receives(&mut lan, "two", 4);
        });
    }
}

/// Somebody with a network namespace of its own.
fn elsewhere() -> Started {
    let ns = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).unwrap();
    let (here, sleep) = (ns("thread-self"), ["-n", "sleep", "1000"]);
    let other = Started(std::process::Command::new("unshare").args(sleep).spawn().unwrap());
    assert!(wait_until(|| ns(&other.0.id().to_string()) != here));
    other
}

/// The host tells no process of what happens in another namespace than its own.
#[test]
fn an_interface_that_is_moved_to_another_namespace_and_deleted_there_is_noticed() {
    for kind in ["tap", "macvtap"] {
        in_own_space(|| {
            run("ip link add one type veth peer name two");
            run("ip link set one up");
            run("ip link set two up");
            let make = match kind {
                "tap" => "ip tuntap add dev mv0 mode tap",
                _ => "ip link add link one name mv0 address 02:00:00:00:00:22 type macvtap",
            };
            run(make);
            let config = format!(
                "[daemon]\ncontrol = '@/control'\n[[net]]\nname = 'lan'\n\
                 socket_path = '@/lan'\n{kind} = 'mv0'\nup = true\n"
            );
            let daemon = Daemon::run(&config, &["lan", "control"]);
            // Without a front-end, so that no queue finds out.
            let other = elsewhere();
            run(&format!("ip link set mv0 netns {}", other.0.id()));
            assert_eq!(device(&daemon, "lan")["link"], "up", "{}", daemon.log());
            // It is as good as before when it comes back.
            let home = format!("nsenter --net --target {} ip link", other.0.id());
            let here = rustix::thread::gettid().as_raw_nonzero();
            run(&format!("{home} set mv0 netns {here}"));
            run("ip link set mv0 up");
            let control = daemon.socket_of("control");
            let set_mtu = || {
                let path = "/v1/devices/lan/mtu";
                http_json(&control, "POST", path, "{\"mtu\": 1400}");
                link("mv0").unwrap().mtu == 1400
            };
            assert!(wait_until(set_mtu), "{}", daemon.log());
            run(&format!("ip link set mv0 netns {}", other.0.id()));
            // Until the daemon has looked at it, which it was told to do when it was moved.
            std::thread::sleep(Duration::from_millis(500));
            run(&format!("{home} del mv0"));
            wait_for_link(&daemon, "lan", "down");
            run(make);
            wait_for_link(&daemon, "lan", "up");
            assert_sends(&mut connect(&daemon, "lan", 1), 0, 1);
        });
    }
}

#[test]
fn a_tap_that_was_handed_in_cannot_be_joined_again_and_that_is_said() {
    in_own_space(|| {
        let folder = tempfile::tempdir().unwrap();
        let (socket, control) = (folder.path().join("s"), folder.path().join("c"));
        let log = folder.path().join("log");
        let arguments = format!(
            "net --tap-fd 7 --socket-path {} --control {} 2>{}",
            socket.display(),
            control.display(),
            log.display()
        );
        let program = env!("CARGO_BIN_EXE_manyring");
        let mut command = handing_in(program, &arguments, vec![queue("mr0", MULTI)]);
        let _started = Started(command.spawn().unwrap());
        assert!(wait_until(|| socket.exists() && control.exists()));
        // The daemon alone keeps the interface now.
        run("ip link del mr0");
        let said = || std::fs::read_to_string(&log).unwrap();
        assert!(wait_until(|| said().contains("mr0 was passed as file descriptors")), "{}", said());
        assert_eq!(shown(&control, "/v1/devices/net0")["link"], "down");
    });
}
