//! `Quiescing`: a device process stops for the next supervisor. Its queues stop, requests in flight
//! complete, and its front-ends stay connected; then it sends `Report::Quiesced`. After that report
//! the supervisor need not wait for the end of the process.

use super::DeviceProcess;
use crate::processes::process_state::State;
use manyring_protocol::message::Command;
use manyring_serve::times::QUIESCE;
use rustix::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::watch;
use tokio::time::timeout;

/// How far one device process has quiesced, and why it ends.
#[derive(Debug)]
pub(super) struct Quiescing {
    /// True once the command `Quiesce` was sent.
    is_asked: AtomicBool,
    is_done: watch::Sender<bool>,
    /// True once the outcome was logged.
    is_told: AtomicBool,
    /// True if the process ends without a fault: another supervisor or domain gets its devices.
    yields: AtomicBool,
    /// A pidfd of the process. Set if the kernel has not ended the killed process in time.
    held: OnceLock<OwnedFd>,
}

impl Quiescing {
    pub(super) fn new() -> Self {
        let [is_asked, is_told, yields] = std::array::from_fn(|_| AtomicBool::new(false));
        let (is_done, held) = (watch::Sender::new(false), OnceLock::new());
        Self { is_asked, is_done, is_told, yields, held }
    }

    /// Stores a pidfd of the process, which was killed and which the kernel has not ended in time.
    pub(super) fn hold(&self, process: OwnedFd) {
        let _ = self.held.set(process);
    }

    /// True if the process has quiesced: it sends no further report.
    pub(super) fn is_done(&self) -> bool {
        *self.is_done.borrow()
    }

    /// Handles the report that the process has quiesced.
    ///
    /// # Errors
    /// The supervisor has not sent the command `Quiesce`.
    pub(super) fn complete(&self) -> Result<(), String> {
        if !self.is_asked.load(Ordering::Relaxed) {
            return Err("it quiesced without a request".to_owned());
        }
        self.is_done.send_replace(true);
        Ok(())
    }

    async fn done(&self) {
        let _ = self.is_done.subscribe().wait_for(|is_done| *is_done).await;
    }
}

impl DeviceProcess {
    /// Kills the process, because another supervisor or domain gets its devices; returns when it
    /// has ended.
    pub(in crate::processes) async fn end_yielding(&self, reason: &str) {
        self.leave(reason);
        self.ended().await;
    }

    /// Kills the process, as [`Self::end_yielding`] does, and does not wait for its end.
    pub(in crate::processes) fn leave(&self, reason: &str) {
        self.quiescing().yields.store(true, Ordering::Relaxed);
        self.end(reason);
    }

    /// True if the process ended because another supervisor or domain gets its devices, not for a
    /// fault.
    pub(in crate::processes) fn has_yielded(&self) -> bool {
        self.quiescing().yields.load(Ordering::Relaxed)
    }

    /// Quiesces the process for another supervisor that gets its devices, and then kills it.
    /// Returns when the process has quiesced. If it does not within [`QUIESCE`], returns when it
    /// has ended, or with a pidfd if the kernel does not end it: the other supervisor waits for
    /// that pidfd before it gives the devices to a process.
    ///
    /// A compromised process may report that it has quiesced, and go on using its devices. That
    /// harms its own domain alone: before another process gets an image, the supervisor waits until
    /// all open file descriptions of the image that it had handed out are closed.
    pub(in crate::processes) async fn quiesce(&self, reason: &str) -> Option<OwnedFd> {
        if self.state() == State::Ended {
            return None;
        }
        let quiescing = self.quiescing();
        // Each front of the process calls this: only the first one sends the command, and logs the
        // outcome.
        let is_told = quiescing.is_asked.swap(true, Ordering::Relaxed)
            || self.tell(Command::Quiesce {}, Vec::new()).is_ok();
        let is_done = is_told
            && tokio::select! {
                done = timeout(QUIESCE, quiescing.done()) => done.is_ok(),
                () = self.ended() => false,
            };
        let (process, pid) = (self.name(), self.pid());
        match (is_done, quiescing.is_told.swap(true, Ordering::Relaxed)) {
            (_, true) => {}
            (true, false) => tracing::info!(process, pid, "device process quiesced"),
            (false, false) => {
                tracing::warn!(
                    process,
                    pid,
                    "the device process did not quiesce in time; killing it"
                )
            }
        }
        self.leave(reason);
        if is_done {
            return None;
        }
        self.ended_or_stuck().await;
        let held = quiescing.held.get().filter(|_| self.state() == State::Stuck)?;
        match held.try_clone() {
            Ok(held) => {
                self.closes_asks();
                Some(held)
            }
            Err(_) => {
                self.ended().await;
                None
            }
        }
    }
}
