//! Guest pages: the only crate that turns a guest address into a host one.
//!
//! transport -> queue -> device -> backend; **memory** lies under all of them.
//!
//! ```text
//! flows in     RegionSpec + a front-end's file   -> Mapping (mmap) -> GuestMemory, a snapshot
//!              grant references + a GrantMapper  -> GrantPages, whose snapshot stays the same
//! flows out    a ring's addresses                -> Words: guest words, the memory order in the
//!                                                   name of each method
//!              a buffer's address and length     -> GuestSlice, GuestSlice, ..: an iovec
//! ```
//! A session maps its regions into a [`GuestMemory`], an immutable snapshot: a change of memory
//! makes another one, and a queue uses the one that it was given until it is given the next. A
//! queue resolves its ring once into [`Words`] (which keep their mapping alive) and every buffer
//! into [`GuestSlice`]s.
//!
//! **What a front-end may give** is bounded by [`MemoryRules`]: the kind of file, and the bytes of
//! all regions. Arithmetic on addresses that would overflow is an error ([`MemoryError`]), so an
//! address is resolved or refused, and never wrapped.
//!
//! **A page may vanish.** A front-end can shrink the file that its memory lies in. The handler of
//! [`install_sigbus_handler`] puts zeroed memory there and marks the mapping as broken
//! ([`GuestMemory::is_broken`]); its session ends, and the process lives. A page may also be slow:
//! [`Duty`] says which threads may touch or unmap guest memory, and debug builds check it.
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
//!
//! Begin with `guest.rs`.
//!
//! ```
//! use manyring_memory::{GuestAddr, GuestMemory, LastHit, Mapping, MemoryError, RegionSpec};
//! use std::sync::Arc;
//!
//! // Two regions that touch each other in the guest, and not in the front-end.
//! let region = |guest_addr, user_addr| {
//!     let spec = RegionSpec { guest_addr, size: 0x1000, user_addr, mmap_offset: 0 };
//!     (spec, Arc::new(Mapping::anonymous(spec.size).unwrap()))
//! };
//! let (low, low_pages) = region(0, 0x7000_0000);
//! let (high, high_pages) = region(0x1000, 0x9000_0000);
//! let one = GuestMemory::default().with_mapping(low, low_pages).unwrap();
//! let memory = one.with_mapping(high, high_pages).unwrap();
//!
//! // A buffer of 16 bytes across both is two slices.
//! let mut slices = Vec::new();
//! memory.slices(GuestAddr(0xff8), 16, &mut LastHit::default(), &mut slices).unwrap();
//! let lens: Vec<_> = slices.iter().map(|slice| slice.len()).collect();
//! assert_eq!(lens, [8, 8]);
//! slices[1].write_from(&7u64.to_le_bytes());
//!
//! // The words of a ring are found by the front-end's address, inside of one region.
//! let words = memory.words(0x9000_0000, 0x100, 8).unwrap();
//! assert_eq!(words.load_u32(0), 7);
//! assert!(matches!(memory.words(0x9000_0ff0, 0x100, 8), Err(MemoryError::UserRange { .. })));
//!
//! // A snapshot does not change: the first one still ends behind its region.
//! let refused = one.slices(GuestAddr(0xff8), 16, &mut LastHit::default(), &mut Vec::new());
//! assert!(matches!(refused, Err(MemoryError::GuestRange { .. })));
//! ```
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
mod nodes;
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
pub use nodes::{NodeSample, Topology, sample_nodes, try_to_move_pages};
pub use persistent::{GrantAsks, GrantCounters, GrantLimits, GrantPage, PersistentGrants};
pub use region::{GuestAddr, RegionSpec};
pub use row::Row;
pub use shared::{Part, Words, fence_compiler, fence_full};
pub use sigbus::{fault_count, install as install_sigbus_handler};
pub use touch::{Duty, guard_memory, in_own_memory, take_duty};
