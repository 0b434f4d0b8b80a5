//! `ConnectTrial`: injects failures of the host into the reconnector, and counts its jobs, for
//! tests.

use super::{Job, Reconnector, State};
use rustix::io::Errno;
use std::collections::VecDeque;

#[derive(Debug, Default)]
pub(super) struct ConnectTrial {
    /// For each of the next threads and socket pairs for sharing, true if the host refuses it.
    refusals: VecDeque<bool>,
    /// The number of jobs that the thread has done, without ticks.
    jobs: u64,
}

impl Reconnector {
    /// Says which of the next threads and pairs of sockets for sharing the host refuses.
    pub(crate) fn refuse(&self, refusals: impl IntoIterator<Item = bool>) {
        self.lock().trial.refusals = refusals.into_iter().collect();
    }

    /// Returns the number of jobs that the thread has done, without ticks.
    pub(crate) fn jobs(&self) -> u64 {
        self.lock().trial.jobs
    }

    pub(super) fn count(&self, job: &Job) {
        self.lock().trial.jobs += u64::from(!matches!(job, Job::Tick));
    }
}

impl State {
    /// The error of a host that has no descriptor, if the test wants it now.
    pub(super) fn ask_the_host(&mut self) -> Result<(), Errno> {
        let is_refused = self.trial.refusals.pop_front().unwrap_or(false);
        if is_refused { Err(Errno::MFILE) } else { Ok(()) }
    }
}
