//! `Ring`: one io_uring per worker, for its disks and for its sleep.
//!
//! `SINGLE_ISSUER | DEFER_TASKRUN | TASKRUN_FLAG`: completions are run when the worker asks, and a
//! flag in shared memory says that there are some, so that looking costs two nanoseconds. The
//! ring belongs to one thread and must be created on it.
#![allow(unsafe_code, reason = "allow-listed: submission queue entries are raw")]

use io_uring::types::{Fd, Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use manyring_memory::GuestSlice;
use rustix::fd::{AsRawFd, BorrowedFd};
use std::io;
use std::time::Duration;

/// Entries of the submission queue.
const SUBMISSIONS: u32 = 256;
/// Entries of the completion queue. A full one would end multishot polls: it holds a completion
/// for every queue and request of a busy worker.
const COMPLETIONS: u32 = 16384;
/// Files that can be registered with one ring.
const FILES: u32 = 1024;
/// Slices that can wait for the next submit.
const SLICES: usize = 8192;

/// A completion: what was asked (`user_data`), its result, and whether more will come.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// As given at submission.
    pub user_data: u64,
    /// Bytes or 0, or a negative errno.
    pub result: i32,
    /// A multishot request goes on.
    pub more: bool,
}

/// What to do with a file.
#[derive(Clone, Copy, Debug)]
pub enum FileOp {
    /// Read at an offset.
    Read,
    /// Write at an offset; durable at completion if `dsync`.
    Write {
        /// `RWF_DSYNC`
        dsync: bool,
    },
}

/// A file as this ring knows it.
#[derive(Clone, Copy, Debug)]
pub enum RingFile {
    /// Registered: 50-60 ns less per request.
    Registered(u32),
    /// Plain.
    Plain(i32),
}

/// An io_uring and the slices that wait for its next submit.
pub struct Ring {
    uring: IoUring,
    /// iovecs of entries that the kernel has not read yet. Never grows past its capacity, so that
    /// their addresses stay.
    slices: Vec<GuestSlice>,
    free_files: Vec<u32>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}

impl Ring {
    /// Creates the ring of the calling thread.
    ///
    /// # Errors
    /// `EPERM`, `ENOSYS` or `EINVAL` where io_uring is refused or too old.
    pub fn new() -> io::Result<Self> {
        let uring = IoUring::builder()
            .setup_cqsize(COMPLETIONS)
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .build(SUBMISSIONS)?;
        let registered = uring.submitter().register_files_sparse(FILES).is_ok();
        let free_files = if registered { (0..FILES).rev().collect() } else { Vec::new() };
        Ok(Self { uring, slices: Vec::with_capacity(SLICES), free_files })
    }

    /// Queues an entry; submits what waits if the queue is full.
    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the entry's pointers go into `slices` (kept until the submit) or nowhere.
        while unsafe { self.uring.submission().push(entry) }.is_err() {
            if self.submit().is_err() {
                std::thread::yield_now();
            }
        }
    }

    /// Gives what waits to the kernel, without waiting.
    ///
    /// # Errors
    /// The system's. `EBUSY` and `EAGAIN` pass: try again after reaping.
    pub fn submit(&mut self) -> io::Result<()> {
        if self.uring.submission().is_empty() {
            return Ok(());
        }
        let result = self.uring.submit().map(drop);
        self.forget_slices();
        result
    }

    /// True if entries wait for a submit.
    #[must_use]
    pub fn has_unsubmitted(&mut self) -> bool {
        !self.uring.submission().is_empty()
    }

    fn forget_slices(&mut self) {
        if self.uring.submission().is_empty() {
            self.slices.clear();
        }
    }

    /// Submits and sleeps until a completion is there or `timeout` has passed.
    ///
    /// # Errors
    /// The system's; `ETIME` and `EINTR` are not errors.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let result = match timeout {
            None => self.uring.submit_and_wait(1).map(drop),
            Some(timeout) => {
                let timespec = Timespec::from(timeout);
                let args = SubmitArgs::new().timespec(&timespec);
                self.uring.submitter().submit_with_args(1, &args).map(drop)
            }
        };
        self.forget_slices();
        match result {
            Err(e) if matches!(e.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EBUSY)) => {
                Ok(())
            }
            other => other,
        }
    }

    /// Takes all completions that are there into `events`. Enters the kernel only if it has some
    /// to run.
    pub fn reap(&mut self, events: &mut Vec<Event>) {
        if self.uring.submission().taskrun() {
            // Runs the deferred work, submits what waits; an error here means "try again later".
            let _ = self.uring.submit();
            self.forget_slices();
        }
        events.extend(self.uring.completion().map(|entry| Event {
            user_data: entry.user_data(),
            result: entry.result(),
            more: cqueue::more(entry.flags()),
        }));
    }

    /// Watches `fd` for input until it is removed: an event for every write, none is lost.
    pub fn poll(&mut self, fd: BorrowedFd<'_>, user_data: u64) {
        let events = u32::try_from(libc::POLLIN).unwrap_or(1);
        let entry = opcode::PollAdd::new(Fd(fd.as_raw_fd()), events).multi(true).build();
        self.push(&entry.user_data(user_data));
    }

    /// Reports once when `fd` is ready for input, or for output; at once if it is already.
    pub fn poll_once(&mut self, fd: BorrowedFd<'_>, output: bool, user_data: u64) {
        let events = if output { libc::POLLOUT } else { libc::POLLIN };
        let events = u32::try_from(events).unwrap_or(1);
        let entry = opcode::PollAdd::new(Fd(fd.as_raw_fd()), events).build();
        self.push(&entry.user_data(user_data));
    }

    /// Ends the watch `target`. Two completions follow: the watch's last and `user_data`.
    pub fn poll_remove(&mut self, target: u64, user_data: u64) {
        self.push(&opcode::PollRemove::new(target).build().user_data(user_data));
    }

    /// Registers a file if there is room; otherwise it is used as it is.
    pub fn register_file(&mut self, fd: BorrowedFd<'_>) -> RingFile {
        let plain = RingFile::Plain(fd.as_raw_fd());
        let Some(slot) = self.free_files.pop() else { return plain };
        let fds = [fd.as_raw_fd()];
        match self.uring.submitter().register_files_update(slot, &fds) {
            Ok(1) => RingFile::Registered(slot),
            _ => {
                self.free_files.push(slot);
                plain
            }
        }
    }

    /// Gives the slot of a registered file back.
    pub fn unregister_file(&mut self, file: RingFile) {
        if let RingFile::Registered(slot) = file {
            let _ = self.uring.submitter().register_files_update(slot, &[-1]);
            self.free_files.push(slot);
        }
    }

    /// Reads or writes guest memory at `offset` of `file`.
    pub fn transfer(
        &mut self,
        op: FileOp,
        file: RingFile,
        slices: &[GuestSlice],
        offset: u64,
        user_data: u64,
    ) {
        let count = slices.len().min(1024);
        while self.slices.len() + count > SLICES {
            if self.submit().is_err() {
                std::thread::yield_now();
            }
        }
        let first = self.slices.len();
        self.slices.extend_from_slice(&slices[..count]);
        let iovecs = manyring_memory::as_iovecs(&self.slices[first..]);
        let count = u32::try_from(count).unwrap_or(0);
        let entry = match (op, file) {
            (FileOp::Read, RingFile::Registered(slot)) => {
                opcode::Readv::new(Fixed(slot), iovecs, count).offset(offset).build()
            }
            (FileOp::Read, RingFile::Plain(fd)) => {
                opcode::Readv::new(Fd(fd), iovecs, count).offset(offset).build()
            }
            (FileOp::Write { dsync }, RingFile::Registered(slot)) => {
                let op = opcode::Writev::new(Fixed(slot), iovecs, count).offset(offset);
                op.rw_flags(rw_flags(dsync)).build()
            }
            (FileOp::Write { dsync }, RingFile::Plain(fd)) => {
                let op = opcode::Writev::new(Fd(fd), iovecs, count).offset(offset);
                op.rw_flags(rw_flags(dsync)).build()
            }
        };
        self.push(&entry.user_data(user_data));
    }

    /// `fdatasync`: all completed writes are durable at completion.
    pub fn flush(&mut self, file: RingFile, user_data: u64) {
        let flags = io_uring::types::FsyncFlags::DATASYNC;
        let entry = match file {
            RingFile::Registered(slot) => opcode::Fsync::new(Fixed(slot)).flags(flags).build(),
            RingFile::Plain(fd) => opcode::Fsync::new(Fd(fd)).flags(flags).build(),
        };
        self.push(&entry.user_data(user_data));
    }

    /// `fallocate` with `mode` (`FALLOC_FL_*`).
    pub fn fallocate(&mut self, file: RingFile, mode: i32, offset: u64, len: u64, user_data: u64) {
        let entry = match file {
            RingFile::Registered(slot) => {
                opcode::Fallocate::new(Fixed(slot), len).offset(offset).mode(mode).build()
            }
            RingFile::Plain(fd) => {
                opcode::Fallocate::new(Fd(fd), len).offset(offset).mode(mode).build()
            }
        };
        self.push(&entry.user_data(user_data));
    }
}

const fn rw_flags(dsync: bool) -> i32 {
    if dsync { libc::RWF_DSYNC } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_memory::Mapping;
    use rustix::fd::AsFd;

    #[test]
    fn a_write_and_a_read_pass_through_the_ring() {
        let mut ring = Ring::new().unwrap();
        let file = tempfile::tempfile().unwrap();
        let registered = ring.register_file(file.as_fd());
        let memory = Mapping::anonymous(8192).unwrap();
        let (source, target) = (memory.slice(0, 4096).unwrap(), memory.slice(4096, 4096).unwrap());
        source.write_from(&[7; 4096]);
        let mut events = Vec::new();
        ring.transfer(FileOp::Write { dsync: true }, registered, &[source], 512, 1);
        ring.wait(None).unwrap();
        ring.reap(&mut events);
        ring.transfer(FileOp::Read, RingFile::Plain(file.as_raw_fd()), &[target], 512, 2);
        ring.wait(None).unwrap();
        ring.reap(&mut events);
        assert_eq!(
            events.iter().map(|e| (e.user_data, e.result)).collect::<Vec<_>>(),
            [(1, 4096), (2, 4096)]
        );
        let mut byte = [0];
        target.read_into(&mut byte);
        assert_eq!(byte, [7]);
        ring.unregister_file(registered);
    }

    #[test]
    fn every_write_to_a_watched_eventfd_is_an_event_though_it_is_never_read() {
        let mut ring = Ring::new().unwrap();
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        ring.poll(event.as_fd(), 9);
        ring.submit().unwrap();
        for _ in 0..3 {
            rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
            let mut events = Vec::new();
            ring.wait(Some(Duration::from_secs(5))).unwrap();
            ring.reap(&mut events);
            assert!(events.iter().any(|e| e.user_data == 9 && e.more), "{events:?}");
        }
        let mut events = Vec::new();
        ring.wait(Some(Duration::from_millis(1))).unwrap();
        ring.reap(&mut events);
        assert!(events.is_empty());
    }
}
