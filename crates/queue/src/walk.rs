//! `Walk`: the state of a walk along a chain of descriptors. `Table`: an indirect table. Both serve
//! split and packed virtqueues.

use crate::QueueError;
use crate::chain::CHAIN_SLICES;
use manyring_memory::{
    GuestAddr, GuestMemory, GuestSlice, LastHit, MemoryError, SliceList, copy_from_slices,
};
use manyring_wire::virtqueue::{DESCRIPTOR_SIZE, Descriptor};

/// Most descriptors of an indirect table. The ring's size is no bound: Linux makes longer tables,
/// for requests of `seg_max` segments and two more descriptors.
const INDIRECT_MAX: usize = 1024;

/// An indirect table: in one piece of guest memory, or gathered from several.
pub(crate) enum Table<'a> {
    Guest(GuestSlice<'a>),
    Copied(&'a [u8]),
}

impl Table<'_> {
    /// Copies out the descriptor at byte offset `at` of the table.
    #[inline]
    pub(crate) fn descriptor(&self, at: usize) -> Descriptor {
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

/// Number of descriptors in the indirect table that `desc` names.
#[inline(always)]
#[allow(clippy::inline_always, reason = "a part of each format's walk")]
pub(crate) fn table_entries(desc: Descriptor) -> Result<usize, QueueError> {
    let count = desc.len as usize / DESCRIPTOR_SIZE;
    if count == 0 || count > INDIRECT_MAX || !(desc.len as usize).is_multiple_of(DESCRIPTOR_SIZE) {
        return Err(QueueError::IndirectSize { len: desc.len });
    }
    Ok(count)
}

/// Copies a table that crosses memory regions into one piece. Such tables are rare; all others are
/// read where they lie.
#[inline(always)]
#[allow(clippy::inline_always, reason = "the walk keeps fewer registers for a call")]
pub(crate) fn gather(
    desc: Descriptor,
    memory: &GuestMemory,
    last_hit: &mut LastHit,
) -> Result<Vec<u8>, QueueError> {
    let mut parts = Vec::new();
    memory
        .slices(GuestAddr(desc.addr), desc.len, last_hit, &mut parts)
        .map_err(QueueError::Buffer)?;
    let mut bytes = vec![0; desc.len as usize];
    copy_from_slices(&parts, &mut bytes);
    Ok(bytes)
}

/// The state of a walk along a chain. Passed by value, so that it stays in registers.
pub(crate) struct Walk {
    /// Most slices and empty descriptors that the batch may have after this chain.
    limit: usize,
    /// Descriptors of no bytes so far.
    pub(crate) empty: usize,
    /// Bytes of all descriptors so far. A walk ends long before the sum of 32-bit lengths could
    /// wrap.
    bytes: u64,
    /// Index of the first writable slice; [`NOWHERE`] until there is one.
    pub(crate) writable_at: usize,
}

/// Larger than the index of any slice.
const NOWHERE: usize = usize::MAX;

impl Walk {
    /// The state at the start of a chain whose slices begin at index `start` of the batch.
    pub(crate) fn from(start: usize) -> Self {
        Self { limit: start + CHAIN_SLICES, empty: 0, bytes: 0, writable_at: NOWHERE }
    }

    /// Adds one descriptor. Readable ones must come before writable ones (§2.7.4.2), and all bytes
    /// must be in guest memory. A descriptor of no bytes adds no slice.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "rare callers would outline it")]
    pub(crate) fn add(
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
    pub(crate) fn end(self) -> Result<Self, QueueError> {
        if self.is_too_long() { Err(QueueError::ChainBytes) } else { Ok(self) }
    }

    #[inline]
    fn is_too_long(&self) -> bool {
        self.bytes > u64::from(u32::MAX)
    }

    /// The fault for a buffer that is not in guest memory: the chain's length, if that is too
    /// large.
    #[cold]
    fn wrong(&self, error: MemoryError) -> QueueError {
        if self.is_too_long() { QueueError::ChainBytes } else { QueueError::Buffer(error) }
    }
}
