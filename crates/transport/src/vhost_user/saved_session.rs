//! `SavedSession`: the journal of a session, from which another process can resume it.
//!
//! The process that accepts clients for this one may keep their connections, and a journal of each
//! session ([`SessionJournal`]), to which this process writes [`JournalUpdate`]s. If this process
//! is killed, the connection stays open, and the next process gets the socket with the journal. The
//! entries of the journal are the session's own messages: the next process handles them again, so
//! there is no second format and no second parser.
//!
//! ```text
//! peek      read a message, and leave it in the socket
//! record    the settings of the message, with its file descriptors
//! handle    the message
//! record    the entries that it removes; and, if it has an answer, that the answer is under way
//! answer    the message
//! consume   the message: take it from the socket
//! record    that the answer was sent
//! ```
//! Why a kill between any two of these steps loses nothing, and answers nothing twice:
//! 1. **Until it is consumed, a message is read again** by the next process, which handles it
//!    again. Each message sets something to a value, so this changes nothing. `SET_VRING_BASE` of a
//!    running ring makes the ring begin anew, but the record after it has removed the kick with
//!    which the next process would start the ring.
//! 2. **An answer is under way between the two records about it.** If the message is no longer in
//!    the socket, its answer was sent. If it is still there, the answer may or may not have been
//!    sent: the session ends, and the front-end reconnects. The window for that is the time between
//!    two system calls.
//! 3. **A ring resumes where its in-flight region says**, not at its base. If the front-end has no
//!    region for it, the session makes one and records it. The place of a ring there is zeroed
//!    before the kick of the ring is recorded.
//!
//! A message that arrives in pieces cannot be read without being consumed. It is handled as in a
//! session without a journal, and a kill before that is done ends the session.

use manyring_device::PendingResult;
use manyring_wire::vhost_user::{CONFIG_SIZE_MAX, MEM_SLOTS};
use rustix::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use tokio::net::UnixStream;

/// The most memory regions in a journal: one more than a front-end may have, since a region is
/// recorded before the session refuses it.
pub(super) const MEM_SLOTS_MAX: usize = 510;
const _: () = assert!(MEM_SLOTS_MAX as u64 == MEM_SLOTS + 1);
const CONFIG_MAX: usize = CONFIG_SIZE_MAX as usize;
/// The number of kinds of entries.
pub(super) const PLACES: usize = 19;

/// Returns the most entries in the journal of a session with this many queues.
#[must_use]
pub fn entries_max(queues: usize) -> usize {
    MEM_SLOTS_MAX + CONFIG_MAX + (queues + 1) * PLACES
}

/// The most file descriptors of one entry.
pub const ENTRY_FDS_MAX: usize = 8;

/// The journal of a session, which outlives this process.
pub trait SessionJournal: Send + Sync + std::fmt::Debug {
    /// Writes an update. Returns when the update is safe: a death of this process does not undo it.
    /// `fds` belong to the first entry that the update puts.
    fn update<'a>(&'a self, note: JournalUpdate, fds: Vec<BorrowedFd<'a>>)
    -> PendingResult<'a, ()>;

    /// Called when the session has ended and its connection is shut down, on a thread that may
    /// block.
    fn forget(&self);

    /// True if this process stops so that another one resumes its sessions: then a session that
    /// stops stays connected, and its journal stays.
    fn quiesces(&self) -> bool {
        false
    }
}

/// A change of the entries in a journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalUpdate {
    /// Entries to add. An entry replaces one with the same key.
    pub puts: Vec<Entry>,
    /// The keys of the entries to remove.
    pub drops: Vec<u32>,
    /// The change in the state of the answer to the message that is being handled.
    pub answer: AnswerState,
}

/// The state of the answer to a message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AnswerState {
    /// The state does not change.
    #[default]
    Unchanged,
    /// The answer to the message that begins with these bytes is under way. No bytes: the message
    /// was consumed before it was handled, because it arrived in pieces.
    UnderWay(Vec<u8>),
    /// The answer was sent, and the message is consumed.
    Sent,
}

/// An entry of a session's journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key of the entry. The next process handles entries in the order of their keys.
    pub key: u32,
    /// A message of the front-end, header and payload; or the device's state.
    pub bytes: Vec<u8>,
}

/// An entry with its file descriptors, as the next process gets it.
#[derive(Debug)]
pub struct SavedEntry {
    /// The key and the bytes of the entry.
    pub entry: Entry,
    /// The descriptors, in the order in which the front-end sent them.
    pub fds: Vec<OwnedFd>,
}

/// The contents of a session's journal, for the process that resumes the session.
#[derive(Debug, Default)]
pub struct SavedSession {
    /// The entries, in the order of their keys.
    pub entries: Vec<SavedEntry>,
    /// The message whose answer was under way when the process before this one ended
    /// ([`AnswerState::UnderWay`]).
    pub answering: Option<Vec<u8>>,
}

/// A connected front-end, handed over by the process or task that accepts clients for this device.
#[derive(Debug)]
pub struct Client {
    /// The connected socket of the front-end.
    pub stream: UnixStream,
    /// The journal of the session, and its contents that a former process has written; `None`: the
    /// session has no journal.
    pub kept: Option<(Arc<dyn SessionJournal>, SavedSession)>,
}

impl From<UnixStream> for Client {
    fn from(stream: UnixStream) -> Self {
        Self { stream, kept: None }
    }
}
