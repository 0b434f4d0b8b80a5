//! Frames through a vhost-user-net back-end by our own driver half: one thread polls all pairs.

use super::frame::{FRAME_MAX, FlowFrame, FlowKind};
use super::{LoadError, STUCK, print_json};
use crate::direction::Direction;
use crate::measure::{now, own_cpu_seconds, pin, waited_seconds};
use clap::Args;
use manyring_driver::wire::net::VIRTIO_NET_F_CSUM;
use manyring_driver::{DriverError, NetCounters, NetDriver, NetDriverOptions, NetPair};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Most frames of one turn of a queue, by default.
const BURST: usize = 64;
/// Turns between two looks at the clock.
const TURNS: u32 = 64;

/// `manyring-bench load net ..`
#[derive(Args, Clone, Debug)]
pub(crate) struct NetLoadArgs {
    /// The back-end's socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: PathBuf,
    /// Queue pairs to drive.
    #[arg(long, default_value_t = 1)]
    pub(crate) queue_pairs: u16,
    /// Entries of a ring.
    #[arg(long, default_value_t = 1024)]
    pub(crate) queue_size: u16,
    /// Frames that are made available at once.
    #[arg(long, value_name = "N", default_value_t = BURST)]
    pub(crate) burst: usize,
    /// Which way the frames go.
    #[arg(long, value_enum, default_value_t = Direction::Transmit)]
    pub(crate) direction: Direction,
    /// Bytes of a frame that is sent.
    #[arg(long, default_value_t = 64)]
    pub(crate) size: usize,
    /// The flows that the frames which are sent belong to.
    #[arg(long, value_enum, default_value_t = FlowKind::Apart)]
    pub(crate) flow: FlowKind,
    /// Sleep when there is nothing to do, instead of polling (one pair).
    #[arg(long)]
    pub(crate) sleep: bool,
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

impl NetLoadArgs {
    /// A polling load of this many seconds.
    pub(crate) fn new(
        socket: PathBuf,
        direction: Direction,
        queue_pairs: u16,
        seconds: f64,
    ) -> Self {
        let (queue_size, size, sleep) = (1024, 64, false);
        Self {
            socket,
            queue_pairs,
            queue_size,
            burst: BURST,
            direction,
            size,
            flow: FlowKind::Apart,
            sleep,
            seconds,
            cpu: None,
            json: true,
        }
    }

    /// The arguments of `load net` that give this again.
    pub(crate) fn arguments(&self) -> Vec<std::ffi::OsString> {
        let mut arguments = vec!["--json".into(), "--socket".into(), (&self.socket).into()];
        let mut add = |text: String| arguments.push(text.into());
        add(format!("--queue-pairs={}", self.queue_pairs));
        add(format!("--queue-size={}", self.queue_size));
        add(format!("--burst={}", self.burst));
        add(format!("--direction={}", self.direction.word()));
        add(format!("--size={}", self.size));
        add(format!("--flow={}", self.flow.word()));
        add(format!("--seconds={}", self.seconds));
        if self.sleep {
            add("--sleep".to_owned());
        }
        arguments
    }
}

/// The results of a load of frames: counts, CPU time and notifications.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct NetLoadResult {
    /// Number of frames that the device has taken or delivered.
    pub(crate) packets: u64,
    /// Bytes of these frames.
    pub(crate) bytes: u64,
    /// Seconds that were measured.
    pub(crate) seconds: f64,
    /// Kicks sent, including those for refilled receive buffers.
    pub(crate) kicks: u64,
    /// Calls seen.
    pub(crate) calls: u64,
    /// How many times frames or buffers were made available.
    pub(crate) bursts: u64,
    /// CPU seconds that this process used.
    pub(crate) client_cpu_seconds: f64,
    /// Seconds that it was ready to run while another program ran.
    pub(crate) waited_seconds: f64,
}

impl NetLoadResult {
    /// Prints one line.
    pub(crate) fn print(&self, json: bool) -> Result<(), String> {
        if json {
            print_json(self)?;
        } else {
            println!(
                "{:.3} Mpps ({} frames, {} bytes in {:.3} s, {} bursts, {} kicks, {} calls, \
                 client CPU {:.3} s)",
                super::measure_rate(self.packets, self.seconds) / 1e6,
                self.packets,
                self.bytes,
                self.seconds,
                self.bursts,
                self.kicks,
                self.calls,
                self.client_cpu_seconds,
            );
        }
        Ok(())
    }
}

/// Drives the back-end behind the socket.
///
/// # Errors
/// [`LoadError`] if the client cannot connect, or if no frame gets through.
pub(crate) fn run(args: &NetLoadArgs) -> Result<NetLoadResult, LoadError> {
    if args.queue_pairs == 0 || args.size < FlowFrame::SIZE_MIN || args.size > FRAME_MAX {
        return Err(LoadError::Options("queue pairs from 1, frames of 55 to 1500 bytes"));
    }
    if args.burst == 0 || args.burst > usize::from(args.queue_size) {
        return Err(LoadError::Options("bursts of 1 to as many frames as a ring has entries"));
    }
    if let Some(cpu) = args.cpu {
        pin(cpu).map_err(|errno| LoadError::Cpu { cpu, errno })?;
    }
    let mut driver = connect(args)?;
    let mut pairs = std::mem::take(&mut driver.pairs);
    let duration = Duration::try_from_secs_f64(args.seconds).unwrap_or_default();
    let (cpu, waited, start) = (own_cpu_seconds(), waited_seconds("thread-self"), now());
    let last = drive(&mut pairs, args, start + duration).map_err(failed)?;
    let seconds = (last - start).as_secs_f64();
    let mut result = NetLoadResult {
        packets: 0,
        bytes: 0,
        seconds,
        kicks: 0,
        calls: 0,
        bursts: 0,
        client_cpu_seconds: own_cpu_seconds() - cpu,
        waited_seconds: waited_seconds("thread-self") - waited,
    };
    for pair in &mut pairs {
        let (counters, in_flight) = match args.direction {
            Direction::Transmit => (pair.tx.counters(), pair.tx.in_flight() as u64),
            Direction::Receive => (pair.rx.counters(), 0),
        };
        add(&mut result, &counters, in_flight);
    }
    if result.packets == 0 {
        return Err(LoadError::Stuck { in_flight: pairs.len(), seconds: duration.as_secs() });
    }
    Ok(result)
}

/// Adds the counters of a queue, without the frames that are still in flight.
fn add(result: &mut NetLoadResult, counters: &NetCounters, in_flight: u64) {
    let packets = counters.packets.saturating_sub(in_flight);
    result.packets += packets;
    result.bytes += counters.bytes / counters.packets.max(1) * packets;
    result.kicks += counters.kicks;
    result.calls += counters.calls;
    result.bursts += counters.kicks + counters.kicks_suppressed;
}

fn failed(error: DriverError) -> LoadError {
    LoadError::Client { step: "frames", problem: error.to_string() }
}

fn connect(args: &NetLoadArgs) -> Result<NetDriver, LoadError> {
    let size = u32::try_from(args.size).map_err(|_| LoadError::Options("size is too large"))?;
    let unfinished = if args.flow == FlowKind::Apart { 0 } else { VIRTIO_NET_F_CSUM };
    let options = NetDriverOptions {
        queue_pairs: args.queue_pairs,
        queue_size: args.queue_size,
        features: NetDriverOptions::PLAIN | unfinished,
        // Buffers lie close together, as a guest's do that sends small frames.
        transmit_size: size + 12,
        ..NetDriverOptions::default()
    };
    let connected = NetDriver::connect(&args.socket, &options);
    connected.map_err(|e| LoadError::Client { step: "connect", problem: e.to_string() })
}

/// Keeps all pairs busy until `end`. Returns when it stopped.
fn drive(pairs: &mut [NetPair], args: &NetLoadArgs, end: Instant) -> Result<Instant, DriverError> {
    let mut frame = FlowFrame::new(args.flow, args.size);
    loop {
        for _ in 0..TURNS {
            let mut moved = 0;
            for pair in &mut *pairs {
                moved += match args.direction {
                    Direction::Transmit => transmit(pair, &mut frame, args.burst)?,
                    Direction::Receive => receive(pair, args.burst)?,
                };
            }
            if moved == 0 && args.sleep {
                sleep(pairs, args.direction, end)?;
            }
        }
        let at = now();
        if at >= end {
            pairs.iter_mut().for_each(|pair| _ = pair.tx.reclaim());
            return Ok(at);
        }
    }
}

#[inline]
fn transmit(pair: &mut NetPair, frame: &mut FlowFrame, burst: usize) -> Result<usize, DriverError> {
    let header = frame.header();
    let mut count = 0;
    while count < burst && pair.tx.send(&header, frame.next())? {
        count += 1;
    }
    pair.tx.publish(0)?;
    Ok(count)
}

#[inline]
fn receive(pair: &mut NetPair, burst: usize) -> Result<usize, DriverError> {
    let mut count = 0;
    while count < burst && pair.rx.recv_slices()?.is_some() {
        count += 1;
    }
    // Not for each frame: as Linux and DPDK do, half a burst at a time.
    let due = (burst / 2).min(usize::from(pair.rx.vring().size()) / 2);
    if pair.rx.spare_count() >= due {
        pair.rx.refill()?;
    }
    Ok(count)
}

/// Sleeps until the first pair has something to do, or until the end.
fn sleep(pairs: &mut [NetPair], way: Direction, end: Instant) -> Result<(), DriverError> {
    let left = end.saturating_duration_since(now()).min(STUCK);
    let Some(pair) = pairs.first_mut() else { return Ok(()) };
    let slept = match way {
        Direction::Transmit => pair.tx.wait_sent(left).map(|_| ()),
        Direction::Receive => pair.rx.wait(left),
    };
    match slept {
        Err(DriverError::Timeout) => Ok(()),
        result => result,
    }
}
