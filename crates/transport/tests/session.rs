//! A session over a real socket: what a front-end's messages do to the device, and what it is
//! answered. The device is a recorder; it starts no queue.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![allow(clippy::disallowed_methods, reason = "the server has a thread, the front-end the test's")]

use manyring_device::{ConfigError, Device, Later, StartError};

use manyring_engine::{Activation, QueueHandle, QueueStats};
use manyring_queue::{Base, Ring};
use manyring_transport::vhost_user::{Endpoint, ServeOptions, serve};
use manyring_wire::vhost_user::{
    F_PROTOCOL_FEATURES, FLAG_NEED_REPLY, FLAG_VERSION, HEADER_SIZE, Header, InflightArea, LogArea,
    PROTOCOL_F_INFLIGHT_SHMFD, PROTOCOL_F_MTU, PROTOCOL_F_RARP, REQUESTS, Region,
};
use manyring_wire::virtio::{VIRTIO_ID_BLOCK, VIRTIO_ID_NET};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::cell::Cell;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;
use zerocopy::IntoBytes;

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(20);
const VERSION_1: u64 = 1 << 32;
const REGION: Region =
    Region { guest_addr: 0, size: 0x1_0000, user_addr: 0x7000_0000, mmap_offset: 0 };

/// How many times more CPU time messages may take in programs that are built for tests.
const SLOWER: u64 = if cfg!(debug_assertions) { 10 } else { 1 };

thread_local! {
    /// The CPU time of the server's thread: only the tests' config writes take any.
    static CPU_TIME: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// What a device was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Asked {
    Features(u64),
    Write(u32, Vec<u8>),
    Rarp([u8; 6]),
    Mtu(u64),
    /// Index, size and base of the queue, whether it is enabled, and which doorbells it has.
    Start(usize, u16, Base, bool, [bool; 3]),
}

#[derive(Debug)]
struct Recorder {
    virtio_id: u32,
    /// What it answers to what can be refused.
    agrees: bool,
    asked: Mutex<Vec<Asked>>,
    changes: watch::Sender<u64>,
}

impl Recorder {
    fn note(&self, asked: Asked) {
        self.asked.lock().unwrap().push(asked);
    }

    fn asked(&self) -> Vec<Asked> {
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

    fn set_features(&self, features: u64) -> Later<'_, ()> {
        self.note(Asked::Features(features));
        Box::pin(std::future::ready(()))
    }

    fn config_changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn start(&self, activation: Activation) -> Later<'_, Result<QueueHandle, StartError>> {
        let Activation { index, mut queue, enabled, kick, call, err, .. } = activation;
        queue.begin();
        let doorbells = [kick.is_some(), call.is_some(), err.is_some()];
        self.note(Asked::Start(index, queue.size(), queue.base(), enabled, doorbells));
        Box::pin(std::future::ready(Err(StartError::NoWorker)))
    }

    fn send_rarp(&self, mac: [u8; 6]) -> Later<'_, bool> {
        self.note(Asked::Rarp(mac));
        Box::pin(std::future::ready(self.agrees))
    }

    fn set_front_end_mtu(&self, mtu: u64) -> bool {
        self.note(Asked::Mtu(mtu));
        self.agrees
    }

    fn stats(&self, _: usize) -> Option<Arc<QueueStats>> {
        None
    }
}

/// A front-end that is connected.
struct Front {
    device: Arc<Recorder>,
    socket: Option<UnixStream>,
    server: Option<JoinHandle<()>>,
}

impl Front {
    fn new(virtio_id: u32, agrees: bool) -> Self {
        let (asked, changes) = (Mutex::default(), watch::Sender::new(0));
        let device = Arc::new(Recorder { virtio_id, agrees, asked, changes });
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
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

    fn send(&self, name: &str, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let request = REQUESTS.iter().find(|row| row.name == name).unwrap().id;
        let size = u32::try_from(payload.len()).unwrap();
        let header = Header { request, flags: FLAG_VERSION | flags, size }.emit();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let bytes = [&header[..], payload].concat();
        let socket = self.socket.as_ref().unwrap();
        let slices = [IoSlice::new(&bytes)];
        assert_eq!(sendmsg(socket, &slices, &mut control, SendFlags::NOSIGNAL), Ok(bytes.len()));
    }

    /// The payload of the next reply.
    fn reply(&mut self) -> Vec<u8> {
        let socket = self.socket.as_mut().unwrap();
        let mut header = [0; HEADER_SIZE];
        socket.read_exact(&mut header).unwrap();
        let header = Header::parse(&header).unwrap();
        let mut payload = vec![0; header.size as usize];
        socket.read_exact(&mut payload).unwrap();
        payload
    }

    fn number(&mut self) -> u64 {
        u64::from_ne_bytes(self.reply()[..].try_into().unwrap())
    }

    /// Sends a message and returns its acknowledgement: 0 is success.
    fn ask(&mut self, name: &str, payload: &[u8], fds: &[BorrowedFd<'_>]) -> u64 {
        self.send(name, FLAG_NEED_REPLY, payload, fds);
        self.number()
    }

    /// True if the session ends without an answer.
    fn ends_with(&mut self, name: &str, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        self.send(name, FLAG_NEED_REPLY, payload, fds);
        self.is_ended()
    }

    /// True if the session ends, and nothing is left to read.
    fn is_ended(&mut self) -> bool {
        let is_reset = |error: &std::io::Error| error.kind() == ErrorKind::ConnectionReset;
        let read = self.socket.as_mut().unwrap().read(&mut [0]);
        read.as_ref().map_or_else(is_reset, |len| *len == 0)
    }

    /// Asks for an in-flight region, in a payload of `size` bytes.
    fn new_region(&mut self, area: InflightArea, size: usize) -> (InflightArea, OwnedFd) {
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
    fn describe(&mut self, index: u32) {
        let base = REGION.user_addr;
        let mut addr = [index, 0].as_bytes().to_vec();
        addr.extend([base, base + 0x2000, base + 0x1000, 0].as_bytes());
        assert_eq!(self.ask("SET_VRING_NUM", [index, 128].as_bytes(), &[]), 0);
        assert_eq!(self.ask("SET_VRING_BASE", [index, 77].as_bytes(), &[]), 0);
        assert_eq!(self.ask("SET_VRING_ADDR", &addr, &[]), 0);
    }

    /// Writes to the config space, which takes `ms` milliseconds of the server's CPU time.
    fn write_for(&mut self, ms: u64) -> u64 {
        self.ask("SET_CONFIG", &costly(ms), &[])
    }

    fn leave(&mut self) -> Vec<Asked> {
        self.socket = None;
        self.server.take().unwrap().join().unwrap();
        self.device.asked()
    }
}

/// The payload of a config write that takes `ms` milliseconds of the server's CPU time.
fn costly(ms: u64) -> Vec<u8> {
    [[0u32, 8, 0].as_bytes(), ms.as_bytes()].concat()
}

fn doorbell() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK).unwrap()
}

/// True as soon as the doorbell was rung: the device's janitor rings it.
fn rings(doorbell: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(doorbell, PollFlags::IN)];
    let patience = Timespec::try_from(PATIENCE).unwrap();
    poll(&mut fds, Some(&patience)) == Ok(1) && rustix::io::read(doorbell, &mut [0; 8]).is_ok()
}

fn memory(size: u64) -> OwnedFd {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, size).unwrap();
    file
}

fn region(region: Region) -> Vec<u8> {
    [&[0; 8], region.as_bytes()].concat()
}

#[test]
fn what_the_device_refuses_is_acknowledged_with_1_and_the_session_goes_on() {
    for agrees in [true, false] {
        let mut front = Front::new(VIRTIO_ID_NET, agrees);
        assert_eq!(front.ask("SET_OWNER", &[], &[]), 0);
        assert_eq!(front.device.asked(), [Asked::Features(VERSION_1)]);
        let refused = u64::from(!agrees);
        let mac = [1, 2, 3, 4, 5, 6];
        assert_eq!(front.ask("SEND_RARP", &[1, 2, 3, 4, 5, 6, 0, 0], &[]), refused);
        assert_eq!(front.ask("NET_SET_MTU", 1500u64.as_bytes(), &[]), refused);
        let write = [[4u32, 2, 0].as_bytes(), &[8, 9]].concat();
        assert_eq!(front.ask("SET_CONFIG", &write, &[]), refused);
        let asked = [Asked::Rarp(mac), Asked::Mtu(1500), Asked::Write(4, vec![8, 9])];
        assert_eq!(front.device.asked(), asked);
        assert_eq!(front.leave(), [Asked::Features(0)], "nothing of this guest is left");
    }
}

#[test]
fn the_config_space_is_read_from_its_offset_on() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let read = [[20u32, 3, 0].as_bytes(), &[0; 3]].concat();
    front.send("GET_CONFIG", 0, &read, &[]);
    assert_eq!(front.reply(), [[20u32, 3, 0].as_bytes(), &[20, 21, 22]].concat());
}

#[test]
fn requests_of_networks_are_offered_to_networks_only() {
    for (id, offered) in [(VIRTIO_ID_NET, true), (VIRTIO_ID_BLOCK, false)] {
        let mut front = Front::new(id, true);
        front.send("GET_PROTOCOL_FEATURES", 0, &[], &[]);
        let features = front.number();
        assert_eq!(features & (1 << 2 | 1 << 4) == 1 << 2 | 1 << 4, offered);
    }
}

#[test]
fn a_vring_is_handed_to_the_device_with_all_that_was_said() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (kick, call, file) = (doorbell(), doorbell(), memory(REGION.size));
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    front.describe(1);
    assert_eq!(front.ask("SET_VRING_ENABLE", [1u32, 1].as_bytes(), &[]), 0);
    assert_eq!(front.ask("SET_VRING_CALL", 1u64.as_bytes(), &[call.as_fd()]), 0);
    front.device.asked();
    let started = front.ask("SET_VRING_KICK", 1u64.as_bytes(), &[kick.as_fd()]);
    assert_eq!(started, 1, "the device could not");
    let doorbells = [true, true, false];
    assert_eq!(front.device.asked(), [Asked::Start(1, 128, 77.into(), true, doorbells)]);
    // The kick went with the attempt: nothing but a new one starts the vring again.
    assert_eq!(front.ask("SET_VRING_NUM", [1u32, 64].as_bytes(), &[]), 0);
    assert_eq!(front.device.asked(), []);
    let err = doorbell();
    assert_eq!(front.ask("SET_VRING_ERR", 1u64.as_bytes(), &[err.as_fd()]), 0);
    front.ask("SET_VRING_KICK", (1u64 | 1 << 8).as_bytes(), &[]);
    let doorbells = [false, true, true];
    assert_eq!(front.device.asked(), [Asked::Start(1, 64, 77.into(), true, doorbells)]);
    front.send("GET_VRING_BASE", 0, [1u32, 0].as_bytes(), &[]);
    assert_eq!(front.reply(), [1u32, 77].as_bytes());
}

#[test]
fn a_ring_that_is_not_in_memory_is_told_at_its_err_and_starts_when_it_is() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (kick, err, file) = (doorbell(), doorbell(), memory(REGION.size));
    let elsewhere = Region { guest_addr: 1 << 30, user_addr: 0x1000, ..REGION };
    assert_eq!(front.ask("ADD_MEM_REG", &region(elsewhere), &[file.as_fd()]), 0);
    front.describe(0);
    assert_eq!(front.ask("SET_VRING_ERR", 0u64.as_bytes(), &[err.as_fd()]), 0);
    front.device.asked();
    assert_eq!(front.ask("SET_VRING_KICK", 0u64.as_bytes(), &[kick.as_fd()]), 1);
    assert!(rings(&err), "its err was rung");
    assert_eq!(front.device.asked(), []);
    front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]);
    let doorbells = [true, false, true];
    assert_eq!(front.device.asked(), [Asked::Start(0, 128, 77.into(), false, doorbells)]);
}

#[test]
fn memory_that_is_removed_or_replaced_is_gone() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (err, file) = (doorbell(), memory(REGION.size));
    let other = Region { guest_addr: 1 << 30, user_addr: 0x1000, ..REGION };
    front.describe(0);
    assert_eq!(front.ask("SET_VRING_ERR", 0u64.as_bytes(), &[err.as_fd()]), 0);
    let starts = |front: &mut Front| {
        let kick = doorbell();
        front.device.asked();
        front.ask("SET_VRING_KICK", 0u64.as_bytes(), &[kick.as_fd()]);
        !front.device.asked().is_empty()
    };
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    assert_eq!(front.ask("ADD_MEM_REG", &region(other), &[file.as_fd()]), 0);
    assert!(starts(&mut front));
    assert_eq!(front.ask("REM_MEM_REG", &region(REGION), &[]), 0);
    assert!(!starts(&mut front), "its region was removed");
    let table = [2u32.as_bytes(), &[0; 4], other.as_bytes(), REGION.as_bytes()].concat();
    front.ask("SET_MEM_TABLE", &table, &[file.as_fd(), file.as_fd()]);
    assert!(starts(&mut front));
    let table = [1u32.as_bytes(), &[0; 4], other.as_bytes()].concat();
    assert_eq!(front.ask("SET_MEM_TABLE", &table, &[file.as_fd()]), 0);
    assert!(!starts(&mut front), "the table is all there is");
}

#[test]
fn memory_and_doorbells_that_are_none_end_the_session() {
    let (short, file) = (memory(REGION.size - 1), memory(REGION.size));
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    assert!(front.ends_with("ADD_MEM_REG", &region(REGION), &[short.as_fd()]));
    for name in ["SET_VRING_KICK", "SET_VRING_CALL", "SET_VRING_ERR"] {
        let mut front = Front::new(VIRTIO_ID_BLOCK, true);
        assert!(front.ends_with(name, 0u64.as_bytes(), &[file.as_fd()]), "{name}");
    }
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    assert!(front.ends_with("SET_BACKEND_REQ_FD", &[], &[file.as_fd()]));
}

#[test]
fn a_change_of_the_config_space_is_told_on_the_back_end_channel() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    front.device.changes.send_modify(|n| *n += 1);
    assert_eq!(front.ask("SET_BACKEND_REQ_FD", &[], &[theirs.as_fd()]), 0);
    front.device.changes.send_modify(|n| *n += 1);
    let mut bytes = [0; HEADER_SIZE];
    ours.read_exact(&mut bytes).unwrap();
    // BACKEND_CONFIG_CHANGE_MSG, version 1, no payload.
    assert_eq!(bytes[..], *[2u32, 1, 0].as_bytes());
}

#[test]
fn messages_that_cost_much_cpu_time_are_read_when_those_before_are_paid_for() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let began = std::time::SystemTime::now();
    for _ in 0..25 {
        assert_eq!(front.write_for(40 * SLOWER), 0);
    }
    // The credit is used up. Beyond it, a twentieth of the time is theirs.
    assert_eq!(front.write_for(20), 0);
    assert_eq!(front.write_for(1), 0);
    let took = began.elapsed().unwrap();
    assert!(took >= Duration::from_millis(20 * 20), "{took:?}");
    assert_eq!(front.device.asked().len(), 1 + 27, "each was carried out");
}

#[test]
fn a_second_message_that_takes_far_too_much_cpu_time_ends_the_session() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    assert_eq!(front.write_for(60 * SLOWER), 0);
    for _ in 0..10 {
        assert_eq!(front.write_for(40 * SLOWER), 0, "not far too much");
    }
    // The second one is carried out, and answered: what it took is known afterwards.
    assert_eq!(front.write_for(60 * SLOWER), 0);
    assert!(front.is_ended());
    let asked = front.leave();
    assert_eq!(asked.len(), 1 + 12 + 1);
    assert_eq!(asked.last(), Some(&Asked::Features(0)), "the session was torn down");
}

const AREA: InflightArea =
    InflightArea { size: 0, offset: 0, queues: 2, queue_size: 128, padding: [0; 2] };
/// Bytes of the place of a ring of 128 entries.
const PLACE: u64 = (16 + 128 * 16_u64).next_multiple_of(64);

#[test]
fn a_ring_goes_on_from_the_in_flight_region_and_not_from_its_base() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let file = memory(REGION.size);
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    // As the specification says, and as QEMU does.
    for size in [20, 24] {
        let (area, fd) = front.new_region(AREA, size);
        assert_eq!(area, InflightArea { size: 2 * PLACE, ..AREA });
        assert_eq!(fstat(&fd).unwrap().st_size, i64::try_from(2 * PLACE).unwrap());
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        assert_eq!(fcntl_get_seals(&fd), Ok(seals));
        assert_eq!(front.ask("SET_INFLIGHT_FD", area.as_bytes(), &[fd.as_fd()]), 0);
        let (queue, place) = if size == 20 { (0, 0) } else { (1, PLACE) };
        let kick = u64::from(queue);
        front.describe(queue);
        // Nobody has recorded anything: the base counts. The recorder's queues do not run.
        front.ask("SET_VRING_KICK", kick.as_bytes(), &[doorbell().as_fd()]);
        let mut header = [0; 16];
        rustix::io::pread(&fd, &mut header, place).unwrap();
        assert_eq!(header, [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 128, 0, 0, 0, 0, 0]);
        // Chain 3 is in flight: it is owed, and the next one is that after it.
        rustix::io::pwrite(&fd, &[1], place + 16 + 3 * 16).unwrap();
        front.ask("SET_VRING_KICK", kick.as_bytes(), &[doorbell().as_fd()]);
        let index = usize::try_from(queue).unwrap();
        let started =
            |base: u16| Asked::Start(index, 128, base.into(), false, [true, false, false]);
        let asked = front.device.asked();
        assert_eq!(asked[asked.len() - 2..], [started(77), started(1)]);
    }
    // The driver begins anew: so do its rings.
    assert_eq!(front.ask("RESET_DEVICE", &[], &[]), 0);
    front.ask("SET_FEATURES", VERSION_1.as_bytes(), &[]);
    front.describe(1);
    front.ask("SET_VRING_KICK", 1_u64.as_bytes(), &[doorbell().as_fd()]);
    let asked = front.leave();
    let started = Asked::Start(1, 128, 77.into(), true, [true, false, false]);
    assert!(asked.contains(&started), "{asked:?}");
}

#[test]
fn a_ring_without_a_place_in_the_region_is_refused() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let file = memory(REGION.size);
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    let (area, fd) = front.new_region(InflightArea { queues: 1, ..AREA }, 24);
    assert_eq!(front.ask("SET_INFLIGHT_FD", area.as_bytes(), &[fd.as_fd()]), 0);
    front.describe(1);
    assert_eq!(front.ask("SET_VRING_KICK", 1_u64.as_bytes(), &[doorbell().as_fd()]), 1);
    let asked = front.leave();
    assert!(!asked.iter().any(|asked| matches!(asked, Asked::Start(..))), "{asked:?}");
}

#[test]
fn an_in_flight_region_that_cannot_be_one_ends_the_session() {
    let ends = |name: &str, area: InflightArea, fds: &[BorrowedFd<'_>]| {
        let mut front = Front::new(VIRTIO_ID_BLOCK, true);
        assert!(front.ends_with(name, area.as_bytes(), fds), "{name} {area:?}");
        front.leave();
    };
    let file = memory(2 * PLACE);
    let whole = InflightArea { size: 2 * PLACE, ..AREA };
    for area in [
        InflightArea { queues: 0, ..whole },
        InflightArea { queues: u16::MAX, ..whole },
        InflightArea { queue_size: 0, ..whole },
        InflightArea { queue_size: 32769, ..whole },
    ] {
        ends("GET_INFLIGHT_FD", area, &[]);
        ends("SET_INFLIGHT_FD", area, &[file.as_fd()]);
    }
    for area in [
        InflightArea { size: 2 * PLACE - 1, ..whole },
        InflightArea { queue_size: 256, ..whole },
        InflightArea { offset: 64, ..whole },
        InflightArea { offset: u64::MAX - 63, ..whole },
        InflightArea { size: u64::MAX, queue_size: 32768, ..whole },
    ] {
        ends("SET_INFLIGHT_FD", area, &[file.as_fd()]);
    }
    ends("SET_INFLIGHT_FD", whole, &[]);
    ends("SET_INFLIGHT_FD", whole, &[doorbell().as_fd()]);
}

#[test]
fn an_in_flight_region_that_is_not_aligned_has_no_place() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (file, ours) = (memory(REGION.size), memory(4 * PLACE));
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    let area = InflightArea { size: 2 * PLACE, offset: 4, ..AREA };
    assert_eq!(front.ask("SET_INFLIGHT_FD", area.as_bytes(), &[ours.as_fd()]), 0);
    front.describe(0);
    assert_eq!(front.ask("SET_VRING_KICK", 0_u64.as_bytes(), &[doorbell().as_fd()]), 1);
    front.leave();
}

/// The guest has 16 pages: two bytes of a log.
#[test]
fn a_log_that_cannot_be_one_ends_the_session() {
    let file = memory(4096);
    let log = |size, offset| LogArea { size, offset };
    let bad = [log(0, 0), log(1, 0), log(4097, 0), log(2, 4095), log(2, u64::MAX)];
    for area in bad.into_iter().chain([log(u64::MAX, 0), log(u64::MAX, 2), log(1 << 33, 0)]) {
        let mut front = Front::new(VIRTIO_ID_BLOCK, true);
        let memory = memory(REGION.size);
        assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[memory.as_fd()]), 0);
        assert!(front.ends_with("SET_LOG_BASE", area.as_bytes(), &[file.as_fd()]), "{area:?}");
        front.leave();
    }
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    assert!(front.ends_with("SET_LOG_BASE", log(2, 0).as_bytes(), &[doorbell().as_fd()]));
    front.leave();
}

#[test]
fn memory_that_a_log_is_too_short_for_ends_the_session() {
    let mut front = Front::new(VIRTIO_ID_BLOCK, true);
    let (file, log) = (memory(REGION.size), memory(4096));
    assert_eq!(front.ask("ADD_MEM_REG", &region(REGION), &[file.as_fd()]), 0);
    // It is answered with 0, and may lie anywhere in its file.
    let area = LogArea { size: 2, offset: 4094 };
    assert_eq!(front.ask("SET_LOG_BASE", area.as_bytes(), &[log.as_fd()]), 0);
    let high = Region { guest_addr: 0x1_0000, user_addr: 0x7100_0000, ..REGION };
    assert!(front.ends_with("ADD_MEM_REG", &region(high), &[file.as_fd()]));
    front.leave();
}
