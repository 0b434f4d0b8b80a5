//! The thread that makes a transfer: the worker, a kernel thread that a slot counts, or the disk's.

use super::*;

/// The thread that makes a transfer of 4 KiB, before and after the kernel said it would wait.
fn hands_of(image: Image, op: Op, ring: &mut Ring) -> [Option<Submitter>; 2] {
    let mut queue = UringDisk::new(image).unwrap().queue().unwrap();
    queue.attach(Some(ring), 0);
    let memory = Arc::new(Mapping::anonymous(4096).unwrap());
    let slices = SliceList::of_mapping(&memory, &[(0, 4096)]).unwrap();
    let mut burst = Burst::default();
    burst.slices().extend(slices.all());
    burst.push(0, op, 0, 4096);
    let disk = ring.open_disk(queue.number, queue.image.device());
    let (request, pieces) = burst.iter().next().unwrap();
    queue.remember(request, pieces);
    let first = queue.submitter(0, disk, ring);
    assert!(matches!(queue.in_flight[0].failed(Errno::AGAIN), Step::Again));
    [first, queue.submitter(0, disk, ring)]
}

#[test]
fn a_request_that_a_block_device_makes_wait_is_counted_by_a_slot() {
    let file = image();
    let (narrow, wide) =
        (Some(Submitter::Kernel(Width::Narrow)), Some(Submitter::Kernel(Width::Wide)));
    let (own, at_once) = (Some(Submitter::Own), Some(Submitter::OwnAtOnce));
    let write = Op::Write { durable: false };
    for (direct, op, hands) in [
        (true, write, [at_once, wide]),
        (true, Op::Read, [at_once, wide]),
        (false, write, [narrow, narrow]),
        (false, Op::Read, [own, narrow]),
    ] {
        let options = ImageOptions { direct, ..ImageOptions::default() };
        let image = Image::open_again(file.path(), options).taken_for_block_device();
        let mut ring = Ring::new().unwrap();
        let given = hands_of(image, op, &mut ring);
        assert_eq!(given, hands, "direct {direct}, {op:?}");
    }
}

/// The file lies on no block device: its file system decides whether a transfer would have to wait.
#[test]
fn a_transfer_of_a_direct_file_that_would_wait_is_counted_by_a_slot_also_without_other_guests() {
    let file = image();
    let write = Op::Write { durable: false };
    let (at_once, wide) = (Some(Submitter::OwnAtOnce), Some(Submitter::Kernel(Width::Wide)));
    for (op, has_nowait, is_shared, hands) in [
        (write, true, false, [at_once, wide]),
        (Op::Read, true, false, [at_once, wide]),
        // Without `RWF_NOWAIT` the kernel would use a thread for each transfer.
        (write, false, false, [wide, wide]),
        (Op::Read, false, false, [wide, wide]),
        (write, true, true, [wide, wide]),
        (Op::Read, true, true, [wide, wide]),
    ] {
        let options = ImageOptions { direct: true, ..ImageOptions::default() };
        let image = Image::open_again(file.path(), options);
        let image = if has_nowait { image } else { image.taken_to_wait() };
        let mut ring = Ring::new().unwrap();
        ring.set_shared(is_shared);
        assert_eq!(hands_of(image, op, &mut ring), hands, "{op:?} {has_nowait} {is_shared}");
    }
    let image = Image::open_again(file.path(), ImageOptions::default()).taken_to_wait();
    let hands = hands_of(image, Op::Read, &mut Ring::new().unwrap());
    assert_eq!(
        hands,
        [wide, Some(Submitter::Kernel(Width::Narrow))],
        "a read through the page cache"
    );
}

/// The threads of the kernel would make it behind writes to other images.
#[test]
fn a_write_that_the_kernel_would_queue_is_made_by_the_disks_own_thread_if_it_would_wait() {
    let file = image();
    let (write, at_once) = (Op::Write { durable: false }, Some(Submitter::OwnAtOnce));
    for (direct, is_shared, hands) in [
        (false, false, [at_once, None]),
        (false, true, [at_once, None]),
        (true, false, [at_once, None]),
        (true, true, [None, None]),
    ] {
        let options = ImageOptions { direct, ..ImageOptions::default() };
        let image = Image::open_again(file.path(), options).taken_to_write_in_turn();
        let mut ring = Ring::new().unwrap();
        ring.set_shared(is_shared);
        assert_eq!(hands_of(image, write, &mut ring), hands, "direct {direct}, {is_shared}");
    }
}

#[test]
fn a_transfer_that_cannot_be_refused_at_once_is_tried_once_more_by_who_may_wait() {
    for op in [Op::Read, Op::Write { durable: false }] {
        let mut entry = IoInFlight { op, stage: Stage::Transfer, ..IoInFlight::default() };
        assert!(matches!(entry.failed(Errno::OPNOTSUPP), Step::Again), "{op:?}");
        assert!(entry.retries.is_tried(), "{op:?}");
        assert!(matches!(entry.failed(Errno::OPNOTSUPP), Step::Failed(Errno::OPNOTSUPP)), "{op:?}");
    }
}
