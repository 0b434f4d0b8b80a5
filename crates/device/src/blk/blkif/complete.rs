//! The end of a turn of a Xen ring: completed requests are answered, and requests with further
//! steps (`stages.rs`) begin the next one.

use super::plan::Reply;
use super::queue::BlkifQueue;
use super::stages::Step;
use crate::blk::pending::InFlight;
use crate::blk::requests::{Completed, Finished};
use manyring_backend::blk::Op;
use manyring_backend::sys::uring::Ring as DiskRing;
use manyring_engine::stats::QueueStats;
use manyring_memory::{GrantAccess, LastHit};
use manyring_queue::Ring;
use manyring_queue::blkif::BackRing;
use manyring_wire::xen::blkif::{BlkifStatus, Response};
use rustix::io::Errno;

/// Returns the response status of a request that failed with `errno`.
#[cold]
#[inline(never)]
fn status_of(errno: Errno) -> BlkifStatus {
    if errno == Errno::OPNOTSUPP { BlkifStatus::Unsupported } else { BlkifStatus::Error }
}

/// Writes the response to a request.
#[inline(always)]
#[allow(clippy::inline_always, reason = "the rare caller must not make it a call for the other")]
fn respond(ring: &mut BackRing, request: InFlight<Reply>, result: Result<(), Errno>) {
    let (chain, Reply { id, echo: operation, .. }) = (request.chain, request.reply);
    let status = result.map_or_else(status_of, |()| BlkifStatus::Okay);
    ring.push_response(chain, Response { id, operation, status });
}

impl BlkifQueue {
    /// Ends a turn of the disk: answers completed requests, and prepares the next steps of requests
    /// that have further steps. If the second value is true, the caller must submit these steps to
    /// the disk by [`Self::go_on`].
    #[inline]
    pub(super) fn complete(
        &mut self,
        ring: &mut BackRing,
        stats: &QueueStats,
        (now_ns, clock): (u64, impl Fn() -> u64),
    ) -> (Completed, bool) {
        let mut has_more = self.requests.reap();
        // Read these states before the steps are taken: the last step of a gate opens it, and then
        // requests behind the gate can be popped.
        let (is_busy, was_gated) = (self.stages.is_busy(), self.stages.is_gated());
        if is_busy {
            self.take_steps();
        }
        let Self { requests, in_use, grants, lots, .. } = self;
        let finished = requests.finish(stats, (&clock, false), |request, result, _, _| {
            *lots -= request.reply.lots;
            in_use.take(request.chain.slot(), |page| grants.let_go(page, now_ns));
            respond(ring, request, result);
        });
        let Finished { mut count, mut lost, needs_heed } = finished;
        let mut freed = count;
        if needs_heed {
            let failed = self.answer_failed(ring, stats, (now_ns, clock));
            (count, freed, lost) = (count + failed.count, freed + failed.freed, failed.lost);
            has_more |= failed.has_more;
        }
        // Take another turn: requests that waited in the ring for pages or for the gate can be
        // popped now, and the driver was asked for no kick while they waited.
        if freed > 0 && (self.release_held() || was_gated) {
            has_more = true;
        }
        // Unmap now, when all responses of the turn are written but not published: once a front-end
        // sees a response, it may end the grants of the request.
        self.grants.unmap_released();
        if is_busy
            && self.stages.is_gated()
            && ring.in_flight() + ring.aside() == 1
            && let Some(token) = self.stages.others_are_done()
        {
            self.requests.resubmit(token, (Op::Flush, 0, 0));
        }
        (Completed { count, freed, lost, has_more }, is_busy)
    }

    /// Answers the remaining completed requests, when some of them failed on the host or wait for
    /// space.
    #[cold]
    #[inline(never)]
    fn answer_failed(
        &mut self,
        ring: &mut BackRing,
        stats: &QueueStats,
        (turn_ns, clock): (u64, impl Fn() -> u64),
    ) -> Completed {
        let Self { requests, in_use, grants, lots, .. } = self;
        let mut let_go = |request: &InFlight<Reply>| {
            *lots -= request.reply.lots;
            in_use.take(request.chain.slot(), |page| grants.let_go(page, turn_ns));
        };
        let can_wait = (stats, ring.can_set_aside());
        let aside = requests.heed_host(can_wait, clock(), |request| {
            let_go(&request);
            ring.set_aside(request.chain);
        });
        let has_more = requests.waiters.note(ring.aside(), stats);
        let finished = requests.finish(stats, (clock, true), |request, result, _, _| {
            let_go(&request);
            respond(ring, request, result);
        });
        let Finished { count, lost, .. } = finished;
        Completed { count, freed: count + aside, lost, has_more }
    }

    /// Submits the next steps of requests to the disk. Returns true if there were any: the queue
    /// must then take another turn to reap their completions.
    #[inline]
    pub(super) fn go_on(&mut self, disk: Option<&mut DiskRing>) -> bool {
        self.requests.start(disk)
    }

    /// Removes the completions of requests with a further step from the list of completions, and
    /// adds these steps to the burst.
    #[cold]
    fn take_steps(&mut self) {
        let steps = self.stages.take_steps(self.requests.done());
        self.requests.burst().slices().restart(self.grants.pages().memory());
        for (token, step) in steps {
            match step {
                Step::Submit(op, offset, len) => self.requests.resubmit(token, (op, offset, len)),
                Step::Write(op, offset, len) => {
                    let mut last = LastHit::default();
                    for (page, bytes) in &self.stages.pieces {
                        let slices = self.requests.burst().slices();
                        let access = GrantAccess::Read;
                        let found = self.grants.resolve(*page, *bytes, access, &mut last, slices);
                        debug_assert!(found.is_ok(), "pages in use stay mapped: {found:?}");
                    }
                    self.requests.resubmit(token, (op, offset, len));
                }
            }
        }
    }

    /// Ends a turn: unmaps grants that were not used for long, and updates the counters.
    #[inline]
    pub(super) fn tend(&mut self, worked: bool, now_ns: u64, stats: &QueueStats) {
        let purged = self.grants.purge(now_ns);
        if worked || purged > 0 {
            self.count(stats);
        }
        // The queue may sleep after this turn: note when it must wake to unmap grants again.
        if worked {
            if self.is_tended {
                self.purge_at_ns = None;
                self.is_tended = false;
            }
        } else if !self.is_tended || self.purge_at_ns.is_some_and(|at_ns| now_ns >= at_ns) {
            self.purge_at_ns = self.grants.purge_due_ns();
            self.is_tended = true;
        }
    }

    #[inline]
    fn count(&mut self, stats: &QueueStats) {
        let (new, old) = (self.grants.counters(), self.counted);
        if new.hits != old.hits {
            stats.grant_hits.add(new.hits - old.hits);
            self.counted.hits = new.hits;
        }
        // The other counters change only together with one of these two. So skip them while every
        // reference was found mapped.
        if (new.misses, new.purged) != (old.misses, old.purged) {
            self.count_others(stats);
        }
    }

    #[cold]
    fn count_others(&mut self, stats: &QueueStats) {
        let (new, old) = (self.grants.counters(), self.counted);
        stats.grants_mapped.set(new.persistent);
        for (counter, new, old) in [
            (&stats.grant_misses, new.misses, old.misses),
            (&stats.grants_transient, new.transient, old.transient),
            (&stats.grants_refused, new.refused, old.refused),
            (&stats.grants_purged, new.purged, old.purged),
        ] {
            if new != old {
                counter.add(new - old);
            }
        }
        self.counted = new;
    }
}
