//! `Port` (per device) and its queues: [`PortTx`], [`PortRx`] (one of each per queue pair).
//!
//! The lifecycle of a port queue:
//! 1. [`Port::open_tx`] and [`Port::open_rx`] make the halves of pair `index`; each is owned by the
//!    worker that runs its virtqueue, and may move to another worker with it.
//! 2. [`Port::set_attached`] lets the host use the pair, or not, as the guest does
//!    (`VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET`, virtio 1.3 §5.1.6.5.6).
//! 3. [`PortTx::send`] takes a burst of frames, in order, and says how many it has taken and why it
//!    stopped. Most ports are done with a frame then. A port that goes on using the memory of a
//!    frame says so in [`Sent::later`], and returns the frame by [`PortTx::reap`].
//! 4. [`PortRx::incoming`] says how frames come. Frames that lie in memory are lent: the device
//!    copies them into guest buffers, then [`PortRx::release`] gives them back. All others are
//!    read: [`PortRx::recv`] puts one frame straight into guest buffers.
//! 5. A half that would block says by `readiness` what to wait for.
//!
//! Workers call the halves, and never [`Port`] itself. A method of `Port` that may block (on the
//! host's network lock) says so. The control thread calls the other methods, which therefore must
//! not wait for one that blocks. Frames are whole Ethernet frames behind a header of 12 bytes
//! ([`RawNetHeader`](manyring_wire::net::RawNetHeader)).

pub mod decorator;
pub mod fault;
mod frames;
pub mod late;
mod merge;
pub mod null;
pub mod pcap;
mod reception;
mod returned;
mod steer;
pub mod switch;
pub mod tap;
pub mod xdp;

pub use crate::ready::{Alarm, Doorbell, Readiness};
pub use frames::Frames;
pub use returned::{Outcome, Returned, Token};

use crate::sys::link::LinkEvent;
use manyring_memory::GuestSlice;
use manyring_wire::net::rss::Rss;
use manyring_wire::net::{MacAddress, Offloads};
use rustix::io::Errno;
use std::sync::Arc;
use tap::TapError;
use tap::lent::Lent;

/// Frames of one burst at most.
pub const FRAMES_MAX: usize = 64;
/// Frames of a group. The chains of a group are published while the rest of the burst goes on, so
/// that a driver that polls gets its first buffers back early.
pub const GROUP_FRAMES: usize = 16;
/// Bytes after which a group ends too: a long frame costs the host as much as forty short ones.
pub const GROUP_BYTES: usize = 256 << 10;
const _: () = assert!(FRAMES_MAX <= u64::BITS as usize, "`Sent::lost` has a bit for each");

/// The frames that the host keeps from a port, or from the network, whatever the guest's own filter
/// asks for. By default none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostFilter {
    /// The only unicast address whose frames reach the port; `None`: frames to any do.
    pub only_to: Option<MacAddress>,
    /// The only address that the guest may send as; `None`: any.
    pub only_from: Option<MacAddress>,
    /// Of the frames to groups, only those that the host has joined by itself reach the port.
    pub lacks_groups: bool,
}

/// Who has chosen how many frames may wait in the host's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoomSource {
    /// This daemon.
    Auto,
    /// The operator.
    Operator,
    /// The host: each queue has the length of the interface.
    Host,
}

impl RoomSource {
    /// The word for it in stats and metrics.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Operator => "operator",
            Self::Host => "host",
        }
    }
}

/// How many frames may wait for the guest in the queues that the host uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomInfo {
    /// Frames, in all these queues together; 0: unknown.
    pub frames: u32,
    /// Who has chosen them.
    pub source: RoomSource,
    /// How often the length of the interface was changed.
    pub changes: u64,
}

/// Where a device's packets come from and go to.
pub trait Port: Send + Sync + std::fmt::Debug {
    /// The kind of port: `tap`, `macvtap`, `xdp`, `switch`, `null`.
    fn kind(&self) -> &'static str;

    /// The name of the host's interface, if the port is one.
    fn interface(&self) -> Option<&str> {
        None
    }

    /// How many queue pairs the port has.
    fn queue_pairs(&self) -> usize;

    /// The offloads that the port accepts from a guest's frames: partial checksums, large segments.
    fn taken(&self) -> Offloads;

    /// The offloads that the port can use in frames for a guest that accepts them.
    fn given(&self) -> Offloads;

    /// The MTU of the host's interface in bytes, if the port has an interface.
    fn mtu(&self) -> Option<u16>;

    /// How many frames may wait for the guest in the host's queues; `None`: the port has no such
    /// queues. Does not block.
    fn room(&self) -> Option<RoomInfo> {
        None
    }

    /// The sending half of pair `index`.
    ///
    /// # Errors
    /// `EINVAL`: the port has no such pair. Any other: the host lacks a resource for the half
    /// (`EMFILE`: a file descriptor; `ENOMEM`: memory).
    fn open_tx(&self, index: usize) -> Result<Box<dyn PortTx>, Errno>;

    /// The receiving half of pair `index`.
    ///
    /// # Errors
    /// As for [`Self::open_tx`].
    fn open_rx(&self, index: usize) -> Result<Box<dyn PortRx>, Errno>;

    /// Delivers frames with these offloads only from now on. May block.
    ///
    /// # Errors
    /// The error of the host, which cannot deliver such frames, or cannot stop delivering them.
    fn set_offloads(&self, offloads: Offloads) -> Result<(), Errno>;

    /// Lets the host use pair `index`, or not. Has no effect if nothing changes. May block.
    ///
    /// # Errors
    /// `EINVAL`: the port has no such pair. Any other: the host cannot attach or detach the pair.
    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno>;

    /// True if the port can deliver each frame by the pair that the guest's hash chooses.
    fn can_hash(&self) -> bool {
        false
    }

    /// Delivers each frame by the pair that `rss` chooses from now on (virtio 1.3 §5.1.6.5.6.4);
    /// `None`: the port chooses. All pairs that `rss` names are attached. May block.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the port cannot ([`Self::can_hash`]). Any other: the host refuses it.
    fn set_rss(&self, rss: Option<Arc<Rss>>) -> Result<(), Errno> {
        if rss.is_some() { Err(Errno::OPNOTSUPP) } else { Ok(()) }
    }

    /// The frames that the host keeps from the guest.
    fn host_filter(&self) -> HostFilter {
        HostFilter::default()
    }

    /// True if frames that are tagged with this VLAN can reach the guest.
    fn carries_vlan(&self, id: u16) -> bool {
        let _ = id;
        true
    }

    /// Sets the host's MTU. May block.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the port has no interface in this namespace. Any other: the host refuses it.
    fn set_mtu(&self, mtu: u16) -> Result<(), Errno>;

    /// Shows the host whether the guest's link is up, if the port can show it. May block.
    fn set_link(&self, up: bool);

    /// True if `event` may mean that the port's interface has gone, or has come back.
    fn heeds(&self, event: &LinkEvent) -> bool {
        let _ = event;
        false
    }

    /// False if the interface is in another namespace, and its deletion is not reported here.
    fn is_reported(&self) -> bool {
        true
    }

    /// False if another process owns the interface, and logs its deletion and its return.
    fn is_own(&self) -> bool {
        true
    }

    /// True if the host's interface was deleted. From then on the port only remembers what it is
    /// told (pairs in use, offloads, MTU, link) until [`Self::join_again`] succeeds. May block.
    fn is_gone(&self) -> bool {
        false
    }

    /// Joins an interface that has the name of the one that has gone, with the settings that the
    /// port was opened with. The host uses no pair of it yet, and delivers no offloads. Halves that
    /// are open lead to the new interface then. No worker may wait for their readiness during this
    /// call, which may block.
    ///
    /// # Errors
    /// [`TapError::HandedIn`]: this can never be done. Any other: the interface is not there yet,
    /// or is not as the port needs it.
    fn join_again(&self) -> Result<(), TapError> {
        Ok(())
    }

    /// Copies of the interface's queues, for a process that serves them in the place of this one,
    /// which still makes all calls that set something. `None`: the port is no interface, so any
    /// process can make its own. May block.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: the host has no file descriptor.
    fn lend(&self) -> Option<Result<Lent, Errno>> {
        None
    }

    /// Closes the copies of what [`Self::lend`] gave, and tells whether every other process has
    /// done so too. Only of what must not be lent again before. May block.
    ///
    /// # Errors
    /// The host cannot tell.
    fn is_let_go(&self) -> Result<bool, Errno> {
        Ok(true)
    }

    /// Restores the settings of the interface, because the process that was to take it over for
    /// good has ended. May block.
    fn keep(&self) {}

    /// The counters of the port; `None`: the port belongs to no switch.
    fn counted(&self) -> Option<&switch::PortCounters> {
        None
    }

    /// Sends one frame (without a header) towards the host, as if the guest had. May block.
    ///
    /// # Errors
    /// The error of the host, which did not take the frame: its interface is full, down or gone.
    fn transmit(&self, frame: &[u8]) -> Result<(), Errno>;
}

/// Why a sending half took only a part of a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The port is full: wait for its readiness.
    Blocked,
    /// The host has no memory for a frame now: try again a little later.
    NoMemory,
}

/// How many frames of a burst, from the first one offered, were taken, and how they ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Frames that were taken, in order: sent, refused or lost. The other frames were not touched.
    pub taken: usize,
    /// Of the frames taken, those whose memory the port still uses: bit n is frame n of the burst.
    /// Each comes back by [`PortTx::reap`] or [`PortTx::recall`] with its token and its outcome.
    /// The driver must not get the memory of a frame back before the frame has come back.
    pub later: u64,
    /// Of the frames taken, those that the host refused (a header it finds wrong).
    pub refused: usize,
    /// Of the frames taken, those that the port refused for the place of their partial checksum
    /// ([`PortTx::checks_place`]).
    pub misplaced: usize,
    /// Of the frames taken, those that are lost because the host's interface is down or gone.
    pub down: usize,
    /// Of the frames taken, those that are lost because their memory was cut away (`EFAULT`).
    pub faulted: usize,
    /// Which frames were refused, misplaced, down or faulted: bit n is frame n of the burst.
    pub lost: u64,
    /// Of the frames taken, those that left as parts of longer ones, and how many longer ones.
    pub merged: Merged,
    /// Flows of the burst whose frames the host sends to this pair from now on, and sent to another
    /// one before.
    pub steered: usize,
    /// Frames after those taken that have left already, as parts of longer ones: bit n is frame n
    /// of the burst. They count as taken when the frames before them are taken. If the rest of the
    /// burst is given up, they must not be counted as dropped.
    pub ahead: u64,
    /// Why the rest was not taken; `None`: the rest may be offered again at once. A port that needs
    /// a system call for each frame returns after [`GROUP_FRAMES`] frames or [`GROUP_BYTES`] bytes.
    pub stop: Option<Stop>,
}

/// Frames of a guest that left as parts of longer ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Frames of the guest.
    pub packets: usize,
    /// Longer frames that they left as.
    pub frames: usize,
}

impl Sent {
    /// Adds `one`, the result of sending frame `index` of this burst alone. The caller counts
    /// `taken`. False: the frame was not taken, and [`Self::stop`] says why.
    pub fn add_one(&mut self, index: usize, one: &Self) -> bool {
        self.refused += one.refused;
        self.misplaced += one.misplaced;
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
/// send      the port copies what it needs of the burst, since burst and headers are gone when
///           `send` returns; the slices of Frames::payload stay mapped until the frame is back
/// reap      in every turn: the frames that the port is done with, in whatever order
/// recall    before the driver gets its memory back: frames that the port has not begun to send
///           come back at once, the others by `reap`, within the time that a burst takes
/// ```
pub trait PortTx: Send + std::fmt::Debug {
    /// Sends `frames` from index `first` on, in order: all of them, or one group, after which the
    /// driver should see its chains. A port that takes not even one frame names the reason in
    /// [`Sent::stop`].
    fn send(&mut self, frames: &Frames, first: usize) -> Sent;

    /// The event to wait for after [`Stop::Blocked`].
    fn readiness(&self) -> Readiness<'_>;

    /// True if the port refuses frames whose partial checksum lies in what may be judged before it
    /// is written (`RawHeader::is_in_place`), by the bytes that it passes on. Then the queue need
    /// not look at the frame before.
    fn checks_place(&self) -> bool {
        false
    }

    /// Adds to `done` the frames that the port has finished since the last call. Called in every
    /// turn of a queue that has frames with the port.
    fn reap(&mut self, done: &mut Vec<Returned>) {
        let _ = done;
    }

    /// Takes back the frames that the port has not begun to send, and adds them to `done`. Returns
    /// how many frames are still with the port, and will come back by [`Self::reap`].
    fn recall(&mut self, done: &mut Vec<Returned>) -> usize {
        let _ = done;
        0
    }

    /// Called when the memory of the queue changes, or the queue ends: once the frames that lie in
    /// the old memory are back, the port must hold no reference to it. Does not block.
    fn forget(&mut self) {}

    /// An eventfd or timer that becomes readable anew each time that [`Self::reap`] has something.
    /// The worker watches it while it owns the queue, and never reads it. A port without one is
    /// asked again every 50 us while it has a frame.
    fn done(&self) -> Readiness<'_> {
        Readiness::Never
    }
}

/// How a receiving half hands out the frames that have arrived.
#[derive(Debug)]
pub enum Incoming<'a> {
    /// One at a time, by [`PortRx::recv`], which fails with `EAGAIN` if none has arrived.
    Read,
    /// In memory, the oldest first; an empty list means that none has arrived.
    Lent(&'a Frames),
}

/// The receiving half of a queue pair. Owned by one thread.
pub trait PortRx: Send + std::fmt::Debug {
    /// How the frames that have arrived are handed out. A port that lends frames lends the same
    /// ones, and more after them, until they are released. The caller copies at most `max` frames
    /// before it releases them, so the port need not gather more.
    fn incoming(&mut self, max: usize) -> Incoming<'_> {
        let _ = max;
        Incoming::Read
    }

    /// Gives the first `count` lent frames back to the port: the caller has copied or dropped them.
    fn release(&mut self, count: usize) {
        let _ = count;
    }

    /// Receives one frame behind its header into `buffers`; returns the bytes of both. The caller
    /// gives room for the longest frame: bytes that do not fit are lost without an error. A port
    /// that lends can be read as well; it counts the frame that was read as released.
    ///
    /// # Errors
    /// * `EAGAIN`, `EINTR`: no frame has arrived.
    /// * `EFAULT`: guest memory was cut away under a buffer; the frame is lost.
    /// * `EINVAL`: the host has no virtio-net header for the frame, which is lost.
    /// * Any other: the port is down, detached or gone; wait until it is attached again.
    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno>;

    /// The event to wait for after [`Self::recv`] has failed with `EAGAIN`.
    fn readiness(&self) -> Readiness<'_>;
}
