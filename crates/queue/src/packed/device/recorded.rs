//! Chains of a packed ring that do not lie in it: set aside, owed by a former process, recorded.

use super::{PackedDeviceHalf, byte_of, walk_table};
use crate::aside::{pop_again, touch_owed};
use crate::chain::{Batch, Chain, Entry};
use crate::error::QueueError;
use crate::order::UsedEntry;
use crate::place::{F_AVAIL, F_USED};
use crate::ring::Ring;
use crate::walk::Walk;
use manyring_memory::fence_compiler;
use manyring_wire::virtqueue::Descriptor;

impl PackedDeviceHalf {
    /// As [`DeviceQueue::is_new`](crate::DeviceQueue::is_new).
    pub(crate) fn has_only_base(&self) -> bool {
        self.trail.is_none() && self.record.as_ref().is_none_or(|record| record.is_new())
    }

    /// Goes on as the record says. Returns true if the driver must be notified: the former process
    /// may have been killed before it notified.
    pub(super) fn resume(&mut self) -> bool {
        let Some(record) = &mut self.record else { return false };
        let resumed = match record.resume(self.size, self.used, &self.areas.desc) {
            Ok(None) => return false,
            Ok(Some(resumed)) => resumed,
            Err(error) => {
                self.latch_fault(QueueError::Inflight(error));
                return false;
            }
        };
        (self.used, self.held) = (resumed.used, 0);
        for (recorded, descs) in resumed.owed {
            let slot = self.slots.next();
            let (kept, further) = self.slots.begin(None);
            kept.recorded = recorded;
            for (n, (low, high)) in (0..).zip(descs) {
                kept.keep(n, low, high, further);
                kept.end(n + 1, Descriptor::parse_packed(low, high).1);
            }
            self.held += kept.count();
            self.owed.push(slot);
        }
        self.owed.reverse();
        self.avail = self.used.add(self.held, self.size);
        self.take_back_unseen();
        self.judge();
        true
    }

    /// Makes descriptors available again that the former process wrote as used but did not publish.
    /// Otherwise the driver would take them together with the next burst.
    fn take_back_unseen(&self) {
        let mut place = self.used;
        for _ in 0..self.held {
            let at = byte_of(place) + 8;
            let word = self.areas.desc.load_u64_acquire(at);
            let flags = (word >> 48) as u16;
            if place.is_used(flags) {
                let flags = flags & !(F_AVAIL | F_USED) | place.avail_flags();
                let word = word & (u64::MAX >> 16) | u64::from(flags) << 48;
                self.areas.desc.store_u64(at, word.to_le());
            }
            place = place.add(1, self.size);
        }
        fence_compiler();
    }

    fn judge(&mut self) {
        self.is_plain = self.fault.is_none() && self.owed.is_empty();
    }

    /// Pops owed chains, the oldest first: a former process has popped them and not returned them.
    /// Pops none if the ring has a fault.
    #[cold]
    pub(super) fn pop_owed(&mut self, batch: &mut Batch, max: usize) -> usize {
        if self.fault.is_some() {
            return 0;
        }
        let others = self.in_flight;
        pop_again(self, batch, max, |ring, batch, empty| {
            let slot = ring.owed.last().copied()?;
            let walked = ring.walk_again(slot, batch, empty);
            Some(walked.map(|()| {
                ring.owed.pop();
                ring.slots.kept_mut(slot).is_again = true;
                ring.again += 1;
            }))
        });
        self.judge();
        if self.features.in_order {
            self.order.note(batch, self.given, others + self.aside.count());
        }
        self.mark_taken(batch);
        batch.entries.len()
    }

    /// As [`Ring::put_back_owed`]. The descriptors from `used` up to `avail` belong to the device.
    /// The owed chains have as many descriptors, so they can be written there again, whatever has
    /// overwritten them.
    pub(super) fn put_owed_back(&mut self) -> bool {
        let is_busy = self.in_flight + self.order.count() + self.aside.count() + self.unshown > 0;
        if self.record.is_none() || self.fault.is_some() || is_busy {
            return false;
        }
        if self.marks.is_some() && !touch_owed(self) {
            return false;
        }
        self.lay_owed_out();
        let oldest_last = std::mem::take(&mut self.owed);
        // The newest first: if the process is killed in between, the oldest chains are still owed.
        for slot in oldest_last {
            if let Some(record) = &mut self.record {
                record.put_back(self.slots.kept(slot).recorded);
            }
            self.held -= self.slots.kept(slot).count();
            self.slots.free(slot);
        }
        self.avail = self.used;
        self.has_more = true;
        self.judge();
        true
    }

    /// Writes the owed chains into the ring from `used` on, the oldest first, as available. Each of
    /// these descriptors is available before and after it: the driver sees none as used.
    fn lay_owed_out(&self) {
        let mut place = self.used;
        let descs = self.owed.iter().rev().flat_map(|slot| self.slots.descs(*slot));
        for (low, high) in descs {
            let high = u64::from_le(*high);
            let flags = (high >> 48) as u16 & !(F_AVAIL | F_USED) | place.avail_flags();
            let high = (high & (u64::MAX >> 16) | u64::from(flags) << 48).to_le();
            let at = byte_of(place);
            if self.areas.desc.load_u64_pair(at) != (*low, high) {
                self.areas.desc.store_u64(at, *low);
                self.areas.desc.store_u64(at + 8, high);
            }
            place = place.add(1, self.size);
        }
        fence_compiler();
        self.mark_all();
    }

    /// As [`Chains::pop_aside`](crate::Chains::pop_aside).
    pub(super) fn walk_aside(&mut self, batch: &mut Batch, max: usize) -> usize {
        batch.restart(&self.memory);
        pop_again(self, batch, max, |ring, batch, empty| {
            let slot = ring.aside.first()?;
            let walked = ring.walk_again(slot, batch, empty);
            Some(walked.map(|()| _ = ring.aside.take_first()))
        });
        self.mark_taken(batch);
        batch.entries.len()
    }

    /// Pops a chain again, along its kept descriptors.
    fn walk_again(
        &mut self,
        slot: u16,
        batch: &mut Batch,
        empty: &mut usize,
    ) -> Result<(), QueueError> {
        let start = batch.slices.len();
        let (mut walk, slices) = (Walk::from(start), &mut batch.slices);
        for (low, high) in self.slots.descs(slot) {
            let (desc, _) = Descriptor::parse_packed(*low, *high);
            if desc.is_indirect() {
                let (last_hit, memory) = (&mut self.last_hit, &self.memory);
                walk = walk_table(*low, *high, self.features, memory, last_hit, walk, slices)?;
            } else {
                walk.add(desc, &mut self.last_hit, slices)?;
            }
        }
        walk = walk.end()?;
        *empty += walk.empty;
        let end = batch.slices.len();
        let border = walk.writable_at.min(end);
        batch.entries.push(Entry::new(Chain::new(slot), start, border, end));
        self.in_flight += 1;
        Ok(())
    }

    /// As [`Ring::leave_aside`].
    pub(super) fn forget_aside(&mut self) -> bool {
        // Chains behind one that is left to the next process could not be returned in order.
        if self.record.is_none() || self.features.in_order {
            return false;
        }
        while let Some(slot) = self.aside.take_first() {
            self.forget(slot);
        }
        true
    }

    /// As [`Chains::unpop_aside`](crate::Chains::unpop_aside).
    pub(super) fn put_aside_back(&mut self) -> bool {
        if self.in_flight + self.order.count() + self.owed() > 0 {
            return false;
        }
        // All held descriptors belong to chains that are set aside, except those that the next
        // burst shows. If each chain still lies where it was made available, behind the used
        // descriptors, then nothing was written over it.
        let held = self.held - self.unshown;
        let mut chains = Vec::new();
        while let Some(slot) = self.aside.take_first() {
            chains.push(slot);
        }
        let distance = |slot: &u16| {
            let kept = self.slots.kept(*slot);
            let ahead = kept.place().and_then(|at| at.since(self.used, self.size));
            ahead.filter(|ahead| ahead + kept.count() <= held)
        };
        let count: u16 = chains.iter().map(|slot| self.slots.kept(*slot).count()).sum();
        if count != held || !chains.iter().all(|slot| distance(slot).is_some()) {
            chains.into_iter().for_each(|slot| self.aside.push(slot));
            return false;
        }
        let mut newest_first = chains;
        newest_first.sort_by_key(|slot| std::cmp::Reverse(distance(slot)));
        newest_first.into_iter().for_each(|slot| self.put_back(slot));
        true
    }

    /// Gives the chains of a batch their order, and records them as taken. `others` is the number
    /// of chains that were in flight before.
    #[inline(never)]
    pub(super) fn note_taken(&mut self, batch: &Batch, others: u16) {
        if self.features.in_order {
            self.order.note(batch, self.given, others + self.aside.count());
        }
        if let Some(record) = &mut self.record {
            for chain in batch.entries.iter().filter_map(|entry| entry.chain.as_ref()) {
                let slot = chain.slot();
                let count = self.slots.kept(slot).count();
                let recorded = record.taken(count, self.slots.descs(slot));
                self.slots.kept_mut(slot).recorded = recorded;
            }
        }
        self.mark_taken(batch);
    }

    /// Puts a chain back: into the ring, or among the owed chains if it was owed.
    pub(super) fn put_back(&mut self, slot: u16) {
        let kept = self.slots.kept_mut(slot);
        if std::mem::take(&mut kept.is_again) {
            self.again -= 1;
            self.owed.push(slot);
            self.judge();
            return;
        }
        let count = kept.count();
        if let Some(record) = &mut self.record {
            record.put_back(kept.recorded);
        }
        self.avail = self.avail.sub(count, self.size);
        self.held -= count;
        self.has_more = true;
        self.slots.free(slot);
    }

    /// Gives up a chain. Its descriptors stay held, because the driver never gets them back.
    pub(super) fn forget(&mut self, slot: u16) {
        self.answered(slot);
        self.slots.free(slot);
    }

    fn answered(&mut self, slot: u16) {
        let is_again = &mut self.slots.kept_mut(slot).is_again;
        self.again -= u16::from(std::mem::take(is_again));
    }

    /// Returns a chain, or lets it wait for an earlier one. Used while `is_noted`.
    pub(super) fn push_noted(&mut self, slot: u16, written: u32) {
        if let Some(marks) = &mut self.marks {
            marks.answered(slot);
        }
        if self.features.in_order && !self.order.is_due(UsedEntry { slot, written }, self.given) {
            return;
        }
        self.return_noted(slot, written);
    }

    fn return_noted(&mut self, slot: u16, written: u32) {
        self.answered(slot);
        self.given = self.given.wrapping_add(1);
        if let Some(record) = &mut self.record {
            // The entries of the burst in the record become free at the publish. Until then these
            // descriptors count as held: it is a fault if the driver makes them available again.
            let count = self.slots.kept(slot).count();
            record.answered(self.slots.kept(slot).recorded);
            (self.held, self.unshown) = (self.held + count, self.unshown + count);
        }
        if self.trail.is_some() {
            self.trail_used(slot, written);
        } else {
            self.write_used(slot, written);
        }
    }

    /// As [`Ring::publish`], while `is_noted`.
    pub(super) fn publish_noted(&mut self) -> u16 {
        while let Some(UsedEntry { slot, written }) = self.order.take(self.given) {
            self.return_noted(slot, written);
        }
        if let Some(marks) = &mut self.marks {
            marks.publishes();
        }
        let Some((place, word)) = self.first.take() else { return 0 };
        if let Some(record) = &mut self.record {
            record.publishing(place, self.used);
        }
        self.write_trail();
        // Release: the used descriptors behind it, and the data, come first.
        self.areas.desc.store_u64_release(byte_of(place) + 8, word);
        if let Some(record) = &mut self.record {
            record.published(self.used);
            self.held -= std::mem::take(&mut self.unshown);
        }
        self.mark_used(place);
        self.shown_from(place)
    }
}
