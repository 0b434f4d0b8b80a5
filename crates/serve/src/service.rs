//! The service manager (systemd): messages to it, and sockets that it passes to this process and
//! keeps.
//!
//! ```text
//! from the manager, in the environment:  NOTIFY_SOCKET, WATCHDOG_USEC, LISTEN_FDS, LISTEN_FDNAMES,
//!                                        JOURNAL_STREAM, FDSTORE
//! to the manager (sd_notify(3)):         READY, STATUS, RELOADING, STOPPING, WATCHDOG, and MAINPID
//!                                        when another process takes over; each listening socket
//!                                        (FDSTORE), which the manager keeps
//! ```
//! A thread of its own sends the messages, so that a manager that does not read cannot block the
//! control thread. The manager's socket is opened once at the start: later, front-ends may use up
//! all descriptors, and the watchdog's message must still be sent.

mod notify;
mod sockets;
mod watchdog;

pub use sockets::{HandedSocket, Kept, Whose};
pub use watchdog::feed;

use notify::Manager;
use sockets::{Handed, Listening};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The service manager, if there is one.
#[derive(Debug)]
pub struct Service {
    manager: Option<Manager>,
    /// True if the manager keeps sockets for the next process.
    keeps: bool,
    /// The sockets that the manager passed to this process, and that nobody has taken yet.
    handed: Mutex<Vec<Handed>>,
    /// Passed sockets that the configuration does not use. They are closed when this process
    /// becomes the main one.
    unused: Mutex<Vec<Handed>>,
    /// Number of passed sockets at which this process has begun to listen since the last log line
    /// about them.
    taken_over: AtomicUsize,
    /// The sockets at which this process listens, by the names under which another process gets
    /// them.
    listening: Mutex<BTreeMap<String, Listening>>,
    /// While this sender lives, messages wait. It is dropped when this process becomes the main
    /// one.
    is_heard: Mutex<Option<SyncSender<()>>>,
    /// True once the process is about to end while the manager keeps its sockets for the next one.
    is_ending: Arc<AtomicBool>,
    /// True until this process becomes the main one. If it ends before that, the paths of its
    /// sockets are not removed, since the process that passed the sockets still serves them.
    is_candidate: Arc<AtomicBool>,
    /// The longest time that the manager allows between two messages of the watchdog.
    watchdog: Option<Duration>,
}

impl Service {
    /// Reads the environment, and adopts the sockets that the manager passed. Sockets whose numbers
    /// the configuration itself names (`named`) are left out. No message is sent before
    /// [`Self::is_main`].
    pub fn from_environment(named: &[i32]) -> Arc<Self> {
        let (is_heard, hears) = sync_channel(0);
        let path = std::env::var_os("NOTIFY_SOCKET");
        let manager = path.and_then(|path| Manager::connect(&path, hears));
        let keeps = manager.is_some() && number("FDSTORE").is_some_and(|count| count > 0);
        let own = u64::from(std::process::id());
        let is_ours = |pid: &str| number(pid).is_none_or(|pid| pid == own);
        let watchdog = number("WATCHDOG_USEC").filter(|_| is_ours("WATCHDOG_PID"));
        let watchdog = watchdog.filter(|us| *us > 0 && manager.is_some());
        Arc::new(Self {
            keeps,
            handed: Mutex::new(sockets::handed(named)),
            unused: Mutex::default(),
            taken_over: AtomicUsize::new(0),
            listening: Mutex::default(),
            is_heard: Mutex::new(Some(is_heard)),
            is_ending: Arc::default(),
            is_candidate: Arc::new(AtomicBool::new(true)),
            watchdog: watchdog.map(Duration::from_micros),
            manager,
        })
    }

    /// True if a service manager has started this process.
    pub fn is_managed(&self) -> bool {
        self.manager.is_some()
    }

    /// Makes this process the service's main one: messages are sent from now on. Closes the passed
    /// sockets that are not used, and removes their paths.
    pub async fn is_main(&self) {
        self.is_candidate.store(false, Ordering::Relaxed);
        drop(self.is_heard.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.remove_unused().await;
    }

    /// Tells the manager that the process `pid` is the service's main one; returns when the message
    /// is sent.
    pub fn succeeded_by(&self, pid: u32) {
        if let Some(manager) = &self.manager {
            manager.tell_at_once(format!("MAINPID={pid}\n"));
        }
    }

    /// Sends the manager a status text, which it shows to the operator.
    pub fn status(&self, status: &str) {
        self.tell(format!("STATUS={}\n", one_line(status)));
    }

    /// Tells the manager that the start or the reload is complete: every socket that can listen
    /// does.
    pub fn ready(&self, status: &str) {
        self.log_taken_over();
        self.tell(format!("READY=1\nSTATUS={}\n", one_line(status)));
    }

    /// Tells the manager that the configuration is being read again.
    pub fn reloading(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let us = Duration::try_from(now).unwrap_or_default().as_micros();
        self.tell(format!("RELOADING=1\nMONOTONIC_USEC={us}\n"));
    }

    /// Tells the manager that the process is ending. From now on the paths of sockets that the
    /// manager keeps are not removed.
    pub fn stopping(&self) {
        self.is_ending.store(self.keeps, Ordering::Relaxed);
        self.tell("STOPPING=1\nSTATUS=stopping\n".to_owned());
    }

    fn tell(&self, text: String) {
        if let Some(manager) = &self.manager {
            manager.tell(text, None);
        }
    }
}

/// Reads a number from an environment variable.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Replaces line ends by blanks: a status message must have one line.
fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}

/// True if standard error is a stream of systemd's journal. The journal adds the time of each line
/// itself, and takes a line's priority from its beginning (sd-daemon(3)).
pub(crate) fn is_journal() -> bool {
    let Ok(found) = rustix::fs::fstat(rustix::stdio::stderr()) else { return false };
    let told = std::env::var_os("JOURNAL_STREAM");
    told.is_some_and(|told| names(&told, found.st_dev, found.st_ino))
}

/// True if `JOURNAL_STREAM` names this device and inode. The comparison is needed because a program
/// that a service starts inherits the variable, but may have another standard error.
fn names(told: &OsStr, device: u64, inode: u64) -> bool {
    let told = told.to_str().and_then(|told| told.split_once(':'));
    told.is_some_and(|(d, i)| (d.parse(), i.parse()) == (Ok(device), Ok(inode)))
}

/// Returns the metadata of a path, and the device and inode numbers of the file there.
fn identity(path: &std::path::Path) -> Option<(std::fs::Metadata, (u64, u64))> {
    let found = std::fs::symlink_metadata(path).ok()?;
    let identity = (found.dev(), found.ino());
    Some((found, identity))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journal_is_known_by_device_and_inode_of_its_stream() {
        assert!(names(OsStr::new("8:1234"), 8, 1234));
        for other in ["8:1235", "9:1234", "8", "", ":", "8:1234:1", "x:y"] {
            assert!(!names(OsStr::new(other), 8, 1234), "{other}");
        }
    }
}
