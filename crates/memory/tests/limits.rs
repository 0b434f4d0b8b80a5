//! Regions beside each other, the first and last byte of each, and transfers cut short anywhere.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]
#![cfg(not(loom))]

use manyring_memory::{
    GuestAddr, GuestMemory, GuestSlice, LastHit, Mapping, MemoryError, RegionSpec, advance,
    as_iovecs, copy_from_slices, copy_to_slices, total_len,
};
use std::sync::Arc;

const PAGE: u64 = 4096;

fn spec(guest_addr: u64, size: u64) -> RegionSpec {
    RegionSpec { guest_addr, size, user_addr: guest_addr + (1 << 40), mmap_offset: 0 }
}

fn with(memory: &GuestMemory, spec: RegionSpec) -> Result<GuestMemory, MemoryError> {
    memory.with_mapping(spec, Arc::new(Mapping::anonymous(spec.size).unwrap()))
}

/// Two neighbours, and a third behind a hole.
fn three() -> GuestMemory {
    [spec(PAGE, PAGE), spec(2 * PAGE, PAGE), spec(8 * PAGE, PAGE)]
        .into_iter()
        .fold(GuestMemory::default(), |memory, spec| with(&memory, spec).unwrap())
}

/// The slices of a range as a queue sees it that has looked elsewhere, here and there before.
fn slices(memory: &GuestMemory, addr: u64, len: u32) -> Result<Vec<GuestSlice<'_>>, MemoryError> {
    let fresh = {
        let mut out = Vec::new();
        let result = memory.slices(GuestAddr(addr), len, &mut LastHit::default(), &mut out);
        result.map(|()| out)
    };
    for before in [PAGE, 2 * PAGE, 8 * PAGE] {
        for last in [PAGE, 2 * PAGE, 8 * PAGE] {
            let (mut hit, mut out) = (LastHit::default(), Vec::new());
            for place in [before, last] {
                memory.slices(GuestAddr(place), 1, &mut hit, &mut out).unwrap();
            }
            out.clear();
            let result = memory.slices(GuestAddr(addr), len, &mut hit, &mut out).map(|()| out);
            let places = |r: &Result<Vec<GuestSlice<'_>>, MemoryError>| {
                r.as_ref()
                    .map(|s| s.iter().map(|s| (s.address(), s.len())).collect::<Vec<_>>())
                    .map_err(|error| *error)
            };
            assert_eq!(places(&result), places(&fresh), "{addr:#x}+{len:#x} {before:#x} {last:#x}");
        }
    }
    fresh
}

fn lens(memory: &GuestMemory, addr: u64, len: u32) -> Result<Vec<usize>, MemoryError> {
    slices(memory, addr, len).map(|slices| slices.iter().map(GuestSlice::len).collect())
}

#[test]
fn regions_may_touch_and_not_overlap() {
    let memory = with(&GuestMemory::default(), spec(4 * PAGE, 2 * PAGE)).unwrap();
    for (first, size) in [(3, 1), (6, 1), (0, 4), (6, 9)] {
        let both = with(&memory, spec(first * PAGE, size * PAGE)).unwrap();
        assert_eq!((both.region_count(), both.size()), (2, (2 + size) * PAGE));
    }
    for (first, size) in [(4, 2), (4, 1), (5, 1), (3, 2), (3, 4), (5, 2), (0, 5), (0, 99)] {
        let guest_addr = first * PAGE;
        let refused = with(&memory, spec(guest_addr, size * PAGE));
        assert_eq!(refused.err(), Some(MemoryError::Overlap { guest_addr }), "{first} {size}");
    }
}

#[test]
fn regions_lie_in_order_however_they_came() {
    let places = [5, 1, 9, 3, 7];
    let memory = places
        .iter()
        .fold(GuestMemory::default(), |memory, n| with(&memory, spec(n * PAGE, PAGE)).unwrap());
    let found: Vec<_> = memory.specs().map(|s| s.guest_addr / PAGE).collect();
    assert_eq!(found, [1, 3, 5, 7, 9]);
    let less = memory.without_region(&spec(5 * PAGE, PAGE));
    assert_eq!(less.specs().map(|s| s.guest_addr / PAGE).collect::<Vec<_>>(), [1, 3, 7, 9]);
    let mut out = Vec::new();
    let gone = less.slices(GuestAddr(5 * PAGE), 1, &mut LastHit::default(), &mut out);
    assert!(gone.is_err());
    let other = RegionSpec { user_addr: 0, ..spec(5 * PAGE, PAGE) };
    assert_eq!(memory.without_region(&other).region_count(), 5, "another place in the front-end");
}

#[test]
fn a_region_may_end_where_the_addresses_end() {
    let last = u64::MAX - PAGE;
    let at = |guest_addr, user_addr| RegionSpec { guest_addr, user_addr, ..spec(0, PAGE) };
    assert!(with(&GuestMemory::default(), at(last, last)).is_ok());
    for spec in [at(last + 1, 0), at(0, last + 1)] {
        let refused = with(&GuestMemory::default(), spec);
        assert_eq!(refused.err(), Some(MemoryError::Overflow));
    }
    // The last byte of all is in it, the one behind is nowhere.
    let memory = with(&GuestMemory::default(), at(last, 0)).unwrap();
    let mut out = Vec::new();
    let mut read =
        |addr, len| memory.slices(GuestAddr(addr), len, &mut LastHit::default(), &mut out).is_ok();
    assert!(read(u64::MAX - 1, 1) && !read(u64::MAX - 1, 2) && !read(u64::MAX, 1));
}

#[test]
fn a_mapping_holds_its_region_exactly_or_is_refused() {
    let mapping = Arc::new(Mapping::anonymous(PAGE).unwrap());
    let memory = GuestMemory::default();
    assert!(memory.with_mapping(spec(0, PAGE), mapping.clone()).is_ok());
    let refused = memory.with_mapping(spec(0, PAGE + 1), mapping.clone());
    let short = MemoryError::TooShort { file_size: PAGE, end: PAGE + 1 };
    assert_eq!(refused.err(), Some(short));
    assert_eq!(mapping.slice(4096, 0).map(|s| s.len()), Some(0));
    assert_eq!(mapping.slice(0, 4096).map(|s| s.len()), Some(4096));
    assert_eq!(mapping.slice(4095, 1).map(|s| s.len()), Some(1));
    for (offset, len) in [(0, 4097), (1, 4096), (4096, 1), (4097, 0), (usize::MAX, 2)] {
        assert!(mapping.slice(offset, len).is_none(), "{offset} {len}");
    }
}

#[test]
fn the_first_and_the_last_byte_of_a_region_are_its_own() {
    let memory = three();
    for first in [PAGE, 2 * PAGE, 8 * PAGE] {
        assert_eq!(lens(&memory, first, 1), Ok(vec![1]));
        assert_eq!(lens(&memory, first, 4096), Ok(vec![4096]));
        assert_eq!(lens(&memory, first + PAGE - 1, 1), Ok(vec![1]));
    }
    let start = slices(&memory, 8 * PAGE, 1).unwrap()[0].address();
    assert_eq!(slices(&memory, 8 * PAGE + 5, 1).unwrap()[0].address(), start + 5);
    for (addr, len) in [
        (PAGE - 1, 1),
        (PAGE - 1, 2),
        (3 * PAGE, 1),
        (3 * PAGE - 1, 2),
        (8 * PAGE - 1, 1),
        (8 * PAGE - 1, 2),
        (9 * PAGE, 1),
        (9 * PAGE - 1, 2),
        (0, 1),
        (0, u32::MAX),
        (u64::MAX, 1),
    ] {
        let refused = MemoryError::GuestRange { addr, len: u64::from(len) };
        assert_eq!(lens(&memory, addr, len), Err(refused), "{addr:#x}+{len}");
    }
}

#[test]
fn a_range_across_two_neighbours_is_in_two_pieces_and_across_a_hole_in_none() {
    let memory = three();
    assert_eq!(lens(&memory, 2 * PAGE - 1, 2), Ok(vec![1, 1]));
    assert_eq!(lens(&memory, PAGE, 8192), Ok(vec![4096, 4096]));
    assert_eq!(lens(&memory, PAGE + 1, 8191), Ok(vec![4095, 4096]));
    assert!(lens(&memory, PAGE, 8193).is_err());
    assert!(lens(&memory, PAGE + 1, 8192).is_err());
    let across = slices(&memory, 2 * PAGE - 4, 8).unwrap();
    assert_eq!(copy_to_slices(&across, b"left-and"), 8);
    let mut bytes = [0; 4];
    slices(&memory, 2 * PAGE, 4).unwrap()[0].read_into(&mut bytes);
    assert_eq!(&bytes, b"-and");
}

#[test]
fn a_ring_lies_in_one_region_from_its_first_byte_to_its_last() {
    let memory = three();
    let user = |addr: u64| addr + (1 << 40);
    assert_eq!(memory.words(user(PAGE), 4096, 16).unwrap().size(), 4096);
    assert!(memory.words(user(2 * PAGE), 4096, 16).is_ok());
    assert!(memory.words(user(2 * PAGE) - 2, 2, 2).is_ok());
    for (addr, len) in [(PAGE, 4097), (PAGE - 2, 2), (2 * PAGE - 2, 4), (9 * PAGE, 2)] {
        let addr = user(addr);
        let refused = MemoryError::UserRange { addr, len: len as u64 };
        assert_eq!(memory.words(addr, len, 2).err(), Some(refused));
    }
    let odd = MemoryError::Align { addr: user(PAGE) + 2, align: 4 };
    assert_eq!(memory.words(user(PAGE) + 2, 8, 4).err(), Some(odd));
}

#[test]
fn words_are_little_endian_and_lie_where_they_were_put() {
    let memory = three();
    let words = memory.words(PAGE + (1 << 40), 64, 16).unwrap();
    let bytes = || {
        let mut bytes = [0; 16];
        slices(&memory, PAGE, 16).unwrap()[0].read_into(&mut bytes);
        bytes
    };
    words.store_u16(2, 0x0102);
    words.store_u16_release(4, 0x0304);
    words.store_pair(8, (0x0506_0708, 0x090a_0b0c));
    assert_eq!(bytes(), [0, 0, 2, 1, 4, 3, 0, 0, 8, 7, 6, 5, 12, 11, 10, 9]);
    assert_eq!((words.load_u16(2), words.load_u16_acquire(4)), (0x0102, 0x0304));
    assert_eq!(words.load_pair(8), (0x0506_0708, 0x090a_0b0c));
    words.store_u64(16, 7);
    words.store_u64(24, 9);
    assert_eq!(words.load_u64_pair(16), (7, 9));
    assert!(!words.is_broken() && !memory.is_broken());
    // The last word is inside, the one behind is not.
    words.store_u16(62, 1);
    for offset in [63, 64, usize::MAX] {
        let read = std::panic::AssertUnwindSafe(|| words.load_u16(offset));
        assert!(std::panic::catch_unwind(read).is_err(), "{offset}");
    }
}

#[test]
fn words_of_32_bits_are_copied_where_they_are_inside_and_aligned() {
    let memory = three();
    let words = memory.words(PAGE + (1 << 40), 64, 16).unwrap();
    words.store_u32(0, 0x0102_0304);
    words.store_u32_release(4, 0x0506_0708);
    words.store_u32s(8, &[0x090a_0b0c, 7]);
    let mut bytes = [0; 16];
    slices(&memory, PAGE, 16).unwrap()[0].read_into(&mut bytes);
    assert_eq!(bytes, [4, 3, 2, 1, 8, 7, 6, 5, 12, 11, 10, 9, 7, 0, 0, 0]);
    assert_eq!((words.load_u32(0), words.load_u32_acquire(4)), (0x0102_0304, 0x0506_0708));
    let mut copied = [0; 4];
    words.load_u32s(0, &mut copied);
    assert_eq!(copied, [0x0102_0304, 0x0506_0708, 0x090a_0b0c, 7]);
    // The last word is inside, the one behind is not, and none lies between two others.
    words.store_u32s(60, &[1]);
    words.store_u32s(64, &[]);
    for (offset, count) in [(61, 1), (62, 0), (64, 1), (52, 4), (68, 0), (usize::MAX, 1)] {
        let read = std::panic::AssertUnwindSafe(|| words.load_u32s(offset, &mut vec![0; count]));
        assert!(std::panic::catch_unwind(read).is_err(), "{count} words at {offset}");
    }
}

#[test]
fn a_few_words_are_stored_where_all_of_them_are_inside_and_aligned() {
    let memory = three();
    let words = memory.words(PAGE + (1 << 40), 64, 16).unwrap();
    // The last place, and another one.
    for offset in [52, 4] {
        words.store_few_u32s(offset, [0x0102_0304, 5, 6]);
        let mut copied = [0; 3];
        words.load_u32s(offset, &mut copied);
        assert_eq!(copied, [0x0102_0304, 5, 6]);
    }
    for offset in [56, 53, 54, 64, usize::MAX - 3] {
        let store = std::panic::AssertUnwindSafe(|| words.store_few_u32s(offset, [7; 3]));
        assert!(std::panic::catch_unwind(store).is_err(), "three words at {offset}");
        assert_eq!(words.load_u32(60), 6, "a word was stored before the refusal");
    }
}

#[test]
fn a_file_holds_its_region_from_any_offset_on_or_is_refused() {
    let file = rustix::fs::memfd_create("offset", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 3 * PAGE).unwrap();
    rustix::io::pwrite(&file, b"seven", 4097).unwrap();
    let mapping = Mapping::of_file(&file, 4097, 2 * PAGE - 1).unwrap();
    assert_eq!(mapping.size(), 8191);
    let mut bytes = [0; 5];
    mapping.slice(0, 5).unwrap().read_into(&mut bytes);
    assert_eq!(&bytes, b"seven");
    let later = Mapping::of_file(&file, 2 * PAGE + 5, 9).unwrap();
    later.slice(0, 1).unwrap().write_byte(3);
    assert_eq!(mapping.slice(4100, 1).unwrap().read_array(), Some([3]));
    mapping.slice(8190, 1).unwrap().write_byte(9);
    let mut last = [0];
    rustix::io::pread(&file, &mut last, 3 * PAGE - 1).unwrap();
    assert_eq!(last, [9]);
    let refused = |offset, size| Mapping::of_file(&file, offset, size).err();
    let short = |end| Some(MemoryError::TooShort { file_size: 3 * PAGE, end });
    assert_eq!(refused(4097, 2 * PAGE), short(3 * PAGE + 1));
    assert_eq!(refused(0, 0), short(0));
    assert_eq!(refused(3 * PAGE, 1), short(3 * PAGE + 1));
    assert_eq!(refused(u64::MAX, 1), Some(MemoryError::Overflow));
    let (reader, _writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    assert_eq!(Mapping::of_file(&reader, 0, PAGE).err(), Some(MemoryError::NotAFile));
}

#[test]
fn slices_say_how_much_they_copy() {
    let mapping = Mapping::anonymous(PAGE).unwrap();
    let slice = mapping.slice(8, 4).unwrap();
    assert_eq!((slice.write_from(b"abcdef"), slice.write_from(b"xy")), (4, 2));
    let (mut long, mut short) = ([0; 6], [0; 3]);
    assert_eq!((slice.read_into(&mut long), &long[..]), (4, &b"xycd\0\0"[..]));
    assert_eq!((slice.read_into(&mut short), &short[..]), (3, &b"xyc"[..]));
    assert_eq!(slice.read_array::<4>(), Some(*b"xycd"));
    assert_eq!((slice.read_array::<5>(), slice.read_array::<2>()), (None, Some(*b"xy")));
    slice.write_byte(b'!');
    assert_eq!(slice.read_array::<4>(), Some(*b"!ycd"));
    let none = mapping.slice(9, 0).unwrap();
    none.write_byte(b'?');
    assert!(none.is_empty() && !slice.is_empty());
    assert_eq!(slice.read_array::<4>(), Some(*b"!ycd"), "no byte, nothing written");
    let other = mapping.slice(100, 6).unwrap();
    other.write_from(b"123456");
    assert_eq!((slice.copy_from(&other), slice.read_array()), (4, Some(*b"1234")));
    let two = mapping.slice(9, 2).unwrap();
    assert_eq!((other.copy_from(&two), other.read_array()), (2, Some(*b"233456")));
    slice.fill_zero();
    assert_eq!(mapping.slice(7, 6).unwrap().read_array(), Some([0; 6]));
    let (left, right) = other.split_at(2);
    assert_eq!((left.read_array(), right.read_array()), (Some(*b"23"), Some(*b"3456")));
    let (left, right) = other.split_at(9);
    assert_eq!((left.len(), right.len()), (6, 0));
    assert_eq!(format!("{other:?}"), format!("GuestSlice({:#x}, 6)", other.address()));
}

#[test]
fn a_transfer_goes_on_where_it_was_cut_short() {
    let mapping = Mapping::anonymous(PAGE).unwrap();
    let (lens, all) = ([3, 0, 4, 1], b"abcdefgh");
    let parts = || -> Vec<GuestSlice> {
        let ends = lens.iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        lens.iter().zip(ends).map(|(len, end)| mapping.slice(end - len, *len).unwrap()).collect()
    };
    assert_eq!((copy_to_slices(&parts(), all), total_len(&parts())), (8, 8));
    for done in 0..=8 {
        let mut rest = parts();
        advance(&mut rest, done);
        let mut bytes = vec![0; 8 - done];
        assert_eq!(total_len(&rest), 8 - done as u64, "{done}");
        assert_eq!(copy_from_slices(&rest, &mut bytes), 8 - done);
        assert_eq!(bytes, all[done..], "{done}");
        assert!(rest.first().is_none_or(|slice| !slice.is_empty()), "{done}");
    }
    // Two advances in a row drop the bytes of both.
    let mut rest = parts();
    advance(&mut rest, 1);
    advance(&mut rest, 4);
    let mut bytes = [0; 3];
    assert_eq!((copy_from_slices(&rest, &mut bytes), &bytes), (3, b"fgh"));
    let mut more = [0; 2];
    assert_eq!((copy_from_slices(&rest, &mut more), &more), (2, b"fg"));
    assert_eq!(copy_to_slices(&rest, b"XY"), 2);
    assert_eq!((copy_from_slices(&rest, &mut bytes), &bytes), (3, b"XYh"));
}

#[test]
fn a_region_that_was_cut_away_is_broken_wherever_it_is_touched_and_the_others_are_not() {
    manyring_memory::install_sigbus_handler();
    for touched in [0, 1, 2 * PAGE - 1] {
        let file = |name: &str| {
            let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, 2 * PAGE).unwrap();
            file
        };
        let (cut, whole) = (file("cut"), file("whole"));
        let memory = GuestMemory::default()
            .with_region(spec(0, 2 * PAGE), &cut)
            .and_then(|memory| memory.with_region(spec(1 << 30, 2 * PAGE), &whole))
            .unwrap();
        let other = GuestMemory::default().with_region(spec(0, 2 * PAGE), &whole).unwrap();
        let ring = memory.words(1 << 40, 64, 16).unwrap();
        let (faults, mut out) = (manyring_memory::fault_count(), Vec::new());
        memory.slices(GuestAddr(touched), 1, &mut LastHit::default(), &mut out).unwrap();
        assert_eq!(out[0].read_array(), Some([0]));
        assert!(!memory.is_broken() && !ring.is_broken());
        rustix::fs::ftruncate(&cut, 0).unwrap();
        out[0].write_byte(7);
        assert!(memory.is_broken() && ring.is_broken() && !other.is_broken(), "{touched}");
        assert!(manyring_memory::fault_count() > faults);
        // The other region of the same guest is what it was.
        memory.slices(GuestAddr(1 << 30), 1, &mut LastHit::default(), &mut out).unwrap();
        out[1].write_byte(8);
        let mut byte = [0];
        rustix::io::pread(&whole, &mut byte, 0).unwrap();
        assert_eq!(byte, [8]);
    }
}

#[test]
fn slices_are_the_iovecs_of_a_system_call() {
    let mapping = Mapping::anonymous(PAGE).unwrap();
    let slices = [mapping.slice(0, 4).unwrap(), mapping.slice(8, 4).unwrap()];
    assert_eq!(as_iovecs(&slices).as_ptr().cast::<GuestSlice>(), slices.as_ptr());
}

#[test]
fn memory_that_nobody_holds_any_more_is_unmapped() {
    let name = "nobody-holds-this";
    let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, PAGE).unwrap();
    let is_mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().contains(name);
    let memory = GuestMemory::default().with_region(spec(0, PAGE), &file).unwrap();
    let ring = memory.words(1 << 40, 64, 16).unwrap();
    drop(memory);
    assert!(is_mapped(), "the ring is still there");
    drop(ring);
    assert!(!is_mapped());
}
