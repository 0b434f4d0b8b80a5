//! `Bucket`: a limit of units per second, as one number: the time at which the next unit would
//! arrive, if all came evenly at the limit's rate. All queues that share the limit share the
//! number.
//!
//! ```text
//! look:     a time of arrival in the future?   not before then
//! charge:   arrival = max(arrival, now - credit) + units * cost
//! ```
//! 1. A request that finds that the time has come passes, whatever its size: the next one waits for
//!    it. So a request that is larger than the units of a moment is not stuck.
//! 2. Time in which nobody came is lost, but for the credit: a worker that wakes late, or that the
//!    host stops for a while, may pass the units of that time afterwards.
//! 3. Two queues that look at the same moment may both pass, and are both charged: what passes in
//!    a time T is at most rate * (T + credit), and one request of each queue.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// See the module. Every time is one of the workers' clock, in nanoseconds.
#[derive(Debug)]
pub struct Bucket {
    /// 0: nothing has come yet.
    arrival_ns: AtomicU64,
    cost: Cost,
    credit_ns: AtomicU64,
}

/// What a unit takes of the limit's time.
#[derive(Debug)]
pub(super) struct Cost {
    /// Nanoseconds for a unit, times 2^32; 0: no limit.
    unit_q32: AtomicU64,
}

/// Nanoseconds of a second.
const SECOND_NS: u64 = 1_000_000_000;

impl Cost {
    /// Without a limit.
    pub(super) fn new() -> Self {
        Self { unit_q32: AtomicU64::new(0) }
    }

    /// Lets this many units pass in a second (0: any number). Returns how a time that units cost
    /// before is to be changed to the time that they cost now.
    pub(super) fn set(&self, per_second: u64) -> CostChange {
        let to = match per_second {
            0 => 0,
            per_second => ((SECOND_NS << 32) / per_second).max(1),
        };
        CostChange { from: self.unit_q32.swap(to, Ordering::Relaxed), to }
    }

    /// True if there is a limit.
    #[inline]
    pub(super) fn is_set(&self) -> bool {
        self.unit_q32.load(Ordering::Relaxed) != 0
    }

    /// How long this many units take at the limit's rate, in nanoseconds; 0 without a limit.
    #[inline]
    pub(super) fn of(&self, units: u64) -> u64 {
        let cost = u128::from(units) * u128::from(self.unit_q32.load(Ordering::Relaxed));
        u64::try_from((cost + (1 << 31)) >> 32).unwrap_or(u64::MAX)
    }
}

/// A former cost and the present one.
#[derive(Clone, Copy, Debug)]
pub(super) struct CostChange {
    from: u64,
    to: u64,
}

impl CostChange {
    /// True if the rate is what it was.
    pub(super) fn is_none(self) -> bool {
        self.from == self.to
    }

    /// True if there was no limit before.
    pub(super) fn is_first(self) -> bool {
        self.from == 0
    }

    /// The time that units cost now, which cost `former_ns` before. What passed while there was no
    /// limit costs nothing.
    pub(super) fn of(self, former_ns: u64) -> u64 {
        match self.from {
            0 => 0,
            from => {
                let now_ns = u128::from(former_ns) * u128::from(self.to) / u128::from(from);
                u64::try_from(now_ns).unwrap_or(u64::MAX)
            }
        }
    }
}

impl Bucket {
    /// Without a limit.
    #[must_use]
    pub fn new() -> Self {
        Self { arrival_ns: AtomicU64::new(0), cost: Cost::new(), credit_ns: AtomicU64::new(0) }
    }

    /// Lets this many units pass in a second (0: any number), with this credit. Units that passed
    /// ahead of time stay charged. For one caller at a time; queues that wait must be told to look
    /// again.
    pub fn set(&self, per_second: u64, credit_ns: u64, now_ns: u64) {
        self.credit_ns.store(credit_ns, Ordering::Relaxed);
        let changed = self.cost.set(per_second);
        if changed.is_none() {
            return;
        }
        self.update(|arrival_ns| {
            let owed_ns = arrival_ns.saturating_sub(now_ns);
            match changed.from {
                0 => 0,
                _ if owed_ns == 0 => arrival_ns,
                _ => now_ns.saturating_add(changed.of(owed_ns)),
            }
        });
    }

    /// True if there is a limit.
    #[inline]
    pub fn is_set(&self) -> bool {
        self.cost.is_set()
    }

    /// When the next unit arrives; not after `now_ns`: it may pass.
    #[inline]
    pub fn arrival_ns(&self) -> u64 {
        if self.is_set() { self.arrival_ns.load(Ordering::Relaxed) } else { 0 }
    }

    /// How much time without a request is kept.
    #[inline]
    pub fn credit_ns(&self) -> u64 {
        self.credit_ns.load(Ordering::Relaxed)
    }

    /// This many units pass now.
    #[inline]
    pub fn charge(&self, units: u64, now_ns: u64) {
        let cost_ns = self.cost.of(units);
        if cost_ns != 0 {
            let least_ns = now_ns.saturating_sub(self.credit_ns());
            self.update(|arrival_ns| {
                // The first one brings no credit.
                let from_ns = if arrival_ns == 0 { now_ns } else { arrival_ns.max(least_ns) };
                from_ns.saturating_add(cost_ns)
            });
        }
    }

    /// This many units that were charged have not passed.
    pub fn give_back(&self, units: u64) {
        let cost_ns = self.cost.of(units);
        if cost_ns != 0 {
            // Not to 0, which would be a bucket that nothing has come to.
            self.update(|arrival_ns| arrival_ns.saturating_sub(cost_ns).max(1));
        }
    }

    fn update(&self, next: impl Fn(u64) -> u64) {
        let mut seen = self.arrival_ns.load(Ordering::Relaxed);
        // Relaxed: the number says nothing of other memory.
        while let Err(now) = self.arrival_ns.compare_exchange_weak(
            seen,
            next(seen),
            Ordering::Relaxed,
            Ordering::Relaxed,
        ) {
            seen = now;
        }
    }
}

impl Default for Bucket {
    fn default() -> Self {
        Self::new()
    }
}
