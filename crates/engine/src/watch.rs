//! The watch over threads that touch or map guest memory: if a thread is blocked in a call, the log
//! names it.
//!
//! The front-end decides how long a page fault or a mapping of guest memory lasts, and no signal
//! ends it. The kernel has no time limit for that inside of one process, so at least the log must
//! name the device that blocks a thread:
//!
//! ```text
//! thread:  at_work: beats += 1 (odd);  is the watch asleep? wake it
//!          a round: beats += 2
//!          at_rest: beats += 1 (even)
//! watch:   every tick: beats odd, and the same for two ticks? read the thread's state in /proc;
//!          it sleeps there: it is held: log by which device, and in which kernel function
//!          a thread that was held has other beats? log how long it was held
//!          no thread has been at work for a while: set "asleep", check once more, sleep
//! ```
//! 1. A thread that is runnable merely waits for a CPU: it is not held, however long that takes.
//! 2. A thread counts first, and then checks whether the watch sleeps; the watch first sets that it
//!    sleeps, and then checks the counts (`lookout.rs`).
//! 3. While no thread works, the watch sleeps without a timer: an idle daemon has no tick.
//! 4. A thread writes to its own counter only, without a lock and without reading the clock.

use crate::lookout::Lookout;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;
use tokio::time::Instant;

/// Interval of the checks. A blocked thread is logged after two to three ticks.
const TICK: Duration = Duration::from_millis(25);
/// After this many ticks without progress of a working thread, the watch reads its state.
const STUCK_TICKS: u64 = 2;
/// The same number for a call whose duration depends on the host, which may wait for a busy disk:
/// these ticks are one second.
const STUCK_TICKS_HOST: u64 = 40;
/// The number of ticks without any working thread after which the watch sleeps.
const QUIET_TICKS: u32 = 8;

/// A thread that is blocked in a call.
#[derive(Clone, Debug)]
pub struct Held {
    /// The thread's name.
    pub thread: String,
    /// The device that the thread served then; empty if it served several at once.
    pub device: String,
    /// The thread's state in `/proc`: `D` (sleeps, and no signal wakes it) or `S` (sleeps).
    pub state: char,
    /// The function of the kernel in which the thread waits, where the kernel shows that.
    pub waits_in: String,
    /// The time since the watch found the thread blocked.
    pub since: Duration,
}

/// Returns every thread that is blocked in a call now.
#[must_use]
pub fn held() -> Vec<Held> {
    let posts = lock();
    let posts = posts.iter().filter_map(Weak::upgrade);
    let found = posts.filter_map(|post| {
        let (held, began) = post.held.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        Some(Held { since: began.elapsed(), ..held })
    });
    found.collect()
}

/// Returns the device of the queue with this number, if the queue runs.
pub(crate) type DeviceOf = Box<dyn Fn(u64) -> Option<String> + Send + Sync>;

/// The devices that a thread serves.
pub(crate) enum Serves {
    /// Queues of several devices.
    Queues(DeviceOf),
    /// One device.
    Device(String),
    /// One device, by a call whose duration depends on the host.
    Host(String),
}

impl std::fmt::Debug for Serves {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Queues(_) => f.write_str("Queues"),
            Self::Device(name) => f.debug_tuple("Device").field(name).finish(),
            Self::Host(name) => f.debug_tuple("Host").field(name).finish(),
        }
    }
}

impl Serves {
    /// Returns the number of ticks without progress after which the watch reads the thread's state.
    fn stuck_ticks(&self) -> u64 {
        match self {
            Self::Queues(_) | Self::Device(_) => STUCK_TICKS,
            Self::Host(_) => STUCK_TICKS_HOST,
        }
    }
}

/// The state of a watched thread.
#[derive(Debug)]
pub(crate) struct Post {
    serves: Serves,
    thread: OnceLock<i32>,
    beats: AtomicU64,
    /// The number of the queue whose turn it is; 0: no queue.
    queue: AtomicU64,
    is_held: AtomicBool,
    /// The beats at the last check, and for how many ticks they have stayed. Only the watch writes.
    seen: AtomicU64,
    same_ticks: AtomicU64,
    held: Mutex<Option<(Held, Instant)>>,
}

static POSTS: Mutex<Vec<Weak<Post>>> = Mutex::new(Vec::new());
static WATCH: Lookout = Lookout::new("watch", TICK, QUIET_TICKS, look);

fn lock() -> MutexGuard<'static, Vec<Weak<Post>>> {
    POSTS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Post {
    /// Makes the state for a thread, which calls [`Self::enter`] later. Starts the watch, unless it
    /// runs: if the system has no thread for the watch, blocked threads are not logged.
    pub(crate) fn new(serves: Serves) -> Arc<Self> {
        let mut posts = lock();
        let _ = WATCH.start();
        let post = Arc::new(Self {
            serves,
            thread: OnceLock::new(),
            beats: AtomicU64::new(0),
            queue: AtomicU64::new(0),
            is_held: AtomicBool::new(false),
            seen: AtomicU64::new(0),
            same_ticks: AtomicU64::new(0),
            held: Mutex::default(),
        });
        posts.retain(|post| post.strong_count() > 0);
        posts.push(Arc::downgrade(&post));
        post
    }

    /// Makes the calling thread the watched one.
    pub(crate) fn enter(&self) {
        let _ = self.thread.set(rustix::thread::gettid().as_raw_nonzero().get());
    }

    /// Call when the thread begins to work.
    pub(crate) fn at_work(&self) {
        self.beats.fetch_add(1, Ordering::SeqCst);
        WATCH.rouse();
    }

    /// Call when the thread has made progress and still works.
    #[inline]
    pub(crate) fn beat(&self) {
        self.beats.store(self.beats.load(Ordering::Relaxed) + 2, Ordering::Relaxed);
    }

    /// Call when the thread has no work.
    pub(crate) fn at_rest(&self) {
        self.beats.fetch_add(1, Ordering::Release);
    }

    /// The thread works for this queue from now on.
    #[inline]
    pub(crate) fn serve(&self, queue: u64) {
        self.queue.store(queue, Ordering::Relaxed);
    }

    /// The thread works for no single queue from now on.
    #[inline]
    pub(crate) fn serve_all(&self) {
        self.queue.store(0, Ordering::Relaxed);
    }

    /// Returns the beats: they grow with the thread's progress, and are odd while it works.
    pub(crate) fn beats(&self) -> u64 {
        self.beats.load(Ordering::SeqCst)
    }

    /// True while the thread is blocked in a call.
    pub(crate) fn is_held(&self) -> bool {
        self.is_held.load(Ordering::Relaxed)
    }

    /// Returns the device that the thread serves; an empty string if it serves none or several.
    pub(crate) fn device(&self) -> String {
        match &self.serves {
            Serves::Device(name) | Serves::Host(name) => name.clone(),
            Serves::Queues(device_of) => {
                device_of(self.queue.load(Ordering::Relaxed)).unwrap_or_default()
            }
        }
    }

    /// Checks the thread. Returns true if it works.
    fn look(&self) -> bool {
        let beats = self.beats.load(Ordering::SeqCst);
        if self.seen.swap(beats, Ordering::Relaxed) != beats {
            self.same_ticks.store(0, Ordering::Relaxed);
            self.free();
        } else if beats % 2 == 1 {
            let ticks = self.same_ticks.fetch_add(1, Ordering::Relaxed) + 1;
            if ticks >= self.serves.stuck_ticks() && !self.is_held() {
                self.name();
            }
        }
        beats % 2 == 1
    }

    /// Logs the thread, and lists it as held, if it sleeps in a call.
    fn name(&self) {
        let Some(thread) = self.thread.get() else { return };
        let read = |what: &str| {
            std::fs::read_to_string(format!("/proc/self/task/{thread}/{what}")).unwrap_or_default()
        };
        let stat = read("stat");
        let Some((head, rest)) = stat.rsplit_once(')') else { return };
        let Some(state @ ('D' | 'S')) = rest.trim_start().chars().next() else { return };
        let name = head.split_once('(').map_or("", |(_, name)| name).to_owned();
        let (device, waits_in) = (self.device(), read("wchan"));
        let waits = "a thread is blocked; the devices that it serves wait";
        match &self.serves {
            Serves::Queues(_) => {
                tracing::warn!(thread = name, device, state = %state, waits_in, "{waits}");
            }
            Serves::Host(_) => {
                let waits = "a host call is blocked; the device waits";
                tracing::warn!(thread = name, device, state = %state, waits_in, "{waits}");
            }
            // A janitor serves one device, whose session logs a long block of the janitor itself.
            Serves::Device(_) => {
                tracing::info!(thread = name, device, state = %state, waits_in, "{waits}");
            }
        }
        let held = Held { thread: name, device, state, waits_in, since: Duration::ZERO };
        self.is_held.store(true, Ordering::Relaxed);
        let mut place = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        *place = Some((held, Instant::now()));
    }

    fn free(&self) {
        if !self.is_held.swap(false, Ordering::Relaxed) {
            return;
        }
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((Held { thread, device, .. }, began)) = held {
            let seconds = began.elapsed().as_secs_f64();
            tracing::info!(thread, device, seconds, "the thread is no longer blocked");
        }
    }
}

impl Drop for Post {
    /// Also log the end for a thread that ends as soon as its call has returned.
    fn drop(&mut self) {
        self.free();
    }
}

/// Checks all threads. Returns true if one works.
fn look() -> bool {
    let posts: Vec<_> = lock().iter().filter_map(Weak::upgrade).collect();
    posts.iter().fold(false, |any, post| post.look() | any)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    fn until(mut is_so: impl FnMut() -> bool) {
        for _ in 0..6000 {
            if is_so() {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("it does not come true");
    }

    fn find(device: &str) -> Option<Held> {
        held().into_iter().find(|held| held.device == device)
    }

    #[test]
    fn thread_that_does_not_come_back_is_named_until_it_does() {
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        let post = Post::new(Serves::Device("bad".to_owned()));
        let theirs = post.clone();
        let thread = std::thread::Builder::new().name("waiter".to_owned()).spawn(move || {
            theirs.enter();
            theirs.at_work();
            let read = reader.read_exact(&mut [0]);
            theirs.at_rest();
            read
        });
        until(|| find("bad").is_some());
        let held = find("bad").unwrap();
        assert_eq!((held.thread.as_str(), held.state), ("waiter", 'S'));
        assert!(post.is_held());
        writer.write_all(b"x").unwrap();
        thread.unwrap().join().unwrap().unwrap();
        until(|| find("bad").is_none() && !post.is_held());
    }

    #[test]
    fn thread_that_works_for_long_and_one_that_rests_are_not_named() {
        let [busy, idle] = ["busy", "idle"].map(|name| Post::new(Serves::Device(name.to_owned())));
        idle.enter();
        busy.enter();
        busy.at_work();
        // No lock here: a thread that waits for a lock sleeps, and would be named.
        let ticks = || busy.same_ticks.load(Ordering::Relaxed);
        // It uses the CPU, or waits for one, in one long round.
        while ticks() < 3 * STUCK_TICKS {
            std::hint::spin_loop();
        }
        assert!(find("busy").is_none() && find("idle").is_none());
        busy.at_rest();
    }
}
