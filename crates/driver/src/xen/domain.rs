//! `XenDomain`: a domain of the simulated Xen from inside: its pages, its grants, its xenstore.

use super::calls::{EventChannel, XenCalls};
use crate::DriverError;
use manyring_memory::simgrant::{GRANT_ENTRY_SIZE, GrantEntry, GrantTable};
use manyring_memory::{GrantAccess, GrantError, GrantRef, GuestSlice, Mapping};
use manyring_wire::xen::hypercall::Hypercall;
use rustix::io::Errno;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a page.
pub const XEN_PAGE_SIZE: usize = 4096;
/// Number of grant references reserved for the toolstack, as on real Xen.
const RESERVED_GREFS: u32 = 8;

/// A domain: the front-end's side. It ends when this is dropped.
#[derive(Debug)]
pub struct XenDomain {
    domain: u16,
    calls: XenCalls,
    store: UnixStream,
    memory: Arc<Mapping>,
    table: GrantTable,
    /// The first page that is not allocated yet.
    next_page: AtomicU32,
    free_grefs: Mutex<Vec<u32>>,
}

impl XenDomain {
    /// Creates domain `domain` with `pages` pages of memory and a grant table of `entries` entries,
    /// in the simulated Xen whose xenstore socket is `store_socket`.
    ///
    /// # Errors
    /// [`DriverError::System`]: `EEXIST` if there is such a domain, `EINVAL` for a table that the
    /// memory does not hold.
    pub fn create(
        store_socket: &Path,
        domain: u16,
        pages: u32,
        entries: u32,
    ) -> Result<Self, DriverError> {
        let calls = XenCalls::connect(store_socket)?;
        let (_, fds) = calls.call(Hypercall::Create { domain, pages, entries })?;
        let mut fds = fds.into_iter();
        let (file, store) = fds.next().zip(fds.next()).ok_or(Errno::PROTO)?;
        let size = u64::from(pages) * XEN_PAGE_SIZE as u64;
        let memory = Arc::new(Mapping::of_file(&file, 0, size)?);
        let table = GrantTable::of_file(&file, entries)?;
        let table_size = entries as usize * GRANT_ENTRY_SIZE;
        let first = u32::try_from(table_size.div_ceil(XEN_PAGE_SIZE)).map_err(|_| Errno::INVAL)?;
        let free_grefs = Mutex::new((RESERVED_GREFS..entries).rev().collect());
        let (store, next_page) = (UnixStream::from(store), AtomicU32::new(first));
        Ok(Self { domain, calls, store, memory, table, next_page, free_grefs })
    }

    /// The number of the domain.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.domain
    }

    /// The domain's connection to xenstore, where relative paths begin at the domain's own nodes.
    #[must_use]
    pub fn store(&self) -> &UnixStream {
        &self.store
    }

    /// All memory of the domain: page n begins at byte 4096 * n.
    #[must_use]
    pub fn memory(&self) -> &Arc<Mapping> {
        &self.memory
    }

    /// Allocates `count` consecutive pages, which are never freed. Returns the first.
    ///
    /// # Errors
    /// [`DriverError::ArenaFull`].
    pub fn alloc_pages(&self, count: u32) -> Result<u32, DriverError> {
        let end = self.memory.size() / XEN_PAGE_SIZE;
        let fit = |next: u32| next.checked_add(count).filter(|after| *after as usize <= end);
        let full = DriverError::ArenaFull { len: u64::from(count) * XEN_PAGE_SIZE as u64 };
        self.next_page.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fit).map_err(|_| full)
    }

    /// The bytes of a page, or `None` if it has none.
    #[must_use]
    pub fn page(&self, page: u32) -> Option<GuestSlice<'_>> {
        self.memory.slice((page as usize).checked_mul(XEN_PAGE_SIZE)?, XEN_PAGE_SIZE)
    }

    /// Grants another domain access to a page.
    ///
    /// # Errors
    /// [`DriverError::RingFull`] without a free reference.
    pub fn grant(&self, to: u16, page: u32, access: GrantAccess) -> Result<GrantRef, DriverError> {
        let free = self.free_grefs.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let gref = GrantRef(free.ok_or(DriverError::RingFull)?);
        let entry = GrantEntry::new(to, page, access).ok_or(Errno::INVAL)?;
        self.table.update(gref, |_| Ok(entry))?;
        Ok(gref)
    }

    /// Ends the access to a granted page. Returns false, and changes nothing, while somebody has
    /// the page mapped.
    pub fn end_access(&self, gref: GrantRef) -> bool {
        let busy = GrantError::NotGranted { gref: gref.0 };
        let ended = self.table.update(gref, |entry| entry.ended().ok_or(busy)).is_ok();
        if ended {
            self.free_grefs.lock().unwrap_or_else(PoisonError::into_inner).push(gref.0);
        }
        ended
    }

    /// The grant table, for tests that spoil it.
    #[must_use]
    pub fn table(&self) -> &GrantTable {
        &self.table
    }

    /// Makes an event channel to which `remote` may bind.
    ///
    /// # Errors
    /// [`DriverError::System`].
    pub fn event_channel(&self, remote: u16) -> Result<EventChannel, DriverError> {
        self.calls.alloc_unbound(remote)
    }

    /// The connection for calls, as this domain.
    #[must_use]
    pub fn calls(&self) -> &XenCalls {
        &self.calls
    }
}
