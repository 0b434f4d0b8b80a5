//! `Ring`: one io_uring per worker, for its disks and for its sleep.
//!
//! `SINGLE_ISSUER | DEFER_TASKRUN | TASKRUN_FLAG`: completions are run when the worker asks, and a
//! flag in shared memory says that there are some, so that looking costs two nanoseconds. The
//! ring belongs to one thread and must be created on it. It takes only the requests that it is made
//! for (`bounds.rs`).
//!
//! An entry of the submission queue names an array of iovecs, which the kernel reads when the entry
//! is submitted and not later (`IORING_FEAT_SUBMIT_STABLE`). The two are one `UnwrittenEntry` here,
//! and there is one function that writes them:
//! ```text
//! place:  parked tasks, or no room for the entry or for its slices? submit what waits
//!         still no room? park the task, with its slices in memory of their own
//!         write the slices, then the entry: no submission lies between the two
//! submit: place what is parked, as much as there is room for; enter the kernel; again
//! ```
//! So the slices of an entry that is not submitted yet are never lost or overwritten, and a kernel
//! that takes no entries for a while (`EBUSY`, `EAGAIN`) does not stop the worker: the task is
//! parked, and the worker tries again in its next turn.
#![allow(unsafe_code, reason = "allow-listed: submission queue entries are raw")]

mod bounds;
mod disk;
mod entry;
mod fast;
mod inbox;
mod slots;
mod stream;
mod threads;
mod watch;

use bounds::Disabled;
pub use bounds::{are_reserved, reserve};
pub use disk::RingDisk;
pub use entry::{FileOp, RingFile, Submitter};
use entry::{Work, entry_of, poll_mask};
use fast::DeviceSlot;
pub use inbox::Inbox;
use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue};
use libc::iovec;
use manyring_memory::{GuestSlice, as_iovecs};
use rustix::fd::{AsRawFd, BorrowedFd};
use slots::EntrySlots;
pub use slots::Width;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;
pub use stream::Stream;
use threads::IoWorkers;
pub use watch::Began;
use watch::Watch;

/// Entries of the submission queue.
const SUBMISSIONS: u32 = 256;
/// Entries of the completion queue. A full one would end multishot polls: it holds a completion
/// for every queue and request of a busy worker.
const COMPLETIONS: u32 = 16384;
/// Bytes that all queues of a worker may copy before the worker looks at its completions again:
/// some hundreds of microseconds.
const INLINE_BYTES: u64 = 1 << 20;
/// The cost of submitting one entry, without copying its bytes: about a microsecond, in which the
/// kernel could copy this many bytes.
const ENTRY_WEIGHT: u64 = 4096;
/// Files that can be registered with one ring.
const FILES: u32 = 1024;
/// Slices that can wait for the next submit.
const SLICES: usize = 8192;
/// Slices of one entry at most (`UIO_MAXIOV`); the kernel does what they hold and reports a short
/// count.
const SLICES_OF_ENTRY: usize = 1024;
/// `user_data` of the poll on the inbox. Callers of this file must not use it.
const INBOX: u64 = u64::MAX - 1;

/// A completion.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// The `user_data` of the entry, as given at submission.
    pub user_data: u64,
    /// Bytes or 0, or a negative errno.
    pub result: i32,
    /// More completions of this entry will come: it is a multishot poll.
    pub more: bool,
}

/// A request of this ring that is not written to the submission queue yet.
#[derive(Clone, Copy, Debug)]
struct UnwrittenEntry {
    work: Work,
    user_data: u64,
    /// The device that the submission of this entry may wait for.
    waits_for: Option<DeviceSlot>,
}

/// The io_uring of a worker, and the slices of entries that are not submitted yet.
pub struct Ring {
    uring: IoUring,
    /// The iovecs of the entries in the submission queue, and of no others. Never grows past its
    /// capacity, so that their addresses stay. Only [`Self::write`] adds to it, and it is emptied
    /// only when the submission queue is empty.
    slices: Vec<iovec>,
    /// Tasks that found no room, in order, with their slices. Their number is bounded by that of
    /// the requests and watches.
    parked: VecDeque<(UnwrittenEntry, Vec<iovec>)>,
    /// Tasks for the kernel's threads, by disk. Waiting ones have slices of their own.
    slots: EntrySlots<((RingDisk, Width), UnwrittenEntry, Vec<iovec>)>,
    /// The number of kernel threads that the disks of this ring may have.
    threads: IoWorkers,
    /// Measures how long the worker waits for each device.
    watch: Watch,
    /// Guests of several owners are served here: none may wait for another's device.
    is_shared: bool,
    /// Results of the disks' own threads.
    inbox: Arc<Inbox>,
    free_files: Vec<u32>,
    /// Bytes of [`INLINE_BYTES`] that may still be copied before the next [`Self::reap`].
    inline_left: u64,
    /// The counter of [`Self::placed`].
    placed: u64,
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
    /// `EPERM`, `ENOSYS` or `EINVAL` where io_uring is refused or too old; `EPERM` also where all
    /// rings that were [reserved](reserve) are in use.
    pub fn new() -> io::Result<Self> {
        let ring = Disabled::take()?;
        let free_files = if ring.has_files { (0..FILES).rev().collect() } else { Vec::new() };
        let uring = ring.enable()?;
        allow_threads(&uring, threads::MIN);
        let mut ring = Self {
            uring,
            slices: Vec::with_capacity(SLICES),
            parked: VecDeque::new(),
            slots: EntrySlots::default(),
            threads: IoWorkers::default(),
            watch: Watch::default(),
            is_shared: false,
            inbox: Arc::new(Inbox::new()?),
            free_files,
            inline_left: INLINE_BYTES,
            placed: 0,
        };
        ring.watch_inbox();
        Ok(ring)
    }

    fn watch_inbox(&mut self) {
        let inbox = self.inbox.clone();
        self.poll(inbox.readiness(), INBOX);
    }

    /// Queues a task together with its slices.
    fn place(&mut self, task: UnwrittenEntry, slices: &[iovec]) {
        self.placed = self.placed.wrapping_add(ENTRY_WEIGHT);
        let slices = &slices[..slices.len().min(SLICES_OF_ENTRY)];
        if !self.parked.is_empty() || !self.has_room(slices) {
            // If this fails, the queue stays full and the task is parked.
            let _ = self.submit();
            if !self.parked.is_empty() || !self.has_room(slices) {
                self.parked.push_back((task, slices.to_vec()));
                return;
            }
        }
        self.write(task, slices);
    }

    /// Queues a task for a kernel thread, or lets it wait while the slot of `disk` is full.
    fn place_aside(
        &mut self,
        (disk, width): (RingDisk, Width),
        work: Work,
        slices: &[iovec],
        user_data: u64,
    ) {
        let slot = (disk.number, width);
        if self.slots.enter(slot, user_data) {
            if matches!(work, Work::Flush { .. } | Work::Fallocate { .. }) {
                self.watch.owes(disk.device, user_data);
            }
            self.place(UnwrittenEntry { work, user_data, waits_for: None }, slices);
        } else {
            let slices = &slices[..slices.len().min(SLICES_OF_ENTRY)];
            let task = UnwrittenEntry { work, user_data, waits_for: None };
            self.slots.wait(slot, ((disk, width), task, slices.to_vec()));
        }
    }

    /// True if the submission queue takes one more entry, and `self.slices` takes its slices.
    fn has_room(&mut self, slices: &[iovec]) -> bool {
        self.slices.len() + slices.len() <= SLICES && !self.uring.submission().is_full()
    }

    /// Writes a task into the submission queue, which has room for it.
    fn write(&mut self, task: UnwrittenEntry, slices: &[iovec]) {
        let first = self.slices.len();
        // One slice needs no iovec: the entry holds address and length itself.
        let listed = if slices.len() > 1 { slices } else { &[] };
        assert!(first + listed.len() <= SLICES, "room was made before");
        self.slices.extend_from_slice(listed);
        let entry = entry_of(task.work, slices, &self.slices[first..]).user_data(task.user_data);
        // SAFETY: the iovecs that the entry names lie in `self.slices`, which neither grows past
        // its capacity (asserted above) nor is emptied before the kernel has taken the entry. The
        // memory that they name stays mapped until the completion, or for ever, by the contract of
        // `transfer` and by the fields of `Stream`: nobody else places slices or lets them wait.
        let pushed = unsafe { self.uring.submission().push(&entry) };
        assert!(pushed.is_ok(), "room was made before");
        if let Some(device) = task.waits_for {
            self.watch.placed(device);
        }
    }

    /// Places what was parked, in order, until there is no more room.
    fn unpark(&mut self) {
        while let Some((task, slices)) = self.parked.pop_front() {
            if !self.has_room(&slices) {
                self.parked.push_front((task, slices));
                return;
            }
            self.write(task, &slices);
        }
    }

    /// Submits all queued entries to the kernel, without waiting for completions.
    ///
    /// # Errors
    /// `EBUSY`, `EAGAIN`: the kernel takes no entries now; try again after reaping.
    pub fn submit(&mut self) -> io::Result<()> {
        loop {
            if !self.parked.is_empty() {
                self.unpark();
            }
            if self.uring.submission().is_empty() {
                return Ok(());
            }
            let result = self.enter();
            if result? == 0 || self.parked.is_empty() {
                return Ok(());
            }
        }
    }

    /// Submits the entries, and measures how long the call takes.
    fn enter(&mut self) -> io::Result<usize> {
        let began = self.watch.has_placed().then(|| self.watch.begin());
        let result = self.uring.submit();
        if let Some(began) = began {
            self.watch.entered(began, self.uring.submission().is_empty());
        }
        self.forget_slices();
        result
    }

    fn forget_slices(&mut self) {
        if self.uring.submission().is_empty() {
            self.slices.clear();
        }
    }

    /// Submits, then sleeps until a completion comes or `timeout` has passed.
    ///
    /// # Errors
    /// The error of `io_uring_enter`; `ETIME` and `EINTR` count as success.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if !self.parked.is_empty() || self.watch.has_placed() {
            self.submit()?;
            if !self.parked.is_empty() {
                return Ok(());
            }
        }
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

    /// Moves all completions, and the results of the disks' own threads, into `events`. Enters the
    /// kernel only if a flag says that completions must be run.
    pub fn reap(&mut self, events: &mut Vec<Event>) {
        self.inline_left = INLINE_BYTES;
        let submission = self.uring.submission();
        let must_enter = submission.taskrun() || submission.cq_overflow();
        drop(submission);
        if must_enter {
            // This runs the deferred work, fetches completions that the queue had no room for, and
            // submits entries. After an error the next turn tries again.
            let _ = self.enter();
        }
        let first = events.len();
        let mut is_watched = true;
        for entry in self.uring.completion() {
            let (user_data, more) = (entry.user_data(), cqueue::more(entry.flags()));
            if user_data == INBOX {
                is_watched &= more;
            } else {
                events.push(Event { user_data, result: entry.result(), more });
            }
        }
        if !is_watched {
            // A full completion queue has ended the multishot poll on the inbox: start it again.
            self.watch_inbox();
        }
        self.inbox.take(events);
        self.watch.paid(&events[first..]);
        for event in &events[first..] {
            if let Some((slot, task, slices)) = self.slots.leave(event.user_data) {
                self.place_aside(slot, task.work, &slices, task.user_data);
            }
        }
    }

    /// Polls `fd` for input until [`Self::poll_remove`]: each write to it causes an event.
    pub fn poll(&mut self, fd: BorrowedFd<'_>, user_data: u64) {
        let events = poll_mask(libc::POLLIN);
        let work = Work::Poll { fd: fd.as_raw_fd(), events, multi: true };
        self.place(UnwrittenEntry { work, user_data, waits_for: None }, &[]);
    }

    /// Polls `fd` once for input or output. If it is ready already, the event comes at once.
    pub fn poll_once(&mut self, fd: BorrowedFd<'_>, output: bool, user_data: u64) {
        let events = poll_mask(if output { libc::POLLOUT } else { libc::POLLIN });
        let work = Work::Poll { fd: fd.as_raw_fd(), events, multi: false };
        self.place(UnwrittenEntry { work, user_data, waits_for: None }, &[]);
    }

    /// Ends the poll `target`. Two completions follow: the last one of the poll, and `user_data`.
    pub fn poll_remove(&mut self, target: u64, user_data: u64) {
        let work = Work::PollRemove { target };
        self.place(UnwrittenEntry { work, user_data, waits_for: None }, &[]);
    }

    /// Submits all entries and runs the work that the kernel has deferred to this thread.
    /// Afterwards a poll that was removed before does not hold its file any more.
    pub fn settle(&mut self) {
        let _ = self.submit();
        // SAFETY: nothing is submitted, and no argument is given that the kernel would read.
        let entered = unsafe {
            let flags = EnterFlags::GETEVENTS.bits();
            self.uring.submitter().enter::<libc::sigset_t>(0, 0, flags, None)
        };
        // An error means that there was no work to run.
        drop(entered);
    }

    /// Registers a file, if a slot is free; otherwise the file is used by its descriptor.
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

    /// Frees the slot of a registered file.
    pub fn unregister_file(&mut self, file: RingFile) {
        if let RingFile::Registered(slot) = file {
            let _ = self.uring.submitter().register_files_update(slot, &[-1]);
            self.free_files.push(slot);
        }
    }

    /// True if the worker may copy `bytes` more before it reaps completions. Each queue has a quota
    /// for its turn; this one is shared by all queues, because one guest may have hundreds.
    #[inline]
    pub fn take_inline(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.inline_left;
        if fits {
            self.inline_left -= bytes;
            self.placed = self.placed.wrapping_add(bytes);
        }
        fits
    }

    /// A counter of the work placed since the ring was created, submitted or not: the bytes of
    /// [`Self::take_inline`], and a fixed share for each entry. The difference of two readings is
    /// the work that was placed between them.
    #[inline]
    pub fn placed(&self) -> u64 {
        self.placed
    }

    /// Reads or writes guest memory at `offset` of `file`, which is an image of `disk`; may be
    /// short.
    ///
    /// # Safety
    /// The memory that `slices` name must stay mapped until the completion of `user_data` has been
    /// reaped, or for ever: also when the caller, this ring, or its thread ends before.
    pub unsafe fn transfer(
        &mut self,
        op: FileOp,
        (disk, file): (RingDisk, RingFile),
        slices: &[GuestSlice],
        offset: u64,
        submitter: Submitter,
        user_data: u64,
    ) {
        let work = Work::Transfer { op, file, offset, submitter };
        let slices = as_iovecs(slices);
        match submitter {
            Submitter::Kernel(width) => self.place_aside((disk, width), work, slices, user_data),
            Submitter::Own | Submitter::OwnAtOnce => {
                self.place(UnwrittenEntry { work, user_data, waits_for: Some(disk.device) }, slices)
            }
        }
    }

    /// `fdatasync` of the file of `disk`: all completed writes are durable at completion.
    pub fn flush(&mut self, disk: RingDisk, file: RingFile, user_data: u64) {
        self.place_aside((disk, Width::Narrow), Work::Flush { file }, &[], user_data);
    }

    /// `fallocate` of a range of the file of `disk` with `mode` (`FALLOC_FL_*`).
    pub fn fallocate(
        &mut self,
        (disk, file): (RingDisk, RingFile),
        mode: i32,
        (offset, len): (u64, u64),
        user_data: u64,
    ) {
        let work = Work::Fallocate { file, mode, offset, len };
        self.place_aside((disk, Width::Narrow), work, &[], user_data);
    }
}

/// Sets how many threads the kernel may use for requests of files and block devices.
fn allow_threads(uring: &IoUring, count: u32) {
    // Kernels before 5.15 refuse this, and use as many threads as they choose.
    let _ = uring.submitter().register_iowq_max_workers(&mut [count, 0]);
}

#[cfg(test)]
mod tests;
