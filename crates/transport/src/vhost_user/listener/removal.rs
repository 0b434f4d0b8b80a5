//! Unlinks the paths of sockets on a thread, so that a thread that drops a socket does not block if
//! the file system does not respond, such as a network file system whose server is gone. When the
//! process ends, it waits for these threads, and for threads that still create sockets for which
//! nobody waits any more ([`names_left`]).

use super::folder_of;
use rustix::fs::{AtFlags, Mode, OFlags, statat, unlinkat};
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How long dropping a path waits for the thread that unlinks it, once the thread has begun.
const TIMEOUT: Duration = Duration::from_millis(250);
/// As `TIMEOUT`, while an earlier unlink has not returned: many paths can be dropped at once.
const TIMEOUT_LATE: Duration = Duration::from_millis(1);

/// The paths that exist, or that are being created or unlinked.
static NAMES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
static REMOVED: Condvar = Condvar::new();

/// Keeps an entry in [`NAMES`] until it is dropped.
#[derive(Debug)]
pub(super) struct BoundName(PathBuf);

impl BoundName {
    pub(super) fn new(path: PathBuf) -> Self {
        NAMES.lock().unwrap_or_else(PoisonError::into_inner).push(path.clone());
        Self(path)
    }
}

impl Drop for BoundName {
    fn drop(&mut self) {
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = names.iter().position(|name| *name == self.0) {
            names.swap_remove(index);
        }
        drop(names);
        REMOVED.notify_all();
    }
}

/// Waits until all paths of sockets that this process has created are unlinked; called when the
/// process ends. Returns the paths that are left after `limit`.
#[must_use]
pub fn names_left(limit: Duration) -> Vec<PathBuf> {
    let names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let waited = REMOVED.wait_timeout_while(names, limit, |names| !names.is_empty());
    waited.unwrap_or_else(PoisonError::into_inner).0.clone()
}

/// The number of unlinks that have not returned and for which nobody waits any more.
static LATE: AtomicUsize = AtomicUsize::new(0);

/// Runs `call`, which unlinks `path`, on a thread, and waits for it, for [`TIMEOUT`] at most. If no
/// thread can be started, the caller's thread runs it.
pub(super) fn remove(path: &Path, call: impl Fn() + Send + Sync + 'static) {
    let call = Arc::new(call);
    let is_left = Arc::new(AtomicBool::new(false));
    // The thread sends one message when it begins, and one when `call` has returned. The timeout
    // counts from the first one, so that a slow start of the thread is not taken for a slow host.
    let (tells, told) = sync_channel(2);
    let (theirs, left) = (call.clone(), is_left.clone());
    let work = move || {
        let _ = tells.send(());
        theirs();
        let _ = tells.send(());
        if left.swap(true, Ordering::AcqRel) {
            LATE.fetch_sub(1, Ordering::AcqRel);
        }
    };
    if std::thread::Builder::new().name("names".to_owned()).spawn(work).is_err() {
        return call();
    }
    let is_late = LATE.load(Ordering::Acquire) > 0;
    let _ = told.recv();
    if told.recv_timeout(if is_late { TIMEOUT_LATE } else { TIMEOUT }).is_ok() {
        return;
    }
    let path = path.display();
    tracing::warn!(%path, "unlinking {path} timed out; continuing without it");
    // Whoever swaps second, this thread or the other, takes the count back.
    LATE.fetch_add(1, Ordering::AcqRel);
    if is_left.swap(true, Ordering::AcqRel) {
        LATE.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Unlinks the path of a socket that nobody serves any more, if `path` still names the socket with
/// this device and inode. Returns whether it was unlinked. May block.
pub fn remove_name(path: &Path, device: u64, inode: u64) -> bool {
    let remove = || {
        let name = path.file_name().ok_or(Errno::INVAL)?;
        // Both calls use one descriptor of the folder: a user who may write to the folder's parent
        // could replace the folder between comparison and unlink.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(folder_of(path), flags, Mode::empty())?;
        let stat = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if (stat.st_dev, stat.st_ino) != (device, inode) {
            return Err(Errno::NOENT);
        }
        unlinkat(&folder, name, AtFlags::empty())
    };
    remove().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn name_that_the_host_does_not_remove_holds_nobody_up() {
        let (lets_go, waits) = sync_channel::<()>(0);
        let (tells, told) = sync_channel(1);
        let waits = Mutex::new(waits);
        remove(Path::new("held"), move || {
            let _ = waits.lock().unwrap().recv();
            tells.send(()).unwrap();
        });
        assert!(LATE.load(Ordering::Acquire) > 0);
        assert!(told.try_recv().is_err(), "it goes on");
        drop(lets_go);
        told.recv_timeout(Duration::from_secs(60)).unwrap();
        while LATE.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
        let is_done = Arc::new(AtomicBool::new(false));
        let theirs = is_done.clone();
        remove(Path::new("removed"), move || theirs.store(true, Ordering::Release));
        assert!(is_done.load(Ordering::Acquire), "one that is removed at once is waited for");
    }
}
