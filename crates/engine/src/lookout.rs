//! A thread that looks at others at every tick while they work, and sleeps without a timer while
//! they rest: the sentry (`sentry.rs`) and the watch (`watch.rs`).
//!
//! A thread that is looked at counts first, and then asks whether the lookout sleeps
//! ([`Lookout::rouse`]). The lookout says first that it sleeps, and then looks once more. All four
//! are sequentially consistent, so that at least one of them sees the other: no work is overlooked.

use manyring_backend::sys::starter::{self, ThreadRole};
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::Duration;

/// Such a thread, before and after its start.
#[derive(Debug)]
pub(crate) struct Lookout {
    name: &'static str,
    /// How often it looks.
    tick: Duration,
    /// Ticks without work after which it goes to sleep.
    quiet_ticks: u32,
    /// True if somebody works, or has worked since the last look.
    look: fn() -> bool,
    is_asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Lookout {
    /// One that looks by `look` at every `tick`, and sleeps after `quiet_ticks` without work.
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

    /// Starts the thread, unless it runs already. One caller at a time.
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

    /// Wakes it, if it sleeps. Called by a thread that has just counted that it works.
    #[inline]
    pub(crate) fn rouse(&self) {
        if self.is_asleep.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    /// True if it sleeps.
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
