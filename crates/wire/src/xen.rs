//! Xen: the messages of xenstore, and the block interface that is negotiated through it.
//!
//! A Xen guest and its back-end have two ways to talk. [`store`] is the slow one: a tree of strings
//! in which each side publishes what it offers and how far it has come. A [`path`] names a node
//! of that tree.
//!
//! Pinned specifications: Xen 4.21's `docs/misc/xenstore.txt` and its public headers
//! `io/xs_wire.h`, `io/xenbus.h`, `io/blkif.h` and `io/ring.h`.

pub mod blkif;
pub mod path;
pub mod store;
