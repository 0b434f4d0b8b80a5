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
    /// Requests or frames; 0: only time counts.
    pub count_max: u32,
    /// Microseconds; 0: nothing is held back.
    pub delay_us_max: u32,
}

/// Returned requests or frames of which the driver has not been told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Untold {
    /// When the first of it was returned.
    pub since_ns: u64,
    /// Requests or frames.
    pub count: u64,
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

/// A decision about a notification that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModerationDecision {
    /// Send it.
    Send(Cause),
    /// Hold it back until this time, in nanoseconds, or until there is more to tell.
    Hold(u64),
}

/// Decides when the driver of one queue is told.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moderator {
    operator: Moderation,
    present: Present,
}

/// Whose limits apply.
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
    /// For a queue whose driver has set nothing yet.
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

    /// Nothing is held back, whatever comes.
    #[must_use]
    #[inline]
    pub fn is_off(&self) -> bool {
        matches!(self.present, Present::Off)
    }

    /// Decides about `untold` requests or frames. `left`: chains that the driver has made available
    /// and not got back.
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
