//! `steer`: chooses the receiveq for each flow of a guest with several queue pairs: that of the
//! pair on whose transmitq the guest sends the flow (virtio 1.3 §5.1.6.5.6.1).
//!
//! A table of 4096 words; each has a flow's tag (16 bits, never 0), a second (8) and a pair (8).
//! The rules are those of the taps' table, which the kernel reads (see `tap/flows.rs`); here, in a
//! switch, the sender of a frame looks its flow up by itself ([`Steer`]).

use manyring_wire::net::flow::{Flow, flow_of};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Slots of the table: 4096, which is also the limit of flows in the host's tap driver. With 32
/// flows, some flow finds both of its slots taken in one case of 800.
pub(in crate::net) const SLOTS: usize = 4096;
/// Shift of the bits of a flow's number that choose its slot.
pub(in crate::net) const SLOT_SHIFT: i32 = 52;
const _: () = assert!(SLOTS == 1 << (64 - SLOT_SHIFT), "the highest bits choose the slot");
/// Shift of the 16 bits of a flow's number that are its tag, which distinguishes it from other
/// flows of the same slot.
pub(in crate::net) const TAG_SHIFT: i32 = 36;
/// Shift of the tag in a slot's word.
pub(in crate::net) const TAG_IN_SLOT: i32 = 16;
/// Mask of the pair in a slot's word.
pub(in crate::net) const PAIR_MASK: i32 = 0xff;
/// Seconds after which a flow that the guest no longer sends loses its slot, as in the host's
/// table.
const REST_SECONDS: u8 = 4;

/// The table of a port with several queues.
#[derive(Debug)]
pub(super) struct Steer {
    /// Allocated (16 KiB) when the first flow is recorded.
    slots: OnceLock<Box<[AtomicU32]>>,
    /// Secret key of the hash that makes the numbers of flows, so that nobody can choose flows that
    /// hit the same queue.
    key: u64,
}

impl Steer {
    pub(super) fn new() -> Self {
        Self { slots: OnceLock::new(), key: RandomState::new().build_hasher().finish() }
    }

    /// Records that the guest sends a frame that begins with these bytes on the transmitq of
    /// `pair`.
    pub(super) fn note(&self, start: &[u8], pair: usize, second: u32) {
        let Some(Flow { number, is_connection: true }) = flow_of(start, self.key) else { return };
        let Ok(pair) = u8::try_from(pair) else { return };
        let [second, ..] = second.to_le_bytes();
        let make = || (0..SLOTS).map(|_| AtomicU32::new(0)).collect();
        note_one(self.slots.get_or_init(make), number, pair, second);
    }

    /// Returns the pair, of the first `pairs` ones, for a frame to the guest that begins with these
    /// bytes; `None`: the frame belongs to no flow. If the guest has not sent the flow, the flow's
    /// number decides, so that all of its frames have the same pair.
    pub(super) fn choose(&self, start: &[u8], pairs: usize) -> Option<usize> {
        let Flow { number, .. } = flow_of(start, self.key)?;
        let known = self.slots.get().and_then(|slots| pair_of(slots, number));
        let pairs = u64::try_from(pairs).ok().filter(|pairs| *pairs > 0)?;
        let known = known.filter(|pair| *pair < pairs);
        usize::try_from(known.unwrap_or((number >> 32) % pairs)).ok()
    }
}

/// Returns the pair on which the guest sends a flow; `None` if the flow has no slot.
fn pair_of(slots: &[AtomicU32], flow: u64) -> Option<u64> {
    let (first, other) = slots_of(slots, flow)?;
    let words = [first, other].map(|slot| slot.load(Ordering::Relaxed));
    let word = words.into_iter().find(|word| *word >> TAG_IN_SLOT == tag_of(flow))?;
    let [pair, ..] = word.to_le_bytes();
    Some(pair.into())
}

/// Records in `slots` that the guest sends the flow on `pair`. Returns true if the flow had no
/// slot, or was sent on another pair before.
#[inline]
pub(super) fn note_one(slots: &[AtomicU32], flow: u64, pair: u8, second: u8) -> bool {
    let Some((first, other)) = slots_of(slots, flow) else { return false };
    let tag = tag_of(flow);
    let new = tag << TAG_IN_SLOT | u32::from(second) << 8 | u32::from(pair);
    let in_first = first.load(Ordering::Relaxed);
    if in_first == new {
        return false;
    }
    // Search both slots for the flow's tag before taking a free one: a flow must not have two
    // slots.
    let in_other = other.load(Ordering::Relaxed);
    let both = [(first, in_first), (other, in_other)];
    if let Some((slot, old)) = both.iter().find(|(_, old)| old >> TAG_IN_SLOT == tag) {
        let [old_pair, ..] = old.to_le_bytes();
        slot.store(new, Ordering::Relaxed);
        return old_pair != pair;
    }
    let is_free = |old: u32| {
        let [_, old_second, ..] = old.to_le_bytes();
        old == 0 || second.wrapping_sub(old_second) >= REST_SECONDS
    };
    let Some((slot, _)) = both.iter().find(|(_, old)| is_free(*old)) else { return false };
    slot.store(new, Ordering::Relaxed);
    true
}

/// Returns the two slots that a flow may have: the one that its number chooses, and its neighbour.
#[inline]
pub(super) fn slots_of(slots: &[AtomicU32], flow: u64) -> Option<(&AtomicU32, &AtomicU32)> {
    let at = usize::try_from(flow >> SLOT_SHIFT).ok()?;
    Some((slots.get(at)?, slots.get(at ^ 1)?))
}

/// Returns the flow's tag, which distinguishes it from others of its slot. Never 0, which marks a
/// slot without a flow.
#[inline]
pub(super) fn tag_of(flow: u64) -> u32 {
    let [low, high, ..] = (flow >> TAG_SHIFT).to_le_bytes();
    u32::from(u16::from_le_bytes([low, high]) | 1)
}
