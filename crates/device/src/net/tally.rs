//! `Tally`: adds up a burst's packets, bytes and segmented packets, before they are added to the
//! counters.

use manyring_backend::net::Sent;
use manyring_engine::stats::QueueStats;
use manyring_wire::net::{HDR_GSO_NONE, RawNetHeader};

/// The counts of some frames.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) packets: u64,
    pub(super) bytes: u64,
    pub(super) gso: u64,
}

impl Tally {
    #[inline]
    pub(super) fn add(&mut self, header: &RawNetHeader, len: usize) {
        self.packets += 1;
        self.bytes += len as u64;
        self.gso += u64::from(header.gso_type != HDR_GSO_NONE);
    }

    /// Counts a finished packet of `len` bytes.
    #[inline]
    pub(super) fn add_plain(&mut self, len: usize) {
        self.packets += 1;
        self.bytes += len as u64;
    }

    /// Adds the sums to the counters of frames that were passed on.
    #[inline]
    pub(super) fn store(&self, stats: &QueueStats) {
        stats.packets.add(self.packets);
        stats.bytes_passed.add(self.bytes);
        if self.gso > 0 {
            stats.gso_packets.add(self.gso);
        }
    }
}

/// Counts the joined frames and the newly steered flows of a burst.
#[inline(never)]
pub(super) fn count_gains(sent: &Sent, stats: &QueueStats) {
    stats.steered_flows.add(sent.steered as u64);
    stats.merged_packets.add(sent.merged.packets as u64);
    stats.merged_frames.add(sent.merged.frames as u64);
}
