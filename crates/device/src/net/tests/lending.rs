//! A port whose frames lie in memory: it lends what arrives by its script, until it is released.

use super::*;
use manyring_memory::{GuestAddr, LastHit, SliceList};

/// Where frame n of those that are lent lies: each has this much room.
const ROOM: u64 = 0x1_1000;

/// The receiving half of a scripted port that lends.
#[derive(Debug)]
pub(super) struct Lending {
    port: Scripted,
    mapping: Arc<Mapping>,
    memory: Arc<GuestMemory>,
    frames: Frames,
}

impl Lending {
    pub(super) fn new(port: Scripted) -> Self {
        let mapping = Arc::new(Mapping::anonymous(ROOM * GROUP_FRAMES as u64).unwrap());
        let memory = Arc::new(GuestMemory::of_mapping(mapping.clone()));
        Self { port, mapping, memory, frames: Frames::new().unwrap() }
    }

    /// Puts `bytes` (header and frame) where frame `index` lies, the frame in one piece or in
    /// three, the first of which ends within an address.
    fn add(&mut self, index: usize, bytes: &[u8]) {
        let (header, frame) = bytes.split_first_chunk::<HEADER_SIZE>().unwrap();
        let (mut at, len) = (index as u64 * ROOM, frame.len());
        self.slice(index, len).write_from(frame);
        let is_whole = index.is_multiple_of(2) || len < 10;
        let pieces = if is_whole { vec![len] } else { vec![3, 4, len - 7] };
        let mut slices = SliceList::new();
        slices.restart(&self.memory);
        for len in pieces {
            slices.resolve(GuestAddr(at), len32(len), &mut LastHit::default()).unwrap();
            at += len as u64;
        }
        self.frames.push(&zerocopy::transmute!(*header), slices.all(), 0, len);
    }

    /// The first `len` bytes of the room of frame `index`.
    fn slice(&self, index: usize, len: usize) -> GuestSlice<'_> {
        self.mapping.slice(index * usize::try_from(ROOM).unwrap(), len).unwrap()
    }
}

impl PortRx for Lending {
    fn incoming(&mut self, max: usize) -> Incoming<'_> {
        assert!(max > 0);
        let port = self.port.clone();
        let mut script = port.script();
        script.on_look();
        if matches!(script.arrives.front(), Some(Err(_))) {
            return Incoming::Read;
        }
        self.frames.clear();
        let arrived = script.arrives.iter().map_while(|bytes| bytes.as_ref().ok());
        for (index, bytes) in arrived.take(max).enumerate() {
            self.add(index, bytes);
        }
        Incoming::Lent(&self.frames)
    }

    fn release(&mut self, count: usize) {
        let mut script = self.port.script();
        script.on_look();
        assert!(count <= self.frames.count(), "more than were lent");
        // Overwrite the released frames: a reader that still uses them gets wrong bytes.
        (0..count).for_each(|index| assert_eq!(self.slice(index, 64).write_from(&[0xee; 64]), 64));
        script.arrives.drain(..count);
    }

    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno> {
        self.port.recv(buffers)
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Never
    }
}
