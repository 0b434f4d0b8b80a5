//! The service manager above us: the messages that it gets, and the sockets that it hands in and
//! keeps.
//!
//! ```text
//! it tells us, in the environment:  NOTIFY_SOCKET, WATCHDOG_USEC, LISTEN_FDS and LISTEN_FDNAMES,
//!                                   JOURNAL_STREAM, FDSTORE
//! we tell it (sd_notify(3)):        READY, STATUS, RELOADING, STOPPING, WATCHDOG, and MAINPID when
//!                                   another process takes over; and each socket that we listen on
//!                                   (FDSTORE), which outlives us there
//! ```
//! A thread of its own sends the messages: a manager that does not read must not hold the control
//! thread up. The manager's socket is opened once, since front-ends may have taken every other
//! descriptor when the watchdog is due.

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

/// The service manager, or none.
#[derive(Debug)]
pub struct Service {
    manager: Option<Manager>,
    /// True if the manager keeps sockets for the next process.
    keeps: bool,
    /// The descriptors that the manager has handed in and nobody has taken yet.
    handed: Mutex<Vec<Handed>>,
    /// Handed-in descriptors that the configuration does not use. They are closed when this
    /// process becomes the main one.
    unused: Mutex<Vec<Handed>>,
    /// Number of handed-in sockets that this process has begun to listen at, and not logged yet.
    taken_over: AtomicUsize,
    /// The sockets that listen, under the names by which another process gets them.
    listening: Mutex<BTreeMap<String, Listening>>,
    /// Dropped when this process becomes the main one: the manager gets its messages from then on.
    is_heard: Mutex<Option<SyncSender<()>>>,
    /// True when the process is about to end and the manager keeps its sockets for the next one.
    is_ending: Arc<AtomicBool>,
    /// True while this process is not the main one. If it ends then, the process that handed the
    /// sockets in goes on with them, so their names stay.
    is_candidate: Arc<AtomicBool>,
    /// The longest time between two messages of the watchdog.
    watchdog: Option<Duration>,
}

impl Service {
    /// Reads the environment, and adopts the sockets that were handed in, except those whose
    /// numbers the configuration itself names (`named`). The manager gets no message before
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

    /// Makes this process the service's main one: the manager gets its messages from now on.
    /// Closes the handed-in sockets that are not used, and removes their names.
    pub async fn is_main(&self) {
        self.is_candidate.store(false, Ordering::Relaxed);
        drop(self.is_heard.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.remove_unused().await;
    }

    /// Tells the manager that another process is the service's main one; returns when that is
    /// sent.
    pub fn succeeded_by(&self, pid: u32) {
        if let Some(manager) = &self.manager {
            manager.tell_at_once(format!("MAINPID={pid}\n"));
        }
    }

    /// Sends a status: what the process does, or why something was not done.
    pub fn status(&self, status: &str) {
        self.tell(format!("STATUS={}\n", one_line(status)));
    }

    /// Tells the manager that all sockets listen that can, or that a reload has ended.
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

    /// Tells the manager that the process ends. From now on the names of the sockets that the
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

/// A number of the environment.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// A status has one line.
fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}

/// True if standard error is a stream of systemd's journal, which adds the time of each line
/// itself and takes the priority of a line from its head (sd-daemon(3)).
pub(crate) fn is_journal() -> bool {
    let Ok(found) = rustix::fs::fstat(rustix::stdio::stderr()) else { return false };
    let told = std::env::var_os("JOURNAL_STREAM");
    told.is_some_and(|told| names(&told, found.st_dev, found.st_ino))
}

/// `JOURNAL_STREAM` is device and inode of the stream. A program that a service starts, with an
/// output of its own, has the variable as well.
fn names(told: &OsStr, device: u64, inode: u64) -> bool {
    let told = told.to_str().and_then(|told| told.split_once(':'));
    told.is_some_and(|(d, i)| (d.parse(), i.parse()) == (Ok(device), Ok(inode)))
}

/// Device and inode of a socket's name.
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
