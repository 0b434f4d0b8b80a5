//! Xen: the messages of xenstore, and the block interface that is negotiated through it.
//!
//! A Xen guest and its back-end talk in two ways. xenstore is the slow one: a tree of strings, in
//! which each side writes what it offers and its state. A shared ring is the fast one: requests and
//! responses in pages that the guest grants.
//!
//! ```text
//! path    the name of a node                      store   messages to and from the server
//! keys    THE TABLE of a block device's nodes     device  what they say together, step by step
//! state   how far an end has come                 blkif   requests and responses in a ring
//! hypercall   the calls that replace the hypervisor's where Xen is simulated
//! ```
//! Pinned specifications: Xen 4.23 in development: `docs/misc/xenstore.txt`, the public headers
//! `io/xs_wire.h`, `io/xenbus.h`, `io/blkif.h` and `io/ring.h`.

pub mod blkif;
pub mod device;
pub mod hypercall;
pub mod keys;
pub mod path;
pub mod state;
pub mod store;
