//! Unfinished frames between two taps on a bridge: passed on as they are, or finished by the
//! kernel, as the receiver takes them.

use crate::guest::{GUEST, GUEST_MAC, Guest, HOST, checksum, ethernet, halves, ipv4, is_ipv4};
use crate::space::{TIMEOUT, in_own_space, named, run};
use manyring_backend::net::switch::uplink::Uplink;
use manyring_backend::net::switch::{Clock, PortOptions, Switch, SwitchOptions};
use manyring_backend::net::tap::{TapOptions, TapPort};
use manyring_backend::net::{Port, Sent};
use manyring_wire::net::{HDR_F_NEEDS_CSUM, HDR_GSO_TCPV4, HDR_GSO_UDP_L4, Offloads, RawNetHeader};
use std::sync::Arc;

const TCP: u8 = 6;
const UDP: u8 = 17;
const MSS: usize = 1448;

/// The sum over the pseudo header, to which the kernel adds the rest.
fn pseudo(protocol: u8, len: usize) -> u16 {
    let len = u16::try_from(len).unwrap().to_be_bytes();
    !checksum(&[&GUEST[..], &HOST, &[0, protocol], &len].concat())
}

/// A frame of `payload` bytes that count up, whose checksum is partial.
fn frame(protocol: u8, payload: usize) -> Vec<u8> {
    let header = if protocol == TCP { 20 } else { 8 };
    let mut segment = vec![0x12, 0x34, 0x12, 0x35];
    segment.resize(header, 0);
    if protocol == TCP {
        segment[12] = 5 << 4;
        segment[13] = 0x10;
    } else {
        let len = u16::try_from(8 + payload).unwrap();
        segment[4..6].copy_from_slice(&len.to_be_bytes());
    }
    segment.extend((0..=u8::MAX).cycle().take(payload));
    let sum = pseudo(protocol, segment.len()).to_be_bytes();
    let at = checksum_offset(protocol);
    segment[at..at + 2].copy_from_slice(&sum);
    ethernet([0xff; 6], GUEST_MAC, 0x0800, &ipv4(GUEST, HOST, protocol, &segment))
}

fn checksum_offset(protocol: u8) -> usize {
    if protocol == TCP { 16 } else { 6 }
}

fn header(protocol: u8) -> RawNetHeader {
    let (gso_type, hdr_len) =
        if protocol == TCP { (HDR_GSO_TCPV4, 54) } else { (HDR_GSO_UDP_L4, 42) };
    RawNetHeader {
        flags: HDR_F_NEEDS_CSUM,
        gso_type,
        hdr_len: hdr_len.into(),
        gso_size: u16::try_from(MSS).unwrap().into(),
        csum_start: 34.into(),
        csum_offset: u16::try_from(checksum_offset(protocol)).unwrap().into(),
        ..RawNetHeader::default()
    }
}

/// Two taps on a bridge.
fn pair() -> (TapPort, TapPort) {
    run("ip link add br0 type bridge mcast_snooping 0");
    run("ip link set br0 up");
    let open =
        |name| TapPort::open(TapOptions { bridge: Some("br0".into()), ..named(name, 1) }).unwrap();
    (open("mr0"), open("mr1"))
}

fn pass_whole(protocol: u8, payload: usize) {
    in_own_space(|| {
        let (near, far) = pair();
        far.set_offloads(far.given()).unwrap();
        let (mut tx, _) = halves(&near, 0);
        let (_, mut rx) = halves(&far, 0);
        let mut guest = Guest::new();
        let sent_frame = frame(protocol, payload);
        for piece in [131_072, 4096, 1500, 60] {
            let sent = guest.send_in(&mut *tx, header(protocol), &sent_frame, piece);
            assert_eq!(sent, Sent { taken: 1, ..Sent::default() });
            let (got, frame) = guest.recv(&mut *rx, |frame| is_ipv4(frame, protocol));
            assert_eq!(
                (got.gso_type, got.gso_size),
                (header(protocol).gso_type, header(protocol).gso_size)
            );
            assert_eq!((got.csum_start.get(), got.flags), (34, HDR_F_NEEDS_CSUM));
            assert!(frame == sent_frame, "{} bytes", frame.len());
        }
    });
}

#[test]
fn a_tcp_frame_of_64_kib_passes_whole() {
    // Longer ones are allowed, but the kernel cuts them between two interfaces (gso_max_size).
    let payload = 65_535 - 54;
    assert_eq!(frame(TCP, payload).len(), 65_535);
    pass_whole(TCP, payload);
}

#[test]
fn uncut_datagrams_pass_whole() {
    pass_whole(UDP, 20 * MSS);
}

#[test]
fn a_frame_that_a_switch_lends_its_uplink_passes_whole() {
    in_own_space(|| {
        let (near, far) = pair();
        far.set_offloads(far.given()).unwrap();
        let (mut tx_far, mut rx) = halves(&far, 0);
        let options = SwitchOptions {
            name: "s0".into(),
            age: 300,
            group_fwd_mask: 0,
            clock: Clock::default(),
        };
        let switch = Switch::new(options);
        let port = |name: &str, is_uplink| {
            let limits = PortOptions { floods_max: 1_000_000, ..PortOptions::new(name, 1) };
            switch.port(PortOptions { is_uplink, ..limits }).unwrap()
        };
        let _uplink = Uplink::start(port("up", true), Arc::new(near), "up").unwrap();
        let near = port("a", false);
        near.set_attached(0, true).unwrap();
        let mut tx = near.open_tx(0).unwrap();
        let (mut guest, mut host, mut whole) = (Guest::new(), Guest::new(), Vec::new());
        // Until the switch knows where the address is, frames to it are copied to all ports.
        let mac = [2, 0, 0, 0, 0, 0x22];
        for number in 0..=u8::MAX {
            host.send(&mut *tx_far, &ethernet([0xff; 6], mac, 0x88b5, &[0; 46]));
            whole = frame(TCP, 20 * MSS + 100);
            whole[..6].copy_from_slice(&mac);
            whole[54] = number;
            let sent = guest.send_in(&mut *tx, header(TCP), &whole, 4096);
            assert_eq!(sent.taken, 1);
            if sent.later != 0 {
                break;
            }
            assert!(number < u8::MAX, "it is not lent");
            std::thread::sleep(TIMEOUT / 256);
        }
        let is_it = |frame: &[u8]| is_ipv4(frame, TCP) && frame[54] == whole[54];
        let (got, frame) = host.recv(&mut *rx, is_it);
        assert_eq!((got.gso_type, got.flags), (HDR_GSO_TCPV4, HDR_F_NEEDS_CSUM));
        assert!(frame == whole, "{} bytes", frame.len());
    });
}

#[test]
fn a_receiver_without_offloads_gets_finished_segments() {
    in_own_space(|| {
        let (near, far) = pair();
        assert!(far.given().uso4 && far.given().uso6 && far.given().ecn);
        let (mut tx, _) = halves(&near, 0);
        let (_, mut rx) = halves(&far, 0);
        let mut guest = Guest::new();
        let none = Offloads::default();
        // One that makes no sense alone is no error.
        let odd = Offloads { csum: true, ecn: true, uso4: true, ..none };
        for (protocol, offloads, is_partial) in
            [(TCP, none, false), (UDP, none, false), (TCP, odd, true), (UDP, odd, true)]
        {
            far.set_offloads(offloads).unwrap();
            let payload = 20 * MSS + 100;
            let whole = frame(protocol, payload);
            let headers = if protocol == TCP { 54 } else { 42 };
            let sent = guest.send_in(&mut *tx, header(protocol), &whole, 4096);
            assert_eq!(sent, Sent { taken: 1, ..Sent::default() });
            let mut data: Vec<u8> = Vec::new();
            while data.len() < payload {
                let (got, frame) = guest.recv(&mut *rx, |frame| is_ipv4(frame, protocol));
                let segment = &frame[34..];
                assert_eq!((got.gso_type, got.flags & HDR_F_NEEDS_CSUM != 0), (0, is_partial));
                let len = u16::try_from(segment.len()).unwrap().to_be_bytes();
                let pseudo = [&GUEST[..], &HOST, &[0, protocol], &len].concat();
                if !is_partial {
                    assert_eq!(checksum(&[&pseudo, segment].concat()), 0);
                }
                assert!(segment.len() <= MSS + 20);
                data.extend(&frame[headers..]);
            }
            assert!(data == whole[headers..]);
        }
    });
}
