//! Requests go on while everything that can be done to a running queue is done to it: none is lost,
//! none is answered twice, no byte changes, and nobody waits for a wake-up that never comes.

use crate::disks;
use crate::guest::{
    DATA, DATA_SIZE, Guest, HEADER, NOT_WRITTEN, OK, RING, STATUS, Start, USUAL, call, kick,
};
use manyring_device::Device;
use manyring_device::blk::BlkDevice;
use manyring_engine::{Activation, Event, QueueHandle};
use manyring_memory::{GuestMemory, RegionSpec};
use manyring_queue::{Base, DeviceQueue, DriverQueue, QueueConfig, RingFeatures};
use manyring_wire::blk::{VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;
use tokio::sync::mpsc;

/// Longer than a request takes, unless a thread waits for a wake-up that never comes.
const STALL: Timespec = Timespec { tv_sec: 6, tv_nsec: 0 };
/// Requests in flight; each has a place of its own in memory and on the disk.
const DEPTH: u64 = 8;
const BYTES: usize = 4096;
const LEN: u64 = BYTES as u64;
const DISTURBANCES: u64 = 150;

/// The driver: each place is written, read back, and now and then flushed.
struct Driver<'a> {
    queue: &'a mut DriverQueue,
    files: (&'a OwnedFd, &'a OwnedFd),
    doorbells: (&'a OwnedFd, &'a OwnedFd),
    done: &'a AtomicU64,
    ends: &'a AtomicBool,
}

impl Driver<'_> {
    /// Request number `step` of a place; what it is follows from the number.
    fn add(&mut self, place: u64, step: u64) -> u16 {
        let (low, high) = self.files;
        let (header, status, data) = (HEADER + place * 16, STATUS + place, DATA + place * LEN);
        let bytes = [pattern(place, step); BYTES];
        let kind = match step % 5 {
            0 | 2 => VIRTIO_BLK_T_OUT,
            1 | 3 => VIRTIO_BLK_T_IN,
            _ => VIRTIO_BLK_T_FLUSH,
        };
        let bytes = if kind == VIRTIO_BLK_T_OUT { bytes } else { [0; BYTES] };
        rustix::io::pwrite(high, &bytes, place * LEN).unwrap();
        let sector = place * LEN / 512;
        let head = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        rustix::io::pwrite(low, &head, header).unwrap();
        rustix::io::pwrite(low, &[NOT_WRITTEN], status).unwrap();
        let len = u32::try_from(LEN).unwrap();
        let (header, data, status) = ((header, 16), (data, len), (status, 1));
        match kind {
            VIRTIO_BLK_T_OUT => self.queue.add(&[header, data], &[status]),
            VIRTIO_BLK_T_IN => self.queue.add(&[header], &[data, status]),
            _ => self.queue.add(&[header], &[status]),
        }
        .unwrap()
    }

    /// Request `step` of a place has come back.
    fn check(&self, place: u64, step: u64) {
        let (low, high) = self.files;
        let mut status = [0];
        rustix::io::pread(low, &mut status, STATUS + place).unwrap();
        assert_eq!(status[0], OK, "place {place}, step {step}");
        if matches!(step % 5, 1 | 3) {
            let mut bytes = [0; BYTES];
            rustix::io::pread(high, &mut bytes, place * LEN).unwrap();
            let wanted = [pattern(place, step - 1); BYTES];
            assert!(bytes == wanted, "place {place}, step {step}: {}", bytes[0]);
        }
    }

    fn publish(&mut self) {
        if self.queue.publish() {
            rustix::io::write(self.doorbells.0, &1u64.to_ne_bytes()).unwrap();
        }
    }

    fn run(mut self) {
        let mut open = HashMap::new();
        for place in 0..DEPTH {
            open.insert(self.add(place, 0), (place, 0));
        }
        self.publish();
        let mut random = 1u64;
        while !self.ends.load(SeqCst) || !open.is_empty() {
            self.queue.disable_notifications();
            while let Some((id, _)) = self.queue.take_used() {
                let (place, step) = open.remove(&id).expect("a request comes back once");
                self.check(place, step);
                self.done.fetch_add(1, SeqCst);
                if !self.ends.load(SeqCst) {
                    open.insert(self.add(place, step + 1), (place, step + 1));
                }
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                if random >> 59 == 1 {
                    // Pause, so that the worker of this queue falls asleep.
                    std::thread::sleep(Duration::from_micros(random >> 20 & 0x1ff));
                }
            }
            self.publish();
            if !open.is_empty() && !self.queue.enable_notifications() {
                let mut fds = [PollFd::new(self.doorbells.1, PollFlags::IN)];
                let rung = poll(&mut fds, Some(&STALL)).unwrap();
                let used = self.queue.used_count();
                assert!(rung > 0, "no call, with {} open and {used} used", open.len());
                let _ = rustix::io::read(self.doorbells.1, &mut [0; 8]);
            }
        }
    }
}

fn pattern(place: u64, step: u64) -> u8 {
    (place * 31 + step * 7 + 1).to_le_bytes()[0]
}

/// The front-end.
struct FrontEnd<'a> {
    device: &'a BlkDevice,
    handle: Option<QueueHandle>,
    base: Base,
    memory: Arc<GuestMemory>,
    high: &'a OwnedFd,
    doorbells: (&'a OwnedFd, &'a OwnedFd),
    event_idx: bool,
    events: mpsc::Sender<Event>,
}

impl FrontEnd<'_> {
    fn config(&self) -> QueueConfig {
        let features = RingFeatures {
            event_idx: self.event_idx,
            indirect: true,
            in_order: false,
            packed: false,
        };
        QueueConfig { size: 64, addresses: RING, base: self.base, features }
    }

    /// The data lies elsewhere in our address space: whoever uses the old place is out of memory.
    fn renew_memory(&mut self) {
        let spec =
            RegionSpec { guest_addr: DATA, size: DATA_SIZE, user_addr: DATA, mmap_offset: 0 };
        let without = self.memory.without_region(&spec);
        self.memory = Arc::new(without.with_region(spec, self.high).unwrap());
    }

    async fn start(&mut self) {
        let activation = Activation {
            index: 0,
            queue: DeviceQueue::new(self.config(), self.memory.clone()).unwrap(),
            addresses: RING,
            kick: Some(kick(self.doorbells.0)),
            call: Some(call(self.doorbells.1)),
            err: None,
            enabled: true,
            features: 1 << 32,
            events: self.events.clone(),
        };
        self.handle = Some(self.device.start(activation).await.unwrap());
    }

    async fn stop(&mut self) {
        let handle = self.handle.take().unwrap();
        self.base = self.device.stop(0, handle).await.unwrap();
    }

    async fn disturb(&mut self, what: u64) {
        let handle = self.handle.as_ref().unwrap();
        match what % 8 {
            0..=2 => drop(handle.move_to(usize::from(what / 8 % 2 == 1)).await),
            3 => {
                handle.set_enabled(false).await;
                tokio::time::sleep(Duration::from_micros(what / 8 % 500)).await;
                handle.set_enabled(true).await;
            }
            4 | 5 => {
                self.renew_memory();
                let handle = self.handle.as_ref().unwrap();
                assert_eq!(handle.set_memory(self.memory.clone(), RING).await, Ok(()));
            }
            6 => handle.set_kick(Some(kick(self.doorbells.0))).await,
            _ => {
                self.stop().await;
                self.renew_memory();
                self.start().await;
            }
        }
    }
}

fn churn(uring: bool, event_idx: bool, seed: u64) {
    println!("uring {uring}, EVENT_IDX {event_idx}, seed {seed}");
    let (_file, disk) = disks::disk(uring);
    let mut guest = Guest::new(disk, &Start { uring, ..USUAL });
    let _ = guest.stop();
    let (done, ends) = (AtomicU64::new(0), AtomicBool::new(false));
    let (events, _heard) = mpsc::channel(8);
    let Guest { runtime, device, low, high, memory, driver, kick, call, .. } = &mut guest;
    let mut front = FrontEnd {
        device,
        handle: None,
        base: Base::default(),
        memory: memory.clone(),
        high,
        doorbells: (kick, call),
        event_idx,
        events,
    };
    *driver = DriverQueue::new(front.config(), memory).unwrap();
    let driver = Driver {
        queue: driver,
        files: (low, high),
        doorbells: (kick, call),
        done: &done,
        ends: &ends,
    };
    /// Has the driver end, also where an assertion fails.
    struct Ends<'a>(&'a AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, SeqCst);
        }
    }
    std::thread::scope(|scope| {
        let end = Ends(&ends);
        let guest = std::thread::Builder::new().spawn_scoped(scope, || driver.run()).unwrap();
        runtime.block_on(front.start());
        let mut random = seed;
        for _ in 0..DISTURBANCES {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
            runtime.block_on(front.disturb(random >> 20 & 0xfff_ffff));
            let before = done.load(SeqCst);
            while done.load(SeqCst) < before + 2 && !guest.is_finished() {
                std::thread::yield_now();
            }
        }
        drop(end);
        guest.join().unwrap();
        runtime.block_on(front.stop());
    });
    println!("requests: {}", done.into_inner());
}

#[test]
fn no_request_is_lost_whatever_is_done_to_a_running_queue() {
    let seed = std::env::var("MANYRING_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    for uring in [true, false] {
        for event_idx in [true, false] {
            churn(uring, event_idx, seed);
        }
    }
}
