//! Plan -> running parts: the only place that names every part.

pub(crate) mod disk;
mod part;
mod port;

pub(crate) use part::{Blk, Kind, Part};

use crate::config::plan::{BlkPlan, DevicePlan, DiskPlan, NetPlan, Plan, SocketPlan};
use crate::control::Registry;
use crate::xen::{XenDisks, XenError};
use disk::DiskError;
use manyring_backend::blk::{Disk, ImageError};
use manyring_backend::net::Port;
use manyring_backend::net::tap::TapError;
use manyring_device::Device;
use manyring_device::blk::{BlkDevice, BlkOptions};
use manyring_device::net::{MacAddress, NetDevice, NetOptions};
use manyring_engine::{Pool, PoolOptions};
use manyring_memory::{MemoryError, MemoryFiles, MemoryRules};
use manyring_transport::vhost_user::{
    Connected, Endpoint, ListenError, ServeOptions, check_path, serve,
};
use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;

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
    pub(crate) pool: Arc<Pool>,
    pub(crate) devices: Registry,
    fronts: Vec<Front>,
    xens: Vec<XenDisks>,
}

/// A device and its vhost-user socket.
#[derive(Debug)]
struct Front {
    device: Arc<dyn Device>,
    connected: Connected,
    served: Served,
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
    pub(crate) fn new(plan: &Plan) -> Result<Self, AssembleError> {
        manyring_memory::install_sigbus_handler();
        raise_fd_limit();
        if let Some(control) = &plan.daemon.control {
            let at = || plan.daemon.place.at("control");
            check_path(control).map_err(|source| AssembleError::Socket { at: at(), source })?;
        }
        let options = PoolOptions {
            workers_max: plan.daemon.workers,
            polling: plan.daemon.polling.law(),
            uring: plan.daemon.io_uring,
        };
        let pool = Pool::pinned(options, plan.pins());
        let mut house =
            Self { pool, devices: Registry::default(), fronts: Vec::new(), xens: Vec::new() };
        let mut refused = Vec::new();
        for blk in &plan.blk {
            match house.add_blk(blk, plan.daemon.io_uring) {
                Err(error @ AssembleError::Image { .. }) => refused.push((blk, error)),
                added => added?,
            }
        }
        let mut ports = Vec::new();
        for net in &plan.net {
            ports.push((net, served(&net.device)?, port::open(net)?));
        }
        house.pool.has_ring().ok_or(AssembleError::Workers)?;
        for (net, served, (port, mac)) in ports {
            house.add_net(net, served, port::decorated(net, port)?, mac);
        }
        for xen in &plan.xen_blk {
            let (pool, devices) = (house.pool.clone(), house.devices.clone());
            house.xens.push(XenDisks::new(xen, plan.daemon.io_uring, pool, devices)?);
        }
        house.goes_on_without(refused)?;
        Ok(house)
    }

    /// An image that cannot be opened costs its own device, unless there is no other one.
    fn goes_on_without(
        &self,
        refused: Vec<(&BlkPlan, AssembleError)>,
    ) -> Result<(), AssembleError> {
        let is_empty = self.fronts.is_empty() && self.xens.is_empty();
        for (blk, error) in refused {
            if is_empty {
                return Err(error);
            }
            let device = blk.device.name.as_str();
            tracing::error!(device, "not served: {error}");
        }
        Ok(())
    }

    fn add_blk(&mut self, blk: &BlkPlan, io_uring: bool) -> Result<(), AssembleError> {
        let served = served(&blk.device)?;
        let disk = disk(blk, io_uring)?;
        let options = BlkOptions {
            name: blk.device.name.clone(),
            num_queues: blk.num_queues,
            queue_size: blk.queue_size,
            serial: blk.serial.clone(),
            read_only: blk.read_only,
            writeback: blk.writeback,
            logical_block_size: blk.logical_block_size,
            moderation: blk.device.moderation.law(),
        };
        let device = Arc::new(BlkDevice::new(options, disk, self.pool.clone()));
        self.add(device.clone(), Kind::Blk(Blk::Virtio(device)), &blk.device.socket, served);
        Ok(())
    }

    fn add_net(&mut self, net: &NetPlan, served: Served, port: Arc<dyn Port>, mac: MacAddress) {
        let options = NetOptions {
            name: net.device.name.clone(),
            queue_pairs: net.queue_pairs,
            mac,
            mtu: net.mtu,
            speed: net.speed,
            moderation: net.device.moderation.law(),
            reclaim: net.reclaim.law(),
        };
        let device = Arc::new(NetDevice::new(options, port, self.pool.clone()));
        self.add(device.clone(), Kind::Net(device), &net.device.socket, served);
    }

    fn add(&mut self, device: Arc<dyn Device>, kind: Kind, socket: &SocketPlan, served: Served) {
        let part = Part::new(kind, in_text(socket));
        self.fronts.push(Front { device, connected: part.connected.clone(), served });
        self.devices.add(part);
    }

    /// Serves every device until `stop` turns true, or until all `--one-off` ones have ended.
    pub(crate) async fn serve(
        &mut self,
        stop: &watch::Receiver<bool>,
    ) -> Result<(), AssembleError> {
        let mut tasks = JoinSet::new();
        let balance = tokio::spawn(self.pool.clone().balance());
        for Front { device, connected, served } in self.fronts.drain(..) {
            let (stop, Served { endpoint, options, at }) = (stop.clone(), served);
            tasks.spawn(async move {
                let served = serve(device, endpoint, options, connected, stop).await;
                served.map_err(|source| AssembleError::Socket { at, source })
            });
        }
        for xen in self.xens.drain(..) {
            let stop = stop.clone();
            tasks.spawn(async move {
                xen.serve(stop).await;
                Ok(())
            });
        }
        while let Some(ended) = tasks.join_next().await {
            if let Ok(result) = ended {
                result?;
            }
        }
        balance.abort();
        Ok(())
    }
}

/// How a device's socket is named, for people.
fn in_text(socket: &SocketPlan) -> String {
    match socket {
        SocketPlan::Listen { path, .. } | SocketPlan::Connect { path } => {
            path.display().to_string()
        }
        SocketPlan::Fd(fd) => format!("fd {fd}"),
    }
}

/// How a device is served; takes a socket over that was handed in.
fn served(plan: &DevicePlan) -> Result<Served, AssembleError> {
    let mut at = plan.place.at("socket_path");
    let endpoint = match &plan.socket {
        SocketPlan::Listen { path, access } => {
            if let Err(source) = check_path(path) {
                return Err(AssembleError::Socket { at, source });
            }
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
    };
    Ok(Served { endpoint, options, at })
}

fn disk(blk: &BlkPlan, io_uring: bool) -> Result<Arc<dyn Disk>, AssembleError> {
    let place = &blk.device.place;
    let opened = disk::open(&blk.disk, (blk.read_only, blk.logical_block_size), io_uring);
    let disk = opened.map_err(|error| match error {
        DiskError::Image(source) => {
            let insist = place.setting("format", "raw");
            let hint = match source {
                ImageError::Container { .. } => {
                    format!("; convert it (qemu-img convert -O raw), or insist: {insist}")
                }
                _ => String::new(),
            };
            let key = match source {
                ImageError::Blocks { .. } => "logical_block_size",
                _ => "file",
            };
            AssembleError::Image { at: place.at(key), source, hint }
        }
        DiskError::Memory(source) => {
            let is_memory = matches!(blk.disk, DiskPlan::Memory { .. });
            AssembleError::Memory {
                at: place.at(if is_memory { "memory" } else { "file" }),
                source,
            }
        }
    })?;
    Ok(disk::decorated(disk, blk.fault))
}

/// Six fds a device add up: use all that the system allows.
fn raise_fd_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = setrlimit(Resource::Nofile, raised);
}
