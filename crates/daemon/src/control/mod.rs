//! The control socket: HTTP with JSON over a unix socket, for the owner of the process.
//!
//! Runs on the control thread and never blocks it: what may block or take long (a resize, all
//! counters of many queues) runs on a thread of its own. Names are fixed in `docs/design/0001`.

mod api;
mod change;
pub(crate) mod client;
mod refusal;
pub(crate) mod snapshot;
mod socket;

pub(crate) use socket::{bind, serve};

use crate::assemble::{House, Part};
use manyring_engine::Pool;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// What the control API shows and changes.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) pool: Arc<Pool>,
    pub(crate) devices: Arc<[Controlled]>,
}

/// A device under control.
#[derive(Debug)]
pub(crate) struct Controlled {
    pub(crate) part: Part,
    /// One change at a time: a host that hangs must not collect threads.
    changing: Arc<Semaphore>,
}

impl State {
    pub(crate) fn new(house: &House) -> Self {
        let controlled =
            |part: &Part| Controlled { part: part.clone(), changing: Arc::new(Semaphore::new(1)) };
        Self { pool: house.pool.clone(), devices: house.parts.iter().map(controlled).collect() }
    }
}
