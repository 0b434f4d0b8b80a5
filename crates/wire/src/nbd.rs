//! NBD, the client's half: requests to a server of network block devices, and its answers.
//!
//! The specification is `doc/proto.md` of the NBD project (fixed newstyle negotiation, simple and
//! structured replies) and its `doc/uri.md`.
//!
//! ```text
//! handshake.rs      greeting -> [STARTTLS] -> STRUCTURED_REPLY -> GO -> the export
//! transmission.rs   commands of 28 bytes, a write's data behind its own;
//!                   simple replies, or chunks of structured ones, in any order
//! relay.rs          commands of several clients on one connection: whose a reply is
//! uri.rs            where the server is, and what its disk is called
//! ```
//! All integers are big endian. A server may send any bytes: if they are too long, too many or out
//! of order is an [`NbdError`], and the connection is over.

mod handshake;
mod relay;
mod transmission;
mod uri;

pub use handshake::{Blocks, Export, ExportRequest, Handshake, OptionRefused, Progress};
pub use relay::{Message, Relay};
pub use transmission::{
    COMMAND_SIZE, Chunk, ChunkKind, Command, CommandKind, ErrorHead, Hole, REPLY_SIZE_MAX, Replied,
    Reply, ReplyError,
};
pub use uri::{Host, Uri, UriError};

/// The port of a server whose address has none.
pub const PORT: u16 = 10809;

/// Transmission flag: the other flags are valid.
pub const HAS_FLAGS: u16 = 1;
/// Transmission flag: the export cannot be written.
pub const READ_ONLY: u16 = 1 << 1;
/// Transmission flag: `NBD_CMD_FLUSH` is supported.
pub const SEND_FLUSH: u16 = 1 << 2;
/// Transmission flag: `NBD_CMD_FLAG_FUA` is supported.
pub const SEND_FUA: u16 = 1 << 3;
/// Transmission flag: `NBD_CMD_TRIM` is supported.
pub const SEND_TRIM: u16 = 1 << 5;
/// Transmission flag: `NBD_CMD_WRITE_ZEROES` is supported.
pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
/// Transmission flag: several connections see one cache, so that a flush on one of them makes
/// durable what was answered on any.
pub const CAN_MULTI_CONN: u16 = 1 << 8;

/// Command flag: durable before it is answered.
pub const FLAG_FUA: u16 = 1;
/// Command flag of write zeroes: no hole may be made.
pub const FLAG_NO_HOLE: u16 = 1 << 1;

/// A message of the server that breaks the protocol, or a version that this client does not speak.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NbdError {
    /// The first bytes are not those of an NBD server.
    #[error("is no NBD server: it does not send NBD's greeting")]
    NoServer,
    /// The server speaks the negotiation of before 2011, oldstyle or without fixed newstyle.
    #[error("speaks an NBD protocol that is too old (no fixed newstyle negotiation)")]
    OldStyle,
    /// The server has refused an option of the negotiation.
    #[error("{0}")]
    Refused(OptionRefused),
    /// The server's answer to an option of the negotiation is malformed.
    #[error("has answered the negotiation with what is no answer ({0})")]
    Handshake(&'static str),
    /// Bytes that should begin a reply, and do not.
    #[error("has sent what is no reply ({0})")]
    Reply(&'static str),
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) << 16 | u32::from(u16_at(bytes, at + 2))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) << 32 | u64::from(u32_at(bytes, at + 4))
}

#[cfg(test)]
mod tests;
