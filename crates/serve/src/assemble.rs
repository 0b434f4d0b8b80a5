//! Opens the files, ports and sockets of a plan, and makes devices of them: the only module that
//! names every kind of disk and port.

mod capture;
pub mod check_host;
pub mod disk;
mod helper_walls;
pub mod nbd_host;
pub(crate) mod options;
pub(crate) mod port;
mod qemu_helper;
mod qmp_monitor;
pub(crate) mod switch;
mod switch_host;
mod tasks;
pub(crate) mod wanted;
pub mod xen;

pub(crate) use capture::Capture;
pub use check_host::look;
pub use nbd_host::AdoptedExports;
pub(crate) use qemu_helper::HelperError;
pub use switch::{AdoptedFds, Host, Switches};
pub use switch_host::{Ports, SwitchHost};
pub use tasks::Tasks;
pub use wanted::{Assemble, Here, Made, Opened, Part};

use manyring_backend::blk::ImageError;
use manyring_backend::net::switch::SwitchError;
use manyring_backend::net::tap::TapError;
use manyring_config::plan::{DevicePlan, Place, SocketPlan, Unfound};
use manyring_memory::MemoryError;
use manyring_nbd::JoinError;
use manyring_transport::vhost_user::{Endpoint, ListenError, ServeOptions, check_path};
use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

/// Why a device cannot be assembled. `at` names the key as it was typed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum AssembleError {
    #[error("{at}: {source}{hint}")]
    Image { at: String, source: ImageError, hint: String },
    #[error("{at}: {}", in_words(source))]
    Port { at: String, source: TapError },
    #[error("{at}: {}: {source}", path.display())]
    Pcap { at: String, path: PathBuf, source: io::Error },
    #[error("{at}: the server {source}")]
    Nbd { at: String, source: JoinError },
    #[error("{at}: {source}")]
    Helper { at: String, source: HelperError },
    #[error("{at}: {source}")]
    Memory { at: String, source: MemoryError },
    #[error("{at}: {source}")]
    Socket { at: String, source: ListenError },
    #[error("{at}: {source}")]
    Fd { at: String, source: crate::fds::FdError },
    #[error("{at}: {source}")]
    StateDir { at: String, source: io::Error },
    #[error(transparent)]
    Xen(Box<dyn Error + Send + Sync>),
    #[error("too many earlier calls to open files are still blocked; try again later")]
    Calls,
    #[error("no worker thread available")]
    Workers,
    #[error("{at}: {problem}")]
    Unfound { at: String, key: &'static str, problem: String },
    #[error("{at}: opening it is blocked; retrying")]
    Slow { at: String },
    #[error("{at}: there is no switch {name}")]
    NoSwitch { at: String, name: String },
    #[error("{at}: {source}")]
    Switch { at: String, source: SwitchError },
    #[error("{at}: opening it failed: internal error")]
    Failed { at: String },
    /// The error of the last attempt to open the device, after which no time was left to wait. The
    /// text names the key as it was typed.
    #[error("{0}")]
    Waited(String),
}

impl AssembleError {
    /// True if another process holds the image, the interface, the capture file or the socket:
    /// opening can succeed when that process has ended.
    pub fn is_held(&self) -> bool {
        match self {
            Self::Image { source, .. } => matches!(source, ImageError::InUse { .. }),
            Self::Port { source, .. } => matches!(source, TapError::Busy(_)),
            Self::Pcap { source, .. } => source.kind() == io::ErrorKind::ResourceBusy,
            Self::Socket { source, .. } => matches!(source, ListenError::Taken { .. }),
            Self::Helper { source, .. } => source.is_held(),
            // An NBD server may not have started yet.
            Self::Nbd { source, .. } => source.passes(),
            _ => false,
        }
    }

    /// True if a later attempt can succeed without a change of the plan: another process ends, or a
    /// slow host answers.
    pub fn is_awaited(&self) -> bool {
        let is_slow = match self {
            Self::Slow { .. } => true,
            Self::Socket { source, .. } => matches!(source, ListenError::Slow { .. }),
            _ => false,
        };
        is_slow || self.is_held()
    }

    /// True if the error concerns one device alone: its image, its NBD server or helper, or a file
    /// that a user has named and that is missing.
    pub fn is_of_one_device(&self) -> bool {
        matches!(
            self,
            Self::Image { .. } | Self::Nbd { .. } | Self::Helper { .. } | Self::Unfound { .. }
        )
    }

    /// Returns this error with the socket's path as the plan names it.
    pub fn of_socket(self, socket: &SocketPlan) -> Self {
        match self {
            Self::Socket { at, source } => Self::Socket { at, source: socket.error(source) },
            error => error,
        }
    }

    /// Makes the error for a file or folder that a user has named and that cannot be used.
    pub(crate) fn unfound(place: &Place, Unfound { key, problem }: Unfound) -> Self {
        Self::Unfound { at: place.at(key), key, problem }
    }

    /// Returns the key that caused the error; `None`: the key of the disk or the port did.
    pub fn key(&self) -> Option<&'static str> {
        match self {
            Self::Pcap { .. } => Some("pcap"),
            Self::Unfound { key, .. } => Some(key),
            Self::Socket { source, .. } => Some(socket_key(source)),
            _ => None,
        }
    }
}

/// Returns the configuration key that caused a socket's error.
pub fn socket_key(error: &ListenError) -> &'static str {
    match error {
        ListenError::Owner { .. } => "socket_owner",
        ListenError::Group { .. } => "socket_group",
        _ => "socket_path",
    }
}

/// Returns an error and its sources as one line. If the text already ends with the text of a
/// source, that source is left out.
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

/// The endpoint and the options of a device, and the key that an error of its socket names.
#[derive(Debug)]
pub struct Served {
    /// Where front-ends find the device.
    pub endpoint: Endpoint,
    /// The options and limits of the device's sessions.
    pub options: ServeOptions,
    /// The key `socket_path` as it was typed, for errors.
    pub at: String,
}

/// Returns the endpoint at which a device listens, if this process creates the socket. Only such a
/// device can try to listen again later.
pub fn listens_at(plan: &DevicePlan) -> Option<Endpoint> {
    let SocketPlan::Listen { access, .. } = &plan.socket else { return None };
    let path = plan.socket.listens_at()?;
    Some(Endpoint::Listen { path, permissions: access.permissions() })
}

/// Checks that no other process listens at a socket's path. If the plan allows to wait for the path
/// (`wait` is not 0), another process there is no error.
pub fn free(
    path: &Path,
    wait: Option<u32>,
    at: impl FnOnce() -> String,
) -> Result<(), AssembleError> {
    match check_path(path) {
        Err(ListenError::Taken { .. }) if wait != Some(0) => Ok(()),
        checked => checked.map_err(|source| AssembleError::Socket { at: at(), source }),
    }
}

/// Returns a device's endpoint and options. Adopts its socket if another process passed the
/// socket's descriptor to this one.
///
/// # Errors
/// [`AssembleError::Fd`]: the descriptor cannot be adopted. [`AssembleError::Unfound`]: the
/// socket's folder does not exist yet.
pub fn served(plan: &DevicePlan) -> Result<Served, AssembleError> {
    let mut at = plan.place.at("socket_path");
    let endpoint = match &plan.socket {
        SocketPlan::Listen { path, access, .. } => {
            let Some(found) = plan.socket.listens_at() else {
                let problem = format!("the folder of {} does not exist yet", path.display());
                let unfound = Unfound { key: "socket_path", problem };
                return Err(AssembleError::unfound(&plan.place, unfound));
            };
            Endpoint::Listen { path: found, permissions: access.permissions() }
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
    let options = options::of_front_end(&plan.front_end);
    let options = ServeOptions { one_off: plan.one_off, ..options };
    Ok(Served { endpoint, options, at })
}
