//! The queues of a Xen disk, in the supervisor and in device processes: starts and stops them, and
//! describes faults of the front-end.

use super::in_words;
use manyring_device::blk::blkif::{Attachment, XenBlkDevice};
use manyring_device::is_shortage;
use manyring_engine::{Event, EventKind, QueueHandle};
use manyring_transport::xenbus::HostError;
use rustix::io::Errno;
use tokio::task::JoinSet;

/// The queues that were started, and the error that kept the next one from starting.
pub(crate) type Begun = (Vec<QueueHandle>, Option<HostError>);

/// Starts queues one after the other, until one fails. Each attachment already has all its
/// resources open, so an early queue's answers do not depend on the later ones. May block.
pub fn begin(device: &XenBlkDevice, attachments: Vec<Attachment>) -> Begun {
    let mut queues = Vec::new();
    for attachment in attachments {
        let index = attachment.index;
        match device.start(attachment) {
            Ok(queue) => queues.push(queue),
            Err(error) => {
                let text = format!("queue {index}: {}", in_words(&error));
                return (queues, Some(HostError { text, is_passing: error.is_shortage() }));
            }
        }
    }
    (queues, None)
}

/// Stops queues; returns when their rings, granted pages and event channels are closed.
pub async fn stop_all(queues: Vec<QueueHandle>) {
    let mut stops = JoinSet::new();
    for queue in queues {
        stops.spawn(queue.stop());
    }
    while stops.join_next().await.is_some() {}
}

/// Describes the fault of the front-end that an event reports; `None` if it reports no fault.
pub fn fault_of(Event { index, kind }: &Event) -> Option<String> {
    match kind {
        EventKind::Fault(error) => Some(format!("queue {index}: {error}")),
        EventKind::MemoryLost => Some(format!("queue {index}: a page of the guest is gone")),
        EventKind::PortGone => None,
    }
}

/// Returns an error that a retry does not cure.
pub fn refused(text: String) -> HostError {
    HostError::new(text)
}

/// Returns the error of a system call. A shortage of memory or descriptors is marked as passing: a
/// retry may succeed.
pub fn failed(what: String, errno: Errno) -> HostError {
    HostError { text: format!("{what}: {errno}"), is_passing: is_shortage(errno) }
}
