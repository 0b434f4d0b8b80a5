//! `Spares`: open file descriptions of an image that no queue uses at present.
//!
//! A queue that ends puts its description here, and a queue that starts takes one: a guest that
//! restarts reuses its former descriptions. Descriptions that no queue takes within [`KEPT`] are
//! closed, so that an image without a guest has none. A thread closes them: on some network file
//! systems `close` waits for the server, and neither a worker nor the control thread may wait.

use crate::sys::starter::{self, ThreadRole};
use rustix::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long unused descriptions stay open for the next queue.
const KEPT: Duration = Duration::from_secs(1);

/// The unused descriptions of an image. They are closed with the image.
#[derive(Debug, Default)]
pub(super) struct Spares(Arc<Mutex<Shared>>);

#[derive(Debug, Default)]
struct Shared {
    files: Vec<OwnedFd>,
    /// True while the thread that closes them runs. An image has at most one such thread, even if
    /// `close` hangs.
    has_thread: bool,
    /// True if the descriptions are never closed, because this process cannot open new ones.
    is_kept: bool,
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Spares {
    /// Keeps descriptions that another process sent open until the image is dropped.
    pub(super) fn kept(files: Vec<OwnedFd>) -> Self {
        Self(Arc::new(Mutex::new(Shared { files, is_kept: true, ..Shared::default() })))
    }

    /// Takes a description, if there is one.
    pub(super) fn take(&self) -> Option<OwnedFd> {
        lock(&self.0).files.pop()
    }

    /// Keeps a description for the next queue.
    pub(super) fn put(&self, file: OwnedFd) {
        let mut shared = lock(&self.0);
        shared.files.push(file);
        if !shared.has_thread && !shared.is_kept {
            let theirs = self.0.clone();
            let thread = std::thread::Builder::new().name("close".to_owned());
            // If the host cannot start a thread, the next `put` tries again.
            let started = starter::spawn(ThreadRole::Disk, thread, move || close(&theirs));
            shared.has_thread = started.is_ok();
        }
    }
}

/// Closes the descriptions that no queue has taken for [`KEPT`], until none is left.
fn close(shared: &Mutex<Shared>) {
    loop {
        std::thread::sleep(KEPT);
        let mut locked = lock(shared);
        let files = std::mem::take(&mut locked.files);
        if files.is_empty() {
            locked.has_thread = false;
            return;
        }
        // Unlock before the files are closed, which may take long: a queue may call `put`.
        drop(locked);
        drop(files);
    }
}

impl Drop for Spares {
    fn drop(&mut self) {
        let files = std::mem::take(&mut lock(&self.0).files);
        drop(files);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::pipe;

    /// True if the other end of a pipe is closed, at once or within ten seconds.
    fn is_closed(writer: &OwnedFd, may_wait: bool) -> bool {
        let turns = if may_wait { 1000 } else { 1 };
        (0..turns).any(|turn| {
            if turn > 0 {
                std::thread::sleep(Duration::from_millis(10));
            }
            rustix::io::write(writer, b".").is_err()
        })
    }

    #[test]
    fn a_description_is_taken_again_or_closed_after_a_while_or_with_its_image() {
        let spares = Spares::default();
        assert!(spares.take().is_none());
        // Run twice, so that the second `put` finds a thread that has ended or one that still runs.
        for _ in 0..2 {
            let (pipes, writers): (Vec<_>, Vec<_>) = (0..3).map(|_| pipe().unwrap()).unzip();
            pipes.into_iter().for_each(|reader| spares.put(reader));
            let taken = spares.take();
            assert!(taken.is_some());
            assert!(is_closed(&writers[0], true) && is_closed(&writers[1], true));
            assert!(!is_closed(&writers[2], false), "somebody has it");
        }
        let (reader, writer) = pipe().unwrap();
        spares.put(reader);
        drop(spares);
        assert!(is_closed(&writer, false));
    }
}
