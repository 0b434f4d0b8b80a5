//! `Request`: a front-end's request, checked once.

use super::raw::{RawFields, RawRequest};
use super::{
    BlkifSegmentError, BlkifStatus, DISCARD_SECURE, INDIRECT_PAGES_MAX, INDIRECT_SEGMENTS_MAX,
    OP_DISCARD, OP_FLUSH_DISKCACHE, OP_INDIRECT, OP_READ, OP_WRITE, OP_WRITE_BARRIER, SEGMENT_SIZE,
    SEGMENTS_MAX, SEGMENTS_PER_PAGE, Segment,
};

/// What requests are checked against: the features that the back-end has offered, and the size and
/// block size of the disk. The size may change while the disk is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size of the disk in sectors of 512 bytes.
    pub sectors: u64,
    /// log2 of the number of 512-byte sectors in a logical block of the disk (`sector-size`).
    pub block_shift: u32,
    /// `mode`: the front-end may write.
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
    Segment(#[from] BlkifSegmentError),
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
    /// True if no correct front-end sends such a request, whatever the disk is: the ring must be
    /// stopped. Otherwise the request is answered with [`RequestError::status`]. A correct
    /// front-end causes these errors when the disk has become smaller, or when it tries a feature
    /// that was not offered.
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

    /// The status of the response to a request with this error.
    #[must_use]
    pub const fn status(&self) -> BlkifStatus {
        match self {
            Self::NotOffered { .. } => BlkifStatus::Unsupported,
            _ => BlkifStatus::Error,
        }
    }
}

/// A request that is refused, with the fields that its response needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request: {error}")]
pub struct RefusedRequest {
    /// The id of the request.
    pub id: u64,
    /// The operation that the response repeats.
    pub echo: u8,
    /// Why the request is refused.
    pub error: RequestError,
}

/// A request, parsed: its counts, segments and sectors are checked. The segments stay in the copy
/// of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The id that the front-end gave to the request; the response repeats it.
    pub id: u64,
    /// The operation that the response repeats: the request's own, or an indirect request's inner
    /// one.
    pub echo: u8,
    /// The operation and its data.
    pub kind: Kind<'a>,
}

/// The operation of a request, with its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind<'a> {
    /// Data moves to or from the segments that the request carries.
    Data(Data<'a>),
    /// Data moves to or from segments that lie in pages of their own.
    Indirect(Indirect),
    /// All writes that were answered before this request become durable.
    Flush,
    /// A write barrier without data. When it is answered, all earlier writes are done and durable,
    /// and no later write has begun.
    Barrier,
    /// The front-end does not need the sectors any more.
    Discard {
        /// First sector.
        sector: u64,
        /// Number of sectors, at least one.
        count: u64,
        /// True: all copies of the sectors must be erased.
        secure: bool,
    },
}

/// The direction of a request's data, and its order with other writes.
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
pub struct Data<'a> {
    /// The direction of the data, and their order with other writes.
    pub op: DataOp,
    /// First sector.
    pub sector: u64,
    /// Two words for each segment, which are checked.
    segments: &'a [[u32; 2]],
}

impl<'a> Data<'a> {
    /// Number of segments, at least one.
    #[must_use]
    #[inline]
    pub const fn segment_count(&self) -> usize {
        self.segments.len()
    }

    /// The segments.
    #[inline]
    pub fn segments(&self) -> impl ExactSizeIterator<Item = Segment> + 'a {
        self.segments.iter().map(|words| Segment::parsed(*words))
    }
}

/// A read or write whose segments lie in pages of their own, which were not read yet.
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
    /// Number of segments in all pages, at least one.
    #[must_use]
    pub const fn segment_count(&self) -> u16 {
        self.count
    }

    /// The grant references of the pages that hold the segments.
    #[must_use]
    pub fn grefs(&self) -> &[u32] {
        &self.grefs[..usize::from(self.count).div_ceil(SEGMENTS_PER_PAGE)]
    }

    /// How many bytes of the page at `index` hold segments. No other byte of the page may be read.
    #[must_use]
    pub fn page_bytes(&self, index: usize) -> usize {
        let before = index * SEGMENTS_PER_PAGE;
        let here = usize::from(self.count).saturating_sub(before).min(SEGMENTS_PER_PAGE);
        here * SEGMENT_SIZE
    }

    /// Checks the segments that were read from the pages: their number must be the request's, and
    /// their sectors must lie on the disk. Returns how many sectors they have in all.
    ///
    /// # Errors
    /// [`RequestError::IndirectCount`], [`RequestError::Range`], [`RequestError::Alignment`].
    pub fn check(&self, segments: &[Segment], limits: &Limits) -> Result<u64, RequestError> {
        if segments.len() != usize::from(self.count) {
            let (count, expected) = (segments.len(), self.count);
            return Err(RequestError::IndirectCount { count, expected });
        }
        let count = segments.iter().map(|segment| u64::from(segment.sectors())).sum();
        limits.check_data(self.sector, count, segments.iter().copied())?;
        Ok(count)
    }
}

impl Limits {
    /// Fails unless all `count` sectors from `sector` on lie on the disk.
    #[inline]
    fn check_range(&self, sector: u64, count: u64) -> Result<(), RequestError> {
        match sector.checked_add(count) {
            Some(end) if end <= self.sectors => Ok(()),
            _ => Err(RequestError::Range { sector, count, sectors: self.sectors }),
        }
    }

    /// Fails unless all sectors lie on the disk and are whole logical blocks.
    #[inline]
    fn check_data(
        &self,
        sector: u64,
        count: u64,
        segments: impl Iterator<Item = Segment>,
    ) -> Result<(), RequestError> {
        self.check_range(sector, count)?;
        if self.block_shift == 0 { Ok(()) } else { self.check_blocks(sector, count, segments) }
    }

    fn check_blocks(
        &self,
        sector: u64,
        count: u64,
        mut segments: impl Iterator<Item = Segment>,
    ) -> Result<(), RequestError> {
        let block = 1_u64.checked_shl(self.block_shift).unwrap_or(u64::MAX);
        let whole = |n: u64| n.is_multiple_of(block);
        // A segment is at most one page. It cannot hold a block larger than that, so only the sum
        // of the segments is checked then.
        let are_whole = block > 8 || segments.all(|segment| whole(segment.sectors().into()));
        if !whole(sector) || !whole(count) || !are_whole {
            return Err(RequestError::Alignment { sector, count, block });
        }
        Ok(())
    }
}

impl<'a> Request<'a> {
    /// Parses a request and checks it against `limits`.
    ///
    /// # Errors
    /// [`RefusedRequest`]: how to answer the request, and whether the front-end is at fault
    /// ([`RequestError::is_fault`]).
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a look before must not make it a call for the turn")]
    pub fn parse(raw: &'a RawRequest, limits: &Limits) -> Result<Self, RefusedRequest> {
        let [operation, count, low, high] = raw.words[0].to_le_bytes();
        let echo = if operation == OP_INDIRECT { count } else { operation };
        let fields = raw.fields();
        let data = |op| match parse_data(&fields, op, [operation, count], limits) {
            Ok(data) => Ok(Kind::Data(data)),
            Err(error) => Err(error),
        };
        let kind = match operation {
            OP_READ => data(DataOp::Read),
            OP_WRITE => data(DataOp::Write),
            OP_WRITE_BARRIER if limits.barrier => match count {
                0 => Ok(Kind::Barrier),
                _ => data(DataOp::WriteBarrier),
            },
            OP_FLUSH_DISKCACHE if limits.flush => match count {
                0 => Ok(Kind::Flush),
                _ => data(DataOp::FlushWrite),
            },
            OP_DISCARD if limits.discard => parse_discard(raw, count, limits),
            OP_INDIRECT if limits.indirect_segments_max > 0 => {
                parse_indirect(raw, echo, u16::from_le_bytes([low, high]), limits)
            }
            _ => Err(RequestError::NotOffered { operation }),
        };
        let id = fields.id;
        match kind {
            Ok(kind) => Ok(Self { id, echo, kind }),
            Err(error) => Err(RefusedRequest { id, echo, error }),
        }
    }
}

#[inline]
fn parse_data<'a>(
    fields: &RawFields<'a>,
    op: DataOp,
    [operation, count]: [u8; 2],
    limits: &Limits,
) -> Result<Data<'a>, RequestError> {
    let Some(segments) = fields.segments[..SEGMENTS_MAX].get(..usize::from(count)) else {
        #[allow(clippy::cast_possible_truncation, reason = "eleven")]
        let max = SEGMENTS_MAX as u16;
        return Err(RequestError::Segments { count: count.into(), max });
    };
    if segments.is_empty() {
        return Err(RequestError::Empty { operation });
    }
    let mut sectors = 0;
    for words in segments {
        sectors += u64::from(Segment::parse(*words)?.sectors());
    }
    if op != DataOp::Read && !limits.writable {
        return Err(RequestError::ReadOnly);
    }
    let data = Data { op, sector: fields.sector, segments };
    limits.check_data(data.sector, sectors, data.segments())?;
    Ok(data)
}

fn parse_discard<'a>(
    raw: &RawRequest,
    flag: u8,
    limits: &Limits,
) -> Result<Kind<'a>, RequestError> {
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

/// Parses an indirect request. Its segments are checked when they are read from their pages.
fn parse_indirect<'a>(
    raw: &RawRequest,
    inner: u8,
    count: u16,
    limits: &Limits,
) -> Result<Kind<'a>, RequestError> {
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
    // Each segment has at least one sector.
    limits.check_range(sector, count.into())?;
    let at = layout.indirect_grefs / 4;
    let mut grefs = [0; INDIRECT_PAGES_MAX];
    grefs.copy_from_slice(&raw.words[at..at + INDIRECT_PAGES_MAX]);
    Ok(Kind::Indirect(Indirect { op, sector, count, grefs }))
}
