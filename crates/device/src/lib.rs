//! What the guest sees, and the loop that runs a queue.
//!
//! transport -> queue -> **device** -> backend. Two stages act: the transport, once, when a guest
//! arrives or leaves; and the device, always: its worker is the loop. A transport talks to a
//! [`Device`] and hands it each queue as an [`Activation`]; it gets a [`QueueHandle`] back, through
//! which the running queue is told of new memory, fds, enable and stop. What a session must hear
//! comes to it as an [`Event`] through one bounded mailbox.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod accounts;
mod aside;
mod balance;
#[cfg(feature = "bench")]
#[doc(hidden)]
pub mod bench;
pub mod blk;
mod bridge;
mod doorbell;
mod epoch;
mod foreign;
#[cfg(fuzzing)]
pub mod fuzzing;
mod handle;
mod handler;
mod io;
mod life;
mod live;
pub mod net;
mod notifier;
mod orders;
pub mod policy;
mod pool;
mod run;
mod running;
mod seats;
mod sentry;
pub mod stats;
mod table;
mod told;
mod wait;
mod wake;
mod worker;

pub use accounts::allowed_cpus;
pub use aside::aside;
pub use doorbell::{Call, Channel, DoorbellError, Kick};
pub use foreign::{ForeignFd, Janitor, MESSAGE_FDS_MAX, Origin, Room};
pub use handle::QueueHandle;
pub use life::{Event, EventKind};
pub use policy::polling::Polling;
pub use pool::{Pins, Pool, PoolOptions, StopError, WorkerView};
pub use stats::{QueueStats, WorkerStats};

use manyring_queue::{Base, DeviceQueue, QueueError, RingAddresses};
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};

/// A queue ready to run.
#[derive(Debug)]
pub struct Activation<R = DeviceQueue> {
    /// Index of the virtqueue in its device.
    pub index: usize,
    /// The ring, checked.
    pub queue: R,
    /// Where the ring lies, to resolve it again in other memory.
    pub addresses: RingAddresses,
    /// Available buffer notifications; none: the ring is polled.
    pub kick: Option<Kick>,
    /// Used buffer notifications; none: the driver polls.
    pub call: Option<Arc<Call>>,
    /// Error notifications.
    pub err: Option<Arc<Call>>,
    /// The ring is served; else it waits, and what arrives waits with it.
    pub enabled: bool,
    /// The virtio features that were negotiated.
    pub features: u64,
    /// Where the session hears of faults.
    pub events: mpsc::Sender<Event>,
}

/// Why a device refuses a config write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at offset {offset} of the config space are not writable")]
pub struct ConfigError {
    /// First byte.
    pub offset: u32,
    /// Bytes.
    pub len: usize,
}

/// Why a queue cannot run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// The ring is wrong.
    #[error("{0}")]
    Queue(#[from] QueueError),
    /// The backend has no queue for it.
    #[error("the backend cannot open a queue: {0}")]
    Backend(rustix::io::Errno),
    /// A driver of before virtio 1.0, whose packets have other headers.
    #[error("the driver does not follow virtio 1.0: VERSION_1 was not negotiated")]
    Legacy,
    /// The workers are stopped, or none could be started.
    #[error("no worker runs")]
    NoWorker,
}

/// Something that may take a while: the host's network lock, a worker's acknowledgement.
pub type Later<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What a transport may ask of a device. One session at a time uses it.
pub trait Device: Send + Sync + std::fmt::Debug {
    /// The device's name in the configuration.
    fn name(&self) -> &str;

    /// Virtio device id (`VIRTIO_ID_*`).
    fn virtio_id(&self) -> u32;

    /// Virtio features offered.
    fn features(&self) -> u64;

    /// Virtqueues the device has at most.
    fn queue_count(&self) -> usize;

    /// Entries a virtqueue may have at most.
    fn queue_size_max(&self) -> u16;

    /// Reads the config space; bytes past its end are zero.
    fn read_config(&self, offset: u32, bytes: &mut [u8]);

    /// Writes the config space.
    ///
    /// # Errors
    /// [`ConfigError`] if a byte is not writable.
    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), ConfigError>;

    /// The driver has reset the device (status 0): the fields of the config space that it wrote
    /// are again what they were. Rings, features and memory stay: the front-end says what becomes
    /// of them.
    fn reset_config(&self) {}

    /// The driver's features are known, or the device was reset (then 0).
    fn set_features(&self, features: u64) -> Later<'_, ()>;

    /// Changes whenever the config space does, other than by the driver.
    fn config_changes(&self) -> watch::Receiver<u64>;

    /// Starts a queue.
    ///
    /// # Errors
    /// [`StartError`].
    fn start(&self, activation: Activation) -> Later<'_, Result<QueueHandle, StartError>>;

    /// Serves the running queue of this index, or lets it wait; returns when its worker knows.
    fn set_enabled<'a>(
        &'a self,
        index: usize,
        queue: &'a QueueHandle,
        enabled: bool,
    ) -> Later<'a, ()> {
        let _ = index;
        Box::pin(queue.set_enabled(enabled))
    }

    /// Stops the running queue of this index once nothing is in flight, and returns its base.
    ///
    /// # Errors
    /// [`StopError`] if the worker has ended.
    fn stop(&self, index: usize, queue: QueueHandle) -> Later<'_, Result<Base, StopError>> {
        let _ = index;
        Box::pin(queue.stop())
    }

    /// Announces the guest of this MAC address to the network. False: this device has none.
    fn send_rarp(&self, mac: [u8; 6]) -> Later<'_, bool> {
        let _ = mac;
        Box::pin(std::future::ready(false))
    }

    /// The front-end has told its guest this MTU. False: it cannot be.
    fn set_front_end_mtu(&self, mtu: u64) -> bool {
        let _ = mtu;
        false
    }

    /// Counters of queue `index`; they outlive sessions.
    fn stats(&self, index: usize) -> Option<Arc<QueueStats>>;
}

impl From<rustix::io::Errno> for StartError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Backend(errno)
    }
}
