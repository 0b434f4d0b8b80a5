//! Decides when the buffers of transmitted frames are returned to the driver: at once, or several
//! together.
//!
//! Linux holds back what a program writes to a TCP socket while a frame of that socket is in the
//! transmitq ("autocorking", "small queues"). If a device returns the buffer of each small frame at
//! once, the guest sends the next small frame. If the device returns the buffer a little later, the
//! guest sends all that was written meanwhile in one longer frame, and both sides have less work
//! for each byte. A guest that sends a request and waits for the answer gains nothing, and pays for
//! the delay.
//!
//! No rate tells these two guests apart. But the frames do: they become longer, or they do not. So
//! the policy tries it, a group of frames (an *epoch*) at a time:
//!
//! ```text
//! an epoch ends (128 frames, without a pause of a millisecond):
//! off:    the frames were small and came fast, and it is time to try again?
//!         remember their mean size, and hold the buffers of the next epoch: a trial
//! trial:  the mean size has grown by a sixteenth?  on
//!         else off, and the next trial is twice as far away
//! on:     the mean size is still so much larger than without?  on; now and then one epoch is
//!         without, to see what that size is today
//!         else off
//! a pause:  the buffers are returned at once from now on
//! ```
//! 1. A trial ends after a quarter of an epoch if the frames have not grown at all by then. This
//!    bounds the cost of useless trials: 32 delays in 1024 frames at first, then in 2048, 4096, ..
//! 2. The delay is short, because a guest waits that has filled its ring, or a socket's part of the
//!    ring. A group is never more than a quarter of the ring.
//!
//! The policy gets the time as an argument, and reads no clock.

/// The longest time for which a buffer is held, in nanoseconds. Of 12, 25, 40, 50, 100 and 200 us,
/// 25 us was the best over several streams (docs/design/0007).
pub(crate) const KEEP_NS_MAX: u64 = 25_000;
/// A group is returned when it has this many frames or bytes.
pub(crate) const GROUP_FRAMES_MAX: usize = 32;
pub(crate) const GROUP_BYTES_MAX: u64 = 16 << 10;

/// Frames in an epoch, and the number of frames after which a failing trial may be recognised.
const EPOCH_FRAMES: u64 = 128;
const GLANCE_FRAMES: u64 = 32;
/// Frames of this mean size or more gain nothing from being longer.
const SMALL_BYTES: u64 = 1024;
/// Frames whose average gap is longer than this many nanoseconds have no others to be merged with.
const GAP_NS_MAX: u64 = 150_000;
/// After a gap of this many nanoseconds, frames are not compared with those before it.
const PAUSE_NS: u64 = 1_000_000;
/// Epochs between a trial that failed and the next one: at first, and at most.
const WAIT_MIN: u32 = 8;
const WAIT_MAX: u32 = 256;
/// Epochs in a row in which buffers are held, before one in which they are not.
const ON_MAX: u32 = 16;

/// How the buffers of an epoch are returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReclaimPhase {
    /// At once.
    Off,
    /// Held, to see whether the frames become longer.
    Trial,
    /// Held, because the frames became longer.
    On,
}

/// The policy of one transmitq.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReclaimPolicy {
    phase: ReclaimPhase,
    /// Mean bytes of a frame in the last epoch in which buffers were not held.
    size_without: u64,
    /// How many epochs `phase` has lasted so far.
    lasted: u32,
    /// The number of epochs between two trials.
    wait: u32,
    /// The present epoch: its beginning, its last burst, its frames and bytes.
    began_ns: u64,
    last_ns: u64,
    frames: u64,
    bytes: u64,
}

impl ReclaimPolicy {
    pub(crate) fn new() -> Self {
        Self {
            phase: ReclaimPhase::Off,
            size_without: 0,
            lasted: 0,
            wait: 0,
            began_ns: 0,
            last_ns: 0,
            frames: 0,
            bytes: 0,
        }
    }

    /// True while the buffers of sent frames must be held for a moment.
    #[inline]
    pub(crate) fn keeps(&self) -> bool {
        self.phase != ReclaimPhase::Off
    }

    /// Call when a burst of `frames` frames and `bytes` bytes was taken from the driver.
    #[inline]
    pub(crate) fn on_burst(&mut self, now_ns: u64, frames: u64, bytes: u64) {
        if now_ns.saturating_sub(self.last_ns) >= PAUSE_NS {
            self.enter(ReclaimPhase::Off, now_ns);
        }
        self.last_ns = now_ns;
        self.frames += frames;
        self.bytes += bytes;
        if self.frames >= EPOCH_FRAMES {
            self.end_epoch(now_ns);
        } else if self.phase == ReclaimPhase::Trial
            && self.frames >= GLANCE_FRAMES
            && !self.has_grown(64)
        {
            self.give_up(now_ns);
        }
    }

    fn end_epoch(&mut self, now_ns: u64) {
        self.lasted = self.lasted.saturating_add(1);
        match self.phase {
            ReclaimPhase::Off => {
                let is_fast = now_ns.saturating_sub(self.began_ns) <= self.frames * GAP_NS_MAX;
                let is_small = self.bytes <= self.frames * SMALL_BYTES;
                self.size_without = self.bytes / self.frames;
                if is_fast && is_small && self.lasted > self.wait {
                    self.enter(ReclaimPhase::Trial, now_ns);
                }
            }
            ReclaimPhase::Trial if self.has_grown(16) => self.enter(ReclaimPhase::On, now_ns),
            ReclaimPhase::On if self.has_grown(16) => {
                if self.lasted >= ON_MAX {
                    // Holding has paid so far: after this epoch without it, the next one is a
                    // trial.
                    self.wait = 0;
                    self.enter(ReclaimPhase::Off, now_ns);
                }
            }
            ReclaimPhase::Trial | ReclaimPhase::On => self.give_up(now_ns),
        }
        self.begin_epoch(now_ns);
    }

    /// True if the frames of this epoch are longer than frames without holding, by one part in
    /// `parts` or more.
    fn has_grown(&self, parts: u64) -> bool {
        let without = self.frames * self.size_without;
        self.bytes >= without + without / parts
    }

    /// Stops holding buffers, since it does not pay at present.
    fn give_up(&mut self, now_ns: u64) {
        self.wait = (self.wait * 2).clamp(WAIT_MIN, WAIT_MAX);
        self.enter(ReclaimPhase::Off, now_ns);
    }

    fn enter(&mut self, phase: ReclaimPhase, now_ns: u64) {
        if self.phase != phase {
            (self.phase, self.lasted) = (phase, 0);
        }
        self.begin_epoch(now_ns);
    }

    fn begin_epoch(&mut self, now_ns: u64) {
        (self.began_ns, self.frames, self.bytes) = (now_ns, 0, 0);
    }
}

#[cfg(test)]
mod tests;
