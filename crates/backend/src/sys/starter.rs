//! Starts threads. In a sandbox each thread has a seccomp filter for its role, and none of these
//! filters allows a thread to make another one: one thread, the starter, makes all others.
//!
//! ```text
//! spawn:    no sandbox? the caller makes the thread
//!           else the caller asks the starter, and waits until the starter has made the thread
//! starter:  makes it; the new thread restricts itself to the calls of its role, and begins
//! ```
//! A thread inherits the filter of the thread that makes it, and a filter can only become stricter.
//! If a worker made the thread of a disk itself, the worker's filter would have to allow all calls
//! of that thread. The starter reads nothing that a guest or front-end writes, and waits for no
//! other thread.

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};

/// The task of a thread, which determines its seccomp filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadRole {
    /// Serves queues, or carries the frames of an uplink.
    Worker,
    /// Serves the requests of one disk that may wait.
    Disk,
    /// Negotiates with an NBD server, and carries the requests of queues that share a connection.
    Server,
    /// Touches the file descriptors of a front-end.
    Janitor,
    /// Examines other threads.
    Lookout,
    /// Writes the log, or the frames of a capture.
    Log,
    /// The control thread, and threads that make calls for it which may block.
    Control,
}

/// Stack size of the starter, which calls few functions.
const STACK_SIZE: usize = 128 << 10;

static STARTER: OnceLock<ThreadStarter> = OnceLock::new();

/// Passes orders to the starter thread.
#[derive(Debug)]
struct ThreadStarter {
    orders: Sender<Order>,
    /// Restricts the calling thread to the calls of this role.
    confine: fn(ThreadRole),
}

/// A thread to be made.
struct Order {
    builder: Builder,
    work: Box<dyn FnOnce() + Send>,
    reply: SyncSender<io::Result<JoinHandle<()>>>,
}

impl ThreadStarter {
    fn new(confine: fn(ThreadRole)) -> io::Result<Self> {
        let (orders, given) = channel::<Order>();
        let serve = move || {
            for Order { builder, work, reply } in given {
                let _ = reply.send(builder.spawn(work));
            }
        };
        let builder = Builder::new().name("starter".to_owned()).stack_size(STACK_SIZE);
        builder.spawn(serve)?;
        Ok(Self { orders, confine })
    }

    fn spawn(
        &self,
        role: ThreadRole,
        builder: Builder,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let confine = self.confine;
        let work = Box::new(move || {
            confine(role);
            work();
        });
        let (reply, made) = sync_channel(1);
        let is_gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        self.orders.send(Order { builder, work, reply }).map_err(|_| is_gone())?;
        made.recv().map_err(|_| is_gone())?
    }
}

/// Starts the starter: from now on it makes the threads that [`spawn`] is asked for, each of which
/// calls `confine` first. Must be called while the process has one thread.
///
/// # Errors
/// The starter thread cannot be made.
pub fn begin(confine: fn(ThreadRole)) -> io::Result<()> {
    let _ = STARTER.set(ThreadStarter::new(confine)?);
    Ok(())
}

/// Starts a thread of this role.
///
/// # Errors
/// The thread cannot be made.
pub fn spawn(
    role: ThreadRole,
    builder: Builder,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    match STARTER.get() {
        Some(starter) => starter.spawn(role, builder, work),
        None => builder.spawn(work),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::thread::{ThreadId, current};

    #[test]
    fn a_thread_gives_up_what_its_role_does_not_need_before_it_begins() {
        static CONFINED: Mutex<Vec<(ThreadRole, ThreadId)>> = Mutex::new(Vec::new());
        let confined = || CONFINED.lock().unwrap().clone();
        let confine = |role| CONFINED.lock().unwrap().push((role, current().id()));
        let starter = ThreadStarter::new(confine).unwrap();
        for role in [ThreadRole::Disk, ThreadRole::Worker] {
            let (tell, told) = channel();
            let work = move || tell.send((confined(), current().id())).unwrap();
            let named = Builder::new().name("named".to_owned());
            let thread = starter.spawn(role, named, work).unwrap();
            assert_eq!(thread.thread().name(), Some("named"));
            let (confined, id) = told.recv().unwrap();
            assert_eq!(confined.last(), Some(&(role, id)));
            thread.join().unwrap();
        }
        assert_eq!(confined().len(), 2);
    }
}
