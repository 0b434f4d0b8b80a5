//! The socket's name. It is created by rename, so that it appears only when the socket listens.
//!
//! Others may be able to write to the socket's folder. So the socket is bound in a folder of its
//! own that only this process's user may enter, gets its owner and mode there, and is then renamed:
//! an attacker who replaces a name in the shared folder cannot have this process change another
//! file.

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

/// Who may connect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketPermissions {
    /// Owner, as a user id.
    pub owner: Option<u32>,
    /// Group, as a group id.
    pub group: Option<u32>,
    /// Mode bits.
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
/// [`ListenError`], one for each reason. `Taken` may pass: a killed process holds its sockets until
/// the last of its threads has ended.
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

/// Looks at a path, whether or not a process listens there: its length, its folder, and that
/// nothing but a socket has its name. Asks no process.
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

/// Refuses a folder in which everybody may replace the names of others: clients would connect to
/// the socket of an attacker who has replaced the name.
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

/// True if no process holds the socket: a killed process has left its name.
///
/// The probe is a datagram socket. The kernel first looks for the socket behind the name
/// (`ECONNREFUSED`: no process has it), and then compares the types (`EPROTOTYPE`: a process has
/// it, and it is a stream socket, as ours are). So a process that listens there sees no connection.
/// It would take one for a client, and a back-end that serves only one session would end with it.
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

/// A listening socket with a name.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    name: Option<SocketName>,
}

/// The name of a socket. It is removed when this is dropped, unless another socket has it by then.
#[derive(Debug)]
pub struct SocketName {
    path: PathBuf,
    device: u64,
    inode: u64,
    /// While this is set the name stays: somebody else has the socket too, and goes on with it.
    stays: Option<Arc<AtomicBool>>,
    is_removed: bool,
    _made: BoundName,
}

/// How long a name that is removed is waited for.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(1);

static COUNTER: AtomicU32 = AtomicU32::new(0);

/// A socket that listens, and whose name nobody sees yet. Dropping it removes all that was made.
#[derive(Debug)]
pub struct Unnamed {
    socket: UnixListener,
    own: OwnFolder,
    path: PathBuf,
}

impl Unnamed {
    /// Binds in a folder of its own, and sets owner, group and mode there. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`ListenError`], one for each reason; the socket and its folder are removed.
    pub fn bind(path: &Path, permissions: SocketPermissions) -> Result<Self, ListenError> {
        check_path(path)?;
        let failed = |source: io::Error| at_io(path, source);
        let folder = std::fs::File::open(folder_of(path)).map_err(failed)?;
        // The folder that is used, not the one that had this path a moment ago.
        check_folder(path, &folder.metadata().map_err(failed)?)?;
        path.file_name().ok_or_else(|| failed(Errno::INVAL.into()))?;
        let own = OwnFolder::new(folder, path).map_err(|errno| failed(errno.into()))?;
        let socket = own.bind().map_err(failed)?;
        own.give(path, permissions)?;
        own.set_mode(permissions.mode).map_err(|errno| failed(errno.into()))?;
        Ok(Self { socket, own, path: path.to_path_buf() })
    }

    /// The name that it will have.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the socket its name, in place of a socket that has it.
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
    /// Binds as [`Unnamed::bind`] does, and names the socket. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`ListenError`], one for each reason; the socket and its folder are removed.
    pub fn bind(path: &Path, permissions: SocketPermissions) -> Result<Self, ListenError> {
        Unnamed::bind(path, permissions)?.publish()
    }

    /// Binds as [`Self::bind`] does, on a thread of its own, since the folder can be on a host that
    /// does not answer: then the log names the thread with the `device`.
    ///
    /// # Errors
    /// [`ListenError`].
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

    /// Takes a socket over that listens already, and was bound by another process. With `owns_name`
    /// the name goes with it, as if it had been made here. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`ListenError::Io`]: it does not listen; or the name is to be owned, and is gone.
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

    /// Keeps the name on drop while `stays` is set: another process holds the socket, and goes on
    /// with it.
    pub fn set_stays(&mut self, stays: Arc<AtomicBool>) {
        if let Some(name) = &mut self.name {
            name.stays = Some(stays);
        }
    }

    /// Device and inode of the name, by which the socket can be known again; `None` if the name is
    /// another process's.
    #[must_use]
    pub fn identity(&self) -> Option<(u64, u64)> {
        self.name.as_ref().map(|name| (name.device, name.inode))
    }

    /// The socket, to accept from.
    #[must_use]
    pub fn socket(&self) -> &UnixListener {
        &self.socket
    }

    /// The socket's name, for people.
    #[must_use]
    pub fn path(&self) -> std::path::Display<'_> {
        self.path.display()
    }

    /// The socket without its name, to be closed by the janitor: with it the kernel closes the fds
    /// that clients have sent and whose connections nobody has accepted, which may block.
    #[must_use]
    pub fn into_socket(self) -> UnixListener {
        self.socket
    }

    /// The path of the socket's name; `None` if the name is another process's.
    #[must_use]
    pub fn own_path(&self) -> Option<&Path> {
        self.name.as_ref().map(|name| name.path.as_path())
    }

    /// Takes the name, so that it can be removed before the socket is closed.
    pub fn take_name(&mut self) -> Option<SocketName> {
        self.name.take()
    }
}

/// A folder beside the socket's name in which only this process's user can have any name. It is
/// removed on drop, with all names in it.
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

/// Names of such folders that are tried.
const NAMES_MAX: u32 = 1000;
/// The socket's name in its own folder.
const OWN_NAME: &str = "s";

impl OwnFolder {
    /// For the socket that gets the name `path`.
    fn new(parent: std::fs::File, path: &Path) -> Result<Self, Errno> {
        let made = BoundName::new(path.to_path_buf());
        let name = Self::make(&parent)?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(&parent, &name, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&folder)?;
        // Somebody may have put another folder in its place.
        let is_own = stat.st_uid == rustix::process::geteuid().as_raw();
        if !is_own || stat.st_mode & 0o077 != 0 {
            return Err(Errno::PERM);
        }
        Ok(Self { names: Arc::new(Names { parent, name, folder }), is_removed: false, _made: made })
    }

    /// Removes it at once. May block.
    fn remove(&mut self) {
        self.names.remove();
        self.is_removed = true;
    }

    /// Makes the folder, by the first name that is free: a process of the same number that was
    /// killed may have left its own, as every daemon in a container of its own has number 1.
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

    /// Binds to a name in the folder by the folder's fd: its path could be longer than
    /// [`PATH_LEN_MAX`], and a user who may write to the parent could rename it.
    fn bind(&self) -> io::Result<UnixListener> {
        let number = self.names.folder.as_raw_fd();
        UnixListener::bind(format!("/proc/self/fd/{number}/{OWN_NAME}"))
    }

    /// Gives the socket to its group and its owner; `path` is the name that it will have.
    fn give(&self, path: &Path, permissions: SocketPermissions) -> Result<(), ListenError> {
        let SocketPermissions { owner, group, .. } = permissions;
        let own = |owner: Option<u32>, group: Option<u32>| {
            let (owner, group) = (owner.map(Uid::from_raw), group.map(Gid::from_raw));
            chownat(&self.names.folder, OWN_NAME, owner, group, AtFlags::SYMLINK_NOFOLLOW)
        };
        let path = || path.to_path_buf();
        // First the group: an owner may give the file to one of his groups, but only while he is
        // the owner.
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

    /// Moves the socket to `name` in the folder beside which this one lies.
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
    /// The name of the socket that somebody has bound to `path`.
    ///
    /// # Errors
    /// The system's: nothing has this name.
    pub fn at(path: PathBuf) -> io::Result<Self> {
        let found = std::fs::symlink_metadata(&path)?;
        Ok(Self::new(path, found.dev(), found.ino()))
    }

    /// The name with this device and inode.
    fn new(path: PathBuf, device: u64, inode: u64) -> Self {
        let made = BoundName::new(path.clone());
        Self { path, device, inode, stays: None, is_removed: false, _made: made }
    }

    /// Removes the name on a thread of its own, and waits until it is gone: a second at most, if
    /// the host does not answer. The thread is named with the `device` then.
    pub async fn removed(mut self, device: &str) {
        let path = self.path.clone();
        let gone = aside_for(device, move || self.remove());
        if tokio::time::timeout(REMOVE_TIMEOUT, gone).await.is_err() {
            tracing::warn!(device, "unlinking {} timed out; continuing without it", path.display());
        }
    }
}

impl SocketName {
    /// Removes it at once. May block.
    fn remove(&mut self) {
        remove_socket(&self.path, self.device, self.inode, self.stays.as_deref());
        self.is_removed = true;
    }
}

/// Removes the name of a socket, if it is still that of this socket: device and inode.
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
