//! `Parking`: a device process stops for the next supervisor. Its queues stop, requests in flight
//! end, and its front-ends stay connected; then it says so. The supervisor need not wait for the
//! end of its process.

use super::DeviceProcess;
use crate::processes::message::Told;
use crate::processes::state::State;
use rustix::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::timeout;

/// How long a device process may take to park. One that takes longer is killed, and its end is
/// waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// How far the parking of one device process is.
#[derive(Debug)]
pub(super) struct Parking {
    /// The device process was told to.
    is_asked: AtomicBool,
    is_done: watch::Sender<bool>,
    /// It was logged how the parking went.
    is_told: AtomicBool,
    /// The device process ends because another supervisor or domain gets what it has, and not for a
    /// fault.
    makes_way: AtomicBool,
    /// The process, once the kernel has not ended it in time.
    held: OnceLock<OwnedFd>,
}

impl Parking {
    pub(super) fn new() -> Self {
        let [is_asked, is_told, makes_way] = std::array::from_fn(|_| AtomicBool::new(false));
        let (is_done, held) = (watch::Sender::new(false), OnceLock::new());
        Self { is_asked, is_done, is_told, makes_way, held }
    }

    /// Notes the process that the kernel does not end, as a pidfd.
    pub(super) fn hold(&self, process: OwnedFd) {
        let _ = self.held.set(process);
    }

    /// True if the device process has parked: it has nothing more to say.
    pub(super) fn is_done(&self) -> bool {
        *self.is_done.borrow()
    }

    /// Notes that the device process says that it has parked.
    ///
    /// # Errors
    /// Nobody has asked it to.
    pub(super) fn hear(&self) -> Result<(), String> {
        if !self.is_asked.load(Ordering::Relaxed) {
            return Err("nobody has asked it to park".to_owned());
        }
        self.is_done.send_replace(true);
        Ok(())
    }

    async fn done(&self) {
        let _ = self.is_done.subscribe().wait_for(|is_done| *is_done).await;
    }
}

impl DeviceProcess {
    /// Has the process killed, because another supervisor or domain gets what it has; returns when
    /// it is gone.
    pub(in crate::processes) async fn make_way(&self, reason: &str) {
        self.leave(reason);
        self.ended().await;
    }

    /// Has the process killed, as [`Self::make_way`] does, and does not wait for its end.
    pub(in crate::processes) fn leave(&self, reason: &str) {
        self.parking().makes_way.store(true, Ordering::Relaxed);
        self.end(reason);
    }

    /// True if it has ended for no fault.
    pub(in crate::processes) fn made_way(&self) -> bool {
        self.parking().makes_way.load(Ordering::Relaxed)
    }

    /// Has the device process park, for another supervisor that gets what it has, and then has the
    /// process killed. Returns when the device process has parked. If it does not within
    /// [`PATIENCE`], returns when its process is gone, or with a pidfd of it if the kernel does not
    /// end it: the other supervisor waits for its end before it gives anybody what the device
    /// process has.
    ///
    /// A device process that a guest has taken may say that it has parked, and go on with what it
    /// has. That harms its own domain alone: the supervisor still waits until the descriptions of
    /// the images are closed, before anybody else gets them.
    pub(in crate::processes) async fn park(&self, reason: &str) -> Option<OwnedFd> {
        if self.state() == State::Ended {
            return None;
        }
        let parking = self.parking();
        let is_told = parking.is_asked.swap(true, Ordering::Relaxed)
            || self.tell(Told::Park {}, Vec::new()).is_ok();
        let is_done = is_told
            && tokio::select! {
                done = timeout(PATIENCE, parking.done()) => done.is_ok(),
                () = self.ended() => false,
            };
        let (process, pid) = (self.name(), self.pid());
        match (is_done, parking.is_told.swap(true, Ordering::Relaxed)) {
            (_, true) => {}
            (true, false) => tracing::info!(process, pid, "the device process has parked"),
            (false, false) => {
                tracing::warn!(process, pid, "the device process does not park: it is killed")
            }
        }
        self.leave(reason);
        if is_done {
            return None;
        }
        self.ended_or_held().await;
        let held = parking.held.get().filter(|_| self.state() == State::Held)?;
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
