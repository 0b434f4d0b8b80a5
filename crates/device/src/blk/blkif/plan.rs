//! `Planned`: a request that was popped in this turn, parsed, and what is to be done with it;
//! `InUse`: the pages of requests in flight.

use super::stages::UNMAPPED;
use manyring_backend::blk::Op;
use manyring_memory::{GrantAccess, GrantError, GrantPage, MemoryError};
use manyring_queue::Chain;
use manyring_wire::xen::blkif::{
    DataOp, Indirect, Kind as Asked, RequestError, SEGMENTS_MAX, Segment,
};
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
    /// The segments lie in the burst's list of them, and were asked for under the same numbers.
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
    /// The numbers under which its pages were asked for.
    pub(super) fn numbers(&self) -> Range<usize> {
        if let Self::Data { segments, .. } = self { segments.clone() } else { 0..0 }
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

#[inline]
pub(super) fn segment_count(kind: &Result<Asked<'_>, RequestError>) -> usize {
    match kind {
        Ok(Asked::Data(data)) => data.segment_count(),
        Ok(Asked::Indirect(indirect)) => indirect.segment_count().into(),
        _ => 0,
    }
}

/// True if the data comes after what was asked for before it.
#[inline]
pub(super) fn is_ordered(op: DataOp) -> bool {
    matches!(op, DataOp::WriteBarrier | DataOp::FlushWrite)
}

/// What the pages of a request are mapped for: a disk's read writes to them.
#[inline]
pub(super) fn access_of(op: DataOp) -> GrantAccess {
    if op == DataOp::Read { GrantAccess::Write } else { GrantAccess::Read }
}

/// Which bytes of its page a segment names.
#[inline]
#[allow(clippy::cast_possible_truncation, reason = "a segment lies inside of its page")]
pub(super) fn bytes_of(segment: &Segment) -> (u32, u32) {
    (segment.offset() as u32, segment.len() as u32)
}

/// The pages that requests in flight use, by slot.
#[derive(Debug, Default)]
pub(super) struct InUse {
    slots: Vec<Few>,
    /// Those behind the first ones of a request.
    more: Vec<Vec<GrantPage>>,
}

/// The first pages of a request: all of one that has its segments itself.
#[derive(Clone, Copy, Debug, Default)]
struct Few {
    count: u32,
    pages: [GrantPage; SEGMENTS_MAX],
}

impl InUse {
    /// No request of the ring's `slots` is in flight.
    pub(super) fn new(slots: u16) -> Self {
        Self { slots: vec![Few::default(); slots.into()], more: Vec::new() }
    }

    /// The request in `slot` uses one more page.
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

    /// Calls `each` for the pages of the request in `slot`, which uses none of them any more.
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
