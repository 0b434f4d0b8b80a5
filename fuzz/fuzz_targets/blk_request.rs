//! Input: the block request. Random headers, segments and chains on a memory disk, the words
//! between two turns changed at will: every chain that is popped comes back.
#![no_main]

#[path = "../guest.rs"]
mod guest;

use arbitrary::Arbitrary;
use guest::{Guest, Spoil};
use libfuzzer_sys::fuzz_target;
use manyring_backend::blk::memory::MemoryDisk;
use manyring_device::fuzzing::SoloQueue;
use manyring_queue::DeviceQueue;
use std::sync::Arc;

#[derive(Arbitrary, Debug)]
enum Step {
    /// A request in order: header, data, status, each of some size.
    Request {
        kind: u8,
        sector: u64,
        header: u8,
        data: u16,
        writable: bool,
        status: bool,
    },
    /// A discard, write-zeroes or erase with its segment.
    Range {
        kind: u8,
        sector: u64,
        count: u32,
        flags: u8,
        segments: u8,
    },
    Spoil(Spoil),
    Turn,
}

fuzz_target!(|input: (bool, Vec<Step>)| {
    let (read_only, steps) = input;
    let guest = Guest::new(16, 65_530, true, true, false);
    let disk = Arc::new(MemoryDisk::new(1 << 16).unwrap());
    let queue = DeviceQueue::new(guest.config, guest.memory.clone()).unwrap();
    let mut solo = SoloQueue::new(queue, disk, read_only).unwrap();
    for step in steps {
        match step {
            Step::Request { kind, sector, header, data, writable, status } => {
                let header = if header < 200 { 16 } else { header };
                guest.request(kind % 16, sector % 256, header, data, writable, status);
            }
            Step::Range { kind, sector, count, flags, segments } => {
                let (sector, count) = (sector % 256, count % 512);
                guest.range(11 + kind % 4, sector, count, flags % 4, segments % 3);
            }
            Step::Spoil(spoil) => guest.apply(&spoil),
            Step::Turn => {
                let (popped, completed) = solo.turn();
                // A chain that is no request breaks the queue and never comes back.
                assert!(popped == completed || solo.queue().fault().is_some());
                assert_eq!(solo.queue().in_flight(), 0);
            }
        }
    }
});
