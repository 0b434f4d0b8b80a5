//! A group of limits with disks in several device processes: it has its rate once.
#![allow(clippy::disallowed_methods, reason = "the test measures by a clock of its own")]

use crate::domain::{disk, pid, process, serve};
use crate::support::process::{Daemon, wait_until};
use crate::support::program::http_json;
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp};
use rustix::process::{Signal, kill_process};
use serde_json::json;
use std::time::{Duration, Instant};

/// Bytes in a second.
const RATE: u64 = 8_000_000;
/// Milliseconds of it that may pass at once: the credit, and what members hold ahead.
const AHEAD_MS: u64 = 100;

/// Two disks of a group, each in a domain of its own, and one of the first domain alone.
fn daemon() -> Daemon {
    let of = |name: &str, domain: &str| {
        let keys = format!("memory = '1M'\ndomain = '{domain}'\nlimit = {{ group = 'g' }}\n");
        disk(name, &keys)
    };
    let group = format!("[[limit]]\nname = 'g'\nbps = {RATE}\n");
    let other = disk("c", "memory = '1M'\ndomain = 'x'\n");
    let devices = [of("a", "x"), of("b", "y"), other, group].concat();
    serve("", &devices, &["a", "b", "c"])
}

fn connect(daemon: &Daemon, name: &str) -> BlkDriver {
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    let mut driver = BlkDriver::connect(&daemon.socket_of(name), &options).unwrap();
    read(&mut driver, 512, 512);
    driver
}

/// Reads so many bytes, `size` at a time.
fn read(driver: &mut BlkDriver, bytes: u64, size: u32) {
    for _ in 0..bytes / u64::from(size) {
        driver.queues[0].run(DriverOp::Read { sector: 0, len: size as usize }).unwrap();
    }
}

/// True if the device process of the domain has the files of a lease.
fn has_lease(daemon: &Daemon, domain: &str) -> bool {
    // Number 0, of which there is no folder: there is no process at this moment.
    let pid = process(daemon, domain)["pid"].as_u64().unwrap_or(0);
    let Ok(fds) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let is = |entry: std::fs::DirEntry| {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        target.to_string_lossy().contains("memfd:grants")
    };
    fds.flatten().any(is)
}

/// How often the thread that divides has slept; `None`: there is none.
fn sleeps_of_divider(daemon: &Daemon) -> Option<u64> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).ok()?;
    let of = |task: std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let count = |line: &str| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse().ok();
        (name.trim() == "limit-divider").then(|| status.lines().find_map(count)).flatten()
    };
    tasks.flatten().find_map(of)
}

#[test]
fn disks_of_two_processes_have_the_rate_of_their_group_once() {
    const EACH: u64 = 6 << 20;
    let daemon = daemon();
    let mut guests = [connect(&daemon, "a"), connect(&daemon, "b")];
    let both = || has_lease(&daemon, "x") && has_lease(&daemon, "y");
    assert!(wait_until(both), "{}", daemon.log());
    let began = Instant::now();
    std::thread::scope(|scope| {
        for (guest, size) in guests.iter_mut().zip([4096, 65_536]) {
            scope.spawn(move || read(guest, EACH, size));
        }
    });
    let took_ms = u64::try_from(began.elapsed().as_millis()).unwrap();
    let most = RATE * (took_ms + 1 + AHEAD_MS) / 1000;
    assert!(2 * EACH <= most, "{} bytes in {took_ms} ms", 2 * EACH);
    // Nobody does anything any more: the thread that divides sleeps until somebody does.
    let is_calm = || {
        let before = sleeps_of_divider(&daemon);
        std::thread::sleep(Duration::from_millis(100));
        before.is_some() && sleeps_of_divider(&daemon) == before
    };
    assert!(wait_until(is_calm), "it never rests");
    let before = sleeps_of_divider(&daemon);
    read(&mut guests[1], 2 << 20, 65_536);
    assert!(sleeps_of_divider(&daemon) > before, "nobody has woken it");
    assert!(daemon.terminate().success());
}

#[test]
fn a_group_goes_on_when_one_of_its_processes_dies_and_when_it_has_another_rate() {
    let daemon = daemon();
    let mut guests = [connect(&daemon, "a"), connect(&daemon, "b")];
    let both = || has_lease(&daemon, "x") && has_lease(&daemon, "y");
    assert!(wait_until(both), "{}", daemon.log());
    let killed = process(&daemon, "y")["pid"].clone();
    kill_process(pid(&daemon, "y"), Signal::KILL).unwrap();
    read(&mut guests[0], 2 << 20, 65_536);
    // The next process has a part, too.
    let is_back = || process(&daemon, "y")["pid"] != killed && both();
    assert!(wait_until(is_back), "{}", daemon.log());
    for guest in &mut guests {
        read(guest, 1 << 20, 4096);
    }
    let ask = |body: &str| {
        let control = daemon.socket_of("control");
        let (status, said) = http_json(&control, "PUT", "/v1/limits/g", body);
        assert_eq!(status, 200, "{said}");
    };
    ask(&json!({"bps": 1}).to_string());
    let wait =
        guests.map(|mut guest| std::thread::spawn(move || read(&mut guest, 1 << 20, 65_536)));
    // They are left to wait for a while: a test that passes without that proves nothing.
    std::thread::sleep(Duration::from_millis(200));
    assert!(wait.iter().all(|guest| !guest.is_finished()));
    ask(&json!({"bps": 0}).to_string());
    let is_over = || wait.iter().all(std::thread::JoinHandle::is_finished);
    assert!(wait_until(is_over), "they do not go on");
    assert!(daemon.terminate().success());
}

#[test]
fn a_disk_that_leaves_its_group_and_comes_back_when_no_other_is_in_it_goes_on() {
    let daemon = daemon();
    // The third one keeps the device process of the first one.
    let [mut first, second, _third] = ["a", "b", "c"].map(|name| connect(&daemon, name));
    let both = || has_lease(&daemon, "x") && has_lease(&daemon, "y");
    assert!(wait_until(both), "{}", daemon.log());
    let set = |group: serde_json::Value| {
        let (control, body) = (daemon.socket_of("control"), json!({"limit": {"group": group}}));
        let (status, said) = http_json(&control, "PATCH", "/v1/devices/a", &body.to_string());
        assert_eq!(status, 200, "{said}");
    };
    set(json!(null));
    drop(second);
    kill_process(pid(&daemon, "y"), Signal::KILL).unwrap();
    assert!(wait_until(|| process(&daemon, "y")["state"] == "ended"), "{}", daemon.log());
    set(json!("g"));
    let reads = std::thread::spawn(move || read(&mut first, 1 << 20, 65_536));
    assert!(wait_until(|| reads.is_finished()), "nobody grants it anything");
    assert!(daemon.terminate().success());
}
