//! A program whose output is read: run to its end, or to its time limit, and never waited for
//! without an end.

use manyring_system::processes::{RUN, describe, holders, kill, of_run, run_name, thread_names};
use manyring_system::{Context, Outcome};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::fstat;
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions, pidfd_open, waitid};
use std::io::{PipeReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long the output of a program may stay open after its end.
const LEFT_OPEN: Duration = Duration::from_secs(10);
/// Bytes that are read at once.
const CHUNK: usize = 1 << 16;

/// How a program ended.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) status: ExitStatus,
    /// CPU time of it and of what it waited for.
    pub(crate) spent: Duration,
    /// Why it was ended, or what it left behind.
    pub(crate) fault: Option<Fault>,
}

/// What a program did wrong beside what it says itself.
#[derive(Debug)]
pub(crate) struct Fault {
    /// One line.
    pub(crate) sentence: String,
    /// The processes that were ended for it, and what each of their threads waited for.
    pub(crate) processes: String,
    /// The names of the threads that the program had.
    pub(crate) threads: Vec<String>,
}

/// Runs a command; `hear` gets its output and its errors in their order. After `limit` it is ended,
/// with all that it started.
pub(crate) fn to_end(
    command: &mut Command,
    limit: Duration,
    hear: impl FnMut(&[u8]),
) -> Outcome<Watched> {
    to_end_or(command, limit, LEFT_OPEN, hear)
}

fn to_end_or(
    command: &mut Command,
    limit: Duration,
    left_open: Duration,
    mut hear: impl FnMut(&[u8]),
) -> Outcome<Watched> {
    static RUNS: AtomicU32 = AtomicU32::new(0);
    let run = run_name(RUNS.fetch_add(1, Ordering::Relaxed));
    let (mut child, mut said) = spawn(command.env(RUN, &run))?;
    let fault = read(&child, &mut said, limit, left_open, &mut hear).map(|fault| {
        fault.map(|why| {
            let fault = end(&run, &child, &said, why);
            // What it had said and nobody had read.
            let _ = read(&child, &mut said, left_open, Duration::ZERO, &mut hear);
            fault
        })
    });
    let spent = spent(&child);
    let status = child.wait().context("the program's end")?;
    Ok(Watched { status, spent, fault: fault? })
}

/// Why a program's output is not read to its end.
enum Why {
    /// The program has not ended.
    Late(Duration),
    /// It has ended, and a process that it started has its output.
    LeftOpen,
}

/// Reads the output until nobody has it open; `None`: so it was in time.
fn read(
    child: &Child,
    said: &mut PipeReader,
    limit: Duration,
    left_open: Duration,
    hear: &mut impl FnMut(&[u8]),
) -> Outcome<Option<Why>> {
    let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).context("a pidfd")?;
    let late = Instant::now() + limit;
    let (mut open_until, mut bytes) = (None::<Instant>, vec![0; CHUNK]);
    loop {
        let until = open_until.unwrap_or(late);
        let wait = until.saturating_duration_since(Instant::now());
        let wait = Timespec::try_from(wait).context("a wait")?;
        let mut waits = vec![PollFd::new(&*said, PollFlags::IN)];
        // The end of the process is seen once; from then on its output is waited for alone.
        if open_until.is_none() {
            waits.push(PollFd::new(&pidfd, PollFlags::IN));
        }
        match poll(&mut waits, Some(&wait)) {
            Ok(0) if open_until.is_some() => return Ok(Some(Why::LeftOpen)),
            Ok(0) => return Ok(Some(Why::Late(limit))),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => return Err(format!("the output of a program: {errno}")),
        }
        let is_output = waits.first().is_some_and(|wait| !wait.revents().is_empty());
        let has_ended = waits.get(1).is_some_and(|wait| !wait.revents().is_empty());
        if has_ended {
            open_until = Some(Instant::now() + left_open);
        }
        if is_output {
            let count = said.read(&mut bytes).context("the output of a program")?;
            match bytes.get(..count) {
                Some([]) | None => return Ok(None),
                Some(chunk) => hear(chunk),
            }
        }
    }
}

/// Says what the program and its processes do, and ends them.
fn end(run: &str, child: &Child, said: &PipeReader, why: Why) -> Fault {
    let inode = fstat(said).map_or(0, |stat| stat.st_ino);
    let of_run = || {
        let mut roots = holders(inode);
        roots.push(child.id());
        of_run(run, &roots)
    };
    let sentence = match why {
        Why::Late(limit) => format!("it did not end within {} s and was ended", limit.as_secs()),
        Why::LeftOpen => {
            let holders: Vec<_> = holders(inode).iter().map(u32::to_string).collect();
            let holders = holders.join(", ");
            format!("it ended, and left its output open in process {holders}, which was ended")
        }
    };
    let (found, threads) = (of_run(), thread_names(child.id()));
    let processes = describe(&found);
    kill(of_run);
    Fault { sentence, processes, threads }
}

/// Starts a command. Its output and errors, and those of its children, come through one pipe, so
/// that they stay in order.
fn spawn(command: &mut Command) -> Outcome<(Child, PipeReader)> {
    let (reader, writer) = std::io::pipe().context("a pipe")?;
    let errors = writer.try_clone().context("a pipe")?;
    let spawned = command.stdin(Stdio::null()).stdout(writer).stderr(errors).spawn();
    // The command holds the pipe's other end until it is told to hold something else.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    Ok((spawned.context(command.get_program().to_string_lossy())?, reader))
}

/// Waits until a child ends, and says how much CPU time it and those that it waited for have used.
/// It is an account for people, so a child of which the kernel says nothing has used none.
fn spent(child: &Child) -> Duration {
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    if waitid(WaitId::Pid(Pid::from_child(child)), ended).is_err() {
        return Duration::ZERO;
    }
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    Duration::from_secs(ticks(&stat).unwrap_or(0))
        / u32::try_from(ticks_per_second()).unwrap_or(100)
}

fn ticks_per_second() -> u64 {
    rustix::param::clock_ticks_per_second()
}

/// The times of `/proc/PID/stat` (proc(5): utime, stime, cutime, cstime, the fields 14 to 17),
/// together, in the kernel's ticks.
fn ticks(stat: &str) -> Option<u64> {
    // The second field, the name in parentheses, may hold anything.
    let (_, fields) = stat.rsplit_once(") ")?;
    let times: Vec<u64> =
        fields.split(' ').skip(11).take(4).map_while(|ticks| ticks.parse().ok()).collect();
    (times.len() == 4).then(|| times.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(600);
    /// Long enough for a shell to say one word on a busy machine.
    const SHORT: Duration = Duration::from_secs(2);

    fn shell(script: &str, limit: Duration, left_open: Duration) -> (Watched, String) {
        let mut said = Vec::new();
        let mut command = Command::new("sh");
        let hear = |bytes: &[u8]| said.extend_from_slice(bytes);
        let ended = to_end_or(command.args(["-c", script]), limit, left_open, hear).unwrap();
        (ended, String::from_utf8(said).unwrap())
    }

    #[test]
    fn a_program_that_ends_in_time_is_heard_whole_and_has_no_fault() {
        let (ended, said) = shell("echo one; echo two >&2; echo three; exit 3", LONG, LONG);
        assert_eq!((said.as_str(), ended.status.code()), ("one\ntwo\nthree\n", Some(3)));
        assert!(ended.fault.is_none(), "{:?}", ended.fault);
    }

    #[test]
    fn a_program_that_hangs_is_ended_with_its_children_and_all_are_described() {
        // The grandchild has neither a parent of ours nor the pipe.
        let script = "(sleep 1001 >/dev/null 2>&1 &) ; echo begun; sleep 1002; echo never";
        let (ended, said) = shell(script, SHORT, LONG);
        assert_eq!(said, "begun\n");
        let fault = ended.fault.unwrap();
        assert_eq!(fault.sentence, "it did not end within 2 s and was ended");
        for words in ["sleep 1001\n", "sleep 1002\n", "thread", "descriptors"] {
            assert!(fault.processes.contains(words), "{words}: {}", fault.processes);
        }
        assert_eq!(fault.threads, ["sh"]);
        assert!(!ended.status.success());
    }

    #[test]
    fn a_program_that_ended_and_left_its_output_open_is_named_with_who_has_it() {
        let script = "sleep 1003 & echo $!";
        let (ended, said) = shell(script, LONG, SHORT);
        assert!(ended.status.success());
        let fault = ended.fault.unwrap();
        // A program that another test starts at that moment has the pipe, too, until its `exec`.
        let named = fault.sentence.strip_prefix("it ended, and left its output open in process ");
        let named = named.and_then(|rest| rest.strip_suffix(", which was ended"));
        let has_it = named.is_some_and(|named| named.split(", ").any(|pid| pid == said.trim()));
        assert!(has_it, "{}", fault.sentence);
        assert!(fault.processes.contains("sleep 1003\n"), "{}", fault.processes);
    }

    #[test]
    fn the_times_of_a_process_and_of_its_children_are_its_ticks() {
        let stat = "7 (a ) b) S 1 2 3 4 5 6 7 8 9 10 100 20 3 4 20 0 1";
        assert_eq!(ticks(stat), Some(127));
        assert_eq!(ticks("7 (a) S 1 2 3"), None);
        assert!(ticks(&std::fs::read_to_string("/proc/self/stat").unwrap()).is_some());
    }
}
