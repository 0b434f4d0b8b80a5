//! Maps the file that holds a ring's journal (`manyring_queue::blkif`, docs/design/0012).

use crate::StartError;
use manyring_memory::{Mapping, MemoryError, MemoryFiles, Words};
use rustix::fd::OwnedFd;
use rustix::fs::{FallocateFlags, fallocate, fstat, ftruncate};
use rustix::io::Errno;
use std::sync::Arc;

/// Maps the first `len` bytes of `file`. A shorter file is no journal of this ring, so it is
/// emptied and extended to `len` bytes.
///
/// The blocks of the file are allocated now. A later store into a hole would be lost if the file
/// system were full, and with it the record of a request.
///
/// # Errors
/// [`StartError::JournalRoom`]: the file cannot be extended, or its file system is full.
/// [`StartError::Journal`]: the file cannot be mapped.
pub(super) fn map(file: &OwnedFd, len: usize) -> Result<Words, StartError> {
    let size = len as u64;
    let has = fstat(file).map_err(StartError::JournalRoom)?.st_size;
    if u64::try_from(has).unwrap_or(0) < size {
        ftruncate(file, 0).map_err(StartError::JournalRoom)?;
    }
    match fallocate(file, FallocateFlags::empty(), 0, size) {
        Err(Errno::OPNOTSUPP) => ftruncate(file, size),
        reserved => reserved,
    }
    .map_err(StartError::JournalRoom)?;
    // The operator has chosen the folder: no guest and no front-end can choose the file.
    let mapping = Mapping::of_file_in(MemoryFiles::LocalDisk, file, 0, size);
    let mapping = mapping.map_err(StartError::Journal)?;
    let words = Words::new(Arc::new(mapping), 0, len, size_of::<u64>() as u64);
    words.ok_or(StartError::Journal(MemoryError::Overflow))
}
