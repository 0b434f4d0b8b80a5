//! A bare loop that writes small frames to a tap: one write for each, nothing between.

use super::frame::{FRAME_MAX, FlowFrame, FlowKind};
use super::net::NetLoadResult;
use super::{LoadError, join};
use crate::measure::{median_ns, now, own_cpu_seconds, waited_seconds};
use clap::Args;
use manyring_backend::net::{Port, Readiness};
use manyring_backend::sys::tuntap;
use manyring_driver::wire::net::HEADER_SIZE;
use manyring_memory::Mapping;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Frames between two reads of the clock.
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
    #[arg(long, value_enum, default_value_t = FlowKind::Apart)]
    flow: FlowKind,
    /// How long, in seconds.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
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

/// The cost of a frame at each tap of a bridge.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct TapCosts {
    pub(crate) write_ns: u64,
    pub(crate) read_ns: u64,
}

/// The names of the two taps.
pub(crate) const TAPS: [&str; 2] = ["near", "far"];

/// The frame that is timed: its flow, such that nothing is merged, and its bytes.
const FRAME: (FlowKind, usize) = (FlowKind::Apart, 64);

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

/// Longest time for all rounds together.
const BRIDGE: Duration = Duration::from_secs(1);
