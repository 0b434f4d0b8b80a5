//! `Pages`: a guest's memory, mapped behind the socket's own memory, so that the card can read it
//! (zero-copy).
//!
//! A socket has one range of memory. The regions of a guest are not adjacent, so their pages are
//! mapped a second time, one region after another behind the socket's own memory. The kernel pins
//! the pages and does not keep the addresses of this second mapping, so it is unmapped at once.
//! From then on a short table translates the address of a guest's slice into an offset in the
//! range.

use manyring_memory::{GuestMemory, GuestSlice, Mapping, MemoryError};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a page. A frame can be lent only if it lies in one page.
pub(super) const PAGE: u64 = 4096;

/// The offsets of a memory snapshot's pages in the range.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// The ID of the snapshot; 0: none.
    snapshot: u64,
    /// For each region, its addresses in this process, and its offset in the range.
    regions: Vec<(Range<usize>, u64)>,
}

impl Pages {
    /// Makes the range: `own` and, behind it, the regions of `memory`.
    ///
    /// # Errors
    /// [`MemoryError::Map`]: a region cannot be mapped a second time.
    pub(super) fn join(
        own: &Arc<Mapping>,
        memory: &GuestMemory,
    ) -> Result<(Self, Mapping), MemoryError> {
        let mut parts = vec![own.clone()];
        let mut at = own.addresses().len() as u64;
        let mut pages = Self { snapshot: memory.id(), regions: Vec::new() };
        for mapping in memory.mappings() {
            parts.push(mapping.clone());
            pages.regions.push((mapping.addresses(), at));
            at += mapping.addresses().len() as u64;
        }
        Ok((pages, Mapping::joined(&parts)?))
    }

    /// True if these are the pages of `memory`.
    pub(super) fn is_of(&self, memory: &GuestMemory) -> bool {
        self.snapshot == memory.id()
    }

    /// Returns the offset of a slice of the snapshot in the range; `None` if the slice does not lie
    /// in one page.
    pub(super) fn place_of(&self, slice: &GuestSlice<'_>) -> Option<u64> {
        let address = slice.address();
        let (region, at) = self.regions.iter().find(|(region, _)| region.contains(&address))?;
        let place = at + (address - region.start) as u64;
        (place % PAGE + slice.len() as u64 <= PAGE).then_some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_a_snapshot_have_places_and_no_others() {
        let own = Arc::new(Mapping::anonymous_shared(8192).unwrap());
        let guest = Arc::new(Mapping::anonymous_shared(16384).unwrap());
        let memory = GuestMemory::of_mapping(guest.clone());
        let (pages, range) = Pages::join(&own, &memory).unwrap();
        assert!(pages.is_of(&memory) && !pages.is_of(&GuestMemory::of_mapping(guest.clone())));
        for (offset, len, place) in [
            (0, 1, Some(8192)),
            (4095, 1, Some(8192 + 4095)),
            (5000, 1500, Some(8192 + 5000)),
            (4095, 2, None),
            (12288, 4096, Some(8192 + 12288)),
        ] {
            let slice = guest.slice(offset, len).unwrap();
            assert_eq!(pages.place_of(&slice), place, "{offset} {len}");
            // The range shows what is written to the slice: both map the same pages.
            let Some(place) = place else { continue };
            slice.write_from(&[7]);
            let mut seen = [0];
            range.slice(usize::try_from(place).unwrap(), 1).unwrap().read_into(&mut seen);
            assert_eq!(seen, [7]);
            slice.write_from(&[0]);
        }
        assert_eq!(pages.place_of(&own.slice(0, 8).unwrap()), None);
        let private = Arc::new(Mapping::anonymous(4096).unwrap());
        assert!(Pages::join(&own, &GuestMemory::of_mapping(private)).is_err());
    }
}
