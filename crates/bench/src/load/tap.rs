//! A bare loop that writes small frames to a tap: one write for each, nothing between.

use super::net::{FRAME_MAX, NetLoadResult};
use super::{LoadError, join};
use crate::measure::{now, own_cpu_seconds, waited_seconds};
use clap::Args;
use manyring_backend::net::{Port, Readiness};
use manyring_backend::sys::tuntap;
use manyring_driver::wire::net::HEADER_SIZE;
use manyring_memory::Mapping;
use rustix::io::Errno;
use std::time::Duration;

/// Frames between two looks at the clock.
const BURST: u64 = 64;

/// `manyring-bench load tap-write ..`
#[derive(Args, Clone, Debug)]
pub(crate) struct TapWriteArgs {
    /// The tap.
    #[arg(long, value_name = "NAME")]
    tap: String,
    /// Bytes of a frame.
    #[arg(long, default_value_t = 64)]
    size: usize,
    /// How long, in seconds.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

/// A UDP datagram over IPv4 to nobody, each of a flow of its own: nothing can be merged.
pub(super) struct FlowFrame {
    bytes: Vec<u8>,
    flow: u16,
}

/// Where the UDP source port lies.
const PORT_AT: usize = 34;

impl FlowFrame {
    /// Ethernet, IPv4 and UDP headers.
    pub(super) const SIZE_MIN: usize = 42;

    /// A frame of `size` bytes.
    pub(super) fn new(size: usize) -> Self {
        let length = |n: usize| u16::try_from(n).unwrap_or(u16::MAX).to_be_bytes();
        let mut bytes = vec![255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 1, 8, 0];
        bytes.extend([0x45, 0]);
        bytes.extend(length(size - 14));
        // No fragment; 64 hops, UDP, checksum to come; from and to addresses for documentation.
        bytes.extend([0, 0, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
        let sum = checksum(&bytes[14..34]);
        bytes[24..26].copy_from_slice(&sum.to_be_bytes());
        bytes.extend([0, 0, 0, 9]);
        bytes.extend(length(size - 34));
        bytes.extend([0, 0]);
        bytes.extend((0..=u8::MAX).cycle().take(size - Self::SIZE_MIN));
        Self { bytes, flow: 0 }
    }

    /// The same of the next flow.
    #[inline]
    pub(super) fn next(&mut self) -> &[u8] {
        self.flow = self.flow.wrapping_add(1);
        self.bytes[PORT_AT..PORT_AT + 2].copy_from_slice(&self.flow.to_be_bytes());
        &self.bytes
    }
}

/// The checksum of the Internet protocols over whole words.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.as_chunks::<2>().0.iter().map(|pair| u32::from(u16::from_be_bytes(*pair)));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap_or(0)
}

/// Writes frames, each by a call of its own.
///
/// # Errors
/// [`LoadError`] if the tap cannot be had, or takes no frame.
pub(crate) fn run(args: &TapWriteArgs) -> Result<NetLoadResult, LoadError> {
    if !(FlowFrame::SIZE_MIN..=FRAME_MAX).contains(&args.size) {
        return Err(LoadError::Options("frames of 42 to 1500 bytes"));
    }
    let failed = |problem: String| LoadError::Client { step: "tap", problem };
    let port = join::open_tap(&args.tap, 1).map_err(failed)?;
    let half = port.open_tx(0).map_err(|e| failed(e.to_string()))?;
    let Readiness::Fd(fd) = half.readiness() else {
        return Err(LoadError::Options("a tap without a file descriptor"));
    };
    let len = HEADER_SIZE + args.size;
    let memory = Mapping::anonymous(len as u64).map_err(|e| failed(e.to_string()))?;
    let Some(slice) = memory.slice(0, len) else {
        return Err(LoadError::Options("a buffer of no size"));
    };
    let mut frame = FlowFrame::new(args.size);
    let (cpu, waited, start) = (own_cpu_seconds(), waited_seconds("thread-self"), now());
    let end = start + Duration::try_from_secs_f64(args.seconds).unwrap_or_default();
    let mut packets = 0;
    let mut last = start;
    while last < end {
        for _ in 0..BURST {
            slice.split_at(HEADER_SIZE).1.write_from(frame.next());
            match tuntap::write(fd, &[slice]) {
                Ok(_) => packets += 1,
                Err(Errno::AGAIN) => {}
                Err(errno) => return Err(failed(errno.to_string())),
            }
        }
        last = now();
    }
    Ok(NetLoadResult {
        packets,
        bytes: packets * args.size as u64,
        seconds: (last - start).as_secs_f64(),
        kicks: 0,
        calls: 0,
        bursts: 0,
        client_cpu_seconds: own_cpu_seconds() - cpu,
        waited_seconds: waited_seconds("thread-self") - waited,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generated_frame_has_a_right_header_and_a_flow_of_its_own() {
        let mut frame = FlowFrame::new(64);
        let first = frame.next().to_vec();
        assert_eq!((first.len(), &first[16..18]), (64, &[0, 50][..]));
        assert_eq!(checksum(&first[14..34]), 0, "the sum over a right header");
        assert_ne!(first, frame.next());
        assert_eq!(&frame.next()[38..40], [0, 30]);
    }
}
