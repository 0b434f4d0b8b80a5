//! `finish`: completes an unfinished frame as a network card would: its checksum, and its segments.
//!
//! ```text
//! not to be cut    sum from csum_start to the end, put at csum_start + csum_offset
//! to be cut        for each piece of gso_size bytes of payload:
//!                      all headers again; lengths, IPv4 identification and TCP sequence number are
//!                      the piece's; FIN and PSH only on the last, CWR only on the first; checksums
//! ```
//! Every length is a claim of the sender and is checked against the frame's bytes. A frame with a
//! false length is refused, and no frame becomes more than [`SEGMENTS_MAX`] segments.

use super::head::{TYPE_IPV4, TYPE_IPV6, TYPE_VLAN, array, fold};
use super::{
    HDR_F_NEEDS_CSUM, HDR_GSO_ECN, HDR_GSO_NONE, HDR_GSO_TCPV4, HDR_GSO_TCPV6, RawNetHeader,
};

/// Most segments of a frame: the longest frame with an MSS of 128 bytes has 512.
pub const SEGMENTS_MAX: usize = 512;

const ETHERNET: usize = 14;
const VLAN_TAG: usize = 4;
const TAGS_MAX: usize = 2;
const IPV6: usize = 40;
const PROTOCOL_TCP: u8 = 6;
const TCP: usize = 20;
const TCP_CHECKSUM: usize = 16;
const FIN_PSH: u8 = 0x01 | 0x08;
const CWR: u8 = 0x80;

/// Why a frame cannot be finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each is")]
pub enum SegmentError {
    #[error("it is no TCP over IP that can be cut")]
    Kind,
    #[error("its headers do not fit its bytes")]
    Lengths,
    #[error("it would be more than 512 pieces")]
    Pieces,
}

/// Finishes `frame`, which came with `header`. Calls `each` for every frame that results, and
/// returns their number. Changes `frame`.
///
/// # Errors
/// [`SegmentError`]: `frame` cannot be finished, and `each` was not called.
pub fn finish(
    header: &RawNetHeader,
    frame: &mut [u8],
    mut each: impl FnMut(&[u8]),
) -> Result<usize, SegmentError> {
    if header.gso_type != HDR_GSO_NONE {
        return Cut::new(header, frame)?.segments(frame, each);
    }
    if header.flags & HDR_F_NEEDS_CSUM != 0 {
        let start = usize::from(header.csum_start.get());
        let at = start + usize::from(header.csum_offset.get());
        let bytes = frame.get(start..).ok_or(SegmentError::Lengths)?;
        let sum = checksum(0, bytes);
        put(frame, at, sum.to_be_bytes())?;
    }
    each(frame);
    Ok(1)
}

/// How a frame is cut: where its headers begin, and the payload bytes of each segment (`piece`).
struct Cut {
    is_ipv4: bool,
    network: usize,
    transport: usize,
    /// Bytes of all headers.
    size: usize,
    piece: usize,
}

impl Cut {
    fn new(header: &RawNetHeader, frame: &[u8]) -> Result<Self, SegmentError> {
        let is_ipv4 = match header.gso_type & !HDR_GSO_ECN {
            HDR_GSO_TCPV4 => true,
            HDR_GSO_TCPV6 => false,
            _ => return Err(SegmentError::Kind),
        };
        let mut network = ETHERNET;
        for _ in 0..TAGS_MAX {
            if *bytes(frame, network - 2)? == TYPE_VLAN {
                network += VLAN_TAG;
            }
        }
        let wanted = if is_ipv4 { TYPE_IPV4 } else { TYPE_IPV6 };
        if *bytes(frame, network - 2)? != wanted {
            return Err(SegmentError::Kind);
        }
        let transport = usize::from(header.csum_start.get());
        if is_ipv4 {
            let [version, ..] = *bytes::<20>(frame, network)?;
            let protocol = frame[network + 9];
            let is_right = version >> 4 == 4 && protocol == PROTOCOL_TCP;
            if !is_right || transport != network + usize::from(version & 15) * 4 {
                return Err(SegmentError::Kind);
            }
        } else if transport < network + IPV6 {
            return Err(SegmentError::Lengths);
        }
        if transport < network + 20 {
            return Err(SegmentError::Lengths);
        }
        let tcp = bytes::<TCP>(frame, transport)?;
        let size = transport + usize::from(tcp[12] >> 4) * 4;
        let piece = usize::from(header.gso_size.get());
        if size < transport + TCP || size > frame.len() || piece == 0 {
            return Err(SegmentError::Lengths);
        }
        Ok(Self { is_ipv4, network, transport, size, piece })
    }

    fn segments(&self, frame: &[u8], mut each: impl FnMut(&[u8])) -> Result<usize, SegmentError> {
        let (head, payload) = frame.split_at(self.size);
        let count = payload.len().div_ceil(self.piece).max(1);
        if count > SEGMENTS_MAX {
            return Err(SegmentError::Pieces);
        }
        let mut segment = Vec::with_capacity(self.size + self.piece.min(payload.len()));
        for index in 0..count {
            let at = index * self.piece;
            segment.clear();
            segment.extend_from_slice(head);
            segment.extend_from_slice(&payload[at..payload.len().min(at + self.piece)]);
            self.number(&mut segment, index, at, index + 1 == count)?;
            each(&segment);
        }
        Ok(count)
    }

    /// Writes the lengths, numbers and flags of one segment into its headers.
    #[allow(clippy::cast_possible_truncation, reason = "within a frame")]
    fn number(
        &self,
        segment: &mut [u8],
        index: usize,
        at: usize,
        is_last: bool,
    ) -> Result<(), SegmentError> {
        let (network, transport) = (self.network, self.transport);
        let packet = low(segment.len() - network);
        if self.is_ipv4 {
            let id = u16::from_be_bytes(*bytes(segment, network + 4)?).wrapping_add(low(index));
            put(segment, network + 2, packet.to_be_bytes())?;
            put(segment, network + 4, id.to_be_bytes())?;
            put(segment, network + 10, [0; 2])?;
            let sum = checksum(0, &segment[network..transport]);
            put(segment, network + 10, sum.to_be_bytes())?;
        } else {
            put(segment, network + 4, low(segment.len() - network - IPV6).to_be_bytes())?;
        }
        let sequence = u32::from_be_bytes(*bytes(segment, transport + 4)?);
        let sequence = sequence.wrapping_add(at as u32);
        put(segment, transport + 4, sequence.to_be_bytes())?;
        if !is_last {
            segment[transport + 13] &= !FIN_PSH;
        }
        if index > 0 {
            segment[transport + 13] &= !CWR;
        }
        put(segment, transport + TCP_CHECKSUM, [0; 2])?;
        let addresses = if self.is_ipv4 { 12..20 } else { 8..40 };
        let pseudo = sum(0, &segment[network..][addresses])
            + u64::from(PROTOCOL_TCP)
            + u64::from(low(segment.len() - transport));
        let sum = checksum(pseudo, &segment[transport..]);
        put(segment, transport + TCP_CHECKSUM, sum.to_be_bytes())
    }
}

/// The `N` bytes at offset `at`.
fn bytes<const N: usize>(frame: &[u8], at: usize) -> Result<&[u8; N], SegmentError> {
    array(frame, at).map_err(|_| SegmentError::Lengths)
}

fn put<const N: usize>(frame: &mut [u8], at: usize, bytes: [u8; N]) -> Result<(), SegmentError> {
    let place = frame.get_mut(at..at + N).ok_or(SegmentError::Lengths)?;
    place.copy_from_slice(&bytes);
    Ok(())
}

/// Adds the 16-bit words of `bytes`, in network order, to `sum`; a last single byte is the high
/// one.
fn sum(sum: u64, bytes: &[u8]) -> u64 {
    let words = bytes.chunks_exact(2);
    let odd = words.remainder().first().map_or(0, |byte| u64::from(*byte) << 8);
    words.fold(sum + odd, |sum, word| sum + u64::from(u16::from_be_bytes([word[0], word[1]])))
}

/// The internet checksum (RFC 1071). Never 0, which means "no checksum" in UDP.
fn checksum(start: u64, bytes: &[u8]) -> u16 {
    let sum = sum(start, bytes);
    // At most 65,553 bytes: 33 bits hold the sum.
    let folded = fold(u32::try_from((sum >> 16) + (sum & 0xffff)).unwrap_or(u32::MAX));
    match !folded {
        0 => 0xffff,
        sum => sum,
    }
}

/// The low 16 bits of a length or number in a packet, none of which exceeds 65,535.
#[allow(clippy::cast_possible_truncation, reason = "a packet of IP has no more")]
const fn low(n: usize) -> u16 {
    n as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A TCP frame over IPv4 or IPv6 with `payload` bytes that count up, to be cut at `mss`.
    fn frame(is_ipv4: bool, tagged: bool, payload: usize, mss: u16) -> (RawNetHeader, Vec<u8>) {
        let mut frame = vec![2; 12];
        if tagged {
            frame.extend([0x81, 0, 0, 5]);
        }
        let network;
        if is_ipv4 {
            frame.extend([8, 0]);
            network = frame.len();
            frame.extend([0x45, 0, 0, 0, 0x12, 0xff, 0x40, 0, 64, 6, 0, 0]);
            frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
        } else {
            frame.extend([0x86, 0xdd]);
            network = frame.len();
            frame.extend([0x60, 0, 0, 0, 0, 0, 6, 64]);
            frame.extend((0..32).collect::<Vec<u8>>());
        }
        let transport = frame.len();
        frame.extend([1, 2, 3, 4, 0xff, 0xff, 0xff, 0, 0, 0, 0, 9, 0x80, 0x99, 1, 0, 0, 0, 0, 0]);
        frame.extend([1; 12]);
        frame.extend((0..=255u8).cycle().take(payload));
        let total = low(frame.len() - network);
        if is_ipv4 {
            put(&mut frame, network + 2, total.to_be_bytes()).unwrap();
        }
        let header = RawNetHeader {
            flags: HDR_F_NEEDS_CSUM,
            gso_type: if is_ipv4 { HDR_GSO_TCPV4 } else { HDR_GSO_TCPV6 },
            gso_size: mss.into(),
            csum_start: low(transport).into(),
            csum_offset: 16.into(),
            ..RawNetHeader::default()
        };
        (header, frame)
    }

    fn pieces(header: &RawNetHeader, mut frame: Vec<u8>) -> Result<Vec<Vec<u8>>, SegmentError> {
        let mut all = Vec::new();
        finish(header, &mut frame, |piece| all.push(piece.to_vec()))?;
        Ok(all)
    }

    #[test]
    fn segments_hold_all_bytes_once_with_numbers_flags_and_checksums_of_their_own() {
        for (is_ipv4, tagged) in [(true, false), (true, true), (false, false), (false, true)] {
            let (header, whole) = frame(is_ipv4, tagged, 3001, 1000);
            let transport = usize::from(header.csum_start.get());
            let network = transport - if is_ipv4 { 20 } else { 40 };
            let all = pieces(&header, whole.clone()).unwrap();
            assert_eq!(all.len(), 4);
            let mut payload = Vec::<u8>::new();
            for (index, piece) in all.iter().enumerate() {
                payload.extend(&piece[transport + 32..]);
                let sequence = u32::from_be_bytes(*bytes(piece, transport + 4).unwrap());
                assert_eq!(sequence, 0xffff_ff00u32.wrapping_add(1000 * u32::from(low(index))));
                let flags = [0x90, 0x10, 0x10, 0x19][index];
                assert_eq!(piece[transport + 13], flags, "CWR first, FIN and PSH last: {index}");
                let addresses = if is_ipv4 { 12..20 } else { 8..40 };
                let tcp = &piece[transport..];
                let pseudo = sum(0, &piece[network..][addresses]) + 6 + tcp.len() as u64;
                assert_eq!(fold(u32::try_from(sum(pseudo, tcp)).unwrap()), 0xffff, "TCP");
                if is_ipv4 {
                    let ip = &piece[network..transport];
                    assert_eq!(fold(u32::try_from(sum(0, ip)).unwrap()), 0xffff, "IPv4");
                    assert_eq!(
                        ip[4..6],
                        [0x12u8.wrapping_add(u8::from(index > 0)), [0xff, 0, 1, 2][index]]
                    );
                }
            }
            assert_eq!(payload, &whole[transport + 32..]);
        }
    }

    #[test]
    fn segments_have_the_headers_of_their_frame_but_for_what_is_their_own() {
        for (is_ipv4, tagged) in [(true, false), (true, true), (false, false), (false, true)] {
            let (header, mut whole) = frame(is_ipv4, tagged, 2500, 1000);
            let transport = usize::from(header.csum_start.get());
            let network = transport - if is_ipv4 { 20 } else { 40 };
            // A guest leaves checksums of the whole packet there, and not zeroes.
            let tcp_sum = transport + TCP_CHECKSUM;
            put(&mut whole, tcp_sum, [0x12, 0x34]).unwrap();
            if is_ipv4 {
                put(&mut whole, network + 10, [0xab, 0xcd]).unwrap();
            }
            // IPv4 counts its header as well (RFC 791), IPv6 only what follows it (RFC 8200).
            let (len_at, from) = if is_ipv4 { (2, network) } else { (4, transport) };
            let mut own = vec![tcp_sum, tcp_sum + 1, transport + 13];
            own.extend(transport + 4..transport + 8);
            own.extend(network + len_at..network + len_at + 2);
            own.extend([4, 5, 10, 11].iter().filter(|_| is_ipv4).map(|at| network + at));
            for (piece, payload) in
                pieces(&header, whole.clone()).unwrap().iter().zip([1000, 1000, 500])
            {
                assert_eq!(piece.len(), transport + 32 + payload);
                let len = u16::from_be_bytes(*bytes(piece, network + len_at).unwrap());
                assert_eq!(usize::from(len), piece.len() - from, "{is_ipv4} {tagged}");
                for at in (0..transport + 32).filter(|at| !own.contains(at)) {
                    assert_eq!(piece[at], whole[at], "byte {at}: {is_ipv4} {tagged}");
                }
                let pseudo = sum(0, &piece[network..][if is_ipv4 { 12..20 } else { 8..40 }]);
                let tcp = &piece[transport..];
                let tcp = sum(pseudo + 6 + tcp.len() as u64, tcp);
                assert_eq!(fold(u32::try_from(tcp).unwrap()), 0xffff, "TCP: {is_ipv4} {tagged}");
                let ip = sum(0, &piece[network..transport]);
                let ip = fold(u32::try_from(ip).unwrap());
                assert!(!is_ipv4 || ip == 0xffff, "IPv4: {tagged}");
            }
        }
    }

    #[test]
    fn a_partial_checksum_is_completed_where_the_header_says() {
        let mut bytes = vec![0xaa; 21];
        bytes[16..18].copy_from_slice(&[0, 7]);
        let header = RawNetHeader {
            flags: HDR_F_NEEDS_CSUM,
            csum_start: 14.into(),
            csum_offset: 2.into(),
            ..RawNetHeader::default()
        };
        let all = pieces(&header, bytes.clone()).unwrap();
        assert_eq!(all[0][16..18], checksum(0, &bytes[14..]).to_be_bytes());
    }

    #[test]
    fn a_frame_that_lies_is_refused() {
        let (header, good) = frame(true, false, 3000, 1000);
        let with = |change: &dyn Fn(&mut RawNetHeader, &mut Vec<u8>)| {
            let (mut header, mut frame) = (header, good.clone());
            change(&mut header, &mut frame);
            pieces(&header, frame)
        };
        assert_eq!(with(&|_, f| f.truncate(40)), Err(SegmentError::Lengths));
        assert_eq!(with(&|_, f| f[14] = 0x4f), Err(SegmentError::Kind));
        assert_eq!(with(&|_, f| f[23] = 17), Err(SegmentError::Kind));
        assert_eq!(with(&|_, f| f[46] = 0x10), Err(SegmentError::Lengths), "a short TCP header");
        assert_eq!(with(&|h, _| h.gso_size = 1.into()), Err(SegmentError::Pieces));
        assert_eq!(with(&|h, _| h.gso_type = 9), Err(SegmentError::Kind));
        assert_eq!(with(&|h, _| h.csum_start = 60_000.into()), Err(SegmentError::Kind));
    }

    proptest! {
        #[test]
        fn whatever_comes_is_refused_or_becomes_a_bounded_number_of_pieces(
            head in proptest::collection::vec(any::<u8>(), 12),
            mut bytes in proptest::collection::vec(any::<u8>(), 14..2000),
            kind in any::<bool>(),
        ) {
            let mut raw = [0; 12];
            raw.copy_from_slice(&head);
            let mut header: RawNetHeader = zerocopy::transmute!(raw);
            header.gso_type = if kind { HDR_GSO_TCPV4 } else { HDR_GSO_TCPV6 };
            bytes[12..14].copy_from_slice(if kind { &TYPE_IPV4 } else { &TYPE_IPV6 });
            let mut count = 0;
            if let Ok(pieces) = finish(&header, &mut bytes, |_| count += 1) {
                prop_assert!(pieces == count && count <= SEGMENTS_MAX);
            } else {
                prop_assert_eq!(count, 0);
            }
        }
    }

    #[test]
    fn a_finished_frame_stays_as_it_is_and_a_checksum_past_the_end_is_refused() {
        let bytes = vec![0xaa; 21];
        let plain = RawNetHeader { csum_start: 14.into(), ..RawNetHeader::default() };
        assert_eq!(pieces(&plain, bytes.clone()).unwrap(), [&bytes[..]]);
        let csum = RawNetHeader { flags: HDR_F_NEEDS_CSUM, csum_offset: 5.into(), ..plain };
        assert_eq!(pieces(&csum, bytes.clone()).unwrap().len(), 1);
        let late = RawNetHeader { csum_offset: 6.into(), ..csum };
        assert_eq!(pieces(&late, bytes.clone()), Err(SegmentError::Lengths));
        let far = RawNetHeader { csum_start: 22.into(), csum_offset: 0.into(), ..csum };
        assert_eq!(pieces(&far, bytes), Err(SegmentError::Lengths));
        // A sum of zero is written as its other form: zero says that there is no checksum.
        assert_eq!((checksum(0, &[0xff, 0xff]), checksum(0, &[])), (0xffff, 0xffff));
        assert_eq!(checksum(0, &[0x12, 0x34, 0x56]), !(0x1234 + 0x5600));
    }

    #[test]
    fn the_most_pieces_there_may_be_are_made_and_no_headers_are_shorter_than_they_must_be() {
        let (header, most) = frame(true, false, SEGMENTS_MAX, 1);
        assert_eq!(pieces(&header, most).unwrap().len(), SEGMENTS_MAX);
        let (header, more) = frame(true, false, SEGMENTS_MAX + 1, 1);
        assert_eq!(pieces(&header, more), Err(SegmentError::Pieces));
        let lengths = |header: RawNetHeader, frame: Vec<u8>| {
            assert_eq!(pieces(&header, frame), Err(SegmentError::Lengths));
        };
        let (header, good) = frame(true, false, 100, 50);
        lengths(RawNetHeader { gso_size: 0.into(), ..header }, good.clone());
        let mut short = good.clone();
        short[14] = 0x44;
        lengths(RawNetHeader { csum_start: 30.into(), ..header }, short);
        let mut cut = good[..34 + 40].to_vec();
        cut[46] = 0xf0;
        lengths(header, cut);
        let mut options = good[..34 + 60].to_vec();
        options[46] = 0xf0;
        assert_eq!(pieces(&header, options).unwrap().len(), 1, "headers and no payload");
        let (header, six) = frame(false, false, 100, 50);
        lengths(RawNetHeader { csum_start: 53.into(), ..header }, six);
    }
}
