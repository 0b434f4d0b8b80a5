//! A Xen block front-end connects through xenstore, to a back-end that answers every request.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

use manyring_driver::{
    Blkfront, BlkfrontOptions, BlkfrontQueue, EventChannel, SimXen, XenCalls, XenDomain, XenOp,
    XenStore,
};
use manyring_memory::{GrantMapper, GrantPages, GrantRef};
use manyring_queue::Ring;
use manyring_queue::blkif::{BackRing, Requests, RingConfig};
use manyring_wire::xen::blkif::{BlkifStatus, Response};
use manyring_wire::xen::device::{Connection, DiskGeometry, Nodes, Offer, Writes};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
const FRONT: &str = "/local/domain/7/device/vbd/51712";
const BACK: &str = "/local/domain/0/backend/vbd/7/51712";
const DISK: DiskGeometry =
    DiskGeometry { sectors: 2048, sector_size: 512, physical_sector_size: 4096, info: 0 };

fn offer() -> Offer {
    Offer {
        flush: true,
        persistent: true,
        indirect_segments_max: 64,
        ring_page_order_max: 2,
        queues_max: 3,
        ..Offer::default()
    }
}

fn write_all(store: &mut XenStore, writes: Writes) {
    for (name, value) in writes {
        store.write(&format!("{BACK}/{name}"), value).unwrap();
    }
}

fn has_state(state: &'static str) -> impl Fn(Option<&[u8]>) -> bool {
    move |value| value == Some(state.as_bytes())
}

/// A queue of the back-end, which is told `count` requests.
struct Queue {
    ring: BackRing,
    channel: EventChannel,
    _pages: GrantPages,
}

impl Queue {
    fn serve(&mut self, count: usize) {
        let (mut requests, mut served) = (Requests::new(), 0);
        while served < count {
            let popped = self.ring.pop_batch(&mut requests, 64);
            for index in 0..popped {
                let (chain, request) = requests.take(index).unwrap();
                let [operation, inner, ..] = request.words()[0].to_le_bytes();
                let operation = if operation == 6 { inner } else { operation };
                let response = Response { id: request.id(), operation, status: BlkifStatus::Okay };
                self.ring.push_response(chain, response);
            }
            served += popped;
            self.ring.publish();
            if self.ring.needs_notification() {
                self.channel.notify();
            }
            if served < count && !self.ring.enable_notifications() {
                self.channel.wait(TIMEOUT).unwrap();
            }
        }
    }
}

/// The nodes that a front-end has written, those of its queues included.
fn front_nodes(store: &mut XenStore) -> Nodes {
    let mut nodes = Nodes::new();
    for name in store.children(FRONT).unwrap() {
        if name.starts_with("queue-") {
            for inner in store.children(&format!("{FRONT}/{name}")).unwrap() {
                let value = store.read(&format!("{FRONT}/{name}/{inner}")).unwrap().unwrap();
                nodes.insert(format!("{name}/{inner}"), value);
            }
        } else {
            nodes.insert(name.clone(), store.read(&format!("{FRONT}/{name}")).unwrap().unwrap());
        }
    }
    nodes
}

/// The back-end's whole life: each of its queues is told of `count` requests.
fn back(socket: &Path, count: usize) -> Connection {
    let mut store = XenStore::connect(socket, TIMEOUT).unwrap();
    let calls = XenCalls::connect(socket).unwrap();
    write_all(&mut store, offer().emit());
    store.write(&format!("{BACK}/state"), 2).unwrap();
    store.await_value(&format!("{FRONT}/state"), has_state("3")).unwrap();
    let connection = Connection::parse(&front_nodes(&mut store), &offer()).unwrap();
    let grants = Arc::new(calls.attach(7).unwrap());
    let queue = |queue: &manyring_wire::xen::device::Queue| {
        let grefs: Vec<_> = queue.ring_refs.iter().copied().map(GrantRef).collect();
        let pages = GrantPages::of_ring(GrantMapper::Simulated(grants.clone()), &grefs).unwrap();
        let (abi, order) = (connection.abi, connection.ring_page_order);
        let config = RingConfig { abi, order, addr: 0 };
        let ring = BackRing::new(config, pages.memory().clone()).unwrap();
        Queue { ring, channel: calls.bind(7, queue.event_channel).unwrap(), _pages: pages }
    };
    let mut queues: Vec<_> = connection.queues.iter().map(queue).collect();
    write_all(&mut store, DISK.emit());
    store.write(&format!("{BACK}/state"), 4).unwrap();
    queues.iter_mut().for_each(|queue| queue.serve(count));
    store.await_value(&format!("{FRONT}/state"), has_state("5")).unwrap();
    drop(queues);
    store.write(&format!("{BACK}/state"), 6).unwrap();
    connection
}

#[test]
fn a_front_end_takes_what_is_offered_connects_its_queues_and_closes_with_no_page_mapped() {
    let folder = tempfile::tempdir().unwrap();
    let xen = SimXen::start(&folder.path().join("xenstored")).unwrap();
    let wanted = BlkfrontOptions {
        queues: 8,
        ring_page_order: 4,
        indirect_segments: 128,
        max_wait: TIMEOUT,
        ..BlkfrontOptions::default()
    };
    let pages = 8 * BlkfrontQueue::pages(&wanted);
    let domain = Arc::new(XenDomain::create(xen.socket(), 7, pages, 32768).unwrap());
    let mut toolstack = XenStore::connect(xen.socket(), TIMEOUT).unwrap();
    for (folder, permissions) in [(FRONT, "n7 r0"), (BACK, "n0 r7")] {
        toolstack.write(folder, "").unwrap();
        toolstack.permit(folder, permissions).unwrap();
    }
    toolstack.write(&format!("{FRONT}/backend"), BACK).unwrap();
    toolstack.write(&format!("{FRONT}/backend-id"), 0).unwrap();
    let connection = std::thread::scope(|scope| {
        let socket = xen.socket();
        let back = scope.spawn(|| back(socket, 3));
        let mut front = Blkfront::connect(&domain, "device/vbd/51712", &wanted).unwrap();
        assert_eq!((front.offer, front.disk), (offer(), DISK));
        assert_eq!(front.queues.len(), 3);
        for queue in &mut front.queues {
            queue.write(0, &[1; 512]).unwrap();
            // Longer than a request can carry itself.
            assert_eq!(queue.run(XenOp::WriteAny { sector: 8, len: 64 << 10 }).unwrap().tag, 0);
            queue.flush().unwrap();
        }
        assert_eq!(front.look_at_disk().unwrap(), DISK);
        assert_eq!(front.close().unwrap(), 0);
        back.join().unwrap()
    });
    assert_eq!((connection.queues.len(), connection.ring_page_order), (3, 2));
    assert!(connection.persistent);
}
