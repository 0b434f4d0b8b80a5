//! To how many queue pairs of a guest the host delivers frames: to one, until its worker cannot
//! serve more; to another one only if that was tried and gained throughput.
//!
//! Several pairs are not faster by themselves. Where CPUs are free, each brings another worker.
//! Where they are not, each brings another thread that wants the guest's CPU, shorter batches and
//! more interrupts. No counter tells the two apart, so each step is tried and judged
//! (docs/design/0033):
//!
//! ```text
//! a window:  pressed  if a worker of the pairs in use is saturated, or frames wait
//! pressed for a second:    a trial of one pair more, if its wait is over
//! and for long, with > 1:  a trial of one pair less, if its wait is over
//! a trial ends:            do more pairs have 5 % more throughput than fewer, beyond doubt? use
//!                          more. Beyond doubt not? use fewer. In doubt to the end? as before
//! not pressed for 2 s, and all that the pairs do fits fewer: use that many, without a trial
//! ```
//! 1. Pressed is a worker from [`SATURATED_PERMILLE`] on; given up are pairs whose work leaves the
//!    others at [`FITS_PERMILLE`] at most. So a steady load never asks for both.
//! 2. A trial in vain, or a pair that is given up within `LASTING_NS`, doubles the wait until the
//!    next pair is tried. So whatever the guest does, it causes a bounded number of changes: no
//!    more than one for each pair in half a minute, once the wait has grown.
//! 3. A trial of one pair less finds out that another guest came and took the CPUs.
//!
//! The caller measures windows, of [`WINDOW_NS`] while there is work; time is an argument. Rates
//! are in bytes per millisecond, shares in thousandths.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;

/// The length of a window while there is work, in nanoseconds. A shorter window would measure
/// single bursts of TCP.
pub const WINDOW_NS: u64 = 100_000_000;
/// A worker is saturated if it was busy for this share of a window, as in `placement.rs`.
pub const SATURATED_PERMILLE: u64 = 900;
/// A window counts as pressed if this share of its turns left frames behind. A smaller share comes
/// from a burst.
pub const WAITING_PERMILLE: u64 = 500;
/// Pairs are given up if the workers of the others are then busy for this share at most.
pub const FITS_PERMILLE: u64 = 600;
/// The number of windows before a trial that give the throughput of the pairs in use ...
const BEFORE: usize = 10;
/// ... and how many of them must be pressed. So a burst of some hundred milliseconds begins no
/// trial.
const PRESSED: usize = 8;
/// The number of windows after a change that do not count: frames that were held are delivered,
/// workers get their queues, and TCP adapts.
const SETTLING: u32 = 3;
/// The least and the largest number of windows that a trial counts. The least number is needed to
/// compute their spread.
const TRIAL_MIN: u32 = 6;
const TRIAL_MAX: u32 = 30;
/// The factor of throughput that a further pair must gain. It costs interrupts and wakes, and noise
/// must not add pairs.
const GAIN: f64 = 1.05;
/// A difference is beyond doubt if it is more than this many times its standard error.
const DOUBT: f64 = 2.5;
/// Pairs are given up after this many nanoseconds in which the work fits fewer pairs.
const FITS_NS: u64 = 2_000_000_000;
/// The wait after a trial of one pair more, in nanoseconds: the initial and the maximum value.
const MORE_WAIT_NS: u64 = 4_000_000_000;
/// The initial wait until a trial of one pair less, in nanoseconds.
const FEWER_WAIT_NS: u64 = 30_000_000_000;
const WAIT_NS_MAX: u64 = 512_000_000_000;
/// If a pair was in use for this many nanoseconds, its trial was worthwhile: the wait until the
/// next trial gets its initial value.
const LASTING_NS: u64 = 30_000_000_000;
/// After this many nanoseconds without a pressed window, the next load counts as a new one: the
/// wait gets its initial value.
const FORGET_NS: u64 = 60_000_000_000;

/// The measurements of one window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// The end of the window, in nanoseconds.
    pub now_ns: u64,
    /// The length of the window, in nanoseconds.
    pub len_ns: u64,
    /// The number of pairs that the guest uses, to which the host can deliver.
    pub pairs: usize,
    /// The bytes that were delivered in the window.
    pub bytes: u64,
    /// How long the busiest worker of the pairs in use was busy with all its queues, in
    /// thousandths.
    pub busiest_permille: u64,
    /// How long the receiveqs in use kept their workers busy, summed, in thousandths of the window.
    pub work_permille: u64,
    /// The share of turns that left frames behind, in thousandths.
    pub waiting_permille: u64,
}

impl Window {
    fn rate(&self) -> u32 {
        let rate = u128::from(self.bytes) * 1_000_000 / u128::from(self.len_ns.max(1));
        u32::try_from(rate).unwrap_or(u32::MAX)
    }

    fn is_pressed(&self) -> bool {
        self.busiest_permille >= SATURATED_PERMILLE || self.waiting_permille >= WAITING_PERMILLE
    }

    /// Returns the least number of pairs that could do the work of this window.
    fn fits(&self) -> usize {
        usize::try_from(self.work_permille.div_ceil(FITS_PERMILLE)).unwrap_or(usize::MAX).max(1)
    }
}

/// The count, sum and sum of squares of the throughputs of several windows.
#[derive(Clone, Copy, Debug, Default)]
struct Rates {
    count: u32,
    sum: f64,
    squares: f64,
}

impl Rates {
    fn add(&mut self, rate: u32) {
        let rate = f64::from(rate);
        self.count += 1;
        self.sum += rate;
        self.squares += rate * rate;
    }

    fn mean(&self) -> f64 {
        self.sum / f64::from(self.count.max(1))
    }

    /// Returns the square of the standard error of the mean.
    fn doubt(&self) -> f64 {
        let count = f64::from(self.count);
        let spread = (self.squares - self.sum * self.mean()) / (count - 1.0);
        spread.max(0.0) / count
    }
}

/// The time of the next trial in one direction, and the wait after that trial.
#[derive(Clone, Copy, Debug)]
struct Wait {
    next_ns: u64,
    wait_ns: u64,
}

impl Wait {
    /// Sets the next trial to the end of the wait, and doubles the wait.
    fn double(&mut self, now_ns: u64) {
        self.next_ns = now_ns + self.wait_ns;
        self.wait_ns = (self.wait_ns * 2).min(WAIT_NS_MAX);
    }
}

/// A trial of another number of pairs, with the throughput before and during the trial.
#[derive(Clone, Copy, Debug)]
struct Trial {
    former: usize,
    before: Rates,
    settling: u32,
    after: Rates,
}

impl Trial {
    /// Returns true if the larger number of pairs gains throughput, false if not; `None`: the
    /// difference may be noise.
    fn is_worth_more(&self, pairs: usize) -> Option<bool> {
        let (more, fewer) = match pairs > self.former {
            true => (self.after, self.before),
            false => (self.before, self.after),
        };
        let gain = more.mean() - fewer.mean() * GAIN;
        let doubt = DOUBT * (more.doubt() + fewer.doubt()).sqrt();
        (gain.abs() > doubt).then_some(gain > 0.0)
    }
}

/// The policy of one network device.
#[derive(Clone, Debug)]
pub struct ReceivePairs {
    pairs: usize,
    trial: Option<Trial>,
    /// The last windows outside of trials: their throughput, and whether they were pressed.
    recent: VecDeque<(u32, bool)>,
    /// For how long the windows were not pressed (`calm_ns`), and for how long the work fitted
    /// fewer pairs (`fits_ns`).
    calm_ns: u64,
    fits_ns: u64,
    /// The time of the last trial that added a pair.
    grown_ns: u64,
    more: Wait,
    fewer: Wait,
}

impl Default for ReceivePairs {
    /// Begins with one pair.
    fn default() -> Self {
        Self {
            pairs: 1,
            trial: None,
            recent: VecDeque::with_capacity(BEFORE + 1),
            calm_ns: 0,
            fits_ns: 0,
            grown_ns: 0,
            more: Wait { next_ns: 0, wait_ns: MORE_WAIT_NS },
            fewer: Wait { next_ns: 0, wait_ns: FEWER_WAIT_NS },
        }
    }
}

impl ReceivePairs {
    /// Returns the number of pairs in use.
    #[must_use]
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// True during a trial.
    #[must_use]
    pub fn is_trying(&self) -> bool {
        self.trial.is_some()
    }

    /// Takes a window. Returns the number of pairs to which the host must deliver from now on.
    pub fn decide(&mut self, window: &Window) -> usize {
        let (now_ns, max) = (window.now_ns, window.pairs.max(1));
        let is_pressed = window.is_pressed();
        self.calm_ns = if is_pressed { 0 } else { self.calm_ns.saturating_add(window.len_ns) };
        if self.calm_ns >= FORGET_NS {
            self.more = Wait { next_ns: now_ns, wait_ns: MORE_WAIT_NS };
        }
        if self.pairs > max {
            self.give_up(max, now_ns);
        } else if self.trial.is_some() {
            self.judge(window);
        } else {
            if self.recent.len() >= BEFORE {
                self.recent.pop_front();
            }
            self.recent.push_back((window.rate(), is_pressed));
            self.look(window, is_pressed, max);
        }
        self.pairs
    }

    /// Gives up pairs without a trial, or begins a trial, if the window is a reason for that.
    fn look(&mut self, window: &Window, is_pressed: bool, max: usize) {
        let (now_ns, fits) = (window.now_ns, window.fits());
        let is_less = !is_pressed && fits < self.pairs;
        self.fits_ns = if is_less { self.fits_ns + window.len_ns } else { 0 };
        if self.fits_ns >= FITS_NS {
            return self.give_up(fits, now_ns);
        }
        let pressed = self.recent.iter().filter(|(_, is_pressed)| *is_pressed).count();
        if pressed < PRESSED || self.recent.len() < BEFORE {
            return;
        }
        if self.pairs < max && now_ns >= self.more.next_ns {
            self.begin(self.pairs + 1);
        } else if self.pairs > 1 && now_ns >= self.fewer.next_ns {
            self.begin(self.pairs - 1);
        }
    }

    fn begin(&mut self, pairs: usize) {
        let mut before = Rates::default();
        self.recent.iter().for_each(|(rate, _)| before.add(*rate));
        let (former, after) = (self.pairs, Rates::default());
        self.trial = Some(Trial { former, before, settling: SETTLING, after });
        self.set(pairs);
    }

    /// Counts a window of a trial. Ends the trial if its result is clear, or if it had enough
    /// windows.
    fn judge(&mut self, window: &Window) {
        let Some(trial) = &mut self.trial else { return };
        if trial.settling > 0 {
            trial.settling -= 1;
            return;
        }
        trial.after.add(window.rate());
        let (former, count) = (trial.former, trial.after.count);
        let (now_ns, is_growth) = (window.now_ns, self.pairs > former);
        let is_worth_more = match trial.is_worth_more(self.pairs) {
            _ if count < TRIAL_MIN => return,
            Some(is_worth_more) => is_worth_more,
            // No clear result: use the number of pairs from before the trial.
            None if count >= TRIAL_MAX => !is_growth,
            None => return,
        };
        self.trial = None;
        match (is_growth, is_worth_more) {
            // The trial of a further pair may begin at once.
            (true, true) => {
                self.grown_ns = now_ns;
                self.fewer = Wait { next_ns: now_ns + FEWER_WAIT_NS, wait_ns: FEWER_WAIT_NS };
                self.recent.clear();
            }
            (true, false) => {
                self.more.double(now_ns);
                self.set(former);
            }
            (false, true) => {
                self.fewer.double(now_ns);
                self.set(former);
            }
            (false, false) => {
                self.more.double(now_ns);
                self.recent.clear();
            }
        }
    }

    /// Reduces the number of pairs without a trial, because there is less work, or the guest uses
    /// fewer pairs.
    fn give_up(&mut self, pairs: usize, now_ns: u64) {
        let was_tried = self.trial.take().is_some();
        if !was_tried && now_ns.saturating_sub(self.grown_ns) >= LASTING_NS {
            self.more.wait_ns = MORE_WAIT_NS;
        }
        self.more.double(now_ns);
        self.set(pairs);
    }

    fn set(&mut self, pairs: usize) {
        self.pairs = pairs;
        self.recent.clear();
        self.fits_ns = 0;
    }
}
