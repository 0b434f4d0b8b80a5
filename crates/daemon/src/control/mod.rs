//! The control socket: HTTP with JSON over a unix socket, for the owner of the process.
//!
//! Runs on the control thread and never blocks it: what may block or take long (a resize, all
//! counters of many queues) runs on a thread of its own. Names are fixed in `docs/design/0001`.

mod api;
mod change;
pub(crate) mod client;
mod refusal;
mod registry;
mod reserve;
pub(crate) mod snapshot;
mod socket;

pub(crate) use registry::{Controlled, Entry, Registry, Waiting};
pub(crate) use socket::{bind, serve};

use manyring_engine::Pool;
use std::sync::Arc;

/// What the control API shows and changes.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) pool: Arc<Pool>,
    pub(crate) devices: Registry,
}
