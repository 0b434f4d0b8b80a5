//! Privileged requests of a device process: a thread sends a request to the supervisor, and waits
//! for the answer.

use manyring_backend::net::tap::lent::Owner;
use manyring_device::net::{Offloads, RssConfig};
use manyring_protocol::message::PrivilegedRequest;
use manyring_protocol::nbd::NbdFailure;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::HashMap;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// The answer to a privileged request.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// The errno of the failed request; 0 if the request was carried out.
    pub(super) error: i32,
    /// The reason, if the supervisor could not connect to the NBD server.
    pub(super) failed: Option<NbdFailure>,
    /// The descriptors of a connection to the NBD server.
    pub(super) fds: Vec<OwnedFd>,
}

/// A report that waits to be sent.
#[derive(Debug)]
pub(super) enum Outgoing {
    /// A privileged request for a device; `answer` gets the answer.
    Request { device: String, request: PrivilegedRequest, answer: oneshot::Sender<Answer> },
    /// The interface of a device may have been deleted: the supervisor shall check it.
    Suspect { device: String },
    /// The session of a client has ended.
    Gone { device: String, number: u64 },
    /// Devices of a group with a lease need time, and the supervisor sleeps.
    Needs,
    /// All devices have quiesced.
    Quiesced,
}

/// Sends the requests of one device to the supervisor. The device's port or disk owns this object.
#[derive(Clone, Debug)]
pub(super) struct SupervisorClient {
    pub(super) device: String,
    pub(super) outgoing: mpsc::Sender<Outgoing>,
}

impl SupervisorClient {
    /// Sends a request, and waits for the answer. Must not be called on the control thread. If the
    /// supervisor is gone, this returns success: the process ends anyway, and the kernel has
    /// released the supervisor's resources.
    fn ask(&self, request: PrivilegedRequest) -> Result<(), Errno> {
        match self.answer(request) {
            Some(Answer { error, .. }) if error != 0 => Err(Errno::from_raw_os_error(error)),
            _ => Ok(()),
        }
    }

    /// Sends a request and waits for its answer; `None`: the supervisor is gone.
    fn answer(&self, request: PrivilegedRequest) -> Option<Answer> {
        let (answer, answered) = oneshot::channel();
        let queued = Outgoing::Request { device: self.device.clone(), request, answer };
        self.outgoing.blocking_send(queued).ok()?;
        answered.blocking_recv().ok()
    }

    /// Has the supervisor connect to the disk's NBD server within `limit`. Returns the descriptors
    /// of the connection.
    pub(super) fn connect(&self, limit: Duration) -> Result<Vec<OwnedFd>, NbdFailure> {
        let limit_ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        let unconnected = |problem: String| {
            let text = format!("cannot be connected to: {problem}");
            NbdFailure { text, is_limit: false, passes: true }
        };
        match self.answer(PrivilegedRequest::Connect { limit_ms }) {
            Some(Answer { failed: Some(failure), .. }) => Err(failure),
            Some(Answer { error: 0, fds, .. }) => Ok(fds),
            Some(Answer { error, .. }) => {
                Err(unconnected(Errno::from_raw_os_error(error).to_string()))
            }
            None => Err(unconnected("the supervisor is gone".to_owned())),
        }
    }
}

impl SupervisorClient {
    /// Has the supervisor lock the image, because rings start, or unlock it.
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
        // If the queue is full, nothing is lost: a report of this device or another one is waiting
        // there, and the supervisor then checks.
        let _ = self.outgoing.try_send(Outgoing::Suspect { device: self.device.clone() });
    }
}

/// Requests that are not answered yet, by their number.
#[derive(Debug, Default)]
pub(super) struct Unanswered {
    next: u64,
    waiting: HashMap<u64, Waiting>,
}

#[derive(Debug)]
struct Waiting {
    answer: oneshot::Sender<Answer>,
    /// The device's name, if the request is for a connection to an NBD server.
    connects: Option<String>,
}

impl Unanswered {
    /// Adds a request of a device; returns the number that its answer will have.
    pub(super) fn ask(
        &mut self,
        device: &str,
        request: &PrivilegedRequest,
        answer: oneshot::Sender<Answer>,
    ) -> u64 {
        self.next += 1;
        let connects = matches!(request, PrivilegedRequest::Connect { .. });
        let connects = connects.then(|| device.to_owned());
        self.waiting.insert(self.next, Waiting { answer, connects });
        self.next
    }

    /// Drops a device's requests for connections, so that no thread of its disk waits for an answer
    /// while the device stops.
    pub(super) fn connects_no_more(&mut self, device: &str) {
        self.waiting.retain(|_, waiting| waiting.connects.as_deref() != Some(device));
    }

    pub(super) fn answer(&mut self, number: u64, answer: Answer) {
        if let Some(waiting) = self.waiting.remove(&number) {
            let _ = waiting.answer.send(answer);
        }
    }
}
