//! Where addresses are found, by every way, and which regions may lie beside each other.
use super::*;

fn memory() -> GuestMemory {
    let region = |guest_addr, size, user_addr| {
        let spec = RegionSpec { guest_addr, size, user_addr, mmap_offset: 0 };
        (spec, Arc::new(Mapping::anonymous(size).unwrap()))
    };
    let (high, high_map) = region(0x10_0000, 0x4000, 0x9000_0000);
    let (low, low_map) = region(0, 0x2000, 0x7000_0000);
    let (next, next_map) = region(0x2000, 0x1000, 0x8000_0000);
    GuestMemory::default()
        .with_mapping(high, high_map)
        .and_then(|m| m.with_mapping(low, low_map))
        .and_then(|m| m.with_mapping(next, next_map))
        .unwrap()
}

fn lens(memory: &GuestMemory, addr: u64, len: u32) -> Result<Vec<usize>, MemoryError> {
    let mut out = Vec::new();
    memory.slices(GuestAddr(addr), len, &mut LastHit::default(), &mut out)?;
    Ok(out.iter().map(GuestSlice::len).collect())
}

#[test]
fn a_range_that_crosses_into_the_next_region_becomes_two_slices() {
    assert_eq!(lens(&memory(), 0x1ff0, 0x20), Ok(vec![0x10, 0x10]));
    assert_eq!(lens(&memory(), 0x1000, 0x1000), Ok(vec![0x1000]));
}

#[test]
fn ranges_outside_of_memory_are_refused() {
    for (addr, len) in [(0x3000, 1), (0x2ff0, 0x11), (u64::MAX, 2), (0x10_3fff, 2)] {
        assert!(lens(&memory(), addr, len).is_err(), "{addr:#x}+{len:#x}");
    }
    assert!(lens(&GuestMemory::default(), 0, 1).is_err());
}

#[test]
fn the_last_hits_give_the_same_slices_as_the_search() {
    let memory = memory();
    let (mut last, mut out) = (LastHit::default(), Vec::new());
    for addr in [0x10_0000u64, 0x10_0008, 0x1000, 0x2010, 0x10_0010, 8] {
        memory.slices(GuestAddr(addr), 8, &mut last, &mut out).unwrap();
        let searched = {
            let mut out = Vec::new();
            memory.slices(GuestAddr(addr), 8, &mut LastHit::default(), &mut out).unwrap();
            out[0].address()
        };
        assert_eq!(out.last().unwrap().address(), searched);
    }
}

#[test]
fn overlapping_regions_are_refused_and_identical_files_share() {
    let spec = RegionSpec { guest_addr: 0x1fff, size: 8, user_addr: 0, mmap_offset: 0 };
    let map = Arc::new(Mapping::anonymous(8).unwrap());
    assert!(matches!(memory().with_mapping(spec, map), Err(MemoryError::Overlap { .. })));
}

#[test]
fn a_file_shorter_than_its_region_is_refused() {
    let file = rustix::fs::memfd_create("short", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 4096).unwrap();
    let spec = RegionSpec { guest_addr: 0, size: 8192, user_addr: 0, mmap_offset: 0 };
    let refused = GuestMemory::default().with_region(spec, &file);
    assert!(matches!(refused, Err(MemoryError::TooShort { .. })));
    let spec = RegionSpec { size: 4096, ..spec };
    let memory = GuestMemory::default().with_region(spec, &file).unwrap();
    assert_eq!(memory.with_region(spec, &file).unwrap().region_count(), 1);
    assert_eq!(memory.without_region(&spec).region_count(), 0);
}

#[test]
fn ring_words_must_be_aligned_and_in_one_region() {
    let memory = memory();
    assert!(memory.words(0x7000_1000, 64, 16).is_ok());
    assert!(matches!(memory.words(0x7000_1008, 64, 16), Err(MemoryError::Align { .. })));
    assert!(matches!(memory.words(0x7000_1ff0, 64, 16), Err(MemoryError::UserRange { .. })));
}

/// A snapshot of regions at these addresses, of these sizes.
fn snapshot(places: &[(u64, u64)]) -> GuestMemory {
    let mut memory = GuestMemory::default();
    for (number, (guest_addr, size)) in (1..).zip(places) {
        let spec = RegionSpec {
            guest_addr: *guest_addr,
            size: *size,
            user_addr: number << 44,
            mmap_offset: 0,
        };
        let mapping = Arc::new(Mapping::anonymous(*size).unwrap());
        memory = memory.with_mapping(spec, mapping).unwrap();
    }
    memory
}

const MIB: u64 = 1 << 20;

/// Many regions: whole blocks, parts of one, neighbours, holes, one beyond the table.
fn scattered() -> GuestMemory {
    snapshot(&[
        (0, 2 * MIB),
        (2 * MIB, 4 * MIB),
        (7 * MIB, MIB),
        (8 * MIB, 0x1000),
        (8 * MIB + 0x3000, 0x1000),
        (20 * MIB, 8 * MIB),
        (1 << 40, 2 * MIB),
        (1 << 43, 2 * MIB),
    ])
}

#[test]
fn the_table_finds_what_a_search_finds_for_every_page() {
    let growing = snapshot(&[(0, MIB), (MIB, MIB), (2 * MIB, 8 * MIB)]);
    for (memory, ends) in [
        (scattered(), &[0u64, 32 * MIB, 1 << 40, 1 << 43, u64::MAX - 4 * MIB][..]),
        (growing, &[16 * MIB]),
    ] {
        assert!(!memory.blocks.is_empty());
        for (end, page) in ends.iter().flat_map(|end| (0..8192).map(move |page| (end, page))) {
            let addr = (end + 4 * MIB).saturating_sub(page * 0x1000);
            assert_eq!(memory.region_at(addr), searched(memory.regions.list(), addr), "{addr:#x}");
        }
    }
    // Two regions are remembered: they need none.
    assert!(snapshot(&[(0, MIB), (MIB, MIB)]).blocks.is_empty());
}

#[test]
fn the_table_has_an_end_and_spares_the_search_where_a_block_lies_in_one_region() {
    let blocks = scattered().blocks;
    assert_eq!(blocks.len() as u64, BLOCKS_MAX, "whatever the last address is");
    assert_eq!(blocks[..11], [0, 1, 1, SEARCH, SEARCH, 4, 4, 4, 4, 4, 5]);
    let blocks = snapshot(&[(0, MIB), (MIB, MIB), (2 * MIB, 8 * MIB)]).blocks;
    assert_eq!(blocks[..], [SEARCH, 2, 2, 2, 2, 2], "no longer than the memory");
}

#[test]
fn a_hit_serves_the_snapshot_that_it_came_from_and_its_clones_alone() {
    let (one, other) = (snapshot(&[(0, MIB)]), snapshot(&[(0, MIB)]));
    let (mut last, mut out) = (LastHit::default(), Vec::new());
    one.slices(GuestAddr(8), 8, &mut last, &mut out).unwrap();
    let address = out[0].address();
    assert!(other.slice(GuestAddr(8), 8, &mut last).is_none(), "its mapping may be gone");
    let clone = one.clone();
    assert_eq!(clone.slice(GuestAddr(8), 8, &mut last).unwrap().address(), address);
    other.slices(GuestAddr(8), 8, &mut last, &mut out).unwrap();
    assert_ne!(out[1].address(), address);
    // A snapshot that was changed is another, also where the region stays.
    let more = one.with_mapping(
        RegionSpec { guest_addr: MIB, size: MIB, user_addr: 1 << 45, mmap_offset: 0 },
        Arc::new(Mapping::anonymous(MIB).unwrap()),
    );
    assert!(more.unwrap().slice(GuestAddr(8), 8, &mut last).is_none());
}

#[test]
fn two_regions_are_remembered_whichever_came_last() {
    let memory = scattered();
    let (mut last, mut out) = (LastHit::default(), Vec::new());
    for addr in [0, 20 * MIB] {
        memory.slices(GuestAddr(addr), 16, &mut last, &mut out).unwrap();
    }
    for (addr, len, found) in [
        (0, 16, true),
        (20 * MIB, 16, true),
        (2 * MIB - 16, 16, true),
        (2 * MIB - 16, 17, false),
        (28 * MIB - 1, 1, true),
        (28 * MIB, 1, false),
        (8 * MIB, 1, false),
    ] {
        assert_eq!(memory.slice(GuestAddr(addr), len, &mut last).is_some(), found, "{addr:#x}");
    }
}

/// The plain version of `blocks`.
fn blocks_searched(regions: &[MappedRegion], count: usize) -> Vec<u8> {
    let block = |number: u64| {
        let first = number << BLOCK_SHIFT;
        let found = searched(regions, first);
        let is_whole = found == searched(regions, first + (1 << BLOCK_SHIFT) - 1);
        found.filter(|_| is_whole).and_then(|index| u8::try_from(index).ok()).unwrap_or(SEARCH)
    };
    (0..count as u64).map(block).collect()
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    #[test]
    fn the_table_says_what_two_searches_for_each_block_say(
        places in proptest::collection::vec((0u64..2048, 1u64..1024), 3..400),
    ) {
        let mut regions = Vec::new();
        let mapping = Arc::new(Mapping::anonymous(MIB).unwrap());
        for (number, (at, pages)) in (1..).zip(places) {
            let spec = RegionSpec {
                guest_addr: at * MIB / 4,
                size: pages.min(256) * 0x1000,
                user_addr: number << 30,
                mmap_offset: 0,
            };
            let _ = insert(&mut regions, spec, mapping.clone());
        }
        let table = blocks(&regions);
        proptest::prop_assert_eq!(&table[..], &blocks_searched(&regions, table.len())[..]);
    }
}

#[test]
fn regions_that_come_together_make_one_snapshot_or_none() {
    let file = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 4 * MIB).unwrap();
    let region = |number: u64| {
        let at = number * MIB;
        let spec =
            RegionSpec { guest_addr: at, size: MIB, user_addr: 1 << 40 | at, mmap_offset: at };
        (spec, &file)
    };
    let (none, rules) = (GuestMemory::default(), MemoryFiles::InMemory);
    let before = none.id();
    let memory = none.with_regions_in(rules, [2, 0, 3, 1, 0].map(region)).unwrap();
    let addresses: Vec<_> = memory.specs().map(|s| s.guest_addr / MIB).collect();
    assert_eq!(addresses, [0, 1, 2, 3], "in order, and the one that came twice once");
    assert_eq!(memory.blocks[..], blocks_searched(memory.regions.list(), memory.blocks.len()));
    assert_eq!(memory.with_regions_in(rules, [region(1)]).unwrap().id(), memory.id());
    assert_eq!(none.id(), before);
    let beyond = none.with_regions_in(rules, [region(0), region(4)]);
    assert!(matches!(beyond, Err(MemoryError::TooShort { .. })));
}
