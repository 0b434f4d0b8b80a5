//! A disk's queue on a worker's thread, as a guest and its front-end see it: what is served and
//! what is refused, who is told of it, when the worker sleeps, what a change waits for.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

use manyring_backend::blk::fault::{FaultDisk, FaultPlan, FaultSwitch};
use manyring_backend::blk::file::FileDisk;
use manyring_backend::blk::null::NullDisk;
use manyring_backend::blk::{Disk, Image, ImageOptions};
use manyring_device::blk::{BlkDevice, BlkOptions};
use manyring_device::{
    Activation, Call, Device, Event, EventKind, Kick, Pool, PoolOptions, QueueHandle, QueueStats,
};
use manyring_memory::{GuestMemory, RegionSpec};
use manyring_queue::{
    DeviceQueue, DriverQueue, QueueConfig, QueueError, RingAddresses, RingFeatures,
};
use manyring_wire::blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// Sectors of the disks.
const SECTORS: u64 = 2048;
/// Longest wait for what must happen.
const PATIENCE: Duration = Duration::from_secs(20);
/// Guest memory: ring, headers and status bytes below, data in a region of its own above.
const LOW_SIZE: u64 = 0x1_0000;
const HEADER: u64 = 0x4000;
const STATUS: u64 = 0x8000;
const DATA: u64 = 1 << 30;
const DATA_SIZE: u64 = 0x1_0000;
const RING: RingAddresses = RingAddresses { descriptor: 0, available: 0x1000, used: 0x2000 };
const NOT_WRITTEN: u8 = 0xee;
const OK: u8 = 0;
const IOERR: u8 = 1;

/// How a queue begins.
struct Start {
    has_kick: bool,
    enabled: bool,
}

const USUAL: Start = Start { has_kick: true, enabled: true };

struct Guest {
    runtime: Runtime,
    pool: Arc<Pool>,
    device: BlkDevice,
    low: OwnedFd,
    high: OwnedFd,
    memory: Arc<GuestMemory>,
    driver: DriverQueue,
    kick: OwnedFd,
    call: OwnedFd,
    err: OwnedFd,
    handle: Option<QueueHandle>,
    events: mpsc::Receiver<Event>,
    /// Requests so far: each has a header and a status byte of its own.
    count: u64,
}

fn doorbell() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK).unwrap()
}

fn call(fd: &OwnedFd) -> Arc<Call> {
    Arc::new(Call::new(fd.try_clone().unwrap()).unwrap())
}

fn kick(fd: &OwnedFd) -> Kick {
    Kick::new(fd.try_clone().unwrap()).unwrap()
}

/// True if the eventfd was written since it was read last.
fn is_rung(fd: &OwnedFd) -> bool {
    rustix::io::read(fd, &mut [0; 8]).is_ok()
}

fn ring(fd: &OwnedFd) {
    rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
}

/// Waits until something is so.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..PATIENCE.as_millis() {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{what}: not within {PATIENCE:?}");
}

fn null() -> Arc<dyn Disk> {
    Arc::new(NullDisk::new(SECTORS * 512))
}

/// A disk that keeps every request until its switch is turned.
fn holding() -> (Arc<dyn Disk>, FaultSwitch) {
    let disk = FaultDisk::new(null(), FaultPlan { hold_every: 1, ..FaultPlan::default() });
    let switch = disk.switch();
    (Arc::new(disk), switch)
}

impl Guest {
    fn new(disk: Arc<dyn Disk>, start: &Start) -> Self {
        let file = |size| {
            let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, size).unwrap();
            file
        };
        let (low, high) = (file(LOW_SIZE), file(DATA_SIZE));
        let region = |guest_addr, size| RegionSpec {
            guest_addr,
            size,
            user_addr: guest_addr,
            mmap_offset: 0,
        };
        let memory = GuestMemory::default()
            .with_region(region(0, LOW_SIZE), &low)
            .and_then(|memory| memory.with_region(region(DATA, DATA_SIZE), &high))
            .unwrap();
        let memory = Arc::new(memory);
        let features = RingFeatures { event_idx: true, indirect: true };
        let config = QueueConfig { size: 64, addresses: RING, base: 0.into(), features };
        let pool = Pool::new(PoolOptions { workers_max: 2, spin_us: 0, uring: false });
        let options = BlkOptions {
            name: "test".to_owned(),
            num_queues: 1,
            queue_size: 64,
            serial: "serial".to_owned(),
            read_only: false,
            writeback: true,
        };
        let (sender, events) = mpsc::channel(8);
        let mut guest = Self {
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
            device: BlkDevice::new(options, disk, pool.clone()),
            pool,
            driver: DriverQueue::new(config, &memory).unwrap(),
            low,
            high,
            kick: doorbell(),
            call: doorbell(),
            err: doorbell(),
            handle: None,
            events,
            count: 0,
            memory: memory.clone(),
        };
        let activation = Activation {
            index: 0,
            queue: DeviceQueue::new(config, memory).unwrap(),
            addresses: RING,
            kick: start.has_kick.then(|| kick(&guest.kick)),
            call: Some(call(&guest.call)),
            err: Some(call(&guest.err)),
            enabled: start.enabled,
            features: 1 << 32,
            events: sender,
        };
        guest.handle = Some(guest.runtime.block_on(guest.device.start(activation)).unwrap());
        guest
    }

    fn stats(&self) -> Arc<QueueStats> {
        self.device.stats(0).unwrap()
    }

    fn handle(&self) -> &QueueHandle {
        self.handle.as_ref().unwrap()
    }

    fn set_enabled(&self, enabled: bool) {
        self.runtime.block_on(self.handle().set_enabled(enabled));
    }

    fn sleeps(&self) -> u64 {
        self.pool.worker_stats()[0].sleeps.value()
    }

    /// Waits until the worker has gone to sleep after `before`.
    fn until_asleep(&self, before: u64) {
        until("the worker sleeps", || self.sleeps() > before);
    }

    /// Puts a request into the ring, with these buffers between header and status. Returns its
    /// number.
    fn add(&mut self, kind: u32, sector: u64, read: &[(u64, u32)], write: &[(u64, u32)]) -> u64 {
        let number = self.count;
        self.count += 1;
        let (header, status) = (HEADER + number * 16, STATUS + number);
        let bytes = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        rustix::io::pwrite(&self.low, &bytes, header).unwrap();
        rustix::io::pwrite(&self.low, &[NOT_WRITTEN], status).unwrap();
        let readable = [&[(header, 16)], read].concat();
        let writable = [write, &[(status, 1)]].concat();
        self.driver.add(&readable, &writable).unwrap();
        number
    }

    /// Publishes, and kicks if the device asked for it.
    fn publish(&mut self) -> bool {
        let wants = self.driver.publish();
        if wants {
            ring(&self.kick);
        }
        wants
    }

    fn status(&self, number: u64) -> u8 {
        let mut byte = [0];
        rustix::io::pread(&self.low, &mut byte, STATUS + number).unwrap();
        byte[0]
    }

    fn until_used(&mut self) -> u32 {
        let mut used = None;
        until("a request comes back", || {
            used = self.driver.take_used();
            used.is_some()
        });
        used.unwrap().1
    }

    /// A request to its end: its status.
    fn serve(&mut self, kind: u32, sector: u64, read: &[(u64, u32)], write: &[(u64, u32)]) -> u8 {
        let number = self.add(kind, sector, read, write);
        self.publish();
        self.until_used();
        self.status(number)
    }

    fn read(&mut self, sector: u64, len: u32) -> u8 {
        self.serve(VIRTIO_BLK_T_IN, sector, &[], &[(DATA, len)])
    }

    fn flush(&mut self) -> u8 {
        self.serve(VIRTIO_BLK_T_FLUSH, 0, &[], &[])
    }

    fn range(&mut self, kind: u32, sector: u64, sectors: u32) -> u8 {
        let segment = [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat();
        rustix::io::pwrite(&self.high, &segment, 0).unwrap();
        self.serve(kind, 0, &[(DATA, 16)], &[])
    }

    fn next_event(&mut self) -> EventKind {
        let events = &mut self.events;
        let event = async { tokio::time::timeout(PATIENCE, events.recv()).await };
        self.runtime.block_on(event).expect("an event").unwrap().kind
    }

    fn stop(&mut self) -> u16 {
        let handle = self.handle.take().unwrap();
        self.runtime.block_on(self.device.stop(0, handle)).unwrap().split().unwrap()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // The worker ends before the ring does.
        self.pool.quit();
    }
}

#[test]
fn a_request_that_starts_inside_the_disk_and_ends_past_it_is_refused() {
    // This disk would do anything: nobody but the device looks.
    let mut guest = Guest::new(null(), &USUAL);
    for (sector, sectors, status) in [
        (SECTORS - 1, 1, OK),
        (SECTORS - 2, 2, OK),
        (SECTORS - 1, 2, IOERR),
        (SECTORS - 8, 9, IOERR),
        (SECTORS, 1, IOERR),
        (SECTORS + 1, 1, IOERR),
    ] {
        let what = format!("{sectors} sectors from {sector} on");
        assert_eq!(guest.read(sector, sectors * 512), status, "read {what}");
        let data = [(DATA, sectors * 512)];
        assert_eq!(guest.serve(VIRTIO_BLK_T_OUT, sector, &data, &[]), status, "write {what}");
        for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
            assert_eq!(guest.range(kind, sector, sectors), status, "{kind} {what}");
        }
    }
    // What was inside of a larger disk is outside of a smaller one.
    guest.device.resize(Some((SECTORS - 8) * 512)).unwrap();
    assert_eq!(guest.read(SECTORS - 9, 512), OK);
    assert_eq!(guest.read(SECTORS - 9, 1024), IOERR);
    assert_eq!(guest.read(SECTORS - 8, 512), IOERR);
}

#[test]
fn a_disk_that_fails_is_no_lost_memory() {
    let plan = FaultPlan { read_error_every: 1, ..FaultPlan::default() };
    let mut guest = Guest::new(Arc::new(FaultDisk::new(null(), plan)), &USUAL);
    assert_eq!(guest.read(0, 512), IOERR);
    assert_eq!(guest.flush(), OK, "the queue goes on");
    assert!(guest.events.try_recv().is_err());
    assert_eq!((guest.stats().errors.value(), guest.stats().faults.value()), (1, 0));
}

#[test]
fn a_read_into_memory_that_was_cut_away_ends_the_session() {
    manyring_memory::install_sigbus_handler();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(SECTORS * 512).unwrap();
    let options = ImageOptions::default();
    let disk = FileDisk::new(Image::open(file.path(), options).unwrap());
    let mut guest = Guest::new(Arc::new(disk), &USUAL);
    assert_eq!(guest.read(0, 4096), OK);
    // The ring and the status byte are in another region: only the disk's data is not.
    ftruncate(&guest.high, 0).unwrap();
    assert_eq!(guest.read(0, 4096), IOERR);
    assert_eq!(guest.next_event(), EventKind::MemoryLost);
    assert_eq!(guest.stats().faults.value(), 1);
}

#[test]
fn a_ring_that_was_cut_away_is_lost_memory_and_no_fault_of_the_driver() {
    manyring_memory::install_sigbus_handler();
    let mut guest = Guest::new(null(), &USUAL);
    assert_eq!(guest.flush(), OK);
    let sleeps = guest.sleeps();
    ftruncate(&guest.low, 0).unwrap();
    ring(&guest.kick);
    assert_eq!(guest.next_event(), EventKind::MemoryLost);
    guest.until_asleep(sleeps);
    assert!(guest.events.try_recv().is_err(), "said once");
    assert_eq!(guest.stats().faults.value(), 1);
}

#[test]
fn other_memory_is_acknowledged_when_no_request_uses_the_former() {
    let (disk, switch) = holding();
    let mut guest = Guest::new(disk, &USUAL);
    let number = guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
    guest.publish();
    until("the disk has the request", || guest.stats().in_flight.value() == 1);
    let memory = Arc::new((*guest.memory).clone());
    guest.runtime.block_on(async {
        let handle = guest.handle.as_ref().unwrap();
        let mut change = std::pin::pin!(handle.set_memory(memory, RING));
        // The worker obeys in order: it has heard of the memory when it answers the second.
        tokio::select! {
            biased;
            done = &mut change => panic!("{done:?} while the disk may still write"),
            () = handle.set_enabled(true) => {}
        }
        switch.release();
        ring(&guest.kick);
        let done = tokio::time::timeout(PATIENCE, change).await;
        assert_eq!(done.expect("the change is acknowledged"), Ok(()));
    });
    guest.until_used();
    assert_eq!(guest.status(number), IOERR, "what this disk has held fails");
    assert_eq!(guest.read(0, 512), OK, "it goes on in the new memory");
}

#[test]
fn memory_without_the_ring_is_refused() {
    let mut guest = Guest::new(null(), &USUAL);
    let handle = guest.handle();
    let empty = handle.set_memory(Arc::new(GuestMemory::default()), RING);
    let refused = guest.runtime.block_on(empty);
    assert!(matches!(refused, Err(QueueError::Ring(_))), "{refused:?}");
    assert_eq!(guest.flush(), OK, "the queue goes on where it was");
}

#[test]
fn a_queue_stops_when_nothing_is_in_flight_and_says_where() {
    let (disk, switch) = holding();
    let mut guest = Guest::new(disk, &USUAL);
    guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
    guest.publish();
    until("the disk has the request", || guest.stats().in_flight.value() == 1);
    assert_eq!(guest.stats().running.value(), 1);
    let base = guest.runtime.block_on(async {
        let handle = guest.handle.take().unwrap();
        let mut stop = std::pin::pin!(guest.device.stop(0, handle));
        let patience = Duration::from_millis(20);
        let early = tokio::time::timeout(patience, &mut stop).await;
        assert!(early.is_err(), "{early:?} while the disk may still write");
        switch.release();
        // What this disk has held is asked for when the worker looks again.
        ring(&guest.kick);
        tokio::time::timeout(PATIENCE, stop).await.expect("it stops")
    });
    assert_eq!(base, Ok(1.into()));
    guest.until_used();
    let stats = guest.stats();
    assert_eq!((stats.in_flight.value(), stats.running.value()), (0, 0));
}

#[test]
fn a_queue_whose_move_is_withdrawn_serves_what_came_meanwhile() {
    let plan = FaultPlan { hold_every: 2, ..FaultPlan::default() };
    let mut guest = Guest::new(Arc::new(FaultDisk::new(null(), plan)), &USUAL);
    assert_eq!(guest.read(0, 512), OK);
    let held = guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
    guest.publish();
    until("the disk has the request", || guest.stats().in_flight.value() == 1);
    let sleeps = guest.sleeps();
    guest.set_enabled(true);
    guest.until_asleep(sleeps);
    let meanwhile = guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
    let (handle, before) = (guest.handle.take().unwrap(), guest.sleeps());
    let (worker, driver) = (guest.pool.worker_stats()[0].clone(), &mut guest.driver);
    let moved = guest.runtime.block_on(async {
        let publish = async {
            // It has heard of the move and waits for the request that the disk holds.
            while worker.sleeps.value() == before {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            driver.publish();
        };
        tokio::join!(handle.move_to(1), publish).0
    });
    assert!(!moved, "the disk may still write");
    assert_eq!(handle.worker(), Some(0));
    guest.handle = Some(handle);
    // The driver was not asked for a kick while the queue was to move, and has given none.
    guest.until_used();
    assert_eq!((guest.status(held), guest.status(meanwhile)), (NOT_WRITTEN, OK));
    // The next one is held again, and the one after that is served.
    guest.add(VIRTIO_BLK_T_FLUSH, 0, &[], &[]);
    assert_eq!(guest.flush(), OK);
}

#[test]
fn a_worker_sleeps_between_requests_and_a_kick_wakes_it() {
    let mut guest = Guest::new(null(), &USUAL);
    guest.set_enabled(true);
    for round in 1..=3 {
        let sleeps = guest.sleeps();
        guest.set_enabled(true);
        guest.until_asleep(sleeps);
        let number = guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
        assert!(guest.publish(), "a worker that sleeps has asked for a kick");
        guest.until_used();
        assert_eq!(guest.status(number), OK);
        assert_eq!(guest.stats().kicks.value(), round);
        assert!(guest.stats().wait_ns.sum() < 10_000_000_000, "it did not wait since the start");
    }
    assert_eq!(guest.stats().batch_size.count(), 3);
    assert_eq!(guest.stop(), 3);
}

#[test]
fn without_a_kick_the_ring_is_looked_at_for_ever() {
    let mut guest = Guest::new(null(), &Start { has_kick: false, ..USUAL });
    guest.set_enabled(true);
    let sleeps = guest.sleeps();
    for _ in 0..3 {
        let number = guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
        guest.driver.publish();
        guest.until_used();
        assert_eq!(guest.status(number), OK);
        // Long enough for a worker that would sleep.
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!((guest.sleeps(), guest.stats().kicks.value()), (sleeps, 0));
}

#[test]
fn a_broken_queue_without_a_kick_lets_its_worker_sleep() {
    let mut guest = Guest::new(null(), &Start { has_kick: false, ..USUAL });
    guest.set_enabled(true);
    let sleeps = guest.sleeps();
    guest.driver.add(&[(1 << 50, 16)], &[]).unwrap();
    guest.driver.publish();
    assert!(matches!(guest.next_event(), EventKind::Fault(QueueError::Buffer(_))));
    guest.until_asleep(sleeps);
}

#[test]
fn a_disabled_queue_serves_nothing_and_loses_nothing() {
    let mut guest = Guest::new(null(), &Start { enabled: false, ..USUAL });
    // The worker watches the kick from here on.
    guest.set_enabled(false);
    for _ in 0..3 {
        guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
    }
    guest.driver.publish();
    ring(&guest.kick);
    until("the kick is heard", || guest.stats().kicks.value() == 1);
    // Twice: the worker has taken a turn between the commands.
    guest.set_enabled(false);
    guest.set_enabled(false);
    assert_eq!((guest.driver.take_used(), guest.status(0)), (None, NOT_WRITTEN));
    guest.set_enabled(true);
    for _ in 0..3 {
        guest.until_used();
    }
    let stats = guest.stats();
    assert_eq!((stats.batch_size.count(), stats.batch_size.sum()), (1, 3), "all at once");
    assert_eq!(
        (stats.requests.value(), stats.reads.value(), stats.bytes_read.value()),
        (3, 3, 1536)
    );
    assert_eq!((stats.ring_occupancy.value(), stats.serve_ns.count()), (3, 3));
    guest.set_enabled(false);
    let number = guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
    guest.driver.publish();
    ring(&guest.kick);
    until("the kick is heard", || stats.kicks.value() == 2);
    guest.set_enabled(false);
    guest.set_enabled(false);
    assert_eq!((guest.driver.take_used(), guest.status(number)), (None, NOT_WRITTEN));
    assert_eq!(guest.stop(), 3);
    assert_eq!(guest.status(number), NOT_WRITTEN);
}

#[test]
fn batches_are_counted_by_whether_a_kick_brought_them() {
    let mut guest = Guest::new(null(), &Start { enabled: false, ..USUAL });
    guest.add(VIRTIO_BLK_T_FLUSH, 0, &[], &[]);
    guest.driver.publish();
    guest.set_enabled(true);
    guest.until_used();
    let stats = guest.stats();
    assert_eq!((stats.kicks.value(), stats.kicks_suppressed.value()), (0, 1), "found by looking");
    let sleeps = guest.sleeps();
    guest.set_enabled(true);
    guest.until_asleep(sleeps);
    guest.flush();
    assert_eq!((stats.kicks.value(), stats.kicks_suppressed.value()), (1, 1), "kicked");
}

#[test]
fn the_driver_is_called_if_it_wants_to_be() {
    let mut guest = Guest::new(null(), &USUAL);
    guest.driver.disable_notifications();
    guest.flush();
    until("the burst is over", || guest.stats().calls_suppressed.value() == 1);
    assert!(!is_rung(&guest.call));
    assert!(!guest.driver.enable_notifications());
    guest.flush();
    until("the call", || is_rung(&guest.call));
    assert_eq!((guest.stats().calls.value(), guest.stats().calls_suppressed.value()), (1, 1));
}

#[test]
fn doorbells_of_a_running_queue_are_replaced() {
    let mut guest = Guest::new(null(), &USUAL);
    guest.flush();
    let (new_kick, new_call, new_err) = (doorbell(), doorbell(), doorbell());
    let (handle, runtime) = (guest.handle.take().unwrap(), &guest.runtime);
    runtime.block_on(async {
        handle.set_kick(Some(kick(&new_kick))).await;
        handle.set_call(Some(call(&new_call))).await;
        handle.set_err(Some(call(&new_err))).await;
        handle.set_enabled(true).await;
    });
    guest.handle = Some(handle);
    assert!(is_rung(&new_call), "the driver may wait for what went to the former one");
    while is_rung(&guest.call) {}
    let sleeps = guest.sleeps();
    guest.set_enabled(true);
    guest.until_asleep(sleeps);
    let kicks = guest.stats().kicks.value();
    assert!(!guest.driver.enable_notifications());
    let number = guest.add(VIRTIO_BLK_T_FLUSH, 0, &[], &[]);
    assert!(guest.driver.publish());
    ring(&new_kick);
    guest.until_used();
    until("the new call", || is_rung(&new_call));
    assert_eq!((guest.status(number), guest.stats().kicks.value()), (OK, kicks + 1));
    assert!(!is_rung(&guest.call), "the former call is forgotten");
    // A fault goes to the new err.
    guest.driver.add(&[(1 << 50, 16)], &[]).unwrap();
    guest.driver.publish();
    ring(&new_kick);
    assert!(matches!(guest.next_event(), EventKind::Fault(_)));
    until("the new err", || is_rung(&new_err));
    assert!(!is_rung(&guest.err));
}

#[test]
fn a_fault_of_the_driver_is_told_once_and_stops_the_queue() {
    let mut guest = Guest::new(null(), &USUAL);
    assert_eq!(guest.flush(), OK);
    assert!(!is_rung(&guest.err));
    guest.driver.add(&[(1 << 50, 16)], &[]).unwrap();
    guest.publish();
    ring(&guest.kick);
    assert!(matches!(guest.next_event(), EventKind::Fault(QueueError::Buffer(_))));
    until("the err", || is_rung(&guest.err));
    let number = guest.add(VIRTIO_BLK_T_FLUSH, 0, &[], &[]);
    guest.publish();
    ring(&guest.kick);
    guest.set_enabled(true);
    guest.set_enabled(true);
    assert_eq!((guest.driver.take_used(), guest.status(number)), (None, NOT_WRITTEN));
    assert!(guest.events.try_recv().is_err() && !is_rung(&guest.err), "told once");
    assert_eq!(guest.stats().faults.value(), 1);
    assert_eq!(guest.stop(), 1);
}
