//! `QueueConfig`: size, addresses, base, features; checked when the queue is built.

use crate::base::Base;
use crate::error::QueueError;
use crate::features::RingFeatures;
use manyring_memory::{GuestMemory, Words};
use manyring_wire::virtqueue::{
    AVAIL_ALIGN, DESC_ALIGN, EVENT_ALIGN, EVENT_SIZE, QUEUE_SIZE_MAX, USED_ALIGN, avail_ring_size,
    desc_table_size, used_ring_size,
};

/// Addresses of the three areas of a ring in the front-end's address space, as in `SET_VRING_ADDR`.
/// In a packed ring, `available` is the driver's event suppression area and `used` the device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAddresses {
    /// Descriptor table.
    pub descriptor: u64,
    /// Available ring.
    pub available: u64,
    /// Used ring.
    pub used: u64,
}

/// Everything that is needed to build a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Number of entries, at most 32768; a power of two for a split ring.
    pub size: u16,
    /// Addresses of the ring's areas.
    pub addresses: RingAddresses,
    /// The position at which the ring goes on.
    pub base: Base,
    /// The negotiated features that concern the ring.
    pub features: RingFeatures,
}

/// The areas of a ring as words of guest memory. In a packed ring, `avail` is the driver's event
/// suppression area and `used` the device's.
#[derive(Clone, Debug)]
pub struct RingAreas {
    /// Descriptor table.
    pub desc: Words,
    /// Available ring, `used_event` included.
    pub avail: Words,
    /// Used ring, `avail_event` included.
    pub used: Words,
}

impl QueueConfig {
    /// Checks the size of a packed ring, which may be no power of two.
    pub(crate) fn check_packed_size(size: u16) -> Result<(), QueueError> {
        if size != 0 && size <= QUEUE_SIZE_MAX {
            Ok(())
        } else {
            Err(QueueError::PackedSize { size })
        }
    }

    /// Checks the size of a split ring.
    pub(crate) fn check_size(size: u16) -> Result<(), QueueError> {
        if size.is_power_of_two() && size <= QUEUE_SIZE_MAX {
            Ok(())
        } else {
            Err(QueueError::Size { size })
        }
    }
}

impl RingAddresses {
    /// Resolves the areas of a packed ring of `size` descriptors.
    pub(crate) fn resolve_packed(
        self,
        size: u16,
        memory: &GuestMemory,
    ) -> Result<RingAreas, QueueError> {
        Ok(RingAreas {
            desc: memory.words(self.descriptor, desc_table_size(size), DESC_ALIGN)?,
            avail: memory.words(self.available, EVENT_SIZE, EVENT_ALIGN)?,
            used: memory.words(self.used, EVENT_SIZE, EVENT_ALIGN)?,
        })
    }

    /// Resolves the areas of a split ring of `size` entries.
    pub(crate) fn resolve(self, size: u16, memory: &GuestMemory) -> Result<RingAreas, QueueError> {
        Ok(RingAreas {
            desc: memory.words(self.descriptor, desc_table_size(size), DESC_ALIGN)?,
            avail: memory.words(self.available, avail_ring_size(size), AVAIL_ALIGN)?,
            used: memory.words(self.used, used_ring_size(size), USED_ALIGN)?,
        })
    }
}
