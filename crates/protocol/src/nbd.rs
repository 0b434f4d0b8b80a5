//! The disk of an NBD server, as supervisor and device process name it to each other. The address
//! and the certificates are no part of it: the supervisor connects, and hands both over with each
//! socket.

use serde::{Deserialize, Serialize};

/// Longest name of an export as JSON, and longest name of a host, in bytes.
pub const NAMES_MAX: (usize, usize) = (4096, 253);

/// What a server is asked for.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NbdTarget {
    /// The name of the export.
    pub export: String,
    /// The name in the server's certificate; `None`: without TLS.
    pub tls: Option<String>,
}

/// The disk of an NBD server.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NbdSpec {
    /// What the server is asked for.
    pub target: NbdTarget,
    /// Seconds for which requests wait for a server that is gone; `None`: for ever.
    pub reconnect: Option<u64>,
    /// The export that the guest is told of.
    pub told: ExportSpec,
}

/// An export, as a server describes it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ExportSpec {
    /// In bytes.
    pub size: u64,
    /// Transmission flags.
    pub flags: u16,
    /// The unit of offsets and lengths.
    pub block_min: u32,
    /// The recommended size of reads and writes.
    pub block_preferred: u32,
    /// The data of one command at most.
    pub block_max: u32,
    /// Replies to reads are structured.
    pub structured: bool,
}

/// Why there is no connection, or no export.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NbdFailure {
    /// The reason, in words that continue a sentence about the server.
    pub text: String,
    /// A server that takes no more connections looks like this.
    pub is_limit: bool,
    /// It may be there later.
    pub passes: bool,
}

/// The answer of a process that has asked a server for its export.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum NbdFound {
    /// The export.
    Export(ExportSpec),
    /// There is none.
    Failed(NbdFailure),
}
