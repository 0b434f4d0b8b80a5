//! The socket's name. It is created by rename, so that it appears only when the socket listens.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
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
    #[error("socket path {} is taken: another process listens there", path.display())]
    Taken { path: PathBuf },
    #[error("socket path {} is taken: it is no socket", path.display())]
    NotASocket { path: PathBuf },
    #[error("cannot listen on {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// Checks a path without creating anything: its length, its folder, and whether another process
/// listens there.
///
/// # Errors
/// [`ListenError`], one for each reason. `Taken` may pass: a killed process holds its sockets until
/// the last of its threads has ended.
pub fn check_path(path: &Path) -> Result<(), ListenError> {
    let at = || path.to_path_buf();
    if path.as_os_str().len() > PATH_LEN_MAX {
        return Err(ListenError::PathTooLong { path: at() });
    }
    let folder = folder_of(path);
    if !folder.is_dir() {
        let source = io::Error::from(Errno::NOENT);
        return Err(ListenError::Io { path: at(), source });
    }
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(ListenError::Io { path: at(), source }),
        Ok(stat) if !stat.file_type().is_socket() => Err(ListenError::NotASocket { path: at() }),
        Ok(_) => match is_stale(path) {
            Ok(true) => Ok(()),
            Ok(false) => Err(ListenError::Taken { path: at() }),
            // The process that listened there has removed its socket meanwhile.
            Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(ListenError::Io { path: at(), source: errno.into() }),
        },
    }
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
    name: Option<SocketName>,
}

/// The name of a socket. It is removed when this is dropped, unless another socket has it by then.
#[derive(Debug)]
pub(super) struct SocketName {
    path: PathBuf,
    inode: u64,
}

static COUNTER: AtomicU32 = AtomicU32::new(0);

impl Listener {
    /// Binds under a temporary name, sets owner, group and mode, and renames. Needs a tokio
    /// runtime.
    ///
    /// # Errors
    /// [`ListenError`], one for each reason; the temporary name is removed.
    pub fn bind(path: &Path, permissions: SocketPermissions) -> Result<Self, ListenError> {
        check_path(path)?;
        let failed = |source| ListenError::Io { path: path.to_path_buf(), source };
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!(".mr-{}-{number}", std::process::id());
        let temporary = folder_of(path).join(&name);
        let bound = bind_in(folder_of(path), &name).and_then(|socket| {
            dress(&temporary, permissions)?;
            let inode = std::fs::metadata(&temporary)?.ino();
            std::fs::rename(&temporary, path)?;
            Ok(Self { socket, name: Some(SocketName { path: path.to_path_buf(), inode }) })
        });
        bound.map_err(|error| {
            let _ = std::fs::remove_file(&temporary);
            failed(error)
        })
    }

    /// The socket, to accept from.
    #[must_use]
    pub fn socket(&self) -> &UnixListener {
        &self.socket
    }

    /// The socket without its name, to be closed by the janitor: with it the kernel closes the fds
    /// that clients have sent and whose connections nobody has accepted, which may block.
    pub(super) fn into_socket(self) -> UnixListener {
        self.socket
    }

    /// Takes the name, so that it can be removed before the socket is closed.
    pub(super) fn take_name(&mut self) -> Option<SocketName> {
        self.name.take()
    }
}

/// Binds to a name in a folder by the folder's fd: a temporary name that is longer than the final
/// one would exceed [`PATH_LEN_MAX`] otherwise.
fn bind_in(folder: &Path, name: &str) -> io::Result<UnixListener> {
    use rustix::fd::AsRawFd;
    let folder = std::fs::File::open(folder)?;
    let address = format!("/proc/self/fd/{}/{name}", folder.as_raw_fd());
    UnixListener::bind(address)
}

fn dress(path: &Path, permissions: SocketPermissions) -> io::Result<()> {
    if permissions.owner.is_some() || permissions.group.is_some() {
        std::os::unix::fs::chown(path, permissions.owner, permissions.group)?;
    }
    if let Some(mode) = permissions.mode {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))?;
    }
    Ok(())
}

impl Drop for SocketName {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path).is_ok_and(|s| s.ino() == self.inode);
        if ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
