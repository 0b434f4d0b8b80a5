//! A vring under construction -> an `Activation`: what the transport holds of each vring.

use manyring_engine::{Call, Kick, QueueHandle};
use std::sync::Arc;

/// The host side of a vring: its doorbells, and its queue while it runs.
#[derive(Debug, Default)]
pub(super) struct VringHost {
    /// Given away to the queue when it starts.
    pub(super) kick: Option<Kick>,
    /// Kept, since a queue that starts again may be given no new one.
    pub(super) call: Option<Arc<Call>>,
    pub(super) err: Option<Arc<Call>>,
    pub(super) running: Option<QueueHandle>,
}
