//! `Question`: what a device process was asked and has not answered; `Messages`: how many reports
//! it sends.

use crate::times::{CREDIT_INTERVAL, PROCESS_ANSWER, REPORTS_WINDOW};
use manyring_protocol::message::{Command, Report};
use tokio::time::{Instant, sleep_until};

/// Most reports of a device process in a [`REPORTS_WINDOW`], beside those at the beginning of its
/// sessions. After that many, the supervisor reads the next one when the window is over. Nearly all
/// reports are short: a long one counts as several.
const MESSAGES_MAX: usize = 1024;
/// Most reports of beginning sessions that may be unread, and are read at once: a second of the
/// supervisor's time, in turns with other work. A compromised device process may have saved them
/// up.
const CREDIT_MAX: usize = 1 << 16;
/// Bytes after which a report counts as one more.
const LONG: usize = 1024;

/// The questions that a device process has not answered yet.
#[derive(Debug, Default)]
pub(super) struct Question {
    /// The number of the last question, and since when no answer has come.
    asked: Option<(u64, Instant)>,
    /// Half of the time for an answer has passed.
    is_late: bool,
}

impl Question {
    /// True if an answer is due.
    pub(super) fn is_asked(&self) -> bool {
        self.asked.is_some()
    }

    /// Notes a command to the device process.
    pub(super) fn ask(&mut self, command: &Command) {
        if let Command::Count { number } | Command::Ping { number } = command {
            let since = self.asked.map_or_else(Instant::now, |(_, since)| since);
            self.asked = Some((*number, since));
        }
    }

    /// Notes a report: an answer to an earlier question shows that the process is responsive.
    pub(super) fn handle(&mut self, report: &Report) {
        if let (Report::Counted { number }, Some((last, _))) = (report, self.asked) {
            self.asked = (*number != last).then(|| (last, Instant::now()));
            self.is_late = false;
        }
    }

    /// Returns when half of the time for an answer has passed.
    pub(super) async fn max_wait(&self) {
        if let Some((_, since)) = self.asked {
            sleep_until(since + PROCESS_ANSWER / 2).await;
        }
    }

    /// True after both halves. If both processes were frozen together, the supervisor may be the
    /// first to go on: then the device process has the second half to answer.
    pub(super) fn is_over(&mut self) -> bool {
        self.asked = self.asked.map(|(number, _)| (number, Instant::now()));
        std::mem::replace(&mut self.is_late, true)
    }
}

/// How many reports one of this size in bytes counts as.
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

/// The reports of a device process in the present window.
#[derive(Debug)]
pub(super) struct Messages {
    began: Instant,
    count: usize,
    /// Reports of beginning sessions, beside those of the window.
    credit: usize,
}

impl Messages {
    pub(super) fn new() -> Self {
        Self { began: Instant::now(), count: 0, credit: 0 }
    }

    /// A session begins, with this many reports.
    pub(super) fn grant(&mut self, messages: usize) {
        self.credit = (self.credit + messages).min(CREDIT_MAX);
    }

    /// Counts a report of this size in bytes. Returns when the next one may be read, and other
    /// tasks of this thread have run.
    pub(super) async fn count(&mut self, size: usize) {
        tokio::task::yield_now().await;
        let weight = weight(size);
        if self.credit >= weight {
            self.credit -= weight;
            return;
        }
        if self.began.elapsed() > REPORTS_WINDOW {
            (self.began, self.count) = (Instant::now(), 0);
        }
        self.count += weight;
        if self.count > MESSAGES_MAX {
            sleep_until(self.began + REPORTS_WINDOW).await;
        }
    }
}
