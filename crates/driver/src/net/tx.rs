//! `NetDriverTx`: a transmitq. Kicks are coalesced, and buffers of sent frames are freed late.

use super::options::NetCounters;
use super::slab::{Buffer, BufferPool, Slab};
use crate::{Arena, DriverError, NetDriverOptions, Virtqueue};
use manyring_memory::GuestSlice;
use manyring_queue::RingFeatures;
use manyring_wire::net::{Coalescing, HEADER_SIZE, RawNetHeader, header_size, transmitq};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// A kick that the device wants, and that waits for more packets or time.
#[derive(Clone, Copy, Debug)]
struct OwedKick {
    since_ns: u64,
    packets: u64,
}

/// The transmitq of a queue pair. Owned by one thread.
#[derive(Debug)]
pub struct NetDriverTx {
    vring: Virtqueue,
    slab: Slab,
    parts: Vec<(u64, u32)>,
    /// Bytes of the header before each frame.
    header_size: usize,
    coalescing: Coalescing,
    owed: Option<OwedKick>,
    /// Frames that were added and not published.
    unpublished: u64,
    /// True if [`Self::reclaim`] was called since the last publish.
    has_looked: bool,
    counters: NetCounters,
}

impl NetDriverTx {
    /// Makes the transmitq of pair `pair` in `arena`.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(
        arena: &Arc<Arena>,
        pair: u16,
        features: RingFeatures,
        options: &NetDriverOptions,
    ) -> Result<Self, DriverError> {
        let slab = Slab::new(arena, options.queue_size, options.transmit_size)?;
        Self::with(slab, arena, pair, features, options)
    }

    /// Makes the transmitq as [`Self::new`] does, but with the buffers of `pool`.
    pub(super) fn sharing(
        pool: &Arc<BufferPool>,
        arena: &Arc<Arena>,
        pair: u16,
        features: RingFeatures,
        options: &NetDriverOptions,
    ) -> Result<Self, DriverError> {
        let slab = Slab::sharing(pool.clone(), options.queue_size);
        Self::with(slab, arena, pair, features, options)
    }

    fn with(
        slab: Slab,
        arena: &Arc<Arena>,
        pair: u16,
        features: RingFeatures,
        options: &NetDriverOptions,
    ) -> Result<Self, DriverError> {
        let index = u32::try_from(transmitq(pair.into())).unwrap_or(u32::MAX);
        let size = options.queue_size;
        let mut vring = Virtqueue::new(arena, index, size, features, 0)?;
        // The driver looks for used buffers itself; the device need not call.
        vring.queue().disable_notifications();
        Ok(Self {
            vring,
            slab,
            parts: Vec::new(),
            header_size: HEADER_SIZE,
            coalescing: options.kicks,
            owed: None,
            unpublished: 0,
            has_looked: false,
            counters: NetCounters::default(),
        })
    }

    /// Uses the header size for the negotiated virtio features `features`: a legacy driver may have
    /// a shorter header.
    #[must_use]
    pub fn with_headers(mut self, features: u64) -> Self {
        self.header_size = header_size(features);
        self
    }

    /// Most bytes of arena that a transmitq takes.
    #[must_use]
    pub fn arena_size(options: &NetDriverOptions) -> u64 {
        let buffers = Slab::arena_size(options.queue_size, options.transmit_size);
        Virtqueue::arena_size(options.queue_size) + buffers
    }

    /// The virtqueue of this transmitq.
    #[must_use]
    pub fn vring(&mut self) -> &mut Virtqueue {
        &mut self.vring
    }

    /// The counters of this queue.
    #[must_use]
    pub fn counters(&self) -> NetCounters {
        NetCounters { kicks: self.vring.kicks(), calls: self.vring.calls(), ..self.counters }
    }

    /// Adds a frame; header and frame are in one descriptor. False: the ring is full. The device
    /// sees the frame after [`Self::publish`].
    ///
    /// # Errors
    /// [`DriverError::TooLong`] for a frame that no buffer holds.
    #[inline]
    pub fn send(&mut self, header: &RawNetHeader, frame: &[u8]) -> Result<bool, DriverError> {
        let (len, header_size) = (self.check(frame.len())?, self.header_size);
        let Some(room) = self.room() else { return Ok(false) };
        room.write_from(&header.as_bytes()[..header_size]);
        room.split_at(header_size).1.write_from(frame);
        Ok(self.send_filled(len))
    }

    /// Adds a frame as a chain: a descriptor for the header, and one for each of `parts`, even if
    /// it is empty. False: the ring is full.
    ///
    /// # Errors
    /// [`DriverError::TooLong`] for a frame that no buffer holds.
    pub fn send_parts(
        &mut self,
        header: &RawNetHeader,
        parts: &[&[u8]],
    ) -> Result<bool, DriverError> {
        let len = parts.iter().map(|part| part.len()).sum();
        self.check(len)?;
        self.room();
        let Some(buffer) = self.slab.next_free() else { return Ok(false) };
        self.parts.clear();
        let mut rest = buffer.slice();
        let mut at = buffer.addr;
        let header = &header.as_bytes()[..self.header_size];
        for part in std::iter::once(&header).chain(parts) {
            rest.write_from(part);
            rest = rest.split_at(part.len()).1;
            let part = u32::try_from(part.len()).unwrap_or(0);
            self.parts.push((at, part));
            at += u64::from(part);
        }
        let Some(head) = self.vring.queue().add(&self.parts, &[]) else { return Ok(false) };
        self.sent(head, len);
        Ok(true)
    }

    /// The next free buffer, to be filled with a header and a frame (for example by a read from a
    /// tap). [`Self::send_filled`] then sends it. `None`: no buffer or no descriptor is free.
    #[inline]
    pub fn room(&mut self) -> Option<GuestSlice<'_>> {
        // Buffers are freed only when more than half the ring is used, and once per burst at most:
        // so the device's cache lines are fetched for many buffers at once.
        let free = self.vring.queue().free_count();
        if free == 0 || (free < self.vring.size() / 2 && !self.has_looked) {
            self.has_looked = true;
            self.reclaim();
            if self.vring.queue().free_count() == 0 {
                return None;
            }
        }
        self.slab.refill();
        self.slab.next_free().map(Buffer::slice)
    }

    /// Sends the first `len` bytes of the buffer from [`Self::room`], header included. Returns
    /// false if the ring is full.
    #[inline]
    pub fn send_filled(&mut self, len: u32) -> bool {
        let Some(buffer) = self.slab.next_free() else { return false };
        let len = len.min(self.slab.size());
        let Some(head) = self.vring.queue().add(&[(buffer.addr, len)], &[]) else { return false };
        self.sent(head, (len as usize).saturating_sub(self.header_size));
        true
    }

    #[inline]
    fn sent(&mut self, head: u16, frame_len: usize) {
        self.slab.bind(head);
        self.unpublished += 1;
        self.counters.packets += 1;
        self.counters.bytes += frame_len as u64;
    }

    /// Bytes of header and frame together; fails if no buffer is so large.
    fn check(&self, frame_len: usize) -> Result<u32, DriverError> {
        let max = self.slab.size();
        let len = frame_len.saturating_add(self.header_size);
        let fits = u32::try_from(len).ok().filter(|len| *len <= max);
        fits.ok_or(DriverError::TooLong { len, max: max as usize })
    }

    /// Frees the buffers of frames that the device has sent. Returns their number.
    pub fn reclaim(&mut self) -> u16 {
        let mut count = 0;
        while let Some((head, _)) = self.vring.queue().take_used() {
            self.slab.release(head);
            count += 1;
        }
        if count > 0 {
            // Keeps `used_event` at an index that has passed, so that no call is due within the
            // next 32768 buffers.
            self.vring.queue().disable_notifications();
        }
        count
    }

    /// How many frames were added and their buffers not freed.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.slab.bound()
    }

    /// Publishes the added frames. If the device wants a kick, sends it, or lets it wait for more
    /// packets or time. `now_ns` is the time of any clock; only waiting kicks need it. Returns true
    /// if a kick was sent.
    ///
    /// # Errors
    /// [`DriverError::System`].
    pub fn publish(&mut self, now_ns: u64) -> Result<bool, DriverError> {
        let packets = std::mem::take(&mut self.unpublished);
        self.has_looked = false;
        if packets > 0 {
            let is_wanted = self.vring.queue().publish();
            match &mut self.owed {
                Some(owed) => owed.packets += packets,
                None if is_wanted => self.owed = Some(OwedKick { since_ns: now_ns, packets }),
                None => self.counters.kicks_suppressed += 1,
            }
        }
        match self.owed {
            Some(owed) if self.is_due(owed, now_ns) => self.flush(),
            Some(_) => {
                self.counters.kicks_delayed += u64::from(packets > 0);
                Ok(false)
            }
            None => Ok(false),
        }
    }

    fn is_due(&self, owed: OwedKick, now_ns: u64) -> bool {
        owed.packets >= u64::from(self.coalescing.packets_max) || now_ns >= self.due_ns(owed)
    }

    fn due_ns(&self, owed: OwedKick) -> u64 {
        owed.since_ns.saturating_add(u64::from(self.coalescing.delay_us_max) * 1000)
    }

    /// When the waiting kick is due, by the clock of [`Self::publish`]; `None`: no kick waits.
    #[must_use]
    pub fn kick_due_ns(&self) -> Option<u64> {
        self.owed.map(|owed| self.due_ns(owed))
    }

    /// Sends the waiting kick, if there is one. Returns true if it has.
    ///
    /// # Errors
    /// [`DriverError::System`].
    pub fn flush(&mut self) -> Result<bool, DriverError> {
        if self.owed.take().is_none() {
            return Ok(false);
        }
        self.vring.kick()?;
        Ok(true)
    }

    /// Asks for a call when the device has sent a frame, then looks at the ring. True: a frame was
    /// sent already; do not sleep. For a driver that sleeps while its ring is full.
    pub fn enable_notifications(&mut self) -> bool {
        self.vring.queue().enable_notifications()
    }

    /// Asks for no calls.
    pub fn disable_notifications(&mut self) {
        self.vring.queue().disable_notifications();
    }

    /// Sleeps until the device has sent a frame, then frees the buffers of sent frames. Returns
    /// their number.
    ///
    /// # Errors
    /// [`DriverError::Timeout`], [`DriverError::LostCall`], [`DriverError::System`].
    pub fn wait_sent(&mut self, timeout: Duration) -> Result<u16, DriverError> {
        let (head, _) = self.vring.wait_used(timeout)?;
        self.slab.release(head);
        Ok(1 + self.reclaim())
    }

    /// Sleeps until the device has sent everything that was published.
    ///
    /// # Errors
    /// See [`Self::wait_sent`].
    pub fn drain(&mut self, timeout: Duration) -> Result<(), DriverError> {
        self.flush()?;
        while self.in_flight() > 0 {
            self.wait_sent(timeout)?;
        }
        Ok(())
    }
}
