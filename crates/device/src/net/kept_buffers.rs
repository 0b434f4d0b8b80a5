//! `Kept`: holds the buffers of sent frames for a moment, to return them to the driver in a group.
//! `policy/reclaim.rs` decides when, and explains why that can pay.

use crate::policy::reclaim::{GROUP_BYTES_MAX, GROUP_FRAMES_MAX, KEEP_NS_MAX, ReclaimPolicy};
use manyring_engine::stats::QueueStats;
use manyring_queue::{Chain, Chains};
use std::vec::Drain;

/// The chains of the present group, and the policy that decides whether to hold them.
#[derive(Debug)]
pub(super) struct Kept {
    policy: ReclaimPolicy,
    chains: Vec<Chain>,
    /// Bytes of the frames since the group began, and the time at which it began.
    bytes: u64,
    since_ns: u64,
}

impl Kept {
    pub(super) fn new() -> Self {
        Self { policy: ReclaimPolicy::new(), chains: Vec::new(), bytes: 0, since_ns: 0 }
    }

    /// Returns when the held buffers must be returned; `None`: none are held.
    pub(super) fn due_ns(&self) -> Option<u64> {
        (!self.chains.is_empty()).then_some(self.since_ns + KEEP_NS_MAX)
    }

    fn is_due(&self, now_ns: u64) -> bool {
        self.due_ns().is_some_and(|due_ns| now_ns >= due_ns)
    }

    /// Call when a burst of `frames` frames and `bytes` bytes is about to be sent.
    #[inline]
    pub(super) fn on_burst(&mut self, now_ns: u64, frames: u64, bytes: u64) {
        if frames > 0 {
            self.policy.on_burst(now_ns, frames, bytes);
        }
        if self.chains.is_empty() {
            (self.bytes, self.since_ns) = (0, now_ns);
        }
        self.bytes += bytes;
    }

    /// True if the caller must pass the chains of this burst to [`Self::add`].
    #[inline]
    pub(super) fn keeps(&self) -> bool {
        self.policy.keeps()
    }

    pub(super) fn add(&mut self, chains: Drain<'_, Chain>, stats: &QueueStats) {
        stats.buffers_kept.add(chains.len() as u64);
        self.chains.extend(chains);
    }

    /// Returns the group to the driver if it is complete, has waited long enough, or if the policy
    /// no longer holds buffers. Returns the number of chains.
    #[inline]
    pub(super) fn settle(&mut self, queue: &mut impl Chains, now_ns: u64) -> usize {
        let group_max = GROUP_FRAMES_MAX.min(usize::from(queue.size()) / 4);
        let is_complete = self.chains.len() >= group_max || self.bytes >= GROUP_BYTES_MAX;
        if is_complete || !self.keeps() || self.is_due(now_ns) {
            return self.give_back(queue);
        }
        0
    }

    /// Returns all held buffers to the driver. Returns their number.
    pub(super) fn give_back(&mut self, queue: &mut impl Chains) -> usize {
        let count = self.chains.len();
        for chain in self.chains.drain(..) {
            queue.push_used(chain, 0);
        }
        count
    }
}
