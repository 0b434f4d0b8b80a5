//! `Question`: what a device process was asked and has not answered. After `PROCESS_ANSWER` the
//! process is killed; after `PROCESS_COUNTERS_WAIT` it is shown as unresponsive (`mod.rs`).

use manyring_protocol::message::{Command, Report};
use manyring_serve::times::PROCESS_ANSWER;
use tokio::time::{Instant, sleep_until};

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
