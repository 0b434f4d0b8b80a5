//! Listening sockets: those that the service manager passes to this process, and those that it
//! keeps for the next process.
//!
//! The manager gets each listening socket under the name `s.DEVICE.ID` (`c.KEY.ID` for a control
//! socket), where `ID` is the device and inode number of the socket's path. The next process adopts
//! the socket if its path still leads to that file, with the owner and mode in the configuration.
//! Clients that connect meanwhile wait in the backlog. A socket under another name (from a systemd
//! socket unit) belongs to the device or control socket that its name (`FileDescriptorName=`) or
//! its path matches; the manager removes its path.

use super::{Service, identity};
use crate::times::SOCKETS_REMOVE;
use manyring_engine::{aside, aside_for};
use manyring_transport::vhost_user::{ListenError, Listener, SocketPermissions, remove_name};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use std::collections::{BTreeMap, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};

/// The number of the first passed descriptor (sd_listen_fds(3)).
const FIRST: i32 = 3;

/// A socket that the manager, or a former process, passed to this process.
#[derive(Debug)]
pub(super) struct Handed {
    name: String,
    socket: OwnedFd,
    /// The present path of the socket, if the former process passed an `O_PATH` descriptor of it.
    path: Option<PathBuf>,
}

/// A listening socket, as one process passes it to the next.
#[derive(Debug)]
pub struct HandedSocket {
    /// The name under which the manager keeps the socket.
    pub name: String,
    /// The listening socket.
    pub socket: OwnedFd,
    /// The socket's path, opened with `O_PATH`.
    pub file: Option<OwnedFd>,
}

/// A copy of a socket at which this process listens, and the socket's path.
#[derive(Debug)]
pub(super) struct Listening {
    socket: OwnedFd,
    /// `None`: another process created the path, and removes it.
    path: Option<PathBuf>,
}

/// The device or control socket that a socket belongs to.
#[derive(Clone, Copy, Debug)]
pub enum Whose<'a> {
    /// The device of this name.
    Device(&'a str),
    /// The control socket of this key of the configuration.
    Control(&'a str),
}

impl Whose<'_> {
    fn name(&self) -> &str {
        match self {
            Self::Device(name) | Self::Control(name) => name,
        }
    }

    /// Returns the prefix of the names under which the manager keeps such a socket.
    fn kept(&self) -> String {
        match self {
            Self::Device(name) => format!("s.{name}."),
            Self::Control(key) => format!("c.{key}."),
        }
    }
}

/// Adopts the sockets that the manager passed to this process, except those in `named`.
pub(super) fn handed(named: &[i32]) -> Vec<Handed> {
    let is_ours = super::number("LISTEN_PID") == Some(std::process::id().into());
    let count = super::number("LISTEN_FDS").filter(|_| is_ours);
    let count = count.and_then(|count| i32::try_from(count).ok()).unwrap_or(0);
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let mut handed = Vec::new();
    for fd in FIRST..FIRST.saturating_add(count) {
        let name = names.next().unwrap_or_default().to_owned();
        if named.contains(&fd) {
            continue;
        }
        match crate::fds::adopt_socket(fd) {
            Ok(socket) => handed.push(Handed { name, socket, path: None }),
            Err(error) => tracing::error!(
                name,
                %error,
                "a file descriptor that was passed to this process is unusable"
            ),
        }
    }
    handed
}

/// Registration of a listening socket with the manager. Dropping it has the manager close its copy,
/// unless the process is about to end.
#[derive(Debug)]
pub struct Kept {
    service: Arc<Service>,
    name: String,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.service.lock_listening().remove(&self.name);
        if !self.service.is_ending.load(Ordering::Relaxed) {
            self.service.forget(&self.name);
        }
    }
}

impl Service {
    fn handed(&self) -> MutexGuard<'_, Vec<Handed>> {
        self.handed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if a passed socket fits this path.
    pub fn has(&self, whose: Whose<'_>, path: &Path, permissions: SocketPermissions) -> bool {
        self.handed().iter().any(|handed| handed.is_for(whose, path, permissions))
    }

    /// Listens at a path: on the passed socket that fits, or on a new one. Another thread does
    /// this, since the folder may be on a host that does not answer.
    ///
    /// # Errors
    /// [`ListenError`].
    pub async fn listen(
        self: &Arc<Self>,
        whose: Whose<'_>,
        path: PathBuf,
        permissions: SocketPermissions,
    ) -> Result<Listener, ListenError> {
        if let Some(handed) = self.take(whose, &path, permissions).await {
            return handed;
        }
        Listener::bind_aside(whose.name(), path, permissions).await
    }

    /// Takes the passed socket that fits a path, if there is one.
    pub async fn take(
        self: &Arc<Self>,
        whose: Whose<'_>,
        path: &Path,
        permissions: SocketPermissions,
    ) -> Option<Result<Listener, ListenError>> {
        if self.handed().is_empty() {
            return None;
        }
        let (service, at, name) = (self.clone(), path.to_owned(), whose.name().to_owned());
        let is_device = matches!(whose, Whose::Device(_));
        let taken = aside_for(whose.name(), move || {
            let whose = if is_device { Whose::Device(&name) } else { Whose::Control(&name) };
            service.take_handed(whose, &at, permissions)
        });
        taken.await.unwrap_or_else(|| Some(Err(ListenError::Slow { path: path.to_owned() })))
    }

    fn take_handed(
        &self,
        whose: Whose<'_>,
        path: &Path,
        permissions: SocketPermissions,
    ) -> Option<Result<Listener, ListenError>> {
        let (Handed { name, socket, .. }, is_kept) = {
            let mut handed = self.handed();
            let kept = handed.iter().position(|h| h.is_kept_for(whose, path, permissions));
            let any = || handed.iter().position(|h| h.is_for(whose, path, permissions));
            let index = kept.or_else(any)?;
            (handed.remove(index), kept.is_some())
        };
        tracing::debug!(name, path = %path.display(), "took over a socket");
        self.taken_over.fetch_add(1, Ordering::Relaxed);
        let mut adopted = Listener::adopt(socket, path, is_kept);
        if let Ok(listener) = &mut adopted {
            listener.set_stays(self.is_candidate.clone());
        }
        Some(adopted)
    }

    /// Logs the number of passed sockets at which this process has begun to listen since the last
    /// such line.
    pub(super) fn log_taken_over(&self) {
        match self.taken_over.swap(0, Ordering::Relaxed) {
            0 => {}
            1 => tracing::info!("took over 1 socket"),
            count => tracing::info!("took over {count} sockets"),
        }
    }

    /// Has the manager keep a copy of a socket, whose path then stays when the process ends.
    /// `None`: there is no manager that keeps sockets, or this failed.
    pub fn keep(self: &Arc<Self>, whose: Whose<'_>, listener: &mut Listener) -> Option<Kept> {
        let name = match listener.identity() {
            Some((device, inode)) => format!("{}{device:x}-{inode:x}", whose.kept()),
            // A socket unit of the manager created the socket and its path.
            None => whose.name().to_owned(),
        };
        let unkept = |error: &std::io::Error| {
            tracing::warn!(name, %error, "keeping the socket for the next process failed");
        };
        let copy = || listener.socket().as_fd().try_clone_to_owned().inspect_err(unkept).ok();
        let path = listener.own_path().map(Path::to_owned);
        self.lock_listening().insert(name.clone(), Listening { socket: copy()?, path });
        if let Some(manager) = self.manager.as_ref().filter(|_| self.keeps)
            && listener.identity().is_some()
        {
            manager.tell(format!("FDSTORE=1\nFDNAME={name}\n"), Some(copy()?));
            listener.set_stays(self.is_ending.clone());
        }
        Some(Kept { service: self.clone(), name })
    }

    fn lock_listening(&self) -> MutexGuard<'_, BTreeMap<String, Listening>> {
        self.listening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adopts sockets that another process passed, under the names of [`Self::listening`].
    pub async fn hand_in(&self, sockets: Vec<HandedSocket>) {
        let (sockets, files): (Vec<_>, Vec<_>) =
            sockets.into_iter().map(|handed| ((handed.name, handed.socket), handed.file)).unzip();
        // The file may have been renamed since: /proc shows its present path.
        let path = |file: Option<OwnedFd>| file.and_then(|file| crate::fds::path_of(&file));
        let paths = aside(move || files.into_iter().map(path).collect::<Vec<_>>());
        let paths = tokio::time::timeout(SOCKETS_REMOVE, paths).await.ok().flatten();
        let paths = paths.unwrap_or_default().into_iter().chain(std::iter::repeat_with(|| None));
        let handed = |((name, socket), path)| Handed { name, socket, path };
        self.handed().extend(sockets.into_iter().zip(paths).map(handed));
    }

    /// Returns copies of all listening sockets for another process, with their names. The `O_PATH`
    /// descriptors of their paths are included if the host opens them at once.
    pub async fn listening(&self) -> std::io::Result<Vec<HandedSocket>> {
        let copies: Vec<_> = {
            let listening = self.lock_listening();
            let copy = |(name, Listening { socket, path }): (&String, &Listening)| {
                Ok((name.clone(), socket.try_clone()?, path.clone()))
            };
            listening.iter().map(copy).collect::<std::io::Result<_>>()?
        };
        let paths: Vec<_> = copies.iter().map(|(_, _, path)| path.clone()).collect();
        let open = |path: PathBuf| {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::open(path, flags, Mode::empty()).ok()
        };
        let files = aside(move || paths.into_iter().map(|path| open(path?)).collect::<Vec<_>>());
        let files = tokio::time::timeout(SOCKETS_REMOVE, files).await.ok().flatten();
        let files = files.unwrap_or_default().into_iter().chain(std::iter::repeat_with(|| None));
        let left = |((name, socket, _), file)| HandedSocket { name, socket, file };
        Ok(copies.into_iter().zip(files).map(left).collect())
    }

    fn forget(&self, name: &str) {
        if self.keeps {
            self.tell(format!("FDSTOREREMOVE=1\nFDNAME={name}\n"));
        }
    }

    /// Sets aside each passed socket that fits no device and no control socket of the configuration
    /// (`all`): `remove_unused` closes it later.
    pub fn retain<'a>(&self, all: impl Iterator<Item = (Whose<'a>, PathBuf, SocketPermissions)>) {
        let mut handed = self.handed();
        let mut wanted = HashSet::new();
        for (whose, path, permissions) in all {
            let found = handed.iter().filter(|h| h.is_for(whose, &path, permissions));
            wanted.extend(found.map(|h| h.name.clone()));
        }
        let (kept, others): (Vec<_>, _) =
            handed.drain(..).partition(|handed| wanted.contains(&handed.name));
        *handed = kept;
        drop(handed);
        for Handed { name, .. } in &others {
            tracing::warn!(
                name,
                "a socket that was passed to this process is unused by the configuration"
            );
            self.forget(name);
        }
        self.unused().extend(others);
    }

    fn unused(&self) -> MutexGuard<'_, Vec<Handed>> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the passed sockets that are not used, and removes their paths: a client that connects
    /// there would never be served, since the process that passed them has ended.
    pub(super) async fn remove_unused(&self) {
        let unused = std::mem::take(&mut *self.unused());
        if unused.is_empty() {
            return;
        }
        let removed = aside(move || {
            for handed in unused {
                let name = &handed.name;
                if let Some(path) = handed.remove() {
                    tracing::info!(name, path = %path.display(), "socket unlinked");
                }
            }
        });
        if tokio::time::timeout(SOCKETS_REMOVE, removed).await.is_err() {
            tracing::warn!("unlinking sockets timed out; continuing without it");
        }
    }
}

impl Handed {
    /// Removes the socket's path, and returns it. `None`: the path now leads to another file, or no
    /// earlier process of this program created it. May block.
    fn remove(&self) -> Option<PathBuf> {
        let (_, id) = self.name.rsplit_once('.')?;
        let (device, inode) = id.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let (device, inode) = (number(device)?, number(inode)?);
        let path = self.path.clone().or_else(|| crate::fds::path_of_socket(&self.socket))?;
        remove_name(&path, device, inode).then_some(path)
    }

    fn is_for(&self, whose: Whose<'_>, path: &Path, permissions: SocketPermissions) -> bool {
        self.is_kept_for(whose, path, permissions)
            || self.name == whose.name()
            || self.is_bound_to(path)
    }

    /// True if an earlier process of this program listened here with this socket: its name, owner
    /// and mode are as the configuration says now.
    fn is_kept_for(&self, whose: Whose<'_>, path: &Path, permissions: SocketPermissions) -> bool {
        let Some(id) = self.name.strip_prefix(&whose.kept()) else { return false };
        let Some((found, (device, inode))) = identity(path) else { return false };
        let SocketPermissions { owner, group, mode } = permissions;
        let is = |wanted: Option<u32>, found: u32| wanted.is_none_or(|wanted| wanted == found);
        id == format!("{device:x}-{inode:x}")
            && is(owner, found.uid())
            && is(group, found.gid())
            && is(mode, found.mode() & 0o7777)
    }

    /// True if the socket was bound to exactly this path.
    fn is_bound_to(&self, path: &Path) -> bool {
        let address = rustix::net::getsockname(&self.socket);
        let address = address.ok().and_then(|any| rustix::net::SocketAddrUnix::try_from(any).ok());
        let bound = address.as_ref().and_then(|address| address.path_bytes());
        bound.is_some_and(|bound| bound == path.as_os_str().as_encoded_bytes())
    }
}
