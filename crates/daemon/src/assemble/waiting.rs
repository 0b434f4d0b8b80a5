//! Devices that another process holds up: tried again until they can be had.
//!
//! A process that was killed keeps its sockets, images and interfaces until the last of its threads
//! has ended, and a thread can hang in a call of the kernel for as long as a front-end, or a disk,
//! likes. So what it holds costs the devices that need it, and no others:
//!
//! ```text
//! start:  open each device, on a thread of its own:
//!             opened                           it is served
//!             held by another process          it waits
//!             no answer from the host yet      it waits
//!             an image that cannot be opened   it waits, unless no other device is left
//!             any other error                  the start is refused
//! later:  open it again, with growing pauses; listen when its socket's name is free
//! ```
//! After the start every error is waited out: the process has other guests by then.

use super::wanted::{Made, Opened, Wanted};
use super::{AssembleError, Shared};
use crate::control::Waiting;
use manyring_engine::aside;
use manyring_transport::vhost_user::{Endpoint, check_path};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// How long the start waits for the host to open one device.
const OPEN_PATIENCE: Duration = Duration::from_secs(1);
/// How long it waits for all devices together that are opened slowly.
const OPEN_PATIENCE_ALL: Duration = Duration::from_secs(5);
/// A little time for each device behind that.
const OPEN_PATIENCE_MIN: Duration = Duration::from_millis(20);
/// How long the start waits for other processes in all. One that has just been killed lets go of
/// what it held within milliseconds: then nobody need see that a device waited.
const HELD_PATIENCE: Duration = Duration::from_millis(500);
/// Shortest and longest pause between two tries.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// A try to open a device, on a thread of its own. `None` inside: the call has panicked.
pub(super) type Try = JoinHandle<Option<Result<Opened, AssembleError>>>;

fn open(wanted: &Wanted, io_uring: bool) -> Try {
    let wanted = wanted.clone();
    tokio::spawn(aside(move || wanted.open(io_uring)))
}

/// What became of a device's first try.
#[derive(Debug)]
pub(super) enum First {
    Opened(Opened),
    /// Another process holds it.
    Held(AssembleError),
    /// Its image cannot be opened.
    Failed(AssembleError),
    /// The host has not answered yet.
    Slow(Try),
}

/// What is left to do for a device after its first try.
#[derive(Debug)]
pub(super) enum Later {
    Opened(Opened),
    Held,
    Slow(Try),
}

/// How long the first tries may take.
#[derive(Debug)]
pub(super) struct Patience {
    /// Nothing is waited for: an answer is awaited as long as it takes, and then it is final.
    refuses: bool,
    /// For the host to open what is opened slowly.
    left: Duration,
    /// For other processes to let go.
    held_left: Duration,
}

impl Patience {
    /// `wait`: the seconds that the operator allows for what another process holds.
    pub(super) fn new(wait: Option<u32>) -> Self {
        let refuses = wait == Some(0);
        let held_left = if refuses { Duration::ZERO } else { HELD_PATIENCE };
        Self { refuses, left: OPEN_PATIENCE_ALL, held_left }
    }

    /// Opens a device for the first time.
    ///
    /// # Errors
    /// The device cannot be served, whatever other processes do; or nothing is waited for.
    pub(super) async fn open(
        &mut self,
        wanted: &Wanted,
        io_uring: bool,
    ) -> Result<First, AssembleError> {
        loop {
            match self.try_open(wanted, io_uring).await? {
                First::Held(_) if !self.held_left.is_zero() => {
                    tokio::time::sleep(PAUSE.0).await;
                    self.held_left = self.held_left.saturating_sub(PAUSE.0);
                }
                first => return Ok(first),
            }
        }
    }

    async fn try_open(&mut self, wanted: &Wanted, io_uring: bool) -> Result<First, AssembleError> {
        let mut attempt = open(wanted, io_uring);
        let began = Instant::now();
        let limit = match self.refuses {
            true => Duration::MAX,
            false => OPEN_PATIENCE.min(self.left).max(OPEN_PATIENCE_MIN),
        };
        let answer = tokio::time::timeout(limit, &mut attempt).await;
        let Ok(answer) = answer else {
            self.left = self.left.saturating_sub(began.elapsed());
            return Ok(First::Slow(attempt));
        };
        match answer.ok().flatten() {
            Some(Ok(opened)) => Ok(First::Opened(opened)),
            Some(Err(error)) if error.is_held() && !self.refuses => Ok(First::Held(error)),
            Some(Err(error)) if error.is_of_image() && !error.is_held() => Ok(First::Failed(error)),
            Some(Err(error)) => Err(error),
            None => Err(failed(wanted)),
        }
    }

    /// # Errors
    /// The reason of the first device, if no image could be opened and there is nothing else.
    pub(super) fn refuse_if_all_failed<W, S>(
        &self,
        tried: &mut Vec<(W, S, First)>,
    ) -> Result<(), AssembleError> {
        let all = tried.iter().all(|(_, _, first)| matches!(first, First::Failed(_)));
        match tried.first() {
            Some(_) if all => match tried.swap_remove(0) {
                (_, _, First::Failed(error)) => Err(error),
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }
}

fn failed(wanted: &Wanted) -> AssembleError {
    AssembleError::Failed { at: wanted.plan().place.at(wanted.key()) }
}

/// A device that waits: says so, once for each reason.
#[derive(Debug)]
pub(super) struct Wait {
    shared: Arc<Shared>,
    wanted: Wanted,
    since: Instant,
    reason: Option<String>,
}

impl Wait {
    pub(super) fn new(shared: Arc<Shared>, wanted: Wanted) -> Self {
        Self { shared, wanted, since: Instant::now(), reason: None }
    }

    /// Takes over what the first try has left to do, and says why the device is not served.
    pub(super) fn begin(&mut self, first: First) -> Later {
        match first {
            First::Opened(opened) => Later::Opened(opened),
            First::Held(error) | First::Failed(error) => {
                self.note(&error);
                Later::Held
            }
            First::Slow(attempt) => {
                let at = self.wanted.plan().place.at(self.wanted.key());
                self.note(&AssembleError::Slow { at });
                Later::Slow(attempt)
            }
        }
    }

    /// Notes why the device is not served.
    pub(super) fn note(&mut self, error: &AssembleError) {
        let (name, reason) = (&self.wanted.plan().name, error.to_string());
        if self.reason.as_ref() == Some(&reason) {
            return;
        }
        if error.is_held() || matches!(error, AssembleError::Slow { .. }) {
            tracing::warn!(device = name, reason, "the device waits, and is tried again");
        } else {
            tracing::error!(device = name, reason, "the device is not served, and is tried again");
        }
        self.reason = Some(reason.clone());
        self.shared.devices.wait(Waiting {
            name: name.clone(),
            kind: self.wanted.kind(),
            socket: self.wanted.socket(),
            key: error.key().unwrap_or(self.wanted.key()),
            reason,
        });
    }

    /// Pauses before the next try: an eighth of the time that the device has waited.
    pub(super) async fn pause(&self) {
        let (shortest, longest) = PAUSE;
        tokio::time::sleep((self.since.elapsed() / 8).clamp(shortest, longest)).await;
    }

    /// Shows the device, which has all that it needs.
    pub(super) fn end(&mut self, made: &Made) {
        self.shared.devices.add(made.part.clone());
        if self.reason.take().is_some() {
            let seconds = self.since.elapsed().as_secs_f64();
            let device = &self.wanted.plan().name;
            tracing::info!(device, seconds, "the device need not wait any more");
        }
    }

    /// Returns when the name of the device's socket is free. (Another process can still be faster.)
    pub(super) async fn listens(&mut self, endpoint: &Endpoint, at: &str) {
        let Endpoint::Listen { path, .. } = endpoint else { return };
        loop {
            self.pause().await;
            let path = path.clone();
            match aside(move || check_path(&path)).await {
                Some(Ok(())) => return,
                Some(Err(source)) => {
                    self.note(&AssembleError::Socket { at: at.to_owned(), source });
                }
                None => {}
            }
        }
    }

    /// Returns when the device is opened.
    pub(super) async fn opened(&mut self, later: Later) -> Opened {
        let mut attempt = match later {
            Later::Opened(opened) => return opened,
            Later::Held => {
                self.pause().await;
                None
            }
            Later::Slow(attempt) => Some(attempt),
        };
        loop {
            let io_uring = self.shared.io_uring;
            let attempt = attempt.take().unwrap_or_else(|| open(&self.wanted, io_uring));
            let mut opened = attempt.await.ok().flatten();
            if let Some(Ok(bare)) = opened {
                let wanted = self.wanted.clone();
                opened = aside(move || wanted.decorated(bare)).await;
            }
            match opened {
                Some(Ok(opened)) => return opened,
                Some(Err(error)) => self.note(&error),
                None => self.note(&failed(&self.wanted)),
            }
            self.pause().await;
        }
    }
}
