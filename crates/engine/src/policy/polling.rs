//! How long a worker looks for work before it sleeps: it tries both, and keeps what serves faster,
//! or what takes less CPU time where both serve alike.
//!
//! A worker that looks on (*spins*) after its last request sees the next one at once; a worker that
//! sleeps gives its CPU away and must be woken. Neither is always better. Spinning wins where a CPU
//! is free and the next request comes soon. It loses where the client, or whoever the request goes
//! to next, waits for the very CPU that the worker spins on. No signal of the kernel tells these
//! apart, so each worker measures itself:
//!
//! ```text
//! a turn with work: the cycle is the time since the last turn with work
//!                   the epoch's cost grows by the cycle, its requests by those of the turn
//! an epoch ends:    its CPU time is what the thread has taken since the epoch began
//!                   a trial runs?  the cost goes to the arm that was tried; the other arm's turn
//!                   it is time?    a trial begins, with the arm that is not in use (trial.rs)
//! a trial ends:     whose requests were served faster? use that arm; are both alike? use the one
//!                   that takes less CPU time. Earlier trials count as well
//! a turn without:   sleep if the arm in use says so, or the next request is too far away;
//!                   else look, until the cap
//! ```
//! The policy is told the time and reads no clock. It keeps some 300 bytes for a worker, and costs
//! a few nanoseconds for a turn. Times are in nanoseconds, ratios in thousandths.

mod choice;
mod numbers;
mod trial;

pub use self::choice::{Decision, Mode, Polling};
pub use self::numbers::{Arm, PollingNumbers};

use self::trial::{Cost, Found, Next, Trial};

/// The default of the longest spin, in wakes. Two cover every gap for which spinning could save
/// more than a wake, but sleeping also costs the guest a kick, and a CPU that is not where its own
/// is. With four, a guest whose requests came every six wakes spun in vain at half its rate; under
/// longer spins its requests came every three wakes.
const CAP_WAKES: u64 = 10;
/// With an average gap of more wakes than this, a worker sleeps: its spins would end in vain.
const GATE_WAKES: u64 = 10;
/// A gap counts as at most this many wakes in the average: one pause must not outweigh the short
/// gaps before and after it.
const GAP_WAKES_MAX: u64 = 13;
/// A gap moves the average by the difference divided by this: a burst of eight gaps changes it.
const GAP_SHARE: u64 = 8;
/// The longest spin while a disk has a request: the service time of a fast disk and a reserve. It
/// does not depend on the wake, since sleeping costs an interrupt as well.
const DISK_CAP_NS: u64 = 100_000;
/// A service time moves its average by the difference divided by this. The divisor is smaller than
/// that of gaps, since there are fewer service times.
const SERVICE_SHARE: u64 = 4;
/// A sleeping worker measures gaps that contain its wakes, and these are long where other threads
/// want its CPU: they would keep it asleep. So it spins for this many gaps (a probe) at times ...
const PROBE_SPINS: u32 = 6;
/// ... and begins a probe at such intervals, if there are requests: a four-hundredth of a CPU.
const PROBE_NS: u64 = 256_000_000;

/// A poll that finds nothing takes less than a microsecond. If it takes longer than this, another
/// thread had the CPU for a time slice: the poll is stolen.
const STOLEN_NS: u64 = 500_000;
/// How long a stolen poll has an effect, in nanoseconds: several rounds of time slices.
const STOLEN_MEMORY_NS: u64 = 200_000_000;

/// The least length of an epoch after a stolen poll, in nanoseconds. That is several time slices: a
/// shorter epoch would contain one slice or none by chance.
const EPOCH_STOLEN_NS: u64 = 16_000_000;
/// If the worker slept for longer than this many wakes between two turns with work, the client has
/// paused, which it does with either arm ...
const PAUSE_WAKES: u64 = 10;
/// ... and that time counts as at most this many wakes in a glance.
const PAUSE_COST_WAKES: u64 = 20;
/// In a long epoch, the time between two turns with a pause of the client counts as at most this
/// many nanoseconds. One pause more or less has little effect there, and a client that waits for a
/// time slice, because the worker spins on its CPU, has not paused.
const PAUSE_COST_NS: u64 = 5_000_000;
/// If the client paused within the last so many requests, an epoch ends only at a pause, so that
/// both arms are compared over the same number of pauses.
const PAUSE_REQUESTS: u64 = 256;
/// The epoch of the tried arm ends early after this many times the usual time of a whole epoch's
/// requests: behind a busy thread each request may wait for a time slice.
const TRIED_TIME_MAX: u64 = 3;

/// The interval between two trials, initially and after a change, in nanoseconds.
const INTERVAL_NS_MIN: u64 = 8_000_000;
/// The maximum of the interval where a glance shows which arm is faster. Even if one arm is eight
/// times as slow, trials then cost below 1 %.
const INTERVAL_NS_MAX: u64 = 256_000_000;
/// The maximum of the interval where only long epochs show which arm is faster.
const INTERVAL_LONG_NS_MAX: u64 = 2_048_000_000;
/// Each interval is changed at random by at most this fraction of it. Otherwise two workers could
/// have all their trials at the same time, and each would measure the other's trial.
const JITTER_SHARE: u64 = 4;
/// The load has changed if this many epochs in a row cost more than usual, or all less. One epoch
/// with a time slice of another thread can lie between two cheaper ones.
const OFF_EPOCHS: u32 = 3;
/// An epoch is off the usual cost from this ratio on, in thousandths; arms mostly differ by less.
const OFF_PERMILLE: u64 = 1600;
/// A changed load begins a trial this long after the last one at least: some loads always change.
const OFF_PAUSE_NS: u64 = 32_000_000;
/// When the epochs between trials add up to more than this many nanoseconds, their cost is halved
/// before the next epoch is added: older epochs count less.
const LATELY_NS: u64 = 64_000_000;
/// After a sleep this long an epoch begins again; in a trial it continues without the sleep.
const FORGOTTEN_NS: u64 = 250_000_000;
/// Such a sleep in an epoch of the tried arm counts as at most this much time of that arm, which
/// delays the next trial: with one burst a second, the tried arm serves one burst in thirty.
const PAUSE_TRIED_NS: u64 = 2_000_000_000;

/// The polling policy of one worker.
#[derive(Clone, Debug)]
pub struct Policy {
    mode: Mode,
    wake_ns: u64,
    cap_ns: u64,
    disk_cap_ns: u64,
    /// The arm in use between trials.
    base: Arm,
    numbers: PollingNumbers,
    /// The average time until a disk completes a request, in nanoseconds.
    service_ns: u64,
    awaits_disk: bool,
    /// The time of the last turn with work, in nanoseconds.
    worked_at_ns: Option<u64>,
    /// The time of the last turn, with or without work.
    turned_at_ns: u64,
    /// Nanoseconds of sleep since the last turn with work.
    slept_ns: u64,
    spins: bool,
    /// How many spins of the present probe are left, and when the next probe may begin.
    probe_spins: u32,
    next_probe_ns: u64,
    stolen_at_ns: Option<u64>,
    epoch: Cost,
    epoch_began_ns: u64,
    /// The CPU time of the worker's thread at the beginning of the epoch.
    ran_ns: u64,
    /// How many requests came since the client's last pause.
    unpaused: u64,
    /// The average time of a request with the arm in use, in nanoseconds.
    usual_ns: Option<u64>,
    /// The cost of requests between trials. Older epochs count less ([`LATELY_NS`]).
    lately: Cost,
    off_epochs: u32,
    /// True if the last of these epochs cost more than usual, false if less.
    is_above: bool,
    trial: Option<Trial>,
    /// The gain and effort that the trials have found so far.
    found: Found,
    /// Before this time, a changed load begins no trial.
    glances_from_ns: u64,
    next_trial_ns: u64,
    /// Before this time, a changed load begins only a glance, since the last trial was long.
    rests_until_ns: u64,
    interval_ns: u64,
    random: u64,
}

impl Policy {
    /// Makes the policy of a worker that takes `wake_ns` to be woken. `seed` makes its intervals
    /// differ from those of other workers.
    #[must_use]
    pub fn new(polling: Polling, wake_ns: u64, seed: u64) -> Self {
        let wake_ns = wake_ns.max(1);
        let numbers = PollingNumbers { gain: 1000, effort: 1000, ..PollingNumbers::default() };
        Self {
            mode: polling.mode,
            wake_ns,
            cap_ns: polling.cap_ns.unwrap_or(CAP_WAKES * wake_ns),
            disk_cap_ns: polling.cap_ns.unwrap_or(DISK_CAP_NS),
            base: Arm::Spin,
            numbers: match polling.mode {
                Mode::Auto | Mode::Always => numbers,
                Mode::Never => PollingNumbers { arm: Arm::Sleep, ..numbers },
            },
            service_ns: 0,
            awaits_disk: false,
            worked_at_ns: None,
            turned_at_ns: 0,
            slept_ns: 0,
            spins: false,
            probe_spins: 0,
            next_probe_ns: PROBE_NS,
            stolen_at_ns: None,
            epoch: Cost::default(),
            epoch_began_ns: 0,
            ran_ns: 0,
            unpaused: PAUSE_REQUESTS,
            usual_ns: None,
            lately: Cost::default(),
            off_epochs: 0,
            is_above: false,
            trial: None,
            found: Found::NOTHING,
            glances_from_ns: OFF_PAUSE_NS,
            next_trial_ns: INTERVAL_NS_MIN,
            rests_until_ns: 0,
            interval_ns: INTERVAL_NS_MIN,
            // An odd factor spreads small seeds; xorshift needs a state that is not zero.
            random: seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        }
    }

    /// Continues the counts of `before`, the policy of the worker's former thread.
    #[must_use]
    pub fn counted(mut self, before: &PollingNumbers) -> Self {
        let PollingNumbers { arm, gain, effort, gap_ns, .. } = self.numbers;
        self.numbers = PollingNumbers { arm, gain, effort, gap_ns, ..*before };
        self
    }

    /// Returns the numbers that the policy has measured, decided and counted so far.
    #[must_use]
    pub fn numbers(&self) -> PollingNumbers {
        self.numbers
    }

    /// Call after a turn without work. Returns what the worker must do. `awaits_disk`: a disk has a
    /// request of a queue that takes turns.
    #[inline]
    pub fn on_idle(&mut self, now_ns: u64, awaits_disk: bool) -> Decision {
        let look_ns = self.turned(now_ns);
        match self.numbers.arm {
            Arm::Spin => self.numbers.looked_spinning_ns += look_ns,
            Arm::Sleep => self.numbers.looked_sleeping_ns += look_ns,
        }
        self.awaits_disk = awaits_disk;
        let (cap_ns, is_near) = if awaits_disk {
            (self.disk_cap_ns, self.service_ns <= self.disk_cap_ns)
        } else {
            (self.cap_ns, self.numbers.gap_ns <= GATE_WAKES * self.wake_ns)
        };
        let is_fresh = self.worked_at_ns.is_some_and(|at| now_ns.saturating_sub(at) < cap_ns);
        let looks = is_fresh
            && match self.mode {
                Mode::Auto => self.numbers.arm == Arm::Spin && (is_near || self.probes(now_ns)),
                Mode::Always => true,
                Mode::Never => false,
            };
        if looks {
            self.spins = true;
            return Decision::Look { reach_ns: cap_ns };
        }
        self.end_spin();
        Decision::Sleep
    }

    /// Counts a spin that ended without work, if the worker was spinning.
    fn end_spin(&mut self) {
        if core::mem::take(&mut self.spins) {
            self.numbers.spins_missed += 1;
            self.probe_spins = self.probe_spins.saturating_sub(1);
        }
    }

    /// Records the end of a turn, and returns how long the turn took. Counts a stolen poll, also if
    /// the poll found work: the client has long continued by then.
    #[inline]
    fn turned(&mut self, now_ns: u64) -> u64 {
        let turn_ns = now_ns.saturating_sub(core::mem::replace(&mut self.turned_at_ns, now_ns));
        if self.spins && turn_ns > STOLEN_NS {
            self.numbers.stolen_looks += 1;
            self.stolen_at_ns = Some(now_ns);
        }
        turn_ns
    }

    /// Returns true if the worker must spin for a probe, though the next request seems far away.
    fn probes(&mut self, now_ns: u64) -> bool {
        if now_ns >= self.next_probe_ns {
            self.probe_spins = PROBE_SPINS;
            self.next_probe_ns = now_ns + self.jittered(PROBE_NS);
        }
        self.probe_spins > 0
    }

    /// Call after the worker has slept for `slept_ns`, until `now_ns`.
    pub fn on_slept(&mut self, now_ns: u64, slept_ns: u64) {
        self.end_spin();
        self.slept_ns = self.slept_ns.saturating_add(slept_ns);
        self.turned_at_ns = now_ns;
    }

    /// Call after a turn with work, which took `requests` new ones. Returns true if the epoch is
    /// over: the caller must then call [`Self::end_epoch`].
    #[inline]
    pub fn on_burst(&mut self, now_ns: u64, requests: u64) -> bool {
        self.turned(now_ns);
        if core::mem::take(&mut self.spins) {
            self.numbers.spins_hit += 1;
        }
        let slept_ns = core::mem::take(&mut self.slept_ns);
        let Some(worked_at_ns) = self.worked_at_ns.replace(now_ns) else {
            self.epoch_began_ns = now_ns;
            return false;
        };
        let cycle_ns = now_ns.saturating_sub(worked_at_ns);
        let gap_ns = &mut self.numbers.gap_ns;
        *gap_ns = moved(*gap_ns, cycle_ns.min(GAP_WAKES_MAX * self.wake_ns), GAP_SHARE);
        if core::mem::take(&mut self.awaits_disk) {
            let woken_ns = if slept_ns > 0 { self.wake_ns } else { 0 };
            let service_ns = cycle_ns.saturating_sub(woken_ns).min(2 * self.disk_cap_ns);
            self.service_ns = moved(self.service_ns, service_ns, SERVICE_SHARE);
        }
        if self.mode != Mode::Auto {
            return false;
        }
        let paused = slept_ns > PAUSE_WAKES * self.wake_ns;
        let cost_ns = if paused { cycle_ns.min(PAUSE_COST_WAKES * self.wake_ns) } else { cycle_ns };
        let whole_ns = if paused { cycle_ns.min(PAUSE_COST_NS) } else { cycle_ns };
        self.unpaused = if paused { 0 } else { self.unpaused.saturating_add(requests) };
        if slept_ns > FORGOTTEN_NS {
            self.rested(now_ns, slept_ns);
        } else {
            self.epoch.add(Cost { ns: cost_ns, whole_ns, requests, ran_ns: 0 });
        }
        self.is_epoch_over(now_ns)
    }

    /// Drops the costs measured before a sleep of `slept_ns`, since the load may have changed. In a
    /// trial the epoch continues without the sleep: if it began again, bursts shorter than a long
    /// epoch would never end the trial, and the tried arm would serve all of them.
    #[cold]
    fn rested(&mut self, now_ns: u64, slept_ns: u64) {
        if let Some(trial) = &mut self.trial {
            self.epoch_began_ns = self.epoch_began_ns.saturating_add(slept_ns).min(now_ns);
            let is_tried = self.numbers.arm != self.base;
            trial.tried_ns += if is_tried { slept_ns.min(PAUSE_TRIED_NS) } else { 0 };
        } else {
            (self.epoch, self.lately) = (Cost::default(), Cost::default());
            self.epoch_began_ns = now_ns;
        }
    }

    /// True if the epoch is long enough, and has enough requests, to be compared with others.
    #[inline]
    fn is_epoch_over(&self, now_ns: u64) -> bool {
        let age_ns = now_ns.saturating_sub(self.epoch_began_ns);
        let (least_ns, requests) = Trial::epoch(self.trial.as_ref());
        // Two epochs are comparable if both have no pause, or if both end at a pause.
        let is_aligned = self.unpaused == 0 || self.unpaused >= PAUSE_REQUESTS;
        if age_ns < least_ns || self.epoch.requests == 0 || !is_aligned {
            return false;
        }
        let is_whole = self.epoch.requests >= requests
            && (age_ns >= EPOCH_STOLEN_NS || !self.is_stolen_from(now_ns));
        is_whole || self.is_too_dear(age_ns, requests)
    }

    /// True if the tried arm is so slow that its epoch ends early ([`TRIED_TIME_MAX`]).
    fn is_too_dear(&self, age_ns: u64, requests: u64) -> bool {
        let is_tried = self.trial.is_some() && self.numbers.arm != self.base;
        let usual_ns = self.usual_ns.unwrap_or(u64::MAX);
        is_tried && age_ns / (TRIED_TIME_MAX * requests) > usual_ns
    }

    fn is_stolen_from(&self, now_ns: u64) -> bool {
        self.stolen_at_ns.is_some_and(|at| now_ns.saturating_sub(at) < STOLEN_MEMORY_NS)
    }

    /// Ends the epoch, which [`Self::on_burst`] found over. `ran_ns`: the thread's CPU time so far.
    #[cold]
    pub fn end_epoch(&mut self, now_ns: u64, ran_ns: u64) {
        let mut epoch = core::mem::take(&mut self.epoch);
        epoch.ran_ns = ran_ns.saturating_sub(core::mem::replace(&mut self.ran_ns, ran_ns));
        let age_ns = now_ns.saturating_sub(self.epoch_began_ns);
        self.epoch_began_ns = now_ns;
        match self.trial.take() {
            Some(trial) => self.go_on(trial, epoch, age_ns, now_ns),
            None => self.begin_if_due(epoch, now_ns),
        }
    }

    /// Outside of a trial: counts an epoch, and begins a trial if one is due or the load has
    /// changed.
    fn begin_if_due(&mut self, epoch: Cost, now_ns: u64) {
        let each_ns = epoch.each_ns();
        let usual_ns = self.usual_ns.unwrap_or(each_ns);
        let is_above = each_ns > usual_ns;
        let (low_ns, high_ns) = (each_ns.min(usual_ns), each_ns.max(usual_ns));
        let is_off = high_ns * 1000 > low_ns * OFF_PERMILLE;
        let goes_on = is_off && core::mem::replace(&mut self.is_above, is_above) == is_above;
        self.off_epochs = if goes_on { self.off_epochs + 1 } else { u32::from(is_off) };
        self.usual_ns = Some(moved(usual_ns, each_ns, GAP_SHARE));
        if self.lately.whole_ns > LATELY_NS {
            self.lately = self.lately.halved();
        }
        self.lately.add(epoch);
        let has_changed = self.off_epochs >= OFF_EPOCHS && now_ns >= self.glances_from_ns;
        if has_changed {
            self.lately = epoch;
            self.interval_ns = INTERVAL_NS_MIN;
        }
        let is_due =
            now_ns >= self.next_trial_ns && self.numbers.gap_ns < GATE_WAKES * self.wake_ns;
        if has_changed || is_due {
            let trial = Trial::new(self.base, self.lately);
            let is_long = is_due || now_ns >= self.rests_until_ns;
            let mut trial = if is_long { trial } else { trial.is_glance() };
            (trial.gap_ns, trial.service_ns) = (self.numbers.gap_ns, self.service_ns);
            self.trial = Some(trial);
            self.numbers.trials += 1;
            self.numbers.arm = self.base.other();
        }
    }

    /// In a trial: counts an epoch, and switches to the other arm or ends the trial. The tried arm
    /// always has the first epoch.
    fn go_on(&mut self, mut trial: Trial, epoch: Cost, age_ns: u64, now_ns: u64) {
        let is_over = trial.note(self.numbers.arm, epoch);
        let tried = self.base.other();
        let is_of_base = self.numbers.arm == self.base;
        if is_of_base {
            (trial.gap_ns, trial.service_ns) = (self.numbers.gap_ns, self.service_ns);
        } else {
            trial.tried_ns += age_ns;
        }
        if !is_over {
            self.trial = Some(trial);
            return;
        }
        if is_of_base || trial.is_far_faster(tried) {
            let next = trial.end_pair(tried);
            if next != Next::Pair {
                self.judge(trial, next, now_ns);
                return;
            }
        } else {
            (self.numbers.gap_ns, self.service_ns) = (trial.gap_ns, trial.service_ns);
        }
        self.numbers.arm = self.numbers.arm.other();
        self.trial = Some(trial);
    }

    /// Ends a trial: chooses the arm from now on, and the time of the next trial.
    fn judge(&mut self, trial: Trial, next: Next, now_ns: u64) {
        let is_clear = next == Next::Clear;
        if next != Next::Nothing {
            let alone = trial.found();
            self.found = if is_clear { alone } else { self.found.and(alone) };
            (self.numbers.gain, self.numbers.effort) = (self.found.gain, self.found.effort);
            let says_spin = self.found.says_spin(self.base);
            // This trial alone would choose the other arm: so the next trial follows soon.
            let is_open = alone.says_spin(self.base) != says_spin;
            let chosen = if says_spin { Arm::Spin } else { Arm::Sleep };
            let has_flipped = chosen != self.base;
            self.numbers.flips += u64::from(has_flipped);
            self.interval_ns = if has_flipped || is_open {
                INTERVAL_NS_MIN
            } else {
                let most_ns = if is_clear { INTERVAL_NS_MAX } else { INTERVAL_LONG_NS_MAX };
                (self.interval_ns * 2).min(most_ns)
            };
            if self.is_stolen_from(now_ns) {
                self.interval_ns = self.interval_ns.max(INTERVAL_NS_MAX);
            }
            if has_flipped {
                self.lately = Cost::default();
            }
            self.base = chosen;
            let cost = if chosen == Arm::Spin { trial.spinning } else { trial.sleeping };
            self.usual_ns = Some(cost.each_ns());
            let rest_ns = if has_flipped || is_open { 0 } else { self.rest_ns(&trial) };
            self.rests_until_ns = now_ns + rest_ns;
            self.next_trial_ns = self.rests_until_ns.max(now_ns + self.jittered(self.interval_ns));
        }
        self.numbers.arm = self.base;
        self.off_epochs = 0;
        let rest_ns = if next == Next::Nothing { self.rest_ns(&trial) } else { 0 };
        self.glances_from_ns = now_ns + rest_ns.max(OFF_PAUSE_NS);
    }

    fn rest_ns(&self, trial: &Trial) -> u64 {
        trial.rest_ns(self.base, self.numbers.effort)
    }

    /// Returns `interval_ns`, changed at random by a quarter at most.
    fn jittered(&mut self, interval_ns: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let quarter_ns = interval_ns / JITTER_SHARE;
        interval_ns - quarter_ns + self.random % (2 * quarter_ns + 1)
    }
}

/// Returns the new `average`: it moves towards `value` by the difference divided by `share`.
fn moved(average: u64, value: u64, share: u64) -> u64 {
    if value >= average {
        average + (value - average) / share
    } else {
        average - (average - value).div_ceil(share)
    }
}

#[cfg(test)]
mod tests;
