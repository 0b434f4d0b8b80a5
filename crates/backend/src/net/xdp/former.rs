//! Sockets that were lent to a process which no longer serves the interface.
//!
//! Whoever has a copy of a socket that is bound to a queue sends frames by it, whatever the program
//! of the interface says, and the kernel takes a socket away from nobody. It gives a queue to one
//! socket only, though. So nobody gets sockets before the last copy of the former ones is closed.

use super::socket::{Wanted, bind_probe};
use super::{Shared, State, XdpPort};
use manyring_memory::in_own_memory;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::sync::atomic::Ordering;

/// The sockets that were lent before: whether another process still has a copy of one.
#[derive(Debug)]
pub(super) struct Former {
    /// Every copy of a former socket is closed.
    pub(super) are_closed: bool,
    /// Sockets without frames that hold the first queues, which no former socket has.
    probes: Vec<OwnedFd>,
}

impl Former {
    /// No socket was lent on this interface.
    pub(super) fn none() -> Self {
        Self { are_closed: true, probes: Vec::new() }
    }

    /// New sockets are lent: they are the former ones next time.
    pub(super) fn lend(&mut self) {
        *self = Self { are_closed: false, probes: Vec::new() };
    }
}

impl XdpPort {
    /// Closes this process's copies of the sockets that were lent. True if nobody else has one, or
    /// the interface that they were bound to is gone.
    ///
    /// # Errors
    /// The interface's queues cannot be looked at.
    pub(super) fn are_former_closed(&self) -> Result<bool, Errno> {
        let Shared { index, state, .. } = &*self.shared;
        let mut state = state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if state.former.are_closed {
            return Ok(true);
        }
        for queue in 0..self.options.queue_pairs {
            self.detach(&mut state, queue)?;
        }
        let interface = index.load(Ordering::Relaxed);
        let State { lent, former, .. } = &mut *state;
        if let Some(lent) = lent.take() {
            lent.close(interface);
        }
        if interface == 0 {
            // Sockets without an interface cannot be looked for. Those that were lent since it was
            // deleted are the last ones until it is back.
            return Ok(false);
        }
        while former.probes.len() < self.options.queue_pairs {
            let queue = u32::try_from(former.probes.len()).map_err(|_| Errno::INVAL)?;
            let wanted = Wanted { interface, queue, frame_size: 0 };
            match in_own_memory(|| bind_probe(wanted)) {
                Ok(probe) => former.probes.push(probe),
                Err(Errno::BUSY | Errno::NODEV) => return Ok(false),
                Err(errno) => return Err(errno),
            }
        }
        former.are_closed = true;
        Ok(true)
    }
}
