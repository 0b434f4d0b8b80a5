//! A switch and halves of its ports, without queues: what is lent, copied, dropped and given back.

mod hostile;
mod order;
mod rules;
mod steer;

use super::*;
use crate::net::{Frames, Outcome};
use crate::net::{Incoming, Port, PortRx, PortTx, Returned, Sent};
use manyring_memory::{GuestMemory, Mapping, SliceList, copy_from_slices};
use manyring_wire::net::{HDR_F_NEEDS_CSUM, HEADER_SIZE, RawNetHeader};
use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use zerocopy::little_endian::U16;

/// A switch whose time stands still until it is told to go on.
struct World {
    switch: Arc<Switch>,
    ms: Arc<AtomicU64>,
}

impl World {
    fn new() -> Self {
        Self::passing(0)
    }

    /// A switch that passes on frames to these of the groups of bridges.
    fn passing(group_fwd_mask: u16) -> Self {
        let ms = Arc::new(AtomicU64::new(5_000));
        let time = ms.clone();
        let clock = Clock::new(move || time.load(Ordering::SeqCst));
        let switch =
            Switch::new(SwitchOptions { name: "s0".to_owned(), age: AGE, group_fwd_mask, clock });
        Self { switch, ms }
    }

    fn later(&self, ms: u64) {
        self.ms.fetch_add(ms, Ordering::SeqCst);
    }

    /// A guest whose address ends in `n`, on a port like this.
    fn guest_on(&self, n: u8, options: PortOptions) -> Guest {
        let port = self.switch.port(options).unwrap();
        port.set_offloads(OFFLOADS).unwrap();
        port.set_attached(0, true).unwrap();
        let mapping = Arc::new(Mapping::anonymous(1 << 20).unwrap());
        Guest {
            n,
            tx: port.open_tx(0).unwrap(),
            rx: Some(port.open_rx(0).unwrap()),
            port,
            memory: Arc::new(GuestMemory::of_mapping(mapping.clone())),
            mapping,
            frames: Frames::new().unwrap(),
            tokens: Vec::new(),
            next: 0,
            lent: HashSet::new(),
        }
    }

    fn guest(&self, n: u8) -> Guest {
        self.guest_on(n, PortOptions::new(format!("g{n}"), 1))
    }

    /// Two guests, of addresses 2 and 3, who have not said anything.
    fn two_more(&self) -> (Guest, Guest) {
        (self.guest(2), self.guest(3))
    }

    /// Two guests who know each other.
    fn two(&self) -> (Guest, Guest) {
        let (mut a, mut b) = (self.guest(1), self.guest(2));
        a.greet(&mut [&mut b]);
        b.greet(&mut [&mut a]);
        (a, b)
    }
}

struct Guest {
    n: u8,
    port: SwitchPort,
    tx: Box<dyn PortTx>,
    rx: Option<Box<dyn PortRx>>,
    mapping: Arc<Mapping>,
    memory: Arc<GuestMemory>,
    frames: Frames,
    /// The tokens of the last burst: each has a page of the guest's memory.
    tokens: Vec<u16>,
    next: u16,
    /// The tokens of frames that are lent.
    lent: HashSet<u16>,
}

fn mac(n: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, n]
}

/// A frame of `len` bytes that holds `number`.
fn frame(to: [u8; 6], from: [u8; 6], len: usize, number: u32) -> Vec<u8> {
    let mut frame = [&to[..], &from, &[0x88, 0xb5], &number.to_be_bytes()].concat();
    frame.extend((frame.len()..len).map(|at| u8::try_from((at + number as usize) & 0xff).unwrap()));
    frame
}

/// The number in a frame, if all its bytes are those of that frame.
fn number(frame_seen: &[u8]) -> u32 {
    let number = u32::from_be_bytes(frame_seen[14..18].try_into().unwrap());
    let (to, from) = (frame_seen[..6].try_into().unwrap(), frame_seen[6..12].try_into().unwrap());
    assert_eq!(frame_seen, frame(to, from, frame_seen.len(), number), "{number} has changed");
    number
}

/// The header of a frame as by [`unsummed`], whose checksum is left open.
const OPEN: RawNetHeader = RawNetHeader {
    flags: HDR_F_NEEDS_CSUM,
    gso_type: 0,
    hdr_len: U16::ZERO,
    gso_size: U16::ZERO,
    csum_start: U16::new(34),
    csum_offset: U16::new(16),
    num_buffers: U16::ZERO,
};

/// The frame as one of TCP over IPv4.
fn unsummed(mut frame: Vec<u8>) -> Vec<u8> {
    frame[12..15].copy_from_slice(&[8, 0, 0x45]);
    frame[20..24].copy_from_slice(&[0x40, 0, 64, 6]);
    frame
}

impl Guest {
    /// Makes a burst of these frames in pages of this guest's memory that are not lent.
    fn burst(&mut self, header: &RawNetHeader, frames: &[Vec<u8>]) {
        self.frames.clear();
        self.tokens.clear();
        for bytes in frames {
            while self.lent.contains(&self.next) {
                self.next = (self.next + 1) % 256;
            }
            let token = usize::from(self.next);
            self.next = (self.next + 1) % 256;
            let at = token * 4096;
            self.mapping.slice(at, bytes.len()).unwrap().write_from(bytes);
            let place = (at as u64, u32::try_from(bytes.len()).unwrap());
            let mut slices = SliceList::new();
            slices.restart(&self.memory);
            // In two pieces, as a driver may give it.
            let cut = if token.is_multiple_of(2) { 9 } else { place.1 };
            for (at, len) in [(place.0, cut), (place.0 + u64::from(cut), place.1 - cut)] {
                if len > 0 {
                    let at = manyring_memory::GuestAddr(at);
                    slices.resolve(at, len, &mut manyring_memory::LastHit::default()).unwrap();
                }
            }
            let token = u16::try_from(token).unwrap();
            self.tokens.push(token);
            assert!(self.frames.push_as(token, header, slices.all(), 0, bytes.len()));
        }
    }

    fn send_all(&mut self, frames: &[Vec<u8>]) -> Sent {
        self.send_with(&RawNetHeader::default(), frames)
    }

    /// Sends these frames, each behind the same header.
    fn send_with(&mut self, header: &RawNetHeader, frames: &[Vec<u8>]) -> Sent {
        self.burst(header, frames);
        let mut all = Sent::default();
        while all.taken < frames.len() {
            let sent = self.tx.send(&self.frames, all.taken);
            assert!(sent.taken > 0 && sent.stop.is_none());
            all.taken += sent.taken;
            (all.later, all.lost) = (all.later | sent.later, all.lost | sent.lost);
            all.refused += sent.refused;
        }
        let is_lent = |index: &usize| all.later >> index & 1 == 1;
        let lent = (0..frames.len()).filter(is_lent).map(|index| self.tokens[index]);
        self.lent.extend(lent);
        all
    }

    /// Sends a frame whose first bytes lie in slices of these lengths.
    fn send_in_pieces(&mut self, header: &RawNetHeader, bytes: &[u8], pieces: &[usize]) {
        self.mapping.slice(0, bytes.len()).unwrap().write_from(bytes);
        let mut slices = SliceList::new();
        slices.restart(&self.memory);
        let mut at = 0;
        for piece in pieces {
            let len = u32::try_from((*piece).min(bytes.len() - at)).unwrap();
            let place = manyring_memory::GuestAddr(at as u64);
            slices.resolve(place, len, &mut manyring_memory::LastHit::default()).unwrap();
            at += len as usize;
        }
        self.frames.clear();
        assert!(self.frames.push_as(0, header, slices.all(), 0, bytes.len()));
        assert_eq!(self.tx.send(&self.frames, 0), Sent { taken: 1, ..Sent::default() });
    }

    fn send(&mut self, to: u8, len: usize, number: u32) -> Sent {
        self.send_all(&[frame(mac(to), mac(self.n), len, number)])
    }

    /// Says where it is, to everybody.
    fn greet(&mut self, others: &mut [&mut Self]) {
        self.send_all(&[frame([0xff; 6], mac(self.n), 60, 0)]);
        for other in others {
            assert_eq!(other.receive().len(), 1, "{} hears {}", other.n, self.n);
        }
    }

    /// Takes at most `max` frames, as a receiveq does: copies, then releases.
    fn take(&mut self, max: usize) -> Vec<Vec<u8>> {
        let rx = self.rx.as_mut().unwrap();
        let mut all = Vec::new();
        let room = Mapping::anonymous(70_000).unwrap();
        while all.len() < max {
            match rx.incoming(64) {
                Incoming::Read => {
                    let buffers = [room.slice(0, 70_000).unwrap()];
                    while all.len() < max
                        && let Ok(len) = rx.recv(&buffers)
                    {
                        let mut bytes = vec![0; len];
                        buffers[0].read_into(&mut bytes);
                        all.push(bytes[HEADER_SIZE..].to_vec());
                    }
                }
                Incoming::Lent(frames) => {
                    let count = frames.count().min(max - all.len());
                    for index in 0..count {
                        let mut bytes = vec![0; HEADER_SIZE + frames.len(index)];
                        copy_from_slices(frames.slices(index), &mut bytes);
                        all.push(bytes[HEADER_SIZE..].to_vec());
                    }
                    rx.release(count);
                    if count == 0 {
                        break;
                    }
                }
            }
        }
        all
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        self.take(usize::MAX)
    }

    fn numbers(&mut self) -> Vec<u32> {
        self.receive().iter().map(|frame| number(frame)).collect()
    }

    fn reap(&mut self) -> Vec<Returned> {
        let mut done = Vec::new();
        self.tx.reap(&mut done);
        self.forget(&done);
        done
    }

    /// Takes back whatever was not received.
    fn recall(&mut self) -> Vec<Returned> {
        let mut done = Vec::new();
        assert_eq!(self.tx.recall(&mut done), 0, "nothing is out between two turns");
        self.forget(&done);
        done
    }

    fn forget(&mut self, done: &[Returned]) {
        for returned in done {
            assert!(self.lent.remove(&returned.token), "{returned:?}");
        }
    }

    /// Tokens that are back, all with this outcome.
    fn reaped(&mut self, outcome: Outcome) -> Vec<u16> {
        let done = self.reap();
        assert!(done.iter().all(|returned| returned.outcome == outcome), "{done:?}");
        done.iter().map(|returned| returned.token).collect()
    }

    fn counter(&self, name: &str) -> u64 {
        let all = self.port.counters().all();
        all.iter().find(|counter| counter.name == name).unwrap().value
    }
}

#[test]
fn a_short_frame_is_copied_at_once_and_a_long_one_is_lent_until_it_was_received() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    let sent = a.send_all(&[
        frame(mac(2), mac(1), 60, 1),
        frame(mac(2), mac(1), 116, 2),
        frame(mac(2), mac(1), 117, 3),
        frame(mac(2), mac(1), 1514, 4),
    ]);
    assert_eq!(sent, Sent { taken: 4, later: 0b1100, ..Sent::default() });
    // The driver may write to the first two again, and not yet to the others.
    let pages: Vec<_> = a.tokens.iter().map(|token| usize::from(*token) * 4096).collect();
    for at in &pages[..2] {
        a.mapping.slice(*at, 200).unwrap().fill_zero();
    }
    assert_eq!(a.reap(), [], "nobody has received them");
    assert_eq!(b.numbers(), [1, 2, 3, 4]);
    assert_eq!(a.reaped(Outcome::Passed), a.tokens[2..]);
    assert_eq!((a.counter("flooded"), b.counter("mailed")), (1, 1), "the greetings alone");
}

#[test]
fn the_first_bytes_of_a_lent_frame_stay_as_they_were_checked() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    a.send(2, 1514, 1);
    a.mapping.slice(usize::from(a.tokens[0]) * 4096, 1514).unwrap().fill_zero();
    let got = b.receive();
    assert_eq!(got[0][..14], frame(mac(2), mac(1), 1514, 1)[..14]);
    assert!(got[0][18..].iter().all(|byte| *byte == 0), "the payload is the sender's own affair");
}

#[test]
fn nothing_of_the_senders_memory_is_held_once_its_frames_are_back() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    for n in 0..3 {
        a.send(2, 60, n);
        a.send(2, 1514, n);
        b.receive();
        assert_eq!(a.reaped(Outcome::Passed).len(), 1);
    }
    a.frames.release();
    assert_eq!(Arc::strong_count(&a.memory), 1, "no burst keeps the snapshot");
}

#[test]
fn what_a_receiver_has_no_buffers_for_stays_in_the_channel_in_order() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    for n in 0..20 {
        a.send(2, 200, n);
    }
    assert_eq!(
        b.take(7).iter().map(|frame| number(frame)).collect::<Vec<_>>(),
        (0..7).collect::<Vec<_>>()
    );
    a.send(2, 60, 20);
    assert_eq!(b.numbers(), (7..21).collect::<Vec<_>>());
    assert_eq!(a.reaped(Outcome::Passed).len(), 20);
}

#[test]
fn frames_that_are_recalled_are_not_received() {
    let world = World::new();
    let (mut a, mut b) = world.two();
    for n in 0..10 {
        a.send(2, 200, n);
    }
    assert_eq!(b.take(3).len(), 3);
    let done = a.recall();
    let count = |outcome| done.iter().filter(|returned| returned.outcome == outcome).count();
    assert_eq!((count(Outcome::Passed), count(Outcome::Recalled)), (3, 7));
    assert_eq!(b.receive(), Vec::<Vec<u8>>::new());
    a.send(2, 200, 11);
    assert_eq!(b.numbers(), [11], "the channel goes on");
}
