//! `MemoryError`: why a region, an address or a mapping of guest memory is refused.

/// Why a region, an address or a mapping of guest memory is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum MemoryError {
    #[error("memory region is not backed by a file of the kernel's own")]
    NotAFile,
    #[error("memory region lies on a file system (type {kind:#x}) that could make its users wait")]
    FileSystem { kind: u64 },
    #[error(
        "memory region lies on a disk (file system of type {kind:#x}), where a page fault waits \
         for the disk and holds other guests up: use a memfd, or allow it with memory_on_disk"
    )]
    OnDisk { kind: u64 },
    #[error("memory region cannot be mapped: no thread to do it")]
    NoThread,
    #[error("memory region ends at byte {end} of a file of {file_size} bytes")]
    TooShort { file_size: u64, end: u64 },
    #[error("memory region overflows the address space")]
    Overflow,
    #[error("memory region cannot be mapped")]
    Map(#[source] rustix::io::Errno),
    #[error("{max} memory regions of guests are mapped, as many as vm.max_map_count has room for")]
    TooMany { max: usize },
    #[error("memory regions of more than {max} bytes together")]
    Vast { max: u64 },
    #[error("memory regions of more than {max} bytes together, which memory_max allows")]
    MemoryMax { max: u64 },
    #[error("a migration log of {size} bytes, where 1 to {max} can be")]
    LogSize { size: u64, max: u64 },
    #[error("a migration log of {size} bytes is too short for guest memory up to address {end:#x}")]
    LogShort { size: u64, end: u64 },
    #[error("{max} pieces of granted memory are mapped, as many as vm.max_map_count has room for")]
    Pieces { max: usize },
    #[error("memory region at guest address {guest_addr:#x} overlaps another one")]
    Overlap { guest_addr: u64 },
    #[error("{len} bytes at guest address {addr:#x} are not in guest memory")]
    GuestRange { addr: u64, len: u64 },
    #[error("{len} bytes at user address {addr:#x} are not in one memory region")]
    UserRange { addr: u64, len: u64 },
    #[error("user address {addr:#x} is not aligned to {align} bytes")]
    Align { addr: u64, align: u64 },
}
