//! A program of its own that serves a disk: all that it needs of the crates.
//! `cargo run -p manyring --example embed -- disk.sock`, and in another terminal
//! `manyring-bench load blkio --socket disk.sock`; docs/guide/library.md explains it.

use manyring_backend::blk::memory::MemoryDisk;
use manyring_device::blk::{BlkDevice, BlkOptions};
use manyring_engine::{Pool, PoolOptions};
use manyring_transport::vhost_user::{Endpoint, ServeOptions, SocketPermissions, serve};
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::watch;

/// Serves a disk of 64 MiB in memory at `socket` until `stop` turns true.
pub(crate) fn disk(socket: PathBuf, stop: watch::Receiver<bool>) -> Result<(), Box<dyn Error>> {
    // A front-end may cut guest memory away while it is used: this keeps the process alive.
    manyring_memory::install_sigbus_handler();
    // Threads that run queues. They start with the first queue, and sleep while there is no work.
    let pool = Pool::new(PoolOptions::default());
    // Where blocks end. `Disk` is a trait: a disk of your own fits here as well.
    let disk = Arc::new(MemoryDisk::new(64 << 20)?);
    // The device as the guest sees it.
    let options = BlkOptions { name: "mine".into(), num_queues: 2, ..BlkOptions::default() };
    let device = Arc::new(BlkDevice::new(options, disk, pool.clone()));
    // How guests arrive. This thread only negotiates; it touches no request.
    let endpoint = Endpoint::Listen { path: socket, permissions: SocketPermissions::default() };
    let (connected, _is_connected) = watch::channel(false);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(device, endpoint, ServeOptions::default(), connected, stop))?;
    pool.quit();
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let socket = std::env::args_os().nth(1).ok_or("which socket? embed SOCKET")?;
    let (_never, stop) = watch::channel(false);
    disk(socket.into(), stop)
}
