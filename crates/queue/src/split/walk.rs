//! `Walk` along a chain of descriptors, and the `Table` that they lie in.

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

/// What a walk along a chain has seen. Passed on by value: it stays in registers.
pub(super) struct Walk {
    /// Slices and empty descriptors that the batch may hold after this chain.
    limit: usize,
    /// Descriptors of no bytes.
    pub(super) empty: usize,
    /// Bytes of all descriptors: no chain is so long that their sum wraps.
    bytes: u64,
    /// Where the writable slices begin; [`NOWHERE`] until there is one.
    pub(super) writable_at: usize,
}

/// Behind every slice.
const NOWHERE: usize = usize::MAX;

impl Walk {
    /// A walk along a chain whose slices begin at `start`.
    pub(super) fn from(start: usize) -> Self {
        Self { limit: start + CHAIN_SLICES, empty: 0, bytes: 0, writable_at: NOWHERE }
    }

    /// Adds one descriptor: readable ones come first, all bytes are in guest memory. Descriptors
    /// of no bytes are passed over.
    #[inline]
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

    /// The chain ends here.
    #[inline]
    pub(super) fn end(self) -> Result<Self, QueueError> {
        if self.is_too_long() { Err(QueueError::ChainBytes) } else { Ok(self) }
    }

    #[inline]
    fn is_too_long(&self) -> bool {
        self.bytes > u64::from(u32::MAX)
    }

    /// The last descriptor is not in memory, which it could not be in a chain that is too long.
    #[cold]
    fn wrong(&self, error: MemoryError) -> QueueError {
        if self.is_too_long() { QueueError::ChainBytes } else { QueueError::Buffer(error) }
    }
}
