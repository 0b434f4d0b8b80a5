//! The chains of a split ring that were set aside: pops them again, or puts them back.

use super::SplitDeviceHalf;
use crate::aside::pop_again;
use crate::chain::{Batch, Chain, Entry};
use crate::error::QueueError;
use crate::walk::Walk;
use manyring_wire::virtqueue::avail_entry;

impl SplitDeviceHalf {
    /// As [`Chains::pop_aside`](crate::Chains::pop_aside).
    pub(super) fn walk_aside(&mut self, batch: &mut Batch, max: usize) -> usize {
        batch.restart(&self.memory);
        pop_again(self, batch, max, |ring, batch, empty| {
            let head = ring.aside.first()?;
            let walked = ring.walk_again(head, batch, empty);
            Some(walked.map(|()| _ = ring.aside.take_first()))
        });
        self.mark_taken(batch);
        batch.entries.len()
    }

    /// Pops a chain that does not lie in the ring. Not inlined: the walk of the other chains
    /// compiles to faster code without it.
    #[inline(never)]
    pub(super) fn walk_again(
        &mut self,
        head: u16,
        batch: &mut Batch,
        empty: &mut usize,
    ) -> Result<(), QueueError> {
        let start = batch.slices.len();
        let walk = self.walk_table(head, Walk::from(start), &mut batch.slices)?;
        *empty += walk.empty;
        let end = batch.slices.len();
        let border = walk.writable_at.min(end);
        batch.entries.push(Entry::new(Chain::new(head), start, border, end));
        self.in_flight += 1;
        Ok(())
    }

    /// As [`Ring::leave_aside`](crate::Ring::leave_aside).
    pub(super) fn forget_aside(&mut self) -> bool {
        // Chains behind one that is left to the next process could not be returned in order.
        let Some(record) = self.record.as_mut().filter(|_| !self.features.in_order) else {
            return false;
        };
        while let Some(head) = self.aside.take_first() {
            self.heads.clear(head);
            record.forget(head);
        }
        true
    }

    /// As [`Chains::unpop_aside`](crate::Chains::unpop_aside).
    pub(super) fn put_aside_back(&mut self) -> bool {
        let count = self.aside.count();
        if self.in_flight + self.order.count() + self.owed_count() > 0 {
            return false;
        }
        let first = self.last_avail.wrapping_sub(count);
        // The heads of the last chains in the available ring, the newest first. If these are not
        // exactly the chains set aside, a chain among them was answered.
        let popped_last = (0..count).rev().map(|n| {
            let index = first.wrapping_add(n) & (self.size - 1);
            self.areas.avail.load_u16(avail_entry(index))
        });
        let popped_last: Vec<u16> = popped_last.collect();
        if !self.aside.are(popped_last.iter().copied()) {
            return false;
        }
        while let Some(head) = self.aside.take_first() {
            self.heads.clear(head);
        }
        if let Some(record) = &mut self.record {
            for head in popped_last {
                record.forget(head);
                record.put_back(head);
            }
        }
        self.last_avail = first;
        true
    }
}
