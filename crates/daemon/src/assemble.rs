//! Plan -> running parts: the only place that names every part.

pub(crate) mod disk;
mod links;
mod look;
mod part;
mod port;
mod waiting;
mod wanted;

pub(crate) use look::look;
pub(crate) use part::{Blk, Kind, Part};

use crate::config::plan::{DevicePlan, Plan, SocketPlan};
use crate::control::{Entry, Registry};
use crate::xen::{XenDisks, XenError};
use links::HostLinks;
use manyring_backend::blk::ImageError;
use manyring_backend::net::tap::TapError;
use manyring_engine::{Pool, PoolOptions};
use manyring_memory::{MemoryError, MemoryFiles, MemoryRules};
use manyring_transport::vhost_user::{Endpoint, ListenError, ServeOptions, check_path, serve};
use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use waiting::{Later, Patience, Wait};
use wanted::{Made, Wanted};

/// Why the parts cannot be put together. `at` names the key as it was typed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub(crate) enum AssembleError {
    #[error("{at}: {source}{hint}")]
    Image { at: String, source: ImageError, hint: String },
    #[error("{at}: {}", in_words(source))]
    Port { at: String, source: TapError },
    #[error("{at}: {}: {source}", path.display())]
    Pcap { at: String, path: PathBuf, source: io::Error },
    #[error("{at}: {source}")]
    Memory { at: String, source: MemoryError },
    #[error("{at}: {source}")]
    Socket { at: String, source: ListenError },
    #[error("{at}: {source}")]
    Fd { at: String, source: crate::fds::FdError },
    #[error(transparent)]
    Xen(#[from] XenError),
    #[error("no worker thread can be started")]
    Workers,
    #[error("{at}: the host has not opened it yet")]
    Slow { at: String },
    #[error("{at}: the daemon has failed to open it")]
    Failed { at: String },
    /// The reason for which the last device waited, with the key as it was typed.
    #[error("{0}")]
    Waited(String),
}

impl AssembleError {
    /// True if another process holds what is needed: it can be had when that process has ended.
    pub(crate) fn is_held(&self) -> bool {
        match self {
            Self::Image { source, .. } => matches!(source, ImageError::InUse { .. }),
            Self::Port { source, .. } => matches!(source, TapError::Busy(_)),
            Self::Socket { source, .. } => matches!(source, ListenError::Taken { .. }),
            _ => false,
        }
    }

    /// True if an image cannot be served, for whatever reason.
    fn is_of_image(&self) -> bool {
        matches!(self, Self::Image { .. })
    }

    /// The key of what cannot be had, if it is another than that of the disk or the port.
    fn key(&self) -> Option<&'static str> {
        match self {
            Self::Pcap { .. } => Some("pcap"),
            Self::Socket { source, .. } => Some(socket_key(source)),
            _ => None,
        }
    }
}

/// The key whose value is why a socket cannot be had.
fn socket_key(error: &ListenError) -> &'static str {
    match error {
        ListenError::Owner { .. } => "socket_owner",
        ListenError::Group { .. } => "socket_group",
        _ => "socket_path",
    }
}

/// An error and what is behind it, in one line. What it says of that itself is not said again.
pub(crate) fn in_words(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut behind = error.source();
    while let Some(error) = behind {
        if !text.ends_with(&error.to_string()) {
            text = format!("{text}: {error}");
        }
        behind = error.source();
    }
    text
}

/// All parts of the process.
#[derive(Debug)]
pub(crate) struct House {
    shared: Arc<Shared>,
    fronts: Vec<Front>,
    xens: Vec<XenDisks>,
    links: HostLinks,
}

/// What all devices share.
#[derive(Debug)]
struct Shared {
    pool: Arc<Pool>,
    devices: Registry,
    io_uring: bool,
    /// Seconds to wait for what another process holds; `None`: for ever.
    wait: Option<u32>,
}

/// A device and its vhost-user socket.
#[derive(Debug)]
struct Front {
    wanted: Wanted,
    wait: Wait,
    stage: Stage,
    served: Served,
}

/// How far a device is at the start.
#[derive(Debug)]
enum Stage {
    Made(Made),
    Waits(Later),
}

/// How a device is served, and what its errors name.
#[derive(Debug)]
struct Served {
    endpoint: Endpoint,
    options: ServeOptions,
    /// The key of the socket, as it was typed.
    at: String,
}

impl House {
    /// Checks every socket path, opens every disk and port, and captures if all that went well.
    /// Creates no socket; what else it creates goes with it, but for captures.
    ///
    /// # Errors
    /// A device cannot be served. What another process holds is an error only if the plan waits
    /// for nothing, an image that cannot be opened only if there is no other device.
    pub(crate) async fn new(plan: &Plan) -> Result<Self, AssembleError> {
        manyring_memory::install_sigbus_handler();
        raise_fd_limit();
        let wait = plan.daemon.wait;
        if let Some(control) = &plan.daemon.control {
            free(control, wait, || plan.daemon.place.at("control"))?;
        }
        let io_uring = plan.daemon.io_uring;
        let options = PoolOptions {
            workers_max: plan.daemon.workers,
            polling: plan.daemon.polling.law(),
            uring: io_uring,
        };
        let pool = Pool::pinned(options, plan.pins());
        let shared = Arc::new(Shared { pool, devices: Registry::default(), io_uring, wait });
        // Before a port is opened: an interface that goes after that is noticed.
        let links = HostLinks::open(plan);
        let mut patience = Patience::new(wait);
        let mut tried = Vec::new();
        for wanted in wanted(plan) {
            let served = served(wanted.plan(), wait)?;
            let first = patience.open(&wanted, io_uring).await?;
            tried.push((wanted, served, first));
        }
        if plan.xen_blk.is_empty() {
            patience.refuse_if_all_failed(&mut tried)?;
        }
        shared.pool.has_ring().ok_or(AssembleError::Workers)?;
        let mut house = Self { shared, fronts: Vec::new(), xens: Vec::new(), links };
        for (wanted, served, first) in tried {
            let mut wait = Wait::new(house.shared.clone(), wanted.clone());
            let stage = match wait.begin(first) {
                Later::Opened(opened) => {
                    let made = wanted.made(wanted.decorated(opened)?, house.pool());
                    house.devices().add(made.part.clone());
                    Stage::Made(made)
                }
                later => Stage::Waits(later),
            };
            house.fronts.push(Front { wanted, wait, stage, served });
        }
        for xen in &plan.xen_blk {
            let (pool, devices) = (house.pool().clone(), house.devices().clone());
            house.xens.push(XenDisks::new(xen, io_uring, pool, devices)?);
        }
        Ok(house)
    }

    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.shared.pool
    }

    pub(crate) fn devices(&self) -> &Registry {
        &self.shared.devices
    }

    /// Serves every device until `stop` turns true, or until all `--one-off` ones have ended.
    ///
    /// # Errors
    /// A socket cannot be listened on; or the time is over for which devices may wait, and none is
    /// served.
    pub(crate) async fn serve(
        &mut self,
        stop: &watch::Receiver<bool>,
    ) -> Result<(), AssembleError> {
        let mut tasks = JoinSet::new();
        let balance = tokio::spawn(self.pool().clone().balance());
        let links = std::mem::take(&mut self.links).follow(self.devices().clone());
        let links = tokio::spawn(links);
        let has_xen = !self.xens.is_empty();
        for front in self.fronts.drain(..) {
            tasks.spawn(front.serve(self.shared.clone(), stop.clone()));
        }
        for xen in self.xens.drain(..) {
            let stop = stop.clone();
            tasks.spawn(async move {
                xen.serve(stop).await;
                Ok(())
            });
        }
        let waited = self.shared.waited();
        tokio::pin!(waited);
        let mut may_wait = true;
        loop {
            tokio::select! {
                ended = tasks.join_next() => match ended {
                    Some(Ok(result)) => result?,
                    Some(Err(_)) => {}
                    None => break,
                },
                () = &mut waited, if may_wait => {
                    may_wait = false;
                    if !has_xen {
                        self.shared.refuse_if_none_is_served()?;
                    }
                }
            }
        }
        balance.abort();
        links.abort();
        Ok(())
    }
}

impl Shared {
    /// Returns when devices may wait no longer for other processes.
    async fn waited(&self) {
        match self.wait {
            None | Some(0) => std::future::pending().await,
            Some(seconds) => tokio::time::sleep(Duration::from_secs(seconds.into())).await,
        }
    }

    fn refuse_if_none_is_served(&self) -> Result<(), AssembleError> {
        let all = self.devices.all();
        let reason = all.iter().find_map(|entry| match entry {
            Entry::Waiting(waiting) => Some(waiting.reason.clone()),
            Entry::Served(_) => None,
        });
        match reason {
            Some(reason) if self.devices.served().is_empty() => Err(AssembleError::Waited(reason)),
            _ => Ok(()),
        }
    }
}

impl Front {
    /// Serves the device until `stop` turns true, as soon as it can be had.
    async fn serve(
        self,
        shared: Arc<Shared>,
        mut stop: watch::Receiver<bool>,
    ) -> Result<(), AssembleError> {
        let Self { wanted, mut wait, stage, served: Served { mut endpoint, options, at } } = self;
        let stopping = stop.clone();
        let (made, mut is_late) = match stage {
            Stage::Made(made) => (made, false),
            Stage::Waits(later) => tokio::select! {
                opened = wait.opened(later) => (wanted.made(opened, &shared.pool), true),
                _ = stop.wait_for(|stop| *stop) => return Ok(()),
            },
        };
        let _looked_after = links::look_after(&made.part, is_late);
        loop {
            wait.end(&made);
            let again = again(&endpoint);
            let (device, connected) = (made.device.clone(), made.part.connected.clone());
            let ended = serve(device, endpoint, options, connected, stopping.clone()).await;
            let Err(source) = ended else { return Ok(()) };
            let key = socket_key(&source);
            let at = if key == "socket_path" { at.clone() } else { wanted.plan().place.at(key) };
            let error = AssembleError::Socket { at: at.clone(), source };
            // The name of the socket can be taken although it was free before: wait again.
            is_late |= error.is_held() && shared.wait != Some(0);
            let (true, Some(next)) = (is_late, again) else { return Err(error) };
            endpoint = next;
            wait.note(&error);
            tokio::select! {
                () = wait.listens(&endpoint, &at) => {}
                _ = stop.wait_for(|stop| *stop) => return Ok(()),
            }
        }
    }
}

/// The devices of a plan, apart from those of Xen guests.
fn wanted(plan: &Plan) -> impl Iterator<Item = Wanted> {
    let blks = plan.blk.iter().map(|blk| Wanted::Blk(Arc::new(blk.clone())));
    blks.chain(plan.net.iter().map(|net| Wanted::Net(Arc::new(net.clone()))))
}

/// The endpoint once more, if the name of its socket may be waited for.
fn again(endpoint: &Endpoint) -> Option<Endpoint> {
    match endpoint {
        Endpoint::Listen { path, permissions } => {
            Some(Endpoint::Listen { path: path.clone(), permissions: *permissions })
        }
        Endpoint::Connect { .. } | Endpoint::Inherited { .. } => None,
    }
}

/// Checks that a socket can have this name, unless another process has it that may be waited for.
fn free(path: &Path, wait: Option<u32>, at: impl FnOnce() -> String) -> Result<(), AssembleError> {
    match check_path(path) {
        Err(ListenError::Taken { .. }) if wait != Some(0) => Ok(()),
        checked => checked.map_err(|source| AssembleError::Socket { at: at(), source }),
    }
}

/// How a device is served; takes a socket over that was handed in.
fn served(plan: &DevicePlan, wait: Option<u32>) -> Result<Served, AssembleError> {
    let mut at = plan.place.at("socket_path");
    let endpoint = match &plan.socket {
        SocketPlan::Listen { path, access } => {
            free(path, wait, || at.clone())?;
            Endpoint::Listen { path: path.clone(), permissions: access.permissions() }
        }
        SocketPlan::Connect { path } => Endpoint::Connect { path: path.clone() },
        SocketPlan::Fd(fd) => {
            at = plan.place.at("fd");
            match crate::fds::adopt_socket(*fd) {
                Ok(socket) => Endpoint::Inherited { socket },
                Err(source) => return Err(AssembleError::Fd { at, source }),
            }
        }
    };
    let memory = MemoryRules::from(match plan.memory_on_disk {
        true => MemoryFiles::LocalDisk,
        false => MemoryFiles::InMemory,
    });
    let options = ServeOptions {
        one_off: plan.one_off,
        handshake_timeout: Duration::from_secs(plan.handshake_timeout),
        memory: MemoryRules { bytes_max: plan.memory_max.unwrap_or(memory.bytes_max), ..memory },
        ..ServeOptions::default()
    };
    Ok(Served { endpoint, options, at })
}

/// Six fds a device add up: use all that the system allows.
fn raise_fd_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = setrlimit(Resource::Nofile, raised);
}
