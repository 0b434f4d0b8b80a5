//! A queue that a generator keeps full of requests, and the times of these requests: the same code
//! for virtio's rings and Xen's.

use super::{LoadError, LoadOptions, LoadResult};
use crate::measure::{Latencies, Random, now, own_cpu_seconds};
use std::time::Instant;

/// A queue of a generator, with the state of its load.
pub(super) struct Lane<Q> {
    pub(super) queue: Q,
    random: Random,
    /// Size of the disk in blocks, each as large as a request.
    blocks: u64,
    /// When each request was submitted, by tag.
    submitted: Vec<Instant>,
}

impl<Q> Lane<Q> {
    /// A lane for each queue of a disk of `capacity` bytes, whose tags are below `entries`.
    ///
    /// # Errors
    /// [`LoadError::Options`]: the disk is too small.
    pub(super) fn all(
        queues: Vec<Q>,
        options: &LoadOptions,
        capacity: u64,
        entries: usize,
    ) -> Result<Vec<Self>, LoadError> {
        let blocks = capacity / options.size as u64;
        if blocks == 0 {
            return Err(LoadError::Options("the disk is smaller than one request"));
        }
        let lane = |(queue, index)| {
            let random = Random::new(options.seed.wrapping_add(index));
            Self { queue, random, blocks, submitted: vec![now(); entries] }
        };
        Ok(queues.into_iter().zip(0..).map(lane).collect())
    }

    /// The first sector of the next request.
    #[inline]
    pub(super) fn next_sector(&mut self, options: &LoadOptions) -> u64 {
        self.random.below(self.blocks) * (options.size as u64 / 512)
    }

    /// Notes when the request `tag` was submitted. `None`: the ring was full.
    ///
    /// # Errors
    /// [`LoadError::Options`]: the ring was full.
    #[inline]
    pub(super) fn note(&mut self, tag: Option<u16>, at: Instant) -> Result<(), LoadError> {
        let full = LoadError::Options("depth exceeds what the ring can hold");
        self.submitted[usize::from(tag.ok_or(full)?)] = at;
        Ok(())
    }
}

/// The requests that one thread has seen complete so far.
pub(super) struct Seen {
    latencies: Latencies,
    /// When the last answers came; the clock is read once for all answers of a turn.
    pub(super) last: Instant,
    pub(super) failures: u64,
    /// When the load ends.
    end: Instant,
}

impl Seen {
    /// No results yet, for a load that ends at `end`.
    pub(super) fn new(end: Instant) -> Self {
        Self { latencies: Latencies::new(), last: now(), failures: 0, end }
    }

    /// True if more requests are to be submitted.
    #[inline]
    pub(super) fn goes_on(&self) -> bool {
        self.last < self.end && self.failures == 0
    }

    /// Records that a request completed at the time `last`.
    #[inline]
    pub(super) fn answered<Q>(&mut self, lane: &Lane<Q>, tag: u16, is_ok: bool) {
        if !is_ok {
            self.failures += 1;
        } else if self.last < self.end {
            self.latencies.record(self.last - lane.submitted[usize::from(tag)]);
        }
    }

    /// The latencies of all completed requests.
    ///
    /// # Errors
    /// [`LoadError::Requests`]: some failed.
    pub(super) fn result(self) -> Result<Latencies, LoadError> {
        match self.failures {
            0 => Ok(self.latencies),
            failed => Err(LoadError::Requests { failed, errno: rustix::io::Errno::IO }),
        }
    }
}

/// Deals the lanes to threads, and drives them by `drive` until the end of the load.
///
/// # Errors
/// As `drive`.
pub(super) fn timed<L: Send>(
    options: &LoadOptions,
    lanes: Vec<L>,
    drive: impl Fn(Vec<L>, Instant) -> Result<Latencies, LoadError> + Sync,
) -> Result<LoadResult, LoadError> {
    let (cpu, start) = (own_cpu_seconds(), now());
    let end = start + options.duration;
    let parties = options.deal(lanes.into_iter());
    let outcome = super::run_parties(parties, |lanes| drive(lanes, end))?;
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), own_cpu_seconds() - cpu);
    // Neither the requests that come back after the end count, nor the wait for them.
    let seconds = seconds.min(options.duration.as_secs_f64());
    Ok(LoadResult::new(&outcome, seconds, cpu, options.seed))
}
