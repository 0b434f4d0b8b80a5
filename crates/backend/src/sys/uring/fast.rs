//! `ImageDevices`: decides for which devices of the host a worker may submit requests itself. Pure:
//! the time is an argument.
//!
//! The cheapest submission is one that the worker makes itself, told not to wait. Some calls wait
//! all the same: for a free tag of a device whose queue is full (direct I/O of a file, the
//! readahead of a read that misses the page cache), or for a journal that is being written. While
//! it waits, the worker serves no guest, not even those of other devices. A kernel thread may wait;
//! it costs some ten microseconds for each request, which does not matter for a device that is slow
//! already. So for each device it is recorded whether it is *fast*; only then the worker submits to
//! it:
//! ```text
//! a call took longer than SLOW_NS?   not fast for a while, longer each time it happens again soon
//! a flush runs for OWING_NS?         not fast until it returns: the device is saturated, and its
//!                                    requests are left to kernel threads
//! ```
//! A long call need not have waited: another program may have taken the CPU. A thread that waited
//! shows a voluntary context switch (`ru_nvcsw`). Reading that counter is a system call, so it is
//! read only for `WATCHFUL_NS` after a long call.

/// A call that took longer has waited, or lost its CPU.
const SLOW_NS: u64 = 4_000_000;
/// A device that has finished no flush for so long is considered saturated.
const OWING_NS: u64 = 5_000_000;
/// How long a device is not considered fast: the first time, and the longest.
const AWAY_NS_MIN: u64 = 250_000_000;
const AWAY_NS_MAX: u64 = 8_000_000_000;
/// If a device was fast for so long, its next pause is the shortest again.
const RECOVERED_NS: u64 = 10_000_000_000;
/// For so long after a long call, the worker checks for each call whether it has waited.
const WATCHFUL_NS: u64 = 5_000_000_000;

use std::collections::HashMap;

/// The index of a device in its ring's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceSlot(usize);

/// The devices on which the images of a worker lie.
#[derive(Debug, Default)]
pub(super) struct ImageDevices {
    devices: Vec<Device>,
    /// The flushes and other long calls under way, by `user_data`, with their devices.
    owed: HashMap<u64, DeviceSlot>,
    watchful_until_ns: u64,
    /// Number of calls in which the worker waited for a device.
    waits: u64,
}

#[derive(Debug)]
struct Device {
    /// The device number (`st_dev`) of its files.
    number: u64,
    /// The device is not fast until this time.
    away_until_ns: u64,
    away_ns: u64,
    /// The number of flushes and other long calls under way, and the time since which none has
    /// ended.
    owed: usize,
    owing_since_ns: u64,
}

impl ImageDevices {
    /// Returns the slot of the device with this number; adds it if it is new.
    pub(super) fn open(&mut self, number: u64) -> DeviceSlot {
        let known = self.devices.iter().position(|device| device.number == number);
        DeviceSlot(known.unwrap_or_else(|| {
            self.devices.push(Device {
                number,
                away_until_ns: 0,
                away_ns: AWAY_NS_MIN,
                owed: 0,
                owing_since_ns: 0,
            });
            self.devices.len() - 1
        }))
    }

    /// True if the worker may submit requests to the device itself.
    #[inline]
    pub(super) fn is_fast(&self, at: DeviceSlot, now_ns: u64) -> bool {
        let device = &self.devices[at.0];
        let owes = device.owed > 0 && now_ns.saturating_sub(device.owing_since_ns) > OWING_NS;
        now_ns >= device.away_until_ns && !owes
    }

    /// True while the worker should read `ru_nvcsw` around its calls.
    #[inline]
    pub(super) fn is_watchful(&self, now_ns: u64) -> bool {
        now_ns < self.watchful_until_ns
    }

    /// Records a call in which the worker submitted to the devices `at`, and which ended at
    /// `now_ns`. `has_waited`: whether the thread gave up its CPU during the call; `None`: that was
    /// not measured.
    #[inline]
    pub(super) fn took(
        &mut self,
        at: &[DeviceSlot],
        (took_ns, now_ns): (u64, u64),
        has_waited: Option<bool>,
    ) {
        if took_ns >= SLOW_NS {
            self.took_long(at, now_ns, has_waited);
        }
    }

    #[cold]
    fn took_long(&mut self, at: &[DeviceSlot], now_ns: u64, has_waited: Option<bool>) {
        self.watchful_until_ns = now_ns + WATCHFUL_NS;
        if has_waited == Some(false) {
            return;
        }
        self.waits += 1;
        for DeviceSlot(at) in at {
            let device = &mut self.devices[*at];
            let fast_for_ns = now_ns.saturating_sub(device.away_until_ns);
            device.away_ns = match fast_for_ns < RECOVERED_NS && device.away_until_ns > 0 {
                true => (device.away_ns * 2).min(AWAY_NS_MAX),
                false => AWAY_NS_MIN,
            };
            device.away_until_ns = now_ns + device.away_ns;
        }
    }

    /// Records that a flush, or another long call of a device, is under way as `user_data`.
    pub(super) fn owes(&mut self, at: DeviceSlot, user_data: u64, now_ns: u64) {
        let device = &mut self.devices[at.0];
        if device.owed == 0 {
            device.owing_since_ns = now_ns;
        }
        device.owed += 1;
        self.owed.insert(user_data, at);
    }

    /// Returns the number of calls in which the worker waited for a device.
    pub(super) fn waits(&self) -> u64 {
        self.waits
    }

    /// True if a flush or another long call is under way.
    #[inline]
    pub(super) fn has_debts(&self) -> bool {
        !self.owed.is_empty()
    }

    /// Records that `user_data` has ended, if it was a flush or another long call.
    pub(super) fn paid(&mut self, user_data: u64, now_ns: u64) {
        let Some(at) = self.owed.remove(&user_data) else { return };
        let device = &mut self.devices[at.0];
        device.owed -= 1;
        device.owing_since_ns = now_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_device_that_made_the_worker_wait_gets_nothing_by_hand_for_longer_each_time() {
        let mut devices = ImageDevices::default();
        let (slow, other) = (devices.open(1), devices.open(2));
        assert_eq!((devices.open(1), devices.open(2)), (slow, other), "one slot for each");
        let mut now = 1000 * MS;
        let mut pauses = Vec::new();
        for _ in 0..7 {
            assert!(devices.is_fast(slow, now));
            devices.took(&[slow], (150 * MS, now), Some(true));
            assert!(devices.is_fast(other, now), "the worker did not submit to it");
            devices.took(&[other], (0, now), None);
            let began = now;
            while !devices.is_fast(slow, now) {
                now += 10 * MS;
            }
            pauses.push((now - began) / MS);
        }
        assert_eq!(pauses, [250, 500, 1000, 2000, 4000, 8000, 8000]);
        assert_eq!(devices.waits(), 7);
        now += 20_000 * MS;
        assert!(devices.is_fast(slow, now));
        devices.took(&[slow], (150 * MS, now), Some(true));
        assert!(!devices.is_fast(slow, now + 249 * MS), "it begins anew");
        assert!(devices.is_fast(slow, now + 250 * MS));
    }

    #[test]
    fn a_worker_that_was_interrupted_learns_to_tell_that_from_waiting() {
        let mut devices = ImageDevices::default();
        let device = devices.open(1);
        let mut now = 1000 * MS;
        assert!(!devices.is_watchful(now));
        assert!(devices.is_fast(device, now));
        devices.took(&[device], (20 * MS, now), None);
        assert!(!devices.is_fast(device, now), "it may have waited: nobody looked");
        assert!(devices.is_watchful(now));
        now += 250 * MS;
        for _ in 0..100 {
            assert!(devices.is_fast(device, now), "it was interrupted, and that is known");
            assert!(devices.is_watchful(now));
            devices.took(&[device], (20 * MS, now), Some(false));
            now += 100 * MS;
        }
        devices.took(&[device], (3 * MS, now), None);
        assert!(!devices.is_watchful(now + 5000 * MS), "it has gone well for long");
    }

    #[test]
    fn a_device_with_an_old_flush_is_not_calm_until_flushes_come_back_again() {
        let mut devices = ImageDevices::default();
        let (device, other) = (devices.open(1), devices.open(2));
        devices.owes(device, 10, 0);
        devices.owes(device, 11, 4 * MS);
        assert!(devices.is_fast(device, 5 * MS));
        assert!(!devices.is_fast(device, 6 * MS), "the first is old");
        assert!(devices.is_fast(other, 6 * MS));
        devices.paid(12, 7 * MS);
        assert!(!devices.is_fast(device, 7 * MS), "that was not owed");
        devices.paid(10, 7 * MS);
        assert!(devices.is_fast(device, 8 * MS), "they come back");
        assert!(!devices.is_fast(device, 13 * MS), "the second is late too");
        devices.paid(11, 14 * MS);
        assert!(!devices.has_debts());
        assert!(devices.is_fast(device, 1000 * MS));
    }
}
