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
//! 1. A used descriptor is written where another chain, that is in flight, may lie. So the
//!    descriptors of a chain are kept until it goes back, and a chain that is popped again (it was
//!    set aside, or a former process has taken it) is walked along those.
//! 2. A chain's slot is a number that this half gives, since a driver may choose any 16 bits as the
//!    chain's id.
//! 3. `avail` is as far ahead of `used` as descriptors are in flight: chains that come back in any
//!    order go back where the oldest lay.

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
    /// Where the burst that is not published begins, and the second word of its first descriptor.
    first: Option<(Place, u64)>,
    /// Chains of the burst.
    pushed: u16,
    /// Descriptors that were published since the driver was last asked for its event.
    unsignalled: u16,
    /// Chains that went back, as the order counts them.
    given: u16,
    /// At the last look there was a chain to pop.
    has_more: bool,
    /// The word of the device's event suppression area as last written.
    event_written: Option<u32>,
    /// Chains that were popped and neither pushed nor put back, set aside nor discarded.
    in_flight: u16,
    /// Descriptors of the ring whose chains have not gone back.
    held: u16,
    /// Those of them that the next burst shows to the driver, if there is a record.
    unshown: u16,
    has_begun: bool,
    /// The base is 0: front-ends that do not think of packed rings say so for a new one.
    is_unsure: bool,
    slots: KeptChains,
    aside: Aside,
    order: Order,
    record: Option<Box<PackedInflight>>,
    /// The descriptors that the burst writes behind its first one, if the ring is to tell its
    /// place.
    trail: Option<Vec<(Place, u64)>>,
    /// The record of a ring before this one, which is emptied when this one begins.
    former: Option<Box<Words>>,
    /// Marks of the writes to the ring, and to the device's event suppression area, in the
    /// migration log, while the front-end wants them.
    marks: Option<Box<DirtyMarks>>,
    event_marks: Option<Box<DirtyMarks>>,
    /// Chains that a former process has taken and that are not popped again, the oldest last.
    owed: Vec<u16>,
    /// Those of them that were popped again and are not answered.
    again: u16,
    /// There is an order to restore, a record to keep or a log to mark in.
    is_noted: bool,
    /// There is no fault, and nothing is owed.
    is_plain: bool,
    fault: Option<QueueError>,
}

impl PackedDeviceHalf {
    /// The two words of the descriptor at a place, if it has the flags `lap` of one that is
    /// available there.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "the highest 16 bits")]
    fn available_at(&self, place: Place, lap: u16) -> Option<(u64, u64)> {
        // Acquire: the rest of the chain is read after the flags of its first descriptor.
        let words = self.areas.desc.load_u64_pair_acquire(byte_of(place));
        ((u64::from_le(words.1) >> 48) as u16 & LAP == lap).then_some(words)
    }

    /// Walks the chain at `place`, whose first descriptor has these two words. Gives its entry, and
    /// how many descriptors it has.
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

    /// A chain of `count` descriptors has gone back.
    #[inline]
    fn has_used(&mut self, count: u16) {
        self.used = self.used.add(count, self.size);
        self.held -= count;
        self.pushed += 1;
    }

    /// A burst that begins at `place` was shown to the driver. Returns its chains.
    #[inline]
    fn shown_from(&mut self, place: Place) -> u16 {
        let moved = self.used.since(place, self.size).unwrap_or(self.size);
        self.unsignalled = self.unsignalled.saturating_add(moved);
        std::mem::take(&mut self.pushed)
    }

    /// A ring that goes on at its first descriptor, on an even lap, has the base 0. So has a new
    /// one if its front-end does not know that packed rings begin on an odd lap (UML). The ring
    /// tells: of one that has been all the way round, a descriptor was used on the lap before, and
    /// has that flag still when it is available again. That need not be the first descriptor: it
    /// may have been a later one of its chain, of which the device uses none.
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
        // Full fence: mirrors the driver's between its descriptors and its look at our event.
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

/// The place `size` before `place.at`, on the next lap, and the flags of an available descriptor
/// there.
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
