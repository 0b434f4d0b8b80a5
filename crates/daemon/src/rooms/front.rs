//! The house's side of a device that a room serves: it listens, accepts, and hands over.

use super::Rooms;
use super::counts::Counts;
use super::house::{Deaf, Room};
use super::message::Told;
use crate::assemble::{Blk, Kind, Made, Part};
use crate::config::plan::{BlkPlan, DiskPlan};
use manyring_backend::blk::{Disk, Handed};
use manyring_device::Device;
use manyring_engine::aside;
use manyring_transport::vhost_user::{Endpoint, ListenError, Listener};
use rustix::fd::OwnedFd;
use serde_json::json;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// Pause before a client, or a room, is tried again.
const RETRY: Duration = Duration::from_millis(200);
/// When it is told that requests of a room that has ended have not.
const PATIENCE: Duration = Duration::from_secs(1);

/// Serves a device from a room until `stop` turns true.
///
/// # Errors
/// [`ListenError`]: the socket cannot be listened on; nothing was created.
pub(crate) async fn serve(
    rooms: &Rooms,
    made: &Made,
    (blk, domain): (&BlkPlan, &str),
    endpoint: Endpoint,
    mut stop: watch::Receiver<bool>,
) -> Result<(), ListenError> {
    let mut stopping = stop.clone();
    let mut listener = match endpoint {
        Endpoint::Listen { path, permissions } => Listener::bind(&path, permissions)?,
        Endpoint::Bound(listener) => listener,
        _ => return Err(io_error(io::ErrorKind::InvalidInput.into())),
    };
    let Kind::Blk(Blk::Virtio(shown)) = &made.part.kind else { return Ok(()) };
    let counts = Counts::new(shown.clone(), made.part.queue_count());
    let counts = Arc::new(counts.map_err(|errno| io_error(errno.into()))?);
    let (disk, part) = (shown.disk().clone(), made.part.clone());
    let mut front = Front { rooms, blk, domain, disk, part, counts, room: None };
    let device = &blk.device.name;
    tracing::info!(device, room = domain, path = %listener.path(), "listening");
    let name = listener.take_name();
    let socket = listener.into_socket();
    let mut changes = shown.config_changes();
    changes.mark_unchanged();
    loop {
        tokio::select! {
            biased;
            () = stopped(&mut stop) => break,
            Ok(()) = changes.changed() => {
                front.room.iter().for_each(|room| room.measure(device));
            }
            stream = accept(&socket, device) => {
                tokio::select! {
                    () = front.hand_over(stream) => {}
                    () = stopped(&mut stopping) => break,
                }
            }
        }
    }
    drop(name);
    front.close().await;
    // With the socket the kernel closes what unaccepted clients have sent.
    let socket = socket.into_std();
    aside(move || drop(socket)).await;
    Ok(())
}

fn io_error(source: io::Error) -> ListenError {
    ListenError::Io { path: Path::new("a room").to_path_buf(), source }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn accept(socket: &UnixListener, device: &str) -> UnixStream {
    loop {
        match socket.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::warn!(device, %error, "cannot accept");
                sleep(RETRY).await;
            }
        }
    }
}

struct Front<'a> {
    rooms: &'a Rooms,
    blk: &'a BlkPlan,
    domain: &'a str,
    disk: Arc<dyn Disk>,
    part: Part,
    counts: Arc<Counts>,
    /// The room that was given the device.
    room: Option<Arc<Room>>,
}

impl Front<'_> {
    /// Hands a client to the room, once that one is there and has the device.
    async fn hand_over(&mut self, stream: UnixStream) {
        let name = &self.blk.device.name;
        let Ok(stream) = stream.into_std() else { return };
        let room = self.rooms.of(self.domain).await;
        if !room.has(name)
            && let Err(error) = self.give(&room).await
        {
            tracing::error!(device = name, room = self.domain, error, "not given to its room");
            aside(move || drop(stream)).await;
            sleep(RETRY).await;
            return;
        }
        self.room = Some(room.clone());
        if let Err(Deaf) = room.connect(name, stream.into()) {
            tracing::warn!(device = name, room = self.domain, "client refused: the room is busy");
        }
    }

    async fn give(&self, room: &Room) -> Result<(), String> {
        let (disk, queues) = (self.disk.clone(), self.blk.num_queues);
        self.let_go().await?;
        let handed = aside(move || disk.image().map(|image| image.hand(queues)).transpose()).await;
        let handed = handed.ok_or("the daemon has failed")?.map_err(|errno| errno.to_string())?;
        let has_image = handed.is_some();
        let mut fds: Vec<OwnedFd> = vec![self.counts.begin().map_err(|errno| errno.to_string())?];
        if let Some(Handed { file, flushes }) = handed {
            fds.push(file);
            fds.extend(flushes);
        }
        let (device, keys) = (self.blk.device.name.clone(), keys(self.blk));
        let told = Told::Device { device, keys, has_image };
        let shown = (self.part.connected.clone(), self.counts.clone());
        room.give(told, fds, shown).map_err(|Deaf| "the room does not read".to_owned())
    }

    /// Returns when no room has the image any more, and no request of one is under way.
    async fn let_go(&self) -> Result<(), String> {
        let began = Instant::now();
        let mut is_told = false;
        loop {
            let disk = self.disk.clone();
            let is_let_go = aside(move || disk.image().map_or(Ok(true), |i| i.is_let_go())).await;
            match is_let_go {
                Some(Ok(true)) => return Ok(()),
                Some(Ok(false)) => {}
                Some(Err(errno)) => return Err(errno.to_string()),
                None => return Err("the daemon has failed".to_owned()),
            }
            if began.elapsed() > PATIENCE && !std::mem::replace(&mut is_told, true) {
                let (device, room) = (&self.blk.device.name, self.domain);
                tracing::warn!(
                    device,
                    room,
                    "requests of a room that has ended are still waited for"
                );
            }
            sleep((began.elapsed() / 8).clamp(Duration::from_millis(1), RETRY)).await;
        }
    }

    /// Takes the device from its room. The image's lock is let go of when this returns, so the
    /// room's requests must have ended.
    async fn close(&mut self) {
        let Some(room) = self.room.take() else { return };
        room.remove(&self.blk.device.name).await;
        let counts = self.counts.clone();
        aside(move || counts.end()).await;
        if let Err(error) = self.let_go().await {
            tracing::warn!(device = self.blk.device.name, error, "the image is let go of");
        }
    }
}

/// The keys of the device as the control API takes them: the room reads what it is given by the
/// same door. Its socket is the house's.
fn keys(blk: &BlkPlan) -> String {
    let mut keys = json!({
        "kind": "blk",
        "socket_path": "handed",
        "handshake_timeout": blk.device.handshake_timeout,
        "memory_on_disk": blk.device.memory_on_disk,
        "moderation": blk.device.moderation,
        "read_only": blk.read_only,
        "logical_block_size": blk.logical_block_size,
        "num_queues": blk.num_queues,
        "queue_size": blk.queue_size,
        "serial": blk.serial,
        "cache": if blk.writeback { "writeback" } else { "writethrough" },
        "on_full": blk.on_full,
        "fault": blk.fault,
        "memory_max": blk.device.memory_max.map(|bytes| bytes.to_string()),
    });
    match &blk.disk {
        DiskPlan::File { direct, .. } => {
            keys["file"] = "handed".into();
            keys["direct"] = (*direct).into();
        }
        DiskPlan::Null { size } | DiskPlan::Memory { size } => {
            keys["null"] = size.to_string().into();
        }
    }
    keys.to_string()
}
