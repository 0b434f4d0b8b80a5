//! How the device half of a packed ring is built.

use super::PackedDeviceHalf;
use super::kept_chains::KeptChains;
use crate::aside::Aside;
use crate::config::{QueueConfig, RingAreas};
use crate::error::QueueError;
use crate::order::Order;
use crate::record::packed::PackedInflight;
use crate::ring::Ring;
use manyring_memory::{GuestMemory, LastHit, Words};
use std::sync::Arc;

impl PackedDeviceHalf {
    /// Builds the queue of `config` in `memory`.
    ///
    /// # Errors
    /// [`QueueError::PackedSize`], [`QueueError::PackedBase`], [`QueueError::Ring`].
    pub fn new(config: QueueConfig, memory: Arc<GuestMemory>) -> Result<Self, QueueError> {
        let mut queue = Self::unread(config, memory)?;
        queue.begin();
        Ok(queue)
    }

    /// Builds the queue of `config` in `memory` without a look at the memory: [`Ring::begin`] must
    /// be called before anything else.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn unread(config: QueueConfig, memory: Arc<GuestMemory>) -> Result<Self, QueueError> {
        QueueConfig::check_packed_size(config.size)?;
        let areas = config.addresses.resolve_packed(config.size, &memory)?;
        let mut queue = Self::with_areas(config, areas, memory)?;
        queue.log_from_here(config.addresses);
        Ok(queue)
    }

    /// Builds the queue on areas that are already resolved (tests, loom).
    ///
    /// # Errors
    /// [`QueueError::PackedBase`].
    pub fn with_areas(
        config: QueueConfig,
        areas: RingAreas,
        memory: Arc<GuestMemory>,
    ) -> Result<Self, QueueError> {
        let (size, in_order) = (config.size, config.features.in_order);
        let next = config.base.packed(size)?;
        Ok(Self {
            areas,
            memory,
            last_hit: LastHit::default(),
            size,
            features: config.features,
            avail: next,
            used: next,
            first: None,
            pushed: 0,
            unsignalled: 0,
            given: 0,
            has_more: false,
            event_written: None,
            in_flight: 0,
            held: 0,
            unshown: 0,
            has_begun: false,
            is_unsure: config.base.bits() == 0,
            slots: KeptChains::default(),
            aside: Aside::default(),
            order: Order::new(if in_order { size.next_power_of_two() } else { 0 }),
            record: None,
            trail: None,
            former: None,
            marks: None,
            event_marks: None,
            owed: Vec::new(),
            again: 0,
            is_noted: in_order,
            is_plain: true,
            fault: None,
        })
    }

    /// Records the chains that are popped and not returned in `region`, of
    /// [`packed_inflight_size`](crate::packed_inflight_size) bytes. If a former process has left a
    /// record there, the ring goes on where that process was killed. [`Ring::begin`] is the first
    /// to read the region.
    #[must_use]
    pub fn recorded(mut self, region: Option<Words>) -> Self {
        debug_assert!(region.is_none() || !self.has_begun, "the base would be used");
        self.record = region.map(|words| Box::new(PackedInflight::new(words)));
        self.is_noted = self.features.in_order || self.record.is_some() || self.marks.is_some();
        self
    }

    /// As [`DeviceQueue::in_own_region`](crate::DeviceQueue::in_own_region).
    #[must_use]
    pub fn in_own_region(mut self) -> Self {
        self.record = self.record.map(|record| Box::new(record.in_own_region()));
        self
    }

    /// Has [`Ring::begin`] empty `region`, the record of an earlier ring. This ring does not update
    /// that record, so no later ring may go on from it.
    #[must_use]
    pub fn clearing(mut self, region: Option<Words>) -> Self {
        self.former = region.map(Box::new);
        self
    }
}
