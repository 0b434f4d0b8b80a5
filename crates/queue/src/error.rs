//! `QueueError`: the driver's fault that stopped a queue. The ring latches it; the engine reports
//! it once.

use crate::record::inflight::InflightError;
use crate::record::journal::JournalError;
use manyring_memory::MemoryError;
use manyring_wire::xen::blkif::{RING_PAGE_ORDER_MAX, RequestError};

/// A fault of the driver. The queue stops at it; the session and all other queues go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum QueueError {
    #[error("queue size {size} is not a power of two up to 32768")]
    Size { size: u16 },
    #[error("queue size {size} of a packed ring, 1 to 32768")]
    PackedSize { size: u16 },
    #[error("base {bits:#x} of a packed ring of {size}")]
    PackedBase { bits: u32, size: u16 },
    #[error("base {bits:#x} of a split ring, which has an index of 16 bits")]
    Base { bits: u32 },
    #[error("ring is not in memory: {0}")]
    Ring(MemoryError),
    #[error("available index jumped from {from} to {to} in a ring of {size}")]
    AvailJump { from: u16, to: u16, size: u16 },
    #[error("{available} more chains while {in_flight} are in flight in a ring of {size}")]
    Overfull { available: u16, in_flight: u16, size: u16 },
    #[error("chain {head} is available again while it is in flight")]
    InFlight { head: u16 },
    #[error("descriptor index {index} in a table of {size}")]
    DescriptorIndex { index: u16, size: u16 },
    #[error("descriptor chain is longer than {max} descriptors: it loops")]
    ChainLength { max: usize },
    #[error("descriptor chain is in more than {max} pieces")]
    ChainSlices { max: usize },
    #[error("descriptor chain is longer than 2^32 bytes")]
    ChainBytes,
    #[error("device-readable descriptor after a device-writable one")]
    ReadableAfterWritable,
    #[error("indirect descriptor without the feature")]
    IndirectNotNegotiated,
    #[error("indirect descriptor inside an indirect table")]
    IndirectNested,
    #[error("indirect descriptor with the NEXT flag")]
    IndirectNext,
    #[error("indirect table of {len} bytes")]
    IndirectSize { len: u32 },
    #[error("descriptor: {0}")]
    Buffer(MemoryError),
    #[error("request: {0}")]
    Request(&'static str),
    #[error("ring of 2^{order} pages, 2^{RING_PAGE_ORDER_MAX} at most")]
    PageOrder { order: u32 },
    #[error(
        "req_prod is {req_prod} in a ring of {size}: {req_cons} requests were taken, {rsp_prod} \
         answered"
    )]
    ReqProd { req_prod: u32, req_cons: u32, rsp_prod: u32, size: u16 },
    #[error("the ring cannot be taken over: {0}")]
    Journal(JournalError),
    #[error("the in-flight region does not fit the ring: {0}")]
    Inflight(InflightError),
    #[error("a ring of granted pages stays where it was mapped")]
    Granted,
    #[error("request: {0}")]
    Blkif(RequestError),
}

impl From<MemoryError> for QueueError {
    fn from(error: MemoryError) -> Self {
        Self::Ring(error)
    }
}
