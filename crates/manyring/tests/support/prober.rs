//! `Prober`: what the neighbours of an abuse wait at worst, for each way in which they depend on
//! the daemon: a good guest's request, the control API, a new session of another device.
//!
//! A busy machine must not look like a stall of the daemon. So the time in which the prober's
//! thread, or the thread of the daemon that it waits for, could have run and had no CPU is taken
//! off each wait (the kernel's accounts, `schedstat`), and so is the time that the hypervisor took
//! from this machine. The rest is the daemon's time, or the kernel's on the daemon's behalf: system
//! calls, page faults, locks of the kernel that others hold.
//!
//! A thread that has ended takes its account with it. So the measured work runs on threads that
//! stay: the control API is asked for something that the control thread answers by itself (a path
//! that does not exist), and the sessions are of several devices in turn, so that the thread which
//! closes the files of the session before has ended long ago. The answers of the API about devices
//! come from a thread of its own for each request: that they come at all is checked.

use super::process::{Daemon, TIMEOUT};
use super::program::http;
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp, FrontEnd};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

/// The longest wait that a neighbour may have, unless SECURITY.md says otherwise.
pub(crate) const STALL_MAX: Duration = Duration::from_millis(50);
/// Devices of the configuration that [`Prober::at`] needs, beside the control socket `control`.
pub(crate) const NEIGHBOURS: &str = "
[[blk]]
name = 'good'
socket_path = '@/good'
null = '16M'
queue_workers = [0]
[[blk]]
name = 'other0'
socket_path = '@/other0'
null = '16M'
[[blk]]
name = 'other1'
socket_path = '@/other1'
null = '16M'
[[blk]]
name = 'other2'
socket_path = '@/other2'
null = '16M'
[[blk]]
name = 'other3'
socket_path = '@/other3'
null = '16M'
";
/// Their sockets, and the control socket.
pub(crate) const SOCKETS: [&str; 6] = ["control", "good", "other0", "other1", "other2", "other3"];
/// The first part of the name of a thread that runs a daemon in a process of a test: the test
/// harness names the thread.
pub(crate) const THREAD: &str = "faults::daemon";
/// Rounds of probes beside an abuse at least.
const ROUNDS_MIN: usize = 12;
/// Pause between two rounds: a client that comes more often is slowed down.
pub(crate) const RETRY_DELAY: Duration = Duration::from_millis(20);

/// The worst waits of some rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stalls {
    /// A flush of the good guest.
    pub(crate) guest: Duration,
    /// An answer of the control API.
    pub(crate) control: Duration,
    /// From the connection to the first answer.
    pub(crate) session: Duration,
}

impl Stalls {
    pub(crate) fn worst(&self) -> Duration {
        self.guest.max(self.control).max(self.session)
    }
}

pub(crate) struct Prober {
    pid: u32,
    control: PathBuf,
    others: Vec<PathBuf>,
    guest: BlkDriver,
}

impl Prober {
    /// Probes `daemon`, whose configuration has [`NEIGHBOURS`] and a control socket, all of them in
    /// `folder`.
    pub(crate) fn at(daemon: &Daemon, folder: &Path) -> Self {
        let guest = BlkDriver::connect(&folder.join("good"), &BlkDriverOptions::default()).unwrap();
        let others = SOCKETS[2..].iter().map(|name| folder.join(name)).collect();
        let control = folder.join("control");
        let mut prober = Self { pid: daemon.pid(), control, others, guest };
        // The first time, parts of the program are read from its file.
        prober.worst(prober.others.len());
        prober
    }

    /// Probes while `abuse` runs, on a thread of its own, until it has been at it for some rounds;
    /// `abuse` ends when its flag is set, and may end before.
    pub(crate) fn beside(&mut self, abuse: impl FnOnce(&AtomicBool) + Send) -> Stalls {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _end = super::rings::StopAtEnd(&is_over);
            scope.spawn(|| abuse(&is_over));
            self.worst(ROUNDS_MIN)
        })
    }

    /// The worst waits of `rounds` rounds.
    pub(crate) fn worst(&mut self, rounds: usize) -> Stalls {
        let of = |kind| Threads { pid: self.pid, kind };
        let (workers, control) = (of(Kind::Worker), of(Kind::Control));
        let mut worst = Stalls::default();
        for _ in 0..rounds {
            let queue = &mut self.guest.queues[0];
            let flush = || queue.run(DriverOp::Flush).map(drop).unwrap();
            worst.guest = worst.guest.max(waited(workers, flush));
            let ask = |path| http(&self.control, "GET", path, "").0;
            let ask_in_vain = || assert_eq!(ask("/v1/nothing"), 404);
            worst.control = worst.control.max(waited(control, ask_in_vain));
            assert_eq!(ask("/v1/devices"), 200);
            self.others.rotate_left(1);
            let connect = || {
                let mut front = FrontEnd::connect(&self.others[0], TIMEOUT).unwrap();
                front.features().unwrap();
            };
            worst.session = worst.session.max(waited(control, connect));
            std::thread::sleep(RETRY_DELAY);
        }
        worst
    }
}

/// The threads of the daemon, and of its device processes, that a probe waits for.
#[derive(Clone, Copy, Debug)]
struct Threads {
    /// The daemon's process. Its device processes are its children.
    pid: u32,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// All workers.
    Worker,
    /// The main thread of each process, or the one that runs the daemon in a process of a test.
    Control,
}

/// How long `act` takes, less what this thread, and the threads of the daemon that it waits for,
/// waited for a CPU.
fn waited(threads: Threads, act: impl FnOnce()) -> Duration {
    let (before, stolen_before) = (delays(threads), stolen());
    let began = SystemTime::now();
    act();
    let took = began.elapsed().unwrap_or_default();
    let after = delays(threads);
    let delayed = after.iter().map(|(thread, ns)| ns - before.get(thread).unwrap_or(ns).min(ns));
    let delayed = Duration::from_nanos(delayed.sum());
    took.saturating_sub(delayed).saturating_sub(stolen().saturating_sub(stolen_before))
}

/// Nanoseconds that this thread, and each of `threads`, could have run and had no CPU.
fn delays(threads: Threads) -> HashMap<PathBuf, u64> {
    let Threads { pid, kind } = threads;
    let is_meant = |thread: &PathBuf| {
        let name = std::fs::read_to_string(thread.join("comm")).unwrap_or_default();
        let is_main = || thread.file_name() == thread.ancestors().nth(2).and_then(Path::file_name);
        match kind {
            Kind::Worker => name.starts_with("worker-"),
            Kind::Control => is_main() || name.starts_with(THREAD),
        }
    };
    let delay = |thread: PathBuf| {
        let text = std::fs::read_to_string(thread.join("schedstat")).ok()?;
        Some((thread, text.split(' ').nth(1)?.parse().ok()?))
    };
    let supervisor = tasks(&pid.to_string());
    let processes: Vec<_> = supervisor.iter().flat_map(|task| children(task)).collect();
    let threads = supervisor.into_iter().chain(processes.iter().flat_map(|process| tasks(process)));
    let own = PathBuf::from("/proc/thread-self");
    threads.filter(is_meant).chain([own]).filter_map(delay).collect()
}

/// The folders of the threads of a process.
fn tasks(pid: &str) -> Vec<PathBuf> {
    let folder = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    folder.filter_map(|task| Some(task.ok()?.path())).collect()
}

/// The processes that a thread has started.
fn children(task: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(task.join("children")).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// Time that the hypervisor has taken from this machine's CPUs since boot (`steal`).
fn stolen() -> Duration {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let mut words = text.lines().next().into_iter().flat_map(str::split_whitespace);
    let ticks: u64 = words.nth(8).and_then(|word| word.parse().ok()).unwrap_or(0);
    Duration::from_millis(ticks * 10)
}

/// Fails if a neighbour of `abuse` has waited for too long.
pub(crate) fn check(abuse: &str, stalls: Stalls) {
    assert!(stalls.worst() < STALL_MAX, "beside {abuse}: {stalls:?}");
}
