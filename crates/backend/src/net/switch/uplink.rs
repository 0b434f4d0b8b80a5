//! `Uplink`: a thread that carries frames between a port of a switch and an interface of the host.
//! Which frames come here is decided in `verdict.rs`.
//!
//! ```text
//! out:   a burst that guests have lent goes to the host's interface as it is; a frame copy too
//! in:    a frame is read from the interface into the daemon's memory, and is sent as a frame copy
//! idle:  arms the doorbell; sleeps until the interface, the doorbell or the end reports
//! gone:  looks each second for an interface of the same name, and opens it
//! ```
//! The interface is a tap, a macvtap, or any other one by AF_XDP: a [`Port`] that no longer uses
//! the bytes of a frame after it has taken the frame.
//!
//! The thread belongs to the switch, so that no guest's worker makes system calls for the frames of
//! another guest. A full interface loses frames: a burst is offered once, and the frames that the
//! interface does not take are dropped, as a network card drops them.

use super::{CopyPath, OFFLOADS, SwitchPort};
use crate::net::{Frames, Incoming, Port, PortRx, PortTx, Readiness, Returned, Sent};
use crate::ready::Doorbell;
use crate::sys::starter::{ThreadRole, spawn};
use manyring_memory::{Duty, Mapping, SliceList, take_duty};
use manyring_wire::net::{FRAME_SIZE_MAX, HEADER_SIZE, RawNetHeader};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use zerocopy::FromBytes;

/// The most frames that are read from the interface before guests' frames are sent again.
const READ_MAX: usize = 32;
/// Bytes of the longest frame with its header.
const ROOM: usize = HEADER_SIZE + FRAME_SIZE_MAX;
/// Delay between two attempts to use an interface that is down or deleted.
const AGAIN: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Delay between two checks of an interface whose deletion is not reported.
const LOOK: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };
/// Least milliseconds between two attempts to find a deleted interface, however much guests send.
const LOOK_MS: u64 = 500;
/// Delay between two calls of `reap` while the kernel has no room for frames: no event reports
/// room.
const ASK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000 };

/// A running uplink. Dropping it ends its thread.
#[derive(Debug)]
pub struct Uplink {
    ends: Arc<AtomicBool>,
    doorbell: Arc<Doorbell>,
    thread: Option<JoinHandle<()>>,
}

/// State of the uplink's thread: the switch's port, the host's interface, and their frames.
#[derive(Debug)]
struct Carrier {
    port: SwitchPort,
    host: Arc<dyn Port>,
    copy_path: CopyPath,
    from_guests: Box<dyn PortRx>,
    to_host: Box<dyn PortTx>,
    from_host: Box<dyn PortRx>,
    /// Rung when the uplink ends, to wake the thread.
    doorbell: Arc<Doorbell>,
    ends: Arc<AtomicBool>,
    /// Memory for one frame of the interface, and the burst that refers to it.
    room: Arc<Mapping>,
    frame: Frames,
    frame_copy: Vec<u8>,
    /// The number of frames that the interface has taken and returns later by `reap`, and the
    /// returned ones. Their bytes were copied, so nothing waits for them.
    owed: usize,
    returned: Vec<Returned>,
    /// True if the host's interface is down or deleted.
    is_down: bool,
    /// True if the interface was deleted, which was logged.
    is_gone: bool,
    /// True if the interface has lost frames, so that it may have been deleted.
    must_look: bool,
    /// True if the interface is no tap, and so its deletion is not reported: it is checked every 5
    /// s.
    is_silent: bool,
    /// When the interface was last checked (ms). Each check takes the host's network lock.
    looked_at: Option<u64>,
}

impl Uplink {
    /// Starts to carry frames between `port` and pair 0 of `host`.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`, `EAGAIN`: the host has no descriptor, memory or thread for the uplink.
    /// Any other: the host refuses to attach the pair, or refuses its offloads.
    pub fn start(port: SwitchPort, host: Arc<dyn Port>, name: &str) -> Result<Self, Errno> {
        let no_memory = |_| Errno::NOMEM;
        attach(&*host)?;
        let is_silent = host.kind() != "tap";
        port.set_offloads(host.taken())?;
        port.set_attached(0, true)?;
        let (ends, doorbell) = (Arc::new(AtomicBool::new(false)), Arc::new(Doorbell::new()?));
        let carrier = Carrier {
            copy_path: port.copy_path(),
            from_guests: port.open_rx(0)?,
            to_host: host.open_tx(0)?,
            from_host: host.open_rx(0)?,
            port,
            host,
            doorbell: doorbell.clone(),
            ends: ends.clone(),
            room: Arc::new(Mapping::anonymous(ROOM as u64).map_err(no_memory)?),
            frame: Frames::new().map_err(no_memory)?,
            frame_copy: Vec::with_capacity(ROOM),
            owed: 0,
            returned: Vec::new(),
            is_down: false,
            is_gone: false,
            must_look: false,
            is_silent,
            looked_at: None,
        };
        let thread = std::thread::Builder::new().name(name.to_owned());
        let thread = spawn(ThreadRole::Worker, thread, move || carrier.run());
        let thread = thread.map_err(|_| Errno::AGAIN)?;
        Ok(Self { ends, doorbell, thread: Some(thread) })
    }
}

/// Attaches the pair of the interface, with the offloads that ports of a switch accept.
fn attach(host: &dyn Port) -> Result<(), Errno> {
    let given = host.given();
    host.set_offloads(manyring_wire::net::Offloads {
        csum: given.csum,
        tso4: given.tso4,
        tso6: given.tso6,
        ecn: given.ecn,
        ..OFFLOADS
    })?;
    host.set_attached(0, true)
}

impl Drop for Uplink {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        self.doorbell.post(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Carrier {
    fn run(mut self) {
        take_duty(Duty::Touch);
        while !self.ends.load(Ordering::Acquire) {
            let out = self.carry_out();
            self.reap();
            if !self.carry_in() && !out {
                self.sleep();
                if self.is_down || self.must_look || self.is_gone || self.is_silent {
                    self.regain();
                }
            }
        }
    }

    /// Opens an interface of the same name, if the old one was deleted and a new one exists.
    fn regain(&mut self) {
        let now = self.copy_path.switch.clock.now().0;
        if self.looked_at.is_some_and(|then| now.saturating_sub(then) < LOOK_MS) {
            return;
        }
        (self.looked_at, self.must_look) = (Some(now), false);
        if !self.host.is_gone() {
            return;
        }
        let interface = self.host.interface().unwrap_or_default();
        if !std::mem::replace(&mut self.is_gone, true) {
            tracing::warn!(
                interface,
                "the uplink's interface is gone; rejoining it when one of this name appears"
            );
        }
        if self.host.join_again().is_err() {
            return;
        }
        match attach(&*self.host) {
            Ok(()) => tracing::info!(interface, "the uplink's interface is rejoined"),
            Err(errno) => tracing::warn!(interface, %errno, "joining the uplink failed"),
        }
        (self.is_gone, self.is_down) = (false, false);
    }

    /// Has the interface send the frames for which it had no room.
    fn reap(&mut self) {
        if self.owed > 0 {
            self.to_host.reap(&mut self.returned);
            self.owed -= self.owed.min(self.returned.len());
            self.returned.clear();
        }
    }

    /// Counts frames that the interface has lost, and frames that it returns later.
    fn note(&mut self, sent: &Sent) {
        self.owed += sent.later.count_ones() as usize;
        self.must_look |= sent.down > 0;
        self.port.counters().dropped_full.add(sent.lost.count_ones().into());
    }

    /// Sends the guests' frames to the interface. Returns true if there were any.
    fn carry_out(&mut self) -> bool {
        match self.from_guests.incoming(usize::MAX) {
            Incoming::Lent(frames) if frames.count() == 0 => false,
            Incoming::Lent(frames) => {
                let count = frames.count();
                let (mut done, mut all) = (0, Sent::default());
                while done < count {
                    let sent = self.to_host.send(frames, done);
                    done += sent.taken;
                    (all.later, all.lost) = (all.later | sent.later, all.lost | sent.lost);
                    all.down += sent.down;
                    if sent.stop.is_some() {
                        break;
                    }
                }
                self.port.counters().dropped_full.add((count - done) as u64);
                self.from_guests.release(count);
                self.note(&all);
                true
            }
            Incoming::Read => {
                self.carry_frame_copy();
                true
            }
        }
    }

    /// Sends one frame copy to the interface.
    #[allow(clippy::cast_possible_truncation, reason = "at most a frame, with its header")]
    fn carry_frame_copy(&mut self) {
        let Some(room) = self.room.slice(0, ROOM) else { return };
        let Ok(size) = self.from_guests.recv(&[room]) else { return };
        let (Some(header), Some(len)) =
            (room.read_array::<HEADER_SIZE>(), size.checked_sub(HEADER_SIZE))
        else {
            return;
        };
        let Ok(header) = RawNetHeader::read_from_bytes(&header) else { return };
        let place = (HEADER_SIZE as u64, len as u32);
        let Ok(slices) = SliceList::of_mapping(&self.room, &[place]) else { return };
        self.frame.clear();
        self.frame.push(&header, slices.all(), 0, len);
        let sent = self.to_host.send(&self.frame, 0);
        self.frame.release();
        self.note(&sent);
        if sent.taken == 0 {
            self.port.counters().dropped_full.add(1);
        }
    }

    /// Passes frames of the interface to the switch. Returns true if there were any.
    fn carry_in(&mut self) -> bool {
        let Some(room) = self.room.slice(0, ROOM) else { return false };
        for count in 0..READ_MAX {
            let size = match self.from_host.recv(&[room]) {
                Ok(size) => size.min(ROOM),
                Err(Errno::INTR | Errno::FAULT | Errno::INVAL) => continue,
                Err(errno) => {
                    self.is_down = errno != Errno::AGAIN;
                    return count > 0;
                }
            };
            self.is_down = false;
            self.frame_copy.resize(size, 0);
            room.read_into(&mut self.frame_copy);
            self.copy_path.send(&self.frame_copy);
        }
        true
    }

    /// Sleeps until there is a frame to carry, the uplink ends, or a check is due.
    fn sleep(&self) {
        let (Readiness::Doorbell(guests), Readiness::Fd(host)) =
            (self.from_guests.readiness(), self.from_host.readiness())
        else {
            return;
        };
        if !guests.alarm().arm() || !self.doorbell.alarm().arm() {
            return;
        }
        let (guests, end) = (guests.as_fd(), self.doorbell.as_fd());
        let mut fds = [&guests, &end, &host].map(|fd| PollFd::new(fd, PollFlags::IN));
        // Do not poll an interface that is down: it would report an error at once.
        let count = if self.is_down { 2 } else { 3 };
        let looks = self.is_down || self.must_look || self.is_gone;
        let timeout = match (self.owed > 0, looks, self.is_silent) {
            (true, ..) => Some(&ASK),
            (_, true, _) => Some(&AGAIN),
            (.., true) => Some(&LOOK),
            _ => None,
        };
        let _ = poll(&mut fds[..count], timeout);
        // Read the eventfd, or the next `poll` returns at once: `poll` is level-triggered.
        let _ = rustix::io::read(guests, &mut [0; 8]);
    }
}
