//! Many devices of one daemon, disks and networks in turn, and guests that only hold them.

use crate::measure::Affinity;
use crate::peer::{self, Server};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

/// The keys of a device after its name and socket: the disks and the ports of a crowd's guests. A
/// request or frame costs neither of them anything.
const DISK: (&str, &str) = ("blk", "null = '64G'");
const NET: (&str, &str) = ("net", "null = true");

/// Disks of eight queues, as a VMM makes them for eight CPUs: for a crowd of one kind.
const DISK_OF_EIGHT: (&str, &str) = ("blk", "null = '64G'\nnum_queues = 8");

/// The kinds of the devices of a crowd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Devices {
    /// Disks of one queue and networks of one pair in turn.
    #[default]
    InTurn,
    /// Disks of eight queues.
    Disks,
    /// Networks of one pair.
    Networks,
}

/// The devices of a daemon, and where they lie.
#[derive(Clone, Debug)]
pub(super) struct CrowdDevices {
    folder: PathBuf,
    count: usize,
    devices: Devices,
    has_processes: bool,
}

impl CrowdDevices {
    /// `count` devices with their sockets in `folder`.
    pub(super) fn new(folder: &Path, count: usize) -> Self {
        let (folder, devices) = (folder.to_path_buf(), Devices::default());
        Self { folder, count, devices, has_processes: false }
    }

    /// Devices of one kind. `has_processes`: in the device process of their user, as by default.
    pub(super) fn of(self, devices: Devices, has_processes: bool) -> Self {
        Self { devices, has_processes, ..self }
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The socket of a device.
    pub(super) fn socket(&self, index: usize) -> PathBuf {
        self.folder.join(name(index))
    }

    /// The socket that appears when all are there.
    pub(super) fn last_socket(&self) -> PathBuf {
        self.socket(self.count.saturating_sub(1))
    }

    /// The control socket of their daemon.
    pub(super) fn control(&self) -> PathBuf {
        self.folder.join("control")
    }

    /// The daemon's configuration: its section, then the devices, of which `first` (the section and
    /// its keys) may take the place of the first one. Without device processes one process serves
    /// them all, whose CPU time, memory and instructions are those of the daemon then.
    pub(super) fn config(&self, daemon: &str, first: Option<(&str, &str)>) -> String {
        let control = self.control();
        let control = control.display();
        let domains = if self.has_processes { "user" } else { "one" };
        let mut text =
            format!("[daemon]\ncontrol = '{control}'\ndomains = '{domains}'\n{daemon}\n");
        for index in 0..self.count {
            let own = first.filter(|_| index == 0);
            let (kind, more) = own.unwrap_or(self.section(index));
            let (name, socket) = (name(index), self.socket(index));
            let socket = socket.display();
            let _ =
                write!(text, "\n[[{kind}]]\nname = '{name}'\nsocket_path = '{socket}'\n{more}\n");
        }
        text
    }

    /// Starts their daemon with this configuration and more arguments.
    pub(super) fn serve(
        &self,
        manyring: &Path,
        config: &str,
        extra: &[OsString],
        affinity: &Affinity,
    ) -> Result<Server, String> {
        let file = self.folder.join("config");
        std::fs::write(&file, config).map_err(|e| format!("{}: {e}", file.display()))?;
        let own: [OsString; 4] =
            ["run".into(), "--log-level=error".into(), "--config".into(), file.into()];
        let arguments = [&own[..], extra].concat();
        let server = Server::start(manyring, &arguments, &self.last_socket(), affinity);
        server.map_err(|e| e.to_string())
    }

    fn section(&self, index: usize) -> (&'static str, &'static str) {
        match self.devices {
            Devices::Disks => DISK_OF_EIGHT,
            _ if self.is_disk(index) => DISK,
            _ => NET,
        }
    }

    fn is_disk(&self, index: usize) -> bool {
        match self.devices {
            Devices::InTurn => index.is_multiple_of(2),
            of => of == Devices::Disks,
        }
    }
}

/// The name of a device.
pub(super) fn name(index: usize) -> String {
    format!("guest{index}")
}

/// Guests that hold devices; they leave on drop.
#[derive(Debug)]
pub(super) struct Crowd(Child);

impl Crowd {
    /// Connects a guest to each of these devices, and waits until all are connected.
    pub(super) fn connect(
        devices: &CrowdDevices,
        held: impl Iterator<Item = usize>,
        affinity: &Affinity,
    ) -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|e| e.to_string())?;
        let mut command = peer::apart(&program);
        command.args(["load", "crowd"]);
        if devices.devices == Devices::Disks {
            command.args(["--disk-queues", "8"]);
        }
        for index in held {
            command.arg(if devices.is_disk(index) { "--disk" } else { "--net" });
            command.arg(devices.socket(index));
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = peer::spawn_among_others(&mut command, affinity).map_err(|e| e.to_string())?;
        let mut crowd = Self(child);
        let mut line = String::new();
        if let Some(output) = &mut crowd.0.stdout {
            BufReader::new(output).read_line(&mut line).map_err(|e| e.to_string())?;
        }
        if line.trim() == "ready" { Ok(crowd) } else { Err(crowd.last_words()) }
    }

    fn last_words(&mut self) -> String {
        let mut text = String::new();
        if let Some(stderr) = &mut self.0.stderr {
            let _ = stderr.read_to_string(&mut text);
        }
        format!("the crowd ended: {}", text.trim())
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_has_disks_and_networks_in_turn_and_may_begin_with_another_device() {
        let devices = CrowdDevices::new(Path::new("/f"), 5);
        let text = devices.config("workers = 1", None);
        let head = "[daemon]\ncontrol = '/f/control'\ndomains = 'one'\nworkers = 1\n";
        assert!(text.starts_with(head), "{text}");
        assert_eq!((text.matches("[[blk]]").count(), text.matches("[[net]]").count()), (3, 2));
        let text = devices.config("", Some(("net", "null = true\ngenerate = 64")));
        assert_eq!((text.matches("[[blk]]").count(), text.matches("[[net]]").count()), (2, 3));
        let first = "name = 'guest0'\nsocket_path = '/f/guest0'\nnull = true\ngenerate = 64";
        assert!(text.contains(first), "{text}");
        assert_eq!(devices.last_socket(), Path::new("/f/guest4"));
    }
}
