//! `DiskThread`: a thread per disk for calls that may wait or take long.
//!
//! ```text
//! a file:                        writes that would wait, fallocate, zeroes
//! a block device:                secure erase, zeroes and discards of parts of its blocks
//! direct I/O:                    transfers that O_DIRECT refuses, copied (`bounce.rs`)
//! where there is no io_uring:    also reads that would wait, and fdatasync
//!
//! queue:  send a task with an inbox: its own, or that of its worker's ring   (starts the thread if
//!         none runs)
//! thread: take the first task; serve it to its end; put the result into the inbox, whose eventfd
//!         wakes the worker
//!         no task for a second, or the disk is gone? end
//! ```
//! The tasks of a disk are served one after another: a guest's long request delays that guest
//! alone, and each disk takes at most one thread of the host. Flushes that wait are served
//! together, by one call, which makes durable all that was written before any of them.
//!
//! **Why no kernel thread of an io_uring writes to a file.** Those threads make the writes and
//! `fallocate` calls of one file one after another, and distinguish files by six bits of a hash of
//! their inodes. Of ten images on one worker, two share these bits with even odds. The writes of
//! one guest would then wait as long as the file system delays a write of the other guest: for
//! ever, if its server is gone. (Measured: while a write to one image waited for 3.2 s, the writes
//! to 3 of 255 other images waited as well.)

use super::bounce::Bounce;
use super::calls::serve_to_the_end;
use super::task::{Task, head};
use super::{Completion, Image, Op};
use crate::sys::starter::{self, ThreadRole};
use crate::sys::uring::{Event, Inbox};
use manyring_memory::{Duty, take_duty};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The thread ends when it had no task for this time.
const IDLE: Duration = Duration::from_secs(1);

/// The thread of a disk, started on demand.
#[derive(Debug)]
pub(crate) struct DiskThread {
    image: Arc<Image>,
    shared: Arc<Shared>,
    #[cfg(test)]
    has_no_thread: std::sync::atomic::AtomicBool,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The tasks that no thread has begun. Each task belongs to a request in flight, so their
    /// number is bounded by the sizes of the disk's rings.
    tasks: VecDeque<DiskJob>,
    /// True if one of `tasks` is a flush.
    flush_waits: bool,
    /// Flushes that came while a flush was in `tasks`: they end together with it.
    joined: Vec<DiskJob>,
    /// True while the thread runs, or a worker serves the tasks instead.
    is_running: bool,
    /// True if the thread runs, and must be woken for the next task.
    is_asleep: bool,
    is_closed: bool,
    /// The inbox and `user_data` of the job that is being served.
    under_way: Option<(Arc<Inbox>, u64)>,
    /// True if the job under way must end after its present piece.
    must_end: bool,
}

/// Bytes of a piece of a long transfer. If its queue stops, a job ends after its present piece.
const PIECE: u64 = 4 << 20;
/// How many of the last jobs are searched for one to take back. The jobs of a queue that stops are
/// near the end: only jobs of the disk's other queues come after them.
const RECALL_REACH: usize = 4096;

/// A task with its image and its queue's inbox. The thread refers to the image only through its
/// jobs: if an idle thread kept the image open, nobody else could lock it.
#[derive(Debug)]
struct DiskJob {
    task: Task,
    image: Arc<Image>,
    inbox: Arc<Inbox>,
    user_data: u64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next job; returns it with the flushes that end with it. `None`: no job came
    /// for [`IDLE`], or the disk is gone, and the thread must end.
    fn next(&self) -> Option<(DiskJob, Vec<DiskJob>)> {
        let mut state = self.lock();
        let mut is_idle = false;
        loop {
            if let Some(taken) = state.take_up() {
                return Some(taken);
            }
            if is_idle || state.is_closed {
                state.is_running = false;
                return None;
            }
            state.is_asleep = true;
            let waited = self.wake.wait_timeout(state, IDLE);
            let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.is_asleep = false;
            is_idle = timeout.timed_out();
        }
    }
}

impl State {
    fn push(&mut self, job: DiskJob) {
        if job.task.op == Op::Flush && std::mem::replace(&mut self.flush_waits, true) {
            self.joined.push(job);
        } else {
            self.tasks.push_back(job);
        }
    }

    /// Takes the first job as [`Self::take`] does, and records it as under way.
    fn take_up(&mut self) -> Option<(DiskJob, Vec<DiskJob>)> {
        let taken = self.take();
        self.under_way = taken.as_ref().map(|(job, _)| (job.inbox.clone(), job.user_data));
        self.must_end = false;
        taken
    }

    /// Takes the first job for a worker that serves the tasks because the host could not start a
    /// thread.
    fn begin(&mut self) -> Option<(DiskJob, Vec<DiskJob>)> {
        let taken = self.take_up();
        self.is_running = taken.is_some();
        taken
    }

    /// Removes the first job, with the flushes that end with it.
    fn take(&mut self) -> Option<(DiskJob, Vec<DiskJob>)> {
        let job = self.tasks.pop_front()?;
        let joined = match job.task.op {
            Op::Flush => {
                self.flush_waits = false;
                std::mem::take(&mut self.joined)
            }
            _ => Vec::new(),
        };
        Some((job, joined))
    }
}

impl DiskThread {
    pub(crate) fn new(image: Arc<Image>) -> Self {
        Self {
            image,
            shared: Arc::default(),
            #[cfg(test)]
            has_no_thread: false.into(),
        }
    }

    /// Sends `task` to the thread, which puts its result into `inbox` with `user_data`. If the host
    /// cannot start a thread, serves the tasks on this worker, which then waits for the disk.
    pub(crate) fn send(&self, task: Task, inbox: &Arc<Inbox>, user_data: u64) {
        let mut state = self.shared.lock();
        state.push(DiskJob { task, image: self.image.clone(), inbox: inbox.clone(), user_data });
        if std::mem::replace(&mut state.is_running, true) {
            // One wake-up suffices for all tasks that come before the thread runs again.
            let must_wake = std::mem::take(&mut state.is_asleep);
            drop(state);
            if must_wake {
                self.shared.wake.notify_one();
            }
            return;
        }
        drop(state);
        if !self.starts_thread() {
            self.serve_here();
        }
    }

    fn starts_thread(&self) -> bool {
        #[cfg(test)]
        if self.has_no_thread.load(std::sync::atomic::Ordering::Relaxed) {
            return false;
        }
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name("disk-offload".to_owned());
        starter::spawn(ThreadRole::Disk, thread, move || serve(&shared)).is_ok()
    }

    /// Serves the tasks instead of the thread, until there are none or a thread starts. Only one
    /// worker does so at a time, and no thread beside it: `guard.rs` relies on the tasks of a disk
    /// being served one after another.
    #[cold]
    fn serve_here(&self) {
        warn_of_waiting(&self.image);
        let mut bounce = Bounce::of_worker();
        loop {
            let taken = self.shared.lock().begin();
            let Some((job, joined)) = taken else { return };
            job.run(joined, (&mut bounce, &|| self.shared.lock().must_end));
            if self.starts_thread() {
                return;
            }
        }
    }

    /// Takes back a transfer that the thread has not begun; returns true if so. A transfer under
    /// way ends after its present piece, with `ECANCELED` unless that piece was its last.
    pub(crate) fn recall(&self, inbox: &Arc<Inbox>, user_data: u64) -> bool {
        let is_it = |of: &Arc<Inbox>, data: u64| data == user_data && Arc::ptr_eq(of, inbox);
        let mut state = self.shared.lock();
        let last = state.tasks.iter().enumerate().rev().take(RECALL_REACH);
        let found = last.filter(|(_, job)| job.is_transfer());
        let at = { found }.find(|(_, job)| is_it(&job.inbox, job.user_data)).map(|(at, _)| at);
        let job = at.and_then(|at| state.tasks.remove(at));
        if state.under_way.as_ref().is_some_and(|(of, data)| is_it(of, *data)) {
            state.must_end = true;
        }
        drop(state);
        job.is_some()
    }
}

impl Drop for DiskThread {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.wake.notify_one();
    }
}

/// Warns, once for each image, that a worker waits for it because the host cannot start a thread.
pub(crate) fn warn_of_waiting(image: &Image) {
    image.waiting_told.call_once(|| {
        let image = image.path().display();
        tracing::warn!(%image, "no thread for a disk request: the worker makes it and blocks");
    });
}

fn serve(shared: &Shared) {
    take_duty(Duty::Touch);
    let mut bounce = Bounce::of_thread();
    while let Some((job, joined)) = shared.next() {
        job.run(joined, (&mut bounce, &|| shared.lock().must_end));
    }
}

impl DiskJob {
    fn is_transfer(&self) -> bool {
        matches!(self.task.op, Op::Read | Op::Write { .. })
    }

    /// Serves the job; the flushes in `joined` end with the same result. Calls `must_end` between
    /// two pieces of a long transfer.
    fn run(mut self, joined: Vec<Self>, (bounce, must_end): (&mut Bounce, &dyn Fn() -> bool)) {
        let result = self.serve(bounce, must_end);
        joined.into_iter().chain([self]).for_each(|job| job.end(result));
    }

    fn serve(&mut self, bounce: &mut Bounce, must_end: &dyn Fn() -> bool) -> Result<(), Errno> {
        let Self { task, image, .. } = self;
        while task.len > PIECE && matches!(task.op, Op::Read | Op::Write { .. }) {
            let mut piece = Task { token: task.token, op: task.op, ..Task::default() };
            (piece.offset, piece.len) = (task.offset, PIECE);
            head(&task.rest, PIECE, &mut piece.rest);
            serve_to_the_end(&mut piece, image, bounce)?;
            task.went_on(PIECE);
            if must_end() {
                return Err(Errno::CANCELED);
            }
        }
        serve_to_the_end(task, image, bounce)
    }

    fn end(self, result: Result<(), Errno>) {
        let Self { task, image, inbox, user_data } = self;
        // Drop the image and the memory before the result is sent. After that the disk may be
        // dropped and its image opened again, which needs the lock; or guest memory may be
        // unmapped, and this thread must not hold the last reference.
        drop((task, image));
        inbox.put(user_data, result.map_or_else(|errno| -errno.raw_os_error(), |()| 0));
    }
}

/// Sends tasks of a queue without an io_uring to its disk's thread, and receives their completions.
#[derive(Debug)]
pub(crate) struct DiskThreadQueue {
    offload: Arc<DiskThread>,
    inbox: Arc<Inbox>,
    /// Reused for the events of the inbox.
    events: Vec<Event>,
}

impl DiskThreadQueue {
    /// Makes the sender for a queue.
    ///
    /// # Errors
    /// As [`Inbox::new`].
    pub(crate) fn new(offload: Arc<DiskThread>) -> Result<Self, Errno> {
        Ok(Self { offload, inbox: Arc::new(Inbox::new()?), events: Vec::new() })
    }

    /// Sends a task to the thread; [`Self::reap`] returns its completion.
    pub(crate) fn send(&self, task: Task) {
        let token = task.token;
        self.offload.send(task, &self.inbox, u64::from(token));
    }

    /// As [`DiskThread::recall`].
    pub(crate) fn recall(&self, token: u32) -> bool {
        self.offload.recall(&self.inbox, u64::from(token))
    }

    /// Returns the eventfd that is written when there is something to reap. It is watched
    /// edge-triggered, and never read.
    pub(crate) fn readiness(&self) -> BorrowedFd<'_> {
        self.inbox.readiness()
    }

    /// Adds the completions that the thread has sent to `done`.
    pub(crate) fn reap(&mut self, done: &mut Vec<Completion>) {
        self.inbox.take(&mut self.events);
        done.extend(self.events.drain(..).map(|event| Completion {
            token: u32::try_from(event.user_data).unwrap_or(u32::MAX),
            result: result_of(event.result),
        }));
    }
}

/// Converts the number in an event to a result: a negative one is an errno, as in io_uring.
fn result_of(result: i32) -> Result<(), Errno> {
    if result < 0 { Err(Errno::from_raw_os_error(-result)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blk::ImageOptions;

    fn wait_until(mut done: impl FnMut() -> bool) {
        let step = Duration::from_millis(10);
        assert!((0..3000).any(|_| done() || {
            std::thread::sleep(step);
            false
        }));
    }

    #[test]
    fn flushes_that_wait_for_the_thread_are_served_by_one_call() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let image = Image::open_again(file.path(), ImageOptions::default());
        let offload = Arc::new(DiskThread::new(Arc::new(image)));
        let [mut one, mut other] =
            [offload.clone(), offload.clone()].map(|o| DiskThreadQueue::new(o).unwrap());
        // Keep `send` from starting a thread.
        offload.shared.lock().is_running = true;
        let zeroes = Op::WriteZeroes { unmap: false, durable: false };
        let ops = [Op::Flush, zeroes, Op::Flush, Op::Flush];
        for ((token, op), aside) in (1..).zip(ops).zip([&one, &one, &other, &one]) {
            aside.send(Task { token, op, len: 512, ..Task::default() });
        }
        let mut served = Vec::new();
        let mut serve_one = |one: &mut DiskThreadQueue| {
            let (job, joined) = offload.shared.lock().take().unwrap();
            job.run(joined, (&mut Bounce::of_thread(), &|| false));
            for aside in [one, &mut other] {
                aside.reap(&mut served);
            }
            assert!(served.iter().all(|done| done.result.is_ok()), "{served:?}");
            served.drain(..).map(|done| done.token).collect::<Vec<_>>()
        };
        assert_eq!(serve_one(&mut one), [4, 1, 3], "the flushes of both queues");
        one.send(Task { token: 5, ..Task::default() });
        assert_eq!((serve_one(&mut one), serve_one(&mut one)), (vec![2], vec![5]));
        assert!(offload.shared.lock().tasks.is_empty());
    }

    #[test]
    fn the_thread_of_a_disk_starts_with_a_task_and_ends_when_it_is_idle_or_the_disk_is_gone() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let open = || Image::open_again(file.path(), ImageOptions::default());
        let offload = Arc::new(DiskThread::new(Arc::new(open())));
        let shared = offload.shared.clone();
        let mut aside = DiskThreadQueue::new(offload.clone()).unwrap();
        let mut done = Vec::new();
        for round in 1..=2 {
            aside.send(Task { token: round, ..Task::default() });
            while done.is_empty() {
                aside.reap(&mut done);
            }
            assert_eq!(done.pop(), Some(Completion { token: round, result: Ok(()) }));
            if round == 1 {
                wait_until(|| !shared.lock().is_running);
            }
        }
        drop((aside, offload));
        // The idle thread does not hold the image: it can be opened again at once.
        drop(open());
        wait_until(|| Arc::strong_count(&shared) == 1);
    }

    #[test]
    fn a_worker_that_stands_in_for_a_thread_names_the_image_once() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let image = Image::open_again(file.path(), ImageOptions::default());
        let offload = Arc::new(DiskThread::new(Arc::new(image)));
        offload.has_no_thread.store(true, std::sync::atomic::Ordering::Relaxed);
        let aside = DiskThreadQueue::new(offload).unwrap();
        let lines = crate::tests::told_by(|| {
            for token in 1..=2 {
                aside.send(Task { token, ..Task::default() });
            }
        });
        let name = format!(" image={}", file.path().display());
        assert!(lines.len() == 1 && lines[0].contains(&name), "{lines:?}");
    }

    /// While the host has no thread to give, a worker serves the disk's tasks. While that worker
    /// changes a part of a unit, no thread may write the same unit.
    #[test]
    fn no_thread_serves_a_disk_beside_the_worker_that_stands_in_for_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let options = ImageOptions { direct: true, ..ImageOptions::default() };
        let image = Arc::new(Image::open_again(file.path(), options).taken_for_large_units());
        let offload = Arc::new(DiskThread::new(image.clone()));
        let mut aside = DiskThreadQueue::new(offload.clone()).unwrap();
        let memory = Arc::new(manyring_memory::Mapping::anonymous(8192).unwrap());
        memory.slice(0, 8192).unwrap().write_from(&[7; 8192]);
        let write = |token, offset, len| {
            let places = [(0, u32::try_from(len).unwrap())];
            let rest = manyring_memory::SliceList::of_mapping(&memory, &places).unwrap();
            Task { token, op: Op::Write { durable: false }, offset, len, rest, ..Task::default() }
        };
        let is_refused = |is: bool| {
            offload.has_no_thread.store(is, std::sync::atomic::Ordering::Relaxed);
        };
        std::thread::scope(|scope| {
            image.within_size(Some(8192), || {
                is_refused(true);
                scope.spawn(|| aside.send(write(1, 512, 512)));
                // The worker has read the unit, and cannot write it before this closure ends.
                let is_at_it = || offload.shared.lock().under_way.is_some();
                wait_until(|| is_at_it() && image.guard().is_active());
                is_refused(false);
                aside.send(write(2, 0, 4096));
                // Leave time for a second thread to start, which there must not be.
                std::thread::sleep(Duration::from_millis(100));
                let state = offload.shared.lock();
                assert!(state.under_way.as_ref().is_some_and(|(_, data)| *data == 1));
                assert_eq!(state.tasks.len(), 1, "the second one waits for the first");
            });
        });
        let mut done = Vec::new();
        wait_until(|| {
            aside.reap(&mut done);
            done.len() == 2
        });
        assert!(done.iter().all(|completion| completion.result.is_ok()), "{done:?}");
        assert_eq!(done.iter().map(|completion| completion.token).collect::<Vec<_>>(), [1, 2]);
        assert!(std::fs::read(file.path()).unwrap()[..4096] == [7; 4096]);
    }
}
