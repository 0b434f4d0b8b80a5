//! The configuration as the user writes it: the keys of `manyring.toml`. Names are fixed in
//! `docs/design/0001`; unknown keys are refused.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The whole file.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawConfig {
    /// What concerns the whole process.
    #[serde(default)]
    pub(crate) daemon: RawDaemon,
    /// Block devices.
    #[serde(default)]
    pub(crate) blk: Vec<RawBlk>,
}

/// `[daemon]`
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawDaemon {
    /// Workers at most; default: the CPUs this process may use.
    pub(crate) workers: Option<usize>,
    /// Microseconds to look for work before sleeping, 0 to 32; default 32.
    pub(crate) spin_us: Option<u32>,
    /// Use io_uring where the kernel allows it; default true.
    pub(crate) io_uring: Option<bool>,
    /// Path of the control socket; default: none.
    pub(crate) control: Option<PathBuf>,
}

/// `[[blk]]`
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawBlk {
    /// Name of the device, unique.
    pub(crate) name: Option<String>,
    /// Path of the vhost-user socket.
    pub(crate) socket_path: Option<PathBuf>,
    /// A socket that was handed in, by its number.
    pub(crate) fd: Option<i32>,
    /// Connect to `socket_path` instead of listening there.
    #[serde(default)]
    pub(crate) client: bool,
    /// Owner of the socket: a user id.
    pub(crate) socket_owner: Option<u32>,
    /// Group of the socket: a group id.
    pub(crate) socket_group: Option<u32>,
    /// Mode of the socket, in octal: "0660".
    pub(crate) socket_mode: Option<String>,
    /// End after the first front-end has left.
    #[serde(default)]
    pub(crate) one_off: bool,
    /// Seconds from connecting to the first message; default 10.
    pub(crate) handshake_timeout: Option<u64>,
    /// Serve this file or block device.
    pub(crate) file: Option<PathBuf>,
    /// Serve a disk of this size that keeps nothing.
    pub(crate) null: Option<String>,
    /// Serve a disk of this size in memory.
    pub(crate) memory: Option<String>,
    /// The guest may not write.
    #[serde(default)]
    pub(crate) read_only: bool,
    /// Pass the host's page cache by (`O_DIRECT`).
    #[serde(default)]
    pub(crate) direct: bool,
    /// Request queues, 1 to 256; default 8.
    pub(crate) num_queues: Option<usize>,
    /// Entries of a ring that the limits of a request are made for; default 128.
    pub(crate) queue_size: Option<u16>,
    /// The device id string, at most 20 bytes; default: the name.
    pub(crate) serial: Option<String>,
    /// `writeback` (default) or `writethrough`.
    pub(crate) cache: Option<String>,
    /// What goes wrong, to test guests.
    pub(crate) fault: Option<RawFault>,
}

/// `[blk.fault]`
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawFault {
    /// Every n-th request, if it is a read, fails.
    #[serde(default)]
    pub(crate) read_error_every: u64,
    /// Every n-th request, if it is a write, fails.
    #[serde(default)]
    pub(crate) write_error_every: u64,
    /// Flushes fail.
    #[serde(default)]
    pub(crate) flush_errors: bool,
    /// Every n-th request never completes.
    #[serde(default)]
    pub(crate) hold_every: u64,
    /// Offer secure erase, which writes zeroes.
    #[serde(default)]
    pub(crate) secure_erase: bool,
}
