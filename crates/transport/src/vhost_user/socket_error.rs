//! `SocketError`: why the connection of a front-end ends.

use super::pace::LONG;
use manyring_wire::vhost_user::ParseError;
use std::io;
use std::time::Duration;

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum SocketError {
    #[error("the front-end has left")]
    Closed,
    #[error("the front-end has left in the middle of a message")]
    ClosedInMessage,
    #[error("half a message, then silence")]
    Stalled,
    #[error(
        "a second message took more than {} ms of CPU time: too many waiters on the socket?",
        LONG.as_millis()
    )]
    Costly,
    #[error("no message after {} seconds", after.as_secs())]
    Silent { after: Duration },
    #[error("more file descriptors than any message has, or none free for them")]
    TooManyFds,
    #[error("too few open files are allowed (ulimit -n) for the file descriptors that it sent")]
    NoRoom,
    #[error(transparent)]
    Parse(#[from] ParseError),
    #[error("socket: {0}")]
    Io(#[from] io::Error),
}
