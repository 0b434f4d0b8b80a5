//! A block device of the host that fails in the middle of a request: a loop device whose file was
//! cut below it. Needs root and loop devices.

use crate::support::process::{Daemon, TIMEOUT, is_root_or_left_out, wait_until};
use crate::support::program::shown;
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

const OK: u8 = 0;
const IOERR: u8 = 1;
const MIB: u64 = 1 << 20;
const SECTOR: u64 = 512;

/// A loop device; detached when dropped.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn new(file: &Path) -> Self {
        let output = Command::new("losetup").args(["--show", "-f"]).arg(file).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self(String::from_utf8(output.stdout).unwrap().trim().into())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).output();
    }
}

/// Runs one request alone; its status.
fn status(driver: &mut BlkDriver, op: DriverOp<'_>) -> u8 {
    let queue = &mut driver.queues[0];
    queue.submit(op).unwrap().unwrap();
    queue.publish().unwrap();
    queue.wait(TIMEOUT).expect("an answer").status
}

/// Serves a device of 4 MiB whose second half is cut away under the guest.
fn serve(options: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("backing");
    let backing = File::create(&path).unwrap();
    backing.set_len(4 * MIB).unwrap();
    let device = LoopDevice::new(&path);
    let control = folder.path().join("control");
    let mut arguments = vec!["--blk-file", device.0.to_str().unwrap()];
    arguments.extend(["--control", control.to_str().unwrap()]);
    arguments.extend(options);
    let daemon = Daemon::blk(&arguments);
    let large = BlkDriverOptions {
        buffer_size: 1 << 20,
        segment_size: 256 << 10,
        ..BlkDriverOptions::default()
    };
    let mut driver = BlkDriver::connect(&daemon.socket(), &large).unwrap();
    let data: Vec<u8> = (0..MIB).map(|n| (n % 251) as u8).collect();
    for sector in [0, 2048, 4096, 6144] {
        assert_eq!(status(&mut driver, DriverOp::Write { sector, data: &data }), OK);
    }
    assert_eq!(status(&mut driver, DriverOp::Flush), OK);
    // The device now ends in the middle of the request that follows, and in the middle of a page.
    backing.set_len(2 * MIB + 300 * 1024 + 512).unwrap();
    let first = (2 * MIB) / SECTOR;
    // A write grows the file again, so what is read comes first. The page cache may have it all.
    let read = status(&mut driver, DriverOp::Read { sector: first, len: 1 << 20 });
    let is_direct = options.contains(&"--direct");
    assert!(read == IOERR || (read == OK && !is_direct), "{options:?}: {read}");
    assert_eq!(status(&mut driver, DriverOp::Read { sector: 0, len: 1 << 20 }), OK, "{options:?}");
    let mut bytes = vec![0; 4096];
    driver.queues[0].read(0, &mut bytes).unwrap();
    assert_eq!(bytes, data[..4096]);
    if is_direct {
        let errors = || {
            let device = &shown(&control, "/v1/devices/blk0")["queues"][0]["counters"];
            device["host_errors_eio"].as_u64().unwrap()
        };
        assert!(wait_until(|| errors() > 0), "{options:?}");
        let told = |log: &str| log.contains("WARN") && log.contains("Input/output error");
        assert!(wait_until(|| told(&daemon.log())), "{}", daemon.log());
    }
    // The host has mended it.
    backing.set_len(4 * MIB).unwrap();
    assert_eq!(
        status(&mut driver, DriverOp::Write { sector: first, data: &data }),
        OK,
        "{options:?}"
    );
    assert_eq!(status(&mut driver, DriverOp::Flush), OK, "{options:?}");
    driver.queues[0].read(first, &mut bytes).unwrap();
    assert_eq!(bytes, data[..4096], "{options:?}");
    drop(driver);
    assert!(daemon.terminate().success());
}

/// Serves a device of 4 MiB that the host then makes smaller, and says so.
fn shrink(options: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("backing");
    let backing = File::create(&path).unwrap();
    backing.set_len(4 * MIB).unwrap();
    let device = LoopDevice::new(&path);
    let (control, disk) = (folder.path().join("control"), device.0.to_str().unwrap());
    let mut arguments = vec!["--blk-file", disk, "--control", control.to_str().unwrap()];
    arguments.extend(options);
    let daemon = Daemon::blk(&arguments);
    let mut driver = BlkDriver::connect(&daemon.socket(), &BlkDriverOptions::default()).unwrap();
    let data = [7; 4096];
    let last = 3 * MIB / SECTOR;
    assert_eq!(
        status(&mut driver, DriverOp::Write { sector: last, data: &data }),
        OK,
        "{options:?}"
    );
    assert_eq!(status(&mut driver, DriverOp::Flush), OK, "{options:?}");
    backing.set_len(2 * MIB).unwrap();
    assert!(Command::new("losetup").arg("-c").arg(disk).status().unwrap().success());
    // Linux reports the same error as for a device that is full.
    assert_eq!(
        status(&mut driver, DriverOp::Write { sector: last, data: &data }),
        IOERR,
        "{options:?}"
    );
    let told =
        |log: &str| log.contains("has become smaller") && log.contains("device_size=2097152");
    assert!(wait_until(|| told(&daemon.log())), "{}", daemon.log());
    assert!(!daemon.log().contains("wait for it"), "{}", daemon.log());
    let counters = &shown(&control, "/v1/devices/blk0")["queues"][0]["counters"];
    assert_eq!(counters["host_errors_enospc"], 1, "{counters}");
    assert_eq!(counters["waiting_for_space"], 0, "{counters}");
    assert_eq!(status(&mut driver, DriverOp::Write { sector: 0, data: &data }), OK, "{options:?}");
    drop(driver);
    assert!(daemon.terminate().success());
}

#[test]
fn a_write_beyond_the_end_of_a_device_that_shrank_fails_and_does_not_wait_for_space() {
    if !is_root_or_left_out() {
        return;
    }
    for options in [&["--direct"][..], &["--direct", "--no-io-uring"], &[], &["--no-io-uring"]] {
        shrink(options);
    }
}

#[test]
fn request_that_fails_in_its_middle_is_an_error_and_the_queue_goes_on() {
    if !is_root_or_left_out() {
        return;
    }
    for options in [&["--direct"][..], &["--direct", "--no-io-uring"], &[], &["--no-io-uring"]] {
        serve(options);
    }
}
