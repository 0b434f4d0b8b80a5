//! `Pace`: limits how many messages the front-ends of a device send, and their CPU time.
//!
//! All sessions share the thread that reads messages, and each message can cause an order to a
//! worker that serves other guests too. A front-end sends some seven messages for each queue when
//! its guest starts, and hardly any while the guest runs. A front-end that sends messages without
//! end, or reconnects in a loop, would take a CPU from all others. So a device reads [`AT_ONCE`]
//! messages at once, and then one per [`EACH`]. Further messages stay in the socket, until its
//! buffer is full and the front-end blocks.
//!
//! A message costs some tens of microseconds of CPU time, unless its front-end makes it cost more.
//! So the messages of a device may use [`CREDIT`] of CPU time at once, and then one part in
//! [`SHARE`] of the elapsed time. This delays the next message, but does not shorten the present
//! one: so a session ends at the second message that takes longer than [`LONG`].

use manyring_engine::Rate;
use std::time::Duration;
use tokio::time::Instant;

/// The number of messages that are read without delay: three starts of a guest with 256 queues.
pub(super) const AT_ONCE: u32 = 8192;
/// After `AT_ONCE` messages, the time between two messages that are read.
pub(super) const EACH: Duration = Duration::from_millis(1);
/// A client that connects counts as this many messages: a session is set up and torn down for it.
const CLIENT: u32 = 16;
/// The factor by which CPU times are longer in a debug build than in a release build.
const SLOWER: u64 = if cfg!(debug_assertions) { 10 } else { 1 };
/// CPU time that messages may take at once: twenty times what three starts of a guest with 256
/// queues take.
pub(super) const CREDIT: Duration = Duration::from_secs(SLOWER);
/// After that, messages may take one part in this many of the elapsed time.
pub(super) const SHARE: u32 = 20;
/// A message with more CPU time than this counts as far too long.
pub(super) const LONG: Duration = Duration::from_millis(50 * SLOWER);
/// A session ends at the second message within this time that is far too long. The first one may be
/// no fault of the front-end: if the host is itself a guest, time that its hypervisor steals can be
/// counted as CPU time of the thread.
const REMEMBERED: Duration = Duration::from_secs(600);
/// The most that one charge counts after a message that was far too long, so that a jump of the
/// clock does not block a device for hours.
const COST_MAX: Duration = Duration::from_secs(60);

/// The messages of a device, over all of its sessions.
#[derive(Debug)]
pub(super) struct Pace {
    /// Limits the number of messages.
    count: Rate,
    /// True if it was logged that messages must wait, and the front-ends have not rested since.
    is_told: bool,
    /// Limits the CPU time of messages.
    cost: Rate,
    /// CPU time that the current message has used so far.
    message: Duration,
    /// The time at which a message was last found to be far too long.
    long_at: Option<Instant>,
    /// True if the current message is the second one that was far too long.
    is_over: bool,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            count: Rate::of(AT_ONCE, EACH, now),
            is_told: false,
            cost: Rate::new(CREDIT * SHARE, now),
            message: Duration::ZERO,
            long_at: None,
            is_over: false,
        }
    }

    /// Returns the time from which on the next piece of a message may be read; it may have passed.
    pub(super) fn due(&self) -> Instant {
        self.count.due().max(self.cost.due())
    }

    /// Charges CPU time that belongs to no message.
    pub(super) fn charge(&mut self, took: Duration, now: Instant) {
        // A single jump of the clock is charged as CREDIT at most, which delays nobody.
        let most = if self.remembers(now) { COST_MAX } else { CREDIT };
        self.rest(now);
        self.cost.charge(took.min(most) * SHARE, now);
    }

    /// Charges CPU time of the current message.
    pub(super) fn charge_message(&mut self, took: Duration, now: Instant) {
        self.charge(took, now);
        let was_long = self.message > LONG;
        self.message = self.message.saturating_add(took);
        if self.message > LONG && !was_long {
            self.is_over = self.remembers(now);
            self.long_at = Some(now);
        }
    }

    /// Begins another message: CPU time that is charged from now on belongs to that message.
    pub(super) fn begin_message(&mut self) {
        (self.message, self.is_over) = (Duration::ZERO, false);
    }

    /// True if the session must end: the current message and one before were far too long.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    fn remembers(&self, now: Instant) -> bool {
        self.long_at.is_some_and(|at| now.saturating_duration_since(at) < REMEMBERED)
    }

    /// Called when a message must wait. Returns the reason to log, once until the front-ends have
    /// rested.
    pub(super) fn note_wait(&mut self) -> Option<&'static str> {
        let was_told = std::mem::replace(&mut self.is_told, true);
        (!was_told).then(|| match self.count.due() < self.cost.due() {
            true => "its messages take too much CPU time",
            false => "it sends too many messages or connects too often",
        })
    }

    /// Counts a message that was read.
    pub(super) fn count_message(&mut self, now: Instant) {
        self.count(1, now);
    }

    /// Counts a client that has connected.
    pub(super) fn count_client(&mut self, now: Instant) {
        self.count(CLIENT, now);
    }

    fn count(&mut self, messages: u32, now: Instant) {
        self.rest(now);
        self.count.charge(EACH * messages, now);
    }

    /// Checks whether the front-ends have rested until `now`: then the next wait is logged again.
    fn rest(&mut self, now: Instant) {
        self.is_told &= !(self.count.is_rested(now) && self.cost.is_rested(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends `count` messages as fast as they may come from `from` on. Returns when the last came.
    fn send(pace: &mut Pace, count: u32, from: Instant) -> Instant {
        (0..count).fold(from, |now, _| {
            let now = now.max(pace.due());
            pace.count_message(now);
            now
        })
    }

    #[test]
    fn many_messages_come_at_once_and_further_ones_by_and_by() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        assert_eq!(send(&mut pace, AT_ONCE, start), start);
        assert_eq!(send(&mut pace, 1, start), start + EACH);
        let ended = send(&mut pace, 1000, start + EACH);
        assert_eq!(ended, start + 1001 * EACH);
        // A rest gives back as much as it is long, and never more than at first.
        let later = ended + 100 * EACH;
        assert_eq!(send(&mut pace, 100, later), later);
        assert_eq!(send(&mut pace, 1, later), later + EACH);
        let much_later = later + 3 * AT_ONCE * EACH;
        assert_eq!(send(&mut pace, AT_ONCE, much_later), much_later);
        assert_eq!(send(&mut pace, 1, much_later), much_later + EACH);
    }

    #[test]
    fn a_wait_is_told_once_until_the_front_ends_have_rested() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let ended = send(&mut pace, AT_ONCE + 1, start);
        let why = Some("it sends too many messages or connects too often");
        assert_eq!([pace.note_wait(), pace.note_wait()], [why, None]);
        let rested = ended + AT_ONCE * EACH;
        send(&mut pace, 1, rested - 10 * EACH);
        assert_eq!(pace.note_wait(), None);
        send(&mut pace, 1, rested + 10 * EACH);
        assert_eq!(pace.note_wait(), why);
    }

    #[test]
    fn a_client_counts_for_more_than_a_message() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        for _ in 0..AT_ONCE / CLIENT {
            assert!(pace.due() <= start);
            pace.count_client(start);
        }
        assert_eq!(pace.due(), start + EACH);
    }

    #[test]
    fn cpu_time_is_credited_at_first_and_then_paid_for_by_and_by() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let (step, steps) =
            (LONG / 2, u32::try_from(CREDIT.as_nanos() / LONG.as_nanos()).unwrap() * 2);
        for _ in 0..steps {
            assert!(pace.due() <= start);
            pace.charge_message(step, start);
            pace.begin_message();
        }
        assert_eq!(pace.due(), start, "the credit is used up");
        pace.charge(step, start);
        assert_eq!(pace.due(), start + step * SHARE);
        assert_eq!(pace.note_wait(), Some("its messages take too much CPU time"));
        // A rest gives back a part of its time, and never more than at first.
        let later = start + step * SHARE;
        pace.charge(step, later);
        assert_eq!(pace.due(), later + step * SHARE);
        let much_later = later + 3 * CREDIT * SHARE;
        pace.charge(CREDIT, much_later);
        assert_eq!(pace.due(), much_later);
        pace.charge(step, much_later);
        assert_eq!(pace.due(), much_later + step * SHARE);
    }

    #[test]
    fn a_second_message_that_is_far_too_long_ends_the_session_and_the_next_session_is_not_new() {
        let (step, minute) = (LONG * 2 / 3, Duration::from_secs(60));
        let mut now = Instant::now();
        let mut pace = Pace::new(now);
        let mut sends = |steps: u32, after: Duration| {
            now += after;
            pace.begin_message();
            (0..steps).for_each(|_| pace.charge_message(step, now));
            pace.is_over()
        };
        assert!(!sends(1, minute) && !sends(1, minute), "neither is too long by itself");
        assert!(!sends(2, minute), "the first");
        assert!(!sends(1, minute));
        assert!(sends(2, minute), "the second, in two steps");
        assert!(!sends(0, minute), "another session");
        assert!(sends(2, minute), "its first message is the third");
        assert!(!sends(2, REMEMBERED), "what is long ago is forgotten");
        assert!(!sends(20, REMEMBERED), "one message counts once");
    }

    #[test]
    fn a_clock_that_jumps_makes_nobody_wait() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        pace.charge_message(Duration::from_secs(1 << 40), start);
        assert!(pace.due() <= start && !pace.is_over());
        pace.begin_message();
        pace.charge_message(Duration::from_secs(1 << 40), start);
        assert_eq!(pace.due(), start + COST_MAX * SHARE);
        assert!(pace.is_over());
    }
}
