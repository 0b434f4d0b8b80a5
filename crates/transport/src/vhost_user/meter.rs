//! `Meter`: measures the CPU time of a device's messages, and delays the next message of its
//! front-ends while they have used more than their share (`pace.rs`).
//!
//! ```text
//! paid? -> a piece of a message is read -> .. -> handled -> answered -> paid? -> the next message
//!            \-- each step is charged the CPU time that it took ------/
//! ```
//! A front-end can make each step expensive: reading a byte, or sending a reply, walks all waiters
//! that the front-end has put on its own end of the socket, and these may be millions.

use super::pace::Pace;
use super::socket_error::SocketError;
use manyring_engine::Janitor;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Measures the CPU time of a device's messages, over all of its sessions.
#[derive(Debug)]
pub(super) struct Meter {
    /// The name of the device.
    device: String,
    /// Returns the CPU time that the calling thread has used.
    cpu_time: fn() -> Duration,
    /// The janitor, whose jobs for this device are charged too.
    janitor: Arc<Janitor>,
    pace: Mutex<Pace>,
}

impl Meter {
    pub(super) fn new(device: &str, cpu_time: fn() -> Duration, janitor: Arc<Janitor>) -> Self {
        let pace = Mutex::new(Pace::new(Instant::now()));
        Self { device: device.to_owned(), cpu_time, janitor, pace }
    }

    fn with_pace<T>(&self, what: impl FnOnce(&mut Pace) -> T) -> T {
        what(&mut self.pace.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns when the next piece of a message may be read, or the next client accepted.
    pub(super) async fn paid(&self) {
        let jobs = self.janitor.take_cost();
        self.with_pace(|pace| pace.charge(jobs, Instant::now()));
        loop {
            let due = self.with_pace(|pace| pace.due());
            if due <= Instant::now() {
                return;
            }
            if let Some(why) = self.with_pace(Pace::note_wait) {
                tracing::warn!(device = self.device, "front-end throttled: {why}");
            }
            tokio::time::sleep_until(due).await;
        }
    }

    /// Counts a message that was read.
    pub(super) fn count_message(&self) {
        self.with_pace(|pace| pace.count_message(Instant::now()));
    }

    /// Counts a client that has connected.
    pub(super) fn count_client(&self) {
        self.with_pace(|pace| pace.count_client(Instant::now()));
    }

    /// Begins a message: CPU time that is charged from now on belongs to it.
    pub(super) fn begin_message(&self) {
        self.with_pace(Pace::begin_message);
    }

    /// Runs `step`, and charges its CPU time to the current message.
    pub(super) fn measure<T>(&self, step: impl FnOnce() -> T) -> T {
        let (result, took) = self.timed(step);
        self.with_pace(|pace| pace.charge_message(took, Instant::now()));
        result
    }

    /// Runs `work` to its end, and charges its CPU time to the current message.
    pub(super) async fn of<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        std::future::poll_fn(|context| self.measure(|| work.as_mut().poll(context))).await
    }

    /// Runs `work`, which belongs to no message, to its end, and charges its CPU time to the
    /// device.
    pub(super) async fn charged<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        std::future::poll_fn(|context| {
            let (polled, took) = self.timed(|| work.as_mut().poll(context));
            self.with_pace(|pace| pace.charge(took, Instant::now()));
            polled
        })
        .await
    }

    fn timed<T>(&self, step: impl FnOnce() -> T) -> (T, Duration) {
        let before = (self.cpu_time)();
        let result = step();
        (result, (self.cpu_time)().saturating_sub(before))
    }

    /// # Errors
    /// [`SocketError::Costly`]: this message and one before took far too long. The session must
    /// end.
    pub(super) fn check(&self) -> Result<(), SocketError> {
        match self.with_pace(|pace| pace.is_over()) {
            true => Err(SocketError::Costly),
            false => Ok(()),
        }
    }
}
