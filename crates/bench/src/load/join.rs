//! Taps joined to each other: through a back-end (`join`: tap - our driver half - back-end), and
//! bare (`relay`: tap - tap). One thread that sleeps, nothing copied, segments left whole.
//!
//! A queue pair that has nothing to do costs a look at its ring, and no system call: a guest's
//! kernel does nothing for a queue either that no program of it sends on, and that nobody calls.
//! All pairs fill buffers of one pool, the last that was freed first, as a kernel's pages are: with
//! a pool each, more pairs would need more of the cache for the same frames.

mod events;

use super::{LoadError, measure_rate};
use crate::measure::{now, own_cpu_seconds};
use clap::Args;
use events::JoinEvents;
use manyring_backend::net::tap::{QueueLength, TapOptions, TapPort, TapSource};
use manyring_backend::net::{Port, PortRx, Readiness};
use manyring_backend::sys::tuntap;
use manyring_driver::wire::net::{Coalescing, HEADER_SIZE};
use manyring_driver::wire::virtio::VIRTIO_F_EVENT_IDX;
use manyring_driver::{DriverError, NetDriver, NetDriverOptions, NetPair};
use manyring_memory::{GuestSlice, Mapping};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Frames of one turn of a queue.
const BURST: usize = 64;
/// Bytes of a receive buffer: what a Linux guest has while it receives long frames.
const BUFFER_SIZE: usize = 4096;
/// Buffers of the longest frame and its header.
const FRAME_BUFFERS: usize = 17;
/// Buffers of a relay at most.
const BUFFERS_MAX: usize = 65_536;
/// Longest sleep: how late the end may be noticed.
const SLEEP: Duration = Duration::from_millis(20);

/// `manyring-bench load join ..`
#[derive(Args, Clone, Debug)]
pub(crate) struct JoinArgs {
    /// The back-end's socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: PathBuf,
    /// The tap, of this namespace, that is joined to the back-end.
    #[arg(long, value_name = "NAME")]
    pub(crate) tap: String,
    /// Queue pairs of both.
    #[arg(long, default_value_t = 1)]
    pub(crate) queue_pairs: u16,
    /// Suppress nothing: without EVENT_IDX, a kick for all that is made available, even if the
    /// device wants none, and a call for all that is used.
    #[arg(long)]
    pub(crate) unsuppressed: bool,
    /// A kick of a transmitq waits for this many packets.
    #[arg(long, value_name = "N", requires = "kick_us", default_value_t = 0)]
    pub(crate) kick_packets: u32,
    /// It waits for this many microseconds at most.
    #[arg(long, value_name = "US", requires = "kick_packets", default_value_t = 0)]
    pub(crate) kick_us: u32,
    /// How long at most, in seconds; less if the standard input ends before.
    #[arg(long, default_value_t = 10.0)]
    pub(crate) seconds: f64,
}

/// `manyring-bench load relay ..`
#[derive(Args, Clone, Debug)]
pub(crate) struct RelayArgs {
    /// The tap of this namespace.
    #[arg(long, value_name = "NAME")]
    pub(crate) tap: String,
    /// The tap of the other namespace.
    #[arg(long, value_name = "NAME")]
    pub(crate) other_tap: String,
    /// The other namespace.
    #[arg(long, value_name = "PATH")]
    pub(crate) other_netns: PathBuf,
    /// Frames go through this many buffers of 4 KiB in turn, as through a ring; 17 hold the
    /// longest, and stay in the cache.
    #[arg(long, default_value_t = FRAME_BUFFERS)]
    pub(crate) buffers: usize,
    /// How long at most, in seconds; less if the standard input ends before.
    #[arg(long, default_value_t = 10.0)]
    pub(crate) seconds: f64,
}

/// The frames that were passed on, both ways, and their cost.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(crate) struct JoinResult {
    /// Frames.
    pub(crate) packets: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
    /// Frames of these that left the guest.
    pub(crate) packets_sent: u64,
    /// Frames that a tap did not take.
    pub(crate) lost: u64,
    /// Kicks sent.
    pub(crate) kicks: u64,
    /// Calls seen.
    pub(crate) calls: u64,
    /// CPU seconds of this process.
    pub(crate) cpu_seconds: f64,
    /// Share of the time in calls on taps that was spent on the other one (`relay`): what a
    /// back-end of that tap does.
    pub(crate) other_share: f64,
}

impl JoinResult {
    /// Frames that left the guest, as a number for a column.
    pub(crate) fn sent(&self) -> f64 {
        measure_rate(self.packets_sent, 1.0)
    }

    /// Bytes of a frame.
    pub(crate) fn average_size(&self) -> f64 {
        per(self.bytes, self.packets)
    }

    /// Kicks and calls for each frame.
    pub(crate) fn notifications(&self) -> (f64, f64) {
        (per(self.kicks, self.packets), per(self.calls, self.packets))
    }
}

fn per(count: u64, packets: u64) -> f64 {
    // A rate by another name.
    match packets {
        0 => 0.0,
        packets => measure_rate(count, 1.0) / measure_rate(packets, 1.0),
    }
}

fn step(step: &'static str) -> impl Fn(String) -> LoadError {
    move |problem| LoadError::Client { step, problem }
}

/// Opens a tap that exists; it delivers everything unfinished, as a guest with all offloads has it.
pub(super) fn open_tap(name: &str, queue_pairs: u16) -> Result<TapPort, String> {
    let source = TapSource::Name { name: name.to_owned(), must_exist: true };
    let queue_pairs = usize::from(queue_pairs);
    let (sndbuf, txqueuelen, mtu, bridge, up) = (None, QueueLength::Host, None, None, None);
    let (merge, steer) = (false, true);
    let port = TapPort::open(TapOptions {
        source,
        queue_pairs,
        sndbuf,
        txqueuelen,
        merge,
        steer,
        mtu,
        bridge,
        up,
    });
    let port = port.map_err(|e| e.to_string())?;
    port.set_offloads(port.given()).map_err(|e| e.to_string())?;
    for index in 0..queue_pairs {
        port.set_attached(index, true).map_err(|e| e.to_string())?;
    }
    Ok(port)
}

fn queue_fd(half: &dyn PortRx) -> Result<BorrowedFd<'_>, LoadError> {
    match half.readiness() {
        Readiness::Fd(fd) => Ok(fd),
        _ => Err(LoadError::Options("a tap without a file descriptor")),
    }
}

fn open_halves(port: &TapPort) -> Result<Vec<Box<dyn PortRx>>, LoadError> {
    let failed = |errno: Errno| step("tap")(errno.to_string());
    (0..port.queue_pairs()).map(|index| port.open_rx(index).map_err(failed)).collect()
}

fn open_half(port: &TapPort) -> Result<Box<dyn PortRx>, LoadError> {
    port.open_rx(0).map_err(|errno| step("tap")(errno.to_string()))
}

/// Joins the tap to the back-end until the time is over or nobody holds our standard input.
///
/// # Errors
/// [`LoadError`] if tap or back-end cannot be had, or the back-end breaks a rule.
pub(crate) fn join(args: &JoinArgs) -> Result<JoinResult, LoadError> {
    let port = open_tap(&args.tap, args.queue_pairs).map_err(step("tap"))?;
    let halves = open_halves(&port)?;
    let without = if args.unsuppressed { VIRTIO_F_EVENT_IDX } else { 0 };
    let options = NetDriverOptions {
        queue_pairs: args.queue_pairs,
        features: (NetDriverOptions::PLAIN | NetDriverOptions::OFFLOADS) & !without,
        kicks: Coalescing { packets_max: args.kick_packets, delay_us_max: args.kick_us },
        mergeable_size: u32::try_from(BUFFER_SIZE).unwrap_or(0),
        shared_buffers: true,
        ..NetDriverOptions::default()
    };
    let failed = |error: DriverError| step("back-end")(error.to_string());
    let mut driver = NetDriver::connect(&args.socket, &options).map_err(failed)?;
    let mut lanes = Vec::new();
    for (pair, half) in std::mem::take(&mut driver.pairs).into_iter().zip(&halves) {
        let (tap, start) = (queue_fd(half.as_ref())?, (args.kick_us > 0).then(now));
        let is_suppressed = !args.unsuppressed;
        lanes.push(Lane { pair, tap, tap_is_ready: true, start, is_suppressed, lost: 0 });
    }
    let mut events =
        JoinEvents::new(&mut lanes).map_err(|errno| step("epoll")(errno.to_string()))?;
    let (cpu, end) = (own_cpu_seconds(), end_of(args.seconds));
    let mut is_open = true;
    while is_open && now() < end {
        let mut worked = false;
        for _ in 0..BURST {
            worked = false;
            for lane in &mut lanes {
                worked |= lane.turn().map_err(failed)?;
            }
            if !worked {
                break;
            }
            // Frames may have arrived at pairs whose tap was empty.
            if lanes.iter().any(|lane| !lane.tap_is_ready) {
                events.look(&mut lanes).map_err(failed)?;
            }
        }
        if !worked {
            sleep(&mut lanes, &mut events).map_err(failed)?;
        }
        is_open = events.is_open();
    }
    let mut result = JoinResult { cpu_seconds: own_cpu_seconds() - cpu, ..JoinResult::default() };
    for lane in &lanes {
        result.lost += lane.lost;
        result.packets_sent += lane.pair.tx.counters().packets;
        for counters in [lane.pair.tx.counters(), lane.pair.rx.counters()] {
            result.packets += counters.packets;
            result.bytes += counters.bytes;
            result.kicks += counters.kicks;
            result.calls += counters.calls;
        }
    }
    Ok(result)
}

fn end_of(seconds: f64) -> Instant {
    now() + Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

/// A queue pair and its queue of the tap.
struct Lane<'a> {
    pair: NetPair,
    tap: BorrowedFd<'a>,
    /// The tap may have frames: it has told so, and no read has found it empty since.
    tap_is_ready: bool,
    /// Where kicks may wait: the beginning of their clock.
    start: Option<Instant>,
    /// Notifications that nobody needs are not sent, in either direction.
    is_suppressed: bool,
    lost: u64,
}

impl Lane<'_> {
    /// Moves a burst of frames each way. Returns false if there was no frame.
    fn turn(&mut self) -> Result<bool, DriverError> {
        let sent = self.tap_to_ring()?;
        Ok(self.ring_to_tap()? || sent)
    }

    fn tap_to_ring(&mut self) -> Result<bool, DriverError> {
        // As Linux does: long frames in buffers that are still in the cache.
        self.pair.tx.reclaim();
        let mut count = 0;
        while count < BURST
            && self.tap_is_ready
            && let Some(room) = self.pair.tx.room()
        {
            match tuntap::read(self.tap, &[room]) {
                Ok(len) => _ = self.pair.tx.send_filled(u32::try_from(len).unwrap_or(0)),
                Err(Errno::AGAIN) => {
                    self.tap_is_ready = false;
                    break;
                }
                Err(errno) => return Err(errno.into()),
            }
            count += 1;
        }
        let is_kicked = self.pair.tx.publish(self.now_ns())?;
        if count > 0 && !is_kicked && !self.is_suppressed {
            self.pair.tx.vring().kick()?;
        }
        Ok(count > 0)
    }

    /// The time of kicks that wait; always 0 if none does.
    fn now_ns(&self) -> u64 {
        let since = self.start.map_or(Duration::ZERO, |start| start.elapsed());
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    /// How long a kick that waits may still do so.
    fn kick_is_due(&self) -> Option<Duration> {
        let due_ns = self.pair.tx.kick_due_ns()?;
        Some(Duration::from_nanos(due_ns.saturating_sub(self.now_ns())))
    }

    fn ring_to_tap(&mut self) -> Result<bool, DriverError> {
        let mut count = 0;
        while count < BURST
            && let Some(slices) = self.pair.rx.recv_slices()?
        {
            self.lost += u64::from(tuntap::write(self.tap, slices).is_err());
            count += 1;
        }
        if count > 0 {
            let is_kicked = self.pair.rx.refill()?;
            if !self.is_suppressed {
                // The driver half asks for no calls whenever it has refilled its ring.
                self.pair.rx.enable_notifications();
                if !is_kicked {
                    self.pair.rx.vring().kick()?;
                }
            }
        }
        Ok(count > 0)
    }
}

/// Sleeps until a tap or a ring has something.
fn sleep(lanes: &mut [Lane<'_>], events: &mut JoinEvents) -> Result<(), DriverError> {
    let mut is_ready = false;
    let mut longest = SLEEP;
    for lane in &mut *lanes {
        is_ready |= lane.pair.rx.enable_notifications();
        // A tap is read again when there is room; until then the transmitq is waited for.
        let is_full = lane.pair.tx.room().is_none();
        let wants_calls = is_full || !lane.is_suppressed;
        is_ready |= wants_calls && lane.pair.tx.enable_notifications() && is_full;
        if let Some(due) = lane.kick_is_due() {
            longest = longest.min(due);
        }
    }
    events.wait(lanes, if is_ready { Duration::ZERO } else { longest })?;
    for lane in lanes.iter_mut().filter(|lane| lane.is_suppressed) {
        lane.pair.rx.disable_notifications();
        lane.pair.tx.disable_notifications();
    }
    Ok(())
}

/// Sleeps for less than a second.
fn wait(fds: &mut [PollFd<'_>], longest: Duration) -> Result<(), Errno> {
    let timeout = Timespec { tv_sec: 0, tv_nsec: longest.subsec_nanos().into() };
    match poll(fds, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// Reads each tap and writes the other until the time is over or nobody holds our standard input:
/// what two taps cost with nothing between them.
///
/// # Errors
/// [`LoadError`] if a tap cannot be had.
pub(crate) fn relay(args: &RelayArgs) -> Result<JoinResult, LoadError> {
    let other = crate::netns::visit(&args.other_netns, || open_tap(&args.other_tap, 1))
        .flatten()
        .map_err(step("other tap"))?;
    let port = open_tap(&args.tap, 1).map_err(step("tap"))?;
    let halves = [open_half(&port)?, open_half(&other)?];
    let failed = |errno: Errno| step("relay")(errno.to_string());
    let size = (args.buffers.clamp(FRAME_BUFFERS, BUFFERS_MAX) * BUFFER_SIZE) as u64;
    let memory = Mapping::anonymous(size).map_err(|e| step("memory")(e.to_string()))?;
    let (near, far) = (queue_fd(halves[0].as_ref())?, queue_fd(halves[1].as_ref())?);
    // A guest sends from one piece of memory and receives into many.
    let mut ways = [
        Hop::new(near, far, memory.slice(0, FRAME_BUFFERS * BUFFER_SIZE).into_iter().collect()),
        Hop::new(far, near, pieces(&memory)),
    ];
    let stdin = std::io::stdin();
    let (cpu, end) = (own_cpu_seconds(), end_of(args.seconds));
    let mut result = JoinResult::default();
    let mut spent = [Duration::ZERO; 2];
    while now() < end {
        let mut worked = false;
        for (index, hop) in ways.iter_mut().enumerate() {
            for _ in 0..BURST {
                let Some((read, written)) = hop.pass(&mut result).map_err(failed)? else { break };
                spent[index] += read;
                spent[1 - index] += written;
                worked = true;
            }
        }
        if !worked {
            let mut polled = [
                PollFd::new(&stdin, PollFlags::IN),
                PollFd::from_borrowed_fd(near, PollFlags::IN),
                PollFd::from_borrowed_fd(far, PollFlags::IN),
            ];
            wait(&mut polled, SLEEP).map_err(failed)?;
            if !polled[0].revents().is_empty() {
                break;
            }
        }
    }
    result.cpu_seconds = own_cpu_seconds() - cpu;
    let all = spent[0] + spent[1];
    if !all.is_zero() {
        result.other_share = spent[1].div_duration_f64(all);
    }
    Ok(result)
}

fn pieces(memory: &Mapping) -> Vec<GuestSlice<'_>> {
    let starts = (0..memory.size()).step_by(BUFFER_SIZE);
    starts.filter_map(|at| memory.slice(at, BUFFER_SIZE)).collect()
}

/// One direction of a relay.
struct Hop<'a> {
    from: BorrowedFd<'a>,
    to: BorrowedFd<'a>,
    /// The buffers, and the first of them again behind the last.
    buffers: Vec<GuestSlice<'a>>,
    count: usize,
    next: usize,
}

impl<'a> Hop<'a> {
    fn new(from: BorrowedFd<'a>, to: BorrowedFd<'a>, mut buffers: Vec<GuestSlice<'a>>) -> Self {
        let count = buffers.len();
        buffers.extend_from_within(..count.min(FRAME_BUFFERS));
        Self { from, to, buffers, count, next: 0 }
    }

    /// Passes one frame on. Returns the times of the read and of the write; `None`: none waits.
    fn pass(&mut self, result: &mut JoinResult) -> Result<Option<(Duration, Duration)>, Errno> {
        let start = now();
        let window = &self.buffers[self.next..self.next + self.count.min(FRAME_BUFFERS)];
        let len = match tuntap::read(self.from, window) {
            Ok(len) => len,
            Err(Errno::AGAIN) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        let (read, mut left, mut used) = (now(), len, 0);
        let mut frame = [window[0]; FRAME_BUFFERS];
        for (target, buffer) in frame.iter_mut().zip(window) {
            if left == 0 {
                break;
            }
            *target = buffer.split_at(left).0;
            left -= target.len();
            used += 1;
        }
        result.lost += u64::from(tuntap::write(self.to, &frame[..used]).is_err());
        result.packets += 1;
        result.bytes += len.saturating_sub(HEADER_SIZE) as u64;
        self.next = (self.next + used) % self.count;
        Ok(Some((read - start, read.elapsed())))
    }
}
