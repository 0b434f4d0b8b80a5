//! The device half of a split virtqueue.
//!
//! ```text
//! pop_batch:  idx = avail.idx (acquire);  idx - last <= size, else fault
//!             for each new head: it is in flight from now on, and was not before, else fault;
//!             walk the chain, copy each descriptor once, resolve it
//! push_used:  the driver wants chains in order, and an earlier one is not pushed?
//!                 the chain waits (order.rs)
//!             else its head is in flight no more
//!                 used.ring[used_idx & mask] = (head, written);  used_idx += 1
//! publish:    chains that waited, and now follow the last pushed one, get their used entries
//!             used.idx = used_idx (release)
//! ```
//! Differences to the plain version: (1) `avail.idx` is read once per batch and kept; (2)
//! descriptors are copied as two 64-bit words, so that no descriptor is seen half rewritten; (3)
//! used entries are written at once but published once per burst; (4) notification words are
//! written only when their value changes; (5) the state of a walk is a value that stays in
//! registers, and the sum of a chain's bytes is checked once, at its end.

mod aside;
mod built;
mod logged;
mod recorded;

use crate::aside::Aside;
use crate::base::Base;
use crate::chain::{BATCH_CHAINS, BATCH_SLICES, Batch, Chain, Entry};
use crate::config::{RingAddresses, RingAreas};
use crate::error::QueueError;
use crate::features::RingFeatures;
use crate::order::Order;
use crate::record::inflight::{Inflight, clear_inflight};
use crate::record::marks::DirtyMarks;
use crate::ring::{Chains, Ring};
use crate::split::heads::Heads;
use crate::walk::{Table, Walk, gather, table_entries};
use manyring_memory::{GuestAddr, GuestMemory, LastHit, SliceList, Words, fence_full};
use manyring_wire::virtqueue::{
    AVAIL_F_NO_INTERRUPT, DESCRIPTOR_SIZE, Descriptor, RING_FLAGS, RING_IDX, USED_F_NO_NOTIFY,
    avail_entry, avail_event, need_event, used_entry, used_event,
};
use std::sync::Arc;

/// The device half.
#[derive(Debug)]
pub struct SplitDeviceHalf {
    areas: RingAreas,
    memory: Arc<GuestMemory>,
    last_hit: LastHit,
    size: u16,
    features: RingFeatures,
    /// The next available index to pop.
    last_avail: u16,
    /// `avail.idx` as last read.
    avail_idx: u16,
    /// The next used index to write.
    used_idx: u16,
    /// `used.idx` as last published.
    published_idx: u16,
    /// `used.idx` at the last [`Ring::needs_notification`].
    signalled_idx: u16,
    /// The notification word as last written: `avail_event`, or the flags. `None`: not written yet.
    event_written: Option<u16>,
    in_flight: u16,
    /// [`Ring::begin`] has read `used_idx` from the ring.
    has_begun: bool,
    /// Which descriptors are heads of chains in flight.
    heads: Heads,
    /// The heads of the chains that are set aside, the oldest first. They stay marked in `heads`.
    aside: Aside,
    /// Restores the order of chains if `VIRTIO_F_IN_ORDER` is negotiated.
    order: Order,
    /// The record of chains in flight, for the process that serves the ring after this one.
    record: Option<Box<Inflight>>,
    /// The record of an earlier ring, which [`Ring::begin`] empties.
    former: Option<Box<Words>>,
    /// Marks the device's writes in the migration log; `None`: the front-end has set no log.
    marks: Option<Box<DirtyMarks>>,
    /// Chains need an order, a record or a migration log: each step is noted.
    is_noted: bool,
    /// There is no fault, and no chain is owed: all available chains lie in the ring.
    is_plain: bool,
    fault: Option<QueueError>,
}

impl SplitDeviceHalf {
    /// Reads the next head and walks its chain.
    #[inline]
    fn pop_chain(
        &mut self,
        index: u16,
        size: u16,
        batch: &mut Batch,
        empty: &mut usize,
    ) -> Result<Entry, QueueError> {
        let head = self.areas.avail.load_u16(avail_entry(index & (size - 1)));
        if head >= size {
            return Err(QueueError::DescriptorIndex { index: head, size });
        }
        if !self.heads.mark(head) {
            return Err(QueueError::InFlight { head });
        }
        let start = batch.slices.len();
        let walk = self.walk_table(head, Walk::from(start), &mut batch.slices)?;
        *empty += walk.empty;
        let end = batch.slices.len();
        let border = walk.writable_at.min(end);
        Ok(Entry::new(Chain::new(head), start, border, end))
    }

    /// Walks a chain through the ring's descriptor table. A chain longer than the ring is a loop.
    #[inline]
    fn walk_table(
        &mut self,
        head: u16,
        mut walk: Walk,
        slices: &mut SliceList,
    ) -> Result<Walk, QueueError> {
        let (mut index, size) = (head, self.size);
        for _ in 0..size {
            if index >= size {
                return Err(QueueError::DescriptorIndex { index, size });
            }
            let at = usize::from(index) * DESCRIPTOR_SIZE;
            let (low, high) = self.areas.desc.load_u64_pair(at);
            let desc = Descriptor::parse(low, high);
            if desc.is_indirect() {
                if desc.has_next() {
                    return Err(QueueError::IndirectNext);
                }
                return self.walk_indirect(desc, walk, slices);
            }
            walk.add(desc, &mut self.last_hit, slices)?;
            if !desc.has_next() {
                return walk.end();
            }
            index = desc.next;
        }
        Err(QueueError::ChainLength { max: size.into() })
    }

    /// Walks a chain through an indirect table. Each descriptor is copied out once.
    fn walk_indirect(
        &mut self,
        desc: Descriptor,
        mut walk: Walk,
        slices: &mut SliceList,
    ) -> Result<Walk, QueueError> {
        if !self.features.indirect {
            return Err(QueueError::IndirectNotNegotiated);
        }
        let count = table_entries(desc)?;
        let gathered: Vec<u8>;
        let one = self.memory.slice(GuestAddr(desc.addr), desc.len, &mut self.last_hit);
        let table = if let Some(one) = one {
            Table::Guest(one)
        } else {
            gathered = gather(desc, &self.memory, &mut self.last_hit)?;
            Table::Copied(&gathered)
        };
        let size = u16::try_from(count).unwrap_or(u16::MAX);
        let mut index = 0;
        for _ in 0..count {
            if index >= size {
                return Err(QueueError::DescriptorIndex { index, size });
            }
            let desc = table.descriptor(usize::from(index) * DESCRIPTOR_SIZE);
            if desc.is_indirect() {
                return Err(QueueError::IndirectNested);
            }
            walk.add(desc, &mut self.last_hit, slices)?;
            if !desc.has_next() {
                return walk.end();
            }
            index = desc.next;
        }
        Err(QueueError::ChainLength { max: count })
    }

    /// Writes the used entry of a chain.
    #[inline]
    fn write_used(&mut self, head: u16, written: u32) {
        self.heads.clear(head);
        let slot = self.used_idx & (self.size - 1);
        self.areas.used.store_pair(used_entry(slot), (u32::from(head), written));
        self.used_idx = self.used_idx.wrapping_add(1);
    }

    /// Publishes the used entries that were written. Returns their number.
    #[inline]
    fn publish_written(&mut self) -> u16 {
        let count = self.used_idx.wrapping_sub(self.published_idx);
        if count != 0 {
            // Release: the used entries, and the data behind them, come first.
            self.areas.used.store_u16_release(RING_IDX, self.used_idx);
            self.published_idx = self.used_idx;
        }
        count
    }

    fn write_event(&mut self, value: u16) {
        if self.event_written != Some(value) {
            let at = if self.features.event_idx { avail_event(self.size) } else { RING_FLAGS };
            self.areas.used.store_u16(at, value);
            self.event_written = Some(value);
            if let Some(marks) = &self.marks {
                marks.wrote(at, size_of::<u16>());
            }
        }
    }
}

impl Ring for SplitDeviceHalf {
    fn begin(&mut self) -> bool {
        if std::mem::replace(&mut self.has_begun, true) {
            return false;
        }
        if let Some(former) = self.former.take() {
            clear_inflight(&former);
        }
        self.used_idx = self.areas.used.load_u16(RING_IDX);
        (self.published_idx, self.signalled_idx) = (self.used_idx, self.used_idx);
        if let Some(marks) = &self.marks {
            marks.wrote_all();
        }
        self.resume()
    }

    #[inline]
    fn has_available(&mut self) -> bool {
        if !self.is_plain {
            return self.fault.is_none();
        }
        if self.avail_idx != self.last_avail {
            return true;
        }
        // Acquire: the entries and descriptors behind the index are read after it.
        let idx = self.areas.avail.load_u16_acquire(RING_IDX);
        let (from, size) = (self.last_avail, self.size);
        let available = idx.wrapping_sub(from);
        if available > size {
            self.latch_fault(QueueError::AvailJump { from, to: idx, size });
            return false;
        }
        // Each chain that the driver has not got back holds a descriptor of the ring, so an honest
        // driver stays within its size. This bounds what a driver can make us hold.
        let in_flight = self.in_flight + self.order.count() + self.aside.count();
        if available > size - in_flight {
            self.latch_fault(QueueError::Overfull { available, in_flight, size });
            return false;
        }
        self.avail_idx = idx;
        idx != self.last_avail
    }

    fn available_count(&self) -> u16 {
        // At most the ring's size, whatever the driver writes: `avail.idx` is not read while chains
        // are owed.
        self.avail_idx.wrapping_sub(self.last_avail) + self.owed_count()
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
        self.last_avail.into()
    }

    #[inline]
    fn publish(&mut self) -> u16 {
        if self.is_noted {
            return self.publish_noted();
        }
        self.publish_written()
    }

    #[inline]
    fn needs_notification(&mut self) -> bool {
        let (new, old) = (self.published_idx, self.signalled_idx);
        if new == old {
            return false;
        }
        // Full fence: the driver writes its event and then reads used.idx; we have written
        // used.idx and now read its event. One of us must see the other (§2.7.7.2).
        fence_full();
        self.signalled_idx = new;
        if self.features.event_idx {
            let event = self.areas.avail.load_u16(used_event(self.size));
            need_event(event, new, old)
        } else {
            self.areas.avail.load_u16(RING_FLAGS) & AVAIL_F_NO_INTERRUPT == 0
        }
    }

    #[inline]
    fn wants_call_within(&self, chains: u16) -> bool {
        if self.features.event_idx {
            let event = self.areas.avail.load_u16(used_event(self.size));
            event.wrapping_sub(self.used_idx) < chains
        } else {
            self.areas.avail.load_u16(RING_FLAGS) & AVAIL_F_NO_INTERRUPT == 0
        }
    }

    fn enable_notifications(&mut self) -> bool {
        let event = if self.features.event_idx { self.last_avail } else { 0 };
        self.write_event(event);
        // Full fence: the driver publishes avail.idx and then reads our event; we have written
        // our event and now read avail.idx. One of us must see the other (§2.7.10.1).
        fence_full();
        self.has_available()
    }

    fn disable_notifications(&mut self) {
        if !self.features.event_idx {
            self.write_event(USED_F_NO_NOTIFY);
        }
    }

    fn fault(&self) -> Option<QueueError> {
        self.fault
    }

    fn latch_fault(&mut self, fault: QueueError) {
        self.fault.get_or_insert(fault);
        self.is_plain = false;
    }

    fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    fn owed(&self) -> u16 {
        self.owed_count()
    }

    fn owes(&self) -> bool {
        self.record.as_ref().is_some_and(|record| record.owes())
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
        self.areas = addresses.resolve(self.size, &memory)?;
        self.memory = memory;
        self.last_hit = LastHit::default();
        self.event_written = None;
        self.log_from_here(addresses.used);
        Ok(())
    }
}

impl Chains for SplitDeviceHalf {
    #[inline]
    fn pop_batch(&mut self, batch: &mut Batch, max: usize) -> usize {
        batch.restart(&self.memory);
        if !self.is_plain {
            return self.pop_owed(batch, max);
        }
        if !self.has_available() {
            return 0;
        }
        let available = usize::from(self.avail_idx.wrapping_sub(self.last_avail));
        // Descriptors of no bytes yield no slice, but each costs a read: they count as slices.
        let (mut empty, in_flight) = (0, self.in_flight);
        // The loop counts in local variables and stores the index once, at the end. Were it stored
        // for each chain, the compiler could load its neighbour `size` as one word with it, and a
        // CPU lets a load wait that a recent store covers in part only (docs/design/0006).
        let (mut index, size) = (self.last_avail, self.size);
        for _ in 0..available.min(BATCH_CHAINS).min(max) {
            match self.pop_chain(index, size, batch, &mut empty) {
                Ok(entry) => {
                    batch.entries.push(entry);
                    index = index.wrapping_add(1);
                }
                Err(fault) => {
                    self.latch_fault(fault);
                    break;
                }
            }
            if batch.slices.len() + empty >= BATCH_SLICES {
                break;
            }
        }
        batch.walked = batch.slices.len() + empty;
        let popped = batch.entries.len();
        self.in_flight += index.wrapping_sub(self.last_avail);
        self.last_avail = index;
        if self.is_noted {
            self.note_taken(batch, in_flight);
        }
        popped
    }

    fn unpop(&mut self, chain: Chain) {
        let head = chain.finish();
        self.in_flight -= 1;
        self.heads.clear(head);
        self.mark_put_back(head);
        if !self.record_put_back(head) {
            return;
        }
        self.last_avail = self.last_avail.wrapping_sub(1);
        debug_assert!(
            self.fault.is_some() || {
                let slot = self.last_avail & (self.size - 1);
                self.areas.avail.load_u16(avail_entry(slot)) == head || head < self.size
            }
        );
    }

    #[inline]
    fn push_used(&mut self, chain: Chain, written: u32) {
        let head = chain.finish();
        self.in_flight -= 1;
        if self.is_noted {
            return self.push_noted(head, written);
        }
        self.write_used(head, written);
    }

    fn set_aside(&mut self, chain: Chain) {
        self.in_flight -= 1;
        let head = chain.finish();
        self.mark_put_back(head);
        self.aside.push(head);
    }

    fn pop_aside(&mut self, batch: &mut Batch, max: usize) -> usize {
        self.walk_aside(batch, max)
    }

    fn unpop_aside(&mut self) -> bool {
        self.put_aside_back()
    }

    fn discard(&mut self, chain: Chain) {
        let head = chain.finish();
        self.heads.clear(head);
        self.in_flight -= 1;
        self.mark_put_back(head);
        if let Some(record) = &mut self.record {
            record.forget(head);
        }
    }
}
