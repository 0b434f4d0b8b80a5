//! A packed ring that marks the pages it writes in a migration log (docs/design/0020).

use super::{PackedDeviceHalf, byte_of};
use crate::chain::Batch;
use crate::config::RingAddresses;
use crate::place::Place;
use crate::record::marks::DirtyMarks;
use manyring_wire::virtqueue::{DESCRIPTOR_SIZE, EVENT_SIZE, desc_table_size};

impl PackedDeviceHalf {
    /// From now on marks the writes to the ring at `addresses` in the snapshot's log, if there is
    /// one. If the ring has begun, marks all of it at once; else
    /// [`Ring::begin`](crate::Ring::begin) does.
    pub(super) fn log_from_here(&mut self, addresses: RingAddresses) {
        let (ring, len) = (addresses.descriptor, desc_table_size(self.size));
        self.marks = DirtyMarks::new(&self.memory, ring, len, self.marks.take());
        self.event_marks = DirtyMarks::new(&self.memory, addresses.used, EVENT_SIZE, None);
        self.is_noted = self.features.in_order || self.record.is_some() || self.marks.is_some();
        if self.has_begun {
            self.mark_all();
        }
    }

    /// Marks all of the ring: this process or a former one may have written any part of it.
    pub(super) fn mark_all(&self) {
        [&self.marks, &self.event_marks].into_iter().flatten().for_each(|marks| marks.wrote_all());
    }

    /// Notes the pages of the chains of a batch, which were just popped.
    pub(super) fn mark_taken(&mut self, batch: &Batch) {
        if let Some(marks) = &mut self.marks {
            marks.taken(batch);
        }
    }

    /// Marks the pages of a chain that is put back, set aside or discarded.
    #[inline]
    pub(super) fn mark_put_back(&mut self, slot: u16) {
        if let Some(marks) = &mut self.marks {
            marks.put_back(slot);
        }
    }

    /// Marks the used descriptors from `first` on, which were published last.
    pub(super) fn mark_used(&self, first: Place) {
        let Some(marks) = &self.marks else { return };
        let (from, to) = (byte_of(first), byte_of(self.used));
        if from < to {
            marks.wrote(from, to - from);
        } else {
            marks.wrote(from, usize::from(self.size) * DESCRIPTOR_SIZE - from);
            marks.wrote(0, to);
        }
    }
}
