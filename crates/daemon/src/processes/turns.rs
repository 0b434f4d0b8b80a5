//! `Turns`: the sessions of a device process take turns at noting, so that the notes of one
//! front-end do not delay those of the others.
//!
//! The supervisor reads the messages of a device process in their order, and no more of them at a
//! time than [`Messages`](super::question::Messages) says. A front-end that floods its session
//! would fill the channel, and each note of every other session of the device process would stand
//! behind all of the flood's that lie there. So the channel is kept empty:
//!
//! ```text
//! a note of a session that begins     has credit of the supervisor, passes at once
//! a further note                      stands in one line with those of the other sessions; the
//!                                     line moves more slowly than the supervisor reads
//! ```
//! A session waits for each of its notes before it makes the next one. So it has at most one in the
//! line (two, if its device's state is noted by the control queue then), and each session gets a
//! turn before any gets another one. The sessions of one device have credit once a second: else a
//! front-end that connects again and again would have it for each of its messages.

use super::question::weight;
use manyring_engine::Rate;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until};

/// Notes of the line that pass at once, and the time after which one more does. In each window of
/// the supervisor this is less than what the supervisor reads, by as much as a device process says
/// beside its notes.
const AT_ONCE: u32 = 256;
const EACH: Duration = Duration::from_micros(500);

/// How many notes of a session pass before it has to wait for its turn. A front-end that sets up
/// its device sends seven messages for each queue, and the device process makes three notes for
/// each message: 21 for each queue. A session has credit for 32 notes for each queue,
/// which is half as many again, and for 128 more.
pub(super) fn credit(queues: usize) -> usize {
    128 + 32 * queues
}

/// The line of a device process.
#[derive(Debug)]
pub(super) struct Turns(Mutex<Rate>);

/// The notes that a session makes without standing in the line; by default none.
#[derive(Debug, Default)]
pub(super) struct Credit(AtomicUsize);

impl Default for Turns {
    fn default() -> Self {
        Self(Mutex::new(Rate::of(AT_ONCE, EACH, Instant::now())))
    }
}

impl Credit {
    /// Of a session that begins, of a device with this many queues.
    pub(super) fn of(queues: usize) -> Self {
        Self(AtomicUsize::new(credit(queues)))
    }

    /// Takes the cost of a note. False: there is not enough, and nothing is left, so that a later
    /// note does not overtake this one.
    fn pay(&self, cost: usize) -> bool {
        let had = self.0.load(Ordering::Relaxed);
        self.0.store(had.saturating_sub(cost), Ordering::Relaxed);
        had >= cost
    }
}

impl Turns {
    /// Returns when a note of this many bytes may be sent.
    pub(super) async fn pass(&self, credit: &Credit, size: usize) {
        let cost = weight(size);
        if credit.pay(cost) {
            return;
        }
        // Those who wait for the lock get it in the order in which they came.
        let mut line = self.0.lock().await;
        sleep_until(line.due()).await;
        line.charge(EACH * u32::try_from(cost).unwrap_or(u32::MAX), Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Notes of a flood that pass while another session makes `count` of its own.
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
