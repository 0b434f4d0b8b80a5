//! The steps of a takeover, as the trace of the next daemon's control thread shows them, and a
//! daemon that stops behind a call of a step.
//!
//! The places of the deaths are not written down: a whole takeover is traced first, its messages
//! divide its calls into steps, and a place is a call of that trace. A daemon that is to die is
//! stopped there, and its own trace says which step it has come to. So a takeover that makes other
//! calls than the one before is told apart from one whose death had the wrong end.

use super::ground::LIMIT;
use crate::command::{find, wait_for};
use crate::daemon::{Daemon, DaemonOptions};
use crate::soak::random::Random;
use crate::{Context, Outcome, check, cleanup};
use rustix::process::{Signal, kill_process};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Calls that wait for other threads or wake them: each takeover makes another number of them.
const UNSTEADY: [&str; 3] = ["epoll_wait", "futex", "write"];
/// Between two looks at a daemon that is to stop: its guests wait meanwhile.
const LOOK: Duration = Duration::from_millis(1);
/// Calls of the last step, of which no death lies behind another than the first.
const COMMITS: usize = 8;
/// What a trace shows of a daemon that was stopped, as long as it is.
const STOPPED: &str = "--- stopped by SIGSTOP ---\n";

/// A step of a takeover, from the view of the next daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    /// It starts and has not asked for the takeover.
    Starts,
    /// It has asked, and no message has arrived: device processes quiesce.
    Asked,
    /// Some messages have arrived, with copies of descriptors; not the last one.
    Copies,
    /// All messages have arrived: it opens what its plan names.
    Opens,
    /// It has sent `taken`, after which the running daemon ends.
    Commits,
}

impl Step {
    /// The step that begins behind a call of the control thread.
    fn begun_by(call: &str, now: Self) -> Option<Self> {
        let is_sent = |message| call.starts_with("sendmsg(") && call.contains(message);
        let has_come = |message| call.starts_with("recvmsg(") && call.contains(message);
        match now {
            Self::Starts => call.contains("POST /v1/takeover ").then_some(Self::Asked),
            Self::Asked | Self::Copies if has_come(r#"{\"end\":{}}"#) => Some(Self::Opens),
            Self::Asked => has_come(r#"{\""#).then_some(Self::Copies),
            Self::Copies => None,
            Self::Opens => is_sent(r#"{\"taken\":{}}"#).then_some(Self::Commits),
            Self::Commits => None,
        }
    }
}

/// Behind which call a daemon is stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The name of the call.
    call: String,
    /// How many calls of this name the control thread has made then.
    count: usize,
}

/// The calls of the control thread of a daemon that takes over, and the step that each belongs to:
/// a call that begins a step is the first of that step.
#[derive(Debug)]
pub(super) struct Trace {
    calls: Vec<(String, Step)>,
    is_stopped: bool,
}

impl Trace {
    fn read(path: &Path) -> Outcome<Self> {
        let bytes = std::fs::read(path).context(path.display())?;
        Ok(Self::parse(&String::from_utf8_lossy(&bytes)))
    }

    fn parse(text: &str) -> Self {
        let (mut calls, mut step) = (Vec::new(), Step::Starts);
        // A line without an end is a call that has not ended.
        for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
            let Some((name, _)) = line.split_once('(') else { continue };
            if name.starts_with(|first: char| first.is_ascii_alphabetic()) {
                step = Step::begun_by(line, step).unwrap_or(step);
                calls.push((name.to_owned(), step));
            }
        }
        Self { calls, is_stopped: text.ends_with(STOPPED) }
    }

    /// The step that the daemon has come to.
    pub(super) fn step(&self) -> Step {
        self.calls.last().map_or(Step::Starts, |(_, step)| *step)
    }

    /// How many calls the daemon has made, and the last of them.
    pub(super) fn says(&self) -> String {
        let (name, _) = self.calls.last().cloned().unwrap_or_else(|| ("none".into(), Step::Starts));
        format!("{} calls, the last one {name}", self.calls.len())
    }

    /// A place in a step; behind the call that begins it, if that is what is asked for.
    ///
    /// # Errors
    /// The takeover has made no call in this step.
    pub(super) fn place(&self, step: Step, random: Option<&mut Random>) -> Outcome<Place> {
        let is_meant = |&index: &usize| {
            let (name, of) = &self.calls[index];
            *of == step && !UNSTEADY.contains(&name.as_str())
        };
        let all: Vec<usize> = (0..self.calls.len()).filter(is_meant).collect();
        let first = || format!("a whole takeover has no call at {step:?}: {}", self.says());
        let count = u64::try_from(all.len()).context("calls")?;
        check(count > 0, first)?;
        let at = random.map_or(0, |random| random.below(count));
        let index = all[usize::try_from(at).context("calls")?];
        let (call, _) = &self.calls[index];
        let count = self.calls[..=index].iter().filter(|(name, _)| name == call).count();
        Ok(Place { call: call.clone(), count })
    }
}

/// How far a daemon came that was to stop at a place.
#[derive(Debug)]
pub(super) enum Came {
    /// It is stopped.
    Stopped(Trace),
    /// It has taken over, and did not come to the place. This is the trace of all that.
    TookOver(Trace),
}

/// A daemon that takes over, whose control thread is traced.
#[derive(Debug)]
pub(super) struct Traced {
    pub(super) daemon: Daemon,
    trace: PathBuf,
}

impl Traced {
    /// Starts one that stops at a place, if there is one.
    pub(super) fn start(next: &DaemonOptions, trace: &Path, at: Option<&Place>) -> Outcome<Self> {
        let mut options = next.clone();
        let strace = find("strace").ok_or("strace is not installed")?;
        let path = trace.display().to_string();
        // `-D`: the daemon is our child and strace is not. `-I2`: a signal ends strace.
        options.wrapper.push(strace.display().to_string());
        options.wrapper.extend(["-D", "-I2", "-qq", "-s", "100", "-o", &path].map(str::to_owned));
        if let Some(Place { call, count }) = at {
            let inject = format!("inject={call}:signal=STOP:when={count}");
            options.wrapper.extend(["-e".to_owned(), inject]);
        }
        options.wrapper.push("--".to_owned());
        // The trace of an earlier daemon says nothing of this one.
        std::fs::write(trace, "").context(trace.display())?;
        let daemon = Daemon::begin(&options)?;
        Ok(Self { daemon, trace: trace.to_owned() })
    }

    /// Waits until it is stopped or has taken over from `running`.
    ///
    /// # Errors
    /// It ended by itself.
    pub(super) fn comes(&mut self, running: &mut Daemon) -> Outcome<Came> {
        let end = Instant::now() + LIMIT;
        loop {
            // The end of the running daemon is looked for first: the trace is the newer then.
            let has_taken_over = running.ended()?;
            if has_taken_over.is_some() {
                self.takes_over()?;
            }
            let trace = Trace::read(&self.trace)?;
            if trace.is_stopped {
                return Ok(Came::Stopped(trace));
            }
            if let Some(status) = has_taken_over {
                check(status.success(), || format!("manyring ended with {status}"))?;
                return Ok(Came::TookOver(trace));
            }
            let ended = self.daemon.ended()?;
            let log = self.daemon.log();
            check(ended.is_none(), || format!("the next manyring ended: {ended:?}\n{log:?}"))?;
            check(Instant::now() < end, || "the next manyring does not come on".into())?;
            std::thread::sleep(LOOK);
        }
    }

    /// Waits until the trace shows whether it is stopped behind `taken`, which has ended the
    /// running daemon.
    fn takes_over(&self) -> Outcome {
        wait_for("the trace of a takeover", LIMIT, || {
            let trace = Trace::read(&self.trace)?;
            let last = trace.calls.iter().filter(|(_, step)| *step == Step::Commits);
            Ok((trace.is_stopped || last.count() >= COMMITS).then_some(()))
        })
    }

    /// SIGKILL where it is stopped.
    ///
    /// # Errors
    /// It ended otherwise.
    pub(super) fn dies(self) -> Outcome {
        self.daemon.crash().map(drop)
    }

    /// Ends the trace, and lets it go on if it is stopped.
    ///
    /// # Errors
    /// It or strace does not end what they do.
    pub(super) fn goes_on(self) -> Outcome<Daemon> {
        let pid = self.daemon.pid();
        wait_for("the end of a trace", LIMIT, || {
            let tracer = tracer(pid)?.and_then(cleanup::pid);
            Ok(match tracer {
                // It may have ended by itself.
                Some(tracer) => kill_process(tracer, Signal::TERM).err().map(drop),
                None => Some(()),
            })
        })?;
        let process = cleanup::pid(pid).ok_or("manyring has no pid")?;
        kill_process(process, Signal::CONT).context("manyring")?;
        Ok(self.daemon)
    }
}

/// The process that traces another one.
fn tracer(pid: u32) -> Outcome<Option<u32>> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).context(path)?;
    let number = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    let tracer = number.and_then(|number| number.trim().parse().ok());
    Ok(tracer.filter(|tracer| *tracer != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What strace shows of a takeover, with fewer calls.
    const WHOLE: &str = r#"
execve("/usr/bin/manyring", ["manyring"], 0x7ffd6 /* 35 vars */) = 0
recvfrom(13, "HTTP/1.1 200 OK\r\n"..., 8192, 0, NULL, NULL) = 124
writev(14, [{iov_base="POST /v1/takeover HTTP/1.1\r\n", iov_len=98}], 2) = 132
epoll_wait(3, [], 1024, 0) = 0
accept4(13, NULL, NULL, SOCK_CLOEXEC|SOCK_NONBLOCK) = 15
recvmsg(15, {msg_namelen=128}, MSG_DONTWAIT) = -1 EAGAIN (Resource temporarily unavailable)
recvmsg(15, {msg_iov=[{iov_base="\2{\"socket\":{\"name\":\"c\"}}", iov_len=16384}]}, 0) = 32
--- SIGCHLD {si_signo=SIGCHLD} ---
recvmsg(15, {msg_namelen=128}, MSG_DONTWAIT) = -1 EAGAIN (Resource temporarily unavailable)
recvmsg(15, {msg_iov=[{iov_base="\2{\"end\":{}}", iov_len=16384}]}, 0) = 11
futex(0x561f20408060, FUTEX_WAKE_PRIVATE, 1) = 1
statx(AT_FDCWD, "/run/c.sock", 0, STATX_ALL, {}) = 0
sendmsg(15, {msg_iov=[{iov_base="\2{\"taken\":{}}", iov_len=13}]}, MSG_DONTWAIT) = 13
recvmsg(15, {msg_iov=[{iov_base="", iov_len=16384}]}, 0) = 0
"#;

    #[test]
    fn messages_divide_the_calls_of_a_takeover_into_steps() {
        let trace = Trace::parse(WHOLE);
        let of = |step| {
            let calls = trace.calls.iter().filter(|(_, of)| *of == step);
            calls.map(|(name, _)| name.as_str()).collect::<Vec<_>>()
        };
        assert_eq!(of(Step::Starts), ["execve", "recvfrom"]);
        assert_eq!(of(Step::Asked), ["writev", "epoll_wait", "accept4", "recvmsg"]);
        assert_eq!(of(Step::Copies), ["recvmsg", "recvmsg"]);
        assert_eq!(of(Step::Opens), ["recvmsg", "futex", "statx"]);
        assert_eq!(of(Step::Commits), ["sendmsg", "recvmsg"]);
        assert!(trace.step() == Step::Commits && !trace.is_stopped);
    }

    #[test]
    fn a_place_is_a_call_of_its_step_by_its_number_in_the_whole_takeover() {
        let trace = Trace::parse(WHOLE);
        let place = |call: &str, count| Place { call: call.to_owned(), count };
        let first = |step| trace.place(step, None).unwrap();
        assert_eq!(first(Step::Copies), place("recvmsg", 2));
        assert_eq!(first(Step::Opens), place("recvmsg", 4));
        assert_eq!(first(Step::Commits), place("sendmsg", 1));
        let mut random = Random::new(1);
        let mut any = || trace.place(Step::Opens, Some(&mut random)).unwrap();
        let all: std::collections::BTreeSet<_> = (0..100).map(|_| any().call).collect();
        assert_eq!(Vec::from_iter(all), ["recvmsg", "statx"]);
    }

    #[test]
    fn a_step_without_a_call_is_told_of() {
        let taken = WHOLE.find("sendmsg").unwrap();
        let error = Trace::parse(&WHOLE[..taken]).place(Step::Commits, None).unwrap_err();
        assert!(error.starts_with("a whole takeover has no call at Commits: 11 calls"), "{error}");
    }

    #[test]
    fn a_daemon_is_stopped_where_its_trace_ends_so_and_not_where_it_goes_on() {
        let is_stopped = |more: &str| Trace::parse(&format!("{WHOLE}{more}")).is_stopped;
        assert!(is_stopped("--- stopped by SIGSTOP ---\n"));
        assert!(!is_stopped("--- stopped by SIGSTOP ---\nread(13, "));
        assert!(!is_stopped("--- stopped by SIGSTOP ---\n--- SIGCONT {} ---\n"));
        assert!(!is_stopped("--- stopped by SIG"));
    }
}
