//! How a hostile Xen guest disturbs its neighbours in the same process and on the same worker: a
//! guest over vhost-user, the control API and a new session, as `support/prober.rs` measures them.

use crate::noise::rewrite;
use crate::support::prober::{NEIGHBOURS, Prober, RETRY_DELAY, SOCKETS, STALL_MAX, check};
use crate::support::process::{Daemon, TIMEOUT, wait_until};
use crate::world::{World, XVDA, options, small};
use manyring_driver::{
    Blkfront, BlkfrontOptions, BlkfrontQueue, XenDisk, XenDomain, XenOp, XenStore,
};
use manyring_memory::GrantRef;
use manyring_wire::xen::blkif::{OP_READ, RawRequest, Segment};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const XEN: &str = "
[daemon]
control = '@/control'
workers = 1
[[xen_blk]]
kinds = ['vbd']
simulated = '@/xenstored'
state_dir = '@/state'
";
/// Pages of a domain whose front-end comes again and again.
const PAGES: u32 = 20_000;

/// A daemon with one worker and a simulated Xen, and the prober of its good guest.
struct Beside {
    prober: Prober,
    world: World,
    _daemon: Daemon,
}

impl Beside {
    fn new() -> Self {
        let world = World::new();
        let daemon = world.run(&format!("{XEN}{NEIGHBOURS}"));
        let folder = world.path("");
        assert!(wait_until(|| SOCKETS.iter().all(|name| folder.join(name).exists())));
        Self { prober: Prober::at(&daemon, &folder), world, _daemon: daemon }
    }

    /// Makes a domain of `pages` pages, and announces its disk.
    fn attach(&mut self, number: u16, pages: u32) -> Fickle {
        let disk = XenDisk::new("vbd", number, XVDA, "memory:64M");
        disk.announce(&mut self.world.toolstack).unwrap();
        Fickle { domain: self.world.domain_of(number, pages), disk }
    }

    /// Has `abuse` go on until its flag is set, while the prober looks. A stall counts against the
    /// daemon only if three tries in a row see one.
    fn bear(&mut self, name: &str, mut abuse: impl FnMut(&AtomicBool) + Send) {
        for is_last in [false, false, true] {
            let stalls = self.prober.beside(&mut abuse);
            if is_last || stalls.worst() < STALL_MAX {
                return check(name, stalls);
            }
        }
    }
}

/// A guest that connects its disk again and again.
struct Fickle {
    domain: Arc<XenDomain>,
    disk: XenDisk,
}

impl Fickle {
    /// Has `abuse` use the first queue of each connection, until the flag is set.
    fn connect(&self, is_over: &AtomicBool, abuse: impl Fn(&mut BlkfrontQueue)) {
        let mut connections = 0;
        while !is_over.load(Ordering::Relaxed) {
            match Blkfront::connect(&self.domain, &self.disk.folder(), &small()) {
                Ok(mut front) => {
                    connections += 1;
                    abuse(&mut front.queues[0]);
                    let _ = front.close();
                }
                Err(_) => std::thread::sleep(RETRY_DELAY),
            }
        }
        assert!(connections > 0, "nothing was tried");
    }
}

fn fill(queue: &mut BlkfrontQueue, len: usize) {
    while let Ok(Some(_)) = queue.submit(XenOp::Read { sector: 0, len }) {}
    queue.publish();
    queue.channel().notify();
}

#[test]
fn neighbours_of_xen_guests_with_requests_of_many_pages_wait_for_nothing() {
    let mut beside = Beside::new();
    let large = BlkfrontOptions {
        persistent: false,
        indirect_segments: 256,
        buffer_size: 1 << 20,
        ..options(2)
    };
    let guest = beside.attach(10, 2 * BlkfrontQueue::pages(&large) + 64);
    let mut front = Blkfront::connect(&guest.domain, &guest.disk.folder(), &large).unwrap();
    beside.bear("requests of 256 pages, each mapped anew", |is_over| {
        while !is_over.load(Ordering::Relaxed) {
            for queue in &mut front.queues {
                fill(queue, 1 << 20);
                let _ = queue.wait(TIMEOUT);
                while let Ok(Some(_)) = queue.take() {}
            }
        }
    });
}

#[test]
fn neighbours_of_xen_guests_that_end_grants_or_lend_nothing_wait_for_nothing() {
    let mut beside = Beside::new();
    let guest = beside.attach(11, PAGES);
    beside.bear("grants that end while a disk writes to their pages", |is_over| {
        guest.connect(is_over, |queue| {
            fill(queue, 4096);
            let _ = queue.end_grants();
        });
    });
    let guest = beside.attach(12, PAGES);
    beside.bear("requests for pages that are not lent", |is_over| {
        guest.connect(is_over, |queue| {
            let abi = queue.options().abi;
            let raw = |id, _: &[GrantRef], _: &[GrantRef]| {
                RawRequest::data(abi, OP_READ, id, 0, &[Segment::page(u32::MAX); 11])
            };
            while queue.submit_raw(OP_READ, raw).is_ok() {}
            queue.publish();
            queue.channel().notify();
            let _ = queue.wait(RETRY_DELAY);
        });
    });
}

#[test]
fn neighbours_of_xen_nodes_that_are_rewritten_and_of_disks_that_come_and_go_wait_for_nothing() {
    let mut beside = Beside::new();
    let guest = beside.attach(13, 64);
    beside.bear("nodes that are rewritten", |is_over| rewrite(&guest.domain, &guest.disk, is_over));
    let mut toolstack = XenStore::connect(&beside.world.path("xenstored"), TIMEOUT).unwrap();
    let mut number = 100_u16;
    beside.bear("disks that are attached and detached", |is_over| {
        while !is_over.load(Ordering::Relaxed) {
            let disk = |n: u16| XenDisk::new("vbd", number + n, XVDA, "memory:1M");
            let disks: Vec<_> = (0..8).map(disk).collect();
            disks.iter().for_each(|disk| disk.announce(&mut toolstack).unwrap());
            std::thread::sleep(RETRY_DELAY);
            disks.iter().for_each(|disk| disk.remove(&mut toolstack).unwrap());
            number += 8;
        }
    });
}
