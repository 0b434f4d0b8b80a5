//! `IoInFlight`: a request that the kernel serves, and the step that follows each result.

use super::{PUNCH_HOLE, ZERO_RANGE};
use crate::blk::quota::Retries;
use crate::blk::{Image, Op};
use manyring_memory::SliceList;
use rustix::io::Errno;
use std::ops::Range;

/// The call that the kernel is making for a request. Most requests have one stage. Write-zeroes
/// first tries the cheapest way that is allowed, then others. A durable request ends with a flush,
/// unless it is a direct write, which is durable by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Transfer of data between disk and guest.
    Transfer,
    /// `fallocate` with this mode.
    Fallocate(i32),
    /// Write of zeroes from memory of the daemon.
    Zeroes,
    /// `fdatasync`.
    Flush,
    /// The disk's own thread serves the rest of the request.
    Aside,
}

/// The remaining part of a request.
#[derive(Debug)]
pub(super) struct IoInFlight {
    pub(super) op: Op,
    pub(super) stage: Stage,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) aligned: bool,
    /// The remaining slices. Their memory stays mapped while they are listed here.
    pub(super) rest: SliceList,
    pub(super) retries: Retries,
    /// True while the kernel has an entry for the request, or the disk's own thread has a task.
    pub(super) is_open: bool,
    /// True if the queue stops: a transfer then ends after its present piece.
    pub(super) is_recalled: bool,
    /// True if guest memory has changed: `rest` must drop its memory snapshot when the request is
    /// done.
    pub(super) is_retired: bool,
    /// True if `holders` lists the token: `rest` may refer to the present guest memory.
    pub(super) is_holder: bool,
}

/// The queue's next step after the kernel's result for an entry of a request.
pub(super) enum Step {
    /// Submit another entry.
    Again,
    /// Serve the rest on the worker: the kernel cannot start a thread for it.
    Here,
    Done,
    Failed(Errno),
}

impl Default for IoInFlight {
    fn default() -> Self {
        let (op, stage) = (Op::Flush, Stage::Flush);
        let retries = Retries::default();
        Self {
            op,
            stage,
            offset: 0,
            len: 0,
            aligned: true,
            rest: SliceList::new(),
            retries,
            is_open: false,
            is_retired: false,
            is_holder: false,
            is_recalled: false,
        }
    }
}

impl IoInFlight {
    /// Marks the request as done. Returns true if guest memory has changed while it was in flight;
    /// then `rest` has dropped its memory snapshot.
    pub(super) fn close(&mut self) -> bool {
        (self.is_open, self.is_recalled) = (false, false);
        let was_retired = std::mem::take(&mut self.is_retired);
        if was_retired {
            self.rest.release();
        }
        was_retired
    }

    /// True if no further piece of this transfer may follow, because the queue stops.
    pub(super) fn ends_now(&self) -> bool {
        self.is_recalled && self.stage == Stage::Transfer
    }

    /// Call when guest memory has changed: drops the old memory snapshot, at once or when the
    /// request is done.
    pub(super) fn retire(&mut self) {
        (self.is_retired, self.is_holder) = (true, false);
        if !self.is_open {
            self.close();
        }
    }

    /// True for a request that changes bytes of the disk.
    #[inline]
    pub(super) fn changes_disk(&self) -> bool {
        !matches!(self.op, Op::Read | Op::Flush)
    }

    /// True for a write that is durable when its call has ended ([`Image::syncs_by_write`]).
    pub(super) fn syncs_itself(&self, image: &Image) -> bool {
        self.op == Op::Write { durable: true } && image.syncs_by_write()
    }

    /// Returns the remaining range on the disk.
    pub(super) fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }

    /// Records that `n` more bytes of the guest's memory are done.
    pub(super) fn advance(&mut self, n: usize) {
        self.rest.advance(n);
        self.offset += n as u64;
        self.len = self.len.saturating_sub(n as u64);
    }

    /// Returns the next step after the kernel has transferred `n` bytes, or has ended a stage that
    /// transfers none.
    pub(super) fn went_on(&mut self, n: usize, image: &Image) -> Step {
        self.retries.renew();
        match self.stage {
            // The file was truncated after it was measured: it is shorter than the disk.
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
            // The disk's thread has done all stages, including a flush.
            Stage::Aside => return Step::Done,
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

    /// Returns the next step after an entry has failed with `errno`.
    pub(super) fn failed(&mut self, errno: Errno) -> Step {
        match (errno, self.op, self.stage) {
            // The disk's thread has already retried after `EAGAIN`, and tried every way to write
            // zeroes.
            (_, _, Stage::Aside) => Step::Failed(errno),
            (Errno::AGAIN | Errno::INTR, ..) if self.retries.may_try_again() => Step::Again,
            // The file system does not support this transfer without waiting: allow the next try to
            // wait.
            (Errno::OPNOTSUPP, Op::Read | Op::Write { .. }, Stage::Transfer)
                if !self.retries.is_tried() && self.retries.may_try_again() =>
            {
                Step::Again
            }
            // The kernel cancels an entry when it cannot start its first thread; nobody else
            // cancels any.
            (Errno::CANCELED, ..) => Step::Here,
            // A discard is a hint: it need not do anything.
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
