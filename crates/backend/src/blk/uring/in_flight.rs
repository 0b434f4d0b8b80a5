//! `InFlight`: a request that the kernel has, and what comes after each of its answers.

use super::{PUNCH_HOLE, ZERO_RANGE};
use crate::blk::quota::Patience;
use crate::blk::{Image, Op};
use manyring_memory::SliceList;
use rustix::io::Errno;

/// What the kernel is doing for a request. Most requests have one stage; write-zeroes tries the
/// cheapest way that is allowed, then the next. What must be durable is flushed at the end, but for
/// writes past the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Data between disk and guest.
    Transfer,
    /// `fallocate` with this mode.
    Fallocate(i32),
    /// Zeroes from our memory.
    Zeroes,
    /// `fdatasync`.
    Flush,
}

/// A request the kernel has: what is left of it.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) op: Op,
    pub(super) stage: Stage,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) aligned: bool,
    /// What is left of its memory, which stays mapped as long as it is listed here.
    pub(super) rest: SliceList,
    pub(super) patience: Patience,
    /// The kernel has an entry for it.
    pub(super) is_open: bool,
    /// Guest memory has changed since: `rest` lets go of it when the request is done.
    pub(super) is_retired: bool,
}

/// What comes after an event.
pub(super) enum Step {
    /// There is more to do.
    Again,
    /// There is more to do, and the kernel has no thread to do it.
    Here,
    Done,
    Failed(Errno),
}

impl Default for InFlight {
    fn default() -> Self {
        let (op, stage) = (Op::Flush, Stage::Flush);
        let patience = Patience::default();
        Self {
            op,
            stage,
            offset: 0,
            len: 0,
            aligned: true,
            rest: SliceList::new(),
            patience,
            is_open: false,
            is_retired: false,
        }
    }
}

impl InFlight {
    /// The kernel has no entry for it any more. True if its memory was let go of, which has changed
    /// since.
    pub(super) fn close(&mut self) -> bool {
        self.is_open = false;
        let was_retired = std::mem::take(&mut self.is_retired);
        if was_retired {
            self.rest.release();
        }
        was_retired
    }

    /// True for a write that is durable when its call has ended ([`Image::syncs_by_write`]).
    pub(super) fn syncs_itself(&self, image: &Image) -> bool {
        self.op == Op::Write { durable: true } && image.syncs_by_write(self.aligned)
    }

    /// `n` bytes of the guest's memory are done.
    pub(super) fn advance(&mut self, n: usize) {
        self.rest.advance(n);
        self.offset += n as u64;
        self.len = self.len.saturating_sub(n as u64);
    }

    /// The kernel did `n` bytes, or all of a stage that has none.
    pub(super) fn went_on(&mut self, n: usize, image: &Image) -> Step {
        self.patience.renew();
        match self.stage {
            // The file ends early: it was cut behind our back.
            Stage::Transfer | Stage::Zeroes if n == 0 => return Step::Failed(Errno::IO),
            Stage::Transfer => {
                self.advance(n);
                if !self.rest.is_empty() {
                    self.aligned &= image.is_aligned(self.offset, self.rest.as_slices());
                    return Step::Again;
                }
            }
            Stage::Zeroes => {
                self.offset += n as u64;
                self.len = self.len.saturating_sub(n as u64);
                if self.len > 0 {
                    return Step::Again;
                }
            }
            Stage::Fallocate(_) | Stage::Flush => {}
        }
        let must_flush = match self.op {
            Op::WriteZeroes { durable, .. } => durable,
            Op::Write { durable } => durable && !self.syncs_itself(image),
            _ => false,
        };
        if must_flush && self.stage != Stage::Flush {
            self.stage = Stage::Flush;
            return Step::Again;
        }
        Step::Done
    }

    /// The kernel refused.
    pub(super) fn failed(&mut self, errno: Errno) -> Step {
        match (errno, self.op, self.stage) {
            (Errno::AGAIN | Errno::INTR, ..) if self.patience.may_try_again() => Step::Again,
            // The kernel cannot tell whether this transfer would have to wait: the next try may.
            (Errno::OPNOTSUPP, Op::Read | Op::Write { .. }, Stage::Transfer)
                if !self.patience.is_tried() && self.patience.may_try_again() =>
            {
                Step::Again
            }
            // Nobody cancels an entry but the kernel, which could not start its first thread.
            (Errno::CANCELED, ..) => Step::Here,
            // A discard is a hint.
            (Errno::OPNOTSUPP, Op::Discard, _) => Step::Done,
            (Errno::OPNOTSUPP, Op::WriteZeroes { .. }, Stage::Fallocate(PUNCH_HOLE)) => {
                self.stage = Stage::Fallocate(ZERO_RANGE);
                Step::Again
            }
            (Errno::OPNOTSUPP, Op::WriteZeroes { .. }, Stage::Fallocate(_)) => {
                self.stage = Stage::Zeroes;
                Step::Again
            }
            _ => Step::Failed(errno),
        }
    }
}
