//! A ring in plain memory with both its halves, for the tests of this crate.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

pub(crate) mod model;

use manyring_memory::{GuestMemory, Mapping, RegionSpec, Words};
use manyring_queue::split::{SplitDeviceHalf, SplitDriverHalf};
use manyring_queue::{
    Base, DeviceQueue, DriverQueue, IndirectTable, QueueConfig, RingAddresses, RingFeatures,
};
use manyring_wire::virtqueue::{
    AVAIL_ALIGN, DESC_ALIGN, DESCRIPTOR_SIZE, Descriptor, RING_IDX, USED_ALIGN, avail_entry,
    avail_ring_size, desc_table_size, used_ring_size,
};
use std::sync::Arc;

/// Guest address of the only region; its user address is `USER` ahead.
pub(crate) const GUEST: u64 = 0x4000_0000;
pub(crate) const USER: u64 = 0x7a00_0000_0000;
pub(crate) const SIZE: u64 = 64 << 20;
/// Where the buffers begin; before them lie the ring's areas.
pub(crate) const BUFFERS: u64 = GUEST + (1 << 20);

/// A ring of `size` entries and its memory.
pub(crate) struct Rig {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) mapping: Arc<Mapping>,
    pub(crate) config: QueueConfig,
    pub(crate) desc: Words,
    pub(crate) avail: Words,
    pub(crate) used: Words,
}

impl Rig {
    pub(crate) fn new(size: u16, features: RingFeatures, base: u16) -> Self {
        let mapping = Arc::new(Mapping::anonymous(SIZE).unwrap());
        let user_addr = GUEST + USER;
        let spec = RegionSpec { guest_addr: GUEST, size: SIZE, user_addr, mmap_offset: 0 };
        let memory = GuestMemory::default().with_mapping(spec, mapping.clone()).unwrap();
        let available = user_addr + desc_table_size(size) as u64;
        let used = (available + avail_ring_size(size) as u64).next_multiple_of(4);
        let addresses = RingAddresses { descriptor: user_addr, available, used };
        let base = if features.packed { packed_base(size, base) } else { base.into() };
        let config = QueueConfig { size, addresses, base, features };
        Self {
            desc: memory.words(user_addr, desc_table_size(size), DESC_ALIGN).unwrap(),
            avail: memory.words(available, avail_ring_size(size), AVAIL_ALIGN).unwrap(),
            used: memory.words(used, used_ring_size(size), USED_ALIGN).unwrap(),
            memory: Arc::new(memory),
            mapping,
            config,
        }
    }

    pub(crate) fn driver(&self) -> SplitDriverHalf {
        SplitDriverHalf::new(self.config, &self.memory).unwrap()
    }

    /// The driver half of a ring of either format.
    pub(crate) fn driver_queue(&self) -> DriverQueue {
        DriverQueue::new(self.config, &self.memory).unwrap()
    }

    /// The device half of a ring of either format.
    pub(crate) fn device_queue(&self) -> DeviceQueue {
        DeviceQueue::new(self.config, self.memory.clone()).unwrap()
    }

    /// The device half; build the driver half first, which clears the ring.
    pub(crate) fn device(&self) -> SplitDeviceHalf {
        SplitDeviceHalf::new(self.config, self.memory.clone()).unwrap()
    }

    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) {
        self.slice(addr, bytes.len()).write_from(bytes);
    }

    pub(crate) fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.slice(addr, len).read_into(&mut bytes);
        bytes
    }

    fn slice(&self, addr: u64, len: usize) -> manyring_memory::GuestSlice<'_> {
        self.mapping.slice(usize::try_from(addr - GUEST).unwrap(), len).unwrap()
    }

    /// The host address of a guest address.
    pub(crate) fn host(&self, addr: u64) -> usize {
        self.slice(addr, 0).address()
    }

    pub(crate) fn table(&self, addr: u64, entries: usize) -> IndirectTable {
        let len = entries * DESCRIPTOR_SIZE;
        IndirectTable { addr, words: self.memory.words(addr + USER, len, DESC_ALIGN).unwrap() }
    }

    /// Writes a descriptor of the ring's table.
    pub(crate) fn set(&self, index: u16, desc: Descriptor) {
        set(&self.desc, index, desc);
    }

    /// Makes `head` available as the next one.
    pub(crate) fn offer(&self, head: u16) {
        let idx = self.avail.load_u16(RING_IDX);
        self.avail.store_u16(avail_entry(idx & (self.config.size - 1)), head);
        self.avail.store_u16_release(RING_IDX, idx.wrapping_add(1));
    }
}

/// The base of a packed ring that `n` says: any of its descriptors, on either lap.
pub(crate) fn packed_base(size: u16, n: u16) -> Base {
    let place = (n % size) | (u16::from((n / size).is_multiple_of(2)) << 15);
    Base::from_bits(u32::from(place) | u32::from(place) << 16)
}

/// Writes a descriptor of any table.
pub(crate) fn set(words: &Words, index: u16, desc: Descriptor) {
    let at = usize::from(index) * DESCRIPTOR_SIZE;
    let (low, high) = desc.emit();
    words.store_u64(at, low);
    words.store_u64(at + 8, high);
}
