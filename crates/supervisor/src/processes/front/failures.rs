//! The log lines about front-ends that are not served, while an attempt fails again and again.

use super::Front;
use manyring_engine::FailureLines;
use rustix::io::Errno;

/// Decides for each kind of failure which log lines are due.
#[derive(Debug, Default)]
pub(super) struct Failures {
    starts: FailureLines,
    journals: FailureLines,
}

impl Front<'_> {
    /// Logs why the device process `process` did not get the device, if a line is due.
    pub(super) fn log_failed_start(&mut self, process: &str, error: &str) {
        let device = self.wanted.plan().name.as_str();
        if let Some(failures) = self.failures.starts.count() {
            let problem = "starting the device in its device process failed";
            tracing::error!(device, process, failures, error, "{problem}");
        }
    }

    /// Logs that a client has no journal, if a line is due.
    pub(super) fn log_refused_client(&mut self, error: Errno) {
        let device = self.wanted.plan().name.as_str();
        if let Some(failures) = self.failures.journals.count() {
            let problem = "client refused: creating its journal failed";
            tracing::warn!(device, failures, %error, "{problem}");
        }
    }
}
