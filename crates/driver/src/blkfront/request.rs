//! Options of a Xen block front-end, its requests, and their results.

use manyring_wire::xen::blkif::{Abi, BlkifStatus};
use std::time::Duration;

/// Options of a Xen block front-end.
#[derive(Clone, Copy, Debug)]
pub struct BlkfrontOptions {
    /// Most queues to use; fewer if the back-end offers fewer.
    pub queues: u32,
    /// Largest size of each ring, in log2 of its pages; smaller if the back-end offers less.
    pub ring_page_order: u32,
    /// The layout of the requests.
    pub abi: Abi,
    /// Grant the pages of the buffers permanently, if the back-end keeps grants mapped.
    pub persistent: bool,
    /// Most segments of an indirect request; 0: send no indirect requests.
    pub indirect_segments: u16,
    /// Largest request in bytes.
    pub buffer_size: u32,
    /// Longest wait for the back-end.
    pub max_wait: Duration,
}

impl Default for BlkfrontOptions {
    /// One queue of one page, persistent grants, indirect requests, of up to 64 KiB.
    fn default() -> Self {
        Self {
            queues: 1,
            ring_page_order: 0,
            abi: Abi::Native,
            persistent: true,
            indirect_segments: 32,
            buffer_size: 64 << 10,
            max_wait: Duration::from_secs(30),
        }
    }
}

/// A request. Sectors are of 512 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XenOp<'a> {
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
    /// A write barrier: after all earlier writes, and before all later ones.
    Barrier {
        /// First sector.
        sector: u64,
        /// The bytes.
        data: &'a [u8],
    },
    /// Writes bytes after all earlier writes have become durable.
    FlushWrite {
        /// First sector.
        sector: u64,
        /// The bytes.
        data: &'a [u8],
    },
    /// Makes all completed writes durable.
    Flush,
    /// Discards sectors.
    Discard {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        count: u64,
        /// All copies of the sectors are erased.
        secure: bool,
    },
}

/// A completed request. Its buffer keeps its data until the next submit on the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XenDone {
    /// The tag that [`super::BlkfrontQueue::submit`] returned.
    pub tag: u16,
    /// The status of the response.
    pub status: BlkifStatus,
}
