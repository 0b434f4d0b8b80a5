//! `SwitchRx`: the receiving half of a pair: lends bursts of its lanes in turn, and reads its mail.

use super::handoff::Found;
use super::lane::{Burst, Lane};
use super::mail::{Inbox, LANES, Letter, MAIL};
use crate::net::{Frames, Incoming, Outcome, PortRx, Readiness};
use manyring_memory::{GuestSlice, copy_between, copy_to_slices};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A receiving half.
#[derive(Debug)]
pub(super) struct SwitchRx {
    inbox: Arc<Inbox>,
    lanes: Vec<Arc<Lane>>,
    /// The index of the lane that is asked first in the next turn.
    next: usize,
    /// The burst that is lent, with the index of its lane: for one turn of the queue at most.
    out: Option<(Box<Burst>, usize)>,
    letters: VecDeque<Letter>,
    /// The last frame came from the mail, so the lanes are served next.
    had_mail: bool,
    /// The user calls [`PortRx::incoming`], so bursts can be lent. Decorators only call `recv`.
    lends: bool,
    nothing: Frames,
}

impl SwitchRx {
    /// # Errors
    /// `ENOMEM`: the host has no memory for the empty burst.
    pub(super) fn new(inbox: Arc<Inbox>) -> Result<Self, Errno> {
        let nothing = Frames::new().map_err(|_| Errno::NOMEM)?;
        Ok(Self {
            inbox,
            lanes: Vec::new(),
            next: 0,
            out: None,
            letters: VecDeque::new(),
            had_mail: false,
            lends: false,
            nothing,
        })
    }

    /// Takes new lanes, mail, and a burst from a lane. Lanes and mail are served in turn.
    fn look(&mut self) {
        let pending = self.inbox.bell.alarm().pending();
        if pending & LANES != 0 {
            self.inbox.take_lanes(&mut self.lanes);
            self.forget_left();
        }
        if pending & MAIL != 0 {
            self.inbox.take_mail(&mut self.letters);
            if !self.letters.is_empty() {
                // Keep the bit while letters wait here: the queue must not go to sleep.
                self.inbox.bell.alarm().put_off(MAIL);
            }
        }
        if self.letters.is_empty() || self.had_mail {
            self.take_burst(pending & !(LANES | MAIL));
        }
    }

    /// Takes a burst out of the next lane of those in `pending` that has one.
    fn take_burst(&mut self, pending: u64) {
        if pending == 0 || self.look_at_lanes(pending) {
            return;
        }
        // Nothing was found: clear the bits, then look again. Later senders set their bits again.
        self.inbox.bell.alarm().take(pending);
        if self.look_at_lanes(pending) {
            self.inbox.bell.alarm().put_off(pending);
        }
    }

    /// True if a burst was found, or a lane is locked by its sender and may have one.
    fn look_at_lanes(&mut self, pending: u64) -> bool {
        let mut is_busy = false;
        for step in 0..self.lanes.len() {
            let at = (self.next + step) % self.lanes.len();
            let lane = &self.lanes[at];
            if lane.bit & pending == 0 {
                continue;
            }
            loop {
                match lane.full.take() {
                    Found::Thing(mut burst) => {
                        if burst.frames.is_broken() {
                            // Guest memory was cut away: the burst's zeroes were never sent.
                            burst.give_up(Outcome::Faulted);
                            lane.give_back(burst);
                            lane.home.post(lane.back_bit);
                            continue;
                        }
                        self.next = at + 1;
                        self.out = Some((burst, at));
                        return true;
                    }
                    Found::Busy => {
                        is_busy = true;
                        break;
                    }
                    Found::Nothing => break,
                }
            }
        }
        is_busy
    }

    fn forget_left(&mut self) {
        self.lanes.retain(|lane| !lane.is_left.load(Ordering::Acquire));
    }
}

impl PortRx for SwitchRx {
    #[inline]
    fn incoming(&mut self, _max: usize) -> Incoming<'_> {
        self.inbox.bell.alarm().disarm();
        self.lends = true;
        if self.out.is_none() {
            self.look();
        }
        match &self.out {
            Some((burst, _)) => {
                self.had_mail = false;
                Incoming::Lent(&burst.frames)
            }
            None if self.letters.is_empty() => Incoming::Lent(&self.nothing),
            None => {
                self.had_mail = true;
                Incoming::Read
            }
        }
    }

    #[inline]
    fn release(&mut self, count: usize) {
        let Some((mut burst, at)) = self.out.take() else { return };
        let lane = &self.lanes[at];
        if count < burst.frames.count() {
            burst.pass(count);
            match lane.full.put_back(burst) {
                Ok(()) => return,
                // The sender is taking everything back: keep the burst out.
                Err(back) => burst = back,
            }
        } else {
            burst.pass(count);
        }
        lane.give_back(burst);
        lane.home.post(lane.back_bit);
    }

    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno> {
        if self.letters.is_empty() && !self.lends {
            self.inbox.bell.alarm().disarm();
            self.look();
        }
        if let Some((burst, _)) = &self.out {
            let copied = copy_between(buffers.iter(), 0, burst.frames.slices(0));
            self.release(1);
            return Ok(copied);
        }
        let letter = self.letters.pop_front().ok_or(Errno::AGAIN)?;
        let copied = copy_to_slices(buffers, &letter);
        self.inbox.note_done(&letter);
        Ok(copied)
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Bell(&self.inbox.bell)
    }
}

impl Drop for SwitchRx {
    fn drop(&mut self) {
        debug_assert!(self.out.is_none(), "a burst is out between two turns");
        self.lanes.extend(self.inbox.close());
        for lane in &self.lanes {
            lane.home.post(lane.back_bit);
        }
    }
}
