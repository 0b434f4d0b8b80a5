//! The two halves of a pair of an AF_XDP port.

use super::pair::{Inlet, Pair};
use super::replacer::ReplaceRequests;
use super::socket::{FRAME_SIZE_MIN, TxEnd, TxWakeup};
use crate::net::{
    FRAMES_MAX, Frames, GROUP_BYTES, Incoming, Outcome, PortRx, PortTx, Readiness, Returned, Sent,
    Stop, Token,
};
use manyring_memory::{
    GuestAddr, GuestSlice, LastHit, SliceList, copy_between, fault_count, in_own_memory,
};
use manyring_wire::net::RawNetHeader;
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use std::collections::VecDeque;
use std::sync::Arc;

/// The most frames that one call sends: the kernel sends 32 in one system call.
const SEND_FRAMES: usize = 32;
/// If no frame has come back for so many milliseconds, the frames that the card still has are
/// considered lost.
const STUCK_MS: u64 = 1000;
/// After so many calls in a row without a frame, the socket is checked for an error.
const IDLE_LOOKS: u32 = 64;

/// The sending half of a pair of an AF_XDP port.
#[derive(Debug)]
pub(super) struct XdpTx {
    pair: Arc<Pair>,
    /// Requests to the replacer thread of a port with zero-copy; `None`: every frame is copied.
    replacer: Option<Arc<ReplaceRequests>>,
    /// The value of [`fault_count`] at which the frames' memory was last checked.
    faults: u64,
    /// True if the interface was down when a frame was last sent.
    is_down: bool,
    /// The token of a frame that was copied, and is reported by [`PortTx::reap`] only so that
    /// `reap` is called: the kernel had no room for all frames of the ring, and must be called
    /// again.
    asks: Option<Token>,
    /// The last request to the replacer to register pages: for which memory snapshot, and for which
    /// socket.
    asked_for: Asked,
    /// The number of frames that the card had at the last check, and the time (ms) since which this
    /// number has not changed.
    stuck: (usize, u64),
}

impl XdpTx {
    pub(super) fn new(pair: Arc<Pair>, replacer: Option<Arc<ReplaceRequests>>) -> Self {
        Self {
            pair,
            replacer,
            faults: fault_count(),
            is_down: false,
            asks: None,
            asked_for: Asked::default(),
            stuck: (0, 0),
        }
    }

    /// Tells the replacer thread that the card has lost frames, if `out`, the number of frames that
    /// the card has, has not changed for more than [`STUCK_MS`].
    fn watch_stuck(&mut self, out: usize) {
        let Some(replacer) = self.replacer.as_ref().filter(|_| out > 0) else {
            self.stuck = (0, 0);
            return;
        };
        let now = coarse_ms();
        if self.stuck.0 != out {
            self.stuck = (out, now);
        } else if now.saturating_sub(self.stuck.1) > STUCK_MS {
            self.stuck.1 = now;
            replacer.request(|request| request.is_stuck = true);
        }
    }
}

/// The memory snapshot and the number of the socket of a request to the replacer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Asked {
    snapshot: u64,
    generation: u64,
}

/// Returns the coarse monotonic clock in milliseconds, without a system call.
fn coarse_ms() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    let (seconds, nanos) = (now.tv_sec.cast_unsigned(), now.tv_nsec.cast_unsigned());
    seconds.wrapping_mul(1000).wrapping_add(nanos / 1_000_000)
}

/// Lends frame `index` to the card, if it is long and lies in registered pages. Returns false if it
/// must be copied.
fn lend(end: &mut TxEnd, frames: &Frames, index: usize, replacer: &ReplaceRequests) -> bool {
    if frames.len(index) < replacer.threshold {
        return false;
    }
    let Some(payload) = frames.payload(index) else { return false };
    let [slice] = payload.as_slices() else { return false };
    slice.len() == frames.len(index) && end.lend(payload.memory(), slice, frames.token(index))
}

/// Asks the replacer to register the pages of the burst's memory snapshot, once for each socket.
fn ask(
    end: &TxEnd,
    frames: &Frames,
    asked: &mut Asked,
    generation: u64,
    replacer: &ReplaceRequests,
) {
    let Some(payload) = frames.payload(0) else { return };
    let wanted = Asked { snapshot: payload.memory().id(), generation };
    if !end.has(payload.memory()) && std::mem::replace(asked, wanted) != wanted {
        let memory = payload.memory().clone();
        replacer.request(|request| request.memory = Some(Some(memory)));
    }
}

/// Copies frame `index` into a chunk. `None`: no chunk is free. `faults` is the value of
/// [`fault_count`] at which the frames' memory was last checked.
///
/// # Errors
/// `EMSGSIZE`: the frame does not fit a chunk. `EFAULT`: its memory was truncated.
fn put(
    end: &mut TxEnd,
    frames: &Frames,
    index: usize,
    faults: &mut u64,
) -> Option<Result<(), Errno>> {
    let len = frames.len(index);
    if !(FRAME_SIZE_MIN..=end.room).contains(&len) {
        return Some(Err(Errno::MSGSIZE));
    }
    let payload = frames.slices(index).get(1..).unwrap_or_default();
    // If memory is truncated during the copy, the frame has zeroes, which the guest could have sent
    // as well. The session ends when the fault is found next.
    let now = fault_count();
    if now != *faults {
        if frames.is_broken() {
            return Some(Err(Errno::FAULT));
        }
        *faults = now;
    }
    let is_put = end.put(len, |chunk| copy_between(std::iter::once(&chunk), 0, payload));
    is_put.then_some(Ok(()))
}

/// Counts frame `index` as lost, for the reason `errno`.
fn lose(sent: &mut Sent, index: usize, errno: Errno) {
    match errno {
        Errno::FAULT => sent.faulted += 1,
        Errno::MSGSIZE => sent.refused += 1,
        _ => sent.down += 1,
    }
    sent.lost |= 1 << index;
    sent.taken += 1;
}

impl PortTx for XdpTx {
    fn send(&mut self, frames: &Frames, first: usize) -> Sent {
        let Self { pair, faults, is_down, asks, replacer, asked_for, .. } = self;
        let mut outlet = pair.tx();
        let (mut sent, is_gone) = (Sent::default(), outlet.is_gone);
        let generation = outlet.generation;
        let is_lost = match &mut outlet.end {
            None => is_gone,
            Some(end) => *is_down && end.is_down(),
        };
        let Some(end) = outlet.end.as_mut().filter(|_| !is_lost) else {
            if is_lost {
                (first..frames.count()).for_each(|n| lose(&mut sent, n, Errno::NETDOWN));
            } else {
                sent.stop = Some(Stop::NoMemory);
            }
            return sent;
        };
        end.reap();
        let mut bytes = 0;
        if let Some(replacer) = replacer {
            ask(end, frames, asked_for, generation, replacer);
        }
        for index in (first..frames.count()).take(SEND_FRAMES) {
            let is_lent =
                replacer.as_ref().is_some_and(|replacer| lend(end, frames, index, replacer));
            if is_lent {
                sent.later |= 1 << index;
                sent.taken += 1;
                continue;
            }
            match put(end, frames, index, faults) {
                Some(Ok(())) => sent.taken += 1,
                Some(Err(errno)) => lose(&mut sent, index, errno),
                None => break,
            }
            bytes += frames.len(index);
            if bytes >= GROUP_BYTES {
                break;
            }
        }
        let kick = end.kick();
        *is_down = kick == TxWakeup::Down;
        if kick == TxWakeup::Full && asks.is_none() {
            // Report the last frame by `reap` later: so `reap` is called, which calls the kernel
            // again.
            let last = (first..first + sent.taken).rfind(|index| sent.lost >> index & 1 == 0);
            if let Some(last) = last {
                *asks = Some(frames.token(last));
                sent.later |= 1 << last;
            }
        }
        if sent.taken == 0 {
            sent.stop = Some(Stop::NoMemory);
        }
        sent
    }

    fn readiness(&self) -> Readiness<'_> {
        // Never report "blocked": no event tells when chunks come back.
        Readiness::Always
    }

    fn reap(&mut self, done: &mut Vec<Returned>) {
        let pair = self.pair.clone();
        let mut outlet = pair.tx();
        let recalled = outlet.returned.drain(..);
        done.extend(recalled.map(|token| Returned { token, outcome: Outcome::Recalled }));
        if let Some(end) = &mut outlet.end {
            end.reap();
            let passed = |token| Returned { token, outcome: Outcome::Passed };
            let kick = end.kick();
            if kick != TxWakeup::Full {
                done.extend(self.asks.take().map(passed));
            }
            done.extend(end.done().map(passed));
        } else {
            let asks = self.asks.take();
            done.extend(asks.map(|token| Returned { token, outcome: Outcome::Passed }));
        }
        let out = outlet.out();
        drop(outlet);
        self.watch_stuck(out);
    }

    fn recall(&mut self, done: &mut Vec<Returned>) -> usize {
        self.reap(done);
        // The frame was copied, so it counts as passed, and the port does not use its memory.
        let asks = self.asks.take().map(|token| Returned { token, outcome: Outcome::Passed });
        done.extend(asks);
        let out = self.pair.tx().out();
        if let Some(replacer) = self.replacer.as_ref().filter(|_| out > 0) {
            replacer.request(|request| request.must_return = true);
        }
        out
    }

    fn forget(&mut self) {
        self.asked_for = Asked::default();
        if let Some(replacer) = &self.replacer {
            replacer.request(|request| request.memory = Some(None));
        }
    }
}

impl Drop for XdpTx {
    fn drop(&mut self) {
        self.pair.tx().orphan();
        self.forget();
    }
}

/// A frame that has arrived, and its chunk.
#[derive(Clone, Copy, Debug)]
struct Arrived {
    chunk: u64,
    addr: u64,
    len: u32,
}

/// The receiving half of a pair of an AF_XDP port.
#[derive(Debug)]
pub(super) struct XdpRx {
    pair: Arc<Pair>,
    /// Frames that were taken from the ring and are not released yet, the oldest first.
    arrived: VecDeque<Arrived>,
    /// The frames of `arrived` as a burst that can be lent; empty if it must be built again.
    frames: Frames,
    /// The memory that is shared with the kernel, and slices of it.
    memory: SliceList,
    /// The number of the socket to which the fields above belong; `None`: there was none yet.
    generation: Option<u64>,
    /// Number of calls in a row that found no frame.
    idle_looks: u32,
    is_broken: bool,
}

impl XdpRx {
    /// Makes the half.
    ///
    /// # Errors
    /// `ENOMEM`: no memory for a burst.
    pub(super) fn new(pair: Arc<Pair>) -> Result<Self, Errno> {
        Ok(Self {
            pair,
            arrived: VecDeque::with_capacity(FRAMES_MAX),
            frames: in_own_memory(Frames::new).map_err(|_| Errno::NOMEM)?,
            memory: SliceList::new(),
            generation: None,
            idle_looks: 0,
            is_broken: false,
        })
    }

    /// Takes arrived frames from the ring, until `max` frames wait here.
    fn gather(&mut self, max: usize) {
        let pair = self.pair.clone();
        let mut inlet = pair.rx();
        if self.generation != Some(inlet.generation) {
            self.arrived.clear();
            self.frames.release();
            self.memory.release();
            self.generation = Some(inlet.generation);
        }
        self.is_broken = inlet.is_broken;
        let Some(end) = inlet.end.as_mut().filter(|_| self.frames.count() == 0) else { return };
        while self.arrived.len() < max {
            let Some((chunk, frame)) = end.take() else { break };
            self.arrived.push_back(Arrived { chunk, addr: frame.addr, len: frame.len });
        }
        if self.arrived.is_empty() {
            self.note_idle(&mut inlet);
            return;
        }
        self.idle_looks = 0;
        if self.memory.memory().region_count() == 0 {
            let Ok(memory) = SliceList::of_mapping(&end.memory, &[]) else { return };
            self.memory = memory;
        }
        drop(inlet);
        for Arrived { addr, len, .. } in &self.arrived {
            self.memory.clear();
            let (addr, last) = (GuestAddr(*addr), &mut LastHit::default());
            // `Chunks` has checked that each frame lies in a chunk.
            if self.memory.resolve(addr, *len, last).is_ok() {
                self.frames.push(&RawNetHeader::default(), self.memory.all(), 0, *len as usize);
            }
        }
        self.memory.clear();
    }

    /// Counts a call that found no frame. A socket whose interface is deleted stays readable, so it
    /// is checked for an error after [`IDLE_LOOKS`] such calls.
    fn note_idle(&mut self, inlet: &mut Inlet) {
        self.idle_looks = self.idle_looks.wrapping_add(1);
        if self.idle_looks.is_multiple_of(IDLE_LOOKS) {
            let outlet = self.pair.tx();
            inlet.is_broken |= outlet.end.as_ref().is_some_and(TxEnd::is_unbound);
            self.is_broken = inlet.is_broken;
        }
    }

    /// Returns the chunks of the first `count` waiting frames to the kernel.
    fn give_back(&mut self, count: usize) {
        let mut inlet = self.pair.rx();
        let count = count.min(self.arrived.len());
        if self.generation == Some(inlet.generation)
            && let Some(end) = &mut inlet.end
        {
            self.arrived.drain(..count).for_each(|frame| end.give_back(frame.chunk));
            end.publish();
        }
    }
}

impl PortRx for XdpRx {
    fn incoming(&mut self, max: usize) -> Incoming<'_> {
        self.gather(max.min(FRAMES_MAX));
        // Have the caller use `recv`, whose error reports that the interface is deleted.
        if self.is_broken { Incoming::Read } else { Incoming::Lent(&self.frames) }
    }

    fn release(&mut self, count: usize) {
        self.give_back(count);
        // Build the burst again in the next call of `incoming`, from the remaining frames.
        self.frames.clear();
    }

    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno> {
        self.gather(1);
        if self.frames.count() == 0 {
            return Err(if self.is_broken { Errno::NODEV } else { Errno::AGAIN });
        }
        let copied = copy_between(buffers.iter(), 0, self.frames.slices(0));
        self.release(1);
        Ok(copied)
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Fd(self.pair.watched())
    }
}

impl Drop for XdpRx {
    fn drop(&mut self) {
        in_own_memory(|| self.give_back(usize::MAX));
    }
}
