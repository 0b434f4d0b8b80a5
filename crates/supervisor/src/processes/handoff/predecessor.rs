//! `Before`: the supervisor that runs when this one starts with `--takeover`, and how it ends.
//!
//! ```text
//! it read `Taken`, and closed the channel          this one serves
//! it sent `GoesOn`                                this one ends
//! channel closed unread, its process ended         it died: this one serves
//! channel closed unread, its process lives         it does not know `GoesOn`: this one ends
//! ```
//! A supervisor that continues to serve sends `GoesOn` before it starts a device process again. So
//! if it dies without that message, no device process has run since all had quiesced, and
//! everything that it handed over is unchanged: this process has descriptors of the sockets, of the
//! open files with their locks, and of the sessions' journals.

use manyring_engine::aside;
use manyring_serve::channel::{Channel, watched};
use manyring_serve::times::{HANDOFF_END, HANDOFF_LOOK};
use manyring_transport::vhost_user::check_path;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{sleep, timeout};

/// The supervisor that waits at the other end of a channel.
#[derive(Debug)]
pub struct Before {
    pub(super) channel: Channel,
    process: Process,
}

/// The process of that supervisor.
#[derive(Debug)]
enum Process {
    /// A pidfd of the supervisor. If the supervisor ended before the pidfd was opened, the pidfd
    /// may be that of another process which got the same number. That is harmless: the pidfd
    /// becomes readable only after the supervisor has ended.
    Open(AsyncFd<OwnedFd>),
    /// The supervisor ended before a pidfd was opened.
    Gone,
    /// The supervisor is in another pid namespace.
    Unknown,
}

/// How the predecessor's part in a takeover ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The supervisor read all messages, and serves nobody any more.
    Taken,
    /// The process of the supervisor ended without `GoesOn`.
    Died,
    /// The supervisor continues to serve.
    GoesOn,
}

impl Before {
    /// Watches the supervisor `pid`, which has connected.
    pub(super) fn new(channel: Channel, pid: Pid) -> Self {
        let process = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Ok(fd) => watched(fd, Interest::READABLE).map_or(Process::Unknown, Process::Open),
            Err(Errno::SRCH) => Process::Gone,
            Err(_) => Process::Unknown,
        };
        Self { channel, process }
    }

    /// Waits until the supervisor closes its end of the channel or sends `GoesOn`; returns which.
    /// `was_told`: `Taken` was sent to the supervisor.
    pub(super) async fn end(&self, was_told: bool) -> End {
        match self.channel.ended().await {
            Ok(()) if was_told => End::Taken,
            Err(error) if error.kind() == ErrorKind::InvalidData => End::GoesOn,
            _ if self.has_died().await => End::Died,
            _ => End::GoesOn,
        }
    }

    /// True if the process of the supervisor has ended, or ends now.
    pub(super) async fn has_died(&self) -> bool {
        let process = match &self.process {
            Process::Open(process) => process,
            Process::Gone => return true,
            Process::Unknown => return false,
        };
        timeout(HANDOFF_END, process.readable()).await.is_ok_and(|ended| ended.is_ok())
    }
}

/// The log text of a next supervisor whose predecessor died before everything was handed over.
pub(super) const ANEW: &str = "starting anew; front-ends reconnect";
/// Why a next supervisor ends if its predecessor was stopped.
pub(super) const STOPPED: &str = "--takeover: the running daemon was stopped; start this one \
                                  without --takeover to serve";
/// Why a next supervisor ends if its predecessor did not wait for it.
pub(super) const TOO_SLOW: &str = "--takeover: timed out, and the running daemon continues; if it \
                                   does not run, start this one without --takeover";

/// Runs `opens` and returns its result. `None`: the predecessor closed the channel before `opens`
/// was done, and its process lives. If the predecessor dies, sets `is_last` and runs `opens` to its
/// end, since no other process waits for this one.
pub(super) async fn unless_it_goes_on<T>(
    before: &mut Option<Before>,
    is_last: &AtomicBool,
    opens: impl Future<Output = T>,
) -> Option<T> {
    tokio::pin!(opens);
    if let Some(waits) = before {
        tokio::select! {
            biased;
            // The predecessor sends nothing, except `GoesOn`, before it has read `Taken`.
            end = waits.end(false) => match end {
                End::Died => is_last.store(true, Ordering::Relaxed),
                End::Taken | End::GoesOn => return None,
            },
            opened = &mut opens => return Some(opened),
        }
        tracing::warn!("--takeover: the running daemon died; serving its guests here");
        *before = None;
    }
    Some(opens.await)
}

/// True if the control socket's name is gone. A daemon that was stopped removes the name, unless
/// the socket was handed in; a daemon that dies leaves the name behind.
pub(super) async fn has_no_name(control: &Path) -> bool {
    let path = control.to_owned();
    let found = aside(move || std::fs::symlink_metadata(path).map_err(|error| error.kind()));
    matches!(found.await, Some(Err(ErrorKind::NotFound)))
}

/// True if nobody listens at the control socket any more, whether or not its name is still there. A
/// dying process closes its connections and its listening socket in any order, so this looks again
/// until the daemon `answers`, or the time is over.
pub(super) async fn is_deserted<F: Future<Output = bool>>(
    control: &Path,
    answers: impl Fn() -> F,
) -> bool {
    let looks = async {
        loop {
            let path = control.to_owned();
            let checked = aside(move || check_path(&path)).await;
            match checked {
                Some(Ok(())) => return true,
                _ if answers().await => return false,
                _ => sleep(HANDOFF_LOOK).await,
            }
        }
    };
    timeout(HANDOFF_END, looks).await.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_engine::Janitor;
    use manyring_serve::channel::NO_FDS;
    use manyring_serve::channel::pair;
    use std::process::{Child, Command, Stdio};
    use std::sync::Arc;

    /// A next supervisor whose predecessor is a child process that lives until it is killed.
    fn with_process<F: Future<Output = ()>>(test: impl FnOnce(Before, Channel, Child) -> F) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (a, b) = pair().unwrap();
            let new = |socket| Channel::new(socket, Arc::new(Janitor::of("test"))).unwrap();
            let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
            let before = Before::new(new(a), Pid::from_child(&child));
            test(before, new(b), child).await;
        });
    }

    async fn opened(before: Before) -> (Option<u8>, bool) {
        let (mut before, is_last) = (Some(before), AtomicBool::new(false));
        // Opening takes longer than the predecessor takes to end.
        let opens = async {
            sleep(HANDOFF_END * 2).await;
            7
        };
        let opened = unless_it_goes_on(&mut before, &is_last, opens).await;
        (opened, is_last.into_inner())
    }

    #[test]
    fn nothing_is_opened_any_more_once_the_other_supervisor_goes_on() {
        with_process(|before, runs, mut child| async move {
            runs.send(b"it goes on", NO_FDS).await.unwrap();
            // The predecessor dies after `GoesOn`: it has served guests again by then.
            child.kill().unwrap();
            drop(runs);
            assert_eq!(opened(before).await, (None, false));
            child.wait().unwrap();
        });
        // A predecessor of an older version closes the channel without `GoesOn`, and lives.
        with_process(|before, runs, mut child| async move {
            drop(runs);
            assert_eq!(opened(before).await, (None, false));
            child.kill().unwrap();
            child.wait().unwrap();
        });
    }

    #[test]
    fn what_is_opened_is_kept_if_the_other_supervisor_has_died_or_waits() {
        with_process(|before, runs, mut child| async move {
            child.kill().unwrap();
            drop(runs);
            assert_eq!(opened(before).await, (Some(7), true));
            child.wait().unwrap();
        });
        with_process(|before, runs, mut child| async move {
            assert_eq!(opened(before).await, (Some(7), false));
            drop(runs);
            child.kill().unwrap();
            child.wait().unwrap();
        });
    }

    #[test]
    fn a_supervisor_that_has_read_that_all_is_taken_need_not_have_died() {
        with_process(|before, runs, mut child| async move {
            before.channel.send(b"taken", NO_FDS).await.unwrap();
            assert!(runs.receive().await.unwrap().is_some());
            drop(runs);
            assert_eq!(before.end(true).await, End::Taken);
            child.kill().unwrap();
            child.wait().unwrap();
        });
    }
}
