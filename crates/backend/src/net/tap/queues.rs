//! `Queues`: the descriptors of an interface's queues, and the copies that sending halves have.
//!
//! The descriptors keep their numbers when the interface is replaced: `dup3` makes each one refer
//! to a queue of the new interface, so that halves that workers own lead there too.

use crate::sys::tuntap as sys;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The queues of one interface, by the index of their pair.
#[derive(Debug)]
pub(in crate::net) struct Queues {
    own: Vec<Arc<OwnedFd>>,
    /// The descriptors of sending halves, each with the index of its pair.
    senders: Mutex<Vec<(usize, Weak<OwnedFd>)>>,
}

impl Deref for Queues {
    type Target = [Arc<OwnedFd>];

    fn deref(&self) -> &Self::Target {
        &self.own
    }
}

impl Queues {
    pub(in crate::net) fn new(fds: Vec<OwnedFd>) -> Self {
        Self { own: fds.into_iter().map(Arc::new).collect(), senders: Mutex::default() }
    }

    /// The queue of pair `index`.
    ///
    /// # Errors
    /// `EINVAL`: there is no such pair.
    pub(in crate::net) fn of(&self, index: usize) -> Result<&Arc<OwnedFd>, Errno> {
        self.own.get(index).ok_or(Errno::INVAL)
    }

    /// A duplicate of a queue's descriptor, for a sending half. epoll keeps one watch for each
    /// descriptor, so without it the sending half's wait for output would replace the receiving
    /// half's wait for input. [`Self::replace`] renews the duplicate as well.
    ///
    /// # Errors
    /// `EINVAL`: there is no such pair. `EMFILE`, `ENFILE`: the host has no file descriptor.
    pub(in crate::net) fn duplicate(&self, index: usize) -> Result<Arc<OwnedFd>, Errno> {
        // Hold the lock, so that `replace` cannot come between the two steps.
        let mut senders = self.senders.lock().unwrap_or_else(PoisonError::into_inner);
        let own = Arc::new(rustix::io::fcntl_dupfd_cloexec(self.of(index)?, 3)?);
        senders.retain(|(_, sender)| sender.strong_count() > 0);
        senders.push((index, Arc::downgrade(&own)));
        Ok(own)
    }

    /// Makes the descriptors refer to these queues, in the order of their pairs.
    ///
    /// # Errors
    /// The error of `dup3`.
    pub(in crate::net) fn replace(&self, fds: &[OwnedFd]) -> Result<(), Errno> {
        let senders = self.senders.lock().unwrap_or_else(PoisonError::into_inner);
        for (queue, fd) in self.own.iter().zip(fds) {
            sys::replace(fd.as_fd(), queue.as_fd())?;
        }
        for (index, sender) in senders.iter() {
            if let (Some(sender), Some(fd)) = (Weak::upgrade(sender), fds.get(*index)) {
                sys::replace(fd.as_fd(), sender.as_fd())?;
            }
        }
        Ok(())
    }
}
