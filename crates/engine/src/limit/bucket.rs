//! `Bucket`: a limit of units per second, as one number: the time at which the next unit would
//! arrive, if all arrived evenly at the limit's rate. All queues that share the limit share the
//! number.
//!
//! ```text
//! check:    a time of arrival in the future?   the request passes not before then
//! charge:   arrival = max(arrival, now - credit) + units * cost
//! ```
//! 1. A request passes, whatever its size, if the time of arrival has come: the next request waits
//!    for what this one costs. So a request that is larger than the units of a moment is not stuck.
//! 2. Time without a request is lost, except for the credit: a worker that wakes late, or that the
//!    host stops for a while, may pass the units of that time afterwards.
//! 3. Two queues that check at the same moment may both pass, and are both charged: in a time T at
//!    most rate * (T + credit) passes, plus one request of each queue.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// See the module. All times are nanoseconds of the workers' clock.
#[derive(Debug)]
pub struct Bucket {
    /// The time of arrival of the next unit; 0: nothing was charged yet.
    arrival_ns: AtomicU64,
    cost: Cost,
    credit_ns: AtomicU64,
}

/// How much of the limit's time a unit takes.
#[derive(Debug)]
pub(super) struct Cost {
    /// Nanoseconds per unit, times 2^32; 0: no limit.
    unit_q32: AtomicU64,
}

/// Nanoseconds per second.
const SECOND_NS: u64 = 1_000_000_000;

impl Cost {
    /// Makes the cost of a unit without a limit.
    pub(super) fn new() -> Self {
        Self { unit_q32: AtomicU64::new(0) }
    }

    /// Sets the rate to this many units per second (0: no limit). Returns how to convert a time at
    /// the former rate to the same units' time at the new rate.
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

    /// Returns the nanoseconds of this many units at the limit's rate; 0 without a limit.
    #[inline]
    pub(super) fn of(&self, units: u64) -> u64 {
        let cost = u128::from(units) * u128::from(self.unit_q32.load(Ordering::Relaxed));
        u64::try_from((cost + (1 << 31)) >> 32).unwrap_or(u64::MAX)
    }
}

/// The former cost of a unit and the new one.
#[derive(Clone, Copy, Debug)]
pub(super) struct CostChange {
    from: u64,
    to: u64,
}

impl CostChange {
    /// True if the rate did not change.
    pub(super) fn is_none(self) -> bool {
        self.from == self.to
    }

    /// True if there was no limit before.
    pub(super) fn is_first(self) -> bool {
        self.from == 0
    }

    /// Returns the time at the new rate of the units that took `former_ns` at the former rate; 0 if
    /// there was no limit before.
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
    /// Makes a bucket without a limit.
    #[must_use]
    pub fn new() -> Self {
        Self { arrival_ns: AtomicU64::new(0), cost: Cost::new(), credit_ns: AtomicU64::new(0) }
    }

    /// Sets the rate to this many units per second (0: no limit), and the credit. Units that passed
    /// ahead of time stay charged. Calls must not overlap; the caller then wakes the queues that
    /// wait, so that they check again.
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

    /// Returns when the next unit arrives; a request may pass if that is not after `now_ns`.
    #[inline]
    pub fn arrival_ns(&self) -> u64 {
        if self.is_set() { self.arrival_ns.load(Ordering::Relaxed) } else { 0 }
    }

    /// Returns how much time without a request may be used afterwards.
    #[inline]
    pub fn credit_ns(&self) -> u64 {
        self.credit_ns.load(Ordering::Relaxed)
    }

    /// Charges this many units, which pass now.
    #[inline]
    pub fn charge(&self, units: u64, now_ns: u64) {
        let cost_ns = self.cost.of(units);
        if cost_ns != 0 {
            let least_ns = now_ns.saturating_sub(self.credit_ns());
            self.update(|arrival_ns| {
                // The first charge gets no credit.
                let from_ns = if arrival_ns == 0 { now_ns } else { arrival_ns.max(least_ns) };
                from_ns.saturating_add(cost_ns)
            });
        }
    }

    /// Refunds this many units that were charged and have not passed.
    pub fn give_back(&self, units: u64) {
        let cost_ns = self.cost.of(units);
        if cost_ns != 0 {
            // Not to 0, which means that nothing was charged yet.
            self.update(|arrival_ns| arrival_ns.saturating_sub(cost_ns).max(1));
        }
    }

    fn update(&self, next: impl Fn(u64) -> u64) {
        let mut seen = self.arrival_ns.load(Ordering::Relaxed);
        // Relaxed: the number orders no other memory.
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
