//! Grant references that Xen domains lend, the access to their pages, and the errors of mapping.

use crate::error::MemoryError;
use std::ops::Range;

/// A grant reference: the index of an entry in the grant table of the domain that lends the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantRef(pub u32);

/// The access for which a page is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantAccess {
    /// This process reads the page, which its owner may have granted read-only.
    Read,
    /// This process reads and writes the page.
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

/// References that are mapped together, with the same access, to adjacent pages, and unmapped
/// together: the segments of one request.
#[derive(Clone, Copy, Debug)]
pub struct Lot<'a> {
    /// The index of the page to which the first reference is mapped.
    pub page: u32,
    /// The access for which all pages are mapped.
    pub access: GrantAccess,
    /// The references.
    pub grefs: &'a [GrantRef],
}

/// Returns the range of pages to which the references of `lot` are mapped.
pub(crate) fn pages_of(lot: &Lot<'_>) -> Range<usize> {
    let first = lot.page as usize;
    first..first + lot.grefs.len()
}
