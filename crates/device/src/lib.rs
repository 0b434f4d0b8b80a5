//! Devices as the guest sees them: their features, config space, and the meaning of each chain.
//!
//! transport -> queue -> **device** -> backend. A transport talks to a [`Device`] and hands it each
//! queue as an [`Activation`]. The device puts a handler before it, which turns chains into
//! requests of a disk or frames of a port, and gives both to the engine, whose workers run the
//! queue. The transport gets a [`QueueHandle`] back, through which the running queue is told of new
//! memory, fds, enable and stop.
//!
//! ```text
//! start(activation):  open the backend's queue: a disk's, or one half of a port's
//!                     activation.running(handler, stats, ..) -> Pool::start -> handle
//! a turn of a blk queue (blk/virtio.rs):
//!     pop a batch; for each chain: copy the header, parse it, check it against the disk
//!     requests without disk I/O complete at once; all others are one burst to DiskQueue::submit
//!     reap; for each completion: write the status byte, push the chain
//! a turn of a transmitq (net/tx.rs):
//!     pop a batch; for each chain: copy the header, check it; drop and count a wrong frame
//!     the burst goes to PortTx::send; the chains of frames that the port took are pushed
//!     if the port is full, the other frames stay, in order, until the port has room
//! a turn of a receiveq (net/rx.rs):
//!     pop buffers ahead; while the port has frames, and the turn's bound is not reached:
//!     read one into the buffers, or copy one that the port lends; the rules drop or accept it
//!     write the header with num_buffers; push the buffers; publish sixteen frames together
//! ```
//! The engine publishes, calls the driver, sleeps and wakes; a handler does none of these
//! (`manyring_engine::Handler` lists its methods). The reasons for this division:
//! 1. **A handler does not read the clock.** It names the events that make its next turn worthwhile
//!    (buffers from the driver, a port, a time), and the engine waits for them.
//! 2. **Every popped chain is pushed, or can be put back.** Buffers and frames that are not in use
//!    yet go back into the ring when memory changes, when the queue stops and when it is disabled;
//!    the queue waits for requests that a disk has begun (`blk/pending.rs`).
//! 3. **Changes of the control thread reach running queues in one way.** The control thread sets a
//!    value (`live.rs`), and each queue loads it when it is told to: link, offloads, MTU, filter.
//! 4. **Both devices have the same files.** `config.rs` has the offer, `handler.rs` the interface
//!    to the engine, `mod.rs` the device. A worker serves the ring of a network device's control
//!    queue (`net/control_queue.rs`); a task of the control thread carries its commands out,
//!    because they may have to wait for the host.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[cfg(feature = "bench")]
#[doc(hidden)]
pub mod bench;
pub mod blk;
#[cfg(fuzzing)]
pub mod fuzzing;
mod live;
pub mod net;
mod policy;
mod side;
mod state;
mod stats;

pub use side::{DiskSide, HostSide, Owned, SideKind};
pub use state::StateError;
pub use stats::DeviceStats;

use manyring_engine::{Activation, QueueHandle, QueueStats, StopError};
use manyring_memory::{GrantError, MemoryError};
use manyring_queue::{Base, QueueError};
use rustix::io::Errno;
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::watch;

/// Why a device refuses a config write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at offset {offset} of the config space are not writable")]
pub struct ConfigError {
    /// Offset of the first byte of the write.
    pub offset: u32,
    /// Length of the write in bytes.
    pub len: usize,
}

/// Why a queue cannot be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// The ring that the driver set up is invalid.
    #[error("{0}")]
    Queue(#[from] QueueError),
    /// The backend cannot open a queue of the disk, or a half of a queue pair of the port.
    #[error("the backend cannot open a queue: {0}")]
    Backend(Errno),
    /// The pages of a Xen ring cannot be mapped, or the process has no addresses left for the pages
    /// of requests.
    #[error("the queue's granted pages: {0}")]
    Grants(#[from] GrantError),
    /// The journal of a Xen ring cannot be mapped.
    #[error("the journal of the ring: {0}")]
    Journal(MemoryError),
    /// The journal's file system has no space for it, or refuses to extend it.
    #[error("no space for the journal of the ring: {0}")]
    JournalSpace(Errno),
    /// The image is locked by another process, or cannot be locked; the log says which.
    #[error("the image is not to be had")]
    Image,
    /// The workers are stopped, or none could be started.
    #[error("no worker runs")]
    NoWorker,
}

impl StartError {
    /// True if the host lacks a resource that may be free later: then a later start may succeed.
    #[must_use]
    pub fn is_shortage(&self) -> bool {
        match self {
            Self::Backend(errno) | Self::JournalSpace(errno) => is_shortage(*errno),
            Self::Grants(GrantError::Memory(error)) | Self::Journal(error) => match error {
                MemoryError::Map(errno) => is_shortage(*errno),
                error => matches!(error, MemoryError::Pieces { .. } | MemoryError::NoThread),
            },
            Self::Grants(GrantError::Device(errno)) => is_shortage(*errno),
            Self::Grants(error) => matches!(error, GrantError::NoRoom { .. }),
            Self::Image | Self::NoWorker => true,
            Self::Queue(_) => false,
        }
    }
}

/// True if `errno` reports the lack of a resource that may be free again later.
#[must_use]
pub fn is_shortage(errno: Errno) -> bool {
    use Errno as E;
    const SHORTAGES: [Errno; 7] =
        [E::MFILE, E::NFILE, E::NOMEM, E::AGAIN, E::NOBUFS, E::NOSPC, E::DQUOT];
    SHORTAGES.contains(&errno)
}

/// A future that may take long, for example until the kernel's network lock is free, or until a
/// worker has carried out an order.
pub type PendingResult<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Stores the settings of a driver for the process that will serve this guest next.
pub trait StateJournal: Send + Sync + std::fmt::Debug {
    /// Replaces the stored bytes by `bytes`, which [`Device::save`] returned.
    fn keep_state(&self, bytes: Vec<u8>) -> PendingResult<'_, ()>;
}

/// The calls by which a transport uses a device. One session at a time makes them.
pub trait Device: Send + Sync + std::fmt::Debug {
    /// Returns the device's name in the configuration.
    fn name(&self) -> &str;

    /// Called when a queue has found its port down or deleted.
    fn port_lost(&self) {}

    /// Returns the virtio device ID (`VIRTIO_ID_*`).
    fn virtio_id(&self) -> u32;

    /// Returns the virtio features that the device offers.
    fn features(&self) -> u64;

    /// Returns the vhost-user protocol features (`VHOST_USER_PROTOCOL_F_*`) that this device serves
    /// beyond those of every device.
    fn protocol_features(&self) -> u64 {
        0
    }

    /// Returns the most virtqueues of the device.
    fn queue_count(&self) -> usize;

    /// Returns the maximum number of entries of a virtqueue.
    fn queue_size_max(&self) -> u16;

    /// Reads the config space; bytes past its end are zero.
    fn read_config(&self, offset: u32, bytes: &mut [u8]);

    /// Writes the config space.
    ///
    /// # Errors
    /// [`ConfigError`]: a byte is not writable.
    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), ConfigError>;

    /// Called when the driver has reset the device (status 0): sets the fields of the config space
    /// that the driver wrote to their initial values. Rings, features and memory are not changed:
    /// the front-end changes them by other calls.
    fn reset_config(&self) {}

    /// Sets the features that the driver negotiated; 0: it has reset the device.
    fn set_features(&self, features: u64) -> PendingResult<'_, ()>;

    /// Returns a receiver that is notified of each change of the config space that the driver did
    /// not make itself.
    fn config_changes(&self) -> watch::Receiver<u64>;

    /// True if packed rings of this device record in the ring where to resume it
    /// ([`manyring_queue::DeviceQueue::trailed`]), because no front-end keeps an in-flight region
    /// for this kind of device.
    fn trails_rings(&self) -> bool {
        false
    }

    /// Starts a queue on a worker.
    ///
    /// # Errors
    /// [`StartError`]: the queue does not run.
    fn start(&self, activation: Activation) -> PendingResult<'_, Result<QueueHandle, StartError>>;

    /// Enables or disables the running queue of this index; returns when its worker has done so.
    fn set_enabled<'a>(
        &'a self,
        index: usize,
        queue: &'a QueueHandle,
        enabled: bool,
    ) -> PendingResult<'a, ()> {
        let _ = index;
        Box::pin(queue.set_enabled(enabled))
    }

    /// Stops the running queue of this index, once nothing is in flight. Returns its base.
    ///
    /// # Errors
    /// [`StopError`]: the worker has ended.
    fn stop(&self, index: usize, queue: QueueHandle) -> PendingResult<'_, Result<Base, StopError>> {
        let _ = index;
        Box::pin(queue.stop())
    }

    /// Sends a RARP frame to the network, which announces the guest's MAC address. Returns false if
    /// the device has no network.
    fn send_rarp(&self, mac: [u8; 6]) -> PendingResult<'_, bool> {
        let _ = mac;
        Box::pin(std::future::ready(false))
    }

    /// Sets the MTU of which the front-end has told its guest. Returns false if the device cannot
    /// have this MTU.
    fn set_front_end_mtu(&self, mtu: u64) -> bool {
        let _ = mtu;
        false
    }

    /// Returns the driver's settings that are in none of its rings, features and memory, as bytes
    /// for such a device in another process. No ring may run.
    fn save(&self) -> Vec<u8>;

    /// Sets the journal for the settings that the driver makes by a control queue; `None`: there is
    /// none. The device writes each setting to the journal before it answers the command.
    fn keep_state_by(&self, journal: Option<Arc<dyn StateJournal>>) {
        let _ = journal;
    }

    /// Adopts settings that another device has saved, for a driver with the same features. The
    /// features are set before or after this call. No ring may run.
    ///
    /// # Errors
    /// [`StateError`]: the state is invalid, and nothing has changed.
    fn restore<'a>(&'a self, state: &'a [u8]) -> PendingResult<'a, Result<(), StateError>>;

    /// Returns the counters of queue `index`, which outlive sessions.
    fn stats(&self, index: usize) -> Option<Arc<QueueStats>>;
}

impl From<Errno> for StartError {
    fn from(errno: Errno) -> Self {
        Self::Backend(errno)
    }
}
