//! A ring that holds more requests than a queue takes at once: the rest waits in the ring, costs
//! nothing there, and is served as the disk completes requests.

use super::*;
use crate::blk::IN_FLIGHT_MAX;
use manyring_backend::blk::{Burst, Completion, DiskQueue, Geometry};
use manyring_backend::sys::uring::Ring;
use manyring_engine::Activation;
use manyring_engine::Order;
use manyring_engine::QueueIo;
use manyring_engine::RunningQueue;
use manyring_engine::policy::polling::Decision;
use manyring_engine::solo::{EventSource, Woken};
use manyring_engine::solo::{Happened, Run};
use manyring_memory::Words;
use manyring_queue::Ring as _;
use rustix::io::Errno;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU16};
use std::task::{Context, Wake, Waker};
use tokio::sync::{mpsc, oneshot};

pub(super) const RING: u16 = 32768;
/// More than a queue takes at once, twice.
const REQUESTS: u16 = 3000;
/// Where the ring of this test lies; header and status lie behind it.
pub(super) const ADDRESSES: RingAddresses =
    RingAddresses { descriptor: 0, available: 0x8_0000, used: 0xa_0000 };
pub(super) const MEMORY: usize = 1 << 20;
pub(super) const BEHIND: u64 = (1 << 20) - 4096;

/// A worker that looks on.
const LOOK: Decision = Decision::Look { reach_ns: 32_000 };

/// A disk that answers when its gate is open.
#[derive(Debug)]
struct GatedDisk(Arc<AtomicBool>);

#[derive(Debug)]
struct GatedQueue {
    is_open: Arc<AtomicBool>,
    held: Vec<u32>,
}

impl Disk for GatedDisk {
    fn geometry(&self) -> Geometry {
        NullDisk::new(DISK_SIZE).geometry()
    }

    fn open_queue(&self, _has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        Ok(Box::new(GatedQueue { is_open: self.0.clone(), held: Vec::new() }))
    }

    fn resize(&self, _size: Option<u64>) -> Result<Geometry, Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn kind(&self) -> &'static str {
        "gated"
    }
}

impl DiskQueue for GatedQueue {
    fn submit(&mut self, burst: &Burst, _ring: Option<&mut Ring>, _done: &mut Vec<Completion>) {
        self.held.extend(burst.iter().map(|(request, _)| request.token));
    }

    fn reap(&mut self, done: &mut Vec<Completion>) -> bool {
        if self.is_open.load(Ordering::Relaxed) {
            done.extend(self.held.drain(..).map(|token| Completion { token, result: Ok(()) }));
        }
        false
    }
}

/// A full ring, and the queue that serves it.
fn rig(disk: &GatedDisk) -> (Arc<Mapping>, DriverQueue, RunningQueue<DeviceQueue, BlkQueue>) {
    rig_with(disk, REQUESTS, RingFeatures::default())
}

/// A ring with this many requests, and the queue that serves it.
pub(super) fn rig_with(
    disk: &dyn Disk,
    requests: u16,
    features: RingFeatures,
) -> (Arc<Mapping>, DriverQueue, RunningQueue<DeviceQueue, BlkQueue>) {
    rig_in(Mapping::anonymous(MEMORY as u64).unwrap(), disk, requests, features)
}

/// As [`rig`], with the guest's memory in a mapping that the test has made.
pub(super) fn rig_in(
    mapping: Mapping,
    disk: &dyn Disk,
    requests: u16,
    features: RingFeatures,
) -> (Arc<Mapping>, DriverQueue, RunningQueue<DeviceQueue, BlkQueue>) {
    let mapping = Arc::new(mapping);
    let (config, memory) = ring_in(&mapping, features);
    let mut driver = DriverQueue::new(config, &memory).unwrap();
    let header = mapping.slice(usize::try_from(BEHIND).unwrap(), 16).unwrap();
    header.write_from(&[&VIRTIO_BLK_T_FLUSH.to_le_bytes()[..], &[0; 12]].concat());
    for _ in 0..requests {
        driver.add(&[(BEHIND, 16)], &[(BEHIND + 64, 1)]).unwrap();
    }
    driver.publish();
    let queue = serve_in(&mapping, disk, features, None);
    (mapping, driver, queue)
}

/// The queue of a disk that answers nothing before `gate` is open; it has taken one request.
struct Gated {
    gate: Arc<AtomicBool>,
    mapping: Arc<Mapping>,
    driver: DriverQueue,
    queue: RunningQueue<DeviceQueue, BlkQueue>,
    wait: Wait,
}

fn gated() -> Gated {
    let gate = Arc::new(AtomicBool::new(false));
    let (mapping, driver, mut queue) =
        rig_with(&GatedDisk(gate.clone()), 1, RingFeatures::default());
    let mut wait = Wait::new(false).unwrap();
    queue.attach(&mut QueueIo::new(&mut wait, 0, 0, 0));
    assert!(turn(&mut queue, &mut wait, 0));
    Gated { gate, mapping, driver, queue, wait }
}

fn ring_in(mapping: &Arc<Mapping>, features: RingFeatures) -> (QueueConfig, Arc<GuestMemory>) {
    let spec = RegionSpec { guest_addr: 0, size: MEMORY as u64, user_addr: 0, mmap_offset: 0 };
    let memory = Arc::new(GuestMemory::default().with_mapping(spec, mapping.clone()).unwrap());
    (QueueConfig { size: RING, addresses: ADDRESSES, base: 0.into(), features }, memory)
}

/// A queue that serves the ring in this mapping, and goes on from an in-flight region.
pub(super) fn serve_in(
    mapping: &Arc<Mapping>,
    disk: &dyn Disk,
    features: RingFeatures,
    region: Option<Words>,
) -> RunningQueue<DeviceQueue, BlkQueue> {
    let (config, memory) = ring_in(mapping, features);
    let device = Guest::plain().device;
    device.shared.capacity.store(1 << 30, Ordering::Relaxed);
    let blk = BlkQueue::new(disk.open_queue(false).unwrap(), device.shared.clone(), memory.clone());
    let mut queue = DeviceQueue::unread(config, memory).unwrap().recorded(region, None);
    queue.begin();
    let activation = Activation {
        index: 0,
        queue,
        addresses: ADDRESSES,
        kick: Some(manyring_engine::Kick::new(eventfd()).unwrap()),
        call: None,
        err: None,
        enabled: true,
        features: 0,
        events: mpsc::channel(1).0,
    };
    RunningQueue::new(activation, blk, Arc::new(QueueStats::default()))
}

/// A turn of the queue at the time `now_ns`. True if there was work.
fn turn(queue: &mut RunningQueue<DeviceQueue, BlkQueue>, wait: &mut Wait, now_ns: u64) -> bool {
    queue.turn(&mut QueueIo::new(wait, 0, 0, now_ns)).worked
}

/// True if the queue settles at the time `now_ns`.
fn settles(
    queue: &mut RunningQueue<DeviceQueue, BlkQueue>,
    wait: &mut Wait,
    looks_on: bool,
    now_ns: u64,
) -> bool {
    queue.settle(LOOK, looks_on, &mut QueueIo::new(wait, 0, 0, now_ns))
}

fn eventfd() -> rustix::fd::OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap()
}

#[test]
fn a_queue_awaits_its_disk_while_it_has_requests_there() {
    let disk = GatedDisk(Arc::default());
    let (_mapping, _driver, mut queue) = rig_with(&disk, 2, RingFeatures::default());
    let mut wait = Wait::new(false).unwrap();
    assert!(!queue.awaits_disk());
    queue.turn(&mut QueueIo::new(&mut wait, 0, 0, 0));
    assert!(queue.awaits_disk());
    assert_eq!(queue.stats().in_flight.value(), 2);
    disk.0.store(true, Ordering::Relaxed);
    queue.turn(&mut QueueIo::new(&mut wait, 0, 0, 0));
    assert!(!queue.awaits_disk(), "the disk has answered");
    assert_eq!(queue.stats().in_flight.value(), 0);
}

#[test]
fn a_queue_takes_a_bounded_number_of_requests_at_once_and_sleeps_until_it_has_room_again() {
    let gate = Arc::new(AtomicBool::new(false));
    let (_mapping, mut driver, mut queue) = rig(&GatedDisk(gate.clone()));
    let mut wait = Wait::new(false).unwrap();
    queue.attach(&mut QueueIo::new(&mut wait, 0, 0, 0));
    let late = 1_000_000_000;
    while turn(&mut queue, &mut wait, 0) {}
    let in_flight = queue.stats().in_flight.value();
    assert_eq!(in_flight, u64::from(IN_FLIGHT_MAX), "of {REQUESTS} in the ring");
    // More in the ring is no reason to go on looking at it.
    assert!(settles(&mut queue, &mut wait, false, late));
    assert!(!queue.is_hot());
    // Neither is a turn in which the disk has done nothing, for whatever reason it was taken.
    queue.wake(late);
    assert!(!turn(&mut queue, &mut wait, 2 * late));
    assert!(
        settles(&mut queue, &mut wait, true, 2 * late),
        "its worker looks at other rings, and not for this queue"
    );
    assert!(!turn(&mut queue, &mut wait, 2 * late) && !queue.is_hot());
    gate.store(true, Ordering::Relaxed);
    // As an event of the disk does.
    queue.wake(late);
    assert!(turn(&mut queue, &mut wait, late), "what the disk has done is returned");
    let is_settled = settles(&mut queue, &mut wait, false, 3 * late);
    assert!(!is_settled && queue.is_hot(), "there is room: the ring is looked at without a kick");
    while turn(&mut queue, &mut wait, late) {}
    let returned = std::iter::from_fn(|| driver.take_used()).count();
    assert_eq!((returned, queue.stats().in_flight.value()), (usize::from(REQUESTS), 0));
    // Now the next work is the driver's to bring.
    assert!(settles(&mut queue, &mut wait, false, 2 * late));
    assert!(driver.add(&[(BEHIND, 16)], &[(BEHIND + 64, 1)]).is_some() && driver.publish());
}

#[test]
fn a_queue_takes_no_more_while_the_bytes_in_flight_are_many_and_one_request_may_have_more() {
    // Each descriptor names the same mebibyte.
    for (mebibytes, expected) in [(8, 8), (5, 13), (63, 2), (100, 1)] {
        let gate = Arc::new(AtomicBool::new(false));
        let disk = GatedDisk(gate.clone());
        let (mapping, mut driver, mut queue) = rig_with(&disk, 0, RingFeatures::default());
        let header = mapping.slice(usize::try_from(BEHIND).unwrap(), 16).unwrap();
        header.write_from(&[0; 16]);
        let writable = [vec![(0, 1 << 20); mebibytes], vec![(BEHIND + 64, 1)]].concat();
        for _ in 0..32 {
            driver.add(&[(BEHIND, 16)], &writable).unwrap();
        }
        driver.publish();
        let mut wait = Wait::new(false).unwrap();
        queue.attach(&mut QueueIo::new(&mut wait, 0, 0, 0));
        while turn(&mut queue, &mut wait, 0) {}
        assert_eq!(queue.stats().in_flight.value(), expected, "of {mebibytes} MiB each");
        assert!(settles(&mut queue, &mut wait, false, 1_000_000_000));
        gate.store(true, Ordering::Relaxed);
        queue.wake(0);
        // The disk writes nothing: the ring, which lies in the same memory, stays whole.
        while turn(&mut queue, &mut wait, 0) {}
        assert_eq!(std::iter::from_fn(|| driver.take_used()).count(), 32, "each once");
        assert_eq!(queue.stats().in_flight.value(), 0);
    }
}

#[test]
fn a_queue_that_ends_with_requests_in_flight_gives_them_up() {
    let (_mapping, mut driver, mut queue) = rig(&GatedDisk(Arc::default()));
    let (mut wait, stats) = (Wait::new(false).unwrap(), queue.stats().clone());
    queue.attach(&mut QueueIo::new(&mut wait, 0, 0, 0));
    assert!(turn(&mut queue, &mut wait, 0));
    assert!(stats.in_flight.value() > 0);
    // A debug build panics at a chain that is neither returned nor given up.
    drop(queue);
    assert_eq!((stats.in_flight.value(), stats.running.value()), (0, 0));
    assert!(driver.take_used().is_none(), "nobody knows what became of them");
}

#[test]
fn a_queue_whose_disk_has_answered_is_looked_at_again_without_a_kick() {
    let Gated { gate, mapping: _mapping, mut driver, mut queue, mut wait } = gated();
    let late = 1_000_000_000;
    assert!(settles(&mut queue, &mut wait, false, late));
    assert!(!queue.is_hot());
    gate.store(true, Ordering::Relaxed);
    let source = EventSource::Disk { slot: 0, token: 0 };
    let answer = Woken { source, result: 0, ended: false };
    queue.on_event(Happened::Disk(0), answer, &mut QueueIo::new(&mut wait, 0, 0, late));
    assert!(turn(&mut queue, &mut wait, late));
    assert!(driver.take_used().is_some());
    // The driver sends its next request upon this answer: the worker is looking for it.
    assert!(queue.is_hot());
    assert!(!settles(&mut queue, &mut wait, false, late + 1000));
    driver.add(&[(BEHIND, 16)], &[(BEHIND + 64, 1)]).unwrap();
    assert!(!driver.publish(), "the driver is asked for no kick meanwhile");
    assert!(turn(&mut queue, &mut wait, late + 2000));
}

/// Looks at the used index when it is woken.
struct Seen {
    mapping: Arc<Mapping>,
    index: AtomicU16,
}

impl Wake for Seen {
    fn wake(self: Arc<Self>) {
        let index = self.mapping.slice(0xa_0002, 2).and_then(|index| index.read_array());
        self.index.store(u16::from_le_bytes(index.unwrap()), Ordering::Relaxed);
    }
}

#[test]
fn a_queue_that_is_disabled_is_answered_when_its_ring_is_written_no_more() {
    let Gated { gate, mapping, mut driver, mut queue, mut wait } = gated();
    let (fence, mut answer) = oneshot::channel();
    queue.heed(Order::Enable(false, fence), &mut QueueIo::new(&mut wait, 0, 0, 0));
    let seen = Arc::new(Seen { mapping, index: AtomicU16::new(u16::MAX) });
    let waker = Waker::from(seen.clone());
    assert!(Pin::new(&mut answer).poll(&mut Context::from_waker(&waker)).is_pending());
    gate.store(true, Ordering::Relaxed);
    assert!(turn(&mut queue, &mut wait, 1));
    assert_eq!(answer.try_recv(), Ok(Ok(())));
    assert_eq!(seen.index.load(Ordering::Relaxed), 1, "the driver may have its ring back by then");
    assert!(driver.take_used().is_some());
}

/// The least time in which a queue obeys an order of memory, once it has served a flush whose chain
/// begins at descriptor `head`.
fn order_of_memory(disk: &dyn Disk, is_ring: bool, head: u16) -> u64 {
    let mapping = Arc::new(Mapping::anonymous(MEMORY as u64).unwrap());
    let spec = RegionSpec { guest_addr: 0, size: MEMORY as u64, user_addr: 0, mmap_offset: 0 };
    let memory = Arc::new(GuestMemory::default().with_mapping(spec, mapping.clone()).unwrap());
    let (addresses, features) = (ADDRESSES, RingFeatures::default());
    let config = QueueConfig { size: RING, addresses, base: 0.into(), features };
    let write = |at: u64, bytes: &[u8]| {
        mapping.slice(usize::try_from(at).unwrap(), bytes.len()).unwrap().write_from(bytes);
    };
    write(BEHIND, &[&VIRTIO_BLK_T_FLUSH.to_le_bytes()[..], &[0; 12]].concat());
    for (index, addr, len, flags) in [(head, BEHIND, 16u32, 1u16), (head + 1, BEHIND + 64, 1, 2)] {
        let next = (head + 1).to_le_bytes();
        let words = [&addr.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next];
        write(u64::from(index) * 16, &words.concat());
    }
    write(addresses.available + 4, &head.to_le_bytes());
    write(addresses.available + 2, &1u16.to_le_bytes());
    let shared = Guest::plain().device.shared.clone();
    let blk = BlkQueue::new(disk.open_queue(is_ring).unwrap(), shared, memory.clone());
    let activation = Activation {
        index: 0,
        queue: DeviceQueue::new(config, memory.clone()).unwrap(),
        addresses,
        kick: Some(manyring_engine::Kick::new(eventfd()).unwrap()),
        call: None,
        err: None,
        enabled: true,
        features: 0,
        events: mpsc::channel(1).0,
    };
    let stats = Arc::new(QueueStats::default());
    let mut queue = RunningQueue::new(activation, blk, stats.clone());
    let (mut wait, mut woken) = (Wait::new(is_ring).unwrap(), Vec::new());
    queue.attach(&mut QueueIo::new(&mut wait, 0, 0, 0));
    turn(&mut queue, &mut wait, 0);
    while stats.requests.value() == 0 {
        wait.sleep(&mut woken, Some(std::time::Duration::from_millis(100)));
        for event in woken.drain(..) {
            if let EventSource::Disk { token, .. } = event.source {
                let io = &mut QueueIo::new(&mut wait, 0, 0, 0);
                queue.on_event(Happened::Disk(token), event, io);
            }
        }
        turn(&mut queue, &mut wait, 0);
    }
    let mut obey = || {
        let (fence, mut answer) = oneshot::channel();
        let order = Order::Memory(memory.clone(), addresses, fence);
        let began_ns = wait.now_ns();
        queue.heed(order, &mut QueueIo::new(&mut wait, 0, 0, 0));
        let took_ns = wait.now_ns() - began_ns;
        assert!(answer.try_recv().is_ok());
        took_ns
    };
    // The first one lets go of what was served before.
    obey();
    let least = (0..100).map(|_| obey()).min().unwrap();
    queue.detach(&mut QueueIo::new(&mut wait, 0, 0, 0));
    least
}

#[test]
fn an_order_of_memory_takes_no_longer_for_requests_that_are_long_done() {
    use manyring_backend::blk::{Image, ImageOptions, uring::UringDisk};
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(DISK_SIZE).unwrap();
    let image = Image::open(file.path(), ImageOptions::default()).unwrap();
    let disks: [(&dyn Disk, bool); 2] =
        [(&NullDisk::new(DISK_SIZE), false), (&UringDisk::new(image).unwrap(), true)];
    for (disk, is_ring) in disks {
        let [near, far] = [0, RING - 2].map(|head| order_of_memory(disk, is_ring, head));
        // Eight times the time would still be far less than a walk over all slots.
        assert!(far < 8 * near, "{}: {near} ns, then {far} ns", disk.kind());
    }
}
