//! Zeroes that are written to a disk where no file system call can make them.

use manyring_memory::{GuestSlice, Mapping, MemoryError};
use std::sync::OnceLock;

/// Bytes of memory, and how often they are written in one entry of the ring.
const ZEROES: (u64, usize) = (256 << 10, 16);

/// The zeroes of this process. Never written, so never allocated: the kernel reads its zero page.
/// Never unmapped: the kernel may still write them to a disk when the queue that asked is gone.
pub(super) fn shared_zeroes() -> Result<&'static Mapping, MemoryError> {
    static SHARED: OnceLock<Mapping> = OnceLock::new();
    if let Some(mapping) = SHARED.get() {
        return Ok(mapping);
    }
    let mapping = Mapping::anonymous(ZEROES.0)?;
    Ok(SHARED.get_or_init(|| mapping))
}

/// Slices of zeroes: `len` bytes, or as many as one entry takes.
pub(super) fn zeroes(source: &'static Mapping, len: u64) -> Vec<GuestSlice<'static>> {
    let (mut left, mut slices) = (len, Vec::new());
    while left > 0 && slices.len() < ZEROES.1 {
        let n = left.min(ZEROES.0);
        slices.extend(source.slice(0, usize::try_from(n).unwrap_or(0)));
        left -= n;
    }
    slices
}
