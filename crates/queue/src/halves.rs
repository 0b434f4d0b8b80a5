//! `DeviceQueue` and `DriverQueue`: both halves of a virtqueue, whatever its ring's format.

use crate::base::Base;
use crate::chain::{Batch, Chain};
use crate::config::{QueueConfig, RingAddresses};
use crate::error::QueueError;
use crate::ring::{Chains, Ring};
use crate::{IndirectTable, packed, split};
use manyring_memory::{GuestMemory, Words};
use std::sync::Arc;

/// The device half of a virtqueue.
#[derive(Debug)]
pub enum DeviceQueue {
    /// A split virtqueue (virtio 1.3 §2.7).
    Split(split::SplitDeviceHalf),
    /// A packed virtqueue (§2.8).
    Packed(packed::PackedDeviceHalf),
}

/// Calls the same method of whichever format the queue has.
macro_rules! each {
    ($self:ident, $queue:ident => $call:expr) => {
        match $self {
            Self::Split($queue) => $call,
            Self::Packed($queue) => $call,
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
        Ok(match config.features.packed {
            false => Self::Split(split::SplitDeviceHalf::new(config, memory)?),
            true => Self::Packed(packed::PackedDeviceHalf::new(config, memory)?),
        })
    }

    /// Builds the queue as [`Self::new`] does, but reads nothing from `memory`: a page fault there
    /// can last as long as the front-end likes. For a thread that others wait for. [`Ring::begin`]
    /// must be called before anything else.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn unread(config: QueueConfig, memory: Arc<GuestMemory>) -> Result<Self, QueueError> {
        Ok(match config.features.packed {
            false => Self::Split(split::SplitDeviceHalf::unread(config, memory)?),
            true => Self::Packed(packed::PackedDeviceHalf::unread(config, memory)?),
        })
    }

    /// Records in `region` the chains that are popped and not returned. If `region` has the record
    /// of a former process, the ring goes on where that record says, not at the base. `former` is
    /// the region of an earlier ring that does not fit this ring: it is emptied, so that no later
    /// ring goes on from it. For a queue of [`Self::unread`]: [`Ring::begin`] reads both regions.
    #[must_use]
    pub fn recorded(self, region: Option<Words>, former: Option<Words>) -> Self {
        match self {
            Self::Split(queue) => Self::Split(queue.recorded(region).clearing(former)),
            Self::Packed(queue) => Self::Packed(queue.recorded(region).clearing(former)),
        }
    }

    /// Says that the record lies in a region which nobody else writes, and which is zero before a
    /// record begins. A new record then has only as many entries as the ring, and touches no page
    /// that it does not need. For a queue that is [`Self::recorded`].
    #[must_use]
    pub fn in_own_region(self) -> Self {
        match self {
            Self::Split(queue) => Self::Split(queue.in_own_region()),
            Self::Packed(queue) => Self::Packed(queue.in_own_region()),
        }
    }

    /// True if only the base says where the ring goes on: the queue has no record, or the record
    /// has not begun, and the ring is not [`Self::trailed`]. Reads the record.
    #[must_use]
    pub fn is_new(&self) -> bool {
        each!(self, queue => queue.has_only_base())
    }

    /// Makes a packed ring show in its descriptors where it goes on: chains are returned in order,
    /// and each of their descriptors is marked as used. [`Ring::begin`] then goes on at that place,
    /// not at the base: after a process was killed, the front-end's base may be stale. A split ring
    /// needs no such marks, since it has a used index. For a queue of [`Self::unread`]. A trailed
    /// packed ring has no record.
    #[must_use]
    pub fn trailed(self) -> Self {
        match self {
            Self::Split(queue) => Self::Split(queue),
            Self::Packed(queue) => Self::Packed(queue.trailed()),
        }
    }
}

impl Ring for DeviceQueue {
    fn begin(&mut self) -> bool {
        each!(self, queue => queue.begin())
    }

    #[inline]
    fn has_available(&mut self) -> bool {
        each!(self, queue => queue.has_available())
    }

    fn available_count(&self) -> u16 {
        each!(self, queue => queue.available_count())
    }

    fn in_flight(&self) -> u16 {
        each!(self, queue => queue.in_flight())
    }

    #[inline]
    fn waiting(&self) -> u16 {
        each!(self, queue => queue.waiting())
    }

    #[inline]
    fn aside(&self) -> u16 {
        each!(self, queue => queue.aside())
    }

    fn size(&self) -> u16 {
        each!(self, queue => queue.size())
    }

    fn base(&self) -> Base {
        each!(self, queue => queue.base())
    }

    #[inline]
    fn publish(&mut self) -> u16 {
        each!(self, queue => queue.publish())
    }

    #[inline]
    fn needs_notification(&mut self) -> bool {
        each!(self, queue => queue.needs_notification())
    }

    #[inline]
    fn wants_call_within(&self, chains: u16) -> bool {
        each!(self, queue => queue.wants_call_within(chains))
    }

    fn enable_notifications(&mut self) -> bool {
        each!(self, queue => queue.enable_notifications())
    }

    fn disable_notifications(&mut self) {
        each!(self, queue => queue.disable_notifications());
    }

    #[inline]
    fn fault(&self) -> Option<QueueError> {
        each!(self, queue => queue.fault())
    }

    fn latch_fault(&mut self, fault: QueueError) {
        each!(self, queue => queue.latch_fault(fault));
    }

    fn memory(&self) -> &Arc<GuestMemory> {
        each!(self, queue => queue.memory())
    }

    fn owed(&self) -> u16 {
        each!(self, queue => queue.owed())
    }

    fn owes(&self) -> bool {
        each!(self, queue => queue.owes())
    }

    fn put_back_owed(&mut self) -> bool {
        each!(self, queue => queue.put_back_owed())
    }

    fn leave_aside(&mut self) -> bool {
        each!(self, queue => queue.leave_aside())
    }

    fn is_broken(&self) -> bool {
        each!(self, queue => queue.is_broken())
    }

    fn relocate(
        &mut self,
        addresses: RingAddresses,
        memory: Arc<GuestMemory>,
    ) -> Result<(), QueueError> {
        each!(self, queue => queue.relocate(addresses, memory))
    }
}

impl Chains for DeviceQueue {
    #[inline]
    fn pop_batch(&mut self, batch: &mut Batch, max: usize) -> usize {
        each!(self, queue => queue.pop_batch(batch, max))
    }

    fn unpop(&mut self, chain: Chain) {
        each!(self, queue => queue.unpop(chain));
    }

    #[inline]
    fn push_used(&mut self, chain: Chain, written: u32) {
        each!(self, queue => queue.push_used(chain, written));
    }

    fn set_aside(&mut self, chain: Chain) {
        each!(self, queue => queue.set_aside(chain));
    }

    fn pop_aside(&mut self, batch: &mut Batch, max: usize) -> usize {
        each!(self, queue => queue.pop_aside(batch, max))
    }

    fn unpop_aside(&mut self) -> bool {
        each!(self, queue => queue.unpop_aside())
    }

    fn discard(&mut self, chain: Chain) {
        each!(self, queue => queue.discard(chain));
    }
}

/// Methods of [`Ring`] and [`Chains`], for callers that do not import the traits.
impl DeviceQueue {
    /// See [`Ring::has_available`].
    #[inline]
    pub fn has_available(&mut self) -> bool {
        Ring::has_available(self)
    }

    /// See [`Ring::available_count`].
    #[must_use]
    pub fn available_count(&self) -> u16 {
        Ring::available_count(self)
    }

    /// See [`Ring::in_flight`].
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        Ring::in_flight(self)
    }

    /// See [`Ring::size`].
    #[must_use]
    pub fn size(&self) -> u16 {
        Ring::size(self)
    }

    /// See [`Ring::base`].
    #[must_use]
    pub fn base(&self) -> Base {
        Ring::base(self)
    }

    /// See [`Ring::publish`].
    #[inline]
    pub fn publish(&mut self) -> u16 {
        Ring::publish(self)
    }

    /// See [`Ring::needs_notification`].
    #[inline]
    pub fn needs_notification(&mut self) -> bool {
        Ring::needs_notification(self)
    }

    /// See [`Ring::enable_notifications`].
    pub fn enable_notifications(&mut self) -> bool {
        Ring::enable_notifications(self)
    }

    /// See [`Ring::disable_notifications`].
    pub fn disable_notifications(&mut self) {
        Ring::disable_notifications(self);
    }

    /// See [`Ring::fault`].
    #[must_use]
    #[inline]
    pub fn fault(&self) -> Option<QueueError> {
        Ring::fault(self)
    }

    /// See [`Ring::latch_fault`].
    pub fn latch_fault(&mut self, fault: QueueError) {
        Ring::latch_fault(self, fault);
    }

    /// See [`Ring::memory`].
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        Ring::memory(self)
    }

    /// See [`Chains::pop_batch`].
    #[inline]
    pub fn pop_batch(&mut self, batch: &mut Batch, max: usize) -> usize {
        Chains::pop_batch(self, batch, max)
    }

    /// See [`Chains::unpop`].
    pub fn unpop(&mut self, chain: Chain) {
        Chains::unpop(self, chain);
    }

    /// See [`Chains::push_used`].
    #[inline]
    pub fn push_used(&mut self, chain: Chain, written: u32) {
        Chains::push_used(self, chain, written);
    }

    /// See [`Chains::discard`].
    pub fn discard(&mut self, chain: Chain) {
        Chains::discard(self, chain);
    }

    /// See [`Ring::relocate`].
    ///
    /// # Errors
    /// [`QueueError::Ring`].
    pub fn relocate(
        &mut self,
        addresses: RingAddresses,
        memory: Arc<GuestMemory>,
    ) -> Result<(), QueueError> {
        Ring::relocate(self, addresses, memory)
    }
}

/// The driver half of a virtqueue.
#[derive(Debug)]
pub enum DriverQueue {
    /// A split virtqueue (virtio 1.3 §2.7).
    Split(split::SplitDriverHalf),
    /// A packed virtqueue (§2.8).
    Packed(packed::PackedDriverHalf),
}

impl DriverQueue {
    /// Builds an empty queue of `config` in `memory` and clears its ring.
    ///
    /// # Errors
    /// [`QueueError::Size`], [`QueueError::Base`], [`QueueError::Ring`].
    pub fn new(config: QueueConfig, memory: &GuestMemory) -> Result<Self, QueueError> {
        Ok(match config.features.packed {
            false => Self::Split(split::SplitDriverHalf::new(config, memory)?),
            true => Self::Packed(packed::PackedDriverHalf::new(config, memory)?),
        })
    }

    /// Adds a chain: the device reads `readable` and writes `writable`, each a list of (guest
    /// address, bytes). Returns its id, or `None` if the ring is full. The device sees it after
    /// [`Self::publish`].
    pub fn add(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> Option<u16> {
        each!(self, queue => queue.add(readable, writable))
    }

    /// Adds a chain of one indirect descriptor, and writes its table at `table` (§2.7.5.3).
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

    /// Takes a used chain: its id and the bytes that the device wrote. Reads the ring only after
    /// all chains of the last read are taken.
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        each!(self, queue => queue.take_used())
    }

    /// Used chains that the last look at the ring has found and that are not taken yet. The device
    /// makes all chains of one frame visible together.
    #[must_use]
    pub fn used_count(&self) -> u16 {
        each!(self, queue => queue.used_count())
    }

    /// Asks for used buffer notifications, then looks at the ring again. True: a used chain is
    /// there already; do not sleep.
    pub fn enable_notifications(&mut self) -> bool {
        each!(self, queue => queue.enable_notifications())
    }

    /// Asks for no used buffer notifications.
    pub fn disable_notifications(&mut self) {
        each!(self, queue => queue.disable_notifications());
    }

    /// How many descriptors are free.
    #[must_use]
    pub fn free_count(&self) -> u16 {
        each!(self, queue => queue.free_count())
    }

    /// The base for another device half after this one's process died: behind the last chain that
    /// was returned. Chains that were not returned are popped again. Exception: if a packed ring
    /// returned chains in another order than they were made available, used descriptors have
    /// overwritten those of other chains. Then only the record of chains in flight says where the
    /// ring goes on.
    pub fn resume_base(&mut self) -> Base {
        each!(self, queue => queue.resume_base())
    }
}
