//! `VringHost`: the doorbells that the transport keeps for each vring, and its queue while it runs.

use manyring_engine::{Call, Kick, QueueHandle};
use std::sync::Arc;

/// The host side of a vring: its doorbells, and its queue while it runs.
#[derive(Debug, Default)]
pub(super) struct VringHost {
    /// Goes to the queue when the queue has started.
    pub(super) kick: Option<Kick>,
    /// Shared with the queue: one that starts again may get no new call from the front-end.
    pub(super) call: Option<Arc<Call>>,
    pub(super) err: Option<Arc<Call>>,
    pub(super) running: Option<QueueHandle>,
}
