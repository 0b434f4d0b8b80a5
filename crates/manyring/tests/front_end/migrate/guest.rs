//! `Guest`: a guest, its front-end, and the memory that the destination of its migration has.
//!
//! ```text
//! begin     SET_LOG_BASE is answered: everything is copied to the destination
//! a round   the guest works | the marks are taken out, as QEMU does, or the devices get a new log,
//!           as Cloud Hypervisor gives it, and the marked pages are copied | a ring or the memory
//!           table moves, a ring stops and goes on, ..
//! end       the rings stop: the pages marked in the last log are copied, what the driver wrote is
//!           copied, and now the destination has the same bytes as the source
//! ```
//! The driver writes to one part of the memory, devices to another, and both to the rings. So what
//! the driver wrote, of which a VMM learns from its hypervisor, is known exactly.
//!
//! The guest sees the same file at two places ([`HOME`] and [`ALIAS`]). A ring moves when the
//! front-end names it at the other one, while it is in use.

use crate::support::process::TIMEOUT;
use manyring_driver::{Arena, FrontEnd, Virtqueue};
use manyring_memory::{LOG_PAGE, Mapping, Words};
use manyring_queue::{IndirectTable, RingFeatures};
use manyring_wire::vhost_user::{
    F_LOG_ALL, F_PROTOCOL_FEATURES, LogArea, PROTOCOL_F_LOG_SHMFD, PROTOCOL_F_MQ,
    PROTOCOL_F_REPLY_ACK, Region, VringAddr, VringState,
};
use manyring_wire::virtio::VIRTIO_F_VERSION_1;
use manyring_wire::virtqueue::{DESC_ALIGN, DESCRIPTOR_SIZE};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

const SIZE: u64 = 4 << 20;
/// Guest addresses of the memory.
const ALIAS: u64 = 0x4000_0000;
const ALIAS_USER: u64 = 0x6000_0000_0000;
/// A region that comes and goes.
const SPARE: u64 = 0x8000_0000;
/// Bytes of a log for all of these, and where it begins in its file.
const LOG_SIZE: u64 = (SPARE + SIZE) / LOG_PAGE / 8;
const LOG_OFFSET: u64 = 8 + 4096;
/// Bytes that a driver writes at most: no place is used again, since a device may still read it.
const OUT_SIZE: u64 = 1 << 20;
/// Bytes that devices write.
pub(crate) const IN_SIZE: u64 = 1 << 20;

/// How a guest begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start {
    pub(crate) queues: u16,
    pub(crate) size: u16,
    /// Virtio features to take beside `VERSION_1`, as far as they are offered.
    pub(crate) features: u64,
    pub(crate) seed: u64,
}

/// A sequence of numbers that a seed decides.
#[derive(Debug)]
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888);
        (self.0 >> 33) % end
    }
}

/// A log, and where the front-end has it mapped.
#[derive(Debug)]
struct Log {
    file: OwnedFd,
    words: Words,
}

impl Log {
    fn new() -> Self {
        let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, LOG_OFFSET + LOG_SIZE).unwrap();
        let mapping = Arc::new(Mapping::of_file(&file, LOG_OFFSET, LOG_SIZE).unwrap());
        let words = Words::new(mapping, 0, usize::try_from(LOG_SIZE).unwrap(), 8).unwrap();
        Self { file, words }
    }

    /// Takes the marks out, by words, while devices may put others in.
    fn take(&self) -> Vec<u8> {
        let take = |at: usize| {
            let mut word = 0;
            while let Err(now) = self.words.compare_exchange_u64(at, word, 0) {
                word = now;
            }
            word.to_ne_bytes()
        };
        (0..self.words.size()).step_by(8).flat_map(take).collect()
    }
}

/// A ring of the guest.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) vring: Virtqueue,
    /// Chains that the device has.
    pub(crate) in_flight: usize,
    /// Where the device was told that it lies.
    is_alias: bool,
}

#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) front: FrontEnd,
    pub(crate) features: u64,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) numbers: Numbers,
    ring: RingFeatures,
    arena: Arena,
    /// Guest address of all memory, of what the driver writes, and of what devices write.
    home: u64,
    out: u64,
    inward: u64,
    /// Bytes of `out` that were given away.
    given: u64,
    log: Option<Log>,
    /// The destination's copies of the memory at `home` and at [`ALIAS`].
    copies: [Vec<u8>; 2],
    has_spare: bool,
}

impl Guest {
    pub(crate) fn connect(socket: &Path, start: Start) -> Self {
        let mut front = FrontEnd::connect(socket, TIMEOUT).unwrap();
        let wanted = start.features | VIRTIO_F_VERSION_1 | F_PROTOCOL_FEATURES;
        let protocol = PROTOCOL_F_REPLY_ACK | PROTOCOL_F_MQ | PROTOCOL_F_LOG_SHMFD;
        let features = front.negotiate(wanted, F_PROTOCOL_FEATURES, protocol).unwrap();
        let ring = RingFeatures::from_bits(features);
        let arena = Arena::new(SIZE).unwrap();
        let home = arena.alloc(LOG_PAGE, LOG_PAGE).unwrap();
        let out = arena.alloc(OUT_SIZE, LOG_PAGE).unwrap();
        let inward = arena.alloc(IN_SIZE, LOG_PAGE).unwrap();
        let lanes = (0..start.queues).map(|index| {
            // No two rings share a page.
            arena.alloc(LOG_PAGE, LOG_PAGE).unwrap();
            let vring = Virtqueue::new(&arena, index.into(), start.size, ring, 0).unwrap();
            Lane { vring, in_flight: 0, is_alias: false }
        });
        let lanes = lanes.collect();
        let mut guest = Self {
            front,
            features,
            lanes,
            numbers: Numbers(start.seed),
            ring,
            arena,
            home,
            out,
            inward,
            given: 0,
            log: None,
            copies: [Vec::new(), Vec::new()],
            has_spare: false,
        };
        guest.set_memory();
        (0..guest.lanes.len()).for_each(|lane| guest.start(lane, 0));
        guest
    }

    fn set_memory(&mut self) {
        let file = memfd_create("spare", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, SIZE).unwrap();
        let mut table = self.arena.table();
        let memory = table[0].1;
        let region =
            |guest_addr, user_addr| Region { guest_addr, size: SIZE, user_addr, mmap_offset: 0 };
        table.push((region(ALIAS, ALIAS_USER), memory));
        if self.has_spare {
            table.push((region(SPARE, ALIAS_USER + SPARE), file.as_fd()));
        }
        self.front.set_mem_table(&table).unwrap();
    }

    /// The addresses of a ring for `SET_VRING_ADDR`, as they are now.
    fn address(&self, lane: usize) -> VringAddr {
        let Lane { vring, is_alias, .. } = &self.lanes[lane];
        let at = vring.addresses();
        let home = self.arena.user_addr(self.home);
        let place = |user: u64| if *is_alias { user - home + ALIAS_USER } else { user };
        VringAddr {
            index: vring.index(),
            // As QEMU says while its guest migrates.
            flags: u32::from(self.log.is_some()),
            descriptor: place(at.descriptor),
            used: place(at.used),
            available: place(at.available),
            log: 0,
        }
    }

    fn start(&mut self, lane: usize, base: u32) {
        let addr = self.address(lane);
        let (front, vring) = (&mut self.front, &self.lanes[lane].vring);
        let index = vring.index();
        front.set_vring_num(index, vring.size().into()).unwrap();
        front.set(10, VringState { index, num: base }.as_bytes(), &[]).unwrap();
        front.set_vring_addr(&addr).unwrap();
        front.set_vring_call(index, Some(vring.call_fd())).unwrap();
        front.set_vring_kick(index, Some(vring.kick_fd())).unwrap();
        front.set_vring_enable(index, true).unwrap();
    }

    /// Stops a ring: its device has marked all that it wrote when this is answered.
    fn stop(&mut self, lane: usize) -> u32 {
        let state = VringState { index: self.lanes[lane].vring.index(), num: 0 };
        self.front.send_message(11, state.as_bytes(), &[]).unwrap();
        VringState::read_from_bytes(&self.front.receive_reply(11).unwrap()).unwrap().num
    }

    /// A place of `len` bytes for what the driver writes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> u64 {
        let addr = self.give(bytes.len() as u64);
        self.arena.write(addr, bytes).unwrap();
        addr
    }

    fn give(&mut self, len: u64) -> u64 {
        let addr = self.out + self.given;
        self.given = (self.given + len).next_multiple_of(DESC_ALIGN);
        assert!(self.given <= OUT_SIZE);
        addr
    }

    /// Any place of `len` bytes for what a device writes.
    pub(crate) fn any_place(&mut self, len: u32) -> (u64, u32) {
        (self.inward + self.numbers.below(IN_SIZE - u64::from(len)), len)
    }

    /// Adds a chain to a ring, if there is room. By an indirect table every second time, where the
    /// driver may.
    pub(crate) fn add(&mut self, lane: usize, readable: &[(u64, u32)], writable: &[(u64, u32)]) {
        let queue = self.lanes[lane].vring.queue();
        let fits = usize::from(queue.free_count()) >= readable.len() + writable.len();
        let added = if self.ring.indirect && self.numbers.below(2) == 0 {
            let len = DESCRIPTOR_SIZE * (readable.len() + writable.len());
            let addr = self.give(len as u64);
            let words = self.arena.words(addr, len, DESC_ALIGN).unwrap();
            let table = IndirectTable { addr, words };
            self.lanes[lane].vring.queue().add_indirect(readable, writable, &table)
        } else {
            fits.then(|| self.lanes[lane].vring.queue().add(readable, writable)).flatten()
        };
        self.lanes[lane].in_flight += usize::from(added.is_some());
    }

    /// Takes the used chains that there are; returns how many.
    pub(crate) fn take(&mut self, lane: usize) -> usize {
        let lane = &mut self.lanes[lane];
        let queue = lane.vring.queue();
        let taken = std::iter::from_fn(|| queue.take_used()).count();
        lane.in_flight -= taken;
        taken
    }

    /// Waits for one more used chain.
    pub(crate) fn wait_used(&mut self, lane: usize) {
        self.lanes[lane].vring.wait_used(TIMEOUT).unwrap();
        self.lanes[lane].in_flight -= 1;
    }

    /// One migration: the guest does `work` in each round, and `settles` before its rings stop.
    /// They go on afterwards, as when a migration fails.
    pub(crate) fn migrate(
        &mut self,
        mut work: impl FnMut(&mut Self),
        settle: impl FnOnce(&mut Self),
    ) {
        self.begin_log();
        for _ in 0..8 {
            work(self);
            self.change();
        }
        settle(self);
        let bases: Vec<_> = (0..self.lanes.len()).map(|lane| self.stop(lane)).collect();
        self.copy_marked();
        self.compare();
        self.log = None;
        self.front.set_features(self.features).unwrap();
        bases.into_iter().enumerate().for_each(|(lane, base)| self.start(lane, base));
    }

    /// Gives the log, then says that the guest migrates, and copies everything.
    pub(crate) fn begin_log(&mut self) {
        self.set_log();
        self.front.set_features(self.features | F_LOG_ALL).unwrap();
        for lane in 0..self.lanes.len() {
            let addr = self.address(lane);
            self.front.set_vring_addr(&addr).unwrap();
        }
        let mut copy = vec![0; usize::try_from(SIZE).unwrap()];
        self.arena.read(self.home, &mut copy).unwrap();
        self.copies = [copy.clone(), copy];
    }

    /// Gives a new log. Returns the former one, in which nothing is marked any more.
    fn set_log(&mut self) -> Option<Log> {
        let log = Log::new();
        let area = LogArea { size: LOG_SIZE, offset: LOG_OFFSET };
        self.front.send_message(6, area.as_bytes(), &[log.file.as_fd()]).unwrap();
        let reply = self.front.receive_reply(6).unwrap();
        assert_eq!(reply, 0_u64.as_bytes());
        self.log.replace(log)
    }

    /// Cuts the log away under the devices.
    pub(crate) fn cut_log(&mut self) {
        ftruncate(&self.log.as_ref().unwrap().file, 0).unwrap();
    }

    /// Makes one change that a front-end may make to the devices of a guest that migrates.
    fn change(&mut self) {
        let lane = usize::try_from(self.numbers.below(self.lanes.len() as u64)).unwrap();
        match self.numbers.below(9) {
            0 => {
                let former = self.set_log();
                self.copy_from(&former.unwrap().take());
            }
            // The log stays in place, and its marks are taken.
            5..8 => {
                let marks = self.log.as_ref().unwrap().take();
                self.copy_from(&marks);
            }
            1 => {
                self.lanes[lane].is_alias ^= true;
                let addr = self.address(lane);
                self.front.set_vring_addr(&addr).unwrap();
            }
            2 => {
                let base = self.stop(lane);
                self.start(lane, base);
                self.lanes[lane].vring.kick().unwrap();
            }
            3 => {
                self.has_spare ^= true;
                self.set_memory();
            }
            4 => {
                let index = self.lanes[lane].vring.index();
                self.front.set_vring_enable(index, false).unwrap();
                self.front.set_vring_enable(index, true).unwrap();
            }
            _ => {}
        }
    }

    fn copy_marked(&mut self) {
        let log = self.log.take().unwrap();
        self.copy_from(&log.take());
    }

    /// Copies the pages of these marks to the destination.
    fn copy_from(&mut self, marks: &[u8]) {
        let len = usize::try_from(LOG_PAGE).unwrap();
        let windows = [self.home, ALIAS].into_iter().zip(&mut self.copies);
        for (window, copy) in windows {
            for (offset, to) in (0..SIZE).step_by(len).zip(copy.chunks_mut(len)) {
                let page = (window + offset) / LOG_PAGE;
                if marks[usize::try_from(page / 8).unwrap()] >> (page % 8) & 1 == 1 {
                    self.arena.read(self.home + offset, to).unwrap();
                }
            }
        }
    }

    /// Every byte that the driver has not written is the same at the destination.
    fn compare(&mut self) {
        let mut now = vec![0; usize::try_from(SIZE).unwrap()];
        self.arena.read(self.home, &mut now).unwrap();
        // The rings' parts, as offsets in the memory.
        let home = self.arena.user_addr(self.home);
        let offset = |user: u64| usize::try_from(user - home).unwrap();
        let mut by_driver = vec![self.range_of_out()];
        let mut elsewhere = Vec::new();
        for lane in &self.lanes {
            let (at, size) = (lane.vring.addresses(), usize::from(lane.vring.size()));
            let desc = offset(at.descriptor)..offset(at.available);
            let used = offset(at.used)..offset(at.used) + 8 * size + 8;
            let written = if self.ring.packed {
                let parts = desc.clone().step_by(DESCRIPTOR_SIZE).take(size);
                let parts = parts.map(|at| at..at + DESCRIPTOR_SIZE);
                parts.filter(|part| !is_used(&now[part.clone()])).collect()
            } else {
                vec![desc.clone()]
            };
            by_driver.extend(written);
            by_driver.push(offset(at.available)..used.start);
            if lane.is_alias {
                elsewhere.extend([desc, used]);
            }
        }
        let [copy, alias] = &mut self.copies;
        for part in by_driver {
            copy[part.clone()].copy_from_slice(&now[part.clone()]);
            alias[part.clone()].copy_from_slice(&now[part]);
        }
        for part in elsewhere {
            assert_same(&alias[part.clone()], &now[part.clone()], part.start, "a ring that moved");
            copy[part.clone()].copy_from_slice(&now[part]);
        }
        assert_same(copy, &now, 0, "memory");
    }

    fn range_of_out(&self) -> Range<usize> {
        let from = usize::try_from(self.out - self.home).unwrap();
        from..from + usize::try_from(OUT_SIZE).unwrap()
    }
}

/// True if a packed ring's descriptor was last written by the device (virtio 1.3 §2.8.1).
fn is_used(descriptor: &[u8]) -> bool {
    let flags = u16::from_le_bytes([descriptor[14], descriptor[15]]);
    flags >> 7 & 1 == flags >> 15
}

fn assert_same(destination: &[u8], source: &[u8], from: usize, what: &str) {
    if destination == source {
        return;
    }
    let wrong = destination.iter().zip(source).position(|(a, b)| a != b);
    let count = destination.iter().zip(source).filter(|(a, b)| a != b).count();
    assert_eq!(
        wrong.map(|at| at + from),
        None,
        "{what}: {count} bytes were written, and their pages are not marked"
    );
}
