//! `Turns`: the sessions of a device process take turns at journal updates, so that a flood of one
//! front-end does not delay the others.
//!
//! The supervisor reads the reports of a device process in their order, and a bounded number at a
//! time ([`Messages`](super::question::Messages)). If a front-end flooded its session, its updates
//! would fill the channel, and each update of another session would wait behind them. So the
//! channel is kept empty:
//!
//! ```text
//! an update of a session that begins    has credit of the supervisor, passes at once
//! a further update                      waits in one queue with those of the other sessions, which
//!                                       moves more slowly than the supervisor reads
//! ```
//! A session waits for each of its updates before it makes the next one. So it has at most one in
//! the queue (two, while the control queue saves the state of its device), and each session gets a
//! turn before any gets another one. The sessions of one device get credit once a second: otherwise
//! a front-end that connects again and again would have credit for each message.

use super::question::weight;
use crate::times::UPDATE_EACH;
use manyring_engine::Rate;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until};

/// Updates that pass the queue at once, and the time after which one more does. In each window of
/// the supervisor this is less than it reads, by the number of other reports of a device process.
const AT_ONCE: u32 = 256;

/// How many updates of a session pass before it has to queue. A front-end that sets up its device
/// sends seven messages for each queue, and the device process makes three updates for each
/// message: 21 for each queue. The credit is 32 for each queue, half as many again, and 128 more.
pub(super) fn credit(queues: usize) -> usize {
    128 + 32 * queues
}

/// The queue of a device process.
#[derive(Debug)]
pub(super) struct Turns(Mutex<Rate>);

/// Updates that a session makes without queueing; by default none.
#[derive(Debug, Default)]
pub(super) struct Credit(AtomicUsize);

impl Default for Turns {
    fn default() -> Self {
        Self(Mutex::new(Rate::of(AT_ONCE, UPDATE_EACH, Instant::now())))
    }
}

impl Credit {
    /// The credit of a session that begins, of a device with this many queues.
    pub(super) fn of(queues: usize) -> Self {
        Self(AtomicUsize::new(credit(queues)))
    }

    /// Takes the cost of an update. False: the credit does not cover it, and is zero now, so that a
    /// later update does not overtake this one.
    fn pay(&self, cost: usize) -> bool {
        let had = self.0.load(Ordering::Relaxed);
        self.0.store(had.saturating_sub(cost), Ordering::Relaxed);
        had >= cost
    }
}

impl Turns {
    /// Returns when an update of this size in bytes may be sent.
    pub(super) async fn pass(&self, credit: &Credit, size: usize) {
        let cost = weight(size);
        if credit.pay(cost) {
            return;
        }
        // The lock is fair: waiters get it in the order in which they came.
        let mut line = self.0.lock().await;
        sleep_until(line.due()).await;
        line.charge(UPDATE_EACH * u32::try_from(cost).unwrap_or(u32::MAX), Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Updates of a flood that pass while another session makes `count` updates.
    fn flooded(count: usize, others: Credit) -> usize {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (turns, passed) = (Arc::new(Turns::default()), Arc::new(AtomicUsize::new(0)));
            let (line, counts) = (turns.clone(), passed.clone());
            let flood = tokio::spawn(async move {
                let credit = Credit::of(1);
                loop {
                    line.pass(&credit, 64).await;
                    counts.fetch_add(1, Ordering::Relaxed);
                }
            });
            // The flood's credit, and what passes at once, are used up.
            while passed.load(Ordering::Relaxed) < credit(1) + AT_ONCE as usize {
                tokio::task::yield_now().await;
            }
            let before = passed.load(Ordering::Relaxed);
            for _ in 0..count {
                turns.pass(&others, 64).await;
            }
            flood.abort();
            passed.load(Ordering::Relaxed) - before
        })
    }

    #[test]
    fn a_session_that_begins_notes_at_once_beside_a_flood() {
        assert_eq!(flooded(credit(4), Credit::of(4)), 0);
    }

    #[test]
    fn sessions_without_credit_note_in_turn() {
        let passed = flooded(50, Credit(AtomicUsize::new(0)));
        assert!((48..=52).contains(&passed), "{passed} of the flood beside 50 of another session");
    }

    #[test]
    fn a_note_that_the_credit_does_not_pay_for_is_overtaken_by_none() {
        let credit = Credit(AtomicUsize::new(5));
        assert!(credit.pay(2) && !credit.pay(4) && !credit.pay(1));
    }
}
