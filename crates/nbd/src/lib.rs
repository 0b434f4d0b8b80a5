//! Disks that are exports of NBD servers, with our own client of the protocol.
//!
//! transport -> queue -> device -> **backend**. An [`NbdDisk`] is a [`Disk`] like any other: the
//! device that submits to it does not know that the image is remote.
//!
//! ```text
//! in            the Burst of a turn; sockets and certificates of a Server
//! out           Completion: token and result
//!
//! queue.rs      a queue and its connection: sends commands and receives replies
//! session.rs    turns requests into commands, and parses replies; pure, with asked.rs (a request)
//!               and incoming.rs (the stream of replies)
//! reconnector.rs
//!               the disk's thread, which connects and reconnects; line.rs: the state that a queue
//!               and this thread share; reconnector/: which queue has which connection, and a
//!               connection that several queues share
//! join.rs       negotiates on a socket of server.rs, with the certificates of credentials.rs
//! channel.rs    a connection in the transmission phase; tls.rs: the TLS session on it
//! watched.rs    an epoll, for workers without io_uring
//! ```
//! The server is qemu-storage-daemon, nbdkit, or that of a storage system. A guest does not notice
//! that the server is restarted: requests in flight are sent again on the next connection. A server
//! that breaks the protocol harms only its own disk (`session.rs`). Begin with `queue.rs`.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod channel;
mod clock;
mod credentials;
mod error;
#[cfg(any(fuzzing, test))]
pub mod fuzzing;
mod incoming;
mod join;
mod queue;
mod queue_connection;
mod reconnector;
mod server;
mod session;
mod split_request;
mod tls;
mod watched_socket;

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
    /// Connects to the server, and reads size and block sizes of its export. May block for some
    /// seconds.
    ///
    /// # Errors
    /// [`JoinError`]: connecting or negotiating failed, or the export cannot be a guest's disk.
    pub fn open(options: NbdOptions) -> Result<Self, JoinError> {
        let disk = Self { reconnector: Reconnector::open(options)? };
        check(&disk.reconnector.told()).map(|()| disk)
    }

    /// The disk whose properties `told` the guest was told, as [`measure`] has found them. Connects
    /// only when a queue is opened: the server may be unreachable now.
    ///
    /// # Errors
    /// [`JoinError::Connect`]: the host cannot start the disk's thread.
    pub fn told(options: NbdOptions, told: Export) -> Result<Self, JoinError> {
        Ok(Self { reconnector: Reconnector::begin(options, told, None)? })
    }
}

/// Asks the server at the other end of `connected` for its export, then closes the connection.
/// Gives up after `limit`.
///
/// # Errors
/// [`JoinError`]: negotiating failed, or the export cannot be a guest's disk.
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

/// Checks that the export can be a guest's disk: its blocks must not be larger than [`BLOCK_MAX`].
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

/// The most queues that a disk can have: one, unless the server allows several connections whose
/// flushes cover each other (`NBD_FLAG_CAN_MULTI_CONN`).
#[must_use]
pub fn queues_max(export: &Export) -> usize {
    if export.flags & CAN_MULTI_CONN == 0 { 1 } else { usize::MAX }
}

/// The geometry that a guest is told of the disk of an export.
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
