//! Frames whose headers lie are merged with nothing: a reader behind the host's bridge gets, byte
//! for byte, what it gets without merging, and so do the frames of the same burst that are right,
//! and those of a neighbour. Needs root.

use crate::support::process::{Daemon, TIMEOUT};
use crate::support::program::shown;
use crate::support::space::{in_own_space, queue, run};
use manyring_backend::sys::tuntap::{IFF_NO_PI, IFF_TAP};
use manyring_driver::{NetDriver, NetDriverOptions};
use manyring_wire::net::{
    HDR_F_NEEDS_CSUM, HDR_GSO_TCPV4, HDR_GSO_TCPV6, HDR_GSO_UDP_L4, RawNetHeader,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;

const TCP: u8 = 6;
const UDP: u8 = 17;
const KINDS: [(u8, u8); 4] = [(4, TCP), (6, TCP), (4, UDP), (6, UDP)];
const PIECE: u16 = 100;
/// A group's address: the bridge passes it to everybody.
const TO: [u8; 6] = [0x03, 0, 0, 0, 0, 0x01];
/// Who sends: the last byte of a frame's source address.
const RIGHT: u8 = 1;
const LIAR: u8 = 2;
const NEIGHBOUR: u8 = 3;
const MARK: u8 = 4;

/// A frame as a guest sends it, and where its parts are.
#[derive(Clone)]
struct Frame {
    header: RawNetHeader,
    bytes: Vec<u8>,
    is_ipv4: bool,
    is_tcp: bool,
}

const IP: usize = 14;

impl Frame {
    /// Piece `n` of a flow from `sender`, its checksum left to the host.
    fn new((version, protocol): (u8, u8), sender: u8, n: usize) -> Self {
        let (is_ipv4, is_tcp) = (version == 4, protocol == TCP);
        let own_size = if is_tcp { 20 } else { 8 };
        let len = u16::try_from(own_size).unwrap() + PIECE;
        let number = u16::try_from(n).unwrap();
        let mut bytes = [&TO[..], &[2, 0, 0, 0, 0, sender]].concat();
        if is_ipv4 {
            bytes.extend([8, 0, 0x45, 0]);
            bytes.extend((20 + len).to_be_bytes());
            bytes.extend(number.to_be_bytes());
            bytes.extend([0x40, 0, 64, protocol, 0, 0, 10, 55, 0, sender, 10, 55, 0, 9]);
            let sum = checksum(&bytes[IP..]).to_be_bytes();
            bytes[IP + 10..IP + 12].copy_from_slice(&sum);
        } else {
            bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            bytes.extend(len.to_be_bytes());
            bytes.extend([protocol, 64, 0xfd, 0x55]);
            bytes.extend([0; 13]);
            bytes.extend([sender, 0xfd, 0x55]);
            bytes.extend([0; 13]);
            bytes.push(9);
        }
        let own = bytes.len();
        let addresses = if is_ipv4 { IP + 12..IP + 20 } else { IP + 8..IP + 40 };
        let mut pseudo = bytes[addresses].to_vec();
        pseudo.extend([0, protocol]);
        pseudo.extend(len.to_be_bytes());
        let partial = !checksum(&pseudo);
        bytes.extend([0x12, 0x34, 0x12, 0x35]);
        if is_tcp {
            bytes.extend(u32::try_from(n * usize::from(PIECE)).unwrap().to_be_bytes());
            bytes.extend([0, 0, 0, 7, 5 << 4, 0x10, 1, 0]);
        } else {
            bytes.extend(len.to_be_bytes());
        }
        bytes.extend(partial.to_be_bytes());
        bytes.resize(own + own_size, 0);
        bytes.extend((0..usize::from(PIECE)).map(|at| u8::try_from((at + n * 7) % 251).unwrap()));
        let header = RawNetHeader {
            flags: HDR_F_NEEDS_CSUM,
            csum_start: u16::try_from(own).unwrap().into(),
            csum_offset: if is_tcp { 16 } else { 6 }.into(),
            ..RawNetHeader::default()
        };
        Self { header, bytes, is_ipv4, is_tcp }
    }

    fn own(&self) -> usize {
        if self.is_ipv4 { IP + 20 } else { IP + 40 }
    }

    /// Adds to the 16-bit number at `at`, which wraps.
    fn add(&mut self, at: usize, by: u16) {
        let old = u16::from_be_bytes([self.bytes[at], self.bytes[at + 1]]);
        self.bytes[at..at + 2].copy_from_slice(&old.wrapping_add(by).to_be_bytes());
    }

    /// Changes the IP header, whose checksum is right afterwards.
    fn change_ip(&mut self, change: impl FnOnce(&mut [u8])) {
        let own = self.own();
        change(&mut self.bytes[IP..own]);
        if self.is_ipv4 {
            self.bytes[IP + 10..IP + 12].fill(0);
            let sum = checksum(&self.bytes[IP..own]).to_be_bytes();
            self.bytes[IP + 10..IP + 12].copy_from_slice(&sum);
        }
    }
}

/// The internet checksum (RFC 1071).
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap()
}

/// A lie, and what it makes of a frame that is right.
type Lie = (&'static str, fn(&mut Frame));

/// In fields that IPv6 does not have.
const LIES_OF_IPV4: [Lie; 5] = [
    ("IP header of four words", |f| f.change_ip(|ip| ip[0] = ip[0] & 0xf0 | 4)),
    ("IP header of six words", |f| f.change_ip(|ip| ip[0] = ip[0] & 0xf0 | 6)),
    ("IP checksum wrong", |f| f.add(IP + 10, 1)),
    ("more fragments", |f| f.change_ip(|ip| ip[6] |= 0x20)),
    ("a later fragment", |f| f.change_ip(|ip| ip[7] = 9)),
];

const LIES: [Lie; 22] = [
    ("IP length one more", |f| change_length(f, |len| len.wrapping_add(1))),
    ("IP length one less", |f| change_length(f, |len| len.wrapping_sub(1))),
    ("IP length of the headers alone", |f| change_length(f, |len| len - PIECE)),
    ("IP length 0", |f| change_length(f, |_| 0)),
    ("IP length at its most", |f| change_length(f, |_| u16::MAX)),
    ("IP version 5", |f| f.change_ip(|ip| ip[0] = 0x55)),
    ("the other protocol", |f| {
        let (at, other) = (if f.is_ipv4 { 9 } else { 6 }, if f.is_tcp { UDP } else { TCP });
        f.change_ip(|ip| ip[at] = other);
    }),
    ("checksum from the IP header", |f| f.header.csum_start = 14.into()),
    ("checksum from two bytes on", |f| change_start(f, 2)),
    ("checksum from two bytes before", |f| change_start(f, u16::MAX - 1)),
    ("checksum from past the end", |f| change_start(f, 1000)),
    ("checksum in the ports", |f| f.header.csum_offset = 0.into()),
    ("checksum in the payload", |f| f.header.csum_offset = 40.into()),
    ("checksum past the end", |f| f.header.csum_offset = 4000.into()),
    ("no sum of the addresses", |f| {
        let at = f.own() + if f.is_tcp { 16 } else { 6 };
        f.add(at, 1);
    }),
    ("data offset or UDP length too small", |f| {
        let own = f.own();
        if f.is_tcp { f.bytes[own + 12] = 4 << 4 } else { f.add(own + 4, u16::MAX) }
    }),
    ("data offset or UDP length too large", |f| {
        let own = f.own();
        if f.is_tcp { f.bytes[own + 12] = 0xf0 } else { f.add(own + 4, 1) }
    }),
    ("data offset or UDP length 0", |f| {
        let own = f.own();
        if f.is_tcp { f.bytes[own + 12] = 0 } else { f.bytes[own + 4..own + 6].fill(0) }
    }),
    ("a frame that ends in its headers", |f| f.bytes.truncate(f.own() + 7)),
    ("a frame without its last bytes", |f| f.bytes.truncate(f.own() + 50)),
    ("cut, of pieces of no length", |f| f.header.gso_type = HDR_GSO_UDP_L4),
    ("cut, of the other kind", |f| {
        f.header.gso_type = match (f.is_tcp, f.is_ipv4) {
            (true, true) => HDR_GSO_TCPV6,
            (true, false) => HDR_GSO_TCPV4,
            (false, _) => HDR_GSO_TCPV4,
        };
        f.header.gso_size = 40.into();
        f.header.hdr_len = u16::try_from(f.own() + 20).unwrap().into();
    }),
];

fn change_length(frame: &mut Frame, change: impl FnOnce(u16) -> u16) {
    let at = if frame.is_ipv4 { 2 } else { 4 };
    frame.change_ip(|ip| {
        let len = change(u16::from_be_bytes([ip[at], ip[at + 1]])).to_be_bytes();
        ip[at..at + 2].copy_from_slice(&len);
    });
}

fn change_start(frame: &mut Frame, by: u16) {
    frame.header.csum_start = frame.header.csum_start.get().wrapping_add(by).into();
}

/// The result of a burst: the frames of each sender, in their order, as the reader gets them, and
/// how far the counters of the liar's transmitq went.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    frames: BTreeMap<u8, Vec<Vec<u8>>>,
    counters: BTreeMap<String, u64>,
}

/// A daemon with a liar's device and a neighbour's, and a reader that is no guest.
struct Street {
    daemon: Daemon,
    guests: [NetDriver; 2],
    reader: OwnedFd,
}

impl Street {
    fn new(merge: bool) -> Self {
        run("sysctl -q -w net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1");
        // Where the bridge asks the host's filters, these drop what lies.
        let filters = ["iptables", "ip6tables", "arptables"]
            .map(|filter| format!("net.bridge.bridge-nf-call-{filter}=0"));
        run(&format!("sysctl -q -e -w {}", filters.join(" ")));
        run("ip link add br0 type bridge mcast_snooping 0");
        run("ip link set br0 up");
        let device = |name| {
            format!(
                "[[net]]\nname = '{name}'\nsocket_path = '@/{name}'\ntap = '{name}'\n\
                 bridge = 'br0'\nmerge = {merge}\n"
            )
        };
        let config =
            format!("[daemon]\ncontrol = '@/control'\n{}{}", device("bad"), device("good"));
        let daemon = Daemon::run(&config, &["bad", "good", "control"]);
        // Without offloads: it gets frames with every checksum made and every segment cut.
        run("ip tuntap add dev reader mode tap");
        let reader = queue("reader", IFF_TAP | IFF_NO_PI);
        run("ip link set reader master br0 up");
        let guests = ["bad", "good"].map(|name| {
            NetDriver::connect(&daemon.socket_of(name), &NetDriverOptions::default()).unwrap()
        });
        Self { daemon, guests, reader }
    }

    /// Sends frames of the liar's guest, all at once, then some of the neighbour's.
    fn send(&mut self, frames: &[Frame], neighbours: &[Frame]) -> Outcome {
        let before = self.counters();
        let mark = [&TO[..], &[2, 0, 0, 0, 0, MARK, 0x88, 0xb5], &[0; 50]].concat();
        let mark = Frame { header: RawNetHeader::default(), bytes: mark, ..frames[0].clone() };
        for (guest, frames) in self.guests.iter_mut().zip([frames, neighbours]) {
            let tx = &mut guest.pairs[0].tx;
            for frames in [frames, std::slice::from_ref(&mark)] {
                for Frame { header, bytes, .. } in frames {
                    assert!(tx.send(header, bytes).unwrap());
                }
                tx.publish(0).unwrap();
                tx.drain(TIMEOUT).unwrap();
            }
        }
        let mut outcome = Outcome::default();
        let mut marks = 0;
        while marks < 2 {
            let frame = self.read();
            match frame[11] {
                MARK => marks += 1,
                sender => outcome.frames.entry(sender).or_default().push(frame),
            }
        }
        outcome.counters = self.counters();
        for (name, value) in &mut outcome.counters {
            *value -= before[name];
        }
        outcome
    }

    /// The next frame of a guest's: the kernel says things of its own.
    fn read(&self) -> Vec<u8> {
        loop {
            let mut fds = [PollFd::new(&self.reader, PollFlags::IN)];
            let max_wait = Timespec::try_from(TIMEOUT).unwrap();
            assert!(poll(&mut fds, Some(&max_wait)).unwrap() > 0, "no frame comes");
            let mut bytes = vec![0; 1 << 16];
            let len = rustix::io::read(&self.reader, &mut bytes).unwrap();
            bytes.truncate(len);
            if bytes[..6] == TO {
                return bytes;
            }
        }
    }

    /// Those of the liar's transmitq that say what became of its frames.
    fn counters(&self) -> BTreeMap<String, u64> {
        let device = shown(&self.daemon.socket_of("control"), "/v1/devices/bad");
        let counters: BTreeMap<String, u64> =
            serde_json::from_value(device["queues"][1]["counters"].clone()).unwrap();
        let is_of_frames = |name: &str| {
            name == "packets" || name.starts_with("dropped_") || name.starts_with("merged_")
        };
        counters.into_iter().filter(|(name, _)| is_of_frames(name)).collect()
    }
}

/// Plays the bursts in turn, and returns the outcome of each.
fn play(merge: bool, bursts: &[(String, Vec<Frame>, Vec<Frame>)]) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    in_own_space(|| {
        let mut street = Street::new(merge);
        let played = bursts.iter().map(|(_, frames, neighbours)| street.send(frames, neighbours));
        outcomes = played.collect();
        assert!(!street.daemon.log().contains("WARN"), "{}", street.daemon.log());
    });
    outcomes
}

#[test]
fn frames_that_lie_come_alone_as_without_merging_and_their_neighbours_are_untouched() {
    let mut bursts = Vec::new();
    for kind in KINDS {
        let of = |sender, numbers: std::ops::Range<usize>| -> Vec<_> {
            numbers.map(|n| Frame::new(kind, sender, n)).collect()
        };
        let of_ipv4 = if kind.0 == 4 { &LIES_OF_IPV4[..] } else { &[] };
        for (what, lie) in LIES.iter().chain(of_ipv4) {
            let mut lies = of(LIAR, 0..3);
            lies.iter_mut().for_each(*lie);
            let frames = [of(RIGHT, 0..2), lies, of(RIGHT, 2..4)].concat();
            bursts.push((format!("{kind:?}, {what}"), frames, of(NEIGHBOUR, 0..4)));
        }
        // The first that lies, and then one that would follow it.
        let mut frames = of(LIAR, 0..4);
        change_length(&mut frames[0], |len| len - 50);
        bursts.push((format!("{kind:?}, the first"), frames, of(NEIGHBOUR, 0..4)));
    }
    let (merged, alone) = (play(true, &bursts), play(false, &bursts));
    for (((what, ..), merged), alone) in bursts.iter().zip(&merged).zip(&alone) {
        assert_eq!(merged.frames.get(&NEIGHBOUR).map(Vec::len), Some(4), "{what}");
        for (sender, frames) in &alone.frames {
            let with = merged.frames.get(sender);
            assert!(with == Some(frames), "{what}, from {sender}: {with:x?} and {frames:x?}");
        }
        assert_eq!(merged.frames.len(), alone.frames.len(), "{what}");
        for (name, count) in &alone.counters {
            let with = merged.counters[name];
            match name.as_str() {
                "merged_packets" if what.ends_with("first") => assert_eq!(with, 3, "{what}"),
                "merged_packets" => assert_eq!(with, 4, "{what}: only those that are right"),
                "merged_frames" => assert!((1..=2).contains(&with), "{what}: {with}"),
                _ => assert_eq!(with, *count, "{what}: {name}"),
            }
        }
    }
}
