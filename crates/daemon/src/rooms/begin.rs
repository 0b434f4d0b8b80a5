//! Starts the processes of rooms, all on one thread, which lives as long as the house.
//!
//! One process is always ahead: a *spare* has given up its rights, started its worker and waits for
//! its first order. No room knows its domain by anything but what it is told, so it serves
//! whichever domain needs a process next: a front-end whose room has died does not wait until a
//! program is loaded. The next spare is started when that front-end has been served.
//!
//! The kernel kills a room when the thread that has started it ends (`sandbox.rs` asks for that),
//! so a room outlives no house, whatever it was made to do and however the house ends.

use super::channel::pair;
use rustix::fd::OwnedFd;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;
use tokio::sync::oneshot;

/// Pause before the next spare is started: it takes CPU time which a front-end that waits for its
/// room needs more.
const SPARE_PAUSE: Duration = Duration::from_millis(500);

/// A process, and the house's end of its channel.
type Spawned = (Child, OwnedFd);

/// An order to the thread that starts rooms.
enum Order {
    /// A process, and where it is awaited.
    Room { arguments: Arc<[OsString]>, spawned: oneshot::Sender<io::Result<Spawned>> },
    /// A spare with these arguments from now on.
    Spare { arguments: Arc<[OsString]> },
}

/// The process of a room with these arguments: the spare, or one that starts now.
///
/// # Errors
/// The system has no thread, process or file descriptor.
pub(super) async fn spawned(arguments: Arc<[OsString]>) -> io::Result<Spawned> {
    let (spawned, is_spawned) = oneshot::channel();
    let order = Order::Room { arguments, spawned };
    orders()?.send(order).map_err(|_| io::ErrorKind::Other)?;
    is_spawned.await.map_err(|_| io::ErrorKind::Other)?
}

/// Has a spare process wait, with these arguments: rooms will be needed.
pub(super) fn prepare(arguments: Arc<[OsString]>) {
    if let Ok(orders) = orders() {
        let _ = orders.send(Order::Spare { arguments });
    }
}

/// Returns the channel to the thread that starts rooms, and starts that thread if there is none.
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
    let work = move || Starter::default().work(&ordered);
    std::thread::Builder::new().name("rooms".to_owned()).spawn(work)?;
    Ok(kept.insert(orders).clone())
}

#[derive(Default)]
struct Starter {
    spare: Option<Spawned>,
    /// The arguments for the next spare process, if one is wanted and there is none.
    wanted: Option<Arc<[OsString]>>,
}

impl Starter {
    fn work(mut self, ordered: &mpsc::Receiver<Order>) {
        loop {
            let order = match &self.wanted {
                None => ordered.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(_) => ordered.recv_timeout(SPARE_PAUSE),
            };
            match order {
                Ok(Order::Room { arguments, spawned }) => {
                    let _ = spawned.send(self.room(&arguments));
                    self.wanted = Some(arguments);
                }
                Ok(Order::Spare { arguments }) => self.prepare(&arguments),
                Err(RecvTimeoutError::Timeout) => {
                    let wanted = self.wanted.take();
                    wanted.iter().for_each(|arguments| self.prepare(arguments));
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Without a spare, the next room takes longer to begin: nothing else is wrong then.
    fn prepare(&mut self, arguments: &[OsString]) {
        if self.spare.is_none() {
            self.spare = spawn(arguments).ok();
        }
    }

    fn room(&mut self, arguments: &[OsString]) -> io::Result<Spawned> {
        // A spare that was killed serves nobody.
        let lives = |spare: &mut Spawned| matches!(spare.0.try_wait(), Ok(None));
        let spare = self.spare.take().and_then(|mut spare| lives(&mut spare).then_some(spare));
        spare.map_or_else(|| spawn(arguments), Ok)
    }
}

/// Starts the process. Its standard input is its end of the channel: an end of it ends the room.
fn spawn(arguments: &[OsString]) -> io::Result<Spawned> {
    let (ours, theirs) = pair()?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("manyring").args(arguments).env_clear().process_group(0);
    command.stdin(theirs).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok((command.spawn()?, ours))
}
