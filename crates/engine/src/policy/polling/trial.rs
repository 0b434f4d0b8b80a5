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

/// The least number of requests of a short epoch: fewer do not tell the arms apart.
const GLANCE_REQUESTS: u64 = 32;
/// The least length of a short epoch: a shorter one measures the switch from one arm to the other.
const GLANCE_NS: u64 = 1_000_000;
/// The least number of requests of a long epoch: several bursts of a client with many requests.
const LONG_REQUESTS: u64 = 256;
/// The least length of a long epoch, in nanoseconds: several times as long as the kernel takes to
/// move threads, and to compensate for a spinning thread's excess of CPU time.
const LONG_NS: u64 = 48_000_000;
/// If a request takes more than this many thousandths of its time in the other arm in the first
/// glance, the trial ends ...
const SLOWER_AT_ONCE: u64 = 3000;
/// ... and if it takes more than this many thousandths in two glances.
const SLOWER_TWICE: u64 = 2000;
/// If a request takes less than this many thousandths of its time in the other arm, long epochs
/// follow, however recent the last ones were.
const FASTER: u64 = 500;
/// A gain outside of this range, in thousandths, is clear after one pair of long epochs.
const UNCLEAR: RangeInclusive<u64> = 500..=2000;
/// A gain outside of this range, in thousandths, needs no second pair of long epochs.
const UNCLEAR_LONG: RangeInclusive<u64> = 830..=1200;
/// If spinning gains less than this, in thousandths, a worker that sleeps goes on sleeping: a
/// second pair of long epochs would only cost CPU time.
const SPIN_IN_VAIN: u64 = 1050;
/// The maximum number of pairs of long epochs in a trial.
const LONG_PAIRS_MAX: u32 = 2;
/// Two long epochs in a row are alike if the ratio of their times is in this range, in thousandths.
const ALIKE: RangeInclusive<u64> = 920..=1087;
/// The most long epochs of an arm in a pair: twice as many as the slowest observed change took.
const SETTLING_MAX: u32 = 8;
/// If a request in the first long epoch takes more than this many thousandths of its time in the
/// other arm, the arm will not become the faster one, and needs no further epoch.
const SLOWER_LONG: u64 = 1400;

/// After a trial in vain, the arm in use stays for this many times as long as the other arm was
/// tried ...
const TRIED_SHARE: u64 = 32;
/// ... and for longer, in proportion, if spinning takes more than this many thousandths of the CPU
/// time of sleeping: a sleeping worker spends an eighth more CPU time on its trials ...
const TRIED_EFFORT: u64 = 4000;
/// ... but for no longer than this, even if the clock has jumped in the trial.
const REST_NS_MAX: u64 = 600_000_000_000;

/// Spinning takes more CPU time if its effort is above this many thousandths.
const EFFORT_MORE: u64 = 1300;

/// The gain, in thousandths, above which the worker spins. `at_more`: where spinning takes more CPU
/// time, it must serve requests faster in return. `at_like`: where it takes about as much, it keeps
/// their latency low, even if their rate stays the same.
struct Least {
    at_more: u64,
    at_like: u64,
}

/// The least gain with which a spinning worker continues to spin.
const GAIN_SPIN_KEPT: Least = Least { at_more: 1050, at_like: 970 };
/// The least gain with which a sleeping worker begins to spin: higher, against noise.
const GAIN_SPIN_BEGUN: Least = Least { at_more: 1100, at_like: 1000 };

/// The means of the gains and efforts that the last trials (about six) have found.
///
/// One trial tells little. The kernel places the threads of a guest sometimes on sibling CPUs and
/// sometimes not. Where spinning gains 1.35 in the long run, single trials find 0.6 to 1.9.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    /// The time of a request when sleeping, in thousandths of its time when spinning.
    pub(super) gain: u64,
    /// The CPU time of a request when spinning, in thousandths of that when sleeping.
    pub(super) effort: u64,
    /// How many trials the means contain, up to [`TRIALS_MAX`].
    trials: u64,
}

/// A mean contains about this many trials at most; older ones count less.
const TRIALS_MAX: u64 = 6;
/// A mean gain is cut to this range before a trial is added, since the load may have changed.
const REMEMBERED: RangeInclusive<u64> = 750..=1333;

impl Found {
    /// The value before the first trial: the arms are alike. It counts like one trial.
    pub(super) const NOTHING: Self = Self { gain: 1000, effort: 1000, trials: 1 };

    /// Returns the means after one more trial.
    pub(super) fn and(self, next: Self) -> Self {
        let trials = (self.trials + 1).min(TRIALS_MAX);
        let gain = self.gain.clamp(*REMEMBERED.start(), *REMEMBERED.end());
        let mean = |old: u64, new: u64| (old * (trials - 1) + new) / trials;
        Self { gain: mean(gain, next.gain), effort: mean(self.effort, next.effort), trials }
    }

    /// True if a worker that used `base` so far must spin from now on.
    pub(super) fn says_spin(self, base: Arm) -> bool {
        let least = if base == Arm::Spin { GAIN_SPIN_KEPT } else { GAIN_SPIN_BEGUN };
        self.gain > if self.effort > EFFORT_MORE { least.at_more } else { least.at_like }
    }
}

/// The time, requests and CPU time of one or more epochs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    /// Nanoseconds, in which a client's pause counts as a few wakes (`on_burst`) ...
    pub(super) ns: u64,
    /// ... and nanoseconds, in which the pause counts nearly in full.
    pub(super) whole_ns: u64,
    pub(super) requests: u64,
    /// Nanoseconds of CPU time of the worker's thread.
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

    /// Returns the average nanoseconds of a request.
    pub(super) fn each_ns(self) -> u64 {
        self.ns / self.requests.max(1)
    }

    /// Returns the time of a request divided by that of a request of `other`, in thousandths, at
    /// least 1. `with_pauses`: the clients' pauses count nearly in full.
    fn over(self, other: Self, with_pauses: bool) -> u64 {
        let ns = |cost: Self| if with_pauses { cost.whole_ns } else { cost.ns };
        permille(product(ns(self), other.requests), product(ns(other), self.requests))
    }

    /// Returns the CPU time of a request divided by that of `other`, in thousandths, at least 1.
    fn ran_over(self, other: Self) -> u64 {
        permille(product(self.ran_ns, other.requests), product(other.ran_ns, self.requests))
    }
}

/// Multiplies a time by a number of requests, so that epochs are compared without a division.
fn product(ns: u64, requests: u64) -> u128 {
    u128::from(ns) * u128::from(requests)
}

/// Returns `above` divided by `below`, in thousandths, from 1 to 1,000,000.
fn permille(above: u128, below: u128) -> u64 {
    let share = above.saturating_mul(1000) / below.max(1);
    u64::try_from(share).unwrap_or(u64::MAX).clamp(1, 1_000_000)
}

/// The next step of a trial after a pair of epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Another pair of epochs.
    Pair,
    /// The trial is over. The arms differ so much that earlier trials are dropped.
    Clear,
    /// The trial is over. Its result is averaged with those of earlier trials.
    Close,
    /// The trial is over after a glance, without a result: the load has not changed much.
    Nothing,
}

/// A trial that runs: a comparison of the two arms.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trial {
    pub(super) spinning: Cost,
    pub(super) sleeping: Cost,
    /// The cost of the arm in use before this trial, as (spinning, sleeping); that of the other arm
    /// is zero. The CPU time of a spin is missed by other threads later, in the next epoch of the
    /// other arm: so epochs of the trial alone would not show it.
    before: (Cost, Cost),
    /// The epochs of the present pair, as (spinning, sleeping).
    pair: (Cost, Cost),
    pairs: u32,
    /// The former long epoch of the present arm, if there was one, and how many there were.
    last: Option<Cost>,
    settling: u32,
    /// True once the epochs are long.
    is_long: bool,
    /// True if the trial ends after its glances, even without a result.
    is_glance_only: bool,
    /// Nanoseconds in which the arm was used that is tried.
    pub(super) tried_ns: u64,
    /// The average gap and service time with the arm in use. They replace those measured with the
    /// tried arm, which could otherwise keep the worker from spinning after the trial.
    pub(super) gap_ns: u64,
    pub(super) service_ns: u64,
}

impl Trial {
    /// Makes a trial against `base`, the arm in use, whose recent cost is `lately`.
    pub(super) fn new(base: Arm, lately: Cost) -> Self {
        let before = match base {
            Arm::Spin => (lately, Cost::default()),
            Arm::Sleep => (Cost::default(), lately),
        };
        Self { before, spinning: before.0, sleeping: before.1, ..Self::default() }
    }

    /// Makes the trial end after its glances, even without a result.
    pub(super) fn is_glance(self) -> Self {
        Self { is_glance_only: true, ..self }
    }

    /// Records an epoch of `arm`. Returns false if its cost is not stable, so it needs another one.
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

    /// True if the cost of `arm` is stable after its latest long epoch, or if more epochs would not
    /// change the result.
    fn has_settled(&self, arm: Arm, epoch: Cost) -> bool {
        let (spinning, sleeping) = self.before;
        let other = match arm {
            Arm::Spin => sleeping,
            Arm::Sleep => spinning,
        };
        // Only the arm in use has a cost from before the trial.
        let slower = if other.requests == 0 { 1000 } else { epoch.over(other, true) };
        let Some(last) = self.last else { return !(FASTER..=SLOWER_LONG).contains(&slower) };
        let change = epoch.over(last, true);
        let is_worse_by_now = change > *ALIKE.end() && slower > 1000;
        ALIKE.contains(&change) || is_worse_by_now || self.settling + 1 >= SETTLING_MAX
    }

    /// Returns the least nanoseconds and requests of an epoch; `None`: no trial runs.
    pub(super) fn epoch(trial: Option<&Self>) -> (u64, u64) {
        match trial {
            Some(Self { is_long: true, .. }) => (LONG_NS, LONG_REQUESTS),
            Some(_) | None => (GLANCE_NS, GLANCE_REQUESTS),
        }
    }

    /// Call after a long epoch of the tried arm. True if that arm is so much faster than the arm in
    /// use was before the trial that the arm in use need not be measured again.
    pub(super) fn is_far_faster(&self, tried: Arm) -> bool {
        let (spinning, sleeping) = self.before;
        let (now, before) = match tried {
            Arm::Spin => (self.pair.0, sleeping),
            Arm::Sleep => (self.pair.1, spinning),
        };
        self.is_long && now.requests > 0 && before.over(now, true) > *UNCLEAR.end()
    }

    /// Ends a pair: both arms have had an epoch, or that of the arm that is `tried` was enough.
    /// Returns the next step.
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
        // The time of a request in the tried arm divided by that in the other arm, in thousandths.
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

    /// Returns for how long `base`, the arm in use, stays after a trial in vain. A trial of a
    /// sleeping worker costs CPU time; a spinning worker spends CPU time until the next trial.
    pub(super) fn rest_ns(&self, base: Arm, effort: u64) -> u64 {
        let effort = if base == Arm::Sleep { effort } else { 0 };
        let share = TRIED_SHARE * effort.max(TRIED_EFFORT) / TRIED_EFFORT;
        share.saturating_mul(self.tried_ns).min(REST_NS_MAX)
    }

    /// Returns the gain and the effort of this trial alone.
    pub(super) fn found(&self) -> Found {
        let effort = self.spinning.ran_over(self.sleeping);
        Found { gain: self.gain(), effort, trials: 1 }
    }

    /// Returns the time of a request when sleeping, in thousandths of its time when spinning.
    fn gain(&self) -> u64 {
        self.sleeping.over(self.spinning, self.is_long)
    }
}
