//! When the driver is told of used buffers: at once, or after some more of them.
//!
//! ```text
//! a burst of chains was returned, and the driver wants to know:
//!   the driver has set its own limits (virtio 1.3 §5.1.6.5.9)?  they count, and nothing else
//!   the operator has set limits, or leaves it to the rate of completions?
//!     the ring has run dry?   tell it now: nobody brings more work until it is told
//!     enough of them?         tell it now
//!     the first has waited for long enough?  tell it now
//!     else hold the notification back until that time
//! ```
//! By the rate (`auto`): completions are counted in windows. Below a threshold nothing is held back
//! in the next window, above it the delay grows with the rate. A burst that comes later than the
//! delay ends this for the rest of the window: the rate has fallen, or the driver waits to be told,
//! and in both cases there is nothing to wait for.

/// What the operator wants of a device's notifications.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Moderation {
    /// Nothing is held back.
    #[default]
    Off,
    /// Notifications are held back within these limits.
    Fixed(Limits),
    /// Notifications are held back while completions come fast.
    Auto,
}

/// How long a notification may be held back: until the first of these is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Requests or frames; 0: only time counts.
    pub count_max: u32,
    /// Microseconds; 0: nothing is held back.
    pub delay_us_max: u32,
}

/// What the driver has not been told of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Untold {
    /// When the first of it was returned.
    pub since_ns: u64,
    /// Requests or frames.
    pub count: u64,
    /// Their chains: a long frame fills several receive buffers.
    pub chains: u64,
}

/// Why a notification is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It would not have been held back at all.
    Unmoderated,
    /// There is enough to tell.
    Count,
    /// The first of it has waited for long enough.
    Time,
    /// The driver has too little in the ring to go on without it.
    Dry,
}

/// What to do with a notification that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Send it.
    Send(Cause),
    /// Hold it back until this time, in nanoseconds, or until there is more to tell.
    Hold(u64),
}

/// The law of one queue.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moderator {
    operator: Moderation,
    present: Present,
}

/// What counts at present.
#[derive(Clone, Copy, Debug, Default)]
enum Present {
    #[default]
    Off,
    /// The driver's own limits.
    Driver(Limits),
    /// The operator's limits.
    Operator(Limits),
    Auto(Window),
}

/// The rate of completions.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    began_ns: u64,
    /// Requests or frames since then.
    count: u64,
    /// The last burst.
    last_ns: u64,
    /// How long a notification may be held back in this window.
    delay_ns: u64,
}

/// A delay shorter than this means nothing to a worker that sleeps: it would wake as much too late
/// again. It sends what it holds back before such a sleep.
pub const SLEEP_NS_MIN: u64 = 40_000;
/// Completions are counted for so long before the delay follows their rate.
const WINDOW_NS: u64 = 10_000_000;
/// Completions in a second up to which nothing is held back. A driver that sends its next request
/// when it hears of the last one stays below: each costs it an interrupt and a notification.
const RATE_MIN: u64 = 100_000;
/// The delay at twice that rate; it is twice as long at three times the rate, and so on.
const DELAY_STEP_NS: u64 = 20_000;
/// The longest delay.
const DELAY_NS_MAX: u64 = 50_000;

impl Moderator {
    /// For a queue whose driver has set nothing yet.
    #[must_use]
    pub fn new(operator: Moderation) -> Self {
        let mut moderator = Self { operator, present: Present::Off };
        moderator.set_driver(None);
        moderator
    }

    /// The driver has set these limits, also if they say that nothing is held back; or none, and
    /// the operator's count.
    pub fn set_driver(&mut self, limits: Option<Limits>) {
        let is_none = |limits: Limits| limits.delay_us_max == 0;
        self.present = match (limits, self.operator) {
            (Some(limits), _) if is_none(limits) => Present::Off,
            (Some(limits), _) => Present::Driver(limits),
            (None, Moderation::Off) => Present::Off,
            (None, Moderation::Fixed(limits)) if is_none(limits) => Present::Off,
            (None, Moderation::Fixed(limits)) => Present::Operator(limits),
            (None, Moderation::Auto) => Present::Auto(Window::default()),
        };
    }

    /// Nothing is held back, whatever comes.
    #[must_use]
    #[inline]
    pub fn is_off(&self) -> bool {
        matches!(self.present, Present::Off)
    }

    /// Counts a burst of requests or frames, whether the driver wants to hear of it or not.
    pub fn on_burst(&mut self, now_ns: u64, count: u64) {
        if let Present::Auto(window) = &mut self.present {
            window.on_burst(now_ns, count);
        }
    }

    /// Decides about what the driver has not been told of. `left`: chains that it has made
    /// available and not got back.
    #[must_use]
    pub fn decide(&self, now_ns: u64, untold: &Untold, left: u64) -> Decision {
        match &self.present {
            Present::Off => Decision::Send(Cause::Unmoderated),
            Present::Driver(limits) => limits.decide(now_ns, untold),
            Present::Operator(_) if left == 0 => Decision::Send(Cause::Dry),
            Present::Operator(limits) => limits.decide(now_ns, untold),
            Present::Auto(window) => window.decide(now_ns, untold, left),
        }
    }
}

impl Limits {
    fn decide(self, now_ns: u64, untold: &Untold) -> Decision {
        let Self { count_max, delay_us_max } = self;
        if count_max != 0 && untold.count >= u64::from(count_max) {
            return Decision::Send(Cause::Count);
        }
        hold_for(u64::from(delay_us_max) * 1000, now_ns, untold)
    }
}

fn hold_for(delay_ns: u64, now_ns: u64, untold: &Untold) -> Decision {
    let due_ns = untold.since_ns.saturating_add(delay_ns);
    if now_ns >= due_ns { Decision::Send(Cause::Time) } else { Decision::Hold(due_ns) }
}

impl Window {
    fn on_burst(&mut self, now_ns: u64, count: u64) {
        let age_ns = now_ns.saturating_sub(self.began_ns);
        if age_ns >= WINDOW_NS {
            self.delay_ns = delay_at(rate(self.count, age_ns));
            (self.began_ns, self.count) = (now_ns, 0);
        }
        if now_ns.saturating_sub(self.last_ns) > self.delay_ns {
            self.delay_ns = 0;
        }
        self.last_ns = now_ns;
        self.count += count;
    }

    /// While less is left in the ring than what waits to be told, the driver has to be told: it
    /// needs some time to bring more.
    fn decide(&self, now_ns: u64, untold: &Untold, left: u64) -> Decision {
        if self.delay_ns == 0 {
            Decision::Send(Cause::Unmoderated)
        } else if left < untold.chains {
            Decision::Send(Cause::Dry)
        } else {
            hold_for(self.delay_ns, now_ns, untold)
        }
    }
}

/// Completions in a second.
fn rate(count: u64, age_ns: u64) -> u64 {
    count.saturating_mul(1_000_000_000) / age_ns.max(1)
}

fn delay_at(rate: u64) -> u64 {
    let above = rate.saturating_sub(RATE_MIN);
    (above.saturating_mul(DELAY_STEP_NS) / RATE_MIN).min(DELAY_NS_MAX)
}

#[cfg(test)]
mod tests;
