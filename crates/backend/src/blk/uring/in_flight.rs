//! `IoInFlight`: a request that the kernel has, and the step that follows each result of the
//! kernel.

use super::{PUNCH_HOLE, ZERO_RANGE};
use crate::blk::quota::Retries;
use crate::blk::{Image, Op};
use manyring_memory::SliceList;
use rustix::io::Errno;
use std::ops::Range;

/// The call that the kernel is making for a request. Most requests have one stage. Write-zeroes
/// tries the cheapest way that is allowed, then the next. A durable request ends with a flush,
/// unless it is a write past the page cache, which is durable by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Data between disk and guest.
    Transfer,
    /// `fallocate` with this mode.
    Fallocate(i32),
    /// Writes of zeroes from memory of the daemon.
    Zeroes,
    /// `fdatasync`.
    Flush,
    /// The disk's own thread does all that is left of the request.
    Aside,
}

/// The part of a request that is not done yet.
#[derive(Debug)]
pub(super) struct IoInFlight {
    pub(super) op: Op,
    pub(super) stage: Stage,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) aligned: bool,
    /// The slices that are not done. Their memory stays mapped while they are listed here.
    pub(super) rest: SliceList,
    pub(super) retries: Retries,
    /// The kernel has an entry for the request, or the disk's own thread has a task.
    pub(super) is_open: bool,
    /// The queue stops: a transfer ends after the piece that the kernel has.
    pub(super) is_recalled: bool,
    /// Guest memory has changed: `rest` must release its snapshot when the request is done.
    pub(super) is_retired: bool,
    /// The queue has listed the token: a request of it may hold the present guest memory.
    pub(super) is_holder: bool,
}

/// The queue's next step for a request after the kernel's result for one of its entries.
pub(super) enum Step {
    /// Give the kernel another entry.
    Again,
    /// Serve the rest on the worker: the kernel has no thread for it.
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
    /// Nobody works on the request any more. True if guest memory has changed while it was in
    /// flight, so that `rest` has released its snapshot.
    pub(super) fn close(&mut self) -> bool {
        (self.is_open, self.is_recalled) = (false, false);
        let was_retired = std::mem::take(&mut self.is_retired);
        if was_retired {
            self.rest.release();
        }
        was_retired
    }

    /// True if the queue stops and a piece of this transfer has ended: no further piece follows.
    pub(super) fn ends_now(&self) -> bool {
        self.is_recalled && self.stage == Stage::Transfer
    }

    /// Guest memory has changed: lets go of its old snapshot, at once or when the request is done.
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

    /// The bytes of the disk that are not done.
    pub(super) fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }

    /// Notes that `n` more bytes of the guest's memory are done.
    pub(super) fn advance(&mut self, n: usize) {
        self.rest.advance(n);
        self.offset += n as u64;
        self.len = self.len.saturating_sub(n as u64);
    }

    /// The kernel has transferred `n` bytes, or ended a stage that transfers none.
    pub(super) fn went_on(&mut self, n: usize, image: &Image) -> Step {
        self.retries.renew();
        match self.stage {
            // The file is shorter than the disk: it was truncated after it was measured.
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
            // The disk's thread has done all stages, a flush included.
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

    /// The kernel's entry has failed with `errno`.
    pub(super) fn failed(&mut self, errno: Errno) -> Step {
        match (errno, self.op, self.stage) {
            // The disk's thread has retried `EAGAIN`, and tried every way to write zeroes.
            (_, _, Stage::Aside) => Step::Failed(errno),
            (Errno::AGAIN | Errno::INTR, ..) if self.retries.may_try_again() => Step::Again,
            // The file system cannot make this transfer without waiting: the next try may wait.
            (Errno::OPNOTSUPP, Op::Read | Op::Write { .. }, Stage::Transfer)
                if !self.retries.is_tried() && self.retries.may_try_again() =>
            {
                Step::Again
            }
            // Only the kernel cancels entries: when it cannot start its first thread.
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
