//! Network interfaces: their properties, MTU, state and bridge, by rtnetlink, in the network
//! namespace of the thread that opened the [`Links`].

mod events;

pub use events::{LinkEvent, LinkEvents};

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::sync::{Mutex, PoisonError};

const NLMSG_HEADER_SIZE: usize = 16;
const IFINFOMSG_SIZE: usize = 16;
const ATTRIBUTE_HEADER_SIZE: usize = 4;
/// Bytes of one answer at most: an interface with all its statistics takes less than 8 KiB.
const ANSWER_SIZE_MAX: usize = 65536;
/// Answers to earlier requests, whose wait was interrupted, that are skipped.
const STALE_ANSWERS_MAX: usize = 16;

const NLMSG_ERROR: u16 = 2;
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_SETLINK: u16 = 19;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const IFF_UP: u32 = 1;

const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_MASTER: u16 = 10;
const IFLA_TXQLEN: u16 = 13;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_TUN_TYPE: u16 = 3;
const IFLA_TUN_PI: u16 = 4;
const IFLA_TUN_MULTI_QUEUE: u16 = 7;
const IFLA_TUN_NUM_QUEUES: u16 = 8;
const IFLA_TUN_NUM_DISABLED_QUEUES: u16 = 9;
/// The tun driver's own number for a tap.
const TUN_TYPE_TAP: u8 = 2;

/// The properties of an interface that the kernel reports (`RTM_NEWLINK`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Its number in this namespace.
    pub index: u32,
    /// True if it is administratively up.
    pub is_up: bool,
    /// Hardware address, if it has one of six bytes.
    pub address: Option<[u8; 6]>,
    /// The MTU: the most bytes of payload of one frame.
    pub mtu: u32,
    /// The number of the bridge, or other master, that it is a port of.
    pub master: Option<u32>,
    /// `tun`, `bridge`, `macvtap`; empty for most hardware.
    pub kind: String,
    /// The properties of a tap; `None`: it is no tap.
    pub tap: Option<TapLink>,
}

/// The properties that only a tap has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapLink {
    /// Frames are preceded by packet information (no `IFF_NO_PI`).
    pub has_packet_info: bool,
    /// It can have several queues (`IFF_MULTI_QUEUE`).
    pub is_multi_queue: bool,
    /// Queues that the host uses; 0 for a tap of one queue, as the kernel does not report it then.
    pub attached: u32,
    /// Queues that are open but detached, so that the host does not use them.
    pub detached: u32,
}

/// The settings of an interface to change; `None` leaves one unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The MTU in bytes.
    pub mtu: Option<u32>,
    /// The number of the bridge that it shall be a port of.
    pub master: Option<u32>,
    /// The frames that each of its queues may hold.
    pub txqueuelen: Option<u32>,
    /// True: administratively up.
    pub up: Option<bool>,
}

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
    pub fn find(&self, name: &str) -> Result<Option<Link>, Errno> {
        let mut request = Request::new(RTM_GETLINK, 0, 0, None);
        let mut bytes = name.as_bytes().to_vec();
        bytes.push(0);
        request.attribute(IFLA_IFNAME, &bytes);
        match self.ask(request) {
            Err(Errno::NODEV) => Ok(None),
            other => other,
        }
    }

    /// The interface with the number `index`; `None`: no interface has this number.
    ///
    /// # Errors
    /// The error of the kernel's answer, or of the socket.
    pub fn at(&self, index: u32) -> Result<Option<Link>, Errno> {
        match self.ask(Request::new(RTM_GETLINK, 0, index, None)) {
            Err(Errno::NODEV) => Ok(None),
            other => other,
        }
    }

    /// Changes the interface `index`.
    ///
    /// # Errors
    /// `EPERM`: the process lacks `CAP_NET_ADMIN`. `EINVAL`: the MTU is out of range.
    pub fn set(&self, index: u32, change: &Change) -> Result<(), Errno> {
        let mut request = Request::new(RTM_SETLINK, NLM_F_ACK, index, change.up);
        if let Some(mtu) = change.mtu {
            request.attribute(IFLA_MTU, &mtu.to_ne_bytes());
        }
        if let Some(master) = change.master {
            request.attribute(IFLA_MASTER, &master.to_ne_bytes());
        }
        if let Some(frames) = change.txqueuelen {
            request.attribute(IFLA_TXQLEN, &frames.to_ne_bytes());
        }
        self.ask(request).map(drop)
    }

    /// Sends a request and reads its answer. The kernel has answered before the send returns, so
    /// the read does not wait.
    fn ask(&self, request: Request) -> Result<Option<Link>, Errno> {
        let mut sequence = self.sequence.lock().unwrap_or_else(PoisonError::into_inner);
        *sequence = sequence.wrapping_add(1);
        let bytes = request.finish(*sequence);
        rustix::io::retry_on_intr(|| rustix::net::send(&self.socket, &bytes, SendFlags::empty()))?;
        let mut answer = vec![0; ANSWER_SIZE_MAX];
        for _ in 0..STALE_ANSWERS_MAX {
            let (_, len) = rustix::io::retry_on_intr(|| {
                rustix::net::recv(&self.socket, &mut answer[..], RecvFlags::DONTWAIT)
            })?;
            if let Some(result) = parse_answer(answer.get(..len).unwrap_or(&[]), *sequence) {
                return result;
            }
        }
        Err(Errno::IO)
    }
}

/// A message to the kernel under construction.
struct Request(Vec<u8>);

impl Request {
    fn new(kind: u16, flags: u16, index: u32, up: Option<bool>) -> Self {
        let mut bytes = vec![0; NLMSG_HEADER_SIZE + IFINFOMSG_SIZE];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(flags | NLM_F_REQUEST).to_ne_bytes());
        bytes[20..24].copy_from_slice(&index.to_ne_bytes());
        if let Some(up) = up {
            bytes[24..28].copy_from_slice(&u32::from(up).to_ne_bytes());
            bytes[28..32].copy_from_slice(&IFF_UP.to_ne_bytes());
        }
        Self(bytes)
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        let len = u16::try_from(ATTRIBUTE_HEADER_SIZE + value.len()).unwrap_or(u16::MAX);
        self.0.extend_from_slice(&len.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    #[allow(clippy::cast_possible_truncation, reason = "a request of some attributes")]
    fn finish(mut self, sequence: u32) -> Vec<u8> {
        let len = self.0.len() as u32;
        self.0[..4].copy_from_slice(&len.to_ne_bytes());
        self.0[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Parses the answer to request number `sequence`; `None`: it answers another request.
fn parse_answer(bytes: &[u8], sequence: u32) -> Option<Result<Option<Link>, Errno>> {
    if u32_at(bytes, 8)? != sequence {
        return None;
    }
    match u16_at(bytes, 4)? {
        NLMSG_ERROR => match u32_at(bytes, NLMSG_HEADER_SIZE)?.cast_signed() {
            0 => Some(Ok(None)),
            error => Some(Err(Errno::from_raw_os_error(error.saturating_neg()))),
        },
        RTM_NEWLINK => Some(parse_link(bytes).map(Some).ok_or(Errno::IO)),
        _ => Some(Err(Errno::IO)),
    }
}

fn parse_link(bytes: &[u8]) -> Option<Link> {
    let flags = u32_at(bytes, 24)?;
    let index = u32_at(bytes, 20)?;
    let mut link = Link { index, is_up: flags & IFF_UP != 0, ..Link::default() };
    for (kind, value) in attributes(bytes.get(NLMSG_HEADER_SIZE + IFINFOMSG_SIZE..)?) {
        match kind {
            IFLA_ADDRESS => link.address = value.try_into().ok(),
            IFLA_MTU => link.mtu = u32_at(value, 0)?,
            IFLA_MASTER => link.master = u32_at(value, 0),
            IFLA_LINKINFO => parse_info(value, &mut link),
            _ => {}
        }
    }
    Some(link)
}

fn parse_info(bytes: &[u8], link: &mut Link) {
    let mut data = &[][..];
    for (kind, value) in attributes(bytes) {
        match kind {
            IFLA_INFO_KIND => {
                let text = value.split(|&b| b == 0).next().unwrap_or_default();
                link.kind = String::from_utf8_lossy(text).into_owned();
            }
            IFLA_INFO_DATA => data = value,
            _ => {}
        }
    }
    if link.kind != "tun" {
        return;
    }
    let mut tap = TapLink::default();
    let mut is_tap = false;
    for (kind, value) in attributes(data) {
        match kind {
            IFLA_TUN_TYPE => is_tap = value.first() == Some(&TUN_TYPE_TAP),
            IFLA_TUN_PI => tap.has_packet_info = value.first() == Some(&1),
            IFLA_TUN_MULTI_QUEUE => tap.is_multi_queue = value.first() == Some(&1),
            IFLA_TUN_NUM_QUEUES => tap.attached = u32_at(value, 0).unwrap_or(0),
            IFLA_TUN_NUM_DISABLED_QUEUES => tap.detached = u32_at(value, 0).unwrap_or(0),
            _ => {}
        }
    }
    link.tap = is_tap.then_some(tap);
}

/// The number and value of each attribute. Ends at the first attribute that is cut short.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = usize::from(u16_at(bytes, 0)?);
        // The two highest bits are flags: nested attributes, and byte order.
        let kind = u16_at(bytes, 2)? & 0x3fff;
        let value = bytes.get(ATTRIBUTE_HEADER_SIZE..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    })
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

    #[test]
    fn attributes_end_at_the_first_that_is_cut() {
        let mut request = Request::new(0, 0, 0, None);
        request.attribute(1, b"abc");
        request.attribute(2, b"defgh");
        let bytes = &request.finish(1)[NLMSG_HEADER_SIZE + IFINFOMSG_SIZE..];
        let whole: Vec<_> = attributes(bytes).collect();
        assert_eq!(whole, [(1, &b"abc"[..]), (2, &b"defgh"[..])]);
        assert_eq!(attributes(&bytes[..12]).collect::<Vec<_>>(), whole[..1]);
        assert_eq!(attributes(&[0; 64]).count(), 0);
    }
}
