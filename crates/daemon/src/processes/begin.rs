//! Starts the device processes and the next supervisor, on one thread that lives as long as this
//! one.
//!
//! One process is always ahead, and another one where there are Xen guests: a *spare* has given up
//! its rights, started its worker and waits for its first order. No device process knows its domain
//! by anything but what it is told, so it serves whichever domain needs a process next: a front-end
//! whose device process has died does not wait until a program is loaded. The next warm process is
//! started when that front-end has been served. A supervisor that takes over has a warm process
//! begin for each device process that it will need, before the device processes of the other
//! supervisor stop.
//!
//! The kernel kills a device process when the thread that has started it ends (`sandbox.rs` asks
//! for that), so a device process outlives no supervisor, whatever it was made to do and however
//! the supervisor ends.

use super::channel::pair;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Pause before the next warm process is started: it takes CPU time which a front-end that waits
/// for its device process needs more.
const WARM_DELAY: Duration = Duration::from_millis(500);

/// Most warm processes that begin before a takeover: further device processes start when they are
/// needed.
const SPARES_MAX: usize = 64;
/// How long they are waited for.
const WARM_TIMEOUT: Duration = Duration::from_secs(3);

/// A process, and the supervisor's end of its channel.
type Spawned = (Child, OwnedFd);

struct WarmProcess {
    arguments: Arc<[OsString]>,
    spawned: Spawned,
}

/// An order to the thread that starts device processes.
enum Order {
    /// A process, and where it is awaited.
    DeviceProcess { arguments: Arc<[OsString]>, spawned: oneshot::Sender<io::Result<Spawned>> },
    /// A spare with these arguments from now on.
    WarmProcess { arguments: Arc<[OsString]> },
    /// This number of warm processes, and where it is awaited that they have begun.
    WarmProcesses { arguments: Arc<[OsString]>, count: usize, begun: oneshot::Sender<()> },
    /// The next supervisor, which takes over from this one, and where its end is awaited.
    Next { command: Command, ended: oneshot::Sender<String> },
}

/// The process that was started last to take over.
static NEXT: Mutex<Option<u32>> = Mutex::new(None);

/// True if this supervisor has started the process, to be the next one.
pub(super) fn is_next(pid: u32) -> bool {
    *NEXT.lock().unwrap_or_else(PoisonError::into_inner) == Some(pid)
}

/// Starts the next supervisor at the control socket of this one: this program as it lies there now,
/// with the arguments of this process. Returns if that has not taken over: how it has ended.
pub(crate) async fn start_next(control: &Path) -> String {
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
    let mut child = command.spawn()?;
    let pid = child.id();
    *next = Some(pid);
    let wait = move || {
        let status = child.wait().map_or_else(|error| error.to_string(), |s| s.to_string());
        let _ = ended.send(format!("process {pid}: {status}"));
    };
    std::thread::Builder::new().name("next".to_owned()).spawn(wait).map(drop)
}

/// The device process with these arguments: the warm process, or one that starts now.
///
/// # Errors
/// The system has no thread, process or file descriptor.
pub(super) async fn spawned(arguments: Arc<[OsString]>) -> io::Result<Spawned> {
    let (spawned, is_spawned) = oneshot::channel();
    let order = Order::DeviceProcess { arguments, spawned };
    orders()?.send(order).map_err(|_| io::ErrorKind::Other)?;
    is_spawned.await.map_err(|_| io::ErrorKind::Other)?
}

/// Has a warm process wait, with these arguments: device processes will be needed.
pub(super) fn prepare(arguments: Arc<[OsString]>) {
    if let Ok(orders) = orders() {
        let _ = orders.send(Order::WarmProcess { arguments });
    }
}

/// Has `count` spare processes begin, [`SPARES_MAX`] at most. Returns when they wait for orders, or
/// when that takes too long: device processes take longer to begin then.
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
/// The system has no thread now. It may have one later.
fn orders() -> io::Result<mpsc::Sender<Order>> {
    static ORDERS: Mutex<Option<mpsc::Sender<Order>>> = Mutex::new(None);
    let mut kept = ORDERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(orders) = &*kept {
        return Ok(orders.clone());
    }
    let (orders, ordered) = mpsc::channel();
    let work = move || {
        super::identity::grant();
        Starter::default().work(&ordered);
    };
    std::thread::Builder::new().name("processes".to_owned()).spawn(work)?;
    Ok(kept.insert(orders).clone())
}

#[derive(Default)]
struct Starter {
    /// Device processes of Xen guests have other arguments than the rest.
    warm_processes: Vec<WarmProcess>,
    /// The arguments for the next warm process, if one is wanted and is not there yet.
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
                    self.wanted = Some(arguments);
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

    /// Without a warm process, the next device process takes longer to begin: nothing else is wrong
    /// then.
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

    /// Waits until the warm processes have something to say, which is that they have begun, or have
    /// ended.
    fn wait(&self) {
        let until = Instant::now() + WARM_TIMEOUT;
        for WarmProcess { spawned: (_, socket), .. } in &self.warm_processes {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).ok();
            let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], left.as_ref());
        }
    }

    fn process(&mut self, arguments: &Arc<[OsString]>) -> io::Result<Spawned> {
        let is_alike = |warm_process: &WarmProcess| warm_process.arguments == *arguments;
        while let Some(at) = self.warm_processes.iter().rposition(is_alike) {
            let WarmProcess { mut spawned, .. } = self.warm_processes.swap_remove(at);
            // A spare that was killed serves nobody.
            if matches!(spawned.0.try_wait(), Ok(None)) {
                return Ok(spawned);
            }
        }
        spawn(arguments)
    }
}

/// Starts the process. Its standard input is its end of the channel: an end of it ends the device
/// process.
fn spawn(arguments: &[OsString]) -> io::Result<Spawned> {
    let (ours, theirs) = pair()?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("manyring").args(arguments).env_clear().process_group(0);
    command.stdin(theirs).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok((command.spawn()?, ours))
}
