//! `LinkEvents`: reports interfaces that are created, changed and deleted (rtnetlink,
//! `RTMGRP_LINK`).

use super::{ANSWER_SIZE_MAX, LinkEvent};
use manyring_wire::rtnetlink::parse_events;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

/// The multicast group for changes of interfaces.
const RTMGRP_LINK: u32 = 1;

/// A socket on which the kernel reports changes of the interfaces of one network namespace.
#[derive(Debug)]
pub struct LinkEvents(OwnedFd);

impl LinkEvents {
    /// Opens the socket, which from now on reports changes in the calling thread's network
    /// namespace.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: the host has no file descriptor or memory for the socket.
    pub fn open() -> Result<Self, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
        let socket = rustix::net::socket_with(family, kind, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, RTMGRP_LINK))?;
        Ok(Self(socket))
    }

    /// Reads the next message of the kernel, which has one or more changes.
    ///
    /// # Errors
    /// * `EAGAIN`: no message waits.
    /// * `ENOBUFS`: the kernel has dropped messages, so that any interface may have changed.
    pub fn read(&self) -> Result<Vec<LinkEvent>, Errno> {
        let mut bytes = vec![0; ANSWER_SIZE_MAX];
        let (_, len) = rustix::io::retry_on_intr(|| {
            rustix::net::recv(&self.0, &mut bytes[..], RecvFlags::DONTWAIT)
        })?;
        Ok(parse_events(bytes.get(..len).unwrap_or(&[])))
    }
}

impl AsRawFd for LinkEvents {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for LinkEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_change_there_is_nothing_to_read() {
        // Interfaces of other tests may change at this time, too.
        let events = LinkEvents::open().unwrap();
        while let Ok(read) = events.read() {
            assert!(!read.iter().any(|event| event.name.is_empty()), "{read:?}");
        }
    }
}
