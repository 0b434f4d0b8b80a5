//! Bursts that come back to their sender: finished by the receiver, or taken back from it.

use super::SwitchTx;
use crate::net::Outcome;
use crate::net::switch::Found;
use crate::net::switch::Moment;
use crate::net::switch::guard::Change;
use crate::net::switch::lane::Burst;
use manyring_wire::net::HEADER_SIZE;

impl SwitchTx {
    /// Empties every lane whose oldest burst is out for `ms` milliseconds. Its frames are copied to
    /// the mail while that has room, and are done. The receiver is then lent nothing for a while
    /// (`Shared::rest`).
    #[cold]
    pub(super) fn relieve(&mut self, ms: u64) {
        let now = self.courier.switch.clock.now();
        for at in 0..self.lanes.len() {
            let own = &self.lanes[at];
            let is_old = |since: &Moment| now.0.saturating_sub(since.0) >= ms;
            if own.handed.front().is_some_and(is_old) {
                self.empty(at);
            }
        }
    }

    fn empty(&mut self, at: usize) {
        self.hand_over(at);
        let mut taken = Vec::new();
        self.lanes[at].lane.full.recall(|burst| taken.push(burst));
        let to = self.lanes[at].to;
        if let Some(destination) = self.courier.map.get(to) {
            destination.port.counters.stalled.add(1);
            self.lanes[at].rests_until = destination.port.rest(self.courier.switch.clock.now());
        }
        for mut burst in taken {
            if burst.frames.is_broken() {
                burst.give_up(Outcome::Faulted);
            } else {
                burst.give_up(Outcome::Passed);
                for index in 0..burst.frames.count() {
                    let size = HEADER_SIZE + burst.frames.len(index);
                    if self.lanes[at].inbox.is_full(size) {
                        // Check for room before the copy, which would only be dropped.
                        if let Some(destination) = self.courier.map.get(to) {
                            destination.port.counters.dropped_full.add(1);
                        }
                        continue;
                    }
                    // The head of a lent frame lies in the daemon's memory, before the rest.
                    self.copy(&burst.frames, index, &[]);
                    self.courier.mail(to, &self.letter, Change::None);
                }
            }
            self.take_back(at, burst);
        }
        self.lanes[at].mailed = self.lanes[at].inbox.last();
    }

    /// Ends a burst that has come back from a lane.
    pub(super) fn take_back(&mut self, at: usize, mut burst: Box<Burst>) {
        self.lent -= burst.settle(&mut self.done);
        self.lanes[at].handed.pop_front();
        self.free.push(burst);
    }

    /// Takes back all bursts of a lane that its receiver has not taken, undelivered.
    pub(super) fn recall_lane(&mut self, at: usize) {
        self.hand_over(at);
        let mut taken = Vec::new();
        self.lanes[at].lane.full.recall(|burst| taken.push(burst));
        taken.into_iter().for_each(|burst| self.take_back(at, burst));
    }

    /// Ends the bursts that receivers have finished with.
    pub(super) fn collect(&mut self) {
        let pending = self.bell.alarm().pending();
        if pending == 0 {
            return;
        }
        self.bell.alarm().take(pending);
        for at in 0..self.lanes.len() {
            if self.lanes[at].lane.back_bit & pending == 0 {
                continue;
            }
            loop {
                match self.lanes[at].lane.back.take() {
                    Found::Thing(burst) => {
                        self.lanes[at].lane.back.finish();
                        self.take_back(at, burst);
                    }
                    Found::Nothing => break,
                    Found::Busy => {
                        self.bell.alarm().put_off(self.lanes[at].lane.back_bit);
                        break;
                    }
                }
            }
        }
    }

    /// Removes lanes whose receivers are gone. A receiver that was lent frames when it went gets
    /// only copies for a while after it is back: by coming and going it could hold all credit of
    /// its senders.
    pub(super) fn leave_closed(&mut self) {
        for at in (0..self.lanes.len()).rev() {
            if !self.lanes[at].inbox.is_closed() {
                continue;
            }
            let own = &self.lanes[at];
            if !own.is_empty()
                && let Some(destination) = self.courier.map.get(own.to)
            {
                destination.port.rest(self.courier.switch.clock.now());
            }
            self.recall_lane(at);
            if self.lanes[at].is_empty() {
                self.leave(at);
            }
        }
    }
}
