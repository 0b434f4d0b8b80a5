//! A change that waits for the end of devices has what it adds and changes, too: nothing is served
//! twice, and nothing that was acknowledged is lost.
#![allow(clippy::disallowed_methods, reason = "a client of a test has a thread of its own")]

use crate::domain::pid;
use crate::support::changes::{Supervisor, is_served};
use crate::support::process::wait_until;
use crate::support::program::shown;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::path::Path;

const HEAD: &str = "[daemon]\ncontrol = '@/control'\nstate_dir = '@/state'\ndomains = 'device'\n";

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
