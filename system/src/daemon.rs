//! The program under test as a child process, and what it says of itself.

use crate::cleanup;
use crate::command::{child, output, text, wait_for};
use crate::guest::is_memory_on_disk;
use crate::net::Namespace;
use crate::{Context, Outcome, check};
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use std::fs::OpenOptions;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

const START: Duration = Duration::from_secs(30);
/// Set where the device of each daemon is to be served from a device process.
const ISOLATE: &str = "MANYRING_TEST_ISOLATE";

fn is_isolated() -> bool {
    std::env::var_os(ISOLATE).is_some()
}

/// How to start it.
#[derive(Clone, Debug)]
pub struct DaemonOptions {
    /// The binary.
    pub binary: PathBuf,
    /// Where its sockets lie.
    pub folder: PathBuf,
    /// Where its log goes; appended.
    pub log: PathBuf,
    /// Arguments after the program's name.
    pub arguments: Vec<String>,
    /// Whether `--control` is added to them.
    pub is_controlled: bool,
    /// A program, with its arguments, that runs the daemon.
    pub wrapper: Vec<String>,
}

impl DaemonOptions {
    /// `manyring blk` on an image, with further arguments.
    #[must_use]
    pub fn blk(binary: &Path, folder: &Path, log: &Path, image: &Path, more: &[&str]) -> Self {
        let image = image.display().to_string();
        Self::one_device("blk", binary, folder, log, &[&["--blk-file", &image], more].concat())
    }

    /// `manyring net` in a namespace, with further arguments.
    #[must_use]
    pub fn net(
        binary: &Path,
        folder: &Path,
        log: &Path,
        namespace: &Namespace,
        more: &[&str],
    ) -> Self {
        let wrapper = namespace.wrapper();
        Self { wrapper, ..Self::one_device("net", binary, folder, log, more) }
    }

    /// `manyring blk` with these arguments, which name its disk.
    #[must_use]
    pub fn blk_of(binary: &Path, folder: &Path, log: &Path, more: &[&str]) -> Self {
        Self::one_device("blk", binary, folder, log, more)
    }

    fn one_device(kind: &str, binary: &Path, folder: &Path, log: &Path, more: &[&str]) -> Self {
        let socket = folder.join(format!("{kind}0.sock")).display().to_string();
        let allowed: &[_] = if is_memory_on_disk() { &["--memory-on-disk"] } else { &[] };
        let supervisor: &[_] = if is_isolated() { &["--isolate"] } else { &[] };
        let arguments = [&[kind, "--socket-path", &socket], allowed, supervisor].concat();
        Self {
            binary: binary.to_owned(),
            folder: folder.to_owned(),
            log: log.to_owned(),
            arguments: arguments.iter().chain(more).map(|&a| a.to_owned()).collect(),
            is_controlled: true,
            wrapper: Vec::new(),
        }
    }

    /// The socket of [`DaemonOptions::blk`] or [`DaemonOptions::net`].
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.join(format!("{}0.sock", self.kind()))
    }

    fn control(&self) -> PathBuf {
        self.folder.join(format!("{}-control.sock", self.kind()))
    }

    fn kind(&self) -> &str {
        self.arguments.first().map_or("", String::as_str)
    }

    fn command(&self) -> Command {
        let program = self.wrapper.first().map_or(self.binary.as_os_str(), |w| w.as_ref());
        let mut command = child(program);
        if !self.wrapper.is_empty() {
            command.args(&self.wrapper[1..]).arg(&self.binary);
        }
        command.args(&self.arguments);
        if self.is_controlled {
            command.arg("--control").arg(self.control());
        }
        command
    }
}

/// A running daemon; dropped, it is killed.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    options: DaemonOptions,
}

impl Daemon {
    /// Starts it and waits until `socket` is there anew, and behind it the control socket, if it is
    /// told to have one: those of a daemon that was killed are still there, and nobody listens.
    ///
    /// # Errors
    /// It ended, or a socket did not appear.
    pub fn start(options: DaemonOptions, socket: &Path) -> Outcome<Self> {
        let control = options.is_controlled.then(|| options.control());
        let sockets: Vec<_> = control.as_deref().into_iter().chain([socket]).collect();
        let inodes = || sockets.iter().map(|socket| inode(socket)).collect::<Vec<_>>();
        let before = inodes();
        let mut daemon = Self::begin(&options)?;
        wait_for("the daemon's socket", START, || {
            if let Some(status) = daemon.child.try_wait().context("manyring")? {
                return Err(format!("manyring ended at its start: {status}\n{}", daemon.log()?));
            }
            let is_new = |(now, before): (&Option<_>, _)| now.is_some() && now != before;
            Ok(inodes().iter().zip(&before).all(is_new).then_some(()))
        })?;
        Ok(daemon)
    }

    /// Starts it and does not wait.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn begin(options: &DaemonOptions) -> Outcome<Self> {
        Ok(Self { child: spawn(options)?, options: options.clone() })
    }

    /// Runs a daemon that must refuse to start; gives what it said.
    ///
    /// # Errors
    /// It started, or ended with status 0.
    pub fn refused(options: &DaemonOptions) -> Outcome<String> {
        let mut child = spawn(options)?;
        let ended =
            wait_for("the daemon's refusal", START, || child.try_wait().context("manyring"));
        let _ = child.kill();
        cleanup::forget(child.id());
        let status = ended?;
        check(!status.success(), || "manyring ended with status 0, it should refuse".into())?;
        std::fs::read_to_string(&options.log).context(options.log.display())
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.options.socket()
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// The system's.
    pub fn ended(&mut self) -> Outcome<Option<ExitStatus>> {
        self.child.try_wait().context("manyring")
    }

    /// Its log so far.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn log(&self) -> Outcome<String> {
        std::fs::read_to_string(&self.options.log).context(self.options.log.display())
    }

    /// `manyring stats`, for people.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub fn stats_text(&self) -> Outcome<String> {
        text(&mut self.ask("stats"))
    }

    /// The counters of every queue of its first device.
    ///
    /// # Errors
    /// The daemon does not answer, or not with queues.
    pub fn queues(&self) -> Outcome<Vec<Counters>> {
        let json = self.stats()?;
        queues_of(&json).ok_or(format!("manyring stats --json: no queues in {json}"))
    }

    /// The counters of every queue of the device that has this name.
    ///
    /// # Errors
    /// The daemon does not answer, or has no such device.
    pub fn queues_of(&self, device: &str) -> Outcome<Vec<Counters>> {
        let json = self.stats()?;
        let devices = json.pointer("/devices").and_then(Value::as_array);
        let is_it = |found: &&Value| found.get("name").and_then(Value::as_str) == Some(device);
        let found = devices.and_then(|all| all.iter().find(is_it)).and_then(queues_of);
        found.ok_or_else(|| format!("manyring stats --json: no device {device} in {json}"))
    }

    /// The counters of its first worker, and those of that worker's polling.
    ///
    /// # Errors
    /// The daemon does not answer, or not with a worker.
    pub fn first_worker(&self) -> Outcome<(Counters, Counters)> {
        let json = self.stats()?;
        let worker = json.pointer("/workers/0");
        let worker = worker.ok_or_else(|| format!("manyring stats --json: no worker in {json}"))?;
        let polling = worker.get("polling").cloned().unwrap_or_default();
        Ok((Counters(worker.clone()), Counters(polling)))
    }

    /// Times that connections of its first device's disk to a server were lost.
    ///
    /// # Errors
    /// The daemon does not answer, or has no such disk.
    pub fn losses(&self) -> Outcome<u64> {
        let json = self.stats()?;
        let connections = json.pointer("/devices/0/connections").and_then(Value::as_array);
        let connections = connections.ok_or_else(|| format!("no connections in {json}"))?;
        Ok(connections.iter().filter_map(|c| c.get("losses")?.as_u64()).sum())
    }

    /// All of `manyring stats`.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub(crate) fn stats(&self) -> Outcome<Value> {
        let answer = output(self.ask("stats").arg("--json"))?;
        serde_json::from_slice(&answer).context("manyring stats --json")
    }

    /// Its CPU time so far, user and system, in clock ticks.
    ///
    /// # Errors
    /// It has ended.
    pub fn ticks(&self) -> Outcome<u64> {
        ticks(self.pid())
    }

    /// Adds a device of this kind, with further options.
    ///
    /// # Errors
    /// It refuses.
    pub fn add(&self, kind: &str, device: &str, more: &[&str]) -> Outcome {
        let mut command = child(&self.options.binary);
        command.args(["add", kind, "--name", device]).args(more);
        command.arg("--control").arg(self.options.control());
        output(&mut command).map(drop)
    }

    /// Removes a device.
    ///
    /// # Errors
    /// It refuses.
    pub fn remove(&self, device: &str) -> Outcome {
        output(self.ask("remove").arg(device)).map(drop)
    }

    /// Has it read its configuration file again.
    ///
    /// # Errors
    /// It refuses.
    pub fn reload(&self) -> Outcome {
        output(&mut self.ask("reload")).map(drop)
    }

    /// Tells the daemon that the image of a device has another size.
    ///
    /// # Errors
    /// It refuses.
    pub fn resize(&self, device: &str) -> Outcome {
        output(self.ask("resize").arg(device)).map(|_| ())
    }

    /// Gives a disk this size, like `96M`.
    ///
    /// # Errors
    /// It refuses.
    pub fn resize_to(&self, device: &str, size: &str) -> Outcome {
        output(self.ask("resize").args([device, size])).map(|_| ())
    }

    /// Sets what the guest of a network device sees of its link.
    ///
    /// # Errors
    /// It refuses.
    pub fn link(&self, device: &str, up: bool) -> Outcome {
        let word = if up { "up" } else { "down" };
        output(self.ask("link").args([device, word])).map(|_| ())
    }

    /// Sets the MTU that the guest of a network device sees, in bytes.
    ///
    /// # Errors
    /// It refuses.
    pub fn mtu(&self, device: &str, bytes: u32) -> Outcome {
        output(self.ask("mtu").args([device, &bytes.to_string()])).map(|_| ())
    }

    fn ask(&self, what: &str) -> Command {
        let mut command = Command::new(&self.options.binary);
        command.arg(what).arg("--control").arg(self.options.control());
        command
    }

    /// SIGKILL, and nothing else: what a crash leaves behind stays.
    ///
    /// # Errors
    /// It had ended already.
    pub fn crash(mut self) -> Outcome<DaemonOptions> {
        let ended = self.child.try_wait().context("manyring")?;
        check(ended.is_none(), || "manyring had ended before it was killed".into())?;
        self.child.kill().context("manyring")?;
        self.child.wait().context("manyring")?;
        Ok(self.options.clone())
    }

    /// Starts the next daemon, which takes over; returns it when this one has ended.
    ///
    /// # Errors
    /// The next one ended, or did not take over.
    pub fn taken_over_by(mut self, next: &DaemonOptions) -> Outcome<Self> {
        let mut taking = Self::begin(next)?;
        let status = wait_for("a takeover", START, || {
            if let Some(status) = taking.child.try_wait().context("manyring")? {
                return Err(format!("the next manyring ended: {status}\n{}", taking.log()?));
            }
            self.child.try_wait().context("manyring")
        })?;
        check(status.success(), || format!("manyring ended with {status} after a takeover"))?;
        Ok(taking)
    }

    /// SIGTERM: must end by itself, with status 0.
    ///
    /// # Errors
    /// It does not.
    pub fn stop(mut self) -> Outcome {
        let pid = cleanup::pid(self.child.id()).ok_or("manyring has no pid")?;
        kill_process(pid, Signal::TERM).context("manyring")?;
        let limit = Duration::from_secs(30);
        let status = wait_for("manyring's end after SIGTERM", limit, || {
            self.child.try_wait().context("manyring")
        })?;
        check(status.success(), || format!("manyring ended with {status} after SIGTERM"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        cleanup::forget(self.child.id());
    }
}

fn spawn(options: &DaemonOptions) -> Outcome<Child> {
    let log = OpenOptions::new().create(true).append(true).open(&options.log);
    let log = log.context(options.log.display())?;
    let output = log.try_clone().context(options.log.display())?;
    let mut command = options.command();
    command.stdin(Stdio::null()).stdout(output).stderr(log);
    let child = command.spawn().context(options.binary.display())?;
    cleanup::adopt(child.id());
    Ok(child)
}

/// The CPU time of a process so far, user and system, in clock ticks.
///
/// # Errors
/// It has ended.
pub fn ticks(pid: u32) -> Outcome<u64> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).context(path)?;
    // Fields 14 and 15, counted after the name in brackets.
    let fields = stat.rsplit_once(") ").ok_or("/proc/PID/stat has no name")?.1;
    let mut times = fields.split(' ').skip(11).map_while(|field| field.parse::<u64>().ok());
    Ok(times.next().ok_or("no utime")? + times.next().ok_or("no stime")?)
}

fn inode(path: &Path) -> Option<u64> {
    path.symlink_metadata().ok().map(|metadata| metadata.ino())
}

/// The counters of one queue, by name.
#[derive(Clone, Debug)]
pub struct Counters(Value);

impl Counters {
    /// One counter.
    ///
    /// # Errors
    /// No counter has this name.
    pub fn value(&self, name: &str) -> Outcome<u64> {
        let value = self.0.get(name).and_then(Value::as_u64);
        value.ok_or_else(|| format!("manyring stats --json: no counter {name} in {}", self.0))
    }

    /// All counters whose names start so.
    #[must_use]
    pub fn starting_with(&self, start: &str) -> Vec<(String, u64)> {
        let fields = self.0.as_object().into_iter().flatten();
        fields
            .filter(|(name, _)| name.starts_with(start))
            .filter_map(|(name, value)| Some((name.clone(), value.as_u64()?)))
            .collect()
    }
}

/// The first `"queues": [..]` of an answer; counters lie in each or in its `"counters"`.
pub(crate) fn queues_of(json: &Value) -> Option<Vec<Counters>> {
    match json {
        Value::Array(values) => values.iter().find_map(queues_of),
        Value::Object(fields) => {
            if let Some(Value::Array(queues)) = fields.get("queues") {
                let counters = |queue: &Value| queue.get("counters").unwrap_or(queue).clone();
                return Some(queues.iter().map(|queue| Counters(counters(queue))).collect());
            }
            fields.values().find_map(queues_of)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_name() {
        let json = serde_json::json!({
            "devices": [{"name": "a", "queues": [{"counters": {"requests": 3}}, {"requests": 4}]}]
        });
        let queues = queues_of(&json).unwrap();
        assert_eq!((queues[0].value("requests"), queues[1].value("requests")), (Ok(3), Ok(4)));
        assert!(queues[0].value("colour").unwrap_err().contains("colour"));
        assert!(queues_of(&serde_json::json!({"devices": []})).is_none());
    }
}
