//! `Virtqueue`: a driver queue in an arena, with its kick, call and err eventfds.

use crate::{Arena, DriverError};
use manyring_queue::{Base, DriverQueue, QueueConfig, RingAddresses, RingFeatures};
use manyring_wire::virtqueue::{
    AVAIL_ALIGN, DESC_ALIGN, USED_ALIGN, avail_ring_size, desc_table_size, used_ring_size,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest wait for a call that is under way.
const CALL_GRACE: Duration = Duration::from_secs(1);

/// A virtqueue of the guest.
#[derive(Debug)]
pub struct Virtqueue {
    index: u32,
    size: u16,
    features: RingFeatures,
    base: u16,
    addresses: RingAddresses,
    queue: DriverQueue,
    kick: OwnedFd,
    call: OwnedFd,
    err: OwnedFd,
    kicks: u64,
    /// Number of calls read from the eventfd.
    calls: AtomicU64,
}

impl Virtqueue {
    /// Makes an empty ring of `size` entries in `arena` whose indexes begin at `base`.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(
        arena: &Arena,
        index: u32,
        size: u16,
        features: RingFeatures,
        base: u16,
    ) -> Result<Self, DriverError> {
        let area = |len: usize, align| arena.alloc(len as u64, align);
        let descriptor = area(desc_table_size(size), DESC_ALIGN)?;
        let available = area(avail_ring_size(size), AVAIL_ALIGN)?;
        let used = area(used_ring_size(size), USED_ALIGN)?;
        let addresses = RingAddresses {
            descriptor: arena.user_addr(descriptor),
            available: arena.user_addr(available),
            used: arena.user_addr(used),
        };
        let config = QueueConfig { size, addresses, base: base.into(), features };
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self {
            index,
            size,
            features,
            base,
            addresses,
            queue: DriverQueue::new(config, arena.memory())?,
            kick: eventfd(0, flags)?,
            call: eventfd(0, flags)?,
            err: eventfd(0, flags)?,
            kicks: 0,
            calls: AtomicU64::new(0),
        })
    }

    /// Most bytes of arena that a ring of `size` entries takes.
    #[must_use]
    pub const fn arena_size(size: u16) -> u64 {
        (desc_table_size(size) + avail_ring_size(size) + used_ring_size(size) + 64) as u64
    }

    /// Index of the virtqueue in its device.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Number of entries.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The ring features that the driver half uses.
    #[must_use]
    pub fn features(&self) -> RingFeatures {
        self.features
    }

    /// The first index of the ring.
    #[must_use]
    pub fn base(&self) -> u16 {
        self.base
    }

    /// The addresses of the ring's areas in the front-end's address space.
    #[must_use]
    pub fn addresses(&self) -> RingAddresses {
        self.addresses
    }

    /// The base for another back-end after one has died: see [`DriverQueue::resume_base`].
    #[must_use]
    pub fn resume_base(&mut self) -> Base {
        self.queue.resume_base()
    }

    /// The driver half of the virtqueue.
    #[must_use]
    pub fn queue(&mut self) -> &mut DriverQueue {
        &mut self.queue
    }

    /// The eventfd of available buffer notifications.
    #[must_use]
    pub fn kick_fd(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }

    /// The eventfd of used buffer notifications.
    #[must_use]
    pub fn call_fd(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }

    /// The eventfd that the device signals when the queue is broken.
    #[must_use]
    pub fn err_fd(&self) -> BorrowedFd<'_> {
        self.err.as_fd()
    }

    /// Kicks sent so far.
    #[must_use]
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    /// Calls seen so far: those that [`Self::wait_call`] and [`Self::clear_call`] have read.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Publishes the added chains, and kicks if the device wants a kick. Returns true if it has
    /// kicked.
    ///
    /// # Errors
    /// [`DriverError::System`].
    pub fn publish(&mut self) -> Result<bool, DriverError> {
        let wanted = self.queue.publish();
        if wanted {
            self.kick()?;
        }
        Ok(wanted)
    }

    /// Kicks the device, even if it wants no kick.
    ///
    /// # Errors
    /// [`DriverError::System`].
    pub fn kick(&mut self) -> Result<(), DriverError> {
        self.kicks += 1;
        rustix::io::write(&self.kick, &1u64.to_ne_bytes())?;
        Ok(())
    }

    /// Sleeps until the device calls, for at most `timeout`. False: no call came.
    ///
    /// # Errors
    /// [`DriverError::System`].
    pub fn wait_call(&self, timeout: Duration) -> Result<bool, DriverError> {
        let count = wait_event(&self.call, timeout)?;
        self.calls.fetch_add(count, Ordering::Relaxed);
        Ok(count > 0)
    }

    /// Clears the call eventfd without waiting, for callers that poll it themselves. False: no call
    /// had come.
    ///
    /// # Errors
    /// [`DriverError::System`].
    pub fn clear_call(&self) -> Result<bool, DriverError> {
        let count = clear_event(&self.call)?;
        self.calls.fetch_add(count, Ordering::Relaxed);
        Ok(count > 0)
    }

    /// Sleeps until the device reports a broken queue, for at most `timeout`. False: it did not.
    ///
    /// # Errors
    /// [`DriverError::System`].
    pub fn wait_err(&self, timeout: Duration) -> Result<bool, DriverError> {
        Ok(wait_event(&self.err, timeout)? > 0)
    }

    /// Finds out, after a wait without a call, whether there was a used buffer to call for.
    ///
    /// # Errors
    /// [`DriverError::Timeout`] if there was none. [`DriverError::LostCall`] if there was one, and
    /// no call comes even now.
    pub(crate) fn find_lost_call(&mut self) -> Result<(), DriverError> {
        if !self.queue.enable_notifications() {
            return Err(DriverError::Timeout);
        }
        // The call for a buffer that was returned at this moment may still be under way.
        if self.wait_call(CALL_GRACE)? { Ok(()) } else { Err(DriverError::LostCall) }
    }

    /// Takes the next used chain, sleeping until the device calls. Returns its id and the bytes
    /// written.
    ///
    /// # Errors
    /// [`DriverError::Timeout`], [`DriverError::System`].
    pub fn wait_used(&mut self, timeout: Duration) -> Result<(u16, u32), DriverError> {
        let deadline = now() + timeout;
        loop {
            if let Some(used) = self.queue.take_used() {
                self.queue.disable_notifications();
                return Ok(used);
            }
            if self.queue.enable_notifications() {
                continue;
            }
            let left = deadline.saturating_duration_since(now());
            if !self.wait_call(left)? && left.is_zero() {
                self.find_lost_call()?;
            }
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "a guest's clock, for the timeouts of tests")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Waits for an eventfd and clears it. Returns its count; 0: it was not signalled within `timeout`.
fn wait_event(event: &OwnedFd, timeout: Duration) -> Result<u64, DriverError> {
    let seconds = i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX);
    let timeout = Timespec { tv_sec: seconds, tv_nsec: timeout.subsec_nanos().into() };
    let mut fds = [PollFd::new(event, PollFlags::IN)];
    match poll(&mut fds, Some(&timeout)) {
        Ok(0) | Err(Errno::INTR) => Ok(0),
        Ok(_) => clear_event(event),
        Err(error) => Err(error.into()),
    }
}

/// Clears an eventfd. Returns its count; 0 if it was not signalled.
fn clear_event(event: &OwnedFd) -> Result<u64, DriverError> {
    let mut count = [0; 8];
    match rustix::io::read(event, &mut count) {
        Ok(_) => Ok(u64::from_ne_bytes(count)),
        Err(Errno::AGAIN) => Ok(0),
        Err(error) => Err(error.into()),
    }
}
