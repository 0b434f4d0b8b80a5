//! `Frames`: a burst of frames. Each frame's header lies in the daemon's memory, its payload in a
//! guest's.

use super::{FRAMES_MAX, Token};
use manyring_memory::{Gather, GuestSlice, Mapping, MemoryError, Pieces, total_len};
use manyring_wire::net::head::HEAD_SIZE_MAX;
use manyring_wire::net::{HEADER_SIZE, RawNetHeader};
use std::ops::Range;
use std::sync::Arc;
use zerocopy::transmute;

/// Most bytes of a frame that are copied into a burst of a switch's channel. A shorter frame is
/// copied whole, and its sender may reuse its memory at once.
pub(crate) const INLINE_MAX: usize = 128 - HEADER_SIZE;
/// Bytes of an Ethernet header without a VLAN tag.
pub(crate) const ETHERNET: usize = 14;
/// Token of a frame that was copied whole: its sender is not told of its delivery.
pub(crate) const DONE: Token = Token::MAX;

/// Whether [`Frames::push_plain`] has added a frame, and whether it has copied the frame whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Added {
    /// No frame was added: the caller must use [`Frames::push_lent`].
    Nothing,
    /// The frame was copied whole: its sender may reuse its memory.
    Copied,
    /// The frame was added; its memory stays in use until its token comes back.
    Lent,
}

/// A frame of a burst.
#[derive(Clone, Debug)]
struct Frame {
    slices: Range<usize>,
    /// The length of the frame without its header, in bytes.
    len: usize,
    token: Token,
}

/// A burst of frames. Each has a checked header in the daemon's own memory, then slices of guest
/// memory.
#[derive(Debug)]
pub struct Frames {
    list: Vec<Frame>,
    /// The slices of all frames. The headers lie in the daemon's own memory, so that the guest
    /// cannot change them after the check. The payload stays mapped while it is listed.
    slices: Gather,
    /// The bytes of the daemon's own memory that each frame gets.
    own_len: usize,
}

impl Frames {
    /// Makes an empty burst for at most [`FRAMES_MAX`] frames.
    ///
    /// # Errors
    /// [`MemoryError::Map`]: the host has no memory for the headers.
    pub fn new() -> Result<Self, MemoryError> {
        Self::with_own(FRAMES_MAX, HEADER_SIZE)
    }

    /// Makes an empty burst for one joined frame (`merge.rs`).
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub(crate) fn for_joined() -> Result<Self, MemoryError> {
        Self::with_own(1, HEADER_SIZE + HEAD_SIZE_MAX)
    }

    /// Makes an empty burst for a switch's channel, for at most [`FRAMES_MAX`] frames.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub(crate) fn for_channel() -> Result<Self, MemoryError> {
        Self::with_own(FRAMES_MAX, HEADER_SIZE + INLINE_MAX)
    }

    fn with_own(count: usize, own_len: usize) -> Result<Self, MemoryError> {
        let headers = Mapping::anonymous((count * own_len) as u64)?;
        let slices = Gather::new(Arc::new(headers));
        Ok(Self { list: Vec::with_capacity(count), slices, own_len })
    }

    /// Adds a joined frame, the only frame of its burst: `header` and `head`, then the bytes of
    /// each of `payloads` behind the first `skip`. Returns false if the burst is full.
    ///
    /// # Panics
    /// If the burst has frames of another memory snapshot.
    pub(crate) fn push_joined<'a>(
        &mut self,
        header: &RawNetHeader,
        head: &[u8],
        (skip, payloads): (usize, impl IntoIterator<Item = Pieces<'a>>),
    ) -> bool {
        let size = HEADER_SIZE + head.len();
        if !self.list.is_empty() || size > self.own_len || !self.slices.push_own(0, size) {
            return false;
        }
        let (first, behind) = self.slices.as_slices()[0].split_at(HEADER_SIZE);
        first.write_from(zerocopy::IntoBytes::as_bytes(header));
        behind.write_from(head);
        payloads.into_iter().for_each(|pieces| self.slices.extend(pieces, skip));
        let len = total_len(self.slices.as_slices()) - HEADER_SIZE as u64;
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        self.list.push(Frame { slices: 0..self.slices.len(), len, token: 0 });
        true
    }

    /// Adds a frame with token 0: `header`, then the `len` bytes of `pieces` that follow the first
    /// `skip`. Returns false if the burst is full.
    ///
    /// # Panics
    /// If the burst has frames of another memory snapshot.
    #[inline]
    pub fn push(
        &mut self,
        header: &RawNetHeader,
        pieces: Pieces<'_>,
        skip: usize,
        len: usize,
    ) -> bool {
        self.push_as(0, header, pieces, skip, len)
    }

    /// Adds a frame with this token, as [`Self::push`] does. Panics as that does.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a rare caller must not make it a call for others")]
    pub fn push_as(
        &mut self,
        token: Token,
        header: &RawNetHeader,
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

    /// True if frames of `from` can be added by [`Self::push_lent`].
    pub(crate) fn takes_from(&self, from: &Self) -> bool {
        self.list.len() < FRAMES_MAX && self.slices.is_compatible(&from.slices)
    }

    /// Adds frame `index` of another burst. Copies its header and `head`, the first bytes of the
    /// frame as they were checked, into the daemon's own memory. A short frame is copied whole. The
    /// rest of a longer frame stays in the guest's memory, and the frame gets a token. Returns
    /// false, and adds nothing, if the burst is full or the frame has no payload.
    #[inline]
    pub(crate) fn push_lent(&mut self, from: &Self, index: usize, head: &[u8]) -> bool {
        let (count, len) = (self.list.len(), from.len(index));
        let Some((header, rest)) = from.slices(index).split_first() else { return false };
        let (own, start) = (count * self.own_len, self.slices.len());
        let is_inline = len <= INLINE_MAX;
        let own_len = if is_inline { len } else { head.len() };
        if count == FRAMES_MAX || own_len > INLINE_MAX || own_len < head.len() {
            return false;
        }
        let payload = if is_inline { None } else { from.payload(index) };
        if !is_inline && payload.is_none() {
            return false;
        }
        if !self.slices.push_own(own, HEADER_SIZE)
            || !self.slices.push_own(own + HEADER_SIZE, own_len)
        {
            return false;
        }
        let slices = self.slices.as_slices();
        slices[start].copy_from(header);
        let (first, behind) = slices[start + 1].split_at(head.len());
        first.write_from(head);
        match payload {
            None => copy_behind(&behind, head.len(), rest),
            Some(payload) => self.slices.extend(payload, head.len()),
        }
        let token = if is_inline { DONE } else { from.token(index) };
        self.list.push(Frame { slices: start..self.slices.len(), len, token });
        true
    }

    /// Fast path of [`Self::push_lent`] for a frame in one piece. Calls `admits` with copies of the
    /// Ethernet header and the virtio-net header; `admits` may refuse the frame. Unless `may_lend`,
    /// adds only frames of at most [`INLINE_MAX`] bytes.
    #[inline]
    pub(crate) fn push_plain(
        &mut self,
        from: &Self,
        index: usize,
        may_lend: bool,
        admits: impl FnOnce(&[u8; ETHERNET], &[u8; HEADER_SIZE]) -> bool,
    ) -> Added {
        let (Some(frame), start) = (from.list.get(index), self.slices.len()) else {
            return Added::Nothing;
        };
        let (count, len) = (self.list.len(), frame.len);
        let Some([header, payload]) = from.slices.as_slices().get(frame.slices.clone()) else {
            return Added::Nothing;
        };
        if count == FRAMES_MAX || (len > INLINE_MAX && !may_lend) {
            return Added::Nothing;
        }
        let (Some(header), Some(head)) = (header.read_array(), payload.read_array()) else {
            return Added::Nothing;
        };
        if !admits(&head, &header) {
            return Added::Nothing;
        }
        let own = count * self.own_len;
        if len > INLINE_MAX {
            return self.push_rest(from, index, own, (&header, &head));
        }
        let own = self.slices.push_own_pair::<HEADER_SIZE>(own, len);
        let Some([to_header, to_payload]) = own else { return Added::Nothing };
        to_header.write_array(&header);
        to_payload.copy_from(payload);
        // Write the checked bytes over the copied payload: the delivered bytes are then the checked
        // ones.
        to_payload.write_array(&head);
        self.list.push(Frame { slices: start..start + 2, len, token: DONE });
        Added::Copied
    }

    /// The case of [`Self::push_plain`] in which only the headers of a frame are copied, to offset
    /// `own`.
    #[inline]
    fn push_rest(
        &mut self,
        from: &Self,
        index: usize,
        own: usize,
        (header, head): (&[u8; HEADER_SIZE], &[u8; ETHERNET]),
    ) -> Added {
        let start = self.slices.len();
        let Some(rest) = from.payload(index).filter(|_| self.slices.is_compatible(&from.slices))
        else {
            return Added::Nothing;
        };
        let own = self.slices.push_own_pair::<HEADER_SIZE>(own, ETHERNET);
        let Some([to_header, to_head]) = own else { return Added::Nothing };
        to_header.write_array(header);
        to_head.write_array(head);
        self.slices.extend(rest, ETHERNET);
        let (len, token) = (from.len(index), from.token(index));
        self.list.push(Frame { slices: start..self.slices.len(), len, token });
        Added::Lent
    }

    /// Drops the first `count` frames. Adds the tokens of those whose senders wait for them to
    /// `passed`. No frame may be added before [`Self::release`].
    pub(crate) fn drop_front(&mut self, count: usize, passed: &mut Vec<Token>) {
        let dropped = self.list.drain(..count.min(self.list.len()));
        passed.extend(dropped.map(|frame| frame.token).filter(|token| *token != DONE));
    }

    /// Returns the tokens of all frames whose senders wait for them.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = Token> {
        self.list.iter().map(|frame| frame.token).filter(|token| *token != DONE)
    }

    /// Removes all frames.
    #[inline]
    pub fn clear(&mut self) {
        self.list.clear();
        self.slices.clear();
    }

    /// Removes all frames, and drops the reference to their memory snapshot.
    pub fn release(&mut self) {
        self.list.clear();
        self.slices.release();
    }

    /// Returns the number of frames in the burst.
    #[must_use]
    #[inline]
    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// Returns header and payload of frame `index`, as an iovec.
    #[must_use]
    #[inline]
    pub fn slices(&self, index: usize) -> &[GuestSlice<'_>] {
        let slices = self.slices.as_slices();
        self.list.get(index).map_or(&[], |frame| &slices[frame.slices.clone()])
    }

    /// Returns the payload of frame `index`; `None` if there is no such frame, or if
    /// `push_lent` has copied a part of it.
    #[must_use]
    pub fn payload(&self, index: usize) -> Option<Pieces<'_>> {
        let Frame { slices, .. } = self.list.get(index)?;
        self.slices.pieces(slices.start + 1..slices.end)
    }

    /// Returns the part of frame `index` that lies in the guest's memory, and the number of bytes
    /// before it, which [`Self::push_lent`] has copied into the burst's own memory.
    pub(crate) fn guest_part(&self, index: usize) -> Option<(usize, Pieces<'_>)> {
        if let Some(payload) = self.payload(index) {
            return Some((0, payload));
        }
        let Range { start, end } = self.list.get(index)?.slices.clone();
        let own = self.slices.as_slices().get(start + 1)?.len();
        Some((own, self.slices.pieces(start + 2..end)?))
    }

    /// Returns the header of frame `index`; zeroes if there is no such frame.
    #[must_use]
    pub fn header(&self, index: usize) -> RawNetHeader {
        let bytes = self.slices(index).first().and_then(GuestSlice::read_array);
        bytes.map_or_else(RawNetHeader::default, |bytes: [u8; HEADER_SIZE]| transmute!(bytes))
    }

    /// True if guest memory under the frames was truncated: it has read as zeroes since then.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.slices.is_broken()
    }

    /// Returns the token of frame `index`; 0 if there is no such frame.
    #[must_use]
    pub fn token(&self, index: usize) -> Token {
        self.list.get(index).map_or(0, |frame| frame.token)
    }

    /// Returns the length of frame `index` without its header, in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self, index: usize) -> usize {
        self.list.get(index).map_or(0, |frame| frame.len)
    }
}

/// Copies the bytes of `sources` behind the first `skip` to `target`.
#[inline]
fn copy_behind(target: &GuestSlice<'_>, skip: usize, sources: &[GuestSlice<'_>]) {
    // Most often a frame lies in one piece.
    if let [only] = sources {
        target.copy_from(&only.split_at(skip).1);
        return;
    }
    let (mut skip, mut target) = (skip, *target);
    for source in sources {
        let (skipped, rest) = source.split_at(skip);
        skip -= skipped.len();
        let copied = target.copy_from(&rest);
        target = target.split_at(copied).1;
    }
}
