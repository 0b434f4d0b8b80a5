//! `DriverError`: the errors of the guest's side.

use manyring_memory::{GrantError, MemoryError};
use manyring_queue::{QueueError, RingFeatures};
use rustix::io::Errno;
use std::io;

/// An error of the guest's side.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum DriverError {
    #[error("socket: {0}")]
    Io(#[from] io::Error),
    #[error("system: {0}")]
    System(#[from] Errno),
    #[error("guest memory: {0}")]
    Memory(#[from] MemoryError),
    #[error("grants: {0}")]
    Grants(#[from] GrantError),
    #[error("ring: {0}")]
    Queue(#[from] QueueError),
    #[error("no room for {len} bytes in the arena")]
    ArenaFull { len: u64 },
    #[error("the back-end does not offer features {missing:#x}")]
    Features { missing: u64 },
    #[error("ring {index} serves {serves:?}, and the features that were set say {set:?}")]
    RingFeatures { index: u32, serves: RingFeatures, set: RingFeatures },
    #[error("request {request} was refused")]
    Refused { request: u32 },
    #[error("request {request} was answered by {answer} with {size} bytes")]
    Reply { request: u32, answer: u32, size: usize },
    #[error("a request of {len} bytes in buffers of {max}")]
    TooLong { len: usize, max: usize },
    #[error("the ring is full")]
    RingFull,
    #[error("no used buffer in time")]
    Timeout,
    #[error("the device returned a buffer and did not call")]
    LostCall,
    #[error("a frame of {buffers} buffers of which {visible} are visible")]
    Split { buffers: u16, visible: u16 },
    #[error("a received frame whose first buffer has {written} bytes, no whole header")]
    ShortFrame { written: u32 },
    #[error("there is no control queue")]
    NoControlQueue,
    #[error("the device answered with status {0}")]
    Status(u8),
    #[error("the back-end answered request {id:#x} with operation {operation}: none such is open")]
    Response { id: u64, operation: u8 },
    #[error("the back-end answered with {0:?}")]
    XenStatus(manyring_wire::xen::blkif::BlkifStatus),
    #[error("the back-end has answered and holds grant reference {gref} mapped")]
    StillMapped { gref: u32 },
    #[error("xenstore: {0}")]
    Store(String),
}
