//! The description of an NBD server's export, for messages between supervisor and device process.
//! The description has neither the server's address nor certificates: the supervisor connects, and
//! sends the device process each connected socket with the certificates.

use serde::{Deserialize, Serialize};

/// The longest name of an export, as JSON, and the longest name of a host, in bytes.
pub const NAMES_MAX: (usize, usize) = (4096, 253);

/// The export that a client asks a server for.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NbdTarget {
    /// The name of the export.
    pub export: String,
    /// The name in the server's certificate; `None`: without TLS.
    pub tls: Option<String>,
}

/// A disk that is the export of an NBD server.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NbdSpec {
    /// The export to ask the server for.
    pub target: NbdTarget,
    /// Seconds for which requests wait for a server that is unreachable; `None`: for ever.
    pub reconnect: Option<u64>,
    /// The properties of the export on which the guest's disk is based.
    pub told: ExportSpec,
}

/// An export, as a server describes it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ExportSpec {
    /// The size in bytes.
    pub size: u64,
    /// Transmission flags of the NBD protocol (`NBD_FLAG_*`).
    pub flags: u16,
    /// Offsets and lengths must be multiples of this many bytes.
    pub block_min: u32,
    /// The recommended size of reads and writes, in bytes.
    pub block_preferred: u32,
    /// The most bytes of data in one command.
    pub block_max: u32,
    /// True if the server sends structured replies to reads.
    pub structured: bool,
}

/// Why connecting to a server, or asking it for its export, failed.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NbdFailure {
    /// The reason, as a predicate of the sentence "the server ..".
    pub text: String,
    /// True if the server may have failed because it accepts no more connections from this client.
    pub is_limit: bool,
    /// True if another attempt may succeed later.
    pub passes: bool,
}

/// The answer of the device process that has asked a server for its export.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum NbdFound {
    /// The server has described its export.
    Export(ExportSpec),
    /// The server has not given its export.
    Failed(NbdFailure),
}
