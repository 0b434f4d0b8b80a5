//! The disks of a ring: which device each lies on, and where their own threads put results.

use super::calm::DeviceSlot;
use super::watch::Began;
use super::{Inbox, Ring, allow_threads};
use std::sync::Arc;

/// A disk as this ring knows it, and the device of the host on which it lies.
#[derive(Clone, Copy, Debug)]
pub struct RingDisk {
    pub(super) number: u64,
    pub(super) device: DeviceSlot,
}

impl Ring {
    /// A disk, told by its number, whose image lies on the host's `device` (as `stat` numbers it).
    pub fn open_disk(&mut self, number: u64, device: u64) -> RingDisk {
        if let Some(allowed) = self.threads.open(number) {
            allow_threads(&self.uring, allowed);
        }
        RingDisk { number, device: self.watch.open(device) }
    }

    /// Ends what [`Self::open_disk`] has begun, for one of the disk's queues.
    pub fn close_disk(&mut self, disk: RingDisk) {
        self.threads.close(disk.number);
    }

    /// Says whether guests of several owners are served here.
    pub fn set_shared(&mut self, is_shared: bool) {
        self.is_shared = is_shared;
    }

    /// True if guests of several owners are served here: what may wait for a device, although it is
    /// told not to, should be done by a thread of the kernel.
    #[inline]
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Requests that the kernel's threads have been given and not ended: what one that is given to
    /// them now may have to wait for.
    #[must_use]
    pub fn aside(&self) -> usize {
        self.lanes.under_way()
    }

    /// True if the worker may submit to the device of `disk` by its own hand; else a thread of the
    /// kernel should.
    #[inline]
    #[must_use]
    pub fn is_calm(&self, disk: RingDisk) -> bool {
        self.watch.is_calm(disk.device)
    }

    /// Begins calls that may wait for a device, although they are told not to.
    #[inline]
    #[must_use]
    pub fn begin(&mut self) -> Began {
        self.watch.begin()
    }

    /// The next call goes to the device of `disk`.
    #[inline]
    pub fn calls(&mut self, disk: RingDisk) {
        self.watch.calls(disk.device);
    }

    /// Ends the calls. A device that has made the worker wait is left to the kernel's threads for
    /// a while.
    #[inline]
    pub fn took(&mut self, began: Began) {
        self.watch.took(began);
    }

    /// Calls in which this thread was made to wait for a device of the host.
    #[must_use]
    pub fn device_waits(&self) -> u64 {
        self.watch.waits()
    }

    /// Takes back a transfer of `disk` that waits for a thread of the kernel. False: the kernel has
    /// it, or is to get it with the next submission.
    pub fn recall(&mut self, disk: RingDisk, user_data: u64) -> bool {
        self.lanes.recall(disk.number, |(_, task, _)| task.user_data == user_data).is_some()
    }

    /// Where a disk's own thread puts its results: [`Self::reap`] takes them out as events.
    #[must_use]
    pub fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// The thread of `disk` has been given what a device should not take long for. While it does,
    /// the device is not calm.
    pub fn owes(&mut self, disk: RingDisk, user_data: u64) {
        self.watch.owes(disk.device, user_data);
    }
}
