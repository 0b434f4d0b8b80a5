//! Images that a helper reads, in device processes: the helper is a child of the supervisor.

use crate::domain::{disk, pid, process, serve};
use crate::support::process::wait_until;
use crate::takeover::{has_ended, log, take_over};
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp};
use rustix::process::{Signal, kill_process};
use std::process::{Command, Stdio};

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
    let before = pid(&daemon, "a");
    assert!(!take_over(&daemon, "manyring.toml").wait().unwrap().success());
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
