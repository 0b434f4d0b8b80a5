//! `uring` and its plain twin `file` do the same, request by request.

mod direct;
mod flushes;
mod guarded_writes;
mod submitter;

use super::*;
use crate::blk::file::FileDisk;
use crate::blk::{Burst, ImageOptions};
use crate::sys::uring::Event;
use proptest::prelude::*;
use std::path::{Path, PathBuf};

const SIZE: u64 = 1 << 18;

/// A disk queue with a ring of its own and 64 KiB of "guest" memory.
struct Bench {
    ring: Ring,
    queue: Box<dyn DiskQueue>,
    memory: Arc<Mapping>,
    /// The image, if the kernel is to have no thread for any request.
    refused: Option<PathBuf>,
}

/// Waits until something has completed. A wake can find nothing: what it tells of was taken with
/// the wake before.
fn await_events(ring: &mut Ring, events: &mut Vec<Event>) {
    for _ in 0..1000 {
        ring.wait(Some(std::time::Duration::from_millis(10))).unwrap();
        ring.reap(events);
        if !events.is_empty() {
            return;
        }
    }
    panic!("nobody answers");
}

impl Bench {
    fn new(path: &Path, uring: bool, direct: bool) -> Self {
        let options = ImageOptions { direct, ..ImageOptions::default() };
        let image = Image::open_again(path, options);
        if uring {
            Self::of(&UringDisk::new(image).unwrap())
        } else {
            Self::of(&FileDisk::new(image))
        }
    }

    /// Through the ring, in the way of a block device.
    fn of_device(path: &Path, direct: bool) -> Self {
        let options = ImageOptions { direct, ..ImageOptions::default() };
        let image = Image::open_again(path, options).taken_for_block_device();
        Self::of(&UringDisk::new(image).unwrap())
    }

    fn of(disk: &dyn Disk) -> Self {
        let mut ring = Ring::new().unwrap();
        let mut queue = disk.open_queue(true).unwrap();
        queue.attach(Some(&mut ring), 0);
        let memory = Arc::new(Mapping::anonymous(1 << 16).unwrap());
        Self { ring, queue, memory, refused: None }
    }

    fn run(&mut self, op: Op, offset: u64, len: u64, memory_offset: usize) -> Result<(), Errno> {
        let mut burst = Burst::default();
        if matches!(op, Op::Read | Op::Write { .. }) {
            // Two slices, to see that both are used.
            let (at, half) = (memory_offset as u64, len / 2 / 512 * 512);
            let places = [(at, half), (at + half, len - half)].map(|(at, len)| {
                let len = u32::try_from(len).unwrap();
                (at, len)
            });
            let slices = SliceList::of_mapping(&self.memory, &places).unwrap();
            burst.slices().extend_part(slices.all(), 0, usize::MAX);
        }
        burst.push(3, op, offset, len);
        let before = self.refused.clone().map(|path| {
            let image = std::fs::read(&path).unwrap();
            (path, image, self.bytes())
        });
        let (mut done, mut events) = (Vec::new(), Vec::new());
        self.queue.submit(&burst, Some(&mut self.ring), &mut done);
        // The results of the disk's thread come with an eventfd, which is never read.
        let offload = u64::MAX;
        if let Some(fd) = self.queue.readiness() {
            self.ring.poll(fd, offload);
        }
        loop {
            let has_more = self.queue.reap(&mut done);
            if !done.is_empty() {
                break;
            }
            if has_more {
                continue;
            }
            await_events(&mut self.ring, &mut events);
            for event in events.drain(..).filter(|e| e.user_data != offload) {
                let mut result = event.result;
                if let Some((path, image, memory)) = &before {
                    // As if the kernel had done nothing.
                    std::fs::write(path, image).unwrap();
                    self.memory.slice(0, 1 << 16).unwrap().write_from(memory);
                    result = -libc::ECANCELED;
                }
                let (token, ring) = (u32::try_from(event.user_data).unwrap(), Some(&mut self.ring));
                self.queue.on_event(token, result, ring, &mut done);
            }
        }
        self.ring.poll_remove(offload, offload);
        assert_eq!((done.len(), done[0].token), (1, 3));
        done[0].result
    }

    /// Reads 4 KiB. True if no thread of the kernel did it.
    fn reads_here(&mut self) -> bool {
        let mut burst = Burst::default();
        let slices = SliceList::of_mapping(&self.memory, &[(0, 4096)]).unwrap();
        burst.slices().extend(slices.all());
        burst.push(0, Op::Read, 0, 4096);
        let (mut done, mut events) = (Vec::new(), Vec::new());
        self.queue.submit(&burst, Some(&mut self.ring), &mut done);
        // The plain twin has what it does here done by now.
        let is_plain = self.queue.readiness().is_some();
        let is_here = self.ring.aside() == 0 && (!is_plain || !done.is_empty());
        while done.is_empty() && is_plain {
            self.queue.reap(&mut done);
        }
        while done.is_empty() {
            await_events(&mut self.ring, &mut events);
            // The end of the watch of the run before is no request's.
            for event in events.drain(..).filter(|event| event.user_data == 0) {
                self.queue.on_event(0, event.result, Some(&mut self.ring), &mut done);
            }
        }
        assert_eq!(done, [Completion { token: 0, result: Ok(()) }]);
        self.queue.reap(&mut done);
        is_here
    }

    fn fill(&self, seed: u8) {
        let byte = |i: u32| (i / 512).to_le_bytes()[0] ^ i.to_le_bytes()[0] ^ seed;
        let bytes: Vec<u8> = (0..1 << 16).map(byte).collect();
        self.memory.slice(0, 1 << 16).unwrap().write_from(&bytes);
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; 1 << 16];
        self.memory.slice(0, 1 << 16).unwrap().read_into(&mut bytes);
        bytes
    }
}

fn image() -> tempfile::NamedTempFile {
    // Beside the build, not on a tmpfs: O_DIRECT and io_uring are what is tested.
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    std::fs::create_dir_all(&folder).unwrap();
    let file = tempfile::NamedTempFile::new_in(folder).unwrap();
    file.as_file().set_len(SIZE).unwrap();
    file
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => Just(Op::Read),
        4 => any::<bool>().prop_map(|durable| Op::Write { durable }),
        1 => Just(Op::Flush),
        1 => Just(Op::Discard),
        2 => any::<(bool, bool)>()
            .prop_map(|(unmap, durable)| Op::WriteZeroes { unmap, durable }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn uring_does_what_its_plain_twin_does(
        direct in any::<bool>(),
        steps in prop::collection::vec((op(), 0..SIZE / 512 - 64, 1..64u64, 0..3usize), 1..24),
    ) {
        let files = [(); 3].map(|()| image());
        let [left, device, right] = files.each_ref().map(tempfile::NamedTempFile::path);
        let mut twins =
            [Bench::new(left, true, direct), Bench::of_device(device, direct)];
        let mut file = Bench::new(right, false, direct);
        for (n, (op, sector, sectors, skew)) in steps.into_iter().enumerate() {
            // An odd memory address is not aligned for O_DIRECT.
            let (offset, len, memory) = (sector * 512, sectors * 512, skew * 4);
            file.fill(n.to_le_bytes()[0]);
            let result = file.run(op, offset, len, memory);
            for uring in &mut twins {
                uring.fill(n.to_le_bytes()[0]);
                prop_assert_eq!(uring.run(op, offset, len, memory), result);
                prop_assert_eq!(uring.bytes(), file.bytes());
            }
        }
        let bytes = std::fs::read(right).unwrap();
        prop_assert!(std::fs::read(left).unwrap() == bytes);
        prop_assert!(std::fs::read(device).unwrap() == bytes);
    }
}

#[test]
fn a_request_for_which_the_kernel_has_no_thread_is_served_by_the_worker() {
    let zero = |unmap, durable| Op::WriteZeroes { unmap, durable };
    let write = |durable| Op::Write { durable };
    let all = [write(false), write(true), Op::Flush, Op::Read, zero(false, true)];
    for direct in [false, true] {
        let (left, right) = (image(), image());
        let mut uring = Bench::of_device(left.path(), direct);
        let mut file = Bench::new(right.path(), false, direct);
        uring.refused = Some(left.path().to_owned());
        for (n, op) in all.into_iter().chain([zero(true, false), Op::Discard]).enumerate() {
            for bench in [&mut uring, &mut file] {
                bench.fill(n.to_le_bytes()[0]);
                assert_eq!(bench.run(op, 8192 * n as u64, 12_288, 0), Ok(()), "{op:?}");
            }
            assert_eq!(uring.bytes(), file.bytes(), "{op:?}");
            let [left, right] = [&left, &right].map(|file| std::fs::read(file.path()).unwrap());
            assert!(left == right, "{op:?}");
        }
    }
}

#[test]
fn zeroes_are_written_where_no_call_makes_them() {
    let file = image();
    std::fs::write(file.path(), vec![0xff; 1 << 18]).unwrap();
    let image = Image::open_again(file.path(), ImageOptions::default());
    let disk = UringDisk::new(image).unwrap();
    let mut ring = Ring::new().unwrap();
    let mut entry = IoInFlight {
        op: Op::WriteZeroes { unmap: false, durable: true },
        stage: Stage::Fallocate(ZERO_RANGE),
        offset: 512,
        len: 1 << 17,
        ..IoInFlight::default()
    };
    assert!(matches!(entry.failed(Errno::OPNOTSUPP), Step::Again));
    assert_eq!(entry.stage, Stage::Zeroes);
    let slices = zeroes(disk.zeroes, entry.len);
    let plain = RingFile::Plain(std::os::fd::AsRawFd::as_raw_fd(&disk.image.file()));
    let op = FileOp::Write { dsync: false };
    let file_of_disk = (ring.open_disk(1, 1), plain);
    // SAFETY: our zeroes are mapped for ever.
    unsafe {
        ring.transfer(op, file_of_disk, &slices, entry.offset, Submitter::Kernel(Width::Narrow), 0)
    };
    let mut events = Vec::new();
    ring.wait(None).unwrap();
    ring.reap(&mut events);
    let n = usize::try_from(events[0].result).unwrap();
    assert_eq!(n, 1 << 17);
    assert!(matches!(entry.went_on(n, &disk.image), Step::Again));
    assert_eq!(entry.stage, Stage::Flush);
    assert!(matches!(entry.went_on(0, &disk.image), Step::Done));
    let bytes = std::fs::read(file.path()).unwrap();
    assert!(bytes[..512].iter().all(|b| *b == 0xff));
    assert!(bytes[512..512 + n].iter().all(|b| *b == 0));
    assert!(bytes[512 + n..].iter().all(|b| *b == 0xff));
}

#[test]
fn a_file_that_was_cut_gives_an_error_and_not_stale_bytes() {
    let file = image();
    for uring in [true, false] {
        file.as_file().set_len(SIZE).unwrap();
        let mut bench = Bench::new(file.path(), uring, false);
        file.as_file().set_len(0).unwrap();
        assert_eq!(bench.run(Op::Read, 0, 4096, 0), Err(Errno::IO), "uring {uring}");
        drop(bench);
    }
}

#[test]
fn a_request_that_meets_the_end_of_a_cut_file_fails_alone_and_moves_what_is_before_it() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    const END: u64 = 16_384;
    for (op, error) in [(Op::Read, Errno::IO), (Op::Write { durable: false }, Errno::PERM)] {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("image", flags).unwrap();
        ftruncate(&file, SIZE).unwrap();
        rustix::io::pwrite(&file, &vec![7; usize::try_from(SIZE).unwrap()], 0).unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let mut bench = Bench::new(Path::new(&path), true, false);
        // A part of the second of three requests is there; nobody can make the file grow again.
        ftruncate(&file, END).unwrap();
        fcntl_add_seals(&file, SealFlags::GROW).unwrap();
        bench.fill(1);
        let before = bench.bytes();
        let requests = [(0, 4096), (12_288, 12_288), (4096, 4096)];
        let slices = SliceList::of_mapping(&bench.memory, &requests).unwrap();
        let mut burst = Burst::default();
        for (token, (offset, len)) in (0..).zip(requests) {
            burst.slices().extend(slices.pieces(token..token + 1));
            burst.push(u32::try_from(token).unwrap(), op, offset, len.into());
        }
        let mut done = Vec::new();
        bench.queue.submit(&burst, Some(&mut bench.ring), &mut done);
        while bench.queue.reap(&mut done) {}
        let of = |token| Completion { token, result: if token == 1 { Err(error) } else { Ok(()) } };
        assert_eq!(done, [0, 1, 2].map(of), "in order");
        let (memory, image) = (bench.bytes(), std::fs::read(&path).unwrap());
        assert_eq!(image.len() as u64, END);
        for at in 0..memory.len() {
            let is_moved = at < 8192 || (12_288..image.len()).contains(&at);
            let expected = if is_moved && op == Op::Read { 7 } else { before[at] };
            assert_eq!(memory[at], expected, "{op:?} at {at}");
            if op != Op::Read && at < image.len() {
                assert_eq!(image[at], if is_moved { before[at] } else { 7 }, "{op:?} at {at}");
            }
        }
    }
}

#[test]
fn a_file_system_that_cannot_say_would_wait_is_read_all_the_same() {
    // tmpfs: preadv2 with RWF_NOWAIT is "not supported" there.
    let file = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, SIZE).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let mut bench = Bench::new(Path::new(&path), true, false);
    assert_eq!(bench.run(Op::Read, 0, 4096, 0), Ok(()));
}

#[test]
fn a_device_that_made_the_worker_wait_is_read_by_threads_of_the_kernel() {
    let file = image();
    let mut bench = Bench::new(file.path(), true, false);
    assert_eq!(bench.run(Op::Read, 0, 4096, 0), Ok(()), "now it is in the page cache");
    let device = std::os::unix::fs::MetadataExt::dev(&file.as_file().metadata().unwrap());
    assert!(bench.reads_here());
    // Another disk of this device makes the worker wait, in a call of which more is known the
    // second time: that the thread gave its CPU away.
    for times in 1..=2 {
        let disk = bench.ring.open_disk(u64::MAX, device);
        let began = bench.ring.begin();
        assert!(bench.ring.is_fast(disk));
        bench.ring.calls(disk);
        std::thread::sleep(std::time::Duration::from_millis(10));
        bench.ring.took(began);
        assert_eq!(bench.ring.device_waits(), times);
        assert!(!bench.reads_here(), "the worker could wait again");
        std::thread::sleep(std::time::Duration::from_millis(250 * times));
        assert!(bench.reads_here());
    }
}

#[test]
fn a_shared_worker_reads_by_itself_only_what_the_page_cache_holds() {
    let file = image();
    file.as_file().sync_all().unwrap();
    let forget = || {
        let whole = std::num::NonZeroU64::new(SIZE);
        let advice = rustix::fs::Advice::DontNeed;
        rustix::fs::fadvise(file.as_file(), 0, whole, advice).unwrap();
    };
    for (uring, direct, is_cached, shared, is_here) in [
        (true, false, true, false, true),
        (true, false, false, false, true),
        (true, false, true, true, true),
        (true, false, false, true, false),
        (true, true, false, false, true),
        (true, true, false, true, false),
        (false, false, true, false, true),
        (false, false, false, false, false),
    ] {
        let mut bench = Bench::new(file.path(), uring, direct);
        forget();
        if is_cached {
            std::fs::read(file.path()).unwrap();
        }
        bench.ring.set_shared(shared);
        assert_eq!(bench.reads_here(), is_here, "{uring} {direct} {is_cached} {shared}");
    }
}

#[test]
fn a_disk_that_says_again_for_ever_fails_the_request() {
    for errno in [Errno::AGAIN, Errno::INTR] {
        let file = image();
        let mut bench = Bench::new(file.path(), true, true);
        let mut burst = Burst::default();
        let slices = SliceList::of_mapping(&bench.memory, &[(0, 4096)]).unwrap();
        burst.slices().extend(slices.all());
        burst.push(0, Op::Read, 0, 4096);
        let mut done = Vec::new();
        bench.queue.submit(&burst, Some(&mut bench.ring), &mut done);
        let mut times = 0;
        while done.is_empty() {
            times += 1;
            assert!(times < 100_000, "it is tried for ever");
            let result = -errno.raw_os_error();
            bench.queue.on_event(0, result, Some(&mut bench.ring), &mut done);
        }
        assert_eq!(done, [Completion { token: 0, result: Err(Errno::IO) }]);
        assert!(times > 100, "a shortage that passes is no error");
    }
}

#[test]
fn a_request_longer_than_an_entry_is_whole() {
    let file = image();
    let size = 3 * PIECE_BYTES + 512;
    file.as_file().set_len(size).unwrap();
    for (uring, direct) in [(true, false), (true, true), (false, false)] {
        let mut bench = Bench::new(file.path(), uring, direct);
        let memory = Arc::new(Mapping::anonymous(size).unwrap());
        bench.memory = memory.clone();
        let whole = memory.slice(0, usize::try_from(size).unwrap()).unwrap();
        let byte = |at: u64| (at / 512).to_le_bytes();
        let bytes: Vec<u8> = (0..size / 8).flat_map(|at| byte(at * 8)).collect();
        whole.write_from(&bytes);
        assert_eq!(bench.run(Op::Write { durable: false }, 0, size, 0), Ok(()));
        assert!(std::fs::read(file.path()).unwrap() == bytes, "{uring} {direct}");
        whole.fill_zero();
        assert_eq!(bench.run(Op::Read, 0, size, 0), Ok(()));
        let mut found = vec![0; bytes.len()];
        whole.read_into(&mut found);
        assert!(found == bytes, "{uring} {direct}");
    }
}

#[test]
fn a_secure_erase_leaves_the_thread_of_the_worker() {
    let file = image();
    let image = Image::open_again(file.path(), ImageOptions::default());
    let disk = UringDisk::new(image).unwrap();
    let mut ring = Ring::new().unwrap();
    let mut queue = disk.queue().unwrap();
    queue.attach(Some(&mut ring), 0);
    let mut burst = Burst::default();
    burst.push(3, Op::SecureErase, 0, 512);
    let mut done = Vec::new();
    queue.submit(&burst, Some(&mut ring), &mut done);
    assert_eq!(done, [], "it was served here");
    let mut events = Vec::new();
    await_events(&mut ring, &mut events);
    queue.on_event(3, events[0].result, Some(&mut ring), &mut done);
    // A file is no block device; the thread has asked.
    assert_eq!(done, [Completion { token: 3, result: Err(Errno::NOTTY) }]);
}

#[test]
fn memory_of_an_entry_that_has_not_ended_stays_mapped_when_its_queue_ends() {
    let file = image();
    let mut bench = Bench::new(file.path(), true, true);
    let memory = Arc::downgrade(&bench.memory);
    for (token, reaped) in [(0, true), (1, false)] {
        let mut burst = Burst::default();
        let slices = SliceList::of_mapping(&bench.memory, &[(0, 4096)]).unwrap();
        burst.slices().extend(slices.all());
        burst.push(token, Op::Read, 0, 4096);
        let mut done = Vec::new();
        bench.queue.submit(&burst, Some(&mut bench.ring), &mut done);
        while reaped && done.is_empty() {
            let mut events = Vec::new();
            await_events(&mut bench.ring, &mut events);
            for event in events {
                bench.queue.on_event(token, event.result, Some(&mut bench.ring), &mut done);
            }
        }
    }
    // The front-end takes its memory back: the request that has ended lets go of it.
    bench.queue.release_memory();
    let held = memory.strong_count();
    let Bench { ring, queue, memory: ours, .. } = bench;
    drop((queue, ours));
    assert_eq!((held, memory.strong_count()), (2, 1), "the kernel may still write there");
    drop(ring);
}

#[test]
fn the_pieces_of_a_long_request_keep_no_memory_that_was_taken_back_meanwhile() {
    let file = image();
    let size = 3 * PIECE_BYTES;
    file.as_file().set_len(size).unwrap();
    let mut bench = Bench::new(file.path(), true, false);
    let guest = Arc::new(Mapping::anonymous(size).unwrap());
    let mut burst = Burst::default();
    let slices = SliceList::of_mapping(&guest, &[(0, u32::try_from(size).unwrap())]).unwrap();
    burst.slices().extend(slices.all());
    burst.push(0, Op::Read, 0, size);
    let mut done = Vec::new();
    bench.queue.submit(&burst, Some(&mut bench.ring), &mut done);
    drop((burst, slices));
    bench.queue.release_memory();
    assert!(done.is_empty() && Arc::strong_count(&guest) > 1, "the kernel reads into it");
    while done.is_empty() {
        let mut events = Vec::new();
        await_events(&mut bench.ring, &mut events);
        for event in events {
            bench.queue.on_event(0, event.result, Some(&mut bench.ring), &mut done);
        }
    }
    assert_eq!(done, [Completion { token: 0, result: Ok(()) }]);
    assert_eq!(Arc::strong_count(&guest), 1, "it cannot be unmapped");
}
