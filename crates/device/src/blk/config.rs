//! The feature bits and config space of a block device (virtio 1.3 §5.2.3, §5.2.4).

use super::BlkOptions;
use manyring_backend::blk::Geometry;
use manyring_wire::blk::{
    BlkConfig, SECTOR_SHIFT, VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD,
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SECURE_ERASE,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use manyring_wire::virtio::{
    VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1,
};
use zerocopy::IntoBytes;

/// Largest data descriptor: 2 MiB. libblkio multiplies it by `seg_max` (1022 at most) in 31 bits,
/// so the product must stay below 2^31.
pub(super) const SIZE_MAX: u32 = 2 << 20;
/// Most segments of a discard, write-zeroes or secure erase.
pub(super) const RANGES_MAX: u32 = 1;
/// Most bytes in the segment of a discard, write-zeroes or secure erase. 1 GiB keeps a request
/// short; a longer one is refused.
pub(super) const RANGE_BYTES_MAX: u64 = 1 << 30;
const RANGE_SECTORS_MAX: u64 = RANGE_BYTES_MAX >> SECTOR_SHIFT;

pub(super) fn features(options: &BlkOptions, geometry: &Geometry) -> u64 {
    let mut bits = VIRTIO_F_VERSION_1
        | VIRTIO_F_INDIRECT_DESC
        | VIRTIO_F_EVENT_IDX
        | VIRTIO_F_RING_PACKED
        | VIRTIO_BLK_F_SEG_MAX
        | VIRTIO_BLK_F_SIZE_MAX
        | VIRTIO_BLK_F_BLK_SIZE
        | VIRTIO_BLK_F_TOPOLOGY
        | VIRTIO_BLK_F_FLUSH
        | VIRTIO_BLK_F_CONFIG_WCE;
    let mut offer = |bit, offered| bits |= if offered { bit } else { 0 };
    offer(VIRTIO_BLK_F_MQ, options.num_queues > 1);
    offer(VIRTIO_BLK_F_RO, options.read_only);
    offer(VIRTIO_BLK_F_DISCARD, !options.read_only && geometry.discard_max > 0);
    offer(VIRTIO_BLK_F_WRITE_ZEROES, !options.read_only && geometry.write_zeroes_max > 0);
    offer(VIRTIO_BLK_F_SECURE_ERASE, !options.read_only && geometry.secure_erase_max > 0);
    bits
}

pub(super) fn read(
    options: &BlkOptions,
    geometry: &Geometry,
    writeback: bool,
    offset: u32,
    bytes: &mut [u8],
) {
    let config = layout(options, geometry, writeback);
    bytes.fill(0);
    let tail = config.as_bytes().get(offset as usize..).unwrap_or_default();
    let n = tail.len().min(bytes.len());
    bytes[..n].copy_from_slice(&tail[..n]);
}

fn layout(options: &BlkOptions, geometry: &Geometry, writeback: bool) -> BlkConfig {
    let sectors = |max: u64| {
        let sectors = (max >> SECTOR_SHIFT).min(RANGE_SECTORS_MAX);
        u32::try_from(sectors).unwrap_or(u32::MAX)
    };
    let ranges = |max: u64| if max > 0 { RANGES_MAX } else { 0 };
    let block_sectors = geometry.block_size >> SECTOR_SHIFT;
    let in_blocks = |bytes: u32| bytes / geometry.block_size;
    let per_physical = in_blocks(geometry.physical_block_size).max(1);
    BlkConfig {
        capacity: (geometry.size >> SECTOR_SHIFT).into(),
        size_max: SIZE_MAX.into(),
        seg_max: u32::from(options.queue_size.saturating_sub(2).max(1)).into(),
        blk_size: geometry.block_size.into(),
        physical_block_exp: u8::try_from(per_physical.ilog2()).unwrap_or(0),
        min_io_size: u16::try_from(in_blocks(geometry.min_io_size).max(1)).unwrap_or(1).into(),
        opt_io_size: in_blocks(geometry.opt_io_size).into(),
        writeback: u8::from(writeback),
        num_queues: u16::try_from(options.num_queues).unwrap_or(u16::MAX).into(),
        max_discard_sectors: sectors(geometry.discard_max).into(),
        max_discard_seg: ranges(geometry.discard_max).into(),
        discard_sector_alignment: block_sectors.into(),
        max_write_zeroes_sectors: sectors(geometry.write_zeroes_max).into(),
        max_write_zeroes_seg: ranges(geometry.write_zeroes_max).into(),
        write_zeroes_may_unmap: u8::from(geometry.discard_max > 0),
        max_secure_erase_sectors: sectors(geometry.secure_erase_max).into(),
        max_secure_erase_seg: ranges(geometry.secure_erase_max).into(),
        secure_erase_sector_alignment: block_sectors.into(),
        ..BlkConfig::default()
    }
}
