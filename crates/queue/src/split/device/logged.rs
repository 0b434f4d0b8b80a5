//! A split ring that marks the pages it writes in a migration log (docs/design/0020).

use super::SplitDeviceHalf;
use crate::chain::Batch;
use crate::record::marks::DirtyMarks;
use manyring_wire::virtqueue::{RING_IDX, used_entry, used_ring_size};

impl SplitDeviceHalf {
    /// From now on marks the writes to the used ring, at the front-end's address `used`, in the
    /// snapshot's log, if there is one. If the ring has begun, marks all of the used ring at once.
    pub(super) fn log_from_here(&mut self, used: u64) {
        let len = used_ring_size(self.size);
        self.marks = DirtyMarks::new(&self.memory, used, len, self.marks.take());
        self.is_noted = self.features.in_order || self.record.is_some() || self.marks.is_some();
        if let (true, Some(marks)) = (self.has_begun, &self.marks) {
            marks.wrote_all();
        }
    }

    /// Notes the pages of the chains of a batch, which were just popped.
    pub(super) fn mark_taken(&mut self, batch: &Batch) {
        if let Some(marks) = &mut self.marks {
            marks.taken(batch);
        }
    }

    /// Marks the pages of a chain that is put back, set aside or discarded.
    #[inline]
    pub(super) fn mark_put_back(&mut self, head: u16) {
        if let Some(marks) = &mut self.marks {
            marks.put_back(head);
        }
    }

    /// Marks the `count` used entries that were published last, and the used index.
    pub(super) fn mark_used(&self, count: u16) {
        let Some(marks) = &self.marks else { return };
        let mask = self.size - 1;
        let (first, last) =
            (self.used_idx.wrapping_sub(count) & mask, self.used_idx.wrapping_sub(1) & mask);
        let entries = |first: u16, last: u16| {
            marks.wrote(used_entry(first), used_entry(last + 1) - used_entry(first));
        };
        if first <= last {
            entries(first, last);
        } else {
            entries(first, mask);
            entries(0, last);
        }
        marks.wrote(RING_IDX, size_of::<u16>());
    }
}
