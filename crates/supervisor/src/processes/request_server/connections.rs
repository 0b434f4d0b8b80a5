//! `Connections`: the supervisor's copies of the sockets that a device process has for a disk.
//!
//! A compromised process can keep a socket after its disk was taken away, or send the socket to
//! its VMM, and so use the disk while the next user has it. `shutdown` applies to all copies of a
//! socket. So the supervisor shuts the sockets of a device down when the device process has lost
//! the device, and the oldest one if there are more than the disk needs.

use manyring_engine::{Janitor, StandIns};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The sockets of one device of a device process.
#[derive(Debug)]
pub(super) struct Connections {
    /// The most connections that may be open at a time.
    max: usize,
    /// Closes the copies on its thread: a process that has the socket can make the last close take
    /// long.
    janitor: Arc<Janitor>,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    sockets: VecDeque<Copied>,
    is_over: bool,
}

#[derive(Debug)]
struct Copied {
    socket: OwnedFd,
    _counted: StandIns,
}

impl Copied {
    fn shut(&self) {
        // An error means that the socket is not connected any more.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|count| count > 0)
    }
}

impl Connections {
    pub(super) fn new(device: &str, max: usize) -> Self {
        let janitor = Arc::new(Janitor::of(device));
        Self { max: max.max(1), janitor, open: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when the copies of former connections are closed.
    pub(super) async fn closed(&self) {
        self.janitor.idle().await;
    }

    /// Keeps a copy of a socket before a device process gets it, and shuts the oldest sockets down
    /// if there are too many. May block: another process may hold the lock of a socket.
    ///
    /// # Errors
    /// `EMFILE`: the budget of open files is used up. `ECANCELED`: the device process no longer
    /// has the device.
    pub(super) fn keep(&self, socket: impl AsFd) -> Result<(), Errno> {
        let mut open = self.lock();
        if open.is_over {
            return Err(Errno::CANCELED);
        }
        let (ended, mut left): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut open.sockets).into_iter().partition(Copied::has_ended);
        let surplus = (left.len() + 1).saturating_sub(self.max);
        let oldest: Vec<_> = left.drain(..surplus).collect();
        oldest.iter().for_each(Copied::shut);
        open.sockets = left;
        self.janitor.dispose((ended, oldest));
        let counted = StandIns::take(1)?;
        let socket = rustix::io::fcntl_dupfd_cloexec(socket, 0)?;
        open.sockets.push_back(Copied { socket, _counted: counted });
        Ok(())
    }

    /// Shuts all sockets down; [`Self::keep`] fails from now on. May block, as [`Self::keep`].
    pub(super) fn end(&self) {
        let mut open = self.lock();
        open.is_over = true;
        let sockets = std::mem::take(&mut open.sockets);
        sockets.iter().for_each(Copied::shut);
        self.janitor.dispose(sockets);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    /// A connection: the supervisor's end, and the server's.
    fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = listener.accept().unwrap().0;
        server.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        (ours, server)
    }

    fn is_over(server: &mut TcpStream) -> bool {
        matches!(server.read(&mut [0]), Ok(0))
    }

    #[test]
    fn of_too_many_connections_the_oldest_is_shut_and_with_the_device_all_are() {
        let connections = Connections::new("a", 2);
        let (mut ours, mut servers): (Vec<_>, Vec<_>) = (0..4).map(|_| connected()).unzip();
        for (at, socket) in ours.iter().take(3).enumerate() {
            connections.keep(socket).unwrap();
            // Whoever has a copy still has it: the connection is over all the same.
            assert_eq!(is_over(&mut servers[0]), at == 2);
        }
        assert!(!is_over(&mut servers[1]) && !is_over(&mut servers[2]));
        // One that the process has shut does not count.
        ours[2].shutdown(std::net::Shutdown::Both).unwrap();
        connections.keep(&ours[3]).unwrap();
        assert!(!is_over(&mut servers[1]));
        connections.end();
        assert!(servers.iter_mut().all(is_over));
        let (late, _server) = connected();
        assert_eq!(connections.keep(&late), Err(Errno::CANCELED));
        ours.clear();
    }
}
