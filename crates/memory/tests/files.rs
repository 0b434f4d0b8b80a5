//! Where a file lies decides whether it may be guest memory.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]
#![cfg(not(loom))]

use manyring_memory::{GuestMemory, Mapping, MemoryError, MemoryFiles, RegionSpec};
use rustix::fd::AsFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;

const PAGE: u64 = 4096;
const BOTH: [MemoryFiles; 2] = [MemoryFiles::InMemory, MemoryFiles::LocalDisk];

/// Why a region of one page in this file is refused, if it is.
fn refusal(files: MemoryFiles, file: impl AsFd) -> Option<MemoryError> {
    let spec = RegionSpec { guest_addr: 0, size: PAGE, user_addr: 0, mmap_offset: 0 };
    GuestMemory::default().with_region_in(files, spec, file).err()
}

#[test]
fn a_region_in_a_file_on_a_disk_is_refused_unless_files_on_disks_are_allowed() {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(PAGE).unwrap();
    let refused = refusal(MemoryFiles::InMemory, &file);
    let Some(MemoryError::OnDisk { kind }) = refused else {
        panic!("this test needs a build folder on a local disk, not in memory: {refused:?}")
    };
    let line = MemoryError::OnDisk { kind }.to_string();
    assert!(line.contains(&format!("{kind:#x}")) && line.contains("memory_on_disk"), "{line}");
    assert_eq!(Mapping::of_file(&file, 0, PAGE).err(), refused, "what is not said is refused");
    assert_eq!(refusal(MemoryFiles::LocalDisk, &file), None);
}

#[test]
fn a_region_in_a_memfd_is_always_accepted() {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, PAGE).unwrap();
    for files in BOTH {
        assert_eq!(refusal(files, &file), None, "{files:?}");
    }
}

#[test]
fn a_region_in_a_file_that_others_serve_is_always_refused() {
    // A regular file on proc, which stands for FUSE and network file systems here.
    let file = File::open("/proc/self/status").unwrap();
    for files in BOTH {
        let refused = refusal(files, &file);
        assert_eq!(refused, Some(MemoryError::FileSystem { kind: 0x9fa0 }), "{files:?}");
    }
}
