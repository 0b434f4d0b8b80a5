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

/// A ring as the engine runs it: its state, and what is done with all of it.
pub trait Ring: Send + std::fmt::Debug + 'static {
    /// Reads from guest memory where the ring stands, if that was left to be done. The engine calls
    /// this on the queue's worker, before anything else, and again when the queue moves: a page
    /// fault in guest memory lasts until the front-end lets it end, so the thread that builds the
    /// ring must not read it. True if the driver must be notified, because a former process may
    /// have returned chains and then been killed before it did so.
    fn begin(&mut self) -> bool {
        false
    }

    /// True if the driver has made something available that was not popped.
    fn has_available(&mut self) -> bool;

    /// Chains that the driver has made available and the device has not popped, as last seen.
    fn available_count(&self) -> u16;

    /// Chains that were popped and neither pushed nor put back nor discarded.
    fn in_flight(&self) -> u16;

    /// Chains that were pushed and that the driver does not see even after [`Self::publish`]: it
    /// wants chains in order (virtio 1.3 §2.7.9), and an earlier one is not pushed yet.
    #[inline]
    fn waiting(&self) -> u16 {
        0
    }

    /// Chains that were popped and then set aside, to be popped again later. They are not in
    /// flight: nobody uses their memory.
    #[inline]
    fn aside(&self) -> u16 {
        0
    }

    /// Chains that a former process has taken and not returned, and that were not popped again.
    /// They are popped before all others.
    fn owed(&self) -> u16 {
        0
    }

    /// True while such a chain is owed, or was popped again and is not answered.
    fn owes(&self) -> bool {
        false
    }

    /// Puts the chains that a former process popped and did not return back into the ring, as if no
    /// process had popped them: [`Self::base`] is then the place of the first of them.
    ///
    /// Returns false, and leaves the ring unchanged, if the former process returned chains of a
    /// split ring that were made available after them: a base cannot leave those out. Also while
    /// another chain is in flight, waits to be returned in order, or is set aside, and after a
    /// fault. The caller then has the chains served.
    fn put_back_owed(&mut self) -> bool {
        false
    }

    /// Leaves the chains that are set aside to the next process, which finds them in the ring's
    /// record. False, and nothing is changed, if the ring has none, or gives chains back in order.
    fn leave_aside(&mut self) -> bool {
        false
    }

    /// Entries of the ring.
    fn size(&self) -> u16;

    /// Where the ring goes on after the chains that were popped, as `GET_VRING_BASE` returns it.
    fn base(&self) -> Base;

    /// Makes all pushed chains visible to the driver. Returns how many there were.
    fn publish(&mut self) -> u16;

    /// After a publish: does the driver want a used buffer notification?
    fn needs_notification(&mut self) -> bool;

    /// True if the driver has asked for a used buffer notification of one of the next `chains` that
    /// are published: it sleeps then, or is about to. It may ask for one at any time after this. A
    /// ring that cannot tell says yes.
    #[inline]
    fn wants_call_within(&self, _chains: u16) -> bool {
        true
    }

    /// Asks for available buffer notifications and looks again. True: there is work, do not sleep.
    fn enable_notifications(&mut self) -> bool;

    /// Asks for no available buffer notifications. A split ring with `VIRTIO_F_EVENT_IDX` needs to
    /// do nothing: the driver notifies once for each event that it is given.
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

    /// True if guest memory was cut away: it reads as zeroes now, which no driver has written.
    fn is_broken(&self) -> bool {
        self.memory().is_broken()
    }

    /// Resolves the ring again, at new addresses or in a new snapshot. Chains in flight stay so.
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
    /// Pops up to `max` chains, and no more than [`crate::BATCH_CHAINS`], into `batch`, which is
    /// emptied first. Returns how many. A fault of the driver is latched: the chains before it are
    /// delivered, then no more come, and [`Ring::fault`] tells.
    fn pop_batch(&mut self, batch: &mut Batch, max: usize) -> usize;

    /// Puts back the chain that was popped last, untouched.
    fn unpop(&mut self, chain: Chain);

    /// Returns a chain with `written` bytes in it. The driver sees it after [`Ring::publish`].
    fn push_used(&mut self, chain: Chain, written: u32);

    /// Sets a chain aside, to be popped again by [`Self::pop_aside`]. Until then its driver does
    /// not get it back, and its memory may change.
    fn set_aside(&mut self, chain: Chain);

    /// As [`Self::pop_batch`], of the chains that were set aside, the oldest first. Each is walked
    /// and resolved anew: if its driver has changed the descriptors, the new ones count.
    fn pop_aside(&mut self, batch: &mut Batch, max: usize) -> usize;

    /// Puts all chains that were set aside back into the ring, as if they had never been popped.
    /// False, and nothing is changed, if a chain that was popped after one of them is in flight or
    /// has been pushed: then no base says which chains are still to be served.
    fn unpop_aside(&mut self) -> bool;

    /// Gives up a chain of a queue that is broken or ends: the driver never gets it back.
    fn discard(&mut self, chain: Chain);
}
