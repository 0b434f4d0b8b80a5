//! Chains that a network device must survive: headers with false fields, empty chains, unknown
//! commands.

mod control_queue;
mod rx;
mod tx;

pub use control_queue::CtrlSpoil;
pub use rx::RxSpoil;
pub use tx::TxSpoil;

use super::HostileRing;
use crate::{Arena, DriverError, Virtqueue};
use manyring_wire::net::{HDR_F_NEEDS_CSUM, HEADER_SIZE, RawNetHeader};
use manyring_wire::virtqueue::{DESC_F_NEXT, DESC_F_WRITE, Descriptor};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Bytes of the frame that is offered.
pub const FRAME_SIZE: usize = 64;
/// Bytes of a frame that is too long.
const LONG_SIZE: u32 = 70 << 10;
/// Bytes of guest memory for one chain.
const AREA_SIZE: usize = 80 << 10;
/// A frame's Ethernet header: broadcast, with the type for local experiments.
const ETHERNET: [u8; 14] = [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 1, 0x88, 0xb5];

/// A ring of a network device, written word by word. Every chain begins at descriptor 0, so the
/// device must have returned a chain before the next one is offered.
#[derive(Debug)]
pub struct HostileNet {
    /// The ring that the chains are written to.
    pub ring: HostileRing,
    arena: Arc<Arena>,
    area: u64,
    status: u64,
}

impl HostileNet {
    /// Takes over the ring of `vring`, which has at least 16 entries and nothing in flight.
    ///
    /// # Errors
    /// [`DriverError::ArenaFull`], [`DriverError::Memory`].
    pub fn new(arena: &Arc<Arena>, vring: &Virtqueue) -> Result<Self, DriverError> {
        let ring = HostileRing::new(arena, vring)?;
        let area = arena.alloc(AREA_SIZE as u64, 4096)?;
        Ok(Self { ring, arena: arena.clone(), area, status: area })
    }

    /// The status byte of the command that was offered last; 255 if the device wrote none.
    ///
    /// # Errors
    /// [`DriverError::Memory`].
    pub fn status(&self) -> Result<u8, DriverError> {
        let mut byte = [0];
        self.arena.read(self.status, &mut byte)?;
        Ok(byte[0])
    }

    /// Offers `bytes` as a chain: first a device-readable descriptor of each size in `readable`,
    /// then a device-writable descriptor of each size in `writable`.
    ///
    /// # Errors
    /// [`DriverError::Memory`].
    pub fn offer(
        &mut self,
        bytes: &[u8],
        readable: &[u32],
        writable: &[u32],
    ) -> Result<(), DriverError> {
        self.arena.write(self.area, bytes)?;
        let parts = readable.iter().map(|len| (*len, 0));
        let parts: Vec<_> = parts.chain(writable.iter().map(|len| (*len, DESC_F_WRITE))).collect();
        self.offer_parts(&parts)
    }

    fn offer_parts(&mut self, parts: &[(u32, u16)]) -> Result<(), DriverError> {
        let mut addr = self.area;
        for (index, (len, flags)) in (0..).zip(parts) {
            let is_last = usize::from(index) + 1 == parts.len();
            let flags = if is_last { *flags } else { *flags | DESC_F_NEXT };
            self.ring.set_descriptor(index, Descriptor { addr, len: *len, flags, next: index + 1 });
            if is_last {
                self.status = addr;
                if flags & DESC_F_WRITE != 0 {
                    self.arena.write(addr, &[255])?;
                }
            }
            addr += u64::from(*len);
        }
        self.ring.make_available(0);
        Ok(())
    }

    /// Offers a correct frame of [`FRAME_SIZE`] bytes.
    ///
    /// # Errors
    /// [`DriverError::Memory`].
    pub fn send_valid(&mut self) -> Result<(), DriverError> {
        self.offer(&frame(RawNetHeader::default()), &[HEADER_BYTES, FRAME_BYTES], &[])
    }

    /// Offers a frame with one fault.
    ///
    /// # Errors
    /// [`DriverError::Memory`].
    pub fn send(&mut self, spoil: TxSpoil) -> Result<(), DriverError> {
        let bytes = frame(spoil.header());
        let (readable, writable): (&[u32], &[u32]) = match spoil {
            TxSpoil::ShortHeader => (&[HEADER_BYTES - 1], &[]),
            TxSpoil::HeaderAlone => (&[HEADER_BYTES], &[]),
            TxSpoil::EmptyFrame => (&[HEADER_BYTES, 0], &[]),
            TxSpoil::OneByte => (&[HEADER_BYTES, 1], &[]),
            TxSpoil::HeaderInPieces => (&[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, FRAME_BYTES], &[]),
            TxSpoil::ZeroLength => (&[0], &[]),
            TxSpoil::OnlyWritable => (&[], &[HEADER_BYTES, FRAME_BYTES]),
            TxSpoil::WritableToo => (&[HEADER_BYTES, FRAME_BYTES], &[64]),
            TxSpoil::TooLong => (&[HEADER_BYTES, LONG_SIZE], &[]),
            TxSpoil::TooLongInPieces => {
                (&[HEADER_BYTES, LONG_SIZE / 4, LONG_SIZE / 4, LONG_SIZE / 4, LONG_SIZE / 4], &[])
            }
            _ => (&[HEADER_BYTES, FRAME_BYTES], &[]),
        };
        self.offer(&bytes, readable, writable)
    }

    /// Offers a receive buffer with one fault.
    ///
    /// # Errors
    /// [`DriverError::Memory`].
    pub fn receive(&mut self, spoil: RxSpoil) -> Result<(), DriverError> {
        let (readable, writable): (&[u32], &[u32]) = match spoil {
            RxSpoil::ReadOnly => (&[2048], &[]),
            RxSpoil::ReadOnlyFirst => (&[HEADER_BYTES], &[2048]),
            RxSpoil::ZeroLength => (&[], &[0]),
            RxSpoil::OneByte => (&[], &[1]),
            RxSpoil::ShorterThanHeader => (&[], &[HEADER_BYTES - 1]),
            RxSpoil::HeaderAlone => (&[], &[HEADER_BYTES]),
        };
        self.offer(&[], readable, writable)
    }

    /// Offers a command with one fault.
    ///
    /// # Errors
    /// [`DriverError::Memory`].
    pub fn command(&mut self, spoil: CtrlSpoil) -> Result<(), DriverError> {
        let bytes = spoil.command();
        let len = u32::try_from(bytes.len()).unwrap_or(0);
        let (readable, writable): (&[u32], &[u32]) = match spoil {
            CtrlSpoil::NoStatus => (&[len], &[]),
            CtrlSpoil::OnlyStatus => (&[], &[1]),
            CtrlSpoil::Empty => (&[0], &[]),
            CtrlSpoil::EmptyStatus => (&[len], &[0]),
            _ => (&[len], &[1]),
        };
        self.offer(&bytes, readable, writable)
    }
}

/// [`HEADER_SIZE`] and [`FRAME_SIZE`], in the type of a descriptor's length.
const HEADER_BYTES: u32 = 12;
const FRAME_BYTES: u32 = 64;
const _: () = assert!(HEADER_BYTES as usize == HEADER_SIZE && FRAME_BYTES as usize == FRAME_SIZE);

/// The bytes of `header`, followed by the frame.
fn frame(header: RawNetHeader) -> Vec<u8> {
    let count = FRAME_SIZE - ETHERNET.len();
    let payload: Vec<u8> = (0..=u8::MAX).take(count).collect();
    let mut bytes = [header.as_bytes(), &ETHERNET, &payload].concat();
    if header.flags & HDR_F_NEEDS_CSUM != 0 {
        // Looks like TCP over IPv4, so that the frame has a place for a checksum.
        bytes[HEADER_SIZE + 12..][..3].copy_from_slice(&[8, 0, 0x45]);
        bytes[HEADER_SIZE + 20..][..4].copy_from_slice(&[0x40, 0, 64, 6]);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_memory::{copy_from_slices, total_len};
    use manyring_queue::{Batch, DeviceQueue, QueueConfig, RingFeatures};
    use manyring_wire::net::{Command, Offloads};

    const ALL: Offloads =
        Offloads { csum: true, tso4: true, tso6: true, ecn: true, uso4: true, uso6: true };

    /// A hostile ring, and the device half that reads it.
    struct Rig {
        hostile: HostileNet,
        queue: DeviceQueue,
    }

    impl Rig {
        fn new() -> Self {
            let arena = Arc::new(Arena::new(1 << 20).unwrap());
            let features = RingFeatures::default();
            let vring = Virtqueue::new(&arena, 0, 16, features, 0).unwrap();
            let addresses = vring.addresses();
            let config = QueueConfig { size: 16, addresses, base: 0.into(), features };
            let memory = arena.memory().clone();
            let queue = DeviceQueue::new(config, memory).unwrap();
            Self { hostile: HostileNet::new(&arena, &vring).unwrap(), queue }
        }

        /// The bytes that the device reads, and how many bytes it may write; `None`: the ring is at
        /// fault.
        fn take(&mut self) -> Option<(Vec<u8>, u64)> {
            let mut batch = Batch::new();
            if self.queue.pop_batch(&mut batch, 1) == 0 {
                assert!(self.queue.fault().is_some(), "nothing was offered");
                return None;
            }
            let (chain, readable, writable) = batch.take(0).unwrap();
            let mut bytes = vec![0; usize::try_from(total_len(&readable)).unwrap()];
            copy_from_slices(&readable, &mut bytes);
            let room = total_len(&writable);
            self.queue.push_used(chain, 0);
            self.queue.publish();
            Some((bytes, room))
        }
    }

    fn is_header_right(bytes: &[u8]) -> bool {
        let header = zerocopy::FromBytes::read_from_prefix(bytes);
        let (header, rest): (RawNetHeader, _) = header.unwrap();
        header.checked(rest.len(), ALL).is_ok_and(|header| header.is_in_place(rest))
    }

    #[test]
    fn a_valid_frame_passes_the_check_and_every_lie_fails_it() {
        let mut rig = Rig::new();
        rig.hostile.send_valid().unwrap();
        let (bytes, room) = rig.take().unwrap();
        assert_eq!((bytes.len(), room), (HEADER_SIZE + FRAME_SIZE, 0));
        assert!(is_header_right(&bytes));
        for spoil in TxSpoil::ALL.into_iter().filter(|spoil| spoil.is_header_lie()) {
            rig.hostile.send(spoil).unwrap();
            let (bytes, _) = rig.take().unwrap();
            assert_eq!(bytes.len(), HEADER_SIZE + FRAME_SIZE);
            assert!(!is_header_right(&bytes), "{spoil:?} is no lie");
        }
    }

    #[test]
    fn every_command_with_room_for_a_status_is_one_that_a_device_must_refuse() {
        for spoil in CtrlSpoil::ALL {
            let mut rig = Rig::new();
            rig.hostile.command(spoil).unwrap();
            let Some((bytes, room)) = rig.take() else { continue };
            assert_eq!(room > 0, spoil.has_status(), "{spoil:?}");
            // These three parse: only the device knows how many queues it has.
            let is_of_device = matches!(
                spoil,
                CtrlSpoil::PairsZero | CtrlSpoil::PairsTooMany | CtrlSpoil::QueueUnknown
            );
            if spoil.has_status() {
                assert_eq!(Command::parse(&bytes).is_ok(), is_of_device, "{spoil:?}");
                assert_eq!(rig.hostile.status().unwrap(), 255);
            }
        }
    }

    #[test]
    fn chains_have_the_shape_their_names_say() {
        let mut rig = Rig::new();
        let mut shape = |offer: &dyn Fn(&mut HostileNet)| {
            offer(&mut rig.hostile);
            rig.take().map(|(bytes, room)| (bytes.len(), room))
        };
        assert_eq!(shape(&|h| h.send(TxSpoil::TooLong).unwrap()), Some((12 + (70 << 10), 0)));
        assert_eq!(shape(&|h| h.send(TxSpoil::HeaderAlone).unwrap()), Some((12, 0)));
        assert_eq!(shape(&|h| h.send(TxSpoil::HeaderInPieces).unwrap()), Some((76, 0)));
        assert_eq!(shape(&|h| h.send(TxSpoil::OnlyWritable).unwrap()), Some((0, 76)));
        assert_eq!(shape(&|h| h.receive(RxSpoil::ReadOnly).unwrap()), Some((2048, 0)));
        assert_eq!(shape(&|h| h.receive(RxSpoil::ReadOnlyFirst).unwrap()), Some((12, 2048)));
        assert_eq!(shape(&|h| h.receive(RxSpoil::ShorterThanHeader).unwrap()), Some((0, 11)));
    }
}
