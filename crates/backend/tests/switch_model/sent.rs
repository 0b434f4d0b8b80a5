//! Random frames behind random headers: what a guest sends.

use crate::{LEN_MAX, mac};
use manyring_backend::net::switch::{PortOptions, Vlans};
use manyring_wire::net::RawNetHeader;

/// EtherTypes of VLAN tags.
pub(crate) const TAGS: [u16; 5] = [0x8100, 0x88a8, 0x9100, 0x9200, 0x9300];

/// Random numbers (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n as u64).unwrap()
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.next().to_be_bytes()[0]
    }

    pub(crate) fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// A frame that a guest sends, and whether the frame keeps every rule of its port.
pub(crate) struct Sent {
    pub(crate) header: RawNetHeader,
    pub(crate) bytes: Vec<u8>,
    pub(crate) is_honest: bool,
}

/// A frame of port `from`: often right, and wrong in any place otherwise.
pub(crate) fn make(random: &mut Random, from: usize, options: &PortOptions) -> Sent {
    let is_honest = random.one_in(3);
    let own = mac(from);
    let source = if is_honest || random.one_in(2) { own } else { mac(random.below(12)) };
    let to = match random.below(8) {
        0 => [0xff; 6],
        1 => [0x33, 0x33, 0, 0, 0, 1],
        2 if !is_honest => [1, 0x80, 0xc2, 0, 0, random.byte() & 31],
        _ => mac(random.below(12)),
    };
    let mut bytes = [to, source].concat();
    for (kind, tci) in tags(random, options, is_honest) {
        bytes.extend([kind.to_be_bytes(), tci.to_be_bytes()].concat());
    }
    let network = bytes.len() + 2;
    let link = if is_honest || random.one_in(2) { own } else { mac(random.below(12)) };
    let (transport, offset) = packet(random, &mut bytes, link, is_honest);
    let least = bytes.len().max(60);
    bytes.resize(least, random.byte());
    if random.one_in(4) {
        bytes.resize(least + random.below(LEN_MAX - least), random.byte());
    }
    let mut header = RawNetHeader::default();
    if random.one_in(2)
        && let Some(transport) = transport
    {
        header = open(transport, offset);
        if is_honest && offset == 16 {
            header = RawNetHeader { gso_type: 1, gso_size: 100.into(), ..header };
        } else if !is_honest && random.one_in(2) {
            let gso_type = random.of(&[1, 4, 5, 0x81, 0x84]);
            let (gso_size, hdr_len) = (8 + random.below(100), random.below(200));
            let [gso_size, hdr_len] = [gso_size, hdr_len].map(|n| u16::try_from(n).unwrap().into());
            header = RawNetHeader { gso_type, gso_size, hdr_len, ..header };
        }
    }
    if !is_honest {
        spoil(random, &mut header, &mut bytes, network);
    }
    Sent { header, bytes, is_honest }
}

pub(crate) fn open(start: usize, offset: usize) -> RawNetHeader {
    let [start, offset] = [start, offset].map(|n| u16::try_from(n).unwrap().into());
    RawNetHeader { flags: 1, csum_start: start, csum_offset: offset, ..RawNetHeader::default() }
}

pub(crate) fn tags(random: &mut Random, options: &PortOptions, is_honest: bool) -> Vec<(u16, u16)> {
    let priority = u16::from(random.byte() & 7) << 13;
    if is_honest || random.one_in(2) {
        return match &options.vlans {
            Vlans::Trunk(vlans) => vec![(0x8100, random.of(vlans) | priority)],
            Vlans::Access(_) if random.one_in(4) => vec![(0x8100, priority)],
            Vlans::Access(_) => vec![],
            Vlans::All => match random.below(4) {
                0 => vec![(0x8100, priority)],
                1 => vec![(0x8100, random.of(&[5, 6, 7]) | priority)],
                _ => vec![],
            },
        };
    }
    let count = random.below(4);
    (0..count).map(|_| (random.of(&TAGS), random.of(&[0, 5, 6, 7, 4095]) | priority)).collect()
}

/// Adds an EtherType and a packet. Returns where a checksum of it may lie, and its offset there.
pub(crate) fn packet(
    random: &mut Random,
    bytes: &mut Vec<u8>,
    link: [u8; 6],
    is_honest: bool,
) -> (Option<usize>, usize) {
    let at = bytes.len() + 2;
    match random.below(if is_honest { 4 } else { 7 }) {
        0 => {
            let (protocol, offset) = random.of(&[(6, 16), (17, 6), (132, 8), (1, 2)]);
            bytes.extend([8, 0, 0x45, 0, 0, 60, 0, 1, 0x40, 0, 64, protocol, 0, 0]);
            bytes.extend([10, 0, 0, 1, 10, 0, 0, 2]);
            bytes.extend((0..40).map(|_| random.byte()));
            (Some(at + 20), offset)
        }
        1 => {
            bytes.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
            bytes.extend(
                [&link[..], &[10, 0, 0, 1], &mac(random.below(12)), &[10, 0, 0, 2]].concat(),
            );
            (if is_honest { None } else { Some(at + random.below(28)) }, 0)
        }
        2 => {
            let extensions = if is_honest { 0 } else { random.below(3) };
            let kinds: Vec<u8> =
                (0..extensions).map(|_| random.of(&[0, 43, 44, 51, 60, 135, 139, 140])).collect();
            let message = random.of(&[128, 133, 134, 135, 136, 137]);
            let fixed = match message {
                133 => 8,
                134 => 16,
                137 => 40,
                _ => 24,
            };
            let size = extensions * 8 + fixed + 8;
            let next = |n: usize| kinds.get(n).copied().unwrap_or(58);
            bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, u8::try_from(size).unwrap(), next(0), 255]);
            bytes.extend([0xfe; 32]);
            for n in 0..extensions {
                bytes.extend([next(n + 1), 0, 0, 0, 0, 0, 0, 0]);
            }
            let transport = bytes.len();
            bytes.push(message);
            bytes.resize(transport + fixed, 0);
            let option = if message == 136 { 2 } else { 1 };
            bytes.extend([&[option, 1][..], &link].concat());
            (Some(transport), 2)
        }
        3 => {
            bytes.extend([0x88, 0xb5]);
            (None, 0)
        }
        4 => {
            let points =
                random.of(&[[0xaa, 0xaa], [0xaa, 0xab], [0xab, 0xaa], [0x98, 0x98], [0x42; 2]]);
            bytes.extend([0, 46]);
            bytes
                .extend([&points[..], &[3, 0, 0, 0, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &link].concat());
            (Some(at + random.below(28)), 0)
        }
        5 => {
            bytes.extend([0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
            bytes.extend(link);
            (Some(at + random.below(20)), 0)
        }
        _ => {
            bytes.extend([random.byte(), random.byte()]);
            (Some(random.below(60)), random.below(20))
        }
    }
}

/// Changes a few bytes of the frame, its length, or the place of its checksum.
pub(crate) fn spoil(
    random: &mut Random,
    header: &mut RawNetHeader,
    bytes: &mut Vec<u8>,
    network: usize,
) {
    for _ in 0..random.below(4) {
        let at = random.below(bytes.len().min(network + 60));
        bytes[at] = random.byte();
    }
    if random.one_in(16) {
        bytes.truncate(14 + random.below(bytes.len() - 13));
    }
    match random.below(4) {
        0 if header.flags != 0 => {
            *header = RawNetHeader { csum_start: u16::from(random.byte() & 127).into(), ..*header };
        }
        1 if header.flags != 0 => {
            *header = RawNetHeader { csum_offset: u16::from(random.byte() & 63).into(), ..*header };
        }
        _ => {}
    }
}
