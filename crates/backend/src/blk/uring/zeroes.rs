//! Zeroes that are written to a disk whose file system has no call that zeroes a range.

use manyring_memory::{GuestSlice, Mapping, MemoryError};
use std::sync::OnceLock;

/// Bytes of the mapping of zeroes, and how often one io_uring entry lists it at most.
const ZEROES: (u64, usize) = (256 << 10, 16);

/// Returns the zeroes of this process. They are never written, so the kernel maps its zero page,
/// and no memory is allocated. They are never unmapped, since the kernel may still write them to a
/// disk after the queue that submitted the write has ended.
pub(super) fn shared_zeroes() -> Result<&'static Mapping, MemoryError> {
    static SHARED: OnceLock<Mapping> = OnceLock::new();
    if let Some(mapping) = SHARED.get() {
        return Ok(mapping);
    }
    let mapping = Mapping::anonymous(ZEROES.0)?;
    Ok(SHARED.get_or_init(|| mapping))
}

/// Returns slices of zeroes for one entry: `len` bytes, or 4 MiB if `len` is more.
pub(super) fn zeroes(source: &'static Mapping, len: u64) -> Vec<GuestSlice<'static>> {
    let (mut left, mut slices) = (len, Vec::new());
    while left > 0 && slices.len() < ZEROES.1 {
        let n = left.min(ZEROES.0);
        slices.extend(source.slice(0, usize::try_from(n).unwrap_or(0)));
        left -= n;
    }
    slices
}
