//! `SupervisorJournal`: the journal of a session, which the supervisor stores.

use super::channel::Channel;
use super::supervisor_client::Outgoing;
use super::turns::{Credit, Turns};
use manyring_device::PendingResult;
use manyring_protocol::message::{self, Answered, JournalEntry, Report};
use manyring_transport::vhost_user::{AnswerState, Entry, JournalUpdate, SessionJournal};
use rustix::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc;

/// Sends the updates of a session's journal to the supervisor. Updates in the channel outlive this
/// process.
#[derive(Debug)]
pub(super) struct SupervisorJournal {
    pub(super) device: String,
    /// The number by which the supervisor knows the client.
    pub(super) number: u64,
    pub(super) channel: Arc<Channel>,
    /// The queue of all sessions' updates, and the credit that lets updates pass it.
    pub(super) turns: Arc<Turns>,
    pub(super) credit: Credit,
    pub(super) outgoing: mpsc::Sender<Outgoing>,
    /// Set when this device process quiesces.
    pub(super) quiesces: Arc<AtomicBool>,
}

impl SessionJournal for SupervisorJournal {
    fn update<'a>(
        &'a self,
        note: JournalUpdate,
        fds: Vec<BorrowedFd<'a>>,
    ) -> PendingResult<'a, ()> {
        let JournalUpdate { puts, drops, answer } = note;
        let puts =
            puts.into_iter().map(|Entry { key, bytes }| JournalEntry { key, bytes }).collect();
        let answer = match answer {
            AnswerState::Unchanged => Answered::Unchanged,
            AnswerState::UnderWay(message) => Answered::UnderWay(message),
            AnswerState::Sent => Answered::Sent,
        };
        let (device, number) = (self.device.clone(), self.number);
        let report = Report::Journal { device, number, puts, drops, answer };
        Box::pin(async move {
            if let Ok(bytes) = message::emit(&report) {
                self.turns.pass(&self.credit, bytes.len()).await;
                // If the supervisor is gone, this process ends.
                let _ = self.channel.send(&bytes, &fds).await;
            }
        })
    }

    fn forget(&self) {
        let (device, number) = (self.device.clone(), self.number);
        let _ = self.outgoing.blocking_send(Outgoing::Gone { device, number });
    }

    fn quiesces(&self) -> bool {
        self.quiesces.load(Ordering::Relaxed)
    }
}
