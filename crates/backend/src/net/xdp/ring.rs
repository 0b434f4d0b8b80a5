//! `Ring`: one of the four rings of an AF_XDP socket, which the kernel and this process share.
//!
//! ```text
//! fill         chunks from this process to the kernel
//! rx           chunks with received frames from the kernel to this process
//! tx           frames to send from this process to the kernel
//! completion   chunks of sent frames from the kernel to this process
//! ```
//! Each ring has an index of its producer and one of its consumer, which only grow and wrap around;
//! entry n lies at n modulo the size. This process advances one of the two, keeps a private copy of
//! it, and publishes it to the ring, where the kernel reads it.

use manyring_memory::{Mapping, Words};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::xdp::XdpRingOffset;
use std::sync::Arc;

/// `XDP_RING_NEED_WAKEUP`
const NEED_WAKEUP: u32 = 1;

/// A frame in the memory that is shared with the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// Offset from the beginning of that memory, in bytes.
    pub(super) addr: u64,
    /// Length of the frame in bytes.
    pub(super) len: u32,
}

/// The location of a ring in the kernel's mapping, and the size of its entries.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingLayout {
    /// The offset for `mmap` by which the socket offers the ring.
    pub(super) offset: u64,
    /// The offsets of indexes, flags and entries in the mapping.
    pub(super) parts: XdpRingOffset,
    /// Bytes of an entry, 8 or 16.
    pub(super) entry: usize,
    /// Number of entries; a power of two.
    pub(super) size: u32,
}

/// One ring of a socket, mapped into this process.
#[derive(Debug)]
pub(super) struct Ring {
    words: Words,
    producer: usize,
    consumer: usize,
    flags: Option<usize>,
    entries: usize,
    size: u32,
    /// The index that this process advances: the producer's for tx and fill, else the consumer's.
    own: u32,
}

impl Ring {
    /// Maps the ring of `socket` with this layout. The ring must be empty.
    ///
    /// # Errors
    /// The error of `mmap`; `EOVERFLOW`: an offset does not fit this machine.
    pub(super) fn map(socket: BorrowedFd<'_>, layout: &RingLayout) -> Result<Self, Errno> {
        let at = |offset: u64| usize::try_from(offset).map_err(|_| Errno::OVERFLOW);
        let entries = at(layout.parts.desc)?;
        let len = entries + layout.size as usize * layout.entry;
        let mapping = Mapping::of_socket(socket, layout.offset, len as u64);
        let words = Words::new(Arc::new(mapping.map_err(|_| Errno::NOMEM)?), 0, len, 8);
        Ok(Self {
            words: words.ok_or(Errno::INVAL)?,
            producer: at(layout.parts.producer)?,
            consumer: at(layout.parts.consumer)?,
            flags: layout.parts.flags.map(at).transpose()?,
            entries,
            size: layout.size,
            own: 0,
        })
    }

    /// Returns the number of entries that this process has put into the ring and the kernel has not
    /// taken yet. Only for rings that this process fills: tx and fill.
    pub(super) fn left(&self) -> u32 {
        self.own.wrapping_sub(self.words.load_u32_acquire(self.consumer))
    }

    /// True if the kernel reads the ring only after a system call.
    pub(super) fn needs_wakeup(&self) -> bool {
        let flags = self.flags.map_or(NEED_WAKEUP, |flags| self.words.load_u32_acquire(flags));
        flags & NEED_WAKEUP != 0
    }

    /// Puts a frame into a tx ring; [`Self::publish`] shows it to the kernel. Returns false if the
    /// ring is full.
    pub(super) fn put(&mut self, place: Place) -> bool {
        if self.left() >= self.size {
            return false;
        }
        let at = self.entries + (self.own & (self.size - 1)) as usize * 16;
        self.words.store_u64(at, place.addr);
        // The upper half has the options of the frame, which are all zero.
        self.words.store_u64(at + 8, place.len.into());
        self.own = self.own.wrapping_add(1);
        true
    }

    /// Puts a chunk into a fill ring; [`Self::publish`] shows it to the kernel. Returns false if
    /// the ring is full.
    pub(super) fn put_chunk(&mut self, addr: u64) -> bool {
        if self.left() >= self.size {
            return false;
        }
        let at = self.entries + (self.own & (self.size - 1)) as usize * 8;
        self.words.store_u64(at, addr);
        self.own = self.own.wrapping_add(1);
        true
    }

    /// Shows all entries that were put in to the kernel.
    pub(super) fn publish(&mut self) {
        self.words.store_u32_release(self.producer, self.own);
    }

    /// Takes a frame from an rx ring.
    #[allow(clippy::cast_possible_truncation, reason = "the lower half")]
    pub(super) fn take(&mut self) -> Option<Place> {
        let at = self.entries + self.next()? * 16;
        let (addr, rest) = self.words.load_u64_pair(at);
        // The lower half has the length.
        let place = Place { addr, len: rest as u32 };
        self.took();
        Some(place)
    }

    /// Takes a chunk from a completion ring.
    pub(super) fn take_chunk(&mut self) -> Option<u64> {
        let at = self.entries + self.next()? * 8;
        let addr = self.words.load_u64_acquire(at);
        self.took();
        Some(addr)
    }

    /// Returns the index of the next entry to take; `None`: the ring is empty.
    fn next(&self) -> Option<usize> {
        let there = self.words.load_u32_acquire(self.producer).wrapping_sub(self.own);
        (1..=self.size).contains(&there).then_some((self.own & (self.size - 1)) as usize)
    }

    /// Returns the entry to the kernel.
    fn took(&mut self) {
        self.own = self.own.wrapping_add(1);
        self.words.store_u32_release(self.consumer, self.own);
    }
}
