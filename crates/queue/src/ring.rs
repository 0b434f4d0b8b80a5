//! `Ring` and `Chains`: all that the engine and the devices ask of a ring, whatever its format.
//!
//! ```text
//! loop:
//!   popped = chains.pop_batch(batch, max)      a fault of the driver is latched: see Ring::fault
//!   for chain in batch: serve it, then one of
//!       push_used(chain, written)              it goes back to the driver
//!       unpop(chain)                           it was not touched: it is popped again later
//!       discard(chain)                         the queue is broken or ends
//!   if publish() > 0 and needs_notification(): ring the call
//!   if popped == 0 and not enable_notifications(): sleep until the kick
//! ```
//! A ring answers and calls nobody. Code that takes `R: Chains` pays no dispatch.

use crate::base::Base;
use crate::chain::{Batch, Chain};
use crate::config::RingAddresses;
use crate::error::QueueError;
use manyring_memory::GuestMemory;
use std::sync::Arc;

/// A ring as the engine runs it: its state, and the steps that concern the ring as a whole.
pub trait Ring: Send + std::fmt::Debug + 'static {
    /// Reads from guest memory where the ring goes on, if
    /// [`DeviceQueue::unread`](crate::DeviceQueue::unread) has left that undone. The engine calls
    /// this on the queue's worker before anything else, and again when the queue moves to another
    /// worker. A page fault in guest memory can last as long as the front-end likes, so the thread
    /// that builds the ring must not read it. Returns true if the driver must be notified: a former
    /// process may have returned chains and been killed before it notified.
    fn begin(&mut self) -> bool {
        false
    }

    /// True if the driver has made a chain available that was not popped. Reads the ring.
    fn has_available(&mut self) -> bool;

    /// Available chains that were not popped, as of the last read of the ring.
    fn available_count(&self) -> u16;

    /// Chains that were popped and neither pushed, put back, set aside nor discarded.
    fn in_flight(&self) -> u16;

    /// Chains that were pushed, but wait for an earlier chain, which is not pushed yet: the driver
    /// wants chains in order (virtio 1.3 §2.7.9). [`Self::publish`] does not show them.
    #[inline]
    fn waiting(&self) -> u16 {
        0
    }

    /// Chains that are set aside, to be popped again later. They are not in flight: nobody uses
    /// their memory.
    #[inline]
    fn aside(&self) -> u16 {
        0
    }

    /// Owed chains that were not popped again: a former process has popped them and not returned
    /// them. They are popped before all others.
    fn owed(&self) -> u16 {
        0
    }

    /// True while an owed chain is not answered, whether it was popped again or not.
    fn owes(&self) -> bool {
        false
    }

    /// Puts the chains that a former process popped and did not return back into the ring, as if no
    /// process had popped them: [`Self::base`] is then the place of the first of them.
    ///
    /// Returns false, and leaves the ring unchanged, if the owed chains cannot be put back: the
    /// former process has returned a chain of a split ring that was made available after one of
    /// them (a base cannot skip a chain); or another chain is in flight, waits or is set aside; or
    /// the ring has a fault. The caller then serves the owed chains.
    fn put_back_owed(&mut self) -> bool {
        false
    }

    /// Leaves the chains that are set aside to the next process, which finds them in the ring's
    /// record. Returns false, and changes nothing, if the ring has no record or returns chains in
    /// order.
    fn leave_aside(&mut self) -> bool {
        false
    }

    /// Entries of the ring.
    fn size(&self) -> u16;

    /// The position behind the chains that were popped, as `GET_VRING_BASE` returns it.
    fn base(&self) -> Base;

    /// Makes all pushed chains visible to the driver. Returns their number.
    fn publish(&mut self) -> u16;

    /// After a publish: true if the driver wants a used buffer notification.
    fn needs_notification(&mut self) -> bool;

    /// True if the driver has asked to be notified of one of the next `chains` chains that are
    /// published: it sleeps then, or is about to. False is no promise: the driver may ask at any
    /// time after this. A ring that cannot tell returns true.
    #[inline]
    fn wants_call_within(&self, _chains: u16) -> bool {
        true
    }

    /// Asks for available buffer notifications, then reads the ring again. True: a chain is
    /// available already; do not sleep.
    fn enable_notifications(&mut self) -> bool;

    /// Asks for no available buffer notifications. A split ring with `VIRTIO_F_EVENT_IDX` has
    /// nothing to do: the driver notifies only once for each event index.
    fn disable_notifications(&mut self);

    /// The fault that stopped the queue, if any.
    fn fault(&self) -> Option<QueueError>;

    /// True if a fault has stopped the queue.
    #[inline]
    fn is_faulted(&self) -> bool {
        self.fault().is_some()
    }

    /// Stops the queue for a fault that a device found in a request. The first fault stays.
    fn latch_fault(&mut self, fault: QueueError);

    /// The snapshot of guest memory that chains are resolved in.
    fn memory(&self) -> &Arc<GuestMemory>;

    /// True if guest memory was truncated: its words read as zero, which no driver has written.
    fn is_broken(&self) -> bool {
        self.memory().is_broken()
    }

    /// Resolves the ring's areas again, at new addresses or in a new snapshot. Chains in flight
    /// stay in flight.
    ///
    /// # Errors
    /// [`QueueError::Ring`] if a ring area is not in memory; the queue is then unchanged.
    fn relocate(
        &mut self,
        addresses: RingAddresses,
        memory: Arc<GuestMemory>,
    ) -> Result<(), QueueError>;
}

/// A ring whose buffers are chains of slices in guest memory.
pub trait Chains: Ring {
    /// Pops up to `max` chains, and at most [`crate::BATCH_CHAINS`], into `batch`, which is emptied
    /// first. Returns their number. At a fault of the driver the chains before it are delivered;
    /// later calls return 0, and [`Ring::fault`] says why.
    fn pop_batch(&mut self, batch: &mut Batch, max: usize) -> usize;

    /// Puts back the chain that was popped last. Its buffers must be untouched.
    fn unpop(&mut self, chain: Chain);

    /// Returns a chain, into which `written` bytes were written. The driver sees it after
    /// [`Ring::publish`].
    fn push_used(&mut self, chain: Chain, written: u32);

    /// Sets a chain aside, for [`Self::pop_aside`] to pop again. Until then the driver does not get
    /// it back, and its memory may change.
    fn set_aside(&mut self, chain: Chain);

    /// Pops as [`Self::pop_batch`] does, but chains that were set aside, the oldest first. Each
    /// chain is walked and resolved again: if the driver has changed its descriptors, the new ones
    /// count.
    fn pop_aside(&mut self, batch: &mut Batch, max: usize) -> usize;

    /// Puts all chains that are set aside back into the ring, as if never popped. Returns false,
    /// and changes nothing, if a chain that was popped after one of them is in flight or was
    /// pushed: then no base can say which chains are still to be served.
    fn unpop_aside(&mut self) -> bool;

    /// Gives up a chain of a queue that is broken or ends: the driver never gets it back.
    fn discard(&mut self, chain: Chain);
}
