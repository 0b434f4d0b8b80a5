//! `LinkEvents`: reports interfaces that come, change and go (rtnetlink, `RTMGRP_LINK`).

use super::{
    ANSWER_SIZE_MAX, IFINFOMSG_SIZE, IFLA_IFNAME, NLMSG_HEADER_SIZE, RTM_NEWLINK, attributes,
    u16_at, u32_at,
};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

const RTM_DELLINK: u16 = 17;
/// The multicast group of changes of interfaces.
const RTMGRP_LINK: u32 = 1;

/// A change of one interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkEvent {
    /// The number of the interface.
    pub index: u32,
    /// The name of the interface.
    pub name: String,
    /// The interface has left this network namespace; false: it has come or changed.
    pub is_gone: bool,
}

/// A socket on which the kernel reports changes of the interfaces of one network namespace.
#[derive(Debug)]
pub struct LinkEvents(OwnedFd);

impl LinkEvents {
    /// Reports changes in the calling thread's network namespace from now on.
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

/// The changes in a message. Ends at the first one that is cut short.
fn parse_events(mut bytes: &[u8]) -> Vec<LinkEvent> {
    let mut events = Vec::new();
    while let Some(len) = u32_at(bytes, 0).and_then(|len| usize::try_from(len).ok()) {
        let Some(message) = bytes.get(..len).filter(|_| len >= NLMSG_HEADER_SIZE) else { break };
        events.extend(parse_event(message));
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or(&[]);
    }
    events
}

fn parse_event(message: &[u8]) -> Option<LinkEvent> {
    let kind = u16_at(message, 4).filter(|kind| matches!(*kind, RTM_NEWLINK | RTM_DELLINK))?;
    let index = u32_at(message, NLMSG_HEADER_SIZE + 4)?;
    let mut found = attributes(message.get(NLMSG_HEADER_SIZE + IFINFOMSG_SIZE..)?);
    let (_, name) = found.find(|(kind, _)| *kind == IFLA_IFNAME)?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let name = String::from_utf8_lossy(name).into_owned();
    Some(LinkEvent { index, name, is_gone: kind == RTM_DELLINK })
}

#[cfg(test)]
mod tests {
    use super::super::Request;
    use super::*;

    fn message(kind: u16, index: u32, name: &[u8]) -> Vec<u8> {
        let mut request = Request::new(kind, 0, index, None);
        request.attribute(IFLA_IFNAME, name);
        request.finish(1)
    }

    #[test]
    fn changes_are_told_apart_and_end_at_the_first_message_that_is_cut() {
        let both = [message(RTM_NEWLINK, 7, b"tap0\0"), message(RTM_DELLINK, 8, b"x\0")].concat();
        let event = |index, name: &str, is_gone| LinkEvent { index, name: name.into(), is_gone };
        let whole = [event(7, "tap0", false), event(8, "x", true)];
        assert_eq!(parse_events(&both), whole);
        assert_eq!(parse_events(&both[..both.len() - 1]), whole[..1]);
        assert_eq!(parse_events(&[0; 64]), []);
        assert_eq!(parse_events(&message(18, 7, b"tap0\0")), []);
    }

    #[test]
    fn without_a_change_there_is_nothing_to_read() {
        // Interfaces of other tests may change at this time, too.
        let events = LinkEvents::open().unwrap();
        while let Ok(read) = events.read() {
            assert!(!read.iter().any(|event| event.name.is_empty()), "{read:?}");
        }
    }
}
