//! Images that a helper reads, in device processes: the helper is a child of the supervisor.

use crate::domain::{disk, pid, process, serve};
use crate::support::process::{Daemon, end_of, is_root_or_left_out, wait_until};
use crate::takeover::{has_ended, log, take_over};
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp};
use rustix::process::{Signal, kill_process};
use std::process::{Command, Stdio};

/// The helper is in a namespace of its own, where the daemon may make one.
fn helper_has_no_network(daemon: &Daemon) {
    if !is_root_or_left_out() {
        return;
    }
    let is_helper = |pid: &&u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.starts_with("qemu-storage-da")
    };
    let processes = daemon.processes();
    let helper = processes.iter().find(is_helper).expect("no helper runs");
    let network = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
    assert_ne!(network(*helper), network(daemon.pid()));
    let status = std::fs::read_to_string(format!("/proc/{helper}/status")).unwrap();
    for line in ["CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"] {
        assert!(status.contains(line), "{status}");
    }
}

#[test]
fn a_daemon_with_a_helper_is_not_taken_over_and_its_disk_outlives_the_try() {
    let is_there = |program: &str| {
        let mut command = Command::new(program);
        command.arg("--version").stdout(Stdio::null()).status().is_ok()
    };
    if !is_there("qemu-storage-daemon") || !is_there("qemu-img") {
        println!("not tested: there is no qemu-storage-daemon here");
        return;
    }
    let images = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = images.path().join("disk.qcow2");
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("4M");
    assert!(create.status().unwrap().success());
    let keys = format!("file = '{}'\nformat = 'qcow2'\ndomain = 'a'\n", image.display());
    let device = disk("a", &keys);
    let daemon = serve("state_dir = '@/state'\n", &device, &["a"]);
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    let mut guest = BlkDriver::connect(&daemon.socket_of("a"), &options).unwrap();
    let mut works = |byte: u8| {
        let queue = &mut guest.queues[0];
        queue.run(DriverOp::Write { sector: 8, data: &[byte; 4096] }).unwrap();
        let mut read = [0; 4096];
        queue.read(8, &mut read).unwrap();
        assert_eq!(read, [byte; 4096]);
    };
    works(1);
    helper_has_no_network(&daemon);
    let before = pid(&daemon, "a");
    assert!(!end_of(&mut take_over(&daemon, "manyring.toml")).success());
    let said = "images of helpers are not handed over: a";
    assert!(log(&daemon).contains(said), "{}", log(&daemon));
    assert!(!has_ended(daemon.pid()), "{}", daemon.log());
    // Nobody has paused.
    assert_eq!(pid(&daemon, "a"), before, "{}", daemon.log());
    works(2);
    // The helper still has its name: the next device process is connected to it.
    kill_process(before, Signal::KILL).unwrap();
    assert!(wait_until(|| process(&daemon, "a")["starts"] == 2), "{}", daemon.log());
    works(3);
    assert!(daemon.terminate().success());
}
