//! `HostErrors`: what the operator is told of a disk on which the host fails requests.

use super::pending::Kind;
use manyring_engine::stats::QueueStats;
use rustix::io::Errno;
use std::sync::{Mutex, PoisonError};

/// What becomes of writes for which the host has no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFull {
    /// They wait until there is room, and the guest with them.
    #[default]
    Wait,
    /// The guest gets an I/O error.
    Report,
}

/// Pause between two warnings about the same error of a device.
const PACE_NS: u64 = 10_000_000_000;

/// The errors of a device, from all of its queues.
#[derive(Debug)]
pub(crate) struct HostErrors {
    device: String,
    on_full: OnFull,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By [`class`].
    warned: [Warned; CLASSES],
    /// How many queues have requests that wait for room.
    waiting: usize,
}

/// What the log was told of one error.
#[derive(Clone, Copy, Debug, Default)]
struct Warned {
    at_ns: Option<u64>,
    /// Errors since then.
    since: u64,
}

const CLASSES: usize = 6;

/// The number of an error among those that are counted apart.
fn class(errno: Errno) -> usize {
    match errno {
        Errno::IO => 0,
        Errno::NOSPC => 1,
        Errno::DQUOT => 2,
        Errno::ROFS => 3,
        Errno::STALE => 4,
        _ => 5,
    }
}

/// A request that the host has failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct FailedRequest {
    pub(super) kind: Kind,
    pub(super) sector: u64,
    pub(super) errno: Errno,
    /// It will be tried again.
    pub(super) waits: bool,
    pub(super) now_ns: u64,
}

impl HostErrors {
    pub(super) fn new(device: &str, on_full: OnFull) -> Self {
        Self { device: device.to_owned(), on_full, state: Mutex::default() }
    }

    /// True if a request that failed with `errno` may wait for room.
    pub(super) fn may_wait(&self, kind: Kind, errno: Errno) -> bool {
        self.on_full == OnFull::Wait
            && matches!(errno, Errno::NOSPC | Errno::DQUOT)
            && matches!(kind, Kind::Write | Kind::Range)
    }

    /// Counts an error of the host, and logs it: the first one, and then one every ten seconds.
    #[cold]
    pub(super) fn failed(&self, request: FailedRequest, stats: &QueueStats) {
        let FailedRequest { kind, sector, errno, waits, now_ns } = request;
        let class = class(errno);
        let counters: [_; CLASSES] = [
            &stats.host_errors_eio,
            &stats.host_errors_enospc,
            &stats.host_errors_edquot,
            &stats.host_errors_erofs,
            &stats.host_errors_estale,
            &stats.host_errors_other,
        ];
        counters[class].add(1);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let warned = &mut state.warned[class];
        warned.since += 1;
        if warned.at_ns.is_some_and(|at_ns| now_ns.saturating_sub(at_ns) < PACE_NS) {
            return;
        }
        let errors = std::mem::take(&mut warned.since);
        warned.at_ns = Some(now_ns);
        drop(state);
        let (device, operation) = (&self.device, operation(kind));
        if waits {
            tracing::warn!(
                device, operation, sector, %errno, errors,
                "the host has no room: the guest's writes wait for it"
            );
        } else {
            tracing::warn!(
                device, operation, sector, %errno, errors,
                "the host has failed a request of the guest"
            );
        }
    }

    /// A queue has its first request that waits.
    pub(super) fn begin(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).waiting += 1;
    }

    /// No request of a queue waits any more. `served`: the host had room for them.
    pub(super) fn end(&self, served: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        if state.waiting > 0 {
            return;
        }
        // The next time that the host is full is news.
        for errno in [Errno::NOSPC, Errno::DQUOT] {
            state.warned[class(errno)] = Warned::default();
        }
        drop(state);
        let device = &self.device;
        if served {
            tracing::info!(device, "no write of the guest waits for room on the host any more");
        } else {
            tracing::warn!(device, "the queue stops while the host has no room for its writes");
        }
    }
}

const fn operation(kind: Kind) -> &'static str {
    match kind {
        Kind::Read => "read",
        Kind::Write | Kind::OrderedWrite => "write",
        Kind::Flush => "flush",
        Kind::Range => "discard or write-zeroes",
        Kind::Other => "other",
    }
}
