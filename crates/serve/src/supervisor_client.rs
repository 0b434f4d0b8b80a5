//! Privileged requests of a device process: threads ask the supervisor, and wait for its answer.

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
    /// An error number, or 0.
    pub(super) error: i32,
    /// Why the server of a disk was not connected to.
    pub(super) failed: Option<NbdFailure>,
    /// The descriptors of a connection.
    pub(super) fds: Vec<OwnedFd>,
}

/// A report that waits to be sent.
#[derive(Debug)]
pub(super) enum Outgoing {
    /// A privileged request of a device.
    Request { device: String, request: PrivilegedRequest, answer: oneshot::Sender<Answer> },
    /// The interface of a device may be gone.
    Suspect { device: String },
    /// The session of a client has ended.
    Gone { device: String, number: u64 },
    /// Devices of a group with a lease need something while the supervisor sleeps.
    Needs,
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
    /// Sends a request, and waits for the answer. Never on the control thread. If the supervisor
    /// is gone, this returns success: the process ends anyway, and the kernel has released the
    /// resources of the supervisor.
    fn ask(&self, request: PrivilegedRequest) -> Result<(), Errno> {
        match self.answer(request) {
            Some(Answer { error, .. }) if error != 0 => Err(Errno::from_raw_os_error(error)),
            _ => Ok(()),
        }
    }

    /// The answer to a request; `None`: the supervisor is gone.
    fn answer(&self, request: PrivilegedRequest) -> Option<Answer> {
        let (answer, answered) = oneshot::channel();
        let queued = Outgoing::Request { device: self.device.clone(), request, answer };
        self.outgoing.blocking_send(queued).ok()?;
        answered.blocking_recv().ok()
    }

    /// Has the supervisor connect to the server of the disk. Returns the descriptors of the
    /// connection.
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
    /// Has the supervisor lock the image for rings that start, or unlock it.
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
    waiting: HashMap<u64, Waiting>,
}

#[derive(Debug)]
struct Waiting {
    answer: oneshot::Sender<Answer>,
    /// The device, if it waits for a connection.
    connects: Option<String>,
}

impl Unanswered {
    /// Notes a new request of a device, and gives the number by which its answer is found.
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

    /// Drops the requests of a device for connections: it is about to stop, and no thread of its
    /// disk shall wait for the answers.
    pub(super) fn connects_no_more(&mut self, device: &str) {
        self.waiting.retain(|_, waiting| waiting.connects.as_deref() != Some(device));
    }

    pub(super) fn answer(&mut self, number: u64, answer: Answer) {
        if let Some(waiting) = self.waiting.remove(&number) {
            let _ = waiting.answer.send(answer);
        }
    }
}
