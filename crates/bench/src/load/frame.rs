//! The small frames that loads send.

use clap::ValueEnum;
use manyring_driver::wire::net::{HDR_F_NEEDS_CSUM, RawNetHeader};

/// Longest frame that is generated.
pub(super) const FRAME_MAX: usize = 1500;

/// The flows of frames, which decide whether a device can merge them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FlowKind {
    /// UDP datagrams, each of a flow of its own: nothing can be merged.
    Apart,
    /// UDP datagrams of one flow.
    Udp,
    /// TCP segments of one flow.
    Tcp,
    /// TCP segments, each of a flow of its own.
    TcpApart,
}

impl FlowKind {
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Apart => "apart",
            Self::Udp => "udp",
            Self::Tcp => "tcp",
            Self::TcpApart => "tcp-apart",
        }
    }

    const fn is_tcp(self) -> bool {
        matches!(self, Self::Tcp | Self::TcpApart)
    }
}

/// A frame with an IPv4 packet for an address that nobody has.
pub(super) struct FlowFrame {
    flow: FlowKind,
    bytes: Vec<u8>,
    number: u16,
}

/// Offset of the IPv4 header, and of the UDP or TCP header, which begins with the source port.
const IP_AT: usize = 14;
const PORT_AT: usize = 34;
/// Bytes of a TCP header.
const TCP_SIZE: usize = 20;

impl FlowFrame {
    /// The smallest frame: Ethernet, IPv4 and TCP headers, and one byte.
    pub(super) const SIZE_MIN: usize = PORT_AT + TCP_SIZE + 1;

    /// A frame of `size` bytes.
    pub(super) fn new(flow: FlowKind, size: usize) -> Self {
        let length = |n: usize| u16::try_from(n).unwrap_or(u16::MAX).to_be_bytes();
        let protocol = if flow.is_tcp() { 6 } else { 17 };
        let mut bytes = vec![255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 1, 8, 0];
        bytes.extend([0x45, 0]);
        bytes.extend(length(size - 14));
        // No fragment; 64 hops, UDP, checksum to come; from and to addresses for documentation.
        bytes.extend([0, 0, 0x40, 0, 64, protocol, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
        let sum = checksum(&bytes[IP_AT..PORT_AT]);
        bytes[24..26].copy_from_slice(&sum.to_be_bytes());
        bytes.extend([0, 7, 0, 9]);
        // The checksum that is left to the host: of addresses, protocol and length.
        let own = [&bytes[26..PORT_AT], &[0, protocol], &length(size - PORT_AT)].concat();
        let partial = (!checksum(&own)).to_be_bytes();
        if flow.is_tcp() {
            bytes.extend([0, 0, 0, 0, 0, 0, 0, 1, 0x50, 0x10, 1, 0]);
            bytes.extend(partial);
        } else {
            bytes.extend(length(size - PORT_AT));
            bytes.extend(partial);
        }
        bytes.extend((0..=u8::MAX).cycle().take(size - bytes.len()));
        Self { flow, bytes, number: 0 }
    }

    /// The virtio header for the frame: it says whether the host must write the checksum.
    pub(super) fn header(&self) -> RawNetHeader {
        let offset = if self.flow.is_tcp() { 16 } else { 6 };
        match self.flow {
            FlowKind::Apart => RawNetHeader::default(),
            FlowKind::Udp | FlowKind::Tcp | FlowKind::TcpApart => RawNetHeader {
                flags: HDR_F_NEEDS_CSUM,
                csum_start: 34.into(),
                csum_offset: offset.into(),
                ..RawNetHeader::default()
            },
        }
    }

    /// The next frame, which belongs to the next flow or to the same one. All packets may have the
    /// same identification, because they are never cut.
    #[inline]
    pub(super) fn next(&mut self) -> &[u8] {
        self.number = self.number.wrapping_add(1);
        match self.flow {
            FlowKind::Apart | FlowKind::TcpApart => {
                self.bytes[PORT_AT..PORT_AT + 2].copy_from_slice(&self.number.to_be_bytes());
            }
            FlowKind::Udp => {}
            FlowKind::Tcp => {
                let payload = u32::try_from(self.bytes.len() - PORT_AT - TCP_SIZE).unwrap_or(0);
                let sequence = u32::from(self.number).wrapping_mul(payload);
                self.bytes[PORT_AT + 4..PORT_AT + 8].copy_from_slice(&sequence.to_be_bytes());
            }
        }
        &self.bytes
    }
}

/// The checksum of the Internet protocols over whole words.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.as_chunks::<2>().0.iter().map(|pair| u32::from(u16::from_be_bytes(*pair)));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_driver::wire::net::head::{HEAD_SIZE_MAX, Head, Joined};

    #[test]
    fn a_generated_frame_has_a_right_header_and_a_flow_of_its_own() {
        let mut frame = FlowFrame::new(FlowKind::Apart, 64);
        let first = frame.next().to_vec();
        assert_eq!((first.len(), &first[16..18]), (64, &[0, 50][..]));
        assert_eq!(checksum(&first[14..34]), 0, "the sum over a right header");
        assert_ne!(first, frame.next());
        assert_eq!(&frame.next()[38..40], [0, 30]);
    }

    #[test]
    fn frames_of_one_flow_are_such_as_a_host_joins() {
        for (flow, spared) in [
            (FlowKind::Apart, false),
            (FlowKind::Udp, true),
            (FlowKind::Tcp, true),
            (FlowKind::TcpApart, false),
        ] {
            let mut frame = FlowFrame::new(flow, 64);
            let header = frame.header();
            let mut head = || {
                let mut start = [0; HEAD_SIZE_MAX];
                start[..64].copy_from_slice(frame.next());
                Head::parse(&header, &start, 64, 64)
            };
            let joins = match (head(), head()) {
                (Ok(first), Ok(second)) => Joined::new(first).add(&second),
                _ => false,
            };
            assert_eq!(joins, spared, "{flow:?}");
        }
    }
}
