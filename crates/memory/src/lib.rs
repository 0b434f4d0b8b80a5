//! Guest pages: the only crate that turns a guest address into a host one.
//!
//! transport -> queue -> device -> backend; **memory** lies under all of them. A session maps its
//! regions into a [`GuestMemory`], an immutable snapshot. A queue resolves its ring once into
//! [`Words`] (which keep their mapping alive) and every buffer into [`GuestSlice`]s.
//!
//! **Contract of [`GuestSlice`].** A slice is a bare pointer and length, so that it can be handed
//! to system calls as an iovec with no reference count per request. Whoever keeps a slice keeps
//! the snapshot it came from alive; `device` does so with an epoch per snapshot
//! (ARCHITECTURE.md, "Threads and ownership").
#![deny(unsafe_code)]

mod error;
mod guest;
mod iov;
mod mapping;
mod shared;
mod sigbus;

pub use error::MemoryError;
pub use guest::{GuestAddr, GuestMemory, LastHit, RegionSpec};
pub use iov::{GuestSlice, advance, as_iovecs, copy_from_slices, copy_to_slices, total_len};
pub use mapping::Mapping;
pub use shared::{Words, fence_full};
pub use sigbus::{fault_count, install as install_sigbus_handler};
