//! `late`: a decorator for tests whose port finishes frames later than `send` returns, in any
//! order.
//!
//! ```text
//! send      keeps each frame for a random number of calls of `reap`; passes a few at once
//! reap      passes frames on that were kept for long enough, and only then reads their bytes
//! recall    returns frames that were not kept for long enough: their sending has not begun
//! ```
//! If a device returns the memory of a frame to its driver too early, the host gets the bytes that
//! the driver has written there since, and the test fails. The decorator reads no clock. A port
//! that `tells` has a timer, which only causes calls of `reap`; the effect of a call follows from
//! the seed.

use super::decorator::{Decorated, Decorator};
use super::{Frames, Outcome, Port, PortRx, PortTx, Readiness, Returned, Sent, Token};
use manyring_memory::SliceList;
use manyring_wire::net::RawNetHeader;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// How long frames are kept, and from which seed the delays are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LateOptions {
    /// Seed of the first sending half; each further half has the next number.
    pub seed: u64,
    /// The most calls of `reap` for which a frame is kept.
    pub calls_max: u32,
    /// True if a timer makes the port ready when `reap` should be called; false: the device must
    /// poll.
    pub tells: bool,
}

/// Nanoseconds until the timer of a port that `tells` causes the next call.
const CALL_NS: i64 = 100_000;
/// One frame in this many passes at once, and one burst in this many is cut short behind a frame.
const AT_ONCE: u64 = 8;

/// A port that finishes frames late, in any order.
pub type LatePort = Decorated<Late>;

impl LatePort {
    /// Decorates `port`.
    #[must_use]
    pub fn new(port: Arc<dyn Port>, options: LateOptions) -> Self {
        let halves = AtomicU64::new(0);
        Self::around(port, Late { options, halves, grip: Grip::default() })
    }

    /// Returns a handle by which a test makes the port hold all frames, and release them.
    #[must_use]
    pub fn grip(&self) -> Grip {
        self.decorator.grip.clone()
    }
}

/// Makes the halves of a port hold all frames, and release them. Clones share the setting.
#[derive(Clone, Debug, Default)]
pub struct Grip(Arc<Held>);

#[derive(Debug, Default)]
struct Held {
    /// True if no frame is finished for now.
    holds: AtomicBool,
    /// True if no frame can be recalled, as if its sending had begun.
    has_begun: AtomicBool,
    /// The number of frames that the halves keep now.
    count: AtomicUsize,
    timers: Mutex<Vec<Weak<OwnedFd>>>,
}

impl Grip {
    /// Holds all frames from now on; with `has_begun` they cannot be recalled either.
    pub fn hold(&self, has_begun: bool) {
        self.0.has_begun.store(has_begun, Ordering::SeqCst);
        self.0.holds.store(true, Ordering::SeqCst);
    }

    /// Ends the holding: frames are finished, and can be recalled, again.
    pub fn let_go(&self) {
        self.0.holds.store(false, Ordering::SeqCst);
        self.0.has_begun.store(false, Ordering::SeqCst);
        let timers = self.0.timers.lock().unwrap_or_else(PoisonError::into_inner);
        timers.iter().filter_map(Weak::upgrade).for_each(|timer| arm(&timer));
    }

    /// Returns the number of frames that the port has now.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.count.load(Ordering::SeqCst)
    }

    fn holds(&self) -> bool {
        self.0.holds.load(Ordering::SeqCst)
    }
}

/// Has `timer` become readable once more, after [`CALL_NS`].
fn arm(timer: &OwnedFd) {
    let never = Timespec { tv_sec: 0, tv_nsec: 0 };
    let once =
        Itimerspec { it_interval: never, it_value: Timespec { tv_sec: 0, tv_nsec: CALL_NS } };
    // An error is impossible: the time is valid.
    let _ = timerfd_settime(timer, TimerfdTimerFlags::empty(), &once);
}

/// The decorator of a [`LatePort`]: its options, and the grip on its frames.
#[derive(Debug)]
pub struct Late {
    options: LateOptions,
    /// The number of sending halves that were made: each gets its own seed.
    halves: AtomicU64,
    grip: Grip,
}

impl Late {
    /// Wraps a sending half.
    ///
    /// # Errors
    /// The error of `timerfd_create`.
    fn half(&self, inner: Box<dyn PortTx>) -> Result<LateTx, Errno> {
        let LateOptions { seed, calls_max, tells } = self.options;
        let timer = if tells {
            let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
            let timer = Arc::new(timerfd_create(TimerfdClockId::Monotonic, flags)?);
            let mut timers = self.grip.0.timers.lock().unwrap_or_else(PoisonError::into_inner);
            timers.retain(|timer| timer.strong_count() > 0);
            timers.push(Arc::downgrade(&timer));
            Some(timer)
        } else {
            None
        };
        Ok(LateTx {
            inner,
            frames: Vec::new(),
            random: seed.wrapping_add(self.halves.fetch_add(1, Ordering::Relaxed)),
            calls_max,
            pass: Frames::new().map_err(|_| Errno::NOMEM)?,
            timer,
            grip: self.grip.clone(),
        })
    }
}

impl Decorator for Late {
    fn around_tx(&self, inner: Box<dyn PortTx>) -> Result<Box<dyn PortTx>, Errno> {
        Ok(Box::new(self.half(inner)?))
    }

    fn around_rx(&self, inner: Box<dyn PortRx>) -> Result<Box<dyn PortRx>, Errno> {
        Ok(inner)
    }
}

/// A kept frame. Its bytes stay in the driver's memory until the frame is passed on.
#[derive(Debug)]
struct Kept {
    token: Token,
    header: RawNetHeader,
    payload: SliceList,
    len: usize,
    calls_left: u32,
}

#[derive(Debug)]
struct LateTx {
    inner: Box<dyn PortTx>,
    /// The frames that are sent later. Each frame has a token of its own, so there are at most as
    /// many frames as the ring has entries.
    frames: Vec<Kept>,
    random: u64,
    calls_max: u32,
    /// Holds one frame, for the inner port.
    pass: Frames,
    timer: Option<Arc<OwnedFd>>,
    grip: Grip,
}

impl LateTx {
    /// Returns a pseudo-random number below `end` (Steele and Lea's splitmix64).
    fn below(&mut self, end: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % end
    }

    /// Arms the timer, unless no frame is kept or all are held.
    fn arm(&self) {
        if let Some(timer) = &self.timer
            && !self.frames.is_empty()
            && !self.grip.holds()
        {
            arm(timer);
        }
    }

    fn keep(&mut self, frames: &Frames, index: usize) {
        let mut payload = SliceList::new();
        if let Some(pieces) = frames.payload(index) {
            payload.extend(pieces);
        }
        let calls = self.below(u64::from(self.calls_max) + 1);
        self.frames.push(Kept {
            token: frames.token(index),
            header: frames.header(index),
            payload,
            len: frames.len(index),
            calls_left: u32::try_from(calls).unwrap_or(u32::MAX),
        });
        self.grip.0.count.fetch_add(1, Ordering::SeqCst);
    }

    /// Removes the frame at `index` from the kept frames.
    fn remove(&mut self, index: usize) -> Kept {
        self.grip.0.count.fetch_sub(1, Ordering::SeqCst);
        self.frames.swap_remove(index)
    }

    /// Passes the frame at `index` on. Returns false if the inner port does not take it now.
    fn finish(&mut self, index: usize, done: &mut Vec<Returned>) -> bool {
        let Kept { token, header, payload, len, .. } = &self.frames[index];
        self.pass.clear();
        self.pass.push_as(*token, header, payload.all(), 0, *len);
        let sent = self.inner.send(&self.pass, 0);
        self.pass.release();
        if sent.taken == 0 {
            return false;
        }
        let token = self.remove(index).token;
        let outcome = match sent {
            // The inner port will report this frame later.
            Sent { later: 1, .. } => return true,
            Sent { refused: 1, .. } | Sent { misplaced: 1, .. } => Outcome::Refused,
            Sent { down: 1, .. } => Outcome::Down,
            Sent { faulted: 1, .. } => Outcome::Faulted,
            _ => Outcome::Passed,
        };
        done.push(Returned { token, outcome });
        true
    }
}

impl PortTx for LateTx {
    fn checks_place(&self) -> bool {
        self.inner.checks_place()
    }

    fn forget(&mut self) {
        self.inner.forget();
    }

    fn send(&mut self, frames: &Frames, first: usize) -> Sent {
        let mut sent = Sent::default();
        for index in first..frames.count() {
            if self.below(AT_ONCE) == 0 && !self.grip.holds() {
                self.pass.clear();
                if let Some(payload) = frames.payload(index) {
                    let (token, header) = (frames.token(index), frames.header(index));
                    self.pass.push_as(token, &header, payload, 0, frames.len(index));
                }
                let one = self.inner.send(&self.pass, 0);
                self.pass.release();
                if !sent.add_one(index, &one) {
                    break;
                }
            } else {
                self.keep(frames, index);
                sent.later |= 1 << index;
            }
            sent.taken += 1;
            if self.below(AT_ONCE) == 0 {
                break;
            }
        }
        self.arm();
        sent
    }

    fn readiness(&self) -> Readiness<'_> {
        self.inner.readiness()
    }

    fn reap(&mut self, done: &mut Vec<Returned>) {
        self.inner.reap(done);
        if self.grip.holds() {
            return;
        }
        for index in (1..self.frames.len()).rev() {
            let other = self.below(index as u64 + 1);
            self.frames.swap(index, usize::try_from(other).unwrap_or(index));
        }
        let mut index = 0;
        while index < self.frames.len() {
            let kept = &mut self.frames[index];
            if kept.calls_left > 0 {
                kept.calls_left -= 1;
                index += 1;
            } else if !self.finish(index, done) {
                index += 1;
            }
        }
        self.arm();
    }

    fn recall(&mut self, done: &mut Vec<Returned>) -> usize {
        let mut index = 0;
        while index < self.frames.len() && !self.grip.0.has_begun.load(Ordering::SeqCst) {
            if self.frames[index].calls_left == 0 && !self.grip.holds() {
                index += 1;
                continue;
            }
            let token = self.remove(index).token;
            done.push(Returned { token, outcome: Outcome::Recalled });
        }
        self.frames.len() + self.inner.recall(done)
    }

    fn done(&self) -> Readiness<'_> {
        match &self.timer {
            Some(timer) => Readiness::Fd(timer.as_fd()),
            None => Readiness::Never,
        }
    }
}

impl Drop for LateTx {
    fn drop(&mut self) {
        self.grip.0.count.fetch_sub(self.frames.len(), Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests;
