//! How a queue that was just disabled drops what is in its ring, before the order is answered.
//!
//! ```text
//! order:   drop a batch at once, which empties most rings: answer the order
//!          there is more? the queue stays hot, and the order is answered later
//! turn:    drops a batch, in the time of its guest like any other turn
//! end:     nothing is left, or as much was dropped as the ring can hold: answer the order
//! ```
//! A driver chooses how much there is: the largest ring with the longest chains takes a worker many
//! milliseconds. If all of it were dropped within the order, no other guest would have a turn
//! meanwhile, and no guest would be charged for the time.

use super::{Look, RunningQueue};
use crate::handler::{Handler, Mode};
use crate::io::QueueIo;
use crate::orders::Fence;
use crate::run::Run;
use manyring_queue::Ring;

/// Turns that an order may take: one drops a batch, the next one finds that the ring is empty.
const TURNS_AT_ONCE: usize = 2;

/// Somebody waits until the ring of a disabled queue is empty.
#[derive(Debug)]
pub(super) struct Emptying {
    fence: Fence,
    /// How many more of the chains in the ring can have been there when it was disabled. Chains
    /// behind them were added later, by a driver that goes on.
    left: usize,
}

impl<R: Ring, H: Handler<R>> RunningQueue<R, H> {
    /// Drops the chains in the ring of a queue that was just disabled, and asks for a kick; `fence`
    /// is answered when nothing that was taken is in flight any more.
    pub(super) fn discard_all(&mut self, fence: Fence, io: &mut QueueIo<'_>) {
        if !H::DROPS_WHEN_DISABLED {
            self.handler.fence(fence);
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

    /// A turn has taken `popped` chains while an order waits until the ring is empty.
    #[cold]
    pub(super) fn go_on_emptying(&mut self, popped: usize, mode: Mode, now_ns: u64) {
        let Some(Emptying { left, .. }) = &mut self.emptying else { return };
        *left = left.saturating_sub(popped);
        if mode == Mode::Drop && popped > 0 && *left > 0 {
            return;
        }
        // The ring was filled again meanwhile, so its driver goes on: further turns drop what it
        // sends, until nothing comes for a while.
        let goes_on = self.life.mode() == Mode::Drop && self.ring.enable_notifications();
        if goes_on && self.notifier.has_kick() {
            self.make_hot(now_ns);
        } else {
            self.life.leave_alone();
            self.look = Look::Armed;
        }
        self.end_emptying();
    }

    /// The ring is emptied no further: the order is answered when nothing is in flight any more.
    pub(super) fn end_emptying(&mut self) {
        if let Some(Emptying { fence, .. }) = self.emptying.take() {
            self.handler.fence(fence);
        }
    }
}
