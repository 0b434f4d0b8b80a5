//! A port of AF_XDP whose owner is another process: the sockets and their memory are lent, the
//! interface and its program are not.
//!
//! ```text
//! owner                                              borrower
//! LentSockets::make: memory, sockets, rings -------> XdpLentPort::new maps memory and rings
//! has the program give a socket the frames     <---- Owner::set_attached
//! of its queue
//! looks whether the interface is gone <------------- Owner::suspect
//! sees that the interface is gone -----------------> XdpLentPort::lose
//! has joined another one: new sockets -------------> XdpLentPort::renew, for `join_again`
//! ```
//! 1. The owner registers the memory: the kernel pins its pages and keeps no address. It is a file
//!    whose size nobody can change, so that its pages are there whoever maps it.
//! 2. A socket is bound before it is lent. Kernels before 6.4 let nobody map the rings of a socket
//!    that is bound, and the borrower maps them: there it is bound when its pair is first used.
//! 3. A borrower that goes may have copies of its sockets. The next one gets other sockets with
//!    other memory, so that nobody writes the rings or the frames of two, and it gets them when
//!    the last copy of the former ones is closed (`former.rs`).
//! 4. The kernel checks each descriptor against the memory of its socket.

use super::busy::while_long_busy;
use super::chunks::Chunks;
use super::pair::{Left, Pair};
use super::queue::{XdpRx, XdpTx};
use super::socket::{MEMORY_SIZE, Wanted, XdpSocket, bind_copying, chunk_size, register_lent};
use crate::net::tap::TapError;
use crate::net::tap::lent::{Lent, Owner};
use crate::net::{HostFilter, Port, PortRx, PortTx};
use manyring_memory::{Mapping, in_own_memory};
use manyring_wire::net::Offloads;
use rustix::fd::OwnedFd;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The kernel from which on the rings of a socket can be mapped when it is bound.
const MAPS_BOUND: (u32, u32) = (6, 4);

/// The owner's half of lent sockets.
#[derive(Debug)]
pub(super) struct LentSockets {
    /// Each socket, and whether it is bound to its queue.
    sockets: Vec<(OwnedFd, bool)>,
    memory: OwnedFd,
    /// Bytes of a chunk.
    pub(super) chunk: u32,
    frame_size: u32,
}

impl LentSockets {
    /// Makes `count` sockets for frames of `frame_size` bytes. Returns them and their memory, which
    /// lies one behind the other in a file. May block.
    ///
    /// # Errors
    /// `EMSGSIZE`: no chunk holds such a frame. `ENOBUFS`: so much memory may not be locked.
    pub(super) fn make(count: usize, frame_size: u32) -> Result<(Self, OwnedFd), Errno> {
        let chunk = chunk_size(frame_size)?;
        let memory = memory(count)?;
        let sockets = (0..count).map(|index| {
            let part = Mapping::of_file(&memory, place(index), MEMORY_SIZE.into());
            // The kernel has pinned the pages when this returns, and the mapping goes.
            let socket = register_lent(&part.map_err(|_| Errno::NOMEM)?, chunk)?;
            Ok((socket, false))
        });
        let sockets = sockets.collect::<Result<_, Errno>>()?;
        let copy = rustix::io::fcntl_dupfd_cloexec(&memory, 3)?;
        Ok((Self { sockets, memory: copy, chunk, frame_size }, memory))
    }

    /// Copies of all sockets.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: the host has no file descriptor.
    pub(super) fn copies(&self) -> Result<Vec<OwnedFd>, Errno> {
        let copy = |(fd, _): &(OwnedFd, bool)| rustix::io::fcntl_dupfd_cloexec(fd, 3);
        self.sockets.iter().map(copy).collect()
    }

    /// Binds all sockets before they are lent: whoever has one that is not bound can bind it to any
    /// queue of the host. Only if the borrower can map them then. May block, for five seconds if a
    /// queue is busy: the kernel may still close the sockets of a process that died.
    ///
    /// # Errors
    /// `EBUSY`: somebody else has a queue.
    pub(super) fn bind_early(&mut self, interface: u32) -> Result<(), Errno> {
        if interface == 0 || release() < MAPS_BOUND {
            return Ok(());
        }
        let count = self.sockets.len();
        let bind = |index| while_long_busy(|| self.bound(index, interface).map(drop));
        (0..count).try_for_each(bind)
    }

    /// Closes the sockets, after those that were never bound are bound to their queues: whoever has
    /// copies keeps the queues busy, and so is seen. Frees the memory that nobody has pinned.
    pub(super) fn close(mut self, interface: u32) {
        for index in 0..self.sockets.len() {
            let bound =
                if interface == 0 { Ok(()) } else { self.bound(index, interface).map(drop) };
            if let Err(errno) = bound {
                tracing::warn!(queue = index, %errno, "binding a former AF_XDP socket failed");
            }
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = rustix::fs::fallocate(&self.memory, flags, 0, place(self.sockets.len()));
    }

    /// The socket of pair `index`, bound to that queue of the interface.
    ///
    /// # Errors
    /// `EINVAL`: there is no such pair. `EBUSY`: a former socket has the queue still.
    pub(super) fn bound(&mut self, index: usize, interface: u32) -> Result<&OwnedFd, Errno> {
        let queue = u32::try_from(index).map_err(|_| Errno::INVAL)?;
        let frame_size = self.frame_size;
        let (socket, is_bound) = self.sockets.get_mut(index).ok_or(Errno::INVAL)?;
        if !*is_bound {
            let wanted = Wanted { interface, queue, frame_size };
            bind_copying(socket, wanted)?;
            *is_bound = true;
        }
        Ok(socket)
    }
}

/// Major and minor number of the kernel.
fn release() -> (u32, u32) {
    let name = rustix::system::uname();
    let text = name.release().to_string_lossy();
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().ok());
    let mut next = || numbers.next().flatten().unwrap_or(0);
    (next(), next())
}

/// A file for the memory of `count` sockets.
fn memory(count: usize) -> Result<OwnedFd, Errno> {
    let file = rustix::fs::memfd_create("xdp", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, place(count))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

/// Where the memory of socket `index` begins.
fn place(index: usize) -> u64 {
    index as u64 * u64::from(MEMORY_SIZE)
}

#[derive(Debug)]
struct State {
    host_filter: HostFilter,
    /// The owner has seen that the interface is gone.
    is_gone: bool,
    /// The sockets on the interface that the owner has joined since, their memory, and the bytes
    /// of a chunk.
    renewed: Option<(Vec<OwnedFd>, u32)>,
    /// The sockets of pairs that were not used yet.
    unused: Vec<Option<XdpSocket>>,
}

/// The port of a process that borrows the sockets of an interface.
#[derive(Debug)]
pub struct XdpLentPort {
    interface: String,
    pairs: Vec<Arc<Pair>>,
    owner: Arc<dyn Owner>,
    state: Mutex<State>,
    /// The host's MTU, 0 if it has none.
    mtu: AtomicU16,
}

impl XdpLentPort {
    /// A port on lent sockets.
    ///
    /// # Errors
    /// `EINVAL`: there is no socket, or the descriptors are others. Any other: the memory or the
    /// rings cannot be mapped.
    pub fn new(lent: Lent, owner: Arc<dyn Owner>) -> Result<Self, Errno> {
        let Lent { facts, queues, table: _ } = lent;
        let chunk = facts.chunk.ok_or(Errno::INVAL)?;
        let unused = mapped(queues, chunk)?;
        let pairs = unused.iter().map(|_| Pair::without_socket().map(Arc::new));
        let host_filter = facts.host_filter;
        Ok(Self {
            interface: facts.interface,
            pairs: pairs.collect::<Result<_, _>>()?,
            owner,
            state: Mutex::new(State { host_filter, is_gone: false, renewed: None, unused }),
            mtu: AtomicU16::new(facts.mtu.unwrap_or(0)),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pair(&self, index: usize) -> Result<&Arc<Pair>, Errno> {
        self.pairs.get(index).ok_or(Errno::INVAL)
    }

    /// Called when the interface is gone. The device must check the port afterwards.
    pub fn lose(&self) {
        let mut state = self.state();
        (state.is_gone, state.renewed) = (true, None);
    }

    /// Called when the owner has joined an interface in the place of the deleted one: `queues` are
    /// its sockets and their memory, in chunks of `chunk` bytes, and `host_filter` what the host
    /// keeps from it. The device must check the port then.
    ///
    /// # Errors
    /// `EINVAL`: the number of sockets differs from that of the pairs, or no chunk is named.
    pub fn renew(
        &self,
        queues: Vec<OwnedFd>,
        chunk: Option<u32>,
        host_filter: HostFilter,
    ) -> Result<(), Errno> {
        let chunk = chunk.ok_or(Errno::INVAL)?;
        if queues.len() != self.pairs.len() + 1 {
            return Err(Errno::INVAL);
        }
        let mut state = self.state();
        (state.is_gone, state.renewed) = (true, Some((queues, chunk)));
        state.host_filter = host_filter;
        Ok(())
    }
}

/// Maps lent sockets: `queues` are the sockets, and the memory of all.
fn mapped(mut queues: Vec<OwnedFd>, chunk: u32) -> Result<Vec<Option<XdpSocket>>, Errno> {
    let memory = queues.pop().ok_or(Errno::INVAL)?;
    if queues.is_empty() {
        return Err(Errno::INVAL);
    }
    let frame_size = Chunks::room(chunk);
    let map = |(index, fd): (usize, OwnedFd)| {
        let part = Mapping::of_file(&memory, place(index), MEMORY_SIZE.into());
        let part = Arc::new(part.map_err(|_| Errno::NOMEM)?);
        let queue = u32::try_from(index).map_err(|_| Errno::INVAL)?;
        // The owner knows the interface, and binds the socket to it.
        let wanted = Wanted { interface: 0, queue, frame_size };
        in_own_memory(|| XdpSocket::mapped(fd, part, chunk, wanted, None)).map(Some)
    };
    queues.into_iter().enumerate().map(map).collect()
}

impl Port for XdpLentPort {
    fn kind(&self) -> &'static str {
        "xdp"
    }

    fn interface(&self) -> Option<&str> {
        Some(&self.interface)
    }

    fn queue_pairs(&self) -> usize {
        self.pairs.len()
    }

    fn taken(&self) -> Offloads {
        Offloads::default()
    }

    fn given(&self) -> Offloads {
        Offloads::default()
    }

    fn mtu(&self) -> Option<u16> {
        Some(self.mtu.load(Ordering::Relaxed)).filter(|mtu| *mtu > 0)
    }

    fn open_tx(&self, index: usize) -> Result<Box<dyn PortTx>, Errno> {
        Ok(Box::new(XdpTx::new(self.pair(index)?.clone(), None)))
    }

    fn open_rx(&self, index: usize) -> Result<Box<dyn PortRx>, Errno> {
        Ok(Box::new(XdpRx::new(self.pair(index)?.clone())?))
    }

    fn set_offloads(&self, _offloads: Offloads) -> Result<(), Errno> {
        Ok(())
    }

    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno> {
        let pair = self.pair(index)?;
        self.owner.set_attached(index, attached)?;
        let unused = self.state().unused[index].take_if(|_| attached);
        if let Some(socket) = unused {
            pair.open(socket, Left::default())?;
        }
        if !attached && let Some(end) = &mut pair.rx().end {
            in_own_memory(|| end.drain());
        }
        Ok(())
    }

    fn host_filter(&self) -> HostFilter {
        self.state().host_filter
    }

    /// Notes the MTU, which the owner has already set on the interface.
    fn set_mtu(&self, mtu: u16) -> Result<(), Errno> {
        self.mtu.store(mtu, Ordering::Relaxed);
        Ok(())
    }

    fn set_link(&self, _up: bool) {}

    fn is_own(&self) -> bool {
        false
    }

    fn is_gone(&self) -> bool {
        let is_gone = self.state().is_gone;
        if !is_gone {
            self.owner.suspect();
        }
        is_gone
    }

    fn join_again(&self) -> Result<(), TapError> {
        let mut state = self.state();
        let name = &self.interface;
        let renewed = state.renewed.take();
        let (queues, chunk) = renewed.ok_or_else(|| TapError::Missing(name.clone()))?;
        let failed = |errno| TapError::system(name, "take its queues", errno);
        state.unused = mapped(queues, chunk).map_err(failed)?;
        // The device let go of all frames of the old interface when that was deleted.
        self.pairs.iter().for_each(|pair| pair.let_go(pair.close(), false));
        state.is_gone = false;
        Ok(())
    }

    fn transmit(&self, frame: &[u8]) -> Result<(), Errno> {
        self.pair(0)?.transmit(frame)
    }
}
