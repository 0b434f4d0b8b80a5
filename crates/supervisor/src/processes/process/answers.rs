//! Questions to a device process: requests for counters, and pings. The process answers each with
//! its number (`Report::Counted`).

use super::DeviceProcess;
use manyring_protocol::message::Command;
use std::sync::atomic::Ordering;

impl DeviceProcess {
    /// Asks for counters; returns the number of the question. While an earlier question for
    /// counters is unanswered, returns the number of that one and sends nothing: otherwise clients
    /// of the API could fill the queue of commands. `None`: the process accepts no command.
    pub(in crate::processes) fn ask(&self) -> Option<u64> {
        let counts = self.counts.load(Ordering::Relaxed);
        if *self.answered.borrow() < counts && self.serves() {
            return Some(counts);
        }
        let number = self.question(|number| Command::Count { number })?;
        self.counts.store(number, Ordering::Relaxed);
        Some(number)
    }

    /// Sends a ping, unless a question is unanswered already. A ping asks for no counters, since a
    /// process with many devices takes long to write them.
    pub(super) fn ping(&self) {
        if *self.answered.borrow() >= self.asked.load(Ordering::Relaxed) {
            let _ = self.question(|number| Command::Ping { number });
        }
    }

    /// Sends a question under the next number, and returns the number.
    fn question(&self, command: impl FnOnce(u64) -> Command) -> Option<u64> {
        let asked = self.asked.load(Ordering::Relaxed);
        let number = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        let command = self.tell(command(number), Vec::new());
        if command.is_err() {
            self.asked.store(asked, Ordering::Relaxed);
        }
        command.ok().map(|()| number)
    }

    /// Returns when the process has answered question `number` or a later one.
    pub(in crate::processes) async fn answered(&self, number: u64) {
        let _ = self.answered.subscribe().wait_for(|answered| *answered >= number).await;
    }

    /// False if the process has not answered the last request for counters in time.
    pub(in crate::processes) fn answers(&self) -> bool {
        self.answers.load(Ordering::Relaxed)
    }

    /// Stores whether the process has answered in time; logs when a process becomes unresponsive.
    pub(in crate::processes) fn note_answer(&self, answers: bool) {
        if self.answers.swap(answers, Ordering::Relaxed) && !answers {
            let (process, pid) = (&self.name, self.pid());
            tracing::warn!(process, pid, "the device process is unresponsive");
        }
    }
}
