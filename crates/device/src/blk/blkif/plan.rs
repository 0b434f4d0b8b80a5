//! `Planned`: a request that was popped and parsed in this turn, with its next action. `InUse`: the
//! pages of requests in flight.

use super::stages::UNMAPPED;
use manyring_backend::blk::Op;
use manyring_memory::{GrantAccess, GrantError, GrantPage, MemoryError};
use manyring_queue::Chain;
use manyring_wire::xen::blkif::{
    BlkifStatus, DataOp, Indirect, Kind as Asked, RequestError, SEGMENTS_MAX, Segment,
};
use rustix::io::Errno;
use std::ops::Range;

/// The fields of a request that its response needs.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) id: u64,
    pub(super) echo: u8,
    /// The most lots that the request's pages can take.
    pub(super) lots: u32,
}

/// The next action for a request that was popped in this turn.
#[derive(Debug)]
pub(super) enum IoKind {
    /// Answer it with this error, without the disk.
    Answer(Errno),
    Flush,
    /// A write barrier without data.
    Barrier,
    /// A discard or secure erase of a range, in bytes.
    Discard {
        op: Op,
        offset: u64,
        len: u64,
    },
    /// A read or write. `segments` is the range of its segments in the turn's list; its pages have
    /// the same numbers in the list of grants.
    Data {
        op: DataOp,
        sector: u64,
        segments: Range<usize>,
    },
    /// An indirect request whose segments are not read yet.
    Indirect(Indirect),
}

#[derive(Debug)]
pub(super) struct Planned {
    pub(super) chain: Chain,
    pub(super) reply: Reply,
    pub(super) what: IoKind,
}

impl IoKind {
    /// Returns the numbers of the request's segments, which are those of its pages, too.
    pub(super) fn numbers(&self) -> Range<usize> {
        if let Self::Data { segments, .. } = self { segments.clone() } else { 0..0 }
    }

    /// True if the request is a gate: later requests wait for it (`stages.rs`).
    pub(super) fn is_gate(&self) -> bool {
        match self {
            Self::Barrier => true,
            Self::Data { op, .. } => is_ordered(*op),
            _ => false,
        }
    }

    /// True if the process could not map the pages with the request's segments, for lack of
    /// mappings.
    pub(super) fn is_short(&self) -> bool {
        matches!(self, Self::Answer(errno) if *errno == SHORT)
    }
}

/// `EAGAIN` from mapping a request's pages: this process, not the guest, has run out of mappings,
/// so the request is put back into the ring.
pub(super) const SHORT: Errno = Errno::AGAIN;

/// Returns the errno for a page that cannot be mapped: [`UNMAPPED`] fails the request, [`SHORT`]
/// puts it back.
pub(super) fn errno_of(error: GrantError) -> Errno {
    match error {
        GrantError::NoRoom { .. } | GrantError::Memory(MemoryError::Pieces { .. }) => SHORT,
        _ => UNMAPPED,
    }
}

/// Returns the errno with which to answer a request that the ring's format does not allow.
pub(super) fn answer_of(error: &RequestError) -> Errno {
    match error.status() {
        BlkifStatus::Unsupported => Errno::OPNOTSUPP,
        _ => Errno::IO,
    }
}

#[inline]
pub(super) fn segment_count(kind: &Result<Asked<'_>, RequestError>) -> usize {
    match kind {
        Ok(Asked::Data(data)) => data.segment_count(),
        Ok(Asked::Indirect(indirect)) => indirect.segment_count().into(),
        _ => 0,
    }
}

/// True for a write that must follow all requests before it (`stages.rs`).
#[inline]
pub(super) fn is_ordered(op: DataOp) -> bool {
    matches!(op, DataOp::WriteBarrier | DataOp::FlushWrite)
}

/// Returns the access with which the pages of a request are mapped: writable for a read, since the
/// disk writes into them.
#[inline]
pub(super) fn access_of(op: DataOp) -> GrantAccess {
    if op == DataOp::Read { GrantAccess::Write } else { GrantAccess::Read }
}

/// Returns the offset and length of a segment's bytes in its page.
#[inline]
#[allow(clippy::cast_possible_truncation, reason = "a segment lies inside of its page")]
pub(super) fn bytes_of(segment: &Segment) -> (u32, u32) {
    (segment.offset() as u32, segment.len() as u32)
}

/// The pages that requests in flight use, by slot.
#[derive(Debug, Default)]
pub(super) struct InUse {
    slots: Vec<Few>,
    /// The pages of an indirect request beyond the first [`SEGMENTS_MAX`], by slot. Empty until
    /// there is such a request.
    more: Vec<Vec<GrantPage>>,
}

/// The first [`SEGMENTS_MAX`] pages of a request, which are all pages of a request that is not
/// indirect.
#[derive(Clone, Copy, Debug, Default)]
struct Few {
    count: u32,
    pages: [GrantPage; SEGMENTS_MAX],
}

impl InUse {
    /// Makes the table for a ring with this many slots.
    pub(super) fn new(slots: u16) -> Self {
        Self { slots: vec![Few::default(); slots.into()], more: Vec::new() }
    }

    /// Adds a page to those that the request in `slot` uses.
    #[inline]
    pub(super) fn add(&mut self, slot: u16, page: GrantPage) {
        let few = &mut self.slots[usize::from(slot)];
        match few.pages.get_mut(few.count as usize) {
            Some(place) => {
                *place = page;
                few.count += 1;
            }
            None => self.add_more(slot, page),
        }
    }

    #[cold]
    fn add_more(&mut self, slot: u16, page: GrantPage) {
        if self.more.is_empty() {
            self.more.resize_with(self.slots.len(), Vec::new);
        }
        self.more[usize::from(slot)].push(page);
    }

    /// Removes all pages of the request in `slot`, and calls `each` for every page.
    #[inline]
    pub(super) fn take(&mut self, slot: u16, mut each: impl FnMut(GrantPage)) {
        let few = &mut self.slots[usize::from(slot)];
        let count = std::mem::take(&mut few.count) as usize;
        few.pages.iter().take(count).for_each(|page| each(*page));
        if count == SEGMENTS_MAX && !self.more.is_empty() {
            self.more[usize::from(slot)].drain(..).for_each(each);
        }
    }
}
