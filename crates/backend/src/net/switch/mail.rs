//! `Inbox`: the new lanes of a receiveq, and copies of frames that no lane can carry.

use super::lane::Lane;
use crate::ready::Bell;
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// Letters that wait for one receiveq at most, and their bytes.
pub(super) const LETTERS_MAX: usize = 512;
const LETTER_BYTES_MAX: usize = 1 << 20;
/// When this many lanes wait that the receiver has not seen, those that their senders have left are
/// dropped.
const LANES_UNSEEN: usize = 64;
/// How often a lock is tried before the letter or lane is dropped: a holder only moves a pointer.
const TRIES: usize = 200;

/// Bits of the bell: mail has come; new lanes have come. The 62 bits below belong to lanes.
pub(super) const MAIL: u64 = 1 << 62;
pub(super) const LANES: u64 = 1 << 63;
const LANE_BITS: u32 = 62;

/// A copy of a frame behind its header, in the daemon's own memory. Several receivers may share it.
pub(super) type Letter = Arc<[u8]>;

/// New lanes and mail of one receiveq, which any sender adds to.
#[derive(Debug)]
pub(super) struct Inbox {
    pub(super) bell: Bell,
    /// Lanes that the receiver has not seen yet.
    lanes: Mutex<Vec<Arc<Lane>>>,
    lane_bits: AtomicU32,
    mail: Mutex<Vec<Letter>>,
    /// Numbers of the letters put and of those that are finished; bytes of the letters between.
    put: AtomicU64,
    done: AtomicU64,
    bytes: AtomicUsize,
    is_closed: AtomicBool,
}

/// Tries the lock [`TRIES`] times, which outlasts a holder that only moves a pointer.
fn soon<T>(lock: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    for _ in 0..TRIES {
        match lock.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
        }
    }
    None
}

impl Inbox {
    /// # Errors
    /// Those of [`Bell::new`].
    pub(super) fn new() -> Result<Arc<Self>, Errno> {
        Ok(Arc::new(Self {
            bell: Bell::new()?,
            lanes: Mutex::default(),
            lane_bits: AtomicU32::new(0),
            mail: Mutex::default(),
            put: AtomicU64::new(0),
            done: AtomicU64::new(0),
            bytes: AtomicUsize::new(0),
            is_closed: AtomicBool::new(false),
        }))
    }

    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// A bit for one more lane; several lanes may have the same one.
    pub(super) fn lane_bit(&self) -> u64 {
        1 << (self.lane_bits.fetch_add(1, Ordering::Relaxed) % LANE_BITS)
    }

    /// Sender: adds a new lane. False: not now, try with a later frame.
    pub(super) fn add_lane(&self, lane: &Arc<Lane>) -> bool {
        let Some(mut lanes) = soon(&self.lanes) else { return false };
        if self.is_closed() {
            return false;
        }
        // A receiver without buffers takes no lanes, however many its senders leave and begin.
        if lanes.len() % LANES_UNSEEN == LANES_UNSEEN - 1 {
            lanes.retain(|lane| !lane.is_left.load(Ordering::Acquire));
        }
        lanes.push(lane.clone());
        drop(lanes);
        self.bell.post(LANES);
        true
    }

    /// Receiver: takes the new lanes.
    pub(super) fn take_lanes(&self, into: &mut Vec<Arc<Lane>>) {
        self.bell.alarm().take(LANES);
        match soon(&self.lanes) {
            Some(mut lanes) => into.append(&mut lanes),
            None => self.bell.alarm().put_off(LANES),
        }
    }

    /// Lanes that the receiver has not taken yet.
    #[cfg(test)]
    pub(super) fn unseen(&self) -> usize {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// The oldest letter, which stays in the inbox.
    #[cfg(test)]
    pub(super) fn first(&self) -> Letter {
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)[0].clone()
    }

    /// True if there is no room for a letter of `len` bytes.
    pub(super) fn is_full(&self, len: usize) -> bool {
        let bytes = self.bytes.load(Ordering::Relaxed);
        self.waiting() >= LETTERS_MAX || bytes + len > LETTER_BYTES_MAX
    }

    /// Sender: adds a letter; then the caller must post [`MAIL`]. False: there is no room.
    pub(super) fn put(&self, letter: Letter) -> bool {
        if self.is_full(letter.len()) {
            return false;
        }
        let Some(mut mail) = soon(&self.mail) else { return false };
        if self.is_closed() {
            return false;
        }
        self.bytes.fetch_add(letter.len(), Ordering::Relaxed);
        self.put.fetch_add(1, Ordering::Release);
        mail.push(letter);
        true
    }

    /// Letters that the receiver has not finished.
    pub(super) fn waiting(&self) -> usize {
        let (done, put) = (self.done.load(Ordering::Acquire), self.put.load(Ordering::Acquire));
        usize::try_from(put.saturating_sub(done)).unwrap_or(usize::MAX)
    }

    /// The number of letters put so far, which is the number of the last one.
    pub(super) fn last(&self) -> u64 {
        self.put.load(Ordering::Acquire)
    }

    /// True if the receiver has finished the first `count` letters.
    #[inline]
    pub(super) fn has_done(&self, count: u64) -> bool {
        count == 0 || self.done.load(Ordering::Acquire) >= count
    }

    /// Receiver: takes all letters.
    pub(super) fn take_mail(&self, into: &mut impl Extend<Letter>) {
        self.bell.alarm().take(MAIL);
        match soon(&self.mail) {
            Some(mut mail) => into.extend(mail.drain(..)),
            None => self.bell.alarm().put_off(MAIL),
        }
    }

    /// Receiver: notes that it has finished a letter.
    pub(super) fn note_done(&self, letter: &Letter) {
        self.bytes.fetch_sub(letter.len(), Ordering::Relaxed);
        self.done.fetch_add(1, Ordering::Release);
    }

    /// Receiver: ends the inbox. Returns the lanes that it has not taken.
    pub(super) fn close(&self) -> Vec<Arc<Lane>> {
        self.is_closed.store(true, Ordering::Release);
        // A sender with an old map keeps this inbox alive, so drop the letters now.
        self.mail.lock().unwrap_or_else(PoisonError::into_inner).clear();
        std::mem::take(&mut *self.lanes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
