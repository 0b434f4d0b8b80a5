//! `Merger`: decides which frames of a burst are sent as one long, *joined* frame.
//!
//! Sending a frame costs the host about the same whatever its length. So if the host can segment
//! long frames, it gets long ones. No frame waits for later ones: only frames of one burst are
//! joined.
//! ```text
//! plan:   each frame of the burst, in order: does it continue an open group? it joins that group
//!         else it begins a group, and closes an open group of its own flow, so that no frame
//!         overtakes another of its flow; a frame whose flow is not known closes all groups
//! send:   group by group, in the order of their first frames; a group of one is the frame itself
//! ```
//! Frames of one flow are sent in order; frames of different flows may overtake each other.
//! [`manyring_wire::net::head`] decides which frames can be joined, and makes the headers of the
//! joined frame. The headers of the guest's frames are copied once and checked, and sent from the
//! daemon's own memory. The payload is sent from guest memory, or copied together first if it lies
//! in short pieces ([`super::tap`]).
//!
//! The device offers a burst again until all of it is taken. The frames reported as taken must be
//! the first ones of those offered ([`super::Sent::taken`]), so the merger remembers which later
//! frames it has sent already.

use super::{Frames, Merged};
use manyring_memory::copy_from_slices;
use manyring_wire::net::head::{HEAD_SIZE_MAX, Head, Joined, Kind};
use manyring_wire::net::{HDR_F_NEEDS_CSUM, HDR_GSO_NONE};

/// The most open groups: if more flows alternate in a burst, the oldest group is closed.
const OPEN_MAX: usize = 8;
/// Number of planned bursts in a row without a joined frame, after which the merger plans only
/// some of the bursts.
const VAIN_MAX: u32 = 8;
/// Distance, in frames, between the frame that the merger parses and the frame whose cache line it
/// prefetches.
const LOOK_AHEAD: usize = 2;
/// Then only one burst in this many is planned: parsing costs some 50 ns for each frame.
const LOOK_EVERY: u32 = 16;

/// Frames that are sent as one.
#[derive(Debug)]
pub(super) struct MergeGroup {
    /// The frames of the group: bit n is frame n of the burst.
    pub(super) parts: u64,
    joined: Option<Joined>,
}

impl MergeGroup {
    /// True if the group has several frames.
    pub(super) fn is_joined(&self) -> bool {
        self.parts.count_ones() > 1
    }
}

/// Returns the indexes of the set bits, the lowest first.
pub(super) fn bits(mut of: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let at = of.trailing_zeros();
        of &= of.wrapping_sub(1);
        (at < u64::BITS).then_some(at as usize)
    })
}

/// Joins consecutive frames of a flow, for a port whose host segments long frames again.
#[derive(Debug)]
pub(super) struct Merger {
    /// Kinds of joined frames that the host refuses to segment.
    refused: Vec<Kind>,
    groups: Vec<MergeGroup>,
    /// The groups to which frames can be added: indexes into `groups`, the oldest first.
    open: Vec<usize>,
    /// The group to be sent next.
    next: usize,
    /// The first frame of the present plan, if the device offers the rest of the burst from there.
    /// `None`: there is no plan. `usize::MAX`: the rest must be planned again.
    first: Option<usize>,
    /// Which frames of the burst were sent: bit n is frame n.
    left: u64,
    /// Number of planned bursts in a row in which no frames were joined.
    vain: u32,
    /// Number of bursts since the last planned one.
    passed_over: u32,
    /// The joined frame that is being sent.
    joined: Option<Frames>,
}

impl Merger {
    /// Makes a merger for a port that segments TCP, and UDP as well if `cuts_udp`.
    pub(super) fn new(cuts_udp: bool) -> Self {
        let refused = if cuts_udp { vec![] } else { vec![Kind::Udp4, Kind::Udp6] };
        Self {
            refused,
            groups: Vec::new(),
            open: Vec::new(),
            next: 0,
            first: None,
            left: 0,
            vain: 0,
            passed_over: 0,
            joined: None,
        }
    }

    /// Plans the rest of a burst, from frame `first` on, unless it is planned already. Returns
    /// false if there is nothing to join: the frames are then sent one by one, as without a merger.
    #[inline]
    pub(super) fn plan(&mut self, frames: &Frames, first: usize) -> bool {
        if first == 0 {
            self.left = 0;
            self.first = None;
            if !self.looks(frames) {
                return false;
            }
        } else if self.first == Some(first) {
            return true;
        } else if self.left >> first == 0 && self.first.is_none() {
            return false;
        }
        self.plan_rest(frames, first);
        let has_joined = self.groups.iter().any(MergeGroup::is_joined);
        self.vain = if has_joined { 0 } else { self.vain.saturating_add(1) };
        let is_planned = has_joined || self.left >> first != 0;
        self.first = is_planned.then_some(first);
        is_planned
    }

    /// True if the burst should be planned: one of its first two frames may be joined. After many
    /// bursts without joined frames, only one burst in [`LOOK_EVERY`] is planned.
    #[inline]
    fn looks(&mut self, frames: &Frames) -> bool {
        let is_candidate = |index: usize| {
            let header = frames.header(index);
            header.flags & HDR_F_NEEDS_CSUM != 0 && header.gso_type == HDR_GSO_NONE
        };
        if frames.count() < 2 || !(is_candidate(0) || is_candidate(1)) {
            return false;
        }
        self.passed_over += 1;
        if self.vain >= VAIN_MAX && self.passed_over < LOOK_EVERY {
            return false;
        }
        self.passed_over = 0;
        true
    }

    fn plan_rest(&mut self, frames: &Frames, first: usize) {
        self.groups.clear();
        self.open.clear();
        self.next = 0;
        let left = self.left;
        let mut start = [0; HEAD_SIZE_MAX];
        for index in (first..frames.count()).filter(|index| left >> index & 1 == 0) {
            if let Some(ahead) = frames.slices(index + LOOK_AHEAD).get(1) {
                ahead.prefetch_for_read();
            }
            let slices = frames.slices(index);
            let known = copy_from_slices(slices.get(1..).unwrap_or_default(), &mut start);
            let head = Head::parse(&frames.header(index), &start, known, frames.len(index));
            match head.ok().filter(|head| !self.refused.contains(&head.kind())) {
                Some(head) => self.place(index, head),
                None => {
                    self.open.clear();
                    self.groups.push(MergeGroup { parts: 1 << index, joined: None });
                }
            }
        }
    }

    /// Adds a frame to the open group that it continues, or begins a group with it. Closes an open
    /// group of the same flow that the frame does not continue.
    fn place(&mut self, index: usize, head: Head) {
        let groups = &mut self.groups;
        let mut is_placed = false;
        self.open.retain(|&at| {
            let MergeGroup { parts, joined: Some(joined) } = &mut groups[at] else { return false };
            if is_placed {
                return true;
            }
            is_placed = joined.add(&head);
            *parts |= u64::from(is_placed) << index;
            is_placed || !joined.first().is_of_flow(&head)
        });
        if is_placed {
            return;
        }
        if self.open.len() == OPEN_MAX {
            self.open.remove(0);
        }
        self.open.push(groups.len());
        groups.push(MergeGroup { parts: 1 << index, joined: Some(Joined::new(head)) });
    }

    /// Returns the group to be sent next.
    pub(super) fn next(&self) -> Option<&MergeGroup> {
        self.groups.get(self.next)
    }

    /// Returns the joined frame of the next group. `None`: the host has no memory for its headers,
    /// and the frames of the group must be sent one by one.
    pub(super) fn next_joined(&mut self, frames: &Frames) -> Option<&Frames> {
        let Self { groups, next, joined: out, .. } = self;
        let MergeGroup { joined: Some(joined), parts } = groups.get(*next)? else { return None };
        if out.is_none() {
            *out = Frames::for_joined().ok();
        }
        let out = out.as_mut()?;
        let mut head = [0; HEAD_SIZE_MAX];
        let header = joined.write(&mut head);
        let size = joined.first().size();
        let payloads = bits(*parts).filter_map(|index| frames.payload(index));
        out.clear();
        let has_room = out.push_joined(&header, &head[..size], (size, payloads));
        // A missing payload is an error: the headers would claim more bytes than the joined frame
        // has.
        (has_room && out.len(0) == size + joined.payload()).then_some(&*out)
    }

    /// Records that these frames of the burst were sent.
    pub(super) fn note_left(&mut self, parts: u64) {
        self.left |= parts;
    }

    /// Advances to the next group, after this one was sent or lost.
    pub(super) fn go_on(&mut self) {
        self.next += 1;
    }

    /// Records that the port refuses joined frames of the next group's kind: none of that kind is
    /// made any more.
    pub(super) fn refuse(&mut self) {
        if let Some(MergeGroup { joined: Some(joined), .. }) = self.next() {
            let kind = joined.first().kind();
            tracing::info!(?kind, "the host does not segment such frames; not merging them");
            self.refused.push(kind);
        }
    }

    /// Returns how many frames in a row were sent, from `first` on. If the plan `holds`, it is used
    /// when the device offers the frames after these; else these are planned again.
    pub(super) fn taken(&mut self, first: usize, count: usize, holds: bool) -> usize {
        let taken = (self.left >> first).trailing_ones() as usize;
        let is_over = first + taken >= count;
        // `usize::MAX` equals no index, so `plan` makes a new plan for the rest.
        self.first = (!is_over).then_some(if holds { first + taken } else { usize::MAX });
        taken
    }

    /// Returns which frames from `first` on were sent: bit n is frame n of the burst.
    pub(super) fn ahead(&self, first: usize) -> u64 {
        let behind = u32::try_from(first).ok().and_then(|first| u64::MAX.checked_shl(first));
        self.left & behind.unwrap_or(0)
    }

    /// Returns the counts for a group that was sent as one frame.
    pub(super) fn spared(group: &MergeGroup) -> Merged {
        Merged { packets: group.parts.count_ones() as usize, frames: 1 }
    }

    /// Drops the joined frame's reference to guest memory.
    pub(super) fn release(&mut self) {
        if let Some(joined) = &mut self.joined {
            joined.release();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_memory::{Mapping, SliceList};
    use manyring_wire::net::RawNetHeader;
    use std::sync::Arc;

    /// A TCP segment over IPv6 of the flow to `port`, with `payload` bytes from `sequence` on.
    fn segment(port: u16, sequence: u32, payload: usize) -> (RawNetHeader, Vec<u8>) {
        let mut bytes = vec![0; 12];
        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        let len = u16::try_from(20 + payload).unwrap();
        bytes.extend(len.to_be_bytes());
        bytes.extend([6, 64]);
        bytes.extend([0; 32]);
        bytes.extend([0, 7]);
        bytes.extend(port.to_be_bytes());
        bytes.extend(sequence.to_be_bytes());
        bytes.extend([0, 0, 0, 0, 0x50, 0x10, 1, 0]);
        bytes.extend((len + 6).to_be_bytes());
        bytes.extend([0, 0]);
        bytes.resize(bytes.len() + payload, port.to_be_bytes()[1]);
        let header = RawNetHeader {
            flags: HDR_F_NEEDS_CSUM,
            csum_start: 54.into(),
            csum_offset: 16.into(),
            ..RawNetHeader::default()
        };
        (header, bytes)
    }

    /// A burst of frames that lie in a guest's memory.
    fn burst(of: &[(RawNetHeader, Vec<u8>)]) -> Frames {
        let memory = Arc::new(Mapping::anonymous(1 << 18).unwrap());
        let mut places = Vec::new();
        for (at, (_, bytes)) in (0..).step_by(4096).zip(of) {
            memory.slice(at, bytes.len()).unwrap().write_from(bytes);
            // The headers lie in two pieces.
            let (at, len) = (at as u64, u32::try_from(bytes.len()).unwrap());
            places.extend([(at, 20), (at + 20, len - 20)]);
        }
        let list = SliceList::of_mapping(&memory, &places).unwrap();
        let mut frames = Frames::new().unwrap();
        for (index, (header, bytes)) in of.iter().enumerate() {
            let pieces = list.pieces(index * 2..index * 2 + 2);
            assert!(frames.push(header, pieces, 0, bytes.len()));
        }
        frames
    }

    /// The groups of a plan, each as the list of its frames' indexes.
    fn groups(merger: &Merger) -> Vec<Vec<usize>> {
        merger.groups.iter().map(|group| bits(group.parts).collect()).collect()
    }

    #[test]
    fn flows_that_take_turns_are_joined_each_and_keep_their_order() {
        let frames = burst(&[
            segment(1, 0, 100),
            segment(2, 0, 50),
            segment(1, 100, 100),
            segment(2, 50, 50),
            segment(1, 200, 10),
            segment(1, 210, 10),
            segment(2, 300, 50),
            segment(2, 350, 50),
        ]);
        let mut merger = Merger::new(true);
        assert!(merger.plan(&frames, 0));
        let expected = [vec![0, 2, 4], vec![1, 3], vec![5], vec![6, 7]];
        assert_eq!(groups(&merger), expected);
        let joined = merger.next_joined(&frames).unwrap();
        assert_eq!((joined.count(), joined.len(0)), (1, 74 + 210));
        let header = joined.header(0);
        assert_eq!((header.gso_size.get(), header.hdr_len.get()), (100, 74));
        let mut bytes = vec![0; 12 + 74 + 210];
        assert_eq!(copy_from_slices(joined.slices(0), &mut bytes), bytes.len());
        assert!(bytes[12 + 74..].iter().all(|byte| *byte == 1), "its own payload, and all of it");
    }

    #[test]
    fn frames_that_left_before_their_turn_are_not_sent_again() {
        let turns: Vec<_> =
            (0..32).flat_map(|n| [segment(1, n * 100, 100), segment(2, n * 50, 50)]).collect();
        let frames = burst(&turns);
        let mut merger = Merger::new(true);
        assert!(merger.plan(&frames, 0));
        let odd = 0x5555_5555_5555_5555;
        assert_eq!(merger.next().unwrap().parts, odd);
        merger.note_left(odd);
        merger.go_on();
        assert_eq!(merger.taken(0, 64, true), 1, "the second is the other flow's");
        assert!(merger.plan(&frames, 1), "the plan holds");
        assert_eq!(merger.next().unwrap().parts, !odd);
        // The caller gave one frame up, so that the rest is planned anew.
        assert!(merger.plan(&frames, 2));
        assert_eq!(groups(&merger), [(3..64).step_by(2).collect::<Vec<_>>()]);
        merger.note_left(!odd & !3);
        assert_eq!(merger.taken(2, 64, true), 62);
        assert!(merger.first.is_none(), "the burst is over");
    }

    #[test]
    fn a_kind_that_the_host_refuses_leaves_frame_by_frame_from_then_on() {
        let frames = burst(&[segment(1, 0, 100), segment(1, 100, 100)]);
        let mut merger = Merger::new(true);
        assert!(merger.plan(&frames, 0));
        merger.refuse();
        assert!(!merger.plan(&frames, 0));
    }

    #[test]
    fn a_guest_whose_frames_are_never_joined_is_looked_at_now_and_then() {
        let alone = burst(&[segment(1, 0, 100), segment(1, 500, 100)]);
        let together = burst(&[segment(1, 0, 100), segment(1, 100, 100)]);
        let mut merger = Merger::new(true);
        for _ in 0..VAIN_MAX {
            assert!(!merger.plan(&alone, 0));
        }
        let until = (1..).find(|_| merger.plan(&together, 0)).unwrap();
        assert!((2..=LOOK_EVERY).contains(&until), "{until}");
        assert!(merger.plan(&together, 0), "and every time once it is worth it");
        let finished = burst(&[(RawNetHeader::default(), vec![0; 64]), segment(1, 0, 1)]);
        assert!(!merger.plan(&finished, 0));
    }

    #[test]
    fn a_frame_of_no_known_flow_ends_all_groups() {
        let other = (RawNetHeader::default(), vec![0; 64]);
        let frames = burst(&[segment(1, 0, 100), other, segment(1, 100, 100), segment(1, 200, 9)]);
        let mut merger = Merger::new(true);
        assert!(merger.plan(&frames, 0));
        assert_eq!(groups(&merger), [vec![0], vec![1], vec![2, 3]]);
    }
}
