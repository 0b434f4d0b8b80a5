//! `Reconnector`: the thread of a disk that connects its queues, again and again.
//!
//! ```text
//! a queue asks        its connection is lost, or it never had one
//! try                 connect and negotiate; is it still the disk that the guest was told?
//!                     no: the next try comes later, at most BACKOFF_MAX
//!                     yes: the connection goes to the queue that has asked first
//! the server takes no more connections?   (`share.rs`)
//!                     queues without one share one: a queue that has one of its own answers what
//!                     it has in flight, gives the connection up and is the first to share it
//!                     later the server takes more: queues get connections of their own again
//! the server is back and allows one connection alone (no `NBD_FLAG_CAN_MULTI_CONN`)?
//!                     all queues share it, since a flush on it covers no other connection
//! the server is gone for longer than the operator lets guests wait?
//!                     queues that ask hear of it and fail what they have; the tries go on
//! each tick           queues with something in flight look how long it has waited
//! ```
//! Only this thread waits for names, connections and handshakes. A worker asks, and is told.
//! `grants.rs` decides which queue has which connection; `share.rs` is one for several queues.

mod absence;
mod grants;
mod share;
#[cfg(test)]
mod trial;

use super::clock::now;
use super::error::JoinError;
use super::join::{JoinedConnection, join};
use super::line::{ConnectionCounts, News, QueueConnection, QueueInbox};
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
/// server that takes no more of them may let a client wait for ever.
const EXTRA_LIMIT: Duration = Duration::from_secs(2);
/// For how long a server may refuse one more connection before the queues share those they have: it
/// may not know yet that a former one has ended.
const SHARE_AFTER: Duration = Duration::from_millis(250);
/// The same for a server that cannot be connected to, which may just be starting again.
const SHARE_LATER: Duration = Duration::from_secs(5);
/// The shortest time between two warnings in the log.
const WARN_PACE: Duration = Duration::from_secs(10);
/// The reconnector thread ticks this many times in `request_timeout`. A request that has no answer
/// after this many ticks is overdue.
pub(super) const TICKS: u32 = 4;

/// The settings of an NBD disk.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// The device, in the log.
    pub name: String,
    /// Where the connections to its server come from.
    pub server: Arc<dyn Server>,
    /// What the server is asked for.
    pub target: Target,
    /// The guest may not write.
    pub read_only: bool,
    /// How long requests wait for a server that is gone before they fail; `None`: for ever.
    pub reconnect: Option<Duration>,
    /// How long a request may go without an answer before the connection is taken for dead.
    pub request_timeout: Duration,
}

/// The reconnector thread's side that the disk and its queues call.
#[derive(Debug)]
pub(super) struct Reconnector {
    pub(super) options: NbdOptions,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug)]
struct State {
    /// The export as the guest was told of it.
    told: Export,
    lines: Vec<(Arc<QueueConnection>, Holds)>,
    /// The counters of every connection, also of queues that are gone. A new queue goes on with the
    /// first counters that no present queue uses.
    counts: Vec<Arc<ConnectionCounts>>,
    /// Lines that want a connection, in the order in which they have asked.
    asking: VecDeque<Arc<QueueConnection>>,
    /// A connection that no queue has taken yet.
    spare: Option<JoinedConnection>,
    share: Option<Arc<Share>>,
    /// The queue whose connection is to be shared, and since when it was asked to give it up.
    yielding: Option<(Arc<QueueConnection>, Duration)>,
    /// Connections that the server takes at most, as far as is known.
    limit: Option<usize>,
    /// The limit that the log has named last.
    told_limit: Option<usize>,
    /// The server allows one connection alone.
    is_alone: bool,
    /// Since when the server refuses one more connection.
    refused_since: Option<Duration>,
    more_at: Duration,
    more_pause: Duration,
    absence: Absence,
    gave_up: bool,
    try_at: Duration,
    backoff: Duration,
    tick_at: Duration,
    warned_at: Option<Duration>,
    /// Failed tries since the last warning in the log.
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

    /// Starts the thread. The guest was `told` of a disk; `spare`: a connection to it.
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

    /// The disk that the guest was told.
    pub(super) fn told(&self) -> Export {
        self.lock().told
    }

    /// The counters of every connection, also of queues that are gone.
    pub(super) fn counts(&self) -> Vec<Arc<ConnectionCounts>> {
        self.lock().counts.clone()
    }

    /// Adds a queue and asks for its connection. The queue is told of news at `seat`.
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

    /// Takes a queue away.
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

    /// Asks for a new connection, since that of a queue is lost for `reason`. `has_answered`: the
    /// server had answered on it.
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
            // A server that dies of its requests must not be asked without a pause.
            state.absence.go_on(now);
            state.put_off(now);
        }
        state.warn(now, &self.options.name, reason);
        drop(state);
        self.wake.notify_one();
    }

    /// The server has answered a queue for the first time on its connection.
    pub(super) fn answered(&self) {
        self.lock().absence.end();
    }

    /// Connects to see the export as it is now.
    pub(super) fn export(&self) -> Result<Export, JoinError> {
        let mut joined = self.options.join(JOIN_LIMIT)?;
        let export = joined.export;
        // The server may take few connections: this one is not kept for a queue.
        joined.channel.leave();
        Ok(export)
    }

    /// Measures the disk again.
    pub(super) fn measure(&self) -> Result<Export, JoinError> {
        let export = self.export()?;
        let mut state = self.lock();
        self.fits(&Export { size: 0, ..state.told }, &export)?;
        // The guest keeps the features that it has negotiated.
        state.told.size = export.size;
        Ok(state.told)
    }

    /// Ends the thread, when the last queue is gone.
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

    /// Tries to connect one of the queues that ask.
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

    /// A try that has begun at `began` has brought no connection.
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

    /// Gives a new connection to the queue that has asked first, or to all that ask if the server
    /// takes no more.
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

    /// Logs that requests do not fail any more, if they did.
    fn tell_back(&self, state: &mut State) {
        if std::mem::take(&mut state.gave_up) {
            tracing::info!(device = self.options.name, "the NBD server is back");
        }
    }

    /// Tells the queues that ask when the server has been gone for too long.
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

/// Checks that `new` is still the disk that the guest was told. `read_only`: the guest may not
/// write to it.
///
/// # Errors
/// [`JoinError::Disk`].
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
    /// The next try comes later.
    fn put_off(&mut self, now: Duration) {
        let most = if self.absence.lasts(now) < LATER { BACKOFF_MAX } else { BACKOFF_LATER };
        self.try_at = now + self.backoff;
        self.backoff = (self.backoff * 2).min(most);
    }

    /// Logs why there is no connection, at once and then at most every [`WARN_PACE`].
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
