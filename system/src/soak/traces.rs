//! The resources of a process: fds by kind, mappings of guest memory, threads, memory, CPU time.

use crate::command::wait_for;
use crate::daemon::ticks;
use crate::{Context, Outcome, check};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// Longest time until what a guest left is gone: idle threads of the kernel and of the control
/// thread's pool live for some seconds.
const SETTLE: Duration = Duration::from_secs(30);
/// KiB that the allocator may keep for the next guest.
const RESIDENT_MORE_KIB: u64 = 32 << 10;
/// Mappings without a name that a started thread may add: stacks, and arenas of the allocator.
const NAMELESS_MORE: u64 = 32;
/// Kinds of fds of which a worker has one for itself.
const OF_WORKERS: [&str; 2] = [RING, "anon_inode:[eventfd]"];
/// An io_uring, as an fd and as a mapping. A worker maps two parts of one.
const RING: &str = "anon_inode:[io_uring]";
const RING_MAPPINGS: u64 = 2;
/// Idle threads that the kernel may keep for a worker that has used its io_uring, until the worker
/// ends. It means to keep one for requests that take a bounded time and one for the others; a
/// worker that has no queue, and for which more of them stay, ends.
const KERNEL_THREADS: u64 = 2;
/// The name of a kernel thread begins with this, before the id of the thread that it works for.
const KERNEL_THREAD: &str = "iou-";

/// The resources of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Traces {
    fds: BTreeMap<String, u64>,
    workers: u64,
    /// Threads that are no workers.
    threads: u64,
    /// Threads of the kernel, for io_uring: each one's name, whom it works for, and its state.
    kernel_threads: Vec<String>,
    /// Mappings with a name: files, guest memory, rings.
    named: BTreeMap<String, u64>,
    /// Mappings without one: stacks, and arenas of the allocator.
    nameless: u64,
    resident_kib: u64,
}

impl Traces {
    /// The resources of process `pid`.
    pub(super) fn of(pid: u32) -> Outcome<Self> {
        let folder = |name: &str| {
            let path = format!("/proc/{pid}/{name}");
            std::fs::read_dir(&path).context(path)
        };
        let mut fds = BTreeMap::new();
        for entry in folder("fd")?.flatten() {
            // One that is closed at this moment has no name any more.
            if let Ok(name) = std::fs::read_link(entry.path()) {
                *fds.entry(kind(&name.to_string_lossy())).or_default() += 1;
            }
        }
        let name = |entry: std::fs::DirEntry| {
            let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            (entry.file_name().to_string_lossy().into_owned(), name.trim().to_owned())
        };
        let names: BTreeMap<_, _> = folder("task")?.flatten().map(name).collect();
        let workers = names.values().filter(|name| name.starts_with("worker-")).count() as u64;
        let of_kernel = names.iter().filter(|(_, name)| name.starts_with(KERNEL_THREAD));
        let kernel_threads: Vec<_> = of_kernel
            .map(|(id, name)| kernel_thread(name, &names, &thread_state(pid, id)))
            .collect();
        let (mut named, mut nameless) = (BTreeMap::new(), 0);
        for line in proc(pid, "maps")?.lines() {
            // Addresses, mode, offset, device, inode.
            match line.splitn(6, ' ').nth(5).map(str::trim) {
                None | Some("") => nameless += 1,
                Some(name) => *named.entry(name.to_owned()).or_default() += 1,
            }
        }
        Ok(Self {
            fds,
            workers,
            threads: (names.len() - kernel_threads.len()) as u64 - workers,
            kernel_threads,
            named,
            nameless,
            resident_kib: resident_kib(pid)?,
        })
    }

    /// The resources of which there are more than in `before`, if they belong to guests.
    fn more_than(&self, before: &Self) -> Vec<String> {
        let mut more = Vec::new();
        let workers = self.workers.saturating_sub(before.workers);
        let mut compare = |what: &str, now: u64, then: u64, free: u64| {
            if now > then + free {
                more.push(format!("{} of {what}", now - then));
            }
        };
        for (kind, count) in &self.fds {
            let free = if OF_WORKERS.contains(&kind.as_str()) { workers } else { 0 };
            compare(kind, *count, before.fds.get(kind).copied().unwrap_or(0), free);
        }
        compare("threads", self.threads, before.threads, 0);
        let of_kernel = format!("threads of the kernel ({})", self.kernel_threads.join("; "));
        let kernel_threads_max = KERNEL_THREADS * self.workers;
        compare(&of_kernel, self.kernel_threads.len() as u64, kernel_threads_max, 0);
        for (name, count) in &self.named {
            let free = if name == RING { RING_MAPPINGS * workers } else { 0 };
            let then = before.named.get(name).copied().unwrap_or(0);
            compare(&format!("mappings of {name}"), *count, then, free);
        }
        let free = NAMELESS_MORE * (workers + 1);
        compare("mappings without a name", self.nameless, before.nameless, free);
        compare("KiB resident", self.resident_kib, before.resident_kib, RESIDENT_MORE_KIB);
        more
    }
}

impl std::fmt::Display for Traces {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fds: u64 = self.fds.values().sum();
        let named: u64 = self.named.values().sum();
        write!(
            f,
            "{fds} fds, {} workers and {} other threads ({} of the kernel), {named} mappings with \
             a name and {} without, {} KiB resident",
            self.workers,
            self.threads,
            self.kernel_threads.len(),
            self.nameless,
            self.resident_kib
        )
    }
}

/// Waits until a process holds no more than before. The lists of its mappings, fds and threads then
/// go to the folder `logs`.
pub(super) fn settle(pid: u32, before: &Traces, logs: &Path) -> Outcome {
    let mut more = Vec::new();
    let settled = wait_for("the end of what guests leave", SETTLE, || {
        more = Traces::of(pid)?.more_than(before);
        Ok(more.is_empty().then_some(()))
    });
    let path = logs.join("mappings.txt");
    std::fs::write(&path, proc(pid, "maps")?).context(path.display())?;
    let path = logs.join("held.txt");
    std::fs::write(&path, held(pid)?).context(path.display())?;
    settled.map_err(|error| format!("{error}: {}", more.join(", ")))
}

/// A line for each fd, with its number, and for each thread, with where it sleeps.
fn held(pid: u32) -> Outcome<String> {
    let list = |name: &str, line: &dyn Fn(&str) -> String| -> Outcome<String> {
        let path = format!("/proc/{pid}/{name}");
        let entries = std::fs::read_dir(&path).context(&path)?.flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        Ok(names.map(|name| line(&name)).collect())
    };
    let fd = |number: &str| {
        let path = format!("/proc/{pid}/fd/{number}");
        let what = std::fs::read_link(path).unwrap_or_default();
        format!("fd {number} {}\n", what.display())
    };
    let thread = |id: &str| {
        let name = proc(pid, &format!("task/{id}/comm")).unwrap_or_default();
        format!("thread {id} {} {}\n", name.trim(), thread_state(pid, id))
    };
    Ok(list("fd", &fd)? + &list("task", &thread)?)
}

/// Fails if a process that nobody uses uses the CPU: more than 5 ticks (50 ms) in 3 seconds.
pub(super) fn rests(pid: u32) -> Outcome {
    let before = ticks(pid)?;
    std::thread::sleep(Duration::from_secs(3));
    let used = ticks(pid)?.saturating_sub(before);
    println!("soak: {used} ticks of CPU time in 3 idle seconds");
    check(used <= 5, || format!("{used} ticks of CPU time in 3 idle seconds"))
}

/// A thread of the kernel called `name`: whom of `names`, which have ids, it works for, and its
/// state.
fn kernel_thread(name: &str, names: &BTreeMap<String, String>, state: &str) -> String {
    let owner = name.rsplit_once('-').and_then(|(_, id)| names.get(id));
    format!("{name} of {}, {state}", owner.map_or("a thread that is gone", String::as_str))
}

/// The state of a thread, where it sleeps, and how often it went to sleep.
fn thread_state(pid: u32, id: &str) -> String {
    let read = |name: &str| proc(pid, &format!("task/{id}/{name}")).unwrap_or_default();
    let status = read("status");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map_or("?", str::trim).to_owned()
    };
    let (state, sleeps) = (field("State:"), field("voluntary_ctxt_switches:"));
    format!("{state} in {}, {sleeps} sleeps", read("wchan").trim())
}

/// The kind of an fd, without its number.
fn kind(name: &str) -> String {
    match name.split_once(":[") {
        Some((kind @ ("socket" | "pipe"), _)) => kind.to_owned(),
        _ => name.to_owned(),
    }
}

fn proc(pid: u32, name: &str) -> Outcome<String> {
    let path = format!("/proc/{pid}/{name}");
    std::fs::read_to_string(&path).context(path)
}

fn resident_kib(pid: u32) -> Outcome<u64> {
    let status = proc(pid, "status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.ok_or("/proc/PID/status has no VmRSS".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traces() -> Traces {
        let fds = [("socket", 9), ("anon_inode:[eventfd]", 4)];
        Traces {
            fds: fds.map(|(kind, count)| (kind.to_owned(), count)).into(),
            workers: 1,
            threads: 1,
            kernel_threads: threads(1),
            named: [("[heap]".to_owned(), 1), (RING.to_owned(), 2)].into(),
            nameless: 100,
            resident_kib: 5000,
        }
    }

    fn threads(count: usize) -> Vec<String> {
        vec!["k".into(); count]
    }

    #[test]
    fn a_thread_of_the_kernel_is_told_with_the_thread_that_it_works_for() {
        let names = [("7", "worker-0"), ("9", "iou-wrk-7")];
        let names = names.map(|(id, name)| (id.to_owned(), name.to_owned())).into();
        let thread = |name| kernel_thread(name, &names, "S in f");
        assert_eq!(thread("iou-wrk-7"), "iou-wrk-7 of worker-0, S in f");
        assert_eq!(thread("iou-wrk-8"), "iou-wrk-8 of a thread that is gone, S in f");
        let own = thread_state(std::process::id(), &std::process::id().to_string());
        assert!(own.contains(") in ") && own.ends_with(" sleeps"), "{own}");
    }

    #[test]
    fn what_guests_leave_is_named_and_what_a_new_worker_needs_is_not() {
        let mut after = traces();
        after.workers = 2;
        after.fds.insert("anon_inode:[eventfd]".into(), 5);
        after.fds.insert(RING.into(), 1);
        after.named.insert(RING.into(), 4);
        after.kernel_threads = threads(4);
        after.nameless = 164;
        assert!(after.more_than(&traces()).is_empty());
        after.fds.insert("anon_inode:[eventfd]".into(), 6);
        after.fds.insert("/memfd:guest (deleted)".into(), 1);
        after.fds.insert("socket".into(), 11);
        after.kernel_threads = threads(5);
        after.named.insert("/memfd:guest (deleted)".into(), 3);
        after.nameless = 165;
        let more = [
            "1 of /memfd:guest (deleted)",
            "2 of anon_inode:[eventfd]",
            "2 of socket",
            "1 of threads of the kernel (k; k; k; k; k)",
            "3 of mappings of /memfd:guest (deleted)",
            "65 of mappings without a name",
        ];
        assert_eq!(after.more_than(&traces()), more);
    }

    #[test]
    fn sockets_and_pipes_are_counted_without_their_numbers() {
        let names = ["socket:[12]", "pipe:[7]", "anon_inode:[eventfd]", "/a/b"];
        assert_eq!(names.map(kind), ["socket", "pipe", "anon_inode:[eventfd]", "/a/b"]);
    }

    #[test]
    fn a_process_of_our_own_has_traces() {
        let traces = Traces::of(std::process::id()).unwrap();
        assert!(traces.threads > 0 && traces.nameless > 0 && traces.resident_kib > 0);
        assert!(traces.named.contains_key("[heap]"));
    }
}
