//! `Frames`: a burst of frames, each with a header in memory of ours and a payload of a guest.

use super::{FRAMES_MAX, Token};
use manyring_memory::{Gather, GuestSlice, Mapping, MemoryError, Pieces, total_len};
use manyring_wire::net::head::HEAD_SIZE_MAX;
use manyring_wire::net::{HEADER_SIZE, RawHeader};
use std::ops::Range;
use std::sync::Arc;
use zerocopy::transmute;

/// A frame of a burst.
#[derive(Clone, Debug)]
struct Frame {
    slices: Range<usize>,
    /// Bytes without the header.
    len: usize,
    token: Token,
}

/// A burst of frames. Each has a checked header in memory of ours, then slices of guest memory.
#[derive(Debug)]
pub struct Frames {
    list: Vec<Frame>,
    /// The slices of all frames. The headers lie in memory of ours, so that the guest cannot change
    /// them after the check. The payload stays mapped as long as it is listed.
    slices: Gather,
    /// Bytes of our memory for each frame.
    own_len: usize,
}

impl Frames {
    /// An empty burst with room for [`FRAMES_MAX`].
    ///
    /// # Errors
    /// [`MemoryError::Map`]: the host has no memory for the headers.
    pub fn new() -> Result<Self, MemoryError> {
        Self::with_own(FRAMES_MAX, HEADER_SIZE)
    }

    /// An empty burst with room for one joined frame.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub(crate) fn for_joined() -> Result<Self, MemoryError> {
        Self::with_own(1, HEADER_SIZE + HEAD_SIZE_MAX)
    }

    fn with_own(count: usize, own_len: usize) -> Result<Self, MemoryError> {
        let headers = Mapping::anonymous((count * own_len) as u64)?;
        let slices = Gather::new(Arc::new(headers));
        Ok(Self { list: Vec::with_capacity(count), slices, own_len })
    }

    /// Adds a joined frame, the only frame of its burst: `header` and `head`, then each of
    /// `payloads` without its own head, which is as long as `head`. False if there is no room.
    ///
    /// # Panics
    /// If the burst holds frames of another snapshot.
    pub(crate) fn push_joined<'a>(
        &mut self,
        header: &RawHeader,
        head: &[u8],
        payloads: impl Iterator<Item = Pieces<'a>>,
    ) -> bool {
        let size = HEADER_SIZE + head.len();
        if !self.list.is_empty() || size > self.own_len || !self.slices.push_own(0, size) {
            return false;
        }
        let (first, behind) = self.slices.as_slices()[0].split_at(HEADER_SIZE);
        first.write_from(zerocopy::IntoBytes::as_bytes(header));
        behind.write_from(head);
        payloads.for_each(|pieces| self.slices.extend(pieces, head.len()));
        let len = total_len(self.slices.as_slices()) - HEADER_SIZE as u64;
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        self.list.push(Frame { slices: 0..self.slices.len(), len, token: 0 });
        true
    }

    /// Adds a frame with token 0: `header`, then the `len` bytes that follow the first `skip` bytes
    /// of `pieces`. False if the burst is full.
    ///
    /// # Panics
    /// If the burst holds frames of another snapshot.
    #[inline]
    pub fn push(
        &mut self,
        header: &RawHeader,
        pieces: Pieces<'_>,
        skip: usize,
        len: usize,
    ) -> bool {
        self.push_as(0, header, pieces, skip, len)
    }

    /// Adds a frame under this token, as [`Self::push`] does, with the same panic.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a rare caller must not make it a call for others")]
    pub fn push_as(
        &mut self,
        token: Token,
        header: &RawHeader,
        pieces: Pieces<'_>,
        skip: usize,
        len: usize,
    ) -> bool {
        let index = self.list.len();
        if index == FRAMES_MAX {
            return false;
        }
        let start = self.slices.len();
        if !self.slices.push_own(index * self.own_len, HEADER_SIZE) {
            return false;
        }
        let bytes: &[u8; HEADER_SIZE] = zerocopy::transmute_ref!(header);
        self.slices.as_slices()[start].write_array(bytes);
        self.slices.extend(pieces, skip);
        self.list.push(Frame { slices: start..self.slices.len(), len, token });
        true
    }

    /// Forgets all frames.
    #[inline]
    pub fn clear(&mut self) {
        self.list.clear();
        self.slices.clear();
    }

    /// Forgets all frames, and lets go of the snapshot that they came from.
    pub fn release(&mut self) {
        self.list.clear();
        self.slices.release();
    }

    /// Frames in the burst.
    #[must_use]
    #[inline]
    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// Header and payload of frame `index`, as an iovec.
    #[must_use]
    #[inline]
    pub fn slices(&self, index: usize) -> &[GuestSlice<'_>] {
        let slices = self.slices.as_slices();
        self.list.get(index).map_or(&[], |frame| &slices[frame.slices.clone()])
    }

    /// The payload of frame `index`, as the parts of a joined frame are given.
    #[must_use]
    pub fn payload(&self, index: usize) -> Option<Pieces<'_>> {
        let Frame { slices, .. } = self.list.get(index)?;
        self.slices.pieces(slices.start + 1..slices.end)
    }

    /// The header of frame `index`; zeroes if there is no such frame.
    #[must_use]
    pub fn header(&self, index: usize) -> RawHeader {
        let own = self.slices.own().slice(index * self.own_len, HEADER_SIZE);
        let bytes = own.filter(|_| index < self.count()).and_then(|own| own.read_array());
        bytes.map_or_else(RawHeader::default, |bytes: [u8; HEADER_SIZE]| transmute!(bytes))
    }

    /// True once guest memory was cut away under the frames: it has read as zeroes since then.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.slices.is_broken()
    }

    /// The token of frame `index`; 0 if there is no such frame.
    #[must_use]
    pub fn token(&self, index: usize) -> Token {
        self.list.get(index).map_or(0, |frame| frame.token)
    }

    /// Bytes of frame `index` without its header.
    #[must_use]
    #[inline]
    pub fn len(&self, index: usize) -> usize {
        self.list.get(index).map_or(0, |frame| frame.len)
    }
}
