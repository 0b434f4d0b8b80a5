//! How much memory a hostile driver can make the device half of a ring hold for it: no more than
//! belongs to the ring's size, however the driver uses the ring's slots.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(not(loom))]

mod guest;

use guest::{BUFFERS, Rig};
use manyring_memory::Words;
use manyring_queue::packed::PackedDeviceHalf;
use manyring_queue::{BATCH_CHAINS, Batch, Chain, Chains, Ring, RingFeatures};
use manyring_wire::virtqueue::{DESC_F_NEXT, DESCRIPTOR_SIZE, Descriptor};

const RING: u16 = 4096;
/// Descriptors of a long chain.
const LONG: u16 = 512;
const PACKED: RingFeatures =
    RingFeatures { event_idx: false, indirect: false, in_order: false, packed: true };

/// A driver that writes what it likes, as the next descriptors of the ring.
struct Driver {
    desc: Words,
    at: u16,
    wrap: bool,
}

impl Driver {
    /// Makes a chain of `count` descriptors available: its first one last.
    fn offer(&mut self, count: u16) {
        let (mut first, begin) = (None, self.at);
        for n in 0..count {
            let next = if n + 1 < count { DESC_F_NEXT } else { 0 };
            let lap = if self.wrap { 1 << 7 } else { 1 << 15 };
            let desc = Descriptor { addr: BUFFERS, len: 1, flags: next | lap, next: 0 };
            let (low, high) = desc.emit_packed(0);
            let at = usize::from(self.at) * DESCRIPTOR_SIZE;
            self.desc.store_u64(at, low);
            match first {
                None => first = Some(high),
                Some(_) => self.desc.store_u64(at + 8, high),
            }
            self.at += 1;
            if self.at == RING {
                (self.at, self.wrap) = (0, !self.wrap);
            }
        }
        self.desc.store_u64_release(usize::from(begin) * DESCRIPTOR_SIZE + 8, first.unwrap());
    }
}

fn pop(device: &mut PackedDeviceHalf, batch: &mut Batch) -> Chain {
    assert_eq!(device.pop_batch(batch, BATCH_CHAINS), 1);
    batch.take(0).unwrap().0
}

/// Bytes of this process that lie in memory and belong to no file.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Each slot has a long chain once, and then a short one, which is not answered: the next long
/// chain gets a new slot.
#[test]
fn long_chains_in_every_slot_of_a_packed_ring_hold_no_more_than_the_ring_is_long() {
    let rig = Rig::new(RING, PACKED, 0);
    rig.driver_queue();
    let mut driver = Driver { desc: rig.desc.clone(), at: 0, wrap: true };
    let mut device = PackedDeviceHalf::new(rig.config, rig.memory.clone()).unwrap();
    let (mut batch, mut short) = (Batch::new(), Vec::new());
    let before = resident();
    while short.len() < usize::from(RING - LONG) {
        driver.offer(LONG);
        let long = pop(&mut device, &mut batch);
        device.push_used(long, 0);
        device.publish();
        driver.offer(1);
        short.push(pop(&mut device, &mut batch));
    }
    let held = resident() - before;
    assert_eq!(device.fault(), None);
    assert_eq!(usize::from(device.in_flight()), short.len());
    // Kept in its slot, each long chain would take 8 KiB: 28 MB for all of them.
    let most = u64::from(RING) * 256;
    assert!(held <= most, "{held} bytes are held, {most} at most");
    short.into_iter().for_each(|chain| device.push_used(chain, 0));
}
