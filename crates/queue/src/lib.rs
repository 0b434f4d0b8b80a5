//! Rings. Both halves of each: the device half we serve, the driver half of tests and bench.
//!
//! transport -> **queue** -> device -> backend. A virtqueue is a ring in guest memory: the driver
//! makes chains of buffers available, the device returns each chain as used. A queue answers and
//! never calls: a worker pops a batch of [`Chain`]s, has them served, pushes each chain back
//! exactly once, publishes, and asks whether the driver wants a used buffer notification.
//!
//! ```text
//! loop:
//!   n = pop_batch(batch, max)           reads the available index once, and walks each chain
//!   for each chain of the batch:        its slices of guest memory lie in the batch
//!     have it served
//!     push_used(chain, written)         writes a used entry that the driver does not see yet
//!   publish()                           stores the used index: the driver sees all of them
//!   if needs_notification(): call       reads whether the driver wants one, after a fence
//!   if n == 0 and not enable_notifications(): sleep until the kick
//! ```
//! Why it is so, and why it is right:
//! 1. **The driver writes while we read.** Each descriptor is copied out once, as two 64-bit words,
//!    and every decision is made on the copy. The addresses of a chain become slices that were
//!    checked against the memory table ([`manyring_memory`]); nobody above this crate sees a guest
//!    address.
//! 2. **A fault is latched.** An index that jumps, a chain that loops, a head that is available
//!    again while its chain is in flight, or a buffer outside of memory is the driver's fault
//!    ([`QueueError`]). The chains before it are delivered, no more come, and [`Ring::fault`] tells
//!    why. The engine reports the fault once; the ring itself logs nothing.
//! 3. **A chain is a token.** [`Chain`] cannot be copied. It ends by `push_used`, `unpop` or
//!    `discard`; a debug build panics if one is dropped. Its slot is a number below the ring's
//!    size that no other chain in flight has, so a handler can keep the chain's state under that
//!    number, and needs no list of free places.
//! 4. **One store makes a whole burst visible**, and the driver's wish for a notification is read
//!    once after it. The store is a release: a driver that sees the index also sees the entries and
//!    the data that they stand for.
//! 5. **No notification is lost.** Each side writes its word, passes a full fence, and then reads
//!    the other's word, so that one of them sees the other. Both fences lie inside:
//!    `needs_notification` reads the driver's event behind its fence, and `enable_notifications`
//!    looks at the ring once more behind its own; true means "there is work, do not sleep".
//!    `tests/interleave.rs` and `tests/interleave_blkif.rs` run both under loom.
//! 6. **Chains are pushed in any order.** Where the driver has negotiated that it gets them back in
//!    the order in which it made them available, the ring restores that (`order.rs`).
//! 7. **The base is a type.** [`Base`] is the value of `SET_VRING_BASE` and `GET_VRING_BASE`; only
//!    the ring's format knows what its 32 bits mean.
//!
//! The device half of every format implements two traits, [`Ring`] and [`Chains`]. Code that is
//! generic over them pays no dispatch. [`DeviceQueue`] and [`DriverQueue`] are enums over the
//! ring format, with one match for each call. The engine opens the first of them once for a queue
//! that it runs. Nothing above it can tell the formats apart.
//!
//! The ring of a Xen block device ([`blkif`]) is a type of its own with the same verbs. It
//! implements [`Ring`], so the engine runs it like any other. It has no chains: its requests name
//! pages that have to be mapped first, and a response has no length.
//!
//! Begin with `split/device.rs`, the ring that most guests use.
//!
//! ```
//! use manyring_memory::{GuestMemory, Mapping, RegionSpec};
//! use manyring_queue::{
//!     Batch, DeviceQueue, DriverQueue, QueueConfig, RingAddresses, RingFeatures,
//! };
//! use std::sync::Arc;
//!
//! // A guest of 64 KiB, and a ring of 8 entries in its memory.
//! let spec = RegionSpec { guest_addr: 0, size: 0x10000, user_addr: 0, mmap_offset: 0 };
//! let mapping = Arc::new(Mapping::anonymous(spec.size).unwrap());
//! let memory = Arc::new(GuestMemory::default().with_mapping(spec, mapping).unwrap());
//! let config = || QueueConfig {
//!     size: 8,
//!     addresses: RingAddresses { descriptor: 0, available: 0x1000, used: 0x2000 },
//!     base: 0.into(),
//!     features: RingFeatures { event_idx: true, indirect: true, in_order: false, packed: false },
//! };
//! let mut driver = DriverQueue::new(config(), &memory).unwrap();
//! let mut device = DeviceQueue::new(config(), memory).unwrap();
//!
//! // The driver offers 16 bytes to read and 512 to write, and wants to notify the device.
//! let id = driver.add(&[(0x8000, 16)], &[(0x9000, 512)]).unwrap();
//! assert!(driver.publish());
//!
//! let mut batch = Batch::new();
//! assert_eq!(device.pop_batch(&mut batch, 64), 1);
//! let (chain, _readable, _writable) = batch.take(0).unwrap();
//! device.push_used(chain, 512);
//! device.publish();
//! assert_eq!(driver.take_used(), Some((id, 512)));
//! ```
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod aside;
mod base;
pub mod blkif;
mod chain;
mod config;
mod error;
mod features;
mod halves;
mod order;
pub mod packed;
mod place;
mod record;
mod ring;
pub mod split;
mod walk;

pub use base::Base;
pub use chain::{BATCH_CHAINS, Batch, Chain};
pub use config::{QueueConfig, RingAddresses};
pub use error::QueueError;
pub use features::RingFeatures;
pub use halves::{DeviceQueue, DriverQueue};
pub use record::inflight::{InflightError, inflight_size};
pub use record::packed::packed_inflight_size;
pub use ring::{Chains, Ring};

use manyring_memory::Words;

/// Guest memory for an indirect table: its address and its words.
#[derive(Clone, Debug)]
pub struct IndirectTable {
    /// Guest address of the table.
    pub addr: u64,
    /// The table's words.
    pub words: Words,
}
