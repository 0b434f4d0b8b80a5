//! A guest of the simulated Xen with one queue of a disk, and the back-end's half of it.

use manyring_backend::blk::Disk;
use manyring_backend::blk::fault::{FaultDisk, FaultPlan, FaultSwitch};
use manyring_backend::blk::memory::MemoryDisk;
use manyring_backend::blk::null::NullDisk;
use manyring_device::blk::blkif::{Attachment, XenBlkDevice, XenBlkOptions};
use manyring_driver::wire::xen::blkif::BlkifStatus;
use manyring_driver::{
    BlkfrontOptions, BlkfrontQueue, SimXen, XenCalls, XenDomain, XenDone, XenOp,
};
use manyring_engine::{
    Call, Event, EventKind, Kick, Polling, Pool, PoolOptions, QueueHandle, QueueStats,
};
use manyring_memory::GrantMapper;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// Sectors of the disks.
pub(crate) const SECTORS: u64 = 2048;
/// Entries of a domain's grant table.
pub(crate) const ENTRIES: u32 = 16384;
/// Longest wait for what must happen.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// The simulated Xen, and the workers of a back-end in it.
pub(crate) struct World {
    pub(crate) pool: Arc<Pool>,
    pub(crate) calls: XenCalls,
    pub(crate) xen: SimXen,
    _folder: tempfile::TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with_uring(false)
    }

    pub(crate) fn with_uring(uring: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let xen = SimXen::start(&folder.path().join("xenstored")).unwrap();
        let calls = XenCalls::connect(xen.socket()).unwrap();
        let options = PoolOptions { workers_max: 2, polling: Polling::NEVER, uring };
        Self { pool: Pool::new(options), calls, xen, _folder: folder }
    }

    pub(crate) fn guest(&self, domain: u16, disk: Arc<dyn Disk>, front: &BlkfrontOptions) -> Guest {
        self.guest_of(domain, disk, front, usual())
    }

    pub(crate) fn guest_of(
        &self,
        number: u16,
        disk: Arc<dyn Disk>,
        front: &BlkfrontOptions,
        options: XenBlkOptions,
    ) -> Guest {
        let pages = BlkfrontQueue::pages(front) + 64;
        let domain = XenDomain::create(self.xen.socket(), number, pages, ENTRIES).unwrap();
        let domain = Arc::new(domain);
        let queue = BlkfrontQueue::new(&domain, 0, front).unwrap();
        let device = XenBlkDevice::new(options, disk, self.pool.clone());
        let (events_of_queue, events) = mpsc::channel(8);
        let nodes = queue.nodes();
        let channel = self.calls.bind(number, nodes.event_channel).unwrap();
        let (kick, call) = channel.into_fds();
        let attachment = Attachment {
            index: 0,
            abi: front.abi,
            ring_refs: nodes.ring_refs,
            persistent: front.persistent,
            indirect_segments_max: device.offer().indirect_segments_max,
            journal: None,
            takeover: false,
            mapper: GrantMapper::Simulated(Arc::new(self.calls.attach(number).unwrap())),
            kick: Kick::new(kick).unwrap(),
            call: Arc::new(Call::new(call).unwrap()),
            events: events_of_queue,
        };
        let handle = device.start(attachment).unwrap();
        Guest {
            domain,
            queue,
            device,
            handle: Some(handle),
            events,
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.pool.quit();
    }
}

pub(crate) struct Guest {
    pub(crate) domain: Arc<XenDomain>,
    pub(crate) queue: BlkfrontQueue,
    pub(crate) device: XenBlkDevice,
    pub(crate) handle: Option<QueueHandle>,
    pub(crate) events: mpsc::Receiver<Event>,
    pub(crate) runtime: Runtime,
}

impl Guest {
    pub(crate) fn stats(&self) -> Arc<QueueStats> {
        self.device.stats(0).unwrap()
    }

    pub(crate) fn status(&mut self, op: XenOp<'_>) -> BlkifStatus {
        self.queue.run(op).unwrap().status
    }

    /// Adds requests, publishes them together, and returns how each of them ended, in the order in
    /// which they were added.
    pub(crate) fn run_all(&mut self, ops: &[XenOp<'_>]) -> Vec<BlkifStatus> {
        let tags: Vec<_> = ops.iter().map(|op| self.queue.submit(*op).unwrap().unwrap()).collect();
        self.queue.publish();
        let done: Vec<XenDone> = tags.iter().map(|_| self.queue.wait(TIMEOUT).unwrap()).collect();
        let status = |tag: &u16| done.iter().find(|done| done.tag == *tag).unwrap().status;
        tags.iter().map(status).collect()
    }

    pub(crate) fn next_event(&mut self) -> EventKind {
        let events = &mut self.events;
        let event = async { tokio::time::timeout(TIMEOUT, events.recv()).await };
        self.runtime.block_on(event).expect("an event").unwrap().kind
    }

    /// Returns when the worker has taken a turn after all that was given to it before.
    pub(crate) fn sync(&self) {
        let handle = self.handle.as_ref().unwrap();
        for _ in 0..2 {
            self.runtime.block_on(handle.set_enabled(true));
        }
    }

    /// Stops the queue, and ends all grants. Returns where the ring goes on, and how many pages are
    /// mapped still.
    pub(crate) fn stop(&mut self) -> (u32, usize) {
        let handle = self.handle.take().unwrap();
        let stop = async { tokio::time::timeout(TIMEOUT, handle.stop()).await };
        let base = self.runtime.block_on(stop).expect("it stops").unwrap();
        (base.bits(), self.queue.end_grants())
    }
}

pub(crate) fn usual() -> XenBlkOptions {
    XenBlkOptions { barrier: true, ..XenBlkOptions::new("test", 1) }
}

pub(crate) fn memory() -> Arc<dyn Disk> {
    Arc::new(MemoryDisk::new(SECTORS * 512).unwrap())
}

pub(crate) fn null() -> Arc<dyn Disk> {
    Arc::new(NullDisk::new(SECTORS * 512))
}

/// A disk that holds every n-th request until its switch is turned; those fail then.
pub(crate) fn holding(every: u64) -> (Arc<dyn Disk>, FaultSwitch) {
    let disk = FaultDisk::new(memory(), FaultPlan { hold_every: every, ..FaultPlan::default() });
    let switch = disk.switch();
    (Arc::new(disk), switch)
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

/// Bytes that differ from sector to sector and from seed to seed.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    let byte = |at: usize| (at.wrapping_mul(31) >> 3) as u8 ^ (at >> 9) as u8 ^ seed;
    (0..len).map(byte).collect()
}
