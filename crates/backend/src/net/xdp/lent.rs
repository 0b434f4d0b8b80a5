//! An AF_XDP port whose interface another process (the owner) has: the owner lends the sockets and
//! their memory to this process (the borrower), but not the interface and its program.
//!
//! ```text
//! owner                                              borrower
//! LentSockets::make: memory, sockets, rings -------> XdpLentPort::new maps memory and rings
//! has the program give a socket the frames     <---- Owner::set_attached
//! of its queue
//! checks whether the interface is deleted <--------- Owner::suspect
//! finds that it is deleted ------------------------> XdpLentPort::lose
//! has opened another one: new sockets -------------> XdpLentPort::renew, for `join_again`
//! ```
//! 1. The owner registers the memory: the kernel pins its pages and keeps no address. The memory is
//!    a file whose size nobody can change, so that its pages exist for every process that maps it.
//! 2. A socket is bound before it is lent. But kernels before 6.4 do not let the rings of a bound
//!    socket be mapped, which the borrower does: there the socket is bound when its pair is first
//!    used.
//! 3. A borrower that has ended may have left copies of its sockets with other processes. The next
//!    borrower gets other sockets with other memory, so that no two processes write the same rings
//!    or frames, and it gets them when the last copy of the former ones is closed (`former.rs`).
//! 4. The kernel checks each descriptor against the memory of its socket.

use super::busy::while_long_busy;
use super::chunks::Chunks;
use super::pair::{Left, Pair};
use super::queue::{XdpRx, XdpTx};
use super::rings::Rings;
use super::socket::{
    MEMORY_SIZE, Wanted, XdpSocket, bind_copying, chunk_size, is_chunk_size, register_lent,
};
use super::{AROUND, XdpPort};
use crate::net::tap::TapError;
use crate::net::tap::lent::{Facts, Lent, Owner, Renewed};
use crate::net::{HostFilter, Port, PortRx, PortTx};
use manyring_memory::{Mapping, in_own_memory};
use manyring_wire::net::Offloads;
use rustix::fd::OwnedFd;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The first kernel that lets the rings of a bound socket be mapped.
const MAPS_BOUND: (u32, u32) = (6, 4);

/// The owner's part of lent sockets.
#[derive(Debug)]
pub(super) struct LentSockets {
    /// Each socket, with true if it is bound to its queue.
    sockets: Vec<(OwnedFd, bool)>,
    memory: OwnedFd,
    /// Bytes of a chunk.
    pub(super) chunk: u32,
    frame_size: u32,
}

impl LentSockets {
    /// Makes `count` sockets for frames of `frame_size` bytes. Returns them, and a file with their
    /// memory, one behind the other. May block.
    ///
    /// # Errors
    /// `EMSGSIZE`: no chunk holds such a frame. `ENOBUFS`: the host does not allow to lock so much
    /// memory.
    /// `ECANCELED`: nobody waits for the sockets.
    pub(super) fn make(
        count: usize,
        frame_size: u32,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<(Self, OwnedFd), Errno> {
        let chunk = chunk_size(frame_size)?;
        let memory = memory(count)?;
        let sockets = (0..count).map(|index| {
            // To pin the pages takes long, and as much of the host's memory as for a served guest.
            if !is_wanted() {
                return Err(Errno::CANCELED);
            }
            let part = Mapping::of_file(&memory, place(index), MEMORY_SIZE.into());
            // The kernel has pinned the pages when this returns, so the mapping is not needed any
            // more.
            let socket = register_lent(&part.map_err(|_| Errno::NOMEM)?, chunk)?;
            Ok((socket, false))
        });
        let sockets = sockets.collect::<Result<_, Errno>>()?;
        let copy = rustix::io::fcntl_dupfd_cloexec(&memory, 3)?;
        Ok((Self { sockets, memory: copy, chunk, frame_size }, memory))
    }

    /// Returns copies of all sockets.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: no descriptor is free.
    pub(super) fn copies(&self) -> Result<Vec<OwnedFd>, Errno> {
        let copy = |(fd, _): &(OwnedFd, bool)| rustix::io::fcntl_dupfd_cloexec(fd, 3);
        self.sockets.iter().map(copy).collect()
    }

    /// Binds all sockets before they are lent, if the borrower can map their rings then: a process
    /// that has an unbound socket can bind it to any queue of the host. May block, for five seconds
    /// if a queue is busy: the kernel may still be closing the sockets of a dead process.
    ///
    /// # Errors
    /// `EBUSY`: another socket is bound to a queue. `ECANCELED`: nobody waits for the sockets.
    pub(super) fn bind_early(
        &mut self,
        interface: u32,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<(), Errno> {
        if release() < MAPS_BOUND {
            return Ok(());
        }
        let count = self.sockets.len();
        let bind = |index| {
            while_long_busy(|| match is_wanted() {
                true => self.bound(index, interface).map(drop),
                false => Err(Errno::CANCELED),
            })
        };
        (0..count).try_for_each(bind)
    }

    /// Closes the sockets. Before that, binds those that were never bound to their queues: then
    /// copies that other processes have keep the queues busy, and so are noticed. Frees the memory
    /// that is not pinned.
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

    /// Returns the socket of pair `index`, bound to that queue of the interface.
    ///
    /// # Errors
    /// `EINVAL`: there is no such pair. `EBUSY`: a former socket is still bound to the queue.
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

impl XdpPort {
    /// Held while sockets are lent, or those of the last process are closed.
    pub(super) fn lending(&self) -> MutexGuard<'_, ()> {
        self.lending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes new sockets for another process, once no other process has copies of those that were
    /// lent before. While the interface is gone there are no sockets: whoever has one that is not
    /// bound could bind it to any queue of the host. May block, for five seconds if a queue is
    /// busy.
    pub(super) fn lent(&self, is_wanted: &dyn Fn() -> bool) -> Result<Lent, Errno> {
        let _turn = self.lending();
        if !is_wanted() {
            return Err(Errno::CANCELED);
        }
        if !self.are_former_closed()? {
            return Err(Errno::BUSY);
        }
        // Without the look at the interface itself, the sockets might be bound to another one that
        // has its number by now.
        let _ = self.is_gone();
        let interface = self.shared.index.load(Ordering::Relaxed);
        let mtu = self.shared.mtu.load(Ordering::Relaxed);
        let frame_size = u32::from(mtu) + AROUND;
        let facts = Facts {
            interface: self.options.name.clone(),
            is_macvtap: false,
            offloads: Offloads::default(),
            mtu: Some(mtu),
            can_hash: false,
            host_filter: self.host_filter(),
            chunk: Some(chunk_size(frame_size)?),
        };
        if interface == 0 {
            return Ok(Lent { facts, queues: Vec::new(), table: None });
        }
        self.shared.state().former.free();
        let (mut sockets, memory) =
            LentSockets::make(self.options.queue_pairs, frame_size, is_wanted)?;
        sockets.bind_early(interface, is_wanted)?;
        let queues = sockets.copies()?.into_iter().chain([memory]).collect();
        if !is_wanted() {
            return Err(Errno::CANCELED);
        }
        let _ = self.is_gone();
        let mut state = self.shared.state();
        // Without this check the sockets of an interface that was deleted, or joined, meanwhile
        // would take the place of those for the present one.
        if self.shared.index.load(Ordering::Relaxed) != interface {
            return Err(Errno::NODEV);
        }
        state.former.lend();
        state.lent = Some(sockets);
        drop(state);
        Ok(Lent { facts, queues, table: None })
    }
}

/// Returns the major and minor version of the kernel.
fn release() -> (u32, u32) {
    let name = rustix::system::uname();
    let text = name.release().to_string_lossy();
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().ok());
    let mut next = || numbers.next().flatten().unwrap_or(0);
    (next(), next())
}

/// Makes a file for the memory of `count` sockets.
fn memory(count: usize) -> Result<OwnedFd, Errno> {
    let file = rustix::fs::memfd_create("xdp", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, place(count))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

/// Returns the offset of the memory of socket `index` in that file.
fn place(index: usize) -> u64 {
    index as u64 * u64::from(MEMORY_SIZE)
}

#[derive(Debug)]
struct State {
    host_filter: HostFilter,
    /// True if the owner has found that the interface is deleted, or its sockets are not mapped.
    is_gone: bool,
    /// The sockets on the interface that the owner has opened since.
    renewed: Renewed<Unmapped>,
    /// The sockets of pairs that were not used yet.
    unused: Vec<Option<XdpSocket>>,
}

/// Sockets that are not mapped yet: their descriptors, that of their memory, and the bytes of a
/// chunk.
type Unmapped = (Vec<OwnedFd>, u32);

/// The port of a process that uses the lent sockets of an interface.
#[derive(Debug)]
pub struct XdpLentPort {
    interface: String,
    pairs: Vec<Arc<Pair>>,
    owner: Arc<dyn Owner>,
    state: Mutex<State>,
    /// The host's MTU; 0: unknown.
    mtu: AtomicU16,
}

impl XdpLentPort {
    /// Makes a port on lent sockets.
    ///
    /// # Errors
    /// `EINVAL`: there is no socket, or the descriptors are of another kind. Any other: the memory
    /// or the rings cannot be mapped. The descriptors come back, so that the next try needs no
    /// copies of them.
    pub fn new(lent: Lent, owner: Arc<dyn Owner>) -> Result<Self, (Errno, Vec<OwnedFd>)> {
        let Lent { facts, queues, table: _ } = lent;
        let (count, chunk) = (queues.len().saturating_sub(1), facts.chunk.unwrap_or(0));
        let port = match Self::with(facts, count, owner) {
            Ok(port) => port,
            Err(errno) => return Err((errno, queues)),
        };
        port.state().unused = mapped(queues, chunk)?;
        Ok(port)
    }

    /// Makes a port without sockets.
    fn with(facts: Facts, count: usize, owner: Arc<dyn Owner>) -> Result<Self, Errno> {
        let Facts { interface, mtu, host_filter, .. } = facts;
        let pairs = (0..count).map(|_| Pair::without_socket().map(Arc::new));
        let (pairs, renewed) = (pairs.collect::<Result<_, _>>()?, Renewed::default());
        let unused = (0..count).map(|_| None).collect();
        let state = Mutex::new(State { host_filter, is_gone: false, renewed, unused });
        Ok(Self { interface, pairs, owner, state, mtu: AtomicU16::new(mtu.unwrap_or(0)) })
    }

    /// As [`Self::new`], for sockets of `queue_pairs` pairs that cannot be mapped now: the port
    /// begins as if its interface were gone, and [`Port::join_again`] maps them. Without sockets
    /// the interface of the owner is gone, and they come later, by [`Self::renew`].
    ///
    /// # Errors
    /// `EINVAL`: as for [`Self::new`]. Any other: the host has no descriptor for the pairs.
    pub fn waiting(lent: Lent, queue_pairs: usize, owner: Arc<dyn Owner>) -> Result<Self, Errno> {
        let Lent { facts, queues, table: _ } = lent;
        let (chunk, host_filter) = (facts.chunk, facts.host_filter);
        if queue_pairs == 0 {
            return Err(Errno::INVAL);
        }
        let port = Self::with(facts, queue_pairs, owner)?;
        match queues.is_empty() {
            true => port.lose(),
            false => port.renew(queues, chunk, host_filter)?,
        }
        Ok(port)
    }

    /// True if its sockets wait for [`Port::join_again`], or its interface is gone.
    pub fn waits(&self) -> bool {
        self.state().is_gone
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pair(&self, index: usize) -> Result<&Arc<Pair>, Errno> {
        self.pairs.get(index).ok_or(Errno::INVAL)
    }

    /// Call when the interface was deleted. The device must check the port afterwards.
    pub fn lose(&self) {
        let mut state = self.state();
        state.is_gone = true;
        state.renewed.lose();
    }

    /// Call when the owner has opened an interface in place of the deleted one. `queues` are its
    /// sockets and their memory, in chunks of `chunk` bytes; `host_filter` is the host's filter on
    /// it. The device must check the port afterwards.
    ///
    /// # Errors
    /// `EINVAL`: the number of sockets differs from that of the pairs, or `chunk` is `None`.
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
        state.is_gone = true;
        state.renewed.put((queues, chunk));
        state.host_filter = host_filter;
        Ok(())
    }
}

/// Maps the rings of lent sockets, in chunks of `chunk` bytes. `queues` has the sockets, and behind
/// them the file with their memory. If that fails, the descriptors come back.
fn mapped(
    queues: Vec<OwnedFd>,
    chunk: u32,
) -> Result<Vec<Option<XdpSocket>>, (Errno, Vec<OwnedFd>)> {
    let parts = match in_own_memory(|| parts(&queues, chunk)) {
        Ok(parts) => parts,
        Err(errno) => return Err((errno, queues)),
    };
    let frame_size = Chunks::room(chunk);
    let socket = |(queue, (fd, (part, rings))): (u32, (OwnedFd, _))| {
        // No interface is needed here: the owner binds the socket.
        let wanted = Wanted { interface: 0, queue, frame_size };
        Some(in_own_memory(|| XdpSocket::mapped((fd, rings), part, chunk, wanted, None)))
    };
    Ok((0..).zip(queues.into_iter().zip(parts)).map(socket).collect())
}

/// Maps the memory and the rings of each socket.
fn parts(queues: &[OwnedFd], chunk: u32) -> Result<Vec<(Arc<Mapping>, Rings)>, Errno> {
    let (memory, sockets) = queues.split_last().ok_or(Errno::INVAL)?;
    if sockets.is_empty() || !is_chunk_size(chunk) {
        return Err(Errno::INVAL);
    }
    let map = |(index, fd): (usize, &OwnedFd)| {
        let part = Mapping::of_file(memory, place(index), MEMORY_SIZE.into());
        Ok((Arc::new(part.map_err(|_| Errno::NOMEM)?), Rings::map(fd)?))
    };
    sockets.iter().enumerate().map(map).collect()
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
        let mut state = self.state();
        if let Some(socket) = state.unused[index].as_ref().filter(|_| attached) {
            // A socket that cannot be watched stays for the next attempt.
            pair.watch(socket)?;
        }
        let unused = state.unused[index].take_if(|_| attached);
        drop(state);
        if let Some(socket) = unused {
            pair.begin(socket, Left::default());
        }
        if !attached && let Some(end) = &mut pair.rx().end {
            in_own_memory(|| end.drain());
        }
        Ok(())
    }

    fn host_filter(&self) -> HostFilter {
        self.state().host_filter
    }

    /// Stores the MTU, which the owner has already set on the interface.
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
        // The lock is free during the calls of the host: the control thread notes losses.
        let name = &self.interface;
        let (renewed, _outdated) = self.state().renewed.take();
        let (number, (queues, chunk)) = renewed.ok_or_else(|| TapError::Missing(name.clone()))?;
        let unused = match mapped(queues, chunk) {
            Ok(unused) => unused,
            Err((errno, queues)) => {
                // The owner sends them once: they are needed for the next try.
                self.state().renewed.put_back(number, (queues, chunk));
                return Err(TapError::system(name, "take its queues", errno));
            }
        };
        // The device has returned all frames of the old interface, since that was deleted.
        self.pairs.iter().for_each(|pair| pair.let_go(pair.close(), false));
        let mut state = self.state();
        if !state.renewed.is_last(number) {
            return Err(TapError::Missing(name.clone()));
        }
        let former = std::mem::replace(&mut state.unused, unused);
        state.is_gone = false;
        drop(state);
        drop(former);
        Ok(())
    }

    fn transmit(&self, frame: &[u8]) -> Result<(), Errno> {
        self.pair(0)?.transmit(frame)
    }
}
