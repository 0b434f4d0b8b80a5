//! Seats at a worker: whoever is about to give it a queue holds one, so that its thread does not
//! end meanwhile.
//!
//! A worker without queues ends, and is started again on demand. A queue that comes while it ends
//! would be lost, with the requests of a guest. So the last word is the mailbox's: it closes only
//! if nobody has a seat and no command waits, and there is no seat at one that is closed.

use crate::orders::{Command, Mailbox, QueueId};
use crate::run::Run;
use std::sync::{Arc, Mutex, PoisonError};

/// The seats that are taken at one worker; part of its mailbox.
#[derive(Debug, Default)]
pub(crate) struct Seats(Mutex<Taken>);

#[derive(Debug, Default)]
struct Taken {
    count: usize,
    is_closed: bool,
}

/// The promise of a queue to come; dropped, it is taken back.
#[derive(Debug)]
pub struct Seat(Arc<Mailbox>);

impl Seats {
    fn lock(&self) -> std::sync::MutexGuard<'_, Taken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mailbox {
    /// Closes for good, unless a queue or a command is on its way here. Only the worker itself may
    /// ask: a command that another thread takes out would not be seen.
    pub(crate) fn close(&self) -> bool {
        let mut taken = self.seats.lock();
        taken.is_closed = taken.count == 0 && !self.is_pending();
        taken.is_closed
    }

    /// True if the worker has ended, or is about to.
    pub(crate) fn is_closed(&self) -> bool {
        self.seats.lock().is_closed
    }
}

impl Seat {
    /// A seat at the worker of `mailbox`; none if it ends.
    pub(crate) fn take(mailbox: &Arc<Mailbox>) -> Option<Self> {
        let mut taken = mailbox.seats.lock();
        if taken.is_closed {
            return None;
        }
        taken.count += 1;
        drop(taken);
        Some(Self(mailbox.clone()))
    }

    /// Gives the worker a queue. `left_ns`: when it took its last requests at another one.
    pub(crate) fn start(self, id: QueueId, queue: Box<dyn Run>, left_ns: Option<u64>) {
        // The seat is given back after that: a command waits then, which keeps the worker.
        self.0.send(Command::Start(id, queue, left_ns));
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.seats.lock().count -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mailbox_closes_only_when_nothing_is_on_its_way_and_then_for_good() {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let seat = Seat::take(&mailbox).unwrap();
        assert!(!mailbox.close() && !mailbox.is_closed(), "a queue is to come");
        drop(seat);
        mailbox.send(Command::Quit);
        assert!(!mailbox.close(), "a command waits");
        let _ = mailbox.take();
        assert!(mailbox.close() && mailbox.is_closed());
        assert!(Seat::take(&mailbox).is_none());
    }
}
