//! The ways to start a network device: by another name, with a tap that is made, joined or handed
//! in, without privileges. Needs root.

use crate::support::process::{Daemon, TIMEOUT, kill_and_reap, wait_until};
use crate::support::program::{http, manyring, output_of, program_for_all, shown};
use crate::support::space::{
    AS_NOBODY, MULTI, as_nobody, handing_in, in_own_space, link, open_taps_to_all, queue, queues,
    run,
};
use manyring_driver::{ControlOwner, NetDriver, NetDriverOptions};
use manyring_wire::net::RawNetHeader;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, Mode, OFlags};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command};

/// Frames that are captured: more than a pipe holds.
const CAPTURED: u64 = 30;

/// A child that is killed when dropped.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        kill_and_reap(&mut self.0);
    }
}

impl Started {
    /// Starts a program and waits for its sockets.
    fn new(mut command: Command, sockets: &[&Path]) -> Self {
        let mut started = Self(command.spawn().unwrap());
        let shown = wait_until(|| {
            let runs = started.0.try_wait().unwrap().is_none();
            !runs || sockets.iter().all(|socket| socket.exists())
        });
        assert!(shown && started.0.try_wait().unwrap().is_none(), "{command:?} ended");
        started
    }
}

fn device(control: &Path, name: &str) -> Value {
    shown(control, &format!("/v1/devices/{name}"))
}

fn connect(socket: &Path, queue_pairs: u16) -> NetDriver {
    let options =
        NetDriverOptions { queue_pairs, control: ControlOwner::Device, ..Default::default() };
    NetDriver::connect(socket, &options).unwrap()
}

/// Sends a broadcast of no known protocol by queue pair 0, filled with `byte`.
fn send(driver: &mut NetDriver, byte: u8) {
    let frame = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1, 0x88, 0xb5], &[byte; 86]].concat();
    assert!(driver.pairs[0].tx.send(&RawNetHeader::default(), &frame).unwrap());
    driver.pairs[0].tx.publish(0).unwrap();
    driver.pairs[0].tx.drain(TIMEOUT).unwrap();
}

/// True once counter `packets` of transmitq 0 is `count`.
fn has_sent(control: &Path, name: &str, count: u64) -> bool {
    wait_until(|| device(control, name)["queues"][1]["counters"]["packets"] == count)
}

#[test]
fn the_name_vhost_user_net_means_the_command_net() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("vhost-user-net");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_manyring"), &program).unwrap();
    let output = output_of(Command::new(&program).arg("--print-capabilities"));
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let capabilities: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(capabilities, json!({ "type": "net" }));
    let output = output_of(manyring().args(["net", "--print-capabilities"]));
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), capabilities);
    let socket = folder.path().join("socket");
    let mut command = Command::new(&program);
    command.arg("--socket-path").arg(&socket).arg("--null");
    let _started = Started::new(command, &[&socket]);
    assert_eq!(connect(&socket, 1).pairs.len(), 1);
}

#[test]
fn a_tap_that_is_handed_in_needs_no_privilege() {
    in_own_space(|| {
        let folder = tempfile::tempdir().unwrap();
        let program = program_for_all(folder.path());
        let (socket, control) = (folder.path().join("s"), folder.path().join("c"));
        let fds = vec![queue("mr0", MULTI), queue("mr0", MULTI)];
        run("ip link set mr0 up mtu 1400");
        let arguments = format!(
            "net --tap-fd 7,8 --mtu 1400 --up --socket-path {} --control {}",
            socket.display(),
            control.display()
        );
        let program = format!("{AS_NOBODY} {}", program.display());
        let command = handing_in(program, &arguments, fds);
        let _started = Started::new(command, &[&socket, &control]);
        let status = std::fs::metadata(&socket).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::uid(&status), 65534);
        let mut driver = connect(&socket, 2);
        driver.set_queue_pairs(2).unwrap();
        assert_eq!(queues("mr0"), (2, 0));
        send(&mut driver, 1);
        assert!(has_sent(&control, "net0", 1));
        let shown = device(&control, "net0");
        assert_eq!((&shown["interface"], &shown["queue_pairs"]), (&"mr0".into(), &2.into()));
    });
}

#[test]
fn a_tap_of_ones_own_can_be_joined_without_privilege() {
    in_own_space(|| {
        let folder = tempfile::tempdir().unwrap();
        let program = program_for_all(folder.path());
        let (socket, control) = (folder.path().join("s"), folder.path().join("c"));
        open_taps_to_all();
        run("ip tuntap add dev mr0 mode tap multi_queue user 65534");
        run("ip link set mr0 up");
        let mut command = as_nobody(&program);
        command.args(["net", "--tap", "mr0", "--must-exist", "--queue-pairs", "2"]);
        command.arg("--socket-path").arg(&socket).arg("--control").arg(&control);
        let _started = Started::new(command, &[&socket, &control]);
        let mut driver = connect(&socket, 2);
        send(&mut driver, 1);
        assert!(has_sent(&control, "net0", 1));
        // A request that needs a capability says so, and changes nothing.
        let (status, _, body) = http(&control, "POST", "/v1/devices/net0/mtu", "{\"mtu\": 1280}");
        assert_eq!(status, 500, "{body}");
        assert!(body.contains("needs CAP_NET_ADMIN"), "{body}");
        assert_eq!(
            (link("mr0").unwrap().mtu, &device(&control, "net0")["mtu"]),
            (1500, &Value::Null)
        );
    });
}

#[test]
fn a_tap_that_is_made_is_on_its_bridge_and_up_unless_it_shall_not_be() {
    in_own_space(|| {
        run("ip link add br0 type bridge");
        let config = "[[net]]\nname = 'a'\nsocket_path = '@/a'\ntap = 'mr0'\nbridge = 'br0'\n\
            mtu = 1400\n\
            [[net]]\nname = 'b'\nsocket_path = '@/b'\ntap = 'mr1'\nup = false\n\
            [[net]]\nname = 'c'\nsocket_path = '@/c'\ntap = 'mr2'\n";
        run("ip tuntap add dev mr2 mode tap");
        let daemon = Daemon::run(config, &["a", "b", "c"]);
        let of = |name| link(name).unwrap();
        assert_eq!([of("mr0").is_up, of("mr1").is_up, of("mr2").is_up], [true, false, false]);
        assert_eq!((of("mr0").master, of("mr0").mtu), (Some(of("br0").index), 1400));
        assert!(daemon.terminate().success());
        assert_eq!((link("mr0"), link("mr1"), link("mr2").is_some()), (None, None, true));
    });
}

#[test]
fn a_macvtap_gives_its_guest_its_address() {
    in_own_space(|| {
        run("ip link add v0 type veth peer name v1");
        for (name, mac) in [("mv0", "02:00:00:00:00:aa"), ("mv1", "02:00:00:00:00:bb")] {
            run(&format!("ip link add link v0 name {name} address {mac} type macvtap mode bridge"));
        }
        for name in ["v0", "v1"] {
            run(&format!("ip link set {name} up"));
        }
        let config = "[daemon]\ncontrol = '@/control'\n\
            [[net]]\nname = 'a'\nsocket_path = '@/a'\nmacvtap = 'mv0'\nqueue_pairs = 2\n\
            up = true\n\
            [[net]]\nname = 'b'\nsocket_path = '@/b'\nmacvtap = 'mv1'\n\
            mac = '52:54:00:12:34:56'\n";
        let daemon = Daemon::run(config, &["a", "b", "control"]);
        let control = daemon.socket_of("control");
        let (a, b) = (device(&control, "a"), device(&control, "b"));
        assert_eq!((&a["port"], &a["interface"]), (&"macvtap".into(), &"mv0".into()));
        assert_eq!(
            (&a["mac"], &b["mac"]),
            (&"02:00:00:00:00:aa".into(), &"52:54:00:12:34:56".into())
        );
        let log = daemon.log();
        let warnings: Vec<_> = log.lines().filter(|line| line.contains("WARN")).collect();
        assert_eq!(warnings.len(), 1, "{log}");
        assert!(warnings[0].contains("02:00:00:00:00:bb"), "the other address warns: {log}");
        let mut driver = connect(&daemon.socket_of("a"), 2);
        driver.set_queue_pairs(2).unwrap();
        let far = rustix::net::socket_with(
            rustix::net::AddressFamily::PACKET,
            rustix::net::SocketType::RAW,
            rustix::net::SocketFlags::CLOEXEC,
            rustix::net::Protocol::from_raw(0x0300_u32.try_into().unwrap()).into(),
        );
        let far = far.unwrap();
        send(&mut driver, 0xa5);
        assert!(has_sent(&control, "a", 1));
        let mut frame = [0; 2048];
        loop {
            let mut fds = [PollFd::new(&far, PollFlags::IN)];
            let max_wait = Timespec { tv_sec: 10, tv_nsec: 0 };
            assert!(poll(&mut fds, Some(&max_wait)).unwrap() > 0, "the frame does not come");
            let len = rustix::io::read(&far, &mut frame).unwrap();
            if frame[12..14] == [0x88, 0xb5] {
                assert_eq!(frame[14..len], [0xa5; 86]);
                break;
            }
        }
    });
}

#[test]
fn a_macvtap_that_is_handed_in_gives_its_address_too() {
    in_own_space(|| {
        run("ip link add v0 type veth peer name v1");
        run("ip link add link v0 name mv0 address 02:00:00:00:00:aa type macvtap mode bridge");
        run("ip link set mv0 up");
        // Its device node, as a container would have it.
        run("mount -t tmpfs tmpfs /mnt");
        let index = link("mv0").unwrap().index;
        let number = std::fs::read_to_string(format!("/sys/class/net/mv0/tap{index}/dev"));
        run(&format!("mknod /mnt/tap c {}", number.unwrap().trim().replace(':', " ")));
        let folder = tempfile::tempdir().unwrap();
        let program = program_for_all(folder.path());
        let (socket, control) = (folder.path().join("s"), folder.path().join("c"));
        let fd = manyring_backend::sys::tuntap::open(Path::new("/mnt/tap")).unwrap();
        let arguments = format!(
            "net --tap-fd 7 --socket-path {} --control {}",
            socket.display(),
            control.display()
        );
        let command =
            handing_in(format!("{AS_NOBODY} {}", program.display()), &arguments, vec![fd]);
        let _started = Started::new(command, &[&socket, &control]);
        let shown = device(&control, "net0");
        let of = |key: &str| shown[key].clone();
        assert_eq!((of("interface"), of("mac")), ("mv0".into(), "02:00:00:00:00:aa".into()));
        run("ip link set v0 up");
        run("ip link set v1 up");
        let mut driver = connect(&socket, 1);
        send(&mut driver, 1);
        assert!(has_sent(&control, "net0", 1));
    });
}

#[test]
fn the_example_is_a_plan_that_holds() {
    in_own_space(|| {
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/net.toml");
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().to_str().unwrap();
        let text = std::fs::read_to_string(example).unwrap();
        // Not every kernel has macvtaps.
        let text = text.replace("macvtap = \"macvtap0\"", "tap = \"vm-wan\"");
        let file = folder.path().join("net.toml");
        std::fs::write(&file, text.replace("\"/run/manyring/", &format!("\"{at}/"))).unwrap();
        let plan = || {
            let mut command = manyring();
            output_of(command.arg("run").arg("--print-plan").arg("--config").arg(&file))
        };
        let lacks = plan();
        assert_eq!(lacks.status.code(), Some(1), "{lacks:?}");
        run("ip link add br0 type bridge");
        let output = plan();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(link("vm-lan"), None, "a plan makes nothing");
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        let of = |key: &str| -> Vec<Value> {
            plan["net"].as_array().unwrap().iter().map(|net| net[key].clone()).collect()
        };
        assert_eq!(of("name"), ["lan", "wan", "bench"]);
        assert_eq!(of("queue_pairs"), [4, 2, 1]);
        assert_eq!(of("mac"), [json!("52:54:00:12:34:56"), Value::Null, Value::Null]);
    });
}

/// The frames of a capture, by its own lengths; it must end with a whole one.
fn captured(bytes: &[u8]) -> Vec<Vec<u8>> {
    assert_eq!(bytes[..4], 0xa1b2_3c4d_u32.to_le_bytes());
    let (mut rest, mut frames) = (&bytes[24..], Vec::new());
    while !rest.is_empty() {
        let len = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
        frames.push(rest[16..16 + len].to_vec());
        rest = &rest[16 + len..];
    }
    frames
}

/// A daemon that captures into a pipe which nobody reads yet, and that more has crossed than fits.
fn capturing() -> (Daemon, File, NetDriver) {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("capture");
    rustix::fs::mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
    let reader = rustix::fs::open(&pipe, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty());
    let config = format!(
        "[daemon]\ncontrol = '@/control'\n\
         [[net]]\nname = 'a'\nsocket_path = '@/a'\nnull = true\npcap = '{}'\n",
        pipe.display()
    );
    let daemon = Daemon::run(&config, &["a", "control"]);
    let mut driver = connect(&daemon.socket_of("a"), 1);
    for _ in 0..CAPTURED {
        let frame = [0xa5; 10_000];
        assert!(driver.pairs[0].tx.send(&RawNetHeader::default(), &frame).unwrap());
        driver.pairs[0].tx.publish(0).unwrap();
        driver.pairs[0].tx.drain(TIMEOUT).unwrap();
    }
    assert!(has_sent(&daemon.socket_of("control"), "a", CAPTURED));
    (daemon, reader.unwrap().into(), driver)
}

#[test]
fn a_capture_is_whole_when_the_daemon_has_ended() {
    let (mut daemon, mut reader, _driver) = capturing();
    let pid = rustix::process::Pid::from_raw(daemon.pid().try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let flags = rustix::fs::fcntl_getfl(&reader).unwrap();
    rustix::fs::fcntl_setfl(&reader, flags - OFlags::NONBLOCK).unwrap();
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).unwrap();
    assert!(daemon.wait().success());
    let frames = captured(&bytes);
    assert_eq!(frames.len() as u64, CAPTURED);
    assert!(frames.iter().all(|frame| frame[..] == [0xa5; 10_000]));
}

#[test]
fn a_capture_that_nobody_takes_does_not_keep_the_daemon() {
    let (mut daemon, _reader, _driver) = capturing();
    let (status, took) = daemon.stop();
    assert!(status.success() && took.as_secs() < 10, "{status} after {took:?}");
}

#[test]
fn what_shall_go_wrong_goes_wrong() {
    let config = "[daemon]\ncontrol = '@/control'\n\
        [[net]]\nname = 'a'\nsocket_path = '@/a'\nnull = true\ngenerate = 100\n\
        [net.fault]\ncorrupt_rx_every = 2\nblock_tx_every = 3\nno_memory_every = 5\n";
    let daemon = Daemon::run(config, &["a", "control"]);
    let mut driver = connect(&daemon.socket_of("a"), 1);
    let mut last_bytes = Vec::new();
    for _ in 0..6 {
        let mut frame = Vec::new();
        driver.pairs[0].rx.recv_wait(&mut frame, TIMEOUT).unwrap();
        last_bytes.push(*frame.last().unwrap());
    }
    let (right, wrong) = (last_bytes[0], !last_bytes[0]);
    assert_eq!(last_bytes, [right, wrong, right, wrong, right, wrong]);
    for byte in 0..15 {
        send(&mut driver, byte);
    }
    // None is lost; each third one had to wait.
    assert!(has_sent(&daemon.socket_of("control"), "a", 15));
    let counters = device(&daemon.socket_of("control"), "a")["queues"][1]["counters"].clone();
    assert_eq!((&counters["blocked"], &counters["dropped_no_memory"]), (&5.into(), &0.into()));
}
