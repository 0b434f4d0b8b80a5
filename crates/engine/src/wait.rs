//! `Wait`: how a worker sleeps and what wakes it (kicks, disks, ports, orders); its clock.
//!
//! Each worker has one io_uring. Where the kernel refuses it (container profiles, old kernels) the
//! worker uses epoll instead, edge-triggered, so that kicks need not be read there either.

use manyring_backend::sys::uring::{Event as RingEvent, Ring};
use rustix::event::epoll;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::sync::OnceLock;
use std::time::Duration;

/// The source of an event; packed into the 64 bits that the kernel returns with the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventSource {
    /// The kick of the queue in `slot`, if the queue still watches the kick under this number.
    Kick {
        /// The queue's slot on its worker.
        slot: u32,
        /// The number under which the kick is watched ([`Wait::next_kick_watch`]).
        watch: u32,
    },
    /// A disk request of the queue in `slot`.
    Disk {
        /// The queue's slot on its worker.
        slot: u32,
        /// The token of the request, by which the queue finds it.
        token: u32,
    },
    /// The port of the queue in `slot` is ready, if it is still of this generation.
    Port {
        /// The queue's slot on its worker.
        slot: u32,
        /// How many queues had the slot before.
        generation: u32,
    },
    /// The disk of the queue in `slot` has finished work outside the io_uring, if the queue is
    /// still of this generation.
    Offload {
        /// The queue's slot on its worker.
        slot: u32,
        /// How many queues had the slot before.
        generation: u32,
    },
    /// Commands wait in the worker's mailbox.
    Mailbox,
    /// A watch has ended: the worker has nothing to do.
    Ended,
}

const KICK: u64 = 1 << 56;
const DISK: u64 = 2 << 56;
const MAILBOX: u64 = 3 << 56;
const ENDED: u64 = 4 << 56;
const PORT: u64 = 5 << 56;
const OFFLOAD: u64 = 6 << 56;
const SLOT_SHIFT: u32 = 32;
/// Slots have 24 bits.
pub(crate) const SLOTS_MAX: usize = 1 << 24;

impl EventSource {
    /// Returns the 64 bits that the kernel stores for the source.
    #[must_use]
    pub const fn pack(self) -> u64 {
        match self {
            Self::Kick { slot, watch } => KICK | (slot as u64) << SLOT_SHIFT | watch as u64,
            Self::Disk { slot, token } => DISK | (slot as u64) << SLOT_SHIFT | token as u64,
            Self::Port { slot, generation } => {
                PORT | (slot as u64) << SLOT_SHIFT | generation as u64
            }
            Self::Offload { slot, generation } => {
                OFFLOAD | (slot as u64) << SLOT_SHIFT | generation as u64
            }
            Self::Mailbox => MAILBOX,
            Self::Ended => ENDED,
        }
    }

    #[allow(clippy::cast_possible_truncation, reason = "the fields are taken out by shifts")]
    /// Unpacks the 64 bits that the kernel returned.
    #[must_use]
    pub const fn unpack(data: u64) -> Self {
        let (slot, low) = ((data >> SLOT_SHIFT) as u32 & 0xff_ffff, data as u32);
        match data & (0xff << 56) {
            KICK => Self::Kick { slot, watch: low },
            DISK => Self::Disk { slot, token: low },
            PORT => Self::Port { slot, generation: low },
            OFFLOAD => Self::Offload { slot, generation: low },
            MAILBOX => Self::Mailbox,
            _ => Self::Ended,
        }
    }
}

/// An event, as the kernel reported it.
#[derive(Clone, Copy, Debug)]
pub struct Woken {
    /// The source.
    pub source: EventSource,
    /// Bytes, poll mask or negative errno.
    pub result: i32,
    /// The watch has ended and must be renewed.
    pub ended: bool,
}

#[derive(Debug)]
enum Kernel {
    Uring(Box<Ring>),
    Epoll(Epoll),
}

/// The replacement for io_uring. Polling is a system call here, so a busy worker polls only every
/// [`EPOLL_TURNS`] rounds, or after [`EPOLL_LOOK_NS`] if its rounds are long.
struct Epoll {
    fd: OwnedFd,
    events: Vec<epoll::Event>,
    turns: u32,
    looked_at_ns: u64,
}

/// How a worker sleeps and is woken.
#[derive(Debug)]
pub struct Wait {
    kernel: Kernel,
    origin_ns: u64,
    events: Vec<RingEvent>,
    /// How many kicks were watched so far.
    kick_watches: u32,
}

/// The maximum of events that one `epoll_wait` returns.
const EPOLL_EVENTS: usize = 64;
/// Rounds between two polls of a worker that does not sleep.
const EPOLL_TURNS: u32 = 16;
/// Maximum time without a poll, in nanoseconds.
const EPOLL_LOOK_NS: u64 = 100_000;
/// `POLLERR | POLLHUP | POLLNVAL`: a watch that reports these is over.
const POLL_BROKEN: i32 = 0x8 | 0x10 | 0x20;

/// Returns when the first worker of this process started: the origin of all workers' clock.
fn origin_ns() -> u64 {
    static ORIGIN_NS: OnceLock<u64> = OnceLock::new();
    *ORIGIN_NS.get_or_init(clock_ns)
}

/// Returns the nanoseconds of the monotonic clock; 64 bits last for 500 years. `Instant` would keep
/// seconds and nanoseconds apart and check each difference, which costs every turn some seventy
/// instructions.
#[inline]
fn clock_ns() -> u64 {
    nanoseconds(clock_gettime(ClockId::Monotonic))
}

/// Converts a time since the start of the host or of a thread to nanoseconds; it is not negative.
#[inline]
fn nanoseconds(time: Timespec) -> u64 {
    let seconds = time.tv_sec.cast_unsigned();
    seconds.wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec.cast_unsigned())
}

/// Returns the workers' clock in nanoseconds, for times that the control thread gives the workers.
#[must_use]
pub fn clock_now_ns() -> u64 {
    clock_ns().saturating_sub(origin_ns())
}

impl Wait {
    /// Prepares the calling thread: with io_uring if `uring` is true and the kernel allows it,
    /// otherwise with epoll.
    ///
    /// # Errors
    /// That of `epoll_create1`, where epoll is used.
    pub fn new(uring: bool) -> Result<Self, Errno> {
        let ring = if uring { Ring::new().ok() } else { None };
        let kernel = match ring {
            Some(ring) => Kernel::Uring(Box::new(ring)),
            None => Kernel::Epoll(Epoll {
                fd: epoll::create(epoll::CreateFlags::CLOEXEC)?,
                events: Vec::with_capacity(EPOLL_EVENTS),
                turns: 0,
                looked_at_ns: 0,
            }),
        };
        Ok(Self { kernel, origin_ns: origin_ns(), events: Vec::new(), kick_watches: 0 })
    }

    /// True if disks can use io_uring on this thread.
    pub fn has_ring(&self) -> bool {
        matches!(self.kernel, Kernel::Uring(_))
    }

    /// Returns the io_uring, to lend to a disk; `None` under epoll.
    #[inline]
    pub fn ring(&mut self) -> Option<&mut Ring> {
        match &mut self.kernel {
            Kernel::Uring(ring) => Some(ring),
            Kernel::Epoll(_) => None,
        }
    }

    /// Sets whether queues of several guests are served here.
    pub(crate) fn set_shared(&mut self, is_shared: bool) {
        if let Some(ring) = self.ring() {
            ring.set_shared(is_shared);
        }
    }

    /// Returns how often this thread had to wait for a device of the host.
    pub(crate) fn device_waits(&self) -> u64 {
        match &self.kernel {
            Kernel::Uring(ring) => ring.device_waits(),
            Kernel::Epoll(_) => 0,
        }
    }

    /// Returns the nanoseconds since the first worker of this process started, on one clock for all
    /// workers, so that a queue that moves can keep its times. Called once per round.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        clock_ns().saturating_sub(self.origin_ns)
    }

    /// Returns the CPU time of the calling thread so far, in nanoseconds. Makes a system call.
    pub fn ran_ns(&self) -> u64 {
        nanoseconds(clock_gettime(ClockId::ThreadCPUTime))
    }

    /// Returns a number for the next watch of a kick. Each watch has its own, so that a late event
    /// of a kick that was replaced is told from an event of its successor, and so that ending a
    /// watch ends no other one.
    pub fn next_kick_watch(&mut self) -> u32 {
        self.kick_watches = self.kick_watches.wrapping_add(1);
        self.kick_watches
    }

    /// Begins a watch that reports every write to `fd`.
    pub fn watch(&mut self, fd: BorrowedFd<'_>, source: EventSource) {
        match &mut self.kernel {
            Kernel::Uring(ring) => ring.poll(fd, source.pack()),
            Kernel::Epoll(epoll) => {
                let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
                let data = epoll::EventData::new_u64(source.pack());
                if epoll::add(&epoll.fd, fd, data, flags) == Err(Errno::EXIST) {
                    let _ = epoll::modify(&epoll.fd, fd, data, flags);
                }
            }
        }
    }

    /// Begins a watch that reports once, at once if `fd` is ready for input, or for output.
    pub fn watch_once(&mut self, fd: BorrowedFd<'_>, output: bool, source: EventSource) {
        match &mut self.kernel {
            Kernel::Uring(ring) => ring.poll_once(fd, output, source.pack()),
            Kernel::Epoll(epoll) => {
                let ready = if output { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
                let flags = ready | epoll::EventFlags::ONESHOT;
                let data = epoll::EventData::new_u64(source.pack());
                if epoll::modify(&epoll.fd, fd, data, flags) == Err(Errno::NOENT) {
                    let _ = epoll::add(&epoll.fd, fd, data, flags);
                }
            }
        }
    }

    /// Ends the watch of `fd` that reports `source`.
    pub fn unwatch(&mut self, fd: BorrowedFd<'_>, source: EventSource) {
        match &mut self.kernel {
            Kernel::Uring(ring) => {
                ring.poll_remove(source.pack(), EventSource::Ended.pack());
                // The watch has a reference to the file. `settle` releases that now, while the
                // caller still has the file: this thread must not be the one that closes the file.
                ring.settle();
            }
            Kernel::Epoll(epoll) => {
                let _ = epoll::delete(&epoll.fd, fd);
            }
        }
    }

    /// Submits queued disk requests to the kernel.
    #[inline]
    pub fn submit(&mut self) {
        if let Kernel::Uring(ring) = &mut self.kernel {
            // EBUSY or EAGAIN: the entries stay queued, and the next round submits them.
            let _ = ring.submit();
        }
    }

    /// Returns how much work queues have placed for [`Self::submit`] so far (`Ring::placed`).
    #[inline]
    pub(crate) fn placed(&self) -> u64 {
        match &self.kernel {
            Kernel::Uring(ring) => ring.placed(),
            Kernel::Epoll(_) => 0,
        }
    }

    /// Collects the events that have happened, without waiting.
    #[inline]
    pub fn reap(&mut self, woken: &mut Vec<Woken>, now_ns: u64) {
        match &mut self.kernel {
            Kernel::Uring(ring) => {
                self.events.clear();
                ring.reap(&mut self.events);
                woken.extend(self.events.iter().map(woken_by_ring));
            }
            Kernel::Epoll(epoll) => {
                epoll.turns += 1;
                let is_late = now_ns.saturating_sub(epoll.looked_at_ns) >= EPOLL_LOOK_NS;
                if is_late || epoll.turns.is_multiple_of(EPOLL_TURNS) {
                    epoll.looked_at_ns = now_ns;
                    epoll.collect(Some(Duration::ZERO), woken);
                }
            }
        }
    }

    /// Sleeps until an event happens or `timeout` has passed, and collects the events. Submits
    /// queued disk requests first.
    pub fn sleep(&mut self, woken: &mut Vec<Woken>, timeout: Option<Duration>) {
        match &mut self.kernel {
            Kernel::Uring(ring) => {
                if ring.wait(timeout).is_err() {
                    std::thread::yield_now();
                }
                self.reap(woken, 0);
            }
            Kernel::Epoll(epoll) => epoll.collect(timeout, woken),
        }
    }
}

fn woken_by_ring(event: &RingEvent) -> Woken {
    let source = EventSource::unpack(event.user_data);
    let watch = matches!(
        source,
        EventSource::Kick { .. } | EventSource::Offload { .. } | EventSource::Mailbox
    );
    let broken = event.result < 0 || event.result & POLL_BROKEN != 0;
    Woken { source, result: event.result, ended: watch && !event.more && !broken }
}

impl std::fmt::Debug for Epoll {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Epoll").field("fd", &self.fd).finish_non_exhaustive()
    }
}

impl Epoll {
    fn collect(&mut self, timeout: Option<Duration>, woken: &mut Vec<Woken>) {
        self.events.clear();
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        let buffer = rustix::buffer::spare_capacity(&mut self.events);
        // EINTR: there is no event; the worker's loop checks again.
        let _ = epoll::wait(self.fd.as_fd(), buffer, timeout.as_ref());
        woken.extend(self.events.iter().map(|event| {
            let flags = event.flags;
            let result = i32::try_from(flags.bits()).unwrap_or(1);
            Woken { source: EventSource::unpack(event.data.u64()), result, ended: false }
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn sources_survive_the_packing() {
        for source in [
            EventSource::Kick { slot: 0xff_ffff, watch: u32::MAX },
            EventSource::Disk { slot: 3, token: 255 },
            EventSource::Port { slot: 7, generation: 1 << 31 },
            EventSource::Offload { slot: 7, generation: 9 },
            EventSource::Mailbox,
            EventSource::Ended,
        ] {
            assert_eq!(EventSource::unpack(source.pack()), source);
        }
    }

    #[test]
    fn both_kernels_report_every_write_of_an_eventfd_that_is_never_read() {
        for uring in [true, false] {
            let mut wait = Wait::new(uring).unwrap();
            assert_eq!(wait.has_ring(), uring);
            let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            let source = EventSource::Kick { slot: 1, watch: 2 };
            wait.watch(event.as_fd(), source);
            for _ in 0..3 {
                rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
                let mut woken = Vec::new();
                wait.sleep(&mut woken, None);
                assert!(woken.iter().any(|w| w.source == source), "uring {uring}: {woken:?}");
            }
            wait.unwatch(event.as_fd(), source);
        }
    }

    #[test]
    fn a_watch_for_once_reports_what_is_ready_already_and_then_no_more() {
        for uring in [true, false] {
            let mut wait = Wait::new(uring).unwrap();
            let event = eventfd(1, EventfdFlags::NONBLOCK).unwrap();
            let source = EventSource::Port { slot: 1, generation: 2 };
            for output in [false, true] {
                wait.watch_once(event.as_fd(), output, source);
                let mut woken = Vec::new();
                wait.sleep(&mut woken, None);
                assert!(woken.iter().any(|w| w.source == source), "uring {uring}: {woken:?}");
            }
            let mut woken = Vec::new();
            rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
            wait.sleep(&mut woken, Some(Duration::from_millis(20)));
            assert!(woken.is_empty(), "uring {uring}: {woken:?}");
        }
    }

    #[test]
    fn a_kick_whose_other_end_is_closed_is_reported_and_then_no_more() {
        for uring in [true, false] {
            let mut wait = Wait::new(uring).unwrap();
            let (reader, writer) =
                rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
            let (socket, peer) = std::os::unix::net::UnixStream::pair().unwrap();
            let source = EventSource::Kick { slot: 1, watch: 2 };
            wait.watch(reader.as_fd(), source);
            wait.watch(socket.as_fd(), source);
            drop((writer, peer));
            let mut woken = Vec::new();
            wait.sleep(&mut woken, None);
            wait.sleep(&mut woken, Some(Duration::from_millis(20)));
            assert!((1..=4).contains(&woken.len()), "uring {uring}: {woken:?}");
            assert!(woken.iter().all(|w| !w.ended), "it would be watched again at once");
            woken.clear();
            wait.sleep(&mut woken, Some(Duration::from_millis(20)));
            assert!(woken.is_empty(), "uring {uring}: {woken:?}");
        }
    }
}
