//! Bursts that come back to their sender: finished by the receiver, or taken back from the
//! receiver.

use super::SwitchTx;
use crate::net::Outcome;
use crate::net::switch::SwitchTime;
use crate::net::switch::TakeResult;
use crate::net::switch::channel::LentFrames;
use crate::net::switch::vlan_rules::Change;
use manyring_wire::net::HEADER_SIZE;

impl SwitchTx {
    /// Empties every channel whose oldest burst was put in `ms` milliseconds ago or more. Copies
    /// its frames to the copy queue as far as they fit. After that the receiver is lent nothing for
    /// a while (`Shared::rest`).
    #[cold]
    pub(super) fn relieve(&mut self, ms: u64) {
        let now = self.copy_path.switch.clock.now();
        for at in 0..self.channels.len() {
            let own = &self.channels[at];
            let is_old = |since: &SwitchTime| now.0.saturating_sub(since.0) >= ms;
            if own.handed.front().is_some_and(is_old) {
                self.empty(at);
            }
        }
    }

    fn empty(&mut self, at: usize) {
        self.hand_over(at);
        let mut taken = Vec::new();
        self.channels[at].channel.full.recall(|burst| taken.push(burst));
        let to = self.channels[at].to;
        if let Some(destination) = self.copy_path.map.get(to) {
            destination.port.counters.stalled.add(1);
            self.channels[at].rests_until =
                destination.port.rest(self.copy_path.switch.clock.now());
        }
        for mut burst in taken {
            if burst.frames.is_broken() {
                burst.give_up(Outcome::Faulted);
            } else {
                burst.give_up(Outcome::Passed);
                for index in 0..burst.frames.count() {
                    let size = HEADER_SIZE + burst.frames.len(index);
                    if self.channels[at].inbox.is_full(size) {
                        // Check for room before the copy is made.
                        if let Some(destination) = self.copy_path.map.get(to) {
                            destination.port.counters.dropped_full.add(1);
                        }
                        continue;
                    }
                    // The first bytes of a lent frame lie in the daemon's memory already, so there
                    // is no `head` to write.
                    self.copy(&burst.frames, index, &[]);
                    self.copy_path.copy_to(to, &self.frame_copy, Change::None);
                }
            }
            self.take_back(at, burst);
        }
        self.channels[at].mailed = self.channels[at].inbox.last();
    }

    /// Ends a burst that has come back from a channel.
    pub(super) fn take_back(&mut self, at: usize, mut burst: Box<LentFrames>) {
        self.lent -= burst.settle(&mut self.done);
        self.channels[at].handed.pop_front();
        self.free.push(burst);
    }

    /// Takes back all bursts of a channel that its receiver has not taken.
    pub(super) fn recall_channel(&mut self, at: usize) {
        self.hand_over(at);
        let mut taken = Vec::new();
        self.channels[at].channel.full.recall(|burst| taken.push(burst));
        taken.into_iter().for_each(|burst| self.take_back(at, burst));
    }

    /// Ends the bursts that receivers have finished.
    pub(super) fn collect(&mut self) {
        let pending = self.doorbell.alarm().pending();
        if pending == 0 {
            return;
        }
        self.doorbell.alarm().take(pending);
        for at in 0..self.channels.len() {
            if self.channels[at].channel.back_bit & pending == 0 {
                continue;
            }
            loop {
                match self.channels[at].channel.back.take() {
                    TakeResult::Thing(burst) => {
                        self.channels[at].channel.back.finish();
                        self.take_back(at, burst);
                    }
                    TakeResult::Nothing => break,
                    TakeResult::Busy => {
                        self.doorbell.alarm().put_off(self.channels[at].channel.back_bit);
                        break;
                    }
                }
            }
        }
    }

    /// Removes channels whose receivers were closed. A receiver that had lent frames when it was
    /// closed gets only copies for a while after it is opened again: else it could hold all credit
    /// of its senders by closing and opening.
    pub(super) fn leave_closed(&mut self) {
        for at in (0..self.channels.len()).rev() {
            if !self.channels[at].inbox.is_closed() {
                continue;
            }
            let own = &self.channels[at];
            if !own.is_empty()
                && let Some(destination) = self.copy_path.map.get(own.to)
            {
                destination.port.rest(self.copy_path.switch.clock.now());
            }
            self.recall_channel(at);
            if self.channels[at].is_empty() {
                self.leave(at);
            }
        }
    }
}
