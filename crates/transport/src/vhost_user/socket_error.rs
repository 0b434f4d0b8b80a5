//! `SocketError`: why the connection of a front-end ends.

use super::pace::LONG;
use manyring_wire::vhost_user::ParseError;
use std::io;
use std::time::Duration;

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum SocketError {
    #[error("the front-end disconnected")]
    Closed,
    #[error("the front-end disconnected in the middle of a message")]
    ClosedInMessage,
    #[error("timed out in the middle of a message")]
    Stalled,
    #[error(
        "a second message took more than {} ms of CPU time: too many waiters on the socket?",
        LONG.as_millis()
    )]
    Costly,
    #[error("no message within {} seconds", after.as_secs())]
    Silent { after: Duration },
    #[error("too many file descriptors in a message, or no room for them (ulimit -n)")]
    TooManyFds,
    #[error("too few open files are allowed (ulimit -n) for the file descriptors that it sent")]
    NoRoom,
    #[error(transparent)]
    Parse(#[from] ParseError),
    #[error("socket: {0}")]
    Io(#[from] io::Error),
}
