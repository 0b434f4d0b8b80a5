//! Keeps a list of the unix sockets of this process's sessions, and finds whether a doorbell is an
//! end of one.
//!
//! If a front-end sends its own end of the session's socket as a doorbell, this process holds that
//! end open: the session would never see that its front-end has left. Sockets with names are
//! refused before this check (`doorbell.rs`); the remaining case is a session on an inherited
//! socket pair.

use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};
use std::sync::{Mutex, PoisonError};

/// Inodes of the sockets of all sessions of this process.
static SESSIONS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Keeps a socket in the list of sessions' sockets until this is dropped.
#[derive(Debug)]
pub struct SessionSocket(u64);

impl SessionSocket {
    /// Adds a session's socket to the list.
    #[must_use]
    pub fn new(socket: impl AsFd) -> Self {
        let inode = rustix::fs::fstat(socket).map_or(0, |stat| stat.st_ino);
        SESSIONS.lock().unwrap_or_else(PoisonError::into_inner).push(inode);
        Self(inode)
    }
}

impl Drop for SessionSocket {
    fn drop(&mut self) {
        let mut sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = sessions.iter().position(|inode| *inode == self.0) {
            sessions.swap_remove(at);
        }
    }
}

/// True if `socket` is the socket of a session, or the other end of one. Returns false if the
/// kernel does not report the other end (no `unix_diag`, another network namespace).
///
/// # Errors
/// That of `fstat`.
pub(crate) fn is_of_session(socket: impl AsFd) -> Result<bool, Errno> {
    let inode = rustix::fs::fstat(socket)?.st_ino;
    let peer = peer_of(inode).unwrap_or(None);
    let sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(sessions.iter().any(|session| *session == inode || Some(*session) == peer))
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const UDIAG_SHOW_PEER: u32 = 4;
const UNIX_DIAG_PEER: u16 = 2;
const HEADER_SIZE: usize = 16;
const DIAG_SIZE: usize = 16;

/// Returns the inode of the socket at the other end of the unix socket `inode` (sock_diag(7)).
fn peer_of(inode: u64) -> Result<Option<u64>, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let kind = (AddressFamily::NETLINK, SocketType::RAW, Some(netlink::SOCK_DIAG));
    let socket = rustix::net::socket_with(kind.0, kind.1, flags, kind.2)?;
    let inode = u32::try_from(inode).map_err(|_| Errno::RANGE)?;
    let mut request = Vec::with_capacity(40);
    request.extend(40u32.to_ne_bytes());
    request.extend([SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST].map(u16::to_ne_bytes).concat());
    request.extend([0; 8]);
    request.extend([1, 0, 0, 0]);
    // The request selects sockets in any state, with any cookie.
    request.extend(
        [u32::MAX, inode, UDIAG_SHOW_PEER, u32::MAX, u32::MAX].map(u32::to_ne_bytes).concat(),
    );
    rustix::net::send(&socket, &request, SendFlags::empty())?;
    let mut answer = [0; 1024];
    let (len, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::DONTWAIT)?;
    Ok(peer_in(&answer[..len]).map(u64::from))
}

/// Returns the peer's inode from an answer; `None` if the answer is an error, or names no peer.
fn peer_in(answer: &[u8]) -> Option<u32> {
    let half = |at: usize| Some(u16::from_ne_bytes(answer.get(at..at + 2)?.try_into().ok()?));
    if half(4)? != SOCK_DIAG_BY_FAMILY {
        return None;
    }
    let mut at = HEADER_SIZE + DIAG_SIZE;
    loop {
        let len = usize::from(half(at)?);
        if half(at + 2)? == UNIX_DIAG_PEER {
            return Some(u32::from_ne_bytes(answer.get(at + 4..at + 8)?.try_into().ok()?));
        }
        at += len.max(4).next_multiple_of(4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn both_ends_of_a_session_are_known_and_no_other_socket_is() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (one, other) = UnixStream::pair().unwrap();
        let session = SessionSocket::new(&ours);
        assert_eq!((is_of_session(&ours), is_of_session(&theirs)), (Ok(true), Ok(true)));
        assert_eq!((is_of_session(&one), is_of_session(&other)), (Ok(false), Ok(false)));
        drop(session);
        assert_eq!(is_of_session(&theirs), Ok(false));
    }
}
