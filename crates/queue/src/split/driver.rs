//! The driver half of a split virtqueue, the guest's part, for tests and bench.

use crate::IndirectTable;
use crate::base::Base;
use crate::config::{QueueConfig, RingAreas};
use crate::error::QueueError;
use crate::features::RingFeatures;
use manyring_memory::{GuestMemory, fence_full};
use manyring_wire::virtqueue::{
    AVAIL_F_NO_INTERRUPT, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESCRIPTOR_SIZE, Descriptor,
    RING_FLAGS, RING_IDX, USED_F_NO_NOTIFY, avail_entry, avail_event, need_event, used_entry,
    used_event,
};

/// The driver half.
#[derive(Debug)]
pub struct SplitDriverHalf {
    areas: RingAreas,
    size: u16,
    features: RingFeatures,
    /// The free list: the next free descriptor of each free one.
    next_free: Vec<u16>,
    /// The number of descriptors of the chain of each head; 0 if the head is not in flight.
    chain_len: Vec<u16>,
    free_head: u16,
    free_count: u16,
    /// The head that is returned next, if chains are returned in order.
    oldest: u16,
    avail_idx: u16,
    published_idx: u16,
    last_used: u16,
    /// The device's used index as last read: once per batch, to fetch its cache line only once.
    used_idx: u16,
}

impl SplitDriverHalf {
    /// Builds an empty queue of `config` in `memory` and clears its ring.
    ///
    /// # Errors
    /// [`QueueError::Size`], [`QueueError::Base`], [`QueueError::Ring`].
    pub fn new(config: QueueConfig, memory: &GuestMemory) -> Result<Self, QueueError> {
        QueueConfig::check_size(config.size)?;
        let base = config.base.split()?;
        let areas = config.addresses.resolve(config.size, memory)?;
        areas.avail.store_u16(RING_FLAGS, 0);
        areas.avail.store_u16(used_event(config.size), 0);
        areas.used.store_u16(RING_FLAGS, 0);
        areas.used.store_u16(avail_event(config.size), 0);
        areas.used.store_u16(RING_IDX, base);
        areas.avail.store_u16_release(RING_IDX, base);
        Self::with_areas(config, areas)
    }

    /// Builds an empty queue on areas that are already resolved and clear (tests, loom).
    ///
    /// # Errors
    /// [`QueueError::Base`].
    pub fn with_areas(config: QueueConfig, areas: RingAreas) -> Result<Self, QueueError> {
        let (size, base) = (config.size, config.base.split()?);
        Ok(Self {
            areas,
            size,
            features: config.features,
            next_free: (1..=size).map(|i| i & (size - 1)).collect(),
            chain_len: vec![0; usize::from(size)],
            free_head: 0,
            free_count: size,
            oldest: 0,
            avail_idx: base,
            published_idx: base,
            last_used: base,
            used_idx: base,
        })
    }

    /// See [`crate::DriverQueue::add`].
    pub fn add(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> Option<u16> {
        let count = readable.len() + writable.len();
        if count == 0 || count > usize::from(self.free_count) {
            return None;
        }
        let head = self.free_head;
        let mut index = head;
        for (n, (addr, len, flags)) in buffers(readable, writable).enumerate() {
            let next = self.next_free[usize::from(index)];
            let more = if n + 1 < count { DESC_F_NEXT } else { 0 };
            self.write_descriptor(index, Descriptor { addr, len, flags: flags | more, next });
            index = next;
        }
        self.make_available(head, u16::try_from(count).ok()?, index);
        Some(head)
    }

    /// See [`crate::DriverQueue::add_indirect`].
    pub fn add_indirect(
        &mut self,
        readable: &[(u64, u32)],
        writable: &[(u64, u32)],
        table: &IndirectTable,
    ) -> Option<u16> {
        let count = readable.len() + writable.len();
        let table_size = count * DESCRIPTOR_SIZE;
        if count == 0 || self.free_count == 0 || table_size > table.words.size() {
            return None;
        }
        for (n, (addr, len, flags)) in buffers(readable, writable).enumerate() {
            let more = if n + 1 < count { DESC_F_NEXT } else { 0 };
            let next = u16::try_from(n + 1).ok()?;
            let (low, high) = Descriptor { addr, len, flags: flags | more, next }.emit();
            table.words.store_u64(n * DESCRIPTOR_SIZE, low);
            table.words.store_u64(n * DESCRIPTOR_SIZE + 8, high);
        }
        let head = self.free_head;
        let len = u32::try_from(table_size).ok()?;
        let next = self.next_free[usize::from(head)];
        let desc = Descriptor { addr: table.addr, len, flags: DESC_F_INDIRECT, next: 0 };
        self.write_descriptor(head, desc);
        self.make_available(head, 1, next);
        Some(head)
    }

    fn write_descriptor(&self, index: u16, desc: Descriptor) {
        let at = usize::from(index) * DESCRIPTOR_SIZE;
        let (low, high) = desc.emit();
        self.areas.desc.store_u64(at, low);
        self.areas.desc.store_u64(at + 8, high);
    }

    fn make_available(&mut self, head: u16, count: u16, next_free: u16) {
        self.chain_len[usize::from(head)] = count;
        self.free_head = next_free;
        self.free_count -= count;
        let slot = self.avail_idx & (self.size - 1);
        self.areas.avail.store_u16(avail_entry(slot), head);
        self.avail_idx = self.avail_idx.wrapping_add(1);
    }

    /// See [`crate::DriverQueue::publish`].
    pub fn publish(&mut self) -> bool {
        let (new, old) = (self.avail_idx, self.published_idx);
        if new == old {
            return false;
        }
        // Release: the descriptors and entries come first.
        self.areas.avail.store_u16_release(RING_IDX, new);
        self.published_idx = new;
        // Full fence: mirrors the one in the device half's `enable_notifications`.
        fence_full();
        if self.features.event_idx {
            need_event(self.areas.used.load_u16(avail_event(self.size)), new, old)
        } else {
            self.areas.used.load_u16(RING_FLAGS) & USED_F_NO_NOTIFY == 0
        }
    }

    /// See [`crate::DriverQueue::take_used`].
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        if self.used_idx == self.last_used {
            // Acquire: the used entry is read after the index that covers it.
            self.used_idx = self.areas.used.load_u16_acquire(RING_IDX);
            if self.used_idx == self.last_used {
                return None;
            }
        }
        let slot = self.last_used & (self.size - 1);
        let (id, written) = self.areas.used.load_pair(used_entry(slot));
        let head = u16::try_from(id).ok().filter(|id| *id < self.size)?;
        self.last_used = self.last_used.wrapping_add(1);
        let count = std::mem::take(&mut self.chain_len[usize::from(head)]);
        // A device that returns a chain twice would corrupt the free list.
        assert!(count > 0, "the device returned chain {head}, which is not in flight");
        if self.features.in_order {
            assert_eq!(head, self.oldest, "the device returned a chain before its turn");
            self.oldest = (head + count) & (self.size - 1);
            // The list of free descriptors stays as it began: one after the other (§2.7.5.2).
            self.free_count += count;
        } else {
            self.free_chain(head, count);
        }
        Some((head, written))
    }

    /// See [`crate::DriverQueue::used_count`].
    #[must_use]
    pub fn used_count(&self) -> u16 {
        self.used_idx.wrapping_sub(self.last_used)
    }

    fn free_chain(&mut self, head: u16, count: u16) {
        let mut last = head;
        for _ in 1..count {
            last = self.next_free[usize::from(last)];
        }
        self.next_free[usize::from(last)] = self.free_head;
        self.free_head = head;
        self.free_count += count;
    }

    /// See [`crate::DriverQueue::enable_notifications`].
    pub fn enable_notifications(&mut self) -> bool {
        if self.features.event_idx {
            self.areas.avail.store_u16(used_event(self.size), self.last_used);
        } else {
            self.areas.avail.store_u16(RING_FLAGS, 0);
        }
        // Full fence: mirrors the one in the device half's `needs_notification`.
        fence_full();
        self.areas.used.load_u16_acquire(RING_IDX) != self.last_used
    }

    /// See [`crate::DriverQueue::disable_notifications`].
    pub fn disable_notifications(&mut self) {
        if self.features.event_idx {
            let behind = self.last_used.wrapping_sub(1);
            self.areas.avail.store_u16(used_event(self.size), behind);
        } else {
            self.areas.avail.store_u16(RING_FLAGS, AVAIL_F_NO_INTERRUPT);
        }
    }

    /// See [`crate::DriverQueue::resume_base`].
    pub fn resume_base(&mut self) -> Base {
        self.areas.used.load_u16_acquire(RING_IDX).into()
    }

    /// See [`crate::DriverQueue::free_count`].
    #[must_use]
    pub fn free_count(&self) -> u16 {
        self.free_count
    }
}

/// All buffers of a chain with their flags, readable ones first.
fn buffers<'a>(
    readable: &'a [(u64, u32)],
    writable: &'a [(u64, u32)],
) -> impl Iterator<Item = (u64, u32, u16)> + 'a {
    let readable = readable.iter().map(|&(addr, len)| (addr, len, 0));
    readable.chain(writable.iter().map(|&(addr, len)| (addr, len, DESC_F_WRITE)))
}
