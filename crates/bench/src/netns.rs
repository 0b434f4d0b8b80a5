//! Network namespaces that exist for one run, and the commands that run inside them.

use crate::peer;
use rustix::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// The tool that makes namespaces, and its package.
pub(crate) const IP: (&str, &str) = ("ip", "iproute2");
/// The first three numbers of all addresses of a run; the last one is the host number.
const NETWORK: &str = "10.77.0.";
/// Prefix of the names of all namespaces of a bench; the id of its process follows.
const PREFIX: &str = "manyring-bench-";
/// The folder in which namespaces have their files.
const FOLDER: &str = "/run/netns";
/// The TCP congestion control in every namespace of a run. Many hosts choose `bbr`, which sends at
/// a pace that it estimates from time to time: then the estimate would decide the throughput, not
/// the path between the two ends. `reno` has no pace, and is the only one that every kernel has and
/// permits in every namespace.
const CONGESTION_CONTROL: &str = "reno";
const CONGESTION_FILE: &str = "/proc/sys/net/ipv4/tcp_congestion_control";
/// Number of namespaces made so far, so that each one has a name of its own.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// A network namespace of this process; removed on drop, with all that is in it.
#[derive(Debug)]
pub(crate) struct Netns {
    name: String,
}

impl Netns {
    /// Makes an empty namespace with its loopback interface up.
    pub(crate) fn new() -> Result<Self, String> {
        peer::find(IP).map_err(|e| e.to_string())?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        if count == 0 {
            remove_abandoned();
        }
        let name = format!("{PREFIX}{}-{count}", std::process::id());
        ip(&["netns", "add", &name])?;
        let space = Self { name };
        space.ip(&["link", "set", "lo", "up"])?;
        visit(&space.path(), || std::fs::write(CONGESTION_FILE, CONGESTION_CONTROL))?
            .map_err(|e| format!("{CONGESTION_FILE}: {CONGESTION_CONTROL}: {e}"))?;
        Ok(space)
    }

    /// The name of the namespace, for `ip netns exec`.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The file of the namespace.
    pub(crate) fn path(&self) -> PathBuf {
        Path::new(FOLDER).join(&self.name)
    }

    /// Adds a tap that is up, with the address of host number `host` if that is given. Programs
    /// attach to it by its name.
    pub(crate) fn add_tap(&self, name: &str, queues: u16, host: Option<u8>) -> Result<(), String> {
        let mut arguments = vec!["tuntap", "add", "dev", name, "mode", "tap", "vnet_hdr"];
        if queues > 1 {
            arguments.push("multi_queue");
        }
        self.ip(&arguments)?;
        if let Some(host) = host {
            let address = format!("{}/24", address(host));
            self.ip(&["address", "add", &address, "dev", name])?;
        }
        self.ip(&["link", "set", name, "up"])
    }

    /// Sets how many frames each queue of a tap holds at most.
    pub(crate) fn set_length(&self, name: &str, frames: u16) -> Result<(), String> {
        self.ip(&["link", "set", name, "txqueuelen", &frames.to_string()])
    }

    /// Adds a bridge that is up.
    pub(crate) fn add_bridge(&self, name: &str) -> Result<(), String> {
        self.ip(&["link", "add", "name", name, "type", "bridge"])?;
        self.ip(&["link", "set", name, "up"])
    }

    /// Makes an interface a port of a bridge.
    pub(crate) fn join_bridge(&self, name: &str, bridge: &str) -> Result<(), String> {
        self.ip(&["link", "set", "dev", name, "master", bridge])
    }

    /// Adds a pair of interfaces that are up: one in this namespace, one in another. Each gets a
    /// name and the address of its host number. What is sent on one side is received on the other.
    pub(crate) fn add_veth(
        &self,
        (name, host): (&str, u8),
        other: &Self,
        (other_name, other_host): (&str, u8),
    ) -> Result<(), String> {
        self.ip(&[
            "link",
            "add",
            name,
            "type",
            "veth",
            "peer",
            "name",
            other_name,
            "netns",
            &other.name,
        ])?;
        for (space, name, host) in [(self, name, host), (other, other_name, other_host)] {
            space.ip(&["address", "add", &format!("{}/24", address(host)), "dev", name])?;
            space.ip(&["link", "set", name, "up"])?;
        }
        Ok(())
    }

    /// The command for a program that runs in the namespace.
    pub(crate) fn inside(&self, program: &Path) -> Command {
        let mut command = peer::apart(Path::new("ip"));
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }

    fn ip(&self, arguments: &[&str]) -> Result<(), String> {
        let mut all = vec!["-n", self.name.as_str()];
        all.extend(arguments);
        ip(&all)
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = ip(&["netns", "delete", &self.name]);
    }
}

/// Calls `there` on a thread that has entered the namespace of this file.
pub(crate) fn visit<T: Send>(netns: &Path, there: impl FnOnce() -> T + Send) -> Result<T, String> {
    let file = std::fs::File::open(netns).map_err(|e| e.to_string())?;
    let enter = || {
        let kind = rustix::thread::LinkNameSpaceType::Network;
        rustix::thread::move_into_link_name_space(file.as_fd(), Some(kind))
            .map_err(|e| e.to_string())?;
        Ok(there())
    };
    std::thread::scope(|scope| {
        scope.spawn(enter).join().unwrap_or_else(|_| Err("the thread panicked".to_owned()))
    })
}

/// Removes the namespaces of benches that were killed.
fn remove_abandoned() {
    for entry in std::fs::read_dir(FOLDER).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if let Some(name) = name.to_str().filter(|name| is_abandoned(name)) {
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

/// True for a namespace of a bench that no longer runs.
fn is_abandoned(name: &str) -> bool {
    let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
    let pid = pid.and_then(|(pid, _)| pid.parse::<u32>().ok());
    pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
}

/// The address with this host number.
pub(crate) fn address(host: u8) -> String {
    format!("{NETWORK}{host}")
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|e| format!("ip: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(format!("ip {}: {}", arguments.join(" "), words.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_namespaces_of_benches_that_are_gone_are_abandoned() {
        let own = format!("{PREFIX}{}-0", std::process::id());
        assert!(!is_abandoned(&own));
        assert!(is_abandoned("manyring-bench-4294967295-3"), "no process has this id");
        for other in ["manyring-bench", "manyring-bench-x-1", "guest", "manyring-bench-7"] {
            assert!(!is_abandoned(other), "{other}");
        }
    }
}
