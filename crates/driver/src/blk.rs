//! `BlkDriver`: a virtio-blk driver: N queues, requests in flight, polling or sleeping.

use crate::vring::now;
use crate::{Arena, BlkDriverOptions, Done, DriverError, DriverOp, FrontEnd, Virtqueue};
use manyring_memory::Words;
use manyring_queue::{IndirectTable, RingFeatures};
use manyring_wire::blk::{
    BlkConfig, HEADER_SIZE, ID_SIZE, RawBlkHeader, RawSegment, SECTOR_SIZE, SEGMENT_SIZE,
    SEGMENT_UNMAP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_SECURE_ERASE, VIRTIO_BLK_T_WRITE_ZEROES,
};
use manyring_wire::vhost_user::{F_PROTOCOL_FEATURES, PROTOCOL_F_CONFIG};
use manyring_wire::virtqueue::{DESC_ALIGN, DESCRIPTOR_SIZE};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::{FromZeros, IntoBytes};

/// A guest with a virtio-blk disk.
#[derive(Debug)]
pub struct BlkDriver {
    /// The vhost-user session with the back-end.
    pub front: FrontEnd,
    /// Guest memory.
    pub arena: Arc<Arena>,
    /// The queues; may be moved out, one to each thread.
    pub queues: Vec<BlkDriverQueue>,
    /// The config space as read at the start; zero without `PROTOCOL_F_CONFIG`.
    pub config: BlkConfig,
    /// The virtio features that were negotiated.
    pub features: u64,
    options: BlkDriverOptions,
}

impl BlkDriver {
    /// Connects to the device at `path` and starts its queues.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn connect(path: &Path, options: &BlkDriverOptions) -> Result<Self, DriverError> {
        Self::start(FrontEnd::connect(path, options.max_wait)?, options)
    }

    /// Starts the device at the other end of a connection.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn start(mut front: FrontEnd, options: &BlkDriverOptions) -> Result<Self, DriverError> {
        let features = negotiate(&mut front, options)?;
        let ring_features = RingFeatures::from_bits(features);
        let queues = u64::from(options.queues);
        let size = queues * BlkDriverQueue::arena_size(options) + options.spare;
        let arena = Arc::new(Arena::new(size)?);
        let queues = (0..options.queues)
            .map(|index| BlkDriverQueue::new(&arena, index.into(), ring_features, options))
            .collect::<Result<Vec<_>, _>>()?;
        let config = read_config(&mut front, options)?;
        let options = options.clone();
        let mut driver = Self { front, arena, queues, config, features, options };
        driver.front.set_memory(&driver.arena)?;
        for queue in &driver.queues {
            driver.front.start_vring(&queue.vring, queue.vring.base())?;
        }
        Ok(driver)
    }

    /// Connects again after the back-end has died, with the same memory and rings. Each ring goes
    /// on behind the last chain that was returned, so that requests in flight are served again.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn reconnect(&mut self, path: &Path) -> Result<(), DriverError> {
        self.front = FrontEnd::connect(path, self.options.max_wait)?;
        negotiate(&mut self.front, &self.options)?;
        self.front.set_memory(&self.arena)?;
        for queue in &mut self.queues {
            let base = queue.vring.resume_base();
            self.front.start_vring(&queue.vring, base)?;
            queue.vring.kick()?;
        }
        Ok(())
    }

    /// Size of the disk in bytes.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.config.capacity.get() * SECTOR_SIZE
    }
}

fn negotiate(front: &mut FrontEnd, options: &BlkDriverOptions) -> Result<u64, DriverError> {
    front.negotiate(options.features, F_PROTOCOL_FEATURES, options.protocol_features)
}

/// Bytes of the config space up to write-zeroes.
const CONFIG_SIZE_OLD: u32 = 60;

fn read_config(front: &mut FrontEnd, options: &BlkDriverOptions) -> Result<BlkConfig, DriverError> {
    let mut config = BlkConfig::new_zeroed();
    if options.protocol_features & PROTOCOL_F_CONFIG != 0 {
        let size = u32::try_from(size_of::<BlkConfig>()).unwrap_or(0);
        let bytes = match front.config(0, size) {
            // A back-end without secure erase has a shorter config space, and answers with size 0.
            Err(DriverError::Reply { size: 0, .. }) => front.config(0, CONFIG_SIZE_OLD)?,
            result => result?,
        };
        config.as_mut_bytes()[..bytes.len()].copy_from_slice(&bytes);
    }
    Ok(config)
}

/// The guest addresses of a request's parts: header, segment, status and table lie in one piece,
/// the data in another.
#[derive(Debug)]
struct Slot {
    header: u64,
    data: u64,
    table: IndirectTable,
    words: Words,
}

const SEGMENT_AT: u64 = HEADER_SIZE as u64;
const STATUS_AT: u64 = SEGMENT_AT + SEGMENT_SIZE as u64;
const TABLE_AT: u64 = 48;
/// The status byte before the device writes it.
const NO_STATUS: u8 = 255;

/// One queue of the disk. Owned by one thread.
#[derive(Debug)]
pub struct BlkDriverQueue {
    arena: Arc<Arena>,
    vring: Virtqueue,
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// The slot of each chain in flight, by the chain's id.
    slot_of: Vec<u16>,
    indirect: bool,
    buffer_size: u32,
    segment_size: u32,
    readable: Vec<(u64, u32)>,
    writable: Vec<(u64, u32)>,
}

impl BlkDriverQueue {
    fn segments(options: &BlkDriverOptions) -> u64 {
        u64::from(options.buffer_size.div_ceil(options.segment_size))
    }

    /// Bytes of a slot before its data.
    fn slot_size(options: &BlkDriverOptions) -> u64 {
        TABLE_AT + (Self::segments(options) + 3) * DESCRIPTOR_SIZE as u64
    }

    /// Most bytes of arena that a queue takes.
    #[must_use]
    pub fn arena_size(options: &BlkDriverOptions) -> u64 {
        let data = (u64::from(options.buffer_size) + options.skew).next_multiple_of(4096);
        let slot = Self::slot_size(options).next_multiple_of(64) + data;
        Virtqueue::arena_size(options.queue_size) + u64::from(options.queue_size) * slot + 8192
    }

    /// Makes a queue in `arena`.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(
        arena: &Arc<Arena>,
        index: u32,
        features: RingFeatures,
        options: &BlkDriverOptions,
    ) -> Result<Self, DriverError> {
        let vring = Virtqueue::new(arena, index, options.queue_size, features, options.base)?;
        let size = Self::slot_size(options);
        let mut slots = Vec::with_capacity(options.queue_size.into());
        for _ in 0..options.queue_size {
            let header = arena.alloc(size, 64)?;
            let len = manyring_wire::host_size(size - TABLE_AT);
            let addr = header + TABLE_AT;
            let table = IndirectTable { addr, words: arena.words(addr, len, DESC_ALIGN)? };
            let words = arena.words(header, manyring_wire::host_size(TABLE_AT), 8)?;
            slots.push(Slot { header, data: 0, table, words });
        }
        // Data lies page by page, as a guest's page cache does: O_DIRECT needs it aligned.
        // A misaligned buffer (`skew`) is refused there.
        for (slot, skew) in slots.iter_mut().zip([0, options.skew].into_iter().cycle()) {
            slot.data = arena.alloc(u64::from(options.buffer_size) + skew, 4096)? + skew;
        }
        Ok(Self {
            arena: arena.clone(),
            vring,
            slots,
            free: (0..options.queue_size).rev().collect(),
            slot_of: vec![0; options.queue_size.into()],
            indirect: features.indirect,
            buffer_size: options.buffer_size,
            segment_size: options.segment_size,
            readable: Vec::new(),
            writable: Vec::new(),
        })
    }

    /// The virtqueue of this queue.
    #[must_use]
    pub fn vring(&mut self) -> &mut Virtqueue {
        &mut self.vring
    }

    /// How many requests were submitted and not taken.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds a request. Returns its tag, or `None` if the ring is full. The device sees it after
    /// [`Self::publish`].
    ///
    /// # Errors
    /// [`DriverError::TooLong`].
    pub fn submit(&mut self, op: DriverOp<'_>) -> Result<Option<u16>, DriverError> {
        let Some(&tag) = self.free.last() else { return Ok(None) };
        let (header, data) = {
            let slot = &self.slots[usize::from(tag)];
            (slot.header, slot.data)
        };
        self.readable.clear();
        self.writable.clear();
        self.readable.push((header, wire_size(HEADER_SIZE)));
        let (kind, sector) = self.fill(op, header, data)?;
        self.writable.push((header + STATUS_AT, 1));
        let slot = &self.slots[usize::from(tag)];
        let raw = RawBlkHeader { kind: kind.into(), reserved: 0.into(), sector: sector.into() };
        let (low, high) = raw.as_bytes().split_at(8);
        slot.words.store_u64(0, word(low));
        slot.words.store_u64(8, word(high));
        slot.words.store_u16(wire_offset(STATUS_AT), u16::from(NO_STATUS));
        let queue = self.vring.queue();
        let head = if self.indirect {
            queue.add_indirect(&self.readable, &self.writable, &slot.table)
        } else {
            queue.add(&self.readable, &self.writable)
        };
        let Some(head) = head else { return Ok(None) };
        self.free.pop();
        self.slot_of[usize::from(head)] = tag;
        Ok(Some(tag))
    }

    /// Writes the data of a request into its slot, and lists its descriptors. Returns type and
    /// sector.
    fn fill(
        &mut self,
        op: DriverOp<'_>,
        header: u64,
        data: u64,
    ) -> Result<(u32, u64), DriverError> {
        Ok(match op {
            DriverOp::Read { sector, len } => {
                let len = self.check(len)?;
                push_segments(&mut self.writable, data, len, self.segment_size);
                (VIRTIO_BLK_T_IN, sector)
            }
            DriverOp::Write { sector, data: bytes } => {
                let len = self.check(bytes.len())?;
                self.arena.write(data, bytes)?;
                push_segments(&mut self.readable, data, len, self.segment_size);
                (VIRTIO_BLK_T_OUT, sector)
            }
            DriverOp::WriteAny { sector, len } => {
                let len = self.check(len)?;
                push_segments(&mut self.readable, data, len, self.segment_size);
                (VIRTIO_BLK_T_OUT, sector)
            }
            DriverOp::Flush => (VIRTIO_BLK_T_FLUSH, 0),
            DriverOp::Discard { sector, count } => {
                self.fill_range(VIRTIO_BLK_T_DISCARD, header, sector, count, false)?
            }
            DriverOp::WriteZeroes { sector, count, unmap } => {
                self.fill_range(VIRTIO_BLK_T_WRITE_ZEROES, header, sector, count, unmap)?
            }
            DriverOp::SecureErase { sector, count } => {
                self.fill_range(VIRTIO_BLK_T_SECURE_ERASE, header, sector, count, false)?
            }
            DriverOp::Id => {
                self.writable.push((data, wire_size(ID_SIZE)));
                (VIRTIO_BLK_T_GET_ID, 0)
            }
        })
    }

    fn fill_range(
        &mut self,
        kind: u32,
        header: u64,
        sector: u64,
        count: u32,
        unmap: bool,
    ) -> Result<(u32, u64), DriverError> {
        let flags = if unmap { SEGMENT_UNMAP } else { 0 };
        let segment =
            RawSegment { sector: sector.into(), num_sectors: count.into(), flags: flags.into() };
        self.arena.write(header + SEGMENT_AT, segment.as_bytes())?;
        self.readable.push((header + SEGMENT_AT, wire_size(SEGMENT_SIZE)));
        Ok((kind, 0))
    }

    fn check(&self, len: usize) -> Result<u32, DriverError> {
        let max = self.buffer_size;
        let fits = u32::try_from(len).ok().filter(|len| *len <= max);
        fits.ok_or(DriverError::TooLong { len, max: max as usize })
    }

    /// Publishes the requests that were submitted, and kicks if the device wants a kick. Returns
    /// true if it has kicked.
    ///
    /// # Errors
    /// [`DriverError::System`].
    pub fn publish(&mut self) -> Result<bool, DriverError> {
        self.vring.publish()
    }

    /// Takes a completed request, if there is one. Does not wait.
    pub fn take(&mut self) -> Option<Done> {
        let (head, written) = self.vring.queue().take_used()?;
        Some(self.finish(head, written))
    }

    /// Takes a completed request; sleeps until the device calls if there is none.
    ///
    /// # Errors
    /// [`DriverError::Timeout`], [`DriverError::System`].
    pub fn wait(&mut self, timeout: Duration) -> Result<Done, DriverError> {
        let (head, written) = self.vring.wait_used(timeout)?;
        Ok(self.finish(head, written))
    }

    /// Asks the device to call when it completes the next request. True: a request is complete
    /// already; the device may have completed it before it was asked, and will not call.
    pub fn ask_for_call(&mut self) -> bool {
        self.vring.queue().enable_notifications()
    }

    /// Sleeps until the device calls, for at most `timeout`; does not look at the ring. False: no
    /// call came.
    ///
    /// # Errors
    /// [`DriverError::System`].
    pub fn wait_call(&self, timeout: Duration) -> Result<bool, DriverError> {
        self.vring.wait_call(timeout)
    }

    /// Takes a completed request; polls the ring until there is one.
    ///
    /// # Errors
    /// [`DriverError::Timeout`].
    pub fn poll(&mut self, timeout: Duration) -> Result<Done, DriverError> {
        let deadline = now() + timeout;
        loop {
            for _ in 0..1000 {
                if let Some(done) = self.take() {
                    return Ok(done);
                }
                std::hint::spin_loop();
            }
            if now() >= deadline {
                return Err(DriverError::Timeout);
            }
        }
    }

    fn finish(&mut self, head: u16, written: u32) -> Done {
        let tag = self.slot_of[usize::from(head)];
        self.free.push(tag);
        let [status, _] =
            self.slots[usize::from(tag)].words.load_u16(wire_offset(STATUS_AT)).to_le_bytes();
        Done { tag, status, written }
    }

    /// The guest address of a request's data buffer.
    #[must_use]
    pub fn data_addr(&self, tag: u16) -> u64 {
        self.slots[usize::from(tag)].data
    }

    /// Copies the data that a request has read.
    ///
    /// # Errors
    /// [`DriverError::Memory`].
    pub fn read_data(&self, tag: u16, bytes: &mut [u8]) -> Result<(), DriverError> {
        self.arena.read(self.data_addr(tag), bytes)
    }

    /// Runs one request to its end and checks its status. No other request may be in flight.
    ///
    /// # Errors
    /// [`DriverError::Status`] if it failed, [`DriverError::Timeout`] after 10 seconds.
    pub fn run(&mut self, op: DriverOp<'_>) -> Result<Done, DriverError> {
        self.submit(op)?.ok_or(DriverError::RingFull)?;
        self.publish()?;
        let done = self.wait(Duration::from_secs(10))?;
        if done.status == 0 { Ok(done) } else { Err(DriverError::Status(done.status)) }
    }

    /// Reads from `sector` on.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn read(&mut self, sector: u64, bytes: &mut [u8]) -> Result<(), DriverError> {
        let done = self.run(DriverOp::Read { sector, len: bytes.len() })?;
        self.read_data(done.tag, bytes)
    }

    /// Writes from `sector` on.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn write(&mut self, sector: u64, data: &[u8]) -> Result<(), DriverError> {
        self.run(DriverOp::Write { sector, data }).map(|_| ())
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn flush(&mut self) -> Result<(), DriverError> {
        self.run(DriverOp::Flush).map(|_| ())
    }
}

/// Splits `len` bytes at guest address `addr` into descriptors of at most `segment_size` bytes.
fn push_segments(list: &mut Vec<(u64, u32)>, addr: u64, len: u32, segment_size: u32) {
    let mut at = 0;
    while at < len {
        let part = segment_size.min(len - at);
        list.push((addr + u64::from(at), part));
        at += part;
    }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |b| u64::from_ne_bytes(*b))
}

#[allow(clippy::cast_possible_truncation, reason = "sizes of the protocol's structures")]
const fn wire_size(size: usize) -> u32 {
    size as u32
}

#[allow(clippy::cast_possible_truncation, reason = "offsets inside a slot")]
const fn wire_offset(offset: u64) -> usize {
    offset as usize
}
