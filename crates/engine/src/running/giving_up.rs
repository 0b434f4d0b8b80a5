//! How a queue gives up chains: those that nobody has begun to serve, and those that are set aside.

use super::RunningQueue;
use crate::handler::{Done, Handler};
use manyring_queue::Ring;

impl<R: Ring, H: Handler<R>> RunningQueue<R, H> {
    /// Gives up the chains that nobody has begun to serve, because they point into guest memory
    /// that may be about to change. A call that is held back is sent now.
    pub(super) fn let_go(&mut self) {
        let returned = self.handler.let_go(&mut self.ring, &self.stats);
        self.notifier.flush(&mut self.ring, returned, &self.stats);
        self.note_in_flight();
    }

    /// As [`Self::let_go`]; also takes back, unsent, the frames that the port has not begun to
    /// send, because the driver is to get all of its memory back.
    pub(super) fn give_back(&mut self) {
        self.let_go();
        let returned = self.handler.recall(&mut self.ring, &self.stats);
        self.notifier.flush(&mut self.ring, returned, &self.stats);
        self.note_in_flight();
    }

    /// Gives up the chains that are set aside now, or at the end of the turn in which what is in
    /// flight has come back. An order that waits for the latter is answered after that.
    pub(super) fn give_up_aside(&mut self) {
        self.gives_up_aside = true;
        if self.ring.aside() > 0 && self.ring.in_flight() == 0 {
            let returned = self.handler.give_up_aside(&mut self.ring, &self.stats) > 0;
            self.notifier.flush(&mut self.ring, returned, &self.stats);
            self.note_in_flight();
        }
    }

    /// The same at the end of a turn, before what it returned is published.
    #[cold]
    pub(super) fn give_up_after(&mut self, done: &mut Done) {
        if self.ring.aside() > 0 && self.ring.in_flight() == 0 {
            let returned = self.handler.give_up_aside(&mut self.ring, &self.stats);
            done.used += returned;
            done.told += returned;
        }
    }
}
