//! The reaper: a thread of its own that reaps child processes, and for which nobody waits.
//!
//! To reap a process is to have the kernel forget it (`wait4`). The kernel then drops what it has
//! cached of the process's folder in /proc, and where many programs read /proc at that moment, the
//! call takes seconds. So a child counts as ended when its pidfd says so, and its exit status,
//! which only messages show, comes later or not at all.

use crate::times::{REAP_RETRY, REAP_STATUS};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Children that are to be reaped.
#[derive(Debug, Default)]
struct Children {
    all: Vec<(Child, SyncSender<ExitStatus>)>,
    has_thread: bool,
}

static CHILDREN: Mutex<Children> = Mutex::new(Children { all: Vec::new(), has_thread: false });
static CAME: Condvar = Condvar::new();

/// The exit status of a child that is being reaped.
#[derive(Debug)]
pub struct Status(Receiver<ExitStatus>);

impl Status {
    /// The status in words; waits for it a little. Never on the control thread.
    pub fn in_words(&self) -> String {
        let status = self.0.recv_timeout(REAP_STATUS);
        status.map_or_else(|_| "exit status unknown".to_owned(), |status| status.to_string())
    }
}

/// Has a child reaped as soon as it has ended. Waits for nothing.
pub fn reap(child: Child) -> Status {
    let (reaped, status) = sync_channel(1);
    let mut children = lock();
    children.all.push((child, reaped));
    if !children.has_thread {
        // If no thread can start now, a later call starts one, which reaps this child, too.
        let thread = std::thread::Builder::new().name("reaper".to_owned());
        children.has_thread = thread.spawn(work).is_ok();
    }
    CAME.notify_one();
    Status(status)
}

/// True once the process of this pidfd has ended. Waits until then, or for this long.
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
            // Tries children again that have not ended, or that a debugger traces.
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
