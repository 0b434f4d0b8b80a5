//! `manyring room`: the process of a domain. It serves what it is given, and ends with its channel.

use super::channel::Channel;
use super::counts;
use super::message::{self, Heard, Told};
use crate::assemble::{Made, Opened};
use crate::config::plan::{DaemonPlan, DiskPlan, Wanted};
use crate::house::{Tasks, raise_fd_limit};
use crate::limits::Groups;
use crate::{config, signals};
use manyring_backend::blk::file::FileDisk;
use manyring_backend::blk::null::NullDisk;
use manyring_backend::blk::uring::UringDisk;
use manyring_backend::blk::{Disk, Handed, Image};
use manyring_engine::{Pool, PoolOptions, aside};
use manyring_memory::{MemoryFiles, MemoryRules};
use manyring_transport::vhost_user::{Endpoint, ServeOptions};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::mpsc;

/// Clients of one device that can wait.
const CLIENTS_MAX: usize = 16;
/// Longest wait for what is under way when the house is gone.
const QUIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Serves until the house is gone.
///
/// # Errors
/// One line: the room cannot begin, or the house says what is no message.
pub(crate) async fn run(plan: &DaemonPlan) -> Result<(), String> {
    manyring_memory::install_sigbus_handler();
    raise_fd_limit();
    // The house ends its rooms: a signal to the whole group is its own affair.
    let _outlived = (signals::outlive(false)?, signals::Ends::new()?);
    let socket = std::io::stdin().as_fd().try_clone_to_owned();
    let channel = socket.and_then(Channel::new).map_err(|error| format!("channel: {error}"))?;
    let (uring, polling) = (plan.io_uring, plan.polling.law());
    let pool = Pool::new(PoolOptions { workers_max: plan.workers, polling, uring });
    pool.has_ring().ok_or("no worker thread can be started")?;
    manyring_memory::guard_memory();
    let balance = tokio::spawn(pool.clone().balance());
    let channel = Arc::new(channel);
    let mut room =
        Inside { channel, pool, uring, tasks: Tasks::default(), devices: HashMap::new() };
    room.say(&Heard::Ready {}).await;
    let ended = room.obey().await;
    balance.abort();
    room.tasks.stop_all();
    let stopped = async { while room.tasks.ended().await.is_some() {} };
    let _ = tokio::time::timeout(QUIT_TIMEOUT, stopped).await;
    ended
}

struct Inside {
    channel: Arc<Channel>,
    pool: Arc<Pool>,
    uring: bool,
    tasks: Tasks,
    devices: HashMap<String, Device>,
}

struct Device {
    made: Made,
    clients: mpsc::Sender<UnixStream>,
    counters: OwnedFd,
}

impl Inside {
    async fn say(&self, heard: &Heard) {
        say(&self.channel, heard).await;
    }

    /// Does what the house says, until it is gone.
    async fn obey(&mut self) -> Result<(), String> {
        loop {
            let came =
                self.channel.receive(true).await.map_err(|error| format!("house: {error}"))?;
            let Some((bytes, mut fds)) = came else { return Ok(()) };
            let told = message::parse(&bytes).map_err(|error| format!("house: {error}"))?;
            match told {
                Told::Device { device, keys, has_image } => {
                    self.add(&device, &keys, has_image, fds).await?;
                }
                Told::Client { device } => self.connect(&device, fds.pop()),
                Told::Remove { device } => self.remove(device),
                Told::Measure { device } => self.measure(&device),
                Told::Count { number } => {
                    for Device { made, counters, .. } in self.devices.values() {
                        counts::write(counters, &*made.device, made.part.queue_count());
                    }
                    self.say(&Heard::Counted { number }).await;
                }
            }
        }
    }

    async fn add(
        &mut self,
        name: &str,
        keys: &str,
        has_image: bool,
        mut fds: Vec<OwnedFd>,
    ) -> Result<(), String> {
        let wanted = config::device(name, keys)?;
        if fds.is_empty() || has_image && fds.len() < 3 {
            return Err(format!("house: {} file descriptors for a device", fds.len()));
        }
        let counters = fds.remove(0);
        let (asked, uring) = (wanted.clone(), self.uring);
        let opened = aside(move || opened(&asked, has_image.then_some(fds), uring)).await;
        let opened = opened.ok_or("a device cannot be put together")??;
        // A disk with a limit is the daemon's own: what a group shares is not in a room.
        let made = wanted.made(opened, (&self.pool, &Groups::default()));
        let plan = wanted.plan();
        let files = match plan.memory_on_disk {
            true => MemoryFiles::LocalDisk,
            false => MemoryFiles::InMemory,
        };
        let memory = MemoryRules::from(files);
        let bytes_max = plan.memory_max.unwrap_or(memory.bytes_max);
        let options = ServeOptions {
            handshake_timeout: Duration::from_secs(plan.handshake_timeout),
            memory: MemoryRules { bytes_max, ..memory },
            ..ServeOptions::default()
        };
        let (clients, handed) = mpsc::channel(CLIENTS_MAX);
        self.tasks.serve(&made, Endpoint::Handed(handed), options);
        self.tell_of_sessions(name, &made);
        self.devices.insert(name.to_owned(), Device { made, clients, counters });
        Ok(())
    }

    fn tell_of_sessions(&self, name: &str, made: &Made) {
        let (channel, device) = (self.channel.clone(), name.to_owned());
        let mut connected = made.part.connected.subscribe();
        tokio::spawn(async move {
            while connected.changed().await.is_ok() {
                let is_open = *connected.borrow_and_update();
                say(&channel, &Heard::Session { device: device.clone(), is_open }).await;
            }
        });
    }

    fn connect(&self, device: &str, socket: Option<OwnedFd>) {
        let (Some(device), Some(socket)) = (self.devices.get(device), socket) else { return };
        let stream = std::os::unix::net::UnixStream::from(socket);
        let Ok(stream) = stream.set_nonblocking(true).and_then(|()| UnixStream::from_std(stream))
        else {
            return;
        };
        if device.clients.try_send(stream).is_err() {
            tracing::warn!(device = device.made.part.name(), "client refused: too many wait");
        }
    }

    /// Stops a device, and tells when all that it had is closed.
    fn remove(&mut self, name: String) {
        let Some(device) = self.devices.remove(&name) else { return };
        let stopping = self.tasks.stop(&name);
        let channel = self.channel.clone();
        tokio::spawn(async move {
            if let Some(mut stopping) = stopping {
                while stopping.changed().await.is_ok() {}
            }
            let Device { made, counters, .. } = device;
            counts::write(&counters, &*made.device, made.part.queue_count());
            aside(move || drop((made, counters))).await;
            say(&channel, &Heard::Removed { device: name }).await;
        });
    }

    /// Takes the size of a device's file anew; its guest is told.
    fn measure(&self, name: &str) {
        let Some(device) = self.devices.get(name) else { return };
        let (part, name) = (device.made.part.clone(), name.to_owned());
        tokio::spawn(aside(move || {
            if let crate::assemble::Kind::Blk(blk) = &part.kind
                && let Err(errno) = blk.resize(None)
            {
                tracing::warn!(device = name, %errno, "cannot resize");
            }
        }));
    }
}

async fn say(channel: &Channel, heard: &Heard) {
    if let Ok(bytes) = message::emit(heard) {
        // The house is gone: the next look at the channel shows it.
        let _ = channel.send(&bytes, &[]).await;
    }
}

/// The disk of a device, of the descriptions that were given or of none.
fn opened(wanted: &Wanted, given: Option<Vec<OwnedFd>>, uring: bool) -> Result<Opened, String> {
    let Wanted::Blk(blk) = wanted else { return Err("only disks are served by rooms".to_owned()) };
    let disk: Arc<dyn Disk> = match (&blk.disk, given) {
        (DiskPlan::Null { size }, None) => Arc::new(NullDisk::new(*size)),
        (DiskPlan::File { direct, .. }, Some(mut given)) => {
            let handed = Handed { file: given.remove(0), flushes: given };
            let image = Image::handed(handed, (blk.read_only, *direct));
            let image = image.map_err(|error| error.to_string())?;
            match uring {
                true => Arc::new(UringDisk::new(image).map_err(|error| error.to_string())?),
                false => Arc::new(FileDisk::new(image)),
            }
        }
        _ => return Err("the house has sent what does not belong to the disk".to_owned()),
    };
    wanted.decorated(Opened::Disk(disk)).map_err(|error| error.to_string())
}
