//! `xdp`: a port whose frames go to and come from the driver of a host's interface (AF_XDP).
//!
//! ```text
//! guest                     this process                    kernel
//! transmitq -> XdpTx   copy into a chunk, tx ring    -> packet -> the interface's queue n
//! receiveq  <- XdpRx   rx ring, copy into buffers   <- program: socket of queue n <- the driver
//! ```
//! Pair n is queue n of the interface. Frames that arrive on the queue of a pair in use go to the
//! guest, and the host's network stack gets none of them; it gets all frames of the other queues.
//! The port does not restore the interface's settings; program and sockets end with the port, or
//! with the process.
//!
//! A port with `zero_copy` does not copy long frames: the card reads them in the guest's memory.
//! The thread of `replacer.rs` registers that memory, and gets frames back that must return.
//!
//! A port that `lends` has no halves: another process serves its queues (`lent.rs`).
//!
//! `socket.rs` has the memory and the rings, `pair.rs` both ends of a socket while it is replaced,
//! `pages.rs` a guest's memory as the kernel sees it, `program.rs` the XDP program, `queue.rs` the
//! two halves.

mod busy;
mod chunks;
mod former;
#[cfg(fuzzing)]
pub mod fuzzing;
pub mod lent;
mod pages;
mod pair;
mod program;
mod queue;
mod replacer;
mod ring;
mod rings;
mod socket;

use super::reception::Reception;
use super::tap::lent::Lent;
use super::tap::{TapError, check_mtu, check_name, check_queue_pairs, find, open_links};
use super::{HostFilter, Port, PortRx, PortTx};
use crate::sys::link::{Change, InterfaceInfo, LinkEvent, Links};
use busy::{while_busy, while_long_busy};
use chunks::Chunks;
use former::Former;
use lent::LentSockets;
use manyring_memory::in_own_memory;
use manyring_wire::net::Offloads;
use pair::{Left, Pair};
use program::Program;
use queue::{XdpRx, XdpTx};
use replacer::SocketReplacer;
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use socket::{Wanted, XdpSocket, frame_size_max};
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a frame that the MTU does not include: an Ethernet header with a VLAN tag.
const AROUND: u32 = 18;

/// The interface to open, and the settings to apply to it.
#[derive(Clone, Debug)]
pub struct XdpOptions {
    /// The name of the interface: 1 to 15 bytes.
    pub name: String,
    /// Queue pairs, 1 to 256: the interface must have a queue for each.
    pub queue_pairs: usize,
    /// The MTU in bytes; `None`: unchanged.
    pub mtu: Option<u16>,
    /// True: set the interface up; false: down; `None`: unchanged.
    pub up: Option<bool>,
    /// True: the card reads long frames in the guest's memory, all of which is pinned. One pair
    /// only, and only with drivers that support it.
    pub zero_copy: bool,
    /// True: another process serves the queues ([`lent::XdpLentPort`]). Not with `zero_copy`.
    pub lends: bool,
}

/// The state of a port that changes while the port runs. Its lock is held during system calls.
#[derive(Debug)]
struct State {
    /// The program of the interface; `None`: the interface was deleted.
    program: Option<Program>,
    attached: Vec<bool>,
    /// The sockets of the process that serves the queues.
    lent: Option<LentSockets>,
    former: Former,
    /// The MTU that the operator has set last; `None`: it was never set.
    mtu: Option<u16>,
}

/// The state of a port that its replacer thread uses, too.
#[derive(Debug)]
struct Shared {
    name: String,
    links: Links,
    /// The number of the interface; 0: it is deleted.
    index: AtomicU32,
    pairs: Vec<Arc<Pair>>,
    state: Mutex<State>,
    /// The host's MTU. It lies outside the lock, so that reading it waits for no call of the host.
    mtu: AtomicU16,
}

/// A port on the queues of an interface.
#[derive(Debug)]
pub struct XdpPort {
    options: XdpOptions,
    address: Option<[u8; 6]>,
    reception: Reception,
    shared: Arc<Shared>,
    replacer: Option<SocketReplacer>,
    /// Locked while sockets are made for another process.
    lending: Mutex<()>,
}

/// An interface that was opened: its link, the XDP program on it, and a socket for each queue.
struct Opened {
    link: InterfaceInfo,
    program: Program,
    sockets: Vec<XdpSocket>,
}

/// Checks that the interface `name` exists, without opening it.
///
/// # Errors
/// [`TapError::Missing`]: there is no such interface.
pub fn look(name: &str) -> Result<(), TapError> {
    find_link(&open_links(name)?, name).map(drop)
}

fn find_link(links: &Links, name: &str) -> Result<InterfaceInfo, TapError> {
    find(links, name)?.ok_or_else(|| TapError::Missing(name.to_owned()))
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of the interface; `None`: the interface was deleted or moved away. Asks
    /// the kernel, as another interface may have the number by now.
    fn interface(&self, state: &State) -> Option<u32> {
        let index = self.index.load(Ordering::Relaxed);
        state.program.as_ref().filter(|program| program.is_on(&self.links, index)).map(|_| index)
    }

    /// Returns the parameters for a new socket of queue `queue`; `None`: the interface is deleted.
    fn wanted(&self, state: &State, queue: u32) -> Option<Wanted> {
        let interface = self.interface(state)?;
        let frame_size = u32::from(self.mtu.load(Ordering::Relaxed)) + AROUND;
        Some(Wanted { interface, queue, frame_size })
    }
}

impl XdpPort {
    /// Opens the first `queue_pairs` queues of an interface, none of which the guest uses yet. May
    /// block, for half a second if a queue is busy.
    ///
    /// # Errors
    /// [`TapError`], in words for an operator.
    pub fn open(options: &XdpOptions) -> Result<Self, TapError> {
        let XdpOptions { name, queue_pairs, mtu, up, zero_copy, lends } = options;
        check_queue_pairs(*queue_pairs)?;
        check_mtu(*mtu)?;
        check_name(name)?;
        let system = |action, errno| TapError::system(name, action, errno);
        let links = open_links(name)?;
        let change = Change { mtu: mtu.map(u32::from), up: *up, ..Change::default() };
        let Opened { link, program, sockets } = open(&links, options, &change)?;
        // For a port that lends, this only checked that the queues are free: `lent` makes others.
        let sockets = sockets.into_iter().filter(|_| !lends);
        let pairs = sockets.map(|socket| Pair::new(socket).map(Arc::new));
        let pairs = pairs.collect::<Result<_, _>>().map_err(|errno| system("watch it", errno))?;
        let attached = vec![false; *queue_pairs];
        let shared = Arc::new(Shared {
            name: name.clone(),
            links,
            index: AtomicU32::new(link.index),
            pairs,
            state: Mutex::new(State {
                program: Some(program),
                attached,
                lent: None,
                former: Former::none(),
                mtu: *mtu,
            }),
            mtu: AtomicU16::new(mtu_of(&link)),
        });
        let replacer = zero_copy.then(|| {
            let bytes = threshold();
            tracing::info!(name, bytes, "zero_copy: frames of at least this size are not copied");
            SocketReplacer::start(shared.clone(), bytes)
        });
        let replacer = replacer.transpose().map_err(|errno| system("start a thread", errno))?;
        let reception = Reception::default();
        reception.begin(name, &link);
        let (options, address, lending) = (options.clone(), link.address, Mutex::default());
        Ok(Self { options, address, reception, shared, replacer, lending })
    }

    /// Returns the MAC address of the interface, if it has one: unless a card is promiscuous, it
    /// delivers only frames to this address, to groups and to everybody.
    #[must_use]
    pub fn guest_mac(&self) -> Option<[u8; 6]> {
        self.address
    }

    fn pair(&self, index: usize) -> Result<&Arc<Pair>, Errno> {
        self.shared.pairs.get(index).ok_or(Errno::INVAL)
    }

    /// Has the program pass the frames of a queue to the host's network stack.
    fn detach(&self, state: &mut State, index: usize) -> Result<(), Errno> {
        let number = u32::try_from(index).map_err(|_| Errno::INVAL)?;
        if let Some(program) = state.program.as_ref().filter(|_| state.attached[index]) {
            program.set(number, None)?;
        }
        state.attached[index] = false;
        Ok(())
    }

    /// Has the program pass the frames of a queue to its socket.
    fn attach(&self, state: &mut State, index: usize) -> Result<(), Errno> {
        let number = u32::try_from(index).map_err(|_| Errno::INVAL)?;
        let interface = self.options.lends.then(|| self.shared.interface(state)).flatten();
        let State { program, lent, .. } = state;
        if let Some(program) = program {
            if self.options.lends {
                let interface = interface.ok_or(Errno::NODEV)?;
                let lent = lent.as_mut().ok_or(Errno::INVAL)?;
                program.set(number, Some(lent.bound(index, interface)?))?;
            } else if let Some(end) = &self.pair(index)?.tx().end {
                program.set(number, Some(end.fd()))?;
            }
        }
        state.attached[index] = true;
        Ok(())
    }

    /// Returns the bytes of the longest frame that the chunks hold. Their size was chosen for the
    /// MTU that the interface had when they were made.
    fn room(&self, state: &State) -> u32 {
        let pair = self.shared.pairs.first();
        let own = pair.and_then(|pair| pair.tx().end.as_ref().map(|end| end.room));
        match (own, &state.lent) {
            (Some(room), _) => u32::try_from(room).unwrap_or(0),
            (None, Some(lent)) => Chunks::room(lent.chunk),
            (None, None) if self.options.lends => frame_size_max(),
            (None, None) => 0,
        }
    }
}

/// Returns the length from which on copying a frame costs more than returning its chain to the
/// guest later. Returning late is assumed to cost as much as `LATE_STEPS` dependent
/// multiplications; this function measures both.
fn threshold() -> usize {
    const LATE_STEPS: u64 = 240;
    const ROUNDS: u64 = 64;
    const BYTES: usize = 4 << 20;
    let now = || {
        let now = clock_gettime(ClockId::Monotonic);
        now.tv_sec.cast_unsigned().wrapping_mul(1_000_000_000) + now.tv_nsec.cast_unsigned()
    };
    let source = vec![1u8; BYTES];
    let mut target = vec![0u8; BYTES];
    let (mut copy_ns, mut late_ns) = (u64::MAX, u64::MAX);
    for _ in 0..5 {
        let began = now();
        target.copy_from_slice(std::hint::black_box(&source));
        std::hint::black_box(&target);
        copy_ns = copy_ns.min(now() - began);
        let began = now();
        let mut number = 1u64;
        for _ in 0..LATE_STEPS * ROUNDS {
            number = std::hint::black_box(number.wrapping_mul(5).wrapping_add(1));
        }
        std::hint::black_box(number);
        late_ns = late_ns.min(now() - began);
    }
    let bytes = u64::try_from(BYTES).unwrap_or(0) * late_ns / ROUNDS / copy_ns.max(1);
    usize::try_from(bytes).unwrap_or(usize::MAX).clamp(256, 1024)
}

fn mtu_of(link: &InterfaceInfo) -> u16 {
    u16::try_from(link.mtu).unwrap_or(u16::MAX)
}

/// Applies the settings to an interface, attaches the program, and makes the sockets.
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
        tracing::info!(name, "the driver does not support XDP; using generic XDP");
    }
    let zero_copy = options.zero_copy;
    let sockets = (0..count).map(|queue| {
        let wanted = Wanted { interface: link.index, queue, frame_size };
        let opened = in_own_memory(|| {
            let socket = if zero_copy {
                XdpSocket::lending(wanted, None)
            } else {
                XdpSocket::copying(wanted)
            };
            socket.and_then(|socket| socket.bind().map(|()| socket))
        });
        opened.map_err(|errno| match errno {
            Errno::OPNOTSUPP | Errno::INVAL if zero_copy => TapError::NoZeroCopy(name.to_owned()),
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
        Some(&self.options.name)
    }

    fn queue_pairs(&self) -> usize {
        self.options.queue_pairs
    }

    fn taken(&self) -> Offloads {
        Offloads::default()
    }

    fn given(&self) -> Offloads {
        Offloads::default()
    }

    fn mtu(&self) -> Option<u16> {
        Some(self.shared.mtu.load(Ordering::Relaxed))
    }

    fn open_tx(&self, index: usize) -> Result<Box<dyn PortTx>, Errno> {
        let replacer = self.replacer.as_ref().map(|replacer| replacer.requests.clone());
        Ok(Box::new(XdpTx::new(self.pair(index)?.clone(), replacer)))
    }

    fn open_rx(&self, index: usize) -> Result<Box<dyn PortRx>, Errno> {
        Ok(Box::new(XdpRx::new(self.pair(index)?.clone())?))
    }

    fn set_offloads(&self, _offloads: Offloads) -> Result<(), Errno> {
        Ok(())
    }

    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno> {
        if attached {
            // The lock is released between two tries.
            return while_long_busy(|| {
                let mut state = self.shared.state();
                match state.attached.get(index) {
                    None => Err(Errno::INVAL),
                    Some(true) => Ok(()),
                    Some(false) => self.attach(&mut state, index),
                }
            });
        }
        let mut state = self.shared.state();
        match state.attached.get(index) {
            None => return Err(Errno::INVAL),
            Some(false) => return Ok(()),
            Some(true) => self.detach(&mut state, index)?,
        }
        if let Some(pair) = self.shared.pairs.get(index)
            && let Some(end) = &mut pair.rx().end
        {
            in_own_memory(|| end.drain());
        }
        Ok(())
    }

    fn host_filter(&self) -> HostFilter {
        self.reception.filter()
    }

    fn set_mtu(&self, mtu: u16) -> Result<(), Errno> {
        let mut state = self.shared.state();
        if u32::from(mtu) + AROUND > self.room(&state) {
            return Err(Errno::MSGSIZE);
        }
        if let Some(index) = self.shared.interface(&state) {
            let change = Change { mtu: Some(mtu.into()), ..Change::default() };
            self.shared.links.set(index, &change)?;
        }
        state.mtu = Some(mtu);
        self.shared.mtu.store(mtu, Ordering::Relaxed);
        Ok(())
    }

    fn set_link(&self, _up: bool) {}

    fn lend(&self, is_wanted: &dyn Fn() -> bool) -> Option<Result<Lent, Errno>> {
        self.options.lends.then(|| self.lent(is_wanted))
    }

    fn is_let_go(&self) -> Result<bool, Errno> {
        if !self.options.lends {
            return Ok(true);
        }
        let _turn = self.lending();
        self.are_former_closed()
    }

    fn heeds(&self, event: &LinkEvent) -> bool {
        match self.shared.index.load(Ordering::Relaxed) {
            0 => !event.is_gone && event.name == self.options.name,
            index => event.is_gone && event.index == index,
        }
    }

    fn is_gone(&self) -> bool {
        let mut state = self.shared.state();
        if state.program.is_some() && self.shared.interface(&state).is_none() {
            state.program = None;
            // The kernel has taken the queues from all sockets when the interface was deleted.
            state.former = Former::none();
            self.shared.index.store(0, Ordering::Relaxed);
        }
        state.program.is_none()
    }

    fn join_again(&self) -> Result<(), TapError> {
        let mut state = self.shared.state();
        let (mtu, up) = (state.mtu, self.options.up);
        let options = XdpOptions { mtu, ..self.options.clone() };
        let change = Change { mtu: mtu.map(u32::from), up, ..Change::default() };
        let Opened { link, program, sockets } = open(&self.shared.links, &options, &change)?;
        for (pair, socket) in self.shared.pairs.iter().zip(sockets) {
            // The device has returned all frames of the old interface, since that was deleted.
            let left: Left = pair.close();
            let opened = pair.open(socket, left);
            opened.map_err(|errno| TapError::system(&options.name, "watch it", errno))?;
        }
        // The process that serves the queues gets new sockets.
        (state.lent, state.former) = (None, Former::none());
        self.shared.mtu.store(mtu_of(&link), Ordering::Relaxed);
        self.shared.index.store(link.index, Ordering::Relaxed);
        self.reception.begin(&options.name, &link);
        state.attached.fill(false);
        state.program = Some(program);
        Ok(())
    }

    fn transmit(&self, frame: &[u8]) -> Result<(), Errno> {
        self.pair(0)?.transmit(frame)
    }
}
