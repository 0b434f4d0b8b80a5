//! `Ring`: one io_uring per worker, for its disks and for its sleep.
//!
//! It is set up with `SINGLE_ISSUER | DEFER_TASKRUN | TASKRUN_FLAG`: completions are produced when
//! the worker asks for them, and a flag in shared memory says that there are some, so that a check
//! costs two nanoseconds. The ring belongs to one thread and must be created on it. It accepts only
//! the requests for which it was set up (`bounds.rs`).
//!
//! An entry of the submission queue refers to an array of iovecs, which the kernel reads when the
//! entry is submitted and not later (`IORING_FEAT_SUBMIT_STABLE`). Here the two are one
//! `UnwrittenEntry`, and one function writes both:
//! ```text
//! place:  parked entries, or no room for the entry or for its slices? submit the queued entries
//!         still no room? park the entry, with its slices in memory of their own
//!         write the slices, then the entry: no submission lies between the two
//! submit: place the parked entries, as many as there is room for; enter the kernel; again
//! ```
//! So the slices of an entry that is not submitted yet are never lost or overwritten. A kernel that
//! accepts no entries for a while (`EBUSY`, `EAGAIN`) does not stop the worker: the entry is
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
/// Bytes that all queues of a worker together may copy before the worker checks its completions
/// again: some hundreds of microseconds.
const INLINE_BYTES: u64 = 1 << 20;
/// The cost of submitting one entry, expressed in copied bytes: about a microsecond.
const ENTRY_WEIGHT: u64 = 4096;
/// The most files that can be registered with one ring.
const FILES: u32 = 1024;
/// The most slices that can wait for the next submit.
const SLICES: usize = 8192;
/// The most slices of one entry (`UIO_MAXIOV`). The kernel transfers these slices and reports a
/// short count.
const SLICES_OF_ENTRY: usize = 1024;
/// `user_data` of the poll on the inbox. Callers must not use this value.
const INBOX: u64 = u64::MAX - 1;

/// A completion.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// The `user_data` of the entry.
    pub user_data: u64,
    /// A number of bytes or 0, or a negative errno.
    pub result: i32,
    /// True if more completions of this entry will come: it is a multishot poll.
    pub more: bool,
}

/// A request that is not written to the submission queue yet.
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
    /// The iovecs of the entries in the submission queue, and of no others. It never grows beyond
    /// its capacity, so that their addresses do not change. Only [`Self::write`] adds to it, and it
    /// is emptied only when the submission queue is empty.
    slices: Vec<iovec>,
    /// Entries that found no room, in order, with their slices. Their number is bounded by that of
    /// the requests and watches.
    parked: VecDeque<(UnwrittenEntry, Vec<iovec>)>,
    /// Entries for the kernel's threads, by disk. Those that wait have slices of their own.
    slots: EntrySlots<((RingDisk, Width), UnwrittenEntry, Vec<iovec>)>,
    /// The number of kernel threads that the disks of this ring may have.
    threads: IoWorkers,
    /// Measures how long the worker waits for each device.
    watch: Watch,
    /// True if guests of several owners are served here: then no guest may wait for the device of
    /// another.
    is_shared: bool,
    /// Results of the disks' own threads.
    inbox: Arc<Inbox>,
    free_files: Vec<u32>,
    /// How many bytes of [`INLINE_BYTES`] may still be copied before the next [`Self::reap`].
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
    /// `EPERM`, `ENOSYS` or `EINVAL`: io_uring is refused or too old. `EPERM` also if all rings
    /// that were [reserved](reserve) are in use.
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

    /// Queues an entry together with its slices.
    fn place(&mut self, task: UnwrittenEntry, slices: &[iovec]) {
        self.placed = self.placed.wrapping_add(ENTRY_WEIGHT);
        let slices = &slices[..slices.len().min(SLICES_OF_ENTRY)];
        if !self.parked.is_empty() || !self.has_room(slices) {
            // An error is ignored: the queue stays full, and the entry is parked.
            let _ = self.submit();
            if !self.parked.is_empty() || !self.has_room(slices) {
                self.parked.push_back((task, slices.to_vec()));
                return;
            }
        }
        self.write(task, slices);
    }

    /// Queues an entry for a kernel thread, or lets it wait while the slot of `disk` is full.
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

    /// True if the submission queue has room for one more entry, and `self.slices` for its slices.
    fn has_room(&mut self, slices: &[iovec]) -> bool {
        self.slices.len() + slices.len() <= SLICES && !self.uring.submission().is_full()
    }

    /// Writes an entry into the submission queue, which must have room for it.
    fn write(&mut self, task: UnwrittenEntry, slices: &[iovec]) {
        let first = self.slices.len();
        // A single slice is not listed: the entry itself has its address and length.
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

    /// Writes parked entries to the queue, in order, until there is no more room.
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
            // Entering runs the deferred work, fetches completions for which the queue had no room,
            // and submits entries. An error is ignored: the next turn tries again.
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

    /// Submits all entries and runs the work that the kernel has deferred to this thread. After
    /// that, a poll that was removed before does not keep its file open any more.
    pub fn settle(&mut self) {
        let _ = self.submit();
        // SAFETY: nothing is submitted, and no argument is given that the kernel would read.
        let entered = unsafe {
            let flags = EnterFlags::GETEVENTS.bits();
            self.uring.submitter().enter::<libc::sigset_t>(0, 0, flags, None)
        };
        // An error is ignored: it means that there was no work to run.
        drop(entered);
    }

    /// Registers a file, if a slot is free. Otherwise requests use its descriptor.
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

    /// True if the worker may copy `bytes` more before it reaps completions; then charges them.
    /// Each queue has a quota for its turn; this one is for all queues together, because one guest
    /// may have hundreds.
    #[inline]
    pub fn take_inline(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.inline_left;
        if fits {
            self.inline_left -= bytes;
            self.placed = self.placed.wrapping_add(bytes);
        }
        fits
    }

    /// Returns a counter of the work that was placed since the ring was created, submitted or not:
    /// the bytes of [`Self::take_inline`], and a fixed cost for each entry. The difference of two
    /// readings is the work between them.
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
    // An error is ignored: kernels before 5.15 do not support this, and use as many threads as they
    // choose.
    let _ = uring.submitter().register_iowq_max_workers(&mut [count, 0]);
}

#[cfg(test)]
mod tests;
