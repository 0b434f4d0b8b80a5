//! Where packets and blocks end. This crate handles bytes and pages, never rings or guests.
//!
//! transport -> queue -> device -> **backend**. A backend is called and never calls: the device
//! submits a burst and reaps completions. There are two interfaces, each described step by step at
//! the head of its module. Their implementations share only [`sys`]:
//!
//! ```text
//!              blk                                     net
//! per device   Disk: geometry, resize, the lock        Port: offloads, MTU, link, pairs in use
//! per queue    DiskQueue: submit, reap                 PortTx: send, reap; PortRx: recv, release
//! flows in     Burst: requests (op, offset, length)    Frames: checked headers in our own memory,
//!              with slices of guest memory             then slices of guest memory
//! flows out    Completion: token and result            Sent: how many, how each ended, why no more
//! kinds        file, uring, memory, null               tap, macvtap, xdp, switch, null
//! around one   fault                                   fault, late, pcap (decorator)
//! ```
//! A [`Disk`](blk::Disk) and a [`Port`](net::Port) are shared, and their methods may block: the
//! control thread has another thread call them. A disk's queue, or a half of a port's queue pair,
//! is owned by one worker, moves with its virtqueue, and must not wait for the host.
//!
//! ```text
//! worker: DiskQueue::submit(burst, io_uring, done)   starts all; `done`: those done at once
//!         DiskQueue::on_event(token, result, ..)     the io_uring has completed an entry
//!         DiskQueue::reap(done)                      done by other threads; a piece of long ones
//! ```
//! The rules, and their reasons:
//! 1. **A token comes back exactly once.** A request's token is the slot of its chain. The device
//!    keeps the chain under it, and needs no list of requests in flight.
//! 2. **The device has checked the request, the backend never checks again.** Offsets lie inside of
//!    the disk, headers are valid and lie in our own memory, where no guest can change them.
//! 3. **Slices keep their memory mapped.** If a request is not done when `submit` returns, the
//!    backend keeps its slices in a [`SliceList`](manyring_memory::SliceList), which refers to the
//!    snapshot of guest memory.
//! 4. **A worker serves other guests too.** `submit` and `reap` copy a bounded number of bytes
//!    (`blk/quota.rs`). A thread of the kernel or of the disk makes each call that may wait
//!    (`blk/offload.rs`); a port that is full names the event to wait for ([`net::Readiness`]).
//! 5. **An image belongs to one process.** [`blk::Image`] locks it. A description that is passed to
//!    another process carries a lock of its own, by which the end of its last request can be
//!    awaited (`blk/image/handover.rs`).
//! 6. **Unsafe code lies in [`sys`]**, and in `blk/uring.rs`, which guarantees what an io_uring
//!    requires of its callers. An io_uring takes requests of disks and no others.
//!
//! Begin with `blk/null.rs`, the smallest disk.
//!
//! A sector that is written, and read back:
//!
//! ```
//! use manyring_backend::blk::memory::MemoryDisk;
//! use manyring_backend::blk::{Burst, Completion, Disk, Op};
//! use manyring_memory::{GuestAddr, GuestMemory, LastHit, Mapping, RegionSpec};
//! use std::sync::Arc;
//!
//! // A guest of 64 KiB, and a disk of 1 MiB with one queue.
//! let spec = RegionSpec { guest_addr: 0, size: 0x10000, user_addr: 0, mmap_offset: 0 };
//! let mapping = Arc::new(Mapping::anonymous(spec.size).unwrap());
//! let memory = Arc::new(GuestMemory::default().with_mapping(spec, mapping).unwrap());
//! let disk = MemoryDisk::new(1 << 20).unwrap();
//! let mut queue = disk.open_queue(false).unwrap();
//!
//! let mut bytes = Vec::new();
//! memory.slices(GuestAddr(0x1000), 512, &mut LastHit::default(), &mut bytes).unwrap();
//! bytes[0].write_from(&[7; 512]);
//!
//! // Request 3 writes 512 bytes of guest memory to the disk, request 5 reads them elsewhere.
//! let mut done = Vec::new();
//! let mut serve = |token, op, address| {
//!     let mut burst = Burst::default();
//!     burst.slices().restart(&memory);
//!     burst.slices().resolve(GuestAddr(address), 512, &mut LastHit::default()).unwrap();
//!     burst.push(token, op, 4096, 512);
//!     queue.submit(&burst, None, &mut done);
//!     while queue.reap(&mut done) {}
//! };
//! serve(3, Op::Write { durable: false }, 0x1000);
//! serve(5, Op::Read, 0x2000);
//! assert_eq!(done, [3, 5].map(|token| Completion { token, result: Ok(()) }));
//! memory.slices(GuestAddr(0x2000), 512, &mut LastHit::default(), &mut bytes).unwrap();
//! assert_eq!(bytes[1].read_array::<512>(), Some([7; 512]));
//! ```
#![deny(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod blk;
pub mod net;
mod ready;
pub mod sys;
#[cfg(test)]
mod tests;
