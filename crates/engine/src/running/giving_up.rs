//! How a queue gives up chains: those that its device has not begun to serve, and those that are
//! set aside.

use super::RunningQueue;
use crate::running::handler::{Done, Handler};
use crate::running::orders::{Fence, Reply};
use manyring_queue::Ring;
use tokio::sync::oneshot;

/// The state of a queue that gives up the chains that are set aside, since the driver must get all
/// of its memory back. To answer such a chain, the queue must walk it again, and the driver has
/// chosen how many there are and how long: so a turn gives up a batch.
#[derive(Debug, Default)]
pub(super) struct GivingUp {
    pub(super) is_on: bool,
    /// Some chains are left for the next turn.
    pub(super) has_more: bool,
    /// True if the next process gets the chains that are set aside and that the ring's record
    /// lists.
    leaves: bool,
    /// The fences of orders, answered when nothing is in flight and no chain is left.
    fences: Vec<Fence>,
}

impl<R: Ring, H: Handler<R>> RunningQueue<R, H> {
    /// Gives up the chains that the device has not begun to serve, because they point into guest
    /// memory that may be about to change. A call that is held back is sent now.
    pub(super) fn let_go(&mut self) {
        let returned = self.handler.let_go(&mut self.ring, &self.stats);
        self.notifier.flush(&mut self.ring, returned, &self.stats);
        self.note_in_flight();
    }

    /// As [`Self::let_go`]; also takes back, unsent, the frames that the port has not begun to
    /// send, because the driver must get all of its memory back.
    pub(super) fn give_back(&mut self) {
        self.let_go();
        let returned = self.handler.recall(&mut self.ring, &self.stats);
        self.notifier.flush(&mut self.ring, returned, &self.stats);
        self.note_in_flight();
    }

    /// Gives up the chains that are set aside. The first batch is given up now, or, if requests are
    /// in flight, at the end of the turn in which the last of these completes; the others in the
    /// following turns.
    pub(super) fn give_up_aside(&mut self) {
        self.giving_up.is_on = true;
        let returned = self.give_up_a_batch();
        self.notifier.flush(&mut self.ring, returned > 0, &self.stats);
        self.note_in_flight();
    }

    /// Gives up a batch at the end of a turn, before the chains that the turn returned are
    /// published. Returns the sum of what the turn and the batch did.
    #[cold]
    pub(super) fn give_up_after(&mut self, done: Done) -> Done {
        if !self.giving_up.is_on {
            return done;
        }
        let returned = self.give_up_a_batch();
        self.note_in_flight();
        Done {
            used: done.used + returned,
            told: done.told + returned,
            has_more: done.has_more | self.giving_up.has_more,
            ..done
        }
    }

    /// Gives up none of the chains that are set aside, if the ring's record lists them for the next
    /// process.
    pub(super) fn leave_aside(&mut self, reply: Reply<()>) {
        self.giving_up.leaves = true;
        let _ = reply.send(());
    }

    fn give_up_a_batch(&mut self) -> usize {
        if self.ring.aside() == 0 || self.ring.in_flight() > 0 {
            self.giving_up.has_more = false;
            return 0;
        }
        if self.giving_up.leaves && self.ring.leave_aside() {
            self.stats.waiting_for_space.set(0);
            self.giving_up.has_more = false;
            return 0;
        }
        let (returned, has_more) = self.handler.give_up_aside(&mut self.ring, &self.stats);
        self.giving_up.has_more = has_more;
        returned
    }

    /// Handles the chains that a former process popped and did not return, before the queue ends or
    /// is disabled. [`Self::give_back`] comes first: it gives up every chain that this process
    /// popped and did not begin to serve.
    ///
    /// ```text
    /// the next process uses the ring's record?             they stay as they are
    /// they lie in the ring, one after the other?           they go back: the base says where
    /// else, since chains after them have been returned:    they are served: no base says which
    /// ```
    /// The next process that starts from the base takes chains that go back once more: a disk's
    /// request is done again, as it would be here, and a frame may be sent twice. Buffers of a
    /// receiveq are returned in order, so they always go back; the queue does not wait for them,
    /// since no frame may come.
    pub(super) fn settle_owed(&mut self) {
        if self.ring.owed() == 0 || self.giving_up.leaves || self.ring.put_back_owed() {
            return;
        }
        if !H::WAITS_FOR_INPUT {
            self.giving_up.is_on = true;
            self.life.set_serves_owed(true);
        }
    }

    /// Tells the handler that the queue stops, so that the handler puts back the chains that it has
    /// not begun to serve. Not while chains of a former process are left: the chains that were
    /// popped last would have to be put back first.
    pub(super) fn stop_handler(&mut self) {
        if !self.ring.owes() {
            self.handler.stop(&self.ring);
        }
        // No code receives this fence. It tells the handler that an order waits for the end of what
        // is in flight, so that a transmitq whose port keeps frames for long logs a warning.
        let (fence, _) = oneshot::channel();
        self.handler.fence(fence);
    }

    /// Answers `fence` when nothing is in flight, and no chain that is set aside is to be given up.
    pub(super) fn fence_disabled(&mut self, fence: Fence) {
        let waits = H::HAS_DISK || self.life.serves_owed();
        if waits && self.gives_up_more() {
            self.giving_up.fences.push(fence);
        } else {
            self.handler.fence(fence);
        }
    }

    /// Call when a turn has ended, and its chains are published: answers the fences that waited.
    #[cold]
    pub(super) fn end_giving_up(&mut self) {
        if self.ring.owed() == 0 && self.life.serves_owed() {
            self.life.set_serves_owed(false);
        }
        if !self.gives_up_more() {
            self.giving_up.fences.drain(..).for_each(|fence| self.handler.fence(fence));
        }
    }

    pub(super) fn gives_up_more(&self) -> bool {
        self.ring.in_flight() > 0 || self.giving_up.has_more || self.life.serves_owed()
    }

    /// Stops giving up chains: the queue is enabled again.
    pub(super) fn keep_aside(&mut self) {
        let GivingUp { fences, .. } = std::mem::take(&mut self.giving_up);
        fences.into_iter().for_each(|fence| self.handler.fence(fence));
    }
}
