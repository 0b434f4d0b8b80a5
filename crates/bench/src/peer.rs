//! The programs that are compared: finds, starts and ends them. Each comes from a Debian package,
//! except SPDK, whose path the user gives.

pub(crate) mod spdk;
pub(crate) mod testpmd;

use crate::measure::{Affinity, now, waited_seconds};
use crate::progress;
use clap::ValueEnum;
use rustix::process::{Signal, kill_process, setpriority_process};
use rustix::thread::Pid;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Longest wait for a back-end's socket.
const START: Duration = Duration::from_secs(10);
/// Longest time a back-end is started again: what a process with an io_uring held, a file's lock
/// among it, is let go of by the kernel only some time after the process has ended.
const AGAIN: Duration = Duration::from_secs(2);

/// Why a peer cannot take part.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub(crate) enum PeerError {
    #[error("{program} is not installed: apt-get install {package}, or give --without-peers")]
    Missing { program: &'static str, package: &'static str },
    #[error("no manyring at {}: build it in this profile, or give --manyring PATH", .0.display())]
    NoManyring(PathBuf),
    #[error("spdk has no Debian package: name its program `vhost` by --spdk PATH")]
    SpdkUnnamed,
    #[error("no program at {}: --spdk PATH names SPDK's program `vhost`", .0.display())]
    NoSpdk(PathBuf),
    #[error("{program}: {problem}")]
    Failed { program: String, problem: String },
}

/// Foreign programs that we are compared with. The party of a peer is named after its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    /// QEMU's daemon: a vhost-user-blk back-end.
    QemuStorageDaemon,
    /// The host's own way to a file.
    Fio,
    /// DPDK's test program: a vhost-user-net back-end that polls.
    Testpmd,
    /// SPDK's `vhost`, which the user names: a vhost-user-blk back-end that polls.
    Spdk,
}

impl Peer {
    /// The peer that a party runs; `None` for our own programs and for bare loops.
    pub(crate) fn of_party(name: &str) -> Option<Self> {
        Self::value_variants().iter().find(|peer| name.starts_with(&peer.word())).copied()
    }

    /// The peer's name on the command line.
    pub(crate) fn word(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// The program and its Debian package; `None` for SPDK, which has no package.
    pub(crate) const fn program(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::QemuStorageDaemon => Some(("qemu-storage-daemon", "qemu-system-common")),
            Self::Fio => Some(("fio", "fio")),
            Self::Testpmd => Some(("dpdk-testpmd", "dpdk-dev")),
            Self::Spdk => None,
        }
    }

    /// Finds the peer's program; `spdk` is the path that the user gave for SPDK's.
    pub(crate) fn find(self, spdk: Option<&Path>) -> Result<PathBuf, PeerError> {
        match (self.program(), spdk) {
            (Some(program), _) => find(program),
            (None, Some(path)) if path.is_file() => Ok(path.to_path_buf()),
            (None, Some(path)) => Err(PeerError::NoSpdk(path.to_path_buf())),
            (None, None) => Err(PeerError::SpdkUnnamed),
        }
    }

    /// The path of the program; its bare name if it is missing, since the peer takes no part then.
    pub(crate) fn path(self) -> PathBuf {
        let bare = || self.program().map_or_else(PathBuf::new, |(program, _)| program.into());
        self.find(None).unwrap_or_else(|_| bare())
    }
}

/// Finds a program on the search path.
pub(crate) fn find((program, package): (&'static str, &'static str)) -> Result<PathBuf, PeerError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
        .ok_or(PeerError::Missing { program, package })
}

/// Our own daemon: the one given, or the one beside this program.
pub(crate) fn manyring(given: Option<&Path>) -> Result<PathBuf, PeerError> {
    let path = match given {
        Some(path) => path.to_path_buf(),
        None => std::env::current_exe().unwrap_or_default().with_file_name("manyring"),
    };
    if path.is_file() { Ok(path) } else { Err(PeerError::NoManyring(path)) }
}

/// A program in a session of its own: it has a scheduling group of its own, and it ends with us.
pub(crate) fn apart(program: &Path) -> Command {
    let mut command = Command::new("setsid");
    command.args(["setpriv", "--pdeathsig", "KILL"]).arg(program);
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    command
}

/// A program that is [`apart`], and which its CPUs run before all that are no real-time programs.
/// It fails where we have no right to ask for that.
pub(crate) fn favoured(program: &Path) -> Command {
    let mut command = apart(Path::new("chrt"));
    command.args(["--fifo", "1"]).arg(program);
    command
}

/// Starts a program that is [`apart`] on the CPUs of `affinity`, before all others.
pub(crate) fn spawn(command: &mut Command, affinity: &Affinity) -> std::io::Result<Child> {
    let child = spawn_among_others(command, affinity)?;
    favour(child.id());
    Ok(child)
}

/// Starts a program on the CPUs of `affinity`. Everything that is measured starts here. Fails once
/// the user has asked to stop.
pub(crate) fn spawn_among_others(
    command: &mut Command,
    affinity: &Affinity,
) -> std::io::Result<Child> {
    if progress::is_stopped() {
        return Err(std::io::Error::other("stopped by a signal"));
    }
    let before = Affinity::current();
    affinity.apply();
    let spawned = command.spawn();
    before.apply();
    spawned
}

/// The nice value of what is measured: the kernel's lowest, which has the largest share of a CPU.
const FAVOUR: i32 = -20;
/// Longest time a program has to get its scheduling group.
const GROUP: Duration = Duration::from_secs(10);

/// Favours a program that is [`apart`] over all others: by its nice value, which counts where the
/// kernel has no scheduling groups or has them switched off, and by the weight of its scheduling
/// group. The program has a group of its own only after its `setsid`; a write before that would
/// favour our group.
fn favour(pid: u32) {
    let (task, start) = (pid.to_string(), now());
    // Its threads inherit the nice value, since it has none of them yet. Without the right to
    // change it, or the group, the default weight has to do.
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = setpriority_process(Some(pid), FAVOUR);
    }
    let Some(ours) = scheduling_group("self") else { return };
    while start.elapsed() < GROUP {
        match scheduling_group(&task) {
            Some(own) if own == ours => std::thread::sleep(Duration::from_micros(100)),
            Some(_) => {
                let _ = std::fs::write(format!("/proc/{task}/autogroup"), FAVOUR.to_string());
                return;
            }
            None => return,
        }
    }
}

/// Name of the scheduling group of a process; an empty one for the kernel's own group, in which a
/// process is that has no session of its own above it. None where the kernel has no such groups:
/// then the file is missing. Where it has them switched off, the groups have names and weights
/// that nothing looks at.
fn scheduling_group(task: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{task}/autogroup")).ok()?;
    Some(text.split_whitespace().next().unwrap_or_default().to_owned())
}

/// Starts a program that is [`apart`], waits for its end, and returns its output.
pub(crate) fn output(command: &mut Command, affinity: &Affinity) -> Result<String, String> {
    command.stdout(Stdio::piped());
    let child = spawn(command, affinity).map_err(|error| error.to_string())?;
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// How a back-end is started: [`spawn`] or [`spawn_among_others`].
type Spawn = fn(&mut Command, &Affinity) -> std::io::Result<Child>;

/// A back-end that runs until this is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
}

impl Server {
    /// Starts a back-end on the CPUs of `affinity` and waits for its socket.
    pub(crate) fn start(
        program: &Path,
        arguments: &[OsString],
        socket: &Path,
        affinity: &Affinity,
    ) -> Result<Self, PeerError> {
        Self::start_as(spawn, program, arguments, socket, affinity)
    }

    /// Starts a back-end that has no larger share of its CPUs than any other program, and waits
    /// for its socket: for clients that are not favoured themselves.
    pub(crate) fn start_among_others(
        program: &Path,
        arguments: &[OsString],
        socket: &Path,
        affinity: &Affinity,
    ) -> Result<Self, PeerError> {
        Self::start_as(spawn_among_others, program, arguments, socket, affinity)
    }

    fn start_as(
        spawn: Spawn,
        program: &Path,
        arguments: &[OsString],
        socket: &Path,
        affinity: &Affinity,
    ) -> Result<Self, PeerError> {
        let start = now();
        loop {
            match Self::start_once(spawn, program, arguments, socket, affinity) {
                Err(_) if start.elapsed() < AGAIN && !progress::is_stopped() => {
                    std::thread::sleep(AGAIN / 20)
                }
                result => return result,
            }
        }
    }

    fn start_once(
        spawn: Spawn,
        program: &Path,
        arguments: &[OsString],
        socket: &Path,
        affinity: &Affinity,
    ) -> Result<Self, PeerError> {
        let failed =
            |problem: String| PeerError::Failed { program: program.display().to_string(), problem };
        let _ = std::fs::remove_file(socket);
        let mut command = apart(program);
        command.args(arguments).stdout(Stdio::null());
        let child = spawn(&mut command, affinity).map_err(|error| failed(error.to_string()))?;
        let mut server = Self { child };
        let start = now();
        while !socket.exists() {
            if let Ok(Some(status)) = server.child.try_wait() {
                return Err(failed(format!("{status}: {}", server.last_words())));
            }
            if start.elapsed() > START {
                return Err(failed("has not shown its socket".to_owned()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }

    fn last_words(&mut self) -> String {
        use std::io::Read;
        let mut text = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            let _ = stderr.read_to_string(&mut text);
        }
        text.trim().to_owned()
    }

    /// The process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Stops all threads of the process until [`Self::go_on`].
    pub(crate) fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets the stopped threads run on.
    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    /// Sends a signal. The process is our child and was not waited for, so its id was not reused.
    fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, signal);
        }
    }

    /// Seconds that the process's threads were ready to run while other programs ran.
    pub(crate) fn waited_seconds(&self) -> f64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let names =
            tasks.into_iter().flatten().flatten().filter_map(|t| t.file_name().into_string().ok());
        names.map(|name| waited_seconds(&name)).sum()
    }

    /// CPU seconds, of user and system, that the process has used so far.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        cpu_seconds(&self.child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Seconds that all threads of a program have run so far, to the nanosecond for those that rest.
#[allow(clippy::cast_precision_loss, reason = "nanoseconds of one run")]
pub(crate) fn ran_seconds(pid: u32) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let stats = tasks.map(|task| std::fs::read_to_string(task.path().join("schedstat")));
    let ran_ns = stats.map(|text| first_number(&text.unwrap_or_default()));
    ran_ns.sum::<u64>() as f64 / 1e9
}

/// Puts the threads of a program on CPUs, by the number at the end of a thread's name, 0 where it
/// has none: a daemon's workers are numbered.
pub(crate) fn place(pid: u32, place: impl Fn(usize) -> Affinity) {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    for task in tasks {
        let id = task.file_name().to_str().and_then(|id| Pid::from_raw(id.parse().ok()?));
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if let Some(id) = id {
            place(number_of(&name)).apply_to(id);
        }
    }
}

/// The number behind the last dash of a thread's name; 0 without a number.
fn number_of(name: &str) -> usize {
    name.trim().rsplit_once('-').and_then(|(_, number)| number.parse().ok()).unwrap_or(0)
}

/// The first number of a `schedstat` file: nanoseconds that a thread has run.
fn first_number(schedstat: &str) -> u64 {
    schedstat.split_whitespace().next().and_then(|field| field.parse().ok()).unwrap_or(0)
}

/// CPU seconds that a program has used so far.
pub(crate) fn cpu_seconds(child: &Child) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id()));
    cpu_seconds_of(&stat.unwrap_or_default(), USED, rustix::param::clock_ticks_per_second())
}

/// CPU seconds of all programs that this one has started and that have ended.
pub(crate) fn ended_cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    cpu_seconds_of(&stat, USED_BY_CHILDREN, rustix::param::clock_ticks_per_second())
}

/// Offsets, counted in fields behind the name, of a process's two CPU times and of its children's.
const USED: usize = 11;
const USED_BY_CHILDREN: usize = 13;

/// Two fields of `/proc/PID/stat`, `skip` behind the name, which may hold anything but ')'.
#[allow(clippy::cast_precision_loss, reason = "ticks of one run")]
fn cpu_seconds_of(stat: &str, skip: usize, ticks_per_second: u64) -> f64 {
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: u64 = after_name
        .split_whitespace()
        .skip(skip)
        .take(2)
        .filter_map(|f| f.parse::<u64>().ok())
        .sum();
    ticks as f64 / ticks_per_second as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_found_behind_any_name() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194304 100 0 0 0 250 50 400 100 20 0 1 0 99 0 0";
        assert!((cpu_seconds_of(stat, USED, 100) - 3.0).abs() < 1e-9);
        assert!((cpu_seconds_of(stat, USED_BY_CHILDREN, 100) - 5.0).abs() < 1e-9);
        assert!(cpu_seconds_of("", USED, 100).abs() < 1e-9);
    }

    #[test]
    fn what_a_program_has_run_grows_and_is_nothing_where_there_is_none() {
        let before = ran_seconds(std::process::id());
        let used = crate::measure::own_cpu_seconds() + 0.05;
        while crate::measure::own_cpu_seconds() < used {}
        assert!(ran_seconds(std::process::id()) > before);
        assert!(ran_seconds(u32::MAX).abs() < f64::EPSILON);
        assert_eq!((first_number("123 456 7\n"), first_number("")), (123, 0));
    }

    #[test]
    fn a_programs_threads_are_placed_by_their_numbers() {
        assert_eq!(
            ["worker-12\n", "worker-0", "manyring", "a-b", ""].map(number_of),
            [12, 0, 0, 0, 0]
        );
        let all = Affinity::current();
        let mut child = spawn(apart(Path::new("/bin/sleep")).arg("9"), &all).unwrap();
        let id = child.id();
        let mut found = Vec::new();
        for first in 0..2 {
            place(id, |number| all.nth(first + number));
            found.push(Affinity::of(id));
        }
        place(id, |_| all.clone());
        found.push(Affinity::of(id));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, [all.nth(0), all.nth(1), all]);
    }

    #[test]
    fn the_scheduling_group_that_is_favoured_is_the_programs_and_not_ours() {
        let weight = || std::fs::read_to_string("/proc/self/autogroup").ok();
        let (ours, before) = (scheduling_group("self"), weight());
        let mut child =
            spawn(apart(Path::new("/bin/sleep")).arg("9"), &Affinity::current()).unwrap();
        let (theirs, after) = (scheduling_group(&child.id().to_string()), weight());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(ours.is_none() || theirs != ours, "{theirs:?} is our group");
        assert_eq!(after, before, "our own group was favoured");
    }

    #[test]
    fn a_back_end_and_its_client_are_favoured_alike_and_those_among_others_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let all = Affinity::current();
        let arguments: [OsString; 2] = ["-c".into(), "touch $0; exec sleep 9".into()];
        let start = |of: fn(&Path, &[OsString], &Path, &Affinity) -> Result<Server, PeerError>| {
            let words = [&arguments[..], &[socket.clone().into()]].concat();
            of(Path::new("/bin/sh"), &words, &socket, &all).unwrap()
        };
        let (server, other) = (start(Server::start), start(Server::start_among_others));
        let mut client = spawn(apart(Path::new("/bin/sleep")).arg("9"), &all).unwrap();
        let found = [server.id(), client.id(), other.id()].map(weight_of);
        client.kill().unwrap();
        client.wait().unwrap();
        let own = weight_of(std::process::id());
        assert_eq!(found[0], found[1]);
        assert_eq!(found[2].nice, own.nice);
        let id = i32::try_from(other.id()).ok().and_then(Pid::from_raw);
        if setpriority_process(id, FAVOUR).is_ok() {
            assert_eq!(found[0].nice, Some(FAVOUR));
            // Ours may be the kernel's own group, which has no weight to show.
            let has_groups = scheduling_group("self").is_some();
            assert_eq!(found[0].group, has_groups.then_some(FAVOUR));
        }
    }

    /// The facts on which the share of a process depends.
    #[derive(Debug, PartialEq)]
    struct Weight {
        nice: Option<i32>,
        /// The nice value of its scheduling group.
        group: Option<i32>,
    }

    fn weight_of(pid: u32) -> Weight {
        let group = std::fs::read_to_string(format!("/proc/{pid}/autogroup")).unwrap_or_default();
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        Weight {
            nice: rustix::process::getpriority_process(pid).ok(),
            group: group.split_whitespace().last().and_then(|nice| nice.parse().ok()),
        }
    }

    #[test]
    fn a_party_is_the_peer_whose_program_it_is_named_after() {
        for (party, peer) in [
            ("qemu-storage-daemon", Some(Peer::QemuStorageDaemon)),
            ("fio io_uring, no vhost", Some(Peer::Fio)),
            ("testpmd vhost", Some(Peer::Testpmd)),
            ("spdk uring", Some(Peer::Spdk)),
            ("manyring, 4 queues", None),
            ("bare write loop", None),
        ] {
            assert_eq!(Peer::of_party(party), peer, "{party}");
        }
    }

    #[test]
    fn a_missing_program_names_its_package() {
        let error = find(("no-such-program-here", "its-package")).unwrap_err().to_string();
        assert!(error.contains("its-package") && error.contains("--without-peers"), "{error}");
        let error = manyring(Some(Path::new("/no/such/manyring"))).unwrap_err().to_string();
        assert!(error.contains("--manyring"), "{error}");
        for path in [None, Some(Path::new("/no/such/vhost"))] {
            let error = Peer::Spdk.find(path).unwrap_err().to_string();
            assert!(error.contains("--spdk PATH"), "{error}");
        }
    }

    #[test]
    fn a_server_that_fails_says_why() {
        let arguments = ["-c".into(), "echo broken >&2; exit 3".into()];
        let socket = Path::new("/no/such/socket");
        let error = Server::start(Path::new("/bin/sh"), &arguments, socket, &Affinity::current());
        let error = error.unwrap_err().to_string();
        assert!(error.contains("broken") && error.contains('3'), "{error}");
    }
}
