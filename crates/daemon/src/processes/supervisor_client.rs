//! Privileged requests of a device process: threads ask the supervisor, and wait for its answer.

use crate::protocol::message::PrivilegedRequest;
use manyring_backend::net::tap::lent::Owner;
use manyring_device::net::{Offloads, RssConfig};
use rustix::io::Errno;
use std::collections::HashMap;
use tokio::sync::{mpsc, oneshot};

/// A report that waits to be sent.
#[derive(Debug)]
pub(super) enum Outgoing {
    /// A privileged request of a device. The answer is an error number, or 0.
    Request { device: String, request: PrivilegedRequest, answer: oneshot::Sender<i32> },
    /// The interface of a device may be gone.
    Suspect { device: String },
    /// The session of a client has ended.
    Gone { device: String, number: u64 },
    /// All devices have quiesced.
    Quiesced,
}

/// The supervisor, as the port or the disk of one device sees it.
#[derive(Clone, Debug)]
pub(super) struct SupervisorClient {
    pub(super) device: String,
    pub(super) outgoing: mpsc::Sender<Outgoing>,
}

impl SupervisorClient {
    /// Sends a request, and waits for the answer. Never on the control thread. If the supervisor is
    /// gone this returns success: the process ends, and the host has released what the supervisor
    /// had.
    fn ask(&self, request: PrivilegedRequest) -> Result<(), Errno> {
        let (answer, answered) = oneshot::channel();
        let queued = Outgoing::Request { device: self.device.clone(), request, answer };
        let answered = self.outgoing.blocking_send(queued).map(|()| answered.blocking_recv());
        match answered {
            Ok(Ok(error)) if error != 0 => Err(Errno::from_raw_os_error(error)),
            _ => Ok(()),
        }
    }
}

impl SupervisorClient {
    /// Has the image locked for the rings that start, or unlocked.
    pub(super) fn lock(&self, is_held: bool) -> Result<(), Errno> {
        self.ask(PrivilegedRequest::Lock { is_held })
    }
}

impl Owner for SupervisorClient {
    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno> {
        let pair = u16::try_from(index).map_err(|_| Errno::INVAL)?;
        self.ask(PrivilegedRequest::Pair { pair, attached })
    }

    fn set_offloads(&self, offloads: Offloads) -> Result<(), Errno> {
        self.ask(PrivilegedRequest::Offloads { bits: offloads.guest_features() })
    }

    fn set_rss(&self, rss: Option<&RssConfig>) -> Result<(), Errno> {
        self.ask(PrivilegedRequest::Rss { config: rss.map(RssConfig::emit).unwrap_or_default() })
    }

    fn suspect(&self) {
        // If the queue is full, the supervisor gets a report of this device, or of another one,
        // soon.
        let _ = self.outgoing.try_send(Outgoing::Suspect { device: self.device.clone() });
    }
}

/// Requests that are not answered yet, by their number.
#[derive(Debug, Default)]
pub(super) struct Unanswered {
    next: u64,
    waiting: HashMap<u64, oneshot::Sender<i32>>,
}

impl Unanswered {
    /// The number of a new request.
    pub(super) fn ask(&mut self, answer: oneshot::Sender<i32>) -> u64 {
        self.next += 1;
        self.waiting.insert(self.next, answer);
        self.next
    }

    pub(super) fn answer(&mut self, number: u64, error: i32) {
        if let Some(answer) = self.waiting.remove(&number) {
            let _ = answer.send(error);
        }
    }
}
