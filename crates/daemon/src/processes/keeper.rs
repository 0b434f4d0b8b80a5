//! `SupervisorKeeper`: the supervisor keeps a session of this device process.

use super::channel::Channel;
use super::message::{self, Answered, Heard, Written};
use super::turns::{Credit, Turns};
use super::wishes::Said;
use manyring_device::Later;
use manyring_transport::vhost_user::{Entry, Keeper, Note, NotedAnswer};
use rustix::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc;

/// Sends the notes of one session to the supervisor. Notes in the channel outlive this process.
#[derive(Debug)]
pub(super) struct SupervisorKeeper {
    pub(super) device: String,
    /// The supervisor's number of the client.
    pub(super) number: u64,
    pub(super) channel: Arc<Channel>,
    /// The line in which the notes of all sessions stand, and those that pass it by.
    pub(super) turns: Arc<Turns>,
    pub(super) credit: Credit,
    pub(super) says: mpsc::Sender<Said>,
    /// Set when this device process parks.
    pub(super) parks: Arc<AtomicBool>,
}

impl Keeper for SupervisorKeeper {
    fn note<'a>(&'a self, note: Note, fds: Vec<BorrowedFd<'a>>) -> Later<'a, ()> {
        let Note { puts, drops, answer } = note;
        let puts = puts.into_iter().map(|Entry { key, bytes }| Written { key, bytes }).collect();
        let answer = match answer {
            NotedAnswer::Unchanged => Answered::Unchanged,
            NotedAnswer::UnderWay(message) => Answered::UnderWay(message),
            NotedAnswer::Sent => Answered::Sent,
        };
        let (device, number) = (self.device.clone(), self.number);
        let heard = Heard::Note { device, number, puts, drops, answer };
        Box::pin(async move {
            if let Ok(bytes) = message::emit(&heard) {
                self.turns.pass(&self.credit, bytes.len()).await;
                // If the supervisor is gone, this process ends.
                let _ = self.channel.send(&bytes, &fds).await;
            }
        })
    }

    fn forget(&self) {
        let (device, number) = (self.device.clone(), self.number);
        let _ = self.says.blocking_send(Said::Gone { device, number });
    }

    fn parks(&self) -> bool {
        self.parks.load(Ordering::Relaxed)
    }
}
