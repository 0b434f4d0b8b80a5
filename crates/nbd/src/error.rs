//! `JoinError`: why connecting a disk to its server failed.

use super::tls::TlsError;
use manyring_wire::nbd::NbdError;
use std::io::{self, ErrorKind};

/// Why connecting to a server, or negotiating with it, failed.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// Nobody listens at the address, or it is unreachable.
    #[error("cannot be connected to: {0}")]
    Connect(io::Error),
    /// Another process connects on behalf of this one, and has failed.
    #[error("{text}")]
    Elsewhere {
        /// The reason of that process, in words that continue a sentence about the server.
        text: String,
        /// True if the server may have failed because it accepts no more connections.
        is_limit: bool,
        /// True if another attempt may succeed later.
        passes: bool,
    },
    /// The connection has ended, or has been silent for too long, before transmission.
    #[error("has not negotiated: {0}")]
    Silent(io::Error),
    /// The server has sent something that the protocol does not allow, or has refused the export.
    #[error(transparent)]
    Nbd(#[from] NbdError),
    /// The server allows only one connection (no `NBD_FLAG_CAN_MULTI_CONN`), and the disk has one.
    #[error("it allows only one connection now")]
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
    /// True if another attempt may succeed later: the server does not listen yet, or has ended the
    /// connection early.
    #[must_use]
    pub fn passes(&self) -> bool {
        match self {
            Self::Connect(_) | Self::Silent(_) | Self::Tls(TlsError::Unanswered) => true,
            Self::Elsewhere { passes, .. } => *passes,
            Self::Nbd(_) | Self::Alone | Self::Tls(_) | Self::Disk(_) => false,
        }
    }

    /// True if the failure may be that of a server that accepts no more connections: it lets the
    /// client wait, or ends the connection before the export is negotiated.
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
