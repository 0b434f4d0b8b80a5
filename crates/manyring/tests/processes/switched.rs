//! A switch in a device process: its ports share one, and what they may do holds in each that
//! follows one that died.

use crate::domain::{pid, process};
use crate::support::datagram::{Host, datagram, payload};
use crate::support::process::{Daemon, end_of, states, wait_until};
use crate::support::program::{http, http_json, shown};
use crate::support::space::{in_own_space, link, run};
use crate::support::view::{View, await_alike, table};
use crate::takeover::{die_after, has_ended, log, take_over};
use manyring_driver::{NetDriver, NetDriverOptions};
use manyring_wire::net::RawNetHeader;
use rustix::process::{Pid, Signal, kill_process};

pub(crate) const SWITCH: &str = "switch:s0";

/// The configuration of a daemon whose devices are apart, with this switch and these ports.
pub(crate) fn config(switch: &str, ports: &[(&str, &str)]) -> String {
    let mut text = format!("[daemon]\ncontrol = '@/control'\n[[switch]]\nname = 's0'\n{switch}\n");
    for (name, keys) in ports {
        text +=
            &format!("[[net]]\nname = '{name}'\nsocket_path = '@/{name}'\nswitch = 's0'\n{keys}\n");
    }
    text
}

fn mac(n: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, n]
}

/// A frame of a guest to another one, with a number.
fn frame(to: [u8; 6], from: u8, number: u64) -> Vec<u8> {
    let mut frame = [&to[..], &mac(from), &[0x88, 0xb5], &number.to_be_bytes()].concat();
    frame.resize(200, from);
    frame
}

pub(crate) fn connect(daemon: &Daemon, name: &str) -> NetDriver {
    NetDriver::connect(&daemon.socket_of(name), &NetDriverOptions::default()).unwrap()
}

/// Puts a frame into the ring, whether or not somebody takes it now.
fn put(guest: &mut NetDriver, frame: &[u8]) {
    let tx = &mut guest.pairs[0].tx;
    assert!(wait_until(|| {
        tx.reclaim();
        tx.send(&RawNetHeader::default(), frame).unwrap()
    }));
    tx.publish(0).unwrap();
}

/// The frames that have come to the guest.
fn heard(guest: &mut NetDriver) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    loop {
        let mut frame = Vec::new();
        let got = guest.pairs[0].rx.recv(&mut frame).unwrap();
        guest.pairs[0].rx.refill().unwrap();
        match got {
            Some(_) => all.push(frame),
            None => return all,
        }
    }
}

/// Sends until the other one has heard it; all that came to that one until then.
pub(crate) fn says(
    guest: &mut NetDriver,
    from: u8,
    (other, to): (&mut NetDriver, u8),
    number: u64,
) -> Vec<Vec<u8>> {
    let said = frame(mac(to), from, number);
    let mut all = Vec::new();
    let is_heard = wait_until(|| {
        put(guest, &said);
        all.extend(heard(other));
        all.contains(&said)
    });
    assert!(is_heard, "{to} does not hear {from}");
    all
}

fn counter(daemon: &Daemon, device: &str, name: &str) -> u64 {
    let device = shown(&daemon.socket_of("control"), &format!("/v1/devices/{device}"));
    device["switch"][name].as_u64().expect("a counter of the port")
}

#[test]
fn what_a_port_may_do_holds_from_the_first_frame_of_each_device_process() {
    const ROUNDS: u64 = 3;
    let ports = [
        ("a", "mac = '02:00:00:00:00:01'\nvlan = 5\nanti_spoof = true"),
        ("b", "mac = '02:00:00:00:00:02'\nvlan = 5"),
        ("c", "mac = '02:00:00:00:00:03'\nvlan = 7"),
        // Nobody is there, and nobody else hears what is meant for it or takes its place.
        ("d", "mac = '02:00:00:00:00:04'\nvlan = 5"),
        ("e", "mac = '02:00:00:00:00:05'\nvlan = 7\nanti_spoof = true"),
    ];
    let daemon = Daemon::run(&config("", &ports), &["a", "b", "c", "d", "e", "control"]);
    let [mut a, mut b, mut c, mut e] = ["a", "b", "c", "e"].map(|name| connect(&daemon, name));
    says(&mut a, 1, (&mut b, 2), 1);
    says(&mut b, 2, (&mut a, 1), 1);
    says(&mut e, 5, (&mut c, 3), 1);
    assert_eq!(process(&daemon, SWITCH)["devices"].as_array().map(Vec::len), Some(4));
    for round in 1..=ROUNDS {
        // All of these wait in the rings when the next process begins.
        let its_pid = pid(&daemon, SWITCH);
        kill_process(its_pid, Signal::STOP).unwrap();
        let stands = || states(its_pid.as_raw_nonzero().get().unsigned_abs());
        assert!(wait_until(|| stands().into_iter().all(|state| state == 'T')));
        put(&mut a, &frame([0xff; 6], 9, round));
        put(&mut a, &frame(mac(4), 1, round));
        put(&mut b, &frame(mac(4), 2, round));
        put(&mut b, &frame(mac(3), 2, round));
        put(&mut b, &frame([0xff; 6], 4, round));
        put(&mut e, &frame([0xff; 6], 5, round));
        kill_process(its_pid, Signal::KILL).unwrap();
        let of_b = says(&mut a, 1, (&mut b, 2), 100 + round);
        let of_a = says(&mut b, 2, (&mut a, 1), 100 + round);
        let of_c = says(&mut e, 5, (&mut c, 3), 100 + round);
        assert_eq!(process(&daemon, SWITCH)["starts"], round + 1, "{}", daemon.log());
        let from = |all: &[Vec<u8>], n: u8| all.iter().filter(|f| f[6..12] == mac(n)).count();
        let to = |all: &[Vec<u8>], n: u8| all.iter().filter(|f| f[..6] == mac(n)).count();
        assert_eq!((from(&of_b, 9), to(&of_b, 4), from(&of_b, 5)), (0, 0, 0), "{round}");
        assert_eq!((to(&of_a, 4), from(&of_a, 5)), (0, 0), "{round}");
        assert_eq!((from(&of_c, 1), from(&of_c, 2), from(&of_c, 4)), (0, 0, 0), "{round}");
        // What earlier device processes have counted is kept.
        assert_eq!(counter(&daemon, "a", "dropped_spoofed"), round);
        assert_eq!(counter(&daemon, "b", "not_learnt"), round);
    }
    assert_eq!(counter(&daemon, "e", "flooded"), ROUNDS);
    assert!(daemon.terminate().success());
}

#[test]
fn ports_of_a_switch_share_a_device_process_whatever_the_domains_and_name_no_other() {
    for domains in ["user", "device"] {
        let text = config("", &[("a", ""), ("b", "")])
            .replace("[daemon]\n", &format!("[daemon]\ndomains = '{domains}'\n"));
        let daemon = Daemon::run(&text, &["a", "b", "control"]);
        let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
        says(&mut a, 1, (&mut b, 2), 1);
        let processes = shown(&daemon.socket_of("control"), "/v1/processes");
        let names: Vec<_> = processes["processes"].as_array().unwrap().iter().collect();
        assert!(names.len() == 1 && names[0]["process"] == SWITCH, "{processes}");
        let put = |keys: &str| {
            let socket = daemon.folder().join("c").display().to_string();
            let body = format!(
                "{{\"kind\": \"net\", \"socket_path\": \"{socket}\", \"switch\": \"s0\", {keys}}}"
            );
            http_json(&daemon.socket_of("control"), "PUT", "/v1/devices/c", &body)
        };
        let (status, said) = put("\"domain\": \"mine\"");
        assert!(status == 422 && said.to_string().contains("cannot be combined with switch"));
        assert!(daemon.terminate().success());
    }
}

#[test]
fn a_switch_is_shown_alike_in_the_daemon_and_in_a_device_process() {
    let ports = [
        ("a", "mac = '02:00:00:00:00:01'\nqueue_pairs = 2"),
        ("b", "mac = '02:00:00:00:00:02'\nanti_spoof = true"),
    ];
    let serve = |domains: &str| {
        let text = config("", &ports)
            .replace("[daemon]\n", &format!("[daemon]\nworkers = 1\ndomains = '{domains}'\n"));
        Daemon::run(&text, &["a", "b", "control"])
    };
    let daemons = ["one", "user"].map(serve);
    let alike = |when: &str| {
        let of = |daemon: &Daemon| View::of(&daemon.socket_of("control"), daemon.folder());
        await_alike(|| daemons.each_ref().map(of), when)
    };
    alike("nobody uses it");
    for name in ["a", "b"] {
        let of = |daemon: &Daemon| table(&daemon.socket_of("control"), name, daemon.folder());
        let [here, apart] = daemons.each_ref().map(of);
        assert_eq!(here, apart);
    }
    let guests = daemons.each_ref().map(|daemon| {
        let (mut a, mut b) = (connect(daemon, "a"), connect(daemon, "b"));
        put(&mut b, &frame(mac(1), 9, 1));
        put(&mut b, &frame(mac(1), 2, 1));
        assert!(wait_until(|| heard(&mut a).contains(&frame(mac(1), 2, 1))));
        put(&mut a, &frame([0xff; 6], 1, 1));
        assert!(wait_until(|| heard(&mut b).contains(&frame([0xff; 6], 1, 1))));
        (a, b)
    });
    let used = alike("guests have said something");
    let counters =
        [&used.devices[0]["switch"]["flooded"], &used.devices[1]["switch"]["dropped_spoofed"]];
    assert_eq!(counters, [1, 1]);
    drop(guests);
    daemons.into_iter().for_each(|daemon| assert!(daemon.terminate().success()));
}

const UPLINK: &str = "uplink = 'up0'";
pub(crate) const PORTS: [(&str, &str); 2] = [("a", "mac = '02:00:00:00:00:22'"), ("b", "")];

/// Guest and host hear each other.
pub(crate) fn reaches(guest: &mut NetDriver, host: &Host, bytes: &[u8]) {
    let is_heard = wait_until(|| {
        put(guest, &datagram(1, bytes));
        std::iter::from_fn(|| host.try_receive()).any(|came| came == bytes)
    });
    assert!(is_heard, "the host does not hear the guest");
    let is_heard = wait_until(|| {
        host.send(1, bytes);
        heard(guest).iter().any(|frame| payload(frame) == Some(bytes))
    });
    assert!(is_heard, "the guest does not hear the host");
}

#[test]
fn a_guest_reaches_the_host_by_the_uplink_of_its_switch_whichever_process_has_it() {
    in_own_space(|| {
        let daemon = Daemon::run(&config(UPLINK, &PORTS), &["a", "b", "control"]);
        let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
        let mut host = Host::on("up0");
        reaches(&mut a, &host, b"first");
        let index = link("up0").unwrap().index;
        for round in 2..4 {
            kill_process(pid(&daemon, SWITCH), Signal::KILL).unwrap();
            reaches(&mut a, &host, format!("round {round}").as_bytes());
            assert_eq!(process(&daemon, SWITCH)["starts"], round, "{}", daemon.log());
            assert_eq!(link("up0").unwrap().index, index, "the interface stays");
        }
        // Deleted, and made anew.
        drop(host);
        run("ip link delete up0");
        let is_told = || daemon.log().contains("device=\"switch:s0\" interface=\"up0\"");
        assert!(wait_until(is_told), "{}", daemon.log());
        run("ip tuntap add dev up0 mode tap");
        host = Host::on("up0");
        reaches(&mut a, &host, b"anew");
        says(&mut a, 0x22, (&mut b, 2), 1);
        assert_eq!(process(&daemon, SWITCH)["starts"], 3, "{}", daemon.log());
        let said = daemon.log();
        assert!(!said.contains("fault") && !said.contains("denied"), "{said}");
        assert!(daemon.terminate().success());
    });
}

#[test]
fn a_switch_and_its_uplink_go_to_the_daemon_that_takes_over_and_stay_where_that_dies() {
    in_own_space(|| {
        let daemon = Daemon::run(&config(UPLINK, &PORTS), &["a", "b", "control"]);
        let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
        let host = Host::on("up0");
        let mut all = |bytes: &[u8]| {
            reaches(&mut a, &host, bytes);
            says(&mut b, 2, (&mut a, 0x22), 1);
        };
        all(b"first");
        let index = link("up0").unwrap().index;
        assert!(die_after(&daemon, usize::MAX, None) > 0);
        all(b"it goes on");
        let (mut before, mut running) = (daemon.pid(), Vec::new());
        for round in 0..3 {
            running.push(take_over(&daemon, "manyring.toml"));
            let said = || format!("{} {}", daemon.log(), log(&daemon));
            assert!(wait_until(|| has_ended(before)), "{}", said());
            before = running.last().unwrap().id();
            all(format!("round {round}").as_bytes());
            assert_eq!(link("up0").unwrap().index, index, "{}", said());
        }
        let last = running.last_mut().unwrap();
        kill_process(Pid::from_child(last), Signal::TERM).unwrap();
        assert!(end_of(last).success(), "{}", log(&daemon));
        assert!(wait_until(|| link("up0").is_none()), "{}", log(&daemon));
    });
}

#[test]
fn a_change_of_the_configuration_reaches_the_device_process_of_a_switch() {
    in_own_space(|| {
        let daemon = Daemon::run(&config(UPLINK, &PORTS), &["a", "b", "control"]);
        let replace = |switch: &str, ports: &[(&str, &str)]| {
            let text = match switch {
                "" => "[daemon]\ncontrol = '@/control'\n".to_owned(),
                _ => config(switch, ports),
            };
            let text = text.replace('@', &daemon.folder().display().to_string());
            http(&daemon.socket_of("control"), "PUT", "/v1/config", &text).0
        };
        let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
        says(&mut a, 0x22, (&mut b, 2), 1);
        let first = pid(&daemon, SWITCH);
        // A port that nobody uses yet: its address is its own at once, whoever claims it.
        let more = [PORTS[0], PORTS[1], ("c", "mac = '02:00:00:00:00:03'")];
        assert_eq!(replace(UPLINK, &more), 200);
        assert!(wait_until(|| {
            put(&mut b, &frame([0xff; 6], 3, 7));
            counter(&daemon, "b", "not_learnt") > 0
        }));
        let mut c = connect(&daemon, "c");
        says(&mut a, 0x22, (&mut c, 3), 2);
        drop(c);
        // Other settings, and none.
        let guarded = [PORTS[0], PORTS[1], ("c", "mac = '02:00:00:00:00:03'\nanti_spoof = true")];
        assert!(wait_until(|| replace(UPLINK, &guarded) == 200));
        let mut c = connect(&daemon, "c");
        put(&mut c, &frame([0xff; 6], 9, 3));
        says(&mut c, 3, (&mut b, 2), 4);
        assert_eq!(counter(&daemon, "c", "dropped_spoofed"), 1);
        drop(c);
        assert!(wait_until(|| replace(UPLINK, &PORTS) == 200));
        says(&mut a, 0x22, (&mut b, 2), 5);
        assert_eq!(pid(&daemon, SWITCH), first, "it has served all of this");
        // Other settings of the switch, and another uplink: its ports go on in the next process.
        let other = "uplink = 'up1'\nage = 9";
        assert_eq!(replace(other, &PORTS), 200);
        let host = Host::on("up1");
        reaches(&mut a, &host, b"another");
        says(&mut b, 2, (&mut a, 0x22), 6);
        assert!(wait_until(|| link("up0").is_none()), "{}", daemon.log());
        assert_eq!(process(&daemon, SWITCH)["starts"], 2, "{}", daemon.log());
        // One that cannot be had changes nothing.
        assert_eq!(replace("uplink = 'no-such-bridge-port-here'", &PORTS), 422);
        assert_ne!(replace("uplink = 'lo'", &PORTS), 200);
        reaches(&mut a, &host, b"as before");
        assert_eq!(process(&daemon, SWITCH)["starts"], 2, "{}", daemon.log());
        drop(host);
        assert_eq!(replace(UPLINK, &PORTS), 200);
        reaches(&mut a, &Host::on("up0"), b"back");
        // The switch goes, with its process and its interface; another one gets the interface.
        drop((a, b));
        assert!(wait_until(|| replace("", &[]) == 200));
        assert!(link("up0").is_none(), "{}", daemon.log());
        assert_eq!(process(&daemon, SWITCH), serde_json::Value::Null);
        assert_eq!(replace(&format!("{UPLINK}\nage = 7"), &PORTS), 200);
        let (mut a, host) = (connect(&daemon, "a"), Host::on("up0"));
        reaches(&mut a, &host, b"again");
        assert!(daemon.terminate().success());
    });
}

#[test]
#[cfg(target_arch = "x86_64")]
fn threads_of_a_switchs_device_process_that_are_taken_reach_nothing_and_guests_go_on() {
    use crate::support::taken::Taken;
    use crate::taken::{misbehaves, threads};
    in_own_space(|| {
        let other = "[[net]]\nname = 'o'\nsocket_path = '@/o'\ntap = 'other0'\ndomain = 'other'\n";
        let text = config(UPLINK, &PORTS).replace("[daemon]\n", "[daemon]\nworkers = 1\n");
        let daemon = Daemon::run(&(text + other), &["a", "b", "o", "control"]);
        let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
        let _other = connect(&daemon, "o");
        let host = Host::on("up0");
        reaches(&mut a, &host, b"first");
        let its_pid = pid(&daemon, SWITCH).as_raw_nonzero().get();
        let of = |name: &str| threads(its_pid).into_iter().find(|(known, _)| known == name);
        let [worker, uplink] = ["worker-0", "uplink-s0"].map(|name| of(name).unwrap().1);
        let names = [("manyring-device", its_pid), ("worker-0", worker), ("uplink-s0", uplink)];
        for (name, thread) in names {
            let mut taken = Taken::take(its_pid, thread);
            let calls = misbehaves(&mut taken, name);
            // TUNSETQUEUE of any queue, as the uplink's, which only the supervisor makes.
            assert_eq!(taken.call(libc::SYS_ioctl, [3, 0x4004_54d9, 0, 0, 0, 0]), -1);
            drop(taken);
            for call in calls {
                let line = format!("call={call} thread={thread} name=\"{name}\"");
                let is_told = || {
                    let log = daemon.log();
                    let mut told = log.lines().filter(|told| told.contains(&line));
                    told.next().is_some_and(|told| told.starts_with("process=switch:s0 "))
                };
                assert!(wait_until(is_told), "{line}\n{}", daemon.log());
            }
            reaches(&mut a, &host, name.as_bytes());
            says(&mut b, 2, (&mut a, 0x22), 1);
        }
        // It has the queue of its own uplink and of no other interface.
        let taps = |its_pid: i32| {
            let fds = std::fs::read_dir(format!("/proc/{its_pid}/fd")).unwrap().flatten();
            let info = |fd: std::fs::DirEntry| {
                let name = fd.file_name().into_string().unwrap();
                std::fs::read_to_string(format!("/proc/{its_pid}/fdinfo/{name}")).ok()
            };
            let mut all: Vec<_> = fds
                .filter_map(info)
                .filter_map(|info| {
                    let line = info.lines().find_map(|line| line.strip_prefix("iff:"))?;
                    Some(line.trim().to_owned())
                })
                .collect();
            all.sort();
            all.dedup();
            all
        };
        assert_eq!(taps(its_pid), ["up0"]);
        assert_eq!(taps(pid(&daemon, "other").as_raw_nonzero().get()), ["other0"]);
        // What it may not say ends it, and the next one goes on.
        assert_eq!(process(&daemon, SWITCH)["starts"], 1, "{}", daemon.log());
        let says = "\u{2}{\"suspect\":{\"device\":\"o\"}}";
        let mut taken = Taken::take(its_pid, its_pid);
        crate::taken::says_alone(&mut taken, says);
        drop(taken);
        assert!(wait_until(|| process(&daemon, SWITCH)["starts"] == 2), "{}", daemon.log());
        reaches(&mut a, &host, b"next");
        assert!(daemon.log().contains("is not a network device of it"), "{}", daemon.log());
        assert!(daemon.terminate().success());
    });
}
