//! The disks of a ring: the host's device of each disk, and the inbox for the results of the disks'
//! threads.

use super::fast::DeviceSlot;
use super::watch::Began;
use super::{Inbox, Ring, allow_threads};
use std::sync::Arc;

/// A disk of this ring, and the device of the host on which the disk's image lies.
#[derive(Clone, Copy, Debug)]
pub struct RingDisk {
    pub(super) number: u64,
    pub(super) device: DeviceSlot,
}

impl Ring {
    /// Registers a queue of disk `number`, whose image lies on `device` (`st_dev`).
    pub fn open_disk(&mut self, number: u64, device: u64) -> RingDisk {
        if let Some(allowed) = self.threads.open(number) {
            allow_threads(&self.uring, allowed);
        }
        RingDisk { number, device: self.watch.open(device) }
    }

    /// Undoes [`Self::open_disk`] for one queue of the disk.
    pub fn close_disk(&mut self, disk: RingDisk) {
        self.threads.close(disk.number);
    }

    /// Sets whether this worker serves guests of several owners.
    pub fn set_shared(&mut self, is_shared: bool) {
        self.is_shared = is_shared;
    }

    /// True if this worker serves guests of several owners: then a kernel thread should make calls
    /// that may wait for a device although they are told not to.
    #[inline]
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Returns the number of requests that kernel threads are serving: a new request for them may
    /// have to wait for all of these.
    #[must_use]
    pub fn aside(&self) -> usize {
        self.slots.under_way()
    }

    /// True if the worker may submit to the device of `disk` itself; otherwise a kernel thread
    /// should.
    #[inline]
    #[must_use]
    pub fn is_fast(&self, disk: RingDisk) -> bool {
        self.watch.is_fast(disk.device)
    }

    /// Begins to measure calls that may wait for a device although they are told not to.
    #[inline]
    #[must_use]
    pub fn begin(&mut self) -> Began {
        self.watch.begin()
    }

    /// Records that the next call goes to the device of `disk`.
    #[inline]
    pub fn calls(&mut self, disk: RingDisk) {
        self.watch.calls(disk.device);
    }

    /// Ends the measurement. If the worker has waited for a device, its requests are left to kernel
    /// threads for a while.
    #[inline]
    pub fn took(&mut self, began: Began) {
        self.watch.took(began);
    }

    /// Returns the number of calls in which this thread had to wait for a device of the host.
    #[must_use]
    pub fn device_waits(&self) -> u64 {
        self.watch.waits()
    }

    /// Takes back a transfer of `disk` that waits for a kernel thread. Returns false if the kernel
    /// has the transfer, or gets it with the next submission.
    pub fn recall(&mut self, disk: RingDisk, user_data: u64) -> bool {
        self.slots.recall(disk.number, |(_, task, _)| task.user_data == user_data).is_some()
    }

    /// Returns the inbox for the disks' own threads: [`Self::reap`] returns their results as
    /// events.
    #[must_use]
    pub fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// Records that the thread of `disk` has begun a flush or another long call. If it takes too
    /// long, the device is not considered fast until it ends.
    pub fn owes(&mut self, disk: RingDisk, user_data: u64) {
        self.watch.owes(disk.device, user_data);
    }
}
