//! A load that checks what it reads: blocks written and read at random, many at once, by one
//! queue of our own driver half.
#![allow(dead_code, reason = "every test program uses its own part of it")]

use crate::support::process::TIMEOUT;
use manyring_driver::{BlkDriverQueue, DriverOp};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub(crate) const BLOCK: usize = 4096;
pub(crate) const BLOCKS: u64 = 512;
pub(crate) const IN_FLIGHT: usize = 32;

/// Random numbers with a seed: splitmix64.
pub(crate) struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ (mixed >> 27)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// The contents of a block after its n-th write; zeroes before the first.
pub(crate) fn pattern(block: u64, times: u64) -> Vec<u8> {
    if times == 0 {
        return vec![0; BLOCK];
    }
    let mut random = Random(block << 32 | times);
    (0..BLOCK / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

/// Blocks that one queue alone reads and writes, many at once, each checked.
pub(crate) struct Load {
    queue: BlkDriverQueue,
    first: u64,
    /// How often each block was written.
    times: Vec<u64>,
    /// Block and kind of each request in flight, by tag: true = read.
    pending: HashMap<u16, (u64, bool)>,
    random: Random,
}

impl Load {
    pub(crate) fn new(queue: BlkDriverQueue, index: u64, seed: u64) -> Self {
        let times = vec![0; usize::try_from(BLOCKS).unwrap()];
        let random = Random(seed.wrapping_add(index));
        Self { queue, first: index * BLOCKS, times, pending: HashMap::new(), random }
    }

    /// Keeps the queue busy until `stop`; counts what is done in `done`.
    pub(crate) fn run(&mut self, stop: &AtomicBool, done: &AtomicU64) {
        while !stop.load(Ordering::Relaxed) {
            while self.pending.len() < IN_FLIGHT {
                self.submit();
            }
            self.queue.publish().unwrap();
            self.finish_one();
            done.fetch_add(1, Ordering::Relaxed);
        }
        while !self.pending.is_empty() {
            self.finish_one();
        }
    }

    fn submit(&mut self) {
        let index = self.random.below(BLOCKS);
        if self.pending.values().any(|(block, _)| *block == index) {
            return;
        }
        let sector = (self.first + index) * (BLOCK as u64 / 512);
        let read = self.random.below(2) == 0;
        let tag = if read {
            self.queue.submit(DriverOp::Read { sector, len: BLOCK })
        } else {
            let times = &mut self.times[usize::try_from(index).unwrap()];
            *times += 1;
            let data = pattern(self.first + index, *times);
            self.queue.submit(DriverOp::Write { sector, data: &data })
        };
        self.pending.insert(tag.unwrap().expect("device process in the ring"), (index, read));
    }

    fn finish_one(&mut self) {
        let done = self.queue.wait(TIMEOUT).expect("no request is stuck");
        let (index, read) = self.pending.remove(&done.tag).expect("no request is done twice");
        assert_eq!(done.status, 0);
        if read {
            let mut found = vec![0; BLOCK];
            self.queue.read_data(done.tag, &mut found).unwrap();
            let expected = pattern(self.first + index, self.times[usize::try_from(index).unwrap()]);
            assert!(found == expected, "block {index} holds something else");
        }
    }
}
