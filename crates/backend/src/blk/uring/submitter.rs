//! Chooses the thread that makes a transfer: the worker, a kernel thread, or the disk's own thread.

use super::{INLINE_BYTES, UringQueue};
use crate::blk::Op;
use crate::sys::file as sys;
use crate::sys::uring::{Ring, RingDisk, Submitter, Width};

/// Direct I/O of a byte costs this many times less than copying it: only its page is looked up.
const DIRECT_SHARE: u64 = 8;

impl UringQueue {
    /// True if the page cache holds this range, or if the kernel cannot tell. A read that misses
    /// the page cache starts to read ahead, and may wait for a device whose queue is full.
    fn is_cached(&self, offset: u64, len: u64) -> bool {
        sys::is_cached(self.image.file(), offset, len).unwrap_or(true)
    }

    /// True if a read should be tried on the worker first ([`Self::read_cached`]).
    pub(super) fn reads_here(&mut self, offset: u64, len: u64, ring: &mut Ring) -> bool {
        self.image.has_nowait()
            && !self.image.is_direct()
            && len <= INLINE_BYTES
            && self.disk.is_some_and(|disk| ring.is_fast(disk))
            && (!ring.is_shared() || self.is_cached(offset, len))
            && self.quota.take(len)
            && ring.take_inline(len)
    }

    /// Chooses the thread that makes the next transfer of a request: the worker, while it submits,
    /// or a kernel thread. A kernel thread makes it in these cases:
    /// 1. The worker would be busy for too long: the transfer is long, or beyond the quota of the
    ///    turn.
    /// 2. The kernel would give it to a thread anyway, or an earlier try has failed with `EAGAIN`.
    /// 3. It could make the worker, and with it other guests, wait for the host's device.
    ///
    /// `None`: the disk's own thread must make it, because a kernel thread would make it only after
    /// writes to other images that share its queue.
    pub(super) fn submitter(
        &mut self,
        token: u32,
        disk: RingDisk,
        ring: &mut Ring,
    ) -> Option<Submitter> {
        let entry = &self.in_flight[token as usize];
        let (is_device, is_read) = (self.image.is_block_device(), entry.op == Op::Read);
        let copies = !self.image.is_direct();
        // Although the kernel is told not to wait, direct I/O of a file, and a read into the page
        // cache, wait if the queue of the device is full. Direct I/O of a block device does not.
        let may_wait = if copies { is_read } else { !is_device };
        // The kernel gives each write into the page cache of a block device to a thread. Ask for a
        // thread right away, so that a slot counts it.
        let is_punted = copies && is_device && !is_read;
        // Without `RWF_NOWAIT` the kernel would give each transfer to a thread, and no slot would
        // count it. So do not leave such a transfer to the worker.
        let can_refuse =
            if copies && !is_read { self.can_write_at_once } else { self.image.has_nowait() };
        let is_refused = !is_punted && !can_refuse;
        // For these transfers kernel threads serve one file after another (`offload.rs`): writes
        // into the page cache of a file, and direct writes if the file system does not allow them
        // in parallel.
        let is_queued = !is_device && !is_read && (copies || !self.image.writes_in_parallel());
        let cost = if copies { entry.len } else { entry.len / DIRECT_SHARE };
        let is_tried = entry.retries.is_tried();
        let submitter = if cost > INLINE_BYTES || is_punted || is_tried && copies {
            Submitter::Kernel(Width::Narrow)
        } else if is_tried || is_refused || may_wait && ring.is_shared() || !ring.is_fast(disk) {
            Submitter::Kernel(Width::Wide)
        } else if !self.quota.take(cost) || !ring.take_inline(cost) {
            Submitter::Kernel(Width::Narrow)
        } else if !copies || is_queued {
            // Have the transfer fail with EAGAIN rather than wait: the kernel would give each
            // transfer that waits to a thread, and then even a later flush of another guest would
            // find no thread.
            Submitter::OwnAtOnce
        } else {
            Submitter::Own
        };
        (!is_queued || submitter == Submitter::OwnAtOnce).then_some(submitter)
    }
}
