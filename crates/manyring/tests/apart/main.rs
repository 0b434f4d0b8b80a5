//! Two guests whose queues share one worker: neither's bytes get into the other's disk or memory,
//! and neither's long requests keep the other's short ones waiting.
//! No daemon here: the pool and the device are used as the transport uses them. But for `walls.rs`,
//! `walled.rs`, `beside.rs`, `servers.rs` and `tls.rs`, in which neighbours of all kinds of abuses
//! are probed, of a whole daemon.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

#[path = "../support/mod.rs"]
mod support;

mod beside;
mod faults;
mod order;
mod servers;
mod switched;
mod tls;
mod walled;
mod walls;

use crate::support::process::{self, TIMEOUT};
use crate::support::rings;
use manyring_backend::blk::fault::{FaultDisk, FaultPlan};
use manyring_backend::blk::file::FileDisk;
use manyring_backend::blk::memory::MemoryDisk;
use manyring_backend::blk::null::NullDisk;
use manyring_backend::blk::uring::UringDisk;
use manyring_backend::blk::{Burst, Completion, Disk, DiskQueue, Geometry, Image, ImageOptions};
use manyring_backend::sys::uring::Ring;
use manyring_device::Device;
use manyring_device::blk::Resize;
use manyring_device::blk::{BlkDevice, BlkOptions};
use manyring_driver::{Arena, BlkDriverQueue, DriverOp};
use manyring_engine::{Moderation, Polling, Pool, PoolOptions, QueueHandle};
use manyring_queue::RingFeatures;
use manyring_wire::virtio::{VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_VERSION_1};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::io::Errno;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const FEATURES: u64 = VIRTIO_F_VERSION_1 | VIRTIO_F_EVENT_IDX | VIRTIO_F_INDIRECT_DESC;

/// A guest with a disk of its own, whose queues run in `pool`.
struct Guest {
    queues: Vec<BlkDriverQueue>,
    handles: Vec<QueueHandle>,
    device: BlkDevice,
}

impl Guest {
    fn new(
        pool: &Arc<Pool>,
        disk: Arc<dyn Disk>,
        options: &manyring_driver::BlkDriverOptions,
    ) -> Self {
        Self::with(pool, disk, options, true)
    }

    /// Without a kick the queues are looked at for ever.
    fn with(
        pool: &Arc<Pool>,
        disk: Arc<dyn Disk>,
        options: &manyring_driver::BlkDriverOptions,
        has_kick: bool,
    ) -> Self {
        let device = BlkOptions {
            name: "apart".to_owned(),
            num_queues: options.queues.into(),
            moderation: Moderation::Off,
            ..BlkOptions::default()
        };
        let device = BlkDevice::new(device, disk, pool.clone());
        let size = u64::from(options.queues) * BlkDriverQueue::arena_size(options);
        let arena = Arc::new(Arena::new(size).unwrap());
        let features = RingFeatures::from_bits(FEATURES);
        let queue =
            |index: u16| BlkDriverQueue::new(&arena, index.into(), features, options).unwrap();
        let mut queues: Vec<_> = (0..options.queues).map(queue).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        // By this a worker tells that its queues are one guest's.
        let events = tokio::sync::mpsc::channel(16).0;
        let start = |queue: &mut BlkDriverQueue| {
            let mut activation = rings::activation(&arena, queue.vring(), FEATURES);
            activation.events = events.clone();
            activation.kick = activation.kick.filter(|_| has_kick);
            runtime.block_on(device.start(activation)).unwrap()
        };
        let handles = queues.iter_mut().map(start).collect();
        Self { queues, handles, device }
    }

    fn stop(self) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for handle in self.handles {
            runtime.block_on(handle.stop()).unwrap();
        }
    }
}

fn one_worker(uring: bool) -> Arc<Pool> {
    Pool::new(PoolOptions { workers_max: 1, polling: Polling::default(), uring })
}

fn image(path: &Path, direct: bool) -> Image {
    Image::open(path, ImageOptions { direct, ..ImageOptions::default() }).unwrap()
}

const REQUEST: usize = 4096;

/// The data that `guest` writes in `round` by its request `index`: no two sectors are alike.
fn pattern(guest: u64, round: u64, index: usize) -> Vec<u8> {
    let word = |at: usize| (guest << 56) | (round << 40) | ((index * REQUEST + at * 8) as u64);
    (0..REQUEST / 8).flat_map(|at| word(at).to_le_bytes()).collect()
}

/// Fills every queue of both guests with `depth` requests, then publishes all, then waits for all;
/// `check` sees what each request got.
fn run_all<'a>(
    guests: &mut [Guest; 2],
    depth: usize,
    op: impl Fn(usize, usize) -> DriverOp<'a>,
    check: impl Fn(usize, usize, Vec<u8>),
) {
    let mut indexes = HashMap::new();
    for (number, guest) in guests.iter_mut().enumerate() {
        for (at, queue) in guest.queues.iter_mut().enumerate() {
            for index in at * depth..(at + 1) * depth {
                let tag =
                    queue.submit(op(number, index)).unwrap().expect("device process in the ring");
                indexes.insert((number, at, tag), index);
            }
        }
    }
    for queue in guests.iter_mut().flat_map(|g| &mut g.queues) {
        queue.publish().unwrap();
    }
    for (number, guest) in guests.iter_mut().enumerate() {
        for (at, queue) in guest.queues.iter_mut().enumerate() {
            for _ in 0..depth {
                let done = queue.wait(TIMEOUT).expect("no request is stuck");
                assert_eq!(done.status, 0);
                let mut bytes = vec![0; REQUEST];
                queue.read_data(done.tag, &mut bytes).unwrap();
                check(number, indexes[&(number, at, done.tag)], bytes);
            }
        }
    }
}

/// More requests in one turn than the submission queue holds, each of several slices, of two
/// guests: every image and every buffer holds the bytes of its own guest.
fn bytes_stay_apart(direct: bool, queues: u16, depth: u16) {
    let size = usize::from(queues) * usize::from(depth) * REQUEST;
    let pool = one_worker(true);
    let files = [(); 2].map(|()| {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        file.as_file().set_len(size as u64).unwrap();
        file
    });
    // The second guest, which has its turns after the first, has more slices to each request.
    let mut segment_sizes = [2048, 512].into_iter();
    let mut guests = files.each_ref().map(|file| {
        let disk = UringDisk::new(image(file.path(), direct)).unwrap();
        let options = manyring_driver::BlkDriverOptions {
            queues,
            queue_size: depth,
            buffer_size: u32::try_from(REQUEST).unwrap(),
            segment_size: segment_sizes.next().unwrap(),
            ..Default::default()
        };
        Guest::new(&pool, Arc::new(disk), &options)
    });
    let depth = usize::from(depth);
    let sector = |index: usize| (index * REQUEST / 512) as u64;
    for round in 1..=2 {
        let of = |guest| (0..size / REQUEST).map(move |i| pattern(guest, round, i)).collect();
        let written: [Vec<Vec<u8>>; 2] = [of(0), of(1)];
        let write = |guest: usize, index: usize| DriverOp::Write {
            sector: sector(index),
            data: &written[guest][index],
        };
        run_all(&mut guests, depth, write, |_, _, _| {});
        for (number, file) in files.iter().enumerate() {
            let found = std::fs::read(file.path()).unwrap();
            for (index, bytes) in found.chunks(REQUEST).enumerate() {
                let same = bytes == written[number][index];
                assert!(same, "round {round}: image {number}, request {index}");
            }
        }
        let read = |_, index| DriverOp::Read { sector: sector(index), len: REQUEST };
        run_all(&mut guests, depth, read, |number, index, bytes| {
            let same = bytes == written[number][index];
            assert!(same, "round {round}: memory of {number}, request {index}");
        });
    }
    guests.into_iter().for_each(Guest::stop);
}

#[test]
fn bytes_of_two_guests_with_many_buffered_queues_stay_apart() {
    bytes_stay_apart(false, 34, 128);
}

#[test]
fn bytes_of_two_guests_with_many_direct_queues_stay_apart() {
    bytes_stay_apart(true, 96, 32);
}

/// One guest with one long request, and a neighbour with a null disk that flushes again and again:
/// the neighbour's flushes are answered while the long request is under way, not after it.
fn neighbour_goes_on(uring: bool, disk: impl Disk + 'static, op: DriverOp<'_>) {
    let pool = one_worker(uring);
    let (buffer_size, segment_size) = (LONG, 1 << 20);
    let long = manyring_driver::BlkDriverOptions {
        queue_size: 2,
        buffer_size,
        segment_size,
        ..Default::default()
    };
    let mut guest = Guest::new(&pool, Arc::new(disk), &long);
    let null = Arc::new(NullDisk::new(1 << 20));
    let mut neighbour = Guest::new(&pool, null, &manyring_driver::BlkDriverOptions::default());
    // Both are served before; the worker sleeps.
    guest.queues[0].read(0, &mut [0; 512]).unwrap();
    neighbour.queues[0].flush().unwrap();
    guest.queues[0].submit(op).unwrap().expect("device process in the ring");
    guest.queues[0].publish().unwrap();
    let mut flushes = 0;
    let done = loop {
        neighbour.queues[0].flush().unwrap();
        if let Some(done) = guest.queues[0].take() {
            break done;
        }
        flushes += 1;
    };
    assert_eq!(done.status, 0);
    assert!(flushes >= 5, "{flushes} flushes while the request was under way");
    guest.stop();
    neighbour.stop();
}

/// Bytes of a long request.
const LONG: u32 = 256 << 20;
const LONG_SECTORS: u32 = LONG / 512;

/// A file in memory of `size` bytes, and its image.
fn tmpfs_image(size: u64) -> (OwnedFd, Image) {
    let file = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, size).unwrap();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let image = image(Path::new(&path), false);
    (file, image)
}

/// A file on a disk, of zeroes that the page cache holds, and its image.
fn cached_image(direct: bool) -> (tempfile::NamedTempFile, Image) {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(LONG.into()).unwrap();
    std::io::copy(&mut file.reopen().unwrap(), &mut std::io::sink()).unwrap();
    let image = image(file.path(), direct);
    (file, image)
}

const READ: DriverOp<'_> = DriverOp::Read { sector: 0, len: LONG as usize };
const ZERO: DriverOp<'_> = DriverOp::WriteZeroes { sector: 0, count: LONG_SECTORS, unmap: false };

#[test]
fn a_neighbour_goes_on_during_write_zeroes_of_a_file_in_memory() {
    for uring in [true, false] {
        let (_file, image) = tmpfs_image(LONG.into());
        neighbour_goes_on(uring, UringDisk::new(image).unwrap(), ZERO);
    }
}

#[test]
fn a_neighbour_goes_on_during_a_long_read_of_a_file_in_memory() {
    for uring in [true, false] {
        let (_file, image) = tmpfs_image(LONG.into());
        neighbour_goes_on(uring, UringDisk::new(image).unwrap(), READ);
    }
}

#[test]
fn a_neighbour_goes_on_during_a_long_read_of_the_page_cache() {
    let (_file, image) = cached_image(false);
    neighbour_goes_on(true, UringDisk::new(image).unwrap(), READ);
    let (_file, image) = cached_image(false);
    neighbour_goes_on(false, FileDisk::new(image), READ);
}

#[test]
fn a_neighbour_goes_on_while_a_disk_without_a_ring_writes_for_long() {
    let (_file, image) = cached_image(true);
    let write = DriverOp::WriteAny { sector: 0, len: LONG as usize };
    neighbour_goes_on(false, FileDisk::new(image), write);
}

#[test]
fn a_neighbour_goes_on_during_long_requests_of_a_memory_disk() {
    for op in [READ, ZERO] {
        neighbour_goes_on(true, MemoryDisk::new(LONG.into()).unwrap(), op);
    }
}

#[test]
fn a_disk_is_cut_when_no_request_reaches_beyond_its_new_end() {
    let plan = FaultPlan { hold_every: 1, ..FaultPlan::default() };
    let disk = FaultDisk::new(Arc::new(NullDisk::new(1 << 20)), plan);
    let switch = disk.switch();
    let pool = one_worker(true);
    let options = manyring_driver::BlkDriverOptions::default();
    let mut guest = Guest::new(&pool, Arc::new(disk), &options);
    let last = DriverOp::Write { sector: 2047, data: &[1; 512] };
    let queue = &mut guest.queues[0];
    queue.submit(last).unwrap().unwrap();
    queue.publish().unwrap();
    let device = &guest.device;
    assert!(process::wait_until(|| device.stats(0).unwrap().in_flight.value() == 1));
    std::thread::scope(|scope| {
        let resize = scope.spawn(|| device.resize(Some(1 << 19)));
        assert!(
            process::wait_until(|| device.host().size() == 1 << 19),
            "the guest sees the new size"
        );
        // A request beyond the new end is refused from now on, but one is still under way.
        queue.submit(last).unwrap().unwrap();
        queue.publish().unwrap();
        assert_eq!(queue.wait(TIMEOUT).unwrap().status, 1);
        assert_eq!(device.host().disk().geometry().size, 1 << 20, "it is not cut yet");
        switch.release();
        // The request that was held is released in a turn of its queue.
        queue.submit(DriverOp::Flush).unwrap().unwrap();
        queue.publish().unwrap();
        (0..2).for_each(|_| assert!(queue.wait(TIMEOUT).is_ok()));
        assert_eq!(resize.join().unwrap(), Ok(1 << 19));
    });
    assert_eq!(guest.device.host().disk().geometry().size, 1 << 19);
    guest.stop();
}

/// Turns of all queues of a [`TurnsDisk`], and how many there were when a request was served.
#[derive(Clone, Debug, Default)]
struct Turns {
    count: Arc<AtomicU64>,
    served_at: Arc<AtomicU64>,
}

impl Turns {
    fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }
}

/// The work that a turn of a queue of a [`TurnsDisk`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    /// Ends every request at once.
    Serve,
    /// Goes on with a request for ever, for a millisecond in each turn.
    Work,
    /// Finds nothing to do, in a millisecond.
    Look,
}

#[derive(Debug)]
struct TurnsDisk(Turns, Does);

impl Disk for TurnsDisk {
    fn geometry(&self) -> Geometry {
        NullDisk::new(1 << 20).geometry()
    }

    fn open_queue(&self, _has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        Ok(Box::new(TurnsQueue { turns: self.0.clone(), does: self.1, busy: false }))
    }

    fn resize(&self, _size: Option<u64>) -> Result<Geometry, Errno> {
        Ok(self.geometry())
    }

    fn kind(&self) -> &'static str {
        "turns"
    }
}

#[derive(Debug)]
struct TurnsQueue {
    turns: Turns,
    does: Does,
    busy: bool,
}

impl DiskQueue for TurnsQueue {
    fn submit(&mut self, burst: &Burst, _ring: Option<&mut Ring>, done: &mut Vec<Completion>) {
        if self.does == Does::Work {
            self.busy = true;
            return;
        }
        self.turns.served_at.store(self.turns.count(), Ordering::SeqCst);
        done.extend(burst.iter().map(|(r, _)| Completion { token: r.token, result: Ok(()) }));
    }

    fn reap(&mut self, _done: &mut Vec<Completion>) -> bool {
        if self.busy || self.does == Does::Look {
            std::thread::sleep(Duration::from_millis(1));
            self.turns.count.fetch_add(1, Ordering::SeqCst);
        }
        self.busy
    }
}

#[test]
fn a_neighbour_that_was_idle_waits_for_no_full_round_of_a_guest_with_many_queues() {
    const QUEUES: u16 = 64;
    for uring in [true, false] {
        let (pool, turns) = (one_worker(uring), Turns::default());
        let disk = |does| Arc::new(TurnsDisk(turns.clone(), does));
        let options = manyring_driver::BlkDriverOptions { queue_size: 2, ..Default::default() };
        let busy = manyring_driver::BlkDriverOptions { queues: QUEUES, ..options.clone() };
        let mut guest = Guest::new(&pool, disk(Does::Work), &busy);
        let mut neighbour = Guest::new(&pool, disk(Does::Serve), &options);
        for queue in &mut guest.queues {
            queue.submit(DriverOp::Flush).unwrap().expect("device process in the ring");
            queue.publish().unwrap();
        }
        for _ in 0..4 {
            // The worker does not look at the neighbour's ring any more.
            let began = turns.count();
            assert!(process::wait_until(|| turns.count() > began + 3 * u64::from(QUEUES)));
            let queue = &mut neighbour.queues[0];
            queue.submit(DriverOp::Flush).unwrap().expect("device process in the ring");
            queue.publish().unwrap();
            let kicked_at = turns.count();
            assert_eq!(queue.wait(TIMEOUT).unwrap().status, 0);
            let waited = turns.served_at.load(Ordering::SeqCst).saturating_sub(kicked_at);
            assert!(waited <= u64::from(QUEUES) / 4, "{waited} turns of the other guest first");
        }
    }
}

#[test]
fn a_neighbour_gets_its_share_beside_many_queues_that_are_looked_at_for_ever() {
    let pool = one_worker(true);
    let (looks, work) = (Turns::default(), Turns::default());
    let options = manyring_driver::BlkDriverOptions { queue_size: 2, ..Default::default() };
    let many = manyring_driver::BlkDriverOptions { queues: 64, ..options.clone() };
    let disk = Arc::new(TurnsDisk(looks.clone(), Does::Look));
    let _guest = Guest::with(&pool, disk, &many, false);
    let disk = Arc::new(TurnsDisk(work.clone(), Does::Work));
    let mut neighbour = Guest::new(&pool, disk, &options);
    let queue = &mut neighbour.queues[0];
    queue.submit(DriverOp::Flush).unwrap().expect("device process in the ring");
    queue.publish().unwrap();
    assert!(process::wait_until(|| work.count() > 0));
    let (looked, worked) = (looks.count(), work.count());
    assert!(process::wait_until(|| looks.count() + work.count() > looked + worked + 500));
    let (looked, worked) = (looks.count() - looked, work.count() - worked);
    assert!(worked > looked / 4, "{worked} turns beside {looked} looks");
}
