//! Every byte of guest memory that a device half writes lies in a page that the migration log has
//! marked: whatever the ring's features are, whichever way a chain ends, when the front-end takes
//! the marks out, and when the log is replaced while chains are in flight.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(not(loom))]

mod guest;

use guest::{BUFFERS, GUEST, Rig};
use manyring_memory::{DirtyLog, LOG_PAGE, Mapping, Words, fence_full};
use manyring_queue::{
    Batch, Chain, Chains, DeviceQueue, DriverQueue, Ring, RingFeatures, inflight_size,
    packed_inflight_size,
};
use manyring_wire::virtqueue::used_ring_size;
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::ops::Range;
use std::sync::Arc;

/// Where the buffers of this test lie, in bytes.
const SPAN: u64 = 1 << 20;
const LOG_SIZE: u64 = (BUFFERS + SPAN).div_ceil(LOG_PAGE * 8) + 2048;

/// A sequence of numbers that a seed decides.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888);
        (self.0 >> 33) % end
    }
}

/// A chain in flight, and a copy of the slices that a device may write.
struct Taken {
    chain: Chain,
    places: Vec<(u64, usize)>,
}

/// How many entries a ring has, and where it begins.
#[derive(Clone, Copy)]
struct Place {
    size: u16,
    base: u16,
}

struct Guest {
    rig: Rig,
    driver: DriverQueue,
    queue: DeviceQueue,
    log: OwnedFd,
    /// The guest's memory when the log began.
    copy: Vec<u8>,
    numbers: Numbers,
    taken: Vec<Taken>,
    batch: Batch,
    /// Bytes of indirect tables so far.
    tables: u64,
}

fn new_log() -> (OwnedFd, Arc<DirtyLog>) {
    let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, LOG_SIZE + 64).unwrap();
    let log = DirtyLog::map(&file, 64, LOG_SIZE).unwrap();
    (file, Arc::new(log))
}

impl Guest {
    fn new(place: Place, features: RingFeatures, is_recorded: bool, seed: u64) -> Self {
        let Place { size, base } = place;
        let mut rig = Rig::new(size, features, base);
        let driver = rig.driver_queue();
        let (file, log) = new_log();
        rig.memory = Arc::new(rig.memory.with_log(Some(log)).unwrap());
        let region = is_recorded.then(|| {
            let bytes =
                if features.packed { packed_inflight_size(size) } else { inflight_size(size) };
            let mapping = Arc::new(Mapping::anonymous(bytes as u64).unwrap());
            Words::new(mapping, 0, bytes, 8).unwrap()
        });
        let mut queue = DeviceQueue::unread(rig.config, rig.memory.clone()).unwrap();
        queue = queue.recorded(region, None);
        let copy = rig.read(GUEST, copied());
        queue.begin();
        let (numbers, taken, batch) = (Numbers(seed), Vec::new(), Batch::new());
        Self { rig, driver, queue, log: file, copy, numbers, taken, batch, tables: 0 }
    }

    /// The driver adds chains of odd sizes at odd places, some by indirect tables.
    fn add(&mut self) {
        let ring = usize::from(self.rig.config.size) * 16;
        let before = self.rig.read(GUEST, ring);
        for _ in 0..=self.numbers.below(3) {
            let mut place = |max: u64| {
                let addr = BUFFERS + self.numbers.below(SPAN - 0x2_0000);
                (addr, u32::try_from(self.numbers.below(max)).unwrap() + 1)
            };
            let writable: Vec<_> = (0..3).map(|_| place(9000)).collect();
            let count = usize::try_from(self.numbers.below(4)).unwrap();
            let writable = &writable[..count];
            let readable = [(BUFFERS, 16)];
            if self.rig.config.features.indirect && self.numbers.below(2) == 0 {
                // Not in the part that is compared: its writer is the driver.
                self.tables += 128;
                let table = self.rig.table(BUFFERS + SPAN + self.tables, 8);
                _ = self.driver.add_indirect(&readable, writable, &table);
            } else {
                _ = self.driver.add(&readable, writable);
            }
        }
        self.driver.publish();
        // Both halves write a packed ring's descriptors. The driver's own writes are marked by its
        // own CPU.
        let now = self.rig.read(GUEST, ring);
        for at in (0..ring).filter(|at| before[*at] != now[*at]) {
            self.copy[at] = now[at];
        }
    }

    fn pop(&mut self) {
        let popped = self.queue.pop_batch(&mut self.batch, 64);
        self.take_batch();
        if popped > 0 && self.numbers.below(4) == 0 {
            // A frame was read into it, and dropped.
            let last = self.taken.pop().unwrap();
            self.write(&last);
            self.queue.unpop(last.chain);
        }
    }

    fn take_batch(&mut self) {
        let base = self.rig.host(GUEST);
        for n in 0..self.batch.len() {
            let (chain, _, writable) = self.batch.take(n).unwrap();
            let place = |at: usize, len: usize| (GUEST + (at - base) as u64, len);
            let places = writable.iter().map(|s| place(s.address(), s.len())).collect();
            self.taken.push(Taken { chain, places });
        }
    }

    /// A device writes some of a chain's bytes, or all of them.
    fn write(&mut self, taken: &Taken) {
        for (addr, len) in &taken.places {
            let from = usize::try_from(self.numbers.below(*len as u64 + 1)).unwrap();
            let from = if self.numbers.below(2) == 0 { 0 } else { from };
            let value = u8::try_from(self.numbers.below(255) + 1).unwrap();
            self.rig.write(addr + from as u64, &vec![value; len - from]);
        }
    }

    /// Ends a chain in flight, in one of the ways that there are.
    fn end_one(&mut self) {
        if self.taken.is_empty() {
            return;
        }
        let at = usize::try_from(self.numbers.below(self.taken.len() as u64)).unwrap();
        let taken = self.taken.remove(at);
        self.write(&taken);
        match self.numbers.below(8) {
            1 if !self.rig.config.features.in_order => {
                self.queue.set_aside(taken.chain);
                self.queue.pop_aside(&mut self.batch, 64);
                self.take_batch();
            }
            _ => self.queue.push_used(taken.chain, 1),
        }
    }

    /// A new log comes, as a change of memory; chains stay in flight.
    fn change_log(&mut self) {
        self.check();
        let (file, log) = new_log();
        self.rig.memory = Arc::new(self.rig.memory.with_log(Some(log)).unwrap());
        self.copy = self.rig.read(GUEST, copied());
        self.log = file;
        self.queue.relocate(self.rig.config.addresses, self.rig.memory.clone()).unwrap();
    }

    /// The front-end takes the marks out and copies the pages: earlier marks say nothing of writes
    /// that follow.
    fn take_marks(&mut self) {
        self.check();
        rustix::io::pwrite(&self.log, &vec![0; usize::try_from(LOG_SIZE).unwrap()], 64).unwrap();
        self.copy = self.rig.read(GUEST, copied());
    }

    /// Checks that the log has a bit for each page that differs from the copy.
    fn check(&mut self) {
        self.queue.publish();
        fence_full();
        let mut log = vec![0; usize::try_from(LOG_SIZE).unwrap()];
        rustix::io::pread(&self.log, &mut log, 64).unwrap();
        let now = self.rig.read(GUEST, copied());
        let used = self.rig.config.addresses.used - guest::USER;
        let used = used..used + used_ring_size(self.rig.config.size) as u64;
        // A packed ring's descriptors are written by both.
        let ring = match self.rig.config.features.packed {
            true => GUEST..GUEST + u64::from(self.rig.config.size) * 16,
            false => used.clone(),
        };
        for range in [used, ring, BUFFERS..BUFFERS + SPAN] {
            self.check_range(range, &log, &now);
        }
    }

    fn check_range(&self, range: Range<u64>, log: &[u8], now: &[u8]) {
        let is_same_part = |addr: u64| {
            let at = usize::try_from(addr - GUEST).unwrap();
            let end = (at + 256).min(now.len());
            self.copy[at..end] == now[at..end]
        };
        let parts = range.clone().step_by(256).filter(|addr| !is_same_part(*addr));
        for addr in parts.flat_map(|addr| addr..(addr + 256).min(range.end)) {
            let (at, page) = (usize::try_from(addr - GUEST).unwrap(), addr / LOG_PAGE);
            let is_marked = log[usize::try_from(page / 8).unwrap()] >> (page % 8) & 1 == 1;
            let is_same = self.copy[at] == now[at];
            // In flight, what was written is marked when the chain ends.
            let in_flight =
                |t: &Taken| t.places.iter().any(|(a, len)| (*a..a + *len as u64).contains(&addr));
            assert!(
                is_same || is_marked || self.taken.iter().any(in_flight),
                "byte {addr:#x} was written, and its page is not marked"
            );
        }
    }
}

fn copied() -> usize {
    usize::try_from(BUFFERS + SPAN - GUEST).unwrap()
}

fn run(place: Place, features: RingFeatures, is_recorded: bool, seed: u64) {
    let mut guest = Guest::new(place, features, is_recorded, seed);
    for _ in 0..120 {
        match guest.numbers.below(10) {
            0..3 => guest.add(),
            3..5 => guest.pop(),
            5..8 => guest.end_one(),
            8 => _ = guest.queue.publish(),
            _ => _ = guest.queue.enable_notifications(),
        }
        match guest.numbers.below(40) {
            0 => guest.change_log(),
            1..4 => guest.take_marks(),
            _ => (),
        }
        while guest.driver.take_used().is_some() {}
    }
    while let Some(taken) = guest.taken.pop() {
        guest.write(&taken);
        guest.queue.discard(taken.chain);
    }
    guest.check();
    assert_eq!(guest.queue.fault(), None);
}

#[test]
fn every_byte_that_a_ring_writes_is_in_a_marked_page() {
    // Of the used ring of 512 entries, the last 130 and `avail_event` lie in another page than the
    // index and the other entries: in either page there is something that nothing else marks.
    let places = [(64, 0), (4, 0), (512, 0), (512, 400)].map(|(size, base)| Place { size, base });
    for (case, seed) in (0..128_usize).zip(77..) {
        let bit = |n: usize| case >> n & 1 == 1;
        let features =
            RingFeatures { event_idx: bit(0), indirect: bit(1), in_order: bit(2), packed: bit(3) };
        run(places[case / 32], features, bit(4), seed);
    }
}

/// The new log lacks the writes of before: a front-end copies everything once after it has given a
/// log. But writes that are in flight then must be in the log when it ends.
#[test]
fn a_ring_that_gets_a_log_marks_its_used_ring_at_once() {
    let rig = Rig::new(16, RingFeatures::default(), 0);
    let _driver = rig.driver();
    let mut queue = rig.device();
    let (file, log) = new_log();
    let memory = Arc::new(rig.memory.with_log(Some(log)).unwrap());
    queue.relocate(rig.config.addresses, memory).unwrap();
    let page = (rig.config.addresses.used - guest::USER) / LOG_PAGE;
    let mut byte = [0];
    rustix::io::pread(&file, &mut byte, 64 + page / 8).unwrap();
    assert_eq!(byte[0], 1 << (page % 8));
}
