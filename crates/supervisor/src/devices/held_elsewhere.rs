//! Devices that cannot be opened because another process holds a resource: they are retried.
//!
//! A process that was killed keeps its sockets, images and interfaces until the last of its threads
//! has ended, and a system call can block a thread as long as a front-end or a disk does not
//! respond. Only the devices that need such a resource wait for it:
//!
//! ```text
//! start:  open each device, on one thread as long as the host answers:
//!             opened                           it is served
//!             held by another process          it waits
//!             no answer from the host yet      it waits
//!             any other error                  it waits, unless no other device is left
//! later:  open it again, with growing pauses; listen when its socket's name is free
//! ```
//! With `wait = 0` every error refuses the start, except the error of an image that cannot be
//! opened: then only its own device is not served. A process whose single device stands on the
//! command line ends with the error of that device. After the start every error is retried,
//! because the process serves other guests by then.

use super::Shared;
use crate::model::Waiting;
use manyring_config::plan::Wanted;
use manyring_engine::{AsideRow, aside_for};
use manyring_serve::assemble::{Assemble, AssembleError, Host, Made, Opened, Served, served};
use manyring_serve::service::Whose;
use manyring_serve::times::{
    DEVICE_BACKOFF, DEVICE_HELD, DEVICE_OPEN, DEVICE_OPEN_MIN, DEVICES_OPEN,
};
use manyring_transport::vhost_user::{Endpoint, ListenError, check_path};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// A task that tries to open a device on another thread. `None`: the call has panicked.
pub(super) type Try = JoinHandle<Option<Result<Opened, AssembleError>>>;

/// Tries to open a device on another thread, which holds the permit `call` until the host's calls
/// have returned.
pub(super) fn open(wanted: &Wanted, host: &Host, call: Option<OwnedSemaphorePermit>) -> Try {
    let (wanted, host) = (wanted.clone(), host.clone());
    tokio::spawn(async move {
        let name = wanted.plan().name.clone();
        let open = move || {
            let _call = call;
            wanted.open(&host)
        };
        aside_for(&name, open).await
    })
}

/// The result of a device's first try.
#[derive(Debug)]
pub(super) enum First {
    Opened(Opened),
    /// Another process holds a resource of the device.
    Held(AssembleError),
    /// The device cannot be opened for another reason.
    Failed(AssembleError),
    /// The host has not answered yet.
    Slow(Try),
}

/// A device of the plan after the first try to open it.
#[derive(Debug)]
pub(super) struct Tried {
    pub(super) wanted: Wanted,
    /// The device's endpoint and options. `None`: not known before the device is opened.
    pub(super) served: Option<Served>,
    pub(super) first: First,
}

/// The first try of a device at the start: two calls, one of which checks that the path of the
/// socket is free, and one opens the device. One thread makes the calls of all devices, one after
/// another.
#[derive(Debug)]
pub(super) struct Asked {
    wanted: Wanted,
    served: Result<Option<Served>, AssembleError>,
    is_free: oneshot::Receiver<Result<(), AssembleError>>,
    opened: oneshot::Receiver<Result<Opened, AssembleError>>,
}

impl Asked {
    pub(super) fn new(wanted: Wanted, shared: &Arc<Shared>, row: &AsideRow) -> Self {
        let ((tells, is_free), (opens, opened)) = (oneshot::channel(), oneshot::channel());
        let served = match served(wanted.plan()) {
            // Opening the device looks up the folder of its socket.
            Err(AssembleError::Unfound { .. }) => Ok(None),
            served => served.map(Some),
        };
        if served.is_ok() {
            let (shared, wanted) = (shared.clone(), wanted.clone());
            row.add(&wanted.plan().name.clone(), move || {
                let looked = shared.socket_is_free(wanted.plan());
                let is_free = looked.is_ok();
                if tells.send(looked).is_ok() && is_free {
                    let _ = opens.send(wanted.open(&shared.host));
                }
            });
        }
        Self { wanted, served, is_free, opened }
    }

    pub(super) fn wanted(&self) -> &Wanted {
        &self.wanted
    }

    pub(super) fn name(&self) -> &str {
        &self.wanted.plan().name
    }

    /// Waits for the result of the first try. Returns also the endpoint and options of the device's
    /// socket. If a call of the device does not return in time, its thread is abandoned, and
    /// another thread makes the calls of the remaining devices.
    ///
    /// # Errors
    /// As [`MaxWait::open`].
    pub(super) async fn answered(
        self,
        max_wait: &mut MaxWait,
        host: &Host,
        row: &AsideRow,
    ) -> Result<(Option<Served>, First), AssembleError> {
        let Self { wanted, served, is_free, opened } = self;
        let served = served?;
        let is_free = match max_wait.within(is_free).await {
            Some(answer) => answer.unwrap_or_else(|_| Err(failed(&wanted))),
            None => {
                row.go_on();
                Err(slow(&wanted, served.as_ref()))
            }
        };
        let first = match is_free {
            Ok(()) => max_wait.open(&wanted, host, opened).await?,
            Err(error) => max_wait.failed(error)?,
        };
        if matches!(first, First::Slow(_)) {
            row.go_on();
        }
        Ok((served, first))
    }
}

/// Returns the error for a check of the socket's path that has not returned in time.
fn slow(wanted: &Wanted, served: Option<&Served>) -> AssembleError {
    let name = served.and_then(|served| match &served.endpoint {
        Endpoint::Listen { path, .. } => Some((served.at.clone(), path.clone())),
        _ => None,
    });
    match name {
        Some((at, path)) => {
            let source = wanted.plan().socket.error(ListenError::Slow { path });
            AssembleError::Socket { at, source }
        }
        None => failed(wanted),
    }
}

/// What a device's first try has reached: the device is open, or the try goes on or is repeated.
#[derive(Debug)]
pub(super) enum Later {
    Opened(Opened),
    Held,
    Slow(Try),
}

/// Which errors of a first try stop the start of the daemon, and how long the tries may take.
#[derive(Debug)]
pub(super) struct MaxWait {
    /// True for `wait = 0`: a device that another process holds stops the start.
    refuses: bool,
    /// True if system calls that open a device have no timeout.
    waits_for_host: bool,
    /// True if a device that cannot be served does not keep the others from being served.
    keeps_on: bool,
    /// The time that slow system calls may still take, for all devices together.
    left: Duration,
    /// The time that is left for other processes to release resources, for all devices together.
    held_left: Duration,
}

impl MaxWait {
    /// `wait`: the key of this name. `keeps_on`: a device that cannot be served does not stop the
    /// others.
    pub(super) fn new(wait: Option<u32>, keeps_on: bool) -> Self {
        let refuses = wait == Some(0);
        let held_left = if refuses { Duration::ZERO } else { DEVICE_HELD };
        Self { refuses, waits_for_host: refuses, keeps_on, left: DEVICES_OPEN, held_left }
    }

    /// Makes the limits of a supervisor that takes over: if a device cannot be opened, the takeover
    /// fails and the running supervisor continues; a device that opens slowly is served later.
    pub(super) fn of_next() -> Self {
        Self { waits_for_host: false, ..Self::new(Some(0), false) }
    }

    /// Waits for the result of a device's first opening, which arrives on `opened`. A device that
    /// another process holds is retried while `held_left` lasts.
    ///
    /// # Errors
    /// The device cannot be served and [`Self::failed`] refuses the start; or another process
    /// holds the device, and `refuses` is set.
    async fn open(
        &mut self,
        wanted: &Wanted,
        host: &Host,
        opened: oneshot::Receiver<Result<Opened, AssembleError>>,
    ) -> Result<First, AssembleError> {
        let mut attempt = tokio::spawn(async move { opened.await.ok() });
        loop {
            match self.try_open(wanted, attempt).await? {
                First::Held(_) if !self.held_left.is_zero() => {
                    tokio::time::sleep(DEVICE_BACKOFF.0).await;
                    self.held_left = self.held_left.saturating_sub(DEVICE_BACKOFF.0);
                }
                first => return Ok(first),
            }
            attempt = open(wanted, host, None);
        }
    }

    async fn try_open(
        &mut self,
        wanted: &Wanted,
        mut attempt: Try,
    ) -> Result<First, AssembleError> {
        let Some(answer) = self.within(&mut attempt).await else {
            return Ok(First::Slow(attempt));
        };
        match answer.ok().flatten() {
            Some(Ok(opened)) => Ok(First::Opened(opened)),
            Some(Err(error)) if error.is_held() && !self.refuses => Ok(First::Held(error)),
            Some(Err(error)) if error.is_held() => Err(error),
            Some(Err(error)) => self.failed(error),
            None => self.failed(failed(wanted)),
        }
    }

    /// Awaits a system call; returns `None` if the call has not returned in time.
    pub(super) async fn within<T>(&mut self, call: impl Future<Output = T>) -> Option<T> {
        let began = Instant::now();
        let limit = match self.waits_for_host {
            true => Duration::MAX,
            false => DEVICE_OPEN.min(self.left).max(DEVICE_OPEN_MIN),
        };
        let answer = tokio::time::timeout(limit, call).await;
        if answer.is_err() {
            self.left = self.left.saturating_sub(began.elapsed());
        }
        answer.ok()
    }

    /// Returns [`First::Failed`] if the other devices are served in spite of this error.
    ///
    /// # Errors
    /// The error itself, if it must stop the start of the daemon.
    pub(super) fn failed(&self, error: AssembleError) -> Result<First, AssembleError> {
        if self.keeps_on && !self.refuses || error.is_of_one_device() {
            return Ok(First::Failed(error));
        }
        Err(error)
    }
}

/// Refuses the start if no device can be served. Devices of the control API do not count: a user
/// who created a device, and may have removed its files, must not keep the daemon from starting.
///
/// # Errors
/// No device is opened, and either the configuration of one is wrong, or all have failed. Returns
/// the error of the first such device.
pub(super) fn refuse_if_none_is_left(tried: &mut Vec<Tried>) -> Result<(), AssembleError> {
    let is_served = tried.iter().any(|tried| matches!(tried.first, First::Opened(_)));
    // An image that another process holds, or that the host opens slowly, is served later. Any
    // other error is one of the configuration: report it now, although another device waits for
    // its image.
    let is_wrong =
        |tried: &Tried| matches!(&tried.first, First::Failed(error) if !error.is_of_one_device());
    let has_failed = |tried: &Tried| matches!(tried.first, First::Failed(_));
    let is_own = |tried: &Tried| !tried.wanted.is_of_api();
    let wrong = tried.iter().position(|tried| is_own(tried) && is_wrong(tried));
    let all_failed = tried.iter().filter(|tried| is_own(tried)).all(has_failed);
    let own = if all_failed { tried.iter().position(is_own) } else { None };
    match wrong.or(own).filter(|_| !is_served) {
        Some(index) => match tried.swap_remove(index).first {
            First::Failed(error) => Err(error),
            _ => Ok(()),
        },
        None => Ok(()),
    }
}

pub(super) fn failed(wanted: &Wanted) -> AssembleError {
    AssembleError::Failed { at: wanted.plan().place.at(wanted.key()) }
}

/// A device that waits until it can be opened. Each new reason is logged and shown once.
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

    /// Returns the plan of the device that waits.
    pub(super) fn wanted(&self) -> &Wanted {
        &self.wanted
    }

    /// Shows why the device is not served after its first try, if it is not; returns how it is
    /// opened from now on.
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

    /// Logs and shows why the device is not served, unless this reason is shown already.
    pub(super) fn note(&mut self, error: &AssembleError) {
        let (name, reason) = (&self.wanted.plan().name, error.to_string());
        if self.reason.as_ref() == Some(&reason) {
            return;
        }
        if error.is_awaited() {
            tracing::warn!(device = name, reason, "the device is waiting; retrying");
        } else {
            tracing::error!(device = name, reason, "the device failed; retrying");
        }
        self.reason = Some(reason.clone());
        self.shared.devices.wait(Waiting {
            name: name.clone(),
            kind: self.wanted.kind(),
            socket: self.wanted.socket(),
            key: error.key().unwrap_or(self.wanted.key()),
            is_failed: !error.is_awaited(),
            origin: self.wanted.plan().place.origin(),
            reason,
        });
    }

    /// Pauses before the next try: an eighth of the time that the device has waited.
    pub(super) async fn pause(&self) {
        let (shortest, longest) = DEVICE_BACKOFF;
        tokio::time::sleep((self.since.elapsed() / 8).clamp(shortest, longest)).await;
    }

    /// Shows the device as served, if it was shown as waiting.
    pub(super) fn end(&mut self, made: &Made) {
        // A device that never waited is shown already.
        if self.reason.take().is_some() {
            self.shared.devices.add(made.view().clone());
            let seconds = self.since.elapsed().as_secs_f64();
            let device = &self.wanted.plan().name;
            tracing::info!(device, seconds, "device is ready");
        }
    }

    /// Returns when the name of the device's socket is free. Another process can still take it
    /// first.
    pub(super) async fn listens(&mut self, endpoint: &Endpoint, at: &str) {
        let Endpoint::Listen { path, permissions } = endpoint else { return };
        let whose = Whose::Device(&self.wanted.plan().name);
        if self.shared.service.has(whose, path, *permissions) {
            return;
        }
        loop {
            let path = path.clone();
            match aside_for(&self.wanted.plan().name, move || check_path(&path)).await {
                Some(Ok(())) => return,
                Some(Err(source)) => {
                    let source = self.wanted.plan().socket.error(source);
                    self.note(&AssembleError::Socket { at: at.to_owned(), source });
                }
                None => {}
            }
            self.pause().await;
        }
    }

    /// Tries to open the device until it is open, and returns it. Each new error is shown.
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
            let host = &self.shared.host;
            let attempt = attempt.take().unwrap_or_else(|| open(&self.wanted, host, None));
            let mut opened = attempt.await.ok().flatten();
            if let Some(Ok(bare)) = opened {
                let wanted = self.wanted.clone();
                let name = &self.wanted.plan().name;
                opened = aside_for(name, move || wanted.decorated(bare)).await;
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
