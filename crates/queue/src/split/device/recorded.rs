//! A split ring with a record: owed chains are popped first, and each step is recorded.

use super::SplitDeviceHalf;
use crate::aside::{pop_again, touch_owed};
use crate::chain::Batch;
use crate::error::QueueError;
use crate::order::UsedEntry;
use crate::record::inflight::Inflight;
use crate::ring::Ring;
use manyring_memory::Words;
use manyring_wire::virtqueue::avail_entry;

impl SplitDeviceHalf {
    /// Records the chains that are popped and not returned in `region`, of
    /// [`inflight_size`](crate::inflight_size) bytes. If a former process has left a record there,
    /// the ring goes on where that process was killed. [`Ring::begin`] is the first to read the
    /// region.
    #[must_use]
    pub fn recorded(mut self, region: Option<Words>) -> Self {
        debug_assert!(region.is_none() || !self.has_begun, "the base would be used");
        self.record = region.map(|words| Box::new(Inflight::new(words)));
        self.is_noted = self.features.in_order || self.record.is_some() || self.marks.is_some();
        self
    }

    /// As [`DeviceQueue::in_own_region`](crate::DeviceQueue::in_own_region).
    #[must_use]
    pub fn in_own_region(mut self) -> Self {
        self.record = self.record.map(|record| Box::new(record.in_own_region()));
        self
    }

    /// As [`DeviceQueue::is_new`](crate::DeviceQueue::is_new).
    pub(crate) fn has_only_base(&self) -> bool {
        self.record.as_ref().is_none_or(|record| record.is_new())
    }

    /// Has [`Ring::begin`] empty `region`, the record of an earlier ring. This ring does not update
    /// that record, so no later ring may go on from it.
    #[must_use]
    pub fn clearing(mut self, region: Option<Words>) -> Self {
        self.former = region.map(Box::new);
        self
    }

    /// Goes on as the record says. Returns true if the driver must be notified: the former process
    /// may have been killed before it notified.
    pub(super) fn resume(&mut self) -> bool {
        let Some(record) = &mut self.record else { return false };
        match record.resume(self.size, self.used_idx) {
            Ok(None) => false,
            Ok(Some(next)) => {
                (self.last_avail, self.avail_idx) = (next, next);
                self.judge();
                true
            }
            Err(error) => {
                self.latch_fault(QueueError::Inflight(error));
                false
            }
        }
    }

    /// How many owed chains were not popped again yet.
    #[inline]
    pub(super) fn owed_count(&self) -> u16 {
        self.record.as_ref().map_or(0, |record| record.owed_count())
    }

    fn judge(&mut self) {
        self.is_plain = self.fault.is_none() && self.owed_count() == 0;
    }

    /// Pops owed chains, the oldest first: a former process has popped them and not returned them.
    /// Pops none if the ring has a fault.
    #[cold]
    pub(super) fn pop_owed(&mut self, batch: &mut Batch, max: usize) -> usize {
        if self.fault.is_some() {
            return 0;
        }
        let in_flight = self.in_flight;
        pop_again(self, batch, max, |ring, batch, empty| {
            let head = ring.record.as_ref()?.first_owed()?;
            if !ring.heads.mark(head) {
                return Some(Err(QueueError::InFlight { head }));
            }
            let walked = ring.walk_again(head, batch, empty);
            Some(walked.map(|()| {
                if let Some(record) = &mut ring.record {
                    record.pop_owed();
                }
            }))
        });
        self.judge();
        if self.features.in_order {
            self.order.note(batch, self.used_idx, in_flight + self.aside.count());
        }
        self.mark_taken(batch);
        batch.entries.len()
    }

    /// As [`Ring::put_back_owed`]. The owed chains lie in the available ring from the used index
    /// on, unless a chain behind one of them was returned.
    pub(super) fn put_owed_back(&mut self) -> bool {
        if self.fault.is_some() || self.in_flight + self.order.count() + self.aside.count() > 0 {
            return false;
        }
        let Some(record) = &self.record else { return false };
        let first = self.last_avail.wrapping_sub(record.owed_count());
        let lie = (0..record.owed_count()).rev().map(|n| {
            let index = first.wrapping_add(n) & (self.size - 1);
            self.areas.avail.load_u16(avail_entry(index))
        });
        let newest_first: Vec<u16> = lie.collect();
        if !are_same(&newest_first, record.all_owed()) {
            return false;
        }
        if self.marks.is_some() && !touch_owed(self) {
            return false;
        }
        if let Some(record) = &mut self.record {
            record.put_back_owed(newest_first.into_iter());
        }
        self.last_avail = first;
        self.judge();
        true
    }

    /// Gives the chains of a batch their order, and records them as taken; `others` chains were in
    /// flight before. Not inlined, so that queues without `is_noted` reserve no registers for it.
    #[inline(never)]
    pub(super) fn note_taken(&mut self, batch: &Batch, others: u16) {
        if self.features.in_order {
            self.order.note(batch, self.used_idx, others + self.aside.count());
        }
        if let Some(record) = &mut self.record {
            let chains = batch.entries.iter().filter_map(|entry| entry.chain.as_ref());
            chains.for_each(|chain| record.taken(chain.slot()));
        }
        self.mark_taken(batch);
    }

    /// As [`Ring::publish`], while `is_noted`. Cold, for the reason given at `push_noted`.
    #[cold]
    pub(super) fn publish_noted(&mut self) -> u16 {
        while let Some(UsedEntry { slot: head, written }) = self.order.take(self.used_idx) {
            if let Some(record) = &mut self.record {
                record.answered(head);
            }
            self.write_used(head, written);
        }
        if let Some(marks) = &mut self.marks {
            marks.publishes();
        }
        let count = self.publish_written();
        if count != 0
            && let Some(record) = &mut self.record
        {
            record.published(self.used_idx);
        }
        if count != 0 {
            self.mark_used(count);
        }
        count
    }

    /// Records that a chain was put back. False: it is owed, and does not lie in the ring.
    #[inline]
    pub(super) fn record_put_back(&mut self, head: u16) -> bool {
        let Some(record) = &mut self.record else { return true };
        let is_in_ring = record.put_back(head);
        self.judge();
        is_in_ring
    }

    /// Returns a chain, or lets it wait for an earlier one, while `is_noted`. Cold, so that rings
    /// which note nothing reserve no registers for it.
    #[cold]
    pub(super) fn push_noted(&mut self, head: u16, written: u32) {
        if let Some(marks) = &mut self.marks {
            marks.answered(head);
        }
        if self.features.in_order
            && !self.order.is_due(UsedEntry { slot: head, written }, self.used_idx)
        {
            return;
        }
        if let Some(record) = &mut self.record {
            record.answered(head);
        }
        self.write_used(head, written);
    }
}

/// True if both lists have the same heads, in any order.
fn are_same(these: &[u16], others: &[u16]) -> bool {
    let sorted = |heads: &[u16]| {
        let mut heads = heads.to_vec();
        heads.sort_unstable();
        heads
    };
    sorted(these) == sorted(others)
}
