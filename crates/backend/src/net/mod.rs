//! `Port` (per device) and its queues: [`PortTx`], [`PortRx`] (one of each per queue pair).
//!
//! The lifecycle of a port queue:
//! 1. [`Port::open_tx`] and [`Port::open_rx`] make the halves of pair `index`; each is owned by the
//!    worker that runs its virtqueue, and may move to another worker with it.
//! 2. [`Port::set_attached`] lets the host use the pair, or not: it follows the pairs in use.
//! 3. [`PortTx::send`] takes a burst of frames, in order; what it cannot take it says, and why.
//!    Most ports are done with a frame then. A port that goes on using its memory says so in
//!    [`Sent::later`], and tells by [`PortTx::reap`] when it is done with it.
//! 4. [`PortRx::incoming`] tells how frames come. Those that lie in memory are lent: the device
//!    copies them into guest buffers, then [`PortRx::release`] gives them back. All others are
//!    read: [`PortRx::recv`] puts one frame straight into guest buffers.
//! 5. A half that would block tells with `readiness` what to wait for.
//!
//! Nothing of [`Port`] itself is called by a worker. What of it may block (the host's network lock)
//! says so; the rest waits for none of these calls, as the control thread asks it. Frames are whole
//! Ethernet frames behind a [`RawHeader`] of 12 bytes.

pub mod decorator;
pub mod fault;
pub mod late;
pub mod macvtap;
mod merge;
pub mod null;
pub mod pcap;
pub mod tap;

use manyring_memory::{Gather, GuestSlice, Mapping, MemoryError, Pieces, total_len};
use manyring_wire::net::head::HEAD_SIZE_MAX;
use manyring_wire::net::{HEADER_SIZE, Offloads, RawHeader};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::ops::Range;
use std::sync::Arc;
use zerocopy::transmute;

/// Frames of one burst at most.
pub const FRAMES_MAX: usize = 64;
/// Frames of a burst after which the driver may see what became of them, while the rest of the
/// burst goes on: a driver that polls has its first answers early, and all of them no later.
pub const GROUP_FRAMES: usize = 16;
/// Bytes after which a group is over too: a long frame costs the host what forty short ones do.
pub const GROUP_BYTES: usize = 256 << 10;
const _: () = assert!(FRAMES_MAX <= u64::BITS as usize, "`Sent::lost` has a bit for each");

/// Where a device's packets come from and go to.
pub trait Port: Send + Sync + std::fmt::Debug {
    /// What it is: `tap`, `macvtap`, `null`.
    fn kind(&self) -> &'static str;

    /// The name of the host's interface, if it is one.
    fn interface(&self) -> Option<&str> {
        None
    }

    /// Queue pairs it has.
    fn queue_pairs(&self) -> usize;

    /// What it takes from a guest unfinished.
    fn taken(&self) -> Offloads;

    /// What it can deliver unfinished, if the guest takes it.
    fn given(&self) -> Offloads;

    /// The host's MTU in bytes, if there is one.
    fn mtu(&self) -> Option<u16>;

    /// The sending half of pair `index`.
    ///
    /// # Errors
    /// The system's.
    fn open_tx(&self, index: usize) -> Result<Box<dyn PortTx>, Errno>;

    /// The receiving half of pair `index`.
    ///
    /// # Errors
    /// The system's.
    fn open_rx(&self, index: usize) -> Result<Box<dyn PortRx>, Errno>;

    /// Delivers only these unfinished frames from now on. May block.
    ///
    /// # Errors
    /// The system's.
    fn set_offloads(&self, offloads: Offloads) -> Result<(), Errno>;

    /// Lets the host use pair `index`, or not. Nothing to do is no error. May block.
    ///
    /// # Errors
    /// The system's.
    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno>;

    /// Sets the host's MTU. May block.
    ///
    /// # Errors
    /// The system's; `EOPNOTSUPP` where there is none.
    fn set_mtu(&self, mtu: u16) -> Result<(), Errno>;

    /// Shows the host whether the guest's link is up, where it can be shown. May block.
    fn set_link(&self, up: bool);

    /// Sends one frame (without a header) towards the host, as if the guest had. May block.
    ///
    /// # Errors
    /// The system's.
    fn transmit(&self, frame: &[u8]) -> Result<(), Errno>;
}

/// What to wait for before another try.
#[derive(Debug)]
pub enum Readiness<'a> {
    /// This file descriptor: input for a receiving half, output for a sending one.
    Fd(BorrowedFd<'a>),
    /// Nothing: there is always something.
    Always,
    /// Nothing: there will never be anything.
    Never,
}

/// Why a sending half stopped before the end of a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The port is full: wait for its readiness.
    Blocked,
    /// The host is out of memory for now: try again a little later.
    NoMemory,
}

/// What became of the frames of a burst, from the first that was offered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Frames that were taken, in order: sent, refused or lost. The rest was not touched.
    pub taken: usize,
    /// Of these, frames whose memory the port still uses: bit n is frame n of the burst. Each comes
    /// back by [`PortTx::reap`] or [`PortTx::recall`], under its token; what becomes of it is told
    /// then, and not here. The driver must not have the memory back before that.
    pub later: u64,
    /// Of these, frames that the host refuses (a header it finds wrong).
    pub refused: usize,
    /// Of these, frames that are lost because the host's interface is down or gone.
    pub down: usize,
    /// Of these, frames in guest memory that is not there any more (`EFAULT`).
    pub faulted: usize,
    /// Which these are, refused, down and faulted: bit n is frame n of the burst.
    pub lost: u64,
    /// Of these, frames that left as parts of longer ones, and how many such there were.
    pub merged: Merged,
    /// Flows of the burst whose frames from the host go to this pair from now on, and did not.
    pub steered: usize,
    /// Frames behind those that were taken which have left before their turn, as parts of longer
    /// ones: bit n is frame n of the burst. They count as taken when it is their turn; whoever
    /// gives the rest of the burst up must not count them as dropped.
    pub ahead: u64,
    /// Why the rest was not taken; none: it may be offered at once. A port whose frames cost a
    /// system call each returns after [`GROUP_FRAMES`] of them, or [`GROUP_BYTES`].
    pub stop: Option<Stop>,
}

/// Frames of a guest that left as parts of longer ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Frames of the guest.
    pub packets: usize,
    /// The longer ones.
    pub frames: usize,
}

/// Names a frame that comes back later: no two that are with a port at the same time have the same
/// one. It is the slot of the frame's chain.
pub type Token = u16;

/// A frame that was [`Sent::later`] and is done with: the port uses its memory no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Returned {
    /// Which one.
    pub token: Token,
    /// What became of it.
    pub outcome: Outcome,
}

/// What became of a frame that was sent later than [`PortTx::send`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was passed on.
    Passed,
    /// The host refuses it (a header it finds wrong).
    Refused,
    /// It is lost because the host's interface is down or gone.
    Down,
    /// It lies in guest memory that is not there any more (`EFAULT`).
    Faulted,
    /// It was taken back by [`PortTx::recall`], and is not passed on.
    Recalled,
}

impl Sent {
    /// Adds what became of frame `index` of this burst, which was sent alone; `taken` is left to
    /// the caller. False: it was not taken, and [`Self::stop`] says why.
    pub fn add_one(&mut self, index: usize, one: &Self) -> bool {
        self.refused += one.refused;
        self.down += one.down;
        self.faulted += one.faulted;
        self.lost |= one.lost << index;
        self.later |= one.later << index;
        self.ahead |= one.ahead << index;
        self.merged.packets += one.merged.packets;
        self.merged.frames += one.merged.frames;
        self.steered += one.steered;
        self.stop = one.stop;
        self.stop.is_none()
    }
}

/// The sending half of a queue pair. Owned by one thread.
///
/// The life of a frame that is [`Sent::later`]:
/// ```text
/// send      the port keeps what it needs: `send` returns, and the burst with its headers is gone
///           (payload: Frames::payload, whose slices stay mapped until the frame is back)
/// reap      in every turn: the frames that the port is done with, in whatever order
/// recall    before the driver gets its memory back: what nobody has begun with comes back at once,
///           the rest by `reap`, after as long as a burst takes and no longer
/// ```
pub trait PortTx: Send + std::fmt::Debug {
    /// Sends `frames` from index `first` on, in order: all of them, or as many as the port sends
    /// before the driver should see them, at least one; fewer if it must stop.
    fn send(&mut self, frames: &Frames, first: usize) -> Sent;

    /// What to wait for after [`Stop::Blocked`].
    fn readiness(&self) -> Readiness<'_>;

    /// Adds to `done` the frames that the port has finished since it was asked last. Asked in every
    /// turn of a queue that has frames with the port.
    fn reap(&mut self, done: &mut Vec<Returned>) {
        let _ = done;
    }

    /// Takes back the frames that nobody has begun with, and adds them to `done`. Returns how many
    /// frames are still with somebody, and will come by [`Self::reap`].
    fn recall(&mut self, done: &mut Vec<Returned>) -> usize {
        let _ = done;
        0
    }

    /// What tells that [`Self::reap`] has something: an eventfd or a timer, which becomes readable
    /// anew each time. It is watched as long as the queue is with its worker, and never read by the
    /// worker. Otherwise nothing tells, and the port is asked again every 50 us while a frame is
    /// with it.
    fn done(&self) -> Readiness<'_> {
        Readiness::Never
    }
}

/// How the frames that have arrived at a receiving half are to be had.
#[derive(Debug)]
pub enum Incoming<'a> {
    /// One at a time, by [`PortRx::recv`], which also says if there are none.
    Read,
    /// They lie in memory, the oldest first; if the list is empty, none has arrived.
    Lent(&'a Frames),
}

/// The receiving half of a queue pair. Owned by one thread.
pub trait PortRx: Send + std::fmt::Debug {
    /// How to have the frames that have arrived. A port that lends them lends the same ones, and
    /// more behind them, until they are released. The caller will take no more than `max` before
    /// it releases what it took: a port need not gather more.
    fn incoming(&mut self, max: usize) -> Incoming<'_> {
        let _ = max;
        Incoming::Read
    }

    /// The caller is done with the first `count` frames that were lent: they were copied or
    /// dropped.
    fn release(&mut self, count: usize) {
        let _ = count;
    }

    /// Receives one frame behind its header into `buffers`; returns the bytes of both. The caller
    /// gives room for the longest frame: what does not fit is lost without a word. A port that
    /// lends can be read as well: the frame is then released.
    ///
    /// # Errors
    /// `EAGAIN` if there is none; `EFAULT` if a buffer is not there any more (the frame is lost);
    /// any other: the port is down, detached or gone, wait until it is attached again.
    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno>;

    /// What to wait for after `EAGAIN`.
    fn readiness(&self) -> Readiness<'_>;
}

/// A frame of a burst.
#[derive(Clone, Debug)]
struct Frame {
    slices: Range<usize>,
    /// Bytes without the header.
    len: usize,
    token: Token,
}

/// A burst of frames: each its own checked header, then slices of guest memory.
#[derive(Debug)]
pub struct Frames {
    list: Vec<Frame>,
    /// The headers lie in memory of ours, so that the guest cannot change them after the check. The
    /// payload stays mapped as long as it is listed.
    slices: Gather,
    /// Bytes of that memory for each frame.
    own_len: usize,
}

impl Frames {
    /// An empty burst with room for [`FRAMES_MAX`].
    ///
    /// # Errors
    /// [`MemoryError::Map`].
    pub fn new() -> Result<Self, MemoryError> {
        Self::with_own(FRAMES_MAX, HEADER_SIZE)
    }

    /// An empty burst with room for one joined frame.
    ///
    /// # Errors
    /// [`MemoryError::Map`].
    pub(crate) fn for_joined() -> Result<Self, MemoryError> {
        Self::with_own(1, HEADER_SIZE + HEAD_SIZE_MAX)
    }

    fn with_own(count: usize, own_len: usize) -> Result<Self, MemoryError> {
        let headers = Mapping::anonymous((count * own_len) as u64)?;
        let slices = Gather::new(Arc::new(headers));
        Ok(Self { list: Vec::with_capacity(count), slices, own_len })
    }

    /// Adds the one frame of a burst for joined frames: `header` and `head`, then what lies in each
    /// of `payloads` behind as many bytes as `head` has. False if there is no room.
    ///
    /// # Panics
    /// If the burst holds frames of another snapshot.
    pub(crate) fn push_joined<'a>(
        &mut self,
        header: &RawHeader,
        head: &[u8],
        payloads: impl Iterator<Item = Pieces<'a>>,
    ) -> bool {
        let size = HEADER_SIZE + head.len();
        if !self.list.is_empty() || size > self.own_len || !self.slices.push_own(0, size) {
            return false;
        }
        let (first, behind) = self.slices.as_slices()[0].split_at(HEADER_SIZE);
        first.write_from(zerocopy::IntoBytes::as_bytes(header));
        behind.write_from(head);
        payloads.for_each(|pieces| self.slices.extend(pieces, head.len()));
        let len = total_len(self.slices.as_slices()) - HEADER_SIZE as u64;
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        self.list.push(Frame { slices: 0..self.slices.len(), len, token: 0 });
        true
    }

    /// Adds a frame: `header`, then what lies in `pieces` behind the first `skip` bytes, which is
    /// `len` bytes. False if the burst is full. Its token is 0: it is for who needs none.
    ///
    /// # Panics
    /// If the burst holds frames of another snapshot.
    #[inline]
    pub fn push(
        &mut self,
        header: &RawHeader,
        pieces: Pieces<'_>,
        skip: usize,
        len: usize,
    ) -> bool {
        self.push_as(0, header, pieces, skip, len)
    }

    /// Adds a frame as [`Self::push`] does, under this token.
    ///
    /// # Panics
    /// If the burst holds frames of another snapshot.
    #[inline]
    pub fn push_as(
        &mut self,
        token: Token,
        header: &RawHeader,
        pieces: Pieces<'_>,
        skip: usize,
        len: usize,
    ) -> bool {
        let index = self.list.len();
        if index == FRAMES_MAX {
            return false;
        }
        let start = self.slices.len();
        if !self.slices.push_own(index * self.own_len, HEADER_SIZE) {
            return false;
        }
        let bytes: &[u8; HEADER_SIZE] = zerocopy::transmute_ref!(header);
        self.slices.as_slices()[start].write_array(bytes);
        self.slices.extend(pieces, skip);
        self.list.push(Frame { slices: start..self.slices.len(), len, token });
        true
    }

    /// Forgets all frames.
    #[inline]
    pub fn clear(&mut self) {
        self.list.clear();
        self.slices.clear();
    }

    /// Forgets all frames, and lets go of the snapshot that they came from.
    pub fn release(&mut self) {
        self.list.clear();
        self.slices.release();
    }

    /// Frames in the burst.
    #[must_use]
    #[inline]
    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// Header and payload of frame `index`, as an iovec.
    #[must_use]
    #[inline]
    pub fn slices(&self, index: usize) -> &[GuestSlice<'_>] {
        let slices = self.slices.as_slices();
        self.list.get(index).map_or(&[], |frame| &slices[frame.slices.clone()])
    }

    /// The payload of frame `index`, as another burst takes it.
    #[must_use]
    pub fn payload(&self, index: usize) -> Option<Pieces<'_>> {
        let Frame { slices, .. } = self.list.get(index)?;
        self.slices.pieces(slices.start + 1..slices.end)
    }

    /// The header of frame `index`; of zeroes where there is none.
    #[must_use]
    pub fn header(&self, index: usize) -> RawHeader {
        let own = self.slices.own().slice(index * self.own_len, HEADER_SIZE);
        let bytes = own.filter(|_| index < self.count()).and_then(|own| own.read_array());
        bytes.map_or_else(RawHeader::default, |bytes: [u8; HEADER_SIZE]| transmute!(bytes))
    }

    /// True once guest memory was cut away under the frames: it reads as zeroes since.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.slices.is_broken()
    }

    /// The name of frame `index`, if it comes back later.
    #[must_use]
    pub fn token(&self, index: usize) -> Token {
        self.list.get(index).map_or(0, |frame| frame.token)
    }

    /// Bytes of frame `index` without its header.
    #[must_use]
    #[inline]
    pub fn len(&self, index: usize) -> usize {
        self.list.get(index).map_or(0, |frame| frame.len)
    }
}
