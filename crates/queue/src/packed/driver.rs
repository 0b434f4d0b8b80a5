//! The driver half of a packed virtqueue, the guest's part, for tests and bench.
//!
//! ```text
//! look:  from where the last look ended, while the descriptor is used: a chain is seen, and its
//!        descriptors are passed over
//! take:  the first chain that was seen; before that a look, if no chain is left
//! ```
//! Each used descriptor is read once. With `VIRTIO_F_IN_ORDER` a device may return a batch by a
//! single used descriptor, which has the id of the batch's last chain and lies where the first one
//! lay (§2.8.9). Then that chain is seen, and all chains that were made available before it. The
//! buffers of the latter count as written to their ends.

use crate::IndirectTable;
use crate::base::Base;
use crate::config::{QueueConfig, RingAreas};
use crate::error::QueueError;
use crate::features::RingFeatures;
use crate::place::{EVENT_DESC, EVENT_DISABLE, EVENT_ENABLE, Place, event_word, wants_event};
use manyring_memory::{GuestMemory, fence_full};
use manyring_wire::virtqueue::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESCRIPTOR_SIZE, Descriptor,
};
use std::collections::VecDeque;

/// A chain that the device has returned: its id, and the bytes that the device wrote.
#[derive(Clone, Copy, Debug)]
struct UsedChain {
    id: u16,
    written: u32,
}

/// The driver half.
#[derive(Debug)]
pub struct PackedDriverHalf {
    areas: RingAreas,
    size: u16,
    features: RingFeatures,
    avail: Place,
    /// The place of the next used descriptor: behind the chains that were seen.
    used: Place,
    free_count: u16,
    free_ids: Vec<u16>,
    /// Descriptors made available whose used descriptor was not read yet.
    unseen: u16,
    /// Chains that were seen and not taken by the caller.
    seen: VecDeque<UsedChain>,
    /// Chains in flight, in order, each as if written to its end. Empty without
    /// `VIRTIO_F_IN_ORDER`.
    expected: VecDeque<UsedChain>,
    /// Number of descriptors of the chain with each id; 0 if the id is not in flight.
    counts: Vec<u16>,
    /// The first descriptor of the unpublished chains, not yet stored. Their other descriptors are
    /// in the ring already.
    first: Option<(Place, u64)>,
    moved: u16,
}

impl PackedDriverHalf {
    /// Builds an empty queue of `config` in `memory` and clears its ring.
    ///
    /// # Errors
    /// [`QueueError::PackedSize`], [`QueueError::PackedBase`], [`QueueError::Ring`].
    pub fn new(config: QueueConfig, memory: &GuestMemory) -> Result<Self, QueueError> {
        QueueConfig::check_packed_size(config.size)?;
        let areas = config.addresses.resolve_packed(config.size, memory)?;
        Self::with_areas(config, areas)
    }

    /// Builds an empty queue on areas that are already resolved, and clears its ring.
    ///
    /// # Errors
    /// [`QueueError::PackedBase`].
    pub fn with_areas(config: QueueConfig, areas: RingAreas) -> Result<Self, QueueError> {
        let (size, next) = (config.size, config.base.packed(config.size)?);
        areas.avail.store_u32(0, 0);
        areas.used.store_u32(0, 0);
        for at in 0..size {
            // Descriptors before `next` look used on this lap, the others on the lap before.
            let lap = Place { at, wrap: next.wrap == (at < next.at) };
            let desc = Descriptor { addr: 0, len: 0, flags: lap.used_flags(), next: 0 };
            areas.desc.store_u64(byte_of(lap), 0);
            areas.desc.store_u64(byte_of(lap) + 8, desc.emit_packed(0).1);
        }
        Ok(Self {
            areas,
            size,
            features: config.features,
            avail: next,
            used: next,
            free_count: size,
            free_ids: (0..size).rev().collect(),
            unseen: 0,
            seen: VecDeque::new(),
            expected: VecDeque::new(),
            counts: vec![0; usize::from(size)],
            first: None,
            moved: 0,
        })
    }

    /// See [`crate::DriverQueue::add`].
    pub fn add(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> Option<u16> {
        let count = readable.len() + writable.len();
        if count == 0 || count > usize::from(self.free_count) {
            return None;
        }
        let id = self.free_ids.pop()?;
        for (n, (addr, len, flags)) in (1..).zip(buffers(readable, writable)) {
            let more = if n < count { DESC_F_NEXT } else { 0 };
            self.write(Descriptor { addr, len, flags: flags | more, next: 0 }, id);
        }
        self.take_into_account(id, u16::try_from(count).ok()?, writable);
        Some(id)
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
        let id = self.free_ids.pop()?;
        for (n, (addr, len, flags)) in buffers(readable, writable).enumerate() {
            let (low, high) = Descriptor { addr, len, flags, next: 0 }.emit_packed(0);
            table.words.store_u64(n * DESCRIPTOR_SIZE, low);
            table.words.store_u64(n * DESCRIPTOR_SIZE + 8, high);
        }
        let len = u32::try_from(table_size).ok()?;
        self.write(Descriptor { addr: table.addr, len, flags: DESC_F_INDIRECT, next: 0 }, id);
        self.take_into_account(id, 1, writable);
        Some(id)
    }

    fn take_into_account(&mut self, id: u16, count: u16, writable: &[(u64, u32)]) {
        self.counts[usize::from(id)] = count;
        self.free_count -= count;
        self.unseen += count;
        self.moved += count;
        if self.features.in_order {
            let written = writable.iter().map(|&(_, len)| len).sum();
            self.expected.push_back(UsedChain { id, written });
        }
    }

    /// Writes the next descriptor; the first one of an unpublished burst is held back.
    fn write(&mut self, desc: Descriptor, id: u16) {
        let flags = desc.flags | self.avail.avail_flags();
        let (low, high) = Descriptor { flags, ..desc }.emit_packed(id);
        self.areas.desc.store_u64(byte_of(self.avail), low);
        if self.first.is_none() {
            self.first = Some((self.avail, high));
        } else {
            self.areas.desc.store_u64(byte_of(self.avail) + 8, high);
        }
        self.avail = self.avail.add(1, self.size);
    }

    /// See [`crate::DriverQueue::publish`].
    pub fn publish(&mut self) -> bool {
        let Some((place, word)) = self.first.take() else { return false };
        // Release: the descriptors behind the first one are written before it.
        self.areas.desc.store_u64_release(byte_of(place) + 8, word);
        // Full fence: mirrors the one in the device half's `enable_notifications`.
        fence_full();
        let moved = std::mem::take(&mut self.moved);
        let word = self.areas.used.load_u32(0);
        wants_event(word, self.features.event_idx, self.avail, moved, self.size)
    }

    /// The chain of the next used descriptor; `None` if that descriptor is not used yet.
    #[allow(clippy::cast_possible_truncation, reason = "the fields are taken out by shifts")]
    fn next_used(&self) -> Option<UsedChain> {
        // Acquire: what the device wrote before it published this descriptor is read after it.
        let high = self.areas.desc.load_u64_acquire(byte_of(self.used) + 8);
        let is_used = self.unseen > 0 && self.used.is_used((high >> 48) as u16);
        is_used.then_some(UsedChain { id: (high >> 32) as u16, written: high as u32 })
    }

    /// Passes over all used descriptors, and notes their chains as seen.
    fn look(&mut self) {
        while let Some(returned) = self.next_used() {
            // The earlier chains of a batch that the device returned by its last chain.
            while self.features.in_order
                && let Some(skipped) = self.expected.pop_front()
                && skipped.id != returned.id
            {
                self.see(skipped);
            }
            self.see(returned);
        }
    }

    fn see(&mut self, returned: UsedChain) {
        let count = self.counts.get(usize::from(returned.id)).copied().unwrap_or(0);
        // A device that returns a chain twice would corrupt the list of ids.
        let is_open = count > 0 && count <= self.unseen;
        assert!(is_open, "the device returned chain {}, which is not in flight", returned.id);
        self.unseen -= count;
        self.used = self.used.add(count, self.size);
        self.seen.push_back(returned);
    }

    /// See [`crate::DriverQueue::take_used`].
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        if self.seen.is_empty() {
            self.look();
        }
        let UsedChain { id, written } = self.seen.pop_front()?;
        let count = std::mem::take(&mut self.counts[usize::from(id)]);
        assert!(count > 0, "the device returned chain {id} twice");
        self.free_ids.push(id);
        self.free_count += count;
        Some((id, written))
    }

    /// See [`crate::DriverQueue::used_count`].
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "at most the ring's size")]
    pub fn used_count(&self) -> u16 {
        self.seen.len() as u16
    }

    /// See [`crate::DriverQueue::enable_notifications`].
    pub fn enable_notifications(&mut self) -> bool {
        let word = if self.features.event_idx {
            event_word(self.used.bits(), EVENT_DESC)
        } else {
            event_word(0, EVENT_ENABLE)
        };
        self.areas.avail.store_u32(0, word);
        // Full fence: mirrors the one in the device half's `needs_notification`.
        fence_full();
        !self.seen.is_empty() || self.next_used().is_some()
    }

    /// See [`crate::DriverQueue::disable_notifications`].
    pub fn disable_notifications(&mut self) {
        self.areas.avail.store_u32(0, event_word(0, EVENT_DISABLE));
    }

    /// See [`crate::DriverQueue::resume_base`].
    pub fn resume_base(&mut self) -> Base {
        self.look();
        Base::of_packed(self.used, self.used)
    }

    /// See [`crate::DriverQueue::free_count`].
    #[must_use]
    pub fn free_count(&self) -> u16 {
        self.free_count
    }
}

fn byte_of(place: Place) -> usize {
    usize::from(place.at) * DESCRIPTOR_SIZE
}

/// All buffers of a chain with their flags, readable ones first.
fn buffers<'a>(
    readable: &'a [(u64, u32)],
    writable: &'a [(u64, u32)],
) -> impl Iterator<Item = (u64, u32, u16)> + 'a {
    let readable = readable.iter().map(|&(addr, len)| (addr, len, 0));
    readable.chain(writable.iter().map(|&(addr, len)| (addr, len, DESC_F_WRITE)))
}
