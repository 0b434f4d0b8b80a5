//! Disks of NBD servers, by our own client of the protocol.
//!
//! transport -> queue -> device -> **backend**. A [`NbdDisk`] is one more [`Disk`] that a device
//! submits to; nothing of the stages before it knows that its image is elsewhere.
//!
//! ```text
//! queue.rs      a queue and its connection: what a turn sends and takes
//! session.rs    requests as commands, and replies; pure, with asked.rs and incoming.rs
//! reconnector.rs
//!               the disk's thread: connects, again and again; line.rs: what a queue sees of it
//!               reconnector/: which queue has which, and one for several queues
//! join.rs       negotiates on a socket of server.rs, with the certificates of credentials.rs
//! channel.rs    a connection as a queue has it; tls.rs: the TLS session on it
//! watched.rs    for workers without io_uring
//! ```
//! The image lies with a server: qemu-storage-daemon, nbdkit, or that of a storage system. A guest
//! does not notice that the server is restarted: its requests in flight are sent again. A server
//! that breaks the protocol harms only its own disk (`session.rs`).
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod asked;
mod channel;
mod clock;
mod credentials;
mod error;
#[cfg(any(fuzzing, test))]
pub mod fuzzing;
mod incoming;
mod join;
mod line;
mod queue;
mod reconnector;
mod server;
mod session;
mod tls;
mod watched;

pub use credentials::Credentials;
pub use error::JoinError;
pub use manyring_wire::nbd::{Blocks, Export, Host, Uri, UriError};
pub use reconnector::{NbdOptions, fits};
pub use server::{Address, Connected, Server, Target};
pub use tls::TlsError;

use manyring_backend::blk::{Connection, Disk, DiskQueue, Geometry};
use manyring_wire::nbd::{CAN_MULTI_CONN, READ_ONLY, SEND_TRIM, SEND_WRITE_ZEROES};
use queue::NbdQueue;
use reconnector::Reconnector;
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;

/// The largest block size in bytes that a guest is told.
pub const BLOCK_MAX: u32 = 4096;

/// A disk that an NBD server serves.
#[derive(Debug)]
pub struct NbdDisk {
    reconnector: Arc<Reconnector>,
}

impl NbdDisk {
    /// Connects to the server, and measures its disk. May block for some seconds.
    ///
    /// # Errors
    /// [`JoinError`].
    pub fn open(options: NbdOptions) -> Result<Self, JoinError> {
        let disk = Self { reconnector: Reconnector::open(options)? };
        check(&disk.reconnector.told()).map(|()| disk)
    }

    /// The disk of which the guest was `told`, as [`measure`] has found it. It is connected to when
    /// a queue needs that: its server may be away.
    ///
    /// # Errors
    /// The system has no thread.
    pub fn told(options: NbdOptions, told: Export) -> Result<Self, JoinError> {
        Ok(Self { reconnector: Reconnector::begin(options, told, None)? })
    }
}

/// The export of a server, to which `connected` leads; the connection ends. Gives up after `limit`.
///
/// # Errors
/// [`JoinError`].
pub fn measure(
    connected: Connected,
    target: &Target,
    limit: Duration,
) -> Result<Export, JoinError> {
    let mut joined = join::negotiated(connected, target, clock::now() + limit)?;
    let export = joined.export;
    joined.channel.leave();
    check(&export).map(|()| export)
}

/// Checks that a guest can be told of this export.
fn check(export: &Export) -> Result<(), JoinError> {
    let min = export.blocks.min;
    if min > BLOCK_MAX {
        let problem = format!("its blocks of {min} bytes are larger than {BLOCK_MAX}");
        return Err(JoinError::Disk(problem));
    }
    Ok(())
}

impl Disk for NbdDisk {
    fn geometry(&self) -> Geometry {
        geometry(&self.reconnector.told(), self.reconnector.options.read_only)
    }

    fn open_queue(&self, has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        Ok(Box::new(NbdQueue::new(self.reconnector.clone(), has_ring)?))
    }

    fn queues_max(&self) -> usize {
        queues_max(&self.reconnector.told())
    }

    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno> {
        if size.is_some() {
            return Err(Errno::OPNOTSUPP);
        }
        let device = &self.reconnector.options.name;
        let told = self.reconnector.measure().map_err(|error| {
            tracing::warn!(device, "cannot measure the NBD server's disk: {error}");
            Errno::IO
        })?;
        Ok(geometry(&told, self.reconnector.options.read_only))
    }

    fn measure(&self) -> Result<u64, Errno> {
        let device = &self.reconnector.options.name;
        let export = self.reconnector.export().map_err(|error| {
            tracing::warn!(device, "cannot measure the NBD server's disk: {error}");
            Errno::IO
        })?;
        Ok(geometry(&export, self.reconnector.options.read_only).size)
    }

    fn kind(&self) -> &'static str {
        "nbd"
    }

    fn connections(&self) -> Vec<Connection> {
        self.reconnector.counts().iter().map(|counts| counts.shown()).collect()
    }
}

impl Drop for NbdDisk {
    fn drop(&mut self) {
        self.reconnector.close();
    }
}

/// Queues that a disk can have at most, of an export of the server.
#[must_use]
pub fn queues_max(export: &Export) -> usize {
    if export.flags & CAN_MULTI_CONN == 0 { 1 } else { usize::MAX }
}

/// The disk's geometry, as a guest sees it, of an export of the server.
#[must_use]
pub fn geometry(export: &Export, read_only: bool) -> Geometry {
    let has = |flag| export.flags & flag != 0;
    let block_size = if export.blocks.min > 512 { BLOCK_MAX } else { 512 };
    let physical_block_size = export.blocks.preferred.clamp(block_size, BLOCK_MAX);
    // A guest counts whole blocks: the export's bytes behind the last whole block are left out.
    let size = export.size / u64::from(block_size) * u64::from(block_size);
    Geometry {
        size,
        block_size,
        physical_block_size,
        min_io_size: export.blocks.preferred.clamp(physical_block_size, 1 << 20),
        opt_io_size: 0,
        read_only: read_only || has(READ_ONLY),
        discard_max: if has(SEND_TRIM) { size } else { 0 },
        write_zeroes_max: if has(SEND_WRITE_ZEROES) { size } else { 0 },
        secure_erase_max: 0,
    }
}

#[cfg(test)]
mod tests;
