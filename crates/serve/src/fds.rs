//! Adopts file descriptors that another process passed by number, and raises the limit of open
//! files.
#![allow(unsafe_code, reason = "allow-listed: an inherited fd is a bare number")]

use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};
use std::ffi::c_void;
use std::path::PathBuf;

/// Why a descriptor cannot be adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FdError {
    /// The descriptor is not open.
    #[error("{fd} is not open: {errno}")]
    Closed {
        /// The number of the descriptor.
        fd: i32,
        /// The errno of the failed call.
        errno: Errno,
    },
    /// The descriptor is open, but this process opened it: it is close-on-exec, as all descriptors
    /// are that this process opens, and an inherited one is not.
    #[error("{fd} was not passed to this process")]
    Own {
        /// The number of the descriptor.
        fd: i32,
    },
    /// The descriptor is open, but no unix socket.
    #[error("{fd} is not a unix socket")]
    Kind {
        /// The number of the descriptor.
        fd: i32,
    },
}

/// Adopts an inherited unix socket by its number. A number can be adopted once.
pub(crate) fn adopt_socket(fd: i32) -> Result<OwnedFd, FdError> {
    let adopted = adopt(fd)?;
    let domain = rustix::net::sockopt::socket_domain(&adopted);
    if domain == Ok(rustix::net::AddressFamily::UNIX) {
        Ok(adopted)
    } else {
        Err(FdError::Kind { fd })
    }
}

/// Adopts an inherited descriptor by its number, and makes it close-on-exec. A number can be
/// adopted once.
pub(crate) fn adopt(fd: i32) -> Result<OwnedFd, FdError> {
    // SAFETY: the descriptor is only queried; if it is not open, `fcntl` returns an error.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::io::fcntl_getfd(borrowed).map_err(|errno| FdError::Closed { fd, errno })?;
    if flags.contains(rustix::io::FdFlags::CLOEXEC) {
        return Err(FdError::Own { fd });
    }
    let _ = rustix::io::fcntl_setfd(borrowed, rustix::io::FdFlags::CLOEXEC);
    // SAFETY: the descriptor is open and above the standard three, no object of this process owns
    // it, and the user named it for this process to own.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Raises the limit of open files to the hard limit: a device takes about six descriptors.
pub fn raise_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = setrlimit(Resource::Nofile, raised);
}

/// Returns the present path of an open file, from /proc/self/fd.
pub(crate) fn path_of(fd: &OwnedFd) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()
}

/// Returns the present path of the file to which a unix socket is bound, even if the file was
/// renamed. `None`: the process has no `CAP_NET_ADMIN`, which the kernel requires for that.
pub(crate) fn path_of_socket(socket: &OwnedFd) -> Option<PathBuf> {
    // SAFETY: the request takes no argument, and returns a descriptor that nobody else owns.
    let file = unsafe { rustix::ioctl::ioctl(socket, UnixFile) };
    path_of(&file.ok()?)
}

/// `SIOCUNIXFILE` (linux/un.h): opens the file to which a unix socket is bound, with `O_PATH`.
struct UnixFile;

// SAFETY: the request has no argument; its result is a new descriptor, which is close-on-exec.
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
        // SAFETY: the kernel has just opened this descriptor for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}
