//! Guests of one switch, without a VM and without root: what they send each other arrives once,
//! whole and in order; devices come and go; who is killed, stalls or lies costs others nothing.

use crate::support::process::{Daemon, domains, is_isolated, wait_until};
use crate::support::program::{http, http_json, shown};
use crate::support::rings::StopAtEnd;
use manyring_driver::{NetDriver, NetDriverOptions};
use manyring_wire::net::RawNetHeader;
use rustix::fs::FileType;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};

/// A device on the switch for each of these names, whose guests have addresses that end in 1, 2, ..
fn serve(names: &[&str], more: &str) -> Daemon {
    Daemon::run(&config(names, more), &[names, &["control"]].concat())
}

fn config(names: &[&str], more: &str) -> String {
    let mut config =
        format!("[daemon]\ncontrol = '@/control'\n{}\n[[switch]]\nname = 's0'\n", domains());
    for (n, name) in (1..).zip(names) {
        config += &format!(
            "[[net]]\nname = '{name}'\nsocket_path = '@/{name}'\nswitch = 's0'\n\
             mac = '02:00:00:00:00:0{n}'\n{more}"
        );
    }
    config
}

fn mac(n: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, n]
}

/// A frame of a length that follows from its number, between 60 and 1500 bytes.
fn frame(to: [u8; 6], from: u8, number: u64) -> Vec<u8> {
    let len = usize::try_from(60 + number.wrapping_mul(7919) % 1440).unwrap();
    let mut frame = [&to[..], &mac(from), &[0x88, 0xb5], &number.to_be_bytes()].concat();
    frame.extend(
        (0..).map(|at: u64| u8::try_from((at * 31 + number) & 0xff).unwrap()).take(len - 22),
    );
    frame
}

/// The number in a frame, if all of it is as it was sent.
fn number(seen: &[u8]) -> u64 {
    let number = u64::from_be_bytes(seen[14..22].try_into().unwrap());
    assert_eq!(seen, frame(seen[..6].try_into().unwrap(), seen[11], number), "{number}");
    number
}

struct Guest {
    n: u8,
    driver: NetDriver,
    sent: u64,
}

impl Guest {
    fn connect(daemon: &Daemon, name: &str, n: u8) -> Self {
        let driver =
            NetDriver::connect(&daemon.socket_of(name), &NetDriverOptions::default()).unwrap();
        Self { n, driver, sent: 0 }
    }

    /// Sends one frame, if a buffer is free. True: it is on its way.
    fn send(&mut self, to: [u8; 6]) -> bool {
        let tx = &mut self.driver.pairs[0].tx;
        tx.reclaim();
        let is_sent = tx.send(&RawNetHeader::default(), &frame(to, self.n, self.sent + 1)).unwrap();
        tx.publish(0).unwrap();
        self.sent += u64::from(is_sent);
        is_sent
    }

    /// The next frame, if there is one.
    fn take(&mut self) -> Option<Vec<u8>> {
        let rx = &mut self.driver.pairs[0].rx;
        let mut frame = Vec::new();
        let got = rx.recv(&mut frame).expect("a whole frame");
        rx.refill().unwrap();
        got.map(|_| frame)
    }

    /// The number and the sender of the next frame, if there is one.
    fn receive(&mut self) -> Option<(u64, u8)> {
        self.take().map(|frame| (number(&frame), frame[11]))
    }

    /// Waits for a frame of a sender.
    fn hear(&mut self, from: u8) {
        assert!(wait_until(|| self.receive().is_some_and(|(_, sender)| sender == from)), "{from}");
    }

    /// Says where it is.
    fn greet(&mut self, other: &mut Self) {
        assert!(self.send([0xff; 6]));
        other.hear(self.n);
    }

    /// Sends frames to `to`, a few at a time, until `count` have arrived; all of them in order.
    fn talk(&mut self, to: &mut Self, count: u64) {
        // Frames that were sent before may still arrive first.
        let (first, mut last, mut heard, mut settled) = (self.sent, 0, 0, self.sent);
        let is_done = wait_until(|| {
            for _ in 0..8 {
                if self.sent < settled + 32 {
                    self.send(mac(to.n));
                }
            }
            while let Some(frame) = to.take() {
                if frame[11] == self.n {
                    let number = number(&frame);
                    assert!(number > last, "{last}, then {number}");
                    (last, heard) = (number, heard + u64::from(number > first));
                }
            }
            self.driver.pairs[0].tx.reclaim();
            settled = settled.max(last);
            if self.driver.pairs[0].tx.in_flight() == 0 {
                // Frames that were dropped on their way are not waited for.
                settled = settled.max(self.sent.saturating_sub(16));
            }
            heard >= count
        });
        assert!(is_done, "{} heard {heard} of {}", to.n, self.n);
    }
}

fn device(daemon: &Daemon, name: &str) -> Value {
    shown(&daemon.socket_of("control"), &format!("/v1/devices/{name}"))
}

fn counter(daemon: &Daemon, name: &str, counter: &str) -> u64 {
    device(daemon, name)["switch"][counter].as_u64().expect("a counter of the port")
}

#[test]
fn guests_hear_each_other_once_whole_and_in_order() {
    let daemon = serve(&["a", "b", "c"], "");
    let mut a = Guest::connect(&daemon, "a", 1);
    let mut b = Guest::connect(&daemon, "b", 2);
    let mut c = Guest::connect(&daemon, "c", 3);
    a.greet(&mut b);
    b.greet(&mut a);
    a.talk(&mut b, 2000);
    b.talk(&mut a, 2000);
    // The third one has heard the greetings, and nothing of the rest.
    let heard: Vec<_> = std::iter::from_fn(|| c.receive()).collect();
    assert_eq!(heard, [(1, 1), (1, 2)]);
    assert_eq!((counter(&daemon, "a", "flooded"), counter(&daemon, "b", "flooded")), (1, 1));
    assert_eq!(
        (counter(&daemon, "a", "dropped_full"), device(&daemon, "a")["port"].as_str()),
        (0, Some("switch"))
    );
    let (_, _, metrics) = http(&daemon.socket_of("control"), "GET", "/metrics", "");
    assert!(metrics.contains("manyring_switch_port_flooded_total{device=\"a\"} 1"), "{metrics}");
}

#[test]
fn a_device_comes_and_goes_by_the_api_while_others_talk() {
    let daemon = serve(&["a", "b"], "");
    let (mut a, mut b) = (Guest::connect(&daemon, "a", 1), Guest::connect(&daemon, "b", 2));
    a.greet(&mut b);
    b.greet(&mut a);
    let control = daemon.socket_of("control");
    let socket = daemon.socket_of("c");
    for round in 0..3 {
        let body = serde_json::json!({"kind": "net", "socket_path": socket, "switch": "s0"});
        let (status, answer) = http_json(&control, "PUT", "/v1/devices/c", &body.to_string());
        assert_eq!(status, 201, "{answer}");
        let mut c = Guest::connect(&daemon, "c", 3);
        c.greet(&mut a);
        a.talk(&mut c, 50);
        a.talk(&mut b, 50);
        if round == 1 {
            // An address that is configured for no port moves to another one: frames follow it.
            b.n = 7;
            b.greet(&mut a);
            a.talk(&mut b, 50);
            let mut moved = Guest { n: 7, sent: b.sent + 1000, ..c };
            moved.greet(&mut a);
            a.talk(&mut moved, 50);
            b.sent = moved.sent + 1000;
            b.greet(&mut a);
            a.talk(&mut b, 50);
            b.n = 2;
            c = Guest { n: 3, ..moved };
        }
        drop(c);
        let path = "/v1/devices/c?force=true";
        assert!(wait_until(|| http(&control, "DELETE", path, "").0 == 204), "{path}");
        a.talk(&mut b, 50);
    }
    let body = serde_json::json!({"kind": "net", "socket_path": socket, "switch": "s9"});
    let (status, answer) = http_json(&control, "PUT", "/v1/devices/c", &body.to_string());
    assert!(status >= 400 && answer.to_string().contains("s9"), "{answer}");
}

#[test]
fn who_stalls_or_is_killed_costs_the_others_nothing() {
    let daemon = serve(&["a", "b", "c"], "");
    let (mut a, mut b) = (Guest::connect(&daemon, "a", 1), Guest::connect(&daemon, "b", 2));
    for round in 0..3 {
        let mut c = Guest::connect(&daemon, "c", 3);
        c.greet(&mut a);
        a.greet(&mut b);
        b.greet(&mut a);
        // It takes none of them: what its buffers do not hold waits, and is dropped at some time.
        for _ in 0..700 {
            if !a.send(mac(3)) {
                break;
            }
        }
        a.talk(&mut b, 200);
        // All that was lent to it is back, though it takes its frames in order of the ring.
        assert!(
            wait_until(|| {
                a.driver.pairs[0].tx.reclaim();
                a.driver.pairs[0].tx.in_flight() == 0
            }),
            "round {round}"
        );
        drop(c);
        a.talk(&mut b, 200);
        b.talk(&mut a, 200);
    }
}

#[test]
fn memory_that_is_cut_away_under_frames_ends_its_own_session_only() {
    let daemon = serve(&["a", "b", "c"], "");
    let mut b = Guest::connect(&daemon, "b", 2);
    for round in 0..3 {
        let mut a = Guest::connect(&daemon, "a", 1);
        let mut c = Guest::connect(&daemon, "c", 3);
        a.greet(&mut b);
        b.greet(&mut c);
        // The receiver has no buffers left: frames of the sender are lent.
        for _ in 0..400 {
            a.send(mac(2));
        }
        rustix::fs::ftruncate(a.driver.arena.table()[0].1, 0x1000).unwrap();
        // A frame that arrives is whole, or is dropped, or lies in memory that reads as zeroes now.
        // All frames may have been copied before the memory was cut: the daemon reads the ring at
        // each kick.
        let is_over = wait_until(|| {
            b.take();
            let ring = a.driver.pairs[0].tx.vring();
            rustix::io::write(ring.kick_fd(), &1u64.to_ne_bytes()).unwrap();
            daemon.log().matches("guest memory was truncated").count() > round
        });
        assert!(is_over, "{}", daemon.log());
        c.talk(&mut b, 100);
        drop((a, c));
    }
}

#[test]
fn a_receiver_whose_memory_is_cut_away_gives_back_what_it_was_lent() {
    let daemon = serve(&["a", "b", "c"], "");
    let (mut a, mut c) = (Guest::connect(&daemon, "a", 1), Guest::connect(&daemon, "c", 3));
    for round in 0..3 {
        let mut b = Guest::connect(&daemon, "b", 2);
        b.greet(&mut a);
        c.greet(&mut a);
        // More than it has buffers for; and then the buffers are gone that the next ones go to.
        for _ in 0..200 {
            a.send(mac(2));
        }
        while b.driver.pairs[0].rx.recv(&mut Vec::new()).unwrap().is_some() {}
        rustix::fs::ftruncate(b.driver.arena.table()[0].1, 0x1000).unwrap();
        let is_over = wait_until(|| {
            a.send(mac(2));
            daemon.log().matches("guest memory was truncated").count() > round
        });
        assert!(is_over, "{}", daemon.log());
        a.talk(&mut c, 100);
        let all_back = wait_until(|| {
            a.driver.pairs[0].tx.reclaim();
            a.driver.pairs[0].tx.in_flight() == 0
        });
        assert!(all_back, "round {round}");
        drop(b);
    }
}

#[test]
fn ports_that_come_and_go_in_a_storm_cost_those_who_talk_no_frame() {
    let daemon = serve(&["a", "b"], "");
    let (mut a, mut b) = (Guest::connect(&daemon, "a", 1), Guest::connect(&daemon, "b", 2));
    a.greet(&mut b);
    b.greet(&mut a);
    let control = daemon.socket_of("control");
    let ends = AtomicBool::new(false);
    let rounds = std::thread::scope(|scope| {
        let end = StopAtEnd(&ends);
        let storms: Vec<_> = (0..4)
            .map(|n| {
                let (control, ends) = (&control, &ends);
                let socket = daemon.folder().join(format!("storm{n}"));
                let path = format!("/v1/devices/storm{n}");
                scope.spawn(move || {
                    let mut rounds = 0;
                    while !ends.load(Ordering::Relaxed) {
                        let body = json!({"kind": "net", "socket_path": socket, "switch": "s0"});
                        let put = http_json(control, "PUT", &path, &body.to_string());
                        assert_eq!(put.0, 201, "{}", put.1);
                        assert_eq!(http(control, "DELETE", &path, "").0, 204);
                        rounds += 1;
                    }
                    rounds
                })
            })
            .collect();
        for _ in 0..4 {
            a.talk(&mut b, 500);
            b.talk(&mut a, 500);
        }
        drop(end);
        storms.into_iter().map(|storm| storm.join().unwrap()).sum::<u32>()
    });
    assert!(rounds >= 8, "{rounds} ports came and went");
    // All ports are free again, and nothing was dropped for want of one.
    assert_eq!(
        (counter(&daemon, "a", "dropped_no_queue"), counter(&daemon, "a", "flooded")),
        (0, 1)
    );
    let devices = shown(&control, "/v1/devices");
    assert_eq!(devices["devices"].as_array().map(Vec::len), Some(2), "{devices}");
}

#[test]
fn jumbo_frames_for_a_guest_of_a_small_mtu_are_dropped_and_those_behind_them_arrive() {
    let daemon = serve(&["a", "b"], "mtu = 1500\n");
    let (mut a, mut b) = (Guest::connect(&daemon, "a", 1), Guest::connect(&daemon, "b", 2));
    a.greet(&mut b);
    b.greet(&mut a);
    for _ in 0..20 {
        let tx = &mut a.driver.pairs[0].tx;
        let jumbo = [&mac(2)[..], &mac(1), &[0x88, 0xb5], &[7; 1900]].concat();
        tx.reclaim();
        assert!(wait_until(|| {
            tx.reclaim();
            tx.send(&RawNetHeader::default(), &jumbo).unwrap()
        }));
        tx.publish(0).unwrap();
        a.talk(&mut b, 5);
    }
    let filtered = || device(&daemon, "b")["queues"][0]["counters"]["dropped_filtered"].as_u64();
    assert!(filtered() >= Some(20), "{}", device(&daemon, "b"));
}

#[test]
fn a_capture_whose_disk_hangs_costs_its_frames_and_nobody_waits_for_it() {
    let daemon = serve(&["a", "b"], "");
    let (mut a, mut b) = (Guest::connect(&daemon, "a", 1), Guest::connect(&daemon, "b", 2));
    a.greet(&mut b);
    b.greet(&mut a);
    // A pipe that nobody reads: a write to it never returns.
    let pipe = daemon.folder().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, 0o600.into(), 0).unwrap();
    let reader = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
    let control = daemon.socket_of("control");
    let (path, socket) = ("/v1/devices/c", daemon.folder().join("c"));
    let body = json!({"kind": "net", "socket_path": socket, "switch": "s0", "pcap": pipe});
    let (status, answer) = http_json(&control, "PUT", path, &body.to_string());
    assert_eq!(status, 201, "{answer}");
    let driver = NetDriver::connect(&socket, &NetDriverOptions::default()).unwrap();
    let mut c = Guest { n: 3, driver, sent: 0 };
    c.greet(&mut a);
    // More than a pipe holds, in and out; the copies wait in memory.
    c.talk(&mut a, 300);
    a.talk(&mut c, 300);
    a.talk(&mut b, 100);
    drop(c);
    // It goes while its writer hangs: the daemon goes on during that time, and answers.
    let is_gone = std::thread::scope(|scope| {
        let gone = scope.spawn(|| http(&control, "DELETE", "/v1/devices/c?force=true", "").0);
        for _ in 0..20 {
            a.talk(&mut b, 20);
        }
        gone.join().unwrap()
    });
    assert_eq!(is_gone, 204);
    drop(reader);
}

#[test]
fn a_guarded_guest_is_nobody_else_and_isolated_ones_hear_nothing_of_each_other() {
    let daemon = serve(&["a", "b"], "anti_spoof = true\nisolated = true\n");
    let (mut a, mut b) = (Guest::connect(&daemon, "a", 1), Guest::connect(&daemon, "b", 2));
    assert!(a.send([0xff; 6]));
    a.n = 7;
    assert!(a.send([0xff; 6]));
    assert!(wait_until(|| counter(&daemon, "a", "dropped_spoofed") == 1));
    assert!(wait_until(|| counter(&daemon, "a", "flooded") == 1));
    assert_eq!(b.receive(), None);
}

/// Has the daemon serve this configuration: the status of the answer, and its steps.
fn replace(daemon: &Daemon, config: &str) -> (u16, Vec<String>) {
    let text = config.replace('@', &daemon.folder().display().to_string());
    let (status, answer) = http_json(&daemon.socket_of("control"), "PUT", "/v1/config", &text);
    let steps = answer["steps"].as_array().into_iter().flatten();
    let words = |step: &Value| {
        let [what, device] = ["step", "device"].map(|key| step[key].as_str().unwrap().to_owned());
        format!("{what} {device}")
    };
    (status, steps.map(words).collect())
}

#[test]
fn a_switch_comes_with_its_ports_and_goes_with_them_while_others_talk() {
    let daemon = serve(&["a", "b"], "");
    let (mut a, mut b) = (Guest::connect(&daemon, "a", 1), Guest::connect(&daemon, "b", 2));
    a.greet(&mut b);
    b.greet(&mut a);
    let first = config(&["a", "b"], "");
    let port =
        |name: &str| format!("[[net]]\nname = '{name}'\nsocket_path = '@/{name}'\nswitch = 's1'\n");
    let both = format!("{first}{}{}[[switch]]\nname = 's1'\n", port("c"), port("d"));
    for _ in 0..2 {
        let (status, steps) = replace(&daemon, &both);
        assert_eq!((status, steps.join(", ")), (200, "add s1, add c, add d".to_owned()));
        let (mut c, mut d) = (Guest::connect(&daemon, "c", 3), Guest::connect(&daemon, "d", 4));
        c.greet(&mut d);
        d.greet(&mut c);
        c.talk(&mut d, 50);
        a.talk(&mut b, 50);
        assert_eq!(b.receive().or(a.receive()), None, "the switches are apart");
        // Ports that are used keep it.
        assert_eq!(replace(&daemon, &first).0, 409);
        c.talk(&mut d, 50);
        drop((c, d));
        assert!(wait_until(|| replace(&daemon, &first).0 == 200));
        a.talk(&mut b, 50);
    }
    // A switch whose uplink cannot be had does not come, and nothing else does.
    let uplink = format!("{both}uplink = 'no-such-bridge-port-here'\n");
    assert_eq!(replace(&daemon, &uplink).0, 422);
    // The daemon's own switch takes its settings when it is made: a changed `age` needs a restart.
    let older = first.replace("name = 's0'", "name = 's0'\nage = 7");
    let steps = match is_isolated() {
        true => [vec!["live s0".to_owned()], Vec::new()],
        false => [(); 2].map(|()| vec!["restart [[switch]]".to_owned()]),
    };
    for steps in steps {
        assert_eq!(replace(&daemon, &older), (200, steps));
    }
    a.talk(&mut b, 50);
}
