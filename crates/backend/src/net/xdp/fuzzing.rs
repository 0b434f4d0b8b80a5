//! For the fuzz target `xdp_descriptor`: the check of descriptors that come back from AF_XDP.

use super::chunks::Chunks;
use super::ring::Place;

/// The chunks of one half of a pair.
#[derive(Debug)]
pub struct Lent(Chunks);

impl Lent {
    /// Makes `count` chunks of `size` bytes (a power of two), beginning with chunk number `first`.
    /// The kernel has none of them.
    #[must_use]
    pub fn new(first: u32, size: u32, count: u32) -> Self {
        Self(Chunks::new(first, size, count))
    }

    /// Gives the chunk at `addr` to the kernel. Returns false if the kernel has it already, or if
    /// no such chunk exists.
    pub fn give(&mut self, addr: u64) -> bool {
        self.0.give(addr)
    }

    /// Returns the chunk of an address that came back, if the kernel had it.
    pub fn take(&mut self, addr: u64) -> Option<u64> {
        self.0.take(addr)
    }

    /// Returns the chunk of a frame that came back, if the kernel had it, and the frame (address
    /// and length) if it lies in the chunk.
    pub fn take_frame(&mut self, addr: u64, len: u32) -> Option<(u64, Option<(u64, u32)>)> {
        let (chunk, frame) = self.0.take_frame(Place { addr, len })?;
        Some((chunk, frame.map(|frame| (frame.addr, frame.len))))
    }
}
