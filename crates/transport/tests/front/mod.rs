//! A front-end over a real socket, and the device that it talks to: a recorder, which starts no
//! queue.
#![allow(dead_code, reason = "every test program uses its own part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![allow(clippy::disallowed_methods, reason = "the server has a thread, the front-end the test's")]

use manyring_device::{ConfigError, Device, PendingResult, StartError, StateError};
use manyring_engine::{
    Activation, Done, Handler, Home, Moderation, Pool, QueueHandle, QueueStats, StopError, Turn,
    Waits,
};
use manyring_queue::{Base, Chains, Ring};
use manyring_transport::vhost_user::{Endpoint, ServeOptions, serve};
use manyring_wire::vhost_user::{
    F_PROTOCOL_FEATURES, FLAG_NEED_REPLY, FLAG_VERSION, HEADER_SIZE, Header, InflightArea,
    PROTOCOL_F_INFLIGHT_SHMFD, PROTOCOL_F_MTU, PROTOCOL_F_RARP, REQUESTS, Region,
};
use manyring_wire::virtio::VIRTIO_ID_NET;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::cell::Cell;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;
use zerocopy::IntoBytes;

/// Longest wait for an answer.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);
pub(crate) const VERSION_1: u64 = 1 << 32;
pub(crate) const REGION: Region =
    Region { guest_addr: 0, size: 0x1_0000, user_addr: 0x7000_0000, mmap_offset: 0 };

/// How many times more CPU time messages may take in programs that are built for tests.
pub(crate) const SLOWER: u64 = if cfg!(debug_assertions) { 10 } else { 1 };

thread_local! {
    /// The CPU time of the server's thread: only the tests' config writes take any.
    static CPU_TIME: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// The state of the recorder.
pub(crate) const STATE: &[u8] = &[0x5a; 3000];

/// A call that a device got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Features(u64),
    Write(u32, Vec<u8>),
    Rarp([u8; 6]),
    Mtu(u64),
    /// Index, size and base of the queue, whether it is enabled, and which doorbells it has.
    Start(usize, u16, Base, bool, [bool; 3]),
    /// The state of a device is to be taken.
    Restore(Vec<u8>),
}

#[derive(Debug)]
pub(crate) struct Recorder {
    virtio_id: u32,
    /// Its answer to calls that a device may refuse.
    agrees: bool,
    asked: Mutex<Vec<Asked>>,
    /// How many more starts of a queue fail for want of something that the host may have later;
    /// then every start fails for good.
    pub(crate) shortages: AtomicU32,
    /// How many queues it was to stop.
    pub(crate) stops: AtomicU32,
    pub(crate) changes: watch::Sender<u64>,
    /// Its queues run here, and take nothing; `None`: none starts.
    pool: Option<Arc<Pool>>,
}

/// Takes nothing of its ring.
#[derive(Debug)]
struct Idle;

impl<R: Chains> Handler<R> for Idle {
    fn turn(&mut self, _: &mut R, _: &mut Turn<'_, '_>) -> Done {
        Done::default()
    }

    fn waits(&self, _: &R) -> Waits {
        Waits { driver: true, ..Waits::default() }
    }

    fn abandon(&mut self, _: &mut R) {}
}

impl Recorder {
    pub(crate) fn new(virtio_id: u32, agrees: bool, pool: Option<Arc<Pool>>) -> Self {
        let (asked, changes) = (Mutex::default(), watch::Sender::new(0));
        let [shortages, stops] = [AtomicU32::new(0), AtomicU32::new(0)];
        Self { virtio_id, agrees, asked, shortages, stops, changes, pool }
    }

    fn run(&self, pool: &Arc<Pool>, activation: Activation) -> Result<QueueHandle, StartError> {
        let Activation { index, ref queue, enabled, ref kick, ref call, ref err, .. } = activation;
        let doorbells = [kick.is_some(), call.is_some(), err.is_some()];
        self.note(Asked::Start(index, queue.size(), queue.base(), enabled, doorbells));
        let stats = Arc::new(QueueStats::default());
        let queue = activation.running(Idle, stats, Moderation::Off);
        let home = Home { device: self.name().to_owned(), unit: index };
        pool.start(queue, home).ok_or(StartError::NoWorker)
    }

    pub(crate) fn note(&self, asked: Asked) {
        self.asked.lock().unwrap().push(asked);
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }
}

impl Device for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }

    fn virtio_id(&self) -> u32 {
        self.virtio_id
    }

    fn features(&self) -> u64 {
        VERSION_1
    }

    fn protocol_features(&self) -> u64 {
        match self.virtio_id {
            VIRTIO_ID_NET => PROTOCOL_F_RARP | PROTOCOL_F_MTU,
            _ => PROTOCOL_F_INFLIGHT_SHMFD,
        }
    }

    fn queue_count(&self) -> usize {
        2
    }

    fn queue_size_max(&self) -> u16 {
        256
    }

    fn read_config(&self, offset: u32, bytes: &mut [u8]) {
        for (n, byte) in (offset..).zip(bytes) {
            *byte = u8::try_from(n).unwrap();
        }
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), ConfigError> {
        if let Ok(bytes) = bytes.try_into() {
            CPU_TIME.set(CPU_TIME.get() + Duration::from_millis(u64::from_ne_bytes(bytes)));
        }
        self.note(Asked::Write(offset, bytes.to_vec()));
        if self.agrees { Ok(()) } else { Err(ConfigError { offset, len: bytes.len() }) }
    }

    fn set_features(&self, features: u64) -> PendingResult<'_, ()> {
        self.note(Asked::Features(features));
        Box::pin(std::future::ready(()))
    }

    fn config_changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn start(&self, activation: Activation) -> PendingResult<'_, Result<QueueHandle, StartError>> {
        if let Some(pool) = self.pool.clone() {
            return Box::pin(async move { self.run(&pool, activation) });
        }
        let Activation { index, mut queue, enabled, kick, call, err, .. } = activation;
        queue.begin();
        let doorbells = [kick.is_some(), call.is_some(), err.is_some()];
        self.note(Asked::Start(index, queue.size(), queue.base(), enabled, doorbells));
        let less = |left: u32| left.checked_sub(1);
        let lacks = self.shortages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok();
        let error = if lacks { StartError::Image } else { StartError::Backend(Errno::NXIO) };
        Box::pin(std::future::ready(Err(error)))
    }

    fn stop(&self, _: usize, queue: QueueHandle) -> PendingResult<'_, Result<Base, StopError>> {
        self.stops.fetch_add(1, Ordering::Relaxed);
        Box::pin(queue.stop())
    }

    fn send_rarp(&self, mac: [u8; 6]) -> PendingResult<'_, bool> {
        self.note(Asked::Rarp(mac));
        Box::pin(std::future::ready(self.agrees))
    }

    fn set_front_end_mtu(&self, mtu: u64) -> bool {
        self.note(Asked::Mtu(mtu));
        self.agrees
    }

    fn save(&self) -> Vec<u8> {
        STATE.to_vec()
    }

    fn restore<'a>(&'a self, state: &'a [u8]) -> PendingResult<'a, Result<(), StateError>> {
        self.note(Asked::Restore(state.to_vec()));
        let refused = StateError::NoState { size: state.len() };
        Box::pin(std::future::ready(if self.agrees { Ok(()) } else { Err(refused) }))
    }

    fn stats(&self, _: usize) -> Option<Arc<QueueStats>> {
        None
    }
}

/// A front-end that is connected.
pub(crate) struct Front {
    pub(crate) device: Arc<Recorder>,
    pub(crate) socket: Option<UnixStream>,
    server: Option<JoinHandle<()>>,
}

impl Front {
    pub(crate) fn new(virtio_id: u32, agrees: bool) -> Self {
        let device = Arc::new(Recorder::new(virtio_id, agrees, None));
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(TIMEOUT)).unwrap();
        let served: Arc<dyn Device> = device.clone();
        let server = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let (_stop, stopped) = watch::channel(false);
            let endpoint = Endpoint::Inherited { socket: OwnedFd::from(theirs) };
            let options = ServeOptions { cpu_time: || CPU_TIME.get(), ..ServeOptions::default() };
            let connected = watch::Sender::new(false);
            runtime
                .unwrap()
                .block_on(serve(served, endpoint, options, connected, stopped))
                .unwrap();
        });
        let mut front = Self { device, socket: Some(ours), server: Some(server) };
        let features = VERSION_1 | F_PROTOCOL_FEATURES;
        front.send("SET_FEATURES", 0, features.as_bytes(), &[]);
        front.send("GET_PROTOCOL_FEATURES", 0, &[], &[]);
        let offered = front.number();
        front.send("SET_PROTOCOL_FEATURES", 0, offered.as_bytes(), &[]);
        front
    }

    pub(crate) fn send(&self, name: &str, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        send(self.socket.as_ref().unwrap(), (name, flags), payload, fds).unwrap();
    }

    /// The payload of the next reply.
    pub(crate) fn reply(&mut self) -> Vec<u8> {
        let socket = self.socket.as_mut().unwrap();
        let mut header = [0; HEADER_SIZE];
        socket.read_exact(&mut header).unwrap();
        let header = Header::parse(&header).unwrap();
        let mut payload = vec![0; header.size as usize];
        socket.read_exact(&mut payload).unwrap();
        payload
    }

    pub(crate) fn number(&mut self) -> u64 {
        u64::from_ne_bytes(self.reply()[..].try_into().unwrap())
    }

    /// Sends a message and returns its acknowledgement: 0 is success.
    pub(crate) fn ask(&mut self, name: &str, payload: &[u8], fds: &[BorrowedFd<'_>]) -> u64 {
        self.send(name, FLAG_NEED_REPLY, payload, fds);
        self.number()
    }

    /// True if the session ends without an answer.
    pub(crate) fn ends_with(&mut self, name: &str, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        self.send(name, FLAG_NEED_REPLY, payload, fds);
        self.is_ended()
    }

    /// True if the session ends, and nothing is left to read.
    pub(crate) fn is_ended(&mut self) -> bool {
        let is_reset = |error: &std::io::Error| error.kind() == ErrorKind::ConnectionReset;
        let read = self.socket.as_mut().unwrap().read(&mut [0]);
        read.as_ref().map_or_else(is_reset, |len| *len == 0)
    }

    /// Asks for an in-flight region, in a payload of `size` bytes.
    pub(crate) fn new_region(
        &mut self,
        area: InflightArea,
        size: usize,
    ) -> (InflightArea, OwnedFd) {
        self.send("GET_INFLIGHT_FD", 0, &area.as_bytes()[..size], &[]);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = vec![0; HEADER_SIZE + size];
        let socket = self.socket.as_ref().unwrap();
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let received = recvmsg(socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC);
        assert_eq!(received.unwrap().bytes, HEADER_SIZE + size);
        let mut fds = control.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
            _ => Vec::new(),
        });
        let fd = fds.next().unwrap();
        assert!(fds.next().is_none());
        let header = Header::parse(bytes.first_chunk().unwrap()).unwrap();
        assert_eq!(header.size as usize, size);
        let mut answer = InflightArea::default();
        answer.as_mut_bytes()[..size].copy_from_slice(&bytes[HEADER_SIZE..]);
        (answer, fd)
    }

    /// Size, base and addresses of vring `index`, whose ring lies at the start of [`REGION`].
    pub(crate) fn describe(&mut self, index: u32) {
        let base = REGION.user_addr;
        let mut addr = [index, 0].as_bytes().to_vec();
        addr.extend([base, base + 0x2000, base + 0x1000, 0].as_bytes());
        assert_eq!(self.ask("SET_VRING_NUM", [index, 128].as_bytes(), &[]), 0);
        assert_eq!(self.ask("SET_VRING_BASE", [index, 77].as_bytes(), &[]), 0);
        assert_eq!(self.ask("SET_VRING_ADDR", &addr, &[]), 0);
    }

    /// Writes to the config space, which takes `ms` milliseconds of the server's CPU time.
    pub(crate) fn write_for(&mut self, ms: u64) -> u64 {
        self.ask("SET_CONFIG", &costly(ms), &[])
    }

    pub(crate) fn leave(&mut self) -> Vec<Asked> {
        self.socket = None;
        self.server.take().unwrap().join().unwrap();
        self.device.asked()
    }
}

/// Sends a request with these flags.
pub(crate) fn send(
    socket: &UnixStream,
    (name, flags): (&str, u32),
    payload: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let size = u32::try_from(payload.len()).unwrap();
    let header = Header { request: id_of(name), flags: FLAG_VERSION | flags, size }.emit();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let bytes = [&header[..], payload].concat();
    let sent = sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    assert_eq!(sent, bytes.len());
    Ok(())
}

pub(crate) fn id_of(name: &str) -> u32 {
    REQUESTS.iter().find(|row| row.name == name).unwrap().id
}

/// The payload of a config write that takes `ms` milliseconds of the server's CPU time.
pub(crate) fn costly(ms: u64) -> Vec<u8> {
    [[0u32, 8, 0].as_bytes(), ms.as_bytes()].concat()
}

pub(crate) fn doorbell() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK).unwrap()
}

/// True as soon as the doorbell was rung: the device's janitor rings it.
pub(crate) fn rings(doorbell: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(doorbell, PollFlags::IN)];
    let max_wait = Timespec::try_from(TIMEOUT).unwrap();
    poll(&mut fds, Some(&max_wait)) == Ok(1) && rustix::io::read(doorbell, &mut [0; 8]).is_ok()
}

pub(crate) fn memory(size: u64) -> OwnedFd {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, size).unwrap();
    file
}

pub(crate) fn region(region: Region) -> Vec<u8> {
    [&[0; 8], region.as_bytes()].concat()
}
