//! `Head`: the headers of a TCP or UDP frame, and which frames can leave as one.
//!
//! A host that cuts segments itself (TSO, USO) takes a long frame at the price of a short one. So
//! neighbouring frames of a flow are joined into one, which the host, or the last card on the way,
//! cuts into the same frames again:
//! ```text
//! parse    Ethernet, at most one VLAN tag, IPv4 without options or IPv6 without extensions, TCP or
//!          UDP with a partial checksum; every length must be the frame's
//! joins    all headers equal but for what numbers the frames: length, IP identification, TCP
//!          sequence number, checksums, PSH; the payload continues that of the frame before
//! write    the headers of all: those of the first, the length of all, PSH if any had it
//! ```
//! The rules are those by which a receiving host joins frames (GRO), which every TCP must expect. A
//! frame that breaks one of them leaves alone, as it came: a header that lies joins nothing. Frames
//! with SYN, FIN, RST, URG or CWR, without ACK, or without payload say something at their place in
//! the flow, and are never joined.

use super::{
    HDR_F_NEEDS_CSUM, HDR_GSO_NONE, HDR_GSO_TCPV4, HDR_GSO_TCPV6, HDR_GSO_UDP_L4, RawNetHeader,
};

/// Bytes of the longest headers: Ethernet with a tag, IPv6, TCP with all its options.
pub const HEAD_SIZE_MAX: usize = 18 + 40 + 60;
/// Most bytes of an IP packet. IPv6 would permit 40 more, but the frame would be longer than
/// [`super::FRAME_SIZE_MAX`].
const PACKET_MAX: usize = 65_535;

const ETHERNET: usize = 14;
const VLAN_TAG: usize = 4;
const IPV4: usize = 20;
const IPV6: usize = 40;
const TCP: usize = 20;
const UDP: usize = 8;

pub(super) const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
pub(super) const TYPE_IPV6: [u8; 2] = [0x86, 0xdd];
pub(super) const TYPE_VLAN: [u8; 2] = [0x81, 0x00];
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;
/// Offset of the checksum in the header of TCP, and of UDP.
const TCP_CHECKSUM: usize = 16;
const UDP_CHECKSUM: usize = 6;
/// The TCP flags that a joined frame may have. ACK it must have.
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;
const ECE: u8 = 0x40;
/// The IPv4 flag "don't fragment", in the byte that holds the flags.
const DF: u8 = 0x40;

/// Why a frame is not joined with any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each is")]
pub enum Alone {
    #[error("it is not TCP or UDP over IP, has a second tag, or is cut already")]
    Kind,
    #[error("its checksum is not left to the host")]
    Checksum,
    #[error("it has IP options, extensions, or is a fragment")]
    Options,
    #[error("its lengths or checksums are not those of the frame")]
    Wrong,
    #[error("it has no payload, or TCP flags that belong to its place in the flow")]
    Flags,
}

/// The protocols of a frame that can be joined with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
    /// UDP over IPv4.
    Udp4,
    /// UDP over IPv6.
    Udp6,
}

impl Kind {
    const fn is_tcp(self) -> bool {
        matches!(self, Self::Tcp4 | Self::Tcp6)
    }

    const fn is_ipv4(self) -> bool {
        matches!(self, Self::Tcp4 | Self::Udp4)
    }

    const fn gso_type(self) -> u8 {
        match self {
            Self::Tcp4 => HDR_GSO_TCPV4,
            Self::Tcp6 => HDR_GSO_TCPV6,
            Self::Udp4 | Self::Udp6 => HDR_GSO_UDP_L4,
        }
    }
}

/// The headers of a frame that can be joined with others.
#[derive(Clone, Debug)]
pub struct Head {
    kind: Kind,
    /// Offsets of the IP header, of the TCP or UDP header (`transport`), and of the payload
    /// (`size`).
    network: usize,
    transport: usize,
    size: usize,
    /// All headers, with zero in the fields that may differ between joined frames. Bytes behind the
    /// headers mean nothing.
    bytes: [u8; HEAD_SIZE_MAX],
    payload: usize,
    identification: u16,
    sequence: u32,
    pushes: bool,
}

impl Head {
    /// Parses the headers of a frame of `len` bytes, before which `header` came. Only the first
    /// `known` bytes of `start` are the frame's: as many as `start` holds, or all that the frame
    /// has.
    ///
    /// # Errors
    /// [`Alone`].
    #[inline]
    pub fn parse(
        header: &RawNetHeader,
        start: &[u8; HEAD_SIZE_MAX],
        known: usize,
        len: usize,
    ) -> Result<Self, Alone> {
        // Copying all of `start` takes fewer instructions than copying `known` bytes.
        let bytes = *start;
        let start = start.get(..known).ok_or(Alone::Wrong)?;
        if header.gso_type != HDR_GSO_NONE {
            return Err(Alone::Kind);
        }
        if header.flags & HDR_F_NEEDS_CSUM == 0 {
            return Err(Alone::Checksum);
        }
        let (network, kind) = match *array(start, ETHERNET - 2)? {
            TYPE_VLAN => (ETHERNET + VLAN_TAG, *array(start, ETHERNET + 2)?),
            kind => (ETHERNET, kind),
        };
        let packet = len.checked_sub(network).ok_or(Alone::Wrong)?;
        let (is_ipv4, transport) = match kind {
            TYPE_IPV4 => (true, check_ipv4(array(start, network)?, packet)?),
            TYPE_IPV6 => (false, check_ipv6(array(start, network)?, packet)?),
            _ => return Err(Alone::Kind),
        };
        let transport = network + transport;
        let protocol = start[network + if is_ipv4 { 9 } else { 6 }];
        let (kind, fixed, checksum_at) = match (protocol, is_ipv4) {
            (PROTOCOL_TCP, true) => (Kind::Tcp4, TCP, TCP_CHECKSUM),
            (PROTOCOL_TCP, false) => (Kind::Tcp6, TCP, TCP_CHECKSUM),
            (PROTOCOL_UDP, true) => (Kind::Udp4, UDP, UDP_CHECKSUM),
            (PROTOCOL_UDP, false) => (Kind::Udp6, UDP, UDP_CHECKSUM),
            // The header behind an IPv6 extension could be TCP too.
            (_, false) => return Err(Alone::Options),
            _ => return Err(Alone::Kind),
        };
        if usize::from(header.csum_start.get()) != transport
            || usize::from(header.csum_offset.get()) != checksum_at
        {
            return Err(Alone::Checksum);
        }
        let own = start.get(transport..transport + fixed).ok_or(Alone::Wrong)?;
        let size = transport + if kind.is_tcp() { usize::from(own[12] >> 4) * 4 } else { UDP };
        if size < transport + fixed || size > start.len() {
            return Err(Alone::Wrong);
        }
        let payload = len.checked_sub(size).ok_or(Alone::Wrong)?;
        check_own(kind, own, payload)?;
        let mut head = Self {
            kind,
            network,
            transport,
            size,
            bytes,
            payload,
            identification: 0,
            sequence: 0,
            pushes: false,
        };
        if head.checksum_of(payload).to_be_bytes() != own[checksum_at..checksum_at + 2] {
            return Err(Alone::Wrong);
        }
        head.take_numbers();
        Ok(head)
    }

    /// Moves the fields that may differ between joined frames from `bytes` to fields of their own.
    #[inline]
    fn take_numbers(&mut self) {
        let own = self.transport;
        if self.kind.is_ipv4() {
            let ip = &mut self.bytes[self.network..][..IPV4];
            self.identification = u16::from_be_bytes([ip[4], ip[5]]);
            ip[2..6].fill(0);
            ip[10..12].fill(0);
        } else {
            self.bytes[self.network + 4..][..2].fill(0);
        }
        if self.kind.is_tcp() {
            let tcp = &mut self.bytes[own..][..TCP];
            self.sequence = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
            self.pushes = tcp[13] & PSH != 0;
            tcp[4..8].fill(0);
            tcp[13] &= !PSH;
            tcp[TCP_CHECKSUM..TCP_CHECKSUM + 2].fill(0);
        } else {
            self.bytes[own + 4..][..4].fill(0);
        }
    }

    /// The protocols of the frame.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Bytes of all headers of the frame.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Bytes of payload, which follows the headers.
    #[must_use]
    pub fn payload(&self) -> usize {
        self.payload
    }

    /// True if both frames belong to the same connection and go in the same direction.
    #[must_use]
    #[inline]
    pub fn is_of_flow(&self, other: &Self) -> bool {
        let addresses = if self.kind.is_ipv4() { 12..20 } else { 8..40 };
        self.kind == other.kind
            && self.network == other.network
            && self.bytes[self.network..][addresses.clone()]
                == other.bytes[other.network..][addresses]
            && self.bytes[self.transport..][..4] == other.bytes[other.transport..][..4]
    }

    /// The partial checksum: over addresses, protocol and length. The host adds the payload (virtio
    /// 1.3 §5.1.6.2).
    #[inline]
    fn checksum_of(&self, payload: usize) -> u16 {
        let ip = &self.bytes[self.network..self.transport];
        let (addresses, protocol) = match self.kind.is_ipv4() {
            true => (&ip[12..20], ip[9]),
            false => (&ip[8..40], ip[6]),
        };
        let len = low_half(self.size - self.transport + payload);
        fold(sum(addresses) + u32::from(protocol) + u32::from(len))
    }
}

/// Checks the TCP or UDP header that precedes `payload` bytes.
#[inline]
fn check_own(kind: Kind, own: &[u8], payload: usize) -> Result<(), Alone> {
    if kind.is_tcp() {
        if own[13] & !(PSH | ECE) != ACK || payload == 0 {
            return Err(Alone::Flags);
        }
    } else if usize::from(u16::from_be_bytes([own[4], own[5]])) != UDP + payload {
        return Err(Alone::Wrong);
    } else if payload == 0 {
        return Err(Alone::Flags);
    }
    Ok(())
}

/// Checks the fixed header of IPv4; returns its size.
#[inline]
fn check_ipv4(ip: &[u8; IPV4], packet: usize) -> Result<usize, Alone> {
    let [version, _, high, low, _, _, fragment, offset, ..] = *ip;
    if version != 0x45 || fragment & !DF != 0 || offset != 0 {
        return Err(if version >> 4 == 4 { Alone::Options } else { Alone::Wrong });
    }
    let is_right =
        usize::from(u16::from_be_bytes([high, low])) == packet && fold(sum(ip)) == 0xffff;
    if is_right { Ok(IPV4) } else { Err(Alone::Wrong) }
}

/// Checks the fixed header of an IPv6 packet of `packet` bytes in all; returns the header's size.
#[inline]
fn check_ipv6(ip: &[u8; IPV6], packet: usize) -> Result<usize, Alone> {
    let is_right = ip[0] >> 4 == 6
        && Some(usize::from(u16::from_be_bytes([ip[4], ip[5]]))) == packet.checked_sub(IPV6);
    if is_right { Ok(IPV6) } else { Err(Alone::Wrong) }
}

/// The `N` bytes at offset `at`.
#[inline]
pub(super) fn array<const N: usize>(bytes: &[u8], at: usize) -> Result<&[u8; N], Alone> {
    bytes.get(at..).and_then(<[u8]>::first_chunk).ok_or(Alone::Wrong)
}

/// The sum of 16-bit words in network order, not folded (RFC 1071).
#[inline]
fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum()
}

/// Folds a sum to 16 bits by adding its carries.
#[inline]
pub(super) const fn fold(sum: u32) -> u16 {
    let once = (sum >> 16) + (sum & 0xffff);
    low_half((once >> 16) as usize + (once & 0xffff) as usize)
}

/// The low 16 bits of a length or offset in a packet, none of which exceeds [`PACKET_MAX`].
#[inline]
#[allow(clippy::cast_possible_truncation, reason = "what is cut off is 0, or a sum was folded")]
const fn low_half(n: usize) -> u16 {
    n as u16
}

/// Joined frames: the headers of the first frame, and sums over all frames.
#[derive(Clone, Debug)]
pub struct Joined {
    head: Head,
    /// Number of frames, and bytes of payload of all.
    count: usize,
    payload: usize,
    /// Payload bytes of the last frame. If they are fewer than the first frame's, no frame follows
    /// it.
    last: usize,
    /// How much the IP identification grows from frame to frame (0 or 1); `None` for one frame.
    step: Option<u16>,
    pushes: bool,
}

impl Joined {
    /// A single frame, to which others may be added.
    #[must_use]
    #[inline]
    pub fn new(head: Head) -> Self {
        let (payload, pushes) = (head.payload, head.pushes);
        Self { head, count: 1, payload, last: payload, step: None, pushes }
    }

    /// The headers of the first frame.
    #[must_use]
    pub fn first(&self) -> &Head {
        &self.head
    }

    /// How many frames were joined.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Bytes of payload of all frames together.
    #[must_use]
    pub fn payload(&self) -> usize {
        self.payload
    }

    /// Adds the next frame. False: this frame cannot be joined to the others.
    #[must_use]
    #[inline]
    pub fn add(&mut self, next: &Head) -> bool {
        let Self { head, payload, last, .. } = self;
        let piece = head.payload;
        let packet = next.size - next.network + *payload + next.payload;
        let is_next = head.kind == next.kind
            && head.size == next.size
            && *last == piece
            && next.payload <= piece
            && packet <= PACKET_MAX
            && head.bytes[..head.size] == next.bytes[..next.size]
            && (!head.kind.is_tcp()
                || next.sequence == head.sequence.wrapping_add(low_half(*payload).into()));
        if !is_next || !self.counts_on(next) {
            return false;
        }
        self.count += 1;
        self.payload += next.payload;
        self.last = next.payload;
        self.pushes |= next.pushes;
        true
    }

    /// True if the host will give this frame the IP identification that it has. Equal
    /// identifications in all frames are accepted if "don't fragment" is set: they mean nothing
    /// then (RFC 6864).
    #[inline]
    fn counts_on(&mut self, next: &Head) -> bool {
        let head = &self.head;
        if !head.kind.is_ipv4() {
            return true;
        }
        let may_stay = head.bytes[head.network + 6] & DF != 0;
        let step = *self.step.get_or_insert(match next.identification == head.identification {
            true => 0,
            false => 1,
        });
        let expected = head.identification.wrapping_add(step.wrapping_mul(low_half(self.count)));
        (step == 1 || may_stay) && next.identification == expected
    }

    /// Writes the headers of the joined frame into `bytes`. Returns the virtio header for it.
    #[inline]
    pub fn write(&self, bytes: &mut [u8; HEAD_SIZE_MAX]) -> RawNetHeader {
        let Head { kind, network, transport, size, .. } = self.head;
        *bytes = self.head.bytes;
        let own_size = size - transport + self.payload;
        if kind.is_ipv4() {
            let ip = &mut bytes[network..][..IPV4];
            ip[2..4].copy_from_slice(&low_half(IPV4 + own_size).to_be_bytes());
            ip[4..6].copy_from_slice(&self.head.identification.to_be_bytes());
            let checksum = !fold(sum(ip));
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        } else {
            bytes[network + 4..][..2].copy_from_slice(&low_half(own_size).to_be_bytes());
        }
        let checksum = self.head.checksum_of(self.payload).to_be_bytes();
        let checksum_at = if kind.is_tcp() {
            let tcp = &mut bytes[transport..][..TCP];
            tcp[4..8].copy_from_slice(&self.head.sequence.to_be_bytes());
            tcp[13] |= if self.pushes { PSH } else { 0 };
            TCP_CHECKSUM
        } else {
            bytes[transport + 4..][..2].copy_from_slice(&low_half(own_size).to_be_bytes());
            UDP_CHECKSUM
        };
        bytes[transport + checksum_at..][..2].copy_from_slice(&checksum);
        RawNetHeader {
            flags: HDR_F_NEEDS_CSUM,
            gso_type: kind.gso_type(),
            hdr_len: low_half(size).into(),
            gso_size: low_half(self.head.payload).into(),
            csum_start: low_half(transport).into(),
            csum_offset: low_half(checksum_at).into(),
            ..RawNetHeader::default()
        }
    }
}

#[cfg(test)]
mod tests;
