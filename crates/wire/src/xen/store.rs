//! xenstore messages: header, operations, error names, requests, replies and events.
//!
//! A message is a header of 16 bytes and a payload of at most 4096. The payload of a request is a
//! list of strings, each ended by a nul byte. A value may hold any bytes, so it comes last and has
//! no nul behind it. A reply repeats the operation, `req_id` and `tx_id` of its request, or has the
//! operation `ERROR` and the name of an error. A watch event is sent without a request.
//!
//! [`split`] takes one message off a stream. A server then calls [`Request::parse`], and answers
//! with [`reply`], [`refuse`] or [`event`]. A client sends [`Request::emit`] and calls
//! [`Answer::parse`]. All numbers of the header are in the host's byte order: both ends run on one
//! machine.

mod request;

pub use request::Request;

use super::path::{Path, Watched};

/// Bytes of the message header.
pub const HEADER_SIZE: usize = 16;
/// Largest payload in bytes. A server ends the connection of a client that exceeds it.
pub const PAYLOAD_SIZE_MAX: usize = 4096;

/// Defines the operations with their ids and their printable names, once.
macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident = $id:literal, $text:literal;)*) => {
        /// The operation of a message. A reply repeats the operation of its request.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum StoreOp { $($(#[$doc])* $name = $id),* }

        impl StoreOp {
            /// Every operation of the pinned specification.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The operation with this id. `None`: the specification has no such operation.
            #[must_use]
            pub const fn from_id(id: u32) -> Option<Self> {
                match id {
                    $($id => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// The number of the operation in a header.
            #[must_use]
            pub const fn id(self) -> u32 {
                self as u32
            }

            /// The name, as the specification writes it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }
        }
    };
}

operations! {
    /// Sends a command to the server itself.
    Control = 0, "CONTROL";
    /// Lists the names of a node's children.
    Directory = 1, "DIRECTORY";
    /// Reads a node's value.
    Read = 2, "READ";
    /// Reads a node's permissions.
    GetPerms = 3, "GET_PERMS";
    /// Sets a watch.
    Watch = 4, "WATCH";
    /// Removes a watch.
    Unwatch = 5, "UNWATCH";
    /// Begins a transaction.
    TransactionStart = 6, "TRANSACTION_START";
    /// Commits or drops a transaction.
    TransactionEnd = 7, "TRANSACTION_END";
    /// Makes a domain known to the server.
    Introduce = 8, "INTRODUCE";
    /// Makes the server forget a domain.
    Release = 9, "RELEASE";
    /// Asks for the path under which a domain's nodes lie.
    GetDomainPath = 10, "GET_DOMAIN_PATH";
    /// Writes a node's value; creates the node and its parents if need be.
    Write = 11, "WRITE";
    /// Creates a node without a value.
    Mkdir = 12, "MKDIR";
    /// Removes a node and everything below it.
    Rm = 13, "RM";
    /// Sets a node's permissions.
    SetPerms = 14, "SET_PERMS";
    /// A watch saw a change; only the server sends this.
    WatchEvent = 15, "WATCH_EVENT";
    /// An error reply; only the server sends this.
    Error = 16, "ERROR";
    /// Asks whether a domain is known to the server.
    IsDomainIntroduced = 17, "IS_DOMAIN_INTRODUCED";
    /// Reports that a domain runs again.
    Resume = 18, "RESUME";
    /// Lets a domain act for another one.
    SetTarget = 19, "SET_TARGET";
    /// Drops all watches and transactions of the sender.
    ResetWatches = 21, "RESET_WATCHES";
    /// Reads a part of a long list of children.
    DirectoryPart = 22, "DIRECTORY_PART";
    /// Reads the server's features for a domain.
    GetFeature = 23, "GET_FEATURE";
    /// Sets the features of the server for a domain.
    SetFeature = 24, "SET_FEATURE";
    /// Reads a quota.
    GetQuota = 25, "GET_QUOTA";
    /// Sets a quota.
    SetQuota = 26, "SET_QUOTA";
}

/// Defines the names of errors, once.
macro_rules! error_names {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        /// Why a server refused a request, by the name that an error reply carries.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
        pub enum ErrorName {
            $($(#[$doc])* #[error($text)] $name,)*
            /// A name that the specification does not list.
            #[error("an error that has no name here")]
            Unknown,
        }

        impl ErrorName {
            /// Every name.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Parses the name.
            #[must_use]
            pub fn parse(name: &[u8]) -> Self {
                let named = Self::ALL.iter().find(|error| error.name().as_bytes() == name);
                named.copied().unwrap_or(Self::Unknown)
            }

            /// The name as a reply carries it. An unknown error is sent as `EIO`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                    Self::Unknown => "EIO",
                }
            }
        }
    };
}

error_names! {
    /// The request is malformed.
    Einval = "EINVAL";
    /// The sender lacks the permission for this node.
    Eacces = "EACCES";
    /// The object exists already.
    Eexist = "EEXIST";
    /// The node is a directory.
    Eisdir = "EISDIR";
    /// There is no such node, watch or transaction.
    Enoent = "ENOENT";
    /// The server is out of memory.
    Enomem = "ENOMEM";
    /// A quota is used up.
    Enospc = "ENOSPC";
    /// The server failed.
    Eio = "EIO";
    /// The node has children.
    Enotempty = "ENOTEMPTY";
    /// The server does not know the operation.
    Enosys = "ENOSYS";
    /// The store cannot be written.
    Erofs = "EROFS";
    /// A transaction is open.
    Ebusy = "EBUSY";
    /// Another write came between: the transaction has to be done again.
    Eagain = "EAGAIN";
    /// The domain is connected already.
    Eisconn = "EISCONN";
    /// The payload of the answer, or the value, is too long.
    E2big = "E2BIG";
    /// Not permitted.
    Eperm = "EPERM";
    /// A quota is used up: the name that the OCaml server uses.
    Equota = "EQUOTA";
}

/// Why a message cannot be read or written. The connection cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum StoreMessageError {
    #[error("message {kind} has a payload of {size} bytes, {PAYLOAD_SIZE_MAX} at most")]
    TooLong { kind: u32, size: usize },
    #[error("{name}: a string has a nul byte inside")]
    Nul { name: &'static str },
    #[error("message {kind} is no reply")]
    NotAReply { kind: u32 },
    #[error("{name} reply is malformed")]
    Malformed { name: &'static str },
}

/// A message header (`struct xsd_sockmsg`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreHeader {
    /// The operation's id: [`StoreOp::from_id`] tells whether there is one.
    pub kind: u32,
    /// The number that the client gave to the request; the reply repeats it.
    pub req_id: u32,
    /// The id of the transaction; 0 outside of a transaction.
    pub tx_id: u32,
    /// Bytes of payload that follow.
    pub size: u32,
}

impl StoreHeader {
    /// Parses the 16 bytes of a header.
    ///
    /// # Errors
    /// [`StoreMessageError::TooLong`].
    pub fn parse(bytes: &[u8; HEADER_SIZE]) -> Result<Self, StoreMessageError> {
        let [kind, req_id, tx_id, size] = std::array::from_fn(|i| {
            let at = 4 * i;
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        });
        if size as usize > PAYLOAD_SIZE_MAX {
            return Err(StoreMessageError::TooLong { kind, size: size as usize });
        }
        Ok(Self { kind, req_id, tx_id, size })
    }

    /// The bytes of this header.
    #[must_use]
    pub fn emit(self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        let words = [self.kind, self.req_id, self.tx_id, self.size];
        for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

/// A whole message: a header, and the payload of the size that the header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// The header.
    pub header: StoreHeader,
    /// The payload.
    pub payload: &'a [u8],
}

impl Message<'_> {
    /// Bytes of the message, its header included.
    #[must_use]
    pub fn size(&self) -> usize {
        HEADER_SIZE + self.payload.len()
    }
}

/// Takes the first message off `stream`. `None`: the message is not complete yet.
///
/// # Errors
/// [`StoreMessageError::TooLong`]: the stream cannot be read any further.
pub fn split(stream: &[u8]) -> Result<Option<Message<'_>>, StoreMessageError> {
    let Some((bytes, rest)) = stream.split_first_chunk() else { return Ok(None) };
    let header = StoreHeader::parse(bytes)?;
    Ok(rest.get(..header.size as usize).map(|payload| Message { header, payload }))
}

/// The strings of a payload, each ended by a nul byte. Bytes behind the last nul are ignored.
pub fn strings(payload: &[u8]) -> impl Iterator<Item = &[u8]> {
    let end = payload.iter().rposition(|byte| *byte == 0).map_or(0, |at| at + 1);
    payload[..end]
        .split_inclusive(|byte| *byte == 0)
        .map(|with_nul| &with_nul[..with_nul.len() - 1])
}

/// The access of a domain to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// `n`: no access.
    None,
    /// `r`: may read.
    Read,
    /// `w`: may write.
    Write,
    /// `b`: may read and write.
    Both,
}

/// One entry of a node's permissions. The domain of the first entry owns the node. The access of
/// the first entry holds for all domains that no entry names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permission {
    /// The access of the domain.
    pub access: Access,
    /// The domain.
    pub domain: u16,
}

impl Permission {
    /// Parses an entry such as `r5`.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (letter, domain) = text.split_first()?;
        let access = match letter {
            b'n' => Access::None,
            b'r' => Access::Read,
            b'w' => Access::Write,
            b'b' => Access::Both,
            _ => return None,
        };
        Some(Self { access, domain: number(domain)? })
    }
}

impl std::fmt::Display for Permission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let letter = match self.access {
            Access::None => 'n',
            Access::Read => 'r',
            Access::Write => 'w',
            Access::Both => 'b',
        };
        write!(f, "{letter}{}", self.domain)
    }
}

/// A decimal number, without sign, blanks or anything else that is no digit.
pub(super) fn number<N: std::str::FromStr>(text: &[u8]) -> Option<N> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(text).ok().filter(|_| digits)?.parse().ok()
}

/// A message of the server: the answer to a request, or an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// The request was served. The payload depends on the operation: a value for `READ`,
    /// [`strings`] for `DIRECTORY`, [`Answer::OK`] if there is nothing to return.
    Done(StoreOp, &'a [u8]),
    /// The request was refused.
    Refused(ErrorName),
    /// A watch saw a change; this message answers no request.
    Event {
        /// The path or special event that changed.
        watched: Watched<'a>,
        /// The token that the client gave to the watch.
        token: &'a [u8],
    },
}

impl<'a> Answer<'a> {
    /// The payload `OK`, of a reply to a request that returns nothing.
    pub const OK: &'static [u8] = b"OK\0";

    /// Parses a message of the server.
    ///
    /// # Errors
    /// [`StoreMessageError::NotAReply`] for an operation that does not exist,
    /// [`StoreMessageError::Malformed`] for an error or an event that is not whole.
    pub fn parse(message: &Message<'a>) -> Result<Self, StoreMessageError> {
        let kind = message.header.kind;
        let op = StoreOp::from_id(kind).ok_or(StoreMessageError::NotAReply { kind })?;
        let malformed = StoreMessageError::Malformed { name: op.name() };
        let mut strings = strings(message.payload);
        match op {
            StoreOp::Error => strings.next().map(ErrorName::parse).map(Self::Refused),
            StoreOp::WatchEvent => {
                strings.next().zip(strings.next()).and_then(|(watched, token)| {
                    Some(Self::Event { watched: Watched::parse(watched).ok()?, token })
                })
            }
            _ => Some(Self::Done(op, message.payload)),
        }
        .ok_or(malformed)
    }
}

/// The id of a new transaction, from the payload of a `TRANSACTION_START` reply. `None` also for 0,
/// which means "outside of a transaction".
#[must_use]
pub fn transaction_id(payload: &[u8]) -> Option<u32> {
    strings(payload).next().and_then(number).filter(|id| *id != 0)
}

/// Appends the reply that `request` was served.
///
/// # Errors
/// [`StoreMessageError::TooLong`]: nothing was appended; the caller must refuse the request with
/// [`ErrorName::E2big`].
pub fn reply(
    out: &mut Vec<u8>,
    request: &StoreHeader,
    payload: &[u8],
) -> Result<(), StoreMessageError> {
    append(out, *request, payload)
}

/// Appends the reply that `request` was refused.
pub fn refuse(out: &mut Vec<u8>, request: &StoreHeader, error: ErrorName) {
    let payload = [error.name().as_bytes(), b"\0"].concat();
    let size = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let header = StoreHeader { kind: StoreOp::Error.id(), size, ..*request };
    out.extend_from_slice(&header.emit());
    out.extend_from_slice(&payload);
}

/// Appends the event that the watch with `token` saw a change at `watched`.
///
/// # Errors
/// [`StoreMessageError::TooLong`], [`StoreMessageError::Nul`]: nothing was appended.
pub fn event(
    out: &mut Vec<u8>,
    watched: Watched<'_>,
    token: &[u8],
) -> Result<(), StoreMessageError> {
    let name = StoreOp::WatchEvent.name();
    if token.contains(&0) {
        return Err(StoreMessageError::Nul { name });
    }
    let payload = [watched.as_str().as_bytes(), b"\0", token, b"\0"].concat();
    let header = StoreHeader { kind: StoreOp::WatchEvent.id(), req_id: 0, tx_id: 0, size: 0 };
    append(out, header, &payload)
}

/// Appends a message with `header`, whose size becomes that of `payload`.
fn append(out: &mut Vec<u8>, header: StoreHeader, payload: &[u8]) -> Result<(), StoreMessageError> {
    let too_long = StoreMessageError::TooLong { kind: header.kind, size: payload.len() };
    if payload.len() > PAYLOAD_SIZE_MAX {
        return Err(too_long);
    }
    let size = u32::try_from(payload.len()).map_err(|_| too_long)?;
    out.extend_from_slice(&StoreHeader { size, ..header }.emit());
    out.extend_from_slice(payload);
    Ok(())
}

#[cfg(test)]
mod tests;
