//! Walks along a chain of a packed ring, keeping its descriptors, and along an indirect table.

use super::kept_chains::FEW;
use super::{PackedDeviceHalf, counted};
use crate::error::QueueError;
use crate::features::RingFeatures;
use crate::place::Place;
use crate::walk::{Table, Walk, gather, table_entries};
use manyring_memory::{GuestAddr, GuestMemory, LastHit, SliceList};
use manyring_wire::virtqueue::{DESC_F_INDIRECT, DESC_F_WRITE, DESCRIPTOR_SIZE, Descriptor};

/// How far a walk along a chain has come.
enum Walked {
    /// The end of the chain, which has this number of descriptors.
    Whole(Walk, u16),
    /// The descriptor `at`, whose two words were read; the chain goes on there.
    Part { at: u16, low: u64, high: u64, walk: Walk },
}

impl PackedDeviceHalf {
    /// Walks the chain that begins at a place of the ring, where the given two words were read, and
    /// keeps its descriptors in `slot`: the next free slot, which becomes the chain's. Returns the
    /// number of descriptors, never more than the ring has free.
    #[inline]
    pub(super) fn walk_ring(
        &mut self,
        place: Place,
        low: u64,
        high: u64,
        slot: u16,
        walk: Walk,
        slices: &mut SliceList,
    ) -> Result<(Walk, u16), QueueError> {
        match self.walk_on::<false>(place, low, high, slot, walk, slices)? {
            Walked::Whole(walk, count) => Ok((walk, count)),
            Walked::Part { at, low, high, walk } => {
                let place = Place { at, ..place };
                self.walk_long(place, low, high, slot, walk, slices)
            }
        }
    }

    /// Walks the rest of a chain that has more descriptors than a slot has room for.
    #[cold]
    fn walk_long(
        &mut self,
        place: Place,
        low: u64,
        high: u64,
        slot: u16,
        walk: Walk,
        slices: &mut SliceList,
    ) -> Result<(Walk, u16), QueueError> {
        match self.walk_on::<true>(place, low, high, slot, walk, slices)? {
            Walked::Whole(walk, count) => Ok((walk, count)),
            Walked::Part { .. } => {
                let size = self.size;
                Err(QueueError::Overfull { available: 1, in_flight: size, size })
            }
        }
    }

    /// Walks along the first descriptors of a chain, which its slot keeps, or along the further
    /// ones. A chain must not have more descriptors than the ring has free. For the first ones this
    /// is checked once, at their end: until then the walk has only read and copied descriptors.
    #[inline]
    fn walk_on<const FURTHER: bool>(
        &mut self,
        place: Place,
        mut low: u64,
        mut high: u64,
        slot: u16,
        mut walk: Walk,
        slices: &mut SliceList,
    ) -> Result<Walked, QueueError> {
        let Self { areas, slots, last_hit, size, held, features, memory, .. } = self;
        let (kept, further) = if FURTHER { slots.go_on(slot) } else { slots.begin(Some(place)) };
        let (mut at, size, room) = (place.at, *size, *size - *held);
        for n in if FURTHER { FEW..FEW.max(room.into()) } else { 0..FEW } {
            if FURTHER {
                kept.keep_further(low, high, further);
            } else {
                kept.few[n] = (low, high);
            }
            let count = counted(n + 1);
            let (desc, id) = Descriptor::parse_packed(low, high);
            let is_indirect = desc.is_indirect();
            if !is_indirect {
                walk.add(desc, last_hit, slices)?;
            } else if desc.has_next() {
                return Err(QueueError::IndirectNext);
            }
            if !desc.has_next() {
                if count > room {
                    return Err(QueueError::Overfull { available: 1, in_flight: size, size });
                }
                kept.end(count, id);
                let walk = if is_indirect {
                    walk_table(low, high, *features, memory, last_hit, walk, slices)?
                } else {
                    walk.end()?
                };
                return Ok(Walked::Whole(walk, count));
            }
            at += 1;
            if at == size {
                at = 0;
            }
            (low, high) = areas.desc.load_u64_pair(usize::from(at) * DESCRIPTOR_SIZE);
        }
        Ok(Walked::Part { at, low, high, walk })
    }
}

/// Walks the indirect table that the descriptor with the given two words names. The table has no
/// links: its descriptors follow in order (§2.8.7).
pub(super) fn walk_table(
    low: u64,
    high: u64,
    features: RingFeatures,
    memory: &GuestMemory,
    last_hit: &mut LastHit,
    mut walk: Walk,
    slices: &mut SliceList,
) -> Result<Walk, QueueError> {
    if !features.indirect {
        return Err(QueueError::IndirectNotNegotiated);
    }
    let (desc, _) = Descriptor::parse_packed(low, high);
    let count = table_entries(desc)?;
    let gathered: Vec<u8>;
    let table = if let Some(one) = memory.slice(GuestAddr(desc.addr), desc.len, last_hit) {
        Table::Guest(one)
    } else {
        gathered = gather(desc, memory, last_hit)?;
        Table::Copied(&gathered)
    };
    for n in 0..count {
        // Where a split ring has `next`, a packed one has the flags.
        let Descriptor { addr, len, next, .. } = table.descriptor(n * DESCRIPTOR_SIZE);
        if next & DESC_F_INDIRECT != 0 {
            return Err(QueueError::IndirectNested);
        }
        let desc = Descriptor { addr, len, flags: next & DESC_F_WRITE, next: 0 };
        walk.add(desc, last_hit, slices)?;
    }
    walk.end()
}
