//! A daemon whose devices are changed while it runs, over its control socket or by its file.

use super::client::Client;
use super::process::{Daemon, TIMEOUT, wait_until};
use super::program::{http, manyring, shown};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A daemon without devices whose control socket is in a folder.
pub(crate) struct Supervisor {
    pub(crate) daemon: Daemon,
    pub(crate) control: PathBuf,
}

pub(crate) const EMPTY: &str = "[daemon]\ncontrol = '@/control'\nstate_dir = '@/state'\n";

impl Supervisor {
    pub(crate) fn run(configuration: &str) -> Self {
        let daemon = Daemon::run(configuration, &["control"]);
        let control = daemon.socket_of("control");
        Self { daemon, control }
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.daemon.socket_of(name)
    }

    pub(crate) fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (status, _, answer) = http(&self.control, method, path, &body);
        (status, serde_json::from_str(&answer).unwrap_or_default())
    }

    pub(crate) fn put(&self, name: &str, body: &Value) -> (u16, Value) {
        self.ask("PUT", &format!("/v1/devices/{name}"), body)
    }

    pub(crate) fn delete(&self, name: &str) -> u16 {
        self.ask("DELETE", &format!("/v1/devices/{name}"), &Value::Null).0
    }

    /// A disk that keeps nothing, with its socket beside the others.
    pub(crate) fn null(&self, name: &str) -> Value {
        json!({ "kind": "blk", "socket_path": self.at(name), "null": "1G", "num_queues": 1 })
    }

    pub(crate) fn generation(&self) -> u64 {
        let (status, head, _) = http(&self.control, "GET", "/v1/config", "");
        assert_eq!(status, 200);
        let tag = head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap();
        tag.trim_matches('"').parse().unwrap()
    }

    /// The daemon's descriptors, once their number changes no more.
    pub(crate) fn fds(&self) -> usize {
        let mut last = [0; 20];
        assert!(wait_until(|| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            last.rotate_left(1);
            last[19] = self.daemon.holdings().fds;
            last.iter().all(|fds| *fds == last[19])
        }));
        last[19]
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let all = shown(&self.control, "/v1/devices");
        let devices = all["devices"].as_array().unwrap();
        devices.iter().map(|device| device["name"].as_str().unwrap().to_owned()).collect()
    }

    /// Waits until the daemon has noticed that the device's client has left.
    pub(crate) fn is_left(&self, device: &str) {
        let path = format!("/v1/devices/{device}");
        assert!(wait_until(|| shown(&self.control, &path)["connected"] == false));
    }

    /// A command of the program that asks this daemon.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut program = manyring();
        program.args(arguments).arg("--control").arg(&self.control);
        program
    }
}

pub(crate) fn is_served(socket: &Path) {
    let mut client = Client::connect(socket, 1);
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, TIMEOUT), 1);
}

pub(crate) fn image(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    path
}

/// A configuration file, and a daemon that has read it.
pub(crate) fn configured(devices: &str) -> (TempDir, Supervisor) {
    let folder = tempfile::tempdir().unwrap();
    write(&folder, devices);
    let (file, control) = (folder.path().join("manyring.toml"), folder.path().join("control"));
    let mut command = manyring();
    command.arg("run").arg("--config").arg(file);
    let sockets = [control.clone()];
    let daemon = Daemon::start(command, tempfile::tempdir().unwrap(), &sockets);
    (folder, Supervisor { daemon, control })
}

pub(crate) fn write(folder: &TempDir, devices: &str) {
    let text = format!("[daemon]\ncontrol = '@/control'\n{devices}");
    let text = text.replace('@', folder.path().to_str().unwrap());
    std::fs::write(folder.path().join("manyring.toml"), text).unwrap();
}

pub(crate) fn null(name: &str) -> String {
    format!("[[blk]]\nname = '{name}'\nsocket_path = '@/{name}'\nnull = '1G'\nnum_queues = 1\n")
}
