//! A running queue moves from worker to worker under load: nothing is lost, stuck or changed.
//! No daemon here: the pool and the device are used as the transport uses them.

use crate::load::{self, Load};
use crate::support::process::{self, TIMEOUT};
use crate::support::rings::{StopAtEnd, activation};
use manyring_backend::blk::fault::{FaultDisk, FaultPlan};
use manyring_backend::blk::file::FileDisk;
use manyring_backend::blk::memory::MemoryDisk;
use manyring_backend::blk::uring::UringDisk;
use manyring_backend::blk::{Disk, Image, ImageOptions};
use manyring_device::Device;
use manyring_device::blk::{BlkDevice, BlkOptions};
use manyring_driver::{Arena, BlkDriverQueue, DriverOp};
use manyring_engine::{Moderation, Polling, Pool, PoolOptions, QueueHandle};
use manyring_queue::RingFeatures;
use manyring_wire::virtio::{VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_VERSION_1};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

const WORKERS: usize = 3;
const FEATURES: u64 = VIRTIO_F_VERSION_1 | VIRTIO_F_EVENT_IDX | VIRTIO_F_INDIRECT_DESC;

fn pool(uring: bool, polling: Polling) -> Arc<Pool> {
    Pool::new(PoolOptions { workers_max: WORKERS, polling, uring })
}

fn device(disk: Arc<dyn Disk>, pool: Arc<Pool>) -> BlkDevice {
    let options = BlkOptions {
        name: "moving".to_owned(),
        num_queues: 2,
        moderation: Moderation::Off,
        ..BlkOptions::default()
    };
    BlkDevice::new(options, disk, pool)
}

/// Starts the device half of a queue whose driver half we have.
fn start(device: &BlkDevice, arena: &Arena, queue: &mut BlkDriverQueue) -> QueueHandle {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let activation = activation(arena, queue.vring(), FEATURES);
    runtime.block_on(device.start(activation)).unwrap()
}

/// Two busy queues, and one of them moves, and the other, `moves` times in all.
fn move_under_load(disk: Arc<dyn Disk>, uring: bool, polling: Polling, moves: usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let pool = pool(uring, polling);
    let device = device(disk, pool.clone());
    let options = manyring_driver::BlkDriverOptions::default();
    let arena = Arc::new(Arena::new(2 * BlkDriverQueue::arena_size(&options)).unwrap());
    let features = RingFeatures::from_bits(FEATURES);
    let mut queues: Vec<_> = (0..2)
        .map(|index| BlkDriverQueue::new(&arena, index, features, &options).unwrap())
        .collect();
    let handles: Vec<_> = queues.iter_mut().map(|q| start(&device, &arena, q)).collect();
    let (stop, done) = (AtomicBool::new(false), [AtomicU64::new(0), AtomicU64::new(0)]);
    let began = SystemTime::now();
    std::thread::scope(|scope| {
        for ((queue, index), done) in queues.drain(..).zip(0..).zip(&done) {
            let stop = &stop;
            scope.spawn(move || Load::new(queue, index, 0x30).run(stop, done));
        }
        let _stop = StopAtEnd(&stop);
        for turn in 0..moves {
            let (handle, done) = (&handles[turn % 2], &done[turn % 2]);
            let to = (handle.worker().unwrap() + 1) % WORKERS;
            // A disk that is busy beyond the patience of a move is asked again.
            assert!(process::wait_until(|| runtime.block_on(handle.move_to(to))));
            assert_eq!(handle.worker(), Some(to));
            let goal = done.load(Ordering::Relaxed) + 40;
            assert!(process::wait_until(|| done.load(Ordering::Relaxed) >= goal), "move {turn}");
        }
        assert!(!runtime.block_on(handles[0].move_to(WORKERS)), "there is no such worker");
    });
    let moved: u64 = (0..2).map(|index| device.stats(index).unwrap().moves.value()).sum();
    assert_eq!(moved, moves as u64);
    let workers = pool.worker_stats();
    let paused: u64 = workers.iter().map(|stats| stats.pause_ns.count()).sum();
    assert_eq!(paused, moved, "the pause of each move is known");
    for index in 0..2 {
        let busy_ns = device.stats(index).unwrap().busy_ns.value();
        assert!(busy_ns > 0 && busy_ns < began.elapsed().unwrap().as_nanos().try_into().unwrap());
    }
    for (handle, done) in handles.into_iter().zip(&done) {
        let base = runtime.block_on(handle.stop()).unwrap().split().unwrap();
        // Every request took one entry of the ring, none was taken twice; what was still in flight
        // at the end was not counted.
        let counted = u16::try_from(done.load(Ordering::Relaxed) % 0x1_0000).unwrap();
        assert!(usize::from(base.wrapping_sub(counted)) <= load::IN_FLIGHT, "{base} {counted}");
    }
}

fn image(direct: bool) -> (tempfile::NamedTempFile, Image) {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(16 << 20).unwrap();
    let image =
        Image::open(file.path(), ImageOptions { direct, ..ImageOptions::default() }).unwrap();
    (file, image)
}

#[test]
fn a_queue_of_a_memory_disk_moves_under_load() {
    let (looks, never) = (Polling::default(), Polling::NEVER);
    for (uring, polling) in [(true, looks), (true, never), (false, looks), (false, never)] {
        move_under_load(Arc::new(MemoryDisk::new(16 << 20).unwrap()), uring, polling, 200);
    }
}

#[test]
fn a_queue_moves_with_requests_in_the_io_uring_of_its_worker() {
    let (_file, image) = image(true);
    move_under_load(Arc::new(UringDisk::new(image).unwrap()), true, Polling::default(), 60);
}

#[test]
fn a_queue_of_a_plain_file_moves_under_load() {
    let (_file, image) = image(false);
    move_under_load(Arc::new(FileDisk::new(image)), false, Polling::default(), 60);
}

#[test]
fn a_queue_with_a_request_that_hangs_stays_and_goes_on() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for uring in [true, false] {
        let plan = FaultPlan { hold_every: 50, ..FaultPlan::default() };
        let disk = FaultDisk::new(Arc::new(MemoryDisk::new(1 << 20).unwrap()), plan);
        let device = device(Arc::new(disk), pool(uring, Polling::default()));
        let options = manyring_driver::BlkDriverOptions::default();
        let arena = Arc::new(Arena::new(BlkDriverQueue::arena_size(&options)).unwrap());
        let features = RingFeatures::from_bits(FEATURES);
        let mut queue = BlkDriverQueue::new(&arena, 0, features, &options).unwrap();
        let handle = start(&device, &arena, &mut queue);
        // The 50th request hangs, and the 100th.
        let mut read = |count: usize, answered: usize| {
            (0..count).for_each(|_| {
                queue.submit(DriverOp::Read { sector: 0, len: 512 }).unwrap().unwrap();
            });
            queue.publish().unwrap();
            (0..answered).for_each(|_| assert_eq!(queue.wait(TIMEOUT).unwrap().status, 0));
        };
        read(60, 59);
        assert!(!runtime.block_on(handle.move_to(1)), "one request is in flight for ever");
        assert_eq!(handle.worker(), Some(0));
        read(30, 30);
    }
}

#[test]
fn queues_of_workers_that_mostly_sleep_come_together_again() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let pool = pool(true, Polling::default());
    let device = device(Arc::new(MemoryDisk::new(1 << 20).unwrap()), pool.clone());
    let options = manyring_driver::BlkDriverOptions::default();
    let arena = Arc::new(Arena::new(2 * BlkDriverQueue::arena_size(&options)).unwrap());
    let features = RingFeatures::from_bits(FEATURES);
    let queue = |index| BlkDriverQueue::new(&arena, index, features, &options).unwrap();
    let mut queues: Vec<_> = (0..2).map(queue).collect();
    let handles: Vec<_> = queues.iter_mut().map(|q| start(&device, &arena, q)).collect();
    assert!(runtime.block_on(handles[1].move_to(2)));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for mut queue in queues {
            let stop = &stop;
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    queue.read(0, &mut [0; 512]).unwrap();
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
        }
        let _stop = StopAtEnd(&stop);
        runtime.block_on(async {
            tokio::spawn(pool.clone().balance());
            let gathered = async {
                while handles[1].worker() != Some(0) {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            tokio::time::timeout(TIMEOUT, gathered).await.expect("they share a worker");
        });
    });
    let queues: Vec<_> = pool.worker_stats().iter().map(|stats| stats.queues.value()).collect();
    assert_eq!(queues, [2, 0, 0]);
}
