//! File descriptors of a front-end, and the janitor: the thread that checks and closes them.
//!
//! A front-end chooses what its file descriptors are. `close` of a TCP socket may linger, `fstat`
//! of a FUSE file may never return, the write to a pipe waits for whoever holds its lock; even the
//! last `close` of an eventfd waits for the lock of each epoll set that the front-end has put it
//! into. So nothing of that happens on a worker or on the control thread:
//!
//! ```text
//! recvmsg -> ForeignFd -- checked, mapped, closed --> the janitor's thread of that device
//!               \-- proved an eventfd --> worker: watched, written under the sentry; never closed
//! ```
//! A [`ForeignFd`] that is dropped, on whatever thread, is handed to the janitor. A device has one
//! janitor, so that at most one thread of a device hangs; its next session begins when the janitor
//! has closed everything of the one before.

use crate::bridge::Bridge;
use manyring_backend::sys::interrupt::Interruptible;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, SemaphorePermit, oneshot};

/// File descriptors of one message at most (`SCM_MAX_FD` of the kernel).
pub const MESSAGE_FDS_MAX: usize = 253;
/// Jobs that may wait for the janitor before the session receives its next message.
const JOBS_MAX: usize = 64;
/// The janitor keeps a stack of this size while it runs.
const STACK_SIZE: usize = 256 << 10;
/// How long a close may take before it is interrupted, and how often.
const NUDGE: Duration = Duration::from_secs(1);

type Job = Box<dyn FnOnce(&mut Bridge) + Send>;

/// The thread of a device that touches what its front-ends sent. It runs while there is something
/// to do, and costs nothing else.
#[derive(Debug, Default)]
pub struct Janitor {
    state: Mutex<State>,
    progress: Notify,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Jobs that wait or run.
    pending: usize,
    /// Wakes the thread, if it runs.
    wake: Option<Arc<OwnedFd>>,
    thread: Option<Interruptible>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("pending", &self.pending).finish_non_exhaustive()
    }
}

impl Janitor {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the thread do `job`, after all that was given to it before.
    fn push(self: &Arc<Self>, job: Job) {
        let mut state = self.lock();
        state.jobs.push_back(job);
        state.pending += 1;
        self.rouse(&mut state);
    }

    /// Wakes the thread, or starts it. Where no thread or fd can be had, the jobs wait until
    /// somebody asks again.
    fn rouse(self: &Arc<Self>, state: &mut State) {
        if let Some(wake) = &state.wake {
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
            return;
        }
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let Ok(wake) = eventfd(0, flags).map(Arc::new) else { return };
        let (janitor, theirs) = (self.clone(), wake.clone());
        let builder = std::thread::Builder::new().name("janitor".to_owned()).stack_size(STACK_SIZE);
        if builder.spawn(move || janitor.work(&theirs)).is_ok() {
            state.wake = Some(wake);
        }
    }

    fn work(self: Arc<Self>, wake: &OwnedFd) {
        self.lock().thread = Some(Interruptible::this_thread());
        let mut bridge = Bridge::default();
        loop {
            // What was rung before a job was given is passed on before that job.
            bridge.pass_on();
            let job = {
                let mut state = self.lock();
                let job = state.jobs.pop_front();
                if job.is_none() && bridge.is_empty() {
                    (state.wake, state.thread) = (None, None);
                    return;
                }
                job
            };
            match job {
                Some(job) => {
                    job(&mut bridge);
                    self.lock().pending -= 1;
                    self.progress.notify_waiters();
                }
                None => bridge.wait(wake.as_fd()),
            }
        }
    }

    /// Drops something there: a file descriptor, or what holds one.
    pub fn dispose(self: &Arc<Self>, thing: impl Send + 'static) {
        self.push(Box::new(move |_| drop(thing)));
    }

    /// Ends an odd doorbell, once it has been passed on what was rung last.
    pub(crate) fn push_removal(self: &Arc<Self>, id: u64) {
        self.push(Box::new(move |bridge| bridge.remove(id)));
    }

    /// Does something there; `None` if it came to nothing. What is no longer awaited is dropped
    /// there too.
    pub(crate) async fn with_bridge<T: Send + 'static>(
        self: &Arc<Self>,
        job: impl FnOnce(&mut Bridge) -> T + Send + 'static,
    ) -> Option<T> {
        let (reply, mut done) = oneshot::channel();
        self.push(Box::new(move |bridge| drop(reply.send(job(bridge)))));
        loop {
            match tokio::time::timeout(NUDGE, &mut done).await {
                Ok(answer) => return answer.ok(),
                // It may wait for a thread that could not be had.
                Err(_) => self.rouse(&mut self.lock()),
            }
        }
    }

    /// Does something there that may block; `None` if it came to nothing.
    pub async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        self.with_bridge(|_| job()).await
    }

    /// Returns when everything is closed that was to be.
    pub async fn idle(self: &Arc<Self>) {
        self.at_most(0).await;
    }

    /// Returns when so little waits to be closed that more may be received.
    pub async fn room(self: &Arc<Self>) {
        self.at_most(JOBS_MAX).await;
    }

    async fn at_most(self: &Arc<Self>, jobs: usize) {
        loop {
            let progress = self.progress.notified();
            tokio::pin!(progress);
            progress.as_mut().enable();
            if self.lock().pending <= jobs {
                return;
            }
            if tokio::time::timeout(NUDGE, progress).await.is_err() {
                let mut state = self.lock();
                self.rouse(&mut state);
                // A socket that lingers is closed at once when its close is interrupted.
                if let Some(thread) = &state.thread {
                    thread.interrupt();
                }
            }
        }
    }
}

/// Permits for file descriptors of front-ends: what the limit of open files leaves beside our own.
fn budget() -> &'static Semaphore {
    static BUDGET: OnceLock<Semaphore> = OnceLock::new();
    BUDGET.get_or_init(|| {
        use rustix::process::{Resource, getrlimit};
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
        let limit = usize::try_from(limit.min(1 << 28)).unwrap_or(1 << 20);
        let ours = (limit / 4).max(256);
        Semaphore::new(limit.saturating_sub(ours).max(MESSAGE_FDS_MAX + JOBS_MAX))
    })
}

/// Room for the file descriptors of one message. Those for which the kernel finds no number it
/// closes on the thread that receives, so nobody receives a message that has some without it.
#[derive(Debug)]
pub struct Room(Option<SemaphorePermit<'static>>);

/// Permits for a message with as many fds as there can be.
const ROOM: u32 = 253;
const _: () = assert!(ROOM as usize == MESSAGE_FDS_MAX);

impl Room {
    /// Waits until there is room for a message. What others hoard may never be given back: not to
    /// be awaited for ever.
    pub async fn for_message() -> Self {
        Self(budget().acquire_many(ROOM).await.ok())
    }

    /// Room for a message, if there is some now.
    #[must_use]
    pub fn at_once() -> Option<Self> {
        budget().try_acquire_many(ROOM).ok().map(|permit| Self(Some(permit)))
    }

    /// For a message that has no file descriptors.
    #[must_use]
    pub fn none() -> Self {
        Self(None)
    }
}

/// What the file descriptors of one session share.
#[derive(Debug)]
pub struct Origin {
    janitor: Arc<Janitor>,
    /// A write to one of its eventfds had to be interrupted: none is written any more.
    is_blocked: AtomicBool,
    blocked: Notify,
}

impl Origin {
    /// A session whose file descriptors `janitor` touches.
    #[must_use]
    pub fn new(janitor: Arc<Janitor>) -> Arc<Self> {
        Arc::new(Self { janitor, is_blocked: AtomicBool::new(false), blocked: Notify::new() })
    }

    /// Takes over what was received.
    #[must_use]
    pub fn adopt(self: &Arc<Self>, fd: OwnedFd, room: &mut Room) -> ForeignFd {
        let permit = room.0.as_mut().and_then(|permit| permit.split(1));
        ForeignFd { fd: Some((fd, permit)), origin: self.clone() }
    }

    /// Who touches its file descriptors.
    #[must_use]
    pub fn janitor(&self) -> &Arc<Janitor> {
        &self.janitor
    }

    /// Returns when an eventfd of the front-end has held a thread of ours.
    pub async fn blocked(&self) {
        self.blocked.notified().await;
    }

    /// True if an eventfd of the front-end has held a thread of ours.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.is_blocked.load(Ordering::Relaxed)
    }

    /// A write was interrupted.
    pub(crate) fn tell_blocked(&self) {
        self.is_blocked.store(true, Ordering::Relaxed);
        self.blocked.notify_one();
    }
}

/// A file descriptor that a front-end sent. It may be anything, and is closed by the janitor.
#[derive(Debug)]
pub struct ForeignFd {
    /// Taken by the drop only.
    fd: Option<(OwnedFd, Option<SemaphorePermit<'static>>)>,
    origin: Arc<Origin>,
}

impl ForeignFd {
    pub(crate) fn origin(&self) -> &Arc<Origin> {
        &self.origin
    }
}

impl AsFd for ForeignFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.fd {
            Some((fd, _)) => fd.as_fd(),
            None => unreachable!("only the drop takes it"),
        }
    }
}

impl Drop for ForeignFd {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.origin.janitor.dispose(fd);
        }
    }
}
