//! Limits: how many requests or packets, and how many bytes, a device or a group of devices may
//! pass in a second. A limit can change while devices run, and is exact over time
//! (docs/design/0018).
//!
//! ```text
//! control thread:  Limit::set, Group::set -> Order::Refresh: each queue makes its Gate anew
//! a queue's turn:  read the chains in the ring: Gate::admits each request or packet, until one is
//!                  refused; all go back into the ring, and only the admitted ones are popped
//!                  Gate::settle with their true number and bytes: the guest may have changed them
//!                  the queue whose request was refused waits until Gate::due_ns
//! ```
//! Queues without a limit have no [`Gate`], and pay one branch in a turn.

mod bucket;
pub mod divide;
mod group;
pub mod lease;
mod rate;

pub use bucket::Bucket;
use group::Place;
pub use group::{Group, Member};
pub use rate::Rate;

use crate::stats::QueueStats;
use std::sync::{Arc, Mutex, PoisonError};

/// The least credit, in milliseconds: a worker that wakes late by less loses nothing.
pub const CREDIT_MS: u64 = 50;
/// A queue that is refused waits for at least this long, and then passes everything that its rate
/// allows by then: at a high rate a wake for each request would cost more than the request.
const PAUSE_NS: u64 = 500_000;
/// The number of buckets of a device or group.
const CHARGES_MAX: usize = 6;

/// The direction of a request or packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A read, or a packet that the guest sends (tx).
    Read = 0,
    /// Any other limited request, or a packet for the guest (rx).
    Write = 1,
}

/// Requests and bytes per second that may pass: reads or tx, writes or rx, both together; 0: no
/// limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Requests or packets.
    pub ops: [u64; 3],
    /// Bytes of their data.
    pub bytes: [u64; 3],
    /// Milliseconds without requests that may be used afterwards; at least [`CREDIT_MS`].
    pub burst_ms: u64,
}

impl Rates {
    /// True if there is no limit.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.ops == [0; 3] && self.bytes == [0; 3]
    }
}

/// The buckets: those of [`Rates::ops`], then those of [`Rates::bytes`].
#[derive(Debug, Default)]
struct Buckets {
    all: [Bucket; CHARGES_MAX],
}

impl Buckets {
    fn set(&self, rates: &Rates, now_ns: u64) {
        let credit_ns = rates.burst_ms.max(CREDIT_MS).saturating_mul(1_000_000);
        let per_second = rates.ops.iter().chain(&rates.bytes);
        for (bucket, per_second) in self.all.iter().zip(per_second) {
            bucket.set(*per_second, credit_ns, now_ns);
        }
    }
}

/// The buckets from which a request takes.
#[derive(Clone, Copy, Debug)]
struct Charges(Way);

impl Charges {
    fn indexes(self) -> impl Iterator<Item = usize> {
        let way = self.0 as usize;
        [way, 2, 3 + way, 5].into_iter()
    }

    /// Returns each bucket with the units that `count` requests of `bytes` in all take from it.
    fn units(self, count: u64, bytes: u64) -> impl Iterator<Item = (usize, u64)> {
        self.indexes().zip([count, count, bytes, bytes])
    }
}

/// The limits of a device; all rates are 0 if it has none.
#[derive(Debug, Default)]
pub struct Limit {
    own: Buckets,
    rates: Mutex<(Rates, Option<Arc<Member>>)>,
}

impl Limit {
    /// Sets other rates, and another group or none. The caller must wake the queues that wait, so
    /// that they check again ([`Order::Refresh`](crate::Order::Refresh)).
    pub fn set(&self, rates: Rates, group: Option<&Arc<Group>>, now_ns: u64) {
        let mut current = self.rates.lock().unwrap_or_else(PoisonError::into_inner);
        let (former, member) = &mut *current;
        if *former != rates {
            self.own.set(&rates, now_ns);
            *former = rates;
        }
        let is_same = |member: &Arc<Member>| group.is_some_and(|g| Arc::ptr_eq(member.group(), g));
        if !member.as_ref().is_some_and(is_same) {
            *member = group.map(Group::join);
        }
    }

    /// Makes the gate for a queue of the device; `None` if there is no limit.
    #[must_use]
    pub fn gate(self: &Arc<Self>) -> Option<Box<Gate>> {
        let current = self.rates.lock().unwrap_or_else(PoisonError::into_inner);
        let (rates, member) = &*current;
        let gate = || Gate {
            limit: self.clone(),
            member: member.clone(),
            due_ns: 0,
            waits_since_ns: None,
            booked: None,
            place: None,
            reserved: None,
            last_bytes: 0,
            admitted: Passed::default(),
        };
        (!rates.is_none() || member.is_some()).then(|| Box::new(gate()))
    }
}

/// How one queue follows the limits of its device.
#[derive(Debug)]
pub struct Gate {
    limit: Arc<Limit>,
    member: Option<Arc<Member>>,
    /// The time before which nothing passes; 0: the queue does not wait.
    due_ns: u64,
    waits_since_ns: Option<u64>,
    /// The request or packet that was refused last. It is charged already, and passes when it is
    /// due: otherwise other queues of the device could take every new unit before this queue checks
    /// again.
    booked: Option<(Way, u64)>,
    /// The position in the group of the request or packet that was refused last.
    place: Option<Place>,
    /// The charge to the group for a packet that [`Self::passes`] has refused. The packet's bytes
    /// are not known yet, so the charge is for as many bytes as the last packet had.
    reserved: Option<(Way, u64)>,
    last_bytes: u64,
    /// Requests and bytes, by [`Way`], that were admitted since the last [`Self::settle`].
    admitted: Passed,
}

/// Requests or packets and their bytes, by [`Way`].
pub type Passed = [(u64, u64); 2];

impl Gate {
    /// True if nothing passes before a time that has not come; needs no check of the buckets.
    #[must_use]
    pub fn is_closed(&self, now_ns: u64) -> bool {
        now_ns < self.due_ns
    }

    /// Returns when the queue, which was refused, should check again; `None` if it does not wait.
    #[must_use]
    pub fn due_ns(&self) -> Option<u64> {
        (self.due_ns != 0).then_some(self.due_ns)
    }

    /// Ends the queue's wait: it takes no requests for now.
    pub fn open(&mut self) {
        self.due_ns = 0;
    }

    /// True if the next request or packet may pass; then it must be charged. Otherwise it is
    /// refused and counted, and [`Self::due_ns`] returns when the queue must check again.
    pub fn passes(&mut self, way: Way, now_ns: u64, stats: &QueueStats) -> bool {
        let passes = self.may_pass(way, now_ns, stats);
        match &self.member {
            Some(member) if passes => {
                if let Some((way, bytes)) = self.reserved.take() {
                    member.give_back_all(Charges(way), 1, bytes);
                }
            }
            Some(member) if self.reserved.is_none() => {
                member.charge_all(Charges(way), 1, self.last_bytes);
                self.reserved = Some((way, self.last_bytes));
            }
            _ => {}
        }
        passes
    }

    fn may_pass(&mut self, way: Way, now_ns: u64, stats: &QueueStats) -> bool {
        let charges = Charges(way);
        let own_ns = self.own_due_ns(charges);
        self.ends_wait(charges, own_ns, now_ns, stats)
    }

    /// True if a request with these charges may pass, and the queue waits no more. `own_ns`: when
    /// the device's own buckets let the request pass. Otherwise the request is refused.
    fn ends_wait(
        &mut self,
        charges: Charges,
        own_ns: u64,
        now_ns: u64,
        stats: &QueueStats,
    ) -> bool {
        let mut due_ns = own_ns;
        if let Some(member) = &self.member {
            due_ns = due_ns.max(member.due_ns(charges, self.place, now_ns));
            if due_ns > now_ns {
                self.place.get_or_insert_with(|| member.place(charges));
            }
        }
        if due_ns > now_ns {
            self.refuse(due_ns, now_ns, stats);
            return false;
        }
        self.place = None;
        self.due_ns = 0;
        if let Some(since_ns) = self.waits_since_ns.take() {
            stats.limited_ns.add(now_ns.saturating_sub(since_ns));
        }
        true
    }

    fn own_due_ns(&self, charges: Charges) -> u64 {
        let buckets = &self.limit.own.all;
        charges.indexes().map(|index| buckets[index].arrival_ns()).max().unwrap_or(0)
    }

    fn refuse(&mut self, due_ns: u64, now_ns: u64, stats: &QueueStats) {
        self.due_ns = due_ns.max(now_ns.saturating_add(PAUSE_NS));
        match self.waits_since_ns.replace(now_ns) {
            None => stats.limited.add(1),
            Some(since_ns) => stats.limited_ns.add(now_ns.saturating_sub(since_ns)),
        }
    }

    /// As [`Self::passes`], for a request or packet that seems to have `bytes` bytes. It is charged
    /// even if it is refused, and then passes at the queue's next check, unless the group has not
    /// reached its position by then.
    pub fn admits(&mut self, way: Way, bytes: u64, now_ns: u64, stats: &QueueStats) -> bool {
        let (way, bytes) = match self.booked {
            Some(booked) => {
                // The queue checks when its own buckets let the request pass, so 0.
                if !self.ends_wait(Charges(booked.0), 0, now_ns, stats) {
                    return false;
                }
                self.booked = None;
                booked
            }
            None => {
                let passes = self.may_pass(way, now_ns, stats);
                self.charge_all(way, 1, bytes, now_ns);
                if !passes {
                    self.booked = Some((way, bytes));
                    return false;
                }
                (way, bytes)
            }
        };
        let (count, sum) = &mut self.admitted[way as usize];
        (*count, *sum) = (*count + 1, *sum + bytes);
        true
    }

    /// Corrects the charge of the admitted requests or packets to `passed`, their true numbers.
    pub fn settle(&mut self, passed: Passed, now_ns: u64) {
        let admitted = std::mem::take(&mut self.admitted);
        if passed == admitted {
            return;
        }
        for (way, (passed, admitted)) in
            [Way::Read, Way::Write].into_iter().zip(passed.into_iter().zip(admitted))
        {
            let more = (passed.0.saturating_sub(admitted.0), passed.1.saturating_sub(admitted.1));
            let less = (admitted.0.saturating_sub(passed.0), admitted.1.saturating_sub(passed.1));
            self.charge_all(way, more.0, more.1, now_ns);
            self.give_back(way, less.0, less.1);
        }
    }

    fn give_back(&self, way: Way, count: u64, bytes: u64) {
        for (index, units) in Charges(way).units(count, bytes) {
            self.limit.own.all[index].give_back(units);
        }
        if let Some(member) = &self.member {
            member.give_back_all(Charges(way), count, bytes);
        }
    }

    /// Charges a request or packet with this many bytes, which passes.
    pub fn charge(&mut self, way: Way, bytes: u64, now_ns: u64) {
        self.last_bytes = bytes;
        self.charge_all(way, 1, bytes, now_ns);
    }

    /// Charges this many requests or packets, which pass and have this many bytes in all.
    fn charge_all(&self, way: Way, count: u64, bytes: u64, now_ns: u64) {
        for (index, units) in Charges(way).units(count, bytes) {
            self.limit.own.all[index].charge(units, now_ns);
        }
        if let Some(member) = &self.member {
            member.charge_all(Charges(way), count, bytes);
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Some((way, bytes)) = self.booked {
            self.give_back(way, 1, bytes);
        }
        if let (Some((way, bytes)), Some(member)) = (self.reserved, &self.member) {
            member.give_back_all(Charges(way), 1, bytes);
        }
    }
}

#[cfg(test)]
mod tests;
