//! How a device gets its front-end: it listens, connects, or inherits a socket.

use super::{AccessPlan, Pinned, Place, PlanError, check_len};
use crate::tables::RawSocket;
use manyring_transport::vhost_user::ListenError;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// How a device gets its front-end.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SocketPlan {
    /// The daemon listens, the front-end connects.
    Listen {
        /// Path of the socket.
        path: PathBuf,
        /// The resolved folder of the socket, if an unprivileged user has named it (`allow_paths`).
        #[serde(skip)]
        folder: Option<Pinned>,
        /// Owner and mode of the socket.
        #[serde(flatten)]
        access: AccessPlan,
    },
    /// The front-end listens, the daemon connects.
    Connect {
        /// Path of the socket.
        path: PathBuf,
    },
    /// A listening socket that was passed when the daemon started.
    Fd(i32),
}

impl SocketPlan {
    pub(super) fn new(raw: RawSocket, place: &Place) -> Result<Self, PlanError> {
        let access = AccessPlan::new(&raw, place)?;
        let key = |key| place.key(key);
        if raw.client || raw.fd.is_some() {
            // Another process has created the socket, and set its permissions.
            let whose = key(if raw.client { "client" } else { "fd" });
            for (name, is_set) in [
                ("socket_owner", raw.socket_owner.is_some()),
                ("socket_group", raw.socket_group.is_some()),
                ("socket_mode", raw.socket_mode.is_some()),
            ] {
                if is_set {
                    let problem =
                        format!("cannot be combined with {whose}: the socket is created elsewhere");
                    return place.error(name, problem);
                }
            }
        }
        match (raw.socket_path, raw.fd) {
            (Some(_), Some(_)) => {
                place.error("fd", format!("cannot be combined with {}", key("socket_path")))
            }
            (None, None) => place.error("socket_path", format!("is missing (or {})", key("fd"))),
            (None, Some(_)) if raw.client => {
                place.error("client", format!("needs {}", key("socket_path")))
            }
            (None, Some(fd)) if fd < 3 => {
                place.error("fd", format!("{fd} is not a socket that was passed to this process"))
            }
            (None, Some(fd)) => Ok(Self::Fd(fd)),
            (Some(path), None) => {
                check_len(&path, place, "socket_path")?;
                if raw.client {
                    return Ok(Self::Connect { path });
                }
                Ok(Self::Listen { path, folder: None, access })
            }
        }
    }

    /// Returns the socket's path, if it has one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Listen { path, .. } | Self::Connect { path } => Some(path),
            Self::Fd(_) => None,
        }
    }

    /// Puts the configured path into an error of this socket. The error may name a path in
    /// `/proc/self/fd` instead (see [`Self::listens_at`]), which tells the operator nothing.
    pub fn error(&self, mut error: ListenError) -> ListenError {
        let Some(name) = self.path() else { return error };
        match &mut error {
            ListenError::PathTooLong { path }
            | ListenError::Taken { path }
            | ListenError::NotASocket { path }
            | ListenError::OpenFolder { path, .. }
            | ListenError::Owner { path, .. }
            | ListenError::Group { path, .. }
            | ListenError::Slow { path }
            | ListenError::Io { path, .. } => *path = name.to_path_buf(),
        }
        error
    }

    /// Returns the path at which the daemon listens. If an unprivileged user named it, the path
    /// goes through the resolved folder. `None`: the folder is not resolved yet, or the daemon does
    /// not create the socket.
    pub fn listens_at(&self) -> Option<PathBuf> {
        match self {
            Self::Listen { path, folder: None, .. } => Some(path.clone()),
            Self::Listen { path, folder: Some(folder), .. } => {
                Some(folder.found()?.join(path.file_name().unwrap_or_default()))
            }
            Self::Connect { .. } | Self::Fd(_) => None,
        }
    }
}
