//! A change that waits for the end of devices has what it adds and changes, too: nothing is served
//! twice, and nothing that was acknowledged is lost. Each user has few changes that wait for it.
#![allow(clippy::disallowed_methods, reason = "a client of a test has a thread of its own")]

use crate::domain::pid;
use crate::support::changes::{Supervisor, is_served};
use crate::support::process::{TIMEOUT, is_root_or_left_out, kill_and_reap, wait_until};
use crate::support::program::{manyring, output_of, shown};
use rustix::process::{Pid, Signal, Uid, kill_process};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};

const HEAD: &str = "[daemon]\ncontrol = '@/control'\nstate_dir = '@/state'\ndomains = 'device'\n";
/// The users who ask.
const BAD: u32 = 4711;
const GOOD: u32 = 4712;

/// The table of a disk in a domain.
fn table(name: &str, domain: &str, more: &str) -> String {
    format!(
        "[[blk]]\nname = '{name}'\nsocket_path = '@/{name}'\nnull = '1G'\nnum_queues = 1\n\
         domain = '{domain}'\n{more}"
    )
}

/// The body of a request for a disk of this size.
fn disk(socket: &Path, size: &str) -> Value {
    json!({ "kind": "blk", "socket_path": socket, "null": size, "num_queues": 1 })
}

/// Stops the device process of a disk, which it has from now on.
fn stop(supervisor: &Supervisor, device: &str, socket: &str, domain: &str) -> Pid {
    is_served(&supervisor.at(socket));
    supervisor.is_left(device);
    let process = pid(&supervisor.daemon, domain);
    kill_process(process, Signal::STOP).unwrap();
    process
}

/// The daemon has answered many others.
fn others_are_answered(supervisor: &Supervisor) {
    for _ in 0..60 {
        shown(&supervisor.control, "/v1/workers");
    }
}

#[test]
fn what_a_change_adds_or_changes_is_its_own_while_its_devices_end() {
    let group = |iops: u64| format!("{HEAD}[[limit]]\nname = 'g'\niops = {iops}\n");
    let before = group(1000) + &table("a", "bad", "") + &table("d", "good", "");
    let supervisor = &Supervisor::run(&before);
    let stopped = stop(supervisor, "a", "a", "bad");
    let after = table("b", "good", "") + &table("d", "good", "limit = { iops = 500 }\n");
    let after = group(2000) + &after;
    let folder = supervisor.daemon.folder();
    let text = after.replace('@', folder.to_str().unwrap());
    std::fs::write(folder.join("manyring.toml"), text).unwrap();
    std::thread::scope(|scope| {
        let reload = scope.spawn(|| supervisor.ask("POST", "/v1/reload", &Value::Null));
        assert!(wait_until(|| supervisor.at("b").exists()));
        let twin = scope.spawn(|| supervisor.put("b", &disk(&supervisor.at("twin"), "2G")));
        let other = scope.spawn(|| supervisor.put("other", &disk(&supervisor.at("b"), "2G")));
        let limit = json!({ "limit": { "bps": 1_000_000 } });
        let patched = scope.spawn(move || supervisor.ask("PATCH", "/v1/devices/d", &limit));
        let rate = json!({ "iops": 3000 });
        let group = scope.spawn(move || supervisor.ask("PUT", "/v1/limits/g", &rate));
        others_are_answered(supervisor);
        assert!(!reload.is_finished(), "it waits for the end of a device");
        kill_process(stopped, Signal::CONT).unwrap();
        let (status, answer) = reload.join().unwrap();
        assert_eq!(status, 200, "{answer}");
        for (what, asked) in [("name", twin), ("path", other)] {
            let (status, answer) = asked.join().unwrap();
            assert_eq!(status, 409, "the {what} is that of another: {answer}");
        }
        for asked in [patched, group] {
            let (status, answer) = asked.join().unwrap();
            assert_eq!(status, 200, "{answer}");
        }
    });
    let mut names = supervisor.names();
    names.sort();
    assert_eq!(names, ["b", "d"]);
    is_served(&supervisor.at("b"));
    let device = shown(&supervisor.control, "/v1/devices/b");
    assert_eq!((&device["size"], &device["origin"]), (&json!(1 << 30), &json!("file")));
    let config = shown(&supervisor.control, "/v1/config");
    let disks = config["blk"].as_array().unwrap();
    let changed = disks.iter().find(|disk| disk["name"] == "d").unwrap();
    let limit = &changed["limit"];
    assert_eq!((&limit["iops"], &limit["bps"]), (&json!(500), &json!(1_000_000)), "{config}");
    assert_eq!(config["limit"][0]["iops"], 3000, "{config}");
}

/// What `asks` gets as this user: the kernel notes the user of the thread that connects.
fn as_user<T: Send>(user: u32, asks: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let asked = scope.spawn(move || {
            let user = Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            asks()
        });
        asked.join().unwrap()
    })
}

/// The beginning of the answer that has come, if one has.
fn answer_of(stream: &mut UnixStream) -> Option<String> {
    let mut start = [0; 12];
    stream.set_nonblocking(true).unwrap();
    stream.read_exact(&mut start).ok()?;
    Some(String::from_utf8_lossy(&start).into_owned())
}

/// A daemon at whose control socket all users ask for disks below `vms`, and the disk `a` of one of
/// them, whose device process is stopped.
fn a_users_disk_does_not_stop() -> (Supervisor, Pid) {
    let config = format!("{HEAD}control_mode = '0666'\nallow_paths = ['@/vms']\n");
    let supervisor = Supervisor::run(&config);
    let folder = supervisor.daemon.folder();
    std::fs::set_permissions(folder, PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::create_dir(folder.join("vms")).unwrap();
    let put = || supervisor.put("a", &disk(&supervisor.at("vms/a"), "1G"));
    let (status, answer) = as_user(BAD, put);
    assert_eq!(status, 201, "{answer}");
    let stopped = stop(&supervisor, "a", "vms/a", "device:a");
    (supervisor, stopped)
}

#[test]
fn changes_of_a_user_whose_device_does_not_stop_hold_up_nobody_else() {
    if !is_root_or_left_out() {
        return;
    }
    let (supervisor, stopped) = a_users_disk_does_not_stop();
    let supervisor = &supervisor;
    let body = disk(&supervisor.at("vms/a"), "2G").to_string();
    let head = "PUT /v1/devices/a HTTP/1.1\r\nhost: x\r\ncontent-length:";
    let request = format!("{head} {}\r\n\r\n{body}", body.len());
    let ask = || {
        let mut stream = UnixStream::connect(&supervisor.control).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    };
    std::thread::scope(|scope| {
        let delete = || supervisor.ask("DELETE", "/v1/devices/a?force=true", &Value::Null).0;
        let deleted = scope.spawn(move || as_user(BAD, delete));
        others_are_answered(supervisor);
        let mut refused = Vec::new();
        // A change stays although its client leaves.
        for _ in 0..2 {
            let mut asked = as_user(BAD, || (0..12).map(|_| ask()).collect::<Vec<_>>());
            others_are_answered(supervisor);
            for (user, name) in [(0, "of_root"), (GOOD, "of_another")] {
                let socket = supervisor.at(&format!("vms/{name}"));
                let change = || supervisor.put(name, &disk(&socket, "1G"));
                let (status, answer) = as_user(user, change);
                assert!(matches!(status, 200 | 201), "{name}: {answer}");
            }
            assert!(!deleted.is_finished(), "they waited for a device of another user");
            let mut answers = vec![None; asked.len()];
            let max = if refused.is_empty() { 10 } else { 12 };
            assert!(wait_until(|| {
                for (answer, stream) in answers.iter_mut().zip(&mut asked) {
                    *answer = answer.take().or_else(|| answer_of(stream));
                }
                answers.iter().flatten().count() >= max
            }));
            refused.extend(answers.into_iter().flatten());
        }
        assert_eq!(refused, ["HTTP/1.1 503"; 22]);
        let next = || {
            let mut next = manyring();
            next.arg("run").arg("--config").arg(supervisor.daemon.folder().join("manyring.toml"));
            output_of(next.arg("--takeover").arg(&supervisor.control))
        };
        let output = next();
        let said = supervisor.daemon.log();
        let waits = "a change waits for devices that stop: a; try again later";
        assert!(!output.status.success() && said.contains(waits), "{said}");
        kill_process(stopped, Signal::CONT).unwrap();
        assert_eq!(deleted.join().unwrap(), 204);
    });
    let is_last = || {
        let device = supervisor.ask("GET", "/v1/devices/a", &Value::Null);
        device.1["size"] == json!(2_u64 << 30)
    };
    assert!(wait_until(is_last), "a change that waited was lost: {}", supervisor.daemon.log());
}

#[test]
fn a_takeover_waits_for_a_change_also_while_others_are_asked_for() {
    if !is_root_or_left_out() {
        return;
    }
    let (supervisor, stopped) = a_users_disk_does_not_stop();
    let folder = supervisor.daemon.folder();
    let body = disk(&supervisor.at("vms/b"), "1G").to_string();
    let head = "PUT /v1/devices/b HTTP/1.1\r\nhost: x\r\ncontent-length:";
    let request = format!("{head} {}\r\n\r\n{body}", body.len());
    assert_eq!(supervisor.put("c", &disk(&supervisor.at("vms/c"), "1G")).0, 201);
    std::thread::scope(|scope| {
        let delete = || supervisor.ask("DELETE", "/v1/devices/a?force=true", &Value::Null).0;
        let deleted = scope.spawn(move || as_user(BAD, delete));
        others_are_answered(&supervisor);
        let mut next = manyring();
        next.arg("run").arg("--config").arg(folder.join("manyring.toml"));
        next.arg("--takeover").arg(&supervisor.control);
        let next = next.stderr(Stdio::null()).spawn().unwrap();
        let mut next = Ends(next);
        // From now on it waits for the change, and no other begins.
        let resize = json!({ "size": 1_u64 << 30 });
        let is_locked = || supervisor.ask("POST", "/v1/devices/c/resize", &resize).0 == 409;
        assert!(wait_until(|| next.0.try_wait().unwrap().is_some() || is_locked()));
        let mut asked = UnixStream::connect(&supervisor.control).unwrap();
        asked.set_read_timeout(Some(TIMEOUT)).unwrap();
        asked.write_all(request.as_bytes()).unwrap();
        others_are_answered(&supervisor);
        kill_process(stopped, Signal::CONT).unwrap();
        assert_eq!(deleted.join().unwrap(), 204);
        // The daemon ends, and nobody was told that the other change is done.
        let mut answer = Vec::new();
        let _ = asked.read_to_end(&mut answer);
        assert_eq!(String::from_utf8_lossy(&answer), "", "{}", supervisor.daemon.log());
        assert!(wait_until(|| supervisor.daemon.log().contains("taken over by the next process")));
        assert!(next.0.try_wait().unwrap().is_none());
    });
}

/// A process that is killed at the end of a test.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        kill_and_reap(&mut self.0);
    }
}
