//! Adopts file descriptors that were handed in, and raises the limit of all.
#![allow(unsafe_code, reason = "allow-listed: an inherited fd is a bare number")]

use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};
use std::ffi::c_void;
use std::path::PathBuf;

/// Why an fd cannot be adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FdError {
    /// The descriptor is not open.
    #[error("{fd} is not open: {errno}")]
    Closed {
        /// Its number.
        fd: i32,
        /// The error number of the system.
        errno: Errno,
    },
    /// The descriptor is open, but this process has opened it. The descriptors that this process
    /// opens are close-on-exec; those that are handed in are not.
    #[error("{fd} was not passed to this process")]
    Own {
        /// Its number.
        fd: i32,
    },
    /// The descriptor is open, but no unix socket.
    #[error("{fd} is not a unix socket")]
    Kind {
        /// Its number.
        fd: i32,
    },
}

/// Takes a unix socket over by its number; the same one a second time is refused.
pub(crate) fn adopt_socket(fd: i32) -> Result<OwnedFd, FdError> {
    let adopted = adopt(fd)?;
    let domain = rustix::net::sockopt::socket_domain(&adopted);
    if domain == Ok(rustix::net::AddressFamily::UNIX) {
        Ok(adopted)
    } else {
        Err(FdError::Kind { fd })
    }
}

/// Takes a file descriptor over by its number; the same one a second time is refused.
pub(crate) fn adopt(fd: i32) -> Result<OwnedFd, FdError> {
    // SAFETY: the fd is only looked at; if it is not open, the calls below say so.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::io::fcntl_getfd(borrowed).map_err(|errno| FdError::Closed { fd, errno })?;
    if flags.contains(rustix::io::FdFlags::CLOEXEC) {
        return Err(FdError::Own { fd });
    }
    let _ = rustix::io::fcntl_setfd(borrowed, rustix::io::FdFlags::CLOEXEC);
    // SAFETY: it is open, above the standard three, and named by the user for us to own.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Raises the limit of open files to the hard limit: a device takes about six of them.
pub fn raise_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = setrlimit(Resource::Nofile, raised);
}

/// The path by which a file is reached now, as the kernel shows it.
pub(crate) fn path_of(fd: &OwnedFd) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()
}

/// The present path of the file to which a unix socket is bound, even if the file was renamed.
/// `None`: the process has no `CAP_NET_ADMIN`, without which the kernel does not tell.
pub(crate) fn path_of_socket(socket: &OwnedFd) -> Option<PathBuf> {
    // SAFETY: the request takes no argument, and returns a descriptor that nobody else owns.
    let file = unsafe { rustix::ioctl::ioctl(socket, UnixFile) };
    path_of(&file.ok()?)
}

/// `SIOCUNIXFILE` (linux/un.h): opens the file to which a unix socket is bound, as a path alone.
struct UnixFile;

// SAFETY: the request has no argument; what it returns is a new descriptor, which closes on exec.
unsafe impl Ioctl for UnixFile {
    type Output = OwnedFd;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        0x89e0
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the kernel has just made it for this caller.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}
