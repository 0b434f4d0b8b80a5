//! Starts the processes of rooms, all on one thread, which lives as long as the house.
//!
//! The kernel kills a room when the thread that has started it ends (`sandbox.rs` asks for that),
//! so a room outlives no house, whatever it was made to do and however the house ends.

use super::channel::pair;
use rustix::fd::OwnedFd;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock, mpsc};
use tokio::sync::oneshot;

/// A process, and the house's end of its channel.
type Spawned = (Child, OwnedFd);

/// A process to start, and where it is awaited.
struct Order {
    arguments: Arc<[OsString]>,
    spawned: oneshot::Sender<io::Result<Spawned>>,
}

/// Starts the process of a room with these arguments.
///
/// # Errors
/// The system has no thread, process or file descriptor.
pub(super) async fn spawned(arguments: Arc<[OsString]>) -> io::Result<Spawned> {
    static ORDERS: OnceLock<Option<mpsc::Sender<Order>>> = OnceLock::new();
    let failed = || io::Error::from(io::ErrorKind::Other);
    let orders = ORDERS.get_or_init(starter).as_ref().ok_or_else(failed)?;
    let (spawned, is_spawned) = oneshot::channel();
    orders.send(Order { arguments, spawned }).map_err(|_| failed())?;
    is_spawned.await.map_err(|_| failed())?
}

/// Starts the thread. `None`: the system has none.
fn starter() -> Option<mpsc::Sender<Order>> {
    let (orders, ordered) = mpsc::channel::<Order>();
    let work = move || {
        for Order { arguments, spawned } in ordered {
            let _ = spawned.send(spawn(&arguments));
        }
    };
    std::thread::Builder::new().name("rooms".to_owned()).spawn(work).ok()?;
    Some(orders)
}

/// Starts the process. Its standard input is its end of the channel: an end of it ends the room.
fn spawn(arguments: &[OsString]) -> io::Result<Spawned> {
    let (ours, theirs) = pair()?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("manyring").args(arguments).env_clear().process_group(0);
    command.stdin(theirs).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok((command.spawn()?, ours))
}
