//! What will be done: every value resolved and checked, nothing opened yet.

mod net;

pub(crate) use net::{NetPlan, PortPlan, mac_text};

use super::raw::{RawBlk, RawConfig, RawDaemon, RawFault, RawSocket};
use manyring_transport::vhost_user::SocketPermissions;
use serde::Serialize;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

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

/// A block device.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct BlkPlan {
    pub(crate) name: String,
    pub(crate) socket: SocketPlan,
    pub(crate) one_off: bool,
    pub(crate) handshake_timeout: u64,
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

    fn check_unique(&self) -> Result<(), PlanError> {
        if self.blk.is_empty() && self.net.is_empty() {
            return error(String::new(), "blk, net", "no device is configured");
        }
        let (mut names, mut sockets) = (HashSet::new(), HashSet::new());
        let blks = self.blk.iter().map(|blk| (&blk.name, &blk.socket));
        for (name, socket) in blks.chain(self.net.iter().map(|net| (&net.name, &net.socket))) {
            let place = || format!("{name}: ");
            if !names.insert(name) {
                return error(place(), "name", "is used by two devices");
            }
            let (SocketPlan::Listen { path, .. } | SocketPlan::Connect { path }) = socket else {
                continue;
            };
            if !sockets.insert(path) {
                return error(place(), "socket_path", "is used by two devices");
            }
            if self.daemon.control.as_ref() == Some(path) {
                return error(place(), "socket_path", "is the control socket's too");
            }
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
                let place = format!("{}: ", blk.name);
                return error(place, "file", "is used by two devices, and not only read");
            }
        }
        // A capture begins with an empty file.
        match self.net.iter().find(|net| net.pcap.as_ref().is_some_and(|p| files.contains_key(p))) {
            Some(net) => error(format!("{}: ", net.name), "pcap", "is the file of a disk"),
            None => Ok(()),
        }
    }
}

fn error<T>(place: String, key: &'static str, problem: impl Into<String>) -> Result<T, PlanError> {
    Err(PlanError { place, key, problem: problem.into() })
}

impl DaemonPlan {
    fn new(raw: &RawDaemon) -> Result<Self, PlanError> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = raw.workers.unwrap_or(cpus);
        let spin_us = raw.spin_us.unwrap_or(32);
        let place = || "daemon: ".to_owned();
        if !(1..=256).contains(&workers) {
            return error(place(), "workers", format!("{workers} is not between 1 and 256"));
        }
        if spin_us > 32 {
            return error(place(), "spin_us", format!("{spin_us} is more than 32 microseconds"));
        }
        let io_uring = raw.io_uring.unwrap_or(true);
        Ok(Self { workers, spin_us, io_uring, control: raw.control.clone() })
    }
}

impl BlkPlan {
    fn new(raw: RawBlk, index: usize) -> Result<Self, PlanError> {
        let name = raw.name.clone().unwrap_or_else(|| format!("blk{index}"));
        let place = || format!("{name}: ");
        check_name(&name)?;
        let num_queues = raw.num_queues.unwrap_or(8);
        if !(1..=256).contains(&num_queues) {
            return error(place(), "num_queues", format!("{num_queues} is not between 1 and 256"));
        }
        let queue_size = raw.queue_size.unwrap_or(128);
        if !queue_size.is_power_of_two() || !(4..=1024).contains(&queue_size) {
            let problem = format!("{queue_size} is not a power of two between 4 and 1024");
            return error(place(), "queue_size", problem);
        }
        let serial = raw.serial.clone().unwrap_or_else(|| name.chars().take(20).collect());
        if serial.len() > 20 || !serial.is_ascii() {
            return error(place(), "serial", "must be at most 20 ASCII characters");
        }
        let writeback = match raw.cache.as_deref() {
            None | Some("writeback") => true,
            Some("writethrough") => false,
            Some(other) => {
                let problem = format!("{other:?} is neither \"writeback\" nor \"writethrough\"");
                return error(place(), "cache", problem);
            }
        };
        let handshake_timeout = handshake_timeout(raw.socket(), place)?;
        Ok(Self {
            socket: SocketPlan::new(raw.socket(), place)?,
            disk: DiskPlan::new(&raw, place)?,
            one_off: raw.one_off,
            handshake_timeout,
            read_only: raw.read_only,
            num_queues,
            queue_size,
            serial,
            writeback,
            fault: raw.fault,
            name,
        })
    }
}

fn check_name(name: &str) -> Result<(), PlanError> {
    if is_device_name(name) {
        return Ok(());
    }
    let problem = "must be 1 to 64 letters, digits, '-', '_' or '.'";
    error(format!("{name:?}: "), "name", problem)
}

fn handshake_timeout(raw: RawSocket<'_>, place: impl Fn() -> String) -> Result<u64, PlanError> {
    let seconds = raw.handshake_timeout.unwrap_or(10);
    if (1..=3600).contains(&seconds) {
        return Ok(seconds);
    }
    let problem = format!("{seconds} is not between 1 and 3600 seconds");
    error(place(), "handshake_timeout", problem)
}

impl SocketPlan {
    fn new(raw: RawSocket<'_>, place: impl Fn() -> String) -> Result<Self, PlanError> {
        let key = "socket_path";
        let mode = match raw.mode {
            None => None,
            Some(text) => match u32::from_str_radix(text, 8) {
                Ok(mode) if mode <= 0o777 => Some(mode),
                _ => {
                    let problem = format!("{text:?} is not an octal mode up to 0777");
                    return error(place(), "socket_mode", problem);
                }
            },
        };
        match (raw.path, raw.fd) {
            (Some(_), Some(_)) => error(place(), "fd", "contradicts socket_path"),
            (None, None) => error(place(), key, "is missing (or fd)"),
            (None, Some(_)) if raw.client => error(place(), "client", "needs socket_path"),
            (None, Some(fd)) if fd < 3 => {
                error(place(), "fd", format!("{fd} is not a socket that was handed in"))
            }
            (None, Some(fd)) => Ok(Self::Fd(fd)),
            (Some(path), None) if raw.client => Ok(Self::Connect { path: path.clone() }),
            (Some(path), None) => Ok(Self::Listen {
                path: path.clone(),
                permissions: SocketPermissions { owner: raw.owner, group: raw.group, mode },
            }),
        }
    }
}

impl DiskPlan {
    fn new(raw: &RawBlk, place: impl Fn() -> String) -> Result<Self, PlanError> {
        let size_of = |key: &'static str, text: &str| match parse_size(text) {
            Some(size) if size >= 512 && size.is_multiple_of(512) => Ok(size),
            _ => error(place(), key, format!("{text:?} is not a size in whole sectors, like 64G")),
        };
        if raw.direct && raw.file.is_none() {
            return error(place(), "direct", "needs file");
        }
        match (&raw.file, &raw.null, &raw.memory) {
            (Some(path), None, None) => Ok(Self::File { path: path.clone(), direct: raw.direct }),
            (None, Some(size), None) => Ok(Self::Null { size: size_of("null", size)? }),
            (None, None, Some(size)) => Ok(Self::Memory { size: size_of("memory", size)? }),
            (None, None, None) => error(place(), "file", "is missing (or null, or memory)"),
            _ => error(place(), "file", "only one of file, null and memory can be served"),
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

    fn plan(toml: &str) -> Result<Plan, String> {
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
