//! Frames from one guest to another by two driver halves of our own: one thread drives both guests,
//! so that the back-end between them has a CPU of its own. Or, for comparison, the same bytes by
//! one copy in memory.

use super::net::NetLoadResult;
use super::{LoadError, STUCK};
use crate::measure::{now, own_cpu_seconds, pin, waited_seconds};
use clap::Args;
use manyring_driver::wire::net::{HDR_F_NEEDS_CSUM, HDR_GSO_NONE, HDR_GSO_TCPV4, RawNetHeader};
use manyring_driver::wire::virtio::VIRTIO_F_RING_PACKED;
use manyring_driver::{DriverError, NetDriver, NetDriverOptions};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Frames that are made available together.
const BURST: usize = 64;
/// Turns of both guests between two looks at the clock.
const TURNS: u32 = 16;
/// Longest frame that is no segment to be cut.
const FINISHED_MAX: usize = 1518;
/// Bytes of payload of each segment of a longer frame.
const PIECE: u16 = 1448;
/// Bytes of the Ethernet, IPv4 and TCP headers.
const HEADERS: usize = 54;
/// The link addresses of the guests.
pub(crate) const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
/// Entries of a ring; and of the ring of a guest that sends long frames: a guest whose memory goes
/// round through 64 MiB would measure the host's memory.
const RING: u16 = 1024;
const RING_LONG: u16 = 128;
/// Bytes of a receive buffer: where frames are finished, and of long frames, which have several.
const BUFFER: u32 = 1536;
const BUFFER_LONG: u32 = 4096;

/// `manyring-bench load vm ..`
#[derive(Args, Clone, Debug)]
pub(crate) struct VmLoadArgs {
    /// The back-end's socket of the guest that sends; none: copy in memory.
    #[arg(long, value_name = "PATH")]
    pub(crate) from: Option<PathBuf>,
    /// The socket of the guest that receives.
    #[arg(long, value_name = "PATH", requires = "from")]
    pub(crate) to: Option<PathBuf>,
    /// Bytes of a frame, 60 to 65000; longer than 1518: TCP that is still to be cut.
    #[arg(long, default_value_t = 64)]
    pub(crate) size: usize,
    /// Packed rings.
    #[arg(long)]
    pub(crate) packed: bool,
    /// How long, in seconds; fractions are fine.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) seconds: f64,
    /// Run on this CPU only.
    #[arg(long, value_name = "N")]
    pub(crate) cpu: Option<usize>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

impl VmLoadArgs {
    /// The arguments of `load vm` that give this again.
    pub(crate) fn arguments(&self) -> Vec<std::ffi::OsString> {
        let mut all = vec!["--json".into()];
        for (key, path) in [("--from", &self.from), ("--to", &self.to)] {
            if let Some(path) = path {
                all.extend([key.into(), path.into()]);
            }
        }
        all.push(format!("--size={}", self.size).into());
        all.push(format!("--seconds={}", self.seconds).into());
        if self.packed {
            all.push("--packed".into());
        }
        all
    }
}

/// Sends frames from one guest to the other, and counts what arrives.
///
/// # Errors
/// [`LoadError`]: a guest cannot connect, or no frame arrives.
pub(crate) fn run(args: &VmLoadArgs) -> Result<NetLoadResult, LoadError> {
    if !(60..=65_000).contains(&args.size) {
        return Err(LoadError::Options("frames of 60 to 65000 bytes"));
    }
    if let Some(cpu) = args.cpu {
        pin(cpu).map_err(|errno| LoadError::Cpu { cpu, errno })?;
    }
    let duration = Duration::try_from_secs_f64(args.seconds).unwrap_or_default();
    let (cpu, waited) = (own_cpu_seconds(), waited_seconds("thread-self"));
    let mut result = match (&args.from, &args.to) {
        (Some(from), Some(to)) => {
            let is_long = args.size > FINISHED_MAX;
            let mut from = connect(from, args, if is_long { RING_LONG } else { RING })?;
            let mut to = connect(to, args, RING)?;
            drive(&mut from, &mut to, args.size, duration)?
        }
        _ => copy(args.size, duration),
    };
    result.client_cpu_seconds = own_cpu_seconds() - cpu;
    result.waited_seconds = waited_seconds("thread-self") - waited;
    Ok(result)
}

fn result(packets: u64, size: usize, seconds: f64) -> NetLoadResult {
    NetLoadResult {
        packets,
        bytes: packets * size as u64,
        seconds,
        kicks: 0,
        calls: 0,
        bursts: 0,
        client_cpu_seconds: 0.0,
        waited_seconds: 0.0,
    }
}

fn connect(socket: &Path, args: &VmLoadArgs, queue_size: u16) -> Result<NetDriver, LoadError> {
    let size = u32::try_from(args.size).map_err(|_| LoadError::Options("size is too large"))?;
    let packed = if args.packed { VIRTIO_F_RING_PACKED } else { 0 };
    let unfinished = if args.size > FINISHED_MAX { NetDriverOptions::OFFLOADS } else { 0 };
    let options = NetDriverOptions {
        queue_size,
        features: NetDriverOptions::PLAIN | packed | unfinished,
        mergeable_size: if args.size > FINISHED_MAX { BUFFER_LONG } else { BUFFER },
        transmit_size: size + 12,
        ..NetDriverOptions::default()
    };
    let connected = NetDriver::connect(socket, &options);
    connected.map_err(|e| LoadError::Client { step: "connect", problem: e.to_string() })
}

fn failed(error: DriverError) -> LoadError {
    LoadError::Client { step: "frames", problem: error.to_string() }
}

/// A frame from one guest to the other: TCP over IPv4, with the header for its offloads.
fn frame(size: usize) -> (RawNetHeader, Vec<u8>) {
    let mut bytes = [&MACS[1][..], &MACS[0], &[8, 0, 0x45, 0]].concat();
    let packet = u16::try_from(size - 14).unwrap_or(u16::MAX);
    bytes.extend(packet.to_be_bytes());
    bytes.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    bytes.extend([0x9c, 0x40, 20, 81, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    bytes.resize(size, 0x5a);
    let is_cut = size > FINISHED_MAX;
    let header = RawNetHeader {
        flags: if is_cut { HDR_F_NEEDS_CSUM } else { 0 },
        gso_type: if is_cut { HDR_GSO_TCPV4 } else { HDR_GSO_NONE },
        hdr_len: u16::try_from(if is_cut { HEADERS } else { 0 }).unwrap_or(0).into(),
        gso_size: if is_cut { PIECE } else { 0 }.into(),
        csum_start: if is_cut { 34 } else { 0 }.into(),
        csum_offset: if is_cut { 16 } else { 0 }.into(),
        ..RawNetHeader::default()
    };
    (header, bytes)
}

/// Keeps both guests busy for `duration`.
fn drive(
    from: &mut NetDriver,
    to: &mut NetDriver,
    size: usize,
    duration: Duration,
) -> Result<NetLoadResult, LoadError> {
    greet(to, from).map_err(failed)?;
    let (header, bytes) = frame(size);
    let mut turn = || -> Result<usize, DriverError> {
        let tx = &mut from.pairs[0].tx;
        let mut count = 0;
        while count < BURST && tx.send(&header, &bytes)? {
            count += 1;
        }
        tx.publish(0)?;
        receive(to)
    };
    // The rings fill, and the back-end's policies settle.
    turns(&mut turn, now() + duration / 4).map_err(failed)?;
    let start = now();
    let packets = turns(&mut turn, start + duration).map_err(failed)?;
    let seconds = start.elapsed().as_secs_f64();
    if packets == 0 {
        return Err(LoadError::Stuck { in_flight: 1, seconds: duration.as_secs() });
    }
    let mut result = result(packets, size, seconds);
    let counters = from.pairs[0].tx.counters();
    (result.kicks, result.calls) = (counters.kicks, counters.calls);
    Ok(result)
}

/// Runs turns until `end`. Returns how many frames arrived.
fn turns(
    turn: &mut impl FnMut() -> Result<usize, DriverError>,
    end: Instant,
) -> Result<u64, DriverError> {
    let mut packets = 0;
    while now() < end {
        for _ in 0..TURNS {
            packets += turn()? as u64;
        }
    }
    Ok(packets)
}

/// Takes at most a burst of the frames that have arrived. Returns their number.
fn receive(to: &mut NetDriver) -> Result<usize, DriverError> {
    let rx = &mut to.pairs[0].rx;
    let mut count = 0;
    while count < BURST && rx.recv_slices()?.is_some() {
        count += 1;
    }
    if rx.spare_count() >= BURST / 2 {
        rx.refill()?;
    }
    Ok(count)
}

/// The receiver says where it is, so that its switch floods nothing; the sender hears it.
fn greet(to: &mut NetDriver, from: &mut NetDriver) -> Result<(), DriverError> {
    let mut hello = [&[0xff; 6][..], &MACS[1], &[0x88, 0xb5]].concat();
    hello.resize(60, 0);
    to.pairs[0].tx.send(&RawNetHeader::default(), &hello)?;
    to.pairs[0].tx.publish(0)?;
    let start = now();
    while receive(from)? == 0 {
        if start.elapsed() > STUCK {
            return Err(DriverError::Timeout);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Copies frames of `size` bytes in memory until `duration` has passed. It takes them in turn from
/// the number of buffers that a sending guest has, and writes them in turn to the number of bytes
/// that a receiving guest has.
fn copy(size: usize, duration: Duration) -> NetLoadResult {
    let targets = usize::from(RING) * BUFFER_LONG as usize;
    let source = vec![0x5a_u8; usize::from(RING_LONG) * size];
    let mut target = vec![0_u8; targets];
    let (start, mut packets) = (now(), 0);
    while start.elapsed() < duration {
        for (n, source) in source.chunks_exact(size).enumerate() {
            let at = n % (targets / size) * size;
            target[at..at + size].copy_from_slice(black_box(source));
            packets += 1;
        }
        black_box(&mut target);
    }
    result(packets, size, start.elapsed().as_secs_f64())
}
