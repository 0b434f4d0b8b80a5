//! The small frames that loads send, and a bare loop that writes them to a tap: one write for each,
//! nothing between.

use super::net::{FRAME_MAX, NetLoadResult};
use super::{LoadError, join};
use crate::measure::{median_ns, now, own_cpu_seconds, waited_seconds};
use clap::{Args, ValueEnum};
use manyring_backend::net::{Port, Readiness};
use manyring_backend::sys::tuntap;
use manyring_driver::wire::net::{HDR_F_NEEDS_CSUM, HEADER_SIZE, RawHeader};
use manyring_memory::Mapping;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
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
    /// The flows that the frames belong to.
    #[arg(long, value_enum, default_value_t = Flow::Apart)]
    flow: Flow,
    /// How long, in seconds.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

/// The flows of frames, which decide whether a device can merge them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Flow {
    /// UDP datagrams, each of a flow of its own: nothing can be merged.
    Apart,
    /// UDP datagrams of one flow.
    Udp,
    /// TCP segments of one flow.
    Tcp,
    /// TCP segments, each of a flow of its own.
    TcpApart,
}

impl Flow {
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Apart => "apart",
            Self::Udp => "udp",
            Self::Tcp => "tcp",
            Self::TcpApart => "tcp-apart",
        }
    }

    const fn is_tcp(self) -> bool {
        matches!(self, Self::Tcp | Self::TcpApart)
    }
}

/// A packet over IPv4 to nobody.
pub(super) struct FlowFrame {
    flow: Flow,
    bytes: Vec<u8>,
    number: u16,
}

/// Where the IPv4 header lies, and the header of UDP or TCP, which begins with its source port.
const IP_AT: usize = 14;
const PORT_AT: usize = 34;
/// Bytes of a TCP header.
const TCP_SIZE: usize = 20;

impl FlowFrame {
    /// Ethernet, IPv4 and TCP headers, and a byte.
    pub(super) const SIZE_MIN: usize = PORT_AT + TCP_SIZE + 1;

    /// A frame of `size` bytes.
    pub(super) fn new(flow: Flow, size: usize) -> Self {
        let length = |n: usize| u16::try_from(n).unwrap_or(u16::MAX).to_be_bytes();
        let protocol = if flow.is_tcp() { 6 } else { 17 };
        let mut bytes = vec![255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 1, 8, 0];
        bytes.extend([0x45, 0]);
        bytes.extend(length(size - 14));
        // No fragment; 64 hops, UDP, checksum to come; from and to addresses for documentation.
        bytes.extend([0, 0, 0x40, 0, 64, protocol, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
        let sum = checksum(&bytes[IP_AT..PORT_AT]);
        bytes[24..26].copy_from_slice(&sum.to_be_bytes());
        bytes.extend([0, 7, 0, 9]);
        // The checksum that is left to the host: of addresses, protocol and length.
        let own = [&bytes[26..PORT_AT], &[0, protocol], &length(size - PORT_AT)].concat();
        let partial = (!checksum(&own)).to_be_bytes();
        if flow.is_tcp() {
            bytes.extend([0, 0, 0, 0, 0, 0, 0, 1, 0x50, 0x10, 1, 0]);
            bytes.extend(partial);
        } else {
            bytes.extend(length(size - PORT_AT));
            bytes.extend(partial);
        }
        bytes.extend((0..=u8::MAX).cycle().take(size - bytes.len()));
        Self { flow, bytes, number: 0 }
    }

    /// The header of the frame: a complete frame, or one whose checksum is left to the host.
    pub(super) fn header(&self) -> RawHeader {
        let offset = if self.flow.is_tcp() { 16 } else { 6 };
        match self.flow {
            Flow::Apart => RawHeader::default(),
            Flow::Udp | Flow::Tcp | Flow::TcpApart => RawHeader {
                flags: HDR_F_NEEDS_CSUM,
                csum_start: 34.into(),
                csum_offset: offset.into(),
                ..RawHeader::default()
            },
        }
    }

    /// The next one: of the next flow, or of the same. Packets that are not cut may all have the
    /// same identification.
    #[inline]
    pub(super) fn next(&mut self) -> &[u8] {
        self.number = self.number.wrapping_add(1);
        match self.flow {
            Flow::Apart | Flow::TcpApart => {
                self.bytes[PORT_AT..PORT_AT + 2].copy_from_slice(&self.number.to_be_bytes());
            }
            Flow::Udp => {}
            Flow::Tcp => {
                let payload = u32::try_from(self.bytes.len() - PORT_AT - TCP_SIZE).unwrap_or(0);
                let sequence = u32::from(self.number).wrapping_mul(payload);
                self.bytes[PORT_AT + 4..PORT_AT + 8].copy_from_slice(&sequence.to_be_bytes());
            }
        }
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
        return Err(LoadError::Options("frames of 55 to 1500 bytes"));
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
    let mut frame = FlowFrame::new(args.flow, args.size);
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

/// Rounds of frames that are written to one tap and read from the other.
const ROUNDS: usize = 200;

/// The cost of a frame at each of the two taps of a bridge.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct TapCosts {
    pub(crate) write_ns: u64,
    pub(crate) read_ns: u64,
}

/// The names of the two taps.
pub(crate) const TAPS: [&str; 2] = ["near", "far"];

/// Bytes of a frame: those that nothing can be merged with.
const FRAME: (Flow, usize) = (Flow::Apart, 64);

/// Writes frames to one of the two taps of a bridge and reads them from the other, each by a call
/// of its own; medians.
///
/// # Errors
/// [`LoadError`] if a tap cannot be had, or if the bridge does not carry frames.
pub(crate) fn costs() -> Result<TapCosts, LoadError> {
    let failed = |problem: String| LoadError::Client { step: "taps", problem };
    let [near, far] = TAPS.map(|tap| join::open_tap(tap, 1));
    let (near, far) = (near.map_err(failed)?, far.map_err(failed)?);
    let tx = near.open_tx(0).map_err(|e| failed(e.to_string()))?;
    let rx = far.open_rx(0).map_err(|e| failed(e.to_string()))?;
    let (Readiness::Fd(to), Readiness::Fd(from)) = (tx.readiness(), rx.readiness()) else {
        return Err(LoadError::Options("a tap without a file descriptor"));
    };
    let (flow, size) = FRAME;
    let memory = Mapping::anonymous(4096).map_err(|e| failed(e.to_string()))?;
    let (Some(frame), Some(room)) = (memory.slice(0, HEADER_SIZE + size), memory.slice(2048, 2048))
    else {
        return Err(LoadError::Options("a buffer of no size"));
    };
    let mut next = FlowFrame::new(flow, size);
    let (mut writes, mut reads) = (Vec::new(), Vec::new());
    let start = now();
    while reads.len() < ROUNDS && start.elapsed() < BRIDGE {
        frame.split_at(HEADER_SIZE).1.write_from(next.next());
        let begin = now();
        (0..BURST)
            .try_for_each(|_| tuntap::write(to, &[frame]).map(drop))
            .map_err(|e| failed(e.to_string()))?;
        let written = begin.elapsed();
        let begin = now();
        let is_there = |_: &u64| tuntap::read(from, &[room]).is_ok();
        let read = (0..BURST).take_while(is_there).count();
        let took = begin.elapsed();
        // A port of a bridge begins to forward some time after it has joined.
        if u64::try_from(read) == Ok(BURST) {
            writes.push(written);
            reads.push(took);
        }
    }
    if reads.is_empty() {
        return Err(failed("the bridge carried no frame".to_owned()));
    }
    let median = |times: &mut [Duration]| median_ns(times) / BURST;
    Ok(TapCosts { write_ns: median(&mut writes), read_ns: median(&mut reads) })
}

/// Longest time for all of it.
const BRIDGE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_driver::wire::net::head::{HEAD_SIZE_MAX, Head, Joined};

    #[test]
    fn a_generated_frame_has_a_right_header_and_a_flow_of_its_own() {
        let mut frame = FlowFrame::new(Flow::Apart, 64);
        let first = frame.next().to_vec();
        assert_eq!((first.len(), &first[16..18]), (64, &[0, 50][..]));
        assert_eq!(checksum(&first[14..34]), 0, "the sum over a right header");
        assert_ne!(first, frame.next());
        assert_eq!(&frame.next()[38..40], [0, 30]);
    }

    #[test]
    fn frames_of_one_flow_are_such_as_a_host_joins() {
        for (flow, spared) in
            [(Flow::Apart, false), (Flow::Udp, true), (Flow::Tcp, true), (Flow::TcpApart, false)]
        {
            let mut frame = FlowFrame::new(flow, 64);
            let header = frame.header();
            let mut head = || {
                let mut start = [0; HEAD_SIZE_MAX];
                start[..64].copy_from_slice(frame.next());
                Head::parse(&header, &start, 64, 64)
            };
            let joins = match (head(), head()) {
                (Ok(first), Ok(second)) => Joined::new(first).add(&second),
                _ => false,
            };
            assert_eq!(joins, spared, "{flow:?}");
        }
    }
}
