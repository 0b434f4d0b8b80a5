//! `Walk`: what a walk along a chain of descriptors has seen; `Table`: an indirect table.

use crate::QueueError;
use crate::chain::CHAIN_SLICES;
use manyring_memory::{GuestAddr, GuestSlice, LastHit, MemoryError, SliceList};
use manyring_wire::virtqueue::{DESCRIPTOR_SIZE, Descriptor};

/// An indirect table: in one piece of guest memory, or gathered from several.
pub(super) enum Table<'a> {
    Guest(GuestSlice<'a>),
    Copied(&'a [u8]),
}

impl Table<'_> {
    /// Copies the descriptor at byte `at` out.
    #[inline]
    pub(super) fn descriptor(&self, at: usize) -> Descriptor {
        let bytes = match self {
            Self::Guest(slice) => slice.split_at(at).1.read_array().unwrap_or_default(),
            Self::Copied(bytes) => {
                let mut copy = [0; DESCRIPTOR_SIZE];
                copy.copy_from_slice(&bytes[at..at + DESCRIPTOR_SIZE]);
                copy
            }
        };
        Descriptor::parse_bytes(&bytes)
    }
}

/// What a walk along a chain has seen. Passed by value, so that it stays in registers.
pub(super) struct Walk {
    /// Slices and empty descriptors that the batch may hold after this chain.
    limit: usize,
    /// Descriptors of no bytes.
    pub(super) empty: usize,
    /// Bytes of all descriptors. A walk ends long before the sum of 32-bit lengths could wrap.
    bytes: u64,
    /// Where the writable slices begin; [`NOWHERE`] until there is one.
    pub(super) writable_at: usize,
}

/// Larger than the index of any slice.
const NOWHERE: usize = usize::MAX;

impl Walk {
    /// A walk along a chain whose slices begin at `start`.
    pub(super) fn from(start: usize) -> Self {
        Self { limit: start + CHAIN_SLICES, empty: 0, bytes: 0, writable_at: NOWHERE }
    }

    /// Adds one descriptor. Readable ones must come before writable ones (§2.7.4.2), and all bytes
    /// must be in guest memory. A descriptor of no bytes adds no slice.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "rare callers would outline it")]
    pub(super) fn add(
        &mut self,
        desc: Descriptor,
        last_hit: &mut LastHit,
        slices: &mut SliceList,
    ) -> Result<(), QueueError> {
        if desc.is_writable() {
            self.writable_at = self.writable_at.min(slices.len());
        } else if self.writable_at != NOWHERE {
            return Err(QueueError::ReadableAfterWritable);
        }
        self.bytes += u64::from(desc.len);
        if desc.len == 0 {
            self.empty += 1;
        } else {
            let resolved = slices.resolve(GuestAddr(desc.addr), desc.len, last_hit);
            resolved.map_err(|error| self.wrong(error))?;
        }
        if slices.len() + self.empty > self.limit {
            return Err(QueueError::ChainSlices { max: CHAIN_SLICES });
        }
        Ok(())
    }

    /// Ends the walk; refuses a chain of more than `u32::MAX` bytes.
    #[inline]
    pub(super) fn end(self) -> Result<Self, QueueError> {
        if self.is_too_long() { Err(QueueError::ChainBytes) } else { Ok(self) }
    }

    #[inline]
    fn is_too_long(&self) -> bool {
        self.bytes > u64::from(u32::MAX)
    }

    /// Which fault to report for a buffer that is not in memory: the length, if that is too much.
    #[cold]
    fn wrong(&self, error: MemoryError) -> QueueError {
        if self.is_too_long() { QueueError::ChainBytes } else { QueueError::Buffer(error) }
    }
}
