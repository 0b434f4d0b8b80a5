//! The end of a turn of a Xen ring: requests that are done are answered, and requests with further
//! steps (`stages.rs`) take the next one.

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

/// The status that answers a request which failed with `errno`.
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
    /// that have some. If the second part of the result is true, the caller must hand these steps
    /// to the disk by [`Self::go_on`].
    #[inline]
    pub(super) fn complete(
        &mut self,
        ring: &mut BackRing,
        stats: &QueueStats,
        (now_ns, clock): (u64, impl Fn() -> u64),
    ) -> (Completed, bool) {
        let mut has_more = self.requests.reap();
        // Before the steps: the last step of a gate opens it, and requests behind it can be popped.
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
        // Requests that waited in the ring for pages or for the gate can be popped now. The driver
        // was not asked for a kick while they waited: take another turn.
        if freed > 0 && (self.release_held() || was_gated) {
            has_more = true;
        }
        // Unmap now, when all responses of the turn are written and none is published: a front-end
        // that sees a response may end the grants of its request.
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

    /// Answers the remaining requests, if the host has failed one or some wait for space.
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
        let has_more = requests.room.note(ring.aside(), stats);
        let finished = requests.finish(stats, (clock, true), |request, result, _, _| {
            let_go(&request);
            respond(ring, request, result);
        });
        let Finished { count, lost, .. } = finished;
        Completed { count, freed: count + aside, lost, has_more }
    }

    /// Hands the next steps of requests to the disk. Returns true if there were any: the queue must
    /// then take another turn, to reap the completed ones.
    #[inline]
    pub(super) fn go_on(&mut self, disk: Option<&mut DiskRing>) -> bool {
        self.requests.start(disk)
    }

    /// Takes the requests that have a further step out of the disk's completions, and adds their
    /// next steps to the burst.
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

    /// At the end of a turn, unmaps grants that were unused for long, and updates the counters.
    #[inline]
    pub(super) fn tend(&mut self, worked: bool, now_ns: u64, stats: &QueueStats) {
        let purged = self.grants.purge(now_ns);
        if worked || purged > 0 {
            self.count(stats);
        }
        // A queue without work may sleep after this turn: note when it must wake to purge again.
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
        // The other counters change only together with one of these, so not while every reference
        // is found mapped.
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
