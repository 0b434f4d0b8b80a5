//! The processes of a run: which of the host's they are, what each of their threads waits for, and
//! their end.

use crate::command::find;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs::{read, read_dir, read_link, read_to_string};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// A variable of the environment that names the run which a process belongs to. What the process
/// starts inherits it, also what has lost its parent.
pub const RUN: &str = "MANYRING_TEST_RUN";

/// Processes, threads and descriptors that a description shows at most.
const PROCESSES_MAX: usize = 30;
const THREADS_MAX: usize = 64;
const FDS_MAX: usize = 64;
/// Processes of which gdb is asked: the first ones.
const BACKTRACES_MAX: usize = 6;
/// Bytes of a backtrace that are shown.
const BACKTRACE_MAX: usize = 60_000;
/// Seconds that gdb has for one process.
const GDB_SECONDS: &str = "60";

/// How often those that are to end are looked for.
const KILLS: usize = 20;
const BETWEEN_KILLS: Duration = Duration::from_millis(50);

/// Children of a thread of ours, and all below them.
#[must_use]
pub fn below_thread(thread: u32) -> Vec<u32> {
    let children = read_to_string(format!("/proc/self/task/{thread}/children"));
    let children = children.unwrap_or_default();
    below(children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect())
}

/// Names our own run in the environment of a child, if we are of no other run.
pub(crate) fn mark(command: &mut Command) {
    if std::env::var_os(RUN).is_none() {
        command.env(RUN, format!("{}.own", std::process::id()));
    }
}

/// The value of [`RUN`] for a run of ours.
#[must_use]
pub fn run_name(number: u32) -> String {
    format!("{}.{number}", std::process::id())
}

/// Processes whose environment names the run, those of `roots`, and all below them.
#[must_use]
pub fn of_run(run: &str, roots: &[u32]) -> Vec<u32> {
    let mut found = with_variable(&format!("{RUN}={run}"));
    found.extend(roots);
    below(found)
}

/// Processes of all runs of ours, and all others below us.
#[must_use]
pub fn ours() -> Vec<u32> {
    let us = std::process::id();
    let start = format!("{RUN}={us}.").into_bytes();
    let is_ours = |pid: &u32| has_variable(*pid, |variable| variable.starts_with(&start));
    let roots = all().into_iter().filter(is_ours).chain([us]);
    below(roots.collect()).into_iter().filter(|pid| *pid != us).collect()
}

/// Processes whose environment has this variable with this value: `NAME=VALUE`.
pub(crate) fn with_variable(entry: &str) -> Vec<u32> {
    let has = |pid: &u32| has_variable(*pid, |variable| variable == entry.as_bytes());
    all().into_iter().filter(has).collect()
}

fn has_variable(pid: u32, is_it: impl Fn(&[u8]) -> bool) -> bool {
    let environment = read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(is_it)
}

/// Processes other than ours that have the pipe of this inode open.
#[must_use]
pub fn holders(inode: u64) -> Vec<u32> {
    let pipe = format!("pipe:[{inode}]");
    let holds = |pid: &u32| fds(*pid).iter().any(|(_, target)| *target == pipe);
    all().into_iter().filter(|pid| *pid != std::process::id()).filter(holds).collect()
}

/// Ends the processes that `found` finds, until it finds none that runs.
pub fn kill(mut found: impl FnMut() -> Vec<u32>) {
    let us = std::process::id();
    let is_living = |pid: &u32| *pid != us && state(*pid) != 'Z';
    for _ in 0..KILLS {
        // A process that is killed leaves its children without a parent, also those that it has
        // started since it was found. So all are stopped first, until no other is found.
        let mut stopped = BTreeSet::new();
        for _ in 0..KILLS {
            let living: Vec<u32> = found().into_iter().filter(is_living).collect();
            let more: Vec<u32> = living.into_iter().filter(|pid| stopped.insert(*pid)).collect();
            if more.is_empty() {
                break;
            }
            more.iter().for_each(|pid| signal(*pid, Signal::STOP));
        }
        if stopped.is_empty() {
            return;
        }
        stopped.iter().for_each(|pid| signal(*pid, Signal::KILL));
        std::thread::sleep(BETWEEN_KILLS);
    }
}

/// Sends a signal to a process, which may have ended by itself.
fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// The names of a process's threads, of which the kernel keeps 15 bytes.
#[must_use]
pub fn thread_names(pid: u32) -> Vec<String> {
    threads(pid)
        .into_iter()
        .map(|thread| line(&format!("/proc/{pid}/task/{thread}/comm")))
        .collect()
}

/// What processes wait for: of each its command, its threads with their system calls and stacks in
/// the kernel, its descriptors, and what gdb says of the first ones, where it is installed.
#[must_use]
pub fn describe(pids: &[u32]) -> String {
    describe_with(pids, BACKTRACES_MAX)
}

/// As [`describe`], without gdb, which may take a minute for a process.
#[must_use]
pub fn describe_quickly(pids: &[u32]) -> String {
    describe_with(pids, 0)
}

fn describe_with(pids: &[u32], backtraces: usize) -> String {
    let mut text = String::new();
    for (index, pid) in pids.iter().take(PROCESSES_MAX).enumerate() {
        process(*pid, &mut text);
        if index < backtraces {
            text.push_str(&backtrace(*pid));
        }
    }
    if pids.len() > PROCESSES_MAX {
        let _ = writeln!(text, "and {} more processes", pids.len() - PROCESSES_MAX);
    }
    text
}

/// What the threads of our own process wait for.
#[must_use]
pub fn describe_own_threads() -> String {
    let mut text = String::new();
    own_threads(std::process::id(), &mut text);
    text
}

fn process(pid: u32, text: &mut String) {
    let command = read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<_> = command.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
    let (parent, state) = (parent(pid).unwrap_or(0), state(pid));
    let words = words.join(" ").trim_end().escape_debug().to_string();
    let _ = writeln!(text, "process {pid}, child of {parent}, {state}: {words}");
    own_threads(pid, text);
    let fds = fds(pid);
    let shown = fds.iter().take(FDS_MAX).map(|(fd, target)| format!("{fd} {target}"));
    let _ =
        writeln!(text, "  descriptors ({}): {}", fds.len(), shown.collect::<Vec<_>>().join(", "));
}

fn own_threads(pid: u32, text: &mut String) {
    let threads = threads(pid);
    for thread in threads.iter().take(THREADS_MAX) {
        let of = |file: &str| format!("/proc/{pid}/task/{thread}/{file}");
        let stack = read_to_string(of("stack")).unwrap_or_default();
        // `[<0>] futex_wait+0x68/0x110`
        let frames = stack.lines().filter_map(|line| line.split_once("] ")?.1.split('+').next());
        let (name, at, call) = (line(&of("comm")), line(&of("wchan")), line(&of("syscall")));
        let frames = frames.collect::<Vec<_>>().join(" < ");
        let _ = writeln!(text, "  thread {thread} {name}: at {at}; call {call}; stack {frames}");
    }
    if threads.len() > THREADS_MAX {
        let _ = writeln!(text, "  and {} more threads", threads.len() - THREADS_MAX);
    }
}

/// The stacks of a process's threads, by gdb.
fn backtrace(pid: u32) -> String {
    let Some(gdb) = find("gdb") else { return "  (no backtrace: gdb is not installed)\n".into() };
    let mut command = Command::new("timeout");
    command.args(["--signal", "KILL", GDB_SECONDS]).arg(gdb);
    command.args(["-nx", "-batch", "-p", &pid.to_string()]);
    command.args(["-ex", "set pagination off", "-ex", "thread apply all backtrace 30"]);
    let Ok(said) = command.stdin(Stdio::null()).output() else { return String::new() };
    let said = String::from_utf8_lossy(&said.stdout);
    let is_frame = |line: &&str| line.starts_with('#') || line.starts_with("Thread ");
    let mut text = String::new();
    for line in said.lines().filter(is_frame) {
        let _ = writeln!(text, "    {line}");
        if text.len() > BACKTRACE_MAX {
            break;
        }
    }
    text
}

/// `roots` and all below them, each once.
fn below(roots: Vec<u32>) -> Vec<u32> {
    let parents: Vec<(u32, u32)> =
        all().into_iter().filter_map(|pid| Some((pid, parent(pid)?))).collect();
    let (mut found, mut seen): (Vec<u32>, BTreeSet<u32>) = (Vec::new(), BTreeSet::new());
    let mut next = roots;
    while let Some(pid) = next.pop() {
        if seen.insert(pid) {
            found.push(pid);
            next.extend(parents.iter().filter(|(_, parent)| *parent == pid).map(|(pid, _)| *pid));
        }
    }
    found.sort_unstable();
    found
}

/// All processes of the host.
fn all() -> Vec<u32> {
    numbers(Path::new("/proc"))
}

fn threads(pid: u32) -> Vec<u32> {
    numbers(Path::new(&format!("/proc/{pid}/task")))
}

fn numbers(folder: &Path) -> Vec<u32> {
    let entries = read_dir(folder).into_iter().flatten().flatten();
    let mut numbers: Vec<u32> =
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
}

fn fds(pid: u32) -> Vec<(u32, String)> {
    let folder = format!("/proc/{pid}/fd");
    let of = |fd: u32| Some((fd, read_link(format!("{folder}/{fd}")).ok()?.display().to_string()));
    numbers(Path::new(&folder)).into_iter().filter_map(of).collect()
}

fn parent(pid: u32) -> Option<u32> {
    stat_fields(pid)?.get(1)?.parse().ok()
}

/// The letter of a process's state; one that is gone is a zombie, too.
fn state(pid: u32) -> char {
    let first = |fields: Vec<String>| fields.first()?.chars().next();
    stat_fields(pid).and_then(first).unwrap_or('Z')
}

/// The fields of `/proc/PID/stat` behind the name, which may hold anything.
fn stat_fields(pid: u32) -> Option<Vec<String>> {
    let stat = read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(stat.rsplit_once(") ")?.1.split(' ').map(str::to_owned).collect())
}

/// A file of one line; `-` where it cannot be read.
fn line(path: &str) -> String {
    read_to_string(path).map_or_else(|_| "-".to_owned(), |text| text.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_process_that_lost_its_parent_is_of_its_run_and_ends_with_it() {
        let run = format!("test-{}", std::process::id());
        // The shell starts a sleep and ends; nobody below us is the parent of the sleep.
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 1000 & echo"]).env(RUN, &run).stderr(Stdio::null());
        shell.stdout(Stdio::null()).status().unwrap();
        let found = of_run(&run, &[]);
        let [sleep] = found[..] else { panic!("{found:?}") };
        let said = describe(&found);
        assert!(said.contains(": sleep 1000\n") && said.contains("  thread "), "{said}");
        assert!(said.contains("nanosleep"), "{said}");
        kill(|| of_run(&run, &[]));
        assert_eq!(state(sleep), 'Z');
    }

    #[test]
    fn a_process_that_starts_another_after_it_was_found_leaves_none_behind() {
        let entry = format!("MANYRING_TEST_STARTS={}", std::process::id());
        let (name, value) = entry.split_once('=').unwrap();
        // At each line the shell starts a process, and says that it has.
        let mut shell = Command::new("sh");
        shell.args(["-c", "while read line; do sleep 1000 & echo; done"]).env(name, value);
        let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut tell, mut said) = (shell.stdin.take().unwrap(), shell.stdout.take().unwrap());
        let (root, mut is_told) = (shell.id(), false);
        kill(|| {
            let found = below(vec![root]);
            if !is_told {
                tell.write_all(b"\n").unwrap();
                said.read_exact(&mut [0]).unwrap();
                is_told = true;
            }
            found
        });
        let left = with_variable(&entry);
        kill(|| with_variable(&entry));
        shell.wait().unwrap();
        assert!(left.is_empty(), "{left:?} are left behind");
    }

    #[test]
    fn a_process_is_below_the_thread_that_started_it_and_below_no_other() {
        let start = || {
            let child = Command::new("sleep").arg("1000").spawn().unwrap();
            (child, below_thread(rustix::thread::gettid().as_raw_pid().unsigned_abs()))
        };
        let (mut child, found) = std::thread::scope(|scope| {
            let thread = scope.spawn(start);
            let none = below_thread(rustix::thread::gettid().as_raw_pid().unsigned_abs());
            assert!(none.is_empty(), "{none:?}");
            thread.join().unwrap()
        });
        assert_eq!(found, [child.id()]);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn who_holds_a_pipe_is_found() {
        let (reader, writer) = std::io::pipe().unwrap();
        let mut child = Command::new("sleep").arg("1000").stdout(writer).spawn().unwrap();
        let file = std::fs::File::from(std::os::fd::OwnedFd::from(reader));
        let inode = file.metadata().unwrap().ino();
        // A child of another test has it too, for the moment between its fork and its exec.
        while holders(inode) != [child.id()] {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        while !holders(inode).is_empty() {
            std::thread::yield_now();
        }
    }
}
