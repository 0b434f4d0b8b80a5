//! When the driver is told of used buffers: at once, or after some more of them.
//!
//! ```text
//! a burst of chains was returned, and the driver wants to know:
//!   the driver has set its own limits (virtio 1.3 §5.1.6.5.9)?  only these apply
//!   the operator has set limits?
//!     the ring has run dry?   tell it now: the driver brings no more work until it is told
//!     enough of them?         tell it now
//!     the first has waited for long enough?  tell it now
//!     else hold the notification back until that time
//! ```

/// The operator's choice for the used buffer notifications of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Moderation {
    /// Nothing is held back.
    #[default]
    Off,
    /// Notifications are held back within these limits.
    Fixed(Limits),
}

/// How long a notification may be held back: until the first of these is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// A notification is sent once it announces so many requests or frames; 0: there is no limit.
    pub count_max: u32,
    /// A notification is held back for at most this many microseconds; 0: nothing is held back.
    pub delay_us_max: u32,
}

/// Returned requests or frames of which the driver has not been told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Untold {
    /// When the first of these requests or frames was returned, in nanoseconds.
    pub since_ns: u64,
    /// The number of these requests or frames.
    pub count: u64,
}

/// Why a notification is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// No limits apply: the notification would not have been held back at all.
    Unmoderated,
    /// As many requests or frames were returned as the limits allow.
    Count,
    /// The first returned request or frame has waited for as long as the limits allow.
    Time,
    /// The driver has used up its chains, so it may do nothing before it gets the notification.
    Dry,
}

/// A decision about a notification that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModerationDecision {
    /// Send the notification now, for this reason.
    Send(Cause),
    /// Hold the notification back until this time in nanoseconds, or until more chains return.
    Hold(u64),
}

/// Decides when the driver of one queue gets a used buffer notification.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moderator {
    operator: Moderation,
    present: Present,
}

/// The limits that apply at present: none, the driver's or the operator's.
#[derive(Clone, Copy, Debug, Default)]
enum Present {
    #[default]
    Off,
    /// The driver's own limits.
    Driver(Limits),
    /// The operator's limits.
    Operator(Limits),
}

/// Nanoseconds. A worker that sleeps for less than this wakes late by about the length of the
/// sleep, so it sends the calls that it holds back before such a sleep.
pub const SLEEP_NS_MIN: u64 = 40_000;
impl Moderator {
    /// Makes the moderator of a queue whose driver has set no limits yet.
    #[must_use]
    pub fn new(operator: Moderation) -> Self {
        let mut moderator = Self { operator, present: Present::Off };
        moderator.set_driver(None);
        moderator
    }

    /// Sets the driver's limits. They replace the operator's even if they hold nothing back;
    /// `None`: the driver has set none, and the operator's apply.
    pub fn set_driver(&mut self, limits: Option<Limits>) {
        let is_none = |limits: Limits| limits.delay_us_max == 0;
        self.present = match (limits, self.operator) {
            (Some(limits), _) if is_none(limits) => Present::Off,
            (Some(limits), _) => Present::Driver(limits),
            (None, Moderation::Off) => Present::Off,
            (None, Moderation::Fixed(limits)) if is_none(limits) => Present::Off,
            (None, Moderation::Fixed(limits)) => Present::Operator(limits),
        };
    }

    /// True if no notification is ever held back under the present limits.
    #[must_use]
    #[inline]
    pub fn is_off(&self) -> bool {
        matches!(self.present, Present::Off)
    }

    /// Decides whether to notify the driver of `untold` requests or frames. `left`: how many chains
    /// the driver has made available and not got back.
    #[must_use]
    pub fn decide(&self, now_ns: u64, untold: &Untold, left: u64) -> ModerationDecision {
        match &self.present {
            Present::Off => ModerationDecision::Send(Cause::Unmoderated),
            Present::Driver(limits) => limits.decide(now_ns, untold),
            Present::Operator(_) if left == 0 => ModerationDecision::Send(Cause::Dry),
            Present::Operator(limits) => limits.decide(now_ns, untold),
        }
    }
}

impl Limits {
    fn decide(self, now_ns: u64, untold: &Untold) -> ModerationDecision {
        let Self { count_max, delay_us_max } = self;
        if count_max != 0 && untold.count >= u64::from(count_max) {
            return ModerationDecision::Send(Cause::Count);
        }
        hold_for(u64::from(delay_us_max) * 1000, now_ns, untold)
    }
}

fn hold_for(delay_ns: u64, now_ns: u64, untold: &Untold) -> ModerationDecision {
    let due_ns = untold.since_ns.saturating_add(delay_ns);
    if now_ns >= due_ns {
        ModerationDecision::Send(Cause::Time)
    } else {
        ModerationDecision::Hold(due_ns)
    }
}

#[cfg(test)]
mod tests;
