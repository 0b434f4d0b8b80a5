//! Work of the kernel for a device process that is killed: the device process's image waits for it,
//! and nobody else does. Needs root, for loop devices and a file system that is frozen.

use crate::domain::{self, client_works, disk, pid, process, serve};
use crate::support::frozen::{Freezer, run};
use crate::support::process::{Daemon, Running, TIMEOUT, end_of, wait_until};
use crate::support::program;
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A block device over a file; detached when dropped.
struct Loop(PathBuf);

impl Loop {
    /// One of 16 MiB.
    fn over(file: &Path) -> Self {
        Self::of(file, 16 << 20, 512)
    }

    /// One of this size, with blocks of this size.
    fn of(file: &Path, size: u64, block: u32) -> Self {
        std::fs::File::create(file).unwrap().set_len(size).unwrap();
        let block = block.to_string();
        let set_up = || {
            let free = run("losetup -f");
            // A container has nodes for the first few alone.
            let number = free.strip_prefix("/dev/loop").filter(|_| !Path::new(&free).exists());
            if let Some(number) = number {
                let _ = Command::new("mknod").args([&free, "b", "7", number]).output();
            }
            // If another test has set up that one by now, losetup takes the next one, which fails
            // if it has no node: the next try makes it.
            let mut losetup = Command::new("losetup");
            let output = losetup.args(["--show", "-b", &block, "-f"]).arg(file).output().unwrap();
            let name = String::from_utf8(output.stdout).unwrap();
            output.status.success().then(|| Self(name.trim().into()))
        };
        (0..10).find_map(|_| set_up()).unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).output();
    }
}

/// A file system in whose files direct transfers have whole blocks of 4 KiB.
struct LargeBlocks {
    folder: tempfile::TempDir,
    _device: Loop,
    _file: tempfile::NamedTempFile,
}

impl LargeBlocks {
    fn new() -> Self {
        let (file, folder) =
            (tempfile::NamedTempFile::new().unwrap(), tempfile::tempdir().unwrap());
        let device = Loop::of(file.path(), 64 << 20, 4096);
        run(&format!("mkfs.ext4 -q -b 4096 {}", device.0.display()));
        run(&format!("mount {} {}", device.0.display(), folder.path().display()));
        Self { folder, _device: device, _file: file }
    }
}

impl Drop for LargeBlocks {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.folder.path()).output();
    }
}

/// A file system in a device.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn of(device: &Loop) -> Self {
        let folder = tempfile::tempdir().unwrap();
        run(&format!("mkfs.ext4 -q {}", device.0.display()));
        run(&format!("mount {} {}", device.0.display(), folder.path().display()));
        Self(folder)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).output();
    }
}

fn connect(daemon: &Daemon, name: &str) -> BlkDriver {
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    BlkDriver::connect(&daemon.socket_of(name), &options).unwrap()
}

/// A disk that can be made to hang in domain `a`, and one in memory in domain `b`.
fn serve_beside(keys: &str) -> Daemon {
    let devices =
        [disk("a", &format!("{keys}domain = 'a'\n")), disk("b", "memory = '16M'\ndomain = 'b'\n")];
    serve("", &devices.concat(), &["a", "b"])
}

/// Has the disk of domain `a` hang with a write in flight, and kills its device process; then
/// nobody else waits, and the disk serves again when it goes on.
fn dies_with_a_write_in_flight(daemon: &Daemon, freezer: &Freezer, ends: bool) {
    let mut driver = connect(daemon, "a");
    driver.queues[0].write(0, &[1; 4096]).unwrap();
    let killed = pid(daemon, "a");
    freezer.freeze();
    let queue = &mut driver.queues[0];
    queue.submit(DriverOp::Write { sector: 0, data: &[2; 4096] }).unwrap().unwrap();
    queue.publish().unwrap();
    // It is the kernel's: the guest's index has moved, and no answer has come.
    let counted = || domain::counted(daemon, "a", "in_flight");
    assert!(wait_until(|| counted() == 1), "{}", daemon.log());
    kill_process(killed, Signal::KILL).unwrap();
    drop(driver);
    let is_gone = || test_kill_process(killed).is_err();
    assert!(!ends || wait_until(is_gone), "{}", daemon.log());
    std::thread::scope(|scope| {
        let next = scope.spawn(|| {
            // Who was handed to a device process that had ended connects again.
            let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
            let mut driver = None;
            let socket = daemon.socket_of("a");
            let connects = || {
                driver = BlkDriver::connect(&socket, &options).ok();
                driver.is_some()
            };
            assert!(wait_until(connects));
            driver.unwrap()
        });
        // A process of which the kernel keeps a thread has no end, and closes nothing: that it does
        // not answer is what shows.
        let is_shown = || match ends {
            true => daemon.log().contains("are still in flight; waiting"),
            false => process(daemon, "a")["state"] == "stuck",
        };
        assert!(wait_until(is_shown), "{}", daemon.log());
        client_works(&daemon.socket_of("b"), 1);
        assert!(!next.is_finished(), "the image has a writer still");
        freezer.thaw();
        let mut driver = next.join().unwrap();
        // The guest's own write of before comes first, or not at all, and never after this one.
        driver.queues[0].write(0, &[3; 4096]).unwrap();
        driver.queues[0].flush().unwrap();
        let mut bytes = [0; 4096];
        driver.queues[0].read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [3; 4096]);
    });
    assert!(is_gone() && process(daemon, "a")["starts"] == 2, "{}", daemon.log());
}

#[test]
fn an_image_waits_for_the_requests_of_a_device_process_that_is_gone() {
    let freezer = Freezer::new();
    let device = Loop::over(&freezer.file("back.img"));
    let daemon = serve_beside(&format!("file = '{}'\ndirect = true\n", device.0.display()));
    dies_with_a_write_in_flight(&daemon, &freezer, true);
    assert!(daemon.terminate().success());
}

/// A read that the kernel has under way for a device process that is gone lands in memory of the
/// guest, which has that in other use once the next device process has answered.
#[test]
fn a_disk_that_is_only_read_waits_for_the_reads_of_a_device_process_that_is_gone() {
    let freezer = Freezer::new();
    let device = Loop::over(&freezer.file("back.img"));
    let path = device.0.display();
    let daemon = serve_beside(&format!("file = '{path}'\nread_only = true\ndirect = true\n"));
    let mut driver = connect(&daemon, "a");
    driver.queues[0].read(0, &mut [0; 4096]).unwrap();
    let killed = pid(&daemon, "a");
    freezer.freeze();
    // The loop device serves one request after the other, and this write waits for its frozen file.
    let mut writer = Running::start(
        Command::new("dd")
            .args([
                "if=/dev/zero",
                "bs=4096",
                "count=1",
                "oflag=direct",
                "conv=notrunc",
                "status=none",
            ])
            .arg(format!("of={path}")),
    );
    let name = device.0.file_name().unwrap().to_str().unwrap();
    let in_flight = format!("/sys/block/{name}/inflight");
    let writes = || std::fs::read_to_string(&in_flight).unwrap();
    assert!(wait_until(|| writes().split_whitespace().nth(1) == Some("1")), "{}", writes());
    let queue = &mut driver.queues[0];
    queue.submit(DriverOp::Read { sector: 8, len: 4096 }).unwrap().unwrap();
    queue.publish().unwrap();
    assert!(wait_until(|| domain::counted(&daemon, "a", "in_flight") == 1), "{}", daemon.log());
    kill_process(killed, Signal::KILL).unwrap();
    assert!(wait_until(|| test_kill_process(killed).is_err()), "{}", daemon.log());
    let waits = || daemon.log().contains("are still in flight; waiting");
    let goes_on = || daemon.log().contains("front-end resumed");
    assert!(wait_until(|| waits() || goes_on()), "{}", daemon.log());
    assert!(waits() && !goes_on(), "{}", daemon.log());
    freezer.thaw();
    driver.queues[0].wait(TIMEOUT).unwrap();
    driver.queues[0].read(0, &mut [0; 4096]).unwrap();
    assert!(end_of(&mut writer).success());
    assert!(goes_on(), "{}", daemon.log());
    assert!(daemon.terminate().success());
}

#[test]
fn a_device_process_that_sigkill_does_not_end_is_shown_as_stuck_and_holds_its_own_devices_alone() {
    let freezer = Freezer::new();
    let file = freezer.file("disk.img");
    std::fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
    let daemon = serve_beside(&format!("file = '{}'\n", file.display()));
    dies_with_a_write_in_flight(&daemon, &freezer, false);
    assert!(daemon.terminate().success());
}

#[test]
fn a_disk_that_hangs_with_its_device_process_keeps_no_other_guest_from_the_daemon_that_takes_over()
{
    let freezer = Freezer::new();
    // A process that waits for a block device can open it; without rings its own thread waits.
    let device = Loop::over(&freezer.file("back.img"));
    let keys = format!("file = '{}'\ndirect = true\ndomain = 'a'\n", device.0.display());
    let devices = disk("a", &keys) + &disk("b", "memory = '16M'\ndomain = 'b'\n");
    let daemon = serve("io_uring = false", &devices, &["a", "b"]);
    let (mut held, mut other) = (connect(&daemon, "a"), connect(&daemon, "b"));
    other.queues[0].write(0, &[1; 512]).unwrap();
    let queue = &mut held.queues[0];
    queue.write(0, &[1; 4096]).unwrap();
    freezer.freeze();
    queue.submit(DriverOp::Write { sector: 0, data: &[2; 4096] }).unwrap().unwrap();
    queue.publish().unwrap();
    assert!(wait_until(|| domain::counted(&daemon, "a", "in_flight") == 1), "{}", daemon.log());
    let its_pid = pid(&daemon, "a");
    let next_log = daemon.folder().join("next.log");
    let said = || std::fs::read_to_string(&next_log).unwrap_or_default();
    let takes_over = || {
        let mut next = program::manyring();
        next.arg("run").arg("--config").arg(daemon.folder().join("manyring.toml"));
        next.arg("--takeover").arg(daemon.socket_of("control"));
        let log = std::fs::File::options().create(true).append(true).open(&next_log).unwrap();
        Running::start(next.stderr(log))
    };
    let mut next = takes_over();
    let stat = || std::fs::read_to_string(format!("/proc/{}/stat", daemon.pid()));
    let has_ended = || stat().map_or(true, |stat| stat.contains(") Z "));
    assert!(wait_until(has_ended), "{} {}", daemon.log(), said());
    other.queues[0].write(0, &[2; 512]).unwrap();
    // The image does not open, and keeps its front-end waiting: a third daemon would lose that.
    assert!(!end_of(&mut takes_over()).success());
    other.queues[0].write(0, &[3; 512]).unwrap();
    assert!(said().contains("devices with front-ends are still opening: a"), "{}", said());
    assert!(test_kill_process(its_pid).is_ok(), "the kernel has ended it: nothing was tried");
    assert_eq!(process(&daemon, "a"), serde_json::Value::Null, "the image has a writer");
    freezer.thaw();
    let queue = &mut held.queues[0];
    queue.wait(TIMEOUT).unwrap();
    queue.write(0, &[3; 4096]).unwrap();
    let mut bytes = [0; 4096];
    queue.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [3; 4096]);
    kill_process(Pid::from_child(&next), Signal::TERM).unwrap();
    assert!(end_of(&mut next).success(), "{}", said());
}

/// A guest's writes become durable before the lock of its image is released. That takes as long as
/// the disk takes, and longer if the guest has written much.
#[test]
fn an_image_that_is_not_durable_in_time_keeps_no_guest_from_the_daemon_that_takes_over() {
    let freezer = Freezer::new();
    let device = Loop::of(&freezer.file("back.img"), 32 << 20, 512);
    let mounted = Mounted::of(&device);
    let file = mounted.0.path().join("disk.img");
    std::fs::File::create(&file).unwrap().set_len(8 << 20).unwrap();
    let keys = format!("file = '{}'\nlock_with_rings = true\ndomain = 'a'\n", file.display());
    let devices = disk("a", &keys) + &disk("b", "memory = '16M'\ndomain = 'b'\n");
    let daemon = serve("", &devices, &["a", "b"]);
    let (mut held, mut other) = (connect(&daemon, "a"), connect(&daemon, "b"));
    held.queues[0].write(0, &[1; 4096]).unwrap();
    held.queues[0].flush().unwrap();
    freezer.freeze();
    held.queues[0].write(8, &[2; 4096]).unwrap();
    let next_log = std::fs::File::create(daemon.folder().join("next.log")).unwrap();
    let mut next = program::manyring();
    next.arg("run").arg("--config").arg(daemon.folder().join("manyring.toml"));
    next.arg("--takeover").arg(daemon.socket_of("control"));
    let mut next = Running::start(next.stderr(next_log));
    let said = || std::fs::read_to_string(daemon.folder().join("next.log")).unwrap_or_default();
    let stat = || std::fs::read_to_string(format!("/proc/{}/stat", daemon.pid()));
    let has_ended = || stat().map_or(true, |stat| stat.contains(") Z "));
    let is_refused = wait_until(|| has_ended() || next.try_wait().unwrap().is_some())
        && next.try_wait().unwrap().is_some();
    freezer.thaw();
    assert!(!is_refused, "{} {}", daemon.log(), said());
    other.queues[0].write(0, &[3; 512]).unwrap();
    let mut bytes = [0; 4096];
    held.queues[0].read(8, &mut bytes).unwrap();
    assert_eq!(bytes, [2; 4096]);
    held.queues[0].flush().unwrap();
    kill_process(Pid::from_child(&next), Signal::TERM).unwrap();
    assert!(end_of(&mut next).success(), "{}", said());
}

#[test]
fn a_file_that_ends_inside_a_block_of_its_file_system_keeps_its_size_in_a_device_process() {
    const SIZE: u64 = (1 << 20) + 512;
    let blocks = LargeBlocks::new();
    for io_uring in [true, false] {
        let file = blocks.folder.path().join(format!("{io_uring}.img"));
        std::fs::File::create(&file).unwrap().set_len(SIZE).unwrap();
        let keys = format!("file = '{}'\ndirect = true\ndomain = 'a'\n", file.display());
        let daemon = serve(&format!("io_uring = {io_uring}"), &disk("a", &keys), &["a"]);
        let queue = &mut connect(&daemon, "a").queues[0];
        queue.write(SIZE / 512 - 1, &[7; 512]).unwrap();
        let mut bytes = [0; 512];
        queue.read(SIZE / 512 - 1, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 512]);
        assert_eq!(std::fs::metadata(&file).unwrap().len(), SIZE, "{}", daemon.log());
        assert!(!daemon.log().contains("denied by the sandbox"), "{}", daemon.log());
        assert!(daemon.terminate().success());
    }
}

#[test]
fn a_block_device_in_a_device_process_discards_and_zeroes_what_the_page_cache_has_not_written() {
    for io_uring in [true, false] {
        let file = tempfile::NamedTempFile::new().unwrap();
        let device = Loop::over(file.path());
        let keys = disk("a", &format!("file = '{}'\ndomain = 'a'\n", device.0.display()));
        let daemon = serve(&format!("io_uring = {io_uring}"), &keys, &["a"]);
        let queue = &mut connect(&daemon, "a").queues[0];
        for round in 0..20_u8 {
            queue.write(0, &[round + 1; 65536]).unwrap();
            let zeroes = DriverOp::WriteZeroes { sector: 0, count: 64, unmap: round % 2 == 0 };
            queue.run(zeroes).unwrap();
            queue.run(DriverOp::Discard { sector: 64, count: 64 }).unwrap();
            let mut bytes = [9; 32768];
            queue.read(0, &mut bytes).unwrap();
            assert_eq!(bytes, [0; 32768], "round {round}");
        }
        // Nobody else gets the device, from any description.
        let other = Command::new(env!("CARGO_BIN_EXE_manyring"))
            .args(["blk", "--wait", "0", "--socket-path"])
            .arg(daemon.folder().join("other"))
            .arg("--blk-file")
            .arg(&device.0)
            .output()
            .unwrap();
        assert!(String::from_utf8_lossy(&other.stderr).contains("in use"), "{other:?}");
        assert!(daemon.terminate().success());
    }
}
