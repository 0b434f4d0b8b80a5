//! Device processes stop for the next daemon: those that do, those that do not answer, and those
//! that lie.
#![cfg(target_arch = "x86_64")]

use crate::domain::{self, client_works, disk, pid, process, serve, two_domains, works};
use crate::support::foreign::Client;
use crate::support::process::{self, Daemon, Running, end_of, wait_until};
use crate::support::program::manyring;
use crate::support::taken::Taken;
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp};
use rustix::process::{Pid, Signal, kill_process};
use std::process::Stdio;

/// The supervisor's log line about a device process that it kills because the device process has
/// not quiesced.
const KILLED: &str = "the device process did not quiesce in time";

/// The next daemon; its log goes to `next.log`.
struct Next(Running);

impl Next {
    fn takes_over(daemon: &Daemon) -> Self {
        let log = std::fs::File::create(daemon.folder().join("next.log")).unwrap();
        let mut command = manyring();
        command.arg("run").arg("--config").arg(daemon.folder().join("manyring.toml"));
        command.arg("--takeover").arg(daemon.socket_of("control"));
        Self(Running::start(command.stderr(Stdio::from(log))))
    }

    /// Waits until it has taken over, and has device processes of its own.
    fn serves(&self, daemon: &Daemon, domains: &[&str]) {
        let before = daemon.pid();
        let stat = || std::fs::read_to_string(format!("/proc/{before}/stat"));
        let has_ended = || stat().map_or(true, |stat| stat.contains(") Z "));
        assert!(wait_until(has_ended), "{} {}", daemon.log(), log(daemon));
        for domain in domains {
            assert!(
                wait_until(|| process(daemon, domain)["state"] == "serving"),
                "{}",
                log(daemon)
            );
        }
    }

    fn ends(mut self, daemon: &Daemon) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        assert!(end_of(&mut self.0).success(), "{}", log(daemon));
    }
}

fn log(daemon: &Daemon) -> String {
    std::fs::read_to_string(daemon.folder().join("next.log")).unwrap_or_default()
}

#[test]
fn device_processes_park_for_the_next_daemon_and_their_guests_go_on() {
    let daemon = two_domains();
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    let mut other = Client::connect(&daemon.socket_of("b"), false);
    let next = std::thread::scope(|scope| {
        // Requests are in flight while the device process quiesces.
        let guest = scope.spawn(|| (0..200).for_each(|seed| works(&mut client, seed)));
        works(&mut other, 1);
        let next = Next::takes_over(&daemon);
        next.serves(&daemon, &["a", "b"]);
        guest.join().unwrap();
        next
    });
    works(&mut other, 2);
    let said = daemon.log();
    assert_eq!(said.matches("device process quiesced").count(), 2, "{said}");
    assert!(!said.contains(KILLED) && !said.contains("session closed"), "{said}");
    drop((client, other));
    next.ends(&daemon);
}

#[test]
fn a_device_process_that_does_not_answer_is_killed_and_keeps_no_daemon_from_taking_over() {
    let daemon = two_domains();
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    let mut other = Client::connect(&daemon.socket_of("b"), false);
    works(&mut client, 1);
    works(&mut other, 1);
    kill_process(pid(&daemon, "a"), Signal::STOP).unwrap();
    let next = Next::takes_over(&daemon);
    next.serves(&daemon, &["a", "b"]);
    works(&mut client, 2);
    works(&mut other, 2);
    let said = daemon.log();
    assert_eq!(
        (said.matches("device process quiesced").count(), said.matches(KILLED).count()),
        (1, 1),
        "{said}"
    );
    drop((client, other));
    next.ends(&daemon);
}

#[test]
fn a_device_process_whose_requests_do_not_end_is_killed_and_they_are_served_again() {
    // Each second request of this disk is held back for ever.
    let keys = "file = '@/a.img'\ndomain = 'a'\nfault = { hold_every = 2 }\n";
    let daemon = serve("", &disk("a", keys), &["a"]);
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    let mut driver = BlkDriver::connect(&daemon.socket_of("a"), &options).unwrap();
    let queue = &mut driver.queues[0];
    queue.write(0, &[1; 512]).unwrap();
    queue.submit(DriverOp::Write { sector: 1, data: &[2; 512] }).unwrap().unwrap();
    queue.publish().unwrap();
    assert!(wait_until(|| domain::counted(&daemon, "a", "in_flight") == 1), "{}", daemon.log());
    let next = Next::takes_over(&daemon);
    next.serves(&daemon, &["a"]);
    // The next daemon counts its requests anew: the first one is answered.
    assert!(queue.wait(process::TIMEOUT).is_ok());
    assert!(daemon.log().contains(KILLED), "{}", daemon.log());
    drop(driver);
    next.ends(&daemon);
}

/// Says this to the supervisor, in the place of the device process.
fn says(process: &mut Taken, text: &str) {
    let address = process.text(text);
    let len = text.len() as u64;
    let said = process.call_or_end(libc::SYS_write, [0, address, len, 0, 0, 0]);
    assert!(said.is_none_or(|said| said == len.cast_signed()), "{said:?}");
}

const PARKED: &str = "\u{2}{\"quiesced\":{}}";

#[test]
fn a_device_process_that_says_unasked_that_it_has_parked_is_ended() {
    let daemon = two_domains();
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    works(&mut client, 1);
    let liar = pid(&daemon, "a").as_raw_nonzero().get();
    says(&mut Taken::take(liar, liar), PARKED);
    assert!(
        wait_until(|| daemon.log().contains("it quiesced without a request")),
        "{}",
        daemon.log()
    );
    works(&mut client, 2);
    drop(client);
    client_works(&daemon.socket_of("b"), 3);
    assert!(daemon.terminate().success());
}

#[test]
fn a_device_process_that_lies_that_it_has_parked_is_gone_before_the_next_daemon_serves() {
    let daemon = two_domains();
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    works(&mut client, 1);
    let liar = pid(&daemon, "a").as_raw_nonzero().get();
    let mut taken = Taken::take(liar, liar);
    let next = Next::takes_over(&daemon);
    let scratch = taken.scratch();
    let park = "\u{2}{\"quiesce\":{}}".len();
    let is_asked = || {
        let flags = u64::from(libc::MSG_DONTWAIT.unsigned_abs());
        taken.call(libc::SYS_recvfrom, [0, scratch, 512, flags, 0, 0])
            == i64::try_from(park).unwrap()
    };
    assert!(wait_until(is_asked), "{}", daemon.log());
    says(&mut taken, PARKED);
    next.serves(&daemon, &["a"]);
    let stat = std::fs::read_to_string(format!("/proc/{liar}/stat"));
    assert!(stat.map_or(true, |stat| stat.contains(") Z ")), "{}", daemon.log());
    assert!(!daemon.log().contains(KILLED), "{}", daemon.log());
    works(&mut client, 2);
    std::mem::forget(taken);
    drop(client);
    next.ends(&daemon);
}

#[test]
fn a_device_process_that_is_not_there_any_more_is_not_told_of_as_one_that_does_not_park() {
    let daemon = two_domains();
    client_works(&daemon.socket_of("a"), 1);
    let mut other = Client::connect(&daemon.socket_of("b"), false);
    kill_process(pid(&daemon, "a"), Signal::KILL).unwrap();
    assert!(wait_until(|| process(&daemon, "a")["state"] == "ended"), "{}", daemon.log());
    let next = Next::takes_over(&daemon);
    next.serves(&daemon, &["b"]);
    works(&mut other, 2);
    let said = daemon.log();
    assert!(!said.contains(KILLED) && said.contains("device process quiesced"), "{said}");
    drop(other);
    next.ends(&daemon);
}
