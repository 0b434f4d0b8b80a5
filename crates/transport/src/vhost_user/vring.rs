//! `VringHost`: the doorbells that the transport keeps for each vring, and its queue while it runs.

use manyring_engine::{Call, Kick, QueueHandle};
use std::sync::Arc;

/// The host side of a vring: its doorbells, and its queue while it runs.
#[derive(Debug, Default)]
pub(super) struct VringHost {
    /// The kick of the front-end, until a queue starts and takes it.
    pub(super) kick: Option<Kick>,
    /// The call of the front-end, shared with the queue: when the queue starts again, the front-end
    /// may send no new one.
    pub(super) call: Option<Arc<Call>>,
    pub(super) err: Option<Arc<Call>>,
    pub(super) running: Option<QueueHandle>,
}
