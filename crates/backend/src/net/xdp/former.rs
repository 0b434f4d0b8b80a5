//! AF_XDP sockets that were lent to a process which no longer serves the interface.
//!
//! A process that has a copy of a socket bound to a queue can send frames by it, whatever the
//! interface's program says, and the kernel takes a socket away from nobody. But the kernel binds
//! only one socket to a queue. So the next process gets its sockets only when the last copy of the
//! former ones is closed.

use super::XdpPort;
use super::socket::{Wanted, bind_probe};
use crate::net::Port;
use manyring_memory::in_own_memory;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::sync::atomic::Ordering;

/// The former sockets: tells whether another process still has a copy of one.
#[derive(Debug)]
pub(super) struct Former {
    /// True if every copy of a former socket is closed.
    pub(super) are_closed: bool,
    /// Sockets without frames, each bound to one of the first queues: proof that no former socket
    /// is bound there.
    probes: Vec<OwnedFd>,
}

impl Former {
    /// Makes the record of an interface on which no socket was lent yet.
    pub(super) fn none() -> Self {
        Self { are_closed: true, probes: Vec::new() }
    }

    /// Frees the queues for the sockets that are lent next.
    pub(super) fn free(&mut self) {
        self.probes.clear();
    }

    /// Records that new sockets are lent: when sockets are lent next, these must be closed first.
    pub(super) fn lend(&mut self) {
        *self = Self { are_closed: false, probes: Vec::new() };
    }
}

impl XdpPort {
    /// Closes this process's copies of the lent sockets. Returns true if no other process has one,
    /// or if the interface to which they were bound is deleted. The caller holds the lock of
    /// lendings.
    ///
    /// # Errors
    /// The interface's queues cannot be probed.
    pub(super) fn are_former_closed(&self) -> Result<bool, Errno> {
        let index = &self.shared.index;
        let _ = self.is_gone();
        let mut state = self.shared.state();
        if state.former.are_closed {
            return Ok(true);
        }
        for queue in 0..self.options.queue_pairs {
            self.detach(&mut state, queue)?;
        }
        let interface = index.load(Ordering::Relaxed);
        if let Some(lent) = state.lent.take() {
            drop(state);
            // Others wait for the lock of the state, and a process that has the memory can make its
            // pages slow to free.
            lent.close(interface);
            state = self.shared.state();
            if index.load(Ordering::Relaxed) != interface {
                return Ok(state.former.are_closed);
            }
        }
        let former = &mut state.former;
        if interface == 0 {
            // While the interface is deleted, its queues cannot be probed. No sockets are lent
            // before it is back.
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
