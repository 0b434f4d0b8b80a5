//! A worker that has work in every round: what it counts, and what that is to a neighbour.

use crate::guest::{DATA, Guest, SECTORS, USUAL, null, until};
use manyring_backend::blk::{Burst, Completion, Disk, DiskQueue, Geometry};
use manyring_backend::sys::uring::Ring;
use manyring_wire::blk::{VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;

/// A disk whose requests never end: it does a piece of them in every turn.
#[derive(Debug)]
struct Endless;

impl Disk for Endless {
    fn geometry(&self) -> Geometry {
        let block_size = 512;
        let geometry = Geometry { size: SECTORS * 512, block_size, ..null().geometry() };
        Geometry { physical_block_size: block_size, min_io_size: block_size, ..geometry }
    }

    fn open_queue(&self, _: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        Ok(Box::new(Self))
    }

    fn resize(&self, _: Option<u64>) -> Result<Geometry, Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn kind(&self) -> &'static str {
        "endless"
    }
}

impl DiskQueue for Endless {
    fn submit(&mut self, _: &Burst, _: Option<&mut Ring>, _: &mut Vec<Completion>) {}

    fn reap(&mut self, _: &mut Vec<Completion>) -> bool {
        true
    }
}

/// A guest whose request keeps the first worker at work in every round.
fn busy() -> Guest {
    let mut guest = Guest::new(Arc::new(Endless), &USUAL);
    guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
    guest.publish();
    until("the disk has the request", || guest.stats().in_flight.value() == 1);
    guest
}

#[test]
fn a_worker_that_has_work_in_every_round_does_not_look_in_vain() {
    let guest = busy();
    let worker = guest.pool.worker_stats()[0].clone();
    let before = (worker.looked_ns.value(), worker.sleeps.value());
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((worker.looked_ns.value(), worker.sleeps.value()), before);
}

/// A look at a ring costs the neighbour time.
#[test]
fn a_queue_that_has_nothing_beside_a_busy_neighbour_asks_for_kicks() {
    let busy = busy();
    let mut guest = Guest::on(busy.pool.clone(), null(), &USUAL);
    // The driver kicks for the first request of a ring in any case.
    guest.flush();
    for round in 0.. {
        assert!(round < 200, "it looks at its ring for ever");
        guest.add(VIRTIO_BLK_T_FLUSH, 0, &[], &[]);
        let wants_kick = guest.publish();
        guest.until_used();
        if wants_kick {
            break;
        }
        // Longer than it looks in vain.
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(busy.stats().in_flight.value(), 1, "the neighbour was busy all the time");
}
