//! Front-ends that have all the regions they can get leave mappings for everything else. One test:
//! it is of the whole process.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use manyring_memory::{Mapping, MemoryError};

#[test]
fn the_last_region_is_refused_while_the_process_has_room_for_others() {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let max = text.trim().parse::<usize>().unwrap() / 8 * 3;
    if max > 60_000 {
        println!("vm.max_map_count is too large to be reached: {text}");
        return;
    }
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 8192).unwrap();
    // Each mapping shows the same page of the file, so that the kernel joins no neighbours.
    let region = || Mapping::of_file(&file, 4096, 4096);
    let mut regions: Vec<_> = (0..max).map(|n| region().map_err(|e| (n, e)).unwrap()).collect();
    assert_eq!(region().unwrap_err(), MemoryError::TooMany { max });
    let mapped = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    assert!((max..max + 1000).contains(&mapped), "{mapped}: each region is one mapping");
    // Another guest has room as soon as somebody gives some back.
    regions.pop();
    regions.push(region().unwrap());
    assert!(region().is_err());
}
