//! `JoinError`: why a disk has no connection to its server.

use super::tls::TlsError;
use manyring_wire::nbd::NbdError;
use std::io::{self, ErrorKind};

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// Nobody listens, or the network does not lead there.
    #[error("cannot be connected to: {0}")]
    Connect(io::Error),
    /// The process that connects in this one's place has no connection.
    #[error("{text}")]
    Elsewhere {
        /// Its reason, in words that continue a sentence about the server.
        text: String,
        /// A server that takes no more connections looks like this.
        is_limit: bool,
        /// The server may be there later.
        passes: bool,
    },
    /// The connection has ended, or has been silent for too long, before transmission.
    #[error("has not negotiated: {0}")]
    Silent(io::Error),
    /// The server has sent something that the protocol does not allow, or has refused the export.
    #[error(transparent)]
    Nbd(#[from] NbdError),
    /// The server allows one connection alone (no `NBD_FLAG_CAN_MULTI_CONN`), and there is another.
    #[error("it allows one connection alone now")]
    Alone,
    /// One of the two sides does not trust the other, or has broken TLS.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The server's export cannot be served as a disk, or differs from the disk that the guest was
    /// told of when it began.
    #[error("{0}")]
    Disk(String),
}

impl JoinError {
    /// True if the server is not there yet, or has ended the connection early: it may come.
    #[must_use]
    pub fn passes(&self) -> bool {
        match self {
            Self::Connect(_) | Self::Silent(_) | Self::Tls(TlsError::Unanswered) => true,
            Self::Elsewhere { passes, .. } => *passes,
            Self::Nbd(_) | Self::Alone | Self::Tls(_) | Self::Disk(_) => false,
        }
    }

    /// True if a server that takes no more connections looks like this: it lets the client wait, or
    /// ends the connection before it has served it.
    #[must_use]
    pub fn is_limit(&self) -> bool {
        match self {
            Self::Elsewhere { is_limit, .. } => *is_limit,
            Self::Connect(error) => {
                matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
            }
            Self::Silent(_) | Self::Nbd(NbdError::Refused(_)) => true,
            Self::Alone | Self::Tls(TlsError::Unanswered) => true,
            Self::Nbd(_) | Self::Tls(_) | Self::Disk(_) => false,
        }
    }
}
