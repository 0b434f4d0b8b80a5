//! `Question`: what a device process has been asked and has not answered; `Messages`: how many it
//! sends.

use super::message::{Command, Report};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// How long a device process may leave unread or unanswered what it was told, and how long it may
/// take to start.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);
/// If a device process has sent more than this many messages in a [`WINDOW`], beside those that its
/// sessions begin with, the supervisor reads the device process's next message after the end of the
/// window. Nearly all messages are short: a long one counts as several.
const MESSAGES_MAX: usize = 1024;
/// Most messages of sessions that begin which the supervisor has still to read, and reads at once:
/// a second of its time, in turns with the rest. A device process that was taken over may have
/// saved them.
const CREDIT_MAX: usize = 1 << 16;
/// The sessions of a device have credit once in this time, however often its front-end connects.
const CREDIT_INTERVAL: Duration = Duration::from_secs(1);
/// Bytes of a message for each further one that it counts as.
const LONG: usize = 1024;
const WINDOW: Duration = Duration::from_millis(320);

/// The questions that a device process has been asked and has not answered yet.
#[derive(Debug, Default)]
pub(super) struct Question {
    /// The number of the last one, and since when no answer has come.
    asked: Option<(u64, Instant)>,
    /// An answer was waited for in vain once.
    is_late: bool,
}

impl Question {
    /// True if an answer is due.
    pub(super) fn is_asked(&self) -> bool {
        self.asked.is_some()
    }

    /// Notes what the device process is told.
    pub(super) fn ask(&mut self, command: &Command) {
        if let Command::Count { number } | Command::Ping { number } = command {
            let since = self.asked.map_or_else(Instant::now, |(_, since)| since);
            self.asked = Some((*number, since));
        }
    }

    /// Notes what the device process says: an answer to an earlier question shows that it goes on.
    pub(super) fn handle(&mut self, report: &Report) {
        if let (Report::Counted { number }, Some((last, _))) = (report, self.asked) {
            self.asked = (*number != last).then(|| (last, Instant::now()));
            self.is_late = false;
        }
    }

    /// Returns when an answer has been waited for half as long as it may take.
    pub(super) async fn max_wait(&self) {
        if let Some((_, since)) = self.asked {
            sleep_until(since + TIMEOUT / 2).await;
        }
    }

    /// True after both halves. If both processes were frozen together, the supervisor may go on
    /// first: the device process has the second half to answer.
    pub(super) fn is_over(&mut self) -> bool {
        self.asked = self.asked.map(|(number, _)| (number, Instant::now()));
        std::mem::replace(&mut self.is_late, true)
    }
}

/// The number of messages that one of this many bytes counts as.
pub(super) fn weight(size: usize) -> usize {
    1 + size / LONG
}

/// When the sessions of a device last had credit.
#[derive(Debug, Default)]
pub(super) struct Granted(Option<Instant>);

impl Granted {
    /// True if a session of the device that begins now has credit.
    pub(super) fn is_due(&mut self) -> bool {
        let is_due = self.0.is_none_or(|at| at.elapsed() >= CREDIT_INTERVAL);
        if is_due {
            self.0 = Some(Instant::now());
        }
        is_due
    }
}

/// The messages of a device process in the present window.
#[derive(Debug)]
pub(super) struct Messages {
    began: Instant,
    count: usize,
    /// Messages of sessions that begin, beside the window's.
    credit: usize,
}

impl Messages {
    pub(super) fn new() -> Self {
        Self { began: Instant::now(), count: 0, credit: 0 }
    }

    /// A session begins: it has this many messages to say.
    pub(super) fn grant(&mut self, messages: usize) {
        self.credit = (self.credit + messages).min(CREDIT_MAX);
    }

    /// Counts a message of this many bytes; returns when the next one may be read, and others of
    /// this thread have had their turn.
    pub(super) async fn count(&mut self, size: usize) {
        tokio::task::yield_now().await;
        let weight = weight(size);
        if self.credit >= weight {
            self.credit -= weight;
            return;
        }
        if self.began.elapsed() > WINDOW {
            (self.began, self.count) = (Instant::now(), 0);
        }
        self.count += weight;
        if self.count > MESSAGES_MAX {
            sleep_until(self.began + WINDOW).await;
        }
    }
}
