//! Requests as large as a queue's limits allow, whose data all lies in one small buffer.

use super::HostileRing;
use crate::{Arena, DriverError, Virtqueue};
use manyring_memory::Words;
use manyring_wire::blk::{HEADER_SIZE, RawBlkHeader, RawSegment, SEGMENT_SIZE};
use manyring_wire::virtqueue::{
    DESC_ALIGN, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESCRIPTOR_SIZE, Descriptor,
};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Entries of a request's indirect table: the most that a device accepts.
const TABLE_ENTRIES: u16 = 1024;
const BUFFER_SIZE: u32 = 1 << 20;
/// Bytes reserved for each part of a request, apart from its table and buffer.
const PART: u64 = 64;

/// A ring of huge requests. Each has an indirect table that names the same 1 MiB buffer many times.
#[derive(Debug)]
pub struct GiantRing {
    /// The ring that the requests are written to.
    pub ring: HostileRing,
    arena: Arc<Arena>,
    buffer: u64,
    parts: u64,
    tables: Vec<(u64, Words)>,
}

impl GiantRing {
    /// Takes over the ring of `vring`, with nothing in flight, for up to `depth` requests at a
    /// time.
    ///
    /// # Errors
    /// [`DriverError::ArenaFull`] without [`Self::arena_size`] bytes, [`DriverError::Memory`].
    pub fn new(arena: &Arc<Arena>, vring: &Virtqueue, depth: u16) -> Result<Self, DriverError> {
        let bytes = usize::from(TABLE_ENTRIES) * DESCRIPTOR_SIZE;
        let table = |_| {
            let addr = arena.alloc(bytes as u64, DESC_ALIGN)?;
            Ok((addr, arena.words(addr, bytes, DESC_ALIGN)?))
        };
        let tables = (0..depth.min(vring.size())).map(table).collect::<Result<_, DriverError>>()?;
        Ok(Self {
            ring: HostileRing::new(arena, vring)?,
            arena: arena.clone(),
            buffer: arena.alloc(BUFFER_SIZE.into(), 4096)?,
            parts: arena.alloc(u64::from(depth) * PART, PART)?,
            tables,
        })
    }

    /// Most bytes of arena that this takes, for [`crate::BlkDriverOptions::spare`].
    #[must_use]
    pub const fn arena_size(depth: u16) -> u64 {
        let table = TABLE_ENTRIES as u64 * DESCRIPTOR_SIZE as u64;
        depth as u64 * (table + PART) + BUFFER_SIZE as u64 + (64 << 10)
    }

    /// Offers a request of type `kind` at `sector` in slot `slot`. It has `mib` MiB of data, at
    /// most 1022; the device writes the data if `is_read`.
    ///
    /// # Errors
    /// [`DriverError::Memory`], [`DriverError::RingFull`] if there is no such slot.
    pub fn offer_data(
        &mut self,
        slot: u16,
        kind: u32,
        sector: u64,
        mib: u16,
        is_read: bool,
    ) -> Result<(), DriverError> {
        let flags = if is_read { DESC_F_WRITE } else { 0 };
        let data = vec![(self.buffer, BUFFER_SIZE, flags); mib.min(TABLE_ENTRIES - 2).into()];
        self.offer(slot, kind, sector, &data)
    }

    /// Offers a discard or write-zeroes request (`kind`) in slot `slot` for `count` sectors from
    /// `sector` on.
    ///
    /// # Errors
    /// See [`Self::offer_data`].
    pub fn offer_range(
        &mut self,
        slot: u16,
        kind: u32,
        sector: u64,
        count: u32,
    ) -> Result<(), DriverError> {
        let segment =
            RawSegment { sector: sector.into(), num_sectors: count.into(), flags: 0.into() };
        let addr = self.parts + u64::from(slot) * PART + u64::from(HEADER_BYTES);
        self.arena.write(addr, segment.as_bytes())?;
        self.offer(slot, kind, 0, &[(addr, SEGMENT_BYTES, 0)])
    }

    fn offer(
        &mut self,
        slot: u16,
        kind: u32,
        sector: u64,
        data: &[(u64, u32, u16)],
    ) -> Result<(), DriverError> {
        let (table, words) = self.tables.get(usize::from(slot)).ok_or(DriverError::RingFull)?;
        let raw = RawBlkHeader { kind: kind.into(), reserved: 0.into(), sector: sector.into() };
        let header = self.parts + u64::from(slot) * PART;
        let status = header + PART - 1;
        self.arena.write(header, raw.as_bytes())?;
        let parts = std::iter::once((header, HEADER_BYTES, 0)).chain(data.iter().copied());
        let mut entries = 0;
        for (index, (addr, len, flags)) in (0..).zip(parts) {
            let desc = Descriptor { addr, len, flags: flags | DESC_F_NEXT, next: index + 1 };
            super::store(words, index, desc);
            entries = index + 1;
        }
        let last = Descriptor { addr: status, len: 1, flags: DESC_F_WRITE, next: 0 };
        super::store(words, entries, last);
        let len = (u32::from(entries) + 1) * 16;
        let head = Descriptor { addr: *table, len, flags: DESC_F_INDIRECT, next: 0 };
        self.ring.set_descriptor(slot, head);
        self.ring.make_available(slot);
        Ok(())
    }
}

/// [`HEADER_SIZE`] and [`SEGMENT_SIZE`], in the type of a descriptor's length.
const HEADER_BYTES: u32 = 16;
const SEGMENT_BYTES: u32 = 16;
const _: () =
    assert!(HEADER_BYTES as usize == HEADER_SIZE && SEGMENT_BYTES as usize == SEGMENT_SIZE);

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_memory::total_len;
    use manyring_queue::{Batch, DeviceQueue, QueueConfig, RingFeatures};
    use manyring_wire::blk::{VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};

    #[test]
    fn requests_have_the_size_that_was_asked_for_and_need_little_memory() {
        let arena = Arc::new(Arena::new(4 << 20).unwrap());
        let features = RingFeatures { indirect: true, ..RingFeatures::default() };
        let vring = Virtqueue::new(&arena, 0, 16, features, 0).unwrap();
        let (addresses, base) = (vring.addresses(), vring.base().into());
        let config = QueueConfig { size: 16, addresses, base, features };
        let mut queue = DeviceQueue::new(config, arena.memory().clone()).unwrap();
        let mut giant = GiantRing::new(&arena, &vring, 3).unwrap();
        giant.offer_data(0, VIRTIO_BLK_T_IN, 0, u16::MAX, true).unwrap();
        giant.offer_data(1, VIRTIO_BLK_T_OUT, 8, 3, false).unwrap();
        giant.offer_range(2, VIRTIO_BLK_T_DISCARD, 0, 1 << 21).unwrap();
        assert!(giant.offer_range(3, VIRTIO_BLK_T_DISCARD, 0, 1).is_err());
        for want in [(16, (1022 << 20) + 1), (16 + (3 << 20), 1), (32, 1)] {
            let mut batch = Batch::new();
            assert_eq!(queue.pop_batch(&mut batch, 1), 1);
            let (chain, readable, writable) = batch.take(0).unwrap();
            assert_eq!((total_len(&readable), total_len(&writable)), want);
            queue.push_used(chain, 0);
        }
    }
}
