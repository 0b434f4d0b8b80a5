//! Grant references that Xen domains lend, the access to their pages, and the errors of mapping.

use crate::error::MemoryError;
use std::ops::Range;

/// A grant reference (gref): names an entry in the grant table of the domain that lends the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantRef(pub u32);

/// The access that a page is mapped for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantAccess {
    /// We read it: the data of a write request. Its owner may have granted it read-only.
    Read,
    /// We read and write it.
    Write,
}

/// Why a page cannot be mapped or used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum GrantError {
    #[error("grant reference {gref} lends this domain no page")]
    NotGranted { gref: u32 },
    #[error("grant reference {gref} is read-only and the page is to be written")]
    ReadOnly { gref: u32 },
    #[error("grant reference {gref} is mapped {max} times already")]
    Pinned { gref: u32, max: u32 },
    #[error("page {page} has no grant reference mapped to it")]
    NotMapped { page: u32 },
    #[error("{len} bytes at {offset} are not inside a page")]
    Outside { offset: u32, len: u32 },
    #[error("no room for more grant references: {pages} pages of this queue")]
    NoRoom { pages: usize },
    #[error("the grant device refuses: {0}")]
    Device(rustix::io::Errno),
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// References that are mapped together, with the same access, to pages that follow each other, and
/// unmapped together: the segments of one request.
#[derive(Clone, Copy, Debug)]
pub struct Lot<'a> {
    /// The page of the first reference.
    pub page: u32,
    /// The access to all of the pages.
    pub access: GrantAccess,
    /// The references.
    pub grefs: &'a [GrantRef],
}

/// Which pages of `lot` are those of its references.
pub(crate) fn pages_of(lot: &Lot<'_>) -> Range<usize> {
    let first = lot.page as usize;
    first..first + lot.grefs.len()
}
