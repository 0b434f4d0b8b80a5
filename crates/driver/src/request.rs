//! Options of a block driver, its requests, and their results.

use manyring_wire::blk::VIRTIO_BLK_F_FLUSH;
use manyring_wire::vhost_user::{PROTOCOL_F_CONFIG, PROTOCOL_F_MQ, PROTOCOL_F_REPLY_ACK};
use manyring_wire::virtio::{VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_VERSION_1};
use std::time::Duration;

/// Options of a block driver.
#[derive(Clone, Debug)]
pub struct BlkDriverOptions {
    /// Number of queues to use.
    pub queues: u16,
    /// Number of entries of each queue.
    pub queue_size: u16,
    /// Virtio features to negotiate if they are offered. Starting fails if a ring feature is not.
    pub features: u64,
    /// Vhost-user protocol features to negotiate if they are offered.
    pub protocol_features: u64,
    /// Largest request in bytes.
    pub buffer_size: u32,
    /// Most bytes of one data descriptor.
    pub segment_size: u32,
    /// Offset in its page of the data of every second request, in bytes (0: aligned).
    pub skew: u64,
    /// The first index of each ring.
    pub base: u16,
    /// Bytes of guest memory to leave free, for whatever a test adds.
    pub spare: u64,
    /// Longest wait for the socket to appear.
    pub max_wait: Duration,
}

impl Default for BlkDriverOptions {
    /// One queue of 128, EVENT_IDX and INDIRECT_DESC, requests of up to 64 KiB in one segment.
    fn default() -> Self {
        Self {
            queues: 1,
            queue_size: 128,
            features: VIRTIO_F_EVENT_IDX
                | VIRTIO_F_INDIRECT_DESC
                | VIRTIO_F_VERSION_1
                | VIRTIO_BLK_F_FLUSH,
            protocol_features: PROTOCOL_F_MQ | PROTOCOL_F_CONFIG | PROTOCOL_F_REPLY_ACK,
            buffer_size: 64 << 10,
            segment_size: 64 << 10,
            skew: 0,
            base: 0,
            spare: 64 << 10,
            max_wait: Duration::from_secs(30),
        }
    }
}

/// A request. Sectors are of 512 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverOp<'a> {
    /// Reads `len` bytes.
    Read {
        /// First sector.
        sector: u64,
        /// Bytes.
        len: usize,
    },
    /// Writes bytes.
    Write {
        /// First sector.
        sector: u64,
        /// The bytes.
        data: &'a [u8],
    },
    /// Writes `len` bytes of whatever the request's buffer holds (load generators).
    WriteAny {
        /// First sector.
        sector: u64,
        /// Bytes.
        len: usize,
    },
    /// Makes all completed writes durable.
    Flush,
    /// Discards sectors.
    Discard {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        count: u32,
    },
    /// Writes zeroes over sectors.
    WriteZeroes {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        count: u32,
        /// The sectors may be deallocated.
        unmap: bool,
    },
    /// Erases sectors securely.
    SecureErase {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        count: u32,
    },
    /// Reads the device id string.
    Id,
}

/// A completed request. Its buffer keeps its data until the next submit on the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The tag that [`crate::BlkDriverQueue::submit`] returned.
    pub tag: u16,
    /// The status byte; 255 if the device wrote none.
    pub status: u8,
    /// Bytes that the device reports as written, including the status byte.
    pub written: u32,
}
