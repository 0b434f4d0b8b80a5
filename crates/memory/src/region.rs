//! `Region`: a piece of guest memory and its mapping: where a guest address is checked, once.
#![allow(unsafe_code, reason = "allow-listed: a checked guest address becomes a slice")]

use crate::error::MemoryError;
use crate::guest::{GuestAddr, RegionSpec};
use crate::iov::GuestSlice;
use crate::mapping::Mapping;
use std::ptr::NonNull;
use std::sync::Arc;

/// A region of a snapshot: its bytes are the first `spec.size` of its mapping.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    spec: RegionSpec,
    /// The host's address of the first byte, beside the range: one cache line for both.
    base: NonNull<u8>,
    mapping: Arc<Mapping>,
}

// SAFETY: `base` is an address in `mapping`, which may be used from any thread and is held.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// The region `spec` on `mapping`.
    ///
    /// # Errors
    /// [`MemoryError::TooShort`] if the mapping is shorter.
    pub(crate) fn new(spec: RegionSpec, mapping: Arc<Mapping>) -> Result<Self, MemoryError> {
        let file_size = mapping.size() as u64;
        if file_size < spec.size {
            return Err(MemoryError::TooShort { file_size, end: spec.size });
        }
        Ok(Self { spec, base: mapping.address(0), mapping })
    }

    #[inline]
    pub(crate) fn spec(&self) -> &RegionSpec {
        &self.spec
    }

    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// The slice of `len` bytes at `addr`, if all of them are in the region.
    #[inline]
    pub(crate) fn slice(&self, addr: GuestAddr, len: u64) -> Option<GuestSlice<'_>> {
        let offset = addr.0.wrapping_sub(self.spec.guest_addr);
        if offset >= self.spec.size || self.spec.size - offset < len {
            return None;
        }
        // SAFETY: offset < spec.size <= bytes of the mapping (`new`): the address lies inside.
        let start = unsafe { self.base.add(host_size(offset)) };
        // SAFETY: offset + len <= spec.size <= bytes of the mapping, which is held, and so mapped,
        // as long as `self` is borrowed.
        Some(unsafe { GuestSlice::new(start, host_size(len)) })
    }
}

#[allow(clippy::cast_possible_truncation, reason = "64-bit hosts only, see manyring-wire")]
const fn host_size(size: u64) -> usize {
    size as usize
}
