//! Files that are vast cost nothing, and must not take all addresses of the process. Alone in its
//! process: what others map counts as well.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use manyring_memory::{GuestMemory, Mapping, MemoryError, RegionSpec};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const TIB: u64 = 1 << 40;

#[test]
fn vast_files_leave_half_of_the_addresses_and_a_guest_has_few_of_the_rest() {
    let file = memfd_create("vast", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 128 * TIB).unwrap();
    let spec = |guest_addr, size| RegionSpec { guest_addr, size, user_addr: 0, mmap_offset: 0 };
    let refused = |max| Some(MemoryError::Vast { max });
    let most = GuestMemory::default().with_region(spec(0, 8 * TIB), &file).unwrap();
    assert_eq!(most.with_region(spec(8 * TIB, 4096), &file).err(), refused(8 * TIB));
    let huge = GuestMemory::default().with_region(spec(0, u64::MAX - 4096), &file);
    assert_eq!(huge.err(), refused(8 * TIB));
    let others: Vec<_> = (1..8).map(|_| Mapping::of_file(&file, 0, 8 * TIB).unwrap()).collect();
    assert_eq!(Mapping::of_file(&file, 0, 4096).err(), refused(64 * TIB));
    drop(most);
    assert!(Mapping::of_file(&file, 4000, 8 * TIB - 4096).is_ok(), "whole pages count");
    // One that is refused takes nothing.
    assert!(Mapping::of_file(&file, 128 * TIB, 4096).is_err());
    assert!((0..64).all(|_| Mapping::of_file(&file, 0, 8 * TIB).is_ok()));
    drop(others);
}
