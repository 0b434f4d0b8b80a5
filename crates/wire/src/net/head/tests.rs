//! Joined frames, cut again as a host cuts them, are the frames that were joined.
#![allow(clippy::cast_possible_truncation, reason = "lengths and counts of tests are small")]

use super::*;
use proptest::prelude::*;

/// A frame to be: everything that a guest chooses.
#[derive(Clone, Debug)]
struct Frame {
    kind: Kind,
    tagged: bool,
    port: u16,
    flags: u8,
    sequence: u32,
    acknowledged: u32,
    options: usize,
    identification: u16,
    may_fragment: bool,
    service: u8,
    payload: Vec<u8>,
}

impl Frame {
    fn new(kind: Kind, payload: Vec<u8>) -> Self {
        Self {
            kind,
            tagged: false,
            port: 4000,
            flags: ACK,
            sequence: 0xffff_ff00,
            acknowledged: 77,
            options: 12,
            identification: 0xfffe,
            may_fragment: false,
            service: 0,
            payload,
        }
    }

    /// The one that follows.
    fn next(&self, payload: Vec<u8>) -> Self {
        let sequence = self.sequence.wrapping_add(self.payload.len() as u32);
        let identification = self.identification.wrapping_add(1);
        Self { sequence, identification, payload, ..self.clone() }
    }

    /// As the guest sends it: its checksum is left to the host.
    fn bytes(&self) -> (RawNetHeader, Vec<u8>) {
        let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        if self.tagged {
            bytes.extend([0x81, 0x00, 0x00, 0x07]);
        }
        bytes.extend(if self.kind.is_ipv4() { TYPE_IPV4 } else { TYPE_IPV6 });
        let mut own = Vec::from(self.port.to_be_bytes());
        own.extend(80u16.to_be_bytes());
        let checksum_at = if self.kind.is_tcp() {
            own.extend(self.sequence.to_be_bytes());
            own.extend(self.acknowledged.to_be_bytes());
            let words = (TCP + self.options) / 4;
            own.extend([(words as u8) << 4, self.flags, 0x20, 0, 0, 0, 0, 0]);
            own.extend((0..self.options).map(|n| n as u8));
            TCP_CHECKSUM
        } else {
            own.extend(((UDP + self.payload.len()) as u16).to_be_bytes());
            own.extend([0, 0]);
            UDP_CHECKSUM
        };
        let len = own.len() + self.payload.len();
        let protocol = if self.kind.is_tcp() { PROTOCOL_TCP } else { PROTOCOL_UDP };
        let mut addresses = Vec::new();
        if self.kind.is_ipv4() {
            addresses.extend([10, 0, 0, 1, 10, 0, 0, 2]);
            let mut ip = vec![0x45, self.service];
            ip.extend(((IPV4 + len) as u16).to_be_bytes());
            ip.extend(self.identification.to_be_bytes());
            ip.extend([if self.may_fragment { 0 } else { DF }, 0, 64, protocol, 0, 0]);
            ip.extend(&addresses);
            let checksum = !fold(sum(&ip));
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
            bytes.extend(ip);
        } else {
            addresses.extend(0..32u8);
            bytes.extend([0x60 | self.service >> 4, self.service << 4, 0, 0]);
            bytes.extend((len as u16).to_be_bytes());
            bytes.extend([protocol, 64]);
            bytes.extend(&addresses);
        }
        let partial = fold(sum(&addresses) + u32::from(protocol) + len as u32);
        own[checksum_at..checksum_at + 2].copy_from_slice(&partial.to_be_bytes());
        let header = RawNetHeader {
            flags: HDR_F_NEEDS_CSUM,
            csum_start: (bytes.len() as u16).into(),
            csum_offset: (checksum_at as u16).into(),
            ..RawNetHeader::default()
        };
        bytes.extend(own);
        bytes.extend(&self.payload);
        (header, bytes)
    }

    fn head(&self) -> Result<Head, Alone> {
        let (header, bytes) = self.bytes();
        parse(&header, &bytes)
    }
}

fn parse(header: &RawNetHeader, bytes: &[u8]) -> Result<Head, Alone> {
    let mut start = [0xa5; HEAD_SIZE_MAX];
    let known = bytes.len().min(HEAD_SIZE_MAX);
    start[..known].copy_from_slice(&bytes[..known]);
    Head::parse(header, &start, known, bytes.len())
}

/// Joins the first frame with those that follow, up to the first that cannot be joined; returns how
/// many were joined, and the long frame's headers and bytes.
fn join(frames: &[Frame]) -> (usize, RawNetHeader, Vec<u8>) {
    let mut joined = Joined::new(frames[0].head().unwrap());
    let rest = frames[1..].iter().take_while(|frame| frame.head().is_ok_and(|h| joined.add(&h)));
    let count = rest.count() + 1;
    assert_eq!(joined.count(), count);
    let mut head = [0; HEAD_SIZE_MAX];
    let header = joined.write(&mut head);
    let mut bytes = Vec::from(&head[..joined.first().size()]);
    frames[..count].iter().for_each(|frame| bytes.extend(&frame.payload));
    (count, header, bytes)
}

/// Cuts a long frame as Linux does (`tcp_gso_segment`, `__udp_gso_segment`): the IP identification
/// counts on, PSH is left to the last.
fn cut(header: &RawNetHeader, bytes: &[u8]) -> Vec<Vec<u8>> {
    let own = usize::from(header.csum_start.get());
    let is_tcp = header.gso_type != HDR_GSO_UDP_L4;
    let size = own + if is_tcp { usize::from(bytes[own + 12] >> 4) * 4 } else { UDP };
    assert_eq!(usize::from(header.hdr_len.get()), size);
    let (head, payload) = bytes.split_at(size);
    let pieces: Vec<_> = payload.chunks(header.gso_size.get().into()).collect();
    let network = if head[12..14] == TYPE_VLAN { 18 } else { 14 };
    let is_ipv4 = head[network - 2..network] == TYPE_IPV4;
    let last = pieces.len() - 1;
    let one = |(n, piece): (usize, &&[u8])| {
        let mut frame = Vec::from(head);
        let len = size - own + piece.len();
        let ip = &mut frame[network..own];
        let sums = if is_ipv4 {
            assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), bytes.len() - network);
            assert_eq!(fold(sum(ip)), 0xffff, "the checksum of the long packet");
            let identification = u16::from_be_bytes([ip[4], ip[5]]).wrapping_add(n as u16);
            ip[2..4].copy_from_slice(&((IPV4 + len) as u16).to_be_bytes());
            ip[4..6].copy_from_slice(&identification.to_be_bytes());
            ip[10..12].fill(0);
            let checksum = !fold(sum(ip));
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
            sum(&ip[12..20]) + u32::from(ip[9])
        } else {
            ip[4..6].copy_from_slice(&(len as u16).to_be_bytes());
            sum(&ip[8..40]) + u32::from(ip[6])
        };
        let at = own + usize::from(header.csum_offset.get());
        let whole = fold(sums + (bytes.len() - own) as u32);
        assert_eq!(frame[at..at + 2], whole.to_be_bytes(), "the partial checksum of all");
        frame[at..at + 2].copy_from_slice(&fold(sums + len as u32).to_be_bytes());
        if is_tcp {
            let first = u32::from_be_bytes(frame[own + 4..own + 8].try_into().unwrap());
            let done = n * usize::from(header.gso_size.get());
            let sequence = first.wrapping_add(done as u32);
            frame[own + 4..own + 8].copy_from_slice(&sequence.to_be_bytes());
            if n < last {
                frame[own + 13] &= !PSH;
            }
        } else {
            frame[own + 4..own + 6].copy_from_slice(&(len as u16).to_be_bytes());
        }
        frame.extend(*piece);
        frame
    };
    pieces.iter().enumerate().map(one).collect()
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Tcp4), Just(Kind::Tcp6), Just(Kind::Udp4), Just(Kind::Udp6)]
}

proptest! {
    #[test]
    fn what_was_joined_is_cut_into_the_same_frames(
        kind in kinds(),
        tagged: bool,
        may_fragment: bool,
        options in (0usize..=10).prop_map(|words| words * 4),
        service: u8,
        piece in 1usize..1400,
        count in 1usize..64,
        last in 1usize..1400,
        pushes: u64,
    ) {
        let payload = |n: usize, len: usize| (0..len).map(|at| (at * 7 + n) as u8).collect();
        let first = Frame::new(kind, payload(0, piece));
        let mut frames = vec![Frame { tagged, may_fragment, options, service, ..first }];
        for n in 1..count {
            let len = if n + 1 < count { piece } else { last.min(piece) };
            frames.push(frames[n - 1].next(payload(n, len)));
        }
        if kind.is_tcp() {
            for (n, frame) in frames.iter_mut().enumerate() {
                frame.flags |= if pushes >> n & 1 == 0 { 0 } else { PSH };
            }
        }
        let (joined, header, bytes) = join(&frames);
        let head = frames[0].head().unwrap().size();
        let ethernet = if tagged { 18 } else { 14 };
        let fits = 1 + (PACKET_MAX + ethernet - head) / piece;
        prop_assert!(joined == count || (joined < fits + 1 && joined + 1 >= fits.min(count)));
        let pushed = frames[..joined].iter().any(|frame| frame.flags & PSH != 0);
        for frame in &mut frames {
            frame.flags &= !PSH;
        }
        frames[joined - 1].flags |= if pushed { PSH } else { 0 };
        let cut = cut(&header, &bytes);
        prop_assert_eq!(cut.len(), joined);
        for (frame, cut) in frames.iter().zip(cut) {
            prop_assert_eq!(frame.bytes().1, cut);
        }
    }

    #[test]
    fn no_bytes_make_a_head_that_cannot_be_written(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ethernet in 0usize..3,
        csum_start in 0u16..80,
        csum_offset in prop_oneof![Just(6u16), Just(16), any::<u16>()],
    ) {
        let mut bytes = bytes;
        if let Some(kind) = bytes.get_mut(12..14) {
            kind.copy_from_slice(&[TYPE_IPV4, TYPE_IPV6, TYPE_VLAN][ethernet]);
        }
        let header = RawNetHeader {
            flags: HDR_F_NEEDS_CSUM,
            csum_start: csum_start.into(),
            csum_offset: csum_offset.into(),
            ..RawNetHeader::default()
        };
        if let Ok(head) = parse(&header, &bytes) {
            let mut joined = Joined::new(head.clone());
            let _ = joined.add(&head);
            joined.write(&mut [0; HEAD_SIZE_MAX]);
        }
    }
}

#[test]
fn frames_that_differ_in_more_than_their_numbers_stay_apart() {
    let first = Frame::new(Kind::Tcp4, vec![1; 100]);
    let next = first.next(vec![2; 100]);
    let joins = |first: &Frame, next: &Frame| join(&[first.clone(), next.clone()]).0 == 2;
    assert!(joins(&first, &next));
    let others: [(&str, Frame); 9] = [
        ("another port", Frame { port: 4001, ..next.clone() }),
        ("a gap", Frame { sequence: next.sequence.wrapping_add(1), ..next.clone() }),
        ("an overlap", Frame { sequence: first.sequence, ..next.clone() }),
        ("another acknowledgement", Frame { acknowledged: 78, ..next.clone() }),
        ("other options", Frame { options: 8, ..next.clone() }),
        ("another identification", Frame { identification: 5, ..next.clone() }),
        ("another service", Frame { service: 3, ..next.clone() }),
        ("an echo of congestion", Frame { flags: ACK | ECE, ..next.clone() }),
        ("more than the first", Frame { payload: vec![2; 101], ..next.clone() }),
    ];
    for (what, other) in others {
        assert!(!joins(&first, &other), "{what}");
    }
    let short = first.next(vec![2; 99]);
    assert!(joins(&first, &short), "the last may be shorter");
    assert_eq!(join(&[first.clone(), short.clone(), short.next(vec![3; 99])]).0, 2);
    let same = |frame: &Frame| Frame { identification: first.identification, ..frame.clone() };
    assert!(joins(&first, &same(&next)), "what is never cut needs no numbers");
    let loose = |frame: &Frame| Frame { may_fragment: true, ..frame.clone() };
    assert!(joins(&loose(&first), &loose(&next)));
    assert!(!joins(&loose(&first), &loose(&same(&next))), "its pieces would be mixed up");
    let datagram = Frame::new(Kind::Udp4, vec![1; 100]);
    assert!(!joins(&datagram, &Frame { port: 4001, ..datagram.next(vec![2; 100]) }));
}

#[test]
fn frames_that_say_something_at_their_place_are_not_joined() {
    let frame = Frame::new(Kind::Tcp4, vec![1; 100]);
    for flag in [0x01, 0x02, 0x04, 0x20, 0x80] {
        let flags = ACK | flag;
        assert_eq!(Frame { flags, ..frame.clone() }.head().err(), Some(Alone::Flags), "{flag:#x}");
    }
    assert_eq!(Frame { flags: PSH, ..frame.clone() }.head().err(), Some(Alone::Flags));
    for kind in [Kind::Tcp4, Kind::Tcp6, Kind::Udp4, Kind::Udp6] {
        assert_eq!(Frame::new(kind, Vec::new()).head().err(), Some(Alone::Flags));
    }
}

#[test]
fn a_header_that_lies_is_left_as_it_is() {
    for kind in [Kind::Tcp4, Kind::Tcp6, Kind::Udp4, Kind::Udp6] {
        let (header, bytes) = Frame::new(kind, vec![1; 100]).bytes();
        assert!(parse(&header, &bytes).is_ok());
        let padded = [&bytes[..], &[0; 4]].concat();
        assert_eq!(parse(&header, &padded).err(), Some(Alone::Wrong), "{kind:?}: padding");
        let cut = &bytes[..bytes.len() - 1];
        assert_eq!(parse(&header, cut).err(), Some(Alone::Wrong), "{kind:?}: cut");
        let at = usize::from(header.csum_start.get()) + usize::from(header.csum_offset.get());
        let mut wrong = bytes.clone();
        wrong[at] ^= 1;
        assert_eq!(parse(&header, &wrong).err(), Some(Alone::Wrong), "{kind:?}: checksum");
        let elsewhere = RawNetHeader { csum_start: 40.into(), ..header };
        assert_eq!(parse(&elsewhere, &bytes).err(), Some(Alone::Checksum), "{kind:?}");
        let finished = RawNetHeader::default();
        assert_eq!(parse(&finished, &bytes).err(), Some(Alone::Checksum), "{kind:?}");
        let long = RawNetHeader { gso_type: HDR_GSO_TCPV4, ..header };
        assert_eq!(parse(&long, &bytes).err(), Some(Alone::Kind), "{kind:?}");
        for len in 0..bytes.len() {
            assert!(parse(&header, &bytes[..len]).is_err(), "{kind:?}: {len}");
        }
        if kind.is_ipv4() {
            for (at, alone) in [(14, Alone::Options), (20, Alone::Options), (24, Alone::Wrong)] {
                let mut wrong = bytes.clone();
                wrong[at] ^= if at == 20 { 0x20 } else { 1 };
                assert_eq!(parse(&header, &wrong).err(), Some(alone), "{kind:?}: {at}");
            }
        } else {
            let mut wrong = bytes.clone();
            wrong[20] = 0;
            assert_eq!(parse(&header, &wrong).err(), Some(Alone::Options));
        }
        let mut tagged_twice = bytes.clone();
        tagged_twice.splice(12..12, [0x81, 0, 0, 1, 0x81, 0, 0, 2]);
        assert_eq!(parse(&header, &tagged_twice).err(), Some(Alone::Kind));
    }
}

#[test]
fn frames_of_one_flow_have_its_protocols_tags_addresses_and_ports() {
    for kind in [Kind::Tcp4, Kind::Tcp6, Kind::Udp4, Kind::Udp6] {
        let first = Frame::new(kind, vec![1; 100]);
        let head = |frame: &Frame| frame.head().unwrap();
        let of_first = head(&first);
        assert_eq!((of_first.kind(), of_first.payload()), (kind, 100));
        let next = Frame { service: 3, options: 8, ..first.next(vec![2; 7]) };
        assert!(of_first.is_of_flow(&head(&next)), "{kind:?}");
        let port = Frame { port: 4001, ..first.clone() };
        let tagged = Frame { tagged: true, ..first.clone() };
        for other in [port, tagged] {
            assert!(!of_first.is_of_flow(&head(&other)), "{other:?}");
        }
        // The last byte of either address.
        let (addresses, size) = if kind.is_ipv4() { (26, 4) } else { (22, 16) };
        for at in [addresses, addresses + size - 1, addresses + size, addresses + 2 * size - 1] {
            let mut moved = of_first.clone();
            moved.bytes[at] ^= 1;
            assert!(!of_first.is_of_flow(&moved), "{kind:?} {at}");
        }
        let mut before = of_first.clone();
        before.bytes[addresses - 1] ^= 1;
        assert!(of_first.is_of_flow(&before), "{kind:?}: no part of the addresses");
        let others = [Kind::Tcp4, Kind::Tcp6, Kind::Udp4, Kind::Udp6];
        for other in others.into_iter().filter(|other| *other != kind) {
            let other = head(&Frame::new(other, vec![1; 100]));
            assert!(!of_first.is_of_flow(&other), "{kind:?} {:?}", other.kind());
        }
    }
}
