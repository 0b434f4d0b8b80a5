//! Creates listening sockets. A socket gets its path by rename, so the path appears only when the
//! socket listens.
//!
//! Other users may write to the socket's folder. So the socket is bound in a private folder that
//! only this process's user may enter, gets its owner and mode there, and is then renamed: an
//! attacker cannot replace it by a link to a file whose owner and mode would then be changed.

mod removal;

pub use removal::{names_left, remove_name};

use manyring_engine::aside_for;
use removal::BoundName;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Stat, Uid};
use rustix::fs::{chmodat, chownat, renameat, statat, unlinkat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use tokio::net::UnixListener;

/// Longest path of a unix socket, in bytes (`sun_path` without its terminator).
pub const PATH_LEN_MAX: usize = 107;

/// The owner, group and mode of a socket, which decide who may connect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketPermissions {
    /// The user id of the owner; `None`: as for any file that the process creates.
    pub owner: Option<u32>,
    /// The group id; `None`: as for any file that the process creates.
    pub group: Option<u32>,
    /// The mode bits; `None`: as the process's umask gives them.
    pub mode: Option<u32>,
}

/// Why a socket cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum ListenError {
    #[error("socket path {} is longer than {PATH_LEN_MAX} bytes", path.display())]
    PathTooLong { path: PathBuf },
    #[error("socket path {} is in use: another process listens there", path.display())]
    Taken { path: PathBuf },
    #[error("socket path {} is in use: it is not a socket", path.display())]
    NotASocket { path: PathBuf },
    #[error(
        "cannot listen on {}: any user can replace files in its folder (mode {mode:04o}); remove \
         the write permission of others, or set the sticky bit", path.display()
    )]
    OpenFolder { path: PathBuf, mode: u32 },
    #[error("cannot give the socket {} to user {owner}: {errno}{}", path.display(), lacks(*errno))]
    Owner { path: PathBuf, owner: u32, errno: Errno },
    #[error("cannot give the socket {} to group {group}: {errno}{}", path.display(), lacks(*errno))]
    Group { path: PathBuf, group: u32, errno: Errno },
    #[error("cannot listen on {}: timed out; the file system does not respond", path.display())]
    Slow { path: PathBuf },
    #[error("cannot listen on {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

fn lacks(errno: Errno) -> &'static str {
    if errno == Errno::PERM { " (needs CAP_CHOWN)" } else { "" }
}

/// Checks a path without creating anything: its length, its folder, and whether another process
/// listens there.
///
/// # Errors
/// [`ListenError`]: why no socket can be created at the path. After `Taken` another attempt may
/// succeed: the sockets of a killed process stay open until its last thread has ended.
pub fn check_path(path: &Path) -> Result<(), ListenError> {
    look_at_path(path)?;
    if !std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        return Ok(());
    }
    match is_stale(path) {
        Ok(true) => Ok(()),
        Ok(false) => Err(ListenError::Taken { path: path.to_path_buf() }),
        // The process that listened there has just removed its socket.
        Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(at_io(path, errno.into())),
    }
}

/// Checks a path without probing whether a process listens there: its length, its folder, and that
/// the path names a socket or nothing.
///
/// # Errors
/// As [`check_path`], but for `Taken`.
pub fn look_at_path(path: &Path) -> Result<(), ListenError> {
    let at = || path.to_path_buf();
    if path.as_os_str().len() > PATH_LEN_MAX {
        return Err(ListenError::PathTooLong { path: at() });
    }
    let folder = folder_of(path);
    match std::fs::metadata(folder) {
        Ok(found) if !found.is_dir() => return Err(at_io(path, Errno::NOTDIR.into())),
        found => check_folder(path, &found.map_err(|source| at_io(path, source))?)?,
    }
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(at_io(path, source)),
        Ok(stat) if !stat.file_type().is_socket() => Err(ListenError::NotASocket { path: at() }),
        Ok(_) => Ok(()),
    }
}

/// Refuses a folder in which every user may replace files of others: an attacker could replace the
/// socket by one of his own, to which clients would connect.
fn check_folder(path: &Path, folder: &std::fs::Metadata) -> Result<(), ListenError> {
    const STICKY: u32 = 0o1000;
    const ALL_WRITE: u32 = 0o002;
    let mode = folder.mode() & 0o7777;
    if mode & ALL_WRITE != 0 && mode & STICKY == 0 {
        return Err(ListenError::OpenFolder { path: path.to_path_buf(), mode });
    }
    Ok(())
}

fn at_io(path: &Path, source: io::Error) -> ListenError {
    ListenError::Io { path: path.to_path_buf(), source }
}

/// True if no process has the socket at the path open: a killed process has left the path behind.
///
/// The probe is a datagram socket. The kernel first looks for the socket behind the path
/// (`ECONNREFUSED`: no process has it open), and then compares the types (`EPROTOTYPE`: a process
/// has it open, and it is a stream socket, like ours). So a process that listens there sees no
/// connection, which it would serve as a client: a one-off back-end would end after that.
fn is_stale(path: &Path) -> Result<bool, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    match rustix::net::connect(&probe, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => Ok(true),
        Ok(()) | Err(Errno::PROTOTYPE | Errno::AGAIN | Errno::PERM) => Ok(false),
        Err(errno) => Err(errno),
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A listening socket at its path.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    name: Option<SocketName>,
}

/// The path of a socket. Dropping this unlinks the path, unless it names another socket by then.
#[derive(Debug)]
pub struct SocketName {
    path: PathBuf,
    device: u64,
    inode: u64,
    /// While this is set, dropping does not unlink the path: another process has the socket open
    /// too, and continues to serve it.
    stays: Option<Arc<AtomicBool>>,
    is_removed: bool,
    _made: BoundName,
}

/// How long unlinking a path may take before it is no longer waited for.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(1);

static COUNTER: AtomicU32 = AtomicU32::new(0);

/// A socket that listens in its private folder. Dropping it removes the socket and the folder.
#[derive(Debug)]
pub struct Unnamed {
    socket: UnixListener,
    own: OwnFolder,
    path: PathBuf,
}

impl Unnamed {
    /// Binds the socket in a private folder beside `path`, and sets owner, group and mode there.
    /// Needs a tokio runtime.
    ///
    /// # Errors
    /// [`ListenError`]: why the socket cannot be created. Socket and folder are removed.
    pub fn bind(path: &Path, permissions: SocketPermissions) -> Result<Self, ListenError> {
        check_path(path)?;
        let failed = |source: io::Error| at_io(path, source);
        let folder = std::fs::File::open(folder_of(path)).map_err(failed)?;
        // Check the opened folder: the path may name another folder by now than in `check_path`.
        check_folder(path, &folder.metadata().map_err(failed)?)?;
        path.file_name().ok_or_else(|| failed(Errno::INVAL.into()))?;
        let own = OwnFolder::new(folder, path).map_err(|errno| failed(errno.into()))?;
        let socket = own.bind().map_err(failed)?;
        own.give(path, permissions)?;
        own.set_mode(permissions.mode).map_err(|errno| failed(errno.into()))?;
        Ok(Self { socket, own, path: path.to_path_buf() })
    }

    /// Returns the path that the socket will have.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the socket to its path, replacing a socket there.
    ///
    /// # Errors
    /// [`ListenError::Io`]; the socket and its folder are removed.
    pub fn publish(self) -> Result<Listener, ListenError> {
        let Self { socket, mut own, path } = self;
        let name = path.file_name().unwrap_or_default();
        let stat = own.publish(name).map_err(|errno| at_io(&path, errno.into()))?;
        own.remove();
        let name = SocketName::new(path.clone(), stat.st_dev, stat.st_ino);
        Ok(Listener { socket, path, name: Some(name) })
    }
}

impl Listener {
    /// Binds as [`Unnamed::bind`] does, and renames the socket to its path. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`ListenError`]: why the socket cannot be created. Socket and folder are removed.
    pub fn bind(path: &Path, permissions: SocketPermissions) -> Result<Self, ListenError> {
        Unnamed::bind(path, permissions)?.publish()
    }

    /// Binds as [`Self::bind`] does, on a thread of its own, since the file system of the folder
    /// may not respond. `device` is the name under which such a blocked thread is logged.
    ///
    /// # Errors
    /// Those of [`Self::bind`], and [`ListenError::Slow`]: no thread is available.
    pub async fn bind_aside(
        device: &str,
        path: PathBuf,
        permissions: SocketPermissions,
    ) -> Result<Self, ListenError> {
        let failed = || ListenError::Slow { path: path.clone() };
        let (bound, made) = (path.clone(), BoundName::new(path.clone()));
        let bind = move || {
            let _made = made;
            Self::bind(&bound, permissions)
        };
        let bound = aside_for(device, bind).await;
        bound.ok_or_else(failed)?
    }

    /// Adopts a listening socket that another process has bound. With `owns_name`, dropping the
    /// listener unlinks the path, as if the socket had been bound here. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`ListenError::Io`]: the socket does not listen; or, with `owns_name`, the path is gone.
    pub fn adopt(socket: OwnedFd, path: &Path, owns_name: bool) -> Result<Self, ListenError> {
        let failed = |source: io::Error| at_io(path, source);
        if !rustix::net::sockopt::socket_acceptconn(&socket).map_err(|e| failed(e.into()))? {
            return Err(failed(Errno::INVAL.into()));
        }
        let socket = std::os::unix::net::UnixListener::from(socket);
        socket.set_nonblocking(true).map_err(failed)?;
        let socket = UnixListener::from_std(socket).map_err(failed)?;
        let path = path.to_path_buf();
        if !owns_name {
            return Ok(Self { socket, path, name: None });
        }
        let found = std::fs::symlink_metadata(&path).map_err(|error| at_io(&path, error))?;
        let name = SocketName::new(path.clone(), found.dev(), found.ino());
        Ok(Self { socket, path, name: Some(name) })
    }

    /// Sets a flag that keeps the path: while `stays` is true, dropping the listener does not
    /// unlink the path, because another process has the socket open and continues to serve it.
    pub fn set_stays(&mut self, stays: Arc<AtomicBool>) {
        if let Some(name) = &mut self.name {
            name.stays = Some(stays);
        }
    }

    /// Returns device and inode of the path, which identify the socket; `None` if the path belongs
    /// to another process.
    #[must_use]
    pub fn identity(&self) -> Option<(u64, u64)> {
        self.name.as_ref().map(|name| (name.device, name.inode))
    }

    /// Returns the listening socket.
    #[must_use]
    pub fn socket(&self) -> &UnixListener {
        &self.socket
    }

    /// Returns the socket's path, for messages.
    #[must_use]
    pub fn path(&self) -> std::path::Display<'_> {
        self.path.display()
    }

    /// Returns the socket without its path. A janitor must close it, which may block: the kernel
    /// also closes the descriptors that clients have sent on connections which nobody accepted.
    #[must_use]
    pub fn into_socket(self) -> UnixListener {
        self.socket
    }

    /// Returns the path that dropping the listener unlinks; `None` if another process owns it.
    #[must_use]
    pub fn own_path(&self) -> Option<&Path> {
        self.name.as_ref().map(|name| name.path.as_path())
    }

    /// Takes the path out, so that it can be unlinked before the socket is closed.
    pub fn take_name(&mut self) -> Option<SocketName> {
        self.name.take()
    }
}

/// A private folder beside the socket's path, in which only this process's user can create files.
/// Dropping it removes the folder with its socket.
#[derive(Debug)]
struct OwnFolder {
    names: Arc<Names>,
    is_removed: bool,
    _made: BoundName,
}

#[derive(Debug)]
struct Names {
    parent: std::fs::File,
    name: String,
    folder: OwnedFd,
}

/// How many names are tried for a private folder.
const NAMES_MAX: u32 = 1000;
/// The socket's name in its private folder.
const OWN_NAME: &str = "s";

impl OwnFolder {
    /// Creates the private folder of the socket that will get the path `path`.
    fn new(parent: std::fs::File, path: &Path) -> Result<Self, Errno> {
        let made = BoundName::new(path.to_path_buf());
        let name = Self::make(&parent)?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(&parent, &name, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&folder)?;
        // Another user may have replaced the folder since it was created.
        let is_own = stat.st_uid == rustix::process::geteuid().as_raw();
        if !is_own || stat.st_mode & 0o077 != 0 {
            return Err(Errno::PERM);
        }
        Ok(Self { names: Arc::new(Names { parent, name, folder }), is_removed: false, _made: made })
    }

    /// Removes the folder at once. May block.
    fn remove(&mut self) {
        self.names.remove();
        self.is_removed = true;
    }

    /// Creates the folder with the first free name. A killed process with the same process id may
    /// have left its folder behind: in a container, every daemon has process id 1.
    fn make(parent: &std::fs::File) -> Result<String, Errno> {
        let mut made = Err(Errno::EXIST);
        for _ in 0..NAMES_MAX {
            let number = COUNTER.fetch_add(1, Ordering::Relaxed);
            let name = format!(".mr-{}-{number}", std::process::id());
            made = rustix::fs::mkdirat(parent, &name, Mode::RWXU).map(|()| name);
            if !matches!(made, Err(Errno::EXIST)) {
                break;
            }
        }
        made
    }

    /// Binds a socket by the folder's descriptor: the folder's path could be longer than
    /// [`PATH_LEN_MAX`], and a user who may write to the parent could rename the folder.
    fn bind(&self) -> io::Result<UnixListener> {
        let number = self.names.folder.as_raw_fd();
        UnixListener::bind(format!("/proc/self/fd/{number}/{OWN_NAME}"))
    }

    /// Sets group and owner of the socket. `path` is the path that errors name.
    fn give(&self, path: &Path, permissions: SocketPermissions) -> Result<(), ListenError> {
        let SocketPermissions { owner, group, .. } = permissions;
        let own = |owner: Option<u32>, group: Option<u32>| {
            let (owner, group) = (owner.map(Uid::from_raw), group.map(Gid::from_raw));
            chownat(&self.names.folder, OWN_NAME, owner, group, AtFlags::SYMLINK_NOFOLLOW)
        };
        let path = || path.to_path_buf();
        // The group first: without CAP_CHOWN, only the owner of a file may change its group.
        if let Some(group) = group {
            own(None, Some(group)).map_err(|errno| ListenError::Group {
                path: path(),
                group,
                errno,
            })?;
        }
        if let Some(owner) = owner {
            own(Some(owner), None).map_err(|errno| ListenError::Owner {
                path: path(),
                owner,
                errno,
            })?;
        }
        Ok(())
    }

    fn set_mode(&self, mode: Option<u32>) -> Result<(), Errno> {
        let set = |mode| {
            let mode = Mode::from_raw_mode(mode);
            chmodat(&self.names.folder, OWN_NAME, mode, AtFlags::empty())
        };
        mode.map_or(Ok(()), set)
    }

    /// Renames the socket to `name` in the parent folder. Returns the socket's metadata.
    fn publish(&self, name: &OsStr) -> Result<Stat, Errno> {
        let Names { parent, folder, .. } = &*self.names;
        let stat = statat(folder, OWN_NAME, AtFlags::SYMLINK_NOFOLLOW)?;
        renameat(folder, OWN_NAME, parent, name)?;
        Ok(stat)
    }
}

impl Names {
    fn remove(&self) {
        let _ = unlinkat(&self.folder, OWN_NAME, AtFlags::empty());
        let _ = unlinkat(&self.parent, &self.name, AtFlags::REMOVEDIR);
    }
}

impl Drop for OwnFolder {
    fn drop(&mut self) {
        if !self.is_removed {
            let names = self.names.clone();
            removal::remove(Path::new(&self.names.name), move || names.remove());
        }
    }
}

impl SocketName {
    /// Names the path of a socket that other code has bound. Dropping the result unlinks the path.
    ///
    /// # Errors
    /// The path cannot be looked up, for example because nothing is there.
    pub fn at(path: PathBuf) -> io::Result<Self> {
        let found = std::fs::symlink_metadata(&path)?;
        Ok(Self::new(path, found.dev(), found.ino()))
    }

    /// Makes the name for the path of the socket with this device and inode.
    fn new(path: PathBuf, device: u64, inode: u64) -> Self {
        let made = BoundName::new(path.clone());
        Self { path, device, inode, stays: None, is_removed: false, _made: made }
    }

    /// Unlinks the path on a thread of its own, and waits for that, for a second at most. `device`
    /// is the name under which a blocked thread is logged.
    pub async fn removed(mut self, device: &str) {
        let path = self.path.clone();
        let gone = aside_for(device, move || self.remove());
        if tokio::time::timeout(REMOVE_TIMEOUT, gone).await.is_err() {
            tracing::warn!(device, "unlinking {} timed out; continuing without it", path.display());
        }
    }
}

impl SocketName {
    /// Unlinks the path at once. May block.
    fn remove(&mut self) {
        remove_socket(&self.path, self.device, self.inode, self.stays.as_deref());
        self.is_removed = true;
    }
}

/// Unlinks a path, if it still names the socket with this device and inode, and `stays` is not set.
fn remove_socket(path: &Path, device: u64, inode: u64, stays: Option<&AtomicBool>) {
    if stays.is_none_or(|stays| !stays.load(Ordering::Relaxed)) {
        remove_name(path, device, inode);
    }
}

impl Drop for SocketName {
    fn drop(&mut self) {
        if !self.is_removed {
            let (path, device, inode) = (self.path.clone(), self.device, self.inode);
            let stays = self.stays.clone();
            removal::remove(&self.path, move || {
                remove_socket(&path, device, inode, stays.as_deref())
            });
        }
    }
}

#[cfg(test)]
mod tests;
