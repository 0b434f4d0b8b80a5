//! The workers' loop that runs queues, and the policies by which it decides.
//!
//! transport -> queue -> device -> **engine**. The engine decides when a queue takes a turn, when
//! its worker sleeps, and when the driver gets a used buffer notification. The engine does not know
//! what a request or a frame is: the [`Handler`] of a device interprets the chains.
//!
//! ```text
//! device:   activation.running(handler, stats, ..) -> Pool::start -> QueueHandle
//! session:  QueueHandle: memory, enable, kick, call, stop -> Order -> the worker's mailbox
//! worker:   wait for a kick, a completion, a port, an order, a time
//!           every hot queue takes a turn: its handler takes chains, serves them, returns them
//!           publish the returned chains; call the driver, or hold the call back
//!           no work left: keep polling or sleep, as policy/polling.rs decides
//! session:  Event (a fault, lost memory, a lost port) <- through one bounded mailbox
//! ```
//! The modules, from the outside to the inside:
//! * [`Pool`] (`pool/`) starts the workers, on demand, and puts a queue on the first of its
//!   workers. `pool/balance.rs` moves queues between them, as `policy/placement.rs` decides.
//! * A worker (`worker/`) is one thread that owns queues. It calls each queue as `dyn Run`: one
//!   indirect call for a turn, whatever the ring and the device are.
//! * [`RunningQueue`] (`running/`) is the one implementation of that trait, generic over the ring
//!   and the handler: within a turn nothing is dispatched per chain (`running/format.rs`).
//!   `running/notifier.rs` has its doorbells; `running/life.rs` has a turn's permission to use the
//!   ring, and the events for its session.
//! * [`Handler`] is what a device implements. A handler takes chains off the ring and returns them.
//!   It never sleeps, watches no file descriptor by itself, and sends no notification.
//! * [`QueueIo`] is a queue's access to its worker for one call: its io_uring, the watches of file
//!   descriptors that wake it, the queue's slot on the worker, and the time.
//! * [`Epochs`] and [`Table`] are for handlers whose work outlives a turn. The table keeps the work
//!   in flight, under its chain's slot; the epochs say which snapshot of guest memory the work
//!   uses.
//! * `policy/` only decides: it does no I/O and reads no clock.
//!
//! How queues, threads and guests share resources:
//! 1. A queue has one owner at a time, its worker: a request needs no lock and no atomic
//!    instruction. A queue moves to another worker as a whole, when nothing of it is in flight.
//! 2. The guests whose queues a worker serves share its time (`policy/share.rs`), and their disks
//!    share its io_uring (`manyring_backend::sys::uring`).
//! 3. Only workers and threads of disks touch guest memory, where the front-end decides how long a
//!    page fault takes; the control thread never does (`manyring_memory::Duty`).
//! 4. Only a device's janitor checks and closes a file descriptor that its front-end sent
//!    (`fds/foreign.rs`). The sentry interrupts a write to an eventfd that blocks
//!    (`fds/sentry.rs`).
//! 5. Memory that a request uses stays mapped until the request is done. An order that removes
//!    memory carries a [`Fence`], which is answered when nothing of the former memory is in use
//!    (`running/epoch.rs`).
//!
//! A handler that returns every chain unchanged:
//! ```
//! use manyring_engine::{Done, Handler, TurnMode, Turn, Waits};
//! use manyring_queue::{BATCH_CHAINS, Batch, Chains};
//!
//! #[derive(Debug, Default)]
//! struct Returns {
//!     batch: Batch,
//! }
//!
//! impl<R: Chains> Handler<R> for Returns {
//!     fn turn(&mut self, ring: &mut R, turn: &mut Turn<'_, '_>) -> Done {
//!         if turn.mode == TurnMode::Rest {
//!             return Done::default();
//!         }
//!         let popped = ring.pop_batch(&mut self.batch, BATCH_CHAINS);
//!         for index in 0..popped {
//!             if let Some((chain, _readable, _writable)) = self.batch.take(index) {
//!                 ring.push_used(chain, 0);
//!             }
//!         }
//!         Done { popped, used: popped, told: popped, ..Done::default() }
//!     }
//!
//!     fn waits(&self, _ring: &R) -> Waits {
//!         Waits { driver: true, ..Waits::default() }
//!     }
//!
//!     fn abandon(&mut self, _ring: &mut R) {} // nothing is ever in flight
//! }
//! ```
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod accounts;
mod blocking;
mod failure_lines;
mod fds;
mod io;
pub mod limit;
mod lookout;
mod moderation_text;
pub mod policy;
mod pool;
mod running;
pub mod stats;
mod wait;
mod watch;
mod worker;

pub use accounts::{allowed_cpus, cpu_time};
pub use blocking::{AsideRow, aside, aside_for};
pub use failure_lines::FailureLines;
pub use fds::budget::{FdReservation, MESSAGE_FDS_MAX, Reserve, StandIns, Surplus};
pub use fds::doorbell::{Call, Channel, DoorbellError, Kick};
pub use fds::ends::SessionSocket;
pub use fds::foreign::{ForeignFd, Janitor, Origin};
pub use io::QueueIo;
pub use limit::{Gate, Limit, Rate, Way};
pub use moderation_text::NoModeration;
pub use policy::moderation::Moderation;
pub use policy::polling::Polling;
pub use pool::handle::{QueueHandle, Route};
pub use pool::nodes::GuestNodes;
pub use pool::{Home, Pins, Pool, PoolOptions, Pulse, StopError, WorkerView};
pub use running::RunningQueue;
pub use running::epoch::{Epoch, Epochs};
pub use running::format::AnyFormat;
pub use running::handler::{Awaited, Done, Handler, Turn, TurnMode, Waits};
pub use running::life::{Event, EventKind};
pub use running::orders::{Fence, Order, Reply};
pub use running::table::Table;
pub use stats::{QueueStats, WorkerStats};
pub use wait::clock_now_ns;
pub use watch::{Held, held};

/// For tests and benches of a crate that has a handler: they run a queue without a worker, by the
/// calls that a worker makes.
#[doc(hidden)]
pub mod solo {
    pub use crate::running::run::{Happened, Run, Turned};
    pub use crate::wait::{EventSource, Wait, Woken};
}

use manyring_queue::{DeviceQueue, RingAddresses};
use std::sync::Arc;
use tokio::sync::mpsc;

/// A queue ready to run.
#[derive(Debug)]
pub struct Activation<R = DeviceQueue> {
    /// Index of the virtqueue in its device.
    pub index: usize,
    /// The ring, checked. Its positions in guest memory are read on the worker ([`Ring::begin`]).
    ///
    /// [`Ring::begin`]: manyring_queue::Ring::begin
    pub queue: R,
    /// The guest addresses of the ring, to resolve them again in other memory.
    pub addresses: RingAddresses,
    /// The doorbell of the driver's available buffer notifications; `None`: the ring is polled.
    pub kick: Option<Kick>,
    /// The doorbell for used buffer notifications; `None`: the driver polls.
    pub call: Option<Arc<Call>>,
    /// The doorbell for error notifications.
    pub err: Option<Arc<Call>>,
    /// True if the ring is served from the start. Chains of a queue that is not enabled stay in the
    /// ring; with [`Handler::DROPS_WHEN_DISABLED`] they are dropped after a kick.
    pub enabled: bool,
    /// The virtio features that were negotiated.
    pub features: u64,
    /// The channel for events to the session: faults, lost memory, a lost port.
    pub events: mpsc::Sender<Event>,
}
