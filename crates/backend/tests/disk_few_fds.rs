//! A disk in memory for which the process has no further file descriptor. A program of its own,
//! because the limit is that of the process.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

use manyring_backend::blk::Disk;
use manyring_backend::blk::memory::MemoryDisk;
use rustix::io::{Errno, pread, pwrite};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn a_disk_in_memory_that_cannot_be_handed_over_now_keeps_its_bytes_for_the_next_time() {
    let disk = MemoryDisk::new(4096).unwrap();
    // A room writes to the file, and dies.
    let file = disk.hand_memory().unwrap().expect("it lies in memory");
    assert_eq!(pwrite(&file, b"written", 512).unwrap(), 7);
    drop(file);
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..limit }).unwrap();
    assert!(matches!(disk.hand_memory(), Err(Errno::MFILE | Errno::INVAL)));
    setrlimit(Resource::Nofile, limit).unwrap();
    let (file, mut read) = (disk.hand_memory().unwrap().unwrap(), [0; 7]);
    assert_eq!(pread(&file, &mut read, 512).unwrap(), 7);
    assert_eq!(&read, b"written");
}
