//! Questions to a device process, and its answers to them.

use super::DeviceProcess;
use manyring_protocol::message::Command;
use std::sync::atomic::Ordering;

impl DeviceProcess {
    /// Asks for counters; returns the number of the question. While a question is open no further
    /// one is asked: otherwise readers of the API could fill the queue of commands.
    pub(in crate::processes) fn ask(&self) -> Option<u64> {
        let counts = self.counts.load(Ordering::Relaxed);
        if *self.answered.borrow() < counts && self.serves() {
            return Some(counts);
        }
        let number = self.question(|number| Command::Count { number })?;
        self.counts.store(number, Ordering::Relaxed);
        Some(number)
    }

    /// Asks for an answer without counters, unless a question is open: a process with many devices
    /// takes long to write its counters.
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

    pub(in crate::processes) async fn answered(&self, number: u64) {
        let _ = self.answered.subscribe().wait_for(|answered| *answered >= number).await;
    }

    pub(in crate::processes) fn answers(&self) -> bool {
        self.answers.load(Ordering::Relaxed)
    }

    /// Notes whether it has answered in time, and logs a change once.
    pub(in crate::processes) fn note_answer(&self, answers: bool) {
        if self.answers.swap(answers, Ordering::Relaxed) && !answers {
            let (process, pid) = (&self.name, self.pid());
            tracing::warn!(process, pid, "the device process is unresponsive");
        }
    }
}
