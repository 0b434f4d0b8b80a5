//! A device process that does nothing more: changes of its devices wait, and nobody else's do.
#![allow(clippy::disallowed_methods, reason = "a client of a test has a thread of its own")]

use crate::domain::{pid, process};
use crate::support::changes::{Supervisor, is_served};
use crate::support::client::Client;
use crate::support::process::{TIMEOUT, wait_until};
use crate::support::program::shown;
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

const CONFIG: &str = "[daemon]\ncontrol = '@/control'\nstate_dir = '@/state'\ndomains = 'device'\n";

/// A disk of this size in a domain.
fn disk(supervisor: &Supervisor, name: &str, size: &str, domain: &str) -> Value {
    json!({ "kind": "blk", "socket_path": supervisor.at(name), "null": size, "num_queues": 1,
            "domain": domain })
}

/// Whoever asks for `name`, of another domain, gets answers as if nothing was stopped.
fn others_go_on(supervisor: &Supervisor, name: &str, is_pending: impl Fn() -> bool) {
    let put = |size: &str| supervisor.put(name, &disk(supervisor, name, size, "good")).0;
    assert_eq!(put("1G"), 201);
    is_served(&supervisor.at(name));
    let path = format!("/v1/devices/{name}");
    let limit = json!({ "limit": { "iops": 1000 } });
    assert_eq!(supervisor.ask("PATCH", &path, &limit).0, 200);
    supervisor.is_left(name);
    // This retires a device, and makes it anew.
    assert!(wait_until(|| put("2G") == 200));
    assert_eq!(shown(&supervisor.control, &path)["size"], 2_u64 << 30);
    assert_eq!(supervisor.delete(name), 204);
    assert!(is_pending(), "they waited for the process that is stopped");
}

#[test]
fn a_stopped_device_process_holds_up_changes_of_its_own_devices_alone() {
    let supervisor = Supervisor::run(CONFIG);
    for name in ["gone", "anew", "other"] {
        let domain = if name == "other" { "good" } else { "bad" };
        assert_eq!(supervisor.put(name, &disk(&supervisor, name, "1G", domain)).0, 201);
    }
    let mut clients =
        ["gone", "anew", "other"].map(|name| Client::connect(&supervisor.at(name), 1));
    for client in &mut clients {
        client.submit_reads(0, 1);
        assert_eq!(client.wait_for(0, 1, TIMEOUT), 1);
    }
    let [_gone, anew, mut other] = clients;
    drop(anew);
    supervisor.is_left("anew");
    let stopped = pid(&supervisor.daemon, "bad");
    kill_process(stopped, Signal::STOP).unwrap();
    std::thread::scope(|scope| {
        let path = "/v1/devices/gone?force=true";
        let gone = scope.spawn(|| supervisor.ask("DELETE", path, &Value::Null).0);
        let anew = scope.spawn(|| supervisor.put("anew", &disk(&supervisor, "anew", "3G", "bad")));
        let is_pending = || !gone.is_finished() && !anew.is_finished();
        for name in ["a", "b"] {
            others_go_on(&supervisor, name, is_pending);
        }
        // Had each of them waited for an answer of the stopped process, the changes would be over.
        for _ in 0..60 {
            assert_eq!(shown(&supervisor.control, "/v1/devices/other")["connected"], true);
        }
        for _ in 0..60 {
            assert!(shown(&supervisor.control, "/v1/devices")["devices"].is_array());
        }
        assert!(is_pending());
        other.submit_reads(0, 1);
        assert_eq!(other.wait_for(0, 1, TIMEOUT), 1);
        // A change of a device that ends waits for its turn.
        let again = scope.spawn(|| supervisor.put("gone", &disk(&supervisor, "gone", "4G", "bad")));
        assert_eq!(gone.join().unwrap(), 204, "{}", supervisor.daemon.log());
        assert_eq!(anew.join().unwrap().0, 200, "{}", supervisor.daemon.log());
        assert_eq!(again.join().unwrap().0, 201, "{}", supervisor.daemon.log());
    });
    for (name, size) in [("anew", 3_u64 << 30), ("gone", 4 << 30)] {
        is_served(&supervisor.at(name));
        assert_eq!(shown(&supervisor.control, &format!("/v1/devices/{name}"))["size"], size);
    }
    let mut names = supervisor.names();
    names.sort();
    assert_eq!(names, ["anew", "gone", "other"]);
    assert_ne!(process(&supervisor.daemon, "bad")["pid"], stopped.as_raw_nonzero().get());
}
