//! `Channel`: carries bursts of frames from one transmitq to one receiveq, and empty bursts back.

use super::handoff::SpscQueue;
use crate::net::{Frames, Outcome, Returned, Token};
use crate::ready::Doorbell;
use manyring_memory::MemoryError;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A burst of frames that a sender lends to one receiver.
#[derive(Debug)]
pub(super) struct LentFrames {
    pub(super) frames: Frames,
    /// Tokens of frames that the receiver has copied or dropped.
    passed: Vec<Token>,
    /// The outcome of the frames that the receiver has not copied when the burst comes back.
    rest: Outcome,
    /// True once the receiver has taken the burst: then the sender must not add frames to it.
    is_touched: bool,
}

impl LentFrames {
    pub(super) fn new() -> Result<Box<Self>, MemoryError> {
        let frames = Frames::for_channel()?;
        Ok(Box::new(Self {
            frames,
            passed: Vec::new(),
            rest: Outcome::Recalled,
            is_touched: false,
        }))
    }

    /// For the receiver: records that it has copied or dropped the first `count` frames.
    pub(super) fn pass(&mut self, count: usize) {
        self.is_touched = true;
        self.frames.drop_front(count, &mut self.passed);
    }

    /// For the receiver: gives up the remaining frames, with the outcome `rest`.
    pub(super) fn give_up(&mut self, rest: Outcome) {
        self.rest = rest;
    }

    /// True if the sender may add frames, because the receiver has not taken the burst yet.
    pub(super) fn is_untouched(&self) -> bool {
        !self.is_touched
    }

    /// For the sender: ends a burst that has come back. Adds its frames with their outcomes to
    /// `done`, and drops the reference to guest memory. Returns the number of frames.
    pub(super) fn settle(&mut self, done: &mut Vec<Returned>) -> usize {
        let before = done.len();
        let returned = |outcome| move |token| Returned { token, outcome };
        done.extend(self.passed.drain(..).map(returned(Outcome::Passed)));
        done.extend(self.frames.tokens().map(returned(self.rest)));
        self.frames.release();
        (self.rest, self.is_touched) = (Outcome::Recalled, false);
        done.len() - before
    }
}

/// The path of bursts from one transmitq to one receiveq, and of empty bursts back.
#[derive(Debug)]
pub(super) struct Channel {
    /// Bursts for the receiver, and bursts that the receiver has finished.
    pub(super) full: SpscQueue<Box<LentFrames>>,
    pub(super) back: SpscQueue<Box<LentFrames>>,
    /// The bits of the channel in the receiver's doorbell, and in the sender's.
    pub(super) bit: u64,
    pub(super) back_bit: u64,
    /// The sender's doorbell.
    pub(super) home: Arc<Doorbell>,
    /// Set when the sender no longer uses the channel, so that the receiver can drop it.
    pub(super) is_left: AtomicBool,
}

impl Channel {
    pub(super) fn new(bit: u64, back_bit: u64, home: Arc<Doorbell>) -> Arc<Self> {
        Arc::new(Self {
            full: SpscQueue::new(),
            back: SpscQueue::new(),
            bit,
            back_bit,
            home,
            is_left: AtomicBool::new(false),
        })
    }

    /// For the receiver: returns the burst that it has taken. The caller must ring [`Self::home`]
    /// afterwards.
    pub(super) fn give_back(&self, burst: Box<LentFrames>) {
        self.full.finish();
        let is_back = self.back.put(burst).is_ok();
        debug_assert!(is_back, "a channel has no more bursts than places");
    }
}
