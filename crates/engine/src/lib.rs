//! The loop that runs queues, and what it decides by.
//!
//! transport -> queue -> device -> **engine**. The engine knows when a queue takes a turn, when its
//! worker sleeps, and who must be told. It knows neither request nor frame: what a chain means is
//! known to the [`Handler`] that a device brings.
//!
//! ```text
//! device:   RunningQueue::new(activation, handler, stats) -> Pool::start -> QueueHandle
//! session:  QueueHandle: memory, enable, kick, call, stop -> Order -> the worker's mailbox
//! worker:   wait for a kick, a completion, a port, an order, a time
//!           every hot queue takes a turn: its handler takes chains, serves them, returns them
//!           publish; tell the driver, or hold that back; nothing left: spin or sleep by the law
//! session:  Event (a fault, memory that is gone) <- through one bounded mailbox
//! ```
//! What is shared, and by whom:
//! 1. A queue has one owner at a time, its worker: no lock, no atomic instruction per request.
//! 2. A worker's time is shared by the guests whose queues it serves (`policy/share.rs`); its ring
//!    of the kernel by their disks (`manyring_backend::sys::uring`).
//! 3. A file descriptor of a front-end is touched by its device's janitor (`foreign.rs`), and an
//!    eventfd is written to under the eyes of the sentry (`sentry.rs`).
//! 4. Memory that a request uses stays mapped until the request is done (`epoch.rs`): whoever takes
//!    memory away waits for that, and is told.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod accounts;
mod aside;
mod balance;
mod bridge;
mod doorbell;
mod epoch;
mod foreign;
mod handle;
mod handler;
mod io;
mod life;
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
pub use epoch::{Epoch, Epochs};
pub use foreign::{ForeignFd, Janitor, MESSAGE_FDS_MAX, Origin, Room};
pub use handle::{QueueHandle, Route};
pub use handler::{Awaited, Done, Handler, Mode, Turn, Waits};
pub use io::QueueIo;
pub use life::{Event, EventKind};
pub use orders::{Fence, Order, Reply};
pub use policy::moderation::Moderation;
pub use policy::polling::Polling;
pub use pool::{Home, Pins, Pool, PoolOptions, StopError, WorkerView};
pub use running::RunningQueue;
pub use seats::Seat;
pub use stats::{QueueStats, WorkerStats};
pub use table::Table;

/// A queue that no worker runs: for the tests and the bench of who brings a handler. They stand
/// where a worker stands.
#[doc(hidden)]
pub mod solo {
    pub use crate::run::{Happened, Run, Turned};
    pub use crate::wait::{Source, Wait, Woken};
}

use manyring_queue::{DeviceQueue, RingAddresses};
use std::sync::Arc;
use tokio::sync::mpsc;

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
