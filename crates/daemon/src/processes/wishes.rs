//! The device process's part of what a guest may choose and only the supervisor can do: threads
//! ask, and wait.

use super::message::Wish;
use manyring_backend::net::tap::lent::Owner;
use manyring_device::net::{Offloads, RssConfig};
use rustix::io::Errno;
use std::collections::HashMap;
use tokio::sync::{mpsc, oneshot};

/// A message that waits to be sent to the supervisor.
#[derive(Debug)]
pub(super) enum Said {
    /// A wish of a device; the answer is the number of an error, or 0.
    Wish { device: String, wish: Wish, answer: oneshot::Sender<i32> },
    /// The interface of a device may be gone.
    Doubt { device: String },
    /// The session of a client is over.
    Gone { device: String, number: u64 },
    /// All devices have stopped for the next supervisor.
    Parked,
}

/// The supervisor, as the port or the disk of one device reaches it.
#[derive(Clone, Debug)]
pub(super) struct SupervisorClient {
    pub(super) device: String,
    pub(super) says: mpsc::Sender<Said>,
}

impl SupervisorClient {
    /// Asks, and waits for the answer. Never on the control thread. When the supervisor is gone,
    /// this process ends, and the host has taken back all that the supervisor had: nothing is left
    /// to do.
    fn ask(&self, wish: Wish) -> Result<(), Errno> {
        let (answer, answered) = oneshot::channel();
        let said = Said::Wish { device: self.device.clone(), wish, answer };
        let answered = self.says.blocking_send(said).map(|()| answered.blocking_recv());
        match answered {
            Ok(Ok(error)) if error != 0 => Err(Errno::from_raw_os_error(error)),
            _ => Ok(()),
        }
    }
}

impl SupervisorClient {
    /// Has the image locked for the rings that begin, or let go of.
    pub(super) fn lock(&self, is_held: bool) -> Result<(), Errno> {
        self.ask(Wish::Lock { is_held })
    }
}

impl Owner for SupervisorClient {
    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno> {
        let pair = u16::try_from(index).map_err(|_| Errno::INVAL)?;
        self.ask(Wish::Pair { pair, attached })
    }

    fn set_offloads(&self, offloads: Offloads) -> Result<(), Errno> {
        self.ask(Wish::Offloads { bits: offloads.guest_features() })
    }

    fn set_rss(&self, rss: Option<&RssConfig>) -> Result<(), Errno> {
        self.ask(Wish::Rss { config: rss.map(RssConfig::emit).unwrap_or_default() })
    }

    fn doubt(&self) {
        // With a full queue the supervisor hears of this device, or of another one, soon.
        let _ = self.says.try_send(Said::Doubt { device: self.device.clone() });
    }
}

/// Questions that are not answered yet, by their number.
#[derive(Debug, Default)]
pub(super) struct Unanswered {
    next: u64,
    waiting: HashMap<u64, oneshot::Sender<i32>>,
}

impl Unanswered {
    /// The number of a new question.
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
