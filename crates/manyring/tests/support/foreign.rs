//! libblkio, a vhost-user-blk client that is not ours, as a guest with four queues. What it
//! negotiates is in `blkio.rs`: split rings, with EVENT_IDX.
#![allow(unsafe_code, reason = "allow-listed: libblkio fills completions as `MaybeUninit`")]

use super::process::TIMEOUT;
use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(crate) const QUEUES: usize = 4;
pub(crate) const DEPTH: usize = 16;
/// Largest request of these tests.
pub(crate) const SIZE_MAX: usize = 64 << 10;

/// Random numbers with a seed: splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ (mixed >> 27)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// The contents at an offset: every eight bytes say where they are and which run wrote them.
pub(crate) fn pattern(offset: u64, len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64 / 8).flat_map(|i| Random((offset + i * 8) ^ seed).next().to_le_bytes()).collect()
}

/// A connected client and its queues.
pub(crate) struct Client {
    pub(crate) queues: Vec<Blkioq>,
    pub(crate) region: MemoryRegion,
    /// Block size of the disk: requests are whole ones.
    pub(crate) unit: u64,
    pub(crate) capacity: u64,
    pub(crate) driver: Blkio,
}

impl Client {
    pub(crate) fn connect(socket: &Path, poll: bool) -> Self {
        let mut driver = Blkio::new("virtio-blk-vhost-user").unwrap();
        driver.set_str("path", socket.to_str().unwrap()).unwrap();
        driver.connect().unwrap();
        let (property, none) = if poll {
            ("num-poll-queues", "num-queues")
        } else {
            ("num-queues", "num-poll-queues")
        };
        driver.set_i32(none, 0).unwrap();
        driver.set_i32(property, i32::try_from(QUEUES).unwrap()).unwrap();
        // libblkio knows no longest descriptor unless it has negotiated SIZE_MAX.
        assert_eq!(driver.get_i32("max-segment-len").unwrap(), 2 << 20, "SIZE_MAX");
        assert_ne!(driver.get_i32("max-segments").unwrap(), 0, "SEG_MAX");
        let started = driver.start().unwrap();
        let region = driver.alloc_mem_region(QUEUES * DEPTH * SIZE_MAX).unwrap();
        driver.map_mem_region(&region).unwrap();
        Self {
            queues: started.queues.into_iter().chain(started.poll_queues).collect(),
            region,
            unit: u64::try_from(driver.get_i32("request-alignment").unwrap()).unwrap(),
            capacity: driver.get_u64("capacity").unwrap(),
            driver,
        }
    }

    /// The queues, each with its part of the disk and of the memory.
    pub(crate) fn lanes(&mut self, seed: u64) -> Vec<Lane> {
        let share = self.capacity / QUEUES as u64;
        let lane = |(index, queue): (usize, Blkioq)| Lane {
            queue,
            memory: File::options()
                .read(true)
                .write(true)
                .open(format!("/proc/self/fd/{}", self.region.fd))
                .unwrap(),
            address: self.region.addr,
            slot: index * DEPTH,
            start: index as u64 * share,
            end: (index as u64 + 1) * share,
            unit: self.unit,
            seed,
            random: Random(seed ^ index as u64),
        };
        self.queues.drain(..).enumerate().map(lane).collect()
    }
}

/// One queue, and the part of the disk that it alone writes.
pub(crate) struct Lane {
    pub(crate) queue: Blkioq,
    pub(crate) memory: File,
    pub(crate) address: usize,
    /// The first of its buffers.
    pub(crate) slot: usize,
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) unit: u64,
    pub(crate) seed: u64,
    pub(crate) random: Random,
}

impl Lane {
    pub(crate) fn at(&self, token: usize) -> usize {
        (self.slot + token) * SIZE_MAX
    }

    pub(crate) fn buffer(&self, token: usize) -> *mut u8 {
        std::ptr::without_provenance_mut(self.address + self.at(token))
    }

    /// Waits for one completion; its token and result.
    pub(crate) fn reap(&mut self) -> (usize, i32) {
        let mut slots = [MaybeUninit::<Completion>::uninit()];
        let mut max_wait = TIMEOUT;
        let count = self.queue.do_io(&mut slots, 1, Some(&mut max_wait), None);
        assert_eq!(count.expect("a completion"), 1);
        // SAFETY: `do_io` has returned 1, and has filled the slot.
        let completion = unsafe { slots[0].assume_init_ref() };
        (completion.user_data, completion.ret)
    }

    /// The lane cut into requests of random sizes, in random order.
    pub(crate) fn cut(&mut self) -> Vec<(u64, usize)> {
        let mut pieces = Vec::new();
        let mut offset = self.start;
        while offset < self.end {
            let units_max = (SIZE_MAX as u64 / self.unit).min((self.end - offset) / self.unit);
            let len = (1 + self.random.below(units_max)) * self.unit;
            pieces.push((offset, usize::try_from(len).unwrap()));
            offset += len;
        }
        for i in (1..pieces.len()).rev() {
            let j = self.random.below(i as u64 + 1);
            pieces.swap(i, usize::try_from(j).unwrap());
        }
        pieces
    }

    /// Keeps [`DEPTH`] requests in flight until all pieces are done.
    pub(crate) fn transfer(&mut self, write: bool) {
        let mut waiting = self.cut();
        let mut at = vec![(0, 0); DEPTH];
        let mut free: Vec<usize> = (0..DEPTH).collect();
        while !waiting.is_empty() || free.len() < DEPTH {
            while let Some(token) = free.pop() {
                let Some((offset, len)) = waiting.pop() else {
                    free.push(token);
                    break;
                };
                at[token] = (offset, len);
                self.submit(write, offset, len, token);
            }
            let (token, result) = self.reap();
            let (offset, len) = at[token];
            assert_eq!(result, 0, "{len} bytes at {offset}, seed {}", self.seed);
            if !write {
                self.check(token, &pattern(offset, len, self.seed), offset);
            }
            free.push(token);
        }
    }

    pub(crate) fn submit(&mut self, write: bool, offset: u64, len: usize, token: usize) {
        let (none, at) = (ReqFlags::empty(), self.at(token) as u64);
        if write {
            self.memory.write_all_at(&pattern(offset, len, self.seed), at).unwrap();
            self.queue.write(offset, self.buffer(token), len, token, none);
        } else {
            // So that a read that does nothing is seen.
            self.memory.write_all_at(&vec![0xee; len], at).unwrap();
            self.queue.read(offset, self.buffer(token), len, token, none);
        }
    }

    pub(crate) fn check(&self, token: usize, expected: &[u8], offset: u64) {
        let mut found = vec![0; expected.len()];
        self.memory.read_exact_at(&mut found, self.at(token) as u64).unwrap();
        let wrong = found.iter().zip(expected).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "bytes read at {offset} differ, seed {}", self.seed);
    }
    /// One request that is not a transfer.
    pub(crate) fn single(&mut self, submit: impl FnOnce(&mut Blkioq)) {
        submit(&mut self.queue);
        assert_eq!(self.reap(), (0, 0), "seed {}", self.seed);
    }
}
