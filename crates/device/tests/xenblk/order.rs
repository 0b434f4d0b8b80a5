//! Flushes, barriers and discards: what comes before what.

use crate::guest::{SECTORS, TIMEOUT, World, memory, null, pattern, usual};
use manyring_backend::blk::fault::{FaultDisk, FaultPlan};
use manyring_backend::blk::null::NullDisk;
use manyring_backend::blk::{Burst, Completion, Disk, DiskQueue, Geometry, Op};
use manyring_backend::sys::uring::Ring;
use manyring_device::blk::blkif::XenBlkOptions;
use manyring_driver::wire::xen::blkif::{BlkifStatus, OP_WRITE_BARRIER, RawRequest};
use manyring_driver::{BlkfrontOptions, XenOp};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// The requests that a disk got and those that it has done, in order.
type Log = Arc<Mutex<Vec<String>>>;

/// A disk that does one request of a few in each turn, the last one first, and writes down what it
/// does.
#[derive(Debug)]
struct Slow {
    log: Log,
}

#[derive(Debug)]
struct SlowQueue {
    log: Log,
    left: VecDeque<(u32, String)>,
}

fn text(op: Op, offset: u64) -> String {
    let sector = offset / 512;
    match op {
        Op::Read => format!("read {sector}"),
        Op::Write { durable: false } => format!("write {sector}"),
        Op::Write { durable: true } => format!("durable write {sector}"),
        Op::Flush => "flush".to_owned(),
        other => format!("{other:?} {sector}"),
    }
}

impl Disk for Slow {
    fn geometry(&self) -> Geometry {
        null().geometry()
    }

    fn open_queue(&self, _: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        Ok(Box::new(SlowQueue { log: self.log.clone(), left: VecDeque::new() }))
    }

    fn resize(&self, _: Option<u64>) -> Result<Geometry, Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn kind(&self) -> &'static str {
        "slow"
    }
}

impl DiskQueue for SlowQueue {
    fn submit(&mut self, burst: &Burst, _: Option<&mut Ring>, _: &mut Vec<Completion>) {
        for (request, _) in burst.iter() {
            let text = text(request.op, request.offset);
            self.log.lock().unwrap().push(format!("begin {text}"));
            self.left.push_front((request.token, text));
        }
    }

    fn reap(&mut self, done: &mut Vec<Completion>) -> bool {
        if let Some((token, text)) = self.left.pop_front() {
            self.log.lock().unwrap().push(format!("end {text}"));
            done.push(Completion { token, result: Ok(()) });
        }
        !self.left.is_empty()
    }
}

/// Where something is in the log.
fn at(log: &Log, what: &str) -> usize {
    let log = log.lock().unwrap();
    log.iter().position(|line| line == what).unwrap_or_else(|| panic!("{what} in {log:?}"))
}

#[test]
fn a_barrier_comes_after_all_writes_before_it_and_before_all_after_it() {
    let world = World::new();
    let log = Log::default();
    let mut guest =
        world.guest(1, Arc::new(Slow { log: log.clone() }), &BlkfrontOptions::default());
    let data = &[1; 512][..];
    let write = |sector| XenOp::Write { sector, data };
    let barrier = XenOp::Barrier { sector: 50, data };
    let ops = [write(1), write(2), write(3), barrier, write(60), write(61)];
    assert_eq!(guest.run_all(&ops), [BlkifStatus::Okay; 6]);
    for before in ["end write 1", "end write 2", "end write 3"] {
        assert!(at(&log, before) < at(&log, "begin flush"), "{before}");
    }
    assert!(at(&log, "end flush") < at(&log, "begin durable write 50"));
    for after in ["begin write 60", "begin write 61"] {
        assert!(at(&log, "end durable write 50") < at(&log, after), "{after}");
    }
    guest.sync();
    let stats = guest.stats();
    assert_eq!((stats.writes.value(), stats.flushes.value()), (6, 0));
    assert_eq!(stats.bytes_written.value(), 6 * 512);
}

#[test]
fn a_flush_with_data_flushes_and_then_writes() {
    let world = World::new();
    let log = Log::default();
    let mut guest =
        world.guest(1, Arc::new(Slow { log: log.clone() }), &BlkfrontOptions::default());
    let data = &[1; 512][..];
    let flush = XenOp::FlushWrite { sector: 7, data };
    assert_eq!(guest.run_all(&[XenOp::Write { sector: 1, data }, flush]), [BlkifStatus::Okay; 2]);
    assert!(at(&log, "end write 1") < at(&log, "begin flush"));
    assert!(at(&log, "end flush") < at(&log, "begin write 7"));
}

#[test]
fn barriers_write_what_they_carry_with_and_without_persistent_grants() {
    let world = World::new();
    for (number, persistent) in [(1, true), (2, false)] {
        let front = BlkfrontOptions { persistent, ..Default::default() };
        let mut guest = world.guest(number, memory(), &front);
        let (first, second) = (pattern(8192, 1), pattern(4096, 2));
        let barrier = XenOp::Barrier { sector: 8, data: &first };
        let flush = XenOp::FlushWrite { sector: 100, data: &second };
        assert_eq!(guest.run_all(&[barrier, flush]), [BlkifStatus::Okay; 2]);
        let mut read = vec![0; 8192];
        guest.queue.read(8, &mut read).unwrap();
        assert!(read == first);
        let mut read = vec![0; 4096];
        guest.queue.read(100, &mut read).unwrap();
        assert!(read == second);
        assert_eq!(guest.stop().1, 0);
    }
}

#[test]
fn a_barrier_whose_flush_fails_is_answered_with_an_error_and_opens_the_ring_again() {
    let world = World::new();
    let plan = FaultPlan { flush_errors: true, ..FaultPlan::default() };
    let disk = FaultDisk::new(memory(), plan);
    let mut guest = world.guest(1, Arc::new(disk), &BlkfrontOptions::default());
    let data = &[1; 512][..];
    let ops = [XenOp::Barrier { sector: 0, data }, XenOp::Write { sector: 1, data }];
    assert_eq!(guest.run_all(&ops), [BlkifStatus::Error, BlkifStatus::Okay]);
    let mut read = [9; 512];
    guest.queue.read(0, &mut read).unwrap();
    assert_eq!(read, [0; 512], "it was not written");
}

#[test]
fn writes_are_durable_when_answered_unless_the_cache_is_write_back() {
    let world = World::new();
    let data = &[1; 512][..];
    for (number, writeback, wanted) in [(1, true, "end write 3"), (2, false, "end durable write 3")]
    {
        let log = Log::default();
        let options = XenBlkOptions { writeback, ..usual() };
        let disk = Arc::new(Slow { log: log.clone() });
        let mut guest = world.guest_of(number, disk, &BlkfrontOptions::default(), options);
        assert_eq!(guest.status(XenOp::Write { sector: 3, data }), BlkifStatus::Okay);
        at(&log, wanted);
    }
}

#[test]
fn what_is_not_offered_is_unsupported() {
    let world = World::new();
    let options = XenBlkOptions { barrier: false, discard: false, ..usual() };
    let mut guest = world.guest_of(1, memory(), &BlkfrontOptions::default(), options);
    let data = &[1; 512][..];
    assert_eq!(guest.status(XenOp::Barrier { sector: 0, data }), BlkifStatus::Unsupported);
    let discard = XenOp::Discard { sector: 0, count: 1, secure: false };
    assert_eq!(guest.status(discard), BlkifStatus::Unsupported);
    guest.queue.flush().unwrap();
}

#[test]
fn discarded_sectors_read_as_zeroes_and_their_neighbours_stay() {
    let world = World::new();
    let mut guest = world.guest(1, memory(), &BlkfrontOptions::default());
    guest.queue.write(0, &[5; 4096]).unwrap();
    guest.queue.discard(1, 6).unwrap();
    let mut read = [1; 4096];
    guest.queue.read(0, &mut read).unwrap();
    let is_gone = |at: usize| (512..3584).contains(&at);
    assert!(read.iter().enumerate().all(|(at, byte)| *byte == if is_gone(at) { 0 } else { 5 }));
    // The flag is of no meaning where erasing is not offered.
    assert!(!guest.device.offer().discard.unwrap().secure);
    let secure = XenOp::Discard { sector: 0, count: 1, secure: true };
    assert_eq!(guest.status(secure), BlkifStatus::Okay);
}

#[test]
fn a_secure_discard_erases_where_that_is_offered() {
    let world = World::new();
    let plan = FaultPlan { secure_erase: true, ..FaultPlan::default() };
    let disk = FaultDisk::new(memory(), plan);
    let mut guest = world.guest(1, Arc::new(disk), &BlkfrontOptions::default());
    assert!(guest.device.offer().discard.unwrap().secure);
    guest.queue.write(0, &[5; 1024]).unwrap();
    let secure = XenOp::Discard { sector: 1, count: 1, secure: true };
    assert_eq!(guest.status(secure), BlkifStatus::Okay);
    let mut read = [1; 1024];
    guest.queue.read(0, &mut read).unwrap();
    assert_eq!((&read[..512], &read[512..]), (&[5; 512][..], &[0; 512][..]));
}

#[test]
fn a_discard_of_terabytes_is_cut_into_pieces_and_answered_once() {
    let world = World::new();
    let sectors = (3 << 40) / 512;
    let mut guest =
        world.guest(1, Arc::new(NullDisk::new(sectors * 512)), &BlkfrontOptions::default());
    let whole = XenOp::Discard { sector: 0, count: sectors, secure: false };
    let data = &[1; 512][..];
    // Others are served beside it.
    let write = XenOp::Write { sector: 0, data };
    assert_eq!(guest.run_all(&[whole, write, XenOp::Flush]), [BlkifStatus::Okay; 3]);
    assert!(guest.queue.take().unwrap().is_none(), "answered once");
    guest.sync();
    assert_eq!(guest.stats().discards.value(), 1);
    let past = XenOp::Discard { sector: 1, count: sectors, secure: false };
    assert_eq!(guest.status(past), BlkifStatus::Error);
    assert!(SECTORS < sectors && guest.queue.wait(TIMEOUT / 1000).is_err());
}

#[test]
fn a_barrier_without_data_comes_after_all_writes_before_it_and_before_all_after_it() {
    let world = World::new();
    let log = Log::default();
    let mut guest =
        world.guest(1, Arc::new(Slow { log: log.clone() }), &BlkfrontOptions::default());
    let abi = guest.queue.options().abi;
    let data = &[1; 512][..];
    guest.queue.submit(XenOp::Write { sector: 1, data }).unwrap();
    guest.queue.submit(XenOp::Write { sector: 2, data }).unwrap();
    let empty = |id, _: &[_], _: &[_]| RawRequest::data(abi, OP_WRITE_BARRIER, id, 0, &[]);
    guest.queue.submit_raw(OP_WRITE_BARRIER, empty).unwrap();
    guest.queue.submit(XenOp::Write { sector: 60, data }).unwrap();
    guest.queue.publish();
    for _ in 0..4 {
        assert_eq!(guest.queue.wait(TIMEOUT).unwrap().status, BlkifStatus::Okay);
    }
    for before in ["end write 1", "end write 2"] {
        assert!(at(&log, before) < at(&log, "begin flush"), "{before}: {log:?}");
    }
    assert!(at(&log, "end flush") < at(&log, "begin write 60"), "{log:?}");
}
