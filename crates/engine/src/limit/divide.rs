//! `Divider`: divides the time of a group among the processes that have its members. A policy: its
//! caller reads the clock, and exchanges the numbers with the processes.
//!
//! ```text
//! a tick:   left += time since the last tick
//! 1. needs  every process gets what its members need, up to the highest level that `left` allows:
//!           the level is the same for every member of every process (max-min fairness)
//! 2. ahead  what is still left goes to the processes in advance, until each holds twice what it
//!           used in a tick, and its members' share of a quarter of the credit
//! 3. rest   is kept for later ticks, up to the credit less what processes hold
//! ```
//! 1. No time is lost while a member needs some, and all processes together hold no more than the
//!    credit: so what passes is at most the rate and the credit.
//! 2. The divider does not trust a process. A process holds at most as much as its members could
//!    need; its reports of the past count up to what it was granted. So a process that reports
//!    wrong numbers gets its fair share, and the others get theirs.
//! 3. When a process ends, the others get its share from then on.

use super::group::LATE_NS;
use super::lease::{LEVELS, Usages, level_ns};
use super::{CHARGES_MAX, CREDIT_MS};
use std::time::Duration;

/// Interval between two ticks while a member of the group has requests.
pub const TICK: Duration = Duration::from_millis(10);
/// After this many ticks without a request, the group needs no further tick.
const CALM_TICKS: u32 = 5;
/// A process may hold in advance what it uses in this many ticks.
const AHEAD_TICKS: u64 = 2;
/// In addition, all processes together may hold the credit divided by this number in advance.
const AHEAD_OF_CREDIT: u64 = 4;

/// A process in one tick.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// The number of the group's members in the process.
    pub members: u64,
    /// What the process reports.
    pub usages: Usages,
}

/// The account of a process in a group.
#[derive(Clone, Copy, Debug, Default)]
pub struct Account {
    granted_ns: [u64; CHARGES_MAX],
    used_ns: [u64; CHARGES_MAX],
    /// For each bucket, how much time the process uses per tick: the maximum of the last tick and
    /// of seven eighths of the former value.
    pace_ns: [u64; CHARGES_MAX],
}

impl Account {
    /// Returns what the process was granted since its lease began.
    #[must_use]
    pub fn granted_ns(&self) -> [u64; CHARGES_MAX] {
        self.granted_ns
    }
}

/// Divides a group's time among its processes, and keeps the time that was not granted yet.
#[derive(Clone, Debug)]
pub struct Divider {
    left_ns: [u64; CHARGES_MAX],
    at_ns: u64,
    calm: u32,
    /// True if the group was idle, and a process has reported a need since: time of the idle period
    /// is used only up to the credit.
    is_woken: bool,
}

/// The account of a process in one bucket at a tick, from which its grant is computed.
struct Part {
    needs_ns: [u64; LEVELS],
    outstanding_ns: u64,
    /// How much more time the process may hold in advance than it holds now.
    lacks_ns: u64,
    held_ns: u64,
    /// How much of its granted time the process had not used at the last tick.
    held_before_ns: u64,
}

impl Divider {
    /// Makes a divider without any time to grant.
    #[must_use]
    pub fn new(now_ns: u64) -> Self {
        Self { left_ns: Default::default(), at_ns: now_ns, calm: 0, is_woken: false }
    }

    /// Divides the time since the last tick. `burst_ms`: that of the group's rates. Returns true if
    /// the group needs a further tick.
    pub fn tick(&mut self, all: &mut [(Account, Claim)], burst_ms: u64, now_ns: u64) -> bool {
        let elapsed_ns = now_ns.saturating_sub(self.at_ns);
        self.at_ns = now_ns.max(self.at_ns);
        let credit_ns = burst_ms.max(CREDIT_MS).saturating_mul(1_000_000);
        let members = all.iter().map(|(_, claim)| claim.members).sum::<u64>().max(1);
        let (mut is_calm, is_woken) = (true, std::mem::take(&mut self.is_woken));
        for index in 0..CHARGES_MAX {
            let mut left_ns = self.left_ns[index].saturating_add(elapsed_ns);
            let base_ns = credit_ns / AHEAD_OF_CREDIT;
            let part = |(account, claim): &mut (Account, Claim)| {
                let own = u128::from(base_ns) * u128::from(claim.members) / u128::from(members);
                part(account, claim, index, u64::try_from(own).unwrap_or(base_ns))
            };
            let parts: Vec<(Part, bool)> = all.iter_mut().map(part).collect();
            is_calm &= parts.iter().all(|(_, is_calm)| *is_calm);
            let parts: Vec<Part> = parts.into_iter().map(|(part, _)| part).collect();
            if is_woken {
                let held_ns = parts.iter().map(|part| part.held_before_ns);
                let held_ns = held_ns.fold(0, u64::saturating_add);
                left_ns = left_ns.min(credit_ns.saturating_sub(held_ns));
            }
            let (grants, left_ns) = divided(&parts, left_ns, credit_ns);
            for ((account, _), grant_ns) in all.iter_mut().zip(&grants) {
                account.granted_ns[index] = account.granted_ns[index].saturating_add(*grant_ns);
            }
            is_calm &= grants.iter().all(|grant_ns| *grant_ns == 0);
            self.left_ns[index] = left_ns;
        }
        self.calm = if is_calm { self.calm + 1 } else { 0 };
        self.calm < CALM_TICKS
    }

    /// Call when a process has reported a need, or another process has joined.
    pub fn wake(&mut self) {
        self.is_woken |= self.calm >= CALM_TICKS;
        self.calm = 0;
    }
}

/// Returns what a process may get in the bucket of this index, and true if nothing happens in that
/// bucket. `base_ns`: how much the process may hold in advance in any case.
fn part(account: &mut Account, claim: &Claim, index: usize, base_ns: u64) -> (Part, bool) {
    let (usage, granted_ns) = (&claim.usages[index], account.granted_ns[index]);
    let seen_ns = usage.seen_ns.min(granted_ns);
    let used_ns = seen_ns.saturating_sub(usage.held_ns).max(account.used_ns[index]);
    let now_ns = used_ns - account.used_ns[index];
    let before_ns = granted_ns - account.used_ns[index];
    account.used_ns[index] = used_ns;
    let pace_ns = now_ns.max(account.pace_ns[index] / 8 * 7);
    account.pace_ns[index] = pace_ns;
    let ahead_ns = base_ns.saturating_add(pace_ns.saturating_mul(AHEAD_TICKS));
    let mut needs_ns = usage.needs_ns;
    let mut lower_ns = 0;
    for (level, need_ns) in needs_ns.iter_mut().enumerate() {
        let most_ns = claim.members.saturating_mul(level_ns(level));
        *need_ns = (*need_ns).min(most_ns).max(lower_ns);
        lower_ns = *need_ns;
    }
    let (outstanding_ns, held_ns) = (granted_ns - seen_ns, granted_ns - used_ns);
    // Members that waited at the time of a grant hold their lead; a process may report that it
    // holds more.
    let most_ns = ahead_ns.saturating_add(LATE_NS);
    let part = Part {
        needs_ns,
        outstanding_ns,
        lacks_ns: ahead_ns.saturating_sub(held_ns),
        held_ns: held_ns.min(most_ns),
        held_before_ns: before_ns.min(most_ns),
    };
    let is_calm = now_ns == 0 && part.need_ns(u64::MAX) == 0;
    (part, is_calm)
}

/// Returns what each process is granted, and what is left.
fn divided(parts: &[Part], mut left_ns: u64, credit_ns: u64) -> (Vec<u64>, u64) {
    let needs = |level_ns: u64| parts.iter().map(move |part| part.need_ns(level_ns));
    let sum = |all: &mut dyn Iterator<Item = u64>| all.fold(0, u64::saturating_add);
    let highest_ns = level_ns(LEVELS - 1);
    if sum(&mut needs(highest_ns)) > left_ns {
        // Binary search: there is enough for all levels up to `low`, and too little for `high`.
        let (mut low_ns, mut high_ns) = (0, highest_ns);
        while high_ns - low_ns > 1 {
            let middle_ns = low_ns + (high_ns - low_ns) / 2;
            match sum(&mut needs(middle_ns)) <= left_ns {
                true => low_ns = middle_ns,
                false => high_ns = middle_ns,
            }
        }
        let grants: Vec<_> = needs(low_ns).collect();
        left_ns -= sum(&mut grants.iter().copied());
        return (grants, left_ns);
    }
    let mut grants: Vec<_> = needs(highest_ns).collect();
    left_ns -= sum(&mut grants.iter().copied());
    let lacks_ns: Vec<_> = parts
        .iter()
        .zip(&grants)
        .map(|(part, grant)| part.lacks_ns.saturating_sub(*grant))
        .collect();
    let (all_ns, there_ns) = (sum(&mut lacks_ns.iter().copied()).max(1), left_ns);
    for (grant_ns, lacks_ns) in grants.iter_mut().zip(lacks_ns) {
        let part = u128::from(there_ns) * u128::from(lacks_ns) / u128::from(all_ns);
        let stock_ns = lacks_ns.min(u64::try_from(part).unwrap_or(u64::MAX)).min(left_ns);
        *grant_ns = grant_ns.saturating_add(stock_ns);
        left_ns -= stock_ns;
    }
    let held_ns = sum(&mut parts.iter().zip(&grants).map(|(part, grant)| part.held_ns + grant));
    (grants, left_ns.min(credit_ns.saturating_sub(held_ns)))
}

impl Part {
    /// Returns what the process needs if each of its members gets up to this level.
    fn need_ns(&self, most_ns: u64) -> u64 {
        let at = (0..LEVELS).find(|index| most_ns < level_ns(*index));
        let need_ns = match at {
            None => self.needs_ns[LEVELS - 1],
            Some(at) => {
                let (from_ns, from_need_ns) = match at {
                    0 => (0, 0),
                    at => (level_ns(at - 1), self.needs_ns[at - 1]),
                };
                let more_ns = self.needs_ns[at] - from_need_ns;
                let step = u128::from(more_ns) * u128::from(most_ns - from_ns)
                    / u128::from(level_ns(at) - from_ns);
                from_need_ns + u64::try_from(step).unwrap_or(more_ns)
            }
        };
        need_ns.saturating_sub(self.outstanding_ns)
    }
}

#[cfg(test)]
mod tests;
