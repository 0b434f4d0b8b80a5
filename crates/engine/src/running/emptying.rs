//! How a queue that was just disabled drops what is in its ring, before that is answered.
//!
//! ```text
//! order:   some turns at once, which empty the ring of most drivers: answered
//!          there is more? the queue stays hot, and whoever disabled it waits
//! turn:    drops a batch, in the time of its guest like any other turn
//! end:     nothing is left, or as much was dropped as the ring can hold: answered
//! ```
//! A driver chooses how much there is: the largest ring with the longest chains takes a worker many
//! milliseconds. If all of that were done within the order, no other guest had a turn meanwhile,
//! and nobody would be charged with it.

use super::{Look, RunningQueue};
use crate::handler::{Handler, Mode};
use crate::io::QueueIo;
use crate::orders::Fence;
use crate::run::Run;
use manyring_queue::Ring;

/// Turns that an order may take: as many as empty a ring of 1024 entries, a batch in each.
const TURNS_AT_ONCE: usize = 16;

/// Somebody waits until the ring of a disabled queue is empty.
#[derive(Debug)]
pub(super) struct Emptying {
    fence: Fence,
    /// Chains that the ring can still hold of those that were there when it was disabled. What
    /// comes behind them is from a driver that is still there and fills the ring meanwhile.
    left: usize,
}

impl<R: Ring, H: Handler<R>> RunningQueue<R, H> {
    /// Drops what a queue that was just disabled holds, and asks for a kick; `fence` is told when
    /// nothing that was taken is in flight any more.
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

    /// A turn has taken so many chains while somebody waits until the ring is empty.
    #[cold]
    pub(super) fn go_on_emptying(&mut self, popped: usize, mode: Mode, now_ns: u64) {
        let Some(Emptying { left, .. }) = &mut self.emptying else { return };
        *left = left.saturating_sub(popped);
        if mode == Mode::Drop && popped > 0 && *left > 0 {
            return;
        }
        // Only a driver that is still there fills the ring meanwhile: what it sends is dropped in
        // further turns, until nothing comes for a while.
        let goes_on = self.life.mode() == Mode::Drop && self.ring.enable_notifications();
        if goes_on && self.notifier.has_kick() {
            self.make_hot(now_ns);
        } else {
            self.life.leave_alone();
            self.look = Look::Armed;
        }
        self.end_emptying();
    }

    /// The ring is emptied no further: whoever waits hears when nothing is in flight any more.
    pub(super) fn end_emptying(&mut self) {
        if let Some(Emptying { fence, .. }) = self.emptying.take() {
            self.handler.fence(fence);
        }
    }
}
