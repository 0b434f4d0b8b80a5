//! `Threads`: the state of a device process's workers, and of its threads that are stuck.
//!
//! The state lies in a sealed memfd of fixed size, as counters do. The device process writes the
//! memfd when the supervisor asks for it. The supervisor does not trust the content: it cuts and
//! bounds each value before the API and the metrics show it.

use crate::counts::sealed;
use crate::proc_stat::Used;
use crate::worker_view::{StuckInfo, Summary, WorkerInfo, Workers};
use manyring_engine::Pool;
use manyring_engine::stats::PolicyStats;
use rustix::fd::{AsFd, OwnedFd};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Size of the file in bytes: 8 bytes for the length of the text, and the text, which is JSON.
const SIZE: usize = 256 << 10;
const HEAD: usize = size_of::<u64>();
/// Most workers of a device process that are shown; higher numbers are dropped.
const WORKERS_MAX: usize = 1024;
/// Most NUMA nodes of a host that are shown.
const NODES_MAX: usize = 64;
/// Most stuck threads of a device process that are shown.
const STUCK_MAX: usize = 64;
/// Longest name of a thread, state or function of the kernel, in characters.
const NAME_MAX: usize = 64;
/// Largest count that is accepted for a histogram's bucket.
const COUNT_MAX: u64 = 1 << 48;

/// The workers and threads of one device process, which writes them into its file.
#[derive(Debug)]
pub struct Threads {
    /// `None`: the file could not be made, or the process has ended.
    file: Mutex<Option<OwnedFd>>,
    /// The last values that were read completely; they are shown again if the process is writing
    /// during a read.
    last: Mutex<Workers>,
    /// The `/proc/self/stat` of the process, which the process opened: /proc may hide the processes
    /// of other users.
    stat: OnceLock<File>,
}

impl Threads {
    /// Makes the file, without contents.
    pub fn open() -> Self {
        let (file, last, stat) = (sealed("threads", SIZE).ok(), Mutex::default(), OnceLock::new());
        Self { file: Mutex::new(file), last, stat }
    }

    /// Stores the `/proc/self/stat` that the device process sent.
    pub fn know(&self, stat: Option<OwnedFd>) {
        let _ = stat.map(|stat| self.stat.set(stat.into()));
    }

    /// Reads the memory and the CPU time of the process; zeroes while there is no process.
    pub fn used(&self) -> Used {
        self.stat.get().map(Used::of).unwrap_or_default()
    }

    /// Returns a descriptor of the file for the device process.
    pub fn given(&self) -> Option<OwnedFd> {
        self.file().as_ref()?.try_clone().ok()
    }

    fn file(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the file, because the process has ended: nobody reads the state any more.
    pub fn end(&self) {
        *self.file() = None;
    }

    /// Reads the workers that the process wrote. `serves` returns true for the names of the devices
    /// of that process; other names are not shown.
    pub fn read(&self, process: &str, serves: impl Fn(&str) -> bool) -> Workers {
        let said = self.file().as_ref().and_then(said);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(said) = said {
            *last = checked(said, process, serves);
        }
        last.clone()
    }
}

fn said(file: &OwnedFd) -> Option<Workers> {
    let mut head = [0; HEAD];
    rustix::io::pread(file, &mut head, 0).ok()?;
    let len = usize::try_from(u64::from_ne_bytes(head)).ok()?;
    let mut bytes = vec![0; len.min(SIZE - HEAD)];
    let count = rustix::io::pread(file, &mut bytes, HEAD as u64).ok()?;
    serde_json::from_slice(bytes.get(..count)?).ok()
}

/// Returns the values of a process's report that may be shown, each of them bounded.
fn checked(said: Workers, process: &str, serves: impl Fn(&str) -> bool) -> Workers {
    let mut workers = BTreeMap::new();
    for worker in said.workers.into_iter().filter(|worker| worker.index < WORKERS_MAX) {
        let WorkerInfo { index, cpus, guest_pages, pause_ns, polling, .. } = worker;
        let mut cpus = cpus;
        cpus.iter_mut().for_each(|cpus| cpus.truncate(WORKERS_MAX));
        let mut guest_pages = guest_pages;
        guest_pages.truncate(NODES_MAX);
        guest_pages.iter_mut().for_each(|pages| *pages = (*pages).min(COUNT_MAX));
        let known = PolicyStats::default().counters();
        let is_known = |name: &String| known.iter().any(|counter| counter.name == *name);
        let worker = WorkerInfo {
            process: process.to_owned(),
            index,
            cpus,
            node: worker.node.filter(|node| *node < NODES_MAX),
            guest_pages,
            pause_ns: summary(pause_ns),
            polling: polling.into_iter().filter(|(name, _)| is_known(name)).collect(),
            ..worker
        };
        workers.insert(index, worker);
    }
    let mut threads = BTreeSet::new();
    let mut stuck: Vec<_> = said.stuck.into_iter().map(|stuck| printable(stuck, process)).collect();
    stuck.retain(|stuck| threads.insert(stuck.thread.clone()));
    stuck.truncate(STUCK_MAX);
    for stuck in stuck.iter_mut().filter(|stuck| !serves(&stuck.device)) {
        stuck.device.clear();
    }
    Workers { workers: workers.into_values().collect(), stuck }
}

fn summary(said: Summary) -> Summary {
    let is_possible = |bucket: &(u64, u64)| bucket.1 < COUNT_MAX;
    let buckets: BTreeMap<_, _> =
        said.buckets.into_iter().filter(is_possible).take(WORKERS_MAX).collect();
    Summary::new(buckets.into_iter().collect(), said.sum)
}

fn printable(said: StuckInfo, process: &str) -> StuckInfo {
    let text = |text: String| {
        text.chars().filter(char::is_ascii_graphic).take(NAME_MAX).collect::<String>()
    };
    StuckInfo {
        process: process.to_owned(),
        thread: text(said.thread).replace(['"', '\\'], ""),
        device: said.device,
        state: text(said.state),
        waits_in: text(said.waits_in),
        stuck_ns: said.stuck_ns,
    }
}

/// In the device process: writes the state into the file.
pub(super) fn write(file: impl AsFd, pool: &Pool) {
    let mut workers = Workers::of(pool);
    let text = |workers: &Workers| {
        let text = serde_json::to_vec(workers).ok();
        text.filter(|text| text.len() <= SIZE - HEAD)
    };
    let Some(text) = text(&workers).or_else(|| {
        // The text is too long: leave out the histograms, which are most of it.
        workers.workers.iter_mut().for_each(|worker| worker.pause_ns = Summary::default());
        text(&workers)
    }) else {
        return;
    };
    let _ = rustix::io::pwrite(&file, &text, HEAD as u64);
    let _ = rustix::io::pwrite(&file, &(text.len() as u64).to_ne_bytes(), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(index: usize) -> WorkerInfo {
        let text = format!(
            "{{\"index\": {index}, \"queues\": 1, \"sleeps\": 2, \"slept_ns\": 3,
               \"polling\": {{\"spins_hit\": 4, \"\\u001b[2J\": 5}},
               \"pause_ns\": {{\"count\": 9, \"sum\": 1, \"p50\": 0, \"p90\": 0, \"p99\": 0,
                               \"max\": 0, \"buckets\": [[1, 18446744073709551615], [3, 2]]}}}}"
        );
        serde_json::from_str(&text).unwrap()
    }

    fn stuck(thread: &str, device: &str) -> StuckInfo {
        StuckInfo {
            process: "another".to_owned(),
            thread: thread.to_owned(),
            device: device.to_owned(),
            state: "D\u{1b}[1m".to_owned(),
            waits_in: "x".repeat(1000),
            stuck_ns: 1,
        }
    }

    #[test]
    fn what_a_device_process_says_of_its_threads_is_cleaned_before_anybody_sees_it() {
        let workers = [0, 3, 3, WORKERS_MAX, usize::MAX].map(worker);
        let stuck = [
            stuck("worker-0\n\"}", "mine"),
            stuck("worker-0}", "mine"),
            stuck("janitor", "theirs"),
        ];
        let said = Workers { workers: workers.to_vec(), stuck: stuck.to_vec() };
        let shown = checked(said, "a", |device| device == "mine");
        let indices: Vec<_> = shown.workers.iter().map(|worker| worker.index).collect();
        assert_eq!(indices, [0, 3]);
        let first = &shown.workers[0];
        assert_eq!((first.process.as_str(), first.queues, first.polling.len()), ("a", 1, 1));
        assert_eq!((first.pause_ns.count, &first.pause_ns.buckets[..]), (2, &[(3, 2)][..]));
        let threads: Vec<_> = shown.stuck.iter().map(|stuck| stuck.thread.as_str()).collect();
        assert_eq!(threads, ["worker-0}", "janitor"]);
        let StuckInfo { process, state, waits_in, device, .. } = &shown.stuck[1];
        assert_eq!((process.as_str(), state.as_str(), waits_in.len()), ("a", "D[1m", NAME_MAX));
        assert_eq!((shown.stuck[0].device.as_str(), device.as_str()), ("mine", ""));
    }

    #[test]
    fn what_is_no_text_or_half_of_it_changes_nothing() {
        let threads = Threads::open();
        let file = threads.given().unwrap();
        let say = |text: &str, len: u64| {
            rustix::io::pwrite(&file, text.as_bytes(), HEAD as u64).unwrap();
            rustix::io::pwrite(&file, &len.to_ne_bytes(), 0).unwrap();
            threads.read("a", |_| true).workers.len()
        };
        assert_eq!(threads.read("a", |_| true).workers.len(), 0);
        let text = serde_json::to_string(&Workers { workers: vec![worker(1)], stuck: Vec::new() });
        let text = text.unwrap();
        assert_eq!(say(&text, text.len() as u64), 1);
        assert_eq!(say(&text, text.len() as u64 - 1), 1);
        assert_eq!(say(&text, u64::MAX), 1);
        assert_eq!(say("{\"workers\": []}", 15), 0);
    }
}
