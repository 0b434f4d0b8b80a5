//! `Lookout`: a thread that checks other threads at every tick while they work, and sleeps without
//! a timer while none does: the sentry (`sentry.rs`) and the watch (`watch.rs`).
//!
//! A checked thread first counts that it works, and then reads whether the lookout sleeps
//! ([`Lookout::rouse`]). The lookout first sets that it sleeps, and then checks once more. All four
//! accesses are sequentially consistent, so that at least one of the two sees the other: no work is
//! missed.

use manyring_backend::sys::starter::{self, ThreadRole};
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::Duration;

/// A lookout thread, before and after its start.
#[derive(Debug)]
pub(crate) struct Lookout {
    name: &'static str,
    /// Interval of the checks.
    tick: Duration,
    /// The number of ticks without work after which the thread sleeps.
    quiet_ticks: u32,
    /// The check. Returns true if some thread works, or has worked since the last check.
    look: fn() -> bool,
    is_asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Lookout {
    /// Makes a lookout that calls `look` at every `tick`, and sleeps after idle `quiet_ticks`.
    pub(crate) const fn new(
        name: &'static str,
        tick: Duration,
        quiet_ticks: u32,
        look: fn() -> bool,
    ) -> Self {
        Self {
            name,
            tick,
            quiet_ticks,
            look,
            is_asleep: AtomicBool::new(false),
            thread: OnceLock::new(),
        }
    }

    /// Starts the thread, unless it runs already. Calls must not overlap.
    ///
    /// # Errors
    /// The system has no thread for it.
    pub(crate) fn start(&'static self) -> io::Result<()> {
        if self.thread.get().is_some() {
            return Ok(());
        }
        let builder = std::thread::Builder::new().name(self.name.to_owned());
        let thread = starter::spawn(ThreadRole::Lookout, builder, || self.stand())?;
        let _ = self.thread.set(thread.thread().clone());
        Ok(())
    }

    /// Wakes the lookout, if it sleeps. A thread calls this that has just counted that it works.
    #[inline]
    pub(crate) fn rouse(&self) {
        if self.is_asleep.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    /// True if the lookout sleeps.
    #[cfg(test)]
    pub(crate) fn is_asleep(&self) -> bool {
        self.is_asleep.load(Ordering::SeqCst)
    }

    #[cold]
    fn wake(&self) {
        if self.is_asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    fn stand(&self) {
        let mut quiet = 0;
        loop {
            std::thread::sleep(self.tick);
            quiet = if (self.look)() { 0 } else { quiet + 1 };
            if quiet < self.quiet_ticks {
                continue;
            }
            self.is_asleep.store(true, Ordering::SeqCst);
            if (self.look)() {
                self.is_asleep.store(false, Ordering::SeqCst);
            }
            while self.is_asleep.load(Ordering::SeqCst) {
                std::thread::park();
            }
            quiet = 0;
        }
    }
}
