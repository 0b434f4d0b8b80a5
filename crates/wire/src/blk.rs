//! virtio-blk: feature bits, config space, request header, segments, status (virtio 1.3 §5.2).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, Unaligned};

/// Bytes of a sector, the unit of every offset and length of the protocol (§5.2.4).
pub const SECTOR_SIZE: u64 = 512;
/// log2 of [`SECTOR_SIZE`].
pub const SECTOR_SHIFT: u32 = 9;
/// Bytes of the device id string of `GET_ID`; not terminated when all are used (§5.2.6).
pub const ID_SIZE: usize = 20;

/// `size_max` bounds every data descriptor.
pub const VIRTIO_BLK_F_SIZE_MAX: u64 = 1 << 1;
/// `seg_max` bounds the data descriptors of a request.
pub const VIRTIO_BLK_F_SEG_MAX: u64 = 1 << 2;
/// The device is read-only.
pub const VIRTIO_BLK_F_RO: u64 = 1 << 5;
/// `blk_size` is the preferred block size.
pub const VIRTIO_BLK_F_BLK_SIZE: u64 = 1 << 6;
/// The driver may flush; the cache is write-back.
pub const VIRTIO_BLK_F_FLUSH: u64 = 1 << 9;
/// `topology` is valid.
pub const VIRTIO_BLK_F_TOPOLOGY: u64 = 1 << 10;
/// The driver may switch between write-back and write-through.
pub const VIRTIO_BLK_F_CONFIG_WCE: u64 = 1 << 11;
/// `num_queues` is valid.
pub const VIRTIO_BLK_F_MQ: u64 = 1 << 12;
/// The driver may discard.
pub const VIRTIO_BLK_F_DISCARD: u64 = 1 << 13;
/// The driver may write zeroes.
pub const VIRTIO_BLK_F_WRITE_ZEROES: u64 = 1 << 14;
/// The driver may erase securely.
pub const VIRTIO_BLK_F_SECURE_ERASE: u64 = 1 << 16;

/// Request type: read.
pub const VIRTIO_BLK_T_IN: u32 = 0;
/// Request type: write.
pub const VIRTIO_BLK_T_OUT: u32 = 1;
/// Request type: flush.
pub const VIRTIO_BLK_T_FLUSH: u32 = 4;
/// Request type: device id string.
pub const VIRTIO_BLK_T_GET_ID: u32 = 8;
/// Request type: discard.
pub const VIRTIO_BLK_T_DISCARD: u32 = 11;
/// Request type: write zeroes.
pub const VIRTIO_BLK_T_WRITE_ZEROES: u32 = 13;
/// Request type: secure erase.
pub const VIRTIO_BLK_T_SECURE_ERASE: u32 = 14;

/// The status byte by which the device answers a request (§5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// `VIRTIO_BLK_S_OK`
    Ok = 0,
    /// `VIRTIO_BLK_S_IOERR`
    IoErr = 1,
    /// `VIRTIO_BLK_S_UNSUPP`
    Unsupp = 2,
}

/// The config space (§5.2.4), up to `secure_erase_sector_alignment`. The fields behind it are for
/// zoned devices, which are not served.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, Unaligned,
)]
#[repr(C)]
pub struct BlkConfig {
    /// Size of the device in sectors.
    pub capacity: U64,
    /// Largest data descriptor in bytes.
    pub size_max: U32,
    /// Most data descriptors of one request.
    pub seg_max: U32,
    /// Cylinders, heads, sectors: never offered, zero.
    pub geometry: [u8; 4],
    /// Preferred block size in bytes.
    pub blk_size: U32,
    /// log2 of the logical blocks in one physical block.
    pub physical_block_exp: u8,
    /// First aligned logical block.
    pub alignment_offset: u8,
    /// Smallest efficient I/O in logical blocks.
    pub min_io_size: U16,
    /// Optimal I/O in logical blocks.
    pub opt_io_size: U32,
    /// 1 = write-back, 0 = write-through.
    pub writeback: u8,
    /// Padding, zero.
    pub unused0: u8,
    /// Number of request queues.
    pub num_queues: U16,
    /// Largest discard segment in sectors.
    pub max_discard_sectors: U32,
    /// Most segments of one discard.
    pub max_discard_seg: U32,
    /// Alignment of discards in sectors.
    pub discard_sector_alignment: U32,
    /// Largest write-zeroes segment in sectors.
    pub max_write_zeroes_sectors: U32,
    /// Most segments of one write-zeroes.
    pub max_write_zeroes_seg: U32,
    /// 1 if write-zeroes may unmap.
    pub write_zeroes_may_unmap: u8,
    /// Padding, zero.
    pub unused1: [u8; 3],
    /// Largest secure-erase segment in sectors.
    pub max_secure_erase_sectors: U32,
    /// Most segments of one secure erase.
    pub max_secure_erase_seg: U32,
    /// Alignment of secure erases in sectors.
    pub secure_erase_sector_alignment: U32,
}

/// Offset of `writeback` in the config space, the only field a driver may write (§5.2.5).
pub const CONFIG_WRITEBACK: u32 = 32;

/// The request header as it lies in guest memory (§5.2.6).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub struct RawBlkHeader {
    /// `VIRTIO_BLK_T_*`.
    pub kind: U32,
    /// Unused.
    pub reserved: U32,
    /// First sector of a read or write.
    pub sector: U64,
}

/// Bytes of the request header.
pub const HEADER_SIZE: usize = 16;

/// A discard, write-zeroes or secure-erase segment as it lies in guest memory (§5.2.6).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub struct RawSegment {
    /// First sector.
    pub sector: U64,
    /// Number of sectors.
    pub num_sectors: U32,
    /// Bit 0: unmap (write-zeroes only); the rest is reserved and zero.
    pub flags: U32,
}

/// Bytes of a [`RawSegment`].
pub const SEGMENT_SIZE: usize = 16;
/// `RawSegment::flags`: the range may be deallocated.
pub const SEGMENT_UNMAP: u32 = 1;

/// The operation that a driver requests: a header with its sector turned into a byte offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// Read from `offset` (bytes).
    In {
        /// First byte.
        offset: u64,
    },
    /// Write at `offset` (bytes).
    Out {
        /// First byte.
        offset: u64,
    },
    /// Make all completed writes durable.
    Flush,
    /// The device id string.
    GetId,
    /// Discard the segments that follow.
    Discard,
    /// Write zeroes over the segments that follow.
    WriteZeroes,
    /// Erase the segments that follow.
    SecureErase,
    /// A type this device does not know: answered with `UNSUPP`.
    Unknown(u32),
    /// A sector whose byte offset does not fit 64 bits: answered with `IOERR`.
    OutOfRange,
}

impl RequestKind {
    /// Parses a header that was copied out of guest memory.
    #[must_use]
    pub fn parse(header: &RawBlkHeader) -> Self {
        let offset = header.sector.get().checked_mul(SECTOR_SIZE);
        match (header.kind.get(), offset) {
            (VIRTIO_BLK_T_IN, Some(offset)) => Self::In { offset },
            (VIRTIO_BLK_T_OUT, Some(offset)) => Self::Out { offset },
            (VIRTIO_BLK_T_IN | VIRTIO_BLK_T_OUT, None) => Self::OutOfRange,
            (VIRTIO_BLK_T_FLUSH, _) => Self::Flush,
            (VIRTIO_BLK_T_GET_ID, _) => Self::GetId,
            (VIRTIO_BLK_T_DISCARD, _) => Self::Discard,
            (VIRTIO_BLK_T_WRITE_ZEROES, _) => Self::WriteZeroes,
            (VIRTIO_BLK_T_SECURE_ERASE, _) => Self::SecureErase,
            (kind, _) => Self::Unknown(kind),
        }
    }
}

/// A range of a discard-like request in bytes, parsed and free of overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte.
    pub offset: u64,
    /// Bytes; may be zero.
    pub len: u64,
    /// The range may be deallocated.
    pub unmap: bool,
}

impl Segment {
    /// Parses a segment that was copied out of guest memory. `None` if a reserved flag is set or
    /// the range does not fit 64 bits; the caller answers `UNSUPP` or `IOERR` (§5.2.6.2).
    #[must_use]
    pub fn parse(raw: &RawSegment) -> Option<Self> {
        let offset = raw.sector.get().checked_mul(SECTOR_SIZE)?;
        let len = u64::from(raw.num_sectors.get()) * SECTOR_SIZE;
        offset.checked_add(len)?;
        let flags = raw.flags.get();
        (flags & !SEGMENT_UNMAP == 0).then_some(Self {
            offset,
            len,
            unmap: flags & SEGMENT_UNMAP != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_space_has_the_offsets_of_the_specification() {
        assert_eq!(size_of::<BlkConfig>(), 72);
        assert_eq!(std::mem::offset_of!(BlkConfig, blk_size), 20);
        assert_eq!(std::mem::offset_of!(BlkConfig, writeback), CONFIG_WRITEBACK as usize);
        assert_eq!(std::mem::offset_of!(BlkConfig, num_queues), 34);
        assert_eq!(std::mem::offset_of!(BlkConfig, write_zeroes_may_unmap), 56);
        assert_eq!(std::mem::offset_of!(BlkConfig, max_secure_erase_sectors), 60);
    }

    #[test]
    fn header_with_a_sector_past_64_bits_is_out_of_range() {
        let header = RawBlkHeader { kind: 0.into(), reserved: 0.into(), sector: u64::MAX.into() };
        assert_eq!(RequestKind::parse(&header), RequestKind::OutOfRange);
        let header = RawBlkHeader { kind: 99.into(), ..header };
        assert_eq!(RequestKind::parse(&header), RequestKind::Unknown(99));
    }

    #[test]
    fn segment_with_reserved_flags_or_overflow_is_refused() {
        let raw = |sector: u64, n: u32, flags: u32| RawSegment {
            sector: sector.into(),
            num_sectors: n.into(),
            flags: flags.into(),
        };
        assert_eq!(
            Segment::parse(&raw(8, 8, 1)),
            Some(Segment { offset: 4096, len: 4096, unmap: true })
        );
        assert_eq!(Segment::parse(&raw(8, 8, 2)), None);
        assert_eq!(Segment::parse(&raw(u64::MAX >> 9, u32::MAX, 0)), None);
    }
}
