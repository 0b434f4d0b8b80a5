//! `GrantAsks`: the references that a burst of requests names, and the pages that were found.

use super::GrantPage;
use crate::lot::{GrantAccess, GrantError, GrantRef};
use std::ops::Range;

/// A reference that is yet to be looked up, or was not found at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) gref: GrantRef,
    pub(super) access: GrantAccess,
    pub(super) number: usize,
    /// Which request of the burst names it.
    pub(super) request: usize,
}

/// The references that a burst of requests names. Reused.
#[derive(Debug, Default)]
pub struct GrantAsks {
    /// By number: [`NO_PAGE`] of a reference that was not found, or was refused.
    pub(super) pages: Vec<GrantPage>,
    pub(super) missing: Vec<Ask>,
    /// Requests that have ended.
    requests: usize,
    /// Why references have no page, by number.
    pub(super) refused: Vec<(usize, GrantError)>,
}

/// The page of a reference that has none.
const NO_PAGE: GrantPage = GrantPage(u32::MAX);

impl GrantAsks {
    /// An empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a reference of the present request, which is looked up when it is acquired. Returns its
    /// number.
    pub fn push(&mut self, gref: GrantRef, access: GrantAccess) -> usize {
        let number = self.pages.len();
        self.pages.push(NO_PAGE);
        self.missing.push(Ask { gref, access, number, request: self.requests });
        number
    }

    /// The references from now on are those of another request.
    #[inline]
    pub fn end_request(&mut self) {
        self.requests += 1;
    }

    /// References of all requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// True if there are no pages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// True if each reference was found as it was added: there is nothing to acquire.
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

    /// The pages of the references with these numbers that were mapped, to be released if the burst
    /// is given up here.
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
