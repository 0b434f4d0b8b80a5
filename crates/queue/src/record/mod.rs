//! A device half's record of its ring, for the process that follows one that was killed.
//!
//! A ring says which chains were returned to the driver, but not which of the others were taken:
//! chains are returned in any order. So a device half keeps a record in memory that outlives its
//! process. It updates the record at four points:
//!
//! ```text
//! taken       before a chain is handed out
//! put back    it is in the ring again, untouched
//! answered    its used entry (its response) is written, and the driver does not see it yet
//! published   the driver sees all that was answered
//! ```
//! When a ring starts, the record says which chains are owed: those that were taken and have no
//! answer that the driver can see. They are popped first, in the order in which they were taken.
//!
//! `marks.rs` follows the same points: it marks the pages that are written, for a front-end that
//! moves the guest to another host (docs/design/0020).
//!
//! Without a record, a ring starts from its front-end's base. `inflight.rs` is the record of a
//! split ring and `packed.rs` that of a packed one, in a region that the front-end keeps
//! (docs/design/0015, 0016); `journal.rs` is that of a Xen ring, in a file of this daemon
//! (docs/design/0012).

pub(crate) mod inflight;
pub(crate) mod journal;
pub(crate) mod marks;
pub(crate) mod packed;
