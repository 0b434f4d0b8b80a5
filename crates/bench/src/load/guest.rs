//! One of the guests that share a daemon: three kinds behave well and are measured, four abuse it.
//!
//! A guest connects, begins its load, and says `ready` when something has come back. Each line of
//! its standard input is an order: the first one begins the measurement, the second one ends it.
//! The load runs before and in between alike, so that all guests of a daemon can be measured over
//! the same time, none of them beside neighbours that have not begun or have stopped.
//!
//! Guests on one CPU wait for each other, and a request that came back while its guest waited for
//! that CPU looks late; so does one whose worker was ready while the host ran another program. So a
//! guest asks the kernel how long its thread and the worker have waited (`schedstat`, run delay)
//! whenever it reads the clock, and reports latencies with that time and without it.

mod abuse;

use super::frame::{FRAME_MAX, FlowFrame, FlowKind};
use super::{LoadError, STUCK};
use crate::measure::{Latencies, MeasureTime, Random, RunDelay};
use abuse::{Giant, Kicker, Messenger};
use clap::{Args, ValueEnum};
use manyring_driver::wire::net::RawNetHeader;
use manyring_driver::{
    BlkDriver, BlkDriverOptions, BlkDriverQueue, Done, DriverError, DriverOp, NetDriver,
    NetDriverOptions, NetPair,
};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// The activity of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Deed {
    /// Random reads of `--size` bytes, `--depth` of them in flight.
    Read,
    /// `--depth` receive buffers with the device; each that holds a frame goes back to it.
    Receive,
    /// Frames of `--size` bytes, `--depth` of them with the device.
    Transmit,
    /// Abuse: kicks of every queue without end, few of them with a request.
    Kicks,
    /// Abuse: messages without end, which disable and enable a queue in turn.
    Messages,
    /// Abuse: the same from the begin of the measurement on, while the daemon reads them at once.
    FirstMessages,
    /// Abuse: requests of 1 GiB, eight in flight.
    Giants,
}

impl Deed {
    /// True of the guests that abuse their daemon.
    pub(crate) fn is_abuse(self) -> bool {
        matches!(self, Self::Kicks | Self::Messages | Self::FirstMessages | Self::Giants)
    }
}

/// `manyring-bench load guest ..`
#[derive(Args, Clone, Debug)]
pub(crate) struct GuestArgs {
    /// The back-end's socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: PathBuf,
    /// The activity of the guest.
    #[arg(long, value_enum)]
    pub(crate) deed: Deed,
    /// Requests in flight.
    #[arg(long, default_value_t = 1)]
    pub(crate) depth: u16,
    /// Bytes of a request or frame.
    #[arg(long, default_value_t = 4096)]
    pub(crate) size: u32,
    /// Process id of the back-end, whose one worker is watched.
    #[arg(long, value_name = "PID")]
    pub(crate) daemon: Option<u32>,
}

impl GuestArgs {
    /// The arguments of `load guest` that give this again.
    pub(crate) fn arguments(&self) -> Vec<std::ffi::OsString> {
        let deed = self.deed.to_possible_value();
        let deed = deed.as_ref().map_or("", |value| value.get_name());
        let mut arguments = vec![
            "--socket".into(),
            (&self.socket).into(),
            format!("--deed={deed}").into(),
            format!("--depth={}", self.depth).into(),
            format!("--size={}", self.size).into(),
        ];
        arguments.extend(self.daemon.map(|pid| format!("--daemon={pid}").into()));
        arguments
    }
}

/// The results of a guest over the measured time.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct GuestResult {
    /// Number of requests or frames that came back; for a flood, of kicks or messages sent.
    pub(crate) count: u64,
    /// Seconds that were measured.
    pub(crate) seconds: f64,
    /// Median latency, without the time that guest and worker waited for a CPU.
    pub(crate) p50_us: f64,
    /// 99th percentile of the latencies, without the time that guest and worker waited for a CPU.
    pub(crate) p99_us: f64,
    /// Largest latency, without the time that guest and worker waited for a CPU.
    pub(crate) max_us: f64,
    /// 99th percentile of the latencies by the clock.
    pub(crate) p99_clock_us: f64,
    /// Seconds that the guest's thread was ready to run and did not run.
    pub(crate) waited_seconds: f64,
}

/// A guest under load. A turn sleeps until something has come back, counts it, and submits as much
/// again.
trait Guest {
    fn turn(&mut self, watch: &mut Watch) -> Result<(), LoadError>;
}

/// Runs a guest until it is told to end.
///
/// # Errors
/// [`LoadError`] if the guest cannot connect, or if a request fails or does not come back.
pub(crate) fn run(args: &GuestArgs) -> Result<GuestResult, LoadError> {
    if args.depth == 0 || args.size == 0 {
        return Err(LoadError::Options("depth and size must not be 0"));
    }
    let mut watch = Watch::new();
    let mut guest: Box<dyn Guest> = match args.deed {
        Deed::Read => Box::new(Reader::connect(args)?),
        Deed::Receive => Box::new(Receiver::connect(args, &watch)?),
        Deed::Transmit => Box::new(FrameSender::connect(args)?),
        Deed::Kicks => Box::new(Kicker::connect(args)?),
        Deed::Messages | Deed::FirstMessages => Box::new(Messenger::connect(args)?),
        Deed::Giants => Box::new(Giant::connect(args)?),
    };
    let phase = listen()?;
    guest.turn(&mut watch)?;
    let mut out = std::io::stdout();
    if let Some(daemon) = args.daemon {
        watch.delay.add_worker(daemon);
    }
    let said = writeln!(out, "ready").and_then(|()| out.flush());
    said.map_err(|e| LoadError::Client { step: "ready", problem: e.to_string() })?;
    while watch.follow(phase.load(Ordering::Relaxed)) {
        guest.turn(&mut watch)?;
    }
    Ok(watch.result())
}

/// Phases of a guest after its warm-up: `MEASURED`, then `ENDED`.
const MEASURED: u8 = 1;
const ENDED: u8 = 2;

/// Starts a thread that reads orders and stores the phase. The end of its input ends the guest.
fn listen() -> Result<Arc<AtomicU8>, LoadError> {
    let phase = Arc::new(AtomicU8::new(0));
    let told = phase.clone();
    let listen = move || {
        let mut lines = std::io::stdin().lines();
        for order in [MEASURED, ENDED] {
            let is_told = matches!(lines.next(), Some(Ok(_)));
            told.store(if is_told { order } else { ENDED }, Ordering::Relaxed);
        }
    };
    let thread = std::thread::Builder::new().name("orders".into()).spawn(listen);
    thread.map_err(|e| LoadError::Client { step: "orders", problem: e.to_string() })?;
    Ok(phase)
}

/// The measurement of a guest: its clock, its counts and its latencies.
struct Watch {
    delay: RunDelay,
    now: MeasureTime,
    /// When the measurement began.
    began: Option<MeasureTime>,
    count: u64,
    /// Latencies without the run delays of this thread and of the worker; then those by the clock.
    latencies: Latencies,
    by_clock: Latencies,
}

impl Watch {
    fn new() -> Self {
        let delay = RunDelay::of_this_thread();
        let (now, latencies) = (delay.now(), Latencies::new());
        Self { delay, now, began: None, count: 0, by_clock: latencies.clone(), latencies }
    }

    /// Reads the clock, once for everything that came back together.
    fn tick(&mut self) -> MeasureTime {
        self.now = self.delay.now();
        self.now
    }

    /// Records that a request which was sent at `sent` is back now.
    fn is_back(&mut self, sent: MeasureTime) {
        if self.began.is_some() {
            self.count += 1;
            self.latencies.record(self.now.since_without_delay(sent));
            self.by_clock.record(self.now.since(sent));
        }
    }

    /// Counts events without a latency.
    fn add(&mut self, count: u64) {
        self.count += if self.began.is_some() { count } else { 0 };
    }

    /// Follows the phase: begins or ends the measurement. False: the guest ends.
    fn follow(&mut self, phase: u8) -> bool {
        if phase >= MEASURED && self.began.is_none() {
            self.began = Some(self.tick());
        }
        phase < ENDED
    }

    fn result(&mut self) -> GuestResult {
        let now = self.tick();
        let began = self.began.unwrap_or(now);
        GuestResult {
            count: self.count,
            seconds: now.since(began).as_secs_f64(),
            p50_us: self.latencies.quantile_us(0.5),
            p99_us: self.latencies.quantile_us(0.99),
            max_us: self.latencies.quantile_us(1.0),
            p99_clock_us: self.by_clock.quantile_us(0.99),
            waited_seconds: now.own_delay_since(began).as_secs_f64(),
        }
    }
}

fn failed(error: DriverError) -> LoadError {
    LoadError::Client { step: "guest", problem: error.to_string() }
}

/// Bytes of the disk that a guest reads from: for several guests, more than a cache holds.
const SPAN: u64 = 16 << 20;

/// A guest that reads at random.
struct Reader {
    queue: BlkDriverQueue,
    /// The session, which ends when this is dropped.
    _driver: BlkDriver,
    random: Random,
    size: u32,
    depth: u16,
    /// When each request was sent, by tag.
    sent: Vec<MeasureTime>,
}

impl Reader {
    fn connect(args: &GuestArgs) -> Result<Self, LoadError> {
        if !args.size.is_multiple_of(512) {
            return Err(LoadError::Options("size must be whole sectors of 512 bytes"));
        }
        let options = BlkDriverOptions {
            queue_size: args.depth.next_power_of_two().max(16),
            buffer_size: args.size,
            segment_size: args.size,
            ..BlkDriverOptions::default()
        };
        let mut driver = BlkDriver::connect(&args.socket, &options).map_err(failed)?;
        let queue = driver.queues.pop().ok_or(LoadError::Options("a disk without a queue"))?;
        let (size, depth, random) = (args.size, args.depth, Random::new(1));
        let mut reader = Self { queue, _driver: driver, random, size, depth, sent: Vec::new() };
        reader.fill()?;
        Ok(reader)
    }

    /// Writes all blocks that will be read. Pages that were never written all are the same zero
    /// page, which would always be in the cache.
    fn fill(&mut self) -> Result<(), LoadError> {
        let (mut sector, step) = (0, u64::from(self.size / 512));
        while sector < SPAN / 512 {
            let op = DriverOp::WriteAny { sector, len: self.size as usize };
            if self.queue.submit(op).map_err(failed)?.is_some() {
                sector += step;
                continue;
            }
            self.queue.publish().map_err(failed)?;
            self.drain()?;
        }
        self.queue.publish().map_err(failed)?;
        self.drain()
    }

    /// Waits for all requests in flight.
    fn drain(&mut self) -> Result<(), LoadError> {
        while self.queue.in_flight() > 0 {
            check(self.queue.wait(STUCK).map_err(failed)?)?;
        }
        Ok(())
    }

    fn submit(&mut self, now: MeasureTime) -> Result<(), LoadError> {
        let sector = self.random.below(SPAN / u64::from(self.size)) * u64::from(self.size / 512);
        let op = DriverOp::Read { sector, len: self.size as usize };
        let tag = self.queue.submit(op).map_err(failed)?;
        let tag = usize::from(tag.ok_or(LoadError::Options("depth exceeds the ring"))?);
        if self.sent.len() <= tag {
            self.sent.resize(tag + 1, now);
        }
        self.sent[tag] = now;
        Ok(())
    }
}

impl Guest for Reader {
    fn turn(&mut self, watch: &mut Watch) -> Result<(), LoadError> {
        if self.queue.in_flight() == 0 {
            let now = watch.tick();
            (0..self.depth).try_for_each(|_| self.submit(now))?;
            self.queue.publish().map_err(failed)?;
        }
        let mut next = Some(self.queue.wait(STUCK).map_err(failed)?);
        let now = watch.tick();
        while let Some(done) = next {
            check(done)?;
            watch.is_back(self.sent[usize::from(done.tag)]);
            self.submit(now)?;
            next = self.queue.take();
        }
        self.queue.publish().map_err(failed)?;
        Ok(())
    }
}

fn check(done: Done) -> Result<(), LoadError> {
    let failure = LoadError::Requests { failed: 1, errno: rustix::io::Errno::IO };
    if done.status == 0 { Ok(()) } else { Err(failure) }
}

fn connect_net(args: &GuestArgs, queue_size: u16) -> Result<NetDriver, LoadError> {
    let options = NetDriverOptions {
        queue_size,
        features: NetDriverOptions::PLAIN,
        ..NetDriverOptions::default()
    };
    NetDriver::connect(&args.socket, &options).map_err(failed)
}

fn first_pair(driver: &mut NetDriver) -> Result<&mut NetPair, LoadError> {
    driver.pairs.first_mut().ok_or(LoadError::Options("a network device without a pair"))
}

/// A guest that receives. It counts as a request the time in which the device has one buffer.
struct Receiver {
    driver: NetDriver,
    /// When each buffer was given to the device, the oldest first.
    given: VecDeque<MeasureTime>,
}

impl Receiver {
    fn connect(args: &GuestArgs, watch: &Watch) -> Result<Self, LoadError> {
        let depth = args.depth.next_power_of_two();
        let driver = connect_net(args, depth)?;
        Ok(Self { driver, given: vec![watch.now; depth.into()].into() })
    }
}

impl Guest for Receiver {
    fn turn(&mut self, watch: &mut Watch) -> Result<(), LoadError> {
        let rx = &mut first_pair(&mut self.driver)?.rx;
        rx.wait(STUCK).map_err(failed)?;
        let (now, mut count) = (watch.tick(), 0);
        while rx.recv_slices().map_err(failed)?.is_some() {
            watch.is_back(self.given.pop_front().unwrap_or(now));
            count += 1;
        }
        rx.refill().map_err(failed)?;
        self.given.extend((0..count).map(|_| now));
        Ok(())
    }
}

/// A guest that sends. It counts as a request the time from a frame's send until its buffer is
/// free.
struct FrameSender {
    driver: NetDriver,
    frame: FlowFrame,
    depth: usize,
    /// When each frame was sent, the oldest first.
    sent: VecDeque<MeasureTime>,
}

impl FrameSender {
    fn connect(args: &GuestArgs) -> Result<Self, LoadError> {
        let size = args.size as usize;
        if !(FlowFrame::SIZE_MIN..=FRAME_MAX).contains(&size) {
            return Err(LoadError::Options("frames of 42 to 1500 bytes"));
        }
        // The ring never gets half full, so the driver frees buffers only when it is asked to.
        let driver = connect_net(args, args.depth.next_power_of_two().saturating_mul(4))?;
        let (frame, depth) = (FlowFrame::new(FlowKind::Apart, size), args.depth.into());
        Ok(Self { driver, frame, depth, sent: VecDeque::new() })
    }
}

impl Guest for FrameSender {
    fn turn(&mut self, watch: &mut Watch) -> Result<(), LoadError> {
        let tx = &mut first_pair(&mut self.driver)?.tx;
        if !self.sent.is_empty() {
            tx.wait_sent(STUCK).map_err(failed)?;
        }
        let now = watch.tick();
        for sent in self.sent.drain(..self.sent.len() - tx.in_flight()) {
            watch.is_back(sent);
        }
        while self.sent.len() < self.depth {
            if !tx.send(&RawNetHeader::default(), self.frame.next()).map_err(failed)? {
                return Err(LoadError::Options("depth exceeds the ring"));
            }
            self.sent.push_back(now);
        }
        tx.publish(0).map_err(failed)?;
        Ok(())
    }
}
