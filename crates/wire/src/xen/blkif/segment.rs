//! `Segment`: a part of one page of the guest, as a request or an indirect page names it.

use super::{PAGE_SIZE, SECTOR_SIZE, SECTORS_PER_PAGE};

/// Bytes of a segment; the same in every ABI.
pub const SEGMENT_SIZE: usize = 8;
/// Most segments of one indirect page.
pub const SEGMENTS_PER_PAGE: usize = PAGE_SIZE / SEGMENT_SIZE;

/// A segment that lies outside of its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("segment of the sectors {first} to {last} of a page of {SECTORS_PER_PAGE}")]
pub struct BlkifSegmentError {
    /// `first_sect`.
    pub first: u8,
    /// `last_sect`.
    pub last: u8,
}

/// A range of sectors in one page: at least one sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    gref: u32,
    first: u8,
    last: u8,
}

impl Segment {
    /// The sectors `first` to `last`, both included, of the page that `gref` grants.
    ///
    /// # Errors
    /// [`BlkifSegmentError`]: the sectors end before they begin, or behind the page.
    #[inline]
    pub const fn new(gref: u32, first: u8, last: u8) -> Result<Self, BlkifSegmentError> {
        if first > last || last >= SECTORS_PER_PAGE {
            return Err(BlkifSegmentError { first, last });
        }
        Ok(Self { gref, first, last })
    }

    /// A whole page.
    #[must_use]
    pub const fn page(gref: u32) -> Self {
        Self { gref, first: 0, last: SECTORS_PER_PAGE - 1 }
    }

    /// Parses the two words of a segment.
    ///
    /// # Errors
    /// As for [`Segment::new`].
    #[inline]
    pub const fn parse(words: [u32; 2]) -> Result<Self, BlkifSegmentError> {
        let [first, last, ..] = words[1].to_le_bytes();
        Self::new(words[0], first, last)
    }

    /// The segment from two words that [`Self::parse`] has accepted before.
    #[inline]
    pub(super) const fn parsed(words: [u32; 2]) -> Self {
        let [first, last, ..] = words[1].to_le_bytes();
        debug_assert!(first <= last && last < SECTORS_PER_PAGE, "segment was not parsed");
        Self { gref: words[0], first, last }
    }

    /// Parses the segments in `bytes`, which were copied out of an indirect page. Bytes behind the
    /// last whole segment are ignored.
    ///
    /// # Errors
    /// As for [`Segment::new`], of the first segment that is wrong.
    pub fn parse_page(bytes: &[u8]) -> impl Iterator<Item = Result<Self, BlkifSegmentError>> {
        bytes.chunks_exact(SEGMENT_SIZE).map(|chunk| {
            let word = |at: usize| {
                u32::from_le_bytes([chunk[at], chunk[at + 1], chunk[at + 2], chunk[at + 3]])
            };
            Self::parse([word(0), word(4)])
        })
    }

    /// The two words of this segment.
    #[must_use]
    pub const fn emit(self) -> [u32; 2] {
        [self.gref, u32::from_le_bytes([self.first, self.last, 0, 0])]
    }

    /// The bytes of this segment, for an indirect page.
    #[must_use]
    pub fn emit_bytes(self) -> [u8; SEGMENT_SIZE] {
        let [low, high] = self.emit().map(u32::to_le_bytes);
        [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]]
    }

    /// The grant reference of the page.
    #[must_use]
    #[inline]
    pub const fn gref(self) -> u32 {
        self.gref
    }

    /// Number of sectors in this segment.
    #[must_use]
    #[inline]
    pub const fn sectors(self) -> u8 {
        self.last - self.first + 1
    }

    /// Byte offset in the page of the segment's first sector.
    #[must_use]
    #[inline]
    pub const fn offset(self) -> usize {
        self.first as usize * crate::host_size(SECTOR_SIZE)
    }

    /// Number of bytes in this segment.
    #[must_use]
    #[inline]
    pub const fn len(self) -> usize {
        self.sectors() as usize * crate::host_size(SECTOR_SIZE)
    }

    /// Always false: a segment has at least one sector.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        false
    }
}
