//! Network namespaces that last as long as a run, and what is done inside them.

use crate::peer;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// The tool that makes namespaces, and its package.
const IP: (&str, &str) = ("ip", "iproute2");
/// The network of a run: this, and the last number of an address.
const NETWORK: &str = "10.77.0.";
/// Runs so far: no namespace has the name of one before.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// A network namespace of this process; removed on drop, with all that is in it.
#[derive(Debug)]
pub(crate) struct Netns {
    name: String,
}

impl Netns {
    /// An empty namespace, its loopback interface up.
    pub(crate) fn new() -> Result<Self, String> {
        peer::find(IP).map_err(|e| e.to_string())?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("manyring-bench-{}-{count}", std::process::id());
        ip(&["netns", "add", &name])?;
        let space = Self { name };
        space.ip(&["link", "set", "lo", "up"])?;
        Ok(space)
    }

    /// Its name, for `ip netns exec`.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Its file.
    pub(crate) fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    /// A tap that is up; with the address of this host number, if there is one. Programs join it
    /// by its name.
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

    /// A program that runs inside.
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

/// The address of a host of a run.
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
