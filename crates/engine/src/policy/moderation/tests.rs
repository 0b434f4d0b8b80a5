//! The law of moderation: its decisions as a table, and a clock that a script moves.

use super::Cause::{Count, Dry, Time, Unmoderated};
use super::Decision::{Hold, Send};
use super::*;

const OFF: Limits = Limits { count_max: 0, delay_us_max: 0 };
const FIVE_OR_2_MS: Limits = Limits { count_max: 5, delay_us_max: 2000 };
const ONLY_10_US: Limits = Limits { count_max: 0, delay_us_max: 10 };

#[test]
fn a_decision_follows_from_who_has_set_what_and_from_what_waits() {
    use Moderation::{Auto, Fixed, Off};
    for (operator, driver, now_ns, count, left, expected) in [
        // Nobody wants anything held back.
        (Off, None, 5, 1, 9, Send(Unmoderated)),
        (Fixed(OFF), None, 5, 1, 9, Send(Unmoderated)),
        (Fixed(Limits { count_max: 64, ..OFF }), None, 5, 1, 9, Send(Unmoderated)),
        // Count or time, whichever comes first.
        (Fixed(FIVE_OR_2_MS), None, 0, 4, 9, Hold(2_000_000)),
        (Fixed(FIVE_OR_2_MS), None, 0, 5, 9, Send(Count)),
        (Fixed(FIVE_OR_2_MS), None, 1_999_999, 4, 9, Hold(2_000_000)),
        (Fixed(FIVE_OR_2_MS), None, 2_000_000, 1, 9, Send(Time)),
        (Fixed(ONLY_10_US), None, 9_999, 1 << 40, 1, Hold(10_000)),
        (Fixed(ONLY_10_US), None, 10_000, 1, 1, Send(Time)),
        // The driver has nothing left in the ring.
        (Fixed(FIVE_OR_2_MS), None, 0, 1, 0, Send(Dry)),
        (Fixed(ONLY_10_US), None, 10_000, 1, 0, Send(Dry)),
        // What the driver has asked for wins: also a delay on a ring that is dry, also none.
        (Off, Some(FIVE_OR_2_MS), 0, 4, 0, Hold(2_000_000)),
        (Fixed(ONLY_10_US), Some(FIVE_OR_2_MS), 10_000, 4, 0, Hold(2_000_000)),
        (Fixed(ONLY_10_US), Some(FIVE_OR_2_MS), 0, 5, 9, Send(Count)),
        (Fixed(ONLY_10_US), Some(OFF), 0, 1, 9, Send(Unmoderated)),
        (Auto, Some(FIVE_OR_2_MS), 0, 4, 9, Hold(2_000_000)),
        (Auto, Some(OFF), 0, 1, 9, Send(Unmoderated)),
        // No rate is known yet.
        (Auto, None, 0, 1, 9, Send(Unmoderated)),
    ] {
        let mut moderator = Moderator::new(operator);
        moderator.set_driver(driver);
        let untold = Untold { since_ns: 0, count, chains: count };
        let decision = moderator.decide(now_ns, &untold, left);
        assert_eq!(decision, expected, "{operator:?} {driver:?} {now_ns} {count} {left}");
        moderator.set_driver(None);
        let again = Moderator::new(operator).decide(now_ns, &untold, left);
        assert_eq!(moderator.decide(now_ns, &untold, left), again, "the driver has begun anew");
    }
}

#[test]
fn the_delay_grows_with_the_rate_to_a_cap() {
    for (rate, delay_ns) in [
        (0, 0),
        (RATE_MIN, 0),
        (RATE_MIN * 3 / 2, 10_000),
        (RATE_MIN * 2, 20_000),
        (RATE_MIN * 3, 40_000),
        (RATE_MIN * 4, DELAY_NS_MAX),
        (u64::MAX, DELAY_NS_MAX),
    ] {
        assert_eq!(delay_at(rate), delay_ns, "{rate}");
    }
}

/// A driver with as much as it wants in the ring, and a clock that a script moves.
struct Script {
    moderator: Moderator,
    now_ns: u64,
    untold: Option<Untold>,
    left: u64,
    /// How long each notification was held back that was sent.
    held_ns: Vec<u64>,
}

impl Script {
    fn new() -> Self {
        let moderator = Moderator::new(Moderation::Auto);
        Self { moderator, now_ns: 1_000_000_000, untold: None, left: 1000, held_ns: Vec::new() }
    }

    fn look(&mut self) {
        let Some(untold) = &self.untold else { return };
        if let Send(_) = self.moderator.decide(self.now_ns, untold, self.left) {
            self.held_ns.push(self.now_ns - untold.since_ns);
            self.untold = None;
        }
    }

    /// Bursts of one request, `gap_ns` between them, for `for_ns`. What is due in a gap is sent at
    /// its time. Gives the notifications and the longest time that one was held back.
    fn run(&mut self, gap_ns: u64, for_ns: u64) -> (usize, u64) {
        let end_ns = self.now_ns + for_ns;
        self.held_ns.clear();
        while self.now_ns < end_ns {
            self.burst();
            let next_ns = self.now_ns + gap_ns;
            if let Some(untold) = self.untold
                && let Hold(due_ns) = self.moderator.decide(self.now_ns, &untold, self.left)
                && due_ns < next_ns
            {
                self.now_ns = due_ns;
                self.look();
            }
            self.now_ns = next_ns;
        }
        (self.held_ns.len(), self.held_ns.iter().copied().max().unwrap_or(0))
    }

    fn burst(&mut self) {
        self.moderator.on_burst(self.now_ns, 1);
        let fresh = Untold { since_ns: self.now_ns, ..Untold::default() };
        let untold = self.untold.get_or_insert(fresh);
        untold.count += 1;
        untold.chains += 1;
        self.look();
    }
}

#[test]
fn below_the_threshold_every_notification_goes_at_once() {
    for gap_ns in [10_000, 20_000, 100_000, 3_000_000, 1_000_000_000] {
        let mut script = Script::new();
        let (sent, longest_ns) = script.run(gap_ns, 100 * gap_ns.max(1_000_000));
        assert_eq!(longest_ns, 0, "{gap_ns}");
        assert_eq!(sent as u64, 100 * gap_ns.max(1_000_000) / gap_ns);
    }
}

#[test]
fn above_the_threshold_fewer_and_fewer_notifications_are_sent_and_none_waits_longer_than_the_cap() {
    let mut script = Script::new();
    let (sent, longest_ns) = script.run(5000, WINDOW_NS - 5000);
    assert_eq!((sent, longest_ns), (1999, 0), "no rate is known before a window has ended");
    script.run(5000, 2 * WINDOW_NS);
    for (gap_ns, delay_ns) in [(5000, 20_000), (4000, 30_000), (2000, 50_000), (500, 50_000)] {
        script.run(gap_ns, 3 * WINDOW_NS);
        let (sent, longest_ns) = script.run(gap_ns, WINDOW_NS);
        let bursts = WINDOW_NS / gap_ns;
        assert!(longest_ns.abs_diff(delay_ns) <= gap_ns, "{gap_ns}: {longest_ns}");
        assert!((sent as u64) * (delay_ns / gap_ns) <= bursts, "{gap_ns}: {sent} of {bursts}");
        assert!(longest_ns <= DELAY_NS_MAX);
    }
}

#[test]
fn a_burst_that_comes_late_ends_the_delay_at_once() {
    let mut script = Script::new();
    script.run(2000, 3 * WINDOW_NS);
    assert!(script.run(2000, 200_000).1 > 0);
    // The next ones are a request each time that the last one was told of.
    let (sent, longest_ns) = script.run(60_000, 2_000_000);
    assert!(sent >= 33, "{sent}");
    assert!(longest_ns <= DELAY_NS_MAX, "{longest_ns}: what was held back when the rate fell");
    assert_eq!(script.held_ns[1..].iter().max(), Some(&0));
    // They do not come back before the rate has been high for a window.
    assert_eq!(script.run(5000, WINDOW_NS / 2).1, 0);
}

#[test]
fn a_driver_that_waits_to_be_told_waits_once_in_a_window() {
    let mut script = Script::new();
    script.run(2000, 3 * WINDOW_NS);
    let began_ns = script.now_ns;
    let (mut waited, mut requests) = (0u64, 0u64);
    while script.now_ns < began_ns + 10 * WINDOW_NS {
        script.burst();
        requests += 1;
        if let Some(untold) = script.untold
            && let Hold(due_ns) = script.moderator.decide(script.now_ns, &untold, script.left)
        {
            script.now_ns = due_ns;
            script.look();
            waited += 1;
        }
        script.now_ns += 5000;
    }
    assert!(waited <= 11, "{waited} of {requests} requests");
}

#[test]
fn a_ring_that_would_run_dry_is_told_of_at_half() {
    let mut script = Script::new();
    script.run(2000, 3 * WINDOW_NS);
    script.untold = None;
    let untold = |chains| Untold { since_ns: script.now_ns, count: 1, chains };
    let decide = |chains, left| script.moderator.decide(script.now_ns, &untold(chains), left);
    let held = Hold(script.now_ns + DELAY_NS_MAX);
    assert_eq!([decide(1, 1), decide(10, 10), decide(10, 9)], [held, held, Send(Dry)]);
    assert_eq!(decide(1, 0), Send(Dry), "a driver with one request");
}
