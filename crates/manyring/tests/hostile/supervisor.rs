//! A daemon with a hostile guest and a neighbour, whatever their devices are: what the one does
//! must not be felt by the other, and costs one clear line.

use crate::support::process::{Daemon, Holdings, is_isolated, wait_until};
use std::marker::PhantomData;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest wait for an answer that must come.
pub(crate) const LONG: Duration = Duration::from_secs(10);

/// A guest that works and checks what it gets, again and again, on a thread of its own.
struct Neighbour {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Neighbour {
    fn start(mut round: impl FnMut() + Send + 'static) -> Self {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, count) = (stop.clone(), rounds.clone());
        let live = move || {
            while !stopped.load(Ordering::Relaxed) {
                round();
                count.fetch_add(1, Ordering::Relaxed);
            }
        };
        let thread = std::thread::Builder::new().spawn(live).unwrap();
        Self { stop, rounds, thread }
    }
}

/// The kind of the two devices of a [`DeviceManager`].
pub(crate) trait Kind: Sized {
    /// Connects another guest to `bad`, in place of the hostile one, and works with it.
    fn serves_the_next_guest(supervisor: &Supervisor<Self>);
}

/// A daemon with two devices: `bad` for the hostile guest, `good` for its neighbour.
pub(crate) struct Supervisor<K> {
    pub(crate) daemon: Daemon,
    neighbour: Neighbour,
    kind: PhantomData<K>,
}

impl<K: Kind> Supervisor<K> {
    /// Starts the daemon, whose sockets are `names`. `connect` gives what the neighbour does in a
    /// round.
    pub(crate) fn start<R: FnMut() + Send + 'static>(
        config: &str,
        names: &[&str],
        connect: impl FnOnce(&Path) -> R,
    ) -> Self {
        let daemon = Daemon::run(config, names);
        let neighbour = Neighbour::start(connect(&daemon.socket_of("good")));
        Self { daemon, neighbour, kind: PhantomData }
    }

    /// Warnings about the hostile guest's device.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let log = self.daemon.log();
        let lines = log.lines().filter(|l| l.contains("WARN") && l.contains("\"bad\""));
        lines.map(str::to_owned).collect()
    }

    /// Warnings behind the first `before`; there is one at least, which may take a moment.
    pub(crate) fn lines_behind(&self, before: usize) -> Vec<String> {
        assert!(wait_until(|| self.warnings().len() > before), "no line");
        self.warnings().split_off(before)
    }

    /// Does `act`: it costs one line, which says `what`; the neighbour goes on, and the next
    /// guest is served.
    pub(crate) fn one_line(&self, what: &str, act: impl FnOnce()) {
        let before = self.warnings().len();
        act();
        assert!(wait_until(|| self.warnings().len() > before), "{what}: no line");
        self.next_guest_is_served();
        let lines = self.lines_behind(before);
        assert_eq!(lines.len(), 1, "{what}: {lines:#?}");
        assert!(lines[0].contains(what), "{what}: {lines:?}");
        self.neighbour_goes_on();
    }

    pub(crate) fn next_guest_is_served(&self) {
        K::serves_the_next_guest(self);
    }

    pub(crate) fn neighbour_goes_on(&self) {
        let rounds = || self.neighbour.rounds.load(Ordering::Relaxed);
        let before = rounds();
        assert!(wait_until(|| rounds() > before + 1), "the neighbour stands");
    }

    /// The resources that the daemon holds once they change no more.
    pub(crate) fn settled(&self) -> Holdings {
        // The last device process is followed by the process that waits to be the next one.
        let processes = if is_isolated() { 2 } else { 1 };
        assert!(wait_until(|| self.daemon.processes().len() != 1 + processes));
        // The waiting process may have begun, and not have all its threads yet.
        let is_ready = |process: &u32| {
            let threads = threads_of(*process);
            ["worker-0", "watch"].iter().all(|name| threads.iter().any(|thread| thread == name))
        };
        assert!(wait_until(|| self.daemon.processes().iter().skip(1).all(is_ready)));
        let mut last = self.daemon.holdings();
        assert!(wait_until(|| {
            std::thread::sleep(Duration::from_millis(20));
            let now = self.daemon.holdings();
            std::mem::replace(&mut last, now) == now
        }));
        last
    }

    /// Waits until the daemon holds what it held `before`, and no more threads than `more` beside.
    /// A worker that a loaded host has had started stays, with its descriptors, for as long as it
    /// has queues, and a minute: that is no guest's doing.
    pub(crate) fn holds_no_more_than(&self, before: Holdings, more: usize) {
        /// Descriptors of a worker, at most.
        const WORKER_FDS: usize = 6;
        let fits = || {
            let now = self.daemon.holdings();
            let workers = now.workers.saturating_sub(before.workers);
            now.threads <= before.threads + more + workers
                && now.fds <= before.fds + WORKER_FDS * workers
        };
        assert!(wait_until(fits), "{before:?}: {}", self.daemon.held_things());
    }

    pub(crate) fn end(mut self) {
        assert!(self.daemon.is_running());
        self.neighbour.stop.store(true, Ordering::Relaxed);
        self.neighbour.thread.join().expect("the neighbour");
        let log = self.daemon.log();
        assert!(!log.contains("ERROR") && !log.contains("panicked"), "{log}");
        let warned = log.lines().any(|l| l.contains("WARN") && l.contains("\"good\""));
        assert!(!warned, "{log}");
        assert_eq!(self.daemon.terminate().code(), Some(0));
    }
}

/// The names of the threads of a process.
fn threads_of(process: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.map(|name| name.trim().to_owned()).collect()
}
