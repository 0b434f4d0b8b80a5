//! `Courier`: carries copies of frames to ports: of flooded frames, and of those no lane can carry.

use super::guard::{Change, TAG_AT, Tag, VLAN_TAG};
use super::mail::{Inbox, Letter, MAIL};
use super::{
    Destination, Map, PortId, Shared, Switch, TAKES_CSUM, TAKES_ECN, TAKES_TSO4, TAKES_TSO6,
    Verdict,
};
use manyring_wire::net::segment::finish;
use manyring_wire::net::{
    HDR_F_NEEDS_CSUM, HDR_GSO_ECN, HDR_GSO_NONE, HDR_GSO_TCPV4, HDR_GSO_TCPV6, HEADER_SIZE,
    RawHeader,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::{FromBytes, IntoBytes};

/// Bytes that a letter adds to `spent`, beside the bytes of its frame.
const LETTER_COST: usize = 512;
/// How much a flooded frame may cost, counted as `spent`: 8192 letters. A frame that each of 4000
/// ports gets whole costs half of that. A frame that is cut into 512 segments would keep the worker
/// from its other guests for a tenth of a second, so the last ports do not get it.
const FLOOD_SPENT_MAX: usize = 8192 * LETTER_COST;
/// Bytes of the header that comes before each frame.
const HEAD: usize = HEADER_SIZE;

/// A copy of a frame for all ports that need the same change of its tag.
struct Copy {
    letter: Letter,
    pieces: Pieces,
}

/// The segments of a letter for guests who do not accept it as it is, made when the first such
/// guest gets it. The inner `None`: the frame cannot be segmented.
type Pieces = Option<Option<Vec<Letter>>>;

/// Carries copies of the frames that one port sends.
#[derive(Debug)]
pub struct Courier {
    pub(super) switch: Arc<Switch>,
    pub(super) own: Arc<Shared>,
    /// The transmitq that the frames come from.
    pub(super) index: usize,
    pub(super) map: Arc<Map>,
    generation: u64,
    /// Inboxes that have new mail, and whose receivers were not woken yet.
    told: Vec<Arc<Inbox>>,
    /// The work of copying for the present burst, in bytes, with `LETTER_COST` for each letter.
    pub(super) spent: usize,
}

/// The `TAKES_*` bits that a guest must have set to get a frame with this header unchanged.
pub(super) fn needs(header: &RawHeader) -> u8 {
    let gso = match header.gso_type & !HDR_GSO_ECN {
        HDR_GSO_NONE => 0,
        HDR_GSO_TCPV4 => TAKES_TSO4,
        HDR_GSO_TCPV6 => TAKES_TSO6,
        _ => u8::MAX,
    };
    let ecn = if header.gso_type & HDR_GSO_ECN == 0 { 0 } else { TAKES_ECN };
    let csum = if header.flags & HDR_F_NEEDS_CSUM == 0 { 0 } else { TAKES_CSUM };
    gso | ecn | csum
}

impl Courier {
    pub(super) fn new(switch: Arc<Switch>, own: Arc<Shared>, index: usize) -> Self {
        let generation = u64::MAX;
        let (map, told) = (Arc::default(), Vec::new());
        let mut courier = Self { switch, own, index, map, generation, told, spent: 0 };
        courier.refresh();
        courier
    }

    /// Takes the present map of the ports. True if ports have come, gone or changed.
    #[inline]
    pub(super) fn refresh(&mut self) -> bool {
        self.switch.refresh(&mut self.map, &mut self.generation)
    }

    /// Sends one frame as if the port's guest had sent it: `letter` is a header and the frame.
    pub fn send(&mut self, letter: &[u8]) {
        self.refresh();
        self.spent = 0;
        let Ok((header, frame)) = RawHeader::read_from_prefix(letter) else { return };
        let second = self.switch.clock.now().second();
        let (verdict, vlan, tag) =
            self.switch.judge(&self.own, &self.map, (&header, frame), second);
        match verdict {
            Verdict::To(id, change) => {
                self.mail(id, letter, change);
            }
            Verdict::Flood => self.flood(letter, vlan, tag),
            Verdict::Drop { .. } => {}
        }
        self.tell();
    }

    /// Copies a frame to every other port that may have it.
    pub(super) fn flood(&mut self, letter: &[u8], vlan: u16, tag: Tag) {
        let map = self.map.clone();
        // A copy for each of the changes that ports need, made for the first of them: a frame is
        // either given a tag or has one whose VLAN is set. The inner `None`: it cannot be changed.
        let mut copies: [Option<Option<Copy>>; 3] = [None, None, None];
        for destination in map.ports.iter().flatten() {
            let port = &destination.port;
            let is_apart = self.own.options.isolated && port.options.isolated;
            if port.id == self.own.id || is_apart {
                continue;
            }
            let Some(change) = port.options.vlans.departure(vlan, tag) else { continue };
            let slot = match change {
                Change::None => 0,
                Change::Strip => 1,
                Change::Insert(_) | Change::Set(_) => 2,
            };
            let copy = copies[slot].get_or_insert_with(|| {
                self.spent += letter.len();
                Some(Copy { letter: changed(letter, change)?.into(), pieces: None })
            });
            let Some(Copy { letter, pieces }) = copy else {
                port.counters.dropped_unfinished.add(1);
                continue;
            };
            self.spent += LETTER_COST;
            self.deliver(destination, letter, pieces);
        }
    }

    /// Copies a frame to one port. True if the copy is queued for it; false if it was dropped,
    /// which is counted unless the port is gone.
    pub(super) fn mail(&mut self, to: PortId, letter: &[u8], change: Change) -> bool {
        let map = self.map.clone();
        let Some(destination) = map.get(to) else { return false };
        let Some(copy) = changed(letter, change) else {
            destination.port.counters.dropped_unfinished.add(1);
            return false;
        };
        self.spent += LETTER_COST + copy.len();
        self.deliver(destination, &copy.into(), &mut None)
    }

    /// Puts a letter into the inbox of a port, or its segments if the guest does not accept it as
    /// it is. False: it was dropped, and is counted.
    fn deliver(&mut self, to: &Destination, letter: &Letter, pieces: &mut Pieces) -> bool {
        let counters = &to.port.counters;
        let start = letter.get(HEAD..).unwrap_or_default();
        let Some((_, inbox)) = to.inbox(self.index, start) else {
            counters.dropped_no_queue.add(1);
            return false;
        };
        let Ok((header, _)) = RawHeader::read_from_prefix(letter) else { return false };
        let is_put = if needs(&header) & !to.port.takes() == 0 {
            let is_put = inbox.put(letter.clone());
            (if is_put { &counters.mailed } else { &counters.dropped_full }).add(1);
            is_put
        } else if self.spent >= FLOOD_SPENT_MAX {
            counters.dropped_full.add(1);
            return false;
        } else {
            let pieces = pieces.get_or_insert_with(|| {
                self.spent += letter.len() * 2;
                finished(&header, letter)
            });
            self.spent += LETTER_COST * pieces.as_ref().map_or(0, Vec::len);
            put_all(to, inbox, &header, pieces.as_deref())
        };
        if is_put && !self.told.iter().any(|told| Arc::ptr_eq(told, inbox)) {
            self.told.push(inbox.clone());
        }
        is_put
    }

    /// Wakes the receivers of all inboxes that have new mail.
    pub(super) fn tell(&mut self) {
        self.told.drain(..).for_each(|inbox| inbox.bell.post(MAIL));
    }
}

/// Segments a letter and completes its checksums. `None`: its header does not allow it, or would
/// have a checksum written into what was judged.
fn finished(header: &RawHeader, letter: &[u8]) -> Option<Vec<Letter>> {
    let mut frame = letter[HEAD..].to_vec();
    if !header.is_in_place(&frame) {
        return None;
    }
    let mut pieces = Vec::new();
    let count = finish(header, &mut frame, |piece| {
        let mut letter = vec![0; HEAD + piece.len()];
        letter[HEAD..].copy_from_slice(piece);
        pieces.push(letter.into());
    });
    count.is_ok().then_some(pieces)
}

/// Puts the segments of a letter into an inbox. True if at least one found room.
fn put_all(to: &Destination, inbox: &Inbox, header: &RawHeader, pieces: Option<&[Letter]>) -> bool {
    let counters = &to.port.counters;
    match pieces {
        Some(_) if header.gso_type == HDR_GSO_NONE => counters.finished.add(1),
        Some(_) => counters.segmented.add(1),
        None => counters.dropped_unfinished.add(1),
    }
    let (mut put, mut dropped) = (0, 0);
    for piece in pieces.unwrap_or_default() {
        let is_put = inbox.put(piece.clone());
        (put, dropped) = (put + u64::from(is_put), dropped + u64::from(!is_put));
    }
    counters.mailed.add(put);
    if dropped > 0 {
        counters.dropped_full.add(dropped);
    }
    put > 0
}

/// A copy of a letter whose tag is changed for another port. `None`: the frame is too short for the
/// change, or would become too long.
fn changed(letter: &[u8], change: Change) -> Option<Vec<u8>> {
    let mut copy = letter.to_vec();
    let at = HEAD + TAG_AT;
    let shift = |copy: &mut Vec<u8>, by: i32| {
        let (mut header, _) = RawHeader::read_from_prefix(copy).ok()?;
        let moved = |n: u16| u16::try_from(i32::from(n) + by).ok();
        if header.flags & HDR_F_NEEDS_CSUM != 0 {
            header.csum_start = moved(header.csum_start.get())?.into();
        }
        // The driver's hint may be shorter than the tag; 0 says nothing (virtio 1.3 §5.1.6.2).
        if header.hdr_len.get() != 0 {
            let hint = i32::from(header.hdr_len.get()) + by;
            header.hdr_len = u16::try_from(hint).unwrap_or(0).into();
        }
        copy.get_mut(..HEAD)?.copy_from_slice(header.as_bytes());
        Some(())
    };
    match change {
        Change::None => {}
        Change::Strip => {
            if copy.len() < at + VLAN_TAG + 2 {
                return None;
            }
            copy.drain(at..at + VLAN_TAG);
            shift(&mut copy, -4)?;
        }
        Change::Set(vlan) => {
            let [high, low] = vlan.to_be_bytes();
            let tci = copy.get_mut(at + 2..at + VLAN_TAG)?;
            (tci[0], tci[1]) = (tci[0] & 0xf0 | high, low);
        }
        Change::Insert(vlan) => {
            if copy.len() < at + 2 || copy.len() > HEAD + manyring_wire::net::FRAME_SIZE_MAX - 4 {
                return None;
            }
            let [high, low] = vlan.to_be_bytes();
            copy.splice(at..at, [0x81, 0, high, low]);
            shift(&mut copy, 4)?;
        }
    }
    Some(copy)
}

impl Shared {
    /// True if the port takes frames with this header as they are.
    pub(super) fn takes_all_of(&self, header: &RawHeader) -> bool {
        needs(header) & !self.takes.load(Ordering::Acquire) == 0
    }
}
