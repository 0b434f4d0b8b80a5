//! Network interfaces by rtnetlink: their properties, MTU, state and bridge. The network namespace
//! is that of the thread that opened the [`Links`].

mod events;

pub use events::LinkEvents;
pub use manyring_wire::rtnetlink::{Change, InterfaceInfo, LinkEvent, TapLink};

use manyring_wire::rtnetlink::{Request, parse_answer};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::sync::{Mutex, PoisonError};

/// Most bytes of an answer: an interface with all its statistics takes less than 8 KiB.
const ANSWER_SIZE_MAX: usize = 65536;
/// The most answers that are skipped because they belong to earlier, interrupted requests.
const STALE_ANSWERS_MAX: usize = 16;

/// A socket for requests about the interfaces of a network namespace.
#[derive(Debug)]
pub struct Links {
    socket: OwnedFd,
    /// The sequence number of the last request.
    sequence: Mutex<u32>,
}

impl Links {
    /// Opens the socket in the calling thread's network namespace, for use by any thread.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: the host has no file descriptor or memory for the socket.
    pub fn open() -> Result<Self, Errno> {
        let flags = SocketFlags::CLOEXEC;
        let family = AddressFamily::NETLINK;
        let socket = rustix::net::socket_with(family, SocketType::RAW, flags, None)?;
        Ok(Self { socket, sequence: Mutex::default() })
    }

    /// Looks up the interface `name`; `None`: no interface has this name.
    ///
    /// # Errors
    /// The error of the kernel's answer, or of the socket.
    pub fn find(&self, name: &str) -> Result<Option<InterfaceInfo>, Errno> {
        match self.ask(Request::find(name)) {
            Err(Errno::NODEV) => Ok(None),
            other => other,
        }
    }

    /// Looks up the interface with the number `index`; `None`: there is none.
    ///
    /// # Errors
    /// The error of the kernel's answer, or of the socket.
    pub fn at(&self, index: u32) -> Result<Option<InterfaceInfo>, Errno> {
        match self.ask(Request::at(index)) {
            Err(Errno::NODEV) => Ok(None),
            other => other,
        }
    }

    /// Changes the interface `index`.
    ///
    /// # Errors
    /// `EPERM`: the process lacks `CAP_NET_ADMIN`. `EINVAL`: the MTU is out of range.
    pub fn set(&self, index: u32, change: &Change) -> Result<(), Errno> {
        self.ask(Request::set(index, change)).map(drop)
    }

    /// Sends a request and reads its answer. The kernel has answered before the send returns, so
    /// the read does not wait.
    fn ask(&self, request: Request) -> Result<Option<InterfaceInfo>, Errno> {
        let mut sequence = self.sequence.lock().unwrap_or_else(PoisonError::into_inner);
        *sequence = sequence.wrapping_add(1);
        let bytes = request.emit(*sequence);
        rustix::io::retry_on_intr(|| rustix::net::send(&self.socket, &bytes, SendFlags::empty()))?;
        let mut answer = vec![0; ANSWER_SIZE_MAX];
        for _ in 0..STALE_ANSWERS_MAX {
            let (_, len) = rustix::io::retry_on_intr(|| {
                rustix::net::recv(&self.socket, &mut answer[..], RecvFlags::DONTWAIT)
            })?;
            if let Some(result) = parse_answer(answer.get(..len).unwrap_or(&[]), *sequence) {
                return result.map_err(Errno::from_raw_os_error);
            }
        }
        Err(Errno::IO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_is_found_and_others_are_not() {
        let links = Links::open().unwrap();
        let lo = links.find("lo").unwrap().unwrap();
        assert_eq!((lo.index, lo.mtu, lo.tap), (1, 65536, None));
        assert_eq!(lo.address, Some([0; 6]));
        assert_eq!(links.find("no-such-link"), Ok(None));
        assert_eq!(links.at(lo.index), Ok(Some(lo)));
        assert_eq!(links.at(u32::MAX >> 1), Ok(None));
        assert!(links.set(u32::MAX >> 1, &Change { mtu: Some(9), ..Change::default() }).is_err());
    }
}
