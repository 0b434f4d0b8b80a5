//! What will be done: every value resolved and checked, nothing opened yet.

mod net;

pub(crate) use net::{NetPlan, PortPlan, mac_text};

use super::raw::{RawBlk, RawConfig, RawDaemon, RawFault, RawSocket};
use manyring_transport::vhost_user::SocketPermissions;
use serde::Serialize;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// The plan of a process.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    pub(crate) daemon: DaemonPlan,
    pub(crate) blk: Vec<BlkPlan>,
    pub(crate) net: Vec<NetPlan>,
}

/// What concerns the whole process.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DaemonPlan {
    pub(crate) workers: usize,
    pub(crate) spin_us: u32,
    pub(crate) io_uring: bool,
    pub(crate) control: Option<PathBuf>,
}

/// What a device of every kind has: its name, and its front-end.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DevicePlan {
    pub(crate) name: String,
    pub(crate) socket: SocketPlan,
    pub(crate) one_off: bool,
    /// Seconds.
    pub(crate) handshake_timeout: u64,
}

/// A block device.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct BlkPlan {
    #[serde(flatten)]
    pub(crate) device: DevicePlan,
    pub(crate) disk: DiskPlan,
    pub(crate) read_only: bool,
    pub(crate) num_queues: usize,
    pub(crate) queue_size: u16,
    pub(crate) serial: String,
    pub(crate) writeback: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fault: Option<RawFault>,
}

/// Where the front-end comes from.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SocketPlan {
    Listen {
        path: PathBuf,
        #[serde(skip)]
        permissions: SocketPermissions,
    },
    Connect {
        path: PathBuf,
    },
    Fd(i32),
}

/// What the blocks end in.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DiskPlan {
    File { path: PathBuf, direct: bool },
    Null { size: u64 },
    Memory { size: u64 },
}

/// What is wrong with a configuration; names the device and the key.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}{key}: {problem}")]
pub(crate) struct PlanError {
    place: String,
    key: &'static str,
    problem: String,
}

impl Plan {
    /// Resolves and checks a whole configuration.
    pub(crate) fn new(raw: RawConfig) -> Result<Self, PlanError> {
        let daemon = DaemonPlan::new(&raw.daemon)?;
        let blk = raw
            .blk
            .into_iter()
            .enumerate()
            .map(|(index, raw)| BlkPlan::new(raw, index))
            .collect::<Result<Vec<_>, _>>()?;
        let net = raw
            .net
            .into_iter()
            .enumerate()
            .map(|(index, raw)| NetPlan::new(raw, index))
            .collect::<Result<Vec<_>, _>>()?;
        let plan = Self { daemon, blk, net };
        plan.check_unique()?;
        Ok(plan)
    }

    /// Every device, whatever its kind.
    fn devices(&self) -> impl Iterator<Item = &DevicePlan> {
        self.blk.iter().map(|blk| &blk.device).chain(self.net.iter().map(|net| &net.device))
    }

    fn check_unique(&self) -> Result<(), PlanError> {
        let (mut names, mut sockets) = (HashSet::new(), HashSet::new());
        for DevicePlan { name, socket, .. } in self.devices() {
            if !names.insert(name) {
                return error(name, "name", "is used by two devices");
            }
            let Some(path) = socket.path() else { continue };
            if !sockets.insert(path) {
                return error(name, "socket_path", "is used by two devices");
            }
            if self.daemon.control.as_deref() == Some(path) {
                return error(name, "socket_path", "is the control socket's too");
            }
        }
        if names.is_empty() {
            let (key, problem) = ("blk, net", "no device is configured".to_owned());
            return Err(PlanError { place: String::new(), key, problem });
        }
        self.check_files()?;
        net::check_ports(&self.net)
    }

    /// Devices that only read may share a file.
    fn check_files(&self) -> Result<(), PlanError> {
        let mut files = HashMap::new();
        for blk in &self.blk {
            if let DiskPlan::File { path, .. } = &blk.disk
                && let Some(reads) = files.insert(path, blk.read_only)
                && !(reads && blk.read_only)
            {
                return error(
                    &blk.device.name,
                    "file",
                    "is used by two devices, and not only read",
                );
            }
        }
        // A capture begins with an empty file.
        match self.net.iter().find(|net| net.pcap.as_ref().is_some_and(|p| files.contains_key(p))) {
            Some(net) => error(&net.device.name, "pcap", "is the file of a disk"),
            None => Ok(()),
        }
    }
}

/// `place` is the name of a device, or `daemon`.
fn error<T>(place: &str, key: &'static str, problem: impl Into<String>) -> Result<T, PlanError> {
    Err(PlanError { place: format!("{place}: "), key, problem: problem.into() })
}

impl DaemonPlan {
    fn new(raw: &RawDaemon) -> Result<Self, PlanError> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = raw.workers.unwrap_or(cpus);
        let spin_us = raw.spin_us.unwrap_or(32);
        if !(1..=256).contains(&workers) {
            return error("daemon", "workers", format!("{workers} is not between 1 and 256"));
        }
        if spin_us > 32 {
            return error("daemon", "spin_us", format!("{spin_us} is more than 32 microseconds"));
        }
        let io_uring = raw.io_uring.unwrap_or(true);
        Ok(Self { workers, spin_us, io_uring, control: raw.control.clone() })
    }
}

impl BlkPlan {
    fn new(raw: RawBlk, index: usize) -> Result<Self, PlanError> {
        let name = raw.name.clone().unwrap_or_else(|| format!("blk{index}"));
        check_name(&name)?;
        let num_queues = raw.num_queues.unwrap_or(8);
        if !(1..=256).contains(&num_queues) {
            return error(&name, "num_queues", format!("{num_queues} is not between 1 and 256"));
        }
        let queue_size = raw.queue_size.unwrap_or(128);
        if !queue_size.is_power_of_two() || !(4..=1024).contains(&queue_size) {
            let problem = format!("{queue_size} is not a power of two between 4 and 1024");
            return error(&name, "queue_size", problem);
        }
        let serial = raw.serial.clone().unwrap_or_else(|| name.chars().take(20).collect());
        if serial.len() > 20 || !serial.is_ascii() {
            return error(&name, "serial", "must be at most 20 ASCII characters");
        }
        let writeback = match raw.cache.as_deref() {
            None | Some("writeback") => true,
            Some("writethrough") => false,
            Some(other) => {
                let problem = format!("{other:?} is neither \"writeback\" nor \"writethrough\"");
                return error(&name, "cache", problem);
            }
        };
        let device = DevicePlan::new(name, raw.socket())?;
        Ok(Self {
            disk: DiskPlan::new(&raw, &device.name)?,
            read_only: raw.read_only,
            num_queues,
            queue_size,
            serial,
            writeback,
            fault: raw.fault,
            device,
        })
    }
}

impl DevicePlan {
    /// `name` has been checked.
    fn new(name: String, raw: RawSocket) -> Result<Self, PlanError> {
        let handshake_timeout = raw.handshake_timeout.unwrap_or(10);
        if !(1..=3600).contains(&handshake_timeout) {
            let problem = format!("{handshake_timeout} is not between 1 and 3600 seconds");
            return error(&name, "handshake_timeout", problem);
        }
        let (one_off, socket) = (raw.one_off, SocketPlan::new(raw, &name)?);
        Ok(Self { name, socket, one_off, handshake_timeout })
    }
}

fn check_name(name: &str) -> Result<(), PlanError> {
    if is_device_name(name) {
        return Ok(());
    }
    let problem = "must be 1 to 64 letters, digits, '-', '_' or '.'";
    error(&format!("{name:?}"), "name", problem)
}

impl SocketPlan {
    fn new(raw: RawSocket, device: &str) -> Result<Self, PlanError> {
        let mode = match raw.socket_mode.as_deref() {
            None => None,
            Some(text) => match u32::from_str_radix(text, 8) {
                Ok(mode) if mode <= 0o777 => Some(mode),
                _ => {
                    let problem = format!("{text:?} is not an octal mode up to 0777");
                    return error(device, "socket_mode", problem);
                }
            },
        };
        match (raw.socket_path, raw.fd) {
            (Some(_), Some(_)) => error(device, "fd", "contradicts socket_path"),
            (None, None) => error(device, "socket_path", "is missing (or fd)"),
            (None, Some(_)) if raw.client => error(device, "client", "needs socket_path"),
            (None, Some(fd)) if fd < 3 => {
                error(device, "fd", format!("{fd} is not a socket that was handed in"))
            }
            (None, Some(fd)) => Ok(Self::Fd(fd)),
            (Some(path), None) if raw.client => Ok(Self::Connect { path }),
            (Some(path), None) => {
                let (owner, group) = (raw.socket_owner, raw.socket_group);
                Ok(Self::Listen { path, permissions: SocketPermissions { owner, group, mode } })
            }
        }
    }

    /// The socket's name, if it has one.
    fn path(&self) -> Option<&Path> {
        match self {
            Self::Listen { path, .. } | Self::Connect { path } => Some(path),
            Self::Fd(_) => None,
        }
    }
}

impl DiskPlan {
    fn new(raw: &RawBlk, device: &str) -> Result<Self, PlanError> {
        let size_of = |key: &'static str, text: &str| match parse_size(text) {
            Some(size) if size >= 512 && size.is_multiple_of(512) => Ok(size),
            _ => error(device, key, format!("{text:?} is not a size in whole sectors, like 64G")),
        };
        if raw.direct && raw.file.is_none() {
            return error(device, "direct", "needs file");
        }
        match (&raw.file, &raw.null, &raw.memory) {
            (Some(path), None, None) => Ok(Self::File { path: path.clone(), direct: raw.direct }),
            (None, Some(size), None) => Ok(Self::Null { size: size_of("null", size)? }),
            (None, None, Some(size)) => Ok(Self::Memory { size: size_of("memory", size)? }),
            (None, None, None) => error(device, "file", "is missing (or null, or memory)"),
            _ => error(device, "file", "only one of file, null and memory can be served"),
        }
    }
}

/// True for 1 to 64 letters, digits, '-', '_' and '.': fit for paths, labels and logs.
pub(crate) fn is_device_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=64).contains(&name.len()) && name.chars().all(is_plain)
}

/// A size in bytes, or with K, M, G or T (powers of 1024).
pub(crate) fn parse_size(text: &str) -> Option<u64> {
    let unit = text.chars().last()?.to_ascii_uppercase();
    let shift = match unit {
        'K' => 10,
        'M' => 20,
        'G' => 30,
        'T' => 40,
        _ => 0,
    };
    let digits = if shift == 0 { text } else { &text[..text.len() - 1] };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The plan of a configuration, or the words of the error.
    pub(super) fn plan(toml: &str) -> Result<Plan, String> {
        let raw = toml::from_str(toml).map_err(|e| e.to_string())?;
        Plan::new(raw).map_err(|e| e.to_string())
    }

    #[test]
    fn a_short_file_gets_its_defaults() {
        let plan = plan("[[blk]]\nname = 'a'\nsocket_path = '/s'\nnull = '1G'\n").unwrap();
        assert_eq!((plan.blk[0].num_queues, plan.blk[0].queue_size), (8, 128));
        assert!(matches!(plan.blk[0].disk, DiskPlan::Null { size: 0x4000_0000 }));
    }

    #[test]
    fn every_error_names_its_key() {
        let base = "[[blk]]\nname = 'a'\nsocket_path = '/s'\n";
        for (toml, key) in [
            (format!("{base}null = '1G'\nfile = '/x'"), "file"),
            (base.to_owned(), "file"),
            (format!("{base}null = '1000'"), "null"),
            (format!("{base}null = '1G'\ncolour = 1"), "colour"),
            (format!("{base}null = '1G'\nnum_queues = 0"), "num_queues"),
            (format!("{base}null = '1G'\nqueue_size = 100"), "queue_size"),
            (format!("{base}null = '1G'\ndirect = true"), "direct"),
            (format!("{base}null = '1G'\nfd = 3"), "fd"),
            (format!("{base}null = '1G'\ncache = 'none'"), "cache"),
            (format!("{base}null = '1G'\nsocket_mode = '999'"), "socket_mode"),
            (format!("{base}null = '1G'\n{base}null = '1G'"), "name"),
            (format!("[daemon]\nspin_us = 99\n{base}null = '1G'"), "spin_us"),
            (String::new(), "blk"),
        ] {
            let message = plan(&toml).expect_err(&toml);
            assert!(message.contains(key), "{toml}\n-> {message}");
        }
    }

    #[test]
    fn a_file_is_shared_only_by_devices_that_only_read() {
        let device = |name: &str, read_only: bool| {
            let names = format!("[[blk]]\nname = '{name}'\nsocket_path = '/{name}'\n");
            format!("{names}file = '/f'\nread_only = {read_only}\n")
        };
        assert!(plan(&(device("a", true) + &device("b", true))).is_ok());
        for (a, b) in [(true, false), (false, true), (false, false)] {
            let error = plan(&(device("a", a) + &device("b", b))).expect_err("shared");
            assert!(error.contains("b: file"), "{error}");
        }
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_size("64G"), Some(64 << 30));
        assert_eq!(parse_size("512"), Some(512));
        assert_eq!(parse_size("2k"), Some(2048));
        assert_eq!(parse_size("x"), None);
        assert_eq!(parse_size(""), None);
        assert_eq!(parse_size("99999999999T"), None);
    }
}
