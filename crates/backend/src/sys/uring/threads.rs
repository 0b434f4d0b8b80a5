//! `IoWorkers`: how many kernel threads a ring may use. Pure.
//!
//! A request occupies its thread while its device makes it wait. If fewer threads were allowed than
//! the slots admit entries, a few disks of a device that has stopped could occupy all threads, and
//! a flush of another device's disk would find none. So there is a thread for each entry that a
//! slot admits. Threads start when entries wait and end when they are idle: many are allowed, few
//! exist.

use super::slots::Width;
use std::collections::HashMap;

/// The number of threads that a ring is allowed from the beginning. The kernel's default for two
/// CPUs would be eight.
pub(super) const MIN: u32 = 128;
/// The most threads that a ring is allowed, since a host or a container may limit its tasks. If a
/// worker has fifteen disks or more, the disks share these threads.
const MAX: u32 = 512;

/// The disks that a ring serves, and the number of threads that the kernel may use for them.
#[derive(Debug)]
pub(super) struct IoWorkers {
    /// The number of queues that each disk has on this ring, by the disk's number.
    disks: HashMap<u64, usize>,
    allowed: u32,
}

impl Default for IoWorkers {
    fn default() -> Self {
        Self { disks: HashMap::new(), allowed: MIN }
    }
}

impl IoWorkers {
    /// Adds a queue of the disk with this number. Returns the number of threads that the kernel
    /// must be allowed from now on; `None`: it is unchanged.
    pub(super) fn open(&mut self, number: u64) -> Option<u32> {
        *self.disks.entry(number).or_default() += 1;
        let wanted = self.disks.len().saturating_mul(of_disk());
        let wanted = u32::try_from(wanted).unwrap_or(MAX).min(MAX);
        (wanted > self.allowed).then(|| {
            self.allowed = wanted;
            wanted
        })
    }

    /// Removes a queue of the disk. The number of allowed threads is not reduced: idle threads end
    /// by themselves.
    pub(super) fn close(&mut self, number: u64) {
        if let Some(queues) = self.disks.get_mut(&number) {
            *queues -= 1;
            if *queues == 0 {
                self.disks.remove(&number);
            }
        }
    }
}

/// Returns the number of threads that the requests of one disk can occupy.
const fn of_disk() -> usize {
    Width::Narrow.max() + Width::Wide.max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_disk_has_threads_of_its_own_up_to_a_limit_and_gives_its_share_back() {
        let mut threads = IoWorkers::default();
        assert_eq!([1, 1, 1, 1, 2, 3].map(|disk| threads.open(disk)), [None; 6], "there are some");
        assert_eq!([4, 4, 5].map(|disk| threads.open(disk)), [Some(144), None, Some(180)]);
        threads.close(5);
        assert_eq!(threads.open(6), None, "in the place of the one that has left");
        threads.close(4);
        assert_eq!(threads.open(7), Some(180 + 36), "a queue of the fourth disk is left");
        assert!((8..100).filter_map(|disk| threads.open(disk)).all(|allowed| allowed <= MAX));
        assert_eq!(threads.allowed, MAX);
        (1..100).for_each(|disk| threads.close(disk));
        threads.close(1000);
    }
}
