//! Rings. Both halves of each: the device half we serve, the driver half of tests and bench.
//!
//! transport -> **queue** -> device -> backend. A queue answers and never calls: the worker pops
//! batches of [`Chain`]s, does the work, pushes each chain back exactly once, publishes, and asks
//! whether the driver wants a notification.
//!
//! ```text
//! pop_batch -> Chain, Chain, ..   (checked once; a driver's fault is latched, reported once)
//! push_used(chain, written)       (shadow entries)
//! publish                         (one release store)
//! needs_notification              (flags or EVENT_IDX, with the full fence inside)
//! enable_notifications            (with the look again inside: true means "do not sleep")
//! ```
//! [`DeviceQueue`] and [`DriverQueue`] are enums over the ring format: one match per batch.
//! Nothing above this crate can tell the formats apart.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod base;
mod chain;
mod config;
mod error;
pub mod split;

pub use base::Base;
pub use chain::{BATCH_CHAINS, Batch, Chain};
pub use config::{QueueConfig, RingAddresses, RingFeatures};
pub use error::QueueError;

use manyring_memory::{GuestMemory, MemoryError};
use std::sync::Arc;

/// The device half of a virtqueue.
#[derive(Debug)]
pub enum DeviceQueue {
    /// A split virtqueue (virtio 1.3 §2.7).
    Split(split::DeviceHalf),
}

/// Calls the same method of whichever format the queue has.
macro_rules! each {
    ($self:ident, $queue:ident => $call:expr) => {
        match $self {
            Self::Split($queue) => $call,
        }
    };
}

impl DeviceQueue {
    /// Builds the queue that `config` describes, in `memory`.
    ///
    /// # Errors
    /// [`QueueError::Size`], [`QueueError::Base`] if a ring of this format has no such base, or
    /// [`QueueError::Ring`] if a ring area is not in memory.
    pub fn new(config: QueueConfig, memory: Arc<GuestMemory>) -> Result<Self, QueueError> {
        Ok(Self::Split(split::DeviceHalf::new(config, memory)?))
    }

    /// Pops up to `max` chains, and no more than [`BATCH_CHAINS`], into `batch`, which is emptied
    /// first. Returns how many. A fault of the driver is latched: the chains before it are
    /// delivered, then no more come, and [`Self::fault`] tells.
    #[inline]
    pub fn pop_batch(&mut self, batch: &mut Batch, max: usize) -> usize {
        each!(self, queue => queue.pop_batch(batch, max))
    }

    /// Puts back the chain that was popped last, untouched.
    pub fn unpop(&mut self, chain: Chain) {
        each!(self, queue => queue.unpop(chain));
    }

    /// Returns a chain to the driver with `written` bytes in it. Seen after [`Self::publish`].
    #[inline]
    pub fn push_used(&mut self, chain: Chain, written: u32) {
        each!(self, queue => queue.push_used(chain, written));
    }

    /// Gives up a chain of a queue that is broken: the driver never gets it back.
    pub fn discard(&mut self, chain: Chain) {
        each!(self, queue => queue.discard(chain));
    }

    /// Makes all pushed chains visible. Returns how many there were.
    #[inline]
    pub fn publish(&mut self) -> u16 {
        each!(self, queue => queue.publish())
    }

    /// After a publish: does the driver want a used buffer notification?
    #[inline]
    pub fn needs_notification(&mut self) -> bool {
        each!(self, queue => queue.needs_notification())
    }

    /// Asks for available buffer notifications and looks again. True: there is work, do not sleep.
    pub fn enable_notifications(&mut self) -> bool {
        each!(self, queue => queue.enable_notifications())
    }

    /// Asks for no available buffer notifications (with EVENT_IDX: does nothing, the event lies
    /// behind).
    pub fn disable_notifications(&mut self) {
        each!(self, queue => queue.disable_notifications());
    }

    /// True if the driver has made buffers available that were not popped.
    #[inline]
    pub fn has_available(&mut self) -> bool {
        each!(self, queue => queue.has_available())
    }

    /// The latched fault of the driver, if any.
    #[must_use]
    pub fn fault(&self) -> Option<QueueError> {
        each!(self, queue => queue.fault())
    }

    /// Latches a fault that a device found in a request: the queue stops.
    pub fn latch_fault(&mut self, fault: QueueError) {
        each!(self, queue => queue.latch_fault(fault));
    }

    /// Where the ring goes on after what was popped: what `GET_VRING_BASE` returns.
    #[must_use]
    pub fn base(&self) -> Base {
        each!(self, queue => queue.base())
    }

    /// Chains popped and neither pushed nor put back.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        each!(self, queue => queue.in_flight())
    }

    /// Entries of the ring.
    #[must_use]
    pub fn size(&self) -> u16 {
        each!(self, queue => queue.size())
    }

    /// Chains the driver has made available and the device has not popped, as last seen.
    #[must_use]
    pub fn available_count(&self) -> u16 {
        each!(self, queue => queue.available_count())
    }

    /// The snapshot that chains are resolved in.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        each!(self, queue => queue.memory())
    }

    /// Resolves the ring again, at new addresses or in a new snapshot.
    ///
    /// # Errors
    /// [`QueueError::Ring`]; the queue is then unchanged.
    pub fn relocate(
        &mut self,
        addresses: RingAddresses,
        memory: Arc<GuestMemory>,
    ) -> Result<(), QueueError> {
        each!(self, queue => queue.relocate(addresses, memory))
    }
}

/// The driver half of a virtqueue.
#[derive(Debug)]
pub enum DriverQueue {
    /// A split virtqueue (virtio 1.3 §2.7).
    Split(split::DriverHalf),
}

impl DriverQueue {
    /// Builds an empty queue of `config` in `memory` and clears its ring.
    ///
    /// # Errors
    /// [`QueueError::Size`], [`QueueError::Base`], [`QueueError::Ring`].
    pub fn new(config: QueueConfig, memory: &GuestMemory) -> Result<Self, QueueError> {
        Ok(Self::Split(split::DriverHalf::new(config, memory)?))
    }

    /// Adds a chain: the device reads `readable` and writes `writable`, (guest address, bytes)
    /// each. Returns its id, or `None` if the ring is full. Seen after [`Self::publish`].
    pub fn add(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> Option<u16> {
        each!(self, queue => queue.add(readable, writable))
    }

    /// Adds a chain by one indirect descriptor whose table is written at `table` (§2.7.5.3).
    pub fn add_indirect(
        &mut self,
        readable: &[(u64, u32)],
        writable: &[(u64, u32)],
        table: &IndirectTable,
    ) -> Option<u16> {
        each!(self, queue => queue.add_indirect(readable, writable, table))
    }

    /// Makes all added chains available. Returns true if the device wants a notification.
    pub fn publish(&mut self) -> bool {
        each!(self, queue => queue.publish())
    }

    /// Takes a used chain: its id and how many bytes the device wrote. Looks at the ring only when
    /// all chains that were seen before are taken.
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        each!(self, queue => queue.take_used())
    }

    /// Used chains that the last look has seen and that are not taken: all of them became visible
    /// before it, those of one frame together.
    #[must_use]
    pub fn used_count(&self) -> u16 {
        each!(self, queue => queue.used_count())
    }

    /// Asks for used buffer notifications and looks again. True: there is work, do not sleep.
    pub fn enable_notifications(&mut self) -> bool {
        each!(self, queue => queue.enable_notifications())
    }

    /// Asks for no used buffer notifications.
    pub fn disable_notifications(&mut self) {
        each!(self, queue => queue.disable_notifications());
    }

    /// Descriptors that are free.
    #[must_use]
    pub fn free_count(&self) -> u16 {
        each!(self, queue => queue.free_count())
    }
}

/// Guest memory for an indirect table: its address and its words.
#[derive(Clone, Debug)]
pub struct IndirectTable {
    /// Guest address of the table.
    pub addr: u64,
    /// The table's words.
    pub words: manyring_memory::Words,
}

impl From<MemoryError> for QueueError {
    fn from(error: MemoryError) -> Self {
        Self::Ring(error)
    }
}
