//! Disks in domains: a daemon with device processes, what its device processes are, and clients of
//! its disks.
#![allow(dead_code, reason = "every test program uses its own part of it")]

use crate::support::foreign::{Client, SIZE_MAX};
use crate::support::process::Daemon;
use crate::support::program::{manyring, shown};
use rustix::process::Pid;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Two disks in files, each in the domain that is named after it.
pub(crate) fn two_domains() -> Daemon {
    let disk = |name: &str| disk(name, &format!("file = '@/{name}.img'\ndomain = '{name}'\n"));
    serve("", &[disk("a"), disk("b")].concat(), &["a", "b"])
}

/// The table of a disk of four queues with these keys.
pub(crate) fn disk(name: &str, keys: &str) -> String {
    format!("[[blk]]\nname = '{name}'\nsocket_path = '@/{name}'\nnum_queues = 4\n{keys}")
}

/// A daemon with these keys of its own, and with these devices, each of which can have an image.
pub(crate) fn serve(keys: &str, devices: &str, names: &[&str]) -> Daemon {
    let text = format!("[daemon]\ncontrol = '@/control'\n{keys}\n{devices}");
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for name in names {
        let image = std::fs::File::create(folder.path().join(format!("{name}.img"))).unwrap();
        image.set_len(16 << 20).unwrap();
    }
    let file = folder.path().join("manyring.toml");
    std::fs::write(&file, text.replace('@', &folder.path().display().to_string())).unwrap();
    let mut command = manyring();
    command.arg("run").arg("--config").arg(&file);
    let sockets = names.iter().chain(&["control"]).map(|name| folder.path().join(name));
    let sockets: Vec<_> = sockets.collect();
    Daemon::start(command, folder, &sockets)
}

/// Writes and reads back on all four queues.
pub(crate) fn works(client: &mut Client, seed: u64) {
    for lane in &mut client.lanes(seed) {
        lane.end = lane.start + 4 * SIZE_MAX as u64;
        lane.transfer(true);
        lane.transfer(false);
    }
}

/// Does so over and over until `is_over`. Returns how often.
pub(crate) fn works_until(client: &mut Client, is_over: &AtomicBool) -> u64 {
    let mut rounds = 0;
    while !is_over.load(Ordering::Relaxed) {
        works(client, rounds);
        rounds += 1;
    }
    rounds
}

pub(crate) fn client_works(socket: &Path, seed: u64) {
    works(&mut Client::connect(socket, false), seed);
}

/// The row of a device process in the API's list; null without such a device process.
pub(crate) fn process(daemon: &Daemon, name: &str) -> serde_json::Value {
    let processes = shown(&daemon.socket_of("control"), "/v1/processes");
    let all = processes["processes"].as_array().unwrap();
    all.iter().find(|process| process["process"] == name).cloned().unwrap_or_default()
}

pub(crate) fn pid(daemon: &Daemon, name: &str) -> Pid {
    let pid = process(daemon, name)["pid"].as_i64().unwrap();
    Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
}

/// A counter of a device, over all its queues, as the supervisor shows it.
pub(crate) fn counted(daemon: &Daemon, device: &str, counter: &str) -> u64 {
    let device = shown(&daemon.socket_of("control"), &format!("/v1/devices/{device}"));
    let queues = device["queues"].as_array().unwrap();
    queues.iter().map(|queue| queue["counters"][counter].as_u64().unwrap()).sum()
}
