//! How a queue is enabled and disabled. A transmitq that was just disabled drops the chains in its
//! ring, before the order is answered.
//!
//! ```text
//! order:   drop a batch at once, which empties most rings: answer the order
//!          there is more? the queue stays hot, and the order is answered later
//! turn:    drops a batch, in the time of its guest like any other turn
//! end:     nothing is left, or as many chains as the ring's size were dropped: answer the order
//! ```
//! The driver chooses how much its ring holds: dropping the largest ring full of the longest chains
//! takes a worker many milliseconds. If the order dropped all of them at once, no other guest would
//! have a turn until that was done. The turns are charged to the guest that filled the ring.

use super::{RingLook, RunningQueue};
use crate::io::QueueIo;
use crate::running::handler::{Handler, TurnMode};
use crate::running::orders::Fence;
use crate::running::run::Run;
use manyring_queue::Ring;

/// Turns that an order may take: one drops a batch, the next one finds that the ring is empty.
const TURNS_AT_ONCE: usize = 2;

/// An order to disable the queue that is answered once the ring is empty.
#[derive(Debug)]
pub(super) struct Emptying {
    fence: Fence,
    /// The maximum of chains that were in the ring when the queue was disabled: the ring's size,
    /// less the chains that were dropped since. The driver added any further chains later.
    left: usize,
}

impl<R: Ring, H: Handler<R>> RunningQueue<R, H> {
    /// Follows `SET_VRING_ENABLE`. Some front-ends send no `GET_VRING_BASE`, and reuse the queue's
    /// memory once "disable" is acknowledged: so `fence` is answered when nothing is in flight.
    pub(super) fn set_enabled(&mut self, is_enabled: bool, fence: Fence, io: &mut QueueIo<'_>) {
        if !is_enabled {
            if self.life.disable() {
                self.give_back();
                self.settle_owed();
                self.unwatch_port(io);
                self.give_up_aside();
                self.discard_all(fence, io);
            } else {
                // The queue was disabled before, and its requests may still be in flight. If a
                // former process disabled it, that process may have left some.
                self.settle_owed();
                self.fence_disabled(fence);
            }
            return;
        }
        self.end_emptying();
        self.keep_aside();
        self.life.enable();
        self.notifier.trust_kick();
        // A port that was lost may be back.
        self.handler.revive();
        // The driver may have kicked before it enabled the queue: read the ring.
        self.make_hot(io.now_ns());
        let _ = fence.send(Ok(()));
    }

    /// Drops the chains in the ring of a queue that was just disabled, if its handler drops chains.
    /// `fence` is answered when that is done and nothing that was taken before is in flight.
    pub(super) fn discard_all(&mut self, fence: Fence, io: &mut QueueIo<'_>) {
        if !H::DROPS_WHEN_DISABLED {
            self.fence_disabled(fence);
            return;
        }
        self.life.kicked();
        self.emptying = Some(Emptying { fence, left: self.ring.size().into() });
        for _ in 0..TURNS_AT_ONCE {
            self.turn(io);
            if self.emptying.is_none() {
                return;
            }
        }
        self.make_hot(io.now_ns());
    }

    /// Counts the `popped` chains of a turn while an order waits. The order is answered when the
    /// turn found the ring empty, or when as many chains as the ring's size were dropped.
    #[cold]
    pub(super) fn go_on_emptying(&mut self, popped: usize, mode: TurnMode, now_ns: u64) {
        let Some(Emptying { left, .. }) = &mut self.emptying else { return };
        *left = left.saturating_sub(popped);
        if mode == TurnMode::Drop && popped > 0 && *left > 0 {
            return;
        }
        // The driver added chains that are found now after the queue was disabled, and so still
        // fills the ring. Further turns drop such chains, until the driver adds none for a while.
        let goes_on = self.life.mode() == TurnMode::Drop && self.ring.enable_notifications();
        if goes_on && self.notifier.has_kick() {
            self.make_hot(now_ns);
        } else {
            self.life.leave_alone();
            self.look = RingLook::Armed;
        }
        self.end_emptying();
    }

    /// Stops emptying the ring: the order is answered when nothing is in flight any more.
    pub(super) fn end_emptying(&mut self) {
        if let Some(Emptying { fence, .. }) = self.emptying.take() {
            self.fence_disabled(fence);
        }
    }
}
