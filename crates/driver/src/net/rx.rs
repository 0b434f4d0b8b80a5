//! `NetDriverRx`: a receiveq. It takes frames out of mergeable or big buffers, and gives the
//! buffers back to the device in bursts.

use super::options::NetCounters;
use super::slab::Slab;
use crate::{Arena, DriverError, NetDriverOptions, Virtqueue};
use manyring_memory::{GuestSlice, SliceList, copy_from_slices};
use manyring_queue::RingFeatures;
use manyring_wire::net::{
    LEGACY_HEADER_SIZE, RawNetHeader, VIRTIO_NET_F_MRG_RXBUF, header_size, receiveq,
};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// The receiveq of a queue pair. Owned by one thread.
#[derive(Debug)]
pub struct NetDriverRx {
    vring: Virtqueue,
    slab: Slab,
    is_mergeable: bool,
    /// Bytes of the header before each frame.
    header_size: usize,
    /// The slices of the frame that was taken last, with its header.
    slices: SliceList,
    counters: NetCounters,
}

impl NetDriverRx {
    /// Makes the receiveq of pair `pair` in `arena` and fills it.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(
        arena: &Arc<Arena>,
        pair: u16,
        features: u64,
        options: &NetDriverOptions,
    ) -> Result<Self, DriverError> {
        let index = u32::try_from(receiveq(pair.into())).unwrap_or(u32::MAX);
        let size = options.queue_size;
        let is_mergeable = features & VIRTIO_NET_F_MRG_RXBUF != 0;
        let buffer_size = if is_mergeable { options.mergeable_size } else { options.big_size };
        let mut vring = Virtqueue::new(arena, index, size, RingFeatures::from_bits(features), 0)?;
        vring.queue().disable_notifications();
        let slab = Slab::new(arena, size, buffer_size)?;
        let (slices, counters) = (SliceList::new(), NetCounters::default());
        let header_size = header_size(features);
        let mut rx = Self { vring, slab, is_mergeable, header_size, slices, counters };
        rx.refill()?;
        Ok(rx)
    }

    /// Most bytes of arena that a receiveq takes.
    #[must_use]
    pub fn arena_size(options: &NetDriverOptions) -> u64 {
        let buffer_size = options.mergeable_size.max(options.big_size);
        let buffers = Slab::arena_size(options.queue_size, buffer_size);
        Virtqueue::arena_size(options.queue_size) + buffers
    }

    /// The virtqueue of this receiveq.
    #[must_use]
    pub fn vring(&mut self) -> &mut Virtqueue {
        &mut self.vring
    }

    /// The counters of this queue.
    #[must_use]
    pub fn counters(&self) -> NetCounters {
        NetCounters { kicks: self.vring.kicks(), calls: self.vring.calls(), ..self.counters }
    }

    /// Takes the next frame, if there is one, without waiting. Appends its bytes to `frame` and
    /// returns its header. `num_buffers` is 0 if the header is too short to have it (a legacy
    /// driver). [`Self::refill`] gives the buffers back.
    ///
    /// # Errors
    /// See [`Self::recv_slices`].
    pub fn recv(&mut self, frame: &mut Vec<u8>) -> Result<Option<RawNetHeader>, DriverError> {
        let mut skip = self.header_size;
        let Some(slices) = self.recv_slices()? else { return Ok(None) };
        let mut header = RawNetHeader::default();
        copy_from_slices(slices, &mut header.as_mut_bytes()[..skip]);
        for slice in slices {
            let rest = slice.split_at(skip).1;
            skip = skip.saturating_sub(slice.len());
            let at = frame.len();
            frame.resize(at + rest.len(), 0);
            rest.read_into(&mut frame[at..]);
        }
        Ok(Some(header))
    }

    /// Takes the next frame, if there is one, without waiting. Returns the slices of its header and
    /// bytes, ready for a write to a tap. They stay valid until [`Self::refill`] gives the buffers
    /// back.
    ///
    /// # Errors
    /// [`DriverError::ShortFrame`] if the device wrote less than a header; [`DriverError::Split`]
    /// if the buffers of a frame did not become visible together, or `num_buffers` is 0.
    #[inline]
    pub fn recv_slices(&mut self) -> Result<Option<&[GuestSlice<'_>]>, DriverError> {
        let Some((head, written)) = self.vring.queue().take_used() else { return Ok(None) };
        self.slices.clear();
        let first_len = self.keep(head, written);
        let first = self.slices.as_slices().first().map(|first| first.split_at(self.header_size));
        let short = DriverError::ShortFrame { written };
        let Some((header, _)) = first.filter(|(header, _)| header.len() == self.header_size) else {
            return Err(short);
        };
        let mut len = first_len - self.header_size;
        if self.is_mergeable {
            let count = header.split_at(LEGACY_HEADER_SIZE).1.read_array::<2>().ok_or(short)?;
            let buffers = u16::from_le_bytes(count);
            let visible = self.vring.queue().used_count() + 1;
            if buffers == 0 || buffers > visible {
                return Err(DriverError::Split { buffers, visible });
            }
            for _ in 1..buffers {
                let Some((head, written)) = self.vring.queue().take_used() else { break };
                len += self.keep(head, written);
            }
        }
        self.counters.packets += 1;
        self.counters.bytes += len as u64;
        Ok(Some(self.slices.as_slices()))
    }

    /// Adds the bytes written to the buffer of chain `head` to `slices`, and notes the buffer for
    /// [`Self::refill`]. Returns the number of bytes.
    #[inline]
    fn keep(&mut self, head: u16, written: u32) -> usize {
        let pieces = self.slab.buffer(head).pieces;
        self.slices.extend_part(pieces, 0, written as usize);
        self.slab.release(head);
        written.min(self.slab.size()) as usize
    }

    /// Gives the buffers of all taken frames back to the device. Returns true if it has kicked.
    ///
    /// # Errors
    /// [`DriverError::System`].
    pub fn refill(&mut self) -> Result<bool, DriverError> {
        let mut count = 0;
        while let Some(buffer) = self.slab.next_free() {
            let writable = [(buffer.addr, self.slab.size())];
            let Some(head) = self.vring.queue().add(&[], &writable) else { break };
            self.slab.bind(head);
            count += 1;
        }
        if count == 0 {
            return Ok(false);
        }
        let is_kicked = self.vring.publish()?;
        self.counters.kicks_suppressed += u64::from(!is_kicked);
        // Keeps `used_event` at an index that has passed, so that no call is due within the next
        // 32768 buffers.
        self.vring.queue().disable_notifications();
        Ok(is_kicked)
    }

    /// How many buffers [`Self::refill`] would give back now.
    #[must_use]
    pub fn spare_count(&self) -> usize {
        self.slab.free_count()
    }

    /// Asks for a call when a frame arrives, then looks at the ring. True: a frame is there
    /// already; do not sleep.
    pub fn enable_notifications(&mut self) -> bool {
        self.vring.queue().enable_notifications()
    }

    /// Asks for no calls.
    pub fn disable_notifications(&mut self) {
        self.vring.queue().disable_notifications();
    }

    /// Sleeps until a frame has arrived.
    ///
    /// # Errors
    /// [`DriverError::Timeout`]; [`DriverError::LostCall`] if a frame arrived without a call;
    /// [`DriverError::System`].
    pub fn wait(&mut self, timeout: Duration) -> Result<(), DriverError> {
        let deadline = crate::vring::now() + timeout;
        loop {
            if self.enable_notifications() {
                self.disable_notifications();
                return Ok(());
            }
            let left = deadline.saturating_duration_since(crate::vring::now());
            if !self.vring.wait_call(left)? && left.is_zero() {
                self.vring.find_lost_call()?;
            }
        }
    }

    /// Takes the next frame, sleeping until there is one, and gives its buffers back.
    ///
    /// # Errors
    /// See [`Self::recv_slices`] and [`Self::wait`].
    pub fn recv_wait(
        &mut self,
        frame: &mut Vec<u8>,
        timeout: Duration,
    ) -> Result<RawNetHeader, DriverError> {
        loop {
            if let Some(header) = self.recv(frame)? {
                self.refill()?;
                return Ok(header);
            }
            self.wait(timeout)?;
        }
    }
}
