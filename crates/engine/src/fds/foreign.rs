//! File descriptors of a front-end, and the janitor: the thread that checks and closes them.
//!
//! A front-end chooses what its file descriptors are. `close` of a TCP socket may linger, `fstat`
//! of a FUSE file may never return, a write to a pipe waits for the holder of the pipe's lock; even
//! the last `close` of an eventfd waits for the lock of each epoll set that the front-end has put
//! it into. So no worker and no control thread makes such a call:
//!
//! ```text
//! recvmsg -> ForeignFd -- checked, mapped, closed --> the janitor's thread of that device
//!               \-- proved an eventfd, or a call that is a socket
//!                       --> worker: watched, written under the sentry; never closed
//! ```
//! Any thread may drop a [`ForeignFd`]: the drop sends the descriptor to the janitor, which closes
//! it. A device has one janitor, so that a front-end can block at most one thread. The next session
//! of the device begins when the janitor has closed every descriptor of the session before.

use crate::accounts::Cost;
use crate::fds::bridge::{Bridge, Sent};
use crate::fds::budget::{FdReservation, JOBS_MAX, Permit};
use crate::watch::{Post, Serves};
use manyring_backend::sys::interrupt::Interruptible;
use manyring_backend::sys::starter::{self, ThreadRole};
use manyring_memory::{Duty, take_duty};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

/// The size of the janitor's stack.
const STACK_SIZE: usize = 256 << 10;
/// How long the thread waits for another job before it ends: the messages of a session that begins
/// follow each other, and each may be a job.
const LINGER: Duration = Duration::from_millis(20);
/// The most CPU time that a job is charged: unmapping an honest guest's terabyte takes long.
const JOB_COST_MAX: Duration = Duration::from_millis(10);
/// A close that takes longer than this is interrupted, and again after each further such period.
const NUDGE: Duration = Duration::from_secs(1);

type ForeignWrite = Box<dyn FnOnce(&mut Bridge<ForeignFd>) + Send>;

/// A device's thread for all calls on fds of its front-ends that may block. The thread runs only
/// while it has jobs or odd doorbells (`bridge.rs`).
#[derive(Debug, Default)]
pub struct Janitor {
    /// The name of the device.
    device: String,
    state: Mutex<State>,
    progress: Notify,
    /// The CPU time of jobs that messages of front-ends have caused.
    cost: Cost,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<ForeignWrite>,
    /// How many jobs wait or run.
    pending: usize,
    /// The eventfd that wakes the thread; `None` while no thread runs.
    wake: Option<Arc<OwnedFd>>,
    thread: Option<Interruptible>,
    /// True if the last attempt to start the thread has failed. Only the first failure is logged.
    is_stuck: bool,
    /// Until this time the janitor's thread, and no worker, watches and writes the eventfds of the
    /// device's front-ends. `None`: they have never cost a worker far too much CPU time.
    distrusts_until: Option<Instant>,
    /// How often front-ends' eventfds have cost a worker far too much CPU time. The count begins
    /// again after a time of [`DISTRUST`] without such a case.
    offences: u32,
}

impl State {
    fn distrusts(&self) -> bool {
        self.distrusts_until.is_some_and(|until| Instant::now() < until)
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("pending", &self.pending).finish_non_exhaustive()
    }
}

impl Janitor {
    /// Returns the janitor of a device.
    #[must_use]
    pub fn of(device: &str) -> Self {
        Self { device: device.to_owned(), ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that an eventfd of a front-end has taken far too much CPU time of a worker: for
    /// [`DISTRUST`] no worker touches an eventfd of the device's sessions, the current or later
    /// ones.
    fn distrust(&self) {
        let mut state = self.lock();
        state.offences = if state.distrusts() { state.offences.saturating_add(1) } else { 1 };
        state.distrusts_until = Some(Instant::now() + DISTRUST);
    }

    /// Returns the pause before the next session, after a session that ended because of its
    /// eventfds. Each such session costs the host CPU time before the engine notices it, so the
    /// pause grows each time.
    #[must_use]
    pub fn penance(&self) -> Duration {
        let state = self.lock();
        let offences = if state.distrusts() { state.offences } else { 0 };
        PENANCE.saturating_mul(1 << offences.saturating_sub(2).min(PENANCE_DOUBLINGS))
    }

    /// Has the thread do `job`, after all jobs that were pushed before.
    fn push(self: &Arc<Self>, job: ForeignWrite) {
        let mut state = self.lock();
        state.jobs.push_back(job);
        state.pending += 1;
        self.rouse(&mut state);
    }

    /// Wakes the thread, or starts it. If the system has no thread or descriptor to spare, the jobs
    /// wait until the next call of this function.
    fn rouse(self: &Arc<Self>, state: &mut State) {
        if let Some(wake) = &state.wake {
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
            return;
        }
        let started = self.start();
        if let Err(error) = &started
            && !state.is_stuck
        {
            let device = &self.device;
            let problem = "no thread available for the file descriptors of a front-end; its \
                           session waits";
            tracing::warn!(device, %error, "{problem}");
        }
        state.is_stuck = started.is_err();
        state.wake = started.ok();
    }

    /// Starts the thread. Returns the eventfd that wakes it.
    fn start(self: &Arc<Self>) -> std::io::Result<Arc<OwnedFd>> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (janitor, theirs) = (self.clone(), wake.clone());
        let builder = std::thread::Builder::new().name("janitor".to_owned()).stack_size(STACK_SIZE);
        starter::spawn(ThreadRole::Janitor, builder, move || janitor.work(&theirs))?;
        Ok(wake)
    }

    fn work(self: Arc<Self>, wake: &OwnedFd) {
        take_duty(Duty::Map);
        self.lock().thread = Some(Interruptible::this_thread());
        let post = Post::new(Serves::Device(self.device.clone()));
        post.enter();
        let mut bridge: Bridge<ForeignFd> = Bridge::default();
        let mut has_waited = false;
        loop {
            let job = {
                let mut state = self.lock();
                let job = state.jobs.pop_front();
                if job.is_none() && bridge.is_empty() && has_waited {
                    (state.wake, state.thread) = (None, None);
                    return;
                }
                job
            };
            // The job may remove an odd doorbell: forward the calls that were rung before.
            bridge.pass_on();
            has_waited = job.is_none() && bridge.is_empty();
            match job {
                Some(job) => {
                    post.at_work();
                    job(&mut bridge);
                    post.at_rest();
                    self.lock().pending -= 1;
                    self.progress.notify_waiters();
                }
                None => bridge.wait(wake.as_fd(), has_waited.then_some(LINGER)),
            }
        }
    }

    /// Does `job` on the janitor's thread; the caller does not wait for it.
    pub(crate) fn push_write(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        self.push(Box::new(move |_| job()));
    }

    /// Drops `thing`, a file descriptor or the owner of one, on the janitor's thread.
    pub fn dispose(self: &Arc<Self>, thing: impl Send + 'static) {
        let janitor = self.clone();
        self.push(Box::new(move |_| janitor.cost.add(JOB_COST_MAX, || drop(thing))));
    }

    /// Returns the CPU time of the jobs that messages have caused since the last call. Writes to
    /// doorbells are not among them: those have their own rules ([`Origin`]).
    #[must_use]
    pub fn take_cost(&self) -> Duration {
        self.cost.take()
    }

    /// Removes an odd doorbell, after the thread has forwarded the calls that were rung before.
    pub(crate) fn push_removal(self: &Arc<Self>, id: u64) {
        self.push(Box::new(move |bridge| bridge.remove(id)));
    }

    /// Does `job` on the janitor's thread, and returns its result; `None` if the job was dropped
    /// without a result. If the caller no longer waits for the result, the janitor's thread drops
    /// it.
    pub(crate) async fn with_bridge<T: Send + 'static>(
        self: &Arc<Self>,
        job: impl FnOnce(&mut Bridge<ForeignFd>) -> T + Send + 'static,
    ) -> Option<T> {
        let (reply, mut done) = oneshot::channel();
        let janitor = self.clone();
        self.push(Box::new(move |bridge| {
            let result = janitor.cost.add(JOB_COST_MAX, || job(bridge));
            drop(reply.send(result));
        }));
        loop {
            match tokio::time::timeout(NUDGE, &mut done).await {
                Ok(answer) => return answer.ok(),
                // The system may have had no thread to spare: try again to start one.
                Err(_) => self.rouse(&mut self.lock()),
            }
        }
    }

    /// Does `job`, which may block, on the janitor's thread, and returns its result; `None` if the
    /// job was dropped without a result.
    pub async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        self.with_bridge(|_| job()).await
    }

    /// Returns when all jobs are done, so that every disposed descriptor is closed.
    pub async fn idle(self: &Arc<Self>) {
        self.at_most(0).await;
    }

    /// Returns once at most `JOBS_MAX` jobs wait: the session may receive its next message.
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

/// After the sentry has seen a write to an eventfd under way, this many writes are measured.
const MEASURED: u32 = 16;
/// States of [`Origin::writes`] above the number of writes that are to be measured.
const BY_JANITOR: u32 = u32::MAX - 2;
const COSTLY: u32 = u32::MAX - 1;
const BLOCKED: u32 = u32::MAX;
/// If a write takes this CPU time, the janitor makes all further writes of the session.
const LONG_WRITE: Duration = Duration::from_millis(1);
/// If a write takes this CPU time, the session ends.
const LONGEST_WRITE: Duration = Duration::from_millis(10);
/// For how long workers leave the eventfds of a device's front-ends to its janitor after a write of
/// [`LONGEST_WRITE`]. Otherwise a front-end could connect anew, or remove its waiters for a while,
/// and the worker would pay again and again.
const DISTRUST: Duration = Duration::from_secs(600);
/// Pause before the next session, after a session whose eventfds blocked or delayed one of the
/// daemon's threads. One session may cause the first two entries in the count, so these do not
/// double the pause.
const PENANCE: Duration = Duration::from_secs(1);
/// The maximum of doublings of the pause: to about a minute.
const PENANCE_DOUBLINGS: u32 = 6;

/// How the next write to an eventfd of a session is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    /// At once, and its CPU time is measured.
    Measured,
    /// By the janitor, since writes take long.
    ByJanitor,
    /// Not at all: the session ends.
    Never,
}

/// The state that all file descriptors of one session share: how threads may touch them.
#[derive(Debug)]
pub struct Origin {
    janitor: Arc<Janitor>,
    /// How eventfds of the session are written. 0: at once; up to [`MEASURED`]: the number of
    /// writes that are still to be measured; or one of the states above that number.
    writes: AtomicU32,
    /// The eventfds that a worker watches as kicks, by ring.
    watched: Mutex<HashMap<usize, u64>>,
    blocked: Notify,
}

impl Origin {
    /// Makes the state of a session whose file descriptors `janitor` checks and closes.
    #[must_use]
    pub fn new(janitor: Arc<Janitor>) -> Arc<Self> {
        let writes = AtomicU32::new(if janitor.lock().distrusts() { BY_JANITOR } else { 0 });
        Arc::new(Self { janitor, writes, watched: Mutex::default(), blocked: Notify::new() })
    }

    /// Makes a [`ForeignFd`] of a received descriptor, with one of the message's permits.
    #[must_use]
    pub fn adopt(self: &Arc<Self>, fd: OwnedFd, room: &mut FdReservation) -> ForeignFd {
        let permit = room.split();
        ForeignFd { fd: Some((fd, permit)), origin: self.clone() }
    }

    /// Returns the janitor that checks and closes the session's file descriptors.
    #[must_use]
    pub fn janitor(&self) -> &Arc<Janitor> {
        &self.janitor
    }

    /// Returns when a write to an eventfd of the front-end has blocked or taken far too much CPU
    /// time: the session must end.
    pub async fn blocked(&self) {
        self.blocked.notified().await;
    }

    /// True if a write to an eventfd of the front-end has blocked, or has cost far too much CPU
    /// time.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.writes.load(Ordering::Relaxed) >= COSTLY
    }

    /// True if a write to an eventfd of the front-end has taken far too much CPU time: the
    /// front-end has put very many waiters on the eventfd.
    #[must_use]
    pub fn is_costly(&self) -> bool {
        self.writes.load(Ordering::Relaxed) == COSTLY
    }

    /// Returns how the next write to an eventfd is made; `None`: at once, unmeasured.
    #[inline]
    pub(crate) fn next_write(&self) -> Option<Write> {
        match self.writes.load(Ordering::Relaxed) {
            0 => None,
            COSTLY.. => Some(Write::Never),
            BY_JANITOR => Some(Write::ByJanitor),
            _ => Some(Write::Measured),
        }
    }

    /// True if a worker may watch the eventfd with this number as the kick of `ring`: workers may
    /// touch eventfds of this session, and no worker watches this eventfd for another ring.
    pub(crate) fn may_watch(&self, ring: usize, eventfd_id: u64) -> bool {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.remove(&ring);
        let may = !self.is_distrusted() && !watched.values().any(|id| *id == eventfd_id);
        if may {
            watched.insert(ring, eventfd_id);
        }
        may
    }

    /// True if workers touch no eventfd that the session sends from now on.
    pub(crate) fn is_distrusted(&self) -> bool {
        self.writes.load(Ordering::Relaxed) >= BY_JANITOR
    }

    /// Records that the sentry has seen a write under way, which has taken at least this much CPU
    /// time: the next writes are measured, or left to the janitor.
    #[cold]
    pub(crate) fn suspect(&self, took: Duration) {
        let relaxed = Ordering::Relaxed;
        if took >= LONGEST_WRITE {
            // Does not end the session: a hypervisor that takes the CPU away looks the same.
            self.writes.fetch_max(BY_JANITOR, relaxed);
            self.janitor.distrust();
        } else {
            let _ = self.writes.compare_exchange(0, MEASURED, relaxed, relaxed);
        }
    }

    /// Records the CPU time in which a worker has begun or ended to watch an eventfd of the
    /// session: both wait for the lock under which other threads walk the eventfd's waiters. The
    /// first long time may be due to a hypervisor; the second one ends the session.
    pub(crate) fn note_watch(&self, took: Duration) {
        if took < LONGEST_WRITE {
            return;
        }
        if self.is_distrusted() {
            self.note_write(took);
        } else {
            self.suspect(took);
        }
    }

    /// Records the CPU time of a write. Time in which the thread was not scheduled does not count,
    /// since the front-end does not cause it.
    pub(crate) fn note_write(&self, took: Duration) {
        let relaxed = Ordering::Relaxed;
        if took >= LONGEST_WRITE {
            self.janitor.distrust();
            if self.writes.fetch_max(COSTLY, relaxed) < COSTLY {
                self.blocked.notify_one();
            }
        } else if took >= LONG_WRITE {
            self.writes.fetch_max(BY_JANITOR, relaxed);
        } else {
            let less = |left: u32| (left > 0 && left < BY_JANITOR).then(|| left - 1);
            let _ = self.writes.fetch_update(relaxed, relaxed, less);
        }
    }

    /// Records that the sentry has interrupted a write to an eventfd of the front-end.
    pub(crate) fn tell_blocked(&self) {
        self.writes.store(BLOCKED, Ordering::Relaxed);
        self.blocked.notify_one();
    }
}

/// A file descriptor that a front-end sent. It may be of any kind; the janitor closes it.
#[derive(Debug)]
pub struct ForeignFd {
    /// `None` only while `drop` runs.
    fd: Option<(OwnedFd, Option<Permit>)>,
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

impl Sent for ForeignFd {
    fn is_blocked(&self) -> bool {
        self.origin.is_blocked()
    }

    fn note_watch(&self, took: Duration) {
        self.origin.note_watch(took);
    }
}

impl Drop for ForeignFd {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.origin.janitor.dispose(fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounts::cpu_time;

    /// Takes at least `time` of CPU time.
    fn spin(time: Duration) {
        let began = cpu_time();
        while cpu_time() - began < time {}
    }

    #[test]
    fn job_of_the_janitor_is_charged_before_its_result_and_never_more_than_its_bound() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let janitor = Arc::new(Janitor::of("test"));
            janitor.run(|| spin(2 * JOB_COST_MAX)).await.unwrap();
            assert_eq!(janitor.take_cost(), JOB_COST_MAX);
            assert_eq!(janitor.take_cost(), Duration::ZERO, "it was asked for");
            janitor.dispose(Spins);
            janitor.push_write(|| spin(JOB_COST_MAX));
            janitor.idle().await;
            assert_eq!(janitor.take_cost(), JOB_COST_MAX, "a write has rules of its own");
        });
    }

    struct Spins;

    impl Drop for Spins {
        fn drop(&mut self) {
            spin(2 * JOB_COST_MAX);
        }
    }
}
