//! Network devices that are served by device processes: the supervisor keeps the interface, a
//! device process its queues. Needs root, for network namespaces of its own.

use crate::support::datagram::{Host, datagram, payload};
use crate::support::process::{Daemon, TIMEOUT, wait_until};
use crate::support::program::{fetch, http_json, shown};
use crate::support::space::{has_carrier, in_own_space, link, queues, run};
use manyring_driver::{ControlOwner, NetDriver, NetDriverOptions};
use manyring_wire::net::{RawNetHeader, VIRTIO_NET_F_MQ};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open,
};
use serde_json::{Value, json};
use std::os::unix::net::UnixStream;

/// A device of two pairs in a domain of its own, beside one that the supervisor serves.
const CONFIG: &str = "[daemon]\ncontrol = '@/control'\nworkers = 1\n\
    [[net]]\nname = 'lan'\nsocket_path = '@/lan'\ntap = 'lan0'\nqueue_pairs = 2\ndomain = 'a'\n\
    mtu = 1400\n\
    [[net]]\nname = 'other'\nsocket_path = '@/other'\ntap = 'other0'\n";

fn serve() -> Daemon {
    Daemon::run(CONFIG, &["lan", "other", "control"])
}

fn connect(daemon: &Daemon, control: ControlOwner) -> NetDriver {
    let options = NetDriverOptions { queue_pairs: 2, control, ..NetDriverOptions::default() };
    let mut driver = NetDriver::connect(&daemon.socket_of("lan"), &options).unwrap();
    driver.set_queue_pairs(2).unwrap();
    driver
}

fn device(daemon: &Daemon) -> Value {
    shown(&daemon.socket_of("control"), "/v1/devices/lan")
}

fn process(daemon: &Daemon) -> Value {
    shown(&daemon.socket_of("control"), "/v1/processes")["processes"][0].clone()
}

fn pid(daemon: &Daemon) -> Pid {
    Pid::from_raw(i32::try_from(process(daemon)["pid"].as_i64().unwrap()).unwrap()).unwrap()
}

/// A datagram leaves by each pair, and one comes back.
fn works(driver: &mut NetDriver, host: &Host) {
    for pair in [0, 1] {
        let tx = &mut driver.pairs[pair].tx;
        assert!(tx.send(&RawNetHeader::default(), &datagram(1, b"hello")).unwrap());
        tx.publish(0).unwrap();
        tx.drain(TIMEOUT).unwrap();
        assert_eq!(host.receive(), b"hello");
    }
    comes_back(driver, host);
}

/// A datagram comes back, by either pair.
fn comes_back(driver: &mut NetDriver, host: &Host) {
    let mut frame = Vec::new();
    let got = wait_until(|| {
        host.send(1, b"and back");
        let mut found = false;
        for pair in &mut driver.pairs {
            frame.clear();
            while pair.rx.recv(&mut frame).unwrap().is_some() {
                found |= payload(&frame) == Some(b"and back");
                frame.clear();
            }
            pair.rx.refill().unwrap();
        }
        found
    });
    assert!(got, "nothing comes back");
}

/// Runs a test with the daemon, the host's end of the interface, and a guest whose frames have
/// passed.
fn with_guest(control: ControlOwner, test: impl FnOnce(Daemon, Host, NetDriver) + Send) {
    in_own_space(|| {
        let daemon = serve();
        let host = Host::on("lan0");
        let mut driver = connect(&daemon, control);
        works(&mut driver, &host);
        test(daemon, host, driver);
    });
}

#[test]
fn frames_pass_through_a_device_process_whoever_owns_the_control_queue_and_its_end_costs_no_queue()
{
    for control in [ControlOwner::FrontEnd, ControlOwner::Device] {
        in_own_space(|| {
            let daemon = serve();
            let host = Host::on("lan0");
            assert_eq!(queues("lan0"), (0, 2), "nobody uses them yet");
            for round in 1..4 {
                let mut driver = connect(&daemon, control);
                works(&mut driver, &host);
                assert_eq!(queues("lan0"), (2, 0));
                assert_eq!(device(&daemon)["attached_pairs"], 2);
                assert_eq!(process(&daemon)["starts"], round, "{}", daemon.log());
                let index = link("lan0").unwrap().index;
                kill_process(pid(&daemon), Signal::KILL).unwrap();
                // Its driver sees a pause, and has its pairs and what it has set.
                assert!(wait_until(|| process(&daemon)["starts"] == round + 1), "{}", daemon.log());
                works(&mut driver, &host);
                assert!(wait_until(|| queues("lan0") == (2, 0)), "{:?}", queues("lan0"));
                assert_eq!(device(&daemon)["attached_pairs"], 2);
                assert_eq!(link("lan0").unwrap().index, index, "the interface stays");
                drop(driver);
                assert!(wait_until(|| device(&daemon)["connected"] == false));
                assert!(wait_until(|| queues("lan0") == (0, 2)), "{:?}", queues("lan0"));
            }
            let sent = device(&daemon)["queues"][1]["counters"]["packets"].as_u64().unwrap();
            assert!(sent >= 3, "what earlier device processes have counted is kept: {sent}");
            assert!(!daemon.log().contains("steer:"), "{}", daemon.log());
            assert!(daemon.terminate().success());
            assert!(link("lan0").is_none(), "it was made by the daemon");
        });
    }
}

#[test]
fn the_queues_in_use_share_one_length_and_a_daemon_without_the_right_says_that_they_do_not() {
    let config = "[daemon]\ncontrol = '@/control'\nworkers = 1\n\
        [[net]]\nname = 'lan'\nsocket_path = '@/lan'\ntap = 'lan0'\nqueue_pairs = 2\n\
        txqueuelen = 'auto'\ndomain = 'a'\n";
    let all_rights = "exec";
    let no_right = "exec setpriv --bounding-set -net_admin --inh-caps -net_admin";
    for (behind, source, two) in [(all_rights, "auto", 500), (no_right, "host", 700)] {
        in_own_space(|| {
            run("ip tuntap add dev lan0 mode tap multi_queue");
            run("ip link set lan0 up txqueuelen 700");
            let daemon = Daemon::run_behind(behind, config, &["lan", "control"]);
            let length = || link("lan0").unwrap().txqueuelen;
            let shown = |frames: u32| {
                let length = device(&daemon)["txqueuelen"].clone();
                length["frames"] == frames && length["source"] == source
            };
            let one = if source == "auto" { 1000 } else { 700 };
            for _ in 0..2 {
                assert_eq!(length(), one, "{}", daemon.log());
                let driver = connect(&daemon, ControlOwner::Device);
                assert!(wait_until(|| length() == two && shown(two * 2)), "{}", daemon.log());
                drop(driver);
                assert!(wait_until(|| length() == one && shown(one)), "{}", daemon.log());
            }
            let changes = device(&daemon)["txqueuelen"]["changes"].as_u64().unwrap();
            // 700, then 1000, 500, 1000, 500, 1000; more where a session begins with other pairs.
            assert!(if source == "auto" { changes >= 5 } else { changes == 0 }, "{changes}");
            let words = "txqueuelen: unchanged; each queue has the host's length";
            let told = daemon.log().matches(words).count();
            assert_eq!(told, usize::from(source == "host"), "{}", daemon.log());
            let stream = UnixStream::connect(daemon.socket_of("control")).unwrap();
            let (_, _, text) = fetch(stream, "/metrics", &["accept: application/openmetrics-text"]);
            let text = String::from_utf8(text).unwrap();
            for line in [
                format!("frames{{device=\"lan\",source=\"{source}\"}} {one}"),
                format!("changes_total{{device=\"lan\"}} {changes}"),
            ] {
                let line = format!("manyring_device_txqueuelen_{line}");
                assert!(text.lines().any(|found| found == line), "{line}\n{text}");
            }
            assert!(daemon.terminate().success());
            assert_eq!(length(), 700, "it has its own length again");
        });
    }
}

#[test]
fn the_host_delivers_to_as_many_pairs_as_the_operator_says_through_a_device_process() {
    in_own_space(|| {
        for (pairs, source, uses_both) in
            [("'all'", "all", true), ("1", "operator", false), ("'auto'", "auto", false)]
        {
            let key = format!("tap = 'lan0'\nreceive_pairs = {pairs}");
            let config = CONFIG.replace("tap = 'lan0'", &key);
            let daemon = Daemon::run(&config, &["lan", "other", "control"]);
            let host = Host::on("lan0");
            let mut driver = connect(&daemon, ControlOwner::FrontEnd);
            let mut by = [0; 2];
            // Flows that the guest has not sent: with two pairs, each gets some.
            for flow in 0..64 {
                host.send(2000 + flow, b"hello");
                let got = wait_until(|| {
                    let mut found = false;
                    for (pair, count) in driver.pairs.iter_mut().zip(&mut by) {
                        let mut frame = Vec::new();
                        while pair.rx.recv(&mut frame).unwrap().is_some() {
                            let is_ours = payload(&frame) == Some(b"hello");
                            *count += u32::from(is_ours);
                            found |= is_ours;
                            frame.clear();
                        }
                        pair.rx.refill().unwrap();
                    }
                    found
                });
                assert!(got, "{pairs}: flow {flow}: {}", daemon.log());
            }
            assert_eq!(by.iter().sum::<u32>(), 64, "{pairs}: {by:?}");
            assert_eq!(by[1] > 0, uses_both, "{pairs}: {by:?}");
            let shown = device(&daemon)["receive_pairs"].clone();
            assert_eq!(
                (&shown["pairs"], &shown["source"]),
                (&json!(1 + u8::from(uses_both)), &json!(source))
            );
            drop(driver);
            assert!(daemon.terminate().success());
        }
    });
}

/// This takes ten looks, one a second.
#[test]
fn queues_that_lose_nothing_have_the_whole_length_each_in_time() {
    in_own_space(|| {
        let auto = CONFIG.replace("tap = 'lan0'", "tap = 'lan0'\ntxqueuelen = 'auto'");
        let daemon = Daemon::run(&auto, &["lan", "other", "control"]);
        let _driver = connect(&daemon, ControlOwner::FrontEnd);
        let length = || link("lan0").unwrap().txqueuelen;
        assert!(wait_until(|| length() == 500), "{}", daemon.log());
        assert!(wait_until(|| length() == 1000), "{}", daemon.log());
        assert_eq!(device(&daemon)["txqueuelen"]["frames"], 2000);
        assert!(daemon.terminate().success());
    });
}

#[test]
fn a_device_process_has_its_queues_and_no_other_way_to_an_interface() {
    with_guest(ControlOwner::FrontEnd, |daemon, _host, _driver| {
        let fds = format!("/proc/{}/fd", pid(&daemon).as_raw_nonzero());
        let targets: Vec<_> = std::fs::read_dir(fds)
            .unwrap()
            .flatten()
            .filter_map(|fd| Some(std::fs::read_link(fd.path()).ok()?.display().to_string()))
            .collect();
        // A queue for each pair, and a copy for the half that sends.
        let is_tap = |target: &&String| target.ends_with("/net/tun");
        assert_eq!(targets.iter().filter(is_tap).count(), 4, "{targets:?}");
        // By netlink, which the supervisor alone has.
        let netlink = format!("/proc/{}/net/netlink", pid(&daemon).as_raw_nonzero());
        let netlink = std::fs::read_to_string(netlink).unwrap();
        let mut inodes = netlink.lines().filter_map(|line| line.split_whitespace().last());
        let has = |inode: &&str| targets.contains(&format!("socket:[{inode}]"));
        assert!(!inodes.any(|inode| has(&inode)), "{targets:?} {netlink}");
        assert!(!daemon.log().contains("does not follow"), "{}", daemon.log());
    });
}

/// Makes each read of a process's queues wait for a frame, as the process itself can: the flags
/// belong to the queues, whoever has a copy.
fn makes_queues_wait(process: Pid) {
    let fds = format!("/proc/{}/fd", process.as_raw_nonzero());
    let pidfd = pidfd_open(process, PidfdFlags::empty()).unwrap();
    let mut queues = 0;
    for fd in std::fs::read_dir(fds).unwrap().flatten() {
        let target = std::fs::read_link(fd.path()).unwrap_or_default();
        if target.ends_with("net/tun") {
            let number = fd.file_name().to_str().unwrap().parse().unwrap();
            let queue = pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()).unwrap();
            fcntl_setfl(&queue, OFlags::empty()).unwrap();
            queues += 1;
        }
    }
    assert!(queues >= 2, "{queues} descriptors of queues");
}

#[test]
fn queues_that_a_device_process_has_made_wait_hold_up_no_device_process_after_it() {
    with_guest(ControlOwner::FrontEnd, |daemon, host, mut driver| {
        let taken = pid(&daemon);
        makes_queues_wait(taken);
        kill_process(taken, Signal::KILL).unwrap();
        works(&mut driver, &host);
        assert_eq!(process(&daemon)["starts"], 2, "{}", daemon.log());
        assert!(daemon.terminate().success());
    });
}

#[test]
fn what_the_operator_changes_reaches_the_guest_in_its_device_process_and_the_guest_is_shown() {
    with_guest(ControlOwner::Device, |daemon, host, mut driver| {
        let control = daemon.socket_of("control");
        let ask = |what: &str, body: Value| {
            let path = format!("/v1/devices/lan/{what}");
            http_json(&control, "POST", &path, &body.to_string()).0
        };
        assert_eq!(device(&daemon)["queues"][4]["name"], "ctrl");
        let status = |driver: &mut NetDriver| driver.front.config(6, 2).unwrap()[0] & 1;
        assert_eq!(ask("link", json!({"up": false})), 200);
        assert!(wait_until(|| status(&mut driver) == 0) && !has_carrier("lan0"));
        assert_eq!(ask("link", json!({"up": true})), 200);
        assert!(wait_until(|| status(&mut driver) == 1) && has_carrier("lan0"));
        assert_eq!(ask("mtu", json!({"mtu": 1300})), 200);
        let mtu = |driver: &mut NetDriver| driver.front.config(10, 2).unwrap();
        // A driver keeps the one that it was told.
        assert_eq!(mtu(&mut driver), 1400_u16.to_le_bytes());
        assert_eq!(link("lan0").unwrap().mtu, 1300);
        works(&mut driver, &host);
        // The next device process has it so from the start.
        kill_process(pid(&daemon), Signal::KILL).unwrap();
        works(&mut driver, &host);
        drop(driver);
        let mut driver = connect(&daemon, ControlOwner::Device);
        assert_eq!(mtu(&mut driver), 1300_u16.to_le_bytes());
        works(&mut driver, &host);
        assert!(daemon.terminate().success());
    });
}

#[test]
fn a_device_process_that_hangs_holds_up_no_operator_and_no_other_network() {
    with_guest(ControlOwner::FrontEnd, |daemon, host, mut driver| {
        let stopped = pid(&daemon);
        kill_process(stopped, Signal::STOP).unwrap();
        let control = daemon.socket_of("control");
        // More than a device process can have to be told.
        for round in 0..200 {
            let body = json!({"up": round % 2 == 1}).to_string();
            let (status, _) = http_json(&control, "POST", "/v1/devices/lan/link", &body);
            assert_eq!(status, 200);
        }
        let options = NetDriverOptions::default();
        let other = NetDriver::connect(&daemon.socket_of("other"), &options);
        assert!(other.is_ok(), "{}", daemon.log());
        kill_process(stopped, Signal::CONT).unwrap();
        let status = |driver: &mut NetDriver| driver.front.config(6, 2).unwrap()[0] & 1;
        assert!(wait_until(|| status(&mut driver) == 1), "{}", daemon.log());
        // The device process obeys one order after the other, so each datagram may meet one of the
        // times when the link was down, and is sent again.
        for (pair, payload) in [(0, b"by 0"), (1, b"by 1")] {
            let passes = wait_until(|| {
                let tx = &mut driver.pairs[pair].tx;
                assert!(tx.send(&RawNetHeader::default(), &datagram(1, payload)).unwrap());
                tx.publish(0).unwrap();
                tx.drain(TIMEOUT).unwrap();
                std::iter::from_fn(|| host.try_receive()).any(|received| received == payload)
            });
            assert!(passes, "{}", daemon.log());
        }
        comes_back(&mut driver, &host);
        assert!(daemon.terminate().success());
    });
}

#[test]
fn the_pairs_of_a_port_that_only_the_device_process_has_are_shown_and_its_guests_control_queue() {
    let config = "[daemon]\ncontrol = '@/control'\nworkers = 1\n\
        [[net]]\nname = 'lan'\nsocket_path = '@/lan'\nnull = true\nqueue_pairs = 2\ndomain = 'a'\n";
    let daemon = Daemon::run(config, &["lan", "control"]);
    for (control, at_start) in [(ControlOwner::FrontEnd, 2), (ControlOwner::Device, 1)] {
        let options = NetDriverOptions { queue_pairs: 2, control, ..NetDriverOptions::default() };
        let mut driver = NetDriver::connect(&daemon.socket_of("lan"), &options).unwrap();
        assert_eq!(device(&daemon)["attached_pairs"], at_start, "{control:?}");
        driver.set_queue_pairs(2).unwrap();
        assert_eq!(device(&daemon)["attached_pairs"], 2, "{control:?}");
        drop(driver);
        assert!(wait_until(|| device(&daemon)["attached_pairs"] == 0), "{control:?}");
    }
    // Without multiqueue the control queue comes behind the first pair.
    let features = NetDriverOptions::default().features & !VIRTIO_NET_F_MQ;
    let options =
        NetDriverOptions { features, control: ControlOwner::Device, ..NetDriverOptions::default() };
    let driver = NetDriver::connect(&daemon.socket_of("lan"), &options).unwrap();
    assert_eq!(device(&daemon)["queues"][2]["name"], "ctrl");
    drop(driver);
    assert!(daemon.terminate().success());
}
