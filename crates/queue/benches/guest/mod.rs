//! The guest of the benches: its memory, and the place of its ring there.

use manyring_memory::{GuestMemory, Mapping, RegionSpec};
use manyring_queue::{QueueConfig, RingAddresses, RingFeatures};
use std::sync::Arc;

/// Chains of one descriptor that fill the ring.
pub(crate) const RING_SIZE: u16 = 256;
/// Bytes of the guest's memory, which begins at address 0.
const MEMORY: u64 = 0x20_0000;

/// Memory that is all zeroes, as it is mapped and as its guest addresses it, and a ring below
/// 0x8000.
pub(crate) fn guest() -> (Arc<Mapping>, Arc<GuestMemory>, QueueConfig) {
    let mapping = Arc::new(Mapping::anonymous(MEMORY).unwrap());
    let spec = RegionSpec { guest_addr: 0, size: MEMORY, user_addr: 0, mmap_offset: 0 };
    let memory = GuestMemory::default().with_mapping(spec, mapping.clone()).unwrap();
    let config = QueueConfig {
        size: RING_SIZE,
        addresses: RingAddresses { descriptor: 0, available: 0x2000, used: 0x4000 },
        base: 0.into(),
        features: RingFeatures { event_idx: true, indirect: true, in_order: false, packed: false },
    };
    (mapping, Arc::new(memory), config)
}
