//! The layout of virtqueues: split (virtio 1.3 §2.7) with descriptors, available ring and used
//! ring, and packed (§2.8) with descriptors and two event suppression areas.

/// Bytes of one descriptor (§2.7.5).
pub const DESCRIPTOR_SIZE: usize = 16;
/// The largest queue size of a split virtqueue (§2.7).
pub const QUEUE_SIZE_MAX: u16 = 32768;

/// Descriptor flag: the chain goes on at `next`.
pub const DESC_F_NEXT: u16 = 1;
/// Descriptor flag: the device may only write this buffer. Without it, the device may only read.
pub const DESC_F_WRITE: u16 = 2;
/// Descriptor flag: the buffer holds a table of descriptors.
pub const DESC_F_INDIRECT: u16 = 4;

/// `avail.flags`: the driver wants no used-buffer notifications (§2.7.6).
pub const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// `used.flags`: the device wants no available-buffer notifications (§2.7.8).
pub const USED_F_NO_NOTIFY: u16 = 1;

/// Offset of `flags` in the available and in the used ring.
pub const RING_FLAGS: usize = 0;
/// Offset of `idx` in the available and in the used ring.
pub const RING_IDX: usize = 2;
/// Offset of the first entry in the available and in the used ring.
pub const RING_ENTRIES: usize = 4;

/// Alignment of the descriptor table, the available ring and the used ring (§2.7).
pub const DESC_ALIGN: u64 = 16;
/// Alignment of the available ring.
pub const AVAIL_ALIGN: u64 = 2;
/// Alignment of the used ring.
pub const USED_ALIGN: u64 = 4;
/// Bytes of an event suppression area of a packed ring (§2.8.10).
pub const EVENT_SIZE: usize = 4;
/// Alignment of an event suppression area.
pub const EVENT_ALIGN: u64 = 4;

/// Bytes of a descriptor table of `size` entries.
#[must_use]
pub const fn desc_table_size(size: u16) -> usize {
    DESCRIPTOR_SIZE * size as usize
}

/// Bytes of an available ring of `size` entries, `used_event` included.
#[must_use]
pub const fn avail_ring_size(size: u16) -> usize {
    RING_ENTRIES + 2 * size as usize + 2
}

/// Bytes of a used ring of `size` entries, `avail_event` included.
#[must_use]
pub const fn used_ring_size(size: u16) -> usize {
    RING_ENTRIES + 8 * size as usize + 2
}

/// Offset of entry `slot` of the available ring.
#[must_use]
pub const fn avail_entry(slot: u16) -> usize {
    RING_ENTRIES + 2 * slot as usize
}

/// Offset of entry `slot` of the used ring.
#[must_use]
pub const fn used_entry(slot: u16) -> usize {
    RING_ENTRIES + 8 * slot as usize
}

/// Offset of `used_event`, the last word of the available ring (§2.7.7).
#[must_use]
pub const fn used_event(size: u16) -> usize {
    avail_entry(size)
}

/// Offset of `avail_event`, the last word of the used ring (§2.7.10).
#[must_use]
pub const fn avail_event(size: u16) -> usize {
    used_entry(size)
}

/// One descriptor, as copied out of the table (§2.7.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Guest physical address of the buffer.
    pub addr: u64,
    /// Size of the buffer in bytes.
    pub len: u32,
    /// `DESC_F_*`.
    pub flags: u16,
    /// Index of the next descriptor if `DESC_F_NEXT` is set.
    pub next: u16,
}

impl Descriptor {
    /// Reads a descriptor from its two little-endian 64-bit words.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "the fields are taken out by shifts")]
    pub const fn parse(low: u64, high: u64) -> Self {
        Self {
            addr: u64::from_le(low),
            len: u64::from_le(high) as u32,
            flags: (u64::from_le(high) >> 32) as u16,
            next: (u64::from_le(high) >> 48) as u16,
        }
    }

    /// Reads a descriptor from its 16 bytes.
    #[must_use]
    pub const fn parse_bytes(bytes: &[u8; DESCRIPTOR_SIZE]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *bytes;
        Self {
            addr: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            len: u32::from_le_bytes([i, j, k, l]),
            flags: u16::from_le_bytes([m, n]),
            next: u16::from_le_bytes([o, p]),
        }
    }

    /// Parses a descriptor of a packed ring from its two words. Returns its buffer id too
    /// (§2.8.13). The flags include those of the ring's laps.
    #[must_use]
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "the fields are taken out by shifts")]
    pub const fn parse_packed(low: u64, high: u64) -> (Self, u16) {
        let high = u64::from_le(high);
        let flags = (high >> 48) as u16;
        (Self { addr: u64::from_le(low), len: high as u32, flags, next: 0 }, (high >> 32) as u16)
    }

    /// The two words of this descriptor in a packed ring, with buffer id `id`.
    #[must_use]
    #[inline]
    pub const fn emit_packed(self, id: u16) -> (u64, u64) {
        let high = self.len as u64 | (id as u64) << 32 | (self.flags as u64) << 48;
        (self.addr.to_le(), high.to_le())
    }

    /// The two little-endian 64-bit words of this descriptor.
    #[must_use]
    pub const fn emit(self) -> (u64, u64) {
        let high = self.len as u64 | (self.flags as u64) << 32 | (self.next as u64) << 48;
        (self.addr.to_le(), high.to_le())
    }

    /// True if the chain goes on at `next`.
    #[must_use]
    pub const fn has_next(self) -> bool {
        self.flags & DESC_F_NEXT != 0
    }

    /// True if the device may write the buffer.
    #[must_use]
    pub const fn is_writable(self) -> bool {
        self.flags & DESC_F_WRITE != 0
    }

    /// True if the buffer holds a table of descriptors.
    #[must_use]
    pub const fn is_indirect(self) -> bool {
        self.flags & DESC_F_INDIRECT != 0
    }
}

/// True if a move of the index from `old` to `new` passes `event` (`vring_need_event`, §2.7.7.2).
#[must_use]
pub const fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_emitted_parses_back() {
        let d = Descriptor { addr: 0x1_0020_0000, len: 4096, flags: 3, next: 0x7fff };
        let (low, high) = d.emit();
        assert_eq!(Descriptor::parse(low, high), d);
        assert!(d.has_next() && d.is_writable() && !d.is_indirect());
    }

    #[test]
    fn need_event_only_when_the_move_passes_the_event() {
        assert!(need_event(5, 6, 5));
        assert!(!need_event(6, 6, 5));
        assert!(!need_event(4, 6, 5));
        assert!(need_event(0xffff, 0, 0xffff));
        assert!(!need_event(0, 0, 0xffff));
    }

    #[test]
    fn layout_sizes_are_those_of_the_specification() {
        assert_eq!(desc_table_size(256), 4096);
        assert_eq!(avail_ring_size(256), 6 + 512);
        assert_eq!(used_ring_size(256), 6 + 2048);
        assert_eq!(used_event(256), 4 + 512);
        assert_eq!(avail_event(256), 4 + 2048);
    }
}
