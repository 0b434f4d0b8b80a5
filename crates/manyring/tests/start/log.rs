//! The log under a front-end that misbehaves without end.

use crate::support::process::Daemon;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;

/// Far more than the bursts, 50 warnings and 1000 others, and ten more lines in each second.
const CLIENTS: usize = 2000;

/// They come to several devices in turn: a single one would slow them down.
const DEVICES: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];

/// A daemon with these devices, and with `more` arguments.
fn start(more: &[&str]) -> Daemon {
    let folder = tempfile::tempdir().unwrap();
    let sockets = DEVICES.map(|name| folder.path().join(name));
    let device = |(name, socket): (&str, &PathBuf)| {
        format!("[[blk]]\nname = '{name}'\nsocket_path = '{}'\nnull = '1G'\n", socket.display())
    };
    let file = folder.path().join("manyring.toml");
    let text: String = DEVICES.into_iter().zip(&sockets).map(device).collect();
    std::fs::write(&file, text).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_manyring"));
    command.args(["run", "--config"]).arg(file).args(more);
    Daemon::start(command, folder, &sockets)
}

/// Connects again and again, with a request that no specification has.
fn misbehave(daemon: &Daemon) {
    for device in DEVICES.iter().cycle().take(CLIENTS) {
        let mut front = UnixStream::connect(daemon.socket_of(device)).unwrap();
        front.write_all(&[99, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        // It ends with our message unread or read: either way it has ended.
        let _ = front.read(&mut [0]);
    }
}

#[test]
fn a_front_end_that_misbehaves_without_end_does_not_fill_the_log() {
    let mut daemon = start(&[]);
    misbehave(&daemon);
    assert!(daemon.is_running());
    let log = daemon.log();
    let warnings = log.lines().filter(|l| l.contains("WARN")).count();
    assert!((50..CLIENTS / 2).contains(&warnings), "{warnings} warnings");
    // The devices have said that they listen.
    let infos = log.lines().filter(|l| l.contains("INFO")).count();
    assert!((1000..CLIENTS * 3 / 4).contains(&infos), "{infos} lines of level info");
    assert!(log.contains("too many lines"), "{log}");
}

#[test]
fn a_log_in_json_stays_json_when_lines_are_suppressed() {
    let daemon = start(&["--log-format", "json"]);
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
    assert_eq!(warnings[0]["device"], "a", "{:?}", warnings[0]);
}
