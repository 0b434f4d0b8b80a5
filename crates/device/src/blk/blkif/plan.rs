//! `Planned`: a request that was popped in this turn, parsed, and what is to be done with it.

use super::stages::UNMAPPED;
use manyring_backend::blk::Op;
use manyring_memory::{GrantAccess, GrantError, MemoryError};
use manyring_queue::Chain;
use manyring_wire::xen::blkif::{DataOp, Indirect, Kind as Asked, RequestError, Segment};
use rustix::io::Errno;
use std::ops::Range;

/// What a request is answered with.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) id: u64,
    pub(super) echo: u8,
    /// Lots that its pages can take.
    pub(super) lots: u32,
}

/// What is to be done with a request that was popped in this turn.
#[derive(Debug)]
pub(super) enum What {
    /// It is answered without the disk.
    Answer(Errno),
    Flush,
    /// A write barrier without data.
    Barrier,
    /// In bytes.
    Discard {
        op: Op,
        offset: u64,
        len: u64,
    },
    /// The segments lie in the burst's list of them.
    Data {
        op: DataOp,
        sector: u64,
        segments: Range<usize>,
    },
    /// Its segments are yet to be read.
    Indirect(Indirect),
}

#[derive(Debug)]
pub(super) struct Planned {
    pub(super) chain: Chain,
    pub(super) reply: Reply,
    pub(super) what: What,
}

impl What {
    /// Pages that are mapped for it.
    pub(super) fn pages(&self) -> usize {
        if let Self::Data { segments, .. } = self { segments.len() } else { 0 }
    }

    /// True if the request is a gate (`stages.rs`).
    pub(super) fn is_gate(&self) -> bool {
        match self {
            Self::Barrier => true,
            Self::Data { op, .. } => is_ordered(*op),
            _ => false,
        }
    }

    /// True if there was no room for the pages of its segments.
    pub(super) fn is_short(&self) -> bool {
        matches!(self, Self::Answer(errno) if *errno == SHORT)
    }
}

/// What [`errno_of`] makes of a shortage that is not the front-end's.
pub(super) const SHORT: Errno = Errno::AGAIN;

/// A reference that cannot be mapped fails its request; one for which there is no room does not.
pub(super) fn errno_of(error: GrantError) -> Errno {
    match error {
        GrantError::NoRoom { .. } | GrantError::Memory(MemoryError::Pieces { .. }) => SHORT,
        _ => UNMAPPED,
    }
}

pub(super) fn segment_count(kind: Result<&Asked, RequestError>) -> usize {
    match kind {
        Ok(Asked::Data(data)) => data.segments().len(),
        Ok(Asked::Indirect(indirect)) => indirect.segment_count().into(),
        _ => 0,
    }
}

/// True if the data comes after what was asked for before it.
pub(super) fn is_ordered(op: DataOp) -> bool {
    matches!(op, DataOp::WriteBarrier | DataOp::FlushWrite)
}

/// What the pages of a request are mapped for: a disk's read writes to them.
pub(super) fn access_of(op: DataOp) -> GrantAccess {
    if op == DataOp::Read { GrantAccess::Write } else { GrantAccess::Read }
}

/// Which bytes of its page a segment names.
pub(super) fn bytes_of(segment: &Segment) -> (u32, u32) {
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    (number(segment.offset()), number(segment.len()))
}
