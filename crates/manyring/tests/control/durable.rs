//! The files that a change leaves behind where the disk of `state_dir` is full, or the daemon is
//! killed in the middle of it: all of the change or nothing, and a daemon that starts.

use crate::support::changes::{EMPTY, Supervisor, is_served};
use crate::support::process::{Daemon, is_root_or_left_out, wait_until};
use crate::support::program::{http, manyring, names_in, shown};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A small file system in memory; unmounted when dropped.
struct Small(PathBuf);

impl Small {
    fn mount(at: &Path) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=64k,mode=0700", "none"]).arg(at);
        assert!(mount.status().unwrap().success());
        Self(at.to_path_buf())
    }

    /// Takes all the room there is.
    fn fill(&self) {
        let mut file = std::fs::File::create(self.0.join("filler")).unwrap();
        while file.write_all(&[0; 4096]).is_ok() {}
    }

    fn make_room(&self) {
        std::fs::remove_file(self.0.join("filler")).unwrap();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

#[test]
fn change_that_cannot_be_kept_is_refused_and_undone() {
    if !is_root_or_left_out() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let state = Small::mount(&folder.path().join("state"));
    let supervisor = Supervisor::run(&EMPTY.replace("@/state", state.0.to_str().unwrap()));
    let lan = |mtu: u32| {
        let socket = supervisor.at("lan");
        json!({ "kind": "net", "socket_path": socket, "null": true, "mtu": mtu })
    };
    assert_eq!(supervisor.put("lan", &lan(1400)).0, 201);
    assert_eq!(supervisor.put("gone", &supervisor.null("gone")).0, 201);
    let mtu = || shown(&supervisor.control, "/v1/devices/lan")["mtu"].clone();
    state.fill();
    let kept = || {
        let folder = state.0.join("devices");
        let text = |name: &String| std::fs::read_to_string(folder.join(name)).unwrap();
        let names = names_in(&folder);
        (names.iter().map(text).collect::<Vec<_>>(), names)
    };
    let before =
        (kept(), supervisor.names(), supervisor.generation(), names_in(supervisor.daemon.folder()));
    let is_refused = |(status, answer): (u16, Value)| {
        let error = answer["error"].as_str().unwrap_or_default();
        assert!(status == 500 && error.contains("saving it failed"), "{status}: {answer}");
        let now = (
            kept(),
            supervisor.names(),
            supervisor.generation(),
            names_in(supervisor.daemon.folder()),
        );
        assert_eq!(now, before);
    };
    is_refused(supervisor.put("new", &supervisor.null("new")));
    is_refused(supervisor.put("lan", &lan(1300)));
    is_refused(supervisor.ask("PATCH", "/v1/devices/lan", &json!({ "mtu": 1300 })));
    assert_eq!(mtu(), 1400);
    is_served(&supervisor.at("gone"));
    assert!(wait_until(|| supervisor.delete("gone") == 204), "what goes needs no room");
    state.make_room();
    assert_eq!(supervisor.put("new", &supervisor.null("new")).0, 201);
    assert_eq!(supervisor.names(), ["lan", "new"]);
}

/// A daemon in a folder that outlives it.
fn start(folder: &TempDir) -> Supervisor {
    let (file, control) = (folder.path().join("manyring.toml"), folder.path().join("control"));
    let mut command = manyring();
    command.arg("run").arg("--config").arg(&file);
    // A process that was killed has left its socket.
    let _ = std::fs::remove_file(&control);
    let sockets = [control.clone()];
    let daemon = Daemon::start(command, tempfile::tempdir().unwrap(), &sockets);
    Supervisor { daemon, control }
}

/// Sends a request, and hears no answer yet.
fn ask(supervisor: &Supervisor, method: &str, path: &str, body: &Value) -> UnixStream {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let mut stream = UnixStream::connect(&supervisor.control).unwrap();
    let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n");
    write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    stream
}

/// Kills the daemon when this many names have come, gone or changed in these folders since the
/// request was sent, or when it has been answered. True: it was answered.
fn killed_after(supervisor: Supervisor, events: usize, request: (&str, &str, &Value)) -> bool {
    let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
    let folder = supervisor.control.parent().unwrap();
    let what = WatchFlags::CREATE | WatchFlags::MOVE | WatchFlags::DELETE | WatchFlags::CLOSE_WRITE;
    for folder in [folder, &folder.join("state/devices")] {
        inotify::add_watch(&watch, folder, what).unwrap();
    }
    let (method, path, body) = request;
    let mut stream = ask(&supervisor, method, path, body);
    stream.set_nonblocking(true).unwrap();
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(&watch, &mut buffer);
    let (mut seen, mut answer) = (0, [0; 12]);
    assert!(wait_until(|| {
        while reader.next().is_ok() {
            seen += 1;
        }
        seen >= events || stream.read(&mut answer).is_ok()
    }));
    drop(supervisor);
    if answer[0] == 0 {
        // The answer may have been on its way when the daemon was killed.
        let _ = stream.read(&mut answer);
    }
    answer.starts_with(b"HTTP/1.1 20")
}

/// How many queues a device has that is shown so.
fn queues_of(device: &str) -> usize {
    let device: Value = serde_json::from_str(device).unwrap();
    device["queues"].as_array().unwrap().len()
}

#[test]
fn daemon_that_is_killed_in_any_step_of_a_change_has_done_it_or_not() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let text = EMPTY.replace('@', folder.path().to_str().unwrap());
    std::fs::write(at("manyring.toml"), text).unwrap();
    let null = |queues: u32| {
        let socket = at("a");
        json!({ "kind": "blk", "socket_path": socket, "null": "1G", "num_queues": queues })
    };
    let none = Value::Null;
    // The requests, and how many queues the device has before and after each; 0: no device.
    let (put, delete) = (("PUT", "/v1/devices/a"), ("DELETE", "/v1/devices/a"));
    let (mut ended, mut before) = (0, 0);
    for events in 1..100 {
        for (ask, after) in [((put, null(1)), 1), ((put, null(2)), 2), ((delete, none.clone()), 0)]
        {
            let ((method, path), body) = ask;
            let is_answered = killed_after(start(&folder), events, (method, path, &body));
            let supervisor = start(&folder);
            let device = http(&supervisor.control, "GET", "/v1/devices/a", "");
            let queues = match device.0 {
                404 => 0,
                _ => queues_of(&device.2),
            };
            assert!(queues == after || queues == before && !is_answered, "{method}: {device:?}");
            if queues > 0 {
                is_served(&at("a"));
            }
            // The next change finds what it is told of here.
            let (status, _) = if after == 0 {
                (supervisor.delete("a"), none.clone())
            } else {
                supervisor.put("a", &body)
            };
            assert!(
                [200, 201, 204].contains(&status) || wait_until(|| supervisor.delete("a") == 204)
            );
            (before, ended) = (after, ended + usize::from(is_answered));
        }
        if ended == 3 {
            return;
        }
        ended = 0;
    }
    panic!("no change was done to its end");
}
