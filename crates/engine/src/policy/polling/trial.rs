//! A trial: epochs of both arms in pairs, first short ones, then long ones, and what they tell.
//!
//! ```text
//! a glance:  a pair of short epochs. The arm that is tried is three times as slow, or twice as
//!            slow and so in a second pair? it is not tried any longer
//! else:      long epochs of that arm, until two in a row are alike. It is twice as fast as the arm
//!            in use was before? use it
//!            long epochs of the arm in use in the same way; both again if that tells too little
//! ```
//! A glance finds that an arm is plainly wrong, and costs a millisecond of it. It cannot tell arms
//! apart that are nearly alike, and says nothing for the arm that is tried: when a worker begins to
//! sleep, the kernel moves the threads around it for some milliseconds; a worker that begins to
//! spin uses up the claim to its CPU that it gathered asleep; a client sends its requests in
//! bursts, and an epoch has one burst more or less. So the rest is asked of epochs that are longer
//! than all of that, of what the arm in use has cost before the trial, and of the trials before.
//!
//! One long epoch is not enough either. The kernel wakes a worker that sleeps on the CPU of the
//! guest that wakes it; when it begins to spin there, it takes the kernel a fifth of a second to
//! move one of them to a CPU that is free. A guest that had 1.8 times the answers of a worker that
//! spun had 0.6 times in the first hundredth of a second, and after the worker had begun to sleep
//! again it kept them for as long as a long epoch. So an arm *settles* before it is judged.

use super::numbers::Arm;
use core::ops::RangeInclusive;

/// Requests of an epoch, at least: fewer do not tell the arms apart.
const GLANCE_REQUESTS: u64 = 32;
/// Nanoseconds of an epoch, at least: a shorter one measures the change from one arm to the other.
const GLANCE_NS: u64 = 1_000_000;
/// Requests of a long epoch, at least: several bursts of a client with many requests in flight.
const LONG_REQUESTS: u64 = 256;
/// Nanoseconds of a long epoch, at least: several times what the kernel takes to move threads, and
/// to make up for CPU time that a spinning thread has had beyond its share.
const LONG_NS: u64 = 48_000_000;
/// An arm that is this many times as slow (in thousandths) in a glance is not tried any longer ...
const SLOWER_AT_ONCE: u64 = 3000;
/// ... and one that is so in two of them.
const SLOWER_TWICE: u64 = 2000;
/// One that takes less than this is worth long epochs, whenever the last ones were.
const FASTER: u64 = 500;
/// A gain outside of this range, in thousandths, is clear from a long epoch.
const UNCLEAR: RangeInclusive<u64> = 500..=2000;
/// One outside of this range needs no second pair of long epochs.
const UNCLEAR_LONG: RangeInclusive<u64> = 830..=1200;
/// A worker that sleeps has spun in vain if that gained less than this: nothing is lost by sleeping
/// on, and another pair would cost CPU time.
const SPIN_IN_VAIN: u64 = 1050;
/// Long pairs, at most.
const LONG_PAIRS_MAX: u32 = 2;
/// Two long epochs in a row are alike if the ratio of their costs is in this range, in thousandths.
const ALIKE: RangeInclusive<u64> = 920..=1087;
/// Long epochs of an arm in a pair, at most: twice what the slowest change that was seen took.
const SETTLING_MAX: u32 = 8;
/// An arm that is this many times as slow in its first long epoch will not make up for that.
const SLOWER_LONG: u64 = 1400;

/// A trial follows the one before after this many times what that spent in vain in its arm ...
const TRIED_SHARE: u64 = 32;
/// ... and more where spinning takes more than this, in thousandths, of the CPU time: a worker that
/// sleeps spends an eighth more of it to find out whether that is right.
const TRIED_EFFORT: u64 = 4000;
/// ... but never later than this, also if the clock has jumped in a trial.
const REST_NS_MAX: u64 = 600_000_000_000;

/// Spinning takes more CPU time if it is above this, in thousandths of what sleeping takes.
const EFFORT_MORE: u64 = 1300;

/// The gain (in thousandths) above which the worker spins. Where it takes more CPU time so, the
/// requests must be served faster in return; where it does not, it keeps their latency low, even if
/// the rate does not depend on it.
struct Least {
    at_more: u64,
    at_like: u64,
}

/// The gain that keeps a worker spinning.
const GAIN_SPIN_KEPT: Least = Least { at_more: 1050, at_like: 970 };
/// The gain that makes a worker begin to spin. It is higher, or noise would change the arm.
const GAIN_SPIN_BEGUN: Least = Least { at_more: 1100, at_like: 1000 };

/// The gain and the effort that trials have found: the means of about the last six of them.
///
/// One trial tells little. The kernel lays the threads of a guest now beside each other and now
/// apart, and where spinning gains 1.35 in the long run, single trials find 0.6 to 1.9.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    /// Cost of a request when sleeping, in thousandths of its cost when spinning.
    pub(super) gain: u64,
    /// CPU time for a request when spinning, in thousandths of that when sleeping.
    pub(super) effort: u64,
    /// Of how many trials these are the means.
    trials: u64,
}

/// The means are those of about this many trials, at most.
const TRIALS_MAX: u64 = 6;
/// A gain outside of this range counts as its end in the mean with the next one: the load may be
/// another one since.
const REMEMBERED: RangeInclusive<u64> = 750..=1333;

impl Found {
    /// Before the first trial: the arms are alike, and that counts like one trial.
    pub(super) const NOTHING: Self = Self { gain: 1000, effort: 1000, trials: 1 };

    /// The means with one more trial.
    pub(super) fn and(self, next: Self) -> Self {
        let trials = (self.trials + 1).min(TRIALS_MAX);
        let gain = self.gain.clamp(*REMEMBERED.start(), *REMEMBERED.end());
        let mean = |old: u64, new: u64| (old * (trials - 1) + new) / trials;
        Self { gain: mean(gain, next.gain), effort: mean(self.effort, next.effort), trials }
    }

    /// True if a worker whose arm was `base` should spin.
    pub(super) fn says_spin(self, base: Arm) -> bool {
        let least = if base == Arm::Spin { GAIN_SPIN_KEPT } else { GAIN_SPIN_BEGUN };
        self.gain > if self.effort > EFFORT_MORE { least.at_more } else { least.at_like }
    }
}

/// The cost of the requests of one or more epochs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    /// Time from one turn with work to the next, summed; a pause of the client counts little ...
    pub(super) ns: u64,
    /// ... and here nearly all of it.
    pub(super) whole_ns: u64,
    pub(super) requests: u64,
    /// CPU time of the worker.
    pub(super) ran_ns: u64,
}

impl Cost {
    pub(super) fn add(&mut self, other: Self) {
        self.ns = self.ns.saturating_add(other.ns);
        self.whole_ns = self.whole_ns.saturating_add(other.whole_ns);
        self.requests = self.requests.saturating_add(other.requests);
        self.ran_ns = self.ran_ns.saturating_add(other.ran_ns);
    }

    pub(super) fn halved(self) -> Self {
        let Self { ns, whole_ns, requests, ran_ns } = self;
        let half = |value| value / 2;
        let (ns, whole_ns) = (half(ns), half(whole_ns));
        Self { ns, whole_ns, requests: half(requests), ran_ns: half(ran_ns) }
    }

    /// Time of one request.
    pub(super) fn each_ns(self) -> u64 {
        self.ns / self.requests.max(1)
    }

    /// The time of a request over that of `other`, in thousandths, at least 1; with pauses as they
    /// were, or hardly any.
    fn over(self, other: Self, with_pauses: bool) -> u64 {
        let ns = |cost: Self| if with_pauses { cost.whole_ns } else { cost.ns };
        permille(product(ns(self), other.requests), product(ns(other), self.requests))
    }

    /// The CPU time of a request over that of a request of `other`, in thousandths, at least 1.
    fn ran_over(self, other: Self) -> u64 {
        permille(product(self.ran_ns, other.requests), product(other.ran_ns, self.requests))
    }
}

/// So that costs of epochs with different numbers of requests are compared without a division.
fn product(ns: u64, requests: u64) -> u128 {
    u128::from(ns) * u128::from(requests)
}

/// `above` over `below`, in thousandths, from 1 to 1,000,000.
fn permille(above: u128, below: u128) -> u64 {
    let share = above.saturating_mul(1000) / below.max(1);
    u64::try_from(share).unwrap_or(u64::MAX).clamp(1, 1_000_000)
}

/// How a trial goes on after a pair of epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// With another pair.
    Pair,
    /// It is over, and the arms differ so much that earlier trials do not matter.
    Clear,
    /// It is over, and has its say beside earlier trials.
    Close,
    /// It is over, and has shown no more than that the load is not quite another one.
    Nothing,
}

/// A comparison of the arms while it runs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trial {
    pub(super) spinning: Cost,
    pub(super) sleeping: Cost,
    /// The cost of the arm in use before this trial, as (spinning, sleeping); the other arm has
    /// none. A spin takes CPU time that is missed later, and an epoch beside one of the other arm
    /// does not show that.
    before: (Cost, Cost),
    /// The pair that is under way.
    pair: (Cost, Cost),
    pairs: u32,
    /// The long epoch before this one, if it was one of the same arm, and how many there were.
    last: Option<Cost>,
    settling: u32,
    /// Its epochs are long by now.
    is_long: bool,
    /// A glance that is not clear is not followed by long epochs.
    is_glance_only: bool,
    /// Time spent in the arm that is not in use.
    pub(super) tried_ns: u64,
    /// The averages of the arm in use. Those that the tried arm brings must not keep the worker
    /// from looking afterwards.
    pub(super) gap_ns: u64,
    pub(super) service_ns: u64,
}

impl Trial {
    /// A trial beside `base`, the arm in use, and what that has cost lately.
    pub(super) fn new(base: Arm, lately: Cost) -> Self {
        let before = match base {
            Arm::Spin => (lately, Cost::default()),
            Arm::Sleep => (Cost::default(), lately),
        };
        Self { before, spinning: before.0, sleeping: before.1, ..Self::default() }
    }

    /// It ends with a glance, clear or not.
    pub(super) fn is_glance(self) -> Self {
        Self { is_glance_only: true, ..self }
    }

    /// An epoch of `arm` is over. False if it needs another one: it has not settled.
    pub(super) fn note(&mut self, arm: Arm, epoch: Cost) -> bool {
        let (mut cost, is_over) = (epoch, !self.is_long || self.has_settled(arm, epoch));
        if is_over && let Some(last) = self.last.take() {
            cost.add(last);
        }
        match (is_over, arm) {
            (false, _) => self.last = Some(epoch),
            (true, Arm::Spin) => self.pair.0 = cost,
            (true, Arm::Sleep) => self.pair.1 = cost,
        }
        self.settling = if is_over { 0 } else { self.settling + 1 };
        is_over
    }

    /// True if `arm` costs after its latest long epoch what it will go on to cost, or if more of
    /// them would not change the result.
    fn has_settled(&self, arm: Arm, epoch: Cost) -> bool {
        let (spinning, sleeping) = self.before;
        let other = match arm {
            Arm::Spin => sleeping,
            Arm::Sleep => spinning,
        };
        // Only the arm in use has a cost before the trial.
        let slower = if other.requests == 0 { 1000 } else { epoch.over(other, true) };
        let Some(last) = self.last else { return !(FASTER..=SLOWER_LONG).contains(&slower) };
        let change = epoch.over(last, true);
        let is_worse_by_now = change > *ALIKE.end() && slower > 1000;
        ALIKE.contains(&change) || is_worse_by_now || self.settling + 1 >= SETTLING_MAX
    }

    /// Nanoseconds and requests of an epoch, at least. `trial` is `None` while no trial runs.
    pub(super) fn epoch(trial: Option<&Self>) -> (u64, u64) {
        match trial {
            Some(Self { is_long: true, .. }) => (LONG_NS, LONG_REQUESTS),
            Some(_) | None => (GLANCE_NS, GLANCE_REQUESTS),
        }
    }

    /// The arm that is tried has had a long epoch: true if it is so much faster than the arm in use
    /// was before that this one need not be measured again.
    pub(super) fn is_far_faster(&self, tried: Arm) -> bool {
        let (spinning, sleeping) = self.before;
        let (now, before) = match tried {
            Arm::Spin => (self.pair.0, sleeping),
            Arm::Sleep => (self.pair.1, spinning),
        };
        self.is_long && now.requests > 0 && before.over(now, true) > *UNCLEAR.end()
    }

    /// Both arms have had an epoch, or that of the arm that is `tried` was enough.
    pub(super) fn end_pair(&mut self, tried: Arm) -> Next {
        let (spinning, sleeping) = core::mem::take(&mut self.pair);
        self.spinning.add(spinning);
        self.sleeping.add(sleeping);
        self.pairs += 1;
        let gain = self.gain();
        if self.is_long {
            return if !UNCLEAR.contains(&gain) {
                Next::Clear
            } else if !UNCLEAR_LONG.contains(&gain)
                || self.pairs >= LONG_PAIRS_MAX
                || (tried == Arm::Spin && gain < SPIN_IN_VAIN)
            {
                Next::Close
            } else {
                Next::Pair
            };
        }
        // The time of a request in the tried arm over that in the other arm, in thousandths.
        let slower = if tried == Arm::Sleep { gain } else { 1_000_000 / gain };
        match self.pairs {
            1 if slower > SLOWER_AT_ONCE => Next::Clear,
            1 if slower > SLOWER_TWICE => Next::Pair,
            2 if slower > SLOWER_TWICE => Next::Clear,
            _ if self.is_glance_only && slower > FASTER => Next::Nothing,
            _ => {
                (self.is_long, self.pairs) = (true, 0);
                (self.spinning, self.sleeping) = self.before;
                Next::Pair
            }
        }
    }

    /// How long `base`, the arm in use, is left alone after a trial that was in vain. A worker that
    /// sleeps has spent CPU time on it, one that spins spends CPU time until the next one.
    pub(super) fn rest_ns(&self, base: Arm, effort: u64) -> u64 {
        let effort = if base == Arm::Sleep { effort } else { 0 };
        let share = TRIED_SHARE * effort.max(TRIED_EFFORT) / TRIED_EFFORT;
        share.saturating_mul(self.tried_ns).min(REST_NS_MAX)
    }

    /// The gain and the effort of this trial by itself.
    pub(super) fn found(&self) -> Found {
        let effort = self.spinning.ran_over(self.sleeping);
        Found { gain: self.gain(), effort, trials: 1 }
    }

    /// Cost of a request when sleeping, in thousandths of its cost when spinning.
    fn gain(&self) -> u64 {
        self.sleeping.over(self.spinning, self.is_long)
    }
}
