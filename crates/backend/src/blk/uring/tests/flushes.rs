//! Flushes and durable writes: what the host has lost is told by every flush after it.

use super::*;

/// The test reports an `EIO` of its own in the place of the kernel's answer, because no disk here
/// loses anything.
#[test]
fn flushes_that_end_after_one_that_lost_something_fail_with_it() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(SIZE).unwrap();
    let disk = UringDisk::new(Image::open_again(file.path(), ImageOptions::default())).unwrap();
    let mut ring = Ring::new().unwrap();
    let mut queues = [(); 2].map(|()| disk.open_queue(true).unwrap());
    let mut done = Vec::new();
    for queue in &mut queues {
        queue.attach(Some(&mut ring), 0);
        let mut burst = Burst::default();
        burst.push(0, Op::Flush, 0, 0);
        burst.push(1, Op::Flush, 0, 0);
        queue.submit(&burst, Some(&mut ring), &mut done);
    }
    done.clear();
    let lost = -Errno::IO.raw_os_error();
    for (queue, token, result) in [(0, 0, 0), (0, 1, lost), (1, 0, 0), (1, 1, 0)] {
        queues[queue].on_event(token, result, Some(&mut ring), &mut done);
    }
    let results: Vec<_> = done.iter().map(|completion| completion.result).collect();
    assert_eq!(results, [Ok(()), Err(Errno::IO), Err(Errno::IO), Err(Errno::IO)]);
}

/// The test reports the `EIO` itself. Nothing of a direct image lies in the page cache, aligned or
/// not, so the disk may still have the bytes, and the next flush is believed.
#[test]
fn a_direct_image_whose_flush_failed_is_flushed_at_the_next_try() {
    let file = image();
    for skew in [4, 0] {
        let mut bench = Bench::new(file.path(), true, true);
        assert_eq!(bench.run(Op::Write { durable: false }, 0, 4096, skew), Ok(()));
        let mut done = Vec::new();
        for (token, result) in [(0, -Errno::IO.raw_os_error()), (1, 0)] {
            let mut burst = Burst::default();
            burst.push(token, Op::Flush, 0, 0);
            bench.queue.submit(&burst, Some(&mut bench.ring), &mut done);
            bench.queue.on_event(token, result, Some(&mut bench.ring), &mut done);
        }
        let results: Vec<_> = done.iter().map(|completion| completion.result).collect();
        assert_eq!(results, [Err(Errno::IO), Ok(())], "skew {skew}");
    }
}

/// The test reports the `EIO` itself. Linux would tell one call of several that pages were lost,
/// and no flush after it.
#[test]
fn a_write_that_must_be_durable_and_loses_its_pages_fails_the_flushes_after_it() {
    let file = image();
    for (direct, flushes) in [(false, true), (true, false)] {
        let mut bench = Bench::new(file.path(), true, direct);
        let mut burst = Burst::default();
        let slices = SliceList::of_mapping(&bench.memory, &[(0, 4096)]).unwrap();
        burst.slices().extend(slices.all());
        burst.push(0, Op::Write { durable: true }, 0, 4096);
        let mut done = Vec::new();
        bench.queue.submit(&burst, Some(&mut bench.ring), &mut done);
        bench.queue.on_event(0, 4096, Some(&mut bench.ring), &mut done);
        assert_eq!(done.is_empty(), flushes, "direct {direct}");
        if !flushes {
            continue;
        }
        let lost = -Errno::IO.raw_os_error();
        bench.queue.on_event(0, lost, Some(&mut bench.ring), &mut done);
        let mut burst = Burst::default();
        burst.push(1, Op::Flush, 0, 0);
        bench.queue.submit(&burst, Some(&mut bench.ring), &mut done);
        bench.queue.on_event(1, 0, Some(&mut bench.ring), &mut done);
        let failed = |token| Completion { token, result: Err(Errno::IO) };
        assert_eq!(done, [failed(0), failed(1)], "direct {direct}");
    }
}

/// Of two calls at a time through one description, one could succeed although what it was for is
/// lost, and be answered before the one that fails.
#[test]
fn a_flush_begins_when_no_other_of_its_queue_is_under_way() {
    let file = image();
    let disk = UringDisk::new(Image::open_again(file.path(), ImageOptions::default())).unwrap();
    let mut ring = Ring::new().unwrap();
    let mut queues = [(); 2].map(|()| disk.open_queue(true).unwrap());
    let (mut done, mut under_way) = (Vec::new(), Vec::new());
    for (queue, tag) in queues.iter_mut().zip([0, 8]) {
        queue.attach(Some(&mut ring), tag);
        let mut burst = Burst::default();
        for token in 0..3 {
            burst.push(token, Op::Flush, 0, 0);
        }
        queue.submit(&burst, Some(&mut ring), &mut done);
        under_way.push(ring.aside());
    }
    assert_eq!(under_way, [1, 2], "one of each queue");
    let mut events = Vec::new();
    while done.len() < 6 {
        await_events(&mut ring, &mut events);
        for event in events.drain(..) {
            let token = u32::try_from(event.user_data % 8).unwrap();
            let queue = &mut queues[usize::from(event.user_data >= 8)];
            let (before, first) = (done.len(), token == 0);
            queue.on_event(token, event.result, Some(&mut ring), &mut done);
            assert_eq!(done.len() - before, if first { 1 } else { 2 }, "the others together");
        }
    }
    assert!(done.iter().all(|completion| completion.result.is_ok()), "{done:?}");
    assert_eq!(ring.aside(), 0);
}

/// The test gives the kernel's answers itself. A flush that was interrupted each time never came as
/// far as the pages, so the guest's next flush is asked of the kernel and believed.
#[test]
fn a_flush_that_is_interrupted_for_ever_fails_alone_and_the_image_has_lost_nothing() {
    let file = image();
    for errno in [Errno::INTR, Errno::AGAIN] {
        let mut bench = Bench::new(file.path(), true, false);
        let mut done = Vec::new();
        for token in [0, 1] {
            let mut burst = Burst::default();
            burst.push(token, Op::Flush, 0, 0);
            bench.queue.submit(&burst, Some(&mut bench.ring), &mut done);
            let mut times = 0;
            while token == 0 && done.is_empty() {
                times += 1;
                assert!(times < 100_000, "it is tried for ever");
                let result = -errno.raw_os_error();
                bench.queue.on_event(0, result, Some(&mut bench.ring), &mut done);
            }
        }
        bench.queue.on_event(1, 0, Some(&mut bench.ring), &mut done);
        let of = |token, result| Completion { token, result };
        assert_eq!(done, [of(0, Err(Errno::IO)), of(1, Ok(()))], "{errno}");
    }
}
