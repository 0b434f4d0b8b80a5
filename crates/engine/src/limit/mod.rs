//! Limits: how many requests or packets, and how many bytes, a device or a group of devices may
//! pass in a second. Live, and exact over time (docs/design/0018).
//!
//! ```text
//! control thread:  Limit::set, Group::set -> Order::Refresh: each queue takes its Gate anew
//! a queue's turn:  a look at what the ring has: Gate::admits each request or packet, until one is
//!                  refused; all go back into the ring, and only those that may pass are popped
//!                  Gate::settle with their true number and bytes: the guest may have changed them
//!                  the queue of one that was refused waits until Gate::due_ns
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

/// Time without requests that is kept, at least: a worker that wakes late by less loses nothing.
pub const CREDIT_MS: u64 = 50;
/// Who is refused waits for this long at least, and then takes all that has come: at a high rate a
/// wake for each request would cost more than the request.
const PAUSE_NS: u64 = 500_000;
/// Buckets of a device or group.
const CHARGES_MAX: usize = 6;

/// Which way a request or packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A read, or a packet that the guest sends (tx).
    Read = 0,
    /// Any other request that takes from a limit, or a packet for the guest (rx).
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
    /// Milliseconds without requests that are kept; no less than [`CREDIT_MS`] count.
    pub burst_ms: u64,
}

impl Rates {
    /// True if nothing is limited.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.ops == [0; 3] && self.bytes == [0; 3]
    }
}

/// The buckets: those of the operations of [`Rates`], then those of the bytes.
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

/// Which buckets a request takes from.
#[derive(Clone, Copy, Debug)]
struct Charges(Way);

impl Charges {
    fn indexes(self) -> impl Iterator<Item = usize> {
        let way = self.0 as usize;
        [way, 2, 3 + way, 5].into_iter()
    }

    /// Each bucket with the units that this many requests of this many bytes in all take from it.
    fn units(self, count: u64, bytes: u64) -> impl Iterator<Item = (usize, u64)> {
        self.indexes().zip([count, count, bytes, bytes])
    }
}

/// The limit of a device, whether it has one or not.
#[derive(Debug, Default)]
pub struct Limit {
    own: Buckets,
    rates: Mutex<(Rates, Option<Arc<Member>>)>,
}

impl Limit {
    /// Other rates, and another group or none, at once. Queues that wait must be told to look
    /// again ([`Order::Refresh`](crate::Order::Refresh)).
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

    /// The limit for a queue of the device from now on; `None` if nothing is limited.
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

/// A limit as one queue goes by it.
#[derive(Debug)]
pub struct Gate {
    limit: Arc<Limit>,
    member: Option<Arc<Member>>,
    /// Nothing passes before; 0: the queue does not wait.
    due_ns: u64,
    waits_since_ns: Option<u64>,
    /// The request or packet that was refused last is charged already, and passes when it is due:
    /// other queues of the device may not take every unit that comes before this one looks again.
    booked: Option<(Way, u64)>,
    /// The place in the group of the request or packet that was refused last.
    place: Option<Place>,
    /// What is charged to the group for a packet that [`Self::passes`] has refused. Its bytes are
    /// not known yet: those of the last one stand for them.
    reserved: Option<(Way, u64)>,
    last_bytes: u64,
    /// Requests and bytes that were admitted and charged since the last [`Self::settle`], by
    /// [`Way`].
    admitted: Passed,
}

/// Requests or packets and their bytes, by [`Way`].
pub type Passed = [(u64, u64); 2];

impl Gate {
    /// True if it is known without a look that nothing passes now.
    #[must_use]
    pub fn is_closed(&self, now_ns: u64) -> bool {
        now_ns < self.due_ns
    }

    /// When the queue, which was refused, should look again.
    #[must_use]
    pub fn due_ns(&self) -> Option<u64> {
        (self.due_ns != 0).then_some(self.due_ns)
    }

    /// The queue takes no part for now: it waits for nothing.
    pub fn open(&mut self) {
        self.due_ns = 0;
    }

    /// True if the next request or packet may pass; it must be charged then. Else it is refused,
    /// and counted, and [`Self::due_ns`] says until when.
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

    /// True if a request with these charges may pass, which its device's own buckets let pass at
    /// `own_ns`; then the queue waits no more. Else it is refused.
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

    /// As [`Self::passes`], of a request or packet that seems to have `bytes` bytes. It is charged
    /// even if it is refused, and then passes at the queue's next look, unless its place in the
    /// group has not come by then.
    pub fn admits(&mut self, way: Way, bytes: u64, now_ns: u64, stats: &QueueStats) -> bool {
        let (way, bytes) = match self.booked {
            Some(booked) => {
                // The queue looks when its own buckets let it.
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

    /// A request or packet with this many bytes passes.
    pub fn charge(&mut self, way: Way, bytes: u64, now_ns: u64) {
        self.last_bytes = bytes;
        self.charge_all(way, 1, bytes, now_ns);
    }

    /// This many requests or packets pass, which have this many bytes in all.
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
