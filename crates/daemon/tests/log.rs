//! What a front-end that misbehaves without end does to the log.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

mod process;

use process::Daemon;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

/// Far more than the bursts, 50 warnings and 1000 others, and what ten a second add meanwhile.
const CLIENTS: usize = 2000;

/// Connects again and again, with a request that no specification has.
fn misbehave(daemon: &Daemon) {
    for _ in 0..CLIENTS {
        let mut front = UnixStream::connect(daemon.socket()).unwrap();
        front.write_all(&[99, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        // It ends with our message unread or read: either way it has ended.
        let _ = front.read(&mut [0]);
    }
}

#[test]
fn a_front_end_that_misbehaves_without_end_does_not_fill_the_log() {
    let mut daemon = Daemon::blk(&["--null", "1G"]);
    misbehave(&daemon);
    assert!(daemon.is_running());
    let log = daemon.log();
    let warnings = log.lines().filter(|l| l.contains("WARN")).count();
    assert!((50..CLIENTS / 2).contains(&warnings), "{warnings} warnings");
    let connected = log.lines().filter(|l| l.contains("front-end connected")).count();
    assert!((1000..CLIENTS * 3 / 4).contains(&connected), "{connected} lines of level info");
    assert!(log.contains("too many lines"), "{log}");
}

#[test]
fn a_log_in_json_stays_json_when_lines_are_suppressed() {
    let daemon = Daemon::blk(&["--null", "1G", "--log-format", "json"]);
    misbehave(&daemon);
    let log = daemon.log();
    let said = |line: &str| -> serde_json::Value { serde_json::from_str(line).expect(line) };
    let warnings: Vec<_> = log
        .lines()
        .map(said)
        .filter(|l| l["level"] == "WARN")
        .map(|l| l["fields"].clone())
        .collect();
    assert!((50..CLIENTS / 2).contains(&warnings.len()), "{} warnings", warnings.len());
    let told =
        |f: &serde_json::Value| f["message"].as_str().unwrap_or("").contains("too many lines");
    assert!(warnings.iter().any(told), "{warnings:?}");
    assert_eq!(warnings[0]["device"], "blk0", "{:?}", warnings[0]);
}
