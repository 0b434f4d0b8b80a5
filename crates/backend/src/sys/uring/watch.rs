//! `Watch`: measures how long a worker's calls wait, and for which devices.
//!
//! Two kinds of calls may wait for a device although they are told not to: calls that a queue makes
//! for one disk (a read of the page cache), and the submission of entries, which may be of any
//! disk. Each kind has its own list of devices, and the time of a submission within a call does not
//! count as that call's.
#![allow(unsafe_code, reason = "allow-listed: `getrusage` of a thread")]

use super::Event;
use super::fast::{DeviceSlot, ImageDevices};

/// The beginning of a call that may wait for a device.
#[derive(Clone, Copy, Debug)]
pub struct Began {
    at_ns: u64,
    /// Voluntary context switches of this thread so far; `None`: not read, to save a system call.
    waits: Option<i64>,
    /// [`Watch::entered_ns`] when the call began.
    entered_ns: u64,
}

/// The calls of a worker that may wait for a device.
#[derive(Debug, Default)]
pub(super) struct Watch {
    devices: ImageDevices,
    /// The time at which the last such call began or ended.
    called_ns: u64,
    /// The devices of the calls since the last [`Self::took`].
    called: Vec<DeviceSlot>,
    /// The devices of entries in the submission queue that the worker itself will submit.
    placed: Vec<DeviceSlot>,
    /// Nanoseconds spent on submitting such entries.
    entered_ns: u64,
}

impl Watch {
    pub(super) fn open(&mut self, device: u64) -> DeviceSlot {
        self.devices.open(device)
    }

    /// True if the worker may submit requests to the device itself.
    #[inline]
    pub(super) fn is_fast(&self, device: DeviceSlot) -> bool {
        self.devices.is_fast(device, self.called_ns)
    }

    /// Begins a call, or a submission.
    #[inline]
    pub(super) fn begin(&mut self) -> Began {
        self.called_ns = now_ns();
        let at_ns = self.called_ns;
        let waits = self.devices.is_watchful(at_ns).then(waits);
        Began { at_ns, waits, entered_ns: self.entered_ns }
    }

    /// Records that the next call goes to the device.
    #[inline]
    pub(super) fn calls(&mut self, device: DeviceSlot) {
        add(&mut self.called, device);
    }

    /// Ends the calls since `began`.
    #[inline]
    pub(super) fn took(&mut self, began: Began) {
        if !self.called.is_empty() {
            let took_ns = self.time_since(began);
            self.devices.took(&self.called, (took_ns, self.called_ns), has_waited(began));
            self.called.clear();
        }
    }

    /// Records that an entry for the device is in the submission queue.
    #[inline]
    pub(super) fn placed(&mut self, device: DeviceSlot) {
        add(&mut self.placed, device);
    }

    /// True if the next submission may wait for a device.
    #[inline]
    pub(super) fn has_placed(&self) -> bool {
        !self.placed.is_empty()
    }

    /// Ends a submission. `all`: the kernel has taken all entries.
    #[inline]
    pub(super) fn entered(&mut self, began: Began, all: bool) {
        let took_ns = self.time_since(began);
        self.entered_ns += took_ns;
        self.devices.took(&self.placed, (took_ns, self.called_ns), has_waited(began));
        if all {
            self.placed.clear();
        }
    }

    /// Nanoseconds since `began`, without the time of submissions.
    fn time_since(&mut self, began: Began) -> u64 {
        self.called_ns = now_ns();
        let entered_ns = self.entered_ns - began.entered_ns;
        self.called_ns.saturating_sub(began.at_ns).saturating_sub(entered_ns)
    }

    /// Records that a flush or another long call of the device begins.
    pub(super) fn owes(&mut self, device: DeviceSlot, user_data: u64) {
        self.devices.owes(device, user_data, now_ns());
    }

    /// Records that these requests have ended.
    #[inline]
    pub(super) fn paid(&mut self, events: &[Event]) {
        if self.devices.has_debts() && !events.is_empty() {
            let now_ns = now_ns();
            events.iter().for_each(|event| self.devices.paid(event.user_data, now_ns));
        }
    }

    /// Returns the number of calls in which the worker had to wait for a device.
    pub(super) fn waits(&self) -> u64 {
        self.devices.waits()
    }

    #[cfg(test)]
    pub(super) fn submission_took(&mut self, ns: u64) {
        self.entered_ns += ns;
    }
}

/// Adds a device to a short list, unless it is listed.
#[inline]
fn add(devices: &mut Vec<DeviceSlot>, device: DeviceSlot) {
    if !devices.contains(&device) {
        devices.push(device);
    }
}

/// True if this thread has given up its CPU since `began`; `None`: that was not measured.
#[inline]
fn has_waited(began: Began) -> Option<bool> {
    began.waits.map(|before| waits() > before)
}

/// Returns the monotonic clock in nanoseconds.
fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, rest) = (now.tv_sec.cast_unsigned(), now.tv_nsec.cast_unsigned());
    seconds.wrapping_mul(1_000_000_000).wrapping_add(rest)
}

/// Returns the voluntary context switches of this thread (`ru_nvcsw`).
fn waits() -> i64 {
    // SAFETY: all zeroes are a valid `rusage`, which consists of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes one `rusage`, which outlives it, and keeps no pointer.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nvcsw
}
