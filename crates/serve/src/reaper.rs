//! The reaper: a thread that reaps child processes. No other thread waits for it.
//!
//! Reaping a process (`wait4`) makes the kernel drop its cache of the process's folder in /proc. If
//! many programs read /proc at that moment, the call takes seconds. So other code considers a child
//! ended when its pidfd says so. The exit status, which only messages show, comes later or not at
//! all.

use crate::times::{REAP_RETRY, REAP_STATUS};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The children that are to be reaped.
#[derive(Debug, Default)]
struct Children {
    all: Vec<(Child, SyncSender<ExitStatus>)>,
    has_thread: bool,
}

static CHILDREN: Mutex<Children> = Mutex::new(Children { all: Vec::new(), has_thread: false });
static CAME: Condvar = Condvar::new();

/// Receives the exit status of a child that is being reaped.
#[derive(Debug)]
pub struct Status(Receiver<ExitStatus>);

impl Status {
    /// Returns the status as text; waits [`REAP_STATUS`] for it at most. Must not be called on the
    /// control thread.
    pub fn in_words(&self) -> String {
        let status = self.0.recv_timeout(REAP_STATUS);
        status.map_or_else(|_| "exit status unknown".to_owned(), |status| status.to_string())
    }
}

/// Passes a child to the reaper, which reaps it when it has ended. Does not wait.
pub fn reap(child: Child) -> Status {
    let (reaped, status) = sync_channel(1);
    let mut children = lock();
    children.all.push((child, reaped));
    if !children.has_thread {
        // If no thread can be made now, a later call makes one, which then reaps this child, too.
        let thread = std::thread::Builder::new().name("reaper".to_owned());
        children.has_thread = thread.spawn(work).is_ok();
    }
    CAME.notify_one();
    Status(status)
}

/// Waits until the process of this pidfd has ended, `longest` at most. Returns true if it has
/// ended.
pub fn has_ended(pidfd: &OwnedFd, longest: Option<Timespec>) -> bool {
    loop {
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], longest.as_ref()) {
            Err(Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

fn lock() -> MutexGuard<'static, Children> {
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn work() {
    let mut pending = Vec::new();
    loop {
        let children = lock();
        let has_none = |children: &mut Children| children.all.is_empty();
        let mut children = if pending.is_empty() {
            CAME.wait_while(children, has_none).unwrap_or_else(PoisonError::into_inner)
        } else {
            // Wait with a limit, and then try again the children that have not ended, or that a
            // debugger traces.
            let waited = CAME.wait_timeout_while(children, REAP_RETRY, has_none);
            waited.unwrap_or_else(PoisonError::into_inner).0
        };
        pending.append(&mut children.all);
        drop(children);
        pending.retain_mut(|(child, reaped)| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                let _ = reaped.try_send(status);
                false
            }
            Err(_) => false,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::process::{Command, Stdio};

    /// A child that lives until its input is closed, and its pidfd.
    fn child() -> (Child, OwnedFd) {
        let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        (child, pidfd)
    }

    #[test]
    fn a_child_that_does_not_end_delays_the_reaping_of_no_other_one() {
        let ((mut slow, of_slow), (mut quick, of_quick)) = (child(), child());
        let (slow_input, quick_input) = (slow.stdin.take(), quick.stdin.take());
        let slow = reap(slow);
        let quick = reap(quick);
        drop(quick_input);
        assert!(has_ended(&of_quick, None));
        assert_eq!(quick.0.recv().unwrap().code(), Some(0));
        assert!(!has_ended(&of_slow, Some(Timespec::default())));
        assert_eq!(slow.in_words(), "exit status unknown");
        drop(slow_input);
        assert!(has_ended(&of_slow, None));
        assert_eq!(slow.0.recv().unwrap().code(), Some(0));
    }
}
