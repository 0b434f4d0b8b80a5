//! Chooses the format of a virtqueue's ring: once for each queue, and for all of its turns.
//!
//! A handler serves chains of a ring of any format, and is compiled for each format. If a turn
//! chose the format instead, each chain would pay for it: an enum of the formats took 3 to 4 % more
//! instructions a turn.

use crate::Activation;
use crate::policy::moderation::Moderation;
use crate::running::RunningQueue;
use crate::running::handler::Handler;
use crate::running::run::Run;
use crate::stats::QueueStats;
use manyring_queue::{DeviceQueue, packed, split};
use std::sync::Arc;

/// A handler for the chains of a virtqueue of any format.
pub trait AnyFormat: Handler<split::SplitDeviceHalf> + Handler<packed::PackedDeviceHalf> {}

impl<H: Handler<split::SplitDeviceHalf> + Handler<packed::PackedDeviceHalf>> AnyFormat for H {}

impl Activation {
    /// Makes the queue that a worker runs: `handler` serves its ring, and notifications are held
    /// back according to `moderation`.
    pub fn running(
        self,
        handler: impl AnyFormat,
        stats: Arc<QueueStats>,
        moderation: Moderation,
    ) -> Box<dyn Run> {
        let (queue, activation) = self.without_queue();
        match queue {
            DeviceQueue::Split(ring) => {
                let running = RunningQueue::new(activation.with(ring), handler, stats);
                Box::new(running.moderated(moderation))
            }
            DeviceQueue::Packed(ring) => {
                let running = RunningQueue::new(activation.with(ring), handler, stats);
                Box::new(running.moderated(moderation))
            }
        }
    }

    fn without_queue(self) -> (DeviceQueue, Activation<()>) {
        let Self { index, queue, addresses, kick, call, err, enabled, features, events } = self;
        let queue_less =
            Activation { index, queue: (), addresses, kick, call, err, enabled, features, events };
        (queue, queue_less)
    }
}

impl Activation<()> {
    fn with<R>(self, queue: R) -> Activation<R> {
        let Self { index, queue: (), addresses, kick, call, err, enabled, features, events } = self;
        Activation { index, queue, addresses, kick, call, err, enabled, features, events }
    }
}
