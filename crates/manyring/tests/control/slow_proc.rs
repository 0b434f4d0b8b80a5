//! Reads of /proc that do not come back, as where many programs read it: who asks for what is read
//! there waits, and nobody else does. Needs root, for mounts and FUSE.
#![allow(clippy::disallowed_methods, reason = "a client of a test has a thread of its own")]

use crate::support::changes::{Supervisor, is_served};
use crate::support::process::{Daemon, TIMEOUT, is_root_or_left_out, wait_until};
use crate::support::program::{http, shown};
use serde_json::Value;
use std::fs::File;
use std::os::unix::net::UnixDatagram;
use std::process::Command;

/// A daemon in a namespace of mounts of its own, started with these variables.
fn run(variables: &str, configuration: &str) -> Supervisor {
    let how = format!("{variables} exec unshare --mount");
    let daemon = Daemon::run_behind(&how, configuration, &["control"]);
    let control = daemon.socket_of("control");
    Supervisor { daemon, control }
}

/// Has the daemon wait for whatever it looks for in this folder, until the file is dropped.
fn hold(daemon: &Daemon, folder: &str) -> File {
    let server = File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let mut mount = Command::new("nsenter");
    mount.arg("--target").arg(daemon.pid().to_string()).arg("--mount");
    mount.args(["mount", "-i", "-t", "fuse", "-o", "fd=0,rootmode=40000,user_id=0,group_id=0"]);
    let mounted = mount.args(["none", folder]).stdin(server.try_clone().unwrap()).status();
    assert!(mounted.unwrap().success(), "{folder}");
    server
}

/// How many of the daemon's threads wait in the folder that is held.
fn waiting(daemon: &Daemon) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap().flatten();
    let places = tasks.flat_map(|task| std::fs::read_to_string(task.path().join("wchan")));
    places.filter(|place| place.contains("fuse")).count()
}

#[test]
fn clients_are_answered_though_the_names_of_their_programs_cannot_be_read() {
    if !is_root_or_left_out() {
        return;
    }
    let supervisor = run("", "[daemon]\ncontrol = '@/control'\n");
    let held = hold(&supervisor.daemon, &format!("/proc/{}", std::process::id()));
    // More clients than threads that may wait there.
    for _ in 0..8 {
        assert_eq!(http(&supervisor.control, "GET", "/v1", "").0, 200);
    }
    assert_eq!(supervisor.put("a", &supervisor.null("a")).0, 201);
    assert!(waiting(&supervisor.daemon) > 0);
    let changed = |comm: &str| {
        let log = supervisor.daemon.log();
        log.lines().any(|line| line.contains("changed") && line.contains(&format!("comm=\"{comm}")))
    };
    assert!(wait_until(|| changed("\"")), "{}", supervisor.daemon.log());
    is_served(&supervisor.at("a"));
    drop(held);
    assert!(wait_until(|| waiting(&supervisor.daemon) == 0));
}

#[test]
fn who_waits_for_the_times_of_workers_keeps_no_session_no_change_and_no_watchdog_waiting() {
    if !is_root_or_left_out() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(TIMEOUT)).unwrap();
    let variables = format!("NOTIFY_SOCKET={} WATCHDOG_USEC=200000", path.display());
    let supervisor = run(&variables, "[daemon]\ncontrol = '@/control'\ndomains = 'one'\n");
    let fed = || {
        let mut bytes = [0; 1024];
        let count = manager.recv(&mut bytes).unwrap();
        bytes[..count] == *b"WATCHDOG=1\n"
    };
    assert_eq!(supervisor.put("a", &supervisor.null("a")).0, 201);
    // A worker runs, whose times can be read.
    is_served(&supervisor.at("a"));
    let held = hold(&supervisor.daemon, &format!("/proc/{}/task", supervisor.daemon.pid()));
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| shown(&supervisor.control, "/v1/workers"));
        assert!(wait_until(|| waiting(&supervisor.daemon) > 0));
        is_served(&supervisor.at("a"));
        assert_eq!(supervisor.put("b", &supervisor.null("b")).0, 201);
        is_served(&supervisor.at("b"));
        assert_eq!(supervisor.ask("GET", "/v1/devices/b", &Value::Null).0, 200);
        // Those that were sent before are read.
        manager.set_nonblocking(true).unwrap();
        while manager.recv(&mut [0; 1024]).is_ok() {}
        manager.set_nonblocking(false).unwrap();
        for _ in 0..4 {
            while !fed() {}
        }
        assert!(!asked.is_finished());
        drop(held);
        assert_eq!(asked.join().unwrap()["workers"][0]["running"], true);
    });
}
