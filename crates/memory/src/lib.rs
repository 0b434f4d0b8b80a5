//! Guest pages: the only crate that turns a guest address into a host one.
//!
//! transport -> queue -> device -> backend; **memory** lies under all of them. A session maps its
//! regions into a [`GuestMemory`], an immutable snapshot. A queue resolves its ring once into
//! [`Words`] (which keep their mapping alive) and every buffer into [`GuestSlice`]s.
//!
//! **How long a slice may be kept.** [`GuestSlice`] is a bare pointer and length, so that it can be
//! handed to system calls as an iovec. The compiler keeps it from outliving what maps its bytes:
//! it borrows the mapping or the snapshot. Slices that must be kept for longer go into a
//! [`SliceList`] or [`SliceQueue`], which holds the snapshot beside the slices: one reference for a
//! list, not one for each slice or request. Slices that the kernel goes on using after a call has
//! returned are the business of the one file that gives it such slices (`backend/sys/uring.rs`): it
//! states the promise that its callers make.
//!
//! **Pages that Xen domains lend** are mapped one by one into the [`GrantPages`] of a queue, whose
//! snapshot stays the same: from there on they are guest memory like any other.
//! [`PersistentGrants`] keeps the mappings that pay; [`simgrant`] is Xen without Xen. [`EventPort`]
//! is the event channel beside a ring of such pages.
#![deny(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bounds;
mod dirty;
mod error;
mod evtchn;
mod files;
mod gntdev;
mod grant;
mod guest;
mod iov;
mod kept;
mod killed;
mod list;
mod lot;
mod mapping;
mod persistent;
mod region;
mod row;
mod shared;
mod sigbus;
pub mod simgrant;
mod touch;
mod window;

pub use dirty::{DirtyLog, DirtyPages, LOG_PAGE};
pub use error::MemoryError;
pub use evtchn::{EVENT_DEVICE, EVENT_REQUEST, EventPort};
pub use files::{MemoryFiles, MemoryRules};
pub use gntdev::{GRANT_DEVICE, GRANT_REQUESTS, GrantDevice};
pub use grant::{GRANT_PAGE_SIZE, GrantMapper, GrantPages};
pub use guest::{GuestMemory, LastHit};
pub use iov::{
    GuestSlice, advance, as_iovecs, copy_between, copy_from_slices, copy_to_slices, total_len,
};
pub use killed::stores_before_the_end;
pub use list::{Gather, KeptByte, Pieces, SliceList, SliceQueue};
pub use lot::{GrantAccess, GrantError, GrantRef, Lot};
pub use mapping::Mapping;
pub use persistent::{GrantAsks, GrantCounters, GrantLimits, GrantPage, PersistentGrants};
pub use region::{GuestAddr, RegionSpec};
pub use row::Row;
pub use shared::{Part, Words, fence_compiler, fence_full};
pub use sigbus::{fault_count, install as install_sigbus_handler};
pub use touch::{Duty, guard_memory, in_own_memory, take_duty};
