//! Front-ends that break the rules: each costs its own queue, and is told so once.

use crate::guest::{Guest, TIMEOUT, World, memory, null, pattern};
use manyring_driver::wire::xen::blkif::{
    BlkifSegmentError, BlkifStatus, OP_READ, OP_WRITE, RawRequest, RequestError, Segment,
};
use manyring_driver::{BlkfrontOptions, XEN_PAGE_SIZE, XenOp};
use manyring_engine::EventKind;
use manyring_queue::QueueError;
use std::sync::atomic::{AtomicBool, Ordering};

/// The queue has stopped: what comes is not answered, and the reason is told once.
fn assert_stopped(guest: &mut Guest, fault: QueueError) {
    assert_eq!(guest.next_event(), EventKind::Fault(fault));
    guest.queue.submit(XenOp::Flush).unwrap().unwrap();
    guest.queue.publish();
    guest.queue.channel().notify();
    guest.sync();
    assert!(guest.queue.take().unwrap().is_none(), "{fault:?} stops the queue");
    assert!(guest.events.try_recv().is_err(), "told once");
    assert_eq!(guest.stats().faults.value(), 1);
    assert_eq!(guest.stop().1, 0, "its pages are let go of all the same");
}

fn fault_of(error: RequestError) -> QueueError {
    QueueError::Blkif(error)
}

/// Words of a segment that no sound front-end writes: the parts of its page are the wrong way
/// round.
fn wrong_segment(request: &RawRequest, abi: manyring_driver::wire::xen::blkif::Abi) -> RawRequest {
    let mut words = [0; manyring_driver::wire::xen::blkif::ENTRY_WORDS];
    words[..request.words().len()].copy_from_slice(request.words());
    words[abi.layout().segments / 4 + 1] = u32::from_le_bytes([7, 3, 0, 0]);
    RawRequest::new(abi, words)
}

#[test]
fn a_segment_that_ends_before_it_begins_stops_the_ring_and_what_came_before_is_answered() {
    let world = World::new();
    let mut guest = world.guest(1, memory(), &BlkfrontOptions::default());
    let abi = guest.queue.options().abi;
    let first = guest.queue.submit(XenOp::Write { sector: 0, data: &[1; 512] }).unwrap();
    let raw = |id, grefs: &[manyring_memory::GrantRef], _: &[_]| {
        let sound = RawRequest::data(abi, OP_READ, id, 0, &[Segment::page(grefs[0].0)]);
        wrong_segment(&sound, abi)
    };
    guest.queue.submit_raw(OP_READ, raw).unwrap();
    guest.queue.submit(XenOp::Flush).unwrap();
    guest.queue.publish();
    assert_eq!(guest.queue.wait(TIMEOUT).map(|done| Some(done.tag)).unwrap(), first);
    let error = RequestError::Segment(BlkifSegmentError { first: 7, last: 3 });
    assert_stopped(&mut guest, fault_of(error));
}

#[test]
fn more_segments_than_a_request_can_carry_stop_the_ring() {
    let world = World::new();
    let mut guest = world.guest(1, memory(), &BlkfrontOptions::default());
    let abi = guest.queue.options().abi;
    let raw = |id, grefs: &[manyring_memory::GrantRef], _: &[_]| {
        RawRequest::data(abi, OP_READ, id, 0, &[Segment::page(grefs[0].0); 12])
    };
    guest.queue.submit_raw(OP_READ, raw).unwrap();
    guest.queue.publish();
    assert_stopped(&mut guest, fault_of(RequestError::Segments { count: 12, max: 11 }));
}

#[test]
fn indirect_counts_and_segments_that_lie_stop_the_ring() {
    let world = World::new();
    let abi = BlkfrontOptions::default().abi;
    let too_many = RequestError::Segments { count: 300, max: 256 };
    let segment = RequestError::Segment(BlkifSegmentError { first: 8, last: 9 });
    for (number, count, error) in [(1, 300, too_many), (2, 16, segment)] {
        for persistent in [true, false] {
            let front = BlkfrontOptions { persistent, ..Default::default() };
            let mut guest = world.guest(number + 10 * u16::from(persistent), memory(), &front);
            let first = guest.queue.submit(XenOp::Write { sector: 0, data: &[1; 512] }).unwrap();
            let mut lists = Vec::new();
            let raw = |id, _: &[_], segment_grefs: &[manyring_memory::GrantRef]| {
                lists = segment_grefs.to_vec();
                let grefs: Vec<u32> = segment_grefs.iter().map(|gref| gref.0).collect();
                RawRequest::indirect(abi, OP_WRITE, id, 0, (count, &grefs))
            };
            guest.queue.submit_raw(OP_WRITE, raw).unwrap();
            let entry = guest.domain.table().entry(lists[0]).unwrap();
            let at = usize::try_from(entry.page()).unwrap() * XEN_PAGE_SIZE;
            let list = guest.domain.memory().slice(at, 8).unwrap();
            list.write_from(&[1, 0, 0, 0, 8, 9, 0, 0]);
            guest.queue.submit(XenOp::Flush).unwrap();
            guest.queue.publish();
            let done = guest.queue.wait(TIMEOUT).unwrap();
            assert_eq!((Some(done.tag), done.status), (first, BlkifStatus::Okay));
            assert_stopped(&mut guest, fault_of(error));
        }
    }
}

#[test]
fn an_indirect_page_that_cannot_be_mapped_fails_its_request_alone() {
    let world = World::new();
    let mut guest = world.guest(1, memory(), &BlkfrontOptions::default());
    let abi = guest.queue.options().abi;
    let raw = |id, _: &[_], _: &[_]| RawRequest::indirect(abi, OP_WRITE, id, 0, (16, &[20_000]));
    guest.queue.submit_raw(OP_WRITE, raw).unwrap();
    guest.queue.publish();
    assert_eq!(guest.queue.wait(TIMEOUT).unwrap().status, BlkifStatus::Error);
    guest.queue.flush().unwrap();
}

#[test]
fn a_req_prod_that_jumps_stops_the_ring() {
    let world = World::new();
    let mut guest = world.guest(1, null(), &BlkfrontOptions::default());
    guest.queue.flush().unwrap();
    let ring = guest.queue.nodes().ring_refs[0];
    let entry = guest.domain.table().entry(manyring_memory::GrantRef(ring)).unwrap();
    let at = usize::try_from(entry.page()).unwrap() * XEN_PAGE_SIZE;
    guest.domain.memory().slice(at, 4).unwrap().write_from(&1000_u32.to_le_bytes());
    guest.queue.channel().notify();
    let fault = guest.next_event();
    assert!(
        matches!(fault, EventKind::Fault(QueueError::ReqProd { req_prod: 1000, .. })),
        "{fault:?}"
    );
    assert_eq!(guest.stop().1, 0);
}

#[test]
fn operations_that_nobody_knows_are_unsupported_and_empty_ones_are_errors() {
    let world = World::new();
    let mut guest = world.guest(1, null(), &BlkfrontOptions::default());
    let abi = guest.queue.options().abi;
    for (operation, status) in
        [(4, BlkifStatus::Unsupported), (99, BlkifStatus::Unsupported), (0, BlkifStatus::Error)]
    {
        let raw = |id, _: &[_], _: &[_]| RawRequest::data(abi, operation, id, 0, &[]);
        guest.queue.submit_raw(operation, raw).unwrap();
        guest.queue.publish();
        assert_eq!(guest.queue.wait(TIMEOUT).unwrap().status, status, "operation {operation}");
    }
    guest.queue.flush().unwrap();
}

#[test]
fn a_guest_goes_on_beside_one_that_misuses_its_ring_on_the_same_worker() {
    let world = World::new();
    let front = BlkfrontOptions { persistent: false, ..Default::default() };
    let mut good = world.guest(1, memory(), &front);
    let mut bad = world.guest(2, memory(), &front);
    assert_eq!(good.stats().worker.value(), bad.stats().worker.value());
    let is_over = AtomicBool::new(false);
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    std::thread::scope(|scope| {
        let abi = front.abi;
        let (bad, over) = (&mut bad, Over(&is_over));
        scope.spawn(move || {
            let _over = over;
            // Bad references, sectors past the end, unknown operations, events without reason.
            for round in 0..300_u32 {
                let raw = |id, grefs: &[manyring_memory::GrantRef], _: &[_]| match round % 3 {
                    0 => {
                        RawRequest::data(abi, OP_READ, id, 0, &[Segment::page(20_000 + round); 11])
                    }
                    1 => {
                        RawRequest::data(abi, OP_WRITE, id, u64::MAX, &[Segment::page(grefs[0].0)])
                    }
                    _ => RawRequest::indirect(abi, OP_READ, id, 0, (200, &[grefs[0].0])),
                };
                let operation = if round % 3 == 1 { OP_WRITE } else { OP_READ };
                bad.queue.submit_raw(operation, raw).unwrap();
                bad.queue.publish();
                (0..10).for_each(|_| bad.queue.channel().notify());
                match bad.queue.wait(TIMEOUT / 10) {
                    Ok(done) => assert_eq!(done.status, BlkifStatus::Error),
                    // Its data was no list of segments: its ring has stopped.
                    Err(_) => break,
                }
            }
        });
        let mut rounds = 0_u64;
        while rounds < 200 || !is_over.load(Ordering::Acquire) {
            let data = pattern(16 << 10, rounds as u8);
            good.queue.write(rounds % 50 * 32, &data).unwrap();
            let mut read = vec![0; 16 << 10];
            good.queue.read(rounds % 50 * 32, &mut read).unwrap();
            assert!(read == data, "round {rounds}");
            rounds += 1;
        }
        assert!(good.stats().requests.value() >= 2 * rounds - 1);
    });
    assert_eq!((good.stats().errors.value(), good.stats().faults.value()), (0, 0));
    assert_eq!(good.stop().1, 0);
    assert_eq!(bad.stop().1, 0);
}

#[test]
fn a_guest_goes_on_beside_one_whose_event_channel_is_full_and_blocks() {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    let world = World::new();
    let mut good = world.guest(1, null(), &BlkfrontOptions::default());
    let mut bad = world.guest(2, null(), &BlkfrontOptions::default());
    assert_eq!(good.stats().worker.value(), bad.stats().worker.value());
    good.queue.flush().unwrap();
    // The descriptor by which the back-end tells it of responses is the front-end's too.
    let event = bad.queue.channel().event();
    rustix::io::write(event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let flags = fcntl_getfl(event).unwrap();
    fcntl_setfl(event, flags - OFlags::NONBLOCK).unwrap();
    bad.queue.submit(XenOp::Flush).unwrap();
    bad.queue.publish();
    crate::guest::until("its request is answered", || bad.stats().requests.value() == 1);
    std::thread::sleep(TIMEOUT / 100);
    good.queue.submit(XenOp::Flush).unwrap();
    good.queue.publish();
    let answer = good.queue.wait(TIMEOUT / 10);
    // Release held requests, so that the workers can end.
    let _ = rustix::io::read(bad.queue.channel().event(), &mut [0; 8]);
    fcntl_setfl(bad.queue.channel().event(), flags).unwrap();
    assert_eq!(answer.err().map(|error| error.to_string()), None);
}
