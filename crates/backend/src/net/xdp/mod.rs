//! `xdp`: an interface of the host, whose frames come from its driver and go there (AF_XDP).
//!
//! ```text
//! guest                     this process                    kernel
//! transmitq -> XdpTx   copy into a chunk, tx ring    -> packet -> the interface's queue n
//! receiveq  <- XdpRx   rx ring, copy into buffers   <- program: socket of queue n <- the driver
//! ```
//! Pair n is queue n of the interface. The host's network stack sees nothing of what arrives on the
//! queue of a pair that the guest uses, and everything that arrives on the others. The interface
//! stays as it is; program and sockets end with the port, or with the process.
//!
//! `socket` has the memory and the rings, `program` what the kernel runs, `queue` the halves.

mod chunks;
mod program;
mod queue;
mod ring;
mod socket;

use super::tap::queues::Queues;
use super::tap::{TapError, check_mtu, check_name, check_queue_pairs, find, open_links};
use super::{Port, PortRx, PortTx};
use crate::sys::link::{Change, Link, LinkEvent, Links};
use manyring_memory::{copy_to_slices, in_own_memory};
use manyring_wire::net::Offloads;
use program::Program;
use queue::{Pair, XdpRx, XdpTx};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use socket::{Kick, Socket, Wanted, frame_size_max, while_busy};
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a frame around what the MTU counts: an Ethernet header with a tag.
const AROUND: u32 = 18;

/// Which interface, and what to set of it.
#[derive(Clone, Debug)]
pub struct XdpOptions {
    /// The interface: 1 to 15 bytes.
    pub name: String,
    /// Queue pairs, 1 to 256: the interface must have a queue for each.
    pub queue_pairs: usize,
    /// The MTU in bytes; `None`: unchanged.
    pub mtu: Option<u16>,
    /// Set the interface up or down; `None`: unchanged.
    pub up: Option<bool>,
}

/// What changes while the port runs. Its lock is held during calls of the host.
#[derive(Debug)]
struct State {
    /// The program of the interface; `None`: the interface was deleted.
    program: Option<Program>,
    attached: Vec<bool>,
    /// The MTU that the operator has set last; `None`: as the interface has it.
    mtu: Option<u16>,
}

/// The port.
#[derive(Debug)]
pub struct XdpPort {
    name: String,
    up: Option<bool>,
    links: Links,
    /// The number of the interface; 0 if it is gone.
    index: AtomicU32,
    address: Option<[u8; 6]>,
    queues: Queues,
    pairs: Vec<Arc<Pair>>,
    state: Mutex<State>,
    /// The host's MTU. It lies outside the lock, so that reading it waits for no call of the host.
    mtu: AtomicU16,
}

/// What is opened of an interface.
struct Opened {
    link: Link,
    program: Program,
    sockets: Vec<Socket>,
}

/// Looks for the interface `name`, without opening it.
///
/// # Errors
/// There is no such interface.
pub fn look(name: &str) -> Result<(), TapError> {
    find_link(&open_links(name)?, name).map(drop)
}

fn find_link(links: &Links, name: &str) -> Result<Link, TapError> {
    find(links, name)?.ok_or_else(|| TapError::Missing(name.to_owned()))
}

impl XdpPort {
    /// Takes the queues of an interface, none of which the guest uses yet. May block; half a second
    /// if a queue is busy.
    ///
    /// # Errors
    /// [`TapError`], in words for an operator.
    pub fn open(options: &XdpOptions) -> Result<Self, TapError> {
        let XdpOptions { name, queue_pairs, mtu, up } = options;
        check_queue_pairs(*queue_pairs)?;
        check_mtu(*mtu)?;
        check_name(name)?;
        let links = open_links(name)?;
        let change = Change { mtu: mtu.map(u32::from), up: *up, ..Change::default() };
        let Opened { link, program, sockets } = open(&links, options, &change)?;
        let (mut fds, mut pairs) = (Vec::new(), Vec::new());
        for Socket { fd, tx, rx } in sockets {
            fds.push(fd);
            pairs.push(Arc::new(Pair::new(tx, rx)));
        }
        let state =
            State { program: Some(program), attached: vec![false; *queue_pairs], mtu: *mtu };
        Ok(Self {
            name: name.clone(),
            up: *up,
            links,
            index: AtomicU32::new(link.index),
            address: link.address,
            queues: Queues::new(fds),
            pairs,
            state: Mutex::new(state),
            mtu: AtomicU16::new(mtu_of(&link)),
        })
    }

    /// The MAC address of the interface, if it has one: a network card delivers only frames to this
    /// address, to groups and to everybody, unless it is promiscuous.
    #[must_use]
    pub fn guest_mac(&self) -> Option<[u8; 6]> {
        self.address
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pair(&self, index: usize) -> Result<&Arc<Pair>, Errno> {
        self.pairs.get(index).ok_or(Errno::INVAL)
    }

    /// Has the interface's program give frames of queue `index` to its socket, or not.
    fn redirect(&self, state: &State, index: usize, attached: bool) -> Result<(), Errno> {
        let Some(program) = &state.program else { return Ok(()) };
        let number = u32::try_from(index).map_err(|_| Errno::INVAL)?;
        let socket = self.queues.of(index)?;
        program.set(number, attached.then_some(socket))
    }
}

fn mtu_of(link: &Link) -> u16 {
    u16::try_from(link.mtu).unwrap_or(u16::MAX)
}

/// Sets what is to be set of an interface, and takes its queues.
fn open(links: &Links, options: &XdpOptions, change: &Change) -> Result<Opened, TapError> {
    let name = options.name.as_str();
    let system = |action, errno| TapError::system(name, action, errno);
    let mut link = find_link(links, name)?;
    if *change != Change::default() {
        links.set(link.index, change).map_err(|errno| match (change.mtu, errno) {
            (Some(_), Errno::INVAL) => {
                TapError::MtuRefused { name: name.to_owned(), mtu: options.mtu.unwrap_or(0) }
            }
            _ => system("set its MTU and state", errno),
        })?;
        link = find_link(links, name)?;
    }
    let frame_size = link.mtu.saturating_add(AROUND);
    if frame_size > frame_size_max() {
        let max = frame_size_max() - AROUND;
        return Err(TapError::MtuLong { name: name.to_owned(), mtu: link.mtu, max });
    }
    let count = u32::try_from(options.queue_pairs).unwrap_or(u32::MAX);
    let program =
        while_busy(|| Program::attach(link.index, count)).map_err(|errno| match errno {
            Errno::BUSY => TapError::Busy(name.to_owned()),
            errno => system("attach a program for its frames (XDP)", errno),
        })?;
    if program.is_generic {
        tracing::info!(
            name,
            "its driver takes no XDP program: the kernel runs it behind the driver"
        );
    }
    let sockets = (0..count).map(|queue| {
        let wanted = Wanted { interface: link.index, queue, frame_size };
        in_own_memory(|| Socket::open(wanted)).map_err(|errno| match errno {
            Errno::INVAL => {
                TapError::FewQueues { name: name.to_owned(), queue_pairs: options.queue_pairs }
            }
            Errno::BUSY => TapError::Busy(name.to_owned()),
            Errno::NOBUFS => system("lock memory for its queues (RLIMIT_MEMLOCK)", errno),
            errno => system("take a queue of it (AF_XDP)", errno),
        })
    });
    let sockets = sockets.collect::<Result<_, _>>()?;
    Ok(Opened { link, program, sockets })
}

impl Port for XdpPort {
    fn kind(&self) -> &'static str {
        "xdp"
    }

    fn interface(&self) -> Option<&str> {
        Some(&self.name)
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
        Some(self.mtu.load(Ordering::Relaxed))
    }

    fn open_tx(&self, index: usize) -> Result<Box<dyn PortTx>, Errno> {
        let pair = self.pair(index)?.clone();
        Ok(Box::new(XdpTx::new(pair, self.queues.duplicate(index)?)))
    }

    fn open_rx(&self, index: usize) -> Result<Box<dyn PortRx>, Errno> {
        let pair = self.pair(index)?.clone();
        Ok(Box::new(XdpRx::new(pair, self.queues.of(index)?.clone())?))
    }

    fn set_offloads(&self, _offloads: Offloads) -> Result<(), Errno> {
        Ok(())
    }

    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno> {
        let pair = self.pair(index)?;
        let mut state = self.state();
        if state.attached[index] == attached {
            return Ok(());
        }
        self.redirect(&state, index, attached)?;
        state.attached[index] = attached;
        if !attached {
            in_own_memory(|| pair.rx().end.drain());
        }
        Ok(())
    }

    fn set_mtu(&self, mtu: u16) -> Result<(), Errno> {
        // The chunks are for frames of the MTU that the interface had at the start.
        let room = self.pairs.first().map_or(0, |pair| pair.tx().room);
        if u32::from(mtu) + AROUND > u32::try_from(room).unwrap_or(0) {
            return Err(Errno::MSGSIZE);
        }
        let mut state = self.state();
        if state.program.is_some() {
            let index = self.index.load(Ordering::Relaxed);
            self.links.set(index, &Change { mtu: Some(mtu.into()), ..Change::default() })?;
        }
        state.mtu = Some(mtu);
        self.mtu.store(mtu, Ordering::Relaxed);
        Ok(())
    }

    fn set_link(&self, _up: bool) {}

    fn heeds(&self, event: &LinkEvent) -> bool {
        match self.index.load(Ordering::Relaxed) {
            0 => !event.is_gone && event.name == self.name,
            index => event.is_gone && event.index == index,
        }
    }

    fn is_gone(&self) -> bool {
        let mut state = self.state();
        let index = self.index.load(Ordering::Relaxed);
        if state.program.is_some() && self.links.at(index) == Ok(None) {
            state.program = None;
            self.index.store(0, Ordering::Relaxed);
        }
        state.program.is_none()
    }

    fn join_again(&self) -> Result<(), TapError> {
        let mut state = self.state();
        let options = XdpOptions {
            name: self.name.clone(),
            queue_pairs: self.pairs.len(),
            mtu: state.mtu,
            up: self.up,
        };
        let change = Change { mtu: state.mtu.map(u32::from), up: self.up, ..Change::default() };
        let Opened { link, program, sockets } = open(&self.links, &options, &change)?;
        let (mut fds, mut ends) = (Vec::<OwnedFd>::new(), Vec::new());
        for Socket { fd, tx, rx } in sockets {
            fds.push(fd);
            ends.push((tx, rx));
        }
        let replaced = self.queues.replace(&fds);
        replaced.map_err(|errno| TapError::system(&self.name, "replace its queues", errno))?;
        for (pair, (tx, rx)) in self.pairs.iter().zip(ends) {
            pair.replace(tx, rx);
        }
        self.mtu.store(mtu_of(&link), Ordering::Relaxed);
        self.index.store(link.index, Ordering::Relaxed);
        state.attached.fill(false);
        state.program = Some(program);
        Ok(())
    }

    fn transmit(&self, frame: &[u8]) -> Result<(), Errno> {
        let mut end = self.pair(0)?.tx();
        in_own_memory(|| {
            end.reap();
            if frame.len() > end.room {
                return Err(Errno::MSGSIZE);
            }
            if !end.put(frame.len(), |chunk| copy_to_slices(&[chunk], frame)) {
                return Err(Errno::NOBUFS);
            }
            match end.kick() {
                Kick::Done => Ok(()),
                Kick::Full => Err(Errno::NOBUFS),
                Kick::Down => Err(Errno::NETDOWN),
            }
        })
    }
}
