//! `Group`: a limit that several devices share, and how they divide it.
//!
//! Every member has an account for each bucket, in time at the group's rate. A request that passes
//! is charged to its own member alone, so a large request delays its own member only:
//!
//! ```text
//! time that passes:         is divided equally among the members that want it: granted += share
//! a member wants time:      if it owes some, or waits: it was refused, and the time at which it
//!                           checks again is not more than LATE_NS ago
//! a member may be granted:  what it owes, and if it waits LATE_NS / (members that want) more
//! a member passes units:    charged += units * cost
//! a request may pass:       granted >= what was charged to its member before it
//! time that nobody wants:   is spare, up to the credit, and goes to the next member that wants it
//! ```
//! 1. Members that always have work are granted equal times, and pass equally much except for one
//!    request, however many queues they have and however large their requests are.
//! 2. No member waits for a member that wants nothing, and such a member saves nothing: what it was
//!    granted and did not use becomes spare [`LATE_NS`] after the time at which it should have
//!    checked again.
//! 3. A queue that is refused remembers what was charged before its request: the request's
//!    position. The queues of a member pass in the order of their positions, whichever of them
//!    checks first.
//! 4. All grants together are the time that has passed and the credit, so the rate bounds what
//!    passes, except for one request of each member.
//! 5. A member that refunds units keeps at most [`LATE_NS`] of the time that it was granted for
//!    them, and the group keeps at most the credit.
//!
//! If other processes have members of the group too, it has a [`Lease`] instead of a clock: the
//! time that passes is what the lease grants, and spare time stays until it is used.
//!
//! The thread of a queue that is refused divides, at most once in [`SHARE_NS`] unless there is
//! spare time. A request that passes checks its own member only. Its thread divides if no thread
//! has for [`LATE_NS`], or if the member has refunded more than it may keep; it waits for no lock.

use super::bucket::{Cost, CostChange};
use super::lease::{Lease, Leased, Usage};
use super::{CHARGES_MAX, CREDIT_MS, Charges, Rates};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A member that was refused is granted nothing more if it does not check for this long after the
/// time at which it should.
pub(super) const LATE_NS: u64 = 20_000_000;
/// The least time between two divisions, in nanoseconds, and the least time for each member.
const SHARE_NS: u64 = 200_000;
const SHARE_EACH_NS: u64 = 4_000;
/// A queue that is refused checks again after this long at most, unless its member owes more: when
/// other members leave, its time comes earlier, and it must check before the credit is full.
const PAUSE_MAX_NS: u64 = 20_000_000;
/// In a group with a lease, a queue that is refused checks again after this long at least: the
/// lease grants time every few milliseconds.
const LEASED_PAUSE_NS: u64 = 2_000_000;
/// The maximum of rounds of a division. Each round satisfies a member, or divides everything; the
/// next division continues with what is left.
const ROUNDS_MAX: usize = 8;

/// A limit that several devices share.
#[derive(Debug)]
pub struct Group {
    costs: [Cost; CHARGES_MAX],
    rates: Mutex<Rates>,
    state: Mutex<State>,
    /// The time before which there is no division, unless there is spare time.
    share_at_ns: AtomicU64,
    /// A bit for each bucket that has spare time.
    spare: AtomicU64,
    /// By bucket: how many members wanted time at the last division.
    wanting: [AtomicU64; CHARGES_MAX],
    is_leased: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    members: Vec<Weak<Member>>,
    /// The members, during a division; otherwise empty.
    present: Vec<Arc<Member>>,
    shared_at_ns: u64,
    /// By bucket: time that is not granted yet.
    left_ns: [u64; CHARGES_MAX],
    credit_ns: u64,
    /// `None`: all members are in this process, and the group's time is the clock's.
    lease: Option<Leased>,
}

/// A device in its group. All queues of the device share it.
#[derive(Debug)]
pub struct Member {
    group: Arc<Group>,
    accounts: [Account; CHARGES_MAX],
}

/// The account of a member in one bucket. Only the difference of the two numbers has a meaning.
#[derive(Debug, Default)]
struct Account {
    /// What the member's requests cost, those included that were refused and are charged already.
    charged_ns: AtomicU64,
    granted_ns: AtomicU64,
    /// A queue of the member was refused, and should check again before this time.
    waits_until_ns: AtomicU64,
}

/// The position of a request in the accounts of its member: for each of its [`Charges`], what was
/// charged before it.
pub(super) type Place = [u64; 4];

impl Group {
    /// Makes a group with these rates.
    #[must_use]
    pub fn new(rates: Rates, now_ns: u64) -> Arc<Self> {
        let group = Self {
            costs: std::array::from_fn(|_| Cost::new()),
            rates: Mutex::default(),
            state: Mutex::default(),
            share_at_ns: AtomicU64::new(0),
            spare: AtomicU64::new(0),
            wanting: Default::default(),
            is_leased: AtomicBool::new(false),
        };
        group.set(rates, now_ns);
        Arc::new(group)
    }

    /// Sets other rates. What members owe stays the same number of units. The caller must wake the
    /// queues that wait, so that they check again.
    pub fn set(&self, rates: Rates, now_ns: u64) {
        let mut current = self.rates.lock().unwrap_or_else(PoisonError::into_inner);
        if *current == rates {
            return;
        }
        *current = rates;
        let mut state = self.state();
        // Time up to now counts at the former rates.
        state.share(self, now_ns);
        state.shared_at_ns = now_ns;
        state.credit_ns = rates.burst_ms.max(CREDIT_MS).saturating_mul(1_000_000);
        let per_second = rates.ops.iter().chain(&rates.bytes);
        for (index, (cost, per_second)) in self.costs.iter().zip(per_second).enumerate() {
            let changed = cost.set(*per_second);
            if changed.is_none() {
                continue;
            }
            if changed.is_first() {
                state.left_ns[index] = 0;
            }
            for member in state.members.iter().filter_map(Weak::upgrade) {
                member.accounts[index].change(changed);
            }
        }
    }

    /// Returns the group's rates.
    #[must_use]
    pub fn rates(&self) -> Rates {
        *self.rates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a device.
    #[must_use]
    pub fn join(self: &Arc<Self>) -> Arc<Member> {
        let member = Arc::new(Member { group: self.clone(), accounts: Default::default() });
        let mut state = self.state();
        state.members.retain(|member| member.strong_count() > 0);
        state.members.push(Arc::downgrade(&member));
        member
    }

    /// From now on the group gets its time from `lease` only, since other processes have members of
    /// it, too. Queues that wait check again within some milliseconds.
    pub fn lease(&self, lease: Arc<dyn Lease>, now_ns: u64) {
        let mut state = self.state();
        // Time up to now counts by the clock.
        state.share(self, now_ns);
        state.left_ns = Default::default();
        state.lease = Some(Leased::new(lease));
        self.is_leased.store(true, Ordering::Relaxed);
        state.share(self, now_ns);
    }

    /// Divides the time since the last division, unless a thread has just done so. Called for a
    /// queue that was refused by the buckets whose bits are set in `short`.
    fn share(&self, short: u64, now_ns: u64) {
        let is_due = now_ns >= self.share_at_ns.load(Ordering::Relaxed);
        if is_due || self.spare.load(Ordering::Relaxed) & short != 0 {
            self.try_share(now_ns);
        }
    }

    /// True if no thread has divided for long: then time that no member wanted must be cut to the
    /// credit before the next charge.
    fn is_late(&self, now_ns: u64) -> bool {
        now_ns > self.share_at_ns.load(Ordering::Relaxed).saturating_add(LATE_NS)
    }

    /// Divides. If another thread is dividing, this queue uses that result at its next check.
    fn try_share(&self, now_ns: u64) {
        if let Ok(mut state) = self.state.try_lock() {
            state.share(self, now_ns);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn share(&mut self, group: &Group, now_ns: u64) {
        let elapsed_ns = now_ns.saturating_sub(self.shared_at_ns);
        self.shared_at_ns = now_ns.max(self.shared_at_ns);
        self.present.extend(self.members.iter().filter_map(Weak::upgrade));
        let each_ns = SHARE_EACH_NS.saturating_mul(self.present.len() as u64);
        let share_at_ns = now_ns.saturating_add(each_ns.max(SHARE_NS));
        group.share_at_ns.store(share_at_ns, Ordering::Relaxed);
        let mut spare = 0;
        let came_ns = self.lease.as_mut().map(Leased::came_ns);
        for (index, cost) in group.costs.iter().enumerate() {
            if !cost.is_set() && came_ns.is_none() {
                continue;
            }
            let came_ns = came_ns.map_or(elapsed_ns, |came_ns| came_ns[index]);
            self.left_ns[index] = self.left_ns[index].saturating_add(came_ns);
            if !cost.is_set() {
                continue;
            }
            let (wanting, is_spare) = self.share_one(index, now_ns);
            group.wanting[index].store(wanting, Ordering::Relaxed);
            spare |= u64::from(is_spare) << index;
        }
        group.spare.store(spare, Ordering::Relaxed);
        self.tell(group, now_ns);
        self.present.clear();
    }

    /// Reports to the lease how much time the members hold and need.
    fn tell(&mut self, group: &Group, now_ns: u64) {
        let Some(mut leased) = self.lease.take() else { return };
        let accounts = |index: usize| self.present.iter().map(move |m| &m.accounts[index]);
        let needs = |index: usize| {
            let lead_ns = LATE_NS / group.wanting[index].load(Ordering::Relaxed).max(1);
            let is_set = group.costs[index].is_set();
            accounts(index).filter(move |_| is_set).map(move |of| of.needs_ns(lead_ns, now_ns))
        };
        let is_needy = (0..CHARGES_MAX).any(|index| needs(index).any(|need_ns| need_ns > 0));
        leased.tell(is_needy, now_ns, |index, seen_ns| {
            let led_ns = accounts(index).map(Account::lead_ns).fold(0, u64::saturating_add);
            let held_ns = self.left_ns[index].saturating_add(led_ns);
            Usage::new(seen_ns, held_ns, needs(index))
        });
        self.lease = Some(leased);
    }

    /// Divides the remaining time of one bucket. Returns how many members want time, and whether
    /// some is left that none of them needs.
    fn share_one(&mut self, index: usize, now_ns: u64) -> (u64, bool) {
        let accounts = || self.present.iter().map(|member| &member.accounts[index]);
        let wanting = accounts().filter(|account| account.wants(now_ns)).count() as u64;
        let lead_ns = LATE_NS / wanting.max(1);
        let left_ns = &mut self.left_ns[index];
        let taken_ns = accounts().map(|account| account.take_back(lead_ns, now_ns));
        // More than the credit comes only from refunded units, and is dropped.
        let taken_ns = taken_ns.fold(0, u64::saturating_add).min(self.credit_ns);
        *left_ns = left_ns.saturating_add(taken_ns);
        let needs = |account: &&Account| account.needs_ns(lead_ns, now_ns) > 0;
        let mut needy = accounts().filter(needs).count() as u64;
        for _ in 0..ROUNDS_MAX {
            if needy == 0 || *left_ns < needy {
                break;
            }
            let part_ns = *left_ns / needy;
            for account in accounts() {
                let granted_ns = account.needs_ns(lead_ns, now_ns).min(part_ns).min(*left_ns);
                account.granted_ns.fetch_add(granted_ns, Ordering::Relaxed);
                *left_ns -= granted_ns;
            }
            needy = accounts().filter(needs).count() as u64;
        }
        if needy > 0 {
            return (wanting, false);
        }
        if self.lease.is_none() {
            let led_ns = accounts().map(Account::lead_ns).fold(0, u64::saturating_add);
            *left_ns = (*left_ns).min(self.credit_ns.saturating_sub(led_ns));
        }
        (wanting, *left_ns > 0)
    }
}

impl Account {
    fn owed_ns(&self) -> u64 {
        let charged_ns = self.charged_ns.load(Ordering::Relaxed);
        charged_ns.saturating_sub(self.granted_ns.load(Ordering::Relaxed))
    }

    /// Returns how much time the member was granted ahead of its requests, in nanoseconds.
    fn lead_ns(&self) -> u64 {
        let granted_ns = self.granted_ns.load(Ordering::Relaxed);
        granted_ns.saturating_sub(self.charged_ns.load(Ordering::Relaxed))
    }

    fn waits(&self, now_ns: u64) -> bool {
        self.waits_until_ns.load(Ordering::Relaxed) >= now_ns
    }

    fn wants(&self, now_ns: u64) -> bool {
        self.owed_ns() > 0 || self.waits(now_ns)
    }

    /// Returns what the member may be granted: what it owes, and the lead if it waits.
    fn needs_ns(&self, lead_ns: u64, now_ns: u64) -> u64 {
        match self.owed_ns() {
            owed_ns if !self.waits(now_ns) => owed_ns,
            0 => lead_ns.saturating_sub(self.lead_ns()),
            owed_ns => owed_ns.saturating_add(lead_ns),
        }
    }

    /// Takes back the time that the member was granted above the lead, or all of its lead if it
    /// does not wait. Returns that time.
    fn take_back(&self, lead_ns: u64, now_ns: u64) -> u64 {
        let kept_ns = if self.waits(now_ns) { lead_ns } else { 0 };
        let over_ns = self.lead_ns().saturating_sub(kept_ns);
        self.granted_ns.fetch_sub(over_ns, Ordering::Relaxed);
        over_ns
    }

    /// Converts the account to another rate: what is owed stays the same number of units, and
    /// queues that wait check again. With a first rate the accounts begin empty: refunds of units
    /// that passed without a limit then have no effect.
    fn change(&self, changed: CostChange) {
        self.waits_until_ns.store(0, Ordering::Relaxed);
        let owed_ns = changed.of(self.owed_ns());
        if changed.is_first() {
            self.granted_ns.store(0, Ordering::Relaxed);
        }
        let granted_ns = self.granted_ns.load(Ordering::Relaxed);
        self.charged_ns.store(granted_ns.saturating_add(owed_ns), Ordering::Relaxed);
    }

    fn charge(&self, change: impl Fn(u64) -> u64) {
        let change = |charged_ns| Some(change(charged_ns));
        let _ = self.charged_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
    }
}

impl Member {
    /// Returns the member's group.
    #[must_use]
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Returns the position of a request that takes from these buckets, if it is charged now.
    pub(super) fn place(&self, charges: Charges) -> Place {
        let mut place = Place::default();
        for (before_ns, index) in place.iter_mut().zip(charges.indexes()) {
            *before_ns = self.accounts[index].charged_ns.load(Ordering::Relaxed);
        }
        place
    }

    /// Returns when a request that takes from these buckets may pass, or should check again; it may
    /// pass now if that is not after `now_ns`. `place`: the position that the request got when it
    /// was refused.
    pub(super) fn due_ns(&self, charges: Charges, place: Option<Place>, now_ns: u64) -> u64 {
        if self.short(charges, place).all(|(_, short_ns)| short_ns == 0) {
            let leads = |index: usize| self.accounts[index].lead_ns() > LATE_NS;
            if self.group.is_late(now_ns) || charges.indexes().any(leads) {
                // This division takes only what the member was granted ahead, which the request
                // does not need.
                self.group.try_share(now_ns);
            }
            return 0;
        }
        let mut bits = 0;
        for (index, _) in self.short(charges, place).filter(|(_, short_ns)| *short_ns > 0) {
            bits |= 1 << index;
            self.accounts[index].waits_until_ns.fetch_max(now_ns, Ordering::Relaxed);
        }
        self.group.share(bits, now_ns);
        let least_ns = match self.group.is_leased.load(Ordering::Relaxed) {
            true => LEASED_PAUSE_NS,
            false => 0,
        };
        let mut due_ns = 0;
        for (index, short_ns) in self.short(charges, place).filter(|(_, short_ns)| *short_ns > 0) {
            let wanting = self.group.wanting[index].load(Ordering::Relaxed).max(1);
            let most_ns = short_ns.max(PAUSE_MAX_NS).max(wanting.saturating_mul(SHARE_NS));
            let pause_ns = short_ns.saturating_mul(wanting).min(most_ns).max(least_ns);
            due_ns = due_ns.max(now_ns.saturating_add(pause_ns));
        }
        let until_ns = due_ns.saturating_add(LATE_NS);
        for index in charges.indexes().filter(|index| due_ns > 0 && bits >> index & 1 != 0) {
            self.accounts[index].waits_until_ns.fetch_max(until_ns, Ordering::Relaxed);
        }
        due_ns
    }

    /// Returns each bucket with the time that must be granted until the request may pass. Other
    /// queues may have refunded units since the request got its position: never more than the total
    /// charge must be granted.
    fn short(&self, charges: Charges, place: Option<Place>) -> impl Iterator<Item = (usize, u64)> {
        let is_set = |(_, index): &(usize, usize)| self.group.costs[*index].is_set();
        charges.indexes().enumerate().filter(is_set).map(move |(at, index)| {
            let account = &self.accounts[index];
            let charged_ns = account.charged_ns.load(Ordering::Relaxed);
            let before_ns = place.map_or(charged_ns, |place| place[at].min(charged_ns));
            (index, before_ns.saturating_sub(account.granted_ns.load(Ordering::Relaxed)))
        })
    }

    /// Charges this many requests, which have this many bytes in all.
    pub(super) fn charge_all(&self, charges: Charges, count: u64, bytes: u64) {
        for (index, units) in charges.units(count, bytes) {
            let cost_ns = self.group.costs[index].of(units);
            if cost_ns != 0 {
                self.accounts[index].charge(|charged_ns| charged_ns.saturating_add(cost_ns));
            }
        }
    }

    /// Refunds this many requests that were charged and have not passed.
    pub(super) fn give_back_all(&self, charges: Charges, count: u64, bytes: u64) {
        for (index, units) in charges.units(count, bytes) {
            let cost_ns = self.group.costs[index].of(units);
            if cost_ns != 0 {
                self.accounts[index].charge(|charged_ns| charged_ns.saturating_sub(cost_ns));
            }
        }
    }
}

#[cfg(test)]
mod tests;
