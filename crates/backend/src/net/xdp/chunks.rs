//! `Chunks`: records which chunks of the shared memory the kernel has, so that each address that
//! comes back from it can be checked.

use super::ring::Place;

/// Bytes that a driver leaves free in front of a frame (`XDP_PACKET_HEADROOM`).
const HEADROOM: u32 = 256;

/// Consecutive chunks of one size. At any time, either the kernel or this process has a chunk.
#[derive(Debug)]
pub(super) struct Chunks {
    /// The number of the first chunk, counted from the beginning of the memory.
    first: u32,
    /// Bytes of a chunk; a power of two.
    size: u32,
    /// True for each chunk that the kernel has.
    given: Vec<bool>,
}

impl Chunks {
    /// Makes `count` chunks of `size` bytes, beginning with chunk number `first`. The kernel has
    /// none of them.
    pub(super) fn new(first: u32, size: u32, count: u32) -> Self {
        Self { first, size, given: vec![false; count as usize] }
    }

    /// Returns the bytes of the longest frame that fits a chunk behind the driver's headroom.
    pub(super) fn room(size: u32) -> u32 {
        size - HEADROOM
    }

    /// Returns the addresses of all chunks.
    pub(super) fn all(&self) -> impl Iterator<Item = u64> + use<> {
        let (first, size) = (self.first, self.size);
        (0..self.given.len() as u64).map(move |n| (u64::from(first) + n) * u64::from(size))
    }

    /// Records that the kernel gets the chunk at `addr`. Returns false if the kernel has it
    /// already, or if no chunk has this address.
    pub(super) fn give(&mut self, addr: u64) -> bool {
        let entry = self.entry(addr);
        entry.is_some_and(|is_given| !std::mem::replace(is_given, true))
    }

    /// Records that the kernel has returned the chunk in which `addr` lies. Returns the chunk's
    /// first address; `None`: the kernel did not have the chunk, or no chunk has this address.
    pub(super) fn take(&mut self, addr: u64) -> Option<u64> {
        let is_given = self.entry(addr)?;
        std::mem::replace(is_given, false).then(|| addr - addr % u64::from(self.size))
    }

    /// Records that the kernel has returned a chunk with a frame. Returns the first address of the
    /// chunk, and the frame if it lies completely in the chunk. `None`: as for [`Self::take`].
    pub(super) fn take_frame(&mut self, place: Place) -> Option<(u64, Option<Place>)> {
        let chunk = self.take(place.addr)?;
        let end = chunk + u64::from(self.size);
        let fits = place.len > 0 && u64::from(place.len) <= end - place.addr;
        Some((chunk, fits.then_some(place)))
    }

    fn entry(&mut self, addr: u64) -> Option<&mut bool> {
        let number = (addr / u64::from(self.size)).checked_sub(self.first.into())?;
        self.given.get_mut(usize::try_from(number).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_chunk_comes_back_once_and_only_with_a_frame_inside() {
        let mut chunks = Chunks::new(2, 2048, 2);
        assert_eq!(chunks.all().collect::<Vec<_>>(), [4096, 6144]);
        assert!(chunks.give(4096) && !chunks.give(4096) && chunks.give(6144));
        assert!(!chunks.give(2048) && !chunks.give(8192) && !chunks.give(u64::MAX));
        let place = Place { addr: 4096 + 256, len: 1792 };
        assert_eq!(chunks.take_frame(place), Some((4096, Some(place))));
        assert_eq!(chunks.take_frame(place), None, "it is here");
        let long = Place { addr: 6144 + 256, len: 1793 };
        assert_eq!(chunks.take_frame(long), Some((6144, None)));
        for addr in [0, 4095, 8192, u64::MAX] {
            assert_eq!(chunks.take(addr), None);
        }
    }

    proptest! {
        /// Whatever addresses come back, a chunk is taken only as often as it was given.
        #[test]
        fn only_what_was_given_is_taken(
            steps in prop::collection::vec((any::<bool>(), 0u64..16384, any::<u32>()), 1..200)
        ) {
            let (mut chunks, mut given) = (Chunks::new(1, 2048, 5), [false; 8]);
            for (gives, addr, len) in steps {
                let number = usize::try_from(addr / 2048).unwrap();
                let is_ours = (1..6).contains(&number);
                if gives {
                    prop_assert_eq!(chunks.give(addr), is_ours && !given[number]);
                    given[number] |= is_ours;
                    continue;
                }
                let place = Place { addr, len };
                let taken = chunks.take_frame(place);
                prop_assert_eq!(taken.is_some(), given[number]);
                given[number] = false;
                if let Some((chunk, frame)) = taken {
                    let end = (number as u64 + 1) * 2048;
                    prop_assert_eq!(chunk, end - 2048);
                    let fits = len > 0 && addr + u64::from(len) <= end;
                    prop_assert_eq!(frame, fits.then_some(place));
                }
            }
        }
    }
}
