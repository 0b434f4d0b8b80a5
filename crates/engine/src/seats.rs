//! Seats at a worker: whoever is about to give a worker a queue holds a seat, so that the worker's
//! thread does not end meanwhile.
//!
//! A worker without queues ends, and is started again on demand. A queue that is sent to a worker
//! while it ends would be lost, with the requests of its guest. Therefore a worker ends only once
//! its mailbox is closed; the mailbox closes only while nobody has a seat and no command waits; and
//! a closed mailbox gives out no seats.

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

/// The promise to give a worker a queue. The promise is taken back when the seat is dropped.
#[derive(Debug)]
pub struct Seat(Arc<Mailbox>);

impl Seats {
    fn lock(&self) -> std::sync::MutexGuard<'_, Taken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mailbox {
    /// Closes the mailbox for good, unless a queue or a command is on its way to it; true if it is
    /// closed. Only the worker itself may call this: if another thread did, the worker could have
    /// taken a command out just before, and the mailbox would close while the command is obeyed.
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
    /// A seat at the worker of `mailbox`; `None` if that worker ends.
    pub(crate) fn take(mailbox: &Arc<Mailbox>) -> Option<Self> {
        let mut taken = mailbox.seats.lock();
        if taken.is_closed {
            return None;
        }
        taken.count += 1;
        drop(taken);
        Some(Self(mailbox.clone()))
    }

    /// Gives the worker a queue. `left_ns`: when another worker took its last requests.
    pub(crate) fn start(self, id: QueueId, queue: Box<dyn Run>, left_ns: Option<u64>) {
        // The seat is dropped only after this: from then on the waiting command keeps the worker.
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
