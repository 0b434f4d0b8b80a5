//! Starts device processes and the next supervisor, on one thread that lives as long as the daemon.
//!
//! One *warm process* always waits, and a second one where there are Xen guests: it has dropped its
//! rights, started its worker and waits for its first command. A device process learns its domain
//! only by commands, so a warm process serves whichever domain needs one next: a front-end whose
//! device process died does not wait until a program is loaded. The next warm process is started
//! after that front-end is served. Before a takeover the next supervisor starts a warm process for
//! each device process that it will need, while the running one still serves.
//!
//! The kernel kills a device process when the thread that started it ends (`sandbox.rs` asks for
//! that). So a device process never outlives its supervisor, however the supervisor ends.

use manyring_serve::byte_stream;
use manyring_serve::channel::pair;
use manyring_serve::device_process::sandbox::are_usual;
use manyring_serve::reaper::{has_ended, reap};
use manyring_serve::times::{WARM_DELAY, WARM_START};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Most warm processes that are started before a takeover. Further device processes start when they
/// are needed.
const SPARES_MAX: usize = 64;
/// Size in bytes of the socket to which a process writes its log. A process that polls before it
/// writes can fill a quarter of the socket only.
const STDERR_SIZE: usize = 512 << 10;

/// A process that the thread has started.
#[derive(Debug)]
pub(super) struct Spawned {
    pub(super) child: Child,
    /// Readable when the process has ended. The supervisor does not wait until it is reaped
    /// (`reaper.rs`).
    pub(super) pidfd: OwnedFd,
    /// The supervisor's end of the channel to the process.
    pub(super) socket: OwnedFd,
    /// The supervisor's end of the process's standard error (`byte_stream.rs`).
    pub(super) stderr: OwnedFd,
}

struct WarmProcess {
    arguments: Arc<[OsString]>,
    spawned: Spawned,
}

/// A request to the thread that starts device processes.
enum Order {
    /// Start a device process, and reply with it.
    DeviceProcess { arguments: Arc<[OsString]>, spawned: oneshot::Sender<io::Result<Spawned>> },
    /// Keep a warm process with these arguments from now on.
    WarmProcess { arguments: Arc<[OsString]> },
    /// Start this number of warm processes, and reply when they have started.
    WarmProcesses { arguments: Arc<[OsString]>, count: usize, begun: oneshot::Sender<()> },
    /// Start the next supervisor, which takes over from this one; reply with how it ended.
    Next { command: Command, ended: oneshot::Sender<String> },
}

/// The pid of the next supervisor that was started last.
static NEXT: Mutex<Option<u32>> = Mutex::new(None);

/// True if this supervisor started the process as its successor. Waits while one is being started:
/// never on the control thread.
pub(super) fn is_next(pid: u32) -> bool {
    *NEXT.lock().unwrap_or_else(PoisonError::into_inner) == Some(pid)
}

/// Starts the next supervisor at this supervisor's control socket: the program file as it is now,
/// with the arguments of this process. Returns only if the successor did not take over: how it
/// ended.
pub async fn start_next(control: &Path) -> String {
    const TAKEOVER: &str = "--takeover";
    let mut own = std::env::args_os();
    let mut command = Command::new(own.next().unwrap_or_default());
    while let Some(argument) = own.next() {
        if argument == TAKEOVER {
            own.next();
        } else {
            command.arg(argument);
        }
    }
    command.arg(TAKEOVER).arg(control).env_remove("WATCHDOG_PID").stdin(Stdio::null());
    let (ended, has_ended) = oneshot::channel();
    let _ = orders().is_ok_and(|orders| orders.send(Order::Next { command, ended }).is_ok());
    has_ended.await.unwrap_or_else(|_| "it was not started".to_owned())
}

fn spawn_next(mut command: Command, ended: oneshot::Sender<String>) -> io::Result<()> {
    let mut next = NEXT.lock().unwrap_or_else(PoisonError::into_inner);
    let (child, pidfd) = watched(command.spawn()?)?;
    let pid = child.id();
    *next = Some(pid);
    let wait = move || {
        has_ended(&pidfd, None);
        let _ = ended.send(format!("process {pid}: {}", reap(child).in_words()));
    };
    std::thread::Builder::new().name("next".to_owned()).spawn(wait).map(drop)
}

/// Returns a device process with these arguments: a warm one, or else a process that starts now.
///
/// # Errors
/// The system has no thread, process or file descriptor.
pub(super) async fn spawned(arguments: Arc<[OsString]>) -> io::Result<Spawned> {
    let (spawned, is_spawned) = oneshot::channel();
    let order = Order::DeviceProcess { arguments, spawned };
    orders()?.send(order).map_err(|_| io::ErrorKind::Other)?;
    is_spawned.await.map_err(|_| io::ErrorKind::Other)?
}

/// Keeps a warm process with these arguments: device processes will be needed.
pub(super) fn prepare(arguments: Arc<[OsString]>) {
    if let Ok(orders) = orders() {
        let _ = orders.send(Order::WarmProcess { arguments });
    }
}

/// Starts `count` warm processes, [`SPARES_MAX`] at most. Returns when they wait for commands, or
/// after [`WARM_START`]: device processes that are missing then start when they are needed.
pub(super) async fn warm_processes(arguments: Arc<[OsString]>, count: usize) {
    let (begun, have_begun) = oneshot::channel();
    let order = Order::WarmProcesses { arguments, count: count.min(SPARES_MAX), begun };
    if orders().is_ok_and(|orders| orders.send(order).is_ok()) {
        let _ = have_begun.await;
    }
}

/// Returns the channel to the thread that starts device processes, and starts that thread if need
/// be.
///
/// # Errors
/// The system cannot start a thread now. A later call tries again.
fn orders() -> io::Result<mpsc::Sender<Order>> {
    static ORDERS: Mutex<Option<mpsc::Sender<Order>>> = Mutex::new(None);
    let mut kept = ORDERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(orders) = &*kept {
        return Ok(orders.clone());
    }
    let (orders, ordered) = mpsc::channel();
    let work = move || {
        manyring_serve::device_process::identity::grant();
        Starter::default().work(&ordered);
    };
    std::thread::Builder::new().name("processes".to_owned()).spawn(work)?;
    Ok(kept.insert(orders).clone())
}

#[derive(Default)]
struct Starter {
    /// The warm processes, one for each set of arguments: those for Xen guests have others.
    warm_processes: Vec<WarmProcess>,
    /// The arguments of the next warm process, if one is wanted and not there yet.
    wanted: Option<Arc<[OsString]>>,
}

impl Starter {
    fn work(mut self, ordered: &mpsc::Receiver<Order>) {
        loop {
            let order = match &self.wanted {
                None => ordered.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(_) => ordered.recv_timeout(WARM_DELAY),
            };
            match order {
                Ok(Order::DeviceProcess { arguments, spawned }) => {
                    let _ = spawned.send(self.process(&arguments));
                    // Only a few domains need a process with other than the usual options: keep
                    // none of these warm.
                    if are_usual(&arguments) {
                        self.wanted = Some(arguments);
                    }
                }
                Ok(Order::WarmProcess { arguments }) => self.prepare(&arguments, 1),
                Ok(Order::WarmProcesses { arguments, count, begun }) => {
                    self.prepare(&arguments, count);
                    self.wait();
                    let _ = begun.send(());
                }
                Ok(Order::Next { command, ended }) => drop(spawn_next(command, ended)),
                Err(RecvTimeoutError::Timeout) => {
                    let wanted = self.wanted.take();
                    wanted.iter().for_each(|arguments| self.prepare(arguments, 1));
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Starts warm processes. A failure is not reported: the next device process is started when it
    /// is needed.
    fn prepare(&mut self, arguments: &Arc<[OsString]>, count: usize) {
        let are = self
            .warm_processes
            .iter()
            .filter(|warm_process| warm_process.arguments == *arguments)
            .count();
        let warm_process = |spawned| WarmProcess { arguments: arguments.clone(), spawned };
        let warm_processes = (are..count).map_while(|_| spawn(arguments).ok()).map(warm_process);
        self.warm_processes.extend(warm_processes);
    }

    /// Waits until each warm process has sent its first message, or has ended.
    fn wait(&self) {
        let until = Instant::now() + WARM_START;
        for WarmProcess { spawned: Spawned { socket, .. }, .. } in &self.warm_processes {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).ok();
            let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], left.as_ref());
        }
    }

    fn process(&mut self, arguments: &Arc<[OsString]>) -> io::Result<Spawned> {
        let is_alike = |warm_process: &WarmProcess| warm_process.arguments == *arguments;
        while let Some(at) = self.warm_processes.iter().rposition(is_alike) {
            let WarmProcess { spawned, .. } = self.warm_processes.swap_remove(at);
            if !has_ended(&spawned.pidfd, Some(Timespec::default())) {
                return Ok(spawned);
            }
            // A warm process may have been killed.
            reap(spawned.child);
        }
        spawn(arguments)
    }
}

/// Starts a device process. Its standard input is its end of the channel; the process ends when
/// the supervisor closes the other end.
fn spawn(arguments: &[OsString]) -> io::Result<Spawned> {
    let (ours, theirs) = pair()?;
    let (stderr, writes) = byte_stream::pair(STDERR_SIZE)?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("manyring").args(arguments).env_clear().process_group(0);
    command.stdin(theirs).stdout(Stdio::null()).stderr(writes);
    let (child, pidfd) = watched(command.spawn()?)?;
    Ok(Spawned { child, pidfd, socket: ours, stderr })
}

/// Opens a pidfd of a child that was just started. The child was not reaped yet, so its pid cannot
/// be that of another process. A child that cannot be watched is killed.
fn watched(mut child: Child) -> io::Result<(Child, OwnedFd)> {
    match pidfd_open(Pid::from_child(&child), PidfdFlags::NONBLOCK) {
        Ok(pidfd) => Ok((child, pidfd)),
        Err(errno) => {
            let _ = child.kill();
            reap(child);
            Err(errno.into())
        }
    }
}
