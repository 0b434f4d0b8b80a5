//! `GrantAsks`: the references that a burst of requests names, and the pages that were found.

use super::GrantPage;
use crate::lot::{GrantAccess, GrantError, GrantRef};
use std::ops::Range;

/// A reference for which no page was found when it was added.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) gref: GrantRef,
    pub(super) access: GrantAccess,
    pub(super) number: usize,
    /// The index of the request in the burst.
    pub(super) request: usize,
}

/// The references that a burst of requests names. Reused.
#[derive(Debug, Default)]
pub struct GrantAsks {
    /// For each reference, its page; [`NO_PAGE`] if none was found, or the reference was refused.
    pub(super) pages: Vec<GrantPage>,
    pub(super) missing: Vec<Ask>,
    /// How many requests have ended.
    requests: usize,
    /// The numbers of the references that were refused, and why.
    pub(super) refused: Vec<(usize, GrantError)>,
}

/// Stands for the page of a reference without a page.
const NO_PAGE: GrantPage = GrantPage(u32::MAX);

impl GrantAsks {
    /// Makes an empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a reference of the present request, which [`PersistentGrants`](super::PersistentGrants)
    /// looks up later. Returns the reference's number.
    pub fn push(&mut self, gref: GrantRef, access: GrantAccess) -> usize {
        let number = self.pages.len();
        self.pages.push(NO_PAGE);
        self.missing.push(Ask { gref, access, number, request: self.requests });
        number
    }

    /// Ends the present request: later references belong to the next one.
    #[inline]
    pub fn end_request(&mut self) {
        self.requests += 1;
    }

    /// Returns the number of references of all requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// True if there are no references.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// True if each reference had a page when it was added, so that nothing is to be acquired.
    #[must_use]
    #[inline]
    pub fn are_found(&self) -> bool {
        self.missing.is_empty()
    }

    /// The page of the reference with this number, once acquired: to be released, exactly once.
    ///
    /// # Errors
    /// Why it could not be mapped.
    ///
    /// # Panics
    /// If it was not acquired.
    #[inline]
    pub fn page(&self, number: usize) -> Result<GrantPage, GrantError> {
        match self.pages[number] {
            NO_PAGE => Err(self.refusal(number)),
            page => Ok(page),
        }
    }

    #[cold]
    fn refusal(&self, number: usize) -> GrantError {
        match self.refused.binary_search_by_key(&number, |(number, _)| *number) {
            Ok(at) => self.refused[at].1,
            Err(_) => panic!("reference {number} was not acquired"),
        }
    }

    /// Returns the pages of those references with these numbers that have one, for the release of a
    /// request that is given up.
    #[inline]
    pub fn acquired(&self, numbers: Range<usize>) -> impl Iterator<Item = GrantPage> {
        self.pages[numbers].iter().copied().filter(|page| *page != NO_PAGE)
    }

    /// Empties the list.
    #[inline]
    pub fn clear(&mut self) {
        self.pages.clear();
        self.missing.clear();
        self.refused.clear();
        self.requests = 0;
    }

    pub(super) fn refuse(&mut self, number: usize, error: GrantError) {
        self.pages[number] = NO_PAGE;
        self.refused.push((number, error));
    }
}
