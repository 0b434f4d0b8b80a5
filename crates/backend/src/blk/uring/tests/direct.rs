//! Past the page cache: what `O_DIRECT` refuses is copied, and parts of units do not undo others.

use super::*;
use crate::blk::guard::QUESTION;
use std::os::unix::fs::FileExt;

/// An image as if the host wrote units of 4096 bytes.
fn large(path: &Path) -> Image {
    let options = ImageOptions { direct: true, ..ImageOptions::default() };
    Image::open_again(path, options).taken_for_large_units()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// The pages of the image are not in the page cache at the end, and the bytes are right: also
    /// where the end of the image is inside a unit.
    #[test]
    fn any_memory_offset_and_length_is_served_past_the_page_cache(
        tail in 0..8u64,
        is_device in any::<bool>(),
        steps in prop::collection::vec((op(), 0..SIZE / 512 - 64, 1..64u64, 0..700usize), 1..24),
    ) {
        let (file, plain) = (image(), image());
        let size = SIZE - tail * 512;
        [&file, &plain].iter().for_each(|file| file.as_file().set_len(size).unwrap());
        let image = large(file.path());
        let image = if is_device && tail == 0 { image.taken_for_block_device() } else { image };
        let mut model = Bench::new(plain.path(), false, false);
        let mut benches = [Bench::of(&UringDisk::new(image).unwrap())];
        // Opening the image has read some of its pages into the cache.
        let advice = rustix::fs::Advice::DontNeed;
        rustix::fs::fadvise(file.as_file(), 0, None, advice).unwrap();
        for (n, (op, sector, sectors, skew)) in steps.into_iter().enumerate() {
            let (offset, len) = (sector * 512, (sectors * 512).min(size - sector * 512));
            if op == Op::Discard {
                continue;
            }
            model.fill(n.to_le_bytes()[0]);
            prop_assert_eq!(model.run(op, offset, len, skew), Ok(()));
            for bench in &mut benches {
                bench.fill(n.to_le_bytes()[0]);
                prop_assert_eq!(bench.run(op, offset, len, skew), Ok(()), "{:?}", op);
                prop_assert!(bench.bytes() == model.bytes(), "{:?} {} {}", op, offset, len);
            }
        }
        let fd = std::os::fd::AsFd::as_fd(file.as_file());
        let cached = (0..size.div_ceil(4096))
            .filter(|page| sys::is_cached(fd, page * 4096, 4096) == Some(true))
            .count();
        let bytes = std::fs::read(plain.path()).unwrap();
        prop_assert_eq!(bytes.len() as u64, size);
        prop_assert!(std::fs::read(file.path()).unwrap() == bytes);
        // Linux before 6.5 cannot tell.
        prop_assert_eq!(cached, 0);
    }
}

/// The end of the image is inside its last unit: the host writes the unit, and the file is cut.
#[test]
fn a_write_into_the_last_unit_of_an_image_leaves_no_page_in_the_page_cache() {
    let size = SIZE - 512;
    for _ in 0..8 {
        let file = image();
        file.as_file().set_len(size).unwrap();
        let mut bench = Bench::of(&UringDisk::new(large(file.path())).unwrap());
        rustix::fs::fadvise(file.as_file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let write = Op::Write { durable: false };
        assert_eq!(bench.run(write, 444 * 512, 61 * 512, 0), Ok(()));
        let fd = std::os::fd::AsFd::as_fd(file.as_file());
        let last = size / 4096 * 4096;
        assert_ne!(sys::is_cached(fd, last, 512), Some(true));
        assert_eq!(file.as_file().metadata().unwrap().len(), size);
    }
}

/// Starts a write of `len` bytes of `byte` as `token`.
fn begin(bench: &mut Bench, token: u32, (offset, len): (u64, u64), byte: u8) {
    let (at, size) = (u64::from(token) * 4096, u32::try_from(len).unwrap());
    let memory = bench.memory.clone();
    let whole = memory.slice(usize::try_from(at).unwrap(), size as usize).unwrap();
    whole.write_from(&vec![byte; size as usize]);
    let slices = SliceList::of_mapping(&memory, &[(at, size)]).unwrap();
    let mut burst = Burst::default();
    burst.slices().extend(slices.all());
    burst.push(token, Op::Write { durable: false }, offset, len);
    let mut done = Vec::new();
    bench.queue.submit(&burst, Some(&mut bench.ring), &mut done);
    assert!(done.is_empty(), "{done:?}");
}

/// Hears events until `count` requests are done.
fn end(bench: &mut Bench, count: usize) {
    end_and_hear(bench, count, 0);
}

/// Hears events until `count` requests are done, and the queue was asked `questions` times which
/// writes it has under way.
fn end_and_hear(bench: &mut Bench, count: usize, questions: usize) {
    let (mut done, mut events, mut asked) = (Vec::new(), Vec::new(), 0);
    while done.len() < count || asked < questions {
        await_events(&mut bench.ring, &mut events);
        for event in events.drain(..) {
            let token = u32::try_from(event.user_data).unwrap();
            asked += usize::from(token == QUESTION);
            bench.queue.on_event(token, event.result, Some(&mut bench.ring), &mut done);
        }
        bench.queue.reap(&mut done);
    }
    assert!(done.iter().all(|completion| completion.result.is_ok()), "{done:?}");
}

/// A write of whole units and one of a part of them are under way together, on two queues of two
/// workers and on one queue: what only the first has written must be there.
#[test]
fn a_write_of_a_part_of_a_unit_undoes_no_other_write_of_the_unit() {
    let file = image();
    let disk = UringDisk::new(large(file.path())).unwrap();
    let round = |one: &mut Bench, is_first: bool, n: u32| {
        let byte = n.to_le_bytes()[0];
        if is_first {
            begin(one, 0, (0, 8192), byte);
        } else {
            begin(one, 0, (512, 512), byte);
            begin(one, 1, (4096, 512), byte);
        }
        end(one, if is_first { 1 } else { 2 });
    };
    // Noted and not asserted at once: the other thread would wait for this one for ever.
    let wrong = std::sync::Mutex::new(Vec::new());
    let check = |n: u32| {
        let mut bytes = vec![0; 8192];
        file.as_file().read_exact_at(&mut bytes, 0).unwrap();
        let byte = n.to_le_bytes()[0];
        if bytes.iter().any(|found| *found != byte) {
            wrong.lock().unwrap().push(n);
        }
    };
    let barrier = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        for is_first in [true, false] {
            let (disk, barrier, round, check) = (&disk, &barrier, &round, &check);
            scope.spawn(move || {
                let mut bench = Bench::of(disk);
                for n in 1..400 {
                    barrier.wait();
                    if is_first && n == 1 {
                        // The first write of a part, on the other queue, waits until this queue
                        // was asked. A worker would hear that at any time; here nobody listens
                        // behind the barrier.
                        begin(&mut bench, 3, (65_536, 4096), 0);
                        end_and_hear(&mut bench, 1, 1);
                    }
                    round(&mut bench, is_first, n);
                    barrier.wait();
                    if is_first {
                        check(n);
                    }
                }
            });
        }
    });
    let mut bench = Bench::of(&disk);
    for n in 0..400 {
        let byte = u32::to_le_bytes(n)[0];
        begin(&mut bench, 0, (0, 4096), byte);
        begin(&mut bench, 1, (512, 512), byte);
        begin(&mut bench, 2, (4096, 4096), byte);
        end(&mut bench, 3);
        check(n);
    }
    assert_eq!(*wrong.lock().unwrap(), [], "rounds in which a write was undone");
}

/// The thread must not wait for a write that waits for the thread.
#[test]
fn a_write_that_goes_to_the_thread_after_it_was_listed_does_not_hold_the_thread() {
    let file = image();
    let image = large(file.path()).taken_to_write_in_turn();
    let mut bench = Bench::of(&UringDisk::new(image).unwrap());
    begin(&mut bench, 0, (512, 512), 1);
    end(&mut bench, 1);
    // It is listed from the beginning, and goes to the thread because it would wait.
    begin(&mut bench, 1, (0, 4096), 2);
    bench.queue.on_event(1, -libc::EAGAIN, Some(&mut bench.ring), &mut Vec::new());
    begin(&mut bench, 2, (512, 512), 2);
    let mut left = 2;
    let (mut done, mut events) = (Vec::new(), Vec::new());
    let mut heard = 0;
    while left > 0 {
        await_events(&mut bench.ring, &mut events);
        for event in events.drain(..) {
            let token = u32::try_from(event.user_data).unwrap();
            // The kernel has ended the first entry of the write as well, which is not told again.
            heard += u32::from(token == 1);
            if token == 1 && heard == 1 {
                continue;
            }
            bench.queue.on_event(token, event.result, Some(&mut bench.ring), &mut done);
        }
        left = 2 - done.len();
    }
    assert!(done.iter().all(|completion| completion.result.is_ok()), "{done:?}");
}

/// Memory that was cut away, or that the host cannot read any more, reads as zeroes. No zeroes go
/// to the disk in the place of the guest's bytes: the request fails, as if the kernel had made it.
#[test]
fn what_is_copied_out_of_memory_that_is_gone_does_not_reach_the_disk() {
    manyring_memory::install_sigbus_handler();
    for (offset, len) in [(512, 4096), (4096, 4096)] {
        let file = image();
        std::fs::write(file.path(), vec![0x55; usize::try_from(SIZE).unwrap()]).unwrap();
        let mut bench = Bench::of(&UringDisk::new(large(file.path())).unwrap());
        let guest = std::fs::File::from(
            rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap(),
        );
        guest.set_len(1 << 16).unwrap();
        bench.memory = Arc::new(Mapping::of_file(&guest, 0, 1 << 16).unwrap());
        bench.fill(1);
        guest.set_len(4096).unwrap();
        let write = Op::Write { durable: false };
        assert_eq!(bench.run(write, offset, len, 2050), Err(Errno::FAULT));
        assert_eq!(bench.run(write, offset, len, 2050), Err(Errno::FAULT), "again");
        assert!(std::fs::read(file.path()).unwrap().iter().all(|byte| *byte == 0x55));
        assert_eq!(bench.run(Op::Read, offset, len, 2050), Err(Errno::FAULT), "read");
    }
}

/// The operator makes the file longer, to tell the daemon afterwards, while a write into the last
/// unit goes beyond the end.
#[test]
fn a_write_into_the_last_unit_of_an_image_cuts_off_only_what_it_has_added() {
    let file = image();
    file.as_file().set_len(SIZE - 512).unwrap();
    let image = large(file.path());
    let len = || file.as_file().metadata().unwrap().len();
    image.within_size(Some(SIZE), || file.as_file().set_len(SIZE)).unwrap();
    assert_eq!(len(), SIZE - 512);
    image.within_size(Some(SIZE), || file.as_file().set_len(4 * SIZE)).unwrap();
    assert_eq!(len(), 4 * SIZE);
}
