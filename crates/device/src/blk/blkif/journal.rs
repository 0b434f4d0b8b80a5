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
/// The file system allocates the blocks of the file now. A later store into a hole of the file
/// would be lost if the file system were full, and with it the record of a request.
///
/// # Errors
/// [`StartError::JournalSpace`]: the file cannot be extended, or its file system is full.
/// [`StartError::Journal`]: the file cannot be mapped.
pub(super) fn map(file: &OwnedFd, len: usize) -> Result<Words, StartError> {
    let size = len as u64;
    let has = fstat(file).map_err(StartError::JournalSpace)?.st_size;
    if u64::try_from(has).unwrap_or(0) < size {
        ftruncate(file, 0).map_err(StartError::JournalSpace)?;
    }
    match fallocate(file, FallocateFlags::empty(), 0, size) {
        Err(Errno::OPNOTSUPP) => ftruncate(file, size),
        reserved => reserved,
    }
    .map_err(StartError::JournalSpace)?;
    // A file on a local disk is allowed here: the operator chose the folder, and no guest or
    // front-end can choose the file.
    let mapping = Mapping::of_file_in(MemoryFiles::LocalDisk, file, 0, size);
    let mapping = mapping.map_err(StartError::Journal)?;
    let words = Words::new(Arc::new(mapping), 0, len, size_of::<u64>() as u64);
    words.ok_or(StartError::Journal(MemoryError::Overflow))
}
