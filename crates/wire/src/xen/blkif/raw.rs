//! `RawRequest`: the copy of a request, of any layout, that a [`Request`](super::Request) is parsed
//! from.

use super::{Abi, ENTRY_WORDS, INDIRECT_PAGES_MAX, OP_DISCARD, OP_INDIRECT, SEGMENTS_MAX, Segment};

/// A copy of a request as it lies in the ring. The words behind its
/// [`size`](super::Layout::request_size) mean nothing: the buffers of copies are reused, and these
/// words belong to an earlier request.
#[derive(Clone, Copy, Debug)]
pub struct RawRequest {
    pub(super) abi: Abi,
    pub(super) words: [u32; ENTRY_WORDS],
}

impl PartialEq for RawRequest {
    fn eq(&self, other: &Self) -> bool {
        self.abi == other.abi && self.words() == other.words()
    }
}

impl Eq for RawRequest {}

impl RawRequest {
    /// A request from its words, in the layout of `abi`.
    #[must_use]
    pub const fn new(abi: Abi, words: [u32; ENTRY_WORDS]) -> Self {
        Self { abi, words }
    }

    /// The ABI whose layout the request has.
    #[must_use]
    #[inline]
    pub const fn abi(&self) -> Abi {
        self.abi
    }

    /// The words of the request, without those behind its size.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words[..self.abi.layout().request_size(self.words[0]).div_ceil(4)]
    }

    /// All words of the buffer, for a copy of another request of the same layout.
    #[inline]
    pub fn words_mut(&mut self) -> &mut [u32; ENTRY_WORDS] {
        &mut self.words
    }

    /// The field `id`.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.fields().id
    }

    /// The fields of every request, and the words at which a read or write has its segments.
    #[inline]
    pub(super) fn fields(&self) -> RawFields<'_> {
        // The offsets are constants of a layout, so that no access to `words` needs a bounds check.
        const fn fields<const LAYOUT_32: bool>(words: &[u32; ENTRY_WORDS]) -> RawFields<'_> {
            let layout = if LAYOUT_32 { Abi::X86_32.layout() } else { Abi::X86_64.layout() };
            let (_, segments) = words.split_at(layout.segments / 4);
            let (id, sector) = (u64_of(words, layout.id), u64_of(words, layout.sector));
            RawFields { id, sector, segments: segments.as_chunks().0 }
        }
        match self.abi {
            Abi::X86_32 => fields::<true>(&self.words),
            Abi::Native | Abi::X86_64 => fields::<false>(&self.words),
        }
    }

    /// A request with `segments`. Segments that do not fit are left out, but the request's count
    /// includes them: so a hostile front-end can lie.
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

    pub(super) fn u64_at(&self, offset: usize) -> u64 {
        u64_of(&self.words, offset)
    }

    #[allow(clippy::cast_possible_truncation, reason = "a number is cut into its two words")]
    fn put_u64(&mut self, offset: usize, value: u64) {
        let at = offset / 4;
        self.words[at] = value as u32;
        self.words[at + 1] = (value >> 32) as u32;
    }
}

/// The fields of a request, read at the offsets of its layout.
#[derive(Clone, Copy)]
pub(super) struct RawFields<'a> {
    pub(super) id: u64,
    pub(super) sector: u64,
    /// The words of all segments that fit; those behind the request's own segments mean nothing.
    pub(super) segments: &'a [[u32; 2]],
}

#[inline]
const fn u64_of(words: &[u32; ENTRY_WORDS], offset: usize) -> u64 {
    let at = offset / 4;
    words[at] as u64 | (words[at + 1] as u64) << 32
}
