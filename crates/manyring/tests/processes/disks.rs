//! Every kind of disk in a device process, with limits and with a lock that goes with the rings.
#![allow(clippy::disallowed_methods, reason = "a guest of a test has a thread of its own")]

use crate::domain::{disk, pid, process, serve};
use crate::support::foreign::Client;
use crate::support::process::{Daemon, wait_until};
use crate::support::program::{http_json, manyring, shown};
use crate::support::rings::StopAtEnd;
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp};
use manyring_wire::vhost_user::{BACKEND_CONFIG_CHANGE_MSG, FLAG_VERSION, Header};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn kill(daemon: &Daemon, name: &str) {
    let killed = process(daemon, name)["pid"].clone();
    kill_process(pid(daemon, name), Signal::KILL).unwrap();
    // With a front-end the next one starts at once.
    let is_gone = || {
        let process = process(daemon, name);
        process["state"] == "ended" || (process["state"] == "serving" && process["pid"] != killed)
    };
    assert!(wait_until(is_gone), "{}", daemon.log());
}

fn processes(daemon: &Daemon) -> Value {
    shown(&daemon.socket_of("control"), "/v1/processes")["processes"].clone()
}

fn connect(daemon: &Daemon, name: &str) -> BlkDriver {
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    BlkDriver::connect(&daemon.socket_of(name), &options).unwrap()
}

#[test]
fn a_disk_in_memory_outlives_its_device_process() {
    let daemon = serve("", &disk("a", "memory = '16M'\ndomain = 'a'\n"), &["a"]);
    for lane in &mut Client::connect(&daemon.socket_of("a"), false).lanes(7) {
        lane.transfer(true);
    }
    for _ in 0..2 {
        kill(&daemon, "a");
        for lane in &mut Client::connect(&daemon.socket_of("a"), false).lanes(7) {
            lane.transfer(false);
        }
    }
    assert_eq!(process(&daemon, "a")["starts"], 3);
    assert!(daemon.terminate().success());
}

/// Reads so often, one after the other.
fn read(driver: &mut BlkDriver, count: u64) {
    for _ in 0..count {
        driver.queues[0].run(DriverOp::Read { sector: 0, len: 4096 }).unwrap();
    }
}

/// A guest that would wait for an hour goes on once `change` is made.
fn waits_until(mut driver: BlkDriver, change: impl FnOnce()) {
    let waits = std::thread::spawn(move || read(&mut driver, 50));
    // It is left to wait for a while: a test that passes without that proves nothing.
    std::thread::sleep(Duration::from_millis(200));
    assert!(!waits.is_finished());
    change();
    assert!(wait_until(|| waits.is_finished()), "it does not go on");
}

#[test]
fn limits_hold_in_a_device_process_and_follow_the_operator() {
    let limited = |name: &str, limit: &str| {
        disk(name, &format!("memory = '1M'\ndomain = 'x'\nlimit = {{ {limit} }}\n"))
    };
    let devices = [
        limited("a", "bps = 1"),
        limited("b", "group = 'g'"),
        limited("c", "group = 'g'"),
        disk("d", "memory = '1M'\ndomain = 'y'\n"),
        "[[limit]]\nname = 'g'\nbps = 1\n".to_owned(),
    ];
    let daemon = serve("", &devices.concat(), &["a", "b", "c", "d"]);
    let ask = |method: &str, path: &str, body: Value| {
        http_json(&daemon.socket_of("control"), method, path, &body.to_string())
    };
    let mut alone = connect(&daemon, "a");
    read(&mut alone, 1);
    waits_until(alone, || {
        let (status, said) = ask("PATCH", "/v1/devices/a", json!({"limit": {"bps": 0}}));
        assert_eq!(status, 200, "{said}");
    });
    // A request of one device makes the next one of its group wait.
    let (mut first, second) = (connect(&daemon, "b"), connect(&daemon, "c"));
    read(&mut first, 1);
    waits_until(second, || {
        let (status, said) = ask("PUT", "/v1/limits/g", json!({"bps": 0}));
        assert_eq!(status, 200, "{said}");
    });
    // The next device process has the limits as they are then.
    drop(first);
    kill(&daemon, "x");
    read(&mut connect(&daemon, "a"), 50);
    // A device of another process comes into the group, and shares its rate.
    let (status, said) = ask("PUT", "/v1/limits/g", json!({"bps": 1}));
    assert_eq!(status, 200, "{said}");
    let mut other = connect(&daemon, "d");
    read(&mut other, 50);
    let (status, said) = ask("PATCH", "/v1/devices/d", json!({"limit": {"group": "g"}}));
    assert_eq!(status, 200, "{said}");
    waits_until(other, || {
        let (status, said) = ask("PUT", "/v1/limits/g", json!({"bps": 0}));
        assert_eq!(status, 200, "{said}");
    });
    assert!(daemon.terminate().success());
}

#[test]
fn a_disk_becomes_smaller_under_a_guest_whose_device_process_ends_for_it() {
    const SECTORS: u64 = 2048;
    let daemon = serve("domains = 'user'", &disk("a", "file = '@/a.img'\n"), &["a"]);
    let mut driver = connect(&daemon, "a");
    let mut told = driver.front.open_backend_channel().unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let end = StopAtEnd(&is_over);
        let guest = scope.spawn(|| {
            let mut written = 0;
            while !is_over.load(Ordering::Relaxed) {
                driver.queues[0].write(written % SECTORS, &[7; 512]).unwrap();
                written += 1;
            }
            written
        });
        let before = processes(&daemon)[0]["pid"].clone();
        let body = json!({ "size": SECTORS * 512, "shrink": true }).to_string();
        let (status, said) =
            http_json(&daemon.socket_of("control"), "POST", "/v1/devices/a/resize", &body);
        assert_eq!((status, &said["size"]), (200, &(SECTORS * 512).into()), "{said}");
        let mut message = [0; 12];
        told.read_exact(&mut message).unwrap();
        let header = Header { request: BACKEND_CONFIG_CHANGE_MSG, flags: FLAG_VERSION, size: 0 };
        assert_eq!(message, header.emit());
        assert_ne!(
            processes(&daemon)[0]["pid"],
            before,
            "the requests of that device process have ended"
        );
        drop(end);
        assert!(guest.join().unwrap() > 0);
    });
    assert_eq!(driver.front.config(0, 8).unwrap(), SECTORS.to_le_bytes());
    let mut bytes = [0; 512];
    driver.queues[0].read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 512]);
    assert!(driver.queues[0].write(SECTORS, &[7; 512]).is_err(), "the disk has no such sector");
    let image = std::fs::metadata(daemon.folder().join("a.img")).unwrap();
    assert_eq!(image.len(), SECTORS * 512);
    assert!(daemon.terminate().success());
}

#[test]
fn a_lock_that_goes_with_the_rings_is_handed_over_between_device_processes() {
    let keys = |domain: &str| format!("file = '@/a.img'\nlock_with_rings = true\n{domain}");
    let source = serve("", &disk("a", &keys("domain = 'a'\n")), &["a"]);
    let image = source.folder().join("a.img").display().to_string();
    let other = |domain: &str| {
        let keys = keys(domain).replace("@/a.img", &image);
        serve("", &disk("b", &keys), &["b"])
    };
    let (in_process, in_supervisor) = (other("domain = 'b'\n"), other(""));
    let mut driver = connect(&source, "a");
    driver.queues[0].write(0, &[7; 4096]).unwrap();
    let refused = |target: &Daemon| {
        let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
        let driver = BlkDriver::connect(&target.socket_of("b"), &options);
        driver.is_err() || driver.unwrap().queues[0].read(0, &mut [0; 512]).is_err()
    };
    assert!(refused(&in_supervisor) && refused(&in_process), "the guest runs elsewhere");
    drop(driver);
    for target in [&in_process, &in_supervisor] {
        let mut driver = connect(target, "b");
        let mut bytes = [0; 4096];
        driver.queues[0].read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 4096]);
    }
    // The next device process takes the lock again for the guest of one that has died. When the
    // guest has left, the daemon that had the image can have it again.
    let mut driver = connect(&in_process, "b");
    driver.queues[0].write(0, &[1; 4096]).unwrap();
    kill(&in_process, "b");
    driver.queues[0].write(0, &[8; 4096]).unwrap();
    drop(driver);
    for target in [(&source, "a"), (&in_process, "b")] {
        let mut bytes = [0; 4096];
        connect(target.0, target.1).queues[0].read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [8; 4096]);
    }
    for daemon in [source, in_process, in_supervisor] {
        assert!(daemon.terminate().success());
    }
}

#[test]
fn an_image_that_is_only_read_is_served_in_several_device_processes_and_by_other_daemons() {
    let keys = "file = '@/a.img'\nread_only = true\n";
    let of = |name: &str| disk(name, &format!("{keys}domain = '{name}'\n"));
    let daemon = serve("", &[of("a"), of("b")].concat(), &["a", "b"]);
    let image = daemon.folder().join("a.img");
    let reads = |driver: &mut BlkDriver| driver.queues[0].read(0, &mut [0; 4096]).unwrap();
    let mut drivers = ["a", "b"].map(|name| connect(&daemon, name));
    drivers.iter_mut().for_each(reads);
    // Another daemon opens the image when device processes have it, and a device process that
    // begins again gets it.
    let table = of("c").replace("@/a.img", &image.display().to_string());
    let other = serve("", &table, &["c"]);
    reads(&mut connect(&other, "c"));
    kill(&daemon, "a");
    drivers.iter_mut().for_each(reads);
    let writes = manyring()
        .args(["blk", "--wait", "0", "--socket-path"])
        .arg(daemon.folder().join("d"))
        .arg("--blk-file")
        .arg(&image)
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&writes.stderr).contains("in use"), "{writes:?}");
    for daemon in [daemon, other] {
        assert!(daemon.terminate().success());
    }
}
