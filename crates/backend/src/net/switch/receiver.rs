//! `SwitchRx`: the receiving half of a pair: lends bursts of its channels in turn, and reads its
//! copy queue.

use super::channel::{Channel, LentFrames};
use super::copy_queue::{CHANNELS, COPIES, CopyInbox, FrameCopy};
use super::handoff::TakeResult;
use crate::net::{Frames, Incoming, Outcome, PortRx, Readiness};
use manyring_memory::{GuestSlice, copy_between, copy_to_slices};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A receiving half.
#[derive(Debug)]
pub(super) struct SwitchRx {
    inbox: Arc<CopyInbox>,
    channels: Vec<Arc<Channel>>,
    /// The index of the channel that is searched first in the next turn.
    next: usize,
    /// The burst that is lent to the device, with the index of its channel: for one turn of the
    /// queue at most.
    out: Option<(Box<LentFrames>, usize)>,
    frame_copies: VecDeque<FrameCopy>,
    /// True if the last frame came from the copy queue: then the channels are served next.
    had_copies: bool,
    /// True if the caller uses [`PortRx::incoming`], so that bursts can be lent. Decorators only
    /// call `recv`.
    lends: bool,
    nothing: Frames,
}

impl SwitchRx {
    /// Makes the half.
    ///
    /// # Errors
    /// `ENOMEM`: no memory for the empty burst.
    pub(super) fn new(inbox: Arc<CopyInbox>) -> Result<Self, Errno> {
        let nothing = Frames::new().map_err(|_| Errno::NOMEM)?;
        Ok(Self {
            inbox,
            channels: Vec::new(),
            next: 0,
            out: None,
            frame_copies: VecDeque::new(),
            had_copies: false,
            lends: false,
            nothing,
        })
    }

    /// Takes new channels, frame copies, and a burst from a channel. Channels and copies are served
    /// in turn.
    fn look(&mut self) {
        let pending = self.inbox.doorbell.alarm().pending();
        if pending & CHANNELS != 0 {
            self.inbox.take_channels(&mut self.channels);
            self.forget_left();
        }
        if pending & COPIES != 0 {
            self.inbox.take_copies(&mut self.frame_copies);
            if !self.frame_copies.is_empty() {
                // Keep the bit set while frame copies wait here, so that the queue does not sleep.
                self.inbox.doorbell.alarm().put_off(COPIES);
            }
        }
        if self.frame_copies.is_empty() || self.had_copies {
            self.take_burst(pending & !(CHANNELS | COPIES));
        }
    }

    /// Takes a burst from one of the channels in `pending`, beginning with channel `next`.
    fn take_burst(&mut self, pending: u64) {
        if pending == 0 || self.look_at_channels(pending) {
            return;
        }
        // No burst was found: clear the bits, then search again. A sender that adds a burst after
        // that sets its bit again.
        self.inbox.doorbell.alarm().take(pending);
        if self.look_at_channels(pending) {
            self.inbox.doorbell.alarm().put_off(pending);
        }
    }

    /// Searches the channels. Returns true if it took a burst, or if a sender has locked its
    /// channel, which then may have one.
    fn look_at_channels(&mut self, pending: u64) -> bool {
        let mut is_busy = false;
        for step in 0..self.channels.len() {
            let at = (self.next + step) % self.channels.len();
            let channel = &self.channels[at];
            if channel.bit & pending == 0 {
                continue;
            }
            loop {
                match channel.full.take() {
                    TakeResult::Thing(mut burst) => {
                        if burst.frames.is_broken() {
                            // The sender's memory was truncated: the burst may be zeroes that no
                            // guest has sent. Drop it.
                            burst.give_up(Outcome::Faulted);
                            channel.give_back(burst);
                            channel.home.post(channel.back_bit);
                            continue;
                        }
                        self.next = at + 1;
                        self.out = Some((burst, at));
                        return true;
                    }
                    TakeResult::Busy => {
                        is_busy = true;
                        break;
                    }
                    TakeResult::Nothing => break,
                }
            }
        }
        is_busy
    }

    fn forget_left(&mut self) {
        self.channels.retain(|channel| !channel.is_left.load(Ordering::Acquire));
    }
}

impl PortRx for SwitchRx {
    #[inline]
    fn incoming(&mut self, _max: usize) -> Incoming<'_> {
        self.inbox.doorbell.alarm().disarm();
        self.lends = true;
        if self.out.is_none() {
            self.look();
        }
        match &self.out {
            Some((burst, _)) => {
                self.had_copies = false;
                Incoming::Lent(&burst.frames)
            }
            None if self.frame_copies.is_empty() => Incoming::Lent(&self.nothing),
            None => {
                self.had_copies = true;
                Incoming::Read
            }
        }
    }

    #[inline]
    fn release(&mut self, count: usize) {
        let Some((mut burst, at)) = self.out.take() else { return };
        let channel = &self.channels[at];
        if count < burst.frames.count() {
            burst.pass(count);
            match channel.full.put_back(burst) {
                Ok(()) => return,
                // The sender is taking all its bursts back at this moment: keep this one, and try
                // again later.
                Err(back) => burst = back,
            }
        } else {
            burst.pass(count);
        }
        channel.give_back(burst);
        channel.home.post(channel.back_bit);
    }

    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno> {
        if self.frame_copies.is_empty() && !self.lends {
            self.inbox.doorbell.alarm().disarm();
            self.look();
        }
        if let Some((burst, _)) = &self.out {
            let copied = copy_between(buffers.iter(), 0, burst.frames.slices(0));
            self.release(1);
            return Ok(copied);
        }
        let frame_copy = self.frame_copies.pop_front().ok_or(Errno::AGAIN)?;
        let copied = copy_to_slices(buffers, &frame_copy);
        self.inbox.note_done(&frame_copy);
        Ok(copied)
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Doorbell(&self.inbox.doorbell)
    }
}

impl Drop for SwitchRx {
    fn drop(&mut self) {
        debug_assert!(self.out.is_none(), "a burst is out between two turns");
        self.channels.extend(self.inbox.close());
        for channel in &self.channels {
            channel.home.post(channel.back_bit);
        }
    }
}
