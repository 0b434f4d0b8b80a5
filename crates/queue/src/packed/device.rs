//! The device half of a packed virtqueue (virtio 1.3 §2.8).
//!
//! ```text
//! pop_batch:  the descriptor at `avail` has the flags of this lap (acquire)?
//!                 walk the chain, copy each descriptor once, resolve it;  avail += its descriptors
//! push_used:  the driver wants chains in order, and an earlier one is not pushed?  it waits
//!             else one store of (written, id, flags) at `used`;  used += its descriptors
//!                 that of the first chain of a burst is held back
//! publish:    the store that was held back (release): the driver reads on from there
//! ```
//! 1. A used descriptor may overwrite the descriptors of another chain that is in flight. So the
//!    descriptors of a chain are kept until it is returned. A chain that is popped again, because
//!    it was set aside or a former process had taken it, is walked along the kept descriptors.
//! 2. This half numbers the chains itself: that number is the chain's slot. The chain's id may be
//!    any 16 bits that the driver chooses.
//! 3. `avail` is ahead of `used` by the descriptors in flight. Chains are returned in any order,
//!    and are written where the oldest chain in flight lay.

mod built;
mod kept_chains;
mod logged;
mod recorded;
mod trailed;
mod walked;

use self::kept_chains::KeptChains;
use self::walked::walk_table;
use crate::aside::Aside;
use crate::base::Base;
use crate::chain::{BATCH_CHAINS, BATCH_SLICES, Batch, Chain, Entry};
use crate::config::{RingAddresses, RingAreas};
use crate::error::QueueError;
use crate::features::RingFeatures;
use crate::order::Order;
use crate::place::{
    EVENT_DESC, EVENT_DISABLE, EVENT_ENABLE, F_USED, LAP, Place, event_word, wants_event,
};
use crate::record::inflight::clear_inflight;
use crate::record::marks::DirtyMarks;
use crate::record::packed::PackedInflight;
use crate::ring::{Chains, Ring};
use crate::walk::Walk;
use manyring_memory::{GuestMemory, LastHit, Words, fence_full};
use manyring_wire::virtqueue::{DESCRIPTOR_SIZE, Descriptor};
use std::sync::Arc;

/// The device half.
#[derive(Debug)]
pub struct PackedDeviceHalf {
    areas: RingAreas,
    memory: Arc<GuestMemory>,
    last_hit: LastHit,
    size: u16,
    features: RingFeatures,
    /// The next descriptor to pop.
    avail: Place,
    /// The next descriptor to use.
    used: Place,
    /// The first descriptor of the unpublished burst: its place and its second word, not yet
    /// stored.
    first: Option<(Place, u64)>,
    /// Chains of the unpublished burst.
    pushed: u16,
    /// Descriptors published since the last [`Ring::needs_notification`].
    unsignalled: u16,
    /// Chains returned so far, modulo 2^16: the position of the next one in `order`.
    given: u16,
    /// The last look at the ring found a chain to pop.
    has_more: bool,
    /// The device's event suppression word as last written; `None`: not written yet.
    event_written: Option<u32>,
    /// Chains that were popped and neither pushed nor put back, set aside nor discarded.
    in_flight: u16,
    /// Descriptors of the ring whose chains were not returned.
    held: u16,
    /// Those of `held` that the next publish shows to the driver; counted only if there is a
    /// record.
    unshown: u16,
    has_begun: bool,
    /// The base is 0. A front-end that does not know packed rings gives this base to a new ring.
    is_unsure: bool,
    slots: KeptChains,
    aside: Aside,
    order: Order,
    record: Option<Box<PackedInflight>>,
    /// The descriptors of the unpublished burst behind its first one, if the ring is trailed.
    trail: Option<Vec<(Place, u64)>>,
    /// The record of an earlier ring, which [`Ring::begin`] empties.
    former: Option<Box<Words>>,
    /// Marks the writes to the ring, and to the device's event suppression area, in the migration
    /// log; `None`: the front-end has set no log.
    marks: Option<Box<DirtyMarks>>,
    event_marks: Option<Box<DirtyMarks>>,
    /// Slots of the owed chains, the oldest last: a former process has popped them and not returned
    /// them.
    owed: Vec<u16>,
    /// How many owed chains were popped again and are not returned.
    again: u16,
    /// Chains need an order, a record or a migration log: each step is noted.
    is_noted: bool,
    /// There is no fault, and no chain is owed: a pop has only the ring to look at.
    is_plain: bool,
    fault: Option<QueueError>,
}

impl PackedDeviceHalf {
    /// The two words of the descriptor at `place`, if its flags say that it is available on the lap
    /// with the flags `lap`.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "the highest 16 bits")]
    fn available_at(&self, place: Place, lap: u16) -> Option<(u64, u64)> {
        // Acquire: the rest of the chain is read after the flags of its first descriptor.
        let words = self.areas.desc.load_u64_pair_acquire(byte_of(place));
        ((u64::from_le(words.1) >> 48) as u16 & LAP == lap).then_some(words)
    }

    /// Walks the chain at `place`, whose first descriptor has the given two words. Returns the
    /// chain's batch entry and its number of descriptors.
    #[inline]
    fn pop_chain(
        &mut self,
        place: Place,
        low: u64,
        high: u64,
        batch: &mut Batch,
        empty: &mut usize,
    ) -> Result<(Entry, u16), QueueError> {
        let (slot, start) = (self.slots.next(), batch.slices.len());
        let walked = self.walk_ring(place, low, high, slot, Walk::from(start), &mut batch.slices);
        let (walk, count) = match walked {
            Ok(walked) => walked,
            Err(fault) => {
                self.slots.free(slot);
                return Err(fault);
            }
        };
        *empty += walk.empty;
        let end = batch.slices.len();
        let border = walk.writable_at.min(end);
        self.held += count;
        Ok((Entry::new(Chain::new(slot), start, border, end), count))
    }

    /// Returns a chain to the driver.
    #[inline]
    fn write_used(&mut self, slot: u16, written: u32) {
        let (id, count) = self.slots.free_used(slot);
        let flags = self.used.used_flags();
        let desc = Descriptor { addr: 0, len: written, flags, next: 0 };
        let (_, word) = desc.emit_packed(id);
        if self.first.is_none() {
            self.first = Some((self.used, word));
        } else {
            self.areas.desc.store_u64(byte_of(self.used) + 8, word);
        }
        self.has_used(count);
    }

    /// Counts a chain of `count` descriptors as returned.
    #[inline]
    fn has_used(&mut self, count: u16) {
        self.used = self.used.add(count, self.size);
        self.held -= count;
        self.pushed += 1;
    }

    /// Counts the burst that begins at `place` as published. Returns its number of chains.
    #[inline]
    fn shown_from(&mut self, place: Place) -> u16 {
        let moved = self.used.since(place, self.size).unwrap_or(self.size);
        self.unsignalled = self.unsignalled.saturating_add(moved);
        std::mem::take(&mut self.pushed)
    }

    /// Finds out the lap of a ring with the base 0. This base is right for a ring that goes on at
    /// its first descriptor on an even lap. But some front-ends (UML) give it to a new ring too,
    /// whose lap is odd. In a ring that has been all the way round, some descriptor has the flag
    /// `used` of the lap before: the driver keeps this flag when it makes the descriptor available
    /// again. It need not be the first descriptor, since the device marks only the first one of
    /// each chain.
    #[cold]
    #[allow(clippy::cast_possible_truncation, reason = "the highest 16 bits")]
    fn judge_lap(&mut self) {
        let flags = |at: u16| {
            let high = self.areas.desc.load_u64_acquire(byte_of(Place { at, wrap: false }) + 8);
            (high >> 48) as u16
        };
        let wrap = (0..self.size).all(|at| flags(at) & F_USED == 0);
        (self.avail, self.used) = (Place { at: 0, wrap }, Place { at: 0, wrap });
    }

    fn write_event(&mut self, word: u32) {
        if self.event_written != Some(word) {
            self.areas.used.store_u32(0, word);
            self.event_written = Some(word);
            if let Some(marks) = &self.event_marks {
                marks.wrote_all();
            }
        }
    }
}

impl Ring for PackedDeviceHalf {
    fn begin(&mut self) -> bool {
        if std::mem::replace(&mut self.has_begun, true) {
            return false;
        }
        if let Some(former) = self.former.take() {
            clear_inflight(&former);
        }
        if self.is_unsure {
            self.judge_lap();
        }
        let is_resumed = self.find_place() || self.resume();
        self.mark_all();
        is_resumed
    }

    #[inline]
    fn has_available(&mut self) -> bool {
        if !self.is_plain {
            return self.fault.is_none();
        }
        self.has_more = self.available_at(self.avail, self.avail.avail_flags()).is_some();
        self.has_more
    }

    fn available_count(&self) -> u16 {
        u16::from(self.has_more) + self.owed()
    }

    fn in_flight(&self) -> u16 {
        self.in_flight
    }

    #[inline]
    fn waiting(&self) -> u16 {
        self.order.count()
    }

    #[inline]
    fn aside(&self) -> u16 {
        self.aside.count()
    }

    fn size(&self) -> u16 {
        self.size
    }

    fn base(&self) -> Base {
        Base::of_packed(self.avail, self.used)
    }

    #[inline]
    fn publish(&mut self) -> u16 {
        if self.is_noted {
            return self.publish_noted();
        }
        let Some((place, word)) = self.first.take() else { return 0 };
        // Release: the used descriptors behind it, and the data, come first.
        self.areas.desc.store_u64_release(byte_of(place) + 8, word);
        self.shown_from(place)
    }

    #[inline]
    fn needs_notification(&mut self) -> bool {
        let moved = std::mem::take(&mut self.unsignalled);
        if moved == 0 {
            return false;
        }
        // Full fence: the driver writes its event and then looks for used descriptors; we have
        // written those and now read its event. One of us must see the other (§2.8.21.3.1).
        fence_full();
        let word = self.areas.avail.load_u32(0);
        wants_event(word, self.features.event_idx, self.used, moved, self.size)
    }

    #[inline]
    fn wants_call_within(&self, chains: u16) -> bool {
        let word = self.areas.avail.load_u32(0);
        let chains = chains.min(self.size);
        let then = self.used.add(chains, self.size);
        wants_event(word, self.features.event_idx, then, chains, self.size)
    }

    fn enable_notifications(&mut self) -> bool {
        self.write_event(if self.features.event_idx {
            event_word(self.avail.bits(), EVENT_DESC)
        } else {
            event_word(0, EVENT_ENABLE)
        });
        // Full fence: mirrors the driver's fence between writing its descriptors and reading our
        // event.
        fence_full();
        self.has_available()
    }

    fn disable_notifications(&mut self) {
        self.write_event(event_word(0, EVENT_DISABLE));
    }

    fn fault(&self) -> Option<QueueError> {
        self.fault
    }

    fn latch_fault(&mut self, fault: QueueError) {
        self.fault.get_or_insert(fault);
        self.is_plain = false;
        self.has_more = false;
    }

    fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    #[allow(clippy::cast_possible_truncation, reason = "at most the ring's size")]
    fn owed(&self) -> u16 {
        self.owed.len() as u16
    }

    fn owes(&self) -> bool {
        !self.owed.is_empty() || self.again > 0
    }

    fn put_back_owed(&mut self) -> bool {
        self.put_owed_back()
    }

    fn leave_aside(&mut self) -> bool {
        self.forget_aside()
    }

    fn is_broken(&self) -> bool {
        self.memory.is_broken() || self.record.as_ref().is_some_and(|record| record.is_broken())
    }

    fn relocate(
        &mut self,
        addresses: RingAddresses,
        memory: Arc<GuestMemory>,
    ) -> Result<(), QueueError> {
        self.areas = addresses.resolve_packed(self.size, &memory)?;
        self.memory = memory;
        self.last_hit = LastHit::default();
        self.event_written = None;
        self.log_from_here(addresses);
        Ok(())
    }
}

impl Chains for PackedDeviceHalf {
    #[inline]
    fn pop_batch(&mut self, batch: &mut Batch, max: usize) -> usize {
        batch.restart(&self.memory);
        if !self.is_plain {
            return self.pop_owed(batch, max);
        }
        let (mut empty, in_flight, size, mut place) = (0, self.in_flight, self.size, self.avail);
        self.has_more = false;
        // The flags of an available descriptor on this lap.
        let mut lap = place.avail_flags();
        while let Some((low, high)) = self.available_at(place, lap) {
            if batch.entries.len() >= max.min(BATCH_CHAINS)
                || batch.slices.len() + empty >= BATCH_SLICES
            {
                self.has_more = true;
                break;
            }
            match self.pop_chain(place, low, high, batch, &mut empty) {
                Ok((entry, count)) => {
                    batch.entries.push(entry);
                    place.at += count;
                    if place.at >= size {
                        (place, lap) = next_lap(place, size);
                    }
                }
                Err(fault) => {
                    self.latch_fault(fault);
                    break;
                }
            }
        }
        let popped = batch.entries.len();
        if popped > 0 {
            batch.walked = batch.slices.len() + empty;
            self.in_flight += counted(popped);
            self.avail = place;
            if self.is_noted {
                self.note_taken(batch, in_flight);
            }
        }
        popped
    }

    fn unpop(&mut self, chain: Chain) {
        let slot = chain.finish();
        self.in_flight -= 1;
        self.mark_put_back(slot);
        self.put_back(slot);
    }

    #[inline]
    fn push_used(&mut self, chain: Chain, written: u32) {
        let slot = chain.finish();
        self.in_flight -= 1;
        if self.is_noted {
            return self.push_noted(slot, written);
        }
        self.write_used(slot, written);
    }

    fn set_aside(&mut self, chain: Chain) {
        self.in_flight -= 1;
        let slot = chain.finish();
        self.mark_put_back(slot);
        self.aside.push(slot);
    }

    fn pop_aside(&mut self, batch: &mut Batch, max: usize) -> usize {
        self.walk_aside(batch, max)
    }

    fn unpop_aside(&mut self) -> bool {
        self.put_aside_back()
    }

    fn discard(&mut self, chain: Chain) {
        let slot = chain.finish();
        self.in_flight -= 1;
        self.mark_put_back(slot);
        self.forget(slot);
    }
}

/// The place `size` descriptors before `place`, with the wrap counter of the next lap, and the
/// flags of a descriptor that is available there.
#[cold]
#[inline(never)]
fn next_lap(place: Place, size: u16) -> (Place, u16) {
    let place = Place { at: place.at - size, wrap: !place.wrap };
    (place, place.avail_flags())
}

#[inline]
fn byte_of(place: Place) -> usize {
    usize::from(place.at) * DESCRIPTOR_SIZE
}

#[inline]
#[allow(clippy::cast_possible_truncation, reason = "at most the ring's size")]
fn counted(count: usize) -> u16 {
    count as u16
}
