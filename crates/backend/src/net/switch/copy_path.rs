//! `CopyPath`: carries copies of frames to ports: of flooded frames, and of frames that no channel
//! can carry.

use super::copy_queue::{COPIES, CopyInbox, FrameCopy};
use super::verdict::Verdict;
use super::vlan_rules::{Change, TAG_AT, Tag, VLAN_TAG};
use super::{
    Destination, Map, PortId, Shared, Switch, TAKES_CSUM, TAKES_ECN, TAKES_TSO4, TAKES_TSO6,
};
use manyring_wire::net::segment::finish;
use manyring_wire::net::{
    HDR_F_NEEDS_CSUM, HDR_GSO_ECN, HDR_GSO_NONE, HDR_GSO_TCPV4, HDR_GSO_TCPV6, HEADER_SIZE,
    RawNetHeader,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::{FromBytes, IntoBytes};

/// The fixed cost of a frame copy in `spent`, beside the bytes of its frame.
const FRAME_COPY_COST: usize = 512;
/// The most that flooding one frame may cost, in the unit of `spent`: 8192 short frame copies. To
/// flood a frame unsegmented to 4000 ports costs half of that. A frame that is cut into 512
/// segments for each port would keep the worker from its other guests for a tenth of a second, so
/// the last ports do not get it.
const FLOOD_SPENT_MAX: usize = 8192 * FRAME_COPY_COST;
/// Bytes of the virtio-net header before each frame.
const HEAD: usize = HEADER_SIZE;

/// A copy of a frame for all ports that need the same change of its VLAN tag.
struct Copy {
    frame_copy: FrameCopy,
    pieces: FrameSegments,
}

/// The segments of a frame copy, for guests that do not accept the frame unsegmented; made when the
/// first such guest gets it. The inner `None`: the frame cannot be segmented.
type FrameSegments = Option<Option<Vec<FrameCopy>>>;

/// Sends copies of frames from one port.
#[derive(Debug)]
pub struct CopyPath {
    pub(super) switch: Arc<Switch>,
    pub(super) own: Arc<Shared>,
    /// The index of the transmitq that the frames come from.
    pub(super) index: usize,
    pub(super) map: Arc<Map>,
    generation: u64,
    /// Inboxes with new copies, whose receivers were not woken yet.
    told: Vec<Arc<CopyInbox>>,
    /// The cost of the copies of the present burst: their bytes, and `FRAME_COPY_COST` for each.
    pub(super) spent: usize,
}

/// Returns the `TAKES_*` bits of the offloads that a guest must accept to get a frame with this
/// header unchanged.
pub(super) fn needs(header: &RawNetHeader) -> u8 {
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

impl CopyPath {
    pub(super) fn new(switch: Arc<Switch>, own: Arc<Shared>, index: usize) -> Self {
        let generation = u64::MAX;
        let (map, told) = (Arc::default(), Vec::new());
        let mut copy_path = Self { switch, own, index, map, generation, told, spent: 0 };
        copy_path.refresh();
        copy_path
    }

    /// Loads the present map of the ports. Returns true if ports were added, removed or changed.
    #[inline]
    pub(super) fn refresh(&mut self) -> bool {
        self.switch.refresh(&mut self.map, &mut self.generation)
    }

    /// Sends one frame as if the port's guest had sent it: `frame_copy` is a header and the frame.
    pub fn send(&mut self, frame_copy: &[u8]) {
        self.refresh();
        self.spent = 0;
        let Ok((header, frame)) = RawNetHeader::read_from_prefix(frame_copy) else { return };
        let second = self.switch.clock.now().second();
        let (verdict, vlan, tag) =
            self.switch.judge(&self.own, &self.map, (&header, frame), second);
        match verdict {
            Verdict::To(id, change) => {
                self.copy_to(id, frame_copy, change);
            }
            Verdict::Flood => self.flood(frame_copy, vlan, tag),
            Verdict::Drop { .. } => {}
        }
        self.tell();
    }

    /// Copies a frame to every other port that may receive it.
    pub(super) fn flood(&mut self, frame_copy: &[u8], vlan: u16, tag: Tag) {
        let map = self.map.clone();
        // One copy for each change that ports need, made for the first such port: a frame either
        // gets a tag, or has one whose VLAN is set. The inner `None`: the change is impossible.
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
                self.spent += frame_copy.len();
                Some(Copy { frame_copy: changed(frame_copy, change)?.into(), pieces: None })
            });
            let Some(Copy { frame_copy, pieces }) = copy else {
                port.counters.dropped_unfinished.add(1);
                continue;
            };
            self.spent += FRAME_COPY_COST;
            self.deliver(destination, frame_copy, pieces);
        }
    }

    /// Copies a frame to one port. Returns true if the copy is in the port's queue; false if it was
    /// dropped, which is counted unless the port was removed.
    pub(super) fn copy_to(&mut self, to: PortId, frame_copy: &[u8], change: Change) -> bool {
        let map = self.map.clone();
        let Some(destination) = map.get(to) else { return false };
        let Some(copy) = changed(frame_copy, change) else {
            destination.port.counters.dropped_unfinished.add(1);
            return false;
        };
        self.spent += FRAME_COPY_COST + copy.len();
        self.deliver(destination, &copy.into(), &mut None)
    }

    /// Puts a frame copy into the inbox of a port; if the guest does not accept it as it is, puts
    /// its segments. Returns false if it was dropped, which is counted.
    fn deliver(
        &mut self,
        to: &Destination,
        frame_copy: &FrameCopy,
        pieces: &mut FrameSegments,
    ) -> bool {
        let counters = &to.port.counters;
        let start = frame_copy.get(HEAD..).unwrap_or_default();
        let Some((_, inbox)) = to.inbox(self.index, start) else {
            counters.dropped_no_queue.add(1);
            return false;
        };
        let Ok((header, _)) = RawNetHeader::read_from_prefix(frame_copy) else { return false };
        let is_put = if needs(&header) & !to.port.takes() == 0 {
            let is_put = inbox.put(frame_copy.clone());
            (if is_put { &counters.mailed } else { &counters.dropped_full }).add(1);
            is_put
        } else if self.spent >= FLOOD_SPENT_MAX {
            counters.dropped_full.add(1);
            return false;
        } else {
            let pieces = pieces.get_or_insert_with(|| {
                self.spent += frame_copy.len() * 2;
                finished(&header, frame_copy)
            });
            self.spent += FRAME_COPY_COST * pieces.as_ref().map_or(0, Vec::len);
            put_all(to, inbox, &header, pieces.as_deref())
        };
        if is_put && !self.told.iter().any(|told| Arc::ptr_eq(told, inbox)) {
            self.told.push(inbox.clone());
        }
        is_put
    }

    /// Wakes the receivers of all inboxes with new copies.
    pub(super) fn tell(&mut self) {
        self.told.drain(..).for_each(|inbox| inbox.doorbell.post(COPIES));
    }
}

/// Segments a frame copy and completes its checksums. `None`: its header does not allow it, or
/// would place a checksum in bytes by which the switch has judged the frame.
fn finished(header: &RawNetHeader, frame_copy: &[u8]) -> Option<Vec<FrameCopy>> {
    let mut frame = frame_copy[HEAD..].to_vec();
    if !header.is_in_place(&frame) {
        return None;
    }
    let mut pieces = Vec::new();
    let count = finish(header, &mut frame, |piece| {
        let mut frame_copy = vec![0; HEAD + piece.len()];
        frame_copy[HEAD..].copy_from_slice(piece);
        pieces.push(frame_copy.into());
    });
    count.is_ok().then_some(pieces)
}

/// Puts the segments of a frame copy into an inbox. Returns true if at least one of them fitted.
fn put_all(
    to: &Destination,
    inbox: &CopyInbox,
    header: &RawNetHeader,
    pieces: Option<&[FrameCopy]>,
) -> bool {
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

/// Returns a copy of a frame copy with its tag changed for another port. `None`: the frame is too
/// short for the change, or would become too long.
fn changed(frame_copy: &[u8], change: Change) -> Option<Vec<u8>> {
    let mut copy = frame_copy.to_vec();
    let at = HEAD + TAG_AT;
    let shift = |copy: &mut Vec<u8>, by: i32| {
        let (mut header, _) = RawNetHeader::read_from_prefix(copy).ok()?;
        let moved = |n: u16| u16::try_from(i32::from(n) + by).ok();
        if header.flags & HDR_F_NEEDS_CSUM != 0 {
            header.csum_start = moved(header.csum_start.get())?.into();
        }
        // `hdr_len` is a hint that may be shorter than the tag; 0 means unknown (virtio 1.3
        // §5.1.6.2).
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
    /// True if the port's guest accepts frames with this header unchanged.
    pub(super) fn takes_all_of(&self, header: &RawNetHeader) -> bool {
        needs(header) & !self.takes.load(Ordering::Acquire) == 0
    }
}
