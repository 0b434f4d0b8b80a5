//! Limits of a running daemon: what passes by our own clock, live changes, groups, and errors.
#![allow(clippy::disallowed_methods, reason = "the test measures by a clock of its own")]

use crate::support::process::{self, Daemon};
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp};
use std::process::Command;
use std::time::{Duration, Instant};

/// Milliseconds of the rate that are kept.
const CREDIT_MS: u64 = 50;

/// A daemon with one disk of this limit.
fn daemon(limit: &str) -> Daemon {
    let disk = "[[blk]]\nname = 'blk0'\nsocket_path = '@/blk0'\nmemory = '1M'\n";
    let configuration = format!("[daemon]\ncontrol = '@/control'\n{disk}limit = {{ {limit} }}\n");
    Daemon::run(&configuration, &["blk0", "control"])
}

fn connect(daemon: &Daemon) -> BlkDriver {
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    BlkDriver::connect(&daemon.socket_of("blk0"), &options).unwrap()
}

/// `manyring set` for the daemon's only disk; what it printed.
fn set(daemon: &Daemon, key: &str) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_manyring"));
    command.arg("set").arg("--control").arg(daemon.socket_of("control")).args(["blk0", key]);
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

/// Has `count` requests served, one after the other. Returns how long that took, in milliseconds.
fn serve(driver: &mut BlkDriver, count: u64) -> u64 {
    let began = Instant::now();
    for _ in 0..count {
        driver.queues[0].run(DriverOp::Read { sector: 0, len: 4096 }).unwrap();
    }
    u64::try_from(began.elapsed().as_millis()).unwrap()
}

#[test]
fn no_more_passes_than_the_limit_and_its_credit_allow() {
    let daemon = daemon("read_iops = 200, bps = '64M'");
    let mut driver = connect(&daemon);
    let count = 100;
    let took_ms = serve(&mut driver, count);
    // One passes without waiting, and the credit with it.
    assert!(count - 1 <= (took_ms + 1 + CREDIT_MS) * 200 / 1000, "{count} in {took_ms} ms");
}

#[test]
fn a_queue_that_would_wait_for_an_hour_goes_on_when_its_limit_is_changed() {
    let daemon = daemon("bps = 1");
    let mut driver = connect(&daemon);
    serve(&mut driver, 1);
    let waits = std::thread::spawn(move || serve(&mut driver, 50));
    // It is left to wait for a while: a test that passes without that proves nothing.
    std::thread::sleep(Duration::from_millis(200));
    assert!(!waits.is_finished());
    let (done, text) = set(&daemon, "limit.bps=0");
    assert!(done && text.contains("live"), "{text}");
    assert!(process::wait_until(|| waits.is_finished()), "it does not go on");
}

#[test]
fn a_wrong_limit_is_refused_with_its_key_and_value() {
    let daemon = daemon("iops = 1000");
    for (key, words) in [
        ("limit.iops=-1", "limit.iops: -1 is not a whole number from 1 to 100000000"),
        ("limit.iops=18446744073709551615", "limit.iops: 18446744073709551615 is not"),
        ("limit.bps=nan", "limit.bps: nan is not a whole number"),
        ("limit.burst_ms=3", "limit.burst_ms: 3 is not a whole number from 50 to 60000"),
        ("limit.rx_pps=3", "limit.rx_pps: unknown key"),
        ("limit.group=gold", "limit.group: no [[limit]] is named \"gold\""),
        ("limit=5", "5 is not a table"),
    ] {
        let (done, text) = set(&daemon, key);
        assert!(!done && text.contains(words), "{key}: {text}");
    }
    let (done, text) = set(&daemon, "limit.iops=1000");
    assert!(done && text.contains("nothing to change"), "{text}");
}

#[test]
fn the_options_of_a_command_limit_its_disk() {
    let daemon = Daemon::blk(&["--memory=1M", "--limit=iops=20,burst_ms=100"]);
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    let mut driver = BlkDriver::connect(&daemon.socket(), &options).unwrap();
    let took_ms = serve(&mut driver, 10);
    assert!(9 <= (took_ms + 1 + 100) * 20 / 1000, "10 in {took_ms} ms");
    let wrong = Command::new(env!("CARGO_BIN_EXE_manyring"))
        .args(["blk", "--socket-path=/none/s", "--memory=1M", "--limit=iops=-4"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(!wrong.status.success() && text.contains("--limit iops: -4 is not"), "{text}");
}
