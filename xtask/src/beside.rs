//! Busy threads beside the tests: a test that passes only on a quiet machine fails here.

use manyring_system::{Context, Outcome};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Threads that compute without a pause until this value is dropped. They compete with the tests
/// for the CPUs as any other program of the host does.
#[derive(Debug)]
pub(crate) struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    /// Starts `count` threads.
    ///
    /// # Errors
    /// The system has no thread to give.
    pub(crate) fn start(count: usize) -> Outcome<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut busy = Self { stop: stop.clone(), threads: Vec::new() };
        for _ in 0..count {
            let stop = stop.clone();
            let spin = move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            };
            let builder = std::thread::Builder::new().name("busy".to_owned());
            busy.threads.push(builder.spawn(spin).context("a busy thread")?);
        }
        if count > 0 {
            println!("xtask: {count} busy threads run beside the tests");
        }
        Ok(busy)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CPU time in nanoseconds of each thread of this process that is called `busy`.
    fn used() -> Vec<u64> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let named = tasks.filter(|task| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name == "busy\n")
        });
        let first = |text: String| text.split_whitespace().next()?.parse().ok();
        named
            .filter_map(|task| first(std::fs::read_to_string(task.path().join("schedstat")).ok()?))
            .collect()
    }

    #[test]
    fn busy_threads_compute_until_they_are_dropped() {
        let busy = Busy::start(2).unwrap();
        while used().len() < 2 || used().iter().any(|ns| *ns < 10_000_000) {
            std::thread::yield_now();
        }
        drop(busy);
        assert!(used().is_empty(), "{:?}", used());
    }
}
