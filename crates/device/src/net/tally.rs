//! `Tally`: packets, bytes and segmented packets of a burst, before the counters get them.

use manyring_backend::net::Sent;
use manyring_engine::stats::QueueStats;
use manyring_wire::net::{HDR_GSO_NONE, RawHeader};

/// Frames as the counters count them.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) packets: u64,
    pub(super) bytes: u64,
    pub(super) gso: u64,
}

impl Tally {
    #[inline]
    pub(super) fn add(&mut self, header: &RawHeader, len: usize) {
        self.packets += 1;
        self.bytes += len as u64;
        self.gso += u64::from(header.gso_type != HDR_GSO_NONE);
    }

    /// Adds a finished packet of `len` bytes.
    #[inline]
    pub(super) fn add_plain(&mut self, len: usize) {
        self.packets += 1;
        self.bytes += len as u64;
    }

    /// Adds all of it to the counters of what was passed on.
    #[inline]
    pub(super) fn store(&self, stats: &QueueStats) {
        stats.packets.add(self.packets);
        stats.bytes_passed.add(self.bytes);
        if self.gso > 0 {
            stats.gso_packets.add(self.gso);
        }
    }
}

/// Counts what the frames of a burst have spared the host.
#[inline(never)]
pub(super) fn count_gains(sent: &Sent, stats: &QueueStats) {
    stats.steered_flows.add(sent.steered as u64);
    stats.merged_packets.add(sent.merged.packets as u64);
    stats.merged_frames.add(sent.merged.frames as u64);
}
