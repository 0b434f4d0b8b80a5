//! The orders that the control thread sends to running queues.

use crate::fds::doorbell::{Call, Kick};
use crate::policy::moderation::Limits;
use manyring_memory::GuestMemory;
use manyring_queue::{Base, QueueError, RingAddresses};
use std::sync::Arc;
use tokio::sync::oneshot;

/// A unique number of a running queue, in all workers and for all time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct QueueId(pub(crate) u64);

/// A reply to an order.
pub type Reply<T> = oneshot::Sender<T>;
/// A reply to an order that removes guest memory: sent once nothing uses that memory any more. An
/// error says that the order was refused, and nothing has changed.
pub type Fence = Reply<Result<(), QueueError>>;

/// An order of a session or a device to a running queue. If the reply is dropped instead of sent,
/// the queue runs no more.
#[derive(Debug)]
pub enum Order {
    /// End, once nothing is in flight; the reply is the base.
    Stop(Reply<Base>),
    /// Serve the ring at these addresses of this memory.
    Memory(Arc<GuestMemory>, RingAddresses, Fence),
    /// Reply when everything that was taken until now is done.
    Fence(Fence),
    /// The session ends, and its front-end gets no base: leave the chains that are set aside to the
    /// next session, if the ring has a record.
    LeaveAside(Reply<()>),
    /// Enable or disable the queue (`SET_VRING_ENABLE`).
    Enable(bool, Fence),
    /// Read the new rules of the queue (link, offloads, filter).
    Refresh(Reply<()>),
    /// Hold notifications back within the limits that the driver has set (virtio 1.3 §5.1.6.5.9);
    /// `None`: as the operator has configured.
    Moderate(Option<Limits>, Reply<()>),
    /// Replace the kick.
    Kick(Option<Kick>, Reply<()>),
    /// Replace the call.
    Call(Option<Arc<Call>>, Reply<()>),
    /// Replace the err.
    Err(Option<Arc<Call>>, Reply<()>),
}

impl Order {
    /// True if the queue gives back, for this order, the chains of frames that it holds.
    pub(crate) fn ends_burst(&self) -> bool {
        matches!(self, Self::Stop(_) | Self::Memory(..) | Self::Enable(false, _))
    }
}
