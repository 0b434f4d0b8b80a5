//! A walk along a chain of a packed ring, which keeps its descriptors, and along an indirect table.

use super::kept::FEW;
use super::{DeviceHalf, counted};
use crate::error::QueueError;
use crate::features::RingFeatures;
use crate::walk::{Table, Walk, gather, table_entries};
use manyring_memory::{GuestAddr, GuestMemory, LastHit, SliceList};
use manyring_wire::virtqueue::{DESC_F_INDIRECT, DESC_F_WRITE, DESCRIPTOR_SIZE, Descriptor};

/// How far along its chain a walk has come.
enum Walked {
    Whole(Walk),
    /// The chain goes on at the descriptor `at`, whose two words were read.
    Part {
        at: u16,
        low: u64,
        high: u64,
        walk: Walk,
    },
}

impl DeviceHalf {
    /// Walks a chain of the ring, and keeps its descriptors. A chain cannot be longer than what is
    /// free of the ring.
    #[inline]
    pub(super) fn walk_ring(
        &mut self,
        at: u16,
        low: u64,
        high: u64,
        slot: u16,
        walk: Walk,
        slices: &mut SliceList,
    ) -> Result<Walk, QueueError> {
        match self.walk_on::<false>(at, low, high, slot, walk, slices)? {
            Walked::Whole(walk) => Ok(walk),
            Walked::Part { at, low, high, walk } => {
                self.walk_long(at, low, high, slot, walk, slices)
            }
        }
    }

    /// The rest of a chain that is longer than what a slot has room for.
    #[cold]
    fn walk_long(
        &mut self,
        at: u16,
        low: u64,
        high: u64,
        slot: u16,
        walk: Walk,
        slices: &mut SliceList,
    ) -> Result<Walk, QueueError> {
        match self.walk_on::<true>(at, low, high, slot, walk, slices)? {
            Walked::Whole(walk) => Ok(walk),
            Walked::Part { .. } => {
                let size = self.size;
                Err(QueueError::Overfull { available: 1, in_flight: size, size })
            }
        }
    }

    /// Walks along the first descriptors of a chain, which are kept in its slot, or along the
    /// further ones.
    #[inline]
    fn walk_on<const FURTHER: bool>(
        &mut self,
        mut at: u16,
        mut low: u64,
        mut high: u64,
        slot: u16,
        mut walk: Walk,
        slices: &mut SliceList,
    ) -> Result<Walked, QueueError> {
        let Self { areas, slots, last_hit, size, held, features, memory, .. } = self;
        let (kept, further) = slots.begin(slot);
        let (size, room) = (*size, usize::from(*size - *held));
        let places = if FURTHER { FEW..room.max(FEW) } else { 0..room.min(FEW) };
        for n in places {
            if FURTHER {
                kept.keep_further(low, high, further);
            } else {
                kept.few[n] = (low, high);
            }
            let (desc, id) = Descriptor::parse_packed(low, high);
            if desc.is_indirect() {
                if desc.has_next() {
                    return Err(QueueError::IndirectNext);
                }
                kept.end(counted(n + 1), id);
                let walk = walk_table(desc, *features, memory, last_hit, walk, slices)?;
                return Ok(Walked::Whole(walk));
            }
            walk.add(desc, last_hit, slices)?;
            if !desc.has_next() {
                kept.end(counted(n + 1), id);
                return Ok(Walked::Whole(walk.end()?));
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

/// Walks an indirect table. It has no links: its descriptors are taken in order (§2.8.7).
pub(super) fn walk_table(
    desc: Descriptor,
    features: RingFeatures,
    memory: &GuestMemory,
    last_hit: &mut LastHit,
    mut walk: Walk,
    slices: &mut SliceList,
) -> Result<Walk, QueueError> {
    if !features.indirect {
        return Err(QueueError::IndirectNotNegotiated);
    }
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
