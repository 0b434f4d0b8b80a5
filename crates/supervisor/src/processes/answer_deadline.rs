//! `AnswerDeadline`: the deadline for a device process's answer to a ping or a request for
//! counters. After `PROCESS_ANSWER` the supervisor kills the process; after `PROCESS_COUNTERS_WAIT`
//! it shows the process as unresponsive (`mod.rs`).

use manyring_protocol::message::{Command, Report};
use manyring_serve::times::PROCESS_ANSWER;
use tokio::time::{Instant, sleep_until};

/// The deadline for the pings and requests for counters (questions) that a device process has not
/// answered yet.
#[derive(Debug, Default)]
pub(super) struct AnswerDeadline {
    /// The number of the last question, and when the process last answered or was first asked.
    asked: Option<(u64, Instant)>,
    /// True once half of `PROCESS_ANSWER` has passed without an answer.
    is_late: bool,
}

impl AnswerDeadline {
    /// True if an answer is due.
    pub(super) fn is_asked(&self) -> bool {
        self.asked.is_some()
    }

    /// Starts the deadline, if the command is a question and none is unanswered.
    pub(super) fn ask(&mut self, command: &Command) {
        if let Command::Count { number } | Command::Ping { number } = command {
            let since = self.asked.map_or_else(Instant::now, |(_, since)| since);
            self.asked = Some((*number, since));
        }
    }

    /// Ends the deadline, if the report answers the last question. The answer to an earlier
    /// question shows that the process is responsive, and starts the deadline again.
    pub(super) fn handle(&mut self, report: &Report) {
        if let (Report::Counted { number }, Some((last, _))) = (report, self.asked) {
            self.asked = (*number != last).then(|| (last, Instant::now()));
            self.is_late = false;
        }
    }

    /// Returns when half of `PROCESS_ANSWER` has passed; at once if no answer is due.
    pub(super) async fn max_wait(&self) {
        if let Some((_, since)) = self.asked {
            sleep_until(since + PROCESS_ANSWER / 2).await;
        }
    }

    /// Called after each half; returns true after the second one. If both processes were frozen
    /// together, the supervisor may run again first: then the device process has the second half to
    /// answer.
    pub(super) fn is_over(&mut self) -> bool {
        self.asked = self.asked.map(|(number, _)| (number, Instant::now()));
        std::mem::replace(&mut self.is_late, true)
    }
}
