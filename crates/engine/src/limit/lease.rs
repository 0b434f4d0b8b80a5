//! `Lease`: how a group gets its time if other processes have members of it too: from the
//! supervisor's divider (`divide.rs`), and not from the clock.
//!
//! ```text
//! the divider:   granted_ns: all time that this process was granted since the lease began
//! this process:  Usage:      how much of that it has seen, and holds; what its members need beyond
//! ```
//! Each of the two only reads what the other one has written, so neither waits for the other.

use super::CHARGES_MAX;
use std::fmt::Debug;
use std::sync::Arc;

/// The number of levels for which a process reports what its members need.
pub const LEVELS: usize = 10;
/// The lowest level, in nanoseconds. Each further level is twice the one before. The last one is 67
/// ms: no member is granted more at once.
const LEVEL_MIN_NS: u64 = 1 << 17;
/// The least time between two reports of a process whose members need something.
const TELL_NS: u64 = 2_000_000;

/// Returns the level of this index, in nanoseconds.
#[must_use]
pub const fn level_ns(index: usize) -> u64 {
    LEVEL_MIN_NS << index
}

/// A process's report on one bucket of its lease, in time at the group's rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// How much of the granted time this process has seen.
    pub seen_ns: u64,
    /// How much of the seen time it has not used.
    pub held_ns: u64,
    /// For each level, the sum of the needs of the process's members, each cut to that level.
    pub needs_ns: [u64; LEVELS],
}

/// The usage of all buckets of a lease.
pub type Usages = [Usage; CHARGES_MAX];

/// The source of a group's time in one process. Workers call it, so it does not wait.
pub trait Lease: Debug + Send + Sync {
    /// Returns the time granted since the lease began, for each bucket; `None`: it is not known
    /// now.
    fn granted_ns(&self) -> Option<[u64; CHARGES_MAX]>;
    /// Reports the lease's use to the divider, which wakes if members need time.
    fn tell(&self, usages: &Usages);
}

/// A lease with what its group has seen and reported.
#[derive(Debug)]
pub(super) struct Leased {
    lease: Arc<dyn Lease>,
    seen_ns: [u64; CHARGES_MAX],
    tell_at_ns: u64,
    /// True if the last report said that members need something.
    is_needy: bool,
}

impl Leased {
    pub(super) fn new(lease: Arc<dyn Lease>) -> Self {
        Self { lease, seen_ns: Default::default(), tell_at_ns: 0, is_needy: false }
    }

    /// Returns what was granted since the last call.
    pub(super) fn came_ns(&mut self) -> [u64; CHARGES_MAX] {
        let granted_ns = self.lease.granted_ns().unwrap_or(self.seen_ns);
        let mut came_ns = [0; CHARGES_MAX];
        for (index, seen_ns) in self.seen_ns.iter_mut().enumerate() {
            came_ns[index] = granted_ns[index].saturating_sub(*seen_ns);
            *seen_ns = granted_ns[index].max(*seen_ns);
        }
        came_ns
    }

    /// Reports the `usage` of each bucket, unless the last report was a moment ago.
    pub(super) fn tell(
        &mut self,
        is_needy: bool,
        now_ns: u64,
        usage: impl Fn(usize, u64) -> Usage,
    ) {
        if now_ns < self.tell_at_ns && (self.is_needy || !is_needy) {
            return;
        }
        self.tell_at_ns = now_ns.saturating_add(TELL_NS);
        self.is_needy = is_needy;
        self.lease.tell(&std::array::from_fn(|index| usage(index, self.seen_ns[index])));
    }
}

impl Usage {
    /// Makes a report. `needs`: what each member needs.
    pub(super) fn new(seen_ns: u64, held_ns: u64, needs: impl Iterator<Item = u64>) -> Self {
        let mut usage = Self { seen_ns, held_ns, ..Self::default() };
        for need_ns in needs.filter(|need_ns| *need_ns > 0) {
            for (index, sum_ns) in usage.needs_ns.iter_mut().enumerate() {
                *sum_ns = sum_ns.saturating_add(need_ns.min(level_ns(index)));
            }
        }
        usage
    }

    /// True if some member needs something.
    #[must_use]
    pub fn is_needy(&self) -> bool {
        self.needs_ns[0] > 0
    }
}
