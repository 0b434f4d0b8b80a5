//! A queue of a Xen disk without a worker, by a clock of the test's own.

use super::*;
use manyring_backend::blk::memory::MemoryDisk;
use manyring_driver::{BlkfrontOptions, BlkfrontQueue, SimXen, XenCalls, XenDomain, XenOp};
use manyring_engine::solo::{Run, Wait};
use manyring_engine::{PoolOptions, QueueIo};

const SECOND_NS: u64 = 1_000_000_000;

#[test]
fn grants_that_an_idle_guest_used_at_different_times_are_all_unmapped_in_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let xen = SimXen::start(&folder.path().join("xenstored")).unwrap();
    let calls = XenCalls::connect(xen.socket()).unwrap();
    let front = BlkfrontOptions { persistent: true, ..Default::default() };
    let pages = BlkfrontQueue::pages(&front) + 64;
    let domain = Arc::new(XenDomain::create(xen.socket(), 1, pages, 16384).unwrap());
    let mut guest = BlkfrontQueue::new(&domain, 0, &front).unwrap();
    let disk = Arc::new(MemoryDisk::new(1 << 20).unwrap());
    let pool = Pool::new(PoolOptions::default());
    let device = XenBlkDevice::new(XenBlkOptions::new("test", 1), disk, pool);
    let nodes = guest.nodes();
    let (kick, call) = calls.bind(1, nodes.event_channel).unwrap().into_fds();
    let attachment = Attachment {
        index: 0,
        abi: front.abi,
        ring_refs: nodes.ring_refs,
        persistent: true,
        indirect_segments_max: 0,
        journal: None,
        takeover: false,
        mapper: GrantMapper::Simulated(Arc::new(calls.attach(1).unwrap())),
        kick: Kick::new(kick).unwrap(),
        call: Arc::new(Call::new(call).unwrap()),
        events: mpsc::channel(1).0,
    };
    let disk = device.backing.disk().open_queue(false).unwrap();
    let mut queue = device.running(attachment, disk).unwrap();
    let mut wait = Wait::new(false).unwrap();
    let mut turn = |queue: &mut RunningQueue<BackRing, BlkifHandler>, now_ns| {
        queue.turn(&mut QueueIo::new(&mut wait, 0, 0, now_ns)).worked
    };
    // The second request has one of the two pages of the first.
    for (at_ns, len) in [(SECOND_NS, 8192), (10 * SECOND_NS, 4096)] {
        guest.submit(XenOp::Write { sector: 0, data: &[7; 8192][..len] }).unwrap().unwrap();
        guest.publish();
        while turn(&mut queue, at_ns) {}
        assert!(guest.take().unwrap().is_some());
    }
    let mapped = device.stats(0).unwrap();
    assert_eq!(mapped.grants_mapped.value(), 2);
    // Its worker takes one turn when it is time, and sleeps again.
    let mut woken = Vec::new();
    while let Some(at_ns) = queue.deadline_ns().filter(|_| woken.len() < 10) {
        assert!(!turn(&mut queue, at_ns), "the guest is idle");
        woken.push(at_ns / SECOND_NS);
    }
    assert_eq!((mapped.grants_mapped.value(), woken), (0, vec![61, 70]));
}
