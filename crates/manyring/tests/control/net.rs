//! The control of network devices by an operator, against a daemon that serves. Needs root. These
//! tests hold the names of `docs/design/0001`.

mod tables;

use crate::support::process::{Daemon, TIMEOUT, end_of, kill_and_reap, wait_until};
use crate::support::program::{http, http_json, manyring, output_of, shown};
use crate::support::space::{
    MULTI, handing_in, has_carrier, in_own_space, link, queue, queues, run,
};
use manyring_driver::{ControlOwner, NetDriver, NetDriverOptions};
use manyring_wire::net::{
    CtrlStatus, NetConfig, RawNetHeader, VIRTIO_NET_F_MTU, VIRTIO_NET_S_ANNOUNCE,
    VIRTIO_NET_S_LINK_UP,
};
use manyring_wire::vhost_user::{
    BACKEND_CONFIG_CHANGE_MSG, FLAG_VERSION, Header, PROTOCOL_F_BACKEND_REQ,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::Read;
use std::process::Child;
use zerocopy::FromBytes;

/// One process: a device process hears of a change a moment after its answer, and tells what its
/// guest has set when it is asked.
const CONFIG: &str = "[daemon]\ncontrol = '@/control'\ndomains = 'one'\n\
    [[blk]]\nname = 'disk'\nsocket_path = '@/disk'\nnull = '1M'\n\
    [[net]]\nname = 'lan'\nsocket_path = '@/lan'\nnull = true\nqueue_pairs = 2\n\
    mac = '52:54:00:12:34:56'\n\
    [[net]]\nname = 'gen'\nsocket_path = '@/gen'\nnull = true\ngenerate = 100\nmtu = 1400\n";

/// A child that is killed when dropped.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        kill_and_reap(&mut self.0);
    }
}

fn serve() -> Daemon {
    Daemon::run(CONFIG, &["disk", "lan", "gen", "control"])
}

fn ask(daemon: &Daemon, method: &str, path: &str, body: &str) -> (u16, Value) {
    http_json(&daemon.socket_of("control"), method, path, body)
}

fn get(daemon: &Daemon, device: &str) -> Value {
    shown(&daemon.socket_of("control"), &format!("/v1/devices/{device}"))
}

/// A change that must succeed.
fn post(daemon: &Daemon, path: &str, body: Value) -> Value {
    let text = if body.is_null() { String::new() } else { body.to_string() };
    let (status, value) = ask(daemon, "POST", &format!("/v1/devices/{path}"), &text);
    assert_eq!(status, 200, "{path} {text}: {value}");
    value
}

fn connect(daemon: &Daemon, device: &str, control: ControlOwner, queue_pairs: u16) -> NetDriver {
    let defaults = NetDriverOptions::default();
    let protocol_features = defaults.protocol_features | PROTOCOL_F_BACKEND_REQ;
    let options = NetDriverOptions { control, queue_pairs, protocol_features, ..defaults };
    NetDriver::connect(&daemon.socket_of(device), &options).unwrap()
}

/// The config space of the device as it is now.
fn config(driver: &mut NetDriver) -> NetConfig {
    let size = u32::try_from(size_of::<NetConfig>()).unwrap();
    NetConfig::read_from_bytes(&driver.front.config(0, size).unwrap()).unwrap()
}

fn send(driver: &mut NetDriver, count: usize) {
    for _ in 0..count {
        assert!(driver.pairs[0].tx.send(&RawNetHeader::default(), &[0x55; 200]).unwrap());
    }
    driver.pairs[0].tx.publish(0).unwrap();
    driver.pairs[0].tx.drain(TIMEOUT).unwrap();
}

/// Waits until counter `name` of queue `index` is `count`.
fn wait_for(daemon: &Daemon, device: &str, index: usize, name: &str, count: u64) {
    let mut value = Value::Null;
    let is_so = wait_until(|| {
        value = get(daemon, device)["queues"][index]["counters"][name].clone();
        value == count
    });
    assert!(is_so, "{name}: {value}, not {count}");
}

/// A command of the program that asks this daemon.
fn command(daemon: &Daemon, arguments: &[&str]) -> (Option<i32>, String, String) {
    let control = daemon.socket_of("control");
    let output = output_of(manyring().args(arguments).arg("--control").arg(control));
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_network_device_is_shown_with_what_it_is() {
    let daemon = serve();
    let mut lan = get(&daemon, "lan");
    let queue_count = lan["queues"].as_array().unwrap().len();
    assert_eq!(queue_count, 5, "two pairs and the control queue");
    lan.as_object_mut().unwrap().remove("queues");
    let wanted = json!({
        "name": "lan", "kind": "net", "state": "serving", "origin": "file",
        "port": "null", "interface": null,
        "mac": "52:54:00:12:34:56", "mtu": null, "host_mtu": null, "link": "up",
        "queue_pairs": 2, "attached_pairs": 0, "connected": false,
        "socket": daemon.socket_of("lan"),
    });
    assert_eq!(lan, wanted);
    let generator = get(&daemon, "gen");
    assert_eq!((&generator["mtu"], &generator["queue_pairs"]), (&1400.into(), &1.into()));
    assert!(generator["mac"].as_str().unwrap().starts_with("02:"), "made from its name");
}

#[test]
fn what_cannot_be_is_refused_with_its_reason() {
    let daemon = serve();
    for (path, body, status, word) in [
        ("none/link", "{\"up\": true}", 404, "\"none\""),
        ("disk/link", "{\"up\": true}", 422, "not a network device"),
        ("disk/mtu", "{\"mtu\": 1500}", 422, "not a network device"),
        ("disk/announce", "", 422, "not a network device"),
        ("lan/resize", "{\"size\": 512}", 422, "not a disk"),
        ("lan/link", "", 400, "missing field `up`"),
        ("lan/link", "{\"up\": 1}", 400, "body: invalid type"),
        ("lan/link", "{\"up\": true, \"down\": true}", 400, "unknown field `down`"),
        ("lan/link", "{\"up\": true", 400, "body"),
        ("lan/mtu", "{}", 400, "missing field `mtu`"),
        ("lan/mtu", "{\"mtu\": 67}", 400, "mtu: 67 is not between 68 and 65535"),
        ("lan/mtu", "{\"mtu\": 65536}", 400, "mtu: 65536 is not between"),
        ("lan/mtu", "{\"mtu\": -1}", 400, "body: invalid value"),
        ("lan/mtu", "{\"mtu\": \"1500\"}", 400, "body: invalid type"),
        ("lan/announce", "{\"mac\": 1}", 400, "unknown field `mac`"),
        ("lan/announce", "", 409, "the guest runs no driver that can announce itself"),
        ("lan/nothing", "", 404, "no such path"),
    ] {
        let (code, answer) = ask(&daemon, "POST", &format!("/v1/devices/{path}"), body);
        assert_eq!(code, status, "{path} {body}: {answer}");
        let error = answer["error"].as_str().unwrap();
        assert!(error.contains(word), "{path} {body}: {error}");
    }
    for what in ["link", "mtu", "announce"] {
        let (code, answer) = ask(&daemon, "GET", &format!("/v1/devices/lan/{what}"), "");
        assert_eq!((code, answer["error"].is_string()), (405, true), "{answer}");
    }
    let lan = get(&daemon, "lan");
    assert_eq!((&lan["link"], &lan["mtu"]), (&"up".into(), &Value::Null), "nothing has changed");
}

#[test]
fn a_link_that_is_down_is_seen_by_the_guest_and_passes_nothing() {
    let daemon = serve();
    let mut driver = connect(&daemon, "lan", ControlOwner::Device, 1);
    let mut channel = driver.front.open_backend_channel().unwrap();
    let told = Header { request: BACKEND_CONFIG_CHANGE_MSG, flags: FLAG_VERSION, size: 0 }.emit();
    let mut hear = || {
        let mut message = [0; 12];
        channel.read_exact(&mut message).unwrap();
        assert_eq!(message, told);
    };
    send(&mut driver, 3);
    wait_for(&daemon, "lan", 1, "packets", 3);
    let answer = post(&daemon, "lan/link", json!({ "up": false }));
    assert_eq!(answer, json!({ "name": "lan", "link": "down" }));
    hear();
    assert_eq!(config(&mut driver).status.get(), 0);
    assert_eq!(get(&daemon, "lan")["link"], "down");
    send(&mut driver, 4);
    wait_for(&daemon, "lan", 1, "dropped_link_down", 4);
    // Down once more is nothing new.
    post(&daemon, "lan/link", json!({ "up": false }));
    post(&daemon, "lan/link", json!({ "up": true }));
    hear();
    assert_eq!(config(&mut driver).status.get(), VIRTIO_NET_S_LINK_UP);
    send(&mut driver, 5);
    wait_for(&daemon, "lan", 1, "packets", 8);
    assert_eq!(get(&daemon, "lan")["queues"][1]["counters"]["dropped_link_down"], 4);
    channel.set_nonblocking(true).unwrap();
    assert!(channel.read(&mut [0; 12]).is_err(), "two changes, told twice");
}

#[test]
fn a_guest_that_receives_gets_nothing_while_its_link_is_down() {
    let daemon = serve();
    let mut driver = connect(&daemon, "gen", ControlOwner::FrontEnd, 1);
    let mut frame = Vec::new();
    driver.pairs[0].rx.recv_wait(&mut frame, TIMEOUT).unwrap();
    assert_eq!(frame.len(), 100);
    post(&daemon, "gen/link", json!({ "up": false }));
    // Frames that were received before are taken; their buffers go back, and stay empty.
    for _ in 0..2 {
        while driver.pairs[0].rx.recv(&mut frame).unwrap().is_some() {}
        driver.pairs[0].rx.refill().unwrap();
    }
    let before = driver.pairs[0].rx.counters().packets;
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(driver.pairs[0].rx.recv(&mut frame).unwrap().is_none());
    post(&daemon, "gen/link", json!({ "up": true }));
    driver.pairs[0].rx.recv_wait(&mut frame, TIMEOUT).unwrap();
    assert_eq!(driver.pairs[0].rx.counters().packets, before + 1);
}

#[test]
fn an_mtu_reaches_the_guest_when_it_starts_its_device_again() {
    let daemon = serve();
    let mut driver = connect(&daemon, "gen", ControlOwner::Device, 1);
    assert_ne!(driver.features & VIRTIO_NET_F_MTU, 0);
    assert_eq!(config(&mut driver).mtu.get(), 1400);
    let answer = post(&daemon, "gen/mtu", json!({ "mtu": 9000 }));
    assert_eq!(answer, json!({ "name": "gen", "mtu": 9000 }));
    assert_eq!(get(&daemon, "gen")["mtu"], 9000);
    assert_eq!(config(&mut driver).mtu.get(), 1400, "a driver that runs keeps what it was told");
    drop(driver);
    let mut driver = connect(&daemon, "gen", ControlOwner::Device, 1);
    assert_eq!(config(&mut driver).mtu.get(), 9000);
    // A device that told none tells one from then on.
    let plain = connect(&daemon, "lan", ControlOwner::Device, 1);
    assert_eq!(plain.features & VIRTIO_NET_F_MTU, 0);
    drop(plain);
    post(&daemon, "lan/mtu", json!({ "mtu": 68 }));
    let mut driver = connect(&daemon, "lan", ControlOwner::Device, 1);
    assert_ne!(driver.features & VIRTIO_NET_F_MTU, 0);
    assert_eq!(config(&mut driver).mtu.get(), 68);
}

#[test]
fn a_guest_is_told_to_announce_itself_if_we_have_its_control_queue() {
    let daemon = serve();
    let mut driver = connect(&daemon, "lan", ControlOwner::Device, 1);
    let answer = post(&daemon, "lan/announce", Value::Null);
    assert_eq!(answer, json!({ "name": "lan", "announces": true }));
    assert_eq!(config(&mut driver).status.get(), VIRTIO_NET_S_LINK_UP | VIRTIO_NET_S_ANNOUNCE);
    assert_eq!(driver.control().unwrap().acknowledge_announce().unwrap(), CtrlStatus::Ok);
    assert_eq!(config(&mut driver).status.get(), VIRTIO_NET_S_LINK_UP);
    drop(driver);
    let _driver = connect(&daemon, "lan", ControlOwner::FrontEnd, 1);
    let (status, answer) = ask(&daemon, "POST", "/v1/devices/lan/announce", "");
    assert_eq!(status, 409, "{answer}");
}

#[test]
fn attached_pairs_follow_the_guest() {
    let daemon = serve();
    let attached = || get(&daemon, "lan")["attached_pairs"].clone();
    for (control, at_start) in [(ControlOwner::FrontEnd, 2), (ControlOwner::Device, 1)] {
        let mut driver = connect(&daemon, "lan", control, 2);
        assert_eq!(attached(), at_start, "{control:?}");
        for count in [1, 2, 1] {
            driver.set_queue_pairs(count).unwrap();
            assert_eq!(attached(), count, "{control:?}");
        }
        drop(driver);
        assert!(wait_until(|| attached() == 0), "{control:?}");
    }
}

/// UML's only word for "stop" is `SET_VRING_ENABLE 0`: then the memory is the driver's again.
#[test]
fn a_ring_that_is_disabled_is_left_alone_whatever_else_changes() {
    let daemon = serve();
    let mut driver = connect(&daemon, "lan", ControlOwner::FrontEnd, 2);
    send(&mut driver, 20);
    wait_for(&daemon, "lan", 1, "packets", 20);
    // Without need_reply the answer to the next message says that this is done.
    driver.front.set_vring_enable(1, false).unwrap();
    driver.front.features().unwrap();
    let ring = driver.pairs[0].tx.vring().addresses();
    let areas = [ring.descriptor, ring.available, ring.used].map(|a| a - driver.arena.user_addr(0));
    let junk = [0xa5; 64];
    for area in areas {
        driver.arena.write(area, &junk).unwrap();
    }
    for (path, body) in [
        ("lan/link", json!({ "up": false })),
        ("lan/link", json!({ "up": true })),
        ("lan/mtu", json!({ "mtu": 1400 })),
    ] {
        post(&daemon, path, body);
    }
    driver.front.set_vring_enable(3, false).unwrap();
    let mut found = [0; 64];
    for area in areas {
        driver.arena.read(area, &mut found).unwrap();
        assert_eq!(found, junk, "written behind the driver's back");
    }
    let lan = get(&daemon, "lan");
    assert_eq!(lan["queues"][1]["counters"]["faults"], 0, "{lan}");
}

/// A transmitq that is disabled is emptied all the same (vhost-user, "Ring states").
#[test]
fn what_a_driver_kicks_for_in_a_disabled_transmitq_is_dropped() {
    let daemon = serve();
    let mut driver = connect(&daemon, "lan", ControlOwner::FrontEnd, 1);
    send(&mut driver, 5);
    driver.front.set_vring_enable(1, false).unwrap();
    for count in [3, 4] {
        send(&mut driver, count);
    }
    wait_for(&daemon, "lan", 1, "dropped_disabled", 7);
    driver.front.set_vring_enable(1, true).unwrap();
    send(&mut driver, 6);
    wait_for(&daemon, "lan", 1, "packets", 11);
}

#[test]
fn the_commands_change_a_device_and_say_so_or_why_not() {
    let daemon = serve();
    let _driver = connect(&daemon, "lan", ControlOwner::Device, 1);
    for (arguments, line) in [
        (&["link", "lan", "down"][..], "lan: link down\n"),
        (&["link", "lan", "up"], "lan: link up\n"),
        (&["mtu", "lan", "1280"], "lan: MTU 1280\n"),
        (&["announce", "lan"], "lan: the guest has been told to announce itself\n"),
    ] {
        let (code, out, error) = command(&daemon, arguments);
        assert_eq!((code, out.as_str()), (Some(0), line), "{arguments:?}: {error}");
    }
    assert_eq!(get(&daemon, "lan")["mtu"], 1280);
    for (arguments, word) in [
        (&["link", "none", "up"][..], "\"none\""),
        (&["link", "disk", "up"], "not a network device"),
        (&["mtu", "lan", "67"], "mtu: 67"),
        (&["announce", "gen"], "no driver"),
        (&["announce", "no/name"], "\"no/name\""),
        (&["resize", "lan", "1M"], "not a disk"),
    ] {
        let (code, _, error) = command(&daemon, arguments);
        assert_eq!(code, Some(1), "{arguments:?}: {error}");
        assert!(error.contains(word) && error.lines().count() == 1, "{arguments:?}: {error}");
    }
    for arguments in [&["link", "lan"][..], &["link", "lan", "sideways"], &["mtu", "lan", "x"]] {
        assert_eq!(command(&daemon, arguments).0, Some(2), "{arguments:?}");
    }
}

#[test]
fn the_interface_of_a_tap_follows() {
    in_own_space(|| {
        let config = "[daemon]\ncontrol = '@/control'\n\
            [[net]]\nname = 'lan'\nsocket_path = '@/lan'\ntap = 'mr0'\nqueue_pairs = 2\n\
            mtu = 1400\n";
        let daemon = Daemon::run(config, &["lan", "control"]);
        let lan = get(&daemon, "lan");
        let of = |key: &str| lan[key].clone();
        assert_eq!((of("port"), of("interface")), ("tap".into(), "mr0".into()));
        assert_eq!((of("mtu"), of("host_mtu")), (1400.into(), 1400.into()));
        let there = link("mr0").unwrap();
        assert_eq!((there.mtu, there.is_up), (1400, true), "created here, so it is up");
        assert_eq!(queues("mr0"), (0, 2));
        let mut driver = connect(&daemon, "lan", ControlOwner::Device, 2);
        assert_eq!(queues("mr0"), (1, 1));
        driver.set_queue_pairs(2).unwrap();
        assert_eq!(queues("mr0"), (2, 0));
        post(&daemon, "lan/mtu", json!({ "mtu": 4000 }));
        assert_eq!((link("mr0").unwrap().mtu, get(&daemon, "lan")["host_mtu"].clone()), {
            (4000, 4000.into())
        });
        let (status, answer) = ask(&daemon, "POST", "/v1/devices/lan/mtu", "{\"mtu\": 65522}");
        assert_eq!(status, 422, "{answer}");
        assert_eq!(answer["error"], "mtu: 65522 is not supported by this interface");
        let lan = get(&daemon, "lan");
        assert_eq!((&lan["mtu"], &lan["host_mtu"]), (&4000.into(), &4000.into()));
        assert!(has_carrier("mr0"));
        post(&daemon, "lan/link", json!({ "up": false }));
        assert!(!has_carrier("mr0"));
        post(&daemon, "lan/link", json!({ "up": true }));
        assert!(has_carrier("mr0"));
        drop(driver);
        assert!(wait_until(|| queues("mr0") == (0, 2)));
        assert!(daemon.terminate().success());
        assert_eq!(link("mr0"), None, "what was created goes away");
    });
}

#[test]
fn a_link_that_is_up_again_is_so_for_the_guest_and_the_daemon_that_come_later() {
    in_own_space(|| {
        run("ip tuntap add dev mr0 mode tap multi_queue");
        run("ip link set mr0 up");
        let held = queue("mr1", MULTI);
        run("ip link set mr1 up");
        for name in ["mr0", "mr1"] {
            for round in 0..2 {
                let folder = tempfile::tempdir().unwrap();
                let (socket, control) = (folder.path().join("s"), folder.path().join("c"));
                let sockets =
                    format!("--socket-path {} --control {}", socket.display(), control.display());
                let program = env!("CARGO_BIN_EXE_manyring");
                let mut command = if name == "mr0" {
                    handing_in(program, &format!("net --tap mr0 {sockets}"), Vec::new())
                } else {
                    let fds = vec![held.try_clone().unwrap()];
                    handing_in(program, &format!("net --tap-fd 7 {sockets}"), fds)
                };
                let mut started = Started(command.spawn().unwrap());
                drop(command);
                assert!(wait_until(|| control.exists()));
                let set_link = |up: bool| {
                    let body = json!({ "up": up }).to_string();
                    let (status, _, answer) =
                        http(&control, "POST", "/v1/devices/net0/link", &body);
                    assert_eq!(status, 200, "{answer}");
                };
                // While there is no guest, and while there is one.
                set_link(false);
                set_link(true);
                let _driver = NetDriver::connect(&socket, &NetDriverOptions::default()).unwrap();
                assert!(has_carrier(name), "{name} {round}");
                set_link(false);
                assert!(!has_carrier(name), "{name} {round}");
                let signal = if round == 0 { Signal::KILL } else { Signal::TERM };
                kill_process(Pid::from_child(&started.0), signal).unwrap();
                end_of(&mut started.0);
            }
        }
        assert!(has_carrier("mr1"), "as it was handed in");
    });
}
