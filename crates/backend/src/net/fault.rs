//! `fault`: a decorator for tests that makes another port lose or corrupt frames, or refuse to take
//! them.

use super::decorator::{Decorated, Decorator};
use super::{Frames, Port, PortRx, PortTx, Readiness, Returned, Sent, Stop};
use manyring_memory::GuestSlice;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::sync::Arc;

/// Which frames fail, and how. Each half counts its own frames, from 1; 0: none fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultOptions {
    /// Every n-th frame that is sent is lost, but reported as sent.
    pub drop_tx_every: u64,
    /// Every n-th frame that arrives is lost.
    pub drop_rx_every: u64,
    /// Every n-th frame that arrives has its last byte inverted.
    pub corrupt_rx_every: u64,
    /// Before every n-th frame the port refuses frames once as if it were full, and reports at once
    /// that it takes frames again.
    pub block_tx_every: u64,
    /// Before every n-th frame the host is out of memory, once.
    pub no_memory_every: u64,
    /// Every n-th attempt to receive fails with `EIO`; the frame is received at the next attempt.
    pub recv_error_every: u64,
}

const fn is_nth(n: u64, every: u64) -> bool {
    every != 0 && n.is_multiple_of(every)
}

/// A port that loses, spoils or refuses frames of another port, by a plan.
pub type FaultPort = Decorated<FaultOptions>;

impl FaultPort {
    /// Decorates `port`.
    #[must_use]
    pub fn new(port: Arc<dyn Port>, options: FaultOptions) -> Self {
        Self::around(port, options)
    }
}

impl Decorator for FaultOptions {
    fn kind(&self, _inner: &'static str) -> &'static str {
        "fault"
    }

    fn around_tx(&self, inner: Box<dyn PortTx>) -> Result<Box<dyn PortTx>, Errno> {
        Ok(Box::new(FaultTx {
            inner,
            options: *self,
            done: 0,
            stopped: Stopped::default(),
            is_blocked: false,
            ready: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            pass: Frames::new().map_err(|_| Errno::NOMEM)?,
        }))
    }

    fn around_rx(&self, inner: Box<dyn PortRx>) -> Result<Box<dyn PortRx>, Errno> {
        Ok(Box::new(FaultRx { inner, options: *self, attempts: 0, frames: 0 }))
    }
}

/// The stops that were already made before the next frame. Each is made once.
#[derive(Debug, Default)]
struct Stopped {
    blocked: bool,
    starved: bool,
}

#[derive(Debug)]
struct FaultTx {
    inner: Box<dyn PortTx>,
    options: FaultOptions,
    /// Number of frames that were sent or lost so far.
    done: u64,
    stopped: Stopped,
    /// True if this decorator, and not the inner port, made the last stop.
    is_blocked: bool,
    /// An eventfd that is always writable: the event to wait for after a stop of this decorator.
    ready: OwnedFd,
    /// Holds one frame, for the inner port.
    pass: Frames,
}

impl FaultTx {
    /// Returns a stop before frame number `n`, once for each reason; `None`: no stop is due.
    fn stop_before(&mut self, n: u64) -> Option<Stop> {
        if is_nth(n, self.options.block_tx_every) && !self.stopped.blocked {
            self.stopped.blocked = true;
            self.is_blocked = true;
            return Some(Stop::Blocked);
        }
        if is_nth(n, self.options.no_memory_every) && !self.stopped.starved {
            self.stopped.starved = true;
            return Some(Stop::NoMemory);
        }
        None
    }

    fn send_one(&mut self, frames: &Frames, index: usize) -> Sent {
        self.pass.clear();
        if let Some(payload) = frames.payload(index) {
            let (token, header) = (frames.token(index), frames.header(index));
            self.pass.push_as(token, &header, payload, 0, frames.len(index));
        }
        let sent = self.inner.send(&self.pass, 0);
        // Release the copied slices: they would keep the guest memory of the frame mapped.
        self.pass.release();
        sent
    }
}

impl PortTx for FaultTx {
    fn checks_place(&self) -> bool {
        self.inner.checks_place()
    }

    fn forget(&mut self) {
        self.inner.forget();
    }

    fn send(&mut self, frames: &Frames, first: usize) -> Sent {
        let mut sent = Sent::default();
        self.is_blocked = false;
        for index in first..frames.count() {
            let n = self.done + 1;
            sent.stop = self.stop_before(n);
            if sent.stop.is_some() {
                break;
            }
            if !is_nth(n, self.options.drop_tx_every) {
                let one = self.send_one(frames, index);
                if !sent.add_one(index, &one) {
                    break;
                }
            }
            sent.taken += 1;
            self.done = n;
            self.stopped = Stopped::default();
        }
        sent
    }

    fn readiness(&self) -> Readiness<'_> {
        if self.is_blocked { Readiness::Fd(self.ready.as_fd()) } else { self.inner.readiness() }
    }

    fn reap(&mut self, done: &mut Vec<Returned>) {
        self.inner.reap(done);
    }

    fn recall(&mut self, done: &mut Vec<Returned>) -> usize {
        self.inner.recall(done)
    }

    fn done(&self) -> Readiness<'_> {
        self.inner.done()
    }
}

#[derive(Debug)]
struct FaultRx {
    inner: Box<dyn PortRx>,
    options: FaultOptions,
    attempts: u64,
    frames: u64,
}

impl PortRx for FaultRx {
    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno> {
        self.attempts += 1;
        if is_nth(self.attempts, self.options.recv_error_every) {
            return Err(Errno::IO);
        }
        loop {
            let len = self.inner.recv(buffers)?;
            self.frames += 1;
            if is_nth(self.frames, self.options.drop_rx_every) {
                // Leave the loop: if each frame is lost and the port always has frames, it would
                // never end.
                if self.options.drop_rx_every == 1 {
                    return Err(Errno::AGAIN);
                }
                continue;
            }
            if is_nth(self.frames, self.options.corrupt_rx_every) {
                invert_byte(buffers, len.saturating_sub(1));
            }
            return Ok(len);
        }
    }

    fn readiness(&self) -> Readiness<'_> {
        self.inner.readiness()
    }
}

/// Inverts byte `at` of `buffers`.
fn invert_byte(buffers: &[GuestSlice], mut at: usize) {
    for slice in buffers {
        if at < slice.len() {
            let byte = slice.split_at(at).1;
            let mut value = [0];
            byte.read_into(&mut value);
            byte.write_byte(!value[0]);
            return;
        }
        at -= slice.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::FRAMES_MAX;
    use crate::net::null::NullPort;
    use manyring_memory::{Mapping, SliceList, copy_from_slices};
    use manyring_wire::net::HEADER_SIZE;
    use manyring_wire::net::RawNetHeader;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::sync::Mutex;

    /// Takes this many frames, then blocks; remembers the first bytes of each.
    #[derive(Debug, Default)]
    struct Keeper {
        room: usize,
        kept: Arc<Mutex<Vec<[u8; HEADER_SIZE + 1]>>>,
    }

    impl PortTx for Keeper {
        fn send(&mut self, frames: &Frames, first: usize) -> Sent {
            let mut sent = Sent::default();
            for index in first..frames.count() {
                if self.room == 0 {
                    sent.stop = Some(Stop::Blocked);
                    break;
                }
                self.room -= 1;
                sent.taken += 1;
                let mut bytes = [0; HEADER_SIZE + 1];
                copy_from_slices(frames.slices(index), &mut bytes);
                self.kept.lock().unwrap().push(bytes);
            }
            sent
        }

        fn readiness(&self) -> Readiness<'_> {
            Readiness::Never
        }
    }

    fn tx(options: FaultOptions, room: usize) -> (FaultTx, Arc<Mutex<Vec<[u8; 13]>>>) {
        let keeper = Keeper { room, ..Keeper::default() };
        let kept = keeper.kept.clone();
        let tx = FaultTx {
            inner: Box::new(keeper),
            options,
            done: 0,
            stopped: Stopped::default(),
            is_blocked: false,
            ready: eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
            pass: Frames::new().unwrap(),
        };
        (tx, kept)
    }

    /// A full burst: the number of a frame is in its header and in its first byte.
    fn burst(memory: &Arc<Mapping>) -> Frames {
        let mut frames = Frames::new().unwrap();
        let places: Vec<_> = (0..FRAMES_MAX as u64).map(|at| (at, 1)).collect();
        let slices = SliceList::of_mapping(memory, &places).unwrap();
        for n in 0..FRAMES_MAX {
            let n = u8::try_from(n).unwrap();
            let piece = slices.pieces(n.into()..usize::from(n) + 1);
            piece[0].write_byte(n);
            let header = RawNetHeader { gso_size: u16::from(n).into(), ..RawNetHeader::default() };
            frames.push(&header, piece, 0, 1);
        }
        frames
    }

    #[test]
    fn every_nth_frame_is_lost_and_the_rest_stays_in_order() {
        let memory = Arc::new(Mapping::anonymous(4096).unwrap());
        let frames = burst(&memory);
        let (mut tx, kept) = tx(FaultOptions { drop_tx_every: 3, ..FaultOptions::default() }, 99);
        assert_eq!(tx.send(&frames, 1), Sent { taken: 63, ..Sent::default() });
        let kept = kept.lock().unwrap();
        let expected: Vec<_> = (1..64).filter(|n| n % 3 != 0).collect();
        assert_eq!(kept.iter().map(|bytes| bytes[HEADER_SIZE]).collect::<Vec<_>>(), expected);
        assert!(kept.iter().all(|bytes| bytes[4] == bytes[HEADER_SIZE]), "headers stay too");
    }

    #[test]
    fn memory_of_a_frame_that_was_sent_is_not_kept() {
        let memory = Arc::new(Mapping::anonymous(4096).unwrap());
        let frames = burst(&memory);
        let (mut tx, _) = tx(FaultOptions::default(), 99);
        assert_eq!(tx.send(&frames, 0).taken, FRAMES_MAX);
        drop(frames);
        assert_eq!(Arc::strong_count(&memory), 1, "a front-end that took it back has it still");
    }

    #[test]
    fn every_nth_frame_stops_once_for_each_reason_and_is_then_sent() {
        let memory = Arc::new(Mapping::anonymous(4096).unwrap());
        let frames = burst(&memory);
        let options =
            FaultOptions { block_tx_every: 4, no_memory_every: 8, ..FaultOptions::default() };
        let (mut tx, kept) = tx(options, 10);
        let stop = |taken, stop| Sent { taken, stop: Some(stop), ..Sent::default() };
        assert_eq!(tx.send(&frames, 0), stop(3, Stop::Blocked));
        let Readiness::Fd(fd) = tx.readiness() else { panic!("there is something to wait for") };
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
        assert_eq!(poll(&mut fds, Some(&Timespec { tv_sec: 5, tv_nsec: 0 })), Ok(1));
        assert_eq!(tx.send(&frames, 3), stop(4, Stop::Blocked));
        assert_eq!(tx.send(&frames, 7), stop(0, Stop::NoMemory));
        // The inner port made this stop.
        assert_eq!(tx.send(&frames, 7), stop(3, Stop::Blocked));
        assert!(matches!(tx.readiness(), Readiness::Never));
        let numbers: Vec<_> = kept.lock().unwrap().iter().map(|bytes| bytes[12]).collect();
        assert_eq!(numbers, (0..10).collect::<Vec<_>>());
    }

    #[test]
    fn what_comes_is_lost_spoiled_or_fails() {
        let memory = Mapping::anonymous(4096).unwrap();
        let port = |options| FaultPort::new(Arc::new(NullPort::new(1, 60)), options);
        let receive = |rx: &mut dyn PortRx| -> Result<u8, Errno> {
            // The last byte lies alone in its buffer.
            let buffers = [memory.slice(0, 71).unwrap(), memory.slice(71, 900).unwrap()];
            assert_eq!(rx.recv(&buffers)?, 72);
            let mut last = [0];
            buffers[1].read_into(&mut last);
            Ok(last[0])
        };
        let options = FaultOptions {
            corrupt_rx_every: 2,
            recv_error_every: 3,
            drop_rx_every: 4,
            ..FaultOptions::default()
        };
        let port_with_all = port(options);
        let mut rx = port_with_all.open_rx(0).unwrap();
        let right = 45;
        let got: Vec<_> = (0..6).map(|_| receive(&mut *rx)).collect();
        // Frames 1, 2, -, 3, (4 is lost) 5, -.
        let failed = Err(Errno::IO);
        assert_eq!(got, [Ok(right), Ok(!right), failed, Ok(right), Ok(right), failed]);
        assert_eq!(receive(&mut *rx), Ok(!right), "the 6th");
        let nothing = port(FaultOptions { drop_rx_every: 1, ..FaultOptions::default() });
        assert_eq!(receive(&mut *nothing.open_rx(0).unwrap()), Err(Errno::AGAIN));
    }
}
