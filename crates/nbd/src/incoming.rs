//! `ReplyReader`: parses the stream of replies, and copies the data of reads into guest memory.

use manyring_memory::GuestSlice;
use manyring_wire::nbd::{
    Chunk, ChunkKind, CommandKind, ErrorHead, Hole, NbdError, Reply, ReplyError,
};

/// The most error chunks in one reply; a correct server sends one.
const ERRORS_MAX: u32 = 16;

/// A command that waits for its reply.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) token: u32,
    pub(super) kind: CommandKind,
    /// Offset of the command's first byte: on the disk (`offset`) and in the request (`skip`).
    pub(super) offset: u64,
    pub(super) skip: u64,
    pub(super) len: u32,
    /// How many bytes of data the reply has brought so far.
    pub(super) got: u32,
    pub(super) error: Option<ReplyError>,
    /// How many error chunks the reply has had so far.
    pub(super) errors: u32,
}

/// Which part of a reply the next bytes of the stream belong to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum ReplyReader {
    /// The head of a reply.
    #[default]
    Head,
    /// `left` more bytes of a read's data, which belong at offset `at` of the request.
    Data { cookie: u64, at: u64, left: u32, is_last: bool },
    /// `left` more bytes of an error's text, which is skipped.
    Rest { cookie: u64, left: u32, is_last: bool },
}

/// The result of [`ReplyReader::next`]: how many bytes it took, and what they mean for the reply.
#[derive(Debug)]
pub(super) struct Next {
    pub(super) consumed: usize,
    pub(super) reply: NextReply,
}

#[derive(Debug)]
pub(super) enum NextReply {
    /// The bytes end inside a part that must be read as a whole: wait for more.
    Needs,
    /// A part was read, and the bytes behind it may hold another one.
    GoesOn,
    /// The reply to the command with this cookie is complete.
    Ends(u64),
}

impl Next {
    const NEEDS: Self = Self { consumed: 0, reply: NextReply::Needs };
}

impl ReplyReader {
    /// Takes the next part of the stream from the beginning of `bytes`. `found` returns the command
    /// of a cookie, `slices` the guest memory of a request by its token.
    ///
    /// # Errors
    /// [`NbdError::Reply`]: the server has broken the protocol.
    #[inline]
    pub(super) fn next<'s, 'a>(
        &mut self,
        bytes: &[u8],
        found: impl FnOnce(u64) -> Option<&'s mut Sent>,
        slices: impl Fn(u32) -> &'a [GuestSlice<'a>],
    ) -> Result<Next, NbdError> {
        match *self {
            Self::Head => self.head(bytes, found, slices),
            Self::Data { cookie, at, left, is_last } => {
                let n = bytes.len().min(left as usize);
                let sent = found(cookie).ok_or(NbdError::Reply("of an unknown command"))?;
                fill(slices(sent.token), at, &bytes[..n]);
                // `n` is no more than `left`, which has 32 bits.
                let count = u32::try_from(n).unwrap_or(left);
                sent.got += count;
                let (at, left) = (at + u64::from(count), left - count);
                *self = Self::Data { cookie, at, left, is_last };
                Ok(self.went_on(cookie, n, (left, is_last)))
            }
            Self::Rest { cookie, left, is_last } => {
                let n = bytes.len().min(left as usize);
                let left = left - u32::try_from(n).unwrap_or(left);
                *self = Self::Rest { cookie, left, is_last };
                Ok(self.went_on(cookie, n, (left, is_last)))
            }
        }
    }

    /// The result after `n` bytes of a payload were taken, and `left` are still to come.
    fn went_on(&mut self, cookie: u64, n: usize, (left, is_last): (u32, bool)) -> Next {
        let reply = match (left, is_last) {
            (0, true) => NextReply::Ends(cookie),
            (0, false) => NextReply::GoesOn,
            _ => NextReply::Needs,
        };
        if left == 0 {
            *self = Self::Head;
        }
        Next { consumed: n, reply }
    }

    fn head<'s, 'a>(
        &mut self,
        bytes: &[u8],
        found: impl FnOnce(u64) -> Option<&'s mut Sent>,
        slices: impl Fn(u32) -> &'a [GuestSlice<'a>],
    ) -> Result<Next, NbdError> {
        let Some(replied) = Reply::parse(bytes)? else { return Ok(Next::NEEDS) };
        let payload = &bytes[replied.size..];
        let unknown = NbdError::Reply("to a command that was not sent, or was answered");
        match replied.reply {
            Reply::Simple { error, cookie } => {
                let sent = found(cookie).ok_or(unknown)?;
                sent.error = sent.error.or(error);
                let mut reply = NextReply::Ends(cookie);
                if error.is_none() && sent.kind == CommandKind::Read {
                    if sent.got > 0 {
                        return Err(NbdError::Reply("two kinds of replies to one read"));
                    }
                    let (at, left) = (sent.skip, sent.len);
                    *self = Self::Data { cookie, at, left, is_last: true };
                    reply = NextReply::GoesOn;
                }
                Ok(Next { consumed: replied.size, reply })
            }
            Reply::Chunk(chunk) => {
                let sent = found(chunk.cookie).ok_or(unknown)?;
                let next = self.chunk(chunk, payload, sent, slices)?;
                Ok(next.map_or(Next::NEEDS, |(taken, reply)| Next {
                    consumed: replied.size + taken,
                    reply,
                }))
            }
        }
    }

    /// Handles a chunk of a structured reply, of which the payload may begin with a head of its own
    /// (an offset, a hole, an error). Returns how many bytes of the payload were taken; `None`:
    /// that head is not complete yet.
    #[allow(clippy::cast_possible_truncation, reason = "some bytes")]
    fn chunk<'a>(
        &mut self,
        chunk: Chunk,
        payload: &[u8],
        sent: &mut Sent,
        slices: impl Fn(u32) -> &'a [GuestSlice<'a>],
    ) -> Result<Option<(usize, NextReply)>, NbdError> {
        let Chunk { kind, is_last, cookie, len } = chunk;
        let end = if is_last { NextReply::Ends(cookie) } else { NextReply::GoesOn };
        Ok(match kind {
            ChunkKind::None => Some((0, end)),
            ChunkKind::Data => {
                let Some((offset, _)) = payload.split_first_chunk() else { return Ok(None) };
                let left = len - 8;
                let at = place(sent, u64::from_be_bytes(*offset), left)?;
                *self = Self::Data { cookie, at, left, is_last };
                Some((8, NextReply::GoesOn))
            }
            ChunkKind::Hole => {
                let Some((hole, _)) = payload.split_first_chunk() else { return Ok(None) };
                let Hole { offset, len } = Hole::parse(hole);
                let at = place(sent, offset, len)?;
                zero(slices(sent.token), at, len);
                sent.got += len;
                Some((Hole::SIZE, end))
            }
            ChunkKind::Error => {
                let Some((head, _)) = payload.split_first_chunk() else { return Ok(None) };
                sent.errors += 1;
                if sent.errors > ERRORS_MAX {
                    return Err(NbdError::Reply("too many errors for one command"));
                }
                sent.error = sent.error.or(Some(ErrorHead::parse(head).0));
                let left = len - ErrorHead::SIZE as u32;
                *self = Self::Rest { cookie, left, is_last };
                Some((ErrorHead::SIZE, NextReply::GoesOn))
            }
        })
    }
}

/// Checks that data of a reply lie inside the range that the command has read, and returns their
/// offset in the request.
fn place(sent: &Sent, offset: u64, len: u32) -> Result<u64, NbdError> {
    if sent.kind != CommandKind::Read {
        return Err(NbdError::Reply("data for a command that reads none"));
    }
    let inside = offset.checked_sub(sent.offset);
    let inside = inside.filter(|at| {
        let end = at.checked_add(len.into());
        end.is_some_and(|end| end <= u64::from(sent.len))
    });
    // Count the bytes, so that no sequence of chunks brings more than the command has asked for.
    let fits = len > 0 && sent.len - sent.got >= len;
    let at = inside.filter(|_| fits).ok_or(NbdError::Reply("data outside of what was read"))?;
    Ok(sent.skip + at)
}

/// Copies `bytes` into the slices, from offset `skip` on.
fn fill(slices: &[GuestSlice<'_>], skip: u64, mut bytes: &[u8]) {
    let mut skip = usize::try_from(skip).unwrap_or(usize::MAX);
    for slice in slices {
        if bytes.is_empty() {
            return;
        }
        let (before, rest) = slice.split_at(skip);
        skip -= before.len();
        bytes = &bytes[rest.write_from(bytes)..];
    }
}

/// Zeroes `len` bytes of the slices, from offset `skip` on.
fn zero(slices: &[GuestSlice<'_>], skip: u64, len: u32) {
    let (mut skip, mut left) = (usize::try_from(skip).unwrap_or(usize::MAX), len as usize);
    for slice in slices {
        let (before, rest) = slice.split_at(skip);
        skip -= before.len();
        let part = rest.split_at(left).0;
        part.fill_zero();
        left -= part.len();
        if left == 0 {
            return;
        }
    }
}
