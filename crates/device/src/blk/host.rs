//! `HostErrors`: logs the requests that fail on the host's disk, at a limited rate.

use super::pending::Kind;
use manyring_backend::blk::{Disk, Image};
use manyring_engine::stats::QueueStats;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, PoisonError};

/// Whether a write for which the host has no space (`ENOSPC`, `EDQUOT`) waits or fails.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnFull {
    /// The write waits until the host has space; until then, the guest sees a slow disk.
    #[default]
    Wait,
    /// The write fails: the guest gets an I/O error.
    Report,
}

/// Least time between two warnings about the same error of a device.
const PACE_NS: u64 = 10_000_000_000;

/// The errors of a device, on all of its queues.
#[derive(Debug)]
pub(crate) struct HostErrors {
    device: String,
    on_full: OnFull,
    disk: Arc<dyn Disk>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The last warning about each [`class`] of errors.
    warned: [Warned; CLASSES],
    /// How many queues have requests that wait for space.
    waiting: usize,
}

/// The last warning about one class of errors.
#[derive(Clone, Copy, Debug, Default)]
struct Warned {
    at_ns: Option<u64>,
    /// Number of errors since that warning.
    since: u64,
}

const CLASSES: usize = 6;

/// Returns the class of an error, an index into `warned`.
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

/// A request that failed on the host.
#[derive(Clone, Copy, Debug)]
pub(super) struct FailedRequest {
    pub(super) kind: Kind,
    pub(super) sector: u64,
    pub(super) errno: Errno,
    /// The size of the host's block device, if the request reaches beyond it because the device has
    /// shrunk.
    pub(super) device_size: Option<u64>,
    /// True if the request waits for space, and will be retried.
    pub(super) waits: bool,
    pub(super) now_ns: u64,
}

impl HostErrors {
    pub(super) fn new(device: &str, on_full: OnFull, disk: Arc<dyn Disk>) -> Self {
        Self { device: device.to_owned(), on_full, disk, state: Mutex::default() }
    }

    /// Returns the size of the host's block device, if a request that ends at `end` failed with
    /// `errno` because the device has shrunk: Linux reports `ENOSPC` for a write behind its end.
    /// For a discard or write-zeroes, whose ranges are not kept, any shrinking counts.
    #[cold]
    pub(super) fn device_size(&self, errno: Errno, kind: Kind, end: u64) -> Option<u64> {
        let image = self.disk.image().filter(|image| image.is_block_device());
        let size = image.filter(|_| errno == Errno::NOSPC).map(Image::measure)?.ok()?;
        let end = if kind == Kind::Range { self.disk.geometry().size } else { end };
        (size < end).then_some(size)
    }

    /// True if a request that failed with `errno` shall wait for space instead of failing.
    pub(super) fn may_wait(&self, kind: Kind, errno: Errno) -> bool {
        self.on_full == OnFull::Wait
            && matches!(errno, Errno::NOSPC | Errno::DQUOT)
            && matches!(kind, Kind::Write | Kind::Range)
    }

    /// Counts an error of the host, and logs it: the first one at once, then one every ten seconds.
    #[cold]
    pub(super) fn failed(&self, request: FailedRequest, stats: &QueueStats) {
        let FailedRequest { kind, sector, errno, device_size, waits, now_ns } = request;
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
        if let Some(device_size) = device_size {
            tracing::warn!(
                device,
                operation,
                sector,
                device_size,
                errors,
                "the block device has become smaller: a request of the guest reaches beyond its end"
            );
        } else if waits {
            tracing::warn!(
                device, operation, sector, %errno, errors,
                "the host has no space left: the guest's writes wait for it"
            );
        } else {
            tracing::warn!(
                device, operation, sector, %errno, errors,
                "the host has failed a request of the guest"
            );
        }
    }

    /// Counts a queue that begins to have requests waiting for space.
    pub(super) fn begin(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).waiting += 1;
    }

    /// Counts a queue whose requests no longer wait for space. `served`: the host had space; false:
    /// the queue ended.
    pub(super) fn end(&self, served: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        if state.waiting > 0 {
            return;
        }
        // Forget the last warnings, so that the host's next shortage is logged at once.
        for errno in [Errno::NOSPC, Errno::DQUOT] {
            state.warned[class(errno)] = Warned::default();
        }
        drop(state);
        let device = &self.device;
        if served {
            tracing::info!(device, "no write of the guest waits for space on the host any more");
        } else {
            tracing::warn!(device, "the queue stops while the host has no space for its writes");
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
