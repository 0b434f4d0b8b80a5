//! A guest for the fuzzer: two regions of memory, a valid ring in the first, words to spoil.

use arbitrary::Arbitrary;
use manyring_memory::{GuestMemory, GuestSlice, Mapping, RegionSpec, Words};
use manyring_queue::{Base, QueueConfig, RingAddresses, RingFeatures};
use manyring_wire::virtqueue::{
    AVAIL_ALIGN, DESC_ALIGN, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESCRIPTOR_SIZE,
    Descriptor, RING_IDX, avail_entry, avail_ring_size, desc_table_size, used_ring_size,
};
use std::sync::Arc;

/// Guest addresses: the ring, then buffers; a second region follows the first at once.
const GUEST: u64 = 0x1_0000;
const SIZE: u64 = 0x8000;
const SECOND: u64 = 0x4000;
const USER: u64 = 0x7000_0000;
const TABLE: u64 = GUEST + 0x5000;
const HEADER: u64 = GUEST + 0x6000;
const STATUS: u64 = GUEST + 0x6800;
const DATA: u64 = GUEST + 0x7000;

/// One thing a driver can do to its memory.
#[derive(Arbitrary, Debug)]
pub enum Spoil {
    /// A descriptor of the ring (or of the indirect table).
    Descriptor { table: bool, index: u8, place: Place, len: u32, long: bool, flags: u8, next: u8 },
    /// An entry of the available ring.
    Entry { slot: u8, head: u16 },
    /// The available index.
    Idx(u16),
    /// A head, made available.
    Offer { head: u8 },
    /// Bytes anywhere in the memory.
    Bytes { at: u16, bytes: [u8; 8] },
}

/// Where a descriptor points.
#[derive(Arbitrary, Debug)]
pub enum Place {
    Data { at: u16 },
    Table,
    Header,
    Status,
    Border { at: u8 },
    End { at: u8 },
    Anywhere(u64),
}

impl Place {
    fn addr(&self) -> u64 {
        match self {
            Self::Data { at } => DATA + u64::from(at % 0x1000),
            Self::Table => TABLE,
            Self::Header => HEADER,
            Self::Status => STATUS,
            Self::Border { at } => GUEST + SIZE - u64::from(*at),
            Self::End { at } => GUEST + SIZE + SECOND - u64::from(*at),
            Self::Anywhere(addr) => *addr,
        }
    }
}

#[derive(Debug)]
pub struct Guest {
    pub memory: Arc<GuestMemory>,
    pub config: QueueConfig,
    mappings: [Arc<Mapping>; 2],
    desc: Words,
    avail: Words,
    table: Words,
}

#[allow(dead_code, reason = "each target uses its part")]
impl Guest {
    pub fn new(size: u16, base: u16, event_idx: bool, indirect: bool, in_order: bool) -> Self {
        let mappings = [SIZE, SECOND].map(|size| Arc::new(Mapping::anonymous(size).unwrap()));
        let first = RegionSpec { guest_addr: GUEST, size: SIZE, user_addr: USER, mmap_offset: 0 };
        let second = RegionSpec {
            guest_addr: GUEST + SIZE,
            size: SECOND,
            user_addr: USER + 0x10_0000,
            mmap_offset: 0,
        };
        let memory = GuestMemory::default()
            .with_mapping(first, mappings[0].clone())
            .and_then(|m| m.with_mapping(second, mappings[1].clone()))
            .unwrap();
        let available = USER + desc_table_size(size) as u64;
        let used = (available + avail_ring_size(size) as u64).next_multiple_of(4);
        assert!(used + (used_ring_size(size) as u64) < USER + TABLE - GUEST);
        let addresses = RingAddresses { descriptor: USER, available, used };
        let avail = memory.words(available, avail_ring_size(size), AVAIL_ALIGN).unwrap();
        avail.store_u16(RING_IDX, base);
        let table = memory.words(USER + TABLE - GUEST, 16 * DESCRIPTOR_SIZE, DESC_ALIGN).unwrap();
        Self {
            desc: memory.words(USER, desc_table_size(size), DESC_ALIGN).unwrap(),
            avail,
            table,
            config: QueueConfig {
                size,
                addresses,
                base: base.into(),
                features: RingFeatures { event_idx, indirect, in_order, packed: false },
            },
            memory: Arc::new(memory),
            mappings,
        }
    }

    /// This guest with a packed ring, of any size.
    pub fn packed(mut self, base: u32) -> Self {
        self.config.features.packed = true;
        self.config.base = Base::from_bits(base);
        self
    }

    /// Writes a descriptor of the packed ring, or of the indirect table: `flags` are those of the
    /// ring in the two highest bits, `avail` and `used`, and those of the descriptor below.
    pub fn set_packed(&self, table: bool, index: u8, place: &Place, len: u32, flags: u8, id: u16) {
        let [avail, used] = [u16::from(flags >> 6 & 1) << 7, u16::from(flags >> 7) << 15];
        let (words, count) = if table { (&self.table, 16) } else { (&self.desc, self.config.size) };
        let flags = u16::from(flags % 8) | if table { 0 } else { avail | used };
        let (low, high) = Descriptor { addr: place.addr(), len, flags, next: 0 }.emit_packed(id);
        let at = usize::from(u16::from(index) % count) * DESCRIPTOR_SIZE;
        words.store_u64(at, low);
        words.store_u64_release(at + 8, high);
    }

    /// Makes all flags of the packed ring's descriptors those of a ring that was used up to `at`,
    /// and of which the descriptors from there to `end` are available.
    pub fn set_laps(&self, at: u16, end: u16, wrap: bool) {
        for index in 0..self.config.size {
            let is_used = (index < at) == wrap;
            let is_avail = if (at..end).contains(&index) { wrap } else { is_used };
            let flags = u8::from(is_avail) << 6 | u8::from(is_used) << 7;
            let place = Place::Data { at: index };
            self.set_packed(false, index.to_le_bytes()[0], &place, 16, flags, index);
        }
    }

    pub fn apply(&self, spoil: &Spoil) {
        let size = self.config.size;
        match spoil {
            Spoil::Descriptor { table, index, place, len, long, flags, next } => {
                let len = if *long { *len } else { len % 0x1100 };
                let (flags, next) = (u16::from(flags % 8), u16::from(*next));
                let desc = Descriptor { addr: place.addr(), len, flags, next };
                if *table {
                    let desc = Descriptor { next: next % 18, ..desc };
                    set(&self.table, u16::from(index % 16), desc);
                } else {
                    let desc = Descriptor { next: next % (size + 1), ..desc };
                    set(&self.desc, u16::from(*index) % size, desc);
                }
            }
            Spoil::Entry { slot, head } => {
                self.avail.store_u16(avail_entry(u16::from(*slot) % size), *head);
            }
            Spoil::Idx(idx) => self.avail.store_u16_release(RING_IDX, *idx),
            Spoil::Offer { head } => self.offer(u16::from(*head) % (size + 1)),
            Spoil::Bytes { at, bytes } => {
                let at = usize::from(*at) % (SIZE as usize - 8);
                self.mappings[0].slice(at, 8).unwrap().write_from(bytes);
            }
        }
    }

    fn offer(&self, head: u16) {
        let idx = self.avail.load_u16(RING_IDX);
        self.avail.store_u16(avail_entry(idx & (self.config.size - 1)), head);
        self.avail.store_u16_release(RING_IDX, idx.wrapping_add(1));
    }

    fn write(&self, addr: u64, bytes: &[u8]) {
        let at = usize::try_from(addr - GUEST).unwrap();
        self.mappings[0].slice(at, bytes.len()).unwrap().write_from(bytes);
    }

    fn write_header(&self, kind: u8, sector: u64) {
        let kind = u32::from(kind).to_le_bytes();
        self.write(HEADER, &[&kind[..], &[0; 4], &sector.to_le_bytes()].concat());
    }

    /// Offers a request through the indirect table.
    pub fn request(&self, kind: u8, sector: u64, header: u8, data: u16, write: bool, status: bool) {
        self.write_header(kind, sector);
        let data_flags = if write { DESC_F_WRITE } else { 0 };
        let len = u32::from(data);
        let mut parts = vec![(HEADER, u32::from(header), 0), (DATA, len, data_flags)];
        parts.extend(status.then_some((STATUS, 1, DESC_F_WRITE)));
        self.offer_parts(&parts);
    }

    /// Offers a request with segments.
    pub fn range(&self, kind: u8, sector: u64, count: u32, flags: u8, segments: u8) {
        self.write_header(kind, 0);
        let segment =
            [&sector.to_le_bytes()[..], &count.to_le_bytes(), &u32::from(flags).to_le_bytes()]
                .concat();
        self.write(DATA, &segment);
        let len = u32::from(segments) * 16;
        self.offer_parts(&[(HEADER, 16, 0), (DATA, len, 0), (STATUS, 1, DESC_F_WRITE)]);
    }

    /// Offers a frame: its header cut in two, then `times` the same `data` bytes, and something to
    /// write if wanted.
    pub fn frame(&self, header: &[u8; 12], cut: u8, data: u16, times: u8, writable: bool) {
        self.write(HEADER, header);
        let (cut, len) = (u32::from(cut), u32::from(data));
        let mut parts = vec![(HEADER, cut, 0), (HEADER + u64::from(cut), 12 - cut, 0)];
        parts.extend((0..times).map(|_| (DATA, len, 0)));
        parts.extend(writable.then_some((STATUS, 64, DESC_F_WRITE)));
        self.offer_parts(&parts);
    }

    /// Offers a buffer of `pieces` times the same `data` bytes, and something to read if wanted.
    pub fn buffer(&self, data: u16, pieces: u8, readable: bool) {
        let mut parts = vec![(HEADER, 16, 0); usize::from(readable)];
        parts.extend((0..pieces).map(|_| (DATA, u32::from(data), DESC_F_WRITE)));
        self.offer_parts(&parts);
    }

    /// Offers a command, and room for its answer.
    pub fn command(&self, bytes: &[u8], process: u8) {
        let bytes = &bytes[..bytes.len().min(0x1000)];
        self.write(DATA, bytes);
        let len = bytes.len() as u32;
        self.offer_parts(&[(DATA, len, 0), (STATUS, u32::from(process), DESC_F_WRITE)]);
    }

    fn offer_parts(&self, parts: &[(u64, u32, u16)]) {
        for (index, (addr, len, flags)) in (0u16..).zip(parts) {
            let last = usize::from(index) + 1 == parts.len();
            let more = if last { 0 } else { DESC_F_NEXT };
            let desc = Descriptor { addr: *addr, len: *len, flags: flags | more, next: index + 1 };
            set(&self.table, index, desc);
        }
        let len = (parts.len() * DESCRIPTOR_SIZE) as u32;
        set(&self.desc, 0, Descriptor { addr: TABLE, len, flags: DESC_F_INDIRECT, next: 0 });
        self.offer(0);
    }

    /// The guest's pages of 4 KiB that the slice lies in.
    pub fn pages(&self, slice: &GuestSlice) -> std::ops::RangeInclusive<u64> {
        self.assert_inside(slice);
        let bases = self.mappings.iter().zip([GUEST, GUEST + SIZE]);
        let offsets = bases.filter_map(|(mapping, base)| {
            let offset = slice.address().checked_sub(mapping.slice(0, 0)?.address())?;
            (offset < mapping.size()).then_some(base + offset as u64)
        });
        let first = offsets.last().unwrap();
        first / 4096..=(first + slice.len() as u64 - 1) / 4096
    }

    /// Panics unless the slice lies in one of the regions.
    pub fn assert_inside(&self, slice: &GuestSlice) {
        let inside = self.mappings.iter().any(|mapping| {
            let low = mapping.slice(0, 0).unwrap().address();
            let high = low + mapping.size();
            low <= slice.address() && slice.address() + slice.len() <= high
        });
        assert!(inside && !slice.is_empty());
    }
}

fn set(table: &Words, index: u16, desc: Descriptor) {
    let at = usize::from(index) * DESCRIPTOR_SIZE;
    let (low, high) = desc.emit();
    table.store_u64(at, low);
    table.store_u64(at + 8, high);
}
