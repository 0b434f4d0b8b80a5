//! The daemon as a child process, for the tests: started, looked at from outside, ended.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::PipeWriter;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, SystemTime};

/// Longest time that anything here is waited for.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// The states of a process's threads.
pub(crate) fn states(process: u32) -> Vec<char> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let stats = tasks.flat_map(|task| std::fs::read_to_string(task.path().join("stat")));
    stats.flat_map(|stat| stat.rsplit_once(") ")?.1.chars().next()).collect()
}

/// A program that a test has started. It ends with this value, also where the test fails: a daemon
/// that is left would keep the test's output open, and whoever reads that waiting.
#[derive(Debug)]
pub(crate) struct Running(Child);

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }
}

impl std::ops::Deref for Running {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl std::ops::DerefMut for Running {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        kill_and_reap(&mut self.0);
    }
}

/// Waits until a child has ended; the test fails if it does not end.
pub(crate) fn end_of(child: &mut Child) -> ExitStatus {
    let mut status = None;
    wait_until(|| {
        status = child.try_wait().expect("status");
        status.is_some()
    });
    status.unwrap_or_else(|| {
        let _ = child.kill();
        panic!("process {} did not end", child.id())
    })
}

/// Kills a child. What keeps a call of it in the kernel may be something that the test lets go of
/// only after this, such as a file system that stands still: one that does not end is left alone.
pub(crate) fn kill_and_reap(child: &mut Child) {
    let _ = child.kill();
    if !wait_until(|| child.try_wait().map_or(true, |status| status.is_some())) {
        eprintln!("process {} was killed, and the kernel does not end it", child.id());
    }
}

/// Waits until `done`; false if it did not come true in [`TIMEOUT`].
pub(crate) fn wait_until(mut done: impl FnMut() -> bool) -> bool {
    // A clock that is set back would have the wait go on.
    let now = || rustix::time::clock_gettime(rustix::time::ClockId::Monotonic).tv_sec;
    let end = now() + TIMEOUT.as_secs().cast_signed();
    loop {
        if done() {
            return true;
        }
        if now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether this is root. A test that only root can make does nothing otherwise, and this line says
/// so past the test harness, which shows nothing of a test that passes; `cargo xtask test` counts
/// the line as a failure.
pub(crate) fn is_root_or_left_out() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        say_of_this_test("left out: ", ", which needs root");
    }
    is_root
}

/// Writes a line with the name of this test, past the test harness.
fn say_of_this_test(before: &str, behind: &str) {
    use std::io::Write;
    let current = std::thread::current();
    let test = current.name().unwrap_or("a test");
    let line = format!("{before}{test}{behind}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

/// Copies the program. Another process does so: if this one had the copy open for writing while one
/// of its threads starts a program, the kernel would refuse to execute the copy as long as that
/// child has the descriptor ("Text file busy").
pub(crate) fn copy_program(to: &Path) {
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_manyring")).arg(to).status();
    assert!(copied.expect("cp").success(), "{} cannot be written", to.display());
}

/// Fills a pipe: whoever writes to it waits for its reader.
pub(crate) fn fill(writer: &PipeWriter) {
    use rustix::fs::{OFlags, fcntl_setfl};
    fcntl_setfl(writer, OFlags::NONBLOCK).unwrap();
    while rustix::io::write(writer, &[b'x'; 4096]).is_ok() {}
    while rustix::io::write(writer, b"x").is_ok() {}
    fcntl_setfl(writer, OFlags::empty()).unwrap();
}

/// Copies of the descriptors by which a process has a file, as whoever works with it gets them.
pub(crate) fn copies_of(process: i32, path: &Path) -> Vec<OwnedFd> {
    use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
    let pidfd = pidfd_open(Pid::from_raw(process).unwrap(), PidfdFlags::empty()).unwrap();
    let open = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
    let is_it = |fd: &std::fs::DirEntry| std::fs::read_link(fd.path()).is_ok_and(|of| of == path);
    let number = |fd: std::fs::DirEntry| fd.file_name().into_string().unwrap().parse().unwrap();
    let get = |fd| pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty()).unwrap();
    open.filter(is_it).map(number).map(get).collect()
}

/// A running `manyring`; killed when dropped.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    folder: tempfile::TempDir,
}

/// Resources that a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holdings {
    /// Open fds.
    pub(crate) fds: usize,
    /// Threads of its own.
    pub(crate) threads: usize,
    /// Those of them that serve queues. A loaded host has more of them started.
    pub(crate) workers: usize,
    /// Threads that the kernel runs for its io_urings; they end when they are idle for seconds, but
    /// for the last ones.
    pub(crate) kernel_threads: usize,
}

/// The mappings of a process, by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mappings {
    /// Arenas of the C library's allocator, which it keeps for the next threads.
    pub(crate) arenas: usize,
    /// Stacks of threads, with the guard page below each. The C library keeps some of threads that
    /// have ended.
    pub(crate) stacks: usize,
    /// All others, by what is mapped: a file's name, `[heap]`, or nothing but memory.
    pub(crate) others: BTreeMap<String, usize>,
}

impl Mappings {
    /// Reads `/proc/PID/maps`.
    fn parse(maps: &str) -> Self {
        /// The C library reserves arenas of this size, at multiples of it.
        const ARENA: u64 = 64 << 20;
        const GUARD: u64 = 4096;
        let mut all = Self::default();
        let parse = |line: &str| {
            let mut words = line.split_whitespace();
            let (from, to) = words.next()?.split_once('-')?;
            let (from, to) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16));
            let mode = words.next()?.to_owned();
            Some((from.ok()?, to.ok()?, mode, words.skip(3).collect::<Vec<_>>().join(" ")))
        };
        let lines: Vec<_> = maps.lines().filter_map(parse).collect();
        assert_eq!(lines.len(), maps.lines().count(), "{maps}");
        let mut at = 0;
        while let Some((from, to, mode, name)) = lines.get(at) {
            // Two neighbours without a name belong together where only one may be touched.
            let next = lines.get(at + 1).filter(|next| next.0 == *to && next.3.is_empty());
            let next = next.filter(|_| name.is_empty()).map(|next| (next.1, next.2.as_str()));
            match (mode.as_str(), next) {
                ("rw-p", Some((end, "---p"))) if from % ARENA == 0 && end - from == ARENA => {
                    all.arenas += 1;
                    at += 1;
                }
                ("---p", Some((_, "rw-p"))) if to - from == GUARD => {
                    all.stacks += 1;
                    at += 1;
                }
                _ => *all.others.entry(format!("{mode} {name}")).or_default() += 1,
            }
            at += 1;
        }
        all
    }
}

/// Set where daemons of these tests are to serve their devices from device processes, one for each,
/// as far as device processes can serve them: so each test that asks for no other domain is one of
/// device processes too.
const ISOLATE: &str = "MANYRING_TEST_ISOLATE";

pub(crate) fn is_isolated() -> bool {
    std::env::var_os(ISOLATE).is_some()
}

/// The key of a daemon whose devices are served by the daemon itself, or by device processes in
/// the run that is meant for these.
pub(crate) fn domains() -> &'static str {
    if is_isolated() { "domains = 'device'" } else { "domains = 'one'" }
}

/// Whether daemons have the form that they have by default. A test of that form alone (what one
/// process holds, or that a configuration says nothing of domains) does nothing otherwise, and this
/// line says so past the test harness: `cargo xtask test` counts the test where it was made.
pub(crate) fn only_in_default_form() -> bool {
    if is_isolated() {
        say_of_this_test("only in its default form: ", "");
    }
    !is_isolated()
}

/// The configuration, with its devices in device processes if they are to be.
pub(crate) fn apart(configuration: &str) -> String {
    const DAEMON: &str = "[daemon]\n";
    if !is_isolated() || configuration.contains("domains = ") {
        return configuration.to_owned();
    }
    let apart = format!("{DAEMON}domains = 'device'\n");
    match configuration.contains(DAEMON) {
        true => configuration.replacen(DAEMON, &apart, 1),
        false => apart + configuration,
    }
}

impl Daemon {
    /// `manyring blk` with these arguments; its socket is there.
    pub(crate) fn blk<A: AsRef<OsStr>>(arguments: &[A]) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let socket = folder.path().join("blk0");
        let mut command = Command::new(env!("CARGO_BIN_EXE_manyring"));
        command.arg("blk").arg("--socket-path").arg(&socket).args(arguments);
        command.args(is_isolated().then_some("--isolate"));
        Self::start(command, folder, &[socket])
    }

    /// `manyring blk` with these arguments, started by a shell after it has run `limits`.
    pub(crate) fn blk_under(limits: &str, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let socket = folder.path().join("blk0");
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("{limits}; exec \"$0\" \"$@\""));
        command.arg(env!("CARGO_BIN_EXE_manyring")).arg("blk").arg("--socket-path").arg(&socket);
        command.args(arguments);
        Self::start(command, folder, &[socket])
    }

    /// `manyring run` with this configuration, in which `@` stands for the folder of the sockets.
    /// The devices are called `names`, and so are their sockets.
    pub(crate) fn run(configuration: &str, names: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let file = folder.path().join("manyring.toml");
        let text = apart(configuration).replace('@', &folder.path().display().to_string());
        std::fs::write(&file, text).expect("configuration");
        let mut command = Command::new(env!("CARGO_BIN_EXE_manyring"));
        command.arg("run").arg("--config").arg(&file);
        let sockets: Vec<_> = names.iter().map(|name| folder.path().join(name)).collect();
        Self::start(command, folder, &sockets)
    }

    /// `manyring run` as [`Self::run`], started by a shell behind `how`: limits and `exec`, or a
    /// program that starts it. As any user it finds its folder and can make its sockets there.
    pub(crate) fn run_behind(how: &str, configuration: &str, names: &[&str]) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("temporary folder");
        let everybody = |mode| std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(folder.path(), everybody(0o1777)).expect("permissions");
        let program = folder.path().join("program");
        copy_program(&program);
        let file = folder.path().join("manyring.toml");
        let text = configuration.replace('@', &folder.path().display().to_string());
        std::fs::write(&file, text).expect("configuration");
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("{how} \"$0\" \"$@\"")).arg(program);
        command.arg("run").arg("--config").arg(&file);
        let sockets: Vec<_> = names.iter().map(|name| folder.path().join(name)).collect();
        Self::start(command, folder, &sockets)
    }

    pub(crate) fn start(
        mut command: Command,
        folder: tempfile::TempDir,
        sockets: &[PathBuf],
    ) -> Self {
        let log = std::fs::File::create(folder.path().join("log")).expect("log");
        let child = command.stdin(Stdio::null()).stderr(log).spawn().expect("the daemon starts");
        let mut daemon = Self { child, folder };
        let mut ended = None;
        // The folder in which a socket is made is there for a moment after the socket has its name.
        let makes = |daemon: &Self| {
            let names = std::fs::read_dir(daemon.folder.path()).expect("folder").flatten();
            names.into_iter().any(|name| name.file_name().to_string_lossy().starts_with(".mr-"))
        };
        let shown = wait_until(|| {
            ended = daemon.child.try_wait().expect("status");
            ended.is_some() || sockets.iter().all(|socket| socket.exists()) && !makes(&daemon)
        });
        assert!(shown && ended.is_none(), "{ended:?}: {}", daemon.log());
        daemon
    }

    /// The socket of the only device.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("blk0")
    }

    /// The socket of the device `name`.
    pub(crate) fn socket_of(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Folder of the sockets.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its own number, and those of the processes that it has started: its device processes.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).expect("it runs");
        let children = |task: std::fs::DirEntry| task.path().join("children");
        // A thread may end while it is looked at.
        let texts = tasks.flatten().flat_map(|task| std::fs::read_to_string(children(task)));
        let text = texts.collect::<String>();
        let started = text.split_whitespace().map(|pid| pid.parse().expect("a number"));
        std::iter::once(self.pid()).chain(started).collect()
    }

    /// Does `act` while the daemon and its device processes stand still.
    pub(crate) fn while_stopped(&self, act: impl FnOnce()) {
        use rustix::process::{Pid, Signal, kill_process};
        let send = |stopped: u32, signal| {
            let stopped = Pid::from_raw(stopped.cast_signed()).expect("a process");
            // The signal fails if the device process has ended since the list was made.
            let _ = kill_process(stopped, signal);
        };
        let stop = |stopped: u32| {
            send(stopped, Signal::STOP);
            let stands = |state| state == 'T' || state == 'Z';
            assert!(wait_until(|| states(stopped).into_iter().all(stands)));
        };
        // The daemon first, so that it starts no device process any more: while it starts one, it
        // stands only once that one runs.
        stop(self.pid());
        let all = self.processes();
        all.iter().skip(1).for_each(|process| stop(*process));
        act();
        all.iter().for_each(|stopped| send(*stopped, Signal::CONT));
    }

    /// The daemon's log so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// True while it runs.
    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("status").is_none()
    }

    /// Ends it as an administrator would; the status it ends with.
    pub(crate) fn terminate(mut self) -> ExitStatus {
        self.stop().0
    }

    /// Sends a signal.
    pub(crate) fn send(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("signal");
    }

    /// Sends SIGTERM and waits; the status it ends with, and how long it took.
    pub(crate) fn stop(&mut self) -> (ExitStatus, Duration) {
        let start = SystemTime::now();
        self.send(rustix::process::Signal::TERM);
        (self.wait(), start.elapsed().unwrap_or_default())
    }

    /// Waits until it has ended.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until(|| {
            status = self.child.try_wait().expect("status");
            status.is_some()
        });
        status.unwrap_or_else(|| panic!("it did not end: {}", self.log()))
    }

    /// The resources that the daemon holds now, with its device processes.
    pub(crate) fn holdings(&self) -> Holdings {
        let processes = self.processes();
        // A device process may end while it is looked at.
        let folder = |what: &str| {
            let of = |process| std::fs::read_dir(format!("/proc/{process}/{what}"));
            processes.iter().flat_map(of).flatten().flatten().collect::<Vec<_>>()
        };
        let name = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("comm"));
        let names: Vec<_> = folder("task").into_iter().flat_map(name).collect();
        let kernel_threads = names.iter().filter(|name| name.starts_with("iou-")).count();
        let threads = names.len() - kernel_threads;
        let workers = names.iter().filter(|name| name.starts_with("worker-")).count();
        Holdings { fds: folder("fd").len(), threads, workers, kernel_threads }
    }

    /// The names of its threads and what its descriptors are, of each process: for a test that
    /// finds too many of them.
    pub(crate) fn held_things(&self) -> String {
        let mut text = String::new();
        for process in self.processes() {
            let names = |what: &str, name: fn(&Path) -> Option<String>| {
                let folder = std::fs::read_dir(format!("/proc/{process}/{what}"));
                let all = folder.into_iter().flatten().flatten();
                let mut names: Vec<_> = all.filter_map(|entry| name(&entry.path())).collect();
                names.sort();
                names.join(" ")
            };
            let comm = |path: &Path| {
                let name = std::fs::read_to_string(path.join("comm")).ok()?;
                Some(name.trim_end().to_owned())
            };
            let link = |path: &Path| Some(std::fs::read_link(path).ok()?.display().to_string());
            let (threads, fds) = (names("task", comm), names("fd", link));
            text += &format!("process {process}: threads {threads}; descriptors {fds}\n");
        }
        text
    }

    /// The mappings of the daemon now.
    pub(crate) fn mappings(&self) -> Mappings {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.child.id()));
        Mappings::parse(&maps.expect("the daemon runs"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let ended = self.child.try_wait();
        kill_and_reap(&mut self.child);
        if std::thread::panicking() {
            eprintln!("the daemon (ended before: {ended:?}) has logged:\n{}", self.log());
        }
    }
}
