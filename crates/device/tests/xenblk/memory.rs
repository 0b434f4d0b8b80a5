//! A domain whose memory is cut away under its queue.

use crate::guest::{TIMEOUT, World, memory, null, usual};
use manyring_backend::blk::Disk;
use manyring_device::blk::blkif::{Attachment, XenBlkDevice};
use manyring_driver::BlkfrontOptions;
use manyring_driver::wire::xen::blkif::{Abi, OP_READ, PAGE_SIZE, RawRequest, Segment};
use manyring_engine::{Call, EventKind, Kick, QueueHandle};
use manyring_memory::simgrant::{GrantEntry, GrantTable, SimGrants};
use manyring_memory::{GrantAccess, GrantMapper, GrantRef, Mapping, Words};
use manyring_queue::blkif::{FrontRing, RingConfig};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::sync::Arc;
use tokio::sync::mpsc;

const ENTRIES: u32 = 512;
/// The pages of the file: the grant table, the ring, and data.
const RING: u32 = 1;
const DATA: u32 = 3;
const PAGES: u64 = 4;

/// A domain whose file nobody has sealed.
struct Unsealed {
    file: OwnedFd,
    ring: FrontRing,
    kick: OwnedFd,
    _device: XenBlkDevice,
    _handle: QueueHandle,
    events: mpsc::Receiver<manyring_engine::Event>,
}

fn unsealed(world: &World, disk: Arc<dyn Disk>) -> Unsealed {
    let file = memfd_create("domain", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, PAGES * PAGE_SIZE as u64).unwrap();
    let table = GrantTable::of_file(&file, ENTRIES).unwrap();
    for page in [RING, DATA] {
        let entry = GrantEntry::new(0, page, GrantAccess::Write).unwrap();
        table.update(GrantRef(page), |_| Ok(entry)).unwrap();
    }
    let low = Arc::new(Mapping::of_file(&file, 0, 2 * PAGE_SIZE as u64).unwrap());
    let words = Words::new(low, PAGE_SIZE, PAGE_SIZE, PAGE_SIZE as u64).unwrap();
    let config = RingConfig { abi: Abi::Native, order: 0, addr: 0 };
    let ring = FrontRing::with_words(config, 0.into(), words).unwrap();
    let grants = SimGrants::new(file.try_clone().unwrap(), ENTRIES, 0, 0).unwrap();
    let doorbell = || eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let (kick, (sender, events)) = (doorbell(), mpsc::channel(8));
    let device = XenBlkDevice::new(usual(), disk, world.pool.clone());
    let attachment = Attachment {
        index: 0,
        abi: Abi::Native,
        ring_refs: vec![RING],
        persistent: true,
        indirect_segments_max: 256,
        journal: None,
        takeover: false,
        mapper: GrantMapper::Simulated(Arc::new(grants)),
        kick: Kick::new(kick.try_clone().unwrap()).unwrap(),
        call: Arc::new(Call::new(doorbell()).unwrap()),
        events: sender,
    };
    let handle = device.start(attachment).unwrap();
    Unsealed { file, ring, kick, _device: device, _handle: handle, events }
}

impl Unsealed {
    fn read(&mut self) {
        let request = RawRequest::data(Abi::Native, OP_READ, 1, 0, &[Segment::page(DATA)]);
        assert!(self.ring.add(&request));
        self.ring.publish();
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    fn next_event(&mut self) -> EventKind {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let event = async { tokio::time::timeout(TIMEOUT, self.events.recv()).await };
        runtime.block_on(event).expect("an event").unwrap().kind
    }
}

#[test]
fn a_page_that_is_cut_away_stops_its_queue_and_no_other() {
    manyring_memory::install_sigbus_handler();
    let world = World::new();
    let mut other = world.guest(1, null(), &BlkfrontOptions::default());
    let mut guest = unsealed(&world, memory());
    guest.read();
    while guest.ring.take_response().is_none() {
        std::thread::yield_now();
    }
    // Data lies there; table and ring stay.
    ftruncate(&guest.file, u64::from(DATA) * PAGE_SIZE as u64).unwrap();
    guest.read();
    assert_eq!(guest.next_event(), EventKind::MemoryLost);
    guest.read();
    for _ in 0..10 {
        other.queue.flush().unwrap();
    }
    assert!(guest.events.try_recv().is_err(), "told once");
    assert_eq!(other.stats().faults.value(), 0);
}
