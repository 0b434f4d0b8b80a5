//! A guest with one queue of a disk on a worker's thread, and its front-end.

use manyring_backend::blk::Disk;
use manyring_backend::blk::fault::{FaultDisk, FaultPlan, FaultSwitch};
use manyring_backend::blk::null::NullDisk;
use manyring_device::Device;
use manyring_device::blk::{BlkDevice, BlkOptions, OnFull};
use manyring_engine::{
    Activation, Call, Event, EventKind, Kick, Moderation, Polling, Pool, PoolOptions, QueueHandle,
    QueueStats,
};
use manyring_memory::{GuestMemory, RegionSpec};
use manyring_queue::{DeviceQueue, DriverQueue, QueueConfig, RingAddresses, RingFeatures};
use manyring_wire::blk::{VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// Sectors of the disks.
pub(crate) const SECTORS: u64 = 2048;
/// Longest wait for what must happen.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);
/// Guest memory: ring, headers and status bytes below, data in a region of its own above.
pub(crate) const LOW_SIZE: u64 = 0x1_0000;
pub(crate) const HEADER: u64 = 0x4000;
pub(crate) const STATUS: u64 = 0x8000;
pub(crate) const DATA: u64 = 1 << 30;
pub(crate) const DATA_SIZE: u64 = 0x1_0000;
pub(crate) const RING: RingAddresses =
    RingAddresses { descriptor: 0, available: 0x1000, used: 0x2000 };
pub(crate) const NOT_WRITTEN: u8 = 0xee;
pub(crate) const OK: u8 = 0;
pub(crate) const IOERR: u8 = 1;

/// How a queue begins.
pub(crate) struct Start {
    pub(crate) has_kick: bool,
    pub(crate) enabled: bool,
    /// The worker has an io_uring.
    pub(crate) uring: bool,
}

pub(crate) const USUAL: Start = Start { has_kick: true, enabled: true, uring: false };

pub(crate) struct Guest {
    pub(crate) runtime: Runtime,
    pub(crate) pool: Arc<Pool>,
    pub(crate) device: BlkDevice,
    pub(crate) low: OwnedFd,
    pub(crate) high: OwnedFd,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) driver: DriverQueue,
    pub(crate) kick: OwnedFd,
    pub(crate) call: OwnedFd,
    pub(crate) err: OwnedFd,
    pub(crate) handle: Option<QueueHandle>,
    pub(crate) events: mpsc::Receiver<Event>,
    /// Requests so far: each has a header and a status byte of its own.
    pub(crate) count: u64,
}

pub(crate) fn doorbell() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK).unwrap()
}

pub(crate) fn call(fd: &OwnedFd) -> Arc<Call> {
    Arc::new(Call::new(fd.try_clone().unwrap()).unwrap())
}

pub(crate) fn kick(fd: &OwnedFd) -> Kick {
    Kick::new(fd.try_clone().unwrap()).unwrap()
}

/// True if the eventfd was written since it was read last.
pub(crate) fn is_rung(fd: &OwnedFd) -> bool {
    rustix::io::read(fd, &mut [0; 8]).is_ok()
}

pub(crate) fn ring(fd: &OwnedFd) {
    rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
}

/// Waits until something is so.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..TIMEOUT.as_millis() {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{what}: not within {TIMEOUT:?}");
}

pub(crate) fn null() -> Arc<dyn Disk> {
    Arc::new(NullDisk::new(SECTORS * 512))
}

/// A disk that keeps every request until its switch is turned.
pub(crate) fn holding() -> (Arc<dyn Disk>, FaultSwitch) {
    let disk = FaultDisk::new(null(), FaultPlan { hold_every: 1, ..FaultPlan::default() });
    let switch = disk.switch();
    (Arc::new(disk), switch)
}

impl Guest {
    pub(crate) fn new(disk: Arc<dyn Disk>, start: &Start) -> Self {
        let options = PoolOptions { workers_max: 2, polling: Polling::NEVER, uring: start.uring };
        Self::on(Pool::new(options), disk, start)
    }

    /// A guest whose writes wait for space on the host, or do not.
    pub(crate) fn with(disk: Arc<dyn Disk>, on_full: OnFull) -> Self {
        let options = PoolOptions { workers_max: 2, polling: Polling::NEVER, uring: USUAL.uring };
        Self::of(Pool::new(options), disk, &USUAL, on_full)
    }

    /// A guest whose queue runs on a worker of `pool`.
    pub(crate) fn on(pool: Arc<Pool>, disk: Arc<dyn Disk>, start: &Start) -> Self {
        Self::of(pool, disk, start, OnFull::default())
    }

    fn of(pool: Arc<Pool>, disk: Arc<dyn Disk>, start: &Start, on_full: OnFull) -> Self {
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
        let features =
            RingFeatures { event_idx: true, indirect: true, in_order: false, packed: false };
        let config = QueueConfig { size: 64, addresses: RING, base: 0.into(), features };
        let options = BlkOptions {
            name: "test".to_owned(),
            queue_size: 64,
            serial: "serial".to_owned(),
            on_full,
            moderation: Moderation::Off,
            ..BlkOptions::default()
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

    pub(crate) fn stats(&self) -> Arc<QueueStats> {
        self.device.stats(0).unwrap()
    }

    pub(crate) fn handle(&self) -> &QueueHandle {
        self.handle.as_ref().unwrap()
    }

    pub(crate) fn set_enabled(&self, enabled: bool) {
        self.runtime.block_on(self.handle().set_enabled(enabled));
    }

    pub(crate) fn sleeps(&self) -> u64 {
        self.pool.worker_stats()[0].sleeps.value()
    }

    /// Waits until the worker has gone to sleep after `before`.
    pub(crate) fn until_asleep(&self, before: u64) {
        until("the worker sleeps", || self.sleeps() > before);
    }

    /// Puts a request into the ring, with these buffers between header and status. Returns its
    /// number.
    pub(crate) fn add(
        &mut self,
        kind: u32,
        sector: u64,
        read: &[(u64, u32)],
        write: &[(u64, u32)],
    ) -> u64 {
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
    pub(crate) fn publish(&mut self) -> bool {
        let wants = self.driver.publish();
        if wants {
            ring(&self.kick);
        }
        wants
    }

    pub(crate) fn status(&self, number: u64) -> u8 {
        let mut byte = [0];
        rustix::io::pread(&self.low, &mut byte, STATUS + number).unwrap();
        byte[0]
    }

    pub(crate) fn until_used(&mut self) -> u32 {
        let mut used = None;
        until("a request comes back", || {
            used = self.driver.take_used();
            used.is_some()
        });
        used.unwrap().1
    }

    /// A request to its end: its status.
    pub(crate) fn serve(
        &mut self,
        kind: u32,
        sector: u64,
        read: &[(u64, u32)],
        write: &[(u64, u32)],
    ) -> u8 {
        let number = self.add(kind, sector, read, write);
        self.publish();
        self.until_used();
        self.status(number)
    }

    pub(crate) fn read(&mut self, sector: u64, len: u32) -> u8 {
        self.serve(VIRTIO_BLK_T_IN, sector, &[], &[(DATA, len)])
    }

    pub(crate) fn flush(&mut self) -> u8 {
        self.serve(VIRTIO_BLK_T_FLUSH, 0, &[], &[])
    }

    pub(crate) fn range(&mut self, kind: u32, sector: u64, sectors: u32) -> u8 {
        let segment = [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat();
        rustix::io::pwrite(&self.high, &segment, 0).unwrap();
        self.serve(kind, 0, &[(DATA, 16)], &[])
    }

    pub(crate) fn next_event(&mut self) -> EventKind {
        let events = &mut self.events;
        let event = async { tokio::time::timeout(TIMEOUT, events.recv()).await };
        self.runtime.block_on(event).expect("an event").unwrap().kind
    }

    pub(crate) fn stop(&mut self) -> u16 {
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
