//! The guest of a port: its memory, what it sends and receives, and frames made by hand.

use crate::space::TIMEOUT;
use manyring_backend::net::{Frames, Port, PortRx, PortTx, Readiness, Sent};
use manyring_memory::{GuestSlice, Mapping, SliceList};
use manyring_wire::net::{HEADER_SIZE, RawNetHeader};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::sync::Arc;

/// The address of a frame's maker, as the kernel is told it.
pub(crate) const GUEST_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x11];
/// The host's address in tests that need one, and the guest's.
pub(crate) const HOST: [u8; 4] = [10, 77, 0, 1];
pub(crate) const GUEST: [u8; 4] = [10, 77, 0, 2];

/// Memory for frames, and a burst.
pub(crate) struct Guest {
    memory: Arc<Mapping>,
    frames: Frames,
}

/// Bytes of a guest's memory on each side.
const ROOM: usize = 1 << 17;

impl Guest {
    pub(crate) fn new() -> Self {
        let memory = Arc::new(Mapping::anonymous(2 * ROOM as u64).unwrap());
        Self { memory, frames: Frames::new().unwrap() }
    }

    /// Sends one frame behind `header`, in pieces of `piece` bytes.
    pub(crate) fn send_in(
        &mut self,
        tx: &mut dyn PortTx,
        header: RawNetHeader,
        frame: &[u8],
        piece: usize,
    ) -> Sent {
        self.memory.slice(0, ROOM).unwrap().write_from(frame);
        let place = |at: usize| (at as u64, u32::try_from(piece.min(frame.len() - at)).unwrap());
        let places: Vec<_> = (0..frame.len()).step_by(piece).map(place).collect();
        let slices = SliceList::of_mapping(&self.memory, &places).unwrap();
        self.frames.clear();
        assert!(self.frames.push(&header, slices.all(), 0, frame.len()));
        tx.send(&self.frames, 0)
    }

    /// Sends one finished frame; it must go.
    pub(crate) fn send(&mut self, tx: &mut dyn PortTx, frame: &[u8]) {
        let sent = self.send_in(tx, RawNetHeader::default(), frame, ROOM);
        assert_eq!(sent, Sent { taken: 1, ..Sent::default() });
    }

    /// Sends the same small frame `count` times in one burst.
    pub(crate) fn send_burst(&mut self, tx: &mut dyn PortTx, frame: &[u8], count: usize) -> Sent {
        self.send_copies(tx, RawNetHeader::default(), frame, count)
    }

    /// Sends the same frame `count` times in one burst, behind `header`.
    pub(crate) fn send_copies(
        &mut self,
        tx: &mut dyn PortTx,
        header: RawNetHeader,
        frame: &[u8],
        count: usize,
    ) -> Sent {
        self.memory.slice(0, ROOM).unwrap().write_from(frame);
        let len = u32::try_from(frame.len()).unwrap();
        let slices = SliceList::of_mapping(&self.memory, &[(0, len)]).unwrap();
        self.frames.clear();
        for _ in 0..count {
            assert!(self.frames.push(&header, slices.all(), 0, frame.len()));
        }
        tx.send(&self.frames, 0)
    }

    /// Buffers for the longest frame, in pieces of `piece` bytes.
    pub(crate) fn buffers(&self, piece: usize) -> Vec<GuestSlice<'_>> {
        let slice = |at| self.memory.slice(ROOM + at, piece.min(ROOM - at)).unwrap();
        (0..ROOM).step_by(piece).map(slice).collect()
    }

    /// A frame that is there: its header and itself.
    pub(crate) fn try_recv_in(
        &mut self,
        rx: &mut dyn PortRx,
        piece: usize,
    ) -> Result<(RawNetHeader, Vec<u8>), Errno> {
        let len = rx.recv(&self.buffers(piece))?;
        let mut bytes = vec![0; len];
        self.memory.slice(ROOM, ROOM).unwrap().read_into(&mut bytes);
        let header: RawNetHeader =
            zerocopy::FromBytes::read_from_bytes(&bytes[..HEADER_SIZE]).unwrap();
        Ok((header, bytes.split_off(HEADER_SIZE)))
    }

    pub(crate) fn try_recv(
        &mut self,
        rx: &mut dyn PortRx,
    ) -> Result<(RawNetHeader, Vec<u8>), Errno> {
        self.try_recv_in(rx, ROOM)
    }

    /// Waits for the next frame that `is_it` says is meant; others are passed over.
    pub(crate) fn recv(
        &mut self,
        rx: &mut dyn PortRx,
        is_it: impl Fn(&[u8]) -> bool,
    ) -> (RawNetHeader, Vec<u8>) {
        for _ in 0..10_000 {
            match self.try_recv(rx) {
                Ok((header, frame)) if is_it(&frame) => return (header, frame),
                Ok(_) => {}
                Err(Errno::AGAIN) => assert!(wait_for_input(rx), "the frame does not come"),
                Err(errno) => panic!("{errno}"),
            }
        }
        panic!("only other frames come");
    }

    /// All frames that are there and meant.
    pub(crate) fn drain(&mut self, rx: &mut dyn PortRx, is_it: impl Fn(&[u8]) -> bool) -> usize {
        let mut count = 0;
        while let Ok((_, frame)) = self.try_recv(rx) {
            count += usize::from(is_it(&frame));
        }
        count
    }
}

/// False if nothing came.
pub(crate) fn wait_for_input(rx: &dyn PortRx) -> bool {
    let Readiness::Fd(fd) = rx.readiness() else { panic!("it must have a file descriptor") };
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::try_from(TIMEOUT).unwrap())).unwrap() > 0
}

/// Both halves of pair `index`.
pub(crate) fn halves(port: &dyn Port, index: usize) -> (Box<dyn PortTx>, Box<dyn PortRx>) {
    (port.open_tx(index).unwrap(), port.open_rx(index).unwrap())
}

/// The one's complement sum of `bytes` as it is put into headers.
pub(crate) fn checksum(bytes: &[u8]) -> u16 {
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap()
}

/// An Ethernet frame.
pub(crate) fn ethernet(to: [u8; 6], from: [u8; 6], ether_type: u16, payload: &[u8]) -> Vec<u8> {
    [&to[..], &from, &ether_type.to_be_bytes(), payload].concat()
}

/// An IPv4 packet with its checksum.
pub(crate) fn ipv4(from: [u8; 4], to: [u8; 4], protocol: u8, payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(20 + payload.len()).unwrap().to_be_bytes();
    let mut header = vec![0x45, 0, len[0], len[1], 0, 1, 0x40, 0, 64, protocol, 0, 0];
    header.extend(from);
    header.extend(to);
    let sum = checksum(&header).to_be_bytes();
    header[10..12].copy_from_slice(&sum);
    [&header, payload].concat()
}

/// An ICMP echo request that counts up to `len` bytes of data.
pub(crate) fn echo_request(sequence: u16, len: usize) -> Vec<u8> {
    let mut message = vec![8, 0, 0, 0, 0x4d, 0x52];
    message.extend(sequence.to_be_bytes());
    message.extend((0..=u8::MAX).cycle().take(len));
    let sum = checksum(&message).to_be_bytes();
    message[2..4].copy_from_slice(&sum);
    message
}

/// An ARP request for `target`.
pub(crate) fn arp_request(from: [u8; 4], target: [u8; 4]) -> Vec<u8> {
    let head = [0, 1, 8, 0, 6, 4, 0, 1];
    let body = [&head[..], &GUEST_MAC, &from, &[0; 6], &target].concat();
    ethernet([0xff; 6], GUEST_MAC, 0x0806, &body)
}

pub(crate) fn ether_type(frame: &[u8]) -> u16 {
    u16::from_be_bytes([frame[12], frame[13]])
}

/// True for an IPv4 frame of `protocol`.
pub(crate) fn is_ipv4(frame: &[u8], protocol: u8) -> bool {
    ether_type(frame) == 0x0800 && frame[23] == protocol
}
