//! The plan: the configuration with every value resolved and checked, before anything is opened.

mod access;
mod allowed_path;
mod blk;
mod daemon;
mod devices;
mod domain;
mod fault;
mod format;
pub mod limit;
mod nbd;
mod net;
mod on_full;
mod paths;
mod pins;
mod polling;
mod sandbox;
mod socket;
mod switch;
mod unique;
mod uplinks;
mod wanted;
mod xen;

pub use super::key_class::Class;
pub use super::place::{Place, PlanError, Source};
pub use access::AccessPlan;
pub use allowed_path::Pinned;
pub use blk::{BlkPlan, DiskKind, DiskPlan, NUM_QUEUES};
pub use daemon::{DaemonPlan, Domains, Numa};
pub use domain::{ANY_USER, SWITCH, XEN, domain_of_switch};
pub use format::{Format, HelperPlan, helped};
pub use limit::{GroupPlan, LimitPlan};
pub use nbd::NbdPlan;
pub use net::{NetPlan, PortKind, PortPlan, mac_text};
pub use paths::unexpanded;
pub use pins::in_words;
pub use polling::PollingPlan;
pub use sandbox::Sandbox;
pub use socket::SocketPlan;
pub use switch::{SwitchPlan, SwitchPortPlan, UplinkKind};
pub use wanted::{Unfound, Wanted};
pub use xen::{STATE_DIR, XenBlkPlan, XenPlan};

use super::limit_keys::Of;
pub use super::tables::class_of;
use super::tables::{RawConfig, RawDaemon, RawSize, RawSocket};
use manyring_engine::{Moderation, NoModeration, Pins};
use manyring_protocol::spec::{DeviceSpec, FrontEndSpec, KindSpec};
use manyring_transport::vhost_user::PATH_LEN_MAX;
use serde::Serialize;
use std::path::Path;

/// The plan of a process: its own settings and its devices.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The settings of the whole process.
    pub daemon: DaemonPlan,
    /// The vhost-user block devices.
    pub blk: Vec<BlkPlan>,
    /// The vhost-user network devices.
    pub net: Vec<NetPlan>,
    /// Back-ends for the disks of Xen guests.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub xen_blk: Vec<XenBlkPlan>,
    /// The groups of devices that share a limit (`[[limit]]`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub limit: Vec<GroupPlan>,
    /// The switches between network devices (`[[switch]]`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub switch: Vec<SwitchPlan>,
}

/// The result of a check of a plan.
#[derive(Debug)]
pub enum Found {
    /// The plan passes all checks.
    Good,
    /// Two devices name the same resource, which only one can use.
    Shared(PlanError),
    /// The value of a key is wrong; the error names the key.
    Wrong(PlanError),
}

/// The plan of a device of any kind: its name, and its front-end.
#[derive(Clone, Debug, Serialize)]
pub struct DevicePlan {
    /// The place of the device's keys, for errors.
    #[serde(skip)]
    pub place: Place,
    /// Name of the device, unique.
    pub name: String,
    /// The socket at which the front-end connects, or listens.
    pub socket: SocketPlan,
    /// True if the device ends with its first session.
    pub one_off: bool,
    /// The worker of each queue or queue pair, by its index. Queues without an entry go to the
    /// worker that the balancer chooses.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub queue_workers: Vec<usize>,
    /// The bounds of the device's front-ends.
    #[serde(flatten)]
    pub front_end: FrontEndSpec,
    /// The rates that the device may use at most.
    #[serde(skip_serializing_if = "LimitPlan::is_none")]
    pub limit: LimitPlan,
    /// The trust domain that the key `domain` names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// The user who added the device over the control API, if `allow_paths` binds that user.
    #[serde(skip)]
    pub owner: Option<u32>,
}

impl Plan {
    /// Resolves and checks a whole configuration. This looks up accounts on the host
    /// (`socket_owner`), and nothing else.
    pub fn new(raw: RawConfig, source: Source) -> Result<Self, PlanError> {
        let daemon = DaemonPlan::new(&raw.daemon, source.daemon())?;
        let blk = raw
            .blk
            .into_iter()
            .enumerate()
            .map(|(index, raw)| BlkPlan::new(raw, index, source))
            .collect::<Result<Vec<_>, _>>()?;
        let net = raw
            .net
            .into_iter()
            .enumerate()
            .map(|(index, raw)| NetPlan::new(raw, index, source))
            .collect::<Result<Vec<_>, _>>()?;
        let xen_blk = raw
            .xen_blk
            .into_iter()
            .enumerate()
            .map(|(index, raw)| XenBlkPlan::new(raw, index, source))
            .collect::<Result<Vec<_>, _>>()?;
        let limit = raw.limit.into_iter().map(|raw| GroupPlan::new(raw, source));
        let limit = limit.collect::<Result<Vec<_>, _>>()?;
        let switch = raw.switch.into_iter().enumerate();
        let switch = switch.map(|(index, raw)| SwitchPlan::new(raw, index, source));
        let switch = switch.collect::<Result<Vec<_>, _>>()?;
        let plan = Self { daemon, blk, net, xen_blk, limit, switch };
        plan.check_limits()?;
        plan.check_helpers()?;
        unique::check(&plan)?;
        pins::check(&plan)?;
        Ok(plan)
    }

    /// Makes the plan of the whole process from the options of a command.
    pub fn of_daemon(raw: &RawDaemon) -> Result<DaemonPlan, PlanError> {
        DaemonPlan::new(raw, Source::CommandLine.daemon())
    }

    /// True if a device captures its frames into a file (`pcap`). No lock protects such a file.
    pub fn has_captures(&self) -> bool {
        self.net.iter().any(|net| net.pcap.is_some())
    }

    /// Checks that the limit group and the switch which a device names exist and fit the device.
    fn check_limits(&self) -> Result<(), PlanError> {
        let blks = self.blk.iter().map(|blk| (&blk.device.place, &blk.device.limit, Of::Disk));
        let nets = self.net.iter().map(|net| (&net.device.place, &net.device.limit, Of::Net));
        let xens = self.xen_blk.iter().map(|xen| (&xen.place, &xen.limit, Of::Disk));
        limit::check(&self.limit, blks.chain(nets).chain(xens))?;
        uplinks::check(self)?;
        self.check_domains()?;
        self.check_groups()
    }

    /// Checks that `state_dir` is set if a disk needs a helper: the helper's socket lies there.
    fn check_helpers(&self) -> Result<(), PlanError> {
        let mut helpers = self.blk.iter().filter_map(|blk| match &blk.disk {
            DiskPlan::Helper(helper) => Some((&blk.device.place, helper.format)),
            _ => None,
        });
        match helpers.next() {
            Some((place, format)) if self.daemon.state_dir.is_none() => {
                place.error("format", format!("{format:?} needs state_dir in [daemon]"))
            }
            _ => Ok(()),
        }
    }

    /// Checks a plan again after devices were added to it. With `looks`, this also compares the
    /// files that the host finds under all paths, which may block.
    pub fn check_again(&self, looks: bool) -> Found {
        if let Err(error) = pins::check(self)
            .and_then(|()| self.check_limits())
            .and_then(|()| self.check_helpers())
            .and_then(|()| paths::check(self))
        {
            return Found::Wrong(error);
        }
        let found = || if looks { unique::check_found(self) } else { Ok(()) };
        match unique::check(self).and_then(|()| found()) {
            Ok(()) => Found::Good,
            Err(error) => Found::Shared(error),
        }
    }

    /// Checks that no two devices use the same file, socket or capture by different paths, and that
    /// no path has a `~` or `$` that a shell would have expanded.
    pub fn check_found(&self) -> Result<(), PlanError> {
        paths::check(self)?;
        unique::check_found(self)
    }

    /// Returns the error for a command that needs a device's name: it lists the devices of the
    /// file.
    pub fn devices_of(&self, file: &Path) -> String {
        let names: Vec<_> = self.devices().map(|device| device.name.as_str()).collect();
        format!("DEVICE: is missing; those of {} are: {}", file.display(), names.join(", "))
    }

    /// Returns the inherited descriptors that the keys `fd` and `tap_fds` name.
    pub fn named_fds(&self) -> Vec<i32> {
        let socket = |device: &DevicePlan| match device.socket {
            SocketPlan::Fd(fd) => Some(fd),
            SocketPlan::Listen { .. } | SocketPlan::Connect { .. } => None,
        };
        let taps = self.net.iter().filter_map(|net| match &net.port {
            PortPlan::TapFds(fds) => Some(fds.as_slice()),
            _ => None,
        });
        self.devices().filter_map(socket).chain(taps.flatten().copied()).collect()
    }

    /// Returns the operator's choice of CPUs for workers, and of workers for queues.
    pub fn pins(&self) -> Pins {
        let pinned = self.devices().filter(|device| !device.queue_workers.is_empty());
        let pin = |device: &DevicePlan| (device.name.clone(), device.queue_workers.clone());
        let worker_cpus = self.daemon.worker_cpus.clone();
        Pins { worker_cpus, queue_workers: pinned.map(pin).collect() }
    }

    /// Returns the plan of every vhost-user device, whatever its kind.
    pub fn devices(&self) -> impl Iterator<Item = &DevicePlan> {
        self.blk.iter().map(|blk| &blk.device).chain(self.net.iter().map(|net| &net.device))
    }
}

impl DevicePlan {
    /// Makes the description of the device that the supervisor sends to a device process.
    pub fn spec(&self, kind: KindSpec) -> DeviceSpec {
        let Self {
            front_end,
            queue_workers,
            // Each message has the name of its device.
            name: _,
            // The supervisor listens or connects, hands connections to the device process, and ends
            // a one-off device when its first session ends.
            socket: _,
            one_off: _,
            // A message of its own carries the limit (`Command::Limit`): it can change while the
            // device is served.
            limit: _,
            // Only the supervisor needs to know who added the device and which process serves it.
            place: _,
            domain: _,
            owner: _,
        } = self;
        let number = |worker: &usize| u16::try_from(*worker).unwrap_or(u16::MAX);
        let queue_workers = queue_workers.iter().map(number).collect();
        DeviceSpec { front_end: *front_end, queue_workers, kind }
    }

    /// Resolves the keys that devices of all kinds have. The caller has checked `name`.
    fn new(
        name: String,
        place: Place,
        raw: RawSocket,
        queue_workers: Vec<usize>,
        limit: LimitPlan,
    ) -> Result<Self, PlanError> {
        let memory_max = match &raw.memory_max {
            None => None,
            Some(RawSize(text)) => match parse_size(text) {
                // A size below one page is surely a number whose unit was forgotten.
                Some(bytes) if bytes >= 4096 => Some(bytes),
                _ => {
                    let problem =
                        format!("{text:?} is not a size of at least 4096 bytes, like 16G");
                    return place.error("memory_max", problem);
                }
            },
        };
        Ok(Self {
            name,
            one_off: raw.one_off,
            front_end: FrontEndSpec {
                handshake_timeout: raw.handshake_timeout.unwrap_or(10),
                memory_on_disk: raw.memory_on_disk,
                memory_max,
            },
            socket: SocketPlan::new(raw, &place)?,
            place,
            queue_workers,
            limit,
            domain: None,
            owner: None,
        })
    }
}

/// Checks a device's name, and returns the place of the device's keys for errors.
fn device_place(name: &str, table: &str, source: Source) -> Result<Place, PlanError> {
    if is_device_name(name) {
        return Ok(source.device(table, name));
    }
    let problem = "must be 1 to 64 letters, digits, '-', '_' or '.', and not \".\" or \"..\"";
    source.device(table, format!("{name:?}")).error("name", problem)
}

/// Checks the length of a socket's path: `sockaddr_un` has room for [`PATH_LEN_MAX`] bytes.
fn check_len(path: &Path, place: &Place, key: &'static str) -> Result<(), PlanError> {
    if path.as_os_str().len() <= PATH_LEN_MAX {
        return Ok(());
    }
    place.error(key, format!("{} is longer than {PATH_LEN_MAX} bytes", path.display()))
}

/// True for 1 to 64 letters, digits, '-', '_' and '.', except `.` and `..`: such a name is safe in
/// paths, labels of metrics and logs.
pub fn is_device_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let is_folder = [".", ".."].contains(&name);
    (1..=64).contains(&name.len()) && !is_folder && name.chars().all(is_plain)
}

/// Parses the key `cache`. True: write-back, so writes are durable after a flush. False:
/// write-through, so a write is durable when it completes.
fn cache(raw: Option<&str>, place: &Place) -> Result<bool, PlanError> {
    match raw {
        None | Some("writeback") => Ok(true),
        Some("writethrough") => Ok(false),
        Some(other) => {
            let problem = format!("{other:?} is neither \"writeback\" nor \"writethrough\"");
            place.error("cache", problem)
        }
    }
}

/// Parses the key `moderation`: how interrupts of a guest are held back.
fn moderation(raw: Option<&str>, place: &Place) -> Result<Moderation, PlanError> {
    let parsed = raw.unwrap_or("off").parse();
    parsed.or_else(|error: NoModeration| place.error("moderation", error.to_string()))
}

/// Checks the key `logical_block_size`: the sector size that the guest sees, if the operator has
/// chosen one.
fn logical_block_size(raw: Option<u32>, place: &Place) -> Result<Option<u32>, PlanError> {
    match raw {
        None | Some(512 | 4096) => Ok(raw),
        Some(other) => {
            place.error("logical_block_size", format!("{other} is neither 512 nor 4096"))
        }
    }
}

/// Parses the size of a disk: at least one sector, and a multiple of 512 bytes.
fn size(text: &str) -> Option<u64> {
    parse_size(text).filter(|size| *size >= 512 && size.is_multiple_of(512))
}

/// Parses a size into bytes: a number, optionally with K, M, G or T (powers of 1024), also written
/// KiB, MiB, GiB or TiB, in any case. `None` if the text is no size, or does not fit 64 bits.
pub fn parse_size(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let shift = match unit.to_ascii_uppercase().as_str() {
        "" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The plan of a configuration, or the words of the error.
    pub(super) fn plan(toml: &str) -> Result<Plan, String> {
        let raw = toml::from_str(toml).map_err(|e| e.to_string())?;
        Plan::new(raw, Source::File).map_err(|e| e.to_string())
    }

    #[test]
    fn a_short_file_gets_its_defaults() {
        let plan = plan("[[blk]]\nname = 'a'\nsocket_path = '/s'\nnull = '1G'\n").unwrap();
        assert_eq!((plan.blk[0].options.num_queues, plan.blk[0].options.queue_size), (8, 128));
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
            (format!("{base}null = '1G'\nmemory_max = 'much'"), "memory_max"),
            (format!("{base}null = '1G'\nmemory_max = '0'"), "memory_max"),
            (format!("{base}null = '1G'\nmemory_max = 16"), "memory_max"),
            (format!("{base}null = '1G'\nmoderation = 'on'"), "moderation"),
            (format!("{base}null = '1G'\ncache = 'none'"), "cache"),
            (format!("{base}null = '1G'\non_full = 'stop'"), "on_full"),
            (format!("{base}null = '1G'\nlogical_block_size = 1024"), "logical_block_size"),
            (format!("{base}memory = '9K'\nlogical_block_size = 4096"), "logical_block_size"),
            (format!("{base}null = '1G'\nsocket_mode = '999'"), "socket_mode"),
            (format!("{base}null = '1G'\n{base}null = '1G'"), "name"),
            (format!("[daemon]\nspin_us = 1001\n{base}null = '1G'"), "spin_us"),
            (String::new(), "blk"),
        ] {
            let message = plan(&toml).expect_err(&toml);
            assert!(message.contains(key), "{toml}\n-> {message}");
        }
    }

    #[test]
    fn a_name_that_is_none_is_refused_with_key_and_value() {
        let long = "a".repeat(65);
        for name in ["", ".", "..", "/", "a/b", "../a", "a b", "a\nb", "\u{e4}", &long] {
            let tables = [
                "[[blk]]\nsocket_path = '/s'\nnull = '1G'\n",
                "[[net]]\nsocket_path = '/s'\nnull = true\n",
                "[[limit]]\niops = 5\n",
                "[[switch]]\n",
                "[[xen_blk]]\nsimulated = '/d'\n",
            ];
            for table in tables {
                let error = plan(&format!("{table}name = {name:?}\n")).expect_err(table);
                assert!(error.contains(&format!("{name:?}: name: must be 1 to 64")), "{error}");
            }
            let error = plan(&format!("{}domain = {name:?}\n", tables[0])).expect_err("a domain");
            assert!(error.contains(&format!("domain: {name:?}")), "{error}");
        }
        for name in ["a", "...", ".a", "a.", "-", &long[1..]] {
            let toml = format!("[[blk]]\nname = {name:?}\nsocket_path = '/s'\nnull = '1G'\n");
            assert!(plan(&toml).is_ok(), "{name}");
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
        let size_of = |value: &str| {
            let config = format!("[[blk]]\nname = 'a'\nsocket_path = '/s'\nmemory = {value}\n");
            plan(&config).map(|plan| match plan.blk[0].disk {
                DiskPlan::Memory { size } => size,
                _ => 0,
            })
        };
        assert_eq!((size_of("4096"), size_of("'4096'")), (Ok(4096), Ok(4096)));
        assert_eq!((size_of("1_048_576"), size_of("'64GiB'")), (Ok(1 << 20), Ok(64 << 30)));
        for value in ["4", "-4096", "'1.5G'", "'64GB'", "'G'"] {
            let error = size_of(value).expect_err(value);
            assert!(
                error.contains("a: memory: ") && error.contains("like 64G or 1536M"),
                "{error}"
            );
        }
        assert_eq!(parse_size("64G"), Some(64 << 30));
        assert_eq!(parse_size("512"), Some(512));
        assert_eq!(parse_size("2k"), Some(2048));
        assert_eq!((parse_size("64GiB"), parse_size("3 MiB")), (Some(64 << 30), None));
        assert_eq!((parse_size("1.5G"), parse_size("1GB"), parse_size("G")), (None, None, None));
        assert_eq!(parse_size("x"), None);
        assert_eq!(parse_size(""), None);
        assert_eq!(parse_size("99999999999T"), None);
    }
}
