//! A socket of AF_XDP for one queue of an interface, with memory of ours that the kernel copies
//! frames from and to (copy mode): its two ends.
//!
//! ```text
//! TxEnd    a frame is copied into a chunk; put, publish; the kernel copies it into a packet of
//!          its own when it is called; the chunk comes back by the completion ring
//! RxEnd    chunks are given to the kernel ahead; it copies a frame into one, which comes by the rx
//!          ring; the chunk goes to the kernel again when the frame was delivered
//! ```
//! 1. The fill ring is full from the start, because drivers want one even of a socket that only
//!    sends.
//! 2. Each address that comes back is checked ([`Chunks`]): a frame that does not lie in a chunk
//!    which the kernel has is not touched.
//! 3. Frames have no virtio-net header here, and no offloads: the kernel would read the wish for a
//!    checksum out of the bytes in front of a frame, and tells nothing about those that arrive.

use super::chunks::Chunks;
use super::ring::{Layout, Place, Ring};
use manyring_memory::Mapping;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::sockopt::{
    set_xdp_rx_ring_size, set_xdp_tx_ring_size, set_xdp_umem_completion_ring_size,
    set_xdp_umem_fill_ring_size, set_xdp_umem_reg, xdp_mmap_offsets,
};
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, XDP_PGOFF_RX_RING, XDP_PGOFF_TX_RING,
    XDP_UMEM_PGOFF_COMPLETION_RING, XDP_UMEM_PGOFF_FILL_RING, XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, bind, send, socket_with};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of memory that a socket shares with the kernel.
const MEMORY_SIZE: u32 = 1 << 20;
/// Entries of each ring: as many as there are chunks at most.
const RING_SIZE: u32 = 512;
/// Bytes of a chunk: the smaller ones where they hold every frame of the interface.
const CHUNK_SIZES: [u32; 2] = [2048, 4096];
/// The kernel frees a queue, and an interface's place for a program, a little after the former
/// owner has closed them: how often to try again, and how long to wait in between.
const BUSY_TRIES: u32 = 50;
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// A frame without a payload: shorter ones are none.
pub(super) const FRAME_SIZE_MIN: usize = 14;

/// Which queue, and for how long frames.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// The number of the interface.
    pub(super) interface: u32,
    /// The number of the queue.
    pub(super) queue: u32,
    /// Bytes of a frame at most.
    pub(super) frame_size: u32,
}

/// Bytes of the longest frame that a chunk holds.
pub(super) fn frame_size_max() -> u32 {
    Chunks::room(CHUNK_SIZES[1])
}

/// A socket that was bound, as its two ends.
#[derive(Debug)]
pub(super) struct Socket {
    pub(super) fd: OwnedFd,
    pub(super) tx: TxEnd,
    pub(super) rx: RxEnd,
}

impl Socket {
    /// Binds a socket to a queue. No frame comes to it before it is in the map of the interface's
    /// program. May block, for half a second if the queue is busy.
    ///
    /// # Errors
    /// * `EINVAL`: the interface has no such queue.
    /// * `EBUSY`: another socket has it.
    /// * `ENOBUFS`: the memory that may be locked is used up (`RLIMIT_MEMLOCK`).
    /// * `EPERM`: CAP_NET_RAW is needed. The system's.
    pub(super) fn open(wanted: Wanted) -> Result<Self, Errno> {
        let fits = |size: &&u32| Chunks::room(**size) >= wanted.frame_size;
        let size = *CHUNK_SIZES.iter().find(fits).ok_or(Errno::MSGSIZE)?;
        let (family, flags) = (AddressFamily::XDP, SocketFlags::CLOEXEC);
        let fd = socket_with(family, SocketType::RAW, flags, None)?;
        let memory = Mapping::anonymous(MEMORY_SIZE.into()).map_err(|_| Errno::NOMEM)?;
        let base = memory.slice(0, 1).ok_or(Errno::NOMEM)?.address();
        let registered = XdpUmemReg {
            addr: base as u64,
            len: MEMORY_SIZE.into(),
            chunk_size: size,
            headroom: 0,
            flags: XdpUmemRegFlags::empty(),
            tx_metadata_len: 0,
        };
        set_xdp_umem_reg(&fd, registered)?;
        set_xdp_umem_fill_ring_size(&fd, RING_SIZE)?;
        set_xdp_umem_completion_ring_size(&fd, RING_SIZE)?;
        set_xdp_rx_ring_size(&fd, RING_SIZE)?;
        set_xdp_tx_ring_size(&fd, RING_SIZE)?;
        let parts = xdp_mmap_offsets(&fd)?;
        let ring = |offset, parts, entry| {
            Ring::map(fd.as_fd(), &Layout { offset, parts, entry, size: RING_SIZE })
        };
        let fill = ring(XDP_UMEM_PGOFF_FILL_RING, parts.fr, 8)?;
        let completion = ring(XDP_UMEM_PGOFF_COMPLETION_RING, parts.cr, 8)?;
        let rx = ring(XDP_PGOFF_RX_RING, parts.rx, 16)?;
        let tx = ring(XDP_PGOFF_TX_RING, parts.tx, 16)?;
        let (memory, half) = (Arc::new(memory), MEMORY_SIZE / size / 2);
        let copy = || fcntl_dupfd_cloexec(&fd, 3);
        let mut rx = RxEnd {
            ring: rx,
            fill,
            chunks: Chunks::new(0, size, half),
            memory: memory.clone(),
            wrong: 0,
        };
        rx.fill();
        let chunks = Chunks::new(half, size, half);
        let free = chunks.all().collect();
        let room = Chunks::room(size) as usize;
        let tx = TxEnd { fd: copy()?, ring: tx, completion, chunks, free, memory, room, wrong: 0 };
        bind_to(&fd, wanted)?;
        Ok(Self { fd, tx, rx })
    }
}

fn bind_to(fd: &OwnedFd, wanted: Wanted) -> Result<(), Errno> {
    let flags = SocketAddrXdpFlags::XDP_COPY;
    let address = SocketAddrXdp::new(flags, wanted.interface, wanted.queue);
    while_busy(|| bind(fd, &address))
}

/// Tries `call` until it fails with something else than `EBUSY`, for half a second.
///
/// # Errors
/// Those of `call`.
pub(super) fn while_busy<T>(call: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    for _ in 0..BUSY_TRIES {
        match call() {
            Err(Errno::BUSY) => std::thread::sleep(BUSY_PAUSE),
            result => return result,
        }
    }
    Err(Errno::BUSY)
}

/// Why frames are not on their way yet that were given to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kick {
    /// The kernel has all of them.
    Done,
    /// The kernel has no memory or room for some of them now.
    Full,
    /// The interface is down or gone.
    Down,
}

/// The sending end.
#[derive(Debug)]
pub(super) struct TxEnd {
    fd: OwnedFd,
    ring: Ring,
    completion: Ring,
    chunks: Chunks,
    /// The chunks that the kernel has not.
    free: Vec<u64>,
    memory: Arc<Mapping>,
    /// Bytes of a frame at most.
    pub(super) room: usize,
    /// Addresses that came back and were none of those which the kernel had.
    wrong: u64,
}

impl TxEnd {
    /// Takes back the chunks of frames that the kernel is done with.
    pub(super) fn reap(&mut self) {
        while let Some(addr) = self.completion.take_chunk() {
            match self.chunks.take(addr) {
                Some(chunk) => self.free.push(chunk),
                None => self.wrong += 1,
            }
        }
    }

    /// Puts a frame of `len` bytes into a chunk by `copy`, which returns how many it has written.
    /// False: there is no chunk, or the ring is full.
    pub(super) fn put(
        &mut self,
        len: usize,
        copy: impl FnOnce(manyring_memory::GuestSlice<'_>) -> usize,
    ) -> bool {
        let Some(&chunk) = self.free.last() else { return false };
        let at = usize::try_from(chunk).unwrap_or(usize::MAX);
        let Some(target) = self.memory.slice(at, len.min(self.room)) else { return false };
        let copied = u32::try_from(copy(target)).unwrap_or(0);
        if copied == 0 || !self.ring.put(Place { addr: chunk, len: copied }) {
            return false;
        }
        self.free.pop();
        self.chunks.give(chunk)
    }

    /// Shows the kernel what was put, and has it sent. The kernel sends 32 frames in a call.
    pub(super) fn kick(&mut self) -> Kick {
        self.ring.publish();
        let mut left = self.ring.left();
        while left > 0 {
            let result = send(&self.fd, &[], SendFlags::DONTWAIT);
            let before = std::mem::replace(&mut left, self.ring.left());
            match result {
                Ok(_) if left == before => return Kick::Full,
                Ok(_) | Err(Errno::INTR) => {}
                // More were there than it sends in a call, or than the completion ring has room
                // for.
                Err(Errno::AGAIN) if left < before => self.reap(),
                Err(Errno::AGAIN | Errno::BUSY | Errno::NOBUFS | Errno::NOMEM) => {
                    return Kick::Full;
                }
                Err(_) => return Kick::Down,
            }
        }
        Kick::Done
    }
}

/// The receiving end.
#[derive(Debug)]
pub(super) struct RxEnd {
    ring: Ring,
    fill: Ring,
    chunks: Chunks,
    pub(super) memory: Arc<Mapping>,
    /// As in [`TxEnd`]; and frames that do not lie in their chunk.
    wrong: u64,
}

impl RxEnd {
    /// Gives the kernel all chunks.
    fn fill(&mut self) {
        for chunk in self.chunks.all() {
            self.give_back(chunk);
        }
        self.publish();
    }

    /// The next frame that has arrived, and the chunk that it lies in.
    pub(super) fn take(&mut self) -> Option<(u64, Place)> {
        loop {
            match self.chunks.take_frame(self.ring.take()?) {
                Some((chunk, Some(frame))) => return Some((chunk, frame)),
                Some((chunk, None)) => {
                    self.wrong += 1;
                    self.give_back(chunk);
                }
                None => self.wrong += 1,
            }
        }
    }

    /// The kernel may fill a chunk again. [`Self::publish`] tells it.
    pub(super) fn give_back(&mut self, chunk: u64) {
        let is_given = self.chunks.give(chunk) && self.fill.put_chunk(chunk);
        debug_assert!(is_given, "the fill ring has room for every chunk, once");
    }

    /// Tells the kernel of the chunks that it may fill.
    pub(super) fn publish(&mut self) {
        self.fill.publish();
    }

    /// Drops what has arrived.
    pub(super) fn drain(&mut self) {
        while let Some((chunk, _)) = self.take() {
            self.give_back(chunk);
        }
        self.publish();
    }
}
