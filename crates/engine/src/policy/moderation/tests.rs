//! The policy of moderation: its decisions as a table.

use super::Cause::{Count, Dry, Time, Unmoderated};
use super::ModerationDecision::{Hold, Send};
use super::*;

const OFF: Limits = Limits { count_max: 0, delay_us_max: 0 };
const FIVE_OR_2_MS: Limits = Limits { count_max: 5, delay_us_max: 2000 };
const ONLY_10_US: Limits = Limits { count_max: 0, delay_us_max: 10 };

#[test]
fn a_decision_follows_from_who_has_set_what_and_from_what_waits() {
    use Moderation::{Fixed, Off};
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
        // The driver's own limits win: also a delay on a ring that is dry, also no delay.
        (Off, Some(FIVE_OR_2_MS), 0, 4, 0, Hold(2_000_000)),
        (Fixed(ONLY_10_US), Some(FIVE_OR_2_MS), 10_000, 4, 0, Hold(2_000_000)),
        (Fixed(ONLY_10_US), Some(FIVE_OR_2_MS), 0, 5, 9, Send(Count)),
        (Fixed(ONLY_10_US), Some(OFF), 0, 1, 9, Send(Unmoderated)),
    ] {
        let mut moderator = Moderator::new(operator);
        moderator.set_driver(driver);
        let untold = Untold { since_ns: 0, count };
        let decision = moderator.decide(now_ns, &untold, left);
        assert_eq!(decision, expected, "{operator:?} {driver:?} {now_ns} {count} {left}");
        moderator.set_driver(None);
        let again = Moderator::new(operator).decide(now_ns, &untold, left);
        assert_eq!(moderator.decide(now_ns, &untold, left), again, "the driver has begun anew");
    }
}
