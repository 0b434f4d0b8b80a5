//! `SavedSession`: the knowledge of a session that another process needs to go on with it.
//!
//! The process that accepts a client for us may keep the connection and the [`JournalUpdate`]s of
//! its session ([`SessionJournal`]). If this process is killed, the connection stays open, and the
//! next process is handed the socket with all that was noted. The notes are the session's own
//! messages: the next process obeys them again, so there is no second format and no second parser.
//!
//! ```text
//! peek      a message is read and stays in the socket
//! note      the settings of the message, with its file descriptors
//! obey
//! note      the entries that it removes; and, if it has an answer, that this is under way
//! answer
//! consume   the message is taken from the socket
//! note      the answer has been sent
//! ```
//! Why a kill between any two of these steps loses nothing, and answers nothing twice:
//! 1. **Until it is consumed, a message is read again** by the next process, which obeys it again.
//!    Each message sets something to a value, so this changes nothing. `SET_VRING_BASE` begins a
//!    ring anew, but then the note has taken away the kick with which the ring would start.
//! 2. **An answer is under way from its note to the next one.** If the message is gone from the
//!    socket by then, the answer was sent. If it is still there, nobody knows: the session ends,
//!    and the front-end connects again. That is so between two system calls.
//! 3. **A ring goes on where its in-flight region says**, not at its base. If the front-end gives
//!    no region, the session makes one and notes it. The place of a ring in it is emptied before
//!    the kick of a ring that begins is noted.
//!
//! A message that arrives in pieces cannot be read without being consumed. Such a message is obeyed
//! as it would be without a keeper, and a kill before that is done ends the session.

use manyring_device::PendingResult;
use manyring_wire::vhost_user::{CONFIG_SIZE_MAX, MEM_SLOTS};
use rustix::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use tokio::net::UnixStream;

/// A slot more than a front-end may use.
pub(super) const MEM_SLOTS_MAX: usize = 510;
const _: () = assert!(MEM_SLOTS_MAX as u64 == MEM_SLOTS + 1);
const CONFIG_MAX: usize = CONFIG_SIZE_MAX as usize;
/// Kinds of entries.
pub(super) const PLACES: usize = 19;

/// Most notes of a session with this many queues.
#[must_use]
pub fn entries_max(queues: usize) -> usize {
    MEM_SLOTS_MAX + CONFIG_MAX + (queues + 1) * PLACES
}

/// Most file descriptors that belong to one note.
pub const ENTRY_FDS_MAX: usize = 8;

/// Keeps a session for the process that goes on with it if this one dies.
pub trait SessionJournal: Send + Sync + std::fmt::Debug {
    /// Keeps a note; returns when a death of this process cannot undo that. `fds` belong to the
    /// first entry that the note puts.
    fn update<'a>(&'a self, note: JournalUpdate, fds: Vec<BorrowedFd<'a>>)
    -> PendingResult<'a, ()>;

    /// The session has ended, and its connection is shut down. Called where it may block.
    fn forget(&self);

    /// True if this process stops so that another one goes on with its sessions: a session that is
    /// stopped then stays connected, and its notes stay.
    fn quiesces(&self) -> bool {
        false
    }
}

/// A change of the kept entries of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalUpdate {
    /// Entries to keep from now on, each in the place of the one with its key.
    pub puts: Vec<Entry>,
    /// Nothing is kept under these keys any more.
    pub drops: Vec<u32>,
    /// The change in the state of the answer to the message that is being obeyed.
    pub answer: AnswerState,
}

/// How far the answer to a message is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AnswerState {
    /// As it was.
    #[default]
    Unchanged,
    /// It is under way: to the message that begins with these bytes. None: the message was consumed
    /// before it was obeyed.
    UnderWay(Vec<u8>),
    /// It has been sent, and the message is consumed.
    Sent,
}

/// Something that is kept of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its place: entries are obeyed again in the order of their keys.
    pub key: u32,
    /// A message of the front-end, header and payload; or the device's state.
    pub bytes: Vec<u8>,
}

/// An entry with its file descriptors, as the next process gets it.
#[derive(Debug)]
pub struct SavedEntry {
    /// The key and the bytes of the entry.
    pub entry: Entry,
    /// In the order in which they came.
    pub fds: Vec<OwnedFd>,
}

/// All that was kept of a session.
#[derive(Debug, Default)]
pub struct SavedSession {
    /// In the order of their keys.
    pub entries: Vec<SavedEntry>,
    /// The message whose answer was under way when the process before this one ended
    /// ([`AnswerState::UnderWay`]).
    pub answering: Option<Vec<u8>>,
}

/// A connected front-end, handed over by the process or task that accepts for us.
#[derive(Debug)]
pub struct Client {
    /// The socket.
    pub stream: UnixStream,
    /// The keeper of the session, and the estate of a process before this one.
    pub kept: Option<(Arc<dyn SessionJournal>, SavedSession)>,
}

impl From<UnixStream> for Client {
    fn from(stream: UnixStream) -> Self {
        Self { stream, kept: None }
    }
}
