//! `null`: takes every frame and drops it; delivers nothing, or the same frame without end.

use super::{Frames, GROUP_FRAMES, Incoming, Port, PortRx, PortTx, Readiness, Sent};
use manyring_memory::{GuestSlice, Mapping, MemoryError, SliceList, copy_between, in_own_memory};
use manyring_wire::net::{FRAME_SIZE_MAX, HEADER_SIZE, Offloads, RawNetHeader};
use rustix::io::Errno;
use std::sync::Arc;

/// Bytes of the shortest generated frame: Ethernet's minimum without its checksum.
pub const GENERATED_SIZE_MIN: usize = 60;

/// A port without a host: frames that are sent to it are dropped.
#[derive(Debug)]
pub struct NullPort {
    queue_pairs: usize,
    /// The frame that the port delivers; if empty, it delivers nothing.
    generated: Arc<[u8]>,
}

impl NullPort {
    /// Makes a port with `queue_pairs` pairs. It delivers frames of `generated` bytes as fast as
    /// they are received; 0: none. Other values are clamped to 60 .. 65,553 bytes.
    #[must_use]
    pub fn new(queue_pairs: usize, generated: usize) -> Self {
        let generated = match generated {
            0 => Arc::default(),
            size => generate(size.clamp(GENERATED_SIZE_MIN, FRAME_SIZE_MAX)),
        };
        Self { queue_pairs, generated }
    }
}

/// Makes a frame: broadcast, from a local address, of the type for local experiments, then bytes
/// that count up.
fn generate(size: usize) -> Arc<[u8]> {
    const ETHERNET: [u8; 14] =
        [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02, 0, 0, 0, 0, 0x01, 0x88, 0xb5];
    let mut bytes = ETHERNET.to_vec();
    bytes.extend((0..=u8::MAX).cycle().take(size - ETHERNET.len()));
    bytes.into()
}

impl Port for NullPort {
    fn kind(&self) -> &'static str {
        "null"
    }

    fn queue_pairs(&self) -> usize {
        self.queue_pairs
    }

    fn taken(&self) -> Offloads {
        Offloads { csum: true, tso4: true, tso6: true, ecn: true, uso4: true, uso6: true }
    }

    fn given(&self) -> Offloads {
        self.taken()
    }

    fn mtu(&self) -> Option<u16> {
        None
    }

    fn open_tx(&self, _index: usize) -> Result<Box<dyn PortTx>, Errno> {
        Ok(Box::new(NullTx))
    }

    fn open_rx(&self, _index: usize) -> Result<Box<dyn PortRx>, Errno> {
        if self.generated.is_empty() {
            return Ok(Box::new(NullRx { generated: None }));
        }
        let lent = in_own_memory(|| lend_always(&self.generated));
        let generated = lent.map_err(|_| Errno::NOMEM)?;
        Ok(Box::new(NullRx { generated: Some(generated) }))
    }

    fn set_offloads(&self, _offloads: Offloads) -> Result<(), Errno> {
        Ok(())
    }

    fn set_attached(&self, _index: usize, _attached: bool) -> Result<(), Errno> {
        Ok(())
    }

    fn set_mtu(&self, _mtu: u16) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn set_link(&self, _up: bool) {}

    fn transmit(&self, _frame: &[u8]) -> Result<(), Errno> {
        Ok(())
    }
}

#[derive(Debug)]
struct NullTx;

impl PortTx for NullTx {
    #[inline]
    fn send(&mut self, frames: &Frames, first: usize) -> Sent {
        Sent { taken: frames.count() - first, ..Sent::default() }
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Always
    }
}

#[derive(Debug)]
struct NullRx {
    /// One frame, [`GROUP_FRAMES`] times, each behind a header of zeroes. The burst is lent again
    /// whenever the device asks.
    generated: Option<Frames>,
}

/// Makes a burst that lists `frame` many times, each time at the same memory, which nobody writes
/// any more.
fn lend_always(frame: &[u8]) -> Result<Frames, MemoryError> {
    let memory = Arc::new(Mapping::anonymous(frame.len() as u64)?);
    if let Some(whole) = memory.slice(0, frame.len()) {
        whole.write_from(frame);
    }
    let len = u32::try_from(frame.len()).map_err(|_| MemoryError::Overflow)?;
    let slices = SliceList::of_mapping(&memory, &[(0, len)])?;
    let mut frames = Frames::new()?;
    for _ in 0..GROUP_FRAMES {
        frames.push(&RawNetHeader::default(), slices.all(), 0, frame.len());
    }
    Ok(frames)
}

impl PortRx for NullRx {
    #[inline]
    fn incoming(&mut self, _: usize) -> Incoming<'_> {
        self.generated.as_ref().map_or(Incoming::Read, Incoming::Lent)
    }

    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno> {
        let Some(frames) = &self.generated else { return Err(Errno::AGAIN) };
        copy_between(buffers.iter(), 0, frames.slices(0));
        Ok(HEADER_SIZE + frames.len(0))
    }

    fn readiness(&self) -> Readiness<'_> {
        if self.generated.is_some() { Readiness::Always } else { Readiness::Never }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_memory::copy_from_slices;

    #[test]
    fn a_burst_keeps_headers_apart_and_skips_the_guests() {
        let guest = Arc::new(Mapping::anonymous(4096).unwrap());
        guest.slice(0, 4096).unwrap().write_from(b"HHHHHHHHHHHHpayload");
        let slices = SliceList::of_mapping(&guest, &[(0, 15), (15, 4)]).unwrap();
        let mut frames = Frames::new().unwrap();
        for n in 0..u16::try_from(super::super::FRAMES_MAX).unwrap() {
            let header = RawNetHeader { gso_size: n.into(), ..RawNetHeader::default() };
            assert!(frames.push(&header, slices.all(), HEADER_SIZE, 7));
        }
        assert!(!frames.push(&RawNetHeader::default(), slices.all(), HEADER_SIZE, 7), "it is full");
        let mut bytes = [0; HEADER_SIZE + 7];
        assert_eq!(copy_from_slices(frames.slices(9), &mut bytes), bytes.len());
        assert_eq!((bytes[4], &bytes[HEADER_SIZE..]), (9, &b"payload"[..]));
        assert_eq!((frames.header(9).gso_size.get(), frames.len(9)), (9, 7));
        assert_eq!((frames.header(64), frames.len(64)), (RawNetHeader::default(), 0));
        assert_eq!(NullTx.send(&frames, 60), Sent { taken: 4, ..Sent::default() });
    }

    #[test]
    fn the_generator_delivers_whole_frames_and_the_sink_none() {
        let memory = Mapping::anonymous(4096).unwrap();
        let buffers = [memory.slice(0, 2048).unwrap()];
        let port = NullPort::new(1, 64);
        let mut rx = port.open_rx(0).unwrap();
        assert_eq!(rx.recv(&buffers), Ok(HEADER_SIZE + 64));
        let mut bytes = [0; HEADER_SIZE + 64];
        buffers[0].read_into(&mut bytes);
        assert_eq!(
            (&bytes[..HEADER_SIZE], &bytes[HEADER_SIZE..]),
            (&[0; 12][..], &port.generated[..])
        );
        for _ in 0..3 {
            let Incoming::Lent(frames) = rx.incoming(GROUP_FRAMES) else { panic!("it lends") };
            assert_eq!(frames.count(), GROUP_FRAMES, "there are always more");
            for index in 0..frames.count() {
                let mut lent = [0xff; HEADER_SIZE + 64];
                assert_eq!(copy_from_slices(frames.slices(index), &mut lent), bytes.len());
                assert_eq!((lent, frames.len(index)), (bytes, 64));
            }
            rx.release(5);
        }
        let mut sink = NullPort::new(1, 0).open_rx(0).unwrap();
        assert!(matches!(sink.incoming(1), Incoming::Read));
        assert_eq!(sink.recv(&buffers), Err(Errno::AGAIN));
    }
}
