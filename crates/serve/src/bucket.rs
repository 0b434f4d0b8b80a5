//! `Bucket`: a token bucket that limits the reports of a trust domain to the supervisor.
//!
//! Each report takes a token, a long report takes more. The supervisor reads the next report of a
//! domain when a token is there. The sessions of a device process send more slowly than the
//! supervisor reads:
//!
//! ```text
//! the supervisor reads      2048 at once, then one each 320 us, whichever process the domain has
//! all sessions send         1024 at once, then one each 400 us
//! ```
//! So the channel is nearly empty, and a report of one session does not wait behind a flood of
//! reports of another one. Each session has at most one report that waits for a token, and tokens
//! are granted in the order of the requests, so sessions take turns. Only reports with descriptors
//! pass a bucket of the sessions (`session_journal.rs`), and these are few.

use crate::times::{REPORT_EACH, SESSION_REPORT_EACH};
use manyring_engine::Rate;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until};

/// Reports that the supervisor reads at once.
const READ_AT_ONCE: u32 = 2048;
/// Reports that all sessions of a device process may send at once: enough for eight sessions with
/// 128 queues to start.
const SENT_AT_ONCE: u32 = 1024;
/// A report takes one token, and one more for each such number of bytes.
const LONG: usize = 1024;

/// The token bucket of a domain.
#[derive(Debug)]
pub struct Bucket {
    rate: Mutex<Rate>,
    each: Duration,
}

impl Bucket {
    /// Makes the bucket by which the supervisor reads the reports of a domain.
    pub fn of_reader() -> Self {
        Self::new(READ_AT_ONCE, REPORT_EACH)
    }

    /// Makes the bucket by which the sessions of a device process send.
    pub(super) fn of_sessions() -> Self {
        Self::new(SENT_AT_ONCE, SESSION_REPORT_EACH)
    }

    fn new(at_once: u32, each: Duration) -> Self {
        Self { rate: Mutex::new(Rate::of(at_once, each, Instant::now())), each }
    }

    /// Waits until a token is there, and charges the tokens of a report of `size` bytes.
    pub async fn pass(&self, size: usize) {
        // The lock is fair: waiters get it in the order in which they came.
        let mut rate = self.rate.lock().await;
        sleep_until(rate.due()).await;
        let tokens = u32::try_from(1 + size / LONG).unwrap_or(u32::MAX);
        rate.charge(self.each * tokens, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[tokio::test(start_paused = true)]
    async fn a_session_takes_turns_with_a_flood_and_waits_for_no_report_of_before() {
        let (bucket, passed) = (Arc::new(Bucket::of_sessions()), Arc::new(AtomicU32::new(0)));
        for _ in 0..2 {
            let (bucket, counts) = (bucket.clone(), passed.clone());
            tokio::spawn(async move {
                loop {
                    bucket.pass(64).await;
                    counts.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // The first burst takes all tokens that the bucket begins with.
        while passed.load(Ordering::Relaxed) < SENT_AT_ONCE {
            tokio::task::yield_now().await;
        }
        let before = passed.load(Ordering::Relaxed);
        for _ in 0..50 {
            bucket.pass(64).await;
        }
        let beside = passed.load(Ordering::Relaxed) - before;
        assert!((96..=104).contains(&beside), "{beside} of two floods beside 50 of a session");
    }

    #[tokio::test(start_paused = true)]
    async fn a_domain_that_has_sent_all_that_passes_at_once_is_read_at_its_pace() {
        let bucket = Bucket::of_reader();
        let began = Instant::now();
        for _ in 0..READ_AT_ONCE {
            bucket.pass(10).await;
        }
        assert_eq!(began.elapsed(), Duration::ZERO);
        // A long one has the tokens of sixteen.
        bucket.pass(15 * LONG).await;
        bucket.pass(10).await;
        let took = began.elapsed();
        assert!(took >= REPORT_EACH * 17 && took < REPORT_EACH * 17 + Duration::from_millis(2));
    }

    #[test]
    fn sessions_send_less_than_the_supervisor_reads() {
        let (sent, read) = (Duration::from_secs(10), Duration::from_secs(10));
        let sent = sent.div_duration_f64(SESSION_REPORT_EACH) + f64::from(SENT_AT_ONCE);
        let read = read.div_duration_f64(REPORT_EACH) + f64::from(READ_AT_ONCE);
        assert!(sent < 0.85 * read, "{sent} of {read}");
    }
}
