//! Commands and replies of the transmission phase.

use super::{NbdError, u16_at, u32_at, u64_at};

const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_MAGIC: u32 = 0x668e_33ef;

/// Bytes of a command, without the data of a write.
pub const COMMAND_SIZE: usize = 28;
const SIMPLE_SIZE: usize = 16;
const STRUCTURED_SIZE: usize = 20;
/// Most bytes of the head of a reply; its payload follows.
pub const REPLY_SIZE_MAX: usize = STRUCTURED_SIZE;

/// `NBD_REPLY_FLAG_DONE`: the last chunk of its reply.
const DONE: u16 = 1;
const CHUNK_NONE: u16 = 0;
const CHUNK_DATA: u16 = 1;
const CHUNK_HOLE: u16 = 2;
const CHUNK_ERROR: u16 = 1 << 15 | 1;
const CHUNK_ERROR_OFFSET: u16 = 1 << 15 | 2;
const CHUNK_IS_ERROR: u16 = 1 << 15;
/// Most bytes of an error chunk's payload: its head, a message, an offset.
const ERROR_MAX: u32 = 6 + 4096 + 8;

/// The operation of a command (`NBD_CMD_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum CommandKind {
    /// `NBD_CMD_READ`
    Read = 0,
    /// `NBD_CMD_WRITE`; the data follow.
    Write = 1,
    /// `NBD_CMD_DISC`: the client leaves; no reply.
    Disconnect = 2,
    /// `NBD_CMD_FLUSH`: every write that was answered before becomes durable.
    Flush = 3,
    /// `NBD_CMD_TRIM`
    Trim = 4,
    /// `NBD_CMD_WRITE_ZEROES`
    WriteZeroes = 6,
}

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// The operation.
    pub kind: CommandKind,
    /// `FLAG_*`.
    pub flags: u16,
    /// The client's number for the command; the reply carries the same number.
    pub cookie: u64,
    /// Offset of the first byte on the disk.
    pub offset: u64,
    /// Number of bytes on the disk.
    pub len: u32,
}

impl Command {
    /// The bytes of the command.
    #[must_use]
    #[inline]
    pub fn emit(&self) -> [u8; COMMAND_SIZE] {
        let mut out = [0; COMMAND_SIZE];
        out[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.to_be_bytes());
        out[6..8].copy_from_slice(&(self.kind as u16).to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..24].copy_from_slice(&self.offset.to_be_bytes());
        out[24..].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// The command in these bytes, as a server reads it; `None` if they are no command.
    #[must_use]
    pub fn parse(bytes: &[u8; COMMAND_SIZE]) -> Option<Self> {
        if u32_at(bytes, 0) != REQUEST_MAGIC {
            return None;
        }
        let kind = match u16_at(bytes, 6) {
            0 => CommandKind::Read,
            1 => CommandKind::Write,
            2 => CommandKind::Disconnect,
            3 => CommandKind::Flush,
            4 => CommandKind::Trim,
            6 => CommandKind::WriteZeroes,
            _ => return None,
        };
        let (flags, cookie) = (u16_at(bytes, 4), u64_at(bytes, 8));
        Some(Self { kind, flags, cookie, offset: u64_at(bytes, 16), len: u32_at(bytes, 24) })
    }
}

/// Why a command has failed: the error names of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyError {
    /// `NBD_EPERM`
    Perm,
    /// `NBD_EIO`, and every error number that the protocol does not list.
    Io,
    /// `NBD_ENOMEM`
    NoMem,
    /// `NBD_EINVAL`
    Inval,
    /// `NBD_ENOSPC`
    NoSpace,
    /// `NBD_EOVERFLOW`
    Overflow,
    /// `NBD_ENOTSUP`
    NotSupported,
    /// `NBD_ESHUTDOWN`: the server is shutting down.
    Shutdown,
}

impl ReplyError {
    /// The error with this number; `None` for 0, which means success.
    #[must_use]
    pub fn of(number: u32) -> Option<Self> {
        Some(match number {
            0 => return None,
            1 => Self::Perm,
            12 => Self::NoMem,
            22 => Self::Inval,
            28 => Self::NoSpace,
            75 => Self::Overflow,
            95 => Self::NotSupported,
            108 => Self::Shutdown,
            _ => Self::Io,
        })
    }
}

/// The head of a reply, parsed: a simple reply, or one chunk of a structured one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A simple reply. The data of a read follow it if there is no error.
    Simple {
        /// Why the command has failed; `None`: it has not.
        error: Option<ReplyError>,
        /// The cookie of the command that is answered.
        cookie: u64,
    },
    /// A chunk of a structured reply, whose payload follows.
    Chunk(Chunk),
}

/// The head of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The type of the payload.
    pub kind: ChunkKind,
    /// The chunk is the last of its reply.
    pub is_last: bool,
    /// The cookie of the command that is answered.
    pub cookie: u64,
    /// Bytes of payload: a length that this kind may have.
    pub len: u32,
}

/// The type of a chunk's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkKind {
    /// No payload; always the last chunk.
    None,
    /// An offset of 8 bytes and at least one byte of data.
    Data,
    /// [`Hole`].
    Hole,
    /// [`ErrorHead`], a message, and for some kinds more.
    Error,
}

/// The head of a reply, and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replied {
    /// The head.
    pub reply: Reply,
    /// Bytes of the head.
    pub size: usize,
}

impl Reply {
    /// Parses the head that `bytes` begin with. `None`: `bytes` ends inside the head.
    ///
    /// # Errors
    /// [`NbdError::Reply`]: these bytes are no reply.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Option<Replied>, NbdError> {
        if bytes.len() < SIMPLE_SIZE {
            return Ok(None);
        }
        match u32_at(bytes, 0) {
            SIMPLE_MAGIC => {
                let error = ReplyError::of(u32_at(bytes, 4));
                let reply = Self::Simple { error, cookie: u64_at(bytes, 8) };
                Ok(Some(Replied { reply, size: SIMPLE_SIZE }))
            }
            STRUCTURED_MAGIC if bytes.len() < STRUCTURED_SIZE => Ok(None),
            STRUCTURED_MAGIC => {
                let reply = Self::Chunk(Chunk::parse(bytes)?);
                Ok(Some(Replied { reply, size: STRUCTURED_SIZE }))
            }
            _ => Err(NbdError::Reply("no magic number")),
        }
    }

    /// The head that a server sends for an error with this number.
    #[must_use]
    pub fn simple(error: u32, cookie: u64) -> [u8; SIMPLE_SIZE] {
        let mut out = [0; SIMPLE_SIZE];
        out[..4].copy_from_slice(&SIMPLE_MAGIC.to_be_bytes());
        out[4..8].copy_from_slice(&error.to_be_bytes());
        out[8..].copy_from_slice(&cookie.to_be_bytes());
        out
    }
}

impl Chunk {
    fn parse(bytes: &[u8]) -> Result<Self, NbdError> {
        let (flags, kind, len) = (u16_at(bytes, 4), u16_at(bytes, 6), u32_at(bytes, 16));
        let is_last = flags & DONE != 0;
        let (kind, is_sound) = match kind {
            // The server could send chunks without content for ever, so such a chunk must be the
            // last.
            CHUNK_NONE => (ChunkKind::None, len == 0 && is_last),
            CHUNK_DATA => (ChunkKind::Data, len > 8),
            CHUNK_HOLE => (ChunkKind::Hole, len == 12),
            CHUNK_ERROR => (ChunkKind::Error, (6..=ERROR_MAX).contains(&len)),
            CHUNK_ERROR_OFFSET => (ChunkKind::Error, (14..=ERROR_MAX).contains(&len)),
            // The payload of every unknown error kind begins like that of the known ones.
            kind if kind & CHUNK_IS_ERROR != 0 => {
                (ChunkKind::Error, (6..=ERROR_MAX).contains(&len))
            }
            _ => return Err(NbdError::Reply("a chunk of an unknown kind")),
        };
        if !is_sound {
            return Err(NbdError::Reply("a chunk of a wrong length"));
        }
        Ok(Self { kind, is_last, cookie: u64_at(bytes, 8), len })
    }

    /// The head as a server sends it.
    #[must_use]
    pub fn emit(&self) -> [u8; STRUCTURED_SIZE] {
        let kind = match self.kind {
            ChunkKind::None => CHUNK_NONE,
            ChunkKind::Data => CHUNK_DATA,
            ChunkKind::Hole => CHUNK_HOLE,
            ChunkKind::Error => CHUNK_ERROR,
        };
        let mut out = [0; STRUCTURED_SIZE];
        out[..4].copy_from_slice(&STRUCTURED_MAGIC.to_be_bytes());
        out[4..6].copy_from_slice(&u16::from(self.is_last).to_be_bytes());
        out[6..8].copy_from_slice(&kind.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..].copy_from_slice(&self.len.to_be_bytes());
        out
    }
}

/// A range that reads as zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    /// First byte on the disk.
    pub offset: u64,
    /// Number of bytes.
    pub len: u32,
}

impl Hole {
    /// Bytes of a hole's payload.
    pub const SIZE: usize = 12;

    /// Parses the payload of a hole chunk.
    #[must_use]
    pub fn parse(bytes: &[u8; Self::SIZE]) -> Self {
        Self { offset: u64_at(bytes, 0), len: u32_at(bytes, 8) }
    }
}

/// The number at the beginning of every error chunk's payload; the message behind it is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorHead(pub ReplyError);

impl ErrorHead {
    /// Bytes of the payload that are read.
    pub const SIZE: usize = 4;

    /// The error of these four bytes. A server that sends 0 (success) in an error chunk means
    /// `EIO`.
    #[must_use]
    pub fn parse(bytes: &[u8; Self::SIZE]) -> Self {
        Self(ReplyError::of(u32_at(bytes, 0)).unwrap_or(ReplyError::Io))
    }
}
