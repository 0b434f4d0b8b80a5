//! The plan of the whole process: the keys of `[daemon]`.

use super::{AccessPlan, Place, PlanError, PollingPlan, Sandbox, check_len, pins};
use crate::numbers;
use crate::tables::RawDaemon;
use clap::ValueEnum;
use manyring_transport::vhost_user::SocketPermissions;
use serde::Serialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// The default of `user_devices_max`.
const USER_DEVICES: u64 = 256;

/// The plan of the whole process: the keys of `[daemon]`.
#[derive(Clone, Debug, Serialize)]
pub struct DaemonPlan {
    /// The place of the keys of `[daemon]`, for errors.
    #[serde(skip)]
    pub place: Place,
    /// The most worker threads, which serve the queues.
    pub workers: usize,
    /// The CPUs of each worker, by its index. A worker without an entry runs on any CPU that the
    /// process may use.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub worker_cpus: Vec<Vec<usize>>,
    /// How workers look for work before they sleep.
    #[serde(flatten)]
    pub polling: PollingPlan,
    /// True if io_uring is used where the kernel allows it.
    pub io_uring: bool,
    /// Workers run on the NUMA node of their guests' memory, where the host has several nodes and
    /// `worker_cpus` says nothing else.
    pub numa: Numa,
    /// The socket for changes.
    pub control: Option<PathBuf>,
    /// Owner and mode of the control socket.
    #[serde(skip_serializing_if = "AccessPlan::is_default")]
    pub control_access: AccessPlan,
    /// The read-only control socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_read: Option<PathBuf>,
    /// Owner and mode of the read-only control socket.
    #[serde(skip_serializing_if = "AccessPlan::is_default")]
    pub control_read_access: AccessPlan,
    /// The loopback address at which metrics can be scraped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics_listen: Option<SocketAddr>,
    /// Folders below which unprivileged users of the control API may name files and sockets.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allow_paths: Vec<PathBuf>,
    /// Devices that each unprivileged user may have at a time.
    pub user_devices_max: u64,
    /// The folder in which devices that were added over the control API are saved; `None`: they end
    /// with the process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_dir: Option<PathBuf>,
    /// Seconds for which a device waits for a resource that another process holds; `None`: for
    /// ever.
    pub wait: Option<u32>,
    /// Which devices share a device process.
    pub domains: Domains,
    /// The rights that a device process gives up before it serves a guest.
    #[serde(skip)]
    pub sandbox: Sandbox,
}

/// Whether workers run on the NUMA node of their guests' memory (`daemon.numa`, `--numa`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Numa {
    /// Workers run on these nodes where the host has several nodes.
    #[default]
    Auto,
    /// Workers run on all CPUs of the process.
    Off,
}

/// Which devices share a device process, where the key `domain` of a device does not decide it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Domains {
    /// There are no device processes: the daemon itself serves all devices.
    One,
    /// Each device has its own device process.
    Device,
    /// All devices whose front-ends run as the same user share one device process.
    User,
}

impl Domains {
    fn new(raw: Option<&str>, place: &Place) -> Result<Self, PlanError> {
        match raw {
            // A command like `manyring blk` serves one device for one VMM: there is no other device
            // to protect.
            None if *place == Place::CommandLine => Ok(Self::One),
            None | Some("user") => Ok(Self::User),
            Some("device") => Ok(Self::Device),
            Some("one") => Ok(Self::One),
            Some(other) => {
                let problem = "is not one of \"one\", \"device\" and \"user\"";
                place.error("domains", format!("{other:?} {problem}"))
            }
        }
    }
}

impl DaemonPlan {
    pub(super) fn new(raw: &RawDaemon, place: Place) -> Result<Self, PlanError> {
        let worker_cpus = pins::worker_cpus(raw.worker_cpus.as_deref(), &place)?;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let bound = (!worker_cpus.is_empty()).then_some(worker_cpus.len());
        let workers = raw.workers.or(bound).unwrap_or(cpus);
        numbers::check("workers", workers as u64, &place)?;
        if worker_cpus.len() > workers {
            let problem = format!(
                "{} sets of CPUs for {workers} workers; give one set for each worker at most",
                worker_cpus.len()
            );
            return place.error("worker_cpus", problem);
        }
        let polling = PollingPlan::new(raw, &place)?;
        for (path, key) in [(&raw.control, "control"), (&raw.control_read, "control_read")] {
            path.as_ref().map_or(Ok(()), |path| check_len(path, &place, key))?;
        }
        let [control_access, control_read_access] = accesses(raw, &place)?;
        if let Some(address) = raw.metrics_listen.filter(|address| !address.ip().is_loopback()) {
            let problem =
                format!("{address} is not a loopback address; other hosts could scrape it");
            return place.error("metrics_listen", problem);
        }
        for path in &raw.allow_paths {
            if !path.is_absolute() {
                return place.error("allow_paths", format!("{} is relative", path.display()));
            }
        }
        let user_devices_max = raw.user_devices_max.unwrap_or(USER_DEVICES);
        numbers::check("user_devices_max", user_devices_max, &place)?;
        let domains = Domains::new(raw.domains.as_deref(), &place)?;
        let sandbox = match raw.sandbox.as_deref() {
            None => Sandbox::Auto,
            Some(text) => match Sandbox::from_str(text, false) {
                Ok(sandbox) => sandbox,
                Err(_) => {
                    let problem = "is not one of \"none\", \"auto\" and \"seccomp\"";
                    return place.error("sandbox", format!("{text:?} {problem}"));
                }
            },
        };
        let io_uring = raw.io_uring.unwrap_or(true);
        let numa = match raw.numa.as_deref() {
            None | Some("auto") => Numa::Auto,
            Some("off") => Numa::Off,
            Some(text) => {
                let problem = format!("{text:?} is not one of \"auto\" and \"off\"");
                return place.error("numa", problem);
            }
        };
        Ok(Self {
            place,
            workers,
            worker_cpus,
            polling,
            io_uring,
            numa,
            control: raw.control.clone(),
            control_access,
            control_read: raw.control_read.clone(),
            control_read_access,
            metrics_listen: raw.metrics_listen,
            allow_paths: raw.allow_paths.clone(),
            user_devices_max,
            state_dir: raw.state_dir.clone(),
            wait: raw.wait,
            domains,
            sandbox,
        })
    }

    /// Returns owner, group and mode of the control socket of this key.
    pub fn private(&self, key: &str) -> SocketPermissions {
        match key {
            "control" => self.control_access.private(),
            _ => self.control_read_access.private(),
        }
    }

    /// Returns the paths of the control sockets, with the keys that name them.
    pub fn controls(&self) -> impl Iterator<Item = (&Path, &'static str)> {
        let all = [(&self.control, "control"), (&self.control_read, "control_read")];
        all.into_iter().filter_map(|(path, key)| Some((path.as_deref()?, key)))
    }
}

/// Resolves who may connect to the control socket and to the read-only one. Fails if the
/// permissions of a socket are set, but not its path.
fn accesses(raw: &RawDaemon, place: &Place) -> Result<[AccessPlan; 2], PlanError> {
    let changes = AccessPlan::of(
        [raw.control_owner.as_ref(), raw.control_group.as_ref()],
        raw.control_mode.as_deref(),
        place,
        ["control_owner", "control_group", "control_mode"],
    )?;
    let shows = AccessPlan::of(
        [raw.control_read_owner.as_ref(), raw.control_read_group.as_ref()],
        raw.control_read_mode.as_deref(),
        place,
        ["control_read_owner", "control_read_group", "control_read_mode"],
    )?;
    for (access, socket, key) in
        [(&changes, &raw.control, "control"), (&shows, &raw.control_read, "control_read")]
    {
        if socket.is_none() && !access.is_default() {
            return place.error(key, "is missing, but its owner, group or mode is set");
        }
    }
    Ok([changes, shows])
}
