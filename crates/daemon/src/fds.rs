//! Adopts file descriptors that were handed in.
#![allow(unsafe_code, reason = "allow-listed: an inherited fd is a bare number")]

use rustix::fd::{BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;

/// Why an fd cannot be adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FdError {
    /// It is not open.
    #[error("{fd} is not open: {errno}")]
    Closed {
        /// Its number.
        fd: i32,
        /// The system's word.
        errno: Errno,
    },
    /// It is open, but ours: what is handed in never closes on exec, what we open always does.
    #[error("{fd} was not handed in")]
    Own {
        /// Its number.
        fd: i32,
    },
    /// It is open, but no socket.
    #[error("{fd} is no unix socket")]
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
