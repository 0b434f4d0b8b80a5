//! The requests that one guest finds before its own when its worker gives it to the kernel's
//! threads. The time that it takes says less: on a busy host these threads wait for a CPU.

use crate::{Guest, LONG_SECTORS, cached_image, one_worker};
use manyring_backend::blk::uring::UringDisk;
use manyring_backend::blk::{self, Burst, Completion, Disk, DiskQueue, Geometry};
use manyring_backend::sys::uring::Ring;
use manyring_driver::{BlkDriverOptions, BlkDriverQueue, DriverOp};
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The notes of disks about the requests that a worker gives to them.
#[derive(Debug, Default)]
struct Order {
    /// Requests that are done.
    done: AtomicU64,
    /// Requests that the kernel's threads had just before and just after each flush was given away.
    around_flush: Mutex<Vec<(usize, usize)>>,
}

/// Tells an [`Order`] what becomes of the requests of another disk.
#[derive(Debug)]
struct OrderedDisk {
    inner: UringDisk,
    order: Arc<Order>,
}

impl Disk for OrderedDisk {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn open_queue(&self, has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        let inner = self.inner.open_queue(has_ring)?;
        Ok(Box::new(OrderedQueue { inner, order: self.order.clone() }))
    }

    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno> {
        self.inner.resize(size)
    }

    fn kind(&self) -> &'static str {
        "ordered"
    }
}

#[derive(Debug)]
struct OrderedQueue {
    inner: Box<dyn DiskQueue>,
    order: Arc<Order>,
}

impl OrderedQueue {
    fn note(&self, done: usize) {
        self.order.done.fetch_add(done as u64, Ordering::SeqCst);
    }
}

impl DiskQueue for OrderedQueue {
    fn attach(&mut self, ring: Option<&mut Ring>, tag: u64) {
        self.inner.attach(ring, tag);
    }

    fn detach(&mut self, ring: Option<&mut Ring>) {
        self.inner.detach(ring);
    }

    fn burst_max(&self) -> usize {
        self.inner.burst_max()
    }

    fn submit(&mut self, burst: &Burst, mut ring: Option<&mut Ring>, done: &mut Vec<Completion>) {
        let aside = |ring: &Option<&mut Ring>| ring.as_ref().map_or(0, |ring| ring.aside());
        let (before, done_before) = (aside(&ring), done.len());
        self.inner.submit(burst, ring.as_deref_mut(), done);
        if burst.iter().any(|(request, _)| request.op == blk::Op::Flush) {
            self.order.around_flush.lock().unwrap().push((before, aside(&ring)));
        }
        self.note(done.len() - done_before);
    }

    fn on_event(
        &mut self,
        token: u32,
        result: i32,
        ring: Option<&mut Ring>,
        done: &mut Vec<Completion>,
    ) {
        let before = done.len();
        self.inner.on_event(token, result, ring, done);
        self.note(done.len() - before);
    }

    fn reap(&mut self, done: &mut Vec<Completion>) -> bool {
        let before = done.len();
        let more = self.inner.reap(done);
        self.note(done.len() - before);
        more
    }
}

/// Both guests need the kernel's threads, which take the entries of a ring in the order in which
/// they were given to them: a flush waits for those that they have when it is given away.
#[test]
fn a_flush_does_not_wait_for_all_long_requests_of_another_guest() {
    // More than a worker copies by itself.
    const LEN: usize = 132 << 10;
    const QUEUES: u16 = 16;
    const DEPTH: u16 = 128;
    const FLUSHES: usize = 17;
    let pool = one_worker(true);
    let order = Arc::new(Order::default());
    let (images, disks): (Vec<_>, Vec<_>) = [(); 2]
        .map(|()| {
            let (file, image) = cached_image(false);
            let (inner, order) = (UringDisk::new(image).unwrap(), order.clone());
            (file, Arc::new(OrderedDisk { inner, order }))
        })
        .into_iter()
        .unzip();
    let options = BlkDriverOptions {
        queues: QUEUES,
        queue_size: DEPTH,
        buffer_size: u32::try_from(LEN).unwrap(),
        segment_size: 1 << 20,
        ..Default::default()
    };
    let mut guest = Guest::new(&pool, disks[0].clone(), &options);
    let default = BlkDriverOptions::default();
    let mut neighbour = Guest::new(&pool, disks[1].clone(), &default);
    let mut sector = 0;
    // Keeps every queue full.
    let mut go_on = |queues: &mut [BlkDriverQueue]| {
        for queue in queues {
            while queue.take().is_some() {}
            while queue.submit(DriverOp::Read { sector, len: LEN }).unwrap().is_some() {
                sector = (sector + LEN as u64 / 512) % u64::from(LONG_SECTORS / 2);
            }
            queue.publish().unwrap();
        }
        std::thread::yield_now();
    };
    for _ in 0..FLUSHES {
        // All that the rings hold is under way before the flush is.
        let full = order.done.load(Ordering::SeqCst) + u64::from(QUEUES * DEPTH);
        while order.done.load(Ordering::SeqCst) < full {
            go_on(&mut guest.queues);
        }
        let queue = &mut neighbour.queues[0];
        queue.submit(DriverOp::Flush).unwrap().expect("device process in the ring");
        queue.publish().unwrap();
        while queue.take().is_none() {
            go_on(&mut guest.queues);
        }
    }
    neighbour.stop();
    guest.stop();
    drop(images);
    let around = std::mem::take(&mut *order.around_flush.lock().unwrap());
    assert_eq!(around.len(), FLUSHES);
    // Thousands of requests wait for the threads, of which each flush finds four in front of it.
    let waits_for_few = |&(before, after): &(usize, usize)| before < 64 && after == before + 1;
    assert!(around.iter().all(waits_for_few), "with the threads before and after: {around:?}");
    let full = around.iter().filter(|(before, _)| *before >= 4).count();
    assert!(full > FLUSHES / 2, "the threads had nothing to do: {around:?}");
}
