//! How the device half of a split ring is built.

use super::SplitDeviceHalf;
use crate::aside::Aside;
use crate::config::{QueueConfig, RingAreas};
use crate::error::QueueError;
use crate::order::Order;
use crate::ring::Ring;
use crate::split::heads::Heads;
use manyring_memory::{GuestMemory, LastHit};
use std::sync::Arc;

impl SplitDeviceHalf {
    /// Builds the queue of `config` in `memory`, and reads from the ring where it goes on.
    ///
    /// # Errors
    /// [`QueueError::Size`], [`QueueError::Base`], [`QueueError::Ring`].
    pub fn new(config: QueueConfig, memory: Arc<GuestMemory>) -> Result<Self, QueueError> {
        let mut queue = Self::unread(config, memory)?;
        queue.begin();
        Ok(queue)
    }

    /// Builds the queue of `config` in `memory` without reading the memory: [`Ring::begin`] must be
    /// called before anything else.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn unread(config: QueueConfig, memory: Arc<GuestMemory>) -> Result<Self, QueueError> {
        QueueConfig::check_size(config.size)?;
        let areas = config.addresses.resolve(config.size, &memory)?;
        let mut queue = Self::unread_with_areas(config, areas, memory)?;
        queue.log_from_here(config.addresses.used);
        Ok(queue)
    }

    /// Builds the queue on areas that are already resolved (tests, loom).
    ///
    /// # Errors
    /// [`QueueError::Base`].
    pub fn with_areas(
        config: QueueConfig,
        areas: RingAreas,
        memory: Arc<GuestMemory>,
    ) -> Result<Self, QueueError> {
        let mut queue = Self::unread_with_areas(config, areas, memory)?;
        queue.begin();
        Ok(queue)
    }

    fn unread_with_areas(
        config: QueueConfig,
        areas: RingAreas,
        memory: Arc<GuestMemory>,
    ) -> Result<Self, QueueError> {
        let base = config.base.split()?;
        Ok(Self {
            areas,
            memory,
            last_hit: LastHit::default(),
            size: config.size,
            features: config.features,
            last_avail: base,
            avail_idx: base,
            used_idx: 0,
            published_idx: 0,
            signalled_idx: 0,
            event_written: None,
            in_flight: 0,
            has_begun: false,
            heads: Heads::default(),
            aside: Aside::default(),
            order: Order::new(if config.features.in_order { config.size } else { 0 }),
            record: None,
            former: None,
            marks: None,
            is_noted: config.features.in_order,
            is_plain: true,
            fault: None,
        })
    }
}
