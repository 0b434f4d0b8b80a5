//! `Reconnector`: the thread of a disk that connects and reconnects its queues.
//!
//! ```text
//! a queue asks        its connection is lost, or it never had one
//! the thread tries    to connect and negotiate; is the export still the guest's disk?
//!                     no: it tries again after a pause, which grows
//!                     yes: the queue that asked first gets the connection
//! the server accepts no more connections?   (`share.rs`)
//!                     queues without a connection share one: a queue with a connection of its own
//!                     completes its requests in flight, yields the connection, and shares it
//!                     later the server accepts more: queues get connections of their own again
//! the server is back and allows only one connection (no `NBD_FLAG_CAN_MULTI_CONN`)?
//!                     all queues share it, since a flush on it would not cover other connections
//! the server is unreachable for longer than `reconnect`?
//!                     queues without a connection fail their requests; the thread tries on
//! each tick           queues with requests in flight check how long these have waited
//! ```
//! Only this thread blocks in name look-ups, connects and handshakes; a worker never does.
//! `grants.rs` decides which queue has which connection; `share.rs` shares one among queues.

mod absence;
mod grants;
mod share;
#[cfg(test)]
mod trial;

use super::clock::now;
use super::error::JoinError;
use super::join::{JoinedConnection, join};
use super::queue_connection::{ConnectionCounts, News, QueueConnection, QueueInbox};
use super::server::{Server, Target};
use absence::Absence;
use grants::{Holds, MORE_MIN, YIELD_LIMIT};
use manyring_backend::sys::starter::{self, ThreadRole};
use manyring_wire::nbd::{Export, READ_ONLY, SEND_FLUSH};
use share::Share;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long connecting and negotiating may take together.
const JOIN_LIMIT: Duration = Duration::from_secs(5);
/// Pauses between tries, each twice the one before, so that a server that comes back is found soon.
const BACKOFF_MIN: Duration = Duration::from_millis(10);
const BACKOFF_MAX: Duration = Duration::from_millis(100);
/// The longest pause once the server has been gone for [`LATER`].
const BACKOFF_LATER: Duration = Duration::from_secs(1);
const LATER: Duration = Duration::from_secs(60);
/// How long connecting and negotiating may take together while the disk has another connection: a
/// server that accepts no more connections may let a client wait for ever.
const EXTRA_LIMIT: Duration = Duration::from_secs(2);
/// For how long a server may refuse one more connection before queues share connections: the server
/// may not have noticed yet that a former connection has ended.
const SHARE_AFTER: Duration = Duration::from_millis(250);
/// The same time for a server that refuses connections altogether: it may be starting again.
const SHARE_LATER: Duration = Duration::from_secs(5);
/// The shortest time between two warnings in the log.
const WARN_PACE: Duration = Duration::from_secs(10);
/// The reconnector thread ticks this many times in `request_timeout`. A request that has no answer
/// after this many ticks is overdue.
pub(super) const TICKS: u32 = 4;

/// The settings of an NBD disk.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// The name of the device in the log.
    pub name: String,
    /// Connects to the disk's server.
    pub server: Arc<dyn Server>,
    /// The export to ask the server for.
    pub target: Target,
    /// True if the guest may not write to the disk.
    pub read_only: bool,
    /// How long requests wait for an unreachable server before they fail; `None`: for ever.
    pub reconnect: Option<Duration>,
    /// How long a request may wait for its answer before its connection is closed as dead.
    pub request_timeout: Duration,
}

/// The handle of the reconnector thread, which the disk and its queues call.
#[derive(Debug)]
pub(super) struct Reconnector {
    pub(super) options: NbdOptions,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug)]
struct State {
    /// The properties of the export that the guest was told.
    told: Export,
    lines: Vec<(Arc<QueueConnection>, Holds)>,
    /// The counters of every connection, also of queues that were dropped. A new queue continues
    /// the first counters that no present queue uses.
    counts: Vec<Arc<ConnectionCounts>>,
    /// The queues that want a connection, in the order in which they have asked.
    asking: VecDeque<Arc<QueueConnection>>,
    /// A connection that no queue has taken yet.
    spare: Option<JoinedConnection>,
    share: Option<Arc<Share>>,
    /// The queue that was asked to yield its connection for sharing, and when it was asked.
    yielding: Option<(Arc<QueueConnection>, Duration)>,
    /// The most connections that the server accepts, if a refusal has shown that.
    limit: Option<usize>,
    /// The limit that was logged last.
    told_limit: Option<usize>,
    /// True if the server allows only one connection.
    is_alone: bool,
    /// Since when the server refuses one more connection; `None`: it does not.
    refused_since: Option<Duration>,
    more_at: Duration,
    more_pause: Duration,
    absence: Absence,
    gave_up: bool,
    try_at: Duration,
    backoff: Duration,
    tick_at: Duration,
    warned_at: Option<Duration>,
    /// How many attempts have failed since the last warning in the log.
    untold: u64,
    is_closed: bool,
    #[cfg(test)]
    trial: trial::ConnectTrial,
}

impl NbdOptions {
    /// Connects and negotiates; gives up after `limit`.
    fn join(&self, limit: Duration) -> Result<JoinedConnection, JoinError> {
        join(&*self.server, &self.target, limit)
    }
}

enum Job {
    Tick,
    Try,
    More,
    Yield,
    End,
}

impl Reconnector {
    /// Connects for the first time, and starts the thread.
    pub(super) fn open(options: NbdOptions) -> Result<Arc<Self>, JoinError> {
        let first = options.join(JOIN_LIMIT)?;
        Self::begin(options, first.export, Some(first))
    }

    /// Starts the thread. `told` is the export whose properties the guest was told; `spare` is a
    /// connection to it for the first queue.
    pub(super) fn begin(
        options: NbdOptions,
        told: Export,
        spare: Option<JoinedConnection>,
    ) -> Result<Arc<Self>, JoinError> {
        let now = now();
        let state = Mutex::new(State {
            told,
            lines: Vec::new(),
            counts: Vec::new(),
            asking: VecDeque::new(),
            spare,
            share: None,
            yielding: None,
            limit: None,
            told_limit: None,
            is_alone: false,
            refused_since: None,
            more_at: now,
            more_pause: MORE_MIN,
            absence: Absence::default(),
            gave_up: false,
            try_at: now,
            backoff: BACKOFF_MIN,
            tick_at: now + options.request_timeout / TICKS,
            warned_at: None,
            untold: 0,
            is_closed: false,
            #[cfg(test)]
            trial: trial::ConnectTrial::default(),
        });
        let reconnector = Arc::new(Self { options, state, wake: Condvar::new() });
        let of_thread = reconnector.clone();
        let thread = std::thread::Builder::new().name("disk-nbd".to_owned());
        let started = starter::spawn(ThreadRole::Server, thread, move || of_thread.run());
        started.map_err(JoinError::Connect)?;
        Ok(reconnector)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the properties of the export that the guest was told.
    pub(super) fn told(&self) -> Export {
        self.lock().told
    }

    /// Returns the counters of every connection, also of queues that were dropped.
    pub(super) fn counts(&self) -> Vec<Arc<ConnectionCounts>> {
        self.lock().counts.clone()
    }

    /// Adds a queue, and asks for its connection. `seat` is the inbox that wakes the queue.
    pub(super) fn add(&self, seat: Option<QueueInbox>) -> Arc<QueueConnection> {
        let mut state = self.lock();
        let State { lines, counts, .. } = &mut *state;
        let is_free = |c: &&Arc<ConnectionCounts>| {
            !lines.iter().any(|(line, _)| Arc::ptr_eq(&line.counts, c))
        };
        let free = counts.iter().find(is_free).cloned();
        let free = free.unwrap_or_else(|| {
            counts.push(Arc::default());
            counts[counts.len() - 1].clone()
        });
        let line = Arc::new(QueueConnection::new(free));
        line.sit(seat);
        state.lines.push((line.clone(), Holds::Nothing));
        match state.spare.take() {
            Some(spare) => state.give(&line, spare),
            None => {
                state.asking.push_back(line.clone());
                drop(state);
                self.wake.notify_one();
            }
        }
        line
    }

    /// Removes a queue.
    pub(super) fn remove(&self, line: &Arc<QueueConnection>) {
        let mut state = self.lock();
        state.lines.retain(|(other, _)| !Arc::ptr_eq(other, line));
        state.asking.retain(|other| !Arc::ptr_eq(other, line));
        state.yields_no_more(line);
        if state.asking.is_empty() {
            state.absence.end();
        }
        line.counts.end();
        let is_last = state.is_closed && state.lines.is_empty();
        drop(state);
        if is_last {
            self.wake.notify_one();
        }
    }

    /// Asks for a new connection for a queue that has lost its connection for `reason`.
    /// `has_answered`: the server had answered a request on the lost connection.
    pub(super) fn ask(&self, line: &Arc<QueueConnection>, has_answered: bool, reason: &str) {
        let now = now();
        let mut state = self.lock();
        state.holds(line, Holds::Nothing);
        state.yields_no_more(line);
        state.asking.push_back(line.clone());
        if has_answered {
            state.absence.begin(now);
            (state.backoff, state.try_at) = (BACKOFF_MIN, now);
        } else {
            // The server may crash at each request that is sent: pause, so that it is not restarted
            // in a busy loop.
            state.absence.go_on(now);
            state.put_off(now);
        }
        state.warn(now, &self.options.name, reason);
        drop(state);
        self.wake.notify_one();
    }

    /// Called when the server has answered the first request on a queue's connection.
    pub(super) fn answered(&self) {
        self.lock().absence.end();
    }

    /// Connects, and returns the export as the server describes it now.
    pub(super) fn export(&self) -> Result<Export, JoinError> {
        let mut joined = self.options.join(JOIN_LIMIT)?;
        let export = joined.export;
        // The connection is closed and not kept as a spare: the server may accept only a few.
        joined.channel.leave();
        Ok(export)
    }

    /// Reads the size of the export again, and stores it as the size that the guest is told.
    pub(super) fn measure(&self) -> Result<Export, JoinError> {
        let export = self.export()?;
        let mut state = self.lock();
        self.fits(&Export { size: 0, ..state.told }, &export)?;
        // The guest keeps the features that it has negotiated.
        state.told.size = export.size;
        Ok(state.told)
    }

    /// Ends the thread as soon as the last queue is removed.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.wake.notify_one();
    }

    fn run(self: &Arc<Self>) {
        loop {
            let job = self.next();
            #[cfg(test)]
            self.count(&job);
            match job {
                Job::Tick => self.lock().lines.iter().for_each(|(line, _)| line.tick()),
                Job::Try => self.attempt(),
                Job::More => self.attempt_more(),
                Job::Yield => self.ask_another(),
                Job::End => return,
            }
        }
    }

    /// Waits for the next job of the reconnector thread.
    fn next(&self) -> Job {
        let mut state = self.lock();
        loop {
            let now = now();
            if state.is_closed && state.lines.is_empty() {
                return Job::End;
            }
            if now >= state.tick_at {
                state.tick_at = now + self.options.request_timeout / TICKS;
                return Job::Tick;
            }
            let mut until = state.tick_at;
            if !state.asking.is_empty() {
                if now >= state.try_at {
                    return Job::Try;
                }
                until = until.min(state.try_at);
            }
            if let Some((_, since)) = state.yielding {
                if now >= since + YIELD_LIMIT {
                    return Job::Yield;
                }
                until = until.min(since + YIELD_LIMIT);
            } else if state.share.is_some() && !state.is_alone {
                if now >= state.more_at {
                    return Job::More;
                }
                until = until.min(state.more_at);
            }
            let waited = self.wake.wait_timeout(state, until - now);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Tries to connect the queue that asked first. The lock is released while this blocks.
    fn attempt(self: &Arc<Self>) {
        let mut state = self.lock();
        let open = state.open();
        if open > 0 && state.limit.is_some_and(|limit| open >= limit) {
            return self.share_out(&mut state);
        }
        let spare = state.spare.take();
        drop(state);
        let began = now();
        let limit = if open > 0 { EXTRA_LIMIT } else { JOIN_LIMIT };
        let joined = spare.map_or_else(|| self.options.join(limit), Ok);
        let mut state = self.lock();
        let fit = joined.and_then(|joined| {
            self.fits(&state.told, &joined.export)?;
            let is_alone = state.lines.len() > 1 && state.lacks_multi(&joined.export);
            if is_alone && state.open() > 0 { Err(JoinError::Alone) } else { Ok(joined) }
        });
        match fit {
            Ok(joined) => self.joined(&mut state, joined),
            Err(error) => self.failed(&mut state, began, &error),
        }
    }

    /// Handles the failure of an attempt that began at `began`.
    fn failed(self: &Arc<Self>, state: &mut State, began: Duration, error: &JoinError) {
        let (now, has_others) = (now(), state.open() > 0);
        state.put_off(now);
        if has_others {
            let since = *state.refused_since.get_or_insert(began);
            let after = if error.is_limit() { SHARE_AFTER } else { SHARE_LATER };
            if now.saturating_sub(since) >= after {
                return self.share_out(state);
            }
        }
        if !has_others || !error.is_limit() {
            state.absence.go_on(now);
            state.warn(now, &self.options.name, &error.to_string());
            self.give_up_after(state, now);
        }
    }

    /// Gives a new connection to the queue that asked first, or to all queues that ask, as a shared
    /// one, if the server accepts no more.
    fn joined(self: &Arc<Self>, state: &mut State, joined: JoinedConnection) {
        state.refused_since = None;
        if state.asking.is_empty() {
            state.spare = Some(joined);
            return;
        }
        self.tell_back(state);
        if state.open() == 0 {
            let is_alone = state.lines.len() > 1 && state.lacks_multi(&joined.export);
            if is_alone != std::mem::replace(&mut state.is_alone, is_alone) {
                state.limit = is_alone.then_some(1);
            }
        }
        let is_last = state.limit.is_some_and(|limit| state.open() + 1 >= limit);
        if is_last && (state.is_alone || state.asking.len() > 1) {
            match state.start_share(self, joined.export) {
                Ok(share) => {
                    share.serve(joined.channel);
                    state.share = Some(share);
                    self.share_out(state);
                }
                Err(errno) => {
                    let now = now();
                    state.put_off(now);
                    self.cannot_share(state, now, errno);
                }
            }
        } else if let Some(line) = state.asking.pop_front() {
            state.give(&line, joined);
        }
    }

    /// Logs that the server is back, if requests have failed.
    fn tell_back(&self, state: &mut State) {
        if std::mem::take(&mut state.gave_up) {
            tracing::info!(device = self.options.name, "the NBD server is back");
        }
    }

    /// Tells the queues that ask to fail their requests, if the server has been unreachable for
    /// longer than `reconnect`.
    fn give_up_after(&self, state: &mut State, now: Duration) {
        let gone = state.absence.lasts(now);
        if self.options.reconnect.is_none_or(|limit| gone < limit) {
            return;
        }
        if !std::mem::replace(&mut state.gave_up, true) {
            let (device, seconds) = (&self.options.name, gone.as_secs());
            tracing::warn!(
                device,
                seconds,
                "the NBD server is gone: requests of the guest fail until it is back"
            );
        }
        state.asking.iter().for_each(|line| line.tell(News::GaveUp));
    }

    fn fits(&self, told: &Export, new: &Export) -> Result<(), JoinError> {
        fits(told, new, self.options.read_only)
    }
}

/// Checks that the guest can continue with the export `new`, after it was told the properties
/// `told`. `read_only`: the guest may not write to the disk.
///
/// # Errors
/// [`JoinError::Disk`]: the export is smaller, read-only now, has larger blocks, or cannot flush.
pub fn fits(told: &Export, new: &Export, read_only: bool) -> Result<(), JoinError> {
    let lacks = |flag| told.flags & flag != 0 && new.flags & flag == 0;
    let is_writable = |export: &Export| export.flags & READ_ONLY == 0;
    let problem = if new.size < told.size {
        format!("its disk has {} bytes, the guest was told {}", new.size, told.size)
    } else if !read_only && is_writable(told) && !is_writable(new) {
        "its disk cannot be written any more".to_owned()
    } else if new.blocks.min > told.blocks.min {
        format!("its blocks have {} bytes now", new.blocks.min)
    } else if lacks(SEND_FLUSH) {
        "it cannot flush any more".to_owned()
    } else {
        return Ok(());
    };
    Err(JoinError::Disk(problem))
}

impl State {
    /// Postpones the next attempt, and doubles the pause, up to its maximum.
    fn put_off(&mut self, now: Duration) {
        let most = if self.absence.lasts(now) < LATER { BACKOFF_MAX } else { BACKOFF_LATER };
        self.try_at = now + self.backoff;
        self.backoff = (self.backoff * 2).min(most);
    }

    /// Logs why there is no connection: the first time at once, then at most once in each
    /// [`WARN_PACE`].
    fn warn(&mut self, now: Duration, device: &str, reason: &str) {
        self.untold += 1;
        if self.warned_at.is_some_and(|at| now.saturating_sub(at) < WARN_PACE) {
            return;
        }
        self.warned_at = Some(now);
        let times = std::mem::take(&mut self.untold);
        tracing::warn!(
            device,
            times,
            "no connection to the NBD server, requests wait for it: {reason}"
        );
    }
}
