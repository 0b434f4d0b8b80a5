//! `Port` (per device) and its queues: [`PortTx`], [`PortRx`] (one of each per queue pair).
//!
//! The lifecycle of a port queue:
//! 1. [`Port::open_tx`] and [`Port::open_rx`] make the halves of pair `index`; each is owned by the
//!    worker that runs its virtqueue, and may move to another worker with it.
//! 2. [`Port::set_attached`] tells the host whether to use the pair, as the guest does
//!    (`VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET`, virtio 1.3 §5.1.6.5.6).
//! 3. [`PortTx::send`] takes a burst of frames, in order, and returns how many it has taken and why
//!    it stopped. Most ports have then finished these frames. A port that still uses the memory of
//!    a frame reports it in [`Sent::later`], and returns the frame by [`PortTx::reap`].
//! 4. [`PortRx::incoming`] tells how to get frames. A port lends frames that lie in memory: the
//!    device copies them into guest buffers, then [`PortRx::release`] returns them. Other frames
//!    are read: [`PortRx::recv`] puts one frame straight into guest buffers.
//! 5. If a half would block, its `readiness` names the event to wait for.
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
mod reception;
mod returned;
mod steer;
pub mod switch;
pub mod tap;
pub mod xdp;

pub use crate::ready::{Alarm, Doorbell, Readiness};
pub use frames::Frames;
pub use manyring_wire::net::HEADER_SIZE;
pub use returned::{Outcome, Returned, Token};

use crate::sys::link::LinkEvent;
use manyring_memory::GuestSlice;
use manyring_wire::net::rss::Rss;
use manyring_wire::net::{MacAddress, Offloads};
use rustix::io::Errno;
use std::sync::Arc;
use tap::lent::Lent;
use tap::{Flows, TapError};

/// The most frames of one burst.
pub const FRAMES_MAX: usize = 64;
/// Frames of a group. The chains of a group are published while the rest of the burst is being
/// sent, so that a driver that polls gets its first buffers back early.
pub const GROUP_FRAMES: usize = 16;
/// Bytes after which a group ends, even if it has fewer than [`GROUP_FRAMES`] frames: a long frame
/// costs the host as much as forty short frames.
pub const GROUP_BYTES: usize = 256 << 10;
const _: () = assert!(FRAMES_MAX <= u64::BITS as usize, "`Sent::lost` has a bit for each");

/// Frames that the host withholds from a port, or from the network, whatever the guest's own filter
/// allows. By default none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostFilter {
    /// The only unicast address whose frames reach the port; `None`: frames to every address do.
    pub only_to: Option<MacAddress>,
    /// The only source address with which the guest may send; `None`: any.
    pub only_from: Option<MacAddress>,
    /// True if only those multicast frames reach the port whose group the host itself has joined.
    pub lacks_groups: bool,
}

/// Who has chosen how many frames may wait in the host's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueLengthSource {
    /// This daemon.
    Auto,
    /// The operator.
    Operator,
    /// The host: each queue has the length of the interface.
    Host,
}

impl QueueLengthSource {
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
pub struct QueueLengthInfo {
    /// Frames, in all these queues together; 0: unknown.
    pub frames: u32,
    /// Who has chosen them.
    pub source: QueueLengthSource,
    /// How often the length of the interface was changed.
    pub changes: u64,
}

/// Where a device's packets come from and go to.
pub trait Port: Send + Sync + std::fmt::Debug {
    /// Returns the kind of port: `tap`, `macvtap`, `xdp`, `switch`, `null`.
    fn kind(&self) -> &'static str;

    /// Returns the name of the host's interface; `None`: the port is no interface.
    fn interface(&self) -> Option<&str> {
        None
    }

    /// Returns how many queue pairs the port has.
    fn queue_pairs(&self) -> usize;

    /// Returns the offloads that guests may use in frames that they send: partial checksums, large
    /// segments.
    fn taken(&self) -> Offloads;

    /// Returns the offloads that the port can use in frames to a guest that accepts them.
    fn given(&self) -> Offloads;

    /// Returns the MTU of the host's interface in bytes; `None`: the port is no interface.
    fn mtu(&self) -> Option<u16>;

    /// Returns how many frames may wait for the guest in the host's queues; `None`: the port has no
    /// such queues. Does not block.
    fn queue_length(&self) -> Option<QueueLengthInfo> {
        None
    }

    /// Divides [`Self::queue_length`] by what was lost since the last call. Called once a second
    /// while the host uses several pairs. Returns true if nothing is expected to change soon: the
    /// next call can come later. May block.
    fn adapt_queue_length(&self) -> bool {
        true
    }

    /// Makes the sending half of pair `index`.
    ///
    /// # Errors
    /// `EINVAL`: the port has no such pair. Any other: the host lacks a resource for the half
    /// (`EMFILE`: a file descriptor; `ENOMEM`: memory).
    fn open_tx(&self, index: usize) -> Result<Box<dyn PortTx>, Errno>;

    /// Makes the receiving half of pair `index`.
    ///
    /// # Errors
    /// As for [`Self::open_tx`].
    fn open_rx(&self, index: usize) -> Result<Box<dyn PortRx>, Errno>;

    /// Restricts the offloads of delivered frames to these, from now on. May block.
    ///
    /// # Errors
    /// The host cannot deliver such frames, or cannot stop delivering them.
    fn set_offloads(&self, offloads: Offloads) -> Result<(), Errno>;

    /// Tells the host whether to use pair `index`. Has no effect if nothing changes. May block.
    ///
    /// # Errors
    /// `EINVAL`: the port has no such pair. Any other: the host cannot attach or detach the pair.
    fn set_attached(&self, index: usize, attached: bool) -> Result<(), Errno>;

    /// True if the port can choose the pair of each frame by the guest's hash.
    fn can_hash(&self) -> bool {
        false
    }

    /// Has the port choose the pair of each frame by `rss` from now on (virtio 1.3 §5.1.6.5.6.4);
    /// `None`: by its own rules. All pairs that `rss` names must be attached. May block.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the port cannot ([`Self::can_hash`]). Any other: the host refuses it.
    fn set_rss(&self, rss: Option<Arc<Rss>>) -> Result<(), Errno> {
        if rss.is_some() { Err(Errno::OPNOTSUPP) } else { Ok(()) }
    }

    /// Returns the table by which the host chooses pairs; `None`: it has rules of its own.
    fn flows(&self) -> Option<&Flows> {
        None
    }

    /// Returns the frames that the host withholds from the guest.
    fn host_filter(&self) -> HostFilter {
        HostFilter::default()
    }

    /// True if frames with the tag of this VLAN can reach the guest.
    fn carries_vlan(&self, id: u16) -> bool {
        let _ = id;
        true
    }

    /// Sets the MTU of the host's interface. May block.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the port has no interface in this network namespace. Any other: the host
    /// refuses it.
    fn set_mtu(&self, mtu: u16) -> Result<(), Errno>;

    /// Shows the host whether the guest's link is up, if the port can do that. May block.
    fn set_link(&self, up: bool);

    /// True if `event` may mean that the port's interface was deleted, or created again.
    fn heeds(&self, event: &LinkEvent) -> bool {
        let _ = event;
        false
    }

    /// False if the interface is in another network namespace, from which no deletion is reported.
    fn is_reported(&self) -> bool {
        true
    }

    /// False if another process owns the interface, and logs that it was deleted or created again.
    fn is_own(&self) -> bool {
        true
    }

    /// True if the host's interface was deleted. From then on the port only stores settings (pairs
    /// in use, offloads, MTU, link) until [`Self::join_again`] succeeds. May block.
    fn is_gone(&self) -> bool {
        false
    }

    /// Opens the interface that was created in place of a deleted one of the same name, with the
    /// settings of the first opening. The host uses none of its pairs and no offloads yet. Halves
    /// that are open then use the new interface. No worker may wait for their readiness during this
    /// call, which may block.
    ///
    /// # Errors
    /// [`TapError::HandedIn`]: this port can never do it. Any other: the interface does not exist
    /// yet, or does not suit.
    fn join_again(&self) -> Result<(), TapError> {
        Ok(())
    }

    /// Returns copies of the interface's queues, for another process that serves them. This process
    /// still makes all calls that change settings. `None`: the port is no interface, so any process
    /// can make its own port. `is_wanted` returns false once nobody waits for the queues any more:
    /// the call then ends soon, and has lent nothing. May block.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: no descriptor is free. `ECANCELED`: nobody waits for the queues.
    fn lend(&self, is_wanted: &dyn Fn() -> bool) -> Option<Result<Lent, Errno>> {
        let _ = is_wanted;
        None
    }

    /// Closes this process's copies from [`Self::lend`]; returns true if every other process has
    /// closed its copies, too. Before that, the caller must not lend again. Only some kinds of
    /// ports need this. May block.
    ///
    /// # Errors
    /// The host cannot tell.
    fn is_let_go(&self) -> Result<bool, Errno> {
        Ok(true)
    }

    /// Restores the settings of the interface, because the process that was to take it over has
    /// died. May block.
    fn keep(&self) {}

    /// Returns the counters of the port; `None`: it is no port of a switch.
    fn counted(&self) -> Option<&switch::PortCounters> {
        None
    }

    /// Sends one frame (without a virtio-net header) to the host, as if the guest had. May block.
    ///
    /// # Errors
    /// The host did not take the frame: its interface is full, down or deleted.
    fn transmit(&self, frame: &[u8]) -> Result<(), Errno>;
}

/// Why a sending half took only a part of a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The port is full: wait for its readiness.
    Blocked,
    /// The host has no memory for a frame now: retry a little later.
    NoMemory,
}

/// The result of [`PortTx::send`]: how many of the offered frames were taken, and how they ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// The number of frames that were taken, in order: sent, refused or lost. Later frames were not
    /// touched.
    pub taken: usize,
    /// Of the frames taken, those whose memory the port still uses: bit n is frame n of the burst.
    /// Each comes back by [`PortTx::reap`] or [`PortTx::recall`] with its token and its outcome.
    /// Until then the device must not return its memory to the driver.
    pub later: u64,
    /// Of the frames taken, the number that the host refused (for an invalid header).
    pub refused: usize,
    /// Of the frames taken, the number that the port refused for the offset of their partial
    /// checksum ([`PortTx::checks_place`]).
    pub misplaced: usize,
    /// Of the frames taken, the number that are lost because the host's interface is down or
    /// deleted.
    pub down: usize,
    /// Of the frames taken, the number that are lost because their memory was truncated (`EFAULT`).
    pub faulted: usize,
    /// Which frames were refused, misplaced, down or faulted: bit n is frame n of the burst.
    pub lost: u64,
    /// Of the frames taken, those that were sent as parts of longer ones.
    pub merged: Merged,
    /// Number of flows in the burst that the host from now on sends to this pair, and before sent
    /// to another one.
    pub steered: usize,
    /// Frames after those taken that were sent already, as parts of longer ones: bit n is frame n
    /// of the burst. They count as taken when the frames before them are taken. If the rest of the
    /// burst is dropped, they must not be counted as dropped.
    pub ahead: u64,
    /// Why the rest was not taken; `None`: the rest may be offered again at once. A port that needs
    /// a system call for each frame returns after [`GROUP_FRAMES`] frames or [`GROUP_BYTES`] bytes.
    pub stop: Option<Stop>,
}

/// Counts of a guest's frames that were sent as parts of longer ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Number of the guest's frames.
    pub packets: usize,
    /// Number of longer frames in which they were sent.
    pub frames: usize,
}

impl Sent {
    /// Adds `one`, the result of sending frame `index` of this burst alone; the caller counts
    /// `taken`. Returns false if the frame was not taken; [`Self::stop`] says why.
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
/// send      the port copies all that it needs of the burst, since burst and headers are gone when
///           `send` returns; the slices of Frames::payload stay mapped until the frame is back
/// reap      in every turn: returns the frames that the port has finished, in whatever order
/// recall    before the driver gets its memory back: frames that the port has not begun to send
///           come back at once, the others by `reap`, within the time that a burst takes
/// ```
pub trait PortTx: Send + std::fmt::Debug {
    /// Sends `frames` from index `first` on, in order: all of them, or one group, after which the
    /// driver should get its buffers back. If the port takes no frame at all, [`Sent::stop`] has
    /// the reason.
    fn send(&mut self, frames: &Frames, first: usize) -> Sent;

    /// Returns the event to wait for after [`Stop::Blocked`].
    fn readiness(&self) -> Readiness<'_>;

    /// True if the port itself refuses frames whose partial checksum would be written into bytes
    /// that decide about the frame (`RawHeader::is_in_place`), and checks this on the bytes that it
    /// passes on. Then the queue need not check the frame before.
    fn checks_place(&self) -> bool {
        false
    }

    /// Adds the frames that the port has finished since the last call to `done`. Called in every
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

    /// Called when the memory of the queue changes, or the queue ends. Once the frames in the old
    /// memory are back, the port must not refer to that memory. Does not block.
    fn forget(&mut self) {}

    /// Returns an eventfd or timer that becomes readable anew each time that [`Self::reap`] has
    /// something. The worker watches it edge-triggered while it owns the queue, and never reads it.
    /// `reap` of a port without one is called every 50 us while the port has a frame.
    fn done(&self) -> Readiness<'_> {
        Readiness::Never
    }
}

/// How to get the frames that have arrived from a receiving half.
#[derive(Debug)]
pub enum Incoming<'a> {
    /// One at a time, by [`PortRx::recv`], which fails with `EAGAIN` if none has arrived.
    Read,
    /// They lie in memory, the oldest first; an empty list means that none has arrived.
    Lent(&'a Frames),
}

/// The receiving half of a queue pair. Owned by one thread.
pub trait PortRx: Send + std::fmt::Debug {
    /// Returns how to get the frames that have arrived. A port that lends frames lends the same
    /// ones again, and later ones after them, until they are released. The caller copies at most
    /// `max` frames before it releases them, so the port need not gather more.
    fn incoming(&mut self, max: usize) -> Incoming<'_> {
        let _ = max;
        Incoming::Read
    }

    /// Returns the first `count` lent frames to the port, after the caller has copied or dropped
    /// them.
    fn release(&mut self, count: usize) {
        let _ = count;
    }

    /// Receives one frame behind its header into `buffers`; returns the length of both. The buffers
    /// must have space for the longest frame: bytes that do not fit are lost without an error. A
    /// port that lends frames can be read, too, and then counts the frame as released.
    ///
    /// # Errors
    /// * `EAGAIN`, `EINTR`: no frame has arrived.
    /// * `EFAULT`: guest memory under a buffer was truncated; the frame is lost.
    /// * `EINVAL`: the host cannot make a virtio-net header for the frame, which is lost.
    /// * Any other: the port is down, detached or deleted; wait until it is attached again.
    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno>;

    /// Returns the event to wait for after [`Self::recv`] has failed with `EAGAIN`.
    fn readiness(&self) -> Readiness<'_>;
}
