//! `Offload`: a thread per disk for what may take long or wait: `fdatasync`, `fallocate`, zeroes,
//! secure erase, and reads and writes of a file that would wait where there is no io_uring.
//!
//! ```text
//! queue:  send a task with the queue's inbox       (starts the thread if none runs)
//! thread: first task; serve it to its end; put the completion into its inbox; write the eventfd
//!         no task for a second? end
//! queue:  the worker hears the eventfd, gives the queue a turn, and the queue empties its inbox
//! ```
//! The tasks of a disk are served one after another, so that a guest's long request delays that
//! guest alone, and a guest has no more than one thread of the host for them.

use super::file::serve_to_the_end;
use super::task::Task;
use super::{Completion, Image};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A thread without a task ends after this time.
const IDLE: Duration = Duration::from_secs(1);

/// The thread of a disk, started on demand.
#[derive(Debug)]
pub(crate) struct Offload {
    image: Arc<Image>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// As many as the rings of the disk's queues have entries at most.
    tasks: VecDeque<(Task, Arc<Inbox>)>,
    is_running: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next task; `None` when there was none for [`IDLE`]: the thread counts as ended then.
    fn next(&self) -> Option<(Task, Arc<Inbox>)> {
        let mut state = self.lock();
        loop {
            if let Some(task) = state.tasks.pop_front() {
                return Some(task);
            }
            let waited = self.wake.wait_timeout(state, IDLE);
            let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = guard;
            if timeout.timed_out() && state.tasks.is_empty() {
                state.is_running = false;
                return None;
            }
        }
    }
}

impl Offload {
    pub(crate) fn new(image: Arc<Image>) -> Self {
        Self { image, shared: Arc::default() }
    }

    /// Serves `task` on the thread; its completion goes to `inbox`. Where no thread can be had it
    /// is served here, and the worker waits.
    fn send(&self, task: Task, inbox: Arc<Inbox>) {
        let mut state = self.shared.lock();
        state.tasks.push_back((task, inbox));
        if !state.is_running {
            let (shared, image) = (self.shared.clone(), self.image.clone());
            let thread = std::thread::Builder::new().name("disk-offload".to_owned());
            state.is_running = thread.spawn(move || serve(&shared, &image)).is_ok();
        }
        if state.is_running {
            self.shared.wake.notify_one();
            return;
        }
        let tasks = std::mem::take(&mut state.tasks);
        drop(state);
        tasks.into_iter().for_each(|(task, inbox)| finish(task, &inbox, &self.image));
    }
}

fn serve(shared: &Shared, image: &Image) {
    while let Some((task, inbox)) = shared.next() {
        finish(task, &inbox, image);
    }
}

fn finish(mut task: Task, inbox: &Inbox, image: &Image) {
    let result = serve_to_the_end(&mut task, image);
    inbox.put(Completion { token: task.token, result });
}

/// Completions on their way from the thread to a queue, and the eventfd that wakes its worker.
#[derive(Debug)]
struct Inbox {
    done: Mutex<Vec<Completion>>,
    /// Looked at every turn: there is something in `done`.
    has_some: AtomicBool,
    event: OwnedFd,
}

impl Inbox {
    fn put(&self, completion: Completion) {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).push(completion);
        self.has_some.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

/// A queue's way to its disk's thread and back.
#[derive(Debug)]
pub(crate) struct Aside {
    offload: Arc<Offload>,
    inbox: Arc<Inbox>,
}

impl Aside {
    /// # Errors
    /// The system's, if there is no eventfd to be had.
    pub(crate) fn new(offload: Arc<Offload>) -> Result<Self, Errno> {
        let inbox = Inbox {
            done: Mutex::default(),
            has_some: AtomicBool::new(false),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        Ok(Self { offload, inbox: Arc::new(inbox) })
    }

    /// Hands a task over; [`Self::reap`] has its completion.
    pub(crate) fn send(&self, task: Task) {
        self.offload.send(task, self.inbox.clone());
    }

    /// Written for each completion; never read.
    pub(crate) fn readiness(&self) -> BorrowedFd<'_> {
        self.inbox.event.as_fd()
    }

    /// Takes what is done.
    pub(crate) fn reap(&self, done: &mut Vec<Completion>) {
        if self.inbox.has_some.swap(false, Ordering::Acquire) {
            let mut arrived = self.inbox.done.lock().unwrap_or_else(PoisonError::into_inner);
            done.append(&mut arrived);
        }
    }
}
