//! `Group`: a limit that several devices share, and how they divide it.
//!
//! The buckets of a group say how much all members together may pass. The first to look takes all
//! that has come, so a member with many queues, or with a faster worker, would get most of it. So
//! the group keeps account of the units that each member has passed, in time at the group's rate:
//!
//! ```text
//! a member passes units:       passed += units * cost
//! it is refused by the group:  it waits, until it passes or comes too late
//! a member may pass:           the group's arrival has come, and nobody waits that has passed
//!                              less by more than LEAD_NS
//! one that does not wait:      passed = max(passed, the least that one who waits has passed)
//! ```
//! 1. Members that always have work pass equally much, to [`LEAD_NS`] and one request, however many
//!    queues they have and however large their requests are.
//! 2. Nobody waits for a member that wants nothing, and such a member saves nothing up.
//! 3. A member that is refused must come again when it may: one that is [`LATE_NS`] late does not
//!    count as waiting. Units that nobody took in that time are in the credit of the buckets, so
//!    nothing is lost: a guest that only ever begins to wait cannot hold up the others.

use super::{Buckets, CHARGES_MAX, Charges, Rates};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// How far a member may be ahead of another one that waits.
const LEAD_NS: u64 = 2_000_000;
/// A member that waits and does not look for this long after its time is not waited for.
const LATE_NS: u64 = 20_000_000;
/// Time between two counts of the members.
const COUNT_NS: u64 = 200_000;
/// Shortest and longest pause of one that is ahead: it is to come before the credit is full.
const PAUSES_NS: (u64, u64) = (1_000_000, 20_000_000);
/// Nobody waits.
const NOBODY: u64 = u64::MAX;

/// A limit that several devices share.
#[derive(Debug)]
pub struct Group {
    buckets: Buckets,
    rates: Mutex<Rates>,
    members: Mutex<Vec<Weak<Member>>>,
    /// By bucket: the least that a waiting member has passed; [`NOBODY`].
    least_ns: [AtomicU64; CHARGES_MAX],
    /// By bucket: the last value of `least_ns` that was not [`NOBODY`].
    level_ns: [AtomicU64; CHARGES_MAX],
    counted_at_ns: AtomicU64,
}

/// A device in its group. All queues of the device share it.
#[derive(Debug)]
pub struct Member {
    group: Arc<Group>,
    /// By bucket: the units that it has passed, in time at the group's rate.
    passed_ns: [AtomicU64; CHARGES_MAX],
    /// A bit for each bucket that it waits for.
    waits: AtomicU64,
    waits_until_ns: AtomicU64,
}

impl Group {
    /// A group with these rates.
    #[must_use]
    pub fn new(rates: Rates, now_ns: u64) -> Arc<Self> {
        let group = Self {
            buckets: Buckets::default(),
            rates: Mutex::default(),
            members: Mutex::default(),
            least_ns: std::array::from_fn(|_| AtomicU64::new(NOBODY)),
            level_ns: Default::default(),
            counted_at_ns: AtomicU64::new(0),
        };
        group.set(rates, now_ns);
        Arc::new(group)
    }

    /// Other rates, at once. Queues that wait must be told to look again.
    pub fn set(&self, rates: Rates, now_ns: u64) {
        let mut current = self.rates.lock().unwrap_or_else(PoisonError::into_inner);
        if *current == rates {
            return;
        }
        *current = rates;
        self.buckets.set(&rates, now_ns);
        // The account of each member was kept at the former rates: forget it.
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        let members = members.iter().filter_map(Weak::upgrade);
        members.for_each(|member| member.passed_ns.iter().for_each(zero));
        self.level_ns.iter().for_each(zero);
        self.least_ns.iter().for_each(|least| least.store(NOBODY, Ordering::Relaxed));
    }

    /// Its rates.
    #[must_use]
    pub fn rates(&self) -> Rates {
        *self.rates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a device.
    #[must_use]
    pub fn join(self: &Arc<Self>) -> Arc<Member> {
        let member = Arc::new(Member {
            group: self.clone(),
            passed_ns: Default::default(),
            waits: AtomicU64::new(0),
            waits_until_ns: AtomicU64::new(0),
        });
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(&member));
        member
    }

    /// Counts the members that wait, now and then, on the thread of the queue that looks. If
    /// another thread holds the list, the last count stays valid.
    fn count(&self, now_ns: u64) {
        let counted_at_ns = self.counted_at_ns.load(Ordering::Relaxed);
        if now_ns.saturating_sub(counted_at_ns) < COUNT_NS {
            return;
        }
        let Ok(members) = self.members.try_lock() else { return };
        self.counted_at_ns.store(now_ns, Ordering::Relaxed);
        let mut least_ns = [NOBODY; CHARGES_MAX];
        for member in members.iter().filter_map(Weak::upgrade) {
            let waits = member.waits.load(Ordering::Relaxed);
            if waits == 0 || member.waits_until_ns.load(Ordering::Relaxed) < now_ns {
                continue;
            }
            for (index, least_ns) in least_ns.iter_mut().enumerate() {
                if waits >> index & 1 != 0 {
                    let passed_ns = member.passed_ns[index].load(Ordering::Relaxed);
                    *least_ns = passed_ns.min(*least_ns);
                }
            }
        }
        for (index, least_ns) in least_ns.into_iter().enumerate() {
            self.least_ns[index].store(least_ns, Ordering::Relaxed);
            if least_ns != NOBODY {
                self.level_ns[index].store(least_ns, Ordering::Relaxed);
            }
        }
    }
}

impl Member {
    /// Its group.
    #[must_use]
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// When a request that takes from these buckets may pass, or should look again; not after
    /// `now_ns`: it may pass now.
    pub(super) fn due_ns(&self, charges: Charges, now_ns: u64) -> u64 {
        let Group { buckets, least_ns, level_ns, .. } = &*self.group;
        self.group.count(now_ns);
        let waits = self.waits.load(Ordering::Relaxed);
        let (mut due_ns, mut bits) = (0, 0);
        for index in charges.indexes().filter(|index| buckets.all[*index].is_set()) {
            bits |= 1 << index;
            due_ns = due_ns.max(buckets.all[index].arrival_ns());
            let least_ns = least_ns[index].load(Ordering::Relaxed);
            let mut passed_ns = self.passed_ns[index].load(Ordering::Relaxed);
            if waits >> index & 1 == 0 {
                passed_ns = passed_ns.max(level_ns[index].load(Ordering::Relaxed));
                self.passed_ns[index].store(passed_ns, Ordering::Relaxed);
            }
            let ahead_ns = passed_ns.saturating_sub(least_ns);
            if ahead_ns > LEAD_NS {
                due_ns = due_ns.max(now_ns + (ahead_ns / 4).clamp(PAUSES_NS.0, PAUSES_NS.1));
            }
        }
        if due_ns > now_ns {
            self.waits.store(waits | bits, Ordering::Relaxed);
            let until_ns = due_ns.saturating_add(LATE_NS);
            if self.waits_until_ns.load(Ordering::Relaxed) < until_ns {
                self.waits_until_ns.store(until_ns, Ordering::Relaxed);
            }
        } else if waits & bits != 0 {
            self.waits.store(waits & !bits, Ordering::Relaxed);
        }
        due_ns
    }

    pub(super) fn charge(&self, index: usize, units: u64, now_ns: u64) {
        let bucket = &self.group.buckets.all[index];
        bucket.charge(units, now_ns);
        self.passed_ns[index].fetch_add(bucket.cost_ns(units), Ordering::Relaxed);
    }

    pub(super) fn give_back(&self, index: usize, units: u64) {
        let bucket = &self.group.buckets.all[index];
        bucket.give_back(units);
        let cost_ns = bucket.cost_ns(units);
        let less = |passed_ns: u64| Some(passed_ns.saturating_sub(cost_ns));
        let _ = self.passed_ns[index].fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

fn zero(number: &AtomicU64) {
    number.store(0, Ordering::Relaxed);
}
