//! Plan -> running parts: the only place that names every part.

mod port;

use crate::config::plan::{BlkPlan, DevicePlan, DiskPlan, Format, Plan, SocketPlan};
use manyring_backend::blk::fault::{FaultDisk, FaultPlan};
use manyring_backend::blk::file::FileDisk;
use manyring_backend::blk::memory::MemoryDisk;
use manyring_backend::blk::null::NullDisk;
use manyring_backend::blk::uring::UringDisk;
use manyring_backend::blk::{Disk, Image, ImageError, ImageOptions};
use manyring_backend::net::tap::TapError;
use manyring_device::Device;
use manyring_device::blk::{BlkDevice, BlkOptions};
use manyring_device::net::{NetDevice, NetOptions};
use manyring_engine::{Pool, PoolOptions};
use manyring_memory::MemoryError;
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
    #[error("no worker thread can be started")]
    Workers,
}

/// An error and what is behind it, in one line.
fn in_words(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut behind = error.source();
    while let Some(error) = behind {
        text = format!("{text}: {error}");
        behind = error.source();
    }
    text
}

/// A device that is put together.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) kind: Kind,
    pub(crate) connected: Connected,
    /// How the device can be reached, for people.
    pub(crate) socket: String,
}

/// The device as what it is.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Blk(Arc<BlkDevice>),
    Net(Arc<NetDevice>),
}

/// All parts of the process.
#[derive(Debug)]
pub(crate) struct House {
    pub(crate) pool: Arc<Pool>,
    pub(crate) parts: Vec<Part>,
    endpoints: Vec<Served>,
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
        let (mut parts, mut endpoints) = (Vec::new(), Vec::new());
        for blk in &plan.blk {
            endpoints.push(served(&blk.device)?);
            let disk = disk(blk, plan.daemon.io_uring)?;
            let options = BlkOptions {
                name: blk.device.name.clone(),
                num_queues: blk.num_queues,
                queue_size: blk.queue_size,
                serial: blk.serial.clone(),
                read_only: blk.read_only,
                writeback: blk.writeback,
                moderation: blk.device.moderation.law(),
            };
            let device = Arc::new(BlkDevice::new(options, disk, pool.clone()));
            parts.push(Part::new(device.clone(), Kind::Blk(device), &blk.device.socket));
        }
        let mut ports = Vec::new();
        for net in &plan.net {
            endpoints.push(served(&net.device)?);
            ports.push((net, port::open(net)?));
        }
        pool.has_ring().ok_or(AssembleError::Workers)?;
        for (net, (port, mac)) in ports {
            let port = port::decorated(net, port)?;
            let options = NetOptions {
                name: net.device.name.clone(),
                queue_pairs: net.queue_pairs,
                mac,
                mtu: net.mtu,
                speed: net.speed,
                moderation: net.device.moderation.law(),
                reclaim: net.reclaim.law(),
            };
            let device = Arc::new(NetDevice::new(options, port, pool.clone()));
            parts.push(Part::new(device.clone(), Kind::Net(device), &net.device.socket));
        }
        Ok(Self { pool, parts, endpoints })
    }

    /// Serves every device until `stop` turns true, or until all `--one-off` ones have ended.
    pub(crate) async fn serve(
        &mut self,
        stop: &watch::Receiver<bool>,
    ) -> Result<(), AssembleError> {
        let mut tasks = JoinSet::new();
        let balance = tokio::spawn(self.pool.clone().balance());
        for (part, served) in self.parts.iter().zip(self.endpoints.drain(..)) {
            let (device, connected) = (part.device.clone(), part.connected.clone());
            let (stop, Served { endpoint, options, at }) = (stop.clone(), served);
            tasks.spawn(async move {
                let served = serve(device, endpoint, options, connected, stop).await;
                served.map_err(|source| AssembleError::Socket { at, source })
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

impl Part {
    fn new(device: Arc<dyn Device>, kind: Kind, socket: &SocketPlan) -> Self {
        let socket = match socket {
            SocketPlan::Listen { path, .. } | SocketPlan::Connect { path } => {
                path.display().to_string()
            }
            SocketPlan::Fd(fd) => format!("fd {fd}"),
        };
        Self { device, kind, connected: watch::Sender::new(false), socket }
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
    let handshake_timeout = Duration::from_secs(plan.handshake_timeout);
    Ok(Served { endpoint, options: ServeOptions { one_off: plan.one_off, handshake_timeout }, at })
}

fn disk(blk: &BlkPlan, io_uring: bool) -> Result<Arc<dyn Disk>, AssembleError> {
    let place = &blk.device.place;
    let memory = |key| move |source| AssembleError::Memory { at: place.at(key), source };
    let disk: Arc<dyn Disk> = match &blk.disk {
        DiskPlan::Null { size } => Arc::new(NullDisk::new(*size)),
        DiskPlan::Memory { size } => Arc::new(MemoryDisk::new(*size).map_err(memory("memory"))?),
        DiskPlan::File { path, direct, format } => {
            let any_content = *format == Some(Format::Raw);
            let options = ImageOptions { read_only: blk.read_only, direct: *direct, any_content };
            let image = Image::open(path, options).map_err(|source| {
                let insist = place.setting("format", "raw");
                let hint = match source {
                    ImageError::Container { .. } => {
                        format!("; convert it (qemu-img convert -O raw), or insist: {insist}")
                    }
                    _ => String::new(),
                };
                AssembleError::Image { at: place.at("file"), source, hint }
            })?;
            if io_uring {
                Arc::new(UringDisk::new(image).map_err(memory("file"))?)
            } else {
                Arc::new(FileDisk::new(image))
            }
        }
    };
    Ok(match blk.fault {
        None => disk,
        Some(fault) => Arc::new(FaultDisk::new(
            disk,
            FaultPlan {
                read_error_every: fault.read_error_every,
                write_error_every: fault.write_error_every,
                flush_errors: fault.flush_errors,
                hold_every: fault.hold_every,
                secure_erase: fault.secure_erase,
            },
        )),
    })
}

/// Six fds a device add up: use all that the system allows.
fn raise_fd_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = setrlimit(Resource::Nofile, raised);
}
