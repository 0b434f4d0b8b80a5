//! `Request`: what a front-end asks for, checked once; `RawRequest`: the copy it is parsed from.

use super::{
    Abi, DISCARD_SECURE, ENTRY_WORDS, INDIRECT_PAGES_MAX, INDIRECT_SEGMENTS_MAX, OP_DISCARD,
    OP_FLUSH_DISKCACHE, OP_INDIRECT, OP_READ, OP_WRITE, OP_WRITE_BARRIER, SEGMENT_SIZE,
    SEGMENTS_MAX, SEGMENTS_PER_PAGE, Segment, SegmentError, Status,
};

/// What the back-end has offered and what the disk is: the borders that requests are checked
/// against. Capacity may change while the disk is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size of the disk in sectors of 512 bytes.
    pub sectors: u64,
    /// log2 of the sectors of 512 bytes in one logical block of the disk (`sector-size`).
    pub block_shift: u32,
    /// `mode`: may the front-end write?
    pub writable: bool,
    /// `feature-barrier`.
    pub barrier: bool,
    /// `feature-flush-cache`.
    pub flush: bool,
    /// `feature-discard`.
    pub discard: bool,
    /// `discard-secure`: without it the flag of a request is ignored.
    pub discard_secure: bool,
    /// `feature-max-indirect-segments`; 0 if it is not offered.
    pub indirect_segments_max: u16,
}

/// Why a request is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum RequestError {
    #[error("operation {operation} is not offered")]
    NotOffered { operation: u8 },
    #[error("operation {operation} of no sectors")]
    Empty { operation: u8 },
    #[error("{count} segments, {max} at most")]
    Segments { count: u16, max: u16 },
    #[error(transparent)]
    Segment(#[from] SegmentError),
    #[error("indirect request of the operation {operation}: only reads and writes can be")]
    IndirectOperation { operation: u8 },
    #[error("{count} segments in the pages of an indirect request of {expected}")]
    IndirectCount { count: usize, expected: u16 },
    #[error("{count} sectors at sector {sector} of a disk of {sectors}")]
    Range { sector: u64, count: u64, sectors: u64 },
    #[error("{count} sectors at sector {sector}: not in whole blocks of {block} sectors")]
    Alignment { sector: u64, count: u64, block: u64 },
    #[error("write to a disk that is read-only")]
    ReadOnly,
}

impl RequestError {
    /// True if no sound front-end sends such a request, whatever the disk is: the ring is then to
    /// be stopped. The others are answered with [`RequestError::status`]; a sound front-end meets
    /// them when the disk has become smaller, or when it tries what was not offered.
    #[must_use]
    pub const fn is_fault(&self) -> bool {
        match self {
            Self::Segments { .. }
            | Self::Segment(_)
            | Self::IndirectOperation { .. }
            | Self::IndirectCount { .. } => true,
            Self::NotOffered { .. }
            | Self::Empty { .. }
            | Self::Range { .. }
            | Self::Alignment { .. }
            | Self::ReadOnly => false,
        }
    }

    /// What the response says.
    #[must_use]
    pub const fn status(&self) -> Status {
        match self {
            Self::NotOffered { .. } => Status::Unsupported,
            _ => Status::Error,
        }
    }
}

/// A request that is not served, with what its response has to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request: {error}")]
pub struct Refusal {
    /// That of the request.
    pub id: u64,
    /// The operation of the response.
    pub echo: u8,
    /// Why.
    pub error: RequestError,
}

/// A request, parsed: its counts, segments and sectors are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What the front-end calls it; its response has the same.
    pub id: u64,
    /// The operation of its response: its own, or the inner one of an indirect request.
    pub echo: u8,
    /// What is asked for.
    pub kind: Kind,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Data moves to or from the segments that the request carries.
    Data(Data),
    /// Data moves to or from segments that lie in pages of their own.
    Indirect(Indirect),
    /// All writes that were answered before become durable.
    Flush,
    /// A write barrier without data: all writes before it are done and durable when it is answered,
    /// and none after it begins before that.
    Barrier,
    /// Sectors are not needed any more.
    Discard {
        /// First sector.
        sector: u64,
        /// How many, at least one.
        count: u64,
        /// All copies are to be erased.
        secure: bool,
    },
}

/// What happens with the data of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataOp {
    /// From the disk into the guest's pages.
    Read,
    /// From the guest's pages to the disk.
    Write,
    /// As a write, after all earlier writes and before all later ones.
    WriteBarrier,
    /// As a write, after all earlier writes have become durable.
    FlushWrite,
}

/// A read or write with up to [`SEGMENTS_MAX`] segments of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data {
    /// What happens with the data.
    pub op: DataOp,
    /// First sector.
    pub sector: u64,
    count: u8,
    segments: [Segment; SEGMENTS_MAX],
}

impl Data {
    /// The segments, at least one.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments[..usize::from(self.count)]
    }
}

/// A read or write whose segments lie in pages of their own, which are yet to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Indirect {
    /// [`DataOp::Read`] or [`DataOp::Write`].
    pub op: DataOp,
    /// First sector.
    pub sector: u64,
    count: u16,
    grefs: [u32; INDIRECT_PAGES_MAX],
}

impl Indirect {
    /// Segments in all pages, at least one.
    #[must_use]
    pub const fn segment_count(&self) -> u16 {
        self.count
    }

    /// The grant references of the pages that hold the segments.
    #[must_use]
    pub fn grefs(&self) -> &[u32] {
        &self.grefs[..usize::from(self.count).div_ceil(SEGMENTS_PER_PAGE)]
    }

    /// Bytes of the page at `index` that hold segments; no other byte of it is to be read.
    #[must_use]
    pub fn page_bytes(&self, index: usize) -> usize {
        let before = index * SEGMENTS_PER_PAGE;
        let here = usize::from(self.count).saturating_sub(before).min(SEGMENTS_PER_PAGE);
        here * SEGMENT_SIZE
    }

    /// Checks the segments that were read from the pages: there are as many as the request said,
    /// and their sectors lie on the disk. Returns how many sectors they have.
    ///
    /// # Errors
    /// [`RequestError::IndirectCount`], [`RequestError::Range`], [`RequestError::Alignment`].
    pub fn check(&self, segments: &[Segment], limits: &Limits) -> Result<u64, RequestError> {
        if segments.len() != usize::from(self.count) {
            let (count, expected) = (segments.len(), self.count);
            return Err(RequestError::IndirectCount { count, expected });
        }
        limits.check_data(self.sector, segments)
    }
}

impl Limits {
    /// Are all sectors on the disk?
    fn check_range(&self, sector: u64, count: u64) -> Result<(), RequestError> {
        match sector.checked_add(count) {
            Some(end) if end <= self.sectors => Ok(()),
            _ => Err(RequestError::Range { sector, count, sectors: self.sectors }),
        }
    }

    /// Are the sectors of these segments whole blocks of the disk?
    fn check_data(&self, sector: u64, segments: &[Segment]) -> Result<u64, RequestError> {
        let count = segments.iter().map(|segment| u64::from(segment.sectors())).sum();
        self.check_range(sector, count)?;
        let block = 1_u64.checked_shl(self.block_shift).unwrap_or(u64::MAX);
        if block > 1 {
            let whole = |n: u64| n.is_multiple_of(block);
            let all = segments.iter().all(|segment| whole(segment.sectors().into()));
            // A segment of a block larger than a page cannot be a whole one: the sum is judged.
            if !whole(sector) || !whole(count) || (block <= 8 && !all) {
                return Err(RequestError::Alignment { sector, count, block });
            }
        }
        Ok(count)
    }
}

/// A request as it lies in the ring, copied out. What lies behind its
/// [`size`](super::Layout::request_size) is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawRequest {
    abi: Abi,
    words: [u32; ENTRY_WORDS],
}

impl RawRequest {
    /// The request that `words` are, in the layout of `abi`.
    #[must_use]
    pub const fn new(abi: Abi, words: [u32; ENTRY_WORDS]) -> Self {
        Self { abi, words }
    }

    /// The words, as many as belong to the request.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words[..self.abi.layout().request_size(self.words[0]).div_ceil(4)]
    }

    /// `id`.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.u64_at(self.abi.layout().id)
    }

    /// A request of `segments`. More of them than the request can carry are left out, but its
    /// count tells of all: that is how a hostile front-end lies.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "a count of 8 bits is what there is")]
    pub fn data(abi: Abi, operation: u8, id: u64, sector: u64, segments: &[Segment]) -> Self {
        let mut raw = Self::head(abi, [operation, segments.len() as u8, 0, 0], id, sector);
        let at = abi.layout().segments / 4;
        for (n, segment) in segments.iter().take(SEGMENTS_MAX).enumerate() {
            raw.words[at + 2 * n..at + 2 * n + 2].copy_from_slice(&segment.emit());
        }
        raw
    }

    /// A discard of `count` sectors.
    #[must_use]
    pub fn discard(abi: Abi, flag: u8, id: u64, sector: u64, count: u64) -> Self {
        let mut raw = Self::head(abi, [OP_DISCARD, flag, 0, 0], id, sector);
        raw.put_u64(abi.layout().discard_sectors, count);
        raw
    }

    /// An indirect request of `count` segments, which lie in the pages of `grefs`.
    #[must_use]
    pub fn indirect(
        abi: Abi,
        inner: u8,
        id: u64,
        sector: u64,
        (count, grefs): (u16, &[u32]),
    ) -> Self {
        let [low, high] = count.to_le_bytes();
        let mut raw = Self::head(abi, [OP_INDIRECT, inner, low, high], id, sector);
        let at = abi.layout().indirect_grefs / 4;
        let grefs = &grefs[..grefs.len().min(INDIRECT_PAGES_MAX)];
        raw.words[at..at + grefs.len()].copy_from_slice(grefs);
        raw
    }

    fn head(abi: Abi, head: [u8; 4], id: u64, sector: u64) -> Self {
        let mut raw = Self { abi, words: [0; ENTRY_WORDS] };
        raw.words[0] = u32::from_le_bytes(head);
        raw.put_u64(abi.layout().id, id);
        raw.put_u64(abi.layout().sector, sector);
        raw
    }

    fn u64_at(&self, offset: usize) -> u64 {
        let at = offset / 4;
        u64::from(self.words[at]) | u64::from(self.words[at + 1]) << 32
    }

    #[allow(clippy::cast_possible_truncation, reason = "a number is cut into its two words")]
    fn put_u64(&mut self, offset: usize, value: u64) {
        let at = offset / 4;
        self.words[at] = value as u32;
        self.words[at + 1] = (value >> 32) as u32;
    }
}

impl Request {
    /// Parses a request and checks it against `limits`.
    ///
    /// # Errors
    /// [`Refusal`], which says how the request is to be answered, and whether the front-end is at
    /// fault ([`RequestError::is_fault`]).
    #[inline]
    pub fn parse(raw: &RawRequest, limits: &Limits) -> Result<Self, Refusal> {
        let [operation, count, low, high] = raw.words[0].to_le_bytes();
        let echo = if operation == OP_INDIRECT { count } else { operation };
        let kind = match operation {
            OP_READ => parse_data(raw, DataOp::Read, count, limits),
            OP_WRITE => parse_data(raw, DataOp::Write, count, limits),
            OP_WRITE_BARRIER if limits.barrier => match count {
                0 => Ok(Kind::Barrier),
                _ => parse_data(raw, DataOp::WriteBarrier, count, limits),
            },
            OP_FLUSH_DISKCACHE if limits.flush => match count {
                0 => Ok(Kind::Flush),
                _ => parse_data(raw, DataOp::FlushWrite, count, limits),
            },
            OP_DISCARD if limits.discard => parse_discard(raw, count, limits),
            OP_INDIRECT if limits.indirect_segments_max > 0 => {
                parse_indirect(raw, echo, u16::from_le_bytes([low, high]), limits)
            }
            _ => Err(RequestError::NotOffered { operation }),
        };
        let id = raw.id();
        match kind {
            Ok(kind) => Ok(Self { id, echo, kind }),
            Err(error) => Err(Refusal { id, echo, error }),
        }
    }
}

#[inline]
fn parse_data(
    raw: &RawRequest,
    op: DataOp,
    count: u8,
    limits: &Limits,
) -> Result<Kind, RequestError> {
    let layout = raw.abi.layout();
    if usize::from(count) > SEGMENTS_MAX {
        #[allow(clippy::cast_possible_truncation, reason = "eleven")]
        let max = SEGMENTS_MAX as u16;
        return Err(RequestError::Segments { count: count.into(), max });
    }
    if count == 0 {
        let [operation, ..] = raw.words[0].to_le_bytes();
        return Err(RequestError::Empty { operation });
    }
    let mut segments = [Segment::page(0); SEGMENTS_MAX];
    for (n, segment) in segments[..usize::from(count)].iter_mut().enumerate() {
        let at = layout.segments / 4 + 2 * n;
        *segment = Segment::parse([raw.words[at], raw.words[at + 1]])?;
    }
    if op != DataOp::Read && !limits.writable {
        return Err(RequestError::ReadOnly);
    }
    let data = Data { op, sector: raw.u64_at(layout.sector), count, segments };
    limits.check_data(data.sector, data.segments())?;
    Ok(Kind::Data(data))
}

fn parse_discard(raw: &RawRequest, flag: u8, limits: &Limits) -> Result<Kind, RequestError> {
    let layout = raw.abi.layout();
    let (sector, count) = (raw.u64_at(layout.sector), raw.u64_at(layout.discard_sectors));
    if count == 0 {
        return Err(RequestError::Empty { operation: OP_DISCARD });
    }
    if !limits.writable {
        return Err(RequestError::ReadOnly);
    }
    limits.check_range(sector, count)?;
    let secure = limits.discard_secure && flag & DISCARD_SECURE != 0;
    Ok(Kind::Discard { sector, count, secure })
}

/// An indirect request: what its segments say is checked when they are read.
fn parse_indirect(
    raw: &RawRequest,
    inner: u8,
    count: u16,
    limits: &Limits,
) -> Result<Kind, RequestError> {
    let op = match inner {
        OP_READ => DataOp::Read,
        OP_WRITE => DataOp::Write,
        operation => return Err(RequestError::IndirectOperation { operation }),
    };
    let max = limits.indirect_segments_max.min(INDIRECT_SEGMENTS_MAX);
    if count > max {
        return Err(RequestError::Segments { count, max });
    }
    if count == 0 {
        return Err(RequestError::Empty { operation: OP_INDIRECT });
    }
    if op != DataOp::Read && !limits.writable {
        return Err(RequestError::ReadOnly);
    }
    let layout = raw.abi.layout();
    let sector = raw.u64_at(layout.sector);
    // Each segment has a sector at least.
    limits.check_range(sector, count.into())?;
    let at = layout.indirect_grefs / 4;
    let mut grefs = [0; INDIRECT_PAGES_MAX];
    grefs.copy_from_slice(&raw.words[at..at + INDIRECT_PAGES_MAX]);
    Ok(Kind::Indirect(Indirect { op, sector, count, grefs }))
}
