//! The shared ring of a Xen block device: the back half, which we serve, and the front half, which
//! tests drive.
//!
//! One area holds requests and responses. The front writes a request at `req_prod`. The back takes
//! requests at `req_cons` and writes responses, in any order, at `rsp_prod`:
//! ```text
//!        rsp_cons        rsp_prod         req_cons        req_prod
//!  ---------|---------------|----------------|---------------|----------
//!    free   |   responses   |  taken, not    |   requests    |   free
//!           | for the front |   answered     | for the back  |
//! ```
//! All four are counts of 32 bits that wrap; an entry's place is its count modulo the ring's size.
//! A response is written over a request that was taken before, which need not be the one that it
//! answers. Therefore a request is copied out whole when it is taken.
//!
//! **Notifications.** Each side writes the count at which it wants an event: `req_event` (back) and
//! `rsp_event` (front). The peer sends an event when its own count reaches that. Each side writes
//! its own count, passes a full fence, and reads the event count of the other, as the two sides of
//! a split virtqueue with `VIRTIO_F_EVENT_IDX` do.
//!
//! **Pages.** The ring has 1 to 16 pages, which the front grants one by one. Entries have 108 or
//! 112 bytes and follow the 64 bytes of the counts without gaps. Some cross the borders of pages,
//! so the pages must be mapped side by side.
//!
//! [`BackRing`] has the verbs of the device half of a virtqueue and implements [`crate::Ring`], but
//! not [`crate::Chains`]: a request names pages by grant references, which are no slices before
//! they are mapped. A popped request has a [`crate::Chain`] as its token all the same.

mod back;
mod front;
mod requests;
mod slots;

pub use crate::record::journal::{JournalError, journal_size};
pub use back::BackRing;
pub use front::FrontRing;
pub use requests::Requests;

use crate::error::QueueError;
use manyring_memory::{GuestMemory, Words};
use manyring_wire::xen::blkif::{Abi, PAGE_SIZE, RING_ENTRIES, RING_PAGE_ORDER_MAX, ring_bytes};

/// Where a ring lies and how its entries are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingConfig {
    /// The front-end's layout.
    pub abi: Abi,
    /// The ring has `1 << order` pages.
    pub order: u32,
    /// Address of the first page in the snapshot of the granted pages; the other pages follow it.
    pub addr: u64,
}

impl RingConfig {
    fn resolve(&self, memory: &GuestMemory) -> Result<Words, QueueError> {
        self.check()?;
        Ok(memory.words(self.addr, ring_bytes(self.order), PAGE_SIZE as u64)?)
    }

    fn check(&self) -> Result<(), QueueError> {
        let order = self.order;
        if order > RING_PAGE_ORDER_MAX {
            return Err(QueueError::PageOrder { order });
        }
        Ok(())
    }
}

/// Byte offset in the ring of the entry with this count; `size` is the ring's size in entries.
#[inline]
fn entry_offset(entry_size: usize, size: u16, count: u32) -> usize {
    let place = count & (u32::from(size) - 1);
    RING_ENTRIES + place as usize * entry_size
}
