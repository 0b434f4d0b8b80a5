//! The two halves of a pair of an AF_XDP port.
//!
//! Both ends of a socket lie behind locks, each of which one half takes once for a burst and nobody
//! else but the control thread's calls: an interface that comes back gets another socket, to which
//! halves that workers own lead then.

use super::socket::{FRAME_SIZE_MIN, Kick, RxEnd, TxEnd};
use crate::net::{
    FRAMES_MAX, Frames, GROUP_BYTES, Incoming, Outcome, PortRx, PortTx, Readiness, Returned, Sent,
    Stop, Token,
};
use manyring_memory::{
    GuestAddr, GuestSlice, LastHit, SliceList, copy_between, fault_count, in_own_memory,
};
use manyring_wire::net::RawHeader;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Frames of a call at most: the kernel sends so many before it returns.
const SEND_FRAMES: usize = 32;

/// The socket of a queue pair: both ends, which are replaced when the interface comes back.
#[derive(Debug)]
pub(super) struct Pair {
    tx: Mutex<TxEnd>,
    rx: Mutex<Inlet>,
}

/// The receiving end, and which one of the pair's life it is.
#[derive(Debug)]
pub(super) struct Inlet {
    pub(super) end: RxEnd,
    generation: u64,
}

impl Pair {
    pub(super) fn new(tx: TxEnd, end: RxEnd) -> Self {
        Self { tx: Mutex::new(tx), rx: Mutex::new(Inlet { end, generation: 0 }) }
    }

    pub(super) fn tx(&self) -> MutexGuard<'_, TxEnd> {
        self.tx.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn rx(&self) -> MutexGuard<'_, Inlet> {
        self.rx.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts the ends of another socket in the place of these.
    pub(super) fn replace(&self, tx: TxEnd, end: RxEnd) {
        *self.tx() = tx;
        let mut inlet = self.rx();
        inlet.end = end;
        inlet.generation += 1;
    }
}

/// The sending half.
#[derive(Debug)]
pub(super) struct XdpTx {
    pair: Arc<Pair>,
    fd: Arc<OwnedFd>,
    /// The value of [`fault_count`] up to which the frames' memory has been checked.
    faults: u64,
    /// The interface was down when a frame was last sent.
    is_down: bool,
    /// A frame whose copy is sent already, which asks for another call of [`PortTx::reap`]: frames
    /// wait in the ring that the kernel had no room for.
    asks: Option<Token>,
}

impl XdpTx {
    pub(super) fn new(pair: Arc<Pair>, fd: Arc<OwnedFd>) -> Self {
        Self { pair, fd, faults: fault_count(), is_down: false, asks: None }
    }
}

/// Copies frame `index` into a chunk. `None`: there is no chunk. `faults` is the value of
/// [`fault_count`] up to which the frames' memory has been checked.
///
/// # Errors
/// `EMSGSIZE`: the frame does not fit a chunk. `EFAULT`: its memory was cut away.
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
    // Memory that is cut away during the copy leaves zeroes in the frame, which the guest could
    // have sent as well; its session ends by the next fault that is found.
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

/// Counts frame `index` as lost.
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
        let Self { pair, faults, is_down, asks, .. } = self;
        let mut end = pair.tx();
        end.reap();
        let mut sent = Sent::default();
        if *is_down && end.kick() == Kick::Down {
            (first..frames.count()).for_each(|index| lose(&mut sent, index, Errno::NETDOWN));
            return sent;
        }
        let mut bytes = 0;
        for index in (first..frames.count()).take(SEND_FRAMES) {
            match put(&mut end, frames, index, faults) {
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
        *is_down = kick == Kick::Down;
        if kick == Kick::Full && asks.is_none() {
            // The last frame that was taken comes back by `reap`, which tries again.
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
        Readiness::Fd(self.fd.as_fd())
    }

    fn reap(&mut self, done: &mut Vec<Returned>) {
        let Some(token) = self.asks else { return };
        let mut end = self.pair.tx();
        end.reap();
        if end.kick() != Kick::Full {
            self.asks = None;
            done.push(Returned { token, outcome: Outcome::Passed });
        }
    }

    fn recall(&mut self, done: &mut Vec<Returned>) -> usize {
        // Its bytes were copied: the port has nothing of the guest.
        let asks = self.asks.take().map(|token| Returned { token, outcome: Outcome::Passed });
        done.extend(asks);
        0
    }
}

/// A frame that has arrived, in its chunk.
#[derive(Clone, Copy, Debug)]
struct Arrived {
    chunk: u64,
    addr: u64,
    len: u32,
}

/// The receiving half.
#[derive(Debug)]
pub(super) struct XdpRx {
    pair: Arc<Pair>,
    fd: Arc<OwnedFd>,
    /// Frames that were taken out of the ring and not released, oldest first.
    arrived: VecDeque<Arrived>,
    /// These, as they are lent; empty if it must be made anew.
    frames: Frames,
    /// Slices of the shared memory, and the memory.
    memory: SliceList,
    /// The socket that all of these belong to; `None`: none yet.
    generation: Option<u64>,
}

impl XdpRx {
    /// # Errors
    /// `ENOMEM`.
    pub(super) fn new(pair: Arc<Pair>, fd: Arc<OwnedFd>) -> Result<Self, Errno> {
        Ok(Self {
            pair,
            fd,
            arrived: VecDeque::with_capacity(FRAMES_MAX),
            frames: in_own_memory(Frames::new).map_err(|_| Errno::NOMEM)?,
            memory: SliceList::new(),
            generation: None,
        })
    }

    /// Takes what has arrived out of the ring, up to `max` frames together.
    fn gather(&mut self, max: usize) {
        let mut inlet = self.pair.rx();
        if self.generation != Some(inlet.generation) {
            self.arrived.clear();
            self.frames.release();
            let Ok(memory) = SliceList::of_mapping(&inlet.end.memory, &[]) else { return };
            (self.memory, self.generation) = (memory, Some(inlet.generation));
        }
        if self.frames.count() > 0 {
            return;
        }
        while self.arrived.len() < max {
            let Some((chunk, frame)) = inlet.end.take() else { break };
            self.arrived.push_back(Arrived { chunk, addr: frame.addr, len: frame.len });
        }
        drop(inlet);
        for Arrived { addr, len, .. } in &self.arrived {
            self.memory.clear();
            let (addr, last) = (GuestAddr(*addr), &mut LastHit::default());
            // Each lies in a chunk, which was checked.
            if self.memory.resolve(addr, *len, last).is_ok() {
                self.frames.push(&RawHeader::default(), self.memory.all(), 0, *len as usize);
            }
        }
        self.memory.clear();
    }

    /// Gives the chunks of frames that wait back to the kernel.
    fn give_back(&mut self, count: usize) {
        let mut inlet = self.pair.rx();
        let count = count.min(self.arrived.len());
        if self.generation == Some(inlet.generation) {
            self.arrived.drain(..count).for_each(|frame| inlet.end.give_back(frame.chunk));
            inlet.end.publish();
        }
    }
}

impl PortRx for XdpRx {
    fn incoming(&mut self, max: usize) -> Incoming<'_> {
        self.gather(max.min(FRAMES_MAX));
        Incoming::Lent(&self.frames)
    }

    fn release(&mut self, count: usize) {
        self.give_back(count);
        // What is left is lent anew.
        self.frames.clear();
    }

    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno> {
        self.gather(1);
        if self.frames.count() == 0 {
            return Err(Errno::AGAIN);
        }
        let copied = copy_between(buffers.iter(), 0, self.frames.slices(0));
        self.release(1);
        Ok(copied)
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Fd(self.fd.as_fd())
    }
}

impl Drop for XdpRx {
    fn drop(&mut self) {
        in_own_memory(|| self.give_back(usize::MAX));
    }
}
