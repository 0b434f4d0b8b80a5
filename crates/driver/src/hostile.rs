//! A toolbox that spoils a *valid* ring: random noise reaches nothing.
//!
//! [`HostileRing`] writes a correct virtio-blk read into a ring's first descriptors, spoils one
//! thing about it ([`Spoil`]), and makes it available. It writes words as a guest's kernel could,
//! and uses no code of a device. [`HostileNet`] does the same to the rings of a network device.
//! [`GiantRing`] offers requests as large as the limits allow. [`OddFd`] makes file descriptors
//! that block every thread that touches them. [`HeldLock`] holds locks of the kernel behind file
//! descriptors.

mod fds;
mod giant;
mod hold;
mod net;

pub use fds::{OddDescriptor, OddFd, fill_eventfd};
pub use giant::GiantRing;
pub use hold::{HeldLock, Withheld};
pub use net::{CtrlSpoil, FRAME_SIZE, HostileNet, RxSpoil, TxSpoil};

use crate::{Arena, DriverError, Virtqueue};
use manyring_memory::Words;
use manyring_queue::RingAddresses;
use manyring_wire::blk::{RawBlkHeader, VIRTIO_BLK_T_IN};
use manyring_wire::virtqueue::{
    AVAIL_ALIGN, DESC_ALIGN, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESCRIPTOR_SIZE,
    Descriptor, RING_IDX, USED_ALIGN, avail_entry, avail_ring_size, desc_table_size,
    used_ring_size,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use zerocopy::IntoBytes;

/// One way to break the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Spoil {
    /// The last descriptor's `next` is the first descriptor.
    Loop,
    /// A descriptor's `next` is the descriptor itself.
    SelfLoop,
    /// `next` lies past the table.
    NextOutside,
    /// The head lies past the table.
    HeadOutside,
    /// The head is made available twice; the request is correct the first time.
    HeadTwice,
    /// A buffer at an address in no region.
    AddressOutside,
    /// A buffer whose end wraps around 2^64.
    AddressWraps,
    /// A buffer that begins in a region and ends past it.
    LengthOutside,
    /// The largest length that a descriptor can hold.
    LengthHuge,
    /// `avail.idx` jumps ahead by more than the ring holds.
    AvailJump,
    /// `avail.idx` goes back.
    AvailBack,
    /// A device-readable descriptor behind a device-writable one.
    ReadableAfterWritable,
    /// An indirect descriptor in an indirect table.
    IndirectNested,
    /// An indirect descriptor with the NEXT flag.
    IndirectNext,
    /// An indirect table whose length is no multiple of 16.
    IndirectOdd,
    /// An indirect table of no bytes.
    IndirectEmpty,
    /// An indirect table of more entries than any request needs.
    IndirectHuge,
    /// An indirect table in no region.
    IndirectOutside,
    /// `next` lies past the indirect table.
    IndirectNextOutside,
    /// The indirect table loops.
    IndirectLoop,
    /// A request without a device-writable byte, so without a status.
    NoStatus,
    /// A request header of 15 bytes.
    ShortHeader,
}

impl Spoil {
    /// Every way to break the rules.
    pub const ALL: [Self; 22] = [
        Self::Loop,
        Self::SelfLoop,
        Self::NextOutside,
        Self::HeadOutside,
        Self::HeadTwice,
        Self::AddressOutside,
        Self::AddressWraps,
        Self::LengthOutside,
        Self::LengthHuge,
        Self::AvailJump,
        Self::AvailBack,
        Self::ReadableAfterWritable,
        Self::IndirectNested,
        Self::IndirectNext,
        Self::IndirectOdd,
        Self::IndirectEmpty,
        Self::IndirectHuge,
        Self::IndirectOutside,
        Self::IndirectNextOutside,
        Self::IndirectLoop,
        Self::NoStatus,
        Self::ShortHeader,
    ];

    /// True if the request uses an indirect table. On a ring without `INDIRECT_DESC`, all of these
    /// spoils are the same fault: the feature was not negotiated.
    #[must_use]
    pub fn is_indirect(self) -> bool {
        matches!(
            self,
            Self::IndirectNested
                | Self::IndirectNext
                | Self::IndirectOdd
                | Self::IndirectEmpty
                | Self::IndirectHuge
                | Self::IndirectOutside
                | Self::IndirectNextOutside
                | Self::IndirectLoop
        )
    }
}

/// Bytes of data of a request.
const DATA_SIZE: u32 = 4096;
/// An address that no arena has.
const NOWHERE: u64 = 0x7fff_0000_0000_0000;

/// A ring whose descriptors and indexes are written word by word.
#[derive(Debug)]
pub struct HostileRing {
    arena: Arc<Arena>,
    size: u16,
    desc: Words,
    avail: Words,
    used: Words,
    avail_idx: u16,
    header: u64,
    data: u64,
    status: u64,
    table: u64,
    table_words: Words,
}

impl HostileRing {
    /// Takes over the ring of `vring`, which has at least four entries and nothing in flight.
    ///
    /// # Errors
    /// [`DriverError::ArenaFull`], [`DriverError::Memory`].
    pub fn new(arena: &Arc<Arena>, vring: &Virtqueue) -> Result<Self, DriverError> {
        Self::at(arena, vring.addresses(), vring.size())
    }

    /// Takes over the ring of `size` entries at these user addresses.
    ///
    /// # Errors
    /// [`DriverError::ArenaFull`], [`DriverError::Memory`].
    pub fn at(
        arena: &Arc<Arena>,
        addresses: RingAddresses,
        size: u16,
    ) -> Result<Self, DriverError> {
        let words = |addr, len, align| arena.memory().words(addr, len, align);
        let avail = words(addresses.available, avail_ring_size(size), AVAIL_ALIGN)?;
        let table = arena.alloc(8 * DESCRIPTOR_SIZE as u64, DESC_ALIGN)?;
        Ok(Self {
            arena: arena.clone(),
            size,
            desc: words(addresses.descriptor, desc_table_size(size), DESC_ALIGN)?,
            used: words(addresses.used, used_ring_size(size), USED_ALIGN)?,
            avail_idx: avail.load_u16(RING_IDX),
            avail,
            header: arena.alloc(16, 16)?,
            data: arena.alloc(DATA_SIZE.into(), 4096)?,
            status: arena.alloc(1, 1)?,
            table,
            table_words: arena.words(table, 8 * DESCRIPTOR_SIZE, DESC_ALIGN)?,
        })
    }

    /// Guest address of the request header.
    #[must_use]
    pub fn header_addr(&self) -> u64 {
        self.header
    }

    /// Guest address of the status byte.
    #[must_use]
    pub fn status_addr(&self) -> u64 {
        self.status
    }

    /// `used.idx` as the device left it.
    #[must_use]
    pub fn used_idx(&self) -> u16 {
        self.used.load_u16_acquire(RING_IDX)
    }

    /// Writes descriptor `index` of the ring's table.
    pub fn set_descriptor(&self, index: u16, desc: Descriptor) {
        store(&self.desc, index, desc);
    }

    /// Writes descriptor `index` of the indirect table (of eight).
    pub fn set_indirect(&self, index: u16, desc: Descriptor) {
        store(&self.table_words, index, desc);
    }

    /// Makes `head` available.
    pub fn make_available(&mut self, head: u16) {
        self.avail.store_u16(avail_entry(self.avail_idx & (self.size - 1)), head);
        self.jump(1);
    }

    /// Advances `avail.idx` by any amount.
    pub fn jump(&mut self, by: u16) {
        self.avail_idx = self.avail_idx.wrapping_add(by);
        self.avail.store_u16_release(RING_IDX, self.avail_idx);
    }

    /// The three descriptors of a correct read of sector 0.
    fn request(&self) -> [Descriptor; 3] {
        let link = |addr, len, flags, next| Descriptor { addr, len, flags, next };
        [
            link(self.header, 16, DESC_F_NEXT, 1),
            link(self.data, DATA_SIZE, DESC_F_WRITE | DESC_F_NEXT, 2),
            link(self.status, 1, DESC_F_WRITE, 0),
        ]
    }

    /// Writes the header of a request of type `kind` at `sector`, and 255 ("none") as the status
    /// byte.
    /// # Errors
    /// [`DriverError::Memory`].
    pub fn write_header(&self, kind: u32, sector: u64) -> Result<(), DriverError> {
        let raw = RawBlkHeader { kind: kind.into(), reserved: 0.into(), sector: sector.into() };
        self.arena.write(self.header, raw.as_bytes())?;
        self.arena.write(self.status, &[255])
    }

    /// The status byte.
    ///
    /// # Errors
    /// [`DriverError::Memory`].
    pub fn status(&self) -> Result<u8, DriverError> {
        let mut byte = [0];
        self.arena.read(self.status, &mut byte)?;
        Ok(byte[0])
    }

    /// Offers a correct read of sector 0.
    ///
    /// # Errors
    /// [`DriverError::Memory`].
    pub fn offer_valid(&mut self) -> Result<(), DriverError> {
        self.write_header(VIRTIO_BLK_T_IN, 0)?;
        for (index, desc) in (0..).zip(self.request()) {
            self.set_descriptor(index, desc);
        }
        self.make_available(0);
        Ok(())
    }

    /// Offers a read of sector 0 that is spoiled in one way.
    ///
    /// # Errors
    /// [`DriverError::Memory`].
    pub fn offer(&mut self, spoil: Spoil) -> Result<(), DriverError> {
        self.write_header(VIRTIO_BLK_T_IN, 0)?;
        let mut parts = self.request();
        self.spoil_parts(spoil, &mut parts);
        if spoil.is_indirect() {
            for (index, desc) in (0..).zip(parts) {
                self.set_indirect(index, desc);
            }
            self.set_descriptor(0, self.indirect(spoil));
        } else {
            for (index, desc) in (0..).zip(parts) {
                self.set_descriptor(index, desc);
            }
        }
        match spoil {
            Spoil::HeadOutside => self.make_available(self.size),
            Spoil::HeadTwice => {
                for n in 0..2 {
                    let slot = self.avail_idx.wrapping_add(n) & (self.size - 1);
                    self.avail.store_u16(avail_entry(slot), 0);
                }
                self.jump(2);
            }
            Spoil::AvailJump => self.jump(self.size + 1),
            Spoil::AvailBack => self.jump(u16::MAX),
            _ => self.make_available(0),
        }
        Ok(())
    }

    fn spoil_parts(&self, spoil: Spoil, parts: &mut [Descriptor; 3]) {
        match spoil {
            Spoil::Loop | Spoil::IndirectLoop => {
                parts[2].flags |= DESC_F_NEXT;
                // The data descriptor again: each descriptor in the loop is valid by itself.
                parts[2].next = 1;
            }
            Spoil::SelfLoop => parts[1].next = 1,
            Spoil::NextOutside => parts[1].next = self.size,
            Spoil::IndirectNextOutside => parts[1].next = 3,
            Spoil::AddressOutside => parts[1].addr = NOWHERE,
            Spoil::AddressWraps => parts[1].addr = u64::MAX - 16,
            Spoil::LengthOutside => parts[1].len = 1 << 30,
            Spoil::LengthHuge => parts[1].len = u32::MAX,
            Spoil::ReadableAfterWritable => parts[2].flags &= !DESC_F_WRITE,
            Spoil::IndirectNested => parts[1].flags |= DESC_F_INDIRECT,
            Spoil::NoStatus => parts[0].flags &= !DESC_F_NEXT,
            Spoil::ShortHeader => parts[0].len = 15,
            _ => {}
        }
    }

    fn indirect(&self, spoil: Spoil) -> Descriptor {
        let whole = 3 * 16;
        let (addr, len, flags) = match spoil {
            Spoil::IndirectNext => (self.table, whole, DESC_F_INDIRECT | DESC_F_NEXT),
            Spoil::IndirectOdd => (self.table, whole + 1, DESC_F_INDIRECT),
            Spoil::IndirectEmpty => (self.table, 0, DESC_F_INDIRECT),
            Spoil::IndirectHuge => (self.table, 1 << 20, DESC_F_INDIRECT),
            Spoil::IndirectOutside => (NOWHERE, whole, DESC_F_INDIRECT),
            _ => (self.table, whole, DESC_F_INDIRECT),
        };
        Descriptor { addr, len, flags, next: 1 }
    }
}

fn store(table: &Words, index: u16, desc: Descriptor) {
    let at = usize::from(index) * DESCRIPTOR_SIZE;
    let (low, high) = desc.emit();
    table.store_u64(at, low);
    table.store_u64(at + 8, high);
}

/// A thread that keeps changing 16 bytes of guest memory back and forth until it is dropped.
#[derive(Debug)]
pub struct Racer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Racer {
    /// Switches the two 8-byte words at `addr` (8-aligned) between `one` and `other`.
    ///
    /// # Errors
    /// [`DriverError::Memory`], [`DriverError::Io`] if the thread cannot be started.
    pub fn start(
        arena: &Arc<Arena>,
        addr: u64,
        one: [u64; 2],
        other: [u64; 2],
    ) -> Result<Self, DriverError> {
        let words = arena.words(addr, 16, 8)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let race = move || {
            while !stopped.load(Ordering::Relaxed) {
                for [low, high] in [one, other] {
                    words.store_u64(0, low);
                    words.store_u64(8, high);
                }
            }
        };
        let thread = std::thread::Builder::new().name("racer".into()).spawn(race)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Racer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed already.
            let _ = thread.join();
        }
    }
}
