//! An AF_XDP socket for one queue of an interface, as its two ends.
//!
//! ```text
//! TxEnd    a frame is copied into a chunk; put, publish; the kernel copies it into a packet of
//!          its own when it is called; the chunk comes back by the completion ring
//! RxEnd    chunks are given to the kernel ahead; it copies a frame into one, which comes by the rx
//!          ring; the chunk goes to the kernel again when the frame was delivered
//! ```
//! With zero-copy, the card itself reads and writes the chunks. A long frame that lies in one page
//! of the guest is not copied at all: its offset in the guest's pages is put into the tx ring
//! ([`Pages`]), and comes back by the completion ring.
//!
//! 1. The fill ring is full from the beginning, because some drivers need that even for a socket
//!    that only sends.
//! 2. Each address that comes back is checked ([`Chunks`]): a frame that does not lie in a chunk
//!    which the kernel has is ignored.
//! 3. Frames have no virtio-net header here, and no offloads: the kernel would read a request for a
//!    checksum from the bytes in front of a frame, and reports none for frames that arrive.

use super::busy::while_busy;
use super::chunks::Chunks;
use super::pages::Pages;
use super::ring::{Place, Ring};
use super::rings::{RING_SIZE, Rings};
use crate::net::Token;
use crate::sys::child::in_child;
use manyring_memory::{GuestMemory, GuestSlice, Mapping};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::{
    set_xdp_rx_ring_size, set_xdp_tx_ring_size, set_xdp_umem_completion_ring_size,
    set_xdp_umem_fill_ring_size, set_xdp_umem_reg,
};
use rustix::net::xdp::{SocketAddrXdp, SocketAddrXdpFlags, XdpUmemReg, XdpUmemRegFlags};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, bind, send, socket_with};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of the memory that a socket shares with the kernel.
pub(super) const MEMORY_SIZE: u32 = 1 << 20;
/// Bytes of a chunk: 2048 if every frame of the interface fits, otherwise 4096.
const CHUNK_SIZES: [u32; 2] = [2048, 4096];
/// Bytes of an Ethernet header: a shorter frame is not sent.
pub(super) const FRAME_SIZE_MIN: usize = 14;

/// The queue to which to bind a socket, and the length of its frames.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// The number of the interface.
    pub(super) interface: u32,
    /// The number of the queue.
    pub(super) queue: u32,
    /// Bytes of the longest frame.
    pub(super) frame_size: u32,
}

/// Returns the bytes of the longest frame that fits the larger chunk.
pub(super) fn frame_size_max() -> u32 {
    Chunks::room(CHUNK_SIZES[1])
}

/// A socket, split into its two ends.
#[derive(Debug)]
pub(super) struct XdpSocket {
    pub(super) tx: TxEnd,
    pub(super) rx: RxEnd,
    wanted: Wanted,
    flags: SocketAddrXdpFlags,
}

impl XdpSocket {
    /// Makes a socket in copy mode: the kernel copies frames from and to its memory.
    ///
    /// # Errors
    /// * `ENOBUFS`: `RLIMIT_MEMLOCK` allows no more locked memory.
    /// * `EPERM`: CAP_NET_RAW is needed. `EMSGSIZE`: the frames are too long for a chunk.
    pub(super) fn copying(wanted: Wanted) -> Result<Self, Errno> {
        let size = chunk_size(wanted.frame_size)?;
        let own = Mapping::anonymous(MEMORY_SIZE.into()).map_err(|_| Errno::NOMEM)?;
        let own = Arc::new(own);
        let fd = register(&own, size, |fd, registered| set_xdp_umem_reg(fd, registered))?;
        Self::assemble(fd, own, size, wanted, None)
    }

    /// Makes a zero-copy socket: the card reads frames in its memory, and in the pages of `guest`.
    /// Pins all of these pages, which may block for seconds.
    ///
    /// # Errors
    /// Those of [`Self::copying`], for the memory of the guest. `ENOMEM`: the guest's memory cannot
    /// be mapped a second time. `EFAULT`: some of it was truncated.
    pub(super) fn lending(wanted: Wanted, guest: Option<&GuestMemory>) -> Result<Self, Errno> {
        let size = CHUNK_SIZES[1];
        let own = Mapping::anonymous_shared(MEMORY_SIZE.into()).map_err(|_| Errno::NOMEM)?;
        let own = Arc::new(own);
        let nothing = GuestMemory::default();
        let joined = Pages::join(&own, guest.unwrap_or(&nothing)).map_err(|_| Errno::NOMEM)?;
        let (pages, range) = joined;
        // Register in a child process: the kernel allocates and pins all pages in one call, and
        // meanwhile every thread of the calling process that maps memory would wait. The guest
        // chooses the number of pages.
        let fd = register(&range, size, |fd, registered| {
            in_child(fd, || set_xdp_umem_reg(fd, registered))
        })?;
        // The kernel has pinned the pages, and does not need this mapping of them.
        drop(range);
        Self::assemble(fd, own, size, wanted, Some(pages))
    }

    fn assemble(
        fd: OwnedFd,
        own: Arc<Mapping>,
        size: u32,
        wanted: Wanted,
        pages: Option<Pages>,
    ) -> Result<Self, Errno> {
        make_rings(&fd)?;
        let rings = Rings::map(&fd)?;
        Ok(Self::mapped((fd, rings), own, size, wanted, pages))
    }

    /// Makes a socket of a descriptor with its rings. Its chunks of `size` bytes lie in `own`.
    pub(super) fn mapped(
        (fd, rings): (OwnedFd, Rings),
        own: Arc<Mapping>,
        size: u32,
        wanted: Wanted,
        pages: Option<Pages>,
    ) -> Self {
        let half = MEMORY_SIZE / size / 2;
        let mut rx = RxEnd {
            ring: rings.rx,
            fill: rings.fill,
            chunks: Chunks::new(0, size, half),
            memory: own.clone(),
            wrong: 0,
        };
        rx.fill();
        let chunks = Chunks::new(half, size, half);
        let tx = TxEnd {
            ring: rings.tx,
            completion: rings.completion,
            free: chunks.all().collect(),
            chunks,
            memory: own,
            room: Chunks::room(size) as usize,
            wrong: 0,
            lent: pages.map(|pages| Lent { pages, out: VecDeque::new(), done: Vec::new() }),
            fd,
        };
        let flags = match tx.lent {
            Some(_) => SocketAddrXdpFlags::XDP_ZEROCOPY | SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP,
            None => SocketAddrXdpFlags::XDP_COPY,
        };
        Self { tx, rx, wanted, flags }
    }

    /// Binds the socket to its queue. It gets frames only once the interface's program passes them
    /// to it. May block, for half a second if the queue is busy.
    ///
    /// # Errors
    /// * `EINVAL`: the interface has no such queue.
    /// * `EBUSY`: another socket is bound to the queue, or the card still uses the last one's
    ///   memory.
    /// * `EOPNOTSUPP`: the driver has no zero-copy. `ENODEV`: there is no such interface.
    pub(super) fn bind(&self) -> Result<(), Errno> {
        while_busy(|| bind_to(&self.tx.fd, self.flags, self.wanted))
    }
}

/// Binds a socket in copy mode, as [`XdpSocket::bind`], but does not wait.
///
/// # Errors
/// Those of [`XdpSocket::bind`].
pub(super) fn bind_copying(socket: &OwnedFd, wanted: Wanted) -> Result<(), Errno> {
    bind_to(socket, SocketAddrXdpFlags::XDP_COPY, wanted)
}

/// Makes a socket without frames that occupies a queue.
///
/// # Errors
/// Those of [`XdpSocket::bind`]. `ENOBUFS`: the host does not allow to lock so much memory.
pub(super) fn bind_probe(wanted: Wanted) -> Result<OwnedFd, Errno> {
    let size = CHUNK_SIZES[1];
    let range = Mapping::anonymous(size.into()).map_err(|_| Errno::NOMEM)?;
    let socket = register_lent(&range, size)?;
    bind_copying(&socket, wanted)?;
    Ok(socket)
}

fn bind_to(socket: &OwnedFd, flags: SocketAddrXdpFlags, wanted: Wanted) -> Result<(), Errno> {
    let Wanted { interface, queue, .. } = wanted;
    bind(socket, &SocketAddrXdp::new(flags, interface, queue))
}

/// Returns the size of the chunks that hold a frame of `frame_size` bytes.
///
/// # Errors
/// `EMSGSIZE`: no chunk holds it.
pub(super) fn chunk_size(frame_size: u32) -> Result<u32, Errno> {
    let fits = |size: &&u32| Chunks::room(**size) >= frame_size;
    CHUNK_SIZES.iter().find(fits).copied().ok_or(Errno::MSGSIZE)
}

/// True if sockets have chunks of this size.
pub(super) fn is_chunk_size(size: u32) -> bool {
    CHUNK_SIZES.contains(&size)
}

/// Makes a socket with the memory `range` and with rings, which another process maps.
///
/// # Errors
/// `EPERM`: no CAP_NET_RAW. `ENOBUFS`: the host does not allow to lock so much memory.
pub(super) fn register_lent(range: &Mapping, size: u32) -> Result<OwnedFd, Errno> {
    let fd = register(range, size, |fd, registered| set_xdp_umem_reg(fd, registered))?;
    make_rings(&fd)?;
    Ok(fd)
}

fn make_rings(fd: &OwnedFd) -> Result<(), Errno> {
    set_xdp_umem_fill_ring_size(fd, RING_SIZE)?;
    set_xdp_umem_completion_ring_size(fd, RING_SIZE)?;
    set_xdp_rx_ring_size(fd, RING_SIZE)?;
    set_xdp_tx_ring_size(fd, RING_SIZE)
}

/// Makes a socket with the memory `range`, in chunks of `size` bytes. `tell` makes the call that
/// registers the memory.
fn register(
    range: &Mapping,
    size: u32,
    tell: impl FnOnce(BorrowedFd<'_>, XdpUmemReg) -> Result<(), Errno>,
) -> Result<OwnedFd, Errno> {
    let (family, flags) = (AddressFamily::XDP, SocketFlags::CLOEXEC);
    let fd = socket_with(family, SocketType::RAW, flags, None)?;
    let addresses = range.addresses();
    let registered = XdpUmemReg {
        addr: addresses.start as u64,
        len: addresses.len() as u64,
        chunk_size: size,
        headroom: 0,
        flags: XdpUmemRegFlags::empty(),
        tx_metadata_len: 0,
    };
    tell(fd.as_fd(), registered)?;
    Ok(fd)
}

/// Whether the kernel has sent the frames in the ring; if not, the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TxWakeup {
    /// The kernel has taken all frames.
    Done,
    /// The kernel has no memory or room for some frames now.
    Full,
    /// The interface is down or deleted.
    Down,
}

/// The frames that the card reads in the guest's memory.
#[derive(Debug)]
struct Lent {
    pages: Pages,
    /// Frames that the card has, the oldest first: offset, and token unless the half has ended.
    out: VecDeque<(u64, Option<Token>)>,
    /// The tokens of frames that the card has finished.
    done: Vec<Token>,
}

/// The sending end of a socket.
#[derive(Debug)]
pub(super) struct TxEnd {
    fd: OwnedFd,
    ring: Ring,
    completion: Ring,
    chunks: Chunks,
    /// The chunks that the kernel does not have.
    free: Vec<u64>,
    memory: Arc<Mapping>,
    /// Bytes of the longest frame that fits a chunk.
    pub(super) room: usize,
    /// Number of addresses that came back although the kernel did not have them.
    wrong: u64,
    /// The frames in guests' pages; `None`: the kernel copies every frame.
    lent: Option<Lent>,
}

impl TxEnd {
    /// Returns the socket's file descriptor.
    pub(super) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Takes back chunks, and frames in guests' pages, that the kernel has finished.
    pub(super) fn reap(&mut self) {
        while let Some(addr) = self.completion.take_chunk() {
            if let Some(chunk) = self.chunks.take(addr) {
                self.free.push(chunk);
                continue;
            }
            // The card finishes lent frames in the order in which they were sent.
            let lent = self
                .lent
                .as_mut()
                .filter(|lent| lent.out.front().is_some_and(|(place, _)| *place == addr));
            match lent {
                Some(lent) => {
                    let token = lent.out.pop_front().and_then(|(_, token)| token);
                    lent.done.extend(token);
                }
                None => self.wrong += 1,
            }
        }
    }

    /// Puts a frame of `len` bytes into a chunk. `copy` writes it, and returns how many bytes it
    /// wrote. Returns false if no chunk is free, or the ring is full.
    #[allow(clippy::cast_possible_truncation, reason = "at most a chunk")]
    pub(super) fn put(&mut self, len: usize, copy: impl FnOnce(GuestSlice<'_>) -> usize) -> bool {
        let Some(&chunk) = self.free.last() else { return false };
        let at = usize::try_from(chunk).unwrap_or(usize::MAX);
        let Some(target) = self.memory.slice(at, len.min(self.room)) else { return false };
        let copied = copy(target) as u32;
        if copied == 0 || !self.ring.put(Place { addr: chunk, len: copied }) {
            return false;
        }
        self.free.pop();
        self.chunks.give(chunk)
    }

    /// Lends the frame in `slice`, which lies in `memory`, to the card under a token. Returns false
    /// if the frame must be copied, since it does not lie in one registered page.
    pub(super) fn lend(
        &mut self,
        memory: &GuestMemory,
        slice: &GuestSlice<'_>,
        token: Token,
    ) -> bool {
        let Some(lent) = self.lent.as_mut().filter(|lent| lent.pages.is_of(memory)) else {
            return false;
        };
        let place = lent.pages.place_of(slice).zip(u32::try_from(slice.len()).ok());
        let Some((addr, len)) = place else { return false };
        let is_put = self.ring.put(Place { addr, len });
        if is_put {
            lent.out.push_back((addr, Some(token)));
        }
        is_put
    }

    /// True if the pages of `memory` are registered, or this socket uses no pages of guests.
    pub(super) fn has(&self, memory: &GuestMemory) -> bool {
        self.lent.as_ref().is_none_or(|lent| lent.pages.is_of(memory))
    }

    /// Removes and returns the tokens of the frames that the card has finished.
    pub(super) fn done(&mut self) -> impl Iterator<Item = Token> {
        self.lent.iter_mut().flat_map(|lent| lent.done.drain(..))
    }

    /// Returns the number of frames of the present half that the card has, or that `done` has not
    /// returned yet.
    pub(super) fn out(&self) -> usize {
        let count = |lent: &Lent| {
            let out = lent.out.iter().filter(|(_, token)| token.is_some());
            out.count() + lent.done.len()
        };
        self.lent.as_ref().map_or(0, count)
    }

    /// Returns the number of frames that the card has, of the present half and of earlier ones.
    pub(super) fn with_device(&self) -> usize {
        self.lent.as_ref().map_or(0, |lent| lent.out.len())
    }

    /// Drops the tokens of all frames, because the half that has sent them has ended.
    pub(super) fn orphan(&mut self) {
        if let Some(lent) = &mut self.lent {
            lent.out.iter_mut().for_each(|(_, token)| *token = None);
            lent.done.clear();
        }
    }

    /// Closes the socket. Returns the tokens of frames that `done` has not returned.
    pub(super) fn into_tokens(self) -> Vec<Token> {
        let tokens = |lent: Lent| {
            lent.out.into_iter().filter_map(|(_, token)| token).chain(lent.done).collect()
        };
        self.lent.map_or_else(Vec::new, tokens)
    }

    /// True if the kernel has taken the queue from the socket, since the interface is deleted. (A
    /// device process may not use the socket option that also tells.)
    pub(super) fn is_unbound(&self) -> bool {
        send(&self.fd, &[], SendFlags::DONTWAIT) == Err(Errno::NXIO)
    }

    /// True if the kernel cannot send the frames in the ring: the interface is down or deleted.
    pub(super) fn is_down(&mut self) -> bool {
        self.kick() == TxWakeup::Down
    }

    /// Shows the frames in the ring to the kernel, and has it send them.
    pub(super) fn kick(&mut self) -> TxWakeup {
        self.ring.publish();
        if self.lent.is_some() { self.wake() } else { self.have_copied() }
    }

    /// Wakes the driver, unless it reads the ring by itself.
    fn wake(&mut self) -> TxWakeup {
        if self.ring.left() == 0 || !self.ring.needs_wakeup() {
            return TxWakeup::Done;
        }
        match send(&self.fd, &[], SendFlags::DONTWAIT) {
            Ok(_) | Err(Errno::INTR | Errno::AGAIN | Errno::BUSY | Errno::NOBUFS) => TxWakeup::Done,
            Err(_) => TxWakeup::Down,
        }
    }

    /// Has the kernel copy the frames in the ring, 32 in each call.
    fn have_copied(&mut self) -> TxWakeup {
        let mut left = self.ring.left();
        while left > 0 {
            let result = send(&self.fd, &[], SendFlags::DONTWAIT);
            let before = std::mem::replace(&mut left, self.ring.left());
            match result {
                Ok(_) if left == before => return TxWakeup::Full,
                Ok(_) | Err(Errno::INTR) => {}
                // Call again: the kernel sends only some frames in a call, or the completion ring
                // was full, which `reap` empties.
                Err(Errno::AGAIN) if left < before => self.reap(),
                Err(Errno::AGAIN | Errno::BUSY | Errno::NOBUFS | Errno::NOMEM) => {
                    return TxWakeup::Full;
                }
                Err(_) => return TxWakeup::Down,
            }
        }
        TxWakeup::Done
    }
}

/// The receiving end of a socket.
#[derive(Debug)]
pub(super) struct RxEnd {
    ring: Ring,
    fill: Ring,
    chunks: Chunks,
    /// The socket's own memory, without a guest's pages. Half of it has the chunks of this end.
    pub(super) memory: Arc<Mapping>,
    /// Number of addresses that the kernel did not have, and of frames outside of their chunk.
    wrong: u64,
}

impl RxEnd {
    /// Gives all chunks to the kernel.
    fn fill(&mut self) {
        for chunk in self.chunks.all() {
            self.give_back(chunk);
        }
        self.publish();
    }

    /// Returns the next frame that has arrived, and its chunk.
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

    /// Returns a chunk to the kernel, to be filled again. The caller then calls [`Self::publish`].
    pub(super) fn give_back(&mut self, chunk: u64) {
        let is_given = self.chunks.give(chunk) && self.fill.put_chunk(chunk);
        debug_assert!(is_given, "the fill ring has room for every chunk, once");
    }

    /// Shows the returned chunks to the kernel.
    pub(super) fn publish(&mut self) {
        self.fill.publish();
    }

    /// Drops the frames that have arrived.
    pub(super) fn drain(&mut self) {
        while let Some((chunk, _)) = self.take() {
            self.give_back(chunk);
        }
        self.publish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_gives_a_socket_of_ours_its_memory() {
        let own = Arc::new(Mapping::anonymous_shared(MEMORY_SIZE.into()).unwrap());
        let guest = Arc::new(Mapping::anonymous_shared(16 << 20).unwrap());
        let (_, range) = Pages::join(&own, &GuestMemory::of_mapping(guest)).unwrap();
        let tell = |fd: BorrowedFd<'_>, registered: XdpUmemReg| {
            in_child(fd, || set_xdp_umem_reg(fd, registered))?;
            // The socket has memory already: a second registration is refused.
            assert_eq!(set_xdp_umem_reg(fd, registered), Err(Errno::BUSY));
            Ok(())
        };
        let fd = register(&range, CHUNK_SIZES[1], tell).unwrap();
        assert_eq!(set_xdp_umem_fill_ring_size(&fd, RING_SIZE), Ok(()));
        // The child reports to this process that the kernel refuses its call.
        let refused =
            register(&range, 1, |fd, registered| in_child(fd, || set_xdp_umem_reg(fd, registered)));
        assert_eq!(refused.map(drop), Err(Errno::INVAL));
    }
}
