//! A guest's requests to a disk: reads, writes, flushes, its name, ranges, and wrong ones.

use super::guest::Guest;
use manyring_wire::blk::{
    ID_SIZE, SECTOR_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};

/// Bytes of the disk.
pub(crate) const DISK_SIZE: u64 = 1 << 20;
const SECTORS: u64 = DISK_SIZE / SECTOR_SIZE;

/// A disk as its driver knows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Disk {
    pub(crate) can_discard: bool,
}

impl Disk {
    /// The features for [`Self::can_discard`].
    pub(crate) const RANGES: u64 = VIRTIO_BLK_F_DISCARD | VIRTIO_BLK_F_WRITE_ZEROES;

    /// Some requests on all rings; most are in flight when this returns.
    pub(crate) fn request(self, guest: &mut Guest) {
        for lane in 0..guest.lanes.len() {
            for _ in 0..=guest.numbers.below(4) {
                self.one(guest, lane);
            }
            guest.lanes[lane].vring.publish().unwrap();
            guest.take(lane);
        }
    }

    fn one(self, guest: &mut Guest, lane: usize) {
        let sectors = 1 + guest.numbers.below(24);
        let sector = guest.numbers.below(SECTORS - sectors);
        let len = u32::try_from(sectors * SECTOR_SIZE).unwrap();
        let kinds = if self.can_discard { 14 } else { 12 };
        let (kind, sector, data, mut writable) = match guest.numbers.below(kinds) {
            0..6 => (VIRTIO_BLK_T_IN, sector, Vec::new(), self.pieces(guest, len)),
            6..8 => {
                let value = u8::try_from(guest.numbers.below(255) + 1).unwrap();
                (VIRTIO_BLK_T_OUT, sector, vec![value; len as usize], Vec::new())
            }
            8 => (VIRTIO_BLK_T_FLUSH, 0, Vec::new(), Vec::new()),
            9 => {
                let id = guest.any_place(u32::try_from(ID_SIZE).unwrap());
                (VIRTIO_BLK_T_GET_ID, 0, Vec::new(), vec![id])
            }
            // Behind the end: nothing is read, and the status says so.
            10 => (VIRTIO_BLK_T_IN, SECTORS, Vec::new(), self.pieces(guest, len)),
            // Nobody knows this one.
            11 => (99, 0, Vec::new(), self.pieces(guest, len)),
            kind => {
                let mut range = sector.to_le_bytes().to_vec();
                range.extend(u32::try_from(sectors).unwrap().to_le_bytes());
                range.extend([0; 4]);
                let discard = kind == 12;
                let kind = if discard { VIRTIO_BLK_T_DISCARD } else { VIRTIO_BLK_T_WRITE_ZEROES };
                (kind, 0, range, Vec::new())
            }
        };
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        let mut readable = vec![(guest.write(&header), 16)];
        if !data.is_empty() {
            readable.push((guest.write(&data), u32::try_from(data.len()).unwrap()));
        }
        writable.push(guest.any_place(1));
        guest.add(lane, &readable, &writable);
    }

    /// Buffers of `len` bytes in all, one to three. Without the page cache each has whole sectors.
    fn pieces(self, guest: &mut Guest, len: u32) -> Vec<(u64, u32)> {
        let sector = u32::try_from(SECTOR_SIZE).unwrap();
        let mut pieces = Vec::new();
        let mut left = len;
        while left > 0 {
            let some = u32::try_from(guest.numbers.below((left / sector).into()) + 1).unwrap();
            let piece = if pieces.len() == 2 { left } else { (some * sector).min(left) };
            pieces.push(guest.any_place(piece));
            left -= piece;
        }
        pieces
    }

    /// Waits for the answers, of all but a few requests.
    pub(crate) fn settle(guest: &mut Guest) {
        for lane in 0..guest.lanes.len() {
            let some = usize::try_from(guest.numbers.below(4)).unwrap();
            while guest.lanes[lane].in_flight > some {
                guest.wait_used(lane);
            }
        }
    }
}
