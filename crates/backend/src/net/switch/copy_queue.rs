//! `CopyInbox`: the new channels of a receiveq, and copies of frames that no channel can carry.

use super::channel::Channel;
use crate::ready::Doorbell;
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// The most frame copies that wait for one receiveq, and their bytes.
pub(super) const FRAME_COPIES_MAX: usize = 512;
const FRAME_COPY_BYTES_MAX: usize = 1 << 20;
/// Number of channels that wait for a receiver. Above this number, the queue drops the channels
/// whose senders are gone.
const CHANNELS_UNSEEN: usize = 64;
/// How often a lock is tried before the frame copy or channel is dropped: its holder only moves a
/// pointer.
const TRIES: usize = 200;

/// Doorbell bits for "there are copies" and "there are new channels". The 62 bits below belong to
/// channels.
pub(super) const COPIES: u64 = 1 << 62;
pub(super) const CHANNELS: u64 = 1 << 63;
const CHANNEL_BITS: u32 = 62;

/// A copy of a frame behind its header, in the daemon's own memory. Several receivers may share it.
pub(super) type FrameCopy = Arc<[u8]>;

/// New channels and frame copies for one receiveq, to which any sender adds.
#[derive(Debug)]
pub(super) struct CopyInbox {
    pub(super) doorbell: Doorbell,
    /// Channels that the receiver has not taken yet.
    channels: Mutex<Vec<Arc<Channel>>>,
    channel_bits: AtomicU32,
    copies: Mutex<Vec<FrameCopy>>,
    /// The number of frame copies that were put (`put`) and finished (`done`), and the bytes of
    /// those that were put and not finished.
    put: AtomicU64,
    done: AtomicU64,
    bytes: AtomicUsize,
    is_closed: AtomicBool,
}

/// Tries the lock [`TRIES`] times: its holder only moves a pointer. `None`: it stays locked.
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

impl CopyInbox {
    /// Makes an empty inbox.
    ///
    /// # Errors
    /// Those of [`Doorbell::new`].
    pub(super) fn new() -> Result<Arc<Self>, Errno> {
        Ok(Arc::new(Self {
            doorbell: Doorbell::new()?,
            channels: Mutex::default(),
            channel_bits: AtomicU32::new(0),
            copies: Mutex::default(),
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

    /// Returns a doorbell bit for another channel; several channels may share a bit.
    pub(super) fn channel_bit(&self) -> u64 {
        1 << (self.channel_bits.fetch_add(1, Ordering::Relaxed) % CHANNEL_BITS)
    }

    /// For a sender: adds a new channel. Returns false if that is not possible now; the sender
    /// tries again with a later frame.
    pub(super) fn add_channel(&self, channel: &Arc<Channel>) -> bool {
        let Some(mut channels) = soon(&self.channels) else { return false };
        if self.is_closed() {
            return false;
        }
        // A receiver without buffers takes no channels: drop those that their senders have left, so
        // that the list does not grow without end.
        if channels.len() % CHANNELS_UNSEEN == CHANNELS_UNSEEN - 1 {
            channels.retain(|channel| !channel.is_left.load(Ordering::Acquire));
        }
        channels.push(channel.clone());
        drop(channels);
        self.doorbell.post(CHANNELS);
        true
    }

    /// For the receiver: moves the new channels to `into`.
    pub(super) fn take_channels(&self, into: &mut Vec<Arc<Channel>>) {
        self.doorbell.alarm().take(CHANNELS);
        match soon(&self.channels) {
            Some(mut channels) => into.append(&mut channels),
            None => self.doorbell.alarm().put_off(CHANNELS),
        }
    }

    /// Returns the number of channels that the receiver has not taken yet.
    #[cfg(test)]
    pub(super) fn unseen(&self) -> usize {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// For tests: returns the oldest frame copy, which stays in the inbox.
    #[cfg(test)]
    pub(super) fn first(&self) -> FrameCopy {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)[0].clone()
    }

    /// True if there is no room for a frame copy of `len` bytes.
    pub(super) fn is_full(&self, len: usize) -> bool {
        let bytes = self.bytes.load(Ordering::Relaxed);
        self.waiting() >= FRAME_COPIES_MAX || bytes + len > FRAME_COPY_BYTES_MAX
    }

    /// For a sender: adds a frame copy; the caller must then post [`COPIES`]. Returns false if
    /// there is no room.
    pub(super) fn put(&self, frame_copy: FrameCopy) -> bool {
        if self.is_full(frame_copy.len()) {
            return false;
        }
        let Some(mut copies) = soon(&self.copies) else { return false };
        if self.is_closed() {
            return false;
        }
        self.bytes.fetch_add(frame_copy.len(), Ordering::Relaxed);
        self.put.fetch_add(1, Ordering::Release);
        copies.push(frame_copy);
        true
    }

    /// Returns the number of frame copies that the receiver has not finished.
    pub(super) fn waiting(&self) -> usize {
        let (done, put) = (self.done.load(Ordering::Acquire), self.put.load(Ordering::Acquire));
        usize::try_from(put.saturating_sub(done)).unwrap_or(usize::MAX)
    }

    /// Returns how many frame copies were put so far: the number of the last one.
    pub(super) fn last(&self) -> u64 {
        self.put.load(Ordering::Acquire)
    }

    /// True if the receiver has finished the first `count` frame copies.
    #[inline]
    pub(super) fn has_done(&self, count: u64) -> bool {
        count == 0 || self.done.load(Ordering::Acquire) >= count
    }

    /// For the receiver: moves all frame copies to `into`.
    pub(super) fn take_copies(&self, into: &mut impl Extend<FrameCopy>) {
        self.doorbell.alarm().take(COPIES);
        match soon(&self.copies) {
            Some(mut copies) => into.extend(copies.drain(..)),
            None => self.doorbell.alarm().put_off(COPIES),
        }
    }

    /// For the receiver: records that it has finished a frame copy.
    pub(super) fn note_done(&self, frame_copy: &FrameCopy) {
        self.bytes.fetch_sub(frame_copy.len(), Ordering::Relaxed);
        self.done.fetch_add(1, Ordering::Release);
    }

    /// For the receiver: ends the inbox. Returns the channels that it has not taken.
    pub(super) fn close(&self) -> Vec<Arc<Channel>> {
        self.is_closed.store(true, Ordering::Release);
        // Drop the frame copies now: a sender with an old map may keep this inbox alive.
        self.copies.lock().unwrap_or_else(PoisonError::into_inner).clear();
        std::mem::take(&mut *self.channels.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
